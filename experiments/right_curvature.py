"""Does curvature help, and can the endpoint hear it? Seven arms of aligning, then PEFT.

    python -m experiments.right_curvature     # goes on after a stop; a second one shares the work
    python -m experiments.right_curvature --device cuda     # the same runs on a GPU

right_curvature.md is the protocol. Each finished run adds a line to a file of the results.
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from align import batches_left, prepare, probe
from bisslight import Hypergradient, Map, agreement, algorithm_1
from config import AlignConfig, Record
from data import Split, Task
from experiments.fair_race import fine_tune, no_hypergradient, settings_of_cell
from experiments.fair_race_plan import Cell
from experiments.newton import NewtonPasses, newton
from experiments.recipe import run_script
from mfac import mfac
from support.experiment import open_experiment
from support.files import Busy, sha256, write_atomic

RESULTS = Path(__file__).with_name("right_curvature")
ALIGN: Record = {  # what is not here, such as λ = 0.001, is the paper's, or vit_mini's default
    "alternations": 50, "warmup": 5, "lower_steps": 5, "upper_steps": 3, "p_batch": 64,
    "d_batch": 32, "p_lr": 1e-2, "d_lr": 1e-2,
}  # fmt: skip
LAST = 10  # alternations whose |q|/|g|, cosine and residual are told


class Arm(NamedTuple):
    """How an arm aligns."""

    hypergrad: Hypergradient  # lines 10 and 13
    others: tuple[str, ...] = ()  # the drawings of the g that line 13 gets; (): those of line 12
    with_val: bool = False  # the validation drawings are among those that θ_D and φ_D train on


ARMS: dict[str, Arm | None] = {
    "direct": None,  # not aligned
    "0": Arm(no_hypergradient),
    "F": Arm(mfac),
    "N": Arm(newton),
    "V": Arm(newton, others=("val",)),
    "0v": Arm(no_hypergradient, with_val=True),
    "oracle": Arm(newton, others=("val", "test")),
}
LENGTHS = {"30 epochs": (30, 5), "5 epochs": (5, 1)}  # of PEFT: epochs, and those of warm-up
CANDIDATES = {"30 epochs": (0.01, 0.02, 0.04), "5 epochs": (0.01, 0.02, 0.04, 0.08)}  # its rates
Rates = dict[str, tuple[float, ...]]  # those that are run, for each length


class Unit(NamedTuple):
    """One run to do."""

    arm: str
    alphabet: str
    backbone: int  # the seed of its pretraining and of the split of the drawers
    seed: int  # of θ, heads, batches and masks, the same in all arms


def plan(backbones: range, alphabets: tuple[str, ...]) -> list[Unit]:
    """Every arm in every cell of a backbone, backbone by backbone."""
    cells = product(backbones, (0, 1), alphabets, ARMS)
    return [Unit(arm, alphabet, backbone, seed) for backbone, seed, alphabet, arm in cells]


BACKBONES = range(28, 44)  # no earlier study had these
CHOICE = plan(range(44, 46), ("Early_Aramaic", "Tagalog"))
STUDY = plan(BACKBONES, ("Greek", "Balinese", "Latin"))


class Run(NamedTuple):
    """A run that was done, a line of a file. A list has a number for each of the upper steps."""

    arm: str
    alphabet: str
    backbone: int
    seed: int
    ends: dict[str, dict[str, float]]  # accuracy (%) of the test drawings by length and rate
    images: int  # how many these are
    objective: float | None  # L^D(θ_P) + L^D(θ_D) after align, on all ten training drawers
    of_test: float | None  # the same on the test drawers
    q_over_g: Sequence[float]
    cosine: Sequence[float]  # of q and of the g that it answers
    residual: Sequence[float]  # |g − q − N q/λ| / |g|, of arms with N
    worst: float | None  # the largest residual of the run
    cpu_align: float  # seconds
    cpu_peft: float  # all lengths and rates together
    weights: str  # sha256 of the backbone's file
    time: str  # when the run ended, UTC
    commit: str
    device: str = "cpu"  # or the name of the GPU; lines of the choice of rates have none

    @property
    def unit(self) -> Unit:
        """What this was a run of."""
        return Unit(self.arm, self.alphabet, self.backbone, self.seed)


class Aligned(NamedTuple):
    """What aligning ended with, none of it without aligning; the names are those of `Run`."""

    theta_P: Tensor | None = None
    objective: float | None = None
    of_test: float | None = None
    q_over_g: Sequence[float] = ()
    cosine: Sequence[float] = ()
    residual: Sequence[float] = ()
    worst: float | None = None


def align_arm(arm: Arm, cfg: AlignConfig, task: Task | None = None) -> Aligned:
    """Algorithm 1 as the arm has it. `task` is used instead of the data set of the settings."""
    experiment = open_experiment(cfg, task)
    trained, passes = experiment, experiment.passes
    if arm.with_val:
        trained = replace(experiment, task=train_on(experiment.task, "train", "val"))
    prepared = prepare(trained)
    list(probe(trained, prepared))
    state, pretext_task, head, _, _ = prepared
    batches = batches_left(trained, prepared)
    answers: list[Tensor] = []  # |q|/|g|, cosine and residual of each query
    if arm.others:
        elsewhere = replace(experiment, task=train_on(experiment.task, *arm.others))
        queries = range(cfg.alternations * cfg.upper_steps)
        asked = elsewhere.examples("query", cfg.seed, cfg.d_batch, queries, cfg.drop_path)

    def hypergrad(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
        """The arm's, of a g of the drawings that the arm asks; notes how well it is answered."""
        product: Callable[[], Map] = cache(H)  # one graph for all products of an alternation
        solve = arm.hypergrad(G, lam, product)

        def answer(g: Tensor) -> Tensor:
            if arm.others:  # line 12 once more; φ_D still trains on the drawings of line 14
                _, g, _ = passes.gradients(head.loss, state.theta_P, state.phi_D, next(asked))
            q = solve(g)
            residual = g.new_tensor(torch.nan)
            if arm.hypergrad is newton:
                residual = (g - q - product()(q) / lam).norm() / g.norm()
            answers.append(torch.stack([*agreement(g, q), residual]))
            return q

        return answer

    of_MAE = NewtonPasses(task=pretext_task)  # type: ignore[arg-type]
    list(algorithm_1(state, cfg, pretext_task, head.loss, hypergrad, *batches, of_MAE))
    thetas = (state.theta_P, state.theta_D)
    splits = (experiment.task.train, experiment.task.test)
    score = partial(experiment.score, phi_D=head.with_stats)
    objective, of_test = (sum(score(split, theta).loss for theta in thetas) for split in splits)
    noted = torch.stack(answers).view(cfg.alternations, cfg.upper_steps, 3)
    q_over_g, cosine, residual = noted[-LAST:].mean(0).T.tolist()
    aligned = Aligned(state.theta_P.detach(), objective, of_test, q_over_g, cosine)
    if arm.hypergrad is newton:
        aligned = aligned._replace(residual=residual, worst=float(noted[..., 2].max()))
    return aligned


