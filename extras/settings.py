"""The settings of `pretrain`, `sweep` and `bench`. No torch here, so `--help` is fast."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, NonNegativeFloat, PositiveFloat

from commands import Command, Peft, Table
from config import (
    Bilevel,
    Common,
    Crops,
    Data,
    Lower,
    Model,
    NonNegativeInt,
    Pool,
    PositiveInt,
    Pretext,
    Rate,
    Shape,
    Upper,
)

SWEPT = ("rank", "lr", "d_lr", "p_lr", "lam", "lower_steps", "alternations")


class PretrainConfig(Pretext, Crops, Shape, Command):
    """`pretrain`: MAE or I-JEPA from scratch, for those without a checkpoint. Trains ψ itself."""

    ijepa: ClassVar[Table] = {  # Assran et al. 2023
        "epochs": 300,
        "min_crop": 0.3,
        "base_lr": 1.25e-4,
        "warmup_from": 0.2,
        "min_lr": 1e-6,
        "beta2": 0.999,
        "weight_decay": 0.04,
        "final_weight_decay": 0.4,
    }
    ijepa_mini: ClassVar[Table] = {"min_keep": 4, "patch_size": 2}
    short: ClassVar[Table] = {"epochs": 30, "warmup_epochs": 4, "batch": 64}
    pool: Pool
    """Unlabelled images: quilts, or any folder of images, nested or not."""
    epochs: PositiveInt = 400
    """Passes over the pool. [MAE's code; I-JEPA: 300]"""
    warmup_epochs: NonNegativeInt = 40
    """Epochs of linear warm-up. [MAE; I-JEPA]"""
    warmup_from: Rate = 0.0
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
    beta2: Rate = 0.95
    """AdamW's second beta; the first is 0.9. [MAE; I-JEPA: 0.999]"""
    ema: Rate = 0.996
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [I-JEPA]"""


def one_list(swept: dict[str, Any]) -> dict[str, Any]:
    """One setting with its values."""
    if len(swept) != 1 or not {*swept} <= {*SWEPT}:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in SWEPT)
        raise ValueError(f"give a comma list to one of {flags}")
    return swept


class SweepConfig(Peft, Bilevel, Upper, Lower, Pretext, Data, Model, Command):
    """`sweep`: align with PEFT, and PEFT alone, over a list of values."""

    swept: Annotated[dict[str, tuple[int | float, ...]], AfterValidator(one_list)]
    """The list: `--rank 1,2,4` on the command line, swept={"rank": (1, 2, 4)} in Python."""


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
