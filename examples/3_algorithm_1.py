# %% [markdown]
# # 3. Algorithm 1 by hand
#
# Here Algorithm 1 is written out with the paper's line numbers, from the pieces of this project.
# Then the same run is done with `bisslight.algorithm_1`, and the two are compared number by number.
# The second half is a lab: in which regime does the curvature change anything, and does it change
# it in the right way?
#
# Read `bisslight.py` beside this page; it begins with a glossary of all letters. The notebook runs
# in less than a minute.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, without its widget

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import mae
from bisslight import Hypergradient, Log, Map, Passes, Phi, State, algorithm_1
from config import BACKBONES, AlignConfig
from data import rng
from hypergradients import cg, exact, identity
from lora import Backbone, Examples, downstream_loss, init_head, init_theta
from mfac import mfac
from support import omniglot
from support.checkpoints import build_head, build_vit, initialise, load_backbone
from support.optim import Group, Optimiser, Schedule, trainable

torch.set_num_threads(1)  # the network is too small for several threads
plt.rcParams.update({"figure.dpi": 75, "figure.constrained_layout.use": True})
BLUE, ORANGE, GREEN, PINK, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"

# %% [markdown]
# ## 3.1 The input of Algorithm 1 (line 1)
#
# We need a pretrained backbone ψ with its pretext head φ_P, a pretext task, a labelled task,
# batches of both, and two optimisers. ψ and φ_P come with the program: `vit_mini`, pretrained with
# the masked autoencoder (MAE) on handwritten characters (notebook 2). The labelled task is to tell
# the 24 Greek characters apart.

# %%
cfg = AlignConfig(backbone="vit_mini", dataset="omniglot:Greek")
pretrained = load_backbone(cfg)
backbone, decoder = pretrained.backbone, pretrained.head
pretext = mae.MAE(backbone, decoder)  # mask ratio 0.75
pool, task = omniglot.pool(), omniglot.task("Greek", 0)
unlabelled_images = (torch.as_tensor(pool.images) - pool.mean[0]) / pool.std[0]
labelled_images = (torch.as_tensor(task.train.images) - pool.mean[0]) / pool.std[0]
passes = Passes()  # whole batches, full precision


def pretext_batches(size: int, purpose: str, of: mae.MAE = pretext) -> Iterator[mae.Batch]:
    """Prepared batches of unlabelled images, without end, the same in every call."""
    for step in itertools.count():
        g = rng(0, purpose, step)
        index = torch.randint(len(unlabelled_images), (size,), generator=g)
        yield of.prepare(unlabelled_images[index], *of.draw(size, g))


def labelled_batches(size: int) -> Iterator[Examples]:
    """Labelled batches without end, the same in every call."""
    for step in itertools.count():
        index = torch.randint(len(labelled_images), (size,), generator=rng(0, "labelled", step))
        yield Examples(labelled_images[index], task.train.targets[index])


print(f"{len(unlabelled_images):,} unlabelled images, {len(labelled_images)} labelled ones")

# %% [markdown]
# The settings, with the paper's values in the comments. The function `begin` makes everything that
# Algorithm 1 changes, so that each run below starts from the same numbers.

