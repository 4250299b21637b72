"""What every training loop stands on: seeds, learning rates, optimisers, devices, and the run directory.

No mathematics of the method is here. A run directory holds

    config.json env.json metrics.jsonl train.log checkpoint.pt adapter*.safetensors result.json (only if finished)

and its files are replaced atomically, but for the two logs, which grow. Randomness is a function of (seed, purpose,
step), never of history.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor

from config import RunError, Settings, UsageError, get, leaves
from parallel import World, world
from stopping import being_written

P = ParamSpec("P")
R = TypeVar("R")

# --- seeds -----------------------------------------------------------------------------------------------------------


def seed_of(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, the same on every platform: sha256 of the words, not Python's hash."""
    words = "/".join(str(word) for word in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1


def rng(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose, e.g. rng(0, "mask", step)."""
    return torch.Generator().manual_seed(seed_of(seed, *purpose))


# --- learning rates and optimisers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then half a cosine (App. C.2 and C.3; the exact form is the released program's)."""

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
        c = (1 + math.cos(math.pi * (k - self.warmup - 1) / max(1, self.total - self.warmup - 1))) / 2
        return c * base + (1 - c) * self.end


def constant(k: int, base: float) -> float:
    """The rate of linear probing."""
    return base


class Group(NamedTuple):
    """Tensors that share a base rate and a weight decay."""

    tensors: list[Tensor]
    lr: float
    weight_decay: float


def decay_groups(named: Mapping[str, Tensor], lr: float, weight_decay: float) -> list[Group]:
    """MAE's and I-JEPA's rule for their own networks: vectors and biases are not decayed (mask token: 3-D, decayed)."""
    plain = [name for name, tensor in named.items() if tensor.ndim <= 1 or name.endswith(".bias")]
    return [
        Group([tensor for name, tensor in named.items() if name not in plain], lr, weight_decay),
        Group([named[name] for name in plain], lr, 0.0),
    ]


class Optimiser:
    """opt_P or opt_D of Algorithm 1: a torch optimiser with a schedule and joint gradient clipping.

    Args:
        groups: what is trained; tensors are updated in place.
        schedule: (step from 1, base rate) -> rate.
        decay: the same for the weight decay, which otherwise stays as the groups have it.
        betas: AdamW's; None is SGD with momentum 0.9, as released.
        clip: largest joint L2 norm over all tensors of a step, factor min(1, clip / (norm + 1e-6)); None: no clipping.
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
        groups = [group for group in groups if group.tensors]
        self.base = [(group.lr, group.weight_decay) for group in groups]
        params = [{"params": g.tensors, "lr": g.lr, "weight_decay": g.weight_decay} for g in groups]
        self.torch: torch.optim.Optimizer
        if betas is None:
            self.torch = torch.optim.SGD(params, lr=0.0, momentum=0.9)
        else:
            self.torch = torch.optim.AdamW(params, lr=0.0, betas=betas, eps=1e-8, fused=True)

    def update(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """One step on (tensor, gradient) pairs; returns the joint norm before clipping, a 0-d tensor on the device.

        The gradients are used up: clipping scales them in place.
        """
        pairs = list(gradients)
        for tensor, gradient in pairs:
            # fused AdamW goes through both in the order of storage, so a transposed or expanded gradient is copied
            same = gradient.stride() == tensor.stride()
            tensor.grad = gradient if same else torch.empty_like(tensor).copy_(gradient)
        tensors = [tensor for tensor, _ in pairs]
        norm = torch.nn.utils.clip_grad_norm_(tensors, self.clip or math.inf, foreach=True)
        self.step += 1
        for group, (lr, weight_decay) in zip(self.torch.param_groups, self.base, strict=True):
            group["lr"], group["weight_decay"] = self.schedule(self.step, lr), self.decay(self.step, weight_decay)
        self.torch.step()
        self.torch.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "torch": self.torch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.torch.load_state_dict(state["torch"])


def trainable(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Fresh leaf copies that a gradient can be taken for."""
    return {name: tensor.detach().to(device, copy=True).requires_grad_() for name, tensor in tensors.items()}


class Score(NamedTuple):
    """What a model is worth on a split, in percent, and its mean cross entropy."""

    accuracy: float  # top-1; for several classes an image, mean average precision
    loss: float
    per_class: float | None = None  # mean over classes of the accuracy in each; beside top-1 only
    right: int | None = None  # images that are right; beside top-1 only

    @property
    def rank(self) -> tuple[float, float]:
        """Orders scores: higher accuracy wins, ties go to the lower loss."""
        return self.accuracy, -self.loss


# --- devices ---------------------------------------------------------------------------------------------------------


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda, cuda:1 -> a device that is there (UsageError otherwise); mps lacks float64.

    Of several processes on a machine, `auto` and `cuda` give each the GPU that `torchrun` means for it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UsageError(f"--device {name}: not available here, try --device cpu") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: not supported, take cpu or cuda")
    return device


def default_workers(device: torch.device, cores: int) -> int:
    """Processes that decode images: beside a GPU one a core, at most 16. On a CPU none: the network needs the cores."""
    return min(16, max(1, cores)) if device.type == "cuda" else 0


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def few_threads(backbone: str, device: torch.device) -> None:
    """One thread for vit_mini on a CPU, unless $OMP_NUM_THREADS or $MKL_NUM_THREADS says how many.

    Its products are so small that two threads gain a quarter at best; beside another busy process they wait for each
    other, and a run takes several times as long.
    """
    asked = any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if backbone == "vit_mini" and device.type == "cpu" and not asked:
        torch.set_num_threads(1)


def autocast(fn: Callable[P, R], device: torch.device, amp: bool) -> Callable[P, R]:
    """Fn under bfloat16 autocast where `amp` is on and the device is a GPU; parameters and gradients stay float32."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp and device.type == "cuda"):
            return fn(*args, **kwargs)

    return wrapped


# --- files -----------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file or leave it as it was (RunError): temporary, fsync, read back, rename, fsync of the directory."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    being_written.add(temporary)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if sha256(temporary) != hashlib.sha256(data).hexdigest():
            raise OSError(errno.EIO, "what was written does not read back")
        temporary.replace(path)
    except OSError as error:
        what = f"{path}: cannot be written ({error.strerror})"
        raise RunError(f"{what}; make room or allow it, what was there is unchanged") from error
    finally:
        temporary.unlink(missing_ok=True)
        being_written.discard(temporary)
    with contextlib.suppress(OSError):  # the new file is there; some file systems cannot sync a directory
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


def append(path: Path, text: str) -> None:
    """Add text to a log (RunError naming it where it cannot be written)."""
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); make room, then --resume") from error


def to_bytes(obj: Any) -> bytes:
    """torch.save to memory."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def sha256(path: Path) -> str:
    """Digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """A JSON object that this program wrote (UsageError where it is missing or damaged)."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: holds a {type(found).__name__}, this program writes an object; it is damaged")
    return found


@contextlib.contextmanager
def read_from(path: Path, remedy: str = "run it again") -> Iterator[None]:
    """What is looked up in a run's files is there, or the run is damaged (UsageError); for short blocks."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:  # RuntimeError: other shapes
        why = " ".join(str(error).split())[:200]
        what = f"{path}: is damaged or of another version ({type(error).__name__}: {why})"
        raise UsageError(f"{what}; {remedy}") from error


def runs_in(path: Path) -> list[Path]:
    """A run directory itself, or the run directories it holds (s2 before s10); empty where it is neither."""
    if (path / "config.json").exists():
        return [path]
    found = [p for p in path.iterdir() if (p / "config.json").exists()] if path.is_dir() else []
    return sorted(found, key=lambda p: (len(p.name), p.name))


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many of its last parts as tell them apart.

    >>> short_names([Path("s/rank-1/align"), Path("s/rank-2/align")])
    ['rank-1/align', 'rank-2/align']
    """
    names: list[str] = []
    for n in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-n:]) for path in paths]
        if len({*names}) == len(names):
            break
    return names


