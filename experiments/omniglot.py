"""What does aligning give on real handwriting, and what gives it?

    python -m experiments.omniglot --out runs/omniglot

Three alphabets and four pretraining seeds, each with a split of drawers of its own, make twelve
cells. In a cell an arm has one to four seeds. The comparisons are named in omniglot.md, and tested
by `evaluate.compare_strata`, which permutes seeds within a cell only. `--drives` also runs arms
with three times as many alternations, and arms that change one thing each. The same command goes on
after a stop. omniglot_tables.py makes the tables of the page.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import lora
from align import adapter_file, hypergradient, start_state
from bisslight import Batch, Hypergradient, Loss, Map, Phi, algorithm_1
from config import AlignConfig, FinetuneConfig, PretrainConfig, Record
from data import Pool, Split, Task, normalise
from experiments.recipe import progress, run_script
from extras.pretrain import build_networks, pretrain, save_networks
from finetune import FinetuneResult, finetune
from support import omniglot
from support.checkpoints import load_theta
from support.experiment import AlignExperiment, Experiment
from support.optim import train_epochs
from support.processes import jobs
from support.runs import read_json, write_atomic

ALPHABETS = ("Balinese", "Greek", "Latin")  # settings were chosen on the two others
SETTINGS: Record = {  # λ and all that is not here is the paper's, or vit_mini's default
    "alternations": 50, "lower_steps": 5, "upper_steps": 3, "p_batch": 64, "d_batch": 32,
    "warmup": 5, "p_lr": 1e-2, "d_lr": 1e-2, "eval_every": 50,
}  # fmt: skip
PEFT: Record = {
    "lr": 1e-2, "epochs": 25, "warmup_epochs": 5, "batch": 32, "eval_epochs": 5, "test_curve": True
}  # fmt: skip
PRETRAIN: Record = {
    "backbone": "vit_mini", "pool": "omniglot", "image_size": 28, "patch_size": 4, "epochs": 250,
    "warmup_epochs": 12, "batch": 128, "base_lr": 8e-3, "beta2": 0.999, "min_crop": 0.5,
}  # fmt: skip
EQUAL_TIME = 95  # epochs of direct PEFT that take the time of align and PEFT
FIRST_OF_EQUAL_TIME = 70  # epochs before a restart, of the same time in sum
EPOCHS_OF_LONGER = 225  # the same two for the arms of LONGER
FIRST_OF_LONGER = 200


class Cell(NamedTuple):
    """One task: an alphabet, a pretraining seed and a split, which go together, and a seed."""

    alphabet: str
    repeat: int  # pretraining seed and --data-seed
    seed: int

    @property
    def name(self) -> str:
        """Such as Greek-r1-s3."""
        return f"{self.alphabet}-r{self.repeat}-s{self.seed}"


class Unit(NamedTuple):
    """One arm in one cell; `jobs` hands units to its processes."""

    arm: str
    cell: Cell
    out: Path


# --- arms ---------------------------------------------------------------------------------------


def as_it_is(loss: Loss) -> Loss:
    """No change."""
    return loss


@dataclass(frozen=True)
class Aligned:
    """How an arm aligns: settings other than SETTINGS, and what is changed in Algorithm 1."""

    settings: Record = field(default_factory=dict)
    hypergrad: Hypergradient | None = None  # None: what the settings name
    own_images: bool = False  # the pool is the task's own training images, without labels
    change_loss: Callable[[Loss], Loss] = as_it_is
    drawers: int = 10  # whose drawings have labels


@dataclass(frozen=True)
class Direct:
    """How an arm fine-tunes without aligning."""

    settings: Record = field(default_factory=dict)  # other than PEFT
    first_epochs: int = 0  # of a fine-tuning before, whose θ this one starts from
    pretrained: bool = True
    drawers: int = 10


def no_hypergradient(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
    """Q = 0: θ_D is trained by its own loss alone (l.14), so the problem is no longer bilevel."""
    return torch.zeros_like


def without_gradient_at_D(loss: Loss) -> Loss:
    """L^D whose gradient at θ_D is zero (l.14): θ_D is moved by q alone."""

    def changed(theta: Tensor, phi: Phi, batch: Batch, regularise: bool = False) -> Tensor:
        if regularise:  # the pass of l.14; 0 · θ keeps θ in the graph
            theta = theta.detach() + 0 * theta
        return loss(theta, phi, batch, regularise=regularise)

    return changed


MAIN: dict[str, Aligned | Direct] = {
    "aligned": Aligned(),
    "direct 0.003": Direct({"lr": 3e-3}),
    "direct 0.01": Direct(),
    "direct 0.03": Direct({"lr": 3e-2}),
    "direct, equal time": Direct({"epochs": EQUAL_TIME}),
    "direct 0.03, equal time": Direct({"lr": 3e-2, "epochs": EQUAL_TIME}),
    "restart": Direct(first_epochs=25),
    "restart, equal time": Direct(first_epochs=FIRST_OF_EQUAL_TIME),
    "lower only": Aligned({"upper_steps": 0}),
    "pretext on own images": Aligned({"upper_steps": 0}, own_images=True),
    "identity": Aligned({"hypergrad": "identity"}),
    "q = 0": Aligned(hypergrad=no_hypergradient),
    "cg": Aligned({"hypergrad": "cg"}),
    "random backbone": Direct(pretrained=False),
}
# Four seeds for what decides, fewer for what an earlier trial has settled, or what is slow. The
# lowest rate is tried with one, as the paper tries rates.
FEWER_SEEDS = {
    "direct 0.003": 1,
    "direct, equal time": 2,
    "direct 0.03, equal time": 2,
    "lower only": 2,
    "identity": 2,
    "pretext on own images": 1,
    "cg": 1,
    "random backbone": 1,
}
LONGER: dict[str, Aligned | Direct] = {
    "aligned, T 150": Aligned({"alternations": 150, "warmup": 15}),
    "restart, time of T 150": Direct(first_epochs=FIRST_OF_LONGER),
    "direct 0.03, time of T 150": Direct({"lr": 3e-2, "epochs": EPOCHS_OF_LONGER}),
    "q = 0, T 150": Aligned({"alternations": 150, "warmup": 15}, hypergrad=no_hypergradient),
}
LONGER_SEED = 1  # seed 0 had shown that 150 alternations help
STRONG_CURVATURE: Record = {"p_batch": 8, "rank": 64, "lam": 1e-5}  # where M-FAC acts most
DRIVE_REPEATS = 2  # of the four; one seed each
DRIVES: dict[str, Aligned | Direct] = {
    "q alone": Aligned(change_loss=without_gradient_at_D),
    "lambda 1e-4": Aligned({"lam": 1e-4}),
    "lambda 1e-2": Aligned({"lam": 1e-2}),
    "lambda 1e-1": Aligned({"lam": 1e-1}),
    "batch 8": Aligned({"p_batch": 8}),
    "batch 8, identity": Aligned({"p_batch": 8, "hypergrad": "identity"}),
    "batch 8, rank 64, lambda 1e-5": Aligned(STRONG_CURVATURE),
    "the same, identity": Aligned(STRONG_CURVATURE | {"hypergrad": "identity"}),
    "the same, q = 0": Aligned(STRONG_CURVATURE, hypergrad=no_hypergradient),
    "5 drawers": Aligned(drawers=5),
    "5 drawers, direct": Direct(drawers=5),
    "5 drawers, restart": Direct(first_epochs=FIRST_OF_EQUAL_TIME, drawers=5),
    "T 150": Aligned({"alternations": 150, "warmup": 15}),
    "N_U 1": Aligned({"upper_steps": 1}),
    "N_U 8": Aligned({"upper_steps": 8}),
    "N_L 1": Aligned({"lower_steps": 1}),
    "upper rate 0.003": Aligned({"d_lr": 3e-3}),
    "upper rate 0.03": Aligned({"d_lr": 3e-2}),
}


# --- one arm in one cell ------------------------------------------------------------------------


class Tuned(NamedTuple):
    """What a unit ended with, a JSON file each."""

    arm: str
    alphabet: str
    repeat: int
    seed: int
    images: int  # test images
    right: int  # of these, after the epoch that validation chose
    epoch: int
    val: float  # percent
    curve: dict[int, float]  # test accuracy (%) by epoch
    cpu_align: float  # seconds, of aligning or of the PEFT before
    cpu_peft: float
    probe_P: int  # test images that a linear probe of the start's features gets right
    probe_D: int | None  # the same of θ_D
    q_over_g: float | None
    distance: float | None  # |θ_P − θ_D|


def run_unit(unit: Unit) -> None:
    """Run an arm in a cell, unless its result is there."""
    torch.set_num_threads(1)
    folder = unit.out / "units" / unit.cell.name / unit.arm.replace(" ", "_").replace(",", "")
    done = folder / "unit.json"
    if done.exists():
        return
    arm = (MAIN | LONGER | DRIVES)[unit.arm]
    if isinstance(arm, Aligned):
        tuned = run_aligned(unit, arm, folder)
    else:
        tuned = run_direct(unit, arm, folder)
    write_atomic(done, json.dumps(tuned._asdict()))


def shared_settings(unit: Unit, pretrained: bool = True) -> Record:
    """Settings of every run in a cell."""
    cell = unit.cell
    kind = "pretrain" if pretrained else "random"
    return {
        "backbone": "vit_mini",
        "weights": unit.out / f"{kind}-{cell.repeat}",
        "dataset": f"omniglot:{cell.alphabet}",
        "data_seed": cell.repeat,
        "augment": "none",
        "device": "cpu",
    }


def run_aligned(unit: Unit, arm: Aligned, folder: Path) -> Tuned:
    """Align as the arm says, then fine-tune from θ_P."""
    cfg = AlignConfig(**shared_settings(unit) | SETTINGS | {"seed": unit.cell.seed} | arm.settings)
    task = task_of(unit.cell, arm.drawers)
    pool = None
    if arm.own_images:
        pool = Pool(task.train.images, task.mean, task.std)
    experiment = AlignExperiment(cfg, task, pool)
    started = time.process_time()
    ends = align_in_memory(experiment, arm)
    cpu_align = time.process_time() - started
    start = folder / "align.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    start.write_bytes(adapter_file(experiment, ends.theta_P))
    peft: Record = {"start": start, "rank": cfg.rank}
    result = fine_tune(unit, folder / "peft", task, peft)
    tuned = tuned_of(unit, result, folder / "peft")
    probe_D = None
    if cfg.upper_steps:
        probe_D = probe(experiment, ends.theta_D)
    return tuned._replace(
        cpu_align=cpu_align,
        probe_P=probe(experiment, ends.theta_P),
        probe_D=probe_D,
        q_over_g=ends.q_over_g,
        distance=ends.distance,
    )


class Ends(NamedTuple):
    """What aligning ends with."""

    theta_P: Tensor
    theta_D: Tensor
    q_over_g: float | None  # of the last upper step
    distance: float | None


def align_in_memory(experiment: AlignExperiment, arm: Aligned) -> Ends:
    """As `align.run_align`, without a run directory; θ_D is kept, and an arm may change a line."""
    cfg = experiment.cfg
    theta = experiment.new_theta()  # l.2
    pretext = experiment.pretext_task(theta)
    head = experiment.new_head("align head")
    state, optimisers = start_state(cfg, theta, pretext.phi, head.phi)
    # the linear probe before line 3, at the fresh θ
    steps_per_epoch = math.ceil(len(experiment.task.train.targets) / cfg.d_batch)
    steps = range(cfg.probe_epochs * steps_per_epoch)
    loss = partial(head.loss, state.theta_D.detach(), state.phi_D, regularise=True)
    examples = experiment.examples("probe", cfg.d_batch, steps, 0.0, passes=True)
    for _ in train_epochs(
        loss, optimisers.probe, examples, steps_per_epoch, "probe", experiment.passes
    ):
        pass
    logs = algorithm_1(
        state,
        steps=cfg,
        task=pretext,
        loss_D=arm.change_loss(head.loss),
        hypergrad=arm.hypergrad or hypergradient(cfg, theta),
        pretext=experiment.pretext_batches(pretext, range(cfg.alternations * cfg.lower_steps)),
        downstream=experiment.examples(
            "downstream", cfg.d_batch, range(cfg.alternations * cfg.upper_steps), cfg.drop_path
        ),
        passes=experiment.passes,
    )
    last = list(logs)[-1]
    q_over_g = None
    distance = None
    if cfg.upper_steps:
        q_over_g = last.q_over_g[-1]
        distance = last.distance[-1]
    return Ends(state.theta_P.detach(), state.theta_D.detach(), q_over_g, distance)


def run_direct(unit: Unit, arm: Direct, folder: Path) -> Tuned:
    """Fine-tune from the backbone, or from the θ of a fine-tuning before."""
    task = task_of(unit.cell, arm.drawers)
    settings: Record = dict(arm.settings)
    cpu_before = 0.0
    if arm.first_epochs:
        before = unit._replace(cell=unit.cell._replace(seed=unit.cell.seed + 100))
        first = {"epochs": arm.first_epochs, "test_curve": False}
        result = fine_tune(before, folder / "first", task, first)
        cpu_before = result.trial_seconds[0]
        settings |= {"start": folder / "first", "restart": True}
    result = fine_tune(unit, folder / "peft", task, settings, arm.pretrained)
    tuned = tuned_of(unit, result, folder / "peft")
    experiment = Experiment(FinetuneConfig(**shared_settings(unit, arm.pretrained)), task)
    theta = experiment.new_theta()
    if arm.first_epochs:
        file = folder / f"first/adapter-s{unit.cell.seed + 100}.safetensors"
        theta, _ = load_theta(file, experiment.backbone.dim)
    return tuned._replace(cpu_align=cpu_before, probe_P=probe(experiment, theta))


def fine_tune(
    unit: Unit, out: Path, task: Task, settings: Record, pretrained: bool = True
) -> FinetuneResult:
    """An ordinary `finetune` of one seed."""
    shared = shared_settings(unit, pretrained)
    one = {"seed": unit.cell.seed, "seeds": 1}
    return finetune(FinetuneConfig(**shared | PEFT | one | settings), out, task=task)


def tuned_of(unit: Unit, result: FinetuneResult, out: Path) -> Tuned:
    """What a fine-tuning ended with; what is known of its start comes later."""
    assert result.right is not None
    trial = read_json(out / f"lr{result.lr:g}-s{unit.cell.seed}" / "result.json")
    return Tuned(
        arm=unit.arm,
        alphabet=unit.cell.alphabet,
        repeat=unit.cell.repeat,
        seed=unit.cell.seed,
        images=result.test_images,
        right=result.right[0],
        epoch=result.epochs[0],
        val=result.val[0],
        curve=trial["test_curve"],
        cpu_align=0.0,
        cpu_peft=result.trial_seconds[0],
        probe_P=0,
        probe_D=None,
        q_over_g=None,
        distance=None,
    )


@cache
def task_of(cell: Cell, drawers: int) -> Task:
    """The task of a cell, with labels of fewer drawers if so asked."""
    task = omniglot.task(cell.alphabet, cell.repeat)
    images = torch.as_tensor(task.train.images)
    # images lie character by character, and within it drawer by drawer
    kept = [k for k in range(len(images)) if k % 10 < drawers]
    return task._replace(train=Split(images[kept], task.train.targets[kept]))


PROBE_DECAYS = (1e-3, 1e-2, 1e-1)


def probe(experiment: Experiment, theta: Tensor) -> int:
    """Test images that a logistic regression on frozen features gets right.

    Features are standardised; of three decays, validation chooses. L-BFGS finds the optimum, so
    this needs neither a seed nor a rate.
    """
    splits = (experiment.task.train, experiment.task.val, experiment.task.test)
    x = []
    for split in splits:
        images = torch.as_tensor(split.images)
        mean = torch.tensor(experiment.task.mean).view(3, 1, 1)
        std = torch.tensor(experiment.task.std).view(3, 1, 1)
        with torch.no_grad():
            x.append(lora.features(experiment.backbone, theta, normalise(images, mean, std)))
    centre = x[0].mean(0)
    spread = x[0].std(0) + 1e-6
    train, val, test = [(part - centre) / spread for part in x]
    best = (-1, 0)  # right on validation, right on test
    for decay in PROBE_DECAYS:
        layer = fit_regression(train, splits[0].targets, len(experiment.task.classes), decay)
        right_val = int((layer(val).argmax(1) == splits[1].targets).sum())
        right_test = int((layer(test).argmax(1) == splits[2].targets).sum())
        if right_val > best[0]:
            best = (right_val, right_test)
    return best[1]


def fit_regression(x: Tensor, y: Tensor, classes: int, decay: float) -> nn.Linear:
    """The optimum of the convex problem, by L-BFGS from zero."""
    layer = nn.Linear(x.shape[1], classes)
    for tensor in layer.parameters():
        nn.init.zeros_(tensor)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(layer(x), y) + decay / 2 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return layer


# --- the study ----------------------------------------------------------------------------------


def make_backbone(job: tuple[int, Path]) -> None:
    """Pretrain a repeat's backbone, and keep one as it is before its first step."""
    repeat, out = job
    torch.set_num_threads(1)
    networks = build_networks(PretrainConfig(**PRETRAIN, seed=repeat))
    random = out / f"random-{repeat}"
    random.mkdir(parents=True, exist_ok=True)
    cfg = PretrainConfig(**PRETRAIN, seed=repeat)
    write_atomic(random / "backbone.pth", save_networks(cfg, networks))
    pretrain(cfg, out / f"pretrain-{repeat}")


