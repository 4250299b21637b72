"""A stop that was asked for by a signal: kept while a loop is at work, which ends after its step. No torch here."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

LEFT = "stopped; align, pretrain, finetune and sweep that have begun go on with --resume"
NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")  # Ctrl-C, and what schedulers send before they kill


class Stopped(BaseException):
    """A stop that was asked for, after the step was finished and saved. Not an Exception: no handler eats it."""

    def __init__(self, number: int, where: str) -> None:
        super().__init__(number, where)
        self.number, self.where = number, where


class Signals:
    """What arrived.

    While a loop listens, the first one is kept until the loop has finished its step; a second one leaves at once, as
    any does where nothing listens. Not by an exception: one that is raised in the middle of an import or of a library's
    callback can be lost there.
    """

    def __init__(self) -> None:
        self.asked, self.loops = 0, 0
        self.forward: Callable[[int], None] = lambda number: None  # to worker processes
        self.patient = False  # a worker process: its parent knows when to leave at once

    def install(self) -> None:
        """Take over this process's signals; for programs, not for libraries."""
        for number in numbers():
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        if self.loops and not self.asked:
            self.asked = number
            self.forward(number)
        elif self.patient:
            self.asked = self.asked or number
        else:
            leave(number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A loop is at work that asks `asked` after each step. What came too late for it is for the next one."""
        self.loops += 1
        try:
            yield
        except Stopped:
            self.asked = self.asked if self.patient else 0
            raise
        finally:
            self.loops -= 1


being_written: set[Path] = set()  # temporary files, which nobody wants after a sudden end


def leave(number: int) -> None:
    """End this process here and now, with a line, and with the cursor that a progress bar has hidden."""
    for path in list(being_written):
        path.unlink(missing_ok=True)
    os.write(2, (("\x1b[?25h" if os.isatty(2) else "") + LEFT + "\n").encode())
    os._exit(128 + number)


signals = Signals()


@contextmanager
def held_back() -> Iterator[None]:
    """Signals wait; so they do in processes that are started here, until these `let_in`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def let_in() -> None:
    """What was held back arrives."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers())


def numbers() -> list[signal.Signals]:
    return [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


def end_with_parent() -> None:
    """From here on this process ends when its parent has, however that came: nobody writes into a run unasked."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def only_the_parent_decides() -> None:
    """For worker processes that load data: a terminal or a scheduler signals them too, but they end with their loop."""
    for number in numbers():
        signal.signal(number, signal.SIG_IGN)
