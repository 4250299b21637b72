"""What progress knows of a loop: how far it is, and the time that is left."""

from collections.abc import Iterator

from support.optim import TrainRecord
from support.progress import Bars


class Clock:
    """A time in seconds that a test sets."""

    now = 100.0

    def bars(self, on_terminal: bool) -> Bars:
        """Bars that read this time."""
        bars = Bars(on_terminal)
        bars.get_time = lambda: self.now
        return bars

    def epochs(self, first: int, last: int) -> Iterator[TrainRecord]:
        """Epochs of ten seconds each."""
        for number in range(first, last + 1):
            self.now += 10
            yield TrainRecord(number, 0.5)


def test_the_time_left_follows_from_the_work_of_this_process() -> None:
    """Two of eight epochs were done before: after each other one, so many seconds are left."""
    clock = Clock()
    lines = clock.bars(False)
    left = [lines.tasks[0].time_remaining for _ in lines(clock.epochs(3, 8), 8, "lr 0.1", 2)]
    assert left == [50, 40, 30, 20, 10, 0]
