"""Every setting of every command, and nothing else. No torch here, so `--help` is fast.

Each field's docstring gives its symbol, its meaning and, in brackets, the source of its default:
[App. C.x] the paper's appendix, [released] the authors' program where the paper is silent, [MAE] the recipe of the MAE
authors, [here] our own choice.
A field without a default must be given; None means "by backbone or dataset" and is filled in by `stages`.
Models are frozen and refuse unknown keys. The flag of a field is its name with dashes: `d_lr` is `--d-lr`. Where a
command has two fields of one name, the second has its group's name before its own: in `sweep`, `--peft-eval-every`.
"""

import contextlib
import copy
import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo


class UsageError(Exception):
    """A wrong input: one line naming the thing and the remedy. The command ends with exit code 2."""


class RunError(Exception):
    """A run that could not go on (NaN, unreadable image, full disk): one line, exit code 1."""


class Diverged(RunError):
    """A loss that is not finite. A grid of learning rates goes on without the rate."""


class Settings(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False):
    """Base of all settings: frozen, finite, strict about names, documented by attribute docstrings."""


PositiveInt = Annotated[int, Field(gt=0, lt=2**53)]  # what a float, and JSON of other programs, holds exactly
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**53)]
Share = Annotated[float, Field(gt=0, lt=1)]
CropShare = Annotated[float, Field(gt=0, le=1)]


# --- backbones -------------------------------------------------------------------------------------------------------


class Arch(Settings):
    """Sizes of a ViT, of its MAE decoder and its I-JEPA predictor; what tensors do not tell (heads) included."""

    image_size: PositiveInt = 224
    patch_size: PositiveInt = 16
    dim: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp_ratio: PositiveFloat = 4.0
    class_token: bool = True
    decoder_dim: PositiveInt = 512
    decoder_depth: PositiveInt = 8
    decoder_heads: PositiveInt = 16
    predictor_dim: PositiveInt = 384
    predictor_depth: PositiveInt = 12

    @model_validator(mode="after")
    def fits(self) -> Self:
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        return self

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class BackboneDefaults(NamedTuple):
    """What the paper, or for vit_mini we, set by backbone."""

    arch: Arch
    rank: int
    drop_path: float


BACKBONES = {
    "vit_mini": BackboneDefaults(
        Arch(image_size=16, patch_size=4, dim=64, depth=4, heads=4, mlp_ratio=2.0,
             decoder_dim=48, decoder_depth=1, decoder_heads=4, predictor_dim=32, predictor_depth=2), 8, 0.0),
    "vit_b16": BackboneDefaults(Arch(dim=768, depth=12, heads=12), 64, 0.1),
    "vit_l16": BackboneDefaults(Arch(dim=1024, depth=24, heads=16), 64, 0.2),
    "vit_h14": BackboneDefaults(Arch(patch_size=14, dim=1280, depth=32, heads=16), 64, 0.2),
}  # fmt: skip


OTHER = BackboneDefaults(Arch(dim=768, depth=12, heads=12), 64, 0.1)  # timm:NAME; its sizes come from the network


def defaults_of(backbone: str) -> BackboneDefaults:
    """What is set by backbone."""
    return OTHER if backbone.startswith("timm:") else BACKBONES[backbone]


NOT_UTF8 = "this name is not UTF-8, runs could not record it; rename the file or folder"


