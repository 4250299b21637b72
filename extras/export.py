"""`bisslight export`: an adapter in other programs' layouts, with a model card.

released   the file of the authors' program: a LoRA for q and one for v of every block, pickled
peft       HF peft's folder: one LoRA of rank 2r on the fused qkv; A stacks A_q and A_v, B is
           block-diagonal, and its rows of k are zero. Exact
timm       the merged network with its head, for timm.create_model("local-dir:timm")
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from benchmarks import quilts
from commands import FinetuneConfig
from config import Machine, Model, UsageError
from data import IMAGENET
from extras.datasets import SOURCES
from extras.look import adapter_of
from lora import Phi, factors, load_adapter, merge
from run import checking, read_json, write_atomic
from weights import OFFICIAL, Loaded, fetch, load_backbone, weights_of

MADE = "LoRA on q and v of every layer of a frozen Vision Transformer, made with BiSSLight."
MINI = "vit_tiny_patch16_224"  # any plain ViT of timm's: vit_mini's sizes are told as arguments
NAMES = {  # (backbone, class token): timm's architecture, and its name of the official weights
    ("vit_b16", True): ("vit_base_patch16_224", "timm/vit_base_patch16_224.mae"),
    ("vit_l16", True): ("vit_large_patch16_224", "timm/vit_large_patch16_224.mae"),
    ("vit_h14", True): ("vit_huge_patch14_224", "timm/vit_huge_patch14_224.mae"),
    ("vit_h14", False): ("vit_huge_patch14_gap_224", None),
    ("vit_mini", True): (MINI, None),
    ("vit_mini", False): (MINI, None),
}
CARD = """\
---
license: {licence}
library_name: timm
tags: [image-classification, lora, bisslight]
---
# {backbone} for {dataset}, {stage}

{made}

| | |
|---|---|
| backbone | {backbone}, sha256 {weights_sha256} |
| licence of the weights | {weights} |
| data | {dataset}; terms: {terms} |
| rank, alpha | {rank}, {alpha} |
| pretext task | {pretext} |{worth}

In this folder:

```python
import timm
model = timm.create_model('local-dir:timm', pretrained=True)  # the merged network with its head
# or, on a timm model `base` with exactly the backbone above and the same number of classes:
from peft import PeftModel
model = PeftModel.from_pretrained(base, 'peft')
```

`released/lora.pth` is for the program of the paper's authors.

All settings:

```json
{settings}
```
"""


def export(
    run: Path,
    out: Path | None = None,
    *,
    seed: int | None = None,
    merged: bool | None = None,
    weights: Path | None = None,
) -> dict[str, Any]:
    """Write a finished run's adapter in every layout; files of others are never replaced.

    Args:
        out: where to; None: RUN/export.
        seed: whose adapter is taken of a finetune run; None: its first seed's.
        merged: whether to write the timm folder, which is as large as the backbone. None: yes.
        weights: where the backbone's file is now.
    """
    file, out = adapter_of(run, seed), out or run / "export"
    with checking(str(file)):
        theta, phi_D, about = load_adapter(file)
    config = read_json(run / "config.json")
    config |= {"weights": str(weights)} if weights else {}
    taken = {*Model.model_fields, "dataset", "data_seed"} & config.keys()
    cfg = FinetuneConfig(**{name: config[name] for name in taken})
    fetch(cfg)
    path = weights_of(cfg)
    with checking(f"--weights {path}"):
        loaded = load_backbone(cfg)
    if loaded.digest != about["weights_sha256"]:
        made = about["weights_sha256"][:12]
        raise UsageError(f"--weights {path}: {run} was made with weights of sha256 {made}...")
    official = path.name in {url.rpartition("/")[2] for url, _ in OFFICIAL.values()}
    own = cfg.backbone.removeprefix("timm:"), None
    name, hub = NAMES.get((cfg.backbone, loaded.arch.class_token), own)
    phi_D, dim, scale = folded(phi_D), loaded.backbone.dim, loaded.backbone.scale
    lora, content = to_peft(theta, phi_D, dim, scale, hub if official else None), io.BytesIO()
    torch.save(to_released(theta, dim, scale), content)
    files: dict[str, bytes | str] = {
        "README.md": card(about, config, read_json(run / "result.json"), official),
        "released/lora.pth": content.getvalue(),
        "peft/adapter_config.json": json.dumps(lora[0], indent=1),
        "peft/adapter_model.safetensors": save(lora[1]),
    }
    if merged is not False:
        task = quilts(cfg.data_seed)[1] if cfg.dataset == "quilts" else None
        drawn = (task.mean, task.std) if task else IMAGENET
        pixels = about.get("channels") or loaded.channels or drawn
        network = to_timm(loaded, theta, phi_D, name, pixels)
        files["timm/config.json"] = json.dumps(network[0], indent=1)
        files["timm/model.safetensors"] = save(network[1])
    write_all(out, files)
    return {"out": out, "files": list(files)}


def write_all(out: Path, files: Mapping[str, bytes | str]) -> None:
    """Write the files; the card comes first, as by it an earlier export is known (UsageError)."""
    card = out / "README.md"
    again = card.is_file() and MADE in card.read_text(errors="replace")
    for name in () if again else files:
        if (out / name).exists():
            raise UsageError(f"--out {out}: {name} is there, not made by an export; choose another")
    for name, content in files.items():
        with checking(f"--out {out}"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out / name, content)


def folded(phi_D: Phi) -> Phi:
    """The head as one linear layer: at inference its BatchNorm is an affine map."""
    if "norm.mean" not in phi_D:
        return phi_D
    gain = phi_D["norm.weight"] / (phi_D["norm.var"] + 1e-6).sqrt()
    shift = phi_D["norm.bias"] - gain * phi_D["norm.mean"]
    return {"weight": phi_D["weight"] * gain, "bias": phi_D["bias"] + phi_D["weight"] @ shift}


def to_released(theta: Tensor, dim: int, scale: float) -> dict[str, Tensor]:
    """θ as the released program writes it. Its scale is always 1, so another one goes into B."""
    A_q, B_q, A_v, B_v = factors(theta, dim)
    parts = {"q.lora_A": A_q, "q.lora_B": scale * B_q, "v.lora_A": A_v, "v.lora_B": scale * B_v}
    return {
        f"base_model.model.blocks.{k}.attn.qkv.{part}.default.weight": tensor[k].clone()
        for k in range(len(theta))
        for part, tensor in parts.items()
    }


def to_peft(
    theta: Tensor, phi_D: Phi, dim: int, scale: float, base: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config and tensors, for a timm model whose `head` is the classifier."""
    A_q, B_q, A_v, B_v = factors(theta, dim)
    rank = A_q.shape[1]
    config = {
        "peft_type": "LORA", "base_model_name_or_path": base, "inference_mode": True,
        "r": 2 * rank, "lora_alpha": scale * 2 * rank, "lora_dropout": 0.0, "bias": "none",
        "target_modules": r"blocks\.\d+\.attn\.qkv", "task_type": None,
        "modules_to_save": ["head"] if phi_D else None,
    }  # fmt: skip
    tensors = {f"base_model.model.head.{name}": tensor for name, tensor in phi_D.items()}
    for k in range(len(theta)):
        name = f"base_model.model.blocks.{k}.attn.qkv.lora"
        B = torch.zeros(3 * dim, 2 * rank)
        B[:dim, :rank], B[2 * dim :, rank:] = B_q[k], B_v[k]  # q sees A_q alone, v sees A_v alone
        tensors |= {f"{name}_A.weight": torch.cat([A_q[k], A_v[k]]), f"{name}_B.weight": B}
    return config, tensors


