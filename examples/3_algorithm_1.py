# %% [markdown]
# # 3. Algorithm 1 by hand
#
# Here the whole training algorithm of BiSSLight is written out in about forty lines, with the
# paper's line numbers, from the pieces of this project. Then the same run is done with
# `bisslight.algorithm_1`, and the two are compared number by number. At the end we look at what the
# hypergradient does during a run.
#
# Read `bisslight.py` beside this page; it begins with a glossary of all letters. The notebook runs
# in less than a minute.

# %%
import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import torch

import mae
from bisslight import Hypergradient, Log, Passes, State, algorithm_1
from config import BACKBONES
from data import quilts, rng
from hypergradients import cg, identity
from lora import Backbone, Examples, downstream_loss, init_head, init_theta
from mfac import mfac
from support.checkpoints import build_head, build_vit, initialise
from support.optim import Group, Optimiser, Schedule, trainable

torch.set_num_threads(1)  # the network is too small for several threads
plt.rcParams.update({"figure.dpi": 75, "figure.constrained_layout.use": True})
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"

# %% [markdown]
# ## 3.1 The input of Algorithm 1 (line 1)
#
# We need a pretrained backbone ψ with its pretext head φ_P, a pretext task, a labelled task,
# batches of both, and two optimisers. ψ gets a short pretraining with the masked autoencoder (MAE)
# on drawn images, as in notebook 2.

# %%
arch = BACKBONES["vit_mini"]
vit, decoder = build_vit(arch), build_head(arch, "mae")
initialise([vit, decoder], "mae", rng(0, "init"))
backbone, pretext = Backbone(vit), mae.MAE(Backbone(vit), decoder, mask_ratio=0.3)
pool, task = quilts(0)
mean, std = (torch.tensor(x).view(3, 1, 1) for x in (pool.mean, pool.std))


def pretext_batches(size: int, purpose: str) -> Iterator[mae.Batch]:
    """Prepared batches of unlabelled images, without end, the same in every call."""
    for step in itertools.count():
        g = rng(0, purpose, step)
        chosen = pool.images[torch.randint(len(pool.images), (size,), generator=g)]
        yield pretext.prepare((chosen - mean) / std, *pretext.draw(size, g))


def labelled_batches(size: int) -> Iterator[Examples]:
    """Labelled batches without end, the same in every call."""
    for step in itertools.count():
        index = torch.randint(len(task.train.targets), (size,), generator=rng(0, "labelled", step))
        yield Examples((task.train.images[index] - mean) / std, task.train.targets[index])


passes = Passes()  # whole batches, full precision
weights = {name: x for name, x in vit.named_parameters() if name != "pos_embed"} | pretext.phi
opt = Optimiser([Group([*weights.values()], 2e-3, 0.05)], Schedule(150, 16, 0.0), (0.9, 0.999))
for batch in itertools.islice(pretext_batches(64, "pretrain"), 150):
    loss = partial(pretext.loss, None, pretext.phi)
    value, slopes = passes.value_and_gradients(loss, [*weights.values()], batch)
    opt.update([*weights.values()], slopes)
vit.requires_grad_(False)  # from here on, ψ is frozen
print(f"pretext loss after 150 steps of pretraining: {float(value):.2f}")

# %% [markdown]
# The settings, with the paper's values in the comments. The function `begin` makes everything that
# Algorithm 1 changes, so that each run below starts from the same numbers.

# %%
steps = SimpleNamespace(
    alternations=10,  # T: 500
    lower_steps=6,  # N_L: 20
    upper_steps=3,  # N_U: 8
    lam=1e-3,  # λ: 1e-3
)
loss_P, loss_D = pretext.loss, partial(downstream_loss, backbone)


def begin() -> State:
    """Line 2: θ_P = θ_D = a fresh θ; the two heads; an optimiser for each level."""
    theta = init_theta(backbone.depth, 8, backbone.dim, rng(0, "lora"))
    leaves = trainable({"P": theta, "D": theta})
    phi_P = trainable(pretext.phi)
    phi_D = trainable(init_head(backbone.dim, len(task.classes), rng(0, "head")))
    T = steps.alternations
    lower = Schedule(T * steps.lower_steps, 7, 1e-6)
    upper = Schedule(T * steps.upper_steps, 4, 1e-6)
    groups = [Group([leaves["P"]], 1e-2, 0.05), Group([*phi_P.values()], 1e-4, 0.05)]
    opt_P = Optimiser(groups, lower, (0.9, 0.95), clip=10)
    opt_D = Optimiser([Group([leaves["D"], *phi_D.values()], 3e-3, 0.05)], upper, (0.9, 0.999), 10)
    return State(leaves["P"], leaves["D"], phi_P, phi_D, opt_P, opt_D)


