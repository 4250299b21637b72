"""Run directories, and how a run is stopped and goes on; nothing of the method is here.

    files      atomic writing; `reading` and `checking` turn an error into one line
    `jobs`     runs side by side
    `Run`      a run directory

A run directory holds config.json (the settings), env.json (command, versions, machine, digests of
the data), metrics.jsonl (a line an alternation or epoch), checkpoint.pt while the run is not
finished and result.json once it is. The same command, given again, goes on where it stopped.
"""

import hashlib
import io
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from config import RunError, Settings, UsageError
from training import Stopped, barrier, rank, stop, world_size

T = TypeVar("T")
R = TypeVar("R")

# --- files ------------------------------------------------------------------------------------


@contextmanager
def checking(thing: str) -> Iterator[None]:
    """Turn what the mathematics refuses into one line about a setting (UsageError)."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(f"{thing}: {error}") from error


@contextmanager
def reading(path: Path, remedy: str = "make it again") -> Iterator[None]:
    """Turn whatever a missing or damaged file raises into one line with a remedy (UsageError)."""
    try:
        yield
    except (UsageError, RunError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch.load raises anything from EOFError to UnpicklingError
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UsageError(f"{path}: cannot be read ({why}); {remedy}") from error


def read_json(path: Path, remedy: str = "make it again") -> dict[str, Any]:
    """A JSON object that this program wrote (UsageError where it is missing or damaged)."""
    with reading(path, remedy):
        return dict(json.loads(path.read_text()))


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
        why = f"cannot be written ({error.strerror}); make room or allow it"
        raise RunError(f"{path}: {why}, then give the same command again") from error


def sha256(path: Path) -> str:
    """Digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- runs side by side ------------------------------------------------------------------------


