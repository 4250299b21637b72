"""Program: `bisslight demo`, the method on handwriting, offline, on two CPU cores.

Which character of the Greek alphabet is it? A very small network, pretrained on other alphabets,
learns it in three ways ("arms"), each with four seeds:

    direct     PEFT alone
    aligned    BiSSLight, then PEFT; each seed has an align run of its own
    restart    PEFT from the θ of a finished direct run, with a fresh head. The paper has no such
               arm. It shows whether aligning gives more than a θ that has seen the labels before

All runs are ordinary ones, which `bisslight evaluate` and the other commands can read.
"""

from collections.abc import Iterator, Sequence
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

SEEDS = 4  # of each arm
ARMS = ("aligned", "direct", "restart")  # also the names of their run directories
TASK: Record = {"backbone": "vit_mini", "dataset": "omniglot:Greek"}
# These settings were chosen on two other alphabets, see experiments/omniglot.md. λ and all others
# are the paper's.
ALIGN: Record = {
    "alternations": 50, "lower_steps": 5, "upper_steps": 3, "p_batch": 64, "d_batch": 32,
    "warmup": 5, "p_lr": 1e-2, "d_lr": 1e-2, "eval_every": 50,
}  # fmt: skip
PEFT: Record = {"lr": 1e-2, "epochs": 25, "warmup_epochs": 5, "batch": 32}
# Restarts have the seeds 100 to 103, and start from direct's θ of the seeds 0 to 3, in this order.
# With the same seeds, they would draw the same head and batches once more.
RESTART_SEED = 100
# Measured: 28 CPU seconds for an align run, 0.33 for an epoch of PEFT. The epochs of the demo take
# longer, since each of them scores the test images, too, for the picture.
EPOCHS_OF_ALIGN = 80
EARLY = 5  # the epoch after which the arms are compared, besides the last one


class DemoResult(BaseModel, frozen=True):
    """What the demo found."""

    arms: list[Row]  # in the order of `ARMS`
    answer: list[str]  # paragraphs for people, see `describe_arms`
    picture: Path

    def in_words(self) -> Answer:
        """The paragraphs in lines of 79 characters, the table of arms, and where the picture is."""
        paragraphs = [fill(text, 79, break_on_hyphens=False) for text in self.answer]
        table = Evaluation(arms=self.arms).in_words().rows  # the table that `evaluate` prints
        place = f"in {self.picture.resolve()}"
        return Answer(headline="\n".join(paragraphs), rows=table, lines=[place])


def demo(
    out: Path | None = None,
    *,
    data_seed: int = 0,
    jobs: int = 2,
    force: bool = False,
    track: runs.Track = runs.untracked,
) -> DemoResult:
    """Run the demo in the folder `out`, or go on with it there.

    1. Align with each seed.
    2. Fine-tune each arm.
    3. Compare the arms, and make the picture.

    Args:
        out: None: runs/demo.
        data_seed: decides which people's drawings are for training, validation and test.
        jobs: how many runs are at work at the same time, each in a process of its own.
        force: start all runs over.
        track: shows the progress.
    """
    out = (out or Path("runs/demo")).expanduser()
    check_place(out)
    shared = TASK | {"data_seed": data_seed}
    align_cfg = make(AlignConfig, shared | ALIGN)

    runs.LOG.info("%d align runs and %d fine-tunings: about two minutes", SEEDS, len(ARMS) * SEEDS)
    align_with_each_seed(align_cfg, out, jobs, force, track)
    four_seeds = {"seeds": SEEDS, "jobs": jobs, "test_curve": True}
    peft_cfg = make(FinetuneConfig, shared | PEFT | four_seeds)
    finetune_arms(peft_cfg, out, force, track)

    arms = evaluate([out / name for name in ARMS]).arms
    make_picture(out, align_cfg, arms)
    curves = [read_test_curve(out / name) for name in ARMS]
    return DemoResult(arms=arms, answer=describe_arms(arms, curves), picture=out / "demo.png")


def check_place(out: Path) -> None:
    """Raise UsageError if a folder holds anything that no demo has made, such as photographs."""
    with as_usage_error(f"--out {out}"):
        names = {path.name for path in out.iterdir()} if out.exists() else set[str]()
    foreign = sorted(names - {"align", "demo.png", *ARMS})
    if foreign:
        raise UsageError(f"--out {out}: holds {foreign[0]}, which no demo has made; give another")


