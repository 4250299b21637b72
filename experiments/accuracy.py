"""Test accuracy with and without BiSSLight: a column of the paper's tables (Sec. 4, App. D).

    python -m experiments.accuracy --backbone vit_l16 --dataset cub200
    python -m experiments.accuracy --backbone vit_h14 --dataset cub200 --pretext ijepa
    python -m experiments.accuracy --backbone vit_b16 --dataset cub200 --hypergrad mfac,cg

The first is one backbone and one dataset of tab:mae_bisslight_main_results, which has 3 and 6 of
them. The second is a column of tab:classificaiton_acc_bisslight_ijepa, the third one of
tab:classificaiton_acc_bissl_orig. Each needs the official weights, which are downloaded (or
`--set weights=FILE`), the dataset, and images for the pretext task: ImageNet in data/imagenet/train
(or `--set pool=FOLDER`). It makes, in this order:

    direct          PEFT (parameter-efficient fine-tuning) from the backbone: six rates, then eight
                    seeds with the rate that is best on validation
    aligned-mfac    BiSSLight at 2/3, 1/2, 1/3 ... of that rate, until a run is stable (App. C.3)
    tuned-mfac      PEFT from what was aligned
    accuracy.md     mean ± deviation, exact permutation test, the paper's figure

All four lie in --out. The same command goes on where it stopped; started twice, on two cores or
GPUs, it shares the work.

    python -m experiments.accuracy --backbone vit_l16 --dataset cub200 --controls

adds arms that the paper's tables do not have. They ask what it is that helps: the bilevel problem,
more training, or any start that has seen the labels.

    restart                PEFT from θ of a finished PEFT of another seed, with a fresh head
    equal-time             PEFT from the backbone, for as long as align and PEFT take together
    restart-equal-time     PEFT, then a restart, for as long as align and PEFT take together
    tuned-lower-only       PEFT after the pretext task alone (no upper steps)
    tuned-identity         PEFT after align without curvature (--hypergrad identity)
    controls.md            each of them against the first method of --hypergrad

equal-time and both restarts choose their rate from the grid of direct PEFT, the others from the
grid of PEFT after align. Time is that of one seed, without the choice of rates: CPU seconds, or on
a GPU those of the clock. So all runs have to be made on devices of one kind, and on a GPU by one
process at a time.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from align import AlignResult, align
from bisslight import Diverged
from config import AlignConfig, FinetuneConfig, Record, keep_known
from evaluate import Arm, evaluate, read_run
from experiments.recipe import (
    Backbone,
    Dataset,
    Set,
    progress,
    read_settings,
    run_script,
    write_table,
)
from finetune import finetune
from support.errors import RunError
from support.experiment import open_sources, set_up_device
from support.files import read_json
from support.processes import make_ready
from support.results import FinetuneResult, TrialResult
from support.runs import Track

T = TypeVar("T")

SHARES = (2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 7, 1 / 10)  # App. C.3 has the first three


def main(
    backbone: Backbone,
    dataset: Dataset,
    pretext: str = "mae",
    hypergrad: str = "mfac",
    rate: float | None = None,
    controls: bool = False,
    out: Path | None = None,
    more: Set = None,
) -> None:
    """Compare PEFT after alignment with PEFT alone.

    --hypergrad takes several methods with commas. --rate is the PEFT rate whose shares are tried,
    here the one that is best for this backbone; in the paper it is always ViT-L's. --controls adds
    arms that tell alignment from more training and from any start that has seen the labels.
    """
    make_ready()
    settings = {"backbone": backbone, "dataset": dataset, "pretext": pretext} | read_settings(more)
    out = out or Path("runs") / f"accuracy-{Path(dataset).name}-{backbone}-{pretext}"
    open_sources(align_settings(settings))  # data, pool and weights: what is missing is told now
    methods = hypergrad.split(",")
    arms = compare(settings, methods, out, rate)
    rows = []
    for arm in arms:
        others = {"seeds": arm.say_seeds(), "the paper": find_in_paper(out / arm.arm)}
        rows.append(arm.as_row() | others)
    write_table(rows, out / "accuracy")
    if controls:
        write_table(run_controls(settings, methods[0], out, rate), out / "controls")


def align_settings(settings: Record) -> AlignConfig:
    """The settings of an align run; what align does not have is left out."""
    return AlignConfig(**keep_known(AlignConfig, settings))


def compare(
    settings: Record, methods: list[str], out: Path, rate: float | None = None
) -> list[Arm]:
    """Run what is not finished of all arms, and return them: PEFT after each method, PEFT alone.

    `rate` is the PEFT rate whose shares are tried for the upper level; None: the one that is best
    for PEFT alone.
    """
    direct = run_peft(settings, out / "direct")
    runs = []
    for method in methods:
        aligned = align_stably(settings | {"hypergrad": method}, rate or direct.lr, out)
        run = out / f"tuned-{method}"
        run_peft(settings | {"start": aligned.out}, run)
        runs.append(run)
    return evaluate([*runs, out / "direct"]).arms


def run_peft(settings: Record, run: Path) -> FinetuneResult:
    """Do PEFT with these settings into the directory `run`, or go on there."""
    cfg = FinetuneConfig(**keep_known(FinetuneConfig, settings))
    return finetune(cfg, run, track=progress)


# --- the paper's accuracies ---------------------------------------------------------------------

# Test accuracies in percent (VOC07: mAP), mean ± deviation over 8 seeds, one per data set, and the
# label of their table, by pretext task, backbone and method. After BiSSL and BiSSLight comes PEFT.
COLUMNS = ("pets", "dtd", "voc07", "flowers", "cub200", "aircrafts")
MAE = "tab:mae_bisslight_main_results"
BISSL = "tab:classificaiton_acc_bissl_orig"
JEPA = "tab:classificaiton_acc_bisslight_ijepa"
ACCURACIES = {
    ("mae", "vit_b16", "PEFT"): (MAE, "91.7±0.3 69.9±0.5 80.9±0.3 92.8±0.5 79.8±0.5 70.6±0.6"),
    ("mae", "vit_b16", "BiSSLight"): (MAE, "92.1±0.2 70.3±0.4 81.7±0.2 93.5±0.3 81.2±0.3 72.7±0.3"),
    ("mae", "vit_l16", "PEFT"): (MAE, "94.4±0.3 74.1±0.6 85.5±0.2 94.6±0.4 84.4±0.4 79.1±0.4"),
    ("mae", "vit_l16", "BiSSLight"): (MAE, "94.7±0.2 74.9±0.4 85.9±0.1 95.8±0.2 85.6±0.3 82.2±0.3"),
    ("mae", "vit_h14", "PEFT"): (MAE, "95.2±0.3 75.8±0.5 86.5±0.2 96.0±0.3 85.9±0.4 80.4±1.0"),
    ("mae", "vit_h14", "BiSSLight"): (MAE, "95.5±0.2 76.7±0.2 87.3±0.1 97.2±0.1 87.2±0.2 87.1±0.3"),
    ("mae", "vit_b16", "BiSSL"): (BISSL, "92.0±0.5 70.8±0.4 81.9±0.1 93.4±0.4 81.2±0.3 72.7±0.3"),
    ("ijepa", "vit_h14", "PEFT"): (JEPA, "94.6±0.1 73.1±0.4 82.4±0.2 95.1±0.4 86.4±0.3 76.0±0.6"),
    ("ijepa", "vit_h14", "BiSSLight"):
        (JEPA, "94.7±0.1 74.0±0.6 84.0±0.3 96.1±0.3 86.8±0.2 77.7±0.4"),
}  # fmt: skip
# What the tables call a run, by the hypergradient of the align run before it; None: not aligned.
METHODS = {None: "PEFT", "mfac": "BiSSLight", "recursion": "BiSSLight", "cg": "BiSSL"}
OFFICIAL_ENDINGS = ("_full.pth", "IN1K-vit.h.14-300e.pth.tar")  # ends of the official files' names


def find_in_paper(run: Path) -> str | None:
    """The paper's accuracy for a finished finetune run, such as "91.7±0.3 (tab:...)", or None.

    The paper has none where settings, weights or data of the run, or of the align run before it,
    are not the paper's.
    """
    (config, *_), result = read_run(run)
    origin = result.origin
    weights = config["weights"]  # a path; None: the official file was downloaded
    dataset = config["dataset"]
    pretext = config["pretext"]
    cfg = FinetuneConfig(**keep_known(FinetuneConfig, config))
    unlike_paper = cfg.unlike_paper()
    before = origin.definition
    if origin.stage == "align" and before["pretext"] == pretext:
        aligned = keep_known(AlignConfig, before) | {"dataset": dataset}
        unlike_paper |= AlignConfig(**aligned).unlike_paper()
    follows_paper = (
        unlike_paper.keys() <= {"amp"}  # of precision the paper says nothing
        and origin.stage in (None, "align")  # the paper has no restart
        and (weights is None or weights.endswith(OFFICIAL_ENDINGS))
        and before.get("data_sha256") in (None, config["data_sha256"])
        and before.get("pretext") in (None, pretext)
    )
    key = (pretext, cfg.backbone, METHODS.get(before.get("hypergrad"), ""))
    if not follows_paper or dataset not in COLUMNS or key not in ACCURACIES:
        return None
    label, figures = ACCURACIES[key]
    by_dataset = dict(zip(COLUMNS, figures.split(), strict=True))
    return f"{by_dataset[dataset]} ({label})"


# --- the controls ---------------------------------------------------------------------------------


def run_controls(
    settings: Record, method: str, out: Path, rate: float | None = None
) -> list[Record]:
    """Run what is not finished of the control arms, of PEFT after `method`, and of PEFT alone.

    Returns a row for each arm, as `Arm.as_row` makes it, with the time of one seed; the runs that
    the seed starts from count in it.
    """
    cfg = FinetuneConfig(**keep_known(FinetuneConfig, settings))
    on_gpu = set_up_device(cfg).type == "cuda"
    seconds: dict[str, float] = {}  # of one seed, by the name of its arm's directory

    def run(name: str, changes: Record, before: float = 0.0) -> FinetuneResult:
        """Do PEFT into out/name, and note its time; what a seed starts from took `before`."""
        result = run_peft(settings | changes, out / name)
        seconds[name] = before + mean_time(result.trials, on_gpu)
        return result

    def run_after(aligned: AlignResult, name: str) -> None:
        """Do PEFT after an align run into out/name, and note the time of both."""
        run(name, {"start": aligned.out}, mean_time([aligned], on_gpu))

    first = f"tuned-{method}"
    direct = run("direct", {})
    aligned = align_stably(settings | {"hypergrad": method}, rate or direct.lr, out)
    run_after(aligned, first)
    peft = seconds["direct"]
    align_and_peft = seconds[first]
    epoch = peft / cfg.epochs
    run("equal-time", {"epochs": count_epochs(align_and_peft, epoch)})
    # Other seeds than direct PEFT has, and its rates: after align the default has smaller ones.
    restart = {"start": direct.out, "seed": cfg.seed + cfg.seeds, "lr": cfg.lr}
    run("restart", restart, peft)
    longer = {"epochs": count_epochs(align_and_peft - peft, epoch)}
    run("restart-equal-time", restart | longer, peft)
    run_after(align_lower_only(settings, aligned, out), "tuned-lower-only")
    identity = settings | {"hypergrad": "identity"}
    run_after(align_stably(identity, rate or direct.lr, out), "tuned-identity")

    names = [first, *[name for name in seconds if name != first]]
    rows = []
    for arm in evaluate([out / name for name in names]).arms:
        more = {"seeds": arm.say_seeds(), "seconds a seed": round(seconds[arm.arm], 1)}
        rows.append(arm.as_row() | more)
    return rows


def mean_time(runs: Sequence[AlignResult | TrialResult], on_gpu: bool) -> float:
    """Mean seconds of runs: of the CPU, or on a GPU those of the clock."""
    return fmean(run.seconds if on_gpu else run.cpu_seconds for run in runs)


def count_epochs(seconds: float, seconds_each: float) -> int:
    """How many epochs of PEFT take `seconds` together; one at least.

    >>> count_epochs(60, 8)
    8
    """
    return max(1, round(seconds / seconds_each))


def align_lower_only(settings: Record, aligned: AlignResult, out: Path) -> AlignResult:
    """Align as in the run `aligned`, but without upper steps: only the pretext task is trained."""
    d_lr = read_json(Path(aligned.out, "config.json"))["d_lr"]  # here for the linear probe only
    cfg = align_settings(settings | {"upper_steps": 0, "d_lr": d_lr})
    return align(cfg, out / "aligned-lower-only", wait=True, track=progress)


# --- the search for the upper rate ----------------------------------------------------------------


def align_stably(settings: Record, rate: float, out: Path) -> AlignResult:
    """Align at the largest share of PEFT's rate at which training is stable.

    With `d_lr` in the settings there is no search. RunError: no share is stable.
    """
    rates = [float(f"{rate * share:.3g}") for share in SHARES]
    if "d_lr" in settings:
        rates = [float(settings["d_lr"])]
    for d_lr in rates:
        cfg = align_settings(settings | {"d_lr": d_lr})
        run = out / f"aligned-{cfg.hypergrad}" / f"dlr{d_lr:g}"
        try:
            check_stable(run)  # of an earlier start: what was unstable is not tried again
            return align(cfg, run, wait=True, track=watch(run))
        except Diverged as error:
            print(f"{run} is not stable: {error}")
    raise RunError(f"{out}: no upper rate is stable, the smallest was {rates[-1]:g}")


def watch(run: Path) -> Track:
    """A way to follow an align run that ends it, by Diverged, as soon as it is unstable."""

    def track(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        for item in progress(items, total, label, done):
            yield item  # align logs it in metrics.jsonl before it asks for the next one
            check_stable(run)

    return track


def check_stable(run: Path) -> None:
    """Raise Diverged if the records of an align run, as far as it is, are not stable."""
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    why = unstable([json.loads(line) for line in lines])
    if why:
        raise Diverged(why)


def unstable(records: list[Record]) -> str | None:
    """Why an align run is not stable so far, None if it is. (The paper does not define "stable".)

    Unstable: a loss, averaged over an alternation, exceeds 3 max(its smallest value so far, its
    first value / 4). The floor keeps a loss that has become very small from being called unstable.

    >>> unstable([{"loss_D_at_D": [2.0]}, {"loss_D_at_D": [1.0]}, {"loss_D_at_D": [3.5]}])
    'loss_D_at_D rose to 3.5, more than 3 times its minimum'
    >>> unstable([{"loss_P": [4.0]}, {"loss_P": [0.1]}, {"loss_P": [2.9]}])  # less than 3 · 4 / 4
    """
    for name in ("loss_P", "loss_D_at_P", "loss_D_at_D"):
        means = [fmean(record[name]) for record in records if record.get(name)]
        if means and means[-1] > 3 * max(min(means), means[0] / 4):
            return f"{name} rose to {means[-1]:.4g}, more than 3 times its minimum"
    return None


if __name__ == "__main__":
    run_script(main)
