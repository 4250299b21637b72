# %% [markdown]
# # 2. One backbone, two adapters
#
# BiSSLight never changes the pretrained network ψ. It trains two small sets of numbers that are
# added to it: θ_P for the pretext task and θ_D for the downstream task. This notebook shows what
# these numbers are and what each task does with them:
#
# 1. what low-rank adaptation (LoRA) adds to the network, computed by hand and merged into it;
# 2. what the masked autoencoder (MAE) hides and fills in, after a little pretraining;
# 3. what I-JEPA (the joint-embedding predictive architecture for images) predicts instead.
#
# Read `lora.py`, `mae.py` and `ijepa.py` beside this page. The notebook runs in less than a minute,
# most of which is pretraining. The program draws the images: there is nothing to download.

# %%
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import ijepa
import mae
from bisslight import Passes
from config import BACKBONES, Pretext
from data import quilts, rng
from lora import Backbone, factors, init_theta, merge
from support.checkpoints import build_head, build_vit, initialise
from support.optim import Group, Optimiser, Schedule

torch.set_num_threads(1)  # the network is too small for several threads
plt.rcParams.update({"figure.dpi": 70, "figure.constrained_layout.use": True})
BLUE, ORANGE, GREEN, PINK, SKY, RED = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00",
)  # fmt: skip

# %% [markdown]
# ## 2.1 The network, and the images
#
# `vit_mini` is a small Vision Transformer (ViT): images of 16 x 16 pixels in patches of 4 x 4, so
# 16 patches; 4 layers of width 64. The *pixel quilts* have 4 x 4 tiles, each as large as a patch. A
# quilt shows two motifs. Its class is the layout, that is, which tiles are equal. It does not
# depend on which two motifs they show.

# %%
arch = BACKBONES["vit_mini"]
vit, decoder = build_vit(arch), build_head(arch, "mae")
initialise([vit, decoder], "mae", rng(0, "init"))  # positions are a fixed table
backbone = Backbone(vit)
pool, task = quilts(0)
mean, std = (torch.tensor(x).view(3, 1, 1) for x in (pool.mean, pool.std))
print(f"ψ: {sum(x.numel() for x in vit.parameters()):,} numbers; pool: {len(pool.images):,} images")

figure, axes = plt.subplots(2, 8, figsize=(10, 2.8))
for k in range(8):
    examples = task.train.images[task.train.targets == k]
    for row in range(2):
        axes[row, k].imshow(examples[row].permute(1, 2, 0), interpolation="nearest")
        axes[row, k].set(xticks=[], yticks=[])
    axes[0, k].set_title(f"class {k}", fontsize=9)
figure.suptitle("Two labelled quilts of each class (a tenth of their tiles is replaced at random)")
plt.show()

# %% [markdown]
# ## 2.2 LoRA by hand
#
# In every attention layer, queries and values are computed with matrices $W_q$ and $W_v$. LoRA adds
# to each the product of two thin matrices, A (r x dim) and B (dim x r):
#
# $$W_q \to W_q + s\, B_q A_q, \qquad W_v \to W_v + s\, B_v A_v, \qquad s = \alpha / r .$$
#
# θ holds A_q, B_q, A_v, B_v of all layers as *one* matrix (K, 4 r dim): a row per layer. This is
# why a "block" of M-FAC is simply a row of θ. At the start B is 0, so θ changes nothing (line 2 of
# Algorithm 1). To see something, we fill θ with random numbers.

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
# `merge` does this in all layers and returns the weights of an ordinary ViT without LoRA. Both
# networks must give the same tokens.

# %%
plain = build_vit(arch)
plain.load_state_dict(merge(backbone, theta))
plain.eval()
with torch.no_grad():
    difference = (plain.forward_features(images) - backbone(images, theta)).abs().max()
print(f"whole network, LoRA and merged: {difference:.0e} apart")

