"""Which derivative is the hypergradient: Eq. 5's, or that of the steps which are really taken?

    python -m experiments.which_derivative --gains    # first-order gains, before any accuracy
    python -m experiments.which_derivative            # goes on after a stop, two processes

which_derivative.md is the protocol. Each finished run adds a line to a file of the results.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from itertools import product
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Generator, Tensor

from align import Prepared, batches_left, prepare, probe
from bisslight import Diverged, Map, agreement, algorithm_1
from config import ALPHABETS as TASKS
from config import AlignConfig, PretrainConfig, Record
from data import Pool, Task, rng
from experiments.fair_race import PRETRAIN, fine_tune
from experiments.newton import NewtonPasses, newton
from experiments.recipe import run_script
from experiments.right_curvature import commit, train_on
from experiments.unrolled import Lower, divided, end_of_lower_steps, unrolled
from extras.pretrain import pretrain
from head import Examples
from support.benchmarks import INK, POOL, omniglot_pool, omniglot_task, read_alphabet
from support.errors import UsageError
from support.experiment import Experiment, open_experiment
from support.files import Busy, sha256, write_atomic

RESULTS = Path(__file__).with_name("which_derivative")
GAINS, RUNS = "gains.jsonl", "runs.jsonl"  # files of the results
ALIGN: Record = {  # what is not here, such as λ = 0.001, is the paper's, or vit_mini's default
    "alternations": 25, "warmup": 2, "lower_steps": 20, "upper_steps": 3, "p_batch": 32,
    "d_batch": 32, "p_lr": 1e-2, "d_lr": 1e-2,
}  # fmt: skip
RATES = (0.01, 0.02, 0.03)  # of PEFT; an accuracy is the mean over them
EPOCHS, WARMUP = 5, 1  # of PEFT
LAST = 10  # alternations whose |q|/|g| is told


class Arm(NamedTuple):
    """Which drawers an arm sees in aligning, besides the ten of training."""

    asked: str | None  # whose drawings g is of; None: q = 0
    with_val: bool = False  # θ_D and φ_D train on the validation drawings, too


ARMS = {  # C comes after U, whose cosines it has
    "0v": Arm(None, with_val=True),
    "G": Arm("val"),
    "N": Arm("val"),
    "U": Arm("val"),
    "A": Arm("val"),
    "C": Arm("val"),
    "oracle-G": Arm("test"),
}
NAMES = (*ARMS, "P")  # P is PEFT on thirteen drawers, from the θ_P of 0v


class Cell(NamedTuple):
    """A task, a backbone with its split of the drawers, and a seed."""

    alphabet: str
    backbone: int  # the seed of its pretraining and of the split of the drawers
    seed: int  # of θ, heads, batches and masks, the same in all arms


BACKBONES = range(46, 50)  # no earlier study had these
SEEDS = (0, 1)
CELLS: list[Cell] = []  # backbone by backbone
for backbone, alphabet, seed in product(BACKBONES, (*TASKS, *POOL), SEEDS):
    CELLS.append(Cell(alphabet, backbone, seed))
GAIN_CELLS = [cell for cell in CELLS if (cell.backbone, cell.seed) == (46, 0)]
AT = (6, 12, 18)  # alternations whose directions are compared
MOVE = 0.5  # how far θ_D is moved to either side


class Run(NamedTuple):
    """An arm in a cell, a line of a file."""

    arm: str
    alphabet: str
    backbone: int
    seed: int
    ends: dict[str, float]  # accuracy (%) of the test drawings by rate; chance if it diverged
    images: int  # how many these are
    diverged: bool  # in aligning, or at one of the rates
    q_over_g: float | None  # before q gets the length of g; of the last alternations
    cosine: Sequence[float]  # of q and g, a number for each query
    losses: dict[str, float]  # L^D(θ_P) after aligning, by the name of the split
    cpu_align: float  # seconds
    cpu_peft: float  # all rates together
    weights: str  # sha256 of the backbone's file
    time: str  # when the run ended, UTC
    commit: str

    @property
    def cell(self) -> Cell:
        return Cell(self.alphabet, self.backbone, self.seed)


class Gains(NamedTuple):
    """First-order gains after one alternation of arm G, a line of a file."""

    alphabet: str
    backbone: int
    seed: int
    alternation: int
    own: dict[str, float]  # response of L^D by arm, with the lower steps that were taken
    next: dict[str, float]  # with those of the next alternation, which the answer meets
    with_g: dict[str, float]  # cosine with g
    with_U: dict[str, float]  # cosine with U's q
    q_over_g: dict[str, float]
    time: str
    commit: str


# --- a cell ---------------------------------------------------------------------------------------


def pool_for(alphabet: str) -> Pool:
    """The pool of a cell: what comes with the program, or for its own alphabets the other five."""
    if alphabet not in POOL:
        return omniglot_pool()
    return Pool(torch.cat([read_alphabet(name) for name in TASKS]).flatten(0, 1), *INK)


def settings_of(cell: Cell, out: Path) -> Record:
    """The settings that all runs of a cell share; a backbone that is not there is pretrained."""
    is_other = cell.alphabet in POOL
    weights = out / f"pretrain-{cell.backbone}{'-other' if is_other else ''}"
    cfg = PretrainConfig(**PRETRAIN, seed=cell.backbone)
    pretrain(cfg, weights, pool=pool_for(cell.alphabet))
    return {
        "backbone": "vit_mini",
        "weights": weights,
        "dataset": f"omniglot:{cell.alphabet}",
        "data_seed": cell.backbone,
        "seed": cell.seed,
        "augment": "none",
        "device": "cpu",
        "amp": False,
    }


# --- aligning -------------------------------------------------------------------------------------


class Aligning(NamedTuple):
    """What Algorithm 1 gets, after the linear probe."""

    experiment: Experiment[AlignConfig]
    prepared: Prepared
    lower: Lower  # the pretext batches
    downstream: Iterator[Examples]

    def run(self, hypergrad: Callable[[Tensor, float, Callable[[], Map]], Map]) -> None:
        """All alternations."""
        state, task, head, _, _ = self.prepared
        of_MAE = NewtonPasses(task=task)  # type: ignore[arg-type]
        batches = (self.lower, self.downstream)
        cfg = self.experiment.cfg
        list(algorithm_1(state, cfg, task, head.loss, hypergrad, *batches, of_MAE))

    def asked(self, name: str, batch: int | None = None) -> Iterator[Examples]:
        """Drawings of a split, for one query after another; without `batch` all of them."""
        cfg = self.experiment.cfg
        of_split = train_on(self.experiment.task, name)
        elsewhere = replace(self.experiment, task=of_split)
        size = batch or len(of_split.train.targets)
        queries = range(cfg.alternations * cfg.upper_steps)
        return elsewhere.examples("query", cfg.seed, size, queries, cfg.drop_path)

    def gradient(self, examples: Examples) -> Tensor:
        """∇L^D at θ_P (l.12) of these drawings."""
        state, _, head, _, _ = self.prepared
        passes = self.experiment.passes
        return passes.gradients(head.loss, state.theta_P, state.phi_D, examples).theta


def start(cfg: AlignConfig, task: Task, pool: Pool, with_val: bool = False) -> Aligning:
    """Everything up to line 3 of Algorithm 1."""
    experiment = open_experiment(cfg, task, pool)
    trained = experiment
    if with_val:
        trained = replace(experiment, task=train_on(experiment.task, "train", "val"))
    prepared = prepare(trained)
    list(probe(trained, prepared))
    pretext, downstream = batches_left(trained, prepared)
    state, pretext_task = prepared.state, prepared.pretext_task
    lower = Lower(pretext, state, pretext_task, cfg.lower_steps, cfg.lam)
    return Aligning(experiment, prepared, lower, downstream)


class Aligned(NamedTuple):
    """What aligning ended with; the names are those of `Run`."""

    theta_P: Tensor
    q_over_g: float | None
    cosine: Sequence[float]
    losses: dict[str, float]


def align_arm(
    name: str, cfg: AlignConfig, task: Task, pool: Pool, cosines: Sequence[float] = ()
) -> Aligned:
    """Algorithm 1 as the arm has it; `cosines` are those of U in the same cell, for C."""
    arm = ARMS[name]
    if name == "C" and not cosines:
        raise Diverged("U, whose cosines are missing")
    aligning = start(cfg, task, pool, arm.with_val)
    state, _, head, _, _ = aligning.prepared
    placebo = partial(turned, cosines=iter(cosines), random=rng(cfg.seed, "placebo"))
    examples = aligning.asked(arm.asked, cfg.d_batch) if arm.asked else iter(())
    noted: list[Tensor] = []  # |q|/|g| and cosine of each query

    def hypergrad(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
        """The arm's, of a g of the drawers that it asks; q gets the length of g."""
        if not arm.asked:
            return torch.zeros_like
        # `cache`: one graph for all products of an alternation
        solve = solver(name, G, lam, cache(H), aligning.lower, placebo)

        def answer(_: Tensor) -> Tensor:
            g = aligning.gradient(next(examples))
            q = solve(g)
            noted.append(torch.stack(agreement(g, q)))
            return as_long_as(g, q)

        return answer

    aligning.run(hypergrad)
    splits = {part: getattr(aligning.experiment.task, part) for part in ("train", "val", "test")}
    score = partial(aligning.experiment.score, theta=state.theta_P, phi_D=head.with_stats)
    losses = {part: score(split).loss for part, split in splits.items()}
    q_over_g, cosine = torch.stack(noted).T.tolist() if noted else ([], [])
    last = q_over_g[-LAST * cfg.upper_steps :]
    rounded = [round(one, 6) for one in cosine]
    return Aligned(state.theta_P.detach(), fmean(last) if last else None, rounded, losses)


