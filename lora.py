"""The backbone f_θ: one frozen Vision Transformer ψ and, apart from it, any number of LoRA parameter sets θ (Sec. 3.2).

    tokens = backbone(images, theta, keep=None, drop=None)

θ is one tensor (K, p), a row a layer: K attention layers, and row k seen as (4, r, dim) is A_q, B_qᵀ, A_v, B_vᵀ. So
θ_P − θ_D is a subtraction and an adapter file holds one tensor. The adapted projections are W_q + s B_q A_q and
W_v + s B_v A_v with s = alpha / r. They add to the q and v rows of timm's fused `qkv`; k has no row in θ at all.

    ψ    psi    frozen backbone weights, in `Backbone.vit`; exists once, whatever the number of θ
    φ_D  phi_D  downstream head {"weight" (C, dim), "bias" (C,)} on the class token (App. C.2)
    r    rank   64 in the paper, on q and v of every layer; scale 1 (alpha = r)

Leaves out: dropout in LoRA and trainable LayerNorms (the paper found neither useful), merging during training (it
would write into the ψ that both levels share).
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from config import Arch, UsageError, nearest
from runtime import load_tensors

FORMAT = "bisslight-adapter-1"
Phi = dict[str, Tensor]  # a head's trainable tensors by name
See = Callable[[Tensor], None]  # is shown a layer's attention probabilities, (B, heads, n, n)


class Backbone(nn.Module):
    """f_θ with ψ = `vit`; `scale` is LoRA's alpha / r, `recompute` is activation checkpointing."""

    def __init__(self, vit: nn.Module, scale: float = 1.0, recompute: bool = False) -> None:
        super().__init__()
        self.vit, self.scale, self.recompute = check_vit(vit).eval(), scale, recompute  # eval: no dropout of timm's

    def forward(
        self,
        images: Tensor,
        theta: Tensor | None = None,
        keep: Tensor | None = None,
        drop: Tensor | None = None,
        see: See | None = None,
    ) -> Tensor:
        """Tokens after the final LayerNorm, (B, prefix + patches, dim); the class token comes first.

        Args:
            images: (B, 3, H, W), normalised.
            theta: (K, p); None is ψ alone.
            keep: (B, n) int64, the patches that enter the blocks, in this order; None is all of them.
            drop: (K, 2, B) from `drop_path`, what each residual branch of each sample is multiplied with.
            see: called with each layer's attention, in order. This forward then computes it, and recomputes nothing;
                the fused kernel never has it.
        """
        vit = self.vit
        x = vit._pos_embed(vit.patch_embed(images))  # (B, prefix + patches, dim): positions first, then the mask
        if keep is not None:
            prefix, patches = x.split([vit.num_prefix_tokens, x.shape[1] - vit.num_prefix_tokens], 1)
            x = torch.cat([prefix, patches.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))], 1)
        x = vit.norm_pre(x)
        # unbind once: indexing theta row by row would make backward build K full-size zero tensors
        rows: tuple[Tensor | None, ...] = (None,) * len(vit.blocks) if theta is None else theta.unbind(0)
        drops: tuple[Tensor | None, ...] = (None,) * len(vit.blocks) if drop is None else drop.unbind(0)
        for block, row, d in zip(vit.blocks, rows, drops, strict=True):
            if self.recompute and torch.is_grad_enabled() and see is None:
                # row and d are arguments, so backward recomputes with the very ones that forward saw
                x = checkpoint(
                    block_forward, block, x, row, self.scale, d, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block_forward(block, x, row, self.scale, d, see)
        return vit.norm(x)  # type: ignore[no-any-return]

    @property
    def depth(self) -> int:
        return len(self.vit.blocks)

    @property
    def dim(self) -> int:
        return int(self.vit.embed_dim)


def block_forward(
    block: Any,
    x: Tensor,
    row: Tensor | None = None,
    scale: float = 1.0,
    drop: Tensor | None = None,
    see: See | None = None,
) -> Tensor:
    """One pre-norm block of timm on x (B, n, dim), with its row (p,) of θ and its drop-path factors (2, B)."""
    attn_keep, mlp_keep = (1.0, 1.0) if drop is None else drop[..., None, None].unbind(0)
    x = x + block.ls1(attention(block.attn, block.norm1(x), row, scale, see)) * attn_keep
    return x + block.ls2(block.mlp(block.norm2(x))) * mlp_keep  # type: ignore[no-any-return]


def attention(attn: Any, x: Tensor, row: Tensor | None, scale: float, see: See | None = None) -> Tensor:
    """Multi-head self-attention of timm with LoRA on q and v; x (B, n, dim). Twice differentiable in `row`."""
    B, n, dim = x.shape
    qkv = attn.qkv(x)  # (B, n, 3 dim): q rows, k rows, v rows
    q, k, v = qkv.chunk(3, -1)
    if row is not None:
        A_q, B_qT, A_v, B_vT = row.view(4, -1, dim).unbind(0)  # each (r, dim)
        q = q + scale * (x @ A_q.mT) @ B_qT
        v = v + scale * (x @ A_v.mT) @ B_vT
    q, k, v = (z.reshape(B, n, attn.num_heads, attn.head_dim).transpose(1, 2) for z in (q, k, v))
    q, k = attn.q_norm(q), attn.k_norm(k)
    if see is None:
        out = F.scaled_dot_product_attention(q, k, v)  # (B, heads, n, head dim)
    else:
        see(seen := probabilities(q, k))
        out = seen.to(v.dtype) @ v
    return attn.proj(attn.norm(out.transpose(1, 2).reshape(B, n, dim)))  # type: ignore[no-any-return]


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) over keys, (B, heads, n, n), in float32 at least, under autocast too."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        return (q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])).softmax(-1)


