"""Progress: a line for each unit in a file or pipe, bars on a terminal; both are a `Track`.

A unit is an epoch, an alternation or a whole run. A loop over runs holds the loops of these runs,
and on a terminal its bar is above theirs.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import fmean
from typing import TypeVar

from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from config import Record
from support.processes import stop
from support.pulse import pulse
from support.runs import Track, untracked
from support.screen import Notes, is_first_process, tell

T = TypeVar("T")


class Loop:
    """A loop that is under way: how far it is, and when it began."""

    def __init__(self, label: str, total: int, done: int) -> None:
        self.label = label
        self.total = total
        self.number = done  # units that are finished
        self.first = float(done)  # where this process began; an earlier one did what is before
        self.is_of_runs = False  # known with its first unit
        self.latest: Record = {}  # the latest numbers, for `summarise`
        self.text = ""
        self.started = time.monotonic()
        self.images_before = pulse.images
        self.units_before = pulse.units

    @property
    def unit(self) -> str:
        """What a unit is called."""
        if self.label == "align":
            return "alternation"
        if self.label == "pretrain":  # an epoch, or 500 steps of a long one
            return "part"
        return "epoch"

    def finish(self, item: object) -> None:
        """Count a unit."""
        # Epochs and alternations come as named tuples, the results of runs do not.
        self.is_of_runs = not isinstance(item, tuple)
        self.number += 1
        self.text = summarise(item, self.latest)
        self.units_before = pulse.units

    def __str__(self) -> str:
        return f"{self.label} {self.number}/{self.total}  {self.text}"


class Lines:
    """A line for each unit, with the time that is left."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []  # under way, the outermost first
        self.lock = threading.RLock()  # a thread draws while loops begin and end
        stop.when = self.time_of_stop

    def __call__(self, items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        """Hand the items on and show each."""
        loop = Loop(label, total, done)
        for outer in self.loops:  # a run that goes on had done this part of a unit already
            outer.first += done / total
        with self.lock:
            self.loops.append(loop)
        pulse.validation = None
        try:
            for item in items:
                loop.finish(item)
                self.show(loop)
                yield item
            self.end(loop)
        finally:
            with self.lock:
                self.loops.remove(loop)

    def show(self, loop: Loop) -> None:
        """Show that a unit is finished."""
        tell(f"{loop}  ETA {self.time_left(loop)}", sys.stderr)

    def end(self, loop: Loop) -> None:
        """Show that a loop is finished."""

    def position(self, loop: Loop) -> float:
        """How many units a loop is through, with the part of the one that is under way."""
        inner = self.loops[self.loops.index(loop) + 1 :]
        if inner:
            part = self.position(inner[0]) / inner[0].total
        else:
            part = pulse.units - loop.units_before
        return min(loop.number + min(part, 1.0), loop.total)

    def seconds_each(self, loop: Loop) -> float | None:
        """How long a unit takes; None until one of the innermost loop is finished."""
        innermost = self.loops[-1]
        if max(loop.number - loop.first, innermost.number - innermost.first) <= 0:
            return None
        done_here = self.position(loop) - loop.first
        return (time.monotonic() - loop.started) / max(done_here, 1e-9)

    def time_left(self, loop: Loop) -> str:
        """The time that a loop still needs, such as 0:04:10; nothing while it is not known."""
        seconds_each = self.seconds_each(loop)
        if seconds_each is None:
            return ""
        seconds = seconds_each * (loop.total - self.position(loop))
        return str(timedelta(seconds=round(seconds)))

    def time_of_stop(self) -> str:
        """When a stop takes effect that is asked for now."""
        if not self.loops:
            return "as soon as this can be saved"
        loop = self.loops[-1]
        if loop.is_of_runs:  # they are in other processes
            return "after their epochs or alternations"
        seconds_each = self.seconds_each(loop)
        if seconds_each is None:
            return f"after this {loop.unit}"
        seconds = seconds_each * (1 - self.position(loop) % 1)
        when = f"about {seconds:.0f} s" if seconds >= 1 else "in a moment"
        return f"after this {loop.unit} ({when})"


class Bars(Lines):
    """A bar for the whole command above that of the run, redrawn while the work goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(stderr=True, highlight=False)
        self.live = Live(console=self.console, get_renderable=self.draw, transient=True)

    def show(self, loop: Loop) -> None:
        """Leave a line for a finished run; `draw` sees the rest by itself."""
        if loop.is_of_runs:
            self.console.print(str(loop), markup=False)

    def end(self, loop: Loop) -> None:
        """Leave a line for a loop that is no part of another one."""
        if len(self.loops) == 1 and not loop.is_of_runs:
            self.console.print(str(loop), markup=False)

    def draw(self) -> RenderableType:
        """What the terminal shows now."""
        table = Table.grid(Column(), Column(ratio=1), Column(), Column(), padding=(0, 1))
        table.expand = True
        with self.lock:
            for loop in self.loops:
                table.add_row(*self.cells(loop))
            work = self.describe_work()
        lines: list[RenderableType] = [table, Text(work, style="dim")]
        if stop.flag.value:
            lines.append(Text(stop.notice(), style="bold"))
        return Group(*lines)

    def cells(self, loop: Loop) -> list[RenderableType]:
        """What a loop is, its bar, how far it is, and the time that is left."""
        bar = ProgressBar(loop.total, self.position(loop))
        left = self.time_left(loop)
        if left:
            left = f"{left} left"
        is_outer = loop is not self.loops[-1]
        if is_outer or loop.is_of_runs:
            number = min(loop.number + 1, loop.total)
            return [f"{loop.label} {number} of {loop.total}", bar, "", left]
        return [loop.label, bar, f"{loop.unit} {loop.number}/{loop.total}", left]

    def describe_work(self) -> str:
        """What the innermost loop is at: its latest losses, validation and images a second."""
        words = []
        if self.loops:
            loop = self.loops[-1]
            words.append(loop.text)
            rate = (pulse.images - loop.images_before) / (time.monotonic() - loop.started)
            if rate:
                words.append(f"{rate:,.0f} images/s")
        if pulse.validation is not None:
            words.append(f"val {pulse.validation:.1f} %")
        if pulse.doing:
            words.append(f"{pulse.doing}: {pulse.scored:,}")
        return "  ".join(word for word in words if word)


@contextmanager
def progress(quiet: bool) -> Iterator[Track]:
    """Progress on stderr while the block runs: bars on a terminal, elsewhere a line for each unit.

    A signal to stop is answered by whatever shows progress.
    """
    is_first = is_first_process()
    quiet = quiet or not is_first
    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [Notes()]
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    stop.answers = is_first and (quiet or not on_terminal)  # bars answer by themselves
    if quiet:
        yield untracked
    elif on_terminal:
        bars = Bars()
        with bars.live:
            yield bars
        bars.console.print()  # a blank line before the answer
    else:
        yield Lines()


def summarise(item: object, latest: Record) -> str:
    """An item in a few words: a text as it is, of a record its rate, losses and validation.

    `latest` keeps a loop's latest numbers, since not every record has a validation.

    >>> summarise({"loss_P": [1.0, 3.0], "loss_D_at_D": [1.5], "val_P": {"accuracy": 50.0}}, {})
    'loss P 2  D 1.5  val 50.0 %'
    >>> summarise({"lr": 0.01, "seed": 1, "val": {"accuracy": 50.0}, "epoch": 4}, {})
    'rate 0.01  seed 1  val 50.0 %  in epoch 4'
    """
    record = as_record(item)
    if record is None:
        return str(item)
    if "step" in record:
        measured = {key: value for key, value in record.items() if value}
        latest.update(measured)
        record = latest
    words = []
    if "seed" in record:  # a finished run
        words += [f"rate {record['lr']:g}", f"seed {record['seed']}"]
        if record.get("diverged"):
            words.append("diverged")
    for key, name in (("loss", "loss"), ("loss_P", "loss P"), ("loss_D_at_D", "D")):
        value = record.get(key)
        if value:
            numbers = value if isinstance(value, list) else [value]
            words.append(f"{name} {fmean(numbers):.4g}")
    score = record.get("val_P") or record.get("val")  # align's, or finetune's
    if score:
        words.append(f"val {score['accuracy']:.1f} %")
    if record.get("epoch"):
        words.append(f"in epoch {record['epoch']}")
    return "  ".join(words)


def as_record(item: object) -> Record | None:
    """The fields of a model, of a named tuple or of a dict; None for anything else."""
    if isinstance(item, BaseModel):
        return item.model_dump()
    as_dict = getattr(item, "_asdict", None)  # a method of every named tuple
    if as_dict is not None:
        return dict(as_dict())
    if isinstance(item, dict):
        return item
    return None
