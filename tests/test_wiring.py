"""What is wired to what, seen from outside: seeds, ties, rates. Toy commands, whose files are read.

The golden runs notice most errors of wiring; here are those that need a run of their own.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import MAE, adapter, command, metrics, run
from torch import Tensor

from extras.pretrain import PretrainConfig, optimiser
from finetune import best_rate

STILL = "--warmup-epochs 0 --end-lr 0 --weight-decay 0"  # with a rate of 1e-20 nothing moves


def finetune(drawn: Path, out: Path, options: str) -> dict[str, Any]:
    """The result of a small PEFT run on drawn images."""
    run("pretrain-mae", drawn / "data", drawn / "runs")
    line = f"finetune {MAE} --dataset folder:{{data}}/shapes --rank 4 --batch 10 {options}"
    line = line.format(data=drawn / "data", runs=drawn / "runs")
    command(f"{line} --device cpu --quiet --out {out}")
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def tensors(out: Path, seed: int) -> dict[str, Tensor]:
    return adapter(out / f"adapter-s{seed}.safetensors").tensors


def scores(out: Path) -> dict[str, list[tuple[float, float]]]:
    """(accuracy, loss) of every validated epoch, by trial."""
    return {
        trial.name: [(e["val"]["accuracy"], e["val"]["loss"]) for e in metrics(trial) if e["val"]]
        for trial in sorted(out.glob("lr*-s*"))
    }


def test_of_equal_scores_the_first_epoch_and_rate_are_kept_and_seeds_begin_apart(
    drawn: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At rates at which nothing moves: ties in accuracy and loss; what is saved is the start."""
    result = finetune(drawn, tmp_path, f"--grid 1e-21,1e-20,1e-19 {STILL} --epochs 2 --seeds 2")
    assert "the best rate, 1e-21, is an end of the grid" in caplog.text
    assert all(len({*curve}) == 1 for curve in scores(tmp_path).values())
    assert (result["epochs"], result["lr"]) == ([1, 1], 1e-21)
    for name in ("theta", "head.weight", "head.bias"):  # own LoRA and head, B is 0 in all
        differ = tensors(tmp_path, 0)[name] != tensors(tmp_path, 1)[name]
        assert differ.double().mean() > 0.4
    theta = tensors(tmp_path, 0)["theta"].view(4, 4, 4, 64)
    assert float(theta[:, 1::2].abs().max()) < 1e-15
    assert 0.12 < float(theta[:, 0::2].abs().max()) <= 64**-0.5


def test_of_equal_accuracies_the_lower_loss_is_kept(drawn: Path, tmp_path: Path) -> None:
    """Slow enough that no image changes sides, while the loss falls."""
    result = finetune(drawn, tmp_path, "--lr 1e-5 --warmup-epochs 0 --epochs 2 --seeds 1")
    ((first, last),) = scores(tmp_path).values()
    assert first[0] == last[0] and first[1] > last[1] and result["epochs"] == [2]


def test_a_seed_is_the_same_run_wherever_it_stands(drawn: Path, tmp_path: Path) -> None:
    """Seed 1 as the second of two, and alone: same bits, other ones than seed 0's."""
    two, one = tmp_path / "two", tmp_path / "one"
    finetune(drawn, two, "--lr 1e-2 --epochs 1 --seeds 2")
    finetune(drawn, one, "--lr 1e-2 --epochs 1 --seeds 1 --seed 1")
    for name, tensor in tensors(one, 1).items():
        assert torch.equal(tensor, tensors(two, 1)[name])
    assert scores(two)["lr0.01-s1"] == scores(one)["lr0.01-s1"] != scores(two)["lr0.01-s0"]


def test_the_rate_with_the_best_mean_accuracy_is_taken() -> None:
    """Not that of the best loss, nor of the best seed; the rate's other seeds are asked for."""

    def result(accuracy: float, loss: float) -> dict[str, Any]:
        return {"val": {"accuracy": accuracy, "loss": loss}}

    tried = {
        1e-3: [result(70.0, 0.5), result(60.0, 0.5)],
        3e-3: [result(66.0, 0.9), result(66.0, 0.9)],
        1e-2: [result(99.0, 0.1), {"val": None}],  # one seed diverged
    }
    lr, results = best_rate(tried, lambda pairs: [result(*pair) for pair in pairs], 3)
    assert (lr, results[2:]) == (3e-3, [result(3e-3, 2)])
    lr, _ = best_rate(tried, lambda pairs: [{"val": lr != 3e-3} for lr, _ in pairs], 3)
    assert lr == 1e-3  # a rate at which a later seed diverges is given up for the next best


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
    opt = optimiser(PretrainConfig(epochs=4, **given), tensors, 20)
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
        found = [value for g in opt.torch.param_groups for value in (g["lr"], g["weight_decay"])]
        assert found == pytest.approx([rate, decay, rate, 0.0], rel=1e-12)
