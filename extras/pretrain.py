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
from run import Run, check_directory, checking
from training import Optimiser, Track, decay_groups, pick_device, put_back, snapshot, untracked
from weights import build_head, build_vit, side, sincos

MOST = 500  # steps between two places where a run can stop


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
        track: shows progress, an item an epoch or 500 steps.
    Raises UsageError before the long work starts, Diverged where a loss is not finite.
    """
    cfg = cfg.but(**own_names(None, pool))
    check_directory(out, "pretrain", cfg, force)
    pool = pool or open_pool(cfg)
    s = Scratch(cfg, len(pool.images))
    run = Run(out, "pretrain", cfg, force, **s.about, pool_sha256=pool.fingerprint())
    if run.result:
        return PretrainResult(**run.result)
    losses: list[float] = []  # of the steps of an epoch that has begun
    tensors = {"psi": s.psi, "phi": s.task.phi, "pretext": s.task.state}
    if saved := run.restore():
        put_back(saved, tensors, {"all": s.opt})
        losses = saved["losses"]
    left, size = range(s.opt.step, s.total), s.arch.image_size
    batches = pretext_batches(cfg, pool, s.task, size, cfg.batch, left)
    pieces = -(-s.per_epoch // MOST)
    done = s.opt.step // s.per_epoch * pieces + s.opt.step % s.per_epoch // MOST
    for _ in track(s.train(batches, losses), cfg.epochs * pieces, "pretrain", done):
        if s.opt.step % s.per_epoch == 0:
            run.log({"step": s.opt.step // s.per_epoch, "loss": fmean(losses)})
            losses.clear()
        state = snapshot(tensors, {"all": s.opt}) | {"losses": losses}
        run.checkpoint(state, f"step {s.opt.step} of {s.total}")
    run.write("backbone.pth", s.checkpoint())
    files = {"out": str(out), "weights": str(out / "backbone.pth")}
    return PretrainResult(**run.finish(files | {"loss": run.records[-1]["loss"]}))


def plan(cfg: PretrainConfig) -> dict[str, int]:
    """What a run would take, for --dry-run."""
    return Scratch(cfg, len(open_pool(cfg).images)).about


class Scratch:
    """Fresh networks, their pretext task and the optimiser that its authors give it (UsageError).

    Args:
        images: how many there are in the pool.
    """

    def __init__(self, cfg: PretrainConfig, images: int) -> None:
        if cfg.backbone not in BACKBONES or cfg.pretext not in ("mae", "ijepa"):
            known = f"{', '.join(BACKBONES)} with mae or ijepa"
            raise UsageError(f"{cfg.backbone} with {cfg.pretext}: pretrain makes {known}")
        self.cfg, self.jepa = cfg, cfg.pretext == "ijepa"
        self.per_epoch = max(1, images // cfg.batch)  # steps, full batches only
        self.total = self.per_epoch * cfg.epochs
        arch = BACKBONES[cfg.backbone].arch
        self.arch = arch._replace(
            image_size=cfg.image_size or arch.image_size,
            patch_size=cfg.patch_size or arch.patch_size,
            class_token=not self.jepa,
        )
        if cfg.pool == "quilts" and self.arch.image_size != 16:
            raise UsageError(f"--pool quilts: has 16 px, --image-size says {cfg.image_size}")
        with checking(f"--pretext {cfg.pretext}"):
            self.task = self.pretext_task()
        # MAE and I-JEPA keep the position table fixed
        named = self.task.backbone.vit.named_parameters()
        self.psi = {name: tensor for name, tensor in named if name != "pos_embed"}
        self.opt = self.optimiser()
        count = sum(tensor.numel() for tensor in (self.psi | self.task.phi).values())
        self.about = {"images": images, "steps": self.total, "parameters": count}

    def pretext_task(self) -> Any:
        """`mae.MAE` or `ijepa.IJEPA` around networks that are drawn as its authors do."""
        cfg, arch, jepa = self.cfg, self.arch, self.jepa
        vit: Any = build_vit(arch)
        head: Any = build_head(arch, cfg.pretext)
        widths = arch.dim, (arch.predictor if jepa else arch.decoder)[0]
        tables = [sincos(width, side(arch)) for width in widths]
        tables = [table[:, 1:] for table in tables] if jepa else tables  # no class token's row
        init = ijepa.init if jepa else mae.init
        init([(vit, tables[0]), (head, tables[1])], rng(cfg.seed, "init"))
        with checking(f"--device {cfg.device}"):
            device = pick_device(cfg.device)
        backbone, head = Backbone(vit, recompute=cfg.recompute).to(device), head.to(device)
        if not jepa:
            return mae.MAE(backbone, head, cfg.mask_ratio)
        teacher = copy.deepcopy(backbone)
        return ijepa.IJEPA(backbone, head, cfg, (cfg.ema, self.total), None, teacher)

    def optimiser(self) -> Optimiser:
        """AdamW for ψ and φ_P together."""
        cfg = self.cfg
        begin, end, warmup = cfg.warmup_from, cfg.min_lr, cfg.warmup_epochs
        rate = mae.schedule(cfg.epochs, warmup, self.per_epoch, end, begin)
        if self.jepa:
            rate = ijepa.schedule(self.total, warmup * self.per_epoch, begin, end)
        first, last = cfg.weight_decay, cfg.final_weight_decay
        decay = ijepa.decay_schedule(self.total, first, first if last is None else last)
        groups = decay_groups(self.psi | self.task.phi, cfg.base_lr * cfg.batch / 256, first)
        return Optimiser(groups, rate, (0.9, cfg.beta2), decay=decay)

    def train(self, batches: Iterator[Any], losses: list[float]) -> Iterator[dict[str, Any]]:
        """Eq. 1, all in place; adds each step's loss to `losses`, and yields now and then."""
        cfg, task, rows = self.cfg, self.task, []
        tensors, loss = [*self.psi.values(), *task.phi.values()], partial(task.loss, None, task.phi)
        amp = cfg.amp and tensors[0].is_cuda
        for batch in batches:
            value, *found = value_and_grad(loss, tensors, batch, cfg.micro_batch, amp)
            rows.append(row(value, self.opt.update(zip(tensors, found, strict=True))))
            task.after_step(None)
            if self.opt.step % self.per_epoch == 0 or len(rows) == MOST:
                where = f"pretrain, after step {self.opt.step - len(rows)}"
                losses += numbers(where, rows, 2)[0]
                rows = []
                yield {"loss_P": losses}

    def checkpoint(self) -> bytes:
        """backbone.pth: the official layout, and as JSON the sizes that it leaves out."""
        task, vit, file = self.task, self.task.backbone.vit, io.BytesIO()
        about = {"backbone": self.cfg.backbone, "arch": self.arch._asdict()}
        saved: dict[str, Any] = {"bisslight": json.dumps(about)}
        if self.jepa:
            networks = {"encoder": vit, "target_encoder": task.teacher.vit}
            for name, network in (networks | {"predictor": task.predictor}).items():
                state = network.cpu().state_dict()
                saved[name] = {f"module.{key}": tensor for key, tensor in state.items()}
        else:
            saved["model"] = {**vit.cpu().state_dict(), **task.decoder.cpu().state_dict()}
        torch.save(saved, file)
        return file.getvalue()
