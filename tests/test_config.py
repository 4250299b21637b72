"""Settings: recorded defaults, what follows from what, what wins, and what is refused."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import fixture
from pydantic import ValidationError
from toy import refusal

import cli
from config import (
    ALIGNED_RATES,
    COMPUTING,
    OPEN,
    PLACES,
    SEED_SETTINGS,
    AlignConfig,
    Command,
    FinetuneConfig,
    PretrainConfig,
    Record,
)
from support.errors import UsageError

KINDS: dict[str, type[Command]] = {
    "align": AlignConfig,
    "finetune": FinetuneConfig,
    "finetune --from": FinetuneConfig,
    "pretrain": PretrainConfig,
}
# one whole table a command, and of every other key what differs from it
RECORDED: dict[str, Any] = json.loads(fixture("defaults.json").read_text())
NO_SETTINGS = {"d_lr_from", "jobs", "lr", "contexts", "context_scale", "overlap"}  # any more
BASE = "vit_b16 mae dtd paper"
B16: Record = {"backbone": "vit_b16", "dataset": "dtd"}
SHORTER: dict[bool, Record] = {  # what vit_mini's lengths and batch sizes are, by: pretraining
    False: {
        "alternations": 100, "lower_steps": 10, "upper_steps": 5, "p_batch": 64, "d_batch": 32,
        "epochs": 60, "batch": 32,
    },
    True: {"epochs": 30, "warmup_epochs": 4, "batch": 64},
}  # fmt: skip


def settle(kind: type[Command], flags: Record, preset: Any = "paper") -> Command:
    """Settings as the command line makes them."""
    return cli.collect(kind, flags, cli.Options(preset=preset))


def write_align_run(path: Path, cfg: Command) -> Path:
    """The settings of an align run, where `finetune --from` looks for them."""
    path.mkdir()
    settings = {"command": "align"} | cfg.model_dump(mode="json")
    (path / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    ("command", "key"), [(command, key) for command in KINDS for key in RECORDED[command]]
)
def test_every_default_and_both_presets_are_as_recorded(
    command: str, key: str, tmp_path: Path
) -> None:
    """From Python and from the command line."""
    expected = RECORDED[command][BASE] | RECORDED[command][key]
    expected = {name: expected[name] for name in expected.keys() - NO_SETTINGS}
    if command == "pretrain":
        del expected["data_seed"]  # it splits nothing
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
        shorter = SHORTER[command == "pretrain"]
        expected |= {name: value for name, value in shorter.items() if name in expected}
    found = settings.model_dump(mode="json")
    if isinstance(settings, AlignConfig | FinetuneConfig):
        found["alpha"] = settings.scale * settings.rank  # recorded as that number
    found["grid"] = found.get("lr")  # recorded under that name
    assert {name: found[name] for name in expected} == expected


def test_what_depends_on_another_setting_follows_it() -> None:
    """And a given value stays."""
    align = AlignConfig(**B16)
    assert align.replace(rank=3).scale == 1
    assert align.replace(backbone="vit_l16").drop_path == 0.2
    assert AlignConfig(**B16, drop_path=0.4).replace(backbone="vit_l16").drop_path == 0.4
    assert align.replace(pretext="ijepa") == AlignConfig(**B16, pretext="ijepa")
    assert FinetuneConfig(**B16, lr="1e-3,3e-3").lr == (0.001, 0.003)
    assert FinetuneConfig(**B16).replace(start=Path("run")).lr == ALIGNED_RATES
    assert FinetuneConfig(**B16).model_fields_set == {"backbone", "dataset"}
    given: Record = {"backbone": "vit_b16", "pretext": "ijepa", "pool": "/photos"}
    assert PretrainConfig(**given).final_weight_decay == 0.4
    assert PretrainConfig(**given, final_weight_decay=None).final_weight_decay is None


def test_from_align_takes_the_network_and_the_images_of_the_run(tmp_path: Path) -> None:
    given = {"rank": 3, "partial": True, "data_seed": 5, "data_root": tmp_path}
    align = AlignConfig(**B16 | given)
    run = write_align_run(tmp_path / "run", align)
    for change in (align.replace, partial(FinetuneConfig.from_align, run)):
        with pytest.raises(ValidationError, match="epocs"):  # a misspelt setting
            change(epocs=3)
    cfg = FinetuneConfig.from_align(run, lr=[0.1])
    assert cfg == settle(FinetuneConfig, {"start": str(run), "lr": "0.1"})
    taken = {"rank", "dataset", "partial", "data_seed", "data_root", "scale"}
    assert {name: getattr(cfg, name) for name in taken} == {n: getattr(align, n) for n in taken}
    assert FinetuneConfig.from_align(tmp_path, rank=4).rank == 4  # the first of a folder of runs
    other = FinetuneConfig.from_align(run, dataset="pets")  # it has lists of its own
    assert (other.partial, other.data_seed) == (False, 5)  # images that were moved are split alike
    file = run / "adapter.safetensors"
    file.touch()
    assert FinetuneConfig.from_align(file).rank == 3  # of the run that the file lies in
    (run / "config.json").unlink()
    assert FinetuneConfig.from_align(file, **B16).rank == 64
    assert "/none: is not here" in refusal(f"finetune --from {tmp_path}/none --out {tmp_path}/run")


def test_what_differs_from_the_paper_is_judged_by_backbone_and_pretext_task() -> None:
    assert AlignConfig(**B16, seed=1, d_lr=0.1, hypergrad="cg").unlike_paper() == {}
    assert AlignConfig(**B16, pretext="ijepa").unlike_paper() == {}
    assert AlignConfig(backbone="vit_l16", dataset="dtd").unlike_paper() == {}
    assert AlignConfig(backbone="timm:vit_large_patch16_224.mae", dataset="dtd").drop_path == 0.2
    assert AlignConfig(**B16, rank=8, lam=0.1).unlike_paper() == {
        "rank": (8, 64),
        "lam": (0.1, 1e-3),
    }
    mini = AlignConfig(backbone="vit_mini", dataset="quilts").unlike_paper()
    assert mini.keys() & {"rank", "alternations", "pool"} == {"rank", "alternations", "pool"}


def test_flags_win_over_a_file_over_a_preset_over_the_align_run(tmp_path: Path) -> None:
    align = AlignConfig(backbone="vit_mini", dataset="quilts", pretext="ijepa", rank=3)
    run = write_align_run(tmp_path / "run", align)
    file = tmp_path / "c.toml"
    file.write_text(f'start = "{run}"\nepochs = 13\nweight_decay = 0.1\nvoc_difficult = "ignore"')
    options = cli.Options(config=file, preset="as-released")
    cfg = cli.collect(FinetuneConfig, {"epochs": 14}, options)
    expected = {
        "epochs": 14, "weight_decay": 0.1, "voc_difficult": "ignore", "optimizer": "sgd", "rank": 3,
        "head": "batchnorm", "batch": 32, "lr": ALIGNED_RATES,
    }  # fmt: skip
    assert {name: getattr(cfg, name) for name in expected} == expected


def test_a_file_of_settings_is_one_of_mine_or_of_a_run_and_its_mistakes_are_named_with_it(
    tmp_path: Path,
) -> None:
    """A run's config.json has its command and digests, too, which are no settings."""
    file = tmp_path / "config.json"
    options = cli.Options(config=file)
    text = '{"command": "align", "rank": 3, "pool_sha256": "0", "images": {}}'
    file.write_text(text, "utf-8-sig")  # as an editor of Windows does
    assert cli.collect(AlignConfig, dict(B16), options).rank == 3
    wrong = {"a.json": '{"alternation": 7}', "b.json": "[1]", "c.toml": "lr = 1\nlr = 2"}
    for name, text in wrong.items():
        (tmp_path / name).write_text(text)
    for name in (*wrong, "nothere.toml"):
        with pytest.raises(UsageError, match=f"--config {tmp_path}/{name}: ") as refused:
            cli.collect(AlignConfig, dict(B16), cli.Options(config=tmp_path / name))
        assert name != "a.json" or "mean alternations" in str(refused.value)


