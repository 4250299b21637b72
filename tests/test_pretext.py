"""The seam of pretext tasks: I-JEPA from the command line, and tasks that no module knows."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import cli
from align import align
from config import AlignConfig
from support.errors import UsageError
from support.runs import sha256

ROOT = Path(cli.__file__).parent
EXAMPLE = ROOT / "examples/rotation.py"


SHORT: dict[str, Any] = {
    "backbone": "vit_mini", "dataset": "quilts", "device": "cpu", "alternations": 1,
    "lower_steps": 2, "upper_steps": 1, "probe_epochs": 0, "warmup": 0,
}  # fmt: skip


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def commands() -> list[list[str]]:
    """Those in the example's docstring."""
    lines = EXAMPLE.read_text().split('"""')[1].replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip().startswith("bisslight ")]


def test_the_examples_task_runs_under_its_own_name(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its loss falls, its digest is kept, PEFT starts from it, the paper's figure stays away.

    A student's own data.py, in the same folder, does not take the place of the program's.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE, "rotation.py")
    Path("data.py").write_text("raise RuntimeError('not the program')\n")
    line = [word.removeprefix("examples/") for word in commands()[1]]
    line += ["--weights", str(weights), "--alternations", "8", "--probe-epochs", "1", "--quiet"]
    assert cli.run([*line, "--out", "a"]) == 0, capsys.readouterr().err
    losses = [record["loss_P"] for record in records("a")[1:]]
    assert sum(losses[-1]) < sum(losses[0])
    about = json.loads(Path("a/env.json").read_text())["about"]
    assert about["pretext_sha256"] == sha256(EXAMPLE)
    assert json.loads(Path("a/result.json").read_text())["pretext"] == "rotation"
    peft = "finetune --from a --epochs 1 --warmup-epochs 0 --batch 80 --seeds 1 --lr 1e-2 --quiet"
    assert cli.run(f"{peft} --out f".split()) == 0, capsys.readouterr().err
    assert json.loads(Path("f/result.json").read_text())["pretext"] == "rotation"
    with Path("rotation.py").open("a") as file:  # another task: the run does not go on with it
        file.write("# changed\n")
    assert cli.run([*line, "--out", "a"]) == 2
    assert "rotation.py was changed" in capsys.readouterr().err


def test_a_module_is_a_place_for_a_task_too(weights: Path, tmp_path: Path) -> None:
    """From Python, by module:Class; the same task by its file gives the same adapter."""
    names = ("examples.rotation:Rotation", f"{EXAMPLE}:Rotation")
    cfgs = [AlignConfig(pretext=name, weights=weights, **SHORT) for name in names]
    one, other = (align(cfg, tmp_path / str(len(cfg.pretext))) for cfg in cfgs)
    assert Path(one.adapter).read_bytes() == Path(other.adapter).read_bytes()
    about = [json.loads(Path(x.out, "env.json").read_text())["about"] for x in (one, other)]
    assert about[0] == about[1]  # the file's digest, too


def test_a_loss_that_compares_images_is_not_computed_in_pieces(
    weights: Path, tmp_path: Path
) -> None:
    """It is refused before any work, with what to do."""
    text = EXAMPLE.read_text()
    text = text.replace("class Rotation:", "class Rotation:\n    mean_over_images = False")
    (tmp_path / "apart.py").write_text(text)
    name = f"{tmp_path}/apart.py:Rotation"
    cfg = AlignConfig(pretext=name, weights=weights, micro_batch=4, p_batch=8, **SHORT)
    with pytest.raises(UsageError, match=r"apart\.py:Rotation: .* leave --micro-batch out"):
        align(cfg, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_the_examples_commands_learn_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chance is 12.5 % of 8 classes."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLE.parent, "examples")
    for line in commands():
        assert cli.run([*line, "--quiet"]) == 0, line
    assert records("runs/rotation")[0]["probe_val"]["accuracy"] >= 25
