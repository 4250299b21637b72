"""Each file of the mathematics can be copied alone into an empty folder, and trains there."""

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
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from child_process import finish, start
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
MATHEMATICS = ("bisslight", "mfac", "hypergradients", "lora", "mae", "ijepa", "data")
DIRECT = {"torch", "timm", "torchvision", "PIL"}
UNIX = {"fcntl", "grp", "posix", "pwd", "resource", "termios"}  # Windows has none of these
STEPS = 3


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
    draw_images(folder / "photos", 12)
    os.chdir(folder)
    example = textwrap.dedent(module.__doc__.rpartition("\n\n")[2])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(example, vars(module))
    lines = said.getvalue().splitlines()
    assert lines == ["torch.Size([8, 3, 64, 64]) torch.Size([8])"] * 100


def draw_images(root: Path, count: int) -> None:
    """Two classes, of dark and of bright images of several sizes."""
    for name, shade in (("bright", 200), ("dark", 50)):
        (root / name).mkdir(parents=True)
        for i in range(count):
            image = Image.new("RGB", (10 + i, 12), (shade, shade + i, shade))
            image.save(root / name / f"{i}.png")


@pytest.mark.parametrize("name", MATHEMATICS)
def test_each_file_of_the_mathematics_lifts_alone(tmp_path: Path, name: str) -> None:
    run_alone(tmp_path / name, run_doctests, name)


def test_the_example_of_data_gives_its_batches(tmp_path: Path) -> None:
    run_alone(tmp_path / "data", run_example, "data")


def test_a_file_that_needs_another_one_would_be_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        run_alone(tmp_path / "align", run_doctests, "align")


# --- three steps of training ----------------------------------------------------------------------


class Encoder(nn.Module):
    """A backbone of one's own: f_θ of one linear layer, plus θ; a token for each of 4 patches."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.layer = nn.Linear(12, 8)

    def forward(
        self, images: Tensor, theta: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        patches = images.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)
        x = self.layer(patches.flatten(3).flatten(1, 2))  # (B, 4, 8)
        if theta is not None:
            x = x + theta
        if keep is not None:
            x = x.gather(1, keep[..., None].expand(-1, -1, 8))
        first = torch.zeros(len(x), self.prefix, 8)
        return torch.cat([first, x], 1)


def train(loss: Callable[[], Tensor], tensors: list[Tensor]) -> None:
    """Three steps with torch's own AdamW; the loss falls."""
    opt = torch.optim.AdamW(tensors, lr=1e-2)
    values = []
    for _ in range(STEPS):
        value = loss()
        opt.zero_grad()
        value.backward()
        opt.step()
        values.append(float(value.detach()))
    values.append(float(loss().detach()))
    assert values[-1] < values[0], values


def train_bisslight(bisslight: Any, *hypergradients: Any) -> None:
    """Algorithm 1 on two quadratics, with torch's optimisers; q = g, M-FAC, CG."""

    class Batch(NamedTuple):
        images: Tensor

    def loss(theta: Tensor, phi: Any, batch: Batch) -> Tensor:
        return (theta - phi["x"] - batch.images.mean()).square().sum()

    task: Any = SimpleNamespace(loss=loss, after_step=lambda theta_P: None)
    inverses: list[Any] = [lambda G, lam, H: torch.clone]
    for module in hypergradients:
        inverses.append(getattr(module, "mfac", None) or module.cg)
    for inverse in inverses:
        theta_P, theta_D = (torch.ones(2, 3, requires_grad=True) for _ in "PD")
        phi_P, phi_D = ({"x": torch.zeros(3, requires_grad=True)} for _ in "PD")
        lower = torch.optim.AdamW([theta_P, *phi_P.values()], lr=0.1)
        upper = torch.optim.SGD([theta_D, *phi_D.values()], lr=0.1)
        opt_P = bisslight.TorchOptimiser(lower, clip=1.0)
        opt_D = bisslight.TorchOptimiser(upper)
        state = bisslight.State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D)
        steps = SimpleNamespace(alternations=STEPS, lower_steps=2, upper_steps=1, lam=0.1)
        batches = itertools.repeat(Batch(torch.zeros(4, 1)))
        logs = [*bisslight.algorithm_1(state, steps, task, loss, inverse, batches, batches)]
        assert state.done == STEPS
        assert logs[-1].loss_P[-1] < logs[0].loss_P[0]
        assert logs[-1].loss_D_at_D[-1] < logs[0].loss_D_at_D[0]


