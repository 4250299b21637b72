"""Errors that a person is told in one line."""

import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """A wrong input: one line naming the thing and the remedy. Exit code 2."""


class RunError(Exception):
    """A run that could not go on (a full disk, a damaged file): one line, exit code 1."""


@contextmanager
def checking(thing: str, remedy: str = "") -> Iterator[None]:
    """Turn an error inside the block into a UsageError that begins with `thing`.

    Without a remedy the error is a ValueError or OSError whose text explains it. With a remedy it
    may be any, since damaged files raise anything from EOFError to UnpicklingError; the text then
    says that `thing` cannot be read.
    """
    try:
        yield
    except (UsageError, RunError, MemoryError):
        raise
    except Exception as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError":  # torch's; this module does without torch
            raise
        if remedy:
            said = " ".join(str(error).split())[:200]
            raise UsageError(f"{thing}: cannot be read ({kind}: {said}); {remedy}") from error
        if isinstance(error, ValueError | OSError):
            raise UsageError(f"{thing}: {error}") from error
        raise


def nearest(word: str, known: Collection[str]) -> str:
    """'did you mean X?', or the list of what there is."""
    close = difflib.get_close_matches(word, known, 1)
    if close:
        return f"did you mean {close[0]}?"
    return f"there are {', '.join(known)}"
