"""`bisslight finetune`: PEFT of θ and a fresh head, alone or after align runs (Eq. 2; App. C.2).

Each learning rate is tried with one seed (--grid-seeds); the best one on validation is run with all
seeds, and each seed is tested once. One rate with one seed is a run of its own, OUT/lr0.001-s0.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bisslight import Diverged
from config import FinetuneConfig, Record
from data import Task
from support.checkpoints import load_adapter, load_theta, save_adapter
from support.errors import UsageError, checking
from support.experiment import Experiment, names_of_own_data
from support.optim import Group, Optimiser, Schedule, train_epochs, trainable
from support.processes import jobs
from support.runs import (
    LOG,
    MAY_CHANGE,
    Run,
    RunResult,
    Track,
    check_directory,
    read_json,
    sha256,
    untracked,
)


class FinetuneResult(RunResult, frozen=True):
    """What a finetune run ended with. Lists have one entry per seed."""

    dataset: str
    backbone: str
    pretext: str
    metric: str
    unit: str  # what one seed repeats
    aligned_by: str | None  # hypergradient of the align run that it started from
    aligned_on: str | None  # dataset of that run
    align_unlike_paper: Record | None  # settings of that run that are not the paper's
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


def finetune(
    cfg: FinetuneConfig,
    out: Path,
    *,
    task: Task | None = None,
    force: bool = False,
    track: Track = untracked,
) -> FinetuneResult:
    """Fine-tune into the run directory `out`; `force` starts over, `track` shows progress.

    `task`: one of your own. UsageError before the long work; Diverged where every rate diverges.
    """
    cfg = cfg.replace(**names_of_own_data(task)) if task else cfg
    goes_on = check_directory(out, "finetune", cfg, force)
    m = Experiment(cfg, task)
    starts, unit = starts_of(cfg)
    origins = [origin(x, m) for x in dict.fromkeys(starts) if x]
    first = origins[0] if origins else {"hypergrad": None}  # no align run
    m.check_batches("--batch", cfg.batch)
    if not goes_on:
        m.decode_held_out_images()
    digests = {"start_sha256": [sha256(adapter_of(x)) for x in starts if x]}
    with Run(out, "finetune", cfg, force, m.defining | digests) as run:
        if run.result:
            return FinetuneResult(**run.result)

        def results(pairs: list[tuple[float, int]]) -> list[Record]:
            one = {"grid": None, "grid_seeds": 1, "seeds": 1, "jobs": 1}
            trials = [
                cfg.replace(**one, lr=lr, seed=cfg.seed + i, start=starts[i]) for lr, i in pairs
            ]
            if cfg.jobs == 1 or not trials:
                return [peft(one, out, m.with_settings, track) for one in trials]
            fn = partial(peft, out=out, model_of=partial(Experiment, task=task))
            return [*track(jobs(fn, trials, cfg.jobs), len(trials), "runs")]

        n = cfg.grid_seeds if len(cfg.grid) > 1 else cfg.seeds
        found = results([(lr, i) for lr in cfg.grid for i in range(n)])
        tried = {lr: found[k * n : (k + 1) * n] for k, lr in enumerate(cfg.grid)}
        lr, chosen = best_rate(tried, results, cfg.seeds)
        if len(cfg.grid) > 2 and lr in (min(cfg.grid), max(cfg.grid)):
            LOG.warning("%s: the best rate, %g, is an end of the grid, look beyond it", out, lr)
        return FinetuneResult(**run.finish({
            "dataset": cfg.dataset, "backbone": cfg.backbone, "unit": unit,
            "lr": lr, "metric": m.metric,
            "grid": {f"{rate}": [r["val"] and r["val"]["accuracy"] for r in runs]
                     for rate, runs in tried.items()},
            "aligned_by": first.get("hypergrad", "unknown"),
            "aligned_on": first.get("dataset"), "align_unlike_paper": first.get("unlike_paper"),
            "pretext": first.get("pretext", m.origin["pretext"]),
            **tested(m, run, chosen),
        }))  # fmt: skip


def tested(m: Experiment, run: Run, chosen: list[Record]) -> Record:
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


def best_rate(
    tried: dict[float, list[Record]], run: Callable[[Any], list[Record]], seeds: int
) -> tuple[float, list[Record]]:
    """Best rate by `worth` of those that never diverged, its results; `run` takes (rate, seed)s."""
    known = [lr for lr, results in tried.items() if all(result["val"] for result in results)]
    for lr in sorted(known, key=lambda lr: worth(tried[lr]), reverse=True):  # the first of equals
        results = tried[lr] + run([(lr, i) for i in range(len(tried[lr]), seeds)])
        if all(result["val"] for result in results):
            return lr, results
    raise Diverged("every learning rate of the grid diverged")


def worth(validated: list[Record]) -> tuple[float, float]:
    """The key for comparing rates and epochs: mean validation accuracy; ties by lower mean loss."""
    scores = [x["val"] for x in validated]
    return fmean(score["accuracy"] for score in scores), -fmean(score["loss"] for score in scores)


def best_epoch(records: list[Record]) -> Record:
    """The record of the first epoch that is `worth` most; step 0 before any validation."""
    scored = (record for record in records if record["val"])
    return max(scored, key=lambda record: worth([record]), default={"step": 0})


def starts_of(cfg: FinetuneConfig) -> tuple[Sequence[Path | None], str]:
    """What each seed starts from, and what a seed therefore repeats (the unit of the p-value)."""
    if cfg.start is None:
        return [None] * cfg.seeds, "PEFT seed"
    files = [*cfg.start.glob("config.json")] or [*cfg.start.glob("*/config.json")]
    runs = sorted((x.parent for x in files), key=lambda x: (len(x.name), x.name)) or [cfg.start]
    if len(runs) not in (1, cfg.seeds):
        raise UsageError(f"--from {cfg.start}: {len(runs)} runs, not 1 or {cfg.seeds} (--seeds)")
    needed = ("result.json", "adapter.safetensors")
    if odd := [x for x in runs if x.is_dir() and not all((x / name).exists() for name in needed)]:
        raise UsageError(
            f"--from {odd[0]}: is not a finished align run; give its own command again"
        )
    if len(runs) == 1:
        kind = "LoRA file" if cfg.start.is_file() else "align run"
        return runs * cfg.seeds, f"PEFT seed on one {kind}"
    made = [read_json(run / "config.json") for run in runs]
    unlike = {key for x in made for key in x if x[key] != made[0].get(key)} - MAY_CHANGE - {"seed"}
    if unlike or len({x["seed"] for x in made}) < len(made):
        raise UsageError(
            f"--from {cfg.start}: its align runs have to differ in the seed and nothing else; see "
            f"their {', '.join(sorted(unlike)) or 'seed'}"
        )
    return runs, "align run and PEFT"


def adapter_of(start: Path) -> Path:
    return start / "adapter.safetensors" if start.is_dir() else start


def origin(start: Path, m: Experiment) -> Record:
    """What an adapter says of itself; refuses one of another network or split (UsageError)."""
    with checking(f"--from {start}"):
        theta, about = load_theta(adapter_of(start), m.backbone.dim)
        now, shape = m.origin, torch.Size(m.theta_shape)
        if theta.shape != shape:
            raise ValueError(f"holds θ {[*theta.shape]}, this run's is {[*shape]}; see --rank")
        if about.get("stage", "align") != "align":
            raise ValueError("is fine-tuned already, give an align run")
        for key in ("backbone", "rank", "alpha", "weights_sha256") if about else ():
            if str(about.get(key)) != str(now[key]):
                raise ValueError(f"has {key} {about.get(key)}, this run {now[key]}")
        names = (str(x.get("dataset")).removeprefix("folder:") for x in (about, now))
        same = len({Path(name).resolve() for name in names}) == 1
        if same and about.get("data_sha256", now["data_sha256"]) != now["data_sha256"]:
            raise ValueError(
                f"was aligned on another split or other images of {now['dataset']}, so it may have "
                "seen the test images; give its --data-seed, --split-file and images, or align "
                "again"
            )
    if not same or "data_sha256" not in about:
        LOG.info("aligned on %s, fine-tuned on %s", about.get("dataset", "?"), now["dataset"])
    return about


def peft(
    cfg: FinetuneConfig, out: Path, model_of: Callable[..., Experiment], track: Track = untracked
) -> Record:
    """One rate and one seed, in a run directory below `out`; the best validation epoch is kept."""
    m, lr = model_of(cfg), cfg.grid[0]
    out = out / f"lr{lr:g}-s{cfg.seed}"
    file = cfg.start and adapter_of(cfg.start)
    digest = {"start_sha256": file and sha256(file)}
    with Run(out, "peft", cfg, defining=m.defining | digest) as run:
        if run.result:
            return run.result
        start = load_theta(file, m.backbone.dim)[0] if file else m.new_theta()
        (theta,) = trainable({"theta": start}, m.device).values()
        phi_D, loss_D, head = m.new_head("peft head")
        steps = -(-len(m.task.train.targets) // cfg.batch)
        rate = Schedule(cfg.epochs * steps, cfg.warmup_epochs * steps + 1, cfg.end_lr)
        both = Group([theta, *phi_D.values()], lr, cfg.weight_decay)
        opt = Optimiser([both], rate, None if cfg.optimizer == "sgd" else (0.9, 0.999))
        now = {"theta": theta} | head
        best = {name: tensor.detach().clone() for name, tensor in now.items()}
        run.restore(now | {f"best.{name}": tensor for name, tensor in best.items()}, {"opt": opt})
        result = {"lr": lr, "seed": cfg.seed}
        label = f"lr {lr:g} seed {cfg.seed}"
        try:
            loss = partial(loss_D, theta, phi_D, regularise=True)
            left = range(opt.step, cfg.epochs * steps)
            examples = m.examples("peft", cfg.batch, left, cfg.drop_path, passes=True)
            made = train_epochs(loss, opt, examples, steps, "peft", m.passes)
            epochs = ({**epoch._asdict(), "val": None} for epoch in made)
            for record in track(epochs, cfg.epochs, label, opt.step // steps):
                if record["step"] % cfg.eval_epochs == 0 or record["step"] == cfg.epochs:
                    record["val"] = m.score(m.task.val, theta, head).model_dump()
                if record["val"] and not record["val"]["loss"] < float("inf"):
                    raise Diverged(f"validation after epoch {record['step']}: loss is not finite")
                run.log(record)
                if best_epoch(run.records)["step"] == record["step"]:
                    for name, tensor in now.items():
                        best[name].copy_(tensor.detach())
                run.checkpoint(f"epoch {record['step']} of {cfg.epochs}, {label}")
        except Diverged as error:
            return run.finish(result | {"val": None, "diverged": str(error)})
        about = {"stage": "finetune", "lr": lr, "seed": cfg.seed, "classes": m.task.classes}
        run.write("adapter.safetensors", save_adapter(best.pop("theta"), best, m.origin | about))
        found = best_epoch(run.records)
        return run.finish(result | {"val": found["val"], "epoch": found["step"]})