def is_utf8(name: str) -> bool:
    """Whether a name can be written as text; Python hides bytes that cannot in lone surrogates.

    >>> is_utf8("café"), is_utf8(b"caf\\xe9".decode(errors="surrogateescape"))
    (True, False)
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest(word: str, known: Iterator[str] | list[str]) -> str:
    """': did you mean X?', or the list of what there is."""
    known = list(known)
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


# --- one group a concern ---------------------------------------------------------------------------------------------


class Shape(Settings):
    """The network of ψ."""

    backbone: str
    """ψ: vit_mini, vit_b16, vit_l16, vit_h14, or for finetune timm:NAME. [here; App. C.1]"""
    pretext: Literal["mae", "ijepa"] = "mae"
    """What ψ is pretrained with, and the pretext task of align. ijepa has other defaults. [App. C.3, D.1]"""
    image_size: PositiveInt | None = None
    """Side of the square input in pixels. None: the checkpoint's, else the backbone's. [App. C.2: 224]"""
    patch_size: PositiveInt | None = None
    """Side of a patch in pixels. None: the checkpoint's, else the backbone's. [App. C.1]"""
    recompute: bool = False
    """Activation checkpointing of the backbone: less memory, one more forward pass. [released]"""

    @field_validator("backbone")
    @classmethod
    def known(cls, name: str) -> str:
        if name not in BACKBONES and not name.startswith("timm:"):
            raise ValueError(f"unknown backbone {name!r}, {nearest(name, [*BACKBONES, 'timm:NAME'])}")
        return name


class Model(Shape):
    """The frozen backbone ψ and the shape of θ."""

    weights: Path | None = None
    """Checkpoint in the official MAE layout, or a pretrain run. None: the official one, downloaded. [App. C.1]"""
    base: Literal["target_encoder", "encoder"] = "target_encoder"
    """Which network of an I-JEPA file is ψ. [here: the one that I-JEPA evaluates; the paper does not say]"""
    head: Literal["linear", "batchnorm"] = "linear"
    """h^D on the class token, or without one on the mean of the patches. [App. C.2: linear; ijepa, D.1: batchnorm]"""
    rank: PositiveInt | None = None
    """r: rank of LoRA on q and v of every layer. None: 64, vit_mini 8. [App. C.3]"""
    alpha: PositiveFloat | None = None
    """LoRA scale is alpha / r. None: alpha = r, scale 1. [released]"""
    drop_path: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Drop-path rate of L^D(θ_D) and of PEFT, linear over blocks. None: 0.1 B, 0.2 L and H, 0 mini. [App. C.2]"""


class Data(Settings):
    """The labelled task D^D, the unlabelled pool D^P, and how images are cut."""

    dataset: str
    """D^D: dtd, voc07, cub200, pets, flowers, aircrafts, imagenet, quilts (embedded), or folder:PATH, class folders."""
    pool: str | None = None
    """D^P: imagenet, quilts, or any folder of images, nested or not. None: imagenet, for quilts quilts. [App. C.3]"""
    partial: bool = False
    """Take a benchmark's subset as it is: labels and head stay the official ones, missing files are counted. [here]"""
    split_file: Path | None = None
    """Positions of CUB's or Pets' validation images in their training part. None: a fifth, by hash. [App. C.2.1]"""
    voc_loss: Literal["softmax", "bce"] = "softmax"
    """L^D of VOC07: cross entropy with a target a present class, or binary cross entropy. [released]"""
    voc_difficult: Literal["ignore", "positive"] = "ignore"
    """VOC07 objects marked difficult: neither hit nor false alarm, or hits. [VOC devkit; released: positive]"""
    data_seed: NonNegativeInt = 0
    """Seed of the embedded dataset and of splits that are not on disk. Not the seed of a run. [here]"""
    augment: Literal["crop", "none"] | None = None
    """crop: RandomResizedCrop, flip. none: as at test time. None: crop, for quilts none. [App. C.2]"""
    min_crop: CropShare = 0.2
    """Smallest area of a random crop, as a share of the image. [App. C.2; ijepa, D.1: 0.3]"""
    d_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Resampling of downstream images. The paper has one pipeline for both levels. [App. C.3; released: bilinear]"""

    @field_validator("dataset", "pool")
    @classmethod
    def named(cls, name: str | None) -> str | None:
        if name is not None and not name.removeprefix("folder:").strip():
            raise ValueError("names neither a dataset nor a folder")
        return name


class Masks(Settings):
    """I-JEPA's mask sampler; shares of the image's area, uniform between the two numbers."""

    targets: PositiveInt = 4
    """M: target blocks an image. [I-JEPA]"""
    contexts: PositiveInt = 1
    """E: context blocks an image. [I-JEPA]"""
    target_scale: tuple[CropShare, CropShare] = (0.15, 0.2)
    """Area of a target block. [I-JEPA]"""
    context_scale: tuple[CropShare, CropShare] = (0.85, 1.0)
    """Area of a context block, before the targets are taken out of it. [I-JEPA]"""
    aspect: tuple[PositiveFloat, PositiveFloat] = (0.75, 1.5)
    """Height over width of a target block. [I-JEPA]"""
    min_keep: NonNegativeInt = 10
    """Fewest patches of a block, itself excluded. [I-JEPA; vit_mini 4]"""
    overlap: bool = False
    """Contexts may overlap targets. [I-JEPA]"""

    @model_validator(mode="after")
    def ordered(self) -> Self:
        for name in ("target_scale", "context_scale", "aspect"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"--{name.replace('_', '-')} {low},{high}: the first number is the smaller one")
        return self


class Lower(Settings):
    """Lower level: the pretext task at θ_P."""

    p_batch: PositiveInt = 256
    """Images a pretext step. [App. C.3]"""
    p_lr: PositiveFloat = 0.01
    """Base rate of θ_P. [App. C.3; ijepa, D.1: 0.005]"""
    decoder_lr: PositiveFloat = 1e-4
    """Base rate of the pretext head φ_P. [App. C.3]"""
    p_weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of θ_P and of φ_P's matrices. [App. C.3; ijepa, D.1: 0.0005; released: 0]"""
    mask_ratio: Share = 0.75
    """Share of patches that MAE removes. [App. C.3]"""
    decoder: Literal["checkpoint", "random"] = "checkpoint"
    """Where φ_P starts. [App. C.3; released: random, though its text says otherwise]"""
    ema: Share = 0.9995
    """Momentum of I-JEPA's teacher θ_T at the start; it rises to 1 over T N_L steps. [App. D.1; the horizon: here]"""


