"""Sheet 4: four exercises that go beyond the paper.

The tasks, with hints, are in examples/exercises/sheet_4.md. Which functions are right, tells

    python examples/exercises/check.py examples/blanks/sheet_4.py
"""

from collections.abc import Callable

import torch
from torch import Tensor

import mfac


def with_the_head(
    loss_P: Callable[[Tensor, Tensor], Tensor], theta: Tensor, phi: Tensor, lam: float, g: Tensor
) -> Tensor:
    """The derivative (p,) of L^D(θ_P*(θ_D)) where φ_P follows; theta, phi: the lower minimum."""
    # blank: Eq. 5 for a head that is at its minimum, too
    # When θ moves by dθ, the best φ moves by dφ = −H_φφ⁻¹ H_φθ dθ. So ∇_θ L^P changes by
    # H_θθ dθ + H_θφ dφ = S dθ with the Schur complement S, which takes the Hessian's place.
    (H_tt, H_tp), (H_pt, H_pp) = torch.autograd.functional.hessian(loss_P, (theta, phi))
    S = H_tt - H_tp @ torch.linalg.solve(H_pp, H_pt)
    system = S + lam * torch.eye(len(theta), dtype=theta.dtype)
    q: Tensor = lam * torch.linalg.solve(system, g)
    return q
    # end of blank


def per_image_rows(G: Tensor, images: int) -> Tensor:
    """Rows R: the expectation of RᵀR / len(R) is the per-image matrix. From minibatch rows G."""
    # blank: the rows of R
    # A minibatch mean has 1/B of the images' covariance, so B − 1 times as much is missing. The
    # rows' own covariance estimates what is there. Scaled by √(B − 1), the rows' deviations from
    # their mean become N_L more rows. RᵀR is then divided by 2 N_L, hence the 2 under both roots.
    N_L = len(G)
    deviations = G - G.mean(0)
    scale = (2 * N_L * (images - 1) / (N_L - 1)) ** 0.5
    return torch.cat([2**0.5 * G, scale * deviations])
    # end of blank


def with_decay(G: Tensor, lam: float, decay: float) -> Callable[[Tensor], Tensor]:
    """The function g -> q, both (K, p), of Eq. 5 with weight decay; F in the place of H."""
    # blank: Eq. 5 with decay
    # Decay ω adds ω/2 |θ_P|² to Eq. 4, so the matrix to invert is H + (λ + ω) I. M-FAC with λ + ω
    # inverts it, but also multiplies by λ + ω, where Eq. 5 has λ.
    solve = mfac.mfac(G, lam + decay)
    return lambda g: lam / (lam + decay) * solve(g)
    # end of blank


def cached_gradient(
    embed: Callable[[Tensor, Tensor], Tensor],
    loss: Callable[[Tensor], Tensor],
    theta: Tensor,
    images: Tensor,
    micro: int,
) -> Tensor:
    """∇_θ of loss(embed(theta, images)), with at most `micro` images in the network at a time."""
    # blank: the gradient, part by part
    # First all embeddings without a graph, and the loss's gradient with respect to them, which is
    # small. Then each part again with a graph: by the chain rule its share of ∇_θ L is the gradient
    # of z · ∂L/∂z with ∂L/∂z held fixed, and shares add up.
    parts = images.split(micro)
    with torch.no_grad():
        z = torch.cat([embed(theta, part) for part in parts])
    z.requires_grad_()
    (dz,) = torch.autograd.grad(loss(z), z)
    total = torch.zeros_like(theta)
    for part, dz_part in zip(parts, dz.split(micro), strict=True):
        total += torch.autograd.grad((embed(theta, part) * dz_part).sum(), theta)[0]
    return total
    # end of blank
