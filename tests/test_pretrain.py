"""Pretraining from scratch: its rate and decay at every step, and what it saves."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from config import BACKBONES, AlignConfig, PretrainConfig
from data import Pool
from extras.pretrain import PretrainResult, build_networks, count_work, make_optimiser
from support.checkpoints import load_backbone
from support.errors import UsageError


def config(**more: object) -> PretrainConfig:
    return PretrainConfig(**{"backbone": "vit_mini", "pool": "quilts", **more})


@pytest.mark.parametrize("W", [0, 1, 4])
@pytest.mark.parametrize(("pretext", "last"), [("mae", None), ("mae", 0.4), ("ijepa", 0.4)])
def test_pretraining_has_the_schedules_of_maes_and_ijepas_programs(
    pretext: str, last: float | None, W: int
) -> None:
    """Their formulas at every step of 4 epochs of 5; what has no decay gets none."""
    given: Any = {"backbone": "vit_mini", "pool": "quilts", "pretext": pretext, "min_lr": 1e-5}
    given |= {"warmup_epochs": W, "warmup_from": 0.2, "weight_decay": 0.05}
    given |= {"final_weight_decay": last}
    tensors = {"W": torch.ones(2, 2), "b": torch.ones(2)}
    opt = make_optimiser(PretrainConfig(epochs=4, **given), tensors, 20)
    base = opt.groups[0].lr
    for k in range(1, 21):
        opt.update([*tensors.values()], [torch.ones_like(x) for x in tensors.values()])
        epoch = (k - (pretext == "mae")) / 5
        cosine = 0.5 * (1 + math.cos(math.pi * (epoch - W) / max(1, 4 - W)))
        line = 0.2 + 0.8 * epoch / max(1, W)
        rate = base * line if epoch < W else 1e-5 + (base - 1e-5) * cosine
        decay = 0.05
        if last is not None:
            decay = last + (0.05 - last) * 0.5 * (1 + math.cos(math.pi * k / 20))
        found = [
            value for g in opt.adamw_or_sgd.param_groups for value in (g["lr"], g["weight_decay"])
        ]
        assert found == pytest.approx([rate, decay, rate, 0.0], rel=1e-12)


def test_an_epoch_has_full_batches_only_and_at_least_one() -> None:
    for images, epoch in ((5, 1), (10, 1), (39, 3), (40, 4)):
        pool = Pool(torch.zeros(images, 3, 16, 16))
        assert count_work(config(batch=10, epochs=7), pool).steps == 7 * epoch


def test_what_is_saved_is_read_as_an_official_file_is(pretrained: Path) -> None:
    for pretext in ("mae", "ijepa"):
        cfg = AlignConfig(
            backbone="vit_mini", dataset="quilts", pretext=pretext, weights=pretrained / pretext
        )
        arch = BACKBONES["vit_mini"]._replace(class_token=pretext == "mae")
        if pretext == "ijepa":
            arch = arch._replace(patch_size=2)
        assert load_backbone(cfg).arch == arch


def test_a_finished_run_tells_its_loss_at_the_start_and_at_the_end(weights: Path) -> None:
    content = json.loads((weights / "result.json").read_text())
    places = {"out": weights, "weights": weights / "backbone.pth"}
    result = PretrainResult(**content | {name: str(path) for name, path in places.items()})
    lines = (weights / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    told = result.in_words().headline
    assert f"{losses[0]:.4g}" in told and f"{losses[-1]:.4g}" in told


def test_other_pretext_tasks_and_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="pretext"):
        config(pretext="module:Class")
    with pytest.raises(UsageError, match="17"):
        build_networks(config(image_size=17))