class Upper(Settings):
    """Upper level: the downstream task at θ_P and θ_D."""

    d_batch: PositiveInt = 64
    """Images an upper step. [App. C.3]"""
    d_lr: PositiveFloat | Literal["auto"] = 6.7e-4
    """Base rate of θ_D and φ_D. auto: the paper's recipe, 2/3, 1/2, 1/3 ... of --d-lr-from's. [released example]"""
    d_lr_from: Path | None = None
    """For --d-lr auto: a finished direct finetune run on this dataset; the paper's is ViT-L's. [App. C.3]"""
    d_optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW 0.9/0.999, or SGD with momentum 0.9 as released. [App. C.3]"""
    d_weight_decay: NonNegativeFloat = 0.05
    """Decay of θ_D and φ_D, bias included. [App. C.2; ijepa, D.1: 0.0005; released: 0]"""
    probe_epochs: NonNegativeInt = 20
    """Linear probing of φ_D before line 3, at the upper rate, constant. [App. C.3]"""
    probe_drop_path: bool = False
    """Drop path in linear probing too. [here: a probe is of the network as it is; released: on]"""

    @model_validator(mode="after")
    def auto_needs_a_run(self) -> Self:
        if (self.d_lr == "auto") != (self.d_lr_from is not None):
            raise ValueError("--d-lr auto and --d-lr-from RUN belong together: a finished direct finetune run")
        return self


class Bilevel(Settings):
    """Algorithm 1."""

    alternations: PositiveInt = 500
    """T. [App. C.3]"""
    lower_steps: PositiveInt = 20
    """N_L: pretext steps an alternation, and the most rank M-FAC can give a block. [App. C.3]"""
    upper_steps: NonNegativeInt = 8
    """N_U. 0 trains the lower level alone, a control. [App. C.3]"""
    lam: PositiveFloat = 1e-3
    """λ: pulls θ_P to θ_D (Eq. 4) and damps M-FAC (γ = λ). [App. C.3]"""
    hypergrad: Literal["mfac", "cg", "identity", "exact"] = "mfac"
    """How line 13 inverts: mfac, cg (BiSSL), identity (no curvature), exact (dense Hessian, small θ). [Sec. 3.1]"""
    cg_iterations: PositiveInt = 5
    """Hessian-vector products of a solve. [App. D.2.1]"""
    cg_damping: NonNegativeFloat = 1.0
    """CG solves with c = λ + damping. [App. D.2.1]"""
    cg_prefactor: Literal["c", "lambda"] = "c"
    """Factor of CG's (H + cI)⁻¹ g: c, or Eq. 5's λ. [released]"""
    cg_steps: Literal["joint", "tensor"] = "joint"
    """CG's step sizes: one for all of θ, or one for each of its matrices. [here; released: tensor]"""
    cg_batch: Literal["last", "first"] = "last"
    """Pretext batch of the products: the last with its mask, or the first with fresh masks. [here; released: first]"""
    partition: Literal["layer", "projection", "matrix", "global"] = "layer"
    """Blocks of M-FAC. [App. C.3: all parameters of a layer]"""
    warmup: NonNegativeInt = 10
    """Alternations of linear warm-up, at both levels. [App. C.3]"""
    end_lr: NonNegativeFloat = 1e-6
    """Where the cosine ends. [released]"""
    clip: PositiveFloat = 10.0
    """Largest joint gradient norm of a step, at both levels. [released]"""
    eval_every: PositiveInt = 10
    """Alternations between validations of θ_D and θ_P, and between checkpoints. [released]"""