def align_with_each_seed(
    cfg: AlignConfig, out: Path, jobs: int, force: bool, track: runs.Track
) -> None:
    """Align with seeds 0 to 3, into the run directories out/align/s0 to out/align/s3.

    `jobs`, `force` and `track` as in `demo`.
    """
    align_one_seed = partial(align_with_seed, cfg=cfg, out=out, force=force)
    reports: Iterator[str]  # one for each seed, such as "aligned, seed 0  val 61.2 %"
    if jobs > 1:
        reports = processes.run_in_processes(align_one_seed, range(SEEDS), jobs)
    else:
        reports = map(align_one_seed, range(SEEDS))
    # A run starts when its report is asked for, and `list` asks for each of them.
    list(track(reports, total=SEEDS, label="run"))


def align_with_seed(seed: int, cfg: AlignConfig, out: Path, force: bool) -> str:
    """Align with this seed, and return a line that says how it went.

    It stands outside of `align_with_each_seed` so that other processes can call it.
    """
    result = align(cfg.replace(seed=seed), out / "align" / f"s{seed}", force=force)
    return f"aligned, seed {seed}  val {result.val_P.accuracy:.1f} %"


def finetune_arms(cfg: FinetuneConfig, out: Path, force: bool, track: runs.Track) -> None:
    """Fine-tune the three arms into out/aligned, out/direct and out/restart.

    `cfg` are the settings of direct PEFT; `force` and `track` as in `demo`.
    """
    settings = {
        "aligned": cfg.replace(start=out / "align"),  # each seed starts from its align run
        "direct": cfg,
        "restart": cfg.replace(start=out / "direct", restart=True, seed=RESTART_SEED),
    }
    for name in ARMS:  # direct before restart, which starts from it
        finetune(settings[name], out / name, force=force, track=track)


def read_test_curve(run: Path) -> Curve:
    """Test accuracy (%) after each epoch of a fine-tuning: of one trial, or the mean of an arm."""
    return read_curves(run)["test/accuracy"]


def epochs_to_reach(curve: Curve, percent: float) -> str:
    """After how many epochs a curve reaches an accuracy: "3 epochs", or "more than 25 epochs"."""
    for epoch, value in curve.items():
        if value >= percent:
            return f"{epoch} epochs"
    return f"more than {len(curve)} epochs"


def describe_arms(arms: Sequence[Row], curves: Sequence[Curve]) -> list[str]:
    """Say what the three arms show, in paragraphs.

    `arms` and `curves` are in the order of `ARMS`. A curve is the test accuracy (%) by epoch.
    """
    aligned, direct, restart = curves  # such as {1: 8.3, 2: 15.0}
    _, direct_row, restart_row = arms
    epochs = len(direct)  # a curve has a value for each
    early = min(EARLY, epochs)  # the epoch after which the arms are compared first
    # The task counts as learned at nine tenths of the accuracy with which direct PEFT ends.
    target = 0.9 * direct_row.mean
    against_direct = describe_lead_of_aligned(direct_row)  # such as "+1.7 points (p = 0.029)"
    against_restart = describe_lead_of_aligned(restart_row)
    aligned_time = epochs_to_reach(aligned, target)  # such as "3 epochs"
    direct_time = epochs_to_reach(direct, target)
    restart_time = epochs_to_reach(restart, target)
    return [
        f"Aligning gives a head start: after {early} of {epochs} epochs of PEFT the aligned "
        f"arm has {aligned[early]:.0f} % of the test images right, direct PEFT "
        f"{direct[early]:.0f} %. It reaches {target:.0f} % in {aligned_time}, direct PEFT in "
        f"{direct_time}. But aligning itself takes as long as some {EPOCHS_OF_ALIGN} epochs of "
        "PEFT.",
        f"At the end, aligned minus direct is {against_direct}.",
        f"A restart has the head start, too: {restart[early]:.0f} % after {early} epochs, "
        f"{target:.0f} % in {restart_time}. At the end, aligned minus restart is "
        f"{against_restart}.",
        "More alphabets, backbones and controls: experiments/omniglot.md",
    ]


