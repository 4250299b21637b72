"""The demo's story at toy size, and its controls."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import demo
from config import UsageError
from data import quilts
from stages import silent


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's settings, but two seeds and hardly any steps."""
    monkeypatch.setattr(demo, "SEEDS", 2)
    monkeypatch.setattr(demo, "PRETRAIN", demo.PRETRAIN | {"epochs": 1, "warmup_epochs": 0, "batch": 500})
    monkeypatch.setattr(demo, "BILEVEL", demo.BILEVEL.model_copy(update={"alternations": 2, "warmup": 1}))
    monkeypatch.setattr(demo, "PEFT", demo.PEFT.model_copy(update={"epochs": 2, "seeds": 2, "warmup_epochs": 1}))


@pytest.mark.usefixtures("toy")
def test_the_quick_story_ends_in_a_table_remarks_and_a_picture(tmp_path: Path) -> None:
    result: dict[str, Any] = demo.quick(tmp_path / "d", 0, 1, False, silent)
    ((_, rows),) = result["tables"].items()
    assert [(row["arm"], row["seeds"], row["unit"]) for row in rows] == [
        ("aligned + PEFT", 2, "align run and PEFT"),
        ("PEFT", 2, "PEFT seed"),
    ]
    assert rows[1]["first_minus_this"]["splits"] == 6
    assert any("linear probe of the checkpoint" in remark for remark in result["remarks"])
    assert json.loads((tmp_path / "d" / "demo.json").read_text())["tables"] == json.loads(json.dumps(result["tables"]))
    with Image.open(tmp_path / "d" / "demo.png") as picture:
        assert picture.size[0] > 500
    aligned = [json.loads((tmp_path / f"d/align-aligned/s{s}/config.json").read_text())["seed"] for s in range(2)]
    assert aligned == [0, 1]  # each seed has an align run of its own
    with pytest.raises(UsageError, match="an earlier demo, --force starts it over"):
        demo.quick(tmp_path / "d", 0, 1, False, silent)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "result.json").write_text("the user's")
    with pytest.raises(UsageError, match="something else is there"):
        demo.quick(tmp_path / "thesis", 0, 1, True, silent)


@pytest.mark.parametrize("name", ["small CNN", "ViT from scratch"])
def test_controls_do_not_depend_on_what_ran_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SCRATCH_EPOCHS", 5)
    torch.manual_seed(1)
    first = demo.scratch_job((name, 0, 1e-3, 0))
    torch.manual_seed(2)
    assert demo.scratch_job((name, 0, 1e-3, 0)) == first


def test_pixel_regression_is_above_chance_and_deterministic() -> None:
    task = quilts(0)[1]
    accuracy = demo.pixel_regression(task)
    assert 12.5 < accuracy < 60
    assert demo.pixel_regression(task) == accuracy
