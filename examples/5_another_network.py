# %% [markdown]
# # 5. Another network, another PEFT
#
# The paper says that BiSSLight does not depend on the network, on the pretext task, or on the
# method of parameter-efficient fine-tuning (PEFT). Its experiments have Vision Transformers with
# low-rank adaptation (LoRA), and so has the rest of this project. Here all three are changed:
#
# | | paper | this notebook |
# |---|---|---|
# | backbone ψ | Vision Transformer | a small ResNet, made of torchvision's blocks |
# | θ | LoRA of query and value | scale and shift of the normalisation layers |
# | pretext task | masked autoencoder, I-JEPA | how was this image turned and mirrored? |
# | Algorithm 1 | `bisslight.algorithm_1` | the same function, unchanged |
#
# The paper tried to tune normalisation layers in addition to LoRA and saw "no notable performance
# differences" (App. C.2). Here they are all that is tuned. Read notebook 3 first. This one runs in
# about a minute.

# %%
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torchvision.models.resnet import BasicBlock, conv1x1

from bisslight import Hypergradient, Passes, Phi, State, algorithm_1
from data import rng
from hypergradients import identity
from lora import Examples, init_head
from mfac import mfac
from support import omniglot
from support.optim import Group, Optimiser, Schedule, trainable

torch.set_num_threads(1)  # the network is too small for several threads
plt.rcParams.update({"figure.dpi": 75, "figure.constrained_layout.use": True})
COLOURS = ("#0072B2", "#E69F00", "#777777")

# %% [markdown]
# ## 5.1 A network, and what θ is
#
# The network: three of torchvision's residual blocks, with 16, 32 and 64 channels, behind a first
# convolution. (`torchvision.models.resnet18` has the same blocks, but at least 64 channels.) The
# images are those of Omniglot, handwritten characters that come with the program: 2,580 unlabelled
# images of three alphabets are the pool, and the 24 Greek letters are the labelled task.

# %%
torch.manual_seed(0)
DIM = 64  # of the features
halve16 = nn.Sequential(conv1x1(16, 32, 2), nn.BatchNorm2d(32))  # the second block's shortcut
halve32 = nn.Sequential(conv1x1(32, DIM, 2), nn.BatchNorm2d(DIM))
backbone = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
    BasicBlock(16, 16), BasicBlock(16, 32, 2, halve16), BasicBlock(32, DIM, 2, halve32),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(),
)  # fmt: skip
pool, task = omniglot.pool(), omniglot.task("Greek", 0)
mean, std = pool.mean[0], pool.std[0]
pool_images = (pool.images - mean) / std

# %% [markdown]
# θ is what is *added* to the scale and to the shift of each normalisation layer. So θ = 0 is the
# pretrained network, as with LoRA, and weight decay pulls towards the pretrained network, not
# towards a scale of zero.
#
# Algorithm 1 wants θ as one tensor (K, p): K rows of p numbers. A row is a block of M-FAC. Here it
# is natural to make each normalisation layer, with its scale and its shift, a row. There are nine
# of them, but they have different widths: 16, 32 or 64 channels. We pad: p = 2 · 64, and a layer
# with fewer channels uses the first numbers of each half of its row. What is left over enters no
# loss.


# %%
LAYERS = [name for name, module in backbone.named_modules() if isinstance(module, nn.BatchNorm2d)]
PSI = dict(backbone.named_parameters())
WIDTHS = [len(PSI[f"{layer}.bias"]) for layer in LAYERS]
K, p = len(LAYERS), 2 * DIM


def features(theta: Tensor | None, images: Tensor) -> Tensor:
    """f_θ(x): (B, 3, H, W) -> (B, DIM); without θ, the network as it is."""
    changed = dict[str, Tensor]()
    if theta is not None:
        for row, layer, width in zip(theta, LAYERS, WIDTHS, strict=True):
            changed[f"{layer}.weight"] = PSI[f"{layer}.weight"] + row[:width]
            changed[f"{layer}.bias"] = PSI[f"{layer}.bias"] + row[DIM : DIM + width]
    return functional_call(backbone, changed, (images,))


