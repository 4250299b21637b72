"""What a person sees: progress and notes on stderr, results on stdout."""

import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from statistics import fmean, stdev
from typing import TYPE_CHECKING, TextIO, TypeVar

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from config import Record

if TYPE_CHECKING:
    from support.runs import Track  # it loads torch

T = TypeVar("T")


# --- lines ---------------------------------------------------------------------------------------


def is_first_process() -> bool:
    """Whether this process prints; of several, torchrun gives each its rank."""
    return os.environ.get("RANK", "0") == "0"


def tell(text: str, stream: TextIO | None) -> None:  # None: it is closed
    """Print a line. Where its reader has gone (`| head`), the rest is dropped; the run goes on."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # from now on to nowhere: else Python's own flush at the end would fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def one_line(text: str) -> str:
    """A text without line breaks."""
    return " ".join(text.split())


class Notes(logging.Handler):
    """What the program notes while it runs, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(self.format(record), sys.stderr)


# --- progress ------------------------------------------------------------------------------------


@contextmanager
def progress(quiet: bool) -> Iterator["Track"]:
    """Progress on stderr: bars on a terminal, elsewhere a line for each unit."""
    from support.runs import untracked

    quiet = quiet or not is_first_process()
    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [Notes()]
    if quiet:
        yield untracked
    elif sys.stderr is not None and sys.stderr.isatty():
        with bars() as track:
            yield track
    else:
        yield print_units


def print_units(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
    """A line for each item, such as an alternation, with the time that is left."""
    started = time.monotonic()
    latest: Record = {}
    for number, item in enumerate(items, done + 1):
        # Only the items of this process count: those before a stop took time of another one.
        seconds_each = (time.monotonic() - started) / (number - done)
        left = timedelta(seconds=round(seconds_each * (total - number)))
        tell(f"{label} {number}/{total}  {summarise(item, latest)}  ETA {left}", sys.stderr)
        yield item


@contextmanager
def bars() -> Iterator["Track"]:
    """A bar for each loop that is under way; a loop that has ended leaves a line."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(10),
        MofNCompleteColumn(),
        TimeLeft(),
        TextColumn("{task.fields[text]}", markup=False),
    )

    def track(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        bar = live.add_task(label, total=total, completed=done, text="")
        latest: Record = {}
        text = ""
        for number, item in enumerate(items, done + 1):
            text = summarise(item, latest)
            live.update(bar, completed=number, text=text)
            yield item
        live.remove_task(bar)
        console.print(f"{label} {total}/{total}  {text}", markup=False)

    # The period has no end: an alternation can take longer than the 30 seconds that rich averages.
    with Progress(*columns, console=console, speed_estimate_period=1e9) as live:
        yield track


def summarise(item: object, latest: Record) -> str:
    """An item in a few words: a text as it is, of a record its rate, losses and validation.

    `latest` keeps a loop's latest numbers, since not every record has a validation.

    >>> summarise({"loss_P": [1.0, 3.0], "loss_D_at_D": [1.5], "val_P": {"accuracy": 50.0}}, {})
    'loss P 2  D 1.5  val 50.0 %'
    """
    record = as_record(item)
    if record is None:
        return str(item)
    if "step" in record:
        measured = {key: value for key, value in record.items() if value}
        latest.update(measured)
        record = latest
    words = []
    for key, name in (("lr", "lr"), ("loss", "loss"), ("loss_P", "loss P"), ("loss_D_at_D", "D")):
        value = record.get(key)
        if value:
            numbers = value if isinstance(value, list) else [value]
            words.append(f"{name} {fmean(numbers):.4g}")
    score = record.get("val_P") or record.get("val")  # align's, or finetune's
    if score:
        words.append(f"val {score['accuracy']:.1f} %")
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


# --- results -------------------------------------------------------------------------------------


def print_result(result: object, as_json: bool) -> None:
    """Print a result on stdout: JSON, or a line for each value and a table for a list of dicts."""
    if not is_first_process():
        return
    content = to_jsonable_python(result)
    if as_json:
        tell(json.dumps(content), sys.stdout)
        return
    values = content if isinstance(content, dict) else {"": content}  # a list has no name
    for name, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if name:
                tell(f"{name}:", sys.stdout)
            tell(draw_table(value), sys.stdout)
        elif value not in (None, {}):
            tell(f"{name}: {show(value, name)}", sys.stdout)
    if isinstance(values.get("test"), list):  # what a finetune run is about
        tell(f"test {values['metric']}: {mean_and_deviation(values['test'])}", sys.stdout)


def draw_table(rows: list[Record]) -> str:
    """Rows as a table; a column that holds nothing, or nothing but lists, is only in the JSON."""
    from rich.console import Console
    from rich.table import Table

    columns: dict[str, None] = {}  # a dict keeps their order
    for row in rows:
        for name, value in row.items():
            if value not in (None, {}) and not isinstance(value, list):
                columns[name] = None
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        cells = [show(row.get(name), name) for name in columns]
        table.add_row(*cells)
    text = io.StringIO()
    # As wide as the terminal. In a file or a pipe a table is not cut to 80 columns.
    width = None if sys.stdout is not None and sys.stdout.isatty() else 200
    Console(file=text, width=width, highlight=False, markup=False).print(table)
    return text.getvalue().rstrip("\n")


PERCENTAGES = {"accuracy", "accuracies", "difference", "grid", "mean", "per_class", "std", "test",
               "test_per_class", "val"}  # fmt: skip


def show(value: object, name: str = "") -> str:
    """A value as people write it: percentages with two decimals, p with two digits.

    >>> show({"difference": 3.553e-15, "p": 0.36231, "paper": None}, "first_minus_this")
    'difference 0.00, p 0.36'
    >>> show({"0.01": [51.33333, None]}, "grid")
    '0.01 51.33, none'
    """
    if value is None:
        return ""
    if isinstance(value, dict):
        words = []
        for key, item in value.items():
            # How a number is written follows from its name. In a grid of accuracies that is the
            # grid's, since the keys are learning rates.
            item_name = name if name == "grid" else key
            if item is not None:
                words.append(f"{key} {show(item, item_name)}")
        return ", ".join(words)
    if isinstance(value, list | tuple):
        words = [show(item, name) or "none" for item in value]
        return ", ".join(words) or "none"
    if name == "splits" and isinstance(value, int) and value >= 10**9:
        return f"{Decimal(value):.2g}"  # of several data sets they may have 50 digits
    if not isinstance(value, float):
        return str(value)
    if name in PERCENTAGES:
        return f"{round(value, 2) + 0.0:.2f}"  # adding 0 makes -0 a plain 0
    if name == "p":
        return f"{value:#.2g}"  # "#" keeps zeros: 0.30, not 0.3
    return f"{value:.4g}"


def mean_and_deviation(values: list[float]) -> str:
    """The seeds' accuracies in percent, as mean and sample deviation."""
    if len(values) == 1:
        return f"{values[0]:.2f} % (one seed)"
    return f"{fmean(values):.2f} ± {stdev(values):.2f} % ({len(values)} seeds)"
