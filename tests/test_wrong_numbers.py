"""Splits that leak, from outside: PEFT on other images or another split than align's."""

import json
import shutil
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


@pytest.fixture(scope="module")
def folder(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `align` on a folder of images, and that folder, `images`."""
    place = tmp_path_factory.mktemp("folder")
    pictures(place / "images", "xyz")
    line = f"align --backbone vit_mini --weights {weights} {SHORT} --pool quilts --data-seed 2"
    assert cli.run(f"{line} --dataset folder:{place}/images --out {place}/align".split()) == 0
    return place


def test_another_data_seed_than_aligns_is_refused(
    weights: Path, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """Its test images may have been align's training images: from the run, from its file, and by
    another name of the folder; with align's own split that name is taken.
    """
    (tmp_path / "link").symlink_to(folder / "images")
    own = f"--backbone vit_mini --weights {weights} --dataset folder:{folder}/images"
    link, out_f = f"--dataset folder:{tmp_path}/link", f"--out {tmp_path}/f"
    for start in ("align", f"align/adapter.safetensors {own}", f"align {link}"):
        code, out, err = run(
            f"finetune --from {folder}/{start} {PEFT} --data-seed 3 {out_f}", capsys
        )
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert "was aligned on another split" in err and "--data-seed" in err
        assert not (tmp_path / "f").exists()
    line = f"finetune --from {folder}/align {PEFT} {link} --data-seed 2 {out_f} --dry-run"
    code, _, err = run(line, capsys)
    assert (code, "aligned on" in err) == (0, False), err


@pytest.mark.parametrize("changed", ["a file more", "a file less", "another name", "another class"])
def test_a_folder_that_changed_since_align_is_refused(
    changed: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    kept, images = tmp_path / "kept", folder / "images"
    shutil.copytree(images, kept)
    third = images / "y/3.png"
    if changed == "a file more":
        shutil.copy(third, images / "x/99.png")
    elif changed == "a file less":
        third.unlink()
    else:
        third.rename(images / ("y/three.png" if changed == "another name" else "z/300.png"))
    code, _, err = run(f"finetune --from {folder}/align {PEFT} --out {tmp_path}/f", capsys)
    shutil.rmtree(images)
    kept.rename(images)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert "other images of" in err
    assert not (tmp_path / "f").exists()


def test_another_dataset_than_aligns_is_taken_and_said_and_recorded(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """Settings of align's dataset, its split seed, do not come along."""
    pictures(tmp_path / "other", "pq", shift=5)
    line = f"finetune --from {folder}/align {PEFT} --dataset folder:{tmp_path}/other"
    code, _, err = run(f"{line} --out {tmp_path}/f", capsys)
    assert code == 0, err
    said = [line for line in err.splitlines() if "aligned on" in line]
    assert len(said) == 1 and "/images" in said[0] and "/other" in said[0]
    files = (tmp_path / f"f/{x}.json" for x in ("result", "config"))
    result, config = (json.loads(file.read_text()) for file in files)
    assert result["aligned_on"].endswith("/images") and config["data_seed"] == 0
    unlike = {"alternations": 1, "lower_steps": 2, "pool": "quilts"}
    assert unlike.items() <= result["align_unlike_paper"].items()
    assert "lam" not in result["align_unlike_paper"]
