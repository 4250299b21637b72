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
    dataset_folders,
    find_folder,
    find_pool_images,
    read_lists,
)
from support.errors import RunError, UsageError, as_usage_error, suggest
from support.runs import sha256
from support.screen import format_count


def list_all(root: Path) -> list[Record]:
    """For `bisslight data list`: how much of each dataset is below `root`, and its terms of use."""
    rows = []
    for name, path in dataset_folders(root).items():
        is_there = path.is_dir()
        is_benchmark = name in BENCHMARKS  # or imagenet, whose images take long to count
        rows.append(
            {
                "name": name,
                "state": "there" if is_there else "missing",
                "found": count_images(name, path) if is_there and is_benchmark else "",
                "place": path,
                "terms": BENCHMARKS[name].terms if is_benchmark else IMAGENET_TERMS,
            }
        )
    return rows


def count_images(name: str, path: Path) -> str:
    """How many images of a benchmark are in its folder `path`, such as "1,463 of 11,788"."""
    try:
        contents = inspect_benchmark(name, path)
    except UsageError:
        return "its lists cannot be read"
    return f"{len(contents.images):,} of {sum(BENCHMARKS[name].sizes):,}"


class Contents(NamedTuple):
    """What `check` knows of a data set before it opens the images."""

    images: list[Path]
    counts: Record  # such as {"listed": 11788, "absent": 2} or {"classes": 5, "train": 60, ...}
    problems: list[Record]  # such as {"problem": "2 of the listed images are missing"}


def check(name: str, root: Path, partial: bool = False) -> Record:
    """Read a data set as training does, open every image, and list what is wrong as `problems`.

    1. Find its folder, and read it as what it is, see `inspect`.
    2. Open each image.

    The result is such as {"name": "dtd", "listed": 5640, "absent": 0, "images": 5640, "problems":
    []}. Raises UsageError if the data set is not there.
    """
    with as_usage_error(name):
        path = find_folder(name, root)
        if path is None:  # a function makes the images, such as those of Omniglot
            raise ValueError("comes with the program, so there is nothing to check")
        contents = inspect(name, path, partial)

    damaged = [{"problem": str(error)} for error in find_unreadable(contents.images)]
    return {
        "name": name,
        **contents.counts,
        "images": len(contents.images),
        "problems": contents.problems + damaged,
    }


def inspect(name: str, path: Path, partial: bool) -> Contents:
    """Find the images in the folder `path`, count them, and look for problems, by what `name` is.

    - A benchmark is compared with its lists, of which images may be missing with `partial`.
    - imagenet is a pool of unlabelled images.
    - `folder:DIR`, or a DIR with two or more folders in it, is a task, a folder for each class.
    - Any other DIR is a pool of unlabelled images.

    Raises UsageError or ValueError if it cannot be read as that.
    """
    if name in BENCHMARKS:
        return inspect_benchmark(name, path, partial)
    if name == "imagenet":
        return Contents(find_pool_images(name, path), counts={}, problems=[])
    if name.startswith("folder:") or len(subfolders(path)) > 1:
        return inspect_class_folders(path)
    images = find_pool_images(name, path)
    return Contents(images, count_other_files(path, images), problems=[])


def inspect_benchmark(name: str, path: Path, partial: bool = False) -> Contents:
    """Compare the images that a benchmark's lists name with those that are in its folder `path`.

    1. Read which images the lists name, and see which of these are absent.
    2. Unless `partial` takes a subset as it is, lists that are too short are a problem, and so are
       absent images.

    Raises UsageError if the lists cannot be read.
    """
    full_size = sum(BENCHMARKS[name].sizes)  # images of the whole benchmark
    listed = set[str]()  # names of files, such as "images/001.Albatross/0001.jpg"
    for entries in read_lists(name, path).parts.values():  # for train, val and test
        for file, _label in entries:
            listed.add(file)
    absent = {file for file in listed if not (path / file).exists()}
    present = sorted(listed - absent)

    problems: list[Record] = []
    if len(listed) != full_size and not partial:
        problem = (
            f"its lists name {len(listed)} of {full_size} images; is it a subset? "
            "--partial takes it"
        )
        problems.append({"problem": problem})
    if absent and not partial:
        problem = f"{len(absent)} of the listed images are missing"
        problems.append({"problem": problem, "first": min(absent)})  # the first by name
    counts = {"listed": len(listed), "absent": len(absent)}
    return Contents([path / file for file in present], counts, problems)


