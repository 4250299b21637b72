"""Checks of sheet 3: steps of Algorithm 1 on quadratic losses, with gradients by hand."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD
from witness import Grads, Wrong, any_type, distance, eye, guarded, no_graph, random, same

K = 2  # θ (K, p)
p = 3
n = 2  # φ (n,)
M = random(4, K * p)
N = random(4, n, seed=1)
LR = 0.1
MOMENTUM = 0.5  # so that a step by hand is not the optimiser's, from the second one on


def loss(theta: Tensor, phi: Tensor, batch: Tensor) -> Tensor:
    """A quadratic loss in which θ and φ are coupled: ½ |M θ + N φ − batch|²."""
    residual = M.to(theta.dtype) @ theta.flatten() + N.to(phi.dtype) @ phi - batch
    return residual.square().sum() / 2


def by_hand(theta: Tensor, phi: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradients with respect to θ and φ, without automatic differentiation."""
    residual = M @ theta.flatten() + N @ phi - batch
    return (M.T @ residual).view(K, p), N.T @ residual


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """θ_P, θ_D and φ."""
    tensors = [random(K, p, seed=2), random(K, p, seed=3), random(n, seed=4)]
    return [x.to(dtype).requires_grad_() for x in tensors]


def sgd(tensors: list[Tensor]) -> SGD:
    """Gradient descent with momentum."""
    return SGD(tensors, lr=LR, momentum=MOMENTUM)


def check_lower_step(lower_step: Any) -> list[str]:
    """Two steps of descent with momentum against gradients by hand; λ is another in the second."""
    answer = guarded(lower_step, "_ _ theta_D _ batch lam opt_P")
    theta_P, theta_D, phi_P = start()
    theta, fixed, phi = (x.detach().clone() for x in (theta_P, theta_D, phi_P))
    opt = sgd([theta_P, phi_P])
    grads = Grads(theta_D=theta_D)
    kept: list[tuple[Tensor, Tensor]] = []
    push = torch.zeros_like(theta)  # the momentum of θ_P
    push_phi = torch.zeros_like(phi)
    for which, lam in (("first", 0.3), ("second", 0.7)):
        batch = random(4, seed=11 + len(kept))
        found = answer(loss, theta_P, theta_D, phi_P, batch, lam, opt)
        grad, g_phi = by_hand(theta, phi, batch)
        delta = lam * (theta - fixed)
        row_of(found, grad, delta, which)
        no_graph(f"the gradient for G of the {which} step", found)
        old = MOMENTUM * push
        push = old + grad + delta
        push_phi = MOMENTUM * push_phi + g_phi
        moved = theta - LR * push
        same(f"θ_P after the {which} step", theta_P, moved, {
            "the spring of line 7 is missing": moved + LR * delta,
            "the spring of line 7 pushes θ_P away from θ_D; its gradient is λ(θ_P − θ_D)":
                moved + 2 * LR * delta,
            "the spring of line 7 has no λ": moved + LR * (delta - delta / lam),
            "θ_P did not move; does opt_P find a gradient in `theta_P.grad`?": theta,
            "the step was not opt_P's, which has a momentum; leave it to `opt_P.step()`":
                theta - LR * (grad + delta),
            "the spring did not pass through opt_P: line 7 adds it to the gradient, before line 9":
                theta - LR * (MOMENTUM * kept[0][1] + grad + delta) if kept else moved,
        })  # fmt: skip
        same(f"φ_P after the {which} step", phi_P, phi - LR * push_phi, {
            "φ_P did not move": phi,
            "the step was not opt_P's, which has a momentum; leave it to `opt_P.step()`":
                phi - LR * g_phi,
            "its gradient was taken after θ_P had moved; line 8 comes before line 9":
                phi - LR * (push_phi - g_phi + by_hand(moved, phi, batch)[1]),
        })  # fmt: skip
        theta = moved
        phi = phi - LR * push_phi
        kept.append((found, grad))
    for found, grad in kept:
        if distance(found, grad) > 1e-6:
            raise Wrong("a gradient that was returned has changed in a later step: return a copy")
    grads.compare()
    theta_D.grad = random(K, p, seed=5)  # as it is after an upper step
    grads = Grads(theta_D=theta_D)
    lower_step(loss, theta_P, theta_D, phi_P, batch, lam, opt)
    grads.compare()

    def one_step(batch: Tensor) -> list[Tensor]:
        theta_P, theta_D, phi_P = start(batch.dtype)
        opt = sgd([theta_P, phi_P])
        found = lower_step(loss, theta_P, theta_D, phi_P, batch, lam, opt)
        return [found, theta_P, phi_P]

    return any_type(one_step, batch)


