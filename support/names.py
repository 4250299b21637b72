"""Program: what a data set holds, and what the names of its files and folders say, before a run.

Masks, changed copies and parts of the data are known by such names alone, so they are told, not
refused. Paths are texts here: of very many files, `pathlib` takes its time.
"""

import functools
import itertools
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from config import BENCHMARKS
from data import (
    MOST_SIZES,
    NO_CLASS,
    PACKED,
    SPLITS,
    WORD,
    Pool,
    Split,
    Stored,
    Task,
    as_compared,
    count_by_class,
    in_words,
    part_in_name,
    say_remedies,
    words_of,
)

# Words in a name that say that a mask or a copy was made of another image, as 0_mask.png of 0.png.
MASKS = {*(word for word, meaning in NO_CLASS.items() if meaning == "mask"), "seg", "anno", "annot"}
COPIES = {"copy", "aug", "augmented", "flip", "flipped", "mirrored", "rot", "rotated", "cropped"}
COPIES |= {"crop", "resized", "thumb", "thumbnail", "edited"}
MADE = MASKS | COPIES
# Names of a folder that may hold what belongs to the images of all classes; mask alone is a class.
FOLDERS_OF_MASKS = {"masks", "labels", "annotations", "segmentation", "segmentations"}
FOLDERS_OF_MASKS |= {"gt", "groundtruth", "ground truth"}
# Words that say what a file is, of which image it ever may be: those of masks and copies, of the
# image itself, as in img_0.png beside mask_0.png, and the first one of ground_truth.
ROLES = MADE | {word for word, meaning in NO_CLASS.items() if meaning == "image"}
ROLES |= {"photo", "picture", "original", "orig", "raw", "rgb", "ground"}


@dataclass(frozen=True, eq=False)  # a place, and a file, equals itself alone: this is fast
class Place:
    """A folder that has images of a class directly in it."""

    folder: Path
    way: tuple[str, ...]  # to it from the root of its splits, see `find_roots`: ("cat", "film 1")
    class_name: str  # "" where images have no class, or several
    class_folder: Path | None  # the folder of this name: this one or one above it; it may lack
    inner: tuple[str, ...]  # the way from there to this one, such as ("film 1",)
    meanings: frozenset[str]  # what the words in its name mean, see `meanings_of`


@dataclass(frozen=True, eq=False)
class InnerFolder:
    """A folder inside of a class folder, with all images in it and below."""

    path: Path
    key: tuple[str, tuple[str, ...]]  # its class, and the way to it, such as "cat" and ("film 1",)
    splits: frozenset[str]  # those of its images
    is_whole: bool  # whether it has all images of the class folder, as cat/images


@dataclass(frozen=True, eq=False)
class ImageFile:
    """An image file, and what its path says."""

    path: str
    place: Place
    stem: str  # its name without folders and ending
    ending: str
    words: Sequence[str]  # those in its stem, but for words of its class's name
    split: str  # such as "train"; "" in a pool
    label: str  # the name of its class; where it may have several, another text for other labels


class Known(NamedTuple):
    """What a task says of an image file; a pool says nothing."""

    class_name: str = ""  # "" where images may have several classes
    split: str = ""
    label: str = ""  # see `ImageFile`


# Of each file whose name was made from another's: that one, and the words that were added.
Originals = dict[ImageFile, tuple[ImageFile, tuple[str, ...]]]


# --- files and their places ----------------------------------------------------------------------


def files_of(task: Task) -> list[ImageFile]:
    """Return the image files of a task; images in memory have none."""
    return as_files(paths_of(task), task.classes)


def paths_of(task: Task) -> dict[str, Known]:
    """Return what a task says of each image file, by its path.

    A file in two splits has the last one of train, val and test.
    """
    found: dict[str, Known] = {}
    for name in SPLITS:
        split: Split = getattr(task, name)
        if not isinstance(split.images, Tensor):
            names = names_of_labels(split, task.classes)
            labels = names
            if split.targets.ndim > 1:
                labels = [row.tobytes().hex() for row in split.targets.to(torch.int8).numpy()]
            for file, class_name, label in zip(split.images, names, labels, strict=True):
                found[str(file)] = Known(class_name, name, label)
    return with_plain_paths(found)


def places_of(paths: Mapping[str, Known], classes: Iterable[str]) -> dict[Place, set[str]]:
    """Return the places of image files, see `paths_of`, and the splits that their images are in.

    This asks of folders alone, and takes less time than `files_of`.
    """
    found = defaultdict[tuple[str, str], set[str]](set)
    for path, (class_name, split, _) in paths.items():
        found[os.path.dirname(path), class_name].add(split)  # noqa: PTH120  # as text: fast
    places = find_places(found, words_of_classes(classes))
    return {places[key]: splits for key, splits in found.items()}


def names_of_labels(split: Split, classes: Sequence[str]) -> list[str]:
    """Return the name of the class of each image; "" where an image may have several classes."""
    if split.targets.ndim > 1:
        return [""] * len(split.targets)
    # Of a subset, torchvision may know fewer names than numbers.
    return [classes[k] if k < len(classes) else str(k) for k in split.targets.tolist()]


def words_of_classes(classes: Iterable[str]) -> frozenset[str]:
    """Return all words in the names of classes."""
    return frozenset(word for name in classes for word in words_of(name))


def as_files(found: Mapping[str, Known], classes: Iterable[str] = ()) -> list[ImageFile]:
    """Return image files from their paths, each with what is known of it.

    Words of its class say nothing of a mask or a copy: where a class is called "rot", rot_1.png is
    no turned copy. Where the class of an image is not known, the words of all `classes` are these.
    """
    class_words = words_of_classes(classes)
    paths = with_plain_paths(found)
    rows = [(path, *os.path.split(path), *x) for path, x in paths.items()]
    splits_of = defaultdict[tuple[str, str], set[str]](set)
    for _, folder, _, class_name, split, _ in rows:
        splits_of[folder, class_name].add(split)
    places = find_places(splits_of, class_words)
    own_words = {name: {*words_of(name)} if name else class_words for _, name in places}
    files = []
    for path, folder, file_name, class_name, split, label in rows:
        stem, ending = os.path.splitext(file_name)  # noqa: PTH122  # as text: fast for ImageNet
        stem = unicodedata.normalize("NFC", stem)  # old Macs write accents otherwise
        words = [word for word in words_of(stem) if word not in own_words[class_name]]
        files.append(ImageFile(path, places[folder, class_name], stem, ending, words, split, label))
    return files


