"""`bisslight pretrain`: MAE or I-JEPA from scratch (Eq. 1), for those without a checkpoint.

It trains ψ itself and φ_P; there is no θ. backbone.pth has the layout of the official files, with
the sizes of the networks beside it, so that `--weights` takes it like a downloaded one.
"""

import copy
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

import ijepa
import mae
from bisslight import numbers, row, value_and_grad
from config import BACKBONES, UsageError
from data import Pool, rng
from extras.settings import PretrainConfig
from lora import Backbone
from model import open_pool, own_names, pretext_batches
from run import Run, checking
from training import Optimiser, Track, decay_groups, pick_device, put_back, snapshot, untracked
from weights import build_head, build_vit, side, sincos


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
        pool: unlabelled images of one's own, instead of a name in `cfg`.
        force: start the run in `out` over.
        track: shows progress, an item an epoch, or 500 steps of a longer one.
    Raises UsageError before the long work starts, Diverged where a loss is not finite.
    """
    cfg, pool = cfg.but(**own_names(None, pool)), pool or open_pool(cfg)
    s = Scratch(cfg, len(pool.images))
    run = Run(out, "pretrain", cfg, force, **s.about, pool_sha256=pool.fingerprint())
    if run.result is None:
        tensors = {"psi": s.psi, "phi": s.task.phi, "pretext": s.task.state}
        if saved := run.restore():
            put_back(saved, tensors, {"all": s.opt})
        left, size = range(s.opt.step, s.steps), s.arch.image_size
        losses = s.train(pretext_batches(cfg, pool, s.task, size, cfg.batch, left))
        items = -(-s.steps // s.piece)
        for record in track(losses, items, "pretrain", s.opt.step // s.piece):
            run.log(record)
            where = f"step {s.opt.step} of {s.steps}"
            run.checkpoint(snapshot(tensors, {"all": s.opt}), where)
        run.write("backbone.pth", s.checkpoint())
        found = {"out": str(out), "weights": str(out / "backbone.pth")}
        run.finish(found | {"loss": run.records[-1]["loss"]})
    return PretrainResult(**(run.result or {}))


def plan(cfg: PretrainConfig) -> dict[str, int]:
    """What a run would take, for --dry-run."""
    return Scratch(cfg, len(open_pool(cfg).images)).about


class Scratch:
    """Fresh networks, their pretext task and the optimiser that its authors give it (UsageError).

    Args:
        images: how many there are in the pool.
    """

    def __init__(self, cfg: PretrainConfig, images: int) -> None:
        self.cfg, self.jepa = cfg, cfg.pretext == "ijepa"
        if cfg.backbone not in BACKBONES or not (self.jepa or cfg.pretext == "mae"):
            known = f"{', '.join(BACKBONES)} with mae or ijepa"
            raise UsageError(f"{cfg.backbone} with {cfg.pretext}: pretrain makes {known}")
        self.per_epoch = max(1, images // cfg.batch)  # steps, full batches only
        self.steps, self.piece = cfg.epochs * self.per_epoch, min(self.per_epoch, 500)
        arch = BACKBONES[cfg.backbone].arch
        self.arch = arch._replace(
            image_size=cfg.image_size or arch.image_size,
            patch_size=cfg.patch_size or arch.patch_size,
            class_token=not self.jepa,
        )
        with checking(f"--device {cfg.device}"):
            self.device = pick_device(cfg.device)
        with checking(f"--pretext {cfg.pretext}"):
            self.task = self.pretext_task()
        # MAE and I-JEPA keep the position table fixed
        named = self.task.backbone.vit.named_parameters()
        self.psi = {name: tensor for name, tensor in named if name != "pos_embed"}
        self.opt = self.optimiser()
        count = sum(tensor.numel() for tensor in (self.psi | self.task.phi).values())
        self.about = {"images": images, "steps": self.steps, "parameters": count}

    def pretext_task(self) -> Any:
        """`mae.MAE` or `ijepa.IJEPA` around networks that are drawn as its authors do."""
        cfg, arch = self.cfg, self.arch
        vit, head = build_vit(arch), build_head(arch, cfg.pretext)
        widths = arch.dim, (arch.predictor if self.jepa else arch.decoder)[0]
        first = int(self.jepa)  # its networks have no class token
        tables = [sincos(width, side(arch))[:, first:] for width in widths]
        init = ijepa.init if self.jepa else mae.init
        init([(vit, tables[0]), (head, tables[1])], rng(cfg.seed, "init"))
        backbone = Backbone(vit, recompute=cfg.recompute).to(self.device)
        phi: Any = head.to(self.device)
        if not self.jepa:
            return mae.MAE(backbone, phi, cfg.mask_ratio)
        teacher = copy.deepcopy(backbone)
        return ijepa.IJEPA(backbone, phi, cfg, (cfg.ema, self.steps), None, teacher)

    def optimiser(self) -> Optimiser:
        """AdamW for ψ and φ_P together."""
        cfg, warmup = self.cfg, self.cfg.warmup_epochs
        rate = mae.schedule(cfg.epochs, warmup, self.per_epoch, cfg.min_lr, cfg.warmup_from)
        if self.jepa:
            warmup *= self.per_epoch
            rate = ijepa.schedule(self.steps, warmup, cfg.warmup_from, cfg.min_lr)
        first, last = cfg.weight_decay, cfg.final_weight_decay
        decay = ijepa.decay_schedule(self.steps, first, first if last is None else last)
        groups = decay_groups(self.psi | self.task.phi, cfg.base_lr * cfg.batch / 256, first)
        return Optimiser(groups, rate, (0.9, cfg.beta2), decay=decay)

    def train(self, batches: Iterator[Any]) -> Iterator[dict[str, float]]:
        """Eq. 1, all in place; yields the mean loss of an epoch, or 500 steps of a longer one."""
        loss, rows = partial(self.task.loss, None, self.task.phi), []
        tensors = [*self.psi.values(), *self.task.phi.values()]
        amp = self.cfg.amp and self.device.type == "cuda"
        for batch in batches:
            value, *found = value_and_grad(loss, tensors, batch, self.cfg.micro_batch, amp)
            rows.append(row(value, self.opt.update(zip(tensors, found, strict=True))))
            self.task.after_step(None)
            if len(rows) == self.piece or self.opt.step == self.steps:
                where = f"pretrain, after step {self.opt.step - len(rows)}"
                losses, _ = numbers(where, rows, 2)
                yield {"step": -(-self.opt.step // self.piece), "loss": fmean(losses)}
                rows = []

    def checkpoint(self) -> bytes:
        """backbone.pth: the official layout, and as JSON the sizes that it leaves out."""
        task, vit, file = self.task, self.task.backbone.vit, io.BytesIO()
        about = {"backbone": self.cfg.backbone, "arch": self.arch._asdict()}
        if self.jepa:
            networks = {"encoder": vit, "target_encoder": task.teacher.vit}
            networks |= {"predictor": task.predictor}
            saved = {name: official(network, "module.") for name, network in networks.items()}
        else:
            saved = {"model": official(vit) | official(task.decoder)}
        torch.save(saved | {"bisslight": json.dumps(about)}, file)
        return file.getvalue()


def official(network: Any, prefix: str = "") -> dict[str, Any]:
    """A state dict to be saved; names of the official I-JEPA begin with `module.`."""
    return {prefix + name: tensor for name, tensor in network.cpu().state_dict().items()}
