"""Algorithm 1 against recorded whole runs, a quadratic with a known optimum, and its own rules."""

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Recorded, close, recorded
from replay import (
    Recording,
    Steps,
    head_flat,
    lower_batches,
    recording,
    state_of,
    steps_of,
    to_theta,
    upper_batches,
)  # fmt: skip
from torch import Tensor

import bisslight
import cg
from bisslight import Diverged, Log, State, algorithm_1, gradients, numbers
from config import Arch
from ijepa import IJEPA
from lora import Backbone, DownstreamLoss, Examples, init_head, init_stats, init_theta
from mfac import Partition, exact, identity, mfac
from mfac import recursion as by_recursion
from training import Group, Optimiser, trainable
from weights import build_head, build_vit

RUNS = [
    ("bisslight_tiny_adamw_f64", 1e-10),
    ("bisslight_tiny_clipactive_blockgroups_f64", 1e-10),
    ("bisslight_tiny_sgdupper_wd0_f64", 1e-10),
    ("bisslight_tiny_adamw_f32", 1e-4),  # A starts with a zero gradient; Adam enlarges its rounding
]


def replayed(name: str) -> tuple[Recorded, Recording]:
    rec = recorded(f"official/{name}.npz")
    source = recorded(f"official/{rec.meta['inputs_in']}") if "inputs_in" in rec.meta else rec
    inputs = Recorded.__new__(Recorded)
    inputs.arrays, inputs.meta = (
        source.arrays | rec.arrays,
        rec.meta | {"decoder_param_order": source.meta["decoder_param_order"]},
    )
    return inputs, recording(inputs, source)


@pytest.mark.parametrize("hypergrad", [mfac, by_recursion])
@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize(("name", "tolerance"), RUNS)
def test_algorithm_1_reproduces_a_recorded_run(
    name: str, tolerance: float, micro: int | None, hypergrad: Any
) -> None:
    """Same weights, batches and noise as the recorded program: all numbers of all steps agree."""
    if (micro or hypergrad is by_recursion) and name != RUNS[0][0]:
        pytest.skip("one recording is enough for this variant")
    rec, r = replayed(name)
    m, K, dim = rec.meta, r.arch.depth, r.arch.dim
    partition: Partition = "layer" if m["grouping"] == "layer" else "projection"
    seen: dict[str, list[Tensor]] = {"G": [], "g": [], "q": []}

    def spy(G: Tensor, lam: float, H: Any) -> Any:
        inverse = hypergrad(G, lam, H, partition)
        seen["G"].append(G.transpose(0, 1).clone())  # (N_L, K, p)

        def kept(g: Tensor) -> Tensor:
            seen["g"].append(g)
            seen["q"].append(inverse(g))
            return seen["q"][-1]

        return kept

    s, logs = state_of(r), list[Log]()
    for log in algorithm_1(
        s, steps_of(m), r.task, r.loss_D, spy, lower_batches(r), upper_batches(r), micro
    ):
        t = log.alternation - 1
        logs.append(log)
        close(s.theta_P, to_theta(rec["lora_lower_after"][t], K, dim), tolerance)
        close(s.theta_D, to_theta(rec["lora_upper_after"][t], K, dim), tolerance)
        close(head_flat(s.phi_D), rec["head_after"][t], tolerance)
        close(seen["G"][t], to_theta(rec["pretext_grads_lora"][t], K, dim), tolerance)
    assert s.done == len(logs) == m["T"]
    close(torch.stack(seen["g"]), to_theta(rec["q_grad_LD_at_thetaP"], K, dim), tolerance)
    close(torch.stack(seen["q"]), to_theta(rec["hypergrad"], K, dim), tolerance)
    for field, key in [
        ("loss_P", "lower_loss_pretext"), ("proximal", "lower_loss_reg"),
        ("norm_P", "lower_gradnorm_before_clip"), ("loss_D_at_P", "upper_loss_at_thetaP"),
        ("loss_D_at_D", "upper_loss_at_thetaD"), ("norm_D", "upper_gradnorm_before_clip"),
    ]:  # fmt: skip
        values = [x for log in logs for x in getattr(log, field)]
        close(torch.tensor(values, dtype=torch.float64), rec[key], tolerance)
    decoder = torch.cat([r.phi_P[k].flatten() for k in m["decoder_param_order"]])
    close(decoder, rec["decoder_after_last"], 1e-4 if r.dtype is torch.float32 else 1e-6)


