"""Bad input of every kind ends in a correct reading or in one clear line: a share of the cases of `faults`."""

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from faults import MARK, Case, Made, Payload, command, kinds, make_runs, odd_images, outcome, pixels

from config import RunError, UsageError
from data import read_image

EVERY = {  # so manieth case of a kind, to be quick; benchmarks/reliability.py runs all of them and more
    "odd, truncated, foreign and missing images": 1,
    "images with a flipped bit": 2,
    "images that vanish during a run": 1,
    "data check": 1,
    "backbone, adapter, checkpoint: cuts and flips": 3,
    "weights, LoRA files, checkpoints: commands, malicious pickles": 1,
    "run directories with damaged JSON": 4,
    "benchmark lists, nearly right or noise": 2,
    "lists, settings, split files of 100 MB, devices": 1,
    "archives": 1,
    "flags": 9,
    "settings files": 4,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_runs(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("kind", [*EVERY])
def test_bad_input_ends_in_a_reading_or_in_one_line(
    kind: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    every = kinds(tmp_path, random.Random(0), 1, made)
    assert every.keys() == EVERY.keys()
    ends = [outcome(case) for case in itertools.islice(every[kind], 0, None, EVERY[kind])]
    assert [f"{end.name}: {end.line}" for end in ends if end.how == "defect"] == []
    counts = Counter(end.how for end in ends)
    assert counts["refused"] > 0 or kind == "data check"


def test_a_case_that_goes_wrong_is_counted_as_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge itself: a traceback, an empty complaint and a hang are defects, two lines on stderr are too."""
    monkeypatch.setattr("faults.LIMIT", 1)

    def fails() -> None:
        raise KeyError("theta")

    def says_nothing() -> None:
        raise UsageError("")

    def hangs() -> None:
        while True:
            pass

    for wrong in (fails, says_nothing, hangs):
        assert outcome(Case("x", wrong)).how == "defect"
    monkeypatch.setattr("cli.run", lambda arguments: 2)
    with pytest.raises(AssertionError):
        command("align")


def test_a_malicious_pickle_would_leave_its_mark(tmp_path: Path) -> None:
    """The control: loaded by pickle itself, the payload of the cases above makes its file."""
    import pickle

    pickle.loads(pickle.dumps(Payload(tmp_path / MARK)))
    assert (tmp_path / MARK).exists()


def test_clipped_sixteen_bit_grey_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: Pillow's own conversion does not scale."""
    monkeypatch.setattr("data.rgb", lambda image: image.convert("RGB"))
    off = [
        abs(pixels(read_image(path)) - expected).max()
        for path, expected, _ in odd_images(tmp_path, random.Random(0))
        if "sixteen" in path.name
    ]
    assert max(off) > 100


def test_a_file_that_is_gone_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"x\.png: is not there any more; put the image back"):
        read_image(tmp_path / "x.png")
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(RunError, match=r"x\.png: cannot be read as an image \(cannot identify image file\); replace"):
        read_image(tmp_path / "x.png")


def test_a_data_process_that_dies_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import torch
    from faults import VIEW

    from data import Images, Split, batches, in_order

    def dies(*args: Any) -> None:
        os._exit(9)

    monkeypatch.setattr("data.read_image", dies)
    images = Images(Split([tmp_path / "x"], torch.zeros(1, dtype=torch.long)), VIEW, True, 0, "x")
    with pytest.raises(RunError, match="--workers 1: a process that reads images died"):
        list(batches(images, in_order(range(1), 1), 1, torch.device("cpu")))
