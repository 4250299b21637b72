"""Downstream training of the head alone (probing) or of θ and the head (PEFT), App. C.2; the choice of a rate.

    L^D(θ, φ_D)   `downstream_loss`: cross entropy of the head on the class token, or on the mean of the patches
    probing       φ_D alone at fixed θ, at the upper level's constant rate, before Algorithm 1 starts (App. C.3)
    PEFT          θ and a fresh φ_D, warm-up and cosine; the best validation epoch is kept together with its head
    a rate        `choose` for PEFT; for the upper level `upper_rates`, of which the largest not `unstable` is taken

Leaves out: label smoothing, mixup, layer-wise rates (the paper uses none).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Diverged
from lora import Backbone, Here, Phi, logits
from parallel import alone, later
from runtime import Group, Optimiser, Score

Examples = tuple[Tensor, Tensor]  # images (B, 3, H, W), targets (B,) or, several classes an image, (B, C)
DIRECT_GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # App. C.2: from the pretrained backbone
ALIGNED_GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # App. C.2: after BiSSLight


Several = Literal["softmax", "bce"]


def downstream_loss(
    backbone: Backbone, several: Several = "softmax", summed: Callable[[Tensor], Tensor] = Tensor.clone
) -> Callable[..., Tensor]:
    """L^D as a function (θ, φ_D, (images, targets), here=None) -> mean `cross_entropy`, a scalar.

    `summed` is `lora.logits`'s: BatchNorm over a batch that several processes share.
    """

    def loss_D(theta: Tensor | None, phi_D: Phi, batch: Examples, here: Here | None = None) -> Tensor:
        images, targets = batch
        z = logits(backbone, theta, phi_D, images, here, training=True, summed=summed)
        return cross_entropy(z, targets, several).mean()

    return loss_D


def cross_entropy(z: Tensor, targets: Tensor, several: Several = "softmax") -> Tensor:
    """Loss of each image, (B,), from logits (B, C).

    Targets are classes (B,), or (B, C) with 1 for present, −1 for absent, 0 for not to be counted. For those, softmax
    is the cross entropy with a target 1 at every present class, −Σ_c y_c log softmax(z)_c (released; the paper does not
    say); bce is the mean binary cross entropy over the classes that count.
    """
    if targets.ndim == 1:
        return F.cross_entropy(z, targets, reduction="none")
    present = (targets == 1).to(z.dtype)
    if several == "softmax":
        return -(present * z.log_softmax(1)).sum(1)
    counts = (targets != 0).to(z.dtype)
    each = F.binary_cross_entropy_with_logits(z, present, reduction="none")
    return (each * counts).sum(1) / counts.sum(1).clamp_min(1)


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
    loss_D: Callable[..., Tensor],
    theta: Tensor,
    phi_D: Phi,
    opt: Optimiser,
    batches: Iterable[tuple[Any, Any]],
    how: Callable[..., list[Tensor]] = alone,
) -> Iterator[float]:
    """Train φ_D in place at fixed θ; yields the loss of each step, once it is done. `how`: as in Algorithm 1."""
    head = list(phi_D.values())
    for step, (batch, here) in enumerate(batches, opt.step + 1):
        value, *found = how(partial(loss_D, theta.detach(), phi_D), head, batch, here)
        norm = opt.update(zip(head, found, strict=True))
        yield checked(value + 0 * norm, "linear probing, step", step)


class Outcome(NamedTuple):
    """One PEFT run: its best validation epoch and that epoch's tensors."""

    epoch: int
    val: Score
    theta: Tensor
    phi_D: Phi  # with the statistics of its BatchNorm, if it has one


@dataclass
class Progress:
    """How far a PEFT run has come, beside θ, φ_D, its statistics and the optimiser's step."""

    losses: list[Tensor] = field(default_factory=list)  # of the unfinished epoch, a step each
    best: Outcome | None = None  # of the validated epochs


