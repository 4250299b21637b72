"""A second analysis of experiments/right_curvature, written from protocol and files alone.

Whoever wrote it had seen experiments/right_curvature.md and the two files of runs, and neither the
program that made them nor the first analysis. An accuracy is a fraction of whole drawings here, so
means, differences and the sums of all flips are exact, and two equal sums are equal.

    python tests/second_analysis_of_curvature.py

The protocol leaves open, and here it is chosen:

1. Before the sixteenth round, which intervals? Those of the whole rounds that there are, with one
   degree of freedom less than rounds, and as many flips as these have. Verdicts are not printed.
2. What is the mean accuracy of a choice? The mean of its eight cells, each with the same weight.
   With the same weight for each drawing F would take 0.02 for 5 epochs, and not 0.04.
3. Of which runs are the diagnostics? Of those of whole rounds, without the choice of rates.
4. "The largest residual of any query" stands in a list of means over runs. Both are given: the
   largest of all runs of an arm, and the mean over runs of the largest of a run.
5. q = 0 has no cosine. The files say 0.0, and so does the table.
6. CPU-seconds are of the rounds whose device is "cpu". Those of PEFT are one number a run in the
   files, and so they hold both endpoints together.
7. A line that is there twice is refused, and so are a round of two devices or backbones, rounds
   of two commits, and a run at another rate than the one that its arm took.
8. A flip counts if its sum is at least as far from 0 as the sum that was seen.
9. At a deaf endpoint "no gain of 2 points" is not said either.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypedDict

import scipy.stats

FILES = Path(__file__).resolve().parents[1] / "experiments" / "right_curvature"

ARMS = ("direct", "0", "F", "N", "V", "0v", "oracle")
ENDPOINTS = ("30 epochs", "5 epochs")
QUESTIONS = (("N", "0"), ("V", "0v"), ("F", "0"), ("0", "direct"))
CONTROL = ("oracle", "0")
SEEDS = (0, 1)
PLANNED_ROUNDS = range(28, 44)
REPORTED_ALPHABETS = ("Greek", "Balinese", "Latin")
CHOICE_BACKBONES = (44, 45)
CHOICE_ALPHABETS = ("Early_Aramaic", "Tagalog")
CHOICE_RATES = {"30 epochs": ("0.01", "0.02", "0.04"), "5 epochs": ("0.01", "0.02", "0.04", "0.08")}
POINTS = 2
LEVEL = 0.05


class Run(TypedDict):
    """A line of a file: one arm in one cell. `ends` has percent, by endpoint and rate."""

    arm: str
    alphabet: str
    backbone: int
    seed: int
    ends: dict[str, dict[str, float]]
    images: int
    objective: float | None
    of_test: float | None
    q_over_g: list[float]
    cosine: list[float]
    residual: list[float]
    worst: float | None
    cpu_align: float
    cpu_peft: float
    weights: str
    commit: str
    device: str


class Pair(NamedTuple):
    """Two arms at one endpoint: first - second, for each backbone and over backbones."""

    first: str
    second: str
    differences: tuple[Fraction, ...]
    mean: float
    low: float
    high: float
    p: float


class Endpoint(NamedTuple):
    """All of one endpoint; `corrected` and `verdicts` are in the order of `questions`."""

    arms: dict[str, float]
    questions: list[Pair]
    corrected: list[float]
    control: Pair
    deaf: bool
    verdicts: list[list[str]]


class Diagnostics(NamedTuple):
    """Means over the runs of an arm; None or an empty list where the arm has no such number."""

    objective: float | None
    of_test: float | None
    q_over_g: list[float]
    cosine: list[float]
    residual: list[float]
    largest_residual: float | None
    mean_of_largest: float | None
    cpu_align: float | None
    cpu_peft: float | None


class Analysis(NamedTuple):
    """Everything, of the whole rounds that there are."""

    mean_by_rate: dict[str, dict[str, dict[str, Fraction]]]
    taken: dict[str, dict[str, str]]
    whole: list[int]
    endpoints: dict[str, Endpoint]
    diagnostics: dict[str, Diagnostics]


def analyse(choice_file: Path, runs_file: Path) -> Analysis:
    """Return all that the protocol asks for, from the two files."""
    mean_by_rate = means_of_choice(read_runs(choice_file))
    taken = take_rates(mean_by_rate)
    rounds = whole_rounds(read_runs(runs_file))
    endpoints = {
        endpoint: analyse_endpoint(rounds, endpoint, taken[endpoint]) for endpoint in ENDPOINTS
    }
    runs = list(itertools.chain.from_iterable(rounds.values()))
    diagnostics = {arm: diagnose([run for run in runs if run["arm"] == arm]) for arm in ARMS}
    return Analysis(mean_by_rate, taken, sorted(rounds), endpoints, diagnostics)


# The files


def read_runs(path: Path) -> list[Run]:
    """Return the runs of a file of JSON lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def accuracy(run: Run, endpoint: str, rate: str) -> Fraction:
    """Return a run's percentage as the fraction of whole drawings that it is.

    Raises:
        ValueError: no whole number of drawings gives this percentage.
    """
    percent = run["ends"][endpoint][rate]
    correct = round(percent * run["images"] / 100)
    exact = Fraction(100 * correct, run["images"])
    if abs(float(exact) - percent) > 1e-9:
        raise ValueError(f"{percent} % of {run['images']} drawings is no whole number of them")
    return exact


