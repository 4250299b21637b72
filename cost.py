"""What a run will cost, before it starts: steps, parameters, operations, memory.

work      operations an image, counted by formula (tests hold it to torch's own counter)
memory    bytes of one step of each level, by running both on tensors without data and watching them come and go
budget    all of it for an align run
"""

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ijepa
import mae
import paper
from bisslight import gradients
from cg import cg
from config import AlignConfig, Arch, FinetuneConfig, Masks
from data import SCORED, Task
from finetune import downstream_loss
from lora import Backbone, Phi, build_vit, features, init_head
from parallel import world
from runtime import autocast, rng


def work(arch: Arch, rank: int, mask_ratio: float, masks: Masks | None = None) -> tuple[float, float]:
    """Operations an image, 2 a multiply-add, of a lower step and of an upper step (two passes).

    ψ is frozen: no weight gradients, and none into the first block's input. The pretext head is trained: its forward
    costs three times. With `masks`, I-JEPA; its context is taken as a quarter of the patches, about what is left.
    """
    D, L, m = arch.dim, arch.patches, arch.mlp_ratio

    def forward(n: int, dim: int, layers: int, r: int) -> float:
        return layers * ((8 + 4 * m) * n * dim**2 + 4 * n**2 * dim + 8 * n * dim * r)

    def frozen(n: int) -> float:
        backward = arch.depth * ((8 + 4 * m) * n * D**2 + 8 * n**2 * D + 16 * n * D * rank)
        return forward(n, D, arch.depth, rank) + backward - (6 * n * D**2 + 4 * n * D * rank + 2 * n**2 * D) + patches

    def trained(n: int, seen: int, width: int, layers: int, out: int) -> float:
        return 3 * (forward(n, width, layers, 0) + 2 * seen * D * width + 2 * n * width * out)

    patches = 2 * L * D * 3 * arch.patch_size**2
    upper = 2 * frozen(arch.class_token + L)
    if masks is None:
        seen = 1 + int(L * (1 - mask_ratio))
        pixels = 3 * arch.patch_size**2
        return frozen(seen) + trained(1 + L, seen, arch.decoder_dim, arch.decoder_depth, pixels), upper
    seen, asked = L // 4, round(L * sum(masks.target_scale) / 2)
    teacher = forward(L, D, arch.depth, rank) + patches
    predictor = masks.targets * trained(seen + asked, seen, arch.predictor_dim, arch.predictor_depth, D)
    return teacher + masks.contexts * (frozen(seen) + predictor), upper


def budget(cfg: AlignConfig, arch: Arch, task: Task, pool: int) -> dict[str, Any]:
    """What a run will cost, before it starts: steps, parameters, memory, work (2 operations a multiply-add)."""
    b, r = cfg.bilevel, cfg.model.rank or 0
    D, depth = arch.dim, arch.depth
    store = 4 * b.lower_steps * depth * 4 * r * D

    lower, upper = work(arch, r, cfg.lower.mask_ratio, cfg.masks if cfg.model.pretext == "ijepa" else None)
    jepa = cfg.model.pretext == "ijepa"
    width, layers = (arch.predictor_dim, arch.predictor_depth) if jepa else (arch.decoder_dim, arch.decoder_depth)
    head = 12 * layers * width**2
    flop = b.lower_steps * cfg.lower.p_batch * lower + b.upper_steps * cfg.upper.d_batch * upper
    return {
        "images": {"pool": pool, **{part: len(getattr(task, part).targets) for part in ("train", "val", "test")}},
        "missing_images": task.missing,
        "steps": {"lower": b.alternations * b.lower_steps, "upper": b.alternations * b.upper_steps},
        "lora_parameters": 4 * r * D * depth,
        "gradient_store_MB": store / 1e6,
        "checkpoint_MB": 12 * (2 * 4 * r * D * depth + head) / 1e6,
        "TFLOP": b.alternations * flop / 1e12,
        "paper_GPU_GB": paper.MEMORY_GB["BiSSLight", (1, 1, 1)].get(cfg.model.backbone),
        "disk_free_GB": shutil.disk_usage(Path.cwd()).free / 1e9,
    }


