"""Checks of sheet 1: M-FAC and conjugate gradients against dense matrices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from witness import Watch, Wrong, eye, random, same, several, stay_small, untouched

LAM = 0.3
G = random(4, 6)  # m = 4 gradients of p = 6 numbers
QUERY = random(6, seed=1)


def damped(gradients: Tensor, m: int) -> Tensor:
    """λI + 1/m Σ g gᵀ over some gradients, as a dense matrix."""
    p = gradients.shape[1]
    matrix = LAM * eye(p)
    for g in gradients:
        matrix = matrix + torch.outer(g, g) / m
    return matrix


def stored() -> tuple[Tensor, Tensor]:
    """The v and d of G by their definition, v_i = F̂⁻¹_{i−1} g_i, with dense matrices."""
    rows = []
    for i, g in enumerate(G):
        rows.append(torch.linalg.solve(damped(G[:i], len(G)), g))
    v = torch.stack(rows)
    return v, (v * G).sum(1)


def loop(first: float, counts: Callable[[int], int], own: bool) -> Tensor:
    """The v of a loop like Eq. 7, with the mistakes that one can make in it."""
    v: list[Tensor] = []
    d: list[Tensor] = []
    for i, g in enumerate(G):
        v_i = g / first
        for j in range(i):
            partner = G[j] if own else g
            v_i = v_i - v[j] * (v[j] @ partner) / (counts(i) + d[j])
        v.append(v_i)
        d.append(v_i @ g)
    return torch.stack(v)


def check_eq_7(eq_7: Any) -> None:
    """Compares v and d with dense inverses of the damped Fisher matrix so far."""
    before = G.clone()
    v, d = several("eq_7", eq_7(G, LAM), ["v", "d"])
    untouched("G", G, before)
    expected_v, expected_d = stored()
    m = len(G)
    same("v", v, expected_v, {
        "g_i is not divided by λ": loop(1.0, lambda i: m, False),
        "it is multiplied by λ, not divided": loop(1 / LAM, lambda i: m, False),
        "the denominator has the number of earlier gradients; it must have N_L, the number of all":
            loop(LAM, lambda i: i, False),
        "the denominator has the number of gradients so far; it must have N_L, the number of all":
            loop(LAM, lambda i: i + 1, False),
        "the inner product is v_j with g_j; it must be with the new gradient g_i":
            loop(LAM, lambda i: m, True),
        "only the first term is there, the sum is missing": G / LAM,
    })  # fmt: skip
    same("d", d, expected_d, {
        "N_L is added already; d is v_iᵀ g_i alone": expected_d + m,
        "it is the squared length of v_i; it must be v_iᵀ g_i": expected_v.square().sum(1),
    })  # fmt: skip
    stay_small(lambda G, _: eq_7(G, LAM))


def check_eq_10(eq_10: Any) -> None:
    """Compares q with a dense solve with F + λI; v and d are made with dense matrices, too."""
    v, d = stored()
    m = len(G)
    solution = torch.linalg.solve(damped(G, m), QUERY)
    weights = v @ QUERY / (m + d)
    query = QUERY.clone()
    q = eq_10(v, d, query, LAM)
    untouched("g", query, QUERY)
    in_place = QUERY.clone()
    for v_j, d_j in zip(v, d, strict=True):
        in_place = in_place - LAM * v_j * (v_j @ in_place) / (m + d_j)
    same("q", q, LAM * solution, {
        "this is (F + λI)⁻¹ g; the factor λ of Eq. 5 is missing": solution,
        "the sum has no factor λ": QUERY - v.T @ weights,
        "the sum is added; it must be subtracted": QUERY + LAM * v.T @ weights,
        "N_L is missing in the denominator": QUERY - LAM * v.T @ (v @ QUERY / d),
        "the inner products are with the q so far; each must be with g": in_place,
    })  # fmt: skip
    stay_small(lambda v, g: eq_10(v, torch.ones_like(v[:, 0]), g, LAM))


def check_fisher_product(fisher_product: Any) -> None:
    """(F + λI) x against the dense matrix; and no tensor as large as that matrix is made."""
    m = len(G)
    F = G.T @ G / m
    x = QUERY.clone()
    product = fisher_product(G, x, LAM)
    untouched("x", x, QUERY)
    same("(F + λI) x", product, (F + LAM * eye(6)) @ QUERY, {
        "F is the mean of g_i g_iᵀ; the division by m is missing":
            m * F @ QUERY + LAM * QUERY,
        "this is F x; λ x is missing": F @ QUERY,
        "λ is added to every entry; it must be λ x": F @ QUERY + LAM,
    })  # fmt: skip
    stay_small(lambda G, g: fisher_product(G, g, LAM))


def check_closed_form(closed_form: Any) -> None:
    """Compares q with a dense solve with F + λI; no tensor as large as F is made; G and g stay."""
    m = len(G)
    expected = LAM * torch.linalg.solve(damped(G, m), QUERY)
    before = G.clone()
    query = QUERY.clone()
    q = closed_form(G, query, LAM)
    untouched("G", G, before)
    untouched("g", query, QUERY)

    def system(damping: float) -> Tensor:
        change: Tensor = G.T @ torch.linalg.solve(damping * eye(m) + G @ G.T, G @ QUERY)
        return change

    same("q", q, expected, {
        "the damping of the m x m system is λ; it must be m λ, since F has a factor 1/m":
            QUERY - system(LAM),
        "the damping of the m x m system is λ / m; it must be m λ": QUERY - system(LAM / m),
        "this is Gᵀ w alone; q is g minus it": system(m * LAM),
        "this is (F + λI)⁻¹ g; the factor λ of Eq. 5 is missing": expected / LAM,
    })  # fmt: skip
    stay_small(lambda G, g: closed_form(G, g, LAM))
    one = torch.ones(1, 3).double()
    same("q for m = 1", closed_form(one, one[0], 1.0), one[0] / 4)
    counts = []
    for m in (5, 10):
        with Watch() as made:
            closed_form(random(m, 20), random(20, seed=1), LAM)
        counts.append(made.operations)
    if counts[0] != counts[1]:
        raise Wrong(
            f"the numbers are right, but 5 gradients take {counts[0]} operations and 10 take "
            f"{counts[1]}, so this is a loop over the gradients; the closed form is one system"
        )


def check_conjugate_gradients(conjugate_gradients: Any) -> None:
    """Every iterate against the best point of its Krylov space; as many products as iterations."""
    p = 6
    A = random(p, p, seed=2)
    A = A @ A.T / p + 0.5 * eye(p)
    calls: list[Tensor] = []

    def product(u: Tensor) -> Tensor:
        calls.append(u)
        return A @ u

    powers = [QUERY]
    for iterations in range(1, p + 1):
        calls.clear()
        g = QUERY.clone()
        x = conjugate_gradients(product, g, iterations)
        untouched("g", g, QUERY)
        Q = torch.linalg.qr(torch.stack(powers, 1)).Q  # span of g, A g, ..., A^(iterations−1) g
        expected = Q @ torch.linalg.solve(Q.T @ A @ Q, Q.T @ QUERY)
        what = f"x after {iterations} iteration{'s' if iterations > 1 else ''}"
        mistakes = {
            "this is steepest descent; the next direction is the residual plus β times the last "
            "direction": steepest(A, iterations),
        }
        same(what, x, expected, mistakes, 1e-7)
        if len(calls) > iterations:
            raise Wrong(f"{what} took {len(calls)} products; one for each iteration is enough")
        powers.append(A @ powers[-1])
    unit = eye(p)[0]
    x = conjugate_gradients(lambda u: 2 * u, unit, 3)
    if not bool(x.isfinite().all()):
        raise Wrong("x is not a number once the residual is 0: stop there, before 0 / 0")
    same("x, if one iteration is enough", x, unit / 2)


def steepest(A: Tensor, iterations: int) -> Tensor:
    """Steepest descent on A x = g."""
    x = torch.zeros_like(QUERY)
    for _ in range(iterations):
        residual = QUERY - A @ x
        x = x + residual * (residual @ residual) / (residual @ A @ residual)
    return x
