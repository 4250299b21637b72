"""A sweep is a grid of ordinary runs: what it plans, that it goes on, what it says."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import cli
from align import align
from bisslight import Diverged
from extras import sweep as room
from extras.sweep import SweepConfig

TINY = (
    "--backbone vit_mini --dataset quilts --alternations 2 --lower-steps 1 --upper-steps 1 "
    "--p-batch 8 --d-batch 8 --probe-epochs 0 --eval-every 2 --warmup 0 --lr 1e-2 --epochs 1 "
    "--batch 80 --warmup-epochs 0 --seeds 2 --quiet"
)


class Killed(BaseException):
    """Stands for a kill."""


def run(line: str, capsys: Any) -> tuple[int, str, str]:
    code = cli.run(line.split())
    out, err = capsys.readouterr()
    return code, out, err


def test_a_killed_sweep_goes_on_to_a_table_that_is_what_evaluate_says(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "s"
    line = f"sweep --rank 1,2 --weights {weights} {TINY} --out {out}"

    def killing(cfg: Any, out: Path, **given: Any) -> Any:
        if "rank-2" in str(out):
            raise Killed
        return align(cfg, out, **given)

    with monkeypatch.context() as patched:
        patched.setattr(room, "align", killing)
        with pytest.raises(Killed):
            cli.run(line.split())
    first = (out / "rank-1/finetune/result.json").stat().st_mtime_ns
    assert run(line, capsys)[0] == 0
    assert (out / "rank-1/finetune/result.json").stat().st_mtime_ns == first  # not again
    result = json.loads((out / "sweep.json").read_text())
    assert [(row["run"], row["arm"]) for row in result["rows"]] == [
        ("rank-1/finetune", "BiSSLight"), ("rank-1/direct", "PEFT"),
        ("rank-2/finetune", "BiSSLight"), ("rank-2/direct", "PEFT"),
    ]  # fmt: skip
    assert result["diverged"] == {}
    for rank in (1, 2):
        at = out / f"rank-{rank}"
        arms = run(f"evaluate {at}/finetune --against {at}/direct --json", capsys)[1]
        arms = json.loads(arms)["arms"]
        rows = [row for row in result["rows"] if row["point"] == {"rank": rank}]
        for row, arm in zip(rows, arms, strict=True):
            assert all(row[key] == arm[key] for key in ("mean", "std", "accuracies"))
        assert rows[0]["minus_direct"] == arms[1]["first_minus_this"]
        saved = json.loads((at / "align/config.json").read_text())
        assert (saved["rank"], saved["alpha"]) == (rank, rank)  # scale 1 at every rank
    with Image.open(out / "sweep.png") as picture:
        assert f"PEFT at 2 {result['rows'][3]['mean']:.2f}" in picture.info["Description"]
    code, _, err = run(f"{line} --lam 0.5", capsys)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "is a run with other settings: lam 0.001 -> 0.5" in err


def test_a_list_in_a_file_is_the_same_sweep_and_dry_run_writes_nothing(
    weights: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "lists.toml"
    file.write_text(f'rank = [1, 2]\nbackbone = "vit_mini"\nweights = "{weights}"\n')
    code, out, _ = run(f"sweep --config {file} {TINY} --out {tmp_path}/s --dry-run --json", capsys)
    kinds = ("align", "finetune", "direct")
    assert code == 0
    assert json.loads(out)["runs"] == [f"OUT/rank-{r}/{kind}" for r in (1, 2) for kind in kinds]
    assert [*tmp_path.iterdir()] == [file]


def test_a_run_belongs_to_the_setting_if_it_depends_on_it() -> None:
    """λ has one direct run, a PEFT rate one align run."""

    def names(**swept: Any) -> list[str]:
        cfg = SweepConfig(backbone="vit_mini", dataset="quilts", swept=swept)
        return [path.as_posix() for path in room.grid(cfg, Path())]

    assert names(lam=(0.1, 1)) == [
        "lam-0.1/align", "lam-0.1/finetune", "direct", "lam-1/align", "lam-1/finetune",
    ]  # fmt: skip
    assert names(lr=(1e-3, 1e-2)) == [
        "align", "lr-0.001/finetune", "lr-0.001/direct", "lr-0.01/finetune", "lr-0.01/direct",
    ]  # fmt: skip


def test_a_point_that_diverges_is_told_and_the_others_go_on(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def diverging(cfg: Any, out: Path, **given: Any) -> Any:
        if cfg.p_lr == 100:
            raise Diverged("alternation 1, lower level, step 2: a loss is not finite")
        return align(cfg, out, **given)

    monkeypatch.setattr(room, "align", diverging)
    line = f"sweep --p-lr 1e-3,100 --weights {weights} {TINY} --out {tmp_path}/s --json"
    code, out, _ = run(line, capsys)
    assert code == 0
    result = json.loads(out)
    assert result["diverged"] == {
        "p-lr-100/align": "alternation 1, lower level, step 2: a loss is not finite"
    }
    assert [row["run"] for row in result["rows"]] == ["p-lr-0.001/finetune", "direct"]


WRONG = [
    ("--rank 1,x", "--rank x"),
    ("--rank 4", "comma list to one of --rank, --lr,"),
    ("--rank 1,2 --lam 0.1,0.2", "comma list to one of"),
    ("--rank 1,2 --out {at}/full", "full: holds thesis.tex, no run"),
    ("--rank 1,2 --grid 1e-3,1e-2", "give --lr or --grid, not both"),
]


def test_a_wrong_sweep_gets_one_line_before_anything_is_written(
    weights: Path, capsys: Any, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("the user's")
    before = sorted(tmp_path.rglob("*"))
    for more, message in WRONG:
        line = f"sweep --weights {weights} {TINY} --out {tmp_path}/new {more.format(at=tmp_path)}"
        code, out, err = run(line, capsys)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert message in err
    assert sorted(tmp_path.rglob("*")) == before
