"""Program: all settings of align and finetune, one group of fields per concern.

A field is a flag (`d_lr` is `--d-lr`), a key of a TOML file and a key of a run's config.json. The
text below a field is its help. It gives symbol, meaning and, in brackets, the source of the
default: [App. C.x] the paper's appendix, [released] the authors' program where the paper is silent,
[MAE], [I-JEPA] their authors' recipes, [here] our own choice. Defaults that depend on another
setting stand in one section below the classes, "defaults that follow from other settings".

A value has many possible sources. Each of these wins over those before it: the default at the
field, `paper_defaults`, `our_defaults`, the align run of --from, --preset, --config, the flag.

Making settings imports no torch and reads neither files nor the environment.
"""

import json
import tomllib
from enum import Enum, auto
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from support.errors import UsageError, as_read_error, as_usage_error, suggest

# Such as {"rank": 64, "lam": 0.001}: settings by name, a line of metrics.jsonl, or a result.json.
Record = dict[str, Any]
T = TypeVar("T")


class Arch(NamedTuple):
    """Sizes of a ViT, its MAE decoder and its I-JEPA predictor."""

    dim: int = 768  # length of the vector of a token
    depth: int = 12  # number of layers
    heads: int = 12
    image_size: int = 224  # side in pixels
    patch_size: int = 16
    mlp_ratio: float = 4.0  # the hidden layer of an MLP has mlp_ratio * dim units
    class_token: bool = True
    decoder_dim: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    predictor_dim: int = 384
    predictor_depth: int = 12
    registers: int = 0  # tokens after the class token, which some networks of timm have

    @property
    def prefix(self) -> int:
        """How many tokens stand before those of the patches: the class token and the registers."""
        class_tokens = 1 if self.class_token else 0
        return class_tokens + self.registers


BACKBONES = {
    "vit_mini": Arch(  # ours, small enough for a CPU
        dim=64,
        depth=4,
        heads=4,
        image_size=16,
        patch_size=4,
        mlp_ratio=2.0,
        decoder_dim=48,
        decoder_depth=1,
        decoder_heads=4,
        predictor_dim=32,
        predictor_depth=2,
    ),
    "vit_s16": Arch(  # not in the paper; one pretrains it on small images, with smaller patches
        dim=384, heads=6, decoder_dim=256, decoder_depth=4, decoder_heads=8
    ),
    "vit_b16": Arch(),  # the defaults of `Arch`
    "vit_l16": Arch(dim=1024, depth=24, heads=16),
    "vit_h14": Arch(dim=1280, depth=32, heads=16, patch_size=14),
}
TIMM_NAMES = {  # how the name of a network begins in timm: what the same network is called here
    "vit_small_patch16": "vit_s16",
    "vit_base_patch16": "vit_b16",
    "vit_large_patch16": "vit_l16",
    "vit_huge_patch14": "vit_h14",
}
# Alphabets of Omniglot; each is a task: which character of the alphabet does an image show?
ALPHABETS = ("Balinese", "Early_Aramaic", "Greek", "Latin", "Tagalog")
TASKS = (
    "dtd",
    "voc07",
    "cub200",
    "pets",
    "flowers",
    "aircrafts",
    "imagenet",
    *[f"omniglot:{alphabet}" for alphabet in ALPHABETS],
)
# Data sets and pools that a script adds by name, each with the defaults that it brings, such as
# NAMED["mine"] = {"augment": "none"}. The function that makes its images goes to
# `support.benchmarks.MAKE_TASK`.
NAMED: dict[str, Record] = {}
PRETEXTS = ("mae", "ijepa")

# --- types of settings -------------------------------------------------------------------------

# Pydantic calls each function below with the value of a setting, and takes what it returns as the
# value. Where it raises a ValueError, `make` raises a UsageError that begins with the flag.


def refuse_empty(value: object) -> object:
    """Return the value, but refuse an empty text: as a path it would mean the current folder."""
    if value == "":
        raise ValueError("is empty")
    return value


def split_commas(value: object) -> object:
    """Split a text such as "0.1,0.2" at its commas, and return any other value as it is.

    The command line hands a list over as one text; a file or Python hands over a list.
    """
    return value.split(",") if isinstance(value, str) else value


