"""Program: a folder of images as a task or as a pool.

A task is a folder of class folders, or of train/, val/ and test/ (or what people call these, see
`part_of`) with class folders each. What is refused are folders that cannot be meant so. How a
folder was understood is printed before a run, see `support.looking.describe`.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

from data import SPLITS, Pool, Split, Task, seed_for

Label = int | list[int]  # the class, such as 3; or for each class 1 yes, -1 no, 0 not counted
Entries = list[tuple[str, Label]]  # image file relative to the dataset's folder, and its label
# Folders that systems make, such as a NAS for its thumbnails and a Mac for what it packs. They are
# left out, as are hidden files and folders, whose names begin with a dot.
OF_SYSTEMS = {
    "@eaDir", "@Recycle", "@Recently-Snapshot", "#recycle", "#snapshot", "$RECYCLE.BIN",
    "System Volume Information", "lost+found", "__MACOSX",
}  # fmt: skip
PARTS = {  # what folders of parts are called, see `part_of`, and what they are
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
CONVERT = "images are read as JPEG, PNG, BMP, TIFF, PPM or WebP: convert others, unpack archives"


# --- what lies below a folder -------------------------------------------------------------------


class Found(NamedTuple):
    """What lies below a folder, see `find_images`."""

    images: list[Path]  # sorted by path
    left_out: Counter[str]  # how many other files there are, by ending: {".heic": 2}
    faults: list[str]  # links to nowhere, and folders that cannot be read


def find_images(root: Path) -> Found:
    """Find all image files below a folder, except what is hidden or OF_SYSTEMS.

    Links are followed, but no folder is entered twice: a link may lead back.
    """
    found = Found([], Counter(), [])
    look_into(root, found, set())
    found.images.sort(key=str)  # as text: comparing paths takes three times as long
    return found


def look_into(place: Path, found: Found, entered: set[Path]) -> None:
    """Add what lies below a folder to `found`, unless it is one of those already `entered`.

    Folders are entered in the order of their names: of two links to one folder, the first counts.
    """
    real = place.resolve()  # where the folder lies, if `place` is a link
    if real in entered:
        return
    entered.add(real)
    try:
        paths = shown(place)
    except OSError as error:
        found.faults.append(f"{place}: cannot be read ({error.strerror}); see its permissions")
        return
    for path in paths:
        # A folder or a broken link may be called like an image. Reading it will say so.
        if path.suffix.lower() in IMG_EXTENSIONS:
            found.images.append(path)
        elif path.is_dir():
            look_into(path, found, entered)
        elif leads_nowhere(path):
            found.faults.append(say_nowhere(path))
        else:
            found.left_out[path.suffix.lower()] += 1


def shown(place: Path) -> list[Path]:
    """Return what is directly in a folder, except hidden or OF_SYSTEMS, by name. Raises OSError."""
    paths = [path for path in place.iterdir() if path.name not in OF_SYSTEMS]
    return sorted((path for path in paths if path.name[0] != "."), key=lambda path: path.name)


def subfolders(place: Path) -> list[Path]:
    """Return the folders directly in a folder, except hidden or OF_SYSTEMS, by name."""
    return [path for path in shown(place) if path.is_dir()]


def has_images(place: Path) -> bool:
    """Whether image files lie directly in a folder, judged by their names."""
    return any(path.suffix.lower() in IMG_EXTENSIONS for path in shown(place))


def leads_nowhere(path: Path) -> bool:
    """Whether a path is a link to something that is not there, as on a disk not mounted."""
    return path.is_symlink() and not path.exists()


def say_nowhere(path: Path) -> str:
    """Return that a link leads nowhere, and what to do."""
    return f"{path}: is a link to nowhere; bring back what it leads to, or remove it"


def in_words(left_out: Mapping[str, int]) -> str:
    """Return as a text how many files have which ending, the most frequent ending first.

    >>> in_words({".txt": 2, "": 1})
    '2 .txt, 1 without an ending'
    """
    most_first = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n} {ending or 'without an ending'}" for ending, n in most_first)


# --- a pool -------------------------------------------------------------------------------------


def pool_of(root: Path) -> Pool:
    """Return all images below a folder. Raises ValueError where it has none, or a fault."""
    images, left_out, faults = find_images(root)
    if faults:
        raise ValueError("; ".join(faults))
    if not images:
        raise ValueError(say_no_image(f"{root} has no images", left_out))
    return Pool(images, left_out=left_out)


def say_no_image(what: str, left_out: Mapping[str, int]) -> str:
    """Return that something has no images, what there is instead, and what to do."""
    return f"{what}, but {in_words(left_out)}; {CONVERT}" if left_out else what


# --- a task -------------------------------------------------------------------------------------


def folder(root: str | Path, seed: int) -> Task:
    """Read a task: a folder of class folders, or of train/, val/, test/ with class folders each.

    A missing test or val is taken from train, see `holdout`. Raises ValueError with all faults.
    """
    root = Path(root)
    parts = find_parts(root)  # there is always a train, which may be `root` itself
    classes = list_classes(parts)
    entries, left_out, faults = list_images(root, parts, classes)
    drawn = [name for name in SPLITS if name not in parts]
    for name in reversed(drawn):  # test first, so val is a fifth of what test leaves
        entries["train"], entries[name] = holdout(entries["train"], seed, name)
    faults += find_gaps(entries, classes, left_out)  # empty parts, and classes that train lacks
    if faults:
        raise ValueError("; ".join(faults))
    train, val, test = (split_of(root, entries[name]) for name in SPLITS)
    return Task(f"folder:{root}", train, val, test, classes, left_out=left_out, drawn=drawn)


class Listed(NamedTuple):
    """The images of all parts, see `list_images`."""

    entries: dict[str, Entries]  # by part
    left_out: Counter[str]  # as in `Found`, also of files beside class folders and parts
    faults: list[str]  # as in `Found`


def list_images(root: Path, parts: Mapping[str, Path], classes: Sequence[str]) -> Listed:
    """List the images in all class folders of the parts of `root`.

    Where `root` has no parts, it is the part train itself; its folders are the class folders.
    `classes` are the names of all class folders; an image's label is the place of its class there.
    """
    listed = Listed({}, count_files_beside({root, *parts.values()}), [])
    class_folders = {path for place in parts.values() for path in subfolders(place)}
    neither = {*folders_beside(root, parts)} - class_folders  # neither parts nor classes
    listed.left_out.update(count_files_in(neither))
    for part, place in parts.items():
        entries: Entries = []
        listed.entries[part] = entries
        for class_folder in subfolders(place):
            found = find_images(class_folder)
            label = classes.index(class_of(class_folder))
            entries += [(file.relative_to(root).as_posix(), label) for file in found.images]
            listed.left_out.update(found.left_out)
            listed.faults.extend(found.faults)
    return listed


def class_of(class_folder: Path) -> str:
    """Return the class of a class folder: its name, in which accents are stored in one way."""
    return unicodedata.normalize("NFC", class_folder.name)


def split_of(root: Path, entries: Entries) -> Split:
    """Make a split of image files, each named relative to the folder `root`, and labels."""
    files = [root / file for file, _ in entries]
    labels = [label for _, label in entries]
    return Split(files, torch.tensor(labels, dtype=torch.int64))


def find_parts(root: Path) -> dict[str, Path]:
    """Return the folders of train, val and test by these names; without any, {"train": root}.

    A folder that has one of the names in PARTS is a part if it holds class folders; else it is a
    class. If `are_classes` finds that all of them are classes, there are no parts.

    Raises ValueError for two parts of one meaning, for those that `check_parts` refuses, and where
    a link leads nowhere: each may be meant in two ways.
    """
    check_links([root])
    parts: dict[str, Path] = {}
    for path in subfolders(root):
        part = part_of(path.name)
        if part is None or not holds_class_folders(path):
            continue
        if part in parts:
            raise ValueError(f"{parts[part]} and {path} both mean {part}: make one of them")
        parts[part] = path
    if not parts or are_classes(root, parts):
        return {"train": root}
    check_parts(root, parts)
    check_links(parts.values())
    return parts


def check_parts(root: Path, parts: Mapping[str, Path]) -> None:
    """Raise ValueError for parts without train, and for a train that may be a class.

    It may be one if it is the only part, and other folders with images lie beside it.
    """
    if "train" not in parts:
        names = ", ".join(path.name for path in parts.values())
        raise ValueError(
            f"{root} holds {names}, but no train: put the classes to train on into {root}/train/,"
            f" or rename {names} if these are classes"
        )
    if len(parts) > 1:  # then train is no class, and folders beside the parts are left out
        return
    if beside := [path.name for path in folders_beside(root, parts) if find_images(path).images]:
        raise ValueError(
            f"{parts['train']} holds class folders, and {', '.join(beside)} beside it is no part:"
            f" if these are classes, rename {parts['train'].name}, else put them elsewhere"
        )


def part_of(name: str) -> str | None:
    """Return which part a folder of this name is, in small or capital letters; None: no part.

    >>> part_of("Training"), part_of("test_set"), part_of("roses")
    ('train', 'test', None)
    """
    return PARTS.get(re.sub(r"[ _-]?set$", "", name.lower()))


def folders_beside(root: Path, parts: Mapping[str, Path]) -> list[Path]:
    """Return the folders directly in `root` that are no parts."""
    return [path for path in subfolders(root) if path not in parts.values()]


def holds_class_folders(place: Path) -> bool:
    """Whether a folder holds class folders: several, or one and no images beside it."""
    n = len(subfolders(place))
    return n > 1 or (n == 1 and not has_images(place))


def are_classes(root: Path, parts: Mapping[str, Path]) -> bool:
    """Whether `parts` are classes that only have the name of a part, as test/ beside control/.

    They are if there is no train, and there are folders beside them, none of which has the name of
    a folder inside them.
    """
    beside = {path.name for path in folders_beside(root, parts)}
    inside = {path.name for place in parts.values() for path in subfolders(place)}
    # A folder beside with such a name is a class, of which the part has images, too.
    return "train" not in parts and bool(beside) and not beside & inside


def check_links(places: Iterable[Path]) -> None:
    """Raise ValueError for links to nowhere directly in some folders: a link may be a class."""
    if lost := [path for place in places for path in shown(place) if leads_nowhere(path)]:
        raise ValueError("; ".join(map(say_nowhere, lost)))


def list_classes(parts: Mapping[str, Path]) -> list[str]:
    """Return the names of the class folders in all parts, sorted.

    Raises ValueError where there are fewer than two, and where a class holds nothing but parts.
    """
    folders = [path for place in parts.values() for path in subfolders(place)]
    classes = sorted({class_of(path) for path in folders})
    if len(classes) < 2:
        raise ValueError(say_too_few(parts["train"], classes))  # there is always a train
    for path in folders:
        inside = [inner.name for inner in subfolders(path)]
        if inside and all(map(part_of, inside)) and not has_images(path):
            raise ValueError(
                f"{path} holds {' and '.join(inside)}: put parts above classes, as"
                f" {path.parent}/{inside[0]}/{path.name}"
            )
    return classes


def say_too_few(place: Path, classes: Sequence[str]) -> str:
    """Return that a folder of class folders has none or one, its `classes`, and what to do."""
    inside = skip_single_folders(place)
    if len(subfolders(inside)) > 1:
        remedy = f"the classes may be in {inside}: give that"
    else:
        remedy = f"put the images into {place}/CLASS/; {CONVERT}"
    holds = ", ".join(classes) or "none"
    return f"needs two or more class folders, and {place} holds {holds}: {remedy}"


def skip_single_folders(place: Path) -> Path:
    """Go down while a folder holds a single one, such as what an archive was unpacked into.

    Five folders at most: a link may lead back.
    """
    for _ in range(5):
        inside = subfolders(place)
        if len(inside) == 1:
            place = inside[0]
    return place


def count_files_beside(places: Iterable[Path]) -> Counter[str]:
    """Return how many files lie beside class folders or parts, by ending."""
    left_out = Counter[str]()
    for place in places:
        for path in shown(place):
            if not path.is_dir():
                ending = path.suffix.lower()
                is_image = ending in IMG_EXTENSIONS  # then its place is why it is left out
                left_out[f"{ending} beside class folders" if is_image else ending] += 1
    return left_out


def count_files_in(places: Iterable[Path]) -> Counter[str]:
    """Return how many files lie in `places`, folders beside the parts, by ending."""
    left_out = Counter[str]()
    for place in places:
        images, others, _ = find_images(place)  # faults do no harm where nothing is taken
        left_out += others + Counter(f"{path.suffix.lower()} beside parts" for path in images)
    return left_out


def find_gaps(
    entries: Mapping[str, Entries], classes: Sequence[str], left_out: Mapping[str, int]
) -> list[str]:
    """Return a fault for an empty part, and for classes of which train has no image.

    An image has one class here, so each label is a number. Files that were `left_out` may be what
    is missing, so the faults name their endings.
    """
    faults = [
        say_no_image(f"no image for {part}", left_out) for part in SPLITS if not entries[part]
    ]
    to_train_on = {label for _, label in entries["train"]}
    lacking = [name for label, name in enumerate(classes) if label not in to_train_on]
    if lacking and entries["train"]:  # an empty train has its fault already
        line = f"no image for train of class {', '.join(lacking)}"
        faults.append(say_no_image(line, left_out))
    return faults


def holdout(entries: Entries, seed: int, split_name: str) -> tuple[Entries, Entries]:
    """Take a fifth of each class out of `entries`; returns (rest, taken), each in its old order.

    The files of a class are sorted by a hash of seed, `split_name` ("test" or "val") and file name;
    the first fifth is taken. So it does not depend on the order in which files are listed. A fifth
    is rounded down, but is at least one image; a class with a single image keeps it. CUB-200 is
    split into 4800 and 1194 images, as many as in the authors' program.

    >>> holdout([("1.jpg", 0), ("2.jpg", 0), ("3.jpg", 1)], 0, "val")
    ([('1.jpg', 0), ('3.jpg', 1)], [('2.jpg', 0)])
    """
    by_class = defaultdict[Label, Entries](list)
    for entry in entries:
        _, label = entry  # a number: VOC, where it is a list, has an official val
        by_class[label].append(entry)
    chosen = set[str]()
    for of_class in by_class.values():
        files = [file for file, _ in of_class]
        files.sort(key=partial(seed_for, seed, split_name))  # of each file the sha256, a number
        if len(files) > 1:
            chosen.update(files[: max(1, len(files) // 5)])
    rest = [entry for entry in entries if entry[0] not in chosen]
    taken = [entry for entry in entries if entry[0] in chosen]
    return rest, taken
