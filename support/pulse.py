"""How far the work is between two records of a run: what shows progress looks here, nothing else.

Runs only add to these numbers. They change no result, so no run has to hand them on.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from bisslight import Batch


class Pulse:
    """What this process has worked through since it began."""

    def __init__(self) -> None:
        self.units = 0.0  # epochs or alternations; a batch is a share of one
        self.images = 0  # that were trained on
        self.scored = 0  # images of the split that is being scored
        self.doing = ""  # such as "validating 480 images"
        self.validation: float | None = None  # the latest accuracy in percent

    def count(self, batches: Iterable[Batch], per_unit: int) -> Iterator[Batch]:
        """Hand batches on and count them; `per_unit` of them are an epoch or alternation."""
        for batch in batches:
            # When it begins: the last batch of an epoch is counted before the epoch is reported.
            self.images += len(batch[0])
            self.units += 1 / per_unit
            yield batch

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
