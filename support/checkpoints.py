"""Program: checkpoints, and the networks that are made of them (App. C.1).

official    the files of MAE's and I-JEPA's authors, downloaded on first use
own         backbone.pth of a `pretrain` run: the official layout, and the sizes as JSON beside it
timm        `support.timm_models`: the encoder alone
adapter     adapter.safetensors of a run: θ, a head, and what they were trained on
released    the LoRA file of the paper's own program
"""

import json
import sys
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load, save
from safetensors.torch import load_file as load_safetensors
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import ijepa
import mae
from config import (
    BACKBONES,
    OMNIGLOT,
    TIMM,
    AlignConfig,
    Arch,
    FinetuneConfig,
    Network,
    Pretext,
    Record,
    Shape,
)
from data import Channels, rng
from lora import Backbone, Phi
from support import omniglot, timm_models
from support.errors import UsageError, as_usage_error
from support.runs import LOG, sha256

# --- the backbone ---------------------------------------------------------------------------------


class Official(NamedTuple):
    """A file of the authors, one that holds the pretext head, too."""

    url: str
    megabytes: float


SITE = "https://dl.fbaipublicfiles.com"
OFFICIAL_FILES = {
    ("vit_b16", "mae"): Official(f"{SITE}/mae/pretrain/mae_pretrain_vit_base_full.pth", 447.6),
    ("vit_l16", "mae"): Official(f"{SITE}/mae/pretrain/mae_pretrain_vit_large_full.pth", 1318.2),
    ("vit_h14", "mae"): Official(f"{SITE}/mae/pretrain/mae_pretrain_vit_huge_full.pth", 2628.3),
    ("vit_h14", "ijepa"): Official(f"{SITE}/ijepa/IN1K-vit.h.14-300e.pth.tar", 10_360.0),
}


PretextHead = mae.Decoder | ijepa.Predictor  # h^P


class Pretrained(NamedTuple):
    """What a checkpoint gives."""

    backbone: Backbone  # f_ψ
    head: PretextHead
    arch: Arch
    sha256: str  # digest of the weights
    channels: timm_models.Normalisation | None = None  # None: each data set's own


def load_backbone(cfg: AlignConfig | FinetuneConfig) -> Pretrained:
    """The pretrained networks of these settings, on the CPU; a missing official file is fetched.

    ψ is frozen here: only θ and the heads are trained. The pretext head is not. Raises UsageError.
    """
    path = weights_of(cfg)
    if path is not None and not path.exists():
        download(OFFICIAL_FILES[cfg.backbone, cfg.pretext], path)
    thing = f"--weights {path}" if path else f"--backbone {cfg.backbone}"
    remedy = "see --backbone and --pretext"
    if cfg.weights is None and path:  # as it arrived, its size was right to within 1 % only
        remedy += ", or delete this file, and it is fetched anew"
    try:
        if path is None or cfg.backbone.startswith(TIMM):
            pretrained = load_timm(path, cfg)
        else:
            pretrained = load_networks(path, cfg)
    except ValueError as error:
        raise UsageError(f"{thing}: {error}; {remedy}") from error
    except (TypeError, KeyError, AttributeError, OSError, ArithmeticError) as error:
        # of a file of another kind, or with sizes of 0
        problem = f"is no checkpoint of {cfg.backbone} with {cfg.pretext}"
        raise UsageError(f"{thing}: {problem}; {remedy}") from error
    pretrained.backbone.requires_grad_(False)
    return pretrained


def load_networks(path: Path, cfg: AlignConfig | FinetuneConfig) -> Pretrained:
    """The networks of MAE's or I-JEPA's authors, or of `pretrain`; see `load_backbone`."""
    data = read_tensors(path)
    if cfg.pretext == "ijepa":
        encoder, decoder = ijepa.split_state(data, cfg.base)
    else:
        if "mae_visualize" in path.name:
            raise ValueError(
                "is the authors' file for pictures: its decoder predicts raw pixels, not "
                "standardised ones; take the file ending in _full.pth"
            )
        encoder, decoder = mae.split_state(tensors_in(data))
    arch = arch_of(data, cfg)
    with torch.device("meta"):  # no memory and no random numbers for what is replaced anyway
        vit = build_vit(arch)
        head = build_head(arch, cfg.pretext)
    assign(vit, encoder)
    assign(head, decoder)
    return Pretrained(Backbone(vit, cfg.scale, cfg.recompute), head, arch, sha256(path))


