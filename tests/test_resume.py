"""The same command goes on to the same bits: stopped or killed at any moment, of any command."""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from child_process import children, finish, gone, start, wait_for
from PIL import Image

import cli
from support import runs as run

SMALL = "--lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --warmup 1 --probe-epochs 2"
ALIGN = f"{SMALL} --alternations 5 --eval-every 3 --save-minutes 0 --quiet"
SAID = Path("said")

pytestmark = pytest.mark.usefixtures("elsewhere")


def term() -> None:
    """Ask this process to stop."""
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    """End this process as the machine's end would."""
    os.kill(os.getpid(), signal.SIGKILL)


vanish = partial(os._exit, 9)


def cut(line: str, end: Callable[[], object], file: str, nth: int = 1, within: bool = False) -> int:
    """Exit code of a command line, in a forked process, where `end` comes as a file is written.

    Args:
        file: its name.
        nth: which of the times that it is written.
        within: before the new one takes the old one's place, not after it.
    """
    count, write = itertools.count(1), run.write_atomic

    def writing(path: Path, content: Any) -> None:
        hit = path.name == file and next(count) == nth
        if hit and within:
            run.os.fsync = lambda fd: end()  # type: ignore[assignment, return-value]
        write(path, content)
        if hit:
            end()

    def program() -> int:
        run.write_atomic = writing
        return cli.run(line.split())

    return finish(start(program, SAID))


def done(line: str) -> None:
    """Let a command line end, in this process."""
    assert cli.run(line.split()) == 0


def same(*files: str) -> bool:
    """Whether the runs `whole` and `cut` have the same files, bit for bit."""
    return all(Path("whole", x).read_bytes() == Path("cut", x).read_bytes() for x in files)


def images(count: int) -> None:
    """A folder `pool` of different images."""
    Path("pool").mkdir()
    for i in range(count):
        pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.byte().numpy()).save(f"pool/{i}.png")


def align(pretrained: Path, pretext: str, hypergrad: str) -> str:
    model = f"--backbone vit_mini --pretext {pretext} --weights {pretrained / pretext}"
    return f"align {model} --dataset quilts {ALIGN} --hypergrad {hypergrad}"


@pytest.mark.parametrize(
    ("pretext", "hypergrad"),
    [("mae", "mfac"), pytest.param("ijepa", "cg", marks=pytest.mark.slow)],
)
def test_align_goes_on_to_the_same_bits(pretrained: Path, pretext: str, hypergrad: str) -> None:
    """Stopped and killed in one run: in the probe, between and in alternations, at the very end."""
    line = align(pretrained, pretext, hypergrad)
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, vanish, "checkpoint.pt") == 9  # after the first of two probing epochs
    assert cut(line, term, "metrics.jsonl", 3) == 143
    assert "stopped after alternation 2 of 5; cut: the same command goes on" in SAID.read_text()
    assert cut(line, vanish, "metrics.jsonl") == 9  # logged, not saved
    assert cut(line, kill, "checkpoint.pt", within=True) == -9
    assert list(Path("cut").glob(".*.tmp"))
    assert cut(line, vanish, "adapter.safetensors", within=True) == 9
    done(line)
    assert same("adapter.safetensors", "metrics.jsonl")
    assert not list(Path("cut").glob(".*.tmp"))


@pytest.mark.slow
def test_killed_at_twenty_moments_of_saving_a_run_goes_on(pretrained: Path) -> None:
    """Each time a checkpoint is there that loads; half of the kills leave a torn file behind."""
    line = align(pretrained, "mae", "mfac").replace("--alternations 5", "--alternations 40")
    done(f"{line} --out whole")
    line, torn = f"{line} --out cut", 0
    assert cut(line, kill, "checkpoint.pt") == -9
    for i in range(20):
        assert cut(line, kill, "checkpoint.pt", 1 + i % 3, within=i % 2 == 0) == -9
        torn += bool(list(Path("cut").glob(".*.tmp")))
        torch.load("cut/checkpoint.pt", weights_only=True)
    assert torn == 10
    done(line)
    assert same("adapter.safetensors", "metrics.jsonl")