def with_plain_paths(found: Mapping[str, Known]) -> dict[str, Known]:
    """Return what was found by paths that can be compared.

    A path that a script may have given as cat/../cat/0.png is taken as cat/0.png. If some paths are
    absolute and others not, all become absolute.
    """
    is_mixed = len({path.startswith(os.sep) for path in found}) > 1
    plain = os.path.abspath if is_mixed else without_dots
    return {plain(path): known for path, known in found.items()}


def find_places(
    found: Mapping[tuple[str, str], set[str]], class_words: Collection[str]
) -> dict[tuple[str, str], Place]:
    """Return a place for each folder and name of a class; many files lie in one.

    `found` has the splits that their images are in.
    """
    folders = {folder: Path(folder) for folder, _ in found}
    splits_of = defaultdict[Path, set[str]](set)
    for (folder, _), splits in found.items():
        splits_of[folders[folder]] |= splits
    common, roots = common_folder(splits_of), find_roots(splits_of)
    return {
        (folder, class_name): place_of(
            folders[folder], class_name, (roots[folders[folder]], common), class_words
        )
        for folder, class_name in found
    }


def without_dots(path: str) -> str:
    """Return a path such as cat/../cat/0.png as cat/0.png."""
    return os.path.normpath(path) if ".." in path else path


def common_folder(folders: Collection[Path]) -> Path:
    """Return the innermost folder that has all of these in it, or is one; "." of none."""
    return Path(os.path.commonpath(folders)) if folders else Path()


def find_roots(splits_of: Mapping[Path, Collection[str]]) -> dict[Path, Path]:
    """Return for each folder of images the root of the splits that they are in.

    It is the common folder of all images or, if all of these splits lie in one folder there, such
    as train/, that one.

    >>> splits_of = {"p/train/train": ["train", "val"], "p/train/bus": ["train"], "p/bus": ["test"]}
    >>> roots = find_roots({Path(folder): splits for folder, splits in splits_of.items()})
    >>> [root.as_posix() for root in roots.values()]
    ['p/train', 'p/train', 'p/bus']
    """
    common = common_folder(splits_of)
    tops = {folder: folder.parts[: len(common.parts) + 1] for folder in splits_of}
    tops_of_split = defaultdict[str, set[tuple[str, ...]]](set)
    for folder, splits in splits_of.items():
        for split in splits:
            tops_of_split[split].add(tops[folder])
    shared = set[tuple[str, ...]]().union(*(x for x in tops_of_split.values() if len(x) > 1))
    own = {top: Path(*top) for top in {*tops.values()} - shared}
    return {folder: own.get(top, common) for folder, top in tops.items()}


def place_of(
    folder: Path, class_name: str, roots: Sequence[Path], class_words: Collection[str]
) -> Place:
    """Return a folder, in which images of a class are, as a place.

    The folder of the class is looked for below the first one of `roots`, then below the next.
    """
    found = (folder_of_class(folder, class_name, root) for root in roots)
    class_folder = next((x for x in found if x), None)
    inner = folder.parts[len(class_folder.parts) :] if class_folder else ()
    way = folder.parts[len(roots[0].parts) :]
    return Place(folder, way, class_name, class_folder, inner, meanings_of(folder, class_words))


def folder_of_class(folder: Path, class_name: str, root: Path) -> Path | None:
    """Return the first folder below `root`, on the way to `folder`, that is named as the class.

    A class may be called train, so `root` is that of a split.

    >>> folder_of_class(Path("p/train/train/film 1/train"), "train", Path("p/train")).as_posix()
    'p/train/train'
    """
    name = folded(class_name)
    for k in range(len(root.parts), len(folder.parts)):
        if name and folded(folder.parts[k]) == name:
            return [folder, *folder.parents][len(folder.parts) - 1 - k]
    return None


@functools.lru_cache(maxsize=2**18)
def folded(name: str) -> str:
    """Return a name as it is compared, see `as_compared`, with spaces for "_" and "-" in it.

    >>> folded("Golden_Retriever"), folded("-1")
    ('golden retriever', '-1')
    """
    return as_compared(re.sub(r"(?<=\w)[_-]+(?=\w)", " ", name))


def folders_below(top: Path, folder: Path) -> list[Path]:
    """Return a folder and those above it that lie below `top`, the innermost first.

    >>> [path.as_posix() for path in folders_below(Path("photos"), Path("photos/cat/film 1"))]
    ['photos/cat/film 1', 'photos/cat']
    """
    depth = len(folder.parts) - len(top.parts)
    return [folder, *folder.parents[: depth - 1]] if depth else []


def meanings_of(folder: Path, class_words: Collection[str]) -> frozenset[str]:
    """Return what the words in a folder's name mean, see NO_CLASS; those of class names do nothing.

    >>> sorted(meanings_of(Path("cat/TestMasks"), [])), [*meanings_of(Path("gt"), ["ford", "gt"])]
    (['mask', 'test'], [])
    """
    words = [word for word in words_of(folder.name) if word not in class_words]
    return frozenset(NO_CLASS[word] for word in words if word in NO_CLASS)


# --- what there is -------------------------------------------------------------------------------


class Contents(NamedTuple):
    """Lines on what a task or pool holds."""

    facts: list[str]  # its classes and counts, and what was drawn
    doubts: list[str]  # what may be meant so or make a number wrong, as folders inside of classes
    left_out: list[str]  # which files are none of its images; one line, or none


def describe(source: Task | Pool) -> list[str]:
    """Return lines on a task or pool: its classes and counts, what was drawn and what left out.

    What may be meant so is said here, too, as folders inside of classes: it is no fault.

    >>> import torch
    >>> split = Split(torch.rand(3, 3, 8, 8), torch.tensor([0, 0, 1]))
    >>> describe(Task("own", split, split, split, ["daisy", "rose"], left_out={".heic": 2}))
    ['2 classes, 9 images: daisy 6, rose 3; train 3, val 3, test 3', 'left out: 2 .heic']
    """
    facts, doubts, left_out = look_into(source)
    return [*facts, *doubts, *left_out]


