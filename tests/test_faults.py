"""Foreign and damaged files, no memory, a loss that is not finite: each ends in one line."""

import io
import itertools
import os
import pickle
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from toy import PRETRAIN_STEPS, align_line, done, finetune_line, refusal, run, save_by_class

import data
import mae
from support.errors import as_read_error

pytestmark = pytest.mark.usefixtures("elsewhere")


class Payload:
    """What a malicious pickle runs when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def malicious(mark: Path) -> Iterator[bytes]:
    """Files that make `mark` where they are unpickled: torch's new and old ones, a plain pickle."""
    for zipped in (True, False):
        buffer = io.BytesIO()
        torch.save({"model": Payload(mark)}, buffer, _use_new_zipfile_serialization=zipped)
        yield buffer.getvalue()
    yield pickle.dumps(Payload(mark))


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
    whole, rng = (weights / "backbone.pth").read_bytes(), random.Random(0)
    contents = [b"", whole[:1], whole[:-1], whole[: rng.randrange(len(whole))], rng.randbytes(5000)]
    contents += [foreign.getvalue(), *malicious(tmp_path / "mark")]
    line = f"{more.format(weights=weights)} {file} --backbone vit_mini --dataset quilts --out out"
    for content in contents:
        Path(file).write_bytes(content)
        assert file in refusal(line)
        assert not (tmp_path / "mark").exists(), "the payload was run"
        assert not (tmp_path / "out").exists(), "something was written"


@pytest.mark.parametrize(
    ("part", "command"),
    [("pool", "pretrain"), ("pool", "align"), ("train", "finetune"), ("test", "finetune")],
)
def test_a_damaged_image_is_named_before_a_run_begins(
    weights: Path, part: str, command: str
) -> None:
    """So the run can begin without the image."""
    for name in ("train", "val", "test"):
        save_by_class(Path("data", name), torch.rand(8, 3, 20, 20), torch.arange(8) % 2)
    save_by_class(Path("pool"), torch.rand(20, 3, 20, 20), torch.arange(20) % 2)
    bad = Path("pool" if part == "pool" else f"data/{part}", "kind 1/a.jpg")
    Image.effect_noise((40, 48), 50).convert("RGB").save(bad)
    bad.write_bytes(bad.read_bytes()[:900])  # its head is whole
    line = {
        "pretrain": f"pretrain --backbone vit_mini --pool pool {PRETRAIN_STEPS} --quiet",
        "align": align_line(weights.parent, "--dataset folder:data --pool pool"),
        "finetune": finetune_line(weights.parent, "--dataset folder:data"),
    }[command]
    line += " --out r"
    assert f"{bad}: cannot be read" in refusal(line, code=1)
    assert not Path("r").exists()
    bad.unlink()
    done(line)


def test_a_loss_that_is_not_finite_is_named_with_its_place_and_a_remedy(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third pretext step of the run, which is the first of alternation 2."""
    loss, calls = mae.MAE.loss, itertools.count(1)

    def spoilt(self: Any, *args: Any) -> Any:
        value = loss(self, *args)
        return value * float("nan") if next(calls) == 3 else value

    monkeypatch.setattr(mae.MAE, "loss", spoilt)
    said = refusal(align_line(weights.parent, "--out r"), code=1)
    assert "alternation 2, lower level, step 1" in said and "give a lower" in said
    assert not Path("r/adapter.safetensors").exists() and not Path("r/result.json").exists()


def test_want_of_memory_names_what_helps_and_a_defect_keeps_its_traceback(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line is for what a person can mend; anything else must be seen whole."""
    line = align_line(weights.parent, "--out r")
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    monkeypatch.setattr(mae.MAE, "loss", Mock(side_effect=memory))
    said = refusal(line, code=1)
    assert "--micro-batch" in said and "--recompute" in said
    with pytest.raises(torch.OutOfMemoryError), as_read_error("checkpoint.pt", "start over"):
        raise memory  # it is not the file's fault
    monkeypatch.setattr(mae.MAE, "loss", Mock(side_effect=RuntimeError("theta")))
    with pytest.raises(RuntimeError):
        run(line)


def test_a_process_that_decodes_and_ends_is_told_of_in_one_line_and_the_run_goes_on(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the killer of large processes ends it."""
    save_by_class(Path("data"), torch.rand(20, 3, 20, 20), torch.arange(20) % 2)
    line = finetune_line(weights.parent, "--dataset folder:data --workers 1 --out r")
    with monkeypatch.context() as patch:
        patch.setattr(data, "prepare_worker", lambda worker: os.kill(os.getpid(), signal.SIGKILL))
        # torch looks every 5 seconds whether its workers are there
        patch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
        said = refusal(line, code=1)
    assert "DataLoader worker" in said and "--workers 0" in said and "/dev/shm" in said
    done(line)
