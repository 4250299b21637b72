"""Program: pictures: the test accuracies of arms, and curves of what runs measured by step."""

import io
import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from types import ModuleType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from config import Record, find_runs
from evaluate import Row
from support.errors import UsageError, as_read_error
from support.runs import mean_numbers, read_json_if_there, write_atomic

# The colours of Okabe and Ito, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#888888")
ENDINGS = (".png", ".svg", ".pdf")  # A picture's file name has one of these.
QUANTITIES = {  # names of numbers in metrics.jsonl, and what the axis of a picture calls them
    "loss": "training loss",
    "val/accuracy": "validation (%)",
    "loss_P": "pretext loss at θ_P",
    "loss_D_at_P": "downstream loss at θ_P",
    "loss_D_at_D": "downstream loss at θ_D",
    "val_P/accuracy": "validation of θ_P (%)",
    "val_D/accuracy": "validation of θ_D (%)",
    "distance": "|θ_P − θ_D|",
    "q_over_g": "|q| / |g|",
    "cosine": "cosine of q and g",
}


# --- all pictures ---------------------------------------------------------------------------------


def pyplot() -> ModuleType:
    """Import Matplotlib's pyplot, set to draw without a screen and in the style of all pictures."""
    from matplotlib import pyplot as plt  # imported here, since it takes half a second

    plt.switch_backend("agg")  # draws into files
    plt.rcParams.update({"figure.constrained_layout.use": True, "font.size": 9})
    plt.rcParams["text.parse_math"] = False  # a $ in the name of a run is no formula
    plt.rcParams["axes.prop_cycle"] = cycler(color=COLOURS)  # these are C0, C1 and so on
    return plt


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file, whole or not at all, and close it.

    Raises UsageError if the name of the file has none of the `ENDINGS`.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(ENDINGS)}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=150)
    pyplot().close(figure)
    write_atomic(path, buffer.getvalue())


def short_names(paths: Sequence[Path]) -> list[str]:
    """Shorten paths to what follows the folder that holds all: /a/x/s0, /a/y/s0 to x/s0, y/s0."""
    places = [path.resolve() for path in paths]
    common = os.path.commonpath([place.parent for place in places])
    return [place.relative_to(common).as_posix() for place in places]


# --- evaluate --picture ---------------------------------------------------------------------------


def draw_arms(arms: Sequence[Row], path: Path) -> None:
    """Draw the test accuracies of arms to a file: a dot for each seed, a line at the mean."""
    figure, axes = pyplot().subplots(figsize=(1.6 + 1.3 * len(arms), 3.4))
    plot_arms(axes, arms)
    axes.set_title(f"{arms[0].data_set}\n{arms[0].test_images:,} test images", fontsize=9)
    save(figure, path)


def plot_arms(axes: Axes, arms: Sequence[Row]) -> None:
    """Plot a column for each arm, with a dot for each seed and a line at the mean.

    Dots stand side by side, so that none hides another.
    """
    labels = []  # the text below each column
    for x, arm in enumerate(arms):  # x: the middle of the arm's column, which is 1 wide
        dots = len(arm.accuracies)  # one for each seed
        positions = []  # of the dots: evenly over 0.4 of the column, a single one in its middle
        for i in range(dots):
            share = (i + 0.5) / dots  # of the way from the left end to the right one
            positions.append(x + 0.4 * (share - 0.5))
        colour = f"C{x}"  # Matplotlib's name for number x of COLOURS
        axes.plot(positions, arm.accuracies, "o", color=colour, markersize=4)
        axes.hlines(arm.mean, x - 0.35, x + 0.35, color=colour)
        name = fill(arm.arm, 16)  # broken into lines that are no wider than the column
        labels.append(f"{name}\nmean {arm.mean:.1f}")

    axes.set_xticks(range(len(arms)), labels)
    axes.set(xlim=(-0.5, len(arms) - 0.5), ylabel=f"test {arms[0].metric} (%)")


# --- evaluate --curves ----------------------------------------------------------------------------

Curve = dict[int, float]  # a number by step: an alternation of align, or an epoch of finetune
BY_EPOCH = ("loss", "val/accuracy")  # the quantities of finetune; all others are of align


