"""What align and finetune do without: a table of commands, their settings, evaluate's pictures."""

import os
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import config
from config import (
    BACKBONES,
    Bilevel,
    Command,
    Crops,
    Data,
    Lower,
    Network,
    Peft,
    Pretext,
    Record,
    Shape,
    Upper,
)
from support.errors import UsageError

RUN = "out config force dry_run all json quiet"
COMMANDS = {  # what it does; function, class of its settings, options and arguments; an example
    "evaluate": ("Compare finished finetune runs: mean, deviation, exact p, the paper's figure.",
        "extras:evaluate", "",
        "run against picture rollout similarity seed weights data_root device json",
        "runs/cub-peft --against runs/direct"),
    "demo": ("The method on drawn images, offline, in two minutes on two CPU cores.",
        "extras.demo:demo", "", "out data_seed jobs force json quiet", "--out runs/demo"),
    "pretrain": ("Train a backbone from scratch with MAE or I-JEPA, without a checkpoint.",
        "extras.pretrain:pretrain", "extras:PretrainConfig", RUN,
        "--backbone vit_mini --pool quilts"),
    "sweep": ("Accuracy against LoRA rank, λ, N_L, T or a rate: the one that has a comma list.",
        "extras.sweep:sweep", "extras:SweepConfig", RUN,
        "--backbone vit_b16 --dataset dtd --rank 1,4,16,64"),
    "report": ("Write one HTML page about runs: accuracies, curves, settings, pictures.",
        "extras.report:report", "", "runs out json", "runs/cub runs/cub-peft --out report.html"),
    "bench": ("Time and memory of an alternation: M-FAC, CG, no curvature.",
        "extras.bench:bench", "", "backbone rank p_batch d_batch lower_steps upper_steps "
        "repeats seed device amp recompute micro_batch json quiet",
        "--backbone vit_l16 --micro-batch 64"),
    "export": ("Write a run's adapter for HF peft, for timm and for the released program.",
        "extras.export:export", "", "run out seed weights json", "runs/cub-peft --out exported"),
    "data list": ("The paper's datasets: whether they are there, and the terms of their use.",
        "extras.datasets:list_all", "", "root json", "--data-root DIR"),
    "data check": ("Open every image of a dataset or folder, count, list what is wrong.",
        "extras.datasets:check", "", "name root partial json", "cub200 --data-root DIR"),
    "data download": ("Fetch and unpack a dataset; its digests are verified.",
        "extras.datasets:download", "", "name root json", "cub200 --data-root DIR"),
}  # fmt: skip
OPTIONS: dict[str, tuple[Any, Any, str]] = {  # type, default (...: an argument, no flag), help
    "dry_run": (bool, False, "Check names, data and weights, say what would run; write nothing."),
    "all": (bool, False, "As --dry-run, with every setting, not only what differs."),
    "picture": (Path | None, None, "Draw the result to this PNG, SVG or PDF."),
    "rollout": (int | None, None, "Draw attention rollouts of so many images."),
    "similarity": (bool, False, "CKA and RSA of features, with those of the backbone, too."),
    "seed": (int | None, None, "Seed whose adapter is taken, default: the first. bench: any."),
    "weights": (Path | None, None, "Where the run's weights are now."),
    "data_root": (Path | None, None, "Where the benchmarks are now. Default: the run's."),
    "device": (str | None, None, "auto, cpu, cuda or cuda:1. Default: the run's; of bench, auto."),
    "runs": (list[Path], ..., "Runs, or directories that hold some."),
    "name": (str, ..., "A dataset by name, or folder:DIR."),
    "root": (Path, os.environ.get("BISSLIGHT_DATA", "data"), "Where the benchmarks are."),
    "data_seed": (int, 0, "Draws the images; 0 has a backbone, others are pretrained first."),
    "jobs": (int, 2, "Runs at a time."),
    "partial": (bool, False, "It is a subset; missing images are no problem."),
    "repeats": (int, 3, "Timed alternations per method, after one that warms up."),
}
# tab:memory_single_gpu: (GB, A40 GPUs), on the fewest GPUs of the table; GB sum each GPU's peak
MEMORY = {  # by hypergradient, or by the batch of PEFT
    "cg": {"vit_b16": (58, 2), "vit_l16": (77, 2), "vit_h14": (141, 4)},
    "mfac": {"vit_b16": (13, 1), "vit_l16": (19, 1), "vit_h14": (33, 1)},
    "256": {"vit_b16": (14, 1), "vit_l16": (36, 1), "vit_h14": (80, 2)},
    "64": {"vit_b16": (4, 1), "vit_l16": (10, 1), "vit_h14": (22, 1)},
}
SWEPT = ("rank", "lr", "d_lr", "p_lr", "lam", "lower_steps", "alternations")


