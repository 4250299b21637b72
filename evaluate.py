"""What finished runs are worth: scores, seeds in summary, the exact permutation test (App. C.2.1).

    from evaluate import evaluate
    evaluate([Path("runs/aligned"), Path("runs/direct")]).arms[1].first_minus_this.p

Leaves out: attention rollout and the similarity of representations, which are in `extras.look`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Machine, RunError, UsageError
from paper import Reported, reported

CROSS_ENTROPY = partial(F.cross_entropy, reduction="none")
OFFICIAL = ("_full.pth", "IN1K-vit.h.14-300e.pth.tar")  # how the official files' names end
FREE = {*Machine.model_fields, "start", "pool", "jobs", "mfac_device", "weights"} - {"amp"}
METHODS = {None: "PEFT", "mfac": "BiSSLight", "recursion": "BiSSLight", "cg": "BiSSL"}
USUAL = {"rank": 64, "epochs": 200, "optimizer": "adamw", "augment": "crop", "partial": False,
         "voc_difficult": "ignore"}  # fmt: skip


class Score(NamedTuple):
    """What a model is worth on a split."""

    accuracy: float  # top-1 in percent; for several classes an image, mean average precision
    loss: float  # mean over the images
    per_class: float | None = None  # mean over classes of the accuracy in each; beside top-1 only
    right: int | None = None  # how many images were right; beside top-1 only


@torch.no_grad()
def score(
    predict: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = CROSS_ENTROPY,
    gather: Callable[[Tensor], Tensor] = Tensor.cpu,
) -> Score:
    """Top-1 accuracy, or 11-point mAP where targets are (N, C); batch sizes do not matter.

    Args:
        predict: images (B, 3, H, W) -> logits (B, C).
        batches: (images, targets (B,) or (B, C)), each image once.
        loss: logits and targets -> the loss of each image.
        gather: makes one tensor, on the CPU, of the rows that several processes have.
    """
    pairs = [(predict(images).float().cpu(), targets.cpu()) for images, targets in batches]
    z, targets = (gather(torch.cat(column)) for column in zip(*pairs, strict=True))
    mean = float(loss(z, targets).double().mean())
    if targets.ndim == 2:
        return Score(mean_average_precision(z, targets), mean)
    right = (z.argmax(1) == targets).double()
    each = torch.stack([right[targets == k].mean() for k in targets.unique()])
    return Score(100 * float(right.mean()), mean, 100 * float(each.mean()), int(right.sum()))


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """VOC07's mAP in percent, the mean over the classes that have a positive image.

    Args:
        scores: (N, C).
        labels: (N, C): 1 positive, −1 negative, 0 difficult.
    """
    classes = [k for k in range(labels.shape[1]) if (labels[:, k] == 1).any()]
    if not classes:
        raise RunError("mAP: no class has a positive image in this split")
    return 100 * fmean(average_precision(scores[:, k], labels[:, k]) for k in classes)


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """VOC's 11-point AP of a class: mean over t = 0, 0.1 ... 1 of the best precision at recall ≥ t.

    Difficult images (label 0) count nowhere. Ties keep the order of the images. Recall is compared
    in whole numbers, since 0.7 is no exact floating-point number.

    >>> ap = average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([1, -1, 1]))
    >>> round(ap, 6)  # precision 1 up to recall 0.5, then 2/3: (6 + 5 * 2/3) / 11
    0.848485
    """
    counted = labels != 0
    hit = (labels[counted] == 1)[scores[counted].argsort(descending=True, stable=True)]
    hits = hit.long().cumsum(0)
    precision = hits.double() / torch.arange(1, len(hits) + 1)
    best = [precision[10 * hits >= t * int(hit.sum())] for t in range(11)]
    return sum(float(p.max()) for p in best if len(p)) / 11


# --- two arms ---------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """An arm against another."""

    difference: float  # of the means; percentage points for accuracies in percent
    p: float | None  # two-sided, exact
    splits: int  # of the pooled seeds; all of them are counted
    no_p: str | None = None  # why there is none


def compare(
    arm: Sequence[float], against: Sequence[float], images: int | None = None
) -> Comparison:
    """Exact two-sample permutation test of means: see `permutation_p`.

    Args:
        arm, against: a number a seed: whole numbers, such as images that were right, or percentages
            as they are printed, if `images` is given.
        images: number of test images.
    Raises UsageError where a number is not whole, or a percentage no whole number of images.

    >>> compare([70.0, 72.5], [67.5, 65.0], images=40)
    Comparison(difference=5.0, p=0.3333333333333333, splits=6, no_p=None)
    """
    pooled = [*arm, *against]
    difference, splits = fmean(arm) - fmean(against), math.comb(len(pooled), len(arm))
    if not all(map(math.isfinite, pooled)):
        return Comparison(difference, None, splits, "not finite")
    if images is None and (broken := [x for x in pooled if x != int(x)]):
        what = "is no whole number; percentages need the number of test images"
        raise UsageError(f"{broken[0]}: {what}")
    counts = [int(x) if images is None else right_images(x, images) for x in pooled]
    p = permutation_p(counts[: len(arm)], counts[len(arm) :])
    return Comparison(difference, p, splits, "one seed each" if p is None else None)


def permutation_p(a: Sequence[int], b: Sequence[int]) -> float | None:
    """Two-sided p of the exact permutation test of means; None for one number against one.

    It is the share of the C(n + m, n) ways to split all n + m numbers into n and m whose means
    differ at least as much as those of `a` and `b`. The splits are not listed: number by number, we
    count how many sets of each size have each sum. All is done in whole numbers, so no rounding
    decides whether a split differs as much.

    >>> permutation_p([3, 4], [1, 2])  # of 6 splits, the observed one and its mirror differ most
    0.3333333333333333
    """
    if len(a) > len(b):  # sets of the smaller size are fewer
        a, b = b, a
    n, pooled = len(a), [*a, *b]
    if n == 0 or len(pooled) == 2:
        return None
    sets: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(n))]  # sets[size][sum]
    for number in pooled:
        for size in range(n, 0, -1):
            for total, count in sets[size - 1].items():
                sets[size][total + number] += count

    def distance(total: int) -> int:
        """The difference of the means times n m, if the n numbers have the sum `total`."""
        return abs(total * len(pooled) - n * sum(pooled))

    observed = distance(sum(a))
    extreme = sum(count for total, count in sets[n].items() if distance(total) >= observed)
    return extreme / math.comb(len(pooled), n)


def right_images(percent: float, images: int) -> int:
    """How many of `images` were right, from a percentage as it is printed (UsageError otherwise).

    >>> right_images(72.29, 480), right_images(70.0, 1000)
    (347, 700)
    """
    exact = round(percent * images / 100)
    if 0 <= exact <= images and math.isclose(100 * exact, percent * images, abs_tol=1e-9):
        return exact
    decimals = -int(Decimal(str(percent)).as_tuple().exponent)
    off = 0.5 * 10.0**-decimals + 1e-9
    fits = [k for k in range(images + 1) if abs(100 * k / images - percent) <= off]
    if not fits:
        raise UsageError(f"{percent} % is no whole number of {images} test images")
    if len(fits) > 1:
        may = f"may be {fits[0]} to {fits[-1]} of {images} test images"
        raise UsageError(f"{percent} % {may}, give it with more decimals")
    return fits[0]


# --- finished runs ----------------------------------------------------------------------------


class Arm(NamedTuple):
    """One way of getting a model, tried with several seeds."""

    name: str
    accuracies: list[float]  # test accuracy in percent, one a seed
    counts: list[int] | None  # the same in right images, or hundredths of a point of mAP
    task: dict[str, Any]  # what it was tested on
    settings: dict[str, Any]  # of its runs
    result: dict[str, Any]  # of its first run


class Row(NamedTuple):
    """An arm in the table that `evaluate` returns."""

    arm: str
    seeds: int
    unit: str
    mean: float  # percent
    std: float | None  # sample standard deviation (n − 1); None for a single seed
    metric: str
    paper: Reported | None
    differs: dict[str, list[Any]]  # settings that are not the first arm's: its value, this one's
    accuracies: list[float]
    counts: list[int] | None
    first_minus_this: Comparison | None


class Evaluation(NamedTuple):
    """A row an arm, and a sentence for each arm whose settings are not the first one's."""

    arms: list[Row]
    differences: list[str]


