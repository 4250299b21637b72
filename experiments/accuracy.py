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
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import TypeVar

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
from extras.dry_run import plan_peft
from extras.plots import read_metrics
from finetune import finetune
from support.errors import RunError, UsageError
from support.processes import start
from support.runs import Track

T = TypeVar("T")

SHARES = (2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 7, 1 / 10)  # App. C.3 has the first three
NAMES = {"mfac": "BiSSLight", "recursion": "BiSSLight", "cg": "BiSSL"}  # others by themselves


def main(
    backbone: Backbone,
    dataset: Dataset,
    pretext: str = "mae",
    hypergrad: str = "mfac",
    rate: float | None = None,
    out: Path | None = None,
    more: Set = None,
) -> None:
    """Compare PEFT after alignment with PEFT alone.

    --hypergrad takes several methods with commas. --rate is the PEFT rate whose shares are tried,
    here the one that is best for this backbone; in the paper it is always ViT-L's.
    """
    start()
    settings = {"backbone": backbone, "dataset": dataset, "pretext": pretext} | read_settings(more)
    out = out or Path("runs") / f"accuracy-{Path(dataset).name}-{backbone}-{pretext}"
    check_all_is_there(settings)
    rows = compare(settings, hypergrad.split(","), out, rate)
    write_table(rows, out / "accuracy")


def check_all_is_there(settings: Record) -> None:
    """Look for data, pool and weights of all arms, before the first of them runs (UsageError)."""
    problems: list[str] = []
    plan_peft(make(AlignConfig, settings_of(AlignConfig, settings)), problems)
    if problems:
        raise UsageError("; ".join(problems))


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
    cfg = make(FinetuneConfig, settings_of(FinetuneConfig, settings) | {"start": aligned})
    finetune(cfg, run, track=progress)
    return run


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
