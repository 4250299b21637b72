"""Program: flags of the command line, made of classes of settings."""

from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from config import Settings, flag_of
from support.screen import format_value


def signature_of(*settings_classes: type[Settings]) -> Signature:
    """Make a function signature with a keyword for each setting, from which Typer makes flags.

    Typer hands a flag over as text, and None where it is not given. Pydantic converts and checks
    the text, so that flags, files and Python follow the same rules.
    """
    parameters: dict[str, Parameter] = {}
    for settings_class in settings_classes:
        # In this order, a command's own settings come first, and those of every command last.
        for group in settings_class.__mro__:  # such as AlignConfig, Bilevel, Upper, ..., Machine
            if not issubclass(group, Settings):
                continue
            heading, _, _ = (group.__doc__ or "").partition(":")  # such as "Upper level"
            for name in group.__annotations__:
                if name not in parameters:
                    field = settings_class.model_fields[name]
                    parameters[name] = parameter_of(name, field, heading)
    return Signature([*parameters.values()])


def parameter_of(name: str, field: FieldInfo, heading: str) -> Parameter:
    """Make the parameter of one flag, with its help, which is listed below the heading.

    A switch has two flags, such as --amp and --no-amp.
    """
    flag = flag_of(name)
    value_type: type = str
    metavar = "VALUE"  # what the help shows after the flag: --rank VALUE
    if field.annotation is bool:
        value_type = bool
        metavar = ""
        flag += f"/--no-{flag.removeprefix('--')}"  # how Typer wants both flags
    option = typer.Option(
        flag,
        help=help_of(field),
        metavar=metavar,
        rich_help_panel=heading,
        envvar="BISSLIGHT_DATA" if name == "data_root" else None,
    )
    # Any: Typer reads the annotation, no type checker does.
    annotation: Any = Annotated[value_type | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def help_of(field: FieldInfo) -> str:
    """Write the help of a flag: what the setting is, the default's source, and the default."""
    text = escape(" ".join((field.description or "").split()))  # rich would take [here] for markup
    if field.is_required():
        return f"{text} [dim](required)[/dim]"
    if field.default is None or field.default is False:
        return text
    return f"{text} [dim](default: {escape(format_value(field.default))})[/dim]"