def evaluate(runs: Sequence[Path]) -> Evaluation:
    """Compare the first of several arms with each of the others.

    Args:
        runs: finished `finetune` runs, or directories of such runs, which are one arm each.
    Raises UsageError where something is no such run, or was tested on other images.
    """
    arms = [read_arm(run) for run in runs]
    rows = [row(arm, arms[0]) for arm in arms]
    lines = [
        f"{r.arm} differs from {rows[0].arm} in "
        + ", ".join(f"{name} {here} ({there} there)" for name, (there, here) in r.differs.items())
        for r in rows
        if r.differs
    ]
    return Evaluation(rows, lines)


def row(arm: Arm, first: Arm) -> Row:
    """An arm in summary, and compared with the first one."""
    if arm.task != first.task:
        tested = f"{arm.name} was tested on {arm.task}, {first.name} on {first.task}"
        raise UsageError(f"{tested}: not comparable")
    several, mean = len(arm.accuracies) > 1, fmean(arm.accuracies)
    known = first.counts and arm.counts
    a, b = (x.counts or [] if known else x.accuracies for x in (first, arm))
    found = compare(a, b)
    versus = found._replace(difference=fmean(first.accuracies) - mean)
    return Row(
        arm=arm.name,
        seeds=len(arm.accuracies),
        unit=arm.result["unit"],
        mean=mean,
        std=float(torch.tensor(arm.accuracies).double().std()) if several else None,
        metric=arm.result["metric"],
        paper=published(arm),
        differs=unlike(first, arm),
        accuracies=arm.accuracies,
        counts=arm.counts,
        first_minus_this=versus if arm is not first else None,
    )


