"""Adapters in other programs' layouts: the released program's LoRA files, HF peft, a merged timm model, a model card.

    released   {"base_model.model.blocks.k.attn.qkv.{q,v}.lora_{A,B}.default.weight"}: A (r, dim), B (dim, r), pickled
    peft       one LoRA of rank 2r on the fused qkv: A stacks A_q and A_v, B is block-diagonal, its k rows zero. Exact
    timm       the merged network with its head, a folder that timm.create_model("local-dir:FOLDER") opens

θ's rows A_q, B_qᵀ, A_v, B_vᵀ are defined in `lora`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from config import Arch, UsageError
from lora import Backbone, Phi, factors, from_factors, load_adapter, merge
from runtime import load_tensors, to_bytes, write_atomic

RELEASED = re.compile(r"base_model\.model\.blocks\.(\d+)\.attn\.qkv\.([qv])\.lora_([AB])\.default\.weight")
TIMM_NAMES = {  # architecture, and the tag of the official MAE encoder
    "vit_b16": ("vit_base_patch16_224", "mae"),
    "vit_l16": ("vit_large_patch16_224", "mae"),
    "vit_h14": ("vit_huge_patch14_224", "mae"),
}
JEPA = "vit_huge_patch14_gap_224"
MINI = "vit_tiny_patch16_224"  # any plain ViT of timm's; vit_mini's sizes are told to it as arguments
MADE = (
    "LoRA on q and v of every layer of a frozen Vision Transformer, made with BiSSLight."  # tells our card from others
)
TARGET = r"blocks\.\d+\.attn\.qkv"


def load_theta(start: Path, dim: int) -> tuple[Tensor, dict[str, str]]:
    """θ and its metadata from an align run, one of our adapter files, or a released LoRA file (no metadata)."""
    if start.is_dir():
        start = start / "adapter.safetensors"
    if start.suffix == ".safetensors":
        theta, _, about = load_adapter(start)
        return theta, about
    return from_released(load_tensors(start), start, dim), {}


def from_released(state: Any, path: Path, dim: int) -> Tensor:
    """θ from the released program's LoRA file (UsageError where keys or shapes are not of that layout)."""
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise UsageError(f"{path}: holds no LoRA tensors")
    found = {m.groups(): tensor.float() for key, tensor in state.items() if (m := RELEASED.fullmatch(str(key)))}
    depth = len(found) // 4
    wanted = {(str(k), part, matrix) for k in range(depth) for part in "qv" for matrix in "AB"}
    if len(found) != len(state) or found.keys() != wanted:
        other = next((key for key in state if not RELEASED.fullmatch(str(key))), "an incomplete set of layers")
        raise UsageError(f"{path}: is not a LoRA file on q and v of the released program's layout ({other})")
    rank = len(found["0", "q", "A"])
    if bad := [key for key, t in found.items() if t.shape != ((rank, dim) if key[2] == "A" else (dim, rank))]:
        shape = tuple(found[bad[0]].shape)
        raise UsageError(
            f"{path}: lora_{bad[0][2]} of block {bad[0][0]} is {shape}, rank {rank} on width {dim} is wanted"
        )
    A_q, B_q, A_v, B_v = (
        torch.stack([found[str(k), part, matrix] for k in range(depth)]) for part in "qv" for matrix in "AB"
    )
    return from_factors(A_q, B_q, A_v, B_v)


def to_released(theta: Tensor, dim: int, scale: float) -> dict[str, Tensor]:
    """θ as the released program writes it. Its scale is always 1, so another one goes into B."""
    A_q, B_q, A_v, B_v = factors(theta.detach().cpu(), dim)
    return {
        f"base_model.model.blocks.{k}.attn.qkv.{part}.lora_{matrix}.default.weight": tensor[k].contiguous().clone()
        for k in range(len(theta))
        for part, matrix, tensor in (("q", "A", A_q), ("q", "B", scale * B_q), ("v", "A", A_v), ("v", "B", scale * B_v))
    }


def folded(phi_D: Phi) -> Phi:
    """The head as one linear layer: at inference its BatchNorm is an affine map, and goes into weight and bias."""
    if "norm.mean" not in phi_D:
        return phi_D
    gain = phi_D["norm.weight"] / (phi_D["norm.var"] + 1e-6).sqrt()
    shift = phi_D["norm.bias"] - gain * phi_D["norm.mean"]
    return {"weight": phi_D["weight"] * gain, "bias": phi_D["bias"] + phi_D["weight"] @ shift}