def refuse_equal_rates(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Return the learning rates, but refuse two that are equal in six digits.

    The directory of a trial is named after its rate in six digits, so it would be used twice.
    """
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise ValueError("has a rate twice, in six digits")
    return rates


def refuse_descending(pair: tuple[float, float]) -> tuple[float, float]:
    """Return the ends of a range, such as (0.15, 0.2), but refuse them in the wrong order."""
    if pair[0] > pair[1]:
        raise ValueError("give the smaller number first")
    return pair


def make_absolute(path: Path) -> Path:
    """Make a path absolute, so that it means the same to a later command in another directory."""
    return path.expanduser().absolute()


OMNIGLOT = Path("omniglot")  # --weights omniglot: the backbone that comes with the program


def make_weights_absolute(path: Path) -> Path:
    """Make the path of a checkpoint absolute; `omniglot` is a word, and stays as it is."""
    return path if path == OMNIGLOT else make_absolute(path)


TIMM = "timm:"  # what the name of a network of timm begins with


def check_backbone(name: str) -> str:
    """Return a value of --backbone, but refuse all except the BACKBONES and timm:NAME.

    For a name of timm without "timm:", such as vit_base_patch16_224, the error suggests the right
    one; for any other word, the backbone that is most like it.
    """
    is_timm = name.startswith(TIMM) and name != TIMM
    if name in BACKBONES or is_timm:
        return name

    if "patch" in name:  # such as vit_base_patch16_224: only timm names networks in this way
        same_network = ""  # such as "vit_b16 is this network with the weights of MAE, "
        for beginning, backbone in TIMM_NAMES.items():  # such as vit_base_patch16: vit_b16
            if name.startswith(beginning):
                same_network = f"{backbone} is this network with the weights of MAE, "
        raise ValueError(f"is unknown; {same_network}timm:{name} is that of timm")

    hint = suggest(name, (*BACKBONES, "timm:NAME"))  # such as "did you mean vit_b16?"
    raise ValueError(f"is unknown, {hint}")


def check_pretext(name: str) -> str:
    """Return a value of --pretext, in which the path of a Python file is made absolute.

    A word without a colon that is neither mae nor ijepa is refused. Whether a file or a class is
    there is checked later.

    >>> check_pretext("mae"), check_pretext("/my/rotation.py:Rotation")
    ('mae', '/my/rotation.py:Rotation')
    """
    if name in PRETEXTS:
        return name
    module, colon, class_name = name.rpartition(":")  # such as "rotation.py", ":", "Rotation"
    if not colon:
        raise ValueError(f"is unknown, {suggest(name, (*PRETEXTS, 'FILE.py:Class'))}")
    if module.endswith(".py"):
        path = make_absolute(Path(module))
        return f"{path}:{class_name}"
    return name  # the class of an installed module, such as "rotation:Rotation"


def check_dataset(name: str) -> str:
    """Return a value of --dataset, in which a folder becomes "folder:" and its absolute path.

    1. A data set is returned as it is: one that a script hands over, or one of TASKS or NAMED.
    2. A folder is known by "folder:", by a slash, or because it exists. Links in its path are
       followed, so that one folder has one name.
    3. Any other word is refused.

    >>> check_dataset("dtd"), check_dataset("/photos"), check_dataset("folder:/photos")
    ('dtd', 'folder:/photos', 'folder:/photos')
    """
    prefix, _, folder = name.partition(":")  # such as "folder", ":", "/photos"
    is_from_python = prefix == "own"  # images that a script hands over: `data.name_own_data`
    if is_from_python or name in TASKS or name in NAMED:
        return name

    if prefix == "folder" and folder:
        return f"folder:{Path(folder).expanduser().resolve()}"
    looks_like_path = "/" in name or "\\" in name or Path(name).is_dir()
    if looks_like_path:
        return f"folder:{Path(name).expanduser().resolve()}"

    hint = suggest(name, (*TASKS, *NAMED, "folder:DIR"))  # such as "did you mean dtd?"
    raise ValueError(f"is unknown, {hint}")


def check_pool(name: str) -> str:
    """Return a value of --pool, in which a folder becomes its absolute path, without "folder:".

    It needs no prefix: each word that is not the name of a pool is a folder.

    >>> check_pool("imagenet"), check_pool("/photos"), check_pool("folder:/photos")
    ('imagenet', '/photos', '/photos')
    """
    prefix, _, _ = name.partition(":")
    is_from_python = prefix == "own"  # images that a script hands over: `data.name_own_data`
    if is_from_python or name in ("imagenet", "omniglot") or name in NAMED:
        return name
    return str(make_absolute(Path(name.removeprefix("folder:"))))


# Types of fields. Pydantic calls the function of a BeforeValidator before it converts a value to
# the type and checks its limits, that of an AfterValidator afterwards.
NotEmpty = BeforeValidator(refuse_empty)
Listed = BeforeValidator(split_commas)
# Many programs read numbers in JSON as float64, which has all whole numbers up to 2**53 only.
PositiveInt = Annotated[int, Field(gt=0, lt=2**53)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**53)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, lt=1)]  # may be 0, but not 1
Share = Annotated[float, Field(gt=0, le=1)]  # may be 1, but not 0
Shares = Annotated[tuple[Share, Share], Listed, AfterValidator(refuse_descending)]
Ratios = Annotated[tuple[PositiveFloat, PositiveFloat], Listed, AfterValidator(refuse_descending)]
Rates = Annotated[
    tuple[PositiveFloat, ...], Listed, Field(min_length=1), AfterValidator(refuse_equal_rates)
]
Workers = Annotated[int, Field(ge=0, le=256)]
Jobs = Annotated[int, Field(ge=1, le=256)]
Place = Annotated[Path, NotEmpty, AfterValidator(make_absolute)]
Weights = Annotated[Path, NotEmpty, AfterValidator(make_weights_absolute)]
BackboneName = Annotated[str, AfterValidator(check_backbone)]
PretextName = Annotated[str, AfterValidator(check_pretext)]
DatasetName = Annotated[str, NotEmpty, AfterValidator(check_dataset)]
PoolName = Annotated[str, NotEmpty, AfterValidator(check_pool)]

# --- marks of settings -------------------------------------------------------------------------


class Mark(Enum):
    """Which comparisons ignore a setting.

    A run is compared with its own directory before it goes on, with the other runs of its arm, and
    with the paper. A setting without a mark has to be equal in all three. If a mark is forgotten, a
    comparison is too strict: runs may be refused, but unlike runs are never mixed.
    """

    # It says how and where to compute, such as `device`: a run may go on with another value.
    CHANGES_NO_NUMBER = auto()
    # It is a path, such as `weights`. The digest of its content is compared instead of it.
    KNOWN_BY_DIGEST = auto()
    # A finished run may go on with more of it, such as `seeds`, and keeps what it has.
    MAY_GROW = auto()
    # Two runs of one arm may differ in it, such as in `seed`.
    SAME_ARM = auto()
    # The paper searches for its value, as for `lr`, or is silent: any value follows the paper.
    LEFT_OPEN_BY_PAPER = auto()


# How a field gets a mark: `seed: SameArm[int] = 0`.
ChangesNoNumber = Annotated[T, Mark.CHANGES_NO_NUMBER]
KnownByDigest = Annotated[T, Mark.KNOWN_BY_DIGEST]
SameArm = Annotated[T, Mark.SAME_ARM]
MayGrow = Annotated[T, Mark.MAY_GROW]
LeftOpenByPaper = Annotated[T, Mark.LEFT_OPEN_BY_PAPER]


def settings_with(settings_class: type[BaseModel], *marks: Mark) -> set[str]:
    """Return the names of the settings that have at least one of these marks.

    >>> sorted(settings_with(FinetuneConfig, Mark.MAY_GROW))
    ['grid', 'seeds']
    """
    names = set()
    for name, field in settings_class.model_fields.items():
        if any(mark in field.metadata for mark in marks):
            names.add(name)
    return names


# --- values of the paper and of the authors' program --------------------------------------------

# App. C.2: the learning rates that fine-tuning tries, from the pretrained backbone and after align.
GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
ALIGNED_GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
# Values of the authors' program, run as its README says, where they are not the paper's.
RELEASED: Record = {
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
    "optimizer": "sgd",  # in fine-tuning, and only after an align run: see `released_values`
}

# --- groups of settings ------------------------------------------------------------------------


class Settings(
    BaseModel,
    frozen=True,
    extra="forbid",
    allow_inf_nan=False,
    defer_build=True,  # pydantic makes its checks at the first use, not at the import
    use_attribute_docstrings=True,  # the text below a field is its description
):
    """Base class of all settings: they cannot be changed, and have no unknown name, nan or inf.

    In a class of settings, the docstring up to the colon is the heading of its flags in --help.
    """


class Machine(Settings):
    """Machine: what every run has, such as its seed, the device and when it saves."""

    seed: SameArm[NonNegativeInt] = 0
    """Seed of initialisation, order, augmentation, masks and drop path. [here]"""
    device: ChangesNoNumber[str] = "auto"
    """auto, cpu, cuda or cuda:1. auto: CUDA where there is one. [here]"""
    amp: LeftOpenByPaper[bool] = True
    """bfloat16 autocast on CUDA; the hypergradient stays in float32 or better. [released]"""
    tf32: LeftOpenByPaper[bool] = False
    """TF32 in float32 products on CUDA (--no-amp, cg): faster, relative error 1e-3. [here]"""
    recompute: ChangesNoNumber[bool] = False
    """Activation checkpointing of the backbone: less memory, one more forward pass. [released]"""
    micro_batch: ChangesNoNumber[PositiveInt | None] = None
    """Largest number of images that pass through the network at once. Default: a batch. [here]"""
    workers: ChangesNoNumber[Workers | None] = None
    """Processes that decode images; same result with any. Default: up to 16 with a GPU, else 0."""
    save_minutes: ChangesNoNumber[NonNegativeFloat] = 10.0
    """Minutes between checkpoints. [here]"""
    data_root: ChangesNoNumber[Annotated[Place, Field(validate_default=True)]] = Path("data")
    """Where the benchmarks are, as torchvision lays them out. [here]"""
    tensorboard: ChangesNoNumber[bool] = False
    """Write the records of metrics.jsonl for TensorBoard, too, into the same directory. [here]"""

    @model_validator(mode="after")
    def check_tensorboard(self) -> Self:
        """Refuse to write for TensorBoard where its package is not installed."""
        if self.tensorboard and find_spec("tensorboard") is None:
            raise ValueError(
                "--tensorboard: needs the package tensorboard; `pip install tensorboard`, "
                "or leave the option out"
            )
        return self


class Command(Machine):
    """Base class of the settings of align, finetune and pretrain.

    `model_fields_set`, which pydantic gives, has the names of the settings that the caller gave.
    """

    @model_validator(mode="wrap")
    @classmethod
    def fill_in(cls, given: Record, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Add the defaults that follow from other settings, and make the settings by `handler`.

        Pydantic calls this when settings are made, with the values that the caller gave. `handler`
        is pydantic's own way to make them: it checks the values. None counts as not given.
        """
        given = {name: value for name, value in dict(given).items() if value is not None}
        defaults = paper_defaults(cls, given) | our_defaults(cls, given)  # ours win
        settings = handler(defaults | given)  # the caller's values win
        # Keep the names that the caller gave, without the defaults added here, for `replace`.
        settings.model_fields_set.intersection_update(given)
        return settings

    def replace(self, **changes: object) -> Self:
        """Return these settings with some changed; defaults that follow from them change, too.

        Raises UsageError for an unknown name or a wrong value.
        """
        return make(type(self), self.model_dump(exclude_unset=True) | changes)


class Shape(Settings):
    """Model: the network and what it is pretrained with."""

    backbone: LeftOpenByPaper[BackboneName]
    """Network (ψ): vit_mini, vit_s16, vit_b16, vit_l16, vit_h14 or timm:NAME. [App. C.1]"""
    pretext: LeftOpenByPaper[PretextName] = "mae"
    """Pretext task: mae, ijepa, FILE.py:Class or module:Class. [App. C.3, D.1]"""
    image_size: LeftOpenByPaper[PositiveInt | None] = None
    """Side of the square input in pixels. Default: the network's own. [App. C.2: 224]"""
    patch_size: LeftOpenByPaper[PositiveInt | None] = None
    """Side of a patch in pixels. Default: the network's own. [App. C.1]"""


class Network(Shape):
    """Model: the frozen backbone, its adapter θ and the downstream head."""

    weights: KnownByDigest[Weights | None] = None
    """Checkpoint, pretrain run, or omniglot. Default: the official one, downloaded. [App. C.1]"""
    base: LeftOpenByPaper[Literal["target_encoder", "encoder"]] = "target_encoder"
    """The backbone in an I-JEPA file: its target_encoder or encoder. [here: what I-JEPA tests]"""
    head: Literal["linear", "batchnorm"] = "linear"
    """Downstream head (h^D): linear, or behind a batchnorm, as with ijepa. [App. C.2; D.1]"""
    rank: PositiveInt = 64
    """Rank of LoRA (r), on queries and values of every layer. [App. C.3; vit_mini: 8]"""
    alpha: PositiveFloat | None = None
    """LoRA's scale is alpha / rank. Default: the rank, so that it is 1. [released]"""
    drop_path: UnitInterval = 0.1
    """Drop-path rate for labelled images. [App. C.2: 0.1 B, 0.2 L, H; vit_mini: 0]"""

    @property
    def scale(self) -> float:
        """The factor of LoRA's product B A: alpha / rank, which is 1 without an alpha."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @model_validator(mode="after")
    def check_network(self) -> Self:
        """Refuse I-JEPA with a network that has no predictor for it."""
        if self.pretext == "ijepa" and self.backbone not in BACKBONES:
            raise ValueError(f"--backbone {self.backbone}: has no I-JEPA predictor, take mae")
        return self


class Crops(Settings):
    """Data: how images become inputs."""

    data_seed: LeftOpenByPaper[NonNegativeInt] = 0
    """Seed of splits that are made by hash; apart from the runs' --seed. [here]"""
    augment: Literal["crop", "none"] = "crop"
    """crop: RandomResizedCrop and flip. none: as at test time (omniglot). [App. C.2]"""
    min_crop: Share = 0.2
    """Smallest area of a random crop, as a share of the image. [App. C.2; ijepa, D.1: 0.3]"""


class Data(Crops):
    """Data: the labelled task."""

    dataset: LeftOpenByPaper[DatasetName]
    """Labelled images (D^D): dtd, voc07, cub200, pets, flowers, aircrafts, imagenet,
    omniglot:ALPHABET, or folder:DIR with a folder for each class. [App. C.2.1]"""
    partial: bool = False
    """Take a benchmark's subset as it is; `data check` counts what is missing. [here]"""
    split_file: LeftOpenByPaper[Place | None] = None
    """Positions of CUB's or Pets' validation images. Default: a fifth, by hash. [App. C.2.1]"""
    voc_loss: Literal["softmax", "bce"] = "softmax"
    """Loss of VOC07: softmax (cross entropy summed over present classes), or bce. [released]"""
    voc_difficult: Literal["ignore", "positive"] = "ignore"
    """VOC07's difficult objects: ignore, or positive (hits). [VOC devkit; released: positive]"""
    d_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Resampling of downstream images, bicubic or bilinear. [App. C.3; released: bilinear]"""

    @model_validator(mode="after")
    def check_split_file(self) -> Self:
        """Refuse a split file where train and validation images are not listed together."""
        if self.split_file and self.dataset not in ("cub200", "pets"):
            file = f"--split-file {self.split_file}"
            raise ValueError(f"{file}: is for cub200 and pets, leave it out")
        return self


class Pretext(Settings):
    """Pretext task: masks; pairs are the ends of a uniform distribution."""

    mask_ratio: UnitInterval = 0.75
    """Share of patches that MAE removes. [App. C.3, MAE]"""
    ema: UnitInterval = 0.9995
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [App. D.1; from scratch: 0.996]"""
    targets: PositiveInt = 4
    """Target blocks per image (M). [I-JEPA]"""
    contexts: PositiveInt = 1
    """Context blocks per image (E). [I-JEPA]"""
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

    pool: PoolName = "imagenet"
    """Unlabelled images (D^P): imagenet, a folder, or omniglot (its default). [App. C.3]"""
    p_batch: PositiveInt = 256
    """Images per lower step. [App. C.3]"""
    p_lr: PositiveFloat = 0.01
    """Learning rate of the lower adapter (θ_P), for any batch. [App. C.3; ijepa, D.1: 0.005]"""
    phi_p_lr: PositiveFloat = 1e-4
    """Learning rate of the pretext head (φ_P), for any batch. [App. C.3]"""
    p_weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of adapter and head (θ_P, φ_P). [App. C.3; ijepa, D.1: 0.0005; released: 0]"""
    decoder: Literal["checkpoint", "random"] = "checkpoint"
    """Where the pretext head starts. [App. C.3: checkpoint; released: random, unlike its text]"""


class Upper(Settings):
    """Upper level: the downstream task at θ_P and θ_D."""

    d_batch: PositiveInt = 64
    """Images per upper step. [App. C.3]"""
    d_lr: LeftOpenByPaper[PositiveFloat] = 6.7e-4
    """Learning rate of upper adapter and head (θ_D, φ_D), for any batch. [released example]"""
    d_optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw with betas 0.9 and 0.999, or sgd with momentum 0.9 as released. [App. C.3]"""
    d_weight_decay: NonNegativeFloat = 0.05
    """Decay of both (θ_D, φ_D), bias included. [App. C.2; ijepa, D.1: 0.0005; released: 0]"""
    probe_epochs: NonNegativeInt = 20
    """Epochs of linear probing of the head before line 3, at the upper rate. [App. C.3]"""
    probe_drop_path: bool = False
    """Drop path in linear probing too. [here; released: on]"""


class Bilevel(Settings):
    """Algorithm 1: lengths, rates and the inverse of line 13."""

    alternations: PositiveInt = 500
    """Alternations of lower and upper level (T). [App. C.3]"""
    lower_steps: PositiveInt = 20
    """Pretext steps per alternation (N_L); the curvature has at most this rank. [App. C.3]"""
    upper_steps: NonNegativeInt = 8
    """Downstream steps per alternation (N_U). 0, a control: lower level alone. [App. C.3]"""
    lam: PositiveFloat = 1e-3
    """How strongly θ_P is pulled to θ_D (λ, Eq. 4); damps M-FAC, too (γ = λ). [App. C.3]"""
    hypergrad: LeftOpenByPaper[Literal["mfac", "recursion", "cg", "identity", "exact"]] = "mfac"
    """Inverse of line 13: mfac, recursion (the same, slow), cg (BiSSL), identity, exact.
    [Sec. 3.1]"""
    partition: Literal["layer", "projection", "matrix", "global"] = "layer"
    """What M-FAC treats as one block: layer, projection (q or v), matrix, or global. [App. C.3]"""
    cg_iterations: PositiveInt = 5
    """Hessian-vector products of a CG solve. [App. D.2.1]"""
    cg_damping: NonNegativeFloat = 1.0
    """Damping of CG: it solves with c = λ + damping. [App. D.2.1]"""
    cg_prefactor: Literal["c", "lambda"] = "c"
    """Factor of CG's (H + cI)⁻¹ g: c, or lambda, Eq. 5's λ. [released]"""
    cg_steps: Literal["joint", "tensor"] = "joint"
    """CG's step sizes: joint, one for θ; tensor, one a matrix. [here; released: tensor]"""
    warmup: NonNegativeInt = 10
    """Alternations of linear warm-up, at both levels. [App. C.3]"""
    end_lr: NonNegativeFloat = 1e-6
    """Where the cosine of every rate ends. [released]"""
    clip: PositiveFloat = 10.0
    """Largest joint gradient norm of a step, at both levels. [released]"""
    eval_every: LeftOpenByPaper[PositiveInt] = 10
    """Alternations between validations of both adapters. [released]"""
    mfac_device: ChangesNoNumber[Literal["same", "cpu"]] = "same"
    """Where gradients (G) are kept and inverted: same, or cpu. [here; Sec. 3.1.1: the CPU]"""


class Peft(Settings):
    """PEFT: parameter-efficient fine-tuning of θ and a fresh head."""

    lr: LeftOpenByPaper[PositiveFloat | None] = None
    """One learning rate for all seeds, instead of a grid. [App. C.2 has a grid]"""
    grid: LeftOpenByPaper[MayGrow[Rates]] = GRID
    """Learning rates to try (not scaled by the batch size); validation decides. After align, the
    default is a tenth of these. [App. C.2]"""
    grid_seeds: LeftOpenByPaper[PositiveInt] = 1
    """Seeds that each rate is tried with; those of the chosen rate count in --seeds. [here]"""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw with betas 0.9 and 0.999, or sgd with momentum 0.9. [App. C.2; released: sgd after
    align]"""
    epochs: PositiveInt = 200
    """Passes over the training split. [App. C.2]"""
    warmup_epochs: NonNegativeInt = 5
    """Epochs of linear warm-up. [App. C.2]"""
    batch: PositiveInt = 256
    """Images per step. [App. D.2.2, memory table; released]"""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of the adapter and the whole head. [App. C.2; ijepa, D.1: 0.0005]"""
    end_lr: NonNegativeFloat = 1e-6
    """Where the cosine of every rate ends. [released]"""
    eval_epochs: PositiveInt = 1
    """Epochs between validations. [App. C.2.1]"""
    test_curve: SameArm[bool] = False
    """Score test images at each validation, too, to draw curves; this chooses nothing. [here]"""
    seeds: SameArm[MayGrow[PositiveInt]] = 8
    """Independent runs. [App. C.2.1]"""
    jobs: ChangesNoNumber[Jobs] = 1
    """Runs at a time, each in a process with its share of the cores. [here]"""

    @property
    def trials(self) -> int:
        """How many trials there are; a trial fine-tunes with one rate and one seed.

        All rates are tried with `grid_seeds` seeds, then the best one with the other seeds. By
        default these are 6 * 1 + 7 = 13 trials.
        """
        return len(self.grid) * self.grid_seeds + (self.seeds - self.grid_seeds)

    @model_validator(mode="after")
    def check_rates_and_seeds(self) -> Self:
        """Refuse both a rate and a grid, and more seeds per rate than there are seeds."""
        # `paper_defaults` turns --lr into a grid of this rate; any other grid was given, too.
        if self.lr is not None and self.grid != (self.lr,):
            raise ValueError("give --lr or --grid, not both")
        if self.grid_seeds > self.seeds:
            raise ValueError(f"--grid-seeds {self.grid_seeds}: is more than --seeds {self.seeds}")
        return self


class AlignConfig(Bilevel, Upper, Lower, Pretext, Data, Network, Command):
    """Align: BiSSLight, Algorithm 1."""

    @model_validator(mode="after")
    def check_decoder(self) -> Self:
        """Refuse to take the decoder from a checkpoint of timm, which has none."""
        if self.decoder == "checkpoint" and self.backbone.startswith(TIMM):
            raise ValueError(f"--decoder checkpoint: {self.backbone} has none, leave it out")
        return self


class FinetuneConfig(Peft, Data, Network, Command):
    """Finetune: PEFT from the backbone, from align runs or from a LoRA file."""

    start: KnownByDigest[Place | None] = None
    """An align run, a directory of them, one per seed, or a LoRA file. Runs bring their backbone,
    data and LoRA."""
    restart: bool = False
    """Start from θ of a finished finetune run, with fresh heads: a control. [not in the paper]"""

    @model_validator(mode="after")
    def check_restart(self) -> Self:
        """Refuse a restart without the run whose θ it starts from."""
        if self.restart and self.start is None:
            raise ValueError("--restart: needs --from RUN, a finished finetune run")
        return self

    @classmethod
    def from_align(cls, run: Path, **changes: object) -> Self:
        """Make settings for fine-tuning after an align run, or after a directory of them.

        Network, data and data root are read from the run's config.json; of a directory, from that
        of its first run. `changes`, such as `lr=0.001`, win over them. Defaults are added, such as
        the grid of learning rates after align. With restart=True, `run` is a finetune run. Raises
        UsageError where there is no such run, for an unknown name, and for a wrong value.
        """
        dataset = changes.get("dataset")  # None: that of the run. Another has its own split
        taken_over = read_start_run(run, dataset, restart=changes.get("restart"))
        return make(cls, taken_over | changes | {"start": run})


class PretrainConfig(Pretext, Crops, Shape, Command):
    """Pretraining: MAE or I-JEPA from scratch, for those without a checkpoint. Trains ψ itself."""

    pretext: LeftOpenByPaper[Literal["mae", "ijepa"]] = "mae"
    """Pretext task: mae or ijepa. [MAE; I-JEPA]"""
    pool: PoolName
    """Unlabelled images: omniglot, or any folder of images, nested or not."""
    epochs: PositiveInt = 400
    """Passes over the pool. [MAE's code; I-JEPA: 300]"""
    warmup_epochs: NonNegativeInt = 40
    """Epochs of linear warm-up. [MAE; I-JEPA]"""
    warmup_from: UnitInterval = 0.0
    """Where the warm-up starts, as a share of the base rate. [MAE; I-JEPA: 0.2]"""
    batch: PositiveInt = 256
    """Images per step. [here; MAE uses 4096]"""
    base_lr: PositiveFloat = 1.5e-4
    """Rate per 256 images: the rate of a step is base_lr * batch / 256. [MAE; I-JEPA: 1.25e-4]"""
    min_lr: NonNegativeFloat = 0.0
    """Where the cosine ends. [MAE; I-JEPA: 1e-6]"""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW decay of tensors with two or more axes. [MAE; I-JEPA: 0.04]"""
    final_weight_decay: NonNegativeFloat | None = None
    """Decay at the end of half a cosine. None: it stays as it is. [MAE; I-JEPA: 0.4]"""
    beta2: UnitInterval = 0.95
    """AdamW's second beta; the first is 0.9. [MAE; I-JEPA: 0.999]"""
    ema: Share = 0.996
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [I-JEPA]"""

    def arch(self) -> Arch:
        """Return the sizes of the network, with the image size and patch size of the settings."""
        arch = BACKBONES[self.backbone]
        return arch._replace(
            image_size=self.image_size or arch.image_size,
            patch_size=self.patch_size or arch.patch_size,
            class_token=self.pretext != "ijepa",  # networks of I-JEPA have none
        )


# --- defaults that follow from other settings ---------------------------------------------------

# `Command.fill_in` calls `paper_defaults` and `our_defaults` with what the caller gave, such as
# {"backbone": "vit_l16", "dataset": "dtd"}, for the settings of one command. Ours win over the
# paper's, and what the caller gave wins over both.


def paper_defaults(settings_class: type[Command], given: Record) -> Record:
    """Return the paper's defaults that differ from those at the fields, because of what is given.

    They follow from the backbone, the pretext task, a start (--from), and a single learning rate
    (--lr). Those that the class has no field for are left out: align has no grid. Those of
    pretraining are MAE's or I-JEPA's.

    >>> paper_defaults(AlignConfig, {"backbone": "vit_l16", "dataset": "dtd"})
    {'drop_path': 0.2}
    """
    if issubclass(settings_class, PretrainConfig):
        return pretraining_defaults(given)

    defaults: Record = {}
    if given.get("backbone") in ("vit_l16", "vit_h14"):
        defaults["drop_path"] = 0.2  # App. C.2
    if given.get("pretext") == "ijepa":
        defaults |= {
            "min_crop": 0.3,  # this and the next five: App. D.1
            "head": "batchnorm",
            "p_lr": 0.005,
            "p_weight_decay": 0.0005,
            "d_weight_decay": 0.0005,
            "weight_decay": 0.0005,
        }
    if given.get("start") is not None:
        defaults["grid"] = ALIGNED_GRID  # App. C.2
    if given.get("lr") is not None:
        defaults["grid"] = (given["lr"],)  # one rate is the same as a grid of one
    return keep_known(settings_class, defaults)


def pretraining_defaults(given: Record) -> Record:
    """Return I-JEPA's recipe where it differs from MAE's, which stands at the fields.

    The values are those of Assran et al. (2023).
    """
    if given.get("pretext") != "ijepa":
        return {}
    return {
        "epochs": 300,
        "min_crop": 0.3,
        "base_lr": 1.25e-4,
        "warmup_from": 0.2,
        "min_lr": 1e-6,
        "beta2": 0.999,
        "weight_decay": 0.04,
        "final_weight_decay": 0.4,
    }


def our_defaults(settings_class: type[Command], given: Record) -> Record:
    """Return our own defaults, for networks and images that the paper does not have.

    Those that the class has no field for are left out.

    >>> our_defaults(AlignConfig, {"backbone": "vit_b16", "dataset": "omniglot:Greek"})
    {'pool': 'omniglot', 'augment': 'none'}
    """
    is_pretraining = issubclass(settings_class, PretrainConfig)
    images = given.get("pool") if is_pretraining else given.get("dataset")
    defaults = backbone_defaults(is_pretraining, given) | images_defaults(str(images), given)
    return keep_known(settings_class, defaults)


def backbone_defaults(is_pretraining: bool, given: Record) -> Record:
    """Return the defaults that vit_mini and the networks of timm bring."""
    backbone = str(given.get("backbone"))  # such as "vit_mini"
    if backbone == "vit_mini":
        return mini_defaults(is_pretraining, is_ijepa=given.get("pretext") == "ijepa")
    if backbone.startswith(TIMM):
        return {"decoder": "random"}  # checkpoints of timm have no pretext head
    return {}


def images_defaults(name: str, given: Record) -> Record:
    """Return the defaults that a data set brings, or in pretraining a pool, by its name.

    Tasks of Omniglot have names such as "omniglot:Greek". Its pool, "omniglot", brings nothing:
    pretraining knows no characters, so it may crop them.
    """
    defaults = dict(NAMED.get(name, {}))  # such as {"augment": "none"}
    if name.startswith("omniglot:"):
        # The crop of a character can be another character, and so can its mirror image.
        defaults |= {"pool": "omniglot", "augment": "none"}
        trained_with_mae = given.get("pretext", "mae") == "mae"
        if given.get("backbone") == "vit_mini" and trained_with_mae:
            defaults["weights"] = OMNIGLOT  # a vit_mini that MAE has trained
    return defaults


def mini_defaults(is_pretraining: bool, is_ijepa: bool) -> Record:
    """Return the defaults of vit_mini, which trains on a CPU.

    Lengths and sizes are smaller than the paper's, and drop path is off. λ, learning rates, decay
    and the mask ratio are the paper's.
    """
    if is_pretraining:
        defaults: Record = {"epochs": 30, "warmup_epochs": 4, "batch": 64}
    else:
        defaults = {  # of align, and the last two of finetune
            "rank": 8,
            "drop_path": 0.0,
            "alternations": 100,
            "lower_steps": 10,
            "upper_steps": 5,
            "p_batch": 64,
            "d_batch": 32,
            "epochs": 60,
            "batch": 32,
        }
    if is_ijepa:
        defaults["min_keep"] = 4  # target blocks on its small images have few patches
    if is_ijepa and is_pretraining:
        defaults["patch_size"] = 2  # 8 x 8 patches, not 4 x 4; align reads it from the weights
    return defaults


def keep_known(settings_class: type[BaseModel], values: Record) -> Record:
    """Return those of the values that a class of settings has a field for.

    >>> keep_known(PretrainConfig, {"epochs": 3, "lam": 0.1})
    {'epochs': 3}
    """
    return {name: value for name, value in values.items() if name in settings_class.model_fields}


# --- the paper's values ------------------------------------------------------------------------


def paper_values(settings_class: type[Command], given: Record) -> Record:
    """Return the recipe's value of every setting that has one, such as {"rank": 64, "lam": 0.001}.

    The recipe is the paper's; that of pretraining is MAE's or I-JEPA's. `given` has at least the
    backbone and the pretext task, from which other values follow.
    """
    values: Record = {}
    for name, field in settings_class.model_fields.items():
        if not field.is_required():
            values[name] = field.default
    return values | paper_defaults(settings_class, given)


def settings_not_compared_with_paper(settings_class: type[Command]) -> set[str]:
    """Return the names of the settings that `unlike_paper` does not look at: those with any mark.

    The paper leaves their value open, or they say how, where or how often one runs. Weights and
    start are among them, since a path says nothing of what is in the file: `evaluate.follows_paper`
    looks at both.
    """
    every_kind_of_mark = list(Mark)
    return settings_with(settings_class, *every_kind_of_mark)


def unlike_paper(cfg: Command) -> Record:
    """Return the settings whose values are not the paper's, except those that are not compared.

    >>> unlike_paper(AlignConfig(backbone="vit_l16", dataset="dtd", rank=8, seed=3))
    {'rank': 8}
    """
    settings = dict(cfg)  # such as {"backbone": "vit_l16", "rank": 8, ...}
    not_compared = settings_not_compared_with_paper(type(cfg))  # such as {"seed", "dataset", ...}
    differing: Record = {}
    for name, value_of_paper in paper_values(type(cfg), settings).items():
        if name not in not_compared and settings[name] != value_of_paper:
            differing[name] = settings[name]

    if isinstance(cfg, Network) and cfg.scale == 1:  # settings of pretraining have no scale
        # An alpha that equals the rank does the same as the paper's value, which is None.
        differing.pop("alpha", None)
    return differing


def released_values(settings_class: type[Command], aligned: bool) -> Record:
    """Return the values of `--preset as-released` for one command.

    `aligned` says whether fine-tuning starts from an align run: the authors' program takes SGD for
    fine-tuning in this case only.
    """
    values = keep_known(settings_class, RELEASED)
    if not aligned:
        values.pop("optimizer", None)
    return values


# --- settings from files -----------------------------------------------------------------------


def read_table(path: Path) -> Record:
    """Read the values in a TOML or JSON file, such as a run's config.json.

    In a name, - is taken for _; a value None (JSON's null) is left out. Raises UsageError where the
    file cannot be read.
    """
    with as_read_error(str(path), "give settings in TOML or JSON"):
        text = path.read_text()
        table = dict(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    return {name.replace("-", "_"): value for name, value in table.items() if value is not None}


def find_runs(path: Path) -> list[Path]:
    """Return [path] if this is a run, else the runs in this directory, s2 before s10.

    A directory is a run if it has a config.json. If there is no run, this also returns [path]; who
    reads it then names the missing files.
    """
    if (path / "config.json").exists():
        return [path]
    runs = [file.parent for file in path.glob("*/config.json")]
    runs.sort(key=lambda run: (len(run.name), run.name))  # of s2 and s10, s2 is the shorter name
    return runs or [path]


def read_start_run(run: Path, dataset: object = None, restart: object = False) -> Record:
    """Return the settings that fine-tuning takes over from the run that --from names.

    `run` is an align run, or a directory of such runs, whose first one is read; after --restart it
    is a finetune run. `dataset` and `restart` have the values of these flags, or None.

    1. Read the settings of the run from its config.json, and refuse a run of another command.
    2. Return its network, its data and its data root. If another data set is given, leave out which
       images the run had and how they were split; how images are cut is taken over.

    Raises UsageError where `run` is no such run.
    """
    file = find_runs(run)[0] / "config.json"
    settings = read_table(file) if file.exists() else {}  # such as {"backbone": "vit_b16", ...}
    refuse_other_command(run, settings, restart)

    names = {*Data.model_fields, *Network.model_fields, "data_root"}  # of what is taken over
    if dataset is not None:
        with as_usage_error(f"--dataset {dataset}"):
            full_name = check_dataset(str(dataset))  # such as "dtd" or "folder:/photos"
        if full_name != settings["dataset"]:
            names -= {"dataset", "data_seed", "split_file", "partial"}
    return {name: value for name, value in settings.items() if name in names}


def refuse_other_command(run: Path, settings: Record, restart: object) -> None:
    """Raise a UsageError unless a run is one of align, or after --restart one of finetune.

    Which command made it follows from its settings, since each has some that no other has. Without
    any, there is no run.
    """
    is_finetune_run = "grid" in settings
    is_align_run = "alternations" in settings
    if restart and not is_finetune_run:
        raise UsageError(f"--from {run}: is no finetune run, which --restart needs")
    if not restart and not is_align_run:
        raise UsageError(
            f"--from {run}: is no align run, folder of them, or adapter file; "
            "run `bisslight align` first"
        )


def read_settings(path: Path, settings_class: type[Command]) -> Record:
    """Read the settings of a command from a TOML or JSON file, by name.

    Raises UsageError where the file cannot be read, and for a name that is no setting.
    """
    settings = read_table(path)  # such as {"rank": 8}
    fields = settings_class.model_fields  # by name
    field_of_flag = {flag_of(field): field for field in fields}  # such as {"--from": "start"}
    for name in settings:
        if name not in fields:
            flag = flag_of(name)
            if flag in field_of_flag:  # such as `from`: the setting of --from is `start`
                hint = f"did you mean {field_of_flag[flag]}?"
            else:
                hint = suggest(name, fields)  # such as "did you mean rank?"
            raise UsageError(f"{path}: {name} is no setting, {hint}")
    return settings


# --- settings from values ----------------------------------------------------------------------

C = TypeVar("C", bound=Settings)

# Pydantic describes a problem by these keys; the values are those for `AlignConfig(lam=-1, ...)`:
#     type   "greater_than"; it is "missing" for a name too few, "extra_forbidden" for one too many
#     loc    ("lam",); it is () for several settings, ("aspect", 1) for the second of two numbers
#     input  -1
#     msg    "Input should be greater than 0"
#     ctx    {"gt": 0.0}; its "error" is the ValueError of a check of our own, if one was raised


def make(settings_class: type[C], given: Record) -> C:
    """Make settings of this class from values by name, such as {"rank": 8} or {"rank": "8"}.

    Defaults are added by `Command.fill_in`, which pydantic calls when the class is called.

    The class itself, called with the values, raises pydantic's error. This raises a UsageError,
    such as "--lam -1: Input should be greater than 0". It is about the first problem only, since
    those after it are often consequences of it; but all settings that are missing are named.
    """
    try:
        return settings_class(**given)
    except ValidationError as error:
        problems = error.errors()  # a dict for each problem, see above
        first = problems[0]
        # A longer loc is that of a number which is missing in a pair.
        is_missing_setting = first["type"] == "missing" and len(first["loc"]) == 1
        if is_missing_setting:
            flags = [flag_in(problem) for problem in problems if problem["type"] == "missing"]
            text = f"{', '.join(flags)}: a value is missing"
        else:
            text = describe_problem(first, settings_class)
        raise UsageError(text) from error


def flag_in(problem: ErrorDetails) -> str:
    """Return the flag of the setting that a problem is about, such as "--lam"."""
    return flag_of(str(problem["loc"][0]))


def text_of(problem: ErrorDetails) -> str:
    """Say what is wrong with a value: in our own words where we have some, else in pydantic's."""
    if problem["type"] == "missing":  # the second of two numbers, such as in --aspect 0.75
        return "has too few numbers"
    return str(problem.get("ctx", {}).get("error", problem["msg"]))


def describe_problem(problem: ErrorDetails, settings_class: type[Settings]) -> str:
    """Name the flag, its value if that is short, and what is wrong.

    The text is such as "--lam -1: Input should be greater than 0", or "--ranks: is unknown, did
    you mean rank?". What `problem` holds is explained above `make`.
    """
    if not problem["loc"]:
        return text_of(problem)  # about several settings, whose flags the text names
    flag = flag_in(problem)  # such as "--lam"
    if problem["type"] == "extra_forbidden":  # no setting has this name
        name = str(problem["loc"][0])
        return f"{flag}: is unknown, {suggest(name, settings_class.model_fields)}"
    is_short = isinstance(problem["input"], str | int | float)  # no list
    if is_short:
        return f"{flag} {problem['input']}: {text_of(problem)}"
    return f"{flag}: {text_of(problem)}"


def flag_of(name: str) -> str:
    """Return the flag of a setting. Two have another name in Python, where these words are taken.

    >>> flag_of("d_lr"), flag_of("start")
    ('--d-lr', '--from')
    """
    words = {"start": "from", "as_json": "json"}
    word = words.get(name, name)
    return f"--{word.replace('_', '-')}"
