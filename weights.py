"""Checkpoints: where they are, what they hold, and the network of f_θ made of them (App. C.1).

    load_backbone  an MAE or I-JEPA checkpoint, official or of `pretrain`
    fetch          its file; an official one is downloaded on first use
    load_theta     θ from an align run, an adapter file, or a LoRA file of the released program
    sincos         the position table that MAE and I-JEPA share

Raises UsageError for a wrong setting; a wrong file also raises ValueError or OSError.
"""

import json
import math
import sys
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import ijepa
import mae
from config import BACKBONES, Arch, Model, Shape, UsageError
from lora import Backbone, from_factors, load_adapter

MAE_FILES = "https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_{}_full.pth"
OFFICIAL = {  # (URL, size in MB) of the files that hold the pretext head, too
    ("vit_b16", "mae"): (MAE_FILES.format("base"), 447.6),
    ("vit_l16", "mae"): (MAE_FILES.format("large"), 1318.2),
    ("vit_h14", "mae"): (MAE_FILES.format("huge"), 2628.3),
    ("vit_h14", "ijepa"): (
        "https://dl.fbaipublicfiles.com/ijepa/IN1K-vit.h.14-300e.pth.tar",
        10_360.0,
    ),
}


def weights_of(cfg: Model) -> Path:
    """The checkpoint: what --weights names, or where the official file is kept (UsageError)."""
    if cfg.weights is not None:
        path = cfg.weights / "backbone.pth" if cfg.weights.is_dir() else cfg.weights
        if not path.is_file():
            raise UsageError(f"--weights {cfg.weights}: is no checkpoint or finished pretrain run")
        return path
    if (cfg.backbone, cfg.pretext) not in OFFICIAL:
        raise UsageError(
            f"--weights FILE: {cfg.backbone} with {cfg.pretext} needs a checkpoint, "
            "of `bisslight pretrain` or in the official layout"
        )
    name = OFFICIAL[cfg.backbone, cfg.pretext][0].rpartition("/")[2]
    return Path(torch.hub.get_dir()).resolve() / "checkpoints" / name


def fetch(cfg: Model) -> Path:
    """The checkpoint's file. An official one is downloaded on first use, whole or not at all."""
    path = weights_of(cfg)
    if path.exists():
        return path
    url, size = OFFICIAL[cfg.backbone, cfg.pretext]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), progress=sys.stderr.isatty())
        found = path.stat().st_size / 1e6
        if abs(found - size) > 0.01 * size:
            path.unlink()
            raise OSError(f"{found:.0f} MB arrived, {size:.0f} MB were expected")
    except OSError as error:
        raise UsageError(f"{url}: {error}; try `curl -C - -o {path} {url}`") from error
    return path


def load_backbone(cfg: Model) -> tuple[Backbone, Any, Arch]:
    """f_ψ, frozen, MAE's decoder or I-JEPA's predictor, and the sizes, on the CPU.

    Every key and shape is checked (UsageError).
    """
    path = fetch(cfg)
    try:
        data = dict(read_tensors(path))
        if cfg.pretext == "ijepa":
            encoder, found = ijepa.split_state(data, cfg.base)
        else:
            encoder, found = mae.split_state(dict(data.get("model", data)))
        arch = arch_of(data, cfg)
        with torch.device("meta"):
            vit, head = build_vit(arch), build_head(arch, cfg.pretext)
        assign(head, found)
        assign(vit, encoder)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"--weights {path}: {error}") from error
    return Backbone(vit, cfg.alpha / cfg.rank).requires_grad_(False), head, arch


def read_tensors(path: Path) -> Any:
    """A .safetensors file, or torch.load without running code (ValueError where it is neither)."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        zipped = zipfile.is_zipfile(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals([Namespace]):
            warnings.simplefilter("ignore")  # of old formats; official files hold a Namespace
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError
        raise ValueError(
            f"{path.name} cannot be read as a checkpoint "
            f"({type(error).__name__}: {' '.join(str(error).split())[:100]})"
        ) from error


def assign(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a network its tensors (ValueError naming the first that is missing or differs)."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if wrong := sorted(name for name in wanted | found if wanted.get(name) != found.get(name)):
        raise ValueError(
            f"{len(wrong)} tensors are missing, unexpected or of another shape, such as "
            f"{wrong[0]}: {found.get(wrong[0])} in place of {wanted.get(wrong[0])}; "
            "see --backbone and --pretext"
        )
    network.load_state_dict({k: v.float() for k, v in state.items()}, assign=True)


def arch_of(data: Any, cfg: Shape) -> Arch:
    """Sizes of a checkpoint: what `pretrain` wrote into it, or the official ones (ValueError)."""
    arch = BACKBONES[cfg.backbone]._replace(class_token=cfg.pretext != "ijepa")
    if "bisslight" in data:
        about = json.loads(data["bisslight"])
        arch, trained = Arch(**about["arch"]), about["backbone"]
        if trained != cfg.backbone:
            raise ValueError(f"was trained as {trained}, give --backbone {trained}")
    for name in ("image_size", "patch_size"):
        if getattr(cfg, name) not in (None, getattr(arch, name)):
            raise ValueError(
                f"has {getattr(arch, name)} in place of --{name.replace('_', '-')} "
                f"{getattr(cfg, name)}; leave the option out"
            )
    return arch


def build_vit(arch: Arch) -> VisionTransformer:
    """A timm ViT of these sizes without a head; names and shapes are the official encoders'.

    With a class token it is MAE's. Without, it is I-JEPA's, whose features are the mean of the
    patches after the final norm.
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
        fc_norm=False,  # the norm comes before the pooling
    )


