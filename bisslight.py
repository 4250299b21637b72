"""Paper: Algorithm 1 (Sec. 3), as `algorithm_1`, with a glossary of its symbols.

    upper (Eq. 3)   min over θ_D, φ_D    L^D(θ_P*(θ_D), φ_D) + L^D(θ_D, φ_D)
    lower (Eq. 4)   θ_P*(θ_D) = argmin over θ_P, min over φ_P    L^P(θ_P, φ_P) + λ/2 |θ_P − θ_D|²

The modules of the method keep these letters; docs/math.md has a table of all symbols.

    code                paper       meaning
    (no variable)       ψ           pretrained backbone weights, inside of task and loss_D, one copy
                                    for both levels. Who loads them freezes them, by
                                    `backbone.requires_grad_(False)`; nothing here updates them
    theta_P, theta_D    θ_P, θ_D    LoRA parameters of the lower (pretext) and upper (downstream)
                                    level, each (K, p): K rows, here layers, of p numbers. M-FAC
                                    takes a row as one block, so K is the paper's number of blocks,
                                    unless another `partition` is chosen
    phi_P, phi_D        φ_P, φ_D    pretext head (MAE's decoder), downstream head (a linear layer)
    pretext, downstream D^P, D^D    iterators over batches
    task.loss, loss_D   L^P, L^D    functions (θ, φ, batch) -> scalar
    lam                 λ           coupling in Eq. 4, and M-FAC's damping γ = λ (Sec. 3.1); its
                                    unit is that of 1/θ², since the loss has none
    grad_P              ∇L^P_i      pretext gradient at θ_P (l.6), (K, p)
    g_P                 g_θP        the same with the gradient of Eq. 4's penalty added (l.7)
    g_phi_P             g_φP        gradient of the pretext loss with respect to φ_P (l.8)
    G                   G           the N_L pretext gradients of one alternation, (K, N_L, p)
    inverse             M           what l.10 leaves for l.13, as the function g -> q
    g                   ∇L^D        downstream gradient at θ_P (l.12), (K, p)
    q                   q           ≈ λ (H + λI)⁻¹ g, implicit part of the upper gradient (l.13)
    g_D                 g_θD        sum of q and grad_D, the downstream gradient at θ_D (l.14)
    g_phi_D             g_φD        gradients with respect to φ_D, at θ_P and at θ_D, added (l.15)
    H                   H           Hessian of L^P with respect to θ at θ_P; only its products H u
                                    are computed; in the code `H()` returns the function u -> H u
    alternations        T           with lower_steps N_L and upper_steps N_U

    Eq. 3 eq:bissl_upper_level          Eq. 4 eq:bissl_lower_level
    Eq. 5 eq:bissl_upper_level_derivative
    Eq. 6 eq:mfac_recursion_general     Eq. 7 eq:bissl_mfac_vi_calc
    Eq. 10 eq:bissl_mfac_upper_grad_approx
    l.n   line n of Algorithm 1 (alg:bisslight)

Axis 0 of every tensor of a batch is the image. So a batch can be cut into micro-batches, or shared
between processes, unless the task says that its loss compares images (see `PretextTask`). Files,
clocks, seeds and devices are left to the caller.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__version__ = "0.3.0"

Phi = dict[str, Tensor]  # a head's trainable tensors by name
Batch = TypeVar("Batch", bound=tuple[Any, ...])  # a NamedTuple; a field is (B, ...) or None
Loss = Callable[..., Tensor]  # (theta, phi, batch) -> scalar, the mean over the batch's images
BatchLoss = Callable[[Any], Tensor]  # (batch) -> scalar
Map = Callable[[Tensor], Tensor]  # of a tensor shaped like theta: u -> H u, g -> q
Hypergradient = Callable[[Tensor, float, Callable[[], Map]], Map]
"""(G, λ, H) -> inverse, a function g -> q ≈ λ (H + λI)⁻¹ g. `H()` returns the function u -> H u."""


class Diverged(ArithmeticError):
    """A loss or gradient is not finite; the message says where it happened first."""


class Steps(Protocol):
    """Line 1: how long Algorithm 1 runs, and λ. `config.AlignConfig` is one."""

    @property
    def alternations(self) -> int:
        """T."""

    @property
    def lower_steps(self) -> int:
        """N_L."""

    @property
    def upper_steps(self) -> int:
        """N_U."""

    @property
    def lam(self) -> float:
        """λ > 0."""


class PretextTask(Protocol[Batch]):
    """A pretext task: `mae.MAE`, `ijepa.IJEPA`, `examples/rotation.py`.

    A step calls draw, prepare, loss and after_step in this order; cg and exact call loss again. A
    class attribute `mean_over_images = False` says that the loss compares the images of a batch
    with each other, as a contrastive loss does. Such a batch is not cut into micro-batches.
    """

    phi: Phi  # the head's start; every tensor of it enters the loss
    state: dict[str, Tensor]  # what a resumed run needs besides θ and φ; updated in place

    def draw(self, B: int, rng: torch.Generator) -> tuple[Tensor, ...]:
        """All random numbers of a step (`prepare` draws none): tensors (B, ...), on the CPU."""

    def prepare(self, images: Tensor, *drawn: Any, **_: Any) -> Batch:
        """Images (B, 3, height, width), and what was drawn -> a batch: fields (B, ...) or None."""

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """L^P(θ, φ_P), the mean over the images: pure, differentiable, without drop path."""

    def after_step(self, theta_P: Tensor | None) -> None:
        """Called after l.9, for what follows θ_P slowly, such as a teacher."""


class Optimiser(Protocol):
    """opt_P or opt_D: updates tensors in place; `TorchOptimiser` is one."""

    def update(self, tensors: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """One step; may change the gradients, returns their joint norm before clipping."""


@dataclass
class TorchOptimiser:
    """Any optimiser of torch as opt_P or opt_D, with all gradients clipped together.

    opt_P = TorchOptimiser(torch.optim.AdamW([theta_P, *phi_P.values()], lr=1e-3), clip=10.0)
    """

    optimiser: torch.optim.Optimizer
    clip: float = math.inf  # largest L2 norm of all gradients together

    def update(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """One step; clips the gradients in place and returns their joint norm before clipping."""
        for tensor, gradient in zip(tensors, gradients, strict=True):
            # Fused optimisers read both in the order in which they are stored, so it has to agree.
            if gradient.stride() != tensor.stride():
                gradient = torch.empty_like(tensor).copy_(gradient)
            tensor.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(tensors, self.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return norm


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


class LowerStep(NamedTuple):
    """What is logged of a lower step; scalars."""

    loss_P: Tensor  # L^P at θ_P
    proximal: Tensor  # λ/2 |θ_P − θ_D|² before the step
    norm_P: Tensor  # joint norm of the gradients of θ_P (with l.7's) and φ_P before clipping


class UpperStep(NamedTuple):
    """What is logged of an upper step; scalars, but for `q_norms`."""

    loss_D_at_P: Tensor  # L^D at θ_P
    loss_D_at_D: Tensor  # L^D at θ_D, with drop path
    norm_D: Tensor  # joint norm of the gradients of θ_D (with q) and φ_D before clipping
    q_over_g: Tensor  # |q| / |g|
    cosine: Tensor  # of q and g; 1, with q_over_g = 1, if the curvature changes nothing
    distance: Tensor  # |θ_P − θ_D| after the step
    q_norms: Tensor  # (K,) |q| of each row; not in `Log`, it tells which row is not finite


class Log(NamedTuple):
    """The steps of one alternation; each list has a number for each lower or upper step."""

    alternation: int  # from 1
    loss_P: list[float]
    proximal: list[float]
    norm_P: list[float]
    loss_D_at_P: list[float]
    loss_D_at_D: list[float]
    norm_D: list[float]
    q_over_g: list[float]
    cosine: list[float]
    distance: list[float]


class Gradients(NamedTuple):
    """A loss and its gradients."""

    value: Tensor  # scalar
    theta: Tensor  # (K, p)
    phi: Phi  # by name


@dataclass(frozen=True)
class Passes:
    """How a batch passes through the network: cut or whole, in which precision."""

    micro_batch: int | None = None  # most images that pass at once; None: the whole batch
    amp: bool = False  # bfloat16 autocast, on or off; gradients keep the dtype of θ

    def gradients(self, loss: Loss, theta: Tensor, phi: Phi, batch: Batch) -> Gradients:
        """L(θ, φ), ∇_θ L and ∇_φ L of a batch."""
        tensors = [theta, *phi.values()]
        value, gradients = self.value_and_gradients(partial(loss, theta, phi), tensors, batch)
        of_theta, *of_phi = gradients
        return Gradients(value, of_theta, dict(zip(phi, of_phi, strict=True)))

    def value_and_gradients(
        self, loss: BatchLoss, tensors: Sequence[Tensor], batch: Batch
    ) -> tuple[Tensor, list[Tensor]]:
        """loss(batch), and its gradients with respect to tensors; no graph is kept.

        Both are means over all images. Where processes share a batch, each has some of its images,
        and all get the mean over all of them.
        """
        device = tensors[0].device
        sums: list[Tensor] = []
        for part, weight in microbatches(batch, self.micro_batch, device):
            with autocast(device, self.amp):
                value = loss(part)
            value = value * weight
            with autocast(device, False):  # what the forward pass did in bfloat16, stays in it
                of_part = torch.autograd.grad(value, tensors)
            terms = [value.detach(), *of_part]
            if sums:
                sums = [total + term for total, term in zip(sums, terms, strict=True)]
            else:
                sums = terms
        value, *gradients = sum_over_processes(sums)
        return value, gradients

    def hessian(self, loss: Loss, theta: Tensor, phi: Phi, batch: Batch) -> Map:
        """The function u -> H u with H = ∇²_θ L of a batch at (θ, φ), in the precision of θ.

        Autocast is off here, also inside a caller's own. The graph of one micro-batch exists at a
        time: if the batch is not cut, its graph serves all products; otherwise each part passes
        again for each product.
        """
        point = theta.detach().requires_grad_()
        device = point.device
        fixed = {name: tensor.detach() for name, tensor in phi.items()}
        parts = microbatches(batch, self.micro_batch, device)

        def gradient(part: Batch, weight: float) -> Tensor:
            value = loss(point, fixed, part) * weight
            return torch.autograd.grad(value, point, create_graph=True)[0]

        # fused attention has no second derivative
        with autocast(device, False), sdpa_kernel(SDPBackend.MATH):
            kept = gradient(*parts[0]) if len(parts) == 1 else None

        def product(u: Tensor) -> Tensor:
            total = torch.zeros_like(point)
            with autocast(device, False), sdpa_kernel(SDPBackend.MATH):
                for part, weight in parts:
                    if kept is None:
                        total += torch.autograd.grad(gradient(part, weight), point, u)[0]
                    else:
                        total += torch.autograd.grad(kept, point, u, retain_graph=True)[0]
            return sum_over_processes([total])[0]

        return product


def autocast(device: torch.device, on: bool) -> AbstractContextManager[object]:
    """bfloat16 autocast, on or off whatever it is outside; some devices (meta) have none."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, enabled=on)


