"""`bisslight finetune`: PEFT of θ and a fresh head, alone or after align runs (App. C.2).

    from finetune import finetune
    finetune(FinetuneConfig(start=Path("runs/cub")), Path("runs/cub-peft"))

Each learning rate is tried with one seed, the best one on validation is run with all seeds, and
these are tested once. One rate with one seed is a run directory of its own, OUT/lr0.001-s0; the
same call goes on with unfinished ones and reads finished ones.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor

from bisslight import Diverged, Phi
from commands import FinetuneConfig
from config import UsageError
from data import Task, epochs, rng
from lora import DownstreamLoss, init_theta, load_adapter, save_adapter
from model import Model, own_names, task_name
from run import Run, check_directory, checking, jobs, read_json, reading, sha256
from training import Group, Optimiser, Schedule, Track, put_back, snapshot, trainable, untracked
from weights import load_theta

LOG = logging.getLogger("bisslight")
OPEN: list[Model] = []  # the model of this process's trials


class FinetuneResult(NamedTuple):
    """What a finetune run ended with. Lists have one entry a seed."""

    out: str
    dataset: str
    backbone: str
    pretext: str
    metric: str
    unit: str  # what one seed repeats
    aligned_by: str | None  # hypergradient of the align run that it started from
    aligned_on: str | None  # dataset of that run
    align_unlike_paper: dict[str, Any] | None  # settings of that run that are not the paper's
    lr: float  # the chosen rate
    grid: dict[str, list[float | None]]  # validation accuracy by rate; None: diverged
    val: list[float]
    epochs: list[int]  # the best epoch
    test: list[float]  # accuracy in percent
    test_loss: list[float]
    test_per_class: list[float | None]
    test_images: int
    right: list[int] | None  # test images that were right; None where the accuracy is mAP
    trial_seconds: list[float]  # CPU time

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "FinetuneResult":
        """From result.json."""
        return cls(**{key: found[key] for key in cls._fields})


class Trial(NamedTuple):
    """One PEFT run to be done: one rate, one seed. It can be sent to another process."""

    cfg: FinetuneConfig  # with this rate and seed, and what it starts from
    out: Path
    task: Task | None
    force: bool


def finetune(
    cfg: FinetuneConfig,
    out: Path,
    *,
    task: Task | None = None,
    force: bool = False,
    track: Track = untracked,
) -> FinetuneResult:
    """Choose a rate on validation, run its seeds, test them, into the run directory `out`.

    Args:
        task: a labelled task of one's own, instead of a name in `cfg`.
        force: start the run in `out` over.
        track: shows progress; wraps the epochs of a trial, or the trials where `jobs` is above 1.
    Raises UsageError before the long work starts, Diverged where every rate diverges.
    """
    cfg = cfg.but(**own_names(task))
    check_directory(out, "finetune", cfg, force)
    OPEN.clear()
    m = model_of(cfg, task)
    starts, unit = starts_of(cfg)
    origins = [origin(start, m) for start in dict.fromkeys(starts) if start]
    m.refuse("--batch", cfg.batch)
    m.read_all(out)
    digests = [sha256(adapter_of(start)) for start in starts if start]
    run = Run(out, "finetune", cfg, force, **m.about(), start_sha256=digests)
    if run.result:
        return FinetuneResult.of(run.result)
    if cfg.warmup_epochs >= cfg.epochs:
        LOG.warning("the warm-up is not shorter than the run: see --warmup-epochs and --epochs")

    def results(pairs: list[tuple[float, int]]) -> list[dict[str, Any]]:
        trials = [
            Trial(one_trial(cfg, lr, i, starts[i]), out / f"lr{lr:g}-s{cfg.seed + i}", task, force)
            for lr, i in pairs
        ]
        if cfg.jobs == 1:
            return [peft(trial, track) for trial in trials]
        return [*track(jobs(peft, trials, cfg.jobs), len(trials), "runs")]

    tries = range(cfg.grid_seeds if len(cfg.grid) > 1 else cfg.seeds)
    found = iter(results([(lr, i) for lr in cfg.grid for i in tries]))
    tried = {lr: [next(found) for _ in tries] for lr in cfg.grid}
    lr, chosen = best_rate(
        tried, lambda lr, done: results([(lr, i) for i in range(done, cfg.seeds)])
    )
    if len(cfg.grid) > 1 and lr in (min(cfg.grid), max(cfg.grid)):
        LOG.info("the best rate, %g, is at the edge of the grid: extend it with --grid", lr)
    about = {
        "out": str(out), "dataset": cfg.dataset, "backbone": cfg.backbone, "unit": unit, "lr": lr,
        "pretext": task_name(cfg.pretext), "metric": m.task.metric,
        "grid": {str(k): [r["val"] and r["val"]["accuracy"] for r in v] for k, v in tried.items()},
        "aligned_by": None, "aligned_on": None, "align_unlike_paper": None,
    }  # fmt: skip
    about |= recorded(origins[0]) if origins else {}
    return FinetuneResult.of(run.finish(about | tested(m, run, chosen)))


def recorded(origin: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says of the align run that it started from."""
    return {
        "aligned_by": origin.get("hypergrad", "unknown"),
        "aligned_on": origin.get("dataset"),
        "align_unlike_paper": origin.get("unlike_paper"),
    } | ({"pretext": origin["pretext"]} if "pretext" in origin else {})


