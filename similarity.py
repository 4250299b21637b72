"""How alike two models represent the same images: linear CKA and RSA (App. D, "Representational Similarity").

    CKA (Kornblith et al. 2019)      |X̄ᵀȲ|² / (|X̄ᵀX̄| |ȲᵀȲ|), Frobenius norms, X̄ and Ȳ (N, d) with centred columns
    RSA (Kriegeskorte et al. 2008)   Spearman's correlation, over pairs of images, of dissimilarities 1 − cos(x_i, x_j)

Both lie at 1 for equal representations. CKA ignores rotations and one scale for all of X, RSA rotations and a scale of
each image. Paper silent: which layer's features and which split; `seeing` takes what enters the head, on validation.
Leaves out: CKA's unbiased estimator and other kernels.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import RunError
from figures import pyplot, save


def cka(batches: Iterable[Sequence[Tensor]]) -> Tensor:
    """Linear CKA of every pair of M models, (M, M) in float64.

    Args:
        batches: features of the same images, one (B, d) a model; d may differ between models. Seen once: what is kept
            are M sums and M (M + 1) / 2 matrices (d, d) in float64, 13 MB each at d = 1280.
    """
    n = 0
    shift: list[Tensor] = []  # the first batch's mean, taken off all: large means would cancel
    sums: list[Tensor] = []
    crossed: dict[tuple[int, int], Tensor] = {}
    for batch in batches:
        wide = [x.double() for x in batch]
        shift = shift or [x.mean(0) for x in wide]
        wide = [x - mean for x, mean in zip(wide, shift, strict=True)]
        n += len(wide[0])
        sums = [x.sum(0) + s for x, s in zip(wide, sums or map(torch.zeros_like, shift), strict=True)]
        for i, x in enumerate(wide):
            for j, y in enumerate(wide[: i + 1]):
                crossed[i, j] = crossed.get((i, j), 0.0) + x.mT @ y
    squares = torch.zeros(len(sums), len(sums), dtype=torch.float64)  # |X̄ᵀȲ|²
    for (i, j), product in crossed.items():
        squares[i, j] = squares[j, i] = (product - torch.outer(sums[i], sums[j]) / n).square().sum()
    own = squares.diagonal().sqrt()
    if not bool(own.isfinite().all()):
        raise RunError("CKA: the features of a model are not finite")
    if not bool((own > 0).all()):
        raise RunError("CKA: a model gives every image the same features")
    return squares / torch.outer(own, own)


def dissimilarities(x: Tensor, rows: int = 512) -> Tensor:
    """1 − cos(x_i, x_j) for i < j, row by row, (N (N − 1) / 2,) in float64; never the whole matrix.

    >>> dissimilarities(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])).tolist()
    [1.0, 2.0, 1.0]
    """
    x = x.double()
    length = x.norm(dim=1, keepdim=True)
    if not bool((length > 0).all()):
        raise RunError("RSA: the features of an image are all zero, they have no direction")
    x = x / length
    out = x.new_empty(len(x) * (len(x) - 1) // 2)
    at = 0
    for start in range(0, len(x), rows):
        cos = x[start : start + rows] @ x[start:].mT  # (rows, N − start)
        above = 1 - cos[torch.ones_like(cos, dtype=torch.bool).triu(1)]
        out[at : at + len(above)] = above
        at += len(above)
    return out


def rsa(features: Sequence[Tensor]) -> Tensor:
    """RSA of every pair of M models, (M, M) in float64, from features (N, d) of the same images.

    Spearman's correlation is Pearson's of ranks, ties at their mean. Twice a rank is a whole number, and is kept as
    int32: 50 MB a model for 5,000 images.
    """
    from scipy.stats import rankdata

    ranks = [torch.from_numpy(2 * rankdata(dissimilarities(x).numpy())).int() for x in features]
    pairs = len(ranks[0])
    if any(int(rank.min()) == int(rank.max()) for rank in ranks):
        raise RunError("RSA: a model has all images equally far apart; two or fewer images cannot be compared")
    products = torch.zeros(len(ranks), len(ranks), dtype=torch.float64)
    for start in range(0, pairs, 1_000_000):
        part = torch.stack([rank[start : start + 1_000_000] for rank in ranks]).double() - (pairs + 1)  # mean rank × 2
        products += part @ part.mT
    own = products.diagonal().sqrt()
    return products / torch.outer(own, own)


def compare(features: Sequence[Tensor], batch: int = 512) -> tuple[Tensor, Tensor]:
    """(CKA, RSA) of every pair of models, each (M, M), from features (N, d) of the same images."""
    return cka(zip(*(x.split(batch) for x in features), strict=True)), rsa(features)


def draw(names: Sequence[str], matrices: dict[str, Tensor], title: str, path: Path) -> None:
    """A heat map a measure, side by side, values in the cells; colours run from 0 to 1, below 0 they stay."""
    count, longest = len(names), max(map(len, names))
    side = max(2.0, 0.62 * count)
    size = (1.2 + 0.065 * longest + len(matrices) * side, 0.6 + 0.05 * longest + side)
    figure, grid = pyplot().subplots(1, len(matrices), figsize=size, sharey=True)
    for axes, (measure, matrix) in zip(grid, matrices.items(), strict=True):
        shown: Any = axes.imshow(matrix.numpy(), vmin=0, vmax=1, cmap="viridis")
        for i in range(count):
            for j in range(count):
                dark = float(matrix[i, j]) < 0.6
                axes.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", color="white" if dark else "black")
        axes.set_xticks(range(count), names, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(count), names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(measure)
    below = any(bool((matrix < 0).any()) for matrix in matrices.values())
    figure.colorbar(shown, ax=grid, shrink=0.8, pad=0.02, extend="min" if below else "neither")
    figure.suptitle(title, fontsize=10)
    save(figure, path)
