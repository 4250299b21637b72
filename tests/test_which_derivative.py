"""Which derivative: U by finite differences of Algorithm 1 itself, the arms, the files."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bisslight import Passes, State, agreement, algorithm_1
from config import AlignConfig
from experiments import which_derivative as plan
from experiments.unrolled import Lower, divided, end_of_lower_steps, unrolled
from hypergradients import identity
from support.benchmarks import INK, omniglot_task
from support.errors import UsageError
from support.optim import Group, Optimiser, Schedule

# --- the derivative, on a tiny model in float64 ---------------------------------------------------


class Points(NamedTuple):
    """A batch: some x and y."""

    x: Tensor
    y: Tensor


class Tiny:
    """A pretext task: y by tanh(x θ) and a head; θ (2, 3). Its gradients of row 1 may all be 0."""

    def __init__(self, dead: bool = False) -> None:
        self.dead = dead
        self.state: dict[str, Tensor] = {}
        self.phi = {"w": torch.tensor([0.3, -0.7]).double(), "b": torch.tensor([0.1]).double()}

    def loss(self, theta: Tensor, phi: dict[str, Tensor], batch: Points) -> Tensor:
        if self.dead:
            theta = torch.stack([theta[0], theta[1].detach()])
        hidden = torch.tanh(batch.x @ theta.mT)
        return (hidden @ phi["w"] + phi["b"] - batch.y).square().mean()

    def after_step(self, theta_P: Tensor) -> None:
        pass


def loss_D(theta: Tensor, phi: dict[str, Tensor], batch: Points) -> Tensor:
    return (torch.sin(batch.x @ theta.mT).sum(1) * phi["c"] - batch.y).square().mean()


class Steps(NamedTuple):
    """Algorithm 1's."""

    alternations: int = 3
    lower_steps: int = 6
    upper_steps: int = 1
    lam: float = 0.3


def run_tiny(
    move: Tensor | None, hypergrad: Any = None, clip: float = math.inf, dead: bool = False
) -> Lower:
    """Algorithm 1, θ_D moved before the last lower level; what is kept of that, with its state."""
    random = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=random, dtype=torch.float64)
    theta = draw(2, 3)
    task = Tiny(dead)
    phi_P = {name: tensor.clone().requires_grad_() for name, tensor in task.phi.items()}
    phi_D = {"c": torch.tensor([0.8]).double().requires_grad_()}
    theta_P, theta_D = theta.clone().requires_grad_(), theta.clone().requires_grad_()
    groups = [Group([theta_P], 0.05, 0.1), Group([phi_P["w"]], 0.1, 0.1)]
    groups.append(Group([phi_P["b"]], 0.1, 0.0))
    opt_P = Optimiser(groups, Schedule(60, 4, 1e-6), (0.9, 0.95), clip)
    opt_D = Optimiser([Group([theta_D, *phi_D.values()], 0.05, 0.0)], None, (0.9, 0.999))
    state = State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D)
    batches = [Points(draw(5, 3), draw(5)) for _ in range(18)]

    def pretext() -> Any:
        for number, batch in enumerate(batches):
            if number == 12 and move is not None:
                with torch.no_grad():
                    theta_D.add_(move)
            yield batch

    lower = Lower(pretext(), state, task, 6, Steps().lam)
    downstream = iter([Points(draw(4, 3), draw(4)) for _ in range(3)])
    of_arm = hypergrad(lower) if hypergrad else identity
    list(algorithm_1(state, Steps(), task, loss_D, of_arm, lower, downstream, Passes()))
    return lower


def measure(ask: Callable[[Lower], Tensor], **more: Any) -> list[Tensor]:
    """What `ask` finds after the lower steps of each alternation."""
    found: list[Tensor] = []

    def of_arm(lower: Lower) -> Any:
        def hypergrad(G: Tensor, lam: float, H: Any) -> Any:
            found.append(ask(lower))
            return torch.clone

        return hypergrad

    run_tiny(None, of_arm, **more)
    return found


QUESTION = Points(torch.linspace(-1, 1, 12).double().view(4, 3), torch.ones(4).double())


def L_D(theta: Tensor) -> Tensor:
    return loss_D(theta, {"c": torch.tensor([0.9]).double()}, QUESTION)


@pytest.mark.parametrize("clip", [math.inf, 0.4])
def test_U_is_what_finite_differences_of_algorithm_1_say(clip: float) -> None:
    """θ_D is moved to both sides before the lower level: all else of Algorithm 1 is as it is.

    The differences are off by the square of 1e-5 times a third derivative.
    """

    def ask(lower: Lower) -> Tensor:
        theta_P = lower.state.theta_P.detach().requires_grad_()
        (g,) = torch.autograd.grad(L_D(theta_P), theta_P)
        return unrolled(lower)(g)

    U = measure(ask, clip=clip)[-1]  # of the last alternation
    differences = torch.zeros(2, 3).double()
    for place in product(range(2), range(3)):
        move = torch.zeros(2, 3).double()
        move[place] = 1e-5
        ends = [L_D(run_tiny(side * move, clip=clip).state.theta_P.detach()) for side in (1, -1)]
        differences[place] = (ends[0] - ends[1]) / 2e-5
    assert float((U - differences).norm() / U.norm()) < 1e-6


