"""The Gauss-Newton matrix N as a hypergradient; how large F and N are. For two studies."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bisslight import Map, Passes, Phi
from config import Record
from hypergradients import cg
from mae import MAE


@dataclass(frozen=True)
class NewtonPasses(Passes):
    """Passes in which the Gauss-Newton matrix N of MAE's loss stands for H."""

    task: MAE | None = None

    def hessian(self, loss: object, theta: Tensor, phi: Phi, batch: Any) -> Map:
        """The function u -> N u, N = (2/n) JᵀJ; J is the Jacobian of the n predicted pixels."""
        assert self.task
        point = theta.detach().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            prediction, mask = self.task.predict(point, phi, batch)
            pixels = prediction[mask > 0]
            v = torch.zeros_like(pixels, requires_grad=True)
            (JTv,) = torch.autograd.grad(pixels, point, v, create_graph=True)

        def newton_product(u: Tensor) -> Tensor:
            (Ju,) = torch.autograd.grad(JTv, v, u, retain_graph=True)
            (JTJu,) = torch.autograd.grad(pixels, point, Ju, retain_graph=True)
            return 2 / pixels.numel() * JTJu

        return newton_product


newton = partial(cg, iterations=8)  # Eq. 5 with H() in place of H, anew for each query


def squared_length_inside(G: Tensor, x: Tensor) -> float:
    """|Πx|² = (G x)ᵀ (G Gᵀ)⁺ (G x), summed over the rows of θ; Π projects on the span of G.

    >>> squared_length_inside(torch.tensor([[[2.0, 0.0]]]), torch.tensor([[3.0, 4.0]]))
    9.0
    """
    G = G.double()
    Gx = G @ x.double()[..., None]  # (K, N_L, 1)
    # gradients may be dependent: what is shorter than 1e-5 of the longest spans nothing
    inverse = torch.linalg.pinv(G @ G.mT, rtol=1e-10, hermitian=True)
    return float((Gx.mT @ inverse @ Gx).sum())


def compare(G: Tensor, g: Tensor, N: Map, lam: float) -> Record:
    """How large F and N are: their traces, and along g beside λ.

    The trace of N is an estimate, uᵀ N u with one vector u of random signs.
    """
    u = torch.randn(g.shape, generator=torch.Generator().manual_seed(0)).sign()
    squared = float(g.double().square().sum())  # |g|²
    in_F = float((G.double() @ g.double()[..., None]).square().sum()) / G.shape[1]  # gᵀ F g
    return {
        "trace_F": float(G.double().square().sum()) / G.shape[1],
        "trace_N": float((u * N(u)).sum()),
        "along_F": in_F / squared / lam,  # gᵀ F g / (λ |g|²)
        "along_N": float((g * N(g)).sum()) / squared / lam,
        "share": squared_length_inside(G, g) / squared,  # of g, in the span of the gradients
        "norm_P": float(G[:, -1].norm()),  # |∇L^P| of θ alone
    }
