"""What finished runs are worth: scores on a split, seeds in summary, the exact permutation test (App. C.2.1).

Leaves out: attention rollout and representation similarity, which are in `rollout` and `similarity`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config import AlignConfig, RunError, UsageError, by_pretext, get, leaves
from paper import Reported, reported
from runtime import Score, read_from, read_json, runs_in

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), targets -> (B,)
CROSS_ENTROPY: Loss = partial(F.cross_entropy, reduction="none")


@torch.no_grad()
def score(
    predict: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Loss = CROSS_ENTROPY,
    gather: Callable[[Tensor], Tensor] = Tensor.cpu,
) -> Score:
    """Top-1 accuracy, or 11-point mAP where targets are (N, C), and mean loss, whatever the batch sizes.

    Args:
        predict: images (B, 3, H, W) -> logits (B, C).
        batches: (images, targets (B,) or (B, C)), each image once.
        loss: of each image, as in training.
        gather: makes one tensor, on the CPU, of the rows that several processes have.
    """
    pairs = [(predict(images).float().cpu(), targets.cpu()) for images, targets in batches]
    z, targets = (gather(torch.cat(column)) for column in zip(*pairs, strict=True))
    mean = float(loss(z, targets).double().mean())
    if targets.ndim == 2:
        return Score(mean_average_precision(z, targets), mean)
    right = (z.argmax(1) == targets).double()
    each = [right[targets == k].mean() for k in targets.unique()]
    return Score(100 * float(right.mean()), mean, 100 * float(torch.stack(each).mean()), int(right.sum()))


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """VOC07's mAP in percent: the mean of `average_precision` over the classes that have a positive.

    Args:
        scores: (N, C).
        labels: (N, C): 1 positive, −1 negative, 0 difficult.
    """
    each = [average_precision(scores[:, k], labels[:, k]) for k in range(labels.shape[1]) if (labels[:, k] == 1).any()]
    if not each:
        raise RunError("mAP: no class has a positive image in this split")
    return 100 * sum(each) / len(each)


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """VOC devkit's 11-point AP of a class: the mean over t = 0, 0.1 ... 1 of the best precision at recall ≥ t.

    Difficult images (label 0) are neither hits nor false alarms. Ties keep the order of the images. Recall is compared
    in whole numbers, 10 hits ≥ 10 t positives: in floating point, 0.7 and 0.9 miss their thresholds by a rounding.

    >>> ap = average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([1, -1, 1]))
    >>> round(ap, 6)  # precision 1 up to recall 0.5, then 2/3: (6 + 5 * 2/3) / 11
    0.848485
    """
    counted = labels != 0
    hit = (labels[counted] == 1)[scores[counted].argsort(descending=True, stable=True)]
    hits = hit.long().cumsum(0)
    precision = hits.double() / torch.arange(1, len(hits) + 1)
    positives = int(hit.sum())
    best = [precision[10 * hits >= t * positives] for t in range(11)]
    return sum(float(p.max()) for p in best if len(p)) / 11


class Arm(NamedTuple):
    """One way of getting a model, tried with several seeds."""

    name: str
    accuracies: list[float]  # test accuracy (VOC07: mAP) in percent, a value a seed
    unit: str  # what one seed repeats
    task: dict[str, Any] | None = None  # what it was tested on, where that is known
    metric: str = "top-1 accuracy"
    published: Reported | None = None  # the paper's figure for this arm
    counts: list[int] | None = None  # accuracies in whole numbers: right images, or hundredths of a point of mAP
    settings: dict[str, Any] = {}  # by name, but for seed, start and machine  # noqa: RUF012

    @property
    def mean(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n − 1); None for a single seed."""
        return torch.tensor(self.accuracies, dtype=torch.float64).std().item() if len(self.accuracies) > 1 else None


class Comparison(NamedTuple):
    """An arm against another."""

    difference: float  # mean(arm) − mean(against); percentage points for accuracies in percent
    p: float | None  # two-sided; None for one seed against one, and where a value is not finite
    splits: int  # of the pooled seeds; all of them are counted


def permutation_p(a: Sequence[int], b: Sequence[int]) -> float | None:
    """Two-sided p of the exact permutation test of means; None for one number against one, or against none.

    It is the share of the C(n + m, n) ways to split all n + m numbers into n and m whose means differ at least as much
    as those of `a` and `b`. The splits are not listed: number by number, we count how many sets of each size have each
    sum. All is done in whole numbers, so no rounding decides whether a split differs as much.

    >>> permutation_p([3, 4], [1, 2])  # of 6 splits, the observed one and its mirror differ most
    0.3333333333333333
    """
    if len(a) > len(b):  # sets of the smaller size are fewer
        a, b = b, a
    n, pooled, whole = len(a), [*a, *b], sum(a) + sum(b)
    if n == 0 or len(pooled) == 2:
        return None
    sets: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(n))]  # sets[size][sum]: how many there are
    for number in pooled:
        for size in range(n, 0, -1):
            for total, count in sets[size - 1].items():
                sets[size][total + number] += count

    def distance(total: int) -> int:
        """The difference of the means times n m, if the n numbers have the sum `total`."""
        return abs(total * len(pooled) - n * whole)

    observed = distance(sum(a))
    extreme = sum(count for total, count in sets[n].items() if distance(total) >= observed)
    return extreme / math.comb(len(pooled), n)


