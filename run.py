"""What every command that computes stands on; nothing of the method is here.

    files        `write_atomic`, `read_json`; `reading` and `checking` turn an error into one line
    training     `Schedule`, `Optimiser`
    processes    `torchrun` starts them, they share every batch; `jobs` runs whole runs side by side
    `stop`       Ctrl-C and its like: finish the alternation or epoch, save, leave
    `Run`        a run directory

A run directory holds config.json (the settings, flat), env.json (command, versions, machine, digests
of the data), metrics.jsonl (a line an alternation or epoch), checkpoint.pt while the run is not
finished and result.json once it is. The same command, given again, goes on where it stopped.
"""

import hashlib
import importlib.metadata
import io
import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from config import Machine, RunError, UsageError

T = TypeVar("T")
R = TypeVar("R")

# --- files ------------------------------------------------------------------------------------


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file, or leave it as it was (RunError): write another one, then rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        why = f"cannot be written ({error.strerror}); what was there is unchanged"
        raise RunError(
            f"{path}: {why}; make room or allow it, then run the command again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that this program wrote (UsageError where it is missing or damaged)."""
    with reading(path):
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("is no JSON object")
    return found


def sha256(path: Path) -> str:
    """Digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def reading(path: Path, remedy: str = "make it again") -> Iterator[None]:
    """Turn what a missing or damaged file raises into one line with a remedy (UsageError)."""
    try:
        yield
    except (UsageError, RunError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch.load raises anything from EOFError to UnpicklingError
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UsageError(f"{path}: cannot be read ({why}); {remedy}") from error


@contextmanager
def checking(thing: str) -> Iterator[None]:
    """Turn what the mathematics refuses into one line about a setting (UsageError)."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(f"{thing}: {error}") from error


# --- training ---------------------------------------------------------------------------------


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:1 -> a device that is there (UsageError otherwise).

    Under torchrun, `auto` and `cuda` give each process a GPU of its own.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"--device {name}: is no device, give auto, cpu, cuda or cuda:1"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: not supported, give auto, cpu, cuda or cuda:1")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: is not on this machine, try --device cpu") from error
    return device


class Schedule(NamedTuple):
    """Linear warm-up, then half a cosine (App. C.2, C.3; the exact form is the released one)."""

    total: int  # N, optimiser steps
    warmup: int  # W
    end: float  # e, the rate of the last step

    def __call__(self, k: int, base: float) -> float:
        """Rate of step k = 1 .. N from the base rate b.

            k ≤ W:  b k / (W + 1)
            k > W:  c b + (1 − c) e,   c = (1 + cos(π (k − W − 1) / (N − W − 1))) / 2

        >>> [round(Schedule(total=5, warmup=1, end=0.0)(k, 1.0), 3) for k in range(1, 6)]
        [0.5, 1.0, 0.75, 0.25, 0.0]
        """
        if k <= self.warmup:
            return base * k / (self.warmup + 1)
        progress = (k - self.warmup - 1) / max(1, self.total - self.warmup - 1)
        c = (1 + math.cos(math.pi * progress)) / 2
        return c * base + (1 - c) * self.end


def constant(k: int, base: float) -> float:
    """The same rate at every step."""
    return base


class Group(NamedTuple):
    """Tensors that share a base rate and a weight decay."""

    tensors: list[Tensor]
    lr: float
    weight_decay: float


def decay_groups(named: Mapping[str, Tensor], lr: float, weight_decay: float) -> list[Group]:
    """Rule of MAE and I-JEPA: vectors and biases are not decayed (the mask token is, it is 3-D)."""
    plain = [name for name, tensor in named.items() if tensor.ndim <= 1 or name.endswith(".bias")]
    return [
        Group([tensor for name, tensor in named.items() if name not in plain], lr, weight_decay),
        Group([named[name] for name in plain], lr, 0.0),
    ]


