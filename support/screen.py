"""Program: what a person sees: notes on stderr, results on stdout."""

import io
import logging
import os
import sys
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple, Protocol, TextIO

from config import Record

# --- lines ---------------------------------------------------------------------------------------


def is_first_process() -> bool:
    """Whether this process prints; of several, torchrun gives each its rank.

    `processes.world` tells it, too, but only in a run: it needs torch, and the processes joined.
    """
    return os.environ.get("RANK", "0") == "0"


# Control characters, as in the name of a file, would reach the terminal as commands.
CONTROLS = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) != "\n"}


def tell(text: str, stream: TextIO | None) -> None:  # None: it is closed
    """Print a line. Where its reader has gone (`| head`), the rest is dropped; the run goes on."""
    if stream is None:
        return
    try:
        print(text.translate(CONTROLS), file=stream, flush=True)
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


# --- results -------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a command found, for people."""

    headline: str
    rows: Sequence[Record] = ()  # of a table, by its headings
    lines: Sequence[str] = ()  # below the table; last where the result lies, and what to type next


class Result(Protocol):
    """What a command ends with."""

    def in_words(self) -> Answer:
        """What people are told of it."""


def print_answer(answer: Answer) -> None:
    """Print an answer on stdout."""
    blocks = [answer.headline, draw_table(answer.rows), "\n".join(answer.lines)]
    tell("\n\n".join(block for block in blocks if block), sys.stdout)


def list_fields(found: Record) -> Answer:
    """A line for each field, but a table for a list of records; what is not known is left out."""
    lines = []
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{name}:", draw_table(value)]
        elif value is not None and value != {}:
            lines.append(f"{name}: {format_value(value)}")
    return Answer("\n".join(lines))


def draw_table(rows: Sequence[Record]) -> str:
    """Rows as a table; they need not have all columns."""
    from rich.console import Console
    from rich.table import Table

    columns: Record = {}  # a dict keeps their order
    for row in rows:
        columns |= row
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")  # a long path is broken, not cut
    for row in rows:
        cells = [format_value(row.get(name)) for name in columns]
        table.add_row(*cells)
    text = io.StringIO()
    # As wide as the terminal. In a file or a pipe a table is not cut to 80 columns.
    width = None if sys.stdout is not None and sys.stdout.isatty() else 200
    Console(file=text, width=width, color_system=None, highlight=False, markup=False).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join(lines)


def format_value(value: object) -> str:
    """A value as people write it.

    >>> format_value({"images": [20, 0.123456], "weights": None})
    'images 20, 0.1235'
    """
    if value is None:
        return ""
    if isinstance(value, dict):
        words = [f"{key} {format_value(item)}" for key, item in value.items() if item is not None]
        return ", ".join(words)
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def percent(accuracies: Sequence[float]) -> str:
    """The seeds' accuracies as mean and sample deviation.

    >>> percent([51.0, 53.0]), percent([51.0])
    ('52.0 ± 1.4 %', '51.0 %')
    """
    if len(accuracies) == 1:
        return f"{accuracies[0]:.1f} %"
    return f"{fmean(accuracies):.1f} ± {stdev(accuracies):.1f} %"


def count(number: int, thing: str) -> str:
    """Such as "3 seeds".

    >>> count(1, "seed")
    '1 seed'
    """
    ending = "" if number == 1 else "s"
    return f"{number:,} {thing}{ending}"
