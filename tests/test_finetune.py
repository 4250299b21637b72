"""PEFT: rates, seeds, epochs and starts; splits that leak; runs of the second edition."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import quilts
import torch
from conftest import fixture
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from toy import ALIGN_STEPS, PEFT_STEPS, read_records, run

from bisslight import Diverged
from config import FinetuneConfig
from evaluate import evaluate
from finetune import (
    FinetuneResult,
    Trial,
    TrialResult,
    best_epoch,
    choose_rate,
    finetune,
    starts_of_seeds,
)
from support.errors import UsageError
from support.metrics import Score

STILL = {"warmup_epochs": 0, "end_lr": 0, "weight_decay": 0}  # with a rate of 1e-20 nothing moves


def tune(weights: Path, out: Path, **settings: Any) -> FinetuneResult:
    """A small PEFT run on quilts."""
    given: Any = {"backbone": "vit_mini", "dataset": "quilts", "weights": weights, "rank": 4}
    given |= {"epochs": 2, "warmup_epochs": 0, "batch": 40, "seeds": 1, "device": "cpu"}
    return finetune(FinetuneConfig(**given | settings), out)


def test_a_finished_run_grows_and_keeps_its_trials(weights: Path, tmp_path: Path) -> None:
    """More seeds, and another rate: the result is that of a run of this size from the start."""
    tune(weights, tmp_path / "grown", grid=(1e-3, 1e-4), seeds=1)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("grown/lr*/result.json")}
    assert len(kept) == 2
    more: Any = {"grid": (1e-3, 1e-2, 1e-4), "seeds": 2}
    grown = tune(weights, tmp_path / "grown", **more)
    for path, written in kept.items():
        assert path.stat().st_mtime_ns == written
    whole = tune(weights, tmp_path / "whole", **more)
    own = {"out", "seconds", "cpu_seconds", "trial_seconds"}
    assert grown.model_dump(exclude=own) == whole.model_dump(exclude=own)
    trials = [json.loads(file.read_text()) for file in tmp_path.glob("grown/lr*/result.json")]
    for name, seconds in (("seconds", grown.seconds), ("cpu_seconds", grown.cpu_seconds)):
        assert seconds == pytest.approx(sum(trial[name] for trial in trials))
    for seed in (0, 1):
        for name, tensor in tensors(tmp_path / "whole", seed).items():
            assert torch.equal(tensor, tensors(tmp_path / "grown", seed)[name])
    assert tune(weights, tmp_path / "grown", **more) == grown  # finished, so it is only read
    for fewer in ({"seeds": 1}, {"grid": (1e-3, 1e-2)}):
        with pytest.raises(UsageError, match=next(iter(fewer))):
            tune(weights, tmp_path / "grown", **more | fewer)


def tensors(out: Path, seed: int) -> dict[str, Tensor]:
    return load_file(out / f"adapter-s{seed}.safetensors")


def scores(trial: Path) -> list[tuple[float, float]]:
    """Accuracy and loss of every validated epoch."""
    validated = [record["val"] for record in read_records(trial) if record["val"]]
    return [(val["accuracy"], val["loss"]) for val in validated]


def test_of_equal_scores_the_first_epoch_and_rate_are_kept_and_seeds_begin_apart(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At rates at which nothing moves: ties in accuracy and loss; what is saved is the start."""
    result = tune(weights, tmp_path, grid=(1e-21, 1e-20, 1e-19), seeds=2, **STILL)
    assert "--grid" not in caplog.text  # none is better than another
    for trial in tmp_path.glob("lr*-s*"):
        assert len(set(scores(trial))) == 1
    assert (result.epochs, result.lr) == ([1, 1], 1e-21)
    first = tensors(tmp_path, 0)
    second = tensors(tmp_path, 1)
    theta = first["theta"].view(4, 4, 4, 64)  # (block, A_q B_q A_v B_v, rank, width)
    other = second["theta"].view(4, 4, 4, 64)
    assert float(theta[:, 1::2].abs().max()) < 1e-15
    assert 0.12 < float(theta[:, 0::2].abs().max()) <= 64**-0.5
    assert not torch.isclose(theta[:, 0::2], other[:, 0::2]).all()
    assert not torch.isclose(first["head.weight"], second["head.weight"]).all()


