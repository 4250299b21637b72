"""`bisslight predict`: which classes a finished finetune run sees in images of one's own.

The labelled images of the run need not be on this machine: its adapter file names the classes and
how images are normalised. The backbone's weights need be.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from data import Split, Task, find_images
from extras.export import check_weights, is_whole, open_run
from support.errors import UsageError, checking
from support.experiment import Experiment


class Guess(NamedTuple):
    """A class that an image may show."""

    image: str
    rank: int  # 1: the most likely class
    label: str
    probability: float


def predict(
    run: Path,
    places: Sequence[Path],
    *,
    top: int = 1,
    seed: int | None = None,
    weights: Path | None = None,
) -> list[Guess]:
    """Classify image files, and those in folders, with a finished finetune run (UsageError).

    Args:
        run: its directory.
        places: files and folders.
        top: how many classes an image; the most likely first.
        seed: whose adapter is taken; None: the run's first.
        weights: where the backbone's file is now; None: where the run had it.
    """
    if top < 1:
        raise UsageError(f"--top {top}: should be 1 or more")
    files = list_images(places)
    cfg, (theta, phi_D, origin) = open_run(run, seed, weights)
    if "classes" not in origin:
        raise UsageError(f"{run}: has no names of classes; give a finished finetune run")
    classes = origin["classes"]
    mean, std = origin["channels"]
    # all absolute: names of files are compared from the folder on that holds them all
    paths = [file.absolute() for file in files]
    images = Split(paths, torch.zeros(len(paths), dtype=torch.long))
    task = Task("own", images, images, images, classes, mean, std, is_whole(origin))
    experiment = Experiment(cfg.replace(device="auto"), task)
    check_weights(run, origin, experiment.origin["weights_sha256"])

    phi_D = {name: tensor.to(experiment.device) for name, tensor in phi_D.items()}
    logits = experiment.logits(images, theta.to(experiment.device), phi_D)
    probabilities = logits.softmax(1)
    if cfg.dataset == "voc07" and cfg.voc_loss == "bce":
        probabilities = logits.sigmoid()  # an image may show several classes
    best = probabilities.argsort(1, descending=True)[:, :top]
    guesses = []
    for file, row, numbers in zip(files, probabilities.tolist(), best.tolist(), strict=True):
        for rank, number in enumerate(numbers, 1):
            guesses.append(Guess(str(file), rank, classes[number], row[number]))
    return guesses


def seed_of_adapter(run: Path, seed: int | None) -> int:
    """The seed whose adapter `predict` takes, as that adapter says itself."""
    seed_of_file: int = open_run(run, seed, None).adapter.origin["seed"]
    return seed_of_file


def list_images(places: Sequence[Path]) -> list[Path]:
    """These files, and all images in these folders (UsageError where there are none)."""
    files: list[Path] = []
    for place in places:
        with checking(str(place)):
            found = [place] if place.is_file() else find_images(place)
        if not found:
            raise UsageError(f"{place}: is no image and no folder of images")
        files += found
    return files


def format_csv(guesses: Sequence[Guess]) -> str:
    """A line for each guess, below a line of names."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(Guess._fields)
    table.writerows(guesses)
    return text.getvalue()
