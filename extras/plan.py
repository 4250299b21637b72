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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

import data
from align import Alignment, batches_left, prepare, probe
from bisslight import Map, algorithm_1
from config import AlignConfig, AnyConfig, Arch, FinetuneConfig, PretrainConfig, Record
from data import Pool, Split, Task, describe, fingerprint
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
    load_backbone,
)
from support.experiment import (
    Experiment,
    check_batches,
    look_at,
    open_experiment,
    open_sources,
    set_up_device,
)
from support.files import read_json
from support.optim import train_epochs
from support.results import TrialResult
from support.runs import LOG, REMEDY, Run, check_directory, define
from support.starts import Start, check_starts, read_starts

T = TypeVar("T")
Clock = Callable[[], float]  # seconds
Seconds = dict[str, float]  # by the name of what takes them
VAL_BATCH = 256  # images
MOST_STEPS = 20  # how many are timed, after a first one that warms up;
LONG_ENOUGH = 3.0  # fewer if they take so many seconds together
LONG_STEP = 5.0  # seconds; on a CPU, a longer step is reckoned from one with a few images
MOST_NUMBERS = 100e6  # of a backbone that is tried out on a CPU with random weights
A_DAY = 24 * 3600.0  # seconds
RATE = 1e-9  # of the steps that are timed: with it nothing diverges
NOTHING_LEFT = "nothing is left to do: it is finished"


def plan(cfg: AnyConfig, out: Path) -> Record:
    """Return what a run of these settings into `out` will be, by name, for people and for JSON.

    Raises UsageError for all that the run would refuse: data or weights that are missing, images
    that cannot be read, adapters that do not fit, a directory of another run.
    """
    task, pool, weights = open_sources(cfg)
    found: Record = {"out": str(out), "device": ""}
    found |= describe_sources(task, pool)
    if isinstance(cfg, PretrainConfig):
        assert pool is not None  # pretraining has one
        found |= plan_pretrain(cfg, out, pool)
    else:
        if weights is None:
            check_timm(cfg.backbone)
            weights = find_timm(cfg.backbone)
        is_here = weights is not None and weights.exists()
        if isinstance(cfg, AlignConfig):
            found |= plan_align(cfg, out, weights, is_here)
        else:
            found |= plan_finetune(cfg, out, weights, is_here)
    return found | {"unlike the paper": cfg.unlike_paper()}


def plan_pretrain(cfg: PretrainConfig, out: Path, pool: Pool) -> Record:
    """Return what is particular to a `pretrain` run."""
    device = set_up_device(cfg)
    found = {"device": str(device)} | describe_network(cfg.arch(), cfg.pretext)
    look_at(pool.images)
    check_directory(out, define("pretrain", cfg, {"pool_sha256": fingerprint(pool)}), cfg)
    epoch_steps = pretrain.steps_of_epoch(cfg, pool)
    found["length"] = f"{cfg.epochs} epochs of {count(epoch_steps, 'step')}"
    saved = read_checkpoint(cfg, out)
    if saved is None:
        return found | {"about": NOTHING_LEFT}
    done = saved["optimisers"]["opt"]["step"] if saved else 0
    if done:
        found["length"] += f"; {done} steps are done"
    if device.type == "cpu" and count_numbers(cfg.arch()) > MOST_NUMBERS:
        return found | {"about": not_tried("this network")}
    time_steps = partial(time_pretraining, cfg, pool, device)
    seconds, how = reckon(time_steps, cfg.batch, device, few=8)
    left = cfg.epochs * epoch_steps - done
    return found | tell_times(seconds, left * seconds["training step"], how, cfg.backbone, device)


