"""What is wired to what, seen from outside: seeds, ties, rates, splits. Commands at toy size; only files are looked at.

The golden runs notice most errors of wiring by their numbers; here are those that need a run of their own.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import MAE, adapter, command, metrics, run
from torch import Tensor

STILL = "--warmup-epochs 0 --end-lr 0 --weight-decay 0"  # with a rate of 1e-20 nothing moves in float32


def finetune(drawn: Path, out: Path, options: str) -> dict[str, Any]:
    """The result of a small PEFT run on drawn images."""
    run("pretrain-mae", drawn / "data", drawn / "runs")
    line = f"finetune {MAE} --dataset folder:{{data}}/shapes --rank 4 --batch 10 {options} --device cpu --quiet"
    command(line.format(data=drawn / "data", runs=drawn / "runs") + f" --out {out}")
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def tensors(out: Path, seed: int) -> dict[str, Tensor]:
    return adapter(out / f"adapter-s{seed}.safetensors").tensors


def scores(out: Path) -> list[list[tuple[float, float]]]:
    """(accuracy, loss) of every validated epoch, a list a trial."""
    return [[(e["val"]["accuracy"], e["val"]["loss"]) for e in trial["curve"] if e["val"]] for trial in metrics(out)]


def test_of_equal_validation_scores_the_first_epoch_is_kept(drawn: Path, tmp_path: Path) -> None:
    result = finetune(drawn, tmp_path / "f", f"--lr 1e-20 {STILL} --epochs 3 --seeds 2")
    for curve in scores(tmp_path / "f"):
        assert len({*curve}) == 1  # a tie in accuracy and in loss
    assert result["epochs"] == [1, 1]


def test_of_equal_accuracies_the_lower_loss_is_kept(drawn: Path, tmp_path: Path) -> None:
    """Slow enough that no image changes sides, while the loss falls."""
    result = finetune(drawn, tmp_path / "f", "--lr 1e-5 --warmup-epochs 0 --epochs 3 --seeds 2")
    for curve, epoch in zip(scores(tmp_path / "f"), result["epochs"], strict=True):
        accuracies, losses = zip(*curve, strict=True)
        assert len({*accuracies}) == 1
        assert len({*losses}) == 3
        assert losses[epoch - 1] == min(losses)
        assert epoch > 1


@pytest.mark.parametrize("grid", ["1e-20,1e-21", "1e-21,1e-20"])
def test_of_rates_with_equal_scores_the_first_given_is_kept(drawn: Path, tmp_path: Path, grid: str) -> None:
    result = finetune(drawn, tmp_path / "f", f"--grid {grid} {STILL} --epochs 1 --seeds 1")
    assert len({curve[0] for curve in scores(tmp_path / "f")}) == 1
    assert result["lr"] == float(grid.split(",")[0])


def test_each_seed_has_its_own_lora_and_its_own_head(drawn: Path, tmp_path: Path) -> None:
    """At a rate at which nothing moves, what is saved is where a seed began."""
    out = tmp_path / "f"
    finetune(drawn, out, f"--lr 1e-20 {STILL} --epochs 1 --seeds 3")
    for one, other in itertools.combinations(range(3), 2):
        for name in ("theta", "head.weight", "head.bias"):
            assert (tensors(out, one)[name] != tensors(out, other)[name]).double().mean() > 0.4  # B is 0 in all
    theta = tensors(out, 0)["theta"].view(4, 4, 4, 64)
    assert float(theta[:, 1::2].abs().max()) < 1e-15
    assert 0.12 < float(theta[:, 0::2].abs().max()) <= 64**-0.5


def test_a_seed_is_the_same_run_wherever_it_stands_in_the_list(drawn: Path, tmp_path: Path) -> None:
    """Seed 1 as the second of two, and alone: same bits, other ones than seed 0's."""
    finetune(drawn, tmp_path / "two", "--lr 1e-2 --epochs 2 --seeds 2")
    finetune(drawn, tmp_path / "one", "--lr 1e-2 --epochs 2 --seeds 1 --seed 1")
    for name, tensor in tensors(tmp_path / "one", 1).items():
        assert torch.equal(tensor, tensors(tmp_path / "two", 1)[name])
    assert scores(tmp_path / "two")[1] == scores(tmp_path / "one")[0]
    assert scores(tmp_path / "two")[0] != scores(tmp_path / "one")[0]


def test_the_rate_with_the_best_mean_accuracy_is_taken(drawn: Path) -> None:
    """Recounted from the curves of a grid of two rates with two seeds each."""
    out = run("finetune-direct", drawn / "data", drawn / "runs")
    best: dict[float, list[float]] = {}
    for trial, curve in zip(metrics(out), scores(out), strict=True):
        best.setdefault(trial["lr"], []).append(max(accuracy for accuracy, _ in curve))
    means = {lr: sum(values[:2]) / 2 for lr, values in best.items()}
    assert json.loads((out / "result.json").read_text())["lr"] == max(means, key=lambda lr: means[lr])
    assert len({*means.values()}) == 2
