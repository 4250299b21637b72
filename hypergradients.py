"""Conjugate gradients: the hypergradient of BiSSL, BiSSLight's predecessor (App. D.2.1).

With c = λ + damping and H the Hessian of the pretext loss at θ_P, CG takes a few iterations on

    (I + H/c) x = g,   whose solution is x = c (H + cI)⁻¹ g,

each with one exact Hessian-vector product through the whole pretext pass. The released program
returns x, so the factor before the inverse is c. Eq. 5 has λ, which gives x λ/c: see `prefactor`.

    g    ∇L^D at θ_P, the query (l.12)          x, q  the result
    c    λ + 1 in the paper and as released     d, r  search direction and residual
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]  # of a tensor like θ: d -> H d, g -> q


def conjugate_gradients(
    product: Map, g: Tensor, iterations: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """`iterations` steps of conjugate gradients on A x = g from x = 0; g and x are flat (P,).

    Args:
        product: d -> A d, A symmetric and positive definite.
        sizes: None is plain CG. g is divided by |g| first, so that |g| makes no difference; g = 0
            gives x = 0. Otherwise these are the lengths of the tensors that g consists of, and α
            and β are computed for each tensor, while A d is the product with all of A. The released
            program does this; it is a heuristic that need not converge to the solution. g is then
            not divided by |g|, so for a small g the 1e-12 in the denominators changes the result.

    >>> conjugate_gradients(lambda d: 2 * d, torch.tensor([4.0, 6.0], dtype=torch.float64), 1)
    tensor([2.0000, 3.0000], dtype=torch.float64)
    """
    parts = list(sizes or [len(g)])
    length = torch.linalg.vector_norm(g, dtype=torch.float64)  # squares may vanish in float32
    scale = torch.where((length > 0) & (sizes is None), length, 1.0)
    tiny = 1e-14 if sizes is None else 1e-12  # in both denominators: nothing is divided by zero

    def dot(a: Tensor, b: Tensor) -> Tensor:
        """One product per tensor, each repeated over the tensor's entries."""
        return torch.cat([piece.sum().expand_as(piece) for piece in (a * b).split(parts)])

    r = (g / scale).to(g.dtype)
    x, d = torch.zeros_like(g), r
    rr = dot(r, r)
    for _ in range(iterations):
        Ad = product(d)
        alpha = rr / (dot(d, Ad) + tiny)
        x, r = x + alpha * d, r - alpha * Ad
        before, rr = rr, dot(r, r)
        d = r + rr / (before + tiny) * d
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
        G: not used; lam: λ > 0 (ValueError otherwise).
        H: `H()` returns the function d -> H d in full precision; it is called once per query.
        iterations, sizes: as in `conjugate_gradients`.
        damping: c = λ + damping.
        prefactor: `c` returns c (H + cI)⁻¹ g, as released; `lambda` λ (H + cI)⁻¹ g, as in Eq. 5.
    """
    check(lam)
    c = lam + damping

    def inverse(g: Tensor) -> Tensor:
        product = H()  # for this solve alone: its graph must not lie beside the upper level's
        x = conjugate_gradients(
            lambda d: d + product(d.view_as(g)).flatten() / c, g.flatten(), iterations, sizes
        )
        return (x if prefactor == "c" else x * (lam / c)).view_as(g)

    return inverse


def identity(G: Tensor, lam: float, H: object = None) -> Map:
    """No curvature, q = g: the limit of Eq. 5 for a pretext Hessian much smaller than λ.

    A control; the paper does not have it. The returned q is a copy.
    """
    check(lam)
    return Tensor.clone


def exact(G: Tensor, lam: float, H: Callable[[], Map]) -> Map:
    """Eq. 5 itself, q = λ (H + λI)⁻¹ g with the dense Hessian of the pretext loss at (θ_P, φ_P).

    It takes one product per parameter, so it is for small θ only. Eq. 4 minimises over φ_P as well,
    while Eq. 5 holds φ_P fixed; so where θ and φ are coupled, even this is not the gradient of the
    bilevel problem. That would be the same formula with the Schur complement
    H_θθ − H_θφ H_φφ⁻¹ H_φθ instead of H. The program keeps the paper's approximation.

    Args:
        G: (K, m, p); only its shape is used.
        lam: λ > 0.
        H: `H()` returns the function d -> H d.
    """
    check(lam)
    product, shape = H(), G.shape[::2]  # (K, p)
    units = torch.eye(shape.numel(), dtype=G.dtype, device=G.device)
    dense = torch.stack([product(e.view(shape)).flatten() for e in units]).double()
    dense.diagonal().add_(lam)

    def inverse(g: Tensor) -> Tensor:
        x = torch.linalg.solve(dense, g.double().flatten())
        return (lam * x).view_as(g).to(g)  # type: ignore[no-any-return]

    return inverse


def check(lam: float) -> None:
    """λ couples the levels; ValueError unless it is finite and above 0."""
    if not 0 < lam < math.inf:
        raise ValueError(f"lambda must be a finite number above 0, got {lam}")
