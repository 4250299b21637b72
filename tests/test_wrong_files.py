"""Foreign files, damaged images, odd names and closed streams, seen from the command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cli
from runtime import default_workers

ROOT = Path(cli.__file__).parent
PEFT = "--epochs 1 --batch 40 --warmup-epochs 0 --lr 1e-2 --quiet"
PRETRAIN = "pretrain --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 2000 --quiet"
ALIGN = "--alternations 1 --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 0 --warmup 0 --quiet"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `finetune` run of two seeds on quilts. Tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("files") / "f"
    assert cli.run([*peft(weights, "quilts", out), "--seeds", "2"]) == 0
    return out


def peft(weights: Path, dataset: str, out: Path | str) -> list[str]:
    line = f"finetune --backbone vit_mini --weights {weights} {PEFT}".split()
    return [*line, "--dataset", dataset, "--out", str(out)]


def align(weights: Path, dataset: str, out: str) -> list[str]:
    line = f"align --backbone vit_mini --weights {weights} --pool quilts {ALIGN}".split()
    return [*line, "--dataset", dataset, "--out", out]


def refusal(arguments: list[str], capsys: Any) -> tuple[int, str]:
    """Exit code and the one line of a command that must not succeed."""
    code = cli.run(arguments)
    out, err = capsys.readouterr()
    assert code in (1, 2) and not out and len(err.splitlines()) == 1 and err.startswith("error: "), (code, out, err)
    return code, err


def program(arguments: list[Any], shell: str = "", **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """The command in a process of its own; `shell` holds redirections."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONIOENCODING")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    env = {name: value for name, value in env.items() if value}
    line = [sys.executable, "-m", "cli", *arguments]
    if shell:
        line = ["sh", "-c", f'exec "$@" {shell}', "sh", *line]
    return subprocess.run(line, capture_output=True, check=False, env=env, timeout=120)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- nothing foreign is overwritten ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "peft/adapter_config.json", "timm/model.safetensors"])
def test_export_replaces_no_file_that_it_did_not_make(finished: Path, name: str, capsys: Any) -> None:
    mine = Path("mine", name)
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    code, err = refusal(["export", str(finished), "--out", "mine"], capsys)
    assert code == 2
    assert "--out" in err and name in err  # the thing
    assert "choose another" in err  # the remedy
    assert tree(Path("mine")) == {name: b"mine"}


def test_export_may_be_repeated_into_its_own_folder(finished: Path) -> None:
    assert cli.run(["export", str(finished), "--out", "e", "--no-merged"]) == 0
    assert cli.run(["export", str(finished), "--out", "e", "--seed", "1"]) == 0
    assert cli.run(["export", str(finished), "--out", "other", "--seed", "1"]) == 0
    assert tree(Path("e")) == tree(Path("other"))


