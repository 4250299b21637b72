"""Datasets by name: the paper's six benchmarks (App. C.2.1), ImageNet, folders and quilts.

    load_task    a labelled task D^D
    load_pool    an unlabelled pool D^P
    quilts       the default of both, drawn from a seed: nothing to download

The benchmarks lie below the data root as torchvision lays them out. They are read from their own
lists, since torchvision's classes number the classes of a subset anew and refuse shorter lists (the
tests compare the two). Splits are the official ones. CUB-200 and Pets have no validation part: it
is a fifth of each class of their training part, or what `split_file` says.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.datasets import Flowers102

from config import Data, UsageError, place_of
from data import PARTS, Entry, Pool, Split, Task, find_images, folder, holdout, rng

Parts = dict[str, list[Entry]]  # train, val, test, or trainval, test; a label of VOC07 is a list
Listing = tuple[Parts, Sequence[str]]  # with the names of the classes


class Benchmark(NamedTuple):
    """One of the paper's datasets."""

    sizes: tuple[int, int, int]  # train, validation, test, as the paper uses them
    read: Callable[[Path], Listing]  # files are told below the dataset's folder


# --- readers of list files --------------------------------------------------------------------


def rows(path: Path, columns: int) -> list[list[str]]:
    """The fields of each line; the last one may hold blanks. Comments are left out."""
    lines = [line.strip() for line in path.read_text().splitlines() if not line.startswith("#")]
    return [line.split(maxsplit=columns - 1) for line in lines if line]


def read_dtd(base: Path) -> Listing:
    """Partition 1 of ten. Classes are the 47 official ones in alphabetical order."""
    files = {part: rows(base / f"dtd/labels/{part}1.txt", 1) for part in PARTS}
    return {
        part: [(f"dtd/images/{name}", DTD.index(name.partition("/")[0])) for [name] in names]
        for part, names in files.items()
    }, DTD


def read_voc(base: Path) -> Listing:
    """A list per class: 1 has such an object, -1 has none, 0 has only difficult ones."""
    parts: Parts = {}
    for part in PARTS:
        lists = (base / f"VOC2007/ImageSets/Main/{kind}_{part}.txt" for kind in VOC)
        columns = [dict(rows(file, 2)) for file in lists]
        labels = {x: [int(column[x]) for column in columns] for x in columns[0]}
        parts[part] = [(f"VOC2007/JPEGImages/{x}.jpg", labels[x]) for x in labels]
    return parts, VOC


def read_cub(base: Path) -> Listing:
    """Lists that share the images' numbers; classes count from 1, a split of 1 is training."""
    names = ("images", "image_class_labels", "train_test_split", "classes")
    images, label, split, classes = (dict(rows(base / f"{name}.txt", 2)) for name in names)
    parts: Parts = {"test": [], "trainval": []}
    for i, file in images.items():
        parts[("test", "trainval")[int(split[i])]].append((f"images/{file}", int(label[i]) - 1))
    return parts, [name.partition(".")[2].replace("_", " ") for name in classes.values()]


def read_pets(base: Path) -> Listing:
    """Lines of `NAME CLASS SPECIES BREED`; classes count from 1."""
    lines = {part: rows(base / f"annotations/{part}.txt", 4) for part in ("trainval", "test")}
    known = {k: name.rpartition("_")[0] for p in lines for name, k, *_ in lines[p]}
    classes = [known.get(str(k), f"class {k}").replace("_", " ") for k in range(1, 38)]
    return {
        p: [(f"images/{name}.jpg", int(k) - 1) for name, k, *_ in lines[p]] for p in lines
    }, classes


def read_flowers(base: Path) -> Listing:
    """setid.mat lists the images of a part, imagelabels.mat each one's class; both count from 1."""
    from scipy.io import loadmat

    ids, found = (loadmat(base / f"{x}.mat", squeeze_me=True) for x in ("setid", "imagelabels"))
    label, keys = found["labels"].tolist(), {"train": "trnid", "val": "valid", "test": "tstid"}
    return {
        part: [(f"jpg/image_{i:05d}.jpg", label[i - 1] - 1) for i in ids[key].tolist()]
        for part, key in keys.items()
    }, getattr(Flowers102, "classes", [f"flower {k}" for k in range(1, 103)])


def read_aircraft(base: Path) -> Listing:
    """Lines of `IMAGE VARIANT`; a variant's number is its place in variants.txt."""
    variants = [name for [name] in rows(base / "data/variants.txt", 1)]
    files = {part: rows(base / f"data/images_variant_{part}.txt", 2) for part in PARTS}
    return {
        part: [(f"data/images/{image}.jpg", variants.index(name)) for image, name in lines]
        for part, lines in files.items()
    }, variants


DTD = """
    banded blotchy braided bubbly bumpy chequered cobwebbed cracked crosshatched crystalline dotted
    fibrous flecked freckled frilly gauzy grid grooved honeycombed interlaced knitted lacelike lined
    marbled matted meshed paisley perforated pitted pleated polka-dotted porous potholed scaly
    smeared spiralled sprinkled stained stratified striped studded swirly veined waffled woven
    wrinkled zigzagged""".split()  # noqa: SIM905
VOC = """
    aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person
    pottedplant sheep sofa train tvmonitor""".split()  # noqa: SIM905
BENCHMARKS = {
    "dtd": Benchmark((1880, 1880, 1880), read_dtd),
    "voc07": Benchmark((2501, 2510, 4952), read_voc),
    "cub200": Benchmark((4800, 1194, 5794), read_cub),
    "pets": Benchmark((2946, 734, 3669), read_pets),
    "flowers": Benchmark((1020, 1020, 6149), read_flowers),
    "aircrafts": Benchmark((3334, 3333, 3333), read_aircraft),
}


