"""Does aligning help on real photographs? One script that does it all; the same command goes on.

    python -m experiments.photographs DATA OUT

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

import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, NamedTuple

import torch
import typer

from align import align
from config import AlignConfig, FinetuneConfig, PretrainConfig, Record
from data import Pool, rng
from evaluate import compare
from extras.pretrain import pretrain
from finetune import finetune
from support.experiment import open_task
from support.processes import jobs
from support.runs import read_json

PRETRAININGS = 2
PRETRAIN: Record = {
    "backbone": "vit_mini", "image_size": 64, "patch_size": 8, "batch": 128, "beta2": 0.999,
    "epochs": 40, "warmup_epochs": 4, "base_lr": 4e-3,
}  # fmt: skip
HARDLY: Record = {"epochs": 1, "warmup_epochs": 0, "base_lr": 1e-9}
ALIGN: Record = {
    "alternations": 12, "lower_steps": 5, "upper_steps": 5, "p_batch": 64, "d_batch": 32,
    "warmup": 2, "probe_epochs": 5, "eval_every": 12,
}  # fmt: skip
TRIED: tuple[Record, ...] = (
    {"p_lr": 1e-3, "d_lr": 1e-2},
    {"p_lr": 3e-3, "d_lr": 1e-2},
    {"p_lr": 1e-3, "d_lr": 3e-3},
)
PEFT: Record = {"epochs": 8, "warmup_epochs": 1, "batch": 32, "eval_epochs": 8}
PEFT_GRID = (1e-2, 3e-2, 1e-1)
ALIGNED: dict[str, Record] = {
    "aligned": {},
    "identity": {"hypergrad": "identity"},
    "lower only": {"upper_steps": 0},
    "own images": {"upper_steps": 0, "pool": "own"},
}
MAIN = ("aligned", "peft", "longer")
CONTROLS = ("identity", "lower only", "own images", "random")
SETS = ("flowers", "cub200", "voc07")
DRAWS = 200_000


class Unit(NamedTuple):
    """A run and where it is."""

    cfg: PretrainConfig | AlignConfig | FinetuneConfig
    out: Path


class Study(NamedTuple):
    """What the test has in common."""

    data: Path
    out: Path
    backbones: list[Path]  # the pretrained ones, and last the one that was hardly trained
    align_rates: Record
    peft_rate: float
    seeds: int


def main(
    data: Path,
    out: Path,
    seeds: int = 8,
    sets: Annotated[str, typer.Option(help="Comma list; fewer only to try it.")] = ",".join(SETS),
) -> None:
    """Do all of it; tables on stdout."""
    torch.set_num_threads(1)
    backbones = pretrain_backbones(data, out)
    align_rates, peft_rate = choose_rates(data, out, backbones[0])
    print(f"chosen: {align_rates}, PEFT {peft_rate}", flush=True)
    study = Study(data, out, backbones, align_rates, peft_rate, seeds)
    test: dict[str, dict[str, list[float]]] = {}  # by arm and set, of each seed
    seconds: dict[str, float] = {}
    aligned_counts: dict[str, list[int]] = {}
    for arms in (MAIN, CONTROLS):
        for name in sets.split(","):
            for arm in arms:
                epochs = int(PEFT["epochs"])
                if arm == "longer":
                    epochs = round(epochs * seconds["aligned"] / seconds["peft"])
                results, cpu = run_arm(study, arm, name, epochs)
                seconds[arm] = fmean(cpu)
                test.setdefault(arm, {})[name] = [result["test"][0] for result in results]
                counts = count_right(results)
                first = aligned_counts.setdefault(name, counts)
                p = compare(first, counts).p
                mean = fmean(test[arm][name])
                row = f"| {name} | {arm} | {mean:.2f} ± {stdev(test[arm][name]):.2f} "
                row += f"| {fmean(test['aligned'][name]) - mean:+.2f} | {p:.3g} "
                print(row + f"| {seconds[arm]:.0f} | {counts} |", flush=True)
    for arm in (*MAIN[1:], *CONTROLS):
        pairs = [(test["aligned"][name], test[arm][name]) for name in test[arm]]
        difference, p = pool_sets(pairs)
        print(f"pooled, aligned minus {arm}, {[*test[arm]]}: {difference:+.2f} points, p {p:.5f}")


# --- runs -----------------------------------------------------------------------------------------


def run_all(units: list[Unit]) -> list[Record]:
    """The results of all runs, two at a time."""
    print(f"{len(units)} runs, first {units[0].out}", file=sys.stderr, flush=True)
    return list(jobs(run_one, units, 2))


def run_one(unit: Unit) -> Record:
    """The result of one run, in a process of its own."""
    torch.set_num_threads(1)
    cfg, out = unit
    if isinstance(cfg, PretrainConfig):
        pretrain(cfg, out)
    elif isinstance(cfg, FinetuneConfig):
        finetune(cfg, out)
    elif cfg.pool == "own":  # the training images of the task itself
        align(cfg, out, pool=Pool(open_task(cfg).train.images))
    else:
        align(cfg, out)
    return read_json(out / "result.json")


def pretrain_backbones(data: Path, out: Path) -> list[Path]:
    """Two pretrained backbones, and one that is nearly as it was drawn."""
    settings = PRETRAIN | {"pool": str(data / "tiny-imagenet/train")}
    units = []
    for seed in range(PRETRAININGS):
        units.append(Unit(PretrainConfig(**settings, seed=seed), out / f"pretrain-{seed}"))
    units.append(Unit(PretrainConfig(**settings | HARDLY), out / "random"))
    run_all(units)
    return [unit.out for unit in units]


def choose_rates(data: Path, out: Path, weights: Path) -> tuple[Record, float]:
    """The rates of align and of PEFT, by validation on two other sets, two seeds each."""
    sets = {"photos": data / "flower_photos", "dtd": data / "dtd/dtd/images"}
    tasks: dict[str, Record] = {}
    direct = []
    for name, path in sets.items():
        tasks[name] = {"backbone": "vit_mini", "weights": weights, "dataset": f"folder:{path}"}
        cfg = FinetuneConfig(**tasks[name], **PEFT, grid=PEFT_GRID, grid_seeds=2, seeds=2)
        direct.append(Unit(cfg, out / f"choose-{name}"))
    grids = [result["grid"] for result in run_all(direct)]  # validation by rate
    peft_scores = {rate: fmean(fmean(grid[rate]) for grid in grids) for rate in grids[0]}
    peft_rate = float(max(peft_scores, key=lambda rate: peft_scores[rate]))
    scores = []
    for number, rates in enumerate(TRIED):
        aligned = []
        tuned = []
        for name, task in tasks.items():
            run = out / f"choose-{name}-{number}"
            pool = str(data / "tiny-imagenet/train")
            aligned.append(Unit(AlignConfig(**task, **ALIGN, **rates, pool=pool), run))
            peft = FinetuneConfig(**task, **PEFT, lr=peft_rate, seeds=2, start=run)
            tuned.append(Unit(peft, Path(f"{run}-peft")))
        run_all(aligned)
        scores.append(fmean(fmean(result["val"]) for result in run_all(tuned)))
    print(f"validation by PEFT's rate {peft_scores}, by {TRIED}: {scores}")
    return TRIED[scores.index(max(scores))], peft_rate


def run_arm(study: Study, arm: str, name: str, epochs: int) -> tuple[list[Record], list[float]]:
    """The results of one arm on one set, a seed each; CPU-seconds of align and PEFT together."""
    folder = study.out / name / arm.replace(" ", "-")
    task: Record = {
        "backbone": "vit_mini", "dataset": name, "partial": True, "data_root": study.data
    }  # fmt: skip
    aligned = []
    tuned = []
    for seed in range(study.seeds):
        weights = study.backbones[-1 if arm == "random" else seed % PRETRAININGS]
        one: Record = task | {"seed": seed, "weights": weights}
        peft: Record = one | PEFT | {"lr": study.peft_rate, "seeds": 1, "epochs": epochs}
        if arm in ALIGNED:
            pool = {"pool": str(study.data / "tiny-imagenet/train")}
            settings = one | ALIGN | study.align_rates | pool | ALIGNED[arm]
            aligned.append(Unit(AlignConfig(**settings), folder / f"s{seed}"))
            peft["start"] = folder / f"s{seed}"
        tuned.append(Unit(FinetuneConfig(**peft), folder / f"peft{seed}"))
    seconds = [0.0] * study.seeds
    if aligned:
        seconds = [result["cpu_seconds"] for result in run_all(aligned)]
    results = run_all(tuned)
    for seed, result in enumerate(results):
        seconds[seed] += result["trial_seconds"][0]
    return results, seconds


# --- statistics -----------------------------------------------------------------------------------


def count_right(results: list[Record]) -> list[int]:
    """Right test images of each seed; hundredths of a point of mAP on VOC07."""
    counts = []
    for result in results:
        counts.append(result["right"][0] if result["right"] else round(100 * result["test"][0]))
    return counts


def pool_sets(pairs: list[tuple[list[float], list[float]]]) -> tuple[float, float]:
    """Mean difference of the sets in points, and its two-sided p, seeds permuted within a set."""
    observed = fmean(fmean(x) - fmean(y) for x, y in pairs)
    g = rng(0, "pooled")
    total = torch.zeros(DRAWS, dtype=torch.float64)
    for x, y in pairs:
        values = torch.tensor([*x, *y], dtype=torch.float64)
        drawn = values[torch.rand(DRAWS, len(values), generator=g).argsort(1)]  # (DRAWS, n + m)
        difference = drawn[:, : len(x)].mean(1) - drawn[:, len(x) :].mean(1)
        total += difference / len(pairs)
    extreme = int((total.abs() >= abs(observed) - 1e-9).sum())
    return observed, (extreme + 1) / (DRAWS + 1)


if __name__ == "__main__":
    typer.run(main)
