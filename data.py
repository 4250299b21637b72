"""Labelled tasks D^D and unlabelled pools D^P: how images are split, cut, ordered and loaded.

    quilts     the embedded default, drawn from a seed: nothing to download
    folder     class folders, or train/ val/ test/ holding class folders
    Task.of    a task of one's own, from the parts of any torch Dataset
    load_pool  quilts, or any folder of images, nested or not

All randomness is a function of (seed, purpose, draw), never of what happened before. A draw is the
number of an image in the endless sequence of passes. So batches depend neither on the number of
worker processes nor on where a run was continued. What is no dataset raises ValueError, an image
that cannot be read ImageError. Leaves out: the paper's benchmarks, which are in `benchmarks.py`.
"""

import atexit
import hashlib
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T
from torchvision.datasets.folder import IMG_EXTENSIONS

Channels = tuple[float, ...]  # a number for each of red, green and blue
IMAGENET: tuple[Channels, Channels] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean, std


class ImageError(OSError):
    """An image cannot be read; the message names the file and the remedy."""


# --- seeds ------------------------------------------------------------------------------------


def seed_of(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, the same on every platform: sha256, not Python's hash.

    >>> seed_of(0, "mask", 1)
    3316353545204127158
    """
    words = "/".join(str(word) for word in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1


def rng(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose, e.g. rng(0, "mask", step)."""
    return torch.Generator().manual_seed(seed_of(seed, *purpose))


# --- tasks and pools --------------------------------------------------------------------------


class Split(NamedTuple):
    """Images, as files or as a tensor (N, 3, H, W) in [0, 1], and their labels.

    Labels are int64: (N,), or (N, C) for several classes an image: 1 has it, -1 has not, 0 does
    not count (VOC07).
    """

    images: Tensor | list[Path]
    targets: Tensor


class Labelled(Protocol):
    """A part of a torch Dataset, or a list: (image (3, H, W) in [0, 1], label) by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Task(NamedTuple):
    """A labelled dataset D^D. `mean` and `std` normalise its channels."""

    name: str
    train: Split
    val: Split
    test: Split
    classes: list[str]
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]
    missing: int = 0  # images that are listed, but absent from an incomplete copy

    @classmethod
    def of(cls, train: Labelled, val: Labelled, test: Labelled, classes: Sequence[str]) -> Self:
        """A task of one's own, kept in memory; it is named after its content."""
        splits = []
        for part in (train, val, test):
            images, labels = zip(*(part[i] for i in range(len(part))), strict=True)
            splits.append(Split(torch.stack(images).float(), torch.as_tensor(labels).long()))
        for x, y in splits:
            if x[0].shape[0] != 3 or x.min() < 0 or x.max() > 1:
                raise ValueError("images should be (3, H, W) with values in [0, 1], not normalised")
            if y.min() < 0 or y.max() >= len(classes):
                raise ValueError(f"labels should be from 0 to {len(classes) - 1}, a name for each")
        task = cls("own", *splits, list(classes))
        return task._replace(name=f"own:{task.fingerprint()[:12]}")

    @property
    def metric(self) -> str:
        """What its accuracies are (App. C.2.1)."""
        return "top-1 accuracy" if self.test.targets.ndim == 1 else "11-point mAP"

    def fingerprint(self) -> str:
        """sha256 over file names (of images in memory: the pixels) and labels."""
        digest = hashlib.sha256()
        for split in (self.train, self.val, self.test):
            digest.update(listed(split.images))
            digest.update(split.targets.numpy().tobytes())
        return digest.hexdigest()


class Pool(NamedTuple):
    """Unlabelled images D^P, as files or as a tensor (N, 3, H, W) in [0, 1]."""

    images: Tensor | list[Path]
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]

    def fingerprint(self) -> str:
        """sha256 over file names (of images in memory: the pixels)."""
        return hashlib.sha256(listed(self.images)).hexdigest()


def listed(images: Tensor | list[Path]) -> bytes:
    """Names of image files below the folder that they share, in order; pixels where in memory."""
    if isinstance(images, Tensor):
        return images.numpy().tobytes()
    root = os.path.commonpath([*images, images[0].parent])
    return "\n".join(os.path.relpath(path, root) for path in images).encode()


