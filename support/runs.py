"""Program: run directories, who may write them, and how a stopped run goes on.

A run directory holds config.json (the settings), env.json (command, versions, machine, digests of
weights, labels and file names), metrics.jsonl (a line per alternation or epoch, in pretraining per
500 steps at most), checkpoint.pt while the run is not finished and result.json once it is. The same
command, given again, goes on where it stopped. With --tensorboard, events.out.tfevents.* has the
numbers of metrics.jsonl for TensorBoard.
"""

import hashlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import Enum, auto
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from filelock import FileLock, Timeout
from pydantic import BaseModel
from torch import Tensor

from config import Machine, Mark, Record, settings_with
from data import check_utf8_name
from support.errors import RunError, UsageError, as_read_error, as_usage_error
from support.optim import Optimiser
from support.processes import Stopped, stop, wait_for_all, world

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter  # else on use: its package may not be there

LOG = logging.getLogger("bisslight")
T = TypeVar("T")


def read_json(path: Path, remedy: str = "give the command that wrote it again") -> Record:
    """Read a JSON object. Raises UsageError, with this remedy, where it is missing or damaged."""
    with as_read_error(str(path), remedy):
        return dict(json.loads(path.read_text()))


def read_json_if_there(path: Path) -> Record | None:
    """Read a JSON object, or return None if there is no such file. Raises UsageError: damaged."""
    return read_json(path) if path.exists() else None


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file at once, or leave it as it was: write another file, then rename that.

    Raises RunError where it cannot be written.
    """
    if isinstance(content, str):
        content = content.encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # not through a link that somebody has put there
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or the name could reach the disk before the content does
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # there may be none, or the disk may be read-only
            temporary.unlink()
        raise cannot_write(path, error) from error


def append_line(path: Path, line: str) -> None:
    """Add a line to a file. A process that is killed here leaves a part of the line.

    Raises RunError where it cannot be written.
    """
    try:
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> RunError:
    """The error for a file of a run that cannot be written, with its remedy."""
    return RunError(
        f"{path}: cannot be written ({error.strerror}); make room or allow it, then give the same "
        "command again"
    )


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Track(Protocol):
    """Something that shows how far a loop is, such as a progress bar."""

    def __call__(self, items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        """Yield the items, and show each one: number `done` + 1 to `total`, called `label`."""


def untracked(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
    """Yield the items and show nothing: a silent `Track`."""
    yield from items


class Identity(BaseModel, frozen=True):
    """What defines a run besides its settings: it goes on only if this is the same."""

    weights_sha256: str | None = None
    data_sha256: str | None = None
    images: dict[str, int] | None = None  # such as {"train": 4800, "val": 1194, "test": 5794}
    pool_sha256: str | None = None
    pretext_sha256: str | None = None  # the file of --pretext FILE.py:Class
    start_sha256: list[str] | None = None  # the adapters that seeds start from, one for each seed
    # These two are of a trial: its settings are those of the whole finetune run.
    lr: float | None = None
    seed: int | None = None

    def as_record(self) -> Record:
        """The fields that are not None, as env.json has them."""
        return self.model_dump(exclude_none=True)


UNKNOWN = Identity()


class RunResult(BaseModel, frozen=True):
    """What the result of every finished run has."""

    out: str  # the run's directory
    cpu_seconds: float  # CPU time of the run, with that before a stop; of finetune, of all trials
    seconds: float  # the same by the clock


LOCK = ".lock"
TRIALS = "lr*-s[0-9]*"  # directories of a finetune run: one learning rate with one seed each
TRIAL = "peft"  # the "command" in a trial's env.json
EVENTS = "events.out.tfevents.*"
FILES = (  # of a run, in the order in which `clear` removes them
    "result.json", "metrics.jsonl", EVENTS, "checkpoint.pt", "backbone.pth",
    "adapter.safetensors", "adapter-s*.safetensors", "config.json", "env.json",
)  # fmt: skip
TORN = [f".{name}.[0-9]*.tmp" for name in FILES]  # what a process leaves that is killed writing
PACKAGES = ("bisslight", "torch", "torchvision", "timm", "pydantic", "numpy", "safetensors")
DIGESTS = {  # by a field of `Identity`: the flag that names what it is a digest of
    "weights_sha256": "--weights",
    "data_sha256": "--dataset",
    "pool_sha256": "--pool",
    "start_sha256": "--from",
}
PATIENCE = 60  # seconds that another process in the same directory is waited for
OTHER_OUT = "choose another --out"
START_OVER = "--force starts the run over"


class RunState(Enum):
    """How far the run in a directory is."""

    NEW = auto()  # it has to begin: there is none yet, or --force starts it over
    UNFINISHED = auto()  # it goes on
    FINISHED = auto()  # its result is read


class Run(ExitStack):
    """A run directory, new or continued, and locked against other processes until it is closed.

    It refuses (UsageError) the directory of another command, and one of other settings or another
    identity unless `force` starts the run over. `config` has the settings of the command. `result`
    is what a finished run ended with; None while it is not finished.
    """

    def __init__(
        self,
        path: Path,
        command: str,
        config: Machine,
        force: bool = False,
        identity: Identity = UNKNOWN,
    ) -> None:
        super().__init__()
        self.path = path
        self.config = config
        self.records: list[Record] = []  # the lines of metrics.jsonl
        self.tensors: Mapping[str, Tensor] = {}  # what a checkpoint holds, see `restore`
        self.optimisers: Mapping[str, Optimiser] = {}
        self.began = time.monotonic()
        self.cpu_seconds_at_start = time.process_time()  # used by this process, for anything
        self.spent_in_earlier_starts = {"cpu_seconds": 0.0, "seconds": 0.0}  # by this run
        self.saved_at = self.began
        self.events: SummaryWriter | None = None  # of TensorBoard, from the first record on

        self.take_directory(command, force, identity)
        wait_for_all()  # until process 0 has made it ready
        self.result = self.read_result()
        signal_heard = stop.agree_on_signal()  # in an earlier run, or while this one was prepared
        if signal_heard and self.result is None:
            raise Stopped(signal_heard, f"stopped before {path}; the same command goes on")

    def take_directory(self, command: str, force: bool, identity: Identity) -> None:
        """Make the directory ready for the run to begin, or to go on, in it.

        1. All processes check that this run may use the directory (UsageError).
        2. A finished run is only read: it may be in use elsewhere, or on a read-only disk.
        3. Otherwise process 0 locks the directory and prepares it.
        """
        run_state = check_directory(self.path, command, self.config, force, identity)
        wait_for_all()  # until each process has looked; only then process 0 writes
        if world().rank == 0 and run_state is not RunState.FINISHED:
            self.lock()
            self.prepare_directory(command, force, identity)

    def lock(self) -> None:
        """Make the directory, and wait until no other process is in it.

        After a second it says that it waits; after PATIENCE it raises UsageError, and so it does
        where the directory cannot be written.
        """
        lock = FileLock(self.path / LOCK)
        with as_usage_error(f"--out {self.path}: is not writable"):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self.enter_context(lock.acquire(timeout=1))
                return
            except Timeout:
                LOG.warning("%s: another process is at work in it, waiting for its end", self.path)
        with as_usage_error(f"--out {self.path}: another process is at work in it"):
            self.enter_context(lock.acquire(timeout=PATIENCE))  # its Timeout is an OSError

    def prepare_directory(self, command: str, force: bool, identity: Identity) -> None:
        """Remove what is left of an old run, then write env.json and config.json.

        While this process waited for the lock, another one may have written there, so the directory
        is checked again. A run that was finished meanwhile is left as it is.
        """
        run_state = check_directory(self.path, command, self.config, force, identity)
        if run_state is RunState.FINISHED:
            return
        if run_state is RunState.NEW:
            clear(self.path)
        # There is a result.json if a finished run goes on with more seeds or rates; TORN are files
        # that a killed process has half written.
        remove(self.path, ["result.json", *TORN])
        self.record_start(command, identity, goes_on=run_state is RunState.UNFINISHED)

    def record_start(self, command: str, identity: Identity, goes_on: bool) -> None:
        """Write env.json, which lists every start of the run, then config.json.

        Once config.json is there, too, the directory counts as a run.
        """
        env: Record = {"command": command, "about": {}, "machines": []}
        if goes_on:
            env = read_json(self.path / "env.json")
        env["about"] = identity.as_record()  # it may have grown: more seeds have more digests
        env["machines"].append(describe_machine(self.config))
        settings = self.config.model_dump(mode="json")
        write_atomic(self.path / "env.json", json.dumps(env, indent=1))
        write_atomic(self.path / "config.json", json.dumps(settings, indent=1))

    def read_result(self) -> Record | None:
        """What a finished run ended with, and where its files are; None if it is not finished.

        Raises UsageError if result.json is damaged.
        """
        path = self.path / "result.json"
        content = read_json_if_there(path)
        if content is None:
            return None
        result = self.with_paths(content)
        with as_read_error(str(path), START_OVER):
            RunResult(**result)  # raises an error if a field is missing that every result has
        return result

    def with_paths(self, result: Record) -> Record:
        """Add where the files of a result are now, since a finished directory may be moved.

        All three are added. The class of a command's result takes those that it has fields for.
        """
        return result | {
            "out": str(self.path),
            "adapter": str(self.path / "adapter.safetensors"),  # of align, and of a trial
            "weights": str(self.path / "backbone.pth"),  # of pretrain
        }

    def restore(self, tensors: Mapping[str, Tensor], optimisers: Mapping[str, Optimiser]) -> None:
        """Say what checkpoints hold from now on; if there is a checkpoint, read it back.

        Args:
            tensors: by name, since θ_P and θ_D have the same shape. All tensors of the optimisers
                are among them. They are overwritten by those of the checkpoint.
            optimisers: by name; step and state of each are overwritten, too.

        Raises UsageError, and changes nothing, unless the file holds just these names and shapes.
        """
        self.tensors = tensors
        self.optimisers = optimisers
        path = self.path / "checkpoint.pt"
        if not path.exists():
            self.cut_metrics()
            return
        with as_read_error(str(path), START_OVER), torch.no_grad():
            saved = torch.load(path, map_location="cpu", weights_only=True)
            self.check_checkpoint(path, saved)
            for name, tensor in tensors.items():
                tensor.copy_(saved["tensors"][name])
            for name, optimiser in optimisers.items():
                optimiser.step = saved["optimisers"][name]["step"]
                optimiser.adamw_or_sgd.load_state_dict(saved["optimisers"][name]["torch"])
            self.records = saved["records"]
            self.spent_in_earlier_starts = saved["spent"]
        self.cut_metrics()
        LOG.info("%s: goes on where it stopped", self.path)

    def check_checkpoint(self, path: Path, saved: Record) -> None:
        """Refuse (UsageError) a checkpoint that does not hold what this run needs.

        By name, each tensor has to have its shape, and each optimiser its tensors in their order:
        torch would silently give the state of a tensor to another one of the same shape.
        """
        held_shapes = {name: tensor.shape for name, tensor in saved["tensors"].items()}
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        refuse_difference(path, held_shapes, shapes)
        held_names = {name: state["tensors"] for name, state in saved["optimisers"].items()}
        names = {name: self.names_of(optimiser) for name, optimiser in self.optimisers.items()}
        refuse_difference(path, held_names, names)

    def names_of(self, optimiser: Optimiser) -> list[str]:
        """The names of an optimiser's tensors, in the order by which torch numbers their state."""
        # Tensors are found by `id`: `==` compares them entry by entry.
        names = {}
        for name, tensor in self.tensors.items():
            names[id(tensor)] = name
        return [names[id(tensor)] for tensor in optimiser.tensors]

    def cut_metrics(self) -> None:
        """Write metrics.jsonl anew, with the checkpoint's records alone.

        Records that were logged after the checkpoint are removed, and so is a line that a killed
        process left unfinished.
        """
        if (self.path / "metrics.jsonl").exists():
            lines = [json.dumps(record) + "\n" for record in self.records]
            self.write("metrics.jsonl", "".join(lines))

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a record to `records` and to metrics.jsonl."""
        line = json.dumps(record)
        # Read back from JSON, records are the same whether or not the run was stopped in between.
        self.records.append(json.loads(line))
        if world().rank == 0:
            append_line(self.path / "metrics.jsonl", line)
            if self.config.tensorboard:
                self.log_for_tensorboard()

    def log_for_tensorboard(self) -> None:
        """Add the last record to TensorBoard's events; the first time, all records.

        When a run goes on, its file of events is written anew. So no record is in it twice, and
        none is lost, whatever was written after the last checkpoint.
        """
        from torch.utils.tensorboard import SummaryWriter

        to_write = self.records[-1:]
        if self.events is None:
            for file in self.path.glob(EVENTS):
                file.unlink()
            # purge_step=0 tells an open TensorBoard to forget what it read from the removed file.
            self.events = SummaryWriter(str(self.path), purge_step=0)
            self.callback(self.events.close)  # when the run is left
            to_write = self.records
        for record in to_write:
            for name, value in mean_numbers(record).items():
                self.events.add_scalar(name, value, record["step"])
        self.events.flush()

    def save_if_due(self, finished: str, due: bool = False) -> None:
        """Save if `due`, or if --save-minutes have passed; if asked to stop, save, raise Stopped.

        `finished` says what was done last, for the message, such as "alternation 3 of 100".
        """
        signal_heard = stop.agree_on_signal()
        minutes = (time.monotonic() - self.saved_at) / 60
        if due or signal_heard or minutes >= self.config.save_minutes:
            self.save()
        if signal_heard:
            wait_for_all()  # until process 0 has saved: torchrun ends all processes when one ends
            saved = self.path / "checkpoint.pt"
            raise Stopped(
                signal_heard,
                f"stopped after {finished}, saved in {saved}; the same command goes on",
            )

    def save(self) -> None:
        """Write checkpoint.pt."""
        optimisers = {}
        for name, optimiser in self.optimisers.items():
            optimisers[name] = {
                "step": optimiser.step,
                "tensors": self.names_of(optimiser),
                "torch": optimiser.adamw_or_sgd.state_dict(),
            }
        state = {
            "tensors": {name: tensor.detach() for name, tensor in self.tensors.items()},
            "optimisers": optimisers,
            "records": self.records,
            "spent": self.elapsed(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.write("checkpoint.pt", buffer.getvalue())
        self.saved_at = time.monotonic()

    def finish(self, result: Record) -> Record:
        """Write result.json, with which the run is finished; returns what `read_result` does."""
        text = json.dumps(self.elapsed() | result, indent=1)
        self.write("result.json", text)
        wait_for_all()  # until it is on the disk
        (self.path / "checkpoint.pt").unlink(missing_ok=True)
        return self.with_paths(json.loads(text))

    def write(self, name: str, content: bytes | str) -> None:
        """Write a file into the run's directory; if there are several processes, process 0 does."""
        if world().rank == 0:
            write_atomic(self.path / name, content)

    def elapsed(self) -> dict[str, float]:
        """CPU and wall seconds of the run, with those before a stop."""
        cpu_seconds = time.process_time() - self.cpu_seconds_at_start
        seconds = time.monotonic() - self.began
        return {
            "cpu_seconds": self.spent_in_earlier_starts["cpu_seconds"] + cpu_seconds,
            "seconds": self.spent_in_earlier_starts["seconds"] + seconds,
        }


