"""A sweep is a grid of ordinary runs: what it plans, that it goes on, that shards make one."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import cli
from align import align
from bisslight import Diverged
from extras import sweep as room
from extras.settings import SweepConfig

TINY = (
    "--backbone vit_mini --dataset quilts --alternations 2 --lower-steps 2 --upper-steps 1 "
    "--p-batch 8 --d-batch 8 --probe-epochs 0 --eval-every 1 --warmup 0 --lr 1e-2 --epochs 1 "
    "--batch 80 --warmup-epochs 0 --seeds 2 --quiet"
)
RANKS = ["rank-1/align", "rank-1/finetune", "rank-2/align", "rank-2/finetune", "rank-1/direct"]


class Killed(BaseException):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def whole(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ranks 1 and 2, in one go."""
    out = tmp_path_factory.mktemp("whole") / "s"
    assert cli.run(f"sweep --rank 1,2 --weights {weights} {TINY} --out {out}".split()) == 0
    return out


def run(line: str, capsys: Any) -> tuple[int, str, str]:
    code = cli.run(line.split())
    out, err = capsys.readouterr()
    return code, out, err


def table(out: Path) -> Any:
    return json.loads((out / "sweep.json").read_text())


def config(**swept: Any) -> SweepConfig:
    return SweepConfig(backbone="vit_mini", dataset="quilts", swept=swept)


def test_points_are_ordinary_runs_and_the_table_is_what_evaluate_says(
    whole: Path, capsys: Any
) -> None:
    result = table(whole)
    assert [(row["run"], row["arm"]) for row in result["rows"]] == [
        ("rank-1/finetune", "BiSSLight"), ("rank-2/finetune", "BiSSLight"),
        ("rank-1/direct", "PEFT"), ("rank-2/direct", "PEFT"),
    ]  # fmt: skip
    assert (result["missing"], result["diverged"]) == ([], {})
    for rank in (1, 2):
        at = whole / f"rank-{rank}"
        code, out, _ = run(f"evaluate {at}/finetune --against {at}/direct --json", capsys)
        assert code == 0
        arms = json.loads(out)["arms"]
        rows = [row for row in result["rows"] if row["point"] == {"rank": rank}]
        for row, arm in zip(rows, arms, strict=True):
            assert all(row[key] == arm[key] for key in ("mean", "std", "accuracies"))
        assert rows[0]["minus_direct"] == arms[1]["first_minus_this"]
        saved = json.loads((at / "align/config.json").read_text())
        assert (saved["rank"], saved["alpha"]) == (rank, rank)  # scale 1 at every rank
    with Image.open(whole / "sweep.png") as picture:
        assert picture.size[0] > 500
        assert f"PEFT at 2 {result['rows'][3]['mean']:.2f}" in picture.info["Description"]


