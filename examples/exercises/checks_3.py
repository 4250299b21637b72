"""Checks of sheet 3: steps of Algorithm 1 on quadratic losses, with gradients by hand."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD
from witness import Wrong, distance, eye, no_graph, random, same, untouched

K = 2  # θ (K, p)
p = 3
n = 2  # φ (n,)
M = random(4, K * p)
N = random(4, n, seed=1)
LAM = 0.3
LR = 0.1


def loss(theta: Tensor, phi: Tensor, batch: Tensor) -> Tensor:
    """A quadratic loss in which θ and φ are coupled: ½ |M θ + N φ − batch|²."""
    return (M @ theta.flatten() + N @ phi - batch).square().sum() / 2


def by_hand(theta: Tensor, phi: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradients with respect to θ and φ, without automatic differentiation."""
    residual = M @ theta.flatten() + N @ phi - batch
    return (M.T @ residual).view(K, p), N.T @ residual


def start() -> list[Tensor]:
    """θ_P, θ_D and φ."""
    tensors = [random(K, p, seed=2), random(K, p, seed=3), random(n, seed=4)]
    return [x.requires_grad_() for x in tensors]


def check_lower_step(lower_step: Any) -> None:
    """Two steps of plain gradient descent against gradients by hand."""
    theta_P, theta_D, phi_P = start()
    theta, fixed, phi = (x.detach().clone() for x in (theta_P, theta_D, phi_P))
    opt = SGD([theta_P, phi_P], lr=LR)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in (1, 2):
        batch = random(4, seed=10 + step)
        found = lower_step(loss, theta_P, theta_D, phi_P, batch, LAM, opt)
        grad, g_phi = by_hand(theta, phi, batch)
        delta = LAM * (theta - fixed)
        which = "first" if step == 1 else "second"
        row_of(found, grad, delta, which)
        no_graph(f"the gradient for G of the {which} step", found)
        untouched("θ_D", theta_D, fixed)
        same(f"θ_P after the {which} step", theta_P, theta - LR * (grad + delta), {
            "the penalty of line 7 is missing": theta - LR * grad,
            "the penalty of line 7 pushes θ_P away from θ_D; its gradient is λ(θ_P − θ_D)":
                theta - LR * (grad - delta),
            "the penalty of line 7 has no λ": theta - LR * (grad + delta / LAM),
            "θ_P did not move; does opt_P find a gradient in `theta_P.grad`?": theta,
        })  # fmt: skip
        moved = theta - LR * (grad + delta)
        same(f"φ_P after the {which} step", phi_P, phi - LR * g_phi, {
            "φ_P did not move": phi,
            "its gradient was taken after θ_P had moved; line 8 comes before line 9":
                phi - LR * by_hand(moved, phi, batch)[1],
        })  # fmt: skip
        theta = moved
        phi = phi - LR * g_phi
        kept.append((found, grad))
    for found, grad in kept:
        if distance(found, grad) > 1e-6:
            raise Wrong("a gradient that was returned has changed in a later step: return a copy")


def row_of(found: Any, grad: Tensor, delta: Tensor, which: str) -> None:
    """What the lower step returns is ∇L^P alone."""
    same(f"the gradient for G of the {which} step", found, grad, {
        "it has the gradient of the penalty in it, but G must not, since M-FAC adds λI by itself "
        "(if you return `theta_P.grad`, a later `+=` changes what you return: return a clone)":
            grad + delta,
        "it has the gradient of the penalty, with the wrong sign": grad - delta,
    })  # fmt: skip


