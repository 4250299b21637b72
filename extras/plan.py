"""Program: `--dry-run`: what a run will be, what is left of it to do, and how long it takes.

Nothing is written. Steps are taken for some seconds with the run's own images and networks, which
get random numbers where the weights are not here; the rest is arithmetic. Opening the images and
writing checkpoints come on top of it.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

import data
from align import Alignment, batches_left, prepare, probe
from bisslight import Map, algorithm_1
from config import AlignConfig, AnyConfig, Arch, FinetuneConfig, PretrainConfig, Record
from data import Pool, Split, Task, begin_reading, digests_of_pool
from extras import pretrain
from finetune import Tuning, choose_rate, make_optimiser, with_earlier
from finetune import define as define_finetune
from support.checkpoints import (
    OFFICIAL_FILES,
    SIZES,
    TIMM,
    Pretrained,
    build_head,
    build_vit,
    check_timm,
    empty_networks,
    find_timm,
    how_to_bring,
    load_backbone,
    tag_of,
    tell_size,
)
from support.experiment import (
    Experiment,
    Loader,
    check_batches,
    look_at_pool,
    open_experiment,
    open_sources,
    set_up_device,
)
from support.files import read_json
from support.names import describe
from support.optim import train_epochs
from support.results import TrialResult
from support.runs import LOG, REMEDY, Run, check_directory, define
from support.screen import count
from support.starts import Start, check_starts, read_starts

T = TypeVar("T")
Clock = Callable[[], float]  # seconds
Seconds = dict[str, float]  # by the name of what takes them
VAL_BATCH = 256  # images
MOST_STEPS = 20  # so many steps are timed, after a first one that warms up
LONG_ENOUGH = 3.0  # seconds; once the timed steps took so long together, no more are taken
MOST_WORK = 1e11  # numbers x patches x images of the largest steps that are timed on a CPU
MOST_NUMBERS = 100e6  # with random weights on a CPU, a larger backbone is not tried out
A_DAY = 24 * 3600.0  # seconds
RATE = 1e-9  # the learning rate of the timed steps, so small that nothing diverges
NOTHING_LEFT = "nothing is left to do: it is finished"


def plan(cfg: AnyConfig, out: Path) -> Record:
    """Return what a run of these settings into `out` will be, by name, for people and for JSON.

    Raises UsageError for all that the run would refuse: data or weights that are missing, images
    that cannot be read, adapters that do not fit, a directory of another run.
    """
    task, pool, weights = open_sources(cfg)
    found: Record = {"out": str(out), "device": ""}  # the device is filled in below
    found |= describe_sources(task, pool)
    if isinstance(cfg, PretrainConfig):
        assert pool is not None  # pretraining has one
        found |= plan_pretrain(cfg, out, pool)
    else:
        if weights is None:  # they are timm's own
            check_timm(cfg.backbone, has_file=False)
            weights = find_timm(cfg.backbone)
        has_weights = weights is not None and weights.exists()
        if isinstance(cfg, AlignConfig):
            found |= plan_align(cfg, out, weights, has_weights)
        else:
            found |= plan_finetune(cfg, out, weights, has_weights)
            cfg = with_earlier(out, cfg)  # the rates that it goes on with
    return found | {"unlike the paper": describe_differences(cfg)}


def plan_pretrain(cfg: PretrainConfig, out: Path, pool: Pool) -> Record:
    """Return what is particular to a `pretrain` run: device, network, length and time."""
    device = set_up_device(cfg)
    found = {"device": str(device)} | describe_network(cfg.arch(), cfg.pretext)
    begin_reading()
    look_at_pool(cfg.pool, pool)  # refuses images that cannot be read
    check_directory(out, define("pretrain", cfg, digests_of_pool(pool)), cfg)
    epoch_steps = pretrain.steps_of_epoch(cfg, pool)
    found["length"] = f"{count(cfg.epochs, 'epoch')} of {count(epoch_steps, 'step')}"
    if is_finished(out):
        return found | {"about": NOTHING_LEFT}
    saved = read_checkpoint(cfg, out)
    done = saved["optimisers"]["opt"]["step"] if saved else 0  # steps
    if done:
        found["length"] += f"; {tell_done(done, 'step')}"
    if is_too_large(count_numbers_of_vit(cfg.arch()), device):
        return found | {"about": not_tried("this network")}
    time_steps = partial(time_pretraining, cfg, pool, device)
    with torch.device("meta"):  # shapes alone, no numbers
        head = count_numbers(build_head(cfg.arch(), cfg.pretext))
    seconds, how = reckon(time_steps, cfg.arch(), cfg.batch, device, head)
    steps_left = cfg.epochs * epoch_steps - done
    left = steps_left * seconds["training step"]
    return found | tell_times(seconds, left, how, cfg.backbone, device)


def plan_align(cfg: AlignConfig, out: Path, weights: Path | None, has_weights: bool) -> Record:
    """Return what is particular to an `align` run: device, weights, network, length and time.

    `weights` is the file of the backbone's weights, None if timm is to fetch it; `has_weights` says
    whether it is on this machine.
    """
    experiment = open_align(cfg, out, has_weights)
    networks = experiment.networks  # without numbers if the weights are not here
    found = {"device": str(experiment.device)}
    found |= describe_weights(cfg, weights, networks)
    found |= describe_network(networks.arch, cfg.pretext)
    found["length"] = (
        f"{count(cfg.probe_epochs, 'epoch')} of linear probing, "
        f"{count(cfg.alternations, 'alternation')} of {count(cfg.lower_steps, 'lower step')} and "
        f"{count(cfg.upper_steps, 'upper step')}"
    )
    if is_finished(out):
        return found | {"about": NOTHING_LEFT}
    done = alternations_done(cfg, out)
    if done is not None:
        found["length"] += f"; {tell_done(done, 'alternation')}"
    if not has_weights and is_too_large(count_numbers(networks.backbone), experiment.device):
        return found | {"about": not_tried("random weights")}
    return found | estimate_align(experiment, done, has_weights)


def plan_finetune(
    cfg: FinetuneConfig, out: Path, weights: Path | None, has_weights: bool
) -> Record:
    """Return what is particular to a `finetune` run, as `plan_align` does for `align`."""
    experiment = open_finetune(cfg, out, has_weights)
    cfg = experiment.cfg  # with all rates and seeds that are in `out` already
    networks = experiment.networks
    found = {"device": str(experiment.device)}
    found |= describe_weights(cfg, weights, networks)
    found |= describe_network(networks.arch, cfg.pretext)
    found["length"] = describe_length(cfg, len(experiment.task.train.targets))
    trials, tests, is_known = what_is_left(cfg, out)
    if trials + tests == 0 and is_finished(out):
        return found | {"about": NOTHING_LEFT}
    if trials < count_trials(cfg):
        most = "" if is_known else "at most "
        found["length"] += f"; {most}{trials} of them {'is' if trials == 1 else 'are'} left"
    if not has_weights and is_too_large(count_numbers(networks.backbone), experiment.device):
        return found | {"about": not_tried("random weights")}
    return found | estimate_finetune(experiment, trials, tests, has_weights)


# --- opened as the run does -----------------------------------------------------------------------


def open_align(cfg: AlignConfig, out: Path, has_weights: bool) -> Alignment:
    """Open what an align run computes with. Raises UsageError for all that the run would refuse.

    Where the weights are not on this machine (`has_weights` is False), the networks have no
    numbers.
    """
    experiment = open_experiment(cfg, load=choose_loader(has_weights))
    prepare(experiment)  # only to see whether the settings fit
    digests = experiment.digests
    if not has_weights:
        digests = digests | {"weights_sha256": expected_digest(out)}
    check_directory(out, define("align", cfg, digests), cfg)
    return experiment


def open_finetune(cfg: FinetuneConfig, out: Path, has_weights: bool) -> Tuning:
    """Open what a finetune run computes with, as `open_align` does for align.

    Its settings get all rates and seeds that earlier commands gave for `out`, too, since a run goes
    on with these.
    """
    starts = read_starts(cfg)
    experiment = open_experiment(cfg, load=choose_loader(has_weights))
    if not has_weights:
        digest = expected_digest(out, starts[0])
        digests = experiment.digests | {"weights_sha256": digest}
        experiment = replace(experiment, digests=digests)
    check_batches(experiment, "--batch", cfg.batch)
    check_starts(starts, experiment)
    check_directory(out, define_finetune(experiment, starts[0]), cfg)
    cfg = with_earlier(out, cfg)
    read_starts(cfg)  # refuses too few adapters for all seeds
    return replace(experiment, cfg=cfg)


def choose_loader(has_weights: bool) -> Loader:
    """Return the function that makes the networks: with their weights, or without numbers."""
    if has_weights:
        return load_backbone
    return lambda cfg, weights: empty_networks(cfg)


def expected_digest(out: Path, start: Start | None = None) -> str | None:
    """Return the digest of weights that are not on this machine; None if nothing names it.

    The adapter to start from names it, or else the run that is in `out`. With this digest, neither
    is refused as one of other weights.
    """
    of_start = start.info.weights_sha256 if start else None
    of_run: str | None = read_config(out).get("weights_sha256")
    return of_start or of_run


# --- in words -------------------------------------------------------------------------------------


def describe_sources(task: Task | None, pool: Pool | None) -> Record:
    """Return classes and counts of the labelled images, and how many unlabelled ones there are."""
    found: Record = {}
    if task:
        found |= {"dataset": describe(task)} | task.sizes()
    if pool:
        found["pool"] = describe(pool)
    return found


def describe_weights(
    cfg: AlignConfig | FinetuneConfig, weights: Path | None, networks: Pretrained
) -> Record:
    """Return where the weights are or come from, and how large they are."""
    whose = ""
    if cfg.backbone.startswith(TIMM) and not cfg.weights:
        tag = tag_of(cfg.backbone)
        whose = f"timm's own ({tag}), " if tag else "timm's own, "
    if weights and weights.exists():
        return {"weights": f"{whose}{weights}, here, {tell_size(weights.stat().st_size)}"}
    if cfg.backbone.startswith(TIMM):
        size = 4 * count_numbers(networks.backbone) / 1e6  # of float32
        told = f"{whose}not in HF_HOME, to be fetched, about {size:.0f} MB"
        return {"weights": f"{told}; {how_to_bring(cfg.backbone)}"}
    key = (cfg.backbone, cfg.pretext)
    return {"weights": f"{OFFICIAL_FILES[key]}, to be fetched, {SIZES[key]} MB"}


def describe_differences(cfg: AnyConfig) -> Record:
    """Return what is not as in the paper: settings by name, and the weights of networks of timm.

    Whether these are of MAE or I-JEPA is known by what timm calls them. Of a file or folder it is
    not known.
    """
    found = cfg.unlike_paper()
    if isinstance(cfg, PretrainConfig) or not cfg.backbone.startswith(TIMM):
        return found
    tag = None if cfg.weights else tag_of(cfg.backbone)
    if tag is None:
        found["weights"] = "perhaps not of MAE or I-JEPA, as the paper's are"
    elif not any(name in tag for name in ("mae", "ijepa")):
        found["weights"] = f"{tag} (the paper's are of MAE or I-JEPA)"
    return found


def describe_network(arch: Arch, pretext: str) -> Record:
    """Return the sizes of the network and its images.

    Raises UsageError where the parts of the network do not fit each other.
    """
    with torch.device("meta"):  # shapes alone, no numbers
        build_head(arch, pretext)  # only to see whether it fits
    millions = count_numbers_of_vit(arch) / 1e6
    return {
        "network": f"{arch.depth} layers, width {arch.dim}, {millions:.1f} million numbers",
        "images": f"{arch.image_size} x {arch.image_size} pixels, patches of {arch.patch_size}",
    }


def count_numbers(network: nn.Module) -> int:
    """Return how many numbers the weights of a network are."""
    return sum(parameter.numel() for parameter in network.parameters())


def count_numbers_of_vit(arch: Arch) -> int:
    """Return how many numbers the weights of a ViT of these sizes would be."""
    with torch.device("meta"):  # shapes alone, no numbers
        return count_numbers(build_vit(arch))


def describe_length(cfg: FinetuneConfig, images: int) -> str:
    """Return trials, epochs and steps of fine-tuning with so many labelled training images."""
    trials = count_trials(cfg)
    steps = math.ceil(images / cfg.batch)
    length = f"{count(trials, 'trial')} of {count(cfg.epochs, 'epoch')} of {count(steps, 'step')}"
    return f"{length}: {describe_trials(cfg)}"


def tell_done(number: int, thing: str) -> str:
    """Return how many things are done.

    >>> tell_done(1, "step"), tell_done(0, "step")
    ('1 step is done', '0 steps are done')
    """
    return f"{count(number, thing)} {'is' if number == 1 else 'are'} done"


def describe_trials(cfg: FinetuneConfig) -> str:
    """Return how the trials come about.

    >>> cfg = FinetuneConfig(backbone="vit_b16", dataset="dtd", lr="1e-3,1e-2", seeds=8)
    >>> describe_trials(cfg)
    '2 rates with seed 0, then the best rate with 7 more seeds'
    >>> describe_trials(cfg.replace(lr=0.01))
    'the rate 0.01 with 8 seeds'
    """
    if len(cfg.lr) == 1:
        return f"the rate {cfg.rate:g} with {count(cfg.seeds, 'seed')}"
    first = f"seed {cfg.seed}" if cfg.grid_seeds == 1 else f"{cfg.grid_seeds} seeds each"
    more = cfg.seeds - cfg.grid_seeds
    then = f", then the best rate with {count(more, 'more seed')}" if more else ""
    return f"{len(cfg.lr)} rates with {first}{then}"


def tell_times(
    seconds: Seconds, left: float, how: str, backbone: str, device: torch.device
) -> Record:
    """Return the seconds of steps and of a validation, and about how long the run still takes.

    On a GPU, also how much of its memory was needed.

    Args:
        seconds: what `reckon` returned.
        left: the seconds of all that is left to do.
        how: put behind the time: how it is known; may be empty.
        backbone: its name in the settings.
        device: where the steps were taken.
    """
    found = {
        name: f"{number:.3g} s"
        for name, number in seconds.items()
        if name.endswith("step") or name == "validation"
    }
    found["about"] = f"{tell_duration(left)}{how}, if this machine stays as busy as it is now"
    if device.type == "cuda":
        found["memory"] = tell_memory(device)
    if device.type == "cpu" and left > A_DAY and backbone != "vit_mini":
        found["about"] += "; it is for a GPU, and --backbone vit_mini is for a CPU"
    return found


def tell_random(has_weights: bool) -> str:
    """Return the clause that a time was taken with random weights; "" if they are the real ones."""
    return "" if has_weights else ", timed with random weights, since the real ones are not here"


def tell_memory(device: torch.device, more: int = 0) -> str:
    """Return the most GPU memory that was needed so far, with `more` bytes added, as a text."""
    return f"{(torch.cuda.max_memory_allocated(device) + more) / 1e9:.1f} GB"


def not_tried(thing: str) -> str:
    """Return what is said instead of a time: no step was taken, since `thing` is too large."""
    return (
        f"not known: {thing} would be too large to be tried on this CPU; it is for a GPU, and "
        "--backbone vit_mini is for a CPU"
    )


def tell_duration(seconds: float) -> str:
    """Return a time for people, in the unit that suits it.

    >>> tell_duration(42), tell_duration(600), tell_duration(90_000), tell_duration(864_000)
    ('42 seconds', '10 minutes', '25.0 hours', '10 days')
    """
    if seconds < 120:
        return count(max(1, round(seconds)), "second")
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 2 * A_DAY:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / A_DAY:.0f} days"


# --- what is there --------------------------------------------------------------------------------


def read_config(out: Path) -> Record:
    """Return what config.json of a directory says; {} where there is none."""
    file = out / "config.json"
    return read_json(file, REMEDY) if file.exists() else {}


def is_finished(out: Path) -> bool:
    """Return whether a run has written its result."""
    return (out / "result.json").exists()


def read_checkpoint(cfg: AlignConfig | PretrainConfig, out: Path) -> Record:
    """Return the checkpoint of a run that is not finished, {} if it has none."""
    run = Run(out, cfg, read_config(out))
    run.load()
    return run.saved


def alternations_done(cfg: AlignConfig, out: Path) -> int | None:
    """Return how many alternations a checkpoint has; None: linear probing is not done either."""
    records = read_checkpoint(cfg, out).get("records")
    if not records:
        return None
    done: int = records[-1]["step"]  # the first record, which linear probing writes, has 0
    return done


def count_trials(cfg: FinetuneConfig) -> int:
    """Return how many trials a run has: each is one rate with one seed.

    Several rates are tried with the first seeds (--grid-seeds), then the best one gets the others.

    >>> count_trials(FinetuneConfig(backbone="vit_b16", dataset="dtd", lr="1e-3,1e-2", seeds=8))
    9
    """
    if len(cfg.lr) == 1:
        return cfg.seeds
    return len(cfg.lr) * cfg.grid_seeds + cfg.seeds - cfg.grid_seeds


class Left(NamedTuple):
    """What is left of a finetune run to do."""

    trials: int  # to be trained
    tests: int  # of the best rate's trials
    is_known: bool  # False: at most so many trials, as it is not known which rate is the best


def what_is_left(cfg: FinetuneConfig, out: Path) -> Left:
    """Return how many trials, and how many tests of the best rate's trials, `out` lacks.

    Before all rates are tried, the best one is not known; then it is taken to be the one that lacks
    the most.
    """
    seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    has_grid = len(cfg.lr) > 1
    grid_seeds = seeds[: cfg.grid_seeds] if has_grid else seeds[:0]
    later_seeds = seeds[len(grid_seeds) :]

    def count_missing(rate: float, some_seeds: Iterable[int], name: str) -> int:
        """Return how many trials of this rate with these seeds lack a file of this name."""
        files = [out / f"lr{rate}-s{seed}" / name for seed in some_seeds]
        return sum(not file.exists() for file in files)

    left_in_grid = sum(count_missing(rate, grid_seeds, "result.json") for rate in cfg.lr)
    may_be_best = list(cfg.lr)
    if has_grid and left_in_grid == 0:
        may_be_best = [choose_rate(read_grid(cfg.lr, grid_seeds, out))]
    left_later = [count_missing(rate, later_seeds, "result.json") for rate in may_be_best]
    tests = max(count_missing(rate, seeds, "test.json") for rate in may_be_best)
    is_known = len({*left_later}) == 1
    return Left(left_in_grid + max(left_later), tests, is_known)


def read_grid(rates: Iterable[float], seeds: Iterable[int], out: Path) -> list[TrialResult]:
    """Return the results of all these rates with all these seeds, which have to be finished."""
    files = [out / f"lr{rate}-s{seed}" / "result.json" for rate, seed in product(rates, seeds)]
    return [TrialResult.model_validate(read_json(file, REMEDY)) for file in files]


# --- the time of all that is left, by arithmetic --------------------------------------------------


def seconds_of_align(cfg: AlignConfig, seconds: Seconds, images: int, done: int | None) -> float:
    """Return how many seconds the rest of an align run takes.

    Args:
        cfg: the settings.
        seconds: of each step, of a validation, and of decoding its images for the first time.
        images: how many labelled training images there are.
        done: how many alternations are done; None: linear probing is not done.
    """
    probing = 0.0
    if done is None:
        done = 0
        # An epoch's last batch has what is left, so it counts as a part of a step.
        epoch_steps = images / min(cfg.d_batch, images)
        probing = cfg.probe_epochs * epoch_steps * seconds["probing step"] + seconds["validation"]
    alternation = (
        cfg.lower_steps * seconds["lower step"]
        + seconds["curvature"]
        + cfg.upper_steps * seconds["upper step"]
    )
    alternations = (cfg.alternations - done) * alternation
    # After each --eval-every alternations and the last one, both adapters are validated.
    times = math.ceil(cfg.alternations / cfg.eval_every) - done // cfg.eval_every
    validations = 2 * times * seconds["validation"]
    return seconds["decoding"] + probing + alternations + validations


def seconds_of_finetune(
    cfg: FinetuneConfig, seconds: Seconds, sizes: dict[str, int], trials: int, tests: int
) -> float:
    """Return how many seconds so many trials and so many tests take together.

    Args:
        cfg: the settings.
        seconds: of a training step, of a validation, and of decoding its images at first.
        sizes: how many images are in "train", "val" and "test".
        trials: how many trials are left to be trained.
        tests: how many trials are left to be tested.
    """
    # An epoch's last batch has what is left, so it counts as a part of a step.
    epoch_steps = sizes["train"] / min(cfg.batch, sizes["train"])
    test = seconds["validation"] * sizes["test"] / sizes["val"]
    scoring = seconds["validation"] + (test if cfg.test_curve else 0)
    times_scored = math.ceil(cfg.epochs / cfg.eval_epochs)
    trial = cfg.epochs * epoch_steps * seconds["training step"] + times_scored * scoring
    decoding = seconds["decoding"] * (1 + sizes["test"] / sizes["val"])
    return decoding + trials * trial + tests * test


# --- a few steps ----------------------------------------------------------------------------------


def is_too_large(numbers: int, device: torch.device) -> bool:
    """Return whether a backbone of so many numbers is too large for steps on this device."""
    return device.type == "cpu" and numbers > MOST_NUMBERS


def set_random_weights(networks: Pretrained) -> None:
    """Give networks without numbers random ones, in place, so that steps can be timed."""
    LOG.warning("timing steps with random weights, which may take some minutes")
    for network in (networks.backbone, networks.head):
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data.uniform_(-0.02, 0.02)


def estimate_align(experiment: Alignment, done: int | None, has_weights: bool) -> Record:
    """Time steps of an align run, and return what `tell_times` says of them and of what is left.

    `done` is the number of finished alternations, None before linear probing is done. Weights that
    are not here (`has_weights`) get random numbers first.
    """
    if not has_weights:
        set_random_weights(experiment.networks)
    cfg, device = experiment.cfg, experiment.device
    images = len(experiment.task.train.targets)
    largest_batch = max(cfg.p_batch, min(cfg.d_batch, images))
    arch = experiment.networks.arch
    share = share_of_work(arch, largest_batch, device)
    head = count_numbers(experiment.networks.head)
    p_share = share_of_work(arch, cfg.p_batch, device, head)
    seconds = time_align(experiment, share, p_share)
    how = tell_share(cfg.p_batch, p_share) or tell_share(largest_batch, share)
    left = seconds_of_align(cfg, seconds, images, done)
    found = tell_times(seconds, left, tell_random(has_weights) + how, cfg.backbone, device)
    if device.type == "cuda" and cfg.mfac_device == "same":
        # The timed steps stored one gradient, in float32; a run stores one for each lower step.
        more = (cfg.lower_steps - 1) * 4 * experiment.new_theta(cfg.seed).numel()
        found["memory"] = tell_memory(device, more)
    return found


def estimate_finetune(experiment: Tuning, trials: int, tests: int, has_weights: bool) -> Record:
    """Time steps of fine-tuning, and return what `tell_times` says of them and of what is left.

    `trials` and `tests` are the numbers of those that are left; `has_weights` as in
    `estimate_align`.
    """
    if not has_weights:
        set_random_weights(experiment.networks)
    cfg, device, task = experiment.cfg, experiment.device, experiment.task
    batch = min(cfg.batch, len(task.train.targets))
    arch = experiment.networks.arch
    seconds, how = reckon(partial(time_finetune, experiment), arch, batch, device)
    left = seconds_of_finetune(cfg, seconds, task.sizes(), trials, tests)
    return tell_times(seconds, left, tell_random(has_weights) + how, cfg.backbone, device)


def reckon(
    time_steps: Callable[[float], Seconds],
    arch: Arch,
    batch: int,
    device: torch.device,
    head: int = 0,
) -> tuple[Seconds, str]:
    """Return the seconds of whole steps, and a text: how they were reckoned, "" if just timed.

    `time_steps` is called with a share of each batch; it times steps with so many images, and
    returns what whole ones take. The others as in `share_of_work`.
    """
    share = share_of_work(arch, batch, device, head)
    return time_steps(share), tell_share(batch, share)


def share_of_work(arch: Arch, batch: int, device: torch.device, head: int = 0) -> float:
    """Return with which share of a batch steps are timed: on a CPU with what makes MOST_WORK.

    A whole step of a large network would take minutes there, and may need more memory than there
    is. With fewer images, most of the time would be what a step takes with any number of images,
    and it would be multiplied, too.

    Args:
        arch: the sizes of the network.
        batch: images in a step.
        device: where the network is.
        head: how many numbers the weights of a head are that sees each patch, such as MAE's
            decoder, which may be larger than the network.
    """
    if device.type != "cpu":
        return 1.0
    patches = (arch.image_size // arch.patch_size) ** 2
    return min(1.0, MOST_WORK / ((count_numbers_of_vit(arch) + head) * patches * batch))


def tell_share(batch: int, share: float) -> str:
    """Return the clause that steps had a share of their images; "" if they had all.

    >>> tell_share(256, 1 / 32), tell_share(256, 1.0)
    (', reckoned from steps with 8 of 256 images', '')
    """
    images = images_of_share(batch, share)
    return f", reckoned from steps with {images} of {batch} images" if images < batch else ""


def images_of_share(batch: int, share: float) -> int:
    """Return how many images a share of a batch has, two at least, unless the batch has fewer.

    >>> images_of_share(256, 1 / 32), images_of_share(64, 1 / 32)
    (8, 2)
    >>> images_of_share(64, 1 / 64), images_of_share(1, 1.0)
    (2, 1)
    """
    return min(batch, max(2, round(batch * share)))


def for_a_while(steps: Iterable[T], clock: Clock = time.perf_counter) -> Iterator[T]:
    """Yield steps: a first one, which warms up, then MOST_STEPS more.

    It ends earlier as soon as the steps after the first one took LONG_ENOUGH together.
    """
    began = 0.0
    for number, step in enumerate(steps):
        yield step
        if number == 0:
            began = clock()
        elif number == MOST_STEPS or clock() - began >= LONG_ENOUGH:
            return


def median_seconds(steps: Iterable[object], clock: Clock = time.perf_counter) -> float:
    """Return the median of the seconds that steps take; the first, which warms up, is left out."""
    ends = [clock() for _ in for_a_while(steps, clock)]
    return median(end - end_before for end_before, end in pairwise(ends))


def time_pretraining(
    cfg: PretrainConfig, pool: Pool, device: torch.device, share: float
) -> Seconds:
    """Return the seconds of a whole step of pretraining, timed with this share of its images."""
    images = images_of_share(cfg.batch, share)
    steps = MOST_STEPS + 1  # the first one warms up
    short = cfg.model_copy(update={"batch": images, "epochs": steps, "base_lr": RATE})
    prepared = pretrain.prepare(short, epoch_steps=1, device=device)
    records = pretrain.train(
        short,
        prepared.pretext_task,
        pool,
        prepared.opt,
        steps_left=range(steps),
        record_steps=1,
        device=device,
    )
    return {"training step": median_seconds(records) * cfg.batch / images}


def time_align(experiment: Alignment, share: float, p_share: float) -> Seconds:
    """Return the seconds of all that align does: of each kind of step, line 10 and a validation.

    Lower steps are taken with the share `p_share` of their batch, all else with `share` of its; the
    seconds are those of whole steps.
    """
    cfg = experiment.cfg
    steps = MOST_STEPS + 1  # the first one warms up
    d_batch = min(cfg.d_batch, len(experiment.task.train.targets))
    d_images = images_of_share(d_batch, share)
    p_images = images_of_share(cfg.p_batch, p_share)
    changes = {
        "alternations": steps, "lower_steps": 1, "upper_steps": min(1, cfg.upper_steps),
        "probe_epochs": steps, "p_batch": p_images, "d_batch": d_images,
        "p_lr": RATE, "phi_p_lr": RATE, "d_lr": RATE,
    }  # fmt: skip
    # With so few training images, an epoch of linear probing is one step.
    short = replace(
        experiment,
        cfg=cfg.model_copy(update=changes),
        task=experiment.task._replace(train=first_of(experiment.task.train, d_images)),
    )
    lower, curvature, upper = time_alternations(short)
    probing = median_seconds(probe(short, prepare(short)))
    return {
        "lower step": lower * cfg.p_batch / p_images,
        "curvature": curvature,
        "upper step": upper * d_batch / d_images,
        "probing step": probing * d_batch / d_images,
        **time_validation(experiment, share),
    }


def time_alternations(
    experiment: Alignment, clock: Clock = time.perf_counter
) -> tuple[float, float, float]:
    """Return the seconds of a lower step, of line 10 and of an upper step, 0 if there is none.

    Each is the median over alternations; the first one, which warms up, is left out. The settings
    of `experiment` have one lower step an alternation, and at most one upper step.
    """
    cfg = experiment.cfg
    prepared = prepare(experiment)
    pretext, downstream = batches_left(experiment, prepared)
    marks: list[float] = []  # when the parts of the present alternation began, and when it ended

    def note_and_do_line_10(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
        """Note the time, then do line 10 with the run's own hypergradient."""
        marks.append(clock())
        return prepared.hypergrad(G, lam, H)

    logs = algorithm_1(
        prepared.state,
        steps=cfg,
        task=prepared.pretext_task,
        loss_D=prepared.head.loss,
        hypergrad=note_and_do_line_10,
        pretext=noted(pretext, marks, clock),
        downstream=noted(downstream, marks, clock),
        passes=experiment.passes,
        store="cpu" if cfg.mfac_device == "cpu" else None,
        train_D=partial(prepared.head.loss, regularise=True),
    )
    rows: list[list[float]] = []  # of each alternation the seconds of its parts
    # A log has numbers that were read from the device, so when it comes, the device has done all.
    for _ in for_a_while(logs, clock):
        marks.append(clock())
        rows.append([after - before for before, after in pairwise(marks)])
        marks.clear()
    medians = [median(column) for column in zip(*rows[1:], strict=True)]
    if not cfg.upper_steps:
        medians.append(0.0)
    lower, curvature, upper = medians
    return lower, curvature, upper


