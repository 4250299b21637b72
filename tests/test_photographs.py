"""The commands on real photographs, where they are at hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import shared

import cli

pytestmark = pytest.mark.slow


def test_photographs_go_through_all_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Two epochs, a few alternations: that it runs on JPEG files of many sizes, not how good it is."""
    pool, task = shared("data/tiny-imagenet/val"), shared("data/flower_photos")
    monkeypatch.chdir(tmp_path)
    backbone = "--backbone vit_mini --weights pre"
    small = "--epochs 2 --batch 64 --seeds 2 --lr 1e-2 --workers 1"
    for line in (
        f"pretrain --pool {pool} --backbone vit_mini --image-size 64 --patch-size 8 --epochs 2 --warmup-epochs 1 "
        "--out pre",
        f"align {backbone} --dataset folder:{task} --pool {pool} --alternations 2 --lower-steps 2 --upper-steps 2 "
        "--p-batch 32 --d-batch 32 --probe-epochs 1 --out a --workers 1",
        f"finetune --from a {small} --out aligned",
        f"finetune {backbone} --dataset folder:{task} {small} --out direct",
    ):
        assert cli.run(line.split()) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert cli.run(["evaluate", "aligned", "--against", "direct", "--json"]) == 0
    assert [len(arm["accuracies"]) for arm in json.loads(capsys.readouterr().out)["arms"]] == [2, 2]
    assert cli.run(["evaluate", "aligned", "--against", "direct", "--rollout", "6"]) == 0
    assert cli.run(["evaluate", "a", "--against", "aligned", "--against", "direct", "--similarity"]) == 0
    assert Path("aligned/rollout.png").is_file() and Path("a/similarity.png").is_file()
