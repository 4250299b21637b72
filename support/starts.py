"""Program: what fine-tuning starts from: the adapters that --from names, and whether they fit."""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from config import AlignConfig, FinetuneConfig, Record, find_runs
from data import MOST_CONTENTS, SPLITS, Split, Task
from support.adapters import (
    count_known_images,
    find_adapters,
    hash_contents,
    hashes_of,
    load_adapter,
    name_images,
)
from support.errors import RunError, UsageError, as_usage_error
from support.experiment import C, Experiment
from support.files import read_json, sha256
from support.results import AdapterInfo, are_of_same_images

LOG = logging.getLogger("bisslight")
# An older adapter does not say these, so they are compared where both adapters do.
NOT_SAID_BY_OLDER = {"imports_sha256", "pretext_class", "contents_sha256", "pool_contents_sha256"}
NOT_SAID_BY_OLDER |= {"network_sha256"}
NOT_READ = f"their content is not known, as of more than {MOST_CONTENTS:,} files none is read"
NOT_KEPT = (
    "is of an older version, which kept no names of images: it is not known whether θ was trained"
    " on these test images"
)


class Start(NamedTuple):
    """What a seed starts from."""

    file: Path | None = None  # an adapter; None: a fresh θ
    sha256: str | None = None  # of that file
    info: AdapterInfo = AdapterInfo()  # what the adapter says of itself; of a fresh θ, nothing


def read_starts(cfg: FinetuneConfig) -> list[Start]:
    """Find and read what each seed starts from; the list has one Start per seed.

    --from names a file, a finished run, or a folder of finished runs. If there is one adapter in
    it, all seeds start from that one. If there are several, each seed has its own: they are align
    runs, or the seeds of a finetune run. Of more adapters than --seeds, the first ones are taken,
    in the order of `find_start_files`. Raises UsageError where any of them differ in more than the
    seed, or do not fit the settings.
    """
    if cfg.start is None:
        return [Start()] * cfg.seeds
    files = find_start_files(cfg.start)
    if len(files) == 1:
        starts = [read_start(files[0])] * cfg.seeds
    elif len(files) < cfg.seeds:
        raise UsageError(
            f"--from {cfg.start}: has {len(files)} adapters, --seeds is {cfg.seeds};"
            f" give --seeds {len(files)}, or a single adapter for all"
        )
    else:
        starts = [read_start(file) for file in files]
    check_alike(starts)  # also those that this command does not take: more seeds would take them
    starts = starts[: cfg.seeds]
    check_seeds(starts, cfg)
    check_settings(starts[0], cfg)
    return starts


def find_start_files(place: Path) -> list[Path]:
    """Return the adapter files that --from names, in the order in which seeds take them.

    Runs are in the order of their names, s2 before s10; in a finetune run, in that of its seeds.
    """
    return [file for run in find_runs(place) for file in find_adapters(run)]


def tell_starts(starts: Sequence[Start], cfg: FinetuneConfig) -> None:
    """Warn where --from has more adapters than seeds, and say which are taken."""
    files = find_start_files(cfg.start) if cfg.start else []
    if len(files) > len(starts):
        taken = ", ".join(str(start.file) for start in starts)
        LOG.warning(
            "--from %s: takes %d of %d adapters: %s", cfg.start, len(starts), len(files), taken
        )


def read_start(file: Path) -> Start:
    """Read what an adapter file says. Raises UsageError."""
    return Start(file, sha256(file), load_adapter(file).info)


def check_start_unchanged(start: Start) -> None:
    """Refuse (RunError) an adapter that was replaced or removed since the command read it.

    What is trained from it would count as trained from the one before.
    """
    if start.file is None:
        return
    if not start.file.exists() or sha256(start.file) != start.sha256:
        raise RunError(
            f"--from: {start.file} was changed since this run began, so it ends without a result;"
            " put it back, and the same command goes on, or give another --out"
        )


def check_seeds(starts: Sequence[Start], cfg: FinetuneConfig) -> None:
    """Refuse (UsageError) starts whose runs would count as independent, and are not."""
    own_seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    start_by_seeds: dict[tuple[int, ...], Start] = {}
    for start in starts:
        if start.info.stage == "finetune":
            check_earlier_seeds(start, own_seeds)
        if seeds := start.info.seeds_of_runs():
            # Two adapters of the same seeds are one run, made twice.
            first = start_by_seeds.setdefault(tuple(seeds), start)
            if first.sha256 != start.sha256:
                raise UsageError(
                    f"--from {start.file}: is of {start.info.stage} seed {seeds[0]}, as"
                    f" {first.file}; remove one of them"
                )
    different = len({start.sha256 for start in starts})
    if different not in (1, len(starts)):  # neither one for all seeds nor one for each
        raise UsageError(f"--from {cfg.start}: has an adapter twice, so no run a seed; remove one")


