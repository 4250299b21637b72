"""Does aligning help, if every arm may do the same work, with a rate and length chosen for it?

    python -m experiments.fair_race --cell Greek:0    # all arms once, in some minutes

fair_race.md is the protocol. The runs of both phases are in experiments/fair_race/; the
command that made them is at commit 79b91b8. fair_race_analysis.py reads these files.
"""

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

from align import batches_left, prepare, probe
from bisslight import Map, algorithm_1
from config import OMNIGLOT, AlignConfig, FinetuneConfig, PretrainConfig, Record
from data import Task, steps_per_epoch
from experiments.fair_race_plan import CHOSEN, Cell, Run, Unit, units_of
from experiments.recipe import run_script
from extras.pretrain import pretrain
from finetune import make_optimiser
from support.experiment import open_experiment
from support.optim import train_epochs, trainable

PRETRAIN: Record = {
    "backbone": "vit_mini", "pool": "omniglot", "image_size": 28, "patch_size": 4, "epochs": 60,
    "warmup_epochs": 3, "batch": 64, "base_lr": 16e-3, "beta2": 0.999, "min_crop": 0.5,
    "device": "cpu",
}  # fmt: skip
ALIGN: Record = {  # λ and all that is not here is the paper's, or vit_mini's default
    "lower_steps": 5, "upper_steps": 3, "p_batch": 64, "d_batch": 32, "p_lr": 1e-2, "d_lr": 1e-2
}  # fmt: skip


def run_unit(unit: Unit, out: Path) -> Run:
    """Run an arm in a cell; its backbone is pretrained into OUT, if it is not there."""
    name, arm, cell = unit
    settings = settings_of_cell(cell, out)
    started = time.process_time()
    theta = None  # a fresh one
    if arm.alternations:
        theta = aligned(cell, out, arm.alternations, arm.implicit)
    if arm.first_epochs:
        theta = fine_tuned_before(cell, out, arm.first_epochs)
    tuned = fine_tune(settings, arm.rate, arm.epochs, theta)
    cpu = time.process_time() - started
    return Run(name, arm, cell, tuned.images, tuned.curve, tuned.held_out, cpu)


def settings_of_cell(cell: Cell, out: Path) -> Record:
    """The settings that all runs of a cell share; a backbone that is not there is pretrained."""
    weights = OMNIGLOT
    if cell.backbone:
        weights = out / f"pretrain-{cell.backbone}"
        pretrain(PretrainConfig(**PRETRAIN, seed=cell.backbone), weights)
    return {
        "backbone": "vit_mini",
        "weights": weights,
        "dataset": f"omniglot:{cell.alphabet}",
        "data_seed": cell.backbone,
        "seed": cell.seed,
        "augment": "none",
        "device": "cpu",
    }


@cache  # phase 1 has candidates that differ in PEFT's rate alone: they share it
def aligned(cell: Cell, out: Path, alternations: int, implicit: bool) -> Tensor:
    """θ_P of what `align` does with these settings, without a run directory."""
    length = {"alternations": alternations, "warmup": alternations // 10}
    cfg = AlignConfig(**settings_of_cell(cell, out) | ALIGN | length)
    experiment = open_experiment(cfg)
    prepared = prepare(experiment, None if implicit else no_hypergradient)
    list(probe(experiment, prepared))
    state, pretext_task, head, hypergrad, _ = prepared
    batches = batches_left(experiment, prepared)
    inputs = (pretext_task, head.loss, hypergrad, *batches, experiment.passes)
    train_D = partial(head.loss, drop_path=True)  # with drop path
    list(algorithm_1(state, cfg, *inputs, train_D=train_D))
    return state.theta_P.detach()


def no_hypergradient(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
    """Line 10 without an inverse: q = 0, so l.14 follows L^D's own gradient at θ_D alone."""
    return torch.zeros_like


@cache
def fine_tuned_before(cell: Cell, out: Path, epochs: int) -> Tensor:
    """θ of a PEFT with another seed, which a restart starts from."""
    other = cell._replace(seed=cell.seed + 100)
    return fine_tune(settings_of_cell(other, out), 0.03, epochs, None).theta


class Tuned(NamedTuple):
    """What PEFT ended with."""

    theta: Tensor
    images: int  # of the test
    curve: dict[int, float]  # test accuracy (%) by epoch
    held_out: float  # accuracy (%) on validation and test images together, at the end


def fine_tune(
    settings: Record,
    rate: float,
    epochs: int,
    start: Tensor | None,
    warmup: int = 5,
    task: Task | None = None,
) -> Tuned:
    """PEFT as `finetune` does it, without a run directory and without a choice of the epoch."""
    peft: Record = {"lr": (rate,), "epochs": epochs, "warmup_epochs": warmup, "batch": 32}
    cfg = FinetuneConfig(**settings | peft)
    experiment = open_experiment(cfg, task)  # `task` instead of the data set of the settings
    task = experiment.task
    fresh = experiment.new_theta(cfg.seed) if start is None else start
    (theta,) = trainable({"theta": fresh}).values()  # a copy: candidates share a start
    head = experiment.new_head("peft head", cfg.seed)
    epoch_steps = steps_per_epoch(len(task.train.targets), cfg.batch)
    optimiser = make_optimiser(cfg, [theta, *head.phi.values()], epoch_steps)
    steps = range(epochs * epoch_steps)
    examples = experiment.examples("peft", cfg.seed, cfg.batch, steps, cfg.drop_path, by_epoch=True)
    loss = partial(head.loss, theta, head.phi, drop_path=True)
    curve = dict[int, float]()
    records = train_epochs(loss, optimiser, examples, epoch_steps, "peft", experiment.passes)
    for epoch, _ in records:
        if epoch % 10 == 0 or epoch == epochs:
            curve[epoch] = experiment.score(task.test, theta, head.with_stats).accuracy
    val = experiment.score(task.val, theta, head.with_stats).accuracy
    test_images = len(task.test.targets)
    val_images = len(task.val.targets)
    held_out = (val * val_images + curve[epochs] * test_images) / (val_images + test_images)
    return Tuned(theta.detach(), test_images, curve, held_out)


def main(cell: Annotated[str, typer.Option()], out: Path = Path("runs/fair_race")) -> None:
    """Run --cell ALPHABET:BACKBONE; OUT is where backbones are."""
    name, _, number = cell.partition(":")
    for unit in units_of([Cell(name, int(number), 0)], CHOSEN):
        run = run_unit(unit, out)
        accuracy = run.test[max(run.test)]
        print(f"{run.name}: {accuracy:.1f} %, work {run.arm.work:.0f}, {run.cpu:.0f} CPU-s")


if __name__ == "__main__":
    run_script(main)
