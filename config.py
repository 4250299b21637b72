"""Program: all settings of align and finetune, one group of fields per concern.

A field is a flag (`d_lr` is `--d-lr`), a key of a TOML file and a key of a run's config.json. The
text below a field is its help. It gives symbol, meaning and, in brackets, the source of the
default: [App. C.x] the paper's appendix, [released] the authors' program where the paper is silent,
[MAE], [I-JEPA] their authors' recipes, [here] our own choice. Defaults that depend on another
setting stand in one section below the classes, "defaults that follow from other settings".

Making settings imports no torch and reads neither files nor the environment.
"""

import json
import tomllib
from enum import Enum, auto
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

from support.errors import UsageError, as_usage_error, nearest

Record = dict[str, Any]  # settings by name, a line of metrics.jsonl, what a run ended with
T = TypeVar("T")


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
    registers: int = 0  # further tokens beside the class token, of some networks of timm

    @property
    def prefix(self) -> int:
        """Tokens before those of the patches: the class token and the registers."""
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
    "vit_s16": Arch(  # not in the paper: to be pretrained on small images, with smaller patches
        dim=384, heads=6, decoder_dim=256, decoder_depth=4, decoder_heads=8
    ),
    "vit_b16": Arch(),
    "vit_l16": Arch(dim=1024, depth=24, heads=16),
    "vit_h14": Arch(dim=1280, depth=32, heads=16, patch_size=14),
}
TIMM_NAMES = {  # how timm calls ours
    "vit_small_patch16": "vit_s16",
    "vit_base_patch16": "vit_b16",
    "vit_large_patch16": "vit_l16",
    "vit_huge_patch14": "vit_h14",
}
ALPHABETS = ("Balinese", "Early_Aramaic", "Greek", "Latin", "Tagalog")  # tasks of Omniglot
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
# Names of data sets and pools that a script adds, each with the settings that follow from it where
# they are not given; empty otherwise. How they are made goes to `support.benchmarks.MAKE_TASK`.
NAMED: dict[str, Record] = {}
PRETEXTS = ("mae", "ijepa")

# --- types of settings -------------------------------------------------------------------------


def refuse_empty(value: object) -> object:
    """An empty text would be the folder that one is in."""
    if value == "":
        raise ValueError("is empty")
    return value


def split_commas(value: object) -> object:
    """A list on the command line is one text, such as 0.1,0.2."""
    return value.split(",") if isinstance(value, str) else value


