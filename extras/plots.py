"""Program: pictures of the accuracies of arms, and of the curves of runs."""

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

from config import Record
from evaluate import Row, find_runs
from support.errors import UsageError, as_usage_error
from support.runs import mean_numbers, read_json_if_there, write_atomic

# Okabe and Ito's, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#888888")
KINDS = (".png", ".svg", ".pdf")
QUANTITIES = {  # numbers of metrics.jsonl, and what they are
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
    """Matplotlib's pyplot without a screen, in the style of all pictures."""
    from matplotlib import pyplot as plt  # takes half a second, so only where something is drawn

    plt.switch_backend("agg")
    plt.rcParams.update({"figure.constrained_layout.use": True, "font.size": 9})
    plt.rcParams["text.parse_math"] = False  # a name may hold a $
    plt.rcParams["axes.prop_cycle"] = cycler(color=COLOURS)  # C0, C1 and so on, and again
    return plt


def save(figure: Figure, path: Path) -> None:
    """Write a figure and close it; a reader never sees half a file. (UsageError: no such kind)"""
    if path.suffix.lower() not in KINDS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(KINDS)}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=150)
    pyplot().close(figure)
    write_atomic(path, buffer.getvalue())


def short_names(paths: Sequence[Path]) -> list[str]:
    """Paths without the folder that all are in: x/s0 and y/s0 for /a/x/s0 and /a/y/s0."""
    places = [path.resolve() for path in paths]
    common = os.path.commonpath([place.parent for place in places])
    return [place.relative_to(common).as_posix() for place in places]


# --- evaluate --picture ---------------------------------------------------------------------------


def draw_arms(arms: Sequence[Row], path: Path) -> None:
    """Draw the test accuracies of arms: a dot for each seed, a line at the mean."""
    figure, axes = pyplot().subplots(figsize=(1.6 + 1.3 * len(arms), 3.4))
    plot_arms(axes, arms)
    axes.set_title(f"{arms[0].data_set}\n{arms[0].test_images:,} test images", fontsize=9)
    save(figure, path)


def plot_arms(axes: Axes, arms: Sequence[Row]) -> None:
    """A column per arm; the dots of its seeds stand side by side, so that none hides another."""
    labels = []
    for x, arm in enumerate(arms):
        count = len(arm.accuracies)
        # evenly over 0.4 of the column, which is 1 wide; a single dot is in its middle
        positions = [x + 0.4 * ((i + 0.5) / count - 0.5) for i in range(count)]
        axes.plot(positions, arm.accuracies, "o", color=f"C{x}", markersize=4)
        axes.hlines(arm.mean, x - 0.35, x + 0.35, color=f"C{x}")
        name = fill(arm.arm, 16)  # in lines that are no wider than the column
        labels.append(f"{name}\nmean {arm.mean:.1f}")
    axes.set_xticks(range(len(arms)), labels)
    axes.set(xlim=(-0.5, len(arms) - 0.5), ylabel=f"test {arms[0].metric} (%)")


# --- evaluate --curves ----------------------------------------------------------------------------

Curve = dict[int, float]  # by step: an alternation of align, an epoch of finetune


def draw_curves(runs: Sequence[Path], path: Path) -> None:
    """Draw the losses and validations of runs, finished or not: one panel a quantity.

    A run of align or finetune, or a folder of runs that differ in their seed, is one line. What
    finetune's seeds measured is averaged, at the chosen rate as soon as there is one.
    """
    names = short_names(runs)
    curves = [read_curves(run) for run in runs]
    drawn: set[str] = set().union(*curves)
    quantities = [key for key in QUANTITIES if key in drawn]  # in the order of that table
    if not quantities:
        raise UsageError(f"{runs[0]}: holds no metrics.jsonl; give a run of align or finetune")
    columns = min(3, len(quantities))
    rows = math.ceil(len(quantities) / columns)
    figure = pyplot().figure(figsize=(3.6 * columns, 2.6 * rows))
    for number, quantity in enumerate(quantities, 1):
        step = "epoch" if quantity in ("loss", "val/accuracy") else "alternation"
        panel = figure.add_subplot(rows, columns, number, xlabel=step, ylabel=QUANTITIES[quantity])
        panel.xaxis.get_major_locator().set_params(integer=True)
        for k, name in enumerate(names):
            if quantity in curves[k]:
                curve = curves[k][quantity]
                panel.plot(list(curve), list(curve.values()), ".-", color=f"C{k}", label=name)
        panel.legend(fontsize=7)
    save(figure, path)


def read_curves(run: Path) -> dict[str, Curve]:
    """Every quantity of a run, averaged over its seeds at the steps that all of them have."""
    seeds = [folder for folder in seeds_of(run) if (folder / "metrics.jsonl").exists()]
    values: dict[tuple[str, int], list[float]] = defaultdict(list)  # of the seeds
    for folder in seeds:
        for record in read_metrics(folder):
            for quantity, value in mean_numbers(record).items():
                values[quantity, record["step"]].append(value)
    curves: dict[str, Curve] = defaultdict(dict)
    for (quantity, step), of_seeds in values.items():
        if len(of_seeds) == len(seeds):  # a seed that is still at work has fewer steps
            curves[quantity][step] = fmean(of_seeds)
    return curves


def seeds_of(path: Path) -> list[Path]:
    """The folders of a run, or of the runs in a folder, whose metrics are one thing's seeds."""
    folders: list[Path] = []
    for run in find_runs(path):
        rate = "*"
        result = read_json_if_there(run / "result.json")
        if result:  # the rate is chosen, so the others' trials are no seeds of it
            rate = f"{result.get('lr', 0):g}"
        trials = sorted(run.glob(f"lr{rate}-s*"))  # of align there are none
        folders += trials or [run]
    return folders


def read_metrics(run: Path) -> list[Record]:
    """The records of a run so far; none if there is no metrics.jsonl."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    whole, _, _ = file.read_text().rpartition("\n")  # a line may be on its way
    with as_usage_error(str(file), "give another run"):
        return [json.loads(line) for line in whole.splitlines()]
