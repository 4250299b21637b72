"""Flags of the command line, made of a class of settings."""

from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from config import Command, Machine, Record, Settings
from support.screen import format_value

FIRST = (  # on top of the help, under Typer's own heading
    "backbone", "dataset", "start", "weights", "pool", "out", "config", "dry_run", "seed",
    "alternations", "d_lr", "lr", "epochs", "seeds", "jobs",
)  # fmt: skip
FLAGS = {"start": "--from", "as_json": "--json"}  # others are called as their settings
METAVARS = {"integer": "<int>", "number": "<float>", "array": "<a,b>"}
LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
LARGEST = 2**53  # the limit of all whole numbers, which nobody needs to be told


def signature_of(kind: type[Command], options: type[Settings]) -> Signature:
    """The flags of a command that has settings and options, in the order of its help."""

    def place(parameter: Parameter) -> int:
        """Those of FIRST, then the method's, the machine's and the options."""
        if parameter.name in FIRST:
            return FIRST.index(parameter.name)
        if parameter.name in Machine.model_fields:
            return len(FIRST) + 1
        if parameter.name in options.model_fields:
            return len(FIRST) + 2
        return len(FIRST)

    return Signature(sorted([*parameters_of(kind), *parameters_of(options)], key=place))


def parameters_of(kind: type[Settings]) -> list[Parameter]:
    """A parameter for each setting of a class, as Typer reads it from a function.

    A flag is handed on as text. Pydantic converts and checks it, so that flags, files and Python
    follow the same rules.
    """
    schemas = kind.model_json_schema()["properties"]
    parameters = []
    for name, field in kind.model_fields.items():
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        schema = schemas[name]
        schema = schema.get("anyOf", [schema])[0]  # of a setting that may be None, the other one
        no_flag = f"--no-{flag.removeprefix('--')}"
        metavar = None
        if field.annotation is not bool:
            metavar = metavar_of(schema)
        elif field.default:
            flag += f"/{no_flag}"
        elif issubclass(kind, Command):
            # For what a file has switched on; rarely needed, so the help does without it.
            parameters.append(keyword(f"no_{name}", bool, typer.Option(no_flag, hidden=True)))
        option = typer.Option(
            flag,
            help=describe(field, schema, "start" in kind.model_fields),
            metavar=metavar,
            rich_help_panel=panel_of(kind, name),
            envvar="BISSLIGHT_DATA" if name == "data_root" else None,
        )
        parameters.append(keyword(name, str if metavar else bool, option))
    return parameters


def keyword(name: str, kind: type, option: object) -> Parameter:
    """A parameter that Typer reads; None says that the flag was not given."""
    annotation: Any = Annotated[kind | None, option]  # Any: no type checker reads it
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def describe(field: FieldInfo, schema: Record, has_start: bool) -> str:
    """The help of a flag: what the setting is; in brackets what it may be, default and source.

    `has_start`: the command can take settings over from an align run.
    """
    text = " ".join((field.description or "").split())
    source = ""
    if text.endswith("]"):
        text, _, source = text.removesuffix("]").rpartition(" [")
    notes = [allowed_values(schema, text)]
    if field.is_required():
        notes.append("required without --from" if has_start else "required")
    elif field.default is not None and field.default is not False:
        notes.append(f"default: {format_value(field.default)}")
    note = "; ".join(note for note in [*notes, source] if note)
    return f"{escape(text)} [dim]{escape(f'[{note}]')}[/dim]" if note else escape(text)


def allowed_values(schema: Record, text: str) -> str:
    """What a setting may be, in words, if its text does not say so."""
    choices = schema.get("enum", [])
    if not all(choice in text for choice in choices):
        return " or ".join(choices)
    words = []
    for key, word in LIMITS.items():
        limit = schema.get(key, LARGEST)
        if limit < LARGEST:
            words.append(f"{word}\u00a0{limit:g}")  # a blank that is no place for a line break
    return " and ".join(words)


def metavar_of(schema: Record) -> str:
    """What stands behind a flag in the help."""
    if schema.get("format") == "path":
        return "<path>"
    return METAVARS.get(schema["type"], "<text>")


def panel_of(kind: type[Settings], name: str) -> str:
    """The heading of a flag in the help: the first words of the class that has the setting."""
    if name in FIRST:
        return "Options"
    for part in kind.__mro__:
        if name in part.__annotations__:
            heading, _, _ = (part.__doc__ or "").partition(":")
            return heading
    return "This run"
