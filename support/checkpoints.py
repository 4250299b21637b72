"""Checkpoints: where they are, what they hold, and the networks made of them (App. C.1)."""

import json
import math
import sys
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import ijepa
import mae
from config import BACKBONES, Arch, Network, Shape
from lora import Backbone, Phi
from support.errors import UsageError, checking

SITE = "https://dl.fbaipublicfiles.com"
OFFICIAL = {  # (URL, size in MB) of the files that hold the pretext head, too
    ("vit_b16", "mae"): (f"{SITE}/mae/pretrain/mae_pretrain_vit_base_full.pth", 447.6),
    ("vit_l16", "mae"): (f"{SITE}/mae/pretrain/mae_pretrain_vit_large_full.pth", 1318.2),
    ("vit_h14", "mae"): (f"{SITE}/mae/pretrain/mae_pretrain_vit_huge_full.pth", 2628.3),
    ("vit_h14", "ijepa"): (f"{SITE}/ijepa/IN1K-vit.h.14-300e.pth.tar", 10_360.0),
}


def weights_of(cfg: Network) -> Path:
    """The checkpoint: what --weights names, or where the official file is kept (UsageError)."""
    if cfg.weights is not None:
        path = cfg.weights / "backbone.pth" if cfg.weights.is_dir() else cfg.weights
        if not path.is_file():
            raise UsageError(f"--weights {cfg.weights}: is no checkpoint or finished pretrain run")
        return path
    if (cfg.backbone, cfg.pretext) not in OFFICIAL:
        raise UsageError(
            f"--weights FILE: {cfg.backbone} with {cfg.pretext} needs one, see `bisslight pretrain`"
        )
    url, _ = OFFICIAL[cfg.backbone, cfg.pretext]
    return Path(torch.hub.get_dir()).resolve() / "checkpoints" / url.rpartition("/")[2]


def load_backbone(cfg: Any) -> tuple[Backbone, Any, Arch]:
    """Frozen f_ψ, MAE's decoder or I-JEPA's predictor, and their sizes; on the CPU (UsageError).

    An official file is downloaded when it is used for the first time.
    """
    path = weights_of(cfg)
    if not path.exists():
        url, size = OFFICIAL[cfg.backbone, cfg.pretext]
        with checking(url, f"try `curl -C - -o {path} {url}`"):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), progress=sys.stderr.isatty())
            arrived = path.stat().st_size / 1e6
            if abs(arrived - size) > 0.01 * size:
                path.unlink()
                raise OSError(f"{arrived:.0f} MB arrived, {size:.0f} MB were expected")
    try:
        if "mae_visualize" in path.name:
            raise ValueError("its decoder predicts raw pixels; take the file ending in _full.pth")
        data = dict(read_tensors(path))
        if cfg.pretext == "ijepa":
            encoder, found = ijepa.split_state(data, cfg.base)
        else:
            encoder, found = mae.split_state(dict(data.get("model", data)))
        arch = arch_of(data, cfg)
        with torch.device("meta"):
            vit, head = build_vit(arch), build_head(arch, cfg.pretext)
        for network, state in ((head, found), (vit, encoder)):
            network.load_state_dict({k: v.float() for k, v in state.items()}, assign=True)
        backbone = Backbone(vit, cfg.scale, cfg.recompute)
    except (ValueError, TypeError, OSError, RuntimeError) as error:  # of torch: names and shapes
        raise UsageError(
            f"--weights {path}: {str(error)[:500]}; see --backbone and --pretext"
        ) from error
    return backbone.requires_grad_(False), head, arch


def arch_of(data: Any, cfg: Shape) -> Arch:
    """Sizes of a checkpoint: what `pretrain` wrote into it, or the official ones (ValueError)."""
    arch = BACKBONES[cfg.backbone]._replace(class_token=cfg.pretext != "ijepa")
    if "bisslight" in data:
        about = json.loads(data["bisslight"])
        arch, trained = Arch(**about["arch"]), about["backbone"]
        if trained != cfg.backbone:
            raise ValueError(f"was trained as {trained}, give --backbone {trained}")
    for size in ("image_size", "patch_size"):
        if getattr(cfg, size) not in (None, getattr(arch, size)):
            raise ValueError(f"has {size} {getattr(arch, size)}; leave the option out")
    return arch


def vit_args(arch: Arch) -> dict[str, Any]:
    """These sizes as arguments of timm's VisionTransformer."""
    return {
        "img_size": arch.image_size, "patch_size": arch.patch_size, "embed_dim": arch.dim,
        "depth": arch.depth, "num_heads": arch.heads, "mlp_ratio": arch.mlp_ratio,
        "class_token": arch.class_token, "global_pool": "token" if arch.class_token else "avg",
        "fc_norm": False,  # I-JEPA's features are the mean of the patches after the final norm
    }  # fmt: skip


