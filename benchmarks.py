"""Datasets by name: the paper's six benchmarks (App. C.2.1), ImageNet, folders and quilts.

    load_task, load_pool         a labelled task D^D, an unlabelled pool D^P
    list_all, check, download    what is there, what is wrong with it, how to get it

The benchmarks lie below the data root as torchvision lays them out. They are read from their own
lists, since torchvision's classes number the classes of a subset anew and refuse shorter lists (the
tests compare the two). Splits are the official ones. CUB-200 and Pets have no validation part: it
is a fifth of each class of their training part, or what `split_file` says.
"""

import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import FOLDERS, Data, RunError, UsageError, nearest, place_of
from data import Entry, Pool, Split, Task, decode_all, find_images, folder, holdout
from quilts import quilts

Parts = dict[str, list[Entry]]  # train, val, test, or trainval, test; a label of VOC07 is a list
Listing = tuple[Parts, Sequence[str]]  # with the names of the classes
Row = dict[str, Any]
PARTS = ("train", "val", "test")


class Benchmark(NamedTuple):
    """One of the paper's datasets."""

    images: str  # the folder of its images, below its own
    sizes: tuple[int, int, int]  # train, validation, test, as the paper uses them
    classes: int
    read: Callable[[Path], Listing]
    terms: str  # what its publishers say about using it
    archives: dict[str, str]  # URL -> md5
    within: bool = False  # whether the archives lack its own folder


# --- readers of list files --------------------------------------------------------------------


def rows(path: Path, columns: int) -> list[list[str]]:
    """The fields of each line; the last one may hold blanks. Comments are left out."""
    lines = [line.strip() for line in path.read_text().splitlines() if not line.startswith("#")]
    fields = [line.split(maxsplit=columns - 1) for line in lines if line]
    if bad := [row for row in fields if len(row) != columns]:
        raise ValueError(f"{path.name}: {' '.join(bad[0])!r} should have {columns} fields")
    return fields


def read_dtd(base: Path) -> Listing:
    """Partition 1 of ten. Classes are the 47 official ones in alphabetical order."""
    lists = {part: rows(base / f"dtd/labels/{part}1.txt", 1) for part in PARTS}
    place = {kind: k for k, kind in enumerate(DTD)}
    return {
        p: [(name, place[name.partition("/")[0]]) for [name] in x] for p, x in lists.items()
    }, DTD


def read_voc(base: Path) -> Listing:
    """Label 1: has such an object; -1: has none; 0: has only difficult ones. A list a class."""
    sets, parts = base / "VOC2007/ImageSets/Main", {}
    for part in PARTS:
        columns = [dict(rows(sets / f"{kind}_{part}.txt", 2)) for kind in VOC]
        names = [name for [name] in rows(sets / f"{part}.txt", 1)]
        parts[part] = [(f"{x}.jpg", [int(column[x]) for column in columns]) for x in names]
    return parts, VOC


def read_cub(base: Path) -> Listing:
    """Files that share their ids; classes count from 1, train_test_split has 1 for training."""
    names = ("images", "image_class_labels", "train_test_split", "classes")
    file, label, split, kinds = (dict(rows(base / f"{name}.txt", 2)) for name in names)
    parts: Parts = {"trainval": [], "test": []}
    for i, name in file.items():
        parts[{"1": "trainval", "0": "test"}[split[i]]].append((name, int(label[i]) - 1))
    classes = [kinds.get(str(k), f".class {k}").partition(".")[2] for k in range(1, 201)]
    return parts, [name.replace("_", " ") for name in classes]


def read_pets(base: Path) -> Listing:
    """Lines of `NAME CLASS SPECIES BREED`; classes count from 1."""
    lists = {part: rows(base / f"annotations/{part}.txt", 4) for part in ("trainval", "test")}
    parts = {p: [(f"{x}.jpg", int(k) - 1) for x, k, _, _ in lines] for p, lines in lists.items()}
    names = {k: x.rpartition("_")[0].replace("_", " ") for p in parts.values() for x, k in p}
    return parts, [names.get(k, f"class {k + 1}") for k in range(37)]


