"""Program: what fine-tuning starts from: the adapters that --from names, and whether they fit."""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from config import FinetuneConfig, Record, find_runs
from data import Task
from support.adapters import (
    count_known_images,
    find_adapters,
    hash_contents,
    load_adapter,
    name_images,
    name_training_images,
)
from support.errors import UsageError, as_usage_error
from support.experiment import Experiment
from support.files import read_json, sha256
from support.results import AdapterInfo

LOG = logging.getLogger("bisslight")


class Start(NamedTuple):
    """What a seed starts from."""

    file: Path | None = None  # an adapter; None: a fresh θ
    sha256: str | None = None  # of that file
    info: AdapterInfo = AdapterInfo()  # what it says of itself


def read_starts(cfg: FinetuneConfig) -> list[Start]:
    """Find and read what each seed starts from. Raises UsageError where they are no seeds.

    --from names a file, a finished run, or a folder of finished runs. If there are several
    adapters in it, each seed has one of its own: align runs, or the seeds of a finetune run.
    """
    if cfg.start is None:
        return [Start()] * cfg.seeds
    files = [file for run in find_runs(cfg.start) for file in find_adapters(run)]
    if len(files) == 1:
        starts = [read_start(files[0])] * cfg.seeds
    elif len(files) < cfg.seeds:
        raise UsageError(
            f"--from {cfg.start}: has {len(files)} adapters, --seeds is {cfg.seeds};"
            f" give --seeds {len(files)}, or a single adapter for all"
        )
    else:
        starts = [read_start(file) for file in files[: cfg.seeds]]
    check_seeds(starts, cfg)
    check_alike(starts)
    check_settings(starts[0], cfg)
    return starts


def read_start(file: Path) -> Start:
    """Read what an adapter file says. Raises UsageError."""
    return Start(file, sha256(file), load_adapter(file).info)


def check_seeds(starts: Sequence[Start], cfg: FinetuneConfig) -> None:
    """Refuse (UsageError) seeds that would count twice.

    An earlier fine-tuning of one of this run's seeds had the same head and batches. Two adapters of
    one align seed are one align run, made twice.
    """
    own_seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    by_seed: dict[int, Start] = {}  # of align runs
    for start in starts:
        seed = start.info.seed
        if start.info.stage == "finetune":
            for before in (seed, *start.info.earlier_seeds):
                if before in own_seeds:
                    how = "is" if before == seed else "comes from a run"
                    raise UsageError(
                        f"--from {start.file}: {how} of seed {before}, which this run has, too;"
                        " give another --seed"
                    )
        if start.info.stage == "align" and seed is not None:
            first = by_seed.setdefault(seed, start)
            if first.sha256 != start.sha256:
                raise UsageError(
                    f"--from {start.file}: is of align seed {seed}, as {first.file};"
                    " remove one of them"
                )
    if len({start.sha256 for start in starts}) not in (1, len(starts)):
        raise UsageError(f"--from {cfg.start}: has an adapter twice, so no run a seed; remove one")


def check_alike(starts: Sequence[Start]) -> None:
    """Refuse (UsageError) adapters that differ in more than their seeds and places."""
    first = starts[0]
    for start in starts:
        if names := find_differences(start.info, first.info):
            raise UsageError(
                f"--from {start.file}: differs in more than the seed from {first.file}:"
                f" {', '.join(names)}; give runs that differ in the seed alone"
            )


def find_differences(info: AdapterInfo, first: AdapterInfo) -> list[str]:
    """The names of what two adapters say otherwise, but for seeds and places; [] if nothing.

    In older versions a fine-tuning said neither its settings nor its start: they are not compared.

    >>> tuned = AdapterInfo(stage="finetune", unlike_paper={"epochs": 8}, origin=AdapterInfo())
    >>> find_differences(tuned, tuned.model_copy(update={"unlike_paper": {}}))
    ['epochs']
    >>> aligned = tuned.model_copy(update={"origin": AdapterInfo(stage="align")})
    >>> find_differences(tuned, aligned)
    ['stage of its start']
    """
    if info.stage != first.stage:
        return ["stage"]  # the others follow from that
    here, there = dict(without_seed(info)), dict(without_seed(first))
    own = (here.pop("unlike_paper"), there.pop("unlike_paper"))
    starts = (here.pop("origin"), there.pop("origin"))
    names = keys_that_differ(here, there)
    if info.stage == "finetune" and None in starts:
        return names
    names += keys_that_differ(*own)
    if starts[0] and starts[1]:
        names += [f"{name} of its start" for name in find_differences(starts[0], starts[1])]
    return names


