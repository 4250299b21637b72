"""Vision Transformers of timm as ψ: `--backbone timm:NAME`, such as DINOv2, DINO or CLIP.

timm knows their sizes, their weights and how their images are normalised. It has no pretext heads,
so MAE's decoder starts fresh, which is another setting than the paper's.
"""

import difflib
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from config import TIMM, Arch, Network
from data import Channels
from lora import check_vit
from support.errors import checking


class Normalisation(NamedTuple):
    """Mean and deviation of red, green and blue."""

    mean: Channels
    std: Channels


class Loaded(NamedTuple):
    """A network of timm with its weights."""

    vit: VisionTransformer
    sha256: str  # of its tensors at the image size that it was trained with
    arch: Arch
    channels: Normalisation  # of the images that it was trained with


def load_vit(cfg: Network, state: Mapping[str, Any] | None) -> Loaded:
    """A network with timm's weights, or with those of a file, `state` (errors as in `create`).

    timm fetches its weights from the Hugging Face hub, or takes them from that hub's cache.
    """
    arch = read_arch(cfg)  # what cannot be used is refused before it is fetched
    vit = create(cfg, pretrained=state is None)
    vit.reset_classifier(0)
    if state is not None:
        body = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        vit.load_state_dict(body)
    sha256 = digest(vit.state_dict())
    size = (arch.image_size, arch.image_size)
    if vit.patch_embed.img_size != size:
        vit.set_input_size(size)  # timm resamples the table of positions
    channels = Normalisation(vit.pretrained_cfg["mean"], vit.pretrained_cfg["std"])
    return Loaded(vit, sha256, arch, channels)


def create(cfg: Network, pretrained: bool) -> Any:  # noqa: ANN401 (any network of timm)
    """The network that the settings name (ValueError: no such name; UsageError: no weights)."""
    name = cfg.backbone.removeprefix(TIMM)
    known = {*timm.list_models(), *timm.list_pretrained()}  # these with a tag behind the name
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean timm:{close[0]}?" if close else 'see timm.list_models("*vit*")'
        raise ValueError(f"is no network of timm; {hint}")
    if not pretrained:
        return timm.create_model(name)
    remedy = "fetch them where there is a network, see HF_HOME, or give --weights FILE"
    with checking(f"--backbone {cfg.backbone}: its weights", remedy):
        return timm.create_model(name, pretrained=True)


def read_arch(cfg: Network) -> Arch:
    """Sizes of a network of timm at the image size of these settings (ValueError).

    The widths of the decoder are MAE's own.
    """
    with torch.device("meta"):  # no memory, no random numbers
        vit = create(cfg, pretrained=False)
    check_vit(vit)
    side, _ = vit.patch_embed.img_size
    patch_size, _ = vit.patch_embed.patch_size
    if cfg.patch_size not in (None, patch_size):
        raise ValueError(f"has patch_size {patch_size}; leave the option out")
    return Arch(
        dim=vit.embed_dim,
        depth=len(vit.blocks),
        heads=vit.blocks[0].attn.num_heads,
        image_size=cfg.image_size or side,
        patch_size=patch_size,
        class_token=vit.has_class_token,
        registers=vit.num_reg_tokens,
    )


def digest(state: Mapping[str, Tensor]) -> str:
    """sha256 over names and numbers: the same whichever file they came from."""
    sha = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        sha.update(name.encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()
