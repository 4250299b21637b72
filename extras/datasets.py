"""Program: `bisslight data check`, which opens every image of a data set before a run does."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from config import NAMES, name_or_folder
from data import Pool, Task
from support.benchmarks import FETCH, open_pool, open_task, place_of, say_no_folder
from support.errors import UsageError, as_usage_error, collected
from support.folders import find_images, part_of, subfolders
from support.looking import (
    describe,
    files_of,
    find_copies,
    find_lacking_classes,
    find_shared_images,
    hash_images,
    look_at_files,
)
from support.runs import Track, untracked

MOST_NAMED = 3  # groups of copies that a line names
DIVIDE = (
    "images were drawn one by one: if several show one patient, film or object, divide them"
    " yourself, as docs/guide.md shows"
)


class Check(BaseModel):
    """What was found in a data set."""

    name: str
    images: int  # how many were opened
    holds: list[str]  # its classes with their counts, and what was left out, see `describe`
    left_out: dict[str, int]  # files that are no images by their names, by ending
    problems: list[str]
    copies: list[list[str]] = []  # files with the same bytes, two or more each

    def __str__(self) -> str:
        """Return a line for each problem, what there is, and how many problems."""
        n = len(self.problems)
        opened = f"{self.images} image{'' if self.images == 1 else 's'}"
        end = f"{n or 'no'} problem{'' if n == 1 else 's'} in {opened}"
        return "\n".join([*self.problems, self.name, *self.holds, end])


def check(
    name: str,
    root: Path,
    partial: bool = False,
    as_pool: bool = False,
    track: Track = untracked,
) -> Check:
    """Open every image of a benchmark or of a folder, and list all that is wrong with it.

    A folder that is named folder:DIR, or has several folders or train/, is a labelled task, unless
    it is to be checked `as_pool`; any other one is a pool. With `partial` a benchmark may be a
    subset. `track` shows how far the reading of images is. Raises UsageError if there is no such
    data set.
    """
    given = name  # of a folder, with or without "folder:"; `name` has it from here on
    with as_usage_error("data check"):
        name = name_or_folder(given)
    if as_pool and not name.startswith("folder:"):
        raise UsageError(f"--pool: is for a folder of images; {name} is checked as what it is")
    place = place_of(name, root)
    check_there(name, place)
    is_task = not as_pool and is_labelled(given, place)
    problems: list[str] = []
    source: Task | Pool | None = None
    with collected(problems):  # it goes on with the images where opening is refused
        # Seed 0 may draw parts; all images are opened, in whichever part they are.
        source = open_task(name, 0, root, partial=partial) if is_task else open_pool(name, root)
    return look_through(name, place, source, problems, track)


def check_there(name: str, place: Path) -> None:
    """Raise UsageError where the folder `place` of a data set is not there."""
    if name.startswith("omniglot") or place.is_dir():  # handwriting is a part of this program
        return
    if name in NAMES:
        raise UsageError(f"{name}: there is no folder {place}; {FETCH.format(name)}")
    raise UsageError(f"{name}: {say_no_folder(place)}")


def is_labelled(given: str, place: Path) -> bool:
    """Whether what a person calls `given`, and lies at `place`, is a labelled task."""
    if given == "omniglot":  # all of its alphabets; a task of it is called omniglot:ALPHABET
        return False
    if given in NAMES or given.startswith("folder:"):  # folder: says that it is a task
        return True
    return looks_labelled(place)


def looks_labelled(place: Path) -> bool:
    """Whether a folder has several folders, which may be classes, or the part train."""
    names = [path.name for path in subfolders(place)]
    return len(names) > 1 or "train" in map(part_of, names)


def look_through(
    name: str, place: Path, source: Task | Pool | None, problems: list[str], track: Track
) -> Check:
    """Read all images of a task or pool, or those below `place` if it could not be opened.

    What is wrong with them is added to `problems`, which has what was wrong in opening it.
    """
    found = source or Pool(find_images(place).images)
    looks = look_at_files(files_of(found), track)
    problems += [look.fault for look in looks.values() if look.fault]
    copies: list[list[str]] = []
    # Files of the same bytes, in one part or in two; the line about parts counts these again. In a
    # pool, copies are no problem.
    if isinstance(found, Task):
        copies = [[str(file) for file in group] for group in find_copies(looks)]
        hashes = hash_images(found, looks)
        problems += find_shared_images(found, hashes)  # between train, val and test
        problems += say_copies(copies, place)
    images = sum(found.sizes().values()) if isinstance(found, Task) else len(found.images)
    return Check(
        name=name,
        images=images,
        holds=say_all(source) if source else [f"images: {images}"],
        left_out=dict(found.left_out),
        problems=problems,
        copies=copies,
    )


def say_all(source: Task | Pool) -> list[str]:
    """Return how a data set was understood, classes that a part lacks, and how parts were drawn."""
    if isinstance(source, Pool):
        return describe(source)
    return describe(source) + find_lacking_classes(source) + ([DIVIDE] if source.drawn else [])


def say_copies(copies: Sequence[Sequence[str]], place: Path) -> list[str]:
    """Return a line if files of the folder `place` have the same bytes; the first are named."""
    if not copies:
        return []
    named = [
        " = ".join(str(Path(file).relative_to(place)) for file in group)
        for group in copies[:MOST_NAMED]
    ]
    rest = f" and {len(copies) - MOST_NAMED} more (--json has all)" if copies[MOST_NAMED:] else ""
    return [f"images that are there twice or more: {', '.join(named)}{rest}; keep one of each"]
