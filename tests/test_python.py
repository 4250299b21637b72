"""The commands as functions: the guide's chain, data of one's own, and life without extras/."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import ALIGN_SETTINGS, ALIGN_STEPS, MAE_RUN, PEFT_SETTINGS, PEFT_STEPS, PROGRAM_PATH, ROOT

from align import AlignResult, align
from config import AlignConfig, FinetuneConfig
from data import Pool, Split, Task, fingerprint
from finetune import finetune
from support.errors import UsageError


@pytest.mark.slow
def test_the_chain_of_the_guide_runs_as_it_stands_there(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    (chain,) = re.findall(r"## From Python\n.*?```python\n(.*?)```", guide, re.S)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", chain], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "difference=" in done.stdout


@pytest.fixture
def task() -> Task:
    """Bright and dark images."""
    g = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[tuple[torch.Tensor, int]]:
        images = []
        for k in range(count):
            noise = 0.4 * torch.rand(3, 16, 16, generator=g)
            images.append((noise + 0.5 * (k % 2), k % 2))
        return images

    return Task.of(draw(16), draw(8), draw(8), ["dark", "bright"])


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
    digest = f"own:{fingerprint(*task.splits)[:12]}"
    assert recorded["dataset"] == digest
    assert recorded["pool"] == f"own:{fingerprint(pool)[:12]}"

    start = FinetuneConfig.from_align(run, dataset="own", **PEFT_SETTINGS | {"batch": 8})
    with pytest.raises(UsageError, match="hand it in"):
        finetune(start, tmp_path / "tuned")
    tuned = finetune(start, tmp_path / "tuned", task=task)
    assert (tuned.test_images, tuned.dataset) == (8, digest)
    assert tuned.right is not None and 100 * tuned.right[0] / 8 == tuned.test[0]

    assert align(cfg, run, task=task, pool=pool) == result  # a finished run is read
    align(cfg.replace(seed=1), run, task=task, pool=pool, force=True)
    with pytest.raises(UsageError, match="--from"):  # no result of another start is given
        finetune(start, tmp_path / "tuned", task=task)


def test_a_label_in_a_tensor_of_one_is_one_class() -> None:
    """As some data sets hand them out; a matrix of targets would be scored by mAP."""
    image = torch.zeros(3, 8, 8)
    part = [(image, torch.tensor([0])), (image, torch.tensor([1]))]
    task = Task.of(part, part, part, ["a", "b"])
    assert task.train.targets.tolist() == [0, 1]


def test_labels_and_images_that_make_no_task_are_refused(
    weights: Path, task: Task, tmp_path: Path
) -> None:
    image = torch.zeros(3, 8, 8)
    with pytest.raises(ValueError, match="whole numbers"):
        Task.of(*[[(torch.zeros(3, 8, 8), 0.2)]] * 3, classes=["a"])
    with pytest.raises(ValueError, match="labels below 2"):
        Task.of([(image, 2)], [(image, 0)], [(image, 1)], ["a", "b"])
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        Task.of([(image - 1, 0)], [(image, 0)], [(image, 1)], ["a", "b"])
    cfg = FinetuneConfig(backbone="vit_mini", weights=weights, dataset="own", **PEFT_SETTINGS)
    blank = Split(task.val.images, -torch.ones(8, 2).long())
    with pytest.raises(UsageError, match="a positive image each"):
        finetune(cfg, tmp_path, task=task._replace(val=blank, test=blank))
    with pytest.raises(UsageError, match="labels below 1"):
        finetune(cfg, tmp_path, task=task._replace(classes=["one"]))


def test_without_extras_align_finetune_and_evaluate_work(weights: Path, tmp_path: Path) -> None:
    """In a process where extras/ is an empty folder."""
    model = MAE_RUN.format(weights=weights)
    lines = [
        f"align {model} {ALIGN_STEPS} --out a",
        f"finetune --from a {PEFT_STEPS} --out b",
        f"finetune {model} {PEFT_STEPS} --out c",
        "evaluate b --against c",
        "demo",  # is told in one line
    ]
    code = (
        "import sys, types; sys.modules['extras'] = types.ModuleType('extras')\n"
        "import quilts; quilts.register()\n"
        "import cli; print([cli.run(line.split()) for line in sys.argv[1:]])"
    )
    env = {**os.environ, "PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *lines],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 1]", done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