def load_timm(path: Path | None, cfg: AlignConfig | FinetuneConfig) -> Pretrained:
    """A network of timm, with the weights of a file or with timm's (None), and a fresh decoder."""
    arch = timm_models.read_arch(cfg)  # what cannot be used is refused before it is fetched
    vit = timm_models.load_vit(cfg, tensors_in(read_tensors(path)) if path else None)
    digest = timm_models.digest(vit.state_dict())  # the same at any image size
    vit.set_input_size((arch.image_size, arch.image_size))  # it resamples the table of positions
    head = build_head(arch, "mae")
    initialise([head], "mae", rng(cfg.seed, "decoder"))
    channels = timm_models.Normalisation(vit.pretrained_cfg["mean"], vit.pretrained_cfg["std"])
    return Pretrained(Backbone(vit, cfg.scale, cfg.recompute), head, arch, digest, channels)


def weights_of(cfg: Network) -> Path | None:
    """The checkpoint's path: what --weights names, or where the official file is kept.

    None: timm has the weights. An official file need not be there yet: `load_backbone` fetches it.
    Raises UsageError.
    """
    if cfg.weights is not None:
        path = cfg.weights
        if path == OMNIGLOT:
            path = omniglot.WEIGHTS
        if path.is_dir():  # of a pretrain run
            path = path / "backbone.pth"
        if not path.is_file():
            problem = f"--weights {cfg.weights}: is no checkpoint or finished pretrain run"
            if cfg.weights.is_dir():
                problem += "; an align run goes to `bisslight finetune --from RUN`"
            raise UsageError(problem)
        return path
    if cfg.backbone.startswith(TIMM):
        return None
    official = OFFICIAL_FILES.get((cfg.backbone, cfg.pretext))
    if official is None:
        raise UsageError(
            f"--weights FILE: {cfg.backbone} with {cfg.pretext} needs one, see `bisslight pretrain`"
        )
    name = official.url.rpartition("/")[2]
    return Path(torch.hub.get_dir()).resolve() / "checkpoints" / name


def check_weights_exist(cfg: Network) -> None:
    """Refuse (UsageError) weights that are not there; say so where a run will fetch them."""
    path = weights_of(cfg)
    if path is not None and not path.exists():
        url, megabytes = OFFICIAL_FILES[cfg.backbone, cfg.pretext]
        told = "--weights: %s MB, fetched by the run itself or `curl -C - -o %s %s`"
        LOG.info(told, f"{megabytes:,.0f}", path, url)


