"""Checks of sheet 1: M-FAC and conjugate gradients against dense matrices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from witness import Watch, Wrong, any_type, eye, guarded, random, same, several, stay_small


class Case(NamedTuple):
    """Stored gradients G (N_L, p), a query g (p,) and λ, with dense matrices for what is right."""

    G: Tensor
    g: Tensor
    lam: float

    @property
    def N_L(self) -> int:
        """The number of stored gradients."""
        return len(self.G)

    def damped(self, rows: Tensor) -> Tensor:
        """λI + 1/N_L Σ ∇L^P_i (∇L^P_i)ᵀ over some of the gradients, (p, p)."""
        matrix: Tensor = self.lam * eye(len(self.g)) + rows.T @ rows / self.N_L
        return matrix

    def solution(self) -> Tensor:
        """(F + λI)⁻¹ g."""
        found: Tensor = torch.linalg.solve(self.damped(self.G), self.g)
        return found

    def stored(self) -> tuple[Tensor, Tensor]:
        """The v and d of G by their definition, v_i = S⁻¹_{i−1} ∇L^P_i."""
        rows = [torch.linalg.solve(self.damped(self.G[:i]), g) for i, g in enumerate(self.G)]
        v = torch.stack(rows)
        return v, (v * self.G).sum(1)

    def loop(
        self,
        first: float,
        counts: Sequence[int],
        own: bool = False,
        number: Callable[[Tensor, Tensor], Tensor] = torch.dot,
    ) -> Tensor:
        """The v of a loop like Eq. 7, with the mistakes that one can make in it.

        Args:
            first: what ∇L^P_i is divided by; λ is right.
            counts: what is added to d_j, for each i; the number of all gradients is right.
            own: whether v_j meets its own gradient ∇L^P_j; ∇L^P_i is right.
            number: d_i of v_i and ∇L^P_i; their inner product is right.
        """
        v: list[Tensor] = []
        d: list[Tensor] = []
        for i, g in enumerate(self.G):
            v_i = g / first
            for j in range(i):
                partner = self.G[j] if own else g
                v_i = v_i - v[j] * (v[j] @ partner) / (counts[i] + d[j])
            v.append(v_i)
            d.append(number(v_i, g))
        return torch.stack(v)


CASES = [
    Case(random(4, 6), random(6, seed=1), 0.3),
    Case(random(7, 5, seed=2), random(5, seed=3), 0.05),  # more gradients than numbers
    Case(  # long gradients and a short one, which counts, too
        torch.tensor([30, 30, 0.1]).double()[:, None] * random(3, 6, seed=4),
        random(6, seed=5),
        0.05,
    ),
]


def check_eq_7(eq_7: Any) -> list[str]:
    """Compares v and d with dense inverses of the damped Fisher matrix so far."""
    answer = guarded(eq_7, "G lam")
    for case in CASES:
        N_L = case.N_L
        lam = case.lam
        v, d = several("eq_7", answer(case.G, lam), ["v", "d"])
        expected_v, expected_d = case.stored()
        same("v", v, expected_v, {
            "∇L^P_i is not divided by λ": case.loop(1.0, [N_L] * N_L),
            "it is multiplied by λ, not divided": case.loop(1 / lam, [N_L] * N_L),
            "the denominator has the number of earlier gradients; it must have N_L, the number of "
            "all": case.loop(lam, range(N_L)),
            "the denominator has the number of gradients so far; it must have N_L, the number of "
            "all": case.loop(lam, range(1, N_L + 1)),
            "the inner product is v_j with ∇L^P_j; it must be with the new gradient ∇L^P_i":
                case.loop(lam, [N_L] * N_L, own=True),
            "the first denominator is N_L λ; it is λ alone": case.loop(N_L * lam, [N_L] * N_L),
            "the denominator is 1 + d_j; it must be N_L + d_j": case.loop(lam, [1] * N_L),
            "d_i is the squared length of v_i; it must be v_iᵀ ∇L^P_i":
                case.loop(lam, [N_L] * N_L, number=lambda v_i, _: v_i @ v_i),
            "d_i is the squared length of ∇L^P_i; it must be v_iᵀ ∇L^P_i":
                case.loop(lam, [N_L] * N_L, number=lambda _, row: row @ row),
            "N_L is added twice; d_i is v_iᵀ ∇L^P_i alone": case.loop(lam, [2 * N_L] * N_L),
            "only the first term is there, the sum is missing": case.G / lam,
        })  # fmt: skip
        same("d", d, expected_d, {
            "N_L is added already; d is v_iᵀ ∇L^P_i alone": expected_d + N_L,
            "it is the squared length of v_i; it must be v_iᵀ ∇L^P_i": expected_v.square().sum(1),
            "it is the squared length of ∇L^P_i; it must be v_iᵀ ∇L^P_i": case.G.square().sum(1),
        })  # fmt: skip
    stay_small(lambda G, _: eq_7(G, 0.3))
    return any_type(eq_7, CASES[0].G, 0.3)


def check_eq_10(eq_10: Any) -> list[str]:
    """Compares q with a dense solve with F + λI; v and d are made with dense matrices, too.

    Two queries are answered from the same v and d, as lines 11 to 13 of Algorithm 1 ask for.
    """
    answer = guarded(eq_10, "v d g lam")
    for first_query in CASES:
        v, d = first_query.stored()
        for case in (first_query, first_query._replace(g=first_query.g.flip(0))):
            g = case.g
            N_L = case.N_L
            lam = case.lam
            solution = case.solution()
            weights = v @ g / (N_L + d)
            in_place = g.clone()
            for v_j, d_j in zip(v, d, strict=True):
                in_place = in_place - lam * v_j * (v_j @ in_place) / (N_L + d_j)
            same("q", answer(v, d, g, lam), lam * solution, {
                "this is (F + λI)⁻¹ g; the factor λ of Eq. 5 is missing": solution,
                "the sum has no factor λ": g - v.T @ weights,
                "the sum is added; it must be subtracted": g + lam * v.T @ weights,
                "N_L is missing in the denominator": g - lam * v.T @ (v @ g / d),
                "the denominator is 1 + d_j; it must be N_L + d_j, since F has a factor 1/N_L":
                    g - lam * v.T @ (v @ g / (1 + d)),
                "the inner products are with the q so far; each must be with g": in_place,
            })  # fmt: skip
    stay_small(lambda v, g: eq_10(v, torch.ones_like(v[:, 0]), g, 0.3))
    return any_type(eq_10, *CASES[0].stored(), CASES[0].g, 0.3)


def check_fisher_product(fisher_product: Any) -> list[str]:
    """(F + λI) x against the dense matrix; and no tensor as large as that matrix is made."""
    answer = guarded(fisher_product, "G x lam")
    for case in CASES:
        x = case.g
        F = case.G.T @ case.G / case.N_L
        same("(F + λI) x", answer(case.G, x, case.lam), F @ x + case.lam * x, {
            "F is the mean of ∇L^P_i (∇L^P_i)ᵀ; the division by N_L is missing":
                case.N_L * F @ x + case.lam * x,
            "this is F x; λ x is missing": F @ x,
            "λ is added to every entry; it must be λ x": F @ x + case.lam,
        })  # fmt: skip
    stay_small(lambda G, g: fisher_product(G, g, 0.3))
    remarks = any_type(fisher_product, CASES[0].G, CASES[0].g, 0.3)
    p = 600
    with Watch() as made:
        fisher_product(random(3, p), random(p, seed=1), 0.3)
    if sum(made.sizes) >= p * p / 2:
        remarks.append(
            "all numbers of F are computed, a part at a time; `G.T @ (G @ x)` needs none of them"
        )
    return remarks


def check_closed_form(closed_form: Any) -> list[str]:
    """Compares q with a dense solve with F + λI; no tensor as large as F is made."""
    answer = guarded(closed_form, "G g lam")
    for case in CASES:
        g = case.g
        N_L = case.N_L
        expected = case.lam * case.solution()
        changes = {}
        for damping in (case.lam, case.lam / N_L, case.lam * N_L):
            small = damping * eye(N_L) + case.G @ case.G.T
            changes[damping] = case.G.T @ torch.linalg.solve(small, case.G @ g)
        same("q", answer(case.G, g, case.lam), expected, {
            "the damping of the small system is λ; it must be N_L λ, since F has a factor 1/N_L":
                g - changes[case.lam],
            "the damping of the small system is λ / N_L; it must be N_L λ":
                g - changes[case.lam / N_L],
            "this is Gᵀ w alone; q is g minus it": changes[case.lam * N_L],
            "this is (F + λI)⁻¹ g; the factor λ of Eq. 5 is missing": expected / case.lam,
        })  # fmt: skip
    stay_small(lambda G, g: closed_form(G, g, 0.3))
    one = torch.ones(1, 3).double()
    same("q for N_L = 1", answer(one, one[0], 1.0), one[0] / 4)
    return any_type(closed_form, CASES[0].G, CASES[0].g, 0.3) + one_system(closed_form)


def one_system(closed_form: Any) -> list[str]:
    """A remark if more vectors of p numbers are made for more gradients: a loop makes them.

    Wrong if no small system is there either, so that the answer is Eq. 7 once more. The system may
    be built in any way: a tensor of it has m² numbers or a few more, fewer than p.
    """
    p = 200
    long = []
    small = []
    for N_L in (5, 10):
        with Watch() as watch:
            closed_form(random(N_L, p), random(p, seed=1), 0.3)
        long.append(len([size for size in watch.sizes if size >= p]))
        small.append(len([size for size in watch.sizes if N_L * N_L <= size < p]))
    if long[0] == long[1]:
        return []
    loop = (
        f"with 5 gradients {long[0]} tensors of p or more numbers are made, and {long[1]} with 10: "
        "a loop over the gradients makes vectors as long as g, one after the other. In the closed "
        "form the long vectors are touched by three products alone, `G @ G.T`, `G @ g` and "
        "`G.T @ w`"
    )
    if min(small) == 0:
        raise Wrong(f"the numbers are right, but there is no system of N_L equations; {loop}")
    return [loop]


def check_conjugate_gradients(conjugate_gradients: Any) -> list[str]:
    """Every iterate against the best point of its Krylov space; as many products as iterations."""
    answer = guarded(conjugate_gradients, "product g iterations")
    g = random(6, seed=1)
    p = len(g)
    A = random(p, p, seed=2)
    A = A @ A.T / p + 0.5 * eye(p)
    calls: list[Tensor] = []

    def product(u: Tensor) -> Tensor:
        calls.append(u)
        return A @ u

    powers = [g]
    for iterations in range(1, p + 1):
        calls.clear()
        x = answer(product, g, iterations)
        Q = torch.linalg.qr(torch.stack(powers, 1)).Q  # span of g, A g, ..., A^(iterations−1) g
        expected = Q @ torch.linalg.solve(Q.T @ A @ Q, Q.T @ g)
        what = f"x after {iterations} iteration{'s' if iterations > 1 else ''}"
        same(what, x, expected, {
            "this is steepest descent; the next direction is the residual plus β times the last "
            "direction": steepest(A, g, iterations),
        }, 1e-7)  # fmt: skip
        if len(calls) > iterations:
            raise Wrong(f"{what} took {len(calls)} products; one for each iteration is enough")
        powers.append(A @ powers[-1])
    tiny = 1e-100  # its square is a number of float64 still
    same("x for a very short g", answer(product, tiny * g, p), tiny * torch.linalg.solve(A, g), {
        "it stops too early: of a short g the residual is short from the start; stop where it is "
        "0, or where it is small beside g": torch.zeros(p).double(),
    }, 1e-7)  # fmt: skip
    unit = eye(p)[0]
    x = answer(lambda u: 2 * u, unit, 3)
    if not bool(x.isfinite().all()):
        raise Wrong("x is not a number once the residual is 0: stop there, before 0 / 0")
    same("x, if one iteration is enough", x, unit / 2)
    remarks = any_type(conjugate_gradients, lambda u: A.to(u.dtype) @ u, g, 2)
    # With a matrix near the identity the residual falls a hundredfold in each iteration.
    B = random(p, p, seed=6)
    near = eye(p) + 0.01 * (B + B.T) / 2
    left = g - near @ conjugate_gradients(lambda u: near @ u, g, p)
    if left.norm() > 1e-9 * g.norm():
        remarks.append(
            f"it stops where the residual is {left.norm() / g.norm():.0e} of g; the last digits "
            "that float64 has are still to come"
        )
    return remarks


def steepest(A: Tensor, g: Tensor, iterations: int) -> Tensor:
    """Steepest descent on A x = g."""
    x = torch.zeros_like(g)
    for _ in range(iterations):
        residual = g - A @ x
        x = x + residual * (residual @ residual) / (residual @ A @ residual)
    return x