class Optimiser:
    """opt_P or opt_D of Algorithm 1: a torch optimiser with a schedule and joint clipping.

    Args:
        groups: what is trained; tensors are updated in place.
        schedule: (step from 1, base rate) -> rate.
        betas: AdamW's; None is SGD with momentum 0.9, as released.
        clip: largest L2 norm of all gradients together; None: no clipping.
        decay: the schedule of the weight decay.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        schedule: Callable[[int, float], float],
        betas: tuple[float, float] | None,
        clip: float | None = None,
        decay: Callable[[int, float], float] = constant,
    ) -> None:
        self.schedule, self.clip, self.decay, self.step = schedule, clip, decay, 0
        self.groups = [group for group in groups if group.tensors]
        params = [{"params": group.tensors} for group in self.groups]
        self.torch: torch.optim.Optimizer
        if betas is None:
            self.torch = torch.optim.SGD(params, lr=0.0, momentum=0.9)
        else:
            fused = self.groups[0].tensors[0].device.type in ("cpu", "cuda")
            self.torch = torch.optim.AdamW(params, lr=0.0, betas=betas, eps=1e-8, fused=fused)

    def update(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """One step on (tensor, gradient) pairs; returns the joint norm before clipping, a scalar.

        The gradients are used up: clipping scales them in place.
        """
        tensors = []
        for tensor, gradient in pairs:
            tensor.grad = gradient.contiguous()  # fused AdamW reads in the order of storage
            tensors.append(tensor)
        norm = torch.nn.utils.clip_grad_norm_(tensors, self.clip or math.inf)
        self.step += 1
        for params, group in zip(self.torch.param_groups, self.groups, strict=True):
            params["lr"] = self.schedule(self.step, group.lr)
            params["weight_decay"] = self.decay(self.step, group.weight_decay)
        self.torch.step()
        self.torch.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "torch": self.torch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.torch.load_state_dict(state["torch"])


def trainable(
    tensors: Mapping[str, Tensor], device: torch.device | None = None
) -> dict[str, Tensor]:
    """Fresh leaf copies that a gradient can be taken for."""
    return {
        name: tensor.detach().contiguous().to(device, copy=True).requires_grad_()
        for name, tensor in tensors.items()
    }


# --- processes that share every batch (torchrun) ----------------------------------------------


def start_processes() -> None:
    """Join the processes that torchrun has started; nothing to do without it."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1" or world_size() > 1:
        return
    backend = "gloo"
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend)
    except (ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"WORLD_SIZE {size}: the processes do not meet ({why})") from error


def world_size() -> int:
    """How many processes share each batch."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is; process 0 writes the files."""
    return dist.get_rank() if world_size() > 1 else 0


def share(n: int) -> slice:
    """This process's part of n images: contiguous, in order of ranks, sizes differ by one at most."""
    return slice(n * rank() // world_size(), n * (rank() + 1) // world_size())


def gather(rows: Tensor) -> Tensor:
    """Rows of all processes in order of ranks, on the CPU; numbers of rows may differ."""
    if world_size() == 1:
        return rows.cpu()
    found: list[Any] = [None] * world_size()
    with talking():
        dist.all_gather_object(found, rows.cpu())
    return torch.cat(found)


def barrier() -> None:
    """Wait until all processes are here."""
    if world_size() > 1:
        with talking():
            dist.barrier()


@contextmanager
def talking() -> Iterator[None]:
    """A process that ended leaves the others with this line (RunError); torchrun shows its own."""
    try:
        yield
    except RuntimeError as error:
        why = "another process of this run ended, see its own message"
        raise RunError(f"{why}; then give the same command again") from error


# --- stopping ---------------------------------------------------------------------------------

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
           if hasattr(signal, name)]  # fmt: skip


class Stopped(BaseException):
    """A stop that was asked for, all saved. Not an Exception, so that no handler swallows it."""

    def __init__(self, number: int, where: str) -> None:
        super().__init__(number, where)
        self.number, self.where = number, where


class Stop:
    """A signal asks an open run to save after its alternation or epoch; a second one ends it at once.

    Where no run is open, the first one ends the program.
    """

    def __init__(self) -> None:
        self.asked, self.open_runs, self.heard = 0, 0, 0.0
        self.shared: Any = None  # a number that workers of `jobs` see, too

    def install(self) -> None:
        """Take over this program's signals."""
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        again = self.asked and time.monotonic() - self.heard > 1  # torchrun passes a Ctrl-C on
        if again or not self.open_runs:
            with suppress(
                OSError
            ):  # the terminal may be gone; a progress bar has hidden its cursor
                os.write(2, b"\x1b[?25h\nstopped\n" if os.isatty(2) else b"stopped\n")
            os._exit(128 + number)
        if not self.asked:
            self.asked, self.heard = number, time.monotonic()
        if self.shared is not None:
            self.shared.value = number

    def agreed(self) -> int:
        """The signal to stop, 0 for none; the same in all processes."""
        asked = self.asked or (self.shared.value if self.shared is not None else 0)
        if world_size() > 1:
            box = torch.tensor(asked)
            with talking():
                dist.all_reduce(box, dist.ReduceOp.MAX)
            asked = int(box)
        return int(asked)


stop = Stop()


