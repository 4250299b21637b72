"""Program: hashes and digests of data; each labelled image is read once, before a run.

So damaged files are named before the long work, and each image gets the one hash that it is known
by: the sha256 of its file's bytes or, in memory, of its pixels. From these hashes come the digest
of a task, and the images that its splits share.
A pool may have a million images; it is known by names and sizes alone.
"""

import hashlib
import io
import logging
import math
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, combinations
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, NamedTuple

from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from data import NOISY, SPLITS, ImageError, Pool, Split, Task, read_image
from support.folders import in_words
from support.processes import stop_if_asked, world
from support.runs import READING, Track, untracked

LOG = logging.getLogger("bisslight")
Hashes = dict[str, list[str]]  # of the images of each split, by its name, in their order
# A pool of more than MOST_READ files has SAMPLE of them read before the work: a million would take
# an hour.
MOST_READ = 20_000
SAMPLE = 1_000
MOST_SIZES = 100_000  # how many files of a pool are asked for their size: file servers are slow
RECIPE = 3  # how digests are made: its version, with which each begins
MOST_NAMED = 20  # classes that are named in a line
READ_AT_ONCE = 200  # files handed to threads: after Ctrl-C, taking thousands back takes seconds
# Words in the lines that libjpeg and libtiff write
OF_DECODERS = rb"JPEG|JFIF|progression|Adobe|TIFF|LZW|tempfile|per pixel"
SAMPLES = 277  # TIFF's tag of how many numbers a pixel has, SamplesPerPixel
LISTENING = Lock()  # held by the thread that is in `overheard`


# --- reading ------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What was found when an image file was read to its end."""

    sha256: str = ""  # of its bytes
    fault: str = ""  # why it cannot be read; empty if it can
    rest: str = ""  # which of its pages or bands are taken; empty if all are


def look_at_file(file: Path) -> Look:
    """Read an image file to its end; returns its hash, or its fault."""
    try:
        read_image(file)
    except ImageError as error:
        return Look(fault=str(error))
    content = file.read_bytes()
    return Look(hashlib.sha256(content).hexdigest(), rest=find_rest(content))


def find_rest(content: bytes) -> str:
    """Return which pages or bands of a readable image file are taken; "" where all are."""
    with Image.open(io.BytesIO(content)) as image:  # this reads no more than the header
        # Formats of one page lack the attribute. Phones write MPO: its first page is the photo.
        has_pages = getattr(image, "is_animated", False) and image.format != "MPO"
        if has_pages:  # such as animations, scans, and stacks of microscopes
            return "several pages, the first one is taken"
        # Pillow drops bands of a TIFF without a word, such as a satellite's near infrared.
        bands = len(image.getbands())
        samples = image.tag_v2.get(SAMPLES, 1) if isinstance(image, TiffImageFile) else bands
        return f"{samples} bands, the first {bands} are taken" if samples > bands else ""


def look_at_files(files: Sequence[Path], track: Track = untracked) -> dict[Path, Look]:
    """Read image files to their end; log what decoders warn of. `track` shows how far this is.

    Raises Stopped after a signal; with torchrun, it is left to the run to stop.
    """
    # `read_image` lets no decoder warn of a NOISY file again, but these may be others by now.
    NOISY.difference_update(files)
    looks: list[Look] = []
    # `said` is filled when the block ends. Threads, since decoders release Python's lock.
    with overheard() as said, ThreadPoolExecutor(8) as threads:
        for look in track(look_at_each(files, threads), total=len(files), label=READING):
            if world().size == 1:  # torchrun's processes would wait for each other at each image
                stop_if_asked()
            looks.append(look)
    found = dict(zip(files, looks, strict=True))
    for file, look in found.items():
        if look.rest:  # such as several pages, of which the first one is taken
            LOG.warning("%s: has %s", file, look.rest)
    if said:  # this is rare; each file is read again alone, to learn which one is meant
        for file, look in found.items():
            if not look.fault:  # a file that cannot be read is named by its fault
                warn_of(file)
    return found


