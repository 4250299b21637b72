"""Would torch.compile win? A gradient step with compiled blocks against eager mode, interleaved.

    python results/compile.py --batch 8

Prints the seconds of compiling, and of each step the best of six, for all patches (the upper
level's pass) and for a quarter of them (the lower level's). Depth is cut to four; blocks are alike.
"""

import sys
import time
from pathlib import Path

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import lora
from config import BACKBONES
from data import rng
from support.checkpoints import build_vit

DEPTH, REPEATS = 4, 6


def main(batch: int = 8, backbone: str = "vit_b16") -> None:
    """Times on whatever device torch takes by default."""
    arch = BACKBONES[backbone]._replace(depth=DEPTH)
    network = lora.Backbone(build_vit(arch)).requires_grad_(False)
    theta = lora.init_theta(DEPTH, 64, arch.dim, rng(0, "lora")).requires_grad_()
    images = torch.randn(batch, 3, arch.image_size, arch.image_size, generator=rng(0, "images"))
    L = (arch.image_size // arch.patch_size) ** 2
    quarter = torch.stack([torch.randperm(L, generator=rng(0, i))[: L // 4] for i in range(batch)])
    weights = torch.randn(arch.dim, generator=rng(0, "weights"))
    blocks = {"eager": lora.block_forward, "compiled": torch.compile(lora.block_forward)}

    def step(block: str, keep: Tensor | None) -> tuple[float, Tensor]:
        lora.block_forward = blocks[block]
        began = time.perf_counter()
        (g,) = torch.autograd.grad((network(images, theta, keep)[:, 0] * weights).mean(), theta)
        return time.perf_counter() - began, g

    for name, keep in (("all patches", None), ("a quarter", quarter)):
        _, expected = step("eager", keep)
        seconds, found = step("compiled", keep)
        error = float((found - expected).abs().max() / expected.abs().max())
        best = {block: min(step(block, keep)[0] for _ in range(REPEATS)) for block in blocks}
        both = ", ".join(f"{block} {value:.3f} s" for block, value in best.items())
        print(f"{name}: compiling {seconds:.0f} s, error {error:.1e}; {both}")


if __name__ == "__main__":
    typer.run(main)
