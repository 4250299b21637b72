"""From settings to things: what depends on backbone or dataset is filled in, weights and data are found and loaded.

Everything here ends in a UsageError before the long work starts, if it ends in one.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import finetune as ft
import ijepa
import mae
from bisslight import PretextTask
from config import (
    BACKBONES,
    AlignConfig,
    Arch,
    Data,
    FinetuneConfig,
    Machine,
    Model,
    PretrainConfig,
    RunError,
    Shape,
    UsageError,
    defaults_of,
)
from data import (
    SCORED,
    Augment,
    Channels,
    Draw,
    Images,
    Split,
    Task,
    View,
    batches,
    in_order,
    listed,
    load_pool,
    stream,
)
from evaluate import score
from fetch import fetch, mirrored, verify
from lora import Backbone, Here, Phi, drop_path, load_adapter, load_timm, logits
from parallel import Parts, Summed, World, micro, world
from runtime import Score, autocast, cores, default_workers, pick_device, read_json, rng, sha256
from tasks import faults, load_task, pool_path

Report = Callable[[str, int, int, str], None]  # (stage, done, total, live numbers)

MAE_FILES = "https://dl.fbaipublicfiles.com/mae/pretrain"
OFFICIAL = {  # files with the pretext head too, and the bytes they have; MAE's are those for normalised pixels
    ("vit_b16", "mae"): (f"{MAE_FILES}/mae_pretrain_vit_base_full.pth", 447_600_000),
    ("vit_l16", "mae"): (f"{MAE_FILES}/mae_pretrain_vit_large_full.pth", 1_318_200_000),
    ("vit_h14", "mae"): (f"{MAE_FILES}/mae_pretrain_vit_huge_full.pth", 2_628_300_000),
    ("vit_h14", "ijepa"): ("https://dl.fbaipublicfiles.com/ijepa/IN1K-vit.h.14-300e.pth.tar", 10_360_000_000),
}


# --- settings that depend on backbone and dataset --------------------------------------------------------------------


def resolved_model(model: Model) -> Model:
    """Fill in what is set by backbone, and where the weights are or will be (UsageError where there are none)."""
    default = defaults_of(model.backbone)
    rank = model.rank or default.rank
    if model.backbone in BACKBONES and rank > default.arch.dim:
        raise UsageError(f"--rank {rank}: is larger than the width {default.arch.dim} of {model.backbone}")
    weights = model.weights or cached(model)
    if weights is None:
        how = (
            "save its timm state dict to a file"
            if model.backbone.startswith("timm:")
            else "`bisslight pretrain` makes one"
        )
        raise UsageError(f"--weights FILE: {model.backbone} with {model.pretext} needs a checkpoint, {how}")
    if weights.is_dir():  # a pretrain run
        if not (weights / "result.json").exists():
            raise UsageError(f"--weights {weights}: is not a finished pretrain run")
        weights = weights / "backbone.pth"
    if not weights.is_file() and weights != cached(model):
        raise UsageError(f"--weights {weights}: there is no such file")
    drop = default.drop_path if model.drop_path is None else model.drop_path
    return model.model_copy(
        update={"rank": rank, "alpha": model.alpha or float(rank), "weights": weights.resolve(), "drop_path": drop}
    )


def cached(model: Shape) -> Path | None:
    """Where the official file of a backbone is kept: torch's cache, below $TORCH_HOME. None where there is no such."""
    if (model.backbone, model.pretext) not in OFFICIAL:
        return None
    name = OFFICIAL[model.backbone, model.pretext][0].rpartition("/")[2]
    return Path(torch.hub.get_dir()).resolve() / "checkpoints" / name


def absent(model: Model) -> tuple[str, int] | None:
    """(URL, bytes) of the official file, if it is what is wanted and not there yet (UsageError for any other file)."""
    assert model.weights is not None
    if model.weights.exists():
        return None
    if model.weights != cached(model):
        raise UsageError(
            f"--weights {model.weights}: there is no such file any more; put it back, or write its new place into the "
            "run's config.json (a digest tells whether it is the same)"
        )
    return OFFICIAL[model.backbone, model.pretext]


def fetch_weights(model: Model, report: Report) -> None:
    """Download the official file on first use (RunError naming URL and path where that fails)."""
    if wanted := absent(model):
        assert model.weights is not None
        fetch(wanted[0], model.weights, report, wanted[1])


def to_download(model: Model) -> dict[str, Any]:
    """What --dry-run says of weights that are not there yet; empty where they are."""
    wanted = absent(model)
    return {"to_download": f"{mirrored(wanted[0])} ({wanted[1] / 1e6:.0f} MB) to {model.weights}"} if wanted else {}