def train_mfac(mfac: Any) -> None:
    """Steps of M-FAC's q down a quadratic, of which it has the gradients."""
    theta = torch.tensor([[3.0, -2.0]])
    for _ in range(STEPS):
        G = torch.stack([2 * theta, 2 * theta + 0.1], 1)  # (1, 2, 2)
        theta = theta - 0.3 * mfac.mfac(G, 100.0)(2 * theta)
    assert float(theta.norm()) < 2


def train_hypergradients(hypergradients: Any) -> None:
    """Steps of Newton's method, damped, on a quadratic with Hessian 4."""
    theta = torch.tensor([[3.0, -2.0]])
    for _ in range(STEPS):
        inverse = hypergradients.exact(theta[:, None], 1.0, lambda: lambda u: 4 * u)
        theta = theta - inverse(4 * theta) / 1.0
    torch.testing.assert_close(theta, torch.tensor([[3.0, -2.0]]) * 0.2**STEPS)


def vit(**more: Any) -> VisionTransformer:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    network = VisionTransformer(**sizes, num_classes=0, **more)
    return network.requires_grad_(False)


def train_lora(lora: Any) -> None:
    torch.manual_seed(0)
    backbone = lora.Backbone(vit())
    theta = lora.init_theta(2, 4, 16, torch.Generator()).requires_grad_()
    phi = lora.init_head(16, 3, torch.Generator())
    leaves = [theta, *(x.requires_grad_() for x in phi.values())]
    batch = lora.Examples(torch.randn(6, 3, 16, 16), torch.arange(6) % 3)
    train(lambda: lora.downstream_loss(backbone, theta, phi, batch), leaves)


def train_mae(mae: Any) -> None:
    """On a backbone of one's own; patches that were removed are not all predicted alike."""
    torch.manual_seed(0)
    decoder = mae.Decoder(8, 4, 2, width=8, depth=1, heads=1, prefix=0)
    mae.init([decoder], torch.Generator())
    task = mae.MAE(Encoder(prefix=0), decoder, 0.5)
    images = torch.rand(5, 3, 4, 4)
    batch = task.prepare(images, *task.draw(5, torch.Generator()))
    prediction, mask = task.predict(None, task.phi, batch)
    first, second = prediction[0][mask[0] > 0]
    assert float((first - second).detach().abs().max()) > 1e-3
    theta = torch.zeros(8, requires_grad=True)
    train(lambda: task.loss(theta, task.phi, batch), [theta, *task.phi.values()])


def train_ijepa(ijepa: Any) -> None:
    """The same; tokens that are asked for are not all predicted alike, and the teacher follows."""
    torch.manual_seed(0)
    predictor = ijepa.Predictor(8, 4, width=8, depth=1, heads=1)
    ijepa.init([predictor], torch.Generator())
    theta = torch.zeros(8, requires_grad=True)
    masks = ijepa.Masks(target_scale=(0.25, 0.25), context_scale=(1, 1), min_keep=0, overlap=True)
    task = ijepa.IJEPA(Encoder(prefix=0), predictor, masks, (0.5, STEPS), theta)
    context = torch.tensor([[[0, 1]]]).expand(5, -1, -1)
    targets = torch.tensor([[[2, 3]]]).expand(5, -1, -1)
    batch = task.prepare(torch.rand(5, 3, 4, 4), context, targets)
    first, second = task.predict(theta, task.phi, batch)[0, 0, 0]
    assert float((first - second).detach().abs().max()) > 1e-6
    train(lambda: task.loss(theta, task.phi, batch), [theta, *task.phi.values()])
    task.after_step(theta)
    assert float(task.state["theta_T"].abs().max()) > 0
    drawn = task.draw(5, torch.Generator())
    assert [len(part) for part in drawn] == [5, 5]


