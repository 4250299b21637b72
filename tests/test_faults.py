"""Faults of the machine and of the numbers: full disk, folders that cannot be written, no memory, NaN."""

import hashlib
import itertools
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import bisslight
import cli
import finetune
import mae
import mfac
import runtime
from loading import load_backbone
from runtime import Run

ROOT = Path(cli.__file__).parent
ALIGN = "--lower-steps 3 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 0 --eval-every 1 --warmup 1 --quiet"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def align(weights: Path, more: str) -> list[str]:
    return f"align --backbone vit_mini --weights {weights} --dataset quilts {ALIGN} {more}".split()


def one_line(arguments: list[str], capsys: Any) -> tuple[int, str]:
    """Exit code and the one line of a command that fails."""
    code = cli.run(arguments)
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and err.startswith("error: "), err
    return code, err


def outside(arguments: list[str], code: str = "import cli; cli.main()", **options: Any) -> tuple[int, list[str]]:
    """Exit code and stderr's lines of a process of its own."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment, **options)
    return done.returncode, done.stderr.splitlines()


# --- disk ------------------------------------------------------------------------------------------------------------


def digests(run: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.iterdir())}


def stopped(weights: Path, out: str) -> dict[str, str]:
    """An align run with the checkpoint of its first alternation, and its files' digests."""
    with pytest.MonkeyPatch.context() as m:
        save = Run.save

        def last(self: Run, state: dict[str, Any]) -> None:
            save(self, state)
            raise Stopped

        m.setattr(Run, "save", last)
        with pytest.raises(Stopped):
            cli.run(align(weights, f"--alternations 3 --out {out}"))
    return digests(Path(out))


class Stopped(BaseException):
    """Stands for a kill."""


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(weights: Path, capsys: Any) -> None:
    """A limit on the size of files stands for the disk's end; the run goes on once there is room."""
    before = stopped(weights, "r")
    room = Path("r/checkpoint.pt").stat().st_size // 2

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    line = align(weights, "--alternations 3 --out r --resume")
    code, (err,) = outside(line, preexec_fn=limit)
    assert code == 1
    assert err.startswith("error: ")
    assert (
        "r/checkpoint.pt: cannot be written (File too large); make room or allow it, what was there is unchanged" in err
    )
    after = digests(Path("r"))
    assert after["checkpoint.pt"] == before["checkpoint.pt"]
    assert after.keys() == before.keys()  # no temporary file, no result
    assert cli.run(line) == 0
    assert cli.run(align(weights, "--alternations 3 --out whole")) == 0
    assert Path("r/adapter.safetensors").read_bytes() == Path("whole/adapter.safetensors").read_bytes()


def test_a_log_that_cannot_be_written_is_named(weights: Path, capsys: Any) -> None:
    stopped(weights, "r")
    Path("r/train.log").unlink()
    Path("r/train.log").symlink_to("/dev/full")
    code, err = one_line(align(weights, "--alternations 3 --out r --resume"), capsys)
    assert code == 1
    assert "r/train.log: cannot be written (No space left on device); make room, then --resume" in err


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_at_its_end_leaves_no_temporary_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_text("before")

    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    target: Any = os if call == "fsync" else Path
    monkeypatch.setattr(target, call, fails)
    with pytest.raises(cli.RunError, match=r"x: cannot be written \(No space left on device\)"):
        runtime.write_atomic(path, "after")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]


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
    code, err = outside(align(weights, "--alternations 1"), UNPRIVILEGED)
    for path, mode in closed.items():
        path.chmod(mode)
    assert code == 21, err
    assert err[0] == "error: --out shut/r: cannot be made (Permission denied), choose another --out"
    assert err[1].startswith("error: --out shut: cannot be written (Permission denied)")
    assert len(err) == 2


def test_weights_that_may_not_be_read_are_named(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = Path.open

    def denied(self: Path, *args: Any, **options: Any) -> Any:
        if self.name == "backbone.pth":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **options)

    load_backbone.cache_clear()
    monkeypatch.setattr(Path, "open", denied)
    code, err = one_line(align(weights, "--alternations 1 --out r"), capsys)
    assert (code, err) == (
        1,
        f"error: {weights / 'backbone.pth'}: Permission denied; allow this user to read and write it\n",
    )
    assert not Path("r").exists()


def test_a_file_in_place_of_a_directory_is_named(weights: Path, capsys: Any) -> None:
    Path("f").write_text("mine")
    for out, told in (("f", "is a file, give a directory"), ("f/r", "cannot be made (Not a directory)")):
        code, err = one_line(align(weights, f"--alternations 1 --out {out}"), capsys)
        assert code == 2
        assert f"--out {out}: {told}" in err
    assert Path("f").read_text() == "mine"


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out of GPU memory: "),
        (MemoryError(), "out of memory: "),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), "out of memory: "),
    ],
)
@pytest.mark.parametrize("command", ["pretrain", "align", "finetune"])
def test_want_of_memory_names_the_settings_that_help(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, start: str, command: str
) -> None:
    calls = itertools.count(1)

    def fails(once: Any) -> Any:
        """Once, in the first step of training; align has looked at a batch before."""

        def planted(*args: Any, **options: Any) -> Any:
            if next(calls) == (2 if command == "align" else 1):
                raise error
            return once(*args, **options)

        return planted

    if command == "finetune":
        monkeypatch.setattr("finetune.logits", fails(finetune.logits))
        line = f"finetune --backbone vit_mini --weights {weights} --dataset quilts --epochs 1 --seeds 1 --lr 1 --quiet"
    else:
        monkeypatch.setattr(mae.MAE, "loss", fails(mae.MAE.loss))
        line = "pretrain --pool quilts --backbone vit_mini --quiet"
    code, err = one_line(align(weights, "--out r") if command == "align" else line.split(), capsys)
    assert code == 1
    assert err.startswith(f"error: {start}")
    for flag in ("--micro-batch", "--recompute", "--p-batch", "--d-batch", "--batch"):
        assert flag in err
    if command != "pretrain" and isinstance(error, torch.OutOfMemoryError):  # it names a size that would fit
        assert re.search(r"--micro-batch \d+ should need [\d.]+ of [\d.]+ GB$", err.strip())


