"""M-FAC: the inverse-Fisher products that make BiSSLight light (Sec. 2.2 and 3.1). Needs torch alone: copy it anywhere.

With gradients g_1 .. g_m of the pretext loss as the rows of G (m, p) and F = GᵀG/m, the implicit part of the
upper-level gradient (Eq. 5) is approximated, block by block, by

    q = λ (F + λI)⁻¹ g.

The matrix F + λI is never formed. It stands here twice: once to read, the recursion of Eq. 7 and 10 as the paper
writes it (`extend`, `recursion`, `apply_recursion`), and once to run, the same number by Woodbury's identity (`MFAC`).
`exact` and `identity` are the two ends of the scale: the true Hessian, and no curvature at all.

    g      ∇L^D at θ_P, the query (l.12); the paper calls it q in Sec. 2.2 and ∇L^D in Sec. 3.1
    q      the result, the first term of line 14's gradient; the paper's q in Algorithm 1
    m      number of stored gradients: N_L
    λ      coupling of Eq. 4; it is also M-FAC's damping γ (Sec. 3.1), so there is no new hyperparameter
    v, d   vectors v_i and scalars d_i = v_iᵀ g_i of Eq. 7

Units, the loss having none: g and q 1/θ, λ and F 1/θ², v θ, d and m none.
Leaves out: conjugate gradients, which need Hessian products rather than stored gradients (`cg.py`).
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Partition = Literal["layer", "projection", "matrix", "global"]
Blocks = Sequence[Sequence[Tensor]]  # blocks, each as pieces (..., columns) whose columns lie side by side

CHUNK = 16_384  # columns promoted to float64 at a time: 20 rows take 2.6 MB, so both passes over them stay in cache


class Solve(NamedTuple):
    """What a hypergradient hands to the upper level: line 13 as a function, and a flag to read later."""

    apply: Callable[[Tensor], Tensor]  # g (K, p) -> q (K, p)
    ok: Tensor  # (number of blocks,) bool, on the gradients' device: False where a block's system was not solvable


# --- to read: the paper's recursion ----------------------------------------------------------------------------------


class Recursion(NamedTuple):
    """One block ⟨k⟩ of M, what line 10 of Algorithm 1 computes."""

    v: Tensor  # (i, p)  v_i = F̂⁻¹_{i-1} g_i, float64 whatever the gradients are stored in
    d: Tensor  # (i,)    d_i = v_iᵀ g_i


def extend(M: Recursion, grad: Tensor, m: int, lam: float) -> Recursion:
    """Online variant of Eq. 7: one more gradient, as soon as the lower level has it.

        v_i = g_i/λ − Σ_{j<i} v_j (v_jᵀ g_i) / (m + d_j)

    Args:
        M: the vectors so far, v (i, p) and d (i,). Not modified.
        grad: g_i (p,), before the pull λ(θ_P − θ_D) is added (l.6 comes before l.7). Not modified.
        m: how many gradients there will be in the end, N_L.
        lam: λ > 0.
    """
    grad = grad.double()
    v = grad / lam - M.v.T @ ((M.v @ grad) / (m + M.d))
    return Recursion(torch.cat([M.v, v[None]]), torch.cat([M.d, (v @ grad)[None]]))


def recursion(grads: Tensor, lam: float) -> Recursion:
    """Deferred variant of Eq. 7 (Algorithm 1, l.10): all vectors of one block from its stored gradients (m, p).

    >>> recursion(torch.tensor([[2.0]]), lam=1.0)  # v = 2/1, d = 2·2
    Recursion(v=tensor([[2.]], dtype=torch.float64), d=tensor([4.], dtype=torch.float64))
    """
    check_lambda(lam)
    empty = grads.new_empty(0, grads.shape[1], dtype=torch.float64)
    M = Recursion(empty, empty[:, 0])
    for grad in grads:
        M = extend(M, grad, len(grads), lam)
    return M


def apply_recursion(M: Recursion, g: Tensor, lam: float) -> Tensor:
    """Eq. 10 for one block (Algorithm 1, l.13): q = g − λ Σ_j v_j (v_jᵀ g) / (m + d_j), shapes (p,) -> (p,).

    >>> apply_recursion(recursion(torch.tensor([[2.0]]), lam=1.0), torch.tensor([5.0]), lam=1.0)  # 1·5/(4 + 1)
    tensor([1.])
    """
    x = g.double()
    return (x - lam * (M.v.T @ ((M.v @ x) / (len(M.d) + M.d)))).to(g.dtype)


# --- to run: the same matrix by Woodbury's identity ------------------------------------------------------------------


class MFAC:
    """Eq. 10 in closed form, q = g − Gᵀ (mλI + GGᵀ)⁻¹ G g in every block: one m x m Cholesky a block.

    Against the recursion it keeps no second buffer of vectors and reads G a fixed number of times. G stays in its own
    dtype; products and the subtraction are accumulated in float64, a chunk of columns at a time, because with nearly
    collinear gradients float32 sums would be useless. On a CPU, a block stays in its own dtype where its gradients are
    so small (tr GGᵀ ≤ mλ) that nothing can cancel: mλI + GGᵀ has a condition number of 2 at most, and |q| ≥ |g|/2.

    Args:
        grads: the blocks' gradients. A block is a list of pieces (..., m, c); leading axes are a batch of blocks.
            Referenced, not copied and never written: keep them unchanged while `apply` is in use.
        lam: λ > 0 (ValueError otherwise).

    Nothing here waits for the device: `ok` (one flag a block) is False where a gradient was not finite or the system
    could not be factored; `check` reads it.
    """

    def __init__(self, grads: Blocks, lam: float) -> None:
        check_lambda(lam)
        self.grads = grads
        # not asked of a GPU, which would have to wait for the answer
        self.light = [not b[0].is_cuda and squares(b) <= b[0].shape[-2] * lam for b in grads]
        grams = [gram(block, light) for block, light in zip(grads, self.light, strict=True)]
        # GGᵀ + mλI is positive definite. cholesky_ex reports instead of raising, so a GPU is not made to wait.
        for S in grams:
            S.diagonal(dim1=-2, dim2=-1).add_(S.shape[-1] * lam)
        factors = [torch.linalg.cholesky_ex(S) for S in grams]
        self.factors = [factor.L for factor in factors]  # (..., m, m) float64, lower triangular
        finite = [torch.isfinite(S.diagonal(dim1=-2, dim2=-1)).all(-1) for S in grams]
        solvable = [f & (c.info == 0) for f, c in zip(finite, factors, strict=True)]
        # batched parts lie side by side: (K, parts), so that a block has the same number in either form
        self.ok = torch.stack(solvable, -1).reshape(-1)

    def apply(self, g: Blocks, out: Blocks) -> None:
        """Write q for the query g into `out`, both cut as the gradients are, pieces (..., c). g is not modified."""
        for G_k, L_k, light, g_k, q_k in zip(self.grads, self.factors, self.light, g, out, strict=True):
            kind, size = (g_k[0].dtype, None) if light else (torch.float64, CHUNK)
            Gg = torch.zeros_like(L_k[..., 0])  # (..., m) float64
            for c, x in chunks(G_k, g_k, size=size):
                Gg += product(c.to(kind), x.to(kind))
            w = torch.cholesky_solve(Gg[..., None], L_k)[..., 0].to(kind)
            for c, x, y in chunks(G_k, g_k, q_k, size=size):
                y.copy_(x.to(kind) - product(c.to(kind).mT, w))

    def check(self) -> None:
        """Raise FloatingPointError naming the first block that has no solution. Waits for the device."""
        if not bool(self.ok.all()):
            raise FloatingPointError(
                f"M-FAC: the gradients of block {int((~self.ok).nonzero()[0])} are not finite or too large to factor"
            )


def squares(block: Sequence[Tensor]) -> float:
    """Tr GGᵀ of one block, from its pieces; of a batch of blocks the sum."""
    return sum(float(torch.linalg.vector_norm(piece)) ** 2 for piece in block)


def gram(block: Sequence[Tensor], light: bool) -> Tensor:
    """GGᵀ of one block, (..., m, m) float64, from its pieces (..., m, c); summed in float64 unless it is light."""
    first = block[0]
    S = first.new_zeros((*first.shape[:-1], first.shape[-2]), dtype=torch.float64)
    for (c,) in chunks(block, size=None if light else CHUNK):
        c = c if light else c.double()
        S += c @ c.mT
    return S


def chunks(*blocks: Sequence[Tensor], size: int | None = CHUNK) -> list[tuple[Tensor, ...]]:
    """Walk the columns of equally cut blocks together, at most `size` columns at a time (None: a piece at a time)."""
    parts = [[c for piece in block for c in piece.split(size or piece.shape[-1], -1)] for block in blocks]
    return list(zip(*parts, strict=True))


def product(A: Tensor, x: Tensor) -> Tensor:
    """A x for a batch of matrices (..., m, c) and vectors (..., c); a single one goes to the faster gemv."""
    return torch.mv(A, x) if A.ndim == 2 else (A @ x[..., None])[..., 0]


def cut(x: Tensor, partition: Partition, batched: bool = False) -> list[list[Tensor]]:
    """Views of θ-shaped rows as the blocks of a partition; nothing is copied.

    Args:
        x: (K, ..., p), a row (or m rows) a layer, columns A_q, B_qᵀ, A_v, B_vᵀ.
        partition: `layer` K blocks (the paper's, App. C.3), `projection` 2K (q apart from v), `matrix` 4K, `global` 1.
        batched: keep equal blocks together as one batch (faster on a GPU) instead of a list (cache-friendly).
    """
    if partition == "global":
        return [list(x)]
    parts = x.chunk({"layer": 1, "projection": 2, "matrix": 4}[partition], -1)
    if batched:
        return [[part] for part in parts]
    return [[part[k]] for k in range(len(x)) for part in parts]


def cut_flat(x: Tensor, sizes: Sequence[int]) -> list[list[Tensor]]:
    """The same for flat vectors (..., P) and blocks of any sizes that add up to P (ValueError otherwise)."""
    if sum(sizes) != x.shape[-1]:
        raise ValueError(f"block sizes add up to {sum(sizes)}, but the vectors have {x.shape[-1]} entries")
    return [[part] for part in x.split(list(sizes), -1)]


# --- hypergradients: (stored gradients, λ, θ_P, pretext loss) -> Solve -----------------------------------------------


def mfac(
    G: Tensor, lam: float, theta_P: Tensor, loss_P: Callable[[Tensor], Tensor], partition: Partition = "layer"
) -> Solve:
    """BiSSLight's hypergradient (Algorithm 1, l.10 and l.13). G (K, N_L, p), θ_P (K, p); the loss is not called.

    ValueError where G is not of that form or holds no gradients.
    """
    if G.ndim != 3 or not G.numel():
        raise ValueError(f"M-FAC needs stored gradients G (K, N_L, p), a row a block; these are {tuple(G.shape)}")
    curvature = MFAC(cut(G, partition, batched=G.is_cuda), lam)

    def apply(g: Tensor) -> Tensor:
        q = torch.empty_like(g)
        curvature.apply(cut(g, partition, batched=G.is_cuda), cut(q, partition, batched=G.is_cuda))
        return q

    return Solve(apply, curvature.ok)


def identity(G: Tensor, lam: float, theta_P: Tensor, loss_P: Callable[[Tensor], Tensor]) -> Solve:
    """No curvature: q = g, the limit of Eq. 5 for a pretext Hessian much smaller than λ. A control, not the paper's."""
    check_lambda(lam)
    return Solve(lambda g: g.clone(), torch.ones(1, dtype=torch.bool, device=theta_P.device))


def exact(G: Tensor, lam: float, theta_P: Tensor, loss_P: Callable[[Tensor], Tensor]) -> Solve:
    """Eq. 5 itself, q = λ (H + λI)⁻¹ g with the dense Hessian H of the pretext loss at θ_P. For small θ only.

    Eq. 5 holds φ_P fixed, as the paper does, while Eq. 4 minimises over φ_P too. So where θ and φ are coupled this is
    not the exact gradient of Eq. 3: that one has the Schur complement H_θθ − H_θφ H_φφ⁻¹ H_φθ in place of H = H_θθ.
    """
    check_lambda(lam)
    flat = theta_P.detach().flatten()
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        H = torch.autograd.functional.hessian(lambda x: loss_P(x.view_as(theta_P)), flat)
    A = H.double() + lam * torch.eye(len(flat), dtype=torch.float64, device=flat.device)
    LU, pivots, info = torch.linalg.lu_factor_ex(A)

    def apply(g: Tensor) -> Tensor:
        x: Tensor = torch.linalg.lu_solve(LU, pivots, g.double().reshape(-1, 1))
        return (lam * x).view_as(g).to(g.dtype)

    return Solve(apply, torch.isfinite(A).all().reshape(1) & (info == 0))


def check_lambda(lam: float) -> None:
    """λ couples the levels and damps the Fisher; at 0 or below nothing is invertible (ValueError)."""
    if not 0 < lam < float("inf"):
        raise ValueError(f"lambda must be a finite number above 0, got {lam}")
