"""`bisslight demo`: the method on drawn images, offline, in two minutes on two CPU cores.

Align vit_mini, pretrained on unlabelled quilts, with the labelled task, and fine-tune it with and
without that; each aligned seed has an align run of its own. The backbone of drawn set 0 is here,
`quilts.pth`; for another --data-seed it is pretrained first. See `experiments/demo_controls.md`.
"""

from pathlib import Path
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torchvision.utils import make_grid

import mae
from align import align
from config import AlignConfig, FinetuneConfig, Record, make
from data import Split
from evaluate import Row, evaluate
from extras.plots import plot_arms, pyplot, save
from extras.pretrain import PretrainConfig, pretrain
from finetune import finetune
from support import processes, runs
from support.experiment import AlignExperiment, pretext_batches

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALIGNED = 8  # seeds
DIRECT = 24  # more, since they take no align run and make the comparison sharper
PRETRAINED = Path(__file__).with_name("quilts.pth")  # of PRETRAIN, with data seed 0
PRETRAIN: Record = {"base_lr": 8e-3, "beta2": 0.999, "mask_ratio": 0.3}
ALIGN: Record = {
    "alternations": 30, "lower_steps": 5, "upper_steps": 3, "p_batch": 32, "d_batch": 40,
    "warmup": 5, "p_lr": 2e-3, "d_lr": 1e-2, "mask_ratio": 0.3, "eval_every": 30,
}  # fmt: skip
PEFT: Record = {
    "lr": 1e-2, "epochs": 40, "warmup_epochs": 5, "batch": 40, "eval_epochs": 8
}  # fmt: skip
GAIN = 3.0  # percentage points; `power` is for a true gain of so many


class Unit(NamedTuple):
    """A fine-tuning, and the align run before it; `jobs` hands them to its processes."""

    out: Path
    align: AlignConfig | None  # None: from the pretrained backbone
    start: Path  # where that align run is
    peft: FinetuneConfig
    force: bool


def demo(
    out: Path | None = None,
    *,
    data_seed: int = 0,
    jobs: int = 2,
    force: bool = False,
    track: runs.Track = runs.untracked,
) -> Record:
    """Run the demo into `out`, or go on with it; the table of both arms, and remarks.

    `data_seed` draws the images; unless it is 0, a backbone is pretrained on them first.
    """
    out = out or Path("runs/demo")
    weights = out / "pretrain" if data_seed else PRETRAINED
    network = {"backbone": "vit_mini", "data_seed": data_seed, "weights": weights}
    shared = {**network, "dataset": "quilts"}
    # jobs is checked as a setting of finetune, though here each process has a single seed
    peft = make(FinetuneConfig, {**shared, **PEFT, "seeds": 1, "jobs": jobs}).replace(jobs=1)
    units = []
    for seed in range(ALIGNED):
        cfg = make(AlignConfig, {**shared, **ALIGN, "seed": seed})
        start = out / f"align/s{seed}"
        units.append(Unit(out / f"aligned/s{seed}", cfg, start, peft.replace(seed=seed), force))
    for seed in range(DIRECT):
        units.append(Unit(out / f"direct/s{seed}", None, out, peft.replace(seed=seed), force))
    first = units[0].align
    assert first is not None
    runs.check_directory(units[0].start, "align", first, force)

    runs.LOG.info(
        "%d align runs, %d fine-tunings: 2 minutes, 4 with another --data-seed",
        ALIGNED,
        ALIGNED + DIRECT,
    )
    if data_seed:
        scratch = PretrainConfig(
            backbone="vit_mini", pool="quilts", data_seed=data_seed, seed=data_seed, **PRETRAIN
        )
        pretrain(scratch, out / "pretrain", force=force, track=track)
    reports = processes.jobs(run_unit, units, jobs) if jobs > 1 else map(run_unit, units)
    for _ in track(reports, len(units), "demo"):
        pass  # asking for a report runs its unit, and `track` prints it
    arms = evaluate([out / "aligned", out / "direct"]).arms
    draw(first.replace(device="cpu"), arms, out / "demo.png")
    return {
        "arms": arms,
        "power": power(arms),
        "elsewhere": "on four drawn sets the gain was +1.3 to +4.5 points, the larger ones on two "
        "sets where settings were chosen; on the others, fine-tuning alone of the same CPU time "
        "was as good (experiments/demo_controls.md)",
        "picture": out / "demo.png",
    }


