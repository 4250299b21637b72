"""The answers to `examples/exercises.md`, each checked by a computation of another kind.

A function under `@exercise` is a worked answer. To check your own instead, write functions of the
same names into a file and name it in BISSLIGHT_ANSWERS, as exercises.md says.
"""

import ast
import itertools
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from conftest import close
from torch import Tensor

import hypergradients
import mfac
from bisslight import Passes
from config import BACKBONES
from ijepa import IJEPA, Predictor
from lora import Backbone, factors, merge
from support.checkpoints import build_vit

ANSWERS = os.environ.get("BISSLIGHT_ANSWERS")
YOURS = runpy.run_path(ANSWERS) if ANSWERS else {}
PAGE = Path(mfac.__file__).parent / "examples/exercises.md"
MASKS = SimpleNamespace(
    targets=1, contexts=1, target_scale=(0.15, 0.2), context_scale=(0.85, 1.0), aspect=(0.75, 1.5),
    min_keep=0, overlap=False,
)  # fmt: skip


def exercise(answer: Any) -> Any:
    """The reader's function of this name, if there is one."""
    return YOURS.get(answer.__name__, answer)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def small_backbone(class_token: bool) -> Backbone:
    arch = BACKBONES["vit_mini"]._replace(depth=2, class_token=class_token)
    torch.manual_seed(0)
    return Backbone(build_vit(arch)).double().requires_grad_(False)


# --- 1: the Schur complement ----------------------------------------------------------------------


@exercise
def with_the_head(
    loss_P: Callable[[Tensor, Tensor], Tensor], theta: Tensor, phi: Tensor, lam: float, g: Tensor
) -> Tensor:
    """When θ moves by dθ, the best φ moves by dφ = −H_φφ⁻¹ H_φθ dθ.

    So ∇_θ L^P changes by H_θθ dθ + H_θφ dφ = S dθ with the Schur complement S, which takes the
    place of the Hessian in Eq. 5.
    """
    (H_tt, H_tp), (H_pt, H_pp) = torch.autograd.functional.hessian(loss_P, (theta, phi))
    S = H_tt - H_tp @ torch.linalg.solve(H_pp, H_pt)
    return lam * torch.linalg.solve(S + lam * eye(len(theta)), g)


def test_1_where_the_head_follows_the_schur_complement_takes_the_hessians_place() -> None:
    """Finite differences: move θ_D a little, solve the lower level anew, see how L^D changes."""
    x, y, c, lam = random(20, 3), random(20, seed=1), random(3, seed=2), 0.3

    def loss_P(theta: Tensor, phi: Tensor) -> Tensor:  # a network of one hidden unit; φ is on top
        hidden = torch.stack([torch.tanh(x @ theta), x[:, 0], torch.ones_like(y)], 1)
        return (hidden @ phi - y).square().mean() + 0.1 * phi.square().sum() + theta.pow(4).sum()

    def lower(theta_D: Tensor) -> Tensor:
        """θ_P* and φ_P* in one vector: 15 steps of Newton's method on Eq. 4."""

        def eq_4(z: Tensor) -> Tensor:
            return loss_P(z[:3], z[3:]) + lam / 2 * (z[:3] - theta_D).square().sum()

        z = torch.cat([0.5 * torch.ones_like(theta_D), torch.zeros_like(theta_D)])
        for _ in range(15):
            slope = torch.autograd.functional.jacobian(eq_4, z)
            z = z - torch.linalg.solve(torch.autograd.functional.hessian(eq_4, z), slope)
        assert float(slope.norm()) < 1e-12
        return z

    def upper(theta_D: Tensor) -> Tensor:
        return (lower(theta_D)[:3] - c).square().sum() / 2

    theta_D, h = random(3, seed=3), 1e-5
    expected = torch.stack([upper(theta_D + h * e) - upper(theta_D - h * e) for e in eye(3)])
    expected /= 2 * h
    theta, phi = lower(theta_D).split(3)
    close(with_the_head(loss_P, theta, phi, lam, theta - c), expected, 1e-6)
    H_tt = torch.autograd.functional.hessian(lambda z: loss_P(z, phi), theta)
    held = hypergradients.exact(torch.zeros(1, 1, 3).double(), lam, lambda: lambda d: d @ H_tt)
    off = held((theta - c)[None])[0] - expected  # Eq. 5, where φ_P is held fixed
    assert float(off.norm() / expected.norm()) > 0.01


# --- 2: an average of factors, or of products -----------------------------------------------------


@exercise
def teacher_gap(theta_T: Tensor, theta_P: Tensor, m: float, dim: int) -> tuple[Tensor, Tensor]:
    """Multiply (m B_T + (1−m) B_P)(m A_T + (1−m) A_P) out and subtract it from the average of BA.

    What is left is m (1−m) (B_T − B_P)(A_T − A_P): a product of two differences, so it is small
    where the student is near its teacher.
    """
    A_q, B_q, A_v, B_v = factors(theta_T - theta_P, dim)
    return m * (1 - m) * B_q @ A_q, m * (1 - m) * B_v @ A_v


