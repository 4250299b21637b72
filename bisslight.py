"""BiSSLight: a light bilevel stage between self-supervised pretraining and PEFT. `align` is the paper's Algorithm 1.

    upper (Eq. 3)   min over θ_D, φ_D    L^D(θ_P*(θ_D), φ_D) + L^D(θ_D, φ_D)
    lower (Eq. 4)   θ_P*(θ_D) in argmin over θ_P, min over φ_P    L^P(θ_P, φ_P) + λ/2 |θ_P − θ_D|²

The glossary; every module keeps these letters.

    code                paper           meaning
    psi (Backbone.vit)  ψ               pretrained backbone weights, frozen, one copy for both levels
    theta_P, theta_D    θ_P, θ_D        LoRA parameters of the lower (pretext) and upper (downstream) level, each (K, p)
    phi_P, phi_D        φ_P, φ_D        pretext head (MAE's decoder), downstream head (a linear layer)
    loss_P, loss_D      L^P, L^D        (θ, φ, batch) -> scalar
    lam                 λ               coupling in Eq. 4 and M-FAC's damping γ = λ (Sec. 3.1); units 1/θ²
    G                   G               the N_L pretext gradients of one alternation, stored (K, N_L, p), block-major
    g                   ∇L^D            downstream gradient at θ_P (l.12), what the inverse is applied to
    q                   q               λ (F + λI)⁻¹ g, the implicit part of the upper gradient (l.13)
    alternations        T               lower_steps N_L, upper_steps N_U

    Eq. 4 eq:bissl_lower_level    Eq. 5 eq:bissl_upper_level_derivative    Eq. 7 eq:bissl_mfac_vi_calc
    Eq. 10 eq:bissl_mfac_upper_grad_approx    l.n line n of Algorithm 1 (alg:bisslight)

This file knows no pretext task, no dataset, no device and no file: tasks come in as `PretextTask`, inverses as
`Hypergradient`, batches as iterators, and what happens after an alternation (validation, checkpoints, progress) as a
function. Leaves out: several processes.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from config import Bilevel, Diverged
from mfac import Solve
from runtime import Optimiser

Phi = dict[str, Tensor]
Batch = TypeVar("Batch")
Loss = Callable[..., Tensor]  # (theta, phi, batch) -> scalar; L^D takes what acts at θ_D alone as a fourth


class PretextTask(Protocol[Batch]):
    """What a pretext task is to Algorithm 1. `mae.MAE` and `ijepa.IJEPA` are two, `examples/rotation.py` a third.

    A task holds f_θ and what its head looks like, and may hold a teacher. It is called in this order, from one thread:
    check; then for each lower step prepare (just before its step, not earlier), loss (as often as a hypergradient
    wants), after_step; state_dict at any time between alternations.
    """

    @property
    def phi(self) -> Phi:
        """φ_P's start: the head's trainable tensors by name."""
        ...

    def check(self, batch: Batch) -> None:
        """Refuse (UsageError) weights that do not belong to the task, as far as a first batch can tell."""
        ...

    def prepare(self, images: Tensor, rng: torch.Generator) -> Batch:
        """Turn images (B, 3, H, W) into a batch: views, masks, a teacher's answers. All randomness is from `rng`."""
        ...

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """L^P(θ, φ_P) of a prepared batch: pure, differentiable in θ and φ, no randomness, no drop path."""
        ...

    def after_step(self, theta_P: Tensor | None) -> None:
        """Called after line 9, for what follows θ_P slowly (a teacher); None where ψ itself is trained."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides θ and φ."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Hypergradient(Protocol):
    """(G, λ, θ_P, pretext loss of θ) -> Solve, which maps g to q. `mfac`: mfac, identity, exact; `cg`: cg."""

    def __call__(self, G: Tensor, lam: float, theta_P: Tensor, loss_P: Callable[[Tensor], Tensor], /) -> Solve: ...


@dataclass
class State:
    """All that Algorithm 1 changes. Leaf tensors, updated in place by their optimisers."""

    theta_P: Tensor
    theta_D: Tensor
    phi_P: Phi
    phi_D: Phi
    opt_P: Optimiser  # over theta_P and phi_P
    opt_D: Optimiser  # over theta_D and phi_D
    done: int = 0  # finished alternations

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only."""
        tensors = {"theta_P": self.theta_P, "theta_D": self.theta_D, "phi_P": self.phi_P, "phi_D": self.phi_D}
        return tensors | {"opt_P": self.opt_P.state_dict(), "opt_D": self.opt_D.state_dict(), "done": self.done}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.theta_P.copy_(state["theta_P"])
        self.theta_D.copy_(state["theta_D"])
        for phi, saved in ((self.phi_P, state["phi_P"]), (self.phi_D, state["phi_D"])):
            for name, tensor in phi.items():
                tensor.copy_(saved[name])
        self.opt_P.load_state_dict(state["opt_P"])
        self.opt_D.load_state_dict(state["opt_D"])
        self.done = state["done"]


