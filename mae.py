"""Masked autoencoding, the paper's pretext task: L^P(θ, φ_P) of He et al. 2022 on the functional backbone.

A random share of the patches is removed, the backbone sees the rest, and a small decoder predicts the removed pixels.

    φ_P     phi_P   the decoder's trainable tensors, mask token included; its position table is fixed
    L       number of patches of an image; n = int(L (1 − mask ratio)) of them stay
    noise   (B, L) uniform: all of the task's randomness, drawn in `prepare`, so a step can be replayed

Names and shapes of the state dict are the official ones, so official files are read and written as they are.
Leaves out: the GAN-loss variant and fine-tuning as in the MAE paper.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from config import BACKBONES, Arch, UsageError
from lora import Backbone, Phi, block_forward, build_vit, misfit, sincos, sizes_of
from runtime import load_tensors


class Batch(NamedTuple):
    """A prepared pretext batch."""

    images: Tensor  # (B, 3, H, W)
    noise: Tensor  # (B, L)


class MAE:
    """The pretext task for Algorithm 1; satisfies `bisslight.PretextTask`.

    Args:
        backbone: f_θ. Pretext passes have no drop path.
        decoder: where φ_P's shapes and fixed tables come from; `loss` takes φ_P as an argument.
        mask_ratio: 0.75 in the paper.
        norm_pix: predict pixels standardised per patch (the paper) or raw ones.
    """

    def __init__(self, backbone: Backbone, decoder: "Decoder", mask_ratio: float = 0.75, norm_pix: bool = True) -> None:
        self.backbone, self.decoder, self.mask_ratio, self.norm_pix = backbone, decoder, mask_ratio, norm_pix
        self.patches = backbone.vit.patch_embed.num_patches
        if not 1 <= int(self.patches * (1 - mask_ratio)) < self.patches:
            raise UsageError(f"mask ratio {mask_ratio}: leaves none or all of the {self.patches} patches visible")

    @property
    def phi(self) -> Phi:
        """φ_P as the decoder holds it, by official name."""
        return dict(self.decoder.named_parameters())

    def prepare(self, images: Tensor, rng: torch.Generator, first: int = 0, whole: int | None = None) -> Batch:
        """Draw the masking noise of one step, for the whole batch that the images are a part of."""
        noise = torch.rand(whole or len(images), self.patches, generator=rng)[first : first + len(images)]
        return Batch(images, noise.to(images.device, non_blocking=True))

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """L^P(θ, φ_P), a scalar: squared error, mean over a patch's pixels, then over the batch's removed patches."""
        return self.error(*self.predict(theta, phi, batch), batch, self.norm_pix)

    def error(self, prediction: Tensor, mask: Tensor, batch: Batch, norm_pix: bool) -> Tensor:
        """The loss of given predictions, against standardised or raw pixels."""
        target = patchify(batch.images, self.decoder.patch)
        if norm_pix:
            target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        per_patch = (prediction.to(target.dtype) - target).square().mean(-1)  # (B, L)
        return (per_patch * mask).sum() / mask.sum()

    def predict(self, theta: Tensor | None, phi: Phi, batch: Batch) -> tuple[Tensor, Tensor]:
        """Predicted pixels of every patch (B, L, patch² 3) and the mask (B, L), 1 where a patch was removed."""
        keep, restore = masking(batch.noise, self.mask_ratio)
        latent = self.backbone(batch.images, theta, keep)  # (B, 1 + n, dim)
        prediction = functional_call(self.decoder, phi, (latent, restore))
        return prediction, (restore >= keep.shape[1]).to(batch.images.dtype)

    @torch.no_grad()
    def check(self, batch: Batch) -> None:
        """Refuse (UsageError) a decoder that predicts raw pixels; its keys and shapes are the right ones.

        Predicting zero errs 1 on standardised pixels. A decoder trained on raw pixels does worse than that there, and
        much better than zero on raw ones; a random decoder is good at neither, and passes.
        """
        prediction, mask = self.predict(None, self.phi, batch)
        standardised, raw = (float(self.error(prediction, mask, batch, norm_pix)) for norm_pix in (True, False))
        if standardised > 1 and raw < float(self.error(0 * prediction, mask, batch, False)) / 2:
            raise UsageError(
                f"--weights: the decoder errs {standardised:.2f} on standardised and {raw:.2f} on raw pixels, so it "
                "was trained on raw ones; take mae_pretrain_vit_{base,large,huge}_full.pth"
            )

    def after_step(self, theta_P: Tensor | None) -> None:
        """MAE has nothing to update after a lower step."""

    def state_dict(self) -> dict[str, Any]:
        """MAE keeps no state besides θ_P and φ_P."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def checkpoint(self, arch: Arch, backbone: str) -> dict[str, Any]:
        """{'model': official names and order} plus the sizes that tensors cannot tell, as JSON text."""
        state = {**self.backbone.vit.state_dict(), **self.decoder.state_dict()}
        about = {"backbone": backbone, "arch": arch.model_dump(), "norm_pix": self.norm_pix}
        return {"model": {k: v.detach().cpu() for k, v in state.items()}, "bisslight": json.dumps(about)}