def test_2_averaging_factors_is_not_averaging_products() -> None:
    """I-JEPA's own teacher takes one step; its network, merged, is compared with two others."""
    backbone, rank, m = small_backbone(class_token=False), 3, 0.7
    dim = backbone.dim
    theta_T, theta_P = (0.1 * random(2, 4 * rank * dim, seed=seed) for seed in (0, 1))
    gap_q, gap_v = teacher_gap(theta_T, theta_P, m, dim)
    task = IJEPA(backbone, Predictor(dim, 16, 16, 1, 4), MASKS, (m, 10), theta_T)
    task.after_step(theta_P)
    plain = backbone.vit.state_dict()
    teacher, student, after = (
        merge(backbone, x) for x in (theta_T, theta_P, task.state["theta_T"])
    )
    for k in range(2):
        name = f"blocks.{k}.attn.qkv.weight"
        average = m * teacher[name] + (1 - m) * student[name]
        gap = torch.cat([gap_q[k], torch.zeros_like(gap_q[k]), gap_v[k]])
        close(average - after[name], gap, 1e-10)
        ranks = [
            int(torch.linalg.matrix_rank((w - plain[name])[:dim])) for w in (average, after[name])
        ]
        assert ranks == [2 * rank, rank]  # an average of products does not fit into factors


# --- 3: the sizes of the blocks -------------------------------------------------------------------


@exercise
def blockwise(G: Tensor, g: Tensor, lam: float, sizes: list[int]) -> Tensor:
    """Each block is a problem of its own: its columns of G, its part of g, the same m and λ."""
    parts = zip(G.split(sizes, 1), g.split(sizes), strict=True)
    return torch.cat([mfac.mfac(G_k[None], lam)(g_k[None])[0] for G_k, g_k in parts])


def test_3_smaller_blocks_let_the_curvature_act_in_more_directions() -> None:
    """One dense matrix whose entries between two blocks are zero."""
    G, g, lam = random(2, 12), random(12, seed=1), 0.3  # m = 2 gradients of 12 numbers
    for sizes, directions in (([12], 2), ([7, 5], 4), ([3, 1, 8], 5), ([1] * 12, 12)):
        same_block = torch.block_diag(*(torch.ones(n, n) for n in sizes))
        matrix = G.T @ G / 2 * same_block + lam * eye(12)
        close(blockwise(G, g, lam, sizes), lam * torch.linalg.solve(matrix, g), 1e-12)
        changes = torch.stack([e - blockwise(G, e, lam, sizes) for e in eye(12)])
        assert int(torch.linalg.matrix_rank(changes)) == directions  # Σ min(m, size)
    alone = lam * g / (G.square().mean(0) + lam)  # blocks of one number: a diagonal F
    close(blockwise(G, g, lam, [1] * 12), alone, 1e-12)


# --- 4: gradients of minibatches, or of images ----------------------------------------------------


@exercise
def per_image_rows(G: Tensor, images: int) -> Tensor:
    """A minibatch mean has 1/B of the images' covariance, so B − 1 times as much is missing.

    The rows' own covariance estimates what is there. Scaled by √(B − 1), the rows' deviations from
    their mean become m more rows; 2m rows are divided by 2m, hence the 2 under both roots.
    """
    m = len(G)
    deviations = G - G.mean(0)
    return torch.cat([2**0.5 * G, (2 * m * (images - 1) / (m - 1)) ** 0.5 * deviations])


def test_4_minibatches_hide_most_of_the_fisher_matrix_of_the_images() -> None:
    """All 81 pairs of minibatches of 2 of 3 images are equally likely: the mean must be exact."""
    x, y, w = random(3, 4), torch.tensor([1.0, -1.0, 1.0]).double(), random(4, seed=1)

    def gradient(index: list[int]) -> Tensor:
        """Of the logistic loss, the mean over the images of a minibatch, by autograd."""
        leaf = w.clone().requires_grad_()
        loss = F.softplus(-y[index] * (x[index] @ leaf)).mean()
        return torch.autograd.grad(loss, leaf)[0]

    image = torch.stack([gradient([i]) for i in range(3)])
    expected = image.T @ image / 3  # Sec. 2.2: the mean over the images of ∇L ∇Lᵀ
    batches = [gradient([i, j]) for i in range(3) for j in range(3)]
    stored = [torch.stack(pair) for pair in itertools.product(batches, repeat=2)]
    rows = [per_image_rows(G, 2) for G in stored]
    close(sum(R.T @ R / len(R) for R in rows) / 81, expected, 1e-12)
    missing = expected - sum(G.T @ G / len(G) for G in stored) / 81
    assert float(missing.trace() / expected.trace()) > 0.1  # without the answer's rows


# --- 5: weight decay ------------------------------------------------------------------------------