# --- memory ----------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Bytes of the storages that operations make while it is on: `now`, and `peak`. Those of `there` do not count."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.drop, key, storage.nbytes())
        return out

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory(cfg: AlignConfig | FinetuneConfig, arch: Arch, task: Task, device: torch.device) -> dict[str, float]:
    """MB of tensors that a run needs at its peak on the device, from the shapes of one step; nothing is computed.

    `peak` is networks + state (trained tensors, AdamW's moments, stored gradients) + the largest of the passes, which
    include their gradients and images. Leaves out what libraries take.
    """
    jepa, peers, piece = cfg.model.pretext == "ijepa", world(), cfg.machine.micro_batch
    assert cfg.model.rank is not None
    classes, validated = len(task.classes), -(-len(task.val.targets) // peers.size)
    with torch.device("meta"):
        vit = build_vit(arch)
        head: nn.Module = ijepa.Predictor(arch) if jepa else mae.Decoder(arch)
    p = 4 * cfg.model.rank * arch.dim

    def images(batch: int) -> int:
        share = -(-batch // peers.size)
        return min(share, piece or share)

    with FakeTensorMode(allow_non_fake_inputs=True):
        vit, head = vit.to_empty(device=device), head.to_empty(device=device)
        backbone = Backbone(vit, recompute=cfg.model.recompute).requires_grad_(False)
        fixed = [*vit.parameters(), *vit.buffers(), *head.parameters(), *head.buffers()]
        theta = torch.empty(arch.depth, p, device=device, requires_grad=True)
        phi_P = {name: torch.empty_like(t, requires_grad=True) for name, t in head.named_parameters()}
        drawn = init_head(arch.dim, classes, rng(0, "x"), cfg.model.head == "batchnorm")
        phi_D = {name: torch.empty(t.shape, device=device, requires_grad=True) for name, t in drawn.items()}

        def step(
            loss: Callable[..., Tensor], phi: Phi, make: Callable[[Tensor], Any], batch: int, twice: bool = False
        ) -> int:
            whole = twice and isinstance(cfg, AlignConfig) and cfg.bilevel.cg_batch == "first"  # as released
            size = -(-batch // peers.size) if whole else images(batch)
            x = torch.empty(size, 3, arch.image_size, arch.image_size, device=device)
            rest = 4 * 3 * arch.image_size**2 * (-(-batch // peers.size) - len(x))  # images that wait for their piece
            batch_ = make(x)
            with Watch([*fixed, theta, *phi.values(), *tree_leaves(tuple(batch_))]) as watch:
                if twice:
                    solve = cg(theta, 1.0, theta, partial(loss, phi=phi, batch=batch_), iterations=1)
                    solve.apply(theta.detach())
                else:
                    gradients(autocast(loss, device, cfg.amp), theta, phi, batch_)
            return int(watch.peak) + rest + nbytes(t for t in tree_leaves(tuple(batch_)) if isinstance(t, Tensor))

        def labelled(x: Tensor) -> Any:
            return x, torch.zeros(len(x), dtype=torch.long, device=device)

        trained, passes, stored = [theta, *phi_D.values()], {}, 0
        if isinstance(cfg, AlignConfig):
            trained += [theta, *phi_P.values()]
            if cfg.bilevel.hypergrad == "mfac" and (cfg.machine.mfac_device == "same" or device.type == "cpu"):
                stored = cfg.bilevel.lower_steps * nbytes([theta]) // peers.size
            passes["lower_pass"] = lower(cfg, backbone, head, arch, step, phi_P)
            if cfg.bilevel.hypergrad == "cg":
                passes["cg_pass"] = lower(cfg, backbone, head, arch, partial(step, twice=True), phi_P)
            passes["upper_pass"] = step(downstream_loss(backbone), phi_D, labelled, cfg.upper.d_batch)
        else:
            passes["pass"] = step(downstream_loss(backbone), phi_D, labelled, cfg.peft.batch)
        x = torch.empty(min(validated, SCORED, piece or SCORED), 3, arch.image_size, arch.image_size, device=device)
        with torch.no_grad(), Watch([*fixed, theta, x]) as watch:
            autocast(partial(features, backbone, theta), device, cfg.amp)(x)
        passes["validation"] = int(watch.peak) + nbytes([x])
        parts = {"networks": nbytes(fixed), "state": 3 * nbytes(trained) + stored, **passes}
    return {name: size / 1e6 for name, size in parts.items()} | {
        "peak": (parts["networks"] + parts["state"] + max(passes.values())) / 1e6
    }


@contextlib.contextmanager
def noting_what_fits(cfg: AlignConfig | FinetuneConfig, arch: Arch, task: Task, device: torch.device) -> Iterator[None]:
    """Where a run has not enough memory on its device, note on the error which --micro-batch has."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        cuda = device.type == "cuda"
        room = torch.cuda.mem_get_info(device)[1] if cuda else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if note := what_fits(cfg, arch, task, device, room / 1e9):
            error.add_note(note)
        raise


def what_fits(
    cfg: AlignConfig | FinetuneConfig, arch: Arch, task: Task, device: torch.device, room: float
) -> str | None:
    """The largest --micro-batch smaller than now that needs less than 0.9 of `room` GB, and what that is."""
    batch = max(cfg.lower.p_batch, cfg.upper.d_batch) if isinstance(cfg, AlignConfig) else cfg.peft.batch
    size = (cfg.machine.micro_batch or batch) // 2
    if cfg.model.head == "batchnorm":  # takes its batch whole
        return None
    while size:
        smaller = cfg.machine.model_copy(update={"micro_batch": size})
        need = memory(cfg.model_copy(update={"machine": smaller}), arch, task, device)["peak"] / 1e3
        if need < 0.9 * room:
            return f"--micro-batch {size} should need {need:.2g} of {room:.2g} GB"
        size //= 2
    return f"no --micro-batch fits into {room:.2g} GB"


def lower(
    cfg: AlignConfig,
    backbone: Backbone,
    head: nn.Module,
    arch: Arch,
    step: Callable[..., int],
    phi_P: Phi,
) -> int:
    """Bytes of a lower step; the masks' sizes are those of a first draw."""
    if isinstance(head, mae.Decoder):
        task = mae.MAE(backbone, head, cfg.lower.mask_ratio)

        def batch(x: Tensor) -> Any:
            return mae.Batch(x, torch.empty(len(x), arch.patches, device=x.device))

        return step(task.loss, phi_P, batch, cfg.lower.p_batch)
    assert isinstance(head, ijepa.Predictor)
    jepa = ijepa.IJEPA(backbone, head, cfg.masks, (cfg.lower.ema, 1), torch.empty(0))
    side = arch.image_size // arch.patch_size
    with unset_fake_temporarily():
        context, targets = ijepa.multiblock(cfg.masks, side, 64, rng(0, "memory"))

    def views(x: Tensor) -> Any:
        n = len(x)
        c, t = (torch.empty(len(m), n, m.shape[2], dtype=torch.long, device=x.device) for m in (context, targets))
        count = len(targets) * len(context) * n
        return ijepa.Batch(x, c, t, torch.empty(count, targets.shape[2], arch.dim, device=x.device))

    return step(jepa.loss, phi_P, views, cfg.lower.p_batch)
