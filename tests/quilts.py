"""Quilts: drawn images for tests, known as `--dataset quilts` and `--pool quilts`.

They reach the program by the door for data sets of one's own, `support.benchmarks.MAKE_TASK`.
quilts.pth is a backbone that was pretrained on them.
"""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from config import NAMED
from data import Pool, Split, Task, rng
from support.benchmarks import MAKE_POOL, MAKE_TASK

WEIGHTS = Path(__file__).with_name("quilts.pth")
MOTIFS = ("1111000011110000", "1010101010101010", "0110111111110110", "1001011001101001")


@lru_cache(maxsize=2)
def quilts(seed: int) -> tuple[Pool, Task]:
    """Pixel quilts: a pool of 4000 images (3, 16, 16); 80 / 160 / 480 labelled ones of 8 classes.

    A quilt is 4 x 4 tiles, each a patch of vit_mini, and shows two of four motifs. Its class says
    which tiles are equal, not which motif they show: all classes have the same mean image, and a
    network must compare tiles. In labelled images, a tenth of the tiles show a motif at random.
    """
    g = rng(seed, "quilts")
    layouts = draw_layouts(g)
    # the order of these draws is part of what a seed means: layouts, pool's classes, images
    unseen = torch.randint(8, (4000,), generator=g)  # nobody sees the pool's labels
    pool = draw_quilts(layouts, unseen, 0.0, g)
    splits = []
    for copies in (10, 20, 60):
        labels = torch.arange(8).repeat(copies)
        splits.append(Split(draw_quilts(layouts, labels, 0.1, g), labels))
    train, val, test = splits
    mean = tuple(pool.mean((0, 2, 3)).tolist())
    std = tuple(pool.std((0, 2, 3)).tolist())
    names = [f"layout {k}" for k in range(8)]
    return Pool(pool, mean, std), Task("quilts", train, val, test, names, mean, std)


def draw_layouts(g: torch.Generator) -> Tensor:
    """Eight layouts (8, 16) of zeros and ones; each two differ in 5 to 11 of their 16 tiles."""
    layouts = list[Tensor]()
    while len(layouts) < 8:
        layout = torch.randint(2, (16,), generator=g)
        distances = [int((layout != other).sum()) for other in layouts]
        balanced = 7 <= int(layout.sum()) <= 9
        # 16 - distance counts, too: a layout and its negative show the same tiles as equal
        if balanced and all(5 <= distance <= 11 for distance in distances):
            layouts.append(layout)
    return torch.stack(layouts)


def draw_quilts(layouts: Tensor, labels: Tensor, junk: float, g: torch.Generator) -> Tensor:
    """Images (images, 3, 16, 16) of these classes; a share `junk` of the tiles shows any motif."""
    motifs = torch.tensor([[int(bit) for bit in motif] for motif in MOTIFS])  # (4, 16) pixels
    first = torch.randint(4, labels.shape, generator=g)
    second = (first + torch.randint(1, 4, labels.shape, generator=g)) % 4  # another motif
    shown = torch.where(layouts[labels] == 1, second[:, None], first[:, None])  # (images, 16)
    is_junk = torch.rand(shown.shape, generator=g) < junk
    shown = torch.where(is_junk, torch.randint(4, shown.shape, generator=g), shown)
    tiles = (motifs * 0.7 + 0.15)[shown].view(-1, 4, 4, 4, 4)
    # from (tile row, tile column, pixel row, pixel column) to rows and columns of the image
    grey = tiles.transpose(2, 3).reshape(-1, 1, 16, 16)
    noise = 0.08 * torch.randn(len(labels), 3, 16, 16, generator=g)
    return (grey + noise).clamp(0, 1)


def register() -> None:
    """Let --dataset and --pool take the name."""
    # drawn images are small and many, so crops would only blur them
    NAMED["quilts"] = {"pool": "quilts", "augment": "none"}
    MAKE_TASK["quilts"] = quilts_task
    MAKE_POOL["quilts"] = quilts_pool


def quilts_task(seed: int) -> Task:
    """The labelled ones."""
    _, task = quilts(seed)
    return task


def quilts_pool(seed: int) -> Pool:
    """The unlabelled ones."""
    pool, _ = quilts(seed)
    return pool
