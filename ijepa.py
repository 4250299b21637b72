"""I-JEPA (Assran et al. 2023), the paper's second pretext task: L^P(θ, φ_P) on the functional backbone (App. D.1).

From one large context block of patches, predict what a slowly following teacher makes of four smaller target blocks.

    φ_P      phi_P     the predictor's trainable tensors, mask token included; its position table is fixed
    θ_T      theta_T   the teacher: the same frozen ψ under a third θ, an EMA of θ_P (of the factors A and B, that is,
                       not of their product). From scratch, where ψ itself is trained, it is a second network
    E, M, n  context blocks (1) and target blocks (4) an image, and how many patches one has

First axes run over target block, then context block, then image. Names and shapes are the official ones.
Leaves out: position interpolation.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from config import BACKBONES, Arch, Masks, UsageError
from lora import Backbone, Phi, block_forward, build_vit, misfit, sincos, sizes_of
from runtime import load_tensors


class Batch(NamedTuple):
    """A prepared pretext batch."""

    images: Tensor  # (B, 3, H, W)
    context: Tensor  # (E, B, n) int64, patches in raster order
    targets: Tensor  # (M, B, n) int64
    wanted: Tensor  # (M E B, n, dim): the teacher's normalised tokens at the targets


class IJEPA:
    """The pretext task for Algorithm 1; satisfies `bisslight.PretextTask`.

    Args:
        backbone: f_θ, without a class token. Pretext passes have no drop path.
        predictor: where φ_P's shapes and fixed tables come from; `loss` takes φ_P as an argument.
        masks: the sampler's settings.
        ema: (first momentum, steps until it is 1).
        theta: θ_P's start, and so θ_T's. None: ψ itself is trained, and `teacher` follows it.
        teacher: from scratch only, a second network, equal to the first.
    """

    def __init__(
        self,
        backbone: Backbone,
        predictor: "Predictor",
        masks: Masks,
        ema: tuple[float, float],
        theta: Tensor | None,
        teacher: Backbone | None = None,
    ) -> None:
        assert (theta is None) != (teacher is None)
        self.backbone, self.predictor, self.masks, self.ema = backbone, predictor, masks, ema
        self.teacher = teacher or backbone
        self.theta_T = None if theta is None else theta.detach().clone()
        self.steps = 0
        self.grid = math.isqrt(backbone.vit.patch_embed.num_patches)
        check_masks(masks, self.grid)

    @property
    def phi(self) -> Phi:
        """φ_P as the predictor holds it, by official name."""
        return dict(self.predictor.named_parameters())

    def prepare(self, images: Tensor, rng: torch.Generator, first: int = 0, whole: int | None = None) -> Batch:
        """Draw the masks of one step, and ask the teacher as it is now; so the loss is a pure function of the batch.

        Masks are drawn for the whole batch that the images are a part of, since their sizes depend on all of it.
        """
        drawn = multiblock(self.masks, self.grid, whole or len(images), rng)
        context, targets = (mask[:, first : first + len(images)] for mask in drawn)
        return self.batch(images, context.to(images.device), targets.to(images.device))

    @torch.no_grad()
    def batch(self, images: Tensor, context: Tensor, targets: Tensor) -> Batch:
        """A batch with given masks: targets are the teacher's tokens of the whole image, layer-normed (eps 1e-5)."""
        tokens = self.teacher(images, self.theta_T)
        tokens = F.layer_norm(tokens, tokens.shape[-1:])
        wanted = torch.stack([pick(tokens, index) for index in targets])  # (M, B, n, dim)
        return Batch(images, context, targets, wanted[:, None].expand(-1, len(context), -1, -1, -1).flatten(0, 2))

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """L^P(θ, φ_P), a scalar: smooth L1 (threshold 1) between prediction and teacher, mean over everything."""
        return F.smooth_l1_loss(self.predict(theta, phi, batch), batch.wanted)

    def predict(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """Predicted tokens at the targets, (M E B, n, dim)."""
        return functional_call(self.predictor, phi, (self.encode(theta, batch), batch.context, batch.targets))  # type: ignore[no-any-return]

    def encode(self, theta: Tensor | None, batch: Batch) -> Tensor:
        """The student's tokens of each context block, (E B, n, dim)."""
        images = batch.images.repeat(len(batch.context), 1, 1, 1)
        return self.backbone(images, theta, batch.context.flatten(0, 1))  # type: ignore[no-any-return]

    def check(self, batch: Batch) -> None:
        """Nothing that a first batch could tell; masks and files have been checked by now."""

    @torch.no_grad()
    def after_step(self, theta_P: Tensor | None) -> None:
        """The teacher follows: θ_T ← m θ_T + (1 − m) θ_P, with m rising linearly from its first value to 1."""
        m = momentum(self.steps, *self.ema)
        self.steps += 1
        if theta_P is not None and self.theta_T is not None:
            self.theta_T.lerp_(theta_P, 1 - m)
            return
        for mine, other in zip(self.teacher.vit.parameters(), self.backbone.vit.parameters(), strict=True):
            mine.lerp_(other, 1 - m)

    def state_dict(self) -> dict[str, Any]:
        """The teacher, and how far its momentum has risen."""
        teacher = dict(self.teacher.vit.named_parameters()) if self.theta_T is None else {"theta_T": self.theta_T}
        return {"teacher": {name: tensor.detach() for name, tensor in teacher.items()}, "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        teacher = dict(self.teacher.vit.named_parameters()) if self.theta_T is None else {"theta_T": self.theta_T}
        for name, tensor in teacher.items():
            tensor.copy_(state["teacher"][name])

    def checkpoint(self, arch: Arch, backbone: str) -> dict[str, Any]:
        """The official layout: encoder, target_encoder, predictor, names with `module.`; sizes as JSON text."""
        networks = {"encoder": self.backbone.vit, "target_encoder": self.teacher.vit, "predictor": self.predictor}
        about = {"backbone": backbone, "arch": arch.model_dump()}

        def named(network: nn.Module) -> dict[str, Tensor]:
            return {f"module.{key}": tensor.detach().cpu() for key, tensor in network.state_dict().items()}

        return {name: named(network) for name, network in networks.items()} | {"bisslight": json.dumps(about)}


def momentum(i: int, first: float, steps: float) -> float:
    """Of the teacher after step i = 0, 1 ...: linear from `first` to 1.

    >>> momentum(0, 0.9995, 10_000), round(momentum(5000, 0.9995, 10_000), 5)
    (0.9995, 0.99975)
    """
    return first + i * (1 - first) / steps


def pick(tokens: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, L, dim) at index (B, n) -> (B, n, dim)."""
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))


# --- masks -----------------------------------------------------------------------------------------------------------


def block_size(u: float, scale: tuple[float, float], aspect: tuple[float, float], grid: int) -> tuple[int, int]:
    """Height and width of a block from one uniform number, which sets its area and its aspect together.

    >>> block_size(0.0, (0.15, 0.2), (0.75, 1.5), 16), block_size(0.999, (0.15, 0.2), (0.75, 1.5), 16)
    ((5, 7), (9, 6))
    """
    area = int(grid * grid * (scale[0] + u * (scale[1] - scale[0])))
    ratio = aspect[0] + u * (aspect[1] - aspect[0])
    return min(round(math.sqrt(area * ratio)), grid - 1), min(round(math.sqrt(area / ratio)), grid - 1)


def check_masks(masks: Masks, grid: int) -> None:
    """Refuse (UsageError) settings whose blocks can have min_keep patches or fewer: none would ever be accepted."""
    steps = [i / 1000 for i in range(1001)]
    for name, scale, aspect in (("target", masks.target_scale, masks.aspect), ("context", masks.context_scale, (1, 1))):
        smallest = min(h * w for h, w in (block_size(u, scale, aspect, grid) for u in steps))
        if smallest <= masks.min_keep:
            raise UsageError(
                f"I-JEPA: a {name} block on a grid of {grid} x {grid} patches can have {smallest} of them, more than "
                f"--min-keep {masks.min_keep} are wanted; lower it, or take a smaller --patch-size"
            )


def multiblock(masks: Masks, grid: int, batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masks as the official collator draws them: context (E, B, n) and targets (M, B, n), int64, raster order.

    All images and all targets of a batch share one size. Positions are uniform, but the last row and the last column
    are never used, as there. A context is its block without all targets, drawn again while it has min_keep patches or
    fewer; after 20 attempts one target after the other may overlap it. All contexts are then cut to the shortest one of
    the batch, whose size therefore belongs to the task.
    """
    u_target, u_context = torch.rand(2, generator=rng, dtype=torch.float64).tolist()
    h, w = block_size(u_target, masks.target_scale, masks.aspect, grid)
    targets = blocks(grid, h, w, (batch, masks.targets), rng)  # (B, M, L) bool
    h, w = block_size(u_context, masks.context_scale, (1, 1), grid)
    context = torch.zeros(batch, masks.contexts, grid * grid, dtype=torch.bool)
    short, attempt = torch.ones(batch, masks.contexts, dtype=torch.bool), 0
    while bool(short.any()):
        kept = targets[:, : max(0, masks.targets - attempt // 20)]  # constraints that still hold
        fresh = blocks(grid, h, w, (batch, masks.contexts), rng)
        if not masks.overlap:
            fresh &= ~kept.any(1, keepdim=True)
        context = torch.where(short[..., None], fresh, context)
        short, attempt = context.sum(-1) <= masks.min_keep, attempt + 1
    n = int(context.sum(-1).min())
    first = context & (context.long().cumsum(-1) <= n)
    return indices(first).transpose(0, 1), indices(targets).transpose(0, 1)


def blocks(grid: int, h: int, w: int, shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Blocks of h x w patches at random places, as masks (*shape, grid²)."""
    top = torch.randint(grid - h, shape, generator=rng)[..., None]
    left = torch.randint(grid - w, shape, generator=rng)[..., None]
    at = torch.arange(grid)
    rows, columns = (at >= top) & (at < top + h), (at >= left) & (at < left + w)
    return (rows[..., :, None] & columns[..., None, :]).flatten(-2)


def indices(mask: Tensor) -> Tensor:
    """Masks (B, K, L) with equally many patches each -> their places (B, K, n)."""
    return mask.nonzero()[:, -1].view(*mask.shape[:2], -1)


# --- predictor -------------------------------------------------------------------------------------------------------


class Predictor(nn.Module):
    """h^P, the official predictor: context tokens -> tokens at the target positions. It has the encoder's heads."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        dim = arch.predictor_dim
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.predictor_pos_embed: Tensor
        self.register_buffer("predictor_pos_embed", torch.zeros(1, arch.patches, dim))
        self.predictor_embed = nn.Linear(arch.dim, dim)
        self.predictor_blocks = nn.ModuleList(
            Block(dim, arch.heads, arch.mlp_ratio, qkv_bias=True) for _ in range(arch.predictor_depth)
        )
        self.predictor_norm = nn.LayerNorm(dim, eps=1e-6)
        self.predictor_proj = nn.Linear(dim, arch.dim)

    def forward(self, tokens: Tensor, context: Tensor, targets: Tensor) -> Tensor:
        """Tokens (E B, n, dim), context (E, B, n), targets (M, B, m) -> (M E B, m, dim)."""
        place = self.predictor_pos_embed.expand(context.shape[1], -1, -1)  # (B, L, width)
        x = self.predictor_embed(tokens) + torch.cat([pick(place, index) for index in context])
        asked = torch.stack([pick(place, index) for index in targets])  # (M, B, m, width)
        asked = (self.mask_token + asked[:, None]).expand(-1, len(context), -1, -1, -1).flatten(0, 2)
        x = torch.cat([x.repeat(len(targets), 1, 1), asked.to(x.dtype)], 1)
        for block in self.predictor_blocks:
            x = block_forward(block, x)
        return self.predictor_proj(self.predictor_norm(x[:, -targets.shape[-1] :]))  # type: ignore[no-any-return]


# --- from scratch ----------------------------------------------------------------------------------------------------


def init(arch: Arch, rng: torch.Generator) -> tuple[VisionTransformer, Predictor]:
    """I-JEPA's initialisation: matrices and mask token N(0, 0.02) cut at ±2, output matrices of layer l over √2l."""
    vit, predictor = build_vit(arch), Predictor(arch)
    assert vit.pos_embed is not None
    for module in [*vit.modules(), *predictor.modules()]:
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=0.02, generator=rng)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    nn.init.trunc_normal_(predictor.mask_token, std=0.02, generator=rng)
    side = arch.image_size // arch.patch_size
    with torch.no_grad():
        for layers in (vit.blocks, predictor.predictor_blocks):
            layer: Any
            for number, layer in enumerate(layers, 1):
                for matrix in (layer.attn.proj.weight, layer.mlp.fc2.weight):
                    matrix.div_(math.sqrt(2 * number))
        vit.pos_embed.copy_(sincos(arch.dim, side)[:, 1:])  # no class row
        predictor.predictor_pos_embed.copy_(sincos(arch.predictor_dim, side)[:, 1:])
    return vit, predictor


def schedule(total: int, warmup: int, start: float, end: float) -> Callable[[int, float], float]:
    """I-JEPA's rate of step k = 1, 2 ...: linear from start · base at k = 0, then half a cosine to `end`."""

    def rate(k: int, base: float) -> float:
        if k < warmup:
            return base * (start + k / warmup * (1 - start))
        return end + (base - end) * 0.5 * (1 + math.cos(math.pi * (k - warmup) / max(1, total - warmup)))

    return rate


def decay_schedule(total: int, first: float, last: float) -> Callable[[int, float], float]:
    """I-JEPA's weight decay of step k: half a cosine from `first`, which is the base, to `last`; 0 stays 0."""
    return lambda k, base: (last + (first - last) * 0.5 * (1 + math.cos(math.pi * k / total))) * (base > 0)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def load(
    path: Path, backbone: str, base: str, image_size: int | None = None, patch_size: int | None = None
) -> tuple[VisionTransformer, Predictor, Arch]:
    """Encoder (`base`: target_encoder or encoder), predictor and sizes from an I-JEPA checkpoint, official or ours.

    Tensors stay mapped from the file until they are moved or written, so a 10 GB file costs what is used of it. Every
    key and shape is checked; UsageError explains a file of another kind.
    """
    data = load_tensors(path)
    encoder, head = parts(path, data, base)
    official = BACKBONES[backbone].arch.model_copy(update={"class_token": False})
    arch = sizes_of(path, data, backbone, official, image_size, patch_size)
    with torch.device("meta"):
        vit, predictor = build_vit(arch), Predictor(arch)
    for what, network, found in (("encoder", vit, encoder), ("predictor", predictor, head)):
        if wrong := misfit(network.state_dict(), found):
            raise UsageError(f"{path}: its {what} is not that of I-JEPA's {backbone}: {wrong}")
        network.load_state_dict({k: v.float() for k, v in found.items()}, assign=True)
    return vit, predictor, arch


def parts(path: Path, data: Any, base: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State dicts of encoder and predictor, or a UsageError that says what the file is instead."""
    want = "take IN1K-vit.h.14-300e.pth.tar, which has encoder, target_encoder and predictor"
    keys = set(data) if isinstance(data, dict) else set()
    if "model" in keys or "decoder_embed.weight" in keys:
        raise UsageError(f"{path}: looks like an MAE checkpoint, leave --pretext ijepa out; or {want}")
    if any("embeddings.patch_embeddings" in str(key) for key in keys):
        raise UsageError(f"{path}: has Hugging Face names and no predictor; {want}")
    if "predictor" not in keys and {"patch_embed.proj.weight", "encoder"} & keys:
        raise UsageError(f"{path}: holds an encoder only, the pretext task needs the predictor too; {want}")
    if base not in keys or "predictor" not in keys:
        raise UsageError(f"{path}: holds no {base} and predictor; {want}")
    found = []
    for name in (base, "predictor"):
        state = data[name]
        if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
            raise UsageError(f"{path}: its {name} is no state dict of tensors; {want}")
        found.append({key.removeprefix("module."): value for key, value in state.items()})
    return found[0], found[1]