def jobs(fn: Callable[[T], R], units: Sequence[T], count: int) -> Iterator[R]:
    """`fn` of each unit in order, in this process or in `count` others; `fn` can be pickled.

    The others stop when this process is asked to, and end with it.
    """
    if count == 1:
        yield from map(fn, units)
        return
    context = multiprocessing.get_context("spawn")
    stop.shared = shared = context.RawValue("i", stop.asked)
    threads = max(1, (os.cpu_count() or 1) // count)
    try:
        with ProcessPoolExecutor(count, context, start_worker, (shared, threads)) as pool:
            with deaf():
                results = pool.map(fn, units)
            try:
                yield from results
            except BaseException:
                shared.value = shared.value or signal.SIGTERM  # the others need not go on
                raise
    except BrokenProcessPool as error:
        why = "a worker process died, perhaps for want of memory"
        raise RunError(f"{why}; lower --jobs and give the same command again") from error
    finally:
        stop.shared = None


def start_worker(shared: Any, threads: int) -> None:
    """Make a worker process deaf to signals, which its parent hears; it ends with its parent."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    stop.shared = shared
    torch.set_num_threads(threads)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def deaf() -> Iterator[None]:
    """Signals wait, also in processes that are started here until `start_worker`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    ensure_running()  # starts a helper process, which would let signals in again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# --- run directories --------------------------------------------------------------------------

LOCK = ".lock"
FILES = ("result.json", "metrics.jsonl", "checkpoint.pt", "backbone.pth", "adapter*.safetensors",
         ".*.tmp", "config.json", "env.json")  # fmt: skip
MAY_CHANGE = {
    "device",
    "workers",
    "jobs",
    "micro_batch",
    "save_minutes",
    "mfac_device",
    "data_root",
}


class Run:
    """A run directory, made or gone on with.

    result      what a finished run came to; None: there is work to do
    records     the lines of metrics.jsonl, as far as the checkpoint knows them

    Args:
        command: its name; another command's directory is refused.
        force: start over, whatever is there.
        about: what defines the run beside its settings, such as digests of weights and images.
    """

    def __init__(
        self, path: Path, command: str, config: Machine, force: bool = False, **about: Any
    ) -> None:
        self.path, self.config = path, config
        check_directory(path, command, config, force, **about)
        barrier()  # no process writes before all have looked
        if rank() == 0:
            self._open(command, force, about)
        barrier()
        self.result = read_json(path / "result.json") if (path / "result.json").exists() else None
        self._state = None if self.result else self._load()
        last = None if self.result else self._state["records"] if self._state else 0
        self.records = read_metrics(path, last)
        spent = self._state["spent"] if self._state else (0.0, 0.0)
        self._began = time.process_time() - spent[0], time.monotonic() - spent[1]
        self._saved = time.monotonic()
        if self.result is None:
            self.write("metrics.jsonl", "".join(json.dumps(x) + "\n" for x in self.records))
            stop.open_runs += 1

    def _open(self, command: str, force: bool, about: dict[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            weakref.finalize(self, os.close, lock(self.path))
        except OSError as error:
            what = f"--out {self.path}: cannot be made ({error.strerror})"
            raise UsageError(f"{what}, choose another --out") from error
        # again: another process may have been at work here until it gave up the lock
        found = check_directory(self.path, command, self.config, force, **about)
        now = environment()
        if found and not force:
            if (self.path / "result.json").exists():
                return
            env = read_json(self.path / "env.json")
            now["changed"] = differences(self.path, self.config, MAY_CHANGE)
            env["continued"] = [*env.get("continued", []), now]
        else:
            remove_runs(self.path)
            env = {"command": command, **now, **about}
        write_atomic(self.path / "env.json", json.dumps(env, indent=1))
        settings = self.config.model_dump(mode="json")
        write_atomic(self.path / "config.json", json.dumps(settings, indent=1))

    def _load(self) -> dict[str, Any] | None:
        path = self.path / "checkpoint.pt"
        if not path.exists():
            return None
        with reading(path, "--force starts the run over"):
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            int(state["records"]), float(state["spent"][1])
        return state

    def restore(self) -> dict[str, Any] | None:
        """The state to go on from, on the CPU; None: from the start. Handed out once."""
        state, self._state = self._state, None
        return state

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self.records.append(json.loads(json.dumps(record)))
        if rank() == 0:
            try:
                with (self.path / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                what = f"{self.path}/metrics.jsonl: cannot be written ({error.strerror})"
                raise RunError(f"{what}; make room, then give the same command again") from error

    def checkpoint(self, state: Mapping[str, Any], done: str, due: bool = False) -> None:
        """Save the state if `due`, if `save_minutes` are over, or if a stop was asked for: then Stopped.

        Args:
            state: tensors, numbers and strings, in lists and dicts.
            done: how far the run is, for the message: "alternation 3 of 500".
        """
        asked = stop.agreed()
        late = time.monotonic() - self._saved >= 60 * self.config.save_minutes
        if due or late or asked:
            buffer, spent = io.BytesIO(), [*self.elapsed().values()]
            torch.save({**state, "records": len(self.records), "spent": spent}, buffer)
            self.write("checkpoint.pt", buffer.getvalue())
            self._saved = time.monotonic()
        if asked:
            barrier()  # torchrun ends all processes when one ends: process 0 has to save first
            self.close()
            stop.asked = 0
            where = f"stopped after {done}; {self.path}: the same command goes on"
            raise Stopped(asked, where)

    def write(self, name: str, content: bytes | str) -> None:
        """Replace a file of the run."""
        if rank() == 0:
            write_atomic(self.path / name, content)

    def elapsed(self) -> dict[str, float]:
        """CPU seconds of this process and wall seconds, those before a stop included."""
        cpu, wall = self._began
        return {"cpu_seconds": time.process_time() - cpu, "seconds": time.monotonic() - wall}

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write result.json, which says that the run is complete; returns what it holds."""
        self.result = json.loads(json.dumps({**result, **self.elapsed()}))
        self.write("result.json", json.dumps(self.result, indent=1))
        if rank() == 0:
            (self.path / "checkpoint.pt").unlink(missing_ok=True)
        self.close()
        barrier()
        return self.result

    def close(self) -> None:
        """The run no longer listens to signals."""
        stop.open_runs -= 1


def check_directory(
    path: Path, command: str, config: Machine, force: bool = False, **about: Any
) -> bool:
    """Whether there is a run to go on with; refuses (UsageError) what is something else. Reads only."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {path}: is a file, give a directory")
    if not ((path / "config.json").exists() and (path / "env.json").exists()):
        ours = (LOCK, "env.json")  # all that is there if a run was killed as it began
        names = [file.name for file in path.iterdir()] if path.is_dir() else []
        if any(name not in ours and not name.endswith(".tmp") for name in names):
            what = f"--out {path}: holds files of something else"
            raise UsageError(f"{what}, choose a new or empty directory")
        return False
    env = read_json(path / "env.json")
    if env.get("command") != command:
        what = f"--out {path}: is a run of `{env.get('command')}`"
        raise UsageError(f"{what}, choose another --out")
    if force:
        return True
    again = "choose another --out, or start it over with --force"
    if any(isinstance(value, dict) for value in read_json(path / "config.json").values()):
        raise UsageError(f"--out {path}: is a run of an older version; {again}")
    skipped = MAY_CHANGE | ({"weights"} if "weights_sha256" in about else set())
    names = type(config).model_fields.keys() - skipped
    changed = differences(path, config, names)
    now = json.loads(json.dumps(about))
    changed += [f"{key} {env.get(key)} -> {x}" for key, x in now.items() if env.get(key) != x]
    if changed:
        raise UsageError(f"--out {path}: is a run with {', '.join(changed)}; {again}")
    return True


def differences(path: Path, config: Machine, names: Iterable[str]) -> list[str]:
    """Which of these settings differ between `path`/config.json and `config`: `name there -> here`."""
    before, now = read_json(path / "config.json"), config.model_dump(mode="json")
    return [
        f"{name} {before.get(name)} -> {now[name]}"
        for name in sorted(names)
        if name in now and before.get(name) != now[name]
    ]


def remove_runs(path: Path) -> None:
    """Delete what this program wrote in a run directory and in the runs that it holds, by name."""
    runs = [file.parent for file in path.rglob("env.json")]
    for run in sorted(runs, key=lambda run: len(run.parts), reverse=True):
        for file in [file for name in FILES for file in run.glob(name)]:
            file.unlink(missing_ok=True)


def lock(path: Path) -> int:
    """An open file that keeps other processes out of a directory; waits a minute for one in it."""
    number = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        import fcntl
    except ImportError:  # Windows
        return number
    for _ in range(60):
        try:
            fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number
        except BlockingIOError:
            time.sleep(1)
        except OSError:  # a file system without locks
            return number
    os.close(number)
    raise UsageError(
        f"--out {path}: another process is at work in it, wait or choose another --out"
    )


def read_metrics(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """The first `count` lines of a run's metrics.jsonl, or all."""
    file = path / "metrics.jsonl"
    with reading(file, "--force starts the run over"):
        lines = file.read_text().splitlines() if file.exists() else []
        if count is not None and len(lines) < count:
            raise ValueError(f"{len(lines)} lines of {count}")
        return [dict(json.loads(line)) for line in lines[:count]]


def environment() -> dict[str, Any]:
    """Command line, versions, machine and, in a checkout, the commit: what a number is traced by."""
    commit = None
    with suppress(OSError):  # no git on this machine
        asked = ["git", "rev-parse", "HEAD"]
        here = Path(__file__).parent
        commit = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=False).stdout
    packages = ("torch", "torchvision", "timm", "pydantic", "numpy", "safetensors")
    return {
        "argv": sys.argv,
        "commit": (commit or "").strip() or None,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processes": world_size(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