def check_earlier_seeds(start: Start, own_seeds: range) -> None:
    """Refuse (UsageError) a fine-tuned adapter if a fine-tuning before had a seed of this run.

    The same seed gave it the same head and the same batches.
    """
    for seed in (start.info.seed, *start.info.earlier_seeds):
        if seed in own_seeds:
            how = "is" if seed == start.info.seed else "comes from a run"
            raise UsageError(
                f"--from {start.file}: {how} of seed {seed}, which this run has, too;"
                " give another --seed"
            )


def check_alike(starts: Sequence[Start]) -> None:
    """Refuse (UsageError) adapters that are not seeds of one arm, see `find_differences`."""
    first = starts[0]
    for start in starts:
        if names := find_differences(start.info, first.info):
            raise UsageError(
                f"--from {start.file}: differs in more than the seed from {first.file}:"
                f" {', '.join(names)}; give runs that differ in the seed alone"
            )


def find_differences(info: AdapterInfo, first: AdapterInfo) -> list[str]:
    """Name what two adapters say otherwise, though they are to be seeds of one arm; [] if nothing.

    In older versions a fine-tuning said neither its settings nor its start. Where one of two
    fine-tunings does not say its start, neither of these is compared.

    >>> tuned = AdapterInfo(stage="finetune", unlike_paper={"epochs": 8}, origin=AdapterInfo())
    >>> find_differences(tuned, tuned.model_copy(update={"unlike_paper": {}}))
    ['epochs']
    >>> aligned = tuned.model_copy(update={"origin": AdapterInfo(stage="align")})
    >>> find_differences(tuned, aligned)
    ['stage of its start']
    >>> by_script = AdapterInfo(dataset="own", data_sha256="2:named", files_sha256="2:files")
    >>> find_differences(by_script, AdapterInfo(dataset="folder:a", data_sha256="2:files"))
    []
    """
    if info.stage != first.stage:
        return ["stage"]  # the others follow from that
    fields, first_fields = dict(to_compare(info)), dict(to_compare(first))
    settings, first_settings = fields.pop("unlike_paper"), first_fields.pop("unlike_paper")
    start, first_start = fields.pop("origin"), first_fields.pop("origin")
    for name in NOT_SAID_BY_OLDER:
        if None in (fields[name], first_fields[name]):
            fields[name] = first_fields[name] = None
    if info.data_sha256 and are_of_same_images(fields, first_fields):
        # However a script or a seed has split them, the splits are the same.
        fields["data_sha256"] = first_fields["data_sha256"] = None
        fields["data_seed"] = first_fields["data_seed"] = None
    fields["files_sha256"] = first_fields["files_sha256"] = None  # data_sha256 says it, too
    names = keys_that_differ(fields, first_fields)
    says_no_start = start is None or first_start is None
    if info.stage == "finetune" and says_no_start:
        return names
    names += keys_that_differ(settings, first_settings)
    if not says_no_start:
        names += [f"{name} of its start" for name in find_differences(start, first_start)]
    return names


def keys_that_differ(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """The keys whose values are not the same in both, or that only one has."""
    return sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))


def to_compare(info: AdapterInfo) -> AdapterInfo:
    """What an adapter says, without what may differ between seeds of one arm.

    If it says the digest of its images, their place may differ: each computer has its own copy.
    """
    unlike_paper = dict(info.unlike_paper)
    if info.pool_sha256:
        unlike_paper.pop("pool", None)
    changes: Record = {"versions": None, "seen": None, "chosen": None, "seen_images": None}
    changes["in_memory"] = False  # an older one does not say it; the digest of the images does
    changes["unlike_paper"] = unlike_paper
    if info.data_sha256:
        changes["dataset"] = None
    return info.without_seeds().model_copy(update=changes)


def check_settings(start: Start, cfg: FinetuneConfig) -> None:
    """Refuse (UsageError) an adapter of another network or rank, if it says its own."""
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
    """Refuse (UsageError) adapters that do not fit the network, or have seen the test images.

    They do not fit if θ has another shape, or was trained on other weights. What may be wrong with
    an adapter, but cannot be known, is logged as a warning. The weights are looked at, too, see
    `check_weights`.
    """
    if experiment.networks.trained_on is not None:
        check_weights(experiment, experiment.networks.trained_on)
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
            if info.network_sha256 not in (None, experiment.networks.network_sha256):
                raise ValueError(
                    "was trained on another network: what the config.json of --backbone says of it"
                    " was changed; put it back, or align again"
                )
            doubts += check_unseen(info, experiment)
            doubts += doubt_normalisation(experiment.task, info)
    for doubt in dict.fromkeys(doubts):  # each once, however many adapters there are
        LOG.warning("--from: %s", doubt)


