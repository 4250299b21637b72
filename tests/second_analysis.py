"""The analysis of the fair race once more, by somebody who had not seen the first.

It was written from fair_race.md's protocol and the file of runs alone; test_fair_race compares.
"""

import json
import math
from itertools import product
from pathlib import Path
from statistics import mean, stdev

OTHERS = ("direct", "restart", "q = 0")
BACKBONES = range(4, 12)
T_975 = 2.364624252  # a table's 97.5 % quantile of Student's t, 7 degrees of freedom: 8 backbones
Results = dict[tuple[str, str, int, int], float]  # (arm, alphabet, backbone, seed) -> accuracy


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
    for seed, alphabet in product((0, 1, 2), ("Greek", "Balinese", "Latin")):
        runs = product(("aligned", *OTHERS), (alphabet,), BACKBONES, (seed,))
        if all(run in results for run in runs):
            whole.append((seed, alphabet))
    return whole


def analyse(file: Path) -> dict[str, tuple[float, ...]]:
    """Aligned minus each other arm, in points: mean, interval's low and high end, p, p by Holm."""
    results = read_results(file)
    rounds = whole_rounds(results)
    found = {}
    for other in OTHERS:
        gains = []
        for backbone in BACKBONES:
            cells = [(alphabet, backbone, seed) for seed, alphabet in rounds]
            gains.append(mean(results["aligned", *c] - results[other, *c] for c in cells))
        half = T_975 * stdev(gains) / math.sqrt(len(gains))
        pairs = [(gain, -gain) for gain in gains]
        flips = [math.fsum(pattern) for pattern in product(*pairs)]  # the first: as observed
        p = sum(abs(flip) >= abs(flips[0]) - 1e-9 for flip in flips) / len(flips)
        found[other] = (p, mean(gains), half)
    rows, corrected = dict[str, tuple[float, ...]](), 0.0
    for rank, other in enumerate(sorted(OTHERS, key=found.__getitem__)):
        p, gain, half = found[other]
        corrected = max(corrected, min(1.0, (len(OTHERS) - rank) * p))
        rows[other] = (gain, gain - half, gain + half, p, corrected)
    return rows
