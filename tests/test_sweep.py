"""A sweep is a grid of ordinary runs: what it plans, that it goes on after a kill, that shards make one table."""

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_report import Page

import cli
import sweep as room
from config import Diverged, SweepConfig, UsageError
from runtime import Run

TINY = (
    "--backbone vit_mini --dataset quilts --alternations 2 --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 "
    "--probe-epochs 0 --eval-every 1 --warmup 0 --lr 1e-2 --epochs 1 --batch 80 --warmup-epochs 0 --seeds 2 --quiet"
)
FILES = ("config.json", "sweep.json", "sweep.png")


class Killed(BaseException):
    """Stands for a kill."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write below the current directory."""
    monkeypatch.chdir(tmp_path)


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


def config(**given: Any) -> SweepConfig:
    table: dict[str, Any] = {"model": {"backbone": "vit_mini"}, "data": {"dataset": "quilts"}}
    for name, value in given.items():
        table.setdefault({"rank": "model", "lr": "peft"}.get(name, "bilevel"), {})[name] = value
    return SweepConfig.model_validate(table)


def test_points_are_ordinary_runs_and_the_table_is_what_evaluate_reads(whole: Path, capsys: Any) -> None:
    result = json.loads((whole / "sweep.json").read_text())
    assert [(row["run"], row["arm"]) for row in result["rows"]] == [
        ("rank-1/finetune", "BiSSLight + PEFT"), ("rank-2/finetune", "BiSSLight + PEFT"),
        ("rank-1/direct", "PEFT"), ("rank-2/direct", "PEFT"),
    ]  # fmt: skip
    assert (result["missing"], result["diverged"], result["swept"]) == ([], {}, {"rank": [1, 2]})
    for rank in (1, 2):
        code, out, _ = run(f"evaluate {whole}/rank-{rank}/finetune --against {whole}/rank-{rank}/direct --json", capsys)
        assert code == 0
        for row, arm in zip(
            (r for r in result["rows"] if r["point"] == {"rank": rank}), json.loads(out)["arms"], strict=True
        ):
            assert [row[key] for key in ("mean", "std", "accuracies")] == [
                arm[key] for key in ("mean", "std", "accuracies")
            ]
        versus = next(r for r in result["rows"] if r["run"] == f"rank-{rank}/finetune")["minus_direct"]
        assert versus == json.loads(out)["arms"][1]["first_minus_this"]
        saved = json.loads((whole / f"rank-{rank}/align/config.json").read_text())
        assert (saved["model"]["rank"], saved["model"]["alpha"]) == (rank, rank)  # scale 1 at every rank
    with Image.open(whole / "sweep.png") as picture:
        assert picture.size[0] > 500


def test_a_saved_config_and_a_list_in_a_file_are_the_same_sweep(whole: Path, weights: Path, capsys: Any) -> None:
    """--dry-run says what there is to do, and writes nothing."""
    Path("lists.toml").write_text(f'rank = [1, 2]\n[model]\nbackbone = "vit_mini"\nweights = "{weights}"\n')
    code, out, _ = run(f"sweep --config lists.toml {TINY.replace('--quiet', '')} --dry-run --json", capsys)
    assert code == 0
    listed = json.loads(out)
    again = json.loads(run(f"sweep --config {whole}/config.json --dry-run --json", capsys)[1])
    assert listed["budget"]["runs"] == again["budget"]["runs"]
    assert listed["settings"]["rank"] == {"value": [1, 2], "source": "file"}
    assert [one["run"] for one in again["budget"]["runs"]] == [
        f"rank-{rank}/{kind}" for rank in (1, 2) for kind in ("align", "finetune")
    ] + ["rank-1/direct", "rank-2/direct"]
    # 2 alternations of 2 + 1 steps; 80 images in batches of 80, one epoch, two seeds
    assert [one["steps"] for one in again["budget"]["runs"]] == [6, 2, 6, 2, 2, 2]
    assert again["budget"]["total"]["steps"] == 20
    code, out, _ = run(f"sweep --config {whole}/config.json --dry-run", capsys)
    assert "rank-2/direct, steps 2" in out
    assert [*Path().iterdir()] == [Path("lists.toml")]


