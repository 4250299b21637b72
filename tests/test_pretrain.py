"""Pretraining from scratch: its rate and decay at every step, and what it saves."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quilts import quilts
from toy import PRETRAIN_STEPS, photos_in, read_records, run

from config import BACKBONES, OMNIGLOT, AlignConfig, PretrainConfig
from data import Pool
from extras.pretrain import PretrainResult, make_optimiser, pretrain
from support.benchmarks import INK
from support.checkpoints import find_weights, load_backbone
from support.errors import UsageError
from support.experiment import open_experiment


def config(**more: object) -> PretrainConfig:
    return PretrainConfig(**{"backbone": "vit_mini", "pool": "quilts", **more})


@pytest.mark.parametrize("W", [0, 1, 4])
@pytest.mark.parametrize(("pretext", "last"), [("mae", None), ("mae", 0.4), ("ijepa", 0.4)])
def test_pretraining_has_the_schedules_of_maes_and_ijepas_programs(
    pretext: str, last: float | None, W: int
) -> None:
    """Their formulas at every step of 4 epochs of 5; what has no decay gets none."""
    given = {"pretext": pretext, "epochs": 4, "min_lr": 1e-5, "weight_decay": 0.05}
    given |= {"warmup_epochs": W, "warmup_from": 0.2, "final_weight_decay": last}
    tensors = {"W": torch.ones(2, 2), "b": torch.ones(2)}
    opt = make_optimiser(config(**given), tensors, 20, 5)
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
        matrix, vector = opt.wrapped.param_groups
        found = [matrix["lr"], matrix["weight_decay"], vector["lr"], vector["weight_decay"]]
        assert found == pytest.approx([rate, decay, rate, 0.0], rel=1e-12)


def test_an_epoch_has_full_batches_only_and_at_least_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(cfg: PretrainConfig, tensors: object, steps: int, epoch_steps: int) -> None:
        raise InterruptedError(steps, epoch_steps)

    monkeypatch.setattr("extras.pretrain.make_optimiser", stop)
    for images, epoch in ((5, 1), (10, 1), (39, 3), (40, 4)):
        pool = Pool(torch.ones(images, 3, 16, 16))
        with pytest.raises(InterruptedError) as seen:
            pretrain(config(batch=10, epochs=7), tmp_path / "p", pool=pool)
        assert seen.value.args == (7 * epoch, epoch)


def test_what_a_pool_has_and_lacks_is_told_before_pretraining(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photos_in(tmp_path / "photos", ["0.png", "1.png", "2.png", "3.png"])
    (tmp_path / "photos/4.heic").touch()
    line = f"pretrain --backbone vit_mini {PRETRAIN_STEPS} --batch 4"
    outcome = run(f"{line} --pool {tmp_path}/photos --out {tmp_path}/p")
    told = outcome.out + outcome.err + caplog.text
    assert "images without labels: 4" in told and "left out: 1 .heic" in told


def test_what_is_saved_is_read_as_an_official_file_is_and_the_last_loss_is_told(
    pretrained: Path, weights: Path
) -> None:
    for pretext in ("mae", "ijepa"):
        cfg = AlignConfig(
            backbone="vit_mini", dataset="quilts", pretext=pretext, weights=pretrained / pretext
        )
        arch = BACKBONES["vit_mini"]._replace(class_token=pretext == "mae")
        if pretext == "ijepa":
            arch = arch._replace(patch_size=2)
        assert load_backbone(cfg, find_weights(cfg)).arch == arch
    content = json.loads((weights / "result.json").read_text()) | {"out": str(weights)}
    last = read_records(weights)[-1]
    told = str(PretrainResult(**content))
    assert f"{last['loss']:.4g}" in told and str(weights / "backbone.pth") in told


def test_the_normalisation_of_pretraining_is_kept_and_another_one_is_told(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The quilts' own in the file. The file of handwriting, and a copy of it, is known by content.

    Labelled images and pool are compared with it and with each other.
    """
    about = json.loads(torch.load(weights / "backbone.pth")["bisslight"])
    pool, task = quilts(0)
    assert (tuple(about["mean"]), tuple(about["std"])) == (pool.mean, pool.std)
    copy = shutil.copy(OMNIGLOT, tmp_path / "copy.pth")
    half = (0.5, 0.5, 0.5)
    for file, given, of_pool, told in (
        (weights, task, pool, []),
        (weights, task._replace(mean=half), pool, ["--weights", "--dataset", "--pool"]),
        (weights, task, pool._replace(mean=half), ["--weights", "--dataset", "--pool"]),
        (copy, *(one._replace(mean=INK[0], std=INK[1]) for one in (task, pool)), []),
    ):
        caplog.clear()
        settings: Any = {"dataset": "own", "pool": "own", "weights": file}
        open_experiment(AlignConfig(backbone="vit_mini", **settings), given, of_pool)
        lines = [x for x in caplog.messages if x.startswith("normalisation: ")]
        flags = [word for line in lines for word in line.split() if word.startswith("--")]
        assert flags == told, (file, lines)


def test_other_pretext_tasks_and_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pretext"):
        config(pretext="module:Class")
    with pytest.raises(UsageError, match="17"):
        pretrain(config(image_size=17), tmp_path / "p", pool=Pool(torch.ones(9, 3, 17, 17)))
    with pytest.raises(ValueError, match="vit_h14"):
        config(backbone="timm:x")
