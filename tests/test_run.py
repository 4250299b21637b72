"""Schedules against recorded ones, optimisers against formulas, runs against mistakes and kills."""

import contextlib
import json
import os
import re
import signal
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from child_process import finish, start, wait_for
from conftest import close, recorded
from filelock import FileLock

import cli
from config import AlignConfig
from support.errors import UsageError
from support.optim import Group, Optimiser, Schedule
from support.processes import Stopped, jobs, stop
from support.processes import start as made_ready
from support.runs import Run, check_directory, checking


@pytest.mark.parametrize("name", ["small", "paper"])
def test_schedules_equal_the_recorded_ones_to_the_bit(name: str) -> None:
    rec = recorded(f"official/lr_schedules_{name}.npz")
    m, f = rec.meta, rec.meta["finetune"]
    lower = Schedule(m["T"] * m["NL"], m["warmup_alternations"] * m["NL"] + 1, 1e-6)
    upper = Schedule(m["T"] * m["NU"], m["warmup_alternations"] * m["NU"] + 1, 1e-6)
    tuning = Schedule(f["epochs"] * f["len_loader"], f["warm"] * f["len_loader"] + 1, 1e-6)
    for steps, rates, rate, base in [
        ("lower_step", "lower_lora_lr", lower, m["p_lr"]),
        ("lower_step", "lower_decoder_lr", lower, m["p_head_lr"]),
        ("upper_step", "upper_lr", upper, m["d_lr"]),
        ("finetune_step", "finetune_lr", tuning, f["lr"]),
    ]:
        ours = torch.tensor([rate(k, base) for k in rec[steps].tolist()], dtype=torch.float64)
        assert torch.equal(ours, rec[rates].double())
    rates = [Schedule(1, 1, 0.0)(1, 0.3), Schedule(2, 3, 0.0)(2, 0.3)]  # shorter than the warm-up
    assert rates == [0.3, pytest.approx(0.2)]


def test_clipping_is_joint_and_uses_the_recorded_formula() -> None:
    """min(1, c / (norm + 1e-6)) over all tensors; plain SGD's first step shows the gradient."""
    a, b = (torch.zeros(n, requires_grad=True, dtype=torch.float64) for n in (2, 1))
    opt = Optimiser([Group([a, b], 1.0, 0.0)], None, None, clip=1e-4)
    g = torch.tensor([3e-4, 0.0, 4e-4], dtype=torch.float64)
    assert float(opt.update([a, b], [g[:2].clone(), g[2:].clone()])) == pytest.approx(5e-4)
    close(torch.cat([a, b]), -g * 1e-4 / (5e-4 + 1e-6), 1e-12)  # so small that the 1e-6 shows


def config(**changes: Any) -> AlignConfig:
    return AlignConfig(backbone="vit_mini", dataset="quilts", **changes)


def test_a_damaged_file_is_one_line_and_an_error_of_ours_stays_as_it_is() -> None:
    message = r"a: cannot be read \(KeyError: 'x'\); mend it"
    with pytest.raises(UsageError, match=message), checking("a", "mend it"):
        {}["x"]
    with pytest.raises(UsageError, match=r"^as it is$"), checking("a", "mend it"):
        raise UsageError("as it is")


def test_a_run_directory_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name, message in [("mine", "holds thesis.tex, no run"), ("file", "is a file")]:
        for force in (False, True):
            with pytest.raises(UsageError, match=message):
                Run(tmp_path / name, "align", config(), force)
    out, about = tmp_path / "run", {"weights_sha256": "one", "images": {"train": 3}}
    Run(out, "align", config(), **about).close()
    assert AlignConfig(**json.loads((out / "config.json").read_text())) == config()
    for force in (False, True):
        with pytest.raises(UsageError, match="is a run of `align`; choose another --out"):
            Run(out, "finetune", config(), force)
    with pytest.raises(UsageError, match=r"other settings: seed 0 -> 1, lam 0.001 -> 0.5; choose"):
        Run(out, "align", config(seed=1, lam=0.5), **about)
    with pytest.raises(UsageError, match="weights_sha256 one -> two"):
        Run(out, "align", config(), **about | {"weights_sha256": "two"})
    other = Mock(**{"model_dump.return_value": dict.fromkeys(AlignConfig.model_fields, "x")})
    with pytest.raises(UsageError) as refused:  # all but these have to stay as they are
        check_directory(out, "align", other)
    free = [x for x in AlignConfig.model_fields if not re.search(f"[:,] {x} ", str(refused.value))]
    told = "data_root device mfac_device micro_batch save_minutes weights workers"
    assert " ".join(sorted(free)) == told
    assert check_directory(out, "align", config())  # what is not known yet is not compared
    assert not check_directory(tmp_path / "new", "align", config())
    assert not (tmp_path / "new").exists()
    old = {"model": {"backbone": "vit_mini"}, "seed": 0}  # a run of the first edition
    (out / "config.json").write_text(json.dumps(old))
    (out / "env.json").write_text(json.dumps({"command": "align", "weights_sha256": "one"}))
    with pytest.raises(UsageError, match=r"with other settings: .*; choose another --out, or"):
        Run(out, "align", config())


