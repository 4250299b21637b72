"""The right curvature: its analysis on simulated runs, its hypergradient against a dense matrix."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from align import batches_left, prepare
from config import AlignConfig
from experiments import right_curvature as plan
from experiments import right_curvature_analysis as analysis
from experiments.newton import NewtonPasses, newton
from support.experiment import open_experiment

OWN = {"0": 0.03, "F": 0.01, "N": 0.001}


def simulate(gain: float, seed: int, lower: float = 0.2) -> dict[plan.Unit, plan.Run]:
    """Runs in which N gains so many points, and has an objective that is lower by `lower`.

    Deviations are 2.9 between two runs and 1.8 between backbones, as they once were measured.
    """
    random = Random(seed)
    own = {(arm, k): random.gauss(0, 1.8 / 2**0.5) for arm in plan.ARMS for k in plan.BACKBONES}
    runs = {}
    for _, units in plan.rounds_of(OWN):
        for unit in units:
            is_N = unit.arm == "N"
            noise = own[unit.arm, unit.backbone] + random.gauss(0, 2.9 / 2**0.5)
            objective = 1.5 + random.gauss(0, 0.1) - lower * is_N
            fields: Any = (40 + gain * is_N + noise, 170, objective, 3.0, {}, 1.0)
            runs[unit] = plan.Run(unit, *fields)
    return runs


def rows(runs: dict[plan.Unit, plan.Run]) -> list[dict[str, Any]]:
    return analysis.compare(runs, plan.rounds_of(OWN), final=True)


def test_a_planted_gain_is_found_and_no_gain_is_bounded() -> None:
    assert rows(simulate(4.0, 0))[0]["verdict"] == "N helps"
    assert rows(simulate(0.0, 0))[0]["verdict"] == "bounded"
    worse = rows(simulate(4.0, 0, lower=-0.2))[0]
    assert (worse["gate"], worse["verdict"]) == (0, "the better gradient was not followed")


def test_means_are_those_of_the_backbones_by_hand() -> None:
    runs = simulate(1.0, 0)
    of_N = [run for unit, run in runs.items() if unit.arm == "N"]
    gains = [run.accuracy - runs[run.unit._replace(arm="F")].accuracy for run in of_N]
    row = rows(runs)[1]
    assert row["N minus"] == "F" and row["rounds"] == 6
    assert float(row["mean"]) == pytest.approx(sum(gains) / len(gains), abs=0.01)


def test_rounds_are_balanced_and_no_run_is_planned_twice_but_where_lambdas_agree() -> None:
    rounds = plan.rounds_of(OWN)
    units = {unit for _, of_round in rounds for unit in of_round}
    assert len(rounds) == 12
    assert all(len(of_round) == 48 for _, of_round in rounds)
    assert len(units) == 12 * 48 - 6 * 16  # N's own λ is the paper's


def test_the_choice_takes_the_best_mean_and_of_equal_ones_the_lower() -> None:
    best = {"0": 0.03, "F": 0.003, "N": None}
    runs = [plan.Run(x, 40.0 + (best[x.arm] == x.lam), 1, 1, 1, {}, 1) for x in plan.CHOICE]
    assert plan.choose(runs) == {"0": 0.03, "F": 0.003, "N": 0.001}


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


def test_products_and_q_are_those_of_the_dense_gauss_newton_matrix() -> None:
    """J by forward differentiation, column by column; q by solving in the Krylov space of g."""
    task, theta, phi, batch = point()

    def pixels(flat: Tensor) -> Tensor:
        prediction, mask = task.predict(flat.view_as(theta), phi, batch)
        return prediction[mask > 0].flatten()  # type: ignore[no-any-return]

    J = torch.autograd.functional.jacobian(pixels, theta.flatten(), vectorize=True)
    N = 2 / len(J) * J.mT @ J
    H = NewtonPasses(task=task).hessian(task.loss, theta, phi, batch)
    rng = torch.Generator().manual_seed(1)
    g, later = torch.randn(2, *theta.shape, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(H(g).flatten(), N @ g.flatten(), rtol=1e-9, atol=1e-12)

    lam = 1e-3
    A = N + lam * torch.eye(len(N), dtype=N.dtype)
    krylov = [g.flatten()]
    for _ in range(4):
        krylov.append(A @ krylov[-1] / (A @ krylov[-1]).norm())
    P, _ = torch.linalg.qr(torch.stack(krylov, 1))
    inverse = newton(theta[:, None], lam, lambda: H, count=5)
    for query in (g, later):
        dense = query.flatten() - P @ torch.linalg.solve(P.mT @ A @ P, P.mT @ N @ query.flatten())
        torch.testing.assert_close(inverse(query).flatten(), dense, rtol=1e-6, atol=1e-9)

    lam = float(torch.linalg.eigvalsh(N)[-1]) / 20  # so that 40 directions are enough
    exact = lam * torch.linalg.solve(N + lam * torch.eye(len(N)).double(), g.flatten())
    enough = newton(theta[:, None], lam, lambda: H, count=40)(g).flatten()
    torch.testing.assert_close(enough, exact, rtol=1e-6, atol=1e-6)


def test_a_run_is_done_once_and_its_line_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"alternations": 2, "warmup": 0, "lower_steps": 1, "upper_steps": 1, "probe_epochs": 1}
    monkeypatch.setattr(plan, "ALIGN", plan.ALIGN | few)
    monkeypatch.setattr(plan, "EPOCHS", 1)
    units = [plan.Unit(arm, 0.001, "Tagalog", 0, 9) for arm in plan.ARMS]
    path = tmp_path / "runs.jsonl"
    plan.run_all(units, tmp_path, path)
    first = path.read_text()
    plan.run_all(units, tmp_path, path)
    assert path.read_text() == first
    runs = plan.read_runs(path)
    assert [*runs] == units
    assert json.loads(json.dumps([*runs.values()])) == [json.loads(x) for x in first.splitlines()]
    assert [runs[unit].last["q_over_g"] > 0 for unit in units] == [False, True, True]
    right = [run.accuracy * run.images / 100 for run in runs.values()]
    assert right == pytest.approx([round(number) for number in right])


def test_the_page_has_what_the_analysis_prints_of_the_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    analysis.main()
    _, _, compared = capsys.readouterr().out.rpartition("| at |")
    _, _, *rows = compared.strip().splitlines()
    assert len(rows) == 4 and {*rows} <= {
        *(plan.RESULTS.with_suffix(".md")).read_text().splitlines()
    }