@pytest.mark.parametrize("where", ["between runs", "in the second align run"])
def test_a_killed_sweep_goes_on_to_the_same_table(
    whole: Path, weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    line = f"sweep --rank 1,2 --weights {weights} {TINY} --out s"
    calls, original, save = 0, room.run, Run.save

    def killing(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Killed
        original(*given)

    def saving(self: Run, state: dict[str, Any]) -> None:
        save(self, state)
        if "rank-2" in str(self.path):
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(*((room, "run", killing) if where == "between runs" else (Run, "save", saving)))
        with pytest.raises(Killed):
            cli.run(line.split())
    assert not Path("s/sweep.json").exists()
    first = Path("s/rank-1/finetune/result.json").stat().st_mtime_ns
    code, _, err = run(line, capsys)
    assert (code, err) == (2, "error: --out s: a sweep, --resume continues it, or choose another --out\n")
    assert run(f"{line} --resume", capsys)[0] == 0
    assert Path("s/rank-1/finetune/result.json").stat().st_mtime_ns == first  # not run again
    assert json.loads(Path("s/sweep.json").read_text()) == json.loads((whole / "sweep.json").read_text())
    assert (
        Path("s/rank-2/align/adapter.safetensors").read_bytes()
        == (whole / "rank-2/align/adapter.safetensors").read_bytes()
    )
    assert run(f"{line} --resume", capsys)[0] == 0  # nothing left to do: the table again


def test_shards_together_are_one_process(whole: Path, weights: Path, capsys: Any) -> None:
    line = f"sweep --rank 1,2 --weights {weights} {TINY} --out s"
    code, out, _ = run(f"{line} --shard 1/2", capsys)
    assert code == 0
    assert "points: 2 finished, 0 diverged, 2 missing (rank-1/finetune, rank-1/direct)" in out
    assert sorted(path.name for path in Path("s").iterdir()) == sorted([*FILES, "rank-2"])
    before = {path: path.read_bytes() for path in Path("s/rank-2").rglob("*") if path.is_file()}
    code, out, _ = run(f"{line} --shard 0/2 --resume", capsys)  # its own runs are not there yet: --resume starts them
    assert code == 0
    assert "points: 4 finished, 0 diverged, 0 missing" in out
    assert {path: path.read_bytes() for path in Path("s/rank-2").rglob("*") if path.is_file()} == before
    assert json.loads(Path("s/sweep.json").read_text()) == json.loads((whole / "sweep.json").read_text())
    code, _, err = run(f"{line} --shard 0/2 --lam 0.5", capsys)
    assert (code, err.splitlines()) == (
        2,
        ["error: --out s: is a sweep with other settings: lam 0.001 -> 0.5; choose another --out"],
    )
    assert run(f"{line} --shard 0/2", capsys)[2].startswith("error: s/rank-1/align: is there already, --resume")


def test_who_comes_second_with_other_settings_is_refused(tmp_path: Path) -> None:
    for _ in range(2):
        room.claim(tmp_path, config(rank=[1, 2]))
    with pytest.raises(UsageError, match=r"rank 1 -> 4, swept .*\(1, 2\).* -> .*\(4, 8\)"):
        room.claim(tmp_path, config(rank=[4, 8]))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_run_belongs_to_the_settings_it_depends_on(weights: Path) -> None:
    """λ has one direct run, a PEFT rate one align run, and chains share no directory."""

    def names(**lists: Any) -> list[list[str]]:
        cfg = config(**lists)
        model = cfg.model.model_copy(update={"weights": weights})
        return [
            [item.name for item in chain] for chain in room.plan(cfg.model_copy(update={"model": model}), Path("o"))
        ]

    assert names(lam=[0.1, 1]) == [["lam-0.1/align", "lam-0.1/finetune"], ["lam-1/align", "lam-1/finetune"], ["direct"]]
    assert names(lr="1e-3,1e-2") == [
        ["align", "lr-0.001/finetune", "lr-0.01/finetune"], ["lr-0.001/direct"], ["lr-0.01/direct"],
    ]  # fmt: skip
    two = names(rank=[1, 2], lower_steps=[3, 4])
    assert len(two) == 6
    assert two[1] == ["rank-1-lower-steps-4/align", "rank-1-lower-steps-4/finetune"]
    assert two[-1] == ["rank-2/direct"]
    for n in (1, 2, 3, 7):
        parts = [room.share(two, f"{i}/{n}") for i in range(n)]  # type: ignore[arg-type]
        assert sorted(name for part in parts for names in part for name in names) == sorted(chain.from_iterable(two))


def test_a_point_that_diverges_is_told_and_the_others_go_on(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stages

    align = stages.align
    tried = []

    def diverging(cfg: Any, options: Any) -> Any:
        tried.append(cfg.lower.p_lr)
        if cfg.lower.p_lr == 100:
            options.out.mkdir(parents=True)  # as an align run has done by the time it diverges
            raise Diverged("level P, step 3: the loss is nan")
        return align(cfg, options)

    monkeypatch.setattr(stages, "align", diverging)
    line = f"sweep --p-lr 1e-3,100 --weights {weights} {TINY} --out s"
    code, out, _ = run(line, capsys)
    assert code == 0
    assert "diverged: p-lr-100/align: level P, step 3: the loss is nan" in out
    assert "points: 2 finished, 1 diverged, 0 missing" in out
    assert [row["run"] for row in json.loads(Path("s/sweep.json").read_text())["rows"]] == [
        "p-lr-0.001/finetune",
        "direct",
    ]
    assert run(f"{line} --resume", capsys)[0] == 0
    assert tried == [0.001, 100]  # not tried again


def test_runs_with_other_weights_make_no_table(whole: Path, capsys: Any) -> None:
    env = whole / "rank-2/finetune/env.json"
    text = env.read_text()
    env.write_text(json.dumps(json.loads(text) | {"weights_sha256": "f00"}))
    code, _, err = run(f"sweep --config {whole}/config.json --out {whole} --resume --quiet", capsys)
    env.write_text(text)
    assert code == 2
    assert "rank-2/finetune: has weights_sha256 f00" in err


WRONG = [
    ("--rank 1,2,65", "--rank 65: is larger than the width 64"),
    ("--rank 1,x", "--rank x: should be a valid integer"),
    ("--rank 1,2,", "--rank : should be a valid integer"),
    ("--rank 1,2,1", "--rank 1,2,1: has a value twice"),
    ("--rank 0,1", "--rank 0: should be greater than 0"),
    ("--rank 1,0", "--rank 0: should be greater than 0"),
    ("--lam 0.1,0", "--lam 0: should be greater than 0"),
    ("--d-lr auto,0.1", "--d-lr auto and --d-lr-from RUN belong together"),
    ("--rank 4", "give a comma list to one or two of --rank, --lr,"),
    ("", "not to none"),
    ("--rank 1,2 --lam 0.1,0.2 --p-lr 0.1,0.2", "not to 3"),
    ("--seeds 1,2 --rank 1,2", "Invalid value for '--seeds'"),
    ("--rank 1,2 --shard 2/2", "error: --shard 2/2: is i/n with i from 0 to n - 1"),
    ("--rank 1,2 --shard one", "--shard one: is i/n"),
    ("--rank 1,2 --shard -1/2", "--shard -1/2: is i/n"),
    ("--rank 1,2 --force", "--force: a sweep is not started over"),
    ("--rank 1,2 --resume", "--resume: there is no sweep in new"),
    ("--rank 1,2 --preset as-released", "--preset as-released: its PEFT has one optimiser"),
    ("--rank 1,2 --out full", "--out full: holds something else"),
    ("--rank 1,2 --out run", "--out run: is a run, not a sweep"),
    ("--rank 1,2 --weights nowhere", "nowhere: there is no such file"),
    ("--rank 1,2 --lr-grid", "give --lr or --lr-grid, not both"),
    ("--config wrong.toml", "'epochs' cannot be swept, these can: rank, lr,"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "message"), WRONG)
def test_a_wrong_sweep_gets_one_line_before_anything_is_written(
    weights: Path, capsys: Any, more: str, message: str
) -> None:
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("the user's")
    Path("run").mkdir()
    Path("run/config.json").write_text('{"model": {}}')
    Path("wrong.toml").write_text("[swept]\nepochs = [1, 2]\n")
    before = sorted(Path().rglob("*"))
    code, out, err = run(f"sweep --weights {weights} {TINY} --out new {more}", capsys)
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert message in err
    assert sorted(Path().rglob("*")) == before


def test_the_report_shows_a_half_done_sweep_in_pairs_and_looks_at_the_last_one(whole: Path, capsys: Any) -> None:
    """No p-value across ranks; what is looked at is rank 1, whose aligned and direct runs are both there."""
    shutil.copytree(whole, "s")
    Path("s/sweep.json").unlink()
    Path("s/rank-2/direct/result.json").unlink()
    Path("s/rank-2/finetune/result.json").rename("s/rank-2/finetune.diverged")
    assert cli.run(["report", "s", "--rollout", "2", "--limit", "20", "--quiet"]) == 0
    page = Page(Path("report.html"))
    rows = {row["run"]: row for row in json.loads((whole / "sweep.json").read_text())["rows"]}
    aligned, direct = rows["rank-1/finetune"], rows["rank-1/direct"]
    p = f"{aligned['minus_direct']['p']:.4g}"
    difference = f"{aligned['minus_direct']['difference']:+.2f}"
    means = [f"{row['mean']:.2f} ± {row['std']:.2f}" for row in (aligned, direct)]
    assert page.rows[1:3] == [
        ["1", "BiSSLight + PEFT", means[0], difference, p, "no figure of this setting"],
        ["1", "PEFT", means[1], "", "", "no figure of this setting"],
    ]
    assert "Not finished: rank-2/direct" in page.text
    assert "Diverged: rank-2/finetune" in page.text
    assert "Accuracy" not in page.text.split("Sweep s:")[0]
    alts = [about["alt"] for tag, about in page.tags if tag == "img"]
    looked = next(alt for alt in alts if alt.startswith("Attention rollout"))
    assert looked.index("direct PEFT, seed 0 names") < looked.index("aligned + PEFT, seed 0 names")
    assert not any("rank-2" in alt for alt in alts)


def test_a_shard_that_was_killed_is_told_to_go_on(whole: Path, weights: Path, capsys: Any) -> None:
    code, _, err = run(f"sweep --rank 1,2 --weights {weights} {TINY} --out {whole} --shard 0/2", capsys)
    assert (code, err.count("--force")) == (2, 0)
    assert "rank-1/align: is there already, --resume continues it" in err