# --- the text -------------------------------------------------------------------------------------


def body() -> tuple[list[ast.stmt], list[str]]:
    """Statements of the generator, docstring out, and its lines."""
    source = inspect.getsource(algorithm_1)
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    statements = [n for n in ast.walk(function) if isinstance(n, ast.stmt) and n is not function]
    return [n for n in statements if n is not function.body[0]], source.splitlines()


def test_the_generator_is_algorithm_1_with_almost_nothing_else_in_it() -> None:
    """At most 30 statements, at most 8 of them, which log, without a line; lines are in order."""
    statements, lines = body()
    assert len(statements) <= 30
    marks = []
    for n in sorted(statements, key=lambda n: n.lineno):
        inner = getattr(n, "body", None)
        own = range(n.lineno, (inner[0].lineno if inner else (n.end_lineno or 0) + 1))
        comment = "".join(lines[i - 1].partition("#")[2] for i in own)
        marks.append([int(x) for x in re.findall(r"\bl\.(\d+)", comment)])
    assert sum(not mark for mark in marks) <= 8
    order = [x for mark in marks for x in mark]
    assert order == sorted(order)
    assert {*order} == {*range(3, 17)}
    assert "Line 17" in (algorithm_1.__doc__ or "")


# --- a quadratic whose optimum is known -----------------------------------------------------------

LAM = 0.5


class Nothing(NamedTuple):
    """A batch of one image that no loss looks at."""

    images: Tensor = torch.zeros(1)


class Quadratic:
    """L^P(θ) = ½(θ−a)ᵀH(θ−a) + ½φ², L^D(θ) = ½|θ−c|² + ½φ², with θ (2, 3) and one φ a level.

    θ_P*(θ_D) = (H + λI)⁻¹(Ha + λθ_D), so the upper level (Eq. 3) is quadratic too, and its optimum
    is one solve. It is its own pretext task.
    """

    state: dict[str, Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        R, self.a, self.c = (torch.randn(*n, generator=g).double() for n in ((6, 6), (6,), (6,)))
        self.H = R @ R.T / 3 + 0.1 * torch.eye(6)
        self.S = torch.linalg.inv(self.H + LAM * torch.eye(6).double())  # dθ_P*/dθ_D = λS
        b, A = self.S @ self.H @ self.a, LAM * self.S
        self.theta_D = torch.linalg.solve(A @ A + torch.eye(6), self.c - A @ (b - self.c))
        self.theta_P = b + A @ self.theta_D

    def loss(self, theta: Tensor, phi: dict[str, Tensor], batch: Any) -> Tensor:
        x = theta.flatten() - self.a
        return 0.5 * x @ self.H @ x + 0.5 * phi["x"].square()

    def loss_D(
        self, theta: Tensor, phi: dict[str, Tensor], batch: Any, regularise: bool = False
    ) -> Tensor:
        return 0.5 * (theta.flatten() - self.c).square().sum() + 0.5 * phi["x"].square()

    def after_step(self, theta_P: Tensor) -> None:
        """No teacher."""

    def begin(self, device: str = "cpu") -> State:
        def level() -> tuple[Tensor, dict[str, Tensor], Optimiser]:
            theta = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True, device=device)
            phi = {"x": torch.ones((), dtype=torch.float64, requires_grad=True, device=device)}
            return theta, phi, Optimiser([Group([theta, phi["x"]], 0.05, 0.0)], base, None)

        (theta_P, phi_P, opt_P), (theta_D, phi_D, opt_D) = level(), level()
        return State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D)

    def alternations(self, hypergrad: Any, s: State, **steps: int) -> Iterator[Log]:
        c = Steps(**{"alternations": 90, "lower_steps": 40, "upper_steps": 5, "lam": LAM} | steps)
        batches = itertools.repeat(Nothing())
        return algorithm_1(s, c, self, self.loss_D, hypergrad, batches, batches)  # type: ignore[arg-type]

    def run(self, hypergrad: Any, **steps: int) -> State:
        s = self.begin()
        for _ in self.alternations(hypergrad, s, **steps):
            pass
        return s


