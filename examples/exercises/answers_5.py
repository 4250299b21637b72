"""Sheet 5: find the mistake. Seven copies of Algorithm 1, each with one that no error tells.

The tasks, with hints, are in examples/exercises/sheet_5.md. Which functions are right, tells

    python examples/exercises/check.py examples/blanks/sheet_5.py

A copy is a function Problem -> θ_P, as in sheet 3. `watch(copy_a, toy())` runs it and writes down
what passed through its lines.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import grad
from torch.optim import SGD

import mfac

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (theta, phi, batch) -> scalar
Map = Callable[[Tensor], Tensor]  # g (K, p) -> q (K, p)


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


class Pass(NamedTuple):
    """What a loss was given, as it was then."""

    theta: Tensor
    phi: Tensor
    batch: Tensor


class Run(NamedTuple):
    """What passed through the lines of an algorithm, in the order of time."""

    problem: Problem  # its L_P and L_D can be called again
    lower: list[Pass]  # every call of L_P
    upper: list[Pass]  # every call of L_D: in each upper step the first and the second one
    G: list[Tensor]  # what `hypergrad` was given, once in an alternation
    g: list[Tensor]  # what `solve` was given, once in an upper step
    q: list[Tensor]  # what it returned
    theta_P: Tensor  # the result


def watch(algorithm_1: Callable[[Problem], Tensor], problem: Problem) -> Run:
    """Run an algorithm on a problem and write down what passes."""
    run = Run(problem, [], [], [], [], [], torch.zeros(0))

    def L_P(theta: Tensor, phi: Tensor, batch: Tensor) -> Tensor:
        run.lower.append(Pass(theta.detach().clone(), phi.detach().clone(), batch))
        return problem.L_P(theta, phi, batch)

    def L_D(theta: Tensor, phi: Tensor, batch: Tensor) -> Tensor:
        run.upper.append(Pass(theta.detach().clone(), phi.detach().clone(), batch))
        return problem.L_D(theta, phi, batch)

    def hypergrad(G: Tensor, lam: float) -> Map:
        run.G.append(G.detach().clone())
        solve = problem.hypergrad(G, lam)

        def watched(g: Tensor) -> Tensor:
            q = solve(g)
            run.g.append(g.detach().clone())
            run.q.append(q.detach().clone())
            return q

        return watched

    result = algorithm_1(problem._replace(L_P=L_P, L_D=L_D, hypergrad=hypergrad))
    return run._replace(theta_P=result)


def toy(seed: int = 0, N_L: int = 4, N_U: int = 2) -> Problem:
    """A problem with two blocks of two numbers, and M-FAC; heads are as large as θ."""
    draw = torch.Generator().manual_seed(seed)

    def numbers() -> Tensor:
        return torch.randn(2, 2, generator=draw, dtype=torch.float64)

    low_P = numbers()
    low_D = numbers()

    def loss(theta: Tensor, phi: Tensor, batch: Tensor) -> Tensor:
        return (theta - batch).square().sum() / 2 + (phi - theta).square().sum() / 2

    return Problem(
        theta=numbers(),
        phi_P=numbers(),
        phi_D=numbers(),
        L_P=loss,
        L_D=loss,
        pretext=(low_P + numbers() / 10 for _ in itertools.count()),
        labelled=(low_D + numbers() / 10 for _ in itertools.count()),
        hypergrad=mfac.mfac,
        lr=0.1,
        lam=0.5,
        T=5,
        N_L=N_L,
        N_U=N_U,
    )


def leaf(x: Tensor) -> Tensor:
    """A copy that can be trained."""
    return x.detach().clone().requires_grad_()


# --- 5.1 ------------------------------------------------------------------------------------------


def copy_a(problem: Problem) -> Tensor:
    """Algorithm 1 with a mistake."""
    theta_P = leaf(problem.theta)
    theta_D = leaf(problem.theta)
    phi_P = leaf(problem.phi_P)
    phi_D = leaf(problem.phi_D)
    opt_P = SGD([theta_P, phi_P], lr=problem.lr)
    opt_D = SGD([theta_D, phi_D], lr=problem.lr)
    for _ in range(problem.T):
        G = torch.zeros(*theta_P.shape[:1], problem.N_L, *theta_P.shape[1:], dtype=theta_P.dtype)
        for i in range(problem.N_L):
            value = problem.L_P(theta_P, phi_P, next(problem.pretext))
            theta_P.grad, phi_P.grad = grad(value, [theta_P, phi_P])
            theta_P.grad += problem.lam * (theta_P - theta_D).detach()
            G[:, i] = theta_P.grad
            opt_P.step()
        solve = problem.hypergrad(G, problem.lam)
        for _ in range(problem.N_U):
            batch = next(problem.labelled)
            g, at_P = grad(problem.L_D(theta_P, phi_D, batch), [theta_P, phi_D])
            grad_D_at_D, at_D = grad(problem.L_D(theta_D, phi_D, batch), [theta_D, phi_D])
            theta_D.grad = solve(g) + grad_D_at_D
            phi_D.grad = at_P + at_D
            opt_D.step()
    return theta_P.detach()


def shows_a(run: Run) -> bool:
    """True for a run of copy a, False for one of the right Algorithm 1 and of the other copies."""
    # blank: what shows the mistake of copy a
    passes = run.lower[: run.problem.N_L]  # those of the first alternation
    for row, at in zip(run.G[0].unbind(1), passes, strict=True):
        theta = leaf(at.theta)
        (right,) = grad(run.problem.L_P(theta, at.phi, at.batch), theta)
        if not torch.allclose(row, right):  # λ(θ_P − θ_D) is in it
            return True
    return False
    # end of blank


# --- 5.2 ------------------------------------------------------------------------------------------


def copy_b(problem: Problem) -> Tensor:
    """Algorithm 1 with a mistake."""
    theta_P, theta_D = leaf(problem.theta), leaf(problem.theta)
    phi_P, phi_D = leaf(problem.phi_P), leaf(problem.phi_D)
    lower = SGD([theta_P, phi_P], lr=problem.lr)
    upper = SGD([theta_D, phi_D], lr=problem.lr)

    def lower_step() -> Tensor:
        row, of_phi = grad(problem.L_P(theta_P, phi_P, next(problem.pretext)), [theta_P, phi_P])
        theta_P.grad = row + problem.lam * (theta_P - theta_D).detach()
        phi_P.grad = of_phi
        lower.step()
        return row

    def upper_step(solve: Map) -> None:
        batch = next(problem.labelled)
        of_phi = []
        of_theta = []
        for theta in (theta_P, theta_D):
            of_this, of_head = grad(problem.L_D(theta, phi_D, batch), [theta, phi_D])
            of_theta.append(of_this)
            of_phi.append(of_head)
        theta_D.grad = solve(of_theta[0]) + of_theta[1]
        phi_D.grad = torch.stack(of_phi).mean(0)
        upper.step()

    for _ in range(problem.T):
        rows = [lower_step() for _ in range(problem.N_L)]
        solve = problem.hypergrad(torch.stack(rows, 1), problem.lam)
        for _ in range(problem.N_U):
            upper_step(solve)
    return theta_P.detach()


def shows_b(run: Run) -> bool:
    """True for a run of copy b, False for one of the right Algorithm 1 and of the other copies."""
    # blank: what shows the mistake of copy b
    right = torch.zeros_like(run.problem.phi_D)  # line 15 of the first upper step
    for at in run.upper[:2]:
        phi = leaf(at.phi)
        right += grad(run.problem.L_D(at.theta, phi, at.batch), phi)[0]
    step = run.upper[2].phi - run.upper[0].phi
    return not torch.allclose(step, -run.problem.lr * right)  # it is half as long
    # end of blank


# --- 5.3 ------------------------------------------------------------------------------------------


def copy_c(problem: Problem) -> Tensor:
    """Algorithm 1 with a mistake."""
    theta_P, theta_D, phi_P, phi_D = (
        leaf(x) for x in (problem.theta, problem.theta, problem.phi_P, problem.phi_D)
    )
    opt_P = SGD([theta_P, phi_P], lr=problem.lr)
    opt_D = SGD([theta_D, phi_D], lr=problem.lr)
    stored: list[Tensor] = []
    for _ in range(problem.T):
        for _ in range(problem.N_L):
            batch = next(problem.pretext)
            grads = grad(problem.L_P(theta_P, phi_P, batch), [theta_P, phi_P])
            stored.append(grads[0])
            theta_P.grad = torch.add(grads[0], theta_P.detach() - theta_D.detach(),
                                     alpha=problem.lam)  # fmt: skip
            phi_P.grad = grads[1]
            opt_P.step()
        solve = problem.hypergrad(torch.stack(stored, 1), problem.lam)
        for _ in range(problem.N_U):
            batch = next(problem.labelled)
            at_P = grad(problem.L_D(theta_P, phi_D, batch), [theta_P, phi_D])
            at_D = grad(problem.L_D(theta_D, phi_D, batch), [theta_D, phi_D])
            theta_D.grad = solve(at_P[0]) + at_D[0]
            phi_D.grad = at_P[1] + at_D[1]
            opt_D.step()
    return theta_P.detach()


def shows_c(run: Run) -> bool:
    """True for a run of copy c, False for one of the right Algorithm 1 and of the other copies."""
    # blank: what shows the mistake of copy c
    return any(G.shape[1] != run.problem.N_L for G in run.G)  # it grows
    # end of blank


# --- 5.4 ------------------------------------------------------------------------------------------


def copy_d(problem: Problem) -> Tensor:
    """Algorithm 1 with a mistake."""
    theta_P = leaf(problem.theta)
    theta_D = leaf(problem.theta)
    heads = {"P": leaf(problem.phi_P), "D": leaf(problem.phi_D)}
    opt_P = SGD([theta_P, heads["P"]], lr=problem.lr)
    opt_D = SGD([theta_D, heads["D"]], lr=problem.lr)

    def gradients(loss: Loss, theta: Tensor, phi: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        of_theta, of_phi = grad(loss(theta, phi, batch), [theta, phi])
        return of_theta, of_phi

    for _ in range(problem.T):
        G = []
        for _ in range(problem.N_L):
            batch = next(problem.pretext)
            row, heads["P"].grad = gradients(problem.L_P, theta_P, heads["P"], batch)
            G.append(row)
            theta_P.grad = row - problem.lam * (theta_D - theta_P).detach()
            opt_P.step()
        solve = problem.hypergrad(torch.stack(G).transpose(0, 1), problem.lam)
        for _ in range(problem.N_U):
            batch = next(problem.labelled)
            g, first = gradients(problem.L_D, theta_D, heads["D"], batch)
            q = solve(g)
            grad_D_at_D, second = gradients(problem.L_D, theta_D, heads["D"], batch)
            theta_D.grad = q + grad_D_at_D
            heads["D"].grad = first + second
            opt_D.step()
    return theta_P.detach()


def shows_d(run: Run) -> bool:
    """True for a run of copy d, False for one of the right Algorithm 1 and of the other copies."""
    # blank: what shows the mistake of copy d
    first, second = run.upper[:2]
    return torch.equal(first.theta, second.theta)  # both are θ_D; θ_P has moved by now
    # end of blank


# --- 5.5 ------------------------------------------------------------------------------------------


def copy_e(problem: Problem) -> Tensor:
    """Algorithm 1 with a mistake."""
    theta_P = leaf(problem.theta)
    phi_P = leaf(problem.phi_P)
    opt_P = SGD([theta_P, phi_P], lr=problem.lr)
    theta_D = leaf(torch.zeros_like(theta_P))
    phi_D = leaf(problem.phi_D)
    opt_D = SGD([theta_D, phi_D], lr=problem.lr)
    for _ in range(problem.T):
        rows = []
        for batch in itertools.islice(problem.pretext, problem.N_L):
            grad_P, g_phi_P = grad(problem.L_P(theta_P, phi_P, batch), [theta_P, phi_P])
            rows.append(grad_P)
            delta = (theta_P - theta_D).detach()
            theta_P.grad = grad_P + problem.lam * delta
            phi_P.grad = g_phi_P
            opt_P.step()
        solve = problem.hypergrad(torch.stack(rows, 1), problem.lam)
        for batch in itertools.islice(problem.labelled, problem.N_U):
            g, grad_phi_at_P = grad(problem.L_D(theta_P, phi_D, batch), [theta_P, phi_D])
            grad_D_at_D, grad_phi_at_D = grad(problem.L_D(theta_D, phi_D, batch), [theta_D, phi_D])
            theta_D.grad = solve(g) + grad_D_at_D
            phi_D.grad = grad_phi_at_P + grad_phi_at_D
            opt_D.step()
    return theta_P.detach()


def shows_e(run: Run) -> bool:
    """True for a run of copy e, False for one of the right Algorithm 1 and of the other copies."""
    # blank: what shows the mistake of copy e
    starts = [at.theta for at in run.upper[:2]]  # one of the two is θ_D, before its first step
    return not any(torch.equal(theta, run.problem.theta) for theta in starts)
    # end of blank


# --- 5.6 ------------------------------------------------------------------------------------------


def copy_f(problem: Problem) -> Tensor:
    """Algorithm 1 with a mistake."""
    theta_P, theta_D = leaf(problem.theta), leaf(problem.theta)
    phi_P, phi_D = leaf(problem.phi_P), leaf(problem.phi_D)
    opt_P = SGD([theta_P, phi_P], lr=problem.lr)
    opt_D = SGD([theta_D, phi_D], lr=problem.lr)
    anchor = theta_D.detach().clone()
    for _ in range(problem.T):
        rows = []
        for _ in range(problem.N_L):
            value = problem.L_P(theta_P, phi_P, next(problem.pretext))
            grad_P, phi_P.grad = grad(value, [theta_P, phi_P])
            rows.append(grad_P)
            theta_P.grad = grad_P + problem.lam * (theta_P.detach() - anchor)
            opt_P.step()
        solve = problem.hypergrad(torch.stack(rows, 1), problem.lam)
        for _ in range(problem.N_U):
            batch = next(problem.labelled)
            g, at_P = grad(problem.L_D(theta_P, phi_D, batch), [theta_P, phi_D])
            grad_D_at_D, at_D = grad(problem.L_D(theta_D, phi_D, batch), [theta_D, phi_D])
            theta_D.grad = solve(g) + grad_D_at_D
            phi_D.grad = at_P + at_D
            opt_D.step()
    return theta_P.detach()


def copy_g(problem: Problem) -> Tensor:
    """Algorithm 1 with a mistake."""
    theta_P, theta_D = leaf(problem.theta), leaf(problem.theta)
    phi_P, phi_D = leaf(problem.phi_P), leaf(problem.phi_D)
    opt_P = SGD([theta_P, phi_P], lr=problem.lr)
    opt_D = SGD([theta_D, phi_D], lr=problem.lr)
    pulled_to = theta_D.detach().clone()

    def lower_level() -> Tensor:
        G = []
        for batch in itertools.islice(problem.pretext, problem.N_L):
            grads = grad(problem.L_P(theta_P, phi_P, batch), [theta_P, phi_P])
            G.append(grads[0])
            theta_P.grad = grads[0] + problem.lam * (theta_P.detach() - pulled_to)
            phi_P.grad = grads[1]
            opt_P.step()
        return torch.stack(G, 1)

    def upper_level(solve: Map) -> None:
        for batch in itertools.islice(problem.labelled, problem.N_U):
            g, first = grad(problem.L_D(theta_P, phi_D, batch), [theta_P, phi_D])
            plain, second = grad(problem.L_D(theta_D, phi_D, batch), [theta_D, phi_D])
            theta_D.grad = solve(g) + plain
            phi_D.grad = first + second
            opt_D.step()

    for _ in range(problem.T):
        solve = problem.hypergrad(lower_level(), problem.lam)
        pulled_to.copy_(theta_D.detach())
        upper_level(solve)
    return theta_P.detach()


def shows_f_and_g(run: Run) -> bool:
    """True for runs of copies f and g, False for the right Algorithm 1 and for other copies."""
    # blank: what shows the mistake of copies f and g
    N_L, N_U, lam = run.problem.N_L, run.problem.N_U, run.problem.lam
    at, then = run.lower[N_L : N_L + 2]  # the first step of the second alternation
    theta_D = run.upper[2 * N_U + 1].theta  # in the lower level it was there already
    theta = leaf(at.theta)
    (grad_P,) = grad(run.problem.L_P(theta, at.phi, at.batch), theta)
    g_P = (at.theta - then.theta) / run.problem.lr
    return not torch.allclose(g_P - grad_P, lam * (at.theta - theta_D))
    # end of blank
