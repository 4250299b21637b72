"""How near M-FAC and CG come to the exact hypergradient, on vit_mini with rank 1: a picture, and its numbers as JSON.

    bisslight pretrain --pool quilts --backbone vit_mini --epochs 30 --warmup-epochs 4 --batch 64 --base-lr 8e-3 \
      --beta2 0.999 --mask-ratio 0.3 --out runs/pre
    python results/curvature.py runs/pre runs/curvature

θ has 1,024 entries here, so its Hessian is dense. Cosine with the exact λ (H + λI)⁻¹ g, and the norm over its norm.
All in float64: training to the optimum would otherwise end elsewhere with another number of threads.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent.parent))

from bisslight import gradients
from cg import cg
from config import Model
from data import quilts
from figures import COLOURS, pyplot
from finetune import downstream_loss
from lora import Backbone, init_head, init_theta
from mae import MAE, load
from mfac import mfac
from runtime import rng, trainable

CG, UNDAMPED = "CG, 5 steps, c = λ + 1", "CG, 5 steps, no damping"
LABELS = {"cosine": "cosine with the exact q", "ratio": "|q| over the exact |q|"}
STEPS, LAMBDAS, STORED = 1500, (1e-4, 1e-3, 1e-2, 1e-1, 1.0), (1, 5, 20, 80)


def main(weights: Path, out: Path) -> None:
    """Gradients at a θ_P near the lower level's optimum, where the implicit function theorem is meant to be used."""
    out.mkdir(parents=True, exist_ok=True)
    vit, decoder, arch = load(weights / "backbone.pth", Model(backbone="vit_mini").backbone)
    backbone = Backbone(vit.double()).requires_grad_(False)
    task = MAE(backbone, decoder.double(), 0.3)
    pool, labelled = quilts(0)
    mean, std = (torch.tensor(x).double().view(3, 1, 1) for x in (labelled.mean, labelled.std))
    theta = init_theta(arch.depth, 1, arch.dim, rng(0, "lora")).double().requires_grad_()
    head = {name: tensor.double() for name, tensor in init_head(arch.dim, 8, rng(2)).items()}
    phi_P, phi_D = trainable(task.phi), trainable(head)
    assert isinstance(labelled.train.images, Tensor)
    images = (labelled.train.images - mean) / std
    last = task.prepare((pool[:64] - mean) / std, rng(0, "mask"))  # one batch: its optimum is the Hessian's
    opt = torch.optim.AdamW([theta, *phi_P.values()], lr=3e-3, weight_decay=0.0)
    for _ in range(STEPS):  # L^P alone; at the smallest λ the pull of Eq. 4 is nothing beside it
        opt.zero_grad()
        task.loss(theta, phi_P, last).backward()
        opt.step()
    _, g, _ = gradients(downstream_loss(backbone), theta, phi_D, (images, labelled.train.targets))
    rows = []
    for i in range(max(STORED)):
        x = (pool[64 * i % 3900 :][:64] - mean) / std
        rows.append(gradients(task.loss, theta, phi_P, task.prepare(x, rng(i, "mask")))[1])
    G = torch.stack(rows, 1)
    loss_P = partial(task.loss, phi=phi_P, batch=last)
    flat = theta.detach().flatten()
    with sdpa_kernel(SDPBackend.MATH):
        H = torch.autograd.functional.hessian(lambda x: loss_P(x.view_as(theta)), flat)
    eigenvalues = torch.linalg.eigvalsh(H)
    about = {"smallest": float(eigenvalues[0]), "largest": float(eigenvalues[-1])}
    about["mean of tr GGᵀ / m over blocks"] = float(G[:, :20].square().sum(-1).mean())
    result: list[dict[str, Any]] = []
    for lam in LAMBDAS:
        A = H + lam * torch.eye(len(flat), dtype=torch.float64)
        truth = (lam * torch.linalg.solve(A, g.flatten())).view_as(g)  # Eq. 5
        found = {f"M-FAC, N_L {m}": mfac(G[:, :m], lam, theta, loss_P).apply(g) for m in STORED}
        found[CG] = cg(G, lam, theta, loss_P).apply(g)
        found[UNDAMPED] = cg(G, lam, theta, loss_P, damping=0.0).apply(g)
        found["identity"] = g
        for name, q in found.items():
            cosine = float(torch.cosine_similarity(q.flatten(), truth.flatten(), 0))
            result.append({"lambda": lam, "method": name, "cosine": cosine, "ratio": float(q.norm() / truth.norm())})
    (out / "curvature.json").write_text(json.dumps({"hessian": about, "rows": result}, indent=1))
    figure = draw(result, about["smallest"])
    figure.savefig(out / "curvature.png", dpi=150)
    print(", ".join(f"{name} {value:.3g}" for name, value in about.items()))
    for row in result:
        print(f"λ {row['lambda']:g}  {row['method']:26} cosine {row['cosine']:.4f}  |q| ratio {row['ratio']:.4g}")


def draw(rows: list[dict[str, Any]], smallest: float) -> Any:
    """Against λ at the paper's N_L, and against N_L at three λ; what does not depend on N_L is a level line."""
    figure, grid = pyplot().subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    by = {(row["lambda"], row["method"]): row for row in rows}
    for (what, label), (top, bottom) in zip(LABELS.items(), grid.T, strict=True):
        top.axvspan(LAMBDAS[0], -smallest, color="#dddddd", label="H + λI is not positive definite")
        for i, name in enumerate(("M-FAC, N_L 20", CG, UNDAMPED, "identity")):
            style = {"color": COLOURS[i], "linestyle": ("-", "--", ":", "-.")[i], "marker": "osv^"[i], "label": name}
            top.plot(LAMBDAS, [by[lam, name][what] for lam in LAMBDAS], **style, markersize=4)
        top.set_xscale("log")
        top.set_xlabel("λ")
        for i, lam in enumerate(LAMBDAS[-3:]):
            values = [by[lam, f"M-FAC, N_L {m}"][what] for m in STORED]
            bottom.plot(STORED, values, color=COLOURS[i], marker="o", markersize=4, label=f"M-FAC, λ {lam:g}")
            bottom.axhline(by[lam, CG][what], color=COLOURS[i], linestyle="--", linewidth=1, label=f"CG, λ {lam:g}")
        bottom.set_xscale("log")
        bottom.set_xticks(STORED, [str(m) for m in STORED])
        bottom.minorticks_off()
        bottom.set_xlabel("N_L, stored gradients")
        for axis in (top, bottom):
            axis.set_ylabel(label)
            axis.set_yscale("log" if what == "ratio" else "linear")
            axis.grid(alpha=0.3)
    grid[0, 0].legend(fontsize=7)
    grid[1, 0].legend(fontsize=7)
    return figure


if __name__ == "__main__":
    typer.run(main)
