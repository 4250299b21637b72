"""Program: `--dry-run`: what a run will be, what is left of it to do, and how long it takes.

All is opened as the run opens it, so what the run would refuse is refused. Then a step of each kind
is taken, and multiplied. Nothing is written or fetched; without the weights no step is taken.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from align import Alignment, alternations_left, prepare
from config import AlignConfig, AnyConfig, Arch, FinetuneConfig, PretrainConfig, Record
from data import Pool, Split
from extras import pretrain
from finetune import choose_rate, train
from finetune import prepare as prepare_tuning
from support.checkpoints import (
    Pretrained,
    build_head,
    build_vit,
    empty_networks,
    load_backbone,
)
from support.definitions import say
from support.experiment import (
    Experiment,
    check_batches,
    open_experiment,
    open_sources,
    set_up_device,
)
from support.looking import describe, digest_of_pool, look_at_pool
from support.runs import check_directory, define
from support.screen import count
from support.starts import Start, check_starts, read_starts
from support.trials import (
    Tuning,
    check_same_starts,
    count_grid_seeds,
    count_trials,
    read_finished,
    with_earlier,
)
from support.trials import define as define_finetune
from support.weights import OFFICIAL_FILES, SIZES, address_of, find_timm, is_folder

Seconds = dict[str, float]  # of a step or a validation, by its name
LARGE = 384  # the width of a network that is not timed on a CPU, where a step takes minutes
VAL_BATCH = 256  # images of the validation split that are scored


def plan(cfg: AnyConfig, out: Path) -> Record:
    """Return what a run of these settings into `out` will be, by name, for people and for JSON.

    Raises UsageError for all that the run would refuse: data or weights that are missing, images
    that cannot be read, adapters that do not fit, a directory of another run.
    """
    if isinstance(cfg, AlignConfig):
        return plan_align(cfg, out)
    if isinstance(cfg, PretrainConfig):
        return plan_pretrain(cfg, out)
    if cfg.start is not None and not cfg.start.exists():
        return plan_before_start(cfg, out)
    return plan_finetune(cfg, out)


def plan_align(cfg: AlignConfig, out: Path) -> Record:
    """Return what an `align` run will be."""
    experiment = open_experiment(cfg, load=load_what_is_here)  # fetches nothing
    prepare(experiment)  # only to see whether the settings fit
    if has_weights(experiment):  # without weights, their digest is not known
        check_directory(out, define("align", cfg, experiment.digests))
    lower, upper = count(cfg.lower_steps, "lower step"), count(cfg.upper_steps, "upper step")
    found = describe_experiment(experiment)
    found["length"] = (
        f"{count(cfg.probe_epochs, 'epoch')} of the head alone,"
        f" {count(cfg.alternations, 'alternation')} of {lower} and {upper}"
    )
    records = count_records(out)  # the first one is that of the head alone
    done = max(0, records - 1)
    left = cfg.alternations - done
    if left and is_timed(experiment):
        seconds = time_align(experiment)
        probe_epochs = 0 if records else cfg.probe_epochs
        total = reckon_align(experiment, seconds, left, probe_epochs)
        found |= tell_times(seconds, total, experiment.device)
    return found | describe_rest(cfg, out, done, cfg.alternations)


def reckon_align(
    experiment: Alignment, seconds: Seconds, alternations: int, probe_epochs: int
) -> float:
    """Return how many seconds so many alternations and epochs of the head alone take."""
    cfg = experiment.cfg
    upper = seconds["upper step"]  # a step of the head alone takes no longer
    total = alternations * (cfg.lower_steps * seconds["lower step"] + cfg.upper_steps * upper)
    validations = math.ceil(alternations / cfg.eval_every)  # the last alternation always has one
    total += 2 * validations * seconds["validation"]  # each scores θ_P and θ_D
    return total + probe_epochs * experiment.steps_of_epoch(cfg.d_batch) * upper


def plan_before_start(cfg: FinetuneConfig, out: Path) -> Record:
    """Return what a `finetune` run will be whose --from is not there yet: it is planned without.

    What is unlike the paper is asked of `cfg`: the paper's rates are others without --from.
    """
    # model_copy keeps the rates, where `replace` would take the defaults without --from.
    found = plan_finetune(cfg.model_copy(update={"start": None}), out)
    found["unlike the paper"] = cfg.unlike_paper()
    return {"start": f"{cfg.start}, not here yet, so it is not looked at"} | found


def plan_finetune(cfg: FinetuneConfig, out: Path) -> Record:
    """Return what a `finetune` run will be."""
    starts = read_starts(cfg)
    experiment = open_experiment(cfg, load=load_what_is_here)  # fetches nothing
    check_batches(experiment, "--batch", cfg.batch)  # an epoch's last one may be too small
    if has_weights(experiment):  # without weights, their digest is not known
        check_starts(starts, experiment)
        # A run is defined by what its first seed starts from; each trial keeps its own start.
        check_directory(out, define_finetune(experiment, starts[0]))
    cfg = with_earlier(out, cfg)  # the rates and seeds that it goes on with
    check_same_starts(out, cfg, read_starts(cfg))  # one start for each of all seeds
    trials = count_trials(cfg)
    steps = count(experiment.steps_of_epoch(cfg.batch), "step")
    found = describe_experiment(experiment)
    found["length"] = (
        f"{count(trials, 'trial')} of {count(cfg.epochs, 'epoch')} of {steps}:"
        f" {count(len(cfg.lr), 'rate')}, {count(cfg.seeds, 'seed')}"
    )
    done = count_done(cfg, out)
    if done < trials and is_timed(experiment):
        seconds = time_finetune(experiment)
        total = (trials - done) * reckon_trial(experiment, seconds)
        found |= tell_times(seconds, total, experiment.device)
    return found | describe_rest(cfg, out, done, trials)


def count_done(cfg: FinetuneConfig, out: Path) -> int:
    """Return how many trials of a run in `out` are finished.

    Trials of the best rate alone count once that rate is known, when all rates have been tried.
    """
    finished = read_finished(out)
    first_seeds = range(cfg.seed, cfg.seed + count_grid_seeds(cfg))  # each tries every rate
    tried = [one for one in finished if one.lr in cfg.lr and one.seed in first_seeds]
    if len(tried) < len(cfg.lr) * len(first_seeds):
        return len(tried)
    best = choose_rate(tried) if tried else cfg.rate  # none are tried if there is one rate alone
    others = range(cfg.seed + len(first_seeds), cfg.seed + cfg.seeds)
    return len(tried) + sum(one.lr == best and one.seed in others for one in finished)


def reckon_trial(experiment: Tuning, seconds: Seconds) -> float:
    """Return how many seconds a trial of fine-tuning takes."""
    cfg = experiment.cfg
    steps = cfg.epochs * experiment.steps_of_epoch(cfg.batch)
    validations = math.ceil(cfg.epochs / cfg.eval_epochs)  # the last epoch always has one
    return steps * seconds["training step"] + validations * seconds["validation"]


def plan_pretrain(cfg: PretrainConfig, out: Path) -> Record:
    """Return what a `pretrain` run will be."""
    _, pool, _ = open_sources(cfg)  # no task and no weights: pretraining starts from a pool alone
    assert pool is not None
    device = set_up_device(cfg)
    look_at_pool(pool)  # refuses images that cannot be read
    digests = {"pool_sha256": digest_of_pool(pool)}
    check_directory(out, define("pretrain", cfg, digests))
    steps = pretrain.steps_of_epoch(cfg, pool)
    found = {"device": str(device), "pool": describe(pool)} | describe_sizes(cfg.arch())
    found["length"] = f"{count(cfg.epochs, 'epoch')} of {count(steps, 'step')}"
    total = cfg.epochs * steps
    # The last record may be of fewer steps than the others.
    done = min(total, count_records(out) * pretrain.steps_of_record(steps))
    left = total - done
    if left and is_quick(cfg.arch(), device):
        seconds = time_pretraining(cfg, pool, device)
        found |= tell_times(seconds, left * seconds["training step"], device)
    return found | describe_rest(cfg, out, done, total)


# --- in words -------------------------------------------------------------------------------------


def load_what_is_here(cfg: AlignConfig | FinetuneConfig, weights: Path | None) -> Pretrained:
    """Load the networks as a run does; make them without numbers if the weights are not here."""
    # `weights` is None for timm's own: `load_backbone` then leaves it to timm to find the file.
    file = weights or find_timm(cfg.backbone)
    nothing_to_fetch = is_folder(cfg.backbone) or (file is not None and file.exists())
    return load_backbone(cfg, weights) if nothing_to_fetch else empty_networks(cfg)


def describe_experiment(experiment: Experiment[Any]) -> Record:
    """Return device, images, weights and network of an experiment."""
    cfg, task, networks = experiment.cfg, experiment.task, experiment.networks
    found: Record = {"device": str(experiment.device), "dataset": describe(task)} | task.sizes()
    if experiment.pool:  # finetune has none
        found["pool"] = describe(experiment.pool)
    found["weights"] = describe_weights(cfg, networks)
    return found | describe_sizes(networks.arch)


def describe_weights(cfg: AlignConfig | FinetuneConfig, networks: Pretrained) -> str:
    """Return where the weights come from, whether they are here, and how large their file is."""
    key = (cfg.backbone, cfg.pretext)
    source = cfg.weights or OFFICIAL_FILES.get(key)
    if source is None:  # timm's own
        source = cfg.backbone if is_folder(cfg.backbone) else address_of(cfg.backbone)
    # `empty_networks` makes them without numbers, and with "" as their digest.
    where = "here" if networks.sha256 else "to be fetched"
    megabytes = round(count_numbers(networks.backbone) * 4e-6)  # 4 bytes each
    # SIZES has those of official files, which are larger: the pretext head is in them, too.
    return f"{source}, {where}, about {SIZES.get(key, megabytes)} MB"


def describe_sizes(arch: Arch) -> Record:
    """Return the sizes of the network and its images. Raises UsageError where they do not fit."""
    with torch.device("meta"):  # shapes alone, no numbers
        build_head(arch, "mae")  # only to see whether patches fill the image, as every head needs
        millions = count_numbers(build_vit(arch)) / 1e6
    return {
        "network": f"{arch.depth} layers, width {arch.dim}, {millions:.1f} million numbers",
        "images": f"{arch.image_size} x {arch.image_size} pixels, patches of {arch.patch_size}",
    }


def count_numbers(network: nn.Module) -> int:
    """Return how many numbers the weights of a network are."""
    return sum(parameter.numel() for parameter in network.parameters())


def describe_rest(cfg: AnyConfig, out: Path, done: int, of: int) -> Record:
    """Return what `out` has already, and what is not as in the paper."""
    what = f"{done} of {of} done" if (out / "config.json").exists() else "new"
    return {"out": f"{out}, {what}", "unlike the paper": cfg.unlike_paper()}


def tell_times(seconds: Seconds, total: float, device: torch.device) -> Record:
    """Return the seconds of each step, about how long the rest takes, and the memory of a GPU."""
    found = {name: f"{number:.3g} s" for name, number in seconds.items()}
    found["about"] = f"{timedelta(seconds=round(total))}, if this machine stays as busy as now"
    if device.type == "cuda":  # at least: a whole alternation may need more than these steps
        found["memory"] = f"{torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB at least"
    return found


def as_text(found: Record) -> str:
    """Return a plan as lines for people.

    >>> print(as_text({"pool": ["2 images", "left out: 1 .txt"], "unlike": {"rank": (8, 64)}}))
    pool    2 images; left out: 1 .txt
    unlike  rank 8 (not 64)
    """
    width = max(map(len, found))
    lines = []
    for name, value in found.items():
        if not isinstance(value, int):  # the size of a split, which the line "dataset" has, too
            lines.append(f"{name:<{width}}  {value_as_text(value)}")
    return "\n".join(lines)


def value_as_text(value: str | list[str] | Record) -> str:
    """Return a value of a plan as text; a dict has settings that are unlike the paper's."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "; ".join(value)
    unlike = [
        f"{name} {say(name, here)} (not {say(name, there)})"
        for name, (here, there) in value.items()
    ]
    return ", ".join(unlike) or "nothing"