class Log(NamedTuple):
    """One alternation in numbers. Losses are a value a step; `seconds` is wall time by phase."""

    alternation: int  # from 1
    loss_P: list[float]  # L^P at θ_P
    pull: list[float]  # λ/2 |θ_P − θ_D|², before each lower step
    loss_D_at_P: list[float]  # L^D at θ_P
    loss_D_at_D: list[float]  # L^D at θ_D
    norm_P: list[float]  # joint gradient norms before clipping
    norm_D: list[float]
    distance: float  # |θ_P − θ_D| at the end
    q_over_g: list[float]  # |q| / |g|: how much of the downstream gradient the inverse lets through
    cosine: list[float]  # of q and g; 1 with q_over_g = 1 means that the curvature had no say
    seconds: dict[str, float]


def align(
    s: State,
    cfg: Bilevel,
    loss_P: Loss,
    loss_D: Loss,
    hypergrad: Hypergradient,
    pretext: Iterator[Any],
    downstream: Iterator[tuple[Any, Any]],
    after_step: Callable[[Tensor], None],
    after: Callable[[State, Log], None],
    store: Tensor | None = None,
    loss_H: Loss | None = None,
    clock: "Clock | None" = None,
) -> Tensor:
    """Algorithm 1 from `s.done` on; returns θ_P (l.17). `s` is l.1 and l.2: θ_P and θ_D start equal.

    Args:
        loss_P: (θ, φ_P, batch), the pretext task's loss.
        loss_D: (θ, φ_D, batch, here). Drop path, and the update of a head's statistics, act at θ_D only. Paper
            silent: drop path as released.
        hypergrad: lines 10 and 13.
        pretext: prepared batches for l.6, one a lower step.
        downstream: (batch, what acts at θ_D alone). Paper silent: one batch serves l.12 to l.15, as released.
        after_step: the pretext task's hook, after l.9.
        after: called with the state and the log of each alternation.
        store: (K, N_L, p), where G is kept and inverted; host memory, to spare a GPU's. None: beside θ_P.
        loss_H: what a hypergradient may differentiate twice, called with the last pretext batch. None: loss_P.
        clock: takes the time of phases; None: of the levels only.
    Raises Diverged naming level, step and block where a loss, gradient or M-FAC system is not finite.
    """
    clock = clock or Clock(s.theta_P.device)
    K, p = s.theta_P.shape
    stored = cfg.hypergrad == "mfac"  # the others have no use for G
    G = s.theta_P.new_empty(K, cfg.lower_steps, p * stored) if store is None else store
    good = s.theta_P.new_empty(K, cfg.lower_steps, dtype=torch.bool)
    for t in range(s.done, cfg.alternations):  # l.3
        clock.start()
        lower, upper = [], []  # l.4: G is overwritten, row by row
        for i in range(cfg.lower_steps):  # l.5, lower level
            batch = next(pretext)
            clock.lap("data", fine=True)
            value, g_P, g_phi_P = gradients(loss_P, s.theta_P, s.phi_P, batch)  # l.6, l.8
            clock.lap("lower passes", fine=True)
            good[:, i] = torch.linalg.vector_norm(g_P, torch.inf, -1).isfinite()
            if stored:  # l.6: ∇L^P alone, before the pull (M-FAC's damping stands in for it) and before clipping
                G[:, i].copy_(g_P, non_blocking=True)
            clock.lap("store", fine=True)
            apart = (s.theta_P - s.theta_D).detach()
            g_theta_P = g_P + cfg.lam * apart  # l.7, Eq. 4
            norm = s.opt_P.update([(s.theta_P, g_theta_P), *pairs(s.phi_P, g_phi_P)])  # l.9
            after_step(s.theta_P)
            lower.append(torch.stack([value, cfg.lam / 2 * apart.square().sum(), norm.to(value.dtype)]))
            clock.lap("optimiser", fine=True)
        finite(t, "lower", lower, good)
        clock.lap("lower")

        solve = hypergrad(G, cfg.lam, s.theta_P, partial(loss_H or loss_P, phi=s.phi_P, batch=batch))  # l.10, Eq. 7
        finite(t, "hypergradient", [], solve.ok[:, None])
        clock.lap("curvature")

        for _ in range(cfg.upper_steps):  # l.11, upper level
            batch, here = next(downstream)
            clock.lap("data", fine=True)
            at_P, g, g_phi_at_P = gradients(loss_D, s.theta_P, s.phi_D, batch)  # l.12
            clock.lap("upper passes", fine=True)
            q = solve.apply(g.to(G)).to(g)  # l.13, Eq. 10
            clock.lap("apply", fine=True)
            at_D, g_at_D, g_phi_at_D = gradients(loss_D, s.theta_D, s.phi_D, batch, here)
            clock.lap("upper passes", fine=True)
            g_theta_D = q + g_at_D  # l.14
            g_phi_D = {name: g_phi_at_P[name] + g_phi_at_D[name] for name in g_phi_at_P}  # l.15
            norm = s.opt_D.update([(s.theta_D, g_theta_D), *pairs(s.phi_D, g_phi_D)])  # l.16
            ratio, cosine = q.norm() / g.norm(), torch.cosine_similarity(q.flatten(), g.flatten(), 0)
            upper.append(torch.stack([x.to(at_P.dtype) for x in (at_P, at_D, norm, ratio, cosine)]))
            clock.lap("optimiser", fine=True)
        finite(t, "upper", [row[:3] for row in upper], None)
        clock.lap("upper")

        s.done = t + 1
        P, D = columns(lower, 3), columns(upper, 5)
        distance = float((s.theta_P - s.theta_D).detach().norm())
        after(s, Log(t + 1, P[0], P[1], D[0], D[1], P[2], D[2], distance, D[3], D[4], clock.take()))
    return s.theta_P  # l.17