def build_vit(arch: Arch) -> VisionTransformer:
    """A timm ViT without a head: with a class token MAE's encoder, without one I-JEPA's."""
    return VisionTransformer(**vit_args(arch), num_classes=0)


def build_head(arch: Arch, pretext: str) -> nn.Module:
    """h^P in the official sizes: I-JEPA's predictor, otherwise MAE's decoder (ValueError)."""
    side, rest = divmod(arch.image_size, arch.patch_size)
    if rest:
        raise ValueError(f"{arch.image_size} px is not a multiple of patches of {arch.patch_size}")
    if pretext == "ijepa":
        size = arch.predictor_dim, arch.predictor_depth, arch.heads
        return ijepa.Predictor(arch.dim, side**2, *size, arch.mlp_ratio)
    size = arch.decoder_dim, arch.decoder_depth, arch.decoder_heads
    return mae.Decoder(arch.dim, side**2, arch.patch_size, *size, arch.mlp_ratio)


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
    """`mae.MAE`, or `ijepa.IJEPA` for `steps` steps (ValueError); theta, teacher: see IJEPA."""
    if cfg.pretext == "mae":
        return mae.MAE(backbone, head, cfg.mask_ratio)
    return ijepa.IJEPA(backbone, head, cfg, (cfg.ema, steps), theta, teacher)


def sincos(dim: int, side: int) -> Tensor:
    """The fixed position table (1, 1 + side², dim) of MAE and I-JEPA; its first row is zero."""
    omega = 10_000 ** -(torch.arange(dim // 4).double() / (dim / 4))
    angle = torch.outer(torch.arange(side).double(), omega)  # (side, dim / 4)
    table = torch.cat([angle.sin(), angle.cos()], 1)  # (side, dim / 2), of columns and of rows
    patches = torch.cat([table.repeat(side, 1), table.repeat_interleave(side, 0)], 1)
    return F.pad(patches, (0, 0, 1, 0)).float()[None]


FORMAT = "bisslight-adapter-1"


def save_adapter(theta: Tensor, phi_D: Phi, about: dict[str, Any]) -> bytes:
    """An adapter file's bytes (safetensors): θ, the head, and `about`, JSON values about them."""
    named = {"theta": theta} | {f"head.{name}": tensor for name, tensor in phi_D.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    # one metadata key: the library writes several in random order
    return save(tensors, {"bisslight": json.dumps(about | {"format": FORMAT}, sort_keys=True)})


def load_adapter(path: Path) -> tuple[Tensor, Phi, dict[str, Any]]:
    """θ, the head ({} without one) and `about` of a file (OSError; ValueError: not an adapter)."""
    data = path.read_bytes()  # the library opens no path that is not UTF-8
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"not a readable safetensors file ({error})") from error
    size = int.from_bytes(data[:8], "little")  # of the file's own header
    about: dict[str, Any] = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    if "bisslight" in about:  # the first edition had several keys, all of strings
        about = json.loads(about["bisslight"])
    theta = tensors.pop("theta", torch.empty(0))
    if about.pop("format", None) != FORMAT or theta.ndim != 2:
        raise ValueError(f"not an adapter: it is not of format {FORMAT} with a matrix theta")
    return theta, {name.removeprefix("head."): tensor for name, tensor in tensors.items()}, about


RELEASED = "base_model.model.blocks.{}.attn.qkv.{}.lora_{}.default.weight"  # block, q or v, A or B


def load_theta(start: Path, dim: int) -> tuple[Tensor, dict[str, Any]]:
    """θ, and what its file says of itself; {} if it is a released file (OSError, ValueError)."""
    if start.suffix == ".safetensors":
        theta, _, about = load_adapter(start)
        return theta, about
    return from_released(read_tensors(start), dim), {}


def from_released(state: Any, dim: int) -> Tensor:
    """θ from the released program's LoRA file; ValueError where it is another layout."""
    with suppress(LookupError, TypeError, RuntimeError, AttributeError):
        K, parts = len(state) // 4, ("qA", "qB", "vA", "vB")
        found = [state[RELEASED.format(k, *x)].float() for k in range(K) for x in parts]
        A, BT = torch.stack(found[::2]), torch.stack(found[1::2]).mT  # (2 K, r, dim) each
        if len(state) == 4 * K and A.shape[2] == dim:
            return torch.stack([A, BT], 1).view(K, -1)
    raise ValueError(f"is not a LoRA file on q and v of width {dim} in the released layout")


def read_tensors(path: Path) -> Any:
    """What torch.load finds in a file, without running code (ValueError where it cannot)."""
    try:
        zipped = zipfile.is_zipfile(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals([Namespace]):
            warnings.simplefilter("ignore")  # of old formats; official files hold a Namespace
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError
        raise ValueError(f"{path.name} is no readable checkpoint ({error!r:.100})") from error
