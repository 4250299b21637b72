"""The settings, one group per concern. No torch here, so `--help` is fast.

A field is a flag (`d_lr` is `--d-lr`), a key of a TOML file and a key of a run's config.json. Its
help, below it, gives symbol, meaning and, in brackets, the source of its default: [App. C.x] the
paper's appendix, [released] the authors' program where the paper is silent, [MAE], [I-JEPA] their
authors' recipes, [here] our own choice. `commands` makes a command's settings out of the groups.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.types import NonNegativeFloat, PositiveFloat

from support.errors import UsageError, checking, nearest


class Arch(NamedTuple):
    """Sizes of a ViT, its MAE decoder and its I-JEPA predictor."""

    dim: int = 768
    depth: int = 12
    heads: int = 12
    image_size: int = 224
    patch_size: int = 16
    mlp_ratio: float = 4.0
    class_token: bool = True
    decoder_dim: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    predictor_dim: int = 384
    predictor_depth: int = 12


DATASETS = ("dtd", "voc07", "cub200", "pets", "flowers", "aircrafts", "imagenet")
BACKBONES = {
    "vit_mini": Arch(64, 4, 4, 16, 4, 2.0, True, 48, 1, 4, 32, 2),
    "vit_b16": Arch(),
    "vit_l16": Arch(1024, 24, 16),
    "vit_h14": Arch(1280, 32, 16, patch_size=14),
}
PositiveInt = Annotated[int, Field(gt=0, lt=2**53)]  # larger ones are not exact in all JSON readers
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**53)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Place = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
Listed = BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v)  # of a command line
Shares = Annotated[tuple[Share, Share], Listed]  # in a pair, the first number is the smaller one
Ratios = Annotated[tuple[PositiveFloat, PositiveFloat], Listed]
FILLED: Any = None  # the default of a field that `Command.layers` always fills in


class Settings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True):
    """Base of all settings."""


class Machine(Settings):
    """Machine: of every run."""

    seed: NonNegativeInt = 0
    """Seed of initialisation, order, augmentation, masks and drop path. [here]"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1. auto: CUDA where there is one. [here]"""
    amp: bool = True
    """bfloat16 autocast on CUDA; the hypergradient stays in float32 or better. [released]"""
    recompute: bool = False
    """Activation checkpointing of the backbone: less memory, one more forward pass. [released]"""
    micro_batch: PositiveInt | None = None
    """Largest number of images that pass through the network at once; None: whole batch. [here]"""
    workers: Annotated[int, Field(ge=0, le=256)] | None = None
    """Processes that decode images; same result with any. None: up to 16 with a GPU, else 0."""
    save_minutes: NonNegativeFloat = 10.0
    """Minutes between checkpoints. [here]"""
    data_root: Place = FILLED
    """Where the benchmarks are, as torchvision lays them out. Default: $BISSLIGHT_DATA, ./data."""


class Shape(Settings):
    """Model: the network and what it is pretrained with."""

    backbone: str
    """ψ: vit_mini, vit_b16, vit_l16, vit_h14. [App. C.1]"""
    pretext: str = "mae"
    """Pretext task: mae, ijepa, FILE.py:Class or module:Class (not in pretrain). [App. C.3, D.1]"""
    image_size: PositiveInt | None = None
    """Side of the square input in pixels. None: the checkpoint's. [App. C.2: 224]"""
    patch_size: PositiveInt | None = None
    """Side of a patch in pixels. None: the checkpoint's. [App. C.1]"""


class Network(Shape):
    """Model: the frozen backbone, its adapter θ and the downstream head."""

    weights: Place | None = None
    """Checkpoint, or a pretrain run. None: the official one, downloaded. [App. C.1]"""
    base: Literal["target_encoder", "encoder"] = "target_encoder"
    """Network of an I-JEPA file that is ψ: target_encoder or encoder. [here: what I-JEPA tests]"""
    head: Literal["linear", "batchnorm"] = "linear"
    """h^D: linear, or batchnorm: behind a BatchNorm, as with ijepa. [App. C.2; D.1]"""
    rank: PositiveInt = FILLED
    """r: rank of LoRA on q and v of every layer. Default: 64, vit_mini 8. [App. C.3]"""
    alpha: PositiveFloat = FILLED
    """LoRA's scale is alpha / r. Default: r, so that the scale is 1. [released]"""
    drop_path: Rate = FILLED
    """Drop-path rate of L^D(θ_D) and PEFT. Default: 0.1 B, 0.2 L and H, 0 mini. [App. C.2]"""


