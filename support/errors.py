"""Program: errors that the command line prints in one line, without a traceback."""

import difflib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")  # the arguments of a step
T = TypeVar("T")  # its result


class UsageError(Exception):
    """Wrong inputs. Each argument is a line about one of them, with a remedy. Exit code 2."""

    def __str__(self) -> str:
        """Return all lines as one text."""
        return "\n".join(self.args)


class RunError(Exception):
    """A run that cannot go on, such as on a full disk. Its text is one line. Exit code 1."""


@contextmanager
def as_usage_error(thing: str) -> Iterator[None]:
    """Turn a ValueError or OSError inside the block into a UsageError, "THING: TEXT".

    `thing` is what the user gave, such as a flag or a path. All other errors pass unchanged.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(f"{thing}: {error}") from error


@contextmanager
def as_read_error(thing: str, remedy: str) -> Iterator[None]:
    """Turn any error inside the block, which reads `thing`, into a UsageError with this remedy.

    A damaged file raises anything from EOFError to UnpicklingError. The text is "THING: cannot be
    read (NAME OF THE ERROR: ITS TEXT); REMEDY". Errors that have a remedy of their own pass
    unchanged, as does a lack of memory.
    """
    try:
        yield
    except (UsageError, RunError, MemoryError):
        raise
    except Exception as error:
        name = type(error).__name__  # such as "EOFError"
        if name == "OutOfMemoryError":  # torch's, by name: this module does not import torch
            raise
        text = " ".join(str(error).split())[:200]  # in one line: libraries write many
        raise UsageError(f"{thing}: cannot be read ({name}: {text}); {remedy}") from error


def try_and_collect(
    problems: list[str], step: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """Return the result of `step(*args, **kwargs)`, or None where it raises a UsageError.

    The lines of the error are then added to `problems`, a list that the caller holds. So a command
    can look at all its inputs, and list everything that is wrong at once.
    """
    try:
        return step(*args, **kwargs)
    except UsageError as error:
        problems += error.args
        return None


def suggest(word: str, known: Collection[str]) -> str:
    """Return a hint for an unknown word: the known one that is most like it, or a list of them.

    >>> suggest("vit_l", ["vit_l16", "vit_b16"]), suggest("x", ["mae", "ijepa"])
    ('did you mean vit_l16?', 'there are mae, ijepa')
    """
    close = difflib.get_close_matches(word, known, n=1)  # one word, or none that is alike
    if close:
        return f"did you mean {close[0]}?"
    if len(known) > 20:  # too many for a line
        return "see --help"
    return f"there are {', '.join(known)}"
