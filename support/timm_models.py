"""Program: Vision Transformers of timm as backbones: `--backbone timm:NAME`, such as DINOv2.

timm knows their sizes, their weights and how their images are normalised. It has no pretext heads,
so MAE's decoder starts with random weights, while the paper's is pretrained.
"""

import difflib
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import timm
import torch
from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor, nn

from config import TIMM, Arch, Network
from data import Channels
from lora import check_vit
from support.errors import as_read_error


class Normalisation(NamedTuple):
    """The mean and the standard deviation of each channel, for pixels in [0, 1]."""

    mean: Channels  # such as (0.485, 0.456, 0.406)
    std: Channels


def load_vit(cfg: Network, state: Mapping[str, Tensor] | None) -> Any:  # noqa: ANN401 (timm's)
    """Make the timm network of --backbone, without its classifier.

    `state` has the weights of a --weights file. If it is None, timm takes its own from the cache of
    the Hugging Face hub, or fetches them there. Raises UsageError if it cannot, and ValueError if
    `state` belongs to another network.
    """
    name = cfg.backbone.removeprefix(TIMM)  # such as vit_small_patch14_dinov2
    vit: Any
    if state is None:
        vit = load_own_weights(name)
        vit.reset_classifier(0)  # fine-tuning adds its own head
        return vit

    vit = timm.create_model(name)
    vit.reset_classifier(0)
    without_classifier = {}  # of the file, which may be timm's and hold its classifier
    for key, tensor in state.items():
        if not key.startswith("head."):
            without_classifier[key] = tensor
    check_tensors(vit, without_classifier)
    vit.load_state_dict(without_classifier)
    return vit


def load_own_weights(name: str) -> Any:  # noqa: ANN401 (timm's)
    """Make a timm network with timm's weights, from the cache or the internet (UsageError)."""
    remedy = "fetch them where there is internet, see HF_HOME, or give --weights FILE"
    with as_read_error(f"--backbone {TIMM}{name}: its weights", remedy):
        repository = timm.models.get_pretrained_cfg_value(name, "hf_hub_id")  # where in the hub
        if repository:  # some networks have weights elsewhere
            check_weights_in_reach(repository)
        return timm.create_model(name, pretrained=True)


def check_tensors(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `state` has all tensors of the network and no other, equal in shape.

    The message names the first tensor that differs.
    """
    needed = {name: [*tensor.shape] for name, tensor in network.state_dict().items()}
    held = {name: [*tensor.shape] for name, tensor in state.items()}
    for name in [*needed, *held]:
        if needed.get(name) != held.get(name):
            there = held.get(name, "missing")  # a shape, such as [64, 48]
            raise ValueError(f"{name} is {there}, the network needs {needed.get(name, 'none')}")


def check_weights_in_reach(repository: str) -> None:
    """Raise OSError if weights are not in the cache and the Hugging Face hub does not answer.

    Without this, timm would ask the hub again and again, for a minute, before it fails.
    """
    try:
        snapshot_download(repository, local_files_only=True)
    except LocalEntryNotFoundError:  # not in the cache, so the hub is asked
        get_session().head(constants.ENDPOINT, timeout=10)


def read_arch(cfg: Network) -> Arch:
    """The sizes of the timm network of --backbone, with the image size of --image-size if given.

    1. Refuse a name that timm does not know.
    2. Build the network without its weights, and refuse it if it is no plain ViT.
    3. Read its sizes, and refuse a --patch-size that is not its own.

    The decoder is not timm's: its sizes stay those of MAE, the defaults of `Arch`. What is refused
    is a ValueError.
    """
    name = cfg.backbone.removeprefix(TIMM)
    # names such as vit_small_patch14_dinov2, alone and with the name of weights (.lvd142m)
    known = {*timm.list_models(), *timm.list_pretrained()}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)  # the name most like it, or []
        hint = f"did you mean timm:{close[0]}?" if close else 'see timm.list_models("*vit*")'
        raise ValueError(f"is no network of timm; {hint}")

    with torch.device("meta"):  # tensors have shapes alone: no memory and no random numbers
        vit: Any = timm.create_model(name)
    check_vit(vit)

    own_side, _ = vit.patch_embed.img_size  # (height, width); plain ViTs are square
    patch_size, _ = vit.patch_embed.patch_size
    if cfg.patch_size not in (None, patch_size):
        raise ValueError(f"has patch_size {patch_size}; leave the option out")
    return Arch(
        dim=vit.embed_dim,
        depth=len(vit.blocks),
        heads=vit.blocks[0].attn.num_heads,
        image_size=cfg.image_size or own_side,
        patch_size=patch_size,
        class_token=vit.has_class_token,
        registers=vit.num_reg_tokens,
    )


def hash_tensors(state: Mapping[str, Tensor]) -> str:
    """sha256 over the names and numbers of tensors, which is the same whichever file had them."""
    sha = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        sha.update(name.encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()
