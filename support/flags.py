"""Flags of the command line, made of a class of settings."""

from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from config import Command, Machine, Record, Settings
from support.screen import show

FIRST = (  # on top of the help, under Typer's own heading
    "backbone", "dataset", "start", "weights", "pool", "out", "config", "dry_run", "seed",
    "alternations", "d_lr", "lr", "epochs", "seeds", "jobs",
)  # fmt: skip
FLAGS = {"start": "--from", "as_json": "--json"}  # others are called as their settings


def signature_of(kind: type[Command], options: type[Settings]) -> Signature:
    """The flags of a command that has settings and options, in the order of its help."""
    method = []
    machine = []
    for parameter in parameters_of(kind):
        if parameter.name in Machine.model_fields:
            machine.append(parameter)
        else:
            method.append(parameter)
    parameters = [*method, *machine, *parameters_of(options)]
    first = [parameter for parameter in parameters if parameter.name in FIRST]
    first.sort(key=lambda parameter: FIRST.index(parameter.name))
    others = [parameter for parameter in parameters if parameter.name not in FIRST]
    return Signature([*first, *others])


def parameters_of(kind: type[Settings]) -> list[Parameter]:
    """A parameter for each setting of a class, as Typer reads it from a function.

    A flag is handed on as text. Pydantic converts and checks it, so that flags, files and Python
    follow the same rules.
    """
    schemas = kind.model_json_schema()["properties"]
    parameters = []
    for name, field in kind.model_fields.items():
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        is_switch = field.annotation is bool
        no_flag = f"--no-{flag.removeprefix('--')}"
        if is_switch and field.default:
            flag += f"/{no_flag}"
        elif is_switch and issubclass(kind, Command):
            # For what a file has switched on; rarely needed, so the help does without it.
            parameters.append(keyword(f"no_{name}", bool, typer.Option(no_flag, hidden=True)))
        option = typer.Option(
            flag,
            help=describe(field, schemas[name], "start" in kind.model_fields),
            metavar=None if is_switch else metavar_of(schemas[name]),
            rich_help_panel=panel_of(kind, name),
            envvar="BISSLIGHT_DATA" if name == "data_root" else None,
        )
        parameters.append(keyword(name, bool if is_switch else str, option))
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
        notes.append(f"default: {show(field.default)}")
    note = "; ".join(note for note in [*notes, source] if note)
    return f"{escape(text)} [dim]{escape(f'[{note}]')}[/dim]" if note else escape(text)


def allowed_values(schema: Record, text: str) -> str:
    """What a setting may be, in words, if its text does not say so."""
    limits = {
        "exclusiveMinimum": ">",
        "minimum": "≥",
        "exclusiveMaximum": "<",
        "maximum": "≤",
    }
    largest = 2**53  # the limit of all whole numbers, which nobody needs to be told
    for option in schema.get("anyOf", [schema]):  # of a setting that may be None, the other one
        if "enum" in option:
            is_told = all(choice in text for choice in option["enum"])
            return "" if is_told else " or ".join(option["enum"])
        words = []
        for key, word in limits.items():
            limit = option.get(key, largest)
            if limit < largest:
                words.append(f"{word}\u00a0{limit:g}")  # a blank that is no place for a line break
        if words:
            return " and ".join(words)
    return ""


def metavar_of(schema: Record) -> str:
    """What stands behind a flag in the help."""
    option = schema.get("anyOf", [schema])[0]
    if option.get("format") == "path":
        return "<path>"
    names = {"integer": "<int>", "number": "<float>", "array": "<a,b>"}
    return names.get(option["type"], "<text>")


def panel_of(kind: type[Settings], name: str) -> str:
    """The heading of a flag in the help: the first words of the class that has the setting."""
    if name in FIRST:
        return "Options"
    for part in kind.__mro__:
        if name in part.__annotations__:
            heading, _, _ = (part.__doc__ or "").partition(":")
            return heading
    return "This run"
