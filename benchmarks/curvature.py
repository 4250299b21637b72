"""How near M-FAC and CG come to the exact hypergradient, on vit_mini with rank 1: a picture, and its numbers as JSON.

    bisslight pretrain --pool quilts --backbone vit_mini --epochs 30 --warmup-epochs 4 --batch 64 --base-lr 8e-3 \
      --beta2 0.999 --mask-ratio 0.3 --out runs/pre
    python benchmarks/curvature.py runs/pre runs/curvature

θ has 1,024 entries here, so its Hessian is dense. Cosine with the exact λ (H + λI)⁻¹ g, and the norm over its norm.
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

STEPS, LAMBDAS, STORED = 1500, (1e-5, 1e-4, 1e-3, 1e-2, 1e-1), (1, 5, 20, 80)


def main(weights: Path, out: Path) -> None:
    """Gradients at a θ_P near the lower level's optimum, where the implicit function theorem is meant to be used."""
    out.mkdir(parents=True, exist_ok=True)
    vit, decoder, arch = load(weights / "backbone.pth", Model(backbone="vit_mini").backbone)
    backbone = Backbone(vit).requires_grad_(False)
    task = MAE(backbone, decoder, 0.3)
    pool, labelled = quilts(0)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (labelled.mean, labelled.std))
    theta = init_theta(arch.depth, 1, arch.dim, rng(0, "lora")).requires_grad_()
    phi_P, phi_D = trainable(task.phi), trainable(init_head(arch.dim, 8, rng(2)))
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
        H = torch.autograd.functional.hessian(lambda x: loss_P(x.view_as(theta)), flat).double()
    result: list[dict[str, Any]] = []
    for lam in LAMBDAS:
        A = H + lam * torch.eye(len(flat))
        truth = (lam * torch.linalg.solve(A, g.flatten().double())).view_as(g).float()  # Eq. 5
        found = {f"M-FAC, N_L {m}": mfac(G[:, :m], lam, theta, loss_P).apply(g) for m in STORED}
        found["CG, 5 steps, c = λ + 1"] = cg(G, lam, theta, loss_P).apply(g)
        found["CG, 5 steps, no damping"] = cg(G, lam, theta, loss_P, damping=0.0).apply(g)
        found["identity"] = g
        for name, q in found.items():
            cosine = float(torch.cosine_similarity(q.flatten(), truth.flatten(), 0))
            result.append(
                {"lambda": lam, "method": name, "cosine": cosine, "norm_ratio": float(q.norm() / truth.norm())}
            )
        result.append(
            {
                "lambda": lam,
                "method": "exact over g",
                "cosine": float(torch.cosine_similarity(g.flatten(), truth.flatten(), 0)),
                "norm_ratio": float(truth.norm() / g.norm()),
            }
        )
    (out / "curvature.json").write_text(json.dumps(result, indent=1))
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    names = list(dict.fromkeys(row["method"] for row in result if row["method"] != "exact over g"))
    for axis, what in zip(axes, ("cosine", "norm_ratio"), strict=True):
        for i, name in enumerate(names):
            values = [row[what] for row in result if row["method"] == name]
            axis.plot(LAMBDAS, values, "o-", color=COLOURS[i % len(COLOURS)], label=name, linewidth=1.3, markersize=4)
        axis.set_xscale("log")
        axis.set_xlabel("λ")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("cosine with the exact q")
    axes[1].set_ylabel("|q| over the exact |q|")
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(out / "curvature.png", dpi=150)
    for row in result:
        print(f"λ {row['lambda']:g}  {row['method']:38} cosine {row['cosine']:.4f}  |q| ratio {row['norm_ratio']:.4g}")


if __name__ == "__main__":
    typer.run(main)
