"""Program: errors that a person is told in one line."""

import difflib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class UsageError(Exception):
    """Wrong inputs: a line for each, naming the thing and the remedy. Exit code 2."""

    def __str__(self) -> str:
        return "\n".join(self.args)


class RunError(Exception):
    """A run that could not go on (a full disk, a damaged file): one line, exit code 1."""


@contextmanager
def as_usage_error(thing: str, remedy: str = "") -> Iterator[None]:
    """Turn an error inside the block into a UsageError that begins with `thing`.

    Without a remedy the error is a ValueError or OSError whose text explains it. With a remedy it
    may be any, since damaged files raise anything from EOFError to UnpicklingError; the text then
    says that `thing` cannot be read.
    """
    try:
        yield
    except (UsageError, RunError, MemoryError):  # these say what to do already
        raise
    except Exception as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError":  # torch's; this module does without torch
            raise
        if remedy:
            text = " ".join(str(error).split())[:200]  # one line, of libraries that write many
            raise UsageError(f"{thing}: cannot be read ({kind}: {text}); {remedy}") from error
        if isinstance(error, ValueError | OSError):
            raise UsageError(f"{thing}: {error}") from error
        raise  # a fault of this program, which needs its traceback


def attempt(
    problems: list[str], step: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """The result of a step; if inputs of it are wrong, that goes to the problems."""
    try:
        return step(*args, **kwargs)
    except UsageError as error:
        problems += error.args
        return None


def nearest(word: str, known: Collection[str]) -> str:
    """'did you mean X?', or the list of what there is, if it is short."""
    close = difflib.get_close_matches(word, known, 1)
    if close:
        return f"did you mean {close[0]}?"
    if len(known) > 20:
        return "see --help"
    return f"there are {', '.join(known)}"
