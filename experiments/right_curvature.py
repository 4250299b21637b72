"""Does the right curvature help? q = 0, M-FAC's q, and that of the Gauss-Newton matrix.

    python -m experiments.right_curvature     # goes on after a stop; a second one shares the work

right_curvature.md is the protocol. Each run adds a line to a file of the results.
"""

import json
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import typer
from filelock import FileLock, Timeout

from align import batches_left, prepare, probe
from bisslight import Hypergradient, algorithm_1
from config import AlignConfig, Record
from experiments.fair_race import fine_tune, settings_of_cell
from experiments.fair_race_plan import Cell
from experiments.newton import NewtonPasses, newton
from mfac import mfac
from support.experiment import open_experiment
from support.runs import Busy

RESULTS = Path(__file__).with_name("right_curvature")
ALIGN: Record = {  # what is not here is the paper's, or vit_mini's default
    "alternations": 50, "warmup": 5, "lower_steps": 5, "upper_steps": 3, "p_batch": 64,
    "d_batch": 32, "p_lr": 1e-2, "d_lr": 1e-2,
}  # fmt: skip
RATE, EPOCHS = 0.02, 30  # of PEFT
LAMBDAS = (1e-3, 3e-3, 1e-2, 3e-2)  # the first is the paper's
BACKBONES = range(12, 28)  # seeds of pretraining and of the split; 0 comes with the program
ARMS: dict[str, Hypergradient] = {"0": lambda G, lam, H: torch.zeros_like, "F": mfac, "N": newton}


class Unit(NamedTuple):
    """One run to do."""

    arm: str  # "0", "F" or "N"
    lam: float
    alphabet: str
    backbone: int
    seed: int


CHOICE = [  # phase 0: each λ for each arm, in four cells of the choosing alphabets
    Unit(arm, lam, alphabet, 0, seed)
    for seed, alphabet in product((0, 1), ("Tagalog", "Early_Aramaic"))
    for lam, arm in product(LAMBDAS, ARMS)
]


class Run(NamedTuple):
    """A run that was done, a line of a file."""

    unit: Unit
    accuracy: float  # percent of the held-out drawings, after the last epoch of PEFT
    images: int  # how many these are
    objective: float  # L^D(θ_P) + L^D(θ_D) with φ_D after align, on all training images
    of_test: float  # the same on the test images
    last: Record  # what align logs, means over its last ten alternations
    cpu: float  # seconds, without pretraining


def run_unit(unit: Unit, out: Path) -> Run:
    """Align and fine-tune; a backbone that is not in OUT is pretrained."""
    # The seed, of θ, heads, batches and masks, is the same in all arms.
    settings = settings_of_cell(Cell(unit.alphabet, unit.backbone, unit.seed), out)
    started = time.process_time()
    cfg = AlignConfig(**settings, **ALIGN, lam=unit.lam)
    experiment = open_experiment(cfg)
    prepared = prepare(experiment, ARMS[unit.arm])
    list(probe(experiment, prepared))
    state, task, head, hypergrad, _ = prepared
    batches = batches_left(experiment, prepared)
    passes = NewtonPasses(task=task)  # type: ignore[arg-type]
    logs = [*algorithm_1(state, cfg, task, head.loss, hypergrad, *batches, passes)][-10:]
    last = {}
    for name in ("q_over_g", "cosine", "distance", "loss_D_at_P", "loss_D_at_D", "loss_P"):
        last[name] = fmean(fmean(getattr(log, name)) for log in logs)
    score, data = partial(experiment.score, phi_D=head.with_stats), experiment.task
    thetas = (state.theta_P, state.theta_D)
    of_train = sum(score(data.train, theta).loss for theta in thetas)
    of_test = sum(score(data.test, theta).loss for theta in thetas)
    images = len(data.val.targets) + len(data.test.targets)
    held_out = fine_tune(settings, RATE, EPOCHS, state.theta_P.detach()).held_out
    cpu = time.process_time() - started
    return Run(unit, held_out, images, of_train, of_test, last, cpu)


def rounds_of(own: dict[str, float]) -> list[tuple[str, list[Unit]]]:
    """Phase 2: a round is a seed, an alphabet and a λ, the paper's or each arm's `own`."""
    lambdas = {"the paper's λ": dict.fromkeys(ARMS, LAMBDAS[0]), "own λ": own}
    rounds = []
    for seed, alphabet, name in product((0, 1), ("Greek", "Balinese", "Latin"), lambdas):
        cells = product(BACKBONES, ARMS)
        rounds.append((name, [Unit(x, lambdas[name][x], alphabet, k, seed) for k, x in cells]))
    return rounds


def choose(runs: list[Run]) -> dict[str, float]:
    """Each arm's own λ: that with the best mean accuracy; of equal ones the lower."""

    def mean(arm: str, lam: float) -> float:
        return fmean(run.accuracy for run in runs if run.unit[:2] == (arm, lam))

    return {arm: max(LAMBDAS, key=partial(mean, arm)) for arm in ARMS}


def read_runs(path: Path) -> dict[Unit, Run]:
    """The runs of a file; none if it is not there."""
    runs = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        unit, *rest = json.loads(line)
        runs[Unit(*unit)] = Run(Unit(*unit), *rest)
    return runs


def run_all(units: list[Unit], out: Path, path: Path) -> None:
    """Run those that the file has no line of and no other process is at, and add their lines."""
    for unit in units:
        lock = FileLock(out / f"{'-'.join(map(str, unit))}.lock", timeout=0)
        try:
            with lock:
                if unit not in read_runs(path):
                    line = json.dumps(run_unit(unit, out))
                    with path.open("a") as file:
                        file.write(line + "\n")
        except (Busy, Timeout):  # Busy: it pretrains the backbone
            pass


def main(out: Path = Path("runs/right_curvature"), results: Path = RESULTS) -> None:
    """Go on with phase 0, and once it is finished with phase 2; OUT is where backbones are."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    run_all(CHOICE, out, results / "choice.jsonl")
    choice = read_runs(results / "choice.jsonl")
    if len(choice) == len(CHOICE):
        for _, units in rounds_of(choose([*choice.values()])):
            run_all(units, out, results / "runs.jsonl")


if __name__ == "__main__":
    typer.run(main)