def build_head(arch: Arch, pretext: str) -> nn.Module:
    """h^P in the official sizes: I-JEPA's predictor, otherwise MAE's decoder (ValueError)."""
    if arch.image_size % arch.patch_size:
        raise ValueError(f"{arch.image_size} px is not a multiple of patches of {arch.patch_size}")
    patches = (arch.image_size // arch.patch_size) ** 2
    if pretext == "ijepa":
        size = arch.predictor_dim, arch.predictor_depth, arch.heads
        return ijepa.Predictor(arch.dim, patches, *size, arch.mlp_ratio)
    size = arch.decoder_dim, arch.decoder_depth, arch.decoder_heads
    return mae.Decoder(arch.dim, patches, arch.patch_size, *size, arch.mlp_ratio)


@torch.no_grad()
def initialise(networks: Sequence[nn.Module], pretext: str, rng: torch.Generator) -> None:
    """Start new networks in place as the task's authors do, with the fixed table of positions."""
    (ijepa.init if pretext == "ijepa" else mae.init)(networks, rng)
    for name, table in nn.ModuleList(networks).state_dict().items():
        if name.endswith("pos_embed"):  # (1, n, width); I-JEPA has no row for a class token
            n, width = table.shape[1:]
            table.copy_(sincos(width, math.isqrt(n))[:, -n:])


def pretext_task(
    cfg: Any, backbone: Backbone, head: Any, steps: int, theta: Tensor | None, teacher: Any = None
) -> mae.MAE | ijepa.IJEPA:
    """`mae.MAE`, or `ijepa.IJEPA` for `steps` steps (ValueError); θ and teacher as there."""
    if cfg.pretext == "mae":
        return mae.MAE(backbone, head, cfg.mask_ratio)
    return ijepa.IJEPA(backbone, head, cfg, (cfg.ema, steps), theta, teacher)


def sincos(dim: int, side: int) -> Tensor:
    """The fixed position table (1, 1 + side², dim) of MAE and I-JEPA; the first row is all zeros.

    One half of the channels tells the column, the other half the row.
    """
    omega = 10_000 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim / 4))
    angle = torch.arange(side, dtype=torch.float64)[:, None] * omega  # (side, dim / 4)
    table = torch.cat([angle.sin(), angle.cos()], 1)  # (side, dim / 2)
    column, row = table.repeat(side, 1), table.repeat_interleave(side, 0)
    return torch.cat([torch.zeros(1, dim), torch.cat([column, row], 1)]).float()[None]


# --- adapters -----------------------------------------------------------------------------------

RELEASED = "base_model.model.blocks.{}.attn.qkv.{}.lora_{}.default.weight"  # block, q or v, A or B


def load_theta(start: Path, dim: int) -> tuple[Tensor, dict[str, Any]]:
    """θ and what its file says of itself; a file of the released program says nothing, {}."""
    if start.suffix == ".safetensors":
        theta, _, about = load_adapter(start)
        return theta, about
    return from_released(read_tensors(start), dim), {}


def from_released(state: Any, dim: int) -> Tensor:
    """θ from the released program's LoRA file; ValueError where it is another layout."""
    with suppress(LookupError, TypeError, RuntimeError, AttributeError):
        layers = range(len(state) // 4)
        A_q, B_q, A_v, B_v = (
            torch.stack([state[RELEASED.format(k, *kind)].float() for k in layers])
            for kind in ("qA", "qB", "vA", "vB")
        )
        if len(state) == 4 * len(layers) and A_q.shape[2] == dim:
            return from_factors(A_q, B_q, A_v, B_v)
    raise ValueError(f"is not a LoRA file on q and v of width {dim} in the released layout")
