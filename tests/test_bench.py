"""The bench at toy size: what it must hold to be believed, not how fast anything is."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import cli
from config import BACKBONES, Arch
from extras import bench as room
from extras.settings import BenchConfig

TOY = "bench --backbone vit_mini --rank 4 --p-batch 8 --d-batch 4 --lower-steps 3 --upper-steps 2"


def work(arch: Arch, rank: int) -> tuple[float, float]:
    """Operations an image, 2 a multiply-add, of an MAE step and of an upper step, by formula.

    ψ is frozen: no weight gradients, and none into the first block's input. The decoder is trained,
    so that its forward pass costs three times. An upper step has two passes.
    """
    D, L, m = arch.dim, (arch.image_size // arch.patch_size) ** 2, arch.mlp_ratio
    pixels = 3 * arch.patch_size**2

    def forward(n: int, dim: int, layers: int, r: int) -> float:
        return layers * ((8 + 4 * m) * n * dim**2 + 4 * n**2 * dim + 8 * n * dim * r)

    def frozen(n: int) -> float:
        back = arch.depth * ((8 + 4 * m) * n * D**2 + 8 * n**2 * D + 16 * n * D * rank)
        first = 6 * n * D**2 + 4 * n * D * rank + 2 * n**2 * D
        return forward(n, D, arch.depth, rank) + back - first + 2 * L * D * pixels

    seen, (width, layers, _) = 1 + L // 4, arch.decoder
    rest = 2 * seen * D * width + 2 * (1 + L) * width * pixels
    return frozen(seen) + 3 * (forward(1 + L, width, layers, 0) + rest), 2 * frozen(1 + L)


@pytest.mark.parametrize(
    ("backbone", "alternation"), [("vit_b16", 332.5), ("vit_l16", 749.7), ("vit_h14", 1796.3)]
)
def test_the_formula_at_the_papers_settings(backbone: str, alternation: float) -> None:
    """TFLOP an alternation, as measured once with torch's counter on the official sizes."""
    lower, upper = work(BACKBONES[backbone].arch, 64)
    assert (20 * 256 * lower + 8 * 64 * upper) / 1e12 == pytest.approx(alternation, rel=0.002)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "b"
    assert cli.run([*TOY.split(), "--repeats", "2", "--quiet", "--out", str(out)]) == 0
    return out


def test_bench_tells_every_method_by_phase(measured: Path) -> None:
    result = json.loads((measured / "result.json").read_text())
    rows = {row["method"]: row for row in result["rows"]}
    assert [*rows] == ["mfac", "cg", "identity", "peft"]
    for method, row in rows.items():
        phases = {phase: row[phase] for phase in room.PHASES if phase in row}
        assert sum(phases.values()) == pytest.approx(row["seconds"], rel=0.5)  # medians of parts
        assert {"upper passes", "optimisers"} <= phases.keys()
        assert ("line 13" in phases) == ("lower passes" in phases) == (method != "peft")
    assert rows["cg"]["line 13"] > rows["mfac"]["line 13"] > rows["identity"]["line 13"]
    assert 0 < result["mfac_share"] < 1
    with Image.open(measured / "cost.png") as picture:
        assert f"cg seconds {rows['cg']['seconds']:.3g}" in picture.info["Description"]


def test_the_operations_are_those_of_the_formula(measured: Path) -> None:
    """An alternation does no more than it must: 3 x 8 and 2 x 4 images; the head is not counted."""
    rows = json.loads((measured / "result.json").read_text())["rows"]
    flop = {row["method"]: row["TFLOP"] * 1e12 for row in rows}
    lower, upper = work(BACKBONES["vit_mini"].arch, 4)
    assert flop["peft"] == pytest.approx(2 * 4 * upper / 2, rel=0.03)
    assert flop["identity"] == pytest.approx(3 * 8 * lower + 2 * 4 * upper, rel=0.03)
    assert flop["cg"] > flop["identity"] + 2 * 5 * 8 * lower  # five products of two solves


def test_the_same_command_reads_a_finished_bench_and_shows_it_beside_another(
    measured: Path, capsys: Any, tmp_path: Path
) -> None:
    before = (measured / "result.json").read_bytes()
    line = f"{TOY} --repeats 2 --quiet --json --out {measured} --against {measured}"
    assert cli.run(line.split()) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(before)
    with Image.open(measured / "cost.png") as picture:
        assert "for vit_mini, vit_mini" in picture.info["Description"]
    for path, message in ((tmp_path, "give a finished bench"), (measured, "other settings: rank")):
        new = ["--out", str(measured), "--rank", "2"] if path is measured else ["--out", "new"]
        assert cli.run([*TOY.split(), "--against", str(path), *new]) == 2
        assert message in capsys.readouterr().err


def test_a_method_that_does_not_fit_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CG on one GPU, at the paper's batch."""

    def without_cg(cfg: Any, backbone: str, method: str) -> dict[str, Any]:
        if method == "cg":
            raise torch.OutOfMemoryError("planted")
        return {"seconds": 1.0}

    monkeypatch.setattr(room, "alternation", without_cg)
    rows: list[room.Row] = []
    assert [*room.measure(BenchConfig(), "vit_mini", rows)] == [*room.METHODS]
    assert rows[1] == {"method": "cg", "failed": "out of memory; see --micro-batch"}
    assert [row["method"] for row in rows if "failed" not in row] == ["mfac", "identity", "peft"]
    assert room.ratios(rows) == {}
    assert "cg seconds 0" in room.draw([{"backbone": "vit_b16", "rows": rows}])[1]


def test_a_clock_gives_each_phase_its_own_seconds() -> None:
    clock = room.Clock()
    sleep = clock.phase("b")(time.sleep)
    batches = clock.each("a", "batch")
    clock.lap()
    assert next(batches) == "batch"
    time.sleep(0.02)
    sleep(0.05)
    time.sleep(0.02)
    seconds = clock.lap()
    assert seconds["a"] == pytest.approx(0.04, abs=0.03)
    assert 0.05 <= seconds["b"] < 0.08


def test_bench_passes_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    loss = room.mae.MAE.loss

    def watched(self: Any, theta: Any, phi: Any, batch: Any) -> Any:
        seen.append(len(batch.images))
        return loss(self, theta, phi, batch)

    monkeypatch.setattr(room.mae.MAE, "loss", watched)
    sizes: Any = {"p_batch": 8, "d_batch": 4, "lower_steps": 1, "upper_steps": 1, "repeats": 1}
    cfg = BenchConfig(rank=4, micro_batch=3, device="cpu", **sizes)
    assert room.alternation(cfg, "vit_mini", "mfac")["paper_GB"] is None
    assert seen[:3] == [3, 3, 2]
