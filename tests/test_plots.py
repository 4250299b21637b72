"""Pictures of arms and of runs, and the curves that are drawn."""

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from PIL import Image
from toy import read_records

from evaluate import evaluate
from extras.plots import draw_arms, draw_curves, read_curves
from support.errors import UsageError


def check_drawn(path: Path) -> None:
    """Open a picture, and see that it is not empty."""
    with Image.open(path) as picture:
        darkest, lightest = picture.convert("L").getextrema()
    assert darkest < lightest


def test_arms_are_drawn_in_three_kinds_of_file(runs: Path, tmp_path: Path) -> None:
    """A name of an arm may hold what is a formula elsewhere."""
    shutil.copytree(runs / "with", tmp_path / r"$\frac$")
    arms = evaluate([tmp_path / r"$\frac$", runs / "without"]).arms
    assert (arms[0].data_set, arms[0].test_images) == ("quilts", 480)
    draw_arms(arms, tmp_path / "arms.png")
    check_drawn(tmp_path / "arms.png")
    for suffix, start in (("svg", b"<?xml"), ("pdf", b"%PDF")):
        draw_arms(arms, tmp_path / f"arms.{suffix}")
        assert (tmp_path / f"arms.{suffix}").read_bytes().startswith(start)
    with pytest.raises(UsageError, match=r"arms\.txt"):
        draw_arms(arms, tmp_path / "arms.txt")


def test_curves_hold_what_the_metrics_hold(runs: Path) -> None:
    """By hand from metrics.jsonl: the mean over steps, of PEFT then over its two seeds."""

    def records(place: str) -> list[Any]:
        return [record for record in read_records(runs / place) if "probe_val" not in record]

    curves = read_curves(runs / "aligned")
    for quantity in ("loss_P", "loss_D_at_D"):
        means = [fmean(record[quantity]) for record in records("aligned")]
        assert list(curves[quantity].values()) == pytest.approx(means)
    rate = json.loads((runs / "without/result.json").read_text())["lr"]
    tuned = [records(f"without/lr{rate:g}-s{seed}") for seed in (0, 1)]  # of the chosen rate alone
    curves = read_curves(runs / "without")
    for step in (1, 2):
        both = [run[step - 1] for run in tuned]
        assert curves["loss"][step] == pytest.approx(fmean(record["loss"] for record in both))
        accuracies = [record["val"]["accuracy"] for record in both]
        assert curves["val/accuracy"][step] == pytest.approx(fmean(accuracies))


def test_unfinished_runs_and_folders_of_seeds_are_drawn(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "aligned", tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    for seed in (0, 1):
        shutil.copytree(runs / "with", tmp_path / f"arm/s{seed}")
    assert "loss_P" in read_curves(tmp_path / "cut") and "loss" in read_curves(tmp_path / "arm")
    draw_curves([tmp_path / "cut", tmp_path / "arm"], tmp_path / "curves.png")
    check_drawn(tmp_path / "curves.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty"):
        draw_curves([tmp_path / "empty"], tmp_path / "curves.png")
