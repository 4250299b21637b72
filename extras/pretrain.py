"""Program: `bisslight pretrain`: MAE or I-JEPA from scratch (Eq. 1).

It trains the backbone's weights ψ and those of the pretext head φ_P; there is no θ. The other
commands read its backbone.pth with `--weights`, like an official file.
"""

import copy
import io
import json
import math
from collections.abc import Iterator
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
from support.optim import Optimiser, Schedule, TrainRecord, decay_groups, train_epochs
from support.runs import Identity, Run, RunResult, Track, untracked
from support.screen import Answer


class PretrainResult(RunResult, frozen=True):
    """What a pretrain run ended with."""

    weights: str  # the path of its backbone.pth
    loss: float  # the mean loss of the last record, see `train`

    def in_words(self) -> Answer:
        """The mean loss of the first record and of the last, and where the weights are."""
        lines = Path(self.out, "metrics.jsonl").read_text().splitlines()
        first = json.loads(lines[0])["loss"]
        return Answer(
            headline=f"pretrained: mean loss {first:.4g} at the start, {self.loss:.4g} at the end",
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
    """Train a backbone and its pretext head into the run directory `out`.

    1. Make the networks and the pretext task. Raises UsageError before the long work starts.
    2. Open the run. The same call with the same directory goes on from the last checkpoint.
    3. Train. Raises Diverged if a loss is not finite.
    4. Write backbone.pth and the result.

    Args:
        cfg: the settings.
        out: the run directory.
        pool: the images; None: those that --pool names.
        force: start the run over.
        track: shows the progress.
    """
    if pool is None:
        pool = open_pool(cfg.pool, cfg.data_root, cfg.data_seed)
    else:
        cfg = cfg.replace(pool=data.name_own_data(pool))
    steps = count_work(cfg, pool).steps  # of all epochs
    networks = build_networks(cfg)
    pretext = build_pretext(cfg, networks, steps)

    identity = Identity(pool_sha256=data.fingerprint(pool))
    with Run(out, "pretrain", cfg, force, identity) as run:
        if run.result:  # the run was finished before
            return PretrainResult(**run.result)
        psi = dict(networks.backbone.vit.named_parameters())  # tensors by name
        psi.pop("pos_embed")  # the table of positions is fixed
        trained = psi | pretext.phi  # the tensors of `networks`: φ_P are those of its head
        opt = make_optimiser(cfg, trained, steps)
        # The state of I-JEPA's task is its teacher and the step. MAE's task has no state.
        state = {f"pretext.{name}": tensor for name, tensor in pretext.state.items()}
        # From here on, checkpoints hold these; if there is one already, it is read back.
        run.restore(trained | state, {"opt": opt})

        for record in train(cfg, pool, pretext, opt, steps, track):
            run.log({"step": record.number, "loss": record.loss})
            run.save_if_due(f"step {opt.step} of {steps}")

        run.write("backbone.pth", save_networks(cfg, networks))
        # `finish` adds the seconds, and the paths of the run and of backbone.pth.
        result = run.finish({"loss": run.records[-1]["loss"]})
        return PretrainResult(**result)


def train(
    cfg: PretrainConfig,
    pool: data.Pool,
    pretext: mae.MAE | ijepa.IJEPA,
    opt: Optimiser,
    steps: int,
    track: Track,
) -> Iterator[TrainRecord]:
    """Train from step `opt.step` on, and yield a record after each epoch.

    Where an epoch is longer than 500 steps, there is a record after every 500 instead, since a run
    which is asked to stop does so after a record. `steps` is the number of steps of the whole run;
    `track` shows the progress.
    """
    steps_per_epoch = steps // cfg.epochs
    steps_per_record = min(500, steps_per_epoch)
    bar_label = "pretrain" if steps_per_epoch <= 500 else "pretrain by 500 steps"

    device = opt.tensors[0].device  # where the network is
    images = pool_images(pool, cfg.arch().image_size, cfg)
    steps_left = range(opt.step, steps)
    records = train_epochs(
        loss=partial(pretext.loss, None, pretext.phi),  # None: there is no θ, since ψ is trained
        opt=opt,
        batches=pretext_batches(pretext, images, cfg.batch, steps_left, cfg, device),
        steps_per_record=steps_per_record,
        label="pretrain",  # in the error where the loss is not finite
        passes=Passes(cfg.micro_batch, uses_autocast(cfg, device)),
        after_step=partial(pretext.after_step, None),  # I-JEPA's teacher follows ψ
    )
    all_records = math.ceil(steps / steps_per_record)
    records_before = opt.step // steps_per_record  # of a run that goes on
    return track(records, total=all_records, label=bar_label, done=records_before)


class Work(NamedTuple):
    """How much there is to do."""

    images: int  # of the pool
    steps: int  # of all epochs


def count_work(cfg: PretrainConfig, pool: data.Pool) -> Work:
    """Count the images of the pool and the training steps of all epochs."""
    images = len(pool.images)
    # An epoch has whole batches only. With a pool smaller than a batch it has one step, in which
    # images repeat.
    steps_per_epoch = max(1, images // cfg.batch)
    return Work(images, cfg.epochs * steps_per_epoch)


def plan(cfg: PretrainConfig) -> dict[str, int]:
    """For --dry-run: how many images and steps a run has, after its networks have been built.

    Raises UsageError if something is missing or does not fit.
    """
    work = count_work(cfg, open_pool(cfg.pool, cfg.data_root, cfg.data_seed))
    build_pretext(cfg, build_networks(cfg), work.steps)
    return work._asdict()


class Networks(NamedTuple):
    """New networks, on the device of the run."""

    backbone: Backbone  # f_ψ
    head: PretextHead  # h^P
    teacher: Backbone | None  # I-JEPA's: it starts as a copy of the backbone and follows it slowly


def build_networks(cfg: PretrainConfig) -> Networks:
    """Build networks with random weights, as the authors of the pretext task start them.

    Raises UsageError if --backbone is none of ours, or the patches do not fill the image.
    """
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


def build_pretext(cfg: PretrainConfig, networks: Networks, steps: int) -> mae.MAE | ijepa.IJEPA:
    """Make the pretext task that trains ψ, without θ. Raises UsageError.

    `steps` are all steps of the run, over which the momentum of I-JEPA's teacher rises.
    """
    return build_pretext_task(
        cfg, networks.backbone, networks.head, steps, theta=None, teacher=networks.teacher
    )


def make_optimiser(cfg: PretrainConfig, psi_and_phi: dict[str, Tensor], steps: int) -> Optimiser:
    """Make AdamW for ψ and φ_P together, with rates and weight decay by step as the authors have.

    1. The learning rate rises in the warm-up to its peak, then falls to `cfg.min_lr`.
    2. The weight decay goes from `cfg.weight_decay` to `cfg.final_weight_decay`; where that is
       None, it is the same at all steps. Vectors and biases are not decayed.

    `psi_and_phi` has the tensors by name, `steps` is the number of steps of the whole run.
    """
    warmup_steps = cfg.warmup_epochs * (steps // cfg.epochs)
    schedule = Schedule(steps, warmup=warmup_steps, end=cfg.min_lr, start=cfg.warmup_from)
    # `Optimiser` counts steps from 1, as I-JEPA's schedule does. MAE's counts them from 0.
    shift = 0 if cfg.pretext == "ijepa" else 1

    def rate(step: int, base: float) -> float:
        """The rate of a step, counted from 1."""
        return schedule(step - shift, base)

    decay = None
    if cfg.final_weight_decay is not None:  # I-JEPA's recipe has one
        decay = Schedule(steps, warmup=0, end=cfg.final_weight_decay)

    peak = cfg.base_lr * cfg.batch / 256  # the rate after the warm-up
    groups = decay_groups(psi_and_phi.values(), lr=peak, weight_decay=cfg.weight_decay)
    return Optimiser(groups, rate, betas=(0.9, cfg.beta2), decay=decay)


def save_networks(cfg: PretrainConfig, networks: Networks) -> bytes:
    """The bytes of backbone.pth: the layout of the authors' file, and the networks' sizes as JSON.

    It moves the networks to the CPU. The file holds a dict:

        MAE       {"model": tensors of encoder and decoder, "bisslight": JSON}
        I-JEPA    {"encoder": tensors, "target_encoder": ..., "predictor": ..., "bisslight": JSON}
    """
    backbone, head, teacher = networks
    vit = backbone.cpu().vit
    head.cpu()

    content: Record = {}
    if teacher is None:
        content["model"] = {**vit.state_dict(), **head.state_dict()}
    else:
        parts = {"encoder": vit, "target_encoder": teacher.cpu().vit, "predictor": head}
        for part, network in parts.items():
            # "module.": the official file was saved from a network inside DistributedDataParallel.
            content[part] = dict(network.state_dict(prefix="module."))
    # such as {"backbone": "vit_mini", "arch": {"dim": 64, ...}}
    content["bisslight"] = json.dumps({"backbone": cfg.backbone, "arch": cfg.arch()._asdict()})

    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
