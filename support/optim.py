"""Training and scoring: optimisers with a schedule and clipping, a loop, accuracy (App. C)."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

from bisslight import Loss, Passes, Phi, columns

RateFn = Callable[[float, float], float]  # (step, base value) -> value at that step


@dataclass(frozen=True)
class Schedule:
    """The rate of step k from the base rate b: a line, then half a cosine (App. C.2, C.3).

        k < w = warmup:  s b + (b − s b) k / w,   s = start
        k ≥ w:           c b + (1 − c) end,   c = (1 + cos(π (k − w) / (total − w))) / 2

    The released program's W steps of warm-up are w = W + 1, with k from 1. MAE counts k from 0.

    >>> [round(Schedule(total=5, warmup=2, end=0.0)(k, 1.0), 3) for k in range(1, 6)]
    [0.5, 1.0, 0.75, 0.25, 0.0]
    """

    total: float  # steps
    warmup: float  # w, steps of the line
    end: float  # the last rate
    start: float = 0.0  # the first one, as a share of the base rate

    def __call__(self, k: float, base: float) -> float:
        if k < self.warmup:
            return self.start * base + (base - self.start * base) * k / self.warmup
        c = (1 + math.cos(math.pi * (k - self.warmup) / max(1, self.total - self.warmup))) / 2
        return c * base + (1 - c) * self.end


class Group(NamedTuple):
    """Tensors that share a base rate and a weight decay."""

    tensors: list[Tensor]
    lr: float
    weight_decay: float


def decay_groups(named: Mapping[str, Tensor], lr: float, weight_decay: float) -> list[Group]:
    """Rule of MAE and I-JEPA: vectors and biases are not decayed (the mask token is, it is 3-D)."""
    decayed, plain = Group([], lr, weight_decay), Group([], lr, 0.0)
    for name, tensor in named.items():
        (plain if tensor.ndim <= 1 or name.endswith(".bias") else decayed).tensors.append(tensor)
    return [decayed, plain]


@dataclass(eq=False)
class Optimiser:
    """opt_P, opt_D and all others: an optimiser of torch with a schedule and joint clipping."""

    groups: Sequence[Group]  # what is trained; tensors are updated in place
    rate: RateFn | None  # (step from 1, base rate) -> rate; None: the base rate at every step
    betas: tuple[float, float] | None  # AdamW's; None is SGD with momentum 0.9, as released
    clip: float | None = None  # largest L2 norm of all gradients together; None: no clipping
    decay: RateFn | None = None  # (step, base decay) -> decay, for groups that have one, as `rate`
    step: int = 0  # done so far

    def __post_init__(self) -> None:
        self.groups = [group for group in self.groups if group.tensors]
        params = [{"params": group.tensors} for group in self.groups]
        self.torch: torch.optim.Optimizer = (
            torch.optim.SGD(params, lr=0.0, momentum=0.9)
            if self.betas is None
            else torch.optim.AdamW(
                params, lr=0.0, betas=self.betas, fused=not self.groups[0].tensors[0].is_meta
            )
        )

    def update(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """One step; clips the gradients in place and returns their joint norm before clipping."""
        for tensor, gradient in zip(tensors, gradients, strict=True):
            same = gradient.stride() == tensor.stride()  # fused AdamW reads in the order of storage
            tensor.grad = gradient if same else torch.empty_like(tensor).copy_(gradient)
        norm = torch.nn.utils.clip_grad_norm_(tensors, self.clip or math.inf)
        self.step += 1
        for params, (_, lr, decay) in zip(self.torch.param_groups, self.groups, strict=True):
            params["lr"] = self.rate(self.step, lr) if self.rate else lr
            params["weight_decay"] = self.decay(self.step, decay) if self.decay and decay else decay
        self.torch.step()
        self.torch.zero_grad()
        return norm


def trainable(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Phi:
    """Fresh leaf copies that a gradient can be taken for."""
    return {
        name: tensor.detach().contiguous().to(device, copy=True).requires_grad_()
        for name, tensor in tensors.items()
    }


def trained(
    cfg: Any, loss: Loss, opt: Optimiser, batches: Iterator[Any], piece: int, what: str
) -> Iterator[dict[str, Any]]:
    """A step per batch; yields the mean loss of every `piece` steps (Diverged, naming `what`)."""
    tensors = [tensor for group in opt.groups for tensor in group.tensors]
    amp = cfg.amp and tensors[0].is_cuda

    passes = Passes(cfg.micro_batch, amp)

    def step(batch: Any) -> tuple[Tensor, Tensor]:
        value, found = passes.value_and_gradients(loss, tensors, batch)
        return value, opt.update(tensors, found)

    while rows := [step(batch) for batch in itertools.islice(batches, piece)]:
        where = f"{what}, the {len(rows)} steps up to {opt.step}"
        losses = columns(("loss", "norm"), rows, where)["loss"]
        yield {"step": -(-opt.step // piece), "loss": fmean(losses)}


class Ended(BaseModel, frozen=True):
    """What every finished run has."""

    out: str
    cpu_seconds: float
    seconds: float
