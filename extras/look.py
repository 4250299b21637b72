"""What alignment does to a network, on validation images: rollout and similarity (Sec. 4, App. D).

Attention rollout (Abnar and Zuidema 2020) shows where a network looks. With A_k the attention of
layer k, averaged over its heads,

    Â_k = (A_k + I) with normalised rows        R = Â_K ... Â_2 Â_1

and an image's map is the row of R that the head reads, over the patches: the class token's, or the
mean of all patches' (I-JEPA). Two measures say how alike two networks see the same images, by what
enters the head, X and Y (N, d):

    CKA (Kornblith et al. 2019)      |X̄ᵀȲ|² / (|X̄ᵀX̄| |ȲᵀȲ|), Frobenius norms, columns centred
    RSA (Kriegeskorte et al. 2008)   Spearman's correlation of the distances 1 − cos of all pairs

Paper silent: how heads are fused (here their mean), which images, which split, which layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any, NamedTuple

import torch
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from torch import Tensor

from commands import FinetuneConfig
from config import RunError, UsageError
from data import Images, batches, rng
from extras.figures import COLOURS, Drawn, check_out, pyplot, save, short_names
from lora import Backbone, Phi, block_forward, features, load_adapter, predict, qkv
from model import Model
from run import read_json, reading

BATCH = 64
MOST = 10_000  # images of a similarity: 50 million pairs


# --- finished runs --------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A finished run's network."""

    m: Model
    theta: Tensor | None  # None: the pretrained backbone alone
    phi_D: Phi  # {} where it is an align run's


def open_runs(runs: Sequence[Path], seed: int | None, changes: dict[str, Any]) -> dict[str, Opened]:
    """Networks of align and finetune runs by name, all on the same weights and data (UsageError).

    Args:
        seed: whose adapter is taken of a finetune run; None: its first seed's.
        changes: settings that are not the runs' own: device, data_root, weights, workers.
    """
    names = short_names(runs)
    if len({*names}) < len(runs):
        raise UsageError(f"{', '.join(names)}: one run twice, leave it out once")
    opened = {name: open_run(run, seed, changes) for name, run in zip(names, runs, strict=True)}
    first = opened[names[0]].m
    for name, (m, _, _) in opened.items():
        if (m.about(), m.transform) != (first.about(), first.transform):
            raise UsageError(f"{name}: has other weights, data or transforms than {names[0]}")
    return opened


def open_run(run: Path, seed: int | None, changes: dict[str, Any]) -> Opened:
    """One of them, with the weights and images it was made with; opened as finetune's."""
    file = adapter_of(run, seed)
    with reading(run / "config.json", "run it again with this version"):
        config = read_json(run / "config.json")
        known = FinetuneConfig.model_fields.keys() - {"start"}
        cfg = FinetuneConfig(**{k: v for k, v in config.items() if k in known} | changes)
    m, env = Model(cfg), read_json(run / "env.json")
    for key in ("weights_sha256", "data_sha256"):
        before, now = (env | env.get("about", {}))[key], m.about()[key]
        if before != now:
            raise UsageError(f"{run}: was made with {key} {before[:12]}, now it is {now[:12]}")
    theta, phi_D, _ = load_adapter(file)
    return Opened(m, theta.to(m.device), {k: x.to(m.device) for k, x in phi_D.items()})


def adapter_of(run: Path, seed: int | None) -> Path:
    """The adapter file of an align run, or of a seed, None: the first, of a finetune run."""
    one = seed is None or (run / "adapter.safetensors").exists()
    files = sorted(run.glob("adapter*.safetensors" if one else f"adapter-s{seed}.safetensors"))
    if not files:
        whose = "a finished align or finetune run" if one else f"seed {seed}"
        raise UsageError(f"{run}: holds no adapter of {whose}")
    return min(files, key=lambda file: (len(file.name), file.name))


def looked_at(m: Model, index: Sequence[int]) -> Iterator[Tensor]:
    """Some validation images, in batches on the device, cut as for a test."""
    images = Images(m.task.val, m.transform, False, 0, "eval")
    draws = [[(i, i) for i in index[k : k + BATCH]] for k in range(0, len(index), BATCH)]
    yield from (x for x, _ in batches(images, draws, m.cfg.workers, m.device))


def spread(targets: Tensor, count: int, seed: int) -> list[int]:
    """Indices of `count` images, drawn so that no class comes again before every class has come.

    Args:
        targets: (N,), or (N, C) for several classes an image, of which the first present counts.
    """
    kinds = (targets if targets.ndim == 1 else (targets == 1).long().argmax(1)).tolist()
    seen = [0] * (max(kinds) + 1)  # images of each class so far
    rounds = []
    for place, i in enumerate(torch.randperm(len(kinds), generator=rng(seed, "spread")).tolist()):
        rounds.append((seen[kinds[i]], place, i))
        seen[kinds[i]] += 1
    return [i for _, _, i in sorted(rounds)[:count]]


