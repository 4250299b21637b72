"""Numbers that were wrong once: splits that leak, arms that are compared, tasks of one's own.

From outside: command lines, files, printed words. The p-value itself is in test_evaluate.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from test_resume import cut, term

import cli

ROOT = Path(cli.__file__).parent
SHORT = "--alternations 1 --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 1"
SHORT += " --quiet"
PEFT = "--epochs 1 --warmup-epochs 0 --batch 40 --seeds 2 --lr 1e-2"


def run(line: str, capsys: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line."""
    capsys.readouterr()
    code = cli.run(line.split())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def done(line: str) -> None:
    assert cli.run(line.split()) == 0


def read(path: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def pictures(root: Path, classes: str, count: int, shift: int = 0) -> None:
    """Class folders of plain 16-pixel images."""
    for k, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            colour = (40 * k, 9 * i + shift, 100)
            Image.new("RGB", (16, 16), colour).save(root / name / f"{i + shift}.png")


@pytest.fixture(scope="module")
def base(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short align run on quilts, `align`, and PEFT from it, `tuned`."""
    at = tmp_path_factory.mktemp("base")
    done(f"align --backbone vit_mini --weights {weights} {SHORT} --dataset quilts --out {at}/align")
    done(f"finetune --from {at}/align {PEFT} --quiet --out {at}/tuned")
    return at


@pytest.fixture
def folder(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run `align` on a folder of images, and that folder, `images`, where one works."""
    monkeypatch.chdir(tmp_path)
    pictures(Path("images"), "xyz", 15)
    line = f"align --backbone vit_mini --weights {weights} {SHORT} --dataset folder:images"
    done(f"{line} --pool quilts --data-seed 2 --out align")
    return tmp_path


# --- what a result says, and splits that leak -------------------------------------------------


def test_a_short_align_run_says_in_what_it_is_unlike_the_papers(base: Path) -> None:
    unlike = read(base / "tuned/result.json")["align_unlike_paper"]
    expected = {"alternations": 1, "lower_steps": 2, "pool": "quilts"}
    assert {key: unlike[key] for key in expected} == expected
    assert "lam" not in unlike


def test_another_data_seed_than_aligns_is_refused(
    base: Path, weights: Path, tmp_path: Path, capsys: Any
) -> None:
    """Its test images may have been align's training images; from the run, and from its file."""
    own = f"--backbone vit_mini --weights {weights} --dataset quilts"
    for start in (f"{base}/align", f"{base}/align/adapter.safetensors {own}"):
        code, out, err = run(
            f"finetune --from {start} {PEFT} --data-seed 3 --out {tmp_path}/f", capsys
        )
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert "was aligned on another split" in err and "--data-seed" in err
        assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("changed", ["a file more", "a file less", "another name", "another class"])
def test_a_folder_that_changed_since_align_is_refused(
    changed: str, folder: Path, capsys: Any
) -> None:
    assert run(f"finetune --from align {PEFT} --dry-run --json", capsys)[0] == 0
    third = Path("images/y/3.png")
    if changed == "a file more":
        Image.new("RGB", (16, 16)).save("images/x/99.png")
    elif changed == "a file less":
        third.unlink()
    else:
        third.rename("images/y/three.png" if changed == "another name" else "images/z/300.png")
    code, _, err = run(f"finetune --from align {PEFT} --out f", capsys)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert "other images of" in err
    assert not Path("f").exists()


def test_the_same_folder_by_another_name_is_the_same_dataset(folder: Path, capsys: Any) -> None:
    """A link to it is no other dataset: with align's split it is taken, with another refused."""
    Path("link").symlink_to("images")
    line = f"finetune --from align {PEFT} --dataset folder:link"
    code, _, err = run(f"{line} --data-seed 5 --out f", capsys)
    assert (code, "was aligned on another split" in err) == (2, True), err
    code, _, err = run(f"{line} --data-seed 2 --out f", capsys)
    assert (code, "aligned on" in err) == (0, False), err


def test_another_dataset_than_aligns_is_taken_and_said_and_recorded(
    folder: Path, capsys: Any
) -> None:
    """Settings of align's dataset, its split seed, do not come along."""
    pictures(Path("other"), "pq", 15, shift=5)
    code, _, err = run(f"finetune --from align {PEFT} --dataset folder:other --out f", capsys)
    assert code == 0, err
    said = [line for line in err.splitlines() if "aligned on" in line]
    assert len(said) == 1 and "/images" in said[0] and "/other" in said[0]
    assert read("f/result.json")["aligned_on"].endswith("/images")
    assert read("f/config.json")["data_seed"] == 0


def test_a_lora_file_that_does_not_say_its_data_is_taken_with_a_word(
    base: Path, weights: Path, tmp_path: Path, capsys: Any
) -> None:
    done(f"export {base}/align --out {tmp_path}/e --no-merged")
    own = f"--backbone vit_mini --weights {weights} --dataset quilts"
    line = f"finetune --from {tmp_path}/e/released/lora.pth {own} {PEFT} --out {tmp_path}/f"
    code, _, err = run(line, capsys)
    assert (code, "does not say which images it was trained on" in err) == (0, True), err
    assert read(tmp_path / "f/result.json")["aligned_by"] == "unknown"


# --- a task of one's own ----------------------------------------------------------------------


def test_a_run_of_a_task_of_ones_own_goes_on_with_it(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, to the same bits."""
    monkeypatch.chdir(tmp_path)
    task = f"--pretext {ROOT}/examples/rotation.py:Rotation --p-lr 1e-3 --d-lr 1e-2 --warmup 0"
    line = f"align {task} --backbone vit_mini --weights {weights} --dataset quilts {SHORT}"
    line = line.replace("--alternations 1", "--alternations 3")
    done(f"{line} --out whole")
    assert cut(f"{line} --out cut", term, "metrics.jsonl", 3) == 143
    done(f"{line} --out cut")
    whole, again = (load_file(f"{name}/adapter.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(again[key], whole[key]) for key in whole)
    assert read("cut/result.json")["pretext"] == "rotation"
