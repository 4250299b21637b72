"""Both forms of M-FAC, and the other hypergradients, against recorded numbers and dense algebra."""

import pytest
import torch
from conftest import close, recorded
from torch import Tensor

import hypergradients
import mfac
from mfac import precompute

FORMS = {"closed": mfac.mfac, "recursive": mfac.recursion}


def unequal(form: str, G: Tensor, g: Tensor, sizes: list[int], lam: float) -> Tensor:
    """Blocks of unequal sizes, one after the other: G (m, P), g (P,)."""
    parts = zip(G.split(sizes, 1), g.split(sizes), strict=True)
    return torch.cat([FORMS[form](G_k, lam)(g_k) for G_k, g_k in parts])


def dense(G: Tensor, g: Tensor, lam: float) -> Tensor:
    """λ (GᵀG/m + λI)⁻¹ g for one block, in float64, by a solver that knows nothing of Woodbury."""
    G, g = G.double(), g.double()
    A = G.T @ G / len(G) + lam * torch.eye(G.shape[1], dtype=torch.float64)
    return lam * torch.linalg.solve(A, g)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grouping", ["layer", "block", "independent"])
def test_recorded_hypergradients_are_reproduced(form: str, grouping: str) -> None:
    """54 recorded cases a grouping, blocks of unequal sizes: float64 to 1e-10, float32 to 1e-4."""
    rec = recorded("official/mfac_hypergrad_unit.npz")
    numels = [a * b for a, b in rec.meta["param_shapes"]]
    sizes = [sum(numels[i] for i in block) for block in rec.meta["groupings"][grouping]]
    expected = rec[f"hypergrad_{grouping}_f64"]
    for s, scale in enumerate(rec["scales"]):
        for k, lam in enumerate(rec["lams"].tolist()):
            for j, m in enumerate(rec["ms"].tolist()):
                for n in range(2):
                    G, g = rec["G"][:m].double() * scale, rec["q"][n].double()
                    close(unequal(form, G, g, sizes, lam), expected[s, k, j, n], 1e-10)
                    if grouping == "layer":
                        q32 = unequal(form, G.float(), g.float(), sizes, lam)
                        assert q32.dtype is torch.float32
                        close(q32, expected[s, k, j, n], 1e-4)


