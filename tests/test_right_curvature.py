"""The right curvature: which labels an arm sees, q by a dense matrix, what a stop leaves."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from align import batches_left, prepare
from config import AlignConfig
from data import Task
from experiments import right_curvature as plan
from experiments.fair_race import fine_tune, settings_of_cell
from experiments.fair_race_plan import Cell
from experiments.newton import NewtonPasses, newton
from hypergradients import cg
from support.benchmarks import omniglot_task
from support.experiment import open_experiment

FEW = {"alternations": 2, "warmup": 0, "lower_steps": 1, "upper_steps": 2, "probe_epochs": 1}


def aligned(name: str, task: Task) -> plan.Aligned:
    """Two alternations of an arm."""
    arm = plan.ARMS[name]
    assert arm
    settings = {"backbone": "vit_mini", "dataset": "omniglot:Tagalog", "p_batch": 16, "lam": 0.001}
    return plan.align_arm(arm, AlignConfig.model_validate(settings | FEW), task)


def theta_of(name: str, task: Task) -> Tensor:
    theta_P = aligned(name, task).theta_P
    assert theta_P is not None
    return theta_P


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seen"),
    [("0", []), ("F", []), ("N", []), ("V", ["val"]), ("0v", ["val"]), ("oracle", ["val", "test"])],
)
def test_an_arm_sees_the_labels_that_the_protocol_names_and_no_others(
    name: str, seen: list[str]
) -> None:
    """θ_P ends elsewhere if, and only if, labels are changed that the arm sees."""
    task = omniglot_task("Tagalog", 0)
    theta_P = theta_of(name, task)
    changed = []
    for part in ("val", "test"):
        split = getattr(task, part)
        other = type(split)(split.images, split.targets.flip(0))
        if not torch.equal(theta_of(name, task._replace(**{part: other})), theta_P):
            changed.append(part)
    assert changed == seen


@pytest.mark.slow
def test_the_head_never_trains_on_what_q_alone_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """With q taken away, V is arm 0 to the bit, though its g were computed."""
    arm = plan.ARMS["V"]
    assert arm
    silent = arm._replace(hypergrad=lambda G, lam, H: torch.zeros_like)
    monkeypatch.setitem(plan.ARMS, "V", silent)
    task = omniglot_task("Tagalog", 0)
    silent_V, zero = aligned("V", task), aligned("0", task)
    torch.testing.assert_close(silent_V.theta_P, zero.theta_P, rtol=0, atol=0)
    assert (silent_V.objective, silent_V.of_test) == (zero.objective, zero.of_test)


@pytest.mark.slow
def test_peft_trains_on_the_ten_drawers_in_every_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies are those of `fine_tune` from the θ_P of the arm; those of direct from none."""
    monkeypatch.setattr(plan, "ALIGN", plan.ALIGN | FEW)
    monkeypatch.setattr(plan, "LENGTHS", {"30 epochs": (2, 1), "5 epochs": (1, 0)})
    monkeypatch.setattr(plan, "commit", lambda: "made up")
    settings = settings_of_cell(Cell("Tagalog", 0, 9), tmp_path)
    rates = {"30 epochs": (0.02,), "5 epochs": (0.02, 0.04)}
    for name in ("0v", "direct"):
        run = plan.run_unit(plan.Unit(name, "Tagalog", 0, 9), rates, settings)
        arm, theta_P = plan.ARMS[name], None
        if arm:
            theta_P = plan.align_arm(arm, AlignConfig(**settings, **plan.ALIGN)).theta_P
        assert run.ends["30 epochs"]["0.02"] == fine_tune(settings, 0.02, 2, theta_P, 1).curve[2]
        assert run.ends["5 epochs"]["0.04"] == fine_tune(settings, 0.04, 1, theta_P, 0).curve[1]
        assert run.images == len(omniglot_task("Tagalog", 0).test.targets)


CHOICE = [*plan.read_runs(plan.RESULTS / "choice.jsonl").values()]
UNITS = [plan.Unit(arm, "Tagalog", 0, 0) for arm in ("direct", "0", "F", "N", "V")]
RATES: Any = {arm: {} for arm in plan.ARMS}


def run_of(unit: plan.Unit, *_: Any) -> plan.Run:
    """A line without a run."""
    return CHOICE[0]._replace(**unit._asdict())


