"""Memory that a step needs, before it is run: its tensors, made without data, are watched.

    python results/memory.py --backbone vit_l16                      # lower, upper and CG's passes
    python results/memory.py --backbone vit_l16 --micro-batch 64

MB of tensors at the peak of one pass of each kind, beyond the networks; AdamW keeps two moments a
trained tensor, and the stored gradients are N_L times θ. What libraries take is left out.
"""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import typer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))

import mae
from bisslight import gradients, hessian
from config import BACKBONES
from lora import Backbone, Examples, downstream_loss
from support.checkpoints import build_head, build_vit


class Watch(TorchDispatchMode):
    """Bytes of the storages that operations make while it is on, beside those of `there`."""

    def __init__(self, there: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.known:
                    self.known.add(key)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.drop, key, storage.nbytes())
        return out

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main(
    backbone: str = "vit_b16",
    rank: int = 64,
    p_batch: int = 256,
    d_batch: int = 64,
    lower_steps: int = 20,
    micro_batch: int = 0,
    recompute: bool = False,
) -> None:
    """Print MB of each part, in float32."""
    arch, classes = BACKBONES[backbone], 200
    pieces = [min(batch, micro_batch or batch) for batch in (p_batch, d_batch)]
    with torch.device("meta"):
        vit, decoder = build_vit(arch), build_head(arch, "mae")
    with FakeTensorMode(allow_non_fake_inputs=True):
        vit, decoder = vit.to_empty(device="cpu"), decoder.to_empty(device="cpu")
        network = Backbone(vit, recompute=recompute).requires_grad_(False)
        task = mae.MAE(network, cast(mae.Decoder, decoder))
        theta = torch.empty(arch.depth, 4 * rank * arch.dim, requires_grad=True)
        phi_P = {name: torch.empty_like(x, requires_grad=True) for name, x in task.phi.items()}
        shapes = {"weight": (classes, arch.dim), "bias": (classes,)}
        phi_D = {name: torch.empty(shape, requires_grad=True) for name, shape in shapes.items()}
        images = [torch.empty(n, 3, arch.image_size, arch.image_size) for n in pieces]
        noise = torch.empty(pieces[0], task.decoder.patches)
        lower, loss_D = mae.Batch(images[0], noise), partial(downstream_loss, network)
        upper = Examples(images[1], torch.zeros(pieces[1], dtype=torch.long))
        passes: dict[str, Callable[[], Any]] = {
            "lower pass": partial(gradients, task.loss, theta, phi_P, lower),
            "upper pass": partial(gradients, loss_D, theta, phi_D, upper),
            "CG's product": lambda: hessian(task.loss, theta, phi_P, lower)(theta.detach()),
        }
        trained = [theta, theta, *phi_P.values(), *phi_D.values()]
        fixed = [*vit.parameters(), *vit.buffers(), *decoder.parameters(), *decoder.buffers()]
        parts = {
            "networks": nbytes(fixed),
            "trained tensors and AdamW's moments": 3 * nbytes(trained),
            "stored gradients": lower_steps * nbytes([theta]),
        }
        for name, step in passes.items():
            with Watch([*fixed, *trained, *images, noise, upper.targets]) as watch:
                step()
            parts[name] = watch.peak
    for name, size in parts.items():
        print(f"{name}: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    typer.run(main)