def mean_numbers(record: Record) -> dict[str, float]:
    """Flatten a record to numbers by name; a list of numbers becomes its mean.

    What has no number is left out: None, texts and empty lists; and so is the step.

    >>> mean_numbers({"step": 3, "loss_P": [1.0, 3.0], "val_P": {"accuracy": 50.0}, "lr": None})
    {'loss_P': 2.0, 'val_P/accuracy': 50.0}
    """
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            for key, number in mean_numbers(value).items():
                numbers[f"{name}/{key}"] = number
        elif isinstance(value, list) and value:
            numbers[name] = fmean(value)
        elif isinstance(value, int | float) and name != "step":
            numbers[name] = value
    return numbers


def describe_machine(config: Machine) -> Record:
    """What env.json says of one start of a run: program, versions, machine, and some settings.

    These are the settings that may change between starts: config.json has those of the last one.
    """
    versions = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):  # this program may run without being installed
            versions[package] = version(package)
    return {
        "argv": sys.argv,
        "versions": versions,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processes": world().size,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **config.model_dump(mode="json", include=may_change(type(config))),
    }


def clear(path: Path) -> None:
    """Remove the files of a run, and of a finetune run its trials; other files stay.

    This may be killed halfway. So result.json goes first, before the trials: without them, a run
    must not look finished. env.json goes last, since it says whose the other files are.
    """
    remove(path, ["result.json"])
    for trial in path.glob(TRIALS):
        if is_run(trial, TRIAL):
            remove(trial, [*FILES, *TORN, LOCK])
            with suppress(OSError):  # it is not empty: somebody's own file is in it
                trial.rmdir()
    remove(path, FILES)


