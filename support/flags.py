"""Program: flags of the command line, made of classes of settings."""

from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from config import Settings, flag_of
from support.screen import format_value


def signature_of(*kinds: type[Settings]) -> Signature:
    """A keyword for each setting, as Typer reads it from a function; None where it is not given.

    A flag is handed on as text. Pydantic converts and checks it, so that flags, files and Python
    follow the same rules.
    """
    parameters: dict[str, Parameter] = {}
    for kind in kinds:
        # a command's own settings first, those of every command last
        for part in kind.__mro__:
            if not issubclass(part, Settings):
                continue
            heading, _, _ = (part.__doc__ or "").partition(":")
            for name in part.__annotations__:
                if name not in parameters:
                    parameters[name] = parameter_of(name, kind.model_fields[name], heading)
    return Signature([*parameters.values()])


def parameter_of(name: str, field: FieldInfo, heading: str) -> Parameter:
    """A flag with its help, below a heading; of a switch two flags, on and off."""
    flag = flag_of(name)
    kind: type = str
    metavar = "VALUE"
    if field.annotation is bool:
        kind = bool
        metavar = ""
        flag += f"/--no-{flag.removeprefix('--')}"
    option = typer.Option(
        flag,
        help=help_of(field),
        metavar=metavar,
        rich_help_panel=heading,
        envvar="BISSLIGHT_DATA" if name == "data_root" else None,
    )
    annotation: Any = Annotated[kind | None, option]  # Any: no type checker reads it
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def help_of(field: FieldInfo) -> str:
    """The help of a flag: what the setting is, where its default comes from, and the default."""
    text = escape(" ".join((field.description or "").split()))
    if field.is_required():
        return f"{text} [dim](required)[/dim]"
    if field.default is None or field.default is False:
        return text
    return f"{text} [dim](default: {escape(format_value(field.default))})[/dim]"