def plan_align(cfg: AlignConfig, out: Path, weights: Path | None, is_here: bool) -> Record:
    """Return what is particular to an `align` run; `is_here`: whether its weights are."""
    experiment = open_experiment(cfg, load=loader(is_here))
    prepare(experiment)  # it refuses settings that do not fit
    digests = experiment.digests
    if not is_here:
        digests = digests | {"weights_sha256": recorded(out).get("weights_sha256")}
    check_directory(out, define("align", cfg, digests), cfg)
    found = {"device": str(experiment.device)}
    found |= describe_weights(cfg, weights, experiment.networks)
    found |= describe_network(experiment.networks.arch, cfg.pretext)
    found["length"] = (
        f"{cfg.probe_epochs} epochs of linear probing, {cfg.alternations} alternations of "
        f"{cfg.lower_steps} lower and {cfg.upper_steps} upper steps"
    )
    saved = read_checkpoint(cfg, out)
    if saved is None:
        return found | {"about": NOTHING_LEFT}
    done = None  # alternations; None: linear probing is not done
    if saved and saved["records"]:
        done = saved["records"][-1]["step"]
        found["length"] += f"; {done} alternations are done"
    if not may_be_tried(experiment, is_here):
        return found | {"about": not_tried("random weights")}
    images = len(experiment.task.train.targets)
    smallest = min(cfg.p_batch, cfg.d_batch, images)
    seconds, how = reckon(partial(time_align, experiment), smallest, experiment.device)
    whole = seconds_of_align(cfg, seconds, images, done)
    found |= tell_times(seconds, whole, tell_random(is_here) + how, cfg.backbone, experiment.device)
    if experiment.device.type == "cuda" and cfg.mfac_device == "same":
        # One gradient was stored, in float32; a run stores one for each lower step.
        more = (cfg.lower_steps - 1) * 4 * experiment.new_theta(cfg.seed).numel()
        found["memory"] = tell_memory(experiment.device, more)
    return found


def plan_finetune(cfg: FinetuneConfig, out: Path, weights: Path | None, is_here: bool) -> Record:
    """Return what is particular to a `finetune` run; `is_here`: whether its weights are."""
    starts = read_starts(cfg)
    experiment = open_experiment(cfg, load=loader(is_here))
    if not is_here:
        experiment = with_known_weights(experiment, starts[0], out)
    check_batches(experiment, "--batch", cfg.batch)
    check_starts(starts, experiment)
    check_directory(out, define_finetune(experiment, starts[0]), cfg)
    cfg = with_earlier(out, cfg)  # a run goes on with all rates and seeds that are there
    read_starts(cfg)  # refuses too few adapters for all seeds
    found = {"device": str(experiment.device)}
    found |= describe_weights(cfg, weights, experiment.networks)
    found |= describe_network(experiment.networks.arch, cfg.pretext)
    task = experiment.task
    images = len(task.train.targets)
    trials, tests = what_is_left(cfg, out)
    found["length"] = describe_length(cfg, images)
    if trials + tests == 0 and (out / "result.json").exists():
        return found | {"about": NOTHING_LEFT}
    if trials < count_trials(cfg):
        found["length"] += f"; {trials} of them {'is' if trials == 1 else 'are'} left"
    if not may_be_tried(experiment, is_here):
        return found | {"about": not_tried("random weights")}
    time_steps = partial(time_finetune, experiment)
    seconds, how = reckon(time_steps, min(cfg.batch, images), experiment.device)
    whole = seconds_of_finetune(cfg, seconds, task.sizes(), trials, tests)
    how = tell_random(is_here) + how
    return found | tell_times(seconds, whole, how, cfg.backbone, experiment.device)


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
    if weights and weights.exists():
        whose = "timm's own, " if cfg.backbone.startswith(TIMM) and not cfg.weights else ""
        size = weights.stat().st_size / 1e6
        return {"weights": f"{whose}{weights}, here, {size:.0f} MB"}
    if cfg.backbone.startswith(TIMM):
        size = 4 * numbers_of(networks) / 1e6  # of float32
        told = f"timm's own, not in HF_HOME, to be fetched, about {size:.0f} MB"
        return {"weights": f"{told}; without internet here, fetch them on another machine"}
    key = (cfg.backbone, cfg.pretext)
    return {"weights": f"{OFFICIAL_FILES[key]}, to be fetched, {SIZES[key]} MB"}