def remove(directory: Path, patterns: Sequence[str]) -> None:
    """Remove the files with these names, in this order."""
    for pattern in patterns:
        for file in directory.glob(pattern):
            file.unlink()


def is_run(path: Path, command: str) -> bool:
    """Whether a directory holds a run of this command, as its env.json says."""
    file = path / "env.json"
    try:
        env = json.loads(file.read_text())
    except (OSError, ValueError):  # none, or not ours
        return False
    is_ours = isinstance(env, dict) and "machines" in env  # not another program's env.json
    return is_ours and env.get("command") == command


def refuse_difference(path: Path, held: Record, needed: Record) -> None:
    """Refuse (UsageError) a checkpoint that holds anything else, by name, than what is needed."""
    for name in [*needed, *held]:
        if needed.get(name) != held.get(name):
            raise UsageError(f"{path}: {name} differs from that of this run; {START_OVER}")


def check_directory(
    path: Path,
    command: str,
    config: Machine,
    force: bool = False,
    identity: Identity = UNKNOWN,
) -> RunState:
    """Check that a run may use the directory `path`; returns how far the run there is.

    A run begins in an empty or new directory, and with `force` where there is a run of the same
    command. Without `force`, a run goes on if its settings and its identity are the same.

    It is asked three times: before the data are read, when the identity is UNKNOWN and not
    compared; with the identity; and once the directory is locked. Raises UsageError.
    """
    with as_usage_error("--out"):
        check_utf8_name(path)  # safetensors reads files of no other name
    if path.is_file():
        raise UsageError(f"--out {path}: is a file; {OTHER_OUT}")

    if not (path / "config.json").exists():  # there is no run
        check_that_nothing_is_in(path, command)
        return RunState.NEW

    env = read_json(path / "env.json", OTHER_OUT)
    if env.get("command") != command:
        raise UsageError(f"--out {path}: is a run of `{env.get('command')}`; {OTHER_OUT}")
    if force:
        return RunState.NEW
    recorded = read_json(path / "config.json") | env.get("about", {})
    grown = check_same_run(path, recorded, config, identity)
    is_finished = (path / "result.json").exists()
    # A trial has one rate and one seed, however many the whole run has now.
    if is_finished and (command == TRIAL or not grown):
        return RunState.FINISHED
    return RunState.UNFINISHED


