"""Pretraining from scratch: its rate, its steps, and what it saves."""

import json
from pathlib import Path

import pytest
import torch

from config import BACKBONES, AlignConfig, PretrainConfig
from data import Pool
from extras.pretrain import PretrainResult, build_networks, count_work, make_optimiser
from support.checkpoints import load_backbone
from support.errors import UsageError


def config(**more: object) -> PretrainConfig:
    return PretrainConfig(**{"backbone": "vit_mini", "pool": "quilts", **more})


@pytest.mark.parametrize(("batch", "rate"), [(64, 5e-4), (256, 2e-3), (1024, 8e-3)])
def test_the_base_rate_is_per_256_images(batch: int, rate: float) -> None:
    cfg = config(base_lr=2e-3, batch=batch)
    opt = make_optimiser(cfg, {"a.weight": torch.zeros(2, 2)}, 30)
    assert [group.lr for group in opt.groups] == [pytest.approx(rate)]


@pytest.mark.parametrize(("pretext", "warm"), [("mae", [0.0, 0.25, 0.5]), ("ijepa", [0.4, 0.6])])
def test_the_first_step_is_number_0_in_mae_and_1_in_ijepa(pretext: str, warm: list[float]) -> None:
    """The warm-up of 4 steps, from 0 or from 0.2 of the rate."""
    cfg = config(pretext=pretext, epochs=2, warmup_epochs=1)
    opt = make_optimiser(cfg, {"a.weight": torch.zeros(2, 2)}, 8)
    assert opt.rate is not None
    assert [opt.rate(k + 1, 1.0) for k in range(len(warm))] == pytest.approx(warm)


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
