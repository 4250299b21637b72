"""What the scripts share: `--set NAME=VALUE`, lines of progress, tables in Markdown."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import ValidationError

from cli import explain, report
from config import AlignConfig, FinetuneConfig, Record
from support.errors import RunError, UsageError
from support.files import write_atomic
from support.processes import world
from support.screen import format_cell

T = TypeVar("T")
Backbone = Annotated[str, typer.Option(help="vit_mini, vit_b16, vit_l16 or vit_h14.")]
Dataset = Annotated[str, typer.Option(help="dtd, voc07, ..., omniglot:Greek or folder:PATH.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of align or finetune; repeatable."),
]
SETTINGS = {*AlignConfig.model_fields, *FinetuneConfig.model_fields}


def run_script(main: Callable[..., None]) -> None:
    """Run a script's `main` from the command line; an error is told in lines, as by bisslight."""
    try:
        typer.run(main)
    except ValidationError as error:
        sys.exit(report(explain(error), 2))
    except UsageError as error:
        sys.exit(report(error.args, 2))
    except RunError as error:
        sys.exit(report([str(error)], 1))


def read_settings(pairs: list[str] | None) -> Record:
    """The settings of `--set rank=16 --set scale=0.5`: whole numbers as such, all else as text."""
    settings: Record = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if name not in SETTINGS or not equals:
            raise typer.BadParameter(f"{pair}: give NAME=VALUE, a setting of align or finetune")
        value = value.strip()
        settings[name] = int(value) if value.isdecimal() else value
    return settings


def progress(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
    """Yield the items, and say on stderr how far the loop is, once a minute and at its end."""
    told = time.monotonic()
    for number, item in enumerate(items, done + 1):
        if number == total or time.monotonic() - told > 60:
            print(f"{label} {number}/{total}", file=sys.stderr, flush=True)
            told = time.monotonic()
        yield item


def markdown(rows: Sequence[Record]) -> str:
    """A table in Markdown, with the keys of the first row as its heads.

    >>> print(markdown([{"arm": "PEFT", "mean": "79.8"}]))
    | arm | mean |
    |---|---|
    | PEFT | 79.8 |
    """
    heads = list(rows[0])
    lines = [row_of(heads), "|" + "---|" * len(heads)]
    for row in rows:
        lines.append(row_of([format_cell(value) for value in row.values()]))
    return "\n".join(lines)


def row_of(cells: Sequence[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def write_table(rows: Sequence[Record], path: Path) -> None:
    """Print a table, and write it to PATH.md and PATH.json."""
    if world().rank != 0:  # one of torchrun's processes writes
        return
    text = markdown(rows)
    print(text)
    write_atomic(path.with_name(f"{path.name}.md"), text + "\n")
    write_atomic(
        path.with_name(f"{path.name}.json"), json.dumps(rows, indent=1, default=str) + "\n"
    )
