"""What alignment does to a network, on validation images: rollout and similarity (Sec. 4, App. D).

Attention rollout (Abnar and Zuidema 2020) shows where a network looks. With A_k the attention of
layer k, averaged over its heads,

    R = Â_K ... Â_2 Â_1        Â_k = (A_k + I) / 2, so that rows sum to 1

and an image's map is the row of R that the head reads, over the patches: the class token's, or the
mean of all patches' (I-JEPA). Two measures say how alike two networks are on the same N images,
by what enters their heads, X and Y (N, d); for equal networks both are 1:

    CKA (Kornblith et al. 2019)      |X̄ᵀȲ|² / (|X̄ᵀX̄| |ȲᵀȲ|), Frobenius norms, columns centred
    RSA (Kriegeskorte et al. 2008)   Spearman's correlation of the distances 1 − cos of all pairs

Paper silent: how heads are fused (here their mean), which images, which split, which layer.
"""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from torch import Tensor

from config import FinetuneConfig, Record, read_table
from data import Images, batches, rng
from extras.report import check_out, pyplot, save, short_names
from lora import Backbone, Phi, block_forward, features, logits, qkv
from support.checkpoints import load_adapter
from support.errors import UsageError, checking
from support.experiment import Experiment

BATCH = 64


def open_run(
    run: Path, seed: int | None, changes: Record
) -> tuple[FinetuneConfig, Tensor, Phi, Record]:
    """Settings of a run, but for `changes`; θ, φ_D and what the adapter's file says of them.

    The adapter: an align run's (φ_D is {}), or a finetune run's of a seed (None: its first).
    """
    whose = "*" if seed is None else seed
    files = [*run.glob("adapter.safetensors"), *run.glob(f"adapter-s{whose}.safetensors")]
    if not files:
        raise UsageError(f"{run}: holds no adapter-s{whose}.safetensors of a finished run")
    file = min(files, key=lambda file: (len(file.name), file.name))
    config = read_table(run / "config.json") | changes
    known = FinetuneConfig.model_fields.keys() & config.keys() - {"start"}
    with checking(str(run), "give a finished run of this edition"):
        return FinetuneConfig(**{name: config[name] for name in known}), *load_adapter(file)


def open_runs(
    runs: Sequence[Path], seed: int | None, changes: Record
) -> tuple[Experiment, dict[str, tuple[Backbone, Tensor, Phi]]]:
    """The first run's backbone and data; by run its backbone, θ and φ_D, see `open_run`."""
    opened = [open_run(run, seed, changes) for run in runs]
    m = Experiment(opened[0][0])
    now, networks = m.defining, {}
    for name, run, (_, theta, phi_D, about) in zip(short_names(runs), runs, opened, strict=True):
        if any(about.get(key, now[key]) != now[key] for key in ("weights_sha256", "data_sha256")):
            raise UsageError(f"{run}: was made with other weights or images than are here")
        backbone = Backbone(m.backbone.vit, float(about["alpha"]) / float(about["rank"]))
        head = {key: tensor.to(m.device) for key, tensor in phi_D.items()}
        networks[name] = backbone, theta.to(m.device), head
    return m, networks


def looked_at(m: Experiment, count: int) -> tuple[list[int], Tensor]:
    """Validation images at random, at most `count`, always the same: which ones, their pixels."""
    index = torch.randperm(len(m.task.val.targets), generator=rng(0, "look"))[:count].tolist()
    images = Images(m.task.val, m.transform, False, 0, "eval")
    draws = ([(i, i) for i in index[k : k + BATCH]] for k in range(0, len(index), BATCH))
    return index, torch.cat([x for x, _, _ in batches(images, draws, m.cfg.workers, m.device)])


@torch.no_grad()
def attention_maps(backbone: Backbone, theta: Tensor, images: Tensor) -> Tensor:
    """Where the network looks, (B, side, side): a patch's share in what the head reads."""
    vit: Any = backbone.vit
    x = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    rolled = torch.eye(x.shape[1]).to(x)  # R, (n, n), then (B, n, n), the class token first
    for block, row in zip(vit.blocks, theta.unbind(0), strict=True):
        q, k, _ = qkv(block.attn, block.norm1(x), row, backbone.scale)
        A = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean(1)
        rolled = (A @ rolled + rolled) / 2
        x = block_forward(block, x, row, backbone.scale)
    prefix = vit.num_prefix_tokens
    read = rolled[:, :1] if vit.global_pool == "token" else rolled[:, prefix:]
    return read[:, :, prefix:].mean(1).reshape(-1, *vit.patch_embed.grid_size)


