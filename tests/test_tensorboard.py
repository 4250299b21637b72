"""`--tensorboard`: TensorBoard reads the numbers of metrics.jsonl, after a stop, too."""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from toy import PEFT_STEPS, PRETRAIN_STEPS, align_line, done, finetune_line, read_records, refusal

from config import AlignConfig
from extras.export import read_settings
from support.runs import Run

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.usefixtures("elsewhere")
Points = list[tuple[int, float]]  # (step, value)


def read_events(run: Path) -> dict[str, Points]:
    """What TensorBoard itself reads of a run: the points of each curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run))
    events.Reload()
    curves = {}
    for name in events.Tags()["scalars"]:
        curves[name] = [(point.step, point.value) for point in events.Scalars(name)]
    return curves


def check_points(actual: Points, expected: Points) -> None:
    """Equal steps, and values equal to float32."""
    assert [step for step, _ in actual] == [step for step, _ in expected]
    values = [value for _, value in expected]
    assert [value for _, value in actual] == pytest.approx(values, rel=1e-6)


def settings(**changes: Any) -> AlignConfig:
    return AlignConfig(backbone="vit_mini", dataset="quilts", tensorboard=True, **changes)


def test_every_command_writes_its_records(pretrained: Path) -> None:
    done(align_line(pretrained, "--out a --tensorboard"))
    records = read_records(Path("a"))
    curves = read_events(Path("a"))
    assert [step for step, _ in curves["probe_val/accuracy"]] == [0]
    for name, of_record in (
        ("loss_P", lambda record: fmean(record["loss_P"])),
        ("cosine", lambda record: fmean(record["cosine"])),
        ("val_P/accuracy", lambda record: record["val_P"]["accuracy"]),
    ):
        expected = [(record["step"], of_record(record)) for record in records[1:]]
        check_points(curves[name], expected)

    done(finetune_line(pretrained, f"{PEFT_STEPS} --out f --tensorboard"))
    trial = Path("f/lr0.01-s0")
    losses = [(record["step"], record["loss"]) for record in read_records(trial)]
    check_points(read_events(trial)["loss"], losses)

    line = "pretrain --backbone vit_mini --pool omniglot --augment none"
    done(f"{line} {PRETRAIN_STEPS} --batch 1290 --image-size 28 --out p --tensorboard --quiet")
    losses = [(record["step"], record["loss"]) for record in read_records(Path("p"))]
    check_points(read_events(Path("p"))["loss"], losses)


def test_a_run_that_goes_on_has_each_record_once() -> None:
    """Also what was logged behind the checkpoint, and what came before --tensorboard was given."""
    out = Path("run")
    with Run(out, "align", settings().replace(tensorboard=False)) as run:
        run.restore({}, {})
        run.log({"step": 1, "loss": 1.0})
        run.save_if_due("step 1", due=True)
    assert not list(out.glob("events*"))
    for expected in (2.0, 2.5):  # the first of them is killed behind its checkpoint
        with Run(out, "align", settings()) as run:
            run.restore({}, {})
            run.log({"step": 2, "loss": expected})
            run.log({"step": 3, "loss": None, "val": {"accuracy": 50.0}})
    assert read_events(out) == {"loss": [(1, 1.0), (2, 2.5)], "val/accuracy": [(3, 50.0)]}
    (file,) = out.glob("events*")
    (out / "mine.txt").write_text("precious")
    with Run(out, "align", settings(seed=1), force=True):
        assert not file.exists() and (out / "mine.txt").exists()


def test_without_its_package_the_network_of_a_run_with_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by predict and export, which write nothing for it."""
    (tmp_path / "config.json").write_text(settings().model_dump_json())
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    assert read_settings(tmp_path, None).dataset == "quilts"


def test_without_its_package_it_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    line = "--backbone vit_mini --dataset omniglot:Greek --out a --tensorboard"
    for command in ("align", "finetune"):
        assert "pip install tensorboard" in refusal(f"{command} {line}")
    line = "pretrain --backbone vit_mini --pool quilts --out p --tensorboard"
    assert "pip install tensorboard" in refusal(line)
    assert not Path("a").exists() and not Path("p").exists()
