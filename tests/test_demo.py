"""The demo's story with two seeds and hardly any steps; what its sentences say."""

import json
from pathlib import Path

import pytest
from PIL import Image

from config import AlignConfig
from evaluate import Row, compare
from extras import demo
from support.errors import UsageError
from support.experiment import open_align_experiment, pool_images, pretext_batches
from support.omniglot import WEIGHTS
from support.runs import sha256


def test_the_story_ends_in_words_and_a_picture_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SEEDS", 2)
    few = {"alternations": 2, "warmup": 1, "probe_epochs": 1}
    monkeypatch.setattr(demo, "ALIGN", demo.ALIGN | few)
    monkeypatch.setattr(demo, "PEFT", demo.PEFT | {"epochs": 2, "warmup_epochs": 0})
    result = demo.demo(tmp_path / "d", jobs=1)
    assert [(row.arm, row.seeds, row.unit) for row in result.arms] == [
        ("aligned", 2, "align run and PEFT"),
        ("direct", 2, "PEFT seed"),
        ("restart", 2, "PEFT and PEFT anew"),
    ]
    settings = [json.loads((tmp_path / f"d/align/s{s}/config.json").read_text()) for s in range(2)]
    assert [one["seed"] for one in settings] == [0, 1]  # each seed has an align run of its own
    assert (demo.ALIGN | {"lam": 0.001}).items() <= settings[0].items()
    again = json.loads((tmp_path / "d/restart/lr0.01-s101/env.json").read_text())["about"]
    assert again["start_sha256"] == [sha256(tmp_path / "d/direct/adapter-s1.safetensors")]
    with Image.open(result.picture) as picture:
        assert picture.size[0] > 1000
    made = (tmp_path / "d/align/s1/adapter.safetensors").stat().st_mtime_ns
    assert demo.demo(tmp_path / "d", jobs=1) == result  # finished runs are read
    assert (tmp_path / "d/align/s1/adapter.safetensors").stat().st_mtime_ns == made


def test_a_folder_of_photographs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "roses").mkdir()
    with pytest.raises(UsageError, match="roses"):
        demo.demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["roses"]


def test_the_backbone_that_comes_with_the_program_fills_in_characters() -> None:
    """Zeros have a loss of 0.33, as most patches are blank; the pretraining ended at 0.27."""
    m = open_align_experiment(AlignConfig(backbone="vit_mini", dataset="omniglot:Greek"))
    assert WEIGHTS.stat().st_size < 800_000
    task = m.new_pretext_task(m.new_theta(0))
    images = pool_images(m.pool, m.arch.image_size, m.cfg)
    batch = next(pretext_batches(task, images, 500, range(1), m.cfg, m.device))
    assert 0.2 < task.loss(None, task.phi, batch) < 0.3


def row(name: str, counts: list[int], first: list[int]) -> Row:
    """An arm of 100 test images, compared with the first one."""
    return Row(
        arm=name, seeds=len(counts), unit="PEFT seed", mean=sum(counts) / len(counts), std=1.0,
        metric="top-1 accuracy", paper=None, differs={}, accuracies=[*map(float, counts)],
        counts=counts, first_minus_this=compare(first, counts),
    )  # fmt: skip


def test_the_answer_names_the_epochs_and_what_may_be_chance() -> None:
    aligned = [50, 51, 52, 53]
    arms = [
        row("aligned", aligned, aligned),
        row("direct", [40, 40, 40, 40], aligned),
        row("restart", [50, 51, 52, 54], aligned),
    ]
    fast = {1: 20.0, 2: 36.0, 3: 50.0}
    slow = {1: 10.0, 2: 25.0, 3: 37.0}
    head_start, at_the_end, restart, _ = demo.describe_arms(arms, [fast, slow, fast])
    # nine tenths of direct's 40 %; its curve ends at 37 %
    assert all(number in head_start for number in ("36 %", "2 epochs", "3 epochs"))
    assert "+11.5" in at_the_end and "0.029" in at_the_end
    assert "-0.2" in restart
    assert demo.epochs_to_reach(slow, 38) == "more than 3 epochs"
