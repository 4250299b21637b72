"""Labelled datasets by name: the paper's six benchmarks (App. C.2.1) in their own layouts, quilts, and any folder.

    dtd voc07 cub200 pets flowers aircrafts     below --data-root, where torchvision would put them
    imagenet                                    ROOT/imagenet with train/ (and val/): the paper's pool, labels unused
    quilts, folder:PATH                         see `data`

A benchmark is read from its own list files, not through torchvision's classes: those hide the file names that
resumable sampling needs, number the classes of a subset anew, and refuse cut-down lists. The tests hold the readers to
torchvision's. Splits are the official ones; CUB-200 and Pets have no validation split, so a fifth of each class of
their training part is set aside by a hash of the names, or `--split-file` says which.
"""

import contextlib
import gzip
import lzma
import os
import re
import shutil
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from config import Data, RunError, UsageError, nearest
from data import Split, Task, fifth, find_images, folder, quilts, read_image, walk
from fetch import Report, digest, fetch, lock_of, locked

Entry = tuple[str, Any]  # (file below the dataset's folder, label): an int, or for VOC07 a list with 1, 0 or -1 a class


class Listing(NamedTuple):
    """What a benchmark's list files say. Parts are train, val, test, or trainval and test."""

    parts: dict[str, list[Entry]]
    classes: list[str]


class Benchmark(NamedTuple):
    """One of the paper's datasets."""

    folder: str  # below the data root
    sizes: tuple[int, int, int]  # train, validation, test as the paper uses them
    classes: int
    archives: tuple[tuple[str, str, str], ...]  # (URL, md5, where it is unpacked or put, below the data root)
    read: Callable[[Path], Listing]
    terms: str  # what its publishers say about using it
    files: dict[str, str] = {}  # md5 of list files, where known  # noqa: RUF012


# --- readers: folder -> Listing --------------------------------------------------------------------------------------


