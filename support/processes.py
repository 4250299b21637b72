"""Program: signals that stop a run, and several processes for one run or for many."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import RawValue, get_context, parent_process
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from support.errors import UsageError

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class World(NamedTuple):
    """The processes that share each batch. Process 0 writes the files."""

    rank: int  # which of them this one is
    size: int


def world() -> World:
    """This process among those of torchrun; without torchrun, 0 of 1."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(0, 1)


def own_part(n: int) -> slice:
    """This process's part of n images: contiguous, in order of ranks, sizes differ by at most 1."""
    rank, size = world()
    # Rounding down at both ends, so that each part begins where the one before it ends.
    return slice(n * rank // size, n * (rank + 1) // size)


def gather(rows: Tensor) -> Tensor:
    """All processes' rows, many or few, in order of ranks, on the CPU."""
    size = world().size
    if size == 1:
        return rows.cpu()
    parts = [rows] * size
    dist.all_gather_object(parts, rows.cpu())  # as objects: the numbers of rows may differ
    return torch.cat(parts)


def wait_for_all() -> None:
    """Return once every process has called this."""
    gather(torch.empty(0))


class Stopped(BaseException):
    """Raised when a requested stop takes effect and all is saved; arguments: signal, message.

    It is no Exception, so that no `except Exception` on its way, ours or a library's, catches it.
    """


class Stop:
    """The request to stop: a first signal lets the alternation or epoch end, a second one not."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget what was heard."""
        # The number of the signal, 0 for none; in memory that the processes of `jobs` can share.
        self.flag: ctypes.c_int = RawValue("i", 0)
        self.heard_at = 0.0  # when this process itself heard it
        self.answers = False  # whether this process answers a signal on stderr

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """What a signal calls."""
        # A Ctrl-C reaches the processes of `jobs`, too: there it is the first one, although the
        # parent may have set the flag. torchrun repeats it: within a second it is one request.
        is_repeated = self.flag.value != 0 and self.heard_at != 0.0
        if is_repeated and time.monotonic() - self.heard_at > 1:
            say("stopped at once; the same command goes on from what was saved last")
            os._exit(128 + number)  # not an exception, which a library might catch
        self.flag.value = number
        self.heard_at = time.monotonic()
        if self.answers:
            say(self.notice())

    def notice(self) -> str:
        """What a person is told who has asked to stop."""
        again = "; Ctrl-C again leaves now" if self.flag.value == signal.SIGINT else ""
        return f"stopping once this epoch or alternation is saved{again}"

    def agreed(self) -> int:
        """The signal to stop, 0 for none; the same in all processes, which wait for each other."""
        flags = gather(torch.tensor([self.flag.value]))
        return int(flags.max())  # a signal that a single process heard counts for all


def say(text: str) -> None:
    """Write a line on stderr from within a signal handler, where `print` is not safe."""
    with suppress(OSError):  # the terminal may be closed
        cursor = "\x1b[?25h\n" if os.isatty(2) else ""  # show it again, since bars hide it
        os.write(2, f"{cursor}{text}\n".encode())


stop = Stop()
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # Ctrl-C, kill, closed terminal, Slurm's end


def make_ready() -> None:
    """Make this process ready for runs: it hears signals, and joins the others of torchrun."""
    stop.renew()
    for number in signal.Signals:  # those that this system has
        # What is ignored stays so: `nohup` lets a run outlive its terminal.
        if number.name in SIGNALS and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop.hear)
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # torchrun says so
    if several and world().size == 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend)
        wait_for_all()  # process 0 is where they meet: it must not end, by an error, before that


def leave() -> None:
    """Part from torchrun's other processes, once all of them are finished.

    Threads of the group that are still there when Python ends abort the process, now and then. A
    process that failed must not come here: the others would wait for it.
    """
    if world().size > 1:
        wait_for_all()
        dist.destroy_process_group()


def jobs(fn: Callable[[Unit], Result], units: Sequence[Unit], count: int) -> Iterator[Result]:
    """Yield `fn` of each unit, in order, from `count` processes that end with this one.

    They are new processes, so `fn` and the units are pickled. Where one unit fails, the others save
    and stop.
    """
    if world().size > 1:
        raise UsageError("--jobs: needs a single process; start it without torchrun")
    threads = max(1, torch.get_num_threads() // count)
    context = get_context("spawn")  # a forked copy of a process with CUDA or threads cannot work
    worker_arguments = (stop.flag, threads, count)
    with ProcessPoolExecutor(count, context, start_worker, worker_arguments) as pool:
        try:
            yield from pool.map(fn, units)
        except BaseException:
            # All processes read this flag. Where nobody asked to stop, it is set for the others
            # only, and taken back: this process itself ends with the error.
            signal_heard = stop.flag.value
            if not signal_heard:
                stop.flag.value = signal.SIGTERM
            pool.shutdown()  # this waits for them
            stop.flag.value = signal_heard
            raise


def start_worker(flag: ctypes.c_int, threads: int, count: int) -> None:
    """Set up a process of `jobs`: it hears of a stop by the flag, and ends if its parent has."""
    threading.Thread(target=exit_after, args=[parent_process()], daemon=True).start()
    make_ready()
    stop.flag = flag  # the parent's, in place of the one that `make_ready` has made
    torch.set_num_threads(threads)
    # torchrun sets this too: `data.count_workers` shares the cores among so many processes.
    os.environ["LOCAL_WORLD_SIZE"] = str(count)


def exit_after(parent: BaseProcess) -> None:
    """Wait until the parent has ended, even by kill -9, and end this process at once."""
    parent.join()
    os._exit(1)  # sys.exit would end this thread only
