"""A second analysis of experiments/right_curvature, from protocol and files alone.

The protocol leaves open, and here it is chosen:

1. The mean accuracy of a choice of rates is that of its eight cells, each with the same weight.
   With the same weight for each drawing F would take 0.02 for 5 epochs, and not 0.04.
2. The largest residual is that of all runs of an arm.
3. q = 0 has no cosine. The files say 0.0, and so does the table.
4. CPU-seconds are of the rounds whose device is "cpu". Those of PEFT are one number a run in the
   files, and so they hold both endpoints together.
"""

from itertools import product
from typing import Any

import numpy as np
from second_analysis import GAIN, Array, Finding, Pair, estimate, holm, judge, table

ARMS = ("direct", "0", "F", "N", "V", "0v", "oracle")
ENDPOINTS = ("30 epochs", "5 epochs")
QUESTIONS = (("N", "0"), ("V", "0v"), ("F", "0"), ("0", "direct"))
CONTROL = ("oracle", "0")
BACKBONES = range(28, 44)
ALPHABETS = ("Balinese", "Greek", "Latin")
SEEDS = range(2)
CHOICE = (range(44, 46), ("Early_Aramaic", "Tagalog"), SEEDS)  # other backbones and alphabets

Record = dict[str, Any]


def by_cell(records: list[Record], arm: str, name: str) -> Array:
    """An arm's accuracies at an endpoint, or another number: backbone, alphabet, seed."""
    numbers = []
    for record in records:
        if record["arm"] == arm:
            number = record.get(name)
            if name in ENDPOINTS:
                (number,) = record["ends"][name].values()
            keys = (record["backbone"], record["alphabet"], record["seed"])
            numbers.append((keys, number))
    return table(numbers, BACKBONES, ALPHABETS, SEEDS)


def gains(records: list[Record], pair: Pair, endpoint: str) -> Array:
    """The first arm minus the second: backbone, alphabet, seed."""
    return by_cell(records, pair[0], endpoint) - by_cell(records, pair[1], endpoint)


def analyse(records: list[Record], endpoint: str) -> list[Finding]:
    """The control and the four questions at an endpoint, over the backbones."""
    pairs = (CONTROL, *QUESTIONS)
    control, *found = (estimate(gains(records, pair, endpoint).mean((1, 2))) for pair in pairs)
    is_heard = control.low > GAIN
    findings = [Finding(CONTROL, control, None, {"heard" if is_heard else "deaf"})]
    corrected = holm([one.p for one in found])
    for pair, one, p in zip(QUESTIONS, found, corrected, strict=True):
        findings.append(Finding(pair, one, p, judge(one, p) if is_heard else {"deaf"}))
    return findings


def choose(choice: list[Record], arm: str, endpoint: str) -> tuple[dict[str, float], str]:
    """The mean of the eight cells at each rate, and the best rate; of equal ones the lower."""
    runs = [run for run in choice if run["arm"] == arm]
    cells = [(run["backbone"], run["alphabet"], run["seed"]) for run in runs]
    assert sorted(cells) == [*product(*CHOICE)]
    means = {}
    for rate in runs[0]["ends"][endpoint]:
        means[rate] = float(np.mean([run["ends"][endpoint][rate] for run in runs]))
    best = [rate for rate, mean in means.items() if mean > max(means.values()) - 1e-9]
    return means, min(best, key=float)


def diagnose(records: list[Record], arm: str) -> dict[str, list[float]]:
    """Means over the runs of an arm, for each upper step; none where there is no such number."""
    runs = [run for run in records if run["arm"] == arm]
    found = {}
    for name in ("objective", "of_test", "q_over_g", "cosine", "residual"):
        numbers = [run[name] for run in runs]
        found[name] = [] if None in numbers else [*np.atleast_1d(np.mean(numbers, axis=0))]
    found["worst"] = [max(run["worst"] for run in runs)] if found["residual"] else []
    on_cpu = [run for run in runs if run["device"] == "cpu"]
    found["CPU-s of align"] = [float(np.mean([run["cpu_align"] for run in on_cpu]))]
    found["of PEFT"] = [float(np.mean([run["cpu_peft"] for run in on_cpu]))]
    return found
