"""The demo's controls: is it alignment that helps, and is pretraining needed at all?

    python -m experiments.demo_controls --out runs/demo_controls

On three drawn datasets, every rate chosen on mean validation over eight seeds: PEFT after
BiSSLight, after alignment without curvature and without an upper level, PEFT alone, PEFT alone with
as many CPU-seconds as alignment and PEFT; and, on the 80 labels alone, a small CNN, the same ViT
from scratch and a logistic regression on pixels. About an hour on two cores; the same command
goes on. Its settings are the demo's.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from align import align
from config import BACKBONES, AlignConfig, FinetuneConfig, Record
from data import quilts, rng
from evaluate import compare, evaluate
from experiments.recipe import write_table
from extras.demo import ALIGN, PEFT, PRETRAIN
from extras.pretrain import PretrainConfig, pretrain
from finetune import finetune
from lora import Backbone, features, init_head, logits
from support.checkpoints import build_head, build_vit, initialise
from support.metrics import Score, score
from support.optim import trainable
from support.processes import jobs
from support.runs import read_json

GRID = (3e-3, 1e-2, 3e-2)
ALIGNED: dict[str, Record] = {
    "mfac": {},
    "identity": {"hypergrad": "identity"},
    "lower-only": {"upper_steps": 0},
}
SCRATCH_RATES = (3e-4, 1e-3, 3e-3)
SCRATCH_EPOCHS = 100
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1)  # of the regression
TEST_IMAGES = 480


def main(out: Path = Path("runs/demo_controls"), seeds: int = 8, sets: int = 3) -> None:
    """Run all arms on each drawn dataset; prints a table for each."""
    torch.set_num_threads(1)
    for data_seed in range(sets):
        compare_arms(out / f"data{data_seed}", data_seed, seeds)


def compare_arms(out: Path, data_seed: int, seeds: int) -> None:
    """All arms on one drawn dataset."""
    accuracies, seconds = run_peft_arms(out, data_seed, seeds)
    for network in ("small CNN", "ViT from scratch"):
        accuracies[network] = train_from_scratch(network, data_seed, seeds)
    accuracies["pixel regression"] = [pixel_regression(data_seed)]
    rows: list[Record] = []
    first = accuracies["mfac"]
    for name, values in accuracies.items():
        p = compare(count_right(first), count_right(values)).p
        rows.append({
            "arm": name, "test (%)": f"{fmean(values):.2f}",
            "mfac minus this": f"{fmean(first) - fmean(values):+.2f}",
            "p": "" if p is None else f"{p:.2g}",
            "CPU-seconds a seed": f"{seconds.get(name, 0):.0f}",
        })  # fmt: skip
    write_table(rows, out / "controls")


def count_right(accuracies: list[float]) -> list[int]:
    return [round(accuracy / 100 * TEST_IMAGES) for accuracy in accuracies]


def run_peft_arms(
    out: Path, data_seed: int, seeds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Test accuracies and CPU-seconds a seed of what starts from the pretrained backbone."""
    drawn: Record = {"backbone": "vit_mini", "data_seed": data_seed}
    scratch = PretrainConfig(pool="quilts", seed=data_seed, **drawn, **PRETRAIN)
    pretrain(scratch, out / "pretrain")
    task = drawn | {"dataset": "quilts", "weights": out / "pretrain"}
    rates = {"lr": None, "grid": GRID, "grid_seeds": seeds, "seeds": seeds, "jobs": 2}
    peft: Record = task | PEFT | rates
    seconds = {"direct": fmean(finetune(FinetuneConfig(**peft), out / "direct").trial_seconds)}
    for name, changes in ALIGNED.items():
        units = []
        for seed in range(seeds):
            cfg = AlignConfig(**task | ALIGN | changes | {"seed": seed})
            units.append((cfg, out / f"align-{name}" / f"s{seed}"))
        list(jobs(align_one, units, 2))
        start = out / f"align-{name}"
        tuned = finetune(FinetuneConfig(**peft | {"start": start}), out / name)
        aligning = fmean(read_json(run / "result.json")["cpu_seconds"] for _, run in units)
        seconds[name] = aligning + fmean(tuned.trial_seconds)
    epochs = round(PEFT["epochs"] * seconds["mfac"] / seconds["direct"])
    longer = finetune(FinetuneConfig(**peft | {"epochs": epochs}), out / "longer")
    seconds["longer"] = fmean(longer.trial_seconds)
    print(f"dataset {data_seed}: longer PEFT has {epochs} epochs")
    arms = ("mfac", "direct", "longer", "identity", "lower-only")
    rows = evaluate([out / name for name in arms]).arms
    return {row.arm: row.accuracies for row in rows}, seconds


def align_one(unit: tuple[AlignConfig, Path]) -> None:
    """One align run, in a process of its own."""
    align(*unit)


# --- without pretraining --------------------------------------------------------------------------


class Split(NamedTuple):
    """Standardised images (N, 3, 16, 16) and their labels."""

    x: Tensor
    y: Tensor


