"""Golden runs: small runs from the command line to the adapter, and what the first program made of them.

`RUNS` names the command lines, `read` looks at the files that a run leaves, `differences` compares. Nothing of the
project is imported but the command line itself, so a program that is written anew can be held to the same numbers:
names of flags and files may be adapted here (in `RUNS`, `command` and the readers), numbers never.

How the recording in data/golden was made: `OMP_NUM_THREADS=1 PYTHONPATH=. python tests/record_golden.py` of the first
program (commit 112a6b5), Python 3.11, torch 2.14.1, torchvision 0.29.1, timm 1.0.31, one thread of an x86-64 CPU with
AVX-512. It is not made anew. The images are drawn here by integer arithmetic and saved as PNG, so they are the same everywhere; every run is
seeded.

    pretrain   backbone.pth: every tensor of every network; the loss of each epoch
    align      adapter.safetensors: theta_P; all numbers of every alternation, the probe's and the validations' scores
    finetune   adapters of all seeds: theta and head; the curve of every rate and seed, the rate, the epochs, the test;
               and the logits of the test images, computed here from the files by torch, torchvision and timm alone

Long arrays are kept as `condensed`: some of their entries, and sums over all of them with irregular weights.
"""

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torchvision import transforms as T

import cli

RECORDED = Path(__file__).parent / "data" / "golden"
TOLERANCE = 1e-5  # of an array's norm: runs are short, so that another CPU's rounding stays below (measured: 2e-6)
OF_TENSORS = 5e-5  # AdamW takes a full step where a gradient is all rounding, so a single entry may differ (8e-6)
Numbers = dict[str, Any]  # arrays by name

# --- the runs --------------------------------------------------------------------------------------------------------

SHAPES = "--dataset folder:{data}/shapes"
ALIGN = "--alternations 3 --lower-steps 3 --upper-steps 2 --p-batch 7 --d-batch 6 --probe-epochs 2 --warmup 1"
ALIGN += " --eval-every 2 --rank 4"
PEFT = "--epochs 3 --warmup-epochs 1 --batch 10 --rank 4"
MAE = "--backbone vit_mini --weights {runs}/pretrain-mae"
JEPA = (
    "--backbone vit_mini --pretext ijepa --weights {runs}/pretrain-ijepa --targets 6 --min-keep 8"
)
QUILTS = "--backbone vit_mini --weights {runs}/pretrain-quilts --dataset quilts"