# The choice of rates


def means_of_choice(choice: Sequence[Run]) -> dict[str, dict[str, dict[str, Fraction]]]:
    """Return the mean accuracy over the eight cells of the choice, by endpoint, arm and rate.

    Raises:
        ValueError: the file is not the 56 runs that the protocol names.
    """
    expected = set(itertools.product(CHOICE_BACKBONES, CHOICE_ALPHABETS, SEEDS, ARMS))
    found = [(run["backbone"], run["alphabet"], run["seed"], run["arm"]) for run in choice]
    if len(found) != len(expected) or set(found) != expected:
        raise ValueError(
            f"the choice of rates has {len(expected)} runs, each once, not {len(found)}"
        )

    means: dict[str, dict[str, dict[str, Fraction]]] = {}
    for endpoint in ENDPOINTS:
        means[endpoint] = {}
        for arm in ARMS:
            runs = [run for run in choice if run["arm"] == arm]
            by_rate = {}
            for rate in CHOICE_RATES[endpoint]:
                by_rate[rate] = mean_of([accuracy(run, endpoint, rate) for run in runs])
            means[endpoint][arm] = by_rate
    return means


def take_rates(means: dict[str, dict[str, dict[str, Fraction]]]) -> dict[str, dict[str, str]]:
    """Return the rate with the best mean, of equal ones the lower, by endpoint and arm."""
    taken: dict[str, dict[str, str]] = {}
    for endpoint, arms in means.items():
        taken[endpoint] = {}
        for arm, by_rate in arms.items():
            best = max(by_rate.values())
            equally_good = [rate for rate, mean in by_rate.items() if mean == best]
            taken[endpoint][arm] = min(equally_good, key=float)
    return taken


def mean_of(values: Sequence[Fraction]) -> Fraction:
    """Return the exact mean."""
    return sum(values, Fraction(0)) / len(values)


# Rounds


def whole_rounds(runs: Sequence[Run]) -> dict[int, list[Run]]:
    """Return the rounds that are whole, by the seed of the backbone, in the order of these seeds.

    Raises:
        ValueError: a run is there twice or is none of the protocol's, a round has two devices or
            two backbones, or the rounds have more than one commit.
    """
    expected = set(itertools.product(REPORTED_ALPHABETS, SEEDS, ARMS))
    rounds: dict[int, list[Run]] = {}
    for backbone in PLANNED_ROUNDS:
        of_backbone = [run for run in runs if run["backbone"] == backbone]
        found = {(run["alphabet"], run["seed"], run["arm"]) for run in of_backbone}
        if len(found) != len(of_backbone):
            raise ValueError(f"round {backbone} has a run twice")
        if not found <= expected:
            raise ValueError(f"round {backbone} has other runs, too: {sorted(found - expected)}")
        if len({(run["device"], run["weights"]) for run in of_backbone}) > 1:
            raise ValueError(f"round {backbone} was made on two devices or of two backbones")
        if found == expected:
            rounds[backbone] = of_backbone

    others = {run["backbone"] for run in runs} - set(PLANNED_ROUNDS)
    if others:
        raise ValueError(f"backbones that the protocol does not name: {sorted(others)}")
    commits = {run["commit"] for of_backbone in rounds.values() for run in of_backbone}
    if len(commits) > 1:
        raise ValueError(f"all rounds are run by one commit, and here are {sorted(commits)}")
    return rounds


