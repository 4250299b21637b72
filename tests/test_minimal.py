"""`examples/minimal.py`, BiSSLight in one page, against `bisslight.algorithm_1` and a quadratic."""

import ast
import importlib.util
import itertools
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import close
from torch import Tensor

import mae
from bisslight import State, algorithm_1
from config import BACKBONES
from lora import Backbone, Examples, downstream_loss, init_head, init_theta
from mfac import mfac
from support.checkpoints import build_head, build_vit, initialise
from support.optim import Group, Optimiser, decay_groups, trainable

PAGE = Path(mae.__file__).parent / "examples/minimal.py"
CLIP = 0.1  # below the norms of this test


@pytest.mark.parametrize(("name", "more"), [("minimal", set()), ("one_page", {"numpy"})])
def test_a_page_needs_torch_alone_and_for_its_images_numpy(name: str, more: set[str]) -> None:
    """And matplotlib for a picture, where it is installed."""
    found = set()
    for node in ast.walk(ast.parse(PAGE.with_stem(name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    assert found - sys.stdlib_module_names - {"matplotlib"} == {"torch"} | more


def test_it_ends_where_the_library_ends() -> None:
    """MAE on a LoRA ViT; AdamW with decay, and clipping that acts, at both levels; float64."""
    arch, rng = BACKBONES["vit_mini"], torch.Generator().manual_seed(0)
    backbone = Backbone(build_vit(arch)).double().requires_grad_(False)
    decoder = build_head(arch, "mae").double()
    initialise([backbone.vit, decoder], "mae", rng)
    task, loss_D = mae.MAE(backbone, decoder), partial(downstream_loss, backbone)
    start = init_theta(arch.depth, 8, arch.dim, rng).double()
    head = {k: x.double() for k, x in init_head(arch.dim, 3, rng).items()}
    images = torch.randn(6, 4, 3, arch.image_size, arch.image_size, generator=rng).double()
    pretext = [task.prepare(x, *(y.double() for y in task.draw(4, rng))) for x in images]
    labelled = [Examples(x, torch.randint(3, (4,), generator=rng)) for x in images]
    c = SimpleNamespace(alternations=2, lower_steps=3, upper_steps=2, lam=1e-3)

    def groups(theta: Any, phi: Any, lr: float) -> list[Group]:
        """θ decayed, φ as in MAE: its vectors are not."""
        return [Group(theta, lr, 0.05), *decay_groups(phi.values(), lr / 10, 0.05)]

    def library() -> tuple[Tensor, Any]:
        P, D = (trainable({"theta": start})["theta"] for _ in "PD")
        phi_P, phi_D = trainable(task.phi), trainable(head)
        opt_P = Optimiser(groups([P], phi_P, 0.01), None, (0.9, 0.95), CLIP)
        opt_D = Optimiser(groups([D], phi_D, 0.02), None, (0.9, 0.999), CLIP)
        s = State(P, D, phi_P, phi_D, opt_P, opt_D)
        logs = [*algorithm_1(s, c, task, loss_D, mfac, iter(pretext), iter(labelled))]
        return P.detach(), logs

    def one_page() -> Tensor:
        theta_D = [*trainable({str(k): row for k, row in enumerate(start)}).values()]
        phi_P, phi_D = trainable(task.phi), trainable(head)

        def loss(of: Any, names: Any) -> Any:
            return lambda theta, phi, batch: of(
                torch.stack(theta), dict(zip(names, phi, strict=True)), batch
            )

        def adamw(names: Any, lr: float, beta_2: float) -> Any:
            def made(theta: list[Tensor], phi: list[Tensor]) -> torch.optim.Optimizer:
                of = groups(theta, dict(zip(names, phi, strict=True)), lr)
                params = [
                    {"params": g.tensors, "lr": g.lr, "weight_decay": g.weight_decay} for g in of
                ]
                return torch.optim.AdamW(params, betas=(0.9, beta_2))

            return made

        *_, theta_P = runpy.run_path(str(PAGE))["algorithm_1"](
            theta_D, [*phi_P.values()], [*phi_D.values()],
            loss(task.loss, phi_P), loss(loss_D, phi_D),
            adamw(phi_P, 0.01, 0.95), adamw(phi_D, 0.02, 0.999),
            c.lam, c.alternations, c.lower_steps, c.upper_steps, iter(pretext), iter(labelled),
            CLIP,
        )  # fmt: skip
        return torch.stack(theta_P).detach()

    expected, logs = library()
    assert min(*logs[0].norm_P, *logs[0].norm_D) > CLIP  # so clipping acts
    assert max(logs[1].q_over_g) < 0.999  # and so does the curvature
    close(one_page(), expected, 1e-12)


def test_it_shows_a_quadratic_whose_optimum_it_approaches() -> None:
    run = subprocess.run([sys.executable, PAGE], capture_output=True, text=True, check=True)
    found = [float(line.split()[-1]) for line in run.stdout.splitlines()]
    assert len(found) >= 5
    assert all(b < a for a, b in itertools.pairwise(found))
    assert found[-1] < 0.1 * found[0]


@pytest.mark.parametrize(("factor", "end"), [(1, 3.1), (0, 0.23)])
def test_with_q_equal_to_g_or_to_0_it_ends_where_its_comment_says(
    factor: int, end: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("minimal", PAGE)
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    monkeypatch.setattr(page, "eq_10", lambda M_k, g_k, lam: factor * g_k)
    page.quadratic()
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(end, rel=0.03)