def algorithm_1(
    state: State,
    steps: Steps,
    task: PretextTask[Batch],
    loss_D: Loss,
    hypergrad: Hypergradient,
    pretext: Iterator[Batch],
    downstream: Iterator[Any],
    passes: Passes = Passes(),
    store: torch.device | str | None = None,
) -> Iterator[Log]:
    """Algorithm 1 from alternation `state.done + 1` on; yields a Log after each alternation.

    Line 17 returns θ_P: it is `state.theta_P` once the generator has ended. Raises Diverged where a
    loss or gradient is not finite.

    Args:
        state: what changes; θ is float32 or float64.
        steps: T, N_L, N_U and λ (l.1).
        task: the pretext task, L^P and all that belongs to it.
        loss_D: (θ, φ_D, batch, regularise=False). The paper does not say whether drop path is on in
            line 12, in line 14, or in both. Here, as released: in line 14 alone (regularise=True).
        hypergrad: lines 10 and 13; `mfac.mfac` is the paper's.
        pretext, downstream: a prepared batch for each lower step, a labelled one for each upper.
        passes: micro-batches and precision of all passes through the network.
        store: the device that keeps G; None: that of θ.
    """
    theta_P, theta_D, phi_P, phi_D = state.theta_P, state.theta_D, state.phi_P, state.phi_D
    train_D = partial(loss_D, regularise=True)  # L^D with drop path, for the pass at θ_D
    K, p = theta_P.shape
    for t in range(state.done + 1, steps.alternations + 1):  # l.3
        G = theta_P.new_empty(K, steps.lower_steps, p, device=store)  # l.4
        lower, upper = list[LowerStep](), list[UpperStep]()
        for i in range(steps.lower_steps):  # l.5, lower level
            batch = next(pretext)
            value_P, grad_P, grad_phi = passes.gradients(task.loss, theta_P, phi_P, batch)  # l.6
            G[:, i] = grad_P  # l.6: ∇L^P alone, before the penalty's gradient and clipping
            delta = (theta_P - theta_D).detach()  # l.7
            g_P = grad_P + steps.lam * delta  # l.7
            g_phi_P = grad_phi  # l.8, of the same pass
            norm = state.opt_P.update([theta_P, *phi_P.values()], [g_P, *g_phi_P.values()])  # l.9
            task.after_step(theta_P)  # what follows θ_P slowly, such as I-JEPA's teacher
            proximal = steps.lam / 2 * delta.square().sum()
            lower.append(LowerStep(loss_P=value_P, proximal=proximal, norm_P=norm))
        lower_log = columns(LowerStep._fields, lower, f"alternation {t}, lower level")
        H = partial(passes.hessian, task.loss, theta_P, phi_P, batch)  # of the last batch
        inverse = hypergrad(G, steps.lam, H)  # l.10
        for _ in range(steps.upper_steps):  # l.11, upper level
            examples = next(downstream)  # lines 12 to 15 share them, as released
            at_P, g, g_phi_D_at_P = passes.gradients(loss_D, theta_P, phi_D, examples)  # l.12
            q = inverse(g)  # l.13
            at_D, grad_D, g_phi_D_at_D = passes.gradients(train_D, theta_D, phi_D, examples)  # l.14
            g_D = q + grad_D  # l.14
            g_phi_D = {name: g_phi_D_at_P[name] + g_phi_D_at_D[name] for name in phi_D}  # l.15
            norm = state.opt_D.update([theta_D, *phi_D.values()], [g_D, *g_phi_D.values()])  # l.16
            distance = (theta_P - theta_D).detach().norm()
            step = {"loss_D_at_P": at_P, "loss_D_at_D": at_D, "norm_D": norm, "distance": distance}
            upper.append(UpperStep(**step, **agreement(g, q)))
        upper_log = columns(UpperStep._fields, upper, f"alternation {t}, upper level")
        del G, inverse  # the next alternation needs as much memory again
        state.done = t
        upper_log.pop("q_norms")
        yield Log(t, **lower_log, **upper_log)


