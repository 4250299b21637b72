"""I-JEPA (Assran et al. 2023), the paper's second pretext task: L^P(θ, φ_P), App. D.1.

From one large context block of patches, predict a teacher's tokens of four smaller target blocks.

    φ_P   phi_P     the predictor's trainable tensors and mask token; its position table is fixed
    θ_T   theta_T   the teacher: the same frozen ψ with a third θ, a slow moving average of θ_P (of
                    A and B, not of their product). In `pretrain` the teacher is a second network
    B               number of images of a batch; an image has `patches`
    μ     mu        momentum of the teacher

Other sizes are words. An image has one or more `contexts` (1) and `targets` (4): blocks of patches,
which have nothing to do with M-FAC's. A context has `seen` patches, a target has `hidden` ones.

The backbone is a function (images, theta, keep) -> tokens of the patches `keep`, without a class
token (`lora.Backbone`). The networks' tensors have the official names and shapes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.func import functional_call

Phi = dict[str, Tensor]  # a head's trainable tensors by name


class Batch(NamedTuple):
    """A prepared pretext batch."""

    images: Tensor  # (B, 3, height, width)
    context: Tensor  # (B, contexts, seen) int64, patches in raster order
    targets: Tensor  # (B, targets, hidden) int64
    tokens: Tensor  # (B, targets, hidden, dim): the teacher's normalised tokens at the targets


class IJEPA:
    """The pretext task for Algorithm 1 (`bisslight.PretextTask`).

    Args:
        backbone: f_θ. Pretext passes have no drop path.
        predictor: φ_P's start and the position table; `loss` takes φ_P as an argument.
        masks: the sampler's settings, see `multiblock`.
        ema: (first momentum, steps until it is 1).
        theta: θ_P's start, and so θ_T's. None: ψ itself is trained, and `teacher` follows it.
        teacher: where ψ is trained, a second backbone, a copy of the first.

    ValueError where the backbone says that it has a class token or registers, where a setting of
    the masks is missing, or where blocks of their sizes cannot be drawn.
    """

    def __init__(
        self,
        backbone: nn.Module,
        predictor: "Predictor",
        masks: "Masks",
        ema: tuple[float, float],
        theta: Tensor | None,
        teacher: nn.Module | None = None,
    ) -> None:
        self.backbone = backbone
        self.predictor = predictor
        self.masks = masks
        self.ema = ema
        self.teacher = backbone if teacher is None else teacher
        prefix = getattr(backbone, "prefix", 0)  # not every backbone says it
        if prefix:
            raise ValueError(
                f"I-JEPA: the backbone has {prefix} tokens before those of the patches, such as a "
                "class token; take one without"
            )
        self.grid = math.isqrt(predictor.patches)
        check_masks(masks, self.grid)
        self.phi: Phi = dict(predictor.named_parameters())
        self.state: dict[str, Tensor] = {}
        if theta is None:  # ψ is trained, and the teacher's own weights follow it
            for name, tensor in self.teacher.named_parameters():
                self.state[name] = tensor.detach()
        else:
            self.state["theta_T"] = theta.detach().clone()
        self.state["step"] = torch.tensor(0, device="cpu")  # asking a GPU for it would wait

    def draw(self, B: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Contexts (B, contexts, seen) and targets (B, targets, hidden) of B images.

        All images share the sizes of their blocks, so this is to be called for a whole batch.
        """
        return multiblock(self.masks, self.grid, B, rng)

    @torch.no_grad()
    def prepare(self, images: Tensor, context: Tensor, targets: Tensor) -> Batch:
        """A batch with the tokens of the teacher as it is now, normalised, at the targets.

        So the loss is a pure function: the teacher moves on only in `after_step`.
        """
        tokens = self.teacher(images, self.state.get("theta_T"))
        tokens = F.layer_norm(tokens, tokens.shape[-1:])  # eps 1e-5
        index = targets.flatten(1)[..., None]  # (B, targets hidden, 1)
        wanted = tokens.gather(1, index.expand(-1, -1, tokens.shape[-1]))
        return Batch(images, context, targets, wanted.unflatten(1, targets.shape[1:]))

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """L^P(θ, φ_P): smooth L1 (threshold 1) of prediction and teacher, mean over all entries."""
        prediction = self.predict(theta, phi, batch)
        return F.smooth_l1_loss(prediction, batch.tokens[:, :, None].expand_as(prediction))

    def predict(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """Tokens at all targets from each context, (B, targets, contexts, hidden, dim)."""
        pairs = batch.context.shape[:2]  # (B, contexts)
        images = batch.images.repeat_interleave(pairs[1], 0)
        tokens = self.backbone(images, theta, batch.context.flatten(0, 1)).unflatten(0, pairs)
        return functional_call(self.predictor, phi, (tokens, batch.context, batch.targets))  # type: ignore[no-any-return]

    @torch.no_grad()
    def after_step(self, theta_P: Tensor | None) -> None:
        """The teacher follows: θ_T ← μ θ_T + (1 − μ) θ_P; the momentum μ rises linearly to 1."""
        first, steps = self.ema
        mu = momentum(int(self.state["step"]), first, steps)
        self.state["step"] += 1
        if theta_P is not None:
            self.state["theta_T"].lerp_(theta_P, 1 - mu)
            return
        for name, tensor in self.backbone.named_parameters():
            self.state[name].lerp_(tensor, 1 - mu)


@dataclass(frozen=True)
class Masks:
    """Settings of the sampler; the values here are the official ones."""

    targets: int = 4  # target blocks of an image
    contexts: int = 1  # context blocks of an image
    target_scale: tuple[float, float] = (0.15, 0.2)  # area of a target, as a share of the image
    context_scale: tuple[float, float] = (0.85, 1.0)  # of a context, with the targets still in it
    aspect: tuple[float, float] = (0.75, 1.5)  # height over width of a target
    min_keep: int = 10  # a block has more than so many patches
    overlap: bool = False  # whether contexts may overlap targets


def momentum(step: int, first: float, steps: float) -> float:
    """The teacher's momentum μ after step 0, 1 ...: linear from `first` to 1."""
    return first + step * (1 - first) / steps


def multiblock(masks: Masks, grid: int, B: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Contexts (B, contexts, seen) and targets (B, targets, hidden), as officially drawn.

    One random number gives height and width of all targets, another one those of the contexts. The
    last row and column are never used. A context is a block without the patches of its image's
    targets, drawn again while it has `min_keep` patches or fewer; after every 20 attempts, one
    target fewer is taken out. Then all contexts are cut to the length of the batch's shortest one.

    `grid` is the number of patches along a side of the image, grid² their number in it.
    """
    # sizes: the same for the whole batch
    for_target, for_context = torch.rand(2, generator=rng, dtype=torch.float64).tolist()
    target_size = block_size(for_target, masks.target_scale, masks.aspect, grid)
    context_size = block_size(for_context, masks.context_scale, (1, 1), grid)
    # targets
    targets = blocks(grid, target_size, (B, masks.targets), rng)  # (B, targets, grid²) bool
    # contexts: those that are too small are drawn again
    context = torch.zeros(B, masks.contexts, grid * grid, dtype=torch.bool)  # (.., grid²)
    attempt = 0
    while True:
        too_small = context.sum(-1) <= masks.min_keep  # (B, contexts)
        if not too_small.any():
            break
        fresh = blocks(grid, context_size, (B, masks.contexts), rng)  # (.., grid²)
        if not masks.overlap:
            excluded = max(0, masks.targets - attempt // 20)
            fresh &= ~targets[:, :excluded].any(1, keepdim=True)
        context = torch.where(too_small[..., None], fresh, context)
        attempt += 1
    # all contexts of a batch have one length: the first patches of each, in raster order
    shortest = context.sum(-1).min()
    context &= context.cumsum(-1) <= shortest
    return indices(context), indices(targets)


def indices(mask: Tensor) -> Tensor:
    """Masks (B, blocks, grid²), all with equally many patches, as positions (B, blocks, seen)."""
    positions = mask.nonzero()[:, -1]  # (B blocks seen,)
    return positions.view(*mask.shape[:2], -1)


def block_size(
    uniform: float, scale: tuple[float, float], aspect: tuple[float, float], grid: int
) -> tuple[int, int]:
    """Height and width of a block from one uniform number.

    >>> [block_size(number, (0.15, 0.2), (0.75, 1.5), 16) for number in (0.0, 0.999)]
    [(5, 7), (9, 6)]
    """
    share = scale[0] + uniform * (scale[1] - scale[0])
    ratio = aspect[0] + uniform * (aspect[1] - aspect[0])
    area = int(grid * grid * share)
    height = round(math.sqrt(area * ratio))
    width = round(math.sqrt(area / ratio))
    return min(height, grid - 1), min(width, grid - 1)


def blocks(
    grid: int, size: tuple[int, int], shape: tuple[int, int], rng: torch.Generator
) -> Tensor:
    """Blocks of `size` patches at random places, as masks (*shape, grid²)."""
    height, width = size
    top = torch.randint(grid - height, shape, generator=rng)[..., None]
    left = torch.randint(grid - width, shape, generator=rng)[..., None]
    line = torch.arange(grid)
    rows = (line >= top) & (line < top + height)  # (*shape, grid)
    columns = (line >= left) & (line < left + width)
    return (rows[..., :, None] & columns[..., None, :]).flatten(-2)


def check_masks(masks: Masks, grid: int) -> None:
    """ValueError for settings that are missing or allow blocks of `min_keep` patches or fewer."""
    missing = [field.name for field in fields(Masks) if not hasattr(masks, field.name)]
    if missing:
        raise ValueError(
            f"I-JEPA: masks without {', '.join(missing)}; `ijepa.Masks()` has the official settings"
        )
    kinds = {"target": (masks.target_scale, masks.aspect), "context": (masks.context_scale, (1, 1))}
    for name, (scale, aspect) in kinds.items():
        sizes = [block_size(i / 1000, scale, aspect, grid) for i in range(1001)]
        smallest = min(height * width for height, width in sizes)
        if smallest <= masks.min_keep:
            raise ValueError(
                f"I-JEPA: a {name} block on a grid of {grid} x {grid} patches can have {smallest} "
                f"of them, and more than min_keep {masks.min_keep} are needed; lower min_keep or "
                "take smaller patches"
            )


class Predictor(nn.Module):
    """h^P, the official predictor: tokens of a context -> tokens at the targets.

    `dim` is the width of the tokens, an image has `patches` of them; the rest are its own sizes.
    ValueError if the patches make no square, or if `width` is no multiple of 4.
    """

    def __init__(
        self,
        dim: int,
        patches: int,
        width: int = 384,
        depth: int = 12,
        heads: int = 16,  # the official one has as many as its encoder
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        self.patches = patches
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.predictor_pos_embed = nn.Buffer(positions(width, patches))
        self.predictor_embed = nn.Linear(dim, width)
        self.predictor_blocks = nn.Sequential(
            *(Block(width, heads, mlp_ratio, qkv_bias=True) for _ in range(depth))
        )
        self.predictor_norm = nn.LayerNorm(width, eps=1e-6)
        self.predictor_proj = nn.Linear(width, dim)

    def forward(self, tokens: Tensor, context: Tensor, targets: Tensor) -> Tensor:
        """What each target holds, predicted from each context: (B, targets, contexts, hidden, dim).

        Args:
            tokens: (B, contexts, seen, dim), the backbone's, of each context.
            context: (B, contexts, seen), where their patches are.
            targets: (B, targets, hidden), the patches to predict.
        """
        B, n_contexts, n_seen = context.shape
        n_targets = targets.shape[1]
        place = self.predictor_pos_embed[0]  # (patches, width)
        known = self.predictor_embed(tokens) + place[context]  # (B, contexts, seen, width)
        asked = self.mask_token + place[targets]  # (B, targets, hidden, width)
        # each target with each context: (B, targets, contexts, ., width)
        known = known[:, None].expand(-1, n_targets, -1, -1, -1)
        asked = asked[:, :, None].expand(-1, -1, n_contexts, -1, -1)
        x = torch.cat([known, asked], 3).flatten(0, 2)  # (.., seen + hidden, width)
        x = self.predictor_blocks(x)[:, n_seen:]  # (.., hidden, width)
        x = self.predictor_proj(self.predictor_norm(x))
        return x.unflatten(0, (B, n_targets, n_contexts))  # type: ignore[no-any-return]


def positions(width: int, patches: int) -> Tensor:
    """The fixed table of positions (1, patches, width), the same as MAE's.

    Half of a row is sines and cosines of the patch's column, the other half those of its row.
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
    return torch.cat([columns, rows], 1).float()[None]


@torch.no_grad()
def init(networks: Sequence[nn.Module], rng: torch.Generator) -> None:
    """Give new networks I-JEPA's random start, in place: truncated normal, biases of zero.

    Position tables stay as they are.
    """
    both = nn.ModuleList(networks)
    for module in both.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=0.02, generator=rng)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    for name, tensor in both.state_dict().items():
        if name.endswith("mask_token"):
            nn.init.trunc_normal_(tensor, std=0.02, generator=rng)
        elif name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
            layer = 1 + int(name.split(".")[2])  # 1.blocks.0.attn...
            tensor.div_(math.sqrt(2 * layer))


def split_state(state: Mapping[str, Any], base: str) -> list[dict[str, Tensor]]:
    """Tensors of `base`, "target_encoder" or "encoder", and of the predictor (ValueError: none)."""
    parts = []
    for key in (base, "predictor"):
        if not isinstance(state.get(key), dict):
            raise ValueError(f"holds no {base} and predictor of I-JEPA, but {[*state][:3]}")
        # official names begin with `module.`
        weights = state[key].items()
        parts.append({name.removeprefix("module."): tensor for name, tensor in weights})
    return parts
