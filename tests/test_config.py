"""Settings: recorded defaults, what follows from what, what wins, marks, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import fixture
from pydantic import ValidationError
from toy import refusal

import cli
from config import (
    ALIGNED_GRID,
    AlignConfig,
    ChangesNoNumber,
    Command,
    FinetuneConfig,
    KnownByDigest,
    LeftOpenByPaper,
    PretrainConfig,
    Record,
    SameArm,
    Settings,
    make,
    paper_values,
    settings_not_compared_with_paper,
    settings_with,
    unlike_paper,
)
from evaluate import MAY_DIFFER_IN_ARM
from extras.dry_run import list_unlike_paper
from support.errors import UsageError
from support.runs import may_change

KINDS: dict[str, type[Command]] = {
    "align": AlignConfig,
    "finetune": FinetuneConfig,
    "finetune --from": FinetuneConfig,
    "pretrain": PretrainConfig,
}
# one whole table a command, and of every other key what differs from it
RECORDED: dict[str, Any] = json.loads(fixture("defaults.json").read_text())
BASE = "vit_b16 mae dtd paper"
B16: Record = {"backbone": "vit_b16", "dataset": "dtd"}
SHORTER = {  # what vit_mini's lengths and batch sizes are today
    "alternations": 100, "lower_steps": 10, "upper_steps": 5, "p_batch": 64, "d_batch": 32,
    "epochs": 60, "batch": 32,
}  # fmt: skip
SHORTER_PRETRAINING = {"epochs": 30, "warmup_epochs": 4, "batch": 64}


def settle(kind: type[Command], flags: Record, preset: str = "paper") -> Command:
    """Settings as the command line makes them."""
    return cli.collect_settings(kind, flags, make(cli.Options, {"preset": preset}))


def write_align_run(path: Path, cfg: Command) -> Path:
    """The settings of an align run, where `finetune --from` looks for them."""
    path.mkdir()
    (path / "config.json").write_text(cfg.model_dump_json())
    return path


@pytest.mark.parametrize(
    ("command", "key"), [(command, key) for command in KINDS for key in RECORDED[command]]
)
def test_every_default_and_both_presets_are_as_recorded(
    command: str, key: str, tmp_path: Path
) -> None:
    """From Python and from the command line."""
    expected = RECORDED[command][BASE] | RECORDED[command][key]
    expected.pop("d_lr_from", None)  # the search for a rate is no setting any more
    backbone, pretext, dataset, preset = key.split()
    kind = KINDS[command]
    given: Record = {"backbone": backbone, "pretext": pretext}
    if command == "pretrain":
        given["pool"] = "quilts" if dataset == "quilts" else str(tmp_path)
    else:
        given["dataset"] = dataset
    if command == "finetune --from":
        start = settle(AlignConfig, given, preset)
        given = {"start": write_align_run(tmp_path / "run", start)}
    settings = settle(kind, given, preset)
    if preset == "paper" and command != "finetune --from":
        assert settings == kind(**given)
    if backbone == "vit_mini":
        shorter = SHORTER_PRETRAINING if command == "pretrain" else SHORTER
        expected |= {name: value for name, value in shorter.items() if name in expected}
    found = json.loads(settings.model_dump_json())
    if isinstance(settings, AlignConfig | FinetuneConfig):
        found["alpha"] = settings.scale * settings.rank  # recorded as a number
    assert {name: found[name] for name in expected} == expected


def test_what_depends_on_another_setting_follows_it() -> None:
    """The scale stays 1 with any rank, one rate is a grid of one, and a given value stays."""
    align = AlignConfig(**B16)
    assert align.replace(rank=3).scale == 1
    assert AlignConfig(**B16, alpha=2.0).replace(rank=4).scale == 0.5
    assert align.replace(backbone="vit_l16").drop_path == 0.2
    assert AlignConfig(**B16, drop_path=0.4).replace(backbone="vit_l16").drop_path == 0.4
    assert align.replace(pretext="ijepa") == AlignConfig(**B16, pretext="ijepa")
    assert FinetuneConfig(**B16, lr=0.1).replace(lr=0.2).grid == (0.2,)
    assert FinetuneConfig(**B16).replace(start=Path("run")).grid == ALIGNED_GRID
    assert FinetuneConfig(**B16).model_fields_set == {"backbone", "dataset"}


def test_a_misspelt_setting_is_named_before_anything_runs(tmp_path: Path) -> None:
    align = AlignConfig(**B16)
    run = write_align_run(tmp_path / "run", align)
    for change in (align.replace, partial(FinetuneConfig.from_align, run)):
        with pytest.raises(UsageError, match="--epocs: "):
            change(epocs=3)
    with pytest.raises(UsageError, match="--lam -1"):
        align.replace(lam=-1)


def test_settings_read_no_disk_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BISSLIGHT_DATA", "/elsewhere")
    cfg = FinetuneConfig(**B16, start="nowhere")
    assert (cfg.start, cfg.data_root) == (tmp_path / "nowhere", tmp_path / "data")
    monkeypatch.chdir("/")
    assert cfg.replace(seed=1).start == tmp_path / "nowhere"
    with pytest.raises(ValidationError) as refused:
        FinetuneConfig(start=tmp_path)  # type: ignore[call-arg]
    assert refused.value.errors()[0]["loc"] == ("backbone",)


def test_from_align_takes_the_network_and_the_images_of_the_run(tmp_path: Path) -> None:
    align = AlignConfig(
        backbone="vit_mini", dataset="dtd", rank=3, partial=True, data_seed=5, data_root=tmp_path
    )
    run = write_align_run(tmp_path / "run", align)
    cfg = FinetuneConfig.from_align(run, lr=0.1)
    assert cfg == settle(FinetuneConfig, {"start": str(run), "lr": "0.1"})
    taken = {"rank", "dataset", "partial", "data_seed", "data_root", "scale"}
    assert {name: getattr(cfg, name) for name in taken} == {n: getattr(align, n) for n in taken}
    assert FinetuneConfig.from_align(tmp_path, rank=4).rank == 4  # the first of a folder of runs
    other = FinetuneConfig.from_align(run, dataset="pets")  # its splits are its own
    assert (other.partial, other.data_seed) == (False, 0)
    peft = write_align_run(tmp_path / "peft", cfg)
    assert FinetuneConfig.from_align(peft, restart=True).restart
    for path in (tmp_path / "nowhere", peft):
        with pytest.raises(UsageError, match="--from"):
            FinetuneConfig.from_align(path)


def test_a_start_that_is_nothing_is_named_with_the_command_that_makes_one(tmp_path: Path) -> None:
    said = refusal(f"finetune --from {tmp_path}/none --out {tmp_path}/run")
    assert f"--from {tmp_path}/none" in said and "bisslight align" in said


def test_the_papers_values_are_those_of_the_backbone_and_the_pretext_task() -> None:
    values = paper_values(AlignConfig, {"backbone": "vit_l16", "pretext": "ijepa"})
    assert (values["drop_path"], values["head"], values["pool"]) == (0.2, "batchnorm", "imagenet")
    assert unlike_paper(AlignConfig(**B16, seed=1, d_lr=0.1, hypergrad="cg")) == {}
    assert unlike_paper(AlignConfig(**B16, rank=8, alpha=8)).keys() == {"rank"}
    assert unlike_paper(AlignConfig(**B16, lam=0.1, alpha=8)) == {"lam": 0.1, "alpha": 8}
    mini = unlike_paper(AlignConfig(backbone="vit_mini", dataset="quilts"))
    assert mini.keys() & {"rank", "alternations", "pool"} == {"rank", "alternations", "pool"}


def test_flags_win_over_a_file_over_a_preset_over_the_align_run(tmp_path: Path) -> None:
    align = AlignConfig(backbone="vit_mini", dataset="quilts", pretext="ijepa", rank=3)
    run = write_align_run(tmp_path / "run", align)
    file = tmp_path / "c.toml"
    file.write_text(f'start = "{run}"\nepochs = 3\nweight-decay = 0.1\nvoc_difficult = "ignore"')
    options = make(cli.Options, {"config": file, "preset": "as-released"})
    cfg = cli.collect_settings(FinetuneConfig, {"epochs": "4"}, options)
    expected = {
        "epochs": 4,
        "weight_decay": 0.1,
        "voc_difficult": "ignore",
        "optimizer": "sgd",
        "rank": 3,
        "head": "batchnorm",
        "batch": 32,
        "grid": ALIGNED_GRID,
    }
    assert {name: getattr(cfg, name) for name in expected} == expected
    rows = {row["setting"]: row for row in list_unlike_paper(cfg)}
    assert (rows["epochs"]["value"], rows["epochs"]["recipe"]) == (4, 200)
    assert rows["epochs"]["from"] != rows["batch"]["from"]  # a flag, and a default of vit_mini
    assert rows.keys().isdisjoint({"head", "seed", "voc_difficult", "warmup_epochs"})


def test_a_setting_without_a_mark_defines_run_arm_and_method() -> None:
    """And a mark says what another value leaves alone."""

    class Marked(Command):
        forgotten: int = 0
        place: KnownByDigest[int] = 0
        processes: ChangesNoNumber[int] = 0
        repeated: SameArm[int] = 0
        searched: LeftOpenByPaper[int] = 0

    own = Marked.model_fields.keys() - Command.model_fields.keys()
    assert may_change(Marked) & own == {"place", "processes"}
    assert settings_with(Marked, *MAY_DIFFER_IN_ARM) & own == {"place", "processes", "repeated"}
    assert own - settings_not_compared_with_paper(Marked) == {"forgotten"}


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (AlignConfig, {"lam": -1}, "--lam -1: "),
        (AlignConfig, {"aspect": (2, 1)}, "--aspect: "),
        (AlignConfig, {"hypergrad": "newton"}, "--hypergrad newton: "),
        (AlignConfig, {"dataset": "cub"}, "--dataset cub: .* did you mean cub200"),
        (AlignConfig, {"jobs": 2}, "--jobs"),
        (FinetuneConfig, {"grid": [0.01, 0.010000001]}, "--grid: .* twice"),
        (AlignConfig, {"target_scale": "0.2", "pretext": "ijepa"}, "--target-scale.*: .* few"),
        (FinetuneConfig, {"lr": 0.1, "grid": [0.1, 0.2]}, "--lr .*--grid"),
        (FinetuneConfig, {"grid_seeds": 9}, "--grid-seeds 9: .* --seeds 8"),
        (FinetuneConfig, {"dataset": None}, "--dataset: "),
    ],
)
def test_settings_refuse(kind: type[Settings], wrong: Record, named: str) -> None:
    with pytest.raises(ValidationError):
        kind(**B16 | wrong)
    with pytest.raises(UsageError, match=named):
        make(kind, B16 | wrong)


def test_names_keep_their_meaning_in_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def named(**given: object) -> AlignConfig:
        return AlignConfig(**B16 | given)

    assert named(pretext="rotation.py:Rotation").pretext == f"{tmp_path}/rotation.py:Rotation"
    assert named(pretext="rotation:Rotation").pretext == "rotation:Rotation"
    assert named(pretext="folder:x.py:Class").pretext == f"{tmp_path}/folder:x.py:Class"
    assert named(pool="folder:pics").pool == named(pool="pics").pool == str(tmp_path / "pics")
    assert named(dataset="folder:pics").dataset == f"folder:{tmp_path}/pics"
    assert named(dataset="own:123", pool="own:456").pool == "own:456"
    own = named(pretext="rotation.py:Rotation")
    assert own.replace(pretext="mae") == named()  # its defaults are MAE's


@pytest.mark.parametrize("name", ["dataset", "pool", "weights"])
def test_an_empty_place_is_not_the_folder_that_one_is_in(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        AlignConfig(**{"backbone": "vit_mini", "dataset": "dtd", name: ""})


def test_out_may_begin_with_the_home_folder() -> None:
    assert cli.Options(out=Path("~/x")).out == Path.home() / "x"