# --- what is there --------------------------------------------------------------------------------


def count_records(out: Path) -> int:
    """Return how many records a run has logged; after a kill, some of them are made again."""
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


# --- a step of each kind, after one that warms up -------------------------------------------------


def has_weights(experiment: Experiment[Any]) -> bool:
    """Whether the weights of the network are on this machine."""
    return bool(experiment.networks.sha256)


def is_timed(experiment: Experiment[Any]) -> bool:
    """Whether steps are taken: the weights are here, and a step does not take minutes."""
    return has_weights(experiment) and is_quick(experiment.networks.arch, experiment.device)


def is_quick(arch: Arch, device: torch.device) -> bool:
    """Whether a step of a network does not take minutes."""
    return device.type != "cpu" or arch.dim <= LARGE


def time_align(experiment: Alignment) -> Seconds:
    """Return the seconds of a lower step, of an upper step and of a validation."""

    def time_alternation(upper_steps: int) -> float:
        """Return the seconds of an alternation of one lower step and so many upper ones."""
        # Two, since the first one warms up.
        lengths = {"alternations": 2, "lower_steps": 1, "upper_steps": upper_steps}
        # model_copy does not check: the warm-up may be longer than two alternations.
        short = replace(experiment, cfg=experiment.cfg.model_copy(update=lengths))
        return time_second(alternations_left(short, prepare(short)))

    lower, both = time_alternation(0), time_alternation(1)
    upper = max(0.0, both - lower)  # two measured times: the difference may come out negative
    return {
        "lower step": lower, "upper step": upper,
        "validation": time_validation(experiment),
    }  # fmt: skip


