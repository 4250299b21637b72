"""What a labelled task D^D and an unlabelled pool D^P are, how images are cut, and in which order they come.

    quilts        the embedded default, drawn by `quilts` from a seed: nothing to download
    folder:PATH   class folders, or train/ val/ test/ holding class folders; a missing part is split off
    a pool        quilts, or any folder of images, nested or not

Order and augmentation are functions of (seed, purpose, draw), so batches depend neither on the number of worker
processes nor on where a run was resumed. A draw is the number of an image in the endless sequence of passes.
Leaves out: the paper's benchmarks, which are in `tasks`; several processes.
"""

import atexit
import hashlib
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T
from torchvision.datasets.folder import IMG_EXTENSIONS

from config import NOT_UTF8, RunError, UsageError, is_utf8
from parallel import micro
from runtime import rng, seed_of
from stopping import only_the_parent_decides

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Channels = tuple[float, ...]
Augment = Literal["crop", "none"]


class Split(NamedTuple):
    """Images as files or, for the embedded dataset, as (N, 3, H, W) in [0, 1], and their labels.

    Labels are int64: (N,), or (N, C) for several classes an image: 1 has it, -1 has not, 0 does not count (VOC07).
    """

    images: Tensor | list[Path]
    targets: Tensor


SCORED = 256  # images that are looked at together in validation and test, unless --micro-batch says less


class Task(NamedTuple):
    """A labelled dataset. `mean` and `std` normalise its channels; `missing` counts listed images that are absent."""

    name: str
    train: Split
    val: Split
    test: Split
    classes: list[str]
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]
    missing: int = 0

    @property
    def metric(self) -> str:
        """What its accuracies are (App. C.2.1)."""
        return "top-1 accuracy" if self.test.targets.ndim == 1 else "11-point mAP"

    def fingerprint(self) -> str:
        """sha256 over file names (where embedded: the images) and labels: a run resumes on this data only."""
        digest = hashlib.sha256()
        for split in (self.train, self.val, self.test):
            digest.update(listed(split.images))
            digest.update(split.targets.numpy().tobytes())
        return digest.hexdigest()


def listed(images: Tensor | Sequence[Path]) -> bytes:
    """The names of image files below the folder that they share, in their order; embedded images are named by all."""
    if isinstance(images, Tensor):
        return images.numpy().tobytes()
    root = os.path.commonpath([*images, images[0].parent])
    return "\n".join(os.path.relpath(path, root) for path in images).encode()


class View(NamedTuple):
    """How an image becomes a network input of side `size`."""

    size: int
    mean: Channels
    std: Channels
    augment: Augment = "none"
    min_crop: float = 0.2
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    flip: bool = True

    def transform(self, train: bool) -> Callable[[Image.Image], Tensor]:
        """Random crop (min_crop to 1 of the area) and flip (App. C.2); for tests 256/224 and centre crop (released)."""
        how = T.InterpolationMode(self.interpolation)
        if train and self.augment == "crop":
            cut = [T.RandomResizedCrop(self.size, (self.min_crop, 1), interpolation=how)]
            cut += [T.RandomHorizontalFlip()] if self.flip else []
        else:
            cut = [T.Resize(round(self.size * 256 / 224), interpolation=how), T.CenterCrop(self.size)]
        return T.Compose([*cut, T.ToTensor(), T.Normalize(self.mean, self.std)])  # type: ignore[no-any-return]


# --- the embedded default --------------------------------------------------------------------------------------------

MOTIFS = ("1111000011110000", "1010101010101010", "0110111111110110", "1001011001101001")  # 4 x 4 pixels, row by row
POOL_SIZE, PER_CLASS, CLASSES, JUNK = 4000, {"train": 10, "val": 20, "test": 60}, 8, 0.1