class Transform(NamedTuple):
    """How an image becomes a network input of side `size`."""

    size: int
    mean: Channels
    std: Channels
    augment: Literal["crop", "none"] = "none"
    min_crop: float = 0.2
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    flip: bool = True

    def pipeline(self, train: bool) -> Callable[[Image.Image], Tensor]:
        """Training: a random crop of min_crop to 1 of the area, and a flip (App. C.2).

        Otherwise, and without augmentation: the centre of the image at 256/224 of the size (as
        released).
        """
        resampling = T.InterpolationMode(self.interpolation)
        if train and self.augment == "crop":
            steps = [T.RandomResizedCrop(self.size, (self.min_crop, 1), interpolation=resampling)]
            steps += [T.RandomHorizontalFlip()] if self.flip else []
        else:
            enlarged = round(self.size * 256 / 224)
            steps = [T.Resize(enlarged, interpolation=resampling), T.CenterCrop(self.size)]
        pipeline = T.Compose([*steps, T.ToTensor(), T.Normalize(self.mean, self.std)])
        return pipeline  # type: ignore[no-any-return]


# --- the embedded default ---------------------------------------------------------------------

MOTIFS = ("1111000011110000", "1010101010101010", "0110111111110110", "1001011001101001")
"""4 x 4 pixels each, row by row."""
POOL_SIZE, CLASSES, JUNK = 4000, 8, 0.1
PER_CLASS = {"train": 10, "val": 20, "test": 60}


@lru_cache(maxsize=2)
def quilts(seed: int) -> tuple[Pool, Task]:
    """Pixel quilts: a pool of 4000 images (3, 16, 16), and 8 classes with 80 / 160 / 480 images.

    A quilt is 4 x 4 tiles and shows two motifs. Its class is the layout, which tiles are equal,
    never which motif they show; so single pixels say little about the class (all classes have the
    same mean image), and a network must compare tiles, which is what filling in masked tiles
    teaches. Labelled images, unlike the pool, have a tenth of their tiles replaced. A tile is
    exactly a patch of vit_mini, which favours a ViT.
    """
    g = rng(seed, "quilts")
    layouts: list[Tensor] = []
    while len(layouts) < CLASSES:  # two layouts differ in 5 to 11 of 16 tiles
        layout = torch.randint(2, (16,), generator=g)
        distances = [int((layout != other).sum()) for other in layouts]
        if 7 <= int(layout.sum()) <= 9 and all(5 <= d <= 11 for d in distances):
            layouts.append(layout)
    motifs = torch.tensor([[int(bit) for bit in motif] for motif in MOTIFS])
    pixels = motifs * 0.7 + 0.15  # (4, 16), each 0.15 or 0.85

    def draw(labels: Tensor, junk: float) -> Tensor:
        n = len(labels)
        first = torch.randint(4, (n,), generator=g)
        second = (first + torch.randint(1, 4, (n,), generator=g)) % 4  # another motif
        layout = torch.stack(layouts)[labels]  # (n, 16 tiles)
        shown = torch.where(layout == 1, second[:, None], first[:, None])
        spoilt = torch.rand(n, 16, generator=g) < junk
        shown = torch.where(spoilt, torch.randint(4, (n, 16), generator=g), shown)
        tiles = pixels[shown].view(n, 4, 4, 4, 4)  # tile row, tile column, pixel row, pixel column
        grey = tiles.transpose(2, 3).reshape(n, 1, 16, 16)
        return (grey + 0.08 * torch.randn(n, 3, 16, 16, generator=g)).clamp(0, 1)

    pool = draw(torch.randint(CLASSES, (POOL_SIZE,), generator=g), 0.0)
    parts = {}
    for part, count in PER_CLASS.items():
        labels = torch.arange(CLASSES).repeat(count)
        parts[part] = Split(draw(labels, JUNK), labels)
    mean, std = (tuple(x.tolist()) for x in (pool.mean((0, 2, 3)), pool.std((0, 2, 3))))
    classes = [f"layout {k}" for k in range(CLASSES)]
    return Pool(pool, mean, std), Task("quilts", **parts, classes=classes, mean=mean, std=std)


# --- folders ----------------------------------------------------------------------------------


def load_pool(name: str, seed: int) -> Pool:
    """Quilts drawn from a seed, or all images below a folder."""
    if name == "quilts":
        return quilts(seed)[0]
    path = Path(name.removeprefix("folder:")).expanduser()
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder")
    files = find_images(path)
    if not files:
        raise ValueError(f"{path}: no images in it ({', '.join(IMG_EXTENSIONS)})")
    return Pool(files)


def find_images(root: Path) -> list[Path]:
    """All image files below a folder, links followed, sorted by path, hidden ones left out."""

    def refuse(error: OSError) -> None:  # os.walk would leave out what it may not read
        raise error

    files = []
    for at, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "."]
        images = [n for n in names if n.lower().endswith(IMG_EXTENSIONS) and n[0] != "."]
        files += [os.path.join(at, name) for name in images]  # noqa: PTH118
    if odd := [file for file in files if file.encode(errors="ignore") != os.fsencode(file)]:
        raise ValueError(f"{odd[0]}: this name is not UTF-8; rename the file or folder")
    return [Path(file) for file in sorted(files)]