def resolved_data(data: Data, needs_pool: bool) -> Data:
    """Fill in the pool and the augmentation of the embedded dataset; paths become absolute."""
    quilts = data.dataset == "quilts"
    pool = data.pool or ("quilts" if quilts else "imagenet") if needs_pool else data.pool
    dataset = data.dataset
    if dataset.startswith("folder:"):
        dataset = f"folder:{Path(dataset.removeprefix('folder:')).expanduser().absolute()}"
    if pool not in (None, "quilts", "imagenet"):
        pool = str(Path(str(pool).removeprefix("folder:")).expanduser().absolute())
    update = {"dataset": dataset, "pool": pool, "augment": data.augment or ("none" if quilts else "crop")}
    return data.model_copy(update=update | {"split_file": data.split_file.absolute() if data.split_file else None})


def resolved_machine(machine: Machine, *images: str | None) -> Machine:
    """Fill in where the benchmarks are, and how many processes decode images.

    Args:
        images: names of the datasets and pools that are read; drawn ones need no decoding.
    """
    root = machine.data_root or Path(os.environ.get("BISSLIGHT_DATA", "data"))
    workers = machine.workers
    if workers is None:
        drawn = all(name == "quilts" for name in images)
        share = cores() // (machine.jobs * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        workers = 0 if drawn else default_workers(pick_device(machine.device), share)
    return machine.model_copy(update={"data_root": root.expanduser().absolute(), "workers": workers})


def default_out(command: str, dataset: str, model: Shape, seed: int, *more: str) -> Path:
    """runs/align-cub200-vit_l16-mae-r64-s0"""
    rank = [f"r{model.rank}"] if isinstance(model, Model) else []
    name = Path(dataset.removeprefix("folder:")).resolve().name
    return Path("runs") / "-".join([command, name, model.backbone.replace(":", "-"), *more, *rank, f"s{seed}"])


# --- loaded things ---------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """A backbone on a device, with its pretext head where its file has one, and where it came from."""

    backbone: Backbone
    pretext_head: nn.Module | None  # MAE's decoder, I-JEPA's predictor
    arch: Arch
    digest: str  # sha256 of the weight file
    channels: tuple[Channels, Channels] | None  # mean and deviation it was trained with; None: the dataset's


@lru_cache(maxsize=1)
def load_backbone(model: Model, device: torch.device) -> Loaded:
    """ψ, frozen, and its decoder; kept, so that the seeds of a process share one copy. `model` is resolved."""
    assert model.weights is not None and model.rank is not None and model.alpha is not None
    digest = sha256(model.weights)
    if model.weights == cached(model):
        verify(model.weights, digest)
    vit: Any
    head: nn.Module | None = None
    channels = None
    if model.backbone.startswith("timm:"):
        vit, arch = load_timm(model.backbone.removeprefix("timm:"), model.weights, model.image_size)
        channels = (tuple(vit.pretrained_cfg["mean"]), tuple(vit.pretrained_cfg["std"]))
    elif model.pretext == "ijepa":
        vit, head, arch = ijepa.load(model.weights, model.backbone, model.base, model.image_size, model.patch_size)
    else:
        vit, head, arch = mae.load(model.weights, model.backbone, model.image_size, model.patch_size)
    backbone = Backbone(vit, model.alpha / model.rank, model.recompute).requires_grad_(False).to(device)
    return Loaded(backbone, head.to(device) if head else None, arch, digest, channels)


def fits(name: str, arch: Arch) -> None:
    """Quilts are drawn at 16 px and not scaled."""
    if name == "quilts" and arch.image_size != 16:
        raise UsageError(
            f"quilts are images of 16 px, the backbone wants {arch.image_size}; use another dataset or pool"
        )