def say_drawn(task: Task) -> str:
    """Return which splits of a task were drawn from the images for training.

    >>> import torch
    >>> split = Split(torch.rand(3, 3, 8, 8), torch.tensor([0, 0, 1]))
    >>> say_drawn(Task("pets", split, split, split, ["pug", "boxer"], drawn=["val"]))
    'drawn image by image: train, val'
    """
    return f"drawn image by image: {', '.join(['train', *task.drawn])}"


def look_into(source: Task | Pool) -> Contents:
    """Return the lines of `describe`, those that inform apart from those that raise a doubt."""
    doubts: list[str] = []
    lines_left_out: list[str] = []
    if isinstance(source, Pool):
        facts = [f"images without labels: {len(source.images)}"]
    else:
        inner = find_inner_folders(places_of(paths_of(source), source.classes))
        divided = find_divided(inner)
        facts = [describe_counts(source)]
        if source.drawn:
            facts.append(say_drawn(source))
            # Where folders are divided, it is told of them. A benchmark is split as in the paper.
            if not divided and source.name not in BENCHMARKS:
                facts[-1] += (
                    ". If several images show one patient, film or object, divide them yourself, as"
                    " docs/guide.md shows"
                )
        facts += describe_decomposed(source)
        if not divided:
            lines = facts if are_whole_in_parts(inner) else doubts
            lines += describe_inner_folders(inner)
        doubts += describe_class_of_masks(source)
    # Photographs that are left out are told by `find_unread`.
    told = sum(map(Counter, count_unread(source).values()), Counter[str]())
    left_out = Counter(source.left_out) - told
    if left_out:
        lines_left_out.append(f"left out: {in_words(left_out)}")
        if remedy := say_remedies(PACKED.intersection(left_out)):
            lines_left_out[-1] += f"; {remedy} if their images are needed"
    return Contents(facts, doubts, lines_left_out)


def describe_counts(task: Task) -> str:
    """Return how many images there are of each class, and in each split, of a task."""
    sizes = task.sizes()
    counts = count_images(task)
    # Not strict: of a subset, torchvision may know fewer names than numbers.
    of_classes = [f"{name} {n}" for name, n in zip(task.classes, counts, strict=False)]
    if len(of_classes) > 20:  # the first ten and the last five are named
        of_classes[10:-5] = ["..."]
        of_classes[-1] += f" (from {min(counts)} to {max(counts)} a class)"
    parts = ", ".join(f"{name} {n}" for name, n in sizes.items())
    return f"{len(counts)} classes, {sum(sizes.values())} images: {', '.join(of_classes)}; {parts}"


def count_images(task: Task) -> list[int]:
    """Return how many images of each class all splits of a task have."""
    of_splits = [count_by_class(getattr(task, name), len(task.classes)) for name in SPLITS]
    return [sum(of_class) for of_class in zip(*of_splits, strict=True)]


def describe_inner_folders(inner: Iterable[InnerFolder]) -> list[str]:
    """Return a line if folders inside of classes have up to four names, at a depth.

    They may be people, kinds of images, or masks under a name that nobody can list. More are likely
    to be patients, whole ones in each part, see `find_divided`.
    """
    splits_of = defaultdict[tuple[str, ...], set[str]](set)  # by the way from the class folder
    for folder in inner:
        if not folder.is_whole:
            _, way = folder.key
            splits_of[way] |= folder.splits
    depths = Counter(len(way) for way in splits_of)
    few = sorted(way for way in splits_of if depths[len(way)] <= 4)
    if not few:
        return []
    line = (
        f"folders inside of classes: {', '.join('/'.join(way) for way in few)}. All images in them"
        " count as those of the class; if they are masks, remove them"
    )
    if any(len(splits_of[way]) > 1 for way in few):
        line += ". If they are people, films or objects, put each into one part"
    return [line]


def are_whole_in_parts(inner: Collection[InnerFolder]) -> bool:
    """Whether folders inside of classes are divided as the guide divides patients.

    Each name is in one part, and there are such folders in several parts. No name says masks.
    """
    splits_of = defaultdict[tuple[str, ...], set[str]](set)  # by the way from the class folder
    for folder in inner:
        _, way = folder.key
        splits_of[way] |= folder.splits
    words = {word for way in splits_of for name in way for word in words_of(name)}
    splits = set[str]().union(*splits_of.values())
    return (
        MASKS.isdisjoint(words) and len(splits) > 1 and all(len(x) == 1 for x in splits_of.values())
    )


def describe_class_of_masks(task: Task) -> list[str]:
    """Return a line if a folder such as masks/ is a class beside others, such as daisy/ and rose/.

    Where another class has such a word in its name, as no_masks, masks are what is told apart. A
    class may well be called so, as gt among cars: this is no fault.
    """
    named = [name for name in task.classes if not MASKS.isdisjoint(words_of(name))]
    if len(named) != 1 or " ".join(words_of(named[0])) not in FOLDERS_OF_MASKS:
        return []
    of_class = [file.place for file in files_of(task) if file.place.class_name == named[0]]
    inside = [place.class_folder for place in of_class if place.class_folder]
    if not inside:
        return []
    return [
        f"{named[0]} is a class here, with {len(inside)} image{'' if len(inside) == 1 else 's'}. If"
        f" these belong to images of the others, move {inside[0]} out of the data set"
    ]


def describe_decomposed(task: Task) -> list[str]:
    """Return a line if names of classes or files have accents as separate characters (NFD).

    Older Macs write names so. Splits and the order of classes depend on names, so a copy of the
    folder whose names are NFC gives other numbers.
    """
    names = {*task.classes}
    for name in SPLITS:
        images = getattr(task, name).images
        names.update(file.name for file in ([] if isinstance(images, Tensor) else images))
    decomposed = sorted(
        name
        for name in names
        if unicodedata.is_normalized("NFD", name) and not unicodedata.is_normalized("NFC", name)
    )
    if not decomposed:
        return []
    return [
        f"names with accents in the form NFD, as Macs may write them: {len(decomposed)}, such as"
        f" {decomposed[0]}. On a copy whose names are in the usual form, NFC, classes are numbered"
        " and images split otherwise: compare runs on the same copy"
    ]


