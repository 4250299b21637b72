"""Splits that leak, from outside: PEFT on other images or another split than align's."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import cli

SHORT = "--alternations 1 --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 1"
SHORT += " --quiet"
PEFT = "--epochs 1 --warmup-epochs 0 --batch 40 --seeds 1 --lr 1e-2"


def run(line: str, capsys: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line."""
    capsys.readouterr()
    code = cli.run(line.split())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def pictures(root: Path, classes: str, shift: int = 0) -> None:
    """Class folders of 15 plain 16-pixel images each."""
    for k, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(shift, 15 + shift):
            Image.new("RGB", (16, 16), (40 * k, 9 * i, 100)).save(root / name / f"{i}.png")


@pytest.fixture
def folder(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run `align` on a folder of images, and that folder, `images`, where one works."""
    monkeypatch.chdir(tmp_path)
    pictures(Path("images"), "xyz")
    line = f"align --backbone vit_mini --weights {weights} {SHORT} --dataset folder:images"
    assert cli.run(f"{line} --pool quilts --data-seed 2 --out align".split()) == 0
    return tmp_path


def test_another_data_seed_than_aligns_is_refused(weights: Path, folder: Path, capsys: Any) -> None:
    """Its test images may have been align's training images; from the run, and from its file."""
    own = f"--backbone vit_mini --weights {weights} --dataset folder:images"
    for start in ("align", f"align/adapter.safetensors {own}"):
        code, out, err = run(f"finetune --from {start} {PEFT} --data-seed 3 --out f", capsys)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert "was aligned on another split" in err and "--data-seed" in err
        assert not Path("f").exists()


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
    line = f"finetune --from align {PEFT} --dataset folder:link --out f"
    code, _, err = run(f"{line} --data-seed 5", capsys)
    assert (code, "was aligned on another split" in err) == (2, True), err
    code, _, err = run(f"{line} --data-seed 2", capsys)
    assert (code, "aligned on" in err) == (0, False), err


def test_another_dataset_than_aligns_is_taken_and_said_and_recorded(
    folder: Path, capsys: Any
) -> None:
    """Settings of align's dataset, its split seed, do not come along."""
    pictures(Path("other"), "pq", shift=5)
    code, _, err = run(f"finetune --from align {PEFT} --dataset folder:other --out f", capsys)
    assert code == 0, err
    said = [line for line in err.splitlines() if "aligned on" in line]
    assert len(said) == 1 and "/images" in said[0] and "/other" in said[0]
    result, config = (json.loads(Path(f"f/{x}.json").read_text()) for x in ("result", "config"))
    assert result["aligned_on"].endswith("/images") and config["data_seed"] == 0
    unlike = {"alternations": 1, "lower_steps": 2, "pool": "quilts"}
    assert unlike.items() <= result["align_unlike_paper"].items()
    assert "lam" not in result["align_unlike_paper"]