def peft(
    loss_D: Callable[..., Tensor],
    theta: Tensor,
    phi_D: Phi,
    opt: Optimiser,
    batches: Iterator[tuple[Any, Any]],
    epochs: int,
    steps_per_epoch: int,
    validate: Callable[[Tensor, Phi], Score],
    eval_every: int = 1,
    report: Callable[[int, float, Score | None], None] = lambda epoch, loss, val: None,
    stats: Phi | None = None,
    *,
    now: Progress | None = None,
    how: Callable[..., list[Tensor]] = alone,
    pause: Callable[[Progress], None] = lambda now: None,
) -> Outcome:
    """Fine-tune θ and φ_D in place; returns copies from the best validated epoch (accuracy, ties by loss).

    Args:
        batches: (Examples, Here), from the optimiser's step on, up to epochs * steps_per_epoch.
        validate: (θ, φ_D with `stats`) -> score on the validation split, every `eval_every` epochs and after the last.
        stats: statistics that the passes update and that belong to the head when it is used.
        report: called each epoch with its number from 1, the mean of its batch losses, and the score if validated.
        now: where to go on, with an optimiser that knows its step.
        how, pause: as in Algorithm 1.
    """
    tensors = [theta, *phi_D.values()]
    now = now or Progress()
    late = int(theta.is_cuda)  # as in Algorithm 1, a GPU's step is looked at when the next one has been sent
    seen: list[Callable[[], Tensor]] = []
    for epoch in range((opt.step - len(now.losses)) // steps_per_epoch + 1, epochs + 1):
        for _ in range(len(now.losses), steps_per_epoch):
            batch, here = next(batches)
            value, *found = how(partial(loss_D, theta, phi_D), tensors, batch, here)
            norm = opt.update(zip(tensors, found, strict=True))
            now.losses.append(value + 0 * norm)  # not finite where either is not
            seen = [*seen[-1:], later(now.losses[-1])]
            if len(seen) > late:
                checked(seen[-1 - late](), "fine-tuning, step", opt.step - late)
            pause(now)
        mean = checked(torch.stack(now.losses).mean(), "fine-tuning, epoch", epoch)
        now.losses = []
        head = phi_D | (stats or {})
        val = validate(theta, head) if epoch % eval_every == 0 or epoch == epochs else None
        if val is not None:
            checked(torch.tensor(val.loss), "validation after epoch", epoch)
        if val is not None and (now.best is None or val.rank > now.best.val.rank):
            copies = {name: tensor.detach().clone() for name, tensor in head.items()}
            now.best = Outcome(epoch, val, theta.detach().clone(), copies)
        report(epoch, mean, val)
    assert now.best is not None  # the last epoch is always validated
    return now.best


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
        raise Diverged("every learning rate diverged, try lower ones")
    return max(mean, key=lambda lr: mean[lr].rank)


# --- the upper level's rate (App. C.3) -------------------------------------------------------------------------------

SHARES = (2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 7, 1 / 10)  # App. C.3: 2/3, 1/2, 1/3, further down by need
ABOVE, FLOOR, COLLAPSE = 3.0, 0.25, 0.5


def upper_rates(best: float) -> list[float]:
    """Candidates for the upper level from the best rate of direct PEFT, the largest first, to three digits.

    >>> upper_rates(1e-3)[:3]
    [0.000667, 0.0005, 0.000333]
    """
    return [float(f"{best * share:.3g}") for share in SHARES]


def unstable(losses: Mapping[str, Sequence[float]], validated: Sequence[float]) -> str | None:
    """Why a run is not stable so far, None if it is. The paper does not define "stable optimization"; here it is

    - every loss and gradient is finite, which the loop itself sees to;
    - no loss, averaged over an alternation, is above 3 times its running minimum, where a minimum below a quarter of
      the first alternation's loss counts as that quarter, so that a loss near zero may double;
    - no validation score of θ_D is below half of the best one so far.

    >>> unstable({"L^D(D)": [2.0, 1.0, 3.5]}, [60.0])
    'L^D(D) rose to 3.5, more than 3 times its minimum 1'
    >>> unstable({"L^D(D)": [2.0, 0.1, 0.3]}, [60.0, 29.0])
    'validation fell to 29.0 from 60.0'
    """
    for name, values in losses.items():
        least = max(min(values), FLOOR * values[0])
        if values[-1] > ABOVE * least:
            return f"{name} rose to {values[-1]:.4g}, more than {ABOVE:g} times its minimum {least:.4g}"
    if validated and validated[-1] < COLLAPSE * max(validated):
        return f"validation fell to {validated[-1]:.1f} from {max(validated):.1f}"
    return None