class Peft(Settings):
    """Fine-tuning of θ and a fresh head (App. C.2)."""

    lr: PositiveFloat | None = None
    """One rate for all seeds, instead of the grid. [App. C.2 has a grid]"""
    lr_grid: bool | None = None
    """Choose the rate by validation accuracy, ties by loss. None: unless --lr is given. [App. C.2.1]"""
    grid_seeds: PositiveInt = 1
    """Seeds each rate is tried with; the chosen rate's are among the seeds. [App. C.2.1: not said; here]"""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW 0.9/0.999, or SGD with momentum 0.9. [App. C.2; released: sgd after align]"""
    grid: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    """Rates of --lr-grid. None: 1e-4 ... 3e-2, after align 1e-5 ... 3e-3. [App. C.2]"""
    epochs: PositiveInt = 200
    """Passes over the training split. [App. C.2]"""
    warmup_epochs: NonNegativeInt = 5
    """Epochs of linear warm-up. [App. C.2]"""
    batch: PositiveInt = 256
    """Images a step. [App. D.2.2, memory table; released]"""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of θ and of the whole head. [App. C.2; ijepa, D.1: 0.0005]"""
    end_lr: NonNegativeFloat = 1e-6
    """Where the cosine ends. [released]"""
    eval_every: PositiveInt = 1
    """Epochs between validations. [App. C.2.1]"""
    seeds: PositiveInt = 8
    """Independent runs. [App. C.2.1]"""

    @model_validator(mode="after")
    def one_way_to_choose(self) -> Self:
        if self.lr is not None and (self.lr_grid or self.grid):
            raise ValueError(f"give --lr or --{'grid' if self.grid else 'lr-grid'}, not both")
        if self.lr is None and self.lr_grid is False:
            raise ValueError("--no-lr-grid needs --lr")
        if self.grid and len({*self.grid}) < len(self.grid):
            raise ValueError("--grid: has a rate twice")
        if self.grid_seeds > self.seeds:
            raise ValueError(f"--grid-seeds {self.grid_seeds}: is more than --seeds {self.seeds}")
        return self


