"""Pictures of arms."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from evaluate import evaluate
from extras.plots import draw_arms
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
    draw_arms(arms, tmp_path / "arms.png")
    check_drawn(tmp_path / "arms.png")
    for suffix, start in (("svg", b"<?xml"), ("pdf", b"%PDF")):
        draw_arms(arms, tmp_path / f"arms.{suffix}")
        assert (tmp_path / f"arms.{suffix}").read_bytes().startswith(start)
    with pytest.raises(UsageError, match=r"arms\.txt"):
        draw_arms(arms, tmp_path / "arms.txt")
