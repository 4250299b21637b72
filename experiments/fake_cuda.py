"""One alternation of the real Algorithm 1 on CUDA tensors without numbers, on any machine.

    python -m experiments.fake_cuda --backbone vit_l16 --lower-steps 2 --upper-steps 1

torch's FakeTensorMode keeps device, dtype and shape of every tensor, and raises where an operation
mixes devices. Watched here: the bytes that live at a time, the operations with their floating-point
operations and bytes, and each place where a value goes from the device to the CPU or back. From
these follows a forecast for an H100, by its roofline: an operation takes the longest of

    its floating-point operations / rate,   its bytes / bandwidth,   the launch of a kernel.

A CUDA build of torch asks the driver in its backward pass. So the work is done in a process whose
CUDA libraries are those of tests/fake_cuda_stub, built by gcc: one device, on which nothing runs.
"""

import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import bisslight
import ijepa
from bisslight import Gradients, Log, Passes
from config import BACKBONES, AlignConfig, Record
from experiments import time_and_memory

ROOT = Path(__file__).parent.parent
STUB = ROOT / "tests" / "fake_cuda_stub"

RATES = {torch.bfloat16: 600e12, torch.float32: 45e12, torch.float64: 25e12}  # FLOP/s of an H100
BANDWIDTH = 2.6e12  # bytes a second, read and written
LAUNCH = 3.5e-6  # seconds

# Operations that only look at memory in another way.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal",
    "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "mT", "new_empty", "numpy_T",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view",
}  # fmt: skip
FILLS = {"zeros", "zeros_like", "zero_", "ones", "full", "fill_"}  # what they read does not count

# Kinds of operations, by a part of their names; the first one that fits.
KINDS = {
    "mm": "products of matrices", "convolution": "products of matrices",
    "attention": "attention", "layer_norm": "LayerNorm", "gelu": "GELU", "_to_copy": "casts",
    "add": "sums", "sum": "gradients of biases", "foreach": "optimiser", "adamw": "optimiser",
    "clone": "copies", "cat": "copies", "stack": "copies", "gather": "copies", "copy": "copies",
    "scatter": "copies",
}  # fmt: skip


class NoStub(RuntimeError):
    """The libraries that stand in for CUDA's cannot be built here; the message says why."""


class Crossing(NamedTuple):
    """A value that goes between the device and the CPU."""

    operation: str
    place: str  # FILE:FUNCTION of this program
    times: int  # in an alternation


class Trace(NamedTuple):
    """An alternation, forecast."""

    seconds: float
    peak_GB: float
    theta_GB: float  # θ, float32; G has N_L of it
    loaded_GB: float  # before it begins: networks, θ and φ with their moments once there, a batch
    kernels: int
    TFLOP: float
    levels: dict[str, list[float]]  # lower, upper, rest: seconds, peak GB
    kinds: dict[str, dict[str, float]]  # level: milliseconds of each kind of operation
    largest: list[list[Any]]  # operations by time: name, calls, milliseconds
    crossings: list[Crossing]


# --- from outside ---------------------------------------------------------------------------------


