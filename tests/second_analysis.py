"""The statistics of the studies a second time, from their protocols; the figures of the fair race.

It shares no code with the analyses of experiments/. test_second_analysis compares with the pages.
"""

import json
import math
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv

Array = np.ndarray[Any, Any]
Pair = tuple[str, str]  # the first arm minus the second
GAIN = 2.0  # points
LEVEL = 0.05

# --- statistics -----------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A mean difference in points, with its 95 % interval and p, not corrected."""

    mean: float
    low: float
    high: float
    p: float


class Finding(NamedTuple):
    """What a protocol says of a comparison."""

    pair: Pair
    estimate: Estimate
    corrected: float | None  # Holm's p; a control has none
    words: set[str]  # the verdict


def estimate(values: Sequence[float]) -> Estimate:
    """The mean, Student's 95 % interval, and p of all flips of signs."""
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean(values), mean(values) - half, mean(values) + half, p_of_flips(values))


def t_quantile(freedom: int) -> float:
    """The t whose two-sided p is 0.05, by the incomplete beta function."""
    x = betaincinv(freedom / 2, 1 / 2, 0.05)
    return float(np.sqrt(freedom * (1 - x) / x))


def p_of_flips(values: Sequence[float]) -> float:
    """Share of all flips of signs whose sum is at least as far from 0 as the one that was seen."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])  # the first: as seen
    return float(np.mean(abs(sums) >= abs(sums[0]) - 1e-9))  # equal sums may be rounded apart


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's corrected p: the i-th smallest of m times m − i + 1, and none below one before."""
    corrected = []
    for p in ps:
        products = [other * sum(x >= other for x in ps) for other in ps if other <= p]
        corrected.append(min(1.0, max(products)))
    return corrected


def judge(found: Estimate, corrected: float) -> set[str]:
    """The words of the verdict."""
    words = set()
    if corrected < LEVEL:
        words.add("ahead" if found.mean > 0 else "behind")
    if found.high < GAIN:
        words.add("no gain of 2 points")
    return words or {"open"}


# --- records --------------------------------------------------------------------------------------


def read(path: Path) -> list[Any]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(numbers: Iterable[tuple[Sequence[Hashable], float]], *axes: Sequence[Hashable]) -> Array:
    """Each number in its place along the axes, by its keys; every place has one."""
    found = np.full([len(axis) for axis in axes], np.nan)
    for keys, number in numbers:
        place = tuple(axis.index(key) for axis, key in zip(axes, keys, strict=True))
        assert np.isnan(found[place]), f"{keys} is there twice"
        found[place] = number
    assert not np.isnan(found).any()
    return found


# --- the fair race --------------------------------------------------------------------------------

ARMS = ("aligned", "direct", "restart", "q = 0")
ALPHABETS = ("Latin", "Greek", "Balinese")


def race(records: list[Any], name: str) -> Array:
    """A number of each run by arm, backbone, alphabet and seed.

    `test` is the accuracy after the last epoch.
    """
    numbers = []
    for arm, _, (alphabet, backbone, seed), _, test, held_out, cpu in records:
        of_run = {"test": test[max(test, key=int)], "held out": held_out, "cpu": cpu}
        numbers.append(((arm, backbone, alphabet, seed), of_run[name]))
    return table(numbers, ARMS, range(4, 12), ALPHABETS, range(3))


def analyse(accuracy: Array) -> list[Finding]:
    """Compare aligned with each other arm, over the backbones."""
    by_backbone = accuracy.mean((2, 3))
    found = [estimate(by_backbone[0] - other) for other in by_backbone[1:]]
    corrected = holm([one.p for one in found])
    findings = []
    for arm, one, p in zip(ARMS[1:], found, corrected, strict=True):
        findings.append(Finding(("aligned", arm), one, p, judge(one, p)))
    return findings