def to_peft(
    theta: Tensor, phi_D: Phi, dim: int, scale: float, base: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(adapter_config, tensors) for HF peft, on a timm model whose `head` is the classifier."""
    A_q, B_q, A_v, B_v = factors(theta.detach().cpu(), dim)
    rank, phi_D = A_q.shape[1], folded(phi_D)
    config = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": base, "inference_mode": True, "r": 2 * rank,
        "lora_alpha": scale * 2 * rank, "lora_dropout": 0.0, "bias": "none", "target_modules": TARGET,
        "modules_to_save": ["head"] if phi_D else None,
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for k in range(len(theta)):
        name = f"base_model.model.blocks.{k}.attn.qkv.lora"
        B = torch.zeros(3 * dim, 2 * rank)
        B[:dim, :rank], B[2 * dim :, rank:] = B_q[k], B_v[k]  # q sees A_q alone, v sees A_v alone, k neither
        tensors |= {f"{name}_A.weight": torch.cat([A_q[k], A_v[k]]), f"{name}_B.weight": B}
    return config, tensors | {f"base_model.model.head.{name}": tensor.cpu() for name, tensor in phi_D.items()}


def to_timm(
    backbone: Backbone, theta: Tensor, phi_D: Phi, name: str, arch: Arch, channels: tuple[Any, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, state dict) of the merged network as timm's local-dir and hub layout have them."""
    phi_D = folded(phi_D)
    state = merge(backbone, theta) | {f"head.{key}": tensor for key, tensor in phi_D.items()}
    classes, side = len(phi_D["bias"]) if phi_D else 0, arch.image_size
    args: dict[str, Any] = {"img_size": side}
    if not arch.class_token:
        args |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
    if name == MINI:
        args |= {"patch_size": arch.patch_size, "embed_dim": arch.dim, "depth": arch.depth, "num_heads": arch.heads}
        args |= {"mlp_ratio": arch.mlp_ratio}
    about = {
        "architecture": name, "num_classes": classes, "model_args": args,
        "pretrained_cfg": {
            "input_size": [3, side, side], "mean": list(channels[0]), "std": list(channels[1]),
            "interpolation": "bicubic", "crop_pct": 224 / 256, "num_classes": classes, "classifier": "head",
        },
    }  # fmt: skip
    return about, {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}


def write_all(
    out: Path,
    backbone: Backbone,
    theta: Tensor,
    phi_D: Phi,
    name: str,
    official: bool,
    arch: Arch,
    channels: tuple[Any, Any],
    card: str,
    merged: bool,
) -> list[Path]:
    """Write every layout below `out`; returns the files."""
    base, tag = TIMM_NAMES.get(name, (MINI if name == "vit_mini" else name.removeprefix("timm:"), ""))
    if not arch.class_token and name == "vit_h14":
        base, tag = JEPA, ""
    known = f"timm/{base}.{tag}" if official and tag else None  # peft loads by hand: no other base has a public name
    config, tensors = to_peft(theta, phi_D, backbone.dim, backbone.scale, known)
    files: dict[str, bytes | str] = {
        "README.md": card,  # first: it says that what else is here was made by an export
        "released/lora.pth": to_bytes(to_released(theta, backbone.dim, backbone.scale)),
        "peft/adapter_config.json": json.dumps(config, indent=1),
        "peft/adapter_model.safetensors": save({k: v.contiguous() for k, v in tensors.items()}),
    }
    if merged:
        about, state = to_timm(backbone, theta, phi_D, base, arch, channels)
        files |= {"timm/config.json": json.dumps(about, indent=1), "timm/model.safetensors": save(state)}
    card_there = out / "README.md"
    again = card_there.is_file() and MADE in card_there.read_text(errors="replace")
    foreign = None if again else next((file for file in files if (out / file).exists()), None)
    if foreign:
        raise UsageError(f"--out {out}: {foreign} is there and was not made by an export, choose another --out")
    for file, content in files.items():
        try:
            (out / file).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: cannot be made ({error.strerror})") from error
        write_atomic(out / file, content)
    return [out / file for file in files]


def model_card(about: Mapping[str, str], config: Mapping[str, Any], result: Mapping[str, Any], terms: str) -> str:
    """A README.md for whoever receives the files: what they are, made of what, how good, under which terms."""
    official = str(config["model"]["weights"]).endswith(("_full.pth", "IN1K-vit.h.14-300e.pth.tar"))
    licence = "cc-by-nc-4.0" if official else "unknown"
    weights = "official MAE or I-JEPA checkpoint, CC BY-NC 4.0: no commercial use" if official else "the user's own"
    settings = {key: value for key, value in config.items() if key not in ("machine", "start")}  # paths of one machine
    settings["model"] = {**config["model"], "weights": Path(config["model"]["weights"]).name}
    lines = [
        "---", f"license: {licence}", "library_name: timm", "tags: [image-classification, lora, bisslight]", "---",
        f"# {about['backbone']} for {about['dataset']}, {about['stage']}", "",
        MADE, "",
        "| | |", "|---|---|",
        f"| backbone | {about['backbone']}, sha256 {about['weights_sha256']} |",
        f"| licence of the weights | {weights} |",
        f"| data | {about['dataset']}; terms: {terms} |",
        f"| rank, alpha | {about['rank']}, {about['alpha']} |",
        f"| pretext task | {about.get('pretext', config['model']['pretext'])} |",
    ]  # fmt: skip
    if "test" in result:
        values = result["test"]
        mean = sum(values) / len(values)
        lines.append(f"| test {result['metric']} | {mean:.2f} %, mean of {len(values)} seeds ({result['unit']}) |")
        lines.append(f"| learning rate | {result['lr']:g} |")
        lines.append(f"| aligned by | {result['aligned_by'] or 'nothing: direct PEFT'} |")
    lines += [
        "", "In this folder:", "", "```python", "import timm",
        "model = timm.create_model('local-dir:timm', pretrained=True)  # the merged network with its head",
        "# or, on a timm model `base` that holds exactly the backbone above and has the same number of classes:",
        "from peft import PeftModel", "model = PeftModel.from_pretrained(base, 'peft')", "```", "",
        "`released/lora.pth` is for the program of the paper's authors.", "",
        "All settings:", "", "```json", json.dumps(settings, indent=1), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)