def jobs(fn: Callable[[T], R], units: Sequence[T], count: int) -> Iterator[R]:
    """`fn` of each unit, in order; in this process, or in `count` others that end with it.

    Args:
        fn: can be pickled: a function of a module, or a partial of one.
    """
    if count == 1:
        yield from map(fn, units)
        return
    context = multiprocessing.get_context("spawn")
    stop.shared = shared = context.RawValue("i", stop.asked)
    threads = max(1, (os.cpu_count() or 1) // count)
    with ProcessPoolExecutor(count, context, start_worker, (shared, threads)) as pool:
        stop.open_runs.add(pool)  # the runs are open in its processes
        try:
            yield from pool.map(fn, units)
        except BrokenProcessPool as error:
            why = "a worker process died, perhaps for want of memory; lower --jobs"
            raise RunError(f"{why} and give the same command again") from error
        finally:
            shared.value = shared.value or signal.SIGTERM  # where one failed, the others stop
            stop.shared = None
            stop.open_runs.discard(pool)


def start_worker(shared: Any, threads: int) -> None:
    """Set up a process of `jobs`: it hears of a stop by a number, and ends if its parent has."""
    stop.shared = shared
    stop.install()
    torch.set_num_threads(threads)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


# --- run directories --------------------------------------------------------------------------

LOCK, TORN = ".lock", ".*.tmp"  # TORN: of a process that was killed while it wrote
FILES = ("result.json", "metrics.jsonl", "checkpoint.pt", "backbone.pth", "adapter*.safetensors",
         "rollout.png", "similarity.png", "sweep.json", "sweep.png", "cost.png", TORN,
         "config.json", "env.json")  # fmt: skip
MAY_CHANGE = {"device", "workers", "jobs", "micro_batch", "save_minutes", "mfac_device",
              "data_root", "weights"}  # fmt: skip


class Run:
    """A run directory, made or gone on with; `result` is what a finished run came to, else None.

    Args:
        command: its name; the directory of another command is refused.
        force: start over.
        about: what defines the run beside its settings, such as digests of weights and images.
    """

    def __init__(
        self, path: Path, command: str, config: Settings, force: bool = False, **about: Any
    ) -> None:
        self.path, self.config = path, config
        self.save_seconds = 60 * getattr(config, "save_minutes", 10.0)
        self.records: list[dict[str, Any]] = []  # the lines of metrics.jsonl
        self.result: dict[str, Any] | None = None
        self.began, self.saved = clock(), time.monotonic()
        check_directory(path, command, config, force, **about)
        barrier()  # no process writes before all have looked
        if rank() == 0:
            self._open(command, force, about)
        barrier()
        stop.open_runs.add(self)
        if (path / "result.json").exists():
            self.result = read_json(path / "result.json")
            self.close()
        elif asked := stop.agreed():
            self._stop(asked, "the run before")

    def _open(self, command: str, force: bool, about: dict[str, Any]) -> None:
        with checking(f"--out {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = lock(self.path)
        # another process may have been at work until now: look again
        found = check_directory(self.path, command, self.config, force, **about)
        env: dict[str, Any] = {"command": command, "about": about, "machines": []}
        if goes_on := found and not force:
            env = read_json(self.path / "env.json")
        names = (TORN,) if goes_on else FILES
        for file in [file for name in names for file in self.path.glob(name)]:
            file.unlink(missing_ok=True)
        settings = self.config.model_dump(mode="json")
        changeable = {name: settings[name] for name in MAY_CHANGE & settings.keys()}
        env["machines"].append(environment() | changeable)
        if not (self.path / "result.json").exists():
            write_atomic(self.path / "env.json", json.dumps(env, indent=1))
            write_atomic(self.path / "config.json", json.dumps(settings, indent=1))

    def restore(self) -> dict[str, Any] | None:
        """The state to go on from, on the CPU; None: from the start. Once, before the first log."""
        path, state = self.path / "checkpoint.pt", None
        if path.exists():
            with reading(path, "--force starts the run over"):
                state = dict(torch.load(path, map_location="cpu", weights_only=True))
                self.records, spent = state.pop("records"), state.pop("spent")
                self.began = {key: start - spent[key] for key, start in self.began.items()}
        return state

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        self.records.append(json.loads(json.dumps(record)))
        self.write("metrics.jsonl", "".join(json.dumps(x) + "\n" for x in self.records))

    def checkpoint(self, state: Mapping[str, Any], done: str, due: bool = False) -> None:
        """Save if `due` or if `save_minutes` are over; where a stop was asked for, save and stop.

        Args:
            state: tensors, numbers and strings, in lists and dicts.
            done: how far the run is, for the message of Stopped: "alternation 3 of 500".
        """
        asked = stop.agreed()
        if due or asked or time.monotonic() - self.saved >= self.save_seconds:
            buffer = io.BytesIO()
            torch.save({**state, "records": self.records, "spent": self.elapsed()}, buffer)
            self.write("checkpoint.pt", buffer.getvalue())
            self.saved = time.monotonic()
        if asked:
            self._stop(asked, done)

    def _stop(self, asked: int, done: str) -> None:
        barrier()  # torchrun ends all processes when one ends: process 0 has to save first
        self.close()
        stop.asked = 0
        raise Stopped(asked, f"stopped after {done}; {self.path}: the same command goes on")

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write result.json, which says that the run is complete; returns what it holds."""
        found: dict[str, Any] = json.loads(json.dumps({**result, **self.elapsed()}))
        self.write("result.json", json.dumps(found, indent=1))
        if rank() == 0:
            (self.path / "checkpoint.pt").unlink(missing_ok=True)
        barrier()
        self.close()
        self.result = found
        return found

    def write(self, name: str, content: bytes | str) -> None:
        """Replace a file of the run."""
        if rank() == 0:
            write_atomic(self.path / name, content)

    def elapsed(self) -> dict[str, float]:
        """CPU seconds of this process and wall seconds, those before a stop included."""
        return {key: now - self.began[key] for key, now in clock().items()}

    def close(self) -> None:
        """Keep signals no longer for this run, and let other processes in."""
        stop.open_runs.discard(self)
        if rank() == 0:
            os.close(self.lock)


def clock() -> dict[str, float]:
    return {"cpu_seconds": time.process_time(), "seconds": time.monotonic()}


def check_directory(
    path: Path, command: str, config: Settings, force: bool = False, **about: Any
) -> bool:
    """Whether `path` holds a run to go on with; refuses (UsageError) what it must not touch."""
    out = f"--out {path}"
    if path.exists() and not path.is_dir():
        raise UsageError(f"{out}: is a file, give a directory")
    if not (path / "config.json").exists():
        for file in path.glob("*"):  # a run that was killed as it began has these two
            if file.name not in (LOCK, "env.json") and not file.match(TORN):
                raise UsageError(f"{out}: holds {file.name}, no run; choose an empty directory")
        return False
    env = read_json(path / "env.json", "choose another --out")
    if env.get("command") != command:
        raise UsageError(f"{out}: is a run of `{env.get('command')}`, choose another --out")
    if force:
        return True
    again = "choose another --out, or start over with --force"
    if "about" not in env:
        raise UsageError(f"{out}: is a run of an older version; {again}")
    before = read_json(path / "config.json") | env["about"]
    now = config.model_dump(mode="json") | json.loads(json.dumps(about))
    names = [name for name in now if name not in MAY_CHANGE and before.get(name) != now[name]]
    if names:
        changes = ", ".join(f"{name} {before.get(name)} -> {now[name]}" for name in names)
        raise UsageError(f"{out}: is a run with other settings: {changes}; {again}")
    return True


def lock(path: Path) -> int:
    """An open file that keeps other processes out of a directory; waits a minute for one in it."""
    file = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        import fcntl
    except ImportError:  # Windows
        return file
    for _ in range(60):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(1)
        except OSError:  # a file system without locks
            return file
    os.close(file)
    raise UsageError(f"--out {path}: another process is at work in it; wait, or choose another")


def environment() -> dict[str, Any]:
    """Command line, versions, machine and, in a checkout, the commit: what a number needs."""
    commit = ""
    with suppress(OSError):  # no git on this machine
        git, here = ["git", "rev-parse", "HEAD"], Path(__file__).parent
        commit = subprocess.run(git, cwd=here, capture_output=True, text=True, check=False).stdout
    packages = ("torch", "torchvision", "timm", "pydantic", "numpy", "safetensors")
    return {
        "argv": sys.argv,
        "commit": commit.strip(),
        "versions": {name: version(name) for name in packages} | {"python": sys.version.split()[0]},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "processes": world_size(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
