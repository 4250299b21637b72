"""Program: Vision Transformers of timm as ψ, `--backbone timm:NAME`, such as DINOv2.

timm knows their sizes, their weights and how their images are normalised. It has no pretext heads,
so MAE's decoder starts fresh, which is another setting than the paper's.
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
from support.errors import as_usage_error


class Normalisation(NamedTuple):
    """Mean and deviation of red, green and blue."""

    mean: Channels
    std: Channels


def load_vit(cfg: Network, state: Mapping[str, Tensor] | None) -> Any:  # noqa: ANN401 (timm's)
    """Make a network of timm, with the weights `state` of a file or, if None, with timm's own.

    timm takes its weights from the cache of the Hugging Face hub, or fetches them there. Raises
    UsageError where it cannot, and ValueError where `state` is not of this network.
    """
    name = cfg.backbone.removeprefix(TIMM)
    repository = timm.models.get_pretrained_cfg_value(name, "hf_hub_id")
    remedy = "fetch them where there is a network, see HF_HOME, or give --weights FILE"
    with as_usage_error(f"--backbone {cfg.backbone}: its weights", remedy):
        if state is None and repository:
            require_weights(repository)
        vit: Any = timm.create_model(name, pretrained=state is None)
    vit.reset_classifier(0)  # fine-tuning adds its own head
    if state is not None:
        # files of timm may hold the classifier, too
        body = {key: tensor for key, tensor in state.items() if not key.startswith("head.")}
        check_tensors(vit, body)
        vit.load_state_dict(body)
    return vit


def check_tensors(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse (ValueError) tensors that are not all of a network's, by name and shape."""
    needed = {name: [*tensor.shape] for name, tensor in network.state_dict().items()}
    held = {name: [*tensor.shape] for name, tensor in state.items()}
    for name in [*needed, *held]:
        if needed.get(name) != held.get(name):
            there = held.get(name, "missing")
            raise ValueError(f"{name} is {there}, the network needs {needed.get(name, 'none')}")


def require_weights(repository: str) -> None:
    """Fail at once (OSError) where weights are not in the cache and the hub does not answer.

    timm alone would ask the hub again and again, for a minute.
    """
    try:
        snapshot_download(repository, local_files_only=True)
    except LocalEntryNotFoundError:
        get_session().head(constants.ENDPOINT, timeout=10)


def read_arch(cfg: Network) -> Arch:
    """Sizes of a network of timm, with the image size of the settings if they have one.

    The decoder is not timm's: its sizes stay those of MAE, the defaults of `Arch`. Raises
    ValueError.
    """
    name = cfg.backbone.removeprefix(TIMM)
    known = {*timm.list_models(), *timm.list_pretrained()}  # the latter as NAME.TAG
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean timm:{close[0]}?" if close else 'see timm.list_models("*vit*")'
        raise ValueError(f"is no network of timm; {hint}")
    with torch.device("meta"):  # no memory, no random numbers
        vit: Any = timm.create_model(name)
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
    """sha256 over the names and numbers of tensors: the same whichever file they came from."""
    sha = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        sha.update(name.encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()
