"""Program: checkpoints, and the networks that are made of them (App. C.1).

official    a file of MAE's or I-JEPA's authors, downloaded on first use: encoder and pretext head
own         backbone.pth of a `pretrain` run: the official layout, and the sizes as JSON in it
timm        a network of timm (`support.timm_models`): the encoder alone
adapter     adapter.safetensors of a run: θ, a head, and what they were trained on
released    the LoRA file of the paper's own program: θ alone
"""

import json
import sys
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save
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
from support.errors import UsageError, as_read_error, as_usage_error
from support.runs import LOG, sha256

# --- the backbone ---------------------------------------------------------------------------------


class Official(NamedTuple):
    """A checkpoint that MAE's or I-JEPA's authors published, with encoder and pretext head."""

    url: str
    megabytes: float  # 1 MB is 10⁶ bytes


SITE = "https://dl.fbaipublicfiles.com"
OFFICIAL_FILES = {  # by network and pretext task
    ("vit_b16", "mae"): Official(f"{SITE}/mae/pretrain/mae_pretrain_vit_base_full.pth", 447.6),
    ("vit_l16", "mae"): Official(f"{SITE}/mae/pretrain/mae_pretrain_vit_large_full.pth", 1318.2),
    ("vit_h14", "mae"): Official(f"{SITE}/mae/pretrain/mae_pretrain_vit_huge_full.pth", 2628.3),
    ("vit_h14", "ijepa"): Official(f"{SITE}/ijepa/IN1K-vit.h.14-300e.pth.tar", 10_360.0),
}


PretextHead = mae.Decoder | ijepa.Predictor  # the network h^P


class Pretrained(NamedTuple):
    """The networks that were made from a checkpoint, and what is known about them."""

    backbone: Backbone  # f_ψ
    head: PretextHead
    arch: Arch  # the sizes of both networks
    sha256: str  # of the file; of a network of timm, of its tensors
    # The mean and std of this network's images; None: those of their data set.
    normalisation: timm_models.Normalisation | None = None


def load_backbone(cfg: AlignConfig | FinetuneConfig) -> Pretrained:
    """Load the pretrained networks of these settings, on the CPU.

    1. Find the file of the weights, and fetch it if it is an official one that is not there.
    2. Load backbone and pretext head from it. Raises UsageError where the file does not fit.
    3. Freeze the weights ψ of the backbone, since only θ and the heads are trained.
    """
    path = find_weights(cfg)
    if path is not None and not path.exists():  # an official file
        download(OFFICIAL_FILES[cfg.backbone, cfg.pretext], path)

    with as_weights_error(path, cfg):
        if cfg.backbone.startswith(TIMM):
            pretrained = load_timm(path, cfg)
        else:
            assert path is not None  # only timm has weights that are in no file
            pretrained = load_official_layout(path, cfg)
    pretrained.backbone.requires_grad_(False)
    return pretrained


# A checkpoint of something else has other keys, types or shapes (KeyError, TypeError,
# AttributeError); a size of 0 in it is divided by (ArithmeticError); a disk can fail (OSError).
UNFIT_FILE_ERRORS = (KeyError, TypeError, AttributeError, ArithmeticError, OSError)


@contextmanager
def as_weights_error(path: Path | None, cfg: AlignConfig | FinetuneConfig) -> Iterator[None]:
    """Turn an error inside the block, which loads weights, into a UsageError with a remedy.

    It names the file `path`; if that is None, it names the network of timm. The text of a
    ValueError says what is wrong. One of UNFIT_FILE_ERRORS means that the file is of something
    else. All others pass unchanged.
    """
    thing = f"--weights {path}" if path else f"--backbone {cfg.backbone}"
    remedy = "see --backbone and --pretext"
    is_official_file = cfg.weights is None and path is not None
    if is_official_file:  # `download` checks its size alone, and to 1 % only
        remedy += ", or delete this file, and it is fetched anew"
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{thing}: {error}; {remedy}") from error
    except UNFIT_FILE_ERRORS as error:
        problem = f"is no checkpoint of {cfg.backbone} with {cfg.pretext}"
        raise UsageError(f"{thing}: {problem}; {remedy}") from error


