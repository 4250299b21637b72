"""Program: `bisslight export`: an adapter in the layouts of other programs, with a model card.

peft/      for Hugging Face's peft: the LoRA alone, see `to_peft`
timm/      for timm.create_model("local-dir:timm"): the backbone with θ merged in, and the head
README.md  the model card
"""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from config import TIMM, Arch, FinetuneConfig, Record
from lora import NORM_EPS, Backbone, Phi, factors, merge
from support.checkpoints import (
    Adapter,
    AdapterInfo,
    channels_of,
    load_adapter,
    load_backbone,
    vit_args,
)
from support.errors import UsageError, as_read_error, as_usage_error
from support.runs import read_json, read_json_if_there, write_atomic

# The model card; `write_card` fills in what is in braces.
CARD = """\
---
license: other
library_name: timm
tags: [image-classification, lora, bisslight]
---
# {backbone} for {dataset}, {stage}

LoRA on q and v of every layer of a frozen Vision Transformer, made with BiSSLight.

Weights: sha256 {weights_sha256}, whose licence holds (the official MAE and I-JEPA files:
CC BY-NC 4.0). Pretext task {pretext}, rank {rank}. {accuracy}.{names}

In this folder:

```python
import timm
from PIL import Image

model = timm.create_model("local-dir:timm", pretrained=True).eval()  # the adapter is merged
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = transform(Image.open("image.png").convert("RGB"))  # (3, H, W)
{use}
```

The adapter alone, on a timm model `base` of these weights{as_many}:

```python
from peft import PeftModel
model = PeftModel.from_pretrained(base, "peft")
```
"""
# `use` in the card of a finetune run
CLASSIFY = """\
probabilities = model(image[None]).detach().softmax(1)[0]
best = int(probabilities.argmax())
print(model.pretrained_cfg["label_names"][best], float(probabilities[best]))"""
# `use` in the card of an align run, whose adapter has no head
FEATURES = """\
features = model(image[None]).detach()  # (1, width of the network); a head is yours to train
print(features.shape)"""


def export(
    run: Path, out: Path | None = None, *, seed: int | None = None, weights: Path | None = None
) -> Record:
    """Write a finished run's adapter in both layouts, into a directory that is empty or new.

    1. Read the adapter, and load the backbone that it was trained on.
    2. Convert it to the layouts of peft and timm.
    3. Write the files, and return such as {"out": "runs/x/export", "seed": 0, "files": [...]}.

    Args:
        run: a finished run of align or finetune.
        out: the directory; None: `run`/export.
        seed: whose adapter is taken from a finetune run; None: that of its first seed.
        weights: where the backbone's file is now; None: where it was for the run.

    Raises UsageError.
    """
    out = out or run / "export"
    check_is_empty(out)
    cfg, own_seed, adapter = open_run(run, seed, weights)
    theta, phi_D, info = adapter  # θ (K, p), the tensors of the head, what θ was trained on
    pretrained = load_backbone(cfg)  # backbone, sizes and sha256
    check_same_weights(run, info, pretrained.sha256)

    backbone = pretrained.backbone
    head = fold_norm(phi_D)  # weight (C, dim) and bias (C,); {} after align
    for_peft = to_peft(theta, head, dim=backbone.dim, scale=backbone.scale)
    with as_usage_error(str(run)):
        for_timm = to_timm(backbone, pretrained.arch, theta, head, info, cfg)

    contents: dict[str, str | bytes] = {  # what each file holds, by its path below `out`
        "peft/adapter_config.json": json.dumps(for_peft.config, indent=1),
        "peft/adapter_model.safetensors": save(for_peft.tensors),
        "timm/config.json": json.dumps(for_timm.config, indent=1),
        "timm/model.safetensors": save(for_timm.tensors),
        "README.md": write_card(run, cfg, own_seed, info),  # last, so that it shows a whole export
    }
    write_files(out, contents)
    return {"out": out, "seed": own_seed, "files": list(contents)}


