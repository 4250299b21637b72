"""The demo with two seeds and hardly any steps; what the figures of its full run are."""

import csv
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from toy import call, read_records

import experiments.demo
from align import new_pretext_task
from config import AlignConfig
from evaluate import Evaluation
from extras import demo
from support.adapters import find_adapters
from support.checkpoints import find_weights
from support.errors import UsageError
from support.experiment import open_experiment, pretext_batches
from support.files import sha256

EPOCHS = 2


class Made(NamedTuple):
    """A demo that has ended."""

    out: Path
    result: Evaluation
    settings: dict[str, Any]  # of each align run


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Two seeds and hardly any steps, in the forked second process, too."""
    torch.set_num_threads(1)  # threads do not survive a fork
    few = {"alternations": 2, "warmup": 1, "probe_epochs": 1, "lower_steps": 2, "upper_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "get_context", lambda _: multiprocessing.get_context("fork"))
        patch.setattr(demo, "SEEDS", 2)
        patch.setattr(demo, "ALIGN", demo.ALIGN | few)
        patch.setattr(demo, "PEFT", demo.PEFT | {"epochs": EPOCHS, "warmup_epochs": 0})
        yield


@pytest.fixture(scope="module")
def made(short: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A whole short demo."""
    out = tmp_path_factory.mktemp("demo")
    return Made(out, demo.demo(out), demo.ALIGN)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.slow
def test_the_demo_compares_three_arms_of_ordinary_runs_in_a_picture(made: Made) -> None:
    assert [(arm.arm, len(arm.accuracies), arm.unit) for arm in made.result.arms] == [
        ("aligned", 2, "2 x align (2 seeds), 2 x finetune (2 seeds)"),
        ("direct", 2, "2 x finetune (2 seeds)"),
        ("restart", 2, "2 x finetune (2 seeds), 2 x finetune (2 seeds)"),
    ]
    with Image.open(made.out / "demo.png") as picture:
        assert picture.size[0] > 1000


@pytest.mark.slow
def test_each_seed_has_an_align_run_and_a_restart_begins_where_direct_ended(made: Made) -> None:
    settings = [read(made.out / f"align/s{seed}/config.json") for seed in range(2)]
    assert [one["seed"] for one in settings] == [0, 1]
    assert (made.settings | {"lam": 0.001}).items() <= settings[0].items()
    again = read(made.out / "restart/lr0.01-s101/config.json")
    assert again["start_sha256"] == sha256(find_adapters(made.out / "direct")[1])


@pytest.mark.slow
def test_the_script_prints_what_each_run_was_tested_with_and_how_long_it_took(made: Made) -> None:
    out = made.out
    rows = [*csv.reader(call(experiments.demo, str(out)).splitlines())][1:]
    assert [(arm, int(seed)) for arm, seed, *_ in rows] == [
        ("aligned", 0), ("aligned", 1), ("direct", 0), ("direct", 1), ("restart", 100),
        ("restart", 101),
    ]  # fmt: skip
    for arm, seed, epoch, at_chosen, at_last, before, own in rows:
        tests = [line["test"] for line in read_records(out / arm / f"lr0.01-s{seed}")]
        expected = [tests[int(epoch) - 1]["accuracy"], tests[EPOCHS - 1]["accuracy"]]
        assert [float(at_chosen), float(at_last)] == pytest.approx(expected, abs=0.005)
        took = read(out / arm / f"lr0.01-s{seed}/result.json")["cpu_seconds"]
        assert float(own) == pytest.approx(took, abs=0.05)
        took = 0.0
        if arm == "aligned":
            took = read(out / f"align/s{seed}/result.json")["cpu_seconds"]
        if arm == "restart":  # one seed's part of the whole run of two seeds
            took = read(out / "direct/result.json")["cpu_seconds"] / 2
        assert float(before) == pytest.approx(took, abs=0.05)
    tested = [value for arm in made.result.arms for value in arm.accuracies]
    assert sorted(float(row[3]) for row in rows) == pytest.approx(sorted(tested), abs=0.005)


def test_a_folder_of_something_else_is_no_place_for_the_demo(tmp_path: Path) -> None:
    (tmp_path / "roses").mkdir()
    with pytest.raises(UsageError, match="holds roses"):
        demo.demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["roses"]


def test_the_backbone_that_comes_with_the_program_fills_in_characters() -> None:
    """Zeros have a loss of 0.33, as most patches are blank; the pretraining ended at 0.27."""
    m = open_experiment(AlignConfig(backbone="vit_mini", dataset="omniglot:Greek"))
    size = m.networks.arch.image_size
    weights = find_weights(m.cfg)
    assert weights is not None and weights.stat().st_size < 800_000
    assert m.pool is not None
    task = new_pretext_task(m, m.new_theta(0))
    batch = next(pretext_batches(task, m.pool, size, 500, range(1), m.cfg, m.device))
    assert 0.2 < task.loss(None, task.phi, batch) < 0.3
