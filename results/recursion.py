"""M-FAC in closed form against the paper's recursion: seconds of lines 10 and 13, interleaved.

    python results/recursion.py       # ViT-B's size: 12 blocks of 196,608 entries, 20 gradients

`mfac.recursion` is the paper's Eq. 7 and Eq. 10, one matrix-vector product after the other, in
float64; `mfac.mfac` is the same matrix by Woodbury's identity. The numbers are equal (tests).
"""

import sys
import time
from pathlib import Path
from statistics import median

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent.parent))

from data import rng
from mfac import mfac, recursion


def main(blocks: int = 12, entries: int = 196_608, gradients: int = 20, repeats: int = 5) -> None:
    """Medians, after one that does not count."""
    g = rng(0, "curvature")
    G = torch.randn(blocks, gradients, entries, generator=g) * 1e-3
    query = torch.randn(blocks, entries, generator=g)
    forms = {"recursion": recursion, "closed form": mfac}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for _ in range(repeats + 1):
        for name, form in forms.items():
            began = time.perf_counter()
            inverse = form(G, 1e-3)
            inverted = time.perf_counter()
            inverse(query)
            seconds[name].append((inverted - began, time.perf_counter() - inverted))
    for name, times in seconds.items():
        invert, apply = (median(column) for column in zip(*times[1:], strict=True))
        both = f"line 10 {invert:.3f} s, line 13 {apply:.3f} s"
        print(f"{name}: {both}, an alternation with N_U 8 {invert + 8 * apply:.3f} s")


if __name__ == "__main__":
    typer.run(main)