class Machine(Settings):
    """What may change between a run and its resumption. Another number of threads rounds differently."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1. auto: CUDA where there is one. [here]"""
    workers: Annotated[int, Field(ge=0, le=256)] | None = None
    """Processes that decode images; results do not change. None: beside a GPU one a core, at most 16; else 0. [here]"""
    jobs: Annotated[int, Field(ge=1, le=256)] = 1
    """Fine-tuning runs (seeds, rates) at a time, each in a process with its share of the cores. [here]"""
    data_root: Path | None = None
    """Where the benchmarks are, as torchvision lays them out. None: $BISSLIGHT_DATA, else ./data. [here]"""
    micro_batch: PositiveInt | None = None
    """Most images that pass through the network at a time; a step adds its pieces up. None: all of a step's. [here]"""
    save_minutes: NonNegativeFloat = 10.0
    """Checkpoints are written at validations, at a stop, and when this much time has passed. [here]"""
    mfac_device: Literal["same", "cpu"] = "same"
    """Where the pretext gradients are kept and inverted: with θ, or in host memory. [here; Sec. 3.1.1: the CPU]"""


class Common(Settings):
    """In every command that computes."""

    seed: NonNegativeInt = 0
    """Seed of initialisation, order, augmentation, masks and drop path. [here]"""
    amp: bool = True
    """bfloat16 autocast on CUDA; the hypergradient stays in float32 or better. [released]"""
    machine: Machine = Machine()


class PretrainConfig(Common):
    """`pretrain`: MAE or I-JEPA from scratch, for those without a checkpoint. Trains ψ itself."""

    model: Shape
    pool: str
    """Unlabelled images: quilts, or any folder of images, nested or not."""
    data_seed: NonNegativeInt = 0
    """Seed of the embedded dataset. [here]"""
    augment: Literal["crop", "none"] | None = None
    """crop: RandomResizedCrop bicubic and flip; ijepa bilinear, no flip. None: crop, for quilts none. [MAE]"""
    min_crop: CropShare = 0.2
    """Smallest area of a random crop. [MAE; I-JEPA: 0.3]"""
    epochs: PositiveInt = 400
    """Passes over the pool. [MAE trains 1600; 400 is its code's default; I-JEPA: 300]"""
    warmup_epochs: NonNegativeInt = 40
    """Epochs of linear warm-up. [MAE; I-JEPA]"""
    warmup_from: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Where the warm-up starts, as a share of the base rate. [MAE; I-JEPA: 0.2]"""
    batch: PositiveInt = 256
    """Images a step. [here; MAE uses 4096]"""
    base_lr: PositiveFloat = 1.5e-4
    """Rate for 256 images a step; the rate in force is base_lr * batch / 256. [MAE; I-JEPA: 1.25e-4]"""
    min_lr: NonNegativeFloat = 0.0
    """Where the cosine ends. [MAE; I-JEPA: 1e-6]"""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of tensors with two or more axes. [MAE; I-JEPA: 0.04]"""
    final_weight_decay: NonNegativeFloat | None = None
    """Where half a cosine takes the decay. None: it stays. [MAE; I-JEPA: 0.4]"""
    beta2: Share = 0.95
    """AdamW's second beta; the first is 0.9. [MAE; I-JEPA: 0.999]"""
    mask_ratio: Share = 0.75
    """Share of patches that MAE removes. [MAE]"""
    ema: Share = 0.996
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [I-JEPA]"""
    masks: Masks = Masks()


class AlignConfig(Common):
    """`align`: BiSSLight, Algorithm 1."""

    model: Model
    data: Data
    lower: Lower = Lower()
    masks: Masks = Masks()
    upper: Upper = Upper()
    bilevel: Bilevel = Bilevel()


class FinetuneConfig(Common):
    """`finetune`: PEFT from the backbone, or from an align run."""

    start: Path | None = None
    """--from: an align run, or a directory of them, one a seed (sets backbone, weights, rank, data); or a LoRA file."""
    model: Model
    data: Data
    peft: Peft = Peft()


SWEPT = {  # settings that a sweep takes several values of, and where they are; the first that is swept is the x axis
    "rank": ("model", "rank"),
    "lr": ("peft", "lr"),
    "d_lr": ("upper", "d_lr"),
    "p_lr": ("lower", "p_lr"),
    "lam": ("bilevel", "lam"),
    "lower_steps": ("bilevel", "lower_steps"),
    "alternations": ("bilevel", "alternations"),
}


class SweepConfig(Common):
    """`sweep`: align and PEFT, and PEFT alone, over one or two lists of values. All settings of both commands."""

    model: Model
    data: Data
    lower: Lower = Lower()
    masks: Masks = Masks()
    upper: Upper = Upper()
    bilevel: Bilevel = Bilevel()
    peft: Peft = Peft()
    swept: dict[str, tuple[int | float | str, ...]] = {}
    """The lists, by setting: given where a single value would stand, `--rank 1,2,4` or `rank = [1, 2, 4]`."""

    @model_validator(mode="before")
    @classmethod
    def take_lists(cls, table: Any) -> Any:
        """Move lists from their settings to `swept`; the first value of each stays behind."""
        if not isinstance(table, dict):
            return table
        table = copy.deepcopy(table)
        swept: dict[str, Any] = table.setdefault("swept", {})
        for name, (group, key) in SWEPT.items():
            within = table.get(group)
            value = within.get(key) if isinstance(within, dict) else None
            if isinstance(value, str) and "," in value:
                value = value.split(",")
            if isinstance(value, list | tuple):
                swept[name] = [number(part) for part in value]
                within[key] = swept[name][0] if swept[name] else None
        return table

    @model_validator(mode="after")
    def one_or_two_lists(self) -> Self:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in SWEPT)
        if unknown := [name for name in self.swept if name not in SWEPT]:
            raise ValueError(f"swept: {unknown[0]!r} cannot be swept, these can: {', '.join(SWEPT)}")
        if len(self.swept) not in (1, 2):
            raise ValueError(f"give a comma list to one or two of {flags}, not to {len(self.swept) or 'none'}")
        for name, values in self.swept.items():
            if len({*values}) < max(2, len(values)):
                what = "has a value twice" if len(values) > 1 else "a list has at least two values"
                raise ValueError(f"--{name.replace('_', '-')} {','.join(map(str, values))}: {what}")
        return self


def number(text: Any) -> Any:
    """A number that arrives as text, or what arrived: each setting says itself what it takes.

    >>> number("4"), number("1e-3"), number("auto")
    (4, 0.001, 'auto')
    """
    for kind in (int, float):
        with contextlib.suppress(ValueError, TypeError):
            return kind(text) if isinstance(text, str) else text
    return text


class BenchConfig(Common):
    """`bench`: what an alternation costs. Random weights and images."""

    backbone: Literal["vit_mini", "vit_b16", "vit_l16", "vit_h14"] = "vit_b16"
    """Its size. [App. C.1]"""
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
    stored: PositiveInt = 20
    """Gradients in the comparison of M-FAC with the paper's recursion. [App. C.3]"""
    repeats: PositiveInt = 3
    """Timed alternations a method, after one that warms up; medians are reported. [here]"""
    recompute: bool = False
    """Activation checkpointing. [released]"""