def noted(batches: Iterator[T], marks: list[float], clock: Clock) -> Iterator[T]:
    """Yield the batches; when one is asked for, the time is appended to `marks` first."""
    while True:
        marks.append(clock())
        yield next(batches)


def time_finetune(experiment: Tuning, share: float) -> Seconds:
    """Return the seconds of a step of fine-tuning and of a validation, as `time_align` does."""
    cfg = experiment.cfg
    batch = min(cfg.batch, len(experiment.task.train.targets))
    images = images_of_share(batch, share)
    short = replace(
        experiment,
        cfg=cfg.model_copy(update={"lr": (RATE,)}),
        task=experiment.task._replace(train=first_of(experiment.task.train, images)),
    )
    theta = short.new_theta(cfg.seed).requires_grad_()
    head = short.new_head("peft head", cfg.seed)
    opt = make_optimiser(short.cfg, [theta, *head.phi.values()], epoch_steps=1)
    steps = range(MOST_STEPS + 1)  # the first one warms up
    examples = short.examples("peft", cfg.seed, images, steps, cfg.drop_path, by_epoch=True)
    loss = partial(head.loss, theta, head.phi, regularise=True)
    records = train_epochs(
        loss, opt, examples, steps_per_record=1, label="dry run", passes=short.passes
    )
    step = median_seconds(records) * batch / images
    return {"training step": step, **time_validation(experiment, share)}


