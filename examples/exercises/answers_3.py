"""Sheet 3: Algorithm 1, first its two kinds of steps, then all of it.

The tasks, with hints, are in examples/exercises/sheet_3.md. Which functions are right, tells

    python examples/exercises/check.py examples/blanks/sheet_3.py

    theta_P, theta_D    θ_P, θ_D    (K, p), K blocks of p numbers; leaf tensors with requires_grad
    phi_P, phi_D        φ_P, φ_D    the heads, one tensor each; leaf tensors with requires_grad
    L_P, L_D            L^P, L^D    functions (θ, φ, batch) -> scalar
    opt_P, opt_D                    torch optimisers of [θ_P, φ_P] and of [θ_D, φ_D]: `step` moves
                                    each tensor by what is in its `.grad`
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (theta, phi, batch) -> scalar
Map = Callable[[Tensor], Tensor]  # g (K, p) -> q (K, p)


def lower_step(
    L_P: Loss,
    theta_P: Tensor,
    theta_D: Tensor,
    phi_P: Tensor,
    batch: Tensor,
    lam: float,
    opt_P: Optimizer,
) -> Tensor:
    """Lines 6 to 9: moves θ_P and φ_P by one step of opt_P; returns what line 6 appends to G."""
    # blank: lines 6 to 9
    grad_P, g_phi_P = torch.autograd.grad(L_P(theta_P, phi_P, batch), [theta_P, phi_P])  # l.6, l.8
    g_P = grad_P + lam * (theta_P - theta_D).detach()  # l.7, a new tensor: grad_P stays as it is
    theta_P.grad = g_P
    phi_P.grad = g_phi_P
    opt_P.step()  # l.9
    return grad_P
    # end of blank


def upper_step(
    L_D: Loss,
    theta_P: Tensor,
    theta_D: Tensor,
    phi_D: Tensor,
    batch: Tensor,
    solve: Map,
    opt_D: Optimizer,
) -> Tensor:
    """Lines 12 to 16: moves θ_D and φ_D by one step of opt_D; returns q of line 13.

    `solve` is what line 10 left, the function g -> q of Eq. 10. All lines use the same batch.
    """
    # blank: lines 12 to 16
    g, grad_phi_at_P = torch.autograd.grad(L_D(theta_P, phi_D, batch), [theta_P, phi_D])  # l.12
    q = solve(g)  # l.13
    grad_D_at_D, grad_phi_at_D = torch.autograd.grad(L_D(theta_D, phi_D, batch), [theta_D, phi_D])
    theta_D.grad = q + grad_D_at_D  # l.14
    phi_D.grad = grad_phi_at_P + grad_phi_at_D  # l.15
    opt_D.step()  # l.16
    return q
    # end of blank


class Problem(NamedTuple):
    """Line 1: everything that Algorithm 1 is given."""

    theta: Tensor  # (K, p), the start of both levels
    phi_P: Tensor
    phi_D: Tensor
    L_P: Loss
    L_D: Loss
    pretext: Iterator[Tensor]  # batches for the lower level
    labelled: Iterator[Tensor]  # batches for the upper level
    hypergrad: Callable[[Tensor, float], Map]  # line 10: G (K, N_L, p) and λ -> solve
    lr: float  # learning rate of both levels, for SGD
    lam: float
    T: int
    N_L: int
    N_U: int


def algorithm_1(problem: Problem) -> Tensor:
    """Algorithm 1, with `lower_step` and `upper_step` of above; returns θ_P (line 17).

    The tensors of the problem stay as they are: θ and φ of the training are copies. Stack the
    gradients of an alternation to G (K, N_L, p) before line 10.
    """
    # blank: lines 2 to 17
    theta_D = problem.theta.detach().clone().requires_grad_()  # l.2
    theta_P = theta_D.detach().clone().requires_grad_()  # l.2: equal numbers, another tensor
    phi_P = problem.phi_P.detach().clone().requires_grad_()
    phi_D = problem.phi_D.detach().clone().requires_grad_()
    opt_P = SGD([theta_P, phi_P], lr=problem.lr)
    opt_D = SGD([theta_D, phi_D], lr=problem.lr)
    for _ in range(problem.T):  # l.3
        rows = []  # l.4
        for _ in range(problem.N_L):  # l.5
            batch = next(problem.pretext)
            row = lower_step(problem.L_P, theta_P, theta_D, phi_P, batch, problem.lam, opt_P)
            rows.append(row)
        G = torch.stack(rows, 1)  # (K, N_L, p)
        solve = problem.hypergrad(G, problem.lam)  # l.10
        for _ in range(problem.N_U):  # l.11
            batch = next(problem.labelled)
            upper_step(problem.L_D, theta_P, theta_D, phi_D, batch, solve, opt_D)
    return theta_P.detach()  # l.17
    # end of blank