def check_vit(vit: nn.Module) -> VisionTransformer:
    """Refuse by name what the loop above would silently get wrong."""

    def refuse(why: str) -> UsageError:
        return UsageError(f"backbone {type(vit).__name__}: {why}. Use a timm VisionTransformer with a fused qkv Linear")

    if not isinstance(vit, VisionTransformer):
        raise refuse("it is not a timm VisionTransformer")
    if vit.global_pool not in ("token", "avg"):
        raise refuse(f"it pools by {vit.global_pool!r}")
    for name, block in vit.blocks.named_children():
        if type(block) is not Block:
            raise refuse(f"blocks.{name} is a {type(block).__name__}, not a plain pre-norm Block")
        if type(block.attn) is not Attention or type(getattr(block.attn, "qkv", None)) is not nn.Linear:
            raise refuse(f"blocks.{name}.attn is a {type(block.attn).__name__} without a fused qkv Linear")
        if block.attn.gate is not None or block.attn.attn_dim != vit.embed_dim:
            raise refuse(f"blocks.{name}.attn is gated or not as wide as its tokens")
    return vit


def load_timm(name: str, path: Path, image_size: int | None) -> tuple[VisionTransformer, Arch]:
    """Any timm VisionTransformer, for fine-tuning: its state dict from a .pth or .safetensors file, a head left out.

    Raises UsageError for an unknown name, a network that `check_vit` refuses, or a file that does not fit exactly.
    """
    import timm

    known: list[str] = timm.list_models("*")
    if name.partition(".")[0] not in known:
        raise UsageError(f"--backbone timm:{name}: timm has no such model, {nearest(name, known)}")
    size: dict[str, Any] = {"img_size": image_size} if image_size else {}
    try:
        vit: Any = timm.create_model(name, pretrained=False, num_classes=0, **size)
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        raise UsageError(f"--backbone timm:{name}: cannot be made ({str(error).splitlines()[0]})") from error
    check_vit(vit)
    state = load_tensors(path)
    for key in ("model", "state_dict"):
        state = state[key] if isinstance(state, dict) and isinstance(state.get(key), dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UsageError(f"{path}: holds no state dict of tensors")
    expected = vit.state_dict()
    found = {key: value for key, value in state.items() if not key.startswith("head.")}
    wrong = sorted(expected.keys() ^ found.keys())
    wrong += [key for key in expected if key in found and expected[key].shape != found[key].shape]
    if wrong:
        raise UsageError(
            f"{path}: does not fit timm:{name}, {len(wrong)} tensors are missing, unexpected or of another shape, "
            f"first {wrong[0]}; export the timm model's own state dict"
        )
    vit.load_state_dict(found)
    image, patch = vit.patch_embed.img_size, vit.patch_embed.patch_size
    if image[0] != image[1] or patch[0] != patch[1]:
        raise UsageError(
            f"--backbone timm:{name}: wants images of {image} in patches of {patch}, they should be square"
        )
    dim = vit.embed_dim
    ratio = vit.blocks[0].mlp.fc1.out_features / dim
    arch = Arch(
        image_size=image[0],
        patch_size=patch[0],
        dim=dim,
        depth=len(vit.blocks),
        heads=vit.blocks[0].attn.num_heads,
        mlp_ratio=ratio,
    )
    return vit, arch


def build_vit(arch: Arch) -> VisionTransformer:
    """Timm's ViT of this size without a head; its state dict has the official encoders' names and shapes.

    With a class token it is MAE's; without, I-JEPA's, whose features are the mean of the patches after the final norm.
    """
    return VisionTransformer(
        img_size=arch.image_size,
        patch_size=arch.patch_size,
        embed_dim=arch.dim,
        depth=arch.depth,
        num_heads=arch.heads,
        mlp_ratio=arch.mlp_ratio,
        num_classes=0,
        class_token=arch.class_token,
        global_pool="token" if arch.class_token else "avg",
        fc_norm=False,  # the norm stays before the pooling
    )


def psi_of(vit: VisionTransformer) -> Phi:
    """ψ's trainable tensors from scratch: all but the position table, which MAE and I-JEPA keep fixed."""
    return {name: p for name, p in vit.named_parameters() if name != "pos_embed"}


def sincos(dim: int, side: int) -> Tensor:
    """The fixed position table (1, 1 + side², dim): half of the channels is the column, the other half the row.

    The first row is the class token's, all zeros.
    """
    omega = 10_000 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim / 4))
    angle = torch.arange(side, dtype=torch.float64)[:, None] * omega  # (side, dim / 4)
    table = torch.cat([angle.sin(), angle.cos()], 1)  # (side, dim / 2)
    column, row = table.repeat(side, 1), table.repeat_interleave(side, 0)
    return torch.cat([torch.zeros(1, dim), torch.cat([column, row], 1)]).float()[None]


