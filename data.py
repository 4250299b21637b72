"""Paper: labelled tasks D^D and unlabelled pools D^P, split, cut, ordered and loaded.

Training takes images epoch after epoch. Each image that is taken is a draw, and draws are numbered
over the whole run, from 0. Random numbers depend on the seed, a purpose and the draw's number
alone, so batches depend neither on worker processes nor on where a run was continued. A wrong
folder raises ValueError, an unreadable image ImageError.
"""

import hashlib
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2 import functional as F

SPLITS = ("train", "val", "test")  # the names of a task's splits
Channels = tuple[float, ...]  # one number each for red, green and blue
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std of its pixels in [0, 1]
Label = int | list[int]  # the class, such as 3; or for each class 1 yes, -1 no, 0 not counted
Entries = list[tuple[str, Label]]  # image file relative to the dataset's folder, and its label
Draw = tuple[int, int]  # (number of the draw in the run, index of the image in its split)
Stored = Tensor | list[Path]  # pixels (images, 3, height, width) in [0, 1], or image files


class ImageError(OSError):
    """An image cannot be read; the message names the file and the remedy."""


def seed_for(seed: int, *purpose: str | int) -> int:
    """Derive a seed of 63 bits from a run's seed and a purpose, such as "mask" and the step.

    It is made with sha256, so it is the same on every platform; Python's hash differs by process.

    >>> seed_for(0, "mask", 1)
    9043777112963148149
    """
    words = "/".join(str(word) for word in (seed, *purpose))  # such as 0/mask/1
    digest = hashlib.sha256(words.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 64 bits, less one: it fits a signed integer


def rng(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator of random numbers for one purpose, such as `rng(0, "mask", 1)` for step 1."""
    return torch.Generator().manual_seed(seed_for(seed, *purpose))


@dataclass(frozen=True, eq=False)  # a split equals itself alone, so `decode_once` can remember it
class Split:
    """Images and their labels, such as the training images of a task."""

    images: Stored
    # int64. (images,): the class of each image. (images, classes), where an image may show several
    # classes: 1 yes, -1 no, 0 not counted.
    targets: Tensor

    @classmethod
    def from_entries(cls, root: Path, entries: Entries) -> Self:
        """Make a split of image files, each named relative to the folder `root`, and labels."""
        files = [root / file for file, _ in entries]
        labels = [label for _, label in entries]
        return cls(files, torch.tensor(labels))

    def part(self, numbers: range) -> Self:
        """The split of the images numbers.start to numbers.stop - 1, with their labels."""
        some = slice(numbers.start, numbers.stop)
        return type(self)(self.images[some], self.targets[some])


class Labelled(Protocol):
    """A list or a torch Dataset of pairs: image (3, height, width) in [0, 1], and its class."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


class Task(NamedTuple):
    """A labelled dataset D^D. Its images are normalised by `mean` and `std`, see `normalise`."""

    name: str  # as in the settings, such as "dtd" or "folder:/data/flowers"
    train: Split
    val: Split
    test: Split
    classes: list[str]  # the name of class 0, of class 1 and so on
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]
    uncut: bool = False  # see `Transform`

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        """The three splits, in the order of `SPLITS`."""
        return self.train, self.val, self.test

    @classmethod
    def of(cls, train: Labelled, val: Labelled, test: Labelled, classes: Sequence[str]) -> Self:
        """Make a task in memory; each split is given as pairs of an image and its class.

        An image is (3, height, width) in [0, 1], a class its number in `classes`. Raises ValueError
        if they are not, see `check_task`.
        """
        task = cls("own", stack_pairs(train), stack_pairs(val), stack_pairs(test), list(classes))
        check_task(task)
        return task

    def sizes(self) -> dict[str, int]:
        """How many images each split has, such as {"train": 60, "val": 20, "test": 20}."""
        counts = [len(split.targets) for split in self.splits]
        return dict(zip(SPLITS, counts, strict=True))


def stack_pairs(pairs: Labelled) -> Split:
    """Stack pairs of an image and its class to a split in memory.

    Raises ValueError if classes are not whole numbers, or if pixels are (0 to 255, not 0 to 1).
    """
    images, targets = default_collate([pairs[i] for i in range(len(pairs))])
    if targets.is_floating_point():
        raise ValueError("classes are whole numbers, such as 3")
    if not images.is_floating_point():
        raise ValueError("pixels are numbers in [0, 1], not whole ones; divide by 255")
    # (n, 1) becomes (n,): medmnist's data sets give a class as an array of shape (1,).
    return Split(images.float(), targets.long().reshape(len(pairs)))


def check_task(task: Task) -> None:
    """Raise ValueError if images or labels of a split cannot be used.

    Pixels have to be in [0, 1], and each label the number of a class: 0, 1, 2 and so on. Where
    images may show several classes, each split needs a class that is shown: without one there is
    no mAP.
    """
    for split in task.splits:
        check_pixels(split.images)
        y = split.targets
        if y.ndim > 1:  # (images, classes): an image may show several
            is_valid = (y == 1).any()
            need = "a positive image each, for mAP"
        else:
            is_valid = 0 <= y.min() <= y.max() < len(task.classes)
            need = f"labels below {len(task.classes)}"
        if not is_valid:
            raise ValueError(f"train, val and test need {need}")


def check_pixels(images: Stored) -> None:
    """Raise ValueError if images in memory are not (images, 3, height, width) in [0, 1]."""
    if not isinstance(images, Tensor):
        return  # files are looked at when they are read
    has_rgb_images = images.ndim == 4 and images.shape[1] == 3 and len(images) > 0
    is_valid = has_rgb_images and 0 <= images.min() <= images.max() <= 1  # with a NaN it is False
    if not is_valid:
        raise ValueError("needs images (3, H, W) with pixels in [0, 1]; see clamp(0, 1)")


class Pool(NamedTuple):
    """Unlabelled images D^P, normalised by `mean` and `std`."""

    images: Stored
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]