# --- attention rollout ----------------------------------------------------------------------------


def add_layer(rolled: Tensor, attention: Tensor) -> Tensor:
    """One layer more, Â_k R_{k-1}: (n, n) or (B, n, n), and (B, heads, n, n) -> (B, n, n).

    >>> add_layer(torch.eye(2), torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))  # (A + I) / 2
    tensor([[[0.5000, 0.5000],
             [0.0000, 1.0000]]])
    """
    with torch.autocast(attention.device.type, enabled=False):
        mixed = attention.mean(1) + torch.eye(attention.shape[-1]).to(attention)
        return mixed / mixed.sum(-1, keepdim=True) @ rolled.to(mixed)


@torch.no_grad()
def rolled_out(backbone: Backbone, theta: Tensor | None, images: Tensor) -> Tensor:
    """R (B, n, n) of images (B, 3, H, W), the class token first; float32 or better."""
    vit: Any = backbone.vit
    x = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    rolled = torch.eye(x.shape[1])
    rows = [None] * backbone.depth if theta is None else theta.unbind(0)
    for block, row in zip(vit.blocks, rows, strict=True):
        q, k, _ = qkv(block.attn, block.norm1(x), row, backbone.scale)
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        rolled = add_layer(rolled, scores.softmax(-1, dtype=rolled.dtype))
        x = block_forward(block, x, row, backbone.scale)
    return rolled


def attention_maps(backbone: Backbone, theta: Tensor | None, images: Tensor) -> Tensor:
    """Where the network looks, (B, side, side): a patch's share in what the head reads."""
    vit: Any = backbone.vit
    rolled, prefix = rolled_out(backbone, theta, images), vit.num_prefix_tokens
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
) -> dict[str, Any]:
    """Draw the attention rollouts of finetune runs on the same validation images.

    Args:
        count: of images, spread over the classes, drawn by `seed` (None: 0).
        out: the picture; None: rollout.png in the first run's directory.
        seed, changes: see `open_runs`.
    """
    out = out or runs[0] / "rollout.png"
    check_out("--picture", out)
    opened = open_runs(runs, seed, changes)
    m = next(iter(opened.values())).m
    targets, classes = m.task.val.targets, m.task.classes
    if not 1 <= count <= min(len(targets), BATCH):
        raise UsageError(f"--rollout {count}: give 1 to {min(len(targets), BATCH)} images")
    index = spread(targets, count, seed or 0)
    images = torch.cat([*looked_at(m, index)])
    present = [classes_of(targets[i]) for i in index]
    labels = [", ".join(classes[k] for k in kinds) or "none" for kinds in present]
    shown, said = {}, {}
    for name, (m, theta, phi_D) in opened.items():
        if not phi_D:
            raise UsageError(
                f"--rollout: {name} is an align run, it predicts nothing; fine-tune it"
            )
        with torch.no_grad(), torch.autocast(m.device.type, torch.bfloat16, enabled=m.amp):
            top = predict(m.backbone, theta, phi_D, images).argmax(1).tolist()
            shown[name] = attention_maps(m.backbone, theta, images).cpu()
        right = ["✓" if k in kinds else "✗" for k, kinds in zip(top, present, strict=True)]
        said[name] = [f"{mark} {classes[k]}" for mark, k in zip(right, top, strict=True)]
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (m.transform.mean, m.transform.std))
    save(draw_rollout(images.cpu() * std + mean, labels, shown, said), out)
    columns = zip(index, labels, *said.values(), strict=True)
    rows = [dict(zip(("image", "label", *said), row, strict=True)) for row in columns]
    return {"picture": out, "dataset": m.task.name, "images": rows}


def classes_of(target: Tensor) -> list[int]:
    """The classes of one image: its label, or those that are present."""
    return [int(target)] if target.ndim == 0 else (target == 1).nonzero()[:, 0].tolist()