def sizes_of(
    path: Path, data: Mapping[str, Any], backbone: str, default: Arch, image_size: int | None, patch_size: int | None
) -> Arch:
    """Sizes of a checkpoint: those that `pretrain` wrote into it, or the official ones (UsageError for others)."""
    try:
        about = json.loads(data["bisslight"]) if "bisslight" in data else {"backbone": backbone}
        arch = Arch.model_validate(about["arch"]) if "arch" in about else default
        trained = about["backbone"]
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: what it says of its sizes cannot be read; run `pretrain` again") from error
    if trained != backbone:
        raise UsageError(f"{path}: was trained as {trained}, give --backbone {trained}")
    if not about.get("norm_pix", True):
        raise UsageError(f"{path}: its decoder predicts raw pixels; align needs one for normalised pixels")
    if image_size not in (None, arch.image_size):
        raise UsageError(f"--image-size {image_size}: {path} is for {arch.image_size} px, leave the option out")
    if patch_size not in (None, arch.patch_size):
        raise UsageError(f"--patch-size {patch_size}: {path} has patches of {arch.patch_size}, leave the option out")
    return arch


def misfit(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """The first thing that tells two state dicts apart, None where keys and shapes are equal."""
    if wrong := sorted(k for k in expected.keys() & found.keys() if expected[k].shape != found[k].shape):
        return f"{wrong[0]} is {tuple(found[wrong[0]].shape)}, not {tuple(expected[wrong[0]].shape)}"
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if not missing and not extra:
        return None
    return f"{len(missing)} keys missing {missing[:1]}, {len(extra)} unexpected {extra[:1]}"


# --- theta -----------------------------------------------------------------------------------------------------------


def init_theta(depth: int, rank: int, dim: int, rng: torch.Generator) -> Tensor:
    """Line 2 of Algorithm 1: θ (K, 4 r dim), A Kaiming-uniform (a = √5, that is U(±1/√dim)) and B = 0, so f_θ = f_ψ.

    Raises UsageError where r > dim: such a product has rank dim at most.
    """
    if not 1 <= rank <= dim:
        raise UsageError(f"rank {rank}: LoRA on a backbone of width {dim} needs a rank from 1 to {dim}")
    theta = torch.zeros(depth, 4, rank, dim)
    theta[:, 0::2].uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim), generator=rng)
    return theta.view(depth, -1)