def run_unit(unit: Unit) -> str:
    """Run a fine-tuning, after its align run if it has one; says how it went."""
    peft = unit.peft
    if unit.align:
        align(unit.align, unit.start, force=unit.force)
        peft = peft.replace(start=unit.start)
    result = finetune(peft, unit.out, force=unit.force)
    return f"{unit.out.parent.name} val {fmean(result.val):.1f} %"


def power(arms: list[Row]) -> str:
    """How often arms with these seeds and deviations find GAIN, by the normal approximation."""
    variance = 0.0  # of the difference of both means
    for row in arms:
        variance += (row.std or 0.0) ** 2 / row.seeds
    z = GAIN / max(variance**0.5, 1e-9)
    threshold = NormalDist().inv_cdf(0.975)  # beyond it, a two-sided p is below 0.05
    share = NormalDist().cdf(z - threshold)
    return f"a true gain of {GAIN:g} points has p < 0.05 in {100 * share:.0f} % of such demos"


@torch.no_grad()
def draw(cfg: AlignConfig, arms: list[Row], path: Path) -> None:
    """What a class is, what pretraining learned to fill in, and how good both arms are."""
    experiment = AlignExperiment(cfg)
    figure, axes = pyplot().subplots(1, 3, figsize=(11, 4), width_ratios=(4.2, 1.7, 1.6))
    classes = sample_classes(experiment.task.test)
    show(axes[0], classes, 8, "Eight classes: each is a layout (blue), shown with any two motifs")
    filled = fill_in(experiment)
    show(axes[1], filled, 3, "Pretraining fills in masked tiles:\nwhole, masked, filled in")
    comparison = arms[1].first_minus_this  # of the aligned arm with the direct one
    assert comparison is not None
    axes[2].set_title(f"Aligned: {comparison.difference:+.1f} points\np = {comparison.p:.2g}")
    plot_arms(axes[2], arms)
    save(figure, "Classes of quilts; some whole, masked, filled in; accuracies of both arms.", path)


def sample_classes(split: Split) -> Tensor:
    """Each class's layout and three of its images, (32, 3, 16, 16)."""
    images = torch.as_tensor(split.images)
    pictures = []
    for k in range(8):
        of_class = images[split.targets == k]
        pictures += [layout(of_class), of_class[:3]]
    return torch.cat(pictures)


def fill_in(experiment: AlignExperiment) -> Tensor:
    """Four pool images, each whole, masked and filled in by the pretrained decoder."""
    task = experiment.pretext_task(experiment.new_theta())
    assert isinstance(task, mae.MAE)
    images = experiment.pool_images()
    batches = pretext_batches(task, images, 4, range(1), experiment.cfg, experiment.device)
    batch = next(batches)
    masked, filled = task.reconstruct(None, task.phi, batch)
    pictures = torch.stack([batch.images, masked, filled], 1).flatten(0, 1)  # (12, 3, 16, 16)
    std = torch.tensor(experiment.pool.std).view(3, 1, 1)
    mean = torch.tensor(experiment.pool.mean).view(3, 1, 1)
    # back from what the network sees to pixels in [0, 1]
    return pictures * std + mean


def layout(images: Tensor) -> Tensor:
    """Draw the layout of a class: its tiles in two blues, by whether they equal the first tile.

    Images (n, 3, 16, 16). A tile counts as another one if it is so in most of them, since some
    tiles of labelled images show a motif at random.
    """
    rows = images.mean(1).unflatten(1, (4, 4))  # (n, row of tiles, y in the tile, 16)
    tiles = rows.unflatten(3, (4, 4)).transpose(2, 3)  # (n, row, column, y, x)
    first = tiles[:, :1, :1]
    distance = (tiles - first).square().mean((3, 4))  # (n, 4, 4)
    differs = (distance > 0.05).float().mean(0).round()
    pixels = torch.kron(differs, torch.ones(4, 4))  # (16, 16)
    blue = torch.tensor([0.9, 0.6, 0.3]).view(1, 3, 1, 1)
    return 1 - blue * (0.2 + 0.7 * pixels)


def show(axes: "Axes", images: Tensor, columns: int, title: str) -> None:
    """Draw small pictures (n, 3, h, w), row by row; `axes` are matplotlib's."""
    grid = make_grid(images, columns, pad_value=1.0).clamp(0, 1)
    axes.imshow(grid.permute(1, 2, 0).numpy())
    axes.set_axis_off()
    axes.set_title(title)
