"""BiSSLight in one page: the paper's Algorithm 1 with M-FAC (Matrix-Free Approximate Curvature).

Names are the paper's symbols. θ is a list of vectors, one for each block ⟨k⟩; φ is a list of
tensors. θ_D and φ are updated in place. L_P and L_D are functions (θ, φ, batch) -> scalar, D_P and
D_D iterators over batches, opt_P and opt_D functions (θ, φ) -> torch optimiser; `clip` bounds the
joint norm of a step's gradients. Use float64: Eq. 7 subtracts numbers that may be nearly equal.
"""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor


def eq_7(G: list[Tensor], lam: float) -> list[tuple[Tensor, Tensor]]:
    """The pairs (v_i, d_i) of one block, from its N_L stored gradients."""
    M: list[tuple[Tensor, Tensor]] = []
    for g_i in G:
        v_i = g_i / lam - sum(v_j * (v_j @ g_i) / (len(G) + d_j) for v_j, d_j in M)
        M.append((v_i, v_i @ g_i))
    return M


def eq_10(M: list[tuple[Tensor, Tensor]], g: Tensor, lam: float) -> Tensor:
    """One block of q ≈ λ (∇²L^P + λI)⁻¹ g, with g = ∇L^D at θ_P."""
    return g - lam * sum(v_j * (v_j @ g) / (len(M) + d_j) for v_j, d_j in M)


def grad(L: Any, theta: list[Tensor], phi: list[Tensor], batch: Any) -> list[list[Tensor]]:
    found = [*torch.autograd.grad(L(theta, phi, batch), theta + phi)]
    return [found[: len(theta)], found[len(theta) :]]


def update(opt: torch.optim.Optimizer, x: list[Tensor], g: list[Tensor], clip: float) -> None:
    for x_k, g_k in zip(x, g, strict=True):
        x_k.grad = g_k.clone()  # clipping scales the copy
    torch.nn.utils.clip_grad_norm_(x, clip)
    opt.step()


def algorithm_1(
    theta_D: list[Tensor], phi_P: list[Tensor], phi_D: list[Tensor], L_P: Any, L_D: Any,
    opt_P: Any, opt_D: Any, lam: float, T: int, N_L: int, N_U: int, D_P: Any, D_D: Any,
    clip: float = 10.0,
) -> Iterator[list[Tensor]]:  # fmt: skip
    theta_P = [x.detach().clone().requires_grad_() for x in theta_D]  # l.2
    lower, upper = opt_P(theta_P, phi_P), opt_D(theta_D, phi_D)
    for _ in range(T):  # l.3
        G = []  # l.4
        for _ in range(N_L):  # l.5
            g_P, g_phi_P = grad(L_P, theta_P, phi_P, next(D_P))  # l.6
            G.append(g_P)  # l.6: without the term of l.7, unclipped
            terms = zip(g_P, theta_P, theta_D, strict=True)  # l.7
            g_theta_P = [g + lam * (P - D).detach() for g, P, D in terms]  # l.7
            update(lower, theta_P + phi_P, g_theta_P + g_phi_P, clip)  # l.8, l.9
        M = [eq_7([*G_k], lam) for G_k in zip(*G, strict=True)]  # l.10
        for _ in range(N_U):  # l.11
            g, g_phi = grad(L_D, theta_P, phi_D, batch := next(D_D))  # l.12
            q = [eq_10(M_k, g_k, lam) for M_k, g_k in zip(M, g, strict=True)]  # l.13
            h, h_phi = grad(L_D, theta_D, phi_D, batch)  # l.14: the same at θ_D
            g_theta_D = [a + b for a, b in zip(q, h, strict=True)]  # l.14
            g_phi_D = [a + b for a, b in zip(g_phi, h_phi, strict=True)]  # l.15
            update(upper, theta_D + phi_D, g_theta_D + g_phi_D, clip)  # l.16
        yield theta_P  # l.17


if __name__ == "__main__":  # a quadratic whose bilevel optimum is known
    H, a, c = torch.tensor([[0.5, 1, 2, 4], [1, 1, 1, 1], [2, -1, 0.5, -2]]).double()
    lam, e = 0.1, torch.diag(2 / H.sqrt())  # x = a ± e has mean a and covariance H⁻¹, so F ≈ H
    s = lam / (H + lam)  # dθ_P*/dθ_D, since θ_P* = (1 − s) a + s θ_D
    best = (c - s * ((1 - s) * a - c)) / (1 + s**2)  # θ_D where the derivative of Eq. 3 is 0
    theta = [torch.zeros(2).double().requires_grad_() for _ in range(2)]  # two blocks
    L_P: Any = lambda theta, phi, x: H @ (torch.cat(theta) - x) ** 2 / 2  # noqa: E731
    L_D: Any = lambda theta, phi, x: (torch.cat(theta) - c).square().sum() / 2  # noqa: E731
    opt: Any = lambda theta, phi: torch.optim.SGD(theta, lr=0.05)  # noqa: E731
    data = cycle([*(a + e), *(a - e)]), cycle([None])
    for _ in algorithm_1(theta, [], [], L_P, L_D, opt, opt, lam, 8, 16, 20, *data):
        print(f"distance to the optimum: {(torch.cat(theta) - best).norm():.4f}")
