"""How alike the backbones of BiSSL and BiSSLight are: CKA and RSA (App. D.2.3; fig:repr_sim_*).

    python -m experiments.similarity --backbone vit_b16 --dataset cub200

Two networks are compared by what enters their heads on the same N validation images, X and Y
(N, d); both measures are 1 where these are equal:

    CKA (Kornblith et al. 2019)      |X̄ᵀȲ|² / (|X̄ᵀX̄| |ȲᵀȲ|), Frobenius norms, columns centred
    RSA (Kriegeskorte et al. 2008)   Spearman's correlation of the distances 1 − cos of all pairs

The networks: the pretrained backbone, and the align runs of `experiments.accuracy` with M-FAC and
with CG (conjugate gradients), which are trained first if they are not in --out. In the paper, on
the mean of six datasets, M-FAC and CG have CKA 0.93 and RSA 0.90, and either of them with the
backbone 0.54 and 0.41.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path

import torch
from matplotlib.figure import Figure
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from torch import Tensor

from config import Record
from experiments.accuracy import align_stably, run_peft
from experiments.networks import BATCH, Network, open_networks, validation_images
from experiments.recipe import Backbone, Dataset, Set, read_settings, run_script, write_table
from extras.plots import save
from head import features
from support.processes import make_ready

MOST = 1000  # images; RSA has half a million pairs of them


def main(
    backbone: Backbone = "vit_b16",
    dataset: Dataset = "cub200",
    hypergrad: str = "mfac,cg",
    out: Path | None = None,
    more: Set = None,
) -> None:
    """Compare the backbone and the align runs of each method pair by pair."""
    make_ready()
    settings = {"backbone": backbone, "dataset": dataset} | read_settings(more)
    out = out or Path("runs") / f"accuracy-{Path(dataset).name}-{backbone}-mae"
    rate = 0.0  # if the upper rate is given, PEFT's is not needed
    if "d_lr" not in settings:
        rate = run_peft(settings, out / "direct").lr
    runs = {}
    for method in hypergrad.split(","):
        runs[method] = Path(align_stably(settings | {"hypergrad": method}, rate, out).out)
    rows = compare_networks(runs)
    write_table(rows, out / "similarity")
    draw(rows, out / "similarity.png")


def compare_networks(runs: Mapping[str, Path]) -> list[Record]:
    """CKA and RSA of the pretrained backbone and of align or finetune runs, pair by pair."""
    experiment, networks = open_networks(runs)
    numbers, images = validation_images(experiment, MOST)
    pretrained = Network("pretrained", experiment.backbone, None, {})
    by_name = {}
    for network in [pretrained, *networks]:
        by_name[network.name] = features_of(network, images)
    rows: list[Record] = []
    for a, b in combinations(by_name, 2):
        x, y = by_name[a], by_name[b]
        measures = {"CKA": cka(x, y), "RSA": rsa(x, y)}
        rows.append({"network": a, "and": b, **measures, "images": len(numbers)})
    return rows


@torch.no_grad()
def features_of(network: Network, images: Tensor) -> Tensor:
    """What enters the head of a network, (N, d), on the CPU."""
    pieces = []
    for piece in images.split(BATCH):
        pieces.append(features(network.backbone, network.theta, piece).cpu())
    return torch.cat(pieces)


def cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of (N, d) and (N, d'). Rotations, shifts and a common scale change nothing."""
    x = x.double() - x.double().mean(0)
    y = y.double() - y.double().mean(0)
    between = (x.mT @ y).norm() ** 2
    return float(between / ((x.mT @ x).norm() * (y.mT @ y).norm()))


def rsa(x: Tensor, y: Tensor) -> float:
    """RSA of (N, d) and (N, d'). Rotations, and a scale for each image, change nothing."""
    distances_x = pdist(x.double().numpy(), "cosine")  # (N (N - 1) / 2,)
    distances_y = pdist(y.double().numpy(), "cosine")
    return float(spearmanr(distances_x, distances_y).statistic)


def draw(rows: Sequence[Record], path: Path) -> None:
    """Draw a matrix for each measure, with a row and a column for each network."""
    mentioned: list[str] = []
    for row in rows:
        mentioned += [row["network"], row["and"]]
    names = list(dict.fromkeys(mentioned))  # each once
    size = (3.2 + 1.3 * len(names), 1.4 + 0.5 * len(names))
    figure = Figure(size)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure in zip(panels, ("CKA", "RSA"), strict=True):
        matrix = torch.eye(len(names))
        for row in rows:
            i = names.index(row["network"])
            j = names.index(row["and"])
            matrix[i, j] = row[measure]
            matrix[j, i] = row[measure]
        axes.imshow(matrix.numpy(), vmin=0, vmax=1)
        for i, j in product(range(len(names)), repeat=2):
            colour = "white" if matrix[i, j] < 0.6 else "black"
            axes.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", color=colour)
        axes.set_title({"CKA": "linear CKA", "RSA": "RSA"}[measure])
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right")
        axes.set_yticks(range(len(names)), names)
    save(figure, path)


if __name__ == "__main__":
    run_script(main)
