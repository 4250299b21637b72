"""The demo's controls: is it alignment that helps, and is pretraining needed at all?

    python results/demo_full.py runs/demo_full

On three drawn datasets, every rate chosen on mean validation over eight seeds: PEFT after
BiSSLight, after alignment without curvature and without an upper level, PEFT alone, PEFT alone with
as many CPU-seconds as alignment and PEFT; and, on the 80 labels alone, a small CNN, the same ViT
from scratch and a logistic regression on pixels. About an hour on two cores; the same command
goes on. Its settings are the demo's; the tables of demo.md are from when that had T = 60.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from align import align
from config import BACKBONES, AlignConfig, FinetuneConfig
from data import quilts, rng
from evaluate import compare, evaluate
from extras.demo import ALIGN, PEFT, PRETRAIN
from extras.pretrain import PretrainConfig, pretrain
from finetune import finetune
from lora import Backbone, features, init_head, logits
from support.checkpoints import build_head, build_vit, initialise
from support.metrics import Score, score
from support.optim import trainable
from support.processes import jobs
from support.runs import read_json

SEEDS = 8
EPOCHS = 100  # from scratch
ALIGNED: dict[str, dict[str, Any]] = {
    "mfac": {},
    "identity": {"hypergrad": "identity"},
    "lower-only": {"upper_steps": 0},
}
Network = Callable[[Tensor, bool], Tensor]  # (images, training) -> logits
Trial = tuple[str, int, float, int]  # network, data seed, rate, seed


def main(out: Path, data_seed: int, at_once: int) -> None:
    """All arms on one drawn dataset; prints a table."""
    torch.set_num_threads(1)
    about: dict[str, Any] = {"backbone": "vit_mini", "data_seed": data_seed}
    cfg = PretrainConfig(pool="quilts", seed=data_seed, **about, **PRETRAIN)
    about |= {"dataset": "quilts", "weights": pretrain(cfg, out / "pretrain").weights}
    grid = PEFT | {"lr": None, "grid": (3e-3, 1e-2, 3e-2), "grid_seeds": SEEDS}
    peft = FinetuneConfig(seeds=SEEDS, jobs=at_once, **about, **grid)
    cost = {"direct": fmean(finetune(peft, out / "direct").trial_seconds)}
    for name, changes in ALIGNED.items():
        cfgs = [AlignConfig(seed=seed, **about, **ALIGN | changes) for seed in range(SEEDS)]
        units = [(one, out / f"align-{name}" / f"s{one.seed}") for one in cfgs]
        _ = [*jobs(aligned, units, at_once)]
        tuned = finetune(peft.but(start=out / f"align-{name}"), out / name)
        spent = [read_json(run / "result.json")["cpu_seconds"] for _, run in units]
        cost[name] = fmean(spent) + fmean(tuned.trial_seconds)
    longer = round(peft.epochs * cost["mfac"] / cost["direct"])
    finetune(peft.but(epochs=longer), out / "longer")
    rows = evaluate([out / name for name in ("mfac", "direct", "longer", "identity", "lower-only")])
    arms = {row.arm: row.accuracies for row in rows.arms}
    for network in ("small CNN", "ViT from scratch"):
        arms[network] = from_scratch(network, data_seed, at_once)
    arms["pixel regression"] = [pixel_regression(data_seed)]
    print(f"\ndataset {data_seed}: longer PEFT is {longer} epochs; CPU-seconds a seed {cost}")
    for name, accuracies in arms.items():
        difference = fmean(arms["mfac"]) - fmean(accuracies)
        first, other = ([round(4.8 * x) for x in arm] for arm in (arms["mfac"], accuracies))
        p = compare(first, other).p  # of right images, of 480
        print(f"{name:20} {fmean(accuracies):.2f}  {difference:+.2f}  p {p}")


def aligned(unit: tuple[AlignConfig, Path]) -> None:
    """One align run, in a process of its own."""
    align(*unit)


def pixel_regression(data_seed: int) -> float:
    """Test accuracy of a logistic regression on pixels; its decay is chosen on validation."""
    task, best = quilts(data_seed)[1], (-1.0, 0.0)
    parts = {"train": task.train, "val": task.val, "test": task.test}
    x = {name: torch.as_tensor(part.images).flatten(1) - 0.5 for name, part in parts.items()}
    for decay in (1e-4, 1e-3, 1e-2, 1e-1):
        layer = nn.Linear(x["train"].shape[1], len(task.classes))
        for tensor in layer.parameters():
            nn.init.zeros_(tensor)
        opt = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def closure(layer: Any = layer, decay: float = decay, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss: Tensor = F.cross_entropy(layer(x["train"]), task.train.targets)
            loss = loss + decay / 2 * layer.weight.square().sum()
            loss.backward()
            return loss

        opt.step(closure)
        right = [
            100 * float((layer(x[name]).argmax(1) == parts[name].targets).double().mean())
            for name in ("val", "test")
        ]
        best = max(best, (right[0], right[1]), key=lambda pair: pair[0])
    return best[1]


def from_scratch(network: str, data_seed: int, at_once: int) -> list[float]:
    """Test accuracies of eight seeds; rate on mean validation, each seed's best epoch."""
    rates = (3e-4, 1e-3, 3e-3)
    trials: list[Trial] = [(network, data_seed, lr, s) for lr in rates for s in range(SEEDS)]
    ends = [*jobs(trained, trials, at_once)]
    by_rate = [ends[i : i + SEEDS] for i in range(0, len(ends), SEEDS)]
    best = max(by_rate, key=lambda ends: fmean(val.accuracy for val, _ in ends))
    return [test for _, test in best]


