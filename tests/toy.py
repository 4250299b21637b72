"""Toy runs for tests: short settings on drawn images, and ways to start a command line.

Of a flag that a line has twice the last one counts, so a test appends what it wants otherwise.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from typer.testing import CliRunner

import cli
from config import AlignConfig

ROOT = Path(cli.__file__).parent
# the command line of a process of its own, in which the drawn images have their name, too
PROGRAM = [sys.executable, "-c", "import quilts; quilts.register(); import cli; cli.main()"]
PROGRAM_PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"

MAE_RUN = "--backbone vit_mini --dataset few_quilts --weights {weights}"  # a run of `pretrain`
IJEPA_RUN = f"{MAE_RUN} --pretext ijepa"
ALIGN_STEPS = "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8"
ALIGN_STEPS += " --probe-epochs 1 --eval-every 1 --warmup 1"
PEFT_STEPS = "--epochs 2 --batch 40 --warmup-epochs 0 --seeds 1 --lr 1e-2"
PRETRAIN_STEPS = "--epochs 1 --batch 20 --warmup-epochs 0"

ALIGN_SETTINGS: dict[str, Any] = {  # the same for the Python interface
    "alternations": 3, "lower_steps": 2, "upper_steps": 2, "p_batch": 8, "d_batch": 8,
    "probe_epochs": 1, "eval_every": 1, "warmup": 1,
}  # fmt: skip
PEFT_SETTINGS: dict[str, Any] = {
    "epochs": 2, "batch": 40, "warmup_epochs": 0, "seeds": 1, "lr": (1e-2,),
}  # fmt: skip


def align_settings(weights: Path, **more: Any) -> AlignConfig:
    """Settings of the same run; `weights` is a run of `pretrain`."""
    given: dict[str, Any] = {"backbone": "vit_mini", "dataset": "few_quilts", "weights": weights}
    return AlignConfig(**given | {"device": "cpu"} | ALIGN_SETTINGS | more)


def align_line(pretrained: Path, more: str = "", pretext: str = "mae") -> str:
    """An `align` of three alternations; `pretrained` is the fixture of that name."""
    model = f"{MAE_RUN.format(weights=pretrained / pretext)} --pretext {pretext}"
    return f"align {model} {ALIGN_STEPS} --quiet {more}"


def finetune_line(pretrained: Path, more: str = "", pretext: str = "mae") -> str:
    """A `finetune` of two epochs, of one rate and one seed."""
    model = f"{MAE_RUN.format(weights=pretrained / pretext)} --pretext {pretext}"
    return f"finetune {model} {PEFT_STEPS} --quiet {more}"


class Outcome(NamedTuple):
    """What a command line ended with."""

    code: int
    out: str
    err: str


def words_of(line: str) -> list[str]:
    """The words of a command line; NAME=VALUE is a setting without a flag, handed over in a file.

    >>> words_of("align --rank 4")
    ['align', '--rank', '4']
    """
    words = line.split()
    settings = [word for word in words if re.fullmatch(r"\w+=\S+", word)]
    if not settings:
        return words
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write("\n".join(settings))
    return [word for word in words if word not in settings] + ["--config", file.name]


def run(line: str) -> Outcome:
    """A command line in this process; stdout and stderr are caught."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(words_of(line))
    return Outcome(code, out.getvalue(), err.getvalue())


def done(line: str) -> str:
    """Stdout of a command line that must succeed."""
    code, out, err = run(line)
    assert code == 0, err
    return out


def refusal(line: str, code: int = 2) -> str:
    """The one line on stderr of a command line that must end with this exit code."""
    outcome = run(line)
    # What a data set holds is told before: "folder:/photos: 2 classes, ...".
    # The pretrained toys are normalised otherwise than folders, which is told, too.
    told = ("folder:", "own:", "pool:", "normalisation:", "quilts:", "few_quilts:", "omniglot:")
    lines = [said for said in outcome.err.splitlines() if not said.startswith(told)]
    assert (outcome.code, outcome.out) == (code, ""), outcome
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def outside(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own, with nothing of this one's environment."""
    env = {"PYTHONPATH": PROGRAM_PATH, "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    call = [*PROGRAM, *words_of(line)]
    return subprocess.run(call, env=env | environ, capture_output=True, text=True, check=False)


def torchrun(line: str) -> str:
    """Stdout of a command line that two processes of torchrun share; it must succeed."""
    program = Path("program.py")
    program.write_text(PROGRAM[-1])
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    more = {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    call += [str(program), *words_of(line)]
    found = subprocess.run(call, env=os.environ | more, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def call(script: Any, line: str, more: list[str] | None = None) -> str:
    """What a script of experiments/ prints; `more` are settings, NAME=VALUE."""
    app = typer.Typer()
    app.command()(script.main)
    words = line.split()
    for pair in more or []:
        words += ["--set", pair]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def read_records(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def contents(place: Path) -> dict[Path, bytes]:
    """All files below a folder, with what they hold."""
    return {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}


def save_by_class(folder: Path, images: Tensor, targets: Tensor) -> None:
    """Write images (n, 3, H, W) as files into a folder for each class."""
    for number, image in enumerate(images):
        place = folder / f"kind {int(targets[number])}"
        place.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(place / f"{number}.png")


def photos_in(root: Path, names: Iterable[str], seed: int = 0) -> None:
    """An image of its own for each name, such as "train/cat/1.png"."""
    for number, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng([seed, number]).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
