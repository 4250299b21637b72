"""Program: what is printed for people: notes on stderr, results on stdout."""

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
    """Say whether this process prints: of several, only the one that torchrun calls rank 0 does.

    `processes.world` knows the rank, too, but only in a run: it needs torch, and joined processes.
    """
    return os.environ.get("RANK", "0") == "0"


# What is printed for a control character, such as \x1b for code 27. In the name of a file, such a
# character would reach the terminal as a command. A line break is printed as it is.
CONTROLS = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) != "\n"}


def print_line(text: str, stream: TextIO | None) -> None:
    """Print a line on stderr or stdout, and nothing on a closed stream, which is None.

    If the program that reads the stream has ended, as in `bisslight ... | head`, this and all later
    lines are dropped, and the run goes on.
    """
    if stream is None:
        return
    try:
        print(text.translate(CONTROLS), file=stream, flush=True)
    except BrokenPipeError:
        # The stream now leads to nowhere. Otherwise Python's own flush at the end would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def join_lines(text: str) -> str:
    """Return the text as one line, with single spaces."""
    return " ".join(text.split())


class Notes(logging.Handler):
    """Prints what the program logs while it runs, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        print_line(self.format(record), sys.stderr)


# --- results -------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The result of a command for people: a headline, then a table, then lines of text."""

    headline: str
    rows: Sequence[Record] = ()  # of the table, by column, such as {"seed": 0, "test": "52.0 %"}
    lines: Sequence[str] = ()  # the last ones say where the result lies, and what to type next


class Result(Protocol):
    """The result of a command, such as a `FinetuneResult`."""

    def in_words(self) -> Answer:
        """Return what is printed for people."""


def print_answer(answer: Answer) -> None:
    """Print an answer on stdout, with blank lines between its parts."""
    blocks = [answer.headline, draw_table(answer.rows), "\n".join(answer.lines)]
    print_line("\n\n".join(block for block in blocks if block), sys.stdout)


def list_fields(fields: Record) -> Answer:
    """List fields for people, without a headline: a line each, but a table for a list of records.

    Fields that are None or {} are left out.

    >>> list_fields({"images": 20, "note": None}).lines
    ['images: 20']
    """
    lines = []
    for name, value in fields.items():
        is_table = isinstance(value, list) and value and isinstance(value[0], dict)
        if is_table:
            lines += [f"{name}:", draw_table(value)]  # among the lines, where the field stands
        elif value is not None and value != {}:
            lines.append(f"{name}: {format_value(value)}")
    return Answer(headline="", lines=lines)


def draw_table(rows: Sequence[Record]) -> str:
    """Return a table as text: a line with the names of the columns, then a line for each row.

    Each row is a dict by column. A row without a column has an empty cell there.

    1. Find the columns: the keys of all rows.
    2. Fill a table of rich, which draws tables.
    3. Draw it into a text, and cut the blanks at the ends of lines. It is at most as wide as the
       terminal; in a file or a pipe, 200 characters.

    >>> print(draw_table([{"seed": 0, "test": "52.0 %"}, {"seed": 1}]))
    seed  test
    0     52.0 %
    1
    """
    from rich.console import Console
    from rich.table import Table

    columns: Record = {}  # the keys of all rows, each once, in order; the values are not used
    for row in rows:
        columns |= row

    table = Table(box=None, pad_edge=False)  # without lines, and without a blank at the edges
    for name in columns:
        table.add_column(name, overflow="fold")  # a long path is broken, not cut
    for row in rows:
        cells = [format_value(row.get(name)) for name in columns]  # texts
        table.add_row(*cells)

    drawn = io.StringIO()  # a file in memory
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    # None: rich asks the terminal. For a file or a pipe, rich would take 80.
    width = None if is_terminal else 200
    console = Console(file=drawn, width=width, color_system=None, highlight=False, markup=False)
    console.print(table)
    lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
    return "\n".join(lines)


def format_value(value: object) -> str:
    """Return a value as text for people: a float in four digits, the items of a list or dict.

    A None is an empty text, and inside a dict it is left out. An empty list is "none".

    >>> format_value({"images": [20, 0.123456], "weights": None})
    'images 20, 0.1235'
    >>> format_value(None), format_value([]), format_value(1e-4)
    ('', 'none', '0.0001')
    """
    if value is None:
        return ""
    if isinstance(value, dict):
        words = [f"{key} {format_value(item)}" for key, item in value.items() if item is not None]
        return ", ".join(words)
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_accuracies(accuracies: Sequence[float]) -> str:
    """Return the seeds' accuracies, in percent, as text: mean and sample standard deviation.

    >>> format_accuracies([51.0, 53.0]), format_accuracies([51.0])
    ('52.0 ± 1.4 %', '51.0 %')
    """
    if len(accuracies) == 1:
        return f"{accuracies[0]:.1f} %"
    return f"{fmean(accuracies):.1f} ± {stdev(accuracies):.1f} %"


def format_count(number: int, thing: str) -> str:
    """Return how many things there are, as text.

    >>> format_count(1, "seed"), format_count(3, "seed"), format_count(4800, "image")
    ('1 seed', '3 seeds', '4,800 images')
    """
    ending = "" if number == 1 else "s"
    return f"{number:,} {thing}{ending}"
