"""BiSSLight alignment (Sec. 3): `algorithm_1` is the paper's Algorithm 1, and this is its glossary.

    upper (Eq. 3)   min over θ_D, φ_D    L^D(θ_P*(θ_D), φ_D) + L^D(θ_D, φ_D)
    lower (Eq. 4)   θ_P*(θ_D) = argmin over θ_P, min over φ_P    L^P(θ_P, φ_P) + λ/2 |θ_P − θ_D|²

The modules of the method keep these letters.

    code                paper       meaning
    psi                 ψ           pretrained backbone weights; frozen, one copy for both levels
    theta_P, theta_D    θ_P, θ_D    LoRA parameters of the lower (pretext) and upper (downstream)
                                    level, each (K, p): K blocks, here layers, of p numbers
    phi_P, phi_D        φ_P, φ_D    pretext head (MAE's decoder), downstream head (a linear layer)
    loss_P, loss_D      L^P, L^D    (θ, φ, batch) -> scalar
    lam                 λ           coupling in Eq. 4, and M-FAC's damping γ = λ (Sec. 3.1); its
                                    unit is that of 1/θ², since the loss has none
    G                   G           the N_L pretext gradients of one alternation, (K, N_L, p)
    g                   ∇L^D        downstream gradient at θ_P (l.12)
    q                   q           ≈ λ (H + λI)⁻¹ g, implicit part of the upper gradient (l.13)
    H                   H           Hessian of L^P with respect to θ at θ_P; only its products H d
                                    are computed; in the code `H()` returns the function d -> H d
    alternations        T           with lower_steps N_L and upper_steps N_U

    Eq. 4 eq:bissl_lower_level          Eq. 5 eq:bissl_upper_level_derivative
    Eq. 7 eq:bissl_mfac_vi_calc         Eq. 10 eq:bissl_mfac_upper_grad_approx
    l.n   line n of Algorithm 1 (alg:bisslight)

Axis 0 of every tensor of a batch is the image, so a batch can be cut into micro-batches or shared
between processes, but for the tasks that `PretextTask` names. Files, clocks, seeds and devices are
left to the caller.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Phi = dict[str, Tensor]  # a head's trainable tensors by name
Loss = Callable[..., Tensor]  # (theta, phi, batch) -> scalar, the mean over the batch's images
Map = Callable[[Tensor], Tensor]  # of a tensor shaped like theta: d -> H d, g -> q
Hypergradient = Callable[[Tensor, float, Callable[[], Map]], Map]
"""(G, λ, H) -> inverse, a function g -> q ≈ λ (H + λI)⁻¹ g. `H()` returns the function d -> H d."""


class Diverged(ArithmeticError):
    """A loss or gradient is not finite; the message says where it happened first."""


class PretextTask(Protocol):
    """A pretext task: `mae.MAE`, `ijepa.IJEPA`, `examples/rotation.py`.

    A step calls draw, prepare, loss and after_step in this order; cg and exact call loss again. A
    class attribute `mean_over_images = False` says that the loss compares the images of a batch
    with each other, as a contrastive loss does. Such a batch is not cut into micro-batches.
    """

    phi: Phi  # the head's start; every tensor of it enters the loss
    state: dict[str, Tensor]  # what a resumed run needs besides θ and φ; updated in place

    def draw(self, n: int, rng: torch.Generator) -> tuple[Tensor, ...]:
        """All random numbers of a step (`prepare` draws none): tensors (n, ...), on the CPU."""

    def prepare(self, images: Tensor, *drawn: Any, **_: Any) -> Any:
        """Images (B, 3, H, W), and what was drawn -> a NamedTuple; a field is (B, ...) or None."""

    def loss(self, theta: Tensor | None, phi: Phi, batch: Any) -> Tensor:
        """L^P(θ, φ_P), the mean over the images: pure, differentiable, without drop path."""

    def after_step(self, theta_P: Tensor | None) -> None:
        """Called after l.9, for what follows θ_P slowly, such as a teacher."""


class Optimiser(Protocol):
    """opt_P or opt_D: updates tensors in place."""

    def update(self, tensors: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """One step; may change the gradients, returns their joint norm before clipping."""


@dataclass
class State:
    """What Algorithm 1 changes: θ (K, p) and φ, leaf tensors, with θ_P = θ_D at first (l.2)."""

    theta_P: Tensor
    theta_D: Tensor
    phi_P: Phi
    phi_D: Phi
    opt_P: Optimiser  # of theta_P and phi_P
    opt_D: Optimiser  # of theta_D and phi_D
    done: int = 0  # finished alternations


class Log(NamedTuple):
    """What is logged of one alternation; each list has a number for each lower or upper step."""

    alternation: int  # from 1
    loss_P: list[float]  # L^P at θ_P
    proximal: list[float]  # λ/2 |θ_P − θ_D|² before the step
    norm_P: list[float]  # joint norm of the gradients of θ_P (with l.7's) and φ_P before clipping
    loss_D_at_P: list[float]  # L^D at θ_P
    loss_D_at_D: list[float]  # L^D at θ_D, with drop path
    norm_D: list[float]  # joint norm of the gradients of θ_D (with q) and φ_D before clipping
    q_over_g: list[float]  # |q| / |g|
    cosine: list[float]  # of q and g; 1, with q_over_g = 1, if the curvature changes nothing
    share: list[float]  # |Pg|² / |g|², P the projection on the span of G: what M-FAC can act on
    removed: list[float]  # 1 − |Pq|² / |Pg|²: how much of that share is missing in q
    distance: list[float]  # |θ_P − θ_D| after each upper step


def algorithm_1(
    s: State,
    c: Any,
    task: PretextTask,
    loss_D: Loss,
    hypergrad: Hypergradient,
    pretext: Iterator[Any],
    downstream: Iterator[Any],
    micro: int | None = None,
    amp: bool = False,
    store: torch.device | str | None = None,
) -> Iterator[Log]:
    """Algorithm 1 from alternation `s.done + 1` on; yields a Log after each alternation.

    Line 17 returns θ_P: it is `s.theta_P` once the generator has ended. Raises Diverged where a
    loss or gradient is not finite.

    Args:
        s: what changes; θ is float32 or float64. task: the pretext task.
        c: has `alternations` T, `lower_steps` N_L, `upper_steps` N_U and `lam` λ: l.1.
        loss_D: (θ, φ_D, batch, regularise=False). The paper names no pass of the upper level for
            drop path: here it acts at θ_D alone (regularise=True), as in the released program.
        hypergrad: lines 10 and 13; `mfac.mfac` is the paper's.
        pretext, downstream: a prepared batch for each lower step, a labelled one for each upper.
        micro: largest number of images that pass through the network at once; None: whole batch.
        amp: bfloat16 autocast for both losses; gradients and G keep the dtype of θ.
        store: the device that keeps G; None: θ's.
    """
    for t in range(s.done + 1, c.alternations + 1):  # l.3
        K, p = s.theta_P.shape  # l.4
        G = s.theta_P.new_empty(K, c.lower_steps, p, device=store)  # l.4
        rows = []
        for i in range(c.lower_steps):  # l.5, lower level
            batch = next(pretext)  # l.6
            loss_P, g_P, g_phi = gradients(task.loss, s.theta_P, s.phi_P, batch, micro, amp)  # l.6
            G[:, i] = g_P  # l.6: ∇L^P alone, before l.7 adds to it and before clipping
            delta = (s.theta_P - s.theta_D).detach()  # l.7
            grads = [g_P + c.lam * delta, *g_phi.values()]  # l.7, l.8: of θ_P, of φ_P
            norm = s.opt_P.update([s.theta_P, *s.phi_P.values()], grads)  # l.9
            task.after_step(s.theta_P)  # l.9: then what follows θ_P, such as I-JEPA's teacher
            rows.append([loss_P, c.lam / 2 * delta.square().sum(), norm])
        lower = numbers(f"alternation {t}, lower level", rows, 3)
        H = partial(hessian, task.loss, s.theta_P, s.phi_P, batch, micro)  # l.10: for CG and exact
        inverse = hypergrad(G, c.lam, H)  # l.10
        rows = []
        for _ in range(c.upper_steps):  # l.11, upper level
            examples = next(downstream)  # l.12: lines 12 to 15 share them, as released
            at_P, g, g_phi_P = gradients(loss_D, s.theta_P, s.phi_D, examples, micro, amp)  # l.12
            q = inverse(g)  # l.13
            loss = partial(loss_D, regularise=True)  # l.14: with drop path
            at_D, g_D, g_phi_D = gradients(loss, s.theta_D, s.phi_D, examples, micro, amp)  # l.14
            grads = [q + g_D, *(g_phi_P[name] + g_phi_D[name] for name in s.phi_D)]  # l.14, l.15
            norm = s.opt_D.update([s.theta_D, *s.phi_D.values()], grads)  # l.16
            rows.append([at_P, at_D, norm, *agreement(q, g, s, G)])
        upper = numbers(f"alternation {t}, upper level", rows, 8)
        del G, inverse  # l.16: done with; the next alternation needs as much memory again
        s.done = t
        yield Log(t, *lower, *upper)


def gradients(
    loss: Loss, theta: Tensor, phi: Phi, batch: Any, micro: int | None = None, amp: bool = False
) -> tuple[Tensor, Tensor, Phi]:
    """L(θ, φ), ∇_θ L and ∇_φ L (by name) of a batch; micro and amp as in `algorithm_1`."""
    tensors = [theta, *phi.values()]
    value, g_theta, *g_phi = value_and_grad(partial(loss, theta, phi), tensors, batch, micro, amp)
    return value, g_theta, dict(zip(phi, g_phi, strict=True))


def value_and_grad(
    loss: Loss, tensors: list[Tensor], batch: Any, micro: int | None = None, amp: bool = False
) -> list[Tensor]:
    """[loss(batch), its gradients with respect to tensors], means over images; no graph is kept.

    Where processes share a batch, each has some of its images; all get the gradients of all images.
    """
    device = tensors[0].device
    total: list[Tensor] = []
    for part, share in microbatches(batch, micro, device):
        with torch.autocast(device.type, torch.bfloat16) if amp else nullcontext():
            value = loss(part)
        value = value * share.to(value.dtype)
        found = [value.detach(), *torch.autograd.grad(value, tensors)]
        total = [a + b for a, b in zip(total, found, strict=True)] if total else found
    return sum_over_processes(total)


def hessian(loss: Loss, theta: Tensor, phi: Phi, batch: Any, micro: int | None = None) -> Map:
    """The function d -> H d with H = ∇²_θ L of a batch at (θ, φ), in the full precision of θ.

    The graph of one part exists at a time. If the batch is one part, its graph serves all products;
    several parts are passed forward and backward again for each product.
    """
    at = theta.detach().requires_grad_()
    fixed = {name: tensor.detach() for name, tensor in phi.items()}
    parts = microbatches(batch, micro, at.device)

    def slope(part: Any, share: Tensor) -> Tensor:
        value = loss(at, fixed, part) * share.to(at.dtype)
        return torch.autograd.grad(value, at, create_graph=True)[0]

    def product(d: Tensor) -> Tensor:
        total = torch.zeros_like(at)
        with sdpa_kernel(SDPBackend.MATH):
            for part in parts:
                g = slope(*part) if kept is None else kept
                total += torch.autograd.grad(g, at, d, retain_graph=kept is not None)[0]
        return sum_over_processes([total])[0]

    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        kept = slope(*parts[0]) if len(parts) == 1 else None
    return product


def microbatches(batch: Any, micro: int | None, device: torch.device) -> list[tuple[Any, Tensor]]:
    """A batch (a NamedTuple of tensors, image first) cut into parts of at most `micro` images.

    With each comes its share of the images of all processes, on the device. Of 5 images, micro 2
    makes parts of 2, 2 and 1 with shares 0.4, 0.4 and 0.2.
    """
    n, parts = len(batch[0]), [batch]
    whole = sum_over_processes([torch.tensor(n, dtype=torch.float64, device=device)])[0]
    if micro is not None and n > micro:
        parts = [
            type(batch)._make(x if x is None else x[i : i + micro] for x in batch)
            for i in range(0, n, micro)
        ]
    return [(part, len(part[0]) / whole) for part in parts]


def sum_over_processes(values: list[Tensor]) -> list[Tensor]:
    """Sums over all processes by one all-reduce; with a single process, the tensors themselves."""
    if not (dist.is_available() and dist.is_initialized()):
        return values
    flat = torch.cat([x.flatten() for x in values])
    dist.all_reduce(flat)
    sums = flat.split([x.numel() for x in values])
    return [total.view_as(x) for total, x in zip(sums, values, strict=True)]


def within(G: Tensor, x: Tensor) -> Tensor:
    """|Px|² of n vectors x (K, n, p), P the projection on the span of each block's gradients.

    In a block, with G (N_L, p), |Px|² = yᵀ (G Gᵀ)⁻¹ y with y = G x. A little is added to the
    diagonal, since the gradients may be linearly dependent. Returns (n,), sums over the blocks.

    >>> within(torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[3.0, 4.0]]])).round(decimals=6)
    tensor([9.], dtype=torch.float64)
    """
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=G.device)
    for rows, vectors in zip(G, x.to(G.device), strict=True):
        g = rows.double()
        S, y = g @ g.mT, g @ vectors.double().mT  # (N_L, N_L), (N_L, n)
        S.diagonal().mul_(1 + 1e-10).add_(1e-300)
        L, _ = torch.linalg.cholesky_ex(S)
        total += (y * torch.cholesky_solve(y, L)).sum(0)
    return total.to(x.device)


def agreement(q: Tensor, g: Tensor, s: State, G: Tensor) -> list[Tensor]:
    """The numbers of a step in `Log`, from |q|/|g| to the distance; and |q| of each block.

    q, g (K, p), G (K, N_L, p).
    """
    cosine = torch.cosine_similarity(q.flatten(), g.flatten(), 0)
    at_g, at_q = within(G, torch.stack([g, q], 1))
    length = g.double().norm().clamp_min(1e-300)  # g may be 0
    share, removed = at_g / length / length, (at_g - at_q) / at_g.clamp_min(1e-300)
    distance = (s.theta_P - s.theta_D).detach().norm()
    return [q.norm() / length, cosine, share, removed, distance, q.norm(dim=1)]


def numbers(where: str, rows: list[list[Tensor]], width: int) -> list[list[float]]:
    """A level's numbers as `width` lists by step. With G on the GPU, the CPU waits only here.

    A row belongs to a step: `width` scalars and, if wanted, a vector with a number for each block
    of the hypergradient. Raises Diverged naming the first step, and block, that is not finite.
    """
    vectors = [torch.cat([x.detach().double().flatten() for x in row]) for row in rows]
    steps = torch.stack(vectors).tolist() if rows else []
    for step, values in enumerate(steps, 1):
        if not all(map(math.isfinite, values)):
            bad = [k for k, x in enumerate(values[width:]) if not math.isfinite(x)]
            block = f", hypergradient of block {bad[0]}" if bad and math.isfinite(values[0]) else ""
            raise Diverged(f"{where}, step {step}{block}: a loss or gradient is not finite")
    return [[values[k] for values in steps] for k in range(width)]