# --- what is told --------------------------------------------------------------------------------


def count_unread(source: Task | Pool) -> dict[str, Mapping[str, int]]:
    """Return how many photographs of kinds that are not read each class has, by ending.

    Those of a pool have the class "". A class without any image that is read is refused elsewhere.
    """
    if isinstance(source, Pool):
        return {"": source.unread} if source.unread else {}
    read = count_read(source)
    return {name: counts for name, counts in source.unread.items() if read.get(name)}


def count_read(source: Task | Pool) -> dict[str, int]:
    """Return how many images each class has; "" is that of a pool."""
    if isinstance(source, Pool):
        return {"": len(source.images)}
    return dict(zip(source.classes, count_images(source), strict=False))


def find_unread(source: Task | Pool) -> list[str]:
    """Return a line if there are images of kinds that are not read, and how many of each class.

    The classes that lack the most come first.
    """
    read, unread = count_read(source), count_unread(source)
    if not unread:
        return []
    lost = {name: sum(counts.values()) for name, counts in unread.items()}
    told = []
    for name in sorted(lost, key=lambda name: read[name] / lost[name]):
        endings = ", ".join(sorted(unread[name]))
        told.append(f"{name} {lost[name]} of {lost[name] + read[name]} ({endings})".strip())
    return [
        f"images of kinds that are not read: {shorten(told)}. Convert them to JPEG or PNG, or"
        " remove them"
    ]


def shorten(names: Sequence[str]) -> str:
    """Return names as a text, of more than ten the first five.

    >>> shorten(["a", "b"]), shorten("abcdefghijkl")
    ('a, b', 'a, b, c, d, e and 7 more')
    """
    if len(names) <= 10:
        return ", ".join(names)
    return f"{', '.join(names[:5])} and {len(names) - 5} more"


def find_doubtful_names(task: Task) -> list[str]:
    """Return a line for each thing in names of files and folders that may make a number wrong."""
    files = files_of(task)
    of_labels = find_labels_of_other_folders(files, task.classes) or find_renumbered(files)
    return [
        *of_labels,
        *find_folders_in_classes(files, task.classes),
        *find_divided_folders(files, task.classes),
        *find_strays(files, task.classes),
        *find_converted(files),
        *find_derived(files),
    ]


def find_labels_of_other_folders(files: Iterable[ImageFile], classes: Collection[str]) -> list[str]:
    """Return a line if images lie in folders that are named as other classes than their labels.

    So they do where the rows of a table are in another order than the files. Where folders are
    writers or folds, or labels were corrected, this is well, and nobody can tell it apart.
    """
    of_class = [file for file in files if file.place.class_name]
    misnamed = find_misnamed({file.place for file in of_class}, classes)
    wrong = [file for file in of_class if file.place in misnamed]
    if not wrong:
        return []
    counts = Counter(file.split for file in wrong)
    sizes = Counter(file.split for file in of_class)
    of_splits = [f"{name} {counts[name]} of {sizes[name]}" for name in SPLITS if counts[name]]
    return [
        "images in folders that are named as other classes than their labels:"
        f" {', '.join(of_splits)}, such as {wrong[0].path}, labelled {wrong[0].place.class_name}."
        " Are the classes of all splits numbered alike, and the rows of a table those of the files?"
        " If such folders are no classes, or labels were corrected, this is well"
    ]


def find_renumbered(files: Iterable[ImageFile]) -> list[str]:
    """Return a line if folders have another label in val than in train, and one for test.

    Such folders are n01, n02 and so on, of classes with readable names. The labels have to differ
    as they do where classes are numbered in another order: what is tench in train is always shark
    in test, and nothing else is. Patients who are numbered anew in each part differ otherwise.
    """
    places = splits_of_places(files)
    trained = labels_by_way(places, "train")
    lines = []
    for split in ("val", "test"):
        labels = labels_by_way(places, split)
        shared = labels.keys() & trained.keys()
        both = {  # the label in train and that in this split, where each is the only one
            way: (min(trained[way]), min(labels[way]))
            for way in shared
            if len(trained[way]) == len(labels[way]) == 1
        }
        pairs = {*both.values()}
        is_order = len(pairs) == len({one for one, _ in pairs}) == len({two for _, two in pairs})
        changed = sorted(way for way, (one, two) in both.items() if one != two)
        if 2 * len(both) > len(shared) and is_order and len(pairs) > 1 and len(changed) > 1:
            one, two = both[changed[0]]
            lines.append(
                f"{split}: folders whose images have another label than in train: {len(changed)},"
                f" such as {'/'.join(changed[0])}, labelled {two}, and {one} in train. Are the"
                " classes of all splits numbered alike? If such folders are no classes, this is"
                " well"
            )
    return lines


def labels_by_way(
    places: Mapping[Place, Collection[str]], split: str
) -> dict[tuple[str, ...], set[str]]:
    """Return the classes of the images of a split in each folder, by the way to it."""
    labels = defaultdict[tuple[str, ...], set[str]](set)
    for place, splits in places.items():
        if place.class_name and split in splits:
            labels[place.way].add(place.class_name)
    return labels


def find_misnamed(places: Collection[Place], classes: Iterable[str]) -> set[Place]:
    """Return the places that are named as classes, or lie below such, but not as their own one.

    Folders that hold all places do not count, nor does a class's name that is the only one there:
    it may be the name of the whole, as of the photos that are looked through for it. Numbers do not
    count where folders beside each other are numbered otherwise than classes, see
    `are_numbered_otherwise`.
    """
    by_name = defaultdict[str, set[str]](set)
    for name in classes:
        by_name[folded(name)].add(name)
    depth = len(common_folder({place.folder for place in places}).parts)
    ways = {
        place: [(k, folded(name)) for k, name in enumerate(place.folder.parts[depth:])]
        for place in places
    }
    steps = {step for way in ways.values() for step in way}  # such as (0, "train") and (1, "7")
    numbers = defaultdict[int, set[str]](set)  # by depth
    for k, name in steps:
        if name.isdecimal():
            numbers[k].add(name)
    numbered = {k for k in numbers if are_numbered_otherwise(numbers[k], by_name)}
    named = {
        place: {
            class_name
            for k, name in way
            if name in by_name and not (name.isdecimal() and k in numbered)
            for class_name in by_name[name]
        }
        for place, way in ways.items()
    }
    if len(set[str]().union(*named.values())) < 2:
        return set()
    return {place for place, names in named.items() if names and place.class_name not in names}