RUNS = {  # name: command line; {data} is the folder of drawn images, {runs} that of the runs, --out {runs}/NAME
    # MAE at another size than vit_mini's own, random crops of the pool; its backbone serves the runs on images
    "pretrain-mae": "pretrain --pool {data}/pool --backbone vit_mini --image-size 24 --patch-size 6 --epochs 3"
    " --warmup-epochs 1 --batch 16 --base-lr 5e-3 --seed 3",
    # I-JEPA with settings under which contexts come out as small as --min-keep
    "pretrain-ijepa": "pretrain --pool {data}/pool --backbone vit_mini --pretext ijepa --epochs 3 --warmup-epochs 1"
    " --batch 16 --base-lr 5e-3 --targets 6 --min-keep 8 --seed 4",
    "pretrain-quilts": "pretrain --pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 1300"
    " --base-lr 1e-3",
    # what the others leave at values that hide it: ends of schedules, decay, betas, the teacher's momentum
    "pretrain-mae-ends": "pretrain --pool {data}/pool --backbone vit_mini --image-size 24 --patch-size 6 --epochs 2"
    " --warmup-epochs 1 --batch 11 --base-lr 5e-3 --min-lr 1e-3 --weight-decay 0.3 --beta2 0.9 --augment none"
    " --mask-ratio 0.5",
    "pretrain-ijepa-ends": "pretrain --pool {data}/pool --backbone vit_mini --pretext ijepa --epochs 2 --batch 22"
    " --warmup-epochs 1 --warmup-from 0.5 --base-lr 5e-3 --min-lr 1e-3 --weight-decay 0.5 --final-weight-decay 2"
    " --beta2 0.9 --ema 0.5 --min-crop 0.6 --seed 2",
    "align-mae-mfac": f"align {MAE} {SHAPES} --pool {{data}}/pool {ALIGN} --drop-path 0.2 --seed 1",
    "align-mae-cg": f"align {MAE} --dataset folder:{{data}}/flat --pool folder:{{data}}/pool {ALIGN} --hypergrad cg"
    " --cg-iterations 3 --cg-damping 0.1 --min-crop 0.5 --data-seed 5",
    "align-mae-identity": f"align {QUILTS} {ALIGN} --hypergrad identity --mask-ratio 0.5",
    "align-mae-pieces": f"align {MAE} {SHAPES} --pool {{data}}/pool {ALIGN} --drop-path 0.1 --micro-batch 3"
    " --partition matrix --augment none --lam 0.01",
    "align-mae-batchnorm": f"align {MAE} {SHAPES} --pool {{data}}/pool {ALIGN} --head batchnorm --drop-path 0.3"
    " --phi-p-lr 3e-3 --p-weight-decay 0.2 --d-weight-decay 0.3 --clip 0.05",
    "align-ijepa-mfac": f"align {JEPA} {SHAPES} --pool {{data}}/pool {ALIGN} --partition global",  # BatchNorm head
    "align-ijepa-cg": f"align {JEPA} {SHAPES} --pool {{data}}/pool {ALIGN} --hypergrad cg --head linear --micro-batch 4"
    " --ema 0.8 --cg-prefactor lambda",
    "align-ijepa-identity": f"align {JEPA} --dataset quilts {ALIGN} --hypergrad identity --base encoder"
    " --drop-path 0.1",
    "align-released-mfac": f"align --preset as-released {MAE} {SHAPES} --pool {{data}}/pool {ALIGN}",
    "align-released-cg": f"align --preset as-released {MAE} {SHAPES} --pool {{data}}/pool {ALIGN} --hypergrad cg",
    # a random decoder at a seed that is not 0, the ends of both schedules, momentum and decay at the upper level
    "align-mae-ends": f"align {MAE} --dataset folder:{{data}}/flat --pool {{data}}/pool {ALIGN} --decoder random"
    " --seed 2 --end-lr 1e-3 --d-optimizer sgd --d-lr 0.02 --d-weight-decay 2 --alpha 10 --d-interpolation bilinear",
    "finetune-direct": f"finetune {MAE} {SHAPES} {PEFT} --grid 1e-3,1e-2 --grid-seeds 2 --seeds 3 --drop-path 0.2"
    " --seed 10",
    "finetune-from": f"finetune --from {{runs}}/align-mae-mfac {PEFT} --grid 1e-3,1e-2 --seeds 3 --eval-epochs 2",
    "align-auto": f"align {MAE} {SHAPES} --pool {{data}}/pool {ALIGN} --d-lr 0.00667",
    "arms/s0": f"align {QUILTS} {ALIGN} --seed 0",
    "arms/s1": f"align {QUILTS} {ALIGN} --seed 1",
    "finetune-arms": f"finetune --from {{runs}}/arms {PEFT} --lr 5e-3 --seeds 2 --batch 30 --weight-decay 0.5",
    "finetune-ijepa": f"finetune --from {{runs}}/align-ijepa-mfac {PEFT} --lr 5e-3 --seeds 2",
    "finetune-released": f"finetune --preset as-released --from {{runs}}/align-released-mfac {PEFT} --lr 5e-2"
    " --seeds 2",
    "finetune-ends": f"finetune {MAE} --dataset folder:{{data}}/flat {PEFT} --alpha 12 --end-lr 2e-3 --optimizer sgd"
    " --lr 3e-2 --seeds 2 --seed 7 --data-seed 5 --eval-epochs 3 --weight-decay 0.5 --min-crop 0.7",
    "align-voc": f"align {MAE} --dataset voc07 --partial --data-root {{data}} --pool {{data}}/pool {ALIGN}",
    "finetune-voc": f"finetune --from {{runs}}/align-voc {PEFT} --lr 1e-2 --seeds 2",
    "finetune-voc-bce": f"finetune {MAE} --dataset voc07 --partial --data-root {{data}} {PEFT} --voc-loss bce"
    " --voc-difficult positive --lr 1e-2 --seeds 1",
}
NEEDS = {  # what is to be run before
    name: [other for other in RUNS if "{runs}/" + other + " " in line + " "]
    + (["arms/s0", "arms/s1"] if "{runs}/arms " in line else [])
    for name, line in RUNS.items()
}


