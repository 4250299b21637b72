"""Defaults against those of the first edition, layers of settings, and what settings refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import fixture
from pydantic import ValidationError

import cli
from cli import settle
from config import ALIGNED_GRID, AlignConfig, FinetuneConfig, Settings
from extras import SWEPT, SweepConfig, plan
from extras.pretrain import PretrainConfig

KINDS: dict[str, Any] = {
    "align": AlignConfig,
    "finetune": FinetuneConfig,
    "finetune --from": FinetuneConfig,
    "pretrain": PretrainConfig,
    "sweep": SweepConfig,
}
RECORDED: dict[str, Any] = json.loads(fixture("defaults.json").read_text())
BASE = "vit_b16 mae dtd paper"
NAMED = {"backbone", "dataset", "pretext", "weights", "data_root", "start", "swept", "p_lr"}


@pytest.mark.parametrize(
    ("command", "key"), [(command, key) for command in KINDS for key in RECORDED[command]]
)
def test_every_default_and_both_presets_are_those_of_the_first_edition(
    command: str, key: str, tmp_path: Path
) -> None:
    """From Python and from the command line; vit_mini's lengths and batch sizes alone differ.

    The JSON holds one whole table a command, and of the others what differs from it.
    """
    expected = RECORDED[command][BASE] | RECORDED[command][key]
    kind, (backbone, pretext, dataset, name) = KINDS[command], key.split()
    given: dict[str, Any] = {"backbone": backbone, "pretext": pretext, "dataset": dataset}
    if command == "pretrain":
        given["pool"] = "quilts" if given.pop("dataset") == "quilts" else str(tmp_path)
    if command == "sweep":
        given["swept"] = {"p_lr": (0.01, 0.02)}
    root, run = {"data_root": tmp_path}, tmp_path / "run"
    for folder in ("imagenet", "dtd", "run"):
        (tmp_path / folder).mkdir()
    if command == "finetune --from":
        start = settle(AlignConfig, given | root, base=name)[0]
        (run / "config.json").write_text(start.model_dump_json())
        given = {"start": run}
    made = settle(kind, given | root, base=name)[0]
    assert name != "paper" or made == kind(**given | root)
    found = json.loads(made.model_dump_json())
    assert found.keys() - expected.keys() <= NAMED | {"workers", "pool"}
    if "vit_mini" in key:
        sizes = {"rank", "drop_path"}  # as in the first edition
        own = kind.usual["vit_mini"].items()
        shorter = {key: v for key, v in own if key in kind.model_fields.keys() - sizes}
        assert {key: found[key] for key in shorter} == shorter
        assert not [key for key in shorter if "lr" in key or "decay" in key or "ratio" in key]
        expected |= shorter
    assert {key: found[key] for key in expected} == expected


def test_what_depends_on_another_setting_follows_it() -> None:
    """The scale stays 1 with any rank, and one rate is a grid of one."""
    given = {"backbone": "vit_b16", "dataset": "dtd"}
    assert AlignConfig(**given, rank=4).alpha == AlignConfig(**given).but(rank=4).alpha == 4
    assert AlignConfig(**given, alpha=2.0).but(rank=4).alpha == 2
    assert FinetuneConfig(**given, lr=0.1).grid == (0.1,)
    assert FinetuneConfig(**given, lr=0.1).but(lr=0.2).grid == (0.2,)
    assert FinetuneConfig(**given).model_fields_set == {"backbone", "dataset"}


def test_sources_say_who_set_a_value_and_the_later_layer_wins(tmp_path: Path) -> None:
    """Flag over file over preset over align run over what the pretext task sets; the paper's."""
    run = tmp_path / "run"
    run.mkdir()
    given = {"backbone": "vit_mini", "dataset": "quilts", "pretext": "ijepa"}
    start = AlignConfig(**given, min_crop=0.4, rank=3)
    (run / "config.json").write_text(start.model_dump_json())
    file = tmp_path / "c.toml"
    lines = f'start = "{run}"', "epochs = 3", "weight-decay = 0.1", 'voc_difficult = "ignore"'
    file.write_text("\n".join(lines))
    rows = plan.table(*settle(FinetuneConfig, {"epochs": 4}, file, "as-released"), every=True)
    told = {row["setting"]: (row["value"], row["set by"], row["paper"]) for row in rows}
    assert told["warmup_epochs"] == (5, "default", 5)  # the field's own default
    wanted = {
        "epochs": (4, "flag", 200),
        "weight_decay": (0.1, str(file), 0.0005),
        "voc_difficult": ("ignore", str(file), "ignore"),
        "optimizer": ("sgd", "preset as-released", "adamw"),
        "drop_path": (0.2, "preset as-released", 0.1),
        "min_crop": (0.4, "align run", 0.3),
        "rank": (3, "align run", 64),
        "head": ("batchnorm", "align run", "batchnorm"),
        "batch": (32, "short, for vit_mini", 256),
        "grid": (ALIGNED_GRID, "default", ALIGNED_GRID),
    }
    assert wanted.items() <= told.items()


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (AlignConfig, {"lam": float("inf")}, "finite"),
        (AlignConfig, {"seed": 2**53}, "less than"),
        (AlignConfig, {"pool": "quilts", "aspect": (2, 1)}, "give the smaller number first"),
        (AlignConfig, {"pool": "quilts", "rank": True}, "rank: needs a value, not true or false"),
        (FinetuneConfig, {"grid": [True, 0.1]}, "grid: needs a value, not true or false"),
        (FinetuneConfig, {"grid_seeds": 9}, "is more than --seeds 8"),
    ],
)
def test_settings_refuse(kind: type[Settings], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**{"backbone": "vit_b16", "dataset": "dtd"} | wrong)
    assert message in str(caught.value)


def test_a_pretext_task_of_ones_own_has_maes_defaults() -> None:
    given = {"backbone": "vit_b16", "dataset": "dtd"}
    own = AlignConfig(**given, pretext="rotation.py:Rotation")
    assert own.pretext == f"{Path.cwd() / 'rotation.py'}:Rotation"
    assert own.but(pretext="mae") == AlignConfig(**given)
    assert AlignConfig(**given, pretext="rotation:Rotation").pretext == "rotation:Rotation"


def test_every_setting_says_what_it_is_and_a_name_means_one_thing() -> None:
    for name, kind in KINDS.items():
        texts = {x.name: x.annotation.__metadata__[0].help for x in cli.keywords(name.split()[0])}
        assert all(texts.get(key) for key in kind.model_fields.keys() - {"swept"})
        assert ("pool" in texts.get("epochs", "")) == (name == "pretrain")  # of its own class
    assert {*SWEPT} <= {*SweepConfig.model_fields}
