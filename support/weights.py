"""Program: files of pretrained weights: where they are, how they are fetched, what they hold."""

import zipfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import timm
import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from config import AnyConfig, Network, Record
from support.errors import UsageError, as_read_error
from support.files import check_locks
from support.runs import LOG
from support.suggestions import say_not_here

TIMM = "timm:"  # how the names of timm's networks begin
OFFICIAL_FILES = {  # by network and pretext task
    ("vit_b16", "mae"): (
        "https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_base_full.pth"
    ),
    ("vit_l16", "mae"): (
        "https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_large_full.pth"
    ),
    ("vit_h14", "mae"): (
        "https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_huge_full.pth"
    ),
    ("vit_h14", "ijepa"): ("https://dl.fbaipublicfiles.com/ijepa/IN1K-vit.h.14-300e.pth.tar"),
}
SIZES = {  # of these files, in MB
    ("vit_b16", "mae"): 448,
    ("vit_l16", "mae"): 1318,
    ("vit_h14", "mae"): 2628,
    ("vit_h14", "ijepa"): 10_360,
}
# Below which keys files keep the tensors of a network. The first of these that a file has is taken:
# of the two networks in a file of DINO, that is the teacher.
KEYS = ("model", "state_dict", "model_state_dict", "teacher")
IN_FOLDER = ("backbone.pth", "model.safetensors", "pytorch_model.bin")  # a pretrain run's; timm's


# --- where they are -------------------------------------------------------------------------------


def find_checkpoint(cfg: Network) -> Path | None:
    """Return what --weights names, or else where the official file is kept; None: timm's own.

    Raises UsageError where there is neither.
    """
    if cfg.weights is not None:
        return find_given(cfg.weights)
    if cfg.backbone.startswith(TIMM):
        return None
    url = OFFICIAL_FILES.get((cfg.backbone, cfg.pretext))
    if url is None:
        raise UsageError(
            f"--weights: {cfg.backbone} with {cfg.pretext} has no official ones; give a"
            f" checkpoint, or a run of `bisslight pretrain --backbone {cfg.backbone}`"
        )
    # Where torch keeps what it fetches. TORCH_HOME may be relative; messages name the whole path.
    return Path(torch.hub.get_dir()).resolve() / "checkpoints" / Path(url).name


def tell_missing(cfg: AnyConfig, path: Path) -> str:
    """Return the line about an official file that is missing: fetched once all else is here."""
    key = (cfg.backbone, cfg.pretext)
    return (
        f"--weights: {path} is missing, {SIZES[key]} MB; fetched once the rest is there, from"
        f" {OFFICIAL_FILES[key]}; without internet here, fetch it on another machine, then give it"
        " as --weights FILE"
    )


def find_given(place: Path) -> Path:
    """Return the file that --weights names or, in a folder, that which a run or timm puts there."""
    if not place.exists():
        problem = say_not_here(place, "give a checkpoint or a pretrain run")
        raise UsageError(f"--weights {place}: {problem}")
    file = place if place.is_file() else find_in(place)
    if file is None:
        raise UsageError(f"--weights {place}: is no checkpoint or finished pretrain run; give one")
    return file


def find_in(folder: Path) -> Path | None:
    """Return the file of weights in a folder, if there is one."""
    files = (folder / name for name in IN_FOLDER)
    return next((file for file in files if file.is_file()), None)


def find_timm(backbone: str) -> Path | None:
    """Return the file of timm's own weights of timm:NAME, if it is on this machine."""
    folder = find_folder(backbone)
    return find_in(folder) if folder else None


def find_safetensors(backbone: str) -> list[Path]:
    """Return the files from which timm takes the weights of timm:NAME, if they are here.

    timm takes a .safetensors file of any name, so all in its folder are returned.
    """
    folder = find_folder(backbone)
    return sorted(folder.glob("*.safetensors")) if folder else []


def is_folder(backbone: str) -> bool:
    """Return whether a backbone is timm:local-dir:FOLDER, whose files are here or nowhere."""
    return backbone.startswith(f"{TIMM}local-dir:")


def find_folder(backbone: str) -> Path | None:
    """Return the folder of a network of timm: that of local-dir, or where the hub's files are kept.

    Returns None where the files of the hub are not on this machine.
    """
    if is_folder(backbone):
        return Path(backbone.removeprefix(f"{TIMM}local-dir:"))
    repository, _, revision = repository_of(backbone).partition("@")
    if not repository:  # I-JEPA's own networks in timm: torch fetches them from their authors
        return None
    with suppress(LocalEntryNotFoundError):  # not here; nothing is fetched
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    return None


def repository_of(backbone: str) -> str:
    """Return the repository of timm:NAME on Hugging Face's hub, OWNER/NAME or OWNER/NAME@REVISION.

    It is "" for a folder, and for networks of timm that are kept elsewhere.

    >>> repository_of("timm:vit_tiny_patch16_224"), repository_of("timm:hf-hub:me/vit@v1")
    ('timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k', 'me/vit@v1')
    """
    name = backbone.removeprefix(TIMM)
    kind, _, place = name.partition(":")
    if place:  # local-dir:FOLDER or hf-hub:OWNER/NAME
        return "" if kind == "local-dir" else place
    about: Any = timm.get_pretrained_cfg(name)
    return about.hf_hub_id or ""


