"""How near M-FAC and CG come to the exact hypergradient, on vit_mini with rank 1: picture and JSON.

    bisslight pretrain --pool quilts --backbone vit_mini --epochs 30 --warmup-epochs 4 --batch 64 \\
      --base-lr 8e-3 --beta2 0.999 --mask-ratio 0.3 --out runs/pre
    python results/exact.py runs/pre runs/curvature

θ has 1,024 entries here, so its Hessian is dense. Cosine with the exact λ (H + λI)⁻¹ g, and the
norm over its norm. All in float64: training to the optimum would otherwise end elsewhere with
another number of threads.
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

from bisslight import gradients, hessian
from config import AlignConfig
from data import quilts, rng
from extras.plots import COLOURS, pyplot
from hypergradients import cg
from lora import Examples, downstream_loss, init_head, init_theta
from mae import MAE
from mfac import mfac
from support.checkpoints import load_backbone
from support.optim import trainable

CG, UNDAMPED = "CG, 5 steps, c = λ + 1", "CG, 5 steps, no damping"
LABELS = {"cosine": "cosine with the exact q", "ratio": "|q| over the exact |q|"}
STEPS, LAMBDAS, STORED = 1500, (1e-4, 1e-3, 1e-2, 1e-1, 1.0), (1, 5, 20, 80)


def main(weights: Path, out: Path) -> None:
    """At a θ_P near the lower level's optimum, where the implicit function theorem is meant."""
    out.mkdir(parents=True, exist_ok=True)
    cfg = AlignConfig(backbone="vit_mini", dataset="quilts", weights=weights)
    backbone, decoder, arch = load_backbone(cfg)
    task: Any = MAE(backbone.double(), decoder.double(), 0.3)
    (pool, *_), labelled = quilts(0)
    assert isinstance(pool, Tensor)
    mean, std = (torch.tensor(x).double().view(3, 1, 1) for x in (labelled.mean, labelled.std))
    theta = init_theta(arch.depth, 1, arch.dim, rng(0, "lora")).double().requires_grad_()
    head = {name: tensor.double() for name, tensor in init_head(arch.dim, 8, rng(2)).items()}
    phi_P, phi_D = trainable(task.phi), trainable(head)
    assert isinstance(labelled.train.images, Tensor)
    images = (labelled.train.images - mean) / std

    def batch(x: Tensor, seed: int) -> Any:
        return task.prepare((x - mean) / std, *task.draw(len(x), rng(seed, "mask")))

    last = batch(pool[:64], 0)  # one batch: its optimum is the Hessian's
    opt = torch.optim.AdamW([theta, *phi_P.values()], lr=3e-3, weight_decay=0.0)
    for _ in range(STEPS):  # L^P alone; at the smallest λ the pull of Eq. 4 is nothing beside it
        opt.zero_grad()
        task.loss(theta, phi_P, last).backward()
        opt.step()
    examples = Examples(images, labelled.train.targets)
    _, g, _ = gradients(partial(downstream_loss, backbone), theta, phi_D, examples)
    rows = []
    for i in range(max(STORED)):
        x = batch(pool[64 * i % 3900 :][:64], i)
        rows.append(gradients(task.loss, theta, phi_P, x)[1])
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
        products = partial(hessian, task.loss, theta, phi_P, last)
        found = {f"M-FAC, N_L {m}": mfac(G[:, :m], lam)(g) for m in STORED}
        found[CG] = cg(G, lam, products)(g)
        found[UNDAMPED] = cg(G, lam, products, damping=0.0)(g)
        found["identity"] = g
        for name, q in found.items():
            cosine = float(torch.cosine_similarity(q.flatten(), truth.flatten(), 0))
            ratio = float(q.norm() / truth.norm())
            result.append({"lambda": lam, "method": name, "cosine": cosine, "ratio": ratio})
    (out / "curvature.json").write_text(json.dumps({"hessian": about, "rows": result}, indent=1))
    figure = draw(result, about["smallest"])
    figure.savefig(out / "exact.png", dpi=150)
    print(", ".join(f"{name} {value:.3g}" for name, value in about.items()))
    for row in result:
        measured = f"cosine {row['cosine']:.4f}  |q| ratio {row['ratio']:.4g}"
        print(f"λ {row['lambda']:g}  {row['method']:26} {measured}")


def draw(rows: list[dict[str, Any]], smallest: float) -> Any:
    """Against λ at the paper's N_L, and against N_L at three λ (CG does not depend on it)."""
    figure, grid = pyplot().subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    by = {(row["lambda"], row["method"]): row for row in rows}
    for (what, label), (top, bottom) in zip(LABELS.items(), grid.T, strict=True):
        top.axvspan(LAMBDAS[0], -smallest, color="#dddddd", label="H + λI is not positive definite")
        for i, name in enumerate(("M-FAC, N_L 20", CG, UNDAMPED, "identity")):
            style: Any = {
                "color": COLOURS[i],
                "linestyle": ("-", "--", ":", "-.")[i],
                "label": name,
            }
            values = [by[lam, name][what] for lam in LAMBDAS]
            top.plot(LAMBDAS, values, marker="osv^"[i], markersize=4, **style)
        top.set_xscale("log")
        top.set_xlabel("λ")
        for i, lam in enumerate(LAMBDAS[-3:]):
            values = [by[lam, f"M-FAC, N_L {m}"][what] for m in STORED]
            colour = COLOURS[i]
            bottom.plot(STORED, values, color=colour, marker="o", label=f"M-FAC, λ {lam:g}")
            bottom.axhline(by[lam, CG][what], color=colour, linestyle="--", label=f"CG, λ {lam:g}")
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
