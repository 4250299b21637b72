"""Program: what a run computes with: device, data, networks, heads, batches, scores."""

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

import data
import lora
from bisslight import Batch, Loss, Passes, Phi, PretextTask
from config import PRETEXTS, TIMM, AlignConfig, Arch, FinetuneConfig, Machine, PretrainConfig
from support import checkpoints
from support.benchmarks import (
    BENCHMARKS,
    MAKE_POOL,
    MAKE_TASK,
    find_folder,
    find_pool_images,
    load_benchmark,
)
from support.checkpoints import AdapterInfo
from support.errors import UsageError, as_usage_error, try_and_collect
from support.metrics import Score, score
from support.optim import trainable
from support.pretext import TaskClass, load_task_class, try_step
from support.processes import gather, own_part, wait_for_all, world
from support.runs import LOG, Identity

C = TypeVar("C", AlignConfig, FinetuneConfig)
FIRST_IMAGES = 4  # a custom pretext task is tried on so many images, before the long work


class Head(NamedTuple):
    """A fresh downstream head h^D."""

    phi: Phi  # φ_D, by name: what is trained
    loss: Loss  # L^D(θ, φ_D, examples, regularise=False); regularise=True turns drop path on
    with_stats: Phi  # what is scored and saved: φ_D, and BatchNorm's running statistics, if any