def solver(
    name: str, G: Tensor, lam: float, H: Callable[[], Map], lower: Lower, placebo: Map
) -> Map:
    """Lines 10 and 13 of an arm: a function g -> q, of any length."""
    if name == "N":
        return newton(G, lam, H)
    if name == "U":
        return unrolled(lower)
    if name == "A":
        return divided(lower)
    if name == "C":
        return placebo
    return torch.clone  # G and oracle-G


def turned(g: Tensor, cosines: Iterator[float], random: Generator) -> Tensor:
    """A tensor with the next cosine to g, and as long; the rest of it is random.

    >>> g = torch.tensor([[3.0, 4.0]])
    >>> q = turned(g, iter([0.6]), torch.Generator().manual_seed(0))
    >>> [round(float(value), 4) for value in agreement(g, q)]
    [1.0, 0.6]
    """
    cosine = next(cosines)
    along = g.double() / g.double().norm()
    across = torch.randn(g.shape, generator=random, dtype=torch.float64).to(g.device)
    across -= (across * along).sum() * along
    q = cosine * along + (1 - cosine**2) ** 0.5 * across / across.norm()
    return as_long_as(g, q.to(g))


def as_long_as(g: Tensor, q: Tensor) -> Tensor:
    """Scale q to the length of g."""
    scale = g.double().norm() / q.double().norm()
    return torch.mul(scale, q).to(g)