# --- defaults by pretext task, and presets ----------------------------------------------------------------------------

PRESETS = ("paper", "as-released")


def by_pretext(pretext: str, model: type[Settings], backbone: str) -> dict[str, Any]:
    """Settings, by leaf name, whose defaults are others with I-JEPA (App. D.1; from scratch: Assran et al. 2023)."""
    if pretext != "ijepa":
        return {}
    mini = {"min_keep": 4} if backbone == "vit_mini" else {}  # 8 x 8 patches: the smallest target has 9
    if model is PretrainConfig:
        rate = {"base_lr": 1.25e-4, "warmup_from": 0.2, "min_lr": 1e-6, "beta2": 0.999}
        decay = {"weight_decay": 0.04, "final_weight_decay": 0.4}
        return {"epochs": 300, "min_crop": 0.3, **rate, **decay, **mini} | ({"patch_size": 2} if mini else {})
    shared = {"min_crop": 0.3, "head": "batchnorm"}
    align = {"p_lr": 0.005, "p_weight_decay": 0.0005, "d_weight_decay": 0.0005} | mini
    peft = {"weight_decay": 0.0005}
    return shared | (align if model is not FinetuneConfig else {}) | (peft if model is not AlignConfig else {})


def preset(name: str, model: type[Settings], aligned: bool) -> dict[str, Any]:
    """Settings, by leaf name, in which a preset differs from the defaults: none for the paper's (UsageError otherwise).

    as-released: what the authors' program does when it is run as its README says (`aligned`: PEFT from an align run).
    """
    if name not in PRESETS:
        raise UsageError(f"--preset {name}: {nearest(name, [*PRESETS])}")
    if name == "paper":
        return {}
    if model is SweepConfig:
        raise UsageError(
            f"--preset {name}: its PEFT has one optimiser directly and another after align, a sweep has one"
        )
    released = {"drop_path": 0.2, "d_interpolation": "bilinear", "voc_difficult": "positive"}
    if model is AlignConfig:
        released |= {"d_optimizer": "sgd", "p_weight_decay": 0.0, "d_weight_decay": 0.0}
        released |= {"decoder": "random", "probe_drop_path": True, "mfac_device": "cpu"}
        released |= {"cg_steps": "tensor", "cg_batch": "first"}
    elif aligned:
        released |= {"optimizer": "sgd"}
    return released if model in (AlignConfig, FinetuneConfig) else {}