def rollout(
    runs: Sequence[Path], count: int, out: Path | None = None, seed: int | None = None, **other: Any
) -> Record:
    """Draw attention rollouts of finetune runs on `count` images.

    The picture is `out`, or rollout.png in the first run's directory; seed, other: see `open_runs`.
    """
    out = out or runs[0] / "rollout.png"
    check_out(out)
    if not 1 <= count <= BATCH:
        raise UsageError(f"--rollout {count}: give 1 to {BATCH} images")
    m, networks = open_runs(runs, seed, other)
    index, images = looked_at(m, count)
    classes, maps = m.task.classes, {}
    targets = m.task.val.targets[index]  # of a VOC image a row
    known = [(y == 1).nonzero().flatten().tolist() if y.ndim else [int(y)] for y in targets]
    rows: list[Record] = [
        {"image": i, "label": ", ".join(classes[k] for k in there) or "none"}
        for i, there in zip(index, known, strict=True)
    ]
    for name, (backbone, theta, phi_D) in networks.items():
        if not phi_D:
            raise UsageError(f"--rollout: {name} is an align run, it predicts nothing; fine-tune")
        maps[name] = attention_maps(backbone, theta, images).cpu()
        top = logits(features(backbone, theta, images), phi_D).argmax(1).tolist()
        for row, k, there in zip(rows, top, known, strict=True):
            row[name] = f"{'✓' if k in there else '✗'} {classes[k]}"
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (m.transform.mean, m.transform.std))
    pixels, extent = (images.cpu() * std + mean).clamp(0, 1), (0, 1, 0, 1)
    figure, grid = pyplot().subplots(
        len(maps) + 1, len(rows), squeeze=False, figsize=(1.5 * len(rows), 1.7 * (len(maps) + 1))
    )
    for k, row in enumerate(rows):  # a column an image: itself, then each network's map, one scale
        scale = [float(x) for x in torch.stack([found[k] for found in maps.values()]).aminmax()]
        for axes, name in zip(grid[:, k], ("label", *maps), strict=True):
            axes.imshow(pixels[k].permute(1, 2, 0).numpy(), extent=extent)
            if name in maps:
                axes.imshow(
                    maps[name][k].numpy(), cmap="inferno", alpha=0.7, extent=extent, clim=scale
                )
            axes.set(xticks=[], yticks=[], title=row[name][:20], ylabel="" if k else name)
    save(figure, f"Attention rollout on {len(rows)} validation images: {', '.join(maps)}.", out)
    return {"picture": out, "dataset": m.task.name, "images": rows}


def cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of (N, d) and (N, d'): rotations, shifts, one scale for all of X do not matter."""
    x, y = (z.double() - z.double().mean(0) for z in (x, y))
    return float((x.mT @ y).norm() ** 2 / ((x.mT @ x).norm() * (y.mT @ y).norm()))


def rsa(x: Tensor, y: Tensor) -> float:
    """RSA of (N, d) and (N, d'): rotations and a scale of each image do not matter."""
    return float(spearmanr(*(pdist(z.double().numpy(), "cosine") for z in (x, y))).statistic)


@torch.no_grad()
def similarity(runs: Sequence[Path], *, seed: int | None = None, **changes: Any) -> Record:
    """CKA and RSA of the pretrained backbone and of align or finetune runs, pair by pair.

    On at most 1000 validation images; seed, changes: see `open_runs`.
    """
    m, networks = open_runs(runs, seed, changes)
    index, images = looked_at(m, 1000)
    every: Any = {"pretrained": (m.backbone, None, {})} | networks
    seen = {
        name: torch.cat([features(backbone, theta, x) for x in images.split(BATCH)]).cpu()
        for name, (backbone, theta, _) in every.items()
    }
    return {
        "dataset": m.task.name,
        "images": len(index),
        "pairs": [
            {"network": a, "and": b, "CKA": cka(seen[a], seen[b]), "RSA": rsa(seen[a], seen[b])}
            for a, b in combinations(seen, 2)
        ],
    }