def base(k: int, rate: float) -> float:
    return rate


def fisher_equals_hessian(H: Tensor) -> Any:
    """M-FAC on m = 6 gradients built so that GᵀG/m = H."""
    G = (6**0.5 * torch.linalg.cholesky(H).T)[None]  # (1 block, 6, 6)

    def hypergrad(_: Tensor, lam: float, H: Any) -> Any:
        inverse = mfac(G, lam)
        return lambda g: inverse(g.reshape(1, 6)).view_as(g)

    return hypergrad


def converged(G: Tensor, lam: float, H: Any) -> Any:
    """Conjugate gradients until the end, with Eq. 5's factors."""
    return cg.cg(G, lam, H, 12, 0.0)


@pytest.mark.parametrize("how", ["exact", "cg", "fisher"])
def test_the_loop_reaches_the_bilevel_optimum(how: str) -> None:
    """With the exact inverse, by CG too, and by M-FAC where the Fisher is the Hessian."""
    problem = Quadratic()
    known = {"exact": exact, "cg": converged, "fisher": fisher_equals_hessian(problem.H)}
    s = problem.run(known[how])
    close(s.theta_D.flatten(), problem.theta_D, 1e-4)
    close(s.theta_P.flatten(), problem.theta_P, 1e-4)


def test_without_curvature_the_loop_ends_somewhere_else() -> None:
    """The control: the test above could fail, because the inverse matters on this problem."""
    problem = Quadratic()
    off = problem.run(identity).theta_D.detach().flatten() - problem.theta_D
    assert float(off.abs().max()) > 0.05


def test_no_upper_steps_leave_theta_d_and_its_head_alone() -> None:
    problem = Quadratic()
    s = problem.run(identity, upper_steps=0)
    assert not s.theta_D.any()
    assert float(s.phi_D["x"].detach()) == 1.0
    close(s.theta_P.flatten(), problem.S @ problem.H @ problem.a, 1e-4)


@pytest.mark.parametrize("level", ["lower", "upper"])
def test_a_loss_that_is_not_finite_is_told_with_alternation_level_and_step(level: str) -> None:
    problem = Quadratic()
    name = "loss" if level == "lower" else "loss_D"
    good, calls = getattr(problem, name), 0

    def broken(*args: Any, **how: Any) -> Tensor:
        nonlocal calls
        calls += 1  # the ninth of 7 lower steps each; the 13th of 5 upper steps of two passes each
        factor = float("nan") if calls == (9 if level == "lower" else 13) else 1
        found: Tensor = good(*args, **how) * factor
        return found

    setattr(problem, name, broken)
    with pytest.raises(Diverged, match=f"alternation 2, {level} level, step 2: .*not finite"):
        problem.run(identity, lower_steps=7, upper_steps=5)


def test_a_block_whose_hypergradient_is_not_finite_is_named() -> None:
    def broken(G: Tensor, lam: float, H: Any) -> Any:
        return lambda g: g / torch.tensor([[1.0], [0.0]])

    with pytest.raises(Diverged, match="upper level, step 1, hypergradient of block 1"):
        Quadratic().run(broken)


