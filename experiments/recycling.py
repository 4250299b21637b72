"""Are gradients that were stored while θ_P moved as good for M-FAC as fresh ones?

    python -m experiments.recycling --out runs/recycling

Line 6 of Algorithm 1 stores a pretext gradient, then line 9 moves θ_P and φ_P. Line 10 uses all N_L
stored gradients as if they belonged to the θ_P where the lower level has ended. Three sets of
gradients are compared, during align runs that this does not change:

    stored   as Algorithm 1 has them
    fresh    of the same batches with the same masks, where the lower level has ended
    other    of other batches, there, too

Stored and fresh gradients differ by age. Fresh and other ones differ by sampling: any method that
has N_L batches has this error, too. M-FAC takes the part g − q away from the downstream gradient g.
This part is compared besides q, because q is nearly g wherever M-FAC does little.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import typer
from torch import Tensor

from align import start_state
from bisslight import Map, State, algorithm_1
from config import AlignConfig, Record
from experiments.recipe import Dataset, progress, write_table
from mfac import mfac
from support.experiment import AlignExperiment, Head
from support.optim import Optimiser, train_epochs

SETTINGS: Record = {  # λ 0.001 and all that is not here is the paper's, or vit_mini's default
    "backbone": "vit_mini", "alternations": 12, "warmup": 2, "lower_steps": 5, "upper_steps": 3,
    "p_batch": 64, "d_batch": 32, "p_lr": 1e-2, "d_lr": 1e-2, "augment": "none", "device": "cpu",
}  # fmt: skip
CASES: dict[str, Record] = {
    "N_L 5, rate 1e-2": {},
    "N_L 20, rate 1e-2": {"lower_steps": 20},
    "N_L 80, rate 1e-2": {"lower_steps": 80},
    "N_L 5, rate 1e-3": {"p_lr": 1e-3},
    "N_L 20, rate 1e-3": {"lower_steps": 20, "p_lr": 1e-3},
    "N_L 5, rate 1e-4": {"p_lr": 1e-4},
    "N_L 20, rate 1e-4": {"lower_steps": 20, "p_lr": 1e-4},
    "λ 1e-1, N_L 20": {"lam": 1e-1, "lower_steps": 20},
    "λ 1e-5, N_L 5": {"lam": 1e-5},
    "λ 1e-5, N_L 20": {"lam": 1e-5, "lower_steps": 20},
    "pretext batch 8, N_L 5": {"p_batch": 8},
    "pretext batch 8, N_L 20": {"p_batch": 8, "lower_steps": 20},
}
Batch = tuple[Tensor, ...]  # of the pretext task
OTHER_SEED = 1000  # is added to a run's seed for the other batches


class Distance(NamedTuple):
    """How far one q is from another."""

    q: float  # |q − q'| / |q'|
    q_cosine: float
    part: float  # |q − q'| / |g − q'|, of what M-FAC takes away
    part_cosine: float  # of g − q and g − q'


class Query(NamedTuple):
    """What is measured of one upper step."""

    q_over_g: float
    age: Distance  # of the stored q from the fresh one
    sampling: Distance  # of the other q from the fresh one
    both: Distance  # of the stored q from the other one


class Gradients(NamedTuple):
    """What is measured of the gradients of one alternation."""

    by_age: list[float]  # cosine of stored and fresh, of ages 1, 2 ..., N_L updates
    other: float  # cosine of fresh and other
    length: float  # |stored| / |fresh|
    moved: float  # |θ_P − θ_P before the alternation|
    pull: float  # λ |θ_P − θ_D| / |∇L^P|: the penalty of Eq. 4 beside the pretext loss


class Watch:
    """Lines 10 and 13 by M-FAC as in `align`; in some alternations, it measures besides."""

    def __init__(
        self,
        state: State,
        gradient: Callable[[Batch], Tensor],
        others: Iterator[Batch],
        alternations: list[int],
    ) -> None:
        """`gradient` gives ∇L^P of a batch at the state's θ_P and φ_P, `others` other batches."""
        self.state = state
        self.gradient = gradient
        self.others = others
        self.alternations = alternations
        self.batches: list[Batch] = []  # of this alternation
        self.start = state.theta_P.detach().clone()
        self.distances: list[float] = []  # |θ_P − θ_D| before each lower step
        self.gradients: dict[int, Gradients] = {}  # by alternation
        self.queries: dict[int, list[Query]] = {}

    def remember(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Hand the pretext batches on, and keep those of this alternation."""
        for batch in batches:
            if not self.batches:
                self.start = self.state.theta_P.detach().clone()
            delta = (self.state.theta_P - self.state.theta_D).detach()
            self.distances.append(float(delta.norm()))
            self.batches.append(batch)
            yield batch

    def hypergradient(self, G: Tensor, lam: float, H: object) -> Map:
        """M-FAC's inverse from the stored gradients (`bisslight.Hypergradient`)."""
        inverse = mfac(G, lam)
        batches = self.batches
        distances = self.distances
        self.batches = []
        self.distances = []
        t = self.state.done + 1
        if t not in self.alternations:
            return inverse

        fresh = torch.stack([self.gradient(batch) for batch in batches], 1)  # (K, N_L, p)
        other = torch.stack([self.gradient(next(self.others)) for _ in batches], 1)
        moved = float((self.state.theta_P.detach() - self.start).norm())
        pull = lam * fmean(distances) / float(lengths(G).mean())
        self.gradients[t] = compare_gradients(G, fresh, other)._replace(moved=moved, pull=pull)
        self.queries[t] = []
        inverse_fresh = mfac(fresh, lam)
        inverse_other = mfac(other, lam)

        def measured(g: Tensor) -> Tensor:
            q = inverse(g)
            self.queries[t].append(compare_queries(g, q, inverse_fresh(g), inverse_other(g)))
            return q

        return measured


def lengths(G: Tensor) -> Tensor:
    """The norms of the gradients G (K, N_L, p) over all blocks, (N_L,)."""
    return G.square().sum((0, 2)).sqrt()


def compare_gradients(stored: Tensor, fresh: Tensor, other: Tensor) -> Gradients:
    """Cosines are means over the blocks, since a block of M-FAC knows nothing of the others."""
    by_age = torch.cosine_similarity(stored, fresh, -1).mean(0).flip(0)  # the last is the youngest
    return Gradients(
        by_age=by_age.tolist(),
        other=float(torch.cosine_similarity(other, fresh, -1).mean()),
        length=float((lengths(stored) / lengths(fresh)).mean()),
        moved=math.nan,
        pull=math.nan,
    )


def compare_queries(g: Tensor, stored: Tensor, fresh: Tensor, other: Tensor) -> Query:
    """The q of the three sets of gradients for one query g, all (K, p)."""
    return Query(
        q_over_g=float(stored.norm() / g.norm()),
        age=distance(g, stored, fresh),
        sampling=distance(g, other, fresh),
        both=distance(g, stored, other),
    )


def distance(g: Tensor, q: Tensor, reference: Tensor) -> Distance:
    """How far q is from a reference, for one query g."""
    g = g.double().flatten()
    q = q.double().flatten()
    reference = reference.double().flatten()
    difference = float((q - reference).norm())
    return Distance(
        q=difference / float(reference.norm()),
        q_cosine=float(torch.cosine_similarity(q, reference, 0)),
        part=difference / float((g - reference).norm()),
        part_cosine=float(torch.cosine_similarity(g - q, g - reference, 0)),
    )


# --- runs -----------------------------------------------------------------------------------------


def watched(cfg: AlignConfig) -> dict[str, int]:
    """Four alternations by name; after the warm-up, the rate is at its top."""
    T = cfg.alternations
    return {"first": 1, "top rate": cfg.warmup + 1, "middle": T // 2 + 1, "last": T}


def watch_run(experiment: AlignExperiment) -> tuple[Watch, Tensor]:
    """Align as `align.run_align` does, without a run directory; also returns θ_P."""
    cfg = experiment.cfg
    theta = experiment.new_theta()  # l.2
    task = experiment.pretext_task(theta)
    head = experiment.new_head("align head")
    state, optimisers = start_state(cfg, theta, task.phi, head.phi)
    probe(experiment, state, head, optimisers.probe)

    def gradient(batch: Batch) -> Tensor:
        return experiment.passes.gradients(task.loss, state.theta_P, state.phi_P, batch).theta

    elsewhere = experiment.with_settings(cfg.replace(seed=cfg.seed + OTHER_SEED))
    lower_steps = range(cfg.alternations * cfg.lower_steps)
    upper_steps = range(cfg.alternations * cfg.upper_steps)
    others = elsewhere.pretext_batches(task, lower_steps)
    watch = Watch(state, gradient, others, [*watched(cfg).values()])
    logs = algorithm_1(
        state,
        steps=cfg,
        task=task,
        loss_D=head.loss,
        hypergrad=watch.hypergradient,
        pretext=watch.remember(experiment.pretext_batches(task, lower_steps)),
        downstream=experiment.examples("downstream", cfg.d_batch, upper_steps, cfg.drop_path),
        passes=experiment.passes,
    )
    for _ in logs:
        pass
    return watch, state.theta_P.detach()


def probe(experiment: AlignExperiment, state: State, head: Head, opt: Optimiser) -> None:
    """Linear probing of φ_D before line 3, as in `align.probe`."""
    cfg = experiment.cfg
    steps_per_epoch = math.ceil(len(experiment.task.train.targets) / cfg.d_batch)
    steps = range(cfg.probe_epochs * steps_per_epoch)
    examples = experiment.examples("probe", cfg.d_batch, steps, cfg.drop_path, passes=True)
    loss = partial(head.loss, state.theta_D.detach(), state.phi_D, regularise=True)
    for _ in train_epochs(loss, opt, examples, steps_per_epoch, "probe", experiment.passes):
        pass


# --- tables ---------------------------------------------------------------------------------------


def row_of_gradients(name: Record, gradients: list[Gradients]) -> Record:
    """A row of the first table: means over the seeds."""
    N_L = len(gradients[0].by_age)
    row = dict(name)
    for age in (1, 5, 20, 80):
        row[f"age {age}"] = "-"
        if age <= N_L:
            row[f"age {age}"] = f"{fmean(each.by_age[age - 1] for each in gradients):.3f}"
    row["other batch"] = f"{fmean(each.other for each in gradients):.3f}"
    row["length"] = f"{fmean(each.length for each in gradients):.3f}"
    row["moved"] = f"{fmean(each.moved for each in gradients):.3f}"
    row["pull"] = f"{fmean(each.pull for each in gradients):.3f}"
    return row


def row_of_queries(name: Record, queries: list[Query]) -> Record:
    """A row of the second table: q by the three sets of gradients."""
    row = dict(name)
    row["q/g"] = f"{fmean(each.q_over_g for each in queries):.4f}"
    for kind in ("age", "sampling", "both"):
        distances: list[Distance] = [getattr(each, kind) for each in queries]
        row[kind] = f"{fmean(each.q for each in distances):.4f}"
        row[f"{kind}: cosine"] = f"{fmean(each.q_cosine for each in distances):.5f}"
    return row


def row_of_parts(name: Record, queries: list[Query]) -> Record:
    """A row of the third table: what M-FAC takes away, by the three sets of gradients."""
    row = dict(name)
    for kind in ("age", "sampling", "both"):
        distances: list[Distance] = [getattr(each, kind) for each in queries]
        row[kind] = f"{fmean(each.part for each in distances):.3f}"
        row[f"{kind}: cosine"] = f"{fmean(each.part_cosine for each in distances):.3f}"
    return row


def main(
    dataset: Dataset = "omniglot:Greek",
    weights: Path = Path("omniglot"),
    cases: int = len(CASES),
    seeds: int = 1,
    out: Path = Path("runs/recycling"),
) -> None:
    """Measure the first --cases, each with so many --seeds."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[Record]] = {"gradients": [], "queries": [], "parts": []}
    for case in progress([*CASES][:cases], cases, "cases"):
        watches: list[Watch] = []
        for seed in range(seeds):
            data = {"dataset": dataset, "weights": weights, "seed": seed}
            cfg = AlignConfig(**SETTINGS | data | CASES[case])
            watch, _ = watch_run(AlignExperiment(cfg))
            watches.append(watch)
        for part, t in watched(cfg).items():
            gradients = [watch.gradients[t] for watch in watches]
            queries: list[Query] = []
            for watch in watches:
                queries += watch.queries[t]
            name: Record = {"case": case, "when": part}
            tables["gradients"].append(row_of_gradients(name, gradients))
            tables["queries"].append(row_of_queries(name, queries))
            tables["parts"].append(row_of_parts(name, queries))
        for file, rows in tables.items():
            write_table(rows, out / file)


if __name__ == "__main__":
    typer.run(main)