def check_upper_step(upper_step: Any) -> None:
    """Two steps of plain gradient descent against gradients by hand; the inverse is a matrix."""
    theta_P, theta_D, phi_D = start()
    fixed, theta, phi = (x.detach().clone() for x in (theta_P, theta_D, phi_D))
    R = random(K * p, K * p, seed=5)
    opt = SGD([theta_D, phi_D], lr=LR)

    def inverse(g: Tensor) -> Tensor:
        return (R @ g.flatten()).view(K, p)

    earlier = torch.zeros_like(fixed)  # what `.grad` of θ_P would hold, were it never cleared
    for step in (1, 2):
        batch = random(4, seed=20 + step)
        q = upper_step(loss, theta_P, theta_D, phi_D, batch, inverse, opt)
        which = "first" if step == 1 else "second"
        g, phi_at_P = by_hand(fixed, phi, batch)
        grad_D, phi_at_D = by_hand(theta, phi, batch)
        untouched("θ_P", theta_P, fixed)
        same(f"q of the {which} step", q, inverse(g), {
            "g was taken at θ_D; line 12 takes it at θ_P": inverse(grad_D),
            "this is g; line 13 gives it to `inverse`": g,
            "g has the gradient of the first step in it, too; `theta_P.grad` adds up over passes, "
            "and opt_D does not clear it": inverse(earlier + g),
        })  # fmt: skip
        no_graph(f"q of the {which} step", q)
        total = inverse(g) + grad_D
        same(f"θ_D after the {which} step", theta_D, theta - LR * total, {
            "the second term of line 14, ∇L^D at θ_D, is missing": theta - LR * inverse(g),
            "q is missing in line 14": theta - LR * grad_D,
            "g stands in the place of q in line 14": theta - LR * (g + grad_D),
            "the second term of line 14 must be taken at θ_D, not at θ_P":
                theta - LR * (inverse(g) + g),
            "θ_D did not move; does opt_D find a gradient in `theta_D.grad`?": theta,
        })  # fmt: skip
        same(f"φ_D after the {which} step", phi_D, phi - LR * (phi_at_P + phi_at_D), {
            "its gradient at θ_P is missing; line 15 adds two": phi - LR * phi_at_D,
            "its gradient at θ_D is missing; line 15 adds two": phi - LR * phi_at_P,
            "line 15 adds the two gradients, it does not take their mean":
                phi - LR * (phi_at_P + phi_at_D) / 2,
        })  # fmt: skip
        theta = theta - LR * total
        phi = phi - LR * (phi_at_P + phi_at_D)
        earlier = earlier + g


def check_algorithm_1(algorithm_1: Any) -> None:
    """A bilevel problem whose optimum is known, and what passes through lines 6, 10 and 12."""
    problem = Quadratic()
    before = [x.clone() for x in (problem.theta, problem.phi)]
    theta_P = algorithm_1(problem.given())
    untouched("the problem's θ", problem.theta, before[0])
    untouched("the problem's φ", problem.phi, before[1])
    problem.look_at_calls()
    if not isinstance(theta_P, Tensor) or theta_P.shape != (2, 2):
        raise Wrong("algorithm_1 must return θ_P, a tensor (K, p)")
    no_graph("θ_P at the end", theta_P)
    same("θ_P at the end", theta_P, problem.theta_P_star(problem.best()), {
        "this is θ_D; line 17 returns θ_P": problem.best(),
        "it is where descent with q = g ends":
            problem.theta_P_star(problem.best_without_curvature()),
    }, tolerance=1e-3)  # fmt: skip


class Problem(NamedTuple):
    """Line 1, as the sheet has it."""

    theta: Tensor
    phi_P: Tensor
    phi_D: Tensor
    L_P: Callable[[Tensor, Tensor, Tensor], Tensor]
    L_D: Callable[[Tensor, Tensor, Tensor], Tensor]
    pretext: Iterator[Tensor]
    labelled: Iterator[Tensor]
    hypergrad: Callable[[Tensor, float], Callable[[Tensor], Tensor]]
    lr: float
    lam: float
    T: int
    N_L: int
    N_U: int