@lru_cache(maxsize=2)
def quilts(seed: int) -> tuple[Tensor, Task]:
    """Pixel quilts: (unlabelled pool (4000, 3, 16, 16), a task of 8 classes with 80 / 160 / 480 images).

    A quilt is 4 x 4 tiles and shows two motifs. Its class is the layout, which tiles are equal, never which motif they
    show; so single pixels say little about the class (all classes have the same mean image), and a network must compare
    tiles, which is what filling in masked tiles teaches. Labelled images, unlike the pool, have a tenth of their tiles
    replaced. A tile is exactly a patch of vit_mini, which favours a ViT.
    """
    g = rng(seed, "quilts")
    layouts: list[Tensor] = []
    while len(layouts) < CLASSES:  # two layouts, or one and another's complement, differ in 5 tiles at least
        layout = torch.randint(2, (16,), generator=g)
        if 7 <= int(layout.sum()) <= 9 and all(5 <= int((layout != other).sum()) <= 11 for other in layouts):
            layouts.append(layout)
    pixels = torch.tensor([[int(bit) for bit in motif] for motif in MOTIFS]) * 0.7 + 0.15  # (4, 16): 0.15 or 0.85

    def draw(labels: Tensor, junk: float) -> Tensor:
        n = len(labels)
        first = torch.randint(4, (n,), generator=g)
        second = (first + torch.randint(1, 4, (n,), generator=g)) % 4  # another motif
        shown = torch.where(torch.stack(layouts)[labels] == 1, second[:, None], first[:, None])  # (n, 16 tiles)
        spoilt = torch.rand(n, 16, generator=g) < junk
        shown = torch.where(spoilt, torch.randint(4, (n, 16), generator=g), shown)
        grey = pixels[shown].view(n, 4, 4, 4, 4).transpose(2, 3).reshape(n, 1, 16, 16)  # tile row, pixel row, ...
        return (grey + 0.08 * torch.randn(n, 3, 16, 16, generator=g)).clamp(0, 1)

    pool = draw(torch.randint(CLASSES, (POOL_SIZE,), generator=g), 0.0)
    parts = {}
    for part, count in PER_CLASS.items():
        labels = torch.arange(CLASSES).repeat(count)
        parts[part] = Split(draw(labels, JUNK), labels)
    mean, std = (tuple(x.tolist()) for x in (pool.mean((0, 2, 3)), pool.std((0, 2, 3))))
    classes = [f"layout {k}" for k in range(CLASSES)]
    return pool, Task("quilts", parts["train"], parts["val"], parts["test"], classes, mean, std)


# --- folders ---------------------------------------------------------------------------------------------------------


def load_pool(name: str, seed: int) -> tuple[Tensor | list[Path], Channels, Channels]:
    """Unlabelled images with their channel means and deviations."""
    if name == "quilts":
        pool, task = quilts(seed)
        return pool, task.mean, task.std
    path = Path(name.removeprefix("folder:")).expanduser()
    if not name.removeprefix("folder:") or not path.is_dir():
        raise UsageError(f"--pool {name}: there is no such folder; give a folder of images or quilts")
    files = find_images(path)
    if not files:
        raise UsageError(f"--pool {path}: no images in it ({', '.join(IMG_EXTENSIONS)})")
    return files, *IMAGENET


def find_images(root: Path) -> list[Path]:
    """All image files below a folder, sorted by their relative path, hidden ones left out."""
    files = []
    for at, folders, names in walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [os.path.join(at, n) for n in names if n.lower().endswith(IMG_EXTENSIONS) and n[0] != "."]  # noqa: PTH118
    return [Path(file) for file in sorted(files)]


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk through links, but for one that leads back to a folder on the way there: that has no end."""

    def unreadable(error: OSError) -> None:
        raise RunError(f"{error.filename}: {error.strerror}; allow this user to read it, or move it elsewhere")

    for at, folders, names in os.walk(root, onerror=unreadable, followlinks=True):
        images = [name for name in names if name.lower().endswith(IMG_EXTENSIONS)]
        for name in (at, *(os.path.join(at, image) for image in images)):  # noqa: PTH118
            if not is_utf8(name):
                raise RunError(f"{name}: {NOT_UTF8}")
        links = {name for name in folders if os.path.islink(os.path.join(at, name))}  # noqa: PTH114, PTH118
        if links:
            above = {os.path.realpath(path) for path in (Path(at), *Path(at).absolute().parents)}
            folders[:] = [n for n in folders if n not in links or os.path.realpath(os.path.join(at, n)) not in above]  # noqa: PTH118
        yield at, folders, names


def folder(root: Path, seed: int) -> Task:
    """Class folders, or train/ val/ test/ holding class folders. A missing part is a fifth of each class of train."""
    if not root.is_dir():
        raise UsageError(f"--dataset folder:{root}: there is no such folder")
    parts = [part for part in ("train", "val", "test") if (root / part).is_dir()]
    if parts and "train" not in parts:
        raise UsageError(f"--dataset folder:{root}: has {' and '.join(parts)} but no train")
    found = {part: class_files(root / part) for part in parts} or {"train": class_files(root)}
    classes = sorted(found["train"])
    for part, by_class in found.items():
        if not by_class:
            raise UsageError(f"--dataset folder:{root}: {part if parts else 'it'} holds no class folders")
        if extra := sorted(by_class.keys() - set(classes)):
            raise UsageError(f"--dataset folder:{root}: class {extra[0]!r} of {part} is not in train")
    if len(classes) < 2:
        raise UsageError(f"--dataset folder:{root}: needs at least two class folders, has {len(classes)}")
    for part in ("test", "val"):
        if part not in found:
            found["train"], found[part] = split_off(found["train"], root, seed, part)
    splits = {}
    for part, by_class in found.items():
        files = [(file, k) for k, name in enumerate(classes) for file in by_class.get(name, [])]
        splits[part] = Split([file for file, _ in files], torch.tensor([k for _, k in files]))
    return Task(f"folder:{root}", splits["train"], splits["val"], splits["test"], classes)


def class_files(root: Path) -> dict[str, list[Path]]:
    """Image files by class folder (UsageError for an empty class)."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = {path.name: find_images(path) for path in folders}
    for name, files in found.items():
        if not files:
            raise UsageError(f"--dataset folder:{root}: class {name!r} has no images ({', '.join(IMG_EXTENSIONS)})")
    return found


