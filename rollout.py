"""Attention rollout (Abnar and Zuidema 2020): where a network looks, one map an image (Sec. 4, App. D).

    Â_k = mean over heads of A_k, plus I, rows normalised        R = Â_K ... Â_2 Â_1

A map is the row of R that belongs to what the head reads, over the patches: the class token's row or, where the head
reads the mean of the patches (I-JEPA), the mean of their rows. What goes to the class token itself is left out, so a
map sums to less than one there.

Paper silent: how heads are fused (here by their mean, as Abnar and Zuidema do), whether small attentions are discarded
(here none), how maps are scaled (here one scale an image, shared by all models), which images (here `spread`).
Leaves out: smoothing maps over pixels; a square of colour is a patch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from figures import COLOURS, pyplot, save
from lora import Backbone
from runtime import rng


def add_layer(rolled: Tensor, attention: Tensor) -> Tensor:
    """One layer more, Â_k R_{k-1}: (n, n) or (B, n, n), and attention (B, heads, n, n) -> (B, n, n).

    >>> add_layer(torch.eye(2), torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))  # (A + I) / 2
    tensor([[[0.5000, 0.5000],
             [0.0000, 1.0000]]])
    """
    with torch.autocast(attention.device.type, enabled=False):
        mixed = attention.mean(1) + torch.eye(attention.shape[-1], dtype=attention.dtype, device=attention.device)
        return mixed / mixed.sum(-1, keepdim=True) @ rolled.to(mixed)


@torch.no_grad()
def rolled_out(backbone: Backbone, theta: Tensor | None, images: Tensor) -> Tensor:
    """R (B, n, n), the class token first, float32 or better. The product is kept, the layers are not."""
    vit: Any = backbone.vit
    rolled = torch.eye(vit.num_prefix_tokens + vit.patch_embed.num_patches)

    def see(attention: Tensor) -> None:
        nonlocal rolled
        rolled = add_layer(rolled, attention)

    backbone(images, theta, see=see)
    return rolled


def rollout(backbone: Backbone, theta: Tensor | None, images: Tensor) -> Tensor:
    """Maps (B, side, side) of images (B, 3, H, W), normalised as for training."""
    vit: Any = backbone.vit
    rolled, prefix = rolled_out(backbone, theta, images), vit.num_prefix_tokens
    read = rolled[:, :1] if vit.global_pool == "token" else rolled[:, prefix:]  # what enters the head
    maps: Tensor = read[:, :, prefix:].mean(1).unflatten(1, vit.patch_embed.grid_size)
    return maps


def spread(targets: Tensor, count: int, seed: int) -> list[int]:
    """Indices of `count` images, drawn so that no class comes again before every class has come.

    Args:
        targets: (N,), or (N, C) for several classes an image; of these the first that is present counts.
    """
    kinds = (targets if targets.ndim == 1 else (targets == 1).long().argmax(1)).tolist()
    before: dict[int, int] = {}  # images of each class so far
    rounds = []
    for place, index in enumerate(torch.randperm(len(kinds), generator=rng(seed, "spread")).tolist()):
        rounds.append((before.get(kinds[index], 0), place, index))
        before[kinds[index]] = rounds[-1][0] + 1
    return [index for _, _, index in sorted(rounds)[:count]]


def peak(maps: Tensor) -> float:
    """How concentrated maps (B, h, w) are: the strongest patch's share of all, over an even share, mean over images.

    >>> peak(torch.tensor([[[0.1, 0.1], [0.1, 0.1]], [[0.3, 0.1], [0.1, 0.1]]]))  # 1 and 0.5 · 4
    1.5
    """
    flat = maps.flatten(1)
    return float((flat.amax(1) / flat.mean(1)).mean())


class Model(NamedTuple):
    """What one model makes of the images."""

    maps: Tensor  # (B, side, side)
    said: list[str]  # predicted classes
    right: list[bool]


def draw(images: Tensor, labels: Sequence[str], models: Mapping[str, Model], path: Path) -> None:
    """A column an image: the input, then each model's map over it in grey. Within a column a colour is one value.

    Args:
        images: (B, 3, H, W) in [0, 1].
        labels: what each image shows.
        models: by name, a row each.
    """
    rows, side = len(models) + 1, images.shape[-1]
    size, ratios = (0.4 + 1.4 * len(images), 0.4 + 1.6 * rows), (*[1] * rows, 0.05)
    figure, grid = pyplot().subplots(rows + 1, len(images), figsize=size, height_ratios=ratios, squeeze=False)
    for axes in grid[:-1].flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for axes, name in zip(grid[:-1, 0], ("input", *models), strict=True):
        axes.set_ylabel("\n".join(line for part in name.split(", ") for line in wrap(part, 20)), fontsize=9)
    for column, (image, label) in enumerate(zip(images, labels, strict=True)):
        grid[0, column].imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
        grid[0, column].set_title(caption(label), fontsize=8)
        maps = torch.stack([model.maps[column] for model in models.values()])
        scale: Any = {"vmin": float(maps.min()), "vmax": float(maps.max()), "cmap": "inferno"}
        for axes, one, model in zip(grid[1:-1, column], maps, models.values(), strict=True):
            axes.imshow(image.mean(0).numpy(), cmap="gray", vmin=-1, vmax=1, interpolation="nearest")  # pale
            corners = (-0.5, side - 0.5, side - 0.5, -0.5)
            colours = axes.imshow(one.numpy(), alpha=0.7, extent=corners, interpolation="nearest", **scale)
            right = model.right[column]
            told = caption(f"{'✓' if right else '✗'} {model.said[column]}")
            axes.set_title(told, fontsize=8, color=COLOURS[2] if right else COLOURS[5])
        bar = figure.colorbar(colours, cax=grid[-1, column], orientation="horizontal")
        bar.set_ticks([scale["vmin"], scale["vmax"]], labels=ends(scale["vmin"], scale["vmax"]))
        bar.ax.tick_params(labelsize=7, length=2)
        bar.set_label("a patch's share", fontsize=7, labelpad=1)
    save(figure, path)


def ends(low: float, high: float) -> list[str]:
    """Both ends of a scale, with as many digits as tell them apart.

    >>> ends(0.01562, 0.01567)
    ['0.0156', '0.0157']
    """
    for digits in range(2, 8):
        said = [f"{value:.{digits}g}" for value in (low, high)]
        if said[0] != said[1]:
            break
    return said


def caption(text: str) -> str:
    """In two lines at most, however many classes there are."""
    return "\n".join(wrap(shorten(text.replace("_", " "), 40, placeholder=" ..."), 20))