def test_a_best_rate_that_is_an_end_of_the_grid_is_told(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At two of the rates nothing moves."""
    settings: Any = {"epochs": 6, "grid": (1e-21, 1e-20, 0.1)}
    assert tune(weights, tmp_path, **settings).lr == 0.1
    assert "the best rate, 0.1, is an end of --grid" in caplog.text


def test_a_seed_is_the_same_run_wherever_it_stands(weights: Path, tmp_path: Path) -> None:
    """Seed 1 as the second of two, and alone: same bits, other ones than seed 0's."""
    two = tmp_path / "two"
    one = tmp_path / "one"
    tune(weights, two, lr=1e-2, epochs=1, seeds=2)
    tune(weights, one, lr=1e-2, epochs=1, seed=1)
    alone = tensors(one, 1)
    for name, tensor in tensors(two, 1).items():
        assert torch.equal(tensor, alone[name])
    assert scores(two / "lr0.01-s1") == scores(one / "lr0.01-s1") != scores(two / "lr0.01-s0")


def test_a_rate_that_diverges_is_recorded_and_not_chosen(weights: Path, tmp_path: Path) -> None:
    result = tune(weights, tmp_path / "two", grid=(1e-3, 1e30), epochs=1, optimizer="sgd")
    assert (result.lr, result.grid["1e+30"]) == (1e-3, [None])
    with pytest.raises(Diverged):
        tune(weights, tmp_path / "one", lr=1e30, epochs=1, optimizer="sgd")


def ended(lr: float, seed: int, accuracy: float | None, loss: float = 1.0) -> TrialResult:
    val = None if accuracy is None else Score(accuracy=accuracy, loss=loss)
    return TrialResult(lr=lr, seed=seed, val=val, adapter=Path(), out="", cpu_seconds=0, seconds=0)


def test_the_rate_with_the_best_mean_accuracy_is_taken() -> None:
    """Not that of the best loss, nor of the best seed; the rate's other seeds are asked for."""
    grid = {
        1e-3: [ended(1e-3, 0, 70, 0.5), ended(1e-3, 1, 60, 0.5)],
        3e-3: [ended(3e-3, 0, 66, 0.9), ended(3e-3, 1, 66, 0.9)],
        1e-2: [ended(1e-2, 0, 99, 0.1), ended(1e-2, 1, None)],
    }
    seeds = [(seed, None) for seed in range(3)]
    chosen = choose_rate(grid, seeds, lambda trials: [ended(t.lr, t.seed, 50) for t in trials])
    assert chosen == [*grid[3e-3], ended(3e-3, 2, 50)]

    def diverge_at_3e_3(trials: list[Trial]) -> list[TrialResult]:
        return [ended(t.lr, t.seed, None if t.lr == 3e-3 else 50) for t in trials]

    # a rate at which a later seed diverges is given up for the next best
    assert choose_rate(grid, seeds, diverge_at_3e_3)[0].lr == 1e-3
    with pytest.raises(Diverged):
        choose_rate({1e-2: grid[1e-2]}, seeds, diverge_at_3e_3)


def test_the_best_epoch_has_the_highest_accuracy_then_the_lowest_loss_then_comes_first() -> None:
    found = [(50.0, 0.1), (60.0, 0.9), (60.0, 0.8), (60.0, 0.8)]
    records: list[dict[str, Any]] = [{"step": 0, "val": None}]
    for step, (accuracy, loss) in enumerate(found, 1):
        records.append({"step": step, "val": {"accuracy": accuracy, "loss": loss}})
    assert best_epoch(records)["step"] == 3


# --- starts ---------------------------------------------------------------------------------------


def make_align_runs(root: Path, *configs: dict[str, Any]) -> FinetuneConfig:
    """Two seeds from a directory of finished align runs with these settings."""
    for k, config in enumerate(configs):
        folder = root / f"s{k}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "result.json").write_text("{}")
        (folder / "adapter.safetensors").touch()
    return FinetuneConfig(backbone="vit_mini", dataset="quilts", start=root, seeds=2)


def test_seeds_start_each_from_an_align_run_of_its_own_or_all_from_one(tmp_path: Path) -> None:
    cfg = make_align_runs(tmp_path, {"seed": 0, "jobs": 1}, {"seed": 1, "jobs": 2})
    (tmp_path / "s1").rename(tmp_path / "s10")  # s2 comes before s10
    shutil.copytree(tmp_path / "s0", tmp_path / "s2")
    shutil.rmtree(tmp_path / "s0")
    starts = starts_of_seeds(cfg)
    assert starts.files == [tmp_path / run / "adapter.safetensors" for run in ("s2", "s10")]
    assert starts.unit == "align run and PEFT"
    one = starts_of_seeds(cfg.replace(start=tmp_path / "s2"))
    assert (one.files, one.unit) == (starts.files[:1] * 2, "PEFT seed on one align run")
    file = starts_of_seeds(cfg.replace(start=tmp_path / "s2" / "adapter.safetensors"))
    assert file.unit == "PEFT seed on one LoRA file"
    with pytest.raises(UsageError, match="2 runs, not 1 or 3"):
        starts_of_seeds(cfg.replace(seeds=3))
    (tmp_path / "s2" / "result.json").unlink()
    with pytest.raises(UsageError, match="s2"):
        starts_of_seeds(cfg)


@pytest.mark.parametrize(
    ("second", "named"), [({"seed": 1, "lam": 2}, "lam"), ({"seed": 0, "lam": 1}, "seed")]
)
def test_align_runs_that_differ_in_more_than_the_seed_are_refused(
    second: dict[str, Any], named: str, tmp_path: Path
) -> None:
    cfg = make_align_runs(tmp_path, {"seed": 0, "lam": 1}, second)
    with pytest.raises(UsageError, match=f"see their {named}"):
        starts_of_seeds(cfg)


# --- splits that leak: PEFT on other images or another split than align's -------------------------


def pictures(root: Path, classes: str, shift: int = 0) -> None:
    """Class folders of 15 plain 16-pixel images each."""
    for k, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(shift, 15 + shift):
            Image.new("RGB", (16, 16), (40 * k, 9 * i, 100)).save(root / name / f"{i}.png")


@pytest.fixture(scope="module")
def folder(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `align` on a folder of images, and that folder, `images`."""
    place = tmp_path_factory.mktemp("folder")
    pictures(place / "images", "xyz")
    line = f"align --backbone vit_mini --weights {weights} {ALIGN_STEPS} --pool quilts"
    line += f" --data-seed 2 --dataset folder:{place}/images --quiet --out {place}/align"
    assert run(line).code == 0
    return place


@pytest.mark.parametrize("how", ["run", "file", "link", "y/three.png", "z/300.png"])
def test_another_split_or_other_images_than_aligns_are_refused(
    how: str, weights: Path, folder: Path, tmp_path: Path
) -> None:
    """With another data seed, by run, file or link; or with an image of another name or class."""
    (tmp_path / "link").symlink_to(folder / "images")
    images = folder / "images"
    image = images / "y/3.png"
    start = f"{folder}/align"
    if how == "run":
        start += " --data-seed 3"
    elif how == "file":
        start += f"/adapter.safetensors --backbone vit_mini --weights {weights}"
        start += f" --dataset folder:{images} --data-seed 3"
    elif how == "link":
        start += f" --dataset folder:{tmp_path}/link --data-seed 3"
    else:
        image.rename(images / how)
    code, out, err = run(f"finetune --from {start} {PEFT_STEPS} --out {tmp_path}/f")
    if not image.exists():
        (images / how).rename(image)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert str(images) in err or "link" in err
    assert "test images" in err and "--data-seed" in err
    assert not (tmp_path / "f").exists()


def test_another_dataset_than_aligns_is_taken_and_said_and_recorded(
    folder: Path, tmp_path: Path
) -> None:
    """Settings of align's dataset, its split seed, do not come along."""
    pictures(tmp_path / "other", "pq", shift=5)
    line = f"finetune --from {folder}/align {PEFT_STEPS} --dataset folder:{tmp_path}/other"
    code, _, err = run(f"{line} --out {tmp_path}/f")
    assert code == 0, err
    said = [line for line in err.splitlines() if "aligned on" in line]
    assert len(said) == 1 and "/images" in said[0] and "/other" in said[0]
    result = json.loads((tmp_path / "f/result.json").read_text())
    config = json.loads((tmp_path / "f/config.json").read_text())
    assert result["aligned_on"].endswith("/images") and config["data_seed"] == 0
    unlike = {"alternations": 3, "lower_steps": 2, "pool": "quilts"}
    assert unlike.items() <= result["align_unlike_paper"].items()
    assert "lam" not in result["align_unlike_paper"]


# --- runs of the second edition -------------------------------------------------------------------

SECOND = fixture("second_edition")  # aligned; tuned, after it; direct; all on quilts.pth


def test_results_of_the_second_edition_are_evaluated() -> None:
    found = evaluate([SECOND / "tuned", SECOND / "direct"]).model_dump()
    recorded = json.loads((SECOND / "evaluation.json").read_text())
    versus = [rows["arms"][1].pop("first_minus_this") for rows in (found, recorded)]
    assert versus[0]["difference"] == pytest.approx(versus[1]["difference"])
    assert versus[0]["p"] == versus[1]["p"]
    assert found == recorded


def test_an_adapter_of_the_second_edition_is_fine_tuned_to_the_recorded_numbers(
    tmp_path: Path,
) -> None:
    weights = quilts.WEIGHTS
    recorded = json.loads((SECOND / "tuned/result.json").read_text())
    cfg = FinetuneConfig(
        start=SECOND / "aligned", weights=weights, backbone="vit_mini", dataset="quilts", rank=2,
        epochs=2, warmup_epochs=0, batch=40, seeds=2, grid=(1e-3, 1e-2), device="cpu",
    )  # fmt: skip
    result = finetune(cfg, tmp_path / "new").model_dump()
    for name in ("lr", "grid", "val", "epochs", "test", "right", "unit", "align_unlike_paper"):
        assert result[name] == recorded[name], name
    assert result["test_loss"] == pytest.approx(recorded["test_loss"], rel=1e-5)
    for seed in (0, 1):
        before = tensors(SECOND / "tuned", seed)
        for name, tensor in tensors(tmp_path / "new", seed).items():
            apart = float((tensor - before[name]).norm() / before[name].norm())
            assert apart < 5e-5, name


def test_a_restart_begins_at_the_finished_theta_of_another_seed_with_a_fresh_head(
    weights: Path, tmp_path: Path
) -> None:
    """At a rate at which nothing moves, what is saved is the start."""
    first = tmp_path / "first"
    tune(weights, first, lr=1e-2, seeds=2)
    again = tmp_path / "again"
    result = tune(weights, again, start=first, restart=True, seed=2, seeds=2, lr=1e-20, **STILL)
    for seed in (0, 1):
        before = tensors(first, seed)
        after = tensors(again, seed + 2)
        assert torch.equal(before["theta"], after["theta"])
        assert not torch.equal(before["head.weight"], after["head.weight"])
    assert result.aligned_by is None
    assert evaluate([first, again]).arms[1].differs["restart"] == "True, there False"


def test_a_restart_of_the_same_seeds_or_of_no_finished_fine_tuning_is_refused(
    weights: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    tune(weights, first, lr=1e-2)
    (tmp_path / "aligned").mkdir()
    for name in ("config.json", "result.json"):  # of a run without seeds
        (tmp_path / "aligned" / name).write_text("{}")
    for start, settings, named in (
        (first, {"seed": 0}, "--seed"),
        (first, {"seed": 1, "seeds": 2}, "--seeds"),
        (tmp_path, {"seed": 1}, "--restart"),
        (tmp_path / "aligned", {"seed": 1}, "--restart"),
    ):
        with pytest.raises(UsageError, match=named):
            tune(weights, tmp_path / "again", start=start, restart=True, lr=1e-2, **settings)
    with pytest.raises(UsageError, match="--restart"):  # without it, a finished θ is refused
        tune(weights, tmp_path / "again", start=first / "adapter-s0.safetensors", lr=1e-2)


def test_a_test_curve_ends_with_the_tested_accuracy_and_changes_no_number(
    weights: Path, tmp_path: Path
) -> None:
    plain = tune(weights, tmp_path / "plain", lr=1e-2)
    drawn = tune(weights, tmp_path / "drawn", lr=1e-2, test_curve=True)
    assert plain.right == drawn.right
    trial = json.loads((tmp_path / "drawn/lr0.01-s0/result.json").read_text())
    assert trial["test_curve"][str(drawn.epochs[0])] == drawn.test[0]
    assert len(trial["test_curve"]) == 2
