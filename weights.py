"""Checkpoints: where they are, what they hold, and the network of f_θ made of them (App. C.1).

    load_backbone  an MAE or I-JEPA checkpoint, official or of `pretrain`, or any timm ViT's weights
    fetch          downloads the official file on first use
    load_theta     θ from an align run, an adapter file, or a LoRA file of the released program
    sincos         the position table that MAE and I-JEPA share

Raises UsageError for a wrong setting; a wrong file also raises ValueError or OSError.
"""

import hashlib
import json
import re
import sys
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import ijepa
import mae
from config import BACKBONES, Arch, Model, Shape, UsageError, nearest
from lora import Backbone, check_vit, from_factors, load_adapter

MAE_FILES = "https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_{}_full.pth"
JEPA_FILE = "https://dl.fbaipublicfiles.com/ijepa/IN1K-vit.h.14-300e.pth.tar"
OFFICIAL = {  # (URL, size in MB) of the files that hold the pretext head, too
    ("vit_b16", "mae"): (MAE_FILES.format("base"), 447.6),
    ("vit_l16", "mae"): (MAE_FILES.format("large"), 1318.2),
    ("vit_h14", "mae"): (MAE_FILES.format("huge"), 2628.3),
    ("vit_h14", "ijepa"): (JEPA_FILE, 10_360.0),
}


class Loaded(NamedTuple):
    """A frozen backbone, with its pretext head where its file has one, and where it came from."""

    backbone: Backbone
    pretext_head: nn.Module | None  # MAE's decoder, I-JEPA's predictor
    arch: Arch
    digest: str  # sha256 of the file
    channels: tuple[Any, Any] | None  # mean and std it was trained with; None: the dataset's


def weights_of(cfg: Model) -> Path:
    """The checkpoint: what --weights names, or where the official file is kept (UsageError)."""
    if cfg.weights is not None:
        path = cfg.weights / "backbone.pth" if cfg.weights.is_dir() else cfg.weights
        if not path.is_file():
            raise UsageError(f"--weights {cfg.weights}: is no checkpoint or finished pretrain run")
        return path
    if (cfg.backbone, cfg.pretext) not in OFFICIAL:
        timm = cfg.backbone.startswith("timm:")
        how = "save its timm state dict to a file" if timm else "`bisslight pretrain` makes one"
        what = f"{cfg.backbone} with {cfg.pretext} needs a checkpoint"
        raise UsageError(f"--weights FILE: {what}, {how}")
    name = OFFICIAL[cfg.backbone, cfg.pretext][0].rpartition("/")[2]
    return Path(torch.hub.get_dir()).resolve() / "checkpoints" / name


def to_download(cfg: Model) -> tuple[str, float] | None:
    """(URL, MB) of the official file where it is needed and not there yet."""
    return None if weights_of(cfg).exists() else OFFICIAL[cfg.backbone, cfg.pretext]


def fetch(cfg: Model) -> None:
    """Download the official file on first use; it is there whole or not at all (UsageError)."""
    if (missing := to_download(cfg)) is None:
        return
    (url, size), path = missing, weights_of(cfg)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(part), progress=sys.stderr.isatty())
        found = part.stat().st_size / 1e6
        if abs(found - size) > 0.01 * size:
            raise OSError(f"{found:.0f} MB arrived, {size:.0f} MB were expected")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"{url}: {error}; try `curl -C - -o {path} {url}`") from error


def load_backbone(cfg: Model) -> Loaded:
    """ψ, frozen, and its pretext head, on the CPU; every key and shape is checked."""
    path = weights_of(cfg)
    data = read_tensors(path)
    head: nn.Module | None = None
    channels = None
    if cfg.backbone.startswith("timm:"):
        vit, arch = timm_vit(cfg.backbone.removeprefix("timm:"), cfg.image_size)
        encoder = {k: v for k, v in state_dict(data).items() if not k.startswith("head.")}
        trained: Any = vit.pretrained_cfg
        channels = trained["mean"], trained["std"]
    else:
        jepa = cfg.pretext == "ijepa"
        encoder, found = (
            ijepa.split_state(data, cfg.base) if jepa else mae.split_state(state_dict(data))
        )
        arch = arch_of(data, cfg, path)
        with torch.device("meta"):
            vit, head = build_vit(arch), build_head(arch, cfg.pretext)
        assign(head, found, path, cfg.backbone)
    assign(vit, encoder, path, cfg.backbone)
    backbone = Backbone(vit, cfg.alpha / cfg.rank).requires_grad_(False)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Loaded(backbone, head, arch, digest, channels)


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
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ValueError(f"{path.name} cannot be read as a checkpoint ({why})") from error


def state_dict(data: Any) -> dict[str, Tensor]:
    """The state dict of a file, also below "model" or "state_dict"; {} where there is none."""
    for key in ("model", "state_dict"):
        data = data[key] if isinstance(data, dict) and isinstance(data.get(key), dict) else data
    return data if isinstance(data, dict) else {}


def assign(network: nn.Module, state: Mapping[str, Tensor], path: Path, name: str) -> None:
    """Give a network its tensors (UsageError naming the first that is missing or differs)."""
    wanted = network.state_dict()
    wrong = sorted(wanted.keys() ^ state.keys())
    wrong += [k for k in wanted if k in state and wanted[k].shape != state[k].shape]
    if wrong:
        depth = sum(key.startswith("blocks.") and key.endswith("norm1.weight") for key in state)
        width = len(state["norm.weight"]) if "norm.weight" in state else 0
        fits = [k for k, b in BACKBONES.items() if (b.arch.dim, b.arch.depth) == (width, depth)]
        remedy = f"it fits --backbone {fits[0]}" if fits and fits[0] != name else "see --backbone"
        raise UsageError(
            f"{path}: is not {name}; {len(wrong)} tensors are missing, unexpected or of another "
            f"shape, first {wrong[0]}; {remedy}"
        )
    network.load_state_dict({k: v.float() for k, v in state.items()}, assign=True)