# %% [markdown]
# **Questions**
#
# 1. Why is ψ frozen only after the pretraining?
# 2. What differs between the states of two calls of `begin`?
# 3. Both levels have an optimiser of their own. Could they share one?
#
# <details><summary>Answers</summary>
#
# 1. Pretraining is Eq. 1, which trains the backbone itself. After it, BiSSLight trains only θ and
#    the heads. If ψ were not frozen, automatic differentiation would also store what it needs for
#    the gradients with respect to ψ, which are not used.
# 2. Nothing: the random numbers of each purpose have a seed of their own. So runs can be compared.
# 3. They could, with two groups of parameters: AdamW (Adam with decoupled weight decay) keeps its
#    running means for each parameter separately, and each group can have its own learning rate and
#    betas, which differ between the levels (App. C.3). But the levels step at different times, and
#    their schedules have different lengths, so two optimisers are simpler.
#
# </details>

# %% [markdown]
# ## 3.2 Algorithm 1
#
# `passes.gradients(loss, theta, phi, batch)` returns the loss and its gradients with respect to
# θ and to the head. `update` of an optimiser takes tensors and their gradients and changes the
# tensors in place.
#
# Three things are easy to get wrong:
#
# - the gradient that is stored in G (line 6) is ∇L^P, *before* λ(θ_P − θ_D) is added (line 7),
#   because M-FAC (Matrix-Free Approximate Curvature) adds λI to its matrix by itself;
# - g (line 12) is taken at θ_P, while the update (line 16) moves θ_D;
# - the head φ_D is moved by the sum of two gradients (line 15), one at θ_P and one at θ_D.


# %%
def by_hand(s: State, hypergrad: Hypergradient) -> Iterator[tuple[float, float]]:
    """Algorithm 1; yields |q| / |g| and the cosine of q and g after each upper step."""
    unlabelled, labelled = pretext_batches(32, "lower"), labelled_batches(32)
    for _ in range(steps.alternations):  # l.3
        G = []  # l.4
        for _ in range(steps.lower_steps):  # l.5
            batch = next(unlabelled)
            # blank: lines 6 to 9; line 6 appends to G
            _, grad_P, g_phi_P = passes.gradients(loss_P, s.theta_P, s.phi_P, batch)  # l.6, l.8
            G.append(grad_P)  # l.6
            g_P = grad_P + steps.lam * (s.theta_P - s.theta_D).detach()  # l.7
            s.opt_P.update([s.theta_P, *s.phi_P.values()], [g_P, *g_phi_P.values()])  # l.9
            # end of blank
        H = partial(passes.hessian, loss_P, s.theta_P, s.phi_P, batch)  # for CG alone
        inverse = hypergrad(torch.stack(G, 1), steps.lam, H)  # l.10: G is (K, N_L, p)
        for _ in range(steps.upper_steps):  # l.11
            examples = next(labelled)
            # blank: lines 12 and 13; call the results g and q
            _, g, g_phi_D_at_P = passes.gradients(loss_D, s.theta_P, s.phi_D, examples)  # l.12
            q = inverse(g)  # l.13
            # end of blank
            cosine = torch.cosine_similarity(q.flatten(), g.flatten(), 0)
            ratio = q.norm() / g.norm()
            # blank: lines 14 to 16, with the same examples
            _, grad_D, g_phi_D_at_D = passes.gradients(loss_D, s.theta_D, s.phi_D, examples)  # l.14
            g_D = q + grad_D  # l.14
            g_phi_D = [g_phi_D_at_P[name] + g_phi_D_at_D[name] for name in s.phi_D]  # l.15
            s.opt_D.update([s.theta_D, *s.phi_D.values()], [g_D, *g_phi_D])  # l.16
            # end of blank
            yield float(ratio), float(cosine)
    # l.17: the result is s.theta_P


s = begin()
numbers = list(by_hand(s, mfac))
print(f"{len(numbers)} upper steps; |q|/|g| of the last one: {numbers[-1][0]:.4f}")

# %% [markdown]
# ## 3.3 The same with the library
#
# `bisslight.algorithm_1` is a generator: it does one alternation, yields numbers to log, and waits.
# The caller decides what to do in between: print, validate, save, or stop.


# %%
def by_library(s: State, hypergrad: Hypergradient) -> list[Log]:
    """The numbers of all alternations."""
    batches: Any = pretext_batches(32, "lower"), labelled_batches(32)
    return list(algorithm_1(s, steps, pretext, loss_D, hypergrad, *batches))


