"""Accuracies and times of the demo's twelve seeds, which README tells, as demo.csv has them.

bisslight demo --out runs/demo
python -m experiments.demo runs/demo > experiments/demo.csv
"""

import json
from pathlib import Path

import typer

from extras.demo import ARMS
from support.files import read_json
from support.results import TrialResult


def main(demo: Path) -> None:
    """Print a row for each seed of a demo's runs; accuracies are in percent.

    CPU-s before: of aligning, or of the fine-tuning that a restart starts from.
    """
    print(
        "arm,seed,chosen epoch,test at the chosen epoch,test at the last epoch,CPU-s before,CPU-s"
    )
    for arm in ARMS:
        for trial in read_json(demo / arm / "result.json")["trials"]:
            run = demo / arm / TrialResult(**trial).name
            lines = (run / "metrics.jsonl").read_text().splitlines()
            tests = [json.loads(line)["test"]["accuracy"] for line in lines]
            epoch = trial["epoch"]
            accuracies = f"{tests[epoch - 1]:.2f},{tests[-1]:.2f}"
            seconds = f"{trial['start_cpu_seconds']:.1f},{trial['cpu_seconds']:.1f}"
            print(f"{arm},{trial['seed']},{epoch},{accuracies},{seconds}")


if __name__ == "__main__":
    typer.run(main)