def mean_of_backbone(of_backbone: Sequence[Run], arm: str, endpoint: str, rate: str) -> Fraction:
    """Return the mean accuracy of an arm over the six cells of one backbone, at its rate.

    Raises:
        ValueError: a run was not made at this rate, or at others, too.
    """
    accuracies = []
    for run in of_backbone:
        if run["arm"] != arm:
            continue
        rates = list(run["ends"][endpoint])
        if rates != [rate]:
            raise ValueError(f"{arm} takes rate {rate} for {endpoint}, and a run has {rates}")
        accuracies.append(accuracy(run, endpoint, rate))
    return mean_of(accuracies)


# Statistics


def analyse_endpoint(
    rounds: dict[int, list[Run]], endpoint: str, taken: dict[str, str]
) -> Endpoint:
    """Return arms, comparisons and verdicts at one endpoint."""
    units: dict[str, list[Fraction]] = {}
    for arm in ARMS:
        units[arm] = [mean_of_backbone(runs, arm, endpoint, taken[arm]) for runs in rounds.values()]
    arms = {arm: float(mean_of(units[arm])) for arm in ARMS}
    questions = [compare(first, second, units) for first, second in QUESTIONS]
    corrected = correct_by_holm([pair.p for pair in questions])
    control = compare(*CONTROL, units)
    deaf = is_deaf(control.low)
    verdicts = []
    for pair, corrected_p in zip(questions, corrected, strict=True):
        verdicts.append(judge(deaf, pair.mean, pair.high, corrected_p))
    return Endpoint(arms, questions, corrected, control, deaf, verdicts)


def compare(first: str, second: str, units: dict[str, list[Fraction]]) -> Pair:
    """Return the comparison first - second, over backbones."""
    differences = tuple(a - b for a, b in zip(units[first], units[second], strict=True))
    mean = float(mean_of(differences))
    half_width = half_width_of_interval(differences)
    p = p_of_flips(differences)
    return Pair(first, second, differences, mean, mean - half_width, mean + half_width, p)


def half_width_of_interval(differences: Sequence[Fraction]) -> float:
    """Return half the width of Student's 95 % interval of the mean."""
    number = len(differences)
    mean = mean_of(differences)
    variance = sum((difference - mean) ** 2 for difference in differences) / Fraction(number - 1)
    standard_error = math.sqrt(variance / number)
    quantile = float(scipy.stats.t.ppf(0.975, number - 1))
    return quantile * standard_error


def p_of_flips(differences: Sequence[Fraction]) -> float:
    """Return the two-sided p of all flips of signs.

    It is the share of sums that are at least as far from 0 as the one seen. The distribution
    of the sums is built up difference by difference, in whole numbers.
    """
    denominator = math.lcm(*(difference.denominator for difference in differences))
    numbers = [int(difference * denominator) for difference in differences]
    ways = Counter({0: 1})
    for number in numbers:
        longer: Counter[int] = Counter()
        for partial_sum, count in ways.items():
            longer[partial_sum + number] += count
            longer[partial_sum - number] += count
        ways = longer
    seen = abs(sum(numbers))
    as_far = sum(count for total, count in ways.items() if abs(total) >= seen)
    return as_far / 2 ** len(numbers)


def correct_by_holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's corrected p values, in the order given."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    corrected = [0.0] * len(ps)
    largest_so_far = 0.0
    for rank, index in enumerate(order):
        multiplied = (len(ps) - rank) * ps[index]
        largest_so_far = max(largest_so_far, multiplied)
        corrected[index] = min(1.0, largest_so_far)
    return corrected


def is_deaf(low_of_control: float) -> bool:
    """Return whether the endpoint is deaf: the lower end of oracle - 0 is not above 2 points."""
    return not low_of_control > POINTS


def judge(deaf: bool, mean: float, high: float, corrected_p: float) -> list[str]:
    """Return the verdicts of a pair; two only if it is ahead or behind, and gains less than 2."""
    if deaf:
        return ["deaf"]
    verdicts = []
    if corrected_p < LEVEL and mean > 0:
        verdicts.append("ahead")
    if corrected_p < LEVEL and mean < 0:
        verdicts.append("behind")
    if high < POINTS:
        verdicts.append("no gain of 2 points")
    return verdicts or ["open"]


# Diagnostics


