# %% [markdown]
# # 2. One backbone, two adapters
#
# BiSSLight never changes the pretrained network ψ. It trains two small sets of numbers that are
# added to it: θ_P for the pretext task and θ_D for the downstream task. This notebook shows what
# they are, and what the masked autoencoder (MAE) hides and fills in. Read it before `lora.py` and
# `mae.py`. It runs in seconds.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, without its widget

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import mae
from config import AlignConfig
from data import rng
from lora import factors, init_theta
from support.experiment import open_experiment

torch.set_num_threads(1)  # the network is too small for several threads
plt.rcParams.update({"figure.dpi": 70, "figure.constrained_layout.use": True})

# %% [markdown]
# ## 2.1 The network, and the images
#
# *Omniglot* (Lake, Salakhutdinov and Tenenbaum 2015) is handwriting: 20 people drew each character
# of many alphabets. Eight of these come with the program, as images of 28 x 28 pixels. Three
# alphabets are the *pool*, used without labels. Each of the other five is a task: which character
# is it? Training, validation and test images were drawn by different people.
#
# `vit_mini` is a small Vision Transformer (ViT): patches of 4 x 4 pixels, so 49 patches, and 4
# layers of width 64. A backbone ψ that was pretrained on the pool for 250 epochs comes with the
# program.

# %%
experiment = open_experiment(AlignConfig(backbone="vit_mini", dataset="omniglot:Greek"))
backbone, decoder = experiment.networks.backbone, experiment.networks.head
vit = backbone.vit
pool, task = experiment.pool, experiment.task
mean, std = (torch.tensor(x).view(3, 1, 1) for x in (pool.mean, pool.std))
print(f"ψ: {sum(x.numel() for x in vit.parameters()):,} numbers; pool: {len(pool.images):,} images")
print(f"Greek: {len(task.classes)} characters; images: {task.sizes()}")


def show(axes: plt.Axes, image: Tensor, removed: Tensor | None = None) -> None:
    """An image (3, 28, 28) with ink 1 and paper 0, as ink on paper; removed patches in orange."""
    paper = 1 - image.clamp(0, 1)
    if removed is not None:
        where = removed.view(7, 7).repeat_interleave(4, 0).repeat_interleave(4, 1)  # (28, 28)
        paper = torch.where(where, torch.tensor([0.90, 0.62, 0.0]).view(3, 1, 1), paper)
    axes.imshow(paper.permute(1, 2, 0), interpolation="nearest")
    axes.set(xticks=[], yticks=[])


figure, grid = plt.subplots(3, 12, figsize=(10, 2.9))
for column in range(12):
    show(grid[0, column], pool.images[column * 200])
    drawn = task.train.images[task.train.targets == column]
    show(grid[1, column], drawn[0])
    show(grid[2, column], drawn[1])
for axes, name in zip(grid[:, 0], ("pool", "Greek", "by another"), strict=True):
    axes.set_ylabel(name, fontsize=9)
figure.suptitle("Images of the pool; and the first 12 Greek characters, each drawn by two people")
plt.show()

# %% [markdown]
# ## 2.2 LoRA by hand
#
# In every attention layer, LoRA adds to the matrices of the queries and of the values the product
# of two thin matrices: $W_q \to W_q + s\, B_q A_q$ and $W_v \to W_v + s\, B_v A_v$, with A (r x
# dim) and B (dim x r).
#
# θ holds A_q, B_q, A_v, B_v of all layers as *one* matrix (K, 4 r dim): a row per layer, so a
# "block" of M-FAC is a row of θ. At the start B is 0, so θ changes nothing (line 2 of Algorithm 1).
# To see something, we fill θ with random numbers.

# %%
r = 8
images = (task.train.images[:16] - mean) / std
start = init_theta(backbone.depth, r, backbone.dim, rng(0, "lora"))
print("θ:", tuple(start.shape), "=", f"{start.numel():,} numbers")
print("B = 0 leaves the network as it is:", torch.equal(backbone(images, start), backbone(images)))

theta = 0.1 * torch.randn(start.shape, generator=rng(0, "theta"))
A_q, B_q, A_v, B_v = factors(theta, backbone.dim)  # views of θ, one matrix per layer
layer, attn = 0, vit.blocks[0].attn
x = torch.randn(5, 64, generator=rng(0, "x"))  # five tokens
W_q, W_k, W_v = attn.qkv.weight.chunk(3)  # each (64, 64)
# blank: by_lora, the adapted queries of x by thin products, and by_merging, by one full product
by_lora = x @ W_q.T + backbone.scale * (x @ A_q[layer].T) @ B_q[layer].T  # two thin products
by_merging = x @ (W_q + backbone.scale * B_q[layer] @ A_q[layer]).T  # one full product
# end of blank
print(f"one layer, by LoRA and merged: {(by_lora - by_merging).abs().max():.0e} apart")