def standardised(data_seed: int) -> tuple[Split, Split, Split]:
    """Training, validation and test images."""
    _, task = quilts(data_seed)
    mean = torch.tensor(task.mean).view(3, 1, 1)
    std = torch.tensor(task.std).view(3, 1, 1)
    splits = []
    for part in (task.train, task.val, task.test):
        splits.append(Split((torch.as_tensor(part.images) - mean) / std, part.targets))
    train, val, test = splits
    return train, val, test


def pixel_regression(data_seed: int) -> float:
    """Test accuracy of a logistic regression on pixels; its decay is chosen on validation."""
    train, val, test = standardised(data_seed)
    best = (-1.0, 0.0)  # validation, test
    for decay in DECAYS:
        layer = fit_regression(train, decay)
        accuracies = []
        for split in (val, test):
            right = layer(split.x.flatten(1)).argmax(1) == split.y
            accuracies.append(100 * float(right.double().mean()))
        if accuracies[0] > best[0]:
            best = (accuracies[0], accuracies[1])
    return best[1]


def fit_regression(train: Split, decay: float) -> nn.Linear:
    """The optimum of the convex problem, by L-BFGS from zero."""
    layer = nn.Linear(train.x[0].numel(), 8)
    for tensor in layer.parameters():
        nn.init.zeros_(tensor)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(layer(train.x.flatten(1)), train.y)
        loss = loss + decay / 2 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return layer


def train_from_scratch(network: str, data_seed: int, seeds: int) -> list[float]:
    """Test accuracies of all seeds; rate on mean validation, each seed's best epoch."""
    best: list[tuple[Score, float]] = []
    for rate in SCRATCH_RATES:
        trials = [(network, data_seed, rate, seed) for seed in range(seeds)]
        ends = list(jobs(train_one, trials, 2))
        if not best or mean_validation(ends) > mean_validation(best):
            best = ends
    return [test for _, test in best]


def mean_validation(ends: list[tuple[Score, float]]) -> float:
    return fmean(val.accuracy for val, _ in ends)


Classifier = Callable[[Tensor, bool], Tensor]  # (images, training) -> logits


def train_one(trial: tuple[str, int, float, int]) -> tuple[Score, float]:
    """(best validation score, that epoch's test accuracy) of one training from scratch."""
    name, data_seed, rate, seed = trial
    g = rng(seed, name)
    train, val, test = standardised(data_seed)
    make = make_cnn if name == "small CNN" else make_vit
    network, tensors = make(8, g)
    optimiser = torch.optim.AdamW(tensors, lr=rate, weight_decay=0.05)
    steps = 3 * SCRATCH_EPOCHS
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, rate, total_steps=steps, pct_start=0.1
    )
    best = Score(accuracy=-1.0, loss=0.0)
    tested = 0.0
    for epoch in range(1, SCRATCH_EPOCHS + 1):
        for index in torch.randperm(len(train.y), generator=g).chunk(3):
            optimiser.zero_grad()
            F.cross_entropy(network(train.x[index], True), train.y[index]).backward()
            optimiser.step()
            schedule.step()
        if epoch % 5 == 0:
            found = score_on(network, val)
            if (found.accuracy, -found.loss) > (best.accuracy, -best.loss):
                best = found
                tested = score_on(network, test).accuracy
    return best, tested


@torch.no_grad()
def score_on(network: Classifier, split: Split) -> Score:
    """How good a network is on a split."""
    z = network(split.x, False)
    return score(z, split.y, F.cross_entropy(z, split.y, reduction="none"))


def make_cnn(classes: int, g: torch.Generator) -> tuple[Classifier, list[Tensor]]:
    """Five convolutions with batch normalisation, then the mean over positions."""
    widths = (3, 32, 32, 64, 64, 64)
    layers: list[nn.Module] = []
    for i in range(5):
        stride = 2 if i in (1, 3) else 1
        layers.append(nn.Conv2d(widths[i], widths[i + 1], 3, stride, padding=1, bias=False))
        layers.append(nn.BatchNorm2d(widths[i + 1]))
        layers.append(nn.ReLU())
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    network = nn.Sequential(*layers, *last)
    tensors: list[Tensor] = list(network.parameters())
    for tensor in tensors:
        if tensor.ndim > 1:
            nn.init.kaiming_normal_(tensor, generator=g)
    nn.init.zeros_(tensors[-1])

    def classify(images: Tensor, training: bool) -> Tensor:
        z: Tensor = network.train(training)(images)
        return z

    return classify, tensors


def make_vit(classes: int, g: torch.Generator) -> tuple[Classifier, list[Tensor]]:
    """vit_mini from a random initialisation, all of it trained."""
    arch = BACKBONES["vit_mini"]
    vit = build_vit(arch)
    initialise([vit, build_head(arch, "mae")], "mae", g)
    backbone = Backbone(vit)
    phi = trainable(init_head(arch.dim, classes, g))
    psi = [tensor for name, tensor in vit.named_parameters() if name != "pos_embed"]

    def classify(images: Tensor, training: bool) -> Tensor:
        return logits(features(backbone, None, images), phi)

    return classify, [*psi, *phi.values()]


if __name__ == "__main__":
    typer.run(main)
