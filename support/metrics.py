"""Program: accuracy and 11-point mean average precision (App. C.2.1)."""

from statistics import fmean

import torch
from pydantic import BaseModel
from torch import Tensor


class Score(BaseModel, frozen=True):
    """How good a model is on a split, such as the test images."""

    accuracy: float  # percent: top-1, or mAP where an image has several classes
    loss: float  # mean over the images
    per_class: float | None = None  # percent: mean of the accuracies in each class; None with mAP
    right: int | None = None  # how many images were right; None with mAP


def score(z: Tensor, targets: Tensor, losses: Tensor) -> Score:
    """Return the top-1 accuracy, or the 11-point mAP for several classes per image (App. C.2.1).

    z: logits (N, C). targets: classes (N,), or labels (N, C) as in `average_precision`. losses:
    (N,). All are on the CPU. Raises ValueError where no class has a positive image.
    """
    loss = float(losses.double().mean())
    if targets.ndim == 2:
        return Score(accuracy=100 * mean_average_precision(z, targets), loss=loss)
    right = (z.argmax(dim=1) == targets).double()  # (N,): 1 if right, else 0
    accuracies = [float(right[targets == k].mean()) for k in targets.unique()]  # one per class
    return Score(
        accuracy=100 * float(right.mean()),
        loss=loss,
        per_class=100 * fmean(accuracies),
        right=int(right.sum()),
    )


def mean_average_precision(z: Tensor, labels: Tensor) -> float:
    """Return the mean over classes of `average_precision`; logits z and labels are (N, C).

    Raises ValueError where no class has a positive image.
    """
    precisions = []
    for k in range(z.shape[1]):
        if (labels[:, k] == 1).any():  # a class that no image shows is left out of the mean
            precisions.append(average_precision(z[:, k], labels[:, k]))
    if not precisions:
        raise ValueError("no class has a positive image, so there is no average precision")
    return fmean(precisions)


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Return VOC's 11-point average precision of one class.

    It is the mean over t = 0, 0.1 ... 1 of the best precision at a recall of at least t. Scores
    are (N,). Labels (N,) are 1, −1, or 0 for difficult images, which are left out. Images with
    equal scores keep their order.

    >>> ap = average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([1, -1, 1]))
    >>> round(ap, 6)  # precision 1 up to recall 0.5, then 2/3: (6 + 5 * 2/3) / 11
    0.848485
    """
    counted = labels != 0
    order = scores[counted].argsort(descending=True, stable=True)
    positive = (labels[counted] == 1)[order]  # the images that count, best score first
    hits = positive.cumsum(0)  # positives among the first n images, n = 1 ... N
    precision = hits.double() / torch.arange(1, len(hits) + 1)
    positives = hits[-1]
    best = []
    for tenths in range(11):
        # recall = hits / positives ≥ tenths / 10, in whole numbers: 0.7 is no exact float
        reached = 10 * hits >= tenths * positives
        best.append(float(precision[reached].max()))
    return fmean(best)
