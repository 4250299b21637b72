"""The page about runs: one file, whose pictures decode and say in words what they show."""

import base64
import html
import io
import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from PIL import Image

import cli
from extras.report import report


@pytest.fixture(scope="module", name="runs")
def named(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs, with a picture of one, under a name that HTML must escape."""
    out = tmp_path_factory.mktemp("runs") / "a <b> & c"
    shutil.copytree(runs, out)
    line = ["evaluate", str(out / "with"), "--against", str(out / "without"), "--rollout", "2"]
    assert cli.run(line) == 0
    return out


class Page:
    """What a page holds: its source, the descriptions of its pictures, the rows of its tables."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text()
        self.pictures = re.findall(r'<img src="([^"]*)" alt="([^"]*)">', self.source)
        self.alts = [html.unescape(alt) for _, alt in self.pictures]
        rows = re.findall(r"<tr>(.*?)</tr>", self.source)
        self.rows = [[html.unescape(x) for x in re.findall(r"<t[dh].*?>(.*?)<", r)] for r in rows]

    def row(self, first: str) -> dict[str, str]:
        """A row by its first cell, with the heads of its table's columns."""
        at = next(i for i, row in enumerate(self.rows) if row[0] == first)
        heads = [row for row in self.rows[:at] if row[0] in ("arm", "setting")]
        return dict(zip(heads[-1], self.rows[at], strict=True))


@pytest.fixture(scope="module")
def page(runs: Path) -> Page:
    report([runs], runs.parent / "r.html")
    return Page(runs.parent / "r.html")


def test_a_page_is_one_file_whose_pictures_decode_and_are_described(runs: Path, page: Page) -> None:
    active = r"<(script|link|iframe|object|embed|base|form|video)"
    outside = r"https?://|@import|url\(|src=\"(?!data:)|\son\w+="
    assert not re.search(f"{active}|{outside}", page.source)
    assert str(runs.parent) not in page.source  # no places of the machine it was made on
    assert page.source.count("<img") == len(page.pictures) == 13
    for (src, _), alt in zip(page.pictures, page.alts, strict=True):
        data = base64.b64decode(src.removeprefix("data:image/png;base64,"), validate=True)
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            assert picture.info["Description"] == alt
        assert re.search(r"\d", alt) and len(alt) > 40
    assert page.source.count("BiSSLight: a &lt;b&gt; &amp; c") == 2  # title and headline, escaped
    with Image.open(runs / "with/rollout.png") as picture:
        assert picture.info["Description"] in page.alts


def test_the_tables_are_those_of_evaluate_and_the_settings_that_differ(
    runs: Path, page: Page, capsys: Any
) -> None:
    line = ["evaluate", str(runs / "with"), "--against", str(runs / "without"), "--json"]
    assert cli.run(line) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    names = [row[0] for row in page.rows]
    assert names.index("with") < names.index("without")
    for row, arm in ((page.row(arm["arm"]), arm) for arm in arms):
        assert (row["seeds"], row["mean"]) == (str(arm["seeds"]), f"{arm['mean']:.4g}")
    versus = arms[1]["first_minus_this"]
    assert f"p {versus['p']:.4g}" in page.row("without")["first_minus_this"]
    grid = page.row("grid")
    assert (grid["with"], grid["without"]) == ("0.01", "0.001, 0.01")
    assert not {"lam", "clip", "rank"} & {*names}


def test_curves_say_in_words_what_the_metrics_hold(runs: Path, page: Page) -> None:
    """By hand from metrics.jsonl: the mean over steps, of PEFT then over its two seeds."""

    def records(place: str) -> list[Any]:
        lines = (runs / place / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if '"probe_val"' not in line]

    found = records("aligned")
    for start, key in (("pretext loss", "loss_P"), ("downstream loss at θ_D", "loss_D_at_D")):
        alt = next(alt for alt in page.alts if alt.startswith(f"align, {start}"))
        first, last = (fmean(found[i][key]) for i in (0, -1))
        assert f"aligned from {first:.4g} at 1 to {last:.4g} at 3" in alt
    rate = json.loads((runs / "without/result.json").read_text())["lr"]
    tuned = [records(f"without/lr{rate:g}-s{seed}") for seed in (0, 1)]  # of the chosen rate alone
    ends = [fmean(run[i]["loss"] for run in tuned) for i in (0, -1)]
    alt = next(alt for alt in page.alts if alt.startswith("finetune, training loss"))
    assert f"without from {ends[0]:.4g} at 1 to {ends[1]:.4g} at 2" in alt


def test_an_unfinished_run_is_shown_as_far_as_it_is(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "aligned", tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    report([tmp_path / "cut"], tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert "cut (align, not finished)" in page.source
    assert any("cut from" in alt for alt in page.alts)


def test_seeds_in_a_folder_are_one_arm_and_a_sweeps_runs_are_shown(
    runs: Path, tmp_path: Path
) -> None:
    for k in (0, 1):
        seed = Path(shutil.copytree(runs / "without", tmp_path / f"pair/s{k}"))
        text = (seed / "config.json").read_text().replace('"seed": 0', f'"seed": {2 * k}')
        (seed / "config.json").write_text(text)
    shutil.copytree(tmp_path / "pair/s1", tmp_path / "lone/x/s0")
    shutil.copytree(runs / "with", tmp_path / "lone/y/s0")
    assert report([tmp_path / "lone"], tmp_path / "l.html")["arms"] == ["x/s0", "y/s0"]
    shutil.copytree(runs / "with", tmp_path / "sweep/rank-4/finetune")
    (tmp_path / "sweep/env.json").write_text('{"command": "sweep"}')
    found = report([tmp_path / "pair", tmp_path / "sweep"], tmp_path / "r.html")
    assert found["arms"] == ["pair", "sweep/rank-4/finetune"]
    assert Page(tmp_path / "r.html").row("pair")["seeds"] == "4"
    report([runs / "with"], tmp_path / "one.html")
    assert Page(tmp_path / "one.html").row("rank") == {"setting": "rank", "with": "8"}