s_library = begin()
logs = by_library(s_library, mfac)
logged = [pair for log in logs for pair in zip(log.q_over_g, log.cosine, strict=True)]
for name, mine, theirs in (
    ("θ_P", s.theta_P, s_library.theta_P),
    ("θ_D", s.theta_D, s_library.theta_D),
    ("|q|/|g| and cosine", torch.tensor(numbers), torch.tensor(logged)),
):
    difference = (mine - theirs).abs().max()
    print(f"{name:20} largest difference {difference:.0e}")
    assert difference < 1e-6

# %% [markdown]
# **Questions**
#
# 1. Which lines would you have to change to get BiSSL, the predecessor?
# 2. Line 9 moves θ_P, but line 10 uses gradients from before these moves. Why is this acceptable?
# 3. In which line do the labelled data influence θ_P?
#
# <details><summary>Answers</summary>
#
# 1. Lines 10 and 13 only: pass `cg` (conjugate gradients, CG) instead of `mfac`. Then H is used and
#    G is not.
# 2. It is an approximation (Sec. 3.1, "Recycling Lower-Level Gradients"). The paper argues that the
#    penalty keeps θ_P near θ_D, so that θ_P moves only a little in the N_L steps.
# 3. In no line directly. The labels move θ_D (line 16), and line 7 of the next alternation pulls
#    θ_P towards θ_D.
#
# </details>

# %% [markdown]
# ## 3.4 What the hypergradient does during a run
#
# The ratio |q|/|g| shows how much shorter q is than g, and the cosine shows whether the direction
# has changed. If both are 1, then q = g, and `identity` would have given the same. We run four
# hypergradients from the same start.

# %%
runs = {
    "M-FAC, λ = 1e-3": (mfac, 1e-3, BLUE, "-"),
    "M-FAC, λ = 1e-5": (mfac, 1e-5, GREEN, "-"),
    "CG as in BiSSL": (cg, 1e-3, ORANGE, "--"),
    "identity": (identity, 1e-3, RED, ":"),
}
figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True)
for name, (method, lam, colour, style) in runs.items():
    steps.lam = lam
    again = logs if name == "M-FAC, λ = 1e-3" else by_library(begin(), method)
    t = torch.arange(1, 1 + len(again))
    for ax, field in zip(axes.flat, ("q_over_g", "cosine", "loss_D_at_P", "distance"), strict=True):
        values = torch.tensor([getattr(log, field) for log in again])
        ax.plot(t, values.mean(1), style, color=colour, label=name, linewidth=2)
titles = ("|q| / |g|", "cosine of q and g", "L^D at θ_P", "|θ_P − θ_D|")
for ax, title in zip(axes.flat, titles, strict=True):
    ax.set_title(f"{title}, mean of an alternation's upper steps", fontsize=10)
for ax in axes[1]:
    ax.set_xlabel("alternation")
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# With the paper's λ = 1e-3, M-FAC keeps almost all of g here. Its matrix F is the mean of
# $g_i g_i^\top$. So in each block, no eigenvalue of F is larger than the mean squared length of the
# gradients of that block:

# %%
lengths = [passes.gradients(loss_P, s.theta_P, s.phi_P, batch)[1].square().sum(1)
           for batch in itertools.islice(pretext_batches(32, "lower"), 6)]  # fmt: skip
most = torch.stack(lengths).mean(0)
print("largest possible eigenvalue of F, by layer:", [f"{float(x):.1e}" for x in most])

# %% [markdown]
# Compare these numbers with λ: where they are much smaller than λ, λ(F + λI)⁻¹ is close to I. With
# λ = 1e-5 the curvature changes q, and θ_P and θ_D also move further apart, since the pull between
# them is weaker. This is a result for this small network, not for the paper's networks. In your own
# runs, look at |q|/|g| and at the cosine (`bisslight align` logs both) before you conclude that the
# curvature matters.
#
# In the lower plots, the three runs with λ = 1e-3 lie on top of each other, because their q are
# almost equal. `experiments/curvature.md` has settings in which q and g differ more.
#
# **Questions**
#
# 1. Could the cosine be negative with M-FAC? With CG?
# 2. Why is |q|/|g| at most 1 for M-FAC?
# 3. What would θ_P do with λ = 0 in line 7, and what with a very large λ?
#
# <details><summary>Answers</summary>
#
# 1. Not with M-FAC: λ(F + λI)⁻¹ is positive definite, so g·q > 0. The true Hessian can have
#    negative eigenvalues. If one of them is below −c, then H + cI (with CG's c = λ + 1) is not
#    positive definite, and the result of CG can point anywhere.
# 2. The eigenvalues f of F are at least 0, so the factors λ/(f + λ) lie between 0 and 1.
# 3. With λ = 0, θ_P would follow the pretext task alone, and the labels would have no influence on
#    it. With a very large λ it would be almost equal to θ_D, and the pretext task would have almost
#    no influence.
#
# </details>
