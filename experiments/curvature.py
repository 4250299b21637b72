"""How much of the downstream gradient can M-FAC act on, and does it matter?

    python results/curvature.py WEIGHTS OUT [JEPA_WEIGHTS [PHOTO_WEIGHTS PHOTO_DATASET PHOTO_POOL]]

WEIGHTS is a vit_mini pretrained on quilts, such as extras/quilts.pth; JEPA_WEIGHTS the
same with I-JEPA; PHOTO_WEIGHTS one on photographs. Part 1: the share of |g|² inside the span of the
stored gradients, and how much of it the inverse removes, early (alternations 1 to 3) and late (the
last 3), against N_L, batch, blocks and rank. Part 2: test accuracy after `mfac` and `identity`, 16
seeds each, where the share was largest. Runs are kept in OUT, and the same command goes on.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import align as align_module
import mfac
from align import align
from bisslight import within
from config import AlignConfig, FinetuneConfig
from evaluate import evaluate
from finetune import finetune
from support.processes import jobs

SETTINGS: dict[str, Any] = {
    "backbone": "vit_mini", "dataset": "quilts", "alternations": 12, "lower_steps": 20,
    "upper_steps": 4, "warmup": 2, "p_lr": 1e-3, "d_lr": 1e-2, "mask_ratio": 0.3, "eval_every": 12,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
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
PARTITIONS: tuple[mfac.Partition, ...] = ("matrix", "projection", "layer", "global")
SEEDS = 16


def by_partition(log: list[dict[str, float]]) -> Any:
    """M-FAC that also notes the share of each partition's blocks, whichever inverse runs."""

    def opened(G: torch.Tensor, lam: float, H: object = None) -> mfac.Map:
        inverse = mfac.mfac(G, lam)
        parts = {name: mfac.blocks(G, name).flatten(0, 1) for name in PARTITIONS}

        def call(g: torch.Tensor) -> torch.Tensor:
            rows = {name: mfac.blocks(g[:, None], name).flatten(0, 1) for name in PARTITIONS}
            squared = float(g.square().sum())
            log.append(
                {name: float(within(parts[name], rows[name])) / squared for name in PARTITIONS}
            )
            return inverse(g)

        return call

    return opened


def shares(run: Path) -> str:
    """Early and late: |q|/|g|, share and what is removed of it, in per cent."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    told = []
    for part in (records[:3], records[-3:]):
        found = [fmean(x for r in part for x in r[key]) for key in ("q_over_g", "share", "removed")]
        told.append(f"{found[0]:.4f} | {100 * found[1]:.2f} | {100 * found[2]:.2f}")
    return " | ".join(told)


def aligned(unit: tuple[AlignConfig, Path]) -> None:
    """One align run."""
    torch.set_num_threads(1)
    align(*unit)


def main(out: Path, sources: dict[str, dict[str, Any]]) -> None:
    """Both parts."""
    torch.set_num_threads(1)
    print("| case | early: q/g | share % | removed % | late: q/g | share % | removed % |")
    print("|---|---|---|---|---|---|---|")
    for source, about in sources.items():
        for case, changes in CASES.items() if source == "quilts, MAE" else [("as above", {})]:
            place = out / f"{source}-{case}".replace(" ", "-").replace(",", "")
            align(AlignConfig(**SETTINGS | about | changes), place)
            print(f"| {source}: {case} | {shares(place)} |", flush=True)
    log: list[dict[str, float]] = []
    program: Any = align_module
    usual, program.hypergradient = program.hypergradient, lambda c, t: by_partition(log)
    align(AlignConfig(**SETTINGS | sources["quilts, MAE"]), out / "partitions", force=True)
    program.hypergradient = usual
    for part, rows in (("early", log[:12]), ("late", log[-12:])):
        told = ", ".join(f"{name} {100 * fmean(r[name] for r in rows):.2f}" for name in PARTITIONS)
        print(f"\nshare in % by partition, {part}: {told}", flush=True)
    best = SETTINGS | sources["quilts, MAE"] | {"lower_steps": 20, "p_batch": 8, "alternations": 30}
    for inverse in ("mfac", "identity"):
        units = [(AlignConfig(**best | {"hypergrad": inverse, "seed": s}), out / inverse / f"s{s}")
                 for s in range(SEEDS)]  # fmt: skip
        _ = [*jobs(aligned, units, 2)]
        peft = {"lr": 1e-2, "warmup_epochs": 7, "eval_epochs": 2, "seeds": SEEDS, "jobs": 2}
        cfg = FinetuneConfig.model_validate({"start": out / inverse} | peft)
        finetune(cfg, out / f"tuned-{inverse}")
    found = evaluate([out / "tuned-mfac", out / "tuned-identity"])
    for row in found.arms:
        print(f"\n{row.arm}: {row.mean:.2f} ± {row.std:.2f}; right of 480: {row.counts}")
    print(found.arms[1].first_minus_this)


if __name__ == "__main__":
    quilts, place, *more = (Path(word) for word in sys.argv[1:])
    known: dict[str, dict[str, Any]] = {"quilts, MAE": {"weights": quilts}}
    if more:
        known["quilts, I-JEPA"] = {"weights": more[0], "pretext": "ijepa"}
    if more[1:]:
        known["photographs, MAE"] = {
            "weights": more[1], "dataset": f"folder:{more[2]}", "pool": str(more[3])
        }  # fmt: skip
    main(place, known)