def distinct(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Refuse two rates that are equal in six digits: those name the directories of their trials."""
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise ValueError("has a rate twice, in six digits")
    return rates


def ascending(pair: tuple[float, float]) -> tuple[float, float]:
    """The ends of a range, the smaller one first."""
    if pair[0] > pair[1]:
        raise ValueError("give the smaller number first")
    return pair


OMNIGLOT = Path("omniglot")  # as weights: the backbone that comes with the program


def weights_place(path: Path) -> Path:
    """The absolute path of a checkpoint, but `omniglot` stays a word."""
    return path if path == OMNIGLOT else absolute(path)


def absolute(path: Path) -> Path:
    """The same place, also when a later command is given in another directory."""
    return path.expanduser().absolute()


TIMM = "timm:"  # before the name of a network of timm


def backbone_name(name: str) -> str:
    """A network of BACKBONES, or timm:NAME."""
    is_timm = name.startswith(TIMM) and name != TIMM
    if name in BACKBONES or is_timm:
        return name
    ours = ""
    for begin, backbone in TIMM_NAMES.items():
        if name.startswith(begin):
            ours = f"{backbone} is this network with the weights of MAE, "
    if "patch" in name:  # timm names its networks so
        raise ValueError(f"is unknown; {ours}timm:{name} is that of timm")
    raise ValueError(f"is unknown, {nearest(name, (*BACKBONES, 'timm:NAME'))}")


def pretext_name(name: str) -> str:
    """mae, ijepa, module:Class, or FILE.py:Class with an absolute path."""
    if name in PRETEXTS:
        return name
    place, colon, kind = name.rpartition(":")
    if not colon:
        raise ValueError(f"is unknown, {nearest(name, (*PRETEXTS, 'FILE.py:Class'))}")
    if place.endswith(".py"):
        return f"{absolute(Path(place))}:{kind}"
    return name


def dataset_name(name: str) -> str:
    """A known name, own (images from Python), or a folder, whose path becomes absolute."""
    kind, _, place = name.partition(":")
    if kind == "own" or name in TASKS or name in NAMED:
        return name
    if kind != "folder" or not place:
        place = name
        if not ("/" in name or "\\" in name or Path(name).is_dir()):
            raise ValueError(f"is unknown, {nearest(name, (*TASKS, *NAMED, 'folder:DIR'))}")
    return f"folder:{absolute(Path(place))}"


def pool_name(name: str) -> str:
    """A pool that has a name, or the absolute path of a folder, with or without `folder:`."""
    kind, _, _ = name.partition(":")
    if kind == "own" or name in ("imagenet", "omniglot") or name in NAMED:
        return name
    return str(absolute(Path(name.removeprefix("folder:"))))


NotEmpty = BeforeValidator(refuse_empty)
Listed = BeforeValidator(split_commas)
# larger whole numbers are not exact in all readers of JSON
PositiveInt = Annotated[int, Field(gt=0, lt=2**53)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**53)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, lt=1)]  # 0, but not 1
Share = Annotated[float, Field(gt=0, le=1)]  # 1, but not 0
Shares = Annotated[tuple[Share, Share], Listed, AfterValidator(ascending)]
Ratios = Annotated[tuple[PositiveFloat, PositiveFloat], Listed, AfterValidator(ascending)]
Rates = Annotated[tuple[PositiveFloat, ...], Listed, Field(min_length=1), AfterValidator(distinct)]
Workers = Annotated[int, Field(ge=0, le=256)]
Jobs = Annotated[int, Field(ge=1, le=256)]
Place = Annotated[Path, NotEmpty, AfterValidator(absolute)]
Weights = Annotated[Path, NotEmpty, AfterValidator(weights_place)]
BackboneName = Annotated[str, AfterValidator(backbone_name)]
PretextName = Annotated[str, AfterValidator(pretext_name)]
DatasetName = Annotated[str, NotEmpty, AfterValidator(dataset_name)]
PoolName = Annotated[str, NotEmpty, AfterValidator(pool_name)]

# --- marks of settings -------------------------------------------------------------------------


class Mark(Enum):
    """What does not change when a setting changes.

    A setting without a mark is taken to define the run, the arm that it belongs to, and whether it
    follows the paper. So a mark that was forgotten refuses too much, and mixes nothing up.
    """

    CHANGES_NO_NUMBER = auto()  # how and where it is computed: a run may go on with another value
    KNOWN_BY_DIGEST = auto()  # a place, which may be another one: its content is compared instead
    MAY_GROW = auto()  # a finished run goes on with more of it, and keeps what it has
    SAME_ARM = auto()  # what is repeated, and how often: it makes no other arm
    LEFT_OPEN_BY_PAPER = auto()  # any value follows the paper, which searches for it or is silent


# such as `seed: SameArm[int]`
ChangesNoNumber = Annotated[T, Mark.CHANGES_NO_NUMBER]
KnownByDigest = Annotated[T, Mark.KNOWN_BY_DIGEST]
SameArm = Annotated[T, Mark.SAME_ARM]
MayGrow = Annotated[T, Mark.MAY_GROW]
LeftOpenByPaper = Annotated[T, Mark.LEFT_OPEN_BY_PAPER]


def settings_with(kind: type[BaseModel], *marks: Mark) -> set[str]:
    """The names of the settings that have one of these marks."""
    names = set()
    for name, field in kind.model_fields.items():
        if any(mark in field.metadata for mark in marks):
            names.add(name)
    return names


# --- values of the paper and of the authors' program --------------------------------------------

GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # App. C.2: from the pretrained backbone
ALIGNED_GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # App. C.2: after BiSSLight
RELEASED: Record = {  # where the authors' program, run as its README says, is not the paper
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
    "optimizer": "sgd",  # of finetune, and only after an align run: see `released_values`
}

# --- groups of settings ------------------------------------------------------------------------


class Settings(
    BaseModel,
    frozen=True,
    extra="forbid",
    allow_inf_nan=False,
    defer_build=True,
    use_attribute_docstrings=True,
):
    """Base of all settings."""


class Machine(Settings):
    """Machine: of every run."""

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


class Command(Machine):
    """Settings of a command that makes runs. `model_fields_set` names what the caller gave."""

    @model_validator(mode="wrap")
    @classmethod
    def fill_in(cls, given: Record, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Add the defaults that follow from other settings. None counts as not given.

        So the default that stands at a field is not always the value of a run.
        """
        given = {name: value for name, value in dict(given).items() if value is not None}
        defaults = paper_defaults(cls, given) | our_defaults(cls, given)
        settings = handler(defaults | given)
        settings.model_fields_set.intersection_update(given)
        return settings

    def replace(self, **changes: object) -> Self:
        """The same settings with some changed; defaults that follow from these are made anew.

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
        """What LoRA's product is multiplied by."""
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
        """How many trials (one rate, one seed): the grid's, and the best rate's other seeds."""
        return len(self.grid) * self.grid_seeds + (self.seeds - self.grid_seeds)

    @model_validator(mode="after")
    def check_rates_and_seeds(self) -> Self:
        """One rate or a grid; and no more seeds for choosing it than there are."""
        if self.lr is not None and self.grid != (self.lr,):
            raise ValueError("give --lr or --grid, not both")
        if self.grid_seeds > self.seeds:
            raise ValueError(f"--grid-seeds {self.grid_seeds}: is more than --seeds {self.seeds}")
        return self


class AlignConfig(Bilevel, Upper, Lower, Pretext, Data, Network, Command):
    """Align: BiSSLight, Algorithm 1."""

    @model_validator(mode="after")
    def check_decoder(self) -> Self:
        """Refuse to take a decoder from where there is none."""
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
        """A restart needs the run whose θ it starts from."""
        if self.restart and self.start is None:
            raise ValueError("--restart: needs --from RUN, a finished finetune run")
        return self

    @classmethod
    def from_align(cls, run: Path, **changes: object) -> Self:
        """Settings for fine-tuning after an align run, or after a directory of them.

        Network, data and data root are the align run's, read from its config.json; `changes` win.
        Raises UsageError where there is no such run, for an unknown name, and for a wrong value.
        """
        taken = read_align_run(run, changes.get("dataset"), changes.get("restart"))
        return make(cls, taken | changes | {"start": run})


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
        """Sizes of the network, image and patch as they are set."""
        arch = BACKBONES[self.backbone]
        return arch._replace(
            image_size=self.image_size or arch.image_size,
            patch_size=self.patch_size or arch.patch_size,
            class_token=self.pretext != "ijepa",
        )


# --- defaults that follow from other settings ---------------------------------------------------

# `given` is what the caller gave. Each function returns defaults of one command; ours win over the
# paper's, and what was given wins over both.


def paper_defaults(kind: type[Command], given: Record) -> Record:
    """The defaults that replace those of the fields because of what is given, from the paper.

    Those of pretraining are MAE's or I-JEPA's. All others are at the fields: see `paper_values`.
    """
    if issubclass(kind, PretrainConfig):
        return pretraining_defaults(given)
    defaults: Record = {}
    if given.get("backbone") in ("vit_l16", "vit_h14"):
        defaults["drop_path"] = 0.2  # App. C.2
    if given.get("pretext") == "ijepa":
        defaults |= {
            "min_crop": 0.3,  # App. D.1, and so are the next five
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
    return pick(kind, defaults)


def pretraining_defaults(given: Record) -> Record:
    """I-JEPA's recipe, where it is not MAE's (Assran et al. 2023)."""
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


def our_defaults(kind: type[Command], given: Record) -> Record:
    """Ours, where the paper has no such network or images."""
    defaults: Record = {}
    is_mini = given.get("backbone") == "vit_mini"
    is_pretraining = issubclass(kind, PretrainConfig)
    if is_mini and is_pretraining:
        defaults |= {"epochs": 30, "warmup_epochs": 4, "batch": 64}
    elif is_mini:
        # lengths and sizes that a CPU can do; never λ, a learning rate, decay or the mask ratio
        defaults |= {
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
    if is_mini and given.get("pretext") == "ijepa":
        defaults["min_keep"] = 4  # its smallest target has few patches
        if is_pretraining:
            defaults["patch_size"] = 2
    if str(given.get("backbone")).startswith(TIMM):
        defaults["decoder"] = "random"  # timm has no pretext heads
    named = str(given.get("pool" if is_pretraining else "dataset"))
    defaults |= NAMED.get(named, {})
    if named.startswith("omniglot:"):
        # a crop of a character can be another character, and so can its mirror image
        defaults |= {"pool": "omniglot", "augment": "none"}
        if is_mini and given.get("pretext", "mae") == "mae":
            defaults["weights"] = OMNIGLOT
    return pick(kind, defaults)


def pick(kind: type[Command], values: Record) -> Record:
    """Those of the values that a command has a setting for."""
    return {name: value for name, value in values.items() if name in kind.model_fields}


# --- the paper's values ------------------------------------------------------------------------


def paper_values(kind: type[Command], given: Record) -> Record:
    """The recipe's value of every setting of `kind` that has one, for what is given.

    `given` names at least the backbone and the pretext task. The recipe is the paper's; that of
    pretraining is MAE's or I-JEPA's.
    """
    values = {
        name: field.default for name, field in kind.model_fields.items() if not field.is_required()
    }
    return values | paper_defaults(kind, given)


def open_settings(kind: type[Command]) -> set[str]:
    """The settings that may have any value in a run that counts as the paper's method."""
    return settings_with(kind, *Mark)  # what any mark says is nothing that the paper fixes


def unlike_paper(cfg: Command) -> Record:
    """The settings that are not the paper's, but for those that it leaves open."""
    settings = dict(cfg)
    left_open = open_settings(type(cfg))
    differing: Record = {}
    for name, value in paper_values(type(cfg), settings).items():
        if name not in left_open and settings[name] != value:
            differing[name] = settings[name]
    if isinstance(cfg, Network) and cfg.scale == 1:
        differing.pop("alpha", None)  # alpha = rank is the paper's, written out
    return differing


def released_values(kind: type[Command], aligned: bool) -> Record:
    """The settings of `--preset as-released`; `aligned`: fine-tuning starts from an align run."""
    values = pick(kind, RELEASED)
    if not aligned:  # the authors' program takes SGD in fine-tuning only after an align run
        values.pop("optimizer", None)
    return values


# --- settings from files -----------------------------------------------------------------------


def read_table(path: Path) -> Record:
    """The values in a TOML or JSON file, such as a run's config.json. Raises UsageError."""
    with as_usage_error(str(path), "give settings in TOML or JSON"):
        text = path.read_text()
        table = dict(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    return {name.replace("-", "_"): value for name, value in table.items() if value is not None}


def read_align_run(run: Path, dataset: object = None, restart: object = False) -> Record:
    """What fine-tuning takes over from an align run, or from the first in a directory of them.

    `dataset`: the one to fine-tune on, if it is given. `restart`: the run is a finetune run.
    UsageError: it is no such run.
    """
    files = [*run.glob("config.json"), *sorted(run.glob("*/config.json"))]
    settings = read_table(files[0]) if files else {}
    if restart and "grid" not in settings:
        raise UsageError(f"--from {run}: is no finetune run, which --restart needs")
    if not restart and "alternations" not in settings:
        raise UsageError(
            f"--from {run}: is no align run, folder of them, or adapter file; "
            "run `bisslight align` first"
        )
    names = {*Data.model_fields, *Network.model_fields, "data_root"}
    if dataset is not None:
        with as_usage_error(f"--dataset {dataset}"):
            same_images = dataset_name(str(dataset)) == settings["dataset"]
        if not same_images:
            names -= {"dataset", "data_seed", "split_file", "partial"}
    return {name: value for name, value in settings.items() if name in names}


C = TypeVar("C", bound=Settings)


def read_settings(path: Path, kind: type[Command]) -> Record:
    """As `read_table`; refuses (UsageError) a name that is no setting of the command."""
    settings = read_table(path)
    fields = kind.model_fields
    flags = {flag_of(field): field for field in fields}
    for name in settings:
        if name not in fields:
            # such as `from`: the flag is --from, the setting is called start
            hint = f"did you mean {flags[flag_of(name)]}?" if flag_of(name) in flags else ""
            raise UsageError(f"{path}: {name} is no setting, {hint or nearest(name, fields)}")
    return settings


def make(kind: type[C], given: Record) -> C:
    """Settings of a class, from these values; UsageError `--flag VALUE: what is wrong`."""
    try:
        return kind(**given)
    except ValidationError as error:
        problems = error.errors()
        problem = problems[0]  # of the first field; defaults that follow from it come after it
        if problem["type"] == "missing" and len(problem["loc"]) == 1:
            flags = [flag_of(str(p["loc"][0])) for p in problems if p["type"] == "missing"]
            raise UsageError(f"{', '.join(flags)}: a value is missing") from error
        # Our own checks raise a ValueError; what others say is pydantic's.
        message = str(problem.get("ctx", {}).get("error", problem["msg"]))
        if not problem["loc"]:  # about several settings, which the message names
            raise UsageError(message) from error
        name = str(problem["loc"][0])
        flag = flag_of(name)
        if problem["type"] == "missing":  # inside a value, such as the second of two numbers
            message = "has too few numbers"
        if problem["type"] == "extra_forbidden":
            raise UsageError(f"{flag}: is unknown, {nearest(name, kind.model_fields)}") from error
        if isinstance(problem["input"], str | int | float):
            flag += f" {problem['input']}"
        raise UsageError(f"{flag}: {message}") from error


def flag_of(name: str) -> str:
    """The flag of a setting, called as the setting unless Python needs that word.

    >>> flag_of("d_lr"), flag_of("start")
    ('--d-lr', '--from')
    """
    words = {"start": "from", "as_json": "json"}
    word = words.get(name, name)
    return f"--{word.replace('_', '-')}"