# --- numbers ---------------------------------------------------------------------------------------------------------


def second(call: Callable[..., Any], spoil: Callable[[Any], Any], saved: list[int], number: int) -> Callable[..., Any]:
    """The function, whose result is spoilt in its call of this number after the first checkpoint."""
    seen = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal seen
        result = call(*args, **options)
        seen += bool(saved)
        return spoil(result) if saved and seen == number else result

    return wrapped


def nan(x: Tensor) -> Tensor:
    return x * float("nan")


def infinite(x: Tensor) -> Tensor:
    return x * float("inf")


def in_block_2(result: tuple[Tensor, Tensor, Any]) -> tuple[Tensor, Tensor, Any]:
    """One entry of one block's gradient."""
    result[1][2, 5] = float("nan")
    return result


def test_numbers_that_are_not_finite_stop_the_run_where_they_arise(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in the second alternation: level, step and block are named, and what is on disk is finite."""
    saved: list[int] = []
    save = Run.save

    def saving(self: Run, state: dict[str, Any]) -> None:
        save(self, state)
        saved.append(state["done"])

    monkeypatch.setattr(Run, "save", saving)
    loss, downstream, gradients, gram = mae.MAE.loss, finetune.downstream_loss, bisslight.gradients, mfac.gram

    def spoilt(spoil: Any, number: int) -> Any:
        return lambda *args: second(downstream(*args), spoil, saved, number)

    for name, target, planted, where in [
        ("lower", (mae.MAE, "loss"), second(loss, nan, saved, 2), "lower level, block 0, step 2"),
        ("infinite", (mae.MAE, "loss"), second(loss, infinite, saved, 1), "lower level, block 0, step 1"),
        # three lower steps, then two passes an upper step: the fourth is θ_D's of step 2
        ("upper", (finetune, "downstream_loss"), spoilt(nan, 4), "upper level, block 0, step 2"),
        ("at P", (finetune, "downstream_loss"), spoilt(infinite, 1), "upper level, block 0, step 1"),
        ("block", (bisslight, "gradients"), second(gradients, in_block_2, saved, 3), "lower level, block 2, step 3"),
        ("system", (mfac, "gram"), second(gram, nan, saved, 4), "hypergradient, block 3"),
    ]:  # fmt: skip
        saved.clear()
        with monkeypatch.context() as m:
            m.setattr(*target, planted)
            code, err = one_line(align(weights, f"--alternations 4 --out {name.replace(' ', '-')}"), capsys)
        out = Path(name.replace(" ", "-"))
        assert code == 1
        assert f"alternation 2, {where}: not finite. Lower --p-lr or --d-lr, or raise --lam" in err, (name, err)
        state = torch.load(out / "checkpoint.pt", weights_only=True)
        assert state["done"] == 1 and saved == [1]
        assert all(tensor.isfinite().all() for tensor in tensors_of(state))
        assert len(tensors_of(state)) > 20
        assert not (out / "result.json").exists() and not (out / "adapter.safetensors").exists()
        steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert steps == [0, 1]


def tensors_of(nest: Any) -> list[Tensor]:
    """All tensors in dicts and lists."""
    if isinstance(nest, Tensor):
        return [nest]
    values = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def test_a_pretraining_loss_that_is_not_finite_names_its_step(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mae.MAE, "loss", second(mae.MAE.loss, nan, [1], 3))
    line = "pretrain --pool quilts --backbone vit_mini --epochs 2 --warmup-epochs 0 --batch 1000 --quiet --out p"
    code, err = one_line(line.split(), capsys)
    assert code == 1
    assert "pretrain step 3: the loss is nan and its gradient's norm nan, try a lower --base-lr" in err
    assert not Path("p/backbone.pth").exists()


# --- what looks harmless ---------------------------------------------------------------------------------------------


def test_a_settings_file_that_would_eat_all_memory_is_refused(weights: Path, capsys: Any) -> None:
    """TOML's nested tables: 800 kB of dots would take more than 20 GB."""
    Path("dots.toml").write_text("a" + ".a" * 400_000 + " = 1")
    code, err = one_line(align(weights, "--config dots.toml --out r"), capsys)
    assert (code, err) == (2, "error: --config dots.toml: has 800005 bytes, settings need 64 kB at most\n")


def test_a_folder_of_images_that_may_not_be_read_is_named(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images would otherwise be missing without a word."""
    for name in ("open", "shut"):
        Path("pool", name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(f"pool/{name}/1.png")
    scandir = os.scandir

    def denied(path: Any = ".") -> Any:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    code, err = one_line(align(weights, "--pool pool --out r"), capsys)
    assert code == 1
    assert "pool/shut: Permission denied; allow this user to read it" in err
