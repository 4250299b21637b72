"""Program: learning rates, optimisers of groups of tensors, the loop over epochs (App. C)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from bisslight import Batch, BatchLoss, Passes, Phi, TorchOptimiser, columns

RateFn = Callable[[int, float], float]  # (number of the step, base value) -> value at that step


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

    def __call__(self, k: int, base: float) -> float:
        """The rate of step k."""
        if k < self.warmup:
            first = self.start * base
            return first + (base - first) * k / self.warmup
        falling = max(1, self.total - self.warmup)  # a run can be shorter than its warm-up
        c = (1 + math.cos(math.pi * (k - self.warmup) / falling)) / 2
        return c * base + (1 - c) * self.end


class Group(NamedTuple):
    """Tensors that share a base rate and a weight decay."""

    tensors: list[Tensor]
    lr: float
    weight_decay: float


def decay_groups(tensors: Iterable[Tensor], lr: float, weight_decay: float) -> list[Group]:
    """Two groups by MAE's and I-JEPA's rule: vectors are not decayed, all other tensors are.

    The mask token has three axes, so it is decayed. A group may be empty.
    """
    decayed = Group([], lr, weight_decay)
    undecayed = Group([], lr, 0.0)
    for tensor in tensors:
        # The authors' programs also look for "bias" in names. All biases here are vectors.
        is_vector = tensor.ndim <= 1
        group = undecayed if is_vector else decayed
        group.tensors.append(tensor)
    return [decayed, undecayed]


@dataclass(eq=False)
class Optimiser:
    """torch's AdamW or SGD with schedules and joint clipping: opt_P, opt_D and all others."""

    groups: Sequence[Group]  # the tensors, which are updated in place
    rate: RateFn | None  # (step from 1, base rate) -> rate; None: the base rate at every step
    betas: tuple[float, float] | None  # AdamW's; None: SGD with momentum 0.9, as released
    clip: float = math.inf  # largest L2 norm of all gradients together
    decay: RateFn | None = None  # (step, base decay) -> decay; None: the base decay at every step
    step: int = 0  # how many steps are done

    def __post_init__(self) -> None:
        self.groups = [group for group in self.groups if group.tensors]  # torch refuses empty ones
        params = [{"params": group.tensors} for group in self.groups]
        self.adamw_or_sgd: torch.optim.Optimizer
        # lr=0 is never used: `update` sets rate and decay before each step.
        if self.betas is None:
            self.adamw_or_sgd = torch.optim.SGD(params, lr=0.0, momentum=0.9)
        else:
            # Fused: all tensors in one pass, which is faster. torch lacks it on the device "meta",
            # where tensors have no numbers. A test trains there, to see that no step asks for any.
            fused = not self.groups[0].tensors[0].is_meta
            self.adamw_or_sgd = torch.optim.AdamW(params, lr=0.0, betas=self.betas, fused=fused)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are trained, group by group."""
        tensors = []
        for group in self.groups:
            tensors += group.tensors
        return tensors

    def update(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """Take one step, and return the joint norm of the gradients before they were clipped.

        1. Set learning rate and weight decay of each group to those of this step.
        2. Clip the gradients in place, and let torch's optimiser update the tensors.

        `tensors` are those of all groups, in any order, as long as `gradients` are in the same.
        """
        self.step += 1
        # torch keeps the settings of each group in a dict, which is changed here.
        for group, params in zip(self.groups, self.adamw_or_sgd.param_groups, strict=True):
            params["lr"] = group.lr
            if self.rate:
                params["lr"] = self.rate(self.step, group.lr)
            params["weight_decay"] = group.weight_decay
            # A group without decay, as that of vectors, has none at any step.
            if self.decay and group.weight_decay > 0:
                params["weight_decay"] = self.decay(self.step, group.weight_decay)

        # `TorchOptimiser` clips and takes the step. It keeps nothing, so it is made for each step.
        return TorchOptimiser(self.adamw_or_sgd, self.clip).update(tensors, gradients)


def trainable(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Phi:
    """Copy tensors, to a device if it is given, as leaves that gradients can be taken for."""
    copies = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().contiguous().to(device, copy=True)
        copies[name] = copy.requires_grad_()
    return copies


class TrainRecord(NamedTuple):
    """What is logged of an epoch, or of a part of a very long one."""

    step: int  # its number, from 1
    loss: float  # mean over its training steps

    def __str__(self) -> str:
        return f"loss {self.loss:.4g}"


def train_epochs(
    loss: BatchLoss,
    opt: Optimiser,
    batches: Iterable[Batch],
    steps_per_record: int,
    label: str,
    passes: Passes,
    after_step: Callable[[], None] | None = None,
) -> Iterator[TrainRecord]:
    """Take a step with each batch; yield a record of every so many steps, such as each epoch.

    A step has three parts:

    1. Compute the loss of the batch, and its gradients.
    2. Update the tensors of `opt`.
    3. Call `after_step`, if there is one.

    Args:
        loss: of a batch, the mean over its images.
        opt: what is trained; where its `step` is not 0, it goes on after a record.
        batches: those of the steps that are left.
        steps_per_record: those of an epoch, or fewer; the last record may have fewer steps.
        label: names what diverged, where a loss or gradient is not finite (Diverged).
        passes: how a batch passes through the network.
        after_step: called after each step, for what follows the network slowly, as a teacher does.
    """
    rows: list[tuple[Tensor, Tensor]] = []  # loss and gradient norm of each step of this record
    for batch in batches:
        value, gradients = passes.value_and_gradients(loss, opt.tensors, batch)  # value: the loss
        norm = opt.update(opt.tensors, gradients)
        if after_step:
            after_step()

        rows.append((value, norm))
        if len(rows) == steps_per_record:
            yield make_record(rows, opt.step, steps_per_record, label)
            rows = []

    if rows:
        yield make_record(rows, opt.step, steps_per_record, label)


def make_record(
    rows: list[tuple[Tensor, Tensor]], step: int, steps_per_record: int, label: str
) -> TrainRecord:
    """The record of the steps up to `step`. Only here the CPU waits for a GPU.

    `rows` has loss and gradient norm of each of these steps. Raises Diverged, which names the
    steps, if a loss or norm is not finite.
    """
    where = f"{label}, the {len(rows)} steps up to {step}"  # for the text of the error
    numbers = columns(("loss", "norm"), rows, where)  # {"loss": [...], "norm": [...]}, as floats
    number = math.ceil(step / steps_per_record)  # rounded up: the last one may have fewer steps
    return TrainRecord(step=number, loss=fmean(numbers["loss"]))