# --- loading ----------------------------------------------------------------------------------


def load_task(cfg: Data, root: Path) -> Task:
    """The labelled dataset of these settings (UsageError; ValueError for a folder)."""
    name, path = cfg.dataset, place_of(cfg.dataset, root)
    if path is None:
        return quilts(cfg.data_seed)[1]
    if name not in BENCHMARKS:
        return folder(path, cfg.data_seed)
    listed, classes = read_lists(name, path)
    parts = with_validation(listed, cfg)
    there = [[entry for entry in parts[p] if (path / entry[0]).exists()] for p in PARTS]
    sizes, official = tuple(map(len, there)), BENCHMARKS[name].sizes
    if not all(sizes) or (sizes != official and not cfg.partial):
        what = f"train, validation and test have {sizes} images of {official}"
        how = f"`bisslight data check {name}` says why, --partial takes what is there of all three"
        raise UsageError(f"--dataset {name}: {path}: {what}; {how}")
    train, val, test = (Split.below(path, entries) for entries in there)
    if name == "voc07" and cfg.voc_difficult == "positive":
        train, val, test = (Split(x, y + (y == 0).long()) for x, y in (train, val, test))
    return Task(name, train, val, test, [*classes])


def load_pool(name: str, root: Path, seed: int) -> Pool:
    """Unlabelled images: quilts, ImageNet's training part, or any folder (UsageError)."""
    path = place_of(name, root)
    if path is None:
        return quilts(seed)[0]
    files = find_images(path / "train" if name == "imagenet" else path)
    if not files:
        raise UsageError(f"--pool {name}: no images in {path}")
    return Pool(files)


def read_lists(name: str, base: Path) -> Listing:
    """What a benchmark's lists say; files are told below its folder `base` (UsageError)."""
    try:
        return BENCHMARKS[name].read(base)
    except Exception as error:  # scipy raises anything from KeyError to zlib.error
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{base}: its lists cannot be read ({why}); download it again") from error


def with_validation(parts: Parts, cfg: Data) -> Parts:
    """train, val and test; a missing val is a fifth of each class, or what the split file says.

    That file is the original work's: positions in the official training part, from 0, one per line.
    """
    known, file = parts.get("trainval", []), cfg.split_file
    train, val = holdout(known, cfg.data_seed, "val")
    if file is not None:
        chosen, whole = {*file.read_text().split()}, sum(BENCHMARKS[cfg.dataset].sizes[:2])
        if len(known) != whole or not chosen < {str(i) for i in range(whole)}:
            needs = f"is for cub200 and pets, needs {whole} listed images and numbers below {whole}"
            raise UsageError(f"--split-file {file}: {needs}; {len(known)} are listed")
        train = [entry for i, entry in enumerate(known) if str(i) not in chosen]
        val = [entry for i, entry in enumerate(known) if str(i) in chosen]
    return {"train": train, "val": val, "test": parts["test"]} if known else parts


# --- the drawn default ----------------------------------------------------------------------

MOTIFS = ("1111000011110000", "1010101010101010", "0110111111110110", "1001011001101001")


@lru_cache(maxsize=2)
def quilts(seed: int) -> tuple[Pool, Task]:
    """Pixel quilts: a pool of 4000 images (3, 16, 16), and 8 classes with 80 / 160 / 480 images.

    A quilt is 4 x 4 tiles and shows two of four motifs. Its class is the layout, which tiles are
    equal, never which motif they show. So single pixels say little about the class (all classes
    have the same mean image), and a network must compare tiles, as it must to fill in masked ones.
    Labelled images, unlike the pool, have a tenth of their tiles replaced. A tile is exactly a
    patch of vit_mini, which favours a ViT.
    """
    g = rng(seed, "quilts")
    layouts: list[Tensor] = []
    while len(layouts) < 8:
        layout = torch.randint(2, (16,), generator=g)
        if 7 <= int(layout.sum()) <= 9 and all(
            5 <= int((layout != other).sum()) <= 11 for other in layouts
        ):
            layouts.append(layout)
    pixels = torch.tensor([[int(bit) for bit in motif] for motif in MOTIFS]) * 0.7 + 0.15  # (4, 16)

    def draw(labels: Tensor, junk: float) -> Tensor:
        first = torch.randint(4, labels.shape, generator=g)
        second = (first + torch.randint(1, 4, labels.shape, generator=g)) % 4  # another motif
        layout = torch.stack(layouts)[labels]  # (n, 16 tiles)
        shown = torch.where(layout == 1, second[:, None], first[:, None])
        junk_tile = torch.rand(shown.shape, generator=g) < junk
        shown = torch.where(junk_tile, torch.randint(4, shown.shape, generator=g), shown)
        tiles = pixels[shown].view(-1, 4, 4, 4, 4)  # tile row, tile column, pixel row, pixel column
        noise = 0.08 * torch.randn(len(labels), 3, 16, 16, generator=g)
        return (tiles.transpose(2, 3).reshape(-1, 1, 16, 16) + noise).clamp(0, 1)

    pool = draw(torch.randint(8, (4000,), generator=g), 0.0)
    labels = [torch.arange(8).repeat(count) for count in (10, 20, 60)]
    train, val, test = (Split(draw(y, 0.1), y) for y in labels)
    mean, std = (tuple(x.tolist()) for x in (pool.mean((0, 2, 3)), pool.std((0, 2, 3))))
    classes = [f"layout {k}" for k in range(8)]
    return Pool(pool, mean, std), Task("quilts", train, val, test, classes, mean, std)