# --- a run ----------------------------------------------------------------------------------------


def run_arm(arm: str, cell: Cell, settings: Record, cosines: Sequence[float] = ()) -> list[Run]:
    """Align, and fine-tune from the θ_P that it ends with; 0v gives the line of P, too."""
    task = omniglot_task(cell.alphabet, cell.backbone)
    started = time.process_time()
    aligned: Aligned | None = None
    with suppress(Diverged):
        cfg = AlignConfig(**settings, **ALIGN)
        aligned = align_arm(arm, cfg, task, pool_for(cell.alphabet), cosines)
    cpu_align = time.process_time() - started
    trained_on = {arm: task}
    if arm == "0v":
        trained_on["P"] = train_on(task, "train", "val")
    runs = []
    for name, of_name in trained_on.items():
        between = time.process_time()
        ends = {f"{rate:g}": accuracy(settings, rate, aligned, of_name) for rate in RATES}
        chance = 100 / len(task.classes)
        run = Run(
            name,
            *cell,
            ends={rate: chance if end is None else end for rate, end in ends.items()},
            images=len(task.test.targets),
            diverged=None in ends.values(),
            q_over_g=aligned.q_over_g if aligned else None,
            cosine=aligned.cosine if aligned else (),
            losses=aligned.losses if aligned else {},
            cpu_align=round(cpu_align, 2),
            cpu_peft=round(time.process_time() - between, 2),
            weights=sha256(settings["weights"] / "backbone.pth"),
            time=now(),
            commit=commit(),
        )
        runs.append(run)
    return runs


