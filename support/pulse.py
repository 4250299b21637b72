"""How far the work is between two records of a run: what shows progress looks here, nothing else.

Runs only tell this what they do. It changes no result, so no run has to hand it on.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from bisslight import Batch


def ignore(images: int, share: float) -> None:
    """What is done with a batch where no progress is shown."""


class Pulse:
    """What this process is at."""

    def __init__(self) -> None:
        # Called after each batch, with its images and its share of an epoch or alternation.
        self.advance: Callable[[int, float], None] = ignore
        self.scored = 0  # images of the split that is being scored
        self.doing = ""  # such as "validating 480 images"
        self.validation: float | None = None  # the latest accuracy in percent

    def count(self, batches: Iterable[Batch], per_unit: int) -> Iterator[Batch]:
        """Hand batches on and count them; `per_unit` of them are an epoch or alternation."""
        for batch in batches:
            yield batch
            self.advance(len(batch[0]), 1 / per_unit)

    @contextmanager
    def scoring(self, what: str) -> Iterator[None]:
        """Say that images are being scored, while they are."""
        self.doing = what
        self.scored = 0
        try:
            yield
        finally:
            self.doing = ""


pulse = Pulse()
