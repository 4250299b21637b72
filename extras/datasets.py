"""`bisslight data`: which datasets are there, what is wrong with one, how to get it."""

import shutil
import tarfile
from pathlib import Path
from typing import Any

from torchvision.datasets.utils import download_and_extract_archive, download_url

from benchmarks import BENCHMARKS, load_pool, read_lists
from config import FOLDERS, RunError, UsageError, nearest, place_of
from data import decode_all, folder
from run import checking

Row = dict[str, Any]
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
PASCAL = "https://thor.robots.ox.ac.uk/pascal/VOC/voc2007"
ARCHIVES = {  # URL -> md5
    "dtd": {f"{OXFORD}/dtd/download/dtd-r1.0.1.tar.gz": "fff73e5086ae6bdbea199a49dfb8a4c1"},
    "voc07": {
        f"{PASCAL}/VOCtrainval_06-Nov-2007.tar": "c52e279531787c972589f7e41ab4ae64",
        f"{PASCAL}/VOCtest_06-Nov-2007.tar": "b6e924de25625d8de591ea690078ad9f",
    },
    "cub200": {
        "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz": (
            "97eceeb196236b17998738112f37df78"
        )
    },
    "pets": {
        f"{OXFORD}/pets/data/images.tar.gz": "5c4f3ee8e5d25df40f4fd59a7f44e54c",
        f"{OXFORD}/pets/data/annotations.tar.gz": "95a8c909bbe2e81eed6a22bccdf3f68f",
    },
    "flowers": {
        f"{OXFORD}/flowers/102/102flowers.tgz": "52808999861908f626f3c1f4e79d11fa",
        f"{OXFORD}/flowers/102/imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
        f"{OXFORD}/flowers/102/setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
    },
    "aircrafts": {
        f"{OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz": (
            "d4acdd33327262359767eeaa97a4f732"
        )
    },
}


def list_all(root: Path) -> list[Row]:
    """Each dataset, whether its folder is there, and the terms of its use; `check` reads it."""
    return [
        {"name": name, "state": "there" if (root / place).is_dir() else "missing"}
        | {"place": root / place, "terms": TERMS[name]}
        for name, place in FOLDERS.items()
    ]


def check(name: str, root: Path, partial: bool = False) -> Row:
    """Read a dataset as training does, open every image, and compare it with what is known.

    Args:
        name: a benchmark, folder:DIR as `--dataset` reads it, imagenet or DIR as `--pool` does.
        partial: a subset is as it should be; what it lacks is counted, but no problem.
    """
    if name not in FOLDERS and not Path(name.removeprefix("folder:")).is_dir():
        raise UsageError(f"{name}: is no benchmark or folder; {nearest(name, FOLDERS)}")
    path, about, problems = place_of(name, root) or root, Row(name=name), list[Row]()
    with checking(name):
        if name in BENCHMARKS:
            entries = {file for part in read_lists(name, path)[0].values() for file, _ in part}
            absent = {file for file in entries if not (path / file).exists()}
            images, whole = (
                [path / x for x in sorted(entries - absent)],
                sum(BENCHMARKS[name].sizes),
            )
            about |= {"listed": len(entries), "absent": len(absent)}
            if not partial and (absent or len(entries) != whole):
                what = f"lists {len(entries)} images of {whole}, {len(absent)} of them are missing"
                problems.append({"problem": what, "first": min(absent, default=None)})
        elif name.startswith("folder:"):
            task = folder(path, 0)
            images = [file for split in task[1:4] for file in split.images]
            about["classes"] = len(task.classes)
            about |= task.sizes()
        else:
            images = [*load_pool(name, root, 0).images]
    problems += [{"problem": str(error)} for error in decode_all(images)]
    return about | {"images": len(images), "problems": problems}


def download(name: str, root: Path) -> Row:
    """Fetch a benchmark's archives and unpack them; its folder is there whole or not at all."""
    if name not in BENCHMARKS:
        what = "cannot be downloaded; imagenet is at image-net.org"
        raise UsageError(f"{name}: {what}, {nearest(name, BENCHMARKS)}")
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
            how = f"`cd {work} && curl -C - -O {url}` goes on; then give this command again"
            raise RunError(f"{url}: {error}; {how}") from error
    made.rename(target)
    shutil.rmtree(work)
    return {"name": name, "path": str(target), "terms": TERMS[name]}
