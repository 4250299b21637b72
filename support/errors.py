"""Errors that a person is told in one line, and how others are turned into them."""

import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any


class UsageError(Exception):
    """A wrong input: one line naming the thing and the remedy. Exit code 2."""


class RunError(Exception):
    """A run that could not go on (a full disk, a damaged file): one line, exit code 1."""


@contextmanager
def checking(thing: str, remedy: str = "") -> Iterator[None]:
    """Turn ValueError and OSError (with a remedy: any Exception) into a UsageError on `thing`."""
    kinds: Any = Exception if remedy else (ValueError, OSError)
    try:
        yield
    except kinds as error:  # torch.load raises anything from EOFError to UnpicklingError
        if isinstance(error, UsageError | RunError) or "MemoryError" in type(error).__name__:
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        why = f"cannot be read ({said}); {remedy}" if remedy else str(error)
        raise UsageError(f"{thing}: {why}") from error


def nearest(word: str, known: Collection[str]) -> str:
    """'did you mean X?', or the list of what there is."""
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
