"""PEFT: rates, seeds, epochs and starts; directories of two commands; splits that leak."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import quilts
import torch
from conftest import fixture
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from toy import ALIGN_STEPS, PEFT_STEPS, align_line, contents, done, read_records, refusal

import finetune as program
from config import FinetuneConfig, Record
from evaluate import evaluate, read_arm
from finetune import best_epoch, choose_rate, finetune
from support.adapters import find_adapters
from support.errors import RunError, UsageError
from support.files import sha256
from support.processes import HEARD, Stopped
from support.results import FinetuneResult, Score, TrialResult

STILL = {"warmup_epochs": 0, "end_lr": 0, "weight_decay": 0}  # with a rate of 1e-20 nothing moves


def tune(weights: Path, out: Path, **settings: Any) -> FinetuneResult:
    """A small PEFT run on quilts."""
    given: Any = {"backbone": "vit_mini", "dataset": "quilts", "weights": weights, "rank": 4}
    given |= {"epochs": 2, "warmup_epochs": 0, "batch": 40, "seeds": 1, "device": "cpu"}
    return finetune(FinetuneConfig(**given | settings), out)


def tensors(out: Path, seed: int) -> dict[str, Tensor]:
    return load_file(out / f"adapter-s{seed}.safetensors")


def without_time(result: FinetuneResult) -> Record:
    """A result without its directory and seconds."""
    dump = result.model_dump(exclude={"out", "cpu_seconds", "seconds"})
    for trial in dump["tried"] + dump["trials"]:
        del trial["cpu_seconds"], trial["seconds"]
    return dump


# --- what OUT holds -------------------------------------------------------------------------------


def test_a_finished_run_grows_and_keeps_its_trials_and_tests(weights: Path, tmp_path: Path) -> None:
    """More seeds, and another rate: the result is that of a run of this size from the start."""
    tune(weights, tmp_path / "grown", lr=(1e-3, 1e-4))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("grown/lr*/*.json")}
    assert len(kept) == 5  # result and config of both, one test
    more: Any = {"lr": (1e-3, 1e-2, 1e-4), "seeds": 2}
    grown = tune(weights, tmp_path / "grown", **more)
    for path, written in kept.items():
        assert path.stat().st_mtime_ns == written
    whole = tune(weights, tmp_path / "whole", **more)
    assert without_time(grown) == without_time(whole)
    trials = [json.loads(file.read_text()) for file in tmp_path.glob("grown/lr*/result.json")]
    for name, seconds in (("seconds", grown.seconds), ("cpu_seconds", grown.cpu_seconds)):
        assert seconds == pytest.approx(sum(trial[name] for trial in trials))
    for name in ("adapter-s0.safetensors", "adapter-s1.safetensors"):
        assert (tmp_path / "grown" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_finished_run_is_only_read(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that cannot be written; the test images are not scored again."""
    settings: Any = {"lr": (1e-3, 1e-2), "seeds": 2}
    result = tune(weights, tmp_path / "run", **settings)
    out = (tmp_path / "run").rename(tmp_path / "moved")
    before = contents(out)

    def refuse(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(program, "write_atomic", refuse)
    monkeypatch.setattr(program, "locked", refuse)
    monkeypatch.setattr(program.Experiment, "score", refuse)
    assert tune(weights, out, **settings) == result.model_copy(update={"out": str(out)})
    assert contents(out) == before


def test_two_commands_in_one_directory_leave_one_result_with_its_own_rates(
    weights: Path, tmp_path: Path
) -> None:
    """config.json has no rates and seeds; adapters of the command before are not listed."""
    tune(weights, tmp_path, lr=(1e-3,), seeds=3)
    config = (tmp_path / "config.json").read_bytes()
    assert not {"lr", "seeds", "grid_seeds"} & json.loads(config).keys()
    tune(weights, tmp_path, lr=(3e-2,), seeds=1)
    assert (tmp_path / "config.json").read_bytes() == config
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["rates"], len(result["trials"])) == ([3e-2], 1)
    (arm,) = evaluate([tmp_path]).arms
    assert (arm.settings["lr"], len(arm.accuracies)) == ([3e-2], 1)
    assert find_adapters(tmp_path) == [tmp_path / "adapter-s0.safetensors"]
    assert find_adapters(tmp_path / "adapter-s0.safetensors") == find_adapters(tmp_path)
    with pytest.raises(UsageError, match="not of the result"):
        find_adapters(tmp_path / "adapter-s1.safetensors")
    # a kill between the new adapters and the new result
    shutil.copy(tmp_path / "lr0.001-s0/adapter.safetensors", tmp_path / "adapter-s0.safetensors")
    with pytest.raises(UsageError, match="not of the result"):
        find_adapters(tmp_path)


