"""Downstream training of the head alone (probing) or of θ and the head (PEFT), App. C.2; the choice of a rate.

    L^D(θ, φ_D)   `downstream_loss`: cross entropy of a linear head on the class token
    probing       φ_D alone at fixed θ, at the upper level's constant rate, before Algorithm 1 starts (App. C.3)
    PEFT          θ and a fresh φ_D, warm-up and cosine; the best validation epoch is kept together with its head

Leaves out: label smoothing, mixup, layer-wise rates (the paper uses none).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Diverged, RunError
from lora import Backbone, Phi, logits
from runtime import Group, Optimiser, Score

Examples = tuple[Tensor, Tensor]  # images (B, 3, H, W), targets (B,)
DIRECT_GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # App. C.2: from the pretrained backbone
ALIGNED_GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # App. C.2: after BiSSLight


def downstream_loss(backbone: Backbone) -> Callable[..., Tensor]:
    """L^D as a function (θ, φ_D, (images, targets), drop=None) -> mean cross entropy, a scalar."""

    def loss_D(theta: Tensor | None, phi_D: Phi, batch: Examples, drop: Tensor | None = None) -> Tensor:
        images, targets = batch
        return F.cross_entropy(logits(backbone, theta, phi_D, images, drop), targets)

    return loss_D


def optimiser(
    tensors: Iterable[Tensor],
    lr: float,
    weight_decay: float,
    schedule: Callable[[int, float], float],
    sgd: bool = False,
    clip: float | None = None,
) -> Optimiser:
    """The downstream optimiser (App. C.2): AdamW 0.9/0.999 with decay on θ and on the whole head, its bias included."""
    return Optimiser([Group(list(tensors), lr, weight_decay)], schedule, None if sgd else (0.9, 0.999), clip)


def probe(
    loss_D: Callable[..., Tensor], theta: Tensor, phi_D: Phi, opt: Optimiser, batches: Iterable[Examples]
) -> Iterator[float]:
    """Train φ_D in place at fixed θ, without drop path; yields the loss of each step."""
    fixed = theta.detach()
    for step, batch in enumerate(batches, 1):
        value = loss_D(fixed, phi_D, batch)
        opt.update(zip(phi_D.values(), torch.autograd.grad(value, list(phi_D.values())), strict=True))
        yield checked(value, "linear probing", step)


class Outcome(NamedTuple):
    """One PEFT run: its best validation epoch and that epoch's tensors."""

    epoch: int
    val: Score
    theta: Tensor
    phi_D: Phi


def peft(
    loss_D: Callable[..., Tensor],
    theta: Tensor,
    phi_D: Phi,
    opt: Optimiser,
    batches: Iterator[tuple[Examples, Tensor | None]],
    epochs: int,
    steps_per_epoch: int,
    validate: Callable[[Tensor, Phi], Score],
    eval_every: int = 1,
    report: Callable[[int, float, Score | None], None] = lambda epoch, loss, val: None,
) -> Outcome:
    """Fine-tune θ and φ_D in place; returns copies from the best validated epoch (accuracy, ties by loss).

    Args:
        batches: ((images, targets), drop-path factors), epochs * steps_per_epoch of them.
        validate: (θ, φ_D) -> score on the validation split, every `eval_every` epochs and after the last one.
        report: called each epoch with its number from 1, the mean of its batch losses, and the score if validated.
    """
    tensors = [theta, *phi_D.values()]
    best: Outcome | None = None
    for epoch in range(1, epochs + 1):
        losses = []
        for _ in range(steps_per_epoch):
            batch, drop = next(batches)
            value = loss_D(theta, phi_D, batch, drop)
            opt.update(zip(tensors, torch.autograd.grad(value, tensors), strict=True))
            losses.append(value.detach())
        mean = checked(torch.stack(losses).mean(), "fine-tuning, epoch", epoch)
        val = validate(theta, phi_D) if epoch % eval_every == 0 or epoch == epochs else None
        if val is not None:
            checked(torch.tensor(val.loss), "validation after epoch", epoch)
        if val is not None and (best is None or val.rank > best.val.rank):
            copies = {name: tensor.detach().clone() for name, tensor in phi_D.items()}
            best = Outcome(epoch, val, theta.detach().clone(), copies)
        report(epoch, mean, val)
    assert best is not None  # the last epoch is always validated
    return best


def checked(loss: Tensor, what: str, number: int) -> float:
    """The loss as a number (Diverged where it is not finite)."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise Diverged(f"{what} {number}: the loss is {value}, try a lower learning rate")
    return value


def choose(validated: Mapping[float, Sequence[Score | None]]) -> float:
    """The rate with the best mean validation accuracy over the seeds, ties by mean loss. None is a run that diverged.

    >>> choose({1e-3: [Score(70.0, 1.0), Score(72.0, 0.9)], 1e-2: [Score(90.0, 0.5), None]})
    0.001
    """
    mean = {
        lr: Score(sum(s.accuracy for s in scores if s) / len(scores), sum(s.loss for s in scores if s) / len(scores))
        for lr, scores in validated.items()
        if all(scores)
    }
    if not mean:
        raise RunError("every learning rate diverged, lower --lr or extend --grid downwards")
    return max(mean, key=lambda lr: mean[lr].rank)