@exercise
def with_decay(G: Tensor, lam: float, decay: float) -> Callable[[Tensor], Tensor]:
    """Decay w adds w/2 |θ_P|² to Eq. 4, so the matrix to invert is H + (λ + w) I.

    M-FAC with λ + w inverts it, but also multiplies by λ + w, where Eq. 5 has λ.
    """
    inverse = mfac.mfac(G, lam + decay)
    return lambda g: lam / (lam + decay) * inverse(g)


def test_5_weight_decay_belongs_to_the_matrix_but_not_to_the_factor() -> None:
    """Autograd through 800 steps of training with decay, on a quadratic whose Fisher is H."""
    R, a, c, lam, decay, rate = random(4, 4), random(4, seed=1), random(4, seed=2), 0.2, 0.1, 0.1
    H = R @ R.T / 4 + 0.1 * eye(4)
    theta_D = random(4, seed=3).requires_grad_()
    theta = torch.zeros_like(a)
    for _ in range(800):
        step = H @ (theta - a) + lam * (theta - theta_D)
        theta = (1 - rate * decay) * theta - rate * step  # decoupled, as in AdamW
    (expected,) = torch.autograd.grad((theta - c).square().sum() / 2, theta_D)
    G = 2 * torch.linalg.cholesky(H).T[None]  # m = 4 rows with GᵀG / m = H
    g = (theta - c).detach()[None]
    close(with_decay(G, lam, decay)(g)[0], expected, 1e-10)
    without = mfac.mfac(G, lam)(g)[0] - expected
    assert float(without.norm() / expected.norm()) > 0.1


# --- 6: a contrastive loss ------------------------------------------------------------------------


@exercise
def cached_gradient(
    embed: Callable[[Tensor, Tensor], Tensor],
    loss: Callable[[Tensor], Tensor],
    theta: Tensor,
    images: Tensor,
    micro: int,
) -> Tensor:
    """First all embeddings without a graph, and the loss's gradient by them, which is small.

    Then each part again with a graph: by the chain rule its share of ∇_θ L is the gradient of
    z · ∂L/∂z with ∂L/∂z held fixed, and shares add up.
    """
    parts = images.split(micro)
    with torch.no_grad():
        z = torch.cat([embed(theta, part) for part in parts])
    z.requires_grad_()
    (dz,) = torch.autograd.grad(loss(z), z)
    total = torch.zeros_like(theta)
    for part, dz_part in zip(parts, dz.split(micro), strict=True):
        total += torch.autograd.grad((embed(theta, part) * dz_part).sum(), theta)[0]
    return total


class Batch(NamedTuple):
    images: Tensor


def test_6_a_contrastive_gradient_in_parts_is_that_of_the_whole_batch() -> None:
    """Autograd on the batch in one piece. Parts that do not know of each other give another."""
    backbone, seen = small_backbone(class_token=True), []
    theta = 0.1 * random(2, 4 * 3 * backbone.dim)
    images = random(4, 3, 16, 16, seed=1).repeat_interleave(2, 0) + 0.3 * random(
        8, 3, 16, 16, seed=2
    )
    theta.requires_grad_()

    def embed(theta: Tensor, images: Tensor) -> Tensor:
        seen.append(len(images))
        return F.normalize(backbone(images, theta)[:, 0], dim=1)

    def loss(z: Tensor) -> Tensor:
        """Each image has to find its twin, its neighbour in the batch, among all others."""
        similar = (z @ z.T / 0.2).masked_fill(eye(len(z)).bool(), -torch.inf)
        return F.cross_entropy(similar, torch.arange(len(z)).view(-1, 2).flip(1).flatten())

    (expected,) = torch.autograd.grad(loss(embed(theta, images)), theta)
    seen.clear()
    close(cached_gradient(embed, loss, theta, images, 3), expected, 1e-10)
    assert max(seen) <= 3
    _, apart, _ = Passes(4).gradients(
        lambda theta, _, b: loss(embed(theta, b.images)), theta, {}, Batch(images)
    )
    assert float((apart - expected).norm() / expected.norm()) > 0.1


# --- the text -------------------------------------------------------------------------------------


def test_the_text_has_the_signatures_and_the_names_of_the_tests() -> None:
    text, here = PAGE.read_text(), ast.parse(Path(__file__).read_text())
    known = {node.name: node for node in here.body if isinstance(node, ast.FunctionDef)}
    answers = [name for name, node in known.items() if node.decorator_list]
    sections = text.split("\n## ")[1:]
    assert len(sections) == len(answers) == 6
    for number, (section, name) in enumerate(zip(sections, answers, strict=True), 1):
        (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
        asked = ast.parse(code).body[0]
        for part in ("name", "args", "returns"):
            a, b = (getattr(node, part) for node in (asked, known[name]))
            assert (a if part == "name" else ast.unparse(a)) == (
                b if part == "name" else ast.unparse(b)
            )
        (test,) = re.findall(r"`(test_\w+)`", section)
        assert test in known and test.startswith(f"test_{number}_") and "<details>" in section
