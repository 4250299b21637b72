"""What the runs of the fair race say: the choice of phase 1, the table and picture of phase 2.

    python -m experiments.fair_race_analysis

It was written, and run on simulated runs, before phase 2 began; fair_race.md names its rules.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import typer
from matplotlib import pyplot as plt
from scipy.stats import t as student

from config import Record
from experiments.fair_race_plan import (
    BACKBONES,
    BETWEEN,
    CANDIDATES,
    CHOICE,
    RACE,
    RESULTS,
    Arm,
    Run,
    read_runs,
)
from experiments.recipe import markdown

AGAINST = ("direct", "restart", "q = 0")  # aligned is compared with each
NAMES = ("aligned", *AGAINST)
SMALL = 2.0  # points; a gain below them is called none


class Difference(NamedTuple):
    """An arm minus another, in points of test accuracy."""

    mean: float  # over backbones
    low: float  # of the 95 % interval
    high: float
    p: float  # two-sided, by sign flips of the backbones


def main(results: Path = RESULTS) -> None:
    """Print the tables, and draw RESULTS.png once there are whole rounds."""
    print_choice(read_runs(results / "choice.jsonl"))
    runs = in_whole_rounds(read_runs(results / "race.jsonl"))
    rounds = len(runs) // (len(BACKBONES) * len(NAMES))
    planned = len(RACE) // len(BACKBONES)
    print(f"\nPhase 2: {rounds} of {planned} rounds are whole\n")
    if rounds:
        print(markdown(rows_of(runs, final=rounds == planned)))
        draw(runs, results.with_suffix(".png"))


# --- phase 1 --------------------------------------------------------------------------------------


def choose(name: str, runs: Sequence[Run]) -> Arm:
    """Choose one of the candidates of an arm by its runs.

    First comes the division of the work whose mean over two rates is best, then the best of its
    three rates.
    """
    arms = [arm for arm in CANDIDATES[name] if arm.rate != BETWEEN]
    # of equal ones max takes the first: for direct less work, and the lower rate
    division = max(arms, key=lambda arm: mean_of(name, alike(arm, arms), runs))
    return max(alike(division, CANDIDATES[name]), key=lambda arm: mean_of(name, [arm], runs))


def alike(arm: Arm, arms: Sequence[Arm]) -> list[Arm]:
    """Those of `arms` that divide the work as `arm` does, at any rate; the lowest rate first."""
    same = [other for other in arms if other._replace(rate=arm.rate) == arm]
    return sorted(same)


def mean_of(name: str, arms: Sequence[Arm], runs: Sequence[Run]) -> float:
    """Mean accuracy of these candidates on the images that are not trained on."""
    return fmean(run.held_out for run in runs if run.name == name and run.arm in arms)


def print_choice(runs: Sequence[Run]) -> None:
    """Print each candidate's mean and, once all runs are there, what the rule chooses."""
    rows: list[Record] = []
    for name, candidates in CANDIDATES.items():
        for arm in candidates:
            held_out = [run.held_out for run in runs if (run.name, run.arm) == (name, arm)]
            if held_out:
                row = {"arm": name, "candidate": describe(arm), "work": f"{arm.work:.0f}"}
                rows.append(
                    row | {"cells": len(held_out), "held out (%)": f"{fmean(held_out):.1f}"}
                )
    print(markdown(rows))
    planned = sum(len(CHOICE) * len(candidates) for candidates in CANDIDATES.values())
    if len(runs) == planned:
        for name in CANDIDATES:
            print(f"{name}: {choose(name, runs)!r}")


def describe(arm: Arm) -> str:
    """What an arm does, in words."""
    before = ""
    if arm.first_epochs:
        before = f"PEFT of {arm.first_epochs} epochs, "
    if arm.alternations:
        before = f"T {arm.alternations}, "
    return f"{before}{arm.epochs} epochs at {arm.rate:g}"


# --- phase 2 --------------------------------------------------------------------------------------


def in_whole_rounds(runs: Sequence[Run]) -> list[Run]:
    """The runs of those alphabets and seeds for which every backbone has every arm."""
    sizes = Counter((run.cell.alphabet, run.cell.seed) for run in runs)
    whole = len(BACKBONES) * len(NAMES)
    return [run for run in runs if sizes[run.cell.alphabet, run.cell.seed] == whole]


def end(run: Run) -> float:
    """Test accuracy after the last epoch."""
    return run.test[max(run.test)]


