"""Program: whether labels and pixels that a script hands over are what `data.Task` says.

Most of what is refused here would train, and give an accuracy that means something else.
"""

from collections.abc import Sequence
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

from data import Channels, Pool, Split, Stored, Task


def check_task(task: Task) -> None:
    """Raise ValueError, one line, where images or labels from a script are not as `Task` says."""
    if not isinstance(task, Task):
        raise ValueError(
            f"task: is a {type(task).__name__}; give data.Task(name, train, val, test, classes)"
        )
    check_channels(task.mean, task.std)
    check_classes(task.classes)
    for name, split in task.splits().items():
        if not isinstance(split, Split):
            kind = type(split).__name__
            raise ValueError(f"{name}: is a {kind}; give data.Split(images, labels)")
        check_images(split.images, name)
        check_labels(split, name, task.classes)
    if len({split.targets.ndim for split in task.splits().values()}) > 1:
        raise ValueError("labels: of all splits one class an image, or of all several")
    # Else validation would choose a model for images that are cut in another way than the test's.
    if not are_cut_alike(task.val, task.test, task.uncut):
        raise ValueError("val and test: give their images in one size, or all of them as files")


def check_classes(classes: Sequence[str]) -> None:
    """Raise ValueError where classes are no list of two or more different names."""
    is_list = isinstance(classes, Sequence) and not isinstance(classes, str)
    if not is_list or not all(isinstance(name, str) for name in classes):
        raise ValueError(
            f"classes: is {classes!r}; give a list of names, such as [str(k) for k in range(10)]"
        )
    if len(set(classes)) < max(2, len(classes)):
        raise ValueError("classes: two or more names are needed, each once")


def are_cut_alike(val: Split, test: Split, uncut: bool) -> bool:
    """Whether images of val and test lose the same share at their edges when they are scored.

    Those in memory that have the network's size lose nothing, all others their edges, see
    `data.Images`. With `uncut`, no image loses any.
    """
    return uncut or size_in_memory(val) == size_in_memory(test)


def size_in_memory(split: Split) -> tuple[int, ...] | None:
    """Return height and width of the images of a split; None if they are files."""
    return tuple(split.images.shape[2:]) if isinstance(split.images, Tensor) else None


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
    given = f"mean {mean} and std {std}"
    if not (are_three_numbers(mean) and are_three_numbers(std)):
        raise ValueError(f"{given}: give three numbers each, such as (0.5, 0.5, 0.5)")
    if not (all(0 <= x <= 1 for x in mean) and all(0 < x <= 1 for x in std)):
        raise ValueError(
            f"{given}: give numbers from 0 to 1, as of pixels from 0 to 1, and no std of 0"
        )


def are_three_numbers(values: Channels) -> bool:
    """Whether something is a sequence of three numbers."""
    is_of_three = isinstance(values, Sequence) and len(values) == 3
    return is_of_three and all(isinstance(x, Real) for x in values)


def check_images(images: Stored, name: str) -> None:
    """Raise ValueError where images are neither pixels from 0 to 1 nor paths.

    `name` says what has them, such as "train" or "pool".
    """
    is_list = isinstance(images, Sequence) and all(isinstance(file, Path) for file in images)
    if not (is_list or isinstance(images, Tensor)):
        kind = type(images).__name__
        raise ValueError(
            f"{name}: images are a {kind}; give one tensor, or a list of pathlib.Path alone"
        )
    if not len(images):
        raise ValueError(f"{name}: has no images")
    if isinstance(images, Tensor):
        check_pixels(images, name)
    elif len({file.is_absolute() for file in images}) > 1:
        # A digest names each file below the folder that holds all of them. A mixture has none.
        raise ValueError(f"{name}: some paths are absolute and some are not; file.absolute()")


def check_pixels(images: Tensor, name: str) -> None:
    """Raise ValueError where a tensor is not (images, 3, height, width) of numbers from 0 to 1."""
    if images.dtype != torch.float32:  # the networks' type; whole numbers may go to 1 or 255
        raise ValueError(
            f"{name}: images are {images.dtype}; give float32 from 0 to 1: images.float(), and of"
            " values up to 255 images.float() / 255"
        )
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(
            f"{name}: images have the shape {tuple(images.shape)}; give (images, 3, height, width),"
            " of grey ones (images, 1, height, width) with images.expand(-1, 3, -1, -1), and where"
            " colours are last images.permute(0, 3, 1, 2)"
        )
    # numpy, by which they are hashed, takes neither.
    if images.device.type != "cpu" or images.requires_grad:
        raise ValueError(f"{name}: images are on a GPU, or need gradients; images.detach().cpu()")
    if not 0 <= images.min() <= images.max() <= 1:  # nan is refused, too
        raise ValueError(f"{name}: pixels of images in memory have to be numbers from 0 to 1")
    if images.max() == 0:
        raise ValueError(f"{name}: all pixels are 0")
    if images.max() < 2 / 255:  # those that were divided twice reach 1/255
        raise ValueError(f"{name}: no pixel is above 2/255; were they divided by 255 twice?")


def check_labels(split: Split, name: str, classes: Sequence[str]) -> None:
    """Raise ValueError where labels of the split `name` mean something else than `Split` says.

    Its images have been checked, so there is at least one.
    """
    labels = split.targets
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"{name}: labels are {kind}; give whole numbers, torch.int64")
    if labels.device.type != "cpu":
        raise ValueError(f"{name}: labels are on a GPU; labels.cpu()")
    if labels.ndim not in (1, 2):
        raise ValueError(
            f"{name}: labels have the shape {tuple(labels.shape)}; give (images,), a class each, or"
            " (images, classes)"
        )
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

    The likeliest mistake is a table of 0 and 1. Since 0 is "not counted" here, no answer could be
    wrong, and the average precision of any network would be 100 %. The same is true of a class that
    all images of val or test have; training images are not scored.
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
