"""Signals, and processes that share every batch: one process's numbers."""

import json
import logging
import os
import signal
import socket
import time
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch
from child_process import finish, start, wait_for
from conftest import close
from filelock import FileLock
from toy import align_line, done, finetune_line, read_records, torchrun

import cli
import support.progress as progress
from support.errors import UsageError
from support.processes import HEARD, TORCHRUN, World, count_processes, hear, make_ready

pytestmark = pytest.mark.usefixtures("elsewhere")
CASES = [("mae", "mfac"), pytest.param("ijepa", "cg", marks=pytest.mark.slow)]
SHARED_STEPS = "--p-batch 9 --d-batch 9"  # an odd number


def wait_for_a_signal(ready: Path) -> None:
    make_ready()
    ready.touch()
    while True:
        time.sleep(0.01)


def test_a_signal_is_heard_although_nobody_reads_the_answer() -> None:
    """As where Ctrl-C has ended `tee`. An error there would end the run before it saves."""
    ours, theirs = os.pipe()
    os.close(ours)
    stderr = os.dup(2)
    os.dup2(theirs, 2)
    try:
        hear(signal.SIGTERM)
        assert [signal.SIGTERM] == HEARD
    finally:
        os.dup2(stderr, 2)
        HEARD.clear()
        for file in (theirs, stderr):
            os.close(file)