def folder(root: Path, seed: int) -> Task:
    """Class folders, or train/ val/ test/ holding class folders.

    A missing test or validation part is a fifth of each class of the training part.
    """
    if not root.is_dir():
        raise ValueError(f"{root}: there is no such folder")
    parts = [part for part in ("train", "val", "test") if (root / part).is_dir()]
    if parts and "train" not in parts:
        raise ValueError(f"{root}: has {' and '.join(parts)} but no train")
    found = {part: class_files(root / part) for part in parts} or {"train": class_files(root)}
    classes = sorted(found["train"])
    for part, by_class in found.items():
        if extra := sorted(by_class.keys() - {*classes}):
            raise ValueError(f"{root}: class {extra[0]!r} of {part} is not in train")
    for part in ("test", "val"):
        if part not in found:
            found["train"], found[part] = split_off(found["train"], root, seed, part)
    splits = {}
    for part, by_class in found.items():
        files = [(file, k) for k, name in enumerate(classes) for file in by_class.get(name, [])]
        splits[part] = Split([file for file, _ in files], torch.tensor([k for _, k in files]))
    return Task(f"folder:{root}", **splits, classes=classes)


def class_files(root: Path) -> dict[str, list[Path]]:
    """Image files by class folder."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    if len(folders) < 2:
        raise ValueError(f"{root}: needs at least two class folders, has {len(folders)}")
    found = {path.name: find_images(path) for path in folders}
    if empty := [name for name, files in found.items() if not files]:
        raise ValueError(f"{root}: class {empty[0]!r} has no images ({', '.join(IMG_EXTENSIONS)})")
    return found


def split_off(
    by_class: dict[str, list[Path]], root: Path, seed: int, part: str
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """(rest, part), by class: the `holdout` of each class, by names below root."""
    rest, taken = {}, {}
    for name, files in by_class.items():
        if len(files) < 2:
            raise ValueError(
                f"{root}: class {name!r} is too small to split off {part}, give {part}/"
            )
        chosen = holdout([file.relative_to(root).as_posix() for file in files], seed, part)
        taken[name] = sorted(root / file for file in chosen)
        rest[name] = sorted({*files} - {*taken[name]})
    return rest, taken


def holdout(names: list[str], seed: int, part: str) -> list[str]:
    """A fifth of a class, one image at least: the names with the smallest sha256 of seed/part/name.

    So the choice depends neither on the platform nor on the order or the other classes. Rounding
    down gives the sizes of the paper's splits of CUB-200 (4800 / 1194). A single image stays.

    >>> holdout([f"{i}.jpg" for i in range(11)], 0, "val")
    ['0.jpg', '10.jpg']
    """
    count = max(1, len(names) // 5) if len(names) > 1 else 0
    return sorted(names, key=lambda x: hashlib.sha256(f"{seed}/{part}/{x}".encode()).digest())[
        :count
    ]


# --- order ------------------------------------------------------------------------------------

Draw = tuple[int, int]  # (number of the draw, index of the image)


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, purpose: str, number: int) -> Tensor:
    """The order of n images in pass `number`."""
    return torch.randperm(n, generator=rng(seed, purpose, "order", number))


def stream(
    n: int, batch: int, seed: int, purpose: str, start: int, stop: int
) -> Iterator[list[Draw]]:
    """Full batches of steps start .. stop − 1; passes follow one another without a seam."""
    for step in range(start, stop):
        draws = range(step * batch, (step + 1) * batch)
        yield [(d, int(permutation(n, seed, purpose, d // n)[d % n])) for d in draws]


def epochs(
    n: int, batch: int, seed: int, purpose: str, count: int, start: int = 0
) -> Iterator[list[Draw]]:
    """`count` passes of ceil(n / batch) batches from step `start`; a pass may end with a small one."""
    steps = math.ceil(n / batch)
    for number, step in (divmod(step, steps) for step in range(start, count * steps)):
        places = range(n)[step * batch : (step + 1) * batch]
        yield [(number * n + i, int(permutation(n, seed, purpose, number)[i])) for i in places]


def in_order(indices: range, batch: int) -> list[list[Draw]]:
    """One pass for evaluation.

    >>> in_order(range(3), 2)
    [[(0, 0), (1, 1)], [(2, 2)]]
    """
    return [[(i, i) for i in indices[k : k + batch]] for k in range(0, len(indices), batch)]


# --- images and batches -----------------------------------------------------------------------


def read_image(path: Path) -> Image.Image:
    """An image file as RGB, decoded to its end; as torchvision does, EXIF and alpha are ignored."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would clip them
                raise ValueError("more than 8 bits a channel, save it with 8")
            return image.convert("RGB")
    except Exception as error:  # Pillow raises anything from OSError to TypeError on damaged bytes
        why = str(error).replace(f" '{path}'", "") or type(error).__name__
        raise ImageError(
            f"{path}: cannot be read as an image ({why}); replace it, or remove it before a run begins"
        ) from error