def read_flowers(base: Path) -> Listing:
    """setid.mat lists the images of a part, imagelabels.mat has each one's class; both from 1."""
    from scipy.io import loadmat
    from torchvision.datasets import Flowers102

    ids, found = (loadmat(base / f"{x}.mat", squeeze_me=True) for x in ("setid", "imagelabels"))
    label = dict(enumerate(found["labels"].tolist(), 1))
    keys = zip(PARTS, ("trnid", "valid", "tstid"), strict=True)
    parts = {
        p: [(f"image_{i:05d}.jpg", label[i] - 1) for i in ids[key].tolist()] for p, key in keys
    }
    return parts, getattr(Flowers102, "classes", [f"flower {k}" for k in range(1, 103)])


def read_aircraft(base: Path) -> Listing:
    """Lines of `IMAGE VARIANT`; a variant's number is its place in variants.txt."""
    variants = [name for [name] in rows(base / "data/variants.txt", 1)]
    place = {name: k for k, name in enumerate(variants)}
    lists = {part: rows(base / f"data/images_variant_{part}.txt", 2) for part in PARTS}
    return {p: [(f"{i}.jpg", place[name]) for i, name in x] for p, x in lists.items()}, variants


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
        "dtd/images", (1880, 1880, 1880), 47, read_dtd, "for research",
        {f"{OXFORD}/dtd/download/dtd-r1.0.1.tar.gz": "fff73e5086ae6bdbea199a49dfb8a4c1"}, True,
    ),
    "voc07": Benchmark(
        "VOC2007/JPEGImages", (2501, 2510, 4952), 20, read_voc, "Flickr's terms of use",
        {f"{PASCAL}/VOCtrainval_06-Nov-2007.tar": "c52e279531787c972589f7e41ab4ae64",
         f"{PASCAL}/VOCtest_06-Nov-2007.tar": "b6e924de25625d8de591ea690078ad9f"},
    ),
    "cub200": Benchmark(
        "images", (4800, 1194, 5794), 200, read_cub, "non-commercial research and teaching",
        {f"{CALTECH}/CUB_200_2011.tgz": "97eceeb196236b17998738112f37df78"},
    ),
    "pets": Benchmark(
        "images", (2946, 734, 3669), 37, read_pets, "CC BY-SA 4.0",
        {f"{OXFORD}/pets/data/images.tar.gz": "5c4f3ee8e5d25df40f4fd59a7f44e54c",
         f"{OXFORD}/pets/data/annotations.tar.gz": "95a8c909bbe2e81eed6a22bccdf3f68f"}, True,
    ),
    "flowers": Benchmark(
        "jpg", (1020, 1020, 6149), 102, read_flowers, "not stated; for research",
        {f"{OXFORD}/flowers/102/102flowers.tgz": "52808999861908f626f3c1f4e79d11fa",
         f"{OXFORD}/flowers/102/imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
         f"{OXFORD}/flowers/102/setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c"}, True,
    ),
    "aircrafts": Benchmark(
        "data/images", (3334, 3333, 3333), 100, read_aircraft, "non-commercial research",
        {f"{OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz":
         "d4acdd33327262359767eeaa97a4f732"},
    ),
}  # fmt: skip
IMAGENET_SIZE = 1_281_167


# --- loading ----------------------------------------------------------------------------------


def load_task(cfg: Data, root: Path) -> Task:
    """The labelled dataset of these settings (UsageError; ValueError for a folder)."""
    name, path = cfg.dataset, place_of(cfg.dataset, root)
    if path is None:
        return quilts(cfg.data_seed)[1]
    if name not in BENCHMARKS:
        return folder(path, cfg.data_seed)
    parts, classes = read_lists(name, path)
    there, parts = present(name, path), with_validation(parts, cfg)
    kept = {p: [entry for entry in parts[p] if entry[0] in there] for p in PARTS}
    sizes, official = tuple(len(kept[part]) for part in PARTS), BENCHMARKS[name].sizes
    if not all(sizes) or (sizes != official and not cfg.partial):
        what = f"train, validation and test have {sizes} images of {official}"
        how = f"`bisslight data check {name}` says why, --partial takes what is there of all three"
        raise UsageError(f"--dataset {name}: {path}: {what}; {how}")
    train, val, test = (Split.below(path, kept[part]) for part in PARTS)
    if name == "voc07" and cfg.voc_difficult == "positive":
        train, val, test = (Split(x, y + (y == 0).long()) for x, y in (train, val, test))
    missing = sum(map(len, parts.values())) - sum(sizes)
    return Task(name, train, val, test, [*classes], missing=missing)


