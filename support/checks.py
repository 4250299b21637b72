"""Program: what is asked of a task before a run: is it what `data.Task` says, and what is doubtful.

Most of what is refused here would train, and give an accuracy that means something else.
"""

import hashlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

from data import (
    MOST_SIZES,
    SPLITS,
    Channels,
    Look,
    Pool,
    Split,
    Stored,
    Task,
    count_by_class,
    digest_of_pixels,
    find_lookalikes,
    size_of,
)
from support.names import (
    find_doubtful_names,
    find_misnamed,
    find_unread,
    folded,
    paths_of,
    places_of,
    shorten,
)

MOST_BYTES = 2**31  # of training files that are read to compare them: seconds on a local disk

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
    """Raise ValueError where all images of folders have the label of another class than their name.

    Only asked where all files lie in folders with names of classes, and of splits that have several
    folders, each with one label. A script that numbers the classes of each split by itself may
    number them in another order, or in the lack of one class. Where a folder has several labels, it
    may be no class, but a writer, a patient or a fold: see `find_labels_of_other_folders`.
    """
    names = {folded(name) for name in task.classes}
    paths = {path: found for path, found in paths_of(task).items() if found[0]}  # with a class
    folders_of_files = {os.path.dirname(path) for path in paths}  # noqa: PTH120  # as text: fast
    if not {folded(os.path.basename(folder)) for folder in folders_of_files} <= names:  # noqa: PTH119
        return
    splits_of = places_of(paths, task.classes)
    misnamed = find_misnamed(splits_of, task.classes)
    for name in SPLITS:
        of_split = [place for place, splits in splits_of.items() if name in splits]
        folders = {place.folder for place in of_split}
        wrong = [place for place in of_split if place in misnamed]
        if wrong and 1 < len(folders) == len(of_split):  # a place for each label of a folder
            first = min(wrong, key=lambda place: place.folder)
            raise ValueError(
                f"labels: images in {first.folder} are labelled {first.class_name}; number the"
                " classes of all splits in the order of `classes`, or, if it is meant so, give"
                " classes other names than folders"
            )


