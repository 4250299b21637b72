"""Program: `--dry-run`: what a run will be and, where the weights are here, how long it takes.

Nothing is written. A few steps are taken with the run's own networks and images, and the rest is
arithmetic: validation, checkpoints and a busy machine come on top of it.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from align import batches_left, prepare
from bisslight import algorithm_1
from config import AlignConfig, AnyConfig, Arch, FinetuneConfig, PretrainConfig, Record
from data import Pool, Split, Task, describe
from finetune import define as define_finetune
from finetune import make_optimiser
from support.checkpoints import (
    OFFICIAL_FILES,
    SIZES,
    TIMM,
    arch_of,
    build_head,
    build_vit,
    check_timm,
)
from support.experiment import (
    Experiment,
    check_batches,
    open_experiment,
    open_sources,
    set_up_device,
)
from support.optim import train_epochs
from support.runs import check_directory, define
from support.starts import check_starts, read_starts

T = TypeVar("T")
VAL_BATCH = 256  # images


def plan(cfg: AnyConfig, out: Path) -> Record:
    """Return what a run of these settings into `out` will be, by name, for people and for JSON.

    Raises UsageError for all that the run would refuse: data or weights that are missing, adapters
    that do not fit, a directory of another run.
    """
    task, pool, weights = open_sources(cfg)
    device = set_up_device(cfg)
    found: Record = {"out": str(out), "device": str(device)}
    found |= describe_sources(task, pool)
    if isinstance(cfg, PretrainConfig):
        found |= describe_network(cfg.arch(), cfg.pretext)
        assert pool is not None  # pretraining has one
        steps = max(1, len(pool.images) // cfg.batch)
        found["length"] = f"{cfg.epochs} epochs of {steps} steps"
    else:
        found |= describe_weights(cfg, weights)
        assert task is not None  # both commands have one
        found["length"] = describe_length(cfg, len(task.train.targets))
        if weights and weights.exists():
            found |= try_out(cfg, out)
        elif cfg.backbone.startswith(TIMM):
            check_timm(cfg.backbone)  # its weights may not be here, so no step is taken
        else:
            found |= describe_network(arch_of({}, cfg), cfg.pretext)
    return found | {"unlike the paper": cfg.unlike_paper()}


def describe_sources(task: Task | None, pool: Pool | None) -> Record:
    """Return classes and counts of the labelled images, and how many unlabelled ones there are."""
    found: Record = {}
    if task:
        found |= {"dataset": describe(task)} | task.sizes()
    if pool:
        found["pool"] = describe(pool)
    return found


def describe_weights(cfg: AlignConfig | FinetuneConfig, weights: Path | None) -> Record:
    """Return where the weights are, and how large; of an official file, whether it is fetched."""
    if weights is None:
        return {"weights": "timm's own; fetched at the first use, unless they are in HF_HOME"}
    if weights.exists():
        return {"weights": f"{weights}, here, {weights.stat().st_size / 1e6:.0f} MB"}
    key = (cfg.backbone, cfg.pretext)
    return {"weights": f"{OFFICIAL_FILES[key]}, to be fetched, {SIZES[key]} MB"}


def describe_network(arch: Arch, pretext: str) -> Record:
    """Return the network's sizes. Raises UsageError where its parts do not fit each other."""
    with torch.device("meta"):  # shapes alone, no numbers
        vit = build_vit(arch)
        build_head(arch, pretext)
    numbers = sum(parameter.numel() for parameter in vit.parameters())
    return {
        "network": f"{arch.depth} layers, width {arch.dim}, {numbers / 1e6:.1f} million numbers",
        "images": f"{arch.image_size} x {arch.image_size} pixels, patches of {arch.patch_size}",
    }


def describe_length(cfg: AlignConfig | FinetuneConfig, images: int) -> str:
    """Return how many steps a run takes with so many labelled training images."""
    if isinstance(cfg, AlignConfig):
        return (
            f"{cfg.probe_epochs} epochs of linear probing, {cfg.alternations} alternations of "
            f"{cfg.lower_steps} lower and {cfg.upper_steps} upper steps"
        )
    steps = math.ceil(images / cfg.batch)
    return f"{count_trials(cfg)} trials of {cfg.epochs} epochs of {steps} steps"


def count_trials(cfg: FinetuneConfig) -> int:
    """Return how many trials there are: all rates with the first seeds, the best one with all.

    >>> count_trials(FinetuneConfig(backbone="vit_b16", dataset="dtd", lr="1e-3,1e-2", seeds=8))
    9
    """
    if len(cfg.lr) == 1:
        return cfg.seeds
    return len(cfg.lr) * cfg.grid_seeds + cfg.seeds - cfg.grid_seeds


# --- a few steps ----------------------------------------------------------------------------------


def try_out(cfg: AlignConfig | FinetuneConfig, out: Path) -> Record:
    """Open all, look whether `out` is another run, and take a few steps; return what it takes."""
    if isinstance(cfg, AlignConfig):
        alignment = open_experiment(cfg)
        check_directory(out, define("align", cfg, alignment.digests), cfg)
        seconds = align_seconds(alignment)
        experiment: Experiment[Any] = alignment
    else:
        starts = read_starts(cfg)
        tuning = open_experiment(cfg)
        check_batches(tuning, "--batch", cfg.batch)
        check_starts(starts, tuning)
        check_directory(out, define_finetune(tuning, starts[0]), cfg)
        experiment, seconds = tuning, finetune_seconds(tuning)
    found = describe_network(experiment.networks.arch, cfg.pretext)
    found |= {name: f"{number:.3g} s" for name, number in seconds.items() if name != "all"}
    found["about"] = in_hours(seconds["all"])
    if experiment.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(experiment.device)
        if isinstance(cfg, AlignConfig) and cfg.mfac_device == "same":
            # One gradient was stored, in float32; a run stores one for each lower step.
            peak += (cfg.lower_steps - 1) * 4 * experiment.new_theta(cfg.seed).numel()
        found["memory"] = f"{peak / 1e9:.1f} GB"
    return found


