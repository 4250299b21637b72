"""What q is: its measures against dense matrices, its hidden scale, its page against its file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from align import align
from config import AlignConfig
from experiments import images_per_gradient, what_q_is
from experiments.newton import compare, squared_length_inside
from experiments.recipe import markdown


def test_traces_and_curvatures_are_those_of_dense_matrices() -> None:
    """F has a block for each row of θ; N is any symmetric matrix here."""
    g = torch.Generator().manual_seed(0)
    G = torch.randn(3, 4, 5, generator=g)
    x = torch.randn(3, 5, generator=g)
    root = torch.randn(15, 15, generator=g)
    N = root @ root.mT
    found = compare(G, x, lambda u: (N @ u.flatten()).view_as(u), lam=0.1)
    F = torch.block_diag(*(rows.mT @ rows / 4 for rows in G))
    flat = x.flatten()
    assert found["trace_F"] == pytest.approx(float(F.trace()), rel=1e-5)
    for name, matrix in (("along_F", F), ("along_N", N)):
        dense = flat @ matrix @ flat / (flat @ flat) / 0.1
        assert found[name] == pytest.approx(float(dense), rel=1e-5)
    diagonal = torch.arange(15.0)  # then one random vector of signs gives the trace itself
    found = compare(G, x, lambda u: diagonal.view_as(u) * u, lam=0.1)
    assert found["trace_N"] == pytest.approx(105)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5)])
def test_what_lies_inside_the_span_is_a_dense_projection(
    dtype: torch.dtype, tolerance: float
) -> None:
    """By QR; a gradient that comes twice spans nothing new, and gradients of zeros span nothing."""
    g = torch.Generator().manual_seed(0)
    G = torch.randn(3, 4, 9, generator=g, dtype=torch.float64)
    x = torch.randn(3, 9, generator=g, dtype=torch.float64)
    Q, _ = torch.linalg.qr(G.mT)  # (3, 9, 4)
    projected = (Q @ (Q.mT @ x[..., None]))[..., 0]
    dense = float(projected.square().sum())
    for rows in (G, torch.cat([G, G[:, :1]], 1)):
        found = squared_length_inside(rows.to(dtype), x.to(dtype))
        assert found == pytest.approx(dense, rel=tolerance)
    assert squared_length_inside(G, x - projected) < 1e-12 * dense
    assert squared_length_inside(0 * G, x) == 0


PAGE = what_q_is.ROWS.with_suffix(".md").read_text()
FEW: Any = {"alternations": 3, "warmup": 1, "probe_epochs": 1, "upper_steps": 1, "p_batch": 8}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three alternations, of which the last is measured."""
    monkeypatch.setattr(what_q_is, "SETTINGS", what_q_is.SETTINGS | FEW)
    monkeypatch.setattr(what_q_is, "LAST", 1)
    return what_q_is


@pytest.mark.slow
def test_measuring_changes_no_run(small: Any, tmp_path: Path) -> None:
    """|q|/|g|, its cosine and the distance are what align itself logs."""
    found = small.measure(2.0, 1e-3, 1.0, "Tagalog")
    settings = small.SETTINGS | {"dataset": "omniglot:Tagalog", "lower_steps": 2, "lam": 1e-3}
    run = align(AlignConfig(**settings), tmp_path / "run")
    last = json.loads(Path(run.out, "metrics.jsonl").read_text().splitlines()[-1])
    for name, logged in (("ratio_F", "q_over_g"), ("cosine_F", "cosine"), ("distance", "distance")):
        assert [found[name]] == pytest.approx(last[logged], rel=1e-6)


@pytest.mark.slow
def test_the_unit_of_the_loss_changes_mfacs_q_and_nothing_else(small: Any) -> None:
    one, thousand = (small.measure(2.0, 1e-3, c, "Tagalog") for c in (1.001, 1000.0))
    for name in ("loss_P", "distance", "trace_F", "ratio_N", "cosine_N"):
        assert thousand[name] == pytest.approx(one[name], rel=1e-3)
    assert thousand["ratio_F"] < one["ratio_F"] - 0.01


