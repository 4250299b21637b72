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
    accuracy.md     mean ± deviation, difference to PEFT, exact permutation test, the paper's figure

All four lie in --out. The same command goes on where it stopped.

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
a GPU those of the clock.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

from align import align
from bisslight import Diverged
from config import AlignConfig, FinetuneConfig, Record, make
from evaluate import Reported, Row, evaluate
from experiments.recipe import (
    Backbone,
    Dataset,
    Set,
    progress,
    read_settings,
    run_script,
    settings_of,
    write_table,
)
from extras.dry_run import plan_training
from extras.plots import read_metrics
from finetune import finetune
from support.errors import RunError, UsageError
from support.experiment import find_device
from support.processes import make_ready
from support.runs import Track, read_json

T = TypeVar("T")

SHARES = (2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 7, 1 / 10)  # App. C.3 has the first three
NAMES = {"mfac": "BiSSLight", "recursion": "BiSSLight", "cg": "BiSSL"}  # others by themselves


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
    check_all_is_there(settings)
    if controls:
        check_clock(settings)
    methods = hypergrad.split(",")
    rows = compare(settings, methods, out, rate)
    write_table(rows, out / "accuracy")
    if controls:
        arms = run_controls(settings, methods[0], out, rate)
        write_table(compare_controls(arms), out / "controls")


def check_all_is_there(settings: Record) -> None:
    """Look for data, pool and weights of all arms, before the first of them runs (UsageError)."""
    problems: list[str] = []
    plan_training(make(AlignConfig, settings_of(AlignConfig, settings)), problems)
    if problems:
        raise UsageError("; ".join(problems))


def check_clock(settings: Record) -> None:
    """Refuse to time runs that share a GPU: each would seem to take longer (UsageError)."""
    cfg = make(FinetuneConfig, settings_of(FinetuneConfig, settings))
    if cfg.jobs > 1 and find_device(cfg.device).type == "cuda":
        raise UsageError(f"--set jobs={cfg.jobs}: on a GPU, --controls times one run after another")


def compare(
    settings: Record, methods: list[str], out: Path, rate: float | None = None
) -> list[Record]:
    """Run what is not finished of all arms; a row for each method, and one for PEFT alone."""
    best = run_direct(settings, out)
    rows = []
    for method in methods:
        aligned = align_stably(settings | {"hypergrad": method}, rate or best, out)
        tuned = run_tuned(settings, aligned, out / f"tuned-{method}")
        after, direct = evaluate([tuned, out / "direct"]).arms
        test = direct.first_minus_this
        assert test is not None  # every arm but the first is compared with the first
        versus = {"minus PEFT": f"{test.difference:+.2f}", "p": f"{test.p or 1:.2g}"}
        rows.append(row_of(f"{NAMES.get(method, method)} + PEFT", after) | versus)
    rows.append(row_of("PEFT", direct) | {"minus PEFT": "", "p": ""})
    return rows


def row_of(name: str, arm: Row) -> Record:
    """An arm of `evaluate` in the words of the paper's tables."""
    return {
        "arm": name,
        "seeds": arm.seeds,
        f"test {arm.metric} (%)": f"{arm.mean:.2f} ± {arm.std or 0:.2f}",
        "the paper": published(arm.paper),
    }


def published(figure: Reported | None) -> str:
    """The paper's figure; there is one where all settings are the paper's."""
    return f"{figure.mean} ± {figure.std}" if figure else "other settings"


def run_direct(settings: Record, out: Path) -> float:
    """PEFT from the pretrained backbone; its best rate."""
    cfg = make(FinetuneConfig, settings_of(FinetuneConfig, settings))
    return finetune(cfg, out / "direct", track=progress).lr


def run_tuned(settings: Record, aligned: Path, run: Path) -> Path:
    """PEFT from an align run; where it is."""
    return run_peft(settings | {"start": aligned}, run)


def run_peft(settings: Record, run: Path) -> Path:
    """PEFT with these settings; where it is."""
    cfg = make(FinetuneConfig, settings_of(FinetuneConfig, settings))
    finetune(cfg, run, track=progress)
    return run


# --- the controls ---------------------------------------------------------------------------------


class Control(NamedTuple):
    """An arm of the table of controls."""

    arm: str
    run: Path  # of its PEFT
    seconds: float  # of one seed, with all that it starts from