def draw_curves(runs: Sequence[Path], path: Path) -> None:
    """Draw the losses and validations of runs, finished or not, to the file `path`.

    1. Read the curves of each run. A "run" is a run of align or finetune, or a folder of runs that
       differ in their seed, whose curves are averaged.
    2. Find the quantities that were measured. Raises UsageError if there is none.
    3. Draw a panel for each quantity, at most three in a row, with a line for each run.
    """
    names = short_names(runs)  # such as ["direct/s0", "aligned/s0"]
    curves = [read_curves(run) for run in runs]  # per run: quantity -> Curve

    measured: set[str] = set().union(*curves)  # the quantities (keys) of all runs
    quantities = [name for name in QUANTITIES if name in measured]  # in the order of that table
    if not quantities:
        raise UsageError(f"{runs[0]}: holds no metrics.jsonl; give a run of align or finetune")

    columns = min(3, len(quantities))
    rows = math.ceil(len(quantities) / columns)
    figure = pyplot().figure(figsize=(3.6 * columns, 2.6 * rows))  # inches
    for place, quantity in enumerate(quantities, 1):  # places are counted row by row
        step = "epoch" if quantity in BY_EPOCH else "alternation"
        panel = figure.add_subplot(rows, columns, place, xlabel=step, ylabel=QUANTITIES[quantity])
        panel.xaxis.get_major_locator().set_params(integer=True)  # ticks at whole steps
        for k, name in enumerate(names):
            curve = curves[k].get(quantity)  # a run of another command has not measured it
            if curve:
                panel.plot(list(curve), list(curve.values()), ".-", color=f"C{k}", label=name)
        panel.legend(fontsize=7)
    save(figure, path)


def read_curves(run: Path) -> dict[str, Curve]:
    """Read the curves of a run, such as {"val/accuracy": {1: 20.5, 2: 31.0}, "loss": {...}}.

    `run` may also be a folder of runs that differ in their seed.

    1. Collect each number of the metrics.jsonl of all seeds.
    2. Take the mean over the seeds, at the steps that all seeds have reached.
    """
    found = [read_metrics(folder) for folder in seed_folders(run)]  # the records of each folder
    begun = [records for records in found if records]  # those of the seeds that have begun
    # The key is (quantity, step), and the value has the number of each seed.
    values: dict[tuple[str, int], list[float]] = defaultdict(list)
    for records in begun:
        for record in records:  # such as {"step": 1, "loss": 2.5, "val": {...}}
            numbers = mean_numbers(record)  # such as {"loss": 2.5, "val/accuracy": 20.5}
            for quantity, value in numbers.items():
                values[quantity, record["step"]].append(value)

    curves: dict[str, Curve] = defaultdict(dict)
    for (quantity, step), seed_values in values.items():
        has_all_seeds = len(seed_values) == len(begun)  # a seed still at work has fewer steps
        if has_all_seeds:
            curves[quantity][step] = fmean(seed_values)
    return curves


def seed_folders(path: Path) -> list[Path]:
    """The folders with the metrics of each seed of a run, or of the runs in a folder.

    A finetune run has a folder for each trial, such as lr0.01-s0 for rate 0.01 and seed 0. Those of
    the rate that it chose are returned; while it has not chosen one, those of all rates. An align
    run and a single trial are returned themselves.
    """
    folders: list[Path] = []
    for run in find_runs(path):
        result = read_json_if_there(run / "result.json") or {}
        rate = f"{result['lr']:g}" if "lr" in result else "*"  # such as 0.01; *: any
        trials = sorted(run.glob(f"lr{rate}-s*"))
        folders += trials or [run]  # an align run and a single trial have no trials
    return folders


def read_metrics(run: Path) -> list[Record]:
    """Read the records that a run has written to its metrics.jsonl so far; [] if it has none.

    Raises UsageError if the file is damaged.
    """
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    whole, _, _ = file.read_text().rpartition("\n")  # without a line that is just being written
    with as_read_error(str(file), "give another run"):
        return [json.loads(line) for line in whole.splitlines()]