def are_numbered_otherwise(numbers: Collection[str], classes: Collection[str]) -> bool:
    """Whether folders with these numbers as names are not those of the classes with these names.

    So it is where more than one in four are no classes, and where folders begin at 1 and classes at
    0. One more folder, such as 99 for what nobody can read, says nothing of the others.

    >>> are_numbered_otherwise(["1", "2", "3", "4", "5"], ["0", "1", "2", "3", "4"])
    True
    >>> are_numbered_otherwise(["0", "1", "2", "3", "99"], ["0", "1", "2", "3"])
    False
    """
    others = [number for number in numbers if number not in classes]
    from_0 = {str(int(number) - 1) for number in numbers}
    return 4 * len(others) > len(numbers) or (len(others) > 0 and from_0 <= {*classes})


def find_folders_in_classes(files: Iterable[ImageFile], classes: Sequence[str]) -> list[str]:
    """Return a line if folders inside of class folders are divided, or named as masks or parts.

    They may be patients, films, masks, or parts of the data under names that nobody can list. Whole
    folders that lie in one split each are well, and so is a folder that has all images of a class.
    """
    inner = find_inner_folders(splits_of_places(files))
    divided = find_divided(inner)
    named = find_named_as_masks_or_parts(inner, classes)
    if not divided and not named:
        return []
    told = [folder for folder in inner if not folder.is_whole or folder in divided]
    first = (divided or named)[:2]
    line = (
        f"folders of images inside of class folders: {len(told if divided else named)}, such as"
        f" {' and '.join(str(folder.path) for folder in first)}."
        " All images in them count as those of the class"
    )
    if divided:
        names = {folder.key for folder in divided}
        splits = frozenset[str]().union(*(folder.splits for folder in divided))
        line += f", and {say_divided(len(names), len(divided), splits, MAKE_PARTS)}"
        if all(len(folder.splits) == 1 for folder in divided):
            line += "; if it is a kind of images, or each part is numbered anew, this is well"
    return [f"{line}. If a folder holds masks, remove it"]


# What to do where folders of patients are divided: in folders of classes, and with a table.
MAKE_PARTS = "make train/CLASS, val/CLASS and test/CLASS of whole folders, as docs/guide.md shows"
GIVE_WHOLE = "give whole folders to each of train, val and test"


def say_divided(names: int, folders: int, splits: Container[str], remedy: str) -> str:
    """Return that folders of so many names are divided among splits, and what to do."""
    word = "folder" if names == folders else "name"
    return (
        f"those of {names} {word}{'' if names == 1 else 's'} are divided among"
        f" {', '.join(name for name in SPLITS if name in splits)}. If a folder is a person, a film"
        f" or a part of the data, {remedy}"
    )


@dataclass
class Folder:
    """Folders of one name below a root, with what is in them and below."""

    splits: set[str]  # those of its images
    labels: Counter[str]  # how many images have each label
    paths: set[Path]  # of each folder of this name


def find_divided_folders(files: Iterable[ImageFile], classes: Iterable[str]) -> list[str]:
    """Return a line if folders are divided that are no classes and lie in none.

    Such as those of patients, with labels from a table. Asked are folders of more than four names
    whose images have one label more often than others, see `say_the_label`: where each folder has
    a thousand files of all labels, these may well be divided. A folder that has most images of a
    class is one of this class, whatever its name.
    """
    names = {folded(name) for name in classes}
    counts = Counter((file.place, file.split, file.label) for file in files)
    sizes = Counter[str]()
    for (place, _, label), n in counts.items():
        sizes[label] += n if place.class_name else 0
    above = {  # by place, the way to the first folder that is named as a class
        place: tuple(itertools.takewhile(lambda name: folded(name) not in names, place.way))
        for place in {place for place, _, _ in counts}
    }
    for depth in range(1, 1 + max(map(len, above.values()), default=0)):
        at_depth = {place: way[:depth] for place, way in above.items() if len(way) >= depth}
        folders = [
            folder
            for folder in collect_folders(counts, at_depth)
            if not any(2 * n > sizes[label] > 0 for label, n in folder.labels.items())
        ]
        divided = [folder for folder in folders if len(folder.splits) > 1]
        if len(folders) > 4 and divided and say_the_label([folder.labels for folder in folders]):
            paths = sorted(path for folder in divided for path in folder.paths)
            of_all = {split for folder in divided for split in folder.splits}
            return [
                f"folders of images that are no classes: {sum(len(x.paths) for x in folders)},"
                f" such as {' and '.join(str(path) for path in paths[:2])}, and"
                f" {say_divided(len(divided), len(paths), of_all, GIVE_WHOLE)}; if it is a kind"
                " of images, as a species of a family, or each part is numbered anew, this is well"
            ]
    return []


def collect_folders(
    counts: Mapping[tuple[Place, str, str], int], ways: Mapping[Place, tuple[str, ...]]
) -> list[Folder]:
    """Return the folders that the images of some places are in, those of one way as one.

    `counts` has for each place, split and label how many images there are; `ways` has for the
    places that are asked the way from their root to such a folder.
    """
    found = defaultdict[tuple[str, ...], Folder](lambda: Folder(set(), Counter(), set()))
    for (place, split, label), n in counts.items():
        if place in ways:
            way = ways[place]
            folder = found[way]
            folder.splits.add(split)
            folder.labels[label] += n
            folder.paths.add([place.folder, *place.folder.parents][len(place.way) - len(way)])
    return [*found.values()]


def say_the_label(folders: Collection[Counter[str]]) -> bool:
    """Whether two images of one folder have the same label far more often than any two.

    By more than half of what could be more. `folders` has for each how many images have a label.

    >>> say_the_label([Counter(ill=6), Counter(well=6)])
    True
    >>> say_the_label([Counter(ill=4, well=2), Counter(ill=2, well=4)])
    False
    """
    all_images = Counter[str]()
    for of_folder in folders:
        all_images.update(of_folder)
    any_two = share_alike([all_images])
    return share_alike(folders) > (1 + any_two) / 2