def accuracy(settings: Record, rate: float, aligned: Aligned | None, task: Task) -> float | None:
    """Test accuracy (%) after PEFT from θ_P; None if PEFT or the aligning before it diverged."""
    if aligned is None:
        return None
    with suppress(Diverged):
        return fine_tune(settings, rate, EPOCHS, aligned.theta_P, WARMUP, task).curve[EPOCHS]
    return None


def now() -> str:
    """The time, UTC."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


# --- first-order gains ----------------------------------------------------------------------------


def measure_gains(cell: Cell, settings: Record, at: Sequence[int] = AT) -> list[Gains]:
    """What L^D gains to first order along each arm's direction, after some alternations of G.

    g and L^D are of all validation drawings. θ_D is moved by MOVE to either side, the lower steps
    are taken from it, and L^D is taken at the θ_P that they end with. The response is the
    difference of both, divided by 2 MOVE.
    """
    cfg = AlignConfig(**settings, **ALIGN)
    task = omniglot_task(cell.alphabet, cell.backbone)
    aligning = start(cfg, task, pool_for(cell.alphabet))
    examples = aligning.asked("val", cfg.d_batch)
    all_drawings = next(aligning.asked("val"))
    found: list[Gains] = []
    directions: dict[str, Tensor] = {}  # those of the alternation before

    def hypergrad(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
        """That of arm G; measures before it answers."""
        if directions:
            found[-1] = found[-1]._replace(next=responses(aligning, directions, all_drawings))
            directions.clear()
        alternation = aligning.prepared.state.done + 1
        if alternation in at:
            g = aligning.gradient(all_drawings)
            directions.update(all_directions(g, G, lam, cache(H), aligning.lower, cfg.seed))
            own = responses(aligning, directions, all_drawings)
            found.append(describe(cell, alternation, own, directions))
        return lambda _: aligning.gradient(next(examples))

    aligning.run(hypergrad)
    return found


def all_directions(
    g: Tensor, G: Tensor, lam: float, H: Callable[[], Map], lower: Lower, seed: int
) -> dict[str, Tensor]:
    """The answer q of each arm to g, by name."""
    directions: dict[str, Tensor] = {}
    for name in ("G", "N", "U", "A"):
        directions[name] = solver(name, G, lam, H, lower, torch.clone)(g)
    cosine = float(agreement(g, directions["U"])[1])
    directions["C"] = turned(g, iter([cosine]), rng(seed, "placebo"))
    return directions


def responses(
    aligning: Aligning, directions: dict[str, Tensor], examples: Examples
) -> dict[str, float]:
    """The response of L^D along each direction, with the lower steps of this alternation."""
    lower, state, head = aligning.lower, aligning.prepared.state, aligning.prepared.head

    def loss(theta_D: Tensor) -> float:
        end = end_of_lower_steps(lower, theta_D)
        return float(head.loss(end, state.phi_D, examples).detach())

    found = {}
    for name, q in directions.items():
        step = MOVE * q / q.norm()
        rise = loss(lower.start.theta_D + step) - loss(lower.start.theta_D - step)
        found[name] = rise / (2 * MOVE)
    return found


def describe(
    cell: Cell, alternation: int, own: dict[str, float], directions: dict[str, Tensor]
) -> Gains:
    """A line, still without the responses of the next alternation."""
    g, U = directions["G"], directions["U"]
    to_g = {name: agreement(g, q) for name, q in directions.items()}
    return Gains(
        *cell,
        alternation,
        own,
        {},
        with_g={name: float(cosine) for name, (_, cosine) in to_g.items()},
        with_U={name: float(agreement(U, q)[1]) for name, q in directions.items()},
        q_over_g={name: float(ratio) for name, (ratio, _) in to_g.items()},
        time=now(),
        commit=commit(),
    )


# --- files, and what is left to do ----------------------------------------------------------------


def read_runs(path: Path) -> list[Run]:
    """The runs of a file; none if it is not there."""
    return [Run(**line) for line in read_lines(path)]


def read_gains(path: Path) -> list[Gains]:
    """The gains of a file; none if it is not there."""
    return [Gains(**line) for line in read_lines(path)]


def read_lines(path: Path) -> list[Record]:
    """The lines of a file; none if it is not there."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def add_lines(lines: Sequence[Any], path: Path, out: Path) -> None:
    """Write the file anew, with these lines at its end."""
    with FileLock(out / "results.lock"):
        before = path.read_text() if path.exists() else ""
        added = [json.dumps(line._asdict()) + "\n" for line in lines]
        write_atomic(path, before + "".join(added))


