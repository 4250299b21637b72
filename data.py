"""Labelled tasks D^D and unlabelled pools D^P: how images are split, cut, ordered and loaded.

Random numbers depend on (seed, purpose, draw) alone. Images are drawn in pass after pass; a draw is
the running number of an image in that sequence. So batches depend neither on worker processes nor
on where a run was continued. A wrong folder raises ValueError, an unreadable image ImageError.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as T
from torchvision.datasets.folder import IMG_EXTENSIONS

PARTS = ("train", "val", "test")
Channels = tuple[float, ...]  # one number each for red, green and blue
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean, std
Entries = list[tuple[str, Any]]  # (image file below the dataset's folder, label)
Draws = list[tuple[int, int]]  # of a batch: (number of the draw, index of the image)
Stored = Tensor | list[Path]  # images (N, 3, H, W) in [0, 1], or their files


class ImageError(OSError):
    """An image cannot be read; the message names the file and the remedy."""


def rng(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose, the same on every platform: sha256, not Python's hash.

    >>> rng(0, "mask", 1).initial_seed()  # of 63 bits
    9043777112963148149
    """
    words = "/".join(map(str, (seed, *purpose))).encode()
    start = int.from_bytes(hashlib.sha256(words).digest()[:8], "big") >> 1
    return torch.Generator().manual_seed(start)


class Split(NamedTuple):
    """Images and their labels, int64."""

    images: Stored
    targets: Tensor  # (N,), or (N, C) for several classes per image: 1 yes, -1 no, 0 not counted

    @classmethod
    def below(cls, root: Path, entries: Entries) -> Self:
        return cls([root / file for file, _ in entries], torch.tensor([k for _, k in entries]))


class Task(NamedTuple):
    """A labelled dataset D^D. `mean` and `std` normalise its channels."""

    name: str
    train: Split
    val: Split
    test: Split
    classes: list[str]
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]

    @classmethod
    def of(cls, train: Any, val: Any, test: Any, classes: Sequence[str]) -> Self:
        """A task in memory, of torch Datasets or lists of (image (3, H, W) in [0, 1], class)."""
        splits = []
        for part in (train, val, test):
            x, y = default_collate([part[i] for i in range(len(part))])
            inside = 0 <= x.min() <= x.max() <= 1 and 0 <= y.min() <= y.max() < len(classes)
            if x.shape[1] != 3 or not inside:
                raise ValueError(f"wants images (3, H, W) in [0, 1], labels below {len(classes)}")
            splits.append(Split(x.float(), y.long()))
        return cls("own", splits[0], splits[1], splits[2], [*classes])

    def sizes(self) -> dict[str, int]:
        """How many images each part has."""
        return {part: len(x.targets) for part, x in zip(PARTS, self[1:4], strict=True)}


class Pool(NamedTuple):
    """Unlabelled images D^P."""

    images: Stored
    mean: Channels = IMAGENET[0]
    std: Channels = IMAGENET[1]


def fingerprint(*parts: Split | Pool) -> str:
    """sha256 over file names below their folder, or over pixels in memory; and over labels."""
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part.images, Tensor):
            sha.update(part.images.numpy().tobytes())
        else:
            root = os.path.commonpath([*part.images, part.images[0].parent])
            sha.update("\n".join(os.path.relpath(path, root) for path in part.images).encode())
        if isinstance(part, Split):
            sha.update(part.targets.numpy().tobytes())
    return sha.hexdigest()


MOTIFS = ("1111000011110000", "1010101010101010", "0110111111110110", "1001011001101001")