def right_images(percent: float, images: int) -> int:
    """How many of `images` were right, from a percentage as it is printed (UsageError where no whole number is meant).

    >>> right_images(72.29, 480), right_images(70.0, 1000)
    (347, 700)
    """
    printed = Decimal(str(percent))
    value, last = Fraction(printed), max(0, -int(printed.as_tuple().exponent))  # decimals that were printed
    off = max(Fraction(1, 2 * 10**last), Fraction(1, 10**9))  # by rounding, to what is printed or to a double
    least, most = (math.ceil((value - off) * images / 100), math.floor((value + off) * images / 100))
    exact = value * images / 100
    if exact.denominator == 1:
        least = most = int(exact)
    if least > most or not 0 <= least <= most <= images:
        raise UsageError(f"{percent} % is no whole number of {images} test images")
    if least < most:
        raise UsageError(f"{percent} % may be {least} to {most} of {images} test images, give it with more decimals")
    return least


def compare(arm: Sequence[float], against: Sequence[float], images: int | None = None) -> Comparison:
    """Exact two-sample permutation test of means, two-sided: see `permutation_p`.

    Args:
        arm, against: a number a seed: accuracies in percent, as they are printed, if `images` is given; otherwise whole
            numbers, such as right images (UsageError where they are not whole).
        images: test images.

    >>> compare([70.0, 72.5], [67.5, 65.0], images=40)
    Comparison(difference=5.0, p=0.3333333333333333, splits=6)
    """
    difference = sum(arm) / len(arm) - sum(against) / len(against)
    splits = math.comb(len(arm) + len(against), len(arm))
    if not all(map(math.isfinite, (*arm, *against))):
        return Comparison(difference, None, splits)
    if images is None and (broken := [x for x in (*arm, *against) if x != int(x)]):
        raise UsageError(f"{broken[0]}: is no whole number; percentages need the number of test images")
    a, b = ([int(x) if images is None else right_images(x, images) for x in side] for side in (arm, against))
    return Comparison(difference, permutation_p(a, b), splits)


def versus(arm: Arm, other: Arm) -> Comparison:
    """An arm against another by their `counts`, which are exact; see `compare`."""
    splits = math.comb(len(arm.accuracies) + len(other.accuracies), len(arm.accuracies))
    p = None if arm.counts is None or other.counts is None else permutation_p(arm.counts, other.counts)
    return Comparison(arm.mean - other.mean, p, splits)


def told(found: Comparison) -> str:
    """The p-value as people read it, or why there is none."""
    return f"{found.p:.4g}" if found.p is not None else "one seed each" if found.splits == 2 else "not finite"


def accuracies(run: Path, result: Mapping[str, Any]) -> list[float]:
    """The test accuracies in a finetune run's result.json (UsageError where there are none)."""
    found = result["test"]
    if not isinstance(found, list) or not found or not all(isinstance(x, int | float) for x in found):
        raise UsageError(
            f"{run / 'result.json'}: holds no test accuracies, it is damaged; run finetune again (--force)"
        )
    return [float(x) for x in found]


def read_arm(path: Path) -> Arm:
    """The test accuracies of a finished `finetune` run, or of a directory whose subdirectories are such runs.

    Runs are pooled only if they differ in nothing but seed, start and machine (UsageError otherwise).
    """
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such run directory")
    if not (runs := runs_in(path)):
        raise UsageError(f"{path}: is neither a run nor a directory of runs (no config.json)")
    if (path / "config.json").exists() and "swept" in read_json(path / "config.json"):
        raise UsageError(f"{path}: is a sweep, give one of its runs (rank-4/finetune), or see sweep.json")
    results: list[dict[str, Any]] = []
    for run in runs:
        if not (run / "result.json").exists():
            raise UsageError(f"{run}: is not finished, `--resume` it first")
        results.append(read_json(run / "result.json"))
        if "test" not in results[-1]:
            raise UsageError(f"{run}: has no test accuracy, it is not a finetune run")
    with read_from(path):
        settings = [experiment(run) for run in runs]
        for run, other in zip(runs, settings, strict=True):
            if different := [key for key in other if other[key] != settings[0].get(key)]:
                raise UsageError(
                    f"{run}: differs from {runs[0]} in {', '.join(different)}, they are no seeds of one arm"
                )
        values = [value for run, result in zip(runs, results, strict=True) for value in accuracies(run, result)]
        first, config = results[0], read_json(runs[0] / "config.json")
        if "aligned_by" not in first:
            raise UsageError(f"{runs[0]}: was made by an older version, run it again")
        method = {None: "PEFT", "mfac": "BiSSLight", "cg": "BiSSL"}.get(first["aligned_by"])
        like = method is not None and all(like_the_paper(config, result) for result in results)
        dataset = config["data"]["dataset"]
        published = reported(first["backbone"], dataset, str(method), first["pretext"]) if like else None
        counts = [count for run, result in zip(runs, results, strict=True) for count in counted(run, result)]
        whole = [count for count in counts if count is not None]
        return Arm(
            path.name, values, first["unit"], settings[0]["task"], first["metric"], published,
            whole if len(whole) == len(counts) else None, named(config, read_json(runs[0] / "env.json")),
        )  # fmt: skip


