"""Program: data sets that have a name: the paper's six benchmarks and handwriting.

The benchmarks have the official splits and are laid out as by torchvision. They are read from their
own lists, since torchvision numbers the classes of a subset anew.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchvision.datasets import Flowers102

from config import ALPHABETS, Data
from data import SPLITS, Entries, Pool, Split, Task, find_images, holdout
from support import omniglot
from support.errors import UsageError, as_usage_error, nearest

Parts = dict[str, Entries]  # by the name of a part: files below the benchmark's folder, labels


class Lists(NamedTuple):
    """What the lists of a benchmark say."""

    # a part is train, val, test, or trainval: a training part without an official validation split
    parts: Parts
    classes: Sequence[str]


class Benchmark(NamedTuple):
    """A benchmark: where it lies, what it holds and where it comes from."""

    folder: str  # below --data-root
    sizes: tuple[int, int, int]  # images of train, validation (CUB, Pets: our split) and test
    read: Callable[[Path], Lists]
    archives: dict[str, str]  # URL -> md5
    megabytes: int  # of the archives
    holds_folder: bool  # the archives hold `folder` itself, not only what is in it
    terms: str  # what its publisher says about using it


def read_rows(path: Path, columns: int) -> list[list[str]]:
    """The fields of each line; the last one may hold blanks. Comments are left out."""
    rows = []
    for line in path.read_text().splitlines():
        text = line.strip()
        if text and not line.startswith("#"):
            rows.append(text.split(maxsplit=columns - 1))
    return rows


def read_pairs(path: Path) -> dict[str, str]:
    """The lines `KEY VALUE` of a file."""
    return dict(read_rows(path, 2))


def read_dtd(base: Path) -> Lists:
    """Partition 1 of ten. Classes are the 47 official ones in alphabetical order."""
    parts: Parts = defaultdict(list)
    for part in SPLITS:
        for [name] in read_rows(base / f"dtd/labels/{part}1.txt", 1):
            kind, _, _ = name.partition("/")
            parts[part].append((f"dtd/images/{name}", DTD.index(kind)))
    return Lists(parts, DTD)


def read_voc(base: Path) -> Lists:
    """A list per class: 1 has such an object, -1 has none, 0 has only difficult ones."""
    lists = base / "VOC2007/ImageSets/Main"
    parts: Parts = defaultdict(list)
    for part in SPLITS:
        columns = [read_pairs(lists / f"{kind}_{part}.txt") for kind in VOC]
        for image in columns[0]:
            label = [int(column[image]) for column in columns]
            parts[part].append((f"VOC2007/JPEGImages/{image}.jpg", label))
    return Lists(parts, VOC)


def read_cub(base: Path) -> Lists:
    """Three lists by image number: its file, its class from 1, and 1 if it is for training.

    classes.txt has the names of the classes, in the order of their numbers.
    """
    files = read_pairs(base / "images.txt")
    labels = read_pairs(base / "image_class_labels.txt")
    is_training = read_pairs(base / "train_test_split.txt")
    classes = read_pairs(base / "classes.txt")
    parts: Parts = defaultdict(list)
    for number, file in files.items():
        part = "trainval" if int(is_training[number]) else "test"
        parts[part].append((f"images/{file}", int(labels[number]) - 1))
    # a class is listed as 001.Black_footed_Albatross
    names = [name.partition(".")[2].replace("_", " ") for name in classes.values()]
    return Lists(parts, names)


def read_pets(base: Path) -> Lists:
    """Lines of `NAME CLASS SPECIES BREED`; classes count from 1."""
    parts: Parts = defaultdict(list)
    classes = [f"class {k + 1}" for k in range(37)]  # for those that a subset lacks
    for part in ("trainval", "test"):
        for name, number, _, _ in read_rows(base / f"annotations/{part}.txt", 4):
            label = int(number) - 1
            parts[part].append((f"images/{name}.jpg", label))
            # great_pyrenees_12 is an image of the class great pyrenees
            classes[label] = name.rpartition("_")[0].replace("_", " ")
    return Lists(parts, classes)


def read_flowers(base: Path) -> Lists:
    """setid.mat lists the images of a part, imagelabels.mat each one's class; both count from 1."""
    from scipy.io import loadmat  # slow to import, and for this benchmark alone

    numbers = loadmat(base / "setid.mat", squeeze_me=True)
    labels = loadmat(base / "imagelabels.mat", squeeze_me=True)["labels"]
    parts: Parts = defaultdict(list)
    for part, key in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        for number in numbers[key]:
            label = int(labels[number - 1]) - 1
            parts[part].append((f"jpg/image_{number:05d}.jpg", label))
    # the lists hold no names; older releases of torchvision have none, either
    names = getattr(Flowers102, "classes", [f"flower {k}" for k in range(1, 103)])
    return Lists(parts, names)


