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


@pytest.fixture(scope="module")
def folder(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `align` on a folder of images, and that folder, `images`."""
    place = tmp_path_factory.mktemp("folder")
    pictures(place / "images", "xyz")
    line = f"align --backbone vit_mini --weights {weights} {SHORT} --pool quilts --data-seed 2"
    assert cli.run(f"{line} --dataset folder:{place}/images --out {place}/align".split()) == 0
    return place


@pytest.mark.parametrize("how", ["run", "file", "link", "y/three.png", "z/300.png"])
def test_another_split_or_other_images_than_aligns_are_refused(
    how: str, weights: Path, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """With another data seed, by run, file or link; or with an image of another name or class."""
    (tmp_path / "link").symlink_to(folder / "images")
    images, image = folder / "images", folder / "images/y/3.png"
    own = f"--backbone vit_mini --weights {weights} --dataset folder:{images}"
    more = {
        "run": " --data-seed 3",
        "file": f"/adapter.safetensors {own} --data-seed 3",
        "link": f" --dataset folder:{tmp_path}/link --data-seed 3",
    }
    if how not in more:
        image.rename(images / how)
    line = f"finetune --from {folder}/align{more.get(how, '')} {PEFT} --out {tmp_path}/f"
    code, out, err = run(line, capsys)
    if how not in more:
        (images / how).rename(image)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert "was aligned on another split or other images of" in err and "--data-seed" in err
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
