"""M-FAC's two forms, the recursion and the closed form: rounding errors and time.

    python -m experiments.closed_form     # one thread, about half a minute

The recursion is Eq. 7 and 10 of the paper; the closed form is Woodbury's identity. "float64" means
float32 gradients and float64 sums, as the program has them. The results are in closed_form.md.
"""

import math
import time
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from statistics import median

import torch
import typer
from torch import Tensor

import mfac
from experiments.recipe import markdown

Inverse = Callable[[Tensor], Tensor]


def recursion(G: Tensor, lam: float) -> Inverse:
    """Eq. 7 and 10, block by block, in G's precision."""
    K, m, _ = G.shape
    v = G.clone()
    d = G.new_zeros(K, m)
    for k, i in product(range(K), range(m)):
        earlier = v[k, :i]
        v[k, i] = G[k, i] / lam - earlier.T @ ((earlier @ G[k, i]) / (m + d[k, :i]))
        d[k, i] = v[k, i] @ G[k, i]

    def inverse(g: Tensor) -> Tensor:
        shares = torch.einsum("kmp,kp->km", v, g) / (m + d)
        return g - lam * torch.einsum("kmp,km->kp", v, shares)

    return inverse


def closed_form(G: Tensor, lam: float) -> Inverse:
    """The vector q = g - Gᵀ (mλI + GGᵀ)⁻¹ G g, all blocks at once, in G's precision."""
    m = G.shape[1]
    L, failed = torch.linalg.cholesky_ex(G @ G.mT + m * lam * torch.eye(m, dtype=G.dtype))
    L = L.masked_fill((failed != 0)[:, None, None], torch.nan)
    return lambda g: g - (G.mT @ torch.cholesky_solve(G @ g[..., None], L))[..., 0]


FORMS: dict[str, Callable[[Tensor, float], Inverse]] = {
    "float32: recursion": recursion,
    "float32: closed form": closed_form,
    "float64: recursion": mfac.recursion,  # the program's own, as the next
    "float64: closed form": mfac.mfac,
}


def exact(G: Tensor, g: Tensor, lam: float) -> list[Fraction]:
    """One block of q in rational numbers, without any rounding: Eq. 7, and Eq. 6 for the query."""
    v: list[list[Fraction]] = []
    d: list[Fraction] = []
    for row in [*G.tolist(), g.tolist()]:
        x = [Fraction(number) for number in row]
        v_x = [number / Fraction(lam) for number in x]
        for v_j, d_j in zip(v, d, strict=True):
            share = dot(v_j, x) / (len(G) + d_j)
            v_x = [a - share * b for a, b in zip(v_x, v_j, strict=True)]
        v.append(v_x)
        d.append(dot(v_x, x))
    return [Fraction(lam) * number for number in v[-1]]


def dot(a: list[Fraction], b: list[Fraction]) -> Fraction:
    """The sum of products."""
    return sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))


def error(form: str, query: str, eps: float, lam: float, seed: int) -> float:
    """|q − exact q| / |exact q| of one block of 5 gradients that are nearly equal where ε is small.

    Infinite where rounding leaves no Cholesky factor.
    """
    g_of_seed = torch.Generator().manual_seed(seed)
    G = torch.randn(20, generator=g_of_seed) + eps * torch.randn(5, 20, generator=g_of_seed)
    g = G.mean(0) if query == "mean" else torch.randn(20, generator=g_of_seed)
    true = exact(G, g, lam)
    query_of_form = g[None].double() if "64" in form else g[None]
    q = FORMS[form](G[None], lam)(query_of_form)[0]
    if not q.isfinite().all():
        return float("inf")
    wrong = [Fraction(a) - b for a, b in zip(q.tolist(), true, strict=True)]
    return math.sqrt(dot(wrong, wrong) / dot(true, true))


def seconds(form: str, G: Tensor, g: Tensor) -> tuple[float, float]:
    """Of line 10, and of line 13 for one query."""
    started = time.perf_counter()
    inverse = FORMS[form](G, 1e-3)
    prepared = time.perf_counter()
    inverse(g)
    return prepared - started, time.perf_counter() - prepared


def main(draws: int = 5, repeats: int = 5, parameters: int = 196_608) -> None:
    """Print the tables: medians of so many draws, and of so many repeats at ViT-B's size."""
    torch.set_num_threads(1)
    rows = []
    for query, eps, lam in product(("random", "mean"), (1e-2, 1e-4, 1e-8), (1e-3, 1e-6, 1e-12)):
        row = {"query": query, "ε": f"{eps:.0e}", "λ": f"{lam:.0e}"}
        for form in FORMS:
            row[form] = f"{median(error(form, query, eps, lam, s) for s in range(draws)):.0e}"
        rows.append(row)
    print(markdown(rows))
    generator = torch.Generator().manual_seed(0)
    G = 1e-3 * torch.randn(12, 20, parameters, generator=generator)
    g = torch.randn(12, parameters, generator=generator)
    rows = []
    for form in ("float64: recursion", "float64: closed form"):
        times = [seconds(form, G, g) for _ in range(repeats)]
        line_10 = median(first for first, _ in times)
        line_13 = median(second for _, second in times)
        whole = line_10 + 8 * line_13
        row = {"form": form, "line 10, s": f"{line_10:.3f}", "line 13, s": f"{line_13:.3f}"}
        rows.append(row | {"line 10 and 8 times line 13, s": f"{whole:.2f}"})
    print(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
