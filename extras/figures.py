"""One style for every picture. Needs the `plot` extra, which is imported on use.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart. Every picture holds a
description in words and numbers, and a mark, by which the program knows its own.
"""

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from config import UsageError
from evaluate import Row
from run import write_atomic

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#888888")
MARK = "made by bisslight"
KEYS = {  # where a kind of file keeps the mark and the description
    ".png": ("Software", "Description"),
    ".svg": ("Creator", "Description"),
    ".pdf": ("Creator", "Subject"),
}


def pyplot() -> Any:
    """Matplotlib without a screen (UsageError where the `plot` extra is not installed)."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install 'bisslight[plot]'") from error
    plt.rcParams.update({"backend": "agg", "figure.constrained_layout.use": True, "font.size": 9})
    return plt


def check_out(path: Path, suffixes: Iterable[str] = KEYS) -> None:
    """Refuse (UsageError), before any work, a file that could not be written.

    Nothing that this program did not make is ever replaced.
    """
    if path.suffix.lower() not in suffixes or not path.parent.is_dir():
        what = f"give one of the suffixes {', '.join(suffixes)} and a folder that is there"
        raise UsageError(f"{path}: cannot be written, {what}")
    if path.exists() and not (path.is_file() and MARK.encode() in path.read_bytes()):
        raise UsageError(f"{path}: was not made by this program; choose another name")


def rendered(figure: Any, words: str, kind: str = ".png") -> bytes:
    """A figure as the bytes of a file that holds its description; lets go of it."""
    buffer, metadata = io.BytesIO(), dict(zip(KEYS[kind], (MARK, words), strict=True))
    figure.savefig(buffer, format=kind[1:], metadata=metadata, dpi=150)
    pyplot().close(figure)
    return buffer.getvalue()


def save(figure: Any, words: str, path: Path) -> None:
    """Write a figure and its description (UsageError where the file there is not ours)."""
    check_out(path)
    write_atomic(path, rendered(figure, words, path.suffix.lower()))


def short_names(paths: Sequence[Path]) -> list[str]:
    """Paths without the folder that all are in.

    >>> short_names([Path("/a/x/s0"), Path("/a/y/s0")])
    ['x/s0', 'y/s0']
    """
    common = os.path.commonpath([path.resolve().parent for path in paths])
    return [path.resolve().relative_to(common).as_posix() for path in paths]


def draw_arms(rows: Sequence[Row], path: Path) -> None:
    """The picture of `evaluate --picture FILE`."""
    figure, axes = pyplot().subplots(figsize=(1.6 + 1.3 * len(rows), 3.4))
    plot_arms(axes, rows)
    said = [f"{r.arm} {r.mean:.2f}, {min(r.accuracies)} to {max(r.accuracies)}" for r in rows]
    save(figure, f"Test {rows[0].metric} (%), mean and range over seeds: {'; '.join(said)}.", path)


def plot_arms(axes: Any, rows: Sequence[Row]) -> None:
    """A dot a seed, side by side, and a line at the mean; a column an arm."""
    for x, row in enumerate(rows):
        n, colour = len(row.accuracies), COLOURS[x % len(COLOURS)]
        at = [x + 0.4 * ((i + 0.5) / n - 0.5) for i in range(n)]
        axes.plot(at, row.accuracies, "o", color=colour, markersize=4)
        axes.hlines(row.mean, x - 0.35, x + 0.35, color=colour)
    axes.set_xticks(range(len(rows)), [f"{row.arm}\nmean {row.mean:.1f}" for row in rows])
    axes.set(xlim=(-0.5, len(rows) - 0.5), ylabel=f"test {rows[0].metric} (%)")
