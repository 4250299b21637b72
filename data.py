"""Paper: labelled tasks D^D and unlabelled pools D^P, split, cut, ordered and loaded.

Random numbers depend on (seed, purpose, draw) alone. Images are drawn in epoch after epoch; a draw
is the running number of an image in that sequence. So batches depend neither on worker processes
nor on where a run was continued. A wrong folder raises ValueError, an unreadable image ImageError.
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

SPLITS = ("train", "val", "test")  # what the splits of a task are called
Channels = tuple[float, ...]  # one number each for red, green and blue
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean, std
Label = int | list[int]  # a class, or for each class 1 yes, -1 no, 0 not counted
Entries = list[tuple[str, Label]]  # (image file below the dataset's folder, label)
Draw = tuple[int, int]  # (number of the draw, index of the image)
Stored = Tensor | list[Path]  # images (images, 3, height, width) in [0, 1], or their files


class ImageError(OSError):
    """An image cannot be read; the message names the file and the remedy."""


def seed_for(seed: int, *purpose: str | int) -> int:
    """A seed of 63 bits for one purpose, the same on every platform: sha256, not Python's hash."""
    words = "/".join(str(word) for word in (seed, *purpose))
    digest = hashlib.sha256(words.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def rng(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose, such as "lora", "mask" or "order", and its step or epoch.

    >>> rng(0, "mask", 1).initial_seed()
    9043777112963148149
    """
    return torch.Generator().manual_seed(seed_for(seed, *purpose))


@dataclass(frozen=True, eq=False)  # equal to itself alone, which `decode_once` remembers
class Split:
    """Images and their labels, int64."""

    images: Stored
    targets: Tensor  # (images,), or (images, classes) for several: 1 yes, -1 no, 0 not counted

    @classmethod
    def below(cls, root: Path, entries: Entries) -> Self:
        """The images of these entries, whose files are named relative to the folder `root`."""
        files = [root / file for file, _ in entries]
        labels = [label for _, label in entries]
        return cls(files, torch.tensor(labels))

    def part(self, numbers: range) -> Self:
        """Those of its images that have these numbers, one after another."""
        some = slice(numbers.start, numbers.stop)
        return type(self)(self.images[some], self.targets[some])


class Labelled(Protocol):
    """A list of (image (3, height, width), class), or a torch Dataset of such pairs."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


class Task(NamedTuple):
    """A labelled dataset D^D. `mean` and `std` normalise its channels."""

    name: str
    train: Split
    val: Split
    test: Split
    classes: list[str]
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]
    uncut: bool = False  # where no random crops are taken, see `Transform`

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        """Train, val and test."""
        return self.train, self.val, self.test

    @classmethod
    def of(cls, train: Labelled, val: Labelled, test: Labelled, classes: Sequence[str]) -> Self:
        """A task in memory, of pairs: image (3, height, width) in [0, 1], and class.

        Raises ValueError.
        """
        task = cls("own", stack_pairs(train), stack_pairs(val), stack_pairs(test), list(classes))
        check_task(task)
        return task

    def sizes(self) -> dict[str, int]:
        """How many images each split has."""
        counts = [len(split.targets) for split in self.splits]
        return dict(zip(SPLITS, counts, strict=True))


def stack_pairs(pairs: Labelled) -> Split:
    """A split in memory, of pairs of an image and its class."""
    images, targets = default_collate([pairs[i] for i in range(len(pairs))])
    if targets.is_floating_point():
        raise ValueError("classes are whole numbers, such as 3")
    if not images.is_floating_point():
        raise ValueError("pixels are numbers in [0, 1], not whole ones; divide by 255")
    # a label of shape (1,) is one class, too: only a matrix of targets means several an image
    return Split(images.float(), targets.long().reshape(len(pairs)))


def check_task(task: Task) -> None:
    """Refuse (ValueError) pixels outside [0, 1], labels without a class, parts without a hit."""
    for split in task.splits:
        check_pixels(split.images)
        y = split.targets
        if y.ndim > 1:  # several classes an image
            is_valid = (y == 1).any()
            need = "a positive image each, for mAP"
        else:
            is_valid = 0 <= y.min() <= y.max() < len(task.classes)
            need = f"labels below {len(task.classes)}"
        if not is_valid:
            raise ValueError(f"train, val and test need {need}")


def check_pixels(images: Stored) -> None:
    """Refuse (ValueError) images in memory that are not (images, 3, height, width) in [0, 1]."""
    if not isinstance(images, Tensor):
        return
    has_images = images.shape[1:2] == (3,) and len(images) > 0
    if not (has_images and 0 <= images.min() <= images.max() <= 1):  # nor is NaN
        raise ValueError("needs images (3, H, W) with pixels in [0, 1]; see clamp(0, 1)")


class Pool(NamedTuple):
    """Unlabelled images D^P."""

    images: Stored
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]


