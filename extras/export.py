"""`bisslight export`: an adapter in other programs' layouts, with a model card.

released   the file of the authors' program: a LoRA for q and one for v of every block, pickled
peft       HF peft's folder: one LoRA of rank 2 r on the fused qkv, equal to ours (`to_peft`)
timm       the merged network with its head, for timm.create_model("local-dir:timm")
"""

import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from config import FinetuneConfig, Record, read_table
from lora import Backbone, Phi, factors, merge
from support.checkpoints import RELEASED, load_adapter, load_backbone, vit_args, weights_of
from support.errors import UsageError, checking
from support.runs import read_json, sha256, write_atomic

MADE = "LoRA on q and v of every layer of a frozen Vision Transformer, made with BiSSLight."
CARD = """\
---
license: other
library_name: timm
tags: [image-classification, lora, bisslight]
---
# {backbone} for {dataset}, {stage}

{made}

Weights: sha256 {weights_sha256}, whose licence holds (the official MAE and I-JEPA files:
CC BY-NC 4.0). Pretext task {pretext}, rank {rank}. Test {metric}: {accuracy}.

```python
import timm
model = timm.create_model('local-dir:timm', pretrained=True)  # the merged network with its head
from peft import PeftModel  # or, on a timm model `base` of these weights and as many classes:
model = PeftModel.from_pretrained(base, 'peft')
```

`released/lora.pth` is for the program of the paper's authors.
"""


def export(
    run: Path, out: Path | None = None, *, seed: int | None = None, weights: Path | None = None
) -> Record:
    """Write a finished run's adapter in every layout; files of others are never replaced.

    `seed`: whose adapter is taken of a finetune run; `weights`: where the backbone's file is now.
    """
    out, moved = out or run / "export", {"weights": weights} if weights else {}
    cfg, theta, phi_D, about = open_run(run, seed, moved)
    result = next(map(read_json, run.glob("result.json")), {})
    backbone, _, arch = load_backbone(cfg)
    if sha256(path := weights_of(cfg)) != about["weights_sha256"]:
        raise UsageError(f"--weights {path}: {run} was made with others, see its env.json")
    phi_D, dim, scale = folded(phi_D), backbone.dim, backbone.scale
    released = io.BytesIO()
    torch.save(to_released(theta, dim, scale), released)
    lora, matrices = to_peft(theta, phi_D, dim, scale)
    merged, tensors = to_timm(backbone, arch, theta, phi_D, about)
    dataset, nth = Path(about["dataset"]).name, about.get("seed", 0) - cfg.seed
    accuracy = f"{result['test'][nth]:.2f} %" if "test" in result else "not measured"
    words = about | {"made": MADE, "dataset": dataset, "accuracy": accuracy}
    files: dict[str, bytes | str] = {
        "README.md": CARD.format(**words, metric=result.get("metric", "accuracy")),
        "released/lora.pth": released.getvalue(),
        "peft/adapter_config.json": json.dumps(lora, indent=1),
        "peft/adapter_model.safetensors": save(matrices),
        "timm/config.json": json.dumps(merged, indent=1),
        "timm/model.safetensors": save(tensors),
    }
    readme = out / "README.md"
    ours = readme.is_file() and MADE in readme.read_text(errors="replace")
    if out.exists() and any(out.iterdir()) and not ours:
        raise UsageError(f"--out {out}: holds files that are not an export's; choose another")
    for name, data in files.items():
        with checking(f"--out {out}"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out / name, data)
    return {"out": out, "files": list(files)}


def open_run(
    run: Path, seed: int | None, changes: Record
) -> tuple[FinetuneConfig, Tensor, Phi, Record]:
    """Settings of a run, but for `changes`; θ, φ_D and what the adapter's file says of them.

    The adapter: an align run's (φ_D is {}), or a finetune run's of a seed (None: its first).
    """
    whose = "*" if seed is None else seed
    files = [*run.glob("adapter.safetensors"), *run.glob(f"adapter-s{whose}.safetensors")]
    if not files:
        raise UsageError(f"{run}: holds no adapter-s{whose}.safetensors of a finished run")
    file = min(files, key=lambda file: (len(file.name), file.name))
    config = read_table(run / "config.json") | changes
    known = FinetuneConfig.model_fields.keys() & config.keys() - {"start"}
    with checking(str(run), "give a finished run of this edition"):
        return FinetuneConfig(**{name: config[name] for name in known}), *load_adapter(file)


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
    parts = {"qA": A_q, "qB": scale * B_q, "vA": A_v, "vB": scale * B_v}
    return {
        RELEASED.format(k, *part): tensor[k].clone()
        for k in range(len(theta))
        for part, tensor in parts.items()
    }


def to_peft(theta: Tensor, phi_D: Phi, dim: int, scale: float) -> tuple[Record, dict[str, Tensor]]:
    """The adapter's config and tensors, for a timm model whose `head` is the classifier."""
    A_q, B_q, A_v, B_v = factors(theta, dim)
    rank = A_q.shape[1]
    config = {
        "peft_type": "LORA", "base_model_name_or_path": None, "inference_mode": True,
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
    backbone: Backbone, arch: Any, theta: Tensor, phi_D: Phi, made: Record
) -> tuple[Record, dict[str, Tensor]]:
    """config.json and tensors of the merged network; `made` is what the adapter says of itself."""
    mean, std = made.get("channels", (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    classes = len(phi_D.get("bias", ()))
    about = {
        "architecture": "vit_base_patch16_224", "model_args": vit_args(arch),
        "num_classes": classes,
        "pretrained_cfg": {
            "input_size": [3, arch.image_size, arch.image_size], "mean": list(mean),
            "std": list(std), "interpolation": "bicubic", "crop_pct": 224 / 256,
            "num_classes": classes, "classifier": "head",
        },
    }  # fmt: skip
    state = merge(backbone, theta) | {f"head.{name}": tensor for name, tensor in phi_D.items()}
    return about, {name: tensor.contiguous() for name, tensor in state.items()}
