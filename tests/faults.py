"""Bad input of all kinds, for tests: odd words, damaged files, files that run something."""

import contextlib
import io
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import cli

ALIGN = (
    "--alternations 2 --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 0 "
    "--eval-every 1 --warmup 0 --quiet"
)
WORDS = [
    "", " ", "-1", "0", "1", "7", "-0.5", "0.5", "1e-3", "1e400", "-inf", "inf", "nan", "9" * 400,
    "true", "None", "auto", "mae", "ijepa", "quilts", "imagenet", "cub200", "folder:", "folder:.",
    "crop", "layer", "cpu", "cuda:9", "meta", "..", "/dev/null", ".", "~nobody", "0.1,0.2",
    "0.2,0.1", ",", "1,2,3", "1e-3,1e-3", "ⅷ", "\u202e", "a\nb", "x" * 500, "vit_mini", "vit_b16",
    "timm:", "timm:resnet18", "--", "[1]", "{}", "0x10", "1_000", "+3", "own:1", "a.py:B",
]  # fmt: skip


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
