# %% [markdown]
# # 4. Your own pretext task
#
# BiSSLight works with any pretext task. Here you write one, a *jigsaw*: an image is cut into four
# pieces, the pieces are shuffled, and the network predicts where each one belongs. It takes about
# forty lines. Then it replaces the masked autoencoder (MAE) in the whole chain: align, fine-tune,
# compare.
#
# Read `examples/rotation.py`, an even shorter task, and `bisslight.PretextTask` beside this page.
# The notebook runs in about a minute. It writes all files to a temporary folder.

# %%
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

import cli
from align import align
from bisslight import Passes
from config import BACKBONES, AlignConfig, FinetuneConfig
from data import Pool, Task, rng
from evaluate import evaluate
from extras.pretrain import PretrainConfig, pretrain
from finetune import finetune
from lora import Backbone, Phi, init_theta
from support.checkpoints import build_vit

os.chdir(tempfile.mkdtemp())
torch.set_num_threads(1)  # the network is too small for several threads
plt.rcParams.update({"figure.dpi": 75, "figure.constrained_layout.use": True})
COLOURS = ("#0072B2", "#E69F00", "#777777")

# %% [markdown]
# ## 4.1 Images
#
# A jigsaw needs images in which each part has its place. We draw eight kinds of bright shapes on a
# dark background, in random colours and places, with noise: 1,200 unlabelled images (the pool), and
# a labelled task with 10 images per class for training, 10 for validation and 40 for the test.

# %%
NAMES = ["disc", "ring", "square", "frame", "plus", "cross", "triangle", "bars"]


def draw_shape(kind: int, g: torch.Generator) -> Tensor:
    """One image (3, 16, 16) in [0, 1]."""
    dx, dy, turn = (torch.rand(3, generator=g) - 0.5).tolist()
    size = 4.6 + 2 * float(torch.rand(1, generator=g))
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    x, y = x - 7.5 - 3 * dx, y - 7.5 - 3 * dy
    x, y = x + 0.2 * turn * y, y - 0.2 * turn * x
    radius, box = (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs())
    inside = [
        radius < size,
        (radius < size) & (radius > size - 2),
        box < size,
        (box < size) & (box > size - 2),
        (box < size) & (torch.minimum(x.abs(), y.abs()) < 1.5),
        (box < size) & ((x.abs() - y.abs()).abs() < 1.6),
        (y < size) & (y > -size) & (2 * x.abs() < y + size),
        (box < size) & ((y / 1.6).floor() % 2 == 0),
    ][kind]
    dark, bright = torch.rand(2, 3, 1, 1, generator=g)
    image = torch.where(inside, 0.6 + 0.4 * bright, 0.3 * dark)
    return (image + 0.06 * torch.randn(3, 16, 16, generator=g)).clamp(0, 1)


def split(each: int, part: str) -> list[tuple[Tensor, int]]:
    """(image, class) pairs, `each` of every class."""
    g = rng(0, "shapes", part)
    return [(draw_shape(kind, g), kind) for kind in range(8) for _ in range(each)]


g = rng(0, "shapes", "pool")
kinds = torch.randint(8, (1200,), generator=g).tolist()
pool = Pool(torch.stack([draw_shape(kind, g) for kind in kinds]))
task = Task.of(split(10, "train"), split(10, "val"), split(40, "test"), NAMES)

figure, axes = plt.subplots(2, 8, figsize=(9, 2.7))
for k, name in enumerate(NAMES):
    for row in range(2):
        axes[row, k].imshow(task.train.images[10 * k + row].permute(1, 2, 0))
        axes[row, k].set(xticks=[], yticks=[])
    axes[0, k].set_title(name, fontsize=10)
figure.suptitle("Two training images of each class")
plt.show()

