"""The cost estimate against a table that was measured with a FLOP counter."""

from pathlib import Path

import pytest
import torch

from config import BACKBONES, AlignConfig, Data, Model
from data import Split, Task
from stages import budget

NOTHING = Split([Path("x")], torch.zeros(1))


@pytest.mark.parametrize(
    ("backbone", "lora", "alternation"),
    [("vit_b16", 2_359_296, 332.5), ("vit_l16", 6_291_456, 749.7), ("vit_h14", 10_485_760, 1796.3)],
)
def test_the_budget_at_the_papers_settings(backbone: str, lora: int, alternation: float) -> None:
    """TFLOP an alternation, from torch's FLOP counter on the official sizes; our formula rounds at the first block."""
    defaults = BACKBONES[backbone]
    cfg = AlignConfig(model=Model(backbone=backbone, rank=defaults.rank), data=Data(dataset="x"))
    about = budget(cfg, defaults.arch, Task("x", NOTHING, NOTHING, NOTHING, ["a", "b"]), 1_281_167)
    assert about["lora_parameters"] == lora
    assert about["steps"] == {"lower": 10_000, "upper": 4_000}
    assert about["TFLOP"] / 500 == pytest.approx(alternation, rel=0.03)
    assert about["gradient_store_MB"] == pytest.approx(20 * 4 * lora / 1e6)
