"""`--tensorboard`: TensorBoard reads the numbers of metrics.jsonl."""

import time
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
from child_process import finish, start, wait_for
from toy import (
    PEFT_STEPS,
    PRETRAIN_STEPS,
    align_line,
    done,
    finetune_line,
    read_records,
)

import cli

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


def check_align(run: Path) -> None:
    """The curves of an align run are those of its metrics.jsonl: each step once."""
    records = read_records(run)
    curves = read_events(run)
    assert [step for step, _ in curves["probe_val/accuracy"]] == [0]
    for name, of_record in (
        ("loss_P", lambda record: fmean(record["loss_P"])),
        ("cosine", lambda record: fmean(record["cosine"])),
        ("val_P/accuracy", lambda record: record["val_P"]["accuracy"]),
    ):
        expected = [(record["step"], of_record(record)) for record in records[1:]]
        check_points(curves[name], expected)


@pytest.mark.slow
def test_every_command_writes_its_records(pretrained: Path) -> None:
    done(align_line(pretrained, "--out a --tensorboard"))
    check_align(Path("a"))
    done(finetune_line(pretrained, f"{PEFT_STEPS} --out f --tensorboard"))
    trial = Path("f/lr0.01-s0")
    losses = [(record["step"], record["loss"]) for record in read_records(trial)]
    check_points(read_events(trial)["loss"], losses)
    line = "pretrain --backbone vit_mini --pool omniglot --augment none"
    done(f"{line} {PRETRAIN_STEPS} --batch 1290 --image-size 28 --out p --tensorboard --quiet")
    losses = [(record["step"], record["loss"]) for record in read_records(Path("p"))]
    check_points(read_events(Path("p"))["loss"], losses)


@pytest.mark.slow
def test_a_run_that_was_killed_has_each_record_once(pretrained: Path) -> None:
    """Also those behind its last checkpoint, and those from before --tensorboard was given."""
    line = align_line(pretrained, "--alternations 60 --save-minutes 0.002 --out a")
    metrics = Path("a/metrics.jsonl")

    def has_logged(records: int) -> bool:
        is_saved = Path("a/checkpoint.pt").exists()
        return is_saved and metrics.exists() and len(read_records(Path("a"))) > records

    for command, records in ((line, 3), (f"{line} --tensorboard", 8)):
        process = start(partial(cli.run, command.split()), Path("said"))
        wait_for(partial(has_logged, records), process)
        process.kill()
        finish(process)
        time.sleep(1.1)  # names of TensorBoard's files tell seconds, and order its files
    done(f"{line} --tensorboard")
    assert len(read_records(Path("a"))) == 1 + 60  # the first is of the probe
    check_align(Path("a"))