@pytest.mark.slow
def test_a_case_is_measured_once(small: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(small, "CASES", [(1.0, 1e-3, 1.0)])
    monkeypatch.setattr(small, "SCALES", [(1.0, 1e-3, 1.0)])
    path = tmp_path / "rows.csv"
    small.add_rows(path)
    first = path.read_text()
    small.add_rows(path)
    assert path.read_text() == first
    assert [row["alphabet"] for row in small.read_rows(path)] == ["Tagalog", "Early_Aramaic"]


def test_the_ranges_that_the_page_tells_are_those_of_the_file() -> None:
    rows = [row for row in what_q_is.read_rows(what_q_is.ROWS) if row["c"] == 1]
    papers = [row for row in rows if row["lam"] == 1e-3]

    def ends(rows: list[Any], name: str) -> tuple[float, float]:
        numbers = [row[name] for row in rows]
        return min(numbers), max(numbers)

    for row in rows:
        r, cosine = row["ratio_F"], row["cosine_F"]
        row["from g"] = 100 * math.sqrt(1 + r * r - 2 * r * cosine)  # |q − g| / |g| in percent
        row["shorter"] = 100 * (1 - r)
        row["angle"] = math.degrees(math.acos(row["cosine_N"]))
        row["times"] = row["trace_N"] / row["trace_F"] / 100
        row["percent"] = 100 * row["share"]
        row["smaller"] = min(row["pull"], row["acts"])
    smallest = [row for row in rows if row["lam"] == 1e-4]
    above = [row for row in rows if row["lam"] >= 1e-3]
    least, most = ends(rows, "times")
    (_, here), (_, there) = ends(above, "shorter"), ends(smallest, "shorter")
    figures = [
        f"{100 * math.floor(least):,} to {100 * math.ceil(most):,} times the trace",
        "{:.1f} to {:.1f} λ by N".format(*ends(papers, "along_N")),
        f"at most {ends(papers, 'along_F')[1]:.4f} λ by F",
        f"within {here:.1f} % (at 0.0001 {there:.1f} %)",
        f"within {ends(above, 'from g')[1]:.1f} % ({ends(smallest, 'from g')[1]:.1f} %)",
        "{:.0f} to {:.0f} % of |g|²".format(*ends(rows, "percent")),
        "{:.2f} to {:.2f} of g's length".format(*ends(papers, "ratio_N")),
        "{:.0f} to {:.0f} degrees".format(*ends(papers, "angle")),
        f"it is {ends(rows, 'product')[1]:.3f} at most",
        f"the smaller one is, is {ends(rows, 'smaller')[1]:.3f}",
    ]
    assert [figure for figure in figures if figure not in PAGE] == []
    assert min(row["ratio_N"] for row in rows if row["lam"] >= 0.1) > 0.94


def test_the_table_of_images_is_that_of_the_file() -> None:
    rows = json.loads(images_per_gradient.ROWS.read_text())
    assert markdown(rows) in PAGE
    along = {(row["alphabet"], row["images"]): float(row["F along g, in λ"]) for row in rows}
    falls, sees = [], []
    for alphabet in what_q_is.ALPHABETS:
        (N,) = {float(row["N along g, in λ"]) for row in rows if row["alphabet"] == alphabet}
        falls.append(f"{along[alphabet, 1] / along[alphabet, 64]:.0f}")
        sees.append(f"1/{N / along[alphabet, 1]:.0f}")
    assert " or ".join(falls) in PAGE and " or ".join(sees) in PAGE


@pytest.mark.slow
def test_f_shrinks_with_the_images_of_a_stored_gradient_and_n_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all gradients are of the same images and masks, F along g would not change."""
    monkeypatch.setattr(images_per_gradient, "IMAGES", (1, 16))
    one, many = images_per_gradient.measure("Tagalog", gradients=40, **FEW)
    assert float(one["F along g, in λ"]) > 4 * float(many["F along g, in λ"])
    assert one["N along g, in λ"] == many["N along g, in λ"]
    assert one["|q|/|g| with F"] < many["|q|/|g| with F"]
