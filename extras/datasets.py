"""Program: `bisslight data check`, which opens every image of a data set before a run does."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from config import name_or_folder
from data import (
    SPLITS,
    Look,
    Pool,
    Split,
    Task,
    begin_reading,
    find_folder_of_classes,
    find_images,
    in_words,
    overheard,
    read_all,
    read_folder,
    read_image,
    say_remedies,
    subfolders,
)
from support.benchmarks import (
    BENCHMARKS,
    omniglot_pool,
    omniglot_task,
    open_task,
    place_of,
    say_no_folder,
)
from support.checks import find_doubts_of_copy, find_empty
from support.errors import UsageError, as_usage_error, collected
from support.experiment import check_numbers
from support.names import describe, find_doubtful_names, find_masks_in_pool, find_unread, look_into
from support.runs import READING, Track, untracked

MOST_NAMED = 3  # files and pictures that a line on copies names


class Copies(BaseModel):
    """Files that show the same picture."""

    files: list[str]
    classes: list[str]  # those of the files, such as ["daisy", "rose"]
    parts: list[str]  # and their parts, such as ["train"]


class Check(BaseModel):
    """What was found in a data set."""

    name: str
    images: int  # how many were opened
    holds: list[str]  # its classes with their counts, and what was left out, see `names.describe`
    left_out: dict[str, int]  # files that are no images by their names, by ending
    problems: list[str]
    copies: list[Copies] = []  # of each picture that is there twice or more
    doubts: list[str] = []  # the lines of `holds` on what may be meant otherwise, such as masks

    def __str__(self) -> str:
        """Return a line for each problem, what there is, and how many problems."""
        n = len(self.problems)
        opened = f"{self.images} image{'' if self.images == 1 else 's'}"
        end = f"{n or 'no'} problem{'' if n == 1 else 's'} in {opened}"
        if self.doubts:
            doubts = "a doubt" if len(self.doubts) == 1 else f"{len(self.doubts)} doubts"
            end += f", {'and' if n else 'but'} {doubts}: see above"
        return "\n".join([*self.problems, f"{self.name}", *self.holds, end])


def check(
    name: str,
    root: Path,
    partial: bool = False,
    as_pool: bool = False,
    track: Track = untracked,
) -> Check:
    """Open every image of a benchmark or of a folder, and list all that is wrong with it.

    A folder that has two or more folders is a labelled task, unless it is to be checked `as_pool`;
    any other one is a pool where it is named as --pool names it, DIR, and a wrong task where it is
    named as --dataset does, folder:DIR.
    With `partial` a benchmark may be a subset. `track` shows how far the reading of images is.
    Raises UsageError if there is no such data set.
    """
    is_labelled = name.startswith("folder:") and not as_pool
    with as_usage_error("data check"):
        name = name_or_folder(name)
    if as_pool and not name.startswith("folder:"):
        raise UsageError(f"--pool: is for a folder of images; {name} is checked as what it is")
    if name.partition(":")[0] == "omniglot":
        return check_omniglot(name)
    place = place_of(name, root)
    if not place.is_dir():
        raise UsageError(f"{name}: {say_no_folder(place)}")
    begin_reading()
    found = find_images(place)
    pool = Pool(found.images, left_out=found.left_out, unread=found.unread)
    holds, doubts, task, benchmark, problems = open_as_a_run_does(
        name, place, pool, root, partial, as_pool, is_labelled
    )
    told = "\n".join(problems)  # as one text, since a problem may be several faults
    problems += [fault for fault in found.faults if fault not in told]
    files = files_to_read(found.images, task)
    looks, unreadable = read_each(files, track)
    problems += unreadable
    copies: list[Copies] = []
    if task:
        copies = find_copies(task, looks)
        problems += say_copies(copies, place) + find_unread(task) + find_doubtful_names(task)
        for split in SPLITS:
            problems += find_empty(split, getattr(task, split).images, looks)
    elif benchmark:
        problems += find_doubts_of_copy(benchmark, looks, partial)
    elif name not in BENCHMARKS and found.images:
        problems += find_empty("pool", found.images, looks)
        problems += find_unread(pool) + find_masks_in_pool(found.images)
    return Check(
        name=name,
        images=len(files),
        holds=holds,
        left_out=found.left_out,
        problems=problems,
        copies=copies,
        doubts=doubts,
    )


def files_to_read(found: Sequence[Path], task: Task | None) -> list[Path]:
    """Return the files that `check` reads: all that were found in a folder, and those of its task.

    Those beside class folders are none of the task, but a pool may take them.
    """
    if not task:
        return [*found]
    class_of, _ = classes_and_parts(task)
    files = [file for file in found if not file.is_dir()]  # a class folder may be called c.jpg
    return list(dict.fromkeys([*files, *sorted(class_of, key=str)]))  # each once


class Opened(NamedTuple):
    """What a data set is once it was opened."""

    holds: list[str]  # as in `Check`
    doubts: list[str]  # as in `Check`
    task: Task | None  # that of a folder, whose images are compared with each other
    benchmark: Task | None  # that of a benchmark, whose lists a run could take
    problems: list[str]  # those that kept it from being opened, and faults of a folder


def open_as_a_run_does(
    name: str,
    place: Path,
    pool: Pool,
    root: Path,
    partial: bool,
    as_pool: bool,
    is_labelled: bool,
) -> Opened:
    """Open a benchmark, or the folder `place` as a task or a pool, and say what it holds.

    `pool` has all images of the folder; where nothing else can be opened, it is what is described.
    `as_pool`, `is_labelled`: the user says that the folder is a pool, or a task; neither may be.
    """
    _, *others = describe(pool)  # what was left out
    holds = [f"images: {len(pool.images)}", *others]
    doubts: list[str] = []
    task: Task | None = None
    benchmark: Task | None = None
    problems: list[str] = []
    with collected(problems):
        if name in BENCHMARKS:
            opened = open_task(name, 0, root, partial=partial)
            holds = describe(opened)
            check_numbers(opened)
            benchmark = opened
        else:
            with as_usage_error(str(place)):  # such as of a folder that cannot be entered
                of_classes = None if as_pool else find_folder_of_classes(place)
                may_be_task = bool(of_classes or pool.images)  # otherwise there is nothing in it
                if of_classes == place or (is_labelled and may_be_task):
                    holds[0] += "; if they are to have no labels, add --pool"
                    task, faults = read_folder(place, seed=0)
                    facts, doubts, left_out = look_into(task)
                    holds = [*facts, *doubts, *left_out]
                    problems += faults
                elif pool.images:
                    holds = [describe_pool(place, pool, as_pool), *others]
                else:
                    problems.append(say_no_images(place, pool.left_out))
    return Opened(holds, doubts, task, benchmark, problems)


def say_no_images(place: Path, left_out: Mapping[str, int]) -> str:
    """Return that a folder has no images, what it has instead, and what to do."""
    but = f", but {in_words(left_out)}" if left_out else ""
    remedy = say_remedies(left_out) or (
        f"put labelled ones into {place}/CLASS, a folder for each class, and those of a pool, which"
        f" need no labels, into {place}"
    )
    return f"{place}: has no images{but}; {remedy}"


def describe_pool(place: Path, pool: Pool, as_pool: bool) -> str:
    """Say how many images the folder `place` has and, unless it was asked for, why it is a pool."""
    unlabelled, *_ = describe(pool)
    if as_pool:
        return unlabelled
    folders = subfolders(place)  # one at most
    why = f"{folders[0].name} is its only folder" if folders else "it has no folders"
    inside = find_folder_of_classes(folders[0]) if folders else None
    labelled = (
        f"If they are to be labelled, the classes may be in {inside}: give that"
        if inside
        else "A labelled data set has a folder for each of two or more classes:"
        f" {place.name}/CLASS/IMAGE"
    )
    return f"a pool, since {why}; {unlabelled}. {labelled}"


def read_each(files: Sequence[Path], track: Track) -> tuple[dict[Path, Look], list[str]]:
    """Read image files to their end; return what was found in them, and what is wrong with some.

    The first leaves out a file that cannot be read, but not one whose decoder only warns.
    """
    found, said = read_all(files, lambda looks: track(looks, len(files), READING))
    looks = {file: look for file, look in zip(files, found, strict=True) if not look.fault}
    # Decoders rarely warn, and do not say of which file: each is read alone to learn that.
    again = track(looks, len(looks), READING) if said else []
    warned = {file: warnings_of(file) for file in again}
    problems: list[str] = []
    for file, look in zip(files, found, strict=True):
        if look.fault:
            problems.append(look.fault)
        problems += [f"{file}: its decoder warns ({text})" for text in warned.get(file, [])]
    return looks, problems


def warnings_of(file: Path) -> list[str]:
    """Return what decoders warn of in an image file that can be read."""
    with overheard() as said:
        read_image(file)
    return said


def check_omniglot(name: str) -> Check:
    """Describe the handwriting that is a part of this program: the pool, or an alphabet's task."""
    source: Pool | Task
    if name == "omniglot":
        source = omniglot_pool()
        images = len(source.images)
    else:
        source = omniglot_task(name.removeprefix("omniglot:"), seed=0)
        images = sum(source.sizes().values())
    return Check(name=name, images=images, holds=describe(source), left_out={}, problems=[])