class Quadratic:
    """Quadratic losses without noise, a diagonal Hessian, and an inverse that is exact.

    So the steps end in the optimum of Eq. 3, which is known, and not only near it.
    """

    T = 30
    N_L = 10
    N_U = 2
    lam = 0.5

    def __init__(self) -> None:
        self.H = torch.tensor([0.5, 1, 2, 4]).double()
        self.low_P = torch.ones(4).double()  # minimum of L^P
        self.low_D = torch.tensor([2, -1, 0.5, -2]).double()  # minimum of L^D
        self.theta = torch.zeros(2, 2).double()
        self.phi = torch.zeros(1).double()
        self.lower: list[tuple[Tensor, Tensor]] = []  # θ and ∇L^P of every lower pass
        self.upper: list[Tensor] = []  # θ of every upper pass
        self.stored: list[Tensor] = []  # every G

    def given(self) -> Problem:
        """Line 1."""
        return Problem(
            theta=self.theta, phi_P=self.phi, phi_D=self.phi, L_P=self.L_P, L_D=self.L_D,
            pretext=itertools.cycle([self.low_P]),
            labelled=itertools.cycle([torch.zeros(1).double()]),
            hypergrad=self.hypergrad, lr=0.2, lam=self.lam, T=self.T, N_L=self.N_L, N_U=self.N_U,
        )  # fmt: skip

    def L_P(self, theta: Tensor, phi: Tensor, x: Tensor) -> Tensor:
        """½ (θ − x)ᵀ H (θ − x), with a head that has no effect."""
        at = theta.detach().flatten()
        self.lower.append((at.clone(), self.H * (at - x)))
        return self.H @ (theta.flatten() - x).square() / 2 + 0 * phi.sum()

    def L_D(self, theta: Tensor, phi: Tensor, _: Tensor) -> Tensor:
        """½ |θ − low_D|²."""
        self.upper.append(theta.detach().clone())
        return (theta.flatten() - self.low_D).square().sum() / 2 + 0 * phi.sum()

    def hypergrad(self, G: Tensor, lam: float) -> Callable[[Tensor], Tensor]:
        """Eq. 5 with H itself; G is kept, to be looked at."""
        if not isinstance(G, Tensor) or G.shape != (2, self.N_L, 2):
            shape = tuple(G.shape) if isinstance(G, Tensor) else type(G).__name__
            why = "it holds the gradients of this alternation alone (line 4 empties it)"
            if shape == (self.N_L, 2, 2):
                why = "`torch.stack(rows)` puts N_L first; name the axis, as the hint does"
            raise Wrong(
                f"G is {shape} at line 10; it must be (K, N_L, p) = (2, {self.N_L}, 2): {why}"
            )
        if lam != self.lam:
            raise Wrong(f"line 10 was given {lam} as λ; it is {self.lam}")
        self.stored.append(G.detach().clone())
        factor = (self.lam / (self.H + self.lam)).view(2, 2)
        return lambda g: factor * g

    def look_at_calls(self) -> None:
        """As many passes as Algorithm 1 has, and G holds what the lower passes computed."""
        counts = {
            "L_P (line 6)": (len(self.lower), self.T * self.N_L),
            "L_D (lines 12 and 14)": (len(self.upper), 2 * self.T * self.N_U),
            "hypergrad (line 10)": (len(self.stored), self.T),
        }
        for what, (calls, right) in counts.items():
            if calls != right:
                raise Wrong(f"{what} was called {calls} times; Algorithm 1 calls it {right} times")
        pairs = zip(self.upper[::2], self.upper[1::2], strict=True)  # of each upper step
        if all(torch.equal(first, second) for first, second in pairs):
            raise Wrong(
                "lines 12 and 14 always had the same θ: θ_P and θ_D must be two tensors, which are "
                "equal at line 2 alone"
            )
        for t, G in enumerate(self.stored):
            passes = self.lower[t * self.N_L : (t + 1) * self.N_L]
            expected = torch.stack([gradient for _, gradient in passes])  # (N_L, 4)
            same(f"G of alternation {t + 1}", G.transpose(0, 1).flatten(1), expected)

    def theta_P_star(self, theta_D: Tensor) -> Tensor:
        """The solution of the lower level, (2, 2)."""
        J = self.lam / (self.H + self.lam)
        return ((1 - J) * self.low_P + J * theta_D.flatten()).view(2, 2)

    def best(self) -> Tensor:
        """θ_D where the derivative of Eq. 3 is 0."""
        return self.stationary(self.lam / (self.H + self.lam))

    def best_without_curvature(self) -> Tensor:
        """θ_D where g + ∇L^D(θ_D) is 0: there descent with q = g ends."""
        return self.stationary(torch.ones(4).double())

    def stationary(self, factor: Tensor) -> Tensor:
        """θ_D where factor (θ_P* − low_D) + (θ_D − low_D) is 0."""
        J = self.lam / (self.H + self.lam)  # θ_P* = (1 − J) low_P + J θ_D
        system = torch.diag(factor * J) + eye(4)
        right = self.low_D - factor * ((1 - J) * self.low_P - self.low_D)
        theta_D: Tensor = torch.linalg.solve(system, right).view(2, 2)
        return theta_D
