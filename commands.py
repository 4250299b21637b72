"""The settings of `align` and `finetune`, and the defaults that depend on other settings.

Which defaults the paper gives by backbone and pretext task, what the authors' program does
otherwise (`--preset as-released`), and what is shorter with the small backbone vit_mini.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from config import (
    FILLED,
    Bilevel,
    Data,
    Listed,
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
    absolute,
    place_of,
)

Table = dict[str, Any]  # settings by name

GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # App. C.2: from the pretrained backbone
ALIGNED_GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # App. C.2: after BiSSLight
DROP_PATH = {"vit_mini": 0.0, "vit_l16": 0.2, "vit_h14": 0.2}  # App. C.2; others: 0.1
RELEASED: Table = {  # where the authors' program is not the paper
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


class Peft(Settings):
    """PEFT: parameter-efficient fine-tuning of θ and a fresh head."""

    lr: PositiveFloat | None = None
    """One learning rate for all seeds, instead of a grid. [App. C.2 has a grid]"""
    grid: Annotated[tuple[PositiveFloat, ...], Listed, Field(min_length=1)] = FILLED
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
    """Images per step. [App. D.2.2, memory table; released]"""
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
        if self.grid_seeds > self.seeds:
            raise ValueError(f"--grid-seeds {self.grid_seeds}: is more than --seeds {self.seeds}")
        return self


class Command(Machine):
    """Settings of a command that makes runs. `model_fields_set` names what the caller gave.

    Defaults that depend on other settings are filled in when they are made.
    """

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

    @model_validator(mode="wrap")
    @classmethod
    def fill(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Add the defaults that depend on other settings. None counts as not given."""
        given = {name: value for name, value in dict(given).items() if value is not None}
        for name in given.keys() & cls.model_fields.keys():
            if isinstance(given[name], bool) and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"{name}: is not a setting that is true or false")
        filled = {name: v for layer in cls.layers(given).values() for name, v in layer.items()}
        made = handler(filled | given)
        object.__setattr__(made, "__pydantic_fields_set__", {*given})
        return made

    def but(self, **changes: Any) -> Self:
        """The same settings with some changed; defaults that depend on these are filled in anew."""
        return type(self)(**self.model_dump(exclude_unset=True) | changes)

    @classmethod
    def layers(cls, given: Table) -> dict[str, Table]:
        """Defaults that depend on what is given, by where they come from; the last one wins."""
        run = inherited(Path(str(given["start"]))) if "start" in given else {}
        kind, _, path = str(given.get("dataset", run.get("dataset"))).partition(":")
        if (f"folder:{absolute(path)}" if kind == "folder" else kind) != run.get("dataset"):
            own = ("data_seed", "split_file", "partial")  # these belong to align's dataset
            run = {name: value for name, value in run.items() if name not in own}
        known = {"pretext": "mae", "backbone": ""} | run | given
        ijepa, mini = known["pretext"] == "ijepa", known["backbone"] == "vit_mini"
        quilts = known.get("dataset" if "dataset" in cls.model_fields else "pool") == "quilts"
        rank, grid = 8 if mini else 64, ALIGNED_GRID if "start" in given else GRID
        found: dict[str, Table] = {
            "default": {
                "data_root": os.environ.get("BISSLIGHT_DATA", "data"),
                "pool": "imagenet",
                "grid": (known["lr"],) if "lr" in known else grid,
                "rank": rank,
                "alpha": known.get("rank", rank),
                "drop_path": DROP_PATH.get(str(known["backbone"]), 0.1),
            },
            "ijepa": (cls.ijepa | (cls.ijepa_mini if mini else {})) if ijepa else {},
            "short, for vit_mini": cls.short if mini else {},
            "quilts": {"pool": "quilts", "augment": "none"} if quilts else {},
            "align run": run,
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
    """--from: an align run, a directory of them, one per seed, or a LoRA file."""


def preset(name: str, kind: type[Settings], aligned: bool = False) -> Table:
    """The settings of a preset that differ from the defaults, which are the paper's.

    as-released: what the authors' program does when it is run as its README says; there, PEFT is
    SGD where it starts from an align run (`aligned`), and AdamW elsewhere.
    """
    released = RELEASED | ({"optimizer": "sgd"} if aligned else {}) if name != "paper" else {}
    return {name: value for name, value in released.items() if name in kind.model_fields}


def inherited(start: Path) -> Table:
    """Model, data and data root of an align run, or of the first in a directory of align runs."""
    files = [start / "config.json", *sorted(start.glob("*/config.json"))]
    config = next((read_table(file) for file in files if file.is_file()), {})
    taken = {*Data.model_fields, *Model.model_fields, "data_root"} if "lam" in config else set()
    return {name: value for name, value in config.items() if name in taken}


def read_table(path: Path) -> Table:
    """The settings in a TOML or JSON file, a run's config.json too (UsageError)."""
    try:
        load = json.loads if path.suffix == ".json" else tomllib.loads
        found = dict(load(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as settings ({error})") from error
    return {k.replace("-", "_"): value for k, value in found.items() if value is not None}


# --- settings of a command line ----------------------------------------------------------------


def flag(name: str) -> str:
    """--d-lr for d_lr."""
    return "--from" if name == "start" else f"--{name.replace('_', '-')}"


def settle(
    kind: Any, flags: Table, file: Path | None = None, base: str = "paper"
) -> tuple[Any, dict[str, Table]]:
    """Settings, and what each layer sets: flag over file over preset over run over default.

    Raises UsageError.
    """
    table = read_table(file) if file else {}
    released = preset(base, kind, "start" in table | flags)
    given = released | table | flags
    start = Path(str(given.get("start", "")))
    if "start" in given and not start.is_file() and not inherited(start):
        raise UsageError(f"--from {start}: is no align run, directory of align runs or LoRA file")
    config = make(kind, given)
    for name in sorted({"dataset", "pool"} & kind.model_fields.keys()):
        place_of(getattr(config, name), config.data_root)
    layers = kind.layers(config.model_dump(exclude_unset=True)) if issubclass(kind, Command) else {}
    return config, layers | {f"preset {base}": released, f"{file}": table, "flag": flags}


def make(kind: Any, given: Table) -> Any:
    """Settings; what is wrong is a UsageError, `--flag VALUE: what is wrong`."""
    try:
        return kind(**given)
    except ValidationError as error:
        found = [item for item in error.errors() if not item["loc"] or item["loc"][0] in given]
        item = (found or error.errors())[0]  # not of a default that follows from another setting
        message = item["msg"].removeprefix("Value error, ").replace("Input should", "should")
        words = [flag(str(part)) for part in item["loc"] if part != "swept"][:1]
        words += [str(item["input"])] if isinstance(item["input"], str | int | float) else []
        raise UsageError(f"{' '.join(words)}: {message}".removeprefix(": ")) from error


def differences(config: Any, layers: dict[str, Table], every: bool = False) -> list[Table]:
    """The settings that differ from the paper's and who set them; all settings if `every`."""
    fields = type(config).model_fields.items()
    paper = {name: None if field.is_required() else field.default for name, field in fields}
    paper |= layers.get("default", {}) | layers.get("ijepa", {})
    sources = {name: source for source, layer in layers.items() for name in layer}
    own = {*Machine.model_fields, "backbone", "dataset", "pool", "start", "pretext", "weights"}
    return [
        {"setting": name, "value": value, "set by": sources.get(name, ""), "paper": paper[name]}
        for name, value in config
        if every or (value != paper[name] and name not in own)
    ]
