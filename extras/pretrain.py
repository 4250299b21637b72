"""Program: `bisslight pretrain`, MAE or I-JEPA from scratch (Eq. 1).

It trains ψ itself and φ_P; there is no θ. `--weights` reads its backbone.pth like an official file.
"""

import copy
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import data
import ijepa
import mae
from bisslight import Passes
from config import BACKBONES, PretrainConfig, Record
from lora import Backbone
from support.checkpoints import PretextHead, build_head, build_pretext_task, build_vit, initialise
from support.errors import UsageError
from support.experiment import (
    open_pool,
    pool_images,
    pretext_batches,
    set_up_device,
    uses_autocast,
)
from support.optim import Optimiser, Schedule, decay_groups, train_epochs
from support.runs import Identity, Run, RunResult, Track, untracked
from support.screen import Answer


class PretrainResult(RunResult, frozen=True):
    """What a pretrain run ended with."""

    weights: str  # its backbone.pth
    loss: float  # mean of the last record: of an epoch, or of 500 steps of a long one

    def in_words(self) -> Answer:
        """The mean loss of the first record and of the last."""
        lines = Path(self.out, "metrics.jsonl").read_text().splitlines()
        first = json.loads(lines[0])["loss"]
        return Answer(
            f"pretrained: mean loss {first:.4g} at the start, {self.loss:.4g} at the end",
            lines=[f"in {Path(self.weights).resolve()}"],
        )


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
    if pool is None:
        pool = open_pool(cfg.pool, cfg.data_root, cfg.data_seed)
    else:
        cfg = cfg.replace(pool=data.name_own_data(pool))
    work = count_work(cfg, pool)
    networks = build_networks(cfg)
    task = build_task(cfg, networks, work.steps)
    identity = Identity(pool_sha256=data.fingerprint(pool))
    with Run(out, "pretrain", cfg, force, identity) as run:
        if run.result:
            return PretrainResult(**run.result)
        psi = dict(networks.backbone.vit.named_parameters())
        psi.pop("pos_embed")  # positions are a fixed table
        opt = optimiser(cfg, psi | task.phi, work.steps)
        state = {f"pretext.{name}": tensor for name, tensor in task.state.items()}
        run.restore(psi | task.phi | state, {"opt": opt})

        # a record an epoch, but every 500 steps where epochs are longer, so that a stop is soon
        label = "pretrain"
        piece = work.steps // cfg.epochs
        if piece > 500:
            piece = 500
            label = "pretrain by 500 steps"
        left = range(opt.step, work.steps)
        device = next(networks.head.parameters()).device
        images = pool_images(pool, cfg.arch().image_size, cfg)
        records = train_epochs(
            loss=partial(task.loss, None, task.phi),  # no θ: ψ is trained
            opt=opt,
            batches=pretext_batches(task, images, cfg.batch, left, cfg, device),
            steps_per_epoch=piece,
            label="pretrain",
            passes=Passes(cfg.micro_batch, uses_autocast(cfg, device)),
            after_step=partial(task.after_step, None),  # I-JEPA's teacher follows ψ
        )
        pieces = math.ceil(work.steps / piece)
        for record in track(records, pieces, label, opt.step // piece):
            run.log(record._asdict())
            run.checkpoint(f"step {opt.step} of {work.steps}")
        run.write("backbone.pth", save_networks(cfg, networks))
        return PretrainResult(**run.finish({"loss": run.records[-1]["loss"]}))


class Work(NamedTuple):
    """How much there is to do."""

    images: int
    steps: int


def count_work(cfg: PretrainConfig, pool: data.Pool) -> Work:
    """Images of the pool, and steps of all epochs."""
    images = len(pool.images)
    # Whole batches only; a pool smaller than one makes a step, in which images repeat.
    steps_per_epoch = max(1, images // cfg.batch)
    return Work(images, cfg.epochs * steps_per_epoch)


def plan(cfg: PretrainConfig) -> dict[str, int]:
    """What a run would take, for --dry-run. Raises UsageError."""
    work = count_work(cfg, open_pool(cfg.pool, cfg.data_root, cfg.data_seed))
    build_task(cfg, build_networks(cfg), work.steps)
    return work._asdict()


class Networks(NamedTuple):
    """New networks, on their device."""

    backbone: Backbone  # ψ
    head: PretextHead
    teacher: Backbone | None  # I-JEPA's: it starts as a copy of ψ and follows slowly


def build_networks(cfg: PretrainConfig) -> Networks:
    """Networks with random weights, as the authors of the task start them. Raises UsageError."""
    if cfg.backbone not in BACKBONES:
        raise UsageError(f"--backbone {cfg.backbone}: pretrain takes {', '.join(BACKBONES)}")
    device = set_up_device(cfg)
    arch = cfg.arch()
    head = build_head(arch, cfg.pretext)
    backbone = Backbone(build_vit(arch), recompute=cfg.recompute)
    initialise([backbone.vit, head], cfg.pretext, data.rng(cfg.seed, "init"))
    backbone.to(device)
    teacher = copy.deepcopy(backbone) if cfg.pretext == "ijepa" else None
    return Networks(backbone, head.to(device), teacher)


def build_task(cfg: PretrainConfig, networks: Networks, steps: int) -> mae.MAE | ijepa.IJEPA:
    """The pretext task without θ: it trains ψ. Raises UsageError."""
    return build_pretext_task(cfg, networks.backbone, networks.head, steps, None, networks.teacher)


def optimiser(cfg: PretrainConfig, psi_and_phi: dict[str, Tensor], steps: int) -> Optimiser:
    """AdamW for ψ and φ_P together, scheduled as by the authors of the task."""
    warmup = cfg.warmup_epochs * (steps // cfg.epochs)
    schedule = Schedule(steps, warmup, cfg.min_lr, cfg.warmup_from)

    def rate(step: float, base: float) -> float:
        """The rate of a step; ours are counted from 1, as I-JEPA's are, and MAE's from 0."""
        return schedule(step if cfg.pretext == "ijepa" else step - 1, base)

    decay = None
    if cfg.final_weight_decay is not None:
        decay = Schedule(steps, 0, cfg.final_weight_decay)  # it has no warm-up
    peak = cfg.base_lr * cfg.batch / 256
    groups = decay_groups(psi_and_phi, peak, cfg.weight_decay)
    return Optimiser(groups, rate, (0.9, cfg.beta2), decay=decay)


def save_networks(cfg: PretrainConfig, networks: Networks) -> bytes:
    """backbone.pth: the official layout, and as JSON the sizes that it leaves out."""
    backbone, head, teacher = networks
    vit = backbone.cpu().vit
    head.cpu()
    content: Record = {}
    if teacher is None:
        content["model"] = {**vit.state_dict(), **head.state_dict()}
    else:
        parts = {"encoder": vit, "target_encoder": teacher.cpu().vit, "predictor": head}
        for part, network in parts.items():
            # The official file was saved from a network inside DistributedDataParallel.
            content[part] = dict(network.state_dict(prefix="module."))
    content["bisslight"] = json.dumps({"backbone": cfg.backbone, "arch": cfg.arch()._asdict()})
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
