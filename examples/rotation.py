r"""A pretext task of your own: which way up is this image (Gidaris et al. 2018)?

    bisslight align --pretext examples/rotation.py:Rotation --backbone vit_mini \
        --weights support/omniglot.pth --dataset omniglot:Greek --alternations 20 --lower-steps 5 \
        --upper-steps 3 --warmup 2 --p-lr 1e-2 --phi-p-lr 1e-2 --d-lr 1e-2 --out runs/rotation
    bisslight finetune --from runs/rotation --lr 1e-2 --epochs 25 --batch 32 --seeds 2

It takes MAE's place in Algorithm 1: same backbone, another L^P. --phi-p-lr is higher than usual,
since this head starts at random, not from a checkpoint. `bisslight.PretextTask` says what a class
has to offer.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from head import Phi, features
from lora import Backbone


class Batch(NamedTuple):
    """Rotated images (B, 3, H, W), and by how many quarter turns (B,)."""

    images: Tensor
    turns: Tensor


class Rotation:
    """L^P(θ, φ_P): cross entropy of a linear layer, φ_P, that tells quarter turns apart.

    Args:
        backbone: the network, whose features the layer gets.
        settings: those of `align`; this task needs none.
        rng: makes the start of the layer.
    """

    def __init__(self, backbone: Backbone, settings: object, rng: torch.Generator) -> None:
        self.backbone = backbone
        weight = torch.randn(4, backbone.dim, generator=rng) / backbone.dim**0.5
        self.phi: Phi = {"weight": weight, "bias": torch.zeros(4)}
        self.state: dict[str, Tensor] = {}  # no teacher or the like

    def draw(self, B: int, rng: torch.Generator) -> tuple[Tensor]:
        """By how many quarter turns, 0 to 3, each of B images is turned: (B,)."""
        return (torch.randint(4, (B,), generator=rng),)

    def prepare(self, images: Tensor, turns: Tensor) -> Batch:
        """Turn each image (3, H, W); images are square, so they still fit into one tensor."""
        pairs = zip(images, turns.tolist(), strict=True)
        turned = [torch.rot90(image, k, (1, 2)) for image, k in pairs]
        return Batch(torch.stack(turned), turns)

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """The cross entropy, as a mean over the images."""
        x = features(self.backbone, theta, batch.images)
        return F.cross_entropy(F.linear(x, phi["weight"], phi["bias"]), batch.turns)

    def after_step(self, theta_P: Tensor | None) -> None:
        """Nothing follows θ_P."""
