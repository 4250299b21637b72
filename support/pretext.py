"""Program: custom pretext tasks, `--pretext FILE.py:Class` or `--pretext module:Class`."""

import importlib
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bisslight import Passes, PretextTask
from config import AlignConfig
from data import rng
from lora import Backbone
from support.errors import UsageError, suggest
from support.optim import trainable
from support.runs import sha256

Batch = tuple[Any, ...]  # a NamedTuple of the task's own


class TaskClass(NamedTuple):
    """The class of a custom pretext task."""

    name: str  # the value of --pretext
    make: Callable[[Backbone, AlignConfig, torch.Generator], PretextTask[Batch]]  # the class itself
    file: Path | None  # its source; None if it is in no file, as a class of a notebook

    @property
    def sha256(self) -> str | None:
        """Digest of the source file; None if there is none."""
        return sha256(self.file) if self.file else None

    def new(self, backbone: Backbone, cfg: AlignConfig) -> PretextTask[Batch]:
        """Make a task of this class."""
        return self.make(backbone, cfg, rng(cfg.seed, "pretext"))


def load_task_class(name: str) -> TaskClass:
    """Import the class that `FILE.py:Class` or `module:Class` names.

    Raises UsageError where there is no such file or class.
    """
    place, _, class_name = name.rpartition(":")  # such as "my_task.py" and "Rotation"
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"--pretext {name}: there is no file {place}")
    names = import_names(place)
    if class_name not in names:
        classes = [key for key, value in names.items() if isinstance(value, type)]
        raise UsageError(f"--pretext {name}: is not there, {suggest(class_name, classes)}")
    source = Path(names.get("__file__", place))
    file = source if source.is_file() else None  # None for a notebook's class, __main__:Class
    return TaskClass(name, names[class_name], file)


def import_names(place: str) -> Mapping[str, Any]:
    """Run a file, or import a module, and return all names that it defines.

    Its own errors are raised as they are.
    """
    # The file may import others beside it. Their folder comes last in the path, so that a `data.py`
    # there does not take the place of this program's.
    if place.endswith(".py"):
        sys.path.append(str(Path(place).parent.resolve()))
        return runpy.run_path(place)
    sys.path.append(str(Path.cwd()))
    return vars(importlib.import_module(place))


def try_step(task: PretextTask[Batch], images: Tensor, theta: Tensor, passes: Passes) -> None:
    """Take one step of a task on a few images (B, 3, H, W), so that its errors show early.

    1. Copy θ and φ_P, so that these stay as they were.
    2. Call what a task has, in the order of a step: draw, prepare, loss, after_step. An error in
       the task is raised as it is, with Python's own traceback, before the long work starts.
    3. Raise ValueError where the loss or a gradient is not finite.

    What the task itself keeps may change, so the caller makes a new one afterwards.
    """
    device = images.device
    theta_P = trainable({"theta": theta})["theta"]
    phi = trainable(task.phi, device)

    gpus = [device] if images.is_cuda else []
    with torch.random.fork_rng(gpus):  # torch's random numbers go on afterwards as if without it
        drawn = task.draw(len(images), torch.Generator().manual_seed(0))  # tensors, such as masks
        on_device = [part.to(device) for part in drawn]
        with torch.autocast(device.type, torch.bfloat16, enabled=passes.amp):
            batch = task.prepare(images, *on_device)
        result = passes.gradients(task.loss, theta_P, phi, batch)  # the loss and its gradients
        task.after_step(theta_P)

    numbers = [result.value, result.theta, *result.phi.values()]
    if not all(tensor.isfinite().all() for tensor in numbers):
        raise ValueError("the loss of the pretext task, or a gradient of it, is not finite")