@dataclass(frozen=True, eq=False)
class Experiment(Generic[C]):
    """What align and finetune compute with: the labelled task D^D, the frozen f_θ, the device.

    `open_experiment` makes one. It never changes, so several runs can share it.
    """

    cfg: C
    device: torch.device
    task: data.Task
    backbone: lora.Backbone  # f_ψ
    pretext_head: checkpoints.PretextHead  # h^P as the checkpoint has it
    arch: Arch
    identity: Identity

    @property
    def passes(self) -> Passes:
        """Micro-batches and precision of all forward and backward passes."""
        return Passes(self.cfg.micro_batch, uses_autocast(self.cfg, self.device))

    @property
    def metric(self) -> str:
        """What is scored (App. C.2.1)."""
        several_classes = self.task.test.targets.ndim > 1  # per image
        return "11-point mAP" if several_classes else "top-1 accuracy"

    @property
    def theta_shape(self) -> tuple[int, int]:
        """The shape (K, p) of θ: layers, and numbers of LoRA in a layer."""
        per_layer = 4 * self.cfg.rank * self.backbone.dim  # A_q, B_q, A_v and B_v
        return self.backbone.depth, per_layer

    @property
    def transform(self) -> data.Transform:
        """How a labelled image becomes an input of the network."""
        return data.Transform(
            size=self.arch.image_size,
            mean=self.task.mean,
            std=self.task.std,
            augment=self.cfg.augment,
            min_crop=self.cfg.min_crop,
            interpolation=self.cfg.d_interpolation,
            uncut=self.task.uncut,
        )

    @property
    def adapter_info(self) -> AdapterInfo:
        """What is written into every adapter file that is trained here."""
        cfg = self.cfg
        # Images are scored whole if they are in memory and have the network's size; others are cut
        # at the centre. `predict` reads from the file which it was.
        scores_whole_images = data.Images(self.task.test, self.transform).taken_as_stored
        return AdapterInfo(
            backbone=cfg.backbone,
            rank=cfg.rank,
            alpha=cfg.scale * cfg.rank,
            dataset=cfg.dataset,
            data_seed=cfg.data_seed,
            weights_sha256=self.identity.weights_sha256,
            data_sha256=self.identity.data_sha256,
            arch=self.arch._asdict(),
            channels=(self.transform.mean, self.transform.std),
            whole_images=scores_whole_images,
            pretext=cfg.pretext.rpartition(":")[2].lower(),  # of FILE.py:Class the class
        )

    def new_theta(self, seed: int) -> Tensor:
        """A fresh θ (K, p) (l.2)."""
        g = data.rng(seed, "lora")
        theta = lora.init_theta(self.backbone.depth, self.cfg.rank, self.backbone.dim, g)
        return theta.to(self.device)

    def new_head(self, purpose: str, seed: int) -> Head:
        """A fresh head (App. C.2); its random numbers depend on `purpose` and the seed.

        So align ("align head") and finetune ("peft head") draw other heads from the same seed.
        """
        dim = self.backbone.dim
        g = data.rng(seed, purpose)
        start = lora.init_head(dim, len(self.task.classes), g)
        stats: Phi = {}
        if self.cfg.head == "batchnorm":
            norm, stats = lora.init_norm(dim)
            start |= norm
        phi = trainable(start, self.device)
        stats = {name: tensor.to(self.device) for name, tensor in stats.items()}
        loss = partial(
            lora.downstream_loss, self.backbone, multilabel=self.cfg.voc_loss, stats=stats
        )
        return Head(phi, loss, phi | stats)

    def examples(
        self,
        purpose: str,
        seed: int,
        batch: int,
        steps: range,
        drop_path: float,
        by_epoch: bool = False,
    ) -> Iterator[lora.Examples]:
        """Labelled training batches of these steps, with drop path of this rate.

        Args:
            purpose: order, crops and drop path depend on it and the seed; "probe", "downstream" of
                align, or "peft".
            batch: images in a step, of which this process yields its part.
            steps: numbers of the steps, from 0 over the whole run.
            drop_path: the rate; 0: there is none.
            by_epoch: True: the last batch of an epoch has what is left of it. False: that batch is
                filled up from the next epoch.
        """
        train = self.task.train
        n = len(train.targets)
        images = data.Images(train, self.transform, train=True, seed=seed, purpose=purpose)
        draws = data.stream(n, batch, seed, purpose, steps, by_epoch)  # a list for each step
        own_draws = (of_step[own_part(len(of_step))] for of_step in draws)
        batches = data.batches(images, own_draws, self.cfg.workers, self.device)
        for step, (x, y) in zip(steps, batches, strict=True):
            drop = None
            if drop_path:
                whole_step = data.draws_of_step(n, batch, step, by_epoch)  # of all processes
                g = data.rng(seed, purpose, "drop", step)
                drop = self.draw_drop_path(drop_path, len(whole_step), g)
            yield lora.Examples(x, y, drop)

    def draw_drop_path(self, rate: float, count: int, g: torch.Generator) -> Tensor:
        """Factors of drop path (B, K, 2) for the B images that are this process's part of a step.

        Numbers are drawn for all `count` images of the step, so that they do not depend on how many
        processes share it.
        """
        factors = lora.drop_path(rate, self.backbone.depth, count, g)  # (count, K, 2)
        return data.to_device(factors[own_part(count)], self.device)

    def score(self, split: data.Split, theta: Tensor, phi_D: Phi) -> Score:
        """Accuracy and loss of θ and φ_D on a split.

        `phi_D` has BatchNorm's running statistics, too, if the head has a BatchNorm.
        """
        z = self.logits(split, theta, phi_D)
        losses = lora.cross_entropy(z, split.targets, self.cfg.voc_loss)
        return score(z, split.targets, losses)

    @torch.no_grad()
    def logits(self, split: data.Split, theta: Tensor, phi_D: Phi) -> Tensor:
        """Logits (n, C) of the n images of a split, in their order, on the CPU; for scoring.

        Each process computes those of its own images; then every process gets all. `phi_D` as in
        `score`.
        """
        # Kept in memory from the first call on, if it is not too much; else files, read each time.
        own_split = data.decode_once(split, self.transform, own_numbers(split))
        images = data.Images(own_split, self.transform)  # what is decoded, it takes as it is
        # `batches` takes pairs (number of the draw, index of the image). In scoring, nothing is
        # random, and each image is drawn once, in its order.
        draws = [(i, i) for i in range(len(own_split.targets))]
        size = self.cfg.micro_batch or 256
        draws_by_batch = [draws[first : first + size] for first in range(0, len(draws), size)]

        # The first piece is empty, since a process may have no image at all.
        pieces = [torch.empty(0, len(self.task.classes), device=self.device)]
        for x, _ in data.batches(images, draws_by_batch, self.cfg.workers, self.device):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.passes.amp):
                features = lora.features(self.backbone, theta, x)  # (B, width of the network)
            # The head computes in float32: in bfloat16, close classes would have equal logits.
            pieces.append(lora.logits(features.float(), phi_D))
        return gather(torch.cat(pieces))  # of all processes

    def check_batches(self, flag: str, batch: int) -> None:
        """Refuse (UsageError) batches in which BatchNorm or a process would have too few images.

        The last batch of an epoch, of linear probing or of PEFT, is the smallest. `flag` is the
        setting whose value `batch` is, such as --d-batch; the error names it.
        """
        has_batchnorm = self.cfg.head == "batchnorm"
        if has_batchnorm and self.cfg.micro_batch:
            raise UsageError("--micro-batch: a BatchNorm head needs whole batches; see --recompute")

        last = len(self.task.train.targets) % batch  # images in the last batch of an epoch
        if last == 0:
            last = batch
        found = f"{flag} {batch}: the last batch of an epoch has {last} images"
        processes = world().size
        if last < processes:  # each needs an image
            raise UsageError(f"{found}, the processes need {processes}; choose another size")
        if has_batchnorm and last < 2:  # it divides by a deviation, and that of one image is 0
            raise UsageError(f"{found}, BatchNorm needs 2; choose another size")

    def check_held_out_images(self) -> None:
        """Try to read all validation and test images, to find a damaged one before training.

        Each process tries its own part. Raises ImageError.
        """
        for split in (self.task.val, self.task.test):
            images = split.part(own_numbers(split)).images
            if isinstance(images, Tensor):  # they are in memory
                continue
            errors = data.find_unreadable(images)
            if errors:
                raise errors[0]
        wait_for_all()  # the run begins only when all processes have read theirs


