"""`bisslight pretrain`: MAE or I-JEPA from scratch, Eq. 1, for those without a checkpoint.

It trains ψ itself and φ_P; there is no θ. backbone.pth has the layout of the official files, and
the sizes of the networks beside it, so `--weights` takes it like a downloaded one.
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
from torch import Tensor

import ijepa
import mae
from bisslight import numbers, row, value_and_grad
from config import BACKBONES, Arch, UsageError
from data import Pool, rng
from extras.settings import PretrainConfig
from lora import Backbone
from model import Track, open_pool, own_names, pretext_batches, put_back, snapshot, untracked
from run import Run, check_directory, checking
from training import Optimiser, constant, decay_groups, pick_device
from weights import build_head, build_vit, side, sincos

MOST = 500  # steps between two places where a run can stop
Task = mae.MAE | ijepa.IJEPA


class PretrainResult(NamedTuple):
    """What a pretrain run ended with."""

    out: str
    weights: str  # its backbone.pth
    loss: float  # mean of the last epoch
    images: int  # in the pool
    steps: int
    parameters: int  # of backbone and pretext head
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
    arch, pool = sizes(cfg), pool or open_pool(cfg)
    per_epoch, total = steps(cfg, pool)
    task = scratch(cfg, arch, total)
    about = {"images": len(pool.images), "steps": total, "parameters": parameters(task)}
    run = Run(out, "pretrain", cfg, force, **about, pool_sha256=pool.fingerprint())
    if run.result:
        return PretrainResult(**run.result)
    opt = optimiser(cfg, task, per_epoch, total)
    trained = {"psi": psi(task), "phi": task.phi, "pretext": task.state}
    rows: list[Tensor] = []  # of the steps of an epoch that has begun
    if saved := run.restore():
        put_back(saved, trained, {"all": opt})
        rows += saved["rows"].to(pick_device(cfg.device))
    batches = pretext_batches(cfg, pool, task, arch.image_size, cfg.batch, range(opt.step, total))
    pieces = -(-per_epoch // MOST)  # of an epoch
    done = opt.step // per_epoch * pieces + opt.step % per_epoch // MOST
    trainer = train(cfg, task, opt, batches, rows, per_epoch)
    for record in track(trainer, cfg.epochs * pieces, "pretrain", done):
        if opt.step % per_epoch == 0:
            run.log({"step": opt.step // per_epoch, "loss": fmean(record["loss_P"])})
        state = snapshot(trained, {"all": opt}) | {
            "rows": torch.stack(rows) if rows else torch.empty(0, 2)
        }
        run.checkpoint(state, f"step {opt.step} of {total}")
    run.write("backbone.pth", checkpoint(cfg, arch, task))
    place = {"out": str(out), "weights": str(out / "backbone.pth")}
    return PretrainResult(**run.finish(place | about | {"loss": run.records[-1]["loss"]}))


def train(
    cfg: PretrainConfig,
    task: Task,
    opt: Optimiser,
    batches: Iterator[Any],
    rows: list[Tensor],
    per_epoch: int,
) -> Iterator[dict[str, list[float]]]:
    """Eq. 1, all in place; yields the epoch's losses so far, at its end and after 500 steps.

    Args:
        rows: numbers of the steps of an epoch that has begun, and of what follows until its end.
    """
    loss, amp = (
        partial(task.loss, None, task.phi),
        cfg.amp and pick_device(cfg.device).type == "cuda",
    )
    tensors = [*psi(task).values(), *task.phi.values()]
    for batch in batches:
        value, *found = value_and_grad(loss, tensors, batch, cfg.micro_batch, amp)
        rows.append(row(value, opt.update(zip(tensors, found, strict=True))))
        task.after_step(None)
        end = opt.step % per_epoch == 0
        if end or len(rows) % MOST == 0:
            remedy = "a lower --base-lr or a longer --warmup-epochs may help"
            where = f"pretrain, epoch {-(-opt.step // per_epoch)} ({remedy})"
            losses, _ = numbers(where, rows, 2)
            if end:
                rows.clear()
            yield {"loss_P": losses}


def plan(cfg: PretrainConfig) -> dict[str, int]:
    """What a run would take, for --dry-run."""
    pool, arch = open_pool(cfg), sizes(cfg)
    total = steps(cfg, pool)[1]
    task = scratch(cfg, arch, total)
    return {"images": len(pool.images), "steps": total, "parameters": parameters(task)}


def sizes(cfg: PretrainConfig) -> Arch:
    """Sizes of the networks to be trained (UsageError for those that cannot be)."""
    if cfg.backbone not in BACKBONES:
        known = ", ".join(BACKBONES)
        raise UsageError(f"--backbone {cfg.backbone}: pretrain makes {known}; timm has its own")
    if cfg.pretext not in ("mae", "ijepa"):
        raise UsageError(f"--pretext {cfg.pretext}: pretrain knows mae and ijepa")
    given = {name: getattr(cfg, name) for name in ("image_size", "patch_size")}
    arch = BACKBONES[cfg.backbone].arch._replace(
        class_token=cfg.pretext == "mae", **{k: v for k, v in given.items() if v is not None}
    )
    if cfg.pool == "quilts" and arch.image_size != 16:
        raise UsageError(f"--pool quilts: has 16 px, the backbone wants {arch.image_size}")
    with checking("--patch-size"):
        side(arch)
    return arch


def steps(cfg: PretrainConfig, pool: Pool) -> tuple[int, int]:
    """Steps of an epoch, which are full batches, and of the whole run."""
    per_epoch = max(1, len(pool.images) // cfg.batch)
    return per_epoch, per_epoch * cfg.epochs


def scratch(cfg: PretrainConfig, arch: Arch, total: int) -> Task:
    """The pretext task around freshly initialised networks."""
    jepa, device = cfg.pretext == "ijepa", pick_device(cfg.device)
    vit, head = build_vit(arch), build_head(arch, cfg.pretext)
    widths = arch.dim, (arch.predictor if jepa else arch.decoder)[0]
    tables = [sincos(width, side(arch))[:, int(jepa) :] for width in widths]  # I-JEPA: no class row
    (ijepa if jepa else mae).init([(vit, tables[0]), (head, tables[1])], rng(cfg.seed, "init"))
    backbone = Backbone(vit, recompute=cfg.recompute).to(device)
    pretext: Any = head.to(device)
    with checking(f"--pretext {cfg.pretext}"):
        if not jepa:
            return mae.MAE(backbone, pretext, cfg.mask_ratio)
        return ijepa.IJEPA(backbone, pretext, cfg, (cfg.ema, total), None, copy.deepcopy(backbone))


def psi(task: Task) -> dict[str, Tensor]:
    """ψ's trainable tensors: all but the position table, which MAE and I-JEPA keep fixed."""
    named = task.backbone.vit.named_parameters()
    return {name: tensor for name, tensor in named if name != "pos_embed"}


