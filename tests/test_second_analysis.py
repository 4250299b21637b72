"""The pages of the studies: their tables by the scripts and by second analyses, their sentences."""

import re
import shutil
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import second_analysis as race
import second_analysis_of_curvature as curvature
import second_analysis_of_derivatives as derivatives
from pages import WORDS, Row, assert_cell, blocks, said, tables, write
from scipy import stats
from second_analysis import Array, read

from experiments import (
    fair_race_analysis,
    right_curvature,
    right_curvature_analysis,
    what_q_is,
    which_derivative,
    which_derivative_analysis,
)

EXPERIMENTS = Path(what_q_is.__file__).parent
ROOT = EXPERIMENTS.parent
RACE, CURVATURE, DERIVATIVES = (
    (EXPERIMENTS / f"{name}.md").read_text()
    for name in ("fair_race", "right_curvature", "which_derivative")
)


@pytest.mark.parametrize(
    ("main", "name", "number"),
    [
        (fair_race_analysis.main, "fair_race", 1),
        (right_curvature_analysis.main, "right_curvature", 5),
        (which_derivative_analysis.main, "which_derivative", 3),
        (partial(what_q_is.main, False), "what_q_is.csv", 1),
    ],
)
def test_a_page_has_the_tables_that_its_script_prints(
    main: Any, name: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of records that lie elsewhere: some scripts draw a picture beside them."""
    records, copy = EXPERIMENTS / name, tmp_path / name
    (shutil.copytree if records.is_dir() else shutil.copy)(records, copy)
    main(copy)
    printed = blocks(capsys.readouterr().out)
    on_page = blocks(records.with_suffix(".md").read_text())
    heads = [head for head, *_ in printed]
    both = [table for table in on_page if table[0] in heads]
    assert len(both) == number
    assert all(table in printed for table in both)


def assert_compared(row: Row, mean: str, found: race.Finding) -> None:
    """A row has the difference, its interval, both p and the verdict."""
    one = found.estimate
    assert_cell(row[mean], one.mean)
    assert_cell(row["95 % interval"], one.low, one.high)
    assert_cell(row["p (Holm)"], one.p, found.corrected)
    assert said(row["verdict"]) == found.words


def told(values: Array, decimals: int = 2) -> str:
    """The mean with its 95 % interval, as the pages write it."""
    return write(race.estimate(values), decimals)


# --- the fair race --------------------------------------------------------------------------------


def test_the_figures_of_the_fair_race_are_those_of_its_records() -> None:
    records = read(EXPERIMENTS / "fair_race/race.jsonl")
    test, held_out, cpu = (race.race(records, name) for name in ("test", "held out", "cpu"))
    (table,) = tables(RACE, "aligned minus this")
    for row, accuracy, seconds in zip(table, test, cpu, strict=True):
        assert_cell(row["test (%)"], accuracy.mean())
        assert_cell(row["CPU-s"], seconds.mean())
    assert [row["arm"] for row in table] == [*race.ARMS]
    for row, found in zip(table[1:], race.analyse(test), strict=True):
        assert_compared(row, "aligned minus this", found)

    aligned, direct, _, without_q = test
    for k, alphabet in enumerate(race.ALPHABETS):
        means = test[:, :, k].mean((1, 2))
        assert f"{alphabet} {', '.join(f'{mean:.1f}' for mean in means)}" in RACE
        assert f"{alphabet} {told((aligned - direct)[:, k].mean(1), 1)}" in RACE
    assert told((aligned - without_q).mean((0, 2)), 1).split("(")[1].rstrip(")") in RACE
    assert told((without_q - direct).mean((1, 2)), 1) in RACE
    mean, interval = told((held_out[0] - held_out[1]).mean((1, 2)), 1).split(" ", 1)
    assert f"aligned is {mean.lstrip('+')} points above direct {interval}" in RACE
    assert f"{cpu[0].mean() / cpu[1].mean():.1f} times its CPU time" in RACE


def test_the_scores_of_phase_1_are_those_of_its_records() -> None:
    scores: dict[Any, list[float]] = {}
    for name, (rate, epochs, *_), _, _, _, held_out, _ in read(
        EXPERIMENTS / "fair_race/choice.jsonl"
    ):
        scores.setdefault((name, epochs == 95, rate), []).append(held_out)
    columns = [(True, 0.02), (True, 0.04), (False, 0.02), (False, 0.04), (True, 0.03)]
    for name in ("direct", "restart", "aligned"):
        (line,) = re.findall(rf"(?m)^\| {name}: .*?\| (.*)", RACE)
        assert_cell(line, *(float(np.mean(scores[name, *column])) for column in columns))


# --- the right curvature --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    """The records of the study of curvature."""
    return read(EXPERIMENTS / "right_curvature/runs.jsonl")


def test_comparisons_and_arms_of_the_right_curvature_are_those_of_its_records(
    runs: list[Any],
) -> None:
    short, long = tables(CURVATURE, "p (Holm)")
    for endpoint, table in (("5 epochs", short), ("30 epochs", long)):
        for row, found in zip(table, curvature.analyse(runs, endpoint), strict=True):
            assert row["points"] == " − ".join(found.pair)
            assert_compared(row, "mean", found)

    (table,) = tables(CURVATURE, "q_over_g")
    assert [row["arm"] for row in table] == [*curvature.ARMS]
    for row in table:
        for endpoint in curvature.ENDPOINTS:
            assert_cell(row[endpoint], curvature.by_cell(runs, row["arm"], endpoint).mean())
        for name, numbers in curvature.diagnose(runs, row["arm"]).items():
            assert_cell(row[name], *numbers)


def test_rates_and_alphabets_of_the_right_curvature_are_those_of_its_records(
    runs: list[Any],
) -> None:
    choice = read(EXPERIMENTS / "right_curvature/choice.jsonl")
    (rates,) = tables(CURVATURE, "taken")
    assert len(rates) == len(curvature.ARMS) * len(curvature.ENDPOINTS)
    for row in rates:
        arm, endpoint = row["arm"], row["PEFT of"]
        means, taken = curvature.choose(choice, arm, endpoint)
        assert row["taken"] == taken
        for rate in ("0.01", "0.02", "0.04", "0.08"):
            assert_cell(row[rate], means.get(rate))
        of_arm = [run["ends"][endpoint] for run in runs if run["arm"] == arm]
        assert all([*by_rate] == [taken] for by_rate in of_arm)

    (table,) = tables(CURVATURE, "alphabets as units")
    taken_by = {(row["PEFT of"], row["arm"]): row["taken"] for row in rates}
    for row in table:
        endpoint, pair = row["PEFT of"], row["points"].split(" − ")
        assert row["rates"] == " and ".join(taken_by[endpoint, arm] for arm in pair)
        gains = curvature.gains(runs, pair, endpoint)
        for k, alphabet in enumerate(curvature.ALPHABETS):
            assert_cell(row[alphabet], gains[:, k].mean())
        assert row["alphabets as units"] == told(gains.mean((0, 2)))
        assert row["backbones, without Latin"] == told(gains[:, :2].mean((1, 2)))


def test_the_comparisons_beside_the_protocol_are_those_of_its_records(runs: list[Any]) -> None:
    """Devices, V − 0v without an alphabet, and what may be the cause."""
    devices = {run["backbone"]: run["device"] for run in runs}
    assert len({(run["backbone"], run["device"], run["weights"]) for run in runs}) == 16
    on_card = np.array([devices[backbone] != "cpu" for backbone in curvature.BACKBONES])
    assert on_card.sum() == 10
    differ = []
    for endpoint in curvature.ENDPOINTS:
        for pair in (curvature.CONTROL, *curvature.QUESTIONS):
            gains = curvature.gains(runs, pair, endpoint).mean((1, 2))
            welch = stats.ttest_ind(gains[on_card], gains[~on_card], equal_var=False)
            if welch.pvalue < 0.05:
                differ.append((endpoint, pair, round(float(welch.pvalue), 2)))
    assert differ == [("5 epochs", ("V", "0v"), 0.02)]
    N_0, V_0v = (curvature.gains(runs, pair, "5 epochs") for pair in (("N", "0"), ("V", "0v")))
    for gains in (N_0, V_0v):
        assert told(gains.mean((1, 2))[on_card]) in CURVATURE
        assert told(gains.mean((1, 2))[~on_card]) in CURVATURE
    assert (V_0v.mean((1, 2)) > 0).sum() == 14
    for left_out in (0, 1):
        assert told(np.delete(V_0v, left_out, 1).mean((1, 2))) in CURVATURE
    assert told((V_0v - N_0).mean((1, 2))) in CURVATURE
    assert told(curvature.gains(runs, ("N", "F"), "30 epochs").mean((1, 2))) in CURVATURE
    cosine = np.mean([run["cosine"] for run in runs if run["arm"] == "N"])
    assert f"{cosine:.2f}" == "0.81" and f"{1 / cosine:.2f} times" in CURVATURE
    assert f"{(1 - cosine) * N_0.mean():.2f}" == "0.25"
    for endpoint in curvature.ENDPOINTS:
        assert f"{curvature.by_cell(runs, '0', endpoint)[:, 2].mean():.1f} %" in CURVATURE


def test_pairs_at_one_rate_in_the_runs_of_the_choice_are_those_of_the_page() -> None:
    choice = read(EXPERIMENTS / "right_curvature/choice.jsonl")
    choice.sort(key=lambda run: (run["backbone"], run["alphabet"], run["seed"]))

    def gains(first: str, second: str, endpoint: str, rate: str) -> Array:
        one, other = (
            np.array([run["ends"][endpoint][rate] for run in choice if run["arm"] == arm])
            for arm in (first, second)
        )
        return one - other

    rates = ("0.01", "0.02", "0.04", "0.08")
    for first, second in (("N", "F"), ("V", "0v")):
        means = [f"{gains(first, second, '5 epochs', rate).mean():+.1f}" for rate in rates]
        assert f"{', '.join(means[:3])} and {means[3]}" in CURVATURE
    errors = [stats.sem(gains("N", "F", "5 epochs", rate)) for rate in rates]
    assert f"{min(errors):.1f} to {max(errors):.1f}" in CURVATURE
    late = [gains("V", "0v", "30 epochs", rate) for rate in rates[:3]]
    assert told(np.mean(late, 0), 1) in CURVATURE


def test_what_goes_with_accuracy_is_as_the_page_says(runs: list[Any]) -> None:
    """Correlations over the cells of an arm, the mean of each alphabet taken away."""
    of_test = {arm: curvature.by_cell(runs, arm, "of_test") for arm in ("N", "0", "F")}
    for second in ("0", "F"):
        higher = told((of_test["N"] - of_test[second]).mean((1, 2)))
        assert higher.removeprefix("+") in CURVATURE
    for name in ("of_test", "objective"):
        found = []
        for arm in curvature.ARMS[1:]:  # all but direct
            cells = [curvature.by_cell(runs, arm, x) for x in ("5 epochs", name)]
            centred = [(x - x.mean((0, 2), keepdims=True)).ravel() for x in cells]
            found.append(np.corrcoef(*centred)[0, 1])
        assert f"{max(found):.2f} to {min(found):.2f}" in CURVATURE


# --- which derivative -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> list[Any]:
    """The records of the study of derivatives."""
    return read(EXPERIMENTS / "which_derivative/runs.jsonl")


@pytest.fixture(scope="module")
def accuracy(measured: list[Any]) -> Array:
    """Their accuracies by arm, alphabet and backbone."""
    return derivatives.table(measured)


def compare_rows(rows: list[Any], records: list[Any]) -> set[str]:
    """Assert that rows of comparisons have the second analysis' figures; return their words."""
    again = derivatives.analyse(records)
    accuracy = derivatives.table(records)
    assert [row["points"] for row in rows] == [" − ".join(pair) for pair in again]
    for row, (pair, found) in zip(rows, again.items(), strict=True):
        assert_cell(row["mean"], found.here.mean)
        assert_cell(row["these alphabets"], found.here.low, found.here.high)
        assert_cell(row["p (Holm)"], found.here.p, found.corrected)
        assert_cell(row["alphabets as units"], found.units.low, found.units.high)
        assert_cell(row["their p (Holm)"], found.units.p, found.corrected_units)
        above = (derivatives.differences(accuracy, pair).mean(axis=1) > 0).sum()
        assert_cell(row["alphabets above 0"], above, 8)
        assert said(row["verdict"]) == found.words
    return {word for found in again.values() for word in found.words}


def test_the_tables_of_the_derivatives_are_those_of_their_records(
    measured: list[Any], accuracy: Array
) -> None:
    (table,) = tables(DERIVATIVES, "family")
    compare_rows(table, measured)
    (table,) = tables(DERIVATIVES, "alphabet")
    assert {row["alphabet"] for row in table} == {*derivatives.ALPHABETS}
    for row in table:
        k = derivatives.ALPHABETS.index(row.pop("alphabet"))
        for points, cell in row.items():
            pair = points.split(" − ")
            assert_cell(cell, derivatives.differences(accuracy, pair)[k].mean())
    (table,) = tables(DERIVATIVES, "L^D, val")
    assert [row["arm"] for row in table] == [*derivatives.ARMS]
    for row in table:
        of_arm = [columns_of(run) for run in measured if run["arm"] == row["arm"]]
        for name in of_arm[0]:
            numbers = [run[name] for run in of_arm]
            assert_cell(row[name], None if None in numbers else np.mean(numbers))


def columns_of(run: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a run by the columns of the page."""
    losses = {f"L^D, {part}": loss for part, loss in run["losses"].items()}
    q = {"|q|/|g|": run["q_over_g"], "cosine": np.mean(run["cosine"]) if run["cosine"] else None}
    seconds = {"CPU-s of align": run["cpu_align"], "of PEFT": run["cpu_peft"]}
    means = {"mean": np.mean([*run["ends"].values()]), "diverged": run["diverged"]}
    return means | run["ends"] | losses | q | seconds


def test_differences_that_were_not_planned_are_those_of_the_page(
    measured: list[Any], accuracy: Array
) -> None:
    """A part of the alphabets has fewer degrees of freedom."""
    three = np.array([name in curvature.ALPHABETS for name in derivatives.ALPHABETS])

    def told(first: str, other: str, of: Any = slice(None), table: Array = accuracy) -> str:
        gains = derivatives.differences(table, (first, other))[of]
        return write(derivatives.these_alphabets(gains))

    def without(alphabet: str) -> Array:
        return np.array([name != alphabet for name in derivatives.ALPHABETS])

    def at(rate: str) -> Array:
        return derivatives.table(
            run | {"ends": dict.fromkeys(run["ends"], run["ends"][rate])} for run in measured
        )

    for alphabets in (slice(None), three, ~three):
        assert told("N", "0v", alphabets) in DERIVATIVES
    assert told("P", "0v")[:-1] in DERIVATIVES
    assert told("C", "G") == "-1.48 (-2.06 to -0.90)" and "C 1.48 (0.90 to 2.06;" in DERIVATIVES
    assert told("A", "G", without("Early_Aramaic"))[:-1].replace(" (", "; ") in DERIVATIVES
    assert told("G", "0v", without("Tagalog")) in DERIVATIVES
    assert told("N", "0v", three, at("0.02")) in DERIVATIVES
    assert told("oracle-G", "0v", table=at("0.03")) in DERIVATIVES
    by_network = derivatives.differences(accuracy, ("U", "G")).mean(axis=0)
    words = [f"{gain:+.1f}" for gain in by_network]
    assert f"{', '.join(words[:3])} and {words[3]}" in DERIVATIVES
    by_network = derivatives.differences(accuracy, ("P", "G")).mean(axis=0)
    assert f"{min(by_network):+.1f} to {max(by_network):+.1f}" in DERIVATIVES
    means = accuracy.mean(axis=(1, 2))[:4]  # 0v, G, N and U
    for name in ("experiments/which_derivative.md", "docs/page.md"):
        assert f"within {np.ptp(means):.1f} points" in (ROOT / name).read_text(), name


def test_the_first_order_gains_are_those_of_their_records() -> None:
    lines = which_derivative.read_gains(EXPERIMENTS / "which_derivative/gains.jsonl")
    records = [line._asdict() for line in lines]
    math = (ROOT / "docs/math.md").read_text()
    for row, steps in product(which_derivative_analysis.gain_rows(lines), ("own", "next")):
        ratios = derivatives.gains_over_G(records, steps, row["arm"])
        mean, low, high = (f"{x:.2f}" for x in (np.mean(ratios), min(ratios), max(ratios)))
        assert row[f"{steps} steps"] == f"{mean} ({low} to {high})"
        if row["arm"] in "UNA":
            assert f"{low} to {high}" in math and (steps == "next" or f"{mean} along" in math)
        if steps == "next" and row["arm"] != "G":
            assert f"{row['arm']} {mean} ({low} to {high})" in DERIVATIVES
        elif row["arm"] == "U":
            assert f"U {mean} times" in DERIVATIVES and f"{low} and {high}" in DERIVATIVES
        elif row["arm"] != "G":
            assert f"{row['arm']} {mean} times ({low} to {high})" in DERIVATIVES


# --- when it was, and what other pages repeat -----------------------------------------------------


@pytest.mark.parametrize(
    ("page", "name", "commit"),
    [
        (CURVATURE, "right_curvature/choice", "741fbb6"),
        (CURVATURE, "right_curvature/runs", "d3c0cef"),
        (DERIVATIVES, "which_derivative/gains", "b171406"),
        (DERIVATIVES, "which_derivative/runs", "b58489a"),
    ],
)
def test_runs_were_made_when_and_by_which_commit_the_page_says(
    page: str, name: str, commit: str
) -> None:
    """Gains before runs, and the choice before the rounds: their dates are in this order."""
    records = read(EXPERIMENTS / f"{name}.jsonl")
    (first, *_, last) = sorted(record["time"] for record in records)
    assert first[:10] == last[:10] and first[:10] in page
    assert f"{first[11:16]} to {last[11:16]}" in page
    assert {record["commit"][:7] for record in records} == {commit} and commit in page


def test_hours_and_networks_are_those_of_the_page(runs: list[Any], measured: list[Any]) -> None:
    assert sum(run["time"] < "2026-11-27T07:32" for run in runs) > 400
    assert len({run["weights"] for run in measured}) == 8
    aligning = sum(run["cpu_align"] for run in measured if run["arm"] != "P")  # P has that of 0v
    hours = (aligning + sum(run["cpu_peft"] for run in measured)) / 3600
    assert f"{hours:.1f} CPU-hours" in DERIVATIVES


def test_other_pages_round_the_figures_of_the_studies() -> None:
    """Those are in the tables of the studies, which are tested above."""
    index = (EXPERIMENTS / "README.md").read_text().replace("+", "")
    short, long = tables(CURVATURE, "p (Holm)", "mean", "95 % interval")
    (of_derivatives,) = tables(DERIVATIVES, "family")
    (of_race,) = tables(RACE, "aligned minus this")
    repeated = [row["95 % interval"] for row in (*short[1:3], short[4], long[1], *long[3:])]
    repeated += [row["these alphabets"] for row in of_derivatives[:4] + of_derivatives[5:6]]
    repeated += [row["95 % interval"] for row in of_race[1:3]]
    for interval in repeated:
        low, high = (float(x) for x in interval.split(" to "))
        assert f"{low:.1f} to {high:.1f}" in index, interval
    by_labels = float(of_derivatives[5]["mean"])
    for name in ("docs/page.md", "experiments/README.md"):
        assert f"{by_labels:.1f} points" in (ROOT / name).read_text(), name
    assert "2.3 to 4.5" in (ROOT / "docs/page.md").read_text()


# --- records that are made up, for what was not measured ------------------------------------------


def moved(
    records: list[Any], gains: dict[str, float], noise: float = 0.0, seed: int = 0
) -> list[Any]:
    """The records, with so many points more in each arm, and with noise."""
    random = Random(seed)
    found = []
    for run in records:
        points = gains.get(run["arm"], 0.0) + random.gauss(0, noise)
        found.append(run | {"ends": {rate: end + points for rate, end in run["ends"].items()}})
    return found


def compare_analyses(records: list[Any]) -> set[str]:
    """Assert that both analyses say the same; return the verdicts' words."""
    first = which_derivative_analysis
    runs = first.whole_cells([which_derivative.Run(**record) for record in records])
    return compare_rows(first.compare(first.means_of(runs), final=True), records)


def test_both_analyses_say_the_same_of_random_derivatives(measured: list[Any]) -> None:
    """Gains of any size, so that each word of the protocol is used."""
    words = set()
    for seed in range(12):
        random = Random(seed)
        gains = {arm: random.gauss(0, 1.5) for arm in derivatives.ARMS}
        gains["oracle-G"] = 4.0 * (seed > 1)
        words |= compare_analyses(moved(measured, gains, 2.0 + seed % 3, seed))
    assert words == {*WORDS}


def test_the_endpoint_is_deaf_unless_the_interval_of_the_control_begins_above_2(
    measured: list[Any],
) -> None:
    control = derivatives.analyse(measured)[derivatives.CONTROL].here
    for beyond, word in ((-0.01, "deaf"), (0.01, "heard")):
        assert word in compare_analyses(moved(measured, {"oracle-G": 2 + beyond - control.low}))


@pytest.mark.parametrize(
    ("more", "swing", "p", "words"),
    [(0.0, 0.0, 1.0, {"no gain of 2 points"}), (0.5, 20.0, 2 / 256, {"open"})],
)
def test_a_difference_that_all_alphabets_share_is_beyond_them_only_if_it_is_clear_in_them(
    measured: list[Any], more: float, swing: float, p: float, words: set[str]
) -> None:
    """C is U, less so many points that swing from network to network; without any it has p 1."""
    cell = itemgetter("alphabet", "backbone", "seed")
    of_U = {cell(run): run["ends"] for run in measured if run["arm"] == "U"}
    records = []
    for run in measured:
        less = more + swing * (-1) ** run["backbone"]
        moved_U = {rate: end - less for rate, end in of_U[cell(run)].items()}
        records.append(run | {"ends": moved_U} if run["arm"] == "C" else run)
    compare_analyses(records)
    found = derivatives.analyse(records)["U", "C"]
    assert found.units.p == p and found.words == words


@pytest.mark.parametrize(
    ("gains", "pair", "words"),
    [({"F": -1.5}, ("F", "0"), {"open"}), ({"oracle": -8.0}, ("N", "0"), {"deaf"})],
)
def test_both_analyses_say_the_same_of_curvatures_that_are_made_up(
    gains: dict[str, float], pair: tuple[str, str], words: set[str]
) -> None:
    runs = {}
    for unit, run in right_curvature.read_runs(EXPERIMENTS / "right_curvature/runs.jsonl").items():
        ((rate, end),) = run.ends["30 epochs"].items()
        more = {"30 epochs": {rate: end + gains.get(run.arm, 0.0)}}
        runs[unit] = run._replace(ends=run.ends | more)
    rows = right_curvature_analysis.compare(runs, "30 epochs", final=True)
    again = curvature.analyse([run._asdict() for run in runs.values()], "30 epochs")
    for row, found in zip(rows, again, strict=True):
        assert_compared(row, "mean", found)
        assert found.pair != pair or found.words == words


def test_only_what_is_whole_counts_and_verdicts_wait_for_the_last(measured: list[Any]) -> None:
    runs = right_curvature.read_runs(EXPERIMENTS / "right_curvature/runs.jsonl")
    del runs[right_curvature.Unit("N", "Greek", 29, 0)]
    whole = right_curvature_analysis.whole_rounds(runs)
    assert {unit.backbone for unit in whole} == {28, *range(30, 44)}
    rows = right_curvature_analysis.compare(whole, "5 epochs", final=False)
    cells = which_derivative_analysis.whole_cells(
        [which_derivative.Run(**record) for record in measured[:-1]]
    )
    assert len(cells) == 63 * 8
    means = which_derivative_analysis.means_of(cells)
    rows += which_derivative_analysis.compare(means, final=False)
    of_race = fair_race_analysis.read_runs(EXPERIMENTS / "fair_race/race.jsonl")[:-1]
    of_race = fair_race_analysis.in_whole_rounds(of_race)
    assert len(of_race) == 8 * 32
    rows += fair_race_analysis.rows_of(of_race, final=False)[1:]
    assert {row["verdict"] for row in rows} == {"not yet"}
