"""What finished runs are worth: scores on a split, seeds in summary, the exact permutation test (App. C.2.1).

Leaves out: attention rollout and representation similarity, which are in `rollout` and `similarity`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config import RunError, UsageError
from paper import Reported, reported
from runtime import Score, read_from, read_json, runs_in

EXACT_SPLITS = 3_000_000  # 12 against 12 seeds are 2.7 million splits, some seconds; 8 against 8 are 12,870
RESAMPLES = 100_000


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
    return Score(100 * float(right.mean()), mean, 100 * float(torch.stack(each).mean()))


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

    @property
    def mean(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n − 1); None for a single seed."""
        return torch.tensor(self.accuracies, dtype=torch.float64).std().item() if len(self.accuracies) > 1 else None


class Comparison(NamedTuple):
    """An arm against another."""

    difference: float  # mean(arm) − mean(against), percentage points
    p: float | None  # two-sided; None where an arm has a single seed
    splits: int  # how many splits of the pooled seeds were counted
    exact: bool  # all of them, or a random sample


def compare(arm: Sequence[float], against: Sequence[float]) -> Comparison:
    """Two-sample permutation test of means over all C(n + m, n) splits of the pooled accuracies.

    Two-sided as in scipy, twice the smaller tail; for equal numbers of seeds that is the share of splits whose means
    differ at least as much.

    >>> compare([3.0, 4.0], [1.0, 2.0])  # the observed split and its mirror are the 2 most extreme of 6
    Comparison(difference=2.0, p=0.3333333333333333, splits=6, exact=True)
    """
    import numpy as np
    from scipy.stats import permutation_test

    difference = sum(arm) / len(arm) - sum(against) / len(against)
    splits = comb(len(arm) + len(against), len(arm))
    if min(len(arm), len(against)) < 2:
        return Comparison(difference, None, splits, True)
    exact = splits <= EXACT_SPLITS
    test = permutation_test(
        (arm, against),
        lambda x, y, axis: np.mean(x, axis) - np.mean(y, axis),
        n_resamples=np.inf if exact else RESAMPLES,
        batch=100_000,
        alternative="two-sided",
        rng=np.random.default_rng(0),
    )
    return Comparison(difference, float(test.pvalue), splits if exact else RESAMPLES, exact)


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
        first, data = results[0], read_json(runs[0] / "config.json")["data"]
        if "aligned_by" not in first:
            raise UsageError(f"{runs[0]}: was made by an older version, run it again")
        method = {None: "PEFT", "mfac": "BiSSLight", "cg": "BiSSL"}.get(first["aligned_by"])
        like = method is not None and like_the_paper(read_json(runs[0] / "config.json"))
        published = reported(first["backbone"], data["dataset"], str(method), first["pretext"]) if like else None
        return Arm(path.name, values, first["unit"], settings[0]["task"], first["metric"], published)


def like_the_paper(config: Mapping[str, Any]) -> bool:
    """Whether a finetune run has the paper's setting, as far as it goes, so that its figure may stand beside it."""
    model, data, peft = config["model"], config["data"], config["peft"]
    official = str(model["weights"]).endswith(("_full.pth", "IN1K-vit.h.14-300e.pth.tar"))
    whole = not data["partial"] and data["voc_difficult"] == "ignore" and data["augment"] == "crop"
    return official and whole and (model["rank"], peft["epochs"], peft["optimizer"]) == (64, 200, "adamw")


def experiment(run: Path) -> dict[str, Any]:
    """What makes a run the one it is, but for its seed, start and machine; `task` says what it was tested on."""
    config = read_json(run / "config.json")
    task = {"dataset": config["data"]["dataset"], "data": read_json(run / "env.json")["data_sha256"][:12]}
    return {"task": task, "from align": config["start"] is not None} | {k: config[k] for k in ("model", "data", "peft")}


def table(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row an arm; the first one is compared with each of the others (UsageError where they had other tests)."""
    rows = []
    for arm in arms:
        if arm.task != arms[0].task:
            raise UsageError(f"{arm.name} was tested on {arm.task}, {arms[0].name} on {arms[0].task}: not comparable")
        row = {"arm": arm.name, "seeds": len(arm.accuracies), "unit": arm.unit, "mean": arm.mean, "std": arm.std}
        versus = None if arm is arms[0] else compare(arms[0].accuracies, arm.accuracies)
        row |= {"metric": arm.metric, "paper": arm.published._asdict() if arm.published else None}
        rows.append(row | {"accuracies": arm.accuracies, "first_minus_this": versus._asdict() if versus else None})
    return rows
