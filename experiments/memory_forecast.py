"""Memory that a step needs, before it is run: its tensors, made without data, are watched.

    python -m experiments.memory_forecast --backbone vit_l16      # lower, upper and CG's passes
    python -m experiments.memory_forecast --backbone vit_l16 --micro-batch 64

MB of tensors in float32 at the peak of one pass of each kind, beyond the networks; AdamW keeps two
moments a trained tensor, and the stored gradients are N_L times θ. What libraries take is left out.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import typer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mae
from bisslight import Passes
from config import BACKBONES, Arch
from experiments.recipe import Backbone
from lora import Backbone as Network
from lora import Examples, downstream_loss, init_head
from support.checkpoints import build_head, build_vit

CLASSES = 200


def main(
    backbone: Backbone = "vit_b16",
    rank: int = 64,
    p_batch: int = 256,
    d_batch: int = 64,
    lower_steps: int = 20,
    micro_batch: int | None = None,
    recompute: bool = False,
) -> None:
    """Print MB of each part, in float32."""
    lower_images = min(p_batch, micro_batch or p_batch)
    upper_images = min(d_batch, micro_batch or d_batch)
    arch = BACKBONES[backbone]
    for name, size in forecast(arch, rank, lower_images, upper_images, lower_steps, recompute):
        print(f"{name}: {size / 1e6:.0f} MB")


def forecast(
    arch: Arch, rank: int, p_batch: int, d_batch: int, lower_steps: int, recompute: bool
) -> list[tuple[str, int]]:
    """Bytes of each part of Algorithm 1."""
    with torch.device("meta"):
        vit = build_vit(arch)
        decoder = build_head(arch, "mae")
    with FakeTensorMode(allow_non_fake_inputs=True):  # shapes without numbers
        vit.to_empty(device="cpu")
        decoder.to_empty(device="cpu")
        network = Network(vit, recompute=recompute).requires_grad_(False)
        task = mae.MAE(network, cast(mae.Decoder, decoder))
        theta = torch.empty(arch.depth, 4 * rank * arch.dim, requires_grad=True)
        phi_P = {name: torch.empty_like(x, requires_grad=True) for name, x in task.phi.items()}
        head = init_head(arch.dim, CLASSES, torch.Generator())
        phi_D = {name: torch.empty_like(x, requires_grad=True) for name, x in head.items()}
        side = arch.image_size
        lower_images = torch.empty(p_batch, 3, side, side)
        upper_images = torch.empty(d_batch, 3, side, side)
        noise = torch.empty(p_batch, task.decoder.patches)
        targets = torch.zeros(d_batch, dtype=torch.long)
        lower = mae.Batch(lower_images, noise)
        upper = Examples(upper_images, targets)
        loss_D = partial(downstream_loss, network)
        passes = Passes()

        def product() -> None:
            passes.hessian(task.loss, theta, phi_P, lower)(theta.detach())

        parts_of_a_step: dict[str, Callable[[], object]] = {
            "lower pass": partial(passes.gradients, task.loss, theta, phi_P, lower),
            "upper pass": partial(passes.gradients, loss_D, theta, phi_D, upper),
            "CG's product": product,
        }
        trained = [theta, theta, *phi_P.values(), *phi_D.values()]  # θ_P and θ_D
        fixed = [*vit.parameters(), *vit.buffers(), *decoder.parameters(), *decoder.buffers()]
        parts = [
            ("networks", nbytes(fixed)),
            ("trained tensors and AdamW's moments", 3 * nbytes(trained)),
            ("stored gradients", lower_steps * nbytes([theta])),
        ]
        batches = [lower_images, upper_images, noise, targets]
        for name, step in parts_of_a_step.items():
            with Watch([*fixed, *trained, *batches]) as watch:
                step()
            parts.append((name, watch.peak))
    return parts


class Watch(TorchDispatchMode):
    """While it is on, counts the bytes of storages that operations make, besides `known` ones."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    # the signature is torch's
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from its first use until it is freed."""
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self.forget, key, storage.nbytes())

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.current -= size


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    typer.run(main)
