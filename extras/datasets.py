"""`bisslight data`: which datasets are there, what is wrong with one, how to get it."""

import re
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchvision.datasets.utils import download_and_extract_archive, download_url

from benchmarks import BENCHMARKS, PARTS, VOC, load_pool, load_task, present, read_lists
from config import FOLDERS, Data, RunError, UsageError, nearest, place_of
from data import Entry, decode_all, folder
from run import checking

Row = dict[str, Any]
IMAGENET_SIZE = 1_281_167


class Source(NamedTuple):
    """Where a benchmark comes from."""

    terms: str  # what its publishers say about using it
    archives: dict[str, str]  # URL -> md5
    within: bool = False  # whether the archives lack the benchmark's own folder


OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
PASCAL = "https://thor.robots.ox.ac.uk/pascal/VOC/voc2007"
CALTECH = "https://data.caltech.edu/records/65de6-vp158/files"
AIRCRAFT = "fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz"
SOURCES = {
    "dtd": Source(
        "for research",
        {f"{OXFORD}/dtd/download/dtd-r1.0.1.tar.gz": "fff73e5086ae6bdbea199a49dfb8a4c1"},
        within=True,
    ),
    "voc07": Source(
        "Flickr's terms of use",
        {
            f"{PASCAL}/VOCtrainval_06-Nov-2007.tar": "c52e279531787c972589f7e41ab4ae64",
            f"{PASCAL}/VOCtest_06-Nov-2007.tar": "b6e924de25625d8de591ea690078ad9f",
        },
    ),
    "cub200": Source(
        "non-commercial research and teaching",
        {f"{CALTECH}/CUB_200_2011.tgz": "97eceeb196236b17998738112f37df78"},
    ),
    "pets": Source(
        "CC BY-SA 4.0",
        {
            f"{OXFORD}/pets/data/images.tar.gz": "5c4f3ee8e5d25df40f4fd59a7f44e54c",
            f"{OXFORD}/pets/data/annotations.tar.gz": "95a8c909bbe2e81eed6a22bccdf3f68f",
        },
        within=True,
    ),
    "flowers": Source(
        "not stated; for research",
        {
            f"{OXFORD}/flowers/102/102flowers.tgz": "52808999861908f626f3c1f4e79d11fa",
            f"{OXFORD}/flowers/102/imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
            f"{OXFORD}/flowers/102/setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
        },
        within=True,
    ),
    "aircrafts": Source(
        "non-commercial research",
        {f"{OXFORD}/{AIRCRAFT}": "d4acdd33327262359767eeaa97a4f732"},
    ),
}


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
        found.append(row | {"state": state, "detail": detail, "terms": SOURCES[name].terms})
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
    path, problems = place_of(name, root) or root, list[Row]()
    with checking(name):
        if name in BENCHMARKS:
            counts, images, problems = compare(name, path, partial)
        elif name.startswith("folder:"):
            task = folder(path, 0)
            splits = dict(zip(PARTS, (task.train, task.val, task.test), strict=True))
            images = [file for split in splits.values() for file in split.images]
            counts = {"classes": len(task.classes)} | {p: len(s.targets) for p, s in splits.items()}
        else:
            counts, images = {}, [*load_pool(name, root, 0).images]
            if name == "imagenet" and len(images) != IMAGENET_SIZE:
                problems = [problem(f"has {len(images)} images, not {IMAGENET_SIZE}", [path])]
    for k in range(0, len(images), 4096):
        errors = decode_all(images[k : k + 4096])
        problems += [{"problem": str(error), "files": 1} for error in errors]
    about = {"name": name, "path": str(path)} | counts
    return about | {"images": len(images), "problems": problems}


def compare(name: str, base: Path, partial: bool) -> tuple[dict[str, int], list[Path], list[Row]]:
    """(counts, images that are listed and there, problems) of a benchmark."""
    parts, _ = read_lists(name, base)
    entries = [entry for part in parts.values() for entry in part]
    listed, there = dict(entries), present(name, base)
    absent, whole = sorted(listed.keys() - there), sum(BENCHMARKS[name].sizes)
    problems = disagreements(base, entries) if name == "voc07" else []
    if absent and not partial:
        problems.append(problem("is listed, but missing", absent))
    if len(listed) < len(entries) or (len(listed) != whole and not partial):
        what = f"lists {len(entries)} images, {len(listed)} different ones, of {whole}"
        problems.append(problem(what, [base]))
    counts = {"listed": len(entries), "absent": len(absent)}
    counts["in_no_list"] = len(there - listed.keys())
    return counts, [base / file for file in sorted(listed.keys() & there)], problems


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
    if name not in BENCHMARKS:
        how = "register at image-net.org" if name == "imagenet" else nearest(name, BENCHMARKS)
        raise UsageError(f"{name}: cannot be downloaded by this program; {how}")
    source, target, work = SOURCES[name], root / FOLDERS[name], root / f".{name}.download"
    if target.exists():
        raise UsageError(f"{target}: is there already, see `bisslight data check {name}`")
    into = work / "unpacked" / FOLDERS[name] if source.within else work / "unpacked"
    for url, md5 in source.archives.items():
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
    return {"name": name, "path": str(target), "terms": source.terms}
