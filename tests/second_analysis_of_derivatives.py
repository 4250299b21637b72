"""The analysis of experiments/which_derivative.md a second time, from the protocol's text.

A record is a line of a file of the results, as a dictionary. p of Student's t comes from the
incomplete beta function.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import second_analysis
from scipy.special import betainc
from second_analysis import GAIN, LEVEL, Array, Estimate, Pair, holm, judge, t_quantile

ALPHABETS = (
    "Balinese", "Early_Aramaic", "Greek", "Latin", "Tagalog",
    "Japanese_(katakana)", "Korean", "Sanskrit",
)  # fmt: skip
BACKBONES = (46, 47, 48, 49)
SEEDS = (0, 1)
ARMS = ("0v", "G", "N", "U", "A", "C", "oracle-G", "P")
RATES = ("0.01", "0.02", "0.03")

CONTROL = ("oracle-G", "0v")
PRIMARY = (("U", "G"), ("G", "0v"), ("N", "G"))
SECONDARY = (("A", "G"), ("P", "G"), ("U", "C"))

Record = dict[str, Any]


class Finding(NamedTuple):
    """What the protocol says of one comparison."""

    here: Estimate  # for these alphabets
    units: Estimate  # with alphabets as units; p is that of the flips
    corrected: float | None = None  # Holm's p for these alphabets; the control has none
    corrected_units: float | None = None  # Holm's p with alphabets as units
    words: frozenset[str] = frozenset()  # the verdict


def table(records: Iterable[Record]) -> Array:
    """Accuracy by arm, alphabet and backbone: the mean over rates and seeds."""
    numbers = []
    for record in records:
        keys = [record[name] for name in ("arm", "alphabet", "backbone", "seed")]
        numbers.append((keys, np.mean([record["ends"][rate] for rate in RATES])))
    return second_analysis.table(numbers, ARMS, ALPHABETS, BACKBONES, SEEDS).mean(axis=3)


def differences(accuracy: Array, pair: Pair) -> Array:
    """First arm minus second, by alphabet and backbone."""
    first, second = (accuracy[ARMS.index(name)] for name in pair)
    return first - second


def p_of_t(mean: float, error: float, freedom: int) -> float:
    """Two-sided p of Student's t = mean / error; 1 for a mean of 0, also without any spread."""
    if mean == 0:
        return 1.0
    x = freedom * error**2 / (freedom * error**2 + mean**2)
    return float(betainc(freedom / 2, 1 / 2, x))


def these_alphabets(gains: Array) -> Estimate:
    """Mean over alphabets; the variance is that of the tasks about their alphabet's mean."""
    alphabets, tasks = gains.shape
    freedom = alphabets * (tasks - 1)
    squares = float(((gains - gains.mean(axis=1, keepdims=True)) ** 2).sum())
    error = float(np.sqrt(squares / freedom / gains.size))
    mean = float(gains.mean())
    half = t_quantile(freedom) * error
    return Estimate(mean, mean - half, mean + half, p_of_t(mean, error, freedom))


def family(accuracy: Array, pairs: tuple[Pair, ...]) -> dict[Pair, Finding]:
    """The comparisons that share one correction, with the words of a heard endpoint."""
    gains = [differences(accuracy, pair) for pair in pairs]
    here = [these_alphabets(one) for one in gains]
    units = [second_analysis.estimate(one.mean(axis=1)) for one in gains]
    corrected = holm([one.p for one in here])
    corrected_units = holm([one.p for one in units])
    findings = {}
    for k, pair in enumerate(pairs):
        words = judge(here[k], corrected[k])
        if corrected[k] < LEVEL and corrected_units[k] < LEVEL:
            words.add("beyond these alphabets")
        numbers = (here[k], units[k], corrected[k], corrected_units[k])
        findings[pair] = Finding(*numbers, frozenset(words))
    return findings


def analyse(records: Iterable[Record]) -> dict[Pair, Finding]:
    """The control and the registered comparisons, with verdicts."""
    accuracy = table(records)
    control = differences(accuracy, CONTROL)
    here, units = these_alphabets(control), second_analysis.estimate(control.mean(axis=1))
    is_heard = here.low > GAIN
    word = frozenset({"heard" if is_heard else "deaf"})
    found = {CONTROL: Finding(here, units, words=word)}
    found |= family(accuracy, PRIMARY) | family(accuracy, SECONDARY)
    if not is_heard:
        found = {pair: one._replace(words=word) for pair, one in found.items()}
    return found


def gains_over_G(records: list[Record], steps: str, arm: str) -> list[float]:
    """For each cell, the arm's responses of all alternations together, divided by those of G."""
    of_arm: dict[tuple[str, int, int], float] = {}
    of_G: dict[tuple[str, int, int], float] = {}
    for record in records:
        cell = (record["alphabet"], record["backbone"], record["seed"])
        of_arm[cell] = of_arm.get(cell, 0.0) + record[steps][arm]
        of_G[cell] = of_G.get(cell, 0.0) + record[steps]["G"]
    return [of_arm[cell] / of_G[cell] for cell in of_G]