def align_seconds(experiment: Experiment[AlignConfig]) -> dict[str, float]:
    """Return the seconds of a lower and an upper step, of a validation batch, and of all."""
    cfg = experiment.cfg
    lower, upper = step_seconds(experiment)
    alternation = cfg.lower_steps * lower + cfg.upper_steps * upper
    # A step of linear probing is about half an upper one.
    probe = cfg.probe_epochs * experiment.steps_of_epoch(cfg.d_batch) * upper / 2
    val = validation_seconds(experiment)
    val_batches = math.ceil(len(experiment.task.val.targets) / VAL_BATCH)
    # Both adapters are validated.
    validations = 2 * math.ceil(cfg.alternations / cfg.eval_every) * val_batches * val
    whole = probe + cfg.alternations * alternation + validations
    return {"lower step": lower, "upper step": upper, "validation batch": val, "all": whole}


def step_seconds(experiment: Experiment[AlignConfig]) -> tuple[float, float]:
    """Return the seconds of a lower step, and of an upper one; 0 where a run has none of these.

    Two alternations of one step a level are run, of which the first one warms up.
    """
    cfg = experiment.cfg
    prepared = prepare(experiment)
    short = {"alternations": 2, "lower_steps": 1, "upper_steps": min(1, cfg.upper_steps)}
    steps = cfg.model_copy(update=short)  # a run may have fewer steps than these
    pretext, downstream = batches_left(replace(experiment, cfg=steps), prepared)
    times: list[float] = []  # when a batch was asked for, and when an alternation was done
    logs = algorithm_1(
        prepared.state,
        steps,
        prepared.pretext_task,
        prepared.head.loss,
        prepared.hypergrad,
        noting(pretext, times),
        noting(downstream, times),
        experiment.passes,
        "cpu" if cfg.mfac_device == "cpu" else None,
        partial(prepared.head.loss, regularise=True),
    )
    for _ in logs:  # its numbers are read from the device, so all its work is done
        times.append(time.perf_counter())
    if not cfg.upper_steps:
        lower_asked, done = times[-2:]
        return done - lower_asked, 0.0
    lower_asked, upper_asked, done = times[-3:]
    return upper_asked - lower_asked, done - upper_asked


def noting(batches: Iterator[T], times: list[float]) -> Iterator[T]:
    """Yield the batches; when one is asked for, note the time first."""
    while True:
        times.append(time.perf_counter())
        yield next(batches)


def finetune_seconds(experiment: Experiment[FinetuneConfig]) -> dict[str, float]:
    """Return the seconds of a training step, of a validation batch, and of all trials.

    Two steps are taken, of which the first one warms up.
    """
    cfg = experiment.cfg
    theta = experiment.new_theta(cfg.seed).requires_grad_()
    head = experiment.new_head("peft head", cfg.seed)
    epoch_steps = experiment.steps_of_epoch(cfg.batch)
    opt = make_optimiser(cfg, [theta, *head.phi.values()], epoch_steps)
    examples = experiment.examples("peft", cfg.seed, cfg.batch, range(2), cfg.drop_path)
    loss = partial(head.loss, theta, head.phi, regularise=True)
    times = [
        time.perf_counter()
        for _ in train_epochs(loss, opt, examples, 1, "dry run", experiment.passes)
    ]
    step = times[1] - times[0]
    val = validation_seconds(experiment)
    val_batches = math.ceil(len(experiment.task.val.targets) / VAL_BATCH)
    validations = math.ceil(cfg.epochs / cfg.eval_epochs) * val_batches
    whole = count_trials(cfg) * (cfg.epochs * epoch_steps * step + validations * val)
    return {"training step": step, "validation batch": val, "all": whole}


def validation_seconds(experiment: Experiment[Any]) -> float:
    """Return the seconds in which a batch of validation images is scored."""
    val = experiment.task.val
    few = Split(val.images[:VAL_BATCH], val.targets[:VAL_BATCH])
    theta, head = experiment.new_theta(0), experiment.new_head("dry run", 0)
    began = time.perf_counter()
    experiment.score(few, theta, head.with_stats)
    return time.perf_counter() - began


def in_hours(seconds: float) -> str:
    """Return a time for people.

    >>> in_hours(42), in_hours(600), in_hours(90_000)
    ('42 seconds', '10 minutes', '25.0 hours')
    """
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def as_text(found: Record) -> str:
    """Return a plan as lines for people.

    >>> print(as_text({"device": "cpu", "pool": ["2 images", "left out: 1 .txt"]}))
    device  cpu
    pool    2 images; left out: 1 .txt
    """
    width = max(map(len, found))
    lines = []
    for name, value in found.items():
        text = value
        if isinstance(value, dict):
            text = ", ".join(f"{key} {content}" for key, content in value.items()) or "nothing"
        elif isinstance(value, list):
            text = "; ".join(value)
        if not isinstance(value, int):  # sizes of splits, which the line of the images has, too
            lines.append(f"{name:<{width}}  {text}")
    return "\n".join(lines)