def own_numbers(split: data.Split) -> range:
    """The numbers of those images of a split that this process scores."""
    n = len(split.targets)
    return range(n)[own_part(n)]


FinetuneExperiment = Experiment[FinetuneConfig]


@dataclass(frozen=True, eq=False)
class AlignExperiment(Experiment[AlignConfig]):
    """What align computes with: all that finetune has, and the pool D^P."""

    pool: data.Pool
    task_class: TaskClass | None  # the class of --pretext FILE.py:Class; None: mae or ijepa

    def check_pretext_batches(self) -> None:
        """Refuse (UsageError) a --p-batch smaller than the number of processes."""
        processes = world().size
        p_batch = self.cfg.p_batch
        if p_batch < processes:
            raise UsageError(f"--p-batch {p_batch}: give each of {processes} processes an image")

    def new_pretext_task(self, theta: Tensor) -> PretextTask[Any]:
        """A new pretext task of these settings. Raises UsageError.

        `theta` is where θ_P starts, and so does the teacher of I-JEPA; MAE does not use it.
        """
        if self.task_class is not None:
            return self.new_custom_task(self.task_class, theta)
        cfg = self.cfg
        # A copy, since it is changed here, and runs may share this experiment.
        head = copy.deepcopy(self.pretext_head)
        if cfg.pretext == "mae" and cfg.decoder == "random":
            checkpoints.initialise([head], "mae", data.rng(cfg.seed, "decoder"))
        head.to(self.device)
        steps = cfg.alternations * cfg.lower_steps
        return checkpoints.build_pretext_task(cfg, self.backbone, head, steps, theta)

    def new_custom_task(self, task_class: TaskClass, theta: Tensor) -> PretextTask[Any]:
        """A new task of --pretext FILE.py:Class, after a trial step that shows errors in it now."""
        cfg = self.cfg
        task = task_class.new(self.backbone, cfg)
        # A class may set it to False: then its loss compares the images of a batch.
        mean_over_images = getattr(task, "mean_over_images", True)
        n = min(FIRST_IMAGES, cfg.p_batch)
        if not mean_over_images:
            self.check_whole_batches()
            n = cfg.p_batch  # a comparison may need as many images as the run has in a step
        try_step(task, self.first_images(n), theta, self.passes)
        return task_class.new(self.backbone, cfg)  # the step changed the first one

    def check_whole_batches(self) -> None:
        """Refuse (UsageError) micro-batches and several processes, which cut batches."""
        cfg = self.cfg
        has_micro_batches = cfg.micro_batch is not None and cfg.micro_batch < cfg.p_batch
        if has_micro_batches or world().size > 1:
            raise UsageError(
                f"--pretext {cfg.pretext}: its loss compares the images of a batch with each "
                "other, so a batch cannot be cut; leave --micro-batch out and start one process"
            )

    def first_images(self, n: int) -> Tensor:
        """The first n images that a run draws from the pool, for the trial step of a custom task.

        (n, 3, H, W), cropped and normalised, on the device.
        """
        images = pool_images(self.pool, self.arch.image_size, self.cfg)
        first_step = range(1)
        draws = data.stream(len(self.pool.images), n, self.cfg.seed, "pretext", first_step)
        x, _ = next(data.batches(images, draws, workers=0, device=self.device))
        return x


def open_experiment(cfg: C, task: data.Task | None = None) -> Experiment[C]:
    """Open the data and load the networks that the settings name.

    A `task` that is given is used instead of --dataset. Raises UsageError before the networks are
    loaded, with a line for each thing that is missing.
    """
    problems: list[str] = []
    task = task or try_and_collect(problems, open_task, cfg)
    try_and_collect(problems, checkpoints.check_weights, cfg)
    if task is None or problems:
        raise UsageError(*problems)
    return add_networks(cfg, task)