def fingerprint(*parts: Split | Pool) -> str:
    """sha256 of a pool, or of a task's splits; a run that goes on compares it with its first one.

    It covers all labels, and of images in memory the pixels. Of image files it covers the names
    alone, since reading them would take minutes: as paths below the folder that holds them all, so
    that the benchmarks' folder (--data-root) may be moved.
    """
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part.images, Tensor):
            sha.update(part.images.numpy().tobytes())
        else:
            sha.update(names_below(part.images).encode())
        if isinstance(part, Split):
            sha.update(part.targets.numpy().tobytes())
    return sha.hexdigest()


def name_own_data(*parts: Split | Pool) -> str:
    """The name of images from Python, in place of that of --dataset or --pool: "own:1f0c…".

    The digits are those of `fingerprint`, so a run directory refuses to go on with other images.
    """
    return f"own:{fingerprint(*parts)[:12]}"


def names_below(files: list[Path]) -> str:
    """The files' paths relative to the innermost folder that holds them all, one on each line.

    /a/x/1.jpg and /a/y/2.jpg give x/1.jpg and y/2.jpg. So the `fingerprint` of a folder that was
    moved stays the same.
    """
    root = os.path.commonpath({file.parent for file in files})
    prefix = os.path.join(root, "")  # noqa: PTH118  # with the separator at its end
    # Paths are cut as text: `relative_to` takes ten seconds for ImageNet's 1.28 million files.
    return "\n".join([str(file)[len(prefix) :] for file in files])


def find_images(root: Path, outer: tuple[Path, ...] = ()) -> list[Path]:
    """Find all image files below a folder, except names that begin with a dot; sorted by path.

    Links are followed. `outer` is for the recursion alone: the real paths of the folders above
    `root`. Raises ValueError if a link leads back to one of them, or if a name is not UTF-8.
    """
    here = root.resolve()
    for parent in outer:
        if parent.is_relative_to(here):  # a folder above lies in here, so a link has led upwards
            raise ValueError(f"{root}: is a link to a folder that it lies in; remove it")
    files = list[Path]()
    for path in root.iterdir():
        if path.name.startswith("."):
            continue
        if path.suffix.lower() in IMG_EXTENSIONS:
            check_utf8_name(path)
            files.append(path)
        elif path.is_dir():
            files += find_images(path, (*outer, here))
    return sorted(files, key=str)  # as text, by which a-b/1.png comes before a/1.png


