"""Datasets by name: the paper's six benchmarks (App. C.2.1), ImageNet, folders and quilts.

The benchmarks lie below the data root as torchvision lays them out. They are read from their own
lists, since torchvision numbers the classes of a subset anew (the tests compare the two). Splits
are the official ones. CUB-200 and Pets have no validation part: it is a fifth of each class of the
training part, or what `split_file` says.
"""

import shutil
import tarfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.datasets import Flowers102
from torchvision.datasets.utils import download_and_extract_archive, download_url

from commands import RunError, UsageError, nearest, place_of
from config import FOLDERS, Data
from data import PARTS, Entries, Pool, Split, Task, decode_all, find_images, folder, holdout, rng

Parts = dict[str, Entries]  # train, val, test, trainval; a label of VOC07 is a list
Listing = tuple[list[tuple[str, str, Any]], Sequence[str]]  # (part, file, label), and the classes
Row = dict[str, Any]


class Benchmark(NamedTuple):
    """One of the paper's datasets."""

    sizes: tuple[int, int, int]  # train, validation, test, as the paper uses them
    read: Callable[[Path], Listing]  # files are told below the dataset's folder


def rows(path: Path, columns: int) -> list[list[str]]:
    """The fields of each line; the last one may hold blanks. Comments are left out."""
    lines = [line.strip() for line in path.read_text().splitlines() if not line.startswith("#")]
    return [line.split(maxsplit=columns - 1) for line in lines if line]


def read_dtd(base: Path) -> Listing:
    """Partition 1 of ten. Classes are the 47 official ones in alphabetical order."""
    return [
        (part, f"dtd/images/{name}", DTD.index(name.partition("/")[0]))
        for part in PARTS
        for [name] in rows(base / f"dtd/labels/{part}1.txt", 1)
    ], DTD


def read_voc(base: Path) -> Listing:
    """A list per class: 1 has such an object, -1 has none, 0 has only difficult ones."""
    lists = base / "VOC2007/ImageSets/Main"
    columns = {p: [dict(rows(lists / f"{kind}_{p}.txt", 2)) for kind in VOC] for p in PARTS}
    return [
        (part, f"VOC2007/JPEGImages/{image}.jpg", [int(column[image]) for column in found])
        for part, found in columns.items()
        for image in found[0]
    ], VOC


def read_cub(base: Path) -> Listing:
    """Four lists by an image's number; classes count from 1, and a split of 1 is training."""
    images, label, split, classes = (
        dict(rows(base / f"{name}.txt", 2))
        for name in ("images", "image_class_labels", "train_test_split", "classes")
    )
    return [
        (("test", "trainval")[int(split[i])], f"images/{file}", int(label[i]) - 1)
        for i, file in images.items()
    ], [name.partition(".")[2].replace("_", " ") for name in classes.values()]


def read_pets(base: Path) -> Listing:
    """Lines of `NAME CLASS SPECIES BREED`; classes count from 1."""
    lines = {part: rows(base / f"annotations/{part}.txt", 4) for part in ("trainval", "test")}
    found = [(part, line[0], int(line[1]) - 1) for part in lines for line in lines[part]]
    known = {k: name.rpartition("_")[0].replace("_", " ") for _, name, k in found}
    classes = [known.get(k, f"class {k + 1}") for k in range(37)]
    return [(part, f"images/{name}.jpg", k) for part, name, k in found], classes


def read_flowers(base: Path) -> Listing:
    """setid.mat lists the images of a part, imagelabels.mat each one's class; both count from 1."""
    from scipy.io import loadmat

    ids, labels = (loadmat(base / f"{x}.mat", squeeze_me=True) for x in ("setid", "imagelabels"))
    return [
        (part, f"jpg/image_{i:05d}.jpg", int(labels["labels"][i - 1]) - 1)
        for part, key in zip(PARTS, ("trnid", "valid", "tstid"), strict=True)
        for i in ids[key]
    ], getattr(Flowers102, "classes", [f"flower {k}" for k in range(1, 103)])


def read_aircraft(base: Path) -> Listing:
    """Lines of `IMAGE VARIANT`; a variant's number is its place in variants.txt."""
    variants = [name for [name] in rows(base / "data/variants.txt", 1)]
    return [
        (part, f"data/images/{image}.jpg", variants.index(name))
        for part in PARTS
        for image, name in rows(base / f"data/images_variant_{part}.txt", 2)
    ], variants


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


