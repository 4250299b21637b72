"""Program: names and paths that are nearly right, and which ones may be meant."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


def suggest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for the one of the names that is nearly this one, else "".

    >>> suggest("epoch", ["epochs", "seeds"]), suggest("grid", ["grid_seeds"])
    ('; did you mean epochs?', '')
    """
    near = get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def find_near(place: Path, pattern: str = "*") -> Path | None:
    """Return a path beside `place` whose name is nearly that of `place`, which does not exist.

    Returns None if there is none. `pattern` says what is looked at: "*/" for folders alone.
    """
    beside = [near.name for near in place.parent.glob(pattern)]
    names = get_close_matches(place.name, beside, n=1, cutoff=0.7)
    return place.with_name(names[0]) if names else None


def say_not_here(place: Path, remedy: str) -> str:
    """Return a text: a path does not exist, and which path may be meant, or else the remedy."""
    near = find_near(place)
    return f"is not here; {remedy}" if near is None else f"is not here; is it {near}?"
