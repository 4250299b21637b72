"""Paper: the backbone f_θ, a Vision Transformer ψ with LoRA (Sec. 3.2), and the downstream head.

θ (K, p) has a row for each of the K attention layers. Reshaped to (4, r, dim), a row is A_q, B_qᵀ,
A_v, B_vᵀ: the query matrix becomes W_q + s B_q A_q and the value matrix W_v + s B_v A_v, with
s = alpha / r; the key matrix stays as it is.

    ψ           the backbone's own weights, `Backbone.vit`: one copy, used with every θ. This file
                does not freeze them: who loads them calls `requires_grad_(False)`, as below,
                unless ψ itself is trained (Eq. 1)
    φ_D  phi_D  downstream head (App. C.2): {"weight" (classes, dim), "bias" (classes,)}, and, where
                BatchNorm comes before the linear layer (I-JEPA, App. D.1), {"norm.weight",
                "norm.bias"}
    r    rank   64 in the paper, for queries and values of every layer; s = 1 (alpha = r)
    p           4 r dim, the numbers of θ in a layer; dim is the width of a token
    B           number of images of a batch. With an index, B_q and B_v, it is a factor of LoRA
    q, k, v     as an index of a matrix: of the queries, the keys, the values

Other sizes are words: `kept` patches enter the blocks; with the `prefix` before them (the class
token, if there is one, and registers, if a network of timm has them) they are the `tokens` there.

With any plain timm ViT, and torch's own optimisers:

    backbone = Backbone(timm.create_model("vit_small_patch16_224", num_classes=0))
    backbone.requires_grad_(False)
    theta = init_theta(backbone.depth, 64, backbone.dim, torch.Generator()).requires_grad_()
    tokens = backbone(images, theta)
"""

import math
from typing import Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Phi = dict[str, Tensor]  # a head's trainable tensors by name
Multilabel = Literal["softmax", "bce"]  # the loss where an image has several classes

# --- the backbone, and LoRA in it -----------------------------------------------------------------


class Backbone(nn.Module):
    """f_θ with ψ = `vit`, a plain timm VisionTransformer (ValueError for another network).

    `scale` is s. With `recompute`, backward computes activations anew instead of keeping them.
    """

    def __init__(self, vit: VisionTransformer, scale: float = 1.0, recompute: bool = False) -> None:
        super().__init__()
        check_vit(vit)
        self.vit = vit.eval()  # timm's own dropout is off
        self.scale = scale
        self.recompute = recompute
        self.depth = len(vit.blocks)
        self.dim = int(vit.embed_dim)
        self.prefix = int(vit.num_prefix_tokens)  # class token and registers, before the patches

    def forward(
        self,
        images: Tensor,
        theta: Tensor | None = None,
        keep: Tensor | None = None,
        drop: Tensor | None = None,
    ) -> Tensor:
        """Tokens after the final norm, (B, prefix + kept, dim): class token, registers, patches.

        Args:
            images: (B, 3, height, width), already normalised.
            theta: (K, p); None is f_ψ.
            keep: (B, kept) int64, the patches that enter the blocks, in this order; None: all.
            drop: (B, K, 2) factors of `drop_path`; None: no drop path.
        """
        x = self.vit._pos_embed(self.vit.patch_embed(images))  # positions first, then the selection
        if keep is not None:
            patches = select(x[:, self.prefix :], keep)
            x = torch.cat([x[:, : self.prefix], patches], 1)
        x = self.vit.norm_pre(x)
        # unbind: indexing θ row by row would make backward build K zero tensors of θ's size
        rows = [None] * self.depth if theta is None else theta.unbind(0)
        drops = [None] * self.depth if drop is None else drop.unbind(1)
        blocks = cast(list[Block], self.vit.blocks)
        for block, row, block_drop in zip(blocks, rows, drops, strict=True):
            if self.recompute:
                args = block, x, row, self.scale, block_drop
                x = checkpoint(block_forward, *args, use_reentrant=False)
            else:
                x = block_forward(block, x, row, self.scale, block_drop)
        return self.vit.norm(x)  # type: ignore[no-any-return]