def pretrain(
    psi: Phi,
    phi_P: Phi,
    loss_P: Loss,
    opt: Optimiser,
    batches: Iterator[Any],
    after_step: Callable[[Tensor | None], None],
    report: Callable[[int, float], None],
) -> None:
    """Eq. 1 for those without a checkpoint: train ψ itself and φ_P, in place; there is no θ.

    Args:
        batches: prepared, one a step; their number is the length of the training.
        after_step: the pretext task's hook.
        report: called after each step with the step's number, from 1, and its loss.
    """
    tensors = [*psi.values(), *phi_P.values()]
    for step, batch in enumerate(batches, opt.step + 1):
        value = loss_P(None, phi_P, batch)
        if not math.isfinite(value.item()):
            raise Diverged(
                f"pretrain step {step}: the loss is {value.item()}, try a lower --base-lr or a longer warm-up"
            )
        opt.update(zip(tensors, torch.autograd.grad(value, tensors), strict=True))
        after_step(None)
        report(step, value.item())


def gradients(loss: Loss, theta: Tensor, phi: Phi, *args: Any) -> tuple[Tensor, Tensor, Phi]:
    """(loss, ∇_θ, ∇_φ by name) at one point; no graph is kept."""
    value = loss(theta, phi, *args)
    g_theta, *g_phi = torch.autograd.grad(value, [theta, *phi.values()])
    return value.detach(), g_theta, dict(zip(phi, g_phi, strict=True))


def pairs(phi: Phi, gradient: Phi) -> list[tuple[Tensor, Tensor]]:
    """(tensor, gradient) of every tensor of a head."""
    return [(tensor, gradient[name]) for name, tensor in phi.items()]


def columns(rows: list[Tensor], width: int) -> list[list[float]]:
    """Logged rows as lists by column; the host waits for their values here, once a level."""
    return torch.stack(rows).T.tolist() if rows else [[] for _ in range(width)]


def finite(t: int, level: str, rows: list[Tensor], blocks: Tensor | None) -> None:
    """Read one level's finiteness, after its last step, so that no step waits for the device.

    Args:
        rows: logged values, one tensor a step.
        blocks: (K, steps) bool, False where a block's gradient was not finite.
    """
    good = [torch.isfinite(row).all() for row in rows]
    if blocks is not None and not bool(blocks.all()):
        step, block = (~blocks).T.nonzero()[0].tolist()  # the first step: from there it spreads
        where = f"block {block}" + (f", step {step + 1}" if rows else "")
    elif good and not bool(torch.stack(good).all()):
        where = f"step {[bool(ok) for ok in good].index(False) + 1}"
    else:
        return
    raise Diverged(
        f"alternation {t + 1}, {level} level, {where}: not finite. Lower --p-lr or --d-lr, or raise --lam; "
        "checkpoints are from before this alternation"
    )


class Clock:
    """Wall seconds by phase; waits for a GPU at the laps: three an alternation, or with `fine` several a step."""

    def __init__(self, device: torch.device, fine: bool = False) -> None:
        self.device, self.fine = device, fine
        self.seconds: dict[str, float] = {}
        self.start()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start(self) -> None:
        """What happened since the last lap is not counted."""
        self.wait()
        self.last = time.perf_counter()

    def lap(self, phase: str, fine: bool = False) -> None:
        if fine and not self.fine:
            return
        self.wait()
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    def take(self) -> dict[str, float]:
        """Hand over the seconds of one alternation."""
        taken, self.seconds = self.seconds, {}
        return taken