def command(line: str) -> None:
    """Run one command line in this process."""
    assert cli.run(line.split()) == 0, line


def run(name: str, data: Path, runs: Path) -> Path:
    """The directory of a run, which is made if it is not there, after those that it needs."""
    is_old = [int(number) for number in torch.__version__.split(".")[:2]] < [2, 14]
    if "ijepa" in name and is_old and not draws_as_recorded():
        pytest.skip("this torch draws the weights that I-JEPA starts from in another way")
    out, line = runs / name, RUNS[name]
    runs.mkdir(parents=True, exist_ok=True)
    mark = runs / f"{name.replace('/', '-')}.lock"  # other test processes may want the same run
    with mark.open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not (out / "result.json").exists():
            for other in NEEDS[name]:
                run(other, data, runs)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                command(line.format(data=data, runs=runs) + f" --device cpu --quiet --out {out}")
            finally:
                torch.set_num_threads(threads)
    return out


def draws_as_recorded() -> bool:
    """Whether torch draws truncated normal numbers as it did when the runs were recorded.

    torch 2.6 does not, 2.14 does; one that comes later and does not would fail. The other runs
    agree with either.
    """
    first = torch.nn.init.trunc_normal_(torch.empty(1), generator=torch.Generator().manual_seed(0))
    return bool(torch.isclose(first, torch.tensor(1.5410), atol=1e-3))


# --- drawn images ----------------------------------------------------------------------------------------------------

VOC = "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant"
VOC += " sheep sofa train tvmonitor"


