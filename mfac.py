"""Paper: M-FAC, λ (F + λI)⁻¹ g from stored gradients alone (Sec. 3.1; l.10 and l.13).

Eq. 5 asks for q = λ (H + λI)⁻¹ g with the Hessian H of the pretext loss. M-FAC replaces H by the
empirical Fisher matrix of the m = N_L gradients that the lower level has already computed,

    F = 1/m Σ_i g_i g_iᵀ        (block by block; entries between two blocks are taken as 0)

so the inverse needs no Hessian-vector product. F is not damped. With damping, after i of the m
gradients, it is F̂_i = λI + 1/m Σ_{j≤i} g_j g_jᵀ, so F̂_m = F + λI is what is inverted (Eq. 6; the
paper writes F̂ for both). Two ways to compute q give the same result:

    to read   `recursion`   the paper's own way, Eq. 7 and Eq. 10: one rank-one update per gradient
    to run    `mfac`        Woodbury's identity: one m x m system per block; the default

    code    paper    shape          meaning
    G       G        (K, m, p)      stored gradients; for each row of θ, m rows g_i = ∇L^P_i of l.6
    m       N_L      integer        how many gradients are stored; M-FAC's own letter (Eq. 6)
    lam     λ        scalar > 0     damping γ = λ; units 1/θ² (the loss has none)
    v, d    v_i, d_i (m, p), (m,)   what Eq. 7 computes for a block; v has the unit of θ, d has
                                    none, so it can be added to m
    M_k     M        `Block`        v and d of block k; the paper's M is that of all blocks
    g, q    ∇L^D, q  (K, p)         query and result; units 1/θ

θ has K rows of p numbers, one for each layer. A block is a row, as in the paper, unless `partition`
says otherwise: each row can be cut into two or four parts, or all rows be one block. Where
layers differ in size, call `mfac` once for each layer, with K = 1.

Both functions have the signature of every hypergradient here: (G, λ, H) -> inverse, where inverse
is a function g -> q. H is for those that need Hessian-vector products; M-FAC does not use it. This
file needs torch alone.

    >>> G = torch.tensor([[[2.0]]])  # one block, one gradient, one parameter
    >>> mfac(G, lam=1.0)(torch.tensor([[5.0]]))  # λ g / (2² / 1 + λ) = 5 / 5
    tensor([[1.]])
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Partition = Literal["layer", "projection", "matrix", "global"]
Map = Callable[[Tensor], Tensor]  # of a tensor (K, p): g -> q
PARTS = {"layer": 1, "projection": 2, "matrix": 4, "global": 1}  # what a row is cut into

CHUNK = 16_384  # columns of G that are converted to float64 at a time, so that the copy is small


class Block(NamedTuple):
    """M_k: one block ⟨k⟩ of M, the collection that line 10 of Algorithm 1 computes."""

    v: Tensor  # (i, p)  v_i = F̂⁻¹_{i−1} g_i, in float64 whatever the gradients' dtype is
    d: Tensor  # (i,)    d_i = v_iᵀ g_i
    m: int  # N_L: how many gradients there will be in the end; i of them are in v and d so far


def empty_block(m: int, p: int) -> Block:
    """M_k before the first of m gradients of p numbers."""
    v = torch.empty(0, p, dtype=torch.float64)
    d = torch.empty(0, dtype=torch.float64)
    return Block(v, d, m)


def extend(M_k: Block, grad: Tensor, lam: float) -> Block:
    """Eq. 7 for one more gradient: the online variant (App. B), usable inside the lower level.

        v_i = g_i/λ − Σ_{j<i} v_j (v_jᵀ g_i) / (m + d_j),        d_i = v_iᵀ g_i

    It is Sherman and Morrison's formula (Eq. 6) for F̂_i = F̂_{i−1} + g_i g_iᵀ / m, with F̂_0 = λI.

    Args:
        M_k: what the gradients before this one gave, v (i − 1, p) and d (i − 1,). Not modified.
        grad: g_i (p,), before λ(θ_P − θ_D) is added (l.6 comes before l.7). Not modified.
        lam: λ > 0.

    Returns:
        M_k with v (i, p) and d (i,), new tensors.

    Raises:
        ValueError: M_k has all of its m gradients already.
    """
    v, d, m = M_k  # v_j (i − 1, p) and d_j (i − 1,)
    if len(d) == m:
        raise ValueError(f"M holds all of its m = {m} gradients; start with an empty block")
    grad = grad.double()
    v_i = grad / lam - v.T @ ((v @ grad) / (m + d))  # (p,)
    d_i = v_i @ grad  # scalar
    return Block(torch.cat([v, v_i[None]]), torch.cat([d, d_i[None]]), m)


def precompute(grads: Tensor, lam: float) -> Block:
    """Line 10 for one block: Eq. 7 over all of its stored gradients (m, p), in their order.

    >>> precompute(torch.tensor([[2.0]]), lam=1.0)  # v = 2/1, d = 2·2
    Block(v=tensor([[2.]], dtype=torch.float64), d=tensor([4.], dtype=torch.float64), m=1)
    """
    m, p = grads.shape
    M_k = empty_block(m, p)
    M_k = M_k._replace(v=M_k.v.to(grads.device), d=M_k.d.to(grads.device))
    for grad in grads:
        M_k = extend(M_k, grad, lam)
    return M_k


def apply(M_k: Block, g: Tensor, lam: float) -> Tensor:
    """Line 13 for one block, Eq. 10: q = g − λ Σ_j v_j (v_jᵀ g) / (m + d_j), (p,) -> (p,).

    ValueError if M_k does not have all of its m gradients yet: the sum of Eq. 10 is over all.

    >>> M_k = precompute(torch.tensor([[2.0]]), lam=1.0)
    >>> apply(M_k, torch.tensor([5.0]), lam=1.0)  # 5 − 2·(2·5)/(1 + 4)
    tensor([1.])
    """
    v, d, m = M_k
    if len(d) < m:
        raise ValueError(f"M holds {len(d)} of m = {m} gradients; extend it with the rest")
    x = g.double()
    q = x - lam * (v.T @ ((v @ x) / (m + d)))
    return q.to(g.dtype)


def recursion(G: Tensor, lam: float, H: object = None, partition: Partition = "layer") -> Map:
    """M-FAC as the paper writes it, block after block: the same q as `mfac`.

    Arguments, result and errors are those of `mfac`. The v_i are kept in float64 beside G, so they
    take twice the bytes of a float32 G. That is a choice of this function, made to leave G as it
    is: v_i could also be written over g_i.
    """
    check(lam)
    check_gradients(G, partition)
    G_blocks = joined(blocks(G, partition), partition)  # (K parts, m, size); `global`: (1, m, K p)
    M = [precompute(G_k, lam) for G_k in G_blocks]  # l.10

    def inverse(g: Tensor) -> Tensor:
        check_query(g, G)
        cut = blocks(g.to(G.device)[:, None], partition)  # (K, parts, 1, size)
        g_blocks = joined(cut, partition)[:, 0]  # (K parts, size); `global`: (1, K p)
        q = [apply(M_k, g_k, lam) for M_k, g_k in zip(M, g_blocks, strict=True)]  # l.13
        return torch.stack(q).view_as(g).to(g)

    return inverse


def mfac(G: Tensor, lam: float, H: object = None, partition: Partition = "layer") -> Map:
    """BiSSLight's hypergradient (Algorithm 1, l.10 and l.13) in closed form.

        q = λ (GᵀG/m + λI)⁻¹ g = g − Gᵀ (mλI + GGᵀ)⁻¹ G g        in every block

    The two sides are equal by Woodbury's identity, so the result is that of Eq. 10. Line 10 is one
    product of G with itself and one m x m Cholesky factor per block, line 13 two products with G;
    each of these steps does all blocks at once. Sums run in float64: where gradients are nearly
    collinear, sums in float32 lose all digits, in this form and in the recursion.

    Args:
        G: (K, m, p), float32 or float64, rows before λ(θ_P − θ_D) is added. Not copied and never
            written: leave it unchanged while the returned function is used.
        lam: λ > 0.
        H: not used.
        partition: what a block is. `layer`: a row of θ, K blocks (the paper's, App. C.3);
            `projection`: query LoRA, value LoRA, 2K; `matrix`: A and B of each, 4K; `global`: one.

    Returns:
        g (K, p) -> q (K, p), on g's device and in its dtype; g is not modified. Where a block's
        system cannot be solved (a gradient is not finite, or λ far too small), its part of q is
        NaN. Nothing is raised, because raising would make the CPU wait for the GPU.

    Raises:
        ValueError: λ is not above 0, G is not (K, m, p), p cannot be cut, or g is not (K, p).
    """
    check(lam)
    check_gradients(G, partition)
    K, m, _ = G.shape
    parts = PARTS[partition]
    G_chunks = blocks(G, partition).split(CHUNK, -1)  # views of G, (K, parts, m, chunk)
    # l.10: G Gᵀ, with float64 sums without a float64 copy of G
    gram = G.new_zeros(K, parts, m, m, dtype=torch.float64)
    for columns in G_chunks:
        columns = columns.double()
        gram += columns @ columns.mT
    system = per_block(gram, partition)
    system.diagonal(dim1=-2, dim2=-1).add_(m * lam)  # mλI + GGᵀ, positive definite
    factor, failed = torch.linalg.cholesky_ex(system)  # l.10; it reports instead of raising
    factor = factor.masked_fill((failed != 0)[..., None, None], math.nan)

    def inverse(g: Tensor) -> Tensor:
        check_query(g, G)
        g_chunks = blocks(g.to(G.device)[:, None], partition).split(CHUNK, -1)
        Gg = G.new_zeros(K, parts, m, 1, dtype=torch.float64)
        for columns, x in zip(G_chunks, g_chunks, strict=True):
            Gg += columns.double() @ x.double().mT  # l.13: G g
        w = torch.cholesky_solve(per_block(Gg, partition), factor)  # (mλI + GGᵀ)⁻¹ G g
        q = []
        for columns, x in zip(G_chunks, g_chunks, strict=True):
            q_columns = x.double() - w.mT @ columns.double()  # g − Gᵀ w, (K, parts, 1, chunk)
            q.append(q_columns.to(g.dtype))  # l.13
        return torch.cat(q, -1).view_as(g).to(g)

    return inverse


def per_block(products: Tensor, partition: Partition) -> Tensor:
    """Products with G of each part of a row, (K, parts, ...), as one of each block.

    A part is a block, except for `global`: there all are summed up, (1, 1, ...).
    """
    if partition == "global":
        return products.sum((0, 1), keepdim=True)
    return products


def blocks(x: Tensor, partition: Partition) -> Tensor:
    """Cut every row of θ into the parts of a partition: (K, m, p) -> (K, parts, m, size), a view.

    A row's p numbers are A_q, B_qᵀ, A_v, B_vᵀ (`lora`), so its parts have size = p / parts numbers.
    A part is a block, except for `global`, which cuts nothing: its rows are joined later. For a
    query g, pass g[:, None], so that m = 1; `.view(K, p)` then puts the parts together again.

    >>> blocks(torch.arange(8.0).view(1, 2, 4), "projection")  # one row of θ, two gradients
    tensor([[[[0., 1.],
              [4., 5.]],
    <BLANKLINE>
             [[2., 3.],
              [6., 7.]]]])
    """
    cut: Tensor = x.unflatten(-1, (PARTS[partition], -1))  # (K, m, parts, size)
    return cut.transpose(1, 2)


def joined(cut: Tensor, partition: Partition) -> Tensor:
    """All blocks in one list: (K, parts, m, size) -> (K parts, m, size); `global`: (1, m, K p)."""
    if partition == "global":
        return cut[:, 0].transpose(0, 1).flatten(1)[None]
    return cut.flatten(0, 1)


def check(lam: float) -> None:
    """λ couples the levels and damps the Fisher matrix; ValueError unless finite and above 0."""
    if not 0 < lam < math.inf:
        raise ValueError(f"lambda must be a finite number above 0, got {lam}")


def check_gradients(G: Tensor, partition: Partition) -> None:
    """ValueError unless G is (K, m, p) and a row can be cut as the partition says."""
    if G.ndim != 3 or 0 in G.shape:
        raise ValueError(f"G must be (K, m, p), m gradients of K blocks; got {tuple(G.shape)}")
    if partition not in PARTS:
        raise ValueError(f"partition {partition!r} is unknown; there are {', '.join(PARTS)}")
    parts = PARTS[partition]
    if G.shape[2] % parts:
        raise ValueError(f"p = {G.shape[2]} numbers cannot be cut into {parts} equal parts")


def check_query(g: Tensor, G: Tensor) -> None:
    """ValueError unless g (K, p) has the blocks of G (K, m, p)."""
    K, _, p = G.shape
    if g.shape != (K, p):
        raise ValueError(
            f"g must have the K = {K} blocks of p = {p} numbers that G has; got {tuple(g.shape)}"
        )
