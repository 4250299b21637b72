"""The cost estimate against a table that was measured with a FLOP counter."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mae
from config import BACKBONES, AlignConfig, Data, Model
from cost import budget, work
from data import Split, Task
from lora import Backbone, logits

NOTHING = Split([Path("x")], torch.zeros(1))


@pytest.mark.parametrize(
    ("backbone", "lora", "alternation"),
    [("vit_b16", 2_359_296, 332.5), ("vit_l16", 6_291_456, 749.7), ("vit_h14", 10_485_760, 1796.3)],
)
def test_the_budget_at_the_papers_settings(backbone: str, lora: int, alternation: float) -> None:
    """TFLOP an alternation, from torch's FLOP counter on the official sizes; the formula is exact but for rounding."""
    defaults = BACKBONES[backbone]
    cfg = AlignConfig(model=Model(backbone=backbone, rank=defaults.rank), data=Data(dataset="x"))
    about = budget(cfg, defaults.arch, Task("x", NOTHING, NOTHING, NOTHING, ["a", "b"]), 1_281_167)
    assert about["lora_parameters"] == lora
    assert about["steps"] == {"lower": 10_000, "upper": 4_000}
    assert about["TFLOP"] / 500 == pytest.approx(alternation, rel=0.002)
    assert about["gradient_store_MB"] == pytest.approx(20 * 4 * lora / 1e6)


def counted(name: str, pretext: bool) -> float:
    """Operations of one image's passes by torch's own counter, on the meta device, math attention."""
    arch = BACKBONES[name].arch
    with torch.device("meta"):
        backbone = Backbone(mae.build_vit(arch)).requires_grad_(False)
        decoder = mae.Decoder(arch)
        theta = torch.empty(arch.depth, 4 * 64 * arch.dim, requires_grad=True)
        images = torch.empty(1, 3, arch.image_size, arch.image_size)
        phi_D = {"weight": torch.empty(200, arch.dim, requires_grad=True), "bias": torch.empty(200, requires_grad=True)}
        task = mae.MAE(backbone, decoder)
        noise = torch.empty(1, arch.patches)
    phi_P = {k: v.detach().requires_grad_() for k, v in task.phi.items()}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        if pretext:
            task.loss(theta, phi_P, mae.Batch(images, noise)).backward()  # the counter does not go with autograd.grad
        else:
            logits(backbone, theta, phi_D, images).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["vit_b16", "vit_l16", "vit_h14"])
def test_the_passes_do_no_more_than_they_must(name: str) -> None:
    """Measured over analytic within 2 %: no weight gradients of ψ, no gradient into the first block's input."""
    lower, upper = work(BACKBONES[name].arch, 64, 0.75)
    assert counted(name, True) / lower == pytest.approx(1, abs=0.02)
    assert counted(name, False) / (upper / 2) == pytest.approx(1, abs=0.02)
