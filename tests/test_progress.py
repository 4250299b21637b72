"""What progress knows of a command: how far it is, the time that is left, when it can stop."""

import io
import signal
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console

from bisslight import Passes
from support import progress
from support.optim import EpochRecord, Group, Optimiser, train_epochs
from support.processes import stop
from support.progress import Loops
from support.pulse import pulse


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, that progress reads; a test sets it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def epochs(clock: list[float]) -> Iterator[EpochRecord]:
    """Four epochs of two batches; a batch takes five seconds."""
    for number in range(1, 5):
        for _ in pulse.count([(range(8),)] * 2, 2):
            clock[0] += 5
        yield EpochRecord(number, 0.5)


def drawn(bars: Loops) -> str:
    """What a terminal of 80 columns shows."""
    screen = Console(width=80, file=io.StringIO())
    with screen.capture() as shown:
        screen.print(bars)
    return shown.get()


def test_the_whole_command_is_as_far_as_its_runs_and_their_epochs(clock: list[float]) -> None:
    """Three runs of four epochs of 10 s: after 2 of 12 epochs, 100 s are left."""
    bars = Loops(True)

    def runs() -> Iterator[str]:
        for _ in range(3):
            for epoch in bars(epochs(clock), 4, "lr 0.1 seed 0"):
                seen.append((epoch.step, drawn(bars)))
            yield "val 50.0 %"

    seen: list[tuple[int, str]] = []
    for _ in bars(runs(), 3, "run"):
        pass
    first, second, third = (lines for _, lines in (seen[1], seen[5], seen[8]))
    assert "run 1 of 3" in first and "epoch 3 of 4" in first
    assert "0:01:40 left" in first and "0:00:20 left" in first and "2 images/s" in first
    assert "run 2 of 3" in second and "0:01:00 left" in second
    assert "run 3 of 3" in third and "0:00:30 left" in third
    assert all(len(line) <= 80 for line in first.splitlines())


def test_batches_move_the_bar_within_an_epoch(clock: list[float]) -> None:
    bars = Loops(True)
    positions = []

    def one_epoch() -> Iterator[EpochRecord]:
        for _ in pulse.count([(range(8),)] * 4, 4):
            positions.append(bars.tasks[0].completed)
        yield EpochRecord(1, 0.5)

    assert len([*bars(one_epoch(), 1, "lr 0.1 seed 0")]) == 1
    assert positions == [0.0, 0.25, 0.5, 0.75]


def test_batches_of_a_run_without_a_loop_do_not_move_the_bar(clock: list[float]) -> None:
    """Twelve alternations in a run that shows nothing are not twelve runs of four."""
    bars = Loops(True)
    positions = []

    def runs() -> Iterator[str]:
        for _ in range(4):
            for _ in pulse.count([(range(8),)] * 12, 1):
                positions.append(bars.tasks[0].completed)
            clock[0] += 10
            yield "test 50.0 %"

    left = [bars.tasks[0].time_remaining for _ in bars(runs(), 4, "demo")]
    assert positions == [0.0] * 12 + [1.0] * 12 + [2.0] * 12 + [3.0] * 12
    assert left == [30, 20, 10, 0]


def test_training_counts_its_images_and_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five batches of two images at two batches an epoch: two and a half epochs."""
    counted: list[tuple[int, float]] = []
    monkeypatch.setattr(pulse, "advance", lambda images, share: counted.append((images, share)))
    x = torch.zeros(1, requires_grad=True)
    opt = Optimiser([Group([x], 0.1, 0.0)], None, None)
    batches = [(torch.ones(2),)] * 5
    assert len([*train_epochs(lambda b: (x * b[0]).sum(), opt, batches, 2, "toy", Passes())]) == 3
    assert counted == [(2, 0.5)] * 5


def test_a_run_that_goes_on_counts_only_the_time_of_this_process(clock: list[float]) -> None:
    """Epochs 3 and 4 of 4 took 10 s each, so the second run needs 40 s."""
    lines = Loops(False)

    def runs() -> Iterator[str]:
        for _ in lines([EpochRecord(3, 0.5), EpochRecord(4, 0.5)], 4, "lr 0.1 seed 0", 2):
            clock[0] += 10
        yield "val 50.0 %"

    shown = lines(runs(), 2, "run")
    assert next(shown) == "val 50.0 %"
    assert lines.tasks[0].time_remaining == 40


def test_who_asks_to_stop_is_told_when(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of ten seconds of an epoch are over when Ctrl-C comes in the second epoch."""
    lines = Loops(False)
    told = []

    def watched() -> Iterator[EpochRecord]:
        for number in range(1, 3):
            for _ in pulse.count([(range(8),)] * 2, 2):
                told.append(lines.time_of_stop())
                clock[0] += 5
            yield EpochRecord(number, 0.5)

    assert len([*lines(watched(), 2, "probe")]) == 2
    assert told[0] == "after this epoch" and told[1] == "after this epoch (about 5 s)"
    monkeypatch.setattr(stop.flag, "value", signal.SIGINT)
    assert stop.notice().endswith("; Ctrl-C again leaves now")
    stop.flag.value = signal.SIGTERM
    assert "Ctrl-C" not in stop.notice()