def check_weights(experiment: Experiment[C], trained_on: AdapterInfo) -> None:
    """Refuse (UsageError) weights that have a θ merged in which has seen test images of this run.

    `bisslight export` writes such weights. `trained_on` is what they say of the adapter with that
    θ. What cannot be known is logged as a warning.
    """
    cfg = experiment.cfg
    given = f"--weights {cfg.weights}" if cfg.weights else f"--backbone {cfg.backbone}"
    with as_usage_error(given):
        doubts = check_unseen(trained_on, experiment)
    for doubt in doubts:
        LOG.warning("%s: %s", given, doubt)


def check_unseen(info: AdapterInfo, experiment: Experiment[C]) -> list[str]:
    """Refuse (ValueError) an adapter, or weights, whose θ was trained on test images of this run.

    Returns sentences on validation images that it was trained on, and on what cannot be known.
    """
    return check_test_images(info, experiment) + doubt_validation(info, experiment)


def check_test_images(info: AdapterInfo, experiment: Experiment[C]) -> list[str]:
    """Refuse (ValueError) a θ that was trained on test images; return what cannot be known.

    Nothing is refused if this run has the very images and splits of the adapter's run: that one did
    not train on its test images, which are those of this run, and has refused a start that had.
    What it could not know of a start with other images is not known here, either.
    """
    task, digests = experiment.task, experiment.digests
    stages = [info, *info.stages_before()]
    others = [stage for stage in stages if not are_of_same_images(dict(stage), digests)]
    if info not in others:
        if not others:
            return []
        if info.seen is None:
            return [NOT_KEPT]
        return doubt_what_is_missing(task, info) if may_share(experiment.cfg, others) else []
    if info.seen is None:
        return check_data_seed(info, experiment.cfg)
    seen = find_seen(task, info)
    if seen.images:
        names = " and ".join(seen.images[:2])
        what = f"{len(seen.images)} of the {len(task.test.targets)} test images"
        how = f"was trained on {what}, by content or by {class_and_name(task)}"
        if not seen.by_content:
            how = f"was trained on images with the {class_and_name(task)} of {what}"
        raise ValueError(
            f"{how}, such as {names}; take {splits_of(info)}, or train again. If they are other"
            " pictures, rename their files; a picture that both data sets have, such as a"
            " placeholder, has to be removed here"
        )
    doubts = list(seen.doubts)
    if may_share(experiment.cfg, others):
        doubts += doubt_what_is_missing(task, info)
    return doubts


def splits_of(info: AdapterInfo) -> str:
    """Return what to take so that the splits are those of an adapter's run."""
    if info.dataset == "own":  # no seed of the program has split them
        return "the splits that its script handed over"
    seed = f"its data seed, --data-seed {info.data_seed}"
    if info.dataset in ("cub200", "pets"):  # an adapter does not say which of both it was
        seed += ", or its --split-file"
    return f"{seed}, and the images of {info.dataset}, or of a run before it, as they were"


def may_share(cfg: AlignConfig | FinetuneConfig, stages: Sequence[AdapterInfo]) -> bool:
    """Whether a run may have images of one of these stages of an adapter, as far as is known.

    Two benchmarks have no image in common. Of a user's own images, and those are what a folder
    called imagenet has, too, that is not known.
    """
    names = [cfg.dataset, *(stage.dataset for stage in stages)]
    return any(name is None or name.startswith(("folder:", "own", "imagenet")) for name in names)


def check_data_seed(info: AdapterInfo, cfg: AlignConfig | FinetuneConfig) -> list[str]:
    """Refuse (ValueError) an adapter of an older version if its data were split otherwise.

    Such an adapter does not say which images it was trained on. Returns the sentence that says so.
    """
    if info.dataset == cfg.dataset and info.data_seed not in (None, cfg.data_seed):
        raise ValueError(
            f"was trained on {info.dataset}, split otherwise, so it may have seen the test images;"
            f" see its --data-seed {info.data_seed}, or train again"
        )
    return [NOT_KEPT]