def share_alike(folders: Iterable[Counter[str]]) -> float:
    """Return the share of pairs of images in one folder that have the same label; 0 of none."""
    alike = pairs = 0
    for of_folder in folders:
        n = of_folder.total()
        pairs += n * (n - 1)
        alike += sum(k * (k - 1) for k in of_folder.values())
    return alike / pairs if pairs else 0


def find_inner_folders(splits_of: Mapping[Place, set[str]]) -> list[InnerFolder]:
    """Return the folders inside of class folders, sorted by class and name."""
    places = defaultdict[Path, list[Place]](list)  # by class folder
    for place in splits_of:
        if place.class_folder:
            places[place.class_folder].append(place)
    inner = []
    for class_folder, inside in places.items():
        top = common_folder({place.folder for place in inside})
        splits = defaultdict[Path, set[str]](set)
        for place in inside:
            for folder in folders_below(class_folder, place.folder):
                splits[folder] |= splits_of[place]
        depth = len(class_folder.parts)
        for folder, of_folder in splits.items():
            key = inside[0].class_name, folder.parts[depth:]
            is_whole = len(folder.parts) <= len(top.parts)
            inner.append(InnerFolder(folder, key, frozenset(of_folder), is_whole))
    return sorted(inner, key=lambda folder: (folder.key, folder.path))


def find_divided(inner: Iterable[InnerFolder]) -> list[InnerFolder]:
    """Return those folders inside of classes whose images are in several splits.

    So they are where they were drawn image by image, and where a folder of the same class and name
    lies in another part: train/cat/P1 and test/cat/P1 may be one patient. Of up to four names the
    second is well: these are likelier to be kinds of images, such as day/ and night/.
    """
    alike = defaultdict[tuple[str, tuple[str, ...]], list[InnerFolder]](list)
    names = defaultdict[int, set[tuple[str, ...]]](set)  # by depth
    for folder in inner:
        _, way = folder.key
        alike[folder.key].append(folder)
        names[len(way)].add(way)
    divided = []
    for (_, way), folders in alike.items():
        are_many = len(names[len(way)]) > 4
        if are_many and len(frozenset[str]().union(*(x.splits for x in folders))) > 1:
            divided += [x for x in folders if len(folders) > 1 or not x.is_whole]
        else:
            divided += [x for x in folders if len(x.splits) > 1 and not x.is_whole]
    return divided


def find_named_as_masks_or_parts(
    inner: Iterable[InnerFolder], classes: Iterable[str]
) -> list[InnerFolder]:
    """Return those folders inside of classes whose names say masks, or a part that is not theirs.

    A folder that has all images of a class folder is none of them.
    """
    class_words = words_of_classes(classes)
    return [
        folder
        for folder in inner
        if not folder.is_whole
        and meanings_of(folder.path, class_words) & {"mask", *SPLITS} - folder.splits
    ]


def splits_of_places(files: Iterable[ImageFile]) -> dict[Place, set[str]]:
    """Return the splits that the images of each place are in."""
    splits = defaultdict[Place, set[str]](set)
    for file in files:
        splits[file.place].add(file.split)
    return splits


def find_strays(files: Iterable[ImageFile], classes: Collection[str]) -> list[str]:
    """Return a line if folders inside of class folders have the names of other classes.

    Where some are numbers that are no classes, as 0/9 of the classes 0 and 1, they are patients or
    films, and so is 0/1.
    """
    names = {*classes}
    inside = {
        (folder, place.class_name)
        for place in {file.place for file in files}
        if place.class_folder
        for folder in folders_below(place.class_folder, place.folder)
    }
    if {folder.name for folder, _ in inside if folder.name.isdecimal()} - names:
        names = {name for name in names if not name.isdecimal()}
    strays = sorted(
        (folder, class_name) for folder, class_name in inside if folder.name in names - {class_name}
    )
    if not strays:
        return []
    stray, class_name = strays[0]
    return [
        "folders with the name of another class than the one they lie in:"
        f" {len({folder for folder, _ in strays})}, such as {stray}, whose images count as"
        f" {class_name}. Move them if they are of the other class"
    ]


def find_converted(files: Collection[ImageFile]) -> list[str]:
    """Return a line if files beside each other, of a class, have one name and other endings.

    Capital letters do not matter. This happens where images were converted or edited and the
    originals were kept (`holdout` splits by name), and where masks lie beside their photos.
    """
    if len({file.ending for file in files}) < 2:
        return []
    by_name = defaultdict[tuple[Place, str], list[ImageFile]](list)
    for file in files:
        by_name[file.place, file.stem.casefold()].append(file)
    # a.png and A.png, with one ending, may be two letters
    twins = [group for group in by_name.values() if len({file.ending for file in group}) > 1]
    if not twins:
        return []
    names = " and ".join(sorted(file.path for file in twins[0]))
    return [
        f"images that have a namesake with another ending: {len(twins)},"
        f" such as {names}. Are these an image and its mask, or the same picture, converted or"
        " edited? Then remove one of both"
    ]


def find_derived(files: Sequence[ImageFile]) -> list[str]:
    """Return lines if files look like masks or changed copies of others of their class.

    A copy may be tested where its original was trained on. Where both are in training, nothing is
    said: many data sets come with such copies. Masks are told in any split.
    """
    originals = find_originals(files)
    masks = find_masks(files, originals)
    lines = say_masks(masks)
    others = [file for file in files if file not in masks]
    for told, copies in (
        (
            "whose names say that they were made of others",
            find_named_copies(files, originals, masks),
        ),
        ("that Roboflow made of one picture, as their names say", find_versions(others)),
        ("that have a namesake in another folder of their class", find_in_two_folders(others)),
    ):
        doubtful = [
            (copy, original)
            for copy, original in copies.items()
            if {copy.split, original.split} != {"train"}
        ]
        if doubtful:
            copy, original = doubtful[0]
            lines.append(
                f"images {told}: {len(doubtful)}, such as {copy.path} of {original.path}. A changed"
                " copy may be tested where its original was trained on, and a mask is no image of a"
                " class: if they are such, remove them, or give train/ and test/ with copies in"
                " train/ alone"
            )
    return lines