def first_of(split: Split, images: int) -> Split:
    """Return the first images of a split."""
    return Split(split.images[:images], split.targets[:images])


def time_validation(
    experiment: Experiment[Any], share: float, clock: Clock = time.perf_counter
) -> Seconds:
    """Return the seconds of a "validation", and of "decoding" its images, which is done once.

    Images that are too many to be kept are decoded in each validation: then its seconds have those
    of decoding, too, and "decoding" is 0.
    """
    val = experiment.task.val
    images = len(val.targets)
    few = first_of(val, images_of_share(min(VAL_BATCH, images), share))
    theta, head = experiment.new_theta(0), experiment.new_head("dry run", 0)
    times = [clock()]
    for _ in range(2):  # the second time, the images are decoded already
        experiment.score(few, theta, head.with_stats)
        times.append(clock())
    with_decoding, validation = (
        (after - before) * images / len(few.targets) for before, after in pairwise(times)
    )
    decoding = max(0.0, with_decoding - validation)
    decoded_size = 3 * images * experiment.transform.size**2  # bytes
    if decoded_size > data.MOST_KEPT:
        return {"validation": validation + decoding, "decoding": 0.0}
    return {"validation": validation, "decoding": decoding}


def as_text(found: Record) -> str:
    """Return a plan as lines for people.

    >>> print(as_text({"device": "cpu", "pool": ["2 images", "left out: 1 .txt"]}))
    device  cpu
    pool    2 images; left out: 1 .txt
    """
    width = max(map(len, found))
    lines = []
    for name, value in found.items():
        if isinstance(value, int):  # the size of a split, which the line of the images has, too
            continue
        text = value
        if isinstance(value, dict):
            text = ", ".join(f"{key} {content}" for key, content in value.items()) or "nothing"
        elif isinstance(value, list):
            text = "; ".join(value)
        lines.append(f"{name:<{width}}  {text}")
    return "\n".join(lines)
