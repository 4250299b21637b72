"""The settings of `align` and `finetune`, and the defaults that depend on other settings.

Which defaults the paper gives by backbone and pretext task, what the authors' program does
otherwise (`--preset as-released`), and what is shorter with the small backbone vit_mini.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from config import (
    BACKBONES,
    FILLED,
    OTHER,
    Bilevel,
    Data,
    Lower,
    Machine,
    Model,
    NonNegativeInt,
    Place,
    PositiveInt,
    Pretext,
    Settings,
    Upper,
    UsageError,
    nearest,
)

Table = dict[str, Any]  # settings by name


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


class Peft(Settings):  # parameter-efficient fine-tuning of θ and a fresh head
    lr: PositiveFloat | None = None
    """One learning rate for all seeds, instead of a grid. [App. C.2 has a grid]"""
    grid: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = FILLED
    """Rates, chosen by validation. Default: 1e-4 ... 3e-2, after align a tenth. [App. C.2]"""
    grid_seeds: PositiveInt = 1
    """Seeds each rate is tried with; the chosen rate's are among the seeds. [here]"""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW 0.9/0.999, or SGD with momentum 0.9. [App. C.2; released: sgd after align]"""
    epochs: PositiveInt = 200
    """Passes over the training split. [App. C.2]"""
    warmup_epochs: NonNegativeInt = 5
    """Epochs of linear warm-up. [App. C.2]"""
    batch: PositiveInt = 256
    """Images a step. [App. D.2.2, memory table; released]"""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of θ and of the whole head. [App. C.2; ijepa, D.1: 0.0005]"""
    end_lr: NonNegativeFloat = 1e-6
    """Where the cosine of every rate ends. [released]"""
    eval_epochs: PositiveInt = 1
    """Epochs between validations. [App. C.2.1]"""
    seeds: PositiveInt = 8
    """Independent runs. [App. C.2.1]"""
    jobs: Annotated[int, Field(ge=1, le=256)] = 1
    """Runs at a time, each in a process with its share of the cores. [here]"""

    @model_validator(mode="after")
    def one_way_to_choose(self) -> Self:
        if self.lr is not None and self.grid != (self.lr,):
            raise ValueError("give --lr or --grid, not both")
        if len({*self.grid}) < len(self.grid):
            raise ValueError("--grid: has a rate twice")
        if self.grid_seeds > self.seeds:
            raise ValueError(f"--grid-seeds {self.grid_seeds}: is more than --seeds {self.seeds}")
        return self


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