def pictures(run: Path) -> list[list[str]]:
    return [
        ["evaluate", str(run)],
        ["evaluate", str(run), "--rollout", "2"],
        ["evaluate", str(run), "--similarity", "--limit", "8"],
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_replaces_no_file_that_the_program_did_not_make(
    finished: Path, which: int, suffix: str, capsys: Any
) -> None:
    """The foreign picture is of the same format, and by the same plotting library."""
    from matplotlib.figure import Figure

    mine = Path(f"mine.{suffix}")
    Figure().savefig(mine)
    before = mine.read_bytes()
    code, err = refusal([*pictures(finished)[which], "--picture", str(mine)], capsys)
    assert code == 2
    assert mine.name in err and "choose another" in err
    assert mine.read_bytes() == before


def test_the_default_picture_replaces_no_file_that_the_program_did_not_make(finished: Path, capsys: Any) -> None:
    shutil.copytree(finished, "f")
    for name, line in zip(("rollout.png", "similarity.png"), pictures(Path("f"))[1:], strict=True):
        Path("f", name).write_text("mine")
        assert name in refusal(line, capsys)[1]
        assert Path("f", name).read_text() == "mine"


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_programs_own_pictures_are_drawn_again(finished: Path, suffix: str, capsys: Any) -> None:
    for line in pictures(finished):
        assert cli.run([*line, "--picture", f"p.{suffix}"]) == 0


# --- damaged images --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("part", ["val", "test"])
@pytest.mark.parametrize("command", ["align", "finetune"])
def test_a_damaged_validation_or_test_image_is_named_before_the_first_step(
    weights: Path, command: str, part: str, capsys: Any
) -> None:
    """No run has begun, so the remedy, to remove the image, does not make the command refuse to go on."""
    data = dataset(Path("data"))
    bad = Path("data", part, "light/2.jpg")
    cut(bad)
    line = align(weights, data, "r") if command == "align" else [*peft(weights, data, "r"), "--seeds", "1"]
    code, err = refusal(line, capsys)
    assert code == 1
    assert str(bad) in err and "remove it" in err
    assert not Path("r").exists()
    bad.unlink()
    assert cli.run(line) == 0


def test_a_damaged_training_image_is_named_when_it_is_drawn(weights: Path, capsys: Any) -> None:
    """A training set or pool may hold a million images: the run begins without looking at them."""
    data = dataset(Path("data"))
    cut(Path("data/train/light/2.jpg"))
    code, err = refusal([*peft(weights, data, "r"), "--seeds", "1"], capsys)
    assert code == 1
    assert "data/train/light/2.jpg" in err
    assert Path("r/config.json").exists()


# --- names, streams, result files ------------------------------------------------------------------------------------


def test_a_name_that_is_not_utf_8_is_refused_in_one_line(weights: Path) -> None:
    """As a class, an image, an image of the pool, an argument, and the folder that one is in."""
    latin = os.fsdecode(b"caf\xe9")
    dataset(Path("class"))
    for part in ("train", "val", "test"):
        Path("class", part, "dark").rename(Path("class", part, latin))
    dataset(Path("image"))
    Path("image/train/dark/0.jpg").rename(Path("image/train/dark", f"{latin}.jpg"))
    Path(latin).mkdir()
    for case, line in {
        "class": [*peft(weights, "folder:class", "r"), "--seeds", "1"],
        "image": [*peft(weights, "folder:image", "r"), "--seeds", "1"],
        "pool": [*PRETRAIN.split(), "--pool", "image", "--out", "r"],
        "check": ["data", "check", "folder:image"],
        "out": [*peft(weights, "quilts", latin), "--seeds", "1"],
        "dataset": [*peft(weights, f"folder:{latin}", "r"), "--seeds", "1"],
        "evaluate": ["evaluate", latin],
    }.items():
        done = program(line)
        err = done.stderr.decode()  # what is printed is UTF-8 again
        assert done.returncode in (1, 2) and len(err.splitlines()) == 1 and err.startswith("error: "), (case, err)
        assert "caf" in err and "UTF-8" in err and "rename" in err, (case, err)
        assert not Path("r").exists()


def test_a_working_folder_that_is_not_utf_8_is_refused_in_one_line(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / os.fsdecode(b"caf\xe9")
    here.mkdir()
    monkeypatch.chdir(here)
    done = program([*peft(weights, "quilts", "r"), "--seeds", "1"])
    err = done.stderr.decode()
    assert done.returncode in (1, 2) and len(err.splitlines()) == 1 and err.startswith("error: "), err
    assert "caf" in err and "UTF-8" in err and "rename" in err


@pytest.mark.parametrize("shell", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stdout_ends_no_command(weights: Path, shell: str) -> None:
    done = program(["data", "list"], shell)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    done = program([*peft(weights, "quilts", "r"), "--seeds", "1"], shell)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert Path("r/result.json").exists()


@pytest.mark.parametrize("arguments", ["data list", "data list --json", "align --help"])
def test_results_that_nobody_reads_are_dropped_without_a_traceback(arguments: str) -> None:
    """`bisslight ... | true`"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "cli", *arguments.split()]
    p = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert p.stdout is not None and p.stderr is not None
    p.stdout.close()
    assert p.stderr.read() == b""
    p.stderr.close()
    assert p.wait() in (0, 1)


def test_an_ascii_terminal_gets_every_result(finished: Path, weights: Path) -> None:
    for line in (
        [*peft(weights, "quilts", "r"), "--seeds", "2"],
        ["evaluate", str(finished), "--against", "r"],
        [*align(weights, "quilts", "a"), "--dry-run"],
        ["align", "--help"],
        ["sweep", "--help"],
    ):
        done = program(line, PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, b""), (line, done.stderr.decode())
        assert done.stdout.strip()


def test_a_result_without_test_accuracies_is_refused_in_one_line(finished: Path, capsys: Any) -> None:
    shutil.copytree(finished, "f")
    result = json.loads(Path("f/result.json").read_text())
    Path("f/result.json").write_text(json.dumps(result | {"test": []}))
    for line in (
        ["evaluate", "f"],
        ["evaluate", str(finished), "--against", "f"],
        ["export", "f", "--out", "e"],
        ["report", "f", "--rollout", "0"],
    ):
        code, err = refusal(line, capsys)
        assert code == 2
        assert "f/result.json" in err or "f: " in err
        assert "again" in err
    assert not Path("e").exists() and not Path("report.html").exists()


# --- processes and threads -------------------------------------------------------------------------------------------


def settings(line: list[str], capsys: Any) -> dict[str, Any]:
    """What --dry-run says of each setting."""
    assert cli.run([*line, "--dry-run", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)["settings"]
    return told


def test_beside_a_gpu_images_are_decoded_by_up_to_16_processes() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [default_workers(gpu, cores) for cores in (1, 8, 16, 96)] == [1, 8, 16, 16]
    assert default_workers(cpu, 96) == 0


def test_a_dry_run_tells_how_many_processes_decode_images(weights: Path, capsys: Any) -> None:
    """On a CPU none; beside a GPU, where this machine has one, those that the cores allow; none for drawn images."""
    data = dataset(Path("data"))
    line = [*peft(weights, data, "r"), "--seeds", "1"]
    assert settings([*line, "--device", "cpu"], capsys)["workers"]["value"] == 0
    assert settings([*line, "--device", "cpu", "--workers", "3"], capsys)["workers"]["value"] == 3
    if torch.cuda.is_available():
        assert 1 <= settings(line, capsys)["workers"]["value"] <= min(16, os.cpu_count() or 1)
        assert settings(peft(weights, "quilts", "r"), capsys)["workers"]["value"] == 0


def test_a_run_is_the_same_with_any_number_of_workers(weights: Path) -> None:
    data = dataset(Path("data"))
    adapters = set()
    for workers in (None, 0, 1, 2):
        more = [] if workers is None else ["--workers", str(workers)]
        assert cli.run([*peft(weights, data, f"r{workers}"), "--seeds", "1", *more]) == 0
        adapters.add(Path(f"r{workers}/adapter-s0.safetensors").read_bytes())
    assert len(adapters) == 1


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread anyway")
@pytest.mark.parametrize("asked", ["", "2"])
def test_vit_mini_on_a_cpu_has_one_thread_unless_asked_otherwise(weights: Path, asked: str) -> None:
    """Two threads beside another busy process took nine times as long as one."""
    lines = [[*peft(weights, "quilts", "r0"), "--seeds", "1"]]
    if not asked:
        lines += [align(weights, "quilts", "r1"), [*PRETRAIN.split(), "--pool", "quilts", "--out", "r2"]]
    for i, line in enumerate(lines):
        done = program([*line, "--device", "cpu"], OMP_NUM_THREADS=asked)
        assert done.returncode == 0, done.stderr.decode()
        assert json.loads(Path(f"r{i}/env.json").read_text())["threads"] == int(asked or 1)