def load_official_layout(path: Path, cfg: AlignConfig | FinetuneConfig) -> Pretrained:
    """Load a file of MAE's or I-JEPA's authors, or of a `pretrain` run, which has their layout.

    1. Split the tensors of the file into those of the backbone and those of the pretext head.
    2. Build both networks in the sizes that the file has, and give them these tensors.

    Raises ValueError, or one of UNFIT_FILE_ERRORS, if the file does not fit the settings.
    """
    content = read_tensors(path)  # {"model": tensors by name} of MAE, {"encoder": ...} of I-JEPA
    if cfg.pretext == "ijepa":
        # cfg.base: which of I-JEPA's two encoders is the backbone, "target_encoder" or "encoder"
        vit_tensors, head_tensors = ijepa.split_state(content, cfg.base)
    else:  # MAE, and custom pretext tasks, which start from MAE's encoder
        if "mae_visualize" in path.name:  # published beside the file ending in _full.pth
            raise ValueError(
                "is the authors' file for pictures: its decoder predicts raw pixels, not "
                "standardised ones; take the file ending in _full.pth"
            )
        vit_tensors, head_tensors = mae.split_state(tensors_in(content))

    arch = arch_of(content, cfg)
    # On the device "meta", tensors have shapes but no values: `assign` puts the file's there.
    with torch.device("meta"):
        vit = build_vit(arch)
        head = build_head(arch, cfg.pretext)
    assign(vit, vit_tensors)
    assign(head, head_tensors)
    return Pretrained(Backbone(vit, cfg.scale, cfg.recompute), head, arch, sha256(path))


def load_timm(path: Path | None, cfg: AlignConfig | FinetuneConfig) -> Pretrained:
    """Load a network of timm, with a fresh MAE decoder, since timm has no pretext heads.

    The weights are those of the file `path` or, if it is None, timm's own. Raises UsageError or
    ValueError.
    """
    arch = timm_models.read_arch(cfg)  # refuses a network that cannot be used before it is fetched
    tensors = None  # timm takes its own
    if path:
        tensors = tensors_in(read_tensors(path))
    vit = timm_models.load_vit(cfg, tensors)
    digest = timm_models.hash_tensors(vit.state_dict())  # before the positions change
    vit.set_input_size((arch.image_size, arch.image_size))  # it resamples the table of positions

    head = build_head(arch, "mae")
    initialise([head], "mae", rng(cfg.seed, "decoder"))

    normalisation = timm_models.Normalisation(vit.pretrained_cfg["mean"], vit.pretrained_cfg["std"])
    return Pretrained(Backbone(vit, cfg.scale, cfg.recompute), head, arch, digest, normalisation)


def find_weights(cfg: Network) -> Path | None:
    """The path of the checkpoint: what --weights names, or where the official file is kept.

    Returns None if timm has the weights. An official file need not be there yet: `load_backbone`
    fetches it. Raises UsageError if --weights names no checkpoint, or is needed and not given.
    """
    if cfg.weights is not None:
        return find_given_weights(cfg.weights)
    if cfg.backbone.startswith(TIMM):
        return None
    official = OFFICIAL_FILES.get((cfg.backbone, cfg.pretext))
    if official is None:
        raise UsageError(
            f"--weights FILE: {cfg.backbone} with {cfg.pretext} needs one, see `bisslight pretrain`"
        )
    name = official.url.rpartition("/")[2]
    return Path(torch.hub.get_dir()).resolve() / "checkpoints" / name