def inspect_class_folders(path: Path) -> Contents:
    """Read a folder of class folders as a labelled task, and look for mistakes in its labels.

    If it cannot be read as a task, the reasons are the problems.
    """
    images = find_images(path)
    others = count_other_files(path, images)
    try:
        task = folder(path, seed=0)  # the seed decides which images are held out, not how many
    except FolderError as error:
        problems = [{"problem": fault} for fault in error.args]
        return Contents(images, others, problems)
    counts = {"classes": len(task.classes), **task.sizes(), **others}
    problems = find_images_in_two_classes(task) + find_classes_without_a_test(task)
    return Contents(images, counts, problems)


def count_other_files(path: Path, images: list[Path]) -> Record:
    """Count the files in a folder that are not among `images`.

    The result is such as {"left out": "3 files (.mp4, .txt)"}, or {} if there are none.
    """
    others = list_other_files(path, images)
    return {"left out": describe_files(others)} if others else {}


def describe_files(files: list[Path]) -> str:
    """How many files these are, and what their names end in, such as "3 files (.mp4, .txt)"."""
    endings = sorted({file.suffix or file.name for file in files})  # README has no ending
    return f"{format_count(len(files), 'file')} ({', '.join(endings)})"


def find_images_in_two_classes(task: Task) -> list[Record]:
    """Find files with equal bytes in two classes; returns one problem for all of them, or [].

    `task` is one of files, each with one class.
    """
    first_with: dict[str, tuple[Path, int]] = {}  # the first file of each sha256, and its class
    pairs = []  # such as "cats/1.png and dogs/7.png"
    for split in task.splits:
        for file, label in zip(split.images, split.targets.tolist(), strict=True):
            digest = sha256(file)
            if digest not in first_with:
                first_with[digest] = (file, label)
            first_file, first_label = first_with[digest]
            if label != first_label:
                pairs.append(f"{first_file} and {file}")
    if not pairs:
        return []
    return [{"problem": f"{format_count(len(pairs), 'image')} in two classes", "first": pairs[0]}]


def find_classes_without_a_test(task: Task) -> list[Record]:
    """Find the classes without a test image; returns a problem for each of them."""
    tested = set(task.test.targets.tolist())
    missing = [name for label, name in enumerate(task.classes) if label not in tested]
    return [{"problem": f"the test has no image of class {name}"} for name in missing]


def download(name: str, root: Path) -> Record:
    """Fetch a benchmark's archives and unpack them below `root`.

    1. Refuse what cannot be fetched or is there already (UsageError).
    2. Fetch and unpack each archive in a hidden folder beside the target (RunError if that fails).
    3. Move the whole benchmark to its place, which therefore never holds a part of it.

    The result is such as {"name": "dtd", "path": "data/dtd", "terms": "for research"}.
    """
    if name not in BENCHMARKS:
        known = suggest(name, BENCHMARKS)
        raise UsageError(f"{name}: cannot be downloaded; imagenet is at image-net.org, {known}")
    benchmark = BENCHMARKS[name]
    target = root / benchmark.folder
    if target.exists():
        raise UsageError(f"{target}: is there already, see `bisslight data check {name}`")

    # After a failure, archives that have arrived stay here, and a second call goes on with them.
    work = root / f".{name}.download"
    unpacked = work / "unpacked" / benchmark.folder
    # An archive that includes the folder makes it itself.
    extract_into = unpacked.parent if benchmark.archive_includes_folder else unpacked
    for url, md5 in benchmark.archives.items():  # such as "https://.../dtd-r1.0.1.tar.gz"
        fetch(url, md5, work, extract_into)

    unpacked.rename(target)
    shutil.rmtree(work)
    return {"name": name, "path": str(target), "terms": benchmark.terms}


def fetch(url: str, md5: str, work: Path, extract_into: Path) -> None:
    """Fetch an archive to `work` and unpack it into `extract_into`. Raises RunError if that fails.

    A .mat file is no archive: it is fetched into `extract_into` as it is.
    """
    is_archive = not url.endswith(".mat")
    fetch_into = work if is_archive else extract_into
    try:
        if is_archive:
            download_and_extract_archive(url, fetch_into, extract_into, md5=md5)
        else:
            download_url(url, fetch_into, md5=md5)
    except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
        raise RunError(
            f"{url}: {error}; `cd {fetch_into} && curl -C - -O {url}` goes on; "
            "then give this command again"
        ) from error
