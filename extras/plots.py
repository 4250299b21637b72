"""Pictures: the accuracies of arms, the curves of runs, and what all pictures have in common.

Every picture holds a description in words and numbers, for those who cannot see it, and a mark by
which the program knows its own files, so that it never replaces another one.
"""

import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from types import ModuleType
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from config import Record
from evaluate import Row
from support.errors import UsageError
from support.runs import read_json, write_atomic

# Okabe and Ito's, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#888888")
MARK = "made by bisslight"
METADATA = {  # the keys under which a kind of file keeps the mark and the description
    ".png": ("Software", "Description"),
    ".svg": ("Creator", "Description"),
    ".pdf": ("Creator", "Subject"),
}
QUANTITIES = {  # keys of metrics.jsonl, and what they are
    "loss": "training loss",
    "val": "validation (%)",
    "loss_P": "pretext loss at θ_P",
    "loss_D_at_P": "downstream loss at θ_P",
    "loss_D_at_D": "downstream loss at θ_D",
    "val_P": "validation of θ_P (%)",
    "val_D": "validation of θ_D (%)",
    "distance": "|θ_P − θ_D|",
    "q_over_g": "|q| / |g|",
    "cosine": "cosine of q and g",
    "share": "share of |g|² in the span of G",
    "removed": "removed part of that share",
}


# --- all pictures ---------------------------------------------------------------------------------


def pyplot() -> ModuleType:
    """Matplotlib's pyplot without a screen, in the style of all pictures."""
    from matplotlib import pyplot as plt  # takes half a second, so only where something is drawn

    plt.switch_backend("agg")
    plt.rcParams.update({"figure.constrained_layout.use": True, "font.size": 9})
    return plt


def check_picture(path: Path) -> None:
    """Refuse a file that cannot be written or is not a picture of this program (UsageError)."""
    if path.suffix.lower() not in METADATA:
        raise UsageError(f"{path}: is no picture's name; give one with {', '.join(METADATA)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: cannot be written, there is no folder {path.parent}")
    if path.exists() and not (path.is_file() and MARK.encode() in path.read_bytes()):
        raise UsageError(f"{path}: was not made by this program; choose another name")


def save(figure: Figure, description: str, path: Path) -> None:
    """Write a figure with its description and close it; a reader never sees half a file."""
    check_picture(path)
    kind = path.suffix.lower()
    mark_key, description_key = METADATA[kind]
    buffer = io.BytesIO()
    metadata = {mark_key: MARK, description_key: description}
    figure.savefig(buffer, format=kind[1:], metadata=metadata, dpi=150)
    pyplot().close(figure)
    write_atomic(path, buffer.getvalue())


def short_names(paths: Sequence[Path]) -> list[str]:
    """Paths without the folder that all are in: x/s0 and y/s0 for /a/x/s0 and /a/y/s0."""
    parents = [path.resolve().parent for path in paths]
    common = os.path.commonpath(parents)
    return [path.resolve().relative_to(common).as_posix() for path in paths]


# --- evaluate --picture ---------------------------------------------------------------------------


def draw_arms(arms: Sequence[Row], path: Path) -> None:
    """Draw the test accuracies of arms: a dot for each seed, a line at the mean."""
    words = " ".join(arm.arm for arm in arms).split()
    letters = max([len(word) for word in words], default=0)
    inches = max(1.3, 0.1 * letters)  # a column, at least as wide as the longest word below it
    figure, axes = pyplot().subplots(figsize=(1.6 + inches * len(arms), 3.4))
    plot_arms(axes, arms)
    summaries = []
    for arm in arms:
        summaries.append(
            f"{arm.arm} {arm.mean:.2f}, {min(arm.accuracies)} to {max(arm.accuracies)}"
        )
    subject = f"Test {arms[0].metric} (%), mean and range over seeds"
    save(figure, f"{subject}: {'; '.join(summaries)}.", path)


def plot_arms(axes: Axes, arms: Sequence[Row]) -> None:
    """A column per arm; the dots of its seeds stand side by side, so that none hides another."""
    for x, arm in enumerate(arms):
        count = len(arm.accuracies)
        colour = COLOURS[x % len(COLOURS)]
        # evenly over 0.4 of the column, which is 1 wide; a single dot is in its middle
        positions = [x + 0.4 * ((i + 0.5) / count - 0.5) for i in range(count)]
        axes.plot(positions, arm.accuracies, "o", color=colour, markersize=4)
        axes.hlines(arm.mean, x - 0.35, x + 0.35, color=colour)
    labels = []
    for arm in arms:
        # A long name is broken between words, so that it stays below its column.
        lines = wrap(arm.arm, 12, break_long_words=False, break_on_hyphens=False)
        labels.append("\n".join([*lines, f"mean {arm.mean:.1f}"]))
    axes.set_xticks(range(len(arms)), labels)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_ylabel(f"test {arms[0].metric} (%)")


