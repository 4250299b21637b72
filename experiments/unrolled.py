"""The derivative of the lower level's end with respect to θ_D, through the steps that were taken.

Eq. 5 holds at the minimum of Eq. 4. Algorithm 1 does not go there: it takes N_L steps of AdamW from
where the last alternation ended. Here these steps are taken once more, as functions of θ_D, and
autograd goes back through all of them: the gradients of L^P and of the spring, clipping, both
moments of Adam, its division, weight decay, and φ_P, which moves with θ_P.

    J     the derivative of θ_P after the N_L steps with respect to θ_D before them
    v̂     Adam's second moment of the gradients of θ_P, after the N_L steps
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bisslight import Map, Phi, PretextTask, State
from support.optim import Optimiser


class Moments(NamedTuple):
    """AdamW's means of a tensor's gradients and of their squares."""

    m: Tensor
    v: Tensor


class Start(NamedTuple):
    """Where the lower level of an alternation started."""

    theta_P: Tensor
    theta_D: Tensor
    phi_P: Phi
    moments: list[Moments]  # of θ_P, and of each tensor of φ_P
    step: int  # steps that were taken before


class Lower(Iterator[Any]):
    """The pretext batches for Algorithm 1; keeps what the lower level can be repeated from.

    Algorithm 1 asks for a batch right before each lower step. Before the first one of an
    alternation everything is copied.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        state: State,
        task: PretextTask[Any],
        lower_steps: int,
        lam: float,
    ) -> None:
        self.batches = batches
        self.state = state
        self.task = task
        self.lower_steps = lower_steps
        self.lam = lam
        self.given: list[Any] = []  # the batches of this alternation

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if len(self.given) in (0, self.lower_steps):
            self.start = copy_start(self.state)
            self.given = []
        batch = next(self.batches)
        self.given.append(batch)
        return batch

    @property
    def opt_P(self) -> Optimiser:
        """AdamW of θ_P and φ_P, with its rates."""
        assert isinstance(self.state.opt_P, Optimiser)
        return self.state.opt_P


def copy_start(state: State) -> Start:
    """What the next lower step starts from."""
    opt_P = state.opt_P
    assert isinstance(opt_P, Optimiser)
    phi_P = {name: tensor.detach().clone() for name, tensor in state.phi_P.items()}
    moments = []
    for tensor in (state.theta_P, *state.phi_P.values()):
        kept = opt_P.wrapped.state.get(tensor, {})  # empty before the first step
        m, v = (kept.get(name, torch.zeros_like(tensor)) for name in ("exp_avg", "exp_avg_sq"))
        moments.append(Moments(m.detach().clone(), v.detach().clone()))
    theta_P, theta_D = state.theta_P.detach().clone(), state.theta_D.detach().clone()
    return Start(theta_P, theta_D, phi_P, moments, opt_P.step)


def end_of_lower_steps(lower: Lower, theta_D: Tensor, graph: bool = False) -> Tensor:
    """θ_P after the lower steps of this alternation, had they been taken with this θ_D.

    `graph`: keep the graph of all steps, so that the result can be differentiated.
    """
    start, opt_P = lower.start, lower.opt_P
    tensors = [start.theta_P, *start.phi_P.values()]
    moments = start.moments
    settings = settings_of(lower)
    for step, batch in enumerate(lower.given, start.step + 1):
        if not (graph and tensors[0].grad_fn):  # without a graph every step starts from leaves
            tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        phi_P = dict(zip(start.phi_P, tensors[1:], strict=True))
        # fused attention has no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            loss = lower.task.loss(tensors[0], phi_P, batch)
            gradients = [*torch.autograd.grad(loss, tensors, create_graph=graph)]
        with torch.set_grad_enabled(graph):
            gradients[0] = gradients[0] + lower.lam * (tensors[0] - theta_D)  # l.7
            gradients = clip(gradients, opt_P.clip)
            moved = []
            for each in zip(tensors, gradients, moments, settings, strict=True):
                moved.append(adamw(*each, step))
        tensors = [tensor for tensor, _ in moved]
        moments = [kept for _, kept in moved]
    return tensors[0]


class Settings(NamedTuple):
    """AdamW's of a tensor."""

    rate: Callable[[int], float]  # (number of the step) -> the learning rate
    weight_decay: float
    betas: tuple[float, float]
    eps: float


def settings_of(lower: Lower) -> list[Settings]:
    """Those of θ_P, and of each tensor of φ_P."""
    opt_P = lower.opt_P
    found: dict[int, Settings] = {}
    for group, of_torch in zip(opt_P.groups, opt_P.wrapped.param_groups, strict=True):

        def rate(step: int, base: float = group.lr) -> float:
            return opt_P.rate(step, base) if opt_P.rate else base

        of_group = Settings(rate, group.weight_decay, of_torch["betas"], of_torch["eps"])
        found |= {id(tensor): of_group for tensor in group.tensors}
    return [found[id(tensor)] for tensor in (lower.state.theta_P, *lower.state.phi_P.values())]


def clip(gradients: list[Tensor], most: float) -> list[Tensor]:
    """The gradients, made shorter together where their joint norm is above `most`."""
    if most == math.inf:
        return gradients
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1)  # as torch has it
    return [factor * gradient for gradient in gradients]


def adamw(
    tensor: Tensor, gradient: Tensor, moments: Moments, settings: Settings, step: int
) -> tuple[Tensor, Moments]:
    """A tensor and its moments after a step of AdamW.

    Where v is 0, no gradient was ever seen: LoRA's A in the very first step, as B is 0 there. Such
    a number does not move, and has no derivative here; Adam's would be 1 / eps.
    """
    rate = settings.rate(step)
    beta_m, beta_v = settings.betas
    m = beta_m * moments.m + (1 - beta_m) * gradient
    v = beta_v * moments.v + (1 - beta_v) * gradient.square()
    moves = v > 0
    root = torch.where(moves, v, 1.0).sqrt() / (1 - beta_v**step) ** 0.5
    change = torch.where(moves, m / (1 - beta_m**step) / (root + settings.eps), 0.0)
    moved = tensor * (1 - rate * settings.weight_decay) - rate * change
    return moved, Moments(m, v)


def unrolled(lower: Lower) -> Map:
    """The function g -> Jᵀ g; of L^D(θ_P) it is the derivative with respect to θ_D.

    All queries of an alternation share one graph.
    """
    theta_D = lower.start.theta_D.clone().requires_grad_()
    end = end_of_lower_steps(lower, theta_D, graph=True)

    def solve(g: Tensor) -> Tensor:
        return torch.autograd.grad(end, theta_D, g, retain_graph=True)[0]

    return solve


def divided(lower: Lower) -> Map:
    """The function g -> g / (√v̂ + eps): each number as Adam would scale it."""
    opt_P = lower.opt_P
    v = opt_P.wrapped.state[lower.state.theta_P]["exp_avg_sq"]
    settings = settings_of(lower)[0]
    root = (v / (1 - settings.betas[1] ** opt_P.step)).sqrt() + settings.eps

    def solve(g: Tensor) -> Tensor:
        return torch.div(g, root)

    return solve
