# %% [markdown]
# # 2. Algorithm 1 by hand
#
# Here Algorithm 1 is written out from the pieces of this project, and compared with
# `bisslight.algorithm_1`, number by number. Read `bisslight.py` beside this page; it begins with a
# glossary of all letters. The notebook runs in less than half a minute.

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

import mae
from bisslight import Hypergradient, Log, Passes, State, algorithm_1
from config import AlignConfig
from data import rng
from head import Examples, downstream_loss, init_head
from lora import init_theta
from mfac import mfac
from support.experiment import open_experiment
from support.optim import Group, Optimiser, Schedule, trainable

torch.set_num_threads(1)  # the network is too small for several threads
plt.rcParams.update({"figure.dpi": 75, "figure.constrained_layout.use": True})

# %% [markdown]
# ## 2.1 The input of Algorithm 1 (line 1)
#
# We need a pretrained backbone ψ with its pretext head φ_P, a pretext task, a labelled task,
# batches of both, and two optimisers. ψ and φ_P come with the program: `vit_mini`, pretrained with
# the masked autoencoder (MAE) on handwritten characters. `open_experiment` freezes ψ:
# only θ and the heads are trained. The labelled task is to tell the 24 Greek characters apart.

# %%
experiment = open_experiment(AlignConfig(backbone="vit_mini", dataset="omniglot:Greek"))
backbone, decoder = experiment.networks.backbone, experiment.networks.head
pretext = mae.MAE(backbone, decoder)  # mask ratio 0.75
pool, task = experiment.pool, experiment.task
unlabelled_images = (pool.images - pool.mean[0]) / pool.std[0]
labelled_images = (task.train.images - pool.mean[0]) / pool.std[0]
passes = Passes()  # whole batches, full precision


def pretext_batches(size: int, purpose: str) -> Iterator[mae.Batch]:
    """Prepared batches of unlabelled images, without end, the same in every call."""
    for step in itertools.count():
        g = rng(0, purpose, step)
        index = torch.randint(len(unlabelled_images), (size,), generator=g)
        yield pretext.prepare(unlabelled_images[index], *pretext.draw(size, g))


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
    lower = [
        Group([leaves["P"]], lr=1e-2, weight_decay=0.05),
        Group([*phi_P.values()], lr=1e-4, weight_decay=0.05),
    ]
    upper = [Group([leaves["D"], *phi_D.values()], lr=1e-2, weight_decay=0.05)]
    lower_rate = Schedule(T * steps.lower_steps, warmup=6, end=1e-6)
    upper_rate = Schedule(T * steps.upper_steps, warmup=4, end=1e-6)
    opt_P = Optimiser(lower, lower_rate, betas=(0.9, 0.95), clip=10)
    opt_D = Optimiser(upper, upper_rate, betas=(0.9, 0.999), clip=10)
    return State(leaves["P"], leaves["D"], phi_P, phi_D, opt_P, opt_D)


# %% [markdown]
# ## 2.2 Algorithm 1
#
# `passes.gradients(loss, theta, phi, batch)` returns the loss and its gradients with respect to θ
# and to the head. `update` of an optimiser changes tensors in place.


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
        solve = hypergrad(torch.stack(G, 1), steps.lam, H)  # l.10: G is (K, N_L, p)
        for _ in range(steps.upper_steps):  # l.11
            examples = next(labelled)
            # blank: lines 12 and 13; call the results g and q
            _, g, grad_phi_at_P = passes.gradients(loss_D, s.theta_P, s.phi_D, examples)  # l.12
            q = solve(g)  # l.13
            # end of blank
            cosine = torch.cosine_similarity(q.flatten(), g.flatten(), 0)
            ratio = q.norm() / g.norm()
            # blank: lines 14 to 16, with the same examples
            _, grad_D_at_D, grad_phi_at_D = passes.gradients(  # l.14
                loss_D, s.theta_D, s.phi_D, examples
            )
            g_D = q + grad_D_at_D  # l.14
            g_phi_D = [grad_phi_at_P[name] + grad_phi_at_D[name] for name in s.phi_D]  # l.15
            s.opt_D.update([s.theta_D, *s.phi_D.values()], [g_D, *g_phi_D])  # l.16
            # end of blank
            yield float(ratio), float(cosine)
    # l.17: the result is s.theta_P


s = begin()
numbers = list(by_hand(s, mfac))
print(f"{len(numbers)} upper steps; |q|/|g| of the last one: {numbers[-1][0]:.4f}")

# %% [markdown]
# ## 2.3 The same with the library
#
# `bisslight.algorithm_1` is a generator: it does one alternation, yields numbers to log, and waits.
# The caller decides what to do in between: print, validate, save, or stop.


# %%
def by_library(s: State, hypergrad: Hypergradient) -> list[Log]:
    """Algorithm 1; returns what it logs of all alternations."""
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
# To get BiSSL, the predecessor, pass `cg` (conjugate gradients) instead of `mfac`: only lines 10
# and 13 change. Then H is used and G is not.

# %% [markdown]
# **Questions**
#
# 1. Why is |q|/|g| at most 1 for M-FAC? Could the cosine of q and g be negative? And with CG?
# 2. A smaller λ makes the curvature visible. What else does λ do in Algorithm 1?
# 3. You read of a run with M-FAC that ends 2 points above one without alignment. Which arm do you
#    ask for, before you believe that the curvature made the difference?
#
# <details><summary>Answers</summary>
#
# 1. The factors λ/(κ + λ) lie between 0 and 1, since no eigenvalue κ of F is below 0, and g·q is
#    above 0. The true Hessian can have negative eigenvalues. If one lies below −c (for CG, c is λ +
#    1), the result of CG can point anywhere.
# 2. It is the spring between θ_P and θ_D (line 7). With λ = 1e-5 the labels reach θ_P a hundred
#    times more slowly. So λ cannot be chosen for the sake of M-FAC alone.
# 3. The same run with `identity`. It costs as much, and has everything but the curvature.
#
# </details>

# %% [markdown]
# ## What to change and what you expect
#
# Say what you expect before you run it.
#
# **In `by_hand`, append `g_P` to G** (after line 7) in place of `grad_P`. What should the
# comparison in 2.3 say?
#
# <details><summary>Answers</summary>
#
# It fails, though θ_P and θ_D differ by 4e-4 at most: a mistake that only a comparison number by
# number can find.
#
# </details>
