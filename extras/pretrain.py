"""`bisslight pretrain`: MAE or I-JEPA from scratch (Eq. 1), for those without a checkpoint.

It trains ψ itself and φ_P; there is no θ. `--weights` reads its backbone.pth like an official file.
"""

import copy
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

import data
from bisslight import Passes
from config import (
    BACKBONES,
    Arch,
    Command,
    Crops,
    NonNegativeFloat,
    NonNegativeInt,
    PoolName,
    PositiveFloat,
    PositiveInt,
    Pretext,
    Record,
    Shape,
    Share,
    UnitInterval,
)
from lora import Backbone
from support.checkpoints import build_head, build_vit, initialise, pretext_task
from support.errors import UsageError, checking
from support.experiment import (
    device_of,
    names_of_own_data,
    open_pool,
    pool_images,
    pretext_batches,
    use_one_thread_for_small_networks,
)
from support.optim import Optimiser, Schedule, decay_groups, train_epochs
from support.runs import Run, RunResult, Track, untracked


class PretrainConfig(Pretext, Crops, Shape, Command):
    """Pretraining: MAE or I-JEPA from scratch, for those without a checkpoint. Trains ψ itself."""

    @classmethod
    def paper_defaults(cls, given: Record) -> Record:
        """I-JEPA's recipe, where it is not MAE's (Assran et al. 2023)."""
        if given.get("pretext") != "ijepa":
            return {}
        return {
            "epochs": 300,
            "min_crop": 0.3,
            "base_lr": 1.25e-4,
            "warmup_from": 0.2,
            "min_lr": 1e-6,
            "beta2": 0.999,
            "weight_decay": 0.04,
            "final_weight_decay": 0.4,
        }

    @classmethod
    def our_defaults(cls, given: Record) -> dict[str, Record]:
        """Lengths for vit_mini, patches for its I-JEPA targets; drawn images stay as they are."""
        defaults: dict[str, Record] = {}
        if given.get("backbone") == "vit_mini":
            defaults["vit_mini"] = {"epochs": 30, "warmup_epochs": 4, "batch": 64}
            if given.get("pretext") == "ijepa":
                defaults["vit_mini"] |= {"min_keep": 4, "patch_size": 2}
        if given.get("pool") == "quilts":
            defaults["quilts"] = {"augment": "none"}
        return defaults

    pool: PoolName
    """Unlabelled images: quilts, or any folder of images, nested or not."""
    epochs: PositiveInt = 400
    """Passes over the pool. [MAE's code; I-JEPA: 300]"""
    warmup_epochs: NonNegativeInt = 40
    """Epochs of linear warm-up. [MAE; I-JEPA]"""
    warmup_from: UnitInterval = 0.0
    """Where the warm-up starts, as a share of the base rate. [MAE; I-JEPA: 0.2]"""
    batch: PositiveInt = 256
    """Images per step. [here; MAE uses 4096]"""
    base_lr: PositiveFloat = 1.5e-4
    """Rate per 256 images: the rate of a step is base_lr * batch / 256. [MAE; I-JEPA: 1.25e-4]"""
    min_lr: NonNegativeFloat = 0.0
    """Where the cosine ends. [MAE; I-JEPA: 1e-6]"""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of tensors with two or more axes. [MAE; I-JEPA: 0.04]"""
    final_weight_decay: NonNegativeFloat | None = None
    """Decay at the end of half a cosine. None: it stays as it is. [MAE; I-JEPA: 0.4]"""
    beta2: UnitInterval = 0.95
    """AdamW's second beta; the first is 0.9. [MAE; I-JEPA: 0.999]"""
    ema: Share = 0.996
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [I-JEPA]"""

    def arch(self) -> Arch:
        """Sizes of the network, image and patch as they are set."""
        given = self.model_dump(include={"image_size", "patch_size"}, exclude_none=True)
        return BACKBONES[self.backbone]._replace(**given, class_token=self.pretext != "ijepa")


class PretrainResult(RunResult, frozen=True):
    """What a pretrain run ended with."""

    weights: str  # its backbone.pth
    loss: float  # mean of the last epoch


def pretrain(
    cfg: PretrainConfig,
    out: Path,
    *,
    pool: data.Pool | None = None,
    force: bool = False,
    track: Track = untracked,
) -> PretrainResult:
    """Train a backbone and its pretext head into the run directory `out`; the same call goes on.

    `pool` has images of your own; `force`, `track` as in `align`. Raises UsageError before the long
    work starts, Diverged where a loss is not finite.
    """
    cfg, pool = cfg.replace(**names_of_own_data(None, pool)), pool or open_pool(cfg)
    task, arch, about = scratch(cfg, pool)
    steps = about["steps"]
    digest = {"pool_sha256": data.fingerprint(pool)}
    with Run(out, "pretrain", cfg, force, about | digest) as run:
        if run.result:
            return PretrainResult(**run.result)
        # the positions are fixed
        psi = {name: x for name, x in task.backbone.vit.named_parameters() if name != "pos_embed"}
        opt = optimiser(cfg, psi | task.phi, steps)
        state = {f"pretext.{name}": tensor for name, tensor in task.state.items()}
        run.restore(psi | task.phi | state, {"opt": opt})
        piece = min(steps // cfg.epochs, 500)
        left, loss = range(opt.step, steps), partial(task.loss, None, task.phi)
        device = device_of(cfg)
        images = pool_images(pool, arch.image_size, cfg.pretext, cfg, cfg.seed)
        batches = pretext_batches(task, images, cfg.batch, left, cfg, device)
        records = train_epochs(
            loss,
            opt,
            batches,
            piece,
            "pretrain",
            Passes(cfg.micro_batch, cfg.amp and device.type == "cuda"),
            after_step=partial(task.after_step, None),  # I-JEPA's teacher follows ψ
        )
        for record in track(records, -(-steps // piece), "pretrain", opt.step // piece):
            run.log(record._asdict())
            run.checkpoint(f"step {opt.step} of {steps}")
        run.write("backbone.pth", checkpoint(cfg, arch, task))
        return PretrainResult(**run.finish({"loss": run.records[-1]["loss"]}))


def plan(cfg: PretrainConfig) -> dict[str, int]:
    """What a run would take, for --dry-run (UsageError)."""
    return scratch(cfg, open_pool(cfg))[2]


def scratch(cfg: PretrainConfig, pool: data.Pool) -> tuple[Any, Any, dict[str, int]]:
    """The task around new networks, their sizes, numbers of images and of steps (UsageError)."""
    jepa, images, device = cfg.pretext == "ijepa", len(pool.images), device_of(cfg)
    use_one_thread_for_small_networks(cfg.backbone, device)
    if not jepa and cfg.pretext != "mae":
        raise UsageError(f"{cfg.backbone} with {cfg.pretext}: pretrain takes mae or ijepa")
    arch = cfg.arch()
    steps = cfg.epochs * max(1, images // cfg.batch)  # full batches only
    with checking(f"--pretext {cfg.pretext}"):
        backbone = Backbone(build_vit(arch), recompute=cfg.recompute)
        head = build_head(arch, cfg.pretext)
        initialise([backbone.vit, head], cfg.pretext, data.rng(cfg.seed, "init"))
        backbone.to(device)
        teacher = copy.deepcopy(backbone) if jepa else None
        task = pretext_task(cfg, backbone, head.to(device), steps, None, teacher)
        return task, arch, {"images": images, "steps": steps}


def optimiser(cfg: PretrainConfig, psi_and_phi: dict[str, torch.Tensor], steps: int) -> Optimiser:
    """AdamW for ψ and φ_P together, scheduled as by the authors of the task."""
    warmup = cfg.warmup_epochs * (steps // cfg.epochs)
    rate = Schedule(steps, warmup, cfg.min_lr, cfg.warmup_from)
    first, last = int(cfg.pretext == "mae"), cfg.final_weight_decay  # MAE's first step is number 0
    decay = None if last is None else Schedule(steps, 0, last)
    groups = decay_groups(psi_and_phi, cfg.base_lr * cfg.batch / 256, cfg.weight_decay)
    return Optimiser(groups, lambda k, b: rate(k - first, b), (0.9, cfg.beta2), decay=decay)


def checkpoint(cfg: PretrainConfig, arch: Any, task: Any) -> bytes:
    """backbone.pth: the official layout, and as JSON the sizes that it leaves out."""
    about = {"bisslight": json.dumps({"backbone": cfg.backbone, "arch": arch._asdict()})}
    vit, file = task.backbone.vit.cpu(), io.BytesIO()
    if cfg.pretext == "ijepa":
        networks = {"encoder": vit, "target_encoder": task.teacher.vit, "predictor": task.predictor}
        saved = {
            part: {f"module.{name}": x.cpu() for name, x in network.state_dict().items()}
            for part, network in networks.items()
        }
    else:
        saved = {"model": {**vit.state_dict(), **task.decoder.cpu().state_dict()}}
    torch.save(saved | about, file)
    return file.getvalue()
