"""experiments/recycling.py: what it measures at rate zero, and by hand; it changes no run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from align import align
from config import AlignConfig
from experiments import recycling
from support.checkpoints import load_adapter
from support.experiment import AlignExperiment

SMALL: Any = recycling.SETTINGS | {
    "dataset": "omniglot:Greek", "alternations": 3, "warmup": 1, "lower_steps": 3, "upper_steps": 1,
    "p_batch": 8, "d_batch": 8, "probe_epochs": 1, "eval_every": 3,
}  # fmt: skip
AT_REST = {"p_lr": 1e-30, "phi_p_lr": 1e-30, "end_lr": 0.0}  # steps that float32 does not see


def test_where_nothing_moves_stored_gradients_are_fresh_and_other_batches_are_not() -> None:
    cfg = AlignConfig(**SMALL | AT_REST)
    watch, _ = recycling.watch_run(AlignExperiment(cfg))
    assert [*watch.gradients] == [1, 2, 3]
    for gradients in watch.gradients.values():
        assert gradients.by_age == pytest.approx([1, 1, 1], abs=1e-5)
        assert gradients.length == pytest.approx(1, abs=1e-5)
        assert gradients.moved < 1e-20
        assert gradients.other < 0.99
    for queries in watch.queries.values():
        (query,) = queries
        assert query.age.part < 1e-3 < query.sampling.part


def test_measuring_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    """θ_P is that of an ordinary align run to the bit, and gradients age in it."""
    cfg = AlignConfig(**SMALL)
    watch, theta_P = recycling.watch_run(AlignExperiment(cfg))
    result = align(cfg, tmp_path / "run")
    plain, _, _ = load_adapter(result.adapter)
    assert torch.equal(theta_P, plain)
    youngest, _, oldest = watch.gradients[2].by_age
    assert 1 > youngest > oldest
    assert watch.gradients[2].moved > 0.01


def test_gradients_and_queries_are_compared_as_by_hand() -> None:
    """One block; ages count from the last gradient. (3, 0) and (0, 4) are 5 apart."""
    fresh = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])  # (1, 2, 2)
    stored = torch.tensor([[[0.0, 3.0], [0.0, 2.0]]])
    gradients = recycling.compare_gradients(stored, fresh, fresh.flip(1))
    assert gradients.by_age == [1, 0]
    assert gradients.other == 0
    assert gradients.length == 2  # of 3 / 1 and 2 / 2
    g = torch.tensor([[3.0, 4.0]])
    apart = recycling.distance(g, torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]))
    assert apart == pytest.approx((5 / 4, 0, 5 / 3, 0))


def test_each_case_has_a_row_for_each_part_of_a_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(recycling, "SETTINGS", SMALL)
    monkeypatch.setattr(recycling, "CASES", {"as it is": {}, "slower": {"p_lr": 1e-4}})
    app = typer.Typer()
    app.command()(recycling.main)
    done = CliRunner().invoke(app, ["--out", f"{tmp_path}"], catch_exceptions=False)
    assert done.exit_code == 0
    for name in ("gradients", "queries", "parts"):
        rows = json.loads((tmp_path / f"{name}.json").read_text())
        assert [row["case"] for row in rows] == ["as it is"] * 4 + ["slower"] * 4
        assert [row["when"] for row in rows[:4]] == ["first", "top rate", "middle", "last"]
