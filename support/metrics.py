"""Scores: accuracy and 11-point mean average precision (App. C.2.1)."""

from statistics import fmean

import torch
from pydantic import BaseModel
from torch import Tensor


class Score(BaseModel, frozen=True):
    """How good a model is on a split."""

    accuracy: float  # top-1 in percent; for several classes per image, mean average precision
    loss: float  # mean over the images
    per_class: float | None = None  # mean over classes of the accuracy in each; None with mAP
    right: int | None = None  # how many images were right; None with mAP


def score(z: Tensor, targets: Tensor, losses: Tensor) -> Score:
    """Top-1 accuracy, or 11-point mAP where targets are (N, C) (App. C.2.1), on the CPU.

    z: logits (N, C); losses (N,). ValueError where no class has a positive image.
    """
    mean = float(losses.double().mean())
    if targets.ndim == 2:
        columns = zip(z.T, targets.T, strict=True)  # a class that no image shows counts nowhere
        each_ap = [average_precision(x, y) for x, y in columns if (y == 1).any()]
        return Score(accuracy=100 * fmean(each_ap), loss=mean)
    right = (z.argmax(1) == targets).double()
    each = [float(right[targets == k].mean()) for k in targets.unique()]
    return Score(accuracy=100 * float(right.mean()), loss=mean, per_class=100 * fmean(each),
                 right=int(right.sum()))  # fmt: skip


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """VOC's 11-point AP of a class: mean over t = 0, 0.1 ... 1 of the best precision at recall ≥ t.

    Labels are 1, −1, and 0 for difficult images, which count nowhere. Ties keep the order of the
    images. Recall is compared in whole numbers, since 0.7 is no exact float.

    >>> ap = average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([1, -1, 1]))
    >>> round(ap, 6)  # precision 1 up to recall 0.5, then 2/3: (6 + 5 * 2/3) / 11
    0.848485
    """
    scores, labels = scores[labels != 0], labels[labels != 0]
    hits = (labels == 1)[scores.argsort(descending=True, stable=True)].cumsum(0)
    precision = hits.double() / torch.arange(1, len(hits) + 1)
    return fmean(float(precision[10 * hits >= t * hits[-1]].max()) for t in range(11))
