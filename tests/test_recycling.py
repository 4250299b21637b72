"""experiments/recycling.py: what it measures at rate zero, and by hand; it changes no run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from align import align
from config import AlignConfig
from experiments import recycling
from support.checkpoints import load_adapter

SMALL: Any = recycling.SETTINGS | {
    "dataset": "omniglot:Greek", "alternations": 3, "warmup": 1, "lower_steps": 3, "upper_steps": 1,
    "p_batch": 8, "d_batch": 8, "probe_epochs": 1, "eval_every": 3,
}  # fmt: skip
AT_REST = {"p_lr": 1e-30, "phi_p_lr": 1e-30, "end_lr": 0.0}  # steps that float32 does not see


def test_where_nothing_moves_stored_gradients_are_fresh_and_other_batches_are_not() -> None:
    watch = recycling.Watch(AlignConfig(**SMALL | AT_REST))
    watch.run()
    for (query,) in watch.found.values():
        assert query["oldest"] == pytest.approx(1, abs=1e-5)
        assert query["moved"] < 1e-20
        assert query["other"] < 0.99
        assert query["age"] < 1e-3 < query["sampling"]


def test_measuring_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    """θ_P is that of an ordinary align run to the bit, and gradients age in it."""
    cfg = AlignConfig(**SMALL)
    watch = recycling.Watch(cfg)
    theta_P = watch.run()
    plain, _, _ = load_adapter(align(cfg, tmp_path / "run").adapter)
    assert torch.equal(theta_P, plain)
    (query,) = watch.found["middle"]  # of three alternations the second
    assert 1 > query["youngest"] > query["oldest"]
    assert query["moved"] > 0.01


def test_gradients_and_parts_are_compared_as_by_hand() -> None:
    """One block; the first gradient is the oldest. (3, 0) and (0, 4) are 5 apart."""
    fresh = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])  # (1, 2, 2)
    stored = torch.tensor([[[0.0, 3.0], [0.0, 2.0]]])
    found = recycling.compare_gradients(stored, fresh, fresh.flip(1))
    assert found == {"youngest": 1, "oldest": 0, "other": 0}
    g = torch.tensor([[3.0, 4.0]])
    error = recycling.part_error(g, torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]))
    assert error == pytest.approx(5 / 3)