def read_aircraft(base: Path) -> Lists:
    """Lines of `IMAGE VARIANT`; a variant's number is its place in variants.txt."""
    variants = [name for [name] in read_rows(base / "data/variants.txt", 1)]
    parts: Parts = defaultdict(list)
    for part in SPLITS:
        for image, name in read_rows(base / f"data/images_variant_{part}.txt", 2):
            parts[part].append((f"data/images/{image}.jpg", variants.index(name)))
    return Lists(parts, variants)


DTD = """
    banded blotchy braided bubbly bumpy chequered cobwebbed cracked crosshatched crystalline dotted
    fibrous flecked freckled frilly gauzy grid grooved honeycombed interlaced knitted lacelike lined
    marbled matted meshed paisley perforated pitted pleated polka-dotted porous potholed scaly
    smeared spiralled sprinkled stained stratified striped studded swirly veined waffled woven
    wrinkled zigzagged""".split()  # noqa: SIM905
VOC = """
    aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person
    pottedplant sheep sofa train tvmonitor""".split()  # noqa: SIM905

OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
PASCAL = "https://thor.robots.ox.ac.uk/pascal/VOC/voc2007"
CALTECH = "https://data.caltech.edu/records/65de6-vp158/files"
BENCHMARKS = {
    "dtd": Benchmark(
        folder="dtd",
        sizes=(1880, 1880, 1880),
        read=read_dtd,
        archives={f"{OXFORD}/dtd/download/dtd-r1.0.1.tar.gz": "fff73e5086ae6bdbea199a49dfb8a4c1"},
        megabytes=625,
        holds_folder=False,
        terms="for research",
    ),
    "voc07": Benchmark(
        folder="VOCdevkit",
        sizes=(2501, 2510, 4952),
        read=read_voc,
        archives={
            f"{PASCAL}/VOCtrainval_06-Nov-2007.tar": "c52e279531787c972589f7e41ab4ae64",
            f"{PASCAL}/VOCtest_06-Nov-2007.tar": "b6e924de25625d8de591ea690078ad9f",
        },
        megabytes=911,
        holds_folder=True,
        terms="Flickr's terms of use",
    ),
    "cub200": Benchmark(
        folder="CUB_200_2011",
        sizes=(4800, 1194, 5794),
        read=read_cub,
        archives={f"{CALTECH}/CUB_200_2011.tgz": "97eceeb196236b17998738112f37df78"},
        megabytes=1151,
        holds_folder=True,
        terms="non-commercial research and teaching",
    ),
    "pets": Benchmark(
        folder="oxford-iiit-pet",
        sizes=(2946, 734, 3669),
        read=read_pets,
        archives={
            f"{OXFORD}/pets/data/images.tar.gz": "5c4f3ee8e5d25df40f4fd59a7f44e54c",
            f"{OXFORD}/pets/data/annotations.tar.gz": "95a8c909bbe2e81eed6a22bccdf3f68f",
        },
        megabytes=811,
        holds_folder=False,
        terms="CC BY-SA 4.0",
    ),
    "flowers": Benchmark(
        folder="flowers-102",
        sizes=(1020, 1020, 6149),
        read=read_flowers,
        archives={
            f"{OXFORD}/flowers/102/102flowers.tgz": "52808999861908f626f3c1f4e79d11fa",
            f"{OXFORD}/flowers/102/imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
            f"{OXFORD}/flowers/102/setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
        },
        megabytes=345,
        holds_folder=False,
        terms="not stated; for research",
    ),
    "aircrafts": Benchmark(
        folder="fgvc-aircraft-2013b",
        sizes=(3334, 3333, 3333),
        read=read_aircraft,
        archives={
            f"{OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz": (
                "d4acdd33327262359767eeaa97a4f732"
            )
        },
        megabytes=2753,
        holds_folder=True,
        terms="non-commercial research",
    ),
}
# Data sets and pools that no folder holds: functions of --data-seed. A script can add its own here,
# and their names to `config.NAMED`; then `cli.main()` takes the names. With --jobs it must do so
# outside of `if __name__ == "__main__"`, since each process imports the script anew.
MAKE_TASK: dict[str, Callable[[int], Task]] = {
    f"omniglot:{alphabet}": partial(omniglot.task, alphabet) for alphabet in ALPHABETS
}
MAKE_POOL: dict[str, Callable[[int], Pool]] = {"omniglot": lambda _: omniglot.pool()}

