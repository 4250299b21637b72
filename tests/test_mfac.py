"""Both forms of M-FAC against recorded numbers and dense algebra."""

import ast
from pathlib import Path

import pytest
import torch
from conftest import close, recorded
from torch import Tensor

import mfac
from mfac import MFAC, Recursion, apply_recursion, cut, cut_flat, extend, recursion


def closed(G: Tensor, g: Tensor, sizes: list[int], lam: float) -> Tensor:
    out = torch.empty_like(g)
    MFAC(cut_flat(G, sizes), lam).apply(cut_flat(g, sizes), cut_flat(out, sizes))
    return out


def recursive(G: Tensor, g: Tensor, sizes: list[int], lam: float) -> Tensor:
    parts = zip(G.split(sizes, 1), g.split(sizes), strict=True)
    return torch.cat([apply_recursion(recursion(G_k, lam), g_k, lam) for G_k, g_k in parts])


def dense(G: Tensor, g: Tensor, lam: float) -> Tensor:
    """λ (GᵀG/m + λI)⁻¹ g for one block, in float64, by a solver that knows nothing of Woodbury."""
    G, g = G.double(), g.double()
    return lam * torch.linalg.solve(G.T @ G / len(G) + lam * torch.eye(G.shape[1], dtype=torch.float64), g)


FORMS = {"closed": closed, "recursive": recursive}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grouping", ["layer", "block", "independent"])
def test_recorded_hypergradients_are_reproduced(form: str, grouping: str) -> None:
    """54 recorded cases a grouping, blocks of unequal sizes: float64 to 1e-10, float32 to 1e-4."""
    rec = recorded("official/mfac_hypergrad_unit.npz")
    numels = [a * b for a, b in rec.meta["param_shapes"]]
    sizes = [sum(numels[i] for i in block) for block in rec.meta["groupings"][grouping]]
    for s, scale in enumerate(rec["scales"]):
        for k, lam in enumerate(rec["lams"].tolist()):
            for j, m in enumerate(rec["ms"].tolist()):
                for n in range(2):
                    G, g = rec["G"][:m].double() * scale, rec["q"][n].double()
                    close(FORMS[form](G, g, sizes, lam), rec[f"hypergrad_{grouping}_f64"][s, k, j, n], 1e-10)
                    if grouping == "layer":
                        q32 = FORMS[form](G.float(), g.float(), sizes, lam)
                        assert q32.dtype is torch.float32
                        close(q32, rec["hypergrad_layer_f64"][s, k, j, n], 1e-4)


