"""What alignment does to a network, on validation images: rollout and similarity (Sec. 4, App. D).

Attention rollout (Abnar and Zuidema 2020) shows where a network looks. With A_k the attention of
layer k, averaged over its heads,

    R = Â_K ... Â_2 Â_1        Â_k = (A_k + I) / 2, so that rows sum to 1

and an image's map is the row of R that the head reads, over the patches: the class token's, or the
mean of all patches' (I-JEPA). Two measures say how alike two networks see the same images, by what
enters the head, X and Y (N, d):

    CKA (Kornblith et al. 2019)      |X̄ᵀȲ|² / (|X̄ᵀX̄| |ȲᵀȲ|), Frobenius norms, columns centred
    RSA (Kriegeskorte et al. 2008)   Spearman's correlation of the distances 1 − cos of all pairs

Paper silent: how heads are fused (here their mean), which images, which split, which layer.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import one_hot

from commands import FinetuneConfig
from config import UsageError
from data import Images, batches, rng
from extras.figures import check_out, pyplot, save, short_names
from lora import Backbone, Phi, block_forward, features, load_adapter, predict, qkv
from model import Model
from run import checking, read_json

BATCH = 64
Row = dict[str, Any]


# --- finished runs and their images ---------------------------------------------------------------


def open_runs(
    runs: Sequence[Path], seed: int | None, changes: dict[str, Any]
) -> tuple[Model, dict[str, tuple[Backbone, Tensor, Phi]]]:
    """The first run's backbone and data; of each run, by name, f_θ, θ and φ_D ({} of an align run).

    Args:
        runs: finished align or finetune runs, made with the same weights and data.
        seed: whose adapter is taken of a finetune run; None: its first seed's.
        changes: settings that are not the first run's own: device, data_root, weights, workers.
    """
    files = [adapter_of(run, seed) for run in runs]
    config = read_json(runs[0] / "config.json")
    known = FinetuneConfig.model_fields.keys() - {"start"}
    m = Model(FinetuneConfig(**{k: v for k, v in config.items() if k in known} | changes))
    now, networks = m.about(), {}
    for name, run, file in zip(short_names(runs), runs, files, strict=True):
        with checking(str(file)):
            theta, phi_D, about = load_adapter(file)
        if any(about.get(key, now[key]) != now[key] for key in ("weights_sha256", "data_sha256")):
            raise UsageError(f"{run}: was made with other weights or images than are here")
        backbone = Backbone(m.backbone.vit, float(about["alpha"]) / float(about["rank"]))
        phi_D = {key: tensor.to(m.device) for key, tensor in phi_D.items()}
        networks[name] = backbone, theta.to(m.device), phi_D
    return m, networks


def adapter_of(run: Path, seed: int | None) -> Path:
    """The adapter file of an align run, or of a seed, None: the first, of a finetune run."""
    whose = "*" if seed is None else seed
    files = [*run.glob("adapter.safetensors"), *run.glob(f"adapter-s{whose}.safetensors")]
    if not files:
        of = "a finished align or finetune run" if seed is None else f"seed {seed}"
        raise UsageError(f"{run}: holds no adapter of {of}")
    return min(files, key=lambda file: (len(file.name), file.name))


def looked_at(m: Model, index: Sequence[int]) -> list[Tensor]:
    """Some validation images, in batches on the device, cut as for a test."""
    images = Images(m.task.val, m.transform, False, 0, "eval")
    draws = [[(i, i) for i in index[k : k + BATCH]] for k in range(0, len(index), BATCH)]
    return [x for x, _ in batches(images, draws, m.cfg.workers, m.device)]


def spread(targets: Tensor, count: int, seed: int) -> list[int]:
    """Indices of `count` images, drawn so that no class comes again before every class has come.

    Args:
        targets: (N,), or (N, C) for several classes an image, of which the first present counts.
    """
    kinds = targets if targets.ndim == 1 else (targets == 1).long().argmax(1)
    order = torch.randperm(len(kinds), generator=rng(seed, "spread"))
    rounds = one_hot(kinds[order]).cumsum(0).gather(1, kinds[order][:, None])[:, 0]
    return order[rounds.argsort(stable=True)][:count].tolist()


# --- attention rollout ----------------------------------------------------------------------------


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
    maps: Tensor = read[:, :, prefix:].mean(1).unflatten(1, vit.patch_embed.grid_size)
    return maps


def rollout(
    runs: Sequence[Path],
    count: int,
    out: Path | None = None,
    *,
    seed: int | None = None,
    **changes: Any,
) -> Row:
    """Draw the attention rollouts of finetune runs on the same validation images.

    Args:
        count: of images, spread over the classes, drawn by `seed` (None: 0).
        out: the picture; None: rollout.png in the first run's directory.
        seed, changes: see `open_runs`.
    """
    out = out or runs[0] / "rollout.png"
    check_out(out)
    m, networks = open_runs(runs, seed, changes)
    targets, classes = m.task.val.targets, m.task.classes
    if not 1 <= count <= min(len(targets), BATCH):
        raise UsageError(f"--rollout {count}: give 1 to {min(len(targets), BATCH)} images")
    index = spread(targets, count, seed or 0)
    images, shown = torch.cat(looked_at(m, index)), {}
    true = targets[index] == 1 if targets.ndim == 2 else one_hot(targets[index], len(classes))
    rows: list[Row] = [
        {"image": i, "label": ", ".join(classes[k] for k in right.nonzero()[:, 0]) or "none"}
        for i, right in zip(index, true, strict=True)
    ]
    for name, (backbone, theta, phi_D) in networks.items():
        if not phi_D:
            raise UsageError(f"--rollout: {name} is an align run, it predicts nothing; fine-tune")
        shown[name] = attention_maps(backbone, theta, images).cpu()
        top = predict(backbone, theta, phi_D, images).argmax(1).tolist()
        for row, k, right in zip(rows, top, true, strict=True):
            row[name] = f"{'✓' if right[k] else '✗'} {classes[k]}"
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (m.transform.mean, m.transform.std))
    save(*draw_rollout((images.cpu() * std + mean).clamp(0, 1), rows, shown), out)
    return {"picture": out, "dataset": m.task.name, "images": rows}


def draw_rollout(
    images: Tensor, rows: Sequence[Row], shown: Mapping[str, Tensor]
) -> tuple[Any, str]:
    """A column an image: the image, then each network's map over it; one scale a column.

    Args:
        images: (B, 3, H, W) in [0, 1].
        rows: an image's label, and by network what it predicts.
        shown: by network, maps (B, side, side).
    """
    side, size = images.shape[-1], (1.5 * len(rows), 1.7 * (len(shown) + 1))
    figure, grid = pyplot().subplots(len(shown) + 1, len(rows), squeeze=False, figsize=size)
    for k, row in enumerate(rows):
        low, high = map(float, torch.stack([maps[k] for maps in shown.values()]).aminmax())
        for axes, name in zip(grid[:, k], ("label", *shown), strict=True):
            axes.imshow(images[k].permute(1, 2, 0).numpy())
            if name in shown:
                own = {"vmin": low, "vmax": high, "extent": (-0.5, side - 0.5, side - 0.5, -0.5)}
                axes.imshow(shown[name][k].numpy(), cmap="inferno", alpha=0.7, **own)
            axes.set(xticks=[], yticks=[], title=shorten(row[name], 20), ylabel="" if k else name)
    right = [f"{name} is right {sum('✓' in row[name] for row in rows)} times" for name in shown]
    return figure, f"Attention rollout on {len(rows)} validation images: {'; '.join(right)}."


# --- similarity -----------------------------------------------------------------------------------


def cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of features of the same images, (N, d) and (N, d'); 1 for equal ones.

    Rotations, shifts and one scale for all of X do not matter.
    """
    x, y = (z.double() - z.double().mean(0) for z in (x, y))
    return float((x.mT @ y).norm() ** 2 / ((x.mT @ x).norm() * (y.mT @ y).norm()))