def time_finetune(experiment: Tuning) -> Seconds:
    """Return the seconds of a step of fine-tuning and of a validation."""
    steps = experiment.steps_of_epoch(experiment.cfg.batch)
    # The first steps of two epochs have whole batches; the last step of an epoch may have fewer
    # images. Start() is a fresh θ, which is as fast as any.
    firsts = range(0, 2 * steps, steps)
    each_step = train(experiment, prepare_tuning(experiment, Start()), firsts, steps_per_record=1)
    return {"training step": time_second(each_step), "validation": time_validation(experiment)}


def time_pretraining(cfg: PretrainConfig, pool: Pool, device: torch.device) -> Seconds:
    """Return the seconds of a step of pretraining."""
    prepared = pretrain.prepare(cfg, pool, device)
    each_step = pretrain.train(prepared, range(2), record_steps=1)
    return {"training step": time_second(each_step)}


def time_validation(experiment: Experiment[Any]) -> float:
    """Return the seconds of a validation, reckoned from a batch, once its images are decoded."""
    val = experiment.task.val
    few = Split(val.images[:VAL_BATCH], val.targets[:VAL_BATCH])
    # The time depends on no number, so any seed does.
    theta, head = experiment.new_theta(0), experiment.new_head("dry run", seed=0)
    # The first scoring decodes the images, and keeps them for the second one.
    scores = (experiment.score(few, theta, head.with_stats) for _ in range(2))
    return time_second(scores) * len(val.targets) / len(few.targets)


def time_second(steps: Iterator[object]) -> float:
    """Return the seconds of the second of two steps; the first one warms up.

    What a step yields has numbers on the CPU, so a GPU has finished that step.
    """
    next(steps)
    began = time.perf_counter()
    next(steps)
    return time.perf_counter() - began