def counted(run: Path, result: Mapping[str, Any]) -> list[int | None]:
    """A run's test accuracies in whole numbers, None for one that is not finite: see `Arm`."""
    if result["metric"] != "top-1 accuracy":
        return [round(100 * value) if math.isfinite(100 * value) else None for value in result["test"]]
    images = read_json(run / "env.json")["images"]["test"]
    return [right_images(value, images) if math.isfinite(value) else None for value in result["test"]]


def named(config: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a finetune run by name, but for seed, start and machine; weights by their digest, not their place."""
    flat = {key: value for group in ("model", "data", "peft") for key, value in config[group].items()}
    weights = {"weights": str(env.get("weights_sha256"))[:12], "amp": config.get("amp")}
    return {key: value for key, value in (flat | weights).items() if key != "pool"}  # finetune looks at no pool


def like_the_paper(config: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Whether a finetune run has the paper's setting, as far as it goes, so that its figure may stand beside it."""
    model, data, peft = config["model"], config["data"], config["peft"]
    official = str(model["weights"]).endswith(("_full.pth", "IN1K-vit.h.14-300e.pth.tar"))
    whole = not data["partial"] and data["voc_difficult"] == "ignore" and data["augment"] == "crop"
    same = result.get("aligned_on", data["dataset"]) == data["dataset"] and result.get("align_unlike_paper") == {}
    aligned = result["aligned_by"] is None or same
    return official and whole and aligned and (model["rank"], peft["epochs"], peft["optimizer"]) == (64, 200, "adamw")


def unlike_the_paper(cfg: AlignConfig) -> dict[str, Any]:
    """Settings of an align run in which it differs from the paper's, by name.

    Not the upper rate, which the paper searches for, and not the inverse, which makes the arm.
    """
    usual = by_pretext(cfg.model.pretext, AlignConfig, cfg.model.backbone)
    free = ("d_lr", "d_lr_from", "hypergrad", "eval_every")
    out = {
        leaf.name: get(cfg, leaf.path)
        for leaf in leaves(AlignConfig)
        if leaf.path[0] in ("lower", "masks", "upper", "bilevel")
        and leaf.name not in free
        and get(cfg, leaf.path) != usual.get(leaf.name, leaf.field.default)
    }
    return out if cfg.data.pool == "imagenet" else out | {"pool": cfg.data.pool}


def experiment(run: Path) -> dict[str, Any]:
    """What makes a run the one it is, but for its seed, start and machine; `task` says what it was tested on."""
    config = read_json(run / "config.json")
    task = {"dataset": config["data"]["dataset"], "data": read_json(run / "env.json")["data_sha256"][:12]}
    align = config["start"] is not None
    return {"task": task, "from align": align} | {k: config[k] for k in ("model", "data", "peft")}


def table(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row an arm; the first one is compared with each of the others (UsageError where they had other tests).

    `differs` has the settings, other than seed, start and machine, in which an arm is not like the first: by name, the
    first one's value and this one's.
    """
    rows = []
    for arm in arms:
        if arm.task != arms[0].task:
            raise UsageError(f"{arm.name} was tested on {arm.task}, {arms[0].name} on {arms[0].task}: not comparable")
        row = {"arm": arm.name, "seeds": len(arm.accuracies), "unit": arm.unit, "mean": arm.mean, "std": arm.std}
        found = None if arm is arms[0] else versus(arms[0], arm)
        row |= {"metric": arm.metric, "paper": arm.published._asdict() if arm.published else None}
        pairs = {key: [arms[0].settings.get(key), arm.settings.get(key)] for key in arms[0].settings | arm.settings}
        row |= {"differs": {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}}
        row |= {"accuracies": arm.accuracies, "counts": arm.counts}
        rows.append(row | {"first_minus_this": found._asdict() if found else None})
    return rows


def differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each row of `table` whose settings are not the first one's."""
    return [
        f"{row['arm']} differs from {rows[0]['arm']} in "
        + ", ".join(f"{name} {here} ({there} there)" for name, (there, here) in row["differs"].items())
        for row in rows
        if row["differs"]
    ]
