"""Which derivative: U by finite differences of Algorithm 1 itself, arms, files, two analyses."""

import json
import math
import re
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import second_analysis_of_derivatives as second
import torch
from scipy import stats
from torch import Tensor

from bisslight import Passes, State, agreement, algorithm_1
from config import AlignConfig
from experiments import which_derivative as plan
from experiments import which_derivative_analysis as analysis
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


QUESTION = Points(torch.linspace(-1, 1, 12).double().view(4, 3), torch.ones(4).double())


def L_D(theta: Tensor) -> Tensor:
    return loss_D(theta, {"c": torch.tensor([0.9]).double()}, QUESTION)


@pytest.mark.parametrize("clip", [math.inf, 0.4])
def test_U_is_what_finite_differences_of_algorithm_1_say(clip: float) -> None:
    """θ_D is moved to both sides before the lower level: all else of Algorithm 1 is as it is.

    The differences are off by the square of 1e-5 times a third derivative.
    """
    found: list[Tensor] = []

    def of_arm(lower: Lower) -> Any:
        def hypergrad(G: Tensor, lam: float, H: Any) -> Any:
            theta_P = lower.state.theta_P.detach().requires_grad_()
            (g,) = torch.autograd.grad(L_D(theta_P), theta_P)
            found.append(unrolled(lower)(g))
            return torch.clone

        return hypergrad

    run_tiny(None, of_arm, clip)
    U = found[-1]  # of the last alternation
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
    found: list[Tensor] = []

    def of_arm(lower: Lower) -> Any:
        def hypergrad(G: Tensor, lam: float, H: Any) -> Any:
            g = torch.ones(2, 3).double()
            lower.given = lower.given[:1]  # the first step alone
            found.append(unrolled(lower)(g))
            lower.given = lower.given * 6
            return torch.clone

        return hypergrad

    run_tiny(None, of_arm, dead=True)
    U = found[0]
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


def made_up(arm: str, cell: plan.Cell, ends: Any, weights: str = "same") -> plan.Run:
    """A line without a run."""
    cosine = () if arm in ("0v", "P") else (0.7, 0.8)
    losses = {"train": 0.5, "val": 2.0, "test": 2.5}
    numbers: Any = (7 * 17, False, 0.6, cosine, losses, 30.0, 4.0, weights, "then", "made up")
    return plan.Run(arm, *cell, ends, *numbers)