# --- reading and merging ---------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """One setting of a command: where it is in the nested model, what pydantic knows of it, and its unique name."""

    path: tuple[str, ...]
    field: FieldInfo
    name: str  # the last of the path, with its group's before it where an earlier setting is called the same


def leaves(model: type[Settings]) -> Iterator[Leaf]:
    """The settings of a command in order, nested groups unfolded. Their names are the flags."""
    taken: set[str] = set()
    for path, field in unfolded(model, ()):
        name = "_".join(path[-2:]) if path[-1] in taken else path[-1]
        taken.add(name)
        yield Leaf(path, field, name)


def unfolded(model: type[Settings], at: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], FieldInfo]]:
    """(path, field) of each setting, groups within groups."""
    for name, field in model.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, Settings):
            yield from unfolded(group, (*at, name))
        else:
            yield (*at, name), field


def read_file(path: Path, model: type[Settings]) -> dict[str, Any]:
    """A TOML or JSON file of settings as a nested dict; keys may also stand flat, as flags do (UsageError)."""
    try:
        if not path.is_file():
            raise UsageError(f"--config {path}: there is no such file of settings")
        if path.stat().st_size > 64_000:  # all settings there are need 4 kB; TOML's nesting costs memory to the square
            raise UsageError(f"--config {path}: has {path.stat().st_size} bytes, settings need 64 kB at most")
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"--config {path}: cannot be read as {kind}: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"--config {path}: holds a {type(data).__name__}, not a table of settings")
    paths = {leaf.name: leaf.path for leaf in leaves(model)}
    groups = {leaf.path[:i] for leaf in leaves(model) for i in range(1, len(leaf.path))}
    out: dict[str, Any] = {}

    def walk(table: Mapping[str, Any], at: tuple[str, ...]) -> None:
        for name, value in table.items():
            key = name.replace("-", "_")
            if (*at, key) in groups and isinstance(value, dict):
                walk(value, (*at, key))
            elif (*at, key) in paths.values():
                put(out, (*at, key), value)
            elif not at and key in paths:
                put(out, paths[key], value)
            else:
                if (made := path.with_name("env.json")).is_file() and path.name == "config.json":
                    raise UsageError(f"--config {path}: are settings of another command, see {made}")
                known = [*paths, *(group[-1] for group in groups)]
                raise UsageError(f"--config {path}: unknown setting {key!r}, {nearest(key, known)}")

    walk(data, ())
    return out


def put(table: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """table[a][b][c] = value, making the tables on the way."""
    for name in path[:-1]:
        table = table.setdefault(name, {})
    table[path[-1]] = value


def get(config: Settings, path: tuple[str, ...]) -> Any:
    """config.a.b.c for the path (a, b, c)."""
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value