def find_masks_in_pool(images: Stored) -> list[str]:
    """Return a line if files of a pool look like masks; of up to 100,000 files, for the time."""
    if isinstance(images, Tensor) or len(images) > MOST_SIZES:
        return []
    return say_masks(find_masks_among(images))


def find_masks_among(images: Iterable[Path], classes: Iterable[str] = ()) -> set[ImageFile]:
    """Return those of unlabelled image files that look like masks; the classes may be known."""
    files = as_files({str(file): Known() for file in images}, classes)
    return find_masks(files, find_originals(files))


def say_masks(masks: Collection[ImageFile]) -> list[str]:
    """Return a line on files that look like masks, if there are any."""
    if not masks:
        return []
    first = min(mask.path for mask in masks)
    return [
        f"images that look like masks of others: {len(masks)}, such as {first}. If they are, a"
        " network learns from them as from images: remove them"
    ]


# --- masks ---------------------------------------------------------------------------------------


def find_masks(files: Sequence[ImageFile], originals: Originals) -> set[ImageFile]:
    """Return the files that look like masks of others, such as 0_mask.png beside 0.png.

    So do those in a folder of masks that have the name of an image above them, or of one in a
    folder of images beside theirs: masks/0.png of 0.png, or CarMasks/0_mask.png of CarImages/0.png.
    Images of different classes are no image and its mask.
    """
    masks = {file for file, (_, words) in originals.items() if not MASKS.isdisjoint(words)}
    masks |= find_masks_by_word(files)
    in_masks = [file for file in files if "mask" in file.place.meanings]
    if not in_masks:
        return masks
    # Where a folder of masks may have namesakes: (cat, "cat", "0") for cat/masks/0.png.
    names = set[tuple[Path, str, str]]()
    for file in files:
        name = without_roles(file.stem)
        names.add((file.place.folder, file.place.class_name, name))
        if file.place.meanings == {"image"}:
            names.add((file.place.folder.parent, file.place.class_name, name))
    for file in in_masks:
        name = without_roles(file.stem)
        if (file.place.folder.parent, file.place.class_name, name) in names:
            masks.add(file)
    return masks


def find_masks_by_word(files: Sequence[ImageFile]) -> set[ImageFile]:
    """Return masks whose names have any other word in place of mask, if there are many of them.

    Such as mask_001.png of fundus_001.png beside it. One of ROLES needs not be in many names, see
    `find_namesakes_but_for_words`. "Label" alone is no such word: label_0.jpg beside bottle_0.jpg
    is a photograph of a bottle's label.
    """
    masks_only = MASKS - {"label"}
    # Of files with such a word: the other words and numbers.
    rests: dict[ImageFile, tuple[str, ...]] = {}
    for file in files:
        if not masks_only.isdisjoint(file.words):
            words = words_and_numbers(file.stem)
            if rest := tuple(word for word in words if word not in masks_only):
                rests[file] = rest
    places = {file.place for file in rests}
    found = set[tuple[Place, tuple[str, ...]]]()  # other files, each without one of its words
    for file in files:
        if file.place in places and file not in rests:
            words = words_and_numbers(file.stem)
            for k, word in enumerate(words):
                if not word.isdecimal():
                    found.add((file.place, words[:k] + words[k + 1 :]))
    masks = {file for file, rest in rests.items() if (file.place, rest) in found}
    return masks if is_often(len(masks), len(files)) else set()


def words_and_numbers(name: str) -> tuple[str, ...]:
    """Return the words and numbers in a name, in small letters.

    >>> words_and_numbers("carMask_001")
    ('car', 'mask', '001')
    """
    pieces = re.findall(r"\d+|[^\W\d_]+", name)
    return tuple(
        word for piece in pieces for word in ([piece] if piece.isdecimal() else words_of(piece))
    )


# --- copies --------------------------------------------------------------------------------------


def find_named_copies(
    files: Collection[ImageFile], originals: Originals, masks: Collection[ImageFile]
) -> dict[ImageFile, ImageFile]:
    """Return the files that are named as copies of others, and these; without masks.

    What was added to the name of the original is one of COPIES, or any words that were added to
    many names, as in 0_bright.png, 1_bright.png and so on.
    """
    times = count_added_words(files, originals)
    return {
        file: original
        for file, (original, words) in originals.items()
        if file not in masks
        and (not COPIES.isdisjoint(words) or is_often(times[words], len(files)))
    }


def count_added_words(files: Iterable[ImageFile], originals: Originals) -> Counter[tuple[str, ...]]:
    """Return how often words were added to names of images beside, or in the same place of a part.

    In another part, words do not count that all images in a folder have: test/cat/1_new.png may be
    another image than train/cat/1.png.
    """
    beside = defaultdict[Place, list[ImageFile]](list)
    for file in files:
        beside[file.place].append(file)

    @functools.cache
    def have_all(place: Place, words: tuple[str, ...]) -> bool:
        return all({*words} <= {*file.words} for file in beside[place])

    times = Counter[tuple[str, ...]]()
    for file, (original, words) in originals.items():
        one, other = file.place, original.place
        are_alike = (one.way, one.class_name) == (other.way, other.class_name)
        if one == other or (are_alike and not have_all(one, words)):
            times[words] += 1
    return times


def is_often(times: int, images: int) -> bool:
    """Whether something is true of so many of all images that it is hardly chance.

    >>> is_often(3, 300), is_often(3, 301), is_often(2, 4)
    (True, False, False)
    """
    return times >= 3 and 100 * times >= images


def find_versions(files: Iterable[ImageFile]) -> dict[ImageFile, ImageFile]:
    """Return files that Roboflow made of one picture, and the first one of it, in a class.

    It augments images, and names them as 0_jpg.rf.1a2b.jpg and 0_jpg.rf.3c4d.jpg.
    """
    first = dict[tuple[str, str], ImageFile]()  # by class and name of the picture
    versions: dict[ImageFile, ImageFile] = {}
    for file in files:
        picture, mark, _ = file.stem.rpartition(".rf.")
        if mark:
            met = first.setdefault((file.place.class_name, picture), file)
            if met != file:
                versions[file] = met
    return versions