def check_is_empty(out: Path) -> None:
    """Raise UsageError unless the directory is empty or not there."""
    with as_usage_error(f"--out {out}"):
        if out.exists() and any(out.iterdir()):
            raise ValueError("is not empty; remove it or give another")


def write_files(out: Path, contents: dict[str, str | bytes]) -> None:
    """Write files, whose contents are given by their paths below the directory `out`.

    Raises UsageError if a directory cannot be made, RunError if a file cannot be written.
    """
    for name, content in contents.items():
        path = out / name
        with as_usage_error(f"--out {out}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)


class FinishedRun(NamedTuple):
    """One adapter of a finished run of align or finetune, and the settings it was trained with."""

    cfg: FinetuneConfig  # also for an align run: its network and data
    seed: int  # whose adapter it is
    adapter: Adapter


def open_run(run: Path, seed: int | None, weights: Path | None) -> FinishedRun:
    """Read the settings and an adapter of a finished run of align or finetune.

    1. Read the settings, and find the adapter's file, see `find_adapter`.
    2. Read the adapter, and see that it is of the seed that is asked for.

    `seed`: whose adapter is taken; None: that of the run's first seed. `weights`: where the
    backbone's file is now; None: where it was for the run. Raises UsageError.
    """
    cfg = read_settings(run, weights)
    file = find_adapter(run, cfg.seed if seed is None else seed)
    with as_read_error(str(file), "give another run"):
        adapter = load_adapter(file)
    own_seed = adapter.info.seed
    if own_seed is None:  # of an align run, whose one seed is in its settings
        own_seed = cfg.seed
    if seed is not None and seed != own_seed:  # so it is if there is but one adapter
        raise UsageError(f"{run}: has no seed {seed}, but {own_seed}; see --seed")
    return FinishedRun(cfg, own_seed, adapter)


def find_adapter(run: Path, seed: int) -> Path:
    """Find the adapter file of this seed in a finished run.

    A finetune run has adapter-sSEED.safetensors for each seed. An align run and a single trial,
    such as runs/peft/lr0.01-s1, have one adapter.safetensors, whose seed is not looked at here.
    Raises UsageError if there is neither.
    """
    for name in (f"adapter-s{seed}.safetensors", "adapter.safetensors"):
        if (run / name).exists():
            return run / name
    raise UsageError(f"{run}: is not finished, or has no seed {seed}; see --seed")


def read_settings(run: Path, weights: Path | None) -> FinetuneConfig:
    """Read the settings of a finished run of align or finetune as those of finetune.

    `weights` as in `open_run`. Raises UsageError.
    """
    settings = read_json(run / "config.json", "give a finished run")
    if "dataset" not in settings:  # a pretrain run
        raise UsageError(f"{run}: has no adapter; give a finished run of align or finetune")
    if weights:
        settings["weights"] = weights
    # An align run has settings that finetune lacks, such as the hypergradient.
    known = FinetuneConfig.model_fields.keys() - {"tensorboard"}  # its package may not be here
    shared = {name: value for name, value in settings.items() if name in known}
    with as_read_error(str(run), "give a finished run of align or finetune"):
        return FinetuneConfig(**shared)


def check_same_weights(run: Path, info: AdapterInfo, sha256: str | None) -> None:
    """Raise UsageError if the backbone's weights are not those that a run was made with.

    `info` is what the run's adapter says; `sha256` is that of the weights that were loaded now.
    """
    if sha256 != info.weights_sha256:
        raise UsageError(f"--weights: {run} was made with others, see its env.json")


def write_card(run: Path, cfg: FinetuneConfig, seed: int, info: AdapterInfo) -> str:
    """Write the text of the model card: what the adapter was trained on, and its test accuracy.

    1. Say how the exported network is used; after finetune it classifies, after align it does not.
    2. Fill this in, and all else that `CARD` has in braces.

    `seed` is the seed of the exported adapter, `info` is what its file says.
    """
    use = FEATURES  # an align run has no head
    as_many = ""
    names = ""
    if info.classes:
        use = CLASSIFY
        as_many = " and as many classes"
        names = f"\n\nClasses: {', '.join(info.classes)}."

    fields = {  # what stands for each name in braces
        **info.model_dump(),  # backbone, stage, weights_sha256, pretext, rank, and some not in CARD
        "dataset": Path(cfg.dataset).name,  # the name of a folder, not where it lies
        "accuracy": describe_accuracy(run, cfg, seed),
        "names": names,
        "use": use,
        "as_many": as_many,
    }
    return CARD.format(**fields)


def describe_accuracy(run: Path, cfg: FinetuneConfig, seed: int) -> str:
    """The test accuracy of the run with this seed, and of all its seeds, in words.

    Such as "Test top-1 accuracy: 52.00 % with seed 0, the exported one". An align run has none.
    """
    result = read_json_if_there(run / "result.json") or {}  # such as {"test": [52.0, 53.1], ...}
    if "test" not in result:
        return "Test accuracy: not measured"
    tests = result["test"]  # of the first seed, of the next one and so on
    of_this_seed = tests[seed - cfg.seed]  # cfg.seed: the first one
    text = f"Test {result['metric']}: {of_this_seed:.2f} % with seed {seed}, the exported one"
    if len(tests) > 1:
        text += f"; of all seeds {fmean(tests):.2f} ± {stdev(tests):.2f} % ({len(tests)} seeds)"
    return text


def fold_norm(phi_D: Phi) -> Phi:
    """Fold the head's BatchNorm, if it has one, into its linear layer, and return that layer.

    With the running statistics, BatchNorm is x -> gain x + shift, and W (gain x + shift) + b is
    linear in x again: with the weight W gain and the bias b + W shift.
    """
    if "norm.mean" not in phi_D:  # no BatchNorm
        return phi_D
    weight = phi_D["weight"]  # (C, dim)
    deviation = (phi_D["norm.var"] + NORM_EPS).sqrt()  # (dim,), and so are gain and shift
    gain = phi_D["norm.weight"] / deviation
    shift = phi_D["norm.bias"] - gain * phi_D["norm.mean"]
    bias = phi_D["bias"] + weight @ shift  # (C,)
    return {"weight": weight * gain, "bias": bias}


class Exported(NamedTuple):
    """The adapter in the layout of another program, which has two files."""

    config: Record  # what its JSON file holds
    tensors: dict[str, Tensor]  # what its safetensors file holds, by name


def to_peft(theta: Tensor, phi_D: Phi, dim: int, scale: float) -> Exported:
    """The adapter in peft's layout, for a timm model whose `head` is the classifier.

    Ours are two LoRAs of rank r, on q and on v. timm has one matrix for q, k and v, so peft's is
    one LoRA of rank 2 r on that matrix, with the same product:

        A = [A_q; A_v],   B = [[B_q, 0], [0, 0], [0, B_v]]   (rows of q, of k and of v)

    The names of the tensors are such as "base_model.model.blocks.0.attn.qkv.lora_A.weight".

    Args:
        theta: θ (K, p).
        phi_D: the head, without BatchNorm: weight (C, dim) and bias (C,); {} after align.
        dim: the width of the network.
        scale: what LoRA's product is multiplied by.
    """
    A_q, B_q, A_v, B_v = factors(theta, dim)  # each A (K, r, dim), each B (K, dim, r)
    rank = A_q.shape[1]
    peft_rank = 2 * rank
    config = {
        "peft_type": "LORA",
        "r": peft_rank,
        # peft multiplies B A by lora_alpha / r, which has to be our scale
        "lora_alpha": scale * peft_rank,
        "target_modules": r"blocks\.\d+\.attn\.qkv",  # the names of the modules that have a LoRA
        "modules_to_save": ["head"] if phi_D else None,  # modules that are stored whole
    }

    tensors = {f"base_model.model.head.{name}": tensor for name, tensor in phi_D.items()}
    for layer in range(len(theta)):
        B = torch.zeros(3 * dim, peft_rank)  # the rows of k stay zero, since k has no LoRA
        B[:dim, :rank] = B_q[layer]
        B[2 * dim :, rank:] = B_v[layer]
        name = f"base_model.model.blocks.{layer}.attn.qkv.lora"
        tensors[f"{name}_A.weight"] = torch.cat([A_q[layer], A_v[layer]])  # (2 r, dim)
        tensors[f"{name}_B.weight"] = B
    return Exported(config, tensors)


def to_timm(
    backbone: Backbone,
    arch: Arch,
    theta: Tensor,
    phi_D: Phi,
    info: AdapterInfo,
    cfg: FinetuneConfig,
) -> Exported:
    """The backbone with θ merged in, and the head, in timm's layout, for timm.create_model.

    1. Name the network in timm's words, and say how images are prepared for it.
    2. Merge θ into the backbone's weights, and add those of the head.

    `phi_D` is the head without BatchNorm; {} after align. `cfg` names the network, and says how
    images are resized. Raises ValueError if `info` does not say how they are normalised.
    """
    mean, std = channels_of(info)  # three numbers each, such as (0.485, 0.456, 0.406)
    architecture, model_args = name_network(cfg.backbone, arch, backbone)
    config = {
        "architecture": architecture,
        "model_args": model_args,
        "num_classes": len(phi_D["bias"]) if phi_D else 0,
        "pretrained_cfg": {
            "input_size": [3, arch.image_size, arch.image_size],
            "mean": mean,
            "std": std,
            "interpolation": cfg.d_interpolation,
            "crop_pct": crop_share(arch.image_size, info.whole_images),
            "classifier": "head",
        },
    }
    if info.classes:
        config["label_names"] = info.classes  # timm puts it into `pretrained_cfg` when it loads

    tensors = merge(backbone, theta)  # by timm's names, such as "blocks.0.attn.qkv.weight"
    for name, tensor in phi_D.items():
        tensors[f"head.{name}"] = tensor
    # safetensors takes no view of a larger tensor whose numbers do not lie side by side.
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return Exported(config, tensors)


def name_network(name: str, arch: Arch, backbone: Backbone) -> tuple[str, Record]:
    """The architecture and the model_args by which timm makes the network --backbone NAME.

    Such as "vit_base_patch16_224" and {"embed_dim": 768, "depth": 12, ...}.
    """
    if name.startswith(TIMM):  # timm:ARCHITECTURE.WEIGHTS
        architecture, _, _weights = name.removeprefix(TIMM).partition(".")
        # The architecture has all sizes. These two may be others: the image size is a setting, and
        # how features are made of the tokens depends on the weights.
        pool = backbone.vit.global_pool
        return architecture, {"img_size": arch.image_size, "global_pool": pool}
    # Any plain ViT of timm would do: vit_args has all sizes, which replace those of the name.
    return "vit_base_patch16_224", vit_args(arch)


def crop_share(size: int, whole_images: bool) -> float:
    """The crop_pct that makes timm cut an image just as `data.cut_centre` does, such as 0.874.

    timm resizes the shorter side to size / crop_pct, rounded down, and cuts out the centre.
    `cut_centre` resizes it to 256/224 of the size, rounded to the nearest number.

    Args:
        size: the side of the network's input.
        whole_images: nothing of an image is cut off, so that the share is 1.
    """
    if whole_images:
        return 1.0
    resized = round(size * 256 / 224)
    # size / (size / resized) may come out a hair below `resized`, and timm would round it down to
    # one pixel less. With 0.25 more it is rounded down to `resized`.
    return size / (resized + 0.25)