def train_data(data: Any) -> None:
    """A linear layer on a folder of drawn images, dark and bright ones, through the loader."""
    drawn = Path(data.__file__).parent / "drawn"
    draw_images(drawn, 6)
    task = data.folder(drawn, seed=0)
    half = (0.5, 0.5, 0.5)
    images = data.Images(task.train, data.Transform(8, half, half, "crop"), train=True)
    draws = data.stream(len(task.train.targets), 4, 0, "train", range(STEPS))
    torch.manual_seed(0)
    layer = nn.Linear(3 * 8 * 8, len(task.classes))
    opt = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    values = []
    for x, y, *_ in data.batches(images, draws, 0, torch.device("cpu")):
        value = F.cross_entropy(layer(x.flatten(1)), y)
        opt.zero_grad()
        value.backward()
        opt.step()
        values.append(float(value.detach()))
    assert len(values) == STEPS and values[-1] < values[0], values


def train_all(bisslight: Any, mfac: Any, lora: Any, mae: Any) -> None:
    """MAE and a linear head on a tiny Vision Transformer, as README says that it can be done."""
    torch.manual_seed(0)
    backbone = lora.Backbone(vit())
    decoder = mae.Decoder(16, 16, 4, width=8, depth=1, heads=1)
    mae.init([decoder], torch.Generator())
    task = mae.MAE(backbone, decoder)
    theta = lora.init_theta(2, 4, 16, torch.Generator())
    theta_P, theta_D = (theta.clone().requires_grad_() for _ in "PD")
    phi_D = lora.init_head(16, 3, torch.Generator())
    for tensor in phi_D.values():
        tensor.requires_grad_()
    opt_P = torch.optim.AdamW([theta_P, *task.phi.values()], lr=1e-2)
    opt_D = torch.optim.AdamW([theta_D, *phi_D.values()], lr=1e-2)
    wrap = bisslight.TorchOptimiser
    state = bisslight.State(theta_P, theta_D, task.phi, phi_D, wrap(opt_P), wrap(opt_D))
    images = torch.randn(6, 3, 16, 16)
    pretext = itertools.repeat(task.prepare(images, *task.draw(6, torch.Generator())))
    labelled = itertools.repeat(lora.Examples(images, torch.arange(6) % 3))
    loss_D = partial(lora.downstream_loss, backbone)
    steps = SimpleNamespace(alternations=STEPS, lower_steps=2, upper_steps=2, lam=1e-3)
    logs = [*bisslight.algorithm_1(state, steps, task, loss_D, mfac.mfac, pretext, labelled)]
    assert logs[-1].loss_P[-1] < logs[0].loss_P[0]
    assert logs[-1].loss_D_at_D[-1] < logs[0].loss_D_at_D[0]


TRAINING: list[tuple[Callable[..., None], tuple[str, ...]]] = [
    (train_bisslight, ("bisslight",)),
    (train_bisslight, ("bisslight", "mfac", "hypergradients")),
    (train_mfac, ("mfac",)),
    (train_hypergradients, ("hypergradients",)),
    (train_lora, ("lora",)),
    (train_mae, ("mae",)),
    (train_ijepa, ("ijepa",)),
    (train_data, ("data",)),
    (train_all, ("bisslight", "mfac", "lora", "mae")),
]


@pytest.mark.parametrize(("task", "names"), TRAINING)
def test_files_alone_in_a_folder_train_for_three_steps(
    tmp_path: Path, task: Callable[..., None], names: tuple[str, ...]
) -> None:
    run_alone(tmp_path / "empty", task, *names)


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