def to_timm(
    loaded: Loaded, theta: Tensor, phi_D: Phi, name: str, pixels: tuple[Any, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of the merged network, as timm's folders have them."""
    arch, classes = loaded.arch, len(phi_D.get("bias", ()))
    args: dict[str, Any] = {"img_size": arch.image_size}
    if not arch.class_token:
        args |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
    if name == MINI:
        args |= {"patch_size": arch.patch_size, "embed_dim": arch.dim, "depth": arch.depth}
        args |= {"num_heads": arch.heads, "mlp_ratio": arch.mlp_ratio}
    about = {
        "architecture": name, "num_classes": classes, "model_args": args,
        "pretrained_cfg": {
            "input_size": [3, arch.image_size, arch.image_size], "mean": list(pixels[0]),
            "std": list(pixels[1]), "interpolation": "bicubic", "crop_pct": 224 / 256,
            "num_classes": classes, "classifier": "head",
        },
    }  # fmt: skip
    head = {f"head.{key}": tensor for key, tensor in phi_D.items()}
    state = merge(loaded.backbone, theta) | head
    return about, {key: tensor.contiguous() for key, tensor in state.items()}


def card(
    about: Mapping[str, Any], config: Mapping[str, Any], result: Mapping[str, Any], official: bool
) -> str:
    """README.md for whoever gets the files: what they are, how good, under which terms."""
    name, source = Path(about["dataset"]).name, SOURCES.get(about["dataset"])
    told = {
        "pretext": config["pretext"],
        **about,
        "made": MADE,
        "dataset": name,
        "licence": "unknown",
        "worth": "",
    }
    told |= {"terms": source.terms if source else "of whoever made it", "weights": "the user's own"}
    if official:
        told |= {"licence": "cc-by-nc-4.0", "weights": "CC BY-NC 4.0: no commercial use"}
    if result.get("test"):
        mean, n = fmean(result["test"]), len(result["test"])
        by = result["aligned_by"] or "nothing: direct PEFT"
        told["worth"] = (
            f"\n| test {result['metric']} | {mean:.2f} %, mean of {n} seeds ({result['unit']}) |"
            f"\n| learning rate | {result['lr']:g} |\n| aligned by | {by} |"
        )
    settings = {  # without what belongs to one machine, and paths by their last part
        name: Path(value).name if isinstance(value, str) else value
        for name, value in config.items()
        if name not in {*Machine.model_fields, "start"} - {"seed", "amp"}
    }
    return CARD.format(settings=json.dumps(settings, indent=1), **told)
