"""A sweep is a grid of ordinary runs: what it plans, that it goes on, what it says."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_cli import run

from align import align
from bisslight import Diverged
from extras import SweepConfig
from extras import sweep as room
from support.errors import UsageError

TINY = (
    "--backbone vit_mini --dataset quilts --alternations 2 --lower-steps 1 --upper-steps 1 "
    "--p-batch 8 --d-batch 8 --probe-epochs 0 --eval-every 2 --warmup 0 --lr 1e-2 --epochs 1 "
    "--batch 80 --warmup-epochs 0 --seeds 2 --quiet"
)


def test_a_list_in_a_file_is_the_same_sweep_and_dry_run_writes_nothing(
    weights: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "lists.toml"
    file.write_text(f'swept = {{rank = [1, 2]}}\nbackbone = "vit_mini"\nweights = "{weights}"\n')
    code, out, _ = run(f"sweep --config {file} {TINY} --out {tmp_path}/s --dry-run --json", capsys)
    kinds = ("align", "finetune", "direct")
    assert code == 0
    assert json.loads(out)["runs"] == [f"OUT/rank-{r}/{kind}" for r in (1, 2) for kind in kinds]
    code, _, err = run(f"sweep --rank 1,2 {TINY} --out {tmp_path}/s --dry-run", capsys)
    assert (code, "--weights FILE: vit_mini with mae" in err) == (2, True)
    assert [*tmp_path.iterdir()] == [file]


def test_a_run_belongs_to_the_setting_if_it_depends_on_it() -> None:
    """λ has one direct run, a PEFT rate one align run; LoRA's scale is 1 at every rank."""

    def runs(**swept: Any) -> dict[str, Any]:
        cfg = SweepConfig(backbone="vit_mini", dataset="quilts", swept=swept)
        return {path.as_posix(): found for path, found in room.grid(cfg, Path())[0].items()}

    assert [*runs(lam=(0.1, 1))] == [
        "lam-0.1/align", "lam-0.1/finetune", "direct", "lam-1/align", "lam-1/finetune",
    ]  # fmt: skip
    assert [*runs(lr=(1e-3, 1e-2))] == [
        "align", "lr-0.001/finetune", "lr-0.001/direct", "lr-0.01/finetune", "lr-0.01/direct",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="give a comma list, such as --rank"):
        runs(clip=(4, 5))
    assert [(c.rank, c.alpha) for c in runs(rank=(1, 2)).values()] == [(1, 1)] * 3 + [(2, 2)] * 3


def test_a_sweep_says_what_evaluate_does_and_tells_a_point_that_diverges(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def diverging(cfg: Any, out: Path, **given: Any) -> Any:
        if cfg.p_lr == 100:
            raise Diverged("alternation 1, lower level, step 2: a loss is not finite")
        return align(cfg, out, **given)

    monkeypatch.setattr(room, "align", diverging)
    at = tmp_path / "s"
    line = f"sweep --p-lr 1e-3,100 --weights {weights} {TINY} --out {at}"
    code, out, _ = run(f"{line} --json", capsys)
    assert code == 0
    result = json.loads(out)
    assert result == json.loads((at / "sweep.json").read_text())
    assert result["diverged"] == {
        "p-lr-100/align": "alternation 1, lower level, step 2: a loss is not finite"
    }
    told = run(f"evaluate {at}/p-lr-0.001/finetune --against {at}/direct --json", capsys)[1]
    assert result["rows"][:2] == [{"p_lr": 0.001} | arm for arm in json.loads(told)["arms"]]
    assert [(row["p_lr"], row["arm"]) for row in result["rows"][2:]] == [(100, "direct")]
    with Image.open(at / "sweep.png") as picture:
        said = f"finetune at 0.001 {result['rows'][0]['mean']:.2f}"
        assert said in picture.info["Description"]
    code, _, err = run(f"{line} --lam 0.5", capsys)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "is a run with other settings: lam 0.001 -> 0.5" in err
