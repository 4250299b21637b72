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

Unit = TypeVar("Unit")  # a piece of work for `run_in_processes`, such as a trial of fine-tuning
Result = TypeVar("Result")


class World(NamedTuple):
    """This process among those that share each batch. The process of rank 0 writes the files."""

    rank: int  # 0 ... size - 1
    size: int  # how many processes there are


def world() -> World:
    """Return the place of this process among those of torchrun; without torchrun it is 0 of 1."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(0, 1)


def own_part(n: int) -> slice:
    """Return which of n images this process works on: 0:4, 4:9 if two processes share 9 images.

    Parts are in the order of ranks, and differ in length by at most 1.
    """
    rank, size = world()
    # Both ends are rounded down, so that each part begins where the one before it ends.
    return slice(n * rank // size, n * (rank + 1) // size)


def gather(rows: Tensor) -> Tensor:
    """Return the rows of all processes, on the CPU, in the order of ranks.

    `rows` are those of this process, (n, ...); n may differ between processes. Each process waits
    here for the others.
    """
    size = world().size
    if size == 1:
        return rows.cpu()
    parts = [rows] * size  # only their number counts: `all_gather_object` replaces each of them
    # Afterwards, `parts` has the rows of each process. Objects may differ in shape, which the
    # tensors of `dist.all_gather` may not.
    dist.all_gather_object(parts, rows.cpu())
    return torch.cat(parts)  # (sum of all n, ...)


def wait_for_all() -> None:
    """Return once every process has called this."""
    gather(torch.empty(0))  # gathers no rows; each process waits here for the others


class Stopped(BaseException):
    """Raised after a signal, once the run is saved. Its arguments are the signal and a message.

    It is no Exception, so that no `except Exception` on its way, ours or a library's, catches it.
    """


class Stop:
    """The request to stop the runs of this process, which a signal such as Ctrl-C makes.

    After a first signal the alternation or epoch ends and is saved; a second one ends at once.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Be as at the start: no signal was heard, and this process answers none on stderr."""
        # The number of the signal that was heard, 0 without one; in memory that workers share. The
        # memory is new: processes that were forked from one would share the old, and stop together.
        self.signal_number: ctypes.c_int = RawValue("i", 0)
        self.heard_at: float | None = None  # when this process itself heard a signal, in seconds
        self.prints_notice = False  # whether this process answers a signal on stderr

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: ask the runs to stop, or end at once if one was heard before.

        Python calls this with the signal's number, such as 2 for Ctrl-C, and a frame.
        """
        # Whether this process heard one before: `signal_number` may be that of another process, as
        # one Ctrl-C reaches parent and workers, who share it.
        now = time.monotonic()  # seconds on a clock
        was_heard_before = self.heard_at is not None
        # torchrun sends its processes a Ctrl-C that they have heard already, at once.
        is_repetition = self.heard_at is not None and now - self.heard_at <= 1
        if was_heard_before and not is_repetition:
            print_in_handler("stopped at once; the same command goes on from what was saved last")
            os._exit(128 + number)  # not an exception, which a library might catch
        self.signal_number.value = number
        self.heard_at = now
        if self.prints_notice:
            print_in_handler(self.notice())

    def notice(self) -> str:
        """Return the answer to a signal, for people."""
        is_ctrl_c = self.signal_number.value == signal.SIGINT
        again = "; Ctrl-C again leaves now" if is_ctrl_c else ""
        return f"stopping once this epoch or alternation is saved{again}"

    def agree_on_signal(self) -> int:
        """Return the number of a signal that any of torchrun's processes heard, 0 without one.

        Each process waits here for the others, so that all stop after the same step.
        """
        numbers = gather(torch.tensor([self.signal_number.value]))  # of each process
        return int(numbers.max())


def print_in_handler(text: str) -> None:
    """Print a line on stderr from a signal handler, where Python's `print` is not safe."""
    with suppress(OSError):  # the terminal may be closed
        show_cursor = "\x1b[?25h\n" if os.isatty(2) else ""  # bars on a terminal hide the cursor
        os.write(2, f"{show_cursor}{text}\n".encode())


stop = Stop()
SIGNALS = (
    "SIGINT",  # Ctrl-C
    "SIGTERM",  # the command `kill`
    "SIGHUP",  # the terminal was closed
    "SIGUSR1",  # Slurm, before a job's time is over
)


