"""The settings of `align` and `finetune`, and the defaults that depend on other settings.

Which defaults the paper gives by backbone and pretext task, what the authors' program does
otherwise (`--preset as-released`), and what is shorter with the small backbone vit_mini.
"""

import json
import os
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from config import (
    Bilevel,
    Data,
    Lower,
    Machine,
    Model,
    Peft,
    Place,
    Pretext,
    Settings,
    Upper,
    UsageError,
    nearest,
)

Table = dict[str, Any]  # settings by name


class Arch(NamedTuple):
    """Sizes of a ViT, its MAE decoder (width, depth, heads) and I-JEPA predictor (width, depth)."""

    dim: int = 768
    depth: int = 12
    heads: int = 12
    image_size: int = 224
    patch_size: int = 16
    mlp_ratio: float = 4.0
    class_token: bool = True
    decoder: tuple[int, int, int] = (512, 8, 16)
    predictor: tuple[int, int] = (384, 12)


class BackboneDefaults(NamedTuple):
    """What the paper, or for vit_mini we, set by backbone: sizes, LoRA rank, drop-path rate."""

    arch: Arch
    rank: int
    drop_path: float


MINI = Arch(64, 4, 4, 16, 4, 2.0, decoder=(48, 1, 4), predictor=(32, 2))
BACKBONES = {
    "vit_mini": BackboneDefaults(MINI, 8, 0.0),
    "vit_b16": BackboneDefaults(Arch(), 64, 0.1),
    "vit_l16": BackboneDefaults(Arch(1024, 24, 16), 64, 0.2),
    "vit_h14": BackboneDefaults(Arch(1280, 32, 16, patch_size=14), 64, 0.2),
}
OTHER = BACKBONES["vit_b16"]  # timm:NAME; its sizes come from the network
GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # App. C.2: from the pretrained backbone
ALIGNED_GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # App. C.2: after BiSSLight
PRESETS = ("paper", "as-released")
RELEASED: Table = {
    "drop_path": 0.2,
    "d_interpolation": "bilinear",
    "voc_difficult": "positive",
    "d_optimizer": "sgd",
    "p_weight_decay": 0.0,
    "d_weight_decay": 0.0,
    "decoder": "random",
    "probe_drop_path": True,
    "mfac_device": "cpu",
    "cg_steps": "tensor",
}


class Command(Machine):
    """Base of the settings of a command that makes runs."""

    ijepa: ClassVar[Table] = {  # App. D.1
        "min_crop": 0.3,
        "head": "batchnorm",
        "p_lr": 0.005,
        "p_weight_decay": 0.0005,
        "d_weight_decay": 0.0005,
        "weight_decay": 0.0005,
    }
    ijepa_mini: ClassVar[Table] = {"min_keep": 4}  # the smallest target has few patches
    short: ClassVar[Table] = {  # for vit_mini: lengths and batch sizes, never a rate
        "alternations": 100,
        "lower_steps": 10,
        "upper_steps": 5,
        "p_batch": 64,
        "d_batch": 32,
        "epochs": 60,
        "batch": 32,
    }

    @classmethod
    def layers(cls, given: Table) -> dict[str, Table]:
        """Defaults that depend on what is given, by where they come from; the last one wins."""
        run = inherited(Path(str(given["start"]))) if "start" in given else {}
        known = {"pretext": "mae"} | run | given
        backbone, mini = str(known.get("backbone")), known.get("backbone") == "vit_mini"
        sizes, ijepa = BACKBONES.get(backbone, OTHER), known["pretext"] == "ijepa"
        quilts = known.get("dataset" if "dataset" in cls.model_fields else "pool") == "quilts"
        found: dict[str, Table] = {
            "default": {
                "data_root": os.environ.get("BISSLIGHT_DATA", "data"),
                "pool": "imagenet",
                "grid": ALIGNED_GRID if "start" in given else GRID,
            },
            backbone: {"rank": sizes.rank, "drop_path": sizes.drop_path},
            "ijepa": (cls.ijepa | (cls.ijepa_mini if mini else {})) if ijepa else {},
            "short, for vit_mini": cls.short if mini else {},
            "quilts": {"pool": "quilts", "augment": "none"} if quilts else {},
            "align run": run,
            "--rank": {"alpha": known.get("rank", sizes.rank)} if "alpha" not in run else {},
            "--lr": {"grid": (known["lr"],)} if "lr" in known else {},
        }
        return {
            source: {name: value for name, value in layer.items() if name in cls.model_fields}
            for source, layer in found.items()
        }


class AlignConfig(Bilevel, Upper, Lower, Pretext, Data, Model, Command):
    """`align`: BiSSLight, Algorithm 1."""


class FinetuneConfig(Peft, Data, Model, Command):
    """`finetune`: PEFT from the backbone, or from an align run, whose model and data it takes."""

    start: Place | None = None
    """--from: an align run, a directory of them, one a seed, or a LoRA file."""


def preset(name: str, kind: type[Settings], aligned: bool = False) -> Table:
    """The settings of a preset that differ from the defaults, which are the paper's (UsageError).

    as-released: what the authors' program does when it is run as its README says; there, PEFT is
    SGD where it starts from an align run (`aligned`), and AdamW elsewhere.
    """
    if name not in PRESETS:
        raise UsageError(f"--preset {name}: {nearest(name, PRESETS)}")
    if name == "paper" or not issubclass(kind, Model):
        return {}
    if issubclass(kind, Peft) and issubclass(kind, Bilevel):
        raise UsageError(
            f"--preset {name}: its PEFT has one optimiser directly and another after align, "
            "a sweep has one"
        )
    released = RELEASED | ({"optimizer": "sgd"} if aligned else {})
    return {name: value for name, value in released.items() if name in kind.model_fields}


def inherited(start: Path) -> Table:
    """Model, data and data root of an align run, or of the first in a directory of align runs."""
    runs = [start, *sorted(start.glob("*/"), key=lambda path: (len(path.name), path.name))]
    files = [file for run in runs if (file := run / "config.json").is_file()]
    config = flatten(json.loads(files[0].read_bytes())) if files else {}
    taken = {*Data.model_fields, *Model.model_fields, "data_root"} if "lam" in config else set()
    return {name: value for name, value in config.items() if name in taken and value is not None}


def flatten(old: Table) -> Table:
    """A run's settings as they are now; the first edition nested them and named some otherwise."""
    if "machine" not in old:
        return old
    groups = [value for value in old.values() if isinstance(value, dict)]
    new = {name: value for part in (old, *groups) for name, value in part.items()}
    new |= {"eval_epochs": new.get("eval_every"), "phi_p_lr": new.get("decoder_lr")}
    new["d_lr"] = None if new.get("d_lr") == "auto" else new.get("d_lr")
    kind = FinetuneConfig if "peft" in old else AlignConfig
    return {k: v for k, v in new.items() if k in kind.model_fields and v is not None}
