"""Program: bars on a terminal; in a file or a pipe, a line for each unit.

A unit is an epoch, an alternation or a whole run. A loop over runs and the loop within the run that
is under way have a bar each.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import fmean
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from bisslight import Log
from support.processes import stop
from support.runs import Track, untracked
from support.screen import Notes, is_first_process, tell

T = TypeVar("T")


class Speed(ProgressColumn):
    """How long a unit takes."""

    def render(self, task: Task) -> Text:
        """Such as "2.31 s each"; nothing before the first one is done."""
        return Text(f"{1 / task.speed:.3g} s each" if task.speed else "")


class Bars(Progress):
    """Shows the loops under way; a `Track`. rich calls a loop a task."""

    def __init__(self, on_terminal: bool) -> None:
        super().__init__(
            "{task.description}",
            BarColumn(None),
            MofNCompleteColumn(),
            Speed(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            "left",
            console=Console(stderr=True, highlight=False),
            speed_estimate_period=3600,  # longer than any unit: rich needs two of them
            transient=True,
            disable=not on_terminal,
            expand=True,
        )

    def __call__(self, items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        """Hand the items on, and show each one when it is done."""
        is_outermost = not self.tasks
        task_id = self.add_task(label, total=total, completed=done, text="")
        self.advance(task_id, 0)  # the speed is measured from here on
        task = self.tasks[-1]
        try:
            for number, item in enumerate(items, done + 1):
                self.advance(task_id)
                task.fields["text"] = summarise(item)
                line = f"{label} {number}/{total}  {summarise(item)}"
                is_all_done = is_outermost and number == total
                if self.disable:
                    left = timedelta(seconds=round(task.time_remaining or 0))
                    tell(f"{line}  ETA {left}", sys.stderr)
                elif label == "run" or is_all_done:  # what stays on a terminal
                    tell(line, sys.stderr)
                yield item
        finally:
            self.remove_task(task_id)

    def get_renderables(self) -> Iterator[RenderableType]:
        """What the terminal shows: the bars, what the innermost loop says, a stop asked for."""
        yield self.make_tasks_table(self.tasks)
        if self.tasks:
            yield Text(self.tasks[-1].fields["text"], style="dim")
        if stop.flag.value:
            yield Text(stop.notice(), style="bold")


@contextmanager
def progress(quiet: bool) -> Iterator[Track]:
    """Show progress on stderr while the block runs, unless `quiet`."""
    is_first = is_first_process()
    quiet = quiet or not is_first
    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [Notes()]
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    # A signal to stop is answered by the bars, or by `stop` itself where there are none.
    stop.answers = is_first and (quiet or not on_terminal)
    if quiet:
        yield untracked
    elif on_terminal:
        with Bars(on_terminal) as bars:
            yield bars
        tell("", sys.stderr)  # a blank line before the answer
    else:
        yield Bars(on_terminal)


def summarise(item: object) -> str:
    """A finished unit in a few words: for an alternation the losses of both levels."""
    if not isinstance(item, Log):
        return str(item)  # epochs and runs say it themselves
    words = f"loss P {fmean(item.loss_P):.4g}"
    if item.loss_D_at_D:  # with --upper-steps 0 there are none
        words += f"  D {fmean(item.loss_D_at_D):.4g}"
    return words
