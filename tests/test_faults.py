"""Bad input, a full disk, closed folders, no memory: each ends in one clear line."""

import itertools
import os
import pickle
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import (
    ALIGN,
    Case,
    Made,
    Payload,
    Refused,
    command,
    defect,
    entry_cases,
    flag_cases,
    image_cases,
    make_runs,
    run_cases,
    settings_cases,
)

import cli
import mae
import run
from data import ImageError, read_image

ROOT = Path(cli.__file__).parent


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Made:
    return make_runs(tmp_path_factory.mktemp("made"), weights)


def line(weights: Path, more: str) -> list[str]:
    """An align run of two alternations."""
    start = f"align --backbone vit_mini --weights {weights} --dataset quilts {ALIGN} {more}"
    return start.split()


# --- bad input --------------------------------------------------------------------------------

ALL: dict[str, tuple[Callable[..., Iterator[Case]], int]] = {  # and so manieth case, to be quick
    "images": (lambda root, rng, made: image_cases(root, rng), 1),
    "flags": (lambda root, rng, made: flag_cases(root, rng), 8),
    "settings files": (settings_cases, 3),
    "weights and LoRA files": (entry_cases, 1),
    "damaged runs": (run_cases, 3),
}


@pytest.mark.parametrize("kind", [*ALL])
def test_bad_input_ends_in_a_reading_or_in_one_line(kind: str, made: Made, tmp_path: Path) -> None:
    cases, step = ALL[kind]
    found = itertools.islice(cases(tmp_path / "cases", random.Random(0), made), 0, None, step)
    assert [told for case in found if (told := defect(case))] == []


def test_a_case_that_goes_wrong_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge itself: a traceback, an empty complaint, a hang, and two lines on stderr."""
    monkeypatch.setattr("faults.LIMIT", 1)

    def fails() -> None:
        raise KeyError("theta")

    def says_nothing() -> None:
        raise Refused("")

    def hangs() -> None:
        while True:
            pass

    assert all(defect(Case("x", wrong)) for wrong in (fails, says_nothing, hangs))
    assert defect(Case("x", lambda: None)) is None
    monkeypatch.setattr("cli.run", lambda arguments: 2)
    with pytest.raises(AssertionError):
        command("align")


def test_a_malicious_pickle_would_leave_its_mark(tmp_path: Path) -> None:
    """The control: loaded by pickle itself, the payload of the cases above makes its file."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def test_an_image_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"x\.png: cannot be read as an image \(.*No such file"):
        read_image(tmp_path / "x.png")


# --- disk -------------------------------------------------------------------------------------


def outside(
    arguments: list[str], code: str = "import cli; cli.main()", **more: Any
) -> tuple[int, str]:
    """Exit code and stderr of a process of its own."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, env=environment, **more
    )
    return done.returncode, done.stderr


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(made: Made, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's end; with room, the run goes on."""
    checkpoint = made.stopped / "checkpoint.pt"
    before, room = checkpoint.read_bytes(), checkpoint.stat().st_size // 2

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    arguments = line(made.weights, f"--out {made.stopped} --save-minutes 0")
    checkpoint.unlink()  # it begins again, and cannot save its first alternation
    code, err = outside(arguments, preexec_fn=limit)
    assert code == 1
    assert "checkpoint.pt: cannot be written (File too large)" in err
    assert not [path.name for path in made.stopped.iterdir() if path.suffix == ".tmp"]
    checkpoint.write_bytes(before)
    assert cli.run(arguments) == 0
    adapters = [(at / "adapter.safetensors").read_bytes() for at in (made.stopped, made.aligned)]
    assert adapters[0] == adapters[1]


UNPRIVILEGED = """
import os, sys, cli
line = sys.argv[1:]
assert cli.run([*line, "--out", "warm"]) == 0  # all modules are loaded, while they can be read
if os.getuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
sys.exit(10 * cli.run([*line, "--out", "shut/r"]) + cli.run([*line, "--out", "shut"]))
"""


def test_a_folder_that_cannot_be_written_is_named(weights: Path, tmp_path: Path) -> None:
    """As a user to whom the folder does not belong; root may write anywhere."""
    ways = (tmp_path, *tmp_path.parents, *weights.parents)
    closed = {path: path.stat().st_mode for path in ways if path.stat().st_mode & 0o77 == 0}
    for path in closed:
        path.chmod(0o755)
    Path("shut").mkdir()
    Path("shut").chmod(0o555)
    code, err = outside(line(weights, ""), UNPRIVILEGED)
    for path, mode in closed.items():
        path.chmod(mode)
    told = [text for text in err.splitlines() if text.startswith("error: ")]
    assert code in (11, 12, 21, 22), err
    assert len(told) == 2
    assert all("shut" in text and "Permission denied" in text for text in told)
    assert "Traceback" not in err


def test_a_file_in_place_of_a_directory_is_named(weights: Path) -> None:
    Path("f").write_text("mine")
    for out in ("f", "f/r"):
        with pytest.raises(Refused, match=f"--out {out}"):
            command(*line(weights, f"--out {out}"))
    assert Path("f").read_text() == "mine"


# --- memory and numbers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
)
def test_want_of_memory_names_the_settings_that_help(
    weights: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(mae.MAE, "loss", fails)
    with pytest.raises(Refused, match=r"error: out of memory: --micro-batch.* --recompute"):
        command(*line(weights, "--out r"))


def test_a_loss_that_is_not_finite_is_named_with_its_place_and_a_remedy(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third pretext step of the run, which is the first of alternation 2."""
    loss, calls = mae.MAE.loss, itertools.count(1)

    def spoilt(self: Any, *args: Any) -> Any:
        value = loss(self, *args)
        return value * float("nan") if next(calls) == 3 else value

    monkeypatch.setattr(mae.MAE, "loss", spoilt)
    with pytest.raises(Refused, match=r"alternation 2, lower level.*step 1.*; try a lower --p-lr"):
        command(*line(weights, "--out r"))
    assert not Path("r/result.json").exists()
    state = torch.load("r/checkpoint.pt", weights_only=True)
    assert state["done"] == 1
    assert all(tensor.isfinite().all() for tensor in state["tensors"]["theta"].values())


def test_a_defect_keeps_its_traceback(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line is for what a person can mend; anything else must be seen whole."""

    def fails(*args: Any) -> Any:
        raise KeyError("theta")

    monkeypatch.setattr(run.Run, "log", fails)
    with pytest.raises(KeyError):
        cli.run(line(weights, "--out r"))