def tested(m: Model, run: Run, chosen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Test each seed's best epoch, once; keep its adapter beside the result."""
    scores = []
    for result in chosen:
        file = Path(result["adapter"])
        theta, phi_D, _ = load_adapter(file)
        phi_D = {name: tensor.to(m.device) for name, tensor in phi_D.items()}
        scores.append(m.score(m.task.test, theta.to(m.device), phi_D))
        run.write(f"adapter-s{result['seed']}.safetensors", file.read_bytes())
    right = [score.right for score in scores]
    return {
        "test": [score.accuracy for score in scores],
        "test_loss": [score.loss for score in scores],
        "test_per_class": [score.per_class for score in scores],
        "test_images": len(m.task.test.targets),
        "right": None if None in right else right,
        "val": [result["val"]["accuracy"] for result in chosen],
        "epochs": [result["epoch"] for result in chosen],
        "trial_seconds": [result["cpu_seconds"] for result in chosen],
    }


def model_of(cfg: FinetuneConfig, task: Task | None) -> Model:
    """The model that all trials of a process share; they differ in rate, seed and start."""
    if not OPEN:
        OPEN.append(Model(cfg, task))
    return OPEN[0]


def one_trial(cfg: FinetuneConfig, lr: float, i: int, start: Path | None) -> FinetuneConfig:
    """Settings of the i-th seed at one rate."""
    return cfg.but(lr=lr, grid=None, grid_seeds=1, seeds=1, seed=cfg.seed + i, start=start, jobs=1)


def best_rate(
    tried: Mapping[float, list[dict[str, Any]]],
    more: Callable[[float, int], list[dict[str, Any]]],
) -> tuple[float, list[dict[str, Any]]]:
    """The rate of the best mean validation accuracy, ties by mean loss, and its seeds' results.

    A rate at which any seed diverged, also a later one, is given up for the next best.

    Args:
        more: (rate, seeds done) -> results of the other seeds.
    """
    left = {lr: results for lr, results in tried.items() if all(r["val"] for r in results)}
    while left:
        lr = max(left, key=lambda lr: mean_score(left[lr]))
        results = [*left.pop(lr)]
        results += more(lr, len(results))
        if all(r["val"] for r in results):
            return lr, results
    raise Diverged("every learning rate diverged, lower --lr or extend --grid downwards")


def mean_score(results: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean validation accuracy and minus the mean loss; the larger pair is better."""
    scores = [result["val"] for result in results]
    return fmean(s["accuracy"] for s in scores), -fmean(s["loss"] for s in scores)


# --- where θ starts -------------------------------------------------------------------------------


def starts_of(cfg: FinetuneConfig) -> tuple[list[Path | None], str]:
    """What each seed starts from, and what a seed therefore repeats (the unit of the p-value)."""
    if cfg.start is None:
        return [None] * cfg.seeds, "PEFT seed"
    if cfg.start.is_file():
        return [cfg.start] * cfg.seeds, "PEFT seed on one LoRA file"
    runs = [cfg.start] if (cfg.start / "config.json").exists() else []
    runs = runs or sorted(
        (file.parent for file in cfg.start.glob("*/config.json")),
        key=lambda run: (len(run.name), run.name),
    )
    if len(runs) not in (1, cfg.seeds):
        what = f"holds {len(runs)} align runs, --seeds {cfg.seeds} wants 1 or {cfg.seeds}"
        raise UsageError(f"--from {cfg.start}: {what}")
    for run in runs:
        if not (run / "result.json").exists() or not adapter_of(run).exists():
            what = "is not a finished align run; give its own command again to finish it"
            raise UsageError(f"--from {run}: {what}")
    if len(runs) > 1:
        return [*runs], "align run and PEFT"
    return [runs[0]] * cfg.seeds, "PEFT seed on one align run"


def adapter_of(start: Path) -> Path:
    """The file with θ."""
    return start / "adapter.safetensors" if start.is_dir() else start


def origin(start: Path, m: Model) -> dict[str, Any]:
    """Where an adapter comes from; refuses (UsageError) one that does not belong here.

    That is one of another backbone, rank or weights, and one that was aligned on another split of
    the same dataset: it may have been trained on what are test images here. A file of the released
    program does not say what it belongs to; only its shapes can be checked.
    """
    with checking(f"--from {start}"):
        theta, about = load_theta(start, m.backbone.dim)
    shape = (m.backbone.depth, 4 * m.cfg.rank * m.backbone.dim)
    if theta.shape != shape:
        found = f"{len(theta)} layers of rank {theta.shape[1] // (4 * m.backbone.dim)}"
        here = f"{shape[0]} of rank {m.cfg.rank}"
        raise UsageError(f"--from {start}: holds {found}, this run has {here}; leave --rank out")
    if about.get("stage", "align") != "align":
        raise UsageError(f"--from {start}: is fine-tuned already, give an align run")
    now = m.adapter_about()
    for key in ("backbone", "rank", "alpha", "weights_sha256"):
        if about and str(about.get(key)) != str(now[key]):
            raise UsageError(f"--from {start}: has {key} {about.get(key)}, this run {now[key]}")
    env = read_json(start / "env.json") if (start / "env.json").exists() else {}
    digest = about.get("data_sha256", env.get("data_sha256", now["data_sha256"]))
    names = (str(x.get("dataset")).removeprefix("folder:") for x in (about, now))
    if len({os.path.realpath(x) for x in names}) == 1 and digest != now["data_sha256"]:
        raise UsageError(
            f"--from {start}: was aligned on another split or other images of {now['dataset']} "
            f"(data_sha256 {digest[:12]}, here {now['data_sha256'][:12]}), so it may have seen the "
            "test images; give its --data-seed, --split-file and images, or align again"
        )
    if not about:
        LOG.info("--from %s: does not say which images it was trained on", start)
    elif digest != now["data_sha256"]:
        LOG.info("aligned on %s, fine-tuned on %s", about.get("dataset"), now["dataset"])
    return about


# --- one PEFT run ---------------------------------------------------------------------------------


def peft(trial: Trial, track: Track = untracked) -> dict[str, Any]:
    """Fine-tune θ and a fresh φ_D with one rate and one seed; keep the best validation epoch."""
    cfg, m = trial.cfg, model_of(trial.cfg, trial.task)
    about = m.about() | {"start_sha256": cfg.start and sha256(adapter_of(cfg.start))}
    run = Run(trial.out, "peft", cfg, trial.force, **about)
    if run.result:
        return run.result
    theta = start_of(cfg, m)
    phi_D, loss_D, stats = m.head(cfg.seed, "peft head")
    leaves = trainable({"theta": theta}, m.device) | phi_D
    steps = -(-len(m.task.train.targets) // cfg.batch)
    schedule = Schedule(cfg.epochs * steps, cfg.warmup_epochs * steps, cfg.end_lr)
    betas = None if cfg.optimizer == "sgd" else (0.9, 0.999)
    opt = Optimiser([Group([*leaves.values()], cfg.grid[0], cfg.weight_decay)], schedule, betas)
    best = {name: tensor.detach().clone() for name, tensor in (leaves | stats).items()}
    tensors, optimisers = {"now": leaves | stats, "best": best}, {"opt": opt}
    if saved := run.restore():
        with reading(run.path / "checkpoint.pt", "--force starts the run over"):
            put_back(saved, tensors, optimisers)
    outcome = {"lr": cfg.grid[0], "seed": cfg.seed, "adapter": str(adapter_of(run.path))}
    label = f"lr {cfg.grid[0]:g} seed {cfg.seed}"
    try:
        records = epochs_with_validation(cfg, m, opt, loss_D, leaves, steps)
        for record in track(records, cfg.epochs, label, opt.step // steps):
            run.log(record)
            if best_epoch(run.records)["step"] == record["step"]:
                put_back({"tensors": {"best": tensors["now"]}}, {"best": best}, {})
            where = f"epoch {record['step']} of {cfg.epochs}, {label}"
            run.checkpoint(snapshot(tensors, optimisers), where)
    except Diverged as error:
        return run.finish(outcome | {"val": None, "diverged": str(error)})
    about = m.adapter_about(stage="finetune", lr=cfg.grid[0], seed=cfg.seed, classes=m.task.classes)
    run.write("adapter.safetensors", save_adapter(best.pop("theta"), best, about))
    found = best_epoch(run.records)
    return run.finish(outcome | {"val": found["val"], "epoch": found["step"]})


def start_of(cfg: FinetuneConfig, m: Model) -> Tensor:
    """θ of the align run, or a fresh one for this seed."""
    if cfg.start is not None:
        return load_theta(cfg.start, m.backbone.dim)[0]
    return init_theta(m.backbone.depth, cfg.rank, m.backbone.dim, rng(cfg.seed, "lora"))


def epochs_with_validation(
    cfg: FinetuneConfig,
    m: Model,
    opt: Optimiser,
    loss_D: DownstreamLoss,
    leaves: Phi,
    steps: int,
) -> Iterator[dict[str, Any]]:
    """Train θ and φ_D from `opt.step` on; yields each epoch's loss, and its score where due."""
    n, done = len(m.task.train.targets), opt.step // steps
    draws = epochs(n, cfg.batch, cfg.seed, "peft", cfg.epochs, opt.step)
    examples = m.examples(draws, cfg.seed, "peft", cfg.drop_path, opt.step)
    phi_D = {name: tensor for name, tensor in leaves.items() if name != "theta"}
    loss = partial(loss_D, leaves["theta"], phi_D, regularise=True)
    tensors = [*leaves.values()]
    means = m.epochs_of(loss, tensors, opt, examples, steps, cfg.epochs, "fine-tuning")
    for epoch, mean in enumerate(means, done + 1):
        record: dict[str, Any] = {"step": epoch, "loss": mean, "val": None}
        if epoch % cfg.eval_epochs == 0 or epoch == cfg.epochs:
            score = m.score(m.task.val, leaves["theta"], phi_D | (loss_D.stats or {}))
            if not math.isfinite(score.loss):
                raise Diverged(f"validation after epoch {epoch}: the loss is {score.loss}")
            record["val"] = score._asdict()
        yield record


def best_epoch(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first epoch with the highest validation accuracy, ties by the lower loss."""
    validated = [record for record in records if record["val"]]
    none = {"step": 0}
    return max(validated, key=lambda r: (r["val"]["accuracy"], -r["val"]["loss"]), default=none)
