"""Would torch.compile win? A gradient step with compiled blocks against eager mode, by turns.

    python -m experiments.compile --batch 8

Prints the seconds of compiling, and of each step the best of six, for all patches (the upper
level's pass) and for a quarter of them (the lower level's). Depth is cut to four; blocks are alike.
"""

import time
from collections.abc import Callable

import torch
import typer
from torch import Tensor

import lora
from config import BACKBONES, Arch
from data import rng
from experiments.recipe import Backbone
from support.checkpoints import build_vit

DEPTH = 4
REPEATS = 6


def main(batch: int = 8, backbone: Backbone = "vit_b16", device: str = "cpu") -> None:
    """Time both ways on the same random images."""
    arch = BACKBONES[backbone]._replace(depth=DEPTH)
    compiled = torch.compile(lora.block_forward)
    step = make_step(arch, batch, torch.device(device))
    patches = (arch.image_size // arch.patch_size) ** 2
    kept = [torch.randperm(patches, generator=rng(0, i))[: patches // 4] for i in range(batch)]
    quarter = torch.stack(kept).to(device)  # (B, L / 4)
    for name, keep in (("all patches", None), ("a quarter", quarter)):
        _, expected = step(lora.block_forward, keep)
        seconds, gradient = step(compiled, keep)  # compiles first
        error = float((gradient - expected).abs().max() / expected.abs().max())
        eager_seconds = []
        compiled_seconds = []
        for _ in range(REPEATS):
            eager_seconds.append(step(lora.block_forward, keep)[0])
            compiled_seconds.append(step(compiled, keep)[0])
        best = f"eager {min(eager_seconds):.3f} s, compiled {min(compiled_seconds):.3f} s"
        print(f"{name}: compiling {seconds:.0f} s, error {error:.1e}; {best}")


Block = Callable[..., Tensor]
Step = Callable[[Block, Tensor | None], tuple[float, Tensor]]


def make_step(arch: Arch, batch: int, device: torch.device) -> Step:
    """A gradient step of the network with a given way of computing a block."""
    network = lora.Backbone(build_vit(arch)).requires_grad_(False).to(device)
    theta = lora.init_theta(DEPTH, 64, arch.dim, rng(0, "lora")).to(device).requires_grad_()
    images = torch.randn(batch, 3, arch.image_size, arch.image_size, generator=rng(0, "images"))
    images = images.to(device)
    weights = torch.randn(arch.dim, generator=rng(0, "weights")).to(device)

    def step(block: Block, keep: Tensor | None) -> tuple[float, Tensor]:
        eager = lora.block_forward
        lora.block_forward = block
        began = time.perf_counter()
        loss = (network(images, theta, keep)[:, 0] * weights).mean()
        (gradient,) = torch.autograd.grad(loss, theta)
        float(gradient.sum())  # waits until a GPU has done it
        seconds = time.perf_counter() - began
        lora.block_forward = eager
        return seconds, gradient

    return step


if __name__ == "__main__":
    typer.run(main)
