"""Checks of sheet 4, each by a computation of another kind."""

import itertools
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from witness import Grads, Wrong, any_type, eye, guarded, random, same

import mfac
from bisslight import Passes
from config import BACKBONES
from lora import Backbone
from support.checkpoints import build_vit


def small_backbone() -> Backbone:
    """Two layers of width 64 on images of 16 x 16 pixels."""
    arch = BACKBONES["vit_mini"]._replace(depth=2)
    torch.manual_seed(0)
    return Backbone(build_vit(arch)).double().requires_grad_(False)


# --- 4.1 ------------------------------------------------------------------------------------------


class Coupled:
    """A lower level of three parameters and a head of two: a network with one hidden unit."""

    def __init__(self, lam: float) -> None:
        self.lam = lam
        self.x = random(20, 3)
        self.y = random(20, seed=1)
        self.low_D = random(3, seed=2)  # L^D(θ) = ½ |θ − low_D|²

    def loss_P(self, theta: Tensor, phi: Tensor) -> Tensor:
        """φ is a linear layer on top of the hidden unit and a constant."""
        hidden = torch.stack([torch.tanh(self.x @ theta), torch.ones_like(self.y)], 1)
        fit = (hidden @ phi - self.y).square().mean()
        return fit + 0.1 * phi.square().sum() + theta.pow(4).sum()

    def lower(self, theta_D: Tensor) -> Tensor:
        """θ_P* and φ_P* in one vector: at most 40 steps of Newton's method on Eq. 4.

        A step goes downhill along each eigenvector of the Hessian, also where that is negative.
        """

        def eq_4(z: Tensor) -> Tensor:
            return self.loss_P(z[:3], z[3:]) + self.lam / 2 * (z[:3] - theta_D).square().sum()

        z = torch.cat([0.5 * torch.ones_like(theta_D), torch.zeros(2).double()])
        for _ in range(40):
            slope = torch.autograd.functional.jacobian(eq_4, z)
            kappa, u = torch.linalg.eigh(torch.autograd.functional.hessian(eq_4, z))
            z = z - u @ (u.T @ slope / kappa.abs())
            if slope.abs().max() < 1e-9:  # the step squares what is left of it
                break
        return z

    def upper(self, theta_D: Tensor) -> Tensor:
        """L^D at the solution of the lower level."""
        return (self.lower(theta_D)[:3] - self.low_D).square().sum() / 2


def check_with_the_head(with_the_head: Any) -> list[str]:
    """Finite differences: move θ_D a little, solve the lower level anew, see how L^D changes."""
    answer = guarded(with_the_head, "loss_P theta phi lam g")
    for problem in (Coupled(0.3), Coupled(1.0)):
        theta_D = random(3, seed=3)
        h = 1e-5
        slopes = []
        for e in h * eye(3):
            slopes.append((problem.upper(theta_D + e) - problem.upper(theta_D - e)) / (2 * h))
        theta, phi = problem.lower(theta_D).split([3, 2])
        g = theta - problem.low_D
        lam = problem.lam
        H_tt = torch.autograd.functional.hessian(partial(problem.loss_P, phi=phi), theta)
        held = lam * torch.linalg.solve(H_tt + lam * eye(3), g)
        q = answer(problem.loss_P, theta, phi, lam, g)
        same("the derivative", q, torch.stack(slopes), {
            "this is Eq. 5, where φ_P is held fixed": held,
            "this is g": g,
        }, 1e-5)  # fmt: skip

    def short(theta: Tensor, phi: Tensor) -> Tensor:
        return (theta * phi).sum().square() / 2 + theta.square().sum() + phi.square().sum()

    return any_type(with_the_head, short, random(2), random(2, seed=1), 0.3, random(2, seed=2))


# --- 4.2 ------------------------------------------------------------------------------------------


def check_per_image_rows(per_image_rows: Any) -> list[str]:
    """All choices of N_L batches of B of 3 images are equally likely: the mean must be exact."""
    answer = guarded(per_image_rows, "G images")
    x = random(3, 4)
    y = torch.tensor([1.0, -1.0, 1.0]).double()
    w = random(4, seed=1)

    def gradient(index: tuple[int, ...]) -> Tensor:
        """Of the logistic loss, the mean over the images of a minibatch, by autograd."""
        leaf = w.clone().requires_grad_()
        chosen = [*index]
        loss = F.softplus(-y[chosen] * (x[chosen] @ leaf)).mean()
        return torch.autograd.grad(loss, leaf)[0]

    image = torch.stack([gradient((i,)) for i in range(3)])
    expected = image.T @ image / 3  # Sec. 2.2: the mean over the images of ∇L ∇Lᵀ
    for N_L, B in ((2, 2), (3, 2), (2, 3)):
        batches = [gradient(index) for index in itertools.product(range(3), repeat=B)]
        found = torch.zeros(4, 4).double()
        plain = torch.zeros(4, 4).double()
        choices = [*itertools.product(batches, repeat=N_L)]
        for rows in choices:
            G = torch.stack(rows)
            R = answer(G, B)
            found += R.T @ R / len(R) / len(choices)
            plain += G.T @ G / len(G) / len(choices)
        same(f"the mean of RᵀR / len(R) for N_L = {N_L} and B = {B}", found, expected, {
            "this is the matrix of the minibatches; most of the images' covariance is missing":
                plain,
            "the rows are multiplied by √B, and so is their mean; their deviations alone are too "
            "short": B * plain,
            "it is half of what it should be: RᵀR is divided by all rows of R": expected / 2,
        })  # fmt: skip
    # Any R with the same RᵀR / len(R) is right, so this is what is compared.
    return any_type(lambda G: matrix(per_image_rows(G, 2)), random(3, 4))


