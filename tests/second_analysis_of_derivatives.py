"""The analysis of experiments/which_derivative.md a second time, from the protocol's text.

It imports nothing of the study. A record is a line of a file of the results, as a dictionary. p and
quantiles of Student's t come from the incomplete beta function.

    python tests/second_analysis_of_derivatives.py
"""

import json
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betainc, betaincinv

FILES = Path(__file__).resolve().parents[1] / "experiments" / "which_derivative"
ALPHABETS = (
    "Balinese", "Early_Aramaic", "Greek", "Latin", "Tagalog",
    "Japanese_(katakana)", "Korean", "Sanskrit",
)  # fmt: skip
BACKBONES = (46, 47, 48, 49)
SEEDS = (0, 1)
ARMS = ("0v", "G", "N", "U", "A", "C", "oracle-G", "P")
RATES = ("0.01", "0.02", "0.03")
TEST_DRAWERS = 7  # each drew every character once

Record = dict[str, Any]
Array = np.ndarray[Any, Any]
Pair = tuple[str, str]  # the first arm minus the second
CONTROL: tuple[Pair, ...] = (("oracle-G", "0v"),)
PRIMARY: tuple[Pair, ...] = (("U", "G"), ("G", "0v"), ("N", "G"))
SECONDARY: tuple[Pair, ...] = (("A", "G"), ("P", "G"), ("U", "C"))

GAIN = 2.0  # points
LEVEL = 0.05


class Estimate(NamedTuple):
    """A mean difference in points, with its 95 % interval and p, not corrected."""

    mean: float
    low: float
    high: float
    p: float


class Finding(NamedTuple):
    """What the protocol says of one comparison."""

    here: Estimate  # for these alphabets
    units: Estimate  # with alphabets as units; p is that of the flips
    corrected: float  # Holm's p for these alphabets
    corrected_units: float  # Holm's p with alphabets as units
    words: tuple[str, ...]  # the verdict; none before all cells are whole


# --- from records to differences ------------------------------------------------------------------


def read(path: Path) -> list[Record]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def endpoint(record: Record) -> float:
    """Mean accuracy (%) over the three rates; chance if aligning diverged."""
    if not record["losses"]:
        classes = record["images"] / TEST_DRAWERS
        return float(100 / classes)
    ends = [record["ends"][rate] for rate in RATES]
    return float(np.mean(ends))


def table(records: Iterable[Record]) -> Array:
    """Accuracy by alphabet, backbone and arm, mean over the seeds; NaN where a run is missing."""
    found = np.full((len(ALPHABETS), len(BACKBONES), len(SEEDS), len(ARMS)), np.nan)
    for record in records:
        place = (
            ALPHABETS.index(record["alphabet"]),
            BACKBONES.index(record["backbone"]),
            SEEDS.index(record["seed"]),
            ARMS.index(record["arm"]),
        )
        assert np.isnan(found[place]), "a run is there twice"
        found[place] = endpoint(record)
    return found.mean(axis=2)


def differences(accuracy: Array, pair: Pair) -> list[Array]:
    """First arm minus second: for each alphabet an array of its tasks that have all arms."""
    first, second = (ARMS.index(name) for name in pair)
    found = []
    for of_alphabet in accuracy:
        whole = of_alphabet[~np.isnan(of_alphabet).any(axis=1)]
        if len(whole):
            found.append(whole[:, first] - whole[:, second])
    return found


# --- statistics -----------------------------------------------------------------------------------


def p_of_t(mean: float, error: float, freedom: int) -> float:
    """Two-sided p of Student's t = mean / error; 1 for a mean of 0, also without any spread."""
    if mean == 0:
        return 1.0
    x = freedom * error**2 / (freedom * error**2 + mean**2)
    return float(betainc(freedom / 2, 1 / 2, x))


def quantile(freedom: int) -> float:
    """The t whose two-sided p is 0.05."""
    x = betaincinv(freedom / 2, 1 / 2, 0.05)
    return float(np.sqrt(freedom * (1 - x) / x))


def these_alphabets(groups: list[Array]) -> Estimate:
    """Mean over alphabets; the variance is that of the tasks about their alphabet's mean."""
    sizes = np.array([len(d) for d in groups])
    freedom = int((sizes - 1).sum())
    squares = sum(float(((d - d.mean()) ** 2).sum()) for d in groups)
    error = float(np.sqrt(squares / freedom * (1 / sizes).sum())) / len(groups)
    mean = float(np.mean([d.mean() for d in groups]))
    half = quantile(freedom) * error
    return Estimate(mean, mean - half, mean + half, p_of_t(mean, error, freedom))