def describe_network(arch: Arch, pretext: str) -> Record:
    """Return the network's sizes. Raises UsageError where its parts do not fit each other."""
    with torch.device("meta"):  # shapes alone, no numbers
        build_head(arch, pretext)
    millions = count_numbers(arch) / 1e6
    return {
        "network": f"{arch.depth} layers, width {arch.dim}, {millions:.1f} million numbers",
        "images": f"{arch.image_size} x {arch.image_size} pixels, patches of {arch.patch_size}",
    }


def count_numbers(arch: Arch) -> int:
    """Return how many numbers the weights of a backbone are."""
    with torch.device("meta"):  # shapes alone, no numbers
        return sum(parameter.numel() for parameter in build_vit(arch).parameters())


def numbers_of(networks: Pretrained) -> int:
    """Return how many numbers the weights of this backbone are."""
    return sum(parameter.numel() for parameter in networks.backbone.parameters())


def describe_length(cfg: FinetuneConfig, images: int) -> str:
    """Return trials, epochs and steps of fine-tuning with so many labelled training images."""
    trials = count_trials(cfg)
    steps = math.ceil(images / cfg.batch)
    length = f"{count(trials, 'trial')} of {cfg.epochs} epochs of {count(steps, 'step')}"
    return f"{length}: {describe_trials(cfg)}"


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


