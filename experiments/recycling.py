"""Are gradients that were stored while θ_P moved as good for M-FAC as fresh ones?

    python -m experiments.recycling --cases 1 --seeds 1

Line 6 of Algorithm 1 stores a pretext gradient, then line 9 moves θ_P and φ_P. Line 10 uses all N_L
stored gradients as if they belonged to the θ_P where the lower level has ended. Three sets of
gradients are compared there, during align runs that this does not change:

    stored   as Algorithm 1 has them
    fresh    of the same batches with the same masks, at the last θ_P and φ_P
    other    of other batches, there, too

Stored and fresh ones differ by age. Fresh and other ones differ by sampling: any method that has
N_L batches has this error, too. M-FAC takes the part g − q away from the downstream gradient g.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import typer
from torch import Tensor

from align import batches_left, prepare, probe
from bisslight import Map, algorithm_1
from config import AlignConfig, Record
from experiments.recipe import Dataset, progress, write_table
from mfac import mfac
from support.experiment import open_align_experiment, pool_images, pretext_batches

SETTINGS: Record = {  # λ 0.001 and all that is not here is the paper's, or vit_mini's default
    "backbone": "vit_mini", "alternations": 12, "warmup": 2, "upper_steps": 3, "p_batch": 64,
    "d_batch": 32, "p_lr": 1e-2, "d_lr": 1e-2, "augment": "none", "device": "cpu",
}  # fmt: skip
CASES: dict[str, Record] = {
    "N_L 5": {"lower_steps": 5},
    "N_L 20": {"lower_steps": 20},
    "N_L 80": {"lower_steps": 80},
}
OTHER_SEED = 1000  # is added to a run's seed for the other batches


class Watch:
    """An align run in which lines 10 and 13 also measure, in some alternations."""

    def __init__(self, cfg: AlignConfig) -> None:
        self.experiment = open_align_experiment(cfg)
        self.prepared = prepare(self.experiment, self.invert)
        other = open_align_experiment(cfg.replace(seed=cfg.seed + OTHER_SEED))
        steps = range(cfg.alternations * cfg.lower_steps)
        images = pool_images(other.pool, other.arch.image_size, other.cfg)
        self.others = pretext_batches(
            self.prepared.pretext_task, images, cfg.p_batch, steps, other.cfg, other.device
        )
        T = cfg.alternations
        self.places = {1: "first", cfg.warmup + 1: "top rate", T // 2 + 1: "middle", T: "last"}
        self.batches: list[Any] = []  # of this alternation
        self.start = self.prepared.state.theta_P.detach().clone()  # θ_P before it
        self.found: dict[str, list[Record]] = {place: [] for place in self.places.values()}

    def run(self) -> Tensor:
        """Align; θ_P is that of an ordinary run, to the bit."""
        list(probe(self.experiment, self.prepared))
        state, task, head, hypergrad, _ = self.prepared
        pretext, downstream = batches_left(self.experiment, self.prepared)
        watched = self.remember(pretext)
        cfg, passes = self.experiment.cfg, self.experiment.passes
        list(algorithm_1(state, cfg, task, head.loss, hypergrad, watched, downstream, passes))
        return state.theta_P.detach()

    def remember(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand the pretext batches on, and keep those of this alternation."""
        for batch in batches:
            if not self.batches:
                self.start = self.prepared.state.theta_P.detach().clone()
            self.batches.append(batch)
            yield batch

    def gradient(self, batch: Any) -> Tensor:
        """∇L^P of a batch at the present θ_P and φ_P, (K, p)."""
        state, task = self.prepared.state, self.prepared.pretext_task
        passes = self.experiment.passes
        return passes.gradients(task.loss, state.theta_P, state.phi_P, batch).theta

    def invert(self, G: Tensor, lam: float, H: object) -> Map:
        """M-FAC's inverse from the stored gradients (`bisslight.Hypergradient`)."""
        inverse = mfac(G, lam)
        batches = self.batches
        self.batches = []
        place = self.places.get(self.prepared.state.done + 1)
        if place is None:
            return inverse
        fresh = torch.stack([self.gradient(batch) for batch in batches], 1)  # (K, N_L, p)
        other = torch.stack([self.gradient(next(self.others)) for _ in batches], 1)
        moved = self.prepared.state.theta_P.detach() - self.start
        gradients = compare_gradients(G, fresh, other) | {"moved": float(moved.norm())}
        from_fresh = mfac(fresh, lam)
        from_other = mfac(other, lam)

        def measured(g: Tensor) -> Tensor:
            q = inverse(g)
            true = from_fresh(g)
            parts = {"age": part_error(g, q, true)}
            parts["sampling"] = part_error(g, from_other(g), true)
            self.found[place].append(gradients | {"q/g": float(q.norm() / g.norm())} | parts)
            return q

        return measured


def compare_gradients(stored: Tensor, fresh: Tensor, other: Tensor) -> Record:
    """Cosines, means over the blocks, since a block of M-FAC knows nothing of the others."""
    by_age = torch.cosine_similarity(stored, fresh, -1).mean(0)  # the first is the oldest
    sampling = torch.cosine_similarity(other, fresh, -1).mean()
    return {"youngest": float(by_age[-1]), "oldest": float(by_age[0]), "other": float(sampling)}


def part_error(g: Tensor, q: Tensor, true: Tensor) -> float:
    """|q − q'| / |g − q'|: the error of what M-FAC takes away, relative to what it should."""
    g, q, true = g.double(), q.double(), true.double()
    return float((q - true).norm() / (g - true).norm())


def main(
    dataset: Dataset = "omniglot:Greek",
    weights: Path = Path("omniglot"),
    cases: int = len(CASES),
    seeds: int = 3,
    out: Path = Path("runs/recycling"),
) -> None:
    """Measure the first --cases, each with so many --seeds; means over queries and seeds."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Record] = []
    for case in progress([*CASES][:cases], cases, "cases"):
        found: dict[str, list[Record]] = {}
        for seed in range(seeds):
            data = {"dataset": dataset, "weights": weights, "seed": seed}
            watch = Watch(AlignConfig(**SETTINGS | data | CASES[case]))
            watch.run()
            for place, queries in watch.found.items():
                found.setdefault(place, []).extend(queries)
        for place, queries in found.items():
            row: Record = {"case": case, "when": place}
            for key in queries[0]:
                digits = 4 if key == "q/g" else 1
                row[key] = f"{fmean(query[key] for query in queries):.{digits}f}"
            rows.append(row)
        write_table(rows, out / "recycling")


if __name__ == "__main__":
    typer.run(main)
