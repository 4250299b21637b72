"""Program: what is asked of a task before a run: is it what `data.Task` says, and what is doubtful.

Most of what is refused here would train, and give an accuracy that means something else.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

from data import (
    MOST_SIZES,
    NO_CLASS,
    SPLITS,
    WORD,
    Channels,
    Look,
    Pool,
    Split,
    Stored,
    Task,
    count_by_class,
    digest_of_pixels,
    evenly_spaced,
    find_lookalikes,
    size_of,
    words_of,
)

# --- what a script hands over --------------------------------------------------------------------


def check_task(task: Task) -> None:
    """Raise ValueError, one line, where images or labels from a script are not as `Task` says."""
    if not isinstance(task, Task):
        raise ValueError(
            f"task: is a {type(task).__name__}; give data.Task(name, train, val, test, classes)"
        )
    check_channels(task.mean, task.std)
    is_list = isinstance(task.classes, Sequence) and not isinstance(task.classes, str)
    if not is_list or not all(isinstance(kind, str) for kind in task.classes):
        raise ValueError(
            f"classes: is {task.classes!r}; give a list of names, such as"
            " [str(k) for k in range(10)]"
        )
    if len(set(task.classes)) < max(2, len(task.classes)):
        raise ValueError("classes: two or more names are needed, each once")
    if faults := find_lookalikes(task.classes):
        raise ValueError(f"classes: {'; '.join(faults)}")
    for name in SPLITS:
        split: Split = getattr(task, name)
        if not isinstance(split, Split):
            kind = type(split).__name__
            raise ValueError(f"{name}: is a {kind}; give data.Split(images, labels)")
        check_images(split.images, name)
        check_labels(split, name, task.classes)
    if len({split.targets.ndim for split in (task.train, task.val, task.test)}) > 1:
        raise ValueError("labels: of all splits one class an image, or of all several")
    check_folders_of_labels(task)


def check_folders_of_labels(task: Task) -> None:
    """Raise ValueError where a file's folder is named as another class than its label says.

    Only asked where all files lie in folders with names of classes, and of splits that have several
    folders, each with one label. A script that numbers the classes of each split by itself may
    number them in another order, or in the lack of one class. Where a folder has several labels, it
    is no class: it may be a writer, a patient or a fold.
    """
    class_of = classes_of(task)
    if not {file.parent.name for file in class_of} <= {*task.classes}:
        return
    split_of = files_of(task)
    labels_of = defaultdict[str, dict[Path, set[str]]](dict)  # by split and folder
    for file, class_name in class_of.items():
        labels_of[split_of[file]].setdefault(file.parent, set()).add(class_name)
    asked = {
        split
        for split, of_folders in labels_of.items()
        if len(of_folders) > 1 and all(len(labels) == 1 for labels in of_folders.values())
    }
    for file, class_name in class_of.items():
        is_asked = split_of[file] in asked
        if is_asked and class_name not in file.parts:  # 7/1/0.png of class 7 may be of patient 1
            raise ValueError(
                f"labels: {file} is labelled {class_name}; number the classes of all splits in the"
                " order of `classes`, or, if it is meant so, give classes other names than folders"
            )


def as_checked(task: Task) -> Task:
    """Return a script's task with the name "own", classes in a list, plain numbers, and new splits.

    The splits are new objects, since `decode_once` remembers the images of a split that it has met,
    and their files may have changed since.
    """
    return task._replace(
        name="own",
        train=Split(as_stored(task.train.images), task.train.targets),
        val=Split(as_stored(task.val.images), task.val.targets),
        test=Split(as_stored(task.test.images), task.test.targets),
        classes=list(task.classes),
        mean=tuple(float(x) for x in task.mean),
        std=tuple(float(x) for x in task.std),
    )


def as_stored(images: Stored) -> Stored:
    """Return paths as a list, since a script may give another sequence; pixels as they are."""
    return images if isinstance(images, Tensor) else list(images)


def check_pool(pool: Pool) -> None:
    """Raise ValueError, one line, where images from a script are not as `Pool` says."""
    if not isinstance(pool, Pool):
        raise ValueError(f"pool: is a {type(pool).__name__}; give data.Pool(images)")
    check_channels(pool.mean, pool.std)
    check_images(pool.images, "pool")


def check_channels(mean: Channels, std: Channels) -> None:
    """Raise ValueError where mean and std are not those of three channels of pixels in [0, 1]."""
    if not (isinstance(mean, Sequence) and isinstance(std, Sequence)):
        raise ValueError("mean and std: give three numbers each, such as (0.5, 0.5, 0.5)")
    if not all(isinstance(x, Real) for x in (*mean, *std)):
        raise ValueError(f"mean {mean} and std {std}: give three numbers each")
    are_three = len(mean) == len(std) == 3
    if not (are_three and all(0 <= x <= 1 for x in mean) and all(0 < x <= 1 for x in std)):
        raise ValueError(
            f"mean {mean} and std {std}: needed are three numbers from 0 to 1 each, as of pixels"
            " from 0 to 1, and no std of 0"
        )


def check_images(images: Stored, name: str) -> None:
    """Raise ValueError where images are neither pixels from 0 to 1 nor paths.

    `name` says what has them, such as "train" or "pool".
    """
    if not isinstance(images, Tensor | Sequence):
        kind = type(images).__name__
        raise ValueError(f"{name}: images are a {kind}; give one tensor, or a list of pathlib.Path")
    if not len(images):
        raise ValueError(f"{name}: has no images")
    if not isinstance(images, Tensor):
        if not all(isinstance(file, Path) for file in images):
            raise ValueError(f"{name}: images have to be one tensor, or a list of pathlib.Path")
        if len({file.is_absolute() for file in images}) > 1:
            raise ValueError(f"{name}: some paths are absolute and some are not; file.absolute()")
        return
    if images.dtype != torch.float32:  # whole numbers from 0 to 255, or 0 and 1: who knows?
        raise ValueError(
            f"{name}: images are {images.dtype}; give float32 from 0 to 1: images.float(), and of"
            " values up to 255 images.float() / 255"
        )
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(
            f"{name}: images have the shape {tuple(images.shape)}; give (images, 3, height, width),"
            " of grey ones (images, 1, height, width) with images.expand(-1, 3, -1, -1)"
        )
    if images.device.type != "cpu" or images.requires_grad:
        raise ValueError(f"{name}: images are on a GPU, or need gradients; images.detach().cpu()")
    if not 0 <= images.min() <= images.max() <= 1:  # nan is refused, too
        raise ValueError(f"{name}: pixels of images in memory have to be numbers from 0 to 1")
    if images.max() == 0:
        raise ValueError(f"{name}: all pixels are 0")
    if images.max() < 2 / 255:
        raise ValueError(f"{name}: no pixel is above 2/255; were they divided by 255 twice?")


def check_labels(split: Split, name: str, classes: Sequence[str]) -> None:
    """Raise ValueError where labels of the split `name` mean something else than `Split` says."""
    labels = split.targets
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"{name}: labels are {kind}; give whole numbers, torch.int64")
    if labels.device.type != "cpu":
        raise ValueError(f"{name}: labels are on a GPU; labels.cpu()")
    if len(labels) != len(split.images):
        raise ValueError(f"{name}: has {len(split.images)} images and {len(labels)} labels")
    if labels.ndim > 1:
        check_several(labels, name, classes)
    elif not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError(
            f"{name}: labels go from {labels.min()} to {labels.max()}; they are numbers of"
            f" classes, from 0 to {len(classes) - 1}"
        )


def check_several(labels: Tensor, name: str, classes: Sequence[str]) -> None:
    """Raise ValueError where labels of images with several classes are not as `Split` says.

    Tables of 0 and 1 are the likeliest case. Since 0 is "not counted" here, no answer could be
    wrong, and the average precision of any network would be 100 %.
    """
    if labels.shape[1:] != (len(classes),):
        raise ValueError(
            f"{name}: labels have the shape {tuple(labels.shape)}; give (images,), a class each, or"
            f" (images, {len(classes)}) where an image has several; of (images, 1) labels.flatten()"
        )
    if not set(labels.unique().tolist()) <= {-1, 0, 1}:
        raise ValueError(f"{name}: labels for each class are 1 yes, -1 no, 0 not counted")
    if not (labels == 1).any():
        raise ValueError(f"{name}: no label is 1, yes")
    for k, of_class in enumerate(labels.T):
        if (of_class == 1).any() and not (of_class == -1).any():
            raise ValueError(
                f"{name}: of class {classes[k]} no label is -1, no, so any network would find it;"
                " 0 is not counted. Of 0 no and 1 yes make 2 * labels - 1; where each image has one"
                " class, labels.argmax(1)"
            )


# --- what makes a number mean something else -----------------------------------------------------


def find_doubts(task: Task, looks: Mapping[Path, Look] | None = None) -> list[str]:
    """Return a line for each thing that is not refused, but that readers of an accuracy must know.

    Such things are: splits that share images, images with two labels, images made from others,
    folders of images inside of class folders, images that are black or of one colour, classes that
    a split lacks, labels that are not counted, and names that other computers write otherwise.
    `looks` has what was found in each image file that was read before.
    """
    looks = looks or {}
    doubts = find_common_images(task, {file: look.digest for file, look in looks.items()})
    doubts += find_folders_in_classes(task) + find_converted(task) + find_derived(task)
    doubts += find_decomposed(task)
    for name in SPLITS:
        split: Split = getattr(task, name)
        doubts += find_empty(name, split.images, looks)
        doubts += find_doubts_of_labels(name, split, task.classes)
    return doubts


def find_empty(name: str, images: Stored, looks: Mapping[Path, Look]) -> list[str]:
    """Return a line if all images are black or very dark, or else if most have one colour.

    Files are black if no number in them is above 1 of 255, as where numbers from 0 to 1 were saved
    as whole ones; in memory, such images are refused. Asked of are the files in `looks`, see
    `find_doubts`; `name` says what has the images, such as "train" or "pool".
    """
    if isinstance(images, Tensor):
        if images.max() < 0.1:
            return [
                f"{name}: no pixel is above 0.1, and images that are cut have 8 bits, so few levels"
                " are left; scale them to numbers from 0 to 1"
            ]
        without_contrast = count_without_contrast(images)
    else:
        found = [looks[file] for file in images if file in looks]
        if found and max(look.brightest for look in found) < 2:
            return [
                f"{name}: no pixel is above 1 of 255, so the images are black; were numbers from 0"
                " to 1 saved as whole numbers?"
            ]
        without_contrast = sum(look.is_of_one_colour for look in found)
    if 2 * without_contrast > len(images):
        return [f"{name}: {without_contrast} of {len(images)} images are of one colour"]
    return []


def find_doubts_of_labels(name: str, split: Split, classes: Sequence[str]) -> list[str]:
    """Return a line if classes lack in a split, and one if few of its labels count."""
    doubts = find_lacking_classes(name, split, classes)
    labels = split.targets
    if labels.ndim == 2 and (labels == 0).sum() > (labels == -1).sum():
        percent = 100 * float((labels == 0).float().mean())
        doubts.append(
            f"{name}: {percent:.0f} % of the labels are 0, not counted. Is that meant?"
            " 1 is yes, -1 no and 0 unknown; tables such as CheXpert's have 0 for no"
        )
    return doubts


def find_lacking_classes(name: str, split: Split, classes: Sequence[str]) -> list[str]:
    """Return a line if the split `name` has no image of a class, and one if of a class it has all.

    The second is asked of val and test where an image may have several classes. Then a class that
    each image has is found by any network, and the mean average precision is of the classes that
    are there.
    """
    lines = []
    # Not strict: of a subset, torchvision may know fewer names than numbers.
    counts = list(zip(classes, count_by_class(split, len(classes)), strict=False))
    lacking = [class_name for class_name, n in counts if n == 0]
    has_map = split.targets.ndim == 2 and name != "train"  # training images are not scored
    if lacking:
        line = f"{name} has no image of class {shorten(lacking)}"
        if has_map:
            line += (
                f"; its mAP is the mean of {len(counts) - len(lacking)} of {len(counts)} classes"
            )
        lines.append(line)
    if has_map:
        is_without_no = ~(split.targets == -1).any(0)  # (classes,)
        sure = [
            class_name
            for (class_name, n), without_no in zip(counts, is_without_no, strict=True)
            if n and without_no
        ]
        if sure:
            lines.append(
                f"{name}: no image is without class {shorten(sure)}, so any network finds it"
            )
    return lines


def shorten(names: Sequence[str]) -> str:
    """Return names as a text, of more than ten the first five.

    >>> shorten(["a", "b"]), shorten("abcdefghijkl")
    ('a, b', 'a, b, c, d, e and 7 more')
    """
    if len(names) <= 10:
        return ", ".join(names)
    return f"{', '.join(names[:5])} and {len(names) - 5} more"


def find_without_class(train: Split) -> list[str]:
    """Return a line if training images that may have several classes have none.

    Their loss "softmax" is 0, whatever the network says, see `lora.cross_entropy`.
    """
    if train.targets.ndim == 1:
        return []
    n = int((train.targets != 1).all(1).sum())
    if n == 0:
        return []
    return [
        f"train: {n} of {len(train.targets)} images have no class; the loss softmax learns nothing"
        ' from them; voc_loss = "bce", in a --config file or from Python, does'
    ]


def find_common_images(task: Task, pixels: Mapping[Path, bytes]) -> list[str]:
    """Return lines on equal images: in two splits, twice in one, and with different labels.

    Images are equal if their pixels are. `pixels` has a digest of these for each file that was read
    before; if it lacks a file of a split, that split is compared with others by the bytes of files,
    see `digests_of_files`.
    """
    splits: dict[str, Split] = {name: getattr(task, name) for name in SPLITS}
    of_each = {name: digests_of_each(split.images, pixels) for name, split in splits.items()}
    of_files = {} if all(of_each.values()) else digests_of_files(splits)
    return [
        *find_shared(of_each, of_files),
        *find_repeated(of_each),
        *find_two_labels(of_each, splits),
    ]


def find_shared(
    of_each: Mapping[str, list[bytes]], of_files: Mapping[str, set[bytes]]
) -> list[str]:
    """Return a line for each two splits with equal images.

    `of_each` has for each split the digests of its pixels, [] where they are not known; then
    `of_files` has those of its files.
    """
    lines = []
    for one, two, meaning in (
        ("train", "test", "the test is of images that were trained on"),
        ("val", "test", "epochs and rates are chosen on images that are tested"),
        ("train", "val", "epochs and rates are chosen on images that were trained on"),
    ):
        if of_each[one] and of_each[two]:
            n = len({*of_each[one]} & {*of_each[two]})
        else:
            n = len(of_files[one] & of_files[two])
        if n:
            images = "an image" if n == 1 else f"{n} images"
            lines.append(f"{one} and {two} have {images} in common: {meaning}")
    return lines


def find_repeated(of_each: Mapping[str, list[bytes]]) -> list[str]:
    """Return a line if validation has an image twice, and one if test has; each copy counts."""
    lines = []
    for name, meaning in (
        ("val", "epochs and rates are chosen by each image"),
        ("test", "each image counts in the accuracy, and in its interval"),
    ):
        digests = of_each[name]
        different = len({*digests})
        if different < len(digests):
            lines.append(
                f"{name}: its {len(digests)} images are {different} different pictures: {meaning}"
            )
    return lines


def find_two_labels(of_each: Mapping[str, list[bytes]], splits: Mapping[str, Split]) -> list[str]:
    """Return a line if equal images, in any splits whose pixels are known, have other labels."""
    known = [name for name in SPLITS if of_each[name]]
    digests = [digest for name in known for digest in of_each[name]]
    labels = [str(label) for name in known for label in splits[name].targets.tolist()]
    n = count_with_two_labels(digests, labels)
    return [f"pictures that are there twice, with different labels: {n}"] if n else []


def digests_of_each(images: Stored, pixels: Mapping[Path, bytes]) -> list[bytes]:
    """Return the sha256 of the pixels of each image; [] if a file is not in `pixels`.

    Images in memory are compared by `as_integers`.
    """
    if isinstance(images, Tensor):
        return [digest_of_pixels(as_integers(image)) for image in images]
    if not all(file in pixels for file in images):
        return []
    return [pixels[file] for file in images]


def as_integers(image: Tensor) -> Tensor:
    """Return the pixels of an image in memory in whole numbers: 8 bits, or 16 if they are finer.

    How 8 bits were divided by 255 does not matter, nor that the result was rounded to half
    precision, which moves a level by less than 0.07.
    """
    levels = 255 * image
    if (levels - levels.round()).abs().max() < 0.07:
        return levels.round().byte()
    return (65535 * image).round().int()


def digests_of_files(splits: Mapping[str, Split]) -> dict[str, set[bytes]]:
    """Return for each split the sha256 of its files that have the size of a file in another split.

    At most 20,000 files of each split are read, evenly spaced, so of more files not all equal ones
    are found. A split of more than 100,000 files, or of images in memory, has none.
    """
    sizes = {name: sizes_of(split.images) for name, split in splits.items()}
    splits_by_size = Counter[int]()  # in how many splits a file of this size is
    for of_split in sizes.values():
        splits_by_size.update({*of_split.values()})
    digests = {}
    for name, of_split in sizes.items():
        candidates = [file for file, size in of_split.items() if splits_by_size[size] > 1]
        some = evenly_spaced(candidates, 20_000)
        digests[name] = {hashlib.sha256(file.read_bytes()).digest() for file in some}
    return digests


def sizes_of(images: Stored) -> dict[Path, int]:
    """Return how many bytes each file has; {} for images in memory or more than 100,000 files."""
    if isinstance(images, Tensor) or len(images) > MOST_SIZES:
        return {}
    return {file: size_of(file) for file in images}


def count_with_two_labels(digests: Sequence[bytes], labels: Sequence[str]) -> int:
    """Return how many different pictures have two labels or more.

    >>> count_with_two_labels([b"a", b"a", b"b", b"b"], ["0", "1", "2", "2"])
    1
    """
    labels_of = defaultdict[bytes, set[str]](set)  # of each picture
    for digest, label in zip(digests, labels, strict=True):
        labels_of[digest].add(label)
    return sum(len(of_picture) > 1 for of_picture in labels_of.values())


def find_folders_in_classes(task: Task) -> list[str]:
    """Return lines if class folders hold folders of images, and if these are named as classes.

    Such folders may be patients, films, masks, or parts of the data under names that nobody can
    list. A class folder whose images all lie in one folder, as in cat/images/, is not told of.
    """
    split_of, class_of = files_of(task), classes_of(task)
    root = common_folder(class_of)
    # Of each class folder: those folders that have images of the class directly in them.
    places = defaultdict[Path, set[Path]](set)
    splits_of = defaultdict[Path, set[str]](set)  # of each folder that lies inside of a class
    name_of = dict[Path, str]()  # the class that it lies in
    for file, class_name in class_of.items():
        class_folder = folder_of_class(file.parent, class_name, root)
        places[class_folder].add(file.parent)
        for place in file.parents[: len(file.parts) - len(class_folder.parts) - 1]:
            splits_of[place].add(split_of[file])
            name_of[place] = class_name
    several = sorted(
        place
        for class_folder, of_class in places.items()
        if len(of_class) > 1
        for place in of_class - {class_folder}
    )
    if not several:
        return []
    found = " and ".join(str(place) for place in several[:2])
    line = (
        f"folders of images inside of class folders: {len(several)}, such as {found}. All images in"
        " them count as those of the class"
    )
    divided = [splits for splits in splits_of.values() if len(splits) > 1]
    if divided:
        names = ", ".join(name for name in SPLITS if any(name in splits for splits in divided))
        line += (
            f", and those of one folder are divided among {names}. If a folder is a person, a film"
            " or a part of the data, make train/CLASS, val/CLASS and test/CLASS of whole folders,"
            " as the guide shows"
        )
    return [f"{line}. If a folder holds masks, remove it", *find_strays(name_of, task.classes)]


def find_strays(class_of: Mapping[Path, str], classes: Sequence[str]) -> list[str]:
    """Return a line if folders inside of class folders have the names of other classes.

    `class_of` has the class that each folder lies in.
    """
    names = {*classes}
    strays = [place for place in sorted(class_of) if place.name in names - {class_of[place]}]
    if not strays:
        return []
    return [
        f"folders with the name of another class than the one they lie in: {len(strays)}, such"
        f" as {strays[0]}, whose images count as {class_of[strays[0]]}. Move them if they are of"
        " the other class"
    ]


def find_converted(task: Task) -> list[str]:
    """Return a line if names of files beside each other are the same but for their endings.

    Capital letters do not matter. This happens where images were converted or edited and the
    originals were kept (`holdout` splits by name), and where masks lie beside their photos.
    """
    # By folder and name, in small letters.
    by_name = defaultdict[tuple[Path, str], list[Path]](list)
    for file in files_of(task):
        by_name[file.parent, file.stem.casefold()].append(file)
    # a.png and A.png, with one ending, may be two letters
    twins = [files for files in by_name.values() if len({file.suffix for file in files}) > 1]
    if not twins:
        return []
    names = " and ".join(str(file) for file in sorted(twins[0]))
    return [
        f"images that have a namesake with another ending: {len(twins)},"
        f" such as {names}. Are these an image and its mask, or the same picture, converted or"
        " edited? Then remove one of both"
    ]


def files_of(task: Task) -> dict[Path, str]:
    """Return the image files of a task, and the split that each is in, such as "train".

    Images in memory have none. A file in two splits has the last one of train, val and test.
    """
    files: dict[Path, str] = {}
    for name in SPLITS:
        images = getattr(task, name).images
        files |= dict.fromkeys(
            [] if isinstance(images, Tensor) else map(without_dots, images), name
        )
    return files


def without_dots(file: Path) -> Path:
    """Return the path of a file that a script may have named as cat/../cat/0.png, as cat/0.png."""
    return Path(os.path.normpath(file)) if ".." in file.parts else file


def find_decomposed(task: Task) -> list[str]:
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


# Words in a name that say that a mask or a copy was made of another image, as 0_mask.png of 0.png.
MASKS = {*(word for word, meaning in NO_CLASS.items() if meaning == "mask"), "seg", "anno", "annot"}
COPIES = {"copy", "aug", "augmented", "flip", "flipped", "mirrored", "rot", "rotated", "cropped"}
COPIES |= {"crop", "resized", "thumb", "thumbnail", "edited"}
# Words that say what a file is, of which image it ever may be: those of masks and copies, of the
# image itself, as in img_0.png beside mask_0.png, and the first one of ground_truth.
ROLES = MASKS | COPIES | {word for word, meaning in NO_CLASS.items() if meaning == "image"}
ROLES |= {"photo", "picture", "original", "orig", "raw", "rgb", "ground"}

# Of each file whose name was made from another's: that one, and the change of the name.
Originals = dict[Path, tuple[Path, str]]


def find_derived(task: Task) -> list[str]:
    """Return lines if files look like masks or changed copies of others of their class.

    A copy may be tested where its original was trained on. Where both are in training, nothing is
    said: many data sets come with such copies. Masks are told in any split.
    """
    files = files_of(task)
    originals = find_originals(files, classes_of(task))
    masks = find_masks(files, originals)
    lines = say_masks(masks)
    others = {file: name for file, name in classes_of(task).items() if file not in masks}
    for told, copies in (
        (
            "whose names say that they were made of others",
            find_named_copies(originals, masks, len(files)),
        ),
        ("that Roboflow made of one picture, as their names say", find_versions(others)),
        ("that have a namesake in another folder of their class", find_in_two_folders(others)),
    ):
        doubtful = [
            copy for copy, original in copies.items() if {files[copy], files[original]} != {"train"}
        ]
        if doubtful:
            first = doubtful[0]
            lines.append(
                f"images {told}: {len(doubtful)}, such as {first} of {copies[first]}. A changed"
                " copy may be tested where its original was trained on, and a mask is no image of a"
                " class: if they are such, remove them, or give train/ and test/ with copies in"
                " train/ alone"
            )
    return lines


def find_masks_in_pool(images: Stored) -> list[str]:
    """Return a line if files of a pool look like masks; of up to 100,000 files, for the time."""
    if isinstance(images, Tensor) or len(images) > MOST_SIZES:
        return []
    return say_masks(find_masks(images, find_originals(images)))


def say_masks(masks: Collection[Path]) -> list[str]:
    """Return a line on files that look like masks, if there are any."""
    if not masks:
        return []
    return [
        f"images that look like masks of others: {len(masks)}, such as {min(masks)}. If they are, a"
        " network learns from them as from images: remove them"
    ]


def find_masks(files: Collection[Path], originals: Originals) -> set[Path]:
    """Return the files that look like masks of others, such as 0_mask.png beside 0.png.

    So do those in a folder of masks that have the name of an image above them, or of one in a
    folder of images beside theirs: masks/0.png of 0.png, or CarMasks/0_mask.png of CarImages/0.png.
    """
    meanings = {  # of each folder, such as {"mask"}
        place: {NO_CLASS[word] for word in words_of(place.name) if word in NO_CLASS}
        for place in {file.parent for file in files}
    }
    in_masks = [file for file in files if "mask" in meanings[file.parent]]
    # Where a folder of masks may have namesakes: (cat, "0") for cat/masks/0.png.
    places = set[tuple[Path, str]]()
    if in_masks:
        for file in files:
            name = without_roles(file.stem)
            places.add((file.parent, name))
            if meanings[file.parent] == {"image"}:
                places.add((file.parent.parent, name))
    masks = {file for file in in_masks if (file.parent.parent, without_roles(file.stem)) in places}
    masks |= {
        file for file, (_, change) in originals.items() if not MASKS.isdisjoint(words_of(change))
    }
    return masks | find_masks_by_word(files)


def find_masks_by_word(files: Collection[Path]) -> set[Path]:
    """Return masks whose names have any other word in place of mask, if there are many of them.

    Such as mask_001.png of fundus_001.png beside it. One of ROLES needs not be in many names, see
    `find_namesakes_but_for_words`.
    """
    rests: dict[Path, tuple[str, ...]] = {}  # of files with a word of MASKS: the other words
    for file in files:
        words = words_and_numbers(file.stem)
        rest = tuple(word for word in words if word not in MASKS)
        if rest and len(rest) < len(words):
            rests[file] = rest
    if not rests:
        return set()
    found = set[tuple[Path, tuple[str, ...]]]()  # other files, each without one of its words
    for file in files:
        words = words_and_numbers(file.stem)
        if file not in rests:
            for k, word in enumerate(words):
                if not word.isdecimal():
                    found.add((file.parent, words[:k] + words[k + 1 :]))
    masks = {file for file, rest in rests.items() if (file.parent, rest) in found}
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


def find_named_copies(
    originals: Originals, masks: Collection[Path], images: int
) -> dict[Path, Path]:
    """Return the files that are named as copies of others, and these; without masks.

    `images` says how many there are in all. What was added to the name of the original is one of
    COPIES, or any word that was added to many names beside the original, as in 0_bright.png,
    1_bright.png and so on.
    """
    times = Counter(
        without_digits(change)
        for file, (original, change) in originals.items()
        if file.parent == original.parent
    )
    return {
        file: original
        for file, (original, change) in originals.items()
        if file not in masks
        and (
            not COPIES.isdisjoint(words_of(change))
            or is_often(times[without_digits(change)], images)
        )
    }


def without_digits(text: str) -> str:
    """Return a text without its digits, such as "_deg" of "_90deg"."""
    return re.sub(r"\d+", "", text)


def is_often(times: int, images: int) -> bool:
    """Whether something is true of so many of all images that it is hardly chance.

    >>> is_often(3, 300), is_often(3, 301), is_often(2, 4)
    (True, False, False)
    """
    return times >= 3 and 100 * times >= images


def find_originals(files: Collection[Path], class_of: Mapping[Path, str] = {}) -> Originals:
    """Return for each file whose name was made from another's: that one, and the change.

    Such as 0.png and "_mask 2" for 0_mask 2.png, or img_0.png and "mask" for mask_0.png. The other
    one lies beside it or, if none does so, in the folder of the same class in another part.
    `class_of` is empty where there are no classes.
    """
    beside = find_originals_in({file: (file.parent, "") for file in files})
    root = common_folder(class_of)
    places: dict[Path, tuple[Path, str]] = {}  # such as ("film 1", "cat") of test/cat/film 1/0.png
    for file, class_name in class_of.items():
        inner = file.parent.relative_to(folder_of_class(file.parent, class_name, root))
        places[file] = inner, class_name
    return find_originals_in(places) | beside


def find_originals_in(places: Mapping[Path, tuple[Path, str]]) -> Originals:
    """Return as `find_originals` does the originals that have the same place as the file."""
    # The files of each place by their names, without endings and in small letters.
    by_place = defaultdict[tuple[Path, str], dict[str, Path]](dict)
    for file, place in places.items():
        by_place[place].setdefault(file.stem.casefold(), file)
    originals: Originals = {}
    for file, place in places.items():
        by_name = by_place[place]
        original, change = find_original(file.stem, by_name)
        if original:
            originals[file] = by_name[original.casefold()], change
    return find_namesakes_but_for_words(places) | originals


def find_namesakes_but_for_words(places: Mapping[Path, tuple[Path, str]]) -> Originals:
    """Return masks and copies that have the name of an image in their place, but for words.

    Such as p0_mask_1.png of p0_image_1.png, and flip1.png of orig1.png: each with that image, and
    those of its words that are of MASKS or COPIES.
    """
    groups = defaultdict[tuple[object, str], list[Path]](list)  # by place, and what names share
    for file, place in places.items():
        groups[place, without_roles(file.stem)].append(file)
    namesakes: Originals = {}
    for group in groups.values():
        if len(group) < 2:
            continue
        changes = {
            file: " ".join(word for word in words_of(file.stem) if word in MASKS | COPIES)
            for file in group
        }
        image = next((file for file in group if not changes[file]), None)
        if image:
            namesakes |= {file: (image, change) for file, change in changes.items() if change}
    return namesakes


def without_roles(name: str) -> str:
    """Return what names of an image and of its masks and copies share.

    >>> without_roles("P0_Mask_1"), without_roles("flip-P0 image.1")
    ('p0 1', 'p0 1')
    """
    rest = re.sub(WORD, lambda word: "" if word[0].lower() in ROLES else word[0], name)
    return re.sub(r"[ ._-]+", " ", rest).strip().casefold()


def find_original(name: str, names: Container[str]) -> tuple[str, str]:
    """Return the one of `names` that a name was made from, and the change; ("", "") without one.

    `names` are in small letters.
    The change has a word: 0_2 may well be another image than 0. Before the name of the original,
    it is one of MASKS or COPIES.

    >>> names = ["0", "1"]
    >>> find_original("0_bright 2", names), find_original("mask_1_7", names)
    (('0', '_bright 2'), ('1', 'mask_'))
    >>> find_original("0_2", names)
    ('', '')
    """
    _, *shorter = beginnings(name)
    for original in shorter:
        change = name[len(original) :]
        if original.casefold() in names and words_of(change):
            return original, change
    for start in reversed(shorter):
        change, rest = name[: len(start) + 1], name[len(start) + 1 :]
        for original in beginnings(rest):
            if original.casefold() in names and not (MASKS | COPIES).isdisjoint(words_of(change)):
                return original, change
    return "", ""


def beginnings(name: str) -> list[str]:
    """Return a name and what is before each of its separators, longest first.

    >>> beginnings("1_mask 2")
    ['1_mask 2', '1_mask', '1']
    """
    ends = [k for k, character in enumerate(name) if character in " ._-("]
    return [name, *(name[:end] for end in reversed(ends))]


def find_versions(class_of: Mapping[Path, str]) -> dict[Path, Path]:
    """Return files that Roboflow made of one picture, and the first one of it, in a class.

    It augments images, and names them as 0_jpg.rf.1a2b.jpg and 0_jpg.rf.3c4d.jpg.
    """
    first = dict[tuple[str, str], Path]()  # by class and name of the picture
    versions: dict[Path, Path] = {}
    for file, class_name in class_of.items():
        picture, mark, _ = file.stem.rpartition(".rf.")
        if mark and first.setdefault((class_name, picture), file) != file:
            versions[file] = first[class_name, picture]
    return versions


def find_in_two_folders(class_of: Mapping[Path, str]) -> dict[Path, Path]:
    """Return files with a namesake in another folder of their class, and the namesake.

    Such as cat/resized/0.png of cat/0.png, or cat/augmented/0.png of cat/original/0.png. Where
    classes hold more than four folders, of other names, these are likely to be patients or films
    whose images are numbered anew; then nothing is returned.
    """
    root = common_folder(class_of)
    first = dict[tuple[Path, str], Path]()  # by class folder and name
    places = set[tuple[Path, Path]]()  # folders with images, and the class folders they are in
    namesakes: dict[Path, Path] = {}
    for file, class_name in class_of.items():
        class_folder = folder_of_class(file.parent, class_name, root)
        places.add((file.parent, class_folder))
        met = first.setdefault((class_folder, file.stem.casefold()), file)
        if met.parent != file.parent:
            namesakes[file] = met
    names = {place.relative_to(class_folder) for place, class_folder in places}
    if len(names) > 4 or not is_often(len(namesakes), len(class_of)):
        return {}
    return namesakes


def classes_of(task: Task) -> dict[Path, str]:
    """Return the name of the class of each image file; {} where images have several classes."""
    class_of: dict[Path, str] = {}
    for name in SPLITS:
        split: Split = getattr(task, name)
        if split.targets.ndim == 1 and not isinstance(split.images, Tensor):
            labels = split.targets.tolist()
            # Of a subset, torchvision may know fewer names than numbers.
            names = [task.classes[k] if k < len(task.classes) else str(k) for k in labels]
            class_of |= dict(zip(map(without_dots, split.images), names, strict=True))
    return class_of


def common_folder(files: Collection[Path]) -> Path:
    """Return the innermost folder that has all files somewhere below it; "." of no files.

    It is an absolute path where some files have absolute paths and others not.
    """
    places = {file.parent for file in files}
    if len({place.is_absolute() for place in places}) > 1:
        places = {place.absolute() for place in places}
    return Path(os.path.commonpath(places)) if places else Path()


@lru_cache(maxsize=100_000)  # many files lie in one folder
def folder_of_class(place: Path, class_name: str, root: Path) -> Path:
    """Return the first folder below `root`, on the way to `place`, that is named as the class.

    `place` if there is none.

    >>> folder_of_class(Path("photos/7/film 1/7"), "7", Path("photos")).as_posix()
    'photos/7'
    """
    way = [path for path in (place, *place.parents) if root in path.parents]
    return next((path for path in reversed(way) if path.name == class_name), place)


def count_without_contrast(images: Tensor) -> int:
    """Return how many images (of shape (images, 3, height, width)) have one colour only."""
    is_constant = images.amax((2, 3)) == images.amin((2, 3))  # (images, 3): each channel
    return int(is_constant.all(1).sum())
