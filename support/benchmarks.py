"""Program: data sets that have a name: the paper's six benchmarks and handwriting.

The benchmarks have the official splits and lie in the folders that torchvision makes. Each has text
files or .mat files that list its images and their classes. They are read here, not by torchvision,
which numbers the classes of a subset anew.
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
from support.errors import UsageError, as_read_error, suggest

# The listed images of each part, with their labels. A part is "train", "val" or "test", or
# "trainval" where a benchmark has no official validation split. Files are named relative to the
# benchmark's folder, such as ("images/001.Albatross/1.jpg", 0).
Parts = dict[str, Entries]


class Lists(NamedTuple):
    """What the lists of a benchmark say."""

    parts: Parts
    classes: Sequence[str]  # the name of class 0, of class 1 and so on


class Benchmark(NamedTuple):
    """A benchmark: where it lies, what it holds and where it comes from."""

    folder: str  # its name in --data-root
    sizes: tuple[int, int, int]  # images of train, validation (CUB, Pets: our split) and test
    read: Callable[[Path], Lists]  # reads its lists in that folder
    archives: dict[str, str]  # md5 of each file to download, by its URL
    megabytes: int  # the size of all these files
    # True: the archives hold `folder/...`. False: they hold what is in it, so it has to be made.
    archive_includes_folder: bool
    terms: str  # what its publisher says about using it


def read_rows(path: Path, columns: int) -> list[list[str]]:
    """Split each line at blanks into at most so many columns, so that the last may hold blanks.

    Empty lines and comments (#) are left out. With 2 columns, `1 a b.jpg` gives ["1", "a b.jpg"].
    """
    rows = []
    for line in path.read_text().splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            rows.append(text.split(maxsplit=columns - 1))
    return rows


def read_pairs(path: Path) -> dict[str, str]:
    """Read a file with lines `KEY VALUE` as a dict."""
    return dict(read_rows(path, 2))


def read_dtd(base: Path) -> Lists:
    """Read partition 1 of DTD's ten, whose lines are such as `banded/banded_0002.jpg`.

    Classes are the 47 official ones in alphabetical order, so a subset keeps their numbers.
    """
    parts: Parts = defaultdict(list)
    for part in SPLITS:
        for [image] in read_rows(base / f"dtd/labels/{part}1.txt", 1):
            class_name, _, _ = image.partition("/")
            parts[part].append((f"dtd/images/{image}", DTD.index(class_name)))
    return Lists(parts, DTD)


def read_voc(base: Path) -> Lists:
    """Read a list for each class and part, such as bird_train.txt, with lines such as `000012 -1`.

    1: the image has such an object, -1: it has none, 0: it has only ones that are marked difficult.
    """
    lists = base / "VOC2007/ImageSets/Main"
    parts: Parts = defaultdict(list)
    for part in SPLITS:
        by_class = [read_pairs(lists / f"{class_name}_{part}.txt") for class_name in VOC]
        for image in by_class[0]:  # each list names all images of the part
            label = [int(answers[image]) for answers in by_class]
            parts[part].append((f"VOC2007/JPEGImages/{image}.jpg", label))
    return Lists(parts, VOC)


def read_cub(base: Path) -> Lists:
    """Read three lists whose lines are `NUMBER_OF_IMAGE VALUE`.

    The values are the image's file, its class (counted from 1), and 1 if it is for training.
    classes.txt has the names of the classes, such as `1 001.Black_footed_Albatross`, in order.
    """
    files = read_pairs(base / "images.txt")
    labels = read_pairs(base / "image_class_labels.txt")
    is_training = read_pairs(base / "train_test_split.txt")
    classes = read_pairs(base / "classes.txt")
    parts: Parts = defaultdict(list)
    for number, file in files.items():
        part = "trainval" if int(is_training[number]) else "test"
        parts[part].append((f"images/{file}", int(labels[number]) - 1))
    # 001.Black_footed_Albatross becomes Black footed Albatross
    names = [name.partition(".")[2].replace("_", " ") for name in classes.values()]
    return Lists(parts, names)


def read_pets(base: Path) -> Lists:
    """Read lines of `IMAGE CLASS SPECIES BREED`, such as `great_pyrenees_12 16 2 10`.

    Classes are counted from 1. Their names are taken from those of the images.
    """
    parts: Parts = defaultdict(list)
    classes = [f"class {k + 1}" for k in range(37)]  # a subset may have no image of some class
    for part in ("trainval", "test"):
        for name, number, _, _ in read_rows(base / f"annotations/{part}.txt", 4):
            label = int(number) - 1
            parts[part].append((f"images/{name}.jpg", label))
            # great_pyrenees_12 is image 12 of the class great pyrenees
            classes[label] = name.rpartition("_")[0].replace("_", " ")
    return Lists(parts, classes)


def read_flowers(base: Path) -> Lists:
    """Read setid.mat, the numbers of each part's images, and imagelabels.mat, each image's class.

    Images and classes are counted from 1.
    """
    from scipy.io import loadmat  # imported here: it is slow, and no other benchmark needs it

    numbers = loadmat(base / "setid.mat", squeeze_me=True)
    labels = loadmat(base / "imagelabels.mat", squeeze_me=True)["labels"]
    parts: Parts = defaultdict(list)
    for part, key in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        for number in numbers[key]:
            label = int(labels[number - 1]) - 1
            parts[part].append((f"jpg/image_{number:05d}.jpg", label))
    # The lists have no names of the 102 classes. Newer torchvisions know them; with an older one
    # they are numbered.
    numbered = [f"flower {k}" for k in range(1, 103)]
    return Lists(parts, getattr(Flowers102, "classes", numbered))


def read_aircraft(base: Path) -> Lists:
    """Read lines of `IMAGE VARIANT`, such as `1025794 707-320`.

    The variant is the class; its number is its line in variants.txt, counted from 0.
    """
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
        archive_includes_folder=False,
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
        archive_includes_folder=True,
        terms="Flickr's terms of use",
    ),
    "cub200": Benchmark(
        folder="CUB_200_2011",
        sizes=(4800, 1194, 5794),
        read=read_cub,
        archives={f"{CALTECH}/CUB_200_2011.tgz": "97eceeb196236b17998738112f37df78"},
        megabytes=1151,
        archive_includes_folder=True,
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
        archive_includes_folder=False,
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
        archive_includes_folder=False,
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
        archive_includes_folder=True,
        terms="non-commercial research",
    ),
}
# Functions that make a data set or pool which lies in no folder, from --data-seed. A script can add
# its own here, and their names to `config.NAMED`; then `cli.main()` takes the names. With --jobs it
# must do so outside of `if __name__ == "__main__"`, since each process imports the script anew.
MAKE_TASK: dict[str, Callable[[int], Task]] = {
    f"omniglot:{alphabet}": partial(omniglot.task, alphabet) for alphabet in ALPHABETS
}
MAKE_POOL: dict[str, Callable[[int], Pool]] = {"omniglot": lambda _: omniglot.pool()}

# ImageNet is the paper's pool. It needs a registration, so nothing here can download it.
IMAGENET_TERMS = "research, registered; train/ holds a folder a class"


def dataset_folders(root: Path) -> dict[str, Path]:
    """The folder of each benchmark and of ImageNet in `root` (--data-root), there or not."""
    paths = {name: root / benchmark.folder for name, benchmark in BENCHMARKS.items()}
    return paths | {"imagenet": root / "imagenet"}


def find_folder(name: str, root: Path) -> Path | None:
    """The folder of a dataset or pool; None if it has none, since a function makes the images.

    `name` is what --dataset or --pool is given: cub200, omniglot:Greek, folder:photos, or for a
    pool photos. `root` is --data-root. Raises ValueError, with a remedy, if the folder is not
    there; callers put the name before its text, by `as_usage_error`.
    """
    first_word, _, _ = name.partition(":")
    if first_word == "own":  # such as own:1f0c…, see `data.name_own_data`
        raise ValueError("was handed in from Python; hand it in again, task=... or pool=...")
    if name in MAKE_TASK or name in MAKE_POOL:
        return None
    named = dataset_folders(root)
    path = named[name] if name in named else Path(name.removeprefix("folder:"))
    if path.is_dir():
        return path
    if name in named:
        raise ValueError(f"is not in {path}, see --data-root; {how_to_get(name)}")
    raise ValueError(f"there is no such folder; {suggest(name, named)}")  # it may be misspelt


def how_to_get(name: str) -> str:
    """What to do if the folder of a benchmark or of ImageNet is missing."""
    if name == "imagenet":
        return (
            "148 GB, at image-net.org, registered. As --pool, any folder of images will do, such as"
            " the data set's own, though the paper's is ImageNet"
        )
    return f"`bisslight data download {name}` fetches {BENCHMARKS[name].megabytes:,} MB"


def find_pool_images(name: str, path: Path) -> list[Path]:
    """Find all images of a pool in the folder `path`; those of ImageNet lie in its train/.

    Raises ValueError if there are none.
    """
    folder = path / "train" if name == "imagenet" else path
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    files = find_images(folder)
    if not files:
        raise ValueError(f"no images in {folder}")
    return files


def load_benchmark(cfg: Data, base: Path) -> Task:
    """Load the benchmark that --dataset names, from its folder `base`.

    Raises UsageError if images are missing. With --partial, a subset is taken as it is, but train,
    val and test have to have an image each.
    """
    name = cfg.dataset
    official = BENCHMARKS[name].sizes
    parts, classes = read_lists(name, base, cfg.data_seed, cfg.split_file)
    splits = []
    for part in SPLITS:
        # Missing images are left out here, so that `sizes` shows how many there are.
        present = [(file, label) for file, label in parts[part] if (base / file).exists()]
        split = Split.from_entries(base, present)
        if name == "voc07" and cfg.voc_difficult == "positive":
            split.targets[split.targets == 0] = 1  # 0: of this class, it has only difficult objects
        splits.append(split)
    sizes = tuple(len(split.targets) for split in splits)
    is_whole = sizes == official
    is_usable_subset = cfg.partial and 0 not in sizes
    if not is_whole and not is_usable_subset:
        raise UsageError(
            f"--dataset {name}: {base}: train, validation and test have {sizes} images of "
            f"{official}; see `bisslight data check {name}`, or give --partial"
        )
    train, val, test = splits
    return Task(name, train, val, test, list(classes))


def read_lists(name: str, base: Path, data_seed: int = 0, split_file: Path | None = None) -> Lists:
    """Read what a benchmark's lists in the folder `base` say about train, val and test.

    CUB-200 and Pets list one part "trainval" for training. It is split here: val is a fifth of each
    class, see `data.holdout`, or what `split_file` says, see `split_by_file`. Raises UsageError.
    """
    benchmark = BENCHMARKS[name]
    with as_read_error(str(base), "its lists are damaged, download it again"):
        parts, classes = benchmark.read(base)
    unsplit = parts.pop("trainval", [])
    if split_file:
        full_size = sum(benchmark.sizes[:2])  # of train and val together
        parts["train"], parts["val"] = split_by_file(unsplit, full_size, split_file)
    elif unsplit:
        parts["train"], parts["val"] = holdout(unsplit, data_seed, "val")
    return Lists(parts, classes)


def split_by_file(entries: Entries, full_size: int, split_file: Path) -> tuple[Entries, Entries]:
    """Split `entries` into (train, val): the file has the positions of val's images among them.

    Positions are counted from 0, one on each line. `full_size` is how many entries the lists of the
    whole benchmark have. Raises UsageError where there are fewer, since in a subset a position
    would name another image, and where a line of the file is no position.
    """
    # Positions are compared as texts, such as "17": a line that is no number is none of them.
    val_positions = set(split_file.read_text().split())
    all_positions = {str(i) for i in range(full_size)}
    if len(entries) != full_size or not val_positions <= all_positions:
        raise UsageError(
            f"--split-file {split_file}: needs {full_size} listed images and numbers below "
            f"{full_size}; {len(entries)} are listed"
        )
    train = [entry for i, entry in enumerate(entries) if str(i) not in val_positions]
    val = [entry for i, entry in enumerate(entries) if str(i) in val_positions]
    return train, val
