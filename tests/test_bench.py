"""The bench at toy size: what it must hold to be believed, not how fast anything is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cli
from extras import bench as room
from extras.bench import BenchConfig

TOY = "bench --backbone vit_mini --rank 4 --p-batch 8 --d-batch 4 --lower-steps 3 --upper-steps 2"


def test_bench_tells_every_method_and_a_finished_one_is_read(tmp_path: Path, capsys: Any) -> None:
    line = f"{TOY} --repeats 2 --quiet --json --out {tmp_path}/b"
    assert cli.run(line.split()) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in result["rows"]}
    assert [*rows] == ["mfac", "cg", "identity"]
    assert rows["cg"]["seconds"] > rows["identity"]["seconds"] > 0
    assert cli.run(line.split()) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert cli.run(f"{line} --rank 2".split()) == 2
    assert "other settings: rank" in capsys.readouterr().err


def test_a_method_that_does_not_fit_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CG on one GPU, at the paper's batch."""

    def without_cg(cfg: Any, method: str) -> dict[str, Any]:
        if method == "cg":
            raise torch.OutOfMemoryError("planted")
        return {"seconds": 1.0}

    monkeypatch.setattr(room, "alternation", without_cg)
    found = room.bench(BenchConfig(backbone="vit_mini"), tmp_path / "b")
    assert found["rows"][1] == {"method": "cg", "failed": "out of memory; see --micro-batch"}
    assert [row["method"] for row in found["rows"]] == [*room.METHODS]
