"""A pretext task of one's own, `--pretext FILE.py:Class` or `module:Class`: found, then tried.

What is wrong with it is told in one line before the long work begins: which class, which member of
`bisslight.PretextTask`, what happened and in which line of its file.
"""

import difflib
import importlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bisslight import Phi, PretextTask
from config import AlignConfig
from data import rng
from lora import Backbone
from support.errors import UsageError, checking
from support.optim import trainable

MEMBERS = ("phi", "state", "draw", "prepare", "loss", "after_step")  # of bisslight.PretextTask
Batch = tuple[Any, ...]  # a NamedTuple of the task's own


class TaskClass(NamedTuple):
    """The class of a pretext task of one's own."""

    name: str  # as in --pretext
    make: Callable[[Backbone, AlignConfig, torch.Generator], PretextTask[Batch]]
    file: Path  # where it is written; of a notebook a name that is no file


def load_task_class(name: str) -> TaskClass:
    """The class that `FILE.py:Class` or `module:Class` names (UsageError)."""
    place, _, class_name = name.rpartition(":")
    with checking(f"--pretext {name}"):
        with blaming("cannot be imported because of", Path(place)):
            names = import_names(place)
        file = Path(names.get("__file__", place))  # a notebook has none
        if class_name not in names:
            raise ValueError(f"{file.name} has {list_classes(names, class_name)}")
    return TaskClass(name, names[class_name], file)


def import_names(place: str) -> Mapping[str, Any]:
    """All names that a file, or a module, defines."""
    # Folders go to the end of the path, so that a `data.py` beside the file does not take the
    # place of this program's.
    if place.endswith(".py"):
        sys.path.append(str(Path(place).parent.resolve()))
        return runpy.run_path(place)
    sys.path.append(str(Path.cwd()))
    return vars(importlib.import_module(place))


def list_classes(names: Mapping[str, Any], wanted: str) -> str:
    """The classes that a file defines, but for its NamedTuples; and which may have been meant."""
    classes = []
    for name, value in names.items():
        is_class = isinstance(value, type) and not issubclass(value, tuple)
        if is_class and value.__module__ == names["__name__"]:  # and is not imported there
            classes.append(name)
    text = ", ".join(classes) or "no class"
    close = difflib.get_close_matches(wanted, classes, 1)
    return f"{text}; did you mean {close[0]}?" if close else text


def new_task(task_class: TaskClass, backbone: Backbone, cfg: AlignConfig) -> PretextTask[Batch]:
    """Make a task of this class (UsageError where its constructor fails)."""
    with checking(f"--pretext {task_class.name}"), blaming("__init__:", task_class.file):
        return task_class.make(backbone, cfg, rng(cfg.seed, "pretext"))


def check_pretext_task(
    task: PretextTask[Batch], task_class: TaskClass, images: Tensor, theta: Tensor, amp: bool
) -> None:
    """Try a task as a step of Algorithm 1 uses it, on images (B, 3, H, W); UsageError.

    What the task keeps is changed by this, as by any step; the run's random numbers are not.
    """
    gpus = [images.device] if images.is_cuda else []
    with checking(f"--pretext {task_class.name}"), torch.random.fork_rng(gpus):
        try_step(task, task_class.file, images, theta, amp)


def try_step(
    task: PretextTask[Batch], file: Path, images: Tensor, theta: Tensor, amp: bool
) -> None:
    """Take one step with a task and check what each of its members returns.

    ValueError: the first member that returns something else, and what was expected.
    """
    missing = [name for name in MEMBERS if not hasattr(task, name)]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}; see bisslight.PretextTask")
    for name, tensors in (("phi", task.phi), ("state", task.state)):
        if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
            raise ValueError(f"{name}: needs to be a dictionary of tensors")

    n = len(images)
    autocast = torch.autocast(images.device.type, torch.bfloat16, enabled=amp)

    with blaming("draw:", file):
        drawn = task.draw(n, torch.Generator().manual_seed(0))
    if not isinstance(drawn, tuple | list) or not all(has_rows(part, n) for part in drawn):
        raise ValueError(f"draw: needs to return a tuple of tensors (n, ...), here of n = {n}")

    with blaming("prepare:", file), autocast:
        batch = task.prepare(images, *[part.to(images.device) for part in drawn])
    if not hasattr(batch, "_fields"):
        raise ValueError(f"prepare: needs to return a NamedTuple, not {type(batch).__name__}")
    for name, part in zip(batch._fields, batch, strict=True):
        if part is not None and not has_rows(part, n):
            raise ValueError(f"prepare: {name} has to be None or a tensor (B, ...) of B images")

    # Copies, so that no gradient is left in the run's own tensors.
    leaves = trainable({"theta": theta})
    phi: Phi = trainable(task.phi)
    with blaming("loss:", file), autocast:
        loss = task.loss(leaves["theta"], phi, batch)
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.isfinite():
        raise ValueError(f"loss: has to be a finite scalar, is {loss}")

    for name, tensor in phi.items():
        leaves[f'phi["{name}"]'] = tensor
    with blaming("gradient of loss:", file):
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            raise ValueError(f"loss: does not depend on {name}")
        if not gradient.isfinite().all():
            raise ValueError(f"loss: its gradient with respect to {name} is not finite")


def has_rows(value: object, n: int) -> bool:
    """Whether a value is a tensor with a row for each of n images."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    return len(value) == n


@contextmanager
def blaming(what: str, file: Path) -> Iterator[None]:
    """Turn whatever the code of `file` raises into a ValueError of one line: `what`, the error."""
    try:
        yield
    except (UsageError, MemoryError, torch.OutOfMemoryError):  # these say what to do
        raise
    except Exception as error:
        raise ValueError(f"{what} {describe(error, file)}") from error


def describe(error: Exception, file: Path) -> str:
    """An error in one line, and the last line of `file` on the way to it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{text} (line {lines[-1]})" if lines else text