def row_of(found: Any, grad: Tensor, delta: Tensor, which: str) -> None:
    """What the lower step returns is ∇L^P alone."""
    same(f"the gradient for G of the {which} step", found, grad, {
        "it has the gradient of the spring in it, but G must not, since M-FAC adds λI by itself "
        "(if you return `theta_P.grad`, a later `+=` changes what you return: return a clone)":
            grad + delta,
        "it has the gradient of the spring, with the wrong sign": grad - delta,
    })  # fmt: skip


def check_upper_step(upper_step: Any) -> list[str]:
    """Two steps of descent with momentum against gradients by hand; `solve` is a matrix."""
    answer = guarded(upper_step, "_ theta_P _ _ batch solve opt_D")
    theta_P, theta_D, phi_D = start()
    fixed, theta, phi = (x.detach().clone() for x in (theta_P, theta_D, phi_D))
    R = random(K * p, K * p, seed=5)
    opt = sgd([theta_D, phi_D])
    grads = Grads(theta_P=theta_P)
    calls: list[Tensor] = []

    def solve(g: Tensor) -> Tensor:
        calls.append(g)
        if g.shape != (K, p):
            raise Wrong(f"`solve` was given a g {tuple(g.shape)}; it must be {(K, p)}, as θ is")
        return (R.to(g.dtype) @ g.flatten()).view(K, p)

    earlier = torch.zeros_like(fixed)  # what `.grad` of θ_P would hold, were it never cleared
    push = torch.zeros_like(theta)  # the momentum of θ_D
    push_phi = torch.zeros_like(phi)
    asked = 0  # how often line 13 was asked in a step
    for step, which in enumerate(("first", "second")):
        batch = random(4, seed=21 + step)
        calls.clear()
        q = answer(loss, theta_P, theta_D, phi_D, batch, solve, opt)
        asked = max(asked, len(calls))
        g, phi_at_P = by_hand(fixed, phi, batch)
        grad_D_at_D, phi_at_D = by_hand(theta, phi, batch)
        right = solve(g)
        same(f"q of the {which} step", q, right, {
            "g was taken at θ_D; line 12 takes it at θ_P": solve(grad_D_at_D),
            "this is g; line 13 gives it to `solve`": g,
            "g has the gradient of the first step in it, too; `theta_P.grad` adds up over passes, "
            "and opt_D does not clear it": solve(earlier + g),
        })  # fmt: skip
        no_graph(f"q of the {which} step", q)
        push = MOMENTUM * push + right + grad_D_at_D
        push_phi = MOMENTUM * push_phi + phi_at_P + phi_at_D
        moved = theta - LR * push
        by_itself = "the step was not opt_D's, which has a momentum; leave it to `opt_D.step()`"
        same(f"θ_D after the {which} step", theta_D, moved, {
            "the second term of line 14, ∇L^D at θ_D, is missing": moved + LR * grad_D_at_D,
            "q is missing in line 14": moved + LR * right,
            "g stands in the place of q in line 14": moved + LR * (right - g),
            "the second term of line 14 must be taken at θ_D, not at θ_P":
                moved + LR * (grad_D_at_D - g),
            "θ_D did not move; does opt_D find a gradient in `theta_D.grad`?": theta,
            by_itself: theta - LR * (right + grad_D_at_D),
        })  # fmt: skip
        same(f"φ_D after the {which} step", phi_D, phi - LR * push_phi, {
            "its gradient at θ_P is missing; line 15 adds two": phi - LR * (push_phi - phi_at_P),
            "its gradient at θ_D is missing; line 15 adds two": phi - LR * (push_phi - phi_at_D),
            "line 15 adds the two gradients, it does not take their mean":
                phi - LR * (push_phi - (phi_at_P + phi_at_D) / 2),
            by_itself: phi - LR * (phi_at_P + phi_at_D),
        })  # fmt: skip
        theta = moved
        phi = phi - LR * push_phi
        earlier = earlier + g
    grads.compare()
    remarks = []
    if asked > 1:
        remarks.append("`solve` is called more than once; line 13 is one call")
    theta_P.grad = random(K, p, seed=6)  # as it is after a lower step
    grads = Grads(theta_P=theta_P)
    q = upper_step(loss, theta_P, theta_D, phi_D, batch, solve, opt)
    g, _ = by_hand(fixed, phi, batch)
    same("q, if there is a gradient in `theta_P.grad` already,", q, solve(g), {
        "it has that gradient in it": solve(g + random(K, p, seed=6)),
    })  # fmt: skip
    grads.compare()

    def one_step(batch: Tensor) -> list[Tensor]:
        theta_P, theta_D, phi_D = start(batch.dtype)
        opt = sgd([theta_D, phi_D])
        q = upper_step(loss, theta_P, theta_D, phi_D, batch, solve, opt)
        return [q, theta_D, phi_D]

    return remarks + any_type(one_step, batch)