def find_given_weights(weights: Path) -> Path:
    """The file that --weights means: itself, that of a pretrain run, or the one of `omniglot`.

    Raises UsageError if it is not there.
    """
    path = omniglot.WEIGHTS if weights == OMNIGLOT else weights
    if path.is_dir():  # a pretrain run
        path = path / "backbone.pth"
    if path.is_file():
        return path
    problem = f"--weights {weights}: is no checkpoint or finished pretrain run"
    if weights.is_dir():
        problem += "; an align run goes to `bisslight finetune --from RUN`"
    raise UsageError(problem)


def check_weights(cfg: Network) -> None:
    """Raise UsageError if these settings have no checkpoint. If it will be fetched, log that."""
    path = find_weights(cfg)
    if path is not None and not path.exists():  # an official file, which the run fetches
        url, megabytes = OFFICIAL_FILES[cfg.backbone, cfg.pretext]
        note = "--weights: %s MB, fetched by the run itself or `curl -C - -o %s %s`"
        LOG.info(note, f"{megabytes:,.0f}", path, url)


def download(official: Official, path: Path) -> None:
    """Fetch an official file to `path`. Raises UsageError if that fails.

    A file whose size is wrong by more than 1 % is deleted again.
    """
    url, megabytes = official
    with as_read_error(url, f"try `curl -C - -o {path} {url}`, or give --weights FILE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), progress=sys.stderr.isatty())
        arrived = path.stat().st_size / 1e6
        if abs(arrived - megabytes) > 0.01 * megabytes:  # such as half of it, or an error page
            path.unlink()
            raise OSError(f"{arrived:.0f} MB arrived, {megabytes:.0f} MB were expected")


def tensors_in(content: Record) -> dict[str, Tensor]:
    """A network's tensors by name, out of what a file holds: the value of "model", or all of it."""
    return dict(content.get("model", content))


def assign(network: nn.Module, tensors: Phi) -> None:
    """Make these tensors, in float32, the weights of a network that was built on device "meta".

    Raises ValueError if names or shapes differ.
    """
    timm_models.check_tensors(network, tensors)
    in_float32 = {name: tensor.float() for name, tensor in tensors.items()}
    # assign=True: the network's own tensors have no memory to copy into, so they are replaced
    network.load_state_dict(in_float32, assign=True)


def arch_of(content: Record, cfg: Shape) -> Arch:
    """The sizes of the networks in a checkpoint: as `pretrain` wrote them, or as in BACKBONES.

    `content` is what the file holds. In an official file nothing is said of sizes, so before it is
    there, {} may be given instead. Raises ValueError if the settings ask for another network, image
    size or patch size.
    """
    if "bisslight" in content:  # JSON that `pretrain` writes
        # such as {"backbone": "vit_mini", "arch": {"dim": 64, ...}}
        written = json.loads(content["bisslight"])
        name = written["backbone"]
        if cfg.backbone != name:
            raise ValueError(f"was trained as {name}, give --backbone {name}")
        arch = Arch(**written["arch"])
    else:
        has_class_token = cfg.pretext != "ijepa"
        arch = BACKBONES[cfg.backbone]._replace(class_token=has_class_token)

    if cfg.image_size not in (None, arch.image_size):
        raise ValueError(f"has image_size {arch.image_size}; leave --image-size out")
    if cfg.patch_size not in (None, arch.patch_size):
        raise ValueError(f"has patch_size {arch.patch_size}; leave --patch-size out")
    return arch


def vit_args(arch: Arch) -> Record:
    """The arguments of timm's VisionTransformer that give it these sizes."""
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
    """Build a timm ViT without a head: MAE's encoder with a class token, I-JEPA's without one."""
    return VisionTransformer(**vit_args(arch), num_classes=0)


def build_head(arch: Arch, pretext: str) -> PretextHead:
    """Build the pretext head h^P: I-JEPA's predictor for "ijepa", otherwise MAE's decoder.

    Raises UsageError if the patches do not fill the image.
    """
    size = arch.image_size
    if size % arch.patch_size:
        raise UsageError(f"--image-size {size}: is not a multiple of patches of {arch.patch_size}")
    patches = (size // arch.patch_size) ** 2
    if pretext == "ijepa":
        return ijepa.Predictor(
            arch.dim,
            patches,
            width=arch.predictor_dim,
            depth=arch.predictor_depth,
            heads=arch.heads,
            mlp_ratio=arch.mlp_ratio,
        )
    return mae.Decoder(
        arch.dim,
        patches,
        arch.patch_size,
        width=arch.decoder_dim,
        depth=arch.decoder_depth,
        heads=arch.decoder_heads,
        mlp_ratio=arch.mlp_ratio,
        prefix=arch.prefix,
    )


@torch.no_grad()
def initialise(networks: Sequence[nn.Module], pretext: str, g: torch.Generator) -> None:
    """Fill new networks with random weights, in place, as the authors of the pretext task do.

    A ViT also gets its table of positions, which is not random. `g` makes the random numbers.
    """
    if pretext == "ijepa":
        ijepa.init(networks, g)
    else:
        mae.init(networks, g)

    for network in networks:
        if isinstance(network, VisionTransformer):
            patches = network.patch_embed.num_patches
            prefix = network.num_prefix_tokens  # tokens before the patches, such as a class token
            table = mae.positions(network.embed_dim, patches, prefix)  # sines and cosines
            network.state_dict()["pos_embed"].copy_(table)


def build_pretext_task(
    cfg: Pretext,
    backbone: Backbone,
    head: PretextHead,
    steps: int,
    theta: Tensor | None,
    teacher: Backbone | None = None,
) -> mae.MAE | ijepa.IJEPA:
    """Make the pretext task of these settings: MAE if `head` is its decoder, otherwise I-JEPA.

    Args:
        cfg: masks, and the momentum of I-JEPA's teacher.
        backbone: f_ψ.
        head: h^P, whose tensors are the task's φ_P.
        steps: how many steps the run has; the momentum of I-JEPA's teacher rises over them.
        theta: θ_P's start, from which I-JEPA's teacher starts; None in `pretrain`, which trains ψ.
        teacher: in `pretrain`, the copy of the backbone that is I-JEPA's teacher; None otherwise.

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
    """Read what a file of torch or safetensors holds, without running code in it.

    Raises ValueError if it cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            return dict(load_safetensors(path))
        with warnings.catch_warnings(), torch.serialization.safe_globals([Namespace]):
            # torch warns of old formats. Official files hold a Namespace: the authors' settings.
            warnings.simplefilter("ignore")
            mmap = zipfile.is_zipfile(path)  # tensors are read when they are used; not in old files
            return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError
        raise ValueError(f"{path.name} is no readable checkpoint") from error


# --- adapters -------------------------------------------------------------------------------------

FORMAT = "bisslight-adapter-1"


class AdapterInfo(BaseModel, frozen=True):
    """What an adapter file says about how θ was trained. None: it does not say.

    The paper's own LoRA file says nothing about itself.
    """

    stage: str | None = None  # the command: "align" or "finetune"
    backbone: str | None = None  # such as "vit_b16"
    arch: Record | None = None  # sizes of the backbone, see `config.Arch`
    weights_sha256: str | None = None  # of the backbone's checkpoint
    pretext: str | None = None  # such as "mae"
    rank: int | None = None
    alpha: float | None = None
    dataset: str | None = None  # such as "cub200"
    data_seed: int | None = None
    data_sha256: str | None = None  # of the labelled images, see `data.fingerprint`
    channels: tuple[Channels, Channels] | None = None  # mean and std that normalise images
    whole_images: bool = False  # whether images are scored without cutting their edges off
    # These are set by align alone.
    d_lr: float | None = None
    hypergrad: str | None = None  # such as "mfac"
    unlike_paper: Record | None = None  # settings that are not the paper's, by name
    # These are set by finetune alone.
    lr: float | None = None
    seed: int | None = None
    classes: list[str] = []


class Adapter(NamedTuple):
    """What an adapter file holds."""

    theta: Tensor  # θ (K, p): layers, and numbers of LoRA in each layer
    phi_D: Phi  # the head, with BatchNorm's statistics if it has one; {} after align
    info: AdapterInfo


def save_adapter(theta: Tensor, phi_D: Phi, info: AdapterInfo) -> bytes:
    """The bytes of an adapter file (safetensors), which the caller writes."""
    tensors = {"theta": theta.detach().cpu().contiguous()}
    for name, tensor in phi_D.items():
        tensors[f"head.{name}"] = tensor.detach().cpu().contiguous()
    # All is written below one key of the metadata: the library writes several in random order.
    content = info.model_dump(mode="json", exclude_unset=True) | {"format": FORMAT}
    text = json.dumps(content, sort_keys=True)
    return save(tensors, {"bisslight": text})


def load_adapter(path: Path) -> Adapter:
    """Read an adapter file. Raises OSError if it is not there, ValueError if it is no adapter.

    1. Read its metadata, which say how θ was trained, and its tensors: "theta", and those of the
       head, such as "head.weight".
    2. See that it is an adapter, and take its parts.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}  # such as {"bisslight": JSON}, see `save_adapter`
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError("not a readable safetensors file") from error

    content: Record = json.loads(metadata.get("bisslight", "{}"))
    if content.get("format") != FORMAT:
        raise ValueError(f"not an adapter: it is not of format {FORMAT}")
    if "theta" not in tensors:
        raise ValueError("not an adapter: it has no θ")
    theta = tensors.pop("theta")
    head = {name.removeprefix("head."): tensor for name, tensor in tensors.items()}
    return Adapter(theta, head, AdapterInfo(**content))


def channels_of(info: AdapterInfo) -> tuple[Channels, Channels]:
    """The mean and std by which images are normalised for an adapter.

    Raises ValueError if its file does not say.
    """
    if info.channels is None:
        raise ValueError("its adapter does not say how images are normalised; make it again")
    return info.channels


# The name of a matrix in the released file. The gaps are the block's number, q or v, and A or B.
RELEASED_NAME = "base_model.model.blocks.{}.attn.qkv.{}.lora_{}.default.weight"


def load_theta(path: Path, dim: int) -> tuple[Tensor, AdapterInfo]:
    """Read θ (K, p) and what its file says about it, from an adapter file or a released one.

    `dim` is the width of the backbone. Raises OSError or ValueError.
    """
    if path.suffix == ".safetensors":
        adapter = load_adapter(path)
        return adapter.theta, adapter.info
    return theta_from_released(read_tensors(path), dim), AdapterInfo()


def theta_from_released(state: Phi, dim: int) -> Tensor:
    """θ (K, p) from the tensors of a LoRA file that the paper's own program wrote.

    1. Stack the four matrices of each block, then the blocks.
    2. Raise ValueError if names or shapes are others, the width is not `dim`, or there are more
       tensors.
    """
    problem = f"is not a LoRA file on q and v of width {dim} in the released layout"
    blocks = len(state) // 4  # each block has four matrices
    rows = []
    try:
        for k in range(blocks):
            A_q = state[RELEASED_NAME.format(k, "q", "A")]  # (r, dim)
            B_q = state[RELEASED_NAME.format(k, "q", "B")]  # (dim, r)
            A_v = state[RELEASED_NAME.format(k, "v", "A")]
            B_v = state[RELEASED_NAME.format(k, "v", "B")]
            rows.append(torch.stack([A_q, B_q.mT, A_v, B_v.mT]))  # .mT: transposed; (4, r, dim)
        theta = torch.stack(rows).float()  # (K, 4, r, dim)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # other names or shapes
        raise ValueError(problem) from error

    holds_matrices = theta.ndim == 4  # tensors of more axes can be stacked, too
    has_width = theta.shape[-1] == dim
    has_no_others = 4 * blocks == len(state)
    if not (holds_matrices and has_width and has_no_others):
        raise ValueError(problem)
    return theta.flatten(1)  # (K, p)