@pytest.mark.parametrize(("number", "repeated"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_second_ctrl_c_ends_at_once_and_a_repeated_request_is_the_same(
    tmp_path: Path, number: signal.Signals, repeated: bool
) -> None:
    """torchrun, for one, repeats the signals that it hears."""
    ready, said = tmp_path / "ready", tmp_path / "said"
    process = start(partial(wait_for_a_signal, ready), said)
    wait_for(ready.exists, process)
    for _ in range(2):
        os.kill(process.pid or 0, number)
        process.join(0.3)
    assert process.is_alive() == repeated
    assert "stopping once this" in said.read_text()
    process.kill()
    assert finish(process) == (-signal.SIGKILL if repeated else -signal.SIGINT)


@pytest.mark.parametrize(
    "environ", [{"WORLD_SIZE": "4"}, {"WORLD_SIZE": "abc"}, {"WORLD_SIZE": "2", "RANK": "1"}]
)
def test_a_part_of_torchruns_variables_is_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"WORLD_SIZE={environ['WORLD_SIZE']} .*unset WORLD_SIZE"):
        count_processes()


def together(line: str, other: str | None = None) -> list[ForkProcess]:
    """The same command line in two forked processes, with the variables that torchrun sets.

    `other`: that of the second process, where it is another one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    group["GLOO_SOCKET_IFNAME"] = "lo"
    return [
        start(partial(run_and_leave, own), Path(f"said-{i}"), RANK=i, LOCAL_RANK=i, **group)
        for i, own in (("0", line), ("1", other or line))
    ]


def ends(both: list[ForkProcess], seconds: float = 600) -> list[int]:
    """Their exit codes."""
    return [finish(process, seconds) for process in both]


def said() -> list[str]:
    """What each of them printed."""
    return [Path(f"said-{i}").read_text() for i in (0, 1)]


def run_and_leave(line: str) -> int:
    """The exit code of a command; 99 if one that worked has left its process in the group.

    Such a process is aborted when Python ends, in one run of five.
    """
    code = cli.run(line.split())
    is_left = not torch.distributed.is_initialized()
    return code if is_left or code in (1, 2) else 99


def same_curves(one: str, two: str) -> None:
    """Both runs have the same numbers of every alternation, to rounding."""
    for a, b in zip(read_records(Path(one)), read_records(Path(two)), strict=True):
        for key in ("loss_P", "loss_D_at_P", "loss_D_at_D", "q_over_g", "norm_P", "norm_D"):
            if key in a:
                close(torch.tensor(b[key]), torch.tensor(a[key]), 1e-3)


def last_json(stdout: str) -> dict[str, object]:
    """What is on the last line: torch 2.8 and 2.9 print one of their own before it."""
    return dict(json.loads(stdout.splitlines()[-1]))


@pytest.mark.parametrize(("pretext", "hypergrad"), CASES)
def test_two_processes_have_the_numbers_of_one(
    pretrained: Path, pretext: str, hypergrad: str
) -> None:
    """Batches of 9, an odd one; process 0 alone writes and prints. `finetune` follows."""
    more = f"{SHARED_STEPS} --alternations 2 --hypergrad {hypergrad} --drop-path 0.5 --json"
    line = align_line(pretrained, more, pretext)
    assert ends(together(f"{line} --out two")) == [0, 0], said()
    assert last_json(said()[0])["out"] == "two"
    assert "{" not in said()[1]
    done(f"{line} --out one")
    same_curves("one", "two")
    peft = "finetune --from two --epochs 2 --warmup-epochs 0 --batch 39"
    peft += " --seeds 2 --lr 1e-3 --quiet --json"
    assert ends(together(f"{peft} --out f2")) == [0, 0], said()
    done(f"{peft} --out f1")
    a, b = (json.loads(Path(f"{x}/result.json").read_text()) for x in ("f1", "f2"))
    for one, two in zip(a["tests"], b["tests"], strict=True):
        assert one["right"] == two["right"] and one["loss"] == pytest.approx(two["loss"], rel=1e-3)


@pytest.mark.slow
def test_processes_wait_together_and_hear_a_signal_meanwhile(pretrained: Path) -> None:
    """Each asks again and again: a message of their group must not take half an hour."""
    line = finetune_line(pretrained, "--out f").replace("--quiet", "")
    Path("f").mkdir()
    with FileLock("f/.lock"):
        both = together(line)
        wait_for(lambda: "waiting" in Path("said-0").read_text(), both[0])
        os.kill(both[1].pid or 0, signal.SIGTERM)
        assert ends(both, 60) == [143, 143]
        both = together(line)
        wait_for(lambda: Path("said-0").read_text().count("waiting") == 2, both[0])
    assert ends(both) == [0, 0], said()
    assert Path("f/result.json").exists()


@pytest.mark.slow
def test_torchrun_starts_them(pretrained: Path) -> None:
    line = align_line(pretrained, f"{SHARED_STEPS} --alternations 1 --json")
    assert last_json(torchrun(f"{line} --out two"))["out"] == "two"
    done(f"{line} --out one")
    same_curves("one", "two")


def under_way(pretrained: Path) -> list[ForkProcess]:
    """Two processes in the middle of a long run `a`."""
    both = together(align_line(pretrained, "--alternations 400 --save-minutes 60 --out a"))
    log = Path("a/metrics.jsonl")
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 2, both[0])
    return both


def test_a_stop_in_one_process_stops_all_and_one_process_goes_on(pretrained: Path) -> None:
    """SIGTERM to process 1 alone: they agree after the alternation, and process 0 saves."""
    both = under_way(pretrained)
    os.kill(both[1].pid or 0, signal.SIGTERM)
    assert ends(both) == [143, 143]
    assert "stopped and saved" in said()[0]
    state = torch.load("a/checkpoint.pt", weights_only=True)
    assert 0 < state["optimisers"]["opt_P"]["step"] < 800


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_death_of_one_process_ends_the_other(pretrained: Path, victim: int) -> None:
    both = under_way(pretrained)
    both[victim].kill()
    assert finish(both[1 - victim], 30) == 1


def test_what_is_wrong_is_told_by_all_before_any_work(pretrained: Path) -> None:
    """A directory of something else; a batch that leaves a process without an image."""
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    line = align_line(pretrained)
    for more, told in [("--out mine", "holds thesis.tex"), ("--p-batch 1 --out b", "--p-batch 1")]:
        assert ends(together(f"{line} {more}")) == [2, 2]
        assert all(told in text for text in said())


def test_processes_of_one_group_with_a_run_each_are_refused_by_all(pretrained: Path) -> None:
    """They would add up gradients of different runs, and one of these would never be written."""
    line = finetune_line(pretrained)
    both = together(f"{line} --lr 1e-2 --out a", f"{line} --lr 3e-2 --out b")
    assert ends(both, 60) == [2, 2], said()
    assert all("the 2 processes of this group share each batch of one run" in x for x in said())
    assert not Path("a").exists() and not Path("b").exists()


def test_warnings_are_told_by_the_first_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes look at the same images, and would tell the same."""
    for rank in (1, 0):  # the level of the last one stays
        monkeypatch.setattr(progress, "world", lambda rank=rank: World(rank, size=2))
        with progress.training(quiet=True):
            assert progress.LOG.isEnabledFor(logging.WARNING) == (rank == 0)
