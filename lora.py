"""The backbone f_θ, a frozen Vision Transformer ψ with LoRA (Sec. 3.2), and the downstream head.

θ (K, p) has a row for each of the K attention layers. Reshaped to (4, r, dim), a row is A_q, B_qᵀ,
A_v, B_vᵀ: the query matrix becomes W_q + s B_q A_q and the value matrix W_v + s B_v A_v, with
s = alpha / r; the key matrix stays as it is.

    ψ    psi    frozen backbone weights, `Backbone.vit`: one copy, used with every θ
    φ_D  phi_D  downstream head {"weight" (C, dim), "bias" (C,)} (App. C.2), and, where BatchNorm
                comes before the linear layer (I-JEPA, App. D.1), {"norm.weight", "norm.bias"}
    r    rank   64 in the paper, on q and v of every layer; s = 1 (alpha = r)
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Phi = dict[str, Tensor]  # a head's trainable tensors by name
Multilabel = Literal["softmax", "bce"]  # the loss where an image has several classes


class Backbone(nn.Module):
    """f_θ with ψ = `vit`, a plain timm VisionTransformer (ValueError for another network).

    `scale` is s; with `recompute`, backward computes activations anew instead of keeping them.
    """

    def __init__(self, vit: Any, scale: float = 1.0, recompute: bool = False) -> None:
        super().__init__()
        self.vit: Any = vit.eval()  # timm's own dropout is off
        if not (
            isinstance(vit, VisionTransformer)
            and vit.global_pool in ("token", "avg")
            and all(type(b) is Block and type(b.attn) is Attention for b in self.vit.blocks)
            and all(
                type(a.qkv) is nn.Linear and a.gate is None and a.attn_dim == a.proj.out_features
                for a in (block.attn for block in self.vit.blocks)
            )
        ):
            raise ValueError(
                f"backbone {type(vit).__name__}: is not a timm VisionTransformer of plain Blocks "
                "with a fused qkv Linear, which pools its class token or its patches"
            )
        self.scale, self.recompute = scale, recompute
        self.depth, self.dim = len(vit.blocks), int(vit.embed_dim)

    def forward(
        self,
        images: Tensor,
        theta: Tensor | None = None,
        keep: Tensor | None = None,
        drop: Tensor | None = None,
    ) -> Tensor:
        """Tokens after the final LayerNorm, (B, prefix + n, dim); a class token comes first.

        images (B, 3, H, W), already normalised. theta (K, p); None is f_ψ. keep (B, n) int64 are
        the patches that enter the blocks, in this order (None: all). drop (B, K, 2): `drop_path`.
        """
        x = self.vit._pos_embed(self.vit.patch_embed(images))  # positions first, then the selection
        if keep is not None:
            first = self.vit.num_prefix_tokens
            x = torch.cat([x[:, :first], x[:, first:].take_along_dim(keep[..., None], 1)], 1)
        x = self.vit.norm_pre(x)
        # unbind: indexing θ row by row would make backward build K zero tensors of θ's size
        rows = [None] * self.depth if theta is None else theta.unbind(0)
        drops = [None] * self.depth if drop is None else drop.unbind(1)
        run: Any = block_forward
        if self.recompute:
            run = partial(checkpoint, block_forward, use_reentrant=False)
        for block, row, dropped in zip(self.vit.blocks, rows, drops, strict=True):
            x = run(block, x, row, self.scale, dropped)
        return self.vit.norm(x)  # type: ignore[no-any-return]


def block_forward(
    block: Any, x: Tensor, row: Tensor | None, scale: float, drop: Tensor | None = None
) -> Tensor:
    """A timm Block on x (B, n, dim) with a row (p,) of θ; drop (B, 2): for attention and MLP."""
    out = F.scaled_dot_product_attention(*qkv(block.attn, block.norm1(x), row, scale))
    out = block.ls1(block.attn.proj(block.attn.norm(out.transpose(1, 2).flatten(2))))
    x = x + (out if drop is None else out * drop[:, :1, None])
    out = block.ls2(block.mlp(block.norm2(x)))
    return x + (out if drop is None else out * drop[:, 1:, None])  # type: ignore[no-any-return]


def qkv(attn: Any, x: Tensor, row: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads, each (B, heads, n, head dim), with LoRA on q and v."""
    q, k, v = attn.qkv(x).chunk(3, -1)  # (B, n, dim) each
    if row is not None:
        A_q, B_qT, A_v, B_vT = row.view(4, -1, x.shape[-1]).unbind(0)  # (r, dim) each
        q = q + scale * (x @ A_q.mT) @ B_qT
        v = v + scale * (x @ A_v.mT) @ B_vT
    q, k, v = (z.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for z in (q, k, v))
    return attn.q_norm(q), attn.k_norm(k), v