def describe_lead_of_aligned(other: Row) -> str:
    """How far the aligned arm is ahead of another one, and whether that may be chance.

    Such as "+1.7 points (p = 0.029)".
    """
    comparison = other.first_minus_this  # the first arm is "aligned"
    assert comparison is not None and comparison.p is not None  # several seeds, so there is a p
    text = f"{comparison.difference:+.1f} points (p = {comparison.p:.2g})"
    if comparison.p >= 0.05:
        return f"{text}: these are too few seeds to rule out chance"
    return text


# --- the picture ----------------------------------------------------------------------------------


def make_picture(out: Path, align_cfg: AlignConfig, arms: Sequence[Row]) -> None:
    """Make demo.png: what pretraining learned, how fast the arms learn, and how good they are.

    `align_cfg` are the settings of any of the align runs: they name the network and the pool.
    """
    widths = (1.5, 3.6, 2.2)  # of the three panels, in proportion
    figure, (left, middle, right) = pyplot().subplots(1, 3, figsize=(11, 3.8), width_ratios=widths)
    plot_reconstructions(left, align_cfg)
    plot_test_curves(middle, out)
    right.set_title("At the end, each seed a dot")
    plot_arms(right, arms)
    save(figure, out / "demo.png")


def plot_reconstructions(axes: Axes, cfg: AlignConfig) -> None:
    """Show five images of the pool in a grid: each row has one whole, masked, and filled in."""
    dark_on_light = 1 - reconstruct_five(cfg)  # paper is 1 and ink is 0
    grid = make_grid(dark_on_light, nrow=3, pad_value=0.7)  # nrow: pictures in a row
    grid = grid.clamp(0, 1)  # what the MAE fills in may lie outside of [0, 1]
    axes.set_title("What pretraining learned:\nwhole, masked, filled in")
    axes.imshow(grid.permute(1, 2, 0).numpy())  # (height, width, 3), as matplotlib takes it
    axes.set_axis_off()


@torch.no_grad()
def reconstruct_five(cfg: AlignConfig) -> Tensor:
    """Mask five images of the pool as in training, and let the pretrained MAE fill them in.

    Returns (15, 3, 28, 28): the first image, the same masked, the same filled in, then the second
    one. Paper is 0 and ink is 1; what is filled in may lie outside of [0, 1].

    1. Load the pretrained networks, and take a batch of five images with their masks.
    2. Let the MAE fill in what is masked.
    3. Turn the normalised images back into pixels.
    """
    cfg = cfg.replace(device="cpu")
    experiment = open_align_experiment(cfg)
    pool = experiment.pool
    theta = experiment.new_theta(cfg.seed)  # any will do: only a teacher would start from it
    pretext = experiment.new_pretext_task(theta)
    assert isinstance(pretext, mae.MAE)  # the pretext task of the demo's settings
    images = pool_images(pool, experiment.arch.image_size, cfg)
    first_step = range(1)
    batches = pretext_batches(
        pretext, images, batch_size=5, steps=first_step, cfg=cfg, device=experiment.device
    )
    batch = next(batches)  # its images (5, 3, 28, 28), normalised, and their masks

    # None: without θ, by the pretrained weights alone. Both results are (5, 3, 28, 28).
    masked, filled = pretext.reconstruct(None, pretext.phi, batch)
    triples = torch.stack([batch.images, masked, filled], 1)  # (5, 3, 3, 28, 28)

    std = torch.tensor(pool.std).view(3, 1, 1)  # of each channel
    mean = torch.tensor(pool.mean).view(3, 1, 1)
    return triples.flatten(0, 1) * std + mean  # undoes `data.normalise`


def plot_test_curves(axes: Axes, out: Path) -> None:
    """Plot test accuracy by epoch of PEFT: thin lines for the seeds, a thick one for their mean."""
    for k, arm in enumerate(ARMS):
        colour = f"C{k}"  # Matplotlib's name for colour number k
        for trial in sorted((out / arm).glob("lr*-s*")):  # a folder for each seed
            curve = read_test_curve(trial)  # accuracy by epoch, such as {1: 8.3, 2: 15.0}
            axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.6, alpha=0.5)
        mean = read_test_curve(out / arm)
        axes.plot(list(mean), list(mean.values()), color=colour, linewidth=2.5, label=arm)
    title = "How fast is the task learned?"
    axes.set(title=title, xlabel="epoch of PEFT", ylabel="test images right (%)")
    axes.legend(loc="lower right")
