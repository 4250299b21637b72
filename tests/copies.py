"""Small drawn copies of the benchmarks, laid out as the real ones."""

import hashlib
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from data import SPLITS
from support.benchmarks import BENCHMARKS, VOC_CLASSES


def picture(path: Path) -> None:
    """An image that is like no other of another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = hashlib.shake_256(path.name.encode()).digest(20 * 24 * 3)
    Image.frombytes("RGB", (20, 24), pixels).save(path)


def lines(path: Path, *text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n")


def make_dtd(base: Path) -> list[str]:
    names = [f"{kind}/{kind}_{i}.jpg" for kind in ("polka-dotted", "banded") for i in range(9)]
    for k, part in enumerate(SPLITS):
        lines(base / f"dtd/labels/{part}1.txt", *names[k::3])
    return names


def make_voc(base: Path) -> list[str]:
    """Image i of a part has object i; object i + 4 is a difficult one in it."""
    for part, first in zip(SPLITS, (0, 10, 20), strict=True):
        names = [f"{first + i:06d}" for i in range(4)]
        for k, kind in enumerate(VOC_CLASSES):
            labels = [1 if k == i else 0 if k == i + 4 else -1 for i in range(4)]
            text = [f"{n} {v:2d}" for n, v in zip(names, labels, strict=True)]
            lines(base / f"VOC2007/ImageSets/Main/{kind}_{part}.txt", *text)
    return [f"{first + i:06d}.jpg" for first in (0, 10, 20) for i in range(4)]


def make_cub(base: Path) -> list[str]:
    names = [f"{k:03d}.Bird_{k}/Bird_{k}_{i}.jpg" for k in (3, 7) for i in range(8)]
    lines(base / "images.txt", *(f"{i} {name}" for i, name in enumerate(names, 1)))
    labels = [f"{i} {int(name[:3])}" for i, name in enumerate(names, 1)]
    lines(base / "image_class_labels.txt", *labels)
    lines(base / "train_test_split.txt", *(f"{i} {i % 4 != 0:d}" for i in range(1, 17)))
    lines(base / "classes.txt", *(f"{k} {k:03d}.Bird_{k}" for k in range(1, 201)))
    return names


def make_pets(base: Path) -> list[str]:
    names = [(f"great_cat_{i}", 2) for i in range(8)] + [(f"Pug_{i}", 30) for i in range(8)]
    for part, odd in (("trainval", 0), ("test", 1)):
        lines(base / f"annotations/{part}.txt", *(f"{n} {k} 1 1" for n, k in names[odd::2]))
    return [f"{name}.jpg" for name, _ in names]


def make_flowers(base: Path) -> list[str]:
    base.mkdir(parents=True)
    ids = np.arange(1, 25)[None]
    savemat(base / "imagelabels.mat", {"labels": ids % 6 + 97})
    savemat(base / "setid.mat", {"trnid": ids[:, :6], "valid": ids[:, 6:12], "tstid": ids[:, 12:]})
    return [f"image_{i:05d}.jpg" for i in range(1, 25)]


def make_aircraft(base: Path) -> list[str]:
    lines(base / "data/variants.txt", *(f"Falcon {k}" for k in range(100)))
    for p, part in enumerate((*SPLITS, "trainval")):
        names = [f"{1000 * (p % 3) + i:07d}" for i in range(4)]
        text = [f"{name} Falcon {i % 2 * 50}" for i, name in enumerate(names)]
        lines(base / f"data/images_variant_{part}.txt", *text)
    return [f"{1000 * p + i:07d}.jpg" for p in range(3) for i in range(4)]


MAKE = {"dtd": make_dtd, "voc07": make_voc, "cub200": make_cub, "pets": make_pets,
        "flowers": make_flowers, "aircrafts": make_aircraft}  # fmt: skip
IMAGES = {"dtd": "dtd/images", "voc07": "VOC2007/JPEGImages", "cub200": "images", "pets": "images",
          "flowers": "jpg", "aircrafts": "data/images"}  # fmt: skip


def make(name: str, root: Path) -> Path:
    """Draw a small copy of a benchmark; its own folder."""
    base = root / BENCHMARKS[name].folder
    for file in MAKE[name](base):
        picture(base / IMAGES[name] / file)
    return base