def look_at_each(files: Sequence[Path], threads: ThreadPoolExecutor) -> Iterator[Look]:
    """Read image files to their end, and yield what was found in each."""
    # The first file alone: in a process that was forked, torch sets its own threads up when one of
    # ours calls it first, and the process ends with an error where two do so at once.
    for file in files[:1]:
        yield threads.submit(look_at_file, file).result()
    for start in range(1, len(files), READ_AT_ONCE):
        yield from threads.map(look_at_file, files[start : start + READ_AT_ONCE])


def check_readable(looks: Iterable[Look]) -> None:
    """Raise ImageError, which names all files that cannot be read."""
    if faults := [look.fault for look in looks if look.fault]:
        raise ImageError("; ".join(faults))


@contextmanager
def overheard() -> Iterator[list[str]]:
    """Collect what decoders warn of inside the block, since they do not name the file.

    The list that is yielded is filled when the block ends. Pillow uses Python's warnings, libjpeg
    writes to file descriptor 2. Both belong to the whole process, so one thread listens at a time,
    and none does while a network is trained.
    """
    said: list[str] = []
    if sys.stderr is None:  # descriptor 2 was closed, so a file of the run may have got its number
        yield said
        return
    recording = warnings.catch_warnings(record=True)
    with LISTENING, recording as caught, TemporaryFile() as written:
        warnings.simplefilter("always")  # those, too, that `data` silences, or that were shown
        try:
            with descriptor_2_leads_to(written):
                yield said
        finally:
            said += [str(warning.message) for warning in caught]
            written.seek(0)
            said += take_warnings(written)


@contextmanager
def descriptor_2_leads_to(file: IO[bytes]) -> Iterator[None]:
    """Send what is written to file descriptor 2 inside the block into a file."""
    screen = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)


def take_warnings(lines: Iterable[bytes]) -> list[str]:
    """Return those lines that are warnings of decoders, and print the others to sys.stderr."""
    found = []
    for line in lines:
        if re.search(OF_DECODERS, line):
            found.append(line.decode().strip().removeprefix("Corrupt JPEG data: "))
        else:  # not to descriptor 2: a bar on the screen stays below what sys.stderr prints
            sys.stderr.write(line.decode(errors="backslashreplace"))
            sys.stderr.flush()
    return found


def warn_of(file: Path) -> None:
    """Read an image file alone, and log what its decoder warns of, with the name of the file."""
    with overheard() as said:
        read_image(file)
    if said:
        NOISY.add(file)  # so that `read_image` does not let libjpeg print it again
    for text in dict.fromkeys(said):  # each once
        LOG.warning("%s: is taken as it is, but its decoder warns (%s)", file, text)


# --- a task -------------------------------------------------------------------------------------


def look_at_task(task: Task, track: Track = untracked) -> Hashes:
    """Read all images of a task; returns the hash of each. Raises ImageError for damaged files."""
    looks = look_at_files(files_of(task), track)
    check_readable(looks.values())
    return hash_images(task, looks)


def files_of(source: Task | Pool) -> list[Path]:
    """Return all image files of a task or pool, each once; images in memory have none."""
    parts = [source] if isinstance(source, Pool) else source.splits().values()
    files = [part.images for part in parts if not isinstance(part.images, Tensor)]
    return list(dict.fromkeys(chain.from_iterable(files)))


def hash_images(task: Task, looks: Mapping[Path, Look]) -> Hashes:
    """Return the hash of each image of a task, whose files were looked at."""
    hashes: Hashes = {}
    for name, split in task.splits().items():
        if isinstance(split.images, Tensor):
            hashes[name] = hash_pixels(split.images)
        else:  # a damaged file has no hash: its path stands for it, and equals no other one
            hashes[name] = [looks[file].sha256 or str(file) for file in split.images]
    return hashes


def hash_pixels(images: Tensor) -> list[str]:
    """Return the sha256 of shape and numbers of each image in memory (images, 3, height, width)."""
    shape = str(tuple(images.shape[1:])).encode()
    numbers = (image.contiguous().numpy().tobytes() for image in images)
    return [hashlib.sha256(shape + of_image).hexdigest() for of_image in numbers]


