"""Optimisers: AdamW or SGD with clipping, a warm-up and half a cosine (App. C.2, C.3)."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rate = Callable[[float, float], float]  # (step, base rate) -> rate


def schedule(total: float, warmup: float, end: float, start: float = 0.0) -> Rate:
    """The rate of step k from the base rate b: a line, then half a cosine (App. C.2, C.3).

        k < w = warmup:  s b + (b − s b) k / w,   s = start
        k ≥ w:           c b + (1 − c) end,   c = (1 + cos(π (k − w) / (total − w))) / 2

    The released program's W steps of warm-up are w = W + 1, with k from 1. MAE counts k from 0.

    >>> [round(schedule(total=5, warmup=2, end=0.0)(k, 1.0), 3) for k in range(1, 6)]
    [0.5, 1.0, 0.75, 0.25, 0.0]
    """

    def rate(k: float, base: float) -> float:
        if k < warmup:
            return start * base + (base - start * base) * k / warmup
        c = (1 + math.cos(math.pi * (k - warmup) / max(1, total - warmup))) / 2
        return c * base + (1 - c) * end

    return rate


def constant(k: float, base: float) -> float:
    """The same at every step."""
    return base


class Group(NamedTuple):
    """Tensors that share a base rate and a weight decay."""

    tensors: list[Tensor]
    lr: float
    weight_decay: float


def decay_groups(named: Mapping[str, Tensor], lr: float, weight_decay: float) -> list[Group]:
    """Rule of MAE and I-JEPA: vectors and biases are not decayed (the mask token is, it is 3-D)."""
    decayed, plain = Group([], lr, weight_decay), Group([], lr, 0.0)
    for name, tensor in named.items():
        group = plain if tensor.ndim <= 1 or name.endswith(".bias") else decayed
        group.tensors.append(tensor)
    return [decayed, plain]


class Optimiser:
    """opt_P or opt_D of Algorithm 1: a torch optimiser with a schedule and joint clipping.

    Args:
        groups: what is trained; tensors are updated in place.
        schedule: (step from 1, base rate) -> rate; decay: the same for weight decays above 0.
        betas: AdamW's; None is SGD with momentum 0.9, as released.
        clip: largest L2 norm of all gradients together; None: no clipping.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        schedule: Rate,
        betas: tuple[float, float] | None,
        clip: float | None = None,
        decay: Rate = constant,
    ) -> None:
        self.schedule, self.clip, self.decay, self.step = schedule, clip, decay, 0
        self.groups = [group for group in groups if group.tensors]
        params = [{"params": group.tensors} for group in self.groups]
        self.torch: torch.optim.Optimizer = (
            torch.optim.SGD(params, lr=0.0, momentum=0.9)
            if betas is None
            else torch.optim.AdamW(
                params, lr=0.0, betas=betas, fused=not self.groups[0].tensors[0].is_meta
            )
        )

    def update(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """One step on (tensor, gradient) pairs, which it clips; returns the joint norm before."""
        tensors = []
        for tensor, gradient in pairs:
            same = gradient.stride() == tensor.stride()  # fused AdamW reads in the order of storage
            tensor.grad = gradient if same else torch.empty_like(tensor).copy_(gradient)
            tensors.append(tensor)
        norm = torch.nn.utils.clip_grad_norm_(tensors, self.clip or math.inf)
        self.step += 1
        for params, group in zip(self.torch.param_groups, self.groups, strict=True):
            params["lr"] = self.schedule(self.step, group.lr)
            decay = self.decay if group.weight_decay else constant  # what has none gets none
            params["weight_decay"] = decay(self.step, group.weight_decay)
        self.torch.step()
        self.torch.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "torch": self.torch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.torch.load_state_dict(state["torch"])


def trainable(
    tensors: Mapping[str, Tensor], device: torch.device | None = None
) -> dict[str, Tensor]:
    """Fresh leaf copies that a gradient can be taken for."""
    return {
        name: tensor.detach().contiguous().to(device, copy=True).requires_grad_()
        for name, tensor in tensors.items()
    }
