"""Pictures of arms and of runs: what they say of themselves is what was measured."""

import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from PIL import Image

from evaluate import evaluate
from extras.plots import MARK, check_picture, draw_arms, draw_curves
from support.errors import UsageError


def described(path: Path) -> str:
    """The description in a picture, which can be decoded."""
    with Image.open(path) as picture:
        picture.load()
        assert picture.info["Software"] == MARK
        return str(picture.info["Description"])


def test_arms_are_drawn_with_a_description_that_holds_their_means(
    runs: Path, tmp_path: Path
) -> None:
    arms = evaluate([runs / "with", runs / "without"]).arms
    draw_arms(arms, tmp_path / "arms.png")
    words = described(tmp_path / "arms.png")
    for arm in arms:
        assert f"{arm.arm} {arm.mean:.2f}, {min(arm.accuracies)} to" in words
    for suffix in ("svg", "pdf"):
        draw_arms(arms, tmp_path / f"arms.{suffix}")
        assert MARK.encode() in (tmp_path / f"arms.{suffix}").read_bytes()
    draw_arms(arms, tmp_path / "arms.png")  # our own picture may be written again


def test_a_file_of_others_and_a_place_that_is_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_text("a photograph")
    for name in ("mine.png", "no/folder.png", "x.txt"):
        with pytest.raises(UsageError, match=re.escape(name)):
            check_picture(tmp_path / name)


def test_curves_say_in_words_what_the_metrics_hold(runs: Path, tmp_path: Path) -> None:
    """By hand from metrics.jsonl: the mean over steps, of PEFT then over its two seeds."""

    def records(place: str) -> list[Any]:
        lines = (runs / place / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if '"probe_val"' not in line]

    draw_curves([runs / "aligned", runs / "without"], tmp_path / "curves.png")
    words = described(tmp_path / "curves.png")
    aligned = records("aligned")
    for name, key in (("pretext loss", "loss_P"), ("downstream loss at θ_D", "loss_D_at_D")):
        first, last = (fmean(aligned[i][key]) for i in (0, -1))
        assert re.search(f"{name}.* of aligned from {first:.4g} at 1 to {last:.4g} at 3", words)
    rate = json.loads((runs / "without/result.json").read_text())["lr"]
    tuned = [records(f"without/lr{rate:g}-s{seed}") for seed in (0, 1)]  # of the chosen rate alone
    first, last = (fmean(run[i]["loss"] for run in tuned) for i in (0, -1))
    assert f"training loss of without from {first:.4g} at 1 to {last:.4g} at 2" in words
    best = fmean(run[-1]["val"]["accuracy"] for run in tuned)
    assert re.search(f"validation .* of without from .* to {best:.4g} at 2", words)


def test_unfinished_runs_and_folders_of_seeds_are_drawn(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "aligned", tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    for seed in (0, 1):
        shutil.copytree(runs / "with", tmp_path / f"arm/s{seed}")
    draw_curves([tmp_path / "cut", tmp_path / "arm"], tmp_path / "curves.png")
    words = described(tmp_path / "curves.png")
    assert "of cut from" in words and "training loss of arm from" in words
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty"):
        draw_curves([tmp_path / "empty"], tmp_path / "curves.png")
