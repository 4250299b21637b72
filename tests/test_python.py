"""The commands as functions: the guide's chain, data of one's own, and life without extras/."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from toy import ALIGN_SETTINGS, ALIGN_STEPS, PEFT_SETTINGS, PEFT_STEPS, ROOT, photos_in

from align import AlignResult, align
from config import AlignConfig, FinetuneConfig
from data import Pool, Split, Task
from finetune import finetune
from support.errors import UsageError
from support.looking import digest_of_pool, digest_of_task, look_at_task
from support.runs import READING, T, Track

NO_NETWORK = """
import socket
def refuse(*args, **options):
    raise OSError("no network here")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""


@pytest.mark.slow
def test_the_chain_of_the_guide_runs_as_it_stands_there_without_a_network(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    (chain,) = re.findall(r"## From Python\n.*?```python\n(.*?)```", guide, re.S)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK + chain],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert " points, p = " in done.stdout


@pytest.fixture
def task() -> Task:
    """Bright and dark images."""
    g = torch.Generator().manual_seed(0)
    noise = 0.4 * torch.rand(32, 3, 16, 16, generator=g)
    labels = torch.arange(32) % 2
    pixels = noise + 0.5 * labels[:, None, None, None]
    parts = (Split(pixels[k], labels[k]) for k in (slice(16), slice(16, 24), slice(24, 32)))
    return Task("own", *parts, ["dark", "bright"])


def test_data_of_ones_own_is_handed_in_and_recorded_by_its_digest(
    weights: Path, task: Task, tmp_path: Path
) -> None:
    pool = Pool(torch.rand(32, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    cfg = AlignConfig(
        backbone="vit_mini", weights=weights, dataset="own", pool="own", **ALIGN_SETTINGS
    )
    run = tmp_path / "aligned"
    result = align(cfg, run, task=task, pool=pool)
    assert (type(result), result.metric) == (AlignResult, "top-1 accuracy")
    recorded = json.loads((run / "config.json").read_text())
    assert (recorded["dataset"], recorded["pool"]) == ("own", "own")
    assert recorded["data_sha256"] == digest_of_task(task, look_at_task(task))
    assert recorded["pool_sha256"] == digest_of_pool(pool)

    start = FinetuneConfig.from_align(run, **PEFT_SETTINGS | {"batch": 8})
    with pytest.raises(UsageError, match="own"):
        finetune(start, tmp_path / "tuned")
    tuned = finetune(start, str(tmp_path / "tuned"), task=task)
    (test,) = tuned.tests
    assert test.right is not None and 100 * test.right / 8 == test.accuracy

    assert align(cfg, str(run), task=task, pool=pool) == result  # a finished run is read
    other = tmp_path / "other"
    align(cfg.replace(seed=1), other, task=task, pool=pool)
    with pytest.raises(UsageError, match="--from"):  # no result of another start is given
        finetune(start.replace(start=other), tmp_path / "tuned", task=task)


def labels_in(labels: list[str]) -> Track:
    """A track that remembers the label of each loop it is called with."""

    def track(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        labels.append(label)
        return iter(items)

    return track


def test_a_scripts_track_gets_the_units_of_training_and_another_one_the_images_that_are_read(
    weights: Path, tmp_path: Path
) -> None:
    """Task and pool."""
    names = [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(20)]
    photos_in(tmp_path / "photos", names)
    photos_in(tmp_path / "pool", ["0.png", "1.png"])
    images = {"dataset": f"folder:{tmp_path}/photos", "pool": f"{tmp_path}/pool"}
    trained: list[str] = []
    read: list[str] = []
    tracks = {"track": labels_in(trained), "reading": labels_in(read)}
    cfg = AlignConfig(backbone="vit_mini", weights=weights, **images, **ALIGN_SETTINGS)
    align(cfg, tmp_path / "a", **tracks)
    assert (trained, read) == (["head alone", "align"], [READING] * 2)


@pytest.mark.slow
def test_without_extras_align_finetune_and_evaluate_work(tmp_path: Path) -> None:
    """In a process where extras/ is an empty folder."""
    model = "--backbone vit_mini --dataset omniglot:Greek"
    tune = f"finetune {PEFT_STEPS}"
    lines = [f"align {model} {ALIGN_STEPS} --out a", f"{tune} --from a --out b"]
    lines += [f"{tune} {model} --out c", "evaluate b c", "demo"]  # demo is told in one line
    code = (
        "import sys, types; sys.modules['extras'] = types.ModuleType('extras')\n"
        "import cli; print([cli.run(line.split()) for line in sys.argv[1:]])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *lines],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 1]", done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
