"""Each file of the mathematics can be copied alone into an empty folder, and works there."""

import ast
import contextlib
import doctest
import importlib
import io
import itertools
import os
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from child_process import finish, start
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from toy import save_by_class

ROOT = Path(__file__).resolve().parent.parent
MATHEMATICS = ("bisslight", "mfac", "hypergradients", "lora", "head", "mae", "ijepa", "data")
DIRECT = {"torch", "timm", "torchvision", "PIL"}
UNIX = {"fcntl", "grp", "posix", "pwd", "resource", "termios"}  # Windows has none of these


def alone(folder: Path, task: Callable[..., object], *names: str) -> int:
    """task(modules ...) where the only files of the project are FOLDER's; 0: it raised nothing."""
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
    sys.path[:] = [str(folder), *(x for x in sys.path if x and not Path(x, "config.py").exists())]
    for file in ROOT.glob("*.py"):
        sys.modules.pop(file.stem, None)
    torch.set_num_threads(1)
    modules = [importlib.import_module(name) for name in names]
    for module, name in zip(modules, names, strict=True):
        assert module.__file__ == f"{folder}/{name}.py"
    task(*modules)
    return 0


def run_alone(folder: Path, task: Callable[..., object], *names: str) -> None:
    """Copy these files into an empty folder, and do the task there in a process of its own."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    said = folder / "said"
    code = finish(start(partial(alone, folder, task, *names), said))
    assert code == 0, said.read_text()


def run_doctests(module: Any) -> None:
    failed, tried = doctest.testmod(module)
    assert tried and not failed


def run_example(module: Any) -> None:
    """The last lines of its docstring, in a folder with the photographs that they name."""
    folder = Path(module.__file__).parent
    save_by_class(folder / "photos", torch.rand(24, 3, 12, 12), torch.arange(24) % 2)
    os.chdir(folder)
    example = textwrap.dedent(module.__doc__.rpartition("\n\n")[2])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(example, vars(module))
    lines = said.getvalue().splitlines()
    assert lines == ["torch.Size([8, 3, 64, 64]) torch.Size([8])"] * 100


@pytest.mark.parametrize("name", MATHEMATICS)
def test_each_file_of_the_mathematics_lifts_alone(tmp_path: Path, name: str) -> None:
    run_alone(tmp_path / name, run_doctests, name)


def test_the_example_of_data_gives_its_batches(tmp_path: Path) -> None:
    run_alone(tmp_path / "data", run_example, "data")


# --- three alternations ---------------------------------------------------------------------------


def vit(**more: Any) -> VisionTransformer:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    network = VisionTransformer(**sizes, num_classes=0, **more)
    return network.requires_grad_(False)


def train(bisslight: Any, head: Any, task: Any, theta: Tensor, hypergradient: Any) -> None:
    """Algorithm 1 with a linear head and torch's optimisers; the losses of both levels fall."""
    theta_P, theta_D = (theta.clone().requires_grad_() for _ in "PD")
    phi_D = head.init_head(16, 3, torch.Generator())
    for tensor in phi_D.values():
        tensor.requires_grad_()
    lower = torch.optim.AdamW([theta_P, *task.phi.values()], lr=1e-2)
    upper = torch.optim.AdamW([theta_D, *phi_D.values()], lr=1e-2)
    opt_P, opt_D = bisslight.TorchOptimiser(lower, clip=10.0), bisslight.TorchOptimiser(upper)
    state = bisslight.State(theta_P, theta_D, task.phi, phi_D, opt_P, opt_D)
    images = torch.randn(6, 3, 16, 16)
    pretext = itertools.repeat(task.prepare(images, *task.draw(6, torch.Generator())))
    labelled = itertools.repeat(head.Examples(images, torch.arange(6) % 3))
    loss_D = partial(head.downstream_loss, task.backbone)
    steps = SimpleNamespace(alternations=3, lower_steps=2, upper_steps=2, lam=1e-3)
    logs = [*bisslight.algorithm_1(state, steps, task, loss_D, hypergradient, pretext, labelled)]
    assert logs[-1].loss_P[-1] < logs[0].loss_P[0]
    assert logs[-1].loss_D_at_D[-1] < logs[0].loss_D_at_D[0]


def train_both(
    bisslight: Any, mfac: Any, hypergradients: Any, lora: Any, head: Any, mae: Any, ijepa: Any
) -> None:
    """MAE with M-FAC, and I-JEPA with CG, whose teacher follows."""
    torch.manual_seed(0)
    theta = lora.init_theta(2, 4, 16, torch.Generator())
    decoder = mae.Decoder(16, 16, 4, width=8, depth=1, heads=1)
    predictor = ijepa.Predictor(16, 16, width=8, depth=1, heads=1)
    mae.init([decoder], torch.Generator())
    ijepa.init([predictor], torch.Generator())
    train(bisslight, head, mae.MAE(lora.Backbone(vit()), decoder), theta, mfac.mfac)
    backbone = lora.Backbone(vit(class_token=False, global_pool="avg", fc_norm=False))
    task = ijepa.IJEPA(backbone, predictor, ijepa.Masks(min_keep=0), (0.5, 6), theta)
    train(bisslight, head, task, theta, hypergradients.cg)
    assert float((task.state["theta_T"] - theta).abs().max()) > 0


def test_files_alone_in_a_folder_train_together(tmp_path: Path) -> None:
    names = ("bisslight", "mfac", "hypergradients", "lora", "head", "mae", "ijepa")
    run_alone(tmp_path / "empty", train_both, *names)


# --- what they import -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MATHEMATICS)
def test_a_file_of_the_mathematics_imports_torch_and_its_kin_alone(name: str) -> None:
    """Nothing that comes with them by chance or that Windows lacks."""
    imported = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported <= DIRECT | sys.stdlib_module_names - UNIX