# the paper's pool; behind a registration, so there is nothing to download here
IMAGENET_TERMS = "research, registered; train/ holds a folder a class"


def folders(root: Path) -> dict[str, Path]:
    """Where the datasets that have a name lie, or would lie, below --data-root."""
    paths = {name: root / benchmark.folder for name, benchmark in BENCHMARKS.items()}
    return paths | {"imagenet": root / "imagenet"}


def place_of(name: str, root: Path) -> Path | None:
    """Where a dataset or pool lies; None if it is made. Raises ValueError."""
    kind, _, _ = name.partition(":")
    if kind == "own":
        raise ValueError("was handed in from Python; hand it in again, task=... or pool=...")
    if name in MAKE_TASK or name in MAKE_POOL:
        return None
    named = folders(root)
    path = named.get(name, Path(name.removeprefix("folder:")))
    if path.is_dir():
        return path
    if name not in named:
        if name != path.name:  # a path, not a misspelt name
            raise ValueError("there is no such folder")
        raise ValueError(f"there is no such folder; {nearest(name, named)}")
    if name == "imagenet":
        remedy = (
            "148 GB, at image-net.org, registered. As --pool, any folder of images will do, such as"
            " the data set's own, though the paper's is ImageNet"
        )
    else:
        remedy = f"`bisslight data download {name}` fetches {BENCHMARKS[name].megabytes:,} MB"
    raise ValueError(f"is not in {path}, see --data-root; {remedy}")


def find_pool(name: str, path: Path) -> list[Path]:
    """The images of a pool in the folder `path`; ImageNet's training images (ValueError: none)."""
    folder = path / "train" if name == "imagenet" else path
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    files = find_images(folder)
    if not files:
        raise ValueError(f"no images in {folder}")
    return files


def load_task(cfg: Data, base: Path) -> Task:
    """The benchmark of these settings, which lies in the folder `base`. Raises UsageError."""
    name = cfg.dataset
    official = BENCHMARKS[name].sizes
    parts, classes = read_lists(name, base, cfg.data_seed, cfg.split_file)
    splits = []
    for part in SPLITS:
        # The missing ones are counted below; --partial goes on without them.
        present = [(file, label) for file, label in parts[part] if (base / file).exists()]
        split = Split.from_entries(base, present)
        if name == "voc07" and cfg.voc_difficult == "positive":
            split.targets[split.targets == 0] = 1  # objects that VOC marks as difficult
        splits.append(split)
    sizes = tuple(len(split.targets) for split in splits)
    has_empty_part = 0 in sizes  # a subset, too, needs images of each
    if has_empty_part or not (sizes == official or cfg.partial):
        raise UsageError(
            f"--dataset {name}: {base}: train, validation and test have {sizes} images of "
            f"{official}; see `bisslight data check {name}`, or give --partial"
        )
    train, val, test = splits
    return Task(name, train, val, test, list(classes))


def read_lists(name: str, base: Path, data_seed: int = 0, split_file: Path | None = None) -> Lists:
    """What a benchmark's lists say of train, val and test, and its classes. Raises UsageError.

    CUB-200 and Pets validate on a fifth of each class of their training part, or on a split file's
    positions there, one on each line, counted from 0.
    """
    benchmark = BENCHMARKS[name]
    with as_usage_error(str(base), "its lists are damaged, download it again"):
        parts, classes = benchmark.read(base)
    unsplit = parts.pop("trainval", [])
    if split_file:
        train_size, val_size, _ = benchmark.sizes
        count = train_size + val_size
        parts["train"], parts["val"] = split_by_file(unsplit, count, split_file)
    elif unsplit:
        parts["train"], parts["val"] = holdout(unsplit, data_seed, "val")
    return Lists(parts, classes)


def split_by_file(entries: Entries, count: int, split_file: Path) -> tuple[Entries, Entries]:
    """(train, val): the file lists the positions of validation images. Raises UsageError."""
    chosen = set(split_file.read_text().split())  # as text, so that any word is refused
    positions = {str(i) for i in range(count)}
    # Of fewer images, a position would name another image. Not all may be chosen: train needs some.
    if len(entries) != count or not chosen < positions:
        raise UsageError(
            f"--split-file {split_file}: is for cub200 and pets, needs {count} listed images and "
            f"numbers below {count}; {len(entries)} are listed"
        )
    train = [entry for i, entry in enumerate(entries) if str(i) not in chosen]
    val = [entry for i, entry in enumerate(entries) if str(i) in chosen]
    return train, val