def load_task(cfg: Data, root: Path) -> Task:
    """The labelled dataset of these settings (UsageError; ValueError for a folder)."""
    name, path = cfg.dataset, place_of(cfg.dataset, root)
    if cfg.split_file and name not in BENCHMARKS:
        raise UsageError(f"--split-file {cfg.split_file}: is for cub200 and pets, leave it out")
    if path is None:
        return quilts(cfg.data_seed)[1]
    if name not in BENCHMARKS:
        return folder(path, cfg.data_seed)
    listed, classes = read_lists(name, path)
    parts = with_validation(listed, cfg)
    there = [[entry for entry in parts[p] if (path / entry[0]).exists()] for p in PARTS]
    sizes, official = tuple(map(len, there)), BENCHMARKS[name].sizes
    if not all(sizes) or (sizes != official and not cfg.partial):
        raise UsageError(
            f"--dataset {name}: {path}: train, validation and test have {sizes} images of "
            f"{official}; `bisslight data check {name}` says why, --partial takes what is there "
            "of all three"
        )
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


def read_lists(name: str, base: Path) -> tuple[Parts, Sequence[str]]:
    """What a benchmark's lists say, by part, and its classes (UsageError)."""
    try:
        found, classes = BENCHMARKS[name].read(base)
    except Exception as error:  # scipy raises anything from KeyError to zlib.error
        raise UsageError(
            f"{base}: its lists cannot be read ({type(error).__name__}: {error}); download it again"
        ) from error
    return {
        p: [(file, label) for part, file, label in found if part == p] for p in (*PARTS, "trainval")
    }, classes


def with_validation(parts: Parts, cfg: Data) -> Parts:
    """The parts train, val and test; without a val, a fifth of each class or the split file's.

    That file has positions in the official training part, counted from 0, one on each line.
    """
    known, file = parts["trainval"], cfg.split_file
    train, val = holdout(known, cfg.data_seed, "val")
    if file is not None:
        chosen, whole = {*file.read_text().split()}, sum(BENCHMARKS[cfg.dataset].sizes[:2])
        if len(known) != whole or not chosen < {str(i) for i in range(whole)}:
            raise UsageError(
                f"--split-file {file}: is for cub200 and pets, needs {whole} listed images and "
                f"numbers below {whole}; {len(known)} are listed"
            )
        train = [entry for i, entry in enumerate(known) if str(i) not in chosen]
        val = [entry for i, entry in enumerate(known) if str(i) in chosen]
    return {"train": train, "val": val, "test": parts["test"]} if known else parts


MOTIFS = ("1111000011110000", "1010101010101010", "0110111111110110", "1001011001101001")


@lru_cache(maxsize=2)
def quilts(seed: int) -> tuple[Pool, Task]:
    """Pixel quilts: a pool of 4000 images (3, 16, 16); 80 / 160 / 480 labelled ones of 8 classes.

    A quilt is 4 x 4 tiles, each a patch of vit_mini, and shows two of four motifs. Its class says
    which tiles are equal, not which motif they show: all classes have the same mean image, and a
    network must compare tiles. In labelled images, a tenth of the tiles show a motif at random.
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
        shown = torch.where(torch.stack(layouts)[labels] == 1, second[:, None], first[:, None])
        junk_tile = torch.rand(shown.shape, generator=g) < junk
        shown = torch.where(junk_tile, torch.randint(4, shown.shape, generator=g), shown)
        tiles = pixels[shown].view(-1, 4, 4, 4, 4)  # tile row, tile column, pixel row, pixel column
        noise = 0.08 * torch.randn(len(labels), 3, 16, 16, generator=g)
        return (tiles.transpose(2, 3).reshape(-1, 1, 16, 16) + noise).clamp(0, 1)

    pool = draw(torch.randint(8, (4000,), generator=g), 0.0)
    train, val, test = (
        Split(draw(y, 0.1), y) for y in (torch.arange(8).repeat(n) for n in (10, 20, 60))
    )
    mean, std = (tuple(x.tolist()) for x in (pool.mean((0, 2, 3)), pool.std((0, 2, 3))))
    names = [f"layout {k}" for k in range(8)]
    return Pool(pool, mean, std), Task("quilts", train, val, test, names, mean, std)


TERMS = {  # what their publishers say about using them
    "dtd": "for research",
    "voc07": "Flickr's terms of use",
    "cub200": "non-commercial research and teaching",
    "pets": "CC BY-SA 4.0",
    "flowers": "not stated; for research",
    "aircrafts": "non-commercial research",
    "imagenet": "research, registered; train/ holds a folder a class",
}
OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
AIRCRAFT = f"{OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz"
PASCAL = "https://thor.robots.ox.ac.uk/pascal/VOC/voc2007"
CUB = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
ARCHIVES = {  # URL -> md5
    "dtd": {f"{OXFORD}/dtd/download/dtd-r1.0.1.tar.gz": "fff73e5086ae6bdbea199a49dfb8a4c1"},
    "voc07": {
        f"{PASCAL}/VOCtrainval_06-Nov-2007.tar": "c52e279531787c972589f7e41ab4ae64",
        f"{PASCAL}/VOCtest_06-Nov-2007.tar": "b6e924de25625d8de591ea690078ad9f",
    },
    "cub200": {CUB: "97eceeb196236b17998738112f37df78"},
    "pets": {
        f"{OXFORD}/pets/data/images.tar.gz": "5c4f3ee8e5d25df40f4fd59a7f44e54c",
        f"{OXFORD}/pets/data/annotations.tar.gz": "95a8c909bbe2e81eed6a22bccdf3f68f",
    },
    "flowers": {
        f"{OXFORD}/flowers/102/102flowers.tgz": "52808999861908f626f3c1f4e79d11fa",
        f"{OXFORD}/flowers/102/imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
        f"{OXFORD}/flowers/102/setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
    },
    "aircrafts": {AIRCRAFT: "d4acdd33327262359767eeaa97a4f732"},
}


def list_all(root: Path) -> list[Row]:
    """`bisslight data list`: whether a dataset's folder is there, and the terms of its use."""
    return [
        {"name": name, "state": "there" if (root / place).is_dir() else "missing"}
        | {"place": root / place, "terms": TERMS[name]}
        for name, place in FOLDERS.items()
    ]


