"""How near M-FAC and CG come to the exact hypergradient, on vit_mini with rank 1.

    python -m experiments.exact --out runs/exact

On Omniglot. θ has 1,024 entries here, so its whole Hessian H fits into memory. A picture and JSON
say of each method's q its cosine with the exact one, λ (H + λI)⁻¹ g, and its norm divided by that
of the exact one. All is in float64: training to the optimum would otherwise end elsewhere with
another number of threads.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bisslight import Passes
from config import AlignConfig, Record
from data import Stored, Task, rng
from experiments.recipe import write_table
from extras.plots import COLOURS, save
from head import Examples, Phi, downstream_loss, init_head
from hypergradients import cg
from lora import init_theta
from mae import MAE, Batch, Decoder
from mfac import mfac
from support.benchmarks import open_pool, open_task
from support.checkpoints import load_backbone
from support.optim import trainable

CG = "CG, 5 steps, c = λ + 1"
UNDAMPED = "CG, 5 steps, no damping"
LABELS = {"cosine": "cosine with the exact q", "ratio": "|q| over the exact |q|"}
LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
STORED = (1, 5, 20, 80)  # N_L


class Point(NamedTuple):
    """Where the hypergradients are compared: near the optimum of L^P on `batch`."""

    task: MAE
    theta: Tensor
    phi_P: Phi
    batch: Batch
    g: Tensor  # the downstream gradient
    G: Tensor  # (K, 80, p), pretext gradients on later batches, which overlap


def main(out: Path = Path("runs/exact"), steps: int = 1500) -> None:
    """Compare near the lower level's optimum, where the theorem applies that Eq. 5 comes from."""
    out.mkdir(parents=True, exist_ok=True)
    point = optimum(steps)
    H = dense_hessian(point)
    eigenvalues = torch.linalg.eigvalsh(H)
    smallest = float(eigenvalues[0])
    print(f"eigenvalues of H from {smallest:.3g} to {float(eigenvalues[-1]):.3g}")
    # The trace of a block of M-FAC's F, to which λI is added, with the paper's N_L of 20
    squared = float(point.G[:, :20].square().sum(-1).mean())
    print(f"mean squared norm of a block's gradient {squared:.3g}")
    rows: list[Record] = []
    for lam in LAMBDAS:
        rows += compare(point, H, lam)
    write_table(rows, out / "exact")
    draw(rows, smallest, out / "exact.png")


def optimum(steps: int) -> Point:
    """Train θ_P and φ_P on one batch; then take the gradients that the methods are given."""
    cfg = AlignConfig(backbone="vit_mini", dataset="omniglot:Greek")
    loaded = load_backbone(cfg, cfg.weights)
    backbone = loaded.backbone.double()
    decoder = loaded.head.double()
    arch = loaded.arch
    assert isinstance(decoder, Decoder)
    task = MAE(backbone, decoder, cfg.mask_ratio)
    pool = open_pool(cfg.pool, cfg.data_root)
    labelled = open_task(cfg.dataset, cfg.data_seed, cfg.data_root)
    images = as_inputs(pool.images, labelled)
    unlabelled = images[torch.randperm(len(images), generator=rng(0, "order"))]
    theta = init_theta(arch.depth, 1, arch.dim, rng(0, "lora")).double().requires_grad_()
    fresh = init_head(arch.dim, len(labelled.classes), rng(2))
    head = {name: tensor.double() for name, tensor in fresh.items()}
    phi_P = trainable(task.phi)
    phi_D = trainable(head)

    def batch(first: int, seed: int) -> Batch:
        """The 64 unlabelled images from number `first` on, with masks of this seed."""
        images = unlabelled[first : first + 64]
        return task.prepare(images, *task.draw(len(images), rng(seed, "mask")))

    trained_on = batch(0, 0)  # all steps take this batch, and the Hessian is of its loss
    train(task, theta, phi_P, trained_on, steps)
    examples = Examples(as_inputs(labelled.train.images, labelled), labelled.train.targets)
    g = Passes().gradients(partial(downstream_loss, backbone), theta, phi_D, examples).theta
    stored = []
    for i in range(1, 1 + max(STORED)):  # other batches than the one that was trained on
        other = batch(64 * i % (len(images) - 64), i)
        stored.append(Passes().gradients(task.loss, theta, phi_P, other).theta)
    return Point(task, theta, phi_P, trained_on, g, torch.stack(stored, 1))


