"""Conjugate gradients against recorded solves, a recorded BiSSL run, and dense algebra."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import replay
import torch
import torch.nn.functional as F
from conftest import close, recorded
from torch import Tensor

from bisslight import Passes
from hypergradients import cg, conjugate_gradients, exact
from mae import Batch


@pytest.mark.parametrize("name", ["cg_unit_mlp", "cg_unit_mlp_nodamp"])
def test_solves_equal_the_recorded_ones(name: str) -> None:
    """Every iterate, joint and per tensor, through the Hessian of a small network by autograd."""
    rec = recorded(f"official/{name}.npz")
    shapes = [tuple(s) for s in rec.meta["param_shapes"]]
    sizes = [torch.Size(s).numel() for s in shapes]
    X, y = rec["X"], rec["y"]

    def loss(theta: Tensor, phi: Any, batch: Any) -> Tensor:
        W1, b1, W2, b2 = (p.view(s) for p, s in zip(theta[0].split(sizes), shapes, strict=True))
        return F.cross_entropy(torch.tanh(batch[0] @ W1.T + b1) @ W2.T + b2, batch[1])

    theta = torch.cat([rec[k].flatten() for k in ("W1", "b1", "W2", "b2")])[None]
    q, lam, damping = rec["q"][None], float(rec["lam"]), float(rec["damping"])
    H = partial(Passes().hessian, loss, theta, {}, (X, y))
    for kind, parts in (("joint", None), ("layerwise", sizes)):
        for key in [k for k in rec.arrays if k.startswith(f"x_{kind}_iter")]:
            k = int(key.removeprefix(f"x_{kind}_iter"))
            close(cg(q, lam, H, k, damping, "c", parts)(q)[0], rec[key], 1e-10)
    c = lam + damping
    truth = torch.linalg.solve(rec["hessian"] + c * torch.eye(q.numel()).double(), q[0])
    close(cg(q, lam, H, 200, damping, "c")(q)[0], c * truth, 1e-8)
    close(cg(q, lam, H, 200, damping)(q)[0], lam * truth, 1e-8)


def test_a_recorded_bissl_run_is_reproduced() -> None:
    """Four alternations: per-tensor steps, first batch, fresh mask noise in every product.

    The released program's stale batch is no setting of this program; its products are made here.
    """
    rec = recorded("official/bissl_cg_tiny_adamw_f64.npz")
    r, m = replay.recording(rec), rec.meta
    noise = iter(rec["mask_noise"].double())  # in call order: lower steps and products
    images = rec["lower_images_i8"].double() / 32
    # a tensor is a matrix of a layer; sums do not notice that the released B is untransposed
    sizes = [r.theta[0].numel() // 4] * 4 * r.arch.depth

    def released(G: Tensor, lam: float, H: Any) -> Any:
        def product(d: Tensor) -> Tensor:
            batch = Batch(images[0], next(noise))
            return Passes().hessian(r.task.loss, r.theta, r.phi_P, batch)(d)

        return cg(G, lam, lambda: product, m["cg_iter"], m["cg_damp"], "c", sizes)

    pretext: Iterator[Batch] = (Batch(x, next(noise)) for x in images)
    replay.follow(r, replay.Spy(released), pretext, 1e-10)
    assert next(noise, None) is None  # every recorded draw was used


def quadratic() -> tuple[Tensor, Tensor]:
    """A Hessian (6, 6), and a query (2, 3)."""
    g = torch.Generator().manual_seed(0)
    R, query = torch.randn(8, 6, generator=g).double(), torch.randn(2, 3, generator=g).double()
    return R.T @ R / 8, query


def test_exact_is_the_dense_solution_and_takes_the_shape_of_theta_from_G() -> None:
    (H, query), lam = quadratic(), 0.3
    solve = exact(query[:, None], lam, lambda: lambda d: (H @ d.flatten()).view(2, 3))
    truth = lam * torch.linalg.solve(H + lam * torch.eye(6).double(), query.flatten())
    close(solve(query).flatten(), truth, 1e-10)
    for wrong in (None, torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"exact needs a G of shape \(K, m, p\)"):
            exact(wrong, 0.1, lambda: torch.clone)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-5, 1.0, 1e8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_query_of_any_size_is_solved_alike_and_a_zero_query_gives_zero(
    scale: float, dtype: torch.dtype
) -> None:
    """An absolute tolerance of 1e-12 is 20 % off at |g| = 1e-5. Five steps are BiSSL's."""
    H, query = quadratic()
    H, query = (H + torch.eye(6)).to(dtype), (query / query.norm()).flatten().to(dtype)
    for steps, tolerance in ((5, 1e-2), (30, 1e-8 if dtype is torch.float64 else 1e-5)):
        x = conjugate_gradients(lambda d: H @ d, scale * query, steps)
        close(x / scale, torch.linalg.solve(H, query), tolerance)
    assert not conjugate_gradients(lambda d: H @ d, 0 * query, 5).any()


def test_step_sizes_a_tensor_are_the_released_programs() -> None:
    """Not the solution: each tensor has step sizes of its own, and 1e-12 is absolute.

    Line 2 starts with B = 0, so ∇A is zero at first; its part stays zero. With |g|² = 1e-12, by
    hand, α = gᵀg / (gᵀAg + 1e-12), half of what it should be.
    """
    A = torch.tensor([[2.0, 0.9], [0.9, 1.0]]).double()
    x = conjugate_gradients(lambda d: A @ d, torch.tensor([0.0, 1.0]).double(), 1, [1, 1])
    close(x, torch.tensor([0.0, 1.0]).double(), 1e-9)
    query = torch.tensor([[0.6e-6, 0.8e-6]], dtype=torch.float64)
    a = 1 + 0.5 / (0.1 + 1.0)  # I + H/c for the Hessian ½I
    found = cg(query, 0.1, lambda: lambda d: 0.5 * d, 1, 1.0, "c", [2])(query)
    close(found, 1e-12 / (a * 1e-12 + 1e-12) * query, 1e-12)


@pytest.mark.parametrize(("micro", "calls"), [(None, 3), (2, 30)])
def test_a_batch_in_one_part_is_passed_once_a_solve(micro: int | None, calls: int) -> None:
    """Its graph serves all five products; of a batch in two parts, each product passes both."""
    seen: list[Any] = []

    def loss(theta: Tensor, phi: Any, batch: Any) -> Tensor:
        seen.append(batch)
        return (theta**4).sum() * batch.images.mean()

    theta, images = torch.ones(2, 2), torch.ones(4, 1)
    H = partial(Passes(micro).hessian, loss, theta, {}, Batch(images, images))
    solve = cg(theta, 0.1, H, 5)
    for _ in range(3):
        solve(theta)
    assert len(seen) == calls