def check(name: str, root: Path, partial: bool = False) -> Row:
    """Read a dataset as training does, open every image, and compare it with what is known.

    `folder:DIR` is read as --dataset does, DIR and imagenet as --pool does. If `partial`, missing
    images of a benchmark are counted, but are no problem.
    """
    if name not in FOLDERS and not Path(name.removeprefix("folder:")).is_dir():
        raise UsageError(f"{name}: is no benchmark or folder; {nearest(name, FOLDERS)}")
    about, problems = Row(name=name), list[Row]()
    try:
        path = place_of(name, root) or root
        if name in BENCHMARKS:
            listed = {file for part in read_lists(name, path)[0].values() for file, _ in part}
            absent = {file for file in listed if not (path / file).exists()}
            images = [path / file for file in sorted(listed - absent)]
            about |= {"listed": len(listed), "absent": len(absent)}
            whole = sum(BENCHMARKS[name].sizes)
            if not partial and (absent or len(listed) != whole):
                lack = f"lists {len(listed)} images of {whole}, {len(absent)} of them are missing"
                problems.append({"problem": lack, "first": min(absent, default=None)})
        elif name.startswith("folder:"):
            task = folder(path, 0)
            images = [file for split in task[1:4] for file in split.images]
            about["classes"] = len(task.classes)
            about |= task.sizes()
        else:
            images = [*load_pool(name, root, 0).images]
    except (ValueError, OSError) as error:
        raise UsageError(f"{name}: {error}") from error
    problems += [{"problem": str(error)} for error in decode_all(images)]
    return about | {"images": len(images), "problems": problems}


def download(name: str, root: Path) -> Row:
    """Fetch a benchmark's archives and unpack them; its folder is there whole or not at all."""
    if name not in BENCHMARKS:
        raise UsageError(
            f"{name}: cannot be downloaded; imagenet is at image-net.org, "
            f"{nearest(name, BENCHMARKS)}"
        )
    target, work = root / FOLDERS[name], root / f".{name}.download"
    if target.exists():
        raise UsageError(f"{target}: is there already, see `bisslight data check {name}`")
    made = work / "unpacked" / FOLDERS[name]
    into = made if name in ("dtd", "pets", "flowers") else made.parent  # others hold this folder
    for url, md5 in ARCHIVES[name].items():
        try:
            if url.endswith(".mat"):
                download_url(url, into, md5=md5)
            else:
                download_and_extract_archive(url, work, into, md5=md5)
        except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
            raise RunError(
                f"{url}: {error}; `cd {work} && curl -C - -O {url}` goes on; "
                "then give this command again"
            ) from error
    made.rename(target)
    shutil.rmtree(work)
    return {"name": name, "path": str(target), "terms": TERMS[name]}
