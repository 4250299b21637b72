"""Draws the plots of docs/page.md, and prints the numbers in its text: `python docs/plots.py`.

It runs notebook 1 and one_page.py, some two minutes of one core. The plots are SVG, so that they
take the page's colours, light or dark.

    descent.svg   notebook 1's last picture: where descents with five hypergradients end, and with 0
    mfac.svg      what M-FAC makes of g, as it stores more and more gradients
    letters.svg   what the decoder fills in
"""

import contextlib
import io
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
STYLE = """<style>
#ID text { font: 13px system-ui, sans-serif; fill: #1f2328 }
#ID .faint { fill: #59636e; font-size: 12px }
#ID path { fill: none; stroke: #59636e; stroke-width: 2 }
#ID .axis { stroke: #8c959f; stroke-width: 1 }
#ID .blue { stroke: #0072b2 } #ID .ochre { stroke: #b07400 } #ID .red { stroke: #cf222e }
#ID .green { stroke: #116329 } #ID .violet { stroke: #8250df }
#ID text.violet { fill: #8250df; stroke: none }
#ID .dots { stroke-dasharray: 2 4 } #ID .thin { stroke-width: 1 }
#ID text.blue { fill: #0072b2; stroke: none } #ID text.ochre { fill: #8a5a00; stroke: none }
#ID text.red { fill: #cf222e; stroke: none } #ID text.green { fill: #116329; stroke: none }
#ID .band { stroke: none; opacity: .2 } #ID .band.blue { fill: #0072b2 }
#ID .ink { fill: #1f2328; stroke: none }
#ID .hidden { fill: #59636e; opacity: .2; stroke: none }
@media screen and (prefers-color-scheme: dark) {
#ID text { fill: #f0f6fc } #ID .faint { fill: #a9b4c0 } #ID path { stroke: #8b949e }
#ID .axis { stroke: #6e7681 } #ID .blue { stroke: #56b4e9 } #ID .ochre { stroke: #e69f00 }
#ID .red { stroke: #ff7b72 } #ID .green { stroke: #7ee787 } #ID text.blue { fill: #56b4e9 }
#ID text.ochre { fill: #e69f00 } #ID text.red { fill: #ff7b72 } #ID text.green { fill: #7ee787 }
#ID .violet { stroke: #d2a8ff } #ID text.violet { fill: #d2a8ff }
#ID .band { stroke: none } #ID .band.blue { fill: #56b4e9 }
#ID .ink { fill: #f0f6fc; stroke: none } #ID .hidden { fill: #a9b4c0; stroke: none } }
</style>
"""
WIDTH, HEIGHT = 470, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 14, 44  # margins