def masking(noise: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor]:
    """Which patches stay.

    Returns keep (B, n), the patches with the lowest noise in that shuffled order, and restore (B, L), each one's place.

    >>> masking(torch.tensor([[0.9, 0.1, 0.4, 0.7]]), 0.5)
    (tensor([[1, 2]]), tensor([[3, 0, 1, 2]]))
    """
    shuffle = noise.argsort(1)
    return shuffle[:, : int(noise.shape[1] * (1 - mask_ratio))], shuffle.argsort(1)


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, 3, H, W) -> (B, L, patch² 3): patches in raster order; inside one: pixel row, pixel column, channel."""
    B, C, H, W = images.shape
    x = images.reshape(B, C, H // patch, patch, W // patch, patch)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, (H // patch) * (W // patch), patch * patch * C)


def unpatchify(patches: Tensor, patch: int) -> Tensor:
    """Inverse of `patchify` for square images."""
    B, L, _ = patches.shape
    side = math.isqrt(L)
    x = patches.reshape(B, side, side, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(B, x.shape[1], side * patch, side * patch)


@torch.no_grad()
def reconstruct(task: MAE, theta: Tensor | None, phi: Phi, batch: Batch) -> tuple[Tensor, Tensor]:
    """For the eye: (masked images, images with the removed patches predicted), in normalised pixels.

    Predictions are standardised per patch; each borrows its true patch's mean and deviation, as MAE's figures do.
    """
    prediction, mask = task.predict(theta, phi, batch)
    true = patchify(batch.images, task.decoder.patch)
    if task.norm_pix:
        prediction = prediction * (true.var(-1, keepdim=True) + 1e-6).sqrt() + true.mean(-1, keepdim=True)
    m = mask[..., None]
    return unpatchify(true * (1 - m), task.decoder.patch), unpatchify(
        true * (1 - m) + prediction * m, task.decoder.patch
    )


class Decoder(nn.Module):
    """h^P, the official MAE decoder: latent tokens of the visible patches -> pixels of all patches."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.patch = arch.patch_size
        self.mask_token = nn.Parameter(torch.zeros(1, 1, arch.decoder_dim))
        self.decoder_pos_embed: Tensor
        self.register_buffer("decoder_pos_embed", torch.zeros(1, 1 + arch.patches, arch.decoder_dim))
        self.decoder_embed = nn.Linear(arch.dim, arch.decoder_dim)
        self.decoder_blocks = nn.ModuleList(
            Block(arch.decoder_dim, arch.decoder_heads, arch.mlp_ratio, qkv_bias=True)
            for _ in range(arch.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(arch.decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(arch.decoder_dim, arch.patch_size**2 * 3)

    def forward(self, latent: Tensor, restore: Tensor) -> Tensor:
        """Latent (B, 1 + n, dim), restore (B, L) -> (B, L, patch² 3)."""
        x = self.decoder_embed(latent)
        cls, visible = x[:, :1], x[:, 1:]
        removed = self.mask_token.to(x.dtype).expand(len(x), restore.shape[1] - visible.shape[1], -1)
        patches = torch.cat([visible, removed], 1)
        patches = patches.gather(1, restore[..., None].expand(-1, -1, x.shape[-1]))  # back to raster order
        x = torch.cat([cls, patches], 1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block_forward(block, x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]  # type: ignore[no-any-return]


# --- from scratch ----------------------------------------------------------------------------------------------------


def init(arch: Arch, rng: torch.Generator) -> tuple[VisionTransformer, Decoder]:
    """MAE's initialisation: Xavier-uniform matrices, N(0, 0.02) tokens, sine-cosine positions, zero biases."""
    vit, decoder = build_vit(arch), Decoder(arch)
    assert vit.cls_token is not None and vit.pos_embed is not None
    init_layers([*vit.modules(), *decoder.modules()], rng)
    nn.init.normal_(vit.cls_token, std=0.02, generator=rng)
    with torch.no_grad():
        vit.pos_embed.copy_(sincos(arch.dim, arch.image_size // arch.patch_size))
    return vit, init_decoder_tables(decoder, arch, rng)


def init_decoder(arch: Arch, rng: torch.Generator) -> Decoder:
    """A decoder from scratch for a backbone that has been trained: what the released program does."""
    decoder = Decoder(arch)
    init_layers(decoder.modules(), rng)
    return init_decoder_tables(decoder, arch, rng)


def init_layers(modules: Iterable[nn.Module], rng: torch.Generator) -> None:
    """Matrices and convolutions Xavier-uniform, biases zero, LayerNorms one and zero."""
    for module in modules:
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.detach().view(len(module.weight), -1), generator=rng)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()


def init_decoder_tables(decoder: Decoder, arch: Arch, rng: torch.Generator) -> Decoder:
    """The mask token and the position table."""
    nn.init.normal_(decoder.mask_token, std=0.02, generator=rng)
    decoder.decoder_pos_embed.copy_(sincos(arch.decoder_dim, arch.image_size // arch.patch_size))
    return decoder


def schedule(
    epochs: float, warmup: float, steps_per_epoch: int, min_lr: float, start: float = 0.0
) -> Callable[[int, float], float]:
    """MAE's rate of step k = 1, 2 ...: linear from start · base (0), then half a cosine, on fractional epochs."""

    def rate(k: int, base: float) -> float:
        epoch = (k - 1) / steps_per_epoch
        if epoch < warmup:
            return base * (start + (1 - start) * epoch / warmup)
        return min_lr + (base - min_lr) * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))

    return rate


# --- checkpoints -----------------------------------------------------------------------------------------------------


def is_decoder(key: str) -> bool:
    """Official names: everything of the decoder starts with `decoder_`, but for the mask token."""
    return key.startswith("decoder_") or key == "mask_token"


def load(
    path: Path, backbone: str, image_size: int | None = None, patch_size: int | None = None
) -> tuple[VisionTransformer, Decoder, Arch]:
    """Encoder, decoder and sizes from a full MAE checkpoint, official or of `pretrain`.

    Every key and shape of both is checked. UsageError explains a file of another family: encoder only, raw pixels,
    Hugging Face names, I-JEPA, a LoRA adapter, or another size of ViT.
    """
    data = load_tensors(path)
    model = family(path, data)
    arch = sizes_of(path, data, backbone, BACKBONES[backbone].arch, image_size, patch_size)
    with torch.device("meta"):
        vit, decoder = build_vit(arch), Decoder(arch)
    if wrong := misfit({**vit.state_dict(), **decoder.state_dict()}, model):
        raise UsageError(f"{path}: is not a full MAE file of {backbone}: {wrong}{sizes_hint(model)}")
    vit.load_state_dict({k: v.float() for k, v in model.items() if not is_decoder(k)}, assign=True)
    decoder.load_state_dict({k: v.float() for k, v in model.items() if is_decoder(k)}, assign=True)
    return vit, decoder, arch


def sizes_hint(found: Mapping[str, Tensor]) -> str:
    """Whose sizes a file has, if that is known."""
    width = found["cls_token"].shape[-1] if "cls_token" in found else None
    depth = sum(k.startswith("blocks.") and k.endswith("norm1.weight") for k in found)
    fits = [name for name, d in BACKBONES.items() if (d.arch.dim, d.arch.depth) == (width, depth)]
    return f"; width {width} and depth {depth}" + (f" fit --backbone {fits[0]}" if fits else "")


def family(path: Path, data: Any) -> dict[str, Tensor]:
    """The state dict of a full MAE file, or a UsageError that says what the file is instead and which one to take."""
    want = "take mae_pretrain_vit_{base,large,huge}_full.pth, encoder and decoder for normalised pixels"
    keys = set(data) if isinstance(data, dict) else set()
    if {"encoder", "predictor"} <= keys:
        raise UsageError(f"{path}: is an I-JEPA checkpoint, give --pretext ijepa; or {want}")
    model = data["model"] if "model" in keys else data
    if not isinstance(model, dict) or not all(isinstance(v, Tensor) for v in model.values()) or not model:
        raise UsageError(f"{path}: holds no {{'model': ...}} state dict; {want}")
    names: dict[str, Tensor] = dict(model)
    if any(k.startswith(("vit.", "decoder.decoder_")) for k in names):
        raise UsageError(f"{path}: has Hugging Face names, whose decoder predicts raw pixels; {want}")
    if any("lora_" in k for k in names):
        raise UsageError(f"{path}: is a LoRA adapter, not a backbone; {want}")
    if "mae_visualize" in path.name:
        raise UsageError(f"{path}: is a `visualize` file, its decoder predicts raw pixels; {want}")
    if "cls_token" in names and not any(map(is_decoder, names)):
        raise UsageError(
            f"{path}: holds the encoder only, the pretext task needs the decoder too; {want}. "
            "For finetune alone, an encoder can be given as --backbone timm:vit_base_patch16_224 or its like"
        )
    return names