used = (torch.arange(DIM) < torch.tensor(WIDTHS)[:, None]).repeat(1, 2)  # (K, p)
print(f"{sum(tensor.numel() for tensor in PSI.values()):,} parameters; "
      f"θ has {K} x {p} = {K * p} numbers, of which {int(used.sum())} are used")  # fmt: skip

# %% [markdown]
# **Questions**
#
# 1. Normalisation layers also have running means and variances. Are they a part of θ?
# 2. Could a row be a whole residual block, with all its normalisation layers? What would change?
# 3. Could the padding hold copies of other numbers of its layer?
#
# <details><summary>Answers</summary>
#
# 1. No. They are buffers, not parameters: no gradient is taken with respect to them. A pass in
#    training mode changes them, and in evaluation mode it only reads them.
# 2. Yes, with longer rows and K = 4. M-FAC would then also see how two layers of a block act
#    together. With LoRA the paper does this: query and value of a layer are one block.
# 3. No. Each number has to be there once. A copy would be a parameter of its own, and would count
#    twice in M-FAC's inner products.
#
# </details>

# %% [markdown]
# ## 5.2 A pretext task in twenty lines
#
# An image is turned by 0 to 3 quarter turns, and then mirrored or not. The head has to tell which
# of these eight it was. [Notebook 4](4_your_own_task.ipynb) explains the methods of the class.


# %%
class Batch(NamedTuple):
    """Images (B, 3, H, W), turned and mirrored, and in which of eight ways (B,)."""

    images: Tensor
    way: Tensor


class Symmetry:
    """L^P(θ, φ_P): cross entropy of a linear layer, φ_P, that tells the eight ways apart."""

    def __init__(self, phi: Phi) -> None:
        self.phi = phi
        self.state = dict[str, Tensor]()

    def draw(self, B: int, rng: torch.Generator) -> tuple[Tensor]:
        return (torch.randint(8, (B,), generator=rng),)

    def prepare(self, images: Tensor, way: Tensor) -> Batch:
        turned = [torch.rot90(x, k, (1, 2)) for x, k in zip(images, way.tolist(), strict=True)]
        both = [torch.stack(turned), torch.stack(turned).flip(3)]
        return Batch(torch.where(way.view(-1, 1, 1, 1) < 4, *both), way)

    def loss(self, theta: Tensor | None, phi: Phi, batch: Batch) -> Tensor:
        z = F.linear(features(theta, batch.images), phi["weight"], phi["bias"])
        return F.cross_entropy(z, batch.way)

    def after_step(self, theta_P: Tensor | None) -> None:
        pass


def pretext_batches(seed: int) -> Iterator[Batch]:
    """Prepared batches of 64 from the pool, without end."""
    g = rng(seed, "pretext")
    while True:
        images = pool_images[torch.randint(len(pool_images), (64,), generator=g)]
        yield pretext.prepare(images, *pretext.draw(64, g))


# %% [markdown]
# Pretraining (Eq. 1) trains all parameters on this task, with the normalisation layers in training
# mode, as usual. Afterwards the network is frozen, in evaluation mode.


# %%
def train(loss: Callable[..., Tensor], tensors: list[Tensor], batches: Iterator[NamedTuple],
          steps: int) -> list[float]:  # fmt: skip
    """Train tensors in place with AdamW, warm-up and cosine; the loss of every step."""
    opt = Optimiser([Group(tensors, 1e-2, 0.05)], Schedule(steps, steps / 10, 0.0), (0.9, 0.95))
    values = []
    for _, batch in zip(range(steps), batches, strict=False):
        value = loss(batch)
        opt.update(tensors, list(torch.autograd.grad(value, tensors)))
        values.append(value.item())
    return values


phi = trainable(init_head(DIM, 8, rng(0, "head")))
pretext = Symmetry(phi)
losses = train(
    partial(pretext.loss, None, phi), [*PSI.values(), *phi.values()], pretext_batches(0), 400
)
backbone.eval().requires_grad_(False)
print(f"L^P: first {losses[0]:.2f}, mean of the last 50 steps {sum(losses[-50:]) / 50:.2f}; "
      f"guessing gives log 8 = {math.log(8):.2f}")  # fmt: skip
