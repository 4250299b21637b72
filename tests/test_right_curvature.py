"""The right curvature: which labels an arm sees, q by a dense matrix, the analysis by scipy."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from scipy import stats
from torch import Tensor

from align import batches_left, prepare
from config import AlignConfig
from data import Task
from experiments import right_curvature as plan
from experiments import right_curvature_analysis as analysis
from experiments.fair_race import fine_tune, settings_of_cell
from experiments.fair_race_plan import Cell
from experiments.newton import NewtonPasses, newton
from hypergradients import cg
from support.benchmarks import omniglot_task
from support.errors import UsageError
from support.experiment import open_experiment

FEW = {"alternations": 2, "warmup": 0, "lower_steps": 1, "upper_steps": 2, "probe_epochs": 1}


# --- the program ----------------------------------------------------------------------------------


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
        run = plan.run_unit(plan.Unit(name, "Tagalog", 0, 9), rates, settings, "digest")
        arm, theta_P = plan.ARMS[name], None
        if arm:
            theta_P = plan.align_arm(arm, AlignConfig(**settings, **plan.ALIGN)).theta_P
        assert run.ends["30 epochs"]["0.02"] == fine_tune(settings, 0.02, 2, theta_P, 1).curve[2]
        assert run.ends["5 epochs"]["0.04"] == fine_tune(settings, 0.04, 1, theta_P, 0).curve[1]
        assert run.images == len(omniglot_task("Tagalog", 0).test.targets)


def test_every_run_is_done_once_also_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[plan.Unit] = []

    def run_unit(unit: plan.Unit, rates: plan.Rates, settings: Any, weights: str) -> plan.Run:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(unit)
        return made_up(unit, {"30 epochs": {"0.01": 1.0}, "5 epochs": {"0.01": 2.0}}, weights)

    monkeypatch.setattr(plan, "run_unit", run_unit)
    units = [plan.Unit(arm, "Tagalog", 0, 0) for arm in ("direct", "0", "F", "N", "V")]
    rates: Any = {arm: {} for arm in plan.ARMS}
    path = tmp_path / "runs.jsonl"
    with pytest.raises(KeyboardInterrupt):
        plan.run_all(units, rates, tmp_path, path)
    first = path.read_text()
    monkeypatch.setattr(plan, "run_unit", lambda unit, *_: made_up(unit, {}, _[-1]))
    plan.run_all(units, rates, tmp_path, path)
    assert path.read_text().startswith(first)
    assert [json.loads(line)["arm"] for line in path.read_text().splitlines()] == [
        unit.arm for unit in units
    ]
    assert [*plan.read_runs(path)] == units


def test_a_run_that_another_process_is_at_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for, since the study needs every run of the choice; then it is done here."""
    monkeypatch.setattr(plan, "run_unit", lambda unit, *_: made_up(unit, {}, _[-1]))
    units = [plan.Unit(arm, "Tagalog", 0, 0) for arm in ("direct", "0")]
    other = FileLock(tmp_path / "direct-Tagalog-0-0.lock", thread_local=False)
    other.acquire()
    monkeypatch.setattr(plan.time, "sleep", lambda seconds: other.release())  # it was killed
    rates: Any = {arm: {} for arm in plan.ARMS}
    plan.run_all(units, rates, tmp_path, tmp_path / "runs.jsonl")
    assert [*plan.read_runs(tmp_path / "runs.jsonl")] == units[::-1]