# %%
steps = SimpleNamespace(
    alternations=6,  # T: 500
    lower_steps=5,  # N_L: 20
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
    lower = Schedule(T * steps.lower_steps, 6, 1e-6)
    upper = Schedule(T * steps.upper_steps, 4, 1e-6)
    groups = [Group([leaves["P"]], 1e-2, 0.05), Group([*phi_P.values()], 1e-4, 0.05)]
    opt_P = Optimiser(groups, lower, (0.9, 0.95), clip=10)
    opt_D = Optimiser([Group([leaves["D"], *phi_D.values()], 1e-2, 0.05)], upper, (0.9, 0.999), 10)
    return State(leaves["P"], leaves["D"], phi_P, phi_D, opt_P, opt_D)


# %% [markdown]
# **Questions**
#
# 1. `load_backbone` freezes ψ (`requires_grad_(False)`). Why?
# 2. What differs between the states of two calls of `begin`?
#
# <details><summary>Answers</summary>
#
# 1. BiSSLight trains only θ and the heads. If ψ were not frozen, automatic differentiation would
#    also store what it needs for the gradients with respect to ψ, which are not used.
# 2. Nothing: the random numbers of each purpose have a seed of their own. So runs can be compared.
#
# </details>

# %% [markdown]
# ## 3.2 Algorithm 1
#
# `passes.gradients(loss, theta, phi, batch)` returns the loss and its gradients with respect to θ
# and to the head. `update` of an optimiser changes tensors in place.
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
# 2. In which line do the labelled data influence θ_P?
#
# <details><summary>Answers</summary>
#
# 1. Lines 10 and 13 only: pass `cg` (conjugate gradients, CG) instead of `mfac`. Then H is used and
#    G is not.
# 2. In no line directly. The labels move θ_D (line 16), and line 7 of the next alternation pulls
#    θ_P towards θ_D.
#
# </details>

# %% [markdown]
# ## 3.4 In which regime does the curvature change anything?
#
# The last upper step above had |q|/|g| = 0.999 or more: q is g, and `identity`, which ignores the
# curvature, would have given the same run. Why? M-FAC's matrix F is the mean of $g_i g_i^\top$. So
# in each block, no eigenvalue of F is larger than the mean squared length of the stored gradients:

# %%
for size in (64, 8, 1):
    batches = itertools.islice(pretext_batches(size, "lower"), 20)
    found = [passes.gradients(loss_P, s.theta_P, s.phi_P, batch).theta for batch in batches]
    largest = torch.stack(found).square().sum(2).mean(0)  # (K,), one number for each layer
    print(f"batches of {size:2}: no eigenvalue of F above", [f"{x:.0e}" for x in largest.tolist()])

# %% [markdown]
# Compare with λ = 1e-3: where F is much smaller than λ, λ(F + λI)⁻¹ is nearly I. M-FAC acts where
# gradients are larger (smaller batches, since averaging shrinks the noise; a higher rank; or
# another pretext task: with the jigsaw of notebook 4, |q|/|g| is 0.98), or where λ is smaller. We
# try batches and λ from the same start, with the paper's N_L = 20.
#
# Two more numbers tell why |q|/|g| is what it is ([derived
# here](../docs/math.md#how-much-can-curvature-do)): `share` is the part of |g|² in the span of the
# stored gradients, and `removed` says how much of that part the inverse takes away. A hypergradient
# of our own measures them.

# %%
columns: dict[str, list[float]] = {}  # the numbers of all upper steps, by name


def inside(G: Tensor, x: Tensor) -> float:
    """The squared length of x's projection on the span of G, layer by layer, added up."""
    Q, _ = torch.linalg.qr(G.mT)  # (K, p, N_L), the columns are orthonormal
    return float((Q.mT @ x[..., None]).square().sum())


def watched(G: Tensor, lam: float, H: object) -> Map:
    inverse = mfac(G, lam)

    def inverse_watched(g: Tensor) -> Tensor:
        q = inverse(g)
        columns["share"].append(inside(G, g) / float(g.square().sum()))
        columns["removed"].append(1 - inside(G, q) / inside(G, g))
        return q

    return inverse_watched


lab = SimpleNamespace(alternations=4, lower_steps=20, upper_steps=4, lam=1e-3)
REGIMES = [(64, 1e-3, BLUE), (8, 1e-3, GREEN), (64, 1e-5, ORANGE), (8, 1e-5, RED)]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
print("batch  λ      |q|/|g|  cosine  share of |g|²  removed of it")
for size, lam, colour in REGIMES:
    lab.lam = lam
    batches: Any = pretext_batches(size, "lower"), labelled_batches(32)
    columns = {"q_over_g": [], "cosine": [], "share": [], "removed": []}
    for log in algorithm_1(begin(), lab, pretext, loss_D, watched, *batches):
        columns["q_over_g"] += log.q_over_g
        columns["cosine"] += log.cosine
    means = [sum(values) / len(values) for values in columns.values()]
    ratio, cosine, share, removed = means
    print(f"{size:5}  {lam:.0e}  {ratio:7.4f} {cosine:7.4f}  {share:13.1%}  {removed:13.1%}")
    label = f"batch {size}, λ = {lam:.0e}"
    axes[0].plot(columns["q_over_g"], "o-", markersize=3, color=colour, label=label)
    axes[1].plot(columns["removed"], "o-", markersize=3, color=colour, label=label)
axes[0].set(title="|q| / |g|", xlabel="upper step")
axes[1].set(title="removed of the part of g that M-FAC can reach", xlabel="upper step")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# **Questions**
#
# 1. Why is |q|/|g| at most 1 for M-FAC? Could the cosine of q and g be negative? And with CG?
# 2. About a quarter of |g|² lies in the span of 20 stored gradients; for a random g it would be 20
#    of 2,048 numbers, 1 %. What does this say about the two losses?
# 3. A smaller λ makes the curvature visible. What else does λ do in Algorithm 1?
#
# <details><summary>Answers</summary>
#
# 1. The factors λ/(κ + λ) lie between 0 and 1, since no eigenvalue κ of F is below 0, and g·q is
#    above 0. The true Hessian can have negative eigenvalues. If one lies below −c (for CG, c is λ +
#    1), the result of CG can point anywhere.
# 2. Their gradients have directions in common. These are the only ones in which M-FAC can act.
# 3. It is the pull between θ_P and θ_D (line 7). With λ = 1e-5 the labels reach θ_P a hundred times
#    more slowly. So λ cannot be chosen for the sake of M-FAC alone.
#
# </details>

# %% [markdown]
# ## 3.5 Beside the exact hypergradient
#
# M-FAC acts at batch 8 and λ = 1e-5. Does it do what Eq. 5 asks for? For that we need the dense
# Hessian, so a smaller network with LoRA of rank 1: θ has 2 x 128 = 256 numbers. We pretrain it on
# the same pool for a moment, train θ and φ_P on the lower level, and then compute H on 256 images.

# %%
TINY = BACKBONES["vit_mini"]._replace(
    dim=32, depth=2, heads=2, image_size=28, patch_size=7, decoder_dim=32, decoder_heads=2
)
vit, small_decoder = build_vit(TINY), build_head(TINY, "mae")
initialise([vit, small_decoder], "mae", rng(0, "init"))
small = Backbone(vit)
small_task = mae.MAE(small, small_decoder, mask_ratio=0.5)


def train(tensors: list[Tensor], theta: Tensor | None, phi: Phi, count: int) -> float:
    """Lower L^P for some steps; the loss of the last one."""
    opt = Optimiser([Group(tensors, 3e-3, 0.0)], Schedule(count, 20, 0.0), (0.9, 0.95))
    for batch in itertools.islice(pretext_batches(64, f"train {count}", small_task), count):
        loss = partial(small_task.loss, theta, phi)
        value, slopes = passes.value_and_gradients(loss, tensors, batch)
        opt.update(tensors, slopes)
    return float(value)


weights = [x for name, x in vit.named_parameters() if name != "pos_embed"]
before = train([*weights, *small_task.phi.values()], None, small_task.phi, 400)  # Eq. 1
vit.requires_grad_(False)
theta = trainable({"θ": init_theta(2, 1, 32, rng(0, "lora"))})["θ"]
phi_P = trainable(small_task.phi)
after = train([theta, *phi_P.values()], theta, phi_P, 200)  # the lower level, without its pull
print(f"L^P after pretraining {before:.2f}, after the lower level {after:.2f}")


# %%
small_loss = partial(downstream_loss, small)
phi_D = trainable(init_head(32, len(task.classes), rng(0, "head")))
g = passes.gradients(small_loss, theta, phi_D, next(labelled_batches(240))).theta  # (2, 128)
stored = {}  # by batch size: G (2, 80, 128)
for size in (64, 1):
    batches = itertools.islice(pretext_batches(size, "G", small_task), 80)
    found = [passes.gradients(small_task.loss, theta, phi_P, batch).theta for batch in batches]
    stored[size] = torch.stack(found, 1)
many = next(pretext_batches(256, "H", small_task))
product = passes.hessian(small_task.loss, theta, phi_P, many)
H = torch.stack([product(unit.view(2, 128)).flatten() for unit in torch.eye(256)]).double()
values = torch.linalg.eigvalsh(H)
lowest = float(values[0])
print(f"eigenvalues of H: {lowest:.4f} to {values[-1]:.4f}; {(values < 0).sum()} of 256 below 0")
for size, G in stored.items():
    F = torch.block_diag(*(rows.double().T @ rows.double() / len(rows) for rows in G))
    alike = (F * H).sum() / (F.norm() * H.norm())
    factor = alike * H.norm() / F.norm()
    print(f"batches of {size:2}: eigenvalues of F up to {torch.linalg.eigvalsh(F)[-1]:.0e}; "
          f"cosine of the matrices F and H {alike:.2f}; {factor:.0f} F is most like H")  # fmt: skip

# %% [markdown]
# We compare all methods with `exact`, over λ. In the grey, λ is smaller than the size of the lowest
# eigenvalue of H, so H + λI has a negative one. There θ_P can be a saddle of the lower level, but
# not the minimum that Eq. 4 asks for.


# %%
def product_with_H(u: Tensor) -> Tensor:
    """H u."""
    return (H @ u.double().flatten()).view_as(u).to(u)


def dense() -> Map:
    """What the methods call `H`."""
    return product_with_H


def q_exact(lam: float) -> Tensor:
    """Eq. 5."""
    return exact(stored[1], lam, dense)(g)


def cosine_with_exact(q: Tensor, lam: float) -> float:
    """1: the direction of Eq. 5."""
    return float(torch.cosine_similarity(q.flatten(), q_exact(lam).flatten(), 0))


lams = torch.logspace(-6, 0, 19).tolist()
METHODS = {
    "CG, 30 steps, no damping": (partial(cg, iterations=30, damping=0.0), 1, "black", ":"),
    "CG as in BiSSL": (cg, 1, ORANGE, "--"),
    "M-FAC, batches of 64": (mfac, 64, BLUE, "-"),
    "M-FAC, batches of 1": (mfac, 1, GREEN, "-"),
    "identity": (identity, 1, RED, ":"),
}
figure, axes = plt.subplots(1, 3, figsize=(12, 4))
exact_ratios = [float(q_exact(lam).norm() / g.norm()) for lam in lams]
axes[0].loglog(lams, exact_ratios, color="black", linewidth=2.5, label="exact (Eq. 5)")
for name, (method, size, colour, style) in METHODS.items():
    found = [method(stored[size][:, :20], lam, dense)(g) for lam in lams]
    ratios = [float(q.norm() / g.norm()) for q in found]
    cosines = [cosine_with_exact(q, lam) for q, lam in zip(found, lams, strict=True)]
    axes[0].loglog(lams, ratios, style, color=colour, linewidth=2, label=name)
    axes[1].semilogx(lams, cosines, style, color=colour, linewidth=2)
for ax in axes[:2]:
    ax.axvspan(lams[0], -lowest, color="#dddddd")
axes[0].set(title="|q| / |g|, N_L = 20", xlabel="λ")
axes[1].set(title="cosine with the exact q, N_L = 20", xlabel="λ", ylim=(-0.6, 1.05))

lam = 2 * abs(lowest)  # H + λI is positive definite, and the curvature still acts
factors = torch.logspace(0, 6, 13).tolist()
at_g = cosine_with_exact(g, lam)
ratio = q_exact(lam).norm() / g.norm()
print(f"at λ = {lam:.3f}: exact |q|/|g| {ratio:.3f}; cosine with g {at_g:.4f}")
for size, colour in ((64, BLUE), (1, GREEN)):
    for count, style in ((5, ":"), (20, "-"), (80, "--")):
        G = stored[size][:, :count]
        cosines = [cosine_with_exact(mfac(G, lam / factor)(g), lam) for factor in factors]
        best = max(range(len(factors)), key=lambda i: cosines[i])
        label = f"batches of {size}, N_L = {count}"
        axes[2].semilogx(factors, cosines, style, color=colour, linewidth=2, label=label)
        print(f"{label:24} cosine {cosines[0]:.4f}; the best, {cosines[best]:.4f}, "
              f"with {factors[best]:.0f} F in place of F")  # fmt: skip
axes[2].axhline(at_g, color=RED, linestyle=":")
axes[2].set(title=f"cosine at λ = {lam:.3f}, M-FAC with more of F", xlabel="factor of F")
axes[0].legend(fontsize=7)
axes[2].legend(fontsize=7)
plt.show()

# %% [markdown]
# **Left and middle.** Right of the grey, M-FAC, CG as in BiSSL and `identity` lie on top of each
# other, at |q|/|g| = 1, and CG without damping is the exact answer. Near the edge of the grey the
# exact q can be *longer* than g: where H has an eigenvalue κ between −λ and 0, the factor λ/(κ + λ)
# is above 1. M-FAC can only shorten g. It does so far to the left, deep in the grey, where no
# method has the direction of Eq. 5.
#
# **Right.** Is F just too small? L^P is a *mean* over pixels, and each stored gradient a mean over
# images; both make F smaller in comparison with H. So we give M-FAC F times a factor (this is M-FAC
# with λ divided by it). The dotted red line is `identity`. The best factor raises the cosine by
# less than 0.004, and a larger one lowers it. As matrices, F and H have a cosine of about 0.2: here
# not only the size of F is wrong.
#
# So on this network M-FAC acts where it should not, and where it should act it does not. This is
# one small network with LoRA of rank 1, trained for seconds, at one θ. It says nothing about the
# paper's networks, for which the paper gives neither |q|/|g| nor such a comparison.
# [exact.md](../experiments/exact.md) does the same for `vit_mini`, and
# [curvature.md](../experiments/curvature.md) has regimes on drawn images, where batch 8 or rank 64
# alone are enough to make |q|/|g| about 0.9; on handwriting they are not (0.996, 0.997).
#
# **Questions**
#
# 1. Half of the eigenvalues of H are negative. Suppose that L^P were convex in the weight
#    matrices W. Why could H, which is taken with respect to A and B in W + BA, still have
#    negative eigenvalues?
# 2. The output above says by which factor F is too small. Why is the factor of batches of 64
#    about 64 times that of single images?
# 3. Line 9 moves θ_P after each stored gradient, so line 10 *recycles* gradients of other θ_P.
#    How would you measure what this costs, apart from the noise that every stored gradient has?
#    Do you expect it to matter in the runs of 3.4?
# 4. You read of a run with M-FAC that ends 2 points above one without alignment. Which arm do you
#    ask for, before you believe that the curvature made the difference?
#
# <details><summary>Answers</summary>
#
# 1. A small change dA, dB changes W by B dA + dB A + dB dA. The last term is of second order, and
#    adds to H a part that has only blocks between A and B. Such a matrix has eigenvalues in pairs
#    ±. It vanishes only where the gradient of L^P with respect to W does.
# 2. If the gradients of single images are mostly noise, independent and with mean 0, the covariance
#    of their mean is 64 times smaller (notebook 1, section 1.3). H is a mean, too, but the mean of
#    second derivatives does not shrink.
# 3. Compute the gradients of the same batches, with the same masks, again at the last θ_P, and
#    compare stored with fresh ones; then fresh ones with those of other batches. The first is age,
#    the second is noise ([recycling.md](../experiments/recycling.md)). In 3.4, q is g in the first
#    two regimes whatever G holds, so there age cannot matter.
# 4. The same run with `identity`. It costs less and has everything but the curvature.
#
# </details>

# %% [markdown]
# ## What to change and what you expect
#
# Say what you expect before you run it. All three were run; *found* says what came out.
#
# 1. **In `by_hand`, append `g_P` to G** (after line 7) in place of `grad_P`. The comparison in
#    3.3 should fail: now F also contains λ(θ_P − θ_D). θ_P itself should hardly change, since q
#    is nearly g in either case. *Found:* θ_P and θ_D differ by 4e-4 at most, |q|/|g| by 2e-4. A
#    mistake that only a comparison number by number can find.
# 2. **In 3.4, add `(1, 1e-5, PINK)` to `REGIMES`.** Gradients of single images are the largest,
#    so nearly all of the reachable part should be removed. But |q|/|g| cannot fall below √(1 −
#    share). *Found:* 92 % of it is removed, and |q|/|g| is 0.844. The share is a little larger than
#    before, 30 %, so the limit is 0.84.
# 3. **In 3.5, train the lower level for 2,000 steps in place of 200.** At a minimum no eigenvalue
#    of H is negative, so the grey should shrink. *Found:* it shrinks by little: the lowest is
#    −0.0045 in place of −0.0056. But the largest is 0.090 in place of 0.006, and now F is like H
#    (cosine 0.82 in place of 0.19), only 2,500 times too small for batches of 64. At λ = 0.009 the
#    cosine of g with the exact q is 0.896, that of M-FAC with 1,000 F 0.923, and that of M-FAC as
#    it is 0.896. Here the curvature matters, F has it, and λ hides it.