change = merge(backbone, theta)["blocks.0.attn.qkv.weight"] - attn.qkv.weight.detach()
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=[1, 2.2])
shown = axes[0].imshow(
    change, cmap="RdBu", vmin=-0.15, vmax=0.15, aspect="auto", interpolation="nearest"
)
axes[0].set(title="What θ adds to layer 1", yticks=[32, 96, 160], yticklabels=["q", "k", "v"],
            xlabel="input channel")  # fmt: skip
figure.colorbar(shown, ax=axes[0])
for part, name, colour, marker, size in (
    (change[:64], "query matrix", BLUE, "o", 7),
    (change[128:], "value matrix", ORANGE, "s", 3),
):
    singular = torch.linalg.svdvals(part).clamp_min(1e-8)
    axes[1].semilogy(range(1, 65), singular, marker, ms=size, color=colour, label=name)
axes[1].axvline(r + 0.5, color="black", linestyle=":", label=f"rank r = {r}")
axes[1].set(title="Singular values of the change", xlabel="number", ylabel="singular value")
axes[1].legend()
plt.show()

# %% [markdown]
# The keys are unchanged, and the change of the query and value matrices has rank 8. For the
# networks of the paper, with r = 64, θ has this many numbers (App. C.4):

# %%
for name in ("vit_mini", "vit_b16", "vit_l16", "vit_h14"):
    K, dim, rank = BACKBONES[name].depth, BACKBONES[name].dim, 8 if name == "vit_mini" else 64
    print(f"{name:9} {K} layers x 4 x rank {rank} x {dim} = {K * 4 * rank * dim:,}")

# %% [markdown]
# Two adapters on one backbone are simply two tensors. The network is a function of the image and of
# one of these tensors; this is what the paper means by attaching two modules:

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
# 3. Merging saves time at inference. Why does BiSSLight not merge during alignment?
#
# <details><summary>Answers</summary>
#
# 1. For B. The gradient with respect to A is Bᵀ times another matrix, so it is 0 as long as B is 0.
# 2. Two adapters can give the same network and still be far apart for Eq. 4. Starting both from the
#    same θ (line 2) avoids this at the beginning; the paper speaks of "an artificial mismatch".
# 3. There are two adapters on one ψ. If one of them were merged, a second copy of the network would
#    be needed for the other. LoRA saves just this memory.
#
# </details>

# %% [markdown]
# ## 2.3 The masked autoencoder
#
# MAE removes most patches of an image. The backbone sees only those that stay; a small decoder,
# φ_P, gets their tokens, puts a learned *mask token* in the other places, and predicts the pixels
# there. The loss is the squared error on the removed patches only. The paper removes 75 %.
#
# The only random numbers of a step are one number per patch, called noise: the patches with the
# smallest numbers stay. With the same noise, a step can be repeated exactly.

# %%
ratios = (0.3, 0.5, 0.75)
some = (pool.images[:5] - mean) / std
noise = torch.rand(5, 16, generator=rng(2, "noise"))


def show(ax: plt.Axes, image: Tensor) -> None:
    """One normalised image in its own colours."""
    ax.imshow((image * std + mean).clamp(0, 1).permute(1, 2, 0), interpolation="nearest")
    ax.set(xticks=[], yticks=[])


