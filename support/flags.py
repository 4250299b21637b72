"""Flags of the command line, made of a class of settings."""

from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from config import Command, Machine, Record, Settings
from support.screen import show

FIRST = ("backbone", "dataset", "pool", "start", "out", "seed")  # on top of the help
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
        if is_switch and issubclass(kind, Command):  # a file may have set it
            flag += f"/--no-{flag.removeprefix('--')}"
        option = typer.Option(
            flag,
            help=escape(describe(field, schemas[name])),
            metavar=None if is_switch else metavar_of(schemas[name]),
            rich_help_panel=panel_of(kind, name),
            envvar="BISSLIGHT_DATA" if name == "data_root" else None,
        )
        # Any: Typer reads these annotations, a type checker does not.
        annotation: Any = Annotated[str | None, option]
        if is_switch:
            annotation = Annotated[bool | None, option]
        # None says that the flag was not given: a file or a default then decides.
        parameter = Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        parameters.append(parameter)
    return parameters


def describe(field: FieldInfo, schema: Record) -> str:
    """The help of a flag: what the setting is, what it may be, and its default."""
    text = " ".join((field.description or "").split())
    notes = [allowed_values(schema)]
    is_set = field.default is not None and field.default is not False
    if is_set and not field.is_required():
        notes.append(f"default: {show(field.default)}")
    note = "; ".join(note for note in notes if note)
    return f"{text} ({note})" if note else text


def allowed_values(schema: Record) -> str:
    """What a setting may be, in words."""
    limits = {
        "exclusiveMinimum": "more than",
        "minimum": "at least",
        "exclusiveMaximum": "less than",
        "maximum": "at most",
    }
    largest = 2**53  # the limit of all whole numbers, which nobody needs to be told
    for option in schema.get("anyOf", [schema]):  # of a setting that may be None, the other one
        if "enum" in option:
            return "one of " + ", ".join(option["enum"])
        words = []
        for key, word in limits.items():
            limit = option.get(key, largest)
            if limit < largest:
                words.append(f"{word} {limit:g}")
        if words:
            return " and ".join(words)
    return ""


def metavar_of(schema: Record) -> str:
    """What stands behind a flag in the help."""
    option = schema.get("anyOf", [schema])[0]
    if option.get("format") == "path":
        return "PATH"
    names = {"integer": "INTEGER", "number": "NUMBER", "array": "A,B"}
    return names.get(option["type"], "TEXT")


def panel_of(kind: type[Settings], name: str) -> str:
    """The heading of a flag in the help: the first words of the class that has the setting."""
    if name in FIRST:
        return "What one sets first"
    for part in kind.__mro__:
        if name in part.__annotations__:
            heading, _, _ = (part.__doc__ or "").partition(":")
            return heading
    return "This run"
