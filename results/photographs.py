"""Does aligning help on real photographs? One script that does it all; the same command goes on.

    python results/photographs.py DATA OUT

DATA holds tiny-imagenet/train (unlabelled pool), flower_photos and dtd/dtd/images (settings are
chosen there) and, as torchvision lays them out, flowers-102, CUB_200_2011 and VOCdevkit (the test).
Two pretrainings of vit_mini at 64 px; on each, four align seeds a set: eight seeds an arm.

    aligned      BiSSLight, then PEFT             identity    the same without curvature
    lower only   no upper level; on the pool      own images  lower only, on the training images
    peft         PEFT alone                       longer      PEFT with the CPU time of `aligned`
    random       PEFT from a backbone that was hardly trained

For each set: mean and deviation, difference to `aligned`, exact p. Pooled: the mean difference of
the three sets, its p by drawing 200,000 times which seeds of a set are which arm's.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import benchmarks
from align import align
from commands import AlignConfig, FinetuneConfig
from data import Pool, rng
from evaluate import compare
from extras.pretrain import PretrainConfig, pretrain
from finetune import finetune
from run import jobs

SEEDS, PRETRAININGS = 8, 2
ALIGN: dict[str, Any] = {
    "alternations": 40, "lower_steps": 5, "upper_steps": 5, "p_batch": 64, "d_batch": 32,
    "probe_epochs": 10, "eval_every": 20,
}  # fmt: skip
TRIED = ({"p_lr": 1e-3, "d_lr": 1e-2}, {"p_lr": 3e-3, "d_lr": 1e-2}, {"p_lr": 1e-3, "d_lr": 3e-3})
PEFT: dict[str, Any] = {"epochs": 20, "warmup_epochs": 2, "batch": 32, "eval_epochs": 2}
ARMS: dict[str, dict[str, Any]] = {
    "aligned": {},
    "identity": {"hypergrad": "identity"},
    "lower only": {"upper_steps": 0},
    "own images": {"upper_steps": 0, "pool": "own"},
}
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
        command = partial(align, pool=Pool(benchmarks.load_task(cfg, cfg.data_root).train.images))
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
    grid = {"grid": (3e-3, 1e-2, 3e-2), "grid_seeds": 2, "seeds": 2}
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


def arms(data: Path, out: Path, name: str, rates: Any, lr: float, psi: list[Path]) -> Iterator[Any]:
    """(arm, right images a seed, CPU seconds a seed) on one set."""
    base: dict[str, Any] = {
        "backbone": "vit_mini", "dataset": name, "partial": True, "data_root": data
    }  # fmt: skip
    each = [{"seed": seed, "weights": psi[seed % PRETRAININGS]} for seed in range(SEEDS)]
    spent = 0.0
    for arm, changes in ARMS.items():
        given = base | ALIGN | rates | {"pool": str(data / "tiny-imagenet/train")} | changes
        place = out / name / arm.replace(" ", "-")
        aligned = together([(AlignConfig(**given | one), place / f"s{one['seed']}")
                            for one in each])  # fmt: skip
        starts = [{"start": place / f"s{one['seed']}", "seed": one["seed"]} for one in each]
        tuned = [(FinetuneConfig.model_validate({"lr": lr, "seeds": 1, **PEFT, **start}),
                  place / f"peft{start['seed']}") for start in starts]  # fmt: skip
        found = together([*tuned])
        cost = [
            a["cpu_seconds"] + f["trial_seconds"][0] for a, f in zip(aligned, found, strict=True)
        ]
        spent = spent or fmean(cost)  # of the first arm
        yield arm, right(found), fmean(cost)
    plain = base | {"lr": lr, "seeds": 1} | PEFT
    found = together([(FinetuneConfig(**plain | one), out / name / f"peft/s{one['seed']}")
                      for one in each])  # fmt: skip
    cost = [f["trial_seconds"][0] for f in found]
    yield "peft", right(found), fmean(cost)
    longer = plain | {"epochs": round(PEFT["epochs"] * spent / fmean(cost))}
    found = together([(FinetuneConfig(**longer | one), out / name / f"longer/s{one['seed']}")
                      for one in each])  # fmt: skip
    yield "longer", right(found), fmean(f["trial_seconds"][0] for f in found)
    found = together([(FinetuneConfig(**plain | one | {"weights": psi[-1]}),
                       out / name / f"random/s{one['seed']}") for one in each])  # fmt: skip
    yield "random", right(found), fmean(f["trial_seconds"][0] for f in found)


def right(found: list[dict[str, Any]]) -> list[int]:
    """Right test images of each seed; hundredths of a point of mAP on VOC07."""
    return [f["right"][0] if f["right"] else round(100 * f["test"][0]) for f in found]


def pooled(a: list[list[float]], b: list[list[float]]) -> tuple[float, float]:
    """Mean difference of the sets in points, and its two-sided p, seeds permuted within a set."""
    observed, g = fmean(fmean(x) - fmean(y) for x, y in zip(a, b, strict=True)), rng(0, "pooled")
    total = torch.zeros(200_000, dtype=torch.float64)
    for x, y in zip(a, b, strict=True):
        values = torch.tensor([*x, *y], dtype=torch.float64)
        order = torch.rand(len(total), len(values), generator=g).argsort(1)
        drawn = values[order]
        total += (drawn[:, : len(x)].mean(1) - drawn[:, len(x) :].mean(1)) / len(a)
    extreme = int((total.abs() >= abs(observed) - 1e-9).sum())
    return observed, (extreme + 1) / (len(total) + 1)


def main(data: Path, out: Path) -> None:
    """All of it; tables on stdout."""
    torch.set_num_threads(1)
    psi = backbones(data, out)
    rates, lr = chosen(data, out, psi[0])
    print(f"chosen: {rates}, PEFT {lr}", flush=True)
    points: dict[str, list[list[float]]] = {}
    for name in SETS:
        first: list[int] = []
        for arm, counts, cost in arms(data, out, name, rates, lr, psi):
            result = next((out / name).glob("peft/s0/result.json"), None)
            result = result or next((out / name).glob("aligned/peft0/result.json"))
            images = json.loads(result.read_text())["test_images"] if name != "voc07" else 10_000
            found = [100 * count / images for count in counts]
            points.setdefault(arm, []).append(found)
            first = first or counts
            p = compare(first, counts).p
            print(f"| {name} | {arm} | {fmean(found):.2f} ± {stdev(found):.2f} | "
                  f"{100 * (fmean(first) - fmean(counts)) / images:+.2f} | {p:.3g} | {cost:.0f} | "
                  f"{counts} of {images} |", flush=True)  # fmt: skip
    for arm in points:
        if arm != "aligned":
            difference, p = pooled(points["aligned"], points[arm])
            print(f"pooled, aligned minus {arm}: {difference:+.2f} points, p {p:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