def rsa(x: Tensor, y: Tensor) -> float:
    """RSA of features of the same images, (N, d) and (N, d'); 1 for equal ones.

    Rotations and a scale of each image do not matter.
    """
    return float(spearmanr(*(pdist(z.double().numpy(), "cosine") for z in (x, y))).statistic)


@torch.no_grad()
def similarity(
    runs: Sequence[Path], limit: int = 1000, *, seed: int | None = None, **changes: Any
) -> Row:
    """CKA and RSA of the pretrained backbone and of align or finetune runs, pair by pair.

    Args:
        limit: most validation images, spread over the classes.
        seed, changes: see `open_runs`.
    """
    if limit < 3:
        raise UsageError(f"--limit {limit}: give 3 images or more")
    m, networks = open_runs(runs, seed, changes)
    images = looked_at(m, sorted(spread(m.task.val.targets, limit, 0)))
    every: Any = {"pretrained": (m.backbone, None, {})} | networks
    seen = {
        name: torch.cat([features(backbone, theta, x) for x in images]).cpu()
        for name, (backbone, theta, _) in every.items()
    }
    pairs = [
        {"network": a, "and": b, "CKA": cka(seen[a], seen[b]), "RSA": rsa(seen[a], seen[b])}
        for a, b in combinations(seen, 2)
    ]
    return {"dataset": m.task.name, "images": sum(map(len, images)), "pairs": pairs}