def test_recorded_vectors_and_denominators_are_reproduced() -> None:
    """v_i and m + d_i of Eq. 7, not only the final result."""
    rec = recorded("official/mfac_hypergrad_unit.npz")
    case = rec.meta["example"]
    numels = [a * b for a, b in rec.meta["param_shapes"]]
    sizes = [sum(numels[i] for i in block) for block in rec.meta["groupings"][case["grouping"]]]
    G = rec["G"][: case["m"]].double() * case["scale"]
    M = [precompute(G_k, case["lam"]) for G_k in G.split(sizes, 1)]
    close(torch.cat([block.v for block in M], 1), rec["example_v"], 1e-10)
    d = torch.stack([block.d for block in M], 1)
    close(case["m"] + d, rec["example_denominators"], 1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_recorded_global_block_is_reproduced(form: str) -> None:
    rec = recorded("official/mfac_global_unit.npz")
    for n in range(2):
        q = unequal(form, rec["G"], rec["q"][n], [36], float(rec["lam"]))
        close(q, rec["hypergrad_global_f64"][n], 1e-10)


def gradients(kind: str, scale: float) -> Tensor:
    g = torch.Generator().manual_seed(3)
    G = torch.randn(20, 300, generator=g, dtype=torch.float64)
    if kind == "collinear":
        G = torch.randn(1, 300, generator=g, dtype=torch.float64) + 1e-4 * G
    if kind == "rank 5":
        G = torch.randn(20, 5, generator=g, dtype=torch.float64) @ G[:5]
    return (scale * G / G.norm(dim=1, keepdim=True)).float()


@pytest.mark.parametrize("kind", ["independent", "collinear", "rank 5"])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize("query", ["random", "mean gradient"])
@pytest.mark.parametrize("form", FORMS)
def test_float32_storage_is_accurate_to_1e_6_on_any_structure(
    kind: str, scale: float, query: str, form: str
) -> None:
    """Both forms sum in float64, so collinear and rank-deficient gradients do not hurt them.

    The mean gradient is the hard query: the result is tiny by cancellation. Its float32 rounding is
    the tolerance.
    """
    G = gradients(kind, scale)
    g = torch.randn(300, generator=torch.Generator().manual_seed(4))
    g = G.mean(0) if query == "mean gradient" else g
    close(unequal(form, G, g, [300], 1e-3), dense(G, g, 1e-3), 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("partition", ["layer", "projection", "matrix", "global"])
@pytest.mark.parametrize("shape", [(3, 5, 40), (8, 8)])
def test_every_partition_equals_dense_inverses_of_its_blocks(
    form: str, partition: mfac.Partition, shape: tuple[int, ...]
) -> None:
    """Also of G (m, p) with m = p, where no shape tells whether the two were exchanged."""
    rng = torch.Generator().manual_seed(0)
    G = torch.randn(*shape, generator=rng, dtype=torch.float64)
    g = torch.randn(*shape[:-2], shape[-1], generator=rng, dtype=torch.float64)
    q = mfac.in_blocks(FORMS[form], partition)(G, 0.1)(g)
    G_flat = G.movedim(-2, 0).reshape(shape[-2], -1)  # one row a gradient
    p = shape[-1]
    width = {"layer": p, "projection": p // 2, "matrix": p // 4, "global": g.numel()}[partition]
    for i in range(0, g.numel(), width):
        part = slice(i, i + width)
        close(q.flatten()[part], dense(G_flat[:, part], g.flatten()[part], 0.1), 1e-10)


@pytest.mark.parametrize("lam", [0.0, -1e-3, float("nan"), float("inf")])
def test_a_lambda_that_is_not_positive_is_an_error(lam: float) -> None:
    for form in (mfac.mfac, mfac.recursion, hypergradients.identity, hypergradients.cg):
        with pytest.raises(ValueError, match="lambda must be a finite number above 0"):
            form(torch.ones(1, 2, 4), lam, None)  # type: ignore[operator]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_its_block_alone(bad: float) -> None:
    G = torch.randn(3, 4, 8)
    G[1, 2, 5] = bad
    q = mfac.mfac(G, 0.1)(torch.ones(3, 8))
    assert q.isfinite().all(1).tolist() == [True, False, True]
    matrices = mfac.in_blocks(mfac.mfac, "matrix")
    q = matrices(G, 0.1)(torch.ones(3, 8))  # column 5 is in the third of four
    assert q.isfinite().view(3, 4, 2).all(2).tolist()[1] == [True, True, False, True]
    G[1] = 1e6  # equal rows: GGᵀ swallows λ and cannot be factored
    assert mfac.mfac(G, 1e-9)(torch.ones(3, 8)).isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("form", FORMS)
def test_shapes_that_do_not_fit_are_refused_instead_of_broadcast(form: str) -> None:
    """A G of one row would broadcast with a query of three rows, and give a wrong answer."""
    with pytest.raises(ValueError, match=r"g must be \(1, 40\), .* got \(3, 40\)"):
        FORMS[form](torch.ones(1, 20, 40), 0.1)(torch.ones(3, 40))
    with pytest.raises(ValueError, match=r"g must be \(40,\), .* got \(1, 40\)"):
        FORMS[form](torch.ones(20, 40), 0.1)(torch.ones(1, 40))
    for wrong in (torch.ones(40), torch.ones(3, 0, 40)):
        with pytest.raises(ValueError, match=r"G must be \(K, m, p\)"):
            FORMS[form](wrong, 0.1)
    with pytest.raises(ValueError, match="p = 6 numbers cannot be cut into 4"):
        mfac.in_blocks(FORMS[form], "matrix")(torch.ones(1, 2, 6), 0.1)
    with pytest.raises(ValueError, match="partition 'tensor' is none of layer, projection"):
        mfac.in_blocks(FORMS[form], "tensor")  # type: ignore[arg-type]


def test_a_block_answers_only_when_all_of_its_gradients_are_in() -> None:
    """Eq. 10 sums over all m gradients; with two of three its answer would be another one."""
    G = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    M = mfac.empty_block(3, 5)
    for grad in G:
        with pytest.raises(ValueError, match="of m = 3"):
            mfac.apply(M, G[0], 0.1)
        M = mfac.extend(M, grad, 0.1)
    close(mfac.apply(M, G[0], 0.1), dense(G, G[0], 0.1), 1e-10)
    with pytest.raises(ValueError, match="m = 3"):
        mfac.extend(M, G[0], 0.1)
