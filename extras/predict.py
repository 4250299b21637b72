"""Program: `bisslight predict`: classifies any images with a finished finetune run.

The labelled images of the run need not be on this machine, since its adapter file names the classes
and says how images are normalised. The backbone's weights have to be here.
"""

import csv
import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from config import FinetuneConfig, Record
from data import Split, Task, find_images, list_other_files
from extras.datasets import describe_files
from extras.export import check_same_weights, open_run
from support.checkpoints import AdapterInfo, channels_of
from support.errors import UsageError, as_usage_error
from support.experiment import Experiment, open_experiment
from support.screen import Answer, format_count

LOG = logging.getLogger("bisslight")


class Guess(NamedTuple):
    """A class that an image may show."""

    image: str  # its path
    rank: int  # 1: the most likely class, 2: the next
    label: str  # the name of the class
    probability: float  # 0 to 1


def predict(
    run: Path,
    places: Sequence[Path],
    *,
    top: int = 1,
    seed: int | None = None,
    weights: Path | None = None,
) -> list[Guess]:
    """Classify image files, and those in folders, with a finished finetune run.

    1. Find the images, and read the run's adapter: θ, the head and the names of the classes.
    2. Compute the probability of each class for each image.
    3. Return the `top` most likely classes of each image, in the order of the images.

    Args:
        run: its directory.
        places: image files, and folders of them.
        top: how many classes are returned for each image; the most likely come first.
        seed: whose adapter is taken; None: that of the run's first seed.
        weights: where the backbone's file is now; None: where it was for the run.

    Raises UsageError.
    """
    if top < 1:
        raise UsageError(f"--top {top}: should be 1 or more")
    files = list_images(places)
    cfg, _, adapter = open_run(run, seed, weights)
    classes = adapter.info.classes  # such as ["cat", "dog"]
    if not classes:
        raise UsageError(f"{run}: has no names of classes; give a finished finetune run")

    experiment = open_on_files(run, cfg, adapter.info, files)
    device = experiment.device
    head = {name: tensor.to(device) for name, tensor in adapter.phi_D.items()}
    images = experiment.task.test  # all files, as in train and val
    logits = experiment.logits(images, adapter.theta.to(device), head)  # (images, classes)
    # With VOC07's loss "bce", each class has a probability of its own. Otherwise their sum is 1.
    classes_are_independent = cfg.dataset == "voc07" and cfg.voc_loss == "bce"
    probabilities = logits.sigmoid() if classes_are_independent else logits.softmax(1)

    best = probabilities.argsort(1, descending=True)[:, :top]  # (images, top), numbers of classes
    guesses = []
    for file, of_classes, numbers in zip(files, probabilities.tolist(), best.tolist(), strict=True):
        for rank, k in enumerate(numbers, 1):  # k: the number of a class
            guesses.append(Guess(str(file), rank, classes[k], of_classes[k]))
    return guesses


def open_on_files(
    run: Path, cfg: FinetuneConfig, info: AdapterInfo, files: Sequence[Path]
) -> Experiment[FinetuneConfig]:
    """Load the run's network, together with a task whose every split is these image files.

    `cfg` and `info` are what the run and its adapter say. Raises UsageError if the weights are not
    those of the run.
    """
    with as_usage_error(str(run)):
        mean, std = channels_of(info)
    # `data.names_below` needs paths that are all absolute, or all relative.
    paths = [file.absolute() for file in files]
    no_labels = torch.zeros(len(paths), dtype=torch.long)  # a split has labels; these mean nothing
    images = Split(paths, no_labels)
    task = Task("own", images, images, images, info.classes, mean, std, uncut=info.whole_images)
    cfg = cfg.replace(device="auto")  # this machine may lack the device of the run
    experiment = open_experiment(cfg, task)
    check_same_weights(run, info, experiment.identity.weights_sha256)
    return experiment


def in_words(guesses: Sequence[Guess]) -> Answer:
    """A table with a row for each guess, below a line that says which folder holds all images.

    The row is such as {"image": "a.png", "label": "cat", "probability": "0.93"}, the line such as
    "1 image in /data/birds".
    """
    paths = [Path(guess.image).resolve() for guess in guesses]
    folder = os.path.commonpath([path.parent for path in paths])  # the deepest that holds all
    rows: list[Record] = []
    for path, guess in zip(paths, guesses, strict=True):
        row: Record = {
            "image": path.relative_to(folder),
            "label": guess.label,
            "probability": f"{guess.probability:.2f}",
        }
        rows.append(row)

    images = format_count(len(set(paths)), "image")  # an image has several rows with --top
    return Answer(headline=f"{images} in {folder}", rows=rows)


def list_images(places: Sequence[Path]) -> list[Path]:
    """List these files, and all images in these folders.

    Raises UsageError if a place is not there, or a folder has no image.
    """
    files: list[Path] = []
    for place in places:
        if not place.exists():
            raise UsageError(f"{place}: is not there")
        if place.is_file():
            files.append(place)
        else:
            files += list_images_of_folder(place)
    return files


def list_images_of_folder(folder: Path) -> list[Path]:
    """List all images in a folder and those below it, and warn of other files, which are left out.

    Raises UsageError if there is no image.
    """
    with as_usage_error(str(folder)):
        images = find_images(folder)
        others = list_other_files(folder, images)
    if others:
        LOG.warning("%s: left out %s", folder, describe_files(others))
    if not images:
        raise UsageError(f"{folder}: holds no image that can be read")
    return images


HEADER = ",".join(Guess._fields)  # image,rank,label,probability


def check_csv(path: Path) -> None:
    """Raise UsageError if a file is there that this command has not made, so it is not replaced."""
    if not path.exists():
        return
    is_own_table = path.is_file() and path.read_bytes().startswith(HEADER.encode())
    if not is_own_table:
        raise UsageError(f"--csv {path}: is there, and is no table of predict; give another name")


def format_csv(guesses: Sequence[Guess]) -> str:
    """Write guesses as the text of a CSV file: a line of names, then a line for each guess."""
    text = io.StringIO()
    text.write(f"{HEADER}\n")
    table = csv.writer(text, lineterminator="\n")
    table.writerows(guesses)
    return text.getvalue()