class Downstream(NamedTuple):
    """Everything that D^D and f_θ give the loops: batches, losses, scores."""

    loaded: Loaded
    task: Task
    view: View
    device: torch.device
    workers: int
    amp: bool
    several: ft.Several  # L^D where an image has several classes
    micro: int | None  # most images in a pass
    peers: World
    scored: dict[int, Iterator[tuple[Tensor, Tensor]]]  # splits, again and again; their workers wait for the next time

    def loss(self) -> Callable[..., Tensor]:
        loss = ft.downstream_loss(self.loaded.backbone, self.several)
        if self.peers.size > 1:
            loss = ft.downstream_loss(self.loaded.backbone, self.several, Summed.apply)
        return autocast(loss, self.device, self.amp)

    def train(
        self, draws: Iterator[list[Draw]], seed: int, purpose: str, rate: float, stats: Phi, start: int = 0
    ) -> Iterator[tuple[Parts, list[Here]]]:
        """Training batches in parts from step `start` on, and with each part what acts in training alone.

        That is drop-path factors, a function of step and place in the batch, and a head's statistics, to be updated.
        """
        images = Images(self.task.train, self.view, True, seed, purpose)
        arrived = shared_batches(images, draws, self.workers, self.device, self.peers)
        for step, (x, y, share, whole) in enumerate(arrived, start):
            drop = drop_path(rate, self.loaded.backbone.depth, whole, rng(seed, purpose, "drop", step))
            parts, here = [], []
            for piece in micro(share, self.micro):
                at = slice(piece.start - share.start, piece.stop - share.start)
                parts.append((len(piece) / whole, (x[at], y[at])))
                factors = None if drop is None else drop[..., piece.start : piece.stop]
                here.append(Here(None if factors is None else factors.to(self.device, non_blocking=True), stats))
            yield parts, here

    def score(self, split: Split, theta: Tensor, phi_D: Phi) -> Score:
        """What a model is worth on the whole split, of which each process looks at its share."""
        batch = min(SCORED, self.micro or SCORED)
        predict = autocast(partial(logits, self.loaded.backbone, theta, phi_D), self.device, self.amp)
        draws = in_order(self.peers.share(len(split.targets)), batch)
        if id(split) not in self.scored:
            images = Images(split, self.view, False, 0, "eval")
            # between two validations the first images of the next one wait in memory: not many of them
            self.scored[id(split)] = batches(images, itertools.cycle(draws), self.workers, self.device, ahead=1)
        examples = itertools.islice(self.scored[id(split)], len(draws))
        return score(predict, examples, partial(ft.cross_entropy, several=self.several), self.peers.gather)


def shared_batches(
    images: Images, draws: Iterator[list[Draw]], workers: int, device: torch.device, peers: World
) -> Iterator[tuple[Tensor, Tensor, range, int]]:
    """Of each batch this process's images and targets, which ones of it they are, and how many it has in all."""
    mine, whole = itertools.tee(draws)
    shares = ([batch[i] for i in peers.share(len(batch))] for batch in mine)
    for (x, y), batch in zip(batches(images, shares, workers, device), whole, strict=True):
        yield x, y, peers.share(len(batch)), len(batch)


@lru_cache(maxsize=1)
def remembered(data: Data, root: Path) -> Task:
    """D^D, listed once for all the runs of a process."""
    return load_task(data, root)


def downstream(model: Model, data: Data, machine: Machine, amp: bool, task: Task | None = None) -> Downstream:
    """f_θ on its device, beside D^D; all settings are resolved."""
    assert machine.data_root is not None and data.augment is not None
    task = task or remembered(data, machine.data_root)
    device = pick_device(machine.device)
    loaded = load_backbone(model, device)
    fits(data.dataset, loaded.arch)
    mean, std = loaded.channels or (task.mean, task.std)
    view = View(loaded.arch.image_size, mean, std, data.augment, data.min_crop, data.d_interpolation)
    workers = machine.workers or 0
    return Downstream(loaded, task, view, device, workers, amp, data.voc_loss, machine.micro_batch, world(), {})


decoded: set[tuple[Path, ...]] = set()  # what `decode_scored` has seen in this process; a sweep has many runs


def decode_scored(task: Task, report: Report) -> None:
    """Decode all validation and test images (RunError naming the first damaged one), before a run begins.

    Found at the test, after all training, a damaged image could not be removed any more: the run would be another.
    """
    splits = [split.images for split in (task.val, task.test) if not isinstance(split.images, Tensor)]
    files = tuple(file for images in splits for file in images)
    if files in decoded:
        return
    if bad := faults(files, lambda stage, done, total, text: report(stage, done, total, "")):
        more = f"; {len(bad)} such images in all, `bisslight data check {task.name}` lists them" if bad[1:] else ""
        raise RunError(bad[0] + more)
    decoded.add(files)