def alphabets_as_units(groups: list[Array]) -> Estimate:
    """Student's t over the means of the alphabets; p from all flips of their signs."""
    units = np.array([d.mean() for d in groups])
    mean = float(units.mean())
    half = quantile(len(units) - 1) * float(np.sqrt(units.var(ddof=1) / len(units)))
    return Estimate(mean, mean - half, mean + half, p_of_flips(units))


def p_of_flips(units: Array) -> float:
    """Share of all sign flips whose |sum| is at least the observed one."""
    signs = np.array(list(product((1, -1), repeat=len(units))))
    sums = np.abs(signs @ units)
    rounding = 1e-9  # two equal sums may differ by it, and count as equal
    return float((sums >= abs(units.sum()) - rounding).mean())


def holm(ps: list[float]) -> list[float]:
    """Holm's corrected p: a hypothesis falls only if all with a smaller p fall."""
    corrected = []
    for p in ps:
        not_larger = [other for other in ps if other <= p]
        # the i-th smallest of m is multiplied by m − i + 1; equal ones share the largest factor
        factors = [len(ps) - sum(less < other for less in ps) for other in not_larger]
        products = [other * factor for other, factor in zip(not_larger, factors, strict=True)]
        corrected.append(min(1.0, max(products)))
    return corrected


# --- verdicts -------------------------------------------------------------------------------------


def words(here: Estimate, corrected: float, corrected_units: float) -> tuple[str, ...]:
    """The verdict where the endpoint is not deaf."""
    said = []
    if corrected < LEVEL:
        said.append("ahead" if here.mean > 0 else "behind")
        if corrected_units < LEVEL:
            said.append("beyond these alphabets")
    if here.high < GAIN:
        said.append("no gain of 2 points")
    return tuple(said) or ("open",)


def family(accuracy: Array, pairs: tuple[Pair, ...]) -> dict[Pair, Finding]:
    """The comparisons that share one correction, still without verdicts."""
    gains = [differences(accuracy, pair) for pair in pairs]
    here = [these_alphabets(groups) for groups in gains]
    units = [alphabets_as_units(groups) for groups in gains]
    corrected = holm([one.p for one in here])
    corrected_units = holm([one.p for one in units])
    findings = {}
    for k, pair in enumerate(pairs):
        findings[pair] = Finding(here[k], units[k], corrected[k], corrected_units[k], ())
    return findings


def analyse(records: Iterable[Record]) -> dict[Pair, Finding]:
    """The control and the registered comparisons, with verdicts once all cells are whole."""
    accuracy = table(records)
    control = family(accuracy, CONTROL)
    rest = family(accuracy, PRIMARY) | family(accuracy, SECONDARY)
    if np.isnan(accuracy).any():
        return control | rest
    is_deaf = not control[CONTROL[0]].here.low > GAIN
    found = {CONTROL[0]: control[CONTROL[0]]._replace(words=("deaf" if is_deaf else "heard",))}
    for pair, one in rest.items():
        verdict = words(one.here, one.corrected, one.corrected_units)
        found[pair] = one._replace(words=("deaf",) if is_deaf else verdict)
    return found


# --- first-order gains ----------------------------------------------------------------------------


def gains_over_G(records: list[Record], steps: str, arm: str) -> list[float]:
    """For each cell, the arm's responses of all alternations together, divided by those of G."""
    of_arm: dict[tuple[str, int, int], float] = {}
    of_G: dict[tuple[str, int, int], float] = {}
    for record in records:
        cell = (record["alphabet"], record["backbone"], record["seed"])
        of_arm[cell] = of_arm.get(cell, 0.0) + record[steps][arm]
        of_G[cell] = of_G.get(cell, 0.0) + record[steps]["G"]
    return [of_arm[cell] / of_G[cell] for cell in of_G]


if __name__ == "__main__":
    if not (FILES / "runs.jsonl").exists():
        sys.exit("no run yet")
    for pair, finding in analyse(read(FILES / "runs.jsonl")).items():
        print(" − ".join(pair), finding)
