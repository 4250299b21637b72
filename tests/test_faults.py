"""Bad input, a full disk, closed folders, no memory: each ends in one clear line."""

import contextlib
import gc
import io
import itertools
import json
import random
import resource
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from faults import ALIGN, Refused, command, damaged, malicious
from PIL import Image
from processes import finish, start

import cli
import mae
import run
from data import read_image

ROOT = Path(cli.__file__).parent


class Made(NamedTuple):
    """Real runs of toy size, to be damaged."""

    weights: Path  # a pretrain run
    aligned: Path  # an align run, finished
    stopped: Path  # an align run with a checkpoint
    direct: Path  # a finetune run


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Made:
    root = tmp_path_factory.mktemp("made")
    made = Made(weights, root / "align", root / "stopped", root / "direct")
    command(*line(weights, f"--out {made.aligned}"))

    def killed(*given: Any) -> Any:
        raise KeyError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.Run, "finish", killed)
        with contextlib.suppress(KeyError):
            command(*line(weights, f"--out {made.stopped}"))
    gc.collect()  # the traceback held the run
    tune = f"finetune --backbone vit_mini --weights {weights} --dataset quilts --epochs 1 --seeds 1"
    command(*tune.split(), *f"--lr 1e-2 --batch 80 --quiet --out {made.direct}".split())
    return made


def line(weights: Path, more: str) -> list[str]:
    """An align run of two alternations."""
    start = f"align --backbone vit_mini --weights {weights} --dataset quilts {ALIGN} {more}"
    return start.split()


# --- bad input --------------------------------------------------------------------------------


def test_images_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Grey, one bit, a palette; transparency is dropped; the first frame of several."""
    a = np.random.default_rng(0).integers(0, 256, (24, 26, 3)).astype(np.uint8)
    grey, rgb = Image.fromarray(a[..., 0], "L"), Image.fromarray(a)
    three, coloured = np.repeat(a[..., :1], 3, -1), grey.copy()
    coloured.putpalette(a.tobytes()[:768])
    images: dict[str, Any] = {
        "rgb.bmp": (rgb, a),
        "grey.tif": (grey, three),
        "bit.png": (Image.fromarray(a[..., 0] > 127), np.where(three > 127, 255, 0)),
        "palette.png": (coloured, a.reshape(-1, 3)[a[..., 0]]),
        "rgba.png": (Image.fromarray(np.dstack([a, a[..., 0]])), a),
    }
    for name, (image, pixels) in images.items():
        image.save(tmp_path / name)
        assert (np.asarray(read_image(tmp_path / name)) == pixels).all(), name
    rgb.save(tmp_path / "two.png", save_all=True, append_images=[Image.fromarray(255 - a)])
    assert (np.asarray(read_image(tmp_path / "two.png")) == a).all()


@pytest.mark.parametrize(
    ("file", "more"),
    [
        ("w.pth", f"align {ALIGN} --weights"),
        ("w.pth.tar", f"align --pretext ijepa {ALIGN} --weights"),
        ("l.pt", "finetune --weights {w} --lr 1 --quiet --from"),
        ("l.safetensors", "finetune --weights {w} --lr 1 --quiet --from"),
    ],
)
def test_a_damaged_foreign_or_malicious_file_is_refused_by_name_and_not_run(
    weights: Path, tmp_path: Path, file: str, more: str
) -> None:
    foreign = io.BytesIO()
    torch.save({"encoder": torch.zeros(3), "model": [torch.zeros(3)]}, foreign)
    contents = damaged((weights / "backbone.pth").read_bytes(), random.Random(0))
    contents |= {"foreign": foreign.getvalue(), **dict(malicious(tmp_path / "mark"))}
    words = [*more.format(w=weights).split(), file, "--backbone", "vit_mini", "--dataset", "quilts"]
    for content in contents.values():
        Path(file).write_bytes(content)
        with pytest.raises(Refused, match=file):
            command(*words, "--out", "out")
        assert not (tmp_path / "mark").exists(), "the payload was run"
        assert not (tmp_path / "out").exists(), "something was written"


# --- disk -------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(made: Made, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's end; with room, the run goes on."""
    checkpoint = made.stopped / "checkpoint.pt"
    before, room = checkpoint.read_bytes(), checkpoint.stat().st_size // 2
    arguments = line(made.weights, f"--out {made.stopped} --save-minutes 0")
    checkpoint.unlink()  # it begins again, and cannot save its first alternation

    def limited() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        return cli.run(arguments)

    assert finish(start(limited, tmp_path / "said")) == 1
    assert "checkpoint.pt: cannot be written (File too large)" in (tmp_path / "said").read_text()
    assert not [path.name for path in made.stopped.iterdir() if path.suffix == ".tmp"]
    checkpoint.write_bytes(before)
    assert cli.run(arguments) == 0
    adapters = [(at / "adapter.safetensors").read_bytes() for at in (made.stopped, made.aligned)]
    assert adapters[0] == adapters[1]


# --- memory and numbers -----------------------------------------------------------------------


def test_want_of_memory_names_the_settings_that_help(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(mae.MAE, "loss", fails)
    with pytest.raises(Refused, match=r"out of memory: a --micro-batch.* --recompute"):
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
    with pytest.raises(Refused, match=r"alternation 2, lower level.*step 1.*; give a lower"):
        command(*line(weights, "--out r"))
    assert "alternation 2" in json.loads(Path("r/result.json").read_text())["diverged"]
    assert not Path("r/adapter.safetensors").exists()


def test_a_defect_keeps_its_traceback(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line is for what a person can mend; anything else must be seen whole."""

    def fails(*args: Any) -> Any:
        raise KeyError("theta")

    monkeypatch.setattr(run.Run, "log", fails)
    with pytest.raises(KeyError):
        cli.run(line(weights, "--out r"))