class Crops(Settings):
    """Data: how images become inputs."""

    data_seed: NonNegativeInt = 0
    """Seed of quilts and of splits that are made by hash; apart from the runs' --seed. [here]"""
    augment: Literal["crop", "none"] = "crop"
    """crop: RandomResizedCrop and flip. none: as at test time, default of quilts. [App. C.2]"""
    min_crop: Share = 0.2
    """Smallest area of a random crop, as a share of the image. [App. C.2; ijepa, D.1: 0.3]"""


class Data(Crops):
    """Data: the labelled task."""

    dataset: str
    """D^D: dtd, voc07, cub200, pets, flowers, aircrafts, imagenet, quilts (drawn), folder:PATH."""
    partial: bool = False
    """Take a benchmark's subset as it is; `data check` counts what is missing. [here]"""
    split_file: Place | None = None
    """Positions of CUB's or Pets' validation images. None: a fifth, by hash. [App. C.2.1]"""
    voc_loss: Literal["softmax", "bce"] = "softmax"
    """L^D of VOC07: softmax (cross entropy summed over present classes), or bce. [released]"""
    voc_difficult: Literal["ignore", "positive"] = "ignore"
    """VOC07's difficult objects: ignore, or positive (hits). [VOC devkit; released: positive]"""
    d_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Resampling of downstream images: bicubic or bilinear. [App. C.3; released: bilinear]"""


class Pretext(Settings):
    """Pretext task: masks; pairs are the ends of a uniform distribution."""

    mask_ratio: Rate = 0.75
    """Share of patches that MAE removes. [App. C.3, MAE]"""
    ema: Rate = 0.9995
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [App. D.1; from scratch: 0.996]"""
    targets: PositiveInt = 4
    """M: target blocks per image. [I-JEPA]"""
    contexts: PositiveInt = 1
    """E: context blocks per image. [I-JEPA]"""
    target_scale: Shares = (0.15, 0.2)
    """Area of a target block, as a share of the image. [I-JEPA]"""
    context_scale: Shares = (0.85, 1.0)
    """Area of a context block, before the targets are taken out of it. [I-JEPA]"""
    aspect: Ratios = (0.75, 1.5)
    """Height over width of a target block. [I-JEPA]"""
    min_keep: NonNegativeInt = 10
    """A block must have strictly more than this many patches. [I-JEPA; vit_mini: 4]"""
    overlap: bool = False
    """Contexts may overlap targets. [I-JEPA]"""


class Lower(Settings):
    """Lower level: the pretext task at θ_P."""

    pool: str = FILLED
    """D^P: imagenet (default), quilts (default with quilts), a folder of images. [App. C.3]"""
    p_batch: PositiveInt = 256
    """Images per lower step. [App. C.3]"""
    p_lr: PositiveFloat = 0.01
    """Base rate of θ_P. [App. C.3; ijepa, D.1: 0.005]"""
    phi_p_lr: PositiveFloat = 1e-4
    """Base rate of the pretext head φ_P. [App. C.3]"""
    p_weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of θ_P and of φ_P's matrices. [App. C.3; ijepa, D.1: 0.0005; released: 0]"""
    decoder: Literal["checkpoint", "random"] = "checkpoint"
    """Where φ_P starts: checkpoint or random. [App. C.3; released: random, unlike its text]"""


