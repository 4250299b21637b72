"""PEFT: rates, seeds, epochs and starts; directories of two commands; splits that leak."""

import hashlib
import json
import logging
import re
import shutil
import signal
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import quilts
import torch
from conftest import fixture
from copies import make
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
    photos_in,
    read_records,
    refusal,
    run,
)

import data
import finetune as program
from bisslight import Diverged
from config import FinetuneConfig, Record
from evaluate import evaluate, read_arm
from extras.export import describe_training
from finetune import best_epoch, choose_rate, finetune
from support.adapters import (
    count_training_images,
    find_adapters,
    know_chosen_images,
    know_training_images,
    load_adapter,
    name_images,
    save_adapter,
    with_seen,
)
from support.benchmarks import BENCHMARKS, open_task
from support.errors import RunError, UsageError
from support.files import sha256
from support.processes import HEARD, Stopped
from support.results import AdapterInfo, FinetuneResult, Score, TrialResult, read_result
from support.runs import Track, untracked
from support.starts import (
    Start,
    check_settings,
    check_unseen,
    doubt_validation,
    doubt_what_is_missing,
    find_seen,
    seconds_until,
)

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


@pytest.mark.parametrize("most", [data.MOST_CONTENTS, 0])  # 0: few files are read, as of very many
def test_test_images_that_are_replaced_while_a_run_is_under_way_are_not_scored(
    most: int, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back, the same command ends with the numbers of a run that was left alone."""
    monkeypatch.setattr(data, "MOST_CONTENTS", most)
    images = [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(10)]
    photos_in(tmp_path / "photos", images)
    cfg = FinetuneConfig(
        backbone="vit_mini",
        weights=weights,
        dataset=f"folder:{tmp_path}/photos",
        epochs=2,
        warmup_epochs=0,
        batch=4,
        seeds=1,
        lr=(1e-3,),
    )
    left_alone = finetune(cfg, tmp_path / "left alone")
    first = Path(data.folder(tmp_path / "photos", 0).test.images[0])
    before = first.read_bytes()

    def replace(items: Iterable[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
        """Replace the image once an epoch was trained."""
        for item in items:
            yield item
            photos_in(first.parent, [first.name], seed=1)

    named = f"such as {first}, " if most else ""
    out = tmp_path / "out"
    with pytest.raises(RunError, match=f"images of test were changed .*{named}.*put them back"):
        finetune(cfg, out, track=replace)
    assert not [*out.glob("*/test.json")] and not (out / "result.json").exists()
    first.write_bytes(before)
    assert without_time(finetune(cfg, out)) == without_time(left_alone)


def in_memory(**given: Any) -> FinetuneConfig:
    """Settings of a small run on images that a script hands over."""
    steps: Any = {"epochs": 2, "warmup_epochs": 0, "batch": 40, "seeds": 1, "lr": (1e-3,)}
    return FinetuneConfig(backbone="vit_mini", dataset="own", **steps, **given)


def test_images_in_memory_that_are_changed_while_a_run_is_under_way_are_not_scored(
    weights: Path, tmp_path: Path
) -> None:
    """They are mapped from a file. Put back, the same command ends with the numbers of before."""
    task = quilts.quilts(0)[1]
    before = torch.as_tensor(task.test.images).numpy().copy()
    np.save(tmp_path / "test.npy", before)
    mapped = np.load(tmp_path / "test.npy", mmap_mode="r+")
    task = task._replace(test=data.Split(torch.from_numpy(mapped), task.test.targets))
    cfg = in_memory(weights=weights)
    left_alone = finetune(cfg, tmp_path / "left alone", task=task)

    def change(items: Iterable[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
        """Write the images in another order once an epoch was trained."""
        for item in items:
            yield item
            mapped[:] = before[::-1]

    out = tmp_path / "out"
    with pytest.raises(RunError, match=r"images of test were changed .* put them back"):
        finetune(cfg, out, track=change, task=task)
    assert not [*out.glob("*/test.json")] and not (out / "result.json").exists()
    mapped[:] = before
    assert without_time(finetune(cfg, out, task=task)) == without_time(left_alone)


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


def test_files_of_a_trial_that_are_copied_over_anothers_are_refused(
    weights: Path, tmp_path: Path
) -> None:
    """As it is told, one file or directory is to be removed; then the numbers are as before."""
    settings: dict[str, Any] = {"lr": (1e-2,), "seeds": 2, "epochs": 1}
    first = tune(weights, tmp_path, **settings)
    own, other = tmp_path / "lr0.01-s0", tmp_path / "lr0.01-s1"
    shutil.copy(other / "test.json", own)
    with pytest.raises(
        UsageError, match=r"s0/test\.json: .*another adapter.*; remove it, and the "
    ):
        tune(weights, tmp_path, **settings)
    (own / "test.json").unlink()
    assert tune(weights, tmp_path, **settings) == first
    kept = (own / "adapter.safetensors").read_bytes()
    shutil.copy(other / "adapter.safetensors", own)
    for place in (tmp_path, own, own / "adapter.safetensors"):  # of `--from`, predict, export
        with pytest.raises(UsageError, match=r"s0/adapter\.safetensors: is not the adapter that"):
            find_adapters(place)
    (own / "adapter.safetensors").write_bytes(kept)
    shutil.copy(other / "result.json", own)
    with pytest.raises(UsageError, match=r"s0/result\.json: is of lr0\.01-s1; remove \S*s0, and"):
        tune(weights, tmp_path, **settings)
    shutil.rmtree(own)
    assert without_time(tune(weights, tmp_path, **settings)) == without_time(first)


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
    monkeypatch.setattr(program.Experiment, "score", refuse)
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
    assert (arm.settings["lr"], len(arm.accuracies)) == ([1e-3, 3e-2], 3)


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


def test_adapters_lie_where_they_were_trained_also_those_of_an_older_version(
    weights: Path, tmp_path: Path
) -> None:
    """Older versions put copies beside result.json, some of them of no result any more."""
    tune(weights, tmp_path, lr=(1e-3, 3e-2), seeds=2)
    assert not [*tmp_path.glob("*.safetensors")]
    lr = json.loads((tmp_path / "result.json").read_text())["lr"]
    expected = [tmp_path / f"lr{lr}-s{seed}/adapter.safetensors" for seed in (0, 1)]
    assert find_adapters(tmp_path) == expected
    assert find_adapters(expected[1]) == [expected[1]]
    copy = tmp_path / "adapter-s0.safetensors"
    shutil.copy(expected[0], copy)
    assert find_adapters(tmp_path) == expected
    with pytest.raises(UsageError, match="is a copy of an older version; give"):
        find_adapters(copy)
    with pytest.raises(UsageError, match=r"result\.json: cannot be read .*; give an adapter of"):
        load_adapter(find_adapters(tmp_path / "result.json")[0])
    expected[1].unlink()
    with pytest.raises(UsageError, match=r"s1/adapter\.safetensors is missing"):
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


def test_a_test_file_that_contradicts_itself_is_refused_with_what_makes_it_anew(
    weights: Path, tmp_path: Path
) -> None:
    tune(weights, tmp_path, lr=(1e-2,))
    file = tmp_path / "lr0.01-s0/test.json"
    whole = json.loads(file.read_text())
    label, guess = whole["labels"][0], whole["guesses"][0]
    other = label if guess != label else label + 1  # one more is right, or one less
    wrong = whole | {"guesses": [other, *whole["guesses"][1:]]}
    damaged: dict[str, Any] = {
        "accuracy: is missing": {},
        "no values by name": [1],
        "'classes'": {name: whole[name] for name in whole if name != "classes"},
        "shorter": whole | {"guesses": whole["guesses"][1:]},
        "not those of the test images": whole | {"labels": [0]},
        "are not 99.0 %": whole | {"accuracy": 99.0},
        "of its guesses are right": wrong,
    }
    for said, content in damaged.items():
        file.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=f"{file}: .*{said}.*; remove it, and the same"):
            tune(weights, tmp_path, lr=(1e-2,))
    file.unlink()
    tune(weights, tmp_path, lr=(1e-2,))
    assert json.loads(file.read_text()) == whole


def test_a_test_file_names_the_images_where_they_are_now(weights: Path, tmp_path: Path) -> None:
    """Images move, then a seed is added: the guide's lines open all files of both seeds."""
    pictures(tmp_path / "images", "xyz")
    settings: dict[str, Any] = {"lr": (1e-3,), "batch": 9, "epochs": 1}
    tune(weights, tmp_path / "f", dataset=f"folder:{tmp_path}/images", **settings)
    (tmp_path / "images").rename(tmp_path / "moved")
    tune(weights, tmp_path / "f", dataset=f"folder:{tmp_path}/moved", seeds=2, **settings)
    tests = [json.loads((tmp_path / f"f/lr0.001-s{k}/test.json").read_text()) for k in (0, 1)]
    assert tests[0]["files"] == tests[1]["files"]
    assert len(tests[0]["files"]) == 9 and all(Path(file).exists() for file in tests[0]["files"])


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
        assert str(place) in said and "config.json" in said and "; give a" in said


def test_a_pretrain_run_is_no_start_but_weights(weights: Path, tmp_path: Path) -> None:
    said = refusal(f"finetune --from {weights} {PEFT_STEPS} --out {tmp_path}/f")
    assert "is a pretrain run" in said


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
    with pytest.raises(RunError, match=r"rate 0\.001, .*; give lower ones and another --out$"):
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
    file = tmp_path / "a/result.json"  # an older version kept the order that was given
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rates": [1e-2, 1e-3]}))
    assert tune(weights, tmp_path / "a", lr=(1e-2,), epochs=1) == first
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
    assert read_arm(tmp_path / "each").unit == "align run and PEFT"
    assert each.start_cpu_seconds == pytest.approx(sum(costs))
    for place in (aligned / "s2", aligned / "s2/adapter.safetensors"):
        one = tune(weights, tmp_path / place.name, start=place, seeds=2, lr=(1e-2,))
        assert read_arm(tmp_path / place.name).unit == "PEFT from one adapter"
        assert one.start_cpu_seconds == pytest.approx(costs[0])
        (digest,) = {trial.start_sha256 for trial in one.trials}
        assert digest == sha256(aligned / "s2/adapter.safetensors")
    with pytest.raises(UsageError, match="has 2 adapters, --seeds is 3"):
        tune(weights, tmp_path / "three", start=aligned, seeds=3)
    shutil.copy(aligned / "s2/adapter.safetensors", tmp_path / "moved.safetensors")
    (tmp_path / "result.json").write_text('{"accuracy": 3}')  # of something else
    moved = tune(weights, tmp_path / "unknown", start=tmp_path / "moved.safetensors", lr=(1e-2,))
    assert moved.start_cpu_seconds is None


def test_a_start_that_is_replaced_while_a_run_is_under_way_is_not_trained_from(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """Put back, the same command ends with the numbers of a run that was left alone."""
    left_alone = tune(weights, tmp_path / "alone", start=aligned / "s2", seeds=2, lr=(1e-2,))
    start = shutil.copytree(aligned / "s2", tmp_path / "start")
    settings: Record = {"start": start, "seeds": 2, "lr": (1e-2,)}

    def replace(items: Iterable[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
        """Put another align run in the place of the start once an epoch was trained."""
        for item in items:
            yield item
            shutil.copytree(aligned / "s10", start, dirs_exist_ok=True)

    file = start / "adapter.safetensors"
    with pytest.raises(RunError, match=f"{file} was changed since this run began, .* put it back"):
        tune(weights, tmp_path / "out", track=replace, **settings)
    assert not (tmp_path / "out/lr0.01-s1/adapter.safetensors").exists()
    assert not (tmp_path / "out/result.json").exists()
    shutil.copytree(aligned / "s2", start, dirs_exist_ok=True)
    assert without_time(tune(weights, tmp_path / "out", **settings)) == without_time(left_alone)


def test_a_start_that_is_replaced_while_images_are_read_is_not_trained_from(
    weights: Path, folder: Path, tmp_path: Path
) -> None:
    start = shutil.copytree(folder / "align", tmp_path / "start") / "adapter.safetensors"

    def replace(items: Iterable[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
        """Write another θ into the start once an image was read."""
        for item in items:
            yield item
            theta, head, info = load_adapter(folder / "align/adapter.safetensors")
            start.write_bytes(save_adapter(theta + 1, head, info))

    cfg = FinetuneConfig.from_align(start, epochs=2, warmup_epochs=0, batch=8, seeds=1, lr=(1e-2,))
    with pytest.raises(RunError, match=f"{start} was changed since this run began"):
        finetune(cfg, tmp_path / "out", reading=replace)
    assert not [*(tmp_path / "out").glob("lr*")]


def test_adapters_that_do_not_fit_are_refused(weights: Path, aligned: Path, tmp_path: Path) -> None:
    """Copied, of other settings than the first one's, of another rank, of an unfinished run."""
    shutil.copytree(aligned / "s2", tmp_path / "a/s0")
    shutil.copytree(aligned / "s2", tmp_path / "a/s1")
    tune(weights, tmp_path / "two", start=tmp_path / "a", seeds=2, lr=(1e-2,))
    assert read_arm(tmp_path / "two").unit == "PEFT from one adapter"
    shutil.copytree(aligned / "s10", tmp_path / "a/s2")
    with pytest.raises(UsageError, match="twice"):
        tune(weights, tmp_path / "three", start=tmp_path / "a", seeds=3, lr=(1e-2,))
    runs = shutil.copytree(aligned, tmp_path / "runs")
    done(align_line(weights.parent, f"--seed 11 --rank 4 --lam 2 --out {runs}/s11"))
    with pytest.raises(UsageError, match=r"s11.*differs in more than the seed.*: lam; give"):
        tune(weights, tmp_path / "out", start=runs, seeds=3)
    with pytest.raises(UsageError, match=r"s11.*differs in more than the seed.*: lam; give"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)  # s11 is of none of these
    shutil.rmtree(runs / "s11")
    with pytest.raises(UsageError, match="has rank 4, this run 8"):
        tune(weights, tmp_path / "out", start=runs, seeds=2, rank=8)
    (runs / "s2" / "adapter.safetensors").unlink()
    with pytest.raises(UsageError, match=r"s2: is no finished .* its own command goes on with it"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)
    (runs / "s2" / "config.json").write_text('{"command": "pretrain"}')
    with pytest.raises(UsageError, match=r"s2: is a pretrain run, which has no adapter; give al"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)
    (runs / "s2" / "config.json").unlink()
    (runs / "s2" / "result.json").unlink()
    with pytest.raises(UsageError, match=r"s2: is no finished align or finetune run; give one"):
        tune(weights, tmp_path / "out", start=runs / "s2", rank=4)
    with pytest.raises(UsageError, match=r"is no finished .*; give a run in it, such as .*/s10$"):
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
    start = Start(Path("a"), info=AdapterInfo(base="target_encoder"))
    check_settings(start, FinetuneConfig(**base))
    with pytest.raises(UsageError, match="a: has base target_encoder, this run encoder"):
        check_settings(start, FinetuneConfig(**base, base="encoder"))


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
    assert read_arm(again).unit == "align run, PEFT and PEFT anew"
    assert direct.start_cpu_seconds
    all_before = direct.cpu_seconds + direct.start_cpu_seconds
    assert result.start_cpu_seconds == pytest.approx(all_before)
    differs = evaluate([first, again]).arms[1].differs
    of_aligned = "restarted from an earlier fine-tuning, which was aligned with M-FAC"
    assert differs["origin"] == (of_aligned, "aligned with M-FAC")
    for seed in (0, 1):  # 1: not that of the adapter it would start from, but of the other one
        with pytest.raises(UsageError, match=r"is of seed [01], which this run has, too"):
            tune(weights, tmp_path / "same", start=first, seed=seed, seeds=2, lr=(1e-2,))


def test_a_seed_does_not_come_again_in_a_chain_of_restarts(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """Seeds 0 and 1, then 2 and 3: heads and batches of 0 would come a second time."""
    start = aligned
    for name, seed in (("first", 0), ("second", 2)):
        tune(weights, tmp_path / name, start=start, seed=seed, seeds=2, lr=(1e-2,))
        start = tmp_path / name
    assert load_adapter(find_adapters(start)[1]).info.earlier_seeds == [1]
    with pytest.raises(UsageError, match=r"comes from a run of seed 0, which this run has, too"):
        tune(weights, tmp_path / "third", start=start, seed=0, seeds=2, lr=(1e-2,))
    tune(weights, tmp_path / "third", start=start, seed=4, seeds=2, lr=(1e-2,))
    third = [load_adapter(file).info.earlier_seeds for file in find_adapters(tmp_path / "third")]
    assert third == [[0, 2], [1, 3]]


def test_fine_tunings_that_differ_in_more_than_the_seed_are_no_starts_of_one_arm(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """In epochs, in their own start, or in that of a start before it; evaluate tells it in words.

    Adapters of an older version do not say it, and are not refused for that.
    """
    folders = {name: tmp_path / name for name in ("epochs", "aligned", "alike")}
    unlike: dict[str, Record] = {"epochs": {"epochs": 3}, "aligned": {"start": aligned / "s2"}}
    for name, folder in folders.items():
        tune(weights, folder / "a", lr=(1e-2,))
        tune(weights, folder / "b", lr=(1e-2,), seed=1, **unlike.get(name, {}))
    again: dict[str, Any] = {"seed": 5, "seeds": 2, "lr": (1e-2,)}
    for name, told in (("epochs", "epochs"), ("aligned", "stage of its start")):
        with pytest.raises(UsageError, match=rf"b/\S* differs in more than the seed .*: {told};"):
            tune(weights, tmp_path / "out", start=folders[name], **again)
    tune(weights, tmp_path / "again", start=folders["alike"], **again)
    for name in folders:  # one restart of each
        tune(weights, tmp_path / "chain" / name, start=folders[name] / "b", lr=(1e-2,), seed=7)
    arms = evaluate([tmp_path / "chain" / name for name in ("alike", "epochs", "aligned")]).arms
    assert arms[1].differs == {"start_epochs": ("its start: 3 epochs", "its start: 2 epochs")}
    there = ("its start: aligned with M-FAC", "its start: not aligned")
    assert arms[2].differs == {"start_origin": there}
    with pytest.raises(UsageError, match="no seeds of one arm: its start: "):
        read_arm(tmp_path / "chain")
    with pytest.raises(UsageError, match=r"seed from .*: (epochs|stage of its start) of its "):
        tune(weights, tmp_path / "out", start=tmp_path / "chain", seed=9, seeds=2, lr=(1e-2,))
    for name in ("epochs", "alike"):
        with_info(folders[name] / "b/lr0.01-s1", origin=None, unlike_paper={})
    for name in ("epochs", "alike"):
        tune(weights, tmp_path / "old" / name, start=folders[name], **again)


def test_align_runs_with_and_without_bfloat16_are_no_seeds_of_one_arm(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """An adapter of an older version does not say how it was computed, and is read as with it."""
    shutil.copytree(aligned / "s2", tmp_path / "a/s2")
    done(align_line(weights.parent, f"--seed 3 --rank 4 amp=false --out {tmp_path}/a/s3"))
    again: dict[str, Any] = {"start": tmp_path / "a", "seeds": 2, "lr": (1e-2,), "epochs": 1}
    with pytest.raises(UsageError, match=r"s3/\S* differs in more than the seed from \S*: amp; "):
        tune(weights, tmp_path / "f", **again)
    said = load_adapter(tmp_path / "a/s3/adapter.safetensors").info.unlike_paper
    assert said.pop("amp") is False
    with_info(tmp_path / "a/s3", unlike_paper=said)
    tune(weights, tmp_path / "f", **again)


@pytest.mark.parametrize("instead", ["gone", "of align", "of another rate", "damaged"])
def test_an_untested_trial_whose_adapter_is_not_its_own_is_to_be_removed(
    instead: str, weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """As it is told, the same command then trains it again, to the same numbers.

    A trial of an older version says no digest of its adapter, but its rate and seed.
    """
    settings: dict[str, Any] = {"lr": (1e-2,), "seeds": 1}
    first = tune(weights, tmp_path / "f", **settings)
    tune(weights, tmp_path / "other", lr=(1e-3,), seeds=1)
    trial = tmp_path / "f/lr0.01-s0"
    file = trial / "adapter.safetensors"
    (trial / "test.json").unlink()
    file.unlink()
    said = json.loads((trial / "result.json").read_text())
    del said["adapter_sha256"]
    (trial / "result.json").write_text(json.dumps(said))
    if instead == "of align":
        shutil.copy(aligned / "s2/adapter.safetensors", file)
    elif instead == "of another rate":
        shutil.copy(tmp_path / "other/lr0.001-s0/adapter.safetensors", file)
    elif instead == "damaged":
        file.write_bytes(b"damaged")
    with pytest.raises(UsageError, match=f"^{file}: .*; remove {trial}, and the same command"):
        tune(weights, tmp_path / "f", **settings)
    shutil.rmtree(trial)
    assert without_time(tune(weights, tmp_path / "f", **settings)) == without_time(first)


@pytest.mark.parametrize("is_tested", [False, True])
def test_an_adapter_of_other_settings_with_the_trials_rate_and_seed_is_refused(
    is_tested: bool, weights: Path, tmp_path: Path
) -> None:
    """As of a longer run; as it is told, the same command then comes to the same numbers again."""
    settings: dict[str, Any] = {"lr": (1e-2,), "epochs": 1}
    first = tune(weights, tmp_path / "short", **settings)
    tune(weights, tmp_path / "long", lr=(1e-2,), epochs=2)
    trial, other = (tmp_path / name / "lr0.01-s0" for name in ("short", "long"))
    assert first.trials[0].adapter_sha256 == sha256(trial / "adapter.safetensors")
    shutil.copy(other / "adapter.safetensors", trial)
    if is_tested:
        shutil.copy(other / "test.json", trial)
    else:
        (trial / "test.json").unlink()
    with pytest.raises(UsageError, match=rf"is not the adapter .* with; remove {trial}, and the "):
        tune(weights, tmp_path / "short", **settings)
    shutil.copy(other / "result.json", trial)  # with all that it ended with
    with pytest.raises(UsageError, match=rf"is of another run \(unlike_paper\); remove {trial}, "):
        tune(weights, tmp_path / "short", **settings)
    shutil.rmtree(trial)
    assert without_time(tune(weights, tmp_path / "short", **settings)) == without_time(first)


def test_a_transfer_between_data_sets_of_two_names_is_not_doubted(tmp_path: Path) -> None:
    steps = f"{ALIGN_STEPS} --probe-epochs 0 --alternations 1 --warmup 0"
    done(f"align --backbone vit_mini --dataset omniglot:Greek {steps} --quiet --out {tmp_path}/a")
    line = f"finetune --from {tmp_path}/a --dataset omniglot:Latin {PEFT_STEPS} --quiet"
    outcome = run(f"{line} --out {tmp_path}/f")
    assert (outcome.code, outcome.err) == (0, "")


def test_a_folder_called_imagenet_holds_images_of_ones_own(
    weights: Path, folder: Path, tmp_path: Path
) -> None:
    """Under its name as in a folder, renamed and converted images are told to be unknown."""
    for root, number, ending in (("one", "{}", "png"), ("two", "again-{}", "jpg")):
        for file in (folder / "images").rglob("*.png"):
            copy = tmp_path / root / "imagenet/train" / file.parent.name
            copy.mkdir(parents=True, exist_ok=True)
            Image.open(file).save(copy / f"{number.format(file.stem)}.{ending}")
    line = f"finetune {PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    line += " --dataset imagenet"
    done(f"{line} --data-root {tmp_path}/one --out {tmp_path}/first")
    more = f"--data-root {tmp_path}/two --from {tmp_path}/first --seed 5"
    outcome = run(f"{line} {more} --out {tmp_path}/second")
    assert outcome.code == 0
    assert "no image here has the name or content of one that θ was trained on" in outcome.err


def with_info(run: Path, **changes: Any) -> None:
    """Change what the adapter of a run says of itself, as in a version without its digest."""
    for result in (run / "result.json", run.parent / "result.json"):
        if result.exists():
            content = json.loads(result.read_text())
            for trial in [content, *content.get("trials", []), *content.get("tried", [])]:
                trial.pop("adapter_sha256", None)
            result.write_text(json.dumps(content))
    file = run / "adapter.safetensors"
    theta, head, info = load_adapter(file)
    file.write_bytes(save_adapter(theta, head, info.model_copy(update=changes)))


def test_an_adapter_that_does_not_say_where_its_images_lay_is_a_seed_of_the_same_arm(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(aligned, tmp_path / "runs")
    file = runs / "s10/adapter.safetensors"
    theta, head, info = load_adapter(file)
    assert info.in_memory
    content = info.model_dump(exclude_unset=True, exclude={"in_memory"}) | {"seen": info.seen}
    file.write_bytes(save_adapter(theta, head, AdapterInfo(**content)))
    assert not load_adapter(file).info.in_memory
    result = tune(weights, tmp_path / "out", start=runs, seeds=2, lr=(1e-2,))
    assert [trial.start_seeds for trial in result.trials] == [[2], [10]]


def test_two_align_runs_of_one_seed_are_no_two_seeds(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """As where one of them was made with smaller micro-batches: other bits, the same draws."""
    runs = shutil.copytree(aligned, tmp_path / "runs")
    with_info(runs / "s10", seed=2)
    with pytest.raises(UsageError, match=r"s10\S*: is of align seed 2, as \S*s2"):
        tune(weights, tmp_path / "out", start=runs, seeds=2)


def test_two_fine_tunings_of_the_same_seeds_are_one(
    weights: Path, aligned: Path, tmp_path: Path
) -> None:
    """As with other micro-batches; after two align runs, equal seeds of PEFT are two, though."""
    for name, changes in (("a", {}), ("b", {"micro_batch": 7})):
        tune(weights, tmp_path / "direct" / name, lr=(1e-2,), **changes)  # type: ignore[arg-type]
    restart: Record = {"seed": 100, "seeds": 2, "lr": (1e-2,)}
    with pytest.raises(UsageError, match=r"b/\S*: is of finetune seed 0, as \S*a/"):
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
    moved: Record = {"dataset": "folder:/scratch1/images", "versions": "bisslight 0.1, torch 1"}
    unlike = load_adapter(runs / "s10/adapter.safetensors").info.unlike_paper
    with_info(runs / "s10", **moved, unlike_paper=unlike | {"pool": "folder:/scratch1/pool"})
    result = tune(weights, tmp_path / "out", start=runs, seeds=2, lr=(1e-2,))
    assert [trial.start_seeds for trial in result.trials] == [[2], [10]]
    with_info(runs / "s10", pool_sha256="another")
    with pytest.raises(
        UsageError, match=r"differs in more than the seed .*: pool_sha256; give runs that"
    ):
        tune(weights, tmp_path / "other", start=runs, seeds=2, lr=(1e-2,))


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "whole numbers", "flat", "fewer layers", "mute"]
)
def test_a_damaged_adapter_is_told_in_a_line(
    damage: str, weights: Path, aligned: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(aligned / "s2", tmp_path / "run")
    file = run / "adapter.safetensors"
    theta, head, info = load_adapter(file)
    changed = {"whole numbers": theta.int(), "flat": theta.flatten(), "fewer layers": theta[1:]}
    if damage == "mute":
        info = AdapterInfo()
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


# --- splits that leak: PEFT on other images or another split than align's -------------------------


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


def start_from(folder: Path, weights: Path, images: Path, out: Path, more: str = "") -> str:
    """The refusal of a fine-tuning of these images after `folder`/align."""
    line = f"finetune --from {folder}/align {PEFT_STEPS} --dataset folder:{images} --out {out}"
    said = refusal(f"{line} --backbone vit_mini --weights {weights} {more} --quiet")
    assert not out.exists()
    return said


def trained_on(images: Path, data_seed: int) -> set[str]:
    """Class and number of the images that align trains or validates on, by the split's rule."""
    task = data.folder(images, data_seed)
    files = [*task.train.images, *task.val.images]
    return {f"{Path(file).parent.name}/{Path(file).stem}" for file in files}


@pytest.mark.parametrize("how", ["another seed", "converted", "below train", "added", "link"])
def test_a_test_image_that_align_has_trained_on_is_refused_wherever_it_lies(
    how: str, weights: Path, folder: Path, tmp_path: Path
) -> None:
    """The message has their number, counted here from the names alone, and two of them."""
    images = tmp_path / "moved"
    seed = 2  # that of align
    if how == "below train":
        shutil.copytree(folder / "images", images / "train")
        before = trained_on(folder / "images", 2)
    elif how == "link":
        images.symlink_to(folder / "images")
    else:
        shutil.copytree(folder / "images", images)
    if how in ("another seed", "link"):
        seed = 3
    if how == "converted":
        for file in [*images.rglob("*.png")]:
            Image.open(file).save(file.with_suffix(".jpg"))
            file.unlink()
    if how == "added":
        for name in "xyz":
            for i in range(100, 140):
                Image.new("RGB", (16, 16), (i, 0, ord(name))).save(images / name / f"{i}.png")
    before = trained_on(folder / "images", 2)
    test = data.folder(images, seed).test.images
    seen = [file for file in test if f"{Path(file).parent.name}/{Path(file).stem}" in before]
    assert seen
    said = start_from(folder, weights, images, tmp_path / "f", f"--data-seed {seed}")
    what = "images with the class and name of " if how == "converted" else ""
    assert f"trained on {what}{len(seen)} of the {len(test)} test images" in said
    assert str(seen[0]) in said and "--data-seed 2" in said


def test_renamed_images_are_known_by_content_and_told_where_they_were_changed_too(
    weights: Path, folder: Path, tmp_path: Path
) -> None:
    images = tmp_path / "renamed"
    for name in "xyz":
        shutil.copytree(folder / "images" / name, images / f"class-{name}")
    assert "by content or by class and name" in start_from(folder, weights, images, tmp_path / "f")
    for file in [*images.rglob("*.png")]:
        Image.open(file).save(file.with_suffix(".jpg"))
        file.unlink()
    line = f"{PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    outcome = run(
        f"finetune --from {folder}/align {line} --dataset folder:{images} --out {tmp_path}/f"
    )
    assert outcome.code == 0
    assert "no image here has the name or content of one that θ was trained on" in outcome.err


@pytest.mark.parametrize("kept", ["two classes", "names of five", "namesakes of two"])
def test_images_that_are_known_again_only_in_part_are_counted_and_told(
    kept: str, weights: Path, folder: Path, tmp_path: Path
) -> None:
    """The others are here renamed and converted, some as test images. Counted by names alone."""
    images = tmp_path / "images"
    for file in (folder / "images").rglob("*.png"):
        kind, number = file.parent.name, int(file.stem)
        is_kept = {"two classes": kind != "z", "names of five": number < 5}.get(kept, False)
        place = images / ("train" if is_kept or number % 2 else "test") / kind
        place.mkdir(parents=True, exist_ok=True)
        name = file.name if is_kept else f"{number}-again.bmp"
        Image.open(file).resize((20, 20)).save(place / name)
        if kept == "namesakes of two" and number < 2:
            Image.new("RGB", (16, 16), (0, 250, number)).save(images / "train" / kind / file.name)
    if kept == "two classes":  # a test image of each class, which align has not trained on
        for kind in "xy":
            (images / "test" / kind).mkdir()
            Image.new("RGB", (16, 16), (0, 255, ord(kind))).save(images / "test" / kind / "new.png")
    before = trained_on(folder / "images", 2)
    numbers = {"names of five": range(5), "namesakes of two": range(2)}.get(kept, range(15))
    classes = "xy" if kept == "two classes" else "xyz"
    known = len(before & {f"{kind}/{number}" for kind in classes for number in numbers})
    assert 0 < known < len(before) == 36
    line = f"{PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    outcome = run(
        f"finetune --from {folder}/align {line} --dataset folder:{images} --out {tmp_path}/f"
    )
    assert outcome.code == 0, outcome.err
    assert f"--from: {known} of the 36 images that θ was trained on" in outcome.err


@pytest.mark.parametrize("change", ["added", "converted", "renamed"])
def test_images_that_are_all_known_again_by_their_content_are_not_doubted(
    change: str, weights: Path, folder: Path, tmp_path: Path
) -> None:
    """In the split of align, which the folders of the parts keep.

    Converted ones are known by their names alone, which is told: these 36 might be others.
    """
    task = data.folder(folder / "images", 2)
    images = tmp_path / "images"
    for part, split in (("train", task.train), ("val", task.val), ("test", task.test)):
        for file in map(Path, split.images):
            place = images / part / file.parent.name
            place.mkdir(parents=True, exist_ok=True)
            if change == "converted":
                Image.open(file).save(place / f"{file.stem}.bmp")
            else:
                stem = f"again-{file.stem}" if change == "renamed" else file.stem
                shutil.copy(file, place / f"{stem}.png")
    if change == "added":
        for k, kind in enumerate("xyz"):
            for part in ("train", "test"):
                new = Image.new("RGB", (16, 16), (k, 255, ord(part[1])))
                new.save(images / part / kind / f"new-{part}.png")
    line = f"{PEFT_STEPS} --backbone vit_mini --weights {weights} --data-seed 5 --quiet"
    outcome = run(
        f"finetune --from {folder}/align {line} --dataset folder:{images} --out {tmp_path}/f"
    )
    assert outcome.code == 0, outcome.err
    told = [line for line in outcome.err.splitlines() if line.startswith("--from")]
    assert len(told) == (change == "converted")
    assert all(line.startswith("--from: 36 images here have the class and name") for line in told)


@pytest.mark.parametrize("change", ["order", "classes"])
def test_files_that_were_numbered_anew_are_known_by_name_alone_and_told(
    change: str, weights: Path, folder: Path, tmp_path: Path
) -> None:
    """Resized and in another order, or in classes with exchanged names.

    The hash of a name splits them as before, so all names are found, and no test image has a name
    that align was trained on. But most of them show what align was trained on.
    """
    task = data.folder(folder / "images", 2)
    trained = {(file.parent.name, file.stem) for s in task[1:3] for file in s.images}
    tested_after_training = 0
    for file in sorted((folder / "images").rglob("*.png")):
        kind, stem = file.parent.name, file.stem
        name = stem if change == "classes" else str((int(stem) + 7) % 15)
        place = tmp_path / "images" / (kind if change == "order" else "yzx"["xyz".index(kind)])
        place.mkdir(parents=True, exist_ok=True)
        Image.open(file).resize((12, 12)).save(place / f"{name}.png")
        is_tested = (place.name, name) not in trained
        tested_after_training += is_tested and (kind, stem) in trained
    assert tested_after_training > 4  # of 9
    line = f"{PEFT_STEPS} --backbone vit_mini --weights {weights} --data-seed 2 --quiet"
    outcome = run(
        f"finetune --from {folder}/align {line} --dataset folder:{tmp_path}/images"
        f" --out {tmp_path}/f"
    )
    assert outcome.code == 0, outcome.err
    lines = [line for line in outcome.err.splitlines() if line.startswith("--from")]
    (told,) = [line for line in lines if "validation images" not in line]
    assert told.startswith("--from: 36 images here have the class and name of one that θ")
    assert told.endswith("if the files were numbered anew, θ may have seen the test images")


def test_files_of_several_patients_with_the_same_names_are_counted_and_known_by_content(
    tmp_path: Path,
) -> None:
    """P0/slice_0.png, P1/slice_0.png and so on, with the classes of a table.

    What the adapter keeps says how many pictures they are. New patients, whose slices have these
    names, too, are not refused; the same files are.
    """
    noise = np.random.default_rng(0)

    def split(patients: range, place: str = "P{}/slice_{}.png") -> data.Split:
        files = [tmp_path / place.format(k, i) for k in patients for i in range(3)]
        for file in files:
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                Image.fromarray(noise.integers(0, 256, (8, 8), np.uint8)).save(file)
        return data.Split(files, torch.tensor([k % 2 for k in patients for _ in range(3)]))

    task = data.Task("own", split(range(8)), split(range(8, 10)), split(range(10, 12)), ["a", "b"])
    info = AdapterInfo(
        dataset="own", seen=know_training_images(task), seen_images=count_training_images(task)
    )
    assert info.seen_images == 30
    exported = split(range(2), "scan{}-{}.png")  # as if changed: θ has seen these patients
    again = data.Task("own", split(range(2, 8)), split(range(8, 10)), exported, ["a", "b"])
    assert find_seen(again, info).images == []
    (doubt,) = doubt_what_is_missing(again, info)
    assert doubt.startswith("24 of the 30 images that θ was trained on")
    new = task._replace(
        train=split(range(20, 24)), val=split(range(24, 26)), test=split(range(26, 28))
    )
    (doubt,) = doubt_what_is_missing(new, info)
    assert find_seen(new, info).images == []
    assert doubt.startswith("no image here has the name or content of one")
    assert len(find_seen(again._replace(test=split(range(2))), info).images) == 6


def write_parts(root: Path, parts: dict[str, range], ending: str = "png") -> data.Task:
    """Write other grey images for each place, such as train/cat, numbered as its range says.

    The task has those below train/, val/ and test/, with the classes of train/.
    """
    for k, (place, numbers) in enumerate(parts.items()):
        (root / place).mkdir(parents=True)
        for i in numbers:
            Image.new("L", (8, 8), 20 * k + i).save(root / place / f"{i}.{ending}")
    classes = sorted(folder.name for folder in (root / "train").iterdir())
    splits = []
    for part in data.SPLITS:
        files = sorted((root / part).rglob(f"*.{ending}"))
        labels = torch.tensor([classes.index(file.parent.name) for file in files])
        splits.append(data.Split(files, labels))
    return data.Task("own", *splits, classes)


def test_classes_of_single_letters_are_known_by_their_case(tmp_path: Path) -> None:
    """An image of train/A is gone; test/a has its number. Later, two of train/a are tested."""
    parts = {"train/A": range(6), "train/a": range(6, 12), "val/A": range(12, 14)}
    parts |= {"val/a": range(14, 16), "test/A": range(6, 8), "test/a": range(4)}
    task = write_parts(tmp_path / "first", parts)
    assert task.classes == ["A", "a"]
    info = AdapterInfo(
        dataset="own", seen=know_training_images(task), seen_images=count_training_images(task)
    )
    kept = task.train.images[:3] + task.train.images[4:]
    again = task._replace(train=data.Split(kept, task.train.targets[1:]))
    assert find_seen(again, info) == ([], [], [])
    changed = write_parts(
        tmp_path / "again", {"train/A": range(4, 5), "train/a": range(6, 7), "test/a": range(7, 9)}
    )
    found = [tmp_path / f"again/test/a/{i}.png" for i in (7, 8)]
    assert find_seen(changed, info).images == [*map(str, found)]


def test_hashes_of_other_class_names_are_those_of_older_adapters(tmp_path: Path) -> None:
    """Small letters, in the class, too; spaces as they are, and a single small letter."""
    names = {"Big  Cat": "big  cat/1", "Ünit ": "ünit /1", "a": "a/1", "B2": "b2/1", "A": "A/1"}
    files = [tmp_path / name / "1.png" for name in names]
    keys = name_images(data.Split(files, torch.arange(len(names))), [*names])
    assert keys == [hashlib.sha256(name.encode()).hexdigest()[:12] for name in names.values()]


def test_names_that_parts_numbered_anew_share_are_told_among_what_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images are here. Converted, those are known whose names train/ and val/ do not share."""
    parts = {"train/cat": range(6), "val/cat": range(4), "test/cat": range(4)}
    task = write_parts(tmp_path / "first", parts)
    info = AdapterInfo(
        dataset="own", seen=know_training_images(task), seen_images=count_training_images(task)
    )
    converted = write_parts(tmp_path / "converted", parts, "bmp")
    told = "2 of the 10 images that θ was trained on (own) are found here, by content or by class"
    told += (
        " and name. If others are here, too, {}under a new name or one that several of them have"
    )
    assert doubt_what_is_missing(converted, info)[0].startswith(told.format("changed and "))
    for module in ("adapters", "starts"):
        monkeypatch.setattr(f"support.{module}.MOST_CONTENTS", 3)
    assert doubt_what_is_missing(task, info)[0].startswith(told.format(""))


def test_all_images_that_are_known_by_their_names_alone_are_counted(tmp_path: Path) -> None:
    """An adapter of an older version may keep a name that several images have."""
    for k in range(4):
        (tmp_path / f"P{k}").mkdir()
        Image.new("L", (8, 8), k).save(tmp_path / f"P{k}/view.png")
    parts = [data.Split([tmp_path / f"P{k}/view.png"], torch.tensor([0])) for k in range(4)]
    older = AdapterInfo(dataset="own", seen=frozenset(name_images(parts[0], ["a"])))
    others, doubt = doubt_what_is_missing(data.Task("own", *parts[1:], ["a"]), older)
    # It does not say how many it was trained on, either.
    assert others.startswith(
        "1 of an unknown number of images that θ was trained on (own) is found"
    )
    assert doubt.startswith("3 images here have the class and name of one")
    alone = data.Task("own", parts[1], parts[1], parts[1], ["a"])
    assert doubt_what_is_missing(alone, older)[1].startswith("an image here has the class and name")


def test_what_a_start_left_in_doubt_is_told_of_each_run_after_it(
    weights: Path, folder: Path, tmp_path: Path
) -> None:
    """The images are saved anew as JPEG, under new names.

    A restart on the very images of its start tells what that one told. Where all runs before it
    had these images, nothing is told.
    """
    for file in (folder / "images").rglob("*.png"):
        copy = tmp_path / "renamed" / file.parent.name / f"again-{file.stem}.jpg"
        copy.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).save(copy)
    line = f"finetune {PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet --data-seed 2"
    for images in (tmp_path / "renamed", folder / "images"):
        start = folder / "align"
        for seed in (3, 4, 5):
            out = tmp_path / f"{images.name}{seed}"
            more = f"--dataset folder:{images} --from {start} --seed {seed} --out {out}"
            outcome = run(f"{line} {more}")
            assert outcome.code == 0, outcome.err
            told = "it is not known whether θ has seen the test images"
            assert (told in outcome.err) == (images != folder / "images"), (seed, outcome.err)
            start = out


def told_of_validation(said: str) -> list[tuple[int, int]]:
    """How many validation images θ was trained on, and of how many, in each line that says so."""
    found = re.findall(r"was trained on (\d+) of the (\d+) validation images, such as", said)
    return [(int(some), int(all_of_them)) for some, all_of_them in found]


@pytest.mark.parametrize("command", ["align", "finetune"])
def test_validation_images_that_theta_was_trained_on_are_told(
    command: str, weights: Path, tmp_path: Path
) -> None:
    """The test images are a part of their own, and another seed draws validation images anew.

    With the seed of the start nothing is told: its validation images have only chosen its epoch.
    """
    pictures(tmp_path / "images/train", "xyz")
    pictures(tmp_path / "images/test", "xyz", shift=15)
    steps = f"{ALIGN_STEPS} --pool quilts" if command == "align" else PEFT_STEPS
    network = f"--backbone vit_mini --weights {weights} --quiet --dataset folder:{tmp_path}/images"
    done(f"{command} {network} {steps} --out {tmp_path}/start")
    trained = {*map(str, data.folder(tmp_path / "images", 0).train.images)}
    anew = [str(file) for file in data.folder(tmp_path / "images", 1).val.images]
    known = [file for file in anew if file in trained]
    assert 0 < len(known) < len(anew)
    tuning = f"finetune --from {tmp_path}/start {network} {PEFT_STEPS} --seed 5"
    again = run(f"{tuning} --data-seed 1 --out {tmp_path}/again")
    assert again.code == 0, again.err
    assert told_of_validation(again.err) == [(len(known), len(anew))]
    assert f"such as {known[0]} and {known[1]}, known by content. So the" in again.err
    assert "take its data seed, --data-seed 0, and the images" in again.err
    as_before = run(f"{tuning} --out {tmp_path}/as-before")
    assert as_before.code == 0 and "validation images" not in as_before.err


@pytest.mark.parametrize("how", ["moved", "taken away"])
def test_training_images_that_become_validation_images_are_told(
    how: str, weights: Path, tmp_path: Path
) -> None:
    """Two of each class are moved; or val/ is taken away, and others are drawn from train/."""
    root = tmp_path / "images"
    numbers = {"train": range(15), "val": range(15, 30), "test": range(30, 45)}
    photos_in(root, [f"{p}/{kind}/{i}.png" for p in numbers for kind in "xyz" for i in numbers[p]])
    line = f"finetune {PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    line += f" --dataset folder:{root}"
    done(f"{line} --out {tmp_path}/start")
    told = (6, 3 * 15 + 6)
    if how == "moved":
        for kind in "xyz":
            for number in (3, 7):
                (root / f"train/{kind}/{number}.png").rename(root / f"val/{kind}/{number}.png")
    else:
        shutil.rmtree(root / "val")
        told = (9, 9)  # a fifth of 15 in each of three classes
    again = run(f"{line} --from {tmp_path}/start --seed 5 --out {tmp_path}/again")
    assert again.code == 0 and told_of_validation(again.err) == [told], again.err


@pytest.mark.parametrize("drawn", [True, False])
def test_validation_images_of_a_benchmark_that_theta_was_trained_on_are_told(
    drawn: bool, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are drawn by another seed, or a --split-file names others than were drawn."""
    root = make("cub200", tmp_path).parent
    small = BENCHMARKS["cub200"]._replace(sizes=(10, 2, 4))
    monkeypatch.setitem(BENCHMARKS, "cub200", small)
    line = f"finetune {PEFT_STEPS} --backbone vit_mini --weights {weights}"
    line += f" --dataset cub200 --data-root {root}"
    first = run(f"{line} --out {tmp_path}/start")
    assert first.code == 0 and "cub200: drawn image by image: train, val\n" in first.err
    trained = {*open_task("cub200", 0, root).train.images}
    more, given = "--data-seed 1", None
    if not drawn:
        given = tmp_path / "positions.txt"
        given.write_text("1\n8\n")
        more = f"--split-file {given}"
    val = open_task("cub200", 1, root, split_file=given).val.images
    known = [image for image in val if image in trained]
    assert known
    again = run(f"{line} --from {tmp_path}/start --seed 5 {more} --out {tmp_path}/again")
    assert again.code == 0, again.err
    assert "take its data seed, --data-seed 0, or its --split-file, and the images" in again.err
    assert ("drawn image by image" in again.err) == drawn
    assert told_of_validation(again.err) == [(len(known), len(val))]
    as_before = run(f"{line} --from {tmp_path}/start --seed 5 --out {tmp_path}/as-before")
    assert as_before.code == 0 and "validation images" not in as_before.err


@pytest.mark.parametrize("in_memory", [True, False])
def test_validation_images_that_a_script_took_from_those_for_training_are_told(
    in_memory: bool, weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script divides anew: 4 of the 10 validation images were for training before."""
    names = [f"{'cat' if i % 2 else 'dog'}/{i}.png" for i in range(40)]
    photos_in(tmp_path, names)
    labels = torch.tensor([i % 2 for i in range(40)])
    pixels = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def part(numbers: Sequence[int]) -> data.Split:
        chosen = [*numbers]
        files = [tmp_path / names[i] for i in chosen]
        return data.Split(pixels[chosen] if in_memory else files, labels[chosen])

    def task(val: Sequence[int], train: Sequence[int]) -> data.Task:
        return data.Task("own", part(train), part(val), part(range(30, 40)), ["dog", "cat"])

    cfg = FinetuneConfig(
        backbone="vit_mini", dataset="own", weights=weights, epochs=2, warmup_epochs=0, batch=8,
        seeds=1, lr=(1e-2,),
    )  # fmt: skip
    finetune(cfg, tmp_path / "start", task=task(range(10), range(10, 30)))
    again = cfg.replace(start=tmp_path / "start", seed=5)
    finetune(again, tmp_path / "same", task=task(range(10), range(10, 30)))
    assert told_of_validation(caplog.text) == []
    finetune(again, tmp_path / "again", task=task(range(4, 14), [*range(4), *range(14, 30)]))
    assert told_of_validation(caplog.text) == [(4, 10)]
    assert "take the splits that its script handed over, or train again" in caplog.text


def line_of_three_classes(weights: Path, place: Path) -> str:
    """Make images below `place`, and return a command that fine-tunes on them."""
    pictures(place / "images/train", "xyz")
    pictures(place / "images/test", "xyz", shift=15)
    line = f"finetune {PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    return f"{line} --dataset folder:{place}/images"


def test_validation_images_are_told_again_in_each_run_of_a_chain(
    weights: Path, tmp_path: Path
) -> None:
    """The first run trained on them; its successors have the images and splits of each other."""
    line = line_of_three_classes(weights, tmp_path)
    done(f"{line} --data-seed 1 --out {tmp_path}/first")
    trained = {*data.folder(tmp_path / "images", 1).train.images}
    val = data.folder(tmp_path / "images", 0).val.images
    start = "first"
    for seed, remedy in ((5, "take its data seed, --data-seed 1"), (6, "train θ again without")):
        more = f"--data-seed 0 --seed {seed} --from {tmp_path}/{start} --out {tmp_path}/s{seed}"
        outcome = run(f"{line} {more}")
        assert outcome.code == 0, outcome.err
        assert told_of_validation(outcome.err) == [(len(trained & {*val}), len(val))]
        assert remedy in outcome.err
        start = f"s{seed}"


def test_an_older_adapter_may_have_been_trained_on_images_that_only_chose_it(
    weights: Path, tmp_path: Path
) -> None:
    """It does not say which images were for validation; neither does what comes of it."""
    line = line_of_three_classes(weights, tmp_path)
    done(f"{line} --out {tmp_path}/start")
    with_info(tmp_path / "start/lr0.01-s0", chosen=None)
    n = len(data.folder(tmp_path / "images", 1).val.targets)
    for seed, data_seed, start in ((5, 0, "start"), (6, 1, "s5"), (7, 0, "s5")):
        more = f"--data-seed {data_seed} --seed {seed} --out {tmp_path}/s{seed}"
        outcome = run(f"{line} --from {tmp_path}/{start} {more}")
        assert outcome.code == 0, outcome.err
        told = f"was trained or chosen on {n} of the {n} validation images, such as"
        assert (told in outcome.err) == (data_seed == 1), outcome.err
        assert told_of_validation(outcome.err) == []


def test_a_picture_that_training_and_validation_share_is_no_news_of_a_restart(
    tmp_path: Path,
) -> None:
    """It is told of the splits themselves. Of a run that does not train on it, it is told here."""
    parts = {"train/cat": range(6), "val/cat": range(6, 8), "test/cat": range(8, 10)}
    task = write_parts(tmp_path / "images", parts)
    copy = Path(task.val.images[0])
    shutil.copy(Path(task.train.images[0]), copy)
    info = AdapterInfo(seen=know_training_images(task), chosen=know_chosen_images(task))
    experiment: Any = SimpleNamespace(task=task, digests={})
    assert doubt_validation(info, experiment) == []
    first = slice(1, None)
    rest = data.Split(task.train.images[first], task.train.targets[first])
    without: Any = SimpleNamespace(task=task._replace(train=rest), digests={})
    (doubt,) = doubt_validation(info, without)
    assert told_of_validation(doubt) == [(1, 2)] and str(copy) in doubt


def test_validation_images_of_the_same_names_are_told_with_an_if_and_those_by_content_flatly(
    tmp_path: Path,
) -> None:
    """Next year's pictures are numbered anew: none of them is one of this year's.

    Then one picture of this year comes under a name of its own, and is told in the same line.
    """
    parts = {"train/cat": range(10), "test/cat": range(10, 14)}
    before = write_parts(tmp_path / "before", {"val/cat": range(14, 16), **parts})
    parts = {"val/cat": range(4), "train/cat": range(20, 30), "test/cat": range(30, 34)}
    task = write_parts(tmp_path / "next", parts)
    for file in [*task.train.images, *task.val.images, *task.test.images]:
        Image.new("L", (9, 9), int(Path(file).stem)).save(file)
    info = AdapterInfo(
        dataset="folder:before",
        data_seed=0,
        data_sha256="of the images before",
        seen=know_training_images(before),
        chosen=know_chosen_images(before),
    )
    experiment: Any = SimpleNamespace(task=task, digests={})
    (doubt,) = doubt_validation(info, experiment)
    assert doubt.startswith("if files of the same class and name are the same pictures, it was")
    assert "4 of the 4 validation images" in doubt and "other pictures, this is well" in doubt
    copy = Path(task.val.images[0])
    shutil.copy(Path(before.train.images[9]), copy)
    (doubt,) = doubt_validation(info, experiment)
    assert told_of_validation(doubt) == [(1, 4)]
    assert f"such as {copy}, known by content; 3 more have the class and" in doubt
    without = info.model_copy(update={"chosen": None})  # an adapter of an older version
    drawn: Any = SimpleNamespace(
        task=task._replace(drawn=("val",)), digests={}, cfg=SimpleNamespace(data_seed=1)
    )
    (doubt,) = doubt_validation(without, drawn)
    assert doubt.startswith("was trained or chosen on 4 of the 4 validation images, such as")
    Image.new("L", (9, 9), 77).save(copy)
    (doubt,) = doubt_validation(without, drawn)
    assert doubt.startswith("was trained or chosen on images with the class and name of 4 of the 4")


def test_pictures_of_the_same_names_with_another_content_count_as_further_ones(
    tmp_path: Path,
) -> None:
    """They may be converted, or others: where some are not found, that is not known."""
    parts = {"train/cat": range(6), "val/cat": range(6, 8), "test/cat": range(8, 10)}
    before = know_training_images(write_parts(tmp_path / "before", parts))
    again = write_parts(tmp_path / "again", parts)
    assert count_training_images(again, before) == 0
    for file in (tmp_path / "again/train/cat").iterdir():
        Image.new("L", (9, 9), int(file.stem)).save(file)
    assert count_training_images(again, before) == 6


def test_weights_that_were_exported_twice_tell_of_the_images_of_both_trainings(
    tmp_path: Path,
) -> None:
    """Of the ten images of the first training, the test has two under new names."""
    infos = []
    for place, first in (("one", 0), ("two", 100)):
        parts = {f"train/{kind}": range(first, first + 4) for kind in ("cat", "dog")}
        parts |= {"val/cat": range(first + 4, first + 6), "test/cat": range(first + 6, first + 8)}
        task = write_parts(tmp_path / place, parts)
        infos.append(
            AdapterInfo(
                stage="finetune",
                dataset="own",
                seen=know_training_images(task),
                chosen=know_chosen_images(task),
                seen_images=count_training_images(task),
                data_sha256=data.fingerprint(task),
                origin=AdapterInfo(),
            )
        )
    one, two = infos
    before = read_back(describe_training(one, None))
    exported = read_back(describe_training(two, before))
    kept = [tmp_path / f"one/train/{kind}/{i}.png" for kind in ("cat", "dog") for i in range(4)]
    tested = [tmp_path / "one/test/cat/6.png"]
    split = data.Split(kept, torch.tensor([0] * 4 + [1] * 4))
    new = data.Task("own", split, split, data.Split(tested, torch.tensor([0])), ["cat", "dog"])
    doubt, *_ = doubt_what_is_missing(new, exported)
    assert doubt.startswith("8 of the 20 images that θ was trained on")
    # On the very images of the second training, it is not known whether they are of the first.
    tested_again: Any = SimpleNamespace(
        task=task,
        cfg=FinetuneConfig(backbone="vit_mini", dataset="own"),
        digests={"data_sha256": two.data_sha256},
    )
    assert check_unseen(exported, tested_again)[0].startswith("10 of the 20 images")
    assert check_unseen(read_back(describe_training(two, None)), tested_again) == []
    # Of the images that θ was trained on first, two are validated here.
    trained = data.Split(kept[2:4], torch.zeros(2, dtype=torch.int64))
    validated: Any = SimpleNamespace(
        task=tested_again.task._replace(val=trained), cfg=tested_again.cfg, digests={}
    )
    assert told_of_validation(check_unseen(exported, validated)[-1]) == [(2, 2)]
    # An export of an older version does not say how many images there were.
    unknown = describe_training(two, before.model_copy(update={"seen_images": None}))
    assert doubt_what_is_missing(new, unknown)[0].startswith("8 of an unknown number of images")


def read_back(info: AdapterInfo) -> AdapterInfo:
    """What an exported file says, as the next run reads it."""
    return AdapterInfo(**json.loads(json.dumps(with_seen(info))))


def test_of_images_of_several_classes_no_line_speaks_of_a_class(tmp_path: Path) -> None:
    """Their files are known by their names, whatever their labels."""
    for k in range(4):
        Image.new("L", (8, 8), k).save(tmp_path / f"{k}.png")
    labels = torch.tensor([[1, -1]])
    parts = [data.Split([tmp_path / f"{k}.png"], labels) for k in range(4)]
    names = frozenset(name_images(parts[0], ["a", "b"]) + name_images(parts[3], ["a", "b"]))
    info = AdapterInfo(dataset="own", seen=names, seen_images=3)
    some, by_name = doubt_what_is_missing(data.Task("own", *parts[:3], ["a", "b"]), info)
    assert some.startswith("1 of the 3 images") and "by content or by name. If" in some
    assert by_name.startswith("an image here has the name of one")
    tested: Any = SimpleNamespace(
        task=data.Task("own", *parts[1:], ["a", "b"]), digests={"data_sha256": "2:x"}
    )
    with pytest.raises(ValueError, match=r"^was trained on images with the name of 1 of the "):
        check_unseen(info, tested)


def test_a_name_that_train_and_test_both_have_is_told_and_refuses_nothing(
    weights: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part counts its images from 1, as many exports do.

    Where contents are not read, as of many files, it is not said that θ has not seen them.
    """
    images = tmp_path / "parts"
    for number, part in enumerate(("train", "val", "test"), 1):
        pictures(images / part, "xyz")
        for file in (images / part).rglob("*.png"):  # other pictures in each part
            Image.fromarray(np.asarray(Image.open(file)) + np.uint8(number)).save(file)
    line = f"{PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    outcome = run(
        f"finetune --from {folder}/align {line} --dataset folder:{images} --out {tmp_path}/f"
    )
    assert outcome.code == 0, outcome.err
    seen = 3 * (15 - 3)  # of each class align has tested 3
    told = f"{seen} test images have the name of a training image, too"
    assert told in outcome.err and "θ has not seen their content" in outcome.err
    for module in ("adapters", "starts"):
        monkeypatch.setattr(f"support.{module}.MOST_CONTENTS", 1)
    info = load_adapter(folder / "align/adapter.safetensors").info
    (doubt,) = find_seen(data.folder(images, 2), info).doubts
    assert doubt.startswith(told) and "θ has not seen" not in doubt
    assert "Their content is not known" in doubt and doubt.endswith("whether θ has seen them")


def test_byte_copies_in_training_hide_no_test_image_that_theta_was_trained_on(
    weights: Path, folder: Path, tmp_path: Path
) -> None:
    """Half of what align has seen is for training, each with a copy; the rest is tested, resized.

    Names and copies together are as many as align has seen, 36; known are 18 of these.
    """
    task = data.folder(folder / "images", 2)
    for i, file in enumerate(sorted(map(Path, [*task.train.images, *task.val.images]))):
        place = tmp_path / "images" / ("test" if i % 2 else "train") / file.parent.name
        place.mkdir(parents=True, exist_ok=True)
        if i % 2:
            Image.open(file).resize((20, 20)).save(place / f"again-{i}.png")
        else:
            for name in (file.name, f"second-{i}.png"):
                shutil.copy(file, place / name)
    line = f"{PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    outcome = run(
        f"finetune --from {folder}/align {line} --dataset folder:{tmp_path}/images"
        f" --out {tmp_path}/f"
    )
    assert outcome.code == 0, outcome.err
    assert "--from: 18 of the 36 images that θ was trained on" in outcome.err


@pytest.mark.parametrize("most", [45, 20])
def test_of_content_that_was_not_read_nothing_is_said(
    most: int, weights: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are as they were but for one, of another name. Of 45, 30 are for training.

    20 stands for the 20,000 files of a split up to which they are read.
    """
    for module in ("adapters", "starts"):
        monkeypatch.setattr(f"support.{module}.MOST_CONTENTS", most)
    images = shutil.copytree(folder / "images", tmp_path / "images")
    task = data.folder(images, 2)
    assert len(task.train.targets) == 30
    renamed = task.train.images[0]
    assert isinstance(renamed, Path)
    new = renamed.rename(renamed.with_name("again.png"))
    task = task._replace(train=data.Split([new, *task.train.images[1:]], task.train.targets))
    said = doubt_what_is_missing(task, load_adapter(folder / "align/adapter.safetensors").info)
    if most == 45:
        assert said == []
    else:
        assert said[0].startswith("35 of the 36 images")
        assert said[1].startswith("29 images here have the class and name of one that θ was ")
        assert "and their content is not known" in said[1] and "not its content" not in said[1]


def test_files_that_change_places_are_known_although_names_and_sizes_are_as_before(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test image and one for training. One file stands for the 50 that are read of many."""
    monkeypatch.setattr(data, "evenly_spaced", lambda files, most: files[:1])
    pictures(tmp_path / "images", "xy", ending="bmp")
    line = f"align --backbone vit_mini --weights {weights} {ALIGN_STEPS} --pool quilts"
    line += f" --dataset folder:{tmp_path}/images --quiet"
    done(f"{line} --out {tmp_path}/arm/s0")
    task = data.folder(tmp_path / "images", 0)
    tested, trained = (Path(part.images[-1]) for part in (task.test, task.train))
    before = tested.read_bytes()
    tested.write_bytes(trained.read_bytes())
    trained.write_bytes(before)
    done(f"{line} --seed 1 --out {tmp_path}/arm/s1")
    infos = [load_adapter(tmp_path / f"arm/s{k}/adapter.safetensors").info for k in (0, 1)]
    assert infos[0].data_sha256 == infos[1].data_sha256
    tuning = f"finetune {PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    tuning += f" --dataset folder:{tmp_path}/images --out {tmp_path}/f"
    said = refusal(f"{tuning} --from {tmp_path}/arm --seeds 2")
    assert "arm/s1/adapter.safetensors: differs in more than the seed from" in said
    assert said.endswith(": contents_sha256; give runs that differ in the seed alone")
    said = refusal(f"{tuning} --from {tmp_path}/arm/s0")
    assert (
        f"was trained on 1 of the 6 test images, by content or by class and name, such as {tested};"
        in said
    )
    done(f"{tuning} --from {tmp_path}/arm/s1")


def test_what_align_has_seen_is_known_after_fine_tuning_on_other_images(
    weights: Path, folder: Path, tmp_path: Path
) -> None:
    """P, then Q, then P split otherwise: the adapter of Q hands on what align saw of P."""
    pictures(tmp_path / "other", "pq", shift=15)  # no picture of the first
    line = f"{PEFT_STEPS} --backbone vit_mini --weights {weights} --quiet"
    other = f"--dataset folder:{tmp_path}/other --out {tmp_path}/q"
    done(f"finetune --from {folder}/align {line} {other}")
    adapter = load_adapter(tmp_path / "q/lr0.01-s0/adapter.safetensors")
    assert adapter.info.seen is not None
    seen = 3 * 12 + 2 * 12  # of 15 a class, 3 are tested
    assert len(adapter.info.seen) == 2 * seen  # by name and by content
    assert adapter.info.seen_images == seen
    back = f"--dataset folder:{folder}/images --data-seed 3 --seed 5"
    said = refusal(f"finetune --from {tmp_path}/q {line} {back} --out {tmp_path}/f")
    assert "was trained on" in said
    done(f"finetune --from {tmp_path}/q {line} {back.replace('3 ', '2 ')} --out {tmp_path}/f")


def test_images_in_memory_are_known_by_their_pixels(weights: Path, tmp_path: Path) -> None:
    """An image that was trained on is refused as a test image; number 1 here is one."""
    image = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(40) % 2

    def part(*numbers: int) -> data.Split:
        return data.Split(image[[*numbers]], labels[[*numbers]])

    first = data.Task("own", part(*range(20)), part(*range(20, 24)), part(24, 25), ["a", "b"])
    other = first._replace(test=part(30, 3))
    new = first._replace(test=part(30, 31))
    settings: Any = {"backbone": "vit_mini", "dataset": "own", "weights": weights, "rank": 4}
    settings |= {"epochs": 1, "warmup_epochs": 0, "batch": 20, "seeds": 1, "lr": (1e-3,)}
    finetune(FinetuneConfig(**settings), tmp_path / "first", task=first)
    again = FinetuneConfig(**settings | {"start": tmp_path / "first", "seed": 1})
    with pytest.raises(
        UsageError,
        match=r"trained on 1 of the 2 test images, by .* such as number 1; take the splits that its"
        " script handed over, or train again",
    ):
        finetune(again, tmp_path / "other", task=other)
    finetune(again, tmp_path / "new", task=new)


def test_images_in_memory_of_low_contrast_are_other_images_where_16_bits_tell_them_apart() -> None:
    """In 8 bits all would be one grey. Those of 8 bits have the hash that older adapters keep."""
    labels = torch.tensor([0, 1])
    faint = 0.5 + 0.0015 * torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    assert len({*name_images(data.Split(faint, labels), ["a", "b"])}) == 2
    levels = torch.arange(192, dtype=torch.uint8).reshape(1, 3, 8, 8)
    of_older = hashlib.sha256(levels.numpy().tobytes()).hexdigest()[:12]
    assert name_images(data.Split(levels / 255, labels[:1]), ["a", "b"]) == [of_older]


def test_a_start_from_images_normalised_otherwise_is_told(
    weights: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = data.folder(folder / "images", 2)
    settings: Any = {"backbone": "vit_mini", "dataset": "own", "weights": weights, "rank": 8}
    settings |= {"epochs": 1, "warmup_epochs": 0, "batch": 20, "seeds": 1, "lr": (1e-3,)}
    cfg = FinetuneConfig(**settings, start=folder / "align")
    finetune(cfg, tmp_path / "same", task=task)
    assert "was trained on images normalised" not in caplog.text
    finetune(cfg, tmp_path / "other", task=task._replace(mean=(0.5, 0.5, 0.5)))
    assert (
        "--from: was trained on images normalised with mean 0.485 0.456 0.406, std 0.229 0.224"
        " 0.225; those here are with mean 0.500 0.500 0.500, std 0.229 0.224 0.225" in caplog.text
    )


def test_an_adapter_that_keeps_no_names_is_refused_by_its_seed_or_told(
    folder: Path, weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As older versions made them."""
    run = shutil.copytree(folder / "align", tmp_path / "align")
    theta, head, info = load_adapter(run / "adapter.safetensors")
    (run / "adapter.safetensors").write_bytes(
        save_adapter(theta, head, info.model_copy(update={"seen": None, "data_sha256": "old"}))
    )
    line = f"finetune --from {run} {PEFT_STEPS} --weights {weights} --quiet --out {tmp_path}/f"
    assert "split otherwise" in refusal(f"{line} --data-seed 3")
    done(line)
    assert "older version" in caplog.text


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
        before = load_file(SECOND / f"tuned/adapter-s{seed}.safetensors")
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