def trained(trial: Trial) -> tuple[Score, float]:
    """(best validation score, that epoch's test accuracy) of one training from scratch."""
    name, data_seed, lr, seed = trial
    task, g = quilts(data_seed)[1], rng(seed, name)
    shift, scale = (torch.tensor(x).view(3, 1, 1) for x in (task.mean, task.std))
    train, val, test = (
        ((torch.as_tensor(part.images) - shift) / scale, part.targets)
        for part in (task.train, task.val, task.test)
    )
    make = cnn if name == "small CNN" else vit
    network, tensors = make(len(task.classes), g)
    opt = torch.optim.AdamW(tensors, lr=lr, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=3 * EPOCHS, pct_start=0.1)
    best, tested = Score(accuracy=-1.0, loss=0.0), 0.0
    for epoch in range(1, EPOCHS + 1):
        for index in torch.randperm(len(train[1]), generator=g).chunk(3):
            opt.zero_grad()
            F.cross_entropy(network(train[0][index], True), train[1][index]).backward()
            opt.step()
            rate.step()
        if epoch % 5 == 0:
            now = scored(network, val)
            if (now.accuracy, -now.loss) > (best.accuracy, -best.loss):
                best, tested = now, scored(network, test).accuracy
    return best, tested


@torch.no_grad()
def scored(network: Network, split: tuple[Tensor, Tensor]) -> Score:
    """What a network is worth on a split."""
    z = network(split[0], False)
    return score(z, split[1], F.cross_entropy(z, split[1], reduction="none"))


def cnn(classes: int, g: torch.Generator) -> tuple[Network, list[Tensor]]:
    """Five convolutions with batch normalisation, then the mean over positions."""

    def layers() -> Iterator[nn.Module]:
        for i, (a, b) in enumerate(pairwise((3, 32, 32, 64, 64, 64))):
            yield nn.Conv2d(a, b, 3, stride=2 if i in (1, 3) else 1, padding=1, bias=False)
            yield nn.BatchNorm2d(b)
            yield nn.ReLU()

    net = nn.Sequential(*layers(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    tensors: list[Tensor] = list(net.parameters())
    for tensor in tensors:
        if tensor.ndim > 1:
            nn.init.kaiming_normal_(tensor, generator=g)
    nn.init.zeros_(tensors[-1])
    return lambda images, training: net.train(training)(images), tensors


def vit(classes: int, g: torch.Generator) -> tuple[Network, list[Tensor]]:
    """vit_mini from a random initialisation, all of it trained."""
    networks = [build_vit(BACKBONES["vit_mini"]), build_head(BACKBONES["vit_mini"], "mae")]
    initialise(networks, "mae", g)
    backbone, phi = (
        Backbone(networks[0]),
        trainable(init_head(BACKBONES["vit_mini"].dim, classes, g)),
    )
    psi = [x for name, x in networks[0].named_parameters() if name != "pos_embed"]
    return lambda images, _: logits(features(backbone, None, images), phi), [*psi, *phi.values()]


if __name__ == "__main__":
    for number in range(3):
        main(Path(sys.argv[1]) / f"data{number}", number, at_once=2)
