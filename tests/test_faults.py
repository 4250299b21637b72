"""Foreign and damaged files, no memory, a loss that is not finite: each ends in one line."""

import io
import itertools
import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy import ALIGN_STEPS, MAE_RUN, PEFT_STEPS, done, refusal, run

import mae
from data import read_image
from support.errors import UsageError, as_read_error

pytestmark = pytest.mark.usefixtures("elsewhere")


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


ALIGN = f"align {MAE_RUN} {ALIGN_STEPS} --quiet --out r"
TUNE = f"finetune --backbone vit_mini --weights {{weights}} {PEFT_STEPS} --quiet --out r"


def test_an_error_that_says_what_to_do_stays_as_it_is_where_a_file_is_read() -> None:
    with pytest.raises(UsageError, match=r"^as it is$"), as_read_error("a", "mend it"):
        raise UsageError("as it is")


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
        ("w.pth", "align --weights"),
        ("w.pth.tar", "align --pretext ijepa --weights"),
        ("l.pt", "finetune --weights {weights} --lr 1 --from"),
        ("l.safetensors", "finetune --weights {weights} --lr 1 --from"),
    ],
)
def test_a_damaged_foreign_or_malicious_file_is_refused_by_name_and_not_run(
    weights: Path, tmp_path: Path, file: str, more: str
) -> None:
    foreign = io.BytesIO()
    torch.save({"encoder": torch.zeros(3), "model": [torch.zeros(3)]}, foreign)
    contents = damaged((weights / "backbone.pth").read_bytes(), random.Random(0))
    contents |= {"foreign": foreign.getvalue(), **dict(malicious(tmp_path / "mark"))}
    line = f"{more.format(weights=weights)} {file} --backbone vit_mini --dataset quilts --out out"
    for content in contents.values():
        Path(file).write_bytes(content)
        assert file in refusal(line)
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
    line = TUNE.format(weights=weights) + " --dataset folder:data"
    said = refusal(line, code=1)
    assert str(bad) in said and "data check" in said
    assert Path("r").exists() == (part == "train")
    bad.unlink()
    if part == "test":
        done(line)
    else:  # the run knows its images by name: replaced it goes on, removed it is another run
        assert "--dataset" in refusal(line)
        Image.effect_noise((40, 48), 50).convert("RGB").save(bad)
        done(line)


def test_an_unfinished_align_run_is_refused_with_a_remedy_that_works(weights: Path) -> None:
    line = ALIGN.format(weights=weights)
    done(line)
    Path("r/result.json").unlink()
    Path("r/adapter.safetensors").unlink()
    tune = f"finetune --from r {PEFT_STEPS} --quiet --out f"
    assert "--from" in refusal(tune)
    done(line)
    done(tune)


def test_a_loss_that_is_not_finite_is_named_with_its_place_and_a_remedy(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third pretext step of the run, which is the first of alternation 2."""
    loss, calls = mae.MAE.loss, itertools.count(1)

    def spoilt(self: Any, *args: Any) -> Any:
        value = loss(self, *args)
        return value * float("nan") if next(calls) == 3 else value

    monkeypatch.setattr(mae.MAE, "loss", spoilt)
    said = refusal(ALIGN.format(weights=weights), code=1)
    assert "alternation 2, lower level, step 1" in said and "give a lower" in said
    assert "alternation 2" in json.loads(Path("r/result.json").read_text())["diverged"]
    assert not Path("r/adapter.safetensors").exists()


def test_want_of_memory_names_what_helps_and_a_defect_keeps_its_traceback(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line is for what a person can mend; anything else must be seen whole."""

    def fails(error: Exception) -> Any:
        raise error

    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    for want in (lambda *_: fails(memory), lambda *_: fails(MemoryError()), ask_for_much_memory):
        monkeypatch.setattr(mae.MAE, "loss", want)
        said = refusal(ALIGN.format(weights=weights), code=1)
        assert "--micro-batch" in said and "--recompute" in said
    with pytest.raises(torch.OutOfMemoryError), as_read_error("checkpoint.pt", "start over"):
        fails(memory)  # it is not the file's fault
    for defect in (KeyError("theta"), RuntimeError("theta")):
        monkeypatch.setattr(mae.MAE, "loss", lambda *_, error=defect: fails(error))
        with pytest.raises(type(defect)):
            run(ALIGN.format(weights=weights))


def ask_for_much_memory(*_: Any) -> Any:
    """More bytes than any machine has, of the CPU."""
    return torch.zeros(2**58)
