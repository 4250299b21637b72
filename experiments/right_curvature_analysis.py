"""What the runs of the right curvature say: the choice of phase 0, the comparisons of phase 2.

python -m experiments.right_curvature_analysis    # rules: right_curvature.md
"""

from itertools import product
from pathlib import Path
from statistics import fmean

import typer

from config import Record
from experiments import right_curvature as plan
from experiments.fair_race_analysis import Difference, difference, holm
from experiments.recipe import markdown

Runs = dict[plan.Unit, plan.Run]
SMALL = 2.0  # points
NEEDED = 12  # the gate: backbones of 16 on which the objective is lower with N than with q = 0


def main(results: Path = plan.RESULTS) -> None:
    """Print the means of every arm at every λ, and the comparisons of whole rounds."""
    choice = plan.read_runs(results / "choice.jsonl")
    print(markdown(arm_rows(choice)))
    if len(choice) == len(plan.CHOICE):
        own = plan.choose([*choice.values()])
        runs = plan.read_runs(results / "runs.jsonl")
        rounds = plan.rounds_of(own)
        whole = [(name, units) for name, units in rounds if runs.keys() >= {*units}]
        print(f"\nown λ: {own}\n\nPhase 2: {len(whole)} of {len(rounds)} rounds are whole\n")
        if whole:
            counted = set().union(*(units for _, units in whole))
            print(markdown(arm_rows({unit: runs[unit] for unit in counted})))
            print(f"\n{markdown(compare(runs, whole, final=len(whole) == len(rounds)))}")


def arm_rows(runs: Runs) -> list[Record]:
    """A row for each arm and λ: means over its runs."""
    rows: list[Record] = []
    for arm, lam in product(plan.ARMS, plan.LAMBDAS):
        of_arm = [run for run in runs.values() if run.unit[:2] == (arm, lam)]
        if of_arm:
            row: Record = {"arm": arm, "λ": lam, "runs": len(of_arm)}
            for name in ("accuracy", "objective", "of_test", "cpu"):
                row[name] = fmean(getattr(run, name) for run in of_arm)
            for name in ("q_over_g", "cosine", "distance"):
                row[name] = fmean(run.last[name] for run in of_arm)
            rows.append(row)
    return rows


def by_backbone(value: str, other: str, runs: Runs, rounds: list[list[plan.Unit]]) -> list[float]:
    """For each backbone the mean over its cells of N minus another arm, of a field of `Run`."""
    means = []
    for number in plan.BACKBONES:
        differences = []
        for units in rounds:
            arm = {x.arm: getattr(runs[x], value) for x in units if x.backbone == number}
            differences.append(arm["N"] - arm[other])
        means.append(fmean(differences))
    return means


def compare(runs: Runs, whole: list[tuple[str, list[plan.Unit]]], final: bool) -> list[Record]:
    """N minus each other arm at both λ; Holm's correction is over all that are there."""
    rows, found = list[Record](), list[Difference]()
    for name, other in product(dict(whole), ("0", "F")):
        rounds = [units for of_name, units in whole if of_name == name]
        gate = sum(x < 0 for x in by_backbone("objective", "0", runs, rounds))
        found.append(difference(by_backbone("accuracy", other, runs, rounds)))
        rows.append({"at": name, "N minus": other, "rounds": len(rounds), "gate": gate})
    adjusted = holm([one.p for one in found])
    for row, one, p in zip(rows, found, adjusted, strict=True):
        row["mean"] = f"{one.mean:+.2f}"
        row["95 % interval"] = f"{one.low:+.2f} to {one.high:+.2f}"
        row["p (Holm)"] = f"{one.p:.2g} ({p:.2g})"
        row["verdict"] = verdict(one, p, row["gate"], row["N minus"]) if final else "not yet"
    return rows


def verdict(one: Difference, p: float, gate: int, other: str) -> str:
    if gate < NEEDED:
        return "the better gradient was not followed"
    if p < 0.05 and one.mean >= SMALL:
        return "N helps"
    return "bounded" if other == "0" and one.high < SMALL else "open"


if __name__ == "__main__":
    typer.run(main)