# --- run directories -------------------------------------------------------------------------------------------------

LOCK = ".lock"
AGAIN = "--force starts the run over"
FILES = (
    "result.json",
    "metrics.jsonl",
    "train.log",
    "checkpoint.pt",
    "backbone.pth",
    "d_lr.json",
    "config.json",  # last: what is being started over is a run until nothing else is left of it
    "env.json",
)


def spent(began: Mapping[str, float] | None = None) -> dict[str, float]:
    """CPU seconds of this process, all threads, and wall seconds; since `began`, which is such a reading, too."""
    now = {"cpu_seconds": time.process_time(), "seconds": time.perf_counter()}
    return {key: value - (began[key] if began else 0.0) for key, value in now.items()}


class Run:
    """One run directory, open for writing by rank 0. Make it with `open_run`."""

    def __init__(self, path: Path, resumed: bool, records: list[dict[str, Any]], peers: World) -> None:
        self.path, self.resumed, self.records, self.peers = path, resumed, records, peers
        self.writes, self.saved, self.began = peers.rank == 0, time.monotonic(), spent()

    def write(self, name: str, content: bytes | str) -> None:
        """Replace a file of the run."""
        if self.writes:
            write_atomic(self.path / name, content)

    def append(self, name: str, line: str) -> None:
        if self.writes:
            append(self.path / name, line + "\n")

    def metric(self, record: Mapping[str, Any]) -> None:
        """Append one JSON object to metrics.jsonl. Its `step` says which alternation or epoch it belongs to."""
        self.records.append(json.loads(json.dumps(record)))
        self.append("metrics.jsonl", json.dumps(record))

    def log(self, line: str) -> None:
        """Append a line to train.log, with the time."""
        self.append("train.log", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    def due(self, minutes: float) -> bool:
        """Whether the last checkpoint, or the start, was that long ago; rank 0's clock decides."""
        return self.peers.first(lambda: time.monotonic() - self.saved >= 60 * minutes)

    def save(self, state: Mapping[str, Any], name: str = "checkpoint.pt") -> None:
        """Replace a checkpoint: tensors, numbers and strings only. The one before stays until this one reads back."""
        self.saved = time.monotonic()
        if self.writes:
            began, data = time.perf_counter(), to_bytes(dict(state) | {"spent": self.spent()})
            self.write(name, data)
            self.log(f"{name}: {len(data) / 1e6:.1f} MB in {time.perf_counter() - began:.2f} s")

    def load(self, device: torch.device, name: str = "checkpoint.pt") -> dict[str, Any] | None:
        """A checkpoint of a resumed run, None where there is none (UsageError where it is damaged)."""

        def read() -> dict[str, Any] | None:
            path = self.path / name
            if not (self.resumed and path.exists()):
                return None
            try:
                check_zip(path)
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                if not isinstance(state, dict) or not isinstance(state["done"], int):
                    raise TypeError("is no checkpoint of ours")
                state["spent"]["seconds"]
            except Exception as error:  # torch raises anything from EOFError to UnpicklingError on damaged bytes
                raise UsageError(f"{path}: is damaged or of another version, {AGAIN}") from error
            return state

        state = self.peers.first(read)
        return None if state is None else moved(state, device)

    def restore(self, keep: Callable[[dict[str, Any]], bool], device: torch.device) -> dict[str, Any] | None:
        """The checkpoint to go on from, None where there is none yet; `metrics.jsonl` is cut back to what `keep`s."""
        state = self.load(device)
        with read_from(self.path / "metrics.jsonl", AGAIN):
            self.began = spent(state and state["spent"])
            self.cut(lambda record: state is not None and keep(record | {"checkpoint": state["done"]}))
        return state

    def cut(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite metrics.jsonl with the records that `keep` keeps, and without a torn last line."""
        self.records = [record for record in self.records if keep(record)]
        self.write("metrics.jsonl", "".join(json.dumps(record) + "\n" for record in self.records))

    def spent(self) -> dict[str, float]:
        """CPU and wall seconds of the run, those before its last resumption included."""
        return spent(self.began)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json; its presence says that the run is complete."""
        self.write("result.json", json.dumps(result, indent=1))


def moved(state: Any, device: torch.device) -> Any:
    """Tensors in nested containers on a device; an optimiser's step counts stay where torch wants them."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: moved(value, device) for key, value in state.items()}
    return [moved(value, device) for value in state] if isinstance(state, list) else state


def open_run(path: Path, command: str, config: Settings, resume: bool, force: bool, **about: Any) -> Run:
    """Make, or with `resume` reopen, a run directory (UsageError where it holds something else, or is in use)."""
    peers = world()
    locks: list[int] = []

    def write_config() -> None:
        write_atomic(path / "config.json", json.dumps(config.model_dump(mode="json"), indent=1))

    def opened() -> tuple[bool, list[dict[str, Any]]]:
        mine = check_out(path, command, resume, force)
        if mine and resume:
            check_same(path, config, about)
        try:
            path.mkdir(parents=True, exist_ok=True)
            locks.append(lock(path))
        except OSError as error:
            raise UsageError(f"--out {path}: cannot be made ({error.strerror}), choose another --out") from error
        for file in path.glob(".*.tmp"):  # of a process that was killed while it wrote
            file.unlink(missing_ok=True)
        if mine and resume:
            write_config()  # what may differ may be needed from here on: where the weights are now
            return True, list(read_metrics(path / "metrics.jsonl"))
        for file in [*path.glob("adapter*.safetensors"), *path.glob("unit-*.pt"), *(path / name for name in FILES)]:
            file.unlink(missing_ok=True)
        environ = {"command": command, **environment(), "processes": peers.size, **about}
        write_atomic(path / "env.json", json.dumps(environ, indent=1))
        write_config()  # from here on a run
        return False, []

    run = Run(path, *peers.first(opened), peers)
    for number in locks:
        weakref.finalize(run, os.close, number)
    return run


def lock(path: Path) -> int:
    """An open file that holds the lock of a run directory (UsageError where another process has it)."""
    try:
        number = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise RunError(f"--out {path}: cannot be written ({error.strerror}), choose another --out") from error
    try:
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(number)
        raise UsageError(
            f"--out {path}: another process is at work in it, wait for it or choose another --out"
        ) from error
    except OSError:  # a file system without locks
        return number
    return number


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """What a metrics.jsonl holds; a last line torn by a crash is left out (UsageError for any other damage)."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UsageError(f"{file}: line {number} is damaged; mend it, or {AGAIN}") from error
            return
        if not isinstance(record, dict):
            raise UsageError(f"{file}: line {number} is no record; mend it, or {AGAIN}")
        yield record


def check_out(path: Path, command: str, resume: bool, force: bool) -> bool:
    """Whether a run of ours is in `path`; refuses (UsageError) what must not be overwritten or cannot be resumed."""
    mine = (path / "config.json").exists() and (path / "env.json").exists()
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {path}: is a file, give a directory")
    ours = (LOCK, "env.json")  # all that there is of a run that was killed as it began
    if path.is_dir() and not mine and any(x.name not in ours and not x.match(".*.tmp") for x in path.iterdir()):
        raise UsageError(f"--out {path}: holds files of something else, choose an empty or new directory")
    if mine and not resume and not force:
        done = (path / "result.json").exists()
        what = "a finished run" if done else "an unfinished run, --resume continues it"
        raise UsageError(f"--out {path}: {what}, --force starts it over, or choose another --out")
    if mine and read_json(path / "env.json").get("command") != command:
        option = "--resume" if resume else "--force"
        raise UsageError(f"{option}: {path} is not a run of `{command}`, choose another --out")
    if mine and resume and (path / "result.json").exists():
        raise UsageError(f"--resume: the run in {path} is finished, there is nothing to resume")
    if resume and not mine:
        raise UsageError(f"--resume: there is no run in {path}")
    return mine


def check_same(path: Path, config: Settings, about: Mapping[str, Any]) -> None:
    """Refuse to resume another experiment; settings of the machine may differ.

    `about` is what else defines a run, beside the settings: digest of the weights, numbers of images.
    """
    env = read_json(path / "env.json")
    changed = differences(path, config)
    if "weights_sha256" in about:  # it tells more than the file's name
        changed = [said for said in changed if not said.startswith("weights ")]
    now = json.loads(json.dumps({key: value for key, value in about.items() if key != "sources"}))  # as it was written
    changed += [f"{key} {env.get(key)} -> {value}" for key, value in now.items() if env.get(key) != value]
    if changed:
        raise UsageError(f"--resume: settings differ from the run in {path}: {', '.join(changed)}")


def differences(path: Path, config: Settings) -> list[str]:
    """Which settings in `path`/config.json, but for those of the machine, are not these: `name there -> here`."""
    before = type(config).model_validate(read_json(path / "config.json"))
    return [
        f"{leaf.name} {get(before, leaf.path)} -> {get(config, leaf.path)}"
        for leaf in leaves(type(config))
        if leaf.path[0] != "machine" and get(before, leaf.path) != get(config, leaf.path)
    ]


def environment() -> dict[str, Any]:
    """Command line, versions, machine and, in a checkout, the commit: what a number needs to be traced."""
    commit = None
    with contextlib.suppress(OSError):  # no git on this machine
        here = Path(__file__).parent
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or None
    packages = ("torch", "torchvision", "timm", "pydantic", "numpy", "safetensors")
    return {
        "argv": sys.argv,
        "commit": commit,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in packages},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def load_tensors(path: Path) -> Any:
    """A .safetensors file, or torch.load without running code: tensors and plain containers (UsageError otherwise).

    argparse's Namespace, which official checkpoints hold, is read as an inert bag of values.
    """
    from argparse import Namespace

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if zipped := is_zipfile(path):
            check_zip(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals([Namespace]):
            warnings.simplefilter("ignore")  # of old formats, and of pickles that are refused below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file") from error
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError on foreign bytes
        why = next(iter(str(error).splitlines()), "")
        if isinstance(error, LookupError) or not why:  # of a reader that lost its way
            why = "its content is something else"
        if "weights_only" in str(error):  # torch's advice is to run what is in it
            why = "it is damaged, or holds more than tensors and plain values"
        raise UsageError(f"{path}: not a checkpoint that loads safely ({why[:120]}); get or make it again") from error


def check_zip(path: Path) -> None:
    """Compare the checksums of torch.save's archive, which a mapped read does not look at (ValueError otherwise)."""
    with ZipFile(path) as archive:
        if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
            raise ValueError("its archive is compressed, torch.save's is not")
        if bad := archive.testzip():
            raise ValueError(f"{bad} is damaged (crc32); copy or download it again")
