"""Pictures of arms."""

import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from toy import run

from evaluate import evaluate
from extras.plots import draw_arms, plot_arms


def test_arms_are_drawn_in_three_kinds_of_file(runs: Path, tmp_path: Path) -> None:
    """A name of an arm may hold what is a formula elsewhere."""
    shutil.copytree(runs / "with", tmp_path / r"$\frac$")
    arms = evaluate([tmp_path / r"$\frac$", runs / "without"]).arms
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        draw_arms(arms, tmp_path / f"arms.{suffix}")
        assert (tmp_path / f"arms.{suffix}").read_bytes().startswith(start)
    with Image.open(tmp_path / "arms.png") as picture:
        darkest, lightest = picture.convert("L").getextrema()
    assert darkest < lightest


def test_no_file_is_replaced_by_a_picture(runs: Path, tmp_path: Path) -> None:
    """Not even a picture of this program: somebody may have drawn into it."""
    new = tmp_path / "new.svg"
    outcome = run(f"evaluate {runs / 'with'} --picture {new} --json")
    assert (outcome.code, outcome.err) == (0, f"picture in {new}\n")
    new.write_text(new.read_text().replace("</svg>", "<text>mine</text></svg>"))
    Image.effect_noise((30, 30), 50).save(tmp_path / "photo.png")
    (tmp_path / "notes.pdf").write_text("notes")
    for file in [*tmp_path.iterdir()]:
        before = file.read_bytes()
        outcome = run(f"evaluate {runs / 'with'} --picture {file}")
        assert outcome.code == 2 and str(file) in outcome.err
        assert outcome.out == ""  # what is refused has no result
        assert file.read_bytes() == before
    for place in ("nowhere/a.png", "a.txt"):
        said = run(f"evaluate {runs / 'with'} --picture {tmp_path / place}")
        assert said.code == 2 and said.out == "" and place in said.err


def test_an_arm_has_dots_a_line_at_their_mean_and_its_interval_behind_them(runs: Path) -> None:
    """The axis is not cut."""
    arms = evaluate([runs / "with", runs / "without"]).arms
    axes = Figure().subplots()
    plot_arms(axes, arms)
    assert axes.get_ylim() == (0, 100)
    lines = axes.get_lines()
    for arm, bar, dots, mean in zip(arms, axes.patches, lines[::2], lines[1::2], strict=True):
        assert [*dots.get_ydata()] == arm.accuracies
        assert [*mean.get_ydata()] == [arm.mean]
        assert (bar.get_y(), bar.get_y() + bar.get_height()) == pytest.approx(arm.interval())
        assert bar.get_zorder() < min(dots.get_zorder(), mean.get_zorder())
    names = [text.get_text().split("\n")[0] for text in axes.get_xticklabels()]
    assert names == ["with", "without"]