def address_of(backbone: str) -> str:
    """Return the address on the web from which timm takes the weights of timm:NAME.

    NAME may be one of timm's own, or hf-hub:OWNER/NAME.

    >>> address_of("timm:vit_tiny_patch16_224")
    'https://hf.co/timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k'
    """
    if repository := repository_of(backbone):
        return f"https://hf.co/{repository}"
    about: Any = timm.get_pretrained_cfg(backbone.removeprefix(TIMM))
    return str(about.url)


def find_config(backbone: str) -> Path | None:
    """Return the config.json by which timm makes a network of a folder or of the hub.

    Returns None for a name of timm's own, which needs none.
    """
    has_config = ":" in backbone.removeprefix(TIMM)  # local-dir:FOLDER or hf-hub:OWNER/NAME
    folder = find_folder(backbone) if has_config else None
    return folder / "config.json" if folder else None


def follow_move(backbone: str, path: Path | None) -> str:
    """Return timm:local-dir:FOLDER with the folder of `path`, all other names as they are.

    FOLDER may have been moved since a run began, and --weights says where its files are now.
    """
    if path is not None and is_folder(backbone):
        return f"{TIMM}local-dir:{path.parent}"
    return backbone


def download(url: str, path: Path) -> None:
    """Fetch an official file to `path`, once for all processes that ask. Raises UsageError."""
    remedy = (
        "without internet here, fetch it on another machine and give it as --weights FILE; if the "
        "folder cannot be written, set TORCH_HOME to one that can be"
    )
    with as_read_error(f"{url}, to be written to {path}", remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        check_locks(Path(f"{path}.lock"))  # refuses a disk on which a lock would outlive a kill
        with FileLock(f"{path}.lock"):
            if not path.exists():  # another process may have fetched it as this one waited
                LOG.info("fetching %s; `curl -C - -o '%s' %s` does the same", url, path, url)
                torch.hub.download_url_to_file(url, str(path), progress=False)


# --- what they hold -------------------------------------------------------------------------------


def read_tensors(path: Path) -> Record:
    """Read what a file of torch or safetensors holds, without running code in it.

    The tensors may be mapped from the file, so whoever keeps one has to copy it. Raises any error
    if the file is damaged, holds more than tensors, numbers and texts, or has them without names.
    """
    if path.suffix == ".safetensors":
        return dict(load_safetensors(path))
    # Mapped tensors are read only when they are used. torch can map only files in its zip format.
    mmap = zipfile.is_zipfile(path)
    # Official files hold their settings as a Namespace.
    with torch.serialization.safe_globals([Namespace]):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except UnpicklingError as error:
            # torch gives the reason, and then tells how to run the code in the file: left out.
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().split("\n")[0]
            raise ValueError(f"holds no tensors alone: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds {type(content).__name__}, no tensors by name")
    return content


def own_tensors(content: Record) -> dict[str, Tensor]:
    """Return the tensors of a network, by the names that the network gives them.

    `content` is what a file holds: tensors by name, or these below one of KEYS. Their names may
    begin with those of modules around the network, such as module. or model.backbone. What lies in
    none of these modules, or is no tensor, is left out. Raises ValueError if the names are those of
    two networks.
    """
    found = [content[key] for key in KEYS if isinstance(content.get(key), dict)]
    by_name = found[0] if found else content  # the first in the order of KEYS
    prefixes = find_prefixes([*by_name])
    if not prefixes:  # no such network: the function that loads these tensors will refuse them
        return by_name
    tensors = {}
    for name, x in by_name.items():
        around = [prefix for prefix in prefixes if name.startswith(prefix)]
        if around and isinstance(x, Tensor):
            # model.encoder. of an encoder begins with model. of its decoder: the longer one counts.
            inner = max(around, key=len)
            tensors[name.removeprefix(inner)] = x
    return tensors


def find_prefixes(names: Sequence[str]) -> list[str]:
    """Return what stands before the own names of an encoder's tensors, and of MAE's decoder's.

    It is "" where nothing does. Raises ValueError where there are two encoders, or two decoders.

    >>> find_prefixes(["epoch", "module.patch_embed.proj.weight"])
    ['module.']
    """
    prefixes = []
    # A tensor of every encoder, and one of every decoder of MAE.
    for own_name in ("patch_embed.proj.weight", "decoder_embed.weight"):
        found = [name.removesuffix(own_name) for name in names if name.endswith(own_name)]
        if len(found) > 1:
            raise ValueError(
                f"holds {len(found)} networks, whose names begin with {found}; save "
                '{"model": network.state_dict()} of the one that is meant'
            )
        prefixes += found
    return prefixes