def parameters(task: Task) -> int:
    """How many numbers are trained."""
    return sum(tensor.numel() for part in (psi(task), task.phi) for tensor in part.values())


def optimiser(cfg: PretrainConfig, task: Task, per_epoch: int, total: int) -> Optimiser:
    """AdamW with the schedules that the authors of each task give it."""
    groups = decay_groups(psi(task) | task.phi, cfg.base_lr * cfg.batch / 256, cfg.weight_decay)
    warmup, ends = cfg.warmup_epochs, (cfg.warmup_from, cfg.min_lr)
    rate = mae.schedule(cfg.epochs, warmup, per_epoch, ends[1], ends[0])
    if cfg.pretext == "ijepa":
        rate = ijepa.schedule(total, warmup * per_epoch, *ends)
    last = cfg.final_weight_decay
    decay = constant if last is None else ijepa.decay_schedule(total, cfg.weight_decay, last)
    return Optimiser(groups, rate, (0.9, cfg.beta2), decay=decay)


def checkpoint(cfg: PretrainConfig, arch: Arch, task: Task) -> bytes:
    """The trained networks in the official layout, and as JSON the sizes that it leaves out."""
    about = {"backbone": cfg.backbone, "arch": arch._asdict()}
    vit, content = task.backbone.vit.state_dict(), io.BytesIO()
    saved: dict[str, Any]
    if isinstance(task, mae.MAE):
        saved = {"model": on_cpu(vit | task.decoder.state_dict())}
    else:
        networks = {"encoder": vit, "target_encoder": task.teacher.vit.state_dict()}
        networks |= {"predictor": task.predictor.state_dict()}
        saved = {name: on_cpu(state, "module.") for name, state in networks.items()}
    torch.save(saved | {"bisslight": json.dumps(about)}, content)
    return content.getvalue()


def on_cpu(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """A state dict to be saved; the official I-JEPA program's names begin with `module.`."""
    return {prefix + name: tensor.detach().cpu() for name, tensor in state.items()}
