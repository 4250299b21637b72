"""How the recorded runs map onto this program: their tensors in our layout, nothing computed."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from conftest import Recorded
from torch import Tensor

from config import Arch
from lora import Backbone, build_vit, from_factors
from mae import MAE, Batch, Decoder
from runtime import trainable


class Recording(NamedTuple):
    """The tiny model that a recorded run used."""

    rec: Recorded
    arch: Arch
    backbone: Backbone
    task: MAE
    theta: Tensor
    phi_P: dict[str, Tensor]
    phi_D: dict[str, Tensor]
    dtype: torch.dtype


def model_of(rec: Recorded, weights: Recorded | None = None, mask_ratio: float = 0.75) -> Recording:
    """Backbone, decoder, θ, φ_P and φ_D of a run under data/official."""
    m, source = rec.meta, weights or rec
    dtype = torch.float32 if m.get("dtype") == "torch.float32" else torch.float64
    arch = Arch(
        image_size=m["img"], patch_size=m["patch"], dim=m["dim"], depth=m["depth"], heads=m["heads"],
        decoder_dim=m["ddim"], decoder_depth=m["ddepth"], decoder_heads=m["dheads"],
    )  # fmt: skip
    state = source.group("encoder")
    for i in range(arch.depth):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"blocks.{i}.attn.qkv.{x}.{kind}") for x in "qkv"]
            state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
    vit, decoder = build_vit(arch), Decoder(arch)
    vit.load_state_dict(state)
    if source.group("decoder"):  # recordings of PEFT have none
        decoder.load_state_dict(source.group("decoder"))
    backbone = Backbone(vit.to(dtype).requires_grad_(False))
    task = MAE(backbone, decoder.to(dtype), mask_ratio)
    lora = source.group("lora_init")
    flat = torch.cat(
        [lora[f"blocks.{i}.attn.qkv.{x}.lora_{f}"].flatten() for i in range(arch.depth) for x in "qv" for f in "AB"]
    )
    theta = to_theta(flat, arch.depth, arch.dim).to(dtype).requires_grad_()
    phi_D = trainable({k: v.to(dtype) for k, v in source.group("head_init").items()})
    return Recording(rec, arch, backbone, task, theta, trainable(task.phi), phi_D, dtype)


def to_theta(flat: Tensor, depth: int, dim: int) -> Tensor:
    """Recorded order, per layer A_q (r, dim), B_q (dim, r), A_v, B_v row-major, as θ (K, 4 r dim)."""
    parts = flat.unflatten(-1, (depth, 4, -1)).unbind(-2)
    A_q, B_q, A_v, B_v = (
        part.unflatten(-1, (-1, dim) if i % 2 == 0 else (dim, -1)) for i, part in enumerate(parts)
    )  # (..., K, r, dim) or (..., K, dim, r)
    if flat.ndim == 1:
        return from_factors(A_q, B_q, A_v, B_v)
    return torch.stack([to_theta(row, depth, dim) for row in flat])


def head_flat(phi: dict[str, Tensor]) -> Tensor:
    """Recorded order of a head: weight, bias."""
    return torch.cat([phi["weight"].flatten(), phi["bias"]])


def lower_batches(r: Recording) -> Iterator[Batch]:
    """The recorded pretext batches with their recorded masking noise."""
    for images, noise in zip(r.rec["lower_images_i8"], r.rec["mask_noise"], strict=False):
        yield Batch(images.to(r.dtype) / 32, noise.to(r.dtype))


def upper_batches(r: Recording) -> Iterator[tuple[tuple[Tensor, Tensor], None]]:
    """The recorded downstream batches; no drop path."""
    for images, labels in zip(r.rec["upper_images_i8"], r.rec["upper_labels"], strict=True):
        yield (images.to(r.dtype) / 32, labels), None