def test_P_is_peft_on_thirteen_drawers_from_where_0v_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other arm fine-tunes on ten; what diverges counts as chance."""
    calls: list[tuple[float, int, Tensor]] = []

    class Tuned(NamedTuple):
        curve: dict[int, float]

    def fine_tune(_: Any, rate: float, epochs: int, theta: Tensor, warmup: int, task: Any) -> Tuned:
        calls.append((rate, len(task.train.targets), theta))
        if rate == 0.03:
            raise plan.Diverged("it did")
        return Tuned({5: 40.0})

    theta = torch.ones(2)
    monkeypatch.setattr(plan, "fine_tune", fine_tune)
    monkeypatch.setattr(plan, "align_arm", lambda *_: plan.Aligned(theta, None, (), {}))
    monkeypatch.setattr(plan, "sha256", lambda path: "digest")
    monkeypatch.setattr(plan, "commit", lambda: "made up")
    settings = SETTINGS | {"weights": Path("there")}
    runs = plan.run_arm("0v", plan.Cell("Tagalog", 0, 9), settings)
    assert [run.arm for run in runs] == ["0v", "P"]
    assert [(rate, images) for rate, images, _ in calls] == [
        *product(plan.RATES, [170]),
        *product(plan.RATES, [221]),
    ]
    assert all(start is theta for _, _, start in calls)
    assert [run.ends for run in runs] == [{"0.01": 40.0, "0.02": 40.0, "0.03": 100 / 17}] * 2
    assert all(run.diverged for run in runs)
    assert [run.arm for run in plan.run_arm("G", plan.Cell("Tagalog", 0, 9), settings)] == ["G"]


def test_every_arm_is_run_once_also_after_a_stop_and_gains_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[plan.Cell, str]] = []
    of_C: list[Any] = []

    def run_arm(arm: str, cell: plan.Cell, _: Any, cosines: Any) -> list[plan.Run]:
        if len(done) in stops:
            stops.discard(len(done))
            raise KeyboardInterrupt
        done.append((cell, arm))
        of_C.extend([tuple(cosines)] if arm == "C" else [])
        names = ("0v", "P") if arm == "0v" else (arm,)
        return [made_up(name, cell, {}, "digest") for name in names]

    stops = {4, 9}
    two = plan.CELLS[:2]
    (tmp_path / "backbone.pth").write_bytes(b"")
    monkeypatch.setattr(plan, "CELLS", two)
    monkeypatch.setattr(plan, "GAIN_CELLS", two[:1])
    monkeypatch.setattr(plan, "run_arm", run_arm)
    monkeypatch.setattr(plan, "sha256", lambda path: "digest")
    monkeypatch.setattr(plan, "settings_of", lambda cell, out: {"weights": tmp_path})
    line = plan.Gains(*two[0], 8, {}, {}, {}, {}, {}, "then", "made up")
    monkeypatch.setattr(plan, "measure_gains", lambda cell, settings: [line])
    go_on = partial(plan.main, tmp_path / "out", tmp_path / "results", processes=1)
    with pytest.raises(UsageError, match="--gains"):
        go_on()
    go_on(gains=True)
    assert plan.read_gains(tmp_path / "results" / "gains.jsonl") == [line]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            go_on()
    go_on()
    assert done == [*product(two, plan.ARMS)]
    runs = plan.read_runs(tmp_path / "results" / "runs.jsonl")
    assert sorted((run.cell, run.arm) for run in runs) == sorted(product(two, plan.NAMES))
    assert of_C == [(0.7, 0.8)] * 2


def test_a_cell_is_not_continued_with_another_backbone() -> None:
    runs = [made_up("G", plan.CELLS[0], {}, "0" * 64)]
    with pytest.raises(UsageError, match="another file"):
        plan.check_weights(plan.CELLS[0], "1" * 64, runs)
    plan.check_weights(plan.CELLS[1], "1" * 64, runs)


# --- the analyses ---------------------------------------------------------------------------------


def simulate(gains: dict[str, float], seed: int = 0, spread: float = 2.1) -> list[plan.Run]:
    """Runs of all cells in which each arm gains so much; `spread` is that of a run, in points."""
    random = Random(seed)
    own = {pair: random.gauss(0, 0.7) for pair in product(plan.NAMES, (*plan.TASKS, *plan.POOL))}
    runs = []
    for cell, arm in product(plan.CELLS, plan.NAMES):
        mean = 30 + gains.get(arm, 0.0) + own[arm, cell.alphabet] + random.gauss(0, spread)
        ends = {f"{rate:g}": mean + random.gauss(0, 0.5) for rate in plan.RATES}
        runs.append(made_up(arm, cell, ends))
    return runs


def rows_of(runs: list[plan.Run], final: bool = True) -> dict[str, Any]:
    rows = analysis.compare(analysis.means_of(runs), final)
    return {row["points"]: row for row in rows}


def numbers(cell: str) -> list[float]:
    return [float(word.strip("()")) for word in cell.replace(" to ", " ").split()]


WORDS = (
    "heard",
    "deaf",
    "ahead",
    "behind",
    "beyond these alphabets",
    "no gain of 2 points",
    "open",
)


def compare_analyses(runs: list[plan.Run]) -> set[str]:
    """Assert that both analyses have the same figures and verdicts; return the verdicts' words."""
    whole = analysis.whole_cells(runs)
    means = analysis.means_of(whole)
    final = len(whole) == len(plan.CELLS) * len(plan.NAMES)
    rows = rows_of(whole, final)
    again = second.analyse([json.loads(json.dumps(run._asdict())) for run in runs])
    assert [*rows] == [" − ".join(pair) for pair in again]
    for pair, found in again.items():
        row, gains = rows[" − ".join(pair)], analysis.by_alphabet(means, pair)
        exact = partial(pytest.approx, rel=1e-6, abs=1e-9)  # rounding, and two ways to p
        assert analysis.within(gains) == exact(found.here)
        assert analysis.of_units(gains) == exact(found.units)
        is_in_family = pair not in second.CONTROL
        for column, one, p_of_holm in (
            ("p (Holm)", found.here, found.corrected),
            ("their p (Holm)", found.units, found.corrected_units),
        ):
            expected = [one.p, p_of_holm] if is_in_family else [one.p]
            assert numbers(row[column]) == pytest.approx(expected, rel=0.051)  # two digits
        assert numbers(row["mean"]) == pytest.approx([found.here.mean], abs=0.0051)
        for column, one in (("these alphabets", found.here), ("alphabets as units", found.units)):
            assert numbers(row[column]) == pytest.approx([one.low, one.high], abs=0.0051)
        said = {word for word in WORDS if word in row["verdict"]}
        assert said == {*found.words}, (row, found)
        assert (row["verdict"] == "not yet") == (not final)
    return {word for one in again.values() for word in one.words}


