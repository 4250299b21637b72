"""The fair race: its analysis on simulated runs, and that its arms are what the commands do."""

import re
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from second_analysis import analyse, read_results, whole_rounds
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


def against(runs: list[Run], other: str) -> analysis.Difference:
    return analysis.difference(analysis.by_backbone(runs, "aligned", other))


def test_intervals_hold_what_was_planted_in_about_95_of_100_simulated_studies() -> None:
    held = 0
    for seed in range(400):
        found = against(simulate({"aligned": 3.0}, rounds=2, seed=seed), "direct")
        held += found.low <= 3.0 <= found.high
    assert 365 <= held <= 392  # 380 expected, with a deviation of 4.4


def test_a_second_analysis_by_another_hand_has_the_same_numbers() -> None:
    """On the runs that were measured: differences, intervals, p, and p after Holm's correction."""
    assert analysis.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])  # by hand
    file = fair_race_plan.RESULTS / "race.jsonl"
    runs = analysis.in_whole_rounds(fair_race_plan.read_runs(file))
    found = [against(runs, other) for other in analysis.AGAINST]
    adjusted = analysis.holm([one.p for one in found])
    again = analyse(file)
    assert len(runs) == 32 * len(whole_rounds(read_results(file)))
    for other, one, p in zip(analysis.AGAINST, found, adjusted, strict=True):
        assert again[other] == pytest.approx((*one, p), abs=1e-6)


def test_a_verdict_is_given_only_at_the_end_and_on_whole_rounds() -> None:
    runs = simulate({}, rounds=2, seed=0)
    assert analysis.in_whole_rounds(runs[:-1]) == runs[: len(runs) // 2]
    runs = simulate({"aligned": 9.0}, rounds=9, seed=0)
    verdicts = [row["verdict"] for row in analysis.rows_of(runs, final=True)]
    assert verdicts == ["", *["ahead"] * 3]
    assert analysis.rows_of(runs, final=False)[1]["verdict"] == "not yet"
    nothing = analysis.verdict(analysis.Difference(-0.5, -2.0, 1.0, 0.4), 0.4)
    assert nothing == "no gain of 2 points"


def test_the_choice_takes_the_best_rate_and_the_best_division_of_equal_work() -> None:
    runs = []
    for name, candidates in CANDIDATES.items():
        assert max(arm.work for arm in candidates) in (175, 176)  # no arm may do more
        for cell in CHOICE:
            for arm in candidates:
                accuracy = 40.0 + 5 * (arm.rate == 0.04) + 2 * (arm.epochs == candidates[1].epochs)
                runs.append(Run(name, arm, cell, 168, {1: accuracy}, accuracy, 1.0))
    for name, candidates in CANDIDATES.items():
        assert analysis.choose(name, runs) == candidates[3]


def test_the_arms_of_phase_2_are_those_that_phase_1_chose() -> None:
    runs = fair_race_plan.read_runs(fair_race_plan.RESULTS / "choice.jsonl")
    assert len(runs) == len(fair_race_plan.units_of(CHOICE, CANDIDATES))
    for name in CANDIDATES:
        assert fair_race_plan.CHOSEN[name] == [analysis.choose(name, runs)]
    without_q = fair_race_plan.CHOSEN["aligned"][0]._replace(implicit=False)
    assert fair_race_plan.CHOSEN["q = 0"] == [without_q]


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
