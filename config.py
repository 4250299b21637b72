"""Every setting of every command, and nothing else. No torch here, so `--help` is fast.

A field is a flag (`d_lr` is `--d-lr`), a key of a TOML file and a key of a run's config.json. Its
docstring gives symbol, meaning and, in brackets, the source of its default: [App. C.x] the paper's
appendix, [released] the authors' program where the paper is silent, [MAE], [I-JEPA] their authors'
recipes, [here] our own choice. Each group is about one thing; a command's settings inherit groups.

Some defaults depend on backbone, pretext task, dataset or the align run of `--from`. `layers` has
them all; they are filled in whenever settings are made, from Python or from the command line.
"""

import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, Field, NonNegativeFloat, PositiveFloat
from pydantic import ModelWrapValidatorHandler as Handler
from pydantic import ValidationInfo, field_validator, model_validator


class UsageError(Exception):
    """A wrong input: one line naming the thing and the remedy. The command ends with exit code 2."""


class RunError(Exception):
    """A run that could not go on (a full disk, a damaged file): one line, exit code 1."""


FILLED: Any = None  # the default of a field that `layers` always fills in
PositiveInt = Annotated[int, Field(gt=0, lt=2**53)]  # what JSON of other programs holds exactly
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**53)]
Share = Annotated[float, Field(gt=0, lt=1)]
CropShare = Annotated[float, Field(gt=0, le=1)]
Place = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


# --- backbones --------------------------------------------------------------------------------


class Arch(NamedTuple):
    """Sizes of a ViT, of its MAE decoder and of its I-JEPA predictor."""

    dim: int = 768
    depth: int = 12
    heads: int = 12
    image_size: int = 224
    patch_size: int = 16
    mlp_ratio: float = 4.0
    class_token: bool = True
    decoder: tuple[int, int, int] = (512, 8, 16)  # width, depth, heads
    predictor: tuple[int, int] = (384, 12)  # width, depth; heads as the backbone


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
BENCHMARKS = ("dtd", "voc07", "cub200", "pets", "flowers", "aircrafts", "imagenet")


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean X?', or the list of what there is."""
    known = list(known)
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


# --- one group a concern ----------------------------------------------------------------------


class Settings(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True,
               allow_inf_nan=False):  # fmt: skip
    """Base of all settings. `model_fields_set` names what the caller gave, the rest is default."""

    @model_validator(mode="wrap")
    @classmethod
    def fill(cls, given: Any, handler: Handler[Self]) -> Self:
        """Add the defaults that depend on other settings. None counts as not given."""
        if not isinstance(given, dict):
            return handler(given)
        given = {name: value for name, value in given.items() if value is not None}
        filled = {name: v for layer in layers(cls, given).values() for name, v in layer.items()}
        made = handler(filled | given)
        object.__setattr__(made, "__pydantic_fields_set__", {*given})
        return made

    @field_validator("*", mode="before")
    @classmethod
    def no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`alternations = true` is a mistake, not 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("is not a setting that is true or false")
        return value

    def but(self, **changes: Any) -> Self:
        """The same settings with some changed; defaults that depend on these are filled in anew."""
        return type(self)(**self.model_dump(exclude_unset=True) | changes)


class Common(Settings):
    """In every command that computes."""

    seed: NonNegativeInt = 0
    """Seed of initialisation, order, augmentation, masks and drop path. [here]"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1. auto: CUDA where there is one. [here]"""
    amp: bool = True
    """bfloat16 autocast on CUDA; the hypergradient stays in float32 or better. [released]"""


class Machine(Common):
    """Of every run. These may change between a run's start and its continuation."""

    workers: Annotated[int, Field(ge=0, le=256)] | None = None
    """Processes that decode images; same result with any. None: up to 16 beside a GPU, else 0."""
    micro_batch: PositiveInt | None = None
    """Most images in the network at a time; a step adds them up. None: all of a step's. [here]"""
    save_minutes: NonNegativeFloat = 10.0
    """Minutes between checkpoints. [here]"""
    data_root: Place = Field(default_factory=lambda: Path(os.environ.get("BISSLIGHT_DATA", "data")),
                             validate_default=True)  # fmt: skip
    """Where the benchmarks are, as torchvision lays them out. Default: $BISSLIGHT_DATA, ./data."""