def test_a_finished_run_gives_its_result_again_and_force_starts_it_over(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Run(out, "align", config()) as run:
        run.log({"step": 1})
        run.checkpoint("step 1", due=True)
        result = run.finish({"accuracy": 70.0})
    assert {"accuracy", "cpu_seconds", "seconds", "out", "adapter", "weights"} == result.keys()
    assert not (out / "checkpoint.pt").exists()
    out = out.rename(tmp_path / "moved")
    with FileLock(out / ".lock"), Run(out, "align", config()) as run:  # it reads, and asks nobody
        assert json.dumps(run.result) == json.dumps(result).replace("/run", "/moved")
    (out / "picture.png").write_text("the user's own")
    for name in ("lr0.1-s0", "lr0.1-s1"):  # of a grid: their time is the whole's, as its end is
        (out / name).mkdir()
        (out / name / "result.json").write_text('{"cpu_seconds": 7000.5, "seconds": 1}')
    assert run.elapsed() == {"cpu_seconds": 14001.0, "seconds": 2}
    with Run(out, "align", config(seed=1), force=True) as run:
        assert (run.result, run.records) == (None, [])
        names = {"picture.png", "config.json", "env.json", ".lock", "lr0.1-s0", "lr0.1-s1"}
        assert not list((out / "lr0.1-s0").iterdir())
        assert {file.name for file in out.iterdir()} == names


def test_tensors_records_and_time_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """What was logged behind it is logged anew; seconds before the stop count."""
    with Run(tmp_path, "align", config()) as run:
        run.restore({"x": torch.ones(2)}, {})
        run.log({"step": 1})
        run.began = run.began[0] - 1000, run.began[1] - 1000
        run.checkpoint("step 1", due=True)
        run.log({"step": 2})
        run.checkpoint("step 2")  # not due: nothing is saved
    with Run(tmp_path, "align", config()) as run:
        x = torch.zeros(2)
        run.restore({"x": x}, {})
        assert torch.equal(x, torch.ones(2))
        run.log({"step": 2, "anew": True})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [*map(json.loads, lines)] == [{"step": 1}, {"step": 2, "anew": True}]
        assert 1000 < run.finish({})["cpu_seconds"] < 1100


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", [1, 2], {}, {"tensors": []}])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: Any) -> None:
    with Run(tmp_path, "align", config()) as run:
        if isinstance(content, bytes):
            (tmp_path / "checkpoint.pt").write_bytes(content)
        else:
            torch.save(content, tmp_path / "checkpoint.pt")
        message = r"checkpoint.pt: cannot be read .*; --force starts the run over"
        with pytest.raises(UsageError, match=message):
            run.restore({"x": torch.zeros(1)}, {})


def test_a_run_killed_as_it_began_is_begun_again(tmp_path: Path) -> None:
    for name in ("env.json", ".lock", ".config.json.1.tmp"):
        (tmp_path / name).write_text("{")
    with Run(tmp_path, "align", config()):
        assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("stays", [False, True])
def test_a_directory_in_use_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """Who lets go after a moment is waited for, who stays is told."""
    holder = FileLock(tmp_path / ".lock", thread_local=False).acquire().lock
    acquire = FileLock.acquire
    monkeypatch.setattr(FileLock, "acquire", lambda lock, timeout: acquire(lock, timeout=0.5))
    if stays:
        with pytest.raises(UsageError, match=r"--out .*: is not writable, or another process"):
            Run(tmp_path, "align", config())
        holder.release()
    else:
        threading.Timer(0.1, holder.release).start()
        with Run(tmp_path, "align", config()) as run:
            assert run.result is None


def test_a_signal_saves_and_stops_and_the_next_one_goes_on(tmp_path: Path) -> None:
    message = "stopped after step 1 of 9; .*: the same command goes on"
    with Run(tmp_path, "align", config()) as run:
        run.restore({"x": torch.ones(1)}, {})
        stop.hear(signal.SIGHUP)
        with pytest.raises(Stopped, match=message) as told:
            run.checkpoint("step 1 of 9")
    assert told.value.args[0] == signal.SIGHUP
    with pytest.raises(Stopped, match="stopped before"):  # of a grid: the next is not begun
        Run(tmp_path / "next", "align", config())
    stop.renew()
    with Run(tmp_path, "align", config()) as run:
        x = torch.zeros(1)
        run.restore({"x": x}, {})
        assert x == 1


def test_a_worker_that_dies_is_told_in_a_line(monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(BrokenProcessPool) as told:
        list(jobs(os._exit, [3], 2))
    monkeypatch.setattr("cli.build", Mock(side_effect=told.value))
    code, line = cli.run(["finetune"]), capsys.readouterr().err
    assert code == 1 and re.fullmatch(r"error: .*; perhaps .* lower --jobs.*\n", line)


def test_jobs_are_refused_beside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.processes.world", lambda: (0, 2))
    with pytest.raises(UsageError, match="start it without torchrun"):
        next(jobs(len, ["a"], 2))


def deaf_to_exceptions(ready: Path) -> None:
    made_ready()
    ready.touch()
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def test_a_second_signal_ends_at_once_whatever_a_library_catches(tmp_path: Path) -> None:
    """But a repetition within a second, as torchrun's of a Ctrl-C, is the same request."""
    ready, said = tmp_path / "ready", tmp_path / "said"
    process = start(partial(deaf_to_exceptions, ready), said)
    wait_for(ready.exists, process)
    os.kill(process.pid or 0, signal.SIGTERM)
    os.kill(process.pid or 0, signal.SIGTERM)
    time.sleep(1.1)
    assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGINT)
    assert (finish(process), said.read_text()) == (130, "stopped\n")