def test_the_steps_that_are_repeated_end_where_algorithm_1_did() -> None:
    """In float64, with clipping: only rounding is forgiven."""
    lower = run_tiny(None, clip=0.4)
    for graph in (False, True):
        end = end_of_lower_steps(lower, lower.start.theta_D, graph)
        torch.testing.assert_close(end.detach(), lower.state.theta_P.detach(), rtol=1e-12, atol=0)


def test_a_number_that_never_had_a_gradient_has_no_derivative() -> None:
    """Its v is 0 as long as θ_P = θ_D: Adam's derivative would be λ η / eps, 1e7 times another."""

    def ask(lower: Lower) -> Tensor:
        lower.given = lower.given[:1]  # the first step alone
        U = unrolled(lower)(torch.ones(2, 3).double())
        lower.given = lower.given * 6
        return U

    U = measure(ask, dead=True)[0]
    assert torch.isfinite(U).all()
    assert (U[1] == 0).all() and (U[0] != 0).all()


def test_A_divides_by_the_root_of_adams_corrected_second_moment() -> None:
    """By hand, from the gradients that the optimiser got."""
    lower = run_tiny(None)
    given: list[Tensor] = []
    random = torch.Generator().manual_seed(1)
    opt_P = lower.opt_P
    opt_P.wrapped.state.clear()
    opt_P.step = 0
    tensors = [lower.state.theta_P, *lower.state.phi_P.values()]
    for _ in range(4):
        gradients = [torch.randn(x.shape, generator=random, dtype=torch.float64) for x in tensors]
        given.append(gradients[0].clone())
        opt_P.update(tensors, gradients)
    weights = [0.05 * 0.95 ** (3 - k) / (1 - 0.95**4) for k in range(4)]
    v = sum(weight * gradient**2 for weight, gradient in zip(weights, given, strict=True))
    g = torch.ones(2, 3).double()
    torch.testing.assert_close(divided(lower)(g), g / (v.sqrt() + 1e-8))


# --- the arms, on the network of the study --------------------------------------------------------

FEW = {"alternations": 2, "warmup": 0, "lower_steps": 2, "upper_steps": 2, "probe_epochs": 1}
SETTINGS: Any = {"backbone": "vit_mini", "dataset": "omniglot:Tagalog", "device": "cpu"}


def aligned(name: str, task: Any = None, cosines: Any = ()) -> plan.Aligned:
    """Two alternations of an arm."""
    cfg = AlignConfig(**SETTINGS | {"p_batch": 8, "d_batch": 8} | FEW)
    task = task or omniglot_task("Tagalog", 0)
    return plan.align_arm(name, cfg, task, plan.pool_for("Tagalog"), cosines)


def test_C_turns_as_far_from_g_as_U_did() -> None:
    of_U = aligned("U")
    assert len(of_U.cosine) == 4 and max(map(abs, of_U.cosine)) < 0.999
    assert aligned("C", cosines=of_U.cosine).cosine == pytest.approx(of_U.cosine, abs=2e-6)


