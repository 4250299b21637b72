"""What a person sees: a closed terminal, pages for others, messages that work as told.

Signals, bars and `data check` are in test_cli, test_resume and test_benchmarks.
"""

import contextlib
import fcntl
import io
import json
import os
import pty
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
    err = refusal([*align(weights, "a", 1), "--device", "gpu"], capsys)[1]
    assert "--device gpu" in err and "auto" in err and "cuda" in err