def factors(theta: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A_q (K, r, dim), B_q (K, dim, r), A_v, B_v: θ in the layout of the LoRA paper and of HF peft (views)."""
    A_q, B_qT, A_v, B_vT = theta.view(len(theta), 4, -1, dim).unbind(1)
    return A_q, B_qT.mT, A_v, B_vT.mT


def from_factors(A_q: Tensor, B_q: Tensor, A_v: Tensor, B_v: Tensor) -> Tensor:
    """Inverse of `factors`, for readers of other layouts."""
    return torch.stack([A_q, B_q.mT, A_v, B_v.mT], 1).reshape(len(A_q), -1)


def merge(backbone: Backbone, theta: Tensor) -> dict[str, Tensor]:
    """A plain timm state dict of f_θ: W_q + s B_q A_q and W_v + s B_v A_v in `qkv.weight`, all else copied from ψ."""
    state = {name: tensor.detach().clone() for name, tensor in backbone.vit.state_dict().items()}
    dim = backbone.dim
    for k, (A_q, B_q, A_v, B_v) in enumerate(zip(*factors(theta.detach(), dim), strict=True)):
        W = state[f"blocks.{k}.attn.qkv.weight"]  # (3 dim, dim)
        W[:dim] += backbone.scale * (B_q @ A_q).to(W)
        W[2 * dim :] += backbone.scale * (B_v @ A_v).to(W)
    return state


def drop_path(rate: float, depth: int, batch: int, rng: torch.Generator) -> Tensor | None:
    """Drop-path factors (depth, 2, batch): 0, or 1/(1 − rate_k), with rate_k rising linearly from 0 to `rate`.

    Drawn outside the network, so that a step can be replayed; None at rate 0.
    """
    if rate == 0:
        return None
    survive = 1 - torch.linspace(0, rate, depth).view(-1, 1, 1)
    return (torch.rand(depth, 2, batch, generator=rng) < survive) / survive


# --- downstream head -------------------------------------------------------------------------------------------------


def init_head(dim: int, classes: int, rng: torch.Generator, batchnorm: bool = False) -> Phi:
    """φ_D: a linear layer with torch's default initialisation, U(±1/√dim) for weight and bias; BatchNorm before it."""
    bound = 1 / math.sqrt(dim)
    shapes = {"weight": (classes, dim), "bias": (classes,)}
    phi = {name: torch.empty(shape).uniform_(-bound, bound, generator=rng) for name, shape in shapes.items()}
    return phi | ({"norm.weight": torch.ones(dim), "norm.bias": torch.zeros(dim)} if batchnorm else {})


def init_stats(phi_D: Phi) -> Phi:
    """Running statistics of a head's BatchNorm: not trained, so no part of φ_D until it is saved. Empty without one."""
    if "norm.weight" not in phi_D:
        return {}
    return {"norm.mean": torch.zeros_like(phi_D["norm.bias"]), "norm.var": torch.ones_like(phi_D["norm.bias"])}


class Here(NamedTuple):
    """What acts in one training pass alone; Algorithm 1 hands it to the pass at θ_D and not to that at θ_P."""

    drop: Tensor | None = None  # drop-path factors
    stats: Phi | None = None  # BatchNorm statistics that the pass is to update


def features(backbone: Backbone, theta: Tensor | None, images: Tensor, drop: Tensor | None = None) -> Tensor:
    """What enters the head, (B, dim). Pooling is timm's of this network.

    For MAE's it takes the class token after the final LayerNorm (App. C.2), for I-JEPA's the mean of the patches after
    it (App. D.1: "from the final transformer layer").
    """
    return backbone.vit.forward_head(backbone(images, theta, drop=drop), pre_logits=True)


def logits(
    backbone: Backbone,
    theta: Tensor | None,
    phi_D: Phi,
    images: Tensor,
    here: Here | None = None,
    training: bool = False,
    summed: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Tensor:
    """h^D(f_θ(images)), (B, C): a linear layer on the features, after BatchNorm (eps 1e-6) where φ_D has one.

    BatchNorm uses the batch's own moments in training, and the statistics saved with φ_D otherwise. `summed` makes them
    those of a batch that several processes share: a differentiable sum over processes.
    """
    x = features(backbone, theta, images, here.drop if here else None)
    if "norm.weight" in phi_D:
        stats = here.stats if here else None
        wide = x.double()
        mean, var = moments(wide, stats, summed) if training else (phi_D["norm.mean"], phi_D["norm.var"])
        x = ((wide - mean) * (var + 1e-6).rsqrt()).to(phi_D["norm.weight"])
        x = x * phi_D["norm.weight"] + phi_D["norm.bias"]
    return F.linear(x, phi_D["weight"], phi_D["bias"])


def moments(x: Tensor, stats: Phi | None, summed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance over all processes' rows of x (B, dim), float64; updates `stats` with momentum 0.1.

    In float32, images whose features are close would lose most digits of their gradient.
    """
    n = summed(x.new_tensor(float(len(x))))
    mean = summed(x.sum(0)) / n
    var = summed((x - mean).square().sum(0)) / n
    if stats:
        with torch.no_grad():
            stats["norm.mean"].lerp_(mean.to(stats["norm.mean"]), 0.1)
            stats["norm.var"].lerp_((var * n / (n - 1)).to(stats["norm.var"]), 0.1)
    return mean, var


# --- adapter files ---------------------------------------------------------------------------------------------------


def adapter_bytes(theta: Tensor, phi_D: Phi, metadata: Mapping[str, str]) -> bytes:
    """θ and the head as a safetensors file's content; the metadata (`adapter_metadata`) says what they belong to."""
    tensors = {"theta": theta} | {f"head.{name}": tensor for name, tensor in phi_D.items()}
    data = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, {"format": FORMAT, **metadata})
    header, content = opened(data)
    header["__metadata__"]["sha256"] = seal(header, content)
    text = ordered(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and content of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def ordered(header: Mapping[str, Any]) -> bytes:
    """A header as text; the library writes metadata in random order; sorted, equal adapters are equal files."""
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def seal(header: Mapping[str, Any], content: bytes) -> str:
    """sha256 of an adapter file's header, the digest itself left out, and of its tensors."""
    about = {key: value for key, value in header["__metadata__"].items() if key != "sha256"}
    return hashlib.sha256(ordered({**header, "__metadata__": about}) + content).hexdigest()


def load_adapter(path: Path) -> tuple[Tensor, Phi, dict[str, str]]:
    """Read a file of `adapter_bytes`: θ, the head (empty if there is none) and the metadata (UsageError otherwise)."""
    try:
        path.open("rb").close()  # the library's own word for any failure is "no such file"
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"adapter {path}: not a readable safetensors file ({why}); copy or make it again") from error
    if metadata.get("format") != FORMAT or "theta" not in tensors or tensors["theta"].ndim != 2:
        raise UsageError(f"adapter {path}: format {metadata.get('format')!r}, this program reads {FORMAT!r}")
    # safetensors has no checksum of its own, and a flipped bit in a float is a float
    if "sha256" in metadata and metadata.pop("sha256") != seal(*opened(path.read_bytes())):
        raise UsageError(f"adapter {path}: is damaged (sha256), copy it again or run its command again")
    return tensors.pop("theta"), {key.removeprefix("head."): value for key, value in tensors.items()}, metadata


def adapter_metadata(arch: Arch, backbone: str, rank: int, alpha: float, **rest: str | int | float) -> dict[str, str]:
    """The keys every adapter file carries: backbone, arch, rank, alpha; `rest` adds pretext, dataset, weights ..."""
    about = {"backbone": backbone, "arch": json.dumps(arch.model_dump()), "rank": rank, "alpha": alpha} | rest
    return {key: str(value) for key, value in about.items()}