def trace(settings: Record) -> Trace:
    """Trace an alternation with these settings of align, in a process with the stub (NoStub)."""
    with tempfile.TemporaryDirectory() as folder:
        environment = build_stub(Path(folder))
        call = [sys.executable, "-m", "experiments.fake_cuda", "--inside", json.dumps(settings)]
        outcome = subprocess.run(
            call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    if outcome.returncode != 0:
        raise RuntimeError(outcome.stderr[-3000:] or f"exit code {outcome.returncode}")
    found = json.loads(outcome.stdout.splitlines()[-1])
    found["crossings"] = [Crossing(*crossing) for crossing in found["crossings"]]
    return Trace(**found)


def build_stub(folder: Path) -> dict[str, str]:
    """Build the two libraries; the environment of a process that takes them for CUDA's (NoStub)."""
    if torch.version.cuda is None:
        raise NoStub("this torch is built without CUDA")
    site = Path(sysconfig.get_paths()["purelib"])
    headers = sorted(site.glob("nvidia/**/driver_types.h")) + sorted(
        site.glob("triton/**/driver_types.h")
    )
    if not headers:
        raise NoStub(f"no driver_types.h of CUDA below {site}")
    include = ["-I", str(STUB), "-I", str(headers[0].parent)]
    for source, library in (("runtime.c", "libruntime.so"), ("driver.c", "libcuda.so.1")):
        call = ["gcc", "-shared", "-fPIC", "-w", *include, str(STUB / source)]
        try:
            outcome = subprocess.run(
                [*call, "-o", str(folder / library)], capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            raise NoStub("gcc is not installed") from error
        if outcome.returncode != 0:
            raise NoStub(f"gcc: {outcome.stderr[:300]}")
    stand_in = {
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / "libruntime.so"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    environment = os.environ | stand_in
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


# --- inside ---------------------------------------------------------------------------------------


def trace_inside(settings: Record) -> Trace:
    """Trace an alternation, in a process that takes the stub for CUDA."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    patch_torch()
    names = {"dataset": "own", "pool": "own", "alternations": 1}
    cfg = AlignConfig(**names | settings)
    cost = Cost()
    watch(cost, cfg.lower_steps)
    if cfg.pretext == "ijepa":
        ijepa.IJEPA.draw = draw_usual_masks  # type: ignore[method-assign]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        cost,
        torch.autograd.set_multithreading_enabled(False),
    ):
        for _ in time_and_memory.alternations(cfg, torch.device("cuda", 0)):
            pass
    arch = BACKBONES[cfg.backbone]
    return cost.trace(theta_GB=arch.depth * 4 * cfg.rank * arch.dim * 4 / 1e9)


def patch_torch() -> None:
    """What torch and timm would ask a device for while tensors have no numbers."""
    import timm.models.vision_transformer as timm_vit
    from torch._subclasses import fake_tensor
    from torch.utils import _foreach_utils as lists_of_tensors

    # as on a GPU, the gradients are clipped by operations that take all of them at once
    listed = [Tensor, torch.nn.Parameter, fake_tensor.FakeTensor]

    replacements: list[tuple[Any, str, Any]] = [
        (fake_tensor, "init_gpu_context", lambda *_: None),
        (lists_of_tensors, "_foreach_supported_types", listed),
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        # timm reads these rates, all 0 here, from a tensor
        (timm_vit, "calculate_drop_path_rates", lambda rate, depth, *_, **__: [0.0] * depth),
    ]
    for module, name, function in replacements:
        setattr(module, name, function)


def watch(cost: "Cost", lower_steps: int) -> None:
    """Count from the start of Algorithm 1, level by level; its log is read as zeros."""
    real_algorithm = bisslight.algorithm_1
    real_gradients = Passes.gradients
    passes = 0

    def algorithm_1(*arguments: Any, **keywords: Any) -> Iterator[Log]:
        cost.begin()
        return real_algorithm(*arguments, **keywords)

    def gradients(self: Passes, *arguments: Any) -> Gradients:
        nonlocal passes
        passes += 1
        cost.level = "lower" if passes <= lower_steps else "upper"
        found = real_gradients(self, *arguments)
        cost.level = "rest"
        return found

    def read(rows: Sequence[tuple[Tensor, ...]]) -> list[list[float]]:
        width = sum(tensor.numel() for tensor in rows[0])
        cost.cross("read", "bisslight.py:read")
        return [[0.0] * width for _ in rows]

    time_and_memory.algorithm_1 = algorithm_1  # type: ignore[attr-defined]
    Passes.gradients = gradients  # type: ignore[method-assign, assignment]
    bisslight.read = read


def draw_usual_masks(self: ijepa.IJEPA, B: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """I-JEPA's masks are drawn by their numbers; of 16 x 16 patches these sizes are usual."""
    return torch.zeros(B, 1, 100, dtype=torch.long), torch.zeros(B, 4, 40, dtype=torch.long)


class Cost(TorchDispatchMode):
    """While it is on, counts what operations on the device take, and what leaves it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.level = "setup"
        self.current = 0  # bytes
        self.known: set[int] = set()  # storages
        self.begin()

    def begin(self) -> None:
        """Forget all but what lives."""
        self.level = "rest" if self.current else "setup"
        self.loaded = self.current
        self.peaks: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by level
        self.operations: defaultdict[str, float] = defaultdict(float)  # seconds by name
        self.kinds: defaultdict[tuple[str, str], float] = defaultdict(float)  # by level and kind
        self.calls: Counter[str] = Counter()
        self.flop = 0.0
        self.crossings: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(  # the signature is torch's
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        name = func._schema.name.split("::")[1]
        if not func._schema.returns:  # of lists: it writes to its first argument
            written = [x for x in tree_leaves(args[0]) if isinstance(x, Tensor)]
        for tensor in written:
            if tensor.is_cuda:
                self.see(tensor.untyped_storage())
        devices = {x.device.type for x in read + written}
        copies = name in ("_to_copy", "copy_") and len(devices) > 1
        waits = name in ("nonzero", "_local_scalar_dense") and "cuda" in devices
        if copies or waits:
            self.cross(name, place_of_call())
        if any(x.is_cuda for x in written) and name not in VIEWS:
            flop = 0
            if func._overloadpacket in flop_registry:
                flop = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            self.count(name, read, written, flop)
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from its first use until it is freed."""
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.current += storage.nbytes()
            weakref.finalize(storage, self.forget, key, storage.nbytes())
        self.peaks[self.level] = max(self.peaks[self.level], self.current)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.current -= size

    def cross(self, operation: str, place: str) -> None:
        self.crossings[operation, place] += 1

    def count(self, name: str, read: list[Tensor], written: list[Tensor], flop: float) -> None:
        """Add an operation's time by the roofline."""
        size = float(sum(size_of(x) for x in written))
        if name not in FILLS:
            size += sum(size_of(x) for x in read)
        if name.startswith("_fused_adam"):  # of four lists that are read, two are moments
            size += 0.5 * sum(size_of(x) for x in read)  # written, too
        dtype = next((x.dtype for x in written if x.dtype in RATES), torch.float32)
        seconds = max(flop / RATES[dtype], size / BANDWIDTH, LAUNCH)
        self.seconds[self.level] += seconds
        key = f"{name} {str(dtype).removeprefix('torch.')}"
        self.operations[key] += seconds
        self.kinds[self.level, kind_of(name)] += seconds
        self.calls[key] += 1
        self.flop += flop

    def trace(self, theta_GB: float) -> Trace:
        levels = {}
        for level in self.seconds:
            levels[level] = [self.seconds[level], self.peaks[level] / 1e9]
        kinds: dict[str, dict[str, float]] = {level: {} for level in levels}
        for (level, kind), seconds in sorted(self.kinds.items(), key=lambda item: -item[1]):
            kinds[level][kind] = round(1e3 * seconds, 1)
        largest = []
        by_time = sorted(self.operations.items(), key=lambda item: -item[1])
        for name, seconds in by_time[:12]:
            largest.append([name, self.calls[name], round(1e3 * seconds, 2)])
        crossings = [Crossing(*key, count) for key, count in self.crossings.items()]
        return Trace(
            seconds=math.fsum(self.seconds.values()),
            peak_GB=max(self.peaks.values()) / 1e9,
            theta_GB=theta_GB,
            loaded_GB=self.loaded / 1e9,
            kernels=sum(self.calls.values()),
            TFLOP=self.flop / 1e12,
            levels=levels,
            kinds=kinds,
            largest=largest,
            crossings=crossings,
        )


def kind_of(name: str) -> str:
    """The kind of an operation."""
    for part, kind in KINDS.items():
        if part in name:
            return kind
    return "the rest"


def size_of(tensor: Tensor) -> int:
    """Bytes of the entries of a tensor; of an expanded one, those that there are."""
    entries = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            entries *= length
    return entries * tensor.element_size()


def place_of_call() -> str:
    """FILE:FUNCTION of this program's innermost call, apart from this file's."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.name}"
    return "elsewhere"


def main(
    backbone: str = "vit_b16",
    hypergrad: str = "mfac",
    pretext: str = "mae",
    lower_steps: int = 20,
    upper_steps: int = 8,
    micro_batch: int | None = None,
    recompute: bool = False,
    amp: bool = True,
    inside: str = typer.Option("", hidden=True),
) -> None:
    """Print a trace."""
    if inside:
        print(json.dumps(trace_inside(json.loads(inside))._asdict()))
        return
    settings = {
        "backbone": backbone, "hypergrad": hypergrad, "pretext": pretext, "amp": amp,
        "lower_steps": lower_steps, "upper_steps": upper_steps, "micro_batch": micro_batch,
        "recompute": recompute,
    }  # fmt: skip
    found = trace(settings)
    for name, value in found._asdict().items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    typer.run(main)
