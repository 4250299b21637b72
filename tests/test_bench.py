"""The bench at toy size: what it must hold to be believed, not how fast anything is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import close
from PIL import Image

import bench
import cli
from bench import apply_as_the_paper, as_the_paper
from mfac import mfac


def test_bench_tells_every_method_in_both_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "isolated", lambda fn, *args: fn(*args))  # eight processes would take a minute to start
    line = "bench --backbone vit_mini --rank 4 --p-batch 8 --d-batch 4 --lower-steps 3 --upper-steps 2 --repeats 2"
    assert cli.run([*line.split(), "--json", "--out", "b"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {(row["mode"], row["method"]): row for row in result["rows"]}
    assert len(rows) == 8
    for (_, method), row in rows.items():
        phases = row["phases"]
        assert sum(phases.values()) == pytest.approx(row["seconds"], rel=0.5)  # medians of parts and of sums
        assert {"data", "upper passes", "optimiser"} <= phases.keys()
        assert ("lower passes" in phases) == (method != "peft")
        assert row["TFLOP_per_s"] > 0
    assert rows["natural", "cg"]["phases"]["apply"] > rows["natural", "identity"]["phases"]["apply"]
    assert 0 < result["mfac_share"] < 1
    assert json.loads(Path("b/bench.json").read_text())["config"]["backbone"] == "vit_mini"
    with Image.open("b/cost.png") as picture:
        assert picture.size[0] > 500
    assert cli.run([*line.split(), "--out", "c"]) == 0
    out = capsys.readouterr().out
    for said in ("equal", "natural", "M-FAC's share of an alternation", "update_ratio", "images/s decoded"):
        assert said in out
    assert cli.run([*line.split(), "--dry-run"]) == 0


def test_the_recursion_it_compares_with_is_the_papers() -> None:
    """Matrix-vector products per block give the numbers of the production form."""
    g = torch.Generator().manual_seed(0)
    G, query = torch.randn(3, 6, 40, generator=g).double(), torch.randn(3, 40, generator=g).double()
    theirs = torch.stack(
        [apply_as_the_paper(*as_the_paper(block, 0.3), x, 0.3) for block, x in zip(G, query, strict=True)]
    )
    close(theirs, mfac(G, 0.3, query, torch.sum).apply(query), 1e-10)


def test_the_peaks_of_memory_are_those_of_a_known_allocation() -> None:
    from bench import Peak

    peak = Peak(torch.device("cpu"))
    block = torch.ones(50_000_000)  # 200 MB
    del block
    read = peak.read()
    if read is None:
        pytest.skip("this system does not tell peak memory")
    assert 0.19 < read < 0.25
