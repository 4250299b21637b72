"""Foreign files, damaged images, odd names and closed terminals, seen from the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import cli
from training import one_thread

ROOT = Path(cli.__file__).parent
PEFT = "--epochs 1 --batch 40 --warmup-epochs 0 --lr 1e-2 --quiet"
PRETRAIN = "pretrain --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 2000 --quiet"
ALIGN = "--lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --warmup 0 --probe-epochs 0"


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def finished(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `finetune` run of two seeds on quilts. Tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("files") / "f"
    assert cli.run([*peft(weights, "quilts", out), "--seeds", "2"]) == 0
    return out


def peft(weights: Path, dataset: str, out: Path | str) -> list[str]:
    line = f"finetune --backbone vit_mini --weights {weights} {PEFT}".split()
    return [*line, "--dataset", dataset, "--out", str(out)]


def align(
    weights: Path, dataset: str, out: str, more: str = "--alternations 1 --quiet"
) -> list[str]:
    line = f"align --backbone vit_mini --weights {weights} --pool quilts {ALIGN} {more}"
    return [*line.split(), "--dataset", dataset, "--out", out]


def refusal(arguments: list[str], capsys: Any) -> tuple[int, str]:
    """Exit code and the one line of a command that must not succeed."""
    capsys.readouterr()
    code = cli.run(arguments)
    out, err = capsys.readouterr()
    told = (code, out, err)
    assert code in (1, 2) and not out, told
    assert len(err.splitlines()) == 1 and err.startswith("error: "), told
    return code, err


# --- nothing foreign is overwritten (export: test_export) --------------------------------------


def test_a_picture_replaces_no_file_that_the_program_did_not_make(
    finished: Path, capsys: Any
) -> None:
    """One of the same format, by the same plotting library; the program's own is drawn again."""
    shutil.copytree(finished, "f")
    for suffix, line in (
        ("png", "evaluate f --rollout 2"),
        ("svg", "evaluate f"),
        ("pdf", "evaluate f"),
    ):
        mine = Path(f"mine.{suffix}")
        Figure().savefig(mine)
        before = mine.read_bytes()
        code, err = refusal([*line.split(), "--picture", str(mine)], capsys)
        assert code == 2 and mine.name in err and "choose another" in err
        assert mine.read_bytes() == before
    assert [cli.run(["evaluate", "f", "--picture", "p.svg"]) for _ in range(2)] == [0, 0]
    Path("f/rollout.png").write_text("mine")  # where it goes by default
    assert "rollout.png" in refusal(["evaluate", "f", "--rollout", "2"], capsys)[1]
    assert Path("f/rollout.png").read_text() == "mine"


# --- damaged images ---------------------------------------------------------------------------


def dataset(root: Path) -> str:
    """train/, val/ and test/ of two classes, JPEG files."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3), ("test", 3)):
        for kind in ("dark", "light"):
            (root / part / kind).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (40, 48, 3)) + 127 * (kind == "light")
                Image.fromarray(pixels.astype(np.uint8)).save(root / part / kind / f"{i}.jpg")
    return f"folder:{root}"


def cut(image: Path) -> None:
    """The head says size and mode; the end of the pixels is missing."""
    data = image.read_bytes()
    image.write_bytes(data[: len(data) * 2 // 3])


@pytest.mark.parametrize(
    ("command", "part"), [("align", "val"), ("finetune", "test"), ("finetune", "train")]
)
def test_a_damaged_image_is_named_before_the_first_step_or_when_it_is_drawn(
    weights: Path, command: str, part: str, capsys: Any
) -> None:
    """A training set may hold a million images: the run begins without looking at them. With
    others no run has begun, so the remedy, to remove the image, lets the same command run.
    """
    data = dataset(Path("data"))
    bad = Path("data", part, "light/2.jpg")
    cut(bad)
    line = align(weights, data, "r") if command == "align" else peft(weights, data, "r")
    line += ["--seeds", "1"] if command == "finetune" else []
    code, err = refusal(line, capsys)
    assert code == 1
    assert str(bad) in err and "remove it" in err
    assert Path("r").exists() == (part == "train")
    bad.unlink()
    assert part == "train" or cli.run(line) == 0


# --- names, result files ----------------------------------------------------------------------


# --- runs -------------------------------------------------------------------------------------


def test_an_unfinished_align_run_is_refused_with_a_remedy_that_works(
    weights: Path, capsys: Any
) -> None:
    line = align(weights, "quilts", "a")
    assert cli.run(line) == 0
    Path("a/result.json").unlink()
    Path("a/adapter.safetensors").unlink()
    tune = ["finetune", "--from", "a", *PEFT.split(), "--seeds", "1", "--out", "f"]
    err = refusal(tune, capsys)[1]
    assert "--from" in err and "is not a finished align run" in err
    assert "its own command again" in err
    assert [cli.run(line), cli.run(tune)] == [0, 0]


# --- processes and threads --------------------------------------------------------------------


def test_a_dry_run_tells_how_many_processes_decode_images(weights: Path, capsys: Any) -> None:
    """On a CPU none, unless asked otherwise; none for drawn images."""
    data = dataset(Path("data"))
    for name, more, count in ((data, "", 0), (data, "--workers 3", 3), ("quilts", "", 0)):
        line = [*peft(weights, name, "r"), *more.split(), "--device", "cpu", "--dry-run", "--json"]
        assert cli.run(line) == 0
        assert json.loads(capsys.readouterr().out)["workers"] == count


def test_vit_mini_on_a_cpu_has_one_thread_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads beside another busy process took nine times as long as one."""
    before, cpu = torch.get_num_threads(), torch.device("cpu")
    for backbone, asked, count in (("vit_mini", "2", 2), ("vit_b16", "", 2), ("vit_mini", "", 1)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if asked:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)
        torch.set_num_threads(2)
        one_thread(backbone, cpu)
        assert torch.get_num_threads() == count
    torch.set_num_threads(before)