def draw(path: Path, kind: int, number: int) -> None:
    """A picture of stripes, whose direction and width tell its kind; whole numbers only, and saved without loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = 26 + 3 * (number % 5), 38 - 4 * (number % 4)
    y, x = np.mgrid[:height, :width]
    across = ((1, 0), (0, 1), (1, 1), (2, -1))[kind % 4]
    stripes = (across[0] * x + across[1] * y + 5 * number) // (3 + kind) % 2
    noise = (x * 7919 + y * 104_729 + number * 1_299_709 + kind * 15_485_863) % 89
    colour = np.stack([(40 + 60 * ((number + c) % 3)) * stripes + noise for c in range(3)], -1)
    Image.fromarray((colour + 10).clip(0, 255).astype(np.uint8)).save(path, "PNG")  # VOC's .jpg too


def make_data(root: Path) -> None:
    """shapes/ with all three parts, flat/ with class folders alone, pool/ without classes, a tiny VOC2007."""
    for kind, name in enumerate(("dots", "lines", "rings", "waves")):
        for part, start, size in (("train", 0, 6), ("val", 20, 4), ("test", 40, 6)):
            for number in range(start, start + size):
                draw(root / "shapes" / part / name / f"{number}.png", kind, number)
        for number in range(9):
            draw(root / "flat" / name / f"{name}{number}.png", kind, number + 60)
    for number in range(44):
        draw(
            root / "pool" / ("deep/er" if number % 3 else "") / f"{number}.png",
            number % 5,
            number + 100,
        )
    sets = root / "VOCdevkit" / "VOC2007" / "ImageSets" / "Main"
    sets.mkdir(parents=True, exist_ok=True)
    for part, first, count in (("train", 1, 14), ("val", 31, 8), ("test", 51, 12)):
        names = {number: f"{number:06d}" for number in range(first, first + count)}
        sets.joinpath(f"{part}.txt").write_text("".join(f"{name}\n" for name in names.values()))
        for number, name in names.items():
            draw(root / "VOCdevkit" / "VOC2007" / "JPEGImages" / f"{name}.jpg", number % 4, number)
        for k, thing in enumerate(VOC.split()):
            rows = [f"{name} {voc_label(number, k):2d}\n" for number, name in names.items()]
            sets.joinpath(f"{thing}_{part}.txt").write_text("".join(rows))


def voc_label(number: int, k: int) -> int:
    """1, -1, or 0 for a difficult one; the kind of stripes decides class by class, but for some."""
    if (number + 2 * k) % 13 == 0:
        return 0
    return 1 if (number + k) % 4 == 0 or (number * 7 + k) % 11 == 0 else -1


def read(name: str, out: Path, data: Path) -> Numbers:
    """All numbers of a finished run, by name."""
    kind = RUNS[name].split()[0]
    return {"pretrain": read_pretrain, "align": read_align, "finetune": read_finetune}[kind](
        name, out, data
    )


def read_pretrain(name: str, out: Path, data: Path) -> Numbers:
    saved = torch.load(out / "backbone.pth", weights_only=True)
    networks = {key: value for key, value in saved.items() if isinstance(value, dict)}
    numbers = {
        network: condensed(torch.cat([tensors[key].flatten() for key in sorted(tensors)]))
        for network, tensors in networks.items()
    }
    return numbers | {"loss": np.array([line["loss"] for line in metrics(out)])}


ALTERNATION = (
    "loss_P",
    "pull",
    "loss_D_at_P",
    "loss_D_at_D",
    "norm_P",
    "norm_D",
    "distance",
    "q_over_g",
    "cosine",
)
NOW = {"pull": "proximal"}  # renamed since


def read_align(name: str, out: Path, data: Path) -> Numbers:
    probe, *alternations = metrics(out)
    numbers = {k: np.array([line[NOW.get(k, k)] for line in alternations]) for k in ALTERNATION}
    numbers["distance"] = numbers["distance"][:, -1]
    for level in ("P", "D"):
        scores = [line[f"val_{level}"] for line in alternations if f"val_{level}" in line]
        numbers[f"val_{level}"] = np.array([[score["accuracy"], score["loss"]] for score in scores])
    numbers["probe"] = np.array([probe["probe_val"]["accuracy"], probe["probe_val"]["loss"]])
    numbers["d_lr"] = np.array([json.loads((out / "result.json").read_text())["d_lr"]])
    return numbers | {"theta": condensed(adapter(out / "adapter.safetensors").tensors["theta"])}


def read_finetune(name: str, out: Path, data: Path) -> Numbers:
    result = json.loads((out / "result.json").read_text())
    keys = ("test", "test_loss", "test_per_class")
    tests = {key: np.array(result[key]) for key in keys if None not in result[key]}
    numbers = tests | {"lr": np.array([result["lr"]]), "epochs": np.array(result["epochs"])}
    for place in sorted(out.glob("lr*-s*")):
        trial = json.loads((place / "result.json").read_text())
        curve = [
            [e["loss"], *((e["val"]["accuracy"], e["val"]["loss"]) if e["val"] else ())]
            for e in metrics(place)
        ]
        numbers[f"curve/{trial['lr']:g}/{trial['seed']}"] = np.concatenate(curve)
    for file in sorted(out.glob("adapter-s*.safetensors")):
        made, seed = adapter(file), file.stem.rpartition("-s")[2]
        for key, tensor in made.tensors.items():
            numbers[f"{key}/{seed}"] = condensed(tensor)
        if "quilts" not in made.about["dataset"]:
            numbers[f"logits/{seed}"] = condensed(predicted(name, made, data))
    return numbers


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


class Adapter(NamedTuple):
    """A file of LoRA tensors, with its head."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def adapter(file: Path) -> Adapter:
    with safe_open(file, framework="pt") as opened:
        about = json.loads(opened.metadata()["bisslight"])
        return Adapter({key: opened.get_tensor(key) for key in opened.keys()}, about)  # noqa: SIM118


def condensed(values: Tensor) -> Any:
    """All of a short array; of a long one every n-th entry, and eight sums over all entries with irregular weights."""
    x = values.detach().double().flatten().numpy()
    if x.size <= 300:
        return x
    step = x.size // 250 | 1  # odd, so that it gets to all columns of a matrix
    weights = np.cos(np.outer(np.sqrt([2, 3, 5, 7, 11, 13, 17, 19]), np.arange(x.size)))
    return np.concatenate([x[::step], weights @ x / np.sqrt(x.size)])


