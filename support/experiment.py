"""From settings to what Algorithm 1 needs: f_θ, D^D, D^P, L^D, pretext task, batches, scores."""

import importlib
import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import data
import lora
from bisslight import Loss, Phi, PretextTask
from config import AlignConfig, FinetuneConfig, Record
from support.benchmarks import BENCHMARKS, load_task, place_of
from support.checkpoints import initialise, load_backbone, pretext_task, weights_of
from support.errors import UsageError, checking
from support.metrics import Score, score
from support.optim import trainable
from support.processes import gather, share, world
from support.runs import sha256

Config = AlignConfig | FinetuneConfig


class Model:
    """Network, data and device of settings; `task` and `pool` can be handed in, not only named."""

    def __init__(
        self, cfg: Config, task: data.Task | None = None, pool: data.Pool | None = None
    ) -> None:
        self.cfg, self.device = cfg, device_of(cfg)
        self.task: data.Task = task or named(cfg, "dataset")
        self.own: Any = None  # the class of a pretext task of one's own
        lower: Record = {}
        if isinstance(cfg, AlignConfig):
            self.pool: data.Pool = pool or named(cfg, "pool")
            lower["pool_sha256"] = data.fingerprint(self.pool)
            if cfg.pretext not in ("mae", "ijepa"):
                self.own, lower["pretext_sha256"] = own_class(cfg.pretext)
        self.amp = cfg.amp and self.device.type == "cuda"
        stored = [part[0] for part in (*self.task[1:4], pool or self.task.val)]
        pixels = [x for x in stored if isinstance(x, Tensor)]
        if not all(len(x) and 0 <= x.min() <= x.max() <= 1 for x in pixels):
            raise UsageError("task, pool: need images with pixels in [0, 1]; see clamp(0, 1)")
        multilabel, n = self.task.test.targets.ndim > 1, len(self.task.classes)
        labels = [part.targets for part in self.task[1:4]]
        if not all((y == 1).any() if multilabel else 0 <= y.min() <= y.max() < n for y in labels):
            need = "a positive image each, for mAP" if multilabel else f"labels 0 to {n - 1}"
            raise UsageError(f"--dataset {self.task.name}: train, val and test need {need}")
        self.metric = "11-point mAP" if multilabel else "top-1 accuracy"  # App. C.2.1
        backbone, self.pretext_head, self.arch = load_backbone(cfg)
        self.backbone = backbone.to(self.device)
        size, cut = self.arch.image_size, (cfg.augment, cfg.min_crop, cfg.d_interpolation)
        self.transform = data.Transform(size, self.task.mean, self.task.std, *cut)
        self.decoded = data.Decoded(self.transform)  # validation and test images
        digests = {
            "weights_sha256": sha256(weights_of(cfg)),
            "data_sha256": data.fingerprint(*self.task[1:4]),
        }
        # what defines a run beside its settings, and what an adapter file says of itself
        self.about: Record = {**digests, "images": self.task.sizes(), **lower}
        self.origin: Record = {
            **cfg.model_dump(include={"backbone", "rank", "dataset", "data_seed"}),
            "alpha": cfg.scale * cfg.rank,
            **digests,
            "arch": self.arch._asdict(),
            "channels": [self.transform.mean, self.transform.std],
            "pretext": cfg.pretext.rpartition(":")[2].lower(),  # of one's own: the class
        }

    def theta(self) -> Tensor:
        """A fresh θ (l.2)."""
        f, g = self.backbone, data.rng(self.cfg.seed, "lora")
        return lora.init_theta(f.depth, self.cfg.rank, f.dim, g).to(self.device)

    def head(self, purpose: str) -> tuple[Phi, Loss, Phi]:
        """Fresh φ_D (App. C.2), its L^D, and φ_D together with BatchNorm's statistics, if any."""
        cfg, f, g = self.cfg, self.backbone, data.rng(self.cfg.seed, purpose)
        norm, stats = lora.init_norm(f.dim) if cfg.head == "batchnorm" else ({}, {})
        phi = trainable(lora.init_head(f.dim, len(self.task.classes), g) | norm, self.device)
        stats = {name: tensor.to(self.device) for name, tensor in stats.items()}
        loss_D = partial(lora.downstream_loss, f, multilabel=cfg.voc_loss, stats=stats)
        return phi, loss_D, phi | stats

    def pretext_task(self, theta: Tensor) -> PretextTask:
        """The pretext task of these settings; θ is where θ_P starts."""
        cfg: Any = self.cfg
        if cfg.pretext not in ("mae", "ijepa"):
            own: PretextTask = self.own(self.backbone, cfg, data.rng(cfg.seed, "pretext"))
            pieces = (cfg.micro_batch or cfg.p_batch) < cfg.p_batch or world()[1] > 1
            if pieces and not getattr(own, "mean_over_images", True):
                raise UsageError(
                    f"--pretext {cfg.pretext}: its loss compares the images of a batch with each "
                    "other, so a batch cannot be cut; leave --micro-batch out and start one process"
                )
            return own
        head: Any = self.pretext_head
        if cfg.pretext == "mae" and cfg.decoder == "random":
            initialise([head.cpu()], "mae", data.rng(cfg.seed, "decoder"))
        with checking(f"--pretext {cfg.pretext}"):
            steps = cfg.alternations * cfg.lower_steps
            return pretext_task(cfg, self.backbone, head.to(self.device), steps, theta)

    def examples(
        self, purpose: str, batch: int, steps: range, rate: float, passes: bool = False
    ) -> Iterator[lora.Examples]:
        """Labelled training batches in the order of `data.stream`, with drop path of this rate."""
        seed, train = self.cfg.seed, self.task.train
        images = data.Images(train, self.transform, True, seed, purpose)
        draws = data.stream(len(train.targets), batch, seed, purpose, steps, passes)
        arrived = data.batches(images, draws, self.cfg.workers, self.device, share)
        for step, (x, y, n) in zip(steps, arrived, strict=True):
            drop = None
            if rate:
                g = data.rng(seed, purpose, "drop", step)
                drop = lora.drop_path(rate, self.backbone.depth, n, g)[share(n)]
                drop = data.to_device(drop, self.device)
            yield lora.Examples(x, y, drop)

    @torch.no_grad()
    def score(self, split: data.Split, theta: Tensor, phi_D: Phi) -> Score:
        """Accuracy and loss on a split, which processes share; φ_D with BatchNorm's statistics."""
        n = len(split.targets)
        images = data.Images(self.decoded(split), self.transform, False, 0, "eval")
        part, size = range(n)[share(n)], self.cfg.micro_batch or 256
        draws = ([(i, i) for i in part[k : k + size]] for k in range(0, len(part), size))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            found = [
                lora.logits(lora.features(self.backbone, theta, x), phi_D).float()
                for x, _, _ in data.batches(images, draws, self.cfg.workers, self.device)
            ]
        z = gather(torch.cat(found))  # in the order of the split
        return score(z, split.targets, lora.cross_entropy(z, split.targets, self.cfg.voc_loss))

    def validated(
        self, records: Iterable[Record], every: int, last: int, phi_D: Phi, **theta: Tensor
    ) -> Iterator[Record]:
        """Hands records on; each `every`-th and the `last` get each θ's score under its keyword."""
        for record in records:
            if record["step"] % every == 0 or record["step"] == last:
                for name, at in theta.items():
                    record[name] = self.score(self.task.val, at, phi_D).model_dump()
            yield record

    def check(self, flag: str, batch: int, goes_on: bool) -> None:
        """Refuse batches too small to share (UsageError); if a run is new, decode val and test."""
        norm, last = self.cfg.head == "batchnorm", len(self.task.train.targets) % batch or batch
        _, processes = world()
        least = max(2 if norm else 1, processes)
        if norm and self.cfg.micro_batch:
            raise UsageError("--micro-batch: a BatchNorm head needs whole batches; see --recompute")
        if last < least:
            raise UsageError(
                f"{flag} {batch}: the last batch of a pass has {last} images, "
                f"{'BatchNorm needs' if norm else 'the processes need'} {least}; "
                "choose another size"
            )
        if (n := getattr(self.cfg, "p_batch", processes)) < processes:
            raise UsageError(f"--p-batch {n}: give each of {processes} processes an image")
        for split in () if goes_on else (self.task.val, self.task.test):
            images = self.decoded(split).images  # now, so that a damaged one is told
            if not isinstance(images, Tensor):  # too many to be kept
                for error in data.decode_all(images):
                    raise error