class Plot:
    """An SVG, and the lines and words that were drawn in it."""

    def __init__(self, name: str, title: str, told: str) -> None:
        """The title and the description are for readers who do not see the picture."""
        self.name = name
        self.parts = [f'<title id="{name}-t">{title}</title>\n<desc id="{name}-d">{told}</desc>\n']
        self.parts.append(STYLE.replace("ID", name))

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A line through points, in pixels."""
        self.parts.append(
            f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>\n'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A filled rectangle."""
        size = f'width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" {size}/>\n')

    def words(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A text; `anchor` says which end of it is at x."""
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{kind}" {at}>{text}</text>\n')

    def axes(
        self,
        x_ticks: Sequence[tuple[float, str]],
        y_ticks: Sequence[tuple[float, str]],
        x_title: str,
        y_title: str,
    ) -> None:
        """Ticks are pairs of a place, in pixels, and a word."""
        low, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        self.path([(LEFT, TOP), (LEFT, low), (right, low)], "axis")
        for x, word in x_ticks:
            self.path([(x, low), (x, low + 4)], "axis")
            self.words(x, low + 18, word, "faint", "middle")
        for y, word in y_ticks:
            self.path([(LEFT - 4, y), (LEFT, y)], "axis")
            self.words(LEFT - 8, y + 4, word, "faint", "end")
        self.words((LEFT + right) / 2, HEIGHT - 6, x_title, "faint", "middle")
        middle = (TOP + low) / 2
        turned = f'transform="translate(11 {middle:.0f}) rotate(-90)" text-anchor="middle"'
        self.parts.append(f'<text class="faint" {turned}>{y_title}</text>\n')

    def save(self, height: float = HEIGHT) -> None:
        """Writes docs/NAME.svg."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" id="{self.name}" '
        head += f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        head += f'aria-labelledby="{self.name}-t {self.name}-d">\n'
        (HERE / f"{self.name}.svg").write_text(head + "".join(self.parts) + "</svg>\n")


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A function from numbers to pixels: `low` is at `start`, `high` at `end`."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def power(exponent: int) -> str:
    """10 to a power, as SVG text."""
    if exponent in (0, 1, 2):
        return str(10**exponent)
    sign = "−" if exponent < 0 else ""
    return f'10<tspan dy="-5" font-size="9">{sign}{abs(exponent)}</tspan>'


def descent() -> None:
    """Five hypergradients on the regression of notebook 1, and 0 in their place."""
    ran = runpy.run_path(str(EXAMPLES / "1_hypergradient.py"))
    gaps = {line.get_label(): np.array(line.get_ydata()) for line in ran["axes"].lines}
    for name, gap in gaps.items():
        print(f"{name}: ends {gap[-10:].mean():.2g} above the minimum (mean of the last ten steps)")
    target, best = ran["target"], float(ran["best"])
    points = [target * (1 - 0.7**step) for step in range(40)]  # notebook 1's steps, with q = 0
    zero = [float(ran["bilevel_loss"](theta_D)) - best for theta_D in points]
    x = scale(0, 39, LEFT, WIDTH - RIGHT)
    y = scale(-4, 2, HEIGHT - BOTTOM, TOP)
    plot = Plot(
        "descent",
        "Descent on Eq. 3 with six hypergradients",
        "Loss of Eq. 3 above its minimum, by step. With the exact q and with 50 products of "
        "conjugate gradients it falls without end; with M-FAC to 0.15, with BiSSL's conjugate "
        "gradients to 2.5, with q = g to 10, with q = 0 to 0.72.",
    )
    kinds = ("green", "dots", "blue", "ochre", "red")
    for gap, kind in zip(gaps.values(), kinds, strict=True):
        inside = [(x(step), y(np.log10(value))) for step, value in enumerate(gap) if value > 1e-4]
        plot.path(inside, kind)
    plot.path([(x(step), y(np.log10(value))) for step, value in enumerate(zero)], "violet")
    end = WIDTH - RIGHT
    plot.words(end, y(np.log10(0.72)) + 15, "q = 0", "violet", "end")
    plot.words(end, y(1) - 8, "q = g", "red", "end")
    plot.words(end, y(np.log10(2.5)) - 6, "BiSSL’s CG, 5 products", "ochre", "end")
    plot.words(end, y(np.log10(0.13)) + 20, "M-FAC", "blue", "end")
    plot.words(x(18.5), y(-3.6), "exact q; CG, 50 products", "green")
    plot.axes(
        [(x(n), str(n)) for n in (0, 10, 20, 30)],
        [(y(n), power(n)) for n in range(-4, 3, 2)],
        "steps of θ_D".replace("_D", '<tspan dy="3" font-size="9">D</tspan>'),
        "loss above its minimum",
    )
    plot.save()


def mfac() -> None:
    """What q becomes of each g of one length: λ (F + λI)⁻¹ g, in the valley of the page, at λ = 1.

    The gradients are those of valley.js: twenty of them give the curvature itself.
    """
    curvature = np.array([0.25, 4.0])  # along the valley, across it
    plot = Plot(
        "mfac",
        "What q becomes of g, with 0, 1 and 20 stored gradients",
        "With no gradient, q is g. One gradient, which is steep, shortens the q of all g that "
        "point along it or against it. With twenty, q is short across the valley.",
    )
    radius, turn = 64.0, np.linspace(0, 2 * np.pi, 73)
    circle = np.stack([np.cos(turn), np.sin(turn)], 1)
    names = {0: "no gradient: q is g", 1: "1 gradient", 20: "20 gradients"}
    for n, (count, name) in enumerate(names.items()):
        middle = np.array([79 + 156 * n, 70])
        angles = np.pi * (0.27 + np.arange(count) * 7 % 20 / 20)
        G = np.sqrt(2 * curvature) * np.stack([np.cos(angles), np.sin(angles)], 1)
        F = G.T @ G / max(count, 1)
        for tip in middle + radius / 3 * G:
            plot.path([tuple(middle), tuple(tip)], "blue thin")
        q = np.linalg.solve(F + np.eye(2), circle.T).T
        plot.path([tuple(middle + radius * point) for point in circle], "axis")
        plot.path([tuple(middle + radius * point) for point in q], "green")
        plot.words(middle[0], middle[1] + radius + 22, name, "faint", "middle")
    plot.save(height=166)


def pixels(plot: Plot, image: NDArray[Any], left: float, top: float, size: float) -> None:
    """An image of ink, 0 to 1, in six shades; pixels of a shade in a row are one rectangle."""
    shades = (image.clip(0, 1) * 6).round().astype(int)
    for shade in range(1, 7):
        runs = []
        for row, line in enumerate(shades):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], line == shade, [0]])))
            for first, after in edges.reshape(-1, 2):
                length = (after - first) * size
                at = f"M{left + first * size:.1f} {top + row * size:.1f}"
                runs.append(f"{at}h{length:.1f}v{size:.1f}h-{length:.1f}z")
        shown = f'opacity="{shade / 6:.2f}" d="{"".join(runs)}"'
        plot.parts.append(f'<path class="ink" {shown}/>\n')


