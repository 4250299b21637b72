"""Program: progress on stderr: bars on a terminal; in a file or a pipe, a line for each unit.

A unit is an epoch, an alternation or a whole run. A loop over runs has a bar, and so has the loop
over the epochs or alternations of the run that is under way.
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
from support.screen import Notes, is_first_process, print_line

T = TypeVar("T")


class Speed(ProgressColumn):
    """The part of a bar that says how long a unit takes."""

    def render(self, task: Task) -> Text:
        """Return such as "2.31 s each", or an empty text before the first unit is done."""
        return Text(f"{1 / task.speed:.3g} s each" if task.speed else "")


class Bars(Progress):
    """Shows the loops under way, each of which rich calls a task. A `Track`: call it with a loop.

    Without a terminal it draws no bars, and prints a line for each unit.
    """

    def __init__(self, on_terminal: bool) -> None:
        super().__init__(
            "{task.description}",
            BarColumn(bar_width=None),  # as wide as there is room
            MofNCompleteColumn(),
            Speed(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            "left",  # the word after the remaining time
            console=Console(stderr=True, highlight=False),
            # In seconds. rich measures the speed over units in this time, and needs two of them.
            speed_estimate_period=3600,
            transient=True,  # a bar disappears once its loop is done
            disable=not on_terminal,
            expand=True,
        )

    def __call__(self, items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        """Yield the items unchanged, and show each one when it is done.

        They are number `done` + 1 to `total` of the loop that `label` names, such as "align". A
        unit runs when its item is asked for, so it is done when the item arrives here.
        """
        is_outermost = not self.tasks
        task_id = self.add_task(label, total=total, completed=done, text="")
        self.advance(task_id, advance=0)  # starts the clock from which the speed is measured
        task = self.tasks[-1]
        try:
            for number, item in enumerate(items, start=done + 1):
                self.advance(task_id)
                task.fields["text"] = describe_unit(item)
                line = f"{label} {number}/{total}  {describe_unit(item)}"
                is_all_done = is_outermost and number == total
                if self.disable:  # no terminal
                    left = timedelta(seconds=round(task.time_remaining or 0))
                    print_line(f"{line}  ETA {left}", sys.stderr)
                elif label == "run" or is_all_done:  # a line that stays, above the bars
                    print_line(line, sys.stderr)
                yield item
        finally:
            self.remove_task(task_id)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield what rich draws: the bars, the last unit of the innermost loop, a stop notice."""
        yield self.make_tasks_table(self.tasks)
        if self.tasks:
            yield Text(self.tasks[-1].fields["text"], style="dim")
        if stop.flag.value:  # a signal, such as Ctrl-C, was heard
            yield Text(stop.notice(), style="bold")


@contextmanager
def show_progress(quiet: bool) -> Iterator[Track]:
    """Show progress on stderr while the block runs, unless `quiet`; yield what shows it.

    The program's log is printed, too: warnings alone where progress is not shown.
    """
    is_first = is_first_process()
    shows_nothing = quiet or not is_first
    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if shows_nothing else logging.INFO)
    log.handlers = [Notes()]
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    # The notice after a signal stands below the bars. Where there are none, `stop` prints it.
    stop.prints_notice = is_first and (quiet or not on_terminal)
    if shows_nothing:
        yield untracked
    elif on_terminal:
        with Bars(on_terminal=True) as bars:
            yield bars
        print_line("", sys.stderr)  # a blank line before the result
    else:
        yield Bars(on_terminal=False)


def describe_unit(item: object) -> str:
    """Describe a finished unit in a few words: an alternation by the losses of both levels."""
    if not isinstance(item, Log):
        return str(item)  # an epoch or a run, whose class has a `__str__`
    words = f"loss P {fmean(item.loss_P):.4g}"
    if item.loss_D_at_D:  # it is empty with --upper-steps 0
        words += f"  D {fmean(item.loss_D_at_D):.4g}"
    return words
