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
def as_usage_error(thing: str, remedy: str = "") -> Iterator[None]:
    """Turn an error inside the block into a UsageError that begins with `thing`, such as a path.

    1. Errors that have a remedy of their own pass unchanged, as does a lack of memory.
    2. With a remedy, any other error is turned, since damaged files raise anything from EOFError
       to UnpicklingError: "THING: cannot be read (NAME OF THE ERROR: TEXT); REMEDY".
    3. Without a remedy, this is done for a ValueError or OSError only: "THING: TEXT". All others
       pass unchanged.
    """
    try:
        yield
    except (UsageError, RunError, MemoryError):
        raise
    except Exception as error:
        error_name = type(error).__name__  # such as "EOFError"
        if error_name == "OutOfMemoryError":  # torch's, by name: this module does not import torch
            raise

        if remedy:
            text = " ".join(str(error).split())[:200]  # in one line: libraries write many
            raise UsageError(f"{thing}: cannot be read ({error_name}: {text}); {remedy}") from error

        if isinstance(error, ValueError | OSError):
            raise UsageError(f"{thing}: {error}") from error
        raise  # a fault of this program, which needs its traceback


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
