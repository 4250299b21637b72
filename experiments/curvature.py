"""How much of the downstream gradient can M-FAC act on, and does it matter?

    python -m experiments.curvature --weights extras/quilts.pth --out runs/curvature
    python -m experiments.curvature --weights runs/jepa --pretext ijepa --cases 1 --out runs/jepa-c
    python -m experiments.curvature --weights PHOTO_WEIGHTS --dataset folder:DIR --pool DIR ...

Part 1: the share of |g|² inside the span of the stored gradients, and how much of it the inverse
removes, early (alternations 1 to 3) and late (the last 3), against N_L, batch, rank and λ.
Part 2 (--seeds 16): test accuracy after `mfac` and `identity`, 16 seeds each, where the share was
largest. The same command goes on.
"""

from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer

from align import align
from config import AlignConfig, FinetuneConfig, Record
from evaluate import evaluate
from experiments.recipe import Dataset, markdown, write_table
from extras.plots import read_metrics
from finetune import finetune
from support.processes import jobs

SETTINGS: Record = {
    "backbone": "vit_mini", "alternations": 12, "lower_steps": 20, "upper_steps": 4, "warmup": 2,
    "p_lr": 1e-3, "d_lr": 1e-2, "mask_ratio": 0.3, "eval_every": 12,
}  # fmt: skip
CASES: dict[str, Record] = {
    "N_L 20, batch 64, rank 8": {},
    "N_L 5": {"lower_steps": 5},
    "N_L 80": {"lower_steps": 80},
    "pretext batch 8": {"p_batch": 8},
    "downstream batch 80 (all)": {"d_batch": 80},
    "rank 1": {"rank": 1},
    "rank 64": {"rank": 64},
    "λ 1e-1": {"lam": 1e-1},
    "λ 1e-5": {"lam": 1e-5},
}
PEFT: Record = {"lr": 1e-2, "warmup_epochs": 7, "eval_epochs": 2, "jobs": 2}


def main(
    weights: Annotated[Path, typer.Option()],
    pretext: str = "mae",
    dataset: Dataset = "quilts",
    pool: str = "quilts",
    cases: int = len(CASES),
    seeds: int = 0,
    out: Path = Path("runs/curvature"),
) -> None:
    """Do part 1 for the first --cases, and part 2 with so many --seeds."""
    torch.set_num_threads(1)
    data = {"weights": weights, "pretext": pretext, "dataset": dataset, "pool": pool}
    rows: list[Record] = []
    for number, (case, changes) in enumerate([*CASES.items()][:cases]):
        run = out / f"case{number}"
        align(AlignConfig(**SETTINGS | data | changes), run)
        rows.append({"case": case} | shares(run, "early") | shares(run, "late"))
    write_table(rows, out / "curvature")
    if seeds:
        compare(SETTINGS | data, seeds, out)


def shares(run: Path, part: str) -> Record:
    """Means of |q|/|g|, of the share, and of what is removed of it, in per cent."""
    records = [record for record in read_metrics(run) if "share" in record]
    some = records[:3] if part == "early" else records[-3:]
    means = {}
    for key in ("q_over_g", "share", "removed"):
        means[key] = fmean(value for record in some for value in record[key])
    return {
        f"{part}: q/g": f"{means['q_over_g']:.4f}",
        f"{part}: share %": f"{100 * means['share']:.2f}",
        f"{part}: removed %": f"{100 * means['removed']:.2f}",
    }


def compare(settings: Record, seeds: int, out: Path) -> None:
    """Test accuracy after M-FAC and after no curvature, an align run a seed."""
    settings = settings | {"p_batch": 8, "alternations": 30}
    for inverse in ("mfac", "identity"):
        units = []
        for seed in range(seeds):
            cfg = AlignConfig(**settings | {"hypergrad": inverse, "seed": seed})
            units.append((cfg, out / inverse / f"s{seed}"))
        list(jobs(align_one, units, 2))
        known = {name: settings[name] for name in ("backbone", "weights", "pretext", "dataset")}
        peft = FinetuneConfig(**known, **PEFT, start=out / inverse, seeds=seeds)
        finetune(peft, out / f"tuned-{inverse}")
    first, second = evaluate([out / "tuned-mfac", out / "tuned-identity"]).arms
    rows = []
    for arm in (first, second):
        test = f"{arm.mean:.2f} ± {arm.std or 0:.2f}"
        rows.append({"inverse": arm.arm, "test (%)": test, "right": f"{arm.counts}"})
    print(markdown(rows))
    print(second.first_minus_this)


def align_one(unit: tuple[AlignConfig, Path]) -> None:
    """One align run, in a process of its own."""
    torch.set_num_threads(1)
    align(*unit)


if __name__ == "__main__":
    typer.run(main)