def as_inputs(images: Stored, normalised_as: Task) -> Tensor:
    """Network inputs in float64, of images in memory; mean and std are those of a task."""
    mean = torch.tensor(normalised_as.mean).double().view(3, 1, 1)
    std = torch.tensor(normalised_as.std).double().view(3, 1, 1)
    return (torch.as_tensor(images) - mean) / std


def train(task: MAE, theta: Tensor, phi_P: Phi, batch: Batch, steps: int) -> None:
    """Minimise L^P on one batch: change θ_P and φ_P in place.

    The pull of Eq. 4 is left out, since at the smallest λ it is nothing beside L^P.
    """
    optimiser = torch.optim.AdamW([theta, *phi_P.values()], lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        optimiser.zero_grad()
        task.loss(theta, phi_P, batch).backward()
        optimiser.step()


def dense_hessian(point: Point) -> Tensor:
    """H = ∇²_θ L^P, (1024, 1024)."""
    flat = point.theta.detach().flatten()

    def loss_of(x: Tensor) -> Tensor:
        """L^P at θ, which is given as a vector."""
        return point.task.loss(x.view_as(point.theta), point.phi_P, point.batch)

    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        H: Tensor = torch.autograd.functional.hessian(loss_of, flat)
    return H


def compare(point: Point, H: Tensor, lam: float) -> list[Record]:
    """Rows that compare each method's q with the exact one (Eq. 5), at one λ."""
    A = H + lam * torch.eye(len(H), dtype=torch.float64)
    exact = lam * torch.linalg.solve(A, point.g.flatten())
    products = partial(Passes().hessian, point.task.loss, point.theta, point.phi_P, point.batch)
    answers = {}
    for m in STORED:
        answers[f"M-FAC, N_L {m}"] = mfac(point.G[:, :m], lam)(point.g)
    answers[CG] = cg(point.G, lam, products, damping=1.0, prefactor="c")(point.g)  # as in BiSSL
    answers[UNDAMPED] = cg(point.G, lam, products)(point.g)
    answers["identity"] = point.g
    rows: list[Record] = []
    for method, q in answers.items():
        cosine = float(torch.cosine_similarity(q.flatten(), exact, 0))
        ratio = float(q.norm() / exact.norm())
        rows.append({"lambda": lam, "method": method, "cosine": cosine, "ratio": ratio})
    return rows


def draw(rows: list[Record], smallest: float, path: Path) -> None:
    """Draw the cosine (left) and the ratio of the norms (right).

    Top: against λ, at the paper's N_L. Bottom: against N_L, at the three largest λ; CG does not
    depend on N_L, so its line is flat. `smallest` is the least eigenvalue of H.
    """
    figure = Figure((9, 6.4))
    grid = figure.subplots(2, 2)
    values = {(row["lambda"], row["method"]): row for row in rows}
    for key, label, top, bottom in zip(LABELS, LABELS.values(), *grid, strict=True):
        top.axvspan(LAMBDAS[0], -smallest, color="#dddddd", label="H + λI is not positive definite")
        for i, method in enumerate(("M-FAC, N_L 20", CG, UNDAMPED, "identity")):
            heights = [values[lam, method][key] for lam in LAMBDAS]
            style = ["o-", "s--", "v:", "^-."][i]
            top.plot(LAMBDAS, heights, style, color=COLOURS[i], markersize=4, label=method)
        top.set_xscale("log")
        top.set_xlabel("λ")
        for i, lam in enumerate(LAMBDAS[-3:]):
            heights = [values[lam, f"M-FAC, N_L {m}"][key] for m in STORED]
            bottom.plot(STORED, heights, "o-", color=COLOURS[i], label=f"M-FAC, λ {lam:g}")
            height = values[lam, CG][key]
            bottom.axhline(height, color=COLOURS[i], linestyle="--", label=f"CG, λ {lam:g}")
        bottom.set_xscale("log")
        bottom.set_xticks(STORED, [str(m) for m in STORED])
        bottom.minorticks_off()
        bottom.set_xlabel("N_L, stored gradients")
        if key == "ratio":
            top.set_yscale("log")
        for axes in (top, bottom):
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        for axis in (top.xaxis, top.yaxis):
            axis.set_major_formatter("{x:g}")
    grid[0, 0].legend(fontsize=7)
    grid[1, 0].legend(fontsize=7)
    save(figure, path)


if __name__ == "__main__":
    typer.run(main)
