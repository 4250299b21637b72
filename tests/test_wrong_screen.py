"""What a person sees: a closed terminal, progress, remarks, messages that work as told.

Signals, bars and `data check` are in test_cli, test_resume and test_benchmarks.
"""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from test_resume import cut, term
from test_wrong_files import PEFT, ROOT, dataset, refusal

import cli

SIZES = "--lower-steps 4 --upper-steps 2 --p-batch 8 --d-batch 8 --warmup 1 --device cpu"
RARE = "--probe-epochs 0 --eval-every 1000"  # no checkpoint but that of a stop


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def align(weights: Path, out: str, alternations: int, more: str = RARE) -> list[str]:
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {SIZES} {more}"
    return [*line.split(), "--out", out, "--alternations", str(alternations)]


def records(run: str) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    file = Path(run, "metrics.jsonl")
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def shown(line: str | list[str]) -> str:
    """All that a command that ends well writes to stdout and stderr."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        assert cli.run(line.split() if isinstance(line, str) else line) == 0, told.getvalue()
    return told.getvalue()


# --- stops ------------------------------------------------------------------------------------


def test_a_terminal_that_is_closed_ends_a_run_like_a_termination(weights: Path) -> None:
    """Its progress bar has nowhere to go, and the signal comes at the same time."""
    ours, theirs = pty.openpty()

    def controlling() -> (
        None
    ):  # a closed terminal sends SIGHUP to those whose controlling one it is
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    words = [sys.executable, "-m", "cli", *align(weights, "a", 100)]
    streams: Any = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": env}
    with subprocess.Popen(words, start_new_session=True, preexec_fn=controlling, **streams) as p:
        os.close(theirs)
        until = time.monotonic() + 120
        while not any(record["step"] == 3 for record in records("a")):
            assert p.poll() is None and time.monotonic() < until
            if select.select([ours], [], [], 0.02)[0]:
                os.read(ours, 65536)
        os.close(ours)
        assert p.wait(60) == 128 + signal.SIGHUP
    assert Path("a/checkpoint.pt").exists()  # test_resume goes on from such a one
    assert not Path("a/result.json").exists()


# --- progress and remarks ---------------------------------------------------------------------


def test_progress_shows_the_mean_loss_of_a_level_and_the_probes_accuracy(weights: Path) -> None:
    """The last batch's loss is noise."""
    told = shown(align(weights, "a", 4, "--probe-epochs 2 --eval-every 10")).splitlines()
    first, *alternations = records("a")
    for record in alternations:
        (line,) = (x for x in told if x.startswith("align") and f"{record['step']}/4" in x)
        losses = record["loss_P"]
        mean, last = sum(losses) / len(losses), losses[-1]
        assert f"{mean:.4f}"[:5] != f"{last:.4f}"[:5]  # or the test could not tell
        assert f"{mean:.4f}"[:5] in line
    probed = f"{first['probe_val']['accuracy']:.1f}"
    assert any("probe" in line and probed in line for line in told)


@pytest.mark.slow
def test_pretraining_reports_within_an_epoch() -> None:
    """4000 images make 571 steps of 7."""
    line = "pretrain --backbone vit_mini --pool quilts --epochs 1 --warmup-epochs 0 --batch 7"
    told = shown(f"{line} --out p --device cpu").splitlines()
    lines = [line for line in told if line.startswith("pretrain")]
    assert len(lines) >= 2
    assert all(re.search(r"loss \d+\.\d", line) for line in lines)


@pytest.mark.slow
def test_a_best_rate_at_the_edge_of_its_grid_gets_a_remark(weights: Path) -> None:
    """The rates are so small that the largest is the best; in the middle of a grid it gets none."""
    line = (
        f"finetune --backbone vit_mini --weights {weights} --dataset quilts --epochs 8 --batch 40"
    )
    said = {}
    for name, grid in (("edge", "1e-6,1e-5,1e-2"), ("middle", "1e-6,1e-2,1e3")):
        told = shown(f"{line} --warmup-epochs 1 --seeds 1 --grid {grid} --out {name}")
        assert json.loads(Path(name, "result.json").read_text())["lr"] == 1e-2
        said[name] = [x for x in told.splitlines() if re.search(r"\bedge\b.*grid", x)]
    assert said["edge"] and "0.01" in said["edge"][0] and "--grid" in said["edge"][0]
    assert not said["middle"]


def test_a_report_holds_no_absolute_path_of_its_runs(weights: Path, tmp_path: Path) -> None:
    """A page is for others; where its maker keeps files is not."""
    data = dataset(tmp_path / "data")
    line = f"finetune --backbone vit_mini --weights {weights} --dataset {data} {PEFT} --seeds 2"
    shown(f"{line} --out f")
    shown([*align(weights, "a", 1), "--quiet"])
    shown("report f a")
    page = Path("report.html").read_text()
    assert str(tmp_path) not in page
    assert str(weights.parent) not in page


# --- messages ---------------------------------------------------------------------------------


def test_an_unfinished_align_run_is_refused_with_a_remedy_that_works(
    weights: Path, capsys: Any
) -> None:
    """`align --resume --out DIR` lacked every setting."""
    line = [*align(weights, "a", 30), "--quiet"]
    assert cut(" ".join(line), term, "metrics.jsonl", 3) == 143
    tune = f"finetune --from a {PEFT} --seeds 1 --out f"
    err = refusal(tune.split(), capsys)[1]
    assert "--from" in err and "is not a finished align run" in err
    assert "--resume" not in err and "its own command again" in err
    shown(line)
    shown(tune)


def test_a_device_of_another_name_is_refused_with_the_names_there_are(
    weights: Path, capsys: Any
) -> None:
    """`gpu` is not a device that is missing here, it is none of torch's."""
    for name in ("gpu", "cdua"):
        err = refusal([*align(weights, "a", 1), "--device", name], capsys)[1]
        assert f"--device {name}" in err
        assert "auto" in err and "cpu" in err and "cuda" in err
        assert "on this machine" not in err


def test_a_bench_without_settings_is_small_on_a_cpu() -> None:
    assert json.loads(shown("bench --device cpu --dry-run --json"))["backbone"] == "vit_mini"
