"""Progress: bars on a terminal; in a file or pipe a line for each unit.

A unit is an epoch, an alternation or a whole run. A loop over runs holds the loops of these runs,
and on a terminal its bar is above theirs.
"""

import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import fmean
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.text import Text

from bisslight import Log
from support.processes import stop
from support.pulse import pulse
from support.runs import Track, untracked
from support.screen import Notes, is_first_process, tell

T = TypeVar("T")
UNITS = {  # by the label of a loop; others are of epochs
    "align": "alternation",
    "pretrain by 500 steps": "part",  # where epochs are longer
    "run": "run",
    "demo": "run",
}


class Loops(Progress):
    """Shows the loops under way; a `Track`.

    rich calls loops tasks: `self.tasks` holds them, the outermost first.
    """

    def __init__(self, on_terminal: bool) -> None:
        super().__init__(
            "{task.description}",
            BarColumn(None),
            TimeRemainingColumn(),
            "left",
            console=Console(stderr=True, highlight=False),
            # Validation comes once in an epoch. The speed of rich's last half minute would leave it
            # out and then overrate it; that of an hour, as far as its thousand samples reach, has
            # it in the right proportion.
            speed_estimate_period=3600,
            transient=True,
            get_time=time.monotonic,
            disable=not on_terminal,
            expand=True,
        )
        pulse.advance = self.advance_by_batch
        stop.when = self.time_of_stop

    def __call__(self, items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        """Hand the items on, and show each one when it is done."""
        pulse.validation = None
        unit = UNITS.get(label, "epoch")
        name = "run" if unit == "run" else f"{label}  {unit}"
        for outer in self.tasks:
            # What a run that goes on had done already is a part of the outer loop's unit. `advance`
            # would take it for work of this moment, and overrate the speed.
            outer.completed += done / total
        task_id = self.add_task(
            f"{name} {done + 1} of {total}",
            total=total, completed=done, unit=unit, text="", images=0,
        )  # fmt: skip
        self.advance(task_id, 0)  # its speed is measured from here on
        loop = self.tasks[-1]
        try:
            for number, item in enumerate(items, done + 1):
                # to the end of the unit, whatever part of it the batches have counted
                self.advance(task_id, number - loop.completed)
                loop.description = f"{name} {min(number + 1, total)} of {total}"
                loop.fields["text"] = summarise(item)
                all_is_done = number == total and len(self.tasks) == 1
                line = f"{label} {number}/{total}  {summarise(item)}"
                if self.disable:
                    left = timedelta(seconds=round(loop.time_remaining or 0))
                    tell(f"{line}  ETA {left}", sys.stderr)
                elif unit == "run" or all_is_done:  # what stays on a terminal
                    tell(line, sys.stderr)
                yield item
        finally:
            self.remove_task(task_id)

    def advance_by_batch(self, images: int, share: float) -> None:
        """Count a batch in all loops; it is `share` of a unit of the innermost one."""
        loops = self.tasks
        if not loops or loops[-1].fields["unit"] == "run":
            return  # a run without a loop of its own: no share of a run is known
        for loop in reversed(loops):
            loop.fields["images"] += images
            self.advance(loop.id, share)
            share /= loop.total or 1  # this whole loop is one unit of the next outer one

    def time_of_stop(self) -> str:
        """When a stop would take effect if it were asked for now."""
        if not self.tasks:
            return stop.soon()
        loop = self.tasks[-1]
        unit = loop.fields["unit"]
        if unit == "run":  # --jobs: the loops of these runs are in other processes
            return "after their epochs or alternations"
        if not loop.speed:
            return f"after this {unit}"
        seconds = (1 - loop.completed % 1) / loop.speed
        return f"after this {unit} (about {math.ceil(seconds)} s)"

    def get_renderables(self) -> Iterator[RenderableType]:
        """What the terminal shows: the bars, the state of the innermost loop, a stop asked for."""
        yield self.make_tasks_table(self.tasks)
        words = []
        if self.tasks:
            loop = self.tasks[-1]
            words.append(loop.fields["text"])
            if loop.fields["images"] and loop.elapsed:
                words.append(f"{loop.fields['images'] / loop.elapsed:,.0f} images/s")
        if pulse.validation is not None:
            words.append(f"val {pulse.validation:.1f} %")
        if pulse.doing:
            words.append(f"{pulse.doing}: {pulse.scored:,}")
        yield Text("  ".join(words).lstrip(), style="dim")
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
        with Loops(on_terminal) as bars:
            yield bars
        tell("", sys.stderr)  # a blank line before the answer
    else:
        yield Loops(on_terminal)


def summarise(item: object) -> str:
    """A finished unit in a few words: for an alternation the losses of both levels."""
    if not isinstance(item, Log):
        return str(item)  # epochs and runs say it themselves
    words = f"loss P {fmean(item.loss_P):.4g}"
    if item.loss_D_at_D:  # with --upper-steps 0 there are none
        words += f"  D {fmean(item.loss_D_at_D):.4g}"
    return words