def add_networks(cfg: C, task: data.Task) -> Experiment[C]:
    """Make an experiment on an open task: load the networks, which may download gigabytes.

    Raises UsageError if the images or labels of the task, or the weights, cannot be used.
    """
    device = set_up_device(cfg)
    with as_usage_error(f"--dataset {task.name}"):
        data.check_task(task)
    pretrained = checkpoints.load_backbone(cfg)
    if pretrained.normalisation:  # a network of timm expects the one that it was trained with
        mean, std = pretrained.normalisation
        task = task._replace(mean=mean, std=std)
    backbone = pretrained.backbone.to(device)
    if keeps_weights_in_bfloat16(cfg, device):
        lora.keep_in_bfloat16(backbone)
    identity = Identity(
        weights_sha256=pretrained.sha256,
        data_sha256=data.fingerprint(*task.splits),
        images=task.sizes(),
    )
    return Experiment(cfg, device, task, backbone, pretrained.head, pretrained.arch, identity)


def open_align_experiment(
    cfg: AlignConfig, task: data.Task | None = None, pool: data.Pool | None = None
) -> AlignExperiment:
    """Open data and pool, load the networks: all that align computes with.

    A `task` or `pool` that is given is used instead of --dataset or --pool. Raises UsageError
    before the networks are loaded, with a line for each thing that is missing.
    """
    task, pool = open_task_and_pool(cfg, task, pool)
    task_class = None
    if cfg.pretext not in PRETEXTS:
        task_class = load_task_class(cfg.pretext)

    opened = add_networks(cfg, task)
    if cfg.backbone.startswith(TIMM):
        # The network expects the mean and std that it was trained with; `opened.task` has them.
        pool = pool._replace(mean=opened.task.mean, std=opened.task.std)
        LOG.warning(
            "%s has no pretrained pretext head, as the paper's backbones have: "
            "the pretext task starts with a fresh one",
            cfg.backbone,
        )
    tell_test_images(opened.task, pool)
    digests = {
        "pool_sha256": data.fingerprint(pool),
        "pretext_sha256": task_class.sha256 if task_class else None,
    }
    return AlignExperiment(  # what `opened` has, with a larger identity, and two fields more
        cfg=cfg,
        device=opened.device,
        task=opened.task,
        backbone=opened.backbone,
        pretext_head=opened.pretext_head,
        arch=opened.arch,
        identity=opened.identity.model_copy(update=digests),
        pool=pool,
        task_class=task_class,
    )


def open_task_and_pool(
    cfg: AlignConfig, task: data.Task | None, pool: data.Pool | None
) -> tuple[data.Task, data.Pool]:
    """Open the task and the pool, unless they are given, and see that there are weights.

    Raises UsageError with a line for each thing that is missing.
    """
    problems: list[str] = []
    task = task or try_and_collect(problems, open_task, cfg)
    pool = pool or try_and_collect(problems, open_pool, cfg.pool, cfg.data_root, cfg.data_seed)
    try_and_collect(problems, checkpoints.check_weights, cfg)
    if task is None or pool is None or problems:
        raise UsageError(*problems)
    with as_usage_error("--pool"):
        data.check_pixels(pool.images)
    return task, pool


def tell_test_images(task: data.Task, pool: data.Pool) -> None:
    """Log how many of the test images are in the pool, too, if both are files.

    This changes nothing, but a reader of the results may want to know.
    """
    if isinstance(pool.images, Tensor) or isinstance(task.test.images, Tensor):
        return
    shared = {*pool.images} & {*task.test.images}
    if shared:
        LOG.info("the pool holds %d test images, too; their labels are not seen", len(shared))


def pool_images(pool: data.Pool, size: int, cfg: AlignConfig | PretrainConfig) -> data.Images:
    """The pool's images as pretext training sees them: random crops, resized to side `size`.

    Crops are bicubic and may be flipped. Those of I-JEPA are bilinear and not flipped, as in its
    authors' program.
    """
    is_ijepa = cfg.pretext == "ijepa"
    transform = data.Transform(
        size=size,
        mean=pool.mean,
        std=pool.std,
        augment=cfg.augment,
        min_crop=cfg.min_crop,
        interpolation="bilinear" if is_ijepa else "bicubic",
        flip=not is_ijepa,
    )
    # `Images` reads splits, so each image gets the label 0, which means nothing.
    unlabelled = data.Split(pool.images, torch.zeros(len(pool.images)))
    return data.Images(unlabelled, transform, train=True, seed=cfg.seed, purpose="pretext")


