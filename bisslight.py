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
function. Leaves out: processes and micro-batches, which are a matter of how `gradients` are computed (`parallel`).
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from config import Bilevel, Diverged
from mfac import Solve
from parallel import alone, later
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

    def prepare(self, images: Tensor, rng: torch.Generator, first: int = 0, whole: int | None = None) -> Batch:
        """Turn images (B, 3, H, W) into a batch, a NamedTuple of tensors: views, masks, a teacher's answers.

        All randomness is from `rng`, drawn for a batch of `whole` images (None: B) of which these begin at `first`: so
        what an image gets does not depend on how a batch is divided.
        """
        ...

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """L^P(θ, φ_P) of a prepared batch, a mean over its images: pure, differentiable, no randomness or drop path.

        Only means over images can be computed in pieces (micro-batches, several processes). A task whose loss is none,
        a contrastive one say, has `mean_over_images = False` as an attribute of its class, and its batches are then
        never divided. A class without the attribute has such a mean.
        """
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
    """All that Algorithm 1 changes, after any of its steps. θ and φ are leaf tensors, updated by their optimisers."""

    theta_P: Tensor
    theta_D: Tensor
    phi_P: Phi
    phi_D: Phi
    opt_P: Optimiser  # over theta_P and phi_P
    opt_D: Optimiser  # over theta_D and phi_D
    done: int = 0  # finished alternations
    G: Tensor | None = None  # the unfinished one's pretext gradients, (rows of θ kept here, N_L, p)
    lower: list[Tensor] = field(default_factory=list)  # its numbers, a row a lower step done
    upper: list[Tensor] = field(default_factory=list)  # and a row an upper step done
    last: Any = None  # its last pretext batch

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only. Without G and `last`, which only an unfinished alternation needs."""
        tensors = {"theta_P": self.theta_P, "theta_D": self.theta_D, "phi_P": self.phi_P, "phi_D": self.phi_D}
        numbers = {"done": self.done, "lower": self.lower, "upper": self.upper}
        return tensors | numbers | {"opt_P": self.opt_P.state_dict(), "opt_D": self.opt_D.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.theta_P.copy_(state["theta_P"])
        self.theta_D.copy_(state["theta_D"])
        for phi, saved in ((self.phi_P, state["phi_P"]), (self.phi_D, state["phi_D"])):
            for name, tensor in phi.items():
                tensor.copy_(saved[name])
        self.opt_P.load_state_dict(state["opt_P"])
        self.opt_D.load_state_dict(state["opt_D"])
        self.done, self.lower, self.upper = state["done"], [*state["lower"]], [*state["upper"]]


class NotFinite(Diverged):
    """A loss, a gradient or a system that is not finite; a command replaces the remedy by one that names its flags."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what + remedy)
        self.what = what


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
    loss_H: Loss | None = None,
    *,
    clock: "Clock | None" = None,
    how: Callable[..., list[Tensor]] = alone,
    rows: slice = slice(None),
    pause: Callable[[State], None] = lambda s: None,
    stored: bool = True,
) -> Tensor:
    """Algorithm 1 from `s` on; returns θ_P (l.17). `s` is l.1 and l.2: θ_P and θ_D start equal.

    Args:
        loss_P: (θ, φ_P, batch), the pretext task's loss.
        loss_D: (θ, φ_D, batch, here). Drop path, and the update of a head's statistics, act at θ_D only. Paper
            silent: drop path as released.
        hypergrad: lines 10 and 13. The function counts; `cfg.hypergrad`, its name on the command line, is not read.
        pretext: prepared batches for l.6, one a lower step.
        downstream: (batch, what acts at θ_D alone). Paper silent: one batch serves l.12 to l.15, as released.
        after_step: the pretext task's hook, after l.9.
        after: called with the state and the log of each alternation.
        loss_H: what a hypergradient may differentiate twice, called with the last pretext batch. None: loss_P.
        clock: takes the time of phases; None: of the levels only.
        how: a loss's value and gradients for a batch, if it does not come in one piece; as `parallel.alone`.
        rows: layers whose gradients are kept here; others keep the rest. `s.G` may be given, in host memory say.
        pause: called after each step; what it raises ends the loop, and `s` is where it goes on.
        stored: whether G is kept. False saves its memory where the hypergradient does not look at it (all but M-FAC).
    Raises NotFinite naming level, step and block where a loss, gradient or M-FAC system is not finite; ValueError where
    θ is not (K, p).
    """
    if s.theta_P.ndim != 2 or s.theta_D.shape != s.theta_P.shape:
        shapes = f"theta_P {tuple(s.theta_P.shape)}, theta_D {tuple(s.theta_D.shape)}"
        raise ValueError(f"{shapes}: both have to be (K, p), a row a block; flat, (p,), take theta[None], one block")
    clock = clock or Clock(s.theta_P.device)
    if s.G is None:
        kept = s.theta_P[rows] if stored else s.theta_P[:0]
        s.G = kept.detach().new_empty(len(kept), cfg.lower_steps, kept.shape[1])
    late = int(s.theta_P.is_cuda)  # a GPU's step is looked at when the next one has been sent
    for t in range(s.done, cfg.alternations):  # l.3
        clock.start()
        seen: list[Callable[[], Tensor]] = []  # l.4: G is overwritten, row by row
        for i in range(len(s.lower), cfg.lower_steps):  # l.5, lower level
            s.last = next(pretext)
            clock.lap("data", fine=True)
            value, g_P, g_phi_P = gradients(loss_P, s.theta_P, s.phi_P, s.last, how=how)  # l.6, l.8
            clock.lap("lower passes", fine=True)
            good = torch.linalg.vector_norm(g_P, torch.inf, -1).isfinite()  # by block
            if stored:  # l.6: ∇L^P alone, before the pull (M-FAC's damping stands in for it) and before clipping
                s.G[:, i].copy_(g_P[rows], non_blocking=True)
            clock.lap("store", fine=True)
            apart = (s.theta_P - s.theta_D).detach()
            g_theta_P = g_P + cfg.lam * apart  # l.7, Eq. 4
            norm = s.opt_P.update([(s.theta_P, g_theta_P), *pairs(s.phi_P, g_phi_P)])  # l.9
            after_step(s.theta_P)
            s.lower.append(torch.stack([value, cfg.lam / 2 * apart.square().sum(), norm.to(value.dtype)]))
            del g_P, g_theta_P, g_phi_P  # the upper level wants their memory
            clock.lap("optimiser", fine=True)
            seen.append(later(torch.cat([s.lower[-1], good.to(value.dtype)])))
            if len(seen) > late:
                finite(t, "lower", i + 1 - late, seen[-1 - late]())
            pause(s)
        if seen:
            finite(t, "lower", cfg.lower_steps, seen.pop()())
        clock.lap("lower")

        solve = hypergrad(s.G, cfg.lam, s.theta_P, partial(loss_H or loss_P, phi=s.phi_P, batch=s.last))  # l.10, Eq. 7
        solvable(t, solve.ok)
        clock.lap("curvature")

        seen = []
        for i in range(len(s.upper), cfg.upper_steps):  # l.11, upper level
            batch, here = next(downstream)
            clock.lap("data", fine=True)
            at_P, g, g_phi_at_P = gradients(loss_D, s.theta_P, s.phi_D, batch, how=how)  # l.12
            clock.lap("upper passes", fine=True)
            q = solve.apply(g.to(s.G)).to(g)  # l.13, Eq. 10
            clock.lap("apply", fine=True)
            at_D, g_at_D, g_phi_at_D = gradients(loss_D, s.theta_D, s.phi_D, batch, here, how=how)
            clock.lap("upper passes", fine=True)
            g_theta_D = q + g_at_D  # l.14
            good = torch.linalg.vector_norm(g_theta_D, torch.inf, -1).isfinite()  # by block
            g_phi_D = {name: g_phi_at_P[name] + g_phi_at_D[name] for name in g_phi_at_P}  # l.15
            norm = s.opt_D.update([(s.theta_D, g_theta_D), *pairs(s.phi_D, g_phi_D)])  # l.16
            ratio, cosine = q.norm() / g.norm(), torch.cosine_similarity(q.flatten(), g.flatten(), 0)
            s.upper.append(torch.stack([x.to(at_P.dtype) for x in (at_P, at_D, norm, ratio, cosine)]))
            clock.lap("optimiser", fine=True)
            seen.append(later(torch.cat([s.upper[-1][:3], good.to(at_P.dtype)])))
            if len(seen) > late:
                finite(t, "upper", i + 1 - late, seen[-1 - late]())
            pause(s)
        if seen:
            finite(t, "upper", cfg.upper_steps, seen.pop()())
        solvable(t, solve.ok)  # CG's is known once it has been applied
        clock.lap("upper")

        P, D = columns(s.lower, 3), columns(s.upper, 5)
        s.done, s.lower, s.upper = t + 1, [], []
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
    *,
    how: Callable[..., list[Tensor]] = alone,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Eq. 1 for those without a checkpoint: train ψ itself and φ_P, in place; there is no θ.

    Args:
        batches: prepared, one a step; their number is the length of the training.
        after_step: the pretext task's hook.
        report: called after each step with the step's number, from 1, and its loss.
        how, pause: as in `align`.
    """
    tensors = [*psi.values(), *phi_P.values()]
    for step, batch in enumerate(batches, opt.step + 1):
        value, *found = how(partial(loss_P, None, phi_P), tensors, batch)
        norm = opt.update(zip(tensors, found, strict=True))
        if not math.isfinite((value + 0 * norm).item()):
            what = f"pretrain step {step}: the loss is {value.item():.4g} and its gradient's norm {norm.item():.4g}, "
            raise NotFinite(what, "try a lower learning rate or a longer warm-up")
        after_step(None)
        report(step, value.item())
        pause()


def gradients(
    loss: Loss, theta: Tensor, phi: Phi, *args: Any, how: Callable[..., list[Tensor]] = alone
) -> tuple[Tensor, Tensor, Phi]:
    """(loss, ∇_θ, ∇_φ by name) at one point; no graph is kept."""
    value, g_theta, *g_phi = how(partial(loss, theta, phi), [theta, *phi.values()], *args)
    return value, g_theta, dict(zip(phi, g_phi, strict=True))


def pairs(phi: Phi, gradient: Phi) -> list[tuple[Tensor, Tensor]]:
    """(tensor, gradient) of every tensor of a head."""
    return [(tensor, gradient[name]) for name, tensor in phi.items()]


def columns(rows: list[Tensor], width: int) -> list[list[float]]:
    """Logged rows as lists by column; the host waits for their values here, once a level."""
    return torch.stack(rows).T.tolist() if rows else [[] for _ in range(width)]


def finite(t: int, level: str, step: int, numbers: Tensor) -> None:
    """Raise Diverged unless a step's losses and gradient norm are finite.

    Args:
        numbers: these three, and behind them 1 for each block whose gradient is finite.
    """
    if not bool(torch.isfinite(numbers[:3]).all()):
        bad = (numbers[3:] == 0).nonzero()
        not_finite(t, f"{level} level, {f'block {int(bad[0])}, ' if len(bad) else ''}step {step}")


def solvable(t: int, ok: Tensor) -> None:
    """Raise Diverged where a block's system could not be solved."""
    if not bool(ok.all()):
        not_finite(t, f"hypergradient, block {int((~ok).nonzero()[0])}")


def not_finite(t: int, where: str) -> NoReturn:
    raise NotFinite(f"alternation {t + 1}, {where}: not finite. ", "Lower the rate of θ_P or of θ_D, or raise λ")


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
