"""Program: `bisslight data check`, which opens every image of a data set before a run does."""

from pathlib import Path

from pydantic import BaseModel

from config import FinetuneConfig, name_or_folder
from data import find_fault, find_images, overheard, subfolders
from support.benchmarks import BENCHMARKS, open_task, place_of
from support.errors import UsageError, collected
from support.files import sha256


class Check(BaseModel):
    """What was found in a data set."""

    name: str
    images: int  # how many were opened
    left_out: dict[str, int]  # files that are no images by their names, by ending
    problems: list[str]

    def __str__(self) -> str:
        """Return a line for each problem, and the counts."""
        counts = f"{self.name}: {self.images} images, {len(self.problems)} problems"
        return "\n".join([*self.problems, f"{counts}, left out: {self.left_out}"])


def check(name: str, root: Path, partial: bool = False) -> Check:
    """Open every image of a benchmark or of a folder, and list all that is wrong with it.

    A folder that has two or more folders is a labelled task, any other one a pool. With `partial` a
    benchmark may be a subset. Raises UsageError if there is no such data set.
    """
    name = name_or_folder(name)
    place = place_of(name, root)
    if not place.is_dir():
        raise UsageError(f"{name}: there is no folder {place}")
    is_task = len(subfolders(place)) > 1 or (place / "train").is_dir()
    has_classes = is_task and name not in BENCHMARKS
    problems: list[str] = []
    if has_classes or name in BENCHMARKS:
        cfg = FinetuneConfig(backbone="vit_mini", dataset=name, data_root=root, partial=partial)
        with collected(problems):
            open_task(cfg)

    files, left_out, _ = find_images(place)
    first_with: dict[str, Path] = {}  # the first file with each sha256
    for file in files:
        with overheard() as said:
            fault = find_fault(file)
        problems += [fault] if fault else [f"{file}: its decoder warns ({text})" for text in said]
        if has_classes and not fault:  # also of one class: a split by hash may part them
            first = first_with.setdefault(sha256(file), file)
            if first != file:
                problems.append(f"{file}: is the same as {first}")
    return Check(name=name, images=len(files), left_out=left_out, problems=problems)