def unreadable(files: Sequence[Path]) -> Iterator[ImageError | None]:
    """For each image file in turn why it cannot be read, None if it can."""

    def fault(file: Path) -> ImageError | None:
        try:
            read_image(file)
        except ImageError as error:
            return error
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # decoding lets others run
        for k in range(0, len(files), 1024):
            yield from pool.map(fault, files[k : k + 1024])


def decode_all(images: Tensor | list[Path]) -> None:
    """Read all image files fully once, so that a damaged one is met before the long work."""
    for error in unreadable(images) if isinstance(images, list) else ():
        if error:
            raise error


class Images(Dataset[Any]):
    """Decodes and augments. Each draw has a seed of its own: its crop is the same in any process."""

    def __init__(
        self, split: Split, transform: Transform, train: bool, seed: int, purpose: str
    ) -> None:
        self.split, self.seed, self.purpose = split, seed, purpose
        self.pipeline = transform.pipeline(train)
        self.ready: Tensor | None = None  # images in memory that fit, normalised once
        x, crop, size = split.images, train and transform.augment == "crop", transform.size
        if isinstance(x, Tensor) and x.shape[-2:] == (size, size) and not crop:
            mean, std = (torch.tensor(v).view(3, 1, 1) for v in (transform.mean, transform.std))
            self.ready = (x - mean) / std

    def __getitems__(self, draws: Sequence[Draw]) -> tuple[Tensor, Tensor] | ImageError:
        """A batch. An error is a value: raised, it would leave a worker process as a traceback."""
        index = [i for _, i in draws]
        try:
            x = (
                self.ready[index]
                if self.ready is not None
                else torch.stack([*map(self.image, draws)])
            )
        except ImageError as error:
            return error
        return x, self.split.targets[index]

    def image(self, draw: Draw) -> Tensor:
        """One image, decoded and augmented."""
        number, index = draw
        images = self.split.images
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
            torch.manual_seed(seed_of(self.seed, self.purpose, "augment", number))
            if isinstance(images, Tensor):
                return self.pipeline(T.functional.to_pil_image(images[index]))
            return self.pipeline(read_image(images[index]))


def pick_workers(asked: int | None, images: Tensor | list[Path], device: torch.device) -> int:
    """Processes that decode images: as asked, else one a core, at most 16, if a GPU waits for them.

    On a CPU the network needs the cores, and images in memory need no decoding.
    """
    if asked is None and (device.type == "cpu" or isinstance(images, Tensor)):
        return 0
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(16, cores) if asked is None else asked


def batches(
    images: Images,
    draws: Iterable[list[Draw]],
    workers: int | None,
    device: torch.device,
    ahead: int = 4,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, targets) on the device for each list of draws; worker processes work ahead."""
    workers = pick_workers(workers, images.split.images, device)
    if workers:
        end_workers_at_exit()
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_sampler=draws,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=identity,
        pin_memory=device.type == "cuda",
        prefetch_factor=ahead if workers else None,
        worker_init_fn=ignore_signals if workers else None,
    )
    try:
        for item in loader:
            if isinstance(item, ImageError):
                raise item
            yield item[0].to(device, non_blocking=True), item[1].to(device, non_blocking=True)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise ChildProcessError(
            "a process that reads images died, perhaps for want of (shared) memory; "
            "use fewer workers or smaller batches"
        ) from error


def identity(batch: Any) -> Any:
    """Batches arrive whole; a named function, since worker processes must be able to import it."""
    return batch


def ignore_signals(worker: int) -> None:
    """Worker processes leave signals to their parent: a terminal sends Ctrl-C to all of them."""
    torch.set_num_threads(1)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


@lru_cache(maxsize=1)
def end_workers_at_exit() -> None:
    """When this process ends, kill what is left of its workers, which ignore the usual signal."""

    def end() -> None:
        for process in multiprocessing.active_children():
            if process.daemon:
                process.kill()

    atexit.register(end)
