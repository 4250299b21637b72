"""Pretraining's rate and decay at every step."""

import math
from typing import Any

import pytest
import torch

from config import PretrainConfig
from extras.pretrain import make_optimiser


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