def count(number: int, thing: str) -> str:
    """Return a number of things.

    >>> count(1, "seed"), count(2, "seed")
    ('1 seed', '2 seeds')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"


def tell_times(
    seconds: Seconds, whole: float, how: str, backbone: str, device: torch.device
) -> Record:
    """Return the seconds of steps and of a validation, and about how long all takes.

    `how` is what follows it, on how it is known.
    """
    found = {
        name: f"{number:.3g} s"
        for name, number in seconds.items()
        if name.endswith("step") or name == "validation"
    }
    found["about"] = f"{in_hours(whole)}{how}"
    if device.type == "cuda":
        found["memory"] = tell_memory(device)
    if device.type == "cpu":
        found["about"] += ", if this machine stays as busy as it is now"
        if whole > A_DAY and backbone != "vit_mini":
            found["about"] += "; it is for a GPU, and --backbone vit_mini is for a CPU"
    return found


def tell_random(is_here: bool) -> str:
    """Return what a time says of the weights that it was taken with."""
    return "" if is_here else ", timed with random weights, since the real ones are not here"


def tell_memory(device: torch.device, more: int = 0) -> str:
    """Return the most memory of the GPU that was needed, and so many bytes more."""
    return f"{(torch.cuda.max_memory_allocated(device) + more) / 1e9:.1f} GB"


def not_tried(thing: str) -> str:
    """Return why there is no time: `thing` is too large for a CPU."""
    return (
        f"not known: {thing} would be too large to be tried on this CPU; it is for a GPU, and "
        "--backbone vit_mini is for a CPU"
    )


def in_hours(seconds: float) -> str:
    """Return a time for people.

    >>> in_hours(42), in_hours(600), in_hours(90_000), in_hours(864_000)
    ('42 seconds', '10 minutes', '25.0 hours', '10 days')
    """
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 2 * A_DAY:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / A_DAY:.0f} days"


# --- what is there --------------------------------------------------------------------------------


def recorded(out: Path) -> Record:
    """Return what config.json of a directory says; {} where there is none."""
    file = out / "config.json"
    return read_json(file, REMEDY) if file.exists() else {}


def read_checkpoint(cfg: AlignConfig | PretrainConfig, out: Path) -> Record | None:
    """Return the checkpoint of a run, {} if there is none, None if the run is finished."""
    if (out / "result.json").exists():
        return None
    run = Run(out, cfg, recorded(out))
    run.load()
    return run.saved


def count_trials(cfg: FinetuneConfig) -> int:
    """Return how many trials there are: all rates with the first seeds, the best one with all.

    >>> count_trials(FinetuneConfig(backbone="vit_b16", dataset="dtd", lr="1e-3,1e-2", seeds=8))
    9
    """
    if len(cfg.lr) == 1:
        return cfg.seeds
    return len(cfg.lr) * cfg.grid_seeds + cfg.seeds - cfg.grid_seeds


def what_is_left(cfg: FinetuneConfig, out: Path) -> tuple[int, int]:
    """Return how many trials, and how many tests of trials, `out` lacks.

    While it is not known which rate is the best, it may be the one that lacks the most.
    """
    seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    first = seeds[: cfg.grid_seeds] if len(cfg.lr) > 1 else seeds[:0]

    def file(rate: float, seed: int, name: str = "result.json") -> Path:
        """A file of a trial."""
        return out / f"lr{rate}-s{seed}" / name

    grid = [file(rate, seed) for rate in cfg.lr for seed in first]
    missing = sum(not result.exists() for result in grid)
    rates = list(cfg.lr)
    if grid and not missing:
        tried = [TrialResult.model_validate(read_json(result, REMEDY)) for result in grid]
        rates = [choose_rate(tried)]
    later = seeds[len(first) :]
    trials = max(sum(not file(rate, seed).exists() for seed in later) for rate in rates)
    tests = max(sum(not file(rate, seed, "test.json").exists() for seed in seeds) for rate in rates)
    return missing + trials, tests


def with_known_weights(experiment: Tuning, start: Start, out: Path) -> Tuning:
    """Return an experiment whose weights are not here, with the digest that they should have.

    It is that of the adapter to start from, or of the run that is in `out`.
    """
    digest = start.info.weights_sha256 or recorded(out).get("weights_sha256")
    return replace(experiment, digests=experiment.digests | {"weights_sha256": digest})


# --- the whole, by arithmetic ---------------------------------------------------------------------


def seconds_of_align(cfg: AlignConfig, seconds: Seconds, images: int, done: int | None) -> float:
    """Return what is left of an align run takes.

    Args:
        cfg: the settings.
        seconds: of each step, of a validation, and of decoding its images for the first time.
        images: how many labelled training images there are.
        done: how many alternations are done; None: linear probing is not done.
    """
    whole = seconds["decoding"]
    if done is None:
        done = 0
        # An epoch's last batch has what is left, so it counts as a part of a step.
        steps = images / min(cfg.d_batch, images)
        whole += cfg.probe_epochs * steps * seconds["probing step"] + seconds["validation"]
    alternation = (
        cfg.lower_steps * seconds["lower step"]
        + seconds["curvature"]
        + cfg.upper_steps * seconds["upper step"]
    )
    # After each --eval-every alternations and the last one, both adapters are validated.
    validations = math.ceil(cfg.alternations / cfg.eval_every) - done // cfg.eval_every
    return whole + (cfg.alternations - done) * alternation + 2 * validations * seconds["validation"]


def seconds_of_finetune(
    cfg: FinetuneConfig, seconds: Seconds, sizes: dict[str, int], trials: int, tests: int
) -> float:
    """Return what so many trials take, and so many tests.

    Args:
        cfg: the settings.
        seconds: of a training step, of a validation, and of decoding its images at first.
        sizes: how many images are in "train", "val" and "test".
        trials: how many are left.
        tests: how many of them are to be tested.
    """
    # An epoch's last batch has what is left, so it counts as a part of a step.
    steps = sizes["train"] / min(cfg.batch, sizes["train"])
    test = seconds["validation"] * sizes["test"] / sizes["val"]
    scoring = seconds["validation"] + (test if cfg.test_curve else 0)
    validations = math.ceil(cfg.epochs / cfg.eval_epochs)
    trial = cfg.epochs * steps * seconds["training step"] + validations * scoring
    decoding = seconds["decoding"] * (1 + sizes["test"] / sizes["val"])
    return decoding + trials * trial + tests * test


# --- a few steps ----------------------------------------------------------------------------------


def loader(is_here: bool) -> Callable[[AlignConfig | FinetuneConfig, Path | None], Pretrained]:
    """Return what makes the networks: with their weights, or without if they are not here."""
    return load_backbone if is_here else lambda cfg, weights: empty_networks(cfg)


def may_be_tried(experiment: Experiment[Any], is_here: bool) -> bool:
    """Return whether steps can be taken; weights that are not here get random numbers first."""
    if is_here:
        return True
    networks = experiment.networks
    if experiment.device.type == "cpu" and numbers_of(networks) > MOST_NUMBERS:
        return False
    LOG.warning("timing steps with random weights, which may take some minutes")
    for network in (networks.backbone, networks.head):
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data.uniform_(-0.02, 0.02)
    return True


def reckon(
    time_steps: Callable[[float], Seconds], smallest: int, device: torch.device, few: int = 2
) -> tuple[Seconds, str]:
    """Return seconds of whole steps, and a clause on how they are known, which may be empty.

    On a CPU, where a step with few images says that a whole one would be long, it is multiplied.

    Args:
        time_steps: called with a share of each batch, it times steps with so many images, and
            returns what whole ones take.
        smallest: images in the smallest batch of a step.
        device: where the network is.
        few: images that are enough. Where all weights are trained, the optimiser's part of a step,
            which is the same for any number of images, would count too much with two.
    """
    if device.type == "cpu" and smallest > few:
        seconds = time_steps(few / smallest)
        if max(value for name, value in seconds.items() if name.endswith("step")) > LONG_STEP:
            return seconds, f", reckoned from steps with {few} of {smallest} images"
    return time_steps(1.0), ""


def part(batch: int, share: float) -> int:
    """Return how many images a share of a batch has, two at least, unless the batch has fewer.

    >>> part(256, 1 / 32), part(64, 1 / 32), part(64, 1 / 64), part(1, 1.0)
    (8, 2, 2, 1)
    """
    return min(batch, max(2, round(batch * share)))


def for_a_while(steps: Iterable[T], clock: Clock = time.perf_counter) -> Iterator[T]:
    """Yield steps: a first one, which warms up, then MOST_STEPS, or fewer if they take long."""
    began = 0.0
    for number, step in enumerate(steps):
        yield step
        if number == 0:
            began = clock()
        elif number == MOST_STEPS or clock() - began >= LONG_ENOUGH:
            return


def median_seconds(steps: Iterable[object], clock: Clock = time.perf_counter) -> float:
    """Return the median of the seconds that steps take, of which the first one warms up."""
    times = [clock() for _ in for_a_while(steps, clock)]
    return median(after - before for before, after in pairwise(times))


def time_pretraining(
    cfg: PretrainConfig, pool: Pool, device: torch.device, share: float
) -> Seconds:
    """Return the seconds of a whole step of pretraining, timed with this share of its images."""
    images = part(cfg.batch, share)
    steps = MOST_STEPS + 1
    short = cfg.model_copy(update={"batch": images, "epochs": steps, "base_lr": RATE})
    prepared = pretrain.prepare(short, 1, device)
    task, opt = prepared.pretext_task, prepared.opt
    records = pretrain.train(short, task, pool, opt, range(steps), 1, device)
    return {"training step": median_seconds(records) * cfg.batch / images}


def time_align(experiment: Alignment, share: float) -> Seconds:
    """Return the seconds of all that align does, timed with this share of each batch."""
    cfg = experiment.cfg
    steps = MOST_STEPS + 1
    whole = min(cfg.d_batch, len(experiment.task.train.targets))
    images = part(whole, share)
    of_pool = part(cfg.p_batch, share)
    changes = {
        "alternations": steps, "lower_steps": 1, "upper_steps": min(1, cfg.upper_steps),
        "probe_epochs": steps, "p_batch": of_pool, "d_batch": images,
        "p_lr": RATE, "phi_p_lr": RATE, "d_lr": RATE,
    }  # fmt: skip
    # With so few training images, an epoch of linear probing is one step.
    short = replace(
        experiment,
        cfg=cfg.model_copy(update=changes),
        task=experiment.task._replace(train=first_of(experiment.task.train, images)),
    )
    lower, curvature, upper = time_alternations(short)
    probing = median_seconds(probe(short, prepare(short)))
    return {
        "lower step": lower * cfg.p_batch / of_pool,
        "curvature": curvature,
        "upper step": upper * cfg.d_batch / images,
        "probing step": probing * whole / images,
        **time_validation(experiment, share),
    }


def time_alternations(
    experiment: Alignment, clock: Clock = time.perf_counter
) -> tuple[float, float, float]:
    """Return the seconds of a lower step, of line 10 and of an upper step, 0 where there is none.

    They are the medians of alternations, each of one step a level.
    """
    cfg = experiment.cfg
    prepared = prepare(experiment)
    pretext, downstream = batches_left(experiment, prepared)
    marks: list[float] = []  # of an alternation: when each part began, and its end

    def noting(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
        """The run's hypergradient, line 10; the time is noted first."""
        marks.append(clock())
        return prepared.hypergrad(G, lam, H)

    logs = algorithm_1(
        prepared.state,
        cfg,
        prepared.pretext_task,
        prepared.head.loss,
        noting,
        noted(pretext, marks, clock),
        noted(downstream, marks, clock),
        experiment.passes,
        "cpu" if cfg.mfac_device == "cpu" else None,
        partial(prepared.head.loss, regularise=True),
    )
    rows: list[list[float]] = []  # seconds of the parts of an alternation
    for _ in for_a_while(logs, clock):  # its numbers are read from the device: its work is done
        marks.append(clock())
        rows.append([after - before for before, after in pairwise(marks)])
        marks.clear()
    lower, curvature, *upper = [median(column) for column in zip(*rows[1:], strict=True)]
    return lower, curvature, *(upper or [0.0])


