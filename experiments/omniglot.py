"""The earlier study of handwriting, from its runs: each arm against the aligned one.

    python -m experiments.omniglot

omniglot.csv has a row for each run. An arm's difference is taken cell by cell, a cell being an
alphabet on one of four backbones; p flips the signs of the cells. The script that made the runs is
at commit 68e491c; fair_race.py runs an aligned arm, a direct one, a restart and q = 0 again.
"""

import csv
from pathlib import Path
from statistics import fmean

from config import Record
from experiments.fair_race_analysis import difference, holm
from experiments.recipe import markdown, run_script

RUNS = Path(__file__).with_name("omniglot.csv")
# Each part: the arm that the others are compared with, and the others.
MAIN = (
    "aligned",
    ["direct 0.003", "direct 0.01", "direct 0.03", "direct, equal time", "direct 0.03, equal time",
     "restart", "restart, equal time", "lower only", "pretext on own images", "identity", "q = 0",
     "cg", "random backbone"],
)  # fmt: skip
LONGER = (
    "aligned, T 150",
    ["restart, time of T 150", "direct 0.03, time of T 150", "q = 0, T 150"],
)
DRIVES = (  # one thing changed in each, six cells, one seed
    "aligned",
    ["q alone", "lambda 1e-4", "lambda 1e-2", "lambda 1e-1", "batch 8", "batch 8, identity",
     "batch 8, rank 64, lambda 1e-5", "the same, identity", "the same, q = 0", "5 drawers",
     "5 drawers, direct", "5 drawers, restart", "T 150", "N_U 1", "N_U 8", "N_L 1",
     "upper rate 0.003", "upper rate 0.03"],
)  # fmt: skip
Cells = dict[str, list[Record]]  # the runs of an arm in each cell


def read_arm(arm: str) -> Cells:
    """The rows of an arm, with the numbers that are used here."""
    cells: Cells = {}
    with RUNS.open() as file:
        for row in csv.DictReader(file):
            if row["arm"] == arm:
                curve = [float(accuracy) for accuracy in row["curve"].split()]
                images = int(row["images"])
                run: Record = {
                    "end": 100 * int(row["right"]) / images,  # the epoch that validation chose
                    "last": curve[-1],
                    "epoch 5": curve[0],
                    "probe": 100 * int(row["probe_P"]) / images,
                    "CPU-s": float(row["cpu_align"]) + float(row["cpu_peft"]),
                }
                cells.setdefault(f"{row['alphabet']}-{row['repeat']}", []).append(run)
    return cells


def mean(cells: Cells, key: str) -> float:
    """The mean over cells of the mean over seeds."""
    return fmean(fmean(run[key] for run in runs) for runs in cells.values())


def by_cell(first: Cells, other: Cells, key: str) -> list[float]:
    """The first arm minus the other in each cell that both have."""
    differences = []
    for cell, runs in other.items():
        ours = fmean(run[key] for run in first[cell])
        differences.append(ours - fmean(run[key] for run in runs))
    return differences


def rows_of(first_name: str, others: list[str]) -> list[Record]:
    """A table: means of each arm, and how far the first one is ahead of it."""
    first = read_arm(first_name)
    found = {}
    for name in others:
        found[name] = difference(by_cell(first, read_arm(name), "end"))
    adjusted = dict(zip(found, holm([one.p for one in found.values()]), strict=True))
    rows: list[Record] = []
    for name in (first_name, *others):
        arm = read_arm(name)
        runs = sum(len(runs) for runs in arm.values())
        row: Record = {"arm": name, "cells x seeds": f"{len(arm)} x {runs // len(arm)}"}
        for head, key in {"test (%)": "end", "after 5 epochs": "epoch 5", "probe": "probe"}.items():
            row[head] = f"{mean(arm, key):.1f}"
        row["CPU-s"] = f"{mean(arm, 'CPU-s'):.0f}"
        row |= {f"{first_name} minus this": "", "95 % interval": "", "p (Holm)": ""}
        row |= {"last epoch": "", "epoch 5": ""}
        if name in found:
            one = found[name]
            row[f"{first_name} minus this"] = f"{one.mean:+.1f}"
            row["95 % interval"] = f"{one.low:+.1f} to {one.high:+.1f}"
            row["p (Holm)"] = f"{one.p:.2g} ({adjusted[name]:.2g})"
            row["last epoch"] = f"{fmean(by_cell(first, arm, 'last')):+.1f}"
            row["epoch 5"] = f"{fmean(by_cell(first, arm, 'epoch 5')):+.1f}"
        rows.append(row)
    return rows


def main() -> None:
    """Print the tables of omniglot.md."""
    for first, others in (MAIN, LONGER, DRIVES):
        print(markdown(rows_of(first, others)), end="\n\n")


if __name__ == "__main__":
    run_script(main)