def replaced(runs: list[plan.Run], arm: str, by: str) -> list[plan.Run]:
    """The runs, with one arm's accuracies those of another one."""
    ends = {(run.cell, run.arm): run.ends for run in runs}
    return [run._replace(ends=ends[run.cell, by]) if run.arm == arm else run for run in runs]


def diverged(run: plan.Run, rates: tuple[str, ...]) -> plan.Run:
    """The line of a run that diverged at these rates, or in aligning: at all of them."""
    ends = run.ends | dict.fromkeys(rates, 100 / 17)
    losses = {} if len(rates) == len(plan.RATES) else run.losses
    return run._replace(ends=ends, losses=losses, diverged=True)


def test_both_analyses_say_the_same_of_random_runs() -> None:
    """Gains of any size, so that each word of the protocol is used."""
    said = set()
    for seed in range(12):
        random = Random(seed)
        gains = {arm: random.gauss(0, 1.5) for arm in plan.NAMES} | {"oracle-G": 8.0 * (seed > 1)}
        said |= compare_analyses(simulate(gains, seed, spread=2.0 + seed % 3))
    assert said == {*WORDS}


def test_both_analyses_find_a_clear_win() -> None:
    assert "beyond these alphabets" in compare_analyses(simulate({"oracle-G": 9.0, "U": 6.0}))


@pytest.mark.parametrize(("beyond", "word"), [(-0.01, "deaf"), (0.01, "heard")])
def test_both_analyses_are_deaf_unless_the_interval_of_the_control_begins_above_2(
    beyond: float, word: str
) -> None:
    at_0 = second.analyse([run._asdict() for run in simulate({})])["oracle-G", "0v"]
    runs = simulate({"oracle-G": 2 + beyond - at_0.here.low})
    assert word in compare_analyses(runs)


def test_both_analyses_say_the_same_of_a_tie() -> None:
    """C is lost wherever U diverges, so that U − C may be 0 in all cells, without any spread."""
    runs = replaced(simulate({"oracle-G": 9.0}), arm="C", by="U")
    compare_analyses(runs)
    row = rows_of(runs)["U − C"]
    assert numbers(row["p (Holm)"])[0] == numbers(row["their p (Holm)"])[0] == 1
    assert row["verdict"] == "no gain of 2 points"


def test_both_analyses_count_what_diverged_as_chance() -> None:
    """At one rate, or in aligning; a Tagalog of 17 characters."""
    runs = simulate({"oracle-G": 9.0})
    ours = [k for k, run in enumerate(runs) if run.alphabet == "Tagalog" and run.arm in ("U", "N")]
    assert len(ours) == 16
    before = analysis.within(analysis.by_alphabet(analysis.means_of(runs), ("U", "G")))
    for k in ours[:4]:
        runs[k] = diverged(runs[k], second.RATES)
    runs[ours[4]] = diverged(runs[ours[4]], ("0.03",))
    compare_analyses(runs)
    after = analysis.within(analysis.by_alphabet(analysis.means_of(runs), ("U", "G")))
    assert after.mean < before.mean


@pytest.mark.parametrize("left", [64 * 8 - 1, 41 * 8 - 1, 20 * 8])
def test_both_analyses_have_the_same_figures_and_no_verdict_before_all_cells_are_whole(
    left: int,
) -> None:
    assert not compare_analyses(simulate({"oracle-G": 9.0, "U": 3.0})[:left])


def test_the_quantiles_of_the_second_analysis_are_those_of_a_table() -> None:
    assert [second.quantile(24), second.quantile(7)] == pytest.approx([2.0639, 2.3646], abs=5e-5)