def test_recorded_vectors_and_denominators_are_reproduced() -> None:
    """v_i and m + d_i of Eq. 7, not only the final result."""
    rec = recorded("official/mfac_hypergrad_unit.npz")
    case = rec.meta["example"]
    numels = [a * b for a, b in rec.meta["param_shapes"]]
    sizes = [sum(numels[i] for i in block) for block in rec.meta["groupings"][case["grouping"]]]
    G = rec["G"][: case["m"]].double() * case["scale"]
    blocks = [recursion(G_k, case["lam"]) for G_k in G.split(sizes, 1)]
    close(torch.cat([block.v for block in blocks], 1), rec["example_v"], 1e-10)
    close(case["m"] + torch.stack([block.d for block in blocks], 1), rec["example_denominators"], 1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_recorded_global_block_is_reproduced(form: str) -> None:
    rec = recorded("official/mfac_global_unit.npz")
    for n in range(2):
        close(FORMS[form](rec["G"], rec["q"][n], [36], float(rec["lam"])), rec["hypergrad_global_f64"][n], 1e-10)


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
def test_float32_storage_is_accurate_to_1e_6_on_any_structure(kind: str, scale: float, query: str, form: str) -> None:
    """Both forms accumulate in float64, so collinear and rank-deficient gradients do not hurt them.

    The mean gradient is the hard query: the result is tiny by cancellation. Its float32 rounding is the tolerance.
    """
    G = gradients(kind, scale)
    g = G.mean(0) if query == "mean gradient" else torch.randn(300, generator=torch.Generator().manual_seed(4))
    close(FORMS[form](G, g, [300], 1e-3), dense(G, g, 1e-3), 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["independent", "collinear", "rank 5"])
def test_float64_equals_a_dense_inverse(form: str, kind: str) -> None:
    G = gradients(kind, 1.0).double()
    g = torch.randn(300, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    close(FORMS[form](G, g, [300], 1e-2), dense(G, g, 1e-2), 1e-10)


@pytest.mark.parametrize(("partition", "blocks"), [("layer", 3), ("projection", 6), ("matrix", 12), ("global", 1)])
@pytest.mark.parametrize("batched", [False, True])
def test_every_partition_equals_dense_inverses_of_its_blocks(
    partition: mfac.Partition, blocks: int, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looped or batched, with columns cut into chunks that do not divide them."""
    monkeypatch.setattr(mfac, "CHUNK", 7)
    rng = torch.Generator().manual_seed(0)
    G = torch.randn(3, 5, 40, generator=rng, dtype=torch.float64)
    g = torch.randn(3, 40, generator=rng, dtype=torch.float64)
    M = MFAC(cut(G, partition, batched), 0.1)
    q = torch.empty_like(g)
    M.apply(cut(g, partition, batched), cut(q, partition, batched))
    assert M.ok.shape == (blocks,)
    assert bool(M.ok.all())
    G_flat = G.transpose(0, 1).reshape(5, 120)  # one row a gradient
    width = 120 // blocks
    for i in range(0, 120, width):
        close(q.flatten()[i : i + width], dense(G_flat[:, i : i + width], g.flatten()[i : i + width], 0.1), 1e-10)


def test_online_and_deferred_recursion_are_the_same() -> None:
    G = gradients("independent", 1.0).double()
    M = Recursion(G.new_empty(0, 300), G.new_empty(0))
    for row in G:
        M = extend(M, row, 20, 0.1)
    torch.testing.assert_close(M, recursion(G, 0.1), rtol=0, atol=0)


def test_stored_gradients_and_query_are_left_untouched() -> None:
    G, g = gradients("independent", 1.0), torch.randn(300)
    before = G.clone(), g.clone()
    closed(G, g, [100, 200], 0.1)
    recursive(G, g, [100, 200], 0.1)
    assert torch.equal(G, before[0])
    assert torch.equal(g, before[1])


def test_blocks_are_views_not_copies() -> None:
    G = torch.zeros(2, 3, 8)
    for partition in ("layer", "projection", "matrix", "global"):
        for block in cut(G, partition):  # type: ignore[arg-type]
            assert all(piece.untyped_storage().data_ptr() == G.untyped_storage().data_ptr() for piece in block)


@pytest.mark.parametrize("lam", [0.0, -1e-3, float("nan"), float("inf")])
def test_a_lambda_that_is_not_positive_is_an_error(lam: float) -> None:
    with pytest.raises(ValueError, match="lambda must be a finite number above 0"):
        MFAC([[torch.ones(2, 3)]], lam)
    with pytest.raises(ValueError, match="lambda"):
        recursion(torch.ones(2, 3), lam)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_is_detected_and_its_block_named(bad: float) -> None:
    G = torch.randn(3, 4, 8)
    G[1, 2, 5] = bad
    M = MFAC(cut(G, "layer"), 0.1)
    assert M.ok.tolist() == [True, False, True]
    for batched in (False, True):  # column 5 of 8 lies in the third of four matrices
        ok = MFAC(cut(G, "matrix", batched), 0.1).ok
        assert ok.tolist() == [i != 1 * 4 + 2 for i in range(12)]
    with pytest.raises(FloatingPointError, match="block 1 "):
        M.check()


def test_block_sizes_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(ValueError, match="add up to 5, but the vectors have 6"):
        cut_flat(torch.zeros(2, 6), [2, 3])


def test_exact_is_eq_5_with_the_true_hessian_and_identity_has_none() -> None:
    rng = torch.Generator().manual_seed(0)
    R = torch.randn(6, 6, generator=rng, dtype=torch.float64)
    H, g = R @ R.T, torch.randn(2, 3, generator=rng, dtype=torch.float64)
    theta = torch.randn(2, 3, generator=rng, dtype=torch.float64)
    loss = lambda x: 0.5 * x.flatten() @ H @ x.flatten()  # noqa: E731
    expected = 0.3 * torch.linalg.inv(H + 0.3 * torch.eye(6, dtype=torch.float64)) @ g.flatten()
    close(mfac.exact(torch.empty(0), 0.3, theta, loss).apply(g).flatten(), expected, 1e-12)
    assert torch.equal(mfac.identity(torch.empty(0), 0.3, theta, loss).apply(g), g)


def test_the_module_imports_torch_alone() -> None:
    """So that one file can be copied into a notebook."""
    tree = ast.parse(Path(mfac.__file__).read_text())
    names = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert {name.split(".")[0] for name in names} == {"torch", "collections", "typing"}
