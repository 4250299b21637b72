"""PEFT: rates, seeds, epochs and starts; directories of two commands; splits that leak."""

import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from toy import (
    ALIGN_STEPS,
    PEFT_STEPS,
    align_line,
    contents,
    done,
    finetune_line,
    read_records,
    refusal,
)

import finetune as program
from config import FinetuneConfig, Record
from evaluate import evaluate, read_arm
from finetune import best_epoch, choose_rate, finetune
from support.adapters import check_settings, find_adapters, load_adapter, save_adapter
from support.errors import RunError, UsageError
from support.files import sha256
from support.results import AdapterInfo, FinetuneResult, Score, TrialResult, read_result
from support.runs import Track, untracked

STILL = {"warmup_epochs": 0, "end_lr": 0, "weight_decay": 0}  # with a rate of 1e-20 nothing moves


def tune(weights: Path, out: Path, track: Track = untracked, **settings: Any) -> FinetuneResult:
    """A small PEFT run on quilts."""
    given: Any = {"backbone": "vit_mini", "dataset": "few_quilts", "weights": weights, "rank": 4}
    given |= {"epochs": 2, "warmup_epochs": 0, "batch": 40, "seeds": 1, "device": "cpu"}
    return finetune(FinetuneConfig(**given | settings), out, track=track)


def tensors(out: Path, seed: int) -> dict[str, Tensor]:
    """Those of a seed, in its adapter with the chosen rate."""
    lr = json.loads((out / "result.json").read_text())["lr"]
    return load_file(out / f"lr{lr}-s{seed}/adapter.safetensors")


def without_time(result: FinetuneResult) -> Record:
    """A result without its directory and seconds."""
    dump = result.model_dump(exclude={"out", "cpu_seconds", "seconds"})
    for trial in dump["tried"] + dump["trials"]:
        del trial["cpu_seconds"], trial["seconds"]
    return dump


# --- what OUT holds -------------------------------------------------------------------------------


def test_a_run_grows_keeps_its_trials_and_tests_and_never_shrinks(
    weights: Path, tmp_path: Path
) -> None:
    """More seeds, and another rate: the result is that of a run of this size from the start."""
    tune(weights, tmp_path / "grown", lr=(1e-3, 1e-4), epochs=1)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("grown/lr*/*.json")}
    assert len(kept) == 5  # result and config of both, one test
    sizes: Any = {"seeds": 2, "grid_seeds": 2, "epochs": 1}
    grown = tune(weights, tmp_path / "grown", lr=(1e-2,), **sizes)
    for path, written in kept.items():
        assert path.stat().st_mtime_ns == written
    whole = tune(weights, tmp_path / "whole", lr=(1e-3, 1e-2, 1e-4), **sizes)
    assert without_time(grown) == without_time(whole)
    trials = [json.loads(file.read_text()) for file in tmp_path.glob("grown/lr*/result.json")]
    for name, seconds in (("seconds", grown.seconds), ("cpu_seconds", grown.cpu_seconds)):
        assert seconds == pytest.approx(sum(trial[name] for trial in trials))
    for one, other in zip(
        *(find_adapters(tmp_path / name) for name in ("grown", "whole")), strict=True
    ):
        assert one.read_bytes() == other.read_bytes()
    before = contents(tmp_path)
    assert tune(weights, tmp_path / "grown", lr=(1e-3,), seeds=1, epochs=1) == grown
    assert contents(tmp_path) == before
    (arm,) = evaluate([tmp_path / "grown"]).arms
    assert (arm.chain[0]["lr"], len(arm.accuracies)) == ([1e-4, 1e-3, 1e-2], 2)