def draw_rollout(
    images: Tensor,
    labels: Sequence[str],
    shown: Mapping[str, Tensor],
    said: Mapping[str, Sequence[str]],
) -> Drawn:
    """A column an image: the image, then each network's map over it; one colour scale a column.

    Args:
        images: (B, 3, H, W) in [0, 1].
        shown, said: by network, maps (B, side, side) and captions that begin with ✓ or ✗.
    """
    rows, (columns, _, _, side) = len(shown) + 1, images.shape
    size, heights = (0.4 + 1.4 * columns, 0.4 + 1.6 * rows), [*[1] * rows, 0.05]
    figure, grid = pyplot().subplots(
        rows + 1, columns, figsize=size, height_ratios=heights, squeeze=False
    )
    for axes, name in zip(grid[:-1, 0], ("input", *shown), strict=True):
        axes.set_ylabel("\n".join(wrap(name, 20)))
    for k, image in enumerate(images):
        for axes in grid[:-1, k]:
            axes.set(xticks=[], yticks=[], frame_on=False)
        grid[0, k].imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
        grid[0, k].set_title(shorten(labels[k], 20, placeholder="..."), fontsize=8)
        maps = torch.stack([one[k] for one in shown.values()])
        scale: Any = {"cmap": "inferno", "vmin": float(maps.min()), "vmax": float(maps.max())}
        for axes, one, text in zip(grid[1:-1, k], maps, said.values(), strict=True):
            axes.imshow(image.mean(0).numpy(), cmap="gray", vmin=-1, vmax=1)  # pale
            corners = (-0.5, side - 0.5, side - 0.5, -0.5)
            drawn = axes.imshow(one.numpy(), alpha=0.7, extent=corners, **scale)
            colour = COLOURS[2] if text[k][0] == "✓" else COLOURS[5]
            axes.set_title(shorten(text[k], 20, placeholder="..."), fontsize=8, color=colour)
        ends = {"ticks": [scale["vmin"], scale["vmax"]], "format": "%.3g", "label": "share"}
        figure.colorbar(drawn, cax=grid[-1, k], orientation="horizontal", **ends)
    words = [f"{name} is right {''.join(x).count('✓')} times" for name, x in said.items()]
    return figure, f"Attention rollout on {columns} validation images: {'; '.join(words)}."


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


def similarity(
    runs: Sequence[Path],
    limit: int = 1000,
    out: Path | None = None,
    *,
    seed: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """CKA and RSA of the pretrained backbone and of align or finetune runs, pair by pair.

    Args:
        limit: most validation images, spread over the classes.
        out: the picture; None: similarity.png in the first run's directory.
        seed, changes: see `open_runs`.
    """
    out = out or runs[0] / "similarity.png"
    check_out("--picture", out)
    if not 3 <= limit <= MOST:
        raise UsageError(f"--limit {limit}: give 3 to {MOST} images")
    opened = open_runs(runs, seed, changes)
    m = next(iter(opened.values())).m
    opened = {"pretrained": Opened(m, None, {})} | opened
    targets = m.task.val.targets
    index = sorted(spread(targets, min(len(targets), limit), 0))
    images, seen = [*looked_at(m, index)], {}
    for name, (m, theta, _) in opened.items():
        with torch.no_grad(), torch.autocast(m.device.type, torch.bfloat16, enabled=m.amp):
            z = torch.cat([features(m.backbone, theta, x) for x in images]).float().cpu()
        if not (z.norm(dim=1) > 0).all() or not (z != z[0]).any():
            raise RunError(f"{name}: its features are zero, not finite, or equal for all images")
        seen[name] = z
    rows = [
        {"network": a, "and": b, "CKA": cka(seen[a], seen[b]), "RSA": rsa(seen[a], seen[b])}
        for a, b in combinations(seen, 2)
    ]
    save(draw_similarity([*seen], rows), out)
    return {"picture": out, "dataset": m.task.name, "images": len(index), "pairs": rows}


def draw_similarity(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Drawn:
    """A heat map with values: CKA above the diagonal, RSA below it."""
    n, ticks = len(names), range(len(names))
    figure, axes = pyplot().subplots(figsize=(2 + 0.9 * n, 1.2 + 0.9 * n))
    matrix = torch.eye(n)
    for (i, j), row in zip(combinations(ticks, 2), rows, strict=True):
        matrix[i, j], matrix[j, i] = row["CKA"], row["RSA"]
    axes.imshow(matrix.numpy(), vmin=0, vmax=1)
    for i, j in product(ticks, repeat=2):
        colour = "white" if matrix[i, j] < 0.6 else "black"
        axes.text(j, i, f"{matrix[i, j]:.2f}", color=colour, ha="center", va="center")
    axes.set(xticks=ticks, xticklabels=names, yticks=ticks, yticklabels=names)
    axes.set_title("CKA above, RSA below the diagonal")
    said = [f"{r['network']} and {r['and']} {r['CKA']:.3f}, {r['RSA']:.3f}" for r in rows]
    return figure, f"Linear CKA and RSA: {'; '.join(said)}."