figure, axes = plt.subplots(1, 8, figsize=(9, 1.6))
ways = pretext.prepare(pool_images[:1].repeat(8, 1, 1, 1), torch.arange(8))
for k, axis in enumerate(axes):
    axis.imshow(ways.images[k, 0], cmap="gray_r")
    axis.set(xticks=[], yticks=[], title=str(k))
figure.suptitle("The eight ways of one character of the pool")
plt.show()

# %% [markdown]
# Now five gradients of the pretext loss at θ = 0, as lines 5 and 6 of Algorithm 1 would store them.
# Does the padding disturb M-FAC? A padded number has gradient 0 in every stored gradient, so it
# adds nothing to any inner product; and where g is 0, q is 0, too. We check it: q with padding is q
# computed layer by layer, without any padding.

# %%
zero = torch.zeros(K, p)
assert torch.equal(features(zero, pool_images[:64]), backbone(pool_images[:64]))
theta = zero.clone().requires_grad_()
stored = []
for _, batch in zip(range(5), pretext_batches(1), strict=False):
    stored.append(Passes().gradients(pretext.loss, theta, phi, batch).theta)
G = torch.stack(stored, 1)  # (K, 5, p)
g = torch.randn(K, p, generator=rng(0, "query")) * used
q = mfac(G, lam=0.1)(g)
for k in range(K):
    alone = mfac(G[k : k + 1, :, used[k]], lam=0.1)(g[k : k + 1, used[k]])
    torch.testing.assert_close(q[k, used[k]], alone[0])
assert not q[~used].any() and not G.transpose(1, 2)[~used].any()
print("q with padding is q of each layer alone")
figure, axis = plt.subplots(figsize=(9, 3))
picture = axis.imshow(G[:, 0].abs().log10().masked_fill(~used, math.nan), aspect="auto", vmin=-4)
axis.set(yticks=range(K), yticklabels=LAYERS, xticks=[0, DIM], xticklabels=["scale", "shift"],
         title="A pretext gradient; a row is a normalisation layer (white: padding)")  # fmt: skip
figure.colorbar(picture, label="log10 of its size")
plt.show()

# %% [markdown]
# **Questions**
#
# 1. The letter O looks the same in all eight ways. What does the network learn from it?
# 2. Why would it be wrong to leave the normalisation layers in training mode during Algorithm 1?
# 3. With N_L = 20 stored gradients, how many directions of the first row can M-FAC act on, and of
#    the last one? And with LoRA of rank 64 on ViT-L, where p is 262,144?
#
# <details><summary>Answers</summary>
#
# 1. Only to say that all ways are equally likely; its loss cannot be below log 8.
# 2. A loss has to be a pure function of θ, φ and the batch. In training mode a pass changes the
#    running statistics. And what comes out for an image depends on the other images of the batch,
#    so gradients would change if the batch were cut into micro-batches.
# 3. At most 20 of 32, and 20 of 128; with ViT-L, 20 of 262,144. Normalisation layers are small
#    blocks, so M-FAC can see much of their curvature.
#
# </details>

# %% [markdown]
# ## 5.3 Algorithm 1, unchanged
#
# The downstream loss is the cross entropy of a linear layer on the same features. Its head is
# trained alone first, at θ = 0 (linear probing). `algorithm_1` gets θ, two losses, two optimisers
# and two streams of batches; nothing tells it which network this is.
#
# λ is 0.1 here, not the paper's 0.001. It has the unit of 1/θ², so another θ may need another λ. Of
# these two values it was chosen on another alphabet (Early Aramaic), before the Greek letters were
# looked at.
#
# To see whether curvature matters, we align twice with each seed: with M-FAC, and with `identity`,
# which has no curvature (q = g).


# %%
def loss_D(theta: Tensor, phi: Phi, batch: Examples, regularise: bool = False) -> Tensor:
    """L^D. There is no drop path, so `regularise` changes nothing."""
    z = F.linear(features(theta, batch.images), phi["weight"], phi["bias"])
    return F.cross_entropy(z, batch.targets)


