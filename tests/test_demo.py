"""The demo's story with two seeds and hardly any steps."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from config import AlignConfig
from extras import demo
from support.experiment import AlignExperiment, pretext_batches


def test_the_story_ends_in_a_table_and_a_picture_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("ALIGNED", 2), ("DIRECT", 2)):
        monkeypatch.setattr(demo, name, count)
    short = {"epochs": 1, "warmup_epochs": 0, "batch": 500}
    monkeypatch.setattr(demo, "PRETRAIN", demo.PRETRAIN | short)
    few = {"alternations": 2, "warmup": 1, "probe_epochs": 1}
    monkeypatch.setattr(demo, "ALIGN", demo.ALIGN | few)
    monkeypatch.setattr(demo, "PEFT", demo.PEFT | {"epochs": 1, "warmup_epochs": 0})
    result = demo.demo(tmp_path / "d", jobs=1, data_seed=1)
    assert [(row.arm, row.seeds, row.unit) for row in result["arms"]] == [
        ("aligned", 2, "align run and PEFT"),
        ("direct", 2, "PEFT seed"),
    ]
    settings = [json.loads((tmp_path / f"d/align/s{s}/config.json").read_text()) for s in range(2)]
    assert [one["seed"] for one in settings] == [0, 1]  # each seed has an align run of its own
    assert (demo.ALIGN | {"lam": 0.001}).items() <= settings[0].items()
    with Image.open(result["picture"]) as picture:
        assert picture.size[0] > 1000
    made = (tmp_path / "d/align/s1/adapter.safetensors").stat().st_mtime_ns
    assert demo.demo(tmp_path / "d", jobs=1, data_seed=1) == result  # finished runs are read
    assert (tmp_path / "d/align/s1/adapter.safetensors").stat().st_mtime_ns == made


def test_the_backbone_that_comes_with_the_demo_fills_in_quilts() -> None:
    """Predicting zero has a loss of 1; the pretraining ended at 0.14."""
    given = {"dataset": "quilts", "weights": demo.PRETRAINED, "mask_ratio": 0.3}
    m = AlignExperiment(AlignConfig(backbone="vit_mini", **given))
    task = m.pretext_task(m.new_theta())
    batch = next(pretext_batches(task, m.pool_images(), 500, range(1), m.cfg, m.device))
    assert 0.1 < task.loss(None, task.phi, batch) < 0.2


def test_the_power_is_that_of_repeated_demos() -> None:
    """By drawing: two arms of normal numbers with these deviations, tested by their difference."""
    arms = [SimpleNamespace(std=1.75, seeds=8), SimpleNamespace(std=2.9, seeds=24)]
    told = int(re.findall(r"in (\d+) %", demo.power(arms))[0])  # type: ignore[arg-type]
    g = np.random.default_rng(0)
    means = [g.normal(0, arm.std, (40_000, arm.seeds)).mean(1) for arm in arms]
    error = np.sqrt(sum(arm.std**2 / arm.seeds for arm in arms))
    found = np.abs(demo.GAIN + means[0] - means[1]) > 1.96 * error
    assert abs(100 * found.mean() - told) < 1.5
