"""ViT-B/16 at full size and 224 px on every benchmark's layout, from align to evaluate, from the command line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHARED
from test_protocol import official_layout
from test_tasks import make_aircraft

import cli
from tasks import BENCHMARKS

pytestmark = pytest.mark.slow
KEEP = {"dtd": 20, "voc07": 16, "cub200": 60, "pets": 1, "flowers": 100}  # every so manieth image of the packs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packs of photographs with their lists as they are and a part of their images, and drawn aircraft."""
    root = tmp_path_factory.mktemp("data")
    for name, every in KEEP.items():
        pack = SHARED / "data" / BENCHMARKS[name].folder
        if not pack.exists():
            pytest.skip(f"{pack} is not here (set BISSLIGHT_SHARED to the folder that holds data/)")
        images = 0
        for at, _, files in sorted(os.walk(pack)):
            for file in sorted(files):
                image = file.lower().endswith(".jpg")
                images += image
                if image and images % every:
                    continue
                to = root / BENCHMARKS[name].folder / Path(at).relative_to(pack) / file
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(Path(at) / file)
    make_aircraft(root)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "mae_pretrain_vit_base_full.pth"
    torch.save({"model": official_layout("vit_b16")}, path)
    return path


@pytest.mark.parametrize("name", [*BENCHMARKS])
def test_vit_b16_goes_through_every_benchmark(
    name: str, root: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    b, pool = BENCHMARKS[name], SHARED / "data/imagenet-one-per-class"
    backbone = f"--backbone vit_b16 --weights {weights} --dataset {name} --data-root {root} --partial"
    peft = "--epochs 1 --batch 8 --seeds 2 --grid 1e-4,1e-3"
    for line in (
        f"align {backbone} --pool {pool} --alternations 2 --lower-steps 2 --upper-steps 1 --p-batch 4 --d-batch 4 "
        "--probe-epochs 1 --eval-every 2 --out a",
        f"finetune --from a {peft} --out aligned",
        f"finetune {backbone} {peft} --out direct",
        "evaluate aligned --against direct",
    ):
        assert cli.run(line.split()) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "top-1 accuracy" in said.out or name == "voc07"
    assert "partial copy" in said.err
    result = json.loads(Path("aligned/result.json").read_text())
    assert result["metric"] == ("11-point mAP" if name == "voc07" else "top-1 accuracy")
    assert result["aligned_by"] == "mfac"
    from safetensors.torch import load_file

    tensors = load_file("aligned/adapter-s1.safetensors")
    assert tensors["head.weight"].shape == (b.classes, 768)
    assert tensors["theta"].shape == (12, 4 * 64 * 768)
    log = [json.loads(text) for text in Path("a/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [0, 1, 2]
    assert all(len(record["loss_P"]) == 2 for record in log[1:])
