"""The embedded default: pixel quilts, a labelled task and a pool that are drawn from a seed."""

from functools import lru_cache

import torch
from torch import Tensor

from data import Pool, Split, Task, rng

MOTIFS = ("1111000011110000", "1010101010101010", "0110111111110110", "1001011001101001")


@lru_cache(maxsize=2)
def quilts(seed: int) -> tuple[Pool, Task]:
    """Pixel quilts: a pool of 4000 images (3, 16, 16), and 8 classes with 80 / 160 / 480 images.

    A quilt is 4 x 4 tiles and shows two of four motifs. Its class is the layout, which tiles are
    equal, never which motif they show. So single pixels say little about the class (all classes
    have the same mean image), and a network must compare tiles, as it must to fill in masked ones.
    Labelled images, unlike the pool, have a tenth of their tiles replaced. A tile is exactly a
    patch of vit_mini, which favours a ViT.
    """
    g = rng(seed, "quilts")
    layouts: list[Tensor] = []
    while len(layouts) < 8:
        layout = torch.randint(2, (16,), generator=g)
        distances = [int((layout != other).sum()) for other in layouts]
        if 7 <= int(layout.sum()) <= 9 and all(5 <= d <= 11 for d in distances):
            layouts.append(layout)
    pixels = torch.tensor([[int(bit) for bit in motif] for motif in MOTIFS]) * 0.7 + 0.15  # (4, 16)

    def draw(labels: Tensor, junk: float) -> Tensor:
        n = len(labels)
        first = torch.randint(4, (n,), generator=g)
        second = (first + torch.randint(1, 4, (n,), generator=g)) % 4  # another motif
        layout = torch.stack(layouts)[labels]  # (n, 16 tiles)
        shown = torch.where(layout == 1, second[:, None], first[:, None])
        spoilt = torch.rand(n, 16, generator=g) < junk
        shown = torch.where(spoilt, torch.randint(4, (n, 16), generator=g), shown)
        tiles = pixels[shown].view(n, 4, 4, 4, 4)  # tile row, tile column, pixel row, pixel column
        grey = tiles.transpose(2, 3).reshape(n, 1, 16, 16)
        return (grey + 0.08 * torch.randn(n, 3, 16, 16, generator=g)).clamp(0, 1)

    pool = draw(torch.randint(8, (4000,), generator=g), 0.0)
    labels = [torch.arange(8).repeat(count) for count in (10, 20, 60)]
    train, val, test = (Split(draw(y, 0.1), y) for y in labels)
    mean, std = (tuple(x.tolist()) for x in (pool.mean((0, 2, 3)), pool.std((0, 2, 3))))
    classes = [f"layout {k}" for k in range(8)]
    return Pool(pool, mean, std), Task("quilts", train, val, test, classes, mean, std)
