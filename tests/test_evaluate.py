"""Scores, the permutation test against brute force, and which runs may be pooled."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch

from config import UsageError
from evaluate import Arm, compare, read_arm, score, table
from runtime import rng


def brute_force(a: list[float], b: list[float]) -> float:
    """Share of splits whose |difference of means| is at least the observed one, counted by hand."""
    pooled, n = a + b, len(a)
    observed = abs(sum(a) / n - sum(b) / len(b))
    splits = list(combinations(range(len(pooled)), n))
    hits = 0
    for split in splits:
        x = [pooled[i] for i in split]
        y = [pooled[i] for i in range(len(pooled)) if i not in split]
        hits += abs(sum(x) / n - sum(y) / len(y)) >= observed - 1e-12
    return hits / len(splits)


@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0, 20.0])
def test_p_is_exact_over_all_splits(shift: float) -> None:
    """8 against 8: 12,870 splits, as in the paper; ties included (accuracies repeat)."""
    g = rng(0)
    a = [round(x, 1) + shift for x in torch.randn(8, generator=g).tolist()]
    b = [round(x, 1) for x in torch.randn(8, generator=g).tolist()]
    result = compare(a, b)
    assert (result.splits, result.exact) == (12_870, True)
    assert result.p == pytest.approx(brute_force(a, b), abs=1e-12)
    assert result.difference == pytest.approx(sum(a) / 8 - sum(b) / 8)


def test_many_seeds_are_sampled_and_it_is_said() -> None:
    result = compare([float(x) for x in range(16)], [float(x) for x in range(16)])
    assert (result.exact, result.splits) == (False, 100_000)


def test_one_seed_has_no_p() -> None:
    assert compare([1.0], [2.0, 3.0]).p is None


def test_score_does_not_depend_on_batch_size() -> None:
    z, y = torch.randn(23, 5, generator=rng(1)), torch.randint(5, (23,), generator=rng(2))
    whole = score(lambda x: x, [(z, y)])
    parts = score(lambda x: x, zip(z.split(4), y.split(4), strict=True))
    assert whole.accuracy == parts.accuracy == pytest.approx(100 * float((z.argmax(1) == y).float().mean()))
    assert whole.loss == pytest.approx(parts.loss)
    assert whole.loss == pytest.approx(float(torch.nn.functional.cross_entropy(z, y)))


def finished(path: Path, test: list[float], **changes: object) -> None:
    """A finished run; `changes` are settings that differ from the others'."""
    path.mkdir(parents=True)
    data = {"dataset": "quilts", "data_seed": 0, "pool": None}
    config = {"data": data | changes, "model": {"rank": 8} | changes, "peft": {}, "start": None, "seed": len(str(path))}
    (path / "config.json").write_text(json.dumps(config))
    (path / "result.json").write_text(json.dumps({"unit": "PEFT seed", "test": test}))


def test_a_directory_of_runs_is_one_arm(tmp_path: Path) -> None:
    finished(tmp_path / "arm" / "s0", [70.0])
    finished(tmp_path / "arm" / "s1", [72.0])
    arm = read_arm(tmp_path / "arm")
    assert arm == Arm("arm", [70.0, 72.0], "PEFT seed", {"dataset": "quilts", "data_seed": 0})
    assert (arm.mean, arm.std) == (71.0, pytest.approx(2**0.5))
    rows = table([arm, arm._replace(accuracies=[60.0, 61.0])])
    assert rows[1]["first_minus_this"]["difference"] == pytest.approx(10.5)


def test_runs_that_are_no_arm_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "mixed" / "a", [70.0])
    finished(tmp_path / "mixed" / "b", [70.0], rank=4)
    finished(tmp_path / "other", [70.0], data_seed=1)
    with pytest.raises(UsageError, match="not comparable"):
        table([read_arm(tmp_path / "mixed" / "a"), read_arm(tmp_path / "other")])
    finished(tmp_path / "running", [70.0])
    (tmp_path / "running" / "result.json").unlink()
    finished(tmp_path / "align", [])
    (tmp_path / "align" / "result.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    for name, message in [
        ("mixed", "differs from .* in model"),
        ("running", "is not finished"),
        ("align", "has no test accuracy"),
        ("nothing", "is neither a run nor a directory of runs"),
        ("missing", "there is no such run directory"),
    ]:
        with pytest.raises(UsageError, match=message):
            read_arm(tmp_path / name)