def cells_of(seeds: int, repeats: int) -> list[Cell]:
    """All cells, seed by seed, so that a study cut short is balanced."""
    cells = []
    for seed in range(seeds):
        for repeat in range(repeats):
            cells += [Cell(alphabet, repeat, seed) for alphabet in ALPHABETS]
    return cells


def main(
    out: Path = Path("runs/omniglot"),
    seeds: int = 4,
    repeats: int = 4,
    drives: Annotated[bool, typer.Option(help="What drives it, too.")] = False,
    processes: int = 2,
) -> None:
    """Run every arm in every cell; the results are JSON files below OUT/units."""
    backbones = [(repeat, out) for repeat in range(repeats)]
    list(progress(jobs(make_backbone, backbones, processes), repeats, "pretrained"))
    units = []
    for cell in cells_of(seeds, repeats):
        for arm in MAIN:
            if cell.seed < FEWER_SEEDS.get(arm, seeds):
                units.append(Unit(arm, cell, out))
    list(progress(jobs(run_unit, units, processes), len(units), "main arms"))
    if drives:
        units = []
        for cell in cells_of(LONGER_SEED + 1, repeats):
            if cell.seed == LONGER_SEED:
                units += [Unit(arm, cell, out) for arm in LONGER]
        list(progress(jobs(run_unit, units, processes), len(units), "longer"))
        units = []
        for arm in DRIVES:  # arm by arm: of a study cut short, the arms that are there are whole
            for cell in cells_of(1, min(repeats, DRIVE_REPEATS)):
                units.append(Unit(arm, cell, out))
        list(progress(jobs(run_unit, units, processes), len(units), "drives"))


if __name__ == "__main__":
    run_script(main)