def fingerprint(*parts: Split | Pool) -> str:
    """sha256 of the data, by which a run notices that they are others.

    Of all labels; and of pixels, if they are in memory, otherwise of the files' names: reading the
    files would take minutes. Names count from the folder that holds them all, which may be moved.
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
    """What settings say instead of data that were handed in: `own:` and a digest.

    With it, a run directory refuses to go on with other images.
    """
    return f"own:{fingerprint(*parts)[:12]}"


def names_below(files: list[Path]) -> str:
    """The files' paths relative to the folder that holds them all, a line each."""
    root = os.path.commonpath({file.parent for file in files})
    start = len(os.path.join(root, ""))  # noqa: PTH118  # with the separator after it
    # cut as text: `relative_to` takes ten seconds for ImageNet's 1.28 million files
    return "\n".join([str(file)[start:] for file in files])


def find_images(root: Path, outer: tuple[Path, ...] = ()) -> list[Path]:
    """All image files below a folder, links followed, sorted by path, hidden ones left out.

    `outer` has the folders on the way here. ValueError: a link leads back to one of them.
    """
    here = root.resolve()
    for folder_on_the_way in outer:
        if here == folder_on_the_way or here in folder_on_the_way.parents:
            raise ValueError(f"{root}: is a link to a folder that it lies in; remove it")
    files = list[Path]()
    for path in root.iterdir():
        if path.name.startswith("."):
            continue
        if path.suffix.lower() in IMG_EXTENSIONS:
            check_name(path)
            files.append(path)
        elif path.is_dir():
            files += find_images(path, (*outer, here))
    return sorted(files, key=str)


def list_other_files(root: Path, images: list[Path]) -> list[Path]:
    """All files below a folder, hidden ones left out, that are not among these images of it."""
    files = {path for path in root.rglob("[!.]*") if path.is_file()}
    return sorted(files - {*images})


def check_name(path: Path) -> None:
    """Refuse a name that is not UTF-8: `fingerprint` and the order could not be the same."""
    if str(path).encode(errors="ignore") != os.fsencode(path):
        raise ValueError(f"{path}: this name is not UTF-8; rename the file or folder")


def subfolders(root: Path) -> list[Path]:
    """The folders in a folder, sorted, hidden ones left out."""
    return sorted(x for x in root.iterdir() if x.is_dir() and not x.name.startswith("."))


class FolderError(ValueError):
    """A folder of class folders cannot be used; `args` has all that is wrong with it."""

    def __str__(self) -> str:
        return "; ".join(self.args)


def folder(root: Path, seed: int) -> Task:
    """The task in a folder of class folders, or of train/, val/ and test/ with class folders each.

    A missing test or val is taken from train, see `holdout`. Raises FolderError.
    """
    names = {path.name for path in subfolders(root)}
    places = {part: root / part for part in SPLITS if part in names}
    if places and ("train" not in places or len(names) > len(places)):
        raise FolderError(f"holds {', '.join(sorted(names))}; parts are named train, val and test")
    if not places:
        places = {"train": root}
    classes = [path.name for path in subfolders(places["train"])]
    missing = [part for part in ("test", "val") if part not in places]
    entries = dict[str, Entries]()
    faults = list[str]()
    for part, place in places.items():
        files = {path.name: find_images(path) for path in subfolders(place)}
        needed = 1 + len(missing) if part == "train" else 1  # an image for each part made of it
        faults += find_faults(root, place, files, classes, needed)
        entries[part] = []
        for label, name in enumerate(classes):
            for file in files.get(name, []):
                entries[part].append((file.relative_to(root).as_posix(), label))
    if faults:
        raise FolderError(*faults)
    for part in missing:  # test first: val is a fifth of what is left
        entries["train"], entries[part] = holdout(entries["train"], seed, part)
    train, val, test = (Split.below(root, entries[part]) for part in SPLITS)
    return Task(f"folder:{root}", train, val, test, classes)