def run_controls(
    settings: Record, method: str, out: Path, rate: float | None = None
) -> list[Control]:
    """Run what is not finished of the control arms; before them, the two that they belong to."""
    direct = out / "direct"
    tuned = out / f"tuned-{method}"
    started_from = Path(read_json(tuned / "config.json")["start"])
    aligned = out / f"aligned-{method}" / started_from.name  # also where --out was moved
    before = read_json(direct / "config.json")
    peft_seconds = seconds_of_seed(direct)
    whole_seconds = seconds_of(aligned) + seconds_of_seed(tuned)
    seconds_each = peft_seconds / before["epochs"]  # of an epoch
    restart = settings | settings_of_restart(direct)
    arms = [
        Control(f"{NAMES.get(method, method)} + PEFT", tuned, whole_seconds),
        Control("PEFT", direct, peft_seconds),
    ]

    longer = {"epochs": count_epochs(whole_seconds, seconds_each)}
    run = run_peft(settings | longer, out / "equal-time")
    arms.append(Control("PEFT, equal time", run, seconds_of_seed(run)))

    run = run_peft(restart, out / "restart")
    arms.append(Control("PEFT + restart", run, peft_seconds + seconds_of_seed(run)))

    longer = {"epochs": count_epochs(whole_seconds - peft_seconds, seconds_each)}
    run = run_peft(restart | longer, out / "restart-equal-time")
    arms.append(Control("PEFT + restart, equal time", run, peft_seconds + seconds_of_seed(run)))

    lower_only = align_lower_only(settings, aligned, out)
    run = run_tuned(settings, lower_only, out / "tuned-lower-only")
    seconds = seconds_of(lower_only) + seconds_of_seed(run)
    arms.append(Control("lower level only + PEFT", run, seconds))

    best = read_json(direct / "result.json")["lr"]
    identity = align_stably(settings | {"hypergrad": "identity"}, rate or best, out)
    run = run_tuned(settings, identity, out / "tuned-identity")
    seconds = seconds_of(identity) + seconds_of_seed(run)
    arms.append(Control("identity + PEFT", run, seconds))
    return arms


def settings_of_restart(direct: Path) -> Record:
    """A restart of direct PEFT: other seeds than its own, and its rates."""
    before = read_json(direct / "config.json")
    return {
        "start": direct,
        "restart": True,
        "seed": before["seed"] + before["seeds"],
        "lr": None,
        "grid": before["grid"],  # without it, that of PEFT after align: a smaller one
    }


def align_lower_only(settings: Record, aligned: Path, out: Path) -> Path:
    """Train the pretext task alone, otherwise as an align run; where it is."""
    d_lr = read_json(aligned / "config.json")["d_lr"]  # here of the linear probe only
    given = settings_of(AlignConfig, settings) | {"upper_steps": 0, "d_lr": d_lr}
    run = out / "aligned-lower-only"
    align(make(AlignConfig, given), run, track=progress)
    return run


def count_epochs(seconds: float, seconds_each: float) -> int:
    """How many epochs of PEFT take so long; one at least.

    >>> count_epochs(60, 8)
    8
    """
    return max(1, round(seconds / seconds_each))


def seconds_of_seed(run: Path) -> float:
    """The time of one seed of a finetune run at the rate that was chosen, mean over seeds."""
    config = read_json(run / "config.json")
    rate = read_json(run / "result.json")["lr"]
    first = config["seed"]
    seeds = range(first, first + config["seeds"])
    return fmean(seconds_of(run / f"lr{rate:g}-s{seed}") for seed in seeds)


def seconds_of(run: Path) -> float:
    """The time that a run took: of the CPU, or on a GPU that of the clock."""
    result = read_json(run / "result.json")
    machine = read_json(run / "env.json")["machines"][-1]
    on_cpu = machine["gpu"] is None or machine["device"] == "cpu"
    seconds: float = result["cpu_seconds"] if on_cpu else result["seconds"]
    return seconds


def compare_controls(arms: list[Control]) -> list[Record]:
    """A row for each arm: its accuracy, and how much better the first arm is."""
    rows = []
    for control, arm in zip(arms, evaluate([arm.run for arm in arms]).arms, strict=True):
        test = arm.first_minus_this
        rows.append({
            "arm": control.arm,
            "seeds": arm.seeds,
            "epochs of PEFT": read_json(control.run / "config.json")["epochs"],
            "seconds a seed": round(control.seconds, 1),
            f"test {arm.metric} (%)": f"{arm.mean:.2f} ± {arm.std or 0:.2f}",
            f"{arms[0].arm} minus this": f"{test.difference:+.2f}" if test else "",
            "p": f"{test.p:.2g}" if test and test.p else "",
        })  # fmt: skip
    return rows


# --- the search for the upper rate ----------------------------------------------------------------


def align_stably(settings: Record, rate: float, out: Path) -> Path:
    """Align at the largest share of PEFT's rate at which training is stable; where that run is.

    With `d_lr` in the settings there is no search. RunError: no share is stable.
    """
    given = settings_of(AlignConfig, settings)
    rates = [float(f"{rate * share:.3g}") for share in SHARES]
    if "d_lr" in given:
        rates = [float(given["d_lr"])]
    for d_lr in rates:
        run = out / f"aligned-{given.get('hypergrad', 'mfac')}" / f"dlr{d_lr:g}"
        try:
            align(AlignConfig(**given | {"d_lr": d_lr}), run, track=watch(run))
        except Diverged as error:
            print(f"{run} is not stable: {error}")
        else:
            return run
    raise RunError(f"{out}: no upper rate is stable, the smallest was {rates[-1]:g}")


def watch(run: Path) -> Track:
    """A way to follow an align run that ends it as soon as it is unstable.

    Raises Diverged inside of align, which then records it in the run directory.
    """

    def track(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        for item in progress(items, total, label, done):
            yield item  # align logs it in metrics.jsonl before it asks for the next one
            why = unstable(read_metrics(run))
            if why:
                raise Diverged(why)

    return track


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