def find_in_two_folders(files: Sequence[ImageFile]) -> dict[ImageFile, ImageFile]:
    """Return files with a namesake in another folder of their class, and the namesake.

    Such as cat/resized/0.png of cat/0.png, or cat/augmented/0.png of cat/original/0.png. Where
    classes hold more than four folders, of other names, these are likely to be patients or films
    whose images are numbered anew; then nothing is returned.
    """
    namesakes = find_namesakes_of_table([file for file in files if not file.place.class_folder])
    in_classes = [file for file in files if file.place.class_folder]
    if 1 < len({file.place.inner for file in in_classes}) <= 4:
        first = dict[tuple[Path | None, str], ImageFile]()  # by class folder and name
        for file in in_classes:
            met = first.setdefault((file.place.class_folder, file.stem.casefold()), file)
            if met.place != file.place:
                namesakes[file] = met
    return namesakes if is_often(len(namesakes), len(files)) else {}


def find_namesakes_of_table(files: Sequence[ImageFile]) -> dict[ImageFile, ImageFile]:
    """Return as `find_in_two_folders` does those of files that lie in no folder of a class.

    Such as aug/0.png of raw/0.png, with labels from a table. Numbers begin anew in folders of
    patients, too, but there the labels of namesakes are alike by chance alone. Parts of the data
    are no such folders.
    """
    depth = len(common_folder({file.place.folder for file in files}).parts)
    by_folder = defaultdict[tuple[str, ...], dict[str, ImageFile]](dict)
    folders = {
        place: tuple(name for name in place.folder.parts[depth:] if not part_in_name(name))
        for place in {file.place for file in files}
    }
    if not 1 < len({*folders.values()}) <= 4:
        return {}
    for file in files:
        by_folder[folders[file.place]].setdefault(file.stem.casefold(), file)
    namesakes: dict[ImageFile, ImageFile] = {}
    for one, two in itertools.combinations(by_folder.values(), 2):
        pairs = [(two[name], file) for name, file in one.items() if name in two]
        alike = [(copy, file) for copy, file in pairs if copy.label == file.label]
        of_one = Counter(file.label for _, file in pairs)
        of_two = Counter(copy.label for copy, _ in pairs)
        by_chance = sum(n * of_two[label] for label, n in of_one.items()) / max(1, len(pairs))
        if len(pairs) - by_chance >= 5 and len(alike) > (len(pairs) + by_chance) / 2:
            namesakes |= alike
    return namesakes


# --- originals -----------------------------------------------------------------------------------


def find_originals(files: Iterable[ImageFile]) -> Originals:
    """Return for each file whose name was made from another's: that one, and the words added.

    Such as 0.png and "mask" for 0_mask 2.png, or img_0.png and "mask" for mask_0.png. The other one
    is of the same class, and lies beside it or, if none does so, anywhere else. In a pool it lies
    beside it.
    """
    beside = defaultdict[Place, list[ImageFile]](list)
    of_class = defaultdict[str, list[ImageFile]](list)
    for file in files:
        beside[file.place].append(file)
        if file.split:
            of_class[file.place.class_name].append(file)
    in_folders = [group for group in of_class.values() if len({file.place for file in group}) > 1]
    originals: Originals = {}
    for group in (*in_folders, *beside.values()):
        originals |= find_originals_among(group)
    return originals


def find_originals_among(files: Sequence[ImageFile]) -> Originals:
    """Return as `find_originals` does those of these files that are made from others of them."""
    by_name: dict[str, ImageFile] = {}
    for file in files:
        by_name.setdefault(file.stem.casefold(), file)
    originals = find_namesakes_but_for_words(files)
    for file in files:
        original, change = find_original(file.stem, by_name, file.words)
        if original:
            words = tuple(word for word in words_of(change) if word in file.words)
            originals[file] = by_name[original.casefold()], words
    return originals


def find_namesakes_but_for_words(files: Sequence[ImageFile]) -> Originals:
    """Return masks and copies among files that have the name of an image there, but for words.

    Such as p0_mask_1.png of p0_image_1.png, and flip1.png of orig1.png: each with that image, and
    those of its words that are of MASKS or COPIES.
    """
    if all(MADE.isdisjoint(file.words) for file in files):
        return {}
    groups = defaultdict[str, list[ImageFile]](list)  # by what names share
    for file in files:
        groups[without_roles(file.stem)].append(file)
    namesakes: Originals = {}
    for group in groups.values():
        changes = {file: tuple(word for word in file.words if word in MADE) for file in group}
        image = next((file for file in group if not changes[file]), None)
        if image:
            namesakes |= {file: (image, words) for file, words in changes.items() if words}
    return namesakes


def without_roles(name: str) -> str:
    """Return what names of an image and of its masks and copies share.

    >>> without_roles("P0_Mask_1"), without_roles("flip-P0 image.1")
    ('p0 1', 'p0 1')
    """
    rest = re.sub(WORD, lambda word: "" if word[0].lower() in ROLES else word[0], name)
    return re.sub(r"[ ._-]+", " ", rest).strip().casefold()


def find_original(name: str, names: Container[str], words: Collection[str]) -> tuple[str, str]:
    """Return the one of `names` that a name was made from, and the change; ("", "") without one.

    `names` are in small letters. The change has one of the `words` of the name: 0_2 may well be
    another image than 0. Before the name of the original, it is one of MASKS or COPIES.

    >>> names = ["0", "1"]
    >>> find_original("0_bright 2", names, ["bright"]), find_original("mask_1_7", names, ["mask"])
    (('0', '_bright 2'), ('1', 'mask_'))
    >>> find_original("0_2", names, [])
    ('', '')
    """
    if not words:
        return "", ""
    _, *shorter = beginnings(name)
    for original in shorter:
        change = name[len(original) :]
        if original.casefold() in names and not {*words}.isdisjoint(words_of(change)):
            return original, change
    made = MADE.intersection(words)
    for start in reversed(shorter) if made else ():
        change, rest = name[: len(start) + 1], name[len(start) + 1 :]
        if not made.isdisjoint(words_of(change)):
            for original in beginnings(rest):
                if original.casefold() in names:
                    return original, change
    return "", ""


def beginnings(name: str) -> list[str]:
    """Return a name and what is before each of its separators, longest first.

    >>> beginnings("1_mask 2")
    ['1_mask 2', '1_mask', '1']
    """
    ends = [separator.start() for separator in re.finditer(r"[ ._(-]", name)]
    return [name, *(name[:end] for end in reversed(ends))]
