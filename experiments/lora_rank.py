"""Test accuracy against LoRA rank, and how many parameters LoRA has (fig:lora_rank_var; App. C.4).

    python -m experiments.lora_rank --backbone vit_l16 --dataset cub200
    python -m experiments.lora_rank --counts        # tab:lora_param_count alone, at once

The first makes one of the figure's three curves, each a backbone. Every rank is a whole run of
`experiments.accuracy` (what it needs is said there), in OUT/rank-4 and so on; the same command goes
on. So the rates of PEFT and of the upper level are chosen anew at each rank; `--set lr=1e-3` and
`--set d_lr=1e-3` fix them.
"""

from pathlib import Path
from statistics import stdev

import torch
from matplotlib.figure import Figure

from config import BACKBONES, Record
from evaluate import Arm
from experiments.accuracy import compare
from experiments.recipe import (
    Backbone,
    Dataset,
    Set,
    markdown,
    read_settings,
    run_script,
    write_table,
)
from extras.plots import COLOURS, save
from support.checkpoints import build_vit
from support.processes import make_ready

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
PAPER = {  # tab:lora_param_count: millions at each of these ranks, and of the whole backbone
    "vit_b16": (0.04, 0.07, 0.15, 0.30, 0.59, 1.18, 2.36, 4.72, 85.80),
    "vit_l16": (0.10, 0.20, 0.39, 0.79, 1.57, 3.15, 6.29, 12.58, 303.30),
    "vit_h14": (0.16, 0.33, 0.66, 1.31, 2.62, 5.24, 10.49, 20.97, 630.77),
}


def main(
    backbone: Backbone = "vit_b16",
    dataset: Dataset = "cub200",
    ranks: str = "1,2,4,8,16,32,64,128",
    counts: bool = False,
    out: Path | None = None,
    more: Set = None,
) -> None:
    """Compare PEFT after alignment with PEFT alone, at each rank of a comma list."""
    print(markdown(count_parameters()))
    if counts:
        return
    make_ready()
    settings = {"backbone": backbone, "dataset": dataset} | read_settings(more)
    out = out or Path("runs") / f"rank-{Path(dataset).name}-{backbone}"
    points: dict[int, list[Arm]] = {}
    rows: list[Record] = []
    for rank in [int(word) for word in ranks.split(",")]:
        points[rank] = compare(settings | {"rank": rank}, ["mfac"], out / f"rank-{rank}")
        for arm in points[rank]:
            rows.append({"rank": rank} | arm.as_row() | {"seeds": arm.say_seeds()})
    write_table(rows, out / "lora_rank")
    draw(points, out / "lora_rank.png")


def lora_parameters(backbone: str, rank: int) -> int:
    """Numbers in θ: the query and the value map of every layer have an A and a B, r times dim."""
    arch = BACKBONES[backbone]
    return arch.depth * 2 * 2 * rank * arch.dim


def backbone_parameters(backbone: str) -> int:
    """Numbers in the frozen network, which is made without memory for them."""
    with torch.device("meta"):
        network = build_vit(BACKBONES[backbone])
    return sum(tensor.numel() for tensor in network.parameters())


def count_parameters() -> list[Record]:
    """tab:lora_param_count in millions: the counts of this program, and the paper's."""
    rows: list[Record] = []
    for backbone, paper in PAPER.items():
        ours = [lora_parameters(backbone, rank) / 1e6 for rank in RANKS]
        ours.append(backbone_parameters(backbone) / 1e6)
        for who, counts in ((f"{backbone}, here", ours), (f"{backbone}, the paper", paper)):
            row: Record = {"millions": who}
            for name, count in zip([*RANKS, "all of it"], counts, strict=True):
                row[f"{name}"] = f"{count:.2f}"
            rows.append(row)
    return rows


def draw(points: dict[int, list[Arm]], path: Path) -> None:
    """Draw mean and deviation of both arms at each rank, as in fig:lora_rank_var.

    `points` has for each rank two arms: PEFT after alignment, and PEFT alone.
    """
    figure = Figure((5, 3.4))
    axes = figure.subplots()
    ranks = list(points)
    for k, label in enumerate(("BiSSLight + PEFT", "PEFT")):
        curve = [pair[k] for pair in points.values()]
        means = [arm.mean for arm in curve]
        deviations = [stdev(arm.accuracies) for arm in curve]
        axes.errorbar(
            ranks, means, deviations, color=COLOURS[k], marker="o", capsize=4, label=label
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlabel("LoRA rank")
    axes.set_ylabel(f"test {curve[0].metric} (%), mean ± deviation")
    axes.legend()
    save(figure, path)


if __name__ == "__main__":
    run_script(main)