class Upper(Settings):
    """Upper level: the downstream task at θ_P and θ_D."""

    d_batch: PositiveInt = 64
    """Images per upper step. [App. C.3]"""
    d_lr: PositiveFloat = 6.7e-4
    """Base rate of θ_D and φ_D. [released example]"""
    d_lr_from: Place | None = None
    """A finetune run: try 2/3, 1/2, 1/3 ... of its rate as --d-lr. [App. C.3, there ViT-L's]"""
    d_optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW 0.9/0.999, or SGD with momentum 0.9 as released. [App. C.3]"""
    d_weight_decay: NonNegativeFloat = 0.05
    """Decay of θ_D and φ_D, bias included. [App. C.2; ijepa, D.1: 0.0005; released: 0]"""
    probe_epochs: NonNegativeInt = 20
    """Linear probing of φ_D before line 3, at the upper rate, constant. [App. C.3]"""
    probe_drop_path: bool = False
    """Drop path in linear probing too. [here; released: on]"""


class Bilevel(Settings):
    """Algorithm 1: lengths, rates and the inverse of line 13."""

    alternations: PositiveInt = 500
    """T. [App. C.3]"""
    lower_steps: PositiveInt = 20
    """N_L: pretext steps per alternation; a block's F has at most this rank. [App. C.3]"""
    upper_steps: NonNegativeInt = 8
    """N_U: downstream steps. 0 trains the lower level alone, a control. [App. C.3]"""
    lam: PositiveFloat = 1e-3
    """λ: pulls θ_P to θ_D (Eq. 4) and damps M-FAC (γ = λ). [App. C.3]"""
    hypergrad: Literal["mfac", "recursion", "cg", "identity", "exact"] = "mfac"
    """Inverse of l.13: mfac, recursion (the same, slow), cg (BiSSL), identity, exact. [Sec. 3.1]"""
    partition: Literal["layer", "projection", "matrix", "global"] = "layer"
    """Blocks of M-FAC: layer, projection, matrix or global. [App. C.3: all of a layer]"""
    cg_iterations: PositiveInt = 5
    """Hessian-vector products of a CG solve. [App. D.2.1]"""
    cg_damping: NonNegativeFloat = 1.0
    """CG solves with c = λ + damping. [App. D.2.1]"""
    cg_prefactor: Literal["c", "lambda"] = "c"
    """Factor of CG's (H + cI)⁻¹ g: c, or Eq. 5's λ. [released]"""
    cg_steps: Literal["joint", "tensor"] = "joint"
    """CG's step sizes: joint, one for θ; tensor, one a matrix. [here; released: tensor]"""
    warmup: NonNegativeInt = 10
    """Alternations of linear warm-up, at both levels. [App. C.3]"""
    end_lr: NonNegativeFloat = 1e-6
    """Where the cosine of every rate ends. [released]"""
    clip: PositiveFloat = 10.0
    """Largest joint gradient norm of a step, at both levels. [released]"""
    eval_every: PositiveInt = 10
    """Alternations between validations of θ_D and θ_P. [released]"""
    mfac_device: Literal["same", "cpu"] = "same"
    """Where G is kept and inverted: same (with θ), or cpu. [here; Sec. 3.1.1: the CPU]"""


class Peft(Settings):
    """PEFT: parameter-efficient fine-tuning of θ and a fresh head."""

    lr: PositiveFloat | None = None
    """One learning rate for all seeds, instead of a grid. [App. C.2 has a grid]"""
    grid: Annotated[tuple[PositiveFloat, ...], Listed, Field(min_length=1)] = FILLED
    """Rates to try; validation decides. Default: 1e-4 ... 3e-2, after align a tenth. [App. C.2]"""
    grid_seeds: PositiveInt = 1
    """Seeds that each rate is tried with; those of the chosen rate count in --seeds. [here]"""
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


Record = dict[str, Any]  # settings by name, a line of metrics.jsonl, what a run ended with

NAMES = {  # the names that a setting may have; see `full_name`
    "backbone": (*BACKBONES,),
    "pretext": ("mae", "ijepa", "FILE.py:Class"),
    "dataset": ("quilts", *DATASETS, "folder:PATH", "own"),
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