def doubt_normalisation(task: Task, info: AdapterInfo) -> list[str]:
    """Return a sentence if images here are normalised otherwise than those of θ, else []."""
    if info.channels is None:
        return []
    theirs = [tuple(values) for values in info.channels]
    ours = [tuple(task.mean), tuple(task.std)]
    if theirs == ours:
        return []
    shown = [" ".join(f"{x:.3f}" for x in values) for values in (*theirs, *ours)]
    mean, std, own_mean, own_std = shown
    return [
        f"was trained on images normalised with mean {mean}, std {std}; those here are with mean"
        f" {own_mean}, std {own_std}, which may cost accuracy. A script can hand over a task with"
        " others"
    ]


def doubt_validation(info: AdapterInfo, experiment: Experiment[C]) -> list[str]:
    """Return a sentence if θ was trained on validation images of this run, else [].

    Those that are known by class and name alone may be other pictures, so of these it says "if".
    """
    task = experiment.task
    if info.trained is None:
        return doubt_drawn_validation(info, experiment)
    seen = find_validation(task, info.trained)
    if seen.images:
        # Not those that this run trains on, too: that its own splits share them is told elsewhere.
        seen = find_validation(task, info.trained - hashes_of(task.train, task.classes))
    if not seen.images:
        return []
    remedy = "train θ again without them"
    if not are_of_same_images(dict(info), experiment.digests):
        remedy = f"take {splits_of(info)}, or train again"
    what = "the validation accuracy is too high, and epochs and rates are chosen by it"
    if not seen.by_content:
        return [
            f"if files of the same {class_and_name(task)} are the same pictures, it was trained on"
            f" {tell_validation(seen.images, task)}: then {what}; {remedy}. If they are other"
            " pictures, this is well"
        ]
    named = len(seen.images) - len(seen.by_content)
    more = ""
    if named:
        have = "has" if named == 1 else "have"
        more = f"; {named} more {have} the {class_and_name(task)} of one that it was trained on"
    return [
        f"was trained on {tell_validation(seen.by_content, task)}, known by content{more}. So"
        f" {what}; {remedy}"
    ]


def doubt_drawn_validation(info: AdapterInfo, experiment: Experiment[C]) -> list[str]:
    """Return a sentence if an older adapter may have been trained on drawn validation images.

    It does not say on which of its images θ was trained, and on which its epoch was chosen. So this
    is asked only where another data seed has drawn the validation images: others are mostly those
    of the adapter's run.
    """
    task, cfg = experiment.task, experiment.cfg
    if are_of_same_images(dict(info), experiment.digests) or info.data_seed == cfg.data_seed:
        return []
    if "val" not in task.drawn:
        return []
    seen = find_validation(task, info.seen or ())
    if not seen.images:
        return []
    what = tell_validation(seen.images, task)
    how = f"was trained or chosen on {what}, by content or by {class_and_name(task)}"
    if not seen.by_content:
        how = f"was trained or chosen on images with the {class_and_name(task)} of {what}"
    return [
        f"{how}. If it was trained on these validation images, their accuracy is too high, and"
        f" epochs and rates are chosen by it; take {splits_of(info)}"
    ]


def find_validation(task: Task, hashes: Collection[str]) -> "Seen":
    """Find the validation images that have one of these hashes, by name or by content."""
    return find_seen(task, AdapterInfo(seen=frozenset(hashes)), "val")


def tell_validation(images: Sequence[str], task: Task) -> str:
    """Return how many validation images these are, of how many, and two of them."""
    return (
        f"{len(images)} of the {len(task.val.targets)} validation images, such as"
        f" {' and '.join(images[:2])}"
    )


def doubt_what_is_missing(task: Task, info: AdapterInfo) -> list[str]:
    """Return sentences if images that θ was trained on are not found in this task for sure.

    Not to be found at all is one doubt, to be found by class and name alone is another.
    """
    found, by_name_alone = count_known_images(task, info.seen or ())
    if found == 0:
        name = "name or content" if knows_contents(task, info) else "name"
        return [
            f"no image here has the {name} of one that θ was trained on"
            f" ({info.dataset}). If they are the same ones, renamed and changed, it is not"
            " known whether θ has seen the test images"
        ]
    doubts = []
    if info.seen_images is None or found < info.seen_images:  # older adapters lack the number
        number = "an unknown number of"
        if info.seen_images is not None:
            number = f"the {info.seen_images}"
        changed = "changed and " if knows_contents(task, info) else ""
        doubts.append(
            f"{found} of {number} images that θ was trained on ({info.dataset})"
            f" {'is' if found == 1 else 'are'} found here, by content or by"
            f" {class_and_name(task)}. If others are here, too, {changed}under a new name or one"
            " that several of them have, it is not known whether θ has seen the test images"
        )
    if by_name_alone:
        unlike = "and not its content. That is well if they were converted"
        if not knows_contents(task, info):
            unlike = f"and {NOT_READ}. That is well if they are the same images"
        have = "an image here has" if by_name_alone == 1 else f"{by_name_alone} images here have"
        doubts.append(
            f"{have} the {class_and_name(task)} of one that θ was trained on"
            f" ({info.dataset}), {unlike}; if the files were numbered anew, θ may have seen the"
            " test images"
        )
    return doubts