def hide(image: Tensor, removed: Tensor) -> Tensor:
    """An image (3, 16, 16) with its removed patches (16,) in orange."""
    where = removed.view(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    orange = (torch.tensor([0.90, 0.62, 0.0]).view(3, 1, 1) - mean) / std
    return torch.where(where, orange, image)


figure, axes = plt.subplots(len(ratios), 5, figsize=(7.5, 4.8))
for row, ratio in enumerate(ratios):
    keep, restore = mae.masking(noise, ratio)
    # blank: removed, true where a patch was removed, from keep and restore
    removed = restore >= keep.shape[1]  # (5, 16)
    # end of blank
    for column in range(5):
        show(axes[row, column], hide(some[column], removed[column]))
    axes[row, 0].set_ylabel(f"ratio {ratio}\n{keep.shape[1]} of 16 stay", fontsize=9)
figure.suptitle("The same noise with three mask ratios (removed patches in orange)")
plt.show()

# %% [markdown]
# Pretraining minimises this loss over ψ *and* φ_P (Eq. 1). This is the only place where ψ itself is
# trained. There is no θ here, so the loss gets None in its place. Algorithm 1 uses the same
# `Passes.value_and_gradients` and `Optimiser`. We remove only half of the patches,
# because these images have only 16.

# %%
pretext = mae.MAE(backbone, decoder, mask_ratio=0.5)
trained = {name: x for name, x in vit.named_parameters() if name != "pos_embed"} | pretext.phi
for tensor in trained.values():
    tensor.requires_grad_()
steps, batch_size = 300, 64
opt = Optimiser([Group([*trained.values()], 2e-3, 0.05)], Schedule(steps, 31, 0.0), (0.9, 0.999))
loss = partial(pretext.loss, None, pretext.phi)


def batch_of(step: int, n: int) -> mae.Batch:
    """Images and noise of a step."""
    g = rng(0, "pretrain", step)
    chosen = pool.images[torch.randint(len(pool.images), (n,), generator=g)]
    return pretext.prepare((chosen - mean) / std, *pretext.draw(n, g))


losses = []
unseen = pretext.prepare(images[:6], *pretext.draw(6, rng(1, "noise")))
before = pretext.reconstruct(None, pretext.phi, unseen)[1]
for step in range(steps):
    batch = batch_of(step, batch_size)
    value, gradients = Passes().value_and_gradients(loss, [*trained.values()], batch)
    opt.update([*trained.values()], gradients)
    losses.append(float(value))
masked, after = pretext.reconstruct(None, pretext.phi, unseen)

figure, axes = plt.subplots(figsize=(7, 2.8))
axes.plot(losses, color=BLUE, alpha=0.4, label="a step")
smooth = torch.tensor(losses).unfold(0, 30, 1).mean(-1)
axes.plot(range(15, 15 + len(smooth)), smooth, color=BLUE, label="mean of 30 steps")
axes.axhline(1, color="black", linestyle=":", label="predicting each patch's mean")
axes.set(title="Pretraining vit_mini with MAE", xlabel="step", ylabel="L^P")
axes.legend()
plt.show()

# %%
figure, axes = plt.subplots(4, 6, figsize=(8, 5.6))
_, mask = pretext.predict(None, pretext.phi, unseen)
rows = {
    "true": unseen.images,
    "visible": torch.stack([hide(*pair) for pair in zip(unseen.images, mask > 0, strict=True)]),
    "filled in\nbefore": before,
    "filled in\nafter": after,
}
for row, (name, found) in enumerate(rows.items()):
    for column in range(6):
        show(axes[row, column], found[column])
    axes[row, 0].set_ylabel(name)
figure.suptitle("Reconstructions of quilts that were not in the pool")
plt.show()

# %% [markdown]
# The target is *standardised* within each patch (mean 0, standard deviation 1), as in the paper. So
# the decoder predicts only the pattern of a patch; for the pictures, brightness and contrast are
# taken from the true patch. Predicting the mean of each patch gives a loss of 1.
#
# After these few steps the loss stays near 0.5. The pictures show why: the network has found out
# *which two motifs* an image shows, and fills every removed patch with a grey mixture of both. It
# has not learnt yet the layout, that is, *which of the two* belongs where. This takes longer (the
# demo's backbone was pretrained for 1,860 steps). For it the network has to compare tiles, and so
# does the labelled task.
#
# **Questions**
#
# 1. Why does the decoder see the mask tokens, but the backbone does not?
# 2. These images are labelled ones, with random tiles. Can a random tile be filled in correctly?
# 3. Take two motifs that differ in half of their pixels. Why does mixing them halve the squared
#    error?
# 4. Why is a mask ratio of 0.75 hard for a quilt?
#
# <details><summary>Answers</summary>
#
# 1. With 75 % removed, the backbone processes only a quarter of the patches, so pretraining is
#    cheap. And in fine-tuning there are no mask tokens, so the backbone should not depend on them.
# 2. No. It is independent of all other tiles, so nothing visible says which motif it shows.
# 3. The mixture is right where the motifs agree, and lies half-way between them where they differ.
#    Standardised pixels are about +1 and −1, so half of the pixels have an error of 0 and the other
#    half a squared error of (±1)² = 1.
# 4. Four visible tiles often do not determine the layout, and may not even show both motifs. The
#    demo uses 0.3.
#
# </details>

# %% [markdown]
# ## 2.4 I-JEPA: blocks instead of scattered patches
#
# I-JEPA does not predict pixels. A *teacher*, which is ψ with a slowly moving average of θ_P,
# computes tokens of the whole image. The student, ψ with θ_P, sees only one large block (the
# *context*). From its tokens, the predictor φ_P has to predict the teacher's tokens in four smaller
# blocks (the *targets*). Patches of the targets are removed from the context. The paper's ViT-H/14
# has a grid of 16 x 16 patches:

# %%
settings = Pretext()  # I-JEPA's official values are the defaults
grid = 16
contexts, targets = ijepa.multiblock(settings, grid, 4, rng(0, "blocks"))
print("(images, blocks, patches) of the context:", tuple(contexts.shape))
print("(images, blocks, patches) of the targets:", tuple(targets.shape))
figure, axes = plt.subplots(1, 4, figsize=(10, 3.1))
for ax, context, blocks in zip(axes, contexts, targets, strict=True):
    picture = torch.full((grid * grid, 3), 0.93)
    colours = [SKY, ORANGE, GREEN, PINK, RED]
    for patches, colour in zip([context[0], *blocks], colours, strict=True):
        picture[patches] = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    ax.imshow(picture.view(grid, grid, 3))
    ax.set(xticks=[], yticks=[])
names = ["context", "target 1", "target 2", "target 3", "target 4"]
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
figure.legend(handles, names, loc="outside lower center", ncols=5)
figure.suptitle("Context and targets of I-JEPA, four images (grey: neither)")
plt.show()

# %% [markdown]
# All targets of a batch have the same size, and so have all contexts before the targets are
# removed. Afterwards all contexts are cut to the number of patches of the shortest one; patches at
# the bottom of the image are dropped. So a batch is one tensor without padding. Where targets
# overlap, the picture shows the last one.
#
# The teacher follows θ_P slowly, with momentum m: θ_T ← m θ_T + (1 − m) θ_P. The paper starts with
# m = 0.9995 (App. D.1); here m rises linearly to 1. Suppose that θ_P jumps once at step 0. After
# how many steps has θ_T moved half of the way?

# %%
for first in (0.996, 0.9995):
    kept, step = 1.0, 0
    while kept > 0.5:
        kept *= ijepa.momentum(step, first, 10_000)  # 500 alternations of 20 steps
        step += 1
    print(f"momentum from {first}: half of a jump at step 0 has arrived after {step} steps")

# %% [markdown]
# **Questions**
#
# 1. Suppose that the teacher were the student itself. What would be the easiest way to make the
#    loss 0?
# 2. Why does this project store the teacher as a third θ?
# 3. A moving average of A and of B is not the moving average of BA. When does this matter?
#
# <details><summary>Answers</summary>
#
# 1. To give the same tokens for every image. This is called collapse. The slow teacher, through
#    which no gradient flows, prevents it in practice.
# 2. ψ is frozen, so student and teacher differ only in θ. A second network would double the memory.
# 3. When both A and B change much over the time in which the average follows. Exercise 4.2 is
#    about it.
#
# </details>
