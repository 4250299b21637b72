"""Does aligning help on real photographs? One script that does it all; the same command goes on.

    python results/photographs.py DATA OUT

DATA holds tiny-imagenet/train (unlabelled pool), flower_photos and dtd/dtd/images (settings are
chosen there) and, as torchvision lays them out, flowers-102, CUB_200_2011 and VOCdevkit (the test).
Two pretrainings of vit_mini at 64 px; on each, four seeds a set, so eight seeds an arm.

    aligned      BiSSLight, then PEFT             identity    the same without curvature
    peft         PEFT alone                       lower only  no upper level; on the pool
    longer       PEFT with the CPU time of        own images  lower only, on the training images
                 `aligned`                        random      PEFT from a backbone hardly trained

For each set: mean and deviation, difference to `aligned`, exact p. Pooled: the mean difference of
the sets, its p by drawing 200,000 times which seeds of a set are which arm's.
"""

import json
import sys
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from align import align
from config import AlignConfig, FinetuneConfig
from data import Pool, rng
from evaluate import compare
from extras.pretrain import PretrainConfig, pretrain
from finetune import finetune
from support.experiment import named
from support.processes import jobs

SEEDS, PRETRAININGS = 8, 2
ALIGN: dict[str, Any] = {
    "alternations": 12, "lower_steps": 5, "upper_steps": 5, "p_batch": 64, "d_batch": 32,
    "warmup": 2, "probe_epochs": 5, "eval_every": 12,
}  # fmt: skip
TRIED = ({"p_lr": 1e-3, "d_lr": 1e-2}, {"p_lr": 3e-3, "d_lr": 1e-2}, {"p_lr": 1e-3, "d_lr": 3e-3})
PEFT: dict[str, Any] = {"epochs": 8, "warmup_epochs": 1, "batch": 32, "eval_epochs": 8}
ALIGNED: dict[str, dict[str, Any]] = {
    "aligned": {},
    "identity": {"hypergrad": "identity"},
    "lower only": {"upper_steps": 0},
    "own images": {"upper_steps": 0, "pool": "own"},
}
MAIN = ("aligned", "peft", "longer")
CONTROLS = ("identity", "lower only", "own images", "random")
SETS = ("flowers", "cub200", "voc07")
Unit = tuple[Any, Path]


def done(unit: Unit) -> dict[str, Any]:
    """One run, in a process of its own; its result."""
    torch.set_num_threads(1)
    cfg, out = unit
    command: Any = align if isinstance(cfg, AlignConfig) else finetune
    if isinstance(cfg, PretrainConfig):
        command = pretrain
    if getattr(cfg, "pool", None) == "own":  # the training images of the task itself
        command = partial(align, pool=Pool(named(cfg, "dataset").train.images))
    command(cfg, out)
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def together(units: list[Unit]) -> list[dict[str, Any]]:
    """All of them, two at a time."""
    print(f"{len(units)} runs, first {units[0][1]}", file=sys.stderr, flush=True)
    return [*jobs(done, units, 2)]


def backbones(data: Path, out: Path) -> list[Path]:
    """Two pretrained backbones, and one that is nearly as it was drawn."""
    about: dict[str, Any] = {
        "backbone": "vit_mini", "pool": str(data / "tiny-imagenet/train"), "image_size": 64,
        "patch_size": 8, "batch": 128, "beta2": 0.999,
    }  # fmt: skip
    good = {"epochs": 40, "warmup_epochs": 4, "base_lr": 4e-3}
    units: list[Unit] = [
        (PretrainConfig(**about, **good, seed=i), out / f"pretrain-{i}")
        for i in range(PRETRAININGS)
    ]
    random = {"epochs": 1, "warmup_epochs": 0, "base_lr": 1e-9}
    units.append((PretrainConfig(**about, **random), out / "random"))
    together(units)
    return [place for _, place in units]


def chosen(data: Path, out: Path, weights: Path) -> tuple[dict[str, float], float]:
    """Rates of align and of PEFT, by validation on two other sets, two seeds each."""
    sets = {"photos": data / "flower_photos", "dtd": data / "dtd/dtd/images"}
    about = {name: {"backbone": "vit_mini", "weights": weights, "dataset": f"folder:{path}"}
             for name, path in sets.items()}  # fmt: skip
    grid = {"grid": (1e-2, 3e-2, 1e-1), "grid_seeds": 2, "seeds": 2}
    direct = together([(FinetuneConfig(**about[name], **PEFT, **grid), out / f"choose-{name}")
                       for name in sets])  # fmt: skip
    mean = {lr: fmean(fmean(found["grid"][lr]) for found in direct) for lr in direct[0]["grid"]}
    lr = float(max(mean, key=lambda rate: mean[rate]))
    scores = []
    for i, rates in enumerate(TRIED):
        pool = str(data / "tiny-imagenet/train")
        units: list[Unit] = [
            (AlignConfig(**about[name], **ALIGN, **rates, pool=pool), out / f"choose-{name}-{i}")
            for name in sets
        ]
        together(units)
        tuned = [(FinetuneConfig.model_validate({"start": place, "lr": lr, "seeds": 2, **PEFT}),
                  Path(f"{place}-peft")) for _, place in units]  # fmt: skip
        scores.append(fmean(fmean(found["val"]) for found in together([*tuned])))
    print(
        f"validation by PEFT's rate {mean}, by rates of align {[*zip(TRIED, scores, strict=True)]}"
    )
    return TRIED[scores.index(max(scores))], lr


