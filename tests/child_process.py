"""Processes for tests: warm forked copies of this one, so that torch need not be imported again."""

import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # threads do not survive a fork, and their number decides the last bits


def start(fn: Callable[[], Any], said: Path, **environ: str) -> ForkProcess:
    """Call `fn` in a forked process; its int is the exit code, what it prints goes to `said`."""

    def child() -> None:
        os.environ.update(environ)
        out = said.open("a")
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.stdout = sys.stderr = io.TextIOWrapper(out.buffer, line_buffering=True)
        for number in (signal.SIGINT, signal.SIGHUP):  # tests in the background may ignore them
            signal.signal(number, signal.SIG_DFL)
        code = fn()
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def finish(process: ForkProcess, seconds: float = 600) -> int:
    """Its exit code; minus the number of a signal that killed it."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"still running after {seconds} s")
    return process.exitcode


def wait_for(happened: Callable[[], Any], process: ForkProcess | None = None) -> None:
    """Until it has happened; AssertionError after three minutes, or if the process has ended."""
    deadline = time.monotonic() + 180
    while not happened():
        assert process is None or process.is_alive(), "it ended before that"
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