def find_copies(task: Task, looks: Mapping[Path, Look]) -> list[Copies]:
    """Return what files show the same picture, two or more of them, whatever their format.

    Those in several classes come first, then those in several parts. Copies in one class are a
    problem, too: a split may put one of them into training and another one into the test.
    """
    groups = defaultdict[bytes, list[Path]](list)  # files of the same picture, by its digest
    for file, look in looks.items():
        groups[look.digest].append(file)
    class_of, part_of = classes_and_parts(task)
    copies = [
        Copies(
            files=[str(file) for file in files],
            classes=names_of(files, class_of),
            parts=names_of(files, part_of),
        )
        for files in groups.values()
        if len(files) > 1
    ]
    return sorted(copies, key=lambda group: (len(group.classes) < 2, len(group.parts) < 2))


def names_of(files: Iterable[Path], name_of: Mapping[Path, str]) -> list[str]:
    """Return the names that these files have in `name_of`, each once; some may have none."""
    return sorted({name_of[file] for file in files if file in name_of})


def say_copies(copies: Sequence[Copies], place: Path) -> list[str]:
    """Return a line if files of the folder `place` show the same picture; the first are named."""
    if not copies:
        return []
    n = len(copies)
    pictures = "1 picture is" if n == 1 else f"{n} pictures are"
    first = ", ".join(say_same(group, place) for group in copies[:MOST_NAMED])
    rest = f" and {n - MOST_NAMED} more (--json names all)" if n > MOST_NAMED else ""
    return [f"{pictures} there twice or more: {first}{rest}; keep one file of each"]


def say_same(group: Copies, place: Path) -> str:
    """Return the files of a picture, and their classes and parts where these are several.

    >>> group = Copies(files=["P/a/0.png", "P/b/1.png"], classes=["a", "b"], parts=["train"])
    >>> say_same(group, Path("P"))
    'a/0.png = b/1.png (classes a, b)'
    """
    names = [str(Path(file).relative_to(place)) for file in group.files]
    if len(names) > MOST_NAMED:
        names[MOST_NAMED:] = [f"{len(names) - MOST_NAMED} more"]
    where = [
        f"{what} {', '.join(several)}"
        for what, several in (("classes", group.classes), ("parts", group.parts))
        if len(several) > 1
    ]
    return " = ".join(names) + (f" ({'; '.join(where)})" if where else "")


def classes_and_parts(task: Task) -> tuple[dict[Path, str], dict[Path, str]]:
    """Return the class of each file of a folder, such as "rose", and its part, such as "train"."""
    class_of: dict[Path, str] = {}
    part_of: dict[Path, str] = {}
    for name in SPLITS:
        split: Split = getattr(task, name)
        for file, label in zip(split.images, split.targets.tolist(), strict=True):
            class_of[file] = task.classes[label]
            part_of[file] = name
    return class_of, part_of
