"""Sheet 1: the hypergradient from stored gradients, for one block of θ.

The tasks, with hints, are in examples/exercises/sheet_1.md. Which functions are right, tells

    python examples/exercises/check.py examples/blanks/sheet_1.py

    G    (N_L, p)   the stored pretext gradients ∇L^P_i of one block, a row each
    g    (p,)       the query, the downstream gradient
    q    (p,)       the result, λ (F + λI)⁻¹ g with F = GᵀG / N_L
"""

from collections.abc import Callable

import torch
from torch import Tensor


def eq_7(G: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """The v (N_L, p) and d (N_L,) of one block, from its stored gradients G (N_L, p)."""
    # blank: the loop over the gradients of Eq. 7
    N_L, p = G.shape
    v = torch.zeros(N_L, p, dtype=G.dtype)
    d = torch.zeros(N_L, dtype=G.dtype)
    for i in range(N_L):
        v[i] = G[i] / lam
        for j in range(i):
            v[i] -= v[j] * (v[j] @ G[i]) / (N_L + d[j])  # N_L counts all gradients, from the start
        d[i] = v[i] @ G[i]
    return v, d
    # end of blank


def eq_10(v: Tensor, d: Tensor, g: Tensor, lam: float) -> Tensor:
    """The q (p,) of a query g (p,), from what Eq. 7 left: v (N_L, p) and d (N_L,)."""
    # blank: the sum of Eq. 10
    N_L = len(d)
    q = g.clone()
    for j in range(N_L):
        q -= lam * v[j] * (v[j] @ g) / (N_L + d[j])  # each term has g itself, not the q so far
    return q
    # end of blank


def fisher_product(G: Tensor, x: Tensor, lam: float) -> Tensor:
    """(F + λI) x for x (p,), with F = GᵀG / N_L, without making the p x p matrix F."""
    # blank: two products with G, and the damping
    inner = G @ x  # (N_L,): the numbers (∇L^P_i)ᵀ x
    return G.T @ inner / len(G) + lam * x
    # end of blank


def closed_form(G: Tensor, g: Tensor, lam: float) -> Tensor:
    """The q (p,) of a query g (p,) from one N_L x N_L system."""
    # blank: q = g − Gᵀ (N_L λI + GGᵀ)⁻¹ G g
    N_L = len(G)
    system = N_L * lam * torch.eye(N_L, dtype=G.dtype) + G @ G.T  # (N_L, N_L)
    w = torch.linalg.solve(system, G @ g)  # (N_L,)
    q: Tensor = g - G.T @ w
    return q
    # end of blank


def conjugate_gradients(product: Callable[[Tensor], Tensor], g: Tensor, iterations: int) -> Tensor:
    """Some steps of conjugate gradients on A x = g, from x = 0; returns x (p,).

    `product` is u -> A u. A is symmetric and positive definite. An iteration takes one product.
    """
    # blank: conjugate gradients
    x = torch.zeros_like(g)
    residual = g.clone()  # g − A x
    direction = residual
    yy = residual @ residual
    for _ in range(iterations):
        if yy == 0:
            break  # x is the solution
        A_direction = product(direction)
        eta = yy / (direction @ A_direction)  # how far: to the minimum along this direction
        x = x + eta * direction
        residual = residual - eta * A_direction
        yy_before = yy
        yy = residual @ residual
        direction = residual + yy / yy_before * direction  # conjugate to all earlier directions
    return x
    # end of blank
