"""Masked autoencoding, the paper's pretext task: L^P(θ, φ_P) of He et al. 2022 on any backbone.

The backbone sees a part of the patches of an image, and a small decoder predicts the other ones.

    φ_P     phi_P   the decoder's trainable tensors and mask token; its position table is fixed
    B       number of images of a batch; an image has `patches`, int(patches · (1 − mask ratio)) of
            them are `kept`
    noise   (B, patches) uniform, the only random numbers: the patches with the least noise stay

The backbone is a function (images, theta, keep) -> tokens of the patches `keep`, behind a prefix
that no mask removes: the class token, and registers if it has them (`lora.Backbone`). The networks'
tensors have the official names and shapes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.func import functional_call

Phi = dict[str, Tensor]  # a head's trainable tensors by name
Encoder = Callable[[Tensor, Tensor | None, Tensor], Tensor]  # (images, theta, keep) -> tokens


class Batch(NamedTuple):
    """A prepared pretext batch."""

    images: Tensor  # (B, 3, height, width)
    noise: Tensor  # (B, patches)


class MAE:
    """The pretext task for Algorithm 1 (`bisslight.PretextTask`).

    Args:
        backbone: f_θ. Pretext passes have no drop path.
        decoder: φ_P's start and the position table; `loss` takes φ_P as an argument.
        mask_ratio: share of the patches that are removed.
        norm_pix: predict pixels standardised in each patch, as in the paper, or raw ones.

    ValueError where all or no patches would be removed, or where the decoder expects more or fewer
    tokens before those of the patches than the backbone says that it has.
    """

    def __init__(
        self, backbone: Encoder, decoder: "Decoder", mask_ratio: float = 0.75, norm_pix: bool = True
    ) -> None:
        self.backbone = backbone
        self.decoder = decoder
        self.mask_ratio = mask_ratio
        self.norm_pix = norm_pix
        self.phi: Phi = dict(decoder.named_parameters())
        self.state: dict[str, Tensor] = {}  # nothing besides θ_P and φ_P
        if not 1 <= int(decoder.patches * (1 - mask_ratio)) < decoder.patches:
            raise ValueError(f"mask ratio {mask_ratio}: leaves none or all of the patches visible")
        prefix = getattr(backbone, "prefix", decoder.prefix)  # not every backbone says it
        if prefix != decoder.prefix:
            raise ValueError(
                f"MAE: the backbone has {prefix} tokens before those of the patches, the decoder "
                f"was made for {decoder.prefix}"
            )

    def draw(self, B: int, rng: torch.Generator) -> tuple[Tensor]:
        """The noise of B images, (B, patches)."""
        return (torch.rand(B, self.decoder.patches, generator=rng),)

    def prepare(self, images: Tensor, noise: Tensor) -> Batch:
        """The batch as it is: its target is made from the images, in `loss`."""
        return Batch(images, noise)

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """L^P(θ, φ_P): squared error, mean over the pixels of a patch and all removed patches."""
        prediction, mask = self.predict(theta, phi, batch)
        target = patchify(batch.images, self.decoder.patch_size)
        if self.norm_pix:  # of each patch; official MAE: unbiased variance, eps 1e-6
            variance, mean = torch.var_mean(target, -1, keepdim=True)
            target = (target - mean) / (variance + 1e-6).sqrt()
        per_patch = (prediction.to(target.dtype) - target).square().mean(-1)  # (B, patches)
        return (per_patch * mask).sum() / mask.sum()

    def predict(self, theta: Tensor | None, phi: Phi, batch: Batch) -> tuple[Tensor, Tensor]:
        """Predicted pixels (B, patches, patch_size² · 3); mask (B, patches), 1 where removed."""
        keep, restore = masking(batch.noise, self.mask_ratio)
        latent = self.backbone(batch.images, theta, keep)  # (B, prefix + kept, dim)
        prediction = functional_call(self.decoder, phi, (latent, restore))
        return prediction, (restore >= keep.shape[1]).to(batch.images.dtype)

    def after_step(self, theta_P: Tensor | None) -> None:
        """Nothing follows θ_P."""

    @torch.no_grad()
    def reconstruct(self, theta: Tensor | None, phi: Phi, batch: Batch) -> tuple[Tensor, Tensor]:
        """The images with removed patches blank, and predicted, as in MAE's figures.

        Both (B, 3, height, width).
        """
        prediction, mask = self.predict(theta, phi, batch)
        size = self.decoder.patch_size
        true = patchify(batch.images, size)  # (B, patches, size² · 3)
        if self.norm_pix:  # standardised pixels get the true patch's mean and deviation
            variance, mean = torch.var_mean(true, -1, keepdim=True)
            prediction = prediction * (variance + 1e-6).sqrt() + mean
        removed = mask[..., None]
        blank = true * (1 - removed)
        filled = torch.where(removed > 0, prediction, true)
        return unpatchify(blank, size), unpatchify(filled, size)


def masking(noise: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor]:
    """Which patches stay: keep (B, kept), those with the least noise, in that order.

    Also restore (B, patches): each patch's position in the list "kept patches, then removed ones".

    >>> masking(torch.tensor([[0.9, 0.1, 0.4, 0.7]]), 0.5)
    (tensor([[1, 2]]), tensor([[3, 0, 1, 2]]))
    """
    kept = int(noise.shape[1] * (1 - mask_ratio))
    shuffle = noise.argsort(1)  # (B, patches)
    return shuffle[:, :kept], shuffle.argsort(1)


def patchify(images: Tensor, size: int) -> Tensor:
    """Images (B, 3, height, width) -> the pixels of their patches, (B, patches, size² · 3).

    Patches come row by row, and so do the pixels of a patch, each with its three channels.
    """
    x = images.unfold(2, size, size).unfold(3, size, size)  # (B, 3, rows, columns, size, size)
    return x.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, size: int) -> Tensor:
    """Square images (B, 3, height, width) from their patches; the inverse of `patchify`."""
    side = math.isqrt(patches.shape[1])
    x = patches.reshape(-1, side, side, size, size, 3)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


class Decoder(nn.Module):
    """h^P, the official MAE decoder: tokens of the visible patches -> pixels of all patches.

    `dim` is the width of the backbone's tokens, an image has `patches` of `patch_size` pixels a
    side. `prefix` is the number of tokens before those of the patches; they have no position. In
    official files it is one, the class token. The other arguments are sizes of its own blocks.
    ValueError if the patches make no square, or if `width` is no multiple of 4.
    """

    def __init__(
        self,
        dim: int,
        patches: int,
        patch_size: int,
        width: int = 512,
        depth: int = 8,
        heads: int = 16,
        mlp_ratio: float = 4.0,
        prefix: int = 1,
    ) -> None:
        super().__init__()
        self.patches = patches
        self.prefix = prefix
        self.patch_size = patch_size
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_pos_embed = nn.Buffer(positions(width, patches, prefix))
        self.decoder_embed = nn.Linear(dim, width)
        self.decoder_blocks = nn.Sequential(
            *(Block(width, heads, mlp_ratio, qkv_bias=True) for _ in range(depth))
        )
        self.decoder_norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder_pred = nn.Linear(width, patch_size**2 * 3)

    def forward(self, latent: Tensor, restore: Tensor) -> Tensor:
        """Latent (B, prefix + kept, dim), restore (B, patches) -> (B, patches, patch_size² · 3)."""
        x = self.decoder_embed(latent)  # (B, prefix + kept, width)
        B, _, width = x.shape
        first, kept = x[:, : self.prefix], x[:, self.prefix :]
        removed = self.mask_token.expand(B, self.patches - kept.shape[1], -1)
        patches = torch.cat([kept, removed], 1)  # (B, patches, width), in the order of `masking`
        index = restore[..., None].expand(-1, -1, width)  # expanded, not copied
        patches = patches.gather(1, index)  # in raster order
        x = torch.cat([first, patches], 1) + self.decoder_pos_embed
        x = self.decoder_norm(self.decoder_blocks(x))
        pixels: Tensor = self.decoder_pred(x)
        return pixels[:, self.prefix :]


def positions(width: int, patches: int, prefix: int = 1) -> Tensor:
    """The fixed table of positions (1, prefix + patches, width); the prefix has rows of zeros.

    Half of a row is sines and cosines of the patch's column, the other half those of its row.

    >>> positions(4, patches=4)[0, 1:].round(decimals=2)  # in a row: sin, cos, sin, cos
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8400, 0.5400, 0.0000, 1.0000],
            [0.0000, 1.0000, 0.8400, 0.5400],
            [0.8400, 0.5400, 0.8400, 0.5400]])
    """
    side = math.isqrt(patches)
    if side**2 != patches or width % 4:
        raise ValueError(
            f"positions: {patches} patches of width {width}; there must be a square of patches, "
            "and a width that is a multiple of 4"
        )
    exponents = torch.arange(width // 4).double() / (width / 4)
    angle = torch.outer(torch.arange(side).double(), 10_000**-exponents)  # (side, width / 4)
    table = torch.cat([angle.sin(), angle.cos()], 1)  # (side, width / 2), of columns and of rows
    # Patches are numbered row by row: the column changes with each, the row after `side` of them.
    columns = table.repeat(side, 1)
    rows = table.repeat_interleave(side, 0)
    both = torch.cat([columns, rows], 1)  # (patches, width)
    return F.pad(both, (0, 0, prefix, 0)).float()[None]


@torch.no_grad()
def init(networks: Sequence[nn.Module], rng: torch.Generator) -> None:
    """Give new networks MAE's random start, in place: Xavier-uniform matrices, biases of zero.

    Position tables stay as they are.
    """
    both = nn.ModuleList(networks)
    for module in both.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.flatten(1), generator=rng)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()  # ones and zeros
    for name, tensor in both.state_dict().items():
        if name.endswith(("cls_token", "mask_token")):
            tensor.normal_(std=0.02, generator=rng)


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of encoder and decoder in an official `_full` file (ValueError: no decoder)."""
    decoder = {}
    for name, tensor in state.items():
        if name.startswith("decoder_") or name == "mask_token":
            decoder[name] = tensor
    if not decoder:
        raise ValueError(f"holds no MAE decoder (files ending in _full.pth do), but {[*state][:3]}")
    return {name: tensor for name, tensor in state.items() if name not in decoder}, decoder