# %% [markdown]
# ## 4.2 The task
#
# A pretext task is a class with two attributes and four methods. One step of Algorithm 1 calls them
# in this order:
#
# 1. `draw(n, rng)`: all random numbers of a step with n images, as tensors whose axis 0 is the
#    image. Nothing else may be random, so that a run can be repeated and resumed exactly;
# 2. `prepare(images, *drawn)`: turn images and random numbers into a batch, a NamedTuple of tensors
#    whose axis 0 is the image, so that it can be cut into micro-batches;
# 3. `loss(theta, phi, batch)`: the mean over the images. θ is passed on to the backbone, φ is the
#    head. The same arguments must always give the same value, because Hessian-vector products call
#    it again;
# 4. `after_step(theta_P)`: called after each lower step, for things that follow θ_P, such as the
#    teacher of I-JEPA (the joint-embedding predictive architecture). Here it does nothing.
#
# `phi` holds the start values of the head, `state` other tensors that a resumed run needs. The
# constructor gets the backbone, the settings of `align`, and a random generator.


# %%
class Batch(NamedTuple):
    """Shuffled images (B, 3, H, W), and which piece, 0 to 3, is at each place (B, 4)."""

    images: Tensor
    order: Tensor


class Jigsaw:
    """L^P: the cross entropy of a linear layer, φ_P, that predicts where each piece belongs."""

    def __init__(self, backbone: Backbone, settings: object, rng: torch.Generator) -> None:
        self.backbone = backbone
        weight = torch.randn(4, backbone.dim, generator=rng) / backbone.dim**0.5
        self.phi: Phi = {"weight": weight, "bias": torch.zeros(4)}
        self.state: dict[str, Tensor] = {}

    def draw(self, n: int, rng: torch.Generator) -> tuple[Tensor]:
        """The order of the pieces of n images."""
        return (torch.rand(n, 4, generator=rng).argsort(1),)

    def prepare(self, images: Tensor, order: Tensor) -> Batch:
        """Cut each image into 2 x 2 pieces and put them into their new places."""
        half = images.shape[-1] // 2
        pieces = images.unfold(2, half, half).unfold(3, half, half).flatten(2, 3)
        pieces = pieces.take_along_dim(order[:, None, :, None, None], 2)  # (B, 3, 4, half, half)
        top, bottom = (torch.cat([*pieces[:, :, i : i + 2].unbind(2)], -1) for i in (0, 2))
        return Batch(torch.cat([top, bottom], -2), order)

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        """Mean over the places and the images."""
        # blank: tokens of a piece averaged, the linear layer, the cross entropy with batch.order
        tokens = self.backbone(batch.images, theta)[:, 1:]  # (B, L, dim), without the class token
        half = math.isqrt(tokens.shape[1]) // 2
        places = tokens.unflatten(1, (2, half, 2, half)).mean((2, 4)).flatten(1, 2)  # (B, 4, dim)
        z = F.linear(places, phi["weight"], phi["bias"])  # (B, 4, 4)
        return F.cross_entropy(z.flatten(0, 1), batch.order.flatten())
        # end of blank

    def after_step(self, theta_P: Tensor | None) -> None:
        """Nothing follows θ_P."""


# %% [markdown]
# Before training, look at what the task does, and check two things that Algorithm 1 relies on: the
# same random numbers give the same batch, and the gradients do not depend on how a batch is cut
# into micro-batches.

# %%
backbone = Backbone(build_vit(BACKBONES["vit_mini"]))
jigsaw = Jigsaw(backbone, None, rng(0, "head"))
some = task.train.images[::10]
batch = jigsaw.prepare(some, *jigsaw.draw(8, rng(0, "order")))
assert torch.equal(batch.images, jigsaw.prepare(some, *jigsaw.draw(8, rng(0, "order"))).images)
theta = init_theta(backbone.depth, 8, backbone.dim, rng(0, "lora")).requires_grad_()
for tensor in jigsaw.phi.values():
    tensor.requires_grad_()
whole = Passes().gradients(jigsaw.loss, theta, jigsaw.phi, batch)
parts = Passes(micro_batch=3).gradients(jigsaw.loss, theta, jigsaw.phi, batch)
print(f"loss {whole.value:.2f}; guessing gives log 4 = {math.log(4):.2f}")
difference = (whole.theta - parts.theta).abs().max()
print(f"gradients in one batch of 8 and in parts of 3: {difference:.0e} apart")