def test_fine_tuning_does_not_start_from_a_pretrain_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"command": "pretrain", "backbone": "vit_mini"}')
    said = "is a pretrain run, .*give it as --weights"
    with pytest.raises(UsageError, match=said):
        cli.collect(FinetuneConfig, {"start": tmp_path}, cli.Options())


def test_the_default_directory_says_what_a_run_starts_from() -> None:
    tuned = FinetuneConfig(**B16, seed=2)
    for cfg, name in (
        (tuned, "finetune-dtd-vit_b16-r64-s2"),
        (tuned.replace(start="/runs/align-a"), "finetune-dtd-vit_b16-from-align-a-r64-s2"),
        (PretrainConfig(backbone="vit_b16", pool="/photos"), "pretrain-vit_b16-s0"),
        (tuned.replace(backbone="timm:a/b"), "finetune-dtd-b-r64-s2"),
    ):
        assert cli.default_out(cfg) == Path("runs", name)


def test_a_setting_in_no_list_is_compared_with_the_paper_and_between_runs() -> None:
    """And each name in a list is one of a setting: a misspelt one would compare nothing less."""

    class More(Command):
        forgotten: int = 0

    assert More(forgotten=1).unlike_paper() == {"forgotten": (1, 0)}
    names = {*AlignConfig.model_fields, *FinetuneConfig.model_fields}
    assert names >= COMPUTING | OPEN | PLACES | SEED_SETTINGS


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (AlignConfig, {"lam": -1}, "^--lam: "),
        (AlignConfig, {"backbone": "vit_mni"}, "--backbone: vit_mni .*did you mean vit_mini"),
        (AlignConfig, {"backbone": "resnet18"}, "timm:NAME; .* timm:vit_tiny"),
        (AlignConfig, {"backbone": "timm:a", "pretext": "ijepa"}, "^--pretext, decoder: timm:a "),
        (AlignConfig, {"pretext": "rotation:Rotation"}, "--pretext"),
        (AlignConfig, {"jobs": 2}, "--jobs"),
        (AlignConfig, {"alternations": 8}, "^--alternations 8: .* add --warmup 0,"),
        (FinetuneConfig, {"epochs": 2}, "^--epochs 2: .* add --warmup-epochs 0,"),
        (FinetuneConfig, {"epochs": True}, "--epochs: "),  # TOML's true is no 1
        (FinetuneConfig, {"grid_seeds": 9}, "--grid-seeds 9: .* --seeds 8"),
        (FinetuneConfig, {"lr": "0,001"}, "--lr: "),
        # an empty place is not the folder that one is in
        (AlignConfig, {"dataset": ""}, "--dataset: "),
        (FinetuneConfig, {"dataset": "folder:"}, "--dataset: "),
        (FinetuneConfig, {"start": ""}, "--from: "),
    ],
)
def test_settings_refuse(kind: type[Command], wrong: Record, named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        kind(**B16 | wrong)
    (line,) = cli.explain(refused.value)
    assert re.search(named, line)


def test_pretraining_may_be_as_long_as_its_warmup_and_has_no_seed_of_splits() -> None:
    """It splits nothing, so a seed of splits would make another run of the same numbers."""
    given: Record = {"backbone": "vit_mini", "pool": "/photos"}
    PretrainConfig(**given, epochs=4)  # the warm-up has 4 epochs
    for name, value in (("epochs", 3), ("data_seed", 5)):
        with pytest.raises(ValidationError, match=name):
            PretrainConfig(**given, **{name: value})


def test_settings_mean_the_same_in_another_directory_and_read_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = FinetuneConfig(**B16, start="nowhere")
    assert (cfg.start, cfg.data_root) == (tmp_path / "nowhere", tmp_path / "data")
    named = AlignConfig(**B16).replace
    assert named(pool="folder:pics").pool == named(pool="pics").pool == f"folder:{tmp_path}/pics"
    assert named(dataset="folder:pics").dataset == f"folder:{tmp_path}/pics"
    assert named(dataset="own", pool="own").pool == "own"
    assert named(weights="~nosuchuser/w.pth").weights == tmp_path / "~nosuchuser/w.pth"
    monkeypatch.chdir("/")
    assert cfg.replace(seed=1).start == tmp_path / "nowhere"
    with pytest.raises(ValidationError) as refused:
        FinetuneConfig(start=tmp_path)  # type: ignore[call-arg]
    assert refused.value.errors()[0]["loc"] == ("backbone",)


def test_a_task_of_ones_own_has_the_defaults_of_photographs_and_not_those_of_handwriting() -> None:
    """As the guide says of dataset="own": defaults follow the name of the data set."""
    names = ("augment", "weights", "pool")
    own, photos, handwriting = (
        AlignConfig(backbone="vit_mini", dataset=name).model_dump(include={*names})
        for name in ("own", "folder:/photos", "omniglot:Greek")
    )
    assert own == photos
    assert all(own[name] != handwriting[name] for name in names)