class PretrainConfig(Pretext, Crops, Shape, Command):
    """Pretraining: MAE or I-JEPA from scratch, for those without a checkpoint. Trains ψ itself."""

    @classmethod
    def paper_defaults(cls, given: Record) -> Record:
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

    @classmethod
    def our_defaults(cls, given: Record) -> dict[str, Record]:
        """Lengths for vit_mini, patches for its I-JEPA targets; drawn images stay as they are."""
        defaults: dict[str, Record] = {}
        if given.get("backbone") == "vit_mini":
            defaults["vit_mini"] = {"epochs": 30, "warmup_epochs": 4, "batch": 64}
            if given.get("pretext") == "ijepa":
                defaults["vit_mini"] |= {"min_keep": 4, "patch_size": 2}
        if given.get("pool") == "quilts":
            defaults["quilts"] = {"augment": "none"}
        return defaults

    pool: config.PoolName
    """Unlabelled images: quilts, or any folder of images, nested or not."""
    epochs: config.PositiveInt = 400
    """Passes over the pool. [MAE's code; I-JEPA: 300]"""
    warmup_epochs: config.NonNegativeInt = 40
    """Epochs of linear warm-up. [MAE; I-JEPA]"""
    warmup_from: config.UnitInterval = 0.0
    """Where the warm-up starts, as a share of the base rate. [MAE; I-JEPA: 0.2]"""
    batch: config.PositiveInt = 256
    """Images per step. [here; MAE uses 4096]"""
    base_lr: config.PositiveFloat = 1.5e-4
    """Rate per 256 images: the rate of a step is base_lr * batch / 256. [MAE; I-JEPA: 1.25e-4]"""
    min_lr: config.NonNegativeFloat = 0.0
    """Where the cosine ends. [MAE; I-JEPA: 1e-6]"""
    weight_decay: config.NonNegativeFloat = 0.05
    """AdamW decay of tensors with two or more axes. [MAE; I-JEPA: 0.04]"""
    final_weight_decay: config.NonNegativeFloat | None = None
    """Decay at the end of half a cosine. None: it stays as it is. [MAE; I-JEPA: 0.4]"""
    beta2: config.UnitInterval = 0.95
    """AdamW's second beta; the first is 0.9. [MAE; I-JEPA: 0.999]"""
    ema: config.Share = 0.996
    """Momentum of I-JEPA's teacher at the start; it rises to 1. [I-JEPA]"""

    def arch(self) -> config.Arch:
        """Sizes of the network, image and patch as they are set."""
        given = self.model_dump(include={"image_size", "patch_size"}, exclude_none=True)
        return BACKBONES[self.backbone]._replace(**given, class_token=self.pretext != "ijepa")


class SweepConfig(Peft, Bilevel, Upper, Lower, Pretext, Data, Network, Command):
    """`sweep`: align with PEFT, and PEFT alone, over a list of values."""

    swept: dict[str, tuple[int | float, ...]] = {}  # noqa: RUF012
    """One list: `--rank 1,2,4` on the command line, swept={"rank": (1, 2, 4)} in Python."""


def evaluate(
    run: Path, against: list[Path], picture: Path | None, rollout: int | None,
    similarity: bool, **more: Any,
) -> Any:  # fmt: skip
    """`bisslight evaluate`: a table of arms, or with --rollout or --similarity their networks."""
    runs, given = [run, *against], {key: value for key, value in more.items() if value is not None}
    if similarity and (picture or rollout is not None):
        raise UsageError("--similarity: goes with no picture or rollout")
    if rollout is not None:
        return resolve_name("extras.look:rollout")(runs, rollout, picture, **given)
    if similarity:
        return resolve_name("extras.look:similarity")(runs, **given)
    if given:
        raise UsageError(
            "--seed, --weights, --data-root, --device: go with --rollout N or --similarity"
        )
    found = resolve_name("evaluate:evaluate")(runs)
    if picture:
        resolve_name("extras.report:draw_arms")(found.arms, picture)
    return found