def test_a_list_in_a_file_is_the_same_sweep_and_dry_run_writes_nothing(
    weights: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "lists.toml"
    file.write_text(f'rank = [1, 2]\nbackbone = "vit_mini"\nweights = "{weights}"\n')
    code, out, _ = run(f"sweep --config {file} {TINY} --out {tmp_path}/s --dry-run --json", capsys)
    assert code == 0
    assert json.loads(out)["runs"] == [f"OUT/{name}" for name in [*RANKS, "rank-2/direct"]]
    assert [*tmp_path.iterdir()] == [file]


def test_a_killed_sweep_goes_on_to_the_same_table(
    whole: Path, weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = f"sweep --rank 1,2 --weights {weights} {TINY} --out {tmp_path}/s"

    def killing(cfg: Any, out: Path, **given: Any) -> Any:
        if "rank-2" in str(out):
            raise Killed
        return align(cfg, out, **given)

    with monkeypatch.context() as patched:
        patched.setattr(room, "align", killing)
        with pytest.raises(Killed):
            cli.run(line.split())
    first = (tmp_path / "s/rank-1/finetune/result.json").stat().st_mtime_ns
    assert run(line, capsys)[0] == 0
    assert (tmp_path / "s/rank-1/finetune/result.json").stat().st_mtime_ns == first  # not again
    assert table(tmp_path / "s") == table(whole)
    files = [at / "rank-2/align/adapter.safetensors" for at in (tmp_path / "s", whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
    code, _, err = run(f"{line} --lam 0.5", capsys)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "is a run with other settings: lam 0.001 -> 0.5" in err


def test_shards_together_are_one_sweep(
    whole: Path, weights: Path, capsys: Any, tmp_path: Path
) -> None:
    line = f"sweep --rank 1,2 --weights {weights} {TINY} --out {tmp_path}/s"
    assert run(f"{line} --shard 1/2", capsys)[0] == 0
    assert table(tmp_path / "s")["missing"] == ["rank-1/align", "rank-1/finetune", "rank-1/direct"]
    done = [path for path in (tmp_path / "s/rank-2").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in done}
    assert run(f"{line} --shard 0/2", capsys)[0] == 0
    assert {path: path.read_bytes() for path in done} == before
    assert table(tmp_path / "s") == table(whole)


def test_a_run_belongs_to_the_settings_it_depends_on() -> None:
    """λ has one direct run, a PEFT rate one align run, and chains share no directory."""

    def names(**lists: Any) -> list[list[str]]:
        chains = room.grid(config(**lists), Path("o"))
        return [[str(run.path.relative_to("o")) for run in chain] for chain in chains]

    assert names(lam=(0.1, 1)) == [
        ["lam-0.1/align", "lam-0.1/finetune"], ["lam-1/align", "lam-1/finetune"], ["direct"],
    ]  # fmt: skip
    assert names(lr=(1e-3, 1e-2)) == [
        ["align", "lr-0.001/finetune", "lr-0.01/finetune"],
        ["lr-0.001/direct"],
        ["lr-0.01/direct"],
    ]
    two = names(rank=(1, 2), lower_steps=(3, 4))
    assert len(two) == 6
    assert two[1] == ["rank-1-lower-steps-4/align", "rank-1-lower-steps-4/finetune"]
    assert two[-1] == ["rank-2/direct"]
    for n in (1, 2, 3, 7):
        parts = [room.share(two, f"{i}/{n}") for i in range(n)]  # type: ignore[arg-type]
        shared = [name for part in parts for names in part for name in names]
        assert sorted(shared) == sorted(chain.from_iterable(two))  # type: ignore[type-var]


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
    assert result["missing"] == ["p-lr-100/finetune"]


WRONG = [
    ("--rank 1,x", "--rank x"),
    ("--rank 1,2,1", "--rank: needs two values or more, none twice"),
    ("--rank 0,1", "--rank 0: should be greater than 0"),
    ("--lam 0.1,0", "--lam 0: should be greater than 0"),
    ("--rank 4", "comma list to one or two of --rank, --lr,"),
    ("--rank 1,2 --lam 0.1,0.2 --p-lr 0.1,0.2", "comma list to one or two of"),
    ("--rank 1,2 --shard 2/2", "--shard 2/2: give i/n"),
    ("--rank 1,2 --shard one", "--shard one: give i/n"),
    ("--rank 1,2 --out {at}/full", "full: holds thesis.tex, no run"),
    ("--rank 1,2 --weights nowhere", "nowhere: there is no such file"),
    ("--rank 1,2 --grid 1e-3,1e-2", "give --lr or --grid, not both"),
    ("--epochs 1,2 --rank 1,2", "--epochs"),
]


@pytest.mark.parametrize(("more", "message"), WRONG)
def test_a_wrong_sweep_gets_one_line_before_anything_is_written(
    weights: Path, capsys: Any, tmp_path: Path, more: str, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("the user's")
    before = sorted(tmp_path.rglob("*"))
    line = f"sweep --weights {weights} {TINY} --out {tmp_path}/new {more.format(at=tmp_path)}"
    code, out, err = run(line, capsys)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before
