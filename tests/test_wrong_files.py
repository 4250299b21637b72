"""Foreign files, damaged images, odd names and closed terminals, seen from the command line."""

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import cli
from model import device_of

ROOT = Path(cli.__file__).parent
PEFT = "--epochs 1 --batch 40 --warmup-epochs 0 --lr 1e-2 --quiet"
PRETRAIN = "pretrain --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 2000 --quiet"
ALIGN = "--lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --warmup 0 --probe-epochs 0"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `finetune` run of two seeds on quilts. Tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("files") / "f"
    assert cli.run([*peft(weights, "quilts", out), "--seeds", "2"]) == 0
    return out


def peft(weights: Path, dataset: str, out: Path | str) -> list[str]:
    line = f"finetune --backbone vit_mini --weights {weights} {PEFT}".split()
    return [*line, "--dataset", dataset, "--out", str(out)]


def align(
    weights: Path, dataset: str, out: str, more: str = "--alternations 1 --quiet"
) -> list[str]:
    line = f"align --backbone vit_mini --weights {weights} --pool quilts {ALIGN} {more}"
    return [*line.split(), "--dataset", dataset, "--out", out]


def refusal(arguments: list[str], capsys: Any) -> tuple[int, str]:
    """Exit code and the one line of a command that must not succeed."""
    capsys.readouterr()
    code = cli.run(arguments)
    out, err = capsys.readouterr()
    told = (code, out, err)
    assert code in (1, 2) and not out, told
    assert len(err.splitlines()) == 1 and err.startswith("error: "), told
    return code, err


# --- nothing foreign is overwritten (export: test_export) --------------------------------------


def test_a_picture_replaces_no_file_that_the_program_did_not_make(
    finished: Path, capsys: Any
) -> None:
    """One of the same format, by the same plotting library; the program's own is drawn again."""
    shutil.copytree(finished, "f")
    for suffix, line in (
        ("png", "evaluate f --rollout 2"),
        ("svg", "evaluate f"),
        ("pdf", "evaluate f"),
    ):
        mine = Path(f"mine.{suffix}")
        Figure().savefig(mine)
        before = mine.read_bytes()
        code, err = refusal([*line.split(), "--picture", str(mine)], capsys)
        assert code == 2 and mine.name in err and "choose another" in err
        assert mine.read_bytes() == before
    assert [cli.run(["evaluate", "f", "--picture", "p.svg"]) for _ in range(2)] == [0, 0]
    Path("f/rollout.png").write_text("mine")  # where it goes by default
    assert "rollout.png" in refusal(["evaluate", "f", "--rollout", "2"], capsys)[1]
    assert Path("f/rollout.png").read_text() == "mine"


# --- damaged images ---------------------------------------------------------------------------


def dataset(root: Path) -> str:
    """train/, val/ and test/ of two classes, JPEG files."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3), ("test", 3)):
        for kind in ("dark", "light"):
            (root / part / kind).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (40, 48, 3)) + 127 * (kind == "light")
                Image.fromarray(pixels.astype(np.uint8)).save(root / part / kind / f"{i}.jpg")
    return f"folder:{root}"


def cut(image: Path) -> None:
    """The head says size and mode; the end of the pixels is missing."""
    data = image.read_bytes()
    image.write_bytes(data[: len(data) * 2 // 3])


@pytest.mark.parametrize(
    ("command", "part"), [("align", "val"), ("finetune", "test"), ("finetune", "train")]
)
def test_a_damaged_image_is_named_before_the_first_step_or_when_it_is_drawn(
    weights: Path, command: str, part: str, capsys: Any
) -> None:
    """A training set may hold a million images: the run begins without looking at them. With
    others no run has begun, so the remedy, to remove the image, lets the same command run.
    """
    data = dataset(Path("data"))
    bad = Path("data", part, "light/2.jpg")
    cut(bad)
    line = align(weights, data, "r") if command == "align" else peft(weights, data, "r")
    line += ["--seeds", "1"] if command == "finetune" else []
    code, err = refusal(line, capsys)
    assert code == 1
    assert str(bad) in err and "remove it" in err
    assert Path("r").exists() == (part == "train")
    bad.unlink()
    assert part == "train" or cli.run(line) == 0


# --- names, result files ----------------------------------------------------------------------


def test_images_whose_names_are_not_utf_8_are_refused_and_run_directories_are_not(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A class, an image, an image of the pool; a run directory, and the folder where one works."""
    latin = os.fsdecode(b"caf\xe9")
    dataset(Path("class"))
    for part in ("train", "val", "test"):
        Path("class", part, "dark").rename(Path("class", part, latin))
    dataset(Path("image"))
    Path("image/train/dark/0.jpg").rename(Path("image/train/dark", f"{latin}.jpg"))
    Path(latin).mkdir()
    refused = [
        [*peft(weights, "folder:class", "r"), "--seeds", "1"],
        [*peft(weights, "folder:image", "r"), "--seeds", "1"],
        [*PRETRAIN.split(), "--pool", "image", "--out", "r"],
        ["data", "check", "folder:image"],
    ]
    taken = [
        [*peft(weights, "quilts", latin), "--seeds", "1"],
        ["evaluate", latin],
    ]
    monkeypatch.setattr("sys.stderr", cli.Forgiving(sys.stderr))
    for line in refused:
        err = refusal(line, capsys)[1]
        assert "caf" in err and "UTF-8; rename" in err
    assert not Path("r").exists()
    monkeypatch.setattr("sys.stdout", cli.Forgiving(sys.stdout))
    assert [cli.run(line) for line in taken] == [0, 0]
    monkeypatch.chdir(latin)
    assert cli.run(["evaluate", "."]) == 0


