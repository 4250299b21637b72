"""PEFT: rates, seeds, epochs and starts; directories of two commands; splits that leak."""

import json
import logging
import re
import shutil
import signal
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import quilts
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

import data
import finetune as program
from bisslight import Diverged
from config import FinetuneConfig, Record
from evaluate import evaluate, read_arm
from finetune import best_epoch, choose_rate, finetune
from support import folders
from support.adapters import check_settings, find_adapters, load_adapter, save_adapter
from support.errors import RunError, UsageError
from support.files import sha256
from support.processes import HEARD, Stopped
from support.results import AdapterInfo, FinetuneResult, Score, TrialResult, read_result
from support.runs import Track, untracked
from support.starts import seconds_until

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


def in_memory(**given: Any) -> FinetuneConfig:
    """Settings of a small run on images that a script hands over."""
    steps: Any = {"epochs": 2, "warmup_epochs": 0, "batch": 40, "seeds": 1, "lr": (1e-3,)}
    return FinetuneConfig(backbone="vit_mini", dataset="own", **steps, **given)


def test_labels_in_memory_that_are_changed_while_a_run_is_under_way_change_no_number(
    weights: Path, tmp_path: Path
) -> None:
    task = quilts.quilts(0)[1]
    labels = task.test.targets.clone()
    task = task._replace(test=data.Split(task.test.images, labels))
    cfg = in_memory(weights=weights)
    left_alone = finetune(cfg, tmp_path / "left alone", task=task)

    def change(items: Iterable[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
        """Write other labels once an epoch was trained."""
        for item in items:
            yield item
            labels.fill_(1)

    changed = finetune(cfg, tmp_path / "out", track=change, task=task)
    assert without_time(changed) == without_time(left_alone)


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
    for one, other in zip(
        *(find_adapters(tmp_path / name) for name in ("grown", "whole")), strict=True
    ):
        assert one.read_bytes() == other.read_bytes()


def test_the_time_of_a_rate_that_lost_is_counted(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three seeds of a rate, then a better one: the cost is that of all six trials' results."""
    tune(weights, tmp_path, lr=(1e-3,), seeds=3)
    monkeypatch.setattr(program, "choose_rate", lambda _: 3e-2)
    grown = tune(weights, tmp_path, lr=(1e-3, 3e-2), seeds=3)
    trials = [json.loads(file.read_text()) for file in tmp_path.glob("lr*/result.json")]
    assert len(trials) == 6
    assert grown.cpu_seconds == pytest.approx(sum(trial["cpu_seconds"] for trial in trials))


def test_the_time_of_a_rate_that_diverged_is_counted_after_it_was_left_out(
    weights: Path, tmp_path: Path
) -> None:
    """As the refusal of a single rate that diverged tells to do."""
    with pytest.raises(RunError, match="leave it out of --lr"):
        tune(weights, tmp_path, lr=(1e30,), epochs=1, optimizer="sgd")
    result = tune(weights, tmp_path, lr=(1e-3,), epochs=1, optimizer="sgd")
    trials = [json.loads(file.read_text()) for file in tmp_path.glob("lr*/result.json")]
    assert sorted(trial["lr"] for trial in trials) == [1e-3, 1e30]
    for name, told in (("seconds", result.seconds), ("cpu_seconds", result.cpu_seconds)):
        assert told == pytest.approx(sum(trial[name] for trial in trials))


def test_a_finished_run_is_only_read(
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a disk that cannot be written; the test images are not scored again. It is told."""
    settings: Any = {"lr": (1e-3, 1e-2), "seeds": 2}
    caplog.set_level("INFO", "bisslight")
    result = tune(weights, tmp_path / "run", **settings)
    assert "was finished already" not in caplog.text
    out = (tmp_path / "run").rename(tmp_path / "moved")
    before = contents(out)

    def refuse(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(program, "write_atomic", refuse)
    monkeypatch.setattr(program, "locked", refuse)
    monkeypatch.setattr("support.experiment.Experiment.score", refuse)
    assert tune(weights, out, **settings) == result.model_copy(update={"out": str(out)})
    assert f"{out}: was finished already; this is its result" in caplog.messages
    assert contents(out) == before


def test_a_smaller_command_prints_the_whole_directory_and_replaces_nothing(
    weights: Path, tmp_path: Path
) -> None:
    """Three seeds stay three; another rate is added, tried, and the better one has all seeds."""
    first = tune(weights, tmp_path, lr=(1e-3,), seeds=3)
    config = (tmp_path / "config.json").read_bytes()
    assert not {"lr", "seeds", "grid_seeds"} & json.loads(config).keys()
    before = contents(tmp_path)
    assert tune(weights, tmp_path, lr=(1e-3,), seeds=1) == first
    assert contents(tmp_path) == before
    grown = tune(weights, tmp_path, lr=(3e-2,), seeds=1)
    assert (tmp_path / "config.json").read_bytes() == config
    assert (grown.rates, len(grown.trials)) == ([1e-3, 3e-2], 3)
    whole = tune(weights, tmp_path / "whole", lr=(1e-3, 3e-2), seeds=3)
    assert without_time(grown) == without_time(whole)
    (arm,) = evaluate([tmp_path]).arms
    assert (arm.chain[0]["lr"], len(arm.accuracies)) == ([1e-3, 3e-2], 3)


def test_before_there_is_a_result_a_smaller_command_is_of_its_own_rates_alone(
    weights: Path, tmp_path: Path
) -> None:
    """As after a kill just before result.json: of the other rate's trial, only its time counts."""
    settings: dict[str, Any] = {"epochs": 1}
    whole = tune(weights, tmp_path / "out", lr=(1e-3, 3e-2), **settings)
    (tmp_path / "out/result.json").unlink()
    smaller = tune(weights, tmp_path / "out", lr=(1e-3,), **settings)
    alone = tune(weights, tmp_path / "alone", lr=(1e-3,), **settings)
    assert without_time(smaller) == without_time(alone)
    assert smaller.cpu_seconds == pytest.approx(whole.cpu_seconds)
    again = tune(weights, tmp_path / "out", lr=(1e-3, 3e-2), **settings)
    assert without_time(again) == without_time(whole)


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
    assert FinetuneResult(**json.loads((tmp_path / "out/result.json").read_text()), out="") == (
        result.model_copy(update={"out": ""})
    )


def test_adapters_lie_where_they_were_trained(weights: Path, tmp_path: Path) -> None:
    tune(weights, tmp_path, lr=(1e-3, 3e-2), seeds=2)
    assert not [*tmp_path.glob("*.safetensors")]
    lr = json.loads((tmp_path / "result.json").read_text())["lr"]
    expected = [tmp_path / f"lr{lr}-s{seed}/adapter.safetensors" for seed in (0, 1)]
    assert find_adapters(tmp_path) == expected
    assert find_adapters(expected[1]) == [expected[1]]
    with pytest.raises(UsageError, match=r"result\.json: cannot be read .*; give an adapter of"):
        load_adapter(find_adapters(tmp_path / "result.json")[0])
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
    wrong = [
        f"{file} taken for {'xyz'[guess]}"
        for file, guess in zip(test["files"], test["guesses"], strict=True)
        if Path(file).parent.name != "xyz"[guess]
    ]
    assert confusion.sum() == 9 and [*confusion.sum(1)] == [3, 3, 3]
    assert np.trace(confusion) == result.tests[0].right == 9 - len(wrong)
    printed = capsys.readouterr().out
    assert printed == "\n".join(["['x', 'y', 'z']", str(confusion), *wrong, ""]) and wrong
    of_classes = [result.by_class[name][0] for name in "xyz"]
    assert of_classes == pytest.approx([100 * confusion[k, k] / 3 for k in range(3)])


@pytest.mark.parametrize("content", ["[1]", "null", "{}", "{"])
def test_a_config_that_is_damaged_is_named_with_a_remedy(
    content: str, weights: Path, runs: Path, tmp_path: Path
) -> None:
    """Of what --from names, of what evaluate, predict and export read, of a directory of --out."""
    run = shutil.copytree(runs / "without", tmp_path / "run")
    trial = next(file for file in run.glob("lr*") if (file / "test.json").exists())
    for place in (run, trial):
        (place / "config.json").write_text(content)
    new = f"finetune {PEFT_STEPS} --backbone vit_mini --dataset quilts --weights {weights}"
    lines = {
        f"finetune --from {run} --seed 5 {PEFT_STEPS} --out {tmp_path}/f": run,
        f"evaluate {run}": run,
        f"export {trial}": trial,
        f"predict {trial} {tmp_path}": trial,
        f"{new} --out {run}": run,
    }
    (tmp_path / "a.png").write_bytes(b"")  # predict looks for images first
    for line, place in lines.items():
        said = refusal(line)
        assert str(place) in said and "config.json" in said
        assert "; give a" in said or "finish it with that version" in said


def test_a_pretrain_run_is_no_start_but_weights(weights: Path, tmp_path: Path) -> None:
    said = refusal(f"finetune --from {weights} {PEFT_STEPS} --out {tmp_path}/f")
    assert f"{weights}: " in said


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
    backup = shutil.copytree(tmp_path / "lr0.01-s0", tmp_path / "lr0.01-s0.bak")
    before = contents(tmp_path)
    result = tune(weights, tmp_path, lr=(1e-2,), seeds=2)
    assert [trial.seed for trial in result.trials] == [0, 1]
    assert result.seconds == pytest.approx(sum(trial.seconds for trial in result.trials))
    assert len(find_adapters(tmp_path)) == 2
    assert json.loads((backup / "result.json").read_text())["seed"] == 0
    foreign = ("lr_mine-s0/result.json", "lr0.5-s7/result.json", "adapter-soup.safetensors")
    assert all((tmp_path / name).read_bytes() == before[tmp_path / name] for name in foreign)


# --- rates and epochs -----------------------------------------------------------------------------


def test_epochs_of_all_trials_are_counted_also_those_before_a_stop(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rates with one seed, then the best one with the other: three trials of three epochs.

    The second one diverges; the run is stopped after the second epoch of the third one.
    """
    told: list[str] = []
    caplog.set_level(logging.INFO, "bisslight")
    settings: Any = {"lr": (1e-3, 1e30), "seeds": 2, "epochs": 3, "optimizer": "sgd"}

    def see(items: Iterable[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
        told.append(f"{label} from {done} to {total}")
        for number, item in enumerate(items, done + 1):
            told.append(f"{label} {number}")
            yield item
            if told[-1] == "epochs of all trials 7":
                HEARD.append(signal.SIGTERM)

    with pytest.raises(Stopped):
        tune(weights, tmp_path, track=see, **settings)
    HEARD.clear()
    assert told == [
        "epochs of all trials from 0 to 9",
        "trial 1 of 3, lr 0.001 seed 0 from 0 to 3",
        "trial 1 of 3, lr 0.001 seed 0 1",
        "epochs of all trials 1",
        "trial 1 of 3, lr 0.001 seed 0 2",
        "epochs of all trials 2",
        "trial 1 of 3, lr 0.001 seed 0 3",
        "epochs of all trials 3",
        "epochs of all trials from 3 to 9",
        "trial 2 of 3, lr 1e+30 seed 0 from 0 to 3",
        "epochs of all trials from 6 to 9",  # with the three that the second trial was spared
        "trial 3 of 3, lr 0.001 seed 1 from 0 to 3",
        "trial 3 of 3, lr 0.001 seed 1 1",
        "epochs of all trials 7",
    ]
    told.clear()
    assert "done already" not in caplog.text
    tune(weights, tmp_path, track=see, **settings)
    assert f"{tmp_path}: 2 of 3 trials are done already" in caplog.messages
    assert f"{tmp_path}/lr0.001-s1: goes on after epoch 2" in caplog.messages
    assert told == [
        "epochs of all trials from 8 to 9",
        "trial 3 of 3, lr 0.001 seed 1 from 2 to 3",
        "trial 3 of 3, lr 0.001 seed 1 3",
        "epochs of all trials 9",
        "trials scored on the test images from 0 to 2",
        "trials scored on the test images 1",
        "trials scored on the test images 2",
    ]


def test_a_rate_that_diverges_is_told_recorded_and_not_chosen(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bisslight")
    result = tune(weights, tmp_path / "two", lr=(1e-3, 1e30), epochs=1, optimizer="sgd")
    assert (result.lr, result.tried[1].val) == (1e-3, None)
    (told,) = [text for text in caplog.messages if "diverged" in text]
    assert f"{tmp_path}/two/lr1e+30-s0: diverged (" in told
    with pytest.raises(RunError, match=r"rate 1e\+30, .*; leave it out of --lr"):
        tune(weights, tmp_path / "one", lr=(1e30,), epochs=1, seeds=3, optimizer="sgd")
    assert len([*tmp_path.glob("one/lr*")]) == 1  # the second seed was not begun


def test_a_rate_that_diverges_as_a_directory_grows_cannot_be_left_out_of_it(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory keeps the rates of its result, so the remedy is another directory."""
    tune(weights, tmp_path, lr=(1e-3,), epochs=1)

    def diverge(*_: object) -> None:
        raise Diverged("peft, step 1: loss is not finite")

    monkeypatch.setattr(program, "train_epochs", diverge)
    with pytest.raises(RunError, match=r"rate 0\.001, .*; leave it out of --lr, or give lower"):
        tune(weights, tmp_path, lr=(1e-3,), epochs=1, seeds=2)


def test_the_order_of_rates_decides_nothing(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equally good rates the lowest is taken, and the other order rewrites no file."""
    monkeypatch.setattr(program, "quality", lambda scores: (50.0, -1.0))
    first = tune(weights, tmp_path / "a", lr=(1e-2, 1e-3), epochs=1)
    before = contents(tmp_path / "a")
    assert (first.lr, first.rates) == (1e-3, [1e-3, 1e-2])
    assert tune(weights, tmp_path / "a", lr=(1e-3, 1e-2), epochs=1) == first
    assert contents(tmp_path / "a") == before
    tried = [ended(3e-3, 0, 66, 0.9), ended(1e-2, 0, 66, 0.9)]
    assert choose_rate(tried) == choose_rate(tried[::-1]) == 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("command", ["align", "finetune", "pretrain"])
def test_autocast_of_the_caller_changes_no_number_of_a_command(
    command: str, weights: Path, tmp_path: Path
) -> None:
    """As in a notebook that computes in bfloat16: adapters, weights and scores have equal bits."""
    steps = {
        "align": align_line(weights.parent, "--rank 4 --alternations 1"),
        "finetune": finetune_line(weights.parent, "--rank 4 --epochs 1"),
        "pretrain": "pretrain --backbone vit_mini --pool quilts --epochs 1 --warmup-epochs 0 "
        "--batch 320 --quiet",
    }
    done(f"{steps[command]} --out {tmp_path}/plain")
    with torch.autocast("cpu", torch.bfloat16):
        done(f"{steps[command]} --out {tmp_path}/within")
    plain, within = (
        {file.relative_to(place): content for file, content in contents(place).items()}
        for place in (tmp_path / "plain", tmp_path / "within")
    )
    names = [name for name in plain if name.suffix in (".safetensors", ".pth")]
    names += [name for name in plain if name.name == "test.json"]
    assert names and all(plain[name] == within[name] for name in names)
    for file in [name for name in plain if name.name == "metrics.jsonl"]:
        assert plain[file] == within[file]


def ended(lr: float, seed: int, accuracy: float | None, loss: float = 1.0) -> TrialResult:
    val = None if accuracy is None else Score(accuracy=accuracy, loss=loss)
    return TrialResult(
        lr=lr, seed=seed, val=val, start_sha256=None, start_cpu_seconds=0, cpu_seconds=0, seconds=0
    )


def test_the_loss_decides_where_rates_have_equally_many_right_images() -> None:
    """Of 18 images; the mean of the first ones is larger by rounding alone."""
    first = [ended(1e-3, seed, 100 * right / 18, 1.12) for seed, right in enumerate((0, 0, 3))]
    second = [ended(3e-3, seed, 100 * right / 18, 1.11) for seed, right in enumerate((0, 1, 2))]
    means = [fmean(trial.val.accuracy for trial in of if trial.val) for of in (first, second)]
    assert means[0] > means[1]
    assert choose_rate([*first, *second]) == 3e-3
    worse = [ended(3e-3, seed, 100 * right / 18, 1.13) for seed, right in enumerate((0, 1, 2))]
    assert choose_rate([*first, *worse]) == 1e-3


def test_the_rate_with_the_best_mean_accuracy_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Not that of the best loss, nor of the best seed, nor one that diverged."""
    tried = [
        ended(1e-3, 0, 70, 0.5), ended(1e-3, 1, 60, 0.5),
        ended(3e-3, 0, 66, 0.9), ended(3e-3, 1, 66, 0.9),
        ended(1e-2, 0, 99, 0.1), ended(1e-2, 1, None),
    ]  # fmt: skip
    assert choose_rate(tried) == 3e-3
    assert choose_rate(tried[:4]) == 3e-3  # of two rates, each is the lowest or the highest
    assert "--lr" not in caplog.text
    assert choose_rate([ended(1e-3, 0, 66, 0.9), *tried[2:4]]) == 1e-3  # the first of equal ones
    caplog.clear()
    assert choose_rate([*tried[:4], ended(1e-4, 0, 9)]) == 3e-3  # the highest of three
    assert "0.003, is the highest of --lr: add higher ones" in caplog.text
    caplog.clear()
    assert choose_rate([ended(1e-3, 0, 70), ended(1e-3, 1, 60)]) == 1e-3  # there is no choice
    assert "--lr" not in caplog.text
    assert choose_rate([*tried[:4], ended(3e-2, 0, 9), ended(1e-3, 2, 99)]) == 1e-3  # the lowest
    assert "0.001, is the lowest of --lr: add lower ones" in caplog.text
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
    assert read_arm(tmp_path / "each").unit == "2 x align (2 seeds), 2 x finetune (2 seeds)"
    assert each.start_cpu_seconds == pytest.approx(sum(costs))
    for place in (aligned / "s2", aligned / "s2/adapter.safetensors"):
        one = tune(weights, tmp_path / place.name, start=place, seeds=2, lr=(1e-2,))
        assert read_arm(tmp_path / place.name).unit.startswith("1 x align")
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
    assert read_arm(tmp_path / "two").unit.startswith("1 x align")
    shutil.copytree(aligned / "s10", tmp_path / "a/s2")
    with pytest.raises(UsageError, match="there are 2 starts for 3 seeds, neither"):
        tune(weights, tmp_path / "three", start=tmp_path / "a", seeds=3, lr=(1e-2,))
    runs = shutil.copytree(aligned, tmp_path / "runs")
    done(align_line(weights.parent, f"--seed 11 --rank 4 --lam 2 --out {runs}/s11"))
    with pytest.raises(UsageError, match=r"s11.*differs in more than the seed.*: --lam .*; give"):
        tune(weights, tmp_path / "out", start=runs, seeds=3)
    with pytest.raises(UsageError, match=r"s11.*differs in more than the seed.*: --lam .*; give"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)  # s11 is of none of these
    shutil.rmtree(runs / "s11")
    with pytest.raises(UsageError, match=r"--rank .* is 4, here 8"):
        tune(weights, tmp_path / "out", start=runs, seeds=2, rank=8)
    (runs / "s2" / "adapter.safetensors").unlink()
    with pytest.raises(UsageError, match=r"s2: has no .*/s2/adapter.safetensors"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)
    with pytest.raises(UsageError, match=r"runs: has no .*/runs/adapter.safetensors"):
        find_adapters(runs)  # as `predict` does, of a folder of runs
    assert not (tmp_path / "out").exists()


def test_of_more_adapters_than_seeds_the_first_ones_are_taken_and_told(
    weights: Path, aligned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where all are taken, also for an earlier command, there is nothing to tell."""
    settings: dict[str, Any] = {"start": aligned, "lr": (1e-2,), "epochs": 1}

    def told(seeds: int) -> list[str]:
        caplog.clear()
        tune(weights, tmp_path / "f", seeds=seeds, **settings)
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelname == "WARNING" and record.getMessage().startswith("--from")
        ]

    first = aligned / "s2/adapter.safetensors"
    assert told(1) == [f"--from {aligned}: takes 1 of 2 adapters: {first}"]
    (trial,) = read_result(tmp_path / "f").trials
    assert trial.start_sha256 == sha256(first)
    assert told(2) == told(1) == []


def test_an_adapter_of_ijepas_other_encoder_is_refused() -> None:
    """Both lie in one file, so the digest of the weights is the same."""
    base: Any = {"backbone": "vit_mini", "dataset": "quilts", "pretext": "ijepa", "rank": 4}
    cfg = FinetuneConfig(**base)
    info = AdapterInfo(definition={"command": "align"} | cfg.model_dump(mode="json"))
    check_settings("a", info, cfg)
    with pytest.raises(UsageError, match=r"^a: .*base .* is target_encoder, here encoder"):
        check_settings("a", info, cfg.replace(base="encoder"))


def test_aligned_seeds_never_take_over_a_direct_arms_directory(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """Nor the other way, nor those of another align run; more seeds of the first one go on."""
    out = tmp_path / "direct"
    tune(weights, out, lr=(1e-2,), seeds=2)
    before = contents(out)
    for start in (aligned / "s2", aligned / "s2/adapter.safetensors", aligned):
        with pytest.raises(UsageError, match="is another run: content of --from is another"):
            tune(weights, out, lr=(1e-2,), seeds=2, start=start)
    assert contents(out) == before
    tune(weights, tmp_path / "aligned", lr=(1e-2,), start=aligned / "s2")
    for start in (None, aligned / "s10"):
        with pytest.raises(UsageError, match="is another run"):
            tune(weights, tmp_path / "aligned", lr=(1e-2,), start=start)
    tune(weights, tmp_path / "aligned", lr=(1e-2,), start=aligned, seeds=2)
    assert read_arm(tmp_path / "aligned").unit == "2 x align (2 seeds), 2 x finetune (2 seeds)"


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
    differs = evaluate([first, again]).arms[1].differs
    assert differs["start"] == ("align, finetune, finetune", "align, finetune")
    for seed in (0, 1):  # 1: not that of the adapter it would start from, but of the other one
        with pytest.raises(
            UsageError, match=r"was fine-tuned with seed [01], which this run has, too"
        ):
            tune(weights, tmp_path / "same", start=first, seed=seed, seeds=2, lr=(1e-2,))


def test_a_seed_does_not_come_again_in_a_chain_of_restarts(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """Seeds 0 and 1, then 2 and 3: heads and batches of 0 would come a second time."""
    start = aligned
    for name, seed in (("first", 0), ("second", 2)):
        tune(weights, tmp_path / name, start=start, seed=seed, seeds=2, lr=(1e-2,))
        start = tmp_path / name
    assert load_adapter(find_adapters(start)[1]).info.seeds == [3, 1, 10]
    with pytest.raises(UsageError, match=r"was fine-tuned with seed 0, which this run has, too"):
        tune(weights, tmp_path / "third", start=start, seed=0, seeds=2, lr=(1e-2,))
    tune(weights, tmp_path / "third", start=start, seed=4, seeds=2, lr=(1e-2,))
    third = [load_adapter(file).info.seeds for file in find_adapters(tmp_path / "third")]
    assert third == [[4, 2, 0, 2], [5, 3, 1, 10]]


def test_fine_tunings_that_differ_in_more_than_the_seed_are_no_starts_of_one_arm(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """In epochs, in their own start, or in that of a start before it; evaluate tells it, too."""
    folders = {name: tmp_path / name for name in ("epochs", "aligned", "alike")}
    unlike: dict[str, Record] = {"epochs": {"epochs": 3}, "aligned": {"start": aligned / "s2"}}
    for name, folder in folders.items():
        tune(weights, folder / "a", lr=(1e-2,))
        tune(weights, folder / "b", lr=(1e-2,), seed=1, **unlike.get(name, {}))
    again: dict[str, Any] = {"seed": 5, "seeds": 2, "lr": (1e-2,)}
    for name, told in (("epochs", "--epochs .*"), ("aligned", "the commands")):
        with pytest.raises(UsageError, match=rf"b/\S* differs in more than the seed .*: {told};"):
            tune(weights, tmp_path / "out", start=folders[name], **again)
    tune(weights, tmp_path / "again", start=folders["alike"], **again)
    for name in folders:  # one restart of each
        tune(weights, tmp_path / "chain" / name, start=folders[name] / "b", lr=(1e-2,), seed=7)
    arms = evaluate([tmp_path / "chain" / name for name in ("alike", "epochs", "aligned")]).arms
    assert arms[1].differs == {"start.epochs": ("3", "2")}
    assert arms[2].differs == {"start": ("align, finetune, finetune", "finetune, finetune")}
    with pytest.raises(UsageError, match="no seeds of one arm: --epochs of the run before"):
        read_arm(tmp_path / "chain")
    with pytest.raises(UsageError, match=r"seed from .*: (--epochs|the commands)"):
        tune(weights, tmp_path / "out", start=tmp_path / "chain", seed=9, seeds=2, lr=(1e-2,))


def test_align_runs_with_and_without_bfloat16_are_no_seeds_of_one_arm(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    shutil.copytree(aligned / "s2", tmp_path / "a/s2")
    done(align_line(weights.parent, f"--seed 3 --rank 4 amp=false --out {tmp_path}/a/s3"))
    again: dict[str, Any] = {"start": tmp_path / "a", "seeds": 2, "lr": (1e-2,), "epochs": 1}
    with pytest.raises(UsageError, match=r"s3/\S* differs in more than the seed from \S*: amp "):
        tune(weights, tmp_path / "f", **again)


def with_info(run: Path, **changes: Any) -> None:
    """Change what the adapter of a run says of itself."""
    file = run / "adapter.safetensors"
    theta, head, info = load_adapter(file)
    file.write_bytes(save_adapter(theta, head, info.model_copy(update=changes)))


def test_two_align_runs_of_one_seed_are_no_two_seeds(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """As where one of them was made with smaller micro-batches: other bits, the same draws."""
    runs = shutil.copytree(aligned, tmp_path / "runs")
    with_info(runs / "s10", seed=2)
    with pytest.raises(UsageError, match=r"two starts have the same seed, 2; remove"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)


def test_two_fine_tunings_of_the_same_seeds_are_one(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """As with other micro-batches; after two align runs, equal seeds of PEFT are two, though."""
    for name, changes in (("a", {}), ("b", {"micro_batch": 7})):
        tune(weights, tmp_path / "direct" / name, lr=(1e-2,), **changes)  # type: ignore[arg-type]
    restart: Record = {"seed": 100, "seeds": 2, "lr": (1e-2,)}
    with pytest.raises(UsageError, match="two starts have the same seed, 0; remove"):
        tune(weights, tmp_path / "restart", start=tmp_path / "direct", **restart)
    for name in ("s2", "s10"):
        tune(weights, tmp_path / "tuned" / name, lr=(1e-2,), start=aligned / name)
    result = tune(weights, tmp_path / "restart", start=tmp_path / "tuned", **restart)
    assert [trial.start_seeds for trial in result.trials] == [[0, 2], [0, 10]]


def test_the_seconds_before_a_restart_are_counted_once_where_the_earlier_run_has_grown(
    weights: Path, tmp_path: Path
) -> None:
    """All seeds of the earlier run are restarted, so all its seconds count, and no more."""
    settings: dict[str, Any] = {"lr": (1e-2,), "epochs": 1}
    restart: dict[str, Any] = settings | {"start": tmp_path / "first", "seed": 100}
    first = tune(weights, tmp_path / "first", seeds=2, **settings)
    again = tune(weights, tmp_path / "again", seeds=1, **restart)
    assert again.start_cpu_seconds == pytest.approx(first.cpu_seconds / 2)
    first = tune(weights, tmp_path / "first", seeds=3, **settings)
    again = tune(weights, tmp_path / "again", seeds=3, **restart)
    assert again.start_cpu_seconds == pytest.approx(first.cpu_seconds)
    assert read_arm(tmp_path / "again").start_cpu_seconds == again.start_cpu_seconds


def test_an_align_run_inside_of_a_finetune_run_has_its_own_seconds(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    tune(weights, tmp_path / "run", lr=(1e-2,))
    inside = shutil.copytree(aligned / "s2", tmp_path / "run/aligned")
    own = json.loads((inside / "result.json").read_text())["cpu_seconds"]
    assert seconds_until(inside / "adapter.safetensors") == own


def test_align_runs_may_have_read_copies_of_the_same_images(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """Each computer its own; another pool is another arm, and another version is told."""
    runs = shutil.copytree(aligned, tmp_path / "runs")
    said = load_adapter(runs / "s10/adapter.safetensors").info.definition
    moved = {"pool": "folder:/scratch1/pool", "versions": "bisslight 0.1, torch 1"}
    with_info(runs / "s10", definition=said | moved)
    result = tune(weights, tmp_path / "out", start=runs, seeds=2, lr=(1e-2,))
    assert [trial.start_seeds for trial in result.trials] == [[2], [10]]
    with_info(runs / "s10", definition=said | {"pool_sha256": "another"})
    with pytest.raises(UsageError, match=r"differs in more .*: content of --pool; give runs that"):
        tune(weights, tmp_path / "other", start=runs, seeds=2, lr=(1e-2,))


@pytest.mark.parametrize("damage", ["empty", "cut", "whole numbers", "flat", "fewer layers"])
def test_a_damaged_adapter_is_told_in_a_line(
    damage: str, weights: Path, aligned: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(aligned / "s2", tmp_path / "run")
    file = run / "adapter.safetensors"
    theta, head, info = load_adapter(file)
    changed = {"whole numbers": theta.int(), "flat": theta.flatten(), "fewer layers": theta[1:]}
    content = save_adapter(changed.get(damage, theta), head, info)
    file.write_bytes({"empty": b"", "cut": content[:-9]}.get(damage, content))
    line = f"finetune --from {run} {PEFT_STEPS} --weights {weights} --quiet --out {tmp_path}/f"
    said = refusal(line)
    assert str(file) in said and not (tmp_path / "f").exists()
    if damage == "fewer layers":
        assert "has a θ of (3, " in said
    else:
        assert str(file) in refusal(f"{line} --dry-run")


def test_a_bfloat16_adapter_is_trained_in_float32(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(aligned / "s2", tmp_path / "run")
    theta, head, info = load_adapter(run / "adapter.safetensors")
    (run / "adapter.safetensors").write_bytes(save_adapter(theta.bfloat16(), head, info))
    tune(weights, tmp_path / "f", start=run, lr=(1e-2,))
    assert tensors(tmp_path / "f", 0)["theta"].dtype == torch.float32


# --- other images or another split than align's --------------------------------------------------


def pictures(root: Path, classes: str, shift: int = 0, ending: str = "png") -> None:
    """Class folders of 15 plain 16-pixel images each."""
    for k, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(shift, 15 + shift):
            Image.new("RGB", (16, 16), (40 * k, 9 * i, 100)).save(root / name / f"{i}.{ending}")


@pytest.fixture(scope="module")
def folder(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `align` on a folder of images, and that folder, `images`."""
    place = tmp_path_factory.mktemp("folder")
    pictures(place / "images", "xyz")
    line = f"align --backbone vit_mini --weights {weights} {ALIGN_STEPS} --pool quilts"
    done(f"{line} --data-seed 2 --dataset folder:{place}/images --quiet --out {place}/align")
    return place


@pytest.mark.parametrize("how", ["another seed", "other bytes", "one more", "one less"])
def test_a_start_of_other_data_is_refused_unless_it_is_asked_for(
    how: str, weights: Path, folder: Path, tmp_path: Path
) -> None:
    """Then config.json, result and comparison say so."""
    images = shutil.copytree(folder / "images", tmp_path / "images")
    if how == "other bytes":
        Image.new("RGB", (16, 16), "red").save(images / "x/0.png")
    elif how == "one more":
        Image.new("RGB", (16, 16), "red").save(images / "x/99.png")
    elif how == "one less":
        (images / "x/0.png").unlink()
    line = f"finetune {PEFT_STEPS} --dataset folder:{images} --quiet --from {folder}/align"
    line += f" --data-seed {3 if how == 'another seed' else 2}"
    for more in ("", "--dry-run"):
        said = refusal(f"{line} {more} --out {tmp_path}/f")
        assert f"--from {folder}/align/adapter.safetensors" in said and "--other-data" in said
        assert not (tmp_path / "f").exists()
    done(f"{line} --other-data --out {tmp_path}/f")
    config = json.loads((tmp_path / "f/config.json").read_text())
    assert config["other_data"]
    direct = f"finetune {PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    direct += f" --dataset folder:{images} --data-seed {config['data_seed']}"
    done(f"{direct} --out {tmp_path}/direct")
    assert "other_data" in evaluate([tmp_path / "f", tmp_path / "direct"]).arms[1].differs


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


def test_files_that_change_places_are_other_data_although_names_and_sizes_are_as_before(
    weights: Path, tmp_path: Path
) -> None:
    """A test image and one for training."""
    pictures(tmp_path / "images", "xy", ending="bmp")
    line = f"align --backbone vit_mini --weights {weights} {ALIGN_STEPS} --pool quilts"
    line += f" --dataset folder:{tmp_path}/images --quiet"
    done(f"{line} --out {tmp_path}/arm/s0")
    task = folders.folder(tmp_path / "images", 0)
    tested, trained = (Path(part.images[-1]) for part in (task.test, task.train))
    before = tested.read_bytes()
    tested.write_bytes(trained.read_bytes())
    trained.write_bytes(before)
    done(f"{line} --seed 1 --out {tmp_path}/arm/s1")
    tuning = f"finetune {PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    tuning += f" --dataset folder:{tmp_path}/images --out {tmp_path}/f"
    said = refusal(f"{tuning} --from {tmp_path}/arm --seeds 2")
    assert "arm/s1/adapter.safetensors: differs in more than the seed from" in said
    assert "--other-data" in refusal(f"{tuning} --from {tmp_path}/arm/s0")
    done(f"{tuning} --from {tmp_path}/arm/s1")


def test_images_in_memory_are_known_by_their_pixels(weights: Path, tmp_path: Path) -> None:
    """The same ones in other parts, or another label, are other data."""
    image = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(40) % 2

    def part(*numbers: int) -> data.Split:
        return data.Split(image[[*numbers]], labels[[*numbers]])

    first = data.Task("own", part(*range(20)), part(*range(20, 24)), part(24, 25), ["a", "b"])
    settings: Any = {"backbone": "vit_mini", "dataset": "own", "weights": weights, "rank": 4}
    settings |= {"epochs": 1, "warmup_epochs": 0, "batch": 20, "seeds": 1, "lr": (1e-3,)}
    finetune(FinetuneConfig(**settings), tmp_path / "first", task=first)
    again = FinetuneConfig(**settings | {"start": tmp_path / "first", "seed": 1})
    for other in (
        first._replace(test=part(30, 31)),
        first._replace(train=data.Split(first.train.images, 1 - first.train.targets)),
    ):
        with pytest.raises(UsageError, match="--other-data"):
            finetune(again, tmp_path / "other", task=other)
    finetune(again, tmp_path / "same", task=first)


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
    pictures(tmp_path / "other", "pq", shift=15)  # no picture of the first
    line = f"finetune --from {folder}/align {PEFT_STEPS} --dataset folder:{tmp_path}/other"
    done(f"{line} --other-data --quiet --out {tmp_path}/f")
    origin = json.loads((tmp_path / "f/result.json").read_text())["origin"]
    of_align = json.loads((folder / "align/config.json").read_text())
    assert origin["definition"]["data_sha256"] == of_align["data_sha256"]
    unlike = {"alternations": 3, "lower_steps": 2}
    assert unlike.items() <= origin["definition"].items()


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