def pretext_batches(
    task: PretextTask[Batch],
    images: data.Images,
    batch_size: int,
    steps: range,
    cfg: Machine,
    device: torch.device,
) -> Iterator[Batch]:
    """Yield a pretext batch for each of these steps, prepared when it is asked for.

    It cannot be prepared earlier: it may need what the step before has changed, such as a teacher.
    Random numbers depend on the step. They are drawn for the whole batch, of which each process
    takes its part.

    Args:
        task: draws masks and prepares batches.
        images: those of `pool_images`.
        batch_size: images in a step.
        steps: numbers of the steps, from 0 over the whole run.
        cfg: seed, workers and precision are taken from it.
        device: where the network is.
    """
    own = own_part(batch_size)
    image_draws = data.stream(len(images.split.images), batch_size, cfg.seed, "pretext", steps)
    own_draws = (of_step[own] for of_step in image_draws)
    batches = data.batches(images, own_draws, cfg.workers, device)
    for step, (x, _) in zip(steps, batches, strict=True):
        masks = task.draw(batch_size, data.rng(cfg.seed, "mask", step))  # (batch_size, ...)
        own_masks = [data.to_device(mask[own], device) for mask in masks]
        with torch.autocast(device.type, torch.bfloat16, enabled=uses_autocast(cfg, device)):
            batch = task.prepare(x, *own_masks)
        yield batch


# --- Data --------------------------------------------------------------------------------------


def open_task(cfg: AlignConfig | FinetuneConfig) -> data.Task:
    """Open the labelled task D^D that --dataset names. Raises UsageError."""
    name = cfg.dataset
    with as_usage_error(f"--dataset {name}"):
        if name in MAKE_TASK:
            return MAKE_TASK[name](cfg.data_seed)
        path = find_folder(name, cfg.data_root)
        if path is None:  # MAKE_POOL has it
            raise UsageError(f"--dataset {name}: is a pool without labels")
        if name in BENCHMARKS:
            return load_benchmark(cfg, path)
        return data.folder(path, cfg.data_seed)


def open_pool(name: str, root: Path, seed: int) -> data.Pool:
    """Open the unlabelled pool D^P that --pool names. Raises UsageError.

    `root` is --data-root, `seed` is --data-seed.
    """
    with as_usage_error(f"--pool {name}"):
        if name in MAKE_POOL:
            return MAKE_POOL[name](seed)
        path = find_folder(name, root)
        if path is None:  # MAKE_TASK has it
            raise UsageError(f"--pool {name}: is a labelled data set, and no pool")
        return data.Pool(find_pool_images(name, path))


# --- The machine -------------------------------------------------------------------------------


def set_up_device(cfg: AlignConfig | FinetuneConfig | PretrainConfig) -> torch.device:
    """The device of these settings; sets torch's TF32 switches, and for vit_mini one CPU thread.

    Raises UsageError.
    """
    device = find_device(cfg.device)
    # Unless --tf32 is given, matrix products are in full float32, and so are convolutions, which
    # torch computes in TF32 by default.
    torch.backends.cuda.matmul.allow_tf32 = cfg.tf32
    torch.backends.cudnn.allow_tf32 = cfg.tf32
    # The tensors of vit_mini are so small that several threads would only wait for each other.
    if cfg.backbone == "vit_mini" and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return device


def find_device(name: str) -> torch.device:
    """The device that --device names. Raises UsageError where it is not there."""
    place = name
    if name == "auto":
        place = "cuda" if torch.cuda.is_available() else "cpu"
    if place == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun's processes have one each
        place = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        # A number that comes back says whether the device works; `meta` has none.
        tensor = torch.ones(1, device=place)
        tensor.item()
        return tensor.device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: is not here; give auto or cpu") from error


def uses_autocast(cfg: Machine, device: torch.device) -> bool:
    """Whether forward passes are under autocast, in bfloat16: on a GPU, but for --no-amp."""
    return cfg.amp and device.type == "cuda"


def keeps_weights_in_bfloat16(cfg: AlignConfig | FinetuneConfig, device: torch.device) -> bool:
    """Whether ψ is stored in bfloat16, see `lora.keep_in_bfloat16`: if no pass needs float32."""
    # Products with H are computed in float32, and only these two ask for some.
    needs_products = isinstance(cfg, AlignConfig) and cfg.hypergrad in ("cg", "exact")
    is_custom_task = cfg.pretext not in PRETEXTS  # its code may leave autocast
    return uses_autocast(cfg, device) and not needs_products and not is_custom_task
