"""Conjugate gradients: the hypergradient of BiSSL, BiSSLight's predecessor (App. D.2.1). Needs torch alone.

With c = λ + damping and H the Hessian of the pretext loss at θ_P, a few iterations on

    (I + H/c) x = g,   whose solution is x = c (H + cI)⁻¹ g,

each with one exact Hessian-vector product through the whole pretext pass. The released program returns x, so that its
prefactor is c too; the paper's Eq. 5 has λ, which is x λ/c (`prefactor`).

    g    ∇L^D at θ_P, the query (l.12)          x, q  the result
    c    λ + 1 in the paper and as released     d, r  search direction and residual
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mfac import Solve, check_lambda

# What is added to both denominators, so that nothing is divided by zero once the residual is gone
SMALL = 1e-14  # of the squared length of the query: float32 does not resolve a residual below 1e-7 of it
RELEASED = 1e-12  # absolute, whatever the query: the released program's


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], g: Tensor, iterations: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """`iterations` steps of conjugate gradients on A x = g from x = 0; g and x are flat (P,).

    Args:
        product: d -> A d, A symmetric and positive definite.
        sizes: tensors that g consists of. Given, both step sizes are computed inside each of them while A d stays the
            full product, as released: a heuristic that does not converge to the solution. None: plain CG.

    A query of zeros gives zeros. Plain CG solves every query to the same relative accuracy, however small it is: what
    is added to the denominators is relative to |g|². With `sizes` it is absolute, as released, and a query with |g|²
    near 1e-12 is solved badly.

    >>> conjugate_gradients(lambda d: 2 * d, torch.tensor([4.0, 6.0], dtype=torch.float64), 1)
    tensor([2.0000, 3.0000], dtype=torch.float64)
    """
    parts = list(sizes or [len(g)])
    spread = torch.tensor(parts, device=g.device)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        """One product a tensor, each repeated over the tensor's entries."""
        each = torch.stack([(x * y).sum() for x, y in zip(a.split(parts), b.split(parts), strict=True)])
        return each.repeat_interleave(spread, output_size=len(g))

    scale, tiny = torch.ones((), dtype=torch.float64, device=g.device), RELEASED
    if sizes is None:  # CG of s·g is s times CG of g, so solving for g/|g| makes `tiny` relative to |g|²
        length = torch.linalg.vector_norm(g, dtype=torch.float64)  # in float32, squares of small numbers would vanish
        scale, tiny = torch.where(length > 0, length, scale), SMALL
    r = g / scale
    x, d = torch.zeros_like(g), r
    rr = dot(r, r)
    for _ in range(iterations):
        Ad = product(d)
        alpha = rr / (dot(d, Ad) + tiny)
        x, r = x + alpha * d, r - alpha * Ad
        before, rr = rr, dot(r, r)
        d = r + rr / (before + tiny) * d
    return x * scale


Loss = Callable[[Tensor], Tensor]  # θ -> loss


def cg(
    G: Tensor,
    lam: float,
    theta_P: Tensor,
    loss_P: Loss,
    iterations: int = 5,
    damping: float = 1.0,
    prefactor: Literal["c", "lambda"] = "c",
    sizes: Sequence[int] | None = None,
    fresh: bool = False,
    total: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple,
    pieces: Callable[[Loss], Sequence[Loss]] = lambda loss: [loss],
) -> Solve:
    """BiSSL's hypergradient. The stored gradients G are not used; θ_P is of any shape.

    Args:
        loss_P: θ -> pretext loss, differentiable twice. Full precision is the caller's business.
        sizes: tensors of flat θ_P with step sizes of their own (as released); None: joint ones.
        fresh: call `loss_P` anew for every product, for a loss that draws another mask each time (as released: the
            operator then changes between iterations). Otherwise one graph of the gradient serves a solve.
        total: sums over processes, where `loss_P` is one process's share of the loss.
        pieces: losses that add up to `loss_P`. With several, each product passes one after the other, and holds the
            graph of one at a time, at the price of a forward and a backward pass more a product.
    """
    check_lambda(lam)
    c = lam + damping
    at = theta_P.detach().requires_grad_()
    ok = torch.ones(1, dtype=torch.bool, device=theta_P.device)

    def gradient(loss: Loss) -> Tensor:
        return torch.autograd.grad(loss(at), at, create_graph=True)[0]

    def times(slope: Tensor, d: Tensor, again: bool = False) -> Tensor:
        return torch.autograd.grad(slope, at, d.view_as(at), retain_graph=again)[0]

    def apply(g: Tensor) -> Tensor:
        losses = pieces(loss_P)
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            # for this solve alone: its memory would lie beside the upper level's passes
            once = None if fresh or len(losses) > 1 else gradient(losses[0])

            def product(d: Tensor) -> Tensor:
                if once is not None:
                    Hd = times(once, d, again=True)
                else:
                    Hd = torch.zeros_like(at)
                    for loss in losses:
                        Hd += times(gradient(loss), d)
                return d + total([Hd])[0].flatten() / c

            x = conjugate_gradients(product, g.flatten(), iterations, sizes)
        ok.logical_and_(torch.isfinite(x).all())
        return (x if prefactor == "c" else x * (lam / c)).view_as(g)

    return Solve(apply, ok)