@pytest.mark.parametrize("pretext", ["mae", "ijepa"])
def test_pretrain_goes_on_to_the_same_bits(pretext: str) -> None:
    images(30)
    line = f"pretrain --pool pool --backbone vit_mini --pretext {pretext} --batch 12 --quiet"
    line += " --warmup-epochs 0 --epochs 3 --save-minutes 0"
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, term, "metrics.jsonl") == 143
    assert cut(line, kill, "checkpoint.pt", within=True) == -9
    assert cut(line, vanish, "backbone.pth", within=True) == 9
    done(line)
    assert same("metrics.jsonl", "backbone.pth")


GRID = "--epochs 3 --batch 40 --seeds 2 --grid 1e-1,3e-2 --warmup-epochs 1 --save-minutes 0 --quiet"


def same_grid() -> bool:
    a, b = (json.loads(Path(x, "result.json").read_text()) for x in ("whole", "cut"))
    keys = ("test", "test_loss", "val", "epochs", "grid", "lr", "right")
    return [a[k] for k in keys] == [b[k] for k in keys] and same(
        "adapter-s0.safetensors", "adapter-s1.safetensors"
    )


def test_a_grid_goes_on_to_the_same_bits(pretrained: Path) -> None:
    line = f"finetune --backbone vit_mini --weights {pretrained}/mae --head batchnorm"
    line += f" --dataset quilts {GRID}"  # the second rate is best before the stop, and chosen
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, term, "metrics.jsonl", 5) == 143  # the second run's second epoch
    assert "stopped after epoch 2 of 3, lr 0.03 seed 0; cut/lr0.03-s0:" in SAID.read_text()
    assert cut(line, kill, "checkpoint.pt", within=True) == -9
    assert cut(line, vanish, "result.json") == 9
    done(line)
    assert same_grid()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_jobs_stopped_or_killed_with_their_parent_go_on(
    pretrained: Path, number: signal.Signals
) -> None:
    """Of a parent with two runs at work: SIGTERM, they save and stop; kill -9, they end with it."""
    line = f"finetune --backbone vit_mini --weights {pretrained}/mae --dataset quilts"
    grid = GRID.replace("--epochs 3", "--epochs 15").replace("--grid 1e-1,3e-2", "--lr 1e-3")
    line += f" {grid} --jobs"
    done(f"{line} 1 --out whole")
    parent = start(partial(cli.run, f"{line} 2 --out cut".split()), SAID)
    wait_for(lambda: len(list(Path("cut").glob("*/checkpoint.pt"))) == 2, parent)
    workers = children(parent.pid)
    os.kill(parent.pid or 0, number)
    assert (finish(parent), len(workers)) == (143 if number == signal.SIGTERM else -9, 2)
    wait_for(lambda: gone(workers))
    assert ("stopped after epoch" in SAID.read_text()) == (number == signal.SIGTERM)
    assert "Traceback" not in SAID.read_text() and not Path("cut/result.json").exists()
    done(f"{line} 1 --out cut")
    assert same_grid()


def test_a_run_goes_on_with_the_same_settings_weights_and_pool_alone(
    weights: Path, capsys: Any
) -> None:
    """A pool of as many files, one of another name, has another order. Links and copies are taken,
    and so is what says how the machine works. The stop was a SIGHUP.
    """
    images(9)
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {SMALL} --quiet --out a"
    line += " --alternations 3 --eval-every 1 --pool pool"
    assert cut(line, lambda: os.kill(os.getpid(), signal.SIGHUP), "checkpoint.pt") == 129

    def refusal(line: str) -> str:
        capsys.readouterr()
        assert cli.run(line.split()) == 2
        (said,) = capsys.readouterr().err.splitlines()
        return str(said)

    assert "p_lr 0.01 -> 0.1, lam 0.001 -> 0.5; choose" in refusal(f"{line} --lam 0.5 --p-lr 0.1")
    Path("pool/0.png").rename("pool/x.png")
    assert "pool_sha256" in refusal(line)
    Path("pool/x.png").rename("pool/0.png")
    Path("pool").rename("elsewhere")
    Path("pool").symlink_to("elsewhere")
    shutil.copy(weights / "backbone.pth", "moved.pth")
    done(f"{line} --micro-batch 3 --workers 1 --save-minutes 1 --weights moved.pth")
    machines = json.loads(Path("a/env.json").read_text())["machines"]
    assert [machine["micro_batch"] for machine in machines] == [None, 3]
    assert json.loads(Path("a/config.json").read_text())["weights"].endswith("moved.pth")