def next_arm(cell: Cell, runs: list[Run]) -> str | None:
    """The first arm that has no line in this cell; None if it has all."""
    done = {run.arm for run in runs if run.cell == cell}
    return next((arm for arm in ARMS if arm not in done), None)


def next_run(cell: Cell, path: Path, out: Path) -> list[Run]:
    """Do the first arm that is missing in this cell."""
    runs = read_runs(path)
    arm = next_arm(cell, runs)
    assert arm
    settings = settings_of(cell, out)
    of_U = next((run.cosine for run in runs if (run.cell, run.arm) == (cell, "U")), ())
    return run_arm(arm, cell, settings, of_U)


Line = Sequence[Run] | Sequence[Gains]


def go_on(
    left: Callable[[], list[Cell]], do: Callable[[Cell], Line], path: Path, out: Path
) -> None:
    """Until no cell is left: do the first one that no other process is at, add its lines."""
    while cells := left():
        for cell in cells:
            if (parent := parent_process()) and not parent.is_alive():
                return  # it was killed, and the next command starts others
            lock = FileLock(out / f"{'-'.join(map(str, cell))}.lock", timeout=0)
            with suppress(Busy, Timeout), lock:  # Busy: another process pretrains the backbone
                if cell in left():
                    add_lines(do(cell), path, out)
                    break
        else:
            time.sleep(10)  # other processes are at all that is left


def cells_without_gains(results: Path) -> list[Cell]:
    """Those whose first-order gains are still to be measured."""
    done = {(one.alphabet, one.backbone, one.seed) for one in read_gains(results / GAINS)}
    return [cell for cell in GAIN_CELLS if cell not in done]


def cells_not_whole(results: Path) -> list[Cell]:
    """Those in which an arm is still to be run."""
    runs = read_runs(results / RUNS)
    return [cell for cell in CELLS if next_arm(cell, runs)]


def work(out: Path, results: Path, gains: bool) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    if gains:
        left = partial(cells_without_gains, results)
        go_on(left, lambda cell: measure_gains(cell, settings_of(cell, out)), results / GAINS, out)
    else:
        left = partial(cells_not_whole, results)
        go_on(left, lambda cell: next_run(cell, results / RUNS, out), results / RUNS, out)


def main(
    out: Path = Path("runs/which_derivative"),
    results: Path = RESULTS,
    gains: bool = False,
    processes: int = 2,
) -> None:
    """Go on with the study, or with --gains; OUT is where the backbones are."""
    out.mkdir(parents=True, exist_ok=True)
    results.mkdir(exist_ok=True)
    if not gains and cells_without_gains(results):
        raise UsageError(f"{results / GAINS}: first-order gains come first; give --gains")
    if processes == 1:
        work(out, results, gains)
        return
    context = get_context("spawn")
    started = []
    for _ in range(processes):
        one = context.Process(target=work, args=(out, results, gains), daemon=True)
        one.start()
        started.append(one)
    for one in started:
        one.join()
    if any(one.exitcode for one in started):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
