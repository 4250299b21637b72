"""One style for every picture, and the picture of arms. Needs the `plot` extra, imported on use.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from config import RunError, UsageError

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#888888")
CREATOR = "drawn by the program BiSSLight"  # in each picture file; one without it is never replaced
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True, "figure.dpi": 150, "savefig.dpi": 150, "font.size": 9,
    "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip


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


def check_picture(option: str, path: Path) -> None:
    """Refuse (UsageError), before any work, a picture that could not be written, or whose file is not one of ours."""
    pyplot()
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{option} {path}: the suffix says the format, take .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.exists() and not (path.is_file() and CREATOR.encode() in path.read_bytes()):
        raise UsageError(
            f"{option} {path}: is there already and is no picture of this program's, choose another {option}"
        )


def save(figure: Any, path: Path) -> None:
    """Write a figure and let go of it (RunError where that fails)."""
    try:
        figure.savefig(path, metadata={"Creator": CREATOR})
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the picture cannot be written ({error})") from error
    finally:
        pyplot().close(figure)


def rendered(figure: Any, kind: str = "png") -> bytes:
    """A figure as the bytes of a file, and let go of it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    pyplot().close(figure)
    return buffer.getvalue()


def draw_arms(axes: Any, arms: Mapping[str, Sequence[float]], metric: str, title: str) -> None:
    """A column an arm: every seed a dot, the mean a bar through it with its value; test `metric` in percent."""
    for x, (name, values) in enumerate(arms.items()):
        n = len(values)
        spread = [x + 0.3 * ((i + 0.5) / n - 0.5) for i in range(n)]
        mean = sum(values) / n
        axes.scatter(spread, values, color=COLOURS[x % len(COLOURS)], s=28, label=name, zorder=3)
        axes.hlines(mean, x - 0.3, x + 0.3, color=COLOURS[x % len(COLOURS)], linewidth=2)
        axes.annotate(f"{mean:.1f}", (x + 0.32, mean), va="center", fontsize=9)
    axes.set_xticks(range(len(arms)), ["\n".join(wrap(name, 18)) for name in arms], fontsize=8)
    axes.set_xlim(-0.6, len(arms) - 0.2)
    axes.set_ylabel(f"test {metric} (%)")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", alpha=0.3)