class Shape(Settings):
    """The network and what it is pretrained with."""

    backbone: str
    """ψ: vit_mini, vit_b16, vit_l16, vit_h14, or for finetune timm:NAME. [App. C.1]"""
    pretext: str = "mae"
    """Pretext task: mae, ijepa, or one of your own as FILE.py:Class. [App. C.3, D.1]"""
    image_size: PositiveInt | None = None
    """Side of the square input in pixels. None: the checkpoint's. [App. C.2: 224]"""
    patch_size: PositiveInt | None = None
    """Side of a patch in pixels. None: the checkpoint's. [App. C.1]"""
    recompute: bool = False
    """Activation checkpointing of the backbone: less memory, one more forward pass. [released]"""

    @field_validator("backbone")
    @classmethod
    def known_backbone(cls, name: str) -> str:
        if name not in BACKBONES and not name.startswith("timm:"):
            raise ValueError(f"unknown backbone, {nearest(name, [*BACKBONES, 'timm:NAME'])}")
        return name

    @field_validator("pretext")
    @classmethod
    def known_pretext(cls, name: str) -> str:
        source, colon, found = name.rpartition(":")
        if name not in ("mae", "ijepa") and not (colon and source and found.isidentifier()):
            known = nearest(name, ["mae", "ijepa", "FILE.py:Class"])
            raise ValueError(f"unknown pretext task, {known}")
        return f"{Path(source).expanduser().absolute()}:{found}" if source.endswith(".py") else name


class Model(Shape):
    """The frozen backbone ψ, its adapter θ and the downstream head."""

    weights: Place | None = None
    """Checkpoint, or a pretrain run. None: the official one, downloaded. [App. C.1]"""
    base: Literal["target_encoder", "encoder"] = "target_encoder"
    """Which network of an I-JEPA file is ψ. [here: the one that I-JEPA evaluates]"""
    head: Literal["linear", "batchnorm"] = "linear"
    """h^D: linear, or behind a BatchNorm as with ijepa. [App. C.2; D.1]"""
    rank: PositiveInt = FILLED
    """r: rank of LoRA on q and v of every layer. Default: 64, vit_mini 8. [App. C.3]"""
    alpha: PositiveFloat = FILLED
    """LoRA's scale is alpha / r. Default: r, so that the scale is 1. [released]"""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = FILLED
    """Drop-path rate of L^D(θ_D) and PEFT. Default: 0.1 B, 0.2 L and H, 0 mini. [App. C.2]"""

    @model_validator(mode="after")
    def rank_fits(self) -> Self:
        dim = BACKBONES.get(self.backbone, OTHER).arch.dim
        if self.rank > dim and self.backbone in BACKBONES:
            raise ValueError(f"--rank {self.rank}: is above {self.backbone}'s width, {dim}")
        return self


class Crops(Settings):
    """How images become inputs."""

    data_seed: NonNegativeInt = 0
    """Seed of drawn data and of splits that are not on disk; not the seed of a run. [here]"""
    augment: Literal["crop", "none"] = "crop"
    """crop: RandomResizedCrop and flip. none: as at test time, default of quilts. [App. C.2]"""
    min_crop: CropShare = 0.2
    """Smallest area of a random crop, as a share of the image. [App. C.2; ijepa, D.1: 0.3]"""


