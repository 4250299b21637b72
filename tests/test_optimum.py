"""M-FAC inside Algorithm 1: a bilevel problem whose optimum is known, from stored gradients."""

from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bisslight import State, TorchOptimiser, algorithm_1
from hypergradients import identity
from mfac import mfac, recursion

LAM = 0.1
H = torch.tensor([0.5, 1, 2, 4]).double()  # diagonal
LOW_P = torch.ones(4).double()  # where L^P is least
LOW_D = torch.tensor([2, -1, 0.5, -2]).double()  # where L^D is least


class Sample(NamedTuple):
    """One sample x (1, 4); as everywhere, axis 0 counts the images."""

    x: Tensor


def loss_P(theta: Tensor, phi: Any, batch: Sample) -> Tensor:
    return H @ (theta.flatten() - batch.x[0]).square() / 2


def loss_D(theta: Tensor, phi: Any, batch: Sample, regularise: bool = False) -> Tensor:
    return (theta.flatten() - LOW_D).square().sum() / 2


def zero(G: Tensor, lam: float, H: object) -> Any:
    return torch.zeros_like


@pytest.mark.parametrize(
    ("hypergrad", "distance"), [(mfac, 0.026), (recursion, 0.026), (identity, 3.1), (zero, 0.23)]
)
def test_with_stored_gradients_it_ends_near_the_optimum_and_without_them_far_away(
    hypergrad: Any, distance: float
) -> None:
    """Two blocks. The samples have mean LOW_P and covariance H⁻¹, so F is H at LOW_P.

    Elsewhere F is larger, so M-FAC stays at 0.026. The optimum is where the derivative of Eq. 3 is
    0: J (θ_P* − LOW_D) + (θ_D − LOW_D) with θ_P* = (1 − J) LOW_P + J θ_D.
    """
    J = LAM / (H + LAM)
    best = (LOW_D - J * ((1 - J) * LOW_P - LOW_D)) / (1 + J**2)
    shift = torch.diag(2 / H.sqrt())
    samples = [Sample(x[None]) for x in torch.cat([LOW_P + shift, LOW_P - shift])]
    theta_P, theta_D = (torch.zeros(2, 2).double().requires_grad_() for _ in "PD")
    opt_P, opt_D = (TorchOptimiser(torch.optim.SGD([x], lr=0.05)) for x in (theta_P, theta_D))
    state = State(theta_P, theta_D, {}, {}, opt_P, opt_D)
    task: Any = SimpleNamespace(loss=loss_P, after_step=lambda theta_P: None)
    steps = SimpleNamespace(alternations=8, lower_steps=16, upper_steps=20, lam=LAM)
    labelled = cycle([Sample(torch.zeros(1, 1))])
    for _ in algorithm_1(state, steps, task, loss_D, hypergrad, cycle(samples), labelled):
        pass
    found = float((theta_D.detach().flatten() - best).norm())
    assert found == pytest.approx(distance, rel=0.03)
