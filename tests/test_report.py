"""The page about runs: one file, whose pictures decode and say in words what they show."""

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from PIL import Image

import cli
from extras.report import report

TINY = "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1"
PEFT = "--epochs 2 --batch 40 --seeds 2 --warmup-epochs 0 --quiet"


@pytest.fixture(scope="module")
def runs(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An align run, PEFT with and without; a name that HTML must escape."""
    out = tmp_path_factory.mktemp("runs") / "a <b> & c"
    own = f"--backbone vit_mini --weights {weights} --dataset quilts"
    lines = [f"align {own} {TINY} --eval-every 1 --warmup 0 --quiet --out O/aligned"]
    lines += [f"finetune --from O/aligned {PEFT} --lr 1e-2 --out O/with"]
    lines += [f"finetune {own} {PEFT} --grid 1e-3,1e-2 --out O/without"]
    lines += ["evaluate O/with --against O/without --rollout 2"]
    for line in lines:
        assert cli.run([part.replace("O/", f"{out}/") for part in line.split()]) == 0
    return out


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, its text, the rows of its tables."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.feed(path.read_text())
        self.close()
        self.alts = [about["alt"] for tag, about in self.tags if tag == "img"]

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data

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
    assert page.open == []  # every element is closed
    active = {"script", "link", "iframe", "object", "embed", "base", "form", "video"}
    assert {tag for tag, _ in page.tags}.isdisjoint(active)
    text = (runs.parent / "r.html").read_text()
    assert not re.search(r"https?://|@import|url\(|src=\"(?!data:)|\son\w+=", text)
    assert str(runs.parent) not in text  # no places of the machine it was made on
    pictures = [about for tag, about in page.tags if tag == "img"]
    assert len(pictures) == 11
    for about in pictures:
        head, data = about["src"].split(",")
        assert head == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
            picture.load()
            assert picture.info["Description"] == about["alt"]
        assert re.search(r"\d", about["alt"]) and len(about["alt"]) > 40
    assert page.text.count("BiSSLight: a <b> & c") == 2  # title and headline, escaped
    with Image.open(runs / "with/rollout.png") as picture:
        assert picture.info["Description"] in page.alts


def test_the_accuracies_are_those_of_evaluate_the_aligned_arm_first(
    runs: Path, page: Page, capsys: Any
) -> None:
    line = ["evaluate", str(runs / "with"), "--against", str(runs / "without"), "--json"]
    assert cli.run(line) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    names = [row[0] for row in page.rows]
    assert names.index("with") < names.index("without")
    for arm in arms:
        row = page.row(arm["arm"])
        assert (row["seeds"], row["mean"]) == (str(arm["seeds"]), f"{arm['mean']:.4g}")
    versus = arms[1]["first_minus_this"]
    assert f"p {versus['p']:.4g}" in page.row("without")["first_minus_this"]


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
    val = [found[i]["val_P"]["accuracy"] for i in (0, -1)]
    assert any(f"aligned from {val[0]:.4g} at 1 to {val[1]:.4g} at 3" in alt for alt in page.alts)
    rate = json.loads((runs / "without/result.json").read_text())["lr"]
    tuned = [records(f"without/lr{rate:g}-s{seed}") for seed in (0, 1)]  # of the chosen rate alone
    ends = [fmean(run[i]["loss"] for run in tuned) for i in (0, -1)]
    alt = next(alt for alt in page.alts if alt.startswith("finetune, training loss"))
    assert f"without from {ends[0]:.4g} at 1 to {ends[1]:.4g} at 2" in alt


def test_settings_that_differ_stand_in_a_column_an_arm(page: Page) -> None:
    row = page.row("grid")
    assert (row["with"], row["without"]) == ("0.01", "0.001, 0.01")
    assert not {"lam", "clip", "rank"} & {row[0] for row in page.rows}


def test_an_unfinished_run_is_shown_as_far_as_it_is(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "aligned", tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    report([tmp_path / "cut"], tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert "cut (align, not finished)" in page.text
    assert any("cut from" in alt for alt in page.alts)


WRONG = {
    "nowhere": "nowhere: is neither a run nor a directory of runs",
    "empty": "empty: is neither a run nor a directory of runs",
    "RUN|--out|mine.html": "mine.html: was not made by this program",
    "RUN|--out|r.pdf": "r.pdf: cannot be written, give one of the suffixes .html",
    "RUN|--out|no/r.html": "no/r.html: cannot be written",
}


def test_what_cannot_be_reported_is_refused_in_one_line(
    runs: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.html").write_text("<p>the user's</p>")
    Path("empty").mkdir()
    for line, message in WRONG.items():
        given = [str(runs / "with") if part == "RUN" else part for part in line.split("|")]
        assert cli.run(["report", *given]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert message in err
    assert Path("mine.html").read_text() == "<p>the user's</p>"
    for _ in range(2):  # a report may be written again
        assert cli.run(["report", str(runs / "with")]) == 0