def pretext_batches(
    cfg: Any, pool: data.Pool, task: PretextTask, size: int, batch: int, steps: range
) -> Iterator[Any]:
    """Batches of a pool with images of side `size`, each prepared when it is asked for.

    Crops are bicubic with flip, those of I-JEPA bilinear without. Random numbers depend on the
    step; they are drawn for the whole batch, and each process takes its part.
    """
    device = device_of(cfg)
    own: Any = {"interpolation": "bilinear", "flip": False} if cfg.pretext == "ijepa" else {}
    transform = data.Transform(size, pool.mean, pool.std, cfg.augment, cfg.min_crop, **own)
    unlabelled = data.Split(pool.images, torch.zeros(len(pool.images)))
    images = data.Images(unlabelled, transform, True, cfg.seed, "pretext")
    draws = data.stream(len(pool.images), batch, cfg.seed, "pretext", steps)
    arrived = data.batches(images, draws, cfg.workers, device, share)
    for step, (x, _, n) in zip(steps, arrived, strict=True):
        g = data.rng(cfg.seed, "mask", step)
        drawn = [data.to_device(part[share(n)], device) for part in task.draw(n, g)]
        with torch.autocast(device.type, torch.bfloat16, enabled=cfg.amp and x.is_cuda):
            prepared = task.prepare(x, *drawn)
        yield prepared