def load_pool(name: str, root: Path, seed: int) -> Pool:
    """Unlabelled images: quilts, ImageNet's training part, or any folder (UsageError)."""
    path = place_of(name, root)
    if path is None:
        return quilts(seed)[0]
    path = path / "train" if name == "imagenet" else path
    files = find_images(path)
    if not files:
        raise UsageError(f"--pool {name}: no images in {path}")
    return Pool(files)


def read_lists(name: str, base: Path) -> Listing:
    """What a benchmark's lists say; files are told below its folder `base` (UsageError)."""
    b = BENCHMARKS[name]
    try:
        parts, classes = b.read(base)
        for entries in parts.values():
            labels = torch.tensor([label for _, label in entries])
            low, high = (-1, 1) if labels.ndim == 2 else (0, b.classes - 1)
            if len(classes) != b.classes or labels.min() < low or labels.max() > high:
                raise ValueError(f"{len(classes)} classes, or a label not from {low} to {high}")
    except Exception as error:  # scipy raises anything from KeyError to zlib.error
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{base}: its lists cannot be read ({why}); download it again") from error
    return {part: [(f"{b.images}/{x}", k) for x, k in parts[part]] for part in parts}, classes


def present(name: str, base: Path) -> set[str]:
    """The image files of a benchmark that are there, told below its folder `base`."""
    images = base / BENCHMARKS[name].images
    return {file.relative_to(base).as_posix() for file in find_images(images)}


def with_validation(parts: Parts, cfg: Data) -> Parts:
    """train, val and test; a missing val is a fifth of each class, or what the split file says.

    That file is of the original work: positions in the official training part, from 0, one a line.
    """
    if "trainval" not in parts and cfg.split_file is None:
        return parts
    if "trainval" not in parts:
        raise UsageError(f"--split-file: {cfg.dataset} has an official validation part")
    known = parts["trainval"]
    train, val = holdout(known, cfg.data_seed, "val")
    if cfg.split_file is not None:
        lines = cfg.split_file.read_text().split()
        chosen = {int(line) for line in lines if line.isdecimal()}
        whole = sum(BENCHMARKS[cfg.dataset].sizes[:2])
        if not len(lines) == len(chosen) < whole == len(known) or max(chosen) >= whole:
            needs = f"needs numbers below {whole}, none twice, and all {whole} training images"
            raise UsageError(f"--split-file {cfg.split_file}: {needs} listed, not {len(known)}")
        train = [entry for i, entry in enumerate(known) if i not in chosen]
        val = [entry for i, entry in enumerate(known) if i in chosen]
    return {"train": train, "val": val, "test": parts["test"]}


# --- list, check, download --------------------------------------------------------------------


def list_all(root: Path) -> list[Row]:
    """Each dataset with its sizes and terms, whether it is there, and where or how to get it."""
    found: list[Row] = []
    for name, b in BENCHMARKS.items():
        place, state, detail = root / FOLDERS[name], "missing", f"bisslight data download {name}"
        if place.is_dir():
            try:
                task = load_task(Data(dataset=name, partial=True), root)
                sizes = tuple(len(split.targets) for split in (task.train, task.val, task.test))
                state = "there" if sizes == b.sizes else f"partial: {sizes}"
                detail = f"{place}, data_sha256 {task.fingerprint()[:12]}"
            except UsageError as error:
                state, detail = "damaged", str(error)
        row: Row = {"name": name, "classes": b.classes, **dict(zip(PARTS, b.sizes, strict=True))}
        found.append(row | {"state": state, "detail": detail, "terms": b.terms})
    place = root / "imagenet/train"
    state = "there" if place.is_dir() else "missing"
    row = {"name": "imagenet", "classes": 1000, "train": IMAGENET_SIZE, "state": state}
    return [*found, row | {"detail": f"{place}, a folder a class", "terms": "research, registered"}]