def class_and_name(task: Task) -> str:
    """Return by what files are known, apart from their content: of several classes, none is named.

    See `name_images`.
    """
    return "name" if task.test.targets.ndim > 1 else "class and name"


def knows_contents(task: Task, info: AdapterInfo) -> bool:
    """Whether contents are compared: of a split with more than MOST_CONTENTS files none is read.

    Pixels in memory are always compared. An adapter says but the sum of its splits.
    """
    splits = (task.train, task.val, task.test)
    if all(isinstance(split.images, Tensor) for split in splits):
        return True
    return max(*task.sizes().values(), info.seen_images or 0) <= MOST_CONTENTS


class Seen(NamedTuple):
    """The images of a split, mostly the test images, that θ was trained or chosen on."""

    images: list[str]  # their files, or, if they lie in memory, "number 0" and so on
    by_content: list[str]  # those of them that have the content of one, not its name alone
    doubts: list[str]  # sentences on what cannot be known


def find_seen(task: Task, info: AdapterInfo, part: str = "test") -> Seen:
    """Find the test images that θ was trained on, by the hashes that its adapter keeps of them.

    A test image is found by its content, or by its class and name. In some folders, the files of
    each part are numbered anew, so that an image for training has the name of one for testing. Such
    a name does not count, and a sentence tells of it. With `part` "val" it is the validation images
    that are looked for.
    """
    seen = info.seen or ()
    split: Split = getattr(task, part)
    images = split.images
    in_memory = isinstance(images, Tensor)
    names = name_images(split, task.classes)  # hashes; in memory, they are of the pixels
    contents = hash_contents(split) or [""] * len(names)  # hashes, too; "" where there is none
    ambiguous = set[str]()  # names that do not count
    if not in_memory:
        for other in SPLITS:
            if other != part:
                ambiguous.update(name_images(getattr(task, other), task.classes))
    found: list[str] = []
    by_content: list[str] = []  # those of the found ones that are known by their content
    unclear = 0  # how many images are not found since their name does not count
    for i, (name, content) in enumerate(zip(names, contents, strict=True)):
        has_seen_content = content in seen
        has_seen_name = name in seen and name not in ambiguous
        if has_seen_content or has_seen_name:
            found.append(f"number {i}" if isinstance(images, Tensor) else str(images[i]))
            if has_seen_content or in_memory:
                by_content.append(found[-1])
        elif name in seen:
            unclear += 1
    doubts = []
    if unclear:
        content = "θ has not seen their content; if they were converted since, it is not known"
        if not knows_contents(task, info):
            content = f"{NOT_READ.capitalize()}, nor whether θ has seen them"
        have = "a test image has" if unclear == 1 else f"{unclear} test images have"
        doubts.append(
            f"{have} the name of a training image, too, such as train/cat/1.jpg"
            f" and test/cat/1.jpg. {content}"
        )
    return Seen(found, by_content, doubts)


def seconds_until(file: Path | None) -> float | None:
    """CPU seconds of the run that made an adapter, and of the runs before it; None: unknown.

    It is 0 without an adapter. The seconds of a finetune run, in which it also tried its rates, are
    shared equally between its seeds.
    """
    if file is None:
        return 0.0
    result_file = file.parent / "result.json"
    # An adapter of a finetune run lies in one of its trials, a directory inside that of the run.
    finetune_result = file.parent.parent / "result.json"
    if finetune_result.exists() and is_of_trial(file, read_json(finetune_result)):
        result_file = finetune_result
    if not result_file.exists():
        return None
    result = read_json(result_file)
    seconds = result.get("cpu_seconds")
    seconds_before = result.get("start_cpu_seconds", 0.0)  # align has no run before it
    if seconds is None or seconds_before is None:
        return None
    seeds = len(result.get("trials", [0]))  # an align run has no trials: it is of one seed
    return float(seconds + seconds_before) / seeds


def is_of_trial(file: Path, result: Record) -> bool:
    """Whether an adapter lies where a trial of a finetune run with this result has its own.

    An align run may lie inside the directory of a finetune run, too.
    """
    trials = [*result.get("trials", []), *result.get("tried", [])]
    return file.parent.name in {f"lr{trial['lr']}-s{trial['seed']}" for trial in trials}
