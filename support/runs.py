"""Run directories, how a run is stopped and goes on, and processes that share its batches.

A run directory holds config.json (the settings), env.json (command, versions, machine, digests of
weights, labels and file names), metrics.jsonl (a line per alternation or epoch, in pretraining per
500 steps at most), checkpoint.pt while the run is not finished and result.json once it is. The same
command, given again, goes on where it stopped.
"""

import hashlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from config import Record
from support.errors import RunError, UsageError, checking
from support.processes import Stopped, gather, stop, world

LOG = logging.getLogger("bisslight")


def read_json(path: Path, remedy: str = "make it again") -> Record:
    """A JSON object (UsageError where it is missing or damaged)."""
    with checking(str(path), remedy):
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
        with suppress(OSError):  # there may be none, or the disk may be read-only
            temporary.unlink()
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); make room or allow it, then give the "
            "same command again"
        ) from error


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Track = Callable[..., Iterator[Any]]  # (items, total, label, done=0) -> items, showing how far


def untracked(items: Iterator[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
    """Shows nothing. `items` are number `done` + 1 to `total` of what `label` names."""
    return items


LOCK, TORN = ".lock", ".*.[0-9]*.tmp"  # TORN: of a process that was killed while it wrote
SEARCH = ("lr*-s[0-9]*", "dlr[0-9]*")  # the runs of a search for a rate
FILES = ("result.json", "metrics.jsonl", "checkpoint.pt", "backbone.pth", "adapter.safetensors",
         "adapter-s*.safetensors", "rollout.png", "sweep.json", "sweep.png",
         "config.json", "env.json")  # fmt: skip
PACKAGES = ("torch", "torchvision", "timm", "pydantic", "numpy", "safetensors")
MAY_CHANGE = {"device", "workers", "jobs", "micro_batch", "save_minutes", "mfac_device",
              "data_root", "weights", "start"}  # fmt: skip


class Run(ExitStack):
    """A run directory, new or continued, locked against others; `result`: of one that is finished.

    The directory of another command is refused. So is one of other settings, or of another `about`
    (what else defines a run: digests of weights and images), unless `force` starts it over.
    """

    def __init__(
        self, path: Path, command: str, config: Any, force: bool = False, **about: Any
    ) -> None:
        super().__init__()
        self.path, self.config = path, config
        self.records: list[Record] = []  # the lines of metrics.jsonl
        self.began, self.saved = (time.process_time(), time.monotonic()), time.monotonic()
        self.kept: tuple[list[Tensor], list[Any]] = [], []
        files = {"out": "", "adapter": "adapter.safetensors", "weights": "backbone.pth"}
        self.place = {name: str(path / file) for name, file in files.items()}  # it may be moved
        result = path / "result.json"
        check_directory(path, command, config, force, **about)
        gather()  # no process writes before all have looked
        if world()[0] == 0 and (force or not result.exists()):
            with checking(f"--out {path}: is not writable, or another process is at work in it"):
                path.mkdir(parents=True, exist_ok=True)
                self.enter_context(FileLock(path / LOCK).acquire(timeout=60))
            # another process may have been at work until now: look again
            goes_on = check_directory(path, command, config, force, **about)
            if force:
                clear(path)
            for file in path.glob(TORN):
                file.unlink()
            if not result.exists():
                settings = config.model_dump(mode="json")
                machine = {
                    "argv": sys.argv,
                    "versions": {"python": sys.version.split()[0]}
                    | {name: version(name) for name in PACKAGES},
                    "cores": os.cpu_count(),
                    "threads": torch.get_num_threads(),
                    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                    "processes": world()[1],
                    "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    **{name: settings[name] for name in sorted(MAY_CHANGE & settings.keys())},
                }
                new: Record = {"command": command, "about": about, "machines": []}
                env = read_json(path / "env.json") if goes_on else new
                env["machines"].append(machine)
                write_atomic(path / "env.json", json.dumps(env, indent=1))
                write_atomic(path / "config.json", json.dumps(settings, indent=1))
        asked = stop.agreed()  # this waits until process 0 has written
        self.result = read_json(result) | self.place if result.exists() else None
        if self.result is None and asked:
            raise Stopped(asked, f"stopped before {path}; the same command goes on")

    def keep(self, tensors: list[Tensor], optimisers: list[Any]) -> None:
        """Name what checkpoints hold. Where there is a checkpoint, all of it is restored."""
        self.kept = tensors, optimisers
        path = self.path / "checkpoint.pt"
        if path.exists():
            with checking(str(path), "--force starts the run over"), torch.no_grad():
                saved = torch.load(path, map_location="cpu", weights_only=True)
                for tensor, value in zip(tensors, saved["tensors"], strict=True):
                    tensor.copy_(value)
                for optimiser, state in zip(optimisers, saved["optimisers"], strict=True):
                    optimiser.step = state["step"]
                    optimiser.torch.load_state_dict(state["torch"])
                self.records, spent = saved["records"], saved["spent"]
                self.began = self.began[0] - spent["cpu_seconds"], self.began[1] - spent["seconds"]

    def log(self, record: Record) -> None:
        self.records.append(json.loads(json.dumps(record)))
        self.write("metrics.jsonl", "".join(json.dumps(x) + "\n" for x in self.records))

    def checkpoint(self, done: str, due: bool = False) -> None:
        """Save if `due` or `save_minutes` are over; if asked to stop, save and raise Stopped."""
        asked, minutes = stop.agreed(), (time.monotonic() - self.saved) / 60
        if due or asked or minutes >= self.config.save_minutes:
            buffer, (tensors, optimisers) = io.BytesIO(), self.kept
            state = {
                "records": self.records,
                "spent": self.elapsed(),
                "tensors": [tensor.detach() for tensor in tensors],
                "optimisers": [{"step": x.step, "torch": x.torch.state_dict()} for x in optimisers],
            }
            torch.save(state, buffer)
            self.write("checkpoint.pt", buffer.getvalue())
            self.saved = time.monotonic()
        if asked:
            gather()  # torchrun ends all processes when one ends: process 0 has to save first
            raise Stopped(asked, f"stopped after {done}; {self.path}: the same command goes on")

    def finish(self, result: Record) -> Record:
        """Write result.json, which says that the run is complete; returns what it holds."""
        found: Record = json.loads(json.dumps({**self.elapsed(), **result}))
        self.write("result.json", json.dumps(found, indent=1))
        gather()  # then it is on the disk
        (self.path / "checkpoint.pt").unlink(missing_ok=True)
        return found | self.place

    def write(self, name: str, content: bytes | str) -> None:
        if world()[0] == 0:
            write_atomic(self.path / name, content)

    def elapsed(self) -> Record:
        """CPU and wall seconds, those before a stop included; of a search, those of its runs."""
        below = [read_json(x) for runs in SEARCH for x in self.path.glob(f"{runs}/result.json")]
        cpu, wall = self.began
        own = {"cpu_seconds": time.process_time() - cpu, "seconds": time.monotonic() - wall}
        return {name: sum(run[name] for run in below or [own]) for name in own}


def clear(path: Path) -> None:
    """Remove the files of a run, and first those of the runs of its search for a rate."""
    patterns = [f"{part}/{name}" for part in (*SEARCH, ".") for name in FILES]
    for file in [file for pattern in patterns for file in path.glob(pattern)]:
        file.unlink()


def check_directory(
    path: Path, command: str, config: Any, force: bool = False, **about: Any
) -> bool:
    """Whether the run in `path` is continued; refuses (UsageError) what must not be touched."""
    again = "choose another --out"
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {path}: is a file; {again}")
    if not (path / "config.json").exists():
        ours = (TORN, LOCK, "env.json", *SEARCH)  # of a run that was killed as it began
        if odd := [file for file in path.glob("*") if not any(map(file.match, ours))]:
            raise UsageError(f"--out {path}: holds {odd[0].name}, no run; {again}")
        return False
    env = read_json(path / "env.json", again)
    if env.get("command") != command:
        raise UsageError(f"--out {path}: is a run of `{env.get('command')}`; {again}")
    before = read_json(path / "config.json") | env.get("about", {})
    now = config.model_dump(mode="json") | json.loads(json.dumps(about))
    changes = [
        f"{name} {before.get(name)} -> {value}"
        for name, value in now.items()
        if name not in MAY_CHANGE and before.get(name) != value
    ]
    if changes and not force:
        raise UsageError(
            f"--out {path}: is a run with other settings: {', '.join(changes)}; {again}, or start "
            "over with --force"
        )
    return not force