def examples(seed: int) -> Iterator[Examples]:
    """Labelled batches of 32, without end."""
    g = rng(seed, "downstream")
    while True:
        k = torch.randint(len(task.train.targets), (32,), generator=g)
        yield Examples((task.train.images[k] - mean) / std, task.train.targets[k])


def align(hypergrad: Hypergradient, seed: int) -> SimpleNamespace:
    """Linear probing, then Algorithm 1: θ_P and the log."""
    phi_P, phi_D = trainable(phi), trainable(init_head(DIM, 24, rng(seed, "align head")))
    train(partial(loss_D, zero, phi_D), [*phi_D.values()], examples(seed), 100)
    theta_P, theta_D = zero.clone().requires_grad_(), zero.clone().requires_grad_()  # l.2
    opt_P = Optimiser([Group([theta_P, *phi_P.values()], 1e-2, 0.05)], None, (0.9, 0.95))
    opt_D = Optimiser([Group([theta_D, *phi_D.values()], 1e-2, 0.05)], None, (0.9, 0.999))
    steps = SimpleNamespace(alternations=20, lower_steps=5, upper_steps=3, lam=0.1)
    logs = algorithm_1(State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D), steps, pretext, loss_D,
                       hypergrad, pretext_batches(seed + 1), examples(seed + 1))  # fmt: skip
    return SimpleNamespace(logs=list(logs), theta_P=theta_P.detach())


SEEDS = range(3)
runs = {"M-FAC": [align(mfac, s) for s in SEEDS], "q = g": [align(identity, s) for s in SEEDS]}

figure, axes = plt.subplots(1, 3, figsize=(9, 2.6))
titles = {"loss_P": "L^P at θ_P", "loss_D_at_P": "L^D at θ_P", "q_over_g": "|q| / |g|"}
for (key, title), axis in zip(titles.items(), axes, strict=True):
    for (name, of_seeds), colour in zip(runs.items(), COLOURS, strict=False):
        numbers = torch.tensor([[getattr(log, key) for log in run.logs] for run in of_seeds])
        axis.plot(range(1, 21), numbers.mean((0, 2)), "o-", color=colour, markersize=3, label=name)
    axis.set(title=title, xlabel="alternation", xticks=[1, 10, 20])
axes[1].legend()
plt.show()
last = [run.logs[-1] for run in runs["M-FAC"]]
share = torch.tensor([log.share for log in last]).mean()
removed = torch.tensor([log.removed for log in last]).mean()
print(f"last alternation: {share:.0%} of |g|² are in the span of the stored gradients, "
      f"and M-FAC removes {removed:.0%} of that")  # fmt: skip

# %% [markdown]
# Here curvature acts: most of g lies in the span of the stored gradients, and M-FAC takes most of
# that away. With LoRA on a small Vision Transformer, on the same images and at the paper's λ,
# |q|/|g| is above 0.99 (see [recycling](../experiments/recycling.md)).
#
# **Questions**
#
# 1. Only 5 gradients are stored, and a row has 32 to 128 numbers. If g had a random direction, how
#    much of |g|² would lie in their span? What does the number above tell you?
# 2. A padded number starts at 0. Why does it stay there, although AdamW divides by the size of the
#    gradient?
# 3. The pretext head goes on from pretraining. What would be wrong with a new one?
#
# <details><summary>Answers</summary>
#
# 1. Between 5 of 128 and 5 of 32, so 4 to 16 %. The downstream gradient and the pretext gradients
#    have directions in common; the second picture shows that shifts of the first layers have by far
#    the largest gradients.
# 2. Its gradient is exactly 0, so both of AdamW's means are 0, and 0 / (0 + ε) is 0. Weight decay
#    multiplies 0 by a number.
# 3. Gradients through a random head say little about the task, and Eq. 5 assumes that the lower
#    level is near its solution.
#
# </details>

# %% [markdown]
# ## 5.4 Fine-tuning, with and without aligning
#
# Fine-tuning (Eq. 2) trains θ and a new head: from θ = 0, the pretrained network, and from the θ_P
# of each align run. It is short, 100 steps, and the same for all.