def arch_of(data: Any, cfg: Shape, path: Path) -> Arch:
    """Sizes of a checkpoint: what `pretrain` wrote into it, or the official ones (UsageError)."""
    arch = BACKBONES[cfg.backbone].arch._replace(class_token=cfg.pretext != "ijepa")
    if isinstance(data, dict) and "bisslight" in data:
        about = json.loads(data["bisslight"])
        arch, trained = arch_from(about["arch"]), about["backbone"]
        if trained != cfg.backbone:
            raise UsageError(f"{path}: was trained as {trained}, give --backbone {trained}")
    for name in ("image_size", "patch_size"):
        if getattr(cfg, name) not in (None, getattr(arch, name)):
            flag = f"--{name.replace('_', '-')} {getattr(cfg, name)}"
            raise UsageError(f"{flag}: {path} has {getattr(arch, name)}, leave the option out")
    return arch


def arch_from(found: Mapping[str, Any]) -> Arch:
    """Sizes as `pretrain` wrote them; its first edition had a name for each size of the heads."""
    new = dict(found)
    for head, parts in (("decoder", ("dim", "depth", "heads")), ("predictor", ("dim", "depth"))):
        named = [new.pop(f"{head}_{part}", None) for part in parts]
        new[head] = tuple(new.get(head, named))
    return Arch(**new)


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
    """h^P in the official sizes: I-JEPA's predictor, otherwise MAE's decoder."""
    patches = side(arch) ** 2
    if pretext == "ijepa":
        width, depth = arch.predictor
        return ijepa.Predictor(arch.dim, patches, width, depth, arch.heads, arch.mlp_ratio)
    return mae.Decoder(arch.dim, patches, arch.patch_size, *arch.decoder, arch.mlp_ratio)


def side(arch: Arch) -> int:
    """Patches along a side of the image (ValueError where they do not fill it)."""
    if arch.image_size % arch.patch_size:
        raise ValueError(f"{arch.image_size} px is not a multiple of patches of {arch.patch_size}")
    return arch.image_size // arch.patch_size


def sincos(dim: int, side: int) -> Tensor:
    """The fixed position table (1, 1 + side², dim) of MAE and I-JEPA; the first row is all zeros.

    One half of the channels tells the column, the other half the row.
    """
    omega = 10_000 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim / 4))
    angle = torch.arange(side, dtype=torch.float64)[:, None] * omega  # (side, dim / 4)
    table = torch.cat([angle.sin(), angle.cos()], 1)  # (side, dim / 2)
    column, row = table.repeat(side, 1), table.repeat_interleave(side, 0)
    return torch.cat([torch.zeros(1, dim), torch.cat([column, row], 1)]).float()[None]


def timm_vit(name: str, image_size: int | None) -> tuple[VisionTransformer, Arch]:
    """Any plain timm ViT, for fine-tuning; ValueError for another kind of network."""
    known: list[str] = timm.list_models("*")
    if name.partition(".")[0] not in known:
        raise UsageError(f"--backbone timm:{name}: timm has no such model, {nearest(name, known)}")
    size: dict[str, Any] = {"img_size": image_size} if image_size else {}
    vit: Any = check_vit(timm.create_model(name, pretrained=False, num_classes=0, **size))
    image, patch = vit.patch_embed.img_size, vit.patch_embed.patch_size
    if image[0] != image[1] or patch[0] != patch[1]:
        raise ValueError(f"wants images of {image} in patches of {patch}, they should be square")
    heads, ratio = vit.blocks[0].attn.num_heads, vit.blocks[0].mlp.fc1.out_features / vit.embed_dim
    return vit, Arch(vit.embed_dim, len(vit.blocks), heads, image[0], patch[0], ratio)


# --- adapters -----------------------------------------------------------------------------------

RELEASED = re.compile(
    r"base_model\.model\.blocks\.(\d+)\.attn\.qkv\.([qv])\.lora_([AB])\.default\.weight"
)


def load_theta(start: Path, dim: int) -> tuple[Tensor, dict[str, Any]]:
    """θ and what its file says of itself; a file of the released program says nothing, {}."""
    start = start / "adapter.safetensors" if start.is_dir() else start
    if start.suffix == ".safetensors":
        theta, _, about = load_adapter(start)
        return theta, about
    return from_released(read_tensors(start), dim), {}


def from_released(state: Any, dim: int) -> Tensor:
    """θ from the released program's LoRA file; ValueError where it is another layout."""
    items = state.items() if isinstance(state, dict) else ()
    found = {m.groups(): t.float() for key, t in items if (m := RELEASED.fullmatch(str(key)))}
    depth = len(found) // 4
    wanted = [(str(k), part, matrix) for part in "qv" for matrix in "AB" for k in range(depth)]
    if not found or len(found) != len(items) or found.keys() != {*wanted}:
        raise ValueError("is not a LoRA file on q and v in the released program's layout")
    rank = len(found["0", "q", "A"])
    for key, tensor in found.items():
        if tensor.shape != ((rank, dim) if key[2] == "A" else (dim, rank)):
            what = f"lora_{key[2]} of block {key[0]} is {tuple(tensor.shape)}"
            raise ValueError(f"{what}, rank {rank} on width {dim} is wanted")
    return from_factors(
        *(
            torch.stack([found[str(k), *kind] for k in range(depth)])
            for kind in ("qA", "qB", "vA", "vB")
        )
    )
