"""The study of handwriting at toy size: what its arms do, and what its tables count."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from align import align
from config import AlignConfig, PretrainConfig
from evaluate import compare
from experiments import omniglot, omniglot_tables
from experiments.omniglot import Aligned, Cell, Direct, Tuned, Unit, run_unit
from extras.pretrain import build_networks, save_networks
from support.experiment import AlignExperiment

FEW = {
    "alternations": 2, "lower_steps": 2, "upper_steps": 2, "p_batch": 8, "d_batch": 8, "warmup": 1,
    "probe_epochs": 1,
}  # fmt: skip


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hardly any steps, two arms of each kind, and networks that were never trained."""
    monkeypatch.setattr(omniglot, "SETTINGS", omniglot.SETTINGS | FEW)
    monkeypatch.setattr(omniglot, "PEFT", omniglot.PEFT | {"epochs": 5, "warmup_epochs": 0})
    monkeypatch.setattr(omniglot, "ALPHABETS", ("Tagalog",))
    cfg = PretrainConfig(**omniglot.PRETRAIN)
    for kind in ("pretrain", "random"):
        (tmp_path / f"{kind}-0").mkdir()
        (tmp_path / f"{kind}-0/backbone.pth").write_bytes(save_networks(cfg, build_networks(cfg)))
    return tmp_path


def result(out: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((out / "units" / name / "unit.json").read_text()))


def test_an_aligned_arm_is_what_align_computes(toy: Path) -> None:
    """To the bit, as the command writes it."""
    run_unit(Unit("aligned", Cell("Tagalog", 0, 3), toy))
    settings = omniglot.SETTINGS | {"seed": 3, "weights": toy / "pretrain-0"}
    cfg = AlignConfig(backbone="vit_mini", dataset="omniglot:Tagalog", device="cpu", **settings)
    align(cfg, toy / "align")
    mine = load_file(toy / "units/Tagalog-r0-s3/aligned/align.safetensors")
    assert torch.equal(mine["theta"], load_file(toy / "align/adapter.safetensors")["theta"])


def test_a_restart_starts_at_the_first_fine_tunings_theta(toy: Path) -> None:
    run_unit(Unit("restart", Cell("Tagalog", 0, 0), toy))
    folder = toy / "units/Tagalog-r0-s0/restart"
    config = json.loads((folder / "peft/config.json").read_text())
    assert config["start"] == str(folder / "first")
    assert (config["seed"], config["restart"]) == (0, True)
    before = json.loads((folder / "first/config.json").read_text())
    assert (before["seed"], before["restart"]) == (100, False)
    assert result(toy, "Tagalog-r0-s0/restart")["cpu_align"] > 0


def test_what_is_changed_in_algorithm_1_changes_theta_D_as_it_says(toy: Path) -> None:
    """Q = 0: θ_D follows its own loss alone. q alone, with q = 0: it is moved by decay alone."""
    settings = omniglot.SETTINGS | {"d_weight_decay": 0.0, "upper_steps": 1, "lam": 1e-3}
    cfg = AlignConfig(
        backbone="vit_mini", dataset="omniglot:Tagalog", weights=toy / "pretrain-0", **settings
    )
    experiment = AlignExperiment(cfg)
    still = Aligned(hypergrad=omniglot.no_hypergradient, change_loss=omniglot.without_gradient_at_D)
    ends = omniglot.align_in_memory(experiment, still)
    assert torch.equal(ends.theta_D, experiment.new_theta())
    assert ends.q_over_g == 0
    moved = omniglot.align_in_memory(experiment, Aligned(hypergrad=omniglot.no_hypergradient))
    assert not torch.equal(moved.theta_D, experiment.new_theta())


def test_fewer_drawers_are_fewer_labels_of_every_character() -> None:
    task = omniglot.task_of(Cell("Latin", 1, 0), 3)
    assert torch.equal(task.train.targets.bincount(), torch.full((26,), 3))
    assert len(task.test.targets) == 26 * 7


def planted(arm: str, alphabet: str, seed: int, right: int, val: float) -> Tuned:
    """A unit's result with 100 test images."""
    curve = {5: float(right // 2), 25: float(right)}
    return Tuned(arm, alphabet, 0, seed, 100, right, 25, val, curve, 1.0, 2.0, 10, 11, 0.9, 1.0)


def plant(out: Path, tuned: Tuned) -> None:
    folder = out / "units" / f"{tuned.alphabet}-s{tuned.seed}" / tuned.arm.replace(" ", "_")
    folder.mkdir(parents=True)
    (folder / "unit.json").write_text(json.dumps(tuned._asdict()))


def test_tables_compare_cell_by_cell_and_direct_is_the_rate_that_validation_prefers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"aligned": [50, 52], "direct 0.01": [40, 41], "direct 0.03": [45, 47]}
    for arm, numbers in counts.items():
        for seed, right in enumerate(numbers):
            val = 30.0 if arm == "direct 0.03" else 20.0
            plant(tmp_path, planted(arm, "Greek", seed, right, val))
    plant(tmp_path, planted("direct 0.003", "Greek", 0, 60, 10.0))
    omniglot_tables.main(tmp_path)
    rows = {row["arm"]: row for row in json.loads((tmp_path / "arms.json").read_text())}
    assert rows["direct"]["test (%)"] == "46.0"
    found = compare([50, 52], [45, 47])  # with a single cell, the ordinary test
    assert rows["direct"]["aligned minus this, end"] == f"+5.0 (p {found.p:.2g})"
    with (tmp_path / "omniglot.csv").open() as file:
        units = list(csv.DictReader(file))
    assert len(units) == 7
    assert {unit["arm"] for unit in units} == {*counts, "direct 0.003"}


def test_every_arm_is_of_a_kind_that_runs() -> None:
    for arm in (omniglot.MAIN | omniglot.DRIVES).values():
        assert isinstance(arm, Aligned | Direct)
        if isinstance(arm, Aligned):
            AlignConfig(backbone="vit_mini", dataset="omniglot:Greek", **arm.settings)