def train_on(task: Task, *names: str) -> Task:
    """The task with the images of these splits as its training images."""
    splits = [getattr(task, name) for name in names]
    images = torch.cat([torch.as_tensor(split.images) for split in splits])
    return task._replace(train=Split(images, torch.cat([split.targets for split in splits])))


def run_unit(unit: Unit, rates: Rates, settings: Record) -> Run:
    """Align, and fine-tune at each length and rate from the θ_P that it ends with."""
    started = time.process_time()
    arm, aligned = ARMS[unit.arm], Aligned()
    if arm:
        aligned = align_arm(arm, AlignConfig(**settings, **ALIGN))
    between = time.process_time()
    ends: dict[str, dict[str, float]] = {}
    for length, (epochs, warmup) in LENGTHS.items():
        ends[length] = {}
        for rate in rates[length]:
            tuned = fine_tune(settings, rate, epochs, aligned.theta_P, warmup)
            ends[length][f"{rate:g}"] = tuned.curve[epochs]
    numbers = aligned._asdict()
    del numbers["theta_P"]
    weights = settings["weights"]  # a file, or the directory of a pretraining
    return Run(
        **unit._asdict(),
        ends=ends,
        images=tuned.images,
        **numbers,
        cpu_align=between - started,
        cpu_peft=time.process_time() - between,
        weights=sha256(weights / "backbone.pth" if weights.is_dir() else weights),
        time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        commit=commit(),
        device=device_name(settings["device"]),
    )


@cache
def commit() -> str:
    """The commit that runs; "-dirty" follows where its files were changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def device_name(device: str) -> str:
    """That of the GPU, such as "NVIDIA H100"; of a CPU just "cpu"."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def choose(runs: list[Run]) -> dict[str, Rates]:
    """Of each arm and length the rate with the best mean accuracy; of equal ones the lower."""
    chosen: dict[str, Rates] = {}
    for arm in ARMS:
        chosen[arm] = {}
        for length, rates in CANDIDATES.items():
            means = {}
            for rate in rates:
                means[rate] = fmean(run.ends[length][f"{rate:g}"] for run in runs if run.arm == arm)
            chosen[arm][length] = (max(rates, key=means.__getitem__),)
    return chosen


def read_runs(path: Path) -> dict[Unit, Run]:
    """The runs of a file; none if it is not there."""
    lines = path.read_text().splitlines() if path.exists() else []
    runs = [Run(**json.loads(line)) for line in lines]
    return {run.unit: run for run in runs}


def run_all(
    units: list[Unit], rates: dict[str, Rates], out: Path, path: Path, device: str = "cpu"
) -> None:
    """Until none is missing in the file: do the first that no other process is at, add its line."""
    while missing := [unit for unit in units if unit not in read_runs(path)]:
        for unit in missing:
            lock = FileLock(out / f"{'-'.join(map(str, unit))}.lock", timeout=0)
            with suppress(Busy, Timeout), lock:  # Busy: another process pretrains the backbone
                if unit not in read_runs(path):
                    cell = Cell(unit.alphabet, unit.backbone, unit.seed)
                    settings = settings_of_cell(cell, out)  # pretrains a backbone that is missing
                    settings |= {"device": device, "amp": False}  # float32 everywhere
                    add_line(run_unit(unit, rates[unit.arm], settings), path, out)
                break
        else:
            time.sleep(10)  # other processes are at all that is missing


def add_line(run: Run, path: Path, out: Path) -> None:
    """Write the file anew with one more line."""
    with FileLock(out / "results.lock"):
        before = path.read_text() if path.exists() else ""
        write_atomic(path, before + json.dumps(run._asdict()) + "\n")


def main(
    out: Path = Path("runs/right_curvature"),
    results: Path = RESULTS,
    device: Literal["cpu", "cuda"] = "cpu",
) -> None:
    """Go on with the choice of rates, then with the study; OUT is where the backbones are.

    Backbones and the choice of rates are made on a CPU, on whatever device the study runs.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    results.mkdir(exist_ok=True)
    choice, study = results / "choice.jsonl", results / "runs.jsonl"
    run_all(CHOICE, dict.fromkeys(ARMS, CANDIDATES), out, choice)
    run_all(STUDY, choose([*read_runs(choice).values()]), out, study, device)


if __name__ == "__main__":
    run_script(main)
