"""Reads the tables of a page in Markdown, and compares what is printed with numbers."""

import re
from collections.abc import Sequence
from decimal import Decimal

Row = dict[str, str]
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e-\d+)?"

WORDS = (
    "heard", "deaf", "ahead", "behind", "open", "beyond these alphabets", "no gain of 2 points",
)  # fmt: skip


def blocks(text: str) -> list[list[str]]:
    """The lines of each table, its head first."""
    return [block.splitlines() for block in re.findall(r"(?m)(?:^\|.*\n?)+", text)]


def tables(page: str, *columns: str) -> list[list[Row]]:
    """The tables that have these columns: rows of cells by the names of the columns."""
    found = []
    for head, _, *rows in blocks(page):
        names = cells_of(head)
        if {*columns} <= {*names}:
            found.append([dict(zip(names, cells_of(row), strict=True)) for row in rows])
    return found


def cells_of(line: str) -> list[str]:
    """The cells of a table's line.

    >>> cells_of("| a | |q| |  |")
    ['a', '|q|', '']
    """
    return line[2:-2].split(" | ")


def assert_cell(cell: str, *numbers: float | None) -> None:
    """A cell has these numbers, each rounded to the last digit that is printed; None is not there.

    >>> assert_cell("3.1e-05 (0.00012)", 3.0518e-05, 0.000122)
    """
    printed = re.findall(NUMBER, cell)
    there = [number for number in numbers if number is not None]
    assert len(printed) == len(there), (cell, numbers)
    for text, number in zip(printed, there, strict=True):
        last_digit = 10.0 ** Decimal(text).as_tuple().exponent
        assert abs(float(text) - number) <= 0.501 * last_digit, (cell, numbers)


def said(verdict: str) -> set[str]:
    """Those of the protocols' words that a verdict has.

    >>> sorted(said("ahead; beyond these alphabets, too"))
    ['ahead', 'beyond these alphabets']
    """
    return {word for word in WORDS if word in verdict}


def write(found: Sequence[float], decimals: int = 2) -> str:
    """A mean and its interval, as the pages write them.

    >>> write([1.3, 0.57, 2.04])
    '+1.30 (+0.57 to +2.04)'
    """
    mean, low, high, *_ = (f"{x:+.{decimals}f}" for x in found)
    return f"{mean} ({low} to {high})"