def test_a_stop_while_a_run_grows_leaves_the_old_result(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as seeds are tested: a signal is heard after each."""
    tune(weights, tmp_path, lr=(1e-2,), seeds=1)
    before = (tmp_path / "result.json").read_bytes()
    scored: list[Path] = []

    def write_and_hear(path: Path, content: str) -> None:
        scored.append(path)
        path.write_text(content)
        HEARD.append(signal.SIGTERM)

    monkeypatch.setattr(program, "write_atomic", write_and_hear)
    with pytest.raises(Stopped):
        tune(weights, tmp_path, lr=(1e-2,), seeds=3)
    assert [path.name for path in scored] == ["test.json"]
    assert (tmp_path / "result.json").read_bytes() == before
    assert evaluate([tmp_path]).arms[0].accuracies


def test_nothing_foreign_in_out_breaks_a_run(weights: Path, tmp_path: Path) -> None:
    tune(weights, tmp_path, lr=(1e-2,))
    for name in ("lr_mine-s0", "lr0.5-s7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text('{"accuracy": 3}')
    (tmp_path / "adapter-soup.safetensors").write_bytes(b"mine")
    before = contents(tmp_path)
    result = tune(weights, tmp_path, lr=(1e-2,), seeds=2)
    assert [trial.seed for trial in result.trials] == [0, 1]
    assert len(find_adapters(tmp_path)) == 2
    foreign = ("lr_mine-s0/result.json", "lr0.5-s7/result.json", "adapter-soup.safetensors")
    assert all((tmp_path / name).read_bytes() == before[tmp_path / name] for name in foreign)


# --- rates and epochs -----------------------------------------------------------------------------


def test_a_rate_that_diverges_is_recorded_and_not_chosen(weights: Path, tmp_path: Path) -> None:
    result = tune(weights, tmp_path / "two", lr=(1e-3, 1e30), epochs=1, optimizer="sgd")
    assert (result.lr, result.tried[1].val) == (1e-3, None)
    with pytest.raises(RunError, match=r"rate 1e\+30, .*; leave it out of --lr"):
        tune(weights, tmp_path / "one", lr=(1e30,), epochs=1, seeds=3, optimizer="sgd")
    assert len([*tmp_path.glob("one/lr*")]) == 1  # the second seed was not begun


def ended(lr: float, seed: int, accuracy: float | None, loss: float = 1.0) -> TrialResult:
    val = None if accuracy is None else Score(accuracy=accuracy, loss=loss)
    return TrialResult(
        lr=lr, seed=seed, val=val, start_sha256=None, start_cpu_seconds=0, cpu_seconds=0, seconds=0
    )


def test_the_rate_with_the_best_mean_accuracy_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Not that of the best loss, nor of the best seed, nor one that diverged."""
    tried = [
        ended(1e-3, 0, 70, 0.5), ended(1e-3, 1, 60, 0.5),
        ended(3e-3, 0, 66, 0.9), ended(3e-3, 1, 66, 0.9),
        ended(1e-2, 0, 99, 0.1), ended(1e-2, 1, None),
    ]  # fmt: skip
    assert choose_rate(tried) == 3e-3
    assert "--lr" not in caplog.text
    assert choose_rate([ended(1e-3, 0, 66, 0.9), *tried[2:4]]) == 1e-3  # the first of equal ones
    caplog.clear()
    assert choose_rate(tried[:4]) == 3e-3  # the largest
    assert "0.003, is the least or largest of --lr" in caplog.text
    with pytest.raises(RunError, match="--lr"):
        choose_rate(tried[4:])


def test_the_best_epoch_has_the_highest_accuracy_then_the_lowest_loss_then_comes_first() -> None:
    found = [(50.0, 0.1), (60.0, 0.9), (60.0, 0.8), (60.0, 0.8)]
    records: list[dict[str, Any]] = [{"step": 0, "val": None}]
    for step, (accuracy, loss) in enumerate(found, 1):
        records.append({"step": step, "val": {"accuracy": accuracy, "loss": loss}})
    assert best_epoch(records)["step"] == 3


# --- starts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aligned(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two align runs, s2 and s10, which differ in the seed."""
    place = tmp_path_factory.mktemp("aligned")
    for seed in (2, 10):
        done(align_line(weights.parent, f"--seed {seed} --rank 4 --out {place}/s{seed}"))
    return place


def test_seeds_start_each_from_an_align_run_of_its_own_or_all_from_one(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """s2 comes before s10. The time of each align run is counted once."""
    each = tune(weights, tmp_path / "each", start=aligned, seeds=2, lr=(1e-20,), **STILL)
    costs = []
    for seed, name in enumerate(("s2", "s10")):
        start = load_file(aligned / name / "adapter.safetensors")["theta"]
        assert torch.equal(tensors(tmp_path / "each", seed)["theta"], start)
        costs.append(json.loads((aligned / name / "result.json").read_text())["cpu_seconds"])
    assert read_arm(tmp_path / "each").unit == "align run and PEFT"
    assert each.start_cpu_seconds == pytest.approx(sum(costs))
    for place in (aligned / "s2", aligned / "s2/adapter.safetensors"):
        one = tune(weights, tmp_path / place.name, start=place, seeds=2, lr=(1e-2,))
        assert read_arm(tmp_path / place.name).unit == "PEFT seed on one adapter"
        assert one.start_cpu_seconds == pytest.approx(costs[0])
        (digest,) = {trial.start_sha256 for trial in one.trials}
        assert digest == sha256(aligned / "s2/adapter.safetensors")
    with pytest.raises(UsageError, match="has 2 adapters, --seeds is 3"):
        tune(weights, tmp_path / "three", start=aligned, seeds=3)
    shutil.copy(aligned / "s2/adapter.safetensors", tmp_path / "moved.safetensors")
    (tmp_path / "result.json").write_text('{"accuracy": 3}')  # of something else
    moved = tune(weights, tmp_path / "unknown", start=tmp_path / "moved.safetensors", lr=(1e-2,))
    assert moved.start_cpu_seconds is None


def test_adapters_that_do_not_fit_are_refused(weights: Path, aligned: Path, tmp_path: Path) -> None:
    """Copied, of other settings than the first one's, of another rank, of an unfinished run."""
    shutil.copytree(aligned / "s2", tmp_path / "a/s0")
    shutil.copytree(aligned / "s2", tmp_path / "a/s1")
    tune(weights, tmp_path / "two", start=tmp_path / "a", seeds=2, lr=(1e-2,))
    assert read_arm(tmp_path / "two").unit == "PEFT seed on one adapter"
    shutil.copytree(aligned / "s10", tmp_path / "a/s2")
    with pytest.raises(UsageError, match="twice"):
        tune(weights, tmp_path / "three", start=tmp_path / "a", seeds=3, lr=(1e-2,))
    runs = shutil.copytree(aligned, tmp_path / "runs")
    done(align_line(weights.parent, f"--seed 11 --rank 4 --lam 2 --out {runs}/s11"))
    with pytest.raises(UsageError, match=r"s11.*differs in more than the seed"):
        tune(weights, tmp_path / "out", start=runs, seeds=3)
    with pytest.raises(UsageError, match="has rank 4, this run 8"):
        tune(weights, tmp_path / "out", start=runs, seeds=2, rank=8)
    (runs / "s2" / "adapter.safetensors").unlink()
    with pytest.raises(UsageError, match="s2: is no finished"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)
    assert not (tmp_path / "out").exists()


def test_aligned_seeds_never_take_over_a_direct_arms_directory(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """Nor the other way, nor those of another align run; more seeds of the first one go on."""
    out = tmp_path / "direct"
    tune(weights, out, lr=(1e-2,), seeds=2)
    before = contents(out)
    for start in (aligned / "s2", aligned / "s2/adapter.safetensors", aligned):
        with pytest.raises(UsageError, match="is another run: the content of --from was changed"):
            tune(weights, out, lr=(1e-2,), seeds=2, start=start)
    assert contents(out) == before
    tune(weights, tmp_path / "aligned", lr=(1e-2,), start=aligned / "s2")
    for start in (None, aligned / "s10"):
        with pytest.raises(UsageError, match="is another run"):
            tune(weights, tmp_path / "aligned", lr=(1e-2,), start=start)
    tune(weights, tmp_path / "aligned", lr=(1e-2,), start=aligned, seeds=2)
    assert read_arm(tmp_path / "aligned").unit == "align run and PEFT"


def test_a_restart_begins_at_the_finished_theta_of_another_seed_with_a_fresh_head(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """At a rate at which nothing moves, what is saved is the start. All time before it counts."""
    first = tmp_path / "first"
    direct = tune(weights, first, start=aligned, lr=(1e-2,), seeds=2)
    again = tmp_path / "again"
    result = tune(weights, again, start=first, seed=2, seeds=2, lr=(1e-20,), **STILL)
    for seed in (0, 1):
        before = tensors(first, seed)
        after = tensors(again, seed + 2)
        assert torch.equal(before["theta"], after["theta"])
        assert not torch.equal(before["head.weight"], after["head.weight"])
    assert read_arm(again).unit == "PEFT and PEFT anew"
    assert direct.start_cpu_seconds
    all_before = direct.cpu_seconds + direct.start_cpu_seconds
    assert result.start_cpu_seconds == pytest.approx(all_before)
    differs = evaluate([first, again]).arms[1].differs
    assert differs["starts_from"] == "finetune, there align"
    with pytest.raises(UsageError, match="is of seed 0; give another --seed"):
        tune(weights, tmp_path / "same", start=first, seed=0, seeds=1, lr=(1e-2,))


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
    done(f"{line} --data-seed 2 --dataset folder:{place}/images --quiet --out {place}/align")
    return place


@pytest.mark.parametrize("how", ["run", "file", "link", "y/three.png", "z/300.png"])
def test_another_split_or_other_images_than_aligns_are_refused(
    how: str, weights: Path, folder: Path, tmp_path: Path
) -> None:
    """With another data seed, by run, file or link; or with an image of another name or class."""
    (tmp_path / "link").symlink_to(folder / "images")
    images = folder / "images"
    other = {
        "run": " --data-seed 3",
        "file": f"/adapter.safetensors --dataset folder:{images} --data-seed 3",
        "link": f" --dataset folder:{tmp_path}/link --data-seed 3",
    }
    if how not in other:
        (images / "y/3.png").rename(images / how)
    line = f"finetune --from {folder}/align{other.get(how, '')} {PEFT_STEPS} --out {tmp_path}/f"
    said = refusal(f"{line} --backbone vit_mini --weights {weights}")
    if how not in other:
        (images / how).rename(images / "y/3.png")
    assert str(images) in said and "test images" in said and "--data-seed 2" in said
    assert not (tmp_path / "f").exists()


def test_images_that_were_moved_or_copied_keep_aligns_split(folder: Path, tmp_path: Path) -> None:
    """So no image that align has trained on is tested, whatever the folder is called."""
    shutil.copytree(folder / "images", tmp_path / "elsewhere")
    line = f"finetune --from {folder}/align {PEFT_STEPS} --dataset folder:{tmp_path}/elsewhere"
    done(f"{line} --quiet --out {tmp_path}/f")
    config = json.loads((tmp_path / "f/config.json").read_text())
    of_align = json.loads((folder / "align/config.json").read_text())
    assert (config["data_seed"], config["data_sha256"]) == (2, of_align["data_sha256"])
    done(f"{line} --quiet --out {tmp_path}/f --seeds 2")
    (tmp_path / "elsewhere").rename(tmp_path / "again")  # the run goes on, too
    done(f"{line.replace('elsewhere', 'again')} --quiet --out {tmp_path}/f --seeds 3")


def test_another_dataset_than_aligns_is_taken_and_recorded(folder: Path, tmp_path: Path) -> None:
    pictures(tmp_path / "other", "pq", shift=5)
    line = f"finetune --from {folder}/align {PEFT_STEPS} --dataset folder:{tmp_path}/other"
    done(f"{line} --quiet --out {tmp_path}/f")
    origin = json.loads((tmp_path / "f/result.json").read_text())["origin"]
    assert origin["dataset"].endswith("/images")
    unlike = {"alternations": 3, "lower_steps": 2, "pool": "quilts"}
    assert unlike.items() <= origin["unlike_paper"].items()
    assert "lam" not in origin["unlike_paper"]


# --- the second edition ---------------------------------------------------------------------------

SECOND = fixture("second_edition")  # aligned, and tuned after it; on quilts.pth


def test_an_adapter_of_the_second_edition_is_fine_tuned_to_the_recorded_numbers(
    tmp_path: Path,
) -> None:
    recorded = json.loads((SECOND / "tuned/result.json").read_text())
    cfg = FinetuneConfig(
        start=SECOND / "aligned", weights=quilts.WEIGHTS, backbone="vit_mini", dataset="quilts",
        rank=2, epochs=2, warmup_epochs=0, batch=40, seeds=2, lr=(1e-3, 1e-2), device="cpu",
    )  # fmt: skip
    result = finetune(cfg, tmp_path / "new")
    assert result.lr == recorded["lr"]
    assert [trial.epoch for trial in result.trials] == recorded["epochs"]
    assert [score.accuracy for score in result.tests] == recorded["test"]
    assert [score.right for score in result.tests] == recorded["right"]
    assert [score.loss for score in result.tests] == pytest.approx(recorded["test_loss"], rel=1e-5)
    for seed in (0, 1):
        before = tensors(SECOND / "tuned", seed)
        for name, tensor in tensors(tmp_path / "new", seed).items():
            apart = float((tensor - before[name]).norm() / before[name].norm())
            assert apart < 5e-5, name


def test_a_test_curve_ends_with_the_tested_accuracy_and_changes_no_number(
    weights: Path, tmp_path: Path
) -> None:
    plain = tune(weights, tmp_path / "plain", lr=(1e-2,))
    drawn = tune(weights, tmp_path / "drawn", lr=(1e-2,), test_curve=True)
    assert plain.tests == drawn.tests
    curve = [record["test"] for record in read_records(tmp_path / "drawn/lr0.01-s0")]
    epoch = drawn.trials[0].epoch
    assert len(curve) == 2 and epoch and Score(**curve[epoch - 1]) == drawn.tests[0]
