"""One style for every picture. Needs the `plot` extra, which is imported on use.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; text and axes are of
a grey that can be read on white and on black. Every picture holds a description in words and
numbers, which a report shows to who cannot see it, and a mark, by which the program knows its own.
"""

import io
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any

from config import UsageError
from evaluate import Row
from run import write_atomic

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#888888")
MARK = "made by bisslight"
Drawn = tuple[Any, str]  # a figure, and what it shows in words and numbers
KEYS = {  # where a kind of file keeps the mark and the description
    ".png": ("Software", "Description"),
    ".svg": ("Creator", "Description"),
    ".pdf": ("Creator", "Subject"),
}
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
} | dict.fromkeys(
    ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], "#767676"
)


def pyplot() -> Any:
    """Matplotlib without a screen (UsageError where the `plot` extra is not installed)."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install 'bisslight[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def check_out(option: str, path: Path, suffixes: Iterable[str] = KEYS) -> None:
    """Refuse (UsageError), before any work, a file that could not be written.

    Nothing that this program did not make is ever replaced.
    """
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} {path}: the suffix says the format, take {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.exists() and not (path.is_file() and MARK.encode() in path.read_bytes()):
        raise UsageError(f"{option} {path}: was not made by this program; choose another name")


def rendered(drawn: Drawn, kind: str = ".png", transparent: bool = True) -> bytes:
    """A figure as the bytes of a file that holds its description; lets go of it."""
    buffer, (figure, words) = io.BytesIO(), drawn
    metadata = dict(zip(KEYS[kind], (MARK, words), strict=True))
    figure.savefig(buffer, format=kind[1:], metadata=metadata, transparent=transparent)
    pyplot().close(figure)
    return buffer.getvalue()


def save(drawn: Drawn, path: Path) -> None:
    """Write a figure, on white (UsageError where the file there is not ours)."""
    check_out("picture", path)
    write_atomic(path, rendered(drawn, path.suffix.lower(), transparent=False))


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many as tell them apart.

    >>> short_names([Path("/a/x/s0"), Path("/a/y/s0")])
    ['x/s0', 'y/s0']
    """
    parts = [path.resolve().parts for path in paths]
    n = 1
    while len({part[-n:] for part in parts}) < len({*parts}):
        n += 1
    return ["/".join(part[-n:]) for part in parts]


def arms(rows: Sequence[Row], colours: Sequence[str] = COLOURS) -> Drawn:
    """`evaluate`'s table: every seed a dot, the mean a line."""
    figure, axes = pyplot().subplots(figsize=(max(3.6, 1.6 + 1.3 * len(rows)), 3.4))
    for x, (row, colour) in enumerate(zip(rows, cycle(colours), strict=False)):
        n = len(row.accuracies)
        at = [x + 0.3 * ((i + 0.5) / n - 0.5) for i in range(n)]
        axes.scatter(at, row.accuracies, color=colour, s=28, zorder=3)
        axes.hlines(row.mean, x - 0.3, x + 0.3, color=colour, linewidth=2)
        axes.annotate(f"{row.mean:.1f}", (x + 0.32, row.mean), va="center")
    axes.set_xticks(range(len(rows)), ["\n".join(wrap(row.arm, 18)) for row in rows])
    axes.set(xlim=(-0.6, len(rows) - 0.2), ylabel=f"test {rows[0].metric} (%)")
    said = [
        f"{row.arm} {row.mean:.2f} %, {min(row.accuracies):.2f} to {max(row.accuracies):.2f}"
        for row in rows
    ]
    return figure, f"Test {rows[0].metric}, mean and range over seeds: {'; '.join(said)}."


def draw_arms(rows: Sequence[Row], path: Path) -> None:
    """The picture of `evaluate --picture FILE`."""
    check_out("--picture", path)
    save(arms(rows), path)