def test_numbers_are_lists_by_step_and_the_first_bad_one_is_named() -> None:
    assert numbers("x", [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], 2) == [[1, 3], [2, 4]]
    assert numbers("x", [], 2) == [[], []]
    with pytest.raises(Diverged, match="x, step 2: "):
        numbers("x", [torch.zeros(2), torch.tensor([float("inf"), 0.0])], 2)


def test_stopping_between_alternations_and_going_on_changes_nothing() -> None:
    """The state holds all there is: six alternations at once, or four and then two."""
    problem = Quadratic()
    whole, s = problem.run(exact, alternations=6), problem.begin()
    for steps in (4, 6):
        found = [log.alternation for log in problem.alternations(exact, s, alternations=steps)]
        assert found == ([1, 2, 3, 4] if steps == 4 else [5, 6])
    assert torch.equal(whole.theta_P, s.theta_P)
    assert torch.equal(whole.theta_D, s.theta_D)


def test_gradients_are_stored_without_the_proximal_term() -> None:
    """In the second step θ_P ≠ θ_D for the first time, so the term would show there."""
    problem = Quadratic()
    seen: list[Tensor] = []

    def spy(G: Tensor, lam: float, H: Any) -> Any:
        seen.append(G.clone())
        return identity(G, lam, H)

    problem.run(spy, alternations=1, lower_steps=2)
    first = -problem.H @ problem.a  # ∇L^P at θ_P = 0
    theta = -0.05 * first  # SGD's first step; the proximal term is still zero
    close(seen[0][:, 0].flatten(), first, 1e-12)
    close(seen[0][:, 1].flatten(), problem.H @ (theta - problem.a), 1e-12)


def test_theta_without_rows_and_batches_that_end_are_refused_in_words() -> None:
    theta = torch.zeros(6, requires_grad=True)
    with pytest.raises(ValueError, match=r"must be \(K, p\)"):
        State(theta, theta.clone(), {}, {}, None, None)  # type: ignore[arg-type]
    problem, s = Quadratic(), Quadratic().begin()
    none: Iterator[Any] = iter(())
    found = algorithm_1(s, Steps(1, 1, 1, 0.1), problem, problem.loss_D, identity, none, none)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pretext: has no more batches"):
        next(found)


class Weighted(NamedTuple):
    images: Tensor
    drop: Tensor | None


@pytest.mark.parametrize("drop", [None, torch.rand(7, 2).double()])
def test_micro_batches_give_the_gradients_of_the_whole_batch(drop: Tensor | None) -> None:
    """Parts of 3, 3 and 1 images, weighted by their sizes; None in a batch stays None."""
    x, theta = torch.randn(7, 4).double(), torch.randn(1, 4).double().requires_grad_()
    phi = {"a": torch.tensor(2.0).double().requires_grad_()}

    def loss(theta: Tensor, phi: dict[str, Tensor], batch: Any) -> Tensor:
        y = (batch.images @ theta[0]).square() * phi["a"]
        assert (batch.drop is None) == (drop is None)
        return (y if batch.drop is None else y * batch.drop[:, 0]).mean()

    whole = gradients(loss, theta, phi, Weighted(x, drop))
    parts = gradients(loss, theta, phi, Weighted(x, drop), micro=3)
    close(parts.loss, whole.loss, 1e-12)
    close(parts.theta, whole.theta, 1e-12)
    close(parts.phi["a"], whole.phi["a"], 1e-12)


# --- devices, without having one ------------------------------------------------------------------


SAMPLER = SimpleNamespace(
    targets=4, contexts=1, target_scale=(0.15, 0.2), context_scale=(0.85, 1.0), aspect=(0.75, 1.5),
    min_keep=4, overlap=False,
)  # fmt: skip


