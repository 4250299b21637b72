"""What settings open, and a pretext task of one's own: found, tried, left as it was."""

import json
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch
from toy import ALIGN_SETTINGS, ROOT, align_settings

from align import align
from config import AlignConfig, FinetuneConfig
from data import Pool, Split
from support import experiment
from support.adapters import load_adapter
from support.errors import UsageError
from support.experiment import (
    check_batches,
    open_experiment,
)
from support.processes import World

EXAMPLE = ROOT / "examples/rotation.py"


def own_task(folder: Path, body: str) -> str:
    """The name of a task that is the example's but for the members in `body`."""
    file = folder / "mine.py"
    file.write_text(
        f"{EXAMPLE.read_text()}\n\nclass Mine(Rotation):\n{indent(dedent(body), '    ')}"
    )
    return f"{file}:Mine"


# --- a pretext task of one's own --------------------------------------------------------------


def test_a_class_or_file_that_is_not_there_is_named(weights: Path, tmp_path: Path) -> None:
    name = own_task(tmp_path, "pass")
    for wrong, named in ((name.replace("Mine", "Main"), "Main"), (f"{tmp_path}/none.py:A", "none")):
        with pytest.raises(UsageError, match=rf"--pretext .*{named}"):
            align(align_settings(weights, pretext=wrong), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    # Fine-tuning needs no file of a pretext task, nor does it ask whether that was changed.
    cfg = FinetuneConfig(backbone="vit_mini", weights=weights, dataset="quilts", pretext=name)
    Path(name.rpartition(":")[0]).unlink()
    assert "pretext_sha256" not in open_experiment(cfg).digests


def test_a_task_that_compares_images_takes_no_micro_batches(weights: Path, tmp_path: Path) -> None:
    cfg = align_settings(weights, pretext=own_task(tmp_path, "mean_over_images = False"))
    with pytest.raises(UsageError, match=r"--pretext .*compares images"):
        align(cfg.replace(micro_batch=2), tmp_path / "a")


# --- what is opened ---------------------------------------------------------------------------


def test_batches_that_cannot_be_shared_out_are_refused(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quilts have 80 training images: the last of 79 is alone, and BatchNorm needs two."""
    opened = open_experiment(align_settings(weights))
    check_batches(opened, "--d-batch", 79)
    with_norm = replace(opened, cfg=align_settings(weights, head="batchnorm"))
    check_batches(with_norm, "--d-batch", 80)
    with pytest.raises(UsageError, match=r"--d-batch 79: .* has 1 image, 2 are needed"):
        check_batches(with_norm, "--d-batch", 79)
    cut = replace(opened, cfg=align_settings(weights, head="batchnorm", micro_batch=4))
    with pytest.raises(UsageError, match="--micro-batch: a BatchNorm head"):
        check_batches(cut, "--d-batch", 80)
    monkeypatch.setattr(experiment, "world", lambda: World(rank=0, size=9))
    with pytest.raises(UsageError, match="has 8 images, 9 are needed"):
        check_batches(opened, "--d-batch", 12)


def test_data_from_python_keep_the_settings_that_go_with_their_name(tmp_path: Path) -> None:
    """Weights and pool of handwriting, also for a task that was handed over."""
    settings = ALIGN_SETTINGS | {"alternations": 1, "warmup": 0}
    cfg = AlignConfig(backbone="vit_mini", dataset="omniglot:Greek", **settings)
    task = open_experiment(cfg).task
    align(cfg, tmp_path / "own", task=task)
    align(cfg, tmp_path / "named")
    one, two = (
        load_adapter(tmp_path / name / "adapter.safetensors").theta for name in ("own", "named")
    )
    assert torch.equal(one, two)
    own = task._replace(train=Split(task.train.images + 0.5, task.train.targets))  # type: ignore[operator]
    for given in ((own, None), (None, Pool(own.train.images))):
        with pytest.raises(ValueError, match="from 0 to 1"):
            open_experiment(cfg, *given)
    config = json.loads((tmp_path / "own/config.json").read_text())
    assert (config["dataset"], config["pool"]) == ("own", "omniglot")


def test_another_default_type_of_a_script_is_refused_in_a_line(
    weights: Path, tmp_path: Path
) -> None:
    """Notebook 1 computes in float64; a run after it would end in a traceback."""
    cfg = AlignConfig(backbone="vit_mini", weights=weights, dataset="quilts", **ALIGN_SETTINGS)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(
            UsageError, match=r"is torch.float64, .*set_default_dtype\(torch.float32"
        ):
            align(cfg, tmp_path / "a")
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_thread_serves_the_smallest_network_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    small = FinetuneConfig(backbone="vit_mini", dataset="quilts", device="cpu")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    experiment.set_up_device(small)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    experiment.set_up_device(small)
    assert asked == [1]


@pytest.mark.parametrize(("end_lr", "is_told"), [(1e-6, True), (0.0, False)])
def test_a_rate_that_rises_to_the_end_of_its_cosine_is_told(
    end_lr: float, is_told: bool, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment.tell_low_rates(align_settings(weights, phi_p_lr=1e-12, end_lr=end_lr))
    assert ("--phi-p-lr" in caplog.text) == is_told