@lru_cache(maxsize=2)
def quilts(seed: int) -> tuple[Pool, Task]:
    """Pixel quilts: a pool of 4000 images (3, 16, 16); 80 / 160 / 480 labelled ones of 8 classes.

    A quilt is 4 x 4 tiles, each a patch of vit_mini, and shows two of four motifs. Its class says
    which tiles are equal, not which motif they show: all classes have the same mean image, and a
    network must compare tiles. In labelled images, a tenth of the tiles show a motif at random.
    """
    g = rng(seed, "quilts")
    layouts, images = list[Tensor](), list[Tensor]()
    while len(layouts) < 8:
        layout = torch.randint(2, (16,), generator=g)
        differ = [int((layout != other).sum()) for other in layouts]
        if 7 <= int(layout.sum()) <= 9 and all(5 <= count <= 11 for count in differ):
            layouts.append(layout)
    pixels = torch.tensor([[int(bit) for bit in motif] for motif in MOTIFS]) * 0.7 + 0.15  # (4, 16)
    labels = [torch.randint(8, (4000,), generator=g), *map(torch.arange(8).repeat, (10, 20, 60))]
    for y, junk in zip(labels, (0.0, 0.1, 0.1, 0.1), strict=True):
        first = torch.randint(4, y.shape, generator=g)
        second = (first + torch.randint(1, 4, y.shape, generator=g)) % 4  # another motif
        shown = torch.where(torch.stack(layouts)[y] == 1, second[:, None], first[:, None])
        junk_tile = torch.rand(shown.shape, generator=g) < junk
        shown = torch.where(junk_tile, torch.randint(4, shown.shape, generator=g), shown)
        tiles = pixels[shown].view(-1, 4, 4, 4, 4)  # tile row, tile column, pixel row, pixel column
        noise = 0.08 * torch.randn(len(y), 3, 16, 16, generator=g)
        images.append((tiles.transpose(2, 3).reshape(-1, 1, 16, 16) + noise).clamp(0, 1))
    pool, train, val, test = map(Split, images, labels)  # nobody sees the pool's labels
    mean, std = (tuple(x.tolist()) for x in (images[0].mean((0, 2, 3)), images[0].std((0, 2, 3))))
    names = [f"layout {k}" for k in range(8)]
    return Pool(pool.images, mean, std), Task("quilts", train, val, test, names, mean, std)


def find_images(root: Path) -> list[Path]:
    """All image files below a folder, links followed, sorted by path, hidden ones left out."""
    shown = [path for path in root.iterdir() if path.name[0] != "."]
    files = [path for path in shown if path.suffix.lower() in IMG_EXTENSIONS]
    files += [x for path in {*shown} - {*files} if path.is_dir() for x in find_images(path)]
    if odd := [x for x in files if str(x).encode(errors="ignore") != os.fsencode(x)]:
        raise ValueError(f"{odd[0]}: this name is not UTF-8; rename the file or folder")
    return sorted(files, key=str)


def folder(root: Path, seed: int) -> Task:
    """Class folders, or train/ val/ test/ of them; a missing test or val is `holdout` of train."""
    inside = {x.name for x in root.iterdir() if x.is_dir() and x.name[0] != "."}
    if inside & {*PARTS} and not {"train"} <= inside <= {*PARTS}:
        raise ValueError(f"{root}: holds {sorted(inside)}, parts are named train, val and test")
    places = {part: root / part for part in PARTS if part in inside} or {"train": root}
    classes, entries = list[str](), dict[str, Entries]()
    for part, place in places.items():
        folders = sorted(x for x in place.iterdir() if x.is_dir() and x.name[0] != ".")
        by_class = {path.name: find_images(path) for path in folders}
        classes = classes or [*by_class]  # train comes first
        if len(by_class) < 2 or {*by_class} - {*classes} or not all(by_class.values()):
            has = ", ".join(f"{name} ({len(files)})" for name, files in by_class.items())
            raise ValueError(
                f"{root}: {part} needs two or more of train's class folders, all with images; "
                f"it has {has or 'none'}"
            )
        found = [(file, classes.index(name)) for name, files in by_class.items() for file in files]
        entries[part] = [(file.relative_to(root).as_posix(), label) for file, label in found]
    for part in [x for x in ("test", "val") if x not in entries]:
        entries["train"], entries[part] = holdout(entries["train"], seed, part)
        if len({k for _, k in entries[part]}) < len(classes):
            raise ValueError(f"{root}: a class is too small to split off {part}")
    train, val, test = (Split.below(root, entries[part]) for part in PARTS)
    return Task(f"folder:{root}", train, val, test, classes)


