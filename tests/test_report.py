"""The page about runs: one file that needs nothing else, whose pictures decode and say in words what they show."""

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import cli
import report as room
from config import AlignConfig, UsageError
from stages import silent

TINY = "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1 --eval-every 1"
PEFT = "--epochs 2 --batch 40 --seeds 2 --quiet"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write below the current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a demo leaves: a backbone, an align run a seed, PEFT with and without; a name that HTML must escape."""
    out = tmp_path_factory.mktemp("runs") / "a <b> & c"
    lines = [
        "pretrain --pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 999 --quiet --out {o}/pretrain"
    ]
    start = "--backbone vit_mini --weights {o}/pretrain --dataset quilts"
    lines += [f"align {start} {TINY} --quiet --seed {seed} --out {{o}}/aligned/s{seed}" for seed in (0, 1)]
    lines += [f"finetune --from {{o}}/aligned {PEFT} --lr 1e-2 --out {{o}}/with"]
    lines += [f"finetune {start} {PEFT} --grid 1e-3,1e-2 --out {{o}}/without"]
    for line in lines:
        assert cli.run([part.replace("{o}", str(out)) for part in line.split()]) == 0
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

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row[0] == first)


def page_of(paths: list[Path], images: int = 0) -> Page:
    """A page without a look at the networks, unless `images` are asked for."""
    room.report(paths, Path("r.html"), silent, room.Looking(images=images, limit=20))
    return Page(Path("r.html"))


def test_a_page_is_one_file_whose_pictures_decode_and_are_described(runs: Path, capsys: Any) -> None:
    assert cli.run(["report", str(runs), "--json", "--quiet"]) == 0
    said = json.loads(capsys.readouterr().out)
    page = Page(Path("report.html"))
    assert page.open == []  # every element is closed
    assert {tag for tag, _ in page.tags}.isdisjoint(
        {"script", "link", "iframe", "object", "embed", "base", "form", "video"}
    )
    text = Path("report.html").read_text()
    assert not re.search(r"https?://|@import|url\(|src=\"(?!data:)|\son\w+=", text)
    assert all(about["href"].startswith("#run") for tag, about in page.tags if tag == "a")
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    pictures = [about for tag, about in page.tags if tag == "img"]
    assert len(pictures) == said["pictures"] >= 11
    for about in pictures:
        head, data = about["src"].split(",")
        assert head == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
            picture.load()
            assert min(picture.size) > 100
        assert re.search(r"\d", about["alt"])
        assert len(about["alt"]) > 40
    assert page.text.count("BiSSLight: a <b> & c") == 2  # title and headline, escaped and read back
    assert [(group["name"], group["kind"], group["runs"]) for group in said["groups"]] == [
        ("aligned", "align", 2), ("pretrain", "pretrain", 1), ("with", "finetune", 1), ("without", "finetune", 1),
    ]  # fmt: skip


def test_the_accuracies_are_those_of_evaluate_the_aligned_arm_first(runs: Path, capsys: Any) -> None:
    assert cli.run(["evaluate", str(runs / "with"), "--against", str(runs / "without"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["arms"]
    page = page_of([runs / "without", runs / "with"])
    for row in rows:
        found = page.row(row["arm"])
        assert found[1:4] == [str(row["seeds"]), row["unit"], f"{row['mean']:.2f} ± {row['std']:.2f}"]
    versus = rows[1]["first_minus_this"]
    assert page.row("without")[4:6] == [f"{versus['difference']:+.2f}", f"{versus['p']:.4g}"]
    assert page.row("0.01")[2] + page.row("0.001")[2] == "chosen"  # the grid of the direct arm


def test_curves_say_in_words_what_the_metrics_hold(runs: Path) -> None:
    """By hand from metrics.jsonl: the mean over steps, then over the two runs."""
    records = [
        [json.loads(line) for line in (runs / f"aligned/s{seed}/metrics.jsonl").read_text().splitlines()]
        for seed in (0, 1)
    ]
    page = page_of([runs / "aligned"])
    alts = [about["alt"] for tag, about in page.tags if tag == "img"]
    for name, key, start in (
        ("L^P against", "loss_P", "L^P"),
        ("L^D against", "loss_D_at_D", "at θ_D"),
        ("ratio", "cosine", "cosine of q and g"),
    ):
        first, last = (sum(sum(run[i][key]) / 2 for run in records) / 2 for i in (1, 3))
        alt = next(alt for alt in alts if alt.startswith(name))
        assert f"{start} from {first:.4g} at 1 to {last:.4g} at 3" in alt
        assert "mean of 2 runs" in alt
    val = [sum(run[i]["val_P"]["accuracy"] for run in records) / 2 for i in (1, 3)]
    assert any(f"θ_P from {val[0]:.4g} at 1 to {val[1]:.4g} at 3" in alt for alt in alts)
    distance = sum(run[3]["distance"] for run in records) / 2
    assert any(f"to {distance:.4g} at 3" in alt and "|θ_P − θ_D|" in alt for alt in alts)


def test_settings_that_differ_come_first_with_their_sources(runs: Path) -> None:
    page = page_of([runs / "aligned"])
    names = [row[0] for row in page.rows]
    fold = names.index("setting", names.index("setting") + 1)
    assert {"backbone", "weights", "dataset", "seed", "alternations", "lower_steps", "p_batch"} <= {*names[:fold]}
    assert {"lam", "clip", "rank", "alpha", "drop_path", "pool", "augment", "device"} <= {*names[fold:]}
    assert page.row("alternations")[:5] == ["alternations", "3", "flag", "500", "App. C.3"]
    assert page.row("lam")[2] == ""
    assert page.row("seed")[1] == "0, 1"
    assert page.row("LoRA parameters")[1] == "8,192"  # 4 layers of A and B for q and v: 4 * 4 * 8 * 64
    assert page.row("seconds of an alternation")[1].endswith("mean of 6; validation not counted")


def test_defaults_of_ijepa_are_its_own() -> None:
    cfg = AlignConfig.model_validate(
        {"model": {"backbone": "vit_h14", "pretext": "ijepa"}, "data": {"dataset": "cub200"}}
    )
    usual = room.defaults(cfg)
    assert (usual["p_lr"], usual["head"], usual["rank"], usual["alpha"], usual["pool"]) == (
        0.005,
        "batchnorm",
        64,
        64.0,
        "imagenet",
    )


def test_the_networks_are_looked_at_where_weights_and_data_are_at_hand(runs: Path) -> None:
    """The numbers are those of `seeing`, asked for the same runs; without weights, a line says so."""
    import seeing

    page = page_of([runs], images=2)
    alts = [about["alt"] for tag, about in page.tags if tag == "img"]
    seen = seeing.similarity([runs / "aligned", runs / "with", runs / "without"], None, limit=20)
    assert any(f"RSA {seen['rsa'][0][3]:.3f}" in alt and f"CKA {seen['cka'][0][1]:.3f}" in alt for alt in alts)
    assert page.row("aligned (mfac), seed 0")[2:4] == ["1", f"{seen['cka'][1][2]:.4g}"]
    looked = seeing.rollout([runs / "without", runs / "with"], 2, Path("look.png"))
    right = sum(one["predictions"]["with"] == one["label"] for one in looked["images"])
    alt = next(alt for alt in alts if alt.startswith("Attention rollout on 2 validation images"))
    assert f"aligned + PEFT, seed 0 names {right} of 2 right" in alt
    assert f"has on average {looked['looked_at']['without']['peak']:.2f} times an even share" in alt
    assert looked["looked_at"]["without"]["what"] == "direct PEFT, seed 0"
    assert ", ".join(one["label"] for one in looked["images"]) in alt
    shutil.copytree(runs / "with", "moved")
    config = json.loads(Path("moved/config.json").read_text())
    config["model"]["weights"] = "gone.pth"
    Path("moved/config.json").write_text(json.dumps(config))
    text = page_of([Path("moved")], images=2).text
    assert "No rollout: the weights gone.pth are not here" in text
    assert "No similarity: the weights gone.pth are not here" in text
    assert "What the networks look at" not in page_of([runs]).text


def test_an_unfinished_run_is_shown_as_far_as_it_is(runs: Path) -> None:
    shutil.copytree(runs / "aligned/s0", "cut")
    Path("cut/result.json").unlink()
    lines = Path("cut/metrics.jsonl").read_text().splitlines()
    Path("cut/metrics.jsonl").write_text("\n".join([*lines[:2], '{"torn']))
    page = page_of([Path("cut")])
    assert "Not finished: cut; the curves are what there is so far." in page.text
    Path("cut/metrics.jsonl").write_text("")
    assert "No curves: nothing has been recorded yet." in page_of([Path("cut")]).text


def test_the_papers_figure_stands_beside_its_setting_alone(runs: Path) -> None:
    """84.4 ± 0.4 is ViT-L's direct PEFT on CUB-200 in the paper's main table, 6.29 M its LoRA parameters at r = 64."""
    assert page_of([runs / "with"]).row("with")[6] == "no figure of this setting"
    shutil.copytree(runs / "without", "official")
    for file, changes in {
        "config.json": {"model": {"backbone": "vit_l16", "weights": "x/mae_pretrain_vit_large_full.pth", "rank": 64},
                        "data": {"dataset": "cub200", "augment": "crop"}, "peft": {"epochs": 200}},
        "result.json": {"backbone": "vit_l16"},
    }.items():  # fmt: skip
        table = json.loads(Path("official", file).read_text())
        for key, value in changes.items():
            table[key] = table[key] | value if isinstance(value, dict) else value
        Path("official", file).write_text(json.dumps(table))
    page = page_of([Path("official")])
    assert page.row("official")[6] == "84.4 ± 0.4 (tab:mae_bisslight_main_results)"
    assert page.row("LoRA parameters")[1] == "6,291,456; the paper: 6.29 M (tab:lora_param_count)"


def test_what_cannot_be_reported_is_refused_in_one_line(runs: Path, capsys: Any) -> None:
    Path("mine.html").write_text("<p>the user's</p>")
    Path("empty").mkdir()
    wrong = {
        "nowhere": "nowhere: there is no such run directory",
        "empty": "empty: is neither a run nor a directory of runs",
        f"{runs / 'with'}|--out|mine.html": "mine.html: is there already and is not a report",
        f"{runs / 'with'}|--out|r.pdf": "r.pdf: a report is an .html file",
        f"{runs / 'with'}|--out|no/r.html": "no/r.html: there is no folder no",
    }
    for line, message in wrong.items():
        assert cli.run(["report", *line.split("|")]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert message in err
    assert Path("mine.html").read_text() == "<p>the user's</p>"
    page_of([runs / "with"])
    page_of([runs / "without"])  # a report may be written again
    shutil.copytree(runs / "with", "old")
    Path("old/config.json").write_text('{"model": {}}')
    with pytest.raises(UsageError, match="settings are not those of this version"):
        page_of([Path("old")])


def test_chromium_shows_the_page_without_a_word_in_its_console(runs: Path) -> None:
    """Drawn at a desktop's and a phone's width; a broken picture or a refused request would be in the log."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium is not installed")
    room.report([runs], Path("r.html"), silent)
    page = Path("r.html").resolve().as_uri()
    for width in (1280, 500):
        line = f"--headless --no-sandbox --disable-gpu --enable-logging=stderr --user-data-dir={Path.cwd()}/profile"
        done = subprocess.run(
            [chromium, *line.split(), f"--window-size={width},2000", "--screenshot=shot.png", page],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "CONSOLE" not in done.stderr
        with Image.open("shot.png") as shot:
            assert shot.size == (width, 2000)
            assert len(shot.convert("RGB").getcolors(10**6) or []) > 50  # text and curves, not an empty page
