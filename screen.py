"""What a person sees of a command: progress and notes on stderr, the result on stdout."""

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


class Forgiving(io.FileIO):
    """A file whose reader may go away (`| head`): the rest is dropped, and the run goes on."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def forgiving(stream: Any) -> Any:
    """A standard stream that raises nothing; a closed one, None, is /dev/null."""
    file = Forgiving(stream.fileno() if stream else os.devnull, "w", closefd=not stream)
    encoding = getattr(stream, "encoding", None)
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding, "backslashreplace", line_buffering=True
    )


@contextlib.contextmanager
def bars(quiet: bool) -> Iterator[Callable[..., Iterator[Any]]]:
    """Notes and progress on stderr: bars with ETA on a terminal, elsewhere one line per item.

    Gives `track(items, total, label, done=0)`, which hands on the items. `quiet`: warnings alone.
    """
    from rich.progress import BarColumn, Progress, TimeRemainingColumn  # not for --help

    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [logging.StreamHandler(sys.stderr)]
    console = Console(stderr=True)
    live = Progress(
        "{task.description:>8}",
        BarColumn(16),
        "{task.completed}/{task.total}",
        "ETA",
        TimeRemainingColumn(),
        "{task.fields[text]}",
        console=console,
        disable=quiet or not console.is_terminal,
        speed_estimate_period=1e9,
    )

    def track(items: Iterator[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
        bar = live.add_task(label, total=total, completed=done, text="")
        for n, item in enumerate(items, done + 1):
            live.update(bar, completed=n, text=brief(item)[: max(console.width - 52, 10)])
            if live.disable and not quiet:
                left = TimeRemainingColumn().render(live.tasks[-1])
                print(f"{label} {n}/{total}  {brief(item)}  ETA {left}", file=sys.stderr)
            yield item
        live.remove_task(bar)

    with live:
        yield track


def brief(item: Any) -> str:
    """An item in a few words: of a record the rate or mean loss, and the validation; else its text.

    >>> brief({"loss_P": [1.0, 3.0], "val_P": {"accuracy": 50.0}})
    'loss 2.0000  val 50.0 %'
    """
    if not isinstance(item, dict):
        return str(item)
    loss, score = item.get("loss_P", item.get("loss")), item.get("val_P", item.get("val"))
    mean = sum(loss) / len(loss) if isinstance(loss, list) else loss
    text = f"lr {item.get('lr')}" if mean is None else f"loss {mean:.4f}"
    return f"{text}  val {score['accuracy']:.1f} %" if score else text


def simple(result: Any) -> Any:
    """Named tuples as dicts, paths as text: what JSON and the printer know."""
    result = result._asdict() if hasattr(result, "_asdict") else result
    if isinstance(result, dict):
        return {str(key): simple(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [simple(value) for value in result]
    return str(result) if isinstance(result, Path) else result


def say(result: Any, as_json: bool) -> None:
    """A result on stdout: JSON, or a line per value and a table for each list of dicts."""
    result = simple(result)
    if as_json:
        print(json.dumps(result))
        return
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    for key, value in result.items() if isinstance(result, dict) else [("", result)]:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if key:
                print(f"{key}:")
            # a column of nothing, or of nothing but lists, is only in the JSON
            names = dict.fromkeys(name for row in value for name in row if row[name] != {})
            kept = [n for n in names if any(not isinstance(r.get(n), list | None) for r in value)]
            table = Table(*kept, box=None, pad_edge=False)
            for row in value:
                table.add_row(*(readable(row.get(name)) for name in kept))
            console.print(table)
        elif value not in (None, {}):
            print(f"{key}: {readable(value)}")


def readable(value: Any) -> str:
    """A value as people write it.

    >>> readable({"networks": 0.65471, "rates": (0.1, 3), "paper": None})
    'networks 0.6547, rates 0.1, 3'
    """
    if isinstance(value, dict):
        return ", ".join(f"{k} {readable(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(readable, value)) or "none"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