def noted(batches: Iterator[T], times: list[float], clock: Clock) -> Iterator[T]:
    """Yield the batches; when one is asked for, note the time first."""
    while True:
        times.append(clock())
        yield next(batches)


def time_finetune(experiment: Tuning, share: float) -> Seconds:
    """Return the seconds of all that fine-tuning does, timed with this share of a batch."""
    cfg = experiment.cfg
    whole = min(cfg.batch, len(experiment.task.train.targets))
    images = part(whole, share)
    short = replace(
        experiment,
        cfg=cfg.model_copy(update={"lr": (RATE,)}),
        task=experiment.task._replace(train=first_of(experiment.task.train, images)),
    )
    theta = short.new_theta(cfg.seed).requires_grad_()
    head = short.new_head("peft head", cfg.seed)
    opt = make_optimiser(short.cfg, [theta, *head.phi.values()], 1)
    steps = range(MOST_STEPS + 1)
    examples = short.examples("peft", cfg.seed, images, steps, cfg.drop_path, by_epoch=True)
    loss = partial(head.loss, theta, head.phi, regularise=True)
    records = train_epochs(loss, opt, examples, 1, "dry run", short.passes)
    step = median_seconds(records) * whole / images
    return {"training step": step, **time_validation(experiment, share)}


def first_of(split: Split, images: int) -> Split:
    """Return the first images of a split."""
    return Split(split.images[:images], split.targets[:images])


def time_validation(
    experiment: Experiment[Any], share: float, clock: Clock = time.perf_counter
) -> Seconds:
    """Return the seconds of a validation, and those that decoding its images takes at first.

    Images that are too many to be kept are decoded each time.
    """
    val = experiment.task.val
    images = len(val.targets)
    few = first_of(val, part(min(VAL_BATCH, images), share))
    theta, head = experiment.new_theta(0), experiment.new_head("dry run", 0)
    times = [clock()]
    for _ in range(2):  # of the second time, the images are decoded
        experiment.score(few, theta, head.with_stats)
        times.append(clock())
    with_decoding, validation = (
        (after - before) * images / len(few.targets) for before, after in pairwise(times)
    )
    decoding = max(0.0, with_decoding - validation)
    if 3 * images * experiment.transform.size**2 > data.MOST_KEPT:
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
        text = value
        if isinstance(value, dict):
            text = ", ".join(f"{key} {content}" for key, content in value.items()) or "nothing"
        elif isinstance(value, list):
            text = "; ".join(value)
        if not isinstance(value, int):  # sizes of splits, which the line of the images has, too
            lines.append(f"{name:<{width}}  {text}")
    return "\n".join(lines)