@torch.no_grad()
def predicted(name: str, made: Adapter, data: Path) -> Tensor:
    """Logits of the test images: plain timm on the backbone's file, the adapter's LoRA added to its weights."""
    place = data.parent / "runs" / ("pretrain-ijepa" if "ijepa" in name else "pretrain-mae")
    weights = place / "backbone.pth"
    saved, arch = torch.load(weights, weights_only=True), made.about["arch"]
    state = saved["model"] if "model" in saved else saved["target_encoder"]
    state = {key.removeprefix("module."): tensor for key, tensor in state.items()}
    vit = VisionTransformer(
        img_size=arch["image_size"], patch_size=arch["patch_size"], embed_dim=arch["dim"], depth=arch["depth"],
        num_heads=arch["heads"], mlp_ratio=arch["mlp_ratio"], num_classes=0, class_token=arch["class_token"],
        global_pool="token" if arch["class_token"] else "avg", fc_norm=False,
    ).eval()  # fmt: skip
    dim, scale = arch["dim"], float(made.about["alpha"]) / int(made.about["rank"])
    theta = made.tensors["theta"].view(arch["depth"], 4, -1, dim)
    for k, (A_q, B_qT, A_v, B_vT) in enumerate(theta):
        state[f"blocks.{k}.attn.qkv.weight"][:dim] += scale * B_qT.T @ A_q
        state[f"blocks.{k}.attn.qkv.weight"][2 * dim :] += scale * B_vT.T @ A_v
    vit.load_state_dict({key: state[key] for key in vit.state_dict()})
    how = T.InterpolationMode.BILINEAR if "released" in name else T.InterpolationMode.BICUBIC
    side = arch["image_size"]
    see = T.Compose([
        T.Resize(round(side * 256 / 224), how), T.CenterCrop(side), T.ToTensor(),
        T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    images = torch.stack([see(Image.open(file).convert("RGB")) for file, _ in asked(name, data)])
    x = vit.forward_head(vit.forward_features(images), pre_logits=True)
    head = {key.removeprefix("head."): tensor for key, tensor in made.tensors.items()}
    if "norm.mean" in head:
        x = (x - head["norm.mean"]) / (head["norm.var"] + 1e-6).sqrt() * head["norm.weight"] + head[
            "norm.bias"
        ]
    return x @ head["weight"].T + head["bias"]


def asked(name: str, data: Path) -> list[tuple[Path, int]]:
    """Test images of a run in their order, with their class (-1 where they have several)."""
    if "voc" in name:
        root = data / "VOCdevkit" / "VOC2007"
        return [
            (root / "JPEGImages" / f"{n}.jpg", -1)
            for n in (root / "ImageSets/Main/test.txt").read_text().split()
        ]
    flat = "/flat" in RUNS[name]
    folders = sorted((data / "flat" if flat else data / "shapes" / "test").iterdir())
    files = [fifth_of(folder) if flat else sorted(folder.iterdir()) for folder in folders]
    return [(file, k) for k, of_class in enumerate(files) for file in of_class]


def fifth_of(folder: Path) -> list[Path]:
    """The test images of a class without a split on disk, --data-seed 5: the fifth with the smallest digests."""

    def drawn(file: Path) -> str:
        return hashlib.sha256(f"5/test/{folder.name}/{file.name}".encode()).hexdigest()

    files = sorted(folder.iterdir(), key=drawn)
    return sorted(files[: len(files) // 5])


def recorded(name: str) -> Numbers:
    with np.load(RECORDED / f"{name.replace('/', '-')}.npz") as file:
        return {key: file[key] for key in file.files}


def apart(found: Any, wanted: Any) -> float:
    """Distance of two arrays over the norm of what is wanted; infinite where their shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    return float(np.linalg.norm(found - wanted)) / max(float(np.linalg.norm(wanted)), 1e-12)


def differences(found: Numbers, wanted: Numbers) -> dict[str, float]:
    """What is missing, new, or further away than its tolerance; empty where all agrees."""
    every = {k: apart(found[k], wanted[k]) if k in found else float("inf") for k in wanted}
    every |= {key: float("inf") for key in found.keys() - wanted.keys()}
    return {key: far for key, far in every.items() if not far <= tolerance(key)}


def tolerance(key: str) -> float:
    """Of trained tensors, and of all else."""
    trained = key.partition("/")[0] in ("theta", "model", "encoder", "target_encoder", "predictor")
    return OF_TENSORS if trained or key.startswith("head.") else TOLERANCE
