"""Settings of `align` and `finetune`: defaults, names, places of data, files, presets, errors."""

import difflib
import json
import logging
import os
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from config import BACKBONES, Bilevel, Data, Lower, Machine, Network, Peft, Place, Pretext, Upper

Record = dict[str, Any]  # settings by name, a line of metrics.jsonl, what a run ended with
FOLDERS = {  # where the benchmarks are below --data-root
    "dtd": "dtd", "voc07": "VOCdevkit", "cub200": "CUB_200_2011", "pets": "oxford-iiit-pet",
    "flowers": "flowers-102", "aircrafts": "fgvc-aircraft-2013b", "imagenet": "imagenet",
}  # fmt: skip
NAMES = {  # the names that a setting may have; see `full_name`
    "backbone": (*BACKBONES,),
    "pretext": ("mae", "ijepa", "FILE.py:Class"),
    "dataset": ("quilts", *FOLDERS, "folder:PATH", "own"),
    "pool": ("imagenet", "quilts", "own"),
}
GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # App. C.2: from the pretrained backbone
ALIGNED_GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # App. C.2: after BiSSLight
RELEASED: Record = {  # where the authors' program, run as its README says, is not the paper
    "drop_path": 0.2, "d_interpolation": "bilinear", "voc_difficult": "positive",
    "d_optimizer": "sgd", "p_weight_decay": 0.0, "d_weight_decay": 0.0, "decoder": "random",
    "probe_drop_path": True, "mfac_device": "cpu", "cg_steps": "tensor",
    "optimizer": "sgd",  # of PEFT after an align run alone
}  # fmt: skip
# settings that may differ in a run that counts as the paper's method: the paper searches for them,
# leaves them open, or they do not change the result
OPEN = {*Machine.model_fields, "d_lr", "d_lr_from", "lr", "grid", "grid_seeds", "seeds", "jobs",
        "start", "hypergrad", "eval_every", "mfac_device", "backbone", "pretext", "base",
        "image_size", "patch_size", "weights", "dataset", "data_seed", "split_file"}  # fmt: skip


class UsageError(Exception):
    """A wrong input: one line naming the thing and the remedy. Exit code 2."""


class RunError(Exception):
    """A run that could not go on (a full disk, a damaged file): one line, exit code 1."""


@contextmanager
def checking(thing: str, remedy: str = "") -> Iterator[None]:
    """Turn ValueError and OSError (with a remedy: any Exception) into a UsageError on `thing`."""
    kinds: Any = Exception if remedy else (ValueError, OSError)
    try:
        yield
    except kinds as error:  # torch.load raises anything from EOFError to UnpicklingError
        if isinstance(error, UsageError | RunError) or "MemoryError" in type(error).__name__:
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        why = f"cannot be read ({said}); {remedy}" if remedy else str(error)
        raise UsageError(f"{thing}: {why}") from error


