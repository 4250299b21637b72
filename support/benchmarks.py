"""The paper's six benchmarks (App. C.2.1) in the official splits, laid out as by torchvision.

They are read from their own lists, since torchvision numbers the classes of a subset anew.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchvision.datasets import Flowers102

from data import PARTS, Entries, Split, Task, holdout
from support.errors import UsageError, checking

FOLDERS = {  # where the benchmarks are below --data-root
    "dtd": "dtd", "voc07": "VOCdevkit", "cub200": "CUB_200_2011", "pets": "oxford-iiit-pet",
    "flowers": "flowers-102", "aircrafts": "fgvc-aircraft-2013b", "imagenet": "imagenet",
}  # fmt: skip


def place_of(name: str, root: Path) -> Path | None:
    """Where a dataset, pool or file lies; None for what is drawn or handed in (ValueError)."""
    if name == "quilts" or name.partition(":")[0] == "own":
        return None
    path = root / FOLDERS[name] if name in FOLDERS else Path(name.removeprefix("folder:"))
    if not path.exists():
        get = "name another --pool" if name == "imagenet" else f"`bisslight data download {name}`"
        more = f" {path}; {get}, or give the --data-root where it is" if name in FOLDERS else ""
        raise ValueError(f"there is no such folder or file{more}")
    return path


Listing = tuple[list[tuple[str, str, Any]], Sequence[str]]  # (part, file, label), and the classes


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
BENCHMARKS = {  # numbers of train, validation (CUB, Pets: our split), test images; list reader
    "dtd": ((1880, 1880, 1880), read_dtd),
    "voc07": ((2501, 2510, 4952), read_voc),
    "cub200": ((4800, 1194, 5794), read_cub),
    "pets": ((2946, 734, 3669), read_pets),
    "flowers": ((1020, 1020, 6149), read_flowers),
    "aircrafts": ((3334, 3333, 3333), read_aircraft),
}


def load_task(cfg: Any, base: Path) -> Task:
    """The benchmark of these settings, which lies in the folder `base` (UsageError)."""
    name = cfg.dataset
    parts, classes = read_lists(name, base, cfg.data_seed, cfg.split_file)
    there = [[entry for entry in parts[p] if (base / entry[0]).exists()] for p in PARTS]
    sizes, official = tuple(map(len, there)), BENCHMARKS[name][0]
    if not all(sizes) or (sizes != official and not cfg.partial):
        raise UsageError(
            f"--dataset {name}: {base}: train, validation and test have {sizes} images of "
            f"{official}; see `bisslight data check {name}`, or give --partial"
        )
    train, val, test = (Split.below(base, entries) for entries in there)
    if name == "voc07" and cfg.voc_difficult == "positive":
        train, val, test = (Split(x, y + (y == 0).long()) for x, y in (train, val, test))
    return Task(name, train, val, test, [*classes])


def read_lists(
    name: str, base: Path, data_seed: int = 0, file: Path | None = None
) -> tuple[dict[str, Entries], Sequence[str]]:
    """What a benchmark's lists say of train, val and test, and its classes (UsageError).

    CUB-200 and Pets validate on a fifth of each class of their training part, or on a split file's
    positions there, one on each line, counted from 0.
    """
    sizes, read = BENCHMARKS[name]
    with checking(str(base), "its lists are damaged, download it again"):
        found, classes = read(base)
    parts = {
        p: [(file, label) for part, file, label in found if part == p] for p in (*PARTS, "trainval")
    }
    known = parts.pop("trainval")
    if known:
        parts["train"], parts["val"] = holdout(known, data_seed, "val")
    if file:
        chosen, whole = {*file.read_text().split()}, sum(sizes[:2])
        if len(known) != whole or not chosen < {str(i) for i in range(whole)}:
            raise UsageError(
                f"--split-file {file}: is for cub200 and pets, needs {whole} listed images and "
                f"numbers below {whole}; {len(known)} are listed"
            )
        parts["train"] = [entry for i, entry in enumerate(known) if str(i) not in chosen]
        parts["val"] = [entry for i, entry in enumerate(known) if str(i) in chosen]
    return parts, classes
