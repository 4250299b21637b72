"""The settings of `align` and `finetune`, and the defaults that depend on other settings.

Which defaults the paper gives by backbone and pretext task, what the authors' program does
otherwise (`--preset as-released`), and what is shorter with the small backbone vit_mini.
"""

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_origin

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError, model_validator

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
    dataset_name,
    nearest,
    place_of,
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
        asked = str(given.get("dataset", run.get("dataset")))
        if run and dataset_name(asked) != run["dataset"]:  # the split belongs to align's dataset
            run = {k: v for k, v in run.items() if k not in ("data_seed", "split_file", "partial")}
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
    released = RELEASED | ({"optimizer": "sgd"} if aligned else {})
    return {name: value for name, value in released.items() if name in kind.model_fields}


def inherited(start: Path) -> Table:
    """Model, data and data root of an align run, or of the first in a directory of align runs."""
    runs = [start, *sorted(start.glob("*/"), key=lambda path: (len(path.name), path.name))]
    files = [file for run in runs if (file := run / "config.json").is_file()]
    config = read_table(files[0]) if files else {}
    taken = {*Data.model_fields, *Model.model_fields, "data_root"} if "lam" in config else set()
    return {name: value for name, value in config.items() if name in taken}


def read_table(path: Path) -> Table:
    """The settings in a TOML or JSON file, a run's config.json too (UsageError)."""
    try:
        text = path.read_text()
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        known = {k.replace("-", "_"): v for k, v in flatten(dict(found)).items()}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as settings ({error})") from error
    return {name: value for name, value in known.items() if value is not None}


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


# --- settings of a command line ----------------------------------------------------------------


def flag(name: str) -> str:
    """--d-lr for d_lr."""
    return "--from" if name == "start" else f"--{name.replace('_', '-')}"


def settle(
    kind: Any, flags: Table, file: Path | None = None, base: str = "paper"
) -> tuple[Any, dict[str, str]]:
    """Settings, and who set each (UsageError): flag over file over preset over run over default."""
    table = read_table(file) if file else {}
    for name in table.keys() - kind.model_fields.keys():
        close = nearest(name, kind.model_fields)
        raise UsageError(f"--config {file}: unknown setting {name!r}, {close}")
    released = preset(base, kind, "start" in table | flags)
    told = {f"preset {base}": released, f"{file}": table, "flag": flags}
    given = {name: value for layer in told.values() for name, value in layer.items()}
    given = with_lists(kind, given)
    for name in given.keys() & {"weights", "split_file", "start", "d_lr_from"}:
        if not Path(str(given[name])).expanduser().exists():
            raise UsageError(f"{flag(name)} {given[name]}: there is no such file or directory")
    with one_line(given):
        layers = kind.layers(given) | told
        if "start" in given and not layers["align run"] and Path(given["start"]).is_dir():
            what = "an align run, a directory of align runs, or a LoRA file"
            raise UsageError(f"--from {given['start']}: is not {what}")
        config = kind(**given)
    for name in ("dataset", "pool"):
        if name in kind.model_fields:
            place_of(getattr(config, name), config.data_root)
    return config, {name: source for source, layer in layers.items() for name in layer}


def with_lists(kind: Any, given: Table) -> Table:
    """Comma lists as lists; in a sweep, a list where one value would stand is what is swept."""
    tuples = {k for k, field in kind.model_fields.items() if get_origin(field.annotation) is tuple}
    split = {
        name: value.split(",")
        for name, value in given.items()
        if isinstance(value, str) and (name in tuples or re.fullmatch(r"[\d.,eE+-]*,.*", value))
    }
    if "swept" not in kind.model_fields:
        return given | {name: value for name, value in split.items() if name in tuples}
    lists = {k: v for k, v in (given | split).items() if isinstance(v, list) and k not in tuples}
    rest = {k: v for k, v in (given | split).items() if k not in lists}
    return rest | {"swept": rest.get("swept", {}) | lists}


@contextlib.contextmanager
def one_line(given: Table) -> Iterator[None]:
    """What pydantic finds wrong as a UsageError, `--flag VALUE: what is wrong`."""
    try:
        yield
    except ValidationError as error:
        found = [item for item in error.errors() if not item["loc"] or item["loc"][0] in given]
        found = found or error.errors()  # errors of defaults that follow from others are left out
        lines = {str(item["loc"][:2]): explain(item) for item in reversed(found)}
        raise UsageError("; ".join(reversed(lines.values()))) from error


def explain(item: Any) -> str:
    """One of pydantic's complaints as a person would say it."""
    message = str(item["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    where = [str(part) for part in item["loc"] if part != "swept"]
    if not where:  # about settings together; the message names them
        return message
    if item["type"] == "missing":
        several = "give two numbers with a comma between them"
        return f"{flag(where[0])}" + (f": {several}" if where[1:] else " is needed, see --help")
    value = f" {item['input']}" if isinstance(item["input"], str | int | float) else ""
    return f"{flag(where[0])}{value}: {message}"


def differences(config: Any, sources: dict[str, str], every: bool = False) -> list[Table]:
    """The settings that differ from the paper's and who set them; all settings if `every`."""
    fields = type(config).model_fields
    given = {name: getattr(config, name, None) for name in ("backbone", "pretext", "start")}
    usual = {name: field.default for name, field in fields.items()}
    for source, layer in config.layers({k: v for k, v in given.items() if v}).items():
        usual |= layer if source in ("default", config.backbone, "ijepa", "--rank") else {}
    own = {*Machine.model_fields, "backbone", "dataset", "pool", "start", "pretext", "weights"}
    rows = []
    for name, field in fields.items():
        meaning, _, told = (field.description or "").partition(" [")
        value, source = getattr(config, name), sources.get(name, told.rstrip("]"))
        row = {"setting": name, "value": value, "set by": source}
        if every:
            rows.append(row | {"meaning": meaning})
        elif name in sources and name not in own and source[0] != "-" and value != usual[name]:
            rows.append(row | {"paper": usual[name]})
    return rows
