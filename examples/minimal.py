"""BiSSLight in one page: the paper's Algorithm 1 with M-FAC (Matrix-Free Approximate Curvature).

Names are the paper's symbols; `l.n` is line n of Algorithm 1. θ is a list of vectors, one for each
block ⟨k⟩; φ is a list of tensors. L_P and L_D are functions (θ, φ, batch) -> scalar; the frozen
backbone ψ is inside of them. D_P and D_D are iterators over batches, opt_P and opt_D functions
(θ, φ) -> torch optimiser. `clip` bounds the joint norm of a step's gradients; the paper does not
mention it. θ_D and φ are updated in place. Use float64: Eq. 7 subtracts numbers that may be nearly
equal.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Tensors = list[Tensor]
Loss = Callable[[Tensors, Tensors, Any], Tensor]
MakeOptimiser = Callable[[Tensors, Tensors], Optimizer]


def eq_7(G_k: Tensors, lam: float) -> list[tuple[Tensor, Tensor]]:
    """M of one block: N_L pairs v_i (p,), d_i (scalar), from its N_L stored gradients (p,)."""
    M_k: list[tuple[Tensor, Tensor]] = []
    for g_i in G_k:
        v_i = g_i / lam
        for v_j, d_j in M_k:
            v_i = v_i - v_j * (v_j @ g_i) / (len(G_k) + d_j)
        M_k.append((v_i, v_i @ g_i))
    return M_k


def eq_10(M_k: list[tuple[Tensor, Tensor]], g_k: Tensor, lam: float) -> Tensor:
    """One block (p,) of q ≈ λ (∇²L^P + λI)⁻¹ g, with g = ∇L^D at θ_P."""
    q_k = g_k
    for v_j, d_j in M_k:
        q_k = q_k - lam * v_j * (v_j @ g_k) / (len(M_k) + d_j)
    return q_k


def grad(L: Loss, theta: Tensors, phi: Tensors, batch: object) -> tuple[Tensors, Tensors]:
    """∇_θ L and ∇_φ L."""
    gradients = list(torch.autograd.grad(L(theta, phi, batch), theta + phi))
    return gradients[: len(theta)], gradients[len(theta) :]


def update(opt: Optimizer, tensors: Tensors, gradients: Tensors, clip: float) -> None:
    """One step of an optimiser on its tensors."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient.clone()  # clipping scales the copy
    torch.nn.utils.clip_grad_norm_(tensors, clip)
    opt.step()


def algorithm_1(
    theta_D: Tensors,
    phi_P: Tensors,
    phi_D: Tensors,
    L_P: Loss,
    L_D: Loss,
    opt_P: MakeOptimiser,
    opt_D: MakeOptimiser,
    lam: float,
    T: int,
    N_L: int,
    N_U: int,
    D_P: Iterator[Any],
    D_D: Iterator[Any],
    clip: float = 10.0,
) -> Iterator[Tensors]:
    """Algorithm 1, with line 1 as its arguments; yields θ_P after each alternation."""
    theta_P = [x.detach().clone().requires_grad_() for x in theta_D]  # l.2
    lower = opt_P(theta_P, phi_P)
    upper = opt_D(theta_D, phi_D)
    for _ in range(T):  # l.3
        G = []  # l.4
        for _ in range(N_L):  # l.5
            grad_P, g_phi_P = grad(L_P, theta_P, phi_P, next(D_P))  # l.6, and g_phi_P of line 8
            G.append(grad_P)  # l.6: without the term of l.7, unclipped
            g_P = []
            for g_k, theta_P_k, theta_D_k in zip(grad_P, theta_P, theta_D, strict=True):
                g_P.append(g_k + lam * (theta_P_k - theta_D_k).detach())  # l.7
            update(lower, theta_P + phi_P, g_P + g_phi_P, clip)  # l.8, l.9
        M = [eq_7(list(G_k), lam) for G_k in zip(*G, strict=True)]  # l.10, block by block
        for _ in range(N_U):  # l.11
            batch = next(D_D)  # one for l.12 to l.15; the paper leaves this open
            g, g_phi_D_at_P = grad(L_D, theta_P, phi_D, batch)  # l.12
            q = [eq_10(M_k, g_k, lam) for M_k, g_k in zip(M, g, strict=True)]  # l.13
            grad_D, g_phi_D_at_D = grad(L_D, theta_D, phi_D, batch)  # l.14
            g_D = [q_k + g_k for q_k, g_k in zip(q, grad_D, strict=True)]  # l.14
            both = zip(g_phi_D_at_P, g_phi_D_at_D, strict=True)
            g_phi_D = [at_P + at_D for at_P, at_D in both]  # l.15
            update(upper, theta_D + phi_D, g_D + g_phi_D, clip)  # l.16
        yield theta_P  # l.17


def quadratic() -> None:
    """A bilevel problem whose optimum is known: quadratic losses, H diagonal.

    At the lower minimum H (θ_P − low_P) + λ (θ_P − θ_D) = 0, so θ_P* = (1 − J) low_P + J θ_D. The
    derivative of Eq. 3 is J (θ_P* − low_D) + (θ_D − low_D); `best` is where it is 0.
    """
    H = torch.tensor([0.5, 1, 2, 4]).double()
    low_P = torch.ones(4).double()  # where L^P is least
    low_D = torch.tensor([2, -1, 0.5, -2]).double()  # where L^D is least
    lam = 0.1
    J = lam / (H + lam)  # dθ_P*/dθ_D
    best = (low_D - J * ((1 - J) * low_P - low_D)) / (1 + J**2)

    def L_P(theta: Tensors, phi: Tensors, x: Tensor) -> Tensor:
        return H @ (torch.cat(theta) - x) ** 2 / 2

    def L_D(theta: Tensors, phi: Tensors, _: None) -> Tensor:
        return (torch.cat(theta) - low_D).square().sum() / 2

    def sgd(theta: Tensors, phi: Tensors) -> Optimizer:
        return torch.optim.SGD(theta, lr=0.05)

    # Samples with mean low_P and covariance H⁻¹: at low_P, F = H · H⁻¹ · H = H. Elsewhere F is
    # larger; for that reason the distance stays at 0.025, however many alternations there are.
    # The controls: with q_k = g_k in eq_10 the loop ends 3.1 from the optimum, with q_k = 0 0.23.
    shift = torch.diag(2 / H.sqrt())
    D_P = cycle(torch.cat([low_P + shift, low_P - shift]))
    D_D = cycle([None])
    theta = [torch.zeros(2).double().requires_grad_() for _ in range(2)]  # two blocks
    for _ in algorithm_1(theta, [], [], L_P, L_D, sgd, sgd, lam, 8, 16, 20, D_P, D_D):
        print(f"distance to the optimum: {(torch.cat(theta) - best).norm():.4f}")


if __name__ == "__main__":
    quadratic()