class Data(Crops):
    """The labelled task D^D."""

    dataset: str
    """D^D: dtd, voc07, cub200, pets, flowers, aircrafts, imagenet, quilts (drawn), folder:PATH."""
    partial: bool = False
    """Take a benchmark's subset as it is; missing files are counted. [here]"""
    split_file: Place | None = None
    """Positions of CUB's or Pets' validation images. None: a fifth, by hash. [App. C.2.1]"""
    voc_loss: Literal["softmax", "bce"] = "softmax"
    """L^D of VOC07: cross entropy with one target a present class, or binary. [released]"""
    voc_difficult: Literal["ignore", "positive"] = "ignore"
    """VOC07's difficult objects: left out, or hits. [VOC devkit; released: positive]"""
    d_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Resampling of downstream images. [App. C.3; released: bilinear]"""

    @field_validator("dataset")
    @classmethod
    def known_dataset(cls, name: str) -> str:
        kind, colon, path = name.partition(":")
        if kind == "folder" and path.strip():
            return f"folder:{Path(path).expanduser().absolute()}"
        if name not in (*BENCHMARKS, "quilts") and kind != "own":
            known = nearest(name, [*BENCHMARKS, "quilts", "folder:PATH"])
            raise ValueError(f"unknown dataset, {known}")
        return name


class Pretext(Settings):
    """Masks of the pretext tasks; pairs are the ends of a uniform distribution."""

    mask_ratio: Share = 0.75
    """Share of patches that MAE removes. [App. C.3, MAE]"""
    ema: Share = 0.9995
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [App. D.1; I-JEPA: 0.996]"""
    targets: PositiveInt = 4
    """M: target blocks an image. [I-JEPA]"""
    contexts: PositiveInt = 1
    """E: context blocks an image. [I-JEPA]"""
    target_scale: tuple[CropShare, CropShare] = (0.15, 0.2)
    """Area of a target block, as a share of the image. [I-JEPA]"""
    context_scale: tuple[CropShare, CropShare] = (0.85, 1.0)
    """Area of a context block, before the targets are taken out of it. [I-JEPA]"""
    aspect: tuple[PositiveFloat, PositiveFloat] = (0.75, 1.5)
    """Height over width of a target block. [I-JEPA]"""
    min_keep: NonNegativeInt = 10
    """A block must have strictly more than this many patches. [I-JEPA; vit_mini: 4]"""
    overlap: bool = False
    """Contexts may overlap targets. [I-JEPA]"""

    @field_validator("target_scale", "context_scale", "aspect")
    @classmethod
    def ordered(cls, pair: tuple[float, float]) -> tuple[float, float]:
        if pair[0] > pair[1]:
            raise ValueError("the first number is the smaller one")
        return pair


class Lower(Settings):
    """Lower level: the pretext task at θ_P."""

    pool: str = FILLED
    """D^P: imagenet, quilts or a folder of images. Default: imagenet, quilts' own. [App. C.3]"""
    p_batch: PositiveInt = 256
    """Images a pretext step. [App. C.3]"""
    p_lr: PositiveFloat = 0.01
    """Base rate of θ_P. [App. C.3; ijepa, D.1: 0.005]"""
    phi_p_lr: PositiveFloat = 1e-4
    """Base rate of the pretext head φ_P. [App. C.3]"""
    p_weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of θ_P and of φ_P's matrices. [App. C.3; ijepa, D.1: 0.0005; released: 0]"""
    decoder: Literal["checkpoint", "random"] = "checkpoint"
    """Where φ_P starts. [App. C.3; released: random, though its text says otherwise]"""

    @field_validator("pool")
    @classmethod
    def place_of_pool(cls, name: str) -> str:
        return pool_name(name)