def rows(path: Path, columns: int) -> Iterator[list[str]]:
    """The whitespace-separated fields of a list file, comments left out (UsageError naming a bad line)."""
    try:
        lines = small(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        fields = line.strip().split(maxsplit=columns - 1)
        if line.startswith("#") or not fields:
            continue
        if len(fields) != columns:
            raise UsageError(f"{path}, line {number}: has {len(fields)} fields, {columns} are expected")
        yield fields


def small(path: Path) -> Path:
    """The path, unless it is no list of images by its kind or size (UsageError)."""
    if path.exists() and not path.is_file():  # a folder, a pipe, a device without end
        raise UsageError(f"{path}: is not a file, a list of images should be")
    if path.stat().st_size > 20_000_000:
        raise UsageError(f"{path}: is too large for a list of images, something else is in it")
    return path


def number(text: str, low: int, high: int, path: Path) -> int:
    """A whole number in a list file (UsageError naming the file)."""
    if not re.fullmatch("-?[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise UsageError(f"{path}: {text[:40]!r} should be a number from {low} to {high}")
    return int(text)


def read_dtd(root: Path) -> Listing:
    """Partition 1 of ten. Classes are the 47 official ones in alphabetical order, present or not."""
    parts = {}
    for part in ("train", "val", "test"):
        path = root / "dtd" / "labels" / f"{part}1.txt"
        names = [name for (name,) in rows(path, 1)]
        if unknown := [name for name in names if name.partition("/")[0] not in DTD]:
            raise UsageError(f"{path}: {unknown[0]!r} is not of one of the 47 classes")
        parts[part] = [(f"dtd/images/{name}", DTD.index(name.partition("/")[0])) for name in names]
    return Listing(parts, list(DTD))


def read_voc(root: Path) -> Listing:
    """Label 1: has such an object; -1: has none; 0: has only difficult ones. The devkit has one list a class."""
    sets = root / "VOC2007" / "ImageSets" / "Main"
    parts = {}
    for part in ("train", "val", "test"):
        names = [name for (name,) in rows(sets / f"{part}.txt", 1)]
        labels: dict[str, list[int]] = {name: [] for name in names}
        for k, kind in enumerate(VOC):
            path = sets / f"{kind}_{part}.txt"
            for name, label in rows(path, 2):
                if len(labels.get(name, [0] * 99)) != k:
                    raise UsageError(f"{path}: lists {name} twice, or it is not in {part}.txt")
                labels[name].append(number(label, -1, 1, path))
            if short := next((name for name in names if len(labels[name]) != k + 1), None):
                raise UsageError(f"{path}: does not list {short}")
        parts[part] = [(f"VOC2007/JPEGImages/{name}.jpg", labels[name]) for name in names]
    return Listing(parts, list(VOC))


def read_cub(root: Path) -> Listing:
    """images.txt, image_class_labels.txt and train_test_split.txt share their ids; classes count from 1, 1 is train."""
    split = {i: number(k, 0, 1, root / "train_test_split.txt") for i, k in rows(root / "train_test_split.txt", 2)}
    label = {
        i: number(k, 1, 200, root / "image_class_labels.txt") - 1 for i, k in rows(root / "image_class_labels.txt", 2)
    }
    parts: dict[str, list[Entry]] = {"trainval": [], "test": []}
    for i, name in rows(root / "images.txt", 2):
        if i not in split or i not in label:
            raise UsageError(
                f"{root / 'images.txt'}: image {i} is not in train_test_split.txt or image_class_labels.txt"
            )
        parts["trainval" if split[i] else "test"].append((f"images/{name}", label[i]))
    path = root / "classes.txt"
    names = {number(k, 1, 200, path): name.partition(".")[2].replace("_", " ") for k, name in rows(path, 2)}
    return Listing(parts, [names.get(k + 1, f"class {k + 1}") for k in range(200)])


def read_pets(root: Path) -> Listing:
    """Lines of `NAME CLASS SPECIES BREED`; classes count from 1."""
    parts: dict[str, list[Entry]] = {}
    names: dict[int, str] = {}
    for part in ("trainval", "test"):
        path = root / "annotations" / f"{part}.txt"
        entries = [(name, number(k, 1, 37, path) - 1) for name, k, _, _ in rows(path, 4)]
        names |= {k: name.rpartition("_")[0].replace("_", " ") for name, k in entries}
        parts[part] = [(f"images/{name}.jpg", k) for name, k in entries]
    return Listing(parts, [names.get(k, f"class {k + 1}") for k in range(37)])


def read_flowers(root: Path) -> Listing:
    """setid.mat lists image numbers a part, imagelabels.mat a label for each number; both count from 1."""
    from scipy.io import loadmat
    from torchvision.datasets import Flowers102

    try:
        labels = loadmat(small(root / "imagelabels.mat"), squeeze_me=True)["labels"]
        ids = loadmat(small(root / "setid.mat"), squeeze_me=True)
        numbers = {part: ids[key].tolist() for part, key in (("train", "trnid"), ("val", "valid"), ("test", "tstid"))}
        parts: dict[str, list[Entry]] = {
            part: [(f"jpg/image_{i:05d}.jpg", int(labels[i - 1]) - 1) for i in numbers[part]] for part in numbers
        }
        if any(not 0 <= label < 102 for entries in parts.values() for _, label in entries):
            raise ValueError("labels should be from 1 to 102")
        if any(not 1 <= i <= len(labels) for part in numbers.values() for i in part):
            raise ValueError(f"image numbers should be from 1 to {len(labels)}, as many as there are labels")
    except UsageError:
        raise
    except Exception as error:  # scipy raises anything from KeyError to zlib.error on damaged bytes
        raise UsageError(f"{root}: imagelabels.mat or setid.mat cannot be read ({error})") from error
    known = getattr(Flowers102, "classes", [])
    return Listing(parts, [*known] if len(known) == 102 else [f"flower {k + 1}" for k in range(102)])


def read_aircraft(root: Path) -> Listing:
    """Lines of `IMAGE VARIANT`; a variant's number is its place in variants.txt."""
    data = root / "data"
    variants = [name for (name,) in rows(data / "variants.txt", 1)]
    if len(variants) != 100:
        raise UsageError(f"{data / 'variants.txt'}: has {len(variants)} variants, 100 are expected")
    place = {name: k for k, name in enumerate(variants)}
    parts = {}
    for part in ("train", "val", "test"):
        path = data / f"images_variant_{part}.txt"
        entries = list(rows(path, 2))
        if unknown := [name for _, name in entries if name not in place]:
            raise UsageError(f"{path}: {unknown[0]!r} is not in variants.txt")
        parts[part] = [(f"data/images/{i}.jpg", place[name]) for i, name in entries]
    return Listing(parts, variants)


DTD_CLASSES = """
    banded blotchy braided bubbly bumpy chequered cobwebbed cracked crosshatched crystalline dotted fibrous flecked
    freckled frilly gauzy grid grooved honeycombed interlaced knitted lacelike lined marbled matted meshed paisley
    perforated pitted pleated polka-dotted porous potholed scaly smeared spiralled sprinkled stained stratified striped
    studded swirly veined waffled woven wrinkled zigzagged
"""
VOC_CLASSES = """
    aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep
    sofa train tvmonitor
"""
DTD, VOC = tuple(DTD_CLASSES.split()), tuple(VOC_CLASSES.split())
OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
CALTECH = "https://data.caltech.edu/records/65de6-vp158/files"
PASCAL = "https://thor.robots.ox.ac.uk/pascal/VOC/voc2007"

BENCHMARKS = {
    "dtd": Benchmark(
        "dtd", (1880, 1880, 1880), 47,
        ((f"{OXFORD}/dtd/download/dtd-r1.0.1.tar.gz", "fff73e5086ae6bdbea199a49dfb8a4c1", "dtd"),),
        read_dtd, "for research",
    ),
    "voc07": Benchmark(
        "VOCdevkit", (2501, 2510, 4952), 20,
        (
            (f"{PASCAL}/VOCtrainval_06-Nov-2007.tar", "c52e279531787c972589f7e41ab4ae64", ""),
            (f"{PASCAL}/VOCtest_06-Nov-2007.tar", "b6e924de25625d8de591ea690078ad9f", ""),
        ),
        read_voc, "Flickr's terms of use",
    ),
    "cub200": Benchmark(
        "CUB_200_2011", (4800, 1194, 5794), 200,
        ((f"{CALTECH}/CUB_200_2011.tgz", "97eceeb196236b17998738112f37df78", ""),),
        read_cub, "non-commercial research and teaching; images belong to their photographers",
        {
            "images.txt": "619b5c21b05008767b6d09160bdfba38",
            "image_class_labels.txt": "3d8c4b071f61d8491ca681918115d7f1",
            "train_test_split.txt": "f4e2dc5d3ef7e13b510f88d55c9d9807",
        },
    ),
    "pets": Benchmark(
        "oxford-iiit-pet", (2946, 734, 3669), 37,
        (
            (f"{OXFORD}/pets/data/images.tar.gz", "5c4f3ee8e5d25df40f4fd59a7f44e54c", "oxford-iiit-pet"),
            (f"{OXFORD}/pets/data/annotations.tar.gz", "95a8c909bbe2e81eed6a22bccdf3f68f", "oxford-iiit-pet"),
        ),
        read_pets, "CC BY-SA 4.0",
    ),
    "flowers": Benchmark(
        "flowers-102", (1020, 1020, 6149), 102,
        (
            (f"{OXFORD}/flowers/102/102flowers.tgz", "52808999861908f626f3c1f4e79d11fa", "flowers-102"),
            (f"{OXFORD}/flowers/102/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d", "flowers-102"),
            (f"{OXFORD}/flowers/102/setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c", "flowers-102"),
        ),
        read_flowers, "not stated; for research",
        {"imagelabels.mat": "e0620be6f572b9609742df49c70aed4d", "setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c"},
    ),
    "aircrafts": Benchmark(
        "fgvc-aircraft-2013b", (3334, 3333, 3333), 100,
        ((f"{OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz", "d4acdd33327262359767eeaa97a4f732", ""),),
        read_aircraft, "non-commercial research",
    ),
}  # fmt: skip
IMAGENET_SIZE = 1_281_167
NAMES = [*BENCHMARKS, "imagenet", "quilts", "folder:PATH"]
IMAGENET = "for non-commercial research, after registration at image-net.org; unpack it to {}, a folder a class"


# --- loading ---------------------------------------------------------------------------------------------------------


def load_task(data: Data, root: Path) -> Task:
    """The labelled dataset of these settings; benchmarks lie below `root` (UsageError where it is not usable)."""
    name = data.dataset
    if name not in BENCHMARKS and (data.partial or data.split_file):
        raise UsageError(f"--partial and --split-file are for {', '.join(BENCHMARKS)}, not for {name}")
    if name == "quilts":
        return quilts(data.data_seed)[1]
    if name.startswith("folder:"):
        return folder(Path(name.removeprefix("folder:")).expanduser(), data.data_seed)
    if name == "imagenet":
        if not (root / "imagenet").is_dir():
            raise UsageError(f"--dataset imagenet: {root / 'imagenet'} is not there; it is {IMAGENET.format('it')}")
        return folder(root / "imagenet", data.data_seed)
    if name in BENCHMARKS:
        return benchmark(data, root)
    hint = f"did you mean folder:{name}?" if Path(name).is_dir() else nearest(name, NAMES)
    raise UsageError(f"--dataset {name}: unknown dataset, {hint}")


def benchmark(data: Data, root: Path) -> Task:
    """One of the six. Without --partial it has to be whole: all listed, and every listed file there."""
    name, b = data.dataset, BENCHMARKS[data.dataset]
    base = root / b.folder
    if not base.is_dir():
        how = f"`bisslight data download {name}` fetches it, --data-root says where it is"
        raise UsageError(f"--dataset {name}: {base} is not there; {how}")
    listing = b.read(base)
    if (found := sizes(listing)) != (known := whole(b, listing)) and not data.partial:
        raise UsageError(
            f"--dataset {name}: {base} lists {told(found)}, the whole has {told(known)}; use --partial for a subset"
        )
    if not data.partial and (changed := unofficial(b, base)):
        raise UsageError(f"--dataset {name}: {changed[0]}; use --partial to take it as it is")
    there = present(base)
    missing = [file for entries in listing.parts.values() for file, _ in entries if file not in there]
    if missing and not data.partial:
        first = f"{len(missing)} images are missing, first {base / missing[0]}"
        raise UsageError(f"--dataset {name}: {first}; see `bisslight data check {name}`, or use --partial")
    parts = with_validation(listing.parts, b, data)
    splits = {}
    for part, entries in parts.items():
        kept = [(file, label) for file, label in entries if file in there]
        if not kept:
            raise UsageError(f"--dataset {name}: no image of {part} is in {base}")
        labels = torch.tensor([label for _, label in kept])
        if labels.ndim == 2 and data.voc_difficult == "positive":
            labels = labels + (labels == 0).long()
        splits[part] = Split([base / file for file, _ in kept], labels)
    return Task(name, splits["train"], splits["val"], splits["test"], listing.classes, missing=len(missing))


def sizes(listing: Listing) -> dict[str, int]:
    return {part: len(entries) for part, entries in listing.parts.items()}


def told(counts: dict[str, int]) -> str:
    """5994 trainval and 5794 test images."""
    return " and ".join(f"{count} {part}" for part, count in counts.items()) + " images"


def whole(b: Benchmark, listing: Listing) -> dict[str, int]:
    """The sizes that the benchmark's own parts should have."""
    train, val, test = b.sizes
    return (
        {"trainval": train + val, "test": test}
        if "trainval" in listing.parts
        else {"train": train, "val": val, "test": test}
    )


def unofficial(b: Benchmark, base: Path) -> list[str]:
    """List files whose md5 is not the official one, where that is known."""
    return [
        f"{base / f}: is not the official file (md5)" for f, md5 in b.files.items() if digest(base / f, "md5") != md5
    ]


def present(base: Path) -> set[str]:
    """All files below a dataset's folder, by their path relative to it: one walk instead of a stat a file."""
    return {
        os.path.relpath(os.path.join(at, name), base).replace(os.sep, "/")  # noqa: PTH118
        for at, _, names in walk(base)
        for name in names
    }


def with_validation(parts: dict[str, list[Entry]], b: Benchmark, data: Data) -> dict[str, list[Entry]]:
    """train, val and test; where there is no official val, a fifth of each class, or what --split-file says.

    The file is of the original work: positions in the official training part, from 0, one a line.
    """
    if "trainval" not in parts:
        if data.split_file:
            raise UsageError(f"--split-file: {data.dataset} has an official validation split, leave the option out")
        return parts
    listed = parts["trainval"]
    if data.split_file is None:
        by_class: dict[Any, list[str]] = {}
        for file, label in listed:
            by_class.setdefault(label, []).append(file)
        chosen = {file for files in by_class.values() for file in fifth(files, data.data_seed, "val")}
    else:
        path = data.split_file
        known = b.sizes[0] + b.sizes[1]
        if len(listed) != known:
            raise UsageError(
                f"--split-file {path}: counts in the whole training part of {known} images, {len(listed)} are listed"
            )
        positions = [number(text, 0, known - 1, path) for (text,) in rows(path, 1)]
        if len(set(positions)) != len(positions) or not 0 < len(positions) < known / 2:
            raise UsageError(
                f"--split-file {path}: should hold each validation image's position once, has {len(positions)}"
            )
        chosen = {listed[i][0] for i in positions}
    train = [entry for entry in listed if entry[0] not in chosen]
    val = [entry for entry in listed if entry[0] in chosen]
    return {"train": train, "val": val, "test": parts["test"]}


def pool_path(name: str, root: Path) -> Path | None:
    """Where a pool by name is: imagenet is the training part, or the folder itself; None for a name it is not."""
    if name != "imagenet":
        return None
    base = root / "imagenet"
    where = base / "train" if (base / "train").is_dir() else base
    if not where.is_dir() or (where == base and (base / "val").is_dir()):
        what = f"the paper's pool is ImageNet-1k, {IMAGENET.format(base / 'train')}"
        raise UsageError(f"--pool imagenet: {where} is not there; {what}. Or give --pool DIR, any folder of images")
    return where


# --- data list, check, download --------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """What `data check` found."""

    name: str
    problems: list[str]
    images: int
    listed: dict[str, int]


def check(name: str, root: Path, report: Report, partial: bool = False) -> Checked:
    """Open every image of a benchmark, or of a folder of images, and list all that is wrong with it.

    `partial`: a subset is as it should be, so that only images that do not open are wrong.
    """
    problems: list[str] = []
    if name in BENCHMARKS:
        b, base = BENCHMARKS[name], root / BENCHMARKS[name].folder
        if not base.is_dir():
            raise UsageError(f"{base} is not there; `bisslight data download {name}` fetches it")
        listing = b.read(base)
        problems += [] if partial else unofficial(b, base)
        if (found := sizes(listing)) != (known := whole(b, listing)) and not partial:
            problems.append(f"{base}: lists {told(found)}, the whole has {told(known)}")
        there = present(base) if partial else None  # of a subset, only what is there
        listed = (file for entries in listing.parts.values() for file, _ in entries)
        files = [base / file for file in listed if there is None or file in there]
        twice = [file for file, count in Counter(files).items() if count > 1]
        problems += [f"{file}: is listed twice" for file in twice]
    else:
        if name == "quilts":
            raise UsageError("quilts: are drawn by the program, there is nothing to check")
        base = pool_path(name, root) or Path(name.removeprefix("folder:")).expanduser()
        if not base.is_dir():
            raise UsageError(f"{name}: is no such dataset or folder; {nearest(name, NAMES)}")
        files, found = find_images(base), {}
        if not files or (name == "imagenet" and len(files) != IMAGENET_SIZE):
            whole_ = f", the whole has {IMAGENET_SIZE}" if name == "imagenet" else ""
            problems.append(f"{base}: holds {len(files)} images{whole_}")
    problems += faults(files, report)
    return Checked(name, problems, len(files), found)


def faults(files: Sequence[Path], report: Report) -> list[str]:
    """What is wrong with those image files that do not decode to their end."""
    found: list[str] = []
    step = max(64, min(4096, len(files) // 20))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # decoding releases the interpreter
        for at in range(0, len(files), step):
            found += [fault for fault in pool.map(fault_of, files[at : at + step]) if fault]
            report("check", min(at + step, len(files)), len(files), f"{len(found)} problems")
    return found


def fault_of(file: Path) -> str | None:
    """What is wrong with an image file, None if it decodes to its end."""
    if not file.exists():
        return f"{file}: is missing"
    try:
        read_image(file)
    except RunError as error:
        return str(error)
    return None


def download(name: str, root: Path, report: Report) -> Path:
    """Fetch a benchmark's archives and unpack them below the data root; what is there is whole, or is not there."""
    if name == "imagenet":
        raise UsageError(
            f"imagenet: cannot be downloaded by a program, it is {IMAGENET.format(root / 'imagenet/train')}"
        )
    if name not in BENCHMARKS:
        raise UsageError(f"{name}: unknown dataset, {nearest(name, iter(BENCHMARKS))}")
    b = BENCHMARKS[name]
    target, work = root / b.folder, root / f".{name}.download"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(work):  # another process may be at it
            if target.exists():
                how = f"`bisslight data check {name}` looks at it; move it away to fetch it anew"
                raise UsageError(f"{target} is there already, {how}")
            install(b, target, work, report)
        lock_of(work).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{error.filename or root}: {error.strerror or error}; run again to go on") from error
    return target


def install(b: Benchmark, target: Path, work: Path, report: Report) -> None:
    """Fetch into `work`, unpack there, and move the whole to `target` last."""
    unpacked = work / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    for url, md5, where in b.archives:
        archive = work / url.rpartition("/")[2]
        fetch(url, archive, report, md5=md5)
        (unpacked / where).mkdir(parents=True, exist_ok=True)
        report("unpack", 1, 1, archive.name)
        unpack(archive, unpacked / where)
    if not (unpacked / b.folder).is_dir():
        raise RunError(f"{target.name}: its archives hold no folder {b.folder}")
    (unpacked / b.folder).rename(target)
    shutil.rmtree(work, ignore_errors=True)


def unpack(archive: Path, to: Path) -> None:
    """Unpack a tar below `to`, or put any other file there. Paths that lead elsewhere are refused (RunError)."""
    try:
        if not tarfile.is_tarfile(archive):
            shutil.copy(archive, to)
            return
        with tarfile.open(archive) as tar:
            tar.extractall(to, filter="data")  # PEP 706: no absolute paths, no `..`, no links out, no devices
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise RunError(f"{archive}: cannot be unpacked safely ({error}); nothing was installed") from error


def state_of(name: str, root: Path) -> tuple[str, str]:
    """(there, partial, missing or damaged; detail) of a dataset by name, without opening its images."""
    if name == "imagenet":
        with contextlib.suppress(UsageError, StopIteration):
            where = pool_path(name, root)
            assert where is not None
            next(where.iterdir())
            return "there", f"{where}; `bisslight data check imagenet` counts"
        return "missing", IMAGENET.format(root / "imagenet/train")
    b = BENCHMARKS[name]
    if not (root / b.folder).is_dir():
        return "missing", f"bisslight data download {name}"
    try:
        task = benchmark(Data(dataset=name, partial=True), root)
        counts = tuple(len(split.targets) for split in (task.train, task.val, task.test))
        kind: Literal["there", "partial"] = "there" if sum(counts) == sum(b.sizes) else "partial"
        digest = task.fingerprint()[:12]  # of lists and labels, as runs record it
        return kind, f"{root / b.folder}: {counts[0]} / {counts[1]} / {counts[2]} images, data_sha256 {digest}"
    except UsageError as error:
        return "damaged", str(error)