def split_off(
    by_class: dict[str, list[Path]], root: Path, seed: int, part: str
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """(rest, part): a `fifth` of each class, by paths below root.

    Hashing names makes the split independent of platform, of listing order and of what other classes hold.
    """
    rest, taken = {}, {}
    for name, files in by_class.items():
        if len(files) < 2:
            raise UsageError(f"--dataset folder:{root}: class {name!r} is too small to split off {part}, give {part}/")
        names = {f.relative_to(root).as_posix(): f for f in files}
        chosen = {names[name] for name in fifth([*names], seed, part)}
        rest[name], taken[name] = [f for f in files if f not in chosen], [f for f in files if f in chosen]
    return rest, taken


def fifth(names: list[str], seed: int, part: str) -> list[str]:
    """A fifth of a class, rounded down but one at least (none of a single one): the smallest sha256 of seed/part/name.

    Rounded down, this gives the sizes of the paper's splits of CUB-200 (4800 / 1194).
    """
    count = max(1, len(names) // 5) if len(names) > 1 else 0
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}/{part}/{name}".encode()).digest())[:count]


# --- batches ---------------------------------------------------------------------------------------------------------

Draw = tuple[int, int]  # (number of the draw, index of the image)


def order(n: int, seed: int, purpose: str) -> Callable[[int], Tensor]:
    """Pass number -> permutation of n images; the last one is remembered."""
    return lru_cache(maxsize=1)(lambda pass_: torch.randperm(n, generator=rng(seed, purpose, "order", pass_)))


def stream(n: int, batch: int, seed: int, purpose: str, start: int, stop: int) -> Iterator[list[Draw]]:
    """Full batches of steps start .. stop − 1: passes follow one another without a seam, as often as needed."""
    permutation = order(n, seed, purpose)
    for step in range(start, stop):
        draws = range(step * batch, (step + 1) * batch)
        yield [(draw, int(permutation(draw // n)[draw % n])) for draw in draws]


def epochs(n: int, batch: int, seed: int, purpose: str, count: int, start: int = 0) -> Iterator[list[Draw]]:
    """`count` passes of ceil(n / batch) batches each, the last one maybe smaller (as released), from step `start`."""
    permutation = order(n, seed, purpose)
    per_pass = -(-n // batch)
    for pass_ in range(start // per_pass, count):
        draws = [(pass_ * n + i, int(index)) for i, index in enumerate(permutation(pass_))]
        begin = (start - pass_ * per_pass) * batch if pass_ == start // per_pass else 0
        yield from (draws[i : i + batch] for i in range(begin, n, batch))


def in_order(share: range, batch: int) -> list[list[Draw]]:
    """One pass over the images `share` for evaluation, in one batch at least."""
    return [[(i, i) for i in piece] for piece in micro(share, batch)] or [[]]


logging.getLogger("PIL").addHandler(logging.NullHandler())  # what it has to say of a file is in the error's line
THIN = 100  # a picture's longest side over its shortest; resized to a short side of 256 it has 6.6 million pixels


def read_image(path: Path) -> Image.Image:
    """An image file as RGB, 8 bits a channel (RunError naming the file where it cannot be that).

    Of an animation the first frame; transparency is dropped and EXIF's orientation ignored, as torchvision's
    ImageFolder does; grey of 16 bits is scaled (Pillow's own conversion would clip it). Wider numbers have no known
    range and are refused, as are more pixels than Pillow takes for sane (`Image.MAX_IMAGE_PIXELS`), undecoded.
    """
    if not path.is_file():  # a folder, or a pipe, which would keep us waiting
        gone = "is not a file" if path.exists() else "is not there any more"
        raise RunError(f"{path}: {gone}; put the image back, or remove it from the dataset and start a new run")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of sizes that are refused below
            with Image.open(path) as image:
                short, long = sorted(image.size)
                if short * long > (Image.MAX_IMAGE_PIXELS or short * long) or long > THIN * short:
                    raise ValueError(f"{image.width} x {image.height} pixels are too many, or too thin a strip")
                return rgb(image)
    except Exception as error:  # Pillow's readers raise anything from OSError to TypeError on damaged bytes
        why = " ".join(str(error).replace(f" '{path}'", "").split()) or type(error).__name__
        raise RunError(
            f"{path}: cannot be read as an image ({why}); replace it, or remove it before a run begins"
        ) from error


def rgb(image: Image.Image) -> Image.Image:
    """An opened image as RGB (ValueError where the range of its pixels is not known)."""
    wide = image.mode == "I" and image.format in ("PNG", "PPM")  # 16 bits, in Pillow's 32
    if wide or image.mode.startswith("I;16"):
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257  # 65535 -> 255, rounded
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no known range, save it with 8 or 16 bits")
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Decodes and augments. Each draw has a seed of its own, so its crop is the same in any process."""

    def __init__(self, split: Split, view: View, train: bool, seed: int, purpose: str) -> None:
        self.split, self.view, self.train, self.seed, self.purpose = split, view, train, seed, purpose
        self.transform = view.transform(train)
        self.tensors: Tensor | None = None
        if isinstance(split.images, Tensor):
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (view.mean, view.std))
            self.tensors = (split.images - mean) / std

    def __getitems__(self, draws: Sequence[Draw]) -> tuple[Tensor, Tensor] | RunError:
        index = torch.tensor([i for _, i in draws], dtype=torch.long)
        if self.tensors is not None and not (self.train and self.view.augment == "crop"):
            return self.tensors[index], self.split.targets[index]
        if not draws:
            return torch.empty(0, 3, self.view.size, self.view.size), self.split.targets[index]
        try:
            return torch.stack([self.image(draw, i) for draw, i in draws]), self.split.targets[index]
        except RunError as error:  # as a value: from a worker process an exception would arrive as a traceback
            return error

    def image(self, draw: int, index: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
            torch.manual_seed(seed_of(self.seed, self.purpose, "augment", draw))
            return self.transform(self.open(index))

    def open(self, index: int) -> Image.Image:
        images = self.split.images
        if isinstance(images, Tensor):
            return T.functional.to_pil_image(images[index])  # type: ignore[no-any-return]
        return read_image(images[index])


@lru_cache(maxsize=1)
def leave_nobody_behind() -> None:
    """At the end of this process, end what is left of its daemons: ours do not listen to the SIGTERM that they get."""

    def end() -> None:
        for process in multiprocessing.active_children():
            if process.daemon:
                process.kill()

    atexit.register(end)


def started(worker: int) -> None:
    """A worker process has one thread, and leaves signals to its parent."""
    torch.set_num_threads(1)
    only_the_parent_decides()


def batches(
    images: Images, draws: Iterable[list[Draw]], workers: int, device: torch.device, ahead: int = 4
) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, targets) on the device, a batch for each list of draws (RunError naming an unreadable file).

    Worker processes start once and stay for all that is drawn; what they make is pinned, and each is `ahead` batches
    ahead.
    """
    if workers:
        leave_nobody_behind()
    loader = DataLoader(
        images,
        batch_sampler=draws,
        num_workers=workers,
        collate_fn=identity,
        pin_memory=device.type == "cuda",
        prefetch_factor=ahead if workers else None,
        worker_init_fn=started if workers else None,
    )
    try:
        for item in loader:
            if isinstance(item, RunError):
                raise item
            yield item[0].to(device, non_blocking=True), item[1].to(device, non_blocking=True)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise RunError(
            f"--workers {workers}: a process that reads images died, perhaps for want of (shared) memory; "
            "lower --workers or the batches, then --resume"
        ) from error


def identity(batch: Any) -> Any:
    """Batches arrive ready; a named function, since worker processes must be able to import it."""
    return batch
