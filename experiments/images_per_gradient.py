"""Why is M-FAC's F so small? Stored gradients of 1 to 256 images, beside the Gauss-Newton matrix N.

python -m experiments.images_per_gradient    # two minutes of CPU; its table is in what_q_is.md
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from align import batches_left, prepare, probe
from bisslight import agreement, algorithm_1
from config import AlignConfig, Record
from experiments.newton import NewtonPasses, compare, newton
from experiments.recipe import markdown, progress, run_script
from experiments.what_q_is import ALPHABETS, SETTINGS
from mfac import mfac
from support.experiment import open_experiment, pretext_batches
from support.files import write_atomic

IMAGES = (1, 4, 16, 64, 256)  # in each stored gradient
GRADIENTS = 200  # stored, all of them at one θ
ROWS = Path(__file__).with_suffix(".json")


def measure(alphabet: str, gradients: int = GRADIENTS, **settings: object) -> list[Record]:
    """Return a row for each of IMAGES, with F and N where an align run of the paper's λ ends."""
    cfg = AlignConfig(**SETTINGS | {"dataset": f"omniglot:{alphabet}"} | settings)
    experiment = open_experiment(cfg)
    prepared = prepare(experiment)
    list(probe(experiment, prepared))
    state, task, head, hypergrad, _ = prepared
    list(algorithm_1(state, cfg, task, head.loss, hypergrad, *batches_left(experiment, prepared)))
    theta = state.theta_P.detach().requires_grad_()

    def batches(images: int, n: int) -> list[object]:
        """Pretext batches of so many images, n of them."""
        size = experiment.networks.arch.image_size
        assert experiment.pool is not None
        inputs = (task, experiment.pool, size, images, range(n), cfg, experiment.device)
        return list(pretext_batches(*inputs))

    def gradient(batch: object) -> Tensor:
        """The gradient of L^P with respect to θ."""
        return torch.autograd.grad(task.loss(theta, state.phi_P, batch), theta)[0]

    (labelled,) = experiment.examples("downstream", 1, cfg.d_batch, range(1), 0.0)
    g = torch.autograd.grad(head.loss(theta, state.phi_D, labelled), theta)[0]
    passes = NewtonPasses(task=task)  # type: ignore[arg-type]
    N = passes.hessian(task.loss, theta, state.phi_P, batches(256, 1)[0])
    of_N = float(agreement(g, newton(g[:, None], cfg.lam, lambda: N)(g))[0])
    rows: list[Record] = []
    for images in IMAGES:
        G = torch.stack([gradient(batch) for batch in batches(images, gradients)], dim=1)
        found = compare(G, g, N, cfg.lam)
        rows.append(
            {
                "alphabet": alphabet,
                "images": images,
                "F along g, in λ": f"{found['along_F']:.2g}",
                "N along g, in λ": f"{found['along_N']:.2g}",
                "|q|/|g| with F": f"{float(agreement(g, mfac(G, cfg.lam)(g))[0]):.4f}",
                "with N": f"{of_N:.2f}",
            }
        )
    return rows


def main(path: Path = ROWS) -> None:
    """Measure on both alphabets, print the table, and write it."""
    torch.set_num_threads(1)
    rows: list[Record] = []
    for alphabet in progress(ALPHABETS, len(ALPHABETS), "alphabets"):
        rows += measure(alphabet)
    print(markdown(rows))
    write_atomic(path, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