class Upper(Settings):
    """Upper level: the downstream task at θ_P and θ_D."""

    d_batch: PositiveInt = 64
    """Images an upper step. [App. C.3]"""
    d_lr: PositiveFloat = 6.7e-4
    """Base rate of θ_D and φ_D. [released example]"""
    d_lr_from: Place | None = None
    """Finetune run: try 2/3, 1/2, 1/3 ... of its rate as --d-lr. The paper's: ViT-L's. [App. C.3]"""
    d_optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW 0.9/0.999, or SGD with momentum 0.9 as released. [App. C.3]"""
    d_weight_decay: NonNegativeFloat = 0.05
    """Decay of θ_D and φ_D, bias included. [App. C.2; ijepa, D.1: 0.0005; released: 0]"""
    probe_epochs: NonNegativeInt = 20
    """Linear probing of φ_D before line 3, at the upper rate, constant. [App. C.3]"""
    probe_drop_path: bool = False
    """Drop path in linear probing too. [here; released: on]"""

    @model_validator(mode="after")
    def one_rate(self) -> Self:
        if self.d_lr_from and self.d_lr != Upper.model_fields["d_lr"].default:
            raise ValueError("give --d-lr or --d-lr-from, not both")
        return self


class Bilevel(Settings):
    """Algorithm 1."""

    alternations: PositiveInt = 500
    """T. [App. C.3]"""
    lower_steps: PositiveInt = 20
    """N_L: pretext steps an alternation, and the most rank M-FAC can give a block. [App. C.3]"""
    upper_steps: NonNegativeInt = 8
    """N_U: downstream steps. 0 trains the lower level alone, a control. [App. C.3]"""
    lam: PositiveFloat = 1e-3
    """λ: pulls θ_P to θ_D (Eq. 4) and damps M-FAC (γ = λ). [App. C.3]"""
    hypergrad: Literal["mfac", "recursion", "cg", "identity", "exact"] = "mfac"
    """How l.13 inverts: mfac, or recursion, its slow original; cg (BiSSL); identity: no curvature;
    exact: dense Hessian, small θ only. [Sec. 3.1]"""
    partition: Literal["layer", "projection", "matrix", "global"] = "layer"
    """Blocks of M-FAC. [App. C.3: all parameters of a layer]"""
    cg_iterations: PositiveInt = 5
    """Hessian-vector products of a CG solve. [App. D.2.1]"""
    cg_damping: NonNegativeFloat = 1.0
    """CG solves with c = λ + damping. [App. D.2.1]"""
    cg_prefactor: Literal["c", "lambda"] = "c"
    """Factor of CG's (H + cI)⁻¹ g: c, or Eq. 5's λ. [released]"""
    cg_steps: Literal["joint", "tensor"] = "joint"
    """CG's step sizes: one for all of θ, or one for each of its matrices. [here; released: tensor]"""
    warmup: NonNegativeInt = 10
    """Alternations of linear warm-up, at both levels. [App. C.3]"""
    end_lr: NonNegativeFloat = 1e-6
    """Where the cosine of every rate ends. [released]"""
    clip: PositiveFloat = 10.0
    """Largest joint gradient norm of a step, at both levels. [released]"""
    eval_every: PositiveInt = 10
    """Alternations between validations of θ_D and θ_P. [released]"""
    mfac_device: Literal["same", "cpu"] = "same"
    """Where G is kept and inverted: with θ, or in host memory. [here; Sec. 3.1.1: the CPU]"""


class Peft(Settings):
    """Parameter-efficient fine-tuning (PEFT): θ and a fresh head (App. C.2)."""

    lr: PositiveFloat | None = None
    """One learning rate for all seeds, instead of a grid. [App. C.2 has a grid]"""
    grid: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = FILLED
    """Rates to choose from by validation. Default: 1e-4 ... 3e-2, after align a tenth. [App. C.2]"""
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


# --- one class a command ----------------------------------------------------------------------


class AlignConfig(Bilevel, Upper, Lower, Pretext, Data, Model, Machine):
    """`align`: BiSSLight, Algorithm 1."""


class FinetuneConfig(Peft, Data, Model, Machine):
    """`finetune`: PEFT from the backbone, or from an align run, whose model and data it takes."""

    start: Place | None = None
    """--from: an align run, a directory of them, one a seed, or a LoRA file."""


class PretrainConfig(Pretext, Crops, Shape, Machine):
    """`pretrain`: MAE or I-JEPA from scratch, for those without a checkpoint. Trains ψ itself."""

    pool: str
    """Unlabelled images: quilts, or any folder of images, nested or not."""
    epochs: PositiveInt = 400
    """Passes over the pool. [MAE's code; I-JEPA: 300]"""
    warmup_epochs: NonNegativeInt = 40
    """Epochs of linear warm-up. [MAE; I-JEPA]"""
    warmup_from: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Where the warm-up starts, as a share of the base rate. [MAE; I-JEPA: 0.2]"""
    batch: PositiveInt = 256
    """Images a step. [here; MAE uses 4096]"""
    base_lr: PositiveFloat = 1.5e-4
    """The rate is base_lr * batch / 256. [MAE; I-JEPA: 1.25e-4]"""
    min_lr: NonNegativeFloat = 0.0
    """Where the cosine ends. [MAE; I-JEPA: 1e-6]"""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of tensors with two or more axes. [MAE; I-JEPA: 0.04]"""
    final_weight_decay: NonNegativeFloat | None = None
    """Where half a cosine takes the decay. None: it stays. [MAE; I-JEPA: 0.4]"""
    beta2: Share = 0.95
    """AdamW's second beta; the first is 0.9. [MAE; I-JEPA: 0.999]"""

    @field_validator("pool")
    @classmethod
    def place_of_pool(cls, name: str) -> str:
        return pool_name(name)