def digest_of_task(task: Task, hashes: Hashes) -> str:
    """Return the sha256 of all that a task says: images in their order, labels, classes and so on.

    The files' relative names count as well, so a renamed file makes another digest. A run that goes
    on compares it with that of its beginning, and `evaluate` those of two runs.
    """
    sha = hashlib.sha256()
    sha.update(repr([mean_and_std(task), task.uncut, list(task.classes)]).encode())
    sha.update(names_of(files_of(task)))
    for name, split in task.splits().items():
        sha.update("".join(hashes[name]).encode())
        sha.update(split.targets.numpy().tobytes())
    return f"{RECIPE}:{sha.hexdigest()}"


def mean_and_std(source: Task | Pool) -> list[list[float]]:
    """Return mean and std of a data set as lists of floats: a script may give 1 for 1.0."""
    return [[float(x) for x in values] for values in (source.mean, source.std)]


def find_shared_images(task: Task, hashes: Hashes) -> list[str]:
    """Return a line for each two splits with images in common, with their number and one of them.

    >>> import torch
    >>> split = Split(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    >>> task = Task("own", split, split, split, ["daisy", "rose"])
    >>> find_shared_images(task, {"train": ["a", "b"], "val": ["b", "c"], "test": ["d", "e"]})
    ['train and val share 1 image, such as number 0 of val']
    """
    lines = []
    for one, two in combinations(SPLITS, 2):
        of_one = {*hashes[one]}
        both = [k for k, image in enumerate(hashes[two]) if image in of_one]
        if both:
            images = "1 image" if len(both) == 1 else f"{len(both)} images"
            example = name_image(task.splits()[two], two, both[0])
            lines.append(f"{one} and {two} share {images}, such as {example}")
    return lines


def name_image(split: Split, part: str, k: int) -> str:
    """Return the file of image k of a part or, in memory, its number."""
    return f"number {k} of {part}" if isinstance(split.images, Tensor) else str(split.images[k])


def find_copies(files: Mapping[Path, Look]) -> list[list[Path]]:
    """Return groups of two or more files that have the same bytes."""
    groups = defaultdict[str, list[Path]](list)
    for file, look in files.items():
        if not look.fault:
            groups[look.sha256].append(file)
    return [group for group in groups.values() if len(group) > 1]


# --- a pool -------------------------------------------------------------------------------------


def look_at_pool(pool: Pool, track: Track = untracked, but_for: Collection[Path] = ()) -> None:
    """Log what a pool has, and read its files, except `but_for`, which were read already.

    Of more than MOST_READ files, SAMPLE are read. Raises ImageError for damaged files.
    """
    for line in describe(pool):
        LOG.info("pool: %s", line)
    files = [file for file in files_of(pool) if file not in but_for]
    if len(files) > MOST_READ:
        files = [*evenly_spaced(files, SAMPLE)]
    check_readable(look_at_files(files, track).values())


def digest_of_pool(pool: Pool) -> str:
    """Return the sha256 of mean, std, and the names and sizes of a pool's files, or its pixels.

    Names are paths below the folder that holds all images, so that the pool may be moved. Raises
    ImageError where a file is missing.
    """
    sha = hashlib.sha256()
    sha.update(repr(mean_and_std(pool)).encode())
    if isinstance(pool.images, Tensor):
        sha.update("".join(hash_pixels(pool.images)).encode())
        return f"{RECIPE}:{sha.hexdigest()}"
    sha.update(names_of(pool.images))
    sizes = [size_of(file) for file in evenly_spaced(pool.images, MOST_SIZES)]
    sha.update(repr(sizes).encode())
    return f"{RECIPE}:{sha.hexdigest()}"


