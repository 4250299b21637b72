"""`bisslight pretrain`: MAE or I-JEPA from scratch (Eq. 1), for those without a checkpoint.

It trains ψ itself and φ_P; there is no θ. backbone.pth has the layout of the official files, with
the sizes of the networks beside it, so that `--weights` takes it like a downloaded one.
"""

import copy
import io
import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import NonNegativeFloat, PositiveFloat

import ijepa
import mae
from commands import Command, Table
from config import (
    BACKBONES,
    Arch,
    Crops,
    NonNegativeInt,
    PositiveInt,
    Pretext,
    Rate,
    Shape,
    Share,
    UsageError,
)
from config import (
    Pool as PoolName,
)
from data import Pool, rng
from lora import Backbone, Phi
from model import device_of, named, own_names, pretext_batches, trained
from run import Run, checking, typed
from training import Optimiser, Track, decay_groups, untracked
from weights import build_head, build_vit, pretext_task, side, sincos


class PretrainConfig(Pretext, Crops, Shape, Command):
    """`pretrain`: MAE or I-JEPA from scratch, for those without a checkpoint. Trains ψ itself."""

    usual: ClassVar[dict[str, Table]] = {
        "ijepa": {  # Assran et al. 2023
            "epochs": 300,
            "min_crop": 0.3,
            "base_lr": 1.25e-4,
            "warmup_from": 0.2,
            "min_lr": 1e-6,
            "beta2": 0.999,
            "weight_decay": 0.04,
            "final_weight_decay": 0.4,
        },
        "ijepa vit_mini": {"min_keep": 4, "patch_size": 2},
        "vit_mini": {"epochs": 30, "warmup_epochs": 4, "batch": 64},
    }
    pool: PoolName
    """Unlabelled images: quilts, or any folder of images, nested or not."""
    epochs: PositiveInt = 400
    """Passes over the pool. [MAE's code; I-JEPA: 300]"""
    warmup_epochs: NonNegativeInt = 40
    """Epochs of linear warm-up. [MAE; I-JEPA]"""
    warmup_from: Rate = 0.0
    """Where the warm-up starts, as a share of the base rate. [MAE; I-JEPA: 0.2]"""
    batch: PositiveInt = 256
    """Images a step. [here; MAE uses 4096]"""
    base_lr: PositiveFloat = 1.5e-4
    """The rate is base_lr * batch / 256. [MAE; I-JEPA: 1.25e-4]"""
    min_lr: NonNegativeFloat = 0.0
    """Where the cosine ends. [MAE; I-JEPA: 1e-6]"""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of tensors with two or more axes. [MAE; I-JEPA: 0.04]"""
    final_weight_decay: NonNegativeFloat | None = None
    """Where half a cosine takes the decay. None: it stays. [MAE; I-JEPA: 0.4]"""
    beta2: Share = 0.95
    """AdamW's second beta; the first is 0.9. [MAE; I-JEPA: 0.999]"""
    ema: Share = 0.996
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [I-JEPA]"""


class PretrainResult(NamedTuple):
    """What a pretrain run ended with."""

    out: str
    weights: str  # its backbone.pth
    loss: float  # mean of the last epoch
    cpu_seconds: float
    seconds: float


def pretrain(
    cfg: PretrainConfig,
    out: Path,
    *,
    pool: Pool | None = None,
    force: bool = False,
    track: Track = untracked,
) -> PretrainResult:
    """Train a backbone and its pretext head into the run directory `out`; the same call goes on.

    Args:
        pool: unlabelled images of your own, instead of a name in `cfg`.
        force: start the run in `out` over.
        track: shows progress, an item an epoch, or 500 steps of a longer one.
    Raises UsageError before the long work starts, Diverged where a loss is not finite.
    """
    cfg, pool = cfg.but(**own_names(None, pool)), pool or named(cfg, "pool")
    task, about = scratch(cfg, pool)
    steps = about["steps"]
    with Run(out, "pretrain", cfg, force, **about, pool_sha256=pool.fingerprint()) as run:
        if run.result:
            return typed(PretrainResult, run.result)
        psi = dict(task.backbone.vit.named_parameters())
        del psi["pos_embed"]  # MAE and I-JEPA keep the position table fixed
        opt = optimiser(cfg, psi | task.phi, steps)
        run.keep([*psi.values(), *task.phi.values(), *task.state.values()], [opt])
        piece = min(steps // cfg.epochs, 500)
        left, size = range(opt.step, steps), sizes(cfg).image_size
        batches = pretext_batches(cfg, pool, task, size, cfg.batch, left)
        loss, rest = partial(task.loss, None, task.phi), (cfg.micro_batch, cfg.amp)
        records = trained(loss, opt, batches, piece, *rest, "pretrain", task.after_step)
        for record in track(records, -(-steps // piece), "pretrain", opt.step // piece):
            run.log(record)
            run.checkpoint(f"step {opt.step} of {steps}")
        run.write("backbone.pth", checkpoint(cfg, task))
        loss_P, file = run.records[-1]["loss"], out / "backbone.pth"
        found = run.finish({"out": str(out), "weights": str(file), "loss": loss_P})
        return typed(PretrainResult, found)


def plan(cfg: PretrainConfig) -> dict[str, int]:
    """What a run would take, for --dry-run (UsageError)."""
    return scratch(cfg, named(cfg, "pool"))[1]


def sizes(cfg: PretrainConfig) -> Arch:
    """Sizes of the networks (UsageError for those that are not made here)."""
    if cfg.backbone not in BACKBONES or cfg.pretext not in ("mae", "ijepa"):
        known = f"pretrain makes {', '.join(BACKBONES)} with mae or ijepa"
        raise UsageError(f"{cfg.backbone} with {cfg.pretext}: {known}")
    arch = BACKBONES[cfg.backbone]._replace(class_token=cfg.pretext == "mae")
    image, patch = cfg.image_size or arch.image_size, cfg.patch_size or arch.patch_size
    return arch._replace(image_size=image, patch_size=patch)


def scratch(cfg: PretrainConfig, pool: Pool) -> tuple[Any, dict[str, int]]:
    """`mae.MAE` or `ijepa.IJEPA` around networks that are drawn as its authors do (UsageError).

    Also the number of images, and of steps in all: an epoch has full batches only.
    """
    images, arch, jepa = len(pool.images), sizes(cfg), cfg.pretext == "ijepa"
    steps = cfg.epochs * max(1, images // cfg.batch)
    device = device_of(cfg)
    with checking(f"--pretext {cfg.pretext}"):
        vit, head = build_vit(arch), build_head(arch, cfg.pretext)
        widths = arch.dim, arch.predictor_dim if jepa else arch.decoder_dim
        # I-JEPA's networks have no class token
        tables = [sincos(width, side(arch))[:, int(jepa) :] for width in widths]
        init = ijepa.init if jepa else mae.init
        init([*zip((vit, head), tables, strict=True)], rng(cfg.seed, "init"))
        backbone, h_P = Backbone(vit, recompute=cfg.recompute).to(device), head.to(device)
        teacher = copy.deepcopy(backbone) if jepa else None
        task = pretext_task(cfg, backbone, h_P, steps, None, teacher)
        return task, {"images": images, "steps": steps}


def optimiser(cfg: PretrainConfig, psi_and_phi: Phi, steps: int) -> Optimiser:
    """AdamW for ψ and φ_P together, scheduled as by the authors of the task."""
    per_epoch, warmup = steps // cfg.epochs, cfg.warmup_epochs
    rate = mae.schedule(cfg.epochs, warmup, per_epoch, cfg.min_lr, cfg.warmup_from)
    if cfg.pretext == "ijepa":
        rate = ijepa.schedule(steps, warmup * per_epoch, cfg.warmup_from, cfg.min_lr)
    first, last = cfg.weight_decay, cfg.final_weight_decay
    decay = ijepa.decay_schedule(steps, first, first if last is None else last)
    groups = decay_groups(psi_and_phi, cfg.base_lr * cfg.batch / 256, first)
    return Optimiser(groups, rate, (0.9, cfg.beta2), decay=decay)


def checkpoint(cfg: PretrainConfig, task: Any) -> bytes:
    """backbone.pth: the official layout, and as JSON the sizes that it leaves out."""
    vit, file = task.backbone.vit, io.BytesIO()
    about = {"backbone": cfg.backbone, "arch": sizes(cfg)._asdict()}
    if cfg.pretext == "ijepa":
        teacher = task.teacher.vit
        networks = {"encoder": vit, "target_encoder": teacher, "predictor": task.predictor}
        saved = {name: official(network, "module.") for name, network in networks.items()}
    else:
        saved = {"model": official(vit) | official(task.decoder)}
    torch.save(saved | {"bisslight": json.dumps(about)}, file)
    return file.getvalue()


def official(network: Any, prefix: str = "") -> dict[str, Any]:
    """A state dict to be saved; names of the official I-JEPA begin with `module.`."""
    return {prefix + name: tensor for name, tensor in network.cpu().state_dict().items()}