def check_same_run(path: Path, recorded: Record, config: Machine, identity: Identity) -> list[str]:
    """Refuse (UsageError) to go on with a run in `path` whose settings or digests were others.

    `recorded` has both by name, as the run had them. Returns the names of those that have grown,
    such as `seeds`.
    """
    current = config.model_dump(mode="json") | identity.as_record()  # as they are now
    changed = list_changed(type(config), recorded, current)
    growing = settings_with(type(config), Mark.MAY_GROW) | {"start_sha256"}
    grown = []
    for name in changed:
        if name in growing and is_more(name, current[name], recorded.get(name)):
            grown.append(name)
    refused = [name for name in changed if name not in grown]
    if refused:
        changes = [describe_change(name, recorded, current) for name in refused]
        raise UsageError(
            f"--out {path}: is a run with other settings: {', '.join(changes)}; {OTHER_OUT}, or "
            "start over with --force"
        )
    return grown


def list_changed(settings_class: type[Machine], recorded: Record, current: Record) -> list[str]:
    """The names of settings and digests that the run had otherwise, except those that may change.

    `recorded` and `current` have both by name: as the run had them, and as they are now. `current`
    lacks digests that are not known yet. Settings that came after the run had their default.
    """
    defaults = {name: field.default for name, field in settings_class.model_fields.items()}
    before = defaults | recorded
    changed = [name for name, value in current.items() if value != before.get(name)]
    return [name for name in changed if name not in may_change(settings_class)]