def check(name: str, root: Path, partial: bool = False) -> Row:
    """Read a dataset as training does, open every image, and compare it with what is known.

    Args:
        name: a benchmark, folder:DIR as `--dataset` reads it, imagenet or DIR as `--pool` does.
        partial: a subset is as it should be; what it lacks is counted, but no problem.
    """
    if name not in FOLDERS and not Path(name.removeprefix("folder:")).is_dir():
        raise UsageError(f"{name}: is no benchmark or folder; {nearest(name, FOLDERS)}")
    path = place_of(name, root) or root
    result: Row = {"name": name, "path": str(path)}
    problems: list[Row] = []
    if name in BENCHMARKS:
        parts, _ = read_lists(name, path)
        entries = [entry for part in parts.values() for entry in part]
        listed, there = dict(entries), present(name, path)
        absent = sorted(listed.keys() - there)
        images = [path / file for file in sorted(listed.keys() & there)]
        counts = {"listed": len(entries), "absent": len(absent)}
        result |= counts | {"in_no_list": len(there - listed.keys())}
        if absent and not partial:
            problems.append(problem("is listed, but missing", absent))
        whole = sum(BENCHMARKS[name].sizes)
        if len(listed) < len(entries) or (len(listed) != whole and not partial):
            what = f"lists {len(entries)} images, {len(listed)} different ones, of {whole}"
            problems.append(problem(what, [path]))
        problems += disagreements(path, entries) if name == "voc07" else []
    elif name.startswith("folder:"):
        task = folder(path, 0)
        splits = dict(zip(PARTS, (task.train, task.val, task.test), strict=True))
        images = [file for split in splits.values() for file in split.images]
        result |= {"classes": len(task.classes)} | {p: len(s.targets) for p, s in splits.items()}
    else:
        images = [*load_pool(name, root, 0).images]
        if name == "imagenet" and len(images) != IMAGENET_SIZE:
            problems.append(problem(f"has {len(images)} images, not {IMAGENET_SIZE}", [path]))
    problems += [{"problem": str(error), "files": 1} for error in decode_all(images)]
    return result | {"images": len(images), "problems": problems}


def problem(what: str, files: Sequence[str | Path]) -> Row:
    """A row of what `check` finds: the files that have one and the same problem."""
    return {"problem": what, "files": len(files), "first": str(files[0])}


def disagreements(base: Path, entries: Sequence[Entry]) -> list[Row]:
    """VOC07's classes whose lists say something else than the annotations of the images."""
    pattern = r"<object>\s*<name>(\w+)</name>.*?<difficult>(\d)</difficult>"
    wrong: dict[str, list[Path]] = {}
    for file, labels in entries:
        annotation = base / "VOC2007/Annotations" / Path(file).with_suffix(".xml").name
        if annotation.exists():
            objects = {*re.findall(pattern, annotation.read_text(), re.DOTALL)}
            for kind, label in zip(VOC, labels, strict=True):
                if label != (1 if (kind, "0") in objects else 0 if (kind, "1") in objects else -1):
                    wrong.setdefault(kind, []).append(annotation)
    return [problem(f"list of {kind} differs from this", x) for kind, x in wrong.items()]


def download(name: str, root: Path) -> Row:
    """Fetch a benchmark's archives and unpack them; its folder is there whole or not at all."""
    from torchvision.datasets.utils import download_and_extract_archive, download_url

    if name not in BENCHMARKS:
        how = "register at image-net.org" if name == "imagenet" else nearest(name, BENCHMARKS)
        raise UsageError(f"{name}: cannot be downloaded by this program; {how}")
    b, target, work = BENCHMARKS[name], root / FOLDERS[name], root / f".{name}.download"
    if target.exists():
        raise UsageError(f"{target}: is there already, see `bisslight data check {name}`")
    into = work / "unpacked" / FOLDERS[name] if b.within else work / "unpacked"
    for url, md5 in b.archives.items():
        try:
            if url.endswith(".mat"):
                download_url(url, into, md5=md5)
            else:
                download_and_extract_archive(url, work, into, md5=md5)
        except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
            how = f"`cd {work} && curl -C - -O {url}` goes on; then give this command again"
            raise RunError(f"{url}: {error}; {how}") from error
    (work / "unpacked" / FOLDERS[name]).rename(target)
    shutil.rmtree(work)
    return {"name": name, "path": str(target), "terms": b.terms}