def test_a_round_is_not_continued_with_another_backbone(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    plan.add_line(made_up(plan.Unit("0", "Greek", 28, 0), {}, "0" * 64), path, tmp_path)
    weights = tmp_path / "pretrain-28"
    weights.mkdir()
    (weights / "backbone.pth").write_bytes(b"other")
    with pytest.raises(UsageError, match=r"backbone 28 was another file .* begins anew"):
        plan.digest(weights, 28, path)
    assert plan.digest(weights, 29, path) == plan.sha256(weights / "backbone.pth")


def test_a_round_is_not_continued_on_another_device(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    on_a_card = made_up(plan.Unit("0", "Greek", 28, 0), {})._replace(device="NVIDIA H100")
    plan.add_line(on_a_card, path, tmp_path)
    with pytest.raises(UsageError, match="backbone 28 was begun on NVIDIA H100, this is cpu"):
        plan.check_device(28, "cpu", path)
    plan.check_device(28, "NVIDIA H100", path)
    plan.check_device(29, "cpu", path)


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


# --- the analysis ---------------------------------------------------------------------------------


def made_up(unit: plan.Unit, ends: Any, weights: str = "same") -> plan.Run:
    """A line without a run."""
    numbers: Any = (170, 1.5, 3.0, [0.0] * 3, [0.0] * 3, [0.1] * 3, 0.2, 30.0, 10.0)
    return plan.Run(*unit, ends, *numbers, weights, "2026-11-27T03:00:00Z", "made up")


def simulate(gains: dict[str, float], seed: int = 0, rounds: int = 16) -> analysis.Runs:
    """Runs of whole rounds in which each arm gains so much.

    Deviations are 2.9 points between two runs, 1.8 between backbones, as they once were measured.
    """
    random = Random(seed)
    own = {pair: random.gauss(0, 1.8 / 2**0.5) for pair in product(plan.ARMS, plan.BACKBONES)}
    runs = {}
    for unit in plan.STUDY[: rounds * 42]:
        ends = {}
        for length in plan.LENGTHS:
            noise = own[unit.arm, unit.backbone] + random.gauss(0, 2.9 / 2**0.5)
            ends[length] = {"0.02": 40 + gains.get(unit.arm, 0.0) + noise}
        runs[unit] = made_up(unit, ends)
    return runs


def rows(runs: analysis.Runs, final: bool = True) -> dict[str, Any]:
    return {row["points"]: row for row in analysis.compare(runs, "5 epochs", final)}


def test_means_intervals_and_p_are_those_of_scipy() -> None:
    """Holm's correction by its definition: the k-th smallest of four p times 5 − k, no decrease."""
    runs = simulate({"oracle": 6.0, "N": 0.8, "direct": -1.0})
    found = rows(runs)
    ps = {}
    for first, second in (analysis.CONTROL, *analysis.COMPARED):
        table = np.zeros((16, 3, 2, 2))
        for unit, run in runs.items():
            if unit.arm in (first, second):
                alphabet = ("Greek", "Balinese", "Latin").index(unit.alphabet)
                place = (unit.backbone - 28, alphabet, unit.seed, int(unit.arm == second))
                table[place] = run.ends["5 epochs"]["0.02"]
        gains = (table[..., 0] - table[..., 1]).mean((1, 2))
        interval = stats.ttest_1samp(gains, 0).confidence_interval()
        signs = 1 - 2 * (np.arange(2**16)[:, None] >> np.arange(16) & 1)
        p = np.mean(abs(signs @ gains) >= abs(gains.sum()) - 1e-9)
        row = found[f"{first} − {second}"]
        assert float(row["mean"]) == pytest.approx(gains.mean(), abs=0.0051)
        ends = [float(word) for word in row["95 % interval"].split(" to ")]
        assert ends == pytest.approx([*interval], abs=0.0051)
        assert float(row["p (Holm)"].split()[0]) == pytest.approx(p, rel=0.06)
        ps[f"{first} − {second}"] = p
    del ps["oracle − 0"]  # the control is no comparison
    largest = 0.0
    for rank, pair in enumerate(sorted(ps, key=ps.__getitem__)):
        largest = max(largest, min(1.0, (4 - rank) * ps[pair]))
        printed = float(found[pair]["p (Holm)"].split("(")[1].rstrip(")"))
        assert printed == pytest.approx(largest, rel=0.06)


def test_a_planted_gain_is_found_no_gain_is_bounded_and_a_deaf_endpoint_says_nothing() -> None:
    heard = rows(simulate({"oracle": 8.0, "V": 5.0, "direct": 5.0}))
    assert heard["V − 0v"]["verdict"] == "ahead"
    assert heard["N − 0"]["verdict"] == "no gain of 2 points"
    assert heard["0 − direct"]["verdict"] == "behind, no gain of 2 points"
    deaf = rows(simulate({"oracle": 2.0, "V": 5.0}))
    assert deaf["oracle − 0"]["verdict"] == "deaf"
    assert {deaf[f"{x} − {y}"]["verdict"] for x, y in analysis.COMPARED} == {
        "none, the endpoint is deaf"
    }


def test_only_whole_rounds_count_and_verdicts_wait_for_the_last() -> None:
    runs = simulate({"oracle": 8.0}, rounds=3)
    left_out = next(unit for unit in runs if unit.backbone == 29)
    whole = analysis.whole_rounds({unit: run for unit, run in runs.items() if unit != left_out})
    assert {unit.backbone for unit in whole} == {28, 30}
    assert {row["verdict"] for row in rows(whole, final=False).values()} == {"not yet"}


def test_a_round_is_of_one_device_and_only_a_cpu_counts_cpu_seconds() -> None:
    runs = simulate({}, rounds=2)
    for unit, run in runs.items():
        if unit.backbone == 28:
            runs[unit] = run._replace(device="NVIDIA H100", cpu_align=1000.0)
    assert analysis.whole_rounds(runs) == runs
    assert {row["CPU-s of align"] for row in analysis.arm_rows(runs)} == {"30"}
    mixed = next(unit for unit in runs if unit.backbone == 29)
    runs[mixed] = runs[mixed]._replace(device="NVIDIA H100")
    with pytest.raises(AssertionError, match="29"):
        analysis.whole_rounds(runs)


def test_a_round_is_each_arm_in_three_alphabets_and_two_seeds() -> None:
    assert len(plan.STUDY) == len({*plan.STUDY}) == 16 * 3 * 2 * 7
    assert [unit.backbone for unit in plan.STUDY] == sorted(unit.backbone for unit in plan.STUDY)
    assert not {unit.alphabet for unit in plan.STUDY} & {unit.alphabet for unit in plan.CHOICE}
    assert not {unit.backbone for unit in plan.STUDY} & {unit.backbone for unit in plan.CHOICE}


def test_each_arm_and_length_takes_the_best_mean_and_of_equal_ones_the_lower_rate() -> None:
    best = {"30 epochs": {"N": 0.04, "V": 0.02}, "5 epochs": {"N": 0.08, "direct": 0.04}}
    runs = []
    for unit in plan.CHOICE:
        ends: Any = {}
        for length, rates in plan.CANDIDATES.items():
            taken = best[length].get(unit.arm)
            ends[length] = {f"{rate:g}": 40.0 + (rate == taken) for rate in rates}
        runs.append(made_up(unit, ends))
    chosen = plan.choose(runs)
    for arm, length in product(plan.ARMS, plan.LENGTHS):
        assert chosen[arm][length] == (best[length].get(arm, 0.01),)


@pytest.mark.slow
def test_the_page_has_the_rows_that_the_analysis_prints(capsys: pytest.CaptureFixture[str]) -> None:
    analysis.main()
    printed = capsys.readouterr().out
    assert "16 of 16 rounds are whole" in printed
    assert all(line in PAGE for line in printed.splitlines() if line.startswith("| "))


# --- the page's other figures, from the files of runs alone ---------------------------------------

PAGE = plan.RESULTS.with_suffix(".md").read_text()
ALPHABETS = ("Balinese", "Greek", "Latin")
ALIGNED = ("0", "F", "N", "V", "0v", "oracle")
PAIRS = (("oracle", "0"), ("N", "0"), ("V", "0v"), ("F", "0"), ("0", "direct"))


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (plan.RESULTS / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return lines("runs.jsonl")


def end(run: dict[str, Any], length: str) -> float:
    (accuracy,) = run["ends"][length].values()
    return float(accuracy)


def by_cell(runs: list[dict[str, Any]], arm: str, name: str) -> np.ndarray[Any, Any]:
    """An arm's accuracies after an endpoint, or another number: backbone, alphabet, seed."""
    table = np.full((16, 3, 2), np.nan)
    for run in runs:
        if run["arm"] == arm:
            place = (run["backbone"] - 28, ALPHABETS.index(run["alphabet"]), run["seed"])
            table[place] = end(run, name) if name in run["ends"] else run[name]
    assert not np.isnan(table).any()
    return table


def told(values: Any, decimals: int = 2) -> str:
    """The mean with its 95 % interval, by scipy, as the page writes it."""
    ends = stats.ttest_1samp(values, 0).confidence_interval()
    mean, low, high = (f"{x:+.{decimals}f}" for x in (np.mean(values), *ends))
    return f"{mean} ({low} to {high})"


def test_units_devices_and_alphabets_are_those_of_the_page(measured: list[dict[str, Any]]) -> None:
    devices = {run["backbone"]: run["device"] for run in measured}
    on_card = np.array([devices[backbone] != "cpu" for backbone in sorted(devices)])
    assert on_card.sum() == 10
    differ = []
    for length, (first, second) in product(("5 epochs", "30 epochs"), PAIRS):
        gains = by_cell(measured, first, length) - by_cell(measured, second, length)
        of_backbone = gains.mean((1, 2))
        (row,) = [
            line
            for line in PAGE.splitlines()
            if line.startswith(f"| {length} | {first} − {second} |")
        ]
        assert told(gains.mean((0, 2))) in row
        assert told(gains[:, :2].mean((1, 2))) in row
        welch = stats.ttest_ind(of_backbone[on_card], of_backbone[~on_card], equal_var=False)
        if welch.pvalue < 0.05:
            differ.append((length, first, round(float(welch.pvalue), 2)))
        if (length, first) in {("5 epochs", "N"), ("5 epochs", "V")}:
            assert told(of_backbone[on_card]) in PAGE
            assert told(of_backbone[~on_card]) in PAGE
        if (length, first) == ("5 epochs", "V"):
            assert (of_backbone > 0).sum() == 14
            for left_out in (0, 1):
                assert told(np.delete(gains, left_out, 1).mean((1, 2))) in PAGE
    assert differ == [("5 epochs", "V", 0.02)]


def test_what_may_be_the_cause_is_as_the_page_says(measured: list[dict[str, Any]]) -> None:
    """N − F at one rate, V's gain minus N's, and the first-order bound from the cosines."""
    N, V, plain, zero = (by_cell(measured, x, "5 epochs") for x in ("N", "V", "0v", "0"))
    assert told(((V - plain) - (N - zero)).mean((1, 2))) in PAGE
    late = by_cell(measured, "N", "30 epochs") - by_cell(measured, "F", "30 epochs")
    assert told(late.mean((1, 2))) in PAGE
    cosine = np.mean([run["cosine"] for run in measured if run["arm"] == "N"])
    assert f"{cosine:.2f}" == "0.81" and f"{1 / cosine:.2f} times" in PAGE
    assert f"{(1 - cosine) * (N - zero).mean():.2f}" == "0.25"
    latin = [by_cell(measured, "0", length)[:, 2].mean() for length in ("30 epochs", "5 epochs")]
    assert [f"{x:.1f} %" in PAGE for x in latin] == [True, True]


def test_pairs_at_one_rate_in_the_runs_of_the_choice_are_those_of_the_page() -> None:
    choice = lines("choice.jsonl")

    def gains(first: str, second: str, length: str, rate: str) -> np.ndarray[Any, Any]:
        ends: dict[str, list[float]] = {first: [], second: []}
        for run in sorted(choice, key=lambda run: (run["backbone"], run["alphabet"], run["seed"])):
            if run["arm"] in ends:
                ends[run["arm"]].append(run["ends"][length][rate])
        return np.array(ends[first]) - np.array(ends[second])

    rates = ("0.01", "0.02", "0.04", "0.08")
    for first, second in (("N", "F"), ("V", "0v")):
        means = [f"{gains(first, second, '5 epochs', rate).mean():+.1f}" for rate in rates]
        assert f"{', '.join(means[:3])} and {means[3]}" in PAGE
    errors = [stats.sem(gains("N", "F", "5 epochs", rate)) for rate in rates]
    assert f"{min(errors):.1f} to {max(errors):.1f}" in PAGE
    late = [gains("V", "0v", "30 epochs", rate) for rate in rates[:3]]
    assert told(np.mean(late, 0), 1) in PAGE


def test_objectives_and_what_goes_with_accuracy_are_those_of_the_page(
    measured: list[dict[str, Any]],
) -> None:
    """Correlations over the cells of an arm, the mean of each alphabet taken away."""
    of_test = {arm: by_cell(measured, arm, "of_test") for arm in ALIGNED}
    for second in ("0", "F"):
        higher = told((of_test["N"] - of_test[second]).mean((1, 2)))
        assert higher.removeprefix("+") in PAGE
    for name in ("of_test", "objective"):
        found = []
        for arm in ALIGNED:
            tables = [by_cell(measured, arm, x) for x in ("5 epochs", name)]
            centred = [(x - x.mean((0, 2), keepdims=True)).ravel() for x in tables]
            found.append(np.corrcoef(*centred)[0, 1])
        assert f"{max(found):.2f} to {min(found):.2f}" in PAGE


def test_rounds_were_made_after_the_choice_by_the_commits_of_the_page(
    measured: list[dict[str, Any]],
) -> None:
    for name, runs in (("choice", lines("choice.jsonl")), ("rounds", measured)):
        times = sorted(run["time"][11:16] for run in runs)
        assert {run["time"][:10] for run in runs} == {"2026-11-27"}
        assert f"{times[0]} to {times[-1]}" in PAGE, name
        assert {run["commit"][:7] for run in runs} <= {"741fbb6", "d3c0cef"}, name
    assert sum(run["time"] < "2026-11-27T07:32" for run in measured) > 400
