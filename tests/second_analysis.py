"""The analysis of the fair race once more, by somebody who had not seen the first.

It was written from fair_race.md's protocol and the file of runs alone; test_fair_race compares.
"""

import json
import math
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

OTHERS = ("direct", "restart", "q = 0")
BACKBONES = range(4, 12)
ROUNDS = list(product((0, 1, 2), ("Greek", "Balinese", "Latin")))
Results = dict[tuple[str, str, int, int], float]  # (arm, alphabet, backbone, seed) -> accuracy


class Row(NamedTuple):
    """Aligned minus another arm, in points."""

    difference: float
    low: float  # of the 95 % interval
    high: float
    p: float
    p_holm: float


def read_results(file: Path) -> Results:
    """Read the test accuracy of each run after its last epoch; a run may be there only once."""
    results: Results = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        arm, _, cell, _, accuracies, *_ = json.loads(line)
        if (arm, *cell) in results:
            raise ValueError(f"the run {arm} {cell} is there twice")
        results[arm, *cell] = accuracies[max(accuracies, key=int)]
    return results


def whole_rounds(results: Results) -> list[tuple[int, str]]:
    """Return the rounds (seed and alphabet) that have every arm on every backbone."""
    whole = []
    for seed, alphabet in ROUNDS:
        runs = product(("aligned", *OTHERS), (alphabet,), BACKBONES, (seed,))
        if all(run in results for run in runs):
            whole.append((seed, alphabet))
    return whole


def t_quantile(probability: float, freedom: int, steps: int = 4000) -> float:
    """Return a quantile above 0 of Student's t: bisection over the density's midpoint sums."""
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    low, high = 0.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        points = (middle * (i + 0.5) / steps for i in range(steps))
        heights = sum((1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in points)
        below = 0.5 + scale * heights * middle / steps
        low, high = (middle, high) if below < probability else (low, middle)
    return low


def analyse(file: Path) -> dict[str, Row]:
    """Compare aligned with each other arm in the whole rounds, with Holm's correction."""
    results, rows, corrected = read_results(file), dict[str, Row](), 0.0
    for other in OTHERS:
        gains = []
        for backbone in BACKBONES:
            cells = [(alphabet, backbone, seed) for seed, alphabet in whole_rounds(results)]
            gains.append(mean(results["aligned", *c] - results[other, *c] for c in cells))
        half = t_quantile(0.975, len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))
        pairs = [(gain, -gain) for gain in gains]
        flips = [math.fsum(pattern) for pattern in product(*pairs)]  # the first: as observed
        p = sum(abs(flip) >= abs(flips[0]) - 1e-9 for flip in flips) / len(flips)
        rows[other] = Row(mean(gains), mean(gains) - half, mean(gains) + half, p, 1.0)
    for rank, other in enumerate(sorted(OTHERS, key=lambda name: rows[name].p)):
        corrected = max(corrected, min(1.0, (len(OTHERS) - rank) * rows[other].p))
        rows[other] = rows[other]._replace(p_holm=corrected)
    return rows
