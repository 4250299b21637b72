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

    `settings_classes` are those of a command's settings and of its options. In the help, flags are
    listed by group: a group is a class that has fields of its own, and the beginning of its
    docstring is the heading.
    """
    parameters: dict[str, Parameter] = {}  # by the name of the setting
    for settings_class in settings_classes:
        # A class and its base classes, such as AlignConfig, Bilevel, Upper, ..., Machine. In this
        # order, a command's own settings come first, and those of every command last.
        for group in settings_class.__mro__:
            if not issubclass(group, Settings):  # pydantic's base class, and Python's
                continue
            heading, _, _ = (group.__doc__ or "").partition(":")  # such as "Upper level"
            for name in group.__annotations__:  # fields of this class alone, such as "d_lr"
                # If it is there, a class before this one, which comes first, has it anew.
                if name not in parameters:
                    field = settings_class.model_fields[name]  # default, type and description
                    parameters[name] = parameter_of(name, field, heading)
    return Signature([*parameters.values()])


def parameter_of(name: str, field: FieldInfo, heading: str) -> Parameter:
    """Make the parameter of one flag, with its help, which is listed below the heading.

    `name` and `field` are those of the setting, such as "d_lr". The parameter is a keyword of this
    name. Typer hands the flag over as text, or None where it is not given. Pydantic converts and
    checks the text, so that flags, files and Python follow the same rules. A switch has two flags,
    such as --amp and --no-amp, and Typer hands it over as a bool.
    """
    flag = flag_of(name)  # such as "--d-lr"
    value_type: type = str
    metavar = "VALUE"  # what the help shows after the flag: --rank VALUE
    is_switch = field.annotation is bool
    if is_switch:
        value_type = bool
        metavar = ""
        flag += f"/--no-{flag.removeprefix('--')}"  # how Typer wants both flags

    option = typer.Option(
        flag,
        help=help_of(field),
        metavar=metavar,
        rich_help_panel=heading,
        envvar="BISSLIGHT_DATA" if name == "data_root" else None,  # its value, without the flag
    )
    # Any: Typer reads the annotation, no type checker does.
    annotation: Any = Annotated[value_type | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def help_of(field: FieldInfo) -> str:
    """Write the help of a flag: what the setting is, the default's source, and the default.

    The first two are the text below the field. The result is such as "Rank of LoRA (r), on queries
    and values of every layer. [App. C.3; vit_mini: 8] (default: 64)", with marks for rich: [dim].
    """
    text = escape(" ".join((field.description or "").split()))  # rich would take [here] for markup
    if field.is_required():
        return f"{text} [dim](required)[/dim]"
    # None: the text says what is done without a value. False: a switch is off unless it is given.
    if field.default is None or field.default is False:
        return text
    return f"{text} [dim](default: {escape(format_value(field.default))})[/dim]"
