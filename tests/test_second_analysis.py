"""The right curvature: two analyses, by two hands, have the same figures of the same files."""

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

import pytest
import second_analysis_of_curvature as second

from experiments import right_curvature as plan
from experiments import right_curvature_analysis as first
from experiments.fair_race_analysis import Difference, difference

CHOICE = plan.RESULTS / "choice.jsonl"
RUNS = plan.RESULTS / "runs.jsonl"
NO_GAIN = "no gain of 2 points"


@pytest.fixture(scope="module")
def again() -> second.Analysis:
    """What the second analysis says of the runs that were measured."""
    return second.analyse(CHOICE, RUNS)


@pytest.fixture(scope="module")
def whole() -> first.Runs:
    """The runs that were measured, of whole rounds, as the first analysis reads them."""
    return first.whole_rounds(plan.read_runs(RUNS))


def assert_printed(cell: str | None, numbers: Sequence[float | None], decimals: int) -> None:
    """A cell of a table has these numbers, rounded; where there are none it is empty."""
    printed = [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", cell or "")]
    there = [number for number in numbers if number is not None]
    assert printed == pytest.approx(there, abs=0.501 * 10**-decimals)


# --- on the runs that were measured ---------------------------------------------------------------


def assert_same_rates(again: second.Analysis, choice: Path) -> None:
    """The mean accuracy at each rate, and the rate that is taken."""
    rows = first.rate_rows([*plan.read_runs(choice).values()])
    assert len(rows) == len(second.ENDPOINTS) * len(second.ARMS)
    for row in rows:
        endpoint, arm = row["PEFT of"], row["arm"]
        for rate in ("0.01", "0.02", "0.04", "0.08"):
            mean = again.mean_by_rate[endpoint][arm].get(rate)
            assert_printed(row[rate], [None if mean is None else float(mean)], 1)
        assert row["taken"] == float(again.taken[endpoint][arm])


def test_both_take_the_same_rates_and_the_runs_were_made_at_these(
    again: second.Analysis, whole: first.Runs
) -> None:
    assert_same_rates(again, CHOICE)
    for run in whole.values():
        for endpoint, by_rate in run.ends.items():
            assert [*by_rate] == [again.taken[endpoint][run.arm]]


def test_both_count_the_same_rounds(again: second.Analysis, whole: first.Runs) -> None:
    assert again.whole == sorted({unit.backbone for unit in whole})
    assert len(whole) == 42 * len(again.whole)


def assert_same_comparisons(again: second.Endpoint, runs: first.Runs, endpoint: str) -> None:
    """Differences, intervals, p and Holm's p as they are computed; with verdicts, as printed.

    What the table is made of is noted while it is made: 65,536 flips a pair take their time.
    """
    noted: list[tuple[Sequence[float], Difference]] = []

    def difference_noted(values: Sequence[float]) -> Difference:
        noted.append((values, difference(values)))
        return noted[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "difference", difference_noted)
        control, *rows = first.compare(runs, endpoint, final=True)
    pairs = [again.control, *again.questions]
    for (values, found), pair in zip(noted, pairs, strict=True):
        assert values == pytest.approx([float(one) for one in pair.differences], abs=1e-9)
        assert found.mean == pytest.approx(pair.mean, abs=1e-9)
        assert (found.low, found.high) == pytest.approx((pair.low, pair.high), abs=1e-9)
        assert found.p == pair.p  # both count flips
    assert first.holm([found.p for _, found in noted[1:]]) == again.corrected

    assert control["verdict"] == ("deaf" if again.deaf else "heard")
    assert control["p (Holm)"] == f"{again.control.p:.2g}"
    for row, pair in zip((control, *rows), pairs, strict=True):
        assert row["points"] == f"{pair.first} − {pair.second}"
        assert_printed(row["mean"], [pair.mean], 2)
        assert_printed(row["95 % interval"], [pair.low, pair.high], 2)
    for row, pair, corrected, verdicts in zip(
        rows, again.questions, again.corrected, again.verdicts, strict=True
    ):
        assert row["p (Holm)"] == f"{pair.p:.2g} ({corrected:.2g})"
        words = "none, the endpoint is deaf" if again.deaf else ", ".join(verdicts)
        assert row["verdict"] == words


@pytest.mark.parametrize("endpoint", second.ENDPOINTS)
def test_both_have_the_same_intervals_p_and_verdicts(
    again: second.Analysis, whole: first.Runs, endpoint: str
) -> None:
    assert_same_comparisons(again.endpoints[endpoint], whole, endpoint)


def test_both_have_the_same_means_of_each_arm(again: second.Analysis, whole: first.Runs) -> None:
    """Accuracies, objectives, |q|/|g|, cosine, residual and CPU-seconds, as they are printed."""
    rows = {row["arm"]: row for row in first.arm_rows(whole)}
    assert [*rows] == [*second.ARMS]
    for arm, means in again.diagnostics.items():
        row = rows[arm]
        assert_printed(row["30 epochs"], [again.endpoints["30 epochs"].arms[arm]], 2)
        assert_printed(row["5 epochs"], [again.endpoints["5 epochs"].arms[arm]], 2)
        assert_printed(row["objective"], [means.objective], 3)
        assert_printed(row["of_test"], [means.of_test], 3)
        assert_printed(row["q_over_g"], means.q_over_g, 2)
        assert_printed(row["cosine"], means.cosine, 2)
        assert_printed(row["residual"], means.residual, 2)
        assert_printed(row["worst"], [means.largest_residual], 2)
        assert_printed(row["CPU-s of align"], [means.cpu_align], 0)
        assert_printed(row["of PEFT"], [means.cpu_peft], 0)


# --- on runs that are made up, for what was not measured ------------------------------------------


def write_choice(path: Path) -> None:
    """A choice in which 0.02 and 0.04 are equally good: the lower is taken."""
    lines = []
    for line in map(json.loads, CHOICE.read_text().splitlines()):
        for by_rate in line["ends"].values():
            for rate in by_rate:
                correct = 51 if rate in ("0.02", "0.04") else 50
                by_rate[rate] = 100 * correct / line["images"]
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))


