"""Program: `bisslight demo`, the method on handwriting, offline, on two CPU cores.

Which character of the Greek alphabet is it? A very small network, pretrained on other alphabets,
learns it in three ways ("arms"), each with four seeds:

    direct     PEFT alone
    aligned    BiSSLight, then PEFT; each seed has an align run of its own
    restart    PEFT from the θ of a finished direct run, with a fresh head. The paper has no such
               arm; it tells whether aligning gives more than θ that has seen the labels before

All runs are ordinary ones, which `bisslight evaluate` and the other commands can read.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill

import torch
from matplotlib.axes import Axes
from pydantic import BaseModel
from torch import Tensor
from torchvision.utils import make_grid

import mae
from align import align
from config import AlignConfig, FinetuneConfig, Record, make
from evaluate import Evaluation, Row, evaluate
from extras.plots import Curve, plot_arms, pyplot, read_curves, save
from finetune import finetune
from support import processes, runs
from support.errors import UsageError, as_usage_error
from support.experiment import open_align_experiment, pool_images, pretext_batches
from support.screen import Answer

SEEDS = 4
ARMS = ("aligned", "direct", "restart")
TASK: Record = {"backbone": "vit_mini", "dataset": "omniglot:Greek"}
# chosen on two other alphabets, see experiments/omniglot.md; λ and all else is the paper's
ALIGN: Record = {
    "alternations": 50, "lower_steps": 5, "upper_steps": 3, "p_batch": 64, "d_batch": 32,
    "warmup": 5, "p_lr": 1e-2, "d_lr": 1e-2, "eval_every": 50,
}  # fmt: skip
PEFT: Record = {"lr": 1e-2, "epochs": 25, "warmup_epochs": 5, "batch": 32}
RESTARTED = 100  # seed of the first restart: others than those of the runs that it starts from
EARLY = 5  # epochs; where the arms are compared before the end


class DemoResult(BaseModel, frozen=True):
    """What the demo found."""

    arms: list[Row]
    answer: list[str]  # in words
    picture: Path

    def in_words(self) -> Answer:
        """What it says of its arms, and its picture."""
        lines = [fill(text, 79, break_on_hyphens=False) for text in self.answer]
        table = Evaluation(arms=self.arms).in_words().rows
        return Answer("\n".join(lines), table, [f"in {self.picture.resolve()}"])


def demo(
    out: Path | None = None,
    *,
    data_seed: int = 0,
    jobs: int = 2,
    force: bool = False,
    track: runs.Track = runs.untracked,
) -> DemoResult:
    """Run the demo into `out`, or go on with it; `data_seed` splits the drawers anew."""
    out = (out or Path("runs/demo")).expanduser()
    check_place(out)
    shared = TASK | {"data_seed": data_seed}
    first = make(AlignConfig, shared | ALIGN)
    many = {"seeds": SEEDS, "jobs": jobs, "test_curve": True}
    direct = make(FinetuneConfig, shared | PEFT | many)
    aligned = direct.replace(start=out / "align")  # a folder of align runs: each seed has its own
    restart = direct.replace(start=out / "direct", restart=True, seed=RESTARTED)

    runs.LOG.info("%d align runs and %d fine-tunings: about two minutes", SEEDS, len(ARMS) * SEEDS)
    align_seed = partial(align_one, cfg=first, out=out, force=force)
    seeds = range(SEEDS)
    reports: Iterable[str] = map(align_seed, seeds)
    if jobs > 1:
        reports = processes.run_in_processes(align_seed, seeds, jobs)
    list(track(reports, SEEDS, "run"))  # asking for a report makes its run
    for name, cfg in (("aligned", aligned), ("direct", direct), ("restart", restart)):
        finetune(cfg, out / name, force=force, track=track)
    arms = evaluate([out / name for name in ARMS]).arms
    draw(out, first, arms)
    curves = [read_curve(out / name) for name in ARMS]
    return DemoResult(arms=arms, answer=tell_answer(arms, curves), picture=out / "demo.png")


def check_place(out: Path) -> None:
    """Refuse (UsageError) a place with anything that no demo has made, such as photographs."""
    with as_usage_error(f"--out {out}"):
        names = {path.name for path in out.iterdir()} if out.exists() else set[str]()
    foreign = sorted(names - {"align", "demo.png", *ARMS})
    if foreign:
        raise UsageError(f"--out {out}: holds {foreign[0]}, which is of no demo; give another")


def align_one(seed: int, cfg: AlignConfig, out: Path, force: bool) -> str:
    """Align with a seed; says how it went. `run_in_processes` calls it in its processes."""
    result = align(cfg.replace(seed=seed), out / "align" / f"s{seed}", force=force)
    return f"aligned, seed {seed}  val {result.val_P.accuracy:.1f} %"


def read_curve(runs: Path) -> Curve:
    """The learning curve of a fine-tuning, or of an arm the mean over its seeds."""
    return read_curves(runs)["test/accuracy"]


def epochs_to_reach(curve: Curve, percent: float) -> str:
    """After how many epochs a curve has reached an accuracy."""
    for epoch, value in curve.items():
        if value >= percent:
            return f"{epoch} epochs"
    return f"more than {len(curve)} epochs"


def tell_answer(arms: Sequence[Row], curves: Sequence[Curve]) -> list[str]:
    """What the three arms say, in words."""
    aligned, direct, restart = curves
    early = min(EARLY, len(direct))
    # nine tenths of where direct PEFT ends: it has learned the task, but for the last bit
    target = 0.9 * arms[1].mean
    against_direct = tell_difference(arms[1])
    against_restart = tell_difference(arms[2])
    return [
        f"Aligning gives a head start: after {early} of {len(direct)} epochs of PEFT the aligned "
        f"arm has {aligned[early]:.0f} % of the test images right, direct PEFT "
        f"{direct[early]:.0f} %. It reaches {target:.0f} % in "
        f"{epochs_to_reach(aligned, target)}, direct PEFT in {epochs_to_reach(direct, target)}. "
        "But aligning itself takes as long as some 80 epochs of PEFT.",
        f"At the end, aligned minus direct is {against_direct}.",
        f"A restart has the head start, too: {restart[early]:.0f} % after {early} epochs, "
        f"{target:.0f} % in {epochs_to_reach(restart, target)}. At the end, aligned minus restart "
        f"is {against_restart}.",
        "More alphabets, backbones and controls: experiments/omniglot.md",
    ]


def tell_difference(arm: Row) -> str:
    """How far the aligned arm is ahead of another, and whether that may be chance."""
    comparison = arm.first_minus_this
    assert comparison is not None and comparison.p is not None
    text = f"{comparison.difference:+.1f} points (p = {comparison.p:.2g})"
    if comparison.p >= 0.05:
        return f"{text}: these few seeds do not tell it from chance"
    return text


# --- the picture ----------------------------------------------------------------------------------


def draw(out: Path, cfg: AlignConfig, arms: Sequence[Row]) -> None:
    """What pretraining learned to fill in, how fast the arms learn, and how good they are."""
    widths = (1.5, 3.6, 2.2)
    figure, (left, middle, right) = pyplot().subplots(1, 3, figsize=(11, 3.8), width_ratios=widths)
    left.set_title("What pretraining learned:\nwhole, masked, filled in")
    left.imshow(fill_in(cfg).permute(1, 2, 0).numpy())
    left.set_axis_off()
    plot_curves(middle, out)
    right.set_title("At the end, each seed a dot")
    plot_arms(right, arms)
    save(figure, out / "demo.png")


@torch.no_grad()
def fill_in(cfg: AlignConfig) -> Tensor:
    """One picture of five rows: a pool image, masked, and as the pretrained MAE fills it in."""
    experiment = open_align_experiment(cfg.replace(device="cpu"))
    task = experiment.new_pretext_task(experiment.new_theta(cfg.seed))
    assert isinstance(task, mae.MAE)
    images = pool_images(experiment.pool, experiment.arch.image_size, experiment.cfg)
    # five images, those of step 0
    batch = next(pretext_batches(task, images, 5, range(1), experiment.cfg, experiment.device))
    masked, filled = task.reconstruct(None, task.phi, batch)  # None: without LoRA, as pretrained
    pictures = torch.stack([batch.images, masked, filled], 1).flatten(0, 1)  # (15, 3, 28, 28)
    std = torch.tensor(experiment.pool.std).view(3, 1, 1)
    mean = torch.tensor(experiment.pool.mean).view(3, 1, 1)
    # back from what the network sees to pixels in [0, 1], then dark ink on light paper
    pixels = 1 - (pictures * std + mean)
    grid: Tensor = make_grid(pixels, 3, pad_value=0.7)
    return grid.clamp(0, 1)


def plot_curves(axes: Axes, out: Path) -> None:
    """Test accuracy by epoch of PEFT: every seed thin, the mean of an arm thick."""
    for k, arm in enumerate(ARMS):
        for trial in sorted((out / arm).glob("lr*-s*")):
            curve = read_curve(trial)
            axes.plot(list(curve), list(curve.values()), color=f"C{k}", linewidth=0.6, alpha=0.5)
        mean = read_curve(out / arm)
        axes.plot(list(mean), list(mean.values()), color=f"C{k}", linewidth=2.5, label=arm)
    title = "How fast is the task learned?"
    axes.set(title=title, xlabel="epoch of PEFT", ylabel="test images right (%)")
    axes.legend(loc="lower right")
