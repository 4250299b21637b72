"""The bench at toy size: what it must hold to be believed, not how fast anything is."""

import json
from typing import Any

import pytest
import torch
from conftest import fixture

import cli
from extras import bench as room
from extras.bench import bench

TOY = "bench --backbone vit_mini --rank 4 --p-batch 8 --d-batch 4 --lower-steps 3 --upper-steps 2"


def test_bench_tells_every_method(capsys: Any) -> None:
    assert cli.run(f"{TOY} --repeats 2 --json".split()) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in result["rows"]}
    assert (result["backbone"], [*rows]) == ("vit_mini", ["mfac", "cg", "identity"])
    assert rows["cg"]["seconds"] > rows["identity"]["seconds"] > 0
    for wrong in ("--rank 0", "--rank x", "--repeats 0", "--backbone vit_q", "--device gpu"):
        assert cli.run(f"{TOY} {wrong}".split()) == 2
        assert wrong.split()[0] in capsys.readouterr().err


def test_a_method_that_does_not_fit_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """CG on one GPU, at the paper's batch: the defaults, by command line and from Python."""

    def without_cg(cfg: Any) -> dict[str, Any]:
        if cfg.hypergrad == "cg":
            raise torch.OutOfMemoryError("planted")
        known = json.loads(fixture("defaults.json").read_text())["bench"]["vit_b16 mae dtd paper"]
        known["alternations"] = known.pop("repeats") + 1
        assert {name: getattr(cfg, name) for name in known} == known
        return {"seconds": 1.0}

    monkeypatch.setattr(room, "alternation", without_cg)
    found = bench("vit_b16")
    assert found["rows"][1] == {"method": "cg", "failed": "out of memory; see --micro-batch"}
    assert [row["method"] for row in found["rows"]] == ["mfac", "cg", "identity"]
    assert cli.run(["bench", "--backbone", "vit_b16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
