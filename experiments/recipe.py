"""What the scripts share: `--set NAME=VALUE`, lines of progress, tables in Markdown."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from config import AlignConfig, Command, FinetuneConfig, Record
from support.errors import RunError, UsageError
from support.processes import Stopped, world
from support.runs import write_atomic
from support.screen import print_line

T = TypeVar("T")
Backbone = Annotated[str, typer.Option(help="vit_mini, vit_b16, vit_l16 or vit_h14.")]
Dataset = Annotated[str, typer.Option(help="dtd, voc07, ..., omniglot:Greek or folder:PATH.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of align or finetune; repeatable."),
]
SETTINGS = {*AlignConfig.model_fields, *FinetuneConfig.model_fields}


def run_script(main: Callable[..., None]) -> None:
    """Run a script's `main` from the command line; an error or a stop is told in one line."""
    try:
        typer.run(main)
    except UsageError as error:
        print_line(f"error: {error}", sys.stderr)
        sys.exit(2)
    except RunError as error:
        print_line(f"error: {error}", sys.stderr)
        sys.exit(1)
    except Stopped as stopped:
        signal, message = stopped.args
        print_line(message, sys.stderr)
        sys.exit(128 + signal)


def read_settings(pairs: list[str] | None) -> Record:
    """The settings of `--set rank=16 --set epochs=20`, as text; pydantic converts it."""
    settings: Record = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if name not in SETTINGS or not equals:
            raise typer.BadParameter(f"{pair}: give NAME=VALUE, a setting of align or finetune")
        settings[name] = value.strip()
    return settings


def settings_of(kind: type[Command], settings: Record) -> Record:
    """The settings that a command has; align and finetune share those of model and data."""
    return {name: value for name, value in settings.items() if name in kind.model_fields}


def progress(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
    """Hand the items on, and say on stderr how far it is: at the end, and once a minute."""
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
        lines.append(row_of([text_of(value) for value in row.values()]))
    return "\n".join(lines)


def text_of(value: object) -> str:
    """A cell: numbers with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def row_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_table(rows: Sequence[Record], path: Path) -> None:
    """Print a table, and write it to PATH.md and PATH.json."""
    if world()[0] != 0:  # one of torchrun's processes writes
        return
    text = markdown(rows)
    print(text)
    write_atomic(path.with_name(f"{path.name}.md"), text + "\n")
    write_atomic(path.with_name(f"{path.name}.json"), json.dumps(rows, indent=1) + "\n")
