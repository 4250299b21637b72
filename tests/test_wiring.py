"""What is wired to what, seen from outside: seeds, ties, rates. Toy commands, whose files are read.

The golden runs notice most errors of wiring; here are those that need a run of their own.
"""

import json
from pathlib import Path
from typing import Any

import torch
from golden import MAE, adapter, command, metrics, run
from torch import Tensor

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
    drawn: Path, tmp_path: Path
) -> None:
    """At rates at which nothing moves: ties in accuracy and loss; what is saved is the start."""
    result = finetune(drawn, tmp_path, f"--grid 1e-21,1e-20 {STILL} --epochs 2 --seeds 2")
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
    assert first[0] == last[0] and first[1] > last[1]
    assert result["epochs"] == [2]


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
    lr, results = best_rate(tried, lambda lr, done: [result(lr, done)])
    assert (lr, results[2:]) == (3e-3, [result(3e-3, 2)])
    lr, _ = best_rate(tried, lambda lr, done: [{"val": lr != 3e-3}])
    assert lr == 1e-3  # a rate at which a later seed diverges is given up for the next best