def unlike(first: Arm, arm: Arm) -> dict[str, list[Any]]:
    """Settings that two arms have and that differ, other than seed, start, machine: both values."""
    names = (first.settings.keys() & arm.settings.keys()) - FREE
    if (first.result["aligned_by"] is None) != (arm.result["aligned_by"] is None):
        names -= {"grid"}  # its default follows from the start
    pairs = {name: [first.settings[name], arm.settings[name]] for name in sorted(names)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def read_arm(path: Path) -> Arm:
    """A finished `finetune` run, or a directory of such runs that differ in seed and start only."""
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such run directory")
    folders = [path] if (path / "config.json").exists() else path.iterdir()
    runs = [folder for folder in folders if (folder / "config.json").exists()]
    try:
        arms = [read_run(run) for run in sorted(runs, key=lambda run: (len(run.name), run.name))]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"{path}: is damaged or of an older version ({error!r})") from error
    if not arms:
        raise UsageError(f"{path}: is neither a run nor a directory of runs (no config.json)")
    for arm in arms:
        names = [*unlike(arms[0], arm)]
        names += ["task"] if arm.task != arms[0].task else []
        names += [x for x in ("unit", "aligned_by") if arm.result[x] != arms[0].result[x]]
        if names:
            what = f"differs from {arms[0].name} in {', '.join(names)}"
            raise UsageError(f"{path / arm.name}: {what}, they are no seeds of one arm")
    counts = [count for arm in arms for count in arm.counts or []]
    accuracies = [accuracy for arm in arms for accuracy in arm.accuracies]
    known = counts if len(counts) == len(accuracies) else None
    return arms[0]._replace(name=path.name, accuracies=accuracies, counts=known)


def read_run(run: Path) -> Arm:
    """One finished `finetune` run (UsageError where it is something else)."""
    config, env = read_json(run / "config.json"), read_json(run / "env.json")
    if config.get("swept"):
        raise UsageError(f"{run}: is a sweep, give one of its runs")
    if not (run / "result.json").exists():
        raise UsageError(f"{run}: is not finished, give its own command again")
    result = read_json(run / "result.json")
    if not result.get("test"):
        raise UsageError(f"{run}: has no test accuracy, it is not a finetune run")
    if missing := {"unit", "metric", "aligned_by", "backbone", "pretext"} - result.keys():
        raise KeyError(*missing)
    groups = [value for value in config.values() if isinstance(value, dict)]  # the first edition's
    settings = {name: value for group in (config, *groups) for name, value in group.items()}
    env |= env.get("about", {})
    settings["weights_sha256"] = str(env.get("weights_sha256"))[:12]
    task = {"dataset": settings["dataset"], "data": env["data_sha256"][:12]}
    return Arm(run.name, result["test"], whole(result, env), task, settings, result)


def whole(result: Mapping[str, Any], env: Mapping[str, Any]) -> list[int] | None:
    """A run's test accuracies in whole numbers; None where one is not finite."""
    if not all(map(math.isfinite, result["test"])):
        return None
    if result["metric"] != "top-1 accuracy":
        return [round(100 * x) for x in result["test"]]
    return result.get("right") or [right_images(x, env["images"]["test"]) for x in result["test"]]


def published(arm: Arm) -> Reported | None:
    """The paper's figure for an arm; None where its settings, as far as we know, are others."""
    settings, result = arm.settings, arm.result
    weights, dataset, by = settings["weights"], settings["dataset"], result["aligned_by"]
    if not (weights is None or str(weights).endswith(OFFICIAL)):
        return None
    if by not in METHODS or any(settings[name] != value for name, value in USUAL.items()):
        return None
    if by and (result.get("aligned_on") != dataset or result.get("align_unlike_paper") != {}):
        return None
    return reported(result["backbone"], dataset, METHODS[by], result["pretext"])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that this program wrote (UsageError where it is missing or damaged)."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); run its command again") from error
