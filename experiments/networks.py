"""The networks that finished runs made, and validation images to look at with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from config import FinetuneConfig
from data import Images, batches, rng
from head import Phi
from lora import Backbone
from support.adapters import check_fits, open_adapter
from support.errors import UsageError
from support.experiment import Experiment, open_experiment

BATCH = 64


class Network(NamedTuple):
    """A backbone with the adapter of a run; phi_D is {} after align, which trains no final head."""

    name: str
    backbone: Backbone
    theta: Tensor | None  # None: the pretrained backbone
    phi_D: Phi


def open_networks(
    runs: Mapping[str, Path],
) -> tuple[Experiment[FinetuneConfig], list[Network]]:
    """Open the data of the first run, and the network of every run with its name in `runs`.

    A finetune run gives the network of its first seed. Raises UsageError where a run has another
    backbone or other images than the first.
    """
    first = next(iter(runs.values()))
    _, cfg, _ = open_adapter(first, None)
    # no autocast: these networks are looked at outside of it, in full precision
    experiment = open_experiment(cfg.replace(amp=False))
    networks = []
    for name, run in runs.items():
        _, cfg, adapter = open_adapter(run, None)
        check_fits(str(run), adapter, experiment.networks, cfg)
        theta, phi_D, info = adapter
        if info.definition["data_sha256"] != experiment.digests["data_sha256"]:
            raise UsageError(f"{run}: was made with other images than {first}")
        backbone = Backbone(experiment.backbone.vit, cfg.scale)
        head = {key: tensor.to(experiment.device) for key, tensor in phi_D.items()}
        networks.append(Network(name, backbone, theta.to(experiment.device), head))
    return experiment, networks


def validation_images(
    experiment: Experiment[FinetuneConfig], count: int
) -> tuple[list[int], Tensor]:
    """The numbers and pixels of at most `count` validation images, random but always the same."""
    split = experiment.task.val
    order = torch.randperm(len(split.targets), generator=rng(0, "look"))
    chosen = order[:count]
    # `batches` takes pairs: the number of the draw, which means nothing here, and of the image
    draws = [[(i, i) for i in piece.tolist()] for piece in chosen.split(BATCH)]
    images = Images(split, experiment.transform)
    loaded = batches(images, draws, experiment.cfg.workers, experiment.device)
    return chosen.tolist(), torch.cat([pixels for pixels, _ in loaded])
