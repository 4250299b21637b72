"""Algorithm 1 against recorded whole runs, a quadratic with a known optimum, and its own rules."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Recorded, close, recorded
from replay import head_flat, lower_batches, model_of, to_theta, upper_batches
from torch import Tensor

from bisslight import Log, State, align, finite, pretrain, solvable
from config import Bilevel, RunError
from finetune import downstream_loss
from finetune import optimiser as downstream_optimiser
from mfac import Partition, exact, identity, mfac
from runtime import Group, Optimiser, Schedule, constant, decay_groups

RUNS = [
    ("bisslight_tiny_adamw_f64", 1e-10),
    ("bisslight_tiny_clipactive_blockgroups_f64", 1e-10),
    ("bisslight_tiny_sgdupper_wd0_f64", 1e-10),
    ("bisslight_tiny_adamw_f32", 1e-4),  # A starts with zero gradient, which Adam blows up to its rounding
]


@pytest.mark.parametrize(("name", "tolerance"), RUNS)
def test_align_reproduces_a_recorded_run(name: str, tolerance: float) -> None:
    """Same weights, batches and noise as the recorded program: every loss, gradient, rate and parameter agrees."""
    rec = recorded(f"official/{name}.npz")
    source = recorded(f"official/{rec.meta['inputs_in']}") if "inputs_in" in rec.meta else rec
    inputs = Recorded.__new__(Recorded)
    inputs.arrays, inputs.meta = source.arrays | rec.arrays, rec.meta
    r = model_of(inputs, source)
    m, K, dim = rec.meta, r.arch.depth, r.arch.dim
    lower = Schedule(m["sched_T"] * m["NL"], m["sched_warm"] * m["NL"], 1e-6)
    upper = Schedule(m["sched_T"] * m["NU"], m["sched_warm"] * m["NU"], 1e-6)
    theta_D = r.theta.detach().clone().requires_grad_()
    groups = [Group([r.theta], m["p_lr"], m["p_wd"]), *decay_groups(r.phi_P, m["p_head_lr"], m["p_wd"])]
    opt_P = Optimiser(groups, lower, (0.9, 0.95), clip=10)
    tensors_D = [theta_D, *r.phi_D.values()]
    opt_D = downstream_optimiser(tensors_D, m["d_lr"], m["d_wd"], upper, m["d_opt"] == "sgd", clip=10)
    state = State(r.theta, theta_D, r.phi_P, r.phi_D, opt_P, opt_D)
    cfg = Bilevel(alternations=m["T"], lower_steps=m["NL"], upper_steps=m["NU"], lam=m["lam"])
    partition: Partition = "layer" if m["grouping"] == "layer" else "projection"
    seen: dict[str, list[Any]] = {"G": [], "g": [], "q": [], "log": []}

    def spy(G: Tensor, lam: float, theta_P: Tensor, loss_P: Callable[[Tensor], Tensor]) -> Any:
        solve = mfac(G, lam, theta_P, loss_P, partition)
        seen["G"].append(G.transpose(0, 1).clone())  # (N_L, K, p)

        def apply(g: Tensor) -> Tensor:
            q = solve.apply(g)
            seen["g"].append(g)
            seen["q"].append(q)
            return q

        return solve._replace(apply=apply)

    def after(s: State, log: Log) -> None:
        seen["log"].append(log)
        t = log.alternation - 1
        close(s.theta_P.detach(), to_theta(rec["lora_lower_after"][t], K, dim), tolerance)
        close(s.theta_D.detach(), to_theta(rec["lora_upper_after"][t], K, dim), tolerance)
        close(head_flat(s.phi_D).detach(), rec["head_after"][t], tolerance)

    result = align(
        state, cfg, r.task.loss, downstream_loss(r.backbone), spy,
        lower_batches(r), upper_batches(r), r.task.after_step, after,
    )  # fmt: skip

    assert result is state.theta_P and len(seen["log"]) == m["T"]
    for t in range(m["T"]):
        close(seen["G"][t], to_theta(rec["pretext_grads_lora"][t], K, dim), tolerance)
    close(torch.stack(seen["g"]), to_theta(rec["q_grad_LD_at_thetaP"], K, dim), tolerance)
    close(torch.stack(seen["q"]), to_theta(rec["hypergrad"], K, dim), tolerance)
    for field, key in [
        ("loss_P", "lower_loss_pretext"), ("pull", "lower_loss_reg"), ("norm_P", "lower_gradnorm_before_clip"),
        ("loss_D_at_P", "upper_loss_at_thetaP"), ("loss_D_at_D", "upper_loss_at_thetaD"),
        ("norm_D", "upper_gradnorm_before_clip"),
    ]:  # fmt: skip
        close(
            torch.tensor([x for log in seen["log"] for x in getattr(log, field)], dtype=torch.float64),
            rec[key],
            tolerance,
        )
    decoder = torch.cat([r.phi_P[k].detach().flatten() for k in source.meta["decoder_param_order"]])
    close(decoder, rec["decoder_after_last"], 1e-4 if r.dtype is torch.float32 else 1e-6)


# --- a quadratic whose optimum is known ------------------------------------------------------------------------------

LAM = 0.5


class Quadratic:
    """L^P(θ) = ½(θ−a)ᵀH(θ−a) + ½φ², L^D(θ) = ½|θ−c|² + ½φ², with θ (2, 3) and one scalar φ a level.

    θ_P*(θ_D) = (H + λI)⁻¹(Ha + λθ_D), so the upper level (Eq. 3) is quadratic too, and its optimum is one solve.
    """

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        R, self.a, self.c = (torch.randn(*shape, generator=g).double() for shape in ((6, 6), (6,), (6,)))
        self.H = R @ R.T / 3 + 0.1 * torch.eye(6)
        self.S = torch.linalg.inv(self.H + LAM * torch.eye(6).double())  # dθ_P*/dθ_D = λS
        b = self.S @ self.H @ self.a
        A = LAM * self.S
        self.theta_D = torch.linalg.solve(A @ A + torch.eye(6), self.c - A @ (b - self.c))
        self.theta_P = b + A @ self.theta_D

    def loss_P(self, theta: Tensor, phi: dict[str, Tensor], batch: Any) -> Tensor:
        x = theta.flatten() - self.a
        return 0.5 * x @ self.H @ x + 0.5 * phi["x"].square()

    def loss_D(self, theta: Tensor, phi: dict[str, Tensor], batch: Any, drop: Any = None) -> Tensor:
        return 0.5 * (theta.flatten() - self.c).square().sum() + 0.5 * phi["x"].square()

    def state(self) -> State:
        def level() -> tuple[Tensor, dict[str, Tensor], Optimiser]:
            theta = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
            phi = {"x": torch.ones((), dtype=torch.float64, requires_grad=True)}
            groups = [Group([theta, phi["x"]], 0.05, 0.0)]
            return theta, phi, Optimiser(groups, lambda k, base: base, None)

        (theta_P, phi_P, opt_P), (theta_D, phi_D, opt_D) = level(), level()
        return State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D)

    def run(self, hypergrad: Any, **settings: Any) -> State:
        s = self.state()
        cfg = Bilevel(**{"alternations": 120, "lower_steps": 60, "upper_steps": 5, "lam": LAM} | settings)
        align(s, cfg, self.loss_P, self.loss_D, hypergrad, forever(), ((0, None) for _ in forever()), nothing, nothing)
        return s


def forever() -> Iterator[int]:
    while True:
        yield 0


def nothing(*args: Any) -> None:
    """A callback that does nothing."""


def fisher_equals_hessian(H: Tensor) -> Any:
    """M-FAC on m = 6 gradients built so that GᵀG/m = H."""
    G = (6**0.5 * torch.linalg.cholesky(H).T)[None]  # (1 block, 6, 6)

    def hypergrad(_: Tensor, lam: float, theta_P: Tensor, loss_P: Any) -> Any:
        solve = mfac(G, lam, theta_P.reshape(1, 6), loss_P)
        return solve._replace(apply=lambda g: solve.apply(g.reshape(1, 6)).view_as(g))

    return hypergrad


def fisher_of_stored(G: Tensor, lam: float, theta_P: Tensor, loss_P: Any) -> Any:
    """M-FAC as it runs, on what the loop has stored."""
    return mfac(G, lam, theta_P, loss_P)


def test_the_loop_reaches_the_bilevel_optimum_with_the_exact_hypergradient() -> None:
    problem = Quadratic()
    s = problem.run(exact)
    close(s.theta_D.flatten(), problem.theta_D, 1e-4)
    close(s.theta_P.flatten(), problem.theta_P, 1e-4)


def test_the_loop_reaches_the_bilevel_optimum_with_mfac_where_the_fisher_is_the_hessian() -> None:
    problem = Quadratic()
    s = problem.run(fisher_equals_hessian(problem.H))
    close(s.theta_D.flatten(), problem.theta_D, 1e-4)
    close(s.theta_P.flatten(), problem.theta_P, 1e-4)


def test_without_curvature_the_loop_ends_somewhere_else() -> None:
    """The control: the two tests above could fail, because the inverse matters on this problem."""
    problem = Quadratic()
    assert float((problem.run(identity).theta_D.detach().flatten() - problem.theta_D).abs().max()) > 0.05


def test_no_upper_steps_leave_theta_d_and_its_head_alone() -> None:
    problem = Quadratic()
    s = problem.run(identity, upper_steps=0)
    assert not s.theta_D.any()
    assert float(s.phi_D["x"].detach()) == 1.0
    close(s.theta_P.flatten(), problem.S @ problem.H @ problem.a, 1e-4)


@pytest.mark.parametrize("level", ["lower", "upper"])
def test_a_loss_that_is_not_finite_stops_in_its_alternation_and_names_level_and_step(level: str) -> None:
    problem = Quadratic()
    good, calls = (problem.loss_P if level == "lower" else problem.loss_D), 0

    def broken(theta: Tensor, phi: dict[str, Tensor], batch: Any, drop: Any = None) -> Tensor:
        nonlocal calls
        calls += 1
        return good(theta, phi, batch) * (float("nan") if calls == (9 if level == "lower" else 13) else 1)

    setattr(problem, "loss_P" if level == "lower" else "loss_D", broken)
    # the ninth of 7 lower steps each; the thirteenth of 5 upper steps of two passes each
    with pytest.raises(RunError, match=f"alternation 2, {level} level, block 0, step 2: not finite"):
        problem.run(identity, lower_steps=7, upper_steps=5)


def test_stopping_between_alternations_and_going_on_changes_nothing() -> None:
    """The state holds all there is: 6 alternations, or 4, save, load into fresh tensors, 2 more."""
    problem = Quadratic()
    whole = problem.run(exact, alternations=6)
    first = problem.run(exact, alternations=4)
    fresh = problem.run(exact, alternations=1)
    fresh.load_state_dict(first.state_dict())
    cfg = Bilevel(alternations=6, lower_steps=60, upper_steps=5, lam=LAM)
    args = (exact, forever(), ((0, None) for _ in forever()), nothing, nothing)
    align(fresh, cfg, problem.loss_P, problem.loss_D, *args)
    assert torch.equal(whole.theta_P, fresh.theta_P)
    assert torch.equal(whole.theta_D, fresh.theta_D)


def test_gradients_are_stored_before_the_pull() -> None:
    """The second step is the first with θ_P ≠ θ_D, so a pull that leaked into G would show there."""
    problem = Quadratic()
    seen: list[Tensor] = []

    def spy(G: Tensor, lam: float, theta_P: Tensor, loss_P: Any) -> Any:
        seen.append(G.clone())
        return identity(G, lam, theta_P, loss_P)

    problem.run(spy, alternations=1, lower_steps=2)
    first = -problem.H @ problem.a  # ∇L^P at θ_P = 0
    theta = -0.05 * first  # SGD's first step; the pull is still zero
    close(seen[0][:, 0].flatten(), first, 1e-12)
    close(seen[0][:, 1].flatten(), problem.H @ (theta - problem.a), 1e-12)


def test_the_first_block_and_step_that_are_not_finite_are_named() -> None:
    """Behind the loss, the pull and the norm there is a flag a block."""
    finite(4, "lower", 2, torch.tensor([1.0, 2.0, 3.0, 1.0, 0.0]))
    finite(4, "upper", 2, torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(RunError, match="alternation 5, lower level, block 1, step 2: not finite"):
        finite(4, "lower", 2, torch.tensor([1.0, 2.0, float("inf"), 1.0, 0.0]))
    with pytest.raises(RunError, match="alternation 5, upper level, step 2: not finite"):
        finite(4, "upper", 2, torch.tensor([1.0, float("nan"), 3.0]))
    with pytest.raises(RunError, match="alternation 5, hypergradient, block 1: not finite"):
        solvable(4, torch.tensor([True, False]))


def test_pretraining_ends_before_a_step_that_broke_is_seen_by_anyone() -> None:
    """A finite loss whose gradient is not: neither the teacher, nor the report, nor a checkpoint gets to it."""
    weight = {"w": torch.zeros(2, requires_grad=True)}
    opt = Optimiser([Group([weight["w"]], 0.1, 0.0)], constant, (0.9, 0.95))

    def loss(theta: Any, phi: Any, batch: Any) -> Tensor:
        return weight["w"].sum().abs().sqrt() * 0 + weight["w"].sum()  # the root of 0 has no slope

    def never(*args: Any) -> None:
        pytest.fail("went on")

    with pytest.raises(RunError, match="pretrain step 1: the loss is 0 and its gradient's norm nan"):
        pretrain(weight, {}, loss, opt, iter([None]), never, never, pause=never)


@pytest.mark.parametrize("level", ["lower", "upper"])
def test_a_loss_that_is_not_finite_ends_the_run_in_its_very_step(level: str) -> None:
    """No further pass is made after the one that broke (lower), or than the step's second one (upper)."""
    problem, calls = Quadratic(), {"lower": 0, "upper": 0}

    def counting(name: str, loss: Any) -> Any:
        def counted(*args: Any) -> Tensor:
            calls[name] += 1
            value: Tensor = loss(*args)
            return value * (float("nan") if name == level and calls[name] == 3 else 1)

        return counted

    problem.loss_P, problem.loss_D = counting("lower", problem.loss_P), counting("upper", problem.loss_D)  # type: ignore[method-assign]
    with pytest.raises(RunError, match=f"{level} level"):
        problem.run(identity, lower_steps=7, upper_steps=5)
    assert calls == ({"lower": 3, "upper": 0} if level == "lower" else {"lower": 7, "upper": 4})


