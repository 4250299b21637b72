"""Program: recipes, which are defaults that follow from other settings.

A recipe is a list of pairs. If the settings match all patterns of the first, the values of the
second are defaults. PAPER and PAPER_PRETRAINING are the papers', OURS and OURS_PRETRAINING are our
own, for networks and images that the papers do not have. RELEASED are the authors' program's.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel

Defaults = dict[str, Any]  # values of settings by name
Recipe = list[tuple[Defaults, Defaults]]  # (patterns of settings, defaults)

OMNIGLOT = Path(__file__).parent / "omniglot.pth"  # a vit_mini pretrained on handwriting
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # App. C.2, from the pretrained backbone
ALIGNED_RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # and after align

IJEPA = {  # App. D.1
    "min_crop": 0.3, "head": "batchnorm", "p_lr": 0.005, "p_weight_decay": 0.0005,
    "d_weight_decay": 0.0005, "weight_decay": 0.0005,
}  # fmt: skip
MINI_RUN = {  # ours: shorter and smaller, for a CPU; rates, λ and the mask ratio are the paper's
    "rank": 8, "drop_path": 0.0, "alternations": 100, "lower_steps": 10, "upper_steps": 5,
    "p_batch": 64, "d_batch": 32, "epochs": 60, "batch": 32,
}  # fmt: skip
# A crop of a character may be another character.
HANDWRITING = {"pool": "omniglot", "augment": "none"}
PAPER: Recipe = [
    ({"backbone": "vit_[lh]*"}, {"drop_path": 0.2}),  # App. C.2
    ({"backbone": "timm:vit_large*"}, {"drop_path": 0.2}),
    ({"backbone": "timm:vit_huge*"}, {"drop_path": 0.2}),
    ({"pretext": "ijepa"}, IJEPA),
    ({"start": "?*"}, {"lr": ALIGNED_RATES}),  # App. C.2; ?* is any text, so any --from
]
OURS: Recipe = [
    ({"backbone": "vit_mini"}, MINI_RUN),
    ({"backbone": "vit_mini", "pretext": "ijepa"}, {"min_keep": 4}),  # its blocks are small
    ({"backbone": "timm:*"}, {"decoder": "random"}),  # checkpoints of timm have no pretext head
    ({"dataset": "omniglot:*"}, HANDWRITING),
    ({"dataset": "omniglot:*", "backbone": "vit_mini", "pretext": "mae"}, {"weights": OMNIGLOT}),
]
PAPER_PRETRAINING: Recipe = [  # the fields have MAE's; this is of Assran et al. (2023)
    (
        {"pretext": "ijepa"},
        {
            "epochs": 300,
            "min_crop": 0.3,
            "base_lr": 1.25e-4,
            "warmup_from": 0.2,
            "min_lr": 1e-6,
            "beta2": 0.999,
            "weight_decay": 0.04,
            "final_weight_decay": 0.4,
        },
    )
]
OURS_PRETRAINING: Recipe = [
    ({"backbone": "vit_mini"}, {"epochs": 30, "warmup_epochs": 4, "batch": 64}),
    ({"backbone": "vit_mini", "pretext": "ijepa"}, {"min_keep": 4, "patch_size": 2}),
]
# Values of the authors' program, run as its README says, where they are not the paper's.
RELEASED: Recipe = [
    (
        {},
        {
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
        },
    ),
    ({"start": "?*"}, {"optimizer": "sgd"}),
]


def defaults_of(kind: type[BaseModel], recipe: Recipe, given: Defaults) -> Defaults:
    """Return the defaults that a recipe has for the settings that are `given`.

    Later pairs win. A setting that is not given is matched by its own default. `kind` is the class
    of the settings. A recipe serves several commands, so values that this one lacks are left out.

    >>> from config import AlignConfig
    >>> defaults_of(AlignConfig, AlignConfig.paper, {"backbone": "vit_l16", "dataset": "dtd"})
    {'drop_path': 0.2}
    """
    settings = {name: field.default for name, field in kind.model_fields.items()} | given
    found: Defaults = {}
    for patterns, values in recipe:
        matches = [
            fnmatchcase(str(settings.get(name) or ""), pattern)  # None counts as an empty text
            for name, pattern in patterns.items()
        ]
        if all(matches):
            found |= values
    return {name: value for name, value in found.items() if name in kind.model_fields}
