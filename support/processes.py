"""Signals that stop a run, processes that share its batches, and a pool of processes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import RawValue, get_context, parent_process
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.errors import UsageError


def world() -> tuple[int, int]:
    """Which process this is, and how many share each batch; process 0 writes the files."""
    many = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if many else (0, 1)


def share(n: int) -> slice:
    """This process's part of n images: contiguous, in order of ranks, sizes differ by at most 1."""
    rank, size = world()
    return slice(n * rank // size, n * (rank + 1) // size)


def gather(rows: Tensor = torch.empty(0)) -> Tensor:  # noqa: B008
    """All processes' rows, few or many, by rank, on the CPU. It waits for all: also a barrier."""
    found: list[Any] = [rows.cpu()] * world()[1]
    if len(found) > 1:
        dist.all_gather_object(found, rows.cpu())
    return torch.cat(found)


class Stopped(BaseException):
    """A stop that was asked for, all saved: (signal, message). `except Exception` lets it pass."""


class Stop:
    """A signal asks the runs to end after an alternation or epoch; a second one ends at once."""

    heard = 0.0
    flag: Any = RawValue("i", 0)  # the signal that was heard

    def hear(self, number: int, frame: Any = None) -> None:
        if self.flag.value and time.monotonic() - self.heard > 1:  # torchrun repeats a Ctrl-C
            with suppress(OSError):  # no terminal any more; \x1b: a progress bar hides its cursor
                os.write(2, b"\x1b[?25h\nstopped\n" if os.isatty(2) else b"stopped\n")
            os._exit(128 + number)
        self.flag.value, self.heard = number, time.monotonic()

    def agreed(self) -> int:
        """The signal to stop, 0 for none; the same in all processes."""
        return int(gather(torch.tensor([self.flag.value])).max())


stop = Stop()


def start() -> None:
    """Make this process ready for runs: it hears signals, and joins the others of torchrun."""
    stop.flag = RawValue("i", 0)  # the processes of `jobs` see it, too
    for number in signal.Signals:  # Ctrl-C, kill, a closed terminal, Slurm's warning
        ours = number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # Windows has two
        if ours and signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, stop.hear)
    if os.environ.get("WORLD_SIZE", "1") != "1" and world()[1] == 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def jobs(fn: Callable[[Any], Any], units: Sequence[Any], count: int) -> Iterator[Any]:
    """`fn` of each unit, in order, in `count` processes that end with this one; pickles `fn`."""
    if world()[1] > 1:
        raise UsageError("--jobs: needs a single process; start it without torchrun")
    flag, threads = stop.flag, max(1, torch.get_num_threads() // count)
    with ProcessPoolExecutor(count, get_context("spawn"), start_worker, (flag, threads)) as pool:
        try:
            yield from pool.map(fn, units)
        finally:  # where one run failed, the others save and stop
            asked, flag.value = flag.value, flag.value or signal.SIGTERM
            pool.shutdown()
            flag.value = asked


def start_worker(flag: Any, threads: int) -> None:
    """Set up a process of `jobs`: it hears of a stop by the flag, and ends if its parent has."""
    threading.Thread(target=end_with, args=[parent_process()], daemon=True).start()
    start()
    stop.flag = flag
    torch.set_num_threads(threads)


def end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
