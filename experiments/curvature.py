"""How much of the downstream gradient can M-FAC act on, and does it matter?

    python -m experiments.curvature --out runs/curvature
    python -m experiments.curvature --weights runs/jepa --pretext ijepa --cases 1 --out runs/jepa-c
    python -m experiments.curvature --weights PHOTO_WEIGHTS --dataset folder:DIR --pool DIR ...

Part 1: the share of |g|² inside the span of the stored gradients, and how much of it the inverse
removes, early (alternations 1 to 3) and late (the last 3), against N_L, batch, rank and λ.
Part 2 (--seeds 16): test accuracy after `mfac` and `identity`, 16 seeds each, where the share was
largest. The same command goes on; part 1 is measured anew.
"""

from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import typer
from torch import Tensor

from align import align, batches_left, prepare, probe
from bisslight import Hypergradient, Map, algorithm_1
from config import OMNIGLOT, AlignConfig, FinetuneConfig, Record
from evaluate import evaluate
from experiments.recipe import Dataset, markdown, write_table
from finetune import finetune
from mfac import mfac
from support.experiment import open_align_experiment
from support.processes import run_in_processes

SETTINGS: Record = {
    "backbone": "vit_mini", "alternations": 12, "lower_steps": 20, "upper_steps": 4, "warmup": 2,
    "p_lr": 1e-3, "d_lr": 1e-2, "mask_ratio": 0.3, "eval_every": 12,
}  # fmt: skip
CASES: dict[str, Record] = {
    "N_L 20, batch 64, rank 8": {},
    "N_L 5": {"lower_steps": 5},
    "N_L 80": {"lower_steps": 80},
    "pretext batch 8": {"p_batch": 8},
    "downstream batch 80": {"d_batch": 80},
    "rank 1": {"rank": 1},
    "rank 64": {"rank": 64},
    "λ 1e-1": {"lam": 1e-1},
    "λ 1e-5": {"lam": 1e-5},
}
PEFT: Record = {"lr": 1e-2, "warmup_epochs": 7, "eval_epochs": 2, "jobs": 2}


def main(
    weights: Path = OMNIGLOT,
    pretext: str = "mae",
    dataset: Dataset = "omniglot:Greek",
    pool: str = "omniglot",
    cases: int = len(CASES),
    seeds: int = 0,
    out: Path = Path("runs/curvature"),
) -> None:
    """Do part 1 for the first --cases, and part 2 with so many --seeds."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    data = {"weights": weights, "pretext": pretext, "dataset": dataset, "pool": pool}
    rows: list[Record] = []
    for case, changes in [*CASES.items()][:cases]:
        cfg = AlignConfig(**SETTINGS | data | changes)
        queries = watch_run(cfg)
        three = 3 * cfg.upper_steps  # alternations, a query for each upper step
        early = row_of(queries[:three], "early")
        late = row_of(queries[-three:], "late")
        rows.append({"case": case} | early | late)
    write_table(rows, out / "curvature")
    if seeds:
        compare(SETTINGS | data, seeds, out)


class Query(NamedTuple):
    """What M-FAC did to one query g."""

    q_over_g: float  # |q| / |g|
    share: float  # |Πg|² / |g|², Π the projection on the span of G: M-FAC acts there alone
    removed: float  # 1 − |Πq|² / |Πg|²: how much of that share is missing in q


def watch_run(cfg: AlignConfig) -> list[Query]:
    """What M-FAC did to the query of each upper step of an align run, made without a directory."""
    queries: list[Query] = []
    experiment = open_align_experiment(cfg)
    prepared = prepare(experiment, watched(queries))
    for _ in probe(experiment, prepared):
        pass
    state, task, head, hypergrad, _ = prepared
    batches = batches_left(experiment, prepared)
    logs = algorithm_1(state, cfg, task, head.loss, hypergrad, *batches, passes=experiment.passes)
    for _ in logs:
        pass
    return queries


def watched(queries: list[Query]) -> Hypergradient:
    """M-FAC as in `align`; what it does to each query is appended to `queries`."""

    def hypergradient(G: Tensor, lam: float, H: object) -> Map:
        inverse = mfac(G, lam)

        def inverse_watched(g: Tensor) -> Tensor:
            q = inverse(g)
            queries.append(compare_query(G, g, q))
            return q

        return inverse_watched

    return hypergradient


def compare_query(G: Tensor, g: Tensor, q: Tensor) -> Query:
    """How much of g (K, p) is in the span of G (K, N_L, p), and what of that is missing in q."""
    whole = float(g.double().square().sum())
    g_inside = squared_length_inside(G, g)
    q_inside = squared_length_inside(G, q)
    return Query(float(q.norm() / g.norm()), g_inside / whole, 1 - q_inside / g_inside)


def squared_length_inside(G: Tensor, x: Tensor) -> float:
    """|Πx|² = (G x)ᵀ (G Gᵀ)⁺ (G x), summed over the rows of θ; Π projects on the span of G.

    >>> squared_length_inside(torch.tensor([[[2.0, 0.0]]]), torch.tensor([[3.0, 4.0]]))
    9.0
    """
    G = G.double()
    Gx = G @ x.double()[..., None]  # (K, N_L, 1)
    # gradients may be dependent: what is shorter than 1e-5 of the longest spans nothing
    inverse = torch.linalg.pinv(G @ G.mT, rtol=1e-10, hermitian=True)
    return float((Gx.mT @ inverse @ Gx).sum())


def row_of(queries: list[Query], part: str) -> Record:
    """Means of |q|/|g|, of the share, and of what is removed of it, in per cent."""
    ratio = fmean(query.q_over_g for query in queries)
    share = fmean(query.share for query in queries)
    removed = fmean(query.removed for query in queries)
    return {
        f"{part}: q/g": f"{ratio:.4f}",
        f"{part}: share %": f"{100 * share:.2f}",
        f"{part}: removed %": f"{100 * removed:.2f}",
    }


def compare(settings: Record, seeds: int, out: Path) -> None:
    """Test accuracy after M-FAC and after no curvature, an align run a seed."""
    settings = settings | {"p_batch": 8, "alternations": 30}
    for inverse in ("mfac", "identity"):
        units = []
        for seed in range(seeds):
            cfg = AlignConfig(**settings | {"hypergrad": inverse, "seed": seed})
            units.append((cfg, out / inverse / f"s{seed}"))
        list(run_in_processes(align_one, units, 2))
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