class SweepConfig(Peft, Bilevel, Upper, Lower, Pretext, Data, Model, Machine):
    """`sweep`: align with PEFT, and PEFT alone, over one or two lists of values."""

    swept: dict[str, tuple[int | float, ...]]
    """The lists: `--rank 1,2,4` on the command line, swept={"rank": (1, 2, 4)} in Python."""

    @field_validator("swept")
    @classmethod
    def one_or_two_lists(cls, swept: dict[str, Any]) -> dict[str, Any]:
        if len(swept) not in (1, 2) or not {*swept} <= {*SWEPT}:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in SWEPT)
            raise ValueError(f"give a comma list to one or two of {flags}")
        for name, values in swept.items():
            if len({*values}) < max(2, len(values)):
                raise ValueError(f"{name}: a list has two values or more, none of them twice")
        return swept


class BenchConfig(Common):
    """`bench`: what an alternation costs. Random weights and images."""

    backbone: Literal["vit_mini", "vit_b16", "vit_l16", "vit_h14"] | None = None
    """Its size. None: vit_b16 on a GPU, vit_mini on a CPU. [App. C.1]"""
    rank: PositiveInt = 64
    """r. [App. C.3]"""
    p_batch: PositiveInt = 256
    """Images a pretext step. [App. C.3]"""
    d_batch: PositiveInt = 64
    """Images an upper step. [App. C.3]"""
    lower_steps: PositiveInt = 20
    """N_L. [App. C.3]"""
    upper_steps: PositiveInt = 8
    """N_U. [App. C.3]"""
    repeats: PositiveInt = 3
    """Timed alternations a method, after one that warms up; medians are reported. [here]"""
    micro_batch: PositiveInt | None = None
    """Most images in the network at a time. None: all of a step's. [here]"""
    recompute: bool = False
    """Activation checkpointing. [released]"""


SWEPT = ("rank", "lr", "d_lr", "p_lr", "lam", "lower_steps", "alternations")


def pool_name(name: str) -> str:
    """quilts, imagenet, own:DIGEST, or the absolute path of a folder."""
    if not name.removeprefix("folder:").strip():
        raise ValueError("names neither a pool nor a folder")
    if name in ("quilts", "imagenet") or name.partition(":")[0] == "own":
        return name
    return str(Path(name.removeprefix("folder:")).expanduser().absolute())


# --- defaults that depend on other settings ---------------------------------------------------

GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # App. C.2: from the pretrained backbone
ALIGNED_GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # App. C.2: after BiSSLight
IJEPA = {"min_crop": 0.3, "head": "batchnorm", "p_lr": 0.005, "p_weight_decay": 0.0005,
         "d_weight_decay": 0.0005, "weight_decay": 0.0005}  # App. D.1  # fmt: skip
MAE_SCRATCH = {"ema": 0.996}
IJEPA_SCRATCH = {"epochs": 300, "min_crop": 0.3, "base_lr": 1.25e-4, "warmup_from": 0.2,
                 "min_lr": 1e-6, "beta2": 0.999, "weight_decay": 0.04,
                 "final_weight_decay": 0.4}  # Assran et al. 2023  # fmt: skip
SHORT = {"alternations": 100, "lower_steps": 10, "upper_steps": 5, "p_batch": 64, "d_batch": 32,
         "epochs": 60, "warmup_epochs": 5, "batch": 32}  # vit_mini: lengths and sizes alone  # fmt: skip