def diagnose(runs: Sequence[Run]) -> Diagnostics:
    """Return the means over the runs of one arm."""
    on_cpu = [run for run in runs if run["device"] == "cpu"]
    worst = [run["worst"] for run in runs if run["worst"] is not None]
    return Diagnostics(
        objective=mean_or_none([run["objective"] for run in runs]),
        of_test=mean_or_none([run["of_test"] for run in runs]),
        q_over_g=mean_by_query([run["q_over_g"] for run in runs]),
        cosine=mean_by_query([run["cosine"] for run in runs]),
        residual=mean_by_query([run["residual"] for run in runs]),
        largest_residual=max(worst, default=None),
        mean_of_largest=mean_or_none([run["worst"] for run in runs]),
        cpu_align=mean_or_none([run["cpu_align"] for run in on_cpu]),
        cpu_peft=mean_or_none([run["cpu_peft"] for run in on_cpu]),
    )


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if no run has the number.

    Raises:
        ValueError: some runs of the arm have it and others do not.
    """
    there = [value for value in values if value is not None]
    if not there:
        return None
    if len(there) != len(values):
        raise ValueError("some runs of an arm lack a number that others have")
    return math.fsum(there) / len(there)


def mean_by_query(of_runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over runs for each of the queries; an empty list if the arm has none."""
    by_query = list(zip(*of_runs, strict=True))
    return [math.fsum(of_query) / len(of_query) for of_query in by_query]


# The tables


def print_analysis(analysis: Analysis) -> None:
    """Print all tables, as Markdown."""
    all_there = len(analysis.whole) == len(PLANNED_ROUNDS)
    print(f"{len(analysis.whole)} of {len(PLANNED_ROUNDS)} rounds are whole: {analysis.whole}")
    print_choice(analysis)
    for endpoint in ENDPOINTS:
        print_endpoint(endpoint, analysis.endpoints[endpoint], all_there)
    print_diagnostics(analysis.diagnostics)


def print_choice(analysis: Analysis) -> None:
    """Print the mean accuracy at each rate, and the rate that is taken."""
    print("\n| PEFT of | arm | 0.01 | 0.02 | 0.04 | 0.08 | taken |\n|---|---|---|---|---|---|---|")
    for endpoint, arms in analysis.mean_by_rate.items():
        for arm, by_rate in arms.items():
            means = [
                f"{float(by_rate[rate]):.1f}" if rate in by_rate else ""
                for rate in CHOICE_RATES["5 epochs"]
            ]
            print(f"| {endpoint} | {arm} | {' | '.join(means)} | {analysis.taken[endpoint][arm]} |")


def print_endpoint(name: str, endpoint: Endpoint, all_there: bool) -> None:
    """Print arms and comparisons of one endpoint; verdicts only when all rounds are there."""
    print(f"\n{name}\n\n| {' | '.join(ARMS)} |\n|{'---|' * len(ARMS)}")
    print(f"| {' | '.join(f'{endpoint.arms[arm]:.2f}' for arm in ARMS)} |")
    print("\n| pair | mean | 95 % | p | Holm | verdict |\n|---|---|---|---|---|---|")
    for pair, corrected, verdicts in zip(
        endpoint.questions, endpoint.corrected, endpoint.verdicts, strict=True
    ):
        verdict = ", ".join(verdicts) if all_there else "not yet"
        print(f"| {line_of(pair)} | {pair.p:.5f} | {corrected:.5f} | {verdict} |")
    hearing = "deaf" if endpoint.deaf else "not deaf"
    print(f"| {line_of(endpoint.control)} | | | {hearing if all_there else 'not yet'} |")


def line_of(pair: Pair) -> str:
    """Return the pair, its mean and its interval as cells of a table."""
    return f"{pair.first} - {pair.second} | {pair.mean:+.3f} | {pair.low:+.3f} to {pair.high:+.3f}"


def print_diagnostics(diagnostics: dict[str, Diagnostics]) -> None:
    """Print the means over the runs of each arm."""
    print("\n| arm | " + " | ".join(name.replace("_", " ") for name in Diagnostics._fields) + " |")
    print("|---|" + "---|" * len(Diagnostics._fields))
    for arm in ARMS:
        cells = [cell_of(value) for value in diagnostics[arm]]
        print(f"| {arm} | {' | '.join(cells)} |")


def cell_of(value: float | list[float] | None) -> str:
    """Return a number, or one number for each query, as text."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(f"{of_query:.4f}" for of_query in value)
    return f"{value:.4f}"


if __name__ == "__main__":
    print_analysis(analyse(FILES / "choice.jsonl", FILES / "runs.jsonl"))