def drop_path(rate: float, depth: int, n: int, rng: torch.Generator) -> Tensor:
    """Drop-path factors of n images, (n, K, 2): 1/(1 − rate_k) with probability 1 − rate_k, else 0.

    rate_k rises linearly from 0 to `rate` over the K = depth layers.
    """
    survive = 1 - torch.linspace(0, rate, depth)[:, None, None]
    return ((torch.rand(depth, 2, n, generator=rng) < survive) / survive).permute(2, 0, 1)


def init_theta(depth: int, rank: int, dim: int, rng: torch.Generator) -> Tensor:
    """Line 2 of Algorithm 1: θ (K, 4 r dim) with A ~ U(±1/√dim) and B = 0, so that f_θ = f_ψ."""
    theta = torch.zeros(depth, 4, rank, dim)
    theta[:, 0::2].uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim), generator=rng)
    return theta.flatten(1)


def factors(theta: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A_q (K, r, dim), B_q (K, dim, r), A_v, B_v: views of θ, laid out as in the LoRA paper.

    >>> A_q, B_q, A_v, B_v = factors(torch.arange(8.0).view(1, 8), dim=2)  # K = 1, r = 1
    >>> A_q.tolist(), B_v.tolist()
    ([[[0.0, 1.0]]], [[[6.0], [7.0]]])
    """
    A_q, B_qT, A_v, B_vT = theta.unflatten(1, (4, -1, dim)).unbind(1)
    return A_q, B_qT.mT, A_v, B_vT.mT


def merge(backbone: Backbone, theta: Tensor) -> dict[str, Tensor]:
    """A plain timm state dict of f_θ: s B A is added to `qkv.weight`, all else is a copy of ψ."""
    state = {name: tensor.detach().clone() for name, tensor in backbone.vit.state_dict().items()}
    A_q, B_q, A_v, B_v = factors(theta.detach(), backbone.dim)
    q, v = B_q @ A_q, B_v @ A_v
    for k, change in enumerate(backbone.scale * torch.cat([q, 0 * q, v], 1)):
        state[f"blocks.{k}.attn.qkv.weight"] += change  # (3 dim, dim): rows of q, of k and of v
    return state


class Examples(NamedTuple):
    """A labelled batch."""

    images: Tensor  # (B, 3, H, W)
    targets: Tensor  # (B,) classes, or (B, C) for several classes per image, see `cross_entropy`
    drop: Tensor | None = None  # (B, K, 2) drop-path factors, used with regularise=True


def init_head(dim: int, classes: int, rng: torch.Generator) -> Phi:
    """φ_D of a linear layer (App. C.2), weight (classes, dim) and bias; U(±1/√dim) as in torch."""
    phi = {"weight": torch.empty(classes, dim), "bias": torch.empty(classes)}
    bound = 1 / math.sqrt(dim)
    return {name: x.uniform_(-bound, bound, generator=rng) for name, x in phi.items()}


def init_norm(dim: int) -> tuple[Phi, Phi]:
    """BatchNorm before the linear layer (App. D.1): its part of φ_D, its statistics; all (dim,)."""
    phi = {"norm.weight": torch.ones(dim), "norm.bias": torch.zeros(dim)}
    return phi, {"norm.mean": torch.zeros(dim), "norm.var": torch.ones(dim)}


def downstream_loss(
    backbone: Backbone,
    theta: Tensor | None,
    phi_D: Phi,
    batch: Examples,
    regularise: bool = False,
    multilabel: Multilabel = "softmax",
    stats: Phi | None = None,
) -> Tensor:
    """L^D(θ, φ_D) of a batch, a scalar; line 12 (at θ_P) and line 14 (at θ_D) of Algorithm 1.

    A BatchNorm head normalises with the moments of the batch, of all processes together. With
    regularise=True, in training θ_D or φ_D and in PEFT, drop path acts and `stats` are updated.
    """
    x = features(backbone, theta, batch.images, batch.drop if regularise else None)
    if "norm.weight" in phi_D:  # in float32, similar features would lose most of their digits
        phi_D = phi_D | moments(x.double(), stats if regularise else None)
    return cross_entropy(logits(x, phi_D), batch.targets, multilabel).mean()


def features(
    backbone: Backbone, theta: Tensor | None, images: Tensor, drop: Tensor | None = None
) -> Tensor:
    """The head's input (B, dim): class token (MAE, App. C.2) or mean of patches (I-JEPA, D.1)."""
    return backbone.vit.forward_head(backbone(images, theta, drop=drop), pre_logits=True)  # type: ignore[no-any-return]


def logits(x: Tensor, phi_D: Phi) -> Tensor:
    """h^D of x (B, dim), logits (B, C): linear, behind φ_D's BatchNorm (eps 1e-6) if it has one."""
    if "norm.weight" in phi_D:  # moments of the batch in training, running ones in scoring
        z = (x.double() - phi_D["norm.mean"]) * (phi_D["norm.var"] + 1e-6).rsqrt()
        x = z.to(phi_D["norm.weight"]) * phi_D["norm.weight"] + phi_D["norm.bias"]
    return F.linear(x, phi_D["weight"], phi_D["bias"])


def moments(x: Tensor, stats: Phi | None) -> Phi:
    """Mean and biased variance of all processes' rows x (B, dim).

    `stats` become 0.9 times what they were plus 0.1 times the mean and the unbiased variance.
    """
    n = SumOverProcesses.apply(x.new_tensor(float(len(x))))
    mean = SumOverProcesses.apply(x.sum(0)) / n
    var = SumOverProcesses.apply((x - mean).square().sum(0)) / n
    for name, value in (("norm.mean", mean), ("norm.var", var * n / (n - 1))):
        if stats:
            stats[name].lerp_(value.detach().to(stats[name]), 0.1)
    return {"norm.mean": mean, "norm.var": var}


class SumOverProcesses(torch.autograd.Function):
    """x summed over processes. All processes' losses depend on it, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return SumOverProcesses.apply(*grad)  # type: ignore[no-any-return]


def cross_entropy(z: Tensor, targets: Tensor, multilabel: Multilabel = "softmax") -> Tensor:
    """Loss of each image, (B,), from logits z (B, C).

    Targets are classes (B,), or (B, C): 1 present, −1 absent, 0 with difficult objects alone. For
    (B, C), "softmax" is −Σ_c log softmax(z)_c over the present classes (as released; paper silent),
    "bce" the mean binary cross entropy without 0.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([[1, 1, -1, 0]])).exp()  # (1/4 · 1/4)⁻¹
    tensor([16.])
    """
    if targets.ndim == 1:
        return F.cross_entropy(z, targets, reduction="none")
    present, counts = (targets == 1).to(z.dtype), (targets != 0).to(z.dtype)
    if multilabel == "softmax":
        return -(present * z.log_softmax(1)).sum(1)
    total = F.binary_cross_entropy_with_logits(z, present, counts, reduction="none").sum(1)
    return total / counts.sum(1).clamp_min(1)
