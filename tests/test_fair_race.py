"""The fair race: its analysis on simulated runs, and that its arms are what the commands do."""

import re
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from toy import call

from align import align
from config import AlignConfig, FinetuneConfig
from experiments import fair_race, fair_race_plan
from experiments import fair_race_analysis as analysis
from experiments.fair_race_plan import BACKBONES, CANDIDATES, CHOICE, RACE, Arm, Cell, Run
from finetune import finetune
from support.adapters import load_adapter


def simulate(gains: dict[str, float], rounds: int, seed: int) -> list[Run]:
    """Runs of whole rounds, in which each arm gains so much; a backbone may suit an arm.

    Deviations of cells, 5.0, and of runs, 4.2, are as once measured.
    """
    random = Random(seed)
    own = {pair: random.gauss(0, 1.0) for pair in product(analysis.NAMES, BACKBONES)}
    runs = []
    for cell in RACE[: rounds * len(BACKBONES)]:
        task = 45 + random.gauss(0, 5.0)
        for name in analysis.NAMES:
            noise = own[name, cell.backbone] + random.gauss(0, 4.2)
            accuracy = task + gains.get(name, 0.0) + noise
            runs.append(Run(name, Arm(0.03, 95), cell, 168, {95: accuracy}, accuracy, 1.0))
    return runs


def test_intervals_hold_what_was_planted_in_about_95_of_100_simulated_studies() -> None:
    held = 0
    for seed in range(400):
        runs = simulate({"aligned": 3.0}, rounds=2, seed=seed)
        found = analysis.difference(analysis.by_backbone(runs, "aligned", "direct"))
        held += found.low <= 3.0 <= found.high
    assert 365 <= held <= 392  # 380 expected, with a deviation of 4.4


def test_the_arms_of_phase_2_are_those_that_phase_1_chose() -> None:
    runs = fair_race_plan.read_runs(fair_race_plan.RESULTS / "choice.jsonl")
    assert len(runs) == len(fair_race_plan.units_of(CHOICE, CANDIDATES))
    for name in CANDIDATES:
        assert fair_race_plan.CHOSEN[name] == [analysis.choose(name, runs)]
    without_q = fair_race_plan.CHOSEN["aligned"][0]._replace(implicit=False)
    assert fair_race_plan.CHOSEN["q = 0"] == [without_q]
    work = [arm.work for candidates in CANDIDATES.values() for arm in candidates]
    assert max(work) == 176  # no arm may do more


@pytest.mark.slow
def test_the_arms_are_what_align_and_finetune_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit."""
    few = {"lower_steps": 2, "upper_steps": 2, "p_batch": 8, "d_batch": 8, "probe_epochs": 1}
    monkeypatch.setattr(fair_race, "ALIGN", fair_race.ALIGN | few)
    cell = Cell("Tagalog", 0, 3)
    settings = fair_race.settings_of_cell(cell, tmp_path)
    theta = fair_race.aligned(cell, tmp_path, 2, True)
    length = {"alternations": 2, "warmup": 0}
    align(AlignConfig(**settings | fair_race.ALIGN | length), tmp_path / "align")
    written, _, _ = load_adapter(tmp_path / "align/adapter.safetensors")
    assert torch.equal(theta, written)
    assert not torch.equal(theta, fair_race.aligned(cell, tmp_path, 2, False))

    tuned = fair_race.fine_tune(settings, 0.03, 2, theta, warmup=1)
    settings |= {"lr": (0.03,), "seeds": 1, "start": tmp_path / "align"}
    settings |= {"epochs": 2, "warmup_epochs": 1, "batch": 32, "eval_epochs": 2}
    (test,) = finetune(FinetuneConfig(**settings), tmp_path / "peft").tests
    assert test.accuracy == tuned.curve[2]


@pytest.mark.slow
def test_a_cell_is_run_with_a_fresh_start_and_with_that_of_another_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"direct": [Arm(0.03, 2)], "restart": [Arm(0.03, 2, first_epochs=2)]}
    monkeypatch.setattr(fair_race, "CHOSEN", few)
    monkeypatch.setattr(fair_race, "fine_tune", partial(fair_race.fine_tune, warmup=1))
    told = call(fair_race, f"--cell Tagalog:0 --out {tmp_path}")
    lines = re.findall(r"(?m)^(\w+): (\S+) %, work (\d+), \d+ CPU-s$", told)
    assert [(name, work) for name, _, work in lines] == [("direct", "2"), ("restart", "4")]
    for _, accuracy, _ in lines:
        right = float(accuracy) / 100 * 119  # images of the test
        assert right == pytest.approx(round(right), abs=0.06)