def write_runs(path: Path, gains: dict[str, int], wild: str) -> None:
    """Nine rounds, one of which lacks a run. Gains are drawings of 200; a wild arm scatters."""
    random = Random(0)
    template = json.loads(RUNS.read_text().splitlines()[0])
    lines = []
    for backbone, arm in product(range(28, 37), second.ARMS):
        of_backbone = random.randint(-60, 60) if arm == wild else random.randint(-1, 1)
        for alphabet, seed in product(second.REPORTED_ALPHABETS, second.SEEDS):
            correct = 80 + gains.get(arm, 0) + of_backbone + random.randint(-4, 4)
            by_rate = {"0.02": correct / 2}
            ends = dict.fromkeys(second.ENDPOINTS, by_rate)
            cell = {"arm": arm, "alphabet": alphabet, "backbone": backbone, "seed": seed}
            lines.append(json.dumps(template | cell | {"ends": ends, "images": 200}))
    path.write_text("\n".join(lines[:-1]))


@pytest.mark.parametrize(
    ("gains", "verdicts"),
    [
        (
            {"oracle": 30, "N": 10, "F": 1, "direct": 10},
            ["ahead", "open", NO_GAIN, f"behind, {NO_GAIN}"],
        ),
        ({"oracle": 5, "N": 2, "direct": -2}, [f"ahead, {NO_GAIN}", "open", NO_GAIN, NO_GAIN]),
        ({"oracle": 4, "N": 10}, ["deaf"] * 4),
    ],
)
def test_both_say_the_same_of_runs_that_are_made_up(
    tmp_path: Path, gains: dict[str, int], verdicts: list[str]
) -> None:
    """Every verdict, a deaf endpoint, rates that are equally good and a round that is not whole."""
    write_choice(tmp_path / "choice.jsonl")
    write_runs(tmp_path / "runs.jsonl", gains, wild="0v")
    again = second.analyse(tmp_path / "choice.jsonl", tmp_path / "runs.jsonl")
    assert_same_rates(again, tmp_path / "choice.jsonl")
    runs = first.whole_rounds(plan.read_runs(tmp_path / "runs.jsonl"))
    assert again.whole == sorted({unit.backbone for unit in runs}) == [*range(28, 36)]
    endpoint = again.endpoints["5 epochs"]
    assert_same_comparisons(endpoint, runs, "5 epochs")
    assert [", ".join(words) for words in endpoint.verdicts] == verdicts