def list_other_files(root: Path, images: list[Path]) -> list[Path]:
    """All files below a folder except `images`, sorted; hidden files and folders are left out."""
    others = []
    for path in {*root.rglob("*")} - {*images}:
        is_hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not is_hidden:
            others.append(path)
    return sorted(others)


def check_utf8_name(path: Path) -> None:
    """Raise ValueError if a path is not UTF-8: `fingerprint` and `holdout` hash it as UTF-8."""
    try:
        str(path).encode()  # to UTF-8
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}: this name is not UTF-8; rename the file or folder") from error


def subfolders(root: Path) -> list[Path]:
    """The folders directly in a folder, sorted by name, without those that begin with a dot."""
    return sorted(x for x in root.iterdir() if x.is_dir() and not x.name.startswith("."))


class FolderError(ValueError):
    """A folder of class folders cannot be used; `args` has a text for each thing that is wrong."""

    def __str__(self) -> str:
        return "; ".join(self.args)


def folder(root: Path, seed: int) -> Task:
    """Read a task: a folder of class folders, or of train/, val/, test/ with class folders each.

    A missing test or val is taken from train, see `holdout`. Raises FolderError with all that is
    wrong with the folder.
    """
    split_folders = find_split_folders(root)
    classes = [path.name for path in subfolders(split_folders["train"])]
    entries = list_splits(root, split_folders, classes)
    for name in ("test", "val"):  # test first; val is a fifth of what is left
        if name not in entries:
            entries["train"], entries[name] = holdout(entries["train"], seed, name)
    train, val, test = (Split.from_entries(root, entries[name]) for name in SPLITS)
    return Task(f"folder:{root}", train, val, test, classes)


def find_split_folders(root: Path) -> dict[str, Path]:
    """The folder of each split in `root`; {"train": root} if it has class folders instead.

    Raises FolderError if train is missing, or if other folders lie beside the splits.
    """
    names = {path.name for path in subfolders(root)}
    split_folders = {name: root / name for name in SPLITS if name in names}
    if not split_folders:
        return {"train": root}
    if "train" not in split_folders or len(names) > len(split_folders):
        raise FolderError(f"holds {', '.join(sorted(names))}; parts are named train, val and test")
    return split_folders


def list_splits(
    root: Path, split_folders: dict[str, Path], classes: list[str]
) -> dict[str, Entries]:
    """List the images of each split that has a folder, with their labels, by the split's name.

    `root` is the folder of the task, `split_folders` has that of each split by name, `classes` are
    the names of the class folders in train. Raises FolderError with all that is wrong in them.
    """
    entries = dict[str, Entries]()
    faults = list[str]()
    for name, split_folder in split_folders.items():
        needed = 1  # images in each class folder
        if name == "train":  # each class keeps one, and gives one to each split without a folder
            needed += len(SPLITS) - len(split_folders)
        files = {path.name: find_images(path) for path in subfolders(split_folder)}  # by class
        faults += find_faults(root, split_folder, files, classes, needed)
        entries[name] = label_files(root, files, classes)
    if faults:
        raise FolderError(*faults)
    return entries


def find_faults(
    root: Path, split_folder: Path, files: dict[str, list[Path]], classes: list[str], needed: int
) -> list[str]:
    """Describe what is wrong with the class folders of a split, a text each; [] if nothing is.

    Args:
        root: the task's folder, in which `split_folder` lies, or which it is.
        split_folder: the folder of the class folders.
        files: the images found in each class folder.
        classes: the names of the class folders in train.
        needed: how many images each class needs here.
    """
    faults = list[str]()
    if len(files) < 2:
        faults.append(
            f"needs two or more class folders, it has {len(files)}: "
            f"put the images into {split_folder}/CLASS/"
        )
    for name, images in files.items():
        count = len(images)
        shown = (split_folder / name).relative_to(root).as_posix()  # such as rose, or test/rose
        if name not in classes:
            faults.append(f"class {shown} is not in train")
        elif count < needed:
            noun = "image" if count == 1 else "images"
            faults.append(f"class {shown} has {count} {noun} and needs at least {needed}")
    return faults


