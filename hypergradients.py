"""Paper: what M-FAC is compared with, BiSSL's conjugate gradients, and the dense inverse.

    cg          BiSSL, BiSSLight's predecessor (App. D.2.1): a few Hessian-vector products a query
    identity    q = g, no curvature at all; a control that the paper does not have
    exact       Eq. 5 with the dense Hessian, for small θ

All have one signature, that of `mfac.mfac`: (G, λ, H) -> inverse, a function g -> q. `H()` returns
the Hessian-vector product of the last pretext batch, a function u -> H u. It is asked for when it
is needed, because it keeps the graph of a whole pretext pass alive as long as it is in use.

    G    G       (K, m, p)   the m = N_L stored gradients, m rows for each row of θ. None of the
                             three uses their numbers; `exact` looks at the shape
    lam  λ       scalar > 0  coupling of Eq. 4
    H    H       (K p, K p)  Hessian of L^P with respect to θ at θ_P; `H()` is the function u -> H u
    g    ∇L^D    (K, p)      query: the downstream gradient at θ_P (l.12)
    q    q       (K, p)      ≈ λ (H + λI)⁻¹ g (l.13)

Conjugate gradients work with c = λ + damping, λ + 1 in the paper and as released, and take a few
iterations on

    (I + H/c) x = g,   whose solution is x = c (H + cI)⁻¹ g,

each with one Hessian-vector product through the whole pretext pass. The released program returns x,
so the factor before the inverse is c. Eq. 5 has λ, which gives x λ/c: see `prefactor`.

This file needs torch alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]  # of a tensor (K, p): u -> H u, g -> q


def conjugate_gradients(
    product: Map, g: Tensor, iterations: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """`iterations` steps of conjugate gradients on product(x) = g from x = 0; g and x: flat (K p,).

    Args:
        product: u -> the product of a symmetric positive definite matrix with u.
        g: the right side, not modified.
        iterations: how many products are taken.
        sizes: None is plain CG. g is divided by |g| first, so that |g| makes no difference; g = 0
            gives x = 0. Otherwise these are the lengths of the tensors that g consists of, and the
            two step sizes below are computed for each tensor, while a product is one with the whole
            matrix. The released program does this; it is a heuristic that need not converge to the
            solution. g is then not divided by |g|, so for a small g the 1e-12 in the denominators
            changes the result.

    >>> conjugate_gradients(lambda u: 2 * u, torch.tensor([4.0, 6.0], dtype=torch.float64), 1)
    tensor([2.0000, 3.0000], dtype=torch.float64)
    """
    scale: Tensor | float = 1.0
    tiny = 1e-12  # in both denominators: nothing is divided by zero
    if sizes is None:
        length = torch.linalg.vector_norm(g, dtype=torch.float64)  # squares may vanish in float32
        scale = torch.where(length > 0, length, 1.0)
        tiny = 1e-14
    lengths = list(sizes or [len(g)])

    def dot(x: Tensor, y: Tensor) -> Tensor:
        """One inner product per tensor, each repeated over the tensor's entries."""
        pieces = (x * y).split(lengths)
        return torch.cat([piece.sum().expand_as(piece) for piece in pieces])

    x = torch.zeros_like(g)
    residual = (g / scale).to(g.dtype)
    direction = residual
    squared = dot(residual, residual)
    for _ in range(iterations):
        change = product(direction)  # of the residual, for a step of length 1
        step = squared / (dot(direction, change) + tiny)
        x = x + step * direction
        residual = residual - step * change
        squared_before = squared
        squared = dot(residual, residual)
        turn = squared / (squared_before + tiny)
        direction = residual + turn * direction
    return (x * scale).to(g.dtype)


def cg(
    G: Tensor,
    lam: float,
    H: Callable[[], Map],
    iterations: int = 5,
    damping: float = 1.0,
    prefactor: Literal["c", "lambda"] = "c",
    sizes: Sequence[int] | None = None,
) -> Map:
    """BiSSL's hypergradient: (G, λ, H) -> inverse, a function g (K, p) -> q (K, p).

    Args:
        G: not used.
        lam: λ > 0 (ValueError otherwise).
        H: `H()` returns the function u -> H u, both (K, p), in full precision; called once a query.
        iterations, sizes: as in `conjugate_gradients`.
        damping: c = λ + damping.
        prefactor: `c` returns c (H + cI)⁻¹ g, as released; `lambda` λ (H + cI)⁻¹ g, as in Eq. 5.
    """
    check_lambda(lam)
    c = lam + damping

    def inverse(g: Tensor) -> Tensor:
        hessian_product = H()  # for this solve alone: its graph must not outlive it

        def product(u: Tensor) -> Tensor:  # u -> (I + H/c) u
            Hu = hessian_product(u.view_as(g))  # (K, p)
            return u + Hu.flatten() / c

        x = conjugate_gradients(product, g.flatten(), iterations, sizes)
        if prefactor == "lambda":
            x = x * (lam / c)
        return x.view_as(g)

    return inverse


def identity(G: Tensor, lam: float, H: object = None) -> Map:
    """No curvature, q = g: the limit of Eq. 5 for a pretext Hessian much smaller than λ.

    A control; the paper does not have it. The returned q is a copy.
    """
    check_lambda(lam)

    def inverse(g: Tensor) -> Tensor:
        return g.clone()

    return inverse


def exact(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
    """Eq. 5 itself, q = λ (H + λI)⁻¹ g with the dense Hessian of the pretext loss at (θ_P, φ_P).

    It takes one product per parameter, so it is for small θ only. Eq. 4 minimises over φ_P as well,
    while Eq. 5 holds φ_P fixed; so where θ and φ are coupled, even this is not the gradient of the
    bilevel problem. That would be the same formula with the Schur complement
    H_θθ − H_θφ H_φφ⁻¹ H_φθ instead of H. The program keeps the paper's approximation.

    Args:
        G: (K, m, p); only its shape is used.
        lam: λ > 0 (ValueError otherwise).
        H: `H()` returns the function u -> H u, both (K, p); called once.
    """
    check_lambda(lam)
    K, _, p = G.shape
    product = H()
    columns = []
    for unit in torch.eye(K * p, dtype=G.dtype, device=G.device):
        columns.append(product(unit.view(K, p)).flatten())
    system = torch.stack(columns).double()  # (K p, K p); H is symmetric, so rows are columns
    system.diagonal().add_(lam)

    def inverse(g: Tensor) -> Tensor:
        x = torch.linalg.solve(system, g.double().flatten())
        return (lam * x).view_as(g).to(g)  # type: ignore[no-any-return]

    return inverse


def check_lambda(lam: float) -> None:
    """λ couples the two levels; ValueError unless it is finite and above 0."""
    if not 0 < lam < math.inf:
        raise ValueError(f"lambda must be a finite number above 0, got {lam}")