def check_algorithm_1(algorithm_1: Any) -> list[str]:
    """A bilevel problem whose optimum is known, and what passes through lines 6, 10 and 12."""
    problem = Quadratic()
    names = " ".join(f"problem.{field}" for field in Problem._fields)
    answer = guarded(lambda *line_1: algorithm_1(Problem(*line_1)), names)
    theta_P = answer(*problem.given())
    problem.look_at_calls()
    problem.look_at_start()
    problem.look_at_batches()
    problem.look_at_heads()
    if not isinstance(theta_P, Tensor) or theta_P.shape != (2, 2):
        raise Wrong("algorithm_1 must return θ_P, a tensor (K, p)")
    no_graph("θ_P at the end", theta_P)
    same("θ_P at the end", theta_P, problem.theta_P_star(problem.best()), {
        "this is θ_D; line 17 returns θ_P": problem.best(),
        "it is where descent with q = g ends":
            problem.theta_P_star(problem.best_without_curvature()),
    }, tolerance=1e-3)  # fmt: skip

    def in_type(like: Tensor) -> Any:
        return algorithm_1(Problem(*Quadratic(like.dtype).given()))

    return any_type(in_type, torch.ones(1).double())


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
    """Quadratic losses without noise, a diagonal Hessian, and a `solve` that is exact.

    So the steps end in the optimum of Eq. 3, which is known, and not only near it. The heads have
    minima of their own, so their way there is known, too. A batch is the minimum of its loss and
    its number, counted from 1 and for labelled ones downwards from −1.
    """

    T = 30
    N_L = 10
    N_U = 2
    lam = 0.5
    lr = 0.2

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.H = torch.tensor([0.5, 1, 2, 4], dtype=dtype)
        self.low_P = 1 + random(4).to(dtype) / 10  # minimum of L^P
        self.low_D = torch.tensor([2, -1, 0.5, -2], dtype=dtype)  # minimum of L^D
        self.best_phi_P = torch.tensor([1, -2], dtype=dtype)
        self.best_phi_D = torch.tensor([3, 0.5, -1], dtype=dtype)
        self.theta = random(2, 2, seed=1).to(dtype)  # where both levels start
        self.phi_P = random(2, seed=2).to(dtype)
        self.phi_D = random(3, seed=3).to(dtype)
        self.lower: list[tuple[Tensor, Tensor]] = []  # θ and ∇L^P of every lower pass
        self.upper: list[Tensor] = []  # θ of every upper pass
        self.heads_P: list[Tensor] = []  # φ of every lower pass
        self.heads_D: list[Tensor] = []  # and of every upper pass
        self.batches_P: list[int] = []  # the number of the batch of every lower pass
        self.batches_D: list[int] = []  # and of every upper pass
        self.stored: list[Tensor] = []  # every G

    def given(self) -> Problem:
        """Line 1."""
        return Problem(
            theta=self.theta, phi_P=self.phi_P, phi_D=self.phi_D,
            L_P=self.L_P, L_D=self.L_D,
            pretext=(self.batch(self.low_P, k) for k in itertools.count(1)),
            labelled=(self.batch(self.low_D, -k) for k in itertools.count(1)),
            hypergrad=self.hypergrad, lr=self.lr, lam=self.lam,
            T=self.T, N_L=self.N_L, N_U=self.N_U,
        )  # fmt: skip

    def batch(self, minimum: Tensor, number: int) -> Tensor:
        """The minimum of a loss, and the number of the batch."""
        return torch.cat([minimum, minimum.new_tensor([number])])

    def L_P(self, theta: Tensor, phi: Tensor, batch: Tensor) -> Tensor:
        """½ (θ − x)ᵀ H (θ − x) + ½ |φ − its best value|²."""
        look_at_head("L_P", "φ_P", phi, self.phi_P)
        x = batch[:4]
        at = theta.detach().flatten()
        self.lower.append((at.clone(), self.H * (at - x)))
        self.heads_P.append(phi.detach().clone())
        self.batches_P.append(int(batch[4]))
        of_theta = self.H @ (theta.flatten() - x).square() / 2
        return of_theta + (phi - self.best_phi_P).square().sum() / 2

    def L_D(self, theta: Tensor, phi: Tensor, batch: Tensor) -> Tensor:
        """½ |θ − x|² + ½ |φ − its best value|²."""
        look_at_head("L_D", "φ_D", phi, self.phi_D)
        self.upper.append(theta.detach().clone())
        self.heads_D.append(phi.detach().clone())
        self.batches_D.append(int(batch[4]))
        of_theta = (theta.flatten() - batch[:4]).square().sum() / 2
        return of_theta + (phi - self.best_phi_D).square().sum() / 2

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
            same(f"G of alternation {t + 1}", in_order(G.transpose(0, 1).flatten(1)),
                 in_order(expected))  # fmt: skip

    def look_at_start(self) -> None:
        """Line 2: the first lower pass is at `problem.theta`, and one of the first two upper."""
        if distance(self.lower[0][0].view(2, 2), self.theta) > 1e-10:
            raise Wrong("θ_P does not start at `problem.theta`; line 2 gives it to both levels")
        if min(distance(theta, self.theta) for theta in self.upper[:2]) > 1e-10:
            raise Wrong("θ_D does not start at `problem.theta`; line 2 gives it to both levels")

    def look_at_batches(self) -> None:
        """Each step has a batch of its own, from its own stream."""
        lower = [*range(1, 1 + self.T * self.N_L)]
        upper = [-(1 + call // 2) for call in range(2 * self.T * self.N_U)]  # two passes, a batch
        if min(self.batches_P) < 0:
            raise Wrong("L_P was given labelled batches; they are for L_D")
        if max(self.batches_D) > 0:
            raise Wrong("L_D was given pretext batches; line 12 takes `next(problem.labelled)`")
        if self.batches_P != lower:
            raise Wrong("each lower step takes a batch of its own, `next(problem.pretext)`")
        if self.batches_D != upper:
            raise Wrong("each upper step takes a batch of its own, `next(problem.labelled)`")

    def look_at_heads(self) -> None:
        """A step brings φ_P nearer to its minimum by a share lr; line 15 doubles it for φ_D."""
        for name, found, phi, best, share in (
            ("φ_P", self.heads_P, self.phi_P, self.best_phi_P, self.lr),
            ("φ_D", self.heads_D[::2], self.phi_D, self.best_phi_D, 2 * self.lr),
        ):
            steps = torch.arange(len(found)).double()[:, None]
            expected = best + (phi - best) * (1 - share) ** steps
            optimiser = f"opt_{name[-1]}"
            same(f"{name} at each step", torch.stack(found), expected, {
                f"it never moves; {optimiser} must be given it": phi.expand_as(expected),
            })  # fmt: skip

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


def look_at_head(loss: str, name: str, phi: Tensor, right: Tensor) -> None:
    """Wrong if a loss is given the other head; they have different shapes."""
    if phi.shape != right.shape:
        raise Wrong(
            f"{loss} was given a head {tuple(phi.shape)}; {name} is {tuple(right.shape)}: are φ_P "
            "and φ_D swapped?"
        )


def in_order(rows: Tensor) -> Tensor:
    """The rows by their first number: F does not depend on their order."""
    return rows[rows[:, 0].argsort()]