SHORT_SCRATCH = SHORT | {"epochs": 30, "warmup_epochs": 4, "batch": 64}
RELEASED = {"drop_path": 0.2, "d_interpolation": "bilinear", "voc_difficult": "positive",
            "d_optimizer": "sgd", "p_weight_decay": 0.0, "d_weight_decay": 0.0,
            "decoder": "random", "probe_drop_path": True, "mfac_device": "cpu",
            "cg_steps": "tensor"}  # fmt: skip
PRESETS = ("paper", "as-released")


def layers(kind: type[Settings], given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Defaults that depend on what is given, by where they come from; the last one wins."""
    run = inherited(Path(str(given["start"]))) if "start" in given else {}
    known = {"pretext": "mae"} | run | given
    backbone, pretext, dataset = (str(known.get(k)) for k in ("backbone", "pretext", "dataset"))
    scratch, mini, ijepa = kind is PretrainConfig, backbone == "vit_mini", pretext == "ijepa"
    sizes = BACKBONES.get(backbone, OTHER)
    rank = known.get("rank", sizes.rank)
    rates = (known["lr"],) if "lr" in known else ALIGNED_GRID if "start" in known else GRID
    found: dict[str, dict[str, Any]] = {
        "default": {"pool": "imagenet", "alpha": rank, "grid": rates}
        | (MAE_SCRATCH if scratch else {}),
        backbone: {"rank": sizes.rank, "drop_path": sizes.drop_path},
        "short, for vit_mini": (SHORT_SCRATCH if scratch else SHORT) if mini else {},
        "ijepa": (IJEPA_SCRATCH if scratch else IJEPA) if ijepa else {},
        "ijepa on vit_mini": {"min_keep": 4, **({"patch_size": 2} if scratch else {})}
        if ijepa and mini
        else {},
        "quilts": {"pool": "quilts", "augment": "none"}
        if "quilts" in (dataset, known.get("pool") if scratch else None)
        else {},
        "align run": run,
    }
    fields = kind.model_fields if kind is not BenchConfig else {}
    return {
        source: {name: value for name, value in layer.items() if name in fields}
        for source, layer in found.items()
    }


def preset(name: str, kind: type[Settings], aligned: bool = False) -> dict[str, Any]:
    """Settings in which a preset differs from the defaults, which are the paper's (UsageError).

    as-released: what the authors' program does when it is run as its README says; its PEFT is
    SGD where it starts from an align run (`aligned`), and AdamW elsewhere.
    """
    if name not in PRESETS:
        raise UsageError(f"--preset {name}: {nearest(name, PRESETS)}")
    if name == "paper" or kind not in (AlignConfig, FinetuneConfig, SweepConfig):
        return {}
    if kind is SweepConfig:
        raise UsageError(
            f"--preset {name}: its PEFT has one optimiser directly and another after align,"
            " a sweep has one; run align and finetune"
        )
    released = {k: v for k, v in RELEASED.items() if k in kind.model_fields}
    return released | ({"optimizer": "sgd"} if aligned and kind is FinetuneConfig else {})


def inherited(start: Path) -> dict[str, Any]:
    """Model, data and data root of an align run, or of the first in a directory of align runs."""
    runs = [start, *sorted(start.glob("*/"), key=lambda path: (len(path.name), path.name))]
    files = [file for run in runs if (file := run / "config.json").is_file()]
    config = flatten(json.loads(files[0].read_bytes())) if files else {}
    taken = {*Data.model_fields, *Model.model_fields, "data_root"}
    return {k: v for k, v in config.items() if k in taken and v is not None and "lam" in config}


def flatten(old: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run as they are now; those of the first edition were nested and named else."""
    if not any(isinstance(old.get(group), dict) for group in ("model", "machine")):
        return old
    new: dict[str, Any] = {k: v for k, v in old.items() if not isinstance(v, dict)}
    for group in (value for value in old.values() if isinstance(value, dict)):
        new |= group
    new["eval_epochs"], new["phi_p_lr"] = new.get("eval_every"), new.get("decoder_lr")
    new["d_lr"] = None if new.get("d_lr") == "auto" else new.get("d_lr")
    kind = AlignConfig if "bilevel" in old else FinetuneConfig if "peft" in old else PretrainConfig
    return {k: v for k, v in new.items() if k in kind.model_fields and v is not None}