def keys_that_differ(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """The keys whose values are not the same in both, or that only one has."""
    return sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))


def without_seed(info: AdapterInfo) -> AdapterInfo:
    """What an adapter says, without what may differ between the align runs of one arm.

    Of images that are known by their digest, the place may differ: each computer has its own copy.
    """
    unlike_paper = dict(info.unlike_paper)
    if info.pool_sha256:
        unlike_paper.pop("pool", None)
    changes: Record = {"versions": None, "seen": None, "seen_images": None}
    changes["unlike_paper"] = unlike_paper
    if info.data_sha256:
        changes["dataset"] = None
    return info.without_seeds().model_copy(update=changes)


def check_settings(start: Start, cfg: FinetuneConfig) -> None:
    """Refuse (UsageError) an adapter of another network or rank. What it does not say fits."""
    ours: Record = {"backbone": cfg.backbone, "rank": cfg.rank, "alpha": cfg.scale * cfg.rank}
    if cfg.pretext == "ijepa":
        ours["base"] = cfg.base
    for name, value in ours.items():
        theirs = getattr(start.info, name)
        if theirs not in (None, value):
            raise UsageError(
                f"--from {start.file}: has {name} {theirs}, this run {value};"
                " give the settings of that run, or align again"
            )


def check_starts(starts: Sequence[Start], experiment: Experiment[FinetuneConfig]) -> None:
    """Refuse (UsageError) adapters of other weights, and those that have seen the test images."""
    backbone = experiment.backbone
    p = 4 * experiment.cfg.rank * backbone.dim  # of each layer: A and B of q and v
    files = {start.file for start in starts if start.file}  # one for all seeds, or one for each
    doubts: list[str] = []
    for file in sorted(files):
        theta, _, info = load_adapter(file)
        with as_usage_error(f"--from {file}"):  # it turns ValueErrors into a UsageError
            if theta.shape != (backbone.depth, p):
                raise ValueError(
                    f"has a θ of {tuple(theta.shape)}, this network needs {(backbone.depth, p)};"
                    " give the --backbone and --rank of its run"
                )
            if info.weights_sha256 not in (None, experiment.digests["weights_sha256"]):
                raise ValueError(
                    "was trained on other --weights than this run's; give those, or align again"
                )
            doubts += check_unseen(info, experiment)
            doubts += doubt_normalisation(info, experiment.task)
    for doubt in dict.fromkeys(doubts):  # each once, however many adapters there are
        LOG.warning("--from: %s", doubt)


def check_unseen(info: AdapterInfo, experiment: Experiment[FinetuneConfig]) -> list[str]:
    """Refuse (ValueError) an adapter that was trained on test images of this run.

    Returns sentences on what cannot be known. With the very images and splits of the adapter's run,
    that run has already asked this.
    """
    cfg = experiment.cfg
    if info.data_sha256 == experiment.digests["data_sha256"]:
        return []
    if info.seen is not None:
        task = experiment.task
        seen, by_content, doubts = find_seen(task, info.seen)
        unnamed = ("folder:", "own")  # benchmarks of two names have no image in common
        is_known = not (cfg.dataset.startswith(unnamed) or str(info.dataset).startswith(unnamed))
        if seen:
            names = " and ".join(seen[:2])
            what = f"{len(seen)} of the {len(task.test.targets)} test images"
            how = f"was trained on {what}, by content or by class and name"
            if not by_content:
                how = f"was trained on images with the class and name of {what}"
            raise ValueError(
                f"{how}, such as {names}; take its data seed,"
                f" --data-seed {info.data_seed}, and the images of {info.dataset} as they were, or"
                " align again. If they are other pictures, rename their files; a picture that both"
                " data sets have, such as a placeholder, has to be removed here"
            )
        if not is_known:
            doubts += doubt_what_is_unknown(task, info)
        return doubts
    if info.dataset == cfg.dataset and info.data_seed not in (None, cfg.data_seed):
        raise ValueError(
            f"was trained on {info.dataset}, split otherwise, so it may have seen the test images;"
            f" see its --data-seed {info.data_seed}, or align again"
        )
    return [
        "is of an older version, which kept no names of images: it is not known whether θ was"
        " trained on these test images"
    ]