def holdout(entries: Entries, seed: int, part: str) -> tuple[Entries, Entries]:
    """(rest, a fifth of each class): the files with the smallest sha256 of seed/part/file.

    Rounded down, but at least one; a single image stays. CUB-200: 4800 and 1194, as many as BiSSL.

    >>> holdout([("1.jpg", 0), ("2.jpg", 0), ("3.jpg", 1)], 0, "val")
    ([('1.jpg', 0), ('3.jpg', 1)], [('2.jpg', 0)])
    """
    by_class: dict[int, list[str]] = {}
    for file, label in entries:
        by_class.setdefault(label, []).append(file)
    chosen: set[str] = set()
    for files in by_class.values():
        files.sort(key=lambda file: hashlib.sha256(f"{seed}/{part}/{file}".encode()).digest())
        chosen |= {*files[: max(len(files) > 1, len(files) // 5)]}
    return [e for e in entries if e[0] not in chosen], [e for e in entries if e[0] in chosen]


def stream(
    n: int, batch: int, seed: int, purpose: str, steps: range, passes: bool = False
) -> Iterator[Draws]:
    """Batches of these steps, all full; one may hold the end of a pass and the start of the next.

    With `passes`, each pass has ceil(n / batch) batches, and its last one may be smaller.
    """
    order = lru_cache(maxsize=1)(  # of a pass, drawn when it begins
        lambda number: torch.randperm(n, generator=rng(seed, purpose, "order", number))
    )
    for step in steps:
        draws = range(step * batch, (step + 1) * batch)
        if passes:
            number, k = divmod(step, -(-n // batch))  # pass, and batch of that pass
            draws = range(number * n, (number + 1) * n)[k * batch : (k + 1) * batch]
        yield [(d, int(order(d // n)[d % n])) for d in draws]


class Transform(NamedTuple):
    """How an image becomes a network input of side `size`."""

    size: int
    mean: Channels
    std: Channels
    augment: str = "none"  # or "crop"
    min_crop: float = 0.2
    interpolation: str = "bicubic"  # or "bilinear"
    flip: bool = True


def read_image(path: Path) -> Image.Image:
    """An image file as RGB, decoded to its end; as torchvision does, EXIF and alpha are ignored."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would clip them
                raise ValueError("more than 8 bits a channel, save it with 8")
            return image.convert("RGB")
    except Exception as error:  # Pillow raises anything from OSError to TypeError on damaged bytes
        raise ImageError(f"{path}: cannot be read ({error!r}); replace or remove it") from error


def decode_all(files: Iterable[Path]) -> list[BaseException]:
    """Read image files fully once, before the long work; returns an error for each damaged one."""
    with ThreadPoolExecutor(8) as pool:  # decoding lets other threads run; no image is kept
        reads = [pool.submit(lambda path: read_image(path).close(), path) for path in files]
    return [error for read in reads if (error := read.exception())]


class Images(Dataset[Any]):
    """Decodes and augments; a draw's crop is the same in any process.

    Training: a random crop of min_crop to 1 of the area, and a flip (App. C.2). Otherwise the
    shorter side is resized to 256/224 of the input size and the centre is cut out (as released);
    images in memory of the network's size are only normalised.
    """

    def __init__(self, split: Split, t: Transform, train: bool, seed: int, purpose: str) -> None:
        self.split, self.t, self.seed, self.purpose = split, t, seed, purpose
        mode = T.InterpolationMode(t.interpolation)
        crop = T.RandomResizedCrop(t.size, (t.min_crop, 1), interpolation=mode)
        centre = [T.Resize(round(t.size * 256 / 224), mode), T.CenterCrop(t.size)]
        self.random = train and t.augment == "crop"
        cut = [crop, T.RandomHorizontalFlip(0.5 * t.flip)] if self.random else centre
        self.pipeline = T.Compose([*cut, T.ToTensor(), T.Normalize(t.mean, t.std)])

    def __getitem__(self, part: tuple[Draws, int]) -> tuple[Tensor, Tensor, int] | ImageError:
        """Images, targets, n of draws from a batch of n. An ImageError is returned, not raised."""
        draws, n = part
        images, index, t = self.split.images, [i for _, i in draws], self.t
        y, size = self.split.targets[index], (t.size, t.size)
        if isinstance(images, Tensor) and images.shape[2:] == size and not self.random:
            return T.functional.normalize(images[index], t.mean, t.std), y, n
        try:
            return torch.stack([self.image(*draw) for draw in draws]), y, n
        except ImageError as error:
            return error

    def image(self, draw: int, index: int) -> Tensor:
        x = self.split.images[index]
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
            torch.manual_seed(rng(self.seed, self.purpose, "augment", draw).initial_seed())
            image = T.functional.to_pil_image(x) if isinstance(x, Tensor) else read_image(x)
            return self.pipeline(image)  # type: ignore[no-any-return]


def own_session(worker: int) -> None:
    """Take a worker process out of the terminal's group, so that Ctrl-C is its parent's alone."""
    os.setsid()


def batches(
    images: Images,
    draws: Iterable[Draws],
    workers: int | None,
    device: torch.device,
    share: Callable[[int], slice] = slice,  # n -> what this process takes of a batch
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Images, targets (on the device), n for each list of n draws; worker processes work ahead."""
    if workers is None and device.type != "cpu" and not isinstance(images.split.images, Tensor):
        workers = min(16, os.cpu_count() or 1)  # one a core
    for item in DataLoader(
        images,
        batch_size=None,  # an item is a batch
        sampler=((batch[share(len(batch))], len(batch)) for batch in draws),
        num_workers=workers or 0,
        pin_memory=device.type == "cuda",
        worker_init_fn=own_session if hasattr(os, "setsid") else None,
    ):
        if isinstance(item, ImageError):
            raise item
        x, y, n = item
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True), n