def named(cfg: Any, field: str) -> Any:
    """The labelled task D^D ("dataset") or the pool D^P ("pool") by its name (UsageError)."""
    name = getattr(cfg, field)
    with checking(f"--{field} {name}"):
        if name.startswith("own"):
            raise ValueError("was handed in from Python; hand it in again, task=... or pool=...")
        path, labelled = place_of(name, cfg.data_root), field == "dataset"
        if labelled and cfg.split_file and name not in BENCHMARKS:
            raise UsageError(f"--split-file {cfg.split_file}: is for cub200 and pets, leave it out")
        if path is None:
            pool, task = data.quilts(cfg.data_seed)
            return task if labelled else pool
        if labelled:
            return load_task(cfg, path) if name in BENCHMARKS else data.folder(path, cfg.data_seed)
        if files := data.find_images(path / "train" if name == "imagenet" else path):
            return data.Pool(files)
        raise ValueError(f"no images in {path}")


def own_names(task: data.Task | None, pool: data.Pool | None = None) -> dict[str, str]:
    """What is recorded instead of the names of data that were handed in."""
    given = ("dataset", task and task[1:4]), ("pool", pool and (pool,))
    return {key: f"own:{data.fingerprint(*own)[:12]}" for key, own in given if own}


def device_of(cfg: Any) -> torch.device:
    """The device of these settings (UsageError where it is not there)."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    name = auto if cfg.device == "auto" else cfg.device
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun's processes have one each
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {cfg.device}: is not here; give auto or cpu") from error
    # its tensors are so small that several threads would only wait for each other
    if cfg.backbone == "vit_mini" and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return device


def own_class(name: str) -> tuple[Any, str]:
    """The class of `FILE.py:Class` or `module:Class`, its file's sha256 (UsageError: none)."""
    place, _, attribute = name.rpartition(":")
    file = place.endswith(".py")
    # appended at the end, so that a `data.py` beside the file is not imported instead of ours
    sys.path.append(str(Path(place).parent.resolve() if file else Path.cwd()))
    try:
        names = runpy.run_path(place) if file else vars(importlib.import_module(place))
        return names[attribute], sha256(Path(names["__file__"]))
    except (ImportError, OSError, KeyError, SyntaxError, ValueError) as error:
        raise UsageError(f"--pretext {name}: cannot be imported ({error!r})") from error