def test_the_interval_of_these_alphabets_is_that_of_a_two_way_t_test() -> None:
    """Scipy's t of the residuals; a shift of an alphabet is no error."""
    gains = {name: list(np.random.default_rng(k).normal(k, 1, 8)) for k, name in enumerate("abc")}
    found = analysis.within(gains)
    values = np.array([*gains.values()])
    residual = values - values.mean(1, keepdims=True)
    error = math.sqrt((residual**2).sum() / 21 / 24)
    low, high = stats.t.interval(0.95, 21, values.mean(), error)
    assert [found.mean, found.low, found.high] == pytest.approx([values.mean(), low, high])


def test_a_planted_gain_is_found_and_a_deaf_endpoint_says_nothing() -> None:
    heard = rows_of(simulate({"oracle-G": 8.0, "U": 4.0, "P": -5.0}))
    assert heard["oracle-G − 0v"]["verdict"] == "heard"
    assert heard["U − G"]["verdict"] == "ahead; beyond these alphabets, too"
    assert heard["P − G"]["verdict"].startswith("behind")
    assert heard["N − G"]["verdict"] == "no gain of 2 points"
    deaf = rows_of(simulate({"oracle-G": 1.0, "U": 4.0}))
    assert deaf["oracle-G − 0v"]["verdict"] == "deaf"
    assert deaf["U − G"]["verdict"] == "none, the endpoint is deaf"


def test_both_analyses_have_the_same_first_order_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(0)
    lines = []
    for cell, alternation in product(plan.GAIN_CELLS, plan.AT):
        own, then = ({arm: random.uniform(0.5, 2) for arm in "GNUAC"} for _ in range(2))
        lines.append(plan.Gains(*cell, alternation, own, then, own, own, own, "then", "made up"))
    records = [line._asdict() for line in lines]
    for row, steps in product(analysis.gain_rows(lines), ("own", "next")):
        ratios = second.gains_over_G(records, steps, row["arm"])
        found = numbers(row[f"{steps} steps"])
        assert found == pytest.approx([np.mean(ratios), min(ratios), max(ratios)], abs=0.0051)
    plan.add_lines(lines, tmp_path / "gains.jsonl", tmp_path)
    plan.add_lines(simulate({})[: 20 * 8], tmp_path / "runs.jsonl", tmp_path)
    analysis.main(tmp_path)
    printed = capsys.readouterr().out
    assert "24 of 24 first-order gains" in printed and "20 of 64 cells are whole" in printed
    assert not second.analyse(second.read(tmp_path / "runs.jsonl"))["U", "G"].words


def test_the_second_analysis_knows_the_plan() -> None:
    """Names of arms, alphabets and rates, which it writes down by itself."""
    assert {*second.ARMS} == {*plan.NAMES}
    found = {*product(second.ALPHABETS, second.BACKBONES, second.SEEDS)}
    assert {tuple(cell) for cell in plan.CELLS} == found
    assert tuple(f"{rate:g}" for rate in plan.RATES) == second.RATES
    assert (analysis.CONTROL,) == second.CONTROL
    assert (analysis.PRIMARY, analysis.SECONDARY) == (second.PRIMARY, second.SECONDARY)
    assert json.loads(json.dumps(plan.ALIGN)) == plan.ALIGN


# --- the page -------------------------------------------------------------------------------------

PAGE = plan.RESULTS.with_suffix(".md").read_text()


@pytest.fixture(scope="module")
def measured() -> list[plan.Run]:
    return plan.read_runs(plan.RESULTS / plan.RUNS)


def test_both_analyses_say_the_same_of_the_study(measured: list[plan.Run]) -> None:
    said = compare_analyses(measured)
    assert len(measured) == 512 and not any(run.diverged for run in measured)
    assert said == {"heard", "ahead", "behind", "beyond these alphabets", "no gain of 2 points"}


def test_the_page_has_the_rows_that_the_analysis_prints(capsys: pytest.CaptureFixture[str]) -> None:
    analysis.main()
    _, rows = capsys.readouterr().out.split("64 of 64 cells are whole")
    assert all(line in PAGE for line in rows.splitlines() if line.startswith("| "))