def names_of(files: Sequence[Path]) -> bytes:
    """Return the names of files below the folder that holds all of them, a line each."""
    root = os.path.commonpath({file.parent for file in files}) if files else ""
    prefix = len(os.path.join(root, ""))  # noqa: PTH118  # as text: fast for ImageNet
    return "\n".join(str(file)[prefix:] for file in files).encode(errors="surrogateescape")


def size_of(file: Path) -> int:
    """Return how many bytes an image file has. Raises ImageError where it is not there."""
    try:
        return file.stat().st_size
    except OSError as error:
        raise ImageError(f"{file}: cannot be read ({error.strerror}); remove it") from error


def evenly_spaced(files: Sequence[Path], most: int) -> Sequence[Path]:
    """Return every k-th of the files, from the first on; k is the least that leaves at most `most`.

    >>> [str(file) for file in evenly_spaced([Path("a"), Path("b"), Path("c")], 2)]
    ['a', 'c']
    """
    return files[:: max(1, math.ceil(len(files) / most))]


# --- in words -----------------------------------------------------------------------------------


def describe(source: Task | Pool) -> list[str]:
    """Return how a data set was understood: classes and counts, what was drawn, what left out.

    >>> import torch
    >>> split = Split(torch.rand(3, 3, 8, 8), torch.tensor([0, 0, 1]))
    >>> describe(Task("own", split, split, split, ["daisy", "rose"], left_out={".heic": 2}))
    ['2 classes, 9 images: daisy 6, rose 3; train 3, val 3, test 3', 'left out: 2 .heic']
    """
    if isinstance(source, Pool):
        lines = [f"images without labels: {len(source.images)}"]
    else:
        lines = [describe_counts(source)]
    if source.left_out:
        lines.append(f"left out: {in_words(source.left_out)}")
    return lines


def describe_counts(task: Task) -> str:
    """Return how many images of a task there are in each class, and in each split.

    >>> import torch
    >>> split = Split(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    >>> describe_counts(Task("own", split, split, split, ["daisy", "rose"], drawn=["val", "test"]))
    '2 classes, 3 images each: daisy, rose; train 2, val 2 (drawn), test 2 (drawn)'
    """
    of_splits = (count_by_class(split, len(task.classes)) for split in task.splits().values())
    counts = [sum(of_class) for of_class in zip(*of_splits, strict=True)]  # in all splits together
    sizes = task.sizes()
    if min(counts) == max(counts):
        images = f"{counts[0]} images each: {shorten(task.classes)}"
    else:
        names = [f"{name} {n}" for name, n in zip(task.classes, counts, strict=True)]
        images = f"{sum(sizes.values())} images: {shorten(names)}"
        if len(counts) > MOST_NAMED:  # `shorten` has left some out
            images += f" (from {min(counts)} to {max(counts)} a class)"
    parts = []
    for part, n in sizes.items():
        drawn = " (drawn)" if part in task.drawn else ""
        parts.append(f"{part} {n}{drawn}")
    return f"{len(counts)} classes, {images}; {', '.join(parts)}"


def shorten(names: Sequence[str]) -> str:
    """Return names as a text; of more than MOST_NAMED, the first ten and the last five."""
    if len(names) > MOST_NAMED:
        names = [*names[:10], "...", *names[-5:]]
    return ", ".join(names)


def find_lacking_classes(task: Task) -> list[str]:
    """Return a line for each part that lacks classes, with the names of these."""
    found = []
    for part, split in task.splits().items():
        counts = count_by_class(split, len(task.classes))
        if lacking := [name for name, n in zip(task.classes, counts, strict=True) if not n]:
            found.append(f"{part} lacks {', '.join(lacking)}")
    return found


def count_by_class(split: Split, classes: int) -> list[int]:
    """Return how many images of each class a split has; `classes` is the number of classes.

    >>> import torch
    >>> count_by_class(Split([], torch.tensor([0, 0, 2])), 3)
    [2, 0, 1]
    """
    if split.targets.ndim == 2:  # an image may be of several classes, and 1 means yes
        return (split.targets == 1).sum(0).tolist()
    counts: list[int] = split.targets.bincount(minlength=classes).tolist()
    return counts