def label_files(root: Path, files: dict[str, list[Path]], classes: list[str]) -> Entries:
    """Each image file with the number of its class, such as ("train/rose/1.jpg", 0).

    `files` has the images of each class folder; `classes` says which class has which number.
    """
    entries: Entries = []
    for label, name in enumerate(classes):
        for file in files.get(name, []):
            entries.append((file.relative_to(root).as_posix(), label))
    return entries


def holdout(entries: Entries, seed: int, split_name: str) -> tuple[Entries, Entries]:
    """Take a fifth of each class out of `entries`; returns (rest, taken), each in its old order.

    The files of a class are sorted by a hash of seed, `split_name` ("test" or "val") and file name;
    the first fifth is taken. So it does not depend on the order in which files are listed. A fifth
    is rounded down, but is at least one image; a class with a single image keeps it. CUB-200 is
    split into 4800 and 1194 images, as many as in the authors' program.

    >>> holdout([("1.jpg", 0), ("2.jpg", 0), ("3.jpg", 1)], 0, "val")
    ([('1.jpg', 0), ('3.jpg', 1)], [('2.jpg', 0)])
    """
    by_class: dict[Label, list[str]] = {}
    for file, label in entries:  # the label is one class here
        by_class.setdefault(label, []).append(file)
    taken_files = set[str]()
    for files in by_class.values():
        files.sort(key=partial(seed_for, seed, split_name))  # of each file the sha256, a number
        if len(files) > 1:
            taken_files.update(files[: max(1, len(files) // 5)])
    rest = [(file, label) for file, label in entries if file not in taken_files]
    taken = [(file, label) for file, label in entries if file in taken_files]
    return rest, taken


def draws_of_step(n: int, batch: int, step: int, by_epoch: bool = False) -> range:
    """The numbers of the `batch` draws that one training step takes from n images.

    A draw is one image taken for training. Draws are numbered over the whole run, from 0, so draw i
    is in epoch i // n. With `by_epoch`, the last step of an epoch has only what is left of it;
    otherwise a step may hold the end of one epoch and the start of the next.

    >>> draws_of_step(10, 4, step=2), draws_of_step(10, 4, step=2, by_epoch=True)
    (range(8, 12), range(8, 10))
    """
    if not by_epoch:
        return range(step * batch, (step + 1) * batch)
    epoch, step_in_epoch = divmod(step, steps_per_epoch(n, batch))
    first = epoch * n + step_in_epoch * batch
    end = min(first + batch, (epoch + 1) * n)
    return range(first, end)


def steps_per_epoch(n: int, batch: int) -> int:
    """How many steps take all n images once; the last one may have fewer than `batch` images."""
    return math.ceil(n / batch)


def stream(
    n: int, batch: int, seed: int, purpose: str, steps: range, by_epoch: bool = False
) -> Iterator[list[Draw]]:
    """Yield the draws of each of these steps, as pairs (number of the draw, index of its image).

    Every epoch has all n images in a random order of its own, which depends on seed and purpose;
    `by_epoch` as in `draws_of_step`. Here epoch 0 has the images 2, 1, 0; epoch 1 begins with 0:

    >>> list(stream(3, 2, seed=0, purpose="lora", steps=range(2)))
    [[(0, 2), (1, 1)], [(2, 0), (3, 0)]]
    """

    @lru_cache(maxsize=1)  # most steps need the epoch of the step before
    def order_of_epoch(epoch: int) -> list[int]:
        """The indices of the n images in this epoch's random order."""
        generator = rng(seed, purpose, "order", epoch)
        order: list[int] = torch.randperm(n, generator=generator).tolist()
        return order

    for step in steps:
        draws = draws_of_step(n, batch, step, by_epoch)
        yield [(draw, order_of_epoch(draw // n)[draw % n]) for draw in draws]


class Transform(NamedTuple):
    """How an image becomes a network input of side `size`: see `Images`, then `normalise`."""

    size: int  # pixels
    mean: Channels
    std: Channels
    augment: str = "none"  # "crop": training images are cropped at random, see `cut_random`
    min_crop: float = 0.2  # the smallest random crop, as a share of the image's area
    interpolation: str = "bicubic"  # or "bilinear"
    flip: bool = True  # whether half of the random crops are mirrored
    uncut: bool = False  # True: `cut_centre` resizes a square image without cutting its edges off


Picture = Image.Image | Tensor  # an RGB image: of Pillow, or uint8 (3, height, width)


def read_image(path: Path) -> Picture:
    """Read an image file as RGB, to its end. EXIF and alpha are ignored, as torchvision does.

    A plain JPEG file is returned as a tensor, since cutting and resizing a tensor takes half of the
    time. Resized values then differ from Pillow's by at most one grey level, with bicubic resizing
    rarely by a few. Any other image is returned as Pillow's. Raises ImageError.
    """
    try:
        return decode(path)
    except ImageError:  # `decode` has found what is wrong
        raise
    except Exception as error:  # Pillow raises anything from OSError to TypeError on damaged bytes
        reason = "damaged, or no image"
        if isinstance(error, OSError) and error.strerror:  # such as "Permission denied"
            reason = error.strerror
        raise cannot_read(path, reason) from error


def decode(path: Path) -> Picture:
    """Decode an image file as `read_image` says. On damaged bytes, it raises any exception.

    Raises ImageError for images that could be decoded, but not used.
    """
    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as image:  # this reads no more than the header
        if image.mode.startswith(("I", "F")):  # 16 or 32 bits, which Pillow would clip to 8
            raise cannot_read(path, "more than 8 bits a channel, save it with 8")
        # `cut_centre` would enlarge 1 x 5000 pixels to 256 x 1,280,000, in 1.3 GB and 5 seconds.
        if max(image.size) > 100 * min(image.size):
            raise cannot_read(path, "one side is more than 100 times the other")
        if image.format == "JPEG" and image.mode in ("RGB", "L"):  # a plain one, not CMYK
            return decode_jpeg(content, image)
        return image.convert("RGB")


def cannot_read(path: Path, reason: str) -> ImageError:
    """The error for an image file that cannot be read, with its remedy."""
    return ImageError(f"{path}: cannot be read ({reason}); replace or remove it")


def decode_jpeg(content: bytes, image: Image.Image) -> Tensor:
    """Decode a JPEG file to pixels, uint8 (3, height, width).

    `content` has the bytes of the file, `image` is the same file opened by Pillow. torchvision's
    decoder takes half of the time of Pillow's; pixels are the same, since both call libjpeg.
    """
    # The operator that torchvision.io.decode_jpeg calls. That function warns since 0.29 that it
    # will be removed. None: this torchvision was built without its decoders.
    decoder = getattr(torch.ops.image, "decode_jpeg", None)
    if decoder is None:
        pixels: Tensor = F.pil_to_tensor(image.convert("RGB"))
    else:
        writable = bytearray(content)  # torch warns of memory that it cannot write to
        pixels = decoder(torch.frombuffer(writable, dtype=torch.uint8), 3)  # 3 channels: RGB
    return pixels


def try_to_read(path: Path) -> ImageError | None:
    """Read an image file to its end; returns the error if it cannot be read, otherwise None."""
    try:
        read_image(path)
    except ImageError as error:
        return error
    return None


def find_unreadable(files: Iterable[Path]) -> list[ImageError]:
    """Read image files to their end, and return the error of each that cannot be read.

    So a damaged file is named before the long work starts, not in its middle.
    """
    with ThreadPoolExecutor(8) as threads:  # decoders release Python's lock, so threads are enough
        errors = threads.map(try_to_read, files)
        return [error for error in errors if error]


def cut_random(image: Picture, t: Transform, seed: int) -> Picture:
    """Cut out a random part with t.min_crop to 1 of the area, and resize it to (size, size).

    It is flipped with probability 1/2, unless t.flip is False (App. C.2). `seed` decides on part
    and flip.
    """
    # torchvision takes random numbers from torch's global generator for the CPU. Its state is put
    # back afterwards. `torch.manual_seed` seeds GPUs, too, which takes 100 times as long.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # box: top, left, height and width; 3/4 to 4/3 is its width over its height
        box = RandomResizedCrop.get_params(image, [t.min_crop, 1.0], [3 / 4, 4 / 3])
        is_flipped = t.flip and bool(torch.rand(1) < 0.5)
    mode = InterpolationMode(t.interpolation)
    cut: Picture = F.resized_crop(image, *box, [t.size, t.size], mode, antialias=True)
    if is_flipped:
        cut = F.horizontal_flip(cut)
    return cut


def cut_centre(image: Picture, t: Transform) -> Picture:
    """Resize the shorter side to 256/224 of `size`, then cut out the centre, (size, size).

    So does the authors' program. With `uncut`, the shorter side is resized to `size` itself.
    """
    shorter = t.size if t.uncut else round(t.size * 256 / 224)
    resized = F.resize(image, [shorter], InterpolationMode(t.interpolation), antialias=True)
    cut: Picture = F.center_crop(resized, [t.size, t.size])
    return cut


class Images(Dataset[tuple[Tensor, Tensor]]):
    """The images of a split, decoded and cut to (3, size, size) when a draw asks for one.

    Training images are cut by `cut_random` if the transform says "crop", others by `cut_centre`.
    The random crop of a draw depends on seed, purpose and the draw's number, so it is the same in
    any process. Pixels are uint8, a quarter of the bytes of float32 to hand from process to process
    and to a GPU; `normalise` comes after that. Images that are taken as stored keep their type.
    """

    def __init__(
        self, split: Split, t: Transform, train: bool = False, seed: int = 0, purpose: str = ""
    ) -> None:
        self.split = split
        self.t = t
        self.seed = seed
        self.purpose = purpose
        self.crops_at_random = train and t.augment == "crop"
        # Images in memory that have the network's size need no work, unless they are cropped.
        self.taken_as_stored = False
        if isinstance(split.images, Tensor) and not self.crops_at_random:
            self.taken_as_stored = split.images.shape[2:] == (t.size, t.size)

    def __getitem__(self, item: Draw) -> tuple[Tensor, Tensor]:
        """Image (3, size, size) and label of a draw. Raises ImageError."""
        draw, index = item
        return self.load(draw, index), self.split.targets[index]

    def load(self, draw: int, index: int) -> Tensor:
        """Image number `index` of the split, (3, size, size), as draw number `draw` cuts it."""
        stored = self.split.images[index]  # pixels, or the path of a file
        if self.taken_as_stored:
            return torch.as_tensor(stored)  # it is a tensor, which type checkers cannot see
        # An image in memory, with pixels in [0, 1], is rounded to 8 bits, as images in files have.
        image = F.to_pil_image(stored) if isinstance(stored, Tensor) else read_image(stored)
        if self.crops_at_random:
            seed = seed_for(self.seed, self.purpose, "augment", draw)
            image = cut_random(image, self.t, seed)
        else:
            image = cut_centre(image, self.t)
        pixels: Tensor = F.pil_to_tensor(image) if isinstance(image, Image.Image) else image
        return pixels


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Make network inputs: (pixels - mean) / std, with pixels in [0, 1].

    `images` are (B, 3, height, width), uint8 or in [0, 1]; mean and std are (3, 1, 1). Steps and
    their order are those of torchvision's ToTensor and Normalize, so results are equal to the bit.
    """
    if images.dtype == torch.uint8:
        return images.float().div_(255).sub_(mean).div_(std)  # in place: a copy takes time
    return (images - mean) / std


def leave_terminal(worker: int) -> None:
    """Put a worker process into a session of its own, so that Ctrl-C reaches its parent alone.

    DataLoader calls it in each worker, with the worker's number, which is not needed here.
    """
    if hasattr(os, "setsid"):  # Windows has no sessions
        os.setsid()


def count_workers() -> int:
    """How many processes should decode images for this one: one per core, 1 to 16.

    Other processes of the same command (torchrun, --jobs) get their share of the cores.
    """
    if hasattr(os, "sched_getaffinity"):  # Slurm, taskset and containers allow some cores only
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # torchrun and --jobs set it: how many processes they have started on this machine
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(16, cores // processes))


def choose_workers(images: Images, workers: int | None, device: torch.device) -> int:
    """How many processes decode `images` while the network computes; 0: this process does it.

    If `workers` is None, it is one per core with a GPU (`count_workers`), and 0 on a CPU or for
    images in memory. A number is used as it is, unless there is nothing to decode or cut.
    """
    if images.taken_as_stored:  # so there is nothing to decode or cut
        return 0
    if workers is not None:
        return workers
    if isinstance(images.split.images, Tensor):  # in memory, so there is nothing to decode
        return 0
    if device.type == "cpu":  # all cores are busy with the network
        return 0
    return count_workers()


def batches(
    images: Images, draws: Iterable[list[Draw]], workers: int | None, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield network inputs (B, 3, size, size) and labels, on `device`, for each list of B draws.

    `workers` processes decode the next batches meanwhile; None: see `choose_workers`. Raises
    ImageError if an image cannot be read.
    """
    loader = DataLoader(
        images,
        batch_sampler=draws,  # each list of draws is one batch
        num_workers=choose_workers(images, workers, device),
        pin_memory=device.type == "cuda",  # copying pinned memory to a GPU lets the CPU go on
        worker_init_fn=leave_terminal,
        generator=torch.Generator(),  # by default it draws a seed from torch's global generator
    )
    mean = torch.tensor(images.t.mean, device=device).view(3, 1, 1)
    std = torch.tensor(images.t.std, device=device).view(3, 1, 1)
    try:
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            yield normalise(x, mean, std), y.to(device, non_blocking=True)
    except ImageError as error:
        # The text of a worker's error is its traceback, which ends in "ImageError: " and our
        # message. Without workers it is the message alone, which `rpartition` leaves as it is.
        _, _, message = str(error).rpartition("ImageError: ")
        raise ImageError(message.strip()) from None


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to a device, such as masks that were drawn on the CPU.

    A GPU copies from pinned memory, so that the CPU goes on without waiting. Pinning copies the
    tensor on the CPU first, which would be slow for a large one.
    """
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


# `decode_once` keeps splits of at most so many bytes, all processes together. All splits of the
# paper's benchmarks fit at 224 px (the largest, flowers' test images, takes 0.93 GB); ImageNet's
# 50,000 validation images would take 7.5 GB of memory.
MOST_KEPT = 2**30


@lru_cache(maxsize=2)  # for the same `Split` object; two: validation and test images of a run
def decode_once(split: Split, t: Transform, share: range) -> Split:
    """Decode images of a split, cut at the centre as scoring does, and keep them: uint8 in memory.

    Fine-tuning scores after every epoch, so on a small data set it would mostly be decoding
    otherwise. Images that need no decoding, and those of a split larger than MOST_KEPT, are
    returned as they are stored. `share` has the numbers of the images that this process scores:
    all of the split, or one process's part of them under torchrun.
    """
    own = split.part(share)
    images = Images(own, t)  # without a random crop
    split_bytes = len(split.targets) * 3 * t.size**2  # all processes share the machine's memory
    if images.taken_as_stored or split_bytes > MOST_KEPT:
        return own
    n = len(share)
    kept = torch.empty(n, 3, t.size, t.size, dtype=torch.uint8)
    load = partial(images.load, 0)  # as draw 0; without a random crop, every draw gives the same
    with ThreadPoolExecutor(count_workers()) as threads:  # decoders release Python's lock
        for i, image in enumerate(threads.map(load, range(n))):
            kept[i] = image
    return Split(kept, own.targets)
