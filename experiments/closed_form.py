"""M-FAC's two forms, the recursion and the closed form: rounding errors, memory, and time.

    python experiments/closed_form.py     # one thread, about half a minute

The recursion is Eq. 7 and 10 of the paper; the closed form is Woodbury's identity. Both are
functions (G, λ) -> inverse, and inverse maps the query g (K, p) to q (K, p). "float64" means
float32 gradients and float64 sums. The results are in closed_form.md.
"""

import math
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import median

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from mfac import mfac

Inverse = Callable[[Tensor], Tensor]
Vector = list[Fraction]


def eq_7(G: Tensor, v: Tensor, lam: float, sums: torch.dtype) -> Tensor:
    """Fill v (K, m, p) from the gradients G (K, m, p) and return d (K, m). v may be G itself."""
    K, m, _ = G.shape
    d = G.new_zeros(K, m, dtype=sums)
    for k, i in product(range(K), range(m)):
        g_i, earlier = G[k, i].to(sums), v[k, :i].to(sums)  # the only gradient that step i needs
        v_i = g_i / lam - earlier.T @ ((earlier @ g_i) / (m + d[k, :i]))
        d[k, i] = v_i @ g_i
        v[k, i] = v_i  # rounded to the precision of v
    return d


def recursion(G: Tensor, lam: float, sums: torch.dtype = torch.float32) -> Inverse:
    """Eq. 7 and 10, block by block. It writes the v_i over the gradients in G."""
    m, d = G.shape[1], eq_7(G, G, lam, sums)

    def eq_10(v: Tensor, d: Tensor, g: Tensor) -> Tensor:
        v = v.to(sums)
        return g - lam * (v.T @ ((v @ g) / (m + d)))

    return lambda g: torch.stack([*map(eq_10, G, d, g)])


def closed_form(G: Tensor, lam: float) -> Inverse:
    """The vector q = g - Gᵀ (mλI + GGᵀ)⁻¹ G g, all blocks at once, in G's precision."""
    m = G.shape[1]
    L, failed = torch.linalg.cholesky_ex(G @ G.mT + m * lam * torch.eye(m, dtype=G.dtype))
    L = L.masked_fill((failed != 0)[:, None, None], math.nan)
    return lambda g: g - (G.mT @ torch.cholesky_solve(G @ g[..., None], L))[..., 0]


FORMS: dict[str, Callable[[Tensor, float], Inverse]] = {
    "float32: recursion": recursion,
    "float32: closed form": closed_form,
    "float64: recursion": lambda G, lam: recursion(G.double(), lam, torch.float64),
    "float64: recursion, v float32": lambda G, lam: recursion(G, lam, torch.float64),
    "float64: closed form": mfac,  # the program's own
}


def dot(a: Vector, b: Vector) -> Fraction:
    return sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))


def exact(G: list[Vector], g: Vector, lam: Fraction) -> Vector:
    """One block of q in rational numbers, without any rounding."""
    v: list[Vector] = []
    d: list[Fraction] = []
    for x in [*G, g]:  # Eq. 7 for every gradient, and Eq. 6 for the query
        v_x = [a / lam for a in x]
        for v_j, d_j in zip(v, d, strict=True):
            share = dot(v_j, x) / (len(G) + d_j)
            v_x = [a - share * b for a, b in zip(v_x, v_j, strict=True)]
        v.append(v_x)
        d.append(dot(v_x, x))
    return [lam * a for a in v[-1]]


def relative_error(q: Tensor, true: Vector) -> float:
    if not q.isfinite().all():
        return math.inf
    wrong = [Fraction(a) - b for a, b in zip(q.tolist(), true, strict=True)]
    return math.sqrt(dot(wrong, wrong) / dot(true, true))


def errors(query: str, eps: float, lam: float, draws: int) -> list[float]:
    """|q - exact| / |exact| of each form for one block of m = 5, p = 20: median of the draws."""
    found: list[list[float]] = []
    for seed in range(draws):
        rng = torch.Generator().manual_seed(seed)
        G = torch.randn(20, generator=rng) + eps * torch.randn(5, 20, generator=rng)
        g = G.mean(0) if query == "mean" else torch.randn(20, generator=rng)
        *rows, x = ([Fraction(a) for a in row] for row in [*G.tolist(), g.tolist()])
        true = exact(rows, x, Fraction(lam))
        found.append([])
        for name, form in FORMS.items():
            inverse = form(G[None].clone(), lam)  # a copy, since the recursion writes over it
            q = inverse(g[None].double() if "64" in name else g[None])
            found[-1].append(relative_error(q[0], true))
    return [median(column) for column in zip(*found, strict=True)]


def main(draws: int = 5, repeats: int = 5) -> None:
    """Print what closed_form.md shows."""
    torch.set_num_threads(1)
    print("| query | ε | λ |", " | ".join(FORMS), "|")
    epsilons, lams = (1e-2, 1e-4, 1e-6, 1e-8), (1e-3, 1e-6, 1e-12)
    for query, eps, lam in product(("random", "mean"), epsilons, lams):
        row = " | ".join(f"{x:.1e}" for x in errors(query, eps, lam, draws))
        print(f"| {query} | {eps:.0e} | {lam:.0e} | {row} |")

    rng = torch.Generator().manual_seed(0)
    G = 1e-3 * torch.randn(12, 20, 196_608, generator=rng)  # ViT-B at rank 64
    g = torch.randn(12, 196_608, generator=rng)
    apart, in_place = torch.empty_like(G), G.clone()
    d = [eq_7(a, b, 1e-3, torch.float32) for a, b in ((G, apart), (in_place, in_place))]
    same = torch.equal(*d)
    print("v over g equals v in a buffer of its own:", same and torch.equal(apart, in_place))

    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FORMS}
    for (name, form), _ in product(FORMS.items(), range(repeats)):
        stored, x = in_place.copy_(G), g.double() if "64" in name else g
        start = time.perf_counter()
        inverse = form(stored, 1e-3)
        line_10 = time.perf_counter() - start
        inverse(x)
        line_13 = time.perf_counter() - start - line_10
        times[name].append((line_10, line_13, line_10 + 8 * line_13))
    for name, measured in times.items():  # the median drops a slow first repetition
        print(f"| {name} |", *(f"{median(x):.3f} s |" for x in zip(*measured, strict=True)))


if __name__ == "__main__":
    typer.run(main)