def letters(ran: dict[str, Any]) -> None:
    """Four Greek letters whole, with three quarters hidden, and filled in; as `draw` has them."""
    images = ran["greek"][[1, 7, 13, 20], 12]
    rng = torch.Generator().manual_seed(0)
    noise = torch.rand(4, ran["PATCHES"], generator=rng)
    start = ran["starts"]["BiSSLight"]
    patches, hidden = ran["predict"](ran["psi"], start, ran["phi_P"], images, noise)
    true = ran["patchify"](images)
    patches = patches.detach() * true.std(-1, keepdim=True) + true.mean(-1, keepdim=True)
    hidden = hidden[..., None]
    filled = torch.where(hidden, patches, true)
    paper, ink = true.min(), true.max()
    plot = Plot(
        "letters",
        "Four Greek letters whole, with three quarters hidden, and filled in",
        "Where a patch was hidden, the decoder has drawn strokes that mostly go on from those "
        "that are shown, and are paler.",
    )
    size, step = 3.2, 116
    for row, rows in enumerate((true, torch.where(hidden, paper, true), filled)):
        grey = ((rows[..., ::3] - paper) / (ink - paper)).unflatten(1, (7, 7)).unflatten(3, (4, 4))
        whole = grey.permute(0, 1, 3, 2, 4).reshape(4, 28, 28).numpy()
        for column in range(4):
            left, top = 14 + column * step, 6 + row * 98
            if row == 1:
                for n in hidden[column, :, 0].nonzero().flatten().tolist():
                    x, y = left + n % 7 * 4 * size, top + n // 7 * 4 * size
                    plot.box(x, y, 4 * size - 0.6, 4 * size - 0.6, "hidden")
            pixels(plot, whole[column], left, top, size)
    plot.save(height=298)


def main() -> None:
    """Draws all."""
    matplotlib.use("Agg")
    descent()
    mfac()
    printed = io.StringIO()
    sys.argv = ["one_page.py"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        os.chdir(folder)  # one_page.py draws its picture where it is started
        torch.set_default_dtype(torch.float32)  # notebook 1 takes float64
        ran = runpy.run_path(str(EXAMPLES / "one_page.py"), run_name="__main__")
    print(printed.getvalue())
    letters(ran)


if __name__ == "__main__":
    main()