def test_what_other_pages_tell_of_the_study_is_rounded_from_its_rows(
    measured: list[plan.Run],
) -> None:
    found = second.analyse(run._asdict() for run in measured)
    low, mean, high = (f"{getattr(found['P', 'G'].here, x):.1f}" for x in ("low", "mean", "high"))
    repository = plan.RESULTS.parents[1]
    for name in ("docs/page.md", "experiments/README.md"):
        assert f"{mean} points" in (repository / name).read_text(), name
    for name in ("docs/page.md", "experiments/README.md", "experiments/which_derivative.md"):
        assert f"{low} to {high}" in (repository / name).read_text(), name
    arms = [second.ARMS.index(arm) for arm in ("0v", "G", "N", "U")]
    means = second.table(run._asdict() for run in measured).mean((0, 1))[arms]
    assert f"within {np.ptp(means):.1f} points" in PAGE
    assert f"within {np.ptp(means):.1f} points" in (repository / "docs/page.md").read_text()


def test_differences_that_were_not_planned_are_those_of_the_page(measured: list[plan.Run]) -> None:
    """By the second analysis, from the records; a part of the alphabets has fewer degrees."""
    records = [run._asdict() for run in measured]
    accuracy = second.table(records)
    three = np.array([name in ("Balinese", "Greek", "Latin") for name in second.ALPHABETS])

    def told(first: str, other: str, alphabets: Any = slice(None)) -> str:
        groups = second.differences(accuracy[alphabets], (first, other))
        found = second.these_alphabets(groups)
        return f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})"

    for alphabets in (slice(None), three, ~three):
        assert told("N", "0v", alphabets) in PAGE
    assert told("P", "0v")[:-1] in PAGE
    assert told("C", "G") == "-1.48 (-2.06 to -0.90)" and "C 1.48 (0.90 to 2.06;" in PAGE
    for first, other, left_out in (("A", "G", "Early_Aramaic"), ("G", "0v", "Tagalog")):
        others = np.array([name != left_out for name in second.ALPHABETS])
        figures = told(first, other, others)[:-1]
        assert figures in PAGE or figures.replace(" (", "; ") in PAGE
    gains = accuracy[:, :, second.ARMS.index("U")] - accuracy[:, :, second.ARMS.index("G")]
    words = [f"{gain:+.1f}" for gain in gains.mean(0)]
    assert f"{', '.join(words[:3])} and {words[3]}" in PAGE
    assert len({run.weights for run in measured}) == 8
    for rate, first, other, alphabets in (
        ("0.02", "N", "0v", three),
        ("0.03", "oracle-G", "0v", slice(None)),
    ):
        at_one_rate = [
            one | {"ends": dict.fromkeys(second.RATES, one["ends"][rate])} for one in records
        ]
        accuracy = second.table(at_one_rate)
        assert told(first, other, alphabets) in PAGE


def test_the_runs_came_after_the_gains_and_by_the_commit_of_the_page(
    measured: list[plan.Run],
) -> None:
    times = sorted(run.time for run in measured)
    assert {run.commit[:7] for run in measured} == {"b58489a"}
    assert f"Runs {times[0][:10]} {times[0][11:16]} to" in PAGE
    gains = plan.read_gains(plan.RESULTS / plan.GAINS)
    assert max(one.time for one in gains) < times[0]
    aligning = sum(run.cpu_align for run in measured if run.arm != "P")  # P starts where 0v ends
    hours = (aligning + sum(run.cpu_peft for run in measured)) / 3600
    assert f"{hours:.1f} CPU-hours" in PAGE


def test_the_first_order_gains_of_the_page_are_those_of_the_records() -> None:
    rows = analysis.gain_rows(plan.read_gains(plan.RESULTS / plan.GAINS))
    assert all(f"{row['arm']} {row['next steps']}" in PAGE for row in rows if row["arm"] != "G")
    told = {row["arm"]: row["own steps"] for row in rows}
    for arm in ("N", "A", "C"):
        figures = told[arm].replace("(", "times (", 1)
        assert re.search(rf"{arm} {re.escape(figures)}", PAGE)
    low, high = told["U"][6:-1].split(" to ")
    assert f"U {told['U'][:4]} times" in PAGE and f"{low} and {high}" in PAGE