def mae_on_meta() -> tuple[State, Any, Any, Iterator[Any], Iterator[Any]]:
    """A recorded run's networks and batches, without their numbers."""
    _, r = replayed(RUNS[0][0])
    r.backbone.to("meta")
    r.task.decoder.to("meta")
    r = r._replace(theta=meta(r.theta), phi_P=meta(r.phi_P), phi_D=meta(r.phi_D))
    return state_of(r), r.task, r.loss_D, map(meta, lower_batches(r)), map(meta, upper_batches(r))


def ijepa_on_meta() -> tuple[State, Any, Any, Iterator[Any], Iterator[Any]]:
    """The same alternation with I-JEPA, whose masks are drawn on the CPU; a BatchNorm head."""
    _, r = replayed(RUNS[0][0])
    arch = Arch(32, 2, 4, 64, 8, class_token=False, predictor=(16, 1))
    backbone = Backbone(build_vit(arch)).requires_grad_(False).to("meta")
    theta = meta(init_theta(2, 4, 32, torch.Generator()).requires_grad_())
    predictor = build_head(arch, "ijepa").to("meta")
    task = IJEPA(backbone, predictor, SAMPLER, (0.9, 10), theta)  # type: ignore[arg-type]
    phi_D = meta(trainable(init_head(32, 3, torch.Generator(), batchnorm=True)))
    loss_D = DownstreamLoss(backbone, stats=init_stats(phi_D))
    r = r._replace(theta=theta, phi_P=trainable(task.phi), phi_D=phi_D)
    images = torch.zeros(4, 3, 64, 64, device="meta")
    drawn = [meta(x) for x in task.draw(4, torch.Generator())]
    batches = itertools.repeat(task.prepare(images, *drawn))
    examples = itertools.repeat(Examples(images, torch.zeros(4, dtype=torch.long, device="meta")))
    return state_of(r), task, loss_D, batches, examples


def meta(x: Any) -> Any:
    """Tensors, or a NamedTuple or dict of them, on the meta device."""
    if isinstance(x, Tensor):
        return x.detach().to("meta").requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {name: meta(tensor) for name, tensor in x.items()}
    return x if x is None else type(x)(*map(meta, x))


@pytest.mark.parametrize("hypergrad", [mfac, identity])
@pytest.mark.parametrize("made", [mae_on_meta, ijepa_on_meta])
def test_a_device_is_asked_for_numbers_once_a_level(
    made: Any, hypergrad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device every question for a value is an error, and so is a mix of devices.

    The one function that reads numbers is replaced, and counted.
    """
    asked: list[str] = []

    def read(where: str, rows: list[Tensor], width: int) -> list[list[float]]:
        assert all(row.device.type == "meta" for row in rows)
        asked.append(where)
        return [[0.0] * len(rows)] * width

    monkeypatch.setattr(bisslight, "numbers", read)
    s, task, loss_D, pretext, examples = made()
    for _ in algorithm_1(s, Steps(2, 2, 1, 0.1), task, loss_D, hypergrad, pretext, examples):
        pass
    levels = [f"alternation {t}, {level} level" for t in (1, 2) for level in ("lower", "upper")]
    assert asked == levels


def test_bfloat16_autocast_keeps_gradients_in_float32_and_losses_within_2_percent() -> None:
    """On the CPU, through the code that a GPU runs."""
    logs, kinds = list[Log](), set()

    def spy(G: Tensor, lam: float, H: Any) -> Any:
        kinds.add(G.dtype)
        return mfac(G, lam, H)

    for amp in (False, True):
        rec, r = replayed("bisslight_tiny_adamw_f32")
        steps = steps_of(rec.meta)._replace(alternations=1)
        batches = lower_batches(r), upper_batches(r)
        logs += algorithm_1(state_of(r), steps, r.task, r.loss_D, spy, *batches, amp=amp)
    assert kinds == {torch.float32}
    for name in ("loss_P", "loss_D_at_P", "loss_D_at_D"):
        a, b = (torch.tensor(getattr(log, name)) for log in logs)
        assert not torch.equal(a, b)
        torch.testing.assert_close(b, a, rtol=0.02, atol=0)
