"""Paper: the downstream head h^D and its loss L^D(θ, φ_D) (Eq. 3; App. C.2 and D.1).

Letters are those of bisslight.py's glossary. New here are

    φ_D  phi_D  {"weight" (classes, dim), "bias" (classes,)} of a linear layer, and, where BatchNorm
                comes before it (I-JEPA, App. D.1), {"norm.weight", "norm.bias"}
    stats       the running moments of that BatchNorm, {"norm.mean", "norm.var"}; no part of φ_D
    x           features (B, dim), the head's input; dim is the width of a token
    z           logits (B, classes)

The backbone is a function (images, theta, drop=...) -> tokens, with timm's network as its attribute
`vit`, which says how they are pooled (`lora.Backbone`).

    >>> phi_D = init_head(dim=2, classes=3, rng=torch.Generator())
    >>> z = logits(torch.zeros(4, 2), phi_D)  # of features that are 0: the bias
    >>> cross_entropy(z, torch.tensor([0, 1, 2, 0])).shape
    torch.Size([4])
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Phi = dict[str, Tensor]  # a head's trainable tensors by name
Multilabel = Literal["softmax", "bce"]  # the loss where an image has several classes
NORM_EPS = 1e-6  # of the BatchNorm in a head


class Examples(NamedTuple):
    """A labelled batch."""

    images: Tensor  # (B, 3, height, width)
    targets: Tensor  # (B,) classes, or (B, classes) where an image has several: `cross_entropy`
    drop: Tensor | None = None  # (B, K, 2) drop-path factors, used with drop_path=True


def init_head(dim: int, classes: int, rng: torch.Generator) -> Phi:
    """φ_D of a linear layer (App. C.2), weight (classes, dim) and bias; U(±1/√dim) as in torch."""
    bound = 1 / math.sqrt(dim)
    weight = torch.empty(classes, dim).uniform_(-bound, bound, generator=rng)
    bias = torch.empty(classes).uniform_(-bound, bound, generator=rng)
    return {"weight": weight, "bias": bias}


def init_norm(dim: int) -> tuple[Phi, Phi]:
    """A fresh BatchNorm before the linear layer (App. D.1): its part of φ_D, and its statistics.

    All four tensors are (dim,).
    """
    phi = {"norm.weight": torch.ones(dim), "norm.bias": torch.zeros(dim)}
    return phi, {"norm.mean": torch.zeros(dim), "norm.var": torch.ones(dim)}


def downstream_loss(
    backbone: Any,  # noqa: ANN401  # such as `lora.Backbone`
    theta: Tensor | None,
    phi_D: Phi,
    batch: Examples,
    drop_path: bool = False,
    multilabel: Multilabel = "softmax",
    stats: Phi | None = None,
) -> Tensor:
    """L^D(θ, φ_D) of a batch, a scalar; line 12 (at θ_P) and line 14 (at θ_D) of Algorithm 1.

    drop_path=True is for the passes that train (θ_D and φ_D in align, everything in PEFT): drop
    path is on, and a BatchNorm head updates its running statistics `stats`. The pass at θ_P leaves
    it False. In both cases a BatchNorm head normalises with the moments of this batch, those of all
    processes together.
    """
    drop = batch.drop if drop_path else None
    x = features(backbone, theta, batch.images, drop)
    if "norm.weight" in phi_D:
        # float64: the variance of nearly equal features is a small difference of large numbers
        phi_D = phi_D | moments(x.double(), stats if drop_path else None)
    return cross_entropy(logits(x, phi_D), batch.targets, multilabel).mean()


def features(
    backbone: Any,  # noqa: ANN401
    theta: Tensor | None,
    images: Tensor,
    drop: Tensor | None = None,
) -> Tensor:
    """The head's input (B, dim): class token (MAE, App. C.2) or mean of patches (I-JEPA, D.1).

    With timm's other networks it is what timm pools for their classifier; never a register.
    """
    return backbone.vit.forward_head(backbone(images, theta, drop=drop), pre_logits=True)  # type: ignore[no-any-return]


def logits(x: Tensor, phi_D: Phi) -> Tensor:
    """h^D: a linear layer, which makes logits (B, classes) of features x (B, dim).

    If φ_D has a BatchNorm, that comes before the linear layer, and `phi_D` holds the moments that
    it normalises with, too: "norm.mean" and "norm.var".
    """
    if "norm.weight" in phi_D:  # moments of the batch in training, running ones in scoring
        z = (x.double() - phi_D["norm.mean"]) * (phi_D["norm.var"] + NORM_EPS).rsqrt()
        x = z.to(phi_D["norm.weight"]) * phi_D["norm.weight"] + phi_D["norm.bias"]
    return F.linear(x, phi_D["weight"], phi_D["bias"])


def moments(x: Tensor, stats: Phi | None) -> Phi:
    """BatchNorm's moments of a batch: {"norm.mean", "norm.var"}, (dim,), the variance biased.

    They are those of all processes together; x (B, dim) are this one's features. If there are
    `stats`, the running moments, each becomes 0.9 times what it was plus 0.1 times the batch's,
    here with the unbiased variance.
    """
    count = SumOverProcesses.apply(x.new_tensor(float(len(x))))  # images of all processes
    mean = SumOverProcesses.apply(x.sum(0)) / count  # (dim,)
    var = SumOverProcesses.apply((x - mean).square().sum(0)) / count
    if stats:
        stats["norm.mean"].lerp_(mean.detach().to(stats["norm.mean"]), 0.1)
        unbiased = var * count / (count - 1)
        stats["norm.var"].lerp_(unbiased.detach().to(stats["norm.var"]), 0.1)
    return {"norm.mean": mean, "norm.var": var}


class SumOverProcesses(torch.autograd.Function):
    """x summed over processes. All processes' losses depend on it, so gradients are summed too."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, *grad: Tensor) -> Tensor:
        return SumOverProcesses.apply(*grad)  # type: ignore[no-any-return]


def cross_entropy(z: Tensor, targets: Tensor, multilabel: Multilabel = "softmax") -> Tensor:
    """Loss of each image, (B,), from logits z (B, classes).

    Targets are classes (B,), or (B, classes) where an image has several: 1 present, −1 absent, 0 if
    the class appears only as objects that VOC marks difficult; such entries do not count. For
    several, "softmax" is −Σ log softmax(z) over the present classes (as released; paper silent),
    and "bce" the mean of the binary cross entropy over the entries that are not 0.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([[1, 1, -1, 0]])).exp()  # (1/4 · 1/4)⁻¹
    tensor([16.])
    """
    if targets.ndim == 1:
        return F.cross_entropy(z, targets, reduction="none")
    present = (targets == 1).to(z.dtype)
    counts = (targets != 0).to(z.dtype)
    if multilabel == "softmax":
        return -(present * z.log_softmax(1)).sum(1)
    total = F.binary_cross_entropy_with_logits(z, present, counts, reduction="none").sum(1)
    return total / counts.sum(1).clamp_min(1)