def test_every_run_is_done_once_also_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[plan.Unit] = []
    stops = {3}

    def run_unit(unit: plan.Unit, *_: Any) -> plan.Run:
        if len(done) in stops:
            stops.clear()
            raise KeyboardInterrupt
        done.append(unit)
        return run_of(unit)

    monkeypatch.setattr(plan, "run_unit", run_unit)
    run_all = partial(plan.run_all, UNITS, RATES, tmp_path, tmp_path / "runs.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_all()
    run_all()
    assert done == UNITS == [*plan.read_runs(tmp_path / "runs.jsonl")]


def test_a_run_that_another_process_is_at_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for, since the study needs every run of the choice; then it is done here."""
    monkeypatch.setattr(plan, "run_unit", run_of)
    other = FileLock(tmp_path / "direct-Tagalog-0-0.lock", thread_local=False)
    other.acquire()
    monkeypatch.setattr(plan.time, "sleep", lambda seconds: other.release())  # it was killed
    plan.run_all(UNITS[:2], RATES, tmp_path, tmp_path / "runs.jsonl")
    assert [*plan.read_runs(tmp_path / "runs.jsonl")] == UNITS[1::-1]


def test_of_rates_with_equal_means_the_lowest_is_taken() -> None:
    ends = {length: dict.fromkeys(of_length, 40.0) for length, of_length in CHOICE[0].ends.items()}
    chosen = plan.choose([run._replace(ends=ends) for run in CHOICE])
    assert {rates for of_arm in chosen.values() for rates in of_arm.values()} == {(0.01,)}


def point() -> tuple[Any, Tensor, Any, Any]:
    """MAE's task at rank 1, a θ whose B are not 0, φ_P and a batch of one image, of the program."""
    settings: Any = {"backbone": "vit_mini", "dataset": "omniglot:Tagalog", "rank": 1, "p_batch": 1}
    experiment = open_experiment(AlignConfig(**settings))
    prepared = prepare(experiment)
    batch = next(batches_left(experiment, prepared)[0])
    experiment.backbone.double()
    prepared.pretext_task.decoder.double()  # type: ignore[attr-defined]
    theta = prepared.state.theta_P.detach().double()
    theta += 0.1 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(0)).double()
    phi = {name: tensor.detach().double() for name, tensor in prepared.state.phi_P.items()}
    return prepared.pretext_task, theta, phi, type(batch)(*(x.double() for x in batch))


@pytest.mark.slow
def test_products_and_q_are_those_of_the_dense_gauss_newton_matrix() -> None:
    """J by forward differentiation; q of every query by solving in its own Krylov space."""
    task, theta, phi, batch = point()

    def pixels(flat: Tensor) -> Tensor:
        prediction, mask = task.predict(flat.view_as(theta), phi, batch)
        return prediction[mask > 0].flatten()  # type: ignore[no-any-return]

    J = torch.autograd.functional.jacobian(pixels, theta.flatten(), vectorize=True)
    N = 2 / len(J) * J.mT @ J
    H = NewtonPasses(task=task).hessian(task.loss, theta, phi, batch)
    rng = torch.Generator().manual_seed(1)
    queries = torch.randn(2, *theta.shape, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(H(queries[0]).flatten(), N @ queries[0].flatten())

    lam = float(torch.linalg.eigvalsh(N)[-1]) / 1000  # eight directions are then not enough
    A = N + lam * torch.eye(len(N)).double()
    solve = newton(theta[:, None], lam, lambda: H)
    for query in queries:
        krylov = [query.flatten()]
        for _ in range(7):
            krylov.append(A @ krylov[-1] / (A @ krylov[-1]).norm())
        P, _ = torch.linalg.qr(torch.stack(krylov, 1))
        dense = lam * P @ torch.linalg.solve(P.mT @ A @ P, P.mT @ query.flatten())
        torch.testing.assert_close(solve(query).flatten(), dense, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_the_residual_of_each_query_is_that_of_eq_5(monkeypatch: pytest.MonkeyPatch) -> None:
    """More directions make it smaller; arms without N have none."""
    task = omniglot_task("Tagalog", 0)
    eight = aligned("N", task)
    assert len(eight.residual) == FEW["upper_steps"] and eight.worst
    assert all(0 < one <= eight.worst < 0.2 for one in eight.residual)
    assert not aligned("F", task).residual
    one = partial(cg, iterations=1)
    monkeypatch.setattr(plan, "newton", one)
    monkeypatch.setitem(plan.ARMS, "N", plan.Arm(one))
    assert min(aligned("N", task).residual) > 2 * eight.worst