def make_ready() -> None:
    """Make this process ready for runs: it hears signals, and joins torchrun's other processes.

    It may be called again before a second run in the same process: a signal that was heard in the
    first run does not stop the second.
    """
    stop.reset()
    listen_for_signals()
    join_torchrun()


def listen_for_signals() -> None:
    """Have `stop` hear the SIGNALS that this system has and that are not ignored."""
    for number in signal.Signals:  # all that this system has: Windows lacks some of SIGNALS
        # A signal that is ignored stays so: `nohup` lets a run outlive its terminal.
        is_ignored = signal.getsignal(number) == signal.SIG_IGN
        if number.name in SIGNALS and not is_ignored:
            signal.signal(number, stop.hear)  # from now on, Python calls this at the signal


def join_torchrun() -> None:
    """Join the other processes, if torchrun has started this one and it has not joined yet."""
    is_torchrun = os.environ.get("WORLD_SIZE", "1") != "1"  # torchrun sets it
    has_joined = world().size > 1
    if is_torchrun and not has_joined:
        # gloo and nccl carry tensors between processes, those on the CPU and those on GPUs.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend)
        # The others join by way of process 0, so it must not end, by an error, before they have.
        wait_for_all()


def leave_group() -> None:
    """Part from torchrun's other processes, once all of them have called this.

    Without it, threads of the group are still there when Python ends, and sometimes abort the
    process. A process that failed must not call this: it and the others would wait for each other.
    """
    if world().size > 1:
        wait_for_all()
        # Before torch 2.8, the next call holds Python's lock while it waits for the threads of the
        # group, and one of these may still need the lock to drop its last tensor. So without a
        # pause, both would wait for ever (pytorch/pytorch#154976).
        time.sleep(0.1)
        dist.destroy_process_group()


def run_in_processes(
    function: Callable[[Unit], Result], units: Sequence[Unit], count: int
) -> Iterator[Result]:
    """Yield `function(unit)` for each unit, in order, while `count` workers compute the results.

    A worker is a new process, so the function and the units are pickled. It ends with this process.

    1. Refuse several processes of torchrun, by a UsageError.
    2. Start the workers. A signal that `stop` hears in this process is known to all of them. Each
       has an equal share of the number of torch's threads here.
    3. Yield each result as soon as it and those before it are there.
    4. If one unit fails, let the other workers save and stop, then raise its error.
    """
    if world().size > 1:
        raise UsageError("--jobs: needs a single process; start it without torchrun")

    threads_per_worker = max(1, torch.get_num_threads() // count)
    with ProcessPoolExecutor(
        max_workers=count,
        mp_context=get_context("spawn"),  # a forked copy with CUDA or threads cannot work
        initializer=start_worker,  # each worker calls it first, with these arguments
        initargs=(stop.signal_number, threads_per_worker, count),
    ) as pool:
        try:
            yield from pool.map(function, units)
        except BaseException:  # a unit failed, or it was stopped by a signal
            stop_workers(pool)
            raise


def stop_workers(pool: ProcessPoolExecutor) -> None:
    """Let all workers save and stop, and wait until they have ended."""
    signal_heard = stop.signal_number.value  # such as 2 for Ctrl-C; 0: none
    if not signal_heard:
        stop.signal_number.value = signal.SIGTERM  # workers read it, as if a signal had come
    pool.shutdown()  # this waits for their end
    stop.signal_number.value = signal_heard  # 0 again, or later runs of this process would stop


def start_worker(signal_number: ctypes.c_int, threads: int, count: int) -> None:
    """Set up this process as a worker: it stops if its parent hears a signal, and ends with it.

    `signal_number` is the parent's, in shared memory; it is not 0 once all shall stop. `threads` is
    the number of torch's threads in this process, `count` the number of workers.
    """
    # A thread waits for the end of the parent; as a daemon, it does not keep this process alive.
    threading.Thread(target=exit_after, args=[parent_process()], daemon=True).start()
    make_ready()
    stop.signal_number = signal_number  # instead of that which `make_ready` has just made
    torch.set_num_threads(threads)
    # `data.count_workers` divides the cores by this number, which torchrun sets, too.
    os.environ["LOCAL_WORLD_SIZE"] = str(count)


def exit_after(parent: BaseProcess) -> None:
    """Wait until the parent has ended, even by kill -9, then end this process at once."""
    parent.join()
    os._exit(1)  # sys.exit would end this thread only