def may_change(settings_class: type[Machine]) -> set[str]:
    """The settings that may have another value when a run goes on, such as workers."""
    return settings_with(settings_class, Mark.CHANGES_NO_NUMBER, Mark.KNOWN_BY_DIGEST)


def is_more(name: str, value: object, before: object) -> bool:
    """Whether the value of a setting contains the recorded one, such as 8 seeds after 5."""
    if isinstance(value, list) and isinstance(before, list):
        if name == "start_sha256":  # a digest for each seed, in the order of the seeds
            return value[: len(before)] == before
        return all(item in value for item in before)
    return isinstance(value, int) and isinstance(before, int) and value >= before


def check_that_nothing_is_in(path: Path, command: str) -> None:
    """Refuse (UsageError) a directory with files of anything else than a run of this command.

    A run that is killed right at its start may leave a few files; these are no reason to refuse.
    """
    leftovers = [LOCK, *TORN]
    if is_run(path, command):
        leftovers.append("env.json")  # it is written before config.json
    for file in path.glob("*"):
        if not any(file.match(pattern) for pattern in leftovers):
            raise UsageError(f"--out {path}: holds {file.name}, no run; {OTHER_OUT}")


def describe_change(name: str, recorded: Record, current: Record) -> str:
    """Say how a setting or digest has changed, such as "lam 0.001 -> 0.5".

    `recorded` and `current` as in `list_changed`.
    """
    if name == "pretext_sha256":
        place, _, _ = current["pretext"].rpartition(":")  # of FILE.py:Class or module:Class
        return f"{place} was changed since this run began"
    if name in DIGESTS:
        return f"the content of {DIGESTS[name]} was changed since this run began"
    return f"{name} {recorded.get(name)} -> {current[name]}"