def test_a_finished_run_is_only_read(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that cannot be written; the test images are not scored again."""
    settings: Any = {"lr": (1e-3, 1e-2), "seeds": 2, "epochs": 1}
    result = tune(weights, tmp_path / "run", **settings)
    out = (tmp_path / "run").rename(tmp_path / "moved")
    before = contents(out)

    def refuse(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(program, "write_atomic", refuse)
    monkeypatch.setattr(program, "locked", refuse)
    monkeypatch.setattr("support.experiment.Experiment.score", refuse)
    assert tune(weights, out, **settings) == result.model_copy(update={"out": str(out)})
    assert contents(out) == before


def test_another_commands_rates_that_came_meanwhile_are_not_replaced(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finishes while this one is at its last test: then all is done for both."""
    search = program.search
    others: list[str] = []

    def search_and_be_overtaken(*given: Any) -> FinetuneResult:
        result = search(*given)
        if not others:
            others.append("begun")
            tune(weights, tmp_path / "out", lr=(1e-3,), seeds=2)
        return result

    monkeypatch.setattr(program, "search", search_and_be_overtaken)
    result = tune(weights, tmp_path / "out", lr=(3e-2,), seeds=1)
    assert (result.rates, len(result.trials)) == ([1e-3, 3e-2], 2)
    assert read_result(tmp_path / "out") == result


def test_adapters_lie_where_they_were_trained(weights: Path, tmp_path: Path) -> None:
    tune(weights, tmp_path, lr=(1e-3, 3e-2), seeds=2)
    assert not [*tmp_path.glob("*.safetensors")]
    lr = json.loads((tmp_path / "result.json").read_text())["lr"]
    expected = [tmp_path / f"lr{lr}-s{seed}/adapter.safetensors" for seed in (0, 1)]
    assert find_adapters(tmp_path) == expected
    assert find_adapters(expected[1]) == [expected[1]]
    expected[1].unlink()
    with pytest.raises(UsageError, match=r"s1/adapter\.safetensors"):
        find_adapters(tmp_path)


def test_the_guides_lines_make_a_confusion_matrix_and_find_what_was_wrong(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On image files: each wrong file lies in the folder of another class than was guessed.

    The rate that validation chose is found, and what was found is printed.
    """
    pictures(tmp_path / "images", "xyz")
    settings: Any = {"dataset": f"folder:{tmp_path}/images", "lr": (1e-5, 3e-2), "batch": 9}
    result = tune(weights, tmp_path / "f", seed=4, **settings)
    guide = (Path(program.__file__).parent / "docs/guide.md").read_text()
    (code,) = re.findall(r"```python\n(  import json\n.*?)```", guide, re.DOTALL)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code).replace("OUT/", f"{tmp_path}/f/"), names)
    confusion, test = names["confusion"], names["test"]
    pairs = zip(test["files"], test["guesses"], strict=True)
    wrong = [file for file, guess in pairs if Path(file).parent.name != "xyz"[guess]]
    assert confusion.sum() == 9 and [*confusion.sum(1)] == [3, 3, 3]
    assert np.trace(confusion) == result.tests[0].right == 9 - len(wrong)
    printed = capsys.readouterr().out
    assert wrong == [file for file in test["files"] if file in printed] != []
    of_classes = [result.by_class[name][0] for name in "xyz"]
    assert of_classes == pytest.approx([100 * confusion[k, k] / 3 for k in range(3)])


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_a_config_that_is_damaged_is_named_with_a_remedy(
    content: str, weights: Path, runs: Path, tmp_path: Path
) -> None:
    """Of what --from names, of what evaluate and export read, of a directory of --out."""
    run = shutil.copytree(runs / "without", tmp_path / "run")
    trial = next(file for file in run.glob("lr*") if (file / "test.json").exists())
    for place in (run, trial):
        (place / "config.json").write_text(content)
    lines = {
        f"finetune --from {run} --seed 5 {PEFT_STEPS} --out {tmp_path}/f": run,
        f"evaluate {run}": run,
        f"export {trial}": trial,
        finetune_line(weights.parent, f"--out {run}"): run,
    }
    for line, place in lines.items():
        said = refusal(line)
        assert str(place) in said and "config.json" in said


def test_nothing_foreign_in_out_breaks_a_run(weights: Path, tmp_path: Path) -> None:
    tune(weights, tmp_path, lr=(1e-2,))
    for name in ("lr_mine-s0", "lr0.5-s7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text('{"accuracy": 3}')
    shutil.copytree(tmp_path / "lr0.01-s0", tmp_path / "lr0.01-s0.bak")
    before = contents(tmp_path)
    result = tune(weights, tmp_path, lr=(1e-2,), seeds=2)
    assert [trial.seed for trial in result.trials] == [0, 1]
    assert result.seconds == pytest.approx(sum(trial.seconds for trial in result.trials))
    after = contents(tmp_path)
    assert all(after[file] == before[file] for file in before if file.parent != tmp_path)


# --- rates and epochs -----------------------------------------------------------------------------


def test_a_rate_that_diverges_is_recorded_and_not_chosen(weights: Path, tmp_path: Path) -> None:
    result = tune(weights, tmp_path / "two", lr=(1e-3, 1e30), epochs=1, optimizer="sgd")
    assert (result.lr, result.tried[1].val) == (1e-3, None)
    with pytest.raises(RunError, match=r"rate 1e\+30, .*--lr"):
        tune(weights, tmp_path / "one", lr=(1e30,), epochs=1, seeds=3, optimizer="sgd")
    assert len([*tmp_path.glob("one/lr*")]) == 1  # the second seed was not begun
    with pytest.raises(RunError, match="--lr"):
        choose_rate([ended(1e-2, 99, 0.1), ended(1e-2, None, 1.0)])


def ended(lr: float, accuracy: float | None, loss: float) -> TrialResult:
    """A trial with this score; None: it diverged."""
    val = None if accuracy is None else Score(accuracy=accuracy, loss=loss)
    return TrialResult(
        lr=lr, seed=0, val=val, start_sha256=None, start_cpu_seconds=0, cpu_seconds=0, seconds=0
    )


A = [(1e-3, 70, 0.5), (1e-3, 60, 0.5)]
B = [(3e-3, 66, 0.9), (3e-3, 66, 0.9)]
DIVERGED = [(1e-2, 99, 0.1), (1e-2, None, 1.0)]
# Of 18 images, three: the mean of the first ones is larger by rounding alone.
THREE = [(1e-3, 100 * right / 18, 1.12) for right in (0, 0, 3)]


@pytest.mark.parametrize(
    ("tried", "rate"),
    [
        ([*A, *B, *DIVERGED], 3e-3),  # not that of the best loss, nor of the best trial
        ([*A, *B, (1e-3, 99, 1.0)], 1e-3),
        ([(1e-3, 66, 0.9), *B], 1e-3),  # of equally good ones the lowest, in any order
        ([*B, (1e-3, 66, 0.9)], 1e-3),
        ([*THREE, *((3e-3, 100 * right / 18, 1.11) for right in (0, 1, 2))], 3e-3),
        ([*THREE, *((3e-3, 100 * right / 18, 1.13) for right in (0, 1, 2))], 1e-3),
    ],
)
def test_the_rate_with_the_best_mean_accuracy_is_taken_then_that_with_the_lowest_loss(
    tried: list[tuple[float, float | None, float]], rate: float
) -> None:
    assert choose_rate([ended(*trial) for trial in tried]) == rate


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
        trial = json.loads((tmp_path / f"each/lr1e-20-s{seed}/config.json").read_text())
        assert trial["start"] == str(aligned / name / "adapter.safetensors")
        costs.append(json.loads((aligned / name / "result.json").read_text())["cpu_seconds"])
    assert read_arm(tmp_path / "each").unit == "2 x align (2 seeds), 2 x finetune (2 seeds)"
    assert each.start_cpu_seconds == pytest.approx(sum(costs))
    for place in (aligned / "s2", aligned / "s2/adapter.safetensors"):
        one = tune(weights, tmp_path / place.name, start=place, seeds=2, lr=(1e-2,))
        assert read_arm(tmp_path / place.name).unit.startswith("1 x align")
        assert one.start_cpu_seconds == pytest.approx(costs[0])
        (digest,) = {trial.start_sha256 for trial in one.trials}
        assert digest == sha256(aligned / "s2/adapter.safetensors")
    with pytest.raises(UsageError, match=r"2 .*--seeds is 3"):
        tune(weights, tmp_path / "three", start=aligned, seeds=3)
    first = tune(weights, tmp_path / "first", start=aligned, lr=(1e-2,))  # of two, for one seed
    assert first.trials[0].start_sha256 == sha256(aligned / "s2/adapter.safetensors")
    shutil.copy(aligned / "s2/adapter.safetensors", tmp_path / "moved.safetensors")
    (tmp_path / "result.json").write_text('{"accuracy": 3}')  # of something else
    moved = tune(weights, tmp_path / "unknown", start=tmp_path / "moved.safetensors", lr=(1e-2,))
    assert moved.start_cpu_seconds is None


def test_adapters_that_do_not_fit_are_refused(weights: Path, aligned: Path, tmp_path: Path) -> None:
    """Copied, of other settings than the first one, of another rank, of other weights, missing."""
    shutil.copytree(aligned / "s2", tmp_path / "a/s0")
    shutil.copytree(aligned / "s2", tmp_path / "a/s1")
    tune(weights, tmp_path / "two", start=tmp_path / "a", seeds=2, lr=(1e-2,))
    assert read_arm(tmp_path / "two").unit.startswith("1 x align")
    shutil.copytree(aligned / "s10", tmp_path / "a/s2")
    with pytest.raises(UsageError, match="there are 2 starts for 3 seeds, neither"):
        tune(weights, tmp_path / "three", start=tmp_path / "a", seeds=3, lr=(1e-2,))
    runs = shutil.copytree(aligned, tmp_path / "runs")
    done(align_line(weights.parent, f"--seed 11 --rank 4 --lam 2 --out {runs}/s11"))
    for seeds in (3, 2):  # s11 is of none of two
        with pytest.raises(UsageError, match=r"s11/.*: --lam .*"):
            tune(weights, tmp_path / "out", start=runs, seeds=seeds)
    shutil.rmtree(runs / "s11")
    with pytest.raises(UsageError, match=r"--rank .* is 4, here 8"):
        tune(weights, tmp_path / "out", start=runs, seeds=2, rank=8)
    with pytest.raises(UsageError, match=r"s10/.* other --weights"):
        tune(weights.parent / "ijepa", tmp_path / "out", start=runs, seeds=2, pretext="ijepa")
    (runs / "s2" / "adapter.safetensors").unlink()
    with pytest.raises(UsageError, match=r"s2: has no .*/s2/adapter.safetensors"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)
    with pytest.raises(UsageError, match=r"runs: has no .*/runs/adapter.safetensors"):
        find_adapters(runs)  # as `predict` does, of a folder of runs
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_ijepas_other_encoder_is_refused() -> None:
    """Both lie in one file, so the digest of the weights is the same."""
    base: Any = {"backbone": "vit_mini", "dataset": "quilts", "pretext": "ijepa", "rank": 4}
    cfg = FinetuneConfig(**base)
    info = AdapterInfo(definition={"command": "align"} | cfg.model_dump(mode="json"))
    check_settings("a", info, cfg)
    with pytest.raises(UsageError, match=r"^a: .*base .* is target_encoder, here encoder"):
        check_settings("a", info, cfg.replace(base="encoder"))


def test_each_seed_in_a_directory_keeps_its_start(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """No arm takes over another one's directory. Then the second seed's align run is replaced,
    while the start of the first one stands in config.json. The seeds are 5 and 6.
    """
    starts = shutil.copytree(aligned, tmp_path / "starts")
    tune(weights, tmp_path / "direct", lr=(1e-2,), seed=5)
    tune(weights, tmp_path / "tuned", lr=(1e-2,), seed=5, start=starts / "s2")
    tune(weights, tmp_path / "tuned", lr=(1e-2,), seed=5, start=starts, seeds=2)  # goes on
    assert read_arm(tmp_path / "tuned").unit == "2 x align (2 seeds), 2 x finetune (2 seeds)"
    shutil.copy(aligned / "s2/adapter.safetensors", starts / "s10")
    before = contents(tmp_path)
    for name, start in (("direct", starts), ("tuned", None), ("tuned", aligned / "s10")):
        with pytest.raises(UsageError, match=f"{name}: .*content of --from differs"):
            tune(weights, tmp_path / name, lr=(1e-2,), seed=5, start=start)
    for rates in ((1e-2,), (1e-3, 1e-2)):
        with pytest.raises(UsageError, match=r"lr0.01-s6: .*content of --from differs"):
            tune(weights, tmp_path / "tuned", lr=rates, seed=5, start=starts, seeds=2)
    assert contents(tmp_path) == before


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
    unit = "2 x align (2 seeds), 2 x finetune (2 seeds), 2 x finetune (2 seeds)"
    assert read_arm(again).unit == unit
    assert direct.start_cpu_seconds
    all_before = direct.cpu_seconds + direct.start_cpu_seconds
    assert result.start_cpu_seconds == pytest.approx(all_before)
    of_commands = evaluate([first, again]).arms[1].differs[0]
    assert of_commands[:3] == ("commands", "align, finetune, finetune", "align, finetune")
    # Seeds 0 and 1, then 2 and 3: heads and batches of 0 would come a second time.
    assert [load_adapter(file).info.seeds for file in find_adapters(again)] == [
        [2, 0, 2], [3, 1, 10]
    ]  # fmt: skip
    # from 1: not the seed of the adapter that it would start from, but of the other one
    for start, seed in ((first, 0), (first, 1), (again, 0)):
        with pytest.raises(UsageError, match=r"was fine-tuned with seed [01]"):
            tune(weights, tmp_path / "same", start=start, seed=seed, seeds=2, lr=(1e-2,))


def test_two_align_runs_of_one_seed_are_no_two_seeds(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """As where one of them was made with smaller micro-batches: other bits, the same draws."""
    runs = shutil.copytree(aligned, tmp_path / "runs")
    theta, head, info = load_adapter(runs / "s10/adapter.safetensors")
    same = save_adapter(theta, head, info.model_copy(update={"seed": 2}))
    (runs / "s10/adapter.safetensors").write_bytes(same)
    with pytest.raises(UsageError, match="same seed, 2"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)


# --- other images or another split than align's --------------------------------------------------


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


@pytest.mark.parametrize("how", ["another seed", "other bytes"])
def test_a_start_of_other_data_is_refused_unless_it_is_asked_for(
    how: str, folder: Path, tmp_path: Path
) -> None:
    """Then config.json says so."""
    images = shutil.copytree(folder / "images", tmp_path / "images")
    if how == "other bytes":
        Image.new("RGB", (16, 16), "red").save(images / "x/0.png")
    line = f"finetune {PEFT_STEPS} --dataset folder:{images} --quiet --from {folder}/align"
    line += f" --data-seed {3 if how == 'another seed' else 2}"
    for more in ("", "--dry-run"):
        said = refusal(f"{line} {more} --out {tmp_path}/f")
        assert f"--from {folder}/align/adapter.safetensors" in said and "--other-data" in said
        assert not (tmp_path / "f").exists()
    done(f"{line} --other-data --out {tmp_path}/f")
    assert json.loads((tmp_path / "f/config.json").read_text())["other_data"]


def test_what_align_was_trained_on_is_known_after_fine_tuning_on_other_images(
    weights: Path, folder: Path, tmp_path: Path
) -> None:
    """P, then Q, then P again: the adapter of Q hands on that of P, so both are refused."""
    pictures(tmp_path / "other", "pq", shift=15)
    line = f"{PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    other = f"--dataset folder:{tmp_path}/other"
    done(f"finetune --from {folder}/align {line} {other} --other-data --out {tmp_path}/q")
    adapter = load_adapter(tmp_path / "q/lr0.01-s0/adapter.safetensors")
    aligned = load_adapter(folder / "align/adapter.safetensors").info.trained_on
    assert len(adapter.info.trained_on) == 2 and {*aligned} < {*adapter.info.trained_on}
    for data_of in (other, f"--dataset folder:{folder}/images --data-seed 2"):
        said = refusal(f"finetune --from {tmp_path}/q {line} {data_of} --seed 5 --out {tmp_path}/f")
        assert "--other-data" in said


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


# --- the curve of the test ------------------------------------------------------------------------


def test_a_test_curve_ends_with_the_tested_accuracy_and_changes_no_number(
    weights: Path, tmp_path: Path
) -> None:
    plain = tune(weights, tmp_path / "plain", lr=(1e-2,))
    drawn = tune(weights, tmp_path / "drawn", lr=(1e-2,), test_curve=True)
    assert plain.tests == drawn.tests
    curve = [record["test"] for record in read_records(tmp_path / "drawn/lr0.01-s0")]
    epoch = drawn.trials[0].epoch
    assert len(curve) == 2 and epoch and Score(**curve[epoch - 1]) == drawn.tests[0]