@pytest.mark.parametrize("stop", range(1, 13))
def test_stopping_after_any_step_and_going_on_changes_nothing(stop: int) -> None:
    """4 lower and 2 upper steps an alternation: wherever it stops, the state, saved and loaded, is where it goes on."""
    problem = Quadratic()
    whole = problem.run(fisher_of_stored, alternations=3, lower_steps=4, upper_steps=2)
    s, steps = problem.state(), 0

    class Enough(Exception):
        pass

    def pause(s: State) -> None:
        nonlocal steps
        steps += 1
        if steps == stop:
            raise Enough

    cfg = Bilevel(alternations=3, lower_steps=4, upper_steps=2, lam=LAM)
    args = (problem.loss_P, problem.loss_D, fisher_of_stored, forever(), ((0, None) for _ in forever()))
    with pytest.raises(Enough):
        align(s, cfg, *args, nothing, nothing, pause=pause)
    fresh = problem.state()
    fresh.load_state_dict(s.state_dict())
    assert s.G is not None
    fresh.G, fresh.last = s.G.clone(), 0
    fresh.G[:, len(s.lower) :] = float("nan")  # what was not stored yet is not used
    align(fresh, cfg, *args, nothing, nothing)
    assert torch.equal(whole.theta_P, fresh.theta_P)
    assert torch.equal(whole.theta_D, fresh.theta_D)