class Pool(NamedTuple):
    """Everything that D^P gives a pretext task."""

    images: Any
    view: View
    device: torch.device
    workers: int
    amp: bool
    seed: int
    micro: int | None
    peers: World

    def fingerprint(self) -> str:
        """sha256 over file names, or drawn images: a run resumes on this pool only."""
        return hashlib.sha256(listed(self.images)).hexdigest()

    def arrived(self, batch: int, start: int, stop: int) -> Iterator[tuple[Tensor, range, int]]:
        """Of the batches of steps start .. stop − 1: this process's images, which ones they are, how many there are."""
        n = len(self.images)
        images = Images(Split(self.images, torch.zeros(n, dtype=torch.long)), self.view, True, self.seed, "pretext")
        draws = stream(n, batch, self.seed, "pretext", start, stop)
        for x, _, share, whole in shared_batches(images, draws, self.workers, self.device, self.peers):
            yield x, share, whole

    def prepared(self, task: PretextTask[Any], x: Tensor, share: range, whole: int, *purpose: str | int) -> Parts:
        """A batch in parts, its random numbers drawn for one purpose."""
        prepare = autocast(task.prepare, self.device, self.amp)
        return [
            (
                len(piece) / whole,
                prepare(
                    x[piece.start - share.start : piece.stop - share.start],
                    rng(self.seed, *purpose),
                    piece.start,
                    whole,
                ),
            )
            for piece in micro(share, self.micro)
        ]

    def batches(self, task: PretextTask[Any], batch: int, start: int, stop: int) -> Iterator[Parts]:
        """Prepared batches of steps start .. stop − 1, each when it is asked for; random numbers follow the step."""
        for step, (x, share, whole) in enumerate(self.arrived(batch, start, stop), start):
            yield self.prepared(task, x, share, whole, "mask", step)


def pool_of(
    cfg: AlignConfig | PretrainConfig, pool: str, seed: int, augment: Augment, min_crop: float, size: int
) -> Pool:
    """D^P with the pretext task's own augmentation: MAE's bicubic with flip, I-JEPA's bilinear without."""
    assert cfg.machine.data_root is not None
    images, mean, std = load_pool(str(pool_path(pool, cfg.machine.data_root) or pool), seed)
    own: Any = {"interpolation": "bilinear", "flip": False} if cfg.model.pretext == "ijepa" else {}
    view = View(size, mean, std, augment, min_crop, **own)
    machine = cfg.machine
    device = pick_device(machine.device)
    return Pool(images, view, device, machine.workers or 0, cfg.amp, cfg.seed, machine.micro_batch, world())


def pretext_task(cfg: AlignConfig, loaded: Loaded, theta: Tensor) -> PretextTask[Any]:
    """The pretext task of these settings, with θ_P's start."""
    head, device = loaded.pretext_head, theta.device
    if cfg.model.pretext == "ijepa":
        assert isinstance(head, ijepa.Predictor)
        steps = cfg.bilevel.alternations * cfg.bilevel.lower_steps
        return ijepa.IJEPA(loaded.backbone, head, cfg.masks, (cfg.lower.ema, steps), theta)
    if cfg.lower.decoder == "random":
        head = mae.init_decoder(loaded.arch, rng(cfg.seed, "decoder")).to(device)
    assert isinstance(head, mae.Decoder)
    return mae.MAE(loaded.backbone, head, cfg.lower.mask_ratio)


# --- finished runs ---------------------------------------------------------------------------------------------------


class Finished(NamedTuple):
    """A finished align or finetune run, read back."""

    path: Path
    cfg: AlignConfig | FinetuneConfig
    theta: Tensor
    phi_D: Phi  # empty for an align run
    about: dict[str, str]  # the adapter file's metadata


def read_run(path: Path, seed: int | None) -> Finished:
    """A run's settings and adapter; `seed` of a finetune run, None: its first (UsageError where there is no such)."""
    if not (path / "result.json").exists():
        raise UsageError(f"{path}: is not a finished run")
    config = read_json(path / "config.json")
    aligned = "bilevel" in config
    if not aligned and "peft" not in config:
        raise UsageError(f"{path}: is neither an align nor a finetune run")
    cfg = (AlignConfig if aligned else FinetuneConfig).model_validate(config)
    assert isinstance(cfg, AlignConfig | FinetuneConfig)
    file = path / ("adapter.safetensors" if aligned else f"adapter-s{cfg.seed if seed is None else seed}.safetensors")
    if not file.exists():
        there = sorted(int(found.stem.rpartition("-s")[2]) for found in path.glob("adapter-s*.safetensors"))
        raise UsageError(f"--seed {seed}: {path} has no {file.name}, but seeds {', '.join(map(str, there)) or 'none'}")
    return Finished(path, cfg, *load_adapter(file))


def check_weights(run: Finished, loaded: Loaded) -> None:
    """Refuse (UsageError) a weight file that is not the one the run was made with."""
    if loaded.digest != run.about["weights_sha256"]:
        made = run.about["weights_sha256"]
        raise UsageError(f"{run.path}: was made with weights of sha256 {made}, {run.cfg.model.weights} differs")