def test_every_q_has_the_length_of_g() -> None:
    random = torch.Generator().manual_seed(0)
    g = torch.randn(4, 50, generator=random)
    for length in (1e-12, 1e9):
        q = plan.as_long_as(g, length * torch.randn(4, 50, generator=random))
        assert float(agreement(g, q)[0]) == pytest.approx(1, abs=1e-6)
    placebo = plan.turned(g, iter([-0.3]), random)
    assert [float(x) for x in agreement(g, placebo)] == pytest.approx([1, -0.3], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", plan.ARMS)
def test_an_arm_sees_the_labels_that_the_protocol_names_and_no_others(name: str) -> None:
    """θ_P ends elsewhere if, and only if, labels are changed that the arm sees."""
    task = omniglot_task("Tagalog", 0)
    cosines = [0.8] * 4
    theta_P = aligned(name, task, cosines).theta_P
    changed = []
    for part in ("val", "test"):
        split = getattr(task, part)
        other = task._replace(**{part: type(split)(split.images, split.targets.flip(0))})
        if not torch.equal(aligned(name, other, cosines).theta_P, theta_P):
            changed.append(part)
    assert changed == (["test"] if name == "oracle-G" else ["val"])


@pytest.mark.slow
def test_the_repeated_steps_of_the_real_network_end_where_it_did() -> None:
    """In float32, other sums of attention: rounding, and Adam, which may enlarge it."""
    cfg = AlignConfig(**SETTINGS | {"p_batch": 8, "d_batch": 8} | FEW)
    aligning = plan.start(cfg, omniglot_task("Tagalog", 0), plan.pool_for("Tagalog"))
    aligning.run(identity)
    lower, theta_P = aligning.lower, aligning.prepared.state.theta_P
    moved = (theta_P - lower.start.theta_P).norm()
    assert (end_of_lower_steps(lower, lower.start.theta_D) - theta_P).norm() < 1e-3 * moved


@pytest.mark.slow
def test_a_small_move_gains_what_the_derivative_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """To first order the response along g is that along U, times their cosine."""
    monkeypatch.setattr(plan, "ALIGN", FEW | {"p_batch": 8, "d_batch": 8, "alternations": 4})
    monkeypatch.setattr(plan, "MOVE", 0.02)
    monkeypatch.setattr(plan, "commit", lambda: "made up")
    cell = plan.Cell("Tagalog", 0, 9)
    (one,) = plan.measure_gains(cell, SETTINGS | {"seed": 9}, at=(3,))
    for arm in ("N", "G", "A", "C"):
        expected = one.own["U"] * one.with_U[arm]
        assert one.own[arm] == pytest.approx(expected, abs=0.05 * one.own["U"])
    assert one.next.keys() == one.own.keys() and one.next != one.own
    assert one.with_g["C"] == pytest.approx(one.with_g["U"], abs=1e-5)


def test_no_picture_of_a_task_is_in_its_pool() -> None:
    assert len(plan.CELLS) == len({*plan.CELLS}) == 64
    for alphabet in {cell.alphabet for cell in plan.CELLS}:
        pool = plan.pool_for(alphabet)
        assert (pool.mean, pool.std) == INK
        pictures = {image.numpy().tobytes() for image in pool.images}
        drawings = omniglot_task(alphabet, 46).train.images
        assert len(pool.images) > 2000
        assert not {image.numpy().tobytes() for image in drawings} & pictures


# --- runs and files -------------------------------------------------------------------------------

MEASURED = plan.read_runs(plan.RESULTS / plan.RUNS)


def test_P_is_peft_on_thirteen_drawers_from_where_0v_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other arm fine-tunes on ten; what diverges counts as chance."""
    calls: list[tuple[float, int, Tensor]] = []

    def fine_tune(_: Any, rate: float, epochs: int, theta: Tensor, warmup: int, task: Any) -> Any:
        calls.append((rate, len(task.train.targets), theta))
        if rate == 0.03:
            raise plan.Diverged("it did")
        return SimpleNamespace(curve={5: 40.0})

    theta = torch.ones(2)
    monkeypatch.setattr(plan, "fine_tune", fine_tune)
    monkeypatch.setattr(plan, "align_arm", lambda *_: plan.Aligned(theta, None, (), {}))
    monkeypatch.setattr(plan, "sha256", lambda path: "digest")
    monkeypatch.setattr(plan, "commit", lambda: "made up")
    settings = SETTINGS | {"weights": Path("there")}
    runs = plan.run_arm("0v", plan.Cell("Tagalog", 0, 9), settings)
    assert [run.arm for run in runs] == ["0v", "P"]
    expected = [(rate, images, theta) for images, rate in product((170, 221), plan.RATES)]
    assert calls == expected
    assert [run.ends for run in runs] == [{"0.01": 40.0, "0.02": 40.0, "0.03": 100 / 17}] * 2
    assert all(run.diverged for run in runs)
    assert [run.arm for run in plan.run_arm("G", plan.Cell("Tagalog", 0, 9), settings)] == ["G"]


def test_every_arm_is_run_once_also_after_a_stop_and_gains_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[plan.Cell, str]] = []
    of_C: list[Any] = []
    two = plan.CELLS[:2]
    stops = {4, 9}

    def run_arm(arm: str, cell: plan.Cell, _: Any, cosines: Any) -> list[plan.Run]:
        if len(done) in stops:
            stops.discard(len(done))
            raise KeyboardInterrupt
        done.append((cell, arm))
        of_C.extend([cosines] if arm == "C" else [])
        names = ("0v", "P") if arm == "0v" else (arm,)
        return [run for run in MEASURED if run.cell == cell and run.arm in names]

    line = plan.read_gains(plan.RESULTS / plan.GAINS)[0]
    monkeypatch.setattr(plan, "CELLS", two)
    monkeypatch.setattr(plan, "GAIN_CELLS", two[:1])
    monkeypatch.setattr(plan, "run_arm", run_arm)
    monkeypatch.setattr(plan, "settings_of", lambda cell, out: {})
    monkeypatch.setattr(plan, "measure_gains", lambda cell, _: [line._replace(**cell._asdict())])
    go_on = partial(plan.main, tmp_path / "out", tmp_path / "results", processes=1)
    with pytest.raises(UsageError, match="--gains"):
        go_on()
    go_on(gains=True)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            go_on()
    go_on()
    assert done == [*product(two, plan.ARMS)]
    of_two = [run for run in MEASURED if run.cell in two]
    assert sorted(plan.read_runs(tmp_path / "results" / "runs.jsonl")) == sorted(of_two)
    assert of_C == [
        run.cosine for cell in two for run in of_two if (run.cell, run.arm) == (cell, "U")
    ]