figure, axes = plt.subplots(2, 8, figsize=(9, 2.7))
for k in range(8):
    for row, images in enumerate((some, batch.images)):
        axes[row, k].imshow(images[k].permute(1, 2, 0))
        axes[row, k].set(xticks=[], yticks=[])
    axes[1, k].set_xlabel("".join(str(i + 1) for i in batch.order[k].tolist()))
axes[0, 0].set_ylabel("image")
axes[1, 0].set_ylabel("shuffled")
figure.suptitle("The jigsaw (below: which piece is where, row by row)")
plt.show()

# %% [markdown]
# **Questions**
#
# 1. Could `prepare` choose the order itself, with `torch.rand`?
# 2. All four pieces of a disc look alike. How can the network know where they belong?
# 3. A contrastive loss compares the images of a batch with each other. Which of the checks fails?
#
# <details><summary>Answers</summary>
#
# 1. It would run, but a resumed run would see other orders, and several processes could not share a
#    batch. All randomness belongs in `draw`.
# 2. Each piece of a disc is bright towards one of its corners, and this corner is another one for
#    each place: the piece at the top left is bright towards its lower right corner.
# 3. The one with parts of 3. Such a class sets `mean_over_images = False`; then micro-batches are
#    refused, instead of silently giving other gradients.
#
# </details>

# %% [markdown]
# ## 4.3 Pretraining
#
# The backbone ψ is pretrained with MAE for a short time. Both pretext tasks start from it.

# %%
short: Any = {"epochs": 8, "warmup_epochs": 1, "base_lr": 8e-3, "mask_ratio": 0.5}
settings = PretrainConfig(backbone="vit_mini", pool="own", augment="none", **short)
pre = pretrain(settings, Path("pretrained"), pool=pool)
print(f"MAE's loss in the last epoch: {pre.loss:.2f}")

# %% [markdown]
# ## 4.4 Align and fine-tune, from Python
#
# `pretext="module:Class"` names the task. The class was defined on this page, and Python calls the
# module of a notebook or script `__main__`. The labelled task and the pool are passed as Python
# objects. In a run directory, `metrics.jsonl` has the numbers of every alternation. The head of the
# jigsaw starts at random, so its learning rate `phi_p_lr` is higher than that of MAE's pretrained
# decoder.

# %%
common: Any = {"backbone": "vit_mini", "weights": pre.weights, "augment": "none"}
bilevel: Any = {
    "dataset": "own", "pool": "own", "alternations": 12, "lower_steps": 8, "upper_steps": 4,
    "warmup": 1, "d_lr": 1e-2, "mask_ratio": 0.5,
}  # fmt: skip
tasks: dict[str, Any] = {
    "jigsaw": {"pretext": "__main__:Jigsaw", "phi_p_lr": 3e-2},
    "mae": {"pretext": "mae"},
}
for name, own in tasks.items():
    run = align(AlignConfig(**common, **bilevel, **own), Path(name), task=task, pool=pool)
    records = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    first, last = (sum(record["loss_P"]) / 8 for record in (records[1], records[-1]))
    print(f"{name:6} L^P from {first:.2f} to {last:.2f}, |q|/|g| {run.q_over_g:.3f}, "
          f"validation at θ_P {run.val_P.accuracy:.0f} %")  # fmt: skip

# %% [markdown]
# Guessing gives the jigsaw a loss of log 4 = 1.39; the loss after alignment is lower, so the
# network has learnt something about it. The pretext head is not used any more: only θ_P is kept.
#
# Then we fine-tune with a new head, from each of the two θ_P and once without alignment, with three
# seeds each. The fine-tuning is the same for both pretext tasks.

# %%
peft: Any = {"lr": 1e-2, "seeds": 3, "epochs": 15, "warmup_epochs": 2, "eval_epochs": 3}
for name in tasks:
    finetune(FinetuneConfig.from_align(Path(name), **peft), Path(f"{name}-tuned"), task=task)