def by_backbone(runs: Sequence[Run], arm: str, against: str) -> list[float]:
    """For each backbone the accuracy of `arm` minus that of `against`, as a mean over its cells.

    Two runs are compared in the same cell, so with the same seed.
    """
    accuracy = {(run.name, run.cell): end(run) for run in runs}
    cells = {run.cell for run in runs}
    means = []
    for number in BACKBONES:
        differences = []
        for cell in cells:
            if cell.backbone == number:
                differences.append(accuracy[arm, cell] - accuracy[against, cell])
        means.append(fmean(differences))
    return means


def difference(values: Sequence[float]) -> Difference:
    """Mean, 95 % interval by Student's t, and the exact p of all flips of signs."""
    mean = fmean(values)
    n = len(values)
    half = float(student.ppf(0.975, n - 1)) * stdev(values) / n**0.5
    flipped = all_signs(n) @ np.array(values) / n  # the mean after each flip
    is_extreme = abs(flipped) >= abs(mean) - 1e-9  # of equal means, rounding may differ
    return Difference(mean, mean - half, mean + half, float(is_extreme.mean()))


@cache
def all_signs(n: int) -> np.ndarray[Any, Any]:
    """All ways to give n numbers a sign; shape (2ⁿ, n)."""
    return np.array([*product((1, -1), repeat=n)])


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted by Holm's method, in the order in which they were given.

    From the least to the largest, each is multiplied by how many are left, itself among them. The
    result is at most 1, and never below the adjusted value of a smaller p.
    """
    adjusted = [0.0] * len(ps)
    largest = 0.0  # of the adjusted ones so far
    ascending = sorted(range(len(ps)), key=lambda k: ps[k])
    for done, k in enumerate(ascending):
        left = len(ps) - done
        largest = max(largest, min(1.0, left * ps[k]))
        adjusted[k] = largest
    return adjusted


def verdict(found: Difference, p: float) -> str:
    """What may be said of a difference with this adjusted p, once all rounds are there."""
    words = []
    if p < 0.05:
        words.append("ahead" if found.mean > 0 else "behind")
    if found.high < SMALL:
        words.append(f"no gain of {SMALL:g} points")
    return ", ".join(words) or "open"


def rows_of(runs: Sequence[Run], final: bool) -> list[Record]:
    """A row for each arm, with what `aligned` gains over it.

    `final`: all rounds are there, so there are verdicts.
    """
    gains = [difference(by_backbone(runs, "aligned", other)) for other in AGAINST]
    adjusted = holm([gain.p for gain in gains])
    heads = ("aligned minus this", "95 % interval", "p (Holm)", "verdict")
    rows: list[Record] = []
    for name in NAMES:
        of_arm = [run for run in runs if run.name == name]
        row = {
            "arm": name,
            "work": f"{of_arm[0].arm.work:.0f}",
            "CPU-s": f"{fmean(run.cpu for run in of_arm):.0f}",
            "test (%)": f"{fmean(end(run) for run in of_arm):.1f}",
        }
        comparison = ["", "", "", ""]  # with `aligned`, which is not compared with itself
        if name in AGAINST:
            k = AGAINST.index(name)
            gain, p = gains[k], adjusted[k]
            interval = f"{gain.low:+.1f} to {gain.high:+.1f}"
            words = verdict(gain, p) if final else "not yet"
            comparison = [f"{gain.mean:+.1f}", interval, f"{gain.p:.2g} ({p:.2g})", words]
        rows.append(row | dict(zip(heads, comparison, strict=True)))
    return rows


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw each arm's test accuracy minus that of direct at its end, against the work so far.

    At the end of an arm there is the 95 % interval of this difference.
    """
    direct = {run.cell: end(run) for run in runs if run.name == "direct"}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.axhline(0, color="grey", linewidth=0.8)
    for name in ("direct", "restart", "q = 0", "aligned"):
        arm = [run for run in runs if run.name == name]
        work_before = arm[0].arm.work - arm[0].arm.epochs
        x, y = [], []
        for epoch in arm[0].test:
            x.append(work_before + epoch)
            y.append(fmean(run.test[epoch] - direct[run.cell] for run in arm))
        (line,) = axes.plot(x, y, label=name, linewidth=1.5)
        if name != "direct":
            gain = difference(by_backbone(runs, name, "direct"))
            bars = [[gain.mean - gain.low], [gain.high - gain.mean]]
            axes.errorbar([x[-1]], [gain.mean], bars, fmt="o", capsize=4, color=line.get_color())
    axes.set_xlabel("work, in epochs of PEFT, aligning and the first PEFT included")
    axes.set_ylabel("points above the end of direct")
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