def doubt_normalisation(info: AdapterInfo, task: Task) -> list[str]:
    """A sentence where θ was trained on images normalised otherwise than those here; else none."""
    if info.channels is None:
        return []
    theirs = [tuple(values) for values in info.channels]
    ours = [tuple(task.mean), tuple(task.std)]
    if theirs == ours:
        return []
    mean, std, own_mean, own_std = (
        " ".join(f"{x:.3f}" for x in values) for values in (*theirs, *ours)
    )
    return [
        f"was trained on images normalised with mean {mean}, std {std}; those here are with mean"
        f" {own_mean}, std {own_std}, which may cost accuracy. A script can hand over a task with"
        " others"
    ]


def doubt_what_is_unknown(task: Task, info: AdapterInfo) -> list[str]:
    """A sentence where images that θ was trained on are not known again here; else none."""
    known = count_known_images(task, info.seen or ())
    if known == 0:
        return [
            "no image here has the name or content of one that θ was trained on"
            f" ({info.dataset}). If they are the same ones, renamed and changed, it is not"
            " known whether θ has seen the test images"
        ]
    if info.seen_images is not None and known < info.seen_images:  # older adapters lack the number
        return [
            f"{known} of the {info.seen_images} images that θ was trained on ({info.dataset}) are"
            " found here, by content or by class and name. If others are here, too, renamed and"
            " changed, it is not known whether θ has seen the test images"
        ]
    return []


class Seen(NamedTuple):
    """The test images that θ was trained on."""

    images: list[str]  # their files, or numbers
    by_content: int  # how many of them are known by their content, not by class and name alone
    doubts: list[str]  # sentences on what cannot be known


def find_seen(task: Task, seen: Collection[str]) -> Seen:
    """The test images that are among those that were seen.

    Where each part begins to count anew, a training image of this run has the name of a test image.
    Such a name says nothing, and is left out; a sentence tells of it.
    """
    keys = name_images(task.test, task.classes)
    contents = hash_contents(task.test) or [""] * len(keys)
    # What lies in memory is known by its pixels, not by names.
    in_memory = isinstance(task.test.images, Tensor)
    ambiguous = frozenset() if in_memory else name_training_images(task)
    known = [content in seen for content in contents]
    unclear = sum(
        key in seen and key in ambiguous and not is_known
        for key, is_known in zip(keys, known, strict=True)
    )
    doubts = []
    if unclear:
        doubts.append(
            f"{unclear} test images have the name of a training image, too, such as train/cat/1.jpg"
            " and test/cat/1.jpg. θ has not seen their content; if they were converted since, it"
            " is not known"
        )
    files = task.test.images
    found = [
        str(files[i]) if isinstance(files, list) else f"number {i}"
        for i, (key, is_known) in enumerate(zip(keys, known, strict=True))
        if is_known or (key in seen and key not in ambiguous)
    ]
    return Seen(found, by_content=len(found) if in_memory else sum(known), doubts=doubts)


def seconds_until(file: Path | None) -> float | None:
    """CPU seconds of the run that an adapter lies in, and of those before it; None: unknown.

    Of a finetune run it is the part of one seed, with the rates that were tried.
    """
    if file is None:
        return 0.0
    place = file.parent / "result.json"
    whole = file.parent.parent / "result.json"  # of a finetune run, if it is a trial of it
    if whole.exists() and "trials" in read_json(whole):
        place = whole
    if not place.exists():
        return None
    result = read_json(place)
    own = result.get("cpu_seconds")
    before = result.get("start_cpu_seconds", 0.0)  # align has no run before it
    if own is None or before is None:
        return None
    seeds = len(result.get("trials", [0]))
    return float(own + before) / seeds