def find_faults(
    root: Path, place: Path, files: dict[str, list[Path]], classes: list[str], needed: int
) -> list[str]:
    """What is wrong with the class folders in `place`; each needs so many images."""
    faults = list[str]()
    if len(files) < 2:
        faults.append(
            f"needs two or more class folders, it has {len(files)}: "
            f"put the images into {place}/CLASS/"
        )
    for name, images in files.items():
        count = len(images)
        shown = (place / name).relative_to(root).as_posix()  # such as b, or test/b
        if name not in classes:
            faults.append(f"class {shown} is not in train")
        elif count < needed:
            noun = "image" if count == 1 else "images"
            faults.append(f"class {shown} has {count} {noun} and needs at least {needed}")
    return faults


def holdout(entries: Entries, seed: int, part: str) -> tuple[Entries, Entries]:
    """(rest, a fifth of each class): the files with the smallest sha256 of seed/part/file.

    Rounded down, but at least one; a single image stays. CUB-200: 4800 and 1194, as many as BiSSL.

    >>> holdout([("1.jpg", 0), ("2.jpg", 0), ("3.jpg", 1)], 0, "val")
    ([('1.jpg', 0), ('3.jpg', 1)], [('2.jpg', 0)])
    """
    by_class: dict[Label, list[str]] = {}
    for file, label in entries:
        by_class.setdefault(label, []).append(file)
    chosen = set[str]()
    for files in by_class.values():
        files.sort(key=partial(seed_for, seed, part))
        if len(files) > 1:
            chosen.update(files[: max(1, len(files) // 5)])
    rest = [entry for entry in entries if entry[0] not in chosen]
    return rest, [entry for entry in entries if entry[0] in chosen]


def draws_of_step(n: int, batch: int, step: int, by_epoch: bool = False) -> range:
    """The draws of one step from n images, by their numbers: `batch` of them.

    A draw is one image taken for training. Draws are numbered over the whole run, from 0, so draw i
    is in epoch i // n. With `by_epoch`, the last step of an epoch has only what is left of it;
    otherwise a step may hold the end of one epoch and the start of the next.
    """
    if not by_epoch:
        return range(step * batch, (step + 1) * batch)
    epoch, step_in_epoch = divmod(step, steps_per_epoch(n, batch))
    first = epoch * n + step_in_epoch * batch
    end = min(first + batch, (epoch + 1) * n)
    return range(first, end)


def steps_per_epoch(n: int, batch: int) -> int:
    """Steps that take all n images once; the last one may have fewer than `batch`."""
    return math.ceil(n / batch)


def stream(
    n: int, batch: int, seed: int, purpose: str, steps: range, by_epoch: bool = False
) -> Iterator[list[Draw]]:
    """The draws of each of these steps, each with the index of its image (`Draw`).

    Every epoch has all n images in a random order of its own; `by_epoch` as in `draws_of_step`.
    """

    @lru_cache(maxsize=1)
    def permutation(epoch: int) -> list[int]:
        """The random order of the n images in this epoch."""
        generator = rng(seed, purpose, "order", epoch)
        return list(torch.randperm(n, generator=generator).tolist())

    for step in steps:
        numbers = draws_of_step(n, batch, step, by_epoch)
        yield [(draw, permutation(draw // n)[draw % n]) for draw in numbers]


class Transform(NamedTuple):
    """How an image becomes a network input of side `size`."""

    size: int
    mean: Channels
    std: Channels
    augment: str = "none"  # or "crop"
    min_crop: float = 0.2
    interpolation: str = "bicubic"  # or "bilinear"
    flip: bool = True
    uncut: bool = False  # without a random crop, nothing of a square image is cut off


TOO_DEEP = "more than 8 bits a channel, save it with 8"
TOO_NARROW = "one side is more than 100 times the other"  # the shorter one is enlarged, and so it
Picture = Image.Image | Tensor  # RGB, of Pillow, or uint8 (3, height, width): torchvision has both


def read_image(path: Path) -> Picture:
    """An image file as RGB, decoded to its end; as torchvision does, EXIF and alpha are ignored.

    Plain JPEG files come as tensors: to cut these takes half of Pillow's time. A value differs by
    at most one grey level, with bicubic resizing rarely by a few. All others are Pillow's.
    """
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:  # looks at no more than the header
            if image.mode.startswith(("I", "F")):  # Pillow would clip them
                raise ValueError(TOO_DEEP)
            if max(image.size) > 100 * min(image.size):
                raise ValueError(TOO_NARROW)
            if image.format == "JPEG" and image.mode in ("RGB", "L"):  # and not CMYK
                return decode_jpeg(content, image)
            return image.convert("RGB")
    except Exception as error:  # Pillow raises anything from OSError to TypeError on damaged bytes
        reason = "damaged, or no image"
        if error.args in ((TOO_DEEP,), (TOO_NARROW,)):
            reason = str(error)
        if isinstance(error, OSError) and error.strerror:  # such as: no permission
            reason = error.strerror
        raise ImageError(f"{path}: cannot be read ({reason}); replace or remove it") from error


def decode_jpeg(content: bytes, image: Image.Image) -> Tensor:
    """Pixels (3, height, width) of a JPEG file, the same with either decoder: both call libjpeg."""
    # torchvision's takes half of the time. Its public name warns since 0.29 that it may leave.
    decode = getattr(torch.ops.image, "decode_jpeg", None)
    if decode is None:
        pixels: Tensor = F.pil_to_tensor(image.convert("RGB"))
    else:
        writable = bytearray(content)  # or torch would warn
        pixels = decode(torch.frombuffer(writable, dtype=torch.uint8), 3)  # as RGB
    return pixels


def find_fault(path: Path) -> ImageError | None:
    """Read an image file fully; what is wrong with it, if anything is."""
    try:
        read_image(path)
    except ImageError as error:
        return error
    return None


def decode_all(files: Iterable[Path]) -> list[ImageError]:
    """Read image files fully once, before the long work; returns an error for each damaged one."""
    with ThreadPoolExecutor(8) as threads:  # decoding lets others run; no image is kept
        return [fault for fault in threads.map(find_fault, files) if fault]


def cut_random(image: Picture, t: Transform) -> Picture:
    """A random crop of min_crop to 1 of the area, resized, and a flip (App. C.2)."""
    box = RandomResizedCrop.get_params(image, [t.min_crop, 1.0], [3 / 4, 4 / 3])
    mode = InterpolationMode(t.interpolation)
    cut: Picture = F.resized_crop(image, *box, [t.size, t.size], mode, antialias=True)
    if t.flip and torch.rand(1) < 0.5:
        cut = F.horizontal_flip(cut)
    return cut


def cut_centre(image: Picture, t: Transform) -> Picture:
    """The centre, after the shorter side is resized to 256/224 of the size (as released)."""
    shorter = t.size if t.uncut else round(t.size * 256 / 224)
    resized = F.resize(image, [shorter], InterpolationMode(t.interpolation), antialias=True)
    cut: Picture = F.center_crop(resized, [t.size, t.size])
    return cut


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Decodes and augments; a draw's crop is the same in any process.

    In training `cut_random`, otherwise `cut_centre`; images in memory that have the network's size
    and are not to be cropped are taken as they are. Pixels are uint8, or in [0, 1] where they lay
    so in memory: a quarter of the bytes to hand from process to process and to a GPU. `normalise`
    comes after that.
    """

    def __init__(
        self, split: Split, t: Transform, train: bool = False, seed: int = 0, purpose: str = ""
    ) -> None:
        self.split = split
        self.t = t
        self.seed = seed
        self.purpose = purpose
        self.random = train and t.augment == "crop"
        self.are_ready = False  # whether there is nothing to decode or to cut
        if isinstance(split.images, Tensor) and not self.random:
            self.are_ready = split.images.shape[2:] == (t.size, t.size)

    def __getitem__(self, item: Draw) -> tuple[Tensor, Tensor]:
        """Image (3, size, size) and target of a draw. Raises ImageError."""
        draw, index = item
        return self.image(draw, index), self.split.targets[index]

    def image(self, draw: int, index: int) -> Tensor:
        """Image number `index` as this draw cuts it."""
        stored = self.split.images[index]
        if self.are_ready:
            return torch.as_tensor(stored)
        image = F.to_pil_image(stored) if isinstance(stored, Tensor) else read_image(stored)
        if self.random:
            with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
                seed = seed_for(self.seed, self.purpose, "augment", draw)
                torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.1 ms
                image = cut_random(image, self.t)
        else:
            image = cut_centre(image, self.t)
        pixels: Tensor = F.pil_to_tensor(image) if isinstance(image, Image.Image) else image
        return pixels


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Network inputs from images (B, 3, height, width), uint8 or in [0, 1]; mean, std (3, 1, 1).

    The arithmetic is that of torchvision's ToTensor and Normalize, in the same order, so that the
    results are equal to the bit.
    """
    if images.dtype == torch.uint8:
        return images.float().div_(255).sub_(mean).div_(std)  # in place: a copy takes time
    return (images - mean) / std


def leave_terminal(worker: int) -> None:
    """Take a worker process out of the terminal's group, so that Ctrl-C is its parent's alone."""
    if hasattr(os, "setsid"):  # Windows has none
        os.setsid()


def count_workers() -> int:
    """One a core that this process may use, at most 16; all processes of a machine share them."""
    if hasattr(os, "sched_getaffinity"):  # Slurm, taskset and containers allow some cores only
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun says so, and `--jobs`
    return max(1, min(16, cores // processes))


def choose_workers(images: Images, workers: int | None, device: torch.device) -> int:
    """How many processes decode `images`: so many as are asked for, but none where none is needed.

    None: `count_workers` beside a GPU; none beside a CPU, which is busy with the network, or for
    images in memory.
    """
    if images.are_ready:
        return 0
    if workers is not None:
        return workers
    in_memory = isinstance(images.split.images, Tensor)
    return 0 if in_memory or device.type == "cpu" else count_workers()


def batches(
    images: Images, draws: Iterable[list[Draw]], workers: int | None, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Network inputs (B, 3, size, size) and targets of each list of draws. Raises ImageError.

    `workers` as in `choose_workers`: processes that decode the next batches meanwhile.
    """
    loader = DataLoader(
        images,
        batch_sampler=draws,  # each list of draws is one batch
        num_workers=choose_workers(images, workers, device),
        pin_memory=device.type == "cuda",  # then a copy to the GPU lets the CPU go on
        worker_init_fn=leave_terminal,
        generator=torch.Generator(),  # or it would take a seed from torch's global generator
    )
    mean, std = torch.tensor([images.t.mean, images.t.std], device=device).view(2, 3, 1, 1)
    try:
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            yield normalise(x, mean, std), y.to(device, non_blocking=True)
    except ImageError as error:
        # DataLoader puts a worker's traceback before its message: only what follows is for a person
        raise ImageError(str(error).rpartition("ImageError: ")[2].strip()) from None


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; from pinned memory, so that the CPU goes on without waiting for a GPU.

    For small tensors, such as masks that were drawn on the CPU: pinning makes a copy, too.
    """
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


# All splits of the paper's benchmarks fit at 224 px (the largest, flowers' test images, takes
# 0.93 GB); ImageNet's 50,000 validation images would take 7.5 GB of memory.
MOST_KEPT = 2**30  # bytes, of all processes that share a split


@lru_cache(maxsize=2)  # the validation and the test images of a run
def decode_once(split: Split, t: Transform, numbers: range) -> Split:
    """The images with these numbers as they are scored, uint8 in memory, remembered for next time.

    Images that need no decoding, and those of a split larger than MOST_KEPT, are given as they are.
    Fine-tuning scores after every epoch, so on a small set it would mostly be decoding otherwise.
    """
    part = split.part(numbers)
    images = Images(part, t)
    if images.are_ready or len(split.targets) * 3 * t.size**2 > MOST_KEPT:
        return part
    n = len(numbers)
    kept = torch.empty(n, 3, t.size, t.size, dtype=torch.uint8)
    with ThreadPoolExecutor(count_workers()) as threads:  # decoding and cutting let others run
        for i, image in enumerate(threads.map(images.image, range(n), range(n))):
            kept[i] = image
    return Split(kept, part.targets)
