"""The networks that finished runs made, and validation images to look at with them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data import Images, batches, rng
from extras.export import open_run
from lora import Backbone, Phi
from support.errors import UsageError
from support.experiment import FinetuneExperiment, open_experiment

BATCH = 64


class Network(NamedTuple):
    """A backbone with the adapter of a run; phi_D is {} after align, which trains no final head."""

    name: str
    backbone: Backbone
    theta: Tensor | None  # None: the pretrained backbone
    phi_D: Phi


def open_networks(
    runs: Mapping[str, Path], seed: int | None = None, weights: Path | None = None
) -> tuple[FinetuneExperiment, list[Network]]:
    """The first run's data, and by name the network of every run; of finetune's seeds `seed`.

    `weights`: where the backbone's file is now, if it was moved. UsageError: a run has another
    backbone or other images than the first.
    """
    first = next(iter(runs.values()))
    # no autocast: these networks are looked at outside of it, in full precision
    cfg = open_run(first, seed, weights).cfg.replace(amp=False)
    experiment = open_experiment(cfg)
    here = experiment.identity
    networks = []
    for name, run in runs.items():
        opened = open_run(run, seed, weights)
        theta, phi_D, about = opened.adapter
        digests = (about.weights_sha256, about.data_sha256)
        if digests != (here.weights_sha256, here.data_sha256):
            raise UsageError(f"{run}: was made with other weights or images than {first}")
        backbone = Backbone(experiment.backbone.vit, opened.cfg.scale)
        head = {key: tensor.to(experiment.device) for key, tensor in phi_D.items()}
        networks.append(Network(name, backbone, theta.to(experiment.device), head))
    return experiment, networks


def validation_images(experiment: FinetuneExperiment, count: int) -> tuple[list[int], Tensor]:
    """At most `count` validation images, drawn at random but always the same: numbers, pixels."""
    split = experiment.task.val
    order = torch.randperm(len(split.targets), generator=rng(0, "look")).tolist()
    chosen = order[:count]
    images = Images(split, experiment.transform, False, 0, "eval")
    workers = experiment.cfg.workers
    loaded = batches(images, in_pieces(chosen), workers, experiment.device)
    return chosen, torch.cat([pixels for pixels, _ in loaded])


def in_pieces(chosen: list[int]) -> Iterator[list[tuple[int, int]]]:
    """The draws of `data.batches`: pairs of an image's number and the number of its draw."""
    for start in range(0, len(chosen), BATCH):
        yield [(number, number) for number in chosen[start : start + BATCH]]
