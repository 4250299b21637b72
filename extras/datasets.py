"""Program: `bisslight data`, which lists, checks and downloads the benchmarks."""

import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

from torchvision.datasets.utils import download_and_extract_archive, download_url

from config import Record
from data import (
    FolderError,
    Task,
    find_images,
    find_unreadable,
    folder,
    list_other_files,
    subfolders,
)
from support.benchmarks import (
    BENCHMARKS,
    IMAGENET_TERMS,
    find_pool,
    folders,
    place_of,
    read_lists,
)
from support.errors import RunError, UsageError, as_usage_error, nearest
from support.runs import sha256
from support.screen import count


def list_all(root: Path) -> list[Record]:
    """`bisslight data list`: how much of a dataset is there, and the terms of its use."""
    rows = []
    for name, path in folders(root).items():
        terms = BENCHMARKS[name].terms if name in BENCHMARKS else IMAGENET_TERMS
        is_there = path.is_dir()
        rows.append(
            {
                "name": name,
                "state": "there" if is_there else "missing",
                "found": describe_what_is_there(name, path) if is_there else "",
                "place": path,
                "terms": terms,
            }
        )
    return rows


def describe_what_is_there(name: str, path: Path) -> str:
    """How much of a data set there is, such as "1,463 of 11,788" images.

    Of ImageNet the classes are counted, since its images take long.
    """
    if name == "imagenet":
        train = path / "train"
        classes = len(subfolders(train)) if train.is_dir() else 0
        return f"{classes:,} of 1,000 classes"
    try:
        contents = look_at_benchmark(name, path)
    except UsageError:
        return "its lists cannot be read"
    return f"{len(contents.images):,} of {sum(BENCHMARKS[name].sizes):,}"


class Contents(NamedTuple):
    """What `check` sees before it opens images."""

    images: list[Path]
    counts: Record  # how many images are listed and absent, or how many each split has
    problems: list[Record]


def check(name: str, root: Path, partial: bool = False) -> Record:
    """Read a data set as training does, open every image, and list what is wrong as `problems`.

    A benchmark is compared with its official lists; with `partial` missing images are no problem.
    A `folder:DIR`, or a DIR with two or more folders in it, is labelled, a folder for each class.
    Any other DIR, and imagenet, is a pool of unlabelled images.
    """
    with as_usage_error(name):
        path = place_of(name, root)
        if path is None:
            raise UsageError(f"{name}: comes with the program, so there is nothing to check")
        if name in BENCHMARKS:
            contents = look_at_benchmark(name, path, partial)
        elif name == "imagenet":
            contents = Contents(find_pool(name, path), {}, [])
        elif name.startswith("folder:") or len(subfolders(path)) > 1:
            contents = look_at_classes(path)
        else:
            images = find_pool(name, path)
            contents = Contents(images, describe_other_files(path, images), [])
    damaged = [{"problem": str(error)} for error in find_unreadable(contents.images)]
    return {
        "name": name,
        **contents.counts,
        "images": len(contents.images),
        "problems": contents.problems + damaged,
    }


def look_at_benchmark(name: str, path: Path, partial: bool = False) -> Contents:
    """What a benchmark's lists name, and what of it is missing, which a partial one may."""
    expected = sum(BENCHMARKS[name].sizes)
    listed = set[str]()
    for entries in read_lists(name, path).parts.values():
        listed.update(file for file, _ in entries)
    absent = {file for file in listed if not (path / file).exists()}
    problems: list[Record] = []
    if len(listed) != expected:
        problem = f"its lists name {len(listed)} of {expected} images; is it a subset?"
        problems.append({"problem": f"{problem} --partial takes it"})
    if absent:
        problem = f"{len(absent)} of the listed images are missing"
        problems.append({"problem": problem, "first": min(absent)})
    if partial:
        problems = []
    images = [path / file for file in sorted(listed - absent)]
    return Contents(images, {"listed": len(listed), "absent": len(absent)}, problems)


def look_at_classes(path: Path) -> Contents:
    """A folder of class folders, as a labelled task. If it is none, its faults are the problems."""
    images = find_images(path)
    others = describe_other_files(path, images)
    try:
        task = folder(path, seed=0)
    except FolderError as error:
        return Contents(images, others, [{"problem": fault} for fault in error.args])
    counts = {"classes": len(task.classes), **task.sizes(), **others}
    return Contents(images, counts, [*find_twins(task), *find_classes_without_a_test(task)])


def describe_other_files(path: Path, images: list[Path]) -> Record:
    """The files in a folder that are no readable images, in words; {} if there are none."""
    others = list_other_files(path, images)
    if not others:
        return {}
    kinds = ", ".join(sorted({file.suffix or file.name for file in others}))
    return {"left out": f"{count(len(others), 'file')} ({kinds})"}


def find_twins(task: Task) -> list[Record]:
    """Files with the same content in two classes, one problem for all."""
    first_of: dict[str, tuple[Path, int]] = {}
    twins = []
    for split in task.splits:
        for file, label in zip(split.images, split.targets.tolist(), strict=True):
            first, its_label = first_of.setdefault(sha256(file), (file, label))
            if label != its_label:
                twins.append(f"{first} and {file}")
    if not twins:
        return []
    return [{"problem": f"{count(len(twins), 'image')} in two classes", "first": twins[0]}]


def find_classes_without_a_test(task: Task) -> list[Record]:
    """Classes of which the test has no image, a problem each."""
    tested = set(task.test.targets.tolist())
    missing = [name for label, name in enumerate(task.classes) if label not in tested]
    return [{"problem": f"the test has no image of class {name}"} for name in missing]


def download(name: str, root: Path) -> Record:
    """Fetch a benchmark's archives and unpack them; its folder is there whole or not at all."""
    if name not in BENCHMARKS:
        known = nearest(name, BENCHMARKS)
        raise UsageError(f"{name}: cannot be downloaded; imagenet is at image-net.org, {known}")
    benchmark = BENCHMARKS[name]
    target = root / benchmark.folder
    if target.exists():
        raise UsageError(f"{target}: is there already, see `bisslight data check {name}`")
    work = root / f".{name}.download"  # archives that have arrived stay here after a failure
    unpacked = work / "unpacked" / benchmark.folder
    directory = unpacked.parent if benchmark.holds_folder else unpacked
    for url, md5 in benchmark.archives.items():
        fetch(url, md5, work, directory)
    unpacked.rename(target)  # only now, so that a stop leaves no half of it there
    shutil.rmtree(work)
    return {"name": name, "path": str(target), "terms": benchmark.terms}


def fetch(url: str, md5: str, work: Path, directory: Path) -> None:
    """Fetch an archive into `work`, unpack it into `directory`; a .mat file goes there as it is."""
    try:
        if url.endswith(".mat"):
            download_url(url, directory, md5=md5)
        else:
            download_and_extract_archive(url, work, directory, md5=md5)
    except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
        raise RunError(
            f"{url}: {error}; `cd {work} && curl -C - -O {url}` goes on; "
            "then give this command again"
        ) from error
