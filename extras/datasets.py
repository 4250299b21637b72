"""`bisslight data`: whether datasets are there and whole, and where the benchmarks come from."""

import shutil
import tarfile
from pathlib import Path

from torchvision.datasets.utils import download_and_extract_archive, download_url

from config import Record
from data import decode_all, find_images, folder
from support.benchmarks import BENCHMARKS, FOLDERS, place_of, read_lists
from support.errors import RunError, UsageError, checking, nearest

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


def list_all(root: Path) -> list[Record]:
    """`bisslight data list`: whether a dataset's folder is there, and the terms of its use."""
    return [
        {"name": name, "state": "there" if (root / place).is_dir() else "missing"}
        | {"place": root / place, "terms": TERMS[name]}
        for name, place in FOLDERS.items()
    ]


def check(name: str, root: Path, partial: bool = False) -> Record:
    """Read a dataset as training does, open every image, and compare it with what is known.

    `folder:DIR` is read as by --dataset, DIR and imagenet as by --pool. `partial` allows gaps.
    """
    if name not in FOLDERS and not Path(name.removeprefix("folder:")).is_dir():
        raise UsageError(f"{name}: is no benchmark or folder; {nearest(name, FOLDERS)}")
    about, problems = Record(name=name), list[Record]()
    with checking(name):
        path = place_of(name, root) or Path(name)
        if name in BENCHMARKS:
            parts, _ = read_lists(name, path)
            listed = {file for part in parts.values() for file, _ in part}
            absent = {file for file in listed if not (path / file).exists()}
            images = [path / file for file in sorted(listed - absent)]
            about |= {"listed": len(listed), "absent": len(absent)}
            whole = sum(BENCHMARKS[name][0])
            if not partial and (absent or len(listed) != whole):
                lack = f"lists {len(listed)} images of {whole}, {len(absent)} of them are missing"
                problems.append({"problem": lack, "first": min(absent, default=None)})
        elif name.startswith("folder:"):
            task = folder(path, 0)
            images = [file for split in task[1:4] for file in split.images]
            about |= {"classes": len(task.classes)} | task.sizes()
        elif not (images := find_images(path / "train" if name == "imagenet" else path)):
            raise UsageError(f"--pool {name}: no images in {path}")
    problems += [{"problem": str(error)} for error in decode_all(images)]
    return about | {"images": len(images), "problems": problems}


def download(name: str, root: Path) -> Record:
    """Fetch a benchmark's archives and unpack them; its folder is there whole or not at all."""
    if name not in BENCHMARKS:
        known = nearest(name, BENCHMARKS)
        raise UsageError(f"{name}: cannot be downloaded; imagenet is at image-net.org, {known}")
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