direct = FinetuneConfig(**common, dataset="own", **peft)
finetune(direct, Path("direct"), task=task)
arms = evaluate([Path("jigsaw-tuned"), Path("mae-tuned"), Path("direct")]).arms
for arm in arms:
    print(f"{arm.arm:13} {arm.mean:.1f} % ± {arm.std:.1f}")

figure, axes = plt.subplots(figsize=(6.5, 2.6))
for y, (arm, colour) in enumerate(zip(arms, COLOURS, strict=True)):
    axes.plot(arm.accuracies, [y] * arm.seeds, "o", color=colour, markersize=9, alpha=0.8)
    axes.plot(arm.mean, y, "|", color="black", markersize=24)
labels = ["aligned with jigsaw", "aligned with MAE", "not aligned"]
axes.set(title="Test accuracy after fine-tuning (dots: seeds, bar: mean)", yticks=[0, 1, 2],
         yticklabels=labels, ylim=(-0.6, 2.6), xlabel="%")  # fmt: skip
plt.show()

# %% [markdown]
# This shows how to compare pretext tasks. It does not show which task is better: there are only
# three seeds, one drawn dataset and a small network, all seeds share one align run, and alignment
# took additional computing time. With three seeds per arm, a two-sided permutation test cannot give
# a p-value below 2 / 20 = 0.1.

# %% [markdown]
# **Questions**
#
# 1. How would you find out whether the labels in the upper level helped, or only the additional
#    training on the pretext task?
# 2. Alignment took computing time, too. How would you make the comparison fair?
# 3. Why does L^P of MAE hardly fall during alignment, while that of the jigsaw does?
#
# <details><summary>Answers</summary>
#
# 1. Add an arm that is aligned with `upper_steps=0`: it trains only the lower level.
# 2. Give fine-tuning without alignment as much time in total: more epochs or more learning rates.
#    The results contain `cpu_seconds` and `trial_seconds`.
# 3. ψ and the decoder were pretrained with MAE on the same images. The jigsaw is new to both.
#
# </details>

# %% [markdown]
# ## 4.5 The same from the command line
#
# In a terminal, save the class with its imports as `jigsaw.py` and name it:
#
# ```
# bisslight align --pretext jigsaw:Jigsaw --dataset folder:shapes --pool shapes ...
# ```
#
# The program looks for `jigsaw:Jigsaw` in the current folder; `path/to/jigsaw.py:Jigsaw` works as
# well. A dataset on disk is a folder that contains one folder of images for each class. `cli.run`
# is what the `bisslight` command calls; on this page, the module is `__main__` again.

# %%
for part, pairs in (("train", task.train), ("val", task.val), ("test", task.test)):
    for number, (image, kind) in enumerate(zip(*pairs, strict=True)):
        folder = Path("shapes", part, NAMES[kind])
        folder.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(folder / f"{number}.png")
command = """align --pretext __main__:Jigsaw --dataset folder:shapes --pool shapes --augment none
    --backbone vit_mini --weights pretrained --alternations 2 --lower-steps 3 --upper-steps 2
    --warmup 1 --probe-epochs 2 --phi-p-lr 1e-2 --out terminal --quiet"""
code = cli.run(command.split())
files = sorted(path.name for path in Path("terminal").glob("[a-z]*"))
print("exit code", code, "and these files:", *files)

# %% [markdown]
# **Questions**
#
# 1. Which of the files would `bisslight finetune --from terminal` need?
# 2. Change the task: the network shall predict the mean colour of a hidden quarter. Which methods
#    change?
# 3. The jigsaw's head starts at random. Why is this a problem for the first alternations, and how
#    could you avoid it?
#
# <details><summary>Answers</summary>
#
# 1. `config.json` (backbone, weights and data), `result.json` (it shows that the run is finished)
#    and `adapter.safetensors` (θ_P).
# 2. `draw` chooses the quarter, `prepare` hides it and stores its mean colour, `loss` is a squared
#    error, and `phi` has 3 outputs instead of 4.
# 3. Gradients through a random head say little about the task, and Eq. 5 assumes that the lower
#    level is near its solution. Train φ_P alone first, or pretrain with the jigsaw itself.
#
# </details>
