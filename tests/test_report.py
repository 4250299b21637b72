"""The page about runs: one file, whose pictures decode and say in words what they show."""

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from PIL import Image

import cli
from extras import report as room
from extras.report import report

TINY = "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1"
PEFT = "--epochs 2 --batch 40 --seeds 2 --warmup-epochs 0 --quiet"


@pytest.fixture(scope="module")
def runs(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An align run a seed, PEFT with and without, a sweep's table; a name that HTML must escape."""
    out = tmp_path_factory.mktemp("runs") / "a <b> & c"
    own = f"--backbone vit_mini --weights {weights} --dataset quilts"
    align = f"align {own} {TINY} --eval-every 1 --warmup 0 --quiet"
    lines = [f"{align} --seed {seed} --out O/aligned/s{seed}" for seed in (0, 1)]
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
        """A row by its first cell, with the heads of the last table's columns."""
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
    assert "prefers-color-scheme: dark" in text
    pictures = [about for tag, about in page.tags if tag == "img"]
    assert len(pictures) == 9
    for about in pictures:
        head, data = about["src"].split(",")
        assert head == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
            picture.load()
            assert min(picture.size) > 100
            assert picture.info["Description"] == about["alt"]
        assert re.search(r"\d", about["alt"]) and len(about["alt"]) > 40
    assert page.text.count("BiSSLight: a <b> & c") == 2  # title and headline, escaped


def test_the_accuracies_are_those_of_evaluate_the_aligned_arm_first(
    runs: Path, page: Page, capsys: Any
) -> None:
    line = ["evaluate", str(runs / "with"), "--against", str(runs / "without"), "--json"]
    assert cli.run(line) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    for arm in arms:
        row = page.row(arm["arm"])
        assert row["seeds"] == str(arm["seeds"])
        assert row["test top-1 accuracy %"] == f"{arm['mean']:.2f} ± {arm['std']:.2f}"
        assert "in the paper" not in row  # no figure of such settings: no empty column
    versus = arms[1]["first_minus_this"]
    assert page.row("without")["first − this"] == f"{versus['difference']:+.2f}"
    assert page.row("without")["p, two-sided"] == f"{versus['p']:.4g}"
    assert f"with: {arms[0]['mean']:.1f} %; {versus['difference']:+.1f} points" in page.text
    assert page.text.index("with (finetune)") < page.text.index("Accuracy on quilts")


def test_an_arm_has_one_colour(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its swatch, its dots and its curves, whatever else is on the page."""
    seen: list[Any] = []
    draw = room.arms

    def watched(*given: Any) -> Any:
        seen.append(given)
        return draw(*given)

    monkeypatch.setattr(room, "arms", watched)
    groups = {group.name: group for group in room.read_groups([runs])}
    assert len({group.colour for group in groups.values()}) == len(groups) == 3
    [*room.accuracies([*groups.values()])]
    rows, colours = seen[0]
    assert colours == [groups[row.arm].colour for row in rows]


def test_curves_say_in_words_what_the_metrics_hold(runs: Path, page: Page) -> None:
    """By hand from metrics.jsonl: the mean over steps, then over the two runs."""

    def records(place: str) -> list[Any]:
        lines = (runs / place / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if '"probe_val"' not in line]

    both = [records(f"aligned/s{seed}") for seed in (0, 1)]
    for start, key in (
        ("pretext loss", "loss_P"),
        ("downstream loss", "loss_D_at_D"),
        ("q ", "cosine"),
    ):
        alt = next(alt for alt in page.alts if alt.startswith(start))
        first, last = (fmean(fmean(run[i][key]) for run in both) for i in (0, -1))
        assert f"aligned {key} from {first:.4g} at 1 to {last:.4g} at 3" in alt
    val = [fmean(run[i]["val_P"]["accuracy"] for run in both) for i in (0, -1)]
    assert any(f"val_P from {val[0]:.4g} at 1 to {val[1]:.4g} at 3" in alt for alt in page.alts)
    rate = json.loads((runs / "without/result.json").read_text())["lr"]
    tuned = [records(f"without/lr{rate:g}-s{seed}") for seed in (0, 1)]  # of the chosen rate alone
    ends = [fmean(run[i]["loss"] for run in tuned) for i in (0, -1)]
    alt = next(alt for alt in page.alts if alt.startswith("training loss"))
    assert f"without loss from {ends[0]:.4g} at 1 to {ends[1]:.4g} at 2" in alt


def test_settings_that_differ_stand_in_a_column_an_arm(page: Page) -> None:
    row = page.row("alternations")
    assert (row["default"], row["aligned"]) == ("500", "3")
    assert page.row("grid")["without"] == "0.001, 0.01"
    assert not {"lam", "clip", "rank", "drop_path"} & {row[0] for row in page.rows}


def test_pictures_that_are_there_are_shown_and_nothing_is_computed(runs: Path, page: Page) -> None:
    with Image.open(runs / "with/rollout.png") as picture:
        assert picture.info["Description"] in page.alts
    env = json.loads((runs / "with/env.json").read_text())
    assert (
        page.rows[-1][page.rows[-4].index("weights_sha256")] == env["about"]["weights_sha256"][:12]
    )


def test_an_unfinished_run_is_shown_as_far_as_it_is(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "aligned/s0", tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    report([tmp_path / "cut"], tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert page.row("cut")["not finished"] == "cut"
    assert any("cut loss_P from" in alt for alt in page.alts)


def test_the_papers_figure_stands_beside_its_setting(runs: Path, tmp_path: Path) -> None:
    """84.4 ± 0.4 is ViT-L's direct PEFT on CUB-200 in the paper's main table."""
    shutil.copytree(runs / "without", tmp_path / "official")
    for file, changes in {
        "config.json": {"backbone": "vit_l16", "weights": "x/mae_pretrain_vit_large_full.pth",
                        "rank": 64, "dataset": "cub200", "augment": "crop", "epochs": 200},
        "result.json": {"backbone": "vit_l16"},
    }.items():  # fmt: skip
        table = json.loads((tmp_path / "official" / file).read_text())
        (tmp_path / "official" / file).write_text(json.dumps(table | changes))
    report([tmp_path / "official"], tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert page.row("official")["in the paper"] == "84.4 ± 0.4"
    assert "tab:" not in page.text


def test_a_sweep_is_one_table_and_one_picture(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "with", tmp_path / "s/rank-1/finetune")
    (tmp_path / "s/config.json").write_text('{"swept": {"rank": [1, 2]}}')
    shutil.copy(runs / "with/env.json", tmp_path / "s/env.json")
    env = json.loads((tmp_path / "s/env.json").read_text()) | {"command": "sweep"}
    (tmp_path / "s/env.json").write_text(json.dumps(env))
    found = {"rows": [{"arm": "PEFT", "run": "direct", "mean": 71.25}], "missing": ["rank-1/align"]}
    (tmp_path / "s/sweep.json").write_text(json.dumps(found))
    report([tmp_path / "s"], tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert page.row("PEFT")["mean"] == "71.25"
    assert "not finished: rank-1/align" in page.text
    assert "Accuracy on" not in page.text  # its points are in its table


WRONG = {
    "nowhere": "nowhere: is neither a run nor a directory of runs",
    "empty": "empty: is neither a run nor a directory of runs",
    "RUN|--out|mine.html": "mine.html: was not made by this program",
    "RUN|--out|r.pdf": "r.pdf: the suffix says the format, take .html",
    "RUN|--out|no/r.html": "no/r.html: there is no folder no",
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


def test_chromium_shows_the_page_without_a_word_in_its_console(
    runs: Path, page: Page, tmp_path: Path
) -> None:
    """At a desktop's and a phone's width; a refused request would be in the log."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("chromium is not installed")
    for width in (1280, 500):
        line = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --screenshot=shot.png"
        own = [f"--user-data-dir={tmp_path}/profile", f"--window-size={width},2000"]
        done = subprocess.run(
            [chromium, *line.split(), *own, (runs.parent / "r.html").as_uri()],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert (done.returncode, "CONSOLE" in done.stderr) == (0, False), done.stderr
        with Image.open(tmp_path / "shot.png") as shot:
            assert shot.size == (width, 2000)
            assert len(shot.convert("RGB").getcolors(10**6) or []) > 50  # not an empty page