# --- Batches in parts, and processes that share them -----------------------------------------


def microbatches(
    batch: Batch, micro_batch: int | None, device: torch.device
) -> list[tuple[Batch, float]]:
    """A batch (a NamedTuple of tensors, image first) cut into parts of at most `micro_batch`.

    With each comes its weight, its share of the images of all processes. Of 5 images, micro-batches
    of 2 are parts of 2, 2 and 1 with weights 0.4, 0.4 and 0.2.
    """
    images = len(batch[0])
    total = images
    if processes_share():
        count = torch.tensor([images], dtype=torch.float64, device=device)
        total = int(sum_over_processes([count])[0])
    if micro_batch is None or images <= micro_batch:
        return [(batch, images / total)]
    parts = []
    for start in range(0, images, micro_batch):
        fields = [None if x is None else x[start : start + micro_batch] for x in batch]
        part: Batch = type(batch)(*fields)  # type: ignore[arg-type]
        parts.append((part, len(part[0]) / total))
    return parts


def processes_share() -> bool:
    """Whether several processes share each batch."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_processes(values: list[Tensor]) -> list[Tensor]:
    """Sums over all processes by one all-reduce; with a single process, the tensors themselves."""
    if not processes_share():
        return values
    flat = torch.cat([x.flatten() for x in values])
    dist.all_reduce(flat)
    sums = flat.split([x.numel() for x in values])
    return [total.view_as(x) for total, x in zip(sums, values, strict=True)]


# --- What is logged ---------------------------------------------------------------------------


def agreement(g: Tensor, q: Tensor) -> dict[str, Tensor]:
    """How q differs from g, both (K, p): the fields of `UpperStep` that tell it.

    >>> g = torch.tensor([[3.0, 4.0]])
    >>> [float(value) for value in agreement(g, 0.5 * g).values()]
    [0.5, 1.0, 2.5]
    """
    lengths = g.double().norm(), q.double().norm()  # float64: squares may vanish in float32
    tiny = 1e-300  # g or q may be 0
    product = (q.double() * g.double()).sum()
    return {
        "q_over_g": lengths[1] / lengths[0].clamp_min(tiny),
        "cosine": product / (lengths[0] * lengths[1]).clamp_min(tiny),
        "q_norms": q.norm(dim=1),
    }


def columns(
    names: Sequence[str], rows: Sequence[tuple[Tensor, ...]], where: str
) -> dict[str, list[float]]:
    """The steps of a level as a list of numbers by name; of a vector, its first number.

    A row has a tensor for each name; only the last one may be a vector, a number for each row of θ
    (`q_norms`). Raises Diverged if a number is not finite: its message has `where`, the first such
    step, and if q alone is not finite, the first such row of θ as the block of the hypergradient.
    """
    if not rows:
        return {name: [] for name in names}
    table = read(rows)
    for step, values in enumerate(table, 1):
        if all(map(math.isfinite, values)):
            continue
        block = ""
        if len(values) > len(names) and math.isfinite(values[0]):  # the loss itself is finite
            norms = values[len(names) - 1 :]
            bad = [k for k, norm in enumerate(norms) if not math.isfinite(norm)]
            block = f", hypergradient of block {bad[0]}" if bad else ""
        raise Diverged(f"{where}, step {step}{block}: a loss or gradient is not finite")
    return {name: [values[k] for values in table] for k, name in enumerate(names)}


def read(rows: Sequence[tuple[Tensor, ...]]) -> list[list[float]]:
    """The numbers of all rows, one transfer from the device: here the CPU waits for the GPU."""
    vectors = []
    for row in rows:
        vectors.append(torch.cat([x.detach().double().flatten() for x in row]))
    numbers: list[list[float]] = torch.stack(vectors).tolist()
    return numbers