def as_checked(task: Task) -> Task:
    """Return a script's task with the name "own", classes in a list, plain numbers, and new splits.

    The splits are new objects, since `decode_once` remembers the images of a split that it has met,
    and their files may have changed since. Labels are copied, so a script that changes its own
    later changes no run.
    """
    return task._replace(
        name="own",
        train=Split(as_stored(task.train.images), task.train.targets.clone()),
        val=Split(as_stored(task.val.images), task.val.targets.clone()),
        test=Split(as_stored(task.test.images), task.test.targets.clone()),
        classes=list(task.classes),
        mean=tuple(float(x) for x in task.mean),
        std=tuple(float(x) for x in task.std),
        drawn=(),  # the script may have taken a folder's task and divided it anew
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
            " of grey ones (images, 1, height, width) with images.expand(-1, 3, -1, -1), and where"
            " colours are last images.permute(0, 3, 1, 2)"
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
    wrong, and the average precision of any network would be 100 %. That holds for a class that all
    images of val or test have, too; training images are not scored.
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
    if not (labels == -1).any():
        raise ValueError(
            f"{name}: no label is -1, no; 0 is not counted. Of 0 no and 1 yes make 2 * labels - 1;"
            " where each image has one class, labels.argmax(1)"
        )
    for k, of_class in enumerate(labels.T):
        if name != "train" and (of_class == 1).any() and not (of_class == -1).any():
            raise ValueError(
                f"{name}: of class {classes[k]} no label is -1, no (0 is not counted), so any"
                " network would find it; add images without it, or leave the class out"
            )


# --- what makes a number mean something else -----------------------------------------------------


def find_doubts(task: Task, looks: Mapping[Path, Look] | None = None) -> list[str]:
    """Return a line for each thing that is not refused, but that readers of an accuracy must know.

    Such things are: images of kinds that are not read, splits that share images, images with two
    labels, images made from others, labels that are not those of the folders, folders of images
    inside of class folders, images that are black or of one colour, classes that a split lacks, and
    labels that are not counted.
    `looks` has what was found in each image file that was read before.
    """
    looks = looks or {}
    doubts = find_unread(task)
    doubts += find_common_images(task, {file: look.digest for file, look in looks.items()})
    doubts += find_doubtful_names(task)
    for name in SPLITS:
        split: Split = getattr(task, name)
        doubts += find_empty(name, split.images, looks)
        doubts += find_doubts_of_labels(name, split, task.classes)
    return doubts


def find_doubts_of_copy(task: Task, looks: Mapping[Path, Look], partial: bool) -> list[str]:
    """Return a line for each thing that is doubtful of a copy of a benchmark.

    Images that are black or of one colour are none of its authors'. A subset, `partial`, may also
    have a class in one split alone, and the same images in two. Of a whole one this is not asked:
    its splits are official. `looks` as in `find_doubts`.
    """
    doubts: list[str] = []
    if partial:
        doubts += find_common_images(task, {file: look.digest for file, look in looks.items()})
    for name in SPLITS:
        split: Split = getattr(task, name)
        if not isinstance(split.images, Tensor):  # handwriting, a part of this program
            doubts += find_empty(name, split.images, looks)
        if partial:
            doubts += find_lacking_classes(name, split, task.classes)
    return doubts


def find_empty(name: str, images: Stored, looks: Mapping[Path, Look]) -> list[str]:
    """Return a line if all images are black, lose their levels, or else if most have one colour.

    Files are black if no number in them is above 1 of 255, as where numbers from 0 to 1 were saved
    as whole ones; in memory, such images are refused. Asked of are the files in `looks`, see
    `find_doubts`; where it lacks some, the line says of how many it is. `name` says what has the
    images, such as "train" or "pool".
    """
    sample = ""
    if isinstance(images, Tensor):
        if most_lose_levels(images):
            return [
                f"{name}: of most images few levels are left where they are cut, since cut images"
                " have 8 bits; scale them so that their numbers fill 0 to 1, by a high percentile"
                " and not by the brightest pixel"
            ]
        without_contrast = count_without_contrast(images)
        looked_at = len(images)
    else:
        found = [looks[file] for file in images if file in looks]
        looked_at = len(found)
        if looked_at < len(images):
            sample = f"{looked_at:,} of {len(images):,} images were looked at, and "
        if found and max(look.brightest for look in found) < 2:
            return [
                f"{name}: {sample}no pixel is above 1 of 255, so the images are black; were"
                " numbers from 0 to 1 saved as whole numbers?"
            ]
        without_contrast = sum(look.is_of_one_colour for look in found)
    if 2 * without_contrast > looked_at:
        of_what = "of these" if sample else f"of {looked_at:,} images"
        return [f"{name}: {sample}{without_contrast:,} {of_what} are of one colour"]
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
    see `digests_of_files`. A line says so where only some training files were compared.
    """
    splits: dict[str, Split] = {name: getattr(task, name) for name in SPLITS}
    of_each = {name: digests_of_each(split.images, pixels) for name, split in splits.items()}
    of_files, step = ({}, 1) if all(of_each.values()) else digests_of_files(splits)
    lines = find_shared(of_each, of_files, step)
    if step > 1:
        lines.append(
            f"train has {len(splits['train'].targets):,} files: one in {step} was compared with val"
            " and test, so more images may be in common than is told; of a folder,"
            " `bisslight data check` compares all"
        )
    return lines + find_repeated(of_each) + find_two_labels(of_each, splits)


def find_shared(
    of_each: Mapping[str, list[bytes]], of_files: Mapping[str, set[bytes]], step: int
) -> list[str]:
    """Return a line for each two splits with equal images.

    `of_each` has for each split the digests of its pixels, [] where they are not known; then
    `of_files` has those of its files, of one in `step` training files.
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
            if one == "train" and step > 1:
                images = f"at least {images}"
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
    precision, which changes a level by at most 1/2048 of it.
    """
    levels = 255 * image
    if torch.allclose(levels, levels.round(), rtol=1 / 2000, atol=1e-3):  # 16 bits are no finer
        return levels.round().byte()
    return (65535 * image).round().int()


def digests_of_files(splits: Mapping[str, Split]) -> tuple[dict[str, set[bytes]], int]:
    """Return for each split the sha256 of its files that have the size of a file in another split.

    Images in memory have none. Of training files, at most MOST_SIZES are asked for their size, and
    of those that are to be read at most MOST_BYTES are read, evenly spaced: the second value is k
    where one in k training files was compared.
    """
    sizes = {name: sizes_of(split.images) for name, split in splits.items() if name != "train"}
    train = splits["train"].images
    every = times_over(len(train), MOST_SIZES)
    sizes["train"] = sizes_of(train[::every])
    splits_by_size = Counter[int]()  # in how many splits a file of this size is
    for of_split in sizes.values():
        splits_by_size.update({*of_split.values()})
    to_read = {
        name: [file for file, size in of_split.items() if splits_by_size[size] > 1]
        for name, of_split in sizes.items()
    }
    step = times_over(sum(sizes["train"][file] for file in to_read["train"]), MOST_BYTES)
    to_read["train"] = to_read["train"][::step]
    digests = {
        name: {hashlib.sha256(file.read_bytes()).digest() for file in files}
        for name, files in to_read.items()
    }
    return digests, every * step


def times_over(n: int, most: int) -> int:
    """Return the least k for which one in k of `n` things are at most `most`.

    >>> times_over(20, 20), times_over(21, 20), times_over(0, 20)
    (1, 2, 1)
    """
    return max(1, math.ceil(n / most))


def sizes_of(images: Stored) -> dict[Path, int]:
    """Return how many bytes each file has; {} for images in memory."""
    return {} if isinstance(images, Tensor) else {file: size_of(file) for file in images}


def count_with_two_labels(digests: Sequence[bytes], labels: Sequence[str]) -> int:
    """Return how many different pictures have two labels or more.

    >>> count_with_two_labels([b"a", b"a", b"b", b"b"], ["0", "1", "2", "2"])
    1
    """
    labels_of = defaultdict[bytes, set[str]](set)  # of each picture
    for digest, label in zip(digests, labels, strict=True):
        labels_of[digest].add(label)
    return sum(len(of_picture) > 1 for of_picture in labels_of.values())


def most_lose_levels(images: Tensor) -> bool:
    """Return whether most images have below 26 levels in 8 bits, and more than twice as many now.

    So it is of a camera's 16 bits, divided by 65535, if the scene is dark. One pixel may be bright.
    Asked are a thousand images at most, evenly spaced. The shape is (images, 3, height, width).
    """
    asked = images[:: max(1, math.ceil(len(images) / 1000))]
    losing = 0
    for image in asked:
        levels = len((255 * image).to(torch.uint8).unique())
        if levels < 26:
            losing += len(image.unique()) > 2 * levels
    return 2 * losing > len(asked)


def count_without_contrast(images: Tensor) -> int:
    """Return how many images (of shape (images, 3, height, width)) have one colour only."""
    is_constant = images.amax((2, 3)) == images.amin((2, 3))  # (images, 3): each channel
    return int(is_constant.all(1).sum())
