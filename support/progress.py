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
from support.processes import stop  # an object, which hears signals
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

        They are number `done` + 1 to `total` of the loop that `label` names, such as "align".
        `items` is a generator: asking it for an item does the work of one unit. So a unit is done
        when its item arrives here.

        1. Add a bar for this loop, below those of the loops around it.
        2. For each item, move the bar on, and print a line: without a terminal always, else only
           for a whole run.
        3. Remove the bar, also after an error.
        """
        task_id = self.add_task(label, total=total, completed=done, text="")
        self.advance(task_id, advance=0)  # starts the clock from which the speed is measured
        task = self.tasks[-1]  # the one just added: what rich knows of this loop

        try:
            for number, item in enumerate(items, start=done + 1):
                self.advance(task_id)  # by one unit
                text = describe_unit(item)  # such as "loss P 0.52  D 1.3"
                task.fields["text"] = text  # `get_renderables` draws it
                line = f"{label} {number}/{total}  {text}"
                if self.disable:  # no terminal
                    left = timedelta(seconds=round(task.time_remaining or 0))
                    print_line(f"{line}  ETA {left}", sys.stderr)
                elif label == "run":  # a whole run: its line stays, above the bars
                    print_line(line, sys.stderr)
                yield item
        finally:
            self.remove_task(task_id)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield what rich draws: the bars, a text about the last finished unit, a stop notice.

        The unit is that of the innermost loop, such as an epoch within a trial.
        This overrides the method by which rich asks, several times a second, what to draw.
        """
        yield self.make_tasks_table(self.tasks)
        if self.tasks:
            yield Text(self.tasks[-1].fields["text"], style="dim")
        if stop.signal_number.value:  # a signal, such as Ctrl-C, was heard
            yield Text(stop.notice(), style="bold")


@contextmanager
def show_progress(quiet: bool) -> Iterator[Track]:
    """Show progress on stderr while the block runs, unless `quiet`; yield what shows it.

    1. Print the program's log on stderr, too: warnings alone where progress is not shown.
    2. Decide who prints the notice after a signal: the first process, unless bars show it.
    3. Yield a `Track`: bars on a terminal, lines in a file or a pipe, or one that shows nothing.
    """
    # Of several processes that torchrun started, one shows progress; the others print warnings.
    is_first = is_first_process()
    shows_nothing = quiet or not is_first
    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if shows_nothing else logging.INFO)
    log.handlers = [Notes()]  # it prints on stderr

    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    draws_bars = on_terminal and not shows_nothing
    # The notice after a signal stands below the bars. Where there are none, `stop` prints it.
    stop.prints_notice = is_first and not draws_bars

    if shows_nothing:
        yield untracked
    elif draws_bars:
        with Bars(on_terminal=True) as bars:
            yield bars
        print_line("", sys.stderr)  # a blank line before the result
    else:
        yield Bars(on_terminal=False)  # not started: without a terminal, there is nothing to draw


def describe_unit(item: object) -> str:
    """Describe a finished unit in a few words: an alternation by the losses of both levels."""
    if not isinstance(item, Log):
        return str(item)  # an epoch or a run, whose class has a `__str__`
    # An alternation: its `Log` has the losses of its steps, a number each.
    words = f"loss P {fmean(item.loss_P):.4g}"
    if item.loss_D_at_D:  # it is empty with --upper-steps 0
        words += f"  D {fmean(item.loss_D_at_D):.4g}"
    return words
