"""The bench at toy size: what it must hold to be believed, not how fast anything is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import close
from PIL import Image

import bench
import cli
from bench import apply_as_the_paper, as_the_paper
from config import BenchConfig, Machine
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


TOY = "bench --backbone vit_mini --rank 4 --p-batch 8 --d-batch 4 --lower-steps 2 --upper-steps 1 --repeats 1"


def test_a_method_that_does_not_fit_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """CG on one GPU, at the paper's batch; and a picture that holds an earlier bench, too."""
    monkeypatch.chdir(tmp_path)

    def without_cg(fn: Any, text: str, method: str, mode: str) -> dict[str, Any]:
        return {"failed": "out of memory"} if method == "cg" else fn(text, method, mode)  # type: ignore[no-any-return]

    monkeypatch.setattr(bench, "isolated", without_cg)
    assert cli.run([*TOY.split(), "--quiet", "--out", "a"]) == 0
    assert capsys.readouterr().out.count("cg: out of memory") == 2
    result = json.loads(Path("a/bench.json").read_text())
    assert result["ratios"] == {}
    monkeypatch.setattr(bench, "isolated", lambda fn, *args: fn(*args))
    drawn: list[list[str]] = []
    draw = bench.draw

    def watched(results: Any) -> Any:
        drawn.append(bench.names(results))
        return draw(results)

    monkeypatch.setattr(bench, "draw", watched)
    assert cli.run([*TOY.split(), "--rank", "2", "--out", "b", "--against", "a"]) == 0
    assert "hours" in capsys.readouterr().out
    assert drawn == [["vit_mini, rank 4", "vit_mini, rank 2"]]
    assert cli.run(["report", "a", "b", "--quiet"]) == 0
    page = Path("report.html").read_text()
    assert "What an alternation costs" in page
    assert page.count("out of memory") == 2
    assert cli.run([*TOY.split(), "--out", "c", "--against", "nowhere"]) == 2
    assert "nowhere: is not a bench" in capsys.readouterr().err
    Path("b/bench.json").write_text("{}")  # as a stop leaves it
    assert cli.run([*TOY.split(), "--out", "c", "--against", "b"]) == 2
    assert "b: is a bench that did not end, run it again with --force" in capsys.readouterr().err


def test_a_process_that_dies_or_lacks_memory_is_a_result() -> None:
    assert bench.isolated(dies) == {"failed": "its process died, perhaps for want of memory"}
    assert bench.isolated(lacks_memory) == {"failed": "out of memory"}


def dies() -> dict[str, Any]:
    os._exit(9)


def lacks_memory() -> dict[str, Any]:
    raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize("micro", [None, 3])
def test_bench_passes_pieces_and_precision_as_asked(micro: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    asked: list[bool] = []
    loss, autocast = bench.mae.MAE.loss, bench.autocast

    def watched(self: Any, theta: Any, phi: Any, batch: Any) -> Any:
        seen.append(len(batch.images))
        return loss(self, theta, phi, batch)

    monkeypatch.setattr(bench.mae.MAE, "loss", watched)

    def precise(fn: Any, device: torch.device, amp: bool) -> Any:
        asked.append(amp)
        return autocast(fn, device, amp)

    monkeypatch.setattr(bench, "autocast", precise)
    cfg = BenchConfig(
        backbone="vit_mini", rank=4, p_batch=8, d_batch=4, lower_steps=1, upper_steps=1, repeats=1, amp=False,
        machine=Machine(micro_batch=micro),
    )  # fmt: skip
    bench.alternation(cfg.model_dump_json(), "mfac", "natural")
    assert seen[:3] == ([8, 8] if micro is None else [3, 3, 2])
    assert not any(asked)