# %% [markdown]
# `lora.merge` does this in all layers, and returns the weights of an ordinary ViT without LoRA.
#
# Two adapters on one backbone are simply two tensors:

# %%
theta_P = start.clone()
theta_D = theta
with torch.no_grad():
    moved = (backbone(images, theta_P) - backbone(images, theta_D)).norm() / backbone(images).norm()
print(f"the same ψ under θ_P and under θ_D: outputs differ by {moved:.0%}")

# %% [markdown]
# **Questions**
#
# 1. With B = 0 and A random, for which of the two is the gradient not 0 in the first step?
# 2. BA does not change if A is doubled and B is halved. What does that mean for the pull λ/2 |θ_P −
#    θ_D|² of Eq. 4, which compares A with A and B with B?
#
# <details><summary>Answers</summary>
#
# 1. For B. The gradient with respect to A is Bᵀ times another matrix, so it is 0 as long as B is 0.
# 2. Two adapters can give the same network and still be far apart for Eq. 4. Starting both from the
#    same θ (line 2) avoids this at the beginning; the paper speaks of "an artificial mismatch".
#
# </details>

# %% [markdown]
# ## 2.3 The masked autoencoder
#
# MAE removes most patches of an image. The backbone sees only those that stay; a small decoder,
# φ_P, predicts the pixels of the others ([the loss](exercises/sheet_2.md)). The paper removes 75 %.
#
# The only random numbers of a step are one per patch, called noise: the patches with the smallest
# numbers stay. `mae.masking` returns two tensors: `keep`, the numbers of the patches that stay, and
# `restore`, which says for each patch where it stands in the list "kept patches, then removed
# ones".

# %%
ratios = (0.25, 0.5, 0.75)
some = pool.images[100:2600:400]
noise = torch.rand(len(some), 49, generator=rng(2, "noise"))
figure, grid = plt.subplots(len(ratios), len(some), figsize=(8.4, 4.2))
for row, ratio in enumerate(ratios):
    keep, restore = mae.masking(noise, ratio)
    # blank: removed, true where a patch was removed, from keep and restore
    removed = restore >= keep.shape[1]  # (images, 49)
    # end of blank
    for column, image in enumerate(some):
        show(grid[row, column], image, removed[column])
    grid[row, 0].set_ylabel(f"ratio {ratio}\n{keep.shape[1]} of 49 stay", fontsize=9)
figure.suptitle("The same noise with three mask ratios (removed patches in orange)")
plt.show()

# %% [markdown]
# The backbone that comes with the program and its decoder were trained together on this loss (Eq.
# 1), for 5,000 steps. They have never seen Greek.

# %%
pretext = mae.MAE(backbone, decoder)
greek = (task.test.images[::21][:8] - mean) / std
unseen = pretext.prepare(greek, *pretext.draw(8, rng(1, "noise")))
with torch.no_grad():
    _, mask = pretext.predict(None, pretext.phi, unseen)  # there is no θ
    filled_in = pretext.reconstruct(None, pretext.phi, unseen)[1]
    some = (pool.images[::10] - mean) / std
    batch = pretext.prepare(some, *pretext.draw(len(some), rng(0, "noise")))
    value = float(pretext.loss(None, pretext.phi, batch))
patches = mae.patchify(some, 4)  # (images, 49, 48)
inked = float((patches.var(-1) > 0).float().mean())
print(f"L^P: {value:.2f}; {inked:.0%} of the patches have an edge of ink in them")

figure, grid = plt.subplots(3, 8, figsize=(8.4, 3.4))
rows = {"true": unseen.images, "visible": unseen.images, "filled in": filled_in}
for row, (name, found) in enumerate(rows.items()):
    for column in range(8):
        removed = mask[column] > 0 if name == "visible" else None
        show(grid[row, column], found[column] * std + mean, removed)
    grid[row, 0].set_ylabel(name)
figure.suptitle("Greek characters filled in")
plt.show()

# %% [markdown]
# The target is *standardised* within each patch, as in the paper. So the decoder predicts only the
# pattern of a patch; for the pictures, brightness and contrast are taken from the true patch. So a
# patch without ink stays blank, and only the *direction of the strokes* inside a patch is the
# network's own.
#
# A patch of one shade has the target 0. So predicting the mean of each patch gives a loss equal to
# the share of the other patches. The network's loss is clearly below this.
#
# **Questions**
#
# 1. Why does the decoder see the mask tokens, but the backbone does not?
# 2. The network was pretrained on Korean, Japanese and Sanskrit characters. Why can it fill in
#    Greek ones?
#
# <details><summary>Answers</summary>
#
# 1. With 75 % removed, pretraining is cheap. And in fine-tuning there are no mask tokens, so the
#    backbone should not depend on them.
# 2. What it has learnt is about strokes: they go on in their direction, bend and end. This is the
#    same in all alphabets.
#
# </details>