def arm(
    arm: str, name: str, data: Path, out: Path, rates: Any, lr: float, psi: list[Path], epochs: int
) -> list[dict[str, Any]]:
    """Results of one arm on one set, a seed each; `cpu` is what align and PEFT took together."""
    base: dict[str, Any] = {
        "backbone": "vit_mini", "dataset": name, "partial": True, "data_root": data
    }  # fmt: skip
    place, cost = out / name / arm.replace(" ", "-"), [0.0] * SEEDS
    network = [psi[-1] if arm == "random" else psi[i % PRETRAININGS] for i in range(SEEDS)]
    each: list[dict[str, Any]] = [
        base | {"seed": i, "weights": psi_i} for i, psi_i in enumerate(network)
    ]
    if arm in ALIGNED:
        given = ALIGN | rates | {"pool": str(data / "tiny-imagenet/train")} | ALIGNED[arm]
        places = [place / f"s{one['seed']}" for one in each]
        found = together([
            (AlignConfig(**given | one), at) for one, at in zip(each, places, strict=True)
        ])  # fmt: skip
        cost = [result["cpu_seconds"] for result in found]
        each = [{"start": at, "seed": i} for i, at in enumerate(places)]
    peft = PEFT | {"lr": lr, "seeds": 1, "epochs": epochs}
    found = together([
        (FinetuneConfig.model_validate(peft | one), place / f"peft{one['seed']}") for one in each
    ])  # fmt: skip
    return [f | {"cpu": f["trial_seconds"][0] + c} for f, c in zip(found, cost, strict=False)]


def right(found: list[dict[str, Any]]) -> list[int]:
    """Right test images of each seed; hundredths of a point of mAP on VOC07."""
    return [f["right"][0] if f["right"] else round(100 * f["test"][0]) for f in found]


def pooled(sets: list[tuple[list[float], list[float]]]) -> tuple[float, float]:
    """Mean difference of the sets in points, and its two-sided p, seeds permuted within a set."""
    observed, g = fmean(fmean(x) - fmean(y) for x, y in sets), rng(0, "pooled")
    total = torch.zeros(200_000, dtype=torch.float64)
    for x, y in sets:
        values = torch.tensor([*x, *y], dtype=torch.float64)
        drawn = values[torch.rand(len(total), len(values), generator=g).argsort(1)]
        total += (drawn[:, : len(x)].mean(1) - drawn[:, len(x) :].mean(1)) / len(sets)
    extreme = int((total.abs() >= abs(observed) - 1e-9).sum())
    return observed, (extreme + 1) / (len(total) + 1)


def main(data: Path, out: Path) -> None:
    """All of it; tables on stdout."""
    torch.set_num_threads(1)
    psi = backbones(data, out)
    rates, lr = chosen(data, out, psi[0])
    print(f"chosen: {rates}, PEFT {lr}", flush=True)
    points: dict[str, dict[str, list[float]]] = defaultdict(dict)  # by arm and set, of each seed
    first, cpu, epochs = dict[str, list[int]](), dict[str, float](), PEFT["epochs"]
    for some in (MAIN, CONTROLS):
        for name, one in product(SETS, some):
            as_long = round(epochs * cpu["aligned"] / cpu["peft"]) if one == "longer" else epochs
            found = arm(one, name, data, out, rates, lr, psi, as_long)
            cpu[one] = fmean(f["cpu"] for f in found)
            test = points[one][name] = [f["test"][0] for f in found]
            counts = right(found)
            p = compare(first.setdefault(name, counts), counts).p
            versus = fmean(points["aligned"][name]) - fmean(test)
            print(f"| {name} | {one} | {fmean(test):.2f} ± {stdev(test):.2f} | {versus:+.2f} | "
                  f"{p:.3g} | {cpu[one]:.0f} | {counts} |", flush=True)  # fmt: skip
    for one in (*MAIN[1:], *CONTROLS):
        versus, p = pooled([(points["aligned"][name], x) for name, x in points[one].items()])
        print(f"pooled, aligned minus {one}, {[*points[one]]}: {versus:+.2f} points, p {p:.5f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
