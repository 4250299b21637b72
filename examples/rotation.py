r"""A third pretext task in one file: which way up is this image (Gidaris et al. 2018)? No core module is touched.

    bisslight pretrain --pool quilts --backbone vit_mini --epochs 30 --warmup-epochs 4 --batch 64 --base-lr 8e-3 \
        --beta2 0.999 --mask-ratio 0.3 --out runs/pre
    python examples/rotation.py runs/pre runs/rotation
    bisslight finetune --from runs/rotation --lr 3e-3 --seeds 2

It takes MAE's place in Algorithm 1: same backbone, another L^P. `bisslight.PretextTask` says what a task has to offer;
a larger one (contrastive, say) differs in `prepare` and `loss` only, and says so where its loss is no mean over images.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import stages
from config import AlignConfig, Bilevel, Data, Lower, Model, Upper
from loading import Loaded
from lora import Backbone, Phi, features
from runtime import rng


class Batch(NamedTuple):
    """Rotated images (B, 3, H, W), and by how many quarter turns (B,)."""

    images: Tensor
    turns: Tensor


class Rotation:
    """L^P(θ, φ_P): cross entropy of a linear layer, φ_P, that tells quarter turns apart."""

    def __init__(self, backbone: Backbone, generator: torch.Generator) -> None:
        self.backbone = backbone
        weight = torch.randn(4, backbone.dim, generator=generator) / backbone.dim**0.5
        self.phi: Phi = {"weight": weight, "bias": torch.zeros(4)}

    def prepare(self, images: Tensor, rng: torch.Generator, first: int = 0, whole: int | None = None) -> Batch:
        turns = torch.randint(4, (whole or len(images),), generator=rng)[first : first + len(images)]
        rotated = [torch.rot90(image, int(k), (1, 2)) for image, k in zip(images, turns, strict=True)]
        return Batch(torch.stack(rotated), turns.to(images.device))

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        x = features(self.backbone, theta, batch.images)
        return F.cross_entropy(F.linear(x, phi["weight"], phi["bias"]), batch.turns)

    def check(self, batch: Batch) -> None:
        """Any backbone will do."""

    def after_step(self, theta_P: Tensor | None) -> None:
        """No teacher."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def rotation(cfg: AlignConfig, loaded: Loaded, theta: Tensor) -> Rotation:
    """What `stages.align` asks for: the task around a loaded backbone."""
    return Rotation(loaded.backbone, rng(cfg.seed, "rotation"))


def main(weights: Path, out: Path, alternations: int = 20) -> None:
    """Align vit_mini with the embedded dataset; every other setting is a field of `config.AlignConfig`."""
    cfg = AlignConfig(
        model=Model(backbone="vit_mini", weights=weights),
        data=Data(dataset="quilts"),
        lower=Lower(p_batch=64, p_lr=1e-3, decoder_lr=1e-2),  # φ_P starts at random here, not from a checkpoint
        upper=Upper(d_batch=32, d_lr=1e-2),
        bilevel=Bilevel(alternations=alternations, lower_steps=5, upper_steps=5, warmup=2),
    )
    result = stages.align(cfg, stages.Options(out=out), rotation)
    print(f"validation accuracy {result['val_P']['accuracy']:.1f} %, {result['adapter']}")


if __name__ == "__main__":
    typer.run(main)
