"""Conjugate gradients against recorded solves, a recorded BiSSL run, dense algebra, and the other hypergradients."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import close, recorded
from replay import head_flat, model_of, to_theta, upper_batches
from torch import Tensor

import cli
from bisslight import Log, State, align
from cg import cg, conjugate_gradients
from config import Bilevel
from finetune import downstream_loss
from finetune import optimiser as downstream_optimiser
from mae import Batch
from mfac import exact, mfac
from runtime import Group, Optimiser, Schedule, decay_groups


@pytest.mark.parametrize("name", ["cg_unit_mlp", "cg_unit_mlp_nodamp"])
def test_solves_equal_the_recorded_ones(name: str) -> None:
    """Every iterate, joint and per tensor, through the Hessian of a small network that autograd provides."""
    rec = recorded(f"official/{name}.npz")
    shapes = [tuple(s) for s in rec.meta["param_shapes"]]
    sizes = [torch.Size(s).numel() for s in shapes]
    X, y = rec["X"], rec["y"]

    def loss(flat: Tensor) -> Tensor:
        W1, b1, W2, b2 = (part.view(s) for part, s in zip(flat.split(sizes), shapes, strict=True))
        return F.cross_entropy(torch.tanh(X @ W1.T + b1) @ W2.T + b2, y)

    theta = torch.cat([rec[k].flatten() for k in ("W1", "b1", "W2", "b2")])
    q = rec["q"]
    lam, damping = float(rec["lam"]), float(rec["damping"])
    for kind, parts in (("joint", None), ("layerwise", sizes)):
        for key in [k for k in rec.arrays if k.startswith(f"x_{kind}_iter")]:
            k = int(key.removeprefix(f"x_{kind}_iter"))
            for fresh in (False, True):
                solve = cg(q, lam, theta, loss, k, damping, "c", parts, fresh)
                close(solve.apply(q), rec[key], 1e-10)
                assert bool(solve.ok.all())
    c = lam + damping
    H = rec["hessian"]
    many = cg(q, lam, theta, loss, 200, damping).apply(q)
    close(many, c * torch.linalg.solve(H + c * torch.eye(len(q)).double(), q), 1e-8)
    scaled = cg(q, lam, theta, loss, 200, damping, "lambda").apply(q)
    close(scaled, lam * torch.linalg.solve(H + c * torch.eye(len(q)).double(), q), 1e-8)


def test_a_recorded_bissl_run_is_reproduced() -> None:
    """Two levels, four alternations: per-tensor steps, first batch, fresh mask noise in every product, as released."""
    rec = recorded("official/bissl_cg_tiny_adamw_f64.npz")
    r, m = model_of(rec), rec.meta
    K, dim = r.arch.depth, r.arch.dim
    theta_D = r.theta.detach().clone().requires_grad_()
    lower, upper = (Schedule(m["sched_T"] * n, m["sched_warm"] * n, 1e-6) for n in (m["NL"], m["NU"]))
    groups = [Group([r.theta], m["p_lr"], m["p_wd"]), *decay_groups(r.phi_P, m["p_head_lr"], m["p_wd"])]
    opt_D = downstream_optimiser(
        [theta_D, *r.phi_D.values()], m["d_lr"], m["d_wd"], upper, m["d_opt"] == "sgd", clip=10
    )
    state = State(r.theta, theta_D, r.phi_P, r.phi_D, Optimiser(groups, lower, (0.9, 0.95), clip=10), opt_D)
    cfg = Bilevel(alternations=m["T"], lower_steps=m["NL"], upper_steps=m["NU"], lam=m["lam"], hypergrad="cg")
    noise = iter(rec["mask_noise"].double())  # in call order: lower steps and products
    images = rec["lower_images_i8"].double() / 32

    def pretext() -> Iterator[Batch]:
        for x in images:
            yield Batch(x, next(noise))

    def loss_H(theta: Tensor, phi: dict[str, Tensor], batch: Batch) -> Tensor:
        return r.task.loss(theta, phi, Batch(images[0], next(noise)))

    logs: list[Log] = []
    seen: list[Tensor] = []
    # a tensor is a matrix of a layer; the released order has B untransposed, which sums do not notice
    sizes = [r.theta[0].numel() // 4] * 4 * K

    def solver(G: Tensor, lam: float, theta_P: Tensor, loss_P: Any) -> Any:
        solve = cg(G, lam, theta_P, loss_P, m["cg_iter"], m["cg_damp"], "c", sizes, fresh=True)

        def apply(g: Tensor) -> Tensor:
            seen.append(solve.apply(g))
            return seen[-1]

        return solve._replace(apply=apply)

    def after(s: State, log: Log) -> None:
        logs.append(log)
        t = log.alternation - 1
        close(s.theta_P.detach(), to_theta(rec["lora_lower_after"][t], K, dim), 1e-10)
        close(s.theta_D.detach(), to_theta(rec["lora_upper_after"][t], K, dim), 1e-10)
        close(head_flat(s.phi_D).detach(), rec["head_after"][t], 1e-10)

    align(
        state, cfg, r.task.loss, downstream_loss(r.backbone), solver, pretext(), upper_batches(r),
        r.task.after_step, after, loss_H=loss_H,
    )  # fmt: skip
    assert len(logs) == m["T"]
    close(torch.stack(seen), to_theta(rec["hypergrad"], K, dim), 1e-10)
    assert next(noise, None) is None  # every recorded draw was used


def test_cg_the_exact_solve_and_mfac_agree_where_they_should() -> None:
    """On ½θᵀHθ without damping: CG with enough steps is exact's (H + λI)⁻¹; with GᵀG/m = H, so is M-FAC's."""
    g = torch.Generator().manual_seed(0)
    R, query = torch.randn(8, 6, generator=g).double(), torch.randn(2, 3, generator=g).double()
    H, theta, lam = R.T @ R / 8, torch.zeros(2, 3).double(), 0.3

    def loss(x: Tensor) -> Tensor:
        return x.flatten() @ H @ x.flatten() / 2

    truth = (lam * torch.linalg.solve(H + lam * torch.eye(6).double(), query.flatten())).view(2, 3)
    close(exact(theta, lam, theta, loss).apply(query), truth, 1e-10)
    close(cg(theta, lam, theta, loss, 30, 0.0).apply(query), truth, 1e-9)
    rows = R.view(8, 2, 3).transpose(0, 1)  # (K, m, p)
    close(mfac(rows, lam, theta, loss, "global").apply(query), truth, 1e-10)


def test_a_batch_in_pieces_is_the_whole_batch() -> None:
    """Hessians of parts of a sum add up; per tensor, too."""
    g = torch.Generator().manual_seed(0)
    x, theta, query = (torch.randn(*size, generator=g).double() for size in ((9, 6), (2, 3), (2, 3)))

    def loss(at: Tensor, rows: Tensor) -> Tensor:
        return (rows @ at.flatten()).pow(4).sum() / 9

    parts = [partial(loss, rows=rows) for rows in x.split([4, 4, 1])]
    for sizes in (None, [2, 4]):
        solve = partial(cg, theta, 0.1, theta, partial(loss, rows=x), 6, sizes=sizes)
        close(solve(pieces=lambda whole: parts).apply(query), solve().apply(query), 1e-12)
    with pytest.raises(AssertionError):  # each part counts
        close(solve(pieces=lambda whole: parts[:2]).apply(query), solve().apply(query), 1e-6)


def test_one_graph_serves_a_solve_and_not_more() -> None:
    calls = 0

    def loss(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (x**4).sum()

    theta, query = torch.ones(2, 2), torch.ones(2, 2)
    solve = cg(theta, 0.1, theta, loss, 5)
    for _ in range(3):
        solve.apply(query)
    assert calls == 3
    cg(theta, 0.1, theta, loss, 5, fresh=True).apply(query)
    assert calls == 8
    bad = cg(theta, 0.1, theta, lambda x: (x**4).sum() * torch.nan, 5)
    bad.apply(query)
    assert not bad.ok.any()


def test_per_tensor_steps_are_not_the_solution() -> None:
    """On a coupled system of two tensors plain CG arrives in two steps, the heuristic does not."""
    A = torch.tensor([[2.0, 0.9], [0.9, 1.0]]).double()
    b = torch.tensor([1.0, -2.0]).double()
    truth = torch.linalg.solve(A, b)
    close(conjugate_gradients(lambda d: A @ d, b, 2), truth, 1e-9)
    heuristic = conjugate_gradients(lambda d: A @ d, b, 2, [1, 1])
    assert float((heuristic - truth).abs().max()) > 0.05


@pytest.fixture
def pre(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    small = "--alternations 4 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1 --eval-every 1"
    return f"align --backbone vit_mini --weights {weights} --dataset quilts {small} --quiet --hypergrad cg"


@pytest.mark.parametrize("released", ["", "--preset as-released"])
def test_align_with_cg_resumes_to_the_same_bits(pre: str, released: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import runtime

    assert cli.run([*pre.split(), *released.split(), "--out", "whole"]) == 0
    config = json.loads(Path("whole/config.json").read_text())["bilevel"]
    assert (config["cg_steps"], config["cg_batch"]) == (("tensor", "first") if released else ("joint", "last"))
    record = json.loads(Path("whole/metrics.jsonl").read_text().splitlines()[-1])
    assert all(x > 0 for x in record["q_over_g"])
    save = runtime.Run.save

    def killing(self: Any, state: Any) -> None:
        save(self, state)
        if state["done"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as m_:
        m_.setattr(runtime.Run, "save", killing)
        assert cli.run([*pre.split(), *released.split(), "--out", "cut"]) == 130
    assert cli.run([*pre.split(), *released.split(), "--out", "cut", "--resume"]) == 0
    assert Path("whole/adapter.safetensors").read_bytes() == Path("cut/adapter.safetensors").read_bytes()


def test_as_released_the_first_batch_changes_with_each_pass_over_the_pool() -> None:
    """20 images, 2 lower steps of 8: alternations begin after 0, 16, 32, 48 images, in passes 0, 0, 1, 2."""
    import stages
    from config import AlignConfig

    table = {"model": {"backbone": "vit_mini"}, "data": {"dataset": "quilts"}, "lower": {"p_batch": 8}}
    bilevel = {"lower_steps": 2, "upper_steps": 1, "cg_iterations": 2, "hypergrad": "cg", "cg_batch": "first"}
    cfg = AlignConfig.model_validate(table | {"bilevel": bilevel})
    taken: list[tuple[int, int]] = []

    class Watched:
        images = range(20)

        def _replace(self, **changes: Any) -> "Watched":
            return self

        def arrived(self, batch: int, start: int, stop: int) -> Iterator[Any]:
            yield start, None, batch

        def prepared(self, task: Any, x: int, share: Any, whole: int, purpose: str, call: int) -> int:
            taken.append((x, call))
            return x

    pool: Any = Watched()
    for done in (0, 3):  # from the start, and resumed after three products
        taken.clear()
        loss = stages.on_first_batch(lambda *args: torch.zeros(()), None, pool, cfg, done)  # type: ignore[arg-type]
        for _ in range(8 - done):
            loss(torch.zeros(1), {}, None)
        steps = [0, 0, 0, 0, 3, 3, 5, 5]  # the first steps that begin after 0, 20, 40 images
        assert taken == [(step, call) for call, step in enumerate(steps)][done:]