def download(official: Official, path: Path) -> None:
    """Fetch an official file; one of another size is deleted again. Raises UsageError."""
    url, megabytes = official
    with as_usage_error(url, f"try `curl -C - -o {path} {url}`, or give --weights FILE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), progress=sys.stderr.isatty())
        arrived = path.stat().st_size / 1e6
        if abs(arrived - megabytes) > 0.01 * megabytes:  # half of it, or an error page
            path.unlink()
            raise OSError(f"{arrived:.0f} MB arrived, {megabytes:.0f} MB were expected")


def tensors_in(data: Record) -> Phi:
    """A network's tensors by name, out of what a file holds."""
    return dict(data.get("model", data))  # some files hold the tensors alone


def assign(network: nn.Module, state: Phi) -> None:
    """Give a network these tensors, in float32; ValueError where names or shapes differ."""
    timm_models.check_tensors(network, state)
    in_float32 = {name: tensor.float() for name, tensor in state.items()}
    # assign: the network was built without memory, so there is nothing to copy into
    network.load_state_dict(in_float32, assign=True)


def arch_of(content: Record, cfg: Shape) -> Arch:
    """Sizes of a checkpoint: what `pretrain` wrote into it, or the official ones.

    ValueError where the settings ask for another network, image size or patch size.
    """
    if "bisslight" in content:
        written = json.loads(content["bisslight"])
        name = written["backbone"]
        if cfg.backbone != name:
            raise ValueError(f"was trained as {name}, give --backbone {name}")
        arch = Arch(**written["arch"])
    else:
        arch = BACKBONES[cfg.backbone]._replace(class_token=cfg.pretext != "ijepa")
    if cfg.image_size not in (None, arch.image_size):
        raise ValueError(f"has image_size {arch.image_size}; leave --image-size out")
    if cfg.patch_size not in (None, arch.patch_size):
        raise ValueError(f"has patch_size {arch.patch_size}; leave --patch-size out")
    return arch


def vit_args(arch: Arch) -> Record:
    """These sizes as arguments of timm's VisionTransformer."""
    return {
        "img_size": arch.image_size,
        "patch_size": arch.patch_size,
        "embed_dim": arch.dim,
        "depth": arch.depth,
        "num_heads": arch.heads,
        "mlp_ratio": arch.mlp_ratio,
        "class_token": arch.class_token,
        "global_pool": "token" if arch.class_token else "avg",
        "fc_norm": False,  # I-JEPA's features are the mean of the patches after the final norm
    }


def build_vit(arch: Arch) -> VisionTransformer:
    """A timm ViT without a head: with a class token MAE's encoder, without one I-JEPA's."""
    return VisionTransformer(**vit_args(arch), num_classes=0)


def build_head(arch: Arch, pretext: str) -> PretextHead:
    """h^P in the official sizes: I-JEPA's predictor, otherwise MAE's decoder. Raises UsageError."""
    size = arch.image_size
    if size % arch.patch_size:
        raise UsageError(f"--image-size {size}: is not a multiple of patches of {arch.patch_size}")
    patches = (size // arch.patch_size) ** 2
    if pretext == "ijepa":
        return ijepa.Predictor(
            arch.dim,
            patches,
            arch.predictor_dim,
            arch.predictor_depth,
            arch.heads,
            arch.mlp_ratio,
        )
    return mae.Decoder(
        arch.dim,
        patches,
        arch.patch_size,
        arch.decoder_dim,
        arch.decoder_depth,
        arch.decoder_heads,
        arch.mlp_ratio,
        arch.prefix,
    )


@torch.no_grad()
def initialise(networks: Sequence[nn.Module], pretext: str, rng: torch.Generator) -> None:
    """Give new networks the random start of the task's authors, in place; a ViT its positions."""
    if pretext == "ijepa":
        ijepa.init(networks, rng)
    else:
        mae.init(networks, rng)
    for network in networks:
        if isinstance(network, VisionTransformer):
            patches, prefix = network.patch_embed.num_patches, network.num_prefix_tokens
            table = mae.positions(network.embed_dim, patches, prefix)
            network.state_dict()["pos_embed"].copy_(table)


def build_pretext_task(
    cfg: Pretext,
    backbone: Backbone,
    head: PretextHead,
    steps: int,
    theta: Tensor | None,
    teacher: Backbone | None = None,
) -> mae.MAE | ijepa.IJEPA:
    """`mae.MAE`, or `ijepa.IJEPA` for `steps` steps; theta, teacher: see IJEPA.

    Raises UsageError.
    """
    with as_usage_error("--pretext"):
        if isinstance(head, mae.Decoder):
            return mae.MAE(backbone, head, cfg.mask_ratio)
        masks = ijepa.Masks(
            targets=cfg.targets,
            contexts=cfg.contexts,
            target_scale=cfg.target_scale,
            context_scale=cfg.context_scale,
            aspect=cfg.aspect,
            min_keep=cfg.min_keep,
            overlap=cfg.overlap,
        )
        return ijepa.IJEPA(backbone, head, masks, (cfg.ema, steps), theta, teacher)


def read_tensors(path: Path) -> Record:
    """What a file of torch or safetensors holds, read without running code. Raises ValueError."""
    try:
        if path.suffix == ".safetensors":
            return dict(load_safetensors(path))
        with warnings.catch_warnings(), torch.serialization.safe_globals([Namespace]):
            warnings.simplefilter("ignore")  # of old formats; official files hold a Namespace
            mmap = zipfile.is_zipfile(path)
            return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError
        raise ValueError(f"{path.name} is no readable checkpoint") from error


# --- adapters -------------------------------------------------------------------------------------

FORMAT = "bisslight-adapter-1"


class AdapterInfo(BaseModel, frozen=True):
    """What an adapter file says of itself. None: it does not say; a released file says nothing."""

    stage: str | None = None  # align or finetune
    backbone: str | None = None
    arch: Record | None = None  # sizes of the backbone
    weights_sha256: str | None = None
    pretext: str | None = None
    rank: int | None = None
    alpha: float | None = None
    dataset: str | None = None
    data_seed: int | None = None
    data_sha256: str | None = None
    channels: tuple[Channels, Channels] | None = None  # mean and deviation of the images
    whole_images: bool = False  # nothing of an image is cut off before it is classified
    # of align
    d_lr: float | None = None
    hypergrad: str | None = None
    unlike_paper: Record | None = None  # settings that are not the paper's
    # of finetune
    lr: float | None = None
    seed: int | None = None
    classes: list[str] = []


class Adapter(NamedTuple):
    """What an adapter file holds."""

    theta: Tensor  # (K, p)
    phi_D: Phi  # the head, with BatchNorm's statistics if it has one; {} after align
    origin: AdapterInfo


def save_adapter(theta: Tensor, phi_D: Phi, origin: AdapterInfo) -> bytes:
    """The bytes of an adapter file (safetensors), which the caller writes."""
    tensors = {"theta": theta.detach().cpu().contiguous()}
    for name, tensor in phi_D.items():
        tensors[f"head.{name}"] = tensor.detach().cpu().contiguous()
    # one metadata key: the library writes several in random order
    content = origin.model_dump(mode="json", exclude_unset=True) | {"format": FORMAT}
    text = json.dumps(content, sort_keys=True)
    return save(tensors, {"bisslight": text})


def load_adapter(path: Path) -> Adapter:
    """Read an adapter file (OSError; ValueError: not an adapter)."""
    data = path.read_bytes()  # the library opens no path that is not UTF-8
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError("not a readable safetensors file") from error
    # the library reads metadata only from a path; a file starts with its header's size, then JSON
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__", {})
    origin: Record = json.loads(metadata.get("bisslight", "{}"))
    if origin.get("format") != FORMAT:
        raise ValueError(f"not an adapter: it is not of format {FORMAT}")
    if "theta" not in tensors:
        raise ValueError("not an adapter: it has no θ")
    theta = tensors.pop("theta")
    head = {name.removeprefix("head."): tensor for name, tensor in tensors.items()}
    return Adapter(theta, head, AdapterInfo(**origin))


def channels_of(origin: AdapterInfo) -> tuple[Channels, Channels]:
    """How the images of an adapter are normalised (ValueError: its file does not say)."""
    if origin.channels is None:
        raise ValueError("its adapter does not say how images are normalised; make it again")
    return origin.channels


# of a matrix in the released file: block, q or v, A or B
RELEASED_NAME = "base_model.model.blocks.{}.attn.qkv.{}.lora_{}.default.weight"


def load_theta(path: Path, dim: int) -> tuple[Tensor, AdapterInfo]:
    """θ (K, p), and what its file says of itself (OSError, ValueError)."""
    if path.suffix == ".safetensors":
        adapter = load_adapter(path)
        return adapter.theta, adapter.origin
    return from_released(read_tensors(path), dim), AdapterInfo()


def from_released(state: Phi, dim: int) -> Tensor:
    """θ (K, p) from the LoRA file of the paper's own program (ValueError: another layout)."""
    wrong = ValueError(f"is not a LoRA file on q and v of width {dim} in the released layout")
    rows = []
    try:
        for k in range(len(state) // 4):  # four matrices a block
            A_q = state[RELEASED_NAME.format(k, "q", "A")]  # (r, dim)
            B_q = state[RELEASED_NAME.format(k, "q", "B")]  # (dim, r)
            A_v = state[RELEASED_NAME.format(k, "v", "A")]
            B_v = state[RELEASED_NAME.format(k, "v", "B")]
            rows.append(torch.stack([A_q, B_q.mT, A_v, B_v.mT]))  # (4, r, dim)
        theta = torch.stack(rows).float()  # (K, 4, r, dim)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # names, shapes
        raise wrong from error
    if theta.shape[3:] != (dim,) or 4 * len(rows) != len(state):
        raise wrong
    return theta.flatten(1)  # (K, p)