class Command(Machine):
    """Settings of a command that makes runs. `model_fields_set` names what the caller gave."""

    usual: ClassVar[dict[str, Record]] = {  # defaults with a pretext task, a backbone, or both
        "ijepa": {  # App. D.1
            "min_crop": 0.3, "head": "batchnorm", "p_lr": 0.005, "p_weight_decay": 0.0005,
            "d_weight_decay": 0.0005, "weight_decay": 0.0005,
        },
        "ijepa vit_mini": {"min_keep": 4},  # the smallest target has few patches
        "vit_mini": {  # lengths, sizes, no drop path; never λ, a learning rate, decay, mask ratio
            "rank": 8, "drop_path": 0.0, "alternations": 100, "lower_steps": 10, "upper_steps": 5,
            "p_batch": 64, "d_batch": 32, "epochs": 60, "batch": 32,
        },
    }  # fmt: skip

    @model_validator(mode="wrap")
    @classmethod
    def fill(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Add the defaults that depend on other settings, and check. None counts as not given."""
        given = {name: value for name, value in dict(given).items() if value is not None}
        for name in [name for name in cls.model_fields if name in given]:
            value, kind = given[name], cls.model_fields[name].annotation
            items = value if isinstance(value, list | tuple) else [value]
            if kind is not bool and bool in map(type, items):
                raise ValueError(f"{name}: needs a value, not true or false")
            if name in NAMES and isinstance(value, str):
                given[name] = full_name(name, value)
        found = {name: v for layer in cls.layers(given).values() for name, v in layer.items()}
        made = handler({name: found[name] for name in found.keys() & cls.model_fields} | given)
        at = vars(made).get
        pairs = ("target_scale", "context_scale", "aspect")
        if odd := [name for name in pairs if [*at(name, ())] != sorted(at(name, ()))]:
            raise ValueError(f"{odd[0]}: give the smaller number first")
        if at("d_lr_from") and at("d_lr") != cls.model_fields["d_lr"].default:
            raise ValueError("give --d-lr or --d-lr-from, not both")
        if at("lr") and at("grid") != (at("lr"),):
            raise ValueError("give --lr or --grid, not both")
        if at("grid_seeds", 0) > at("seeds", 0):
            raise ValueError(f"--grid-seeds {at('grid_seeds')}: is more than --seeds {at('seeds')}")
        made.model_fields_set.intersection_update(given)
        return made

    def but(self, **changes: Any) -> Self:
        """The same settings with some changed; defaults that depend on these are filled in anew."""
        return type(self)(**self.model_dump(exclude_unset=True) | changes)

    @classmethod
    def layers(cls, given: Record) -> dict[str, Record]:
        """Defaults for what is given, by where they come from; the last one wins."""
        run = inherited(Path(str(given["start"]))) if "start" in given else {}
        if "dataset" in given and given["dataset"] != run.get("dataset"):  # another has its own
            run = {k: v for k, v in run.items() if k not in ("data_seed", "split_file", "partial")}
        known = {"pretext": "mae", "backbone": ""} | run | given
        pretext, backbone = str(known["pretext"]), str(known["backbone"])
        quilts = known.get("dataset", known.get("pool")) == "quilts"
        task, short = cls.usual.get(pretext, {}), cls.usual.get(backbone, {})
        grid = ALIGNED_GRID if "start" in given else GRID
        paper = {
            "data_root": os.environ.get("BISSLIGHT_DATA", "data"),
            "pool": "imagenet",
            "grid": (known["lr"],) if "lr" in known else grid,
            "rank": 64,
            "alpha": known.get("rank", short.get("rank", 64)),
            "drop_path": {"vit_l16": 0.2, "vit_h14": 0.2}.get(backbone, 0.1),  # App. C.2
        }
        return {
            "default": dict(cls.model_construct()) | paper | task,
            "short, for vit_mini": short | cls.usual.get(f"{pretext} {backbone}", {}),
            "quilts": {"pool": "quilts", "augment": "none"} if quilts else {},
            "align run": run,
        }


class AlignConfig(Bilevel, Upper, Lower, Pretext, Data, Network, Command):
    """`align`: BiSSLight, Algorithm 1."""


class FinetuneConfig(Peft, Data, Network, Command):
    """`finetune`: PEFT from the backbone, or from an align run, whose model and data it takes."""

    start: Place | None = None
    """An align run, a directory of them, one per seed, or a LoRA file."""


def full_name(name: str, value: str) -> str:
    """The setting `name`; a path is made absolute, so that it means the same in any directory.

    A backbone has to be known (ValueError). A pool is any folder, a dataset may be folder:PATH.
    """
    kind, colon, rest = value.partition(":")
    if not colon and value in NAMES[name]:
        return value
    if name == "backbone" or not (colon or name == "pool"):
        raise ValueError(f"--{name} {value}: is unknown, {nearest(value, NAMES[name])}")
    if not {"pretext": ".py:" in value, "pool": kind != "own", "dataset": kind == "folder"}[name]:
        return value
    path = Path(rest if kind == "folder" else value).expanduser().absolute()
    return f"folder:{path}" if name == "dataset" else str(path)


def nearest(word: str, known: Collection[str]) -> str:
    """'did you mean X?', or the list of what there is."""
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def inherited(start: Path) -> Record:
    """Model, data and data root of an align run, or of the first in a directory of align runs."""
    files = [start / "config.json", *sorted(start.glob("*/config.json"))]
    found = next((read_table(file) for file in files if file.is_file()), {})
    taken = {*Data.model_fields, *Network.model_fields, "data_root"} if "lam" in found else set()
    return {name: value for name, value in found.items() if name in taken}


def read_table(path: Path) -> Record:
    """The settings in a TOML or JSON file, a run's config.json too (UsageError)."""
    with checking(str(path), "give settings in TOML or JSON"):
        load = json.loads if path.suffix == ".json" else tomllib.loads
        found = dict(load(path.read_text()))
    return {k.replace("-", "_"): value for k, value in found.items() if value is not None}


def place_of(name: str, root: Path) -> Path | None:
    """Where a dataset, pool or file lies; None for what is drawn or handed in (ValueError)."""
    if name == "quilts" or name.partition(":")[0] == "own":
        return None
    path = root / FOLDERS[name] if name in FOLDERS else Path(name.removeprefix("folder:"))
    if not path.exists():
        get = "name another --pool" if name == "imagenet" else f"`bisslight data download {name}`"
        more = f" {path}; {get}, or give the --data-root where it is" if name in FOLDERS else ""
        raise ValueError(f"there is no such folder or file{more}")
    return path


def settle(
    kind: Any, flags: Record, file: Path | None = None, base: str = "paper"
) -> tuple[Any, dict[str, Record]]:
    """Settings (UsageError), and the layers that they come from; the last one with a value wins."""
    table = read_table(file) if file else {}
    for key in [key for key in table if key not in kind.model_fields]:
        raise UsageError(f"{file}: {key} is no setting, {nearest(key, kind.model_fields)}")
    released = {k: x for k, x in RELEASED.items() if base != "paper" and k in kind.model_fields}
    if "start" not in table | flags:
        released.pop("optimizer", None)
    given = released | table | flags
    start = Path(str(given.get("start", "")))
    if "start" in given and not start.is_file() and not inherited(start):
        raise UsageError(f"--from {start}: is no align run, folder of them, or adapter file")
    made = make(kind, given)
    at = vars(made).get
    if at("warmup", -1) >= at("alternations", 0) or at("warmup_epochs", -1) >= at("epochs", 0):
        logging.getLogger("bisslight").warning(
            "the warm-up is not shorter than the run, so no rate reaches its base value; see "
            "--warmup, --warmup-epochs"
        )
    for name in filter(at, ("dataset", "pool", "weights", "split_file", "d_lr_from")):
        with checking(f"--{name.replace('_', '-')} {at(name)}"):
            place_of(str(at(name)), made.data_root)
    layers = kind.layers(made.model_dump(exclude_unset=True))
    return made, layers | {f"preset {base}": released, f"{file}": table, "flag": flags}


def make(kind: Any, given: Record) -> Any:
    """Settings made of these values; UsageError `--flag VALUE: what is wrong`."""
    try:
        return kind(**given)
    except ValidationError as error:
        # what was given comes before a default that follows from it
        item = max(error.errors(), key=lambda item: not item["loc"] or item["loc"][0] in given)
        flags = (f"--{part}".replace("_", "-") for part in item["loc"] if part != "swept")
        name = next(flags, "").replace("--start", "--from")
        value = f" {item['input']}" if isinstance(item["input"], str | int | float) else ""
        plain = item["msg"].removeprefix("Value error, ").replace("Input should", "should")
        message = plain.replace("Field required", "a value is missing")
        raise UsageError(f"{name}{value}: {message}".removeprefix(": ")) from error
