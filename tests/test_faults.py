"""Foreign and damaged files, a full disk, no memory: each ends in one clear line."""

import contextlib
import io
import itertools
import json
import pickle
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from child_process import finish, start
from PIL import Image

import cli
import mae
from data import read_image
from support import runs as run
from support.errors import checking

pytestmark = pytest.mark.usefixtures("elsewhere")
PEFT = "--epochs 1 --batch 40 --warmup-epochs 0 --seeds 1 --lr 1e-2 --quiet"
ALIGN = (
    "--alternations 2 --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 0 "
    "--eval-every 1 --warmup 0 --quiet"
)


class Refused(Exception):
    """A command ended with exit code 1 or 2 and this one line."""


def command(*arguments: str) -> str:
    """Run a command line: its stdout, or Refused with the line on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([*arguments])
    if code == 0:
        return out.getvalue()
    lines = [line for line in err.getvalue().splitlines() if "not shorter than" not in line]
    assert code in (1, 2) and len(lines) == 1 and lines[0].startswith("error: "), (code, lines)
    assert not out.getvalue()
    raise Refused(lines[0])


def damaged(data: bytes, rng: random.Random) -> dict[str, bytes]:
    """Nothing, one byte, noise, an end that is missing, a cut at random."""
    cut = data[: rng.randrange(len(data))]
    some = {"empty": b"", "one byte": data[:1], "end missing": data[:-1], "cut": cut}
    return some | {"noise": rng.randbytes(5000)}


class Payload:
    """What a malicious pickle runs when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def malicious(mark: Path) -> Iterator[tuple[str, bytes]]:
    """Files that make `mark` where they are unpickled."""
    for name, zipped in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        torch.save({"model": Payload(mark)}, buffer, _use_new_zipfile_serialization=zipped)
        yield f"malicious {name}", buffer.getvalue()
    yield "malicious pickle", pickle.dumps(Payload(mark))


def align(weights: Path, more: str) -> list[str]:
    """A run of two alternations."""
    start = f"align --backbone vit_mini --weights {weights} --pool quilts {ALIGN}"
    return f"{start} --dataset quilts {more}".split()


def peft(weights: Path, dataset: str, out: Path | str) -> list[str]:
    line = f"finetune --backbone vit_mini --weights {weights} {PEFT}".split()
    return [*line, "--dataset", dataset, "--out", str(out)]


def test_images_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Grey, a palette, one bit; transparency is dropped; the first frame of several."""
    a = np.random.default_rng(0).integers(0, 256, (24, 26, 3)).astype(np.uint8)
    grey, rgb = Image.fromarray(a[..., 0], "L"), Image.fromarray(a)
    images: dict[str, Any] = {
        "rgb.bmp": (rgb, a),
        "grey.tif": (grey, np.repeat(a[..., :1], 3, -1)),
        "palette.png": (grey.convert("P"), np.repeat(a[..., :1], 3, -1)),
        "bit.png": (grey.point(lambda x: 255 * (x > 127), "1"), 255 * (a[..., [0, 0, 0]] > 127)),
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


@pytest.mark.parametrize("part", ["test", "train"])
def test_a_damaged_image_is_named_before_the_first_step_or_when_it_is_drawn(
    weights: Path, part: str
) -> None:
    """Of others than training images no run has begun, so it can begin without the image."""
    images = [Path("data", p, kind, f"{i}.jpg") for p in ("train", "val", "test")
              for kind in ("dark", "light") for i in range(4)]  # fmt: skip
    for image in images:
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 48), 50).convert("RGB").save(image)
    bad = Path("data", part, "light/2.jpg")
    bad.write_bytes(bad.read_bytes()[:900])  # its head is whole
    with pytest.raises(Refused, match=f"{bad}.*remove it"):
        command(*peft(weights, "folder:data", "r"))
    assert Path("r").exists() == (part == "train")
    bad.unlink()
    assert part == "train" or cli.run(peft(weights, "folder:data", "r")) == 0


def test_an_unfinished_align_run_is_refused_with_a_remedy_that_works(weights: Path) -> None:
    line = align(weights, "--out a")
    assert cli.run(line) == 0
    Path("a/result.json").unlink()
    Path("a/adapter.safetensors").unlink()
    tune = ["finetune", "--from", "a", *PEFT.split(), "--out", "f"]
    with pytest.raises(Refused, match=r"--from .* is not a finished align run.*its own command"):
        command(*tune)
    assert [cli.run(line), cli.run(tune)] == [0, 0]


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands for the disk's end; with room, the run goes on."""
    whole, line = align(weights, "--out whole"), align(weights, "--out cut --save-minutes 0")

    def limited() -> int:
        """All is written until the second alternation's checkpoint."""
        write, count = run.write_atomic, itertools.count(1)

        def writing(path: Path, content: Any) -> None:
            if path.name == "checkpoint.pt" and next(count) == 2:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2,) * 2)
            write(path, content)

        run.write_atomic = writing
        return cli.run(line)

    assert finish(start(limited, tmp_path / "said")) == 1
    assert "checkpoint.pt: cannot be written (File too large)" in (tmp_path / "said").read_text()
    assert not list(Path("cut").glob(".*.tmp"))
    assert torch.load("cut/checkpoint.pt", weights_only=True)
    assert [cli.run(whole), cli.run(line)] == [0, 0]
    adapters = [Path(at, "adapter.safetensors").read_bytes() for at in ("whole", "cut")]
    assert adapters[0] == adapters[1]


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
        command(*align(weights, "--out r"))
    assert "alternation 2" in json.loads(Path("r/result.json").read_text())["diverged"]
    assert not Path("r/adapter.safetensors").exists()


def test_want_of_memory_names_what_helps_and_a_defect_keeps_its_traceback(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line is for what a person can mend; anything else must be seen whole."""

    def fails(error: Exception) -> Any:
        raise error

    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    monkeypatch.setattr(mae.MAE, "loss", lambda *_: fails(memory))
    with pytest.raises(Refused, match=r"out of memory: a --micro-batch.* --recompute"):
        command(*align(weights, "--out r"))
    with pytest.raises(torch.OutOfMemoryError), checking("checkpoint.pt", "start over"):
        fails(memory)  # it is not the file's fault
    monkeypatch.setattr(mae.MAE, "loss", lambda *_: fails(KeyError("theta")))
    with pytest.raises(KeyError):
        cli.run(align(weights, "--out r"))