# --- evaluate --curves ----------------------------------------------------------------------------


class Curve(NamedTuple):
    """One quantity of one run."""

    run: str
    quantity: str
    steps: list[int]  # alternations of align, epochs of finetune
    values: list[float]


def draw_curves(runs: Sequence[Path], path: Path) -> None:
    """Draw the losses and validations of runs, finished or not: one panel a quantity.

    A run of align or finetune, or a folder of runs that differ in their seed, is one line. What
    finetune's seeds measured is averaged, at the chosen rate as soon as there is one.
    """
    curves: list[Curve] = []
    for run, name in zip(runs, short_names(runs), strict=True):
        curves += curves_of(run, name)
    if not curves:
        raise UsageError(f"{runs[0]}: holds no metrics.jsonl; give a run of align or finetune")
    drawn = {curve.quantity for curve in curves}
    quantities = [key for key in QUANTITIES if key in drawn]  # in the order of that table
    columns = min(3, len(quantities))
    rows = math.ceil(len(quantities) / columns)
    size = (3.6 * columns, 2.6 * rows)
    figure, grid = pyplot().subplots(rows, columns, squeeze=False, figsize=size)
    names = short_names(runs)
    words = []
    for panel, quantity in zip(grid.flat, quantities, strict=False):  # panels may be left over
        panel.set_xlabel("epoch" if quantity in ("loss", "val") else "alternation")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_ylabel(QUANTITIES[quantity])
        for curve in curves:
            if curve.quantity == quantity:
                colour = COLOURS[names.index(curve.run) % len(COLOURS)]
                panel.plot(curve.steps, curve.values, ".-", color=colour, label=curve.run)
                words.append(describe(curve))
        panel.legend(fontsize=7)
    for panel in grid.flat[len(quantities) :]:
        panel.set_axis_off()
    save(figure, f"{'; '.join(words)}.", path)


def describe(curve: Curve) -> str:
    """A curve in words: where it starts and where it ends."""
    start = f"{curve.values[0]:.4g} at {curve.steps[0]}"
    end = f"{curve.values[-1]:.4g} at {curve.steps[-1]}"
    return f"{QUANTITIES[curve.quantity]} of {curve.run} from {start} to {end}"


def curves_of(run: Path, name: str) -> list[Curve]:
    """Every quantity of a run, averaged over its seeds at the steps that all of them have."""
    seeds = [read_metrics(folder) for folder in seeds_of(run)]
    curves = []
    for quantity in QUANTITIES:
        lines = [values_of(records, quantity) for records in seeds]
        if not lines:
            continue
        # A seed that is still at work has fewer steps.
        common = set(lines[0]).intersection(*lines)
        steps = [step for step in lines[0] if step in common]
        values = []
        for step in steps:
            values.append(fmean(line[step] for line in lines))
        if steps:
            curves.append(Curve(name, quantity, steps, values))
    return curves


def seeds_of(run: Path) -> list[Path]:
    """The folders below a run whose metrics.jsonl are seeds of one and the same thing."""
    if (run / "metrics.jsonl").exists():
        return [run]
    rates = "lr*"
    result_file = run / "result.json"
    if result_file.exists():  # the rate is chosen, so the others' trials are no seeds of it
        lr = read_json(result_file).get("lr", 0)
        rates = f"lr{lr:g}"
    trials = [file.parent for file in sorted(run.glob(f"{rates}-s*/metrics.jsonl"))]
    if trials:
        return trials
    below: list[Path] = []
    for file in sorted(run.glob("*/config.json")):
        below += seeds_of(file.parent)
    return below


def read_metrics(run: Path) -> list[Record]:
    """The records of a run so far; none if there is no metrics.jsonl."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def values_of(records: list[Record], quantity: str) -> dict[int, float]:
    """A quantity by step: a number, the mean of a list, or the accuracy of a validation."""
    values: dict[int, float] = {}
    for record in records:
        value = record.get(quantity)
        if isinstance(value, dict):
            value = value["accuracy"]
        if isinstance(value, list) and value:
            value = fmean(value)
        if isinstance(value, int | float):
            values[record["step"]] = value
    return values
