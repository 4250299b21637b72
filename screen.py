"""What a person sees of a command: progress and notes on stderr, the result on stdout.

rich is used here alone, and Typer's help in `cli`.
"""

import contextlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

T = TypeVar("T")


def listen(quiet: bool) -> None:
    """Notes and warnings of the modules on stderr; only warnings with --quiet."""
    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if quiet or other_rank() else logging.INFO)
    log.handlers = [logging.StreamHandler(sys.stderr)]


def other_rank() -> bool:
    """Whether this is one of several processes (torchrun), and not the first."""
    return os.environ.get("RANK", "0") != "0"


class Forgiving(io.TextIOBase):
    """A stream whose reader may leave: what nobody reads is dropped, no run ends of it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names that are no text, ASCII terminals

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.stream.write(text)
            self.stream.flush()
        return len(text)

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()


@contextlib.contextmanager
def bars(quiet: bool) -> Iterator[Callable[..., Iterator[Any]]]:
    """Progress on stderr: bars with ETA on a terminal, elsewhere a plain line an item.

    Gives `track(items, total, label, done=0)`, which hands on the items. Of a record it shows one
    loss, the mean of a level, and the last validation; another item is text.
    """
    console = Console(file=sys.stderr, highlight=False)
    columns = (TextColumn("{task.description:>8}"), BarColumn(16), MofNCompleteColumn())
    left = (TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    silent = quiet or other_rank()
    live = Progress(*columns, *left, console=console, disable=silent or not console.is_terminal)

    def track(items: Iterator[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        began, val = time.monotonic(), ""
        bar = live.add_task(label, total=total, completed=done, text="")
        for n, item in enumerate(items, done + 1):
            text = str(item)
            if isinstance(item, dict):
                loss, score = (
                    item.get("loss_P", item.get("loss")),
                    item.get("val_P", item.get("val")),
                )
                loss = fmean(loss) if isinstance(loss, list) else loss
                val = f"  val {score['accuracy']:.1f} %" if score else val
                text = (f"lr {item['lr']:g}" if loss is None else f"loss {loss:.4f}") + val
            live.update(bar, completed=n, text=text[: max(console.width - 52, 10)])
            if live.disable and not silent:
                seconds = (time.monotonic() - began) / (n - done) * (total - n)
                eta = timedelta(seconds=round(seconds))
                print(f"{label} {n}/{total}  {text}  ETA {eta}", file=sys.stderr)
            yield item
        live.remove_task(bar)

    with live:
        yield track


def simple(result: Any) -> Any:
    """Named tuples as dicts, paths as text: what JSON and the printer know.

    >>> simple({"out": Path("runs/a"), "rates": (0.1, 0.2)})
    {'out': 'runs/a', 'rates': [0.1, 0.2]}
    """
    if hasattr(result, "_asdict"):
        result = result._asdict()
    if isinstance(result, dict):
        return {str(key): simple(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [simple(value) for value in result]
    return str(result) if isinstance(result, Path) else result


def say(result: Any, as_json: bool) -> None:
    """A result on stdout: JSON, or a line a value and a table for each list of dicts."""
    result = simple(result)
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items() if isinstance(result, dict) else [("", result)]:
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict):
            print((f"{key}:\n" if key else "") + table(value))
        elif isinstance(first, str):
            print("\n".join(value))
        elif value not in (None, {}):
            print(f"{key}: {readable(value) if value != [] else 'none'}")


def table(rows: list[dict[str, Any]]) -> str:
    """A column a key; columns of nothing, or of nothing but lists, are only in the JSON."""
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    kept = {
        k: v for k, v in columns.items() if any(x is not None and type(x) is not list for x in v)
    }
    drawn = Table(*kept, box=None, pad_edge=False)
    for values in zip(*kept.values(), strict=True):
        drawn.add_row(*(escape(readable(value)) for value in values))
    file = io.StringIO()
    Console(file=file, width=None if sys.stdout.isatty() else 200, highlight=False).print(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def readable(value: Any) -> str:
    """A value as people write it.

    >>> readable({"networks": 0.65471, "rates": (0.1, 3), "paper": None})
    'networks 0.6547, rates 0.1, 3'
    """
    if isinstance(value, dict):
        return ", ".join(f"{k} {readable(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(readable, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