def block_forward(
    block: Block, x: Tensor, row: Tensor | None, scale: float, drop: Tensor | None = None
) -> Tensor:
    """A block of the backbone, timm's Block with LoRA: x -> x + attention, then x + MLP of that.

    x and the result are (B, tokens, dim), `row` (p,) is the block's row of θ (None: no LoRA), and
    `drop` (B, 2) has the drop-path factors of attention and MLP.
    """
    attn = cast(Attention, block.attn)
    y = block.norm1(x)
    queries, keys, values = qkv(attn, y, row, scale)  # (B, heads, tokens, head dim)
    out = F.scaled_dot_product_attention(queries, keys, values)
    out = out.transpose(1, 2).flatten(2)  # (B, tokens, dim)
    out = block.ls1(attn.proj(attn.norm(out)))
    if drop is not None:
        out = out * drop[:, :1, None]
    x = x + out
    out = block.ls2(block.mlp(block.norm2(x)))
    if drop is not None:
        out = out * drop[:, 1:, None]
    return x + out  # type: ignore[no-any-return]


def qkv(
    attn: Attention, x: Tensor, row: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads, each (B, heads, tokens, head dim).

    LoRA acts on queries and values (Sec. 3.2). With x (B, tokens, dim), row (p,) and s = scale:

        queries = W_q x + s B_q A_q x,    keys = W_k x,    values = W_v x + s B_v A_v x
    """
    B, _, dim = x.shape
    x = x.flatten(0, 1)  # (B * tokens, dim)
    if row is None:
        queries, keys, values = attn.qkv(x).chunk(3, -1)  # (B * tokens, dim) each
    else:
        # a product each: parts of a common one could not be changed in place
        W_q, W_k, W_v = attn.qkv.weight.chunk(3)  # (dim, dim) each
        b_q, b_k, b_v = [None] * 3 if attn.qkv.bias is None else attn.qkv.bias.chunk(3)
        queries = F.linear(x, W_q, b_q)  # (B * tokens, dim)
        x = x.to(queries.dtype)  # under autocast: once here, not for each product that follows
        keys = F.linear(x, W_k, b_k)
        values = F.linear(x, W_v, b_v)
        A_q, B_qT, A_v, B_vT = row.to(x.dtype).view(4, -1, dim).unbind(0)  # (r, dim) each
        low = scale * (x @ torch.cat([A_q, A_v]).mT)  # (B * tokens, 2 r)
        low_q, low_v = low.chunk(2, -1)  # (B * tokens, r) each
        queries.addmm_(low_q, B_qT)  # queries += low_q @ B_qT, without a tensor for the product
        values.addmm_(low_v, B_vT)
    queries = attn.q_norm(split_heads(queries, B, attn.num_heads))
    keys = attn.k_norm(split_heads(keys, B, attn.num_heads))
    return queries, keys, split_heads(values, B, attn.num_heads)


def split_heads(x: Tensor, B: int, heads: int) -> Tensor:
    """Cut tokens into their heads: (B * tokens, dim) -> (B, heads, tokens, head dim)."""
    head_dim = x.shape[-1] // heads
    return x.view(B, -1, heads, head_dim).transpose(1, 2)


def select(x: Tensor, index: Tensor) -> Tensor:
    """Some tokens of each image: x (B, all, dim), index (B, kept) -> (B, kept, dim)."""
    dim = x.shape[-1]
    wide = index[..., None].expand(-1, -1, dim)  # (B, kept, dim); expanded, not copied
    return x.gather(1, wide)


def drop_path(rate: float, depth: int, B: int, rng: torch.Generator) -> Tensor:
    """Drop-path factors of B images, (B, K, 2): 1/(1 − rate_k) with probability 1 − rate_k, else 0.

    They multiply what attention and MLP add to the tokens, so that its mean stays. rate_k rises
    linearly from 0 to `rate` over the K = depth layers.
    """
    survive = 1 - torch.linspace(0, rate, depth)[:, None, None]  # (K, 1, 1)
    kept = torch.rand(depth, 2, B, generator=rng) < survive  # (K, 2, B)
    return (kept / survive).permute(2, 0, 1)


def init_theta(depth: int, rank: int, dim: int, rng: torch.Generator) -> Tensor:
    """Algorithm 1, l.2: θ (K, 4 r dim), A_q, A_v ~ U(±1/√dim), B_q = B_v = 0, so that f_θ = f_ψ."""
    theta = torch.zeros(depth, 4, rank, dim)
    theta[:, 0::2].uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim), generator=rng)
    return theta.flatten(1)


def factors(theta: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A_q (K, r, dim), B_q (K, dim, r), A_v, B_v: views of θ, laid out as in the LoRA paper.

    >>> A_q, B_q, A_v, B_v = factors(torch.arange(8.0).view(1, 8), dim=2)  # K = 1, r = 1
    >>> A_q.tolist(), B_v.tolist()
    ([[[0.0, 1.0]]], [[[6.0], [7.0]]])
    """
    four = theta.unflatten(1, (4, -1, dim))  # (K, 4, r, dim)
    A_q, B_qT, A_v, B_vT = four.unbind(1)
    return A_q, B_qT.mT, A_v, B_vT.mT


def merge(backbone: Backbone, theta: Tensor) -> dict[str, Tensor]:
    """A plain timm state dict of f_θ: W_q + s B_q A_q, W_v + s B_v A_v, and copies of the rest."""
    state = {name: tensor.detach().clone() for name, tensor in backbone.vit.state_dict().items()}
    A_q, B_q, A_v, B_v = factors(theta.detach(), backbone.dim)
    q_change = B_q @ A_q  # (K, dim, dim)
    v_change = B_v @ A_v
    change = torch.cat([q_change, torch.zeros_like(q_change), v_change], 1)  # (K, 3 dim, dim)
    for k in range(backbone.depth):
        state[f"blocks.{k}.attn.qkv.weight"] += backbone.scale * change[k]  # queries, keys, values
    return state


# --- which networks can be ψ, and in which precision ----------------------------------------------


def check_vit(vit: nn.Module) -> None:
    """ValueError, which names the part, unless `Backbone` computes what timm computes for `vit`.

    Classes have to be exactly these, since a derived one may compute something else.
    """
    require(vit, VisionTransformer)
    vit = cast(VisionTransformer, vit)
    require(vit.patch_embed, PatchEmbed)  # others overlap: a removed patch is seen in its neighbour
    if vit.global_pool not in ("token", "avg"):
        raise ValueError(
            f"backbone: it pools its tokens by {vit.global_pool!r}, but the head needs the class "
            "token or the mean of the patches"
        )
    for block in cast(list[Block], vit.blocks):
        require(block, Block)
        require(block.attn, Attention)
        require(block.attn.qkv, nn.Linear)
        if block.attn.gate is not None:
            raise ValueError("backbone: its attention has a gate, which is not computed here")


def require(part: object, kind: type[nn.Module]) -> None:
    """ValueError unless a part of a network is of this class, and of none derived from it."""
    if type(part) is not kind:
        raise ValueError(
            f"backbone: {type(part).__name__} is not computed here, only timm's {kind.__name__}"
        )


def keep_in_bfloat16(backbone: Backbone) -> None:
    """Stores the Linear and Conv2d layers of a frozen ψ in bfloat16, in place: half of its memory.

    Autocast would cast exactly these in every pass, so under it results are the same to the bit.
    Such a backbone is for nothing else: not for passes in float32, as Hessian-vector products are,
    and not for `merge`, which would add in bfloat16.
    """
    for layer in backbone.vit.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.bfloat16()


# --- the downstream head, and the loss ------------------------------------------------------------


class Examples(NamedTuple):
    """A labelled batch."""

    images: Tensor  # (B, 3, height, width)
    targets: Tensor  # (B,) classes, or (B, classes) where an image has several: `cross_entropy`
    drop: Tensor | None = None  # (B, K, 2) drop-path factors, used with regularise=True


def init_head(dim: int, classes: int, rng: torch.Generator) -> Phi:
    """φ_D of a linear layer (App. C.2), weight (classes, dim) and bias; U(±1/√dim) as in torch."""
    bound = 1 / math.sqrt(dim)
    weight = torch.empty(classes, dim).uniform_(-bound, bound, generator=rng)
    bias = torch.empty(classes).uniform_(-bound, bound, generator=rng)
    return {"weight": weight, "bias": bias}


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

    regularise=True is for the passes that train (θ_D and φ_D in align, everything in PEFT): drop
    path is on, and a BatchNorm head updates its running statistics `stats`. The pass at θ_P leaves
    it False. In both cases a BatchNorm head normalises with the moments of this batch, those of all
    processes together.
    """
    drop = batch.drop if regularise else None
    x = features(backbone, theta, batch.images, drop)
    if "norm.weight" in phi_D:
        # float64: the variance of nearly equal features is a small difference of large numbers
        phi_D = phi_D | moments(x.double(), stats if regularise else None)
    return cross_entropy(logits(x, phi_D), batch.targets, multilabel).mean()


def features(
    backbone: Backbone, theta: Tensor | None, images: Tensor, drop: Tensor | None = None
) -> Tensor:
    """The head's input (B, dim): class token (MAE, App. C.2) or mean of patches (I-JEPA, D.1).

    With timm's other networks it is what timm pools for their classifier; never a register.
    """
    return backbone.vit.forward_head(backbone(images, theta, drop=drop), pre_logits=True)


def logits(x: Tensor, phi_D: Phi) -> Tensor:
    """h^D: logits (B, classes) of features x (B, dim), a linear layer of them.

    If φ_D has a BatchNorm (eps 1e-6), it comes first, and φ_D holds its moments, too.
    """
    if "norm.weight" in phi_D:  # moments of the batch in training, running ones in scoring
        z = (x.double() - phi_D["norm.mean"]) * (phi_D["norm.var"] + 1e-6).rsqrt()
        x = z.to(phi_D["norm.weight"]) * phi_D["norm.weight"] + phi_D["norm.bias"]
    return F.linear(x, phi_D["weight"], phi_D["bias"])


def moments(x: Tensor, stats: Phi | None) -> Phi:
    """BatchNorm's moments: mean and biased variance, (dim,), of all processes' features x (B, dim).

    The running ones, `stats`, become 0.9 times what they were plus 0.1 times the mean and the
    unbiased variance.
    """
    count = SumOverProcesses.apply(x.new_tensor(float(len(x))))  # images of all processes
    mean = SumOverProcesses.apply(x.sum(0)) / count  # (dim,)
    var = SumOverProcesses.apply((x - mean).square().sum(0)) / count
    if stats:
        stats["norm.mean"].lerp_(mean.detach().to(stats["norm.mean"]), 0.1)
        unbiased = var * count / (count - 1)
        stats["norm.var"].lerp_(unbiased.detach().to(stats["norm.var"]), 0.1)
    return {"norm.mean": mean, "norm.var": var}


class SumOverProcesses(torch.autograd.Function):
    """x summed over processes. All processes' losses depend on it, so gradients are summed too."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, *grad: Tensor) -> Tensor:
        return SumOverProcesses.apply(*grad)  # type: ignore[no-any-return]


def cross_entropy(z: Tensor, targets: Tensor, multilabel: Multilabel = "softmax") -> Tensor:
    """Loss of each image, (B,), from logits z (B, classes).

    Targets are classes (B,), or (B, classes) where an image has several: 1 present, −1 absent, 0 if
    the class appears only as objects that VOC marks difficult; such entries do not count. For
    several, "softmax" is −Σ log softmax(z) over the present classes (as released; paper silent),
    and "bce" the mean of the binary cross entropy over the entries that are not 0.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([[1, 1, -1, 0]])).exp()  # (1/4 · 1/4)⁻¹
    tensor([16.])
    """
    if targets.ndim == 1:
        return F.cross_entropy(z, targets, reduction="none")
    present = (targets == 1).to(z.dtype)
    counts = (targets != 0).to(z.dtype)
    if multilabel == "softmax":
        return -(present * z.log_softmax(1)).sum(1)
    total = F.binary_cross_entropy_with_logits(z, present, counts, reduction="none").sum(1)
    return total / counts.sum(1).clamp_min(1)
