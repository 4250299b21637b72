"""Attention rollout of models with and without BiSSLight (Sec. 4, App. D.3; fig:attn_rollout_*).

    python -m experiments.attention_rollout --backbone vit_l16 --dataset pets

Rollout (Abnar and Zuidema 2020) shows where a network looks. With A_k the attention of layer k,
averaged over its heads,

    R = Â_K ... Â_2 Â_1        Â_k = (A_k + I) / 2, so that rows sum to 1

and an image's map is the row of R that the head reads, over the patches: the class token's, or the
mean of all patches' (I-JEPA). The models are those of `experiments.accuracy`, which are trained
first if they are not in --out. Paper silent: how heads are fused (here their mean), which images.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor

from config import FinetuneConfig, Record
from experiments.accuracy import compare
from experiments.networks import BATCH, Network, open_networks, validation_images
from experiments.recipe import Backbone as BackboneName
from experiments.recipe import Dataset, Set, markdown, read_settings, run_script
from extras.plots import save
from head import features, logits
from lora import Backbone, block_forward, qkv
from support.errors import UsageError
from support.experiment import Experiment
from support.processes import make_ready


def main(
    backbone: BackboneName = "vit_l16",
    dataset: Dataset = "pets",
    pretext: str = "mae",
    images: Annotated[int, typer.Option(min=1, max=BATCH)] = 6,
    out: Path | None = None,
    more: Set = None,
) -> None:
    """Draw images, PEFT's maps and the maps of PEFT after BiSSLight, below each other."""
    make_ready()
    settings = {"backbone": backbone, "dataset": dataset, "pretext": pretext} | read_settings(more)
    out = out or Path("runs") / f"accuracy-{Path(dataset).name}-{backbone}-{pretext}"
    compare(settings, ["mfac"], out)
    runs = {"PEFT": out / "direct", "BiSSLight + PEFT": out / "tuned-mfac"}
    draw(runs, images, out / "attention_rollout.png")


def draw(runs: Mapping[str, Path], count: int, path: Path) -> list[Record]:
    """Draw a column for each of `count` validation images: itself, then each finetune run's map.

    Prints and returns what the networks predict, and how concentrated their maps are.
    """
    experiment, networks = open_networks(runs)
    numbers, images = validation_images(experiment, count)
    rows = [{"image": number, "label": label_of(experiment, number)} for number in numbers]
    maps = {}
    for network in networks:
        if not network.phi_D:
            raise UsageError(f"{network.name}: is an align run, which predicts nothing; fine-tune")
        maps[network.name] = attention_maps(network.backbone, network.theta, images).cpu()
        for row, prediction in zip(rows, predict(experiment, network, images), strict=True):
            row[network.name] = prediction
    print(markdown(rows))
    for name, maps_of_network in maps.items():
        entropy, largest = concentration(maps_of_network)
        print(f"{name}: entropy over log n {entropy:.3f}, largest patch {largest:.3f}")
    plot(experiment, images.cpu(), maps, rows, path)
    return rows


def label_of(experiment: Experiment[FinetuneConfig], number: int) -> str:
    """The class of a validation image, or its classes (VOC07)."""
    target = experiment.task.val.targets[number]
    present = (target == 1).nonzero().flatten().tolist() if target.ndim else [int(target)]
    return ", ".join(experiment.task.classes[k] for k in present) or "none"


def predict(experiment: Experiment[FinetuneConfig], network: Network, images: Tensor) -> list[str]:
    """The class that a network takes each image for."""
    with torch.no_grad():
        z = logits(features(network.backbone, network.theta, images), network.phi_D)
    return [experiment.task.classes[k] for k in z.argmax(1).tolist()]


@torch.no_grad()
def attention_maps(backbone: Backbone, theta: Tensor | None, images: Tensor) -> Tensor:
    """Where the network looks, (B, side, side): the share of each patch in what the head reads."""
    vit: Any = backbone.vit  # timm's types are unions
    x = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))  # (B, n, dim)
    R = torch.eye(x.shape[1]).to(x)  # (n, n), then (B, n, n); the class token comes first
    rows = [None] * len(vit.blocks) if theta is None else list(theta.unbind(0))
    for block, row in zip(vit.blocks, rows, strict=True):
        q, k, _ = qkv(block.attn, block.norm1(x), row, backbone.scale)  # (B, heads, n, dim / heads)
        A = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean(1)  # (B, n, n)
        R = (A @ R + R) / 2
        x = block_forward(block, x, row, backbone.scale)
    prefix = vit.num_prefix_tokens
    read = R[:, :1] if vit.global_pool == "token" else R[:, prefix:]
    return read[:, :, prefix:].mean(1).reshape(-1, *vit.patch_embed.grid_size)


def concentration(maps: Tensor) -> tuple[float, float]:
    """Return how concentrated maps (B, side, side) are, as two means over the images.

    The first is the entropy of a map divided by the largest possible one, so that 1 means that all
    patches have the same share. The second is the share of the largest patch.
    """
    flat = maps.flatten(1)
    shares = flat / flat.sum(1, keepdim=True)  # (B, patches)
    largest_entropy = torch.tensor(float(shares.shape[1])).log()
    entropy = torch.special.entr(shares).sum(1) / largest_entropy
    return float(entropy.mean()), float(shares.amax(1).mean())


def plot(
    experiment: Experiment[FinetuneConfig],
    images: Tensor,
    maps: dict[str, Tensor],
    rows: list[Record],
    path: Path,
) -> None:
    """Draw and save the picture; the maps of an image have one scale, so that they compare."""
    mean = torch.tensor(experiment.transform.mean).view(3, 1, 1)
    std = torch.tensor(experiment.transform.std).view(3, 1, 1)
    pixels = (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    size = (1.5 * len(rows), 1.7 * (len(maps) + 1))
    figure = Figure(size)
    grid = figure.subplots(len(maps) + 1, len(rows), squeeze=False)
    extent = (0, 1, 0, 1)
    for k, row in enumerate(rows):
        lowest = min(float(maps_of_network[k].min()) for maps_of_network in maps.values())
        highest = max(float(maps_of_network[k].max()) for maps_of_network in maps.values())
        for axes, name in zip(grid[:, k], ["label", *maps], strict=True):
            axes.imshow(pixels[k], extent=extent)
            axes.set(xticks=[], yticks=[], title=row[name][:20])
            if name in maps:
                shares = maps[name][k].numpy()
                axes.imshow(shares, "inferno", alpha=0.7, extent=extent, clim=(lowest, highest))
    for axes, name in zip(grid[1:, 0], maps, strict=True):
        axes.set_ylabel(name)
    save(figure, path)


if __name__ == "__main__":
    run_script(main)
