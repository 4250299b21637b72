"""The commands as functions: README's chain, data of one's own, and life without extras/."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from child_process import finish, start

import align
import cli
import finetune
from config import AlignConfig, FinetuneConfig
from data import Pool, Split, Task, fingerprint
from support.errors import UsageError

ROOT = Path(__file__).parent.parent
SHORT = {"alternations": 1, "lower_steps": 2, "upper_steps": 1, "p_batch": 8, "d_batch": 8,
         "probe_epochs": 1}  # fmt: skip


@pytest.mark.slow
def test_the_chain_of_the_readme_runs_as_it_stands_there(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (chain,) = re.findall(r"## From Python\n\n```python\n(.*?)```", readme, re.S)
    assert len(re.findall(r"^.", chain, re.M)) <= 15
    done = subprocess.run(
        [sys.executable, "-c", chain], cwd=tmp_path, env=env(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "difference=" in done.stdout


def env(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def own_task() -> Task:
    """Bright and dark images."""
    g = torch.Generator().manual_seed(0)

    def part(n: int) -> list[tuple[torch.Tensor, int]]:
        return [(0.4 * torch.rand(3, 16, 16, generator=g) + 0.5 * (k % 2), k % 2) for k in range(n)]

    return Task.of(part(16), part(8), part(8), ["dark", "bright"])


def test_data_of_ones_own_is_handed_in_and_recorded_by_its_digest(
    weights: Path, tmp_path: Path
) -> None:
    task, pool = own_task(), Pool(torch.rand(32, 3, 16, 16))
    cfg = AlignConfig(backbone="vit_mini", weights=weights, dataset="own", pool="own", **SHORT)
    blank = Split(task.val.images, -torch.ones(8, 2).long())
    with pytest.raises(UsageError, match="need a positive image each, for mAP"):
        align.align(cfg, tmp_path / "a", task=task._replace(val=blank, test=blank), pool=pool)
    with pytest.raises(UsageError, match="need labels 0 to 0"):
        align.align(cfg, tmp_path / "a", task=task._replace(classes=["one"]), pool=pool)
    for x in (255, float("nan")):
        with pytest.raises(UsageError, match=r"pixels in \[0, 1\]; see clamp"):
            align.align(cfg, tmp_path / "a", task=task, pool=pool._replace(images=x * pool.images))
    result = align.align(cfg, tmp_path / "a", task=task, pool=pool)
    assert (type(result), result.metric) == (align.AlignResult, "top-1 accuracy")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    digests = [f"own:{fingerprint(*x)[:12]}" for x in (task.splits, [pool])]
    assert [config["dataset"], config["pool"]] == digests
    short = {"lr": 0.01, "epochs": 2, "seeds": 1, "warmup_epochs": 0}
    start = FinetuneConfig(start=tmp_path / "a", dataset="own", **short)
    with pytest.raises(UsageError, match="hand it in"):
        finetune.finetune(start, tmp_path / "b")
    tuned = finetune.finetune(start, tmp_path / "b", task=task)
    assert (tuned.test_images, tuned.dataset) == (8, digests[0])
    assert tuned.right is not None and 100 * tuned.right[0] / 8 == tuned.test[0]
    own = {"task": task, "pool": pool}
    assert align.align(cfg, tmp_path / "a", **own) == result  # a finished run is read
    align.align(cfg.replace(seed=1), tmp_path / "a", **own, force=True)
    with pytest.raises(UsageError, match="--from"):  # no result of another start is given
        finetune.finetune(start, tmp_path / "b", task=task)


def test_labels_and_images_that_make_no_task_are_refused() -> None:
    image = torch.zeros(3, 8, 8)
    with pytest.raises(ValueError, match="labels below 2"):
        Task.of([(image, 2)], [(image, 0)], [(image, 1)], ["a", "b"])
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        Task.of([(image - 1, 0)], [(image, 0)], [(image, 1)], ["a", "b"])


def test_without_extras_align_finetune_and_evaluate_work(weights: Path, tmp_path: Path) -> None:
    """Where extras/ is empty."""
    model = f"--backbone vit_mini --weights {weights} --dataset quilts"
    short = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in SHORT.items())
    peft = "--lr 0.01 --epochs 1 --warmup-epochs 0 --seeds 1"
    lines = [f"align {model} {short} --out a", f"finetune --from a {peft} --out b"]
    lines += [f"finetune {model} {peft} --out c", "evaluate b --against c"]

    def program() -> int:
        os.chdir(tmp_path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "extras"]:
            del sys.modules[name]
        sys.modules["extras"] = ModuleType("extras")  # as an empty folder of that name is
        plain = importlib.reload(cli)
        assert plain.run(["demo", "--quiet"]) == 2  # there is no such command
        return max(plain.run(line.split()) for line in lines)

    assert finish(start(program, tmp_path / "said")) == 0, (tmp_path / "said").read_text()
