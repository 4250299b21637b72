"""M-FAC: λ (F + λI)⁻¹ g from stored gradients alone (Sec. 3.1; Algorithm 1, lines 10 and 13).

Eq. 5 asks for q = λ (H + λI)⁻¹ g with the Hessian H of the pretext loss. M-FAC replaces H by the
empirical Fisher matrix of the m = N_L gradients that the lower level has already computed,

    F = 1/m Σ_i g_i g_iᵀ        (block by block; entries between two blocks are taken as 0)

so the inverse needs no Hessian-vector product. Two ways to compute it give the same result:

    to read   `recursion`   the paper's own way, Eq. 7 and Eq. 10: one rank-one update per gradient
    to run    `mfac`        Woodbury's identity: one m x m system per block; the default

    code    paper    shape          meaning
    G       G        (K, m, p)      stored gradients of K blocks; rows g_i = ∇L^P_i of l.6
    lam     λ        scalar > 0     damping γ = λ; units 1/θ² (the loss has none)
    v, d    v_i, d_i (m, p), (m,)   what Eq. 7 computes for a block; v has the unit of θ, d has
                                    none, so it can be added to m
    g, q    ∇L^D, q  (K, p)         query and result; units 1/θ

`identity` and `exact` are two more hypergradients to compare with. All have one signature:
(G, λ, H) -> inverse, a function g -> q. `H()` returns the Hessian-vector product, a function
d -> H d, which M-FAC does not use. This file needs torch alone.

    >>> G = torch.tensor([[[2.0]]])  # one block, one gradient, one parameter
    >>> mfac(G, lam=1.0)(torch.tensor([[5.0]]))  # λ g / (2² / 1 + λ) = 5 / 5
    tensor([[1.]])
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Partition = Literal["layer", "projection", "matrix", "global"]
Map = Callable[[Tensor], Tensor]  # of a tensor (K, p): g -> q, d -> H d

CHUNK = 16_384  # columns of G that are converted to float64 at a time, so that the copy is small


class Block(NamedTuple):
    """One block ⟨k⟩ of M, the collection that line 10 of Algorithm 1 computes."""

    v: Tensor  # (i, p)  v_i = F̂⁻¹_{i−1} g_i, in float64 whatever the gradients' dtype is
    d: Tensor  # (i,)    d_i = v_iᵀ g_i


def extend(M: Block, grad: Tensor, m: int, lam: float) -> Block:
    """Eq. 7 for one more gradient: the online variant (App. B), usable inside the lower level.

        v_i = g_i/λ − Σ_{j<i} v_j (v_jᵀ g_i) / (m + d_j),        d_i = v_iᵀ g_i

    It is Sherman and Morrison's formula (Eq. 6) for F̂_i = F̂_{i−1} + g_i g_iᵀ / m, with F̂_0 = λI.

    Args:
        M: what the gradients before this one gave, v (i − 1, p) and d (i − 1,). Not modified.
        grad: g_i (p,), before λ(θ_P − θ_D) is added (l.6 comes before l.7). Not modified.
        m: N_L, how many gradients there will be in the end.
        lam: λ > 0.
    Returns v (i, p) and d (i,), new tensors.
    """
    grad = grad.double()
    v = grad / lam - M.v.T @ ((M.v @ grad) / (m + M.d))
    return Block(torch.cat([M.v, v[None]]), torch.cat([M.d, (v @ grad)[None]]))


def precompute(grads: Tensor, lam: float) -> Block:
    """Line 10 for one block: Eq. 7 over all of its stored gradients (m, p), in their order.

    >>> precompute(torch.tensor([[2.0]]), lam=1.0)  # v = 2/1, d = 2·2
    Block(v=tensor([[2.]], dtype=torch.float64), d=tensor([4.], dtype=torch.float64))
    """
    M = Block(grads.new_empty(0, grads.shape[1]).double(), grads.new_empty(0).double())
    for grad in grads:
        M = extend(M, grad, len(grads), lam)
    return M


def apply(M: Block, g: Tensor, lam: float) -> Tensor:
    """Line 13 for one block, Eq. 10: q = g − λ Σ_j v_j (v_jᵀ g) / (m + d_j), (p,) -> (p,).

    >>> M = precompute(torch.tensor([[2.0]]), lam=1.0)
    >>> apply(M, torch.tensor([5.0]), lam=1.0)  # 5 − 2·(2·5)/(1 + 4)
    tensor([1.])
    """
    x = g.double()
    return (x - lam * (M.v.T @ ((M.v @ x) / (len(M.d) + M.d)))).to(g.dtype)


def recursion(G: Tensor, lam: float, H: object = None, partition: Partition = "layer") -> Map:
    """M-FAC as the paper writes it: the same q as `mfac`, but all v_i are stored besides G.

    Arguments and result are those of `mfac`; v is float64 and has twice the bytes of a float32 G.
    """
    check(lam)
    M = [precompute(grads, lam) for grads in blocks(G, partition).flatten(0, 1)]  # l.10

    def inverse(g: Tensor) -> Tensor:  # l.13
        parts = blocks(g.to(G.device)[:, None], partition)  # (K, n, 1, c)
        q = [apply(M_k, g_k[0], lam) for M_k, g_k in zip(M, parts.flatten(0, 1), strict=True)]
        return torch.stack(q).view_as(g).to(g)

    return inverse


def mfac(G: Tensor, lam: float, H: object = None, partition: Partition = "layer") -> Map:
    """BiSSLight's hypergradient (Algorithm 1, l.10 and l.13) in closed form.

        q = λ (GᵀG/m + λI)⁻¹ g = g − Gᵀ (mλI + GGᵀ)⁻¹ G g        in every block

    The two sides are equal by Woodbury's identity, so this is Eq. 10 without storing the v_i and
    without m passes over them: one m x m Cholesky factor per block at line 10, two products with G
    at line 13. Sums run in float64: float32 sums lose all digits for nearly collinear gradients.

    Args:
        G: (K, m, p), float32 or float64, rows before λ(θ_P − θ_D) is added. Not copied (but for
            `global`) and never written: leave it unchanged while the returned function is used.
        lam: λ > 0 (ValueError otherwise).
        H: not used.
        partition: what a block is. `layer`: a row of θ, K blocks (the paper's, App. C.3);
            `projection`: query LoRA, value LoRA, 2K; `matrix`: A and B of each, 4K; `global`: one.

    Returns:
        g (K, p) -> q (K, p), on g's device and in its dtype; g is not modified. Where a block's
        system cannot be solved (a gradient is not finite, or λ far too small), its part of q is
        NaN. Nothing is raised, because raising would make the CPU wait for the GPU.
    """
    check(lam)
    B = blocks(G, partition)  # (K, n, m, c)
    S: Any = sum(c @ c.mT for c in map(Tensor.double, B.split(CHUNK, -1)))  # G Gᵀ
    S.diagonal(dim1=-2, dim2=-1).add_(B.shape[2] * lam)  # mλI + GGᵀ, positive definite
    L, failed = torch.linalg.cholesky_ex(S)  # (K, n, m, m); it reports instead of raising
    L = L.masked_fill((failed != 0)[..., None, None], math.nan)

    def inverse(g: Tensor) -> Tensor:
        x = blocks(g.to(G.device)[:, None], partition)  # (K, n, 1, c)
        parts = [*zip(B.split(CHUNK, -1), x.split(CHUNK, -1), strict=True)]
        Gg: Any = sum(c.double() @ y.double().mT for c, y in parts)  # (K, n, m, 1)
        w = torch.cholesky_solve(Gg, L).mT  # (K, n, 1, m)
        q = [(y.double() - w @ c.double()).to(g.dtype) for c, y in parts]
        return torch.cat(q, -1).view_as(g).to(g)

    return inverse


def blocks(x: Tensor, partition: Partition) -> Tensor:
    """Cut m rows of every layer into the n blocks of a partition: (K, m, p) -> (K, n, m, c).

    A layer's p numbers are A_q, B_qᵀ, A_v, B_vᵀ, so its blocks are n parts of c = p / n numbers.
    `global` gives (1, 1, m, K p). A view where memory allows it. With m = 1, as for a query g, the
    numbers keep their order, so that viewing the result as (K, p) puts the blocks together again.

    >>> blocks(torch.zeros(12, 20, 64), "projection").shape
    torch.Size([12, 2, 20, 32])
    """
    if partition == "global":
        return x.transpose(0, 1).reshape(1, 1, x.shape[1], -1)
    n = {"layer": 1, "projection": 2, "matrix": 4}[partition]
    return x.unflatten(-1, (n, -1)).transpose(1, 2)  # type: ignore[no-any-return]


def check(lam: float) -> None:
    """λ couples the levels and damps the Fisher matrix; ValueError unless finite and above 0."""
    if not 0 < lam < math.inf:
        raise ValueError(f"lambda must be a finite number above 0, got {lam}")