# --- runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_a_run_like_a_termination(weights: Path) -> None:
    """Its progress bar has nowhere to go, and the signal comes at the same time."""
    ours, theirs = pty.openpty()

    def controlling() -> None:
        """A closed terminal sends SIGHUP to those whose controlling one it is."""
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    line = align(weights, "quilts", "a", "--alternations 100 --eval-every 1000")
    words = [sys.executable, "-m", "cli", *line]
    streams: Any = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": env}
    with subprocess.Popen(words, start_new_session=True, preexec_fn=controlling, **streams) as p:
        os.close(theirs)
        until, log = time.monotonic() + 120, Path("a/metrics.jsonl")
        while not (log.exists() and len(log.read_text().splitlines()) > 2):
            assert p.poll() is None and time.monotonic() < until
            if select.select([ours], [], [], 0.02)[0]:
                os.read(ours, 65536)
        os.close(ours)
        assert p.wait(60) == 128 + signal.SIGHUP
    assert Path("a/checkpoint.pt").exists()  # test_resume goes on from such a one
    assert not Path("a/result.json").exists()


def test_a_report_holds_no_absolute_path_of_its_runs(finished: Path, weights: Path) -> None:
    """A page is for others; where its maker keeps files is not."""
    assert cli.run(["report", str(finished)]) == 0
    page = Path("report.html").read_text()
    assert str(finished.parent) not in page
    assert str(weights.parent) not in page


def test_an_unfinished_align_run_is_refused_with_a_remedy_that_works(
    weights: Path, capsys: Any
) -> None:
    line = align(weights, "quilts", "a")
    assert cli.run(line) == 0
    Path("a/result.json").unlink()
    Path("a/adapter.safetensors").unlink()
    tune = ["finetune", "--from", "a", *PEFT.split(), "--seeds", "1", "--out", "f"]
    err = refusal(tune, capsys)[1]
    assert "--from" in err and "is not a finished align run" in err
    assert "its own command again" in err
    assert [cli.run(line), cli.run(tune)] == [0, 0]


# --- processes and threads --------------------------------------------------------------------


def test_a_dry_run_tells_how_many_processes_decode_images(weights: Path, capsys: Any) -> None:
    """On a CPU none, unless asked otherwise; none for drawn images."""
    data = dataset(Path("data"))
    for name, more, count in ((data, "", 0), (data, "--workers 3", 3), ("quilts", "", 0)):
        line = [*peft(weights, name, "r"), *more.split(), "--device", "cpu", "--dry-run", "--json"]
        assert cli.run(line) == 0
        assert json.loads(capsys.readouterr().out)["workers"] == count


def test_vit_mini_on_a_cpu_has_one_thread_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads beside another busy process took nine times as long as one."""
    before = torch.get_num_threads()
    for backbone, asked, count in (("vit_mini", "2", 2), ("vit_b16", "", 2), ("vit_mini", "", 1)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if asked:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)
        torch.set_num_threads(2)
        device_of(SimpleNamespace(backbone=backbone, device="cpu"))
        assert torch.get_num_threads() == count
    torch.set_num_threads(before)