def matrix(R: Tensor) -> Tensor:
    """RᵀR / len(R)."""
    return R.T @ R / len(R)


# --- 4.3 ------------------------------------------------------------------------------------------


def check_with_decay(with_decay: Any) -> list[str]:
    """Autograd through 800 steps of training with decay, on quadratics whose Fisher is H."""
    answer = guarded(with_decay, "G lam decay")
    rate = 0.1
    for lam, decay in ((0.2, 0.1), (0.05, 0.3)):
        G = []
        g = []
        expected: list[Tensor] = []
        for k in range(2):  # two blocks: nothing of one reaches the other
            R = random(4, 4, seed=k)
            a = random(4, seed=10 + k)
            c = random(4, seed=20 + k)
            H = R @ R.T / 4 + 0.1 * eye(4)
            theta_D = random(4, seed=30 + k).requires_grad_()
            theta = torch.zeros_like(a)
            for _ in range(800):
                step = H @ (theta - a) + lam * (theta - theta_D)
                theta = (1 - rate * decay) * theta - rate * step  # decoupled, as in AdamW
            expected += torch.autograd.grad((theta - c).square().sum() / 2, theta_D)
            G.append(2 * torch.linalg.cholesky(H).T)  # N_L = 4 rows with GᵀG / N_L = H
            g.append((theta - c).detach())
        blocks = torch.stack(G)
        query = torch.stack(g)
        joined = mfac.mfac(blocks.transpose(0, 1).reshape(1, 4, 8), lam + decay)
        same("q", answer(blocks, lam, decay)(query), torch.stack(expected), {
            "this is Eq. 5 without decay": mfac.mfac(blocks, lam)(query),
            "the matrix is right; the factor before it must be λ, and yours is λ + ω":
                mfac.mfac(blocks, lam + decay)(query),
            "the blocks are joined to one; each has its own matrix":
                lam / (lam + decay) * joined(query.reshape(1, 8)).view(2, 4),
        })  # fmt: skip
    return any_type(lambda G, g: with_decay(G, 0.2, 0.1)(g), random(2, 4, 4), random(2, 4, seed=1))


# --- 4.4 ------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Images alone."""

    images: Tensor


class Graphs:
    """Counts the images whose graph is alive: made with a graph, and not yet passed backward."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}  # images by the number of a call
        self.calls = 0
        self.most = 0

    def add(self, z: Tensor) -> None:
        """Notes the embeddings of a call; the graph is gone after backward, or when z is."""
        self.calls += 1
        call = self.calls
        self.alive[call] = len(z)
        self.most = max(self.most, sum(self.alive.values()))

        def gone(*_: object) -> None:
            self.alive.pop(call, None)

        token = Token()
        weakref.finalize(token, gone)

        def hook(gradient: Tensor, token: Token = token) -> None:
            gone()

        z.register_hook(hook)


class Token:
    """An object that lives as long as a graph does."""


def check_cached_gradient(cached_gradient: Any) -> list[str]:
    """Autograd on the batch in one piece; and how many images pass at a time."""
    backbone = small_backbone()
    sizes: list[int] = []
    graphs = Graphs()
    theta = (0.1 * random(2, 4 * 3 * backbone.dim)).requires_grad_()
    pairs = random(4, 3, 16, 16, seed=1).repeat_interleave(2, 0)
    images = pairs + 0.3 * random(8, 3, 16, 16, seed=2)

    def embed(theta: Tensor, images: Tensor) -> Tensor:
        sizes.append(len(images))
        z = F.normalize(backbone(images, theta)[:, 0], dim=1)
        if z.requires_grad:
            graphs.add(z)
        return z

    def loss(z: Tensor) -> Tensor:
        """Each image has to find its twin, its neighbour in the batch, among all others."""
        similar = (z @ z.T / 0.2).masked_fill(eye(len(z)).bool(), -torch.inf)
        return F.cross_entropy(similar, torch.arange(len(z)).view(-1, 2).flip(1).flatten())

    (expected,) = torch.autograd.grad(loss(embed(theta, images)), theta)
    even = Passes(4).gradients(
        lambda theta, _, batch: loss(embed(theta, batch.images)), theta, {}, Batch(images)
    )
    sizes.clear()
    graphs.alive.clear()
    graphs.most = 0
    answer = guarded(cached_gradient, "embed loss theta images micro")
    same("the gradient", answer(embed, loss, theta, images, 4), expected, {
        "parts of the batch do not know of each other; the loss needs all embeddings at once":
            even.theta,
    })  # fmt: skip
    if max(sizes) > 4:
        raise Wrong(
            f"the numbers are right, but {max(sizes)} images were in the network at a time, not 4"
        )
    if graphs.most > 4:
        raise Wrong(
            f"the numbers are right, but the graphs of {graphs.most} images were alive at a time, "
            "not of 4: compute the embeddings without a graph first"
        )
    theta.grad = random(*theta.shape, seed=3)  # somebody else's
    grads = Grads(theta=theta)
    same("the gradient in parts of 3", answer(embed, loss, theta, images, 3), expected)
    grads.compare()
    remarks = []
    if max(sizes) < 3:
        remarks.append(f"no more than {max(sizes)} of `micro` images are in the network at a time")
    image = torch.ones(3, 1).double()
    line = (
        torch.mul,
        lambda z: z.sum().square() / 2,
        torch.ones(1).double().requires_grad_(),
        image,
        2,
    )
    return remarks + any_type(cached_gradient, *line)