# %%
def fine_tune(start: Tensor, seed: int) -> SimpleNamespace:
    """Test accuracy in per cent, and the training loss of every step."""
    theta = start.clone().requires_grad_()
    head = trainable(init_head(DIM, 24, rng(seed, "head")))
    losses = train(partial(loss_D, theta, head), [theta, *head.values()], examples(seed + 100), 100)
    with torch.no_grad():
        x = features(theta, (task.test.images - mean) / std)
    right = F.linear(x, head["weight"], head["bias"]).argmax(1) == task.test.targets
    return SimpleNamespace(accuracy=100 * right.float().mean().item(), losses=losses)


arms = {f"aligned, {name}": [fine_tune(of_seeds[s].theta_P, s) for s in SEEDS]
        for name, of_seeds in runs.items()}  # fmt: skip
arms["not aligned"] = [fine_tune(zero, s) for s in SEEDS]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
for y, ((name, tuned), colour) in enumerate(zip(arms.items(), COLOURS, strict=True)):
    accuracies = torch.tensor([run.accuracy for run in tuned])
    print(f"{name:15} {accuracies.mean():.1f} % ± {accuracies.std():.1f}")
    left.plot(accuracies, [y] * len(tuned), "o", color=colour, markersize=9, alpha=0.8)
    left.plot(accuracies.mean(), y, "|", color="black", markersize=24)
    right.plot(torch.tensor([run.losses for run in tuned]).mean(0), color=colour, label=name)
left.set(title="Test accuracy (dots: seeds, bar: mean)", yticks=range(3), yticklabels=arms,
         ylim=(-0.6, 2.6), xlabel="%")  # fmt: skip
right.set(title="Training loss, mean of the seeds", xlabel="step of fine-tuning")
right.legend()
plt.show()

# %% [markdown]
# Both aligned arms are above the one without, with most seeds, and their training loss is lower
# from the first steps on. But M-FAC and q = g end alike, although |q|/|g| is far below 1: here
# curvature changes the hypergradient, and makes no difference that three seeds could show. Three
# seeds are few: even if all of one arm were above all of the other, the smallest possible p would
# be 2 / 20 = 0.1. And all of them share one pretrained network.
#
# **Questions**
#
# 1. Is it fair to give both arms 100 steps of fine-tuning?
# 2. Which arm would tell whether the labels helped, or only more training on the pretext task?
# 3. What in this notebook had to know that the network is a ResNet?
#
# <details><summary>Answers</summary>
#
# 1. It is the paper's comparison, but aligning took more time than these 100 steps. Another fair
#    one is to give the arm without aligning more steps, so that both take the same time in all.
# 2. One that is aligned with `upper_steps=0`: it trains the lower level alone.
# 3. `features`, which puts θ into the normalisation layers, and their list. The pretext task, both
#    losses, M-FAC and Algorithm 1 only see θ as a tensor (K, p).
#
# </details>

# %% [markdown]
# ## What to change and what you expect
#
# Write down what you expect before you run it.
#
# 1. `lam=0.001`, the paper's. The penalty hardly holds θ_P and θ_D together, so the labels can
#    hardly guide θ_P. Expect less of a difference to fine-tuning without aligning.
# 2. `upper_steps=0`: no labels in the alignment. Expect L^D at θ_P to have no curve at all, and θ_P
#    to be as good as a few more steps of pretraining.
# 3. 300 steps of fine-tuning instead of 100. Expect all arms to end higher and closer together.
# 4. Tune the shifts alone (BitFit, which the paper names in App. A). What are p and the number of
#    used entries? `features` is all that changes.
# 5. One row for each residual block instead of each layer. Expect another q, but the same g.
# 6. `hypergradients.exact` for `mfac`, with one alternation: θ is so small that Eq. 5 can be
#    computed as it stands. It takes K p = 1,152 Hessian-vector products. Is H + λI positive
#    definite (`torch.linalg.eigvalsh`)? [Exact hypergradients](../experiments/exact.md) of LoRA
#    were not, at the paper's λ.
# 7. Keep the stored gradients, and take them again where the lower level ended. How much do they
#    differ, and how much do those of other batches? [Recycling](../experiments/recycling.md) has
#    the numbers for LoRA.
