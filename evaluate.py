"""Summaries over seeds, an exact permutation test (App. C.2.1), and the paper's accuracies."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import BaseModel

from config import Command, FinetuneConfig, Record, unlike_paper
from support.errors import UsageError, checking

FREE = {*Command.model_fields, "start", "pool", "jobs", "seeds", "mfac_device", "weights"} - {"amp"}


class Comparison(BaseModel, frozen=True):
    """An arm against another."""

    difference: float  # of the means
    p: float | None  # two-sided, exact; None for one seed against one
    splits: int  # of the pooled seeds; all of them are counted


def compare(arm: Sequence[int], against: Sequence[int]) -> Comparison:
    """Exact two-sample permutation test of means of whole numbers, such as images that were right.

    p is the share of the C(n + m, n) ways to split all n + m numbers into n and m whose means
    differ at least as much as those of the arms. Number by number, we count how many sets of each
    size have each sum. Whole numbers leave no rounding to decide.

    >>> compare([3, 4], [1, 2])  # the observed split and its mirror differ most
    Comparison(difference=2.0, p=0.3333333333333333, splits=6)
    """
    n, pooled = len(arm), [*arm, *against]
    splits = math.comb(len(pooled), n)
    if any(number % 1 for number in pooled):  # so it is for nan
        raise ValueError("compare counts, such as images that were right, not percentages")
    sets = Counter({(0, 0): 1})  # (size, sum) -> how many sets have it
    for number in pooled:
        for (size, total), count in [*sets.items()]:
            if size < n:  # larger sets are not asked for
                sets[size + 1, total + number] += count
    # n m times the distance of the two means, by the sum of the n numbers
    distance = {x: abs(x * len(pooled) - n * sum(pooled)) for size, x in sets if size == n}
    extreme = sum(sets[n, total] for total, d in distance.items() if d >= distance[sum(arm)])
    p = extreme / splits if len(pooled) > 2 else None
    return Comparison(difference=fmean(arm) - fmean(against), p=p, splits=splits)


class Reported(BaseModel, frozen=True):
    """Mean ± standard deviation, and the label of the paper's table."""

    mean: float
    std: float
    source: str


class Row(BaseModel, frozen=True):
    """An arm in the table that `evaluate` returns."""

    arm: str
    seeds: int
    unit: str
    mean: float  # percent
    std: float | None  # sample standard deviation (n − 1); None for a single seed
    metric: str
    paper: Reported | None
    differs: dict[str, str]  # settings unlike the first arm's: "this arm's, there the first's"
    accuracies: list[float]  # of the seeds, percent
    counts: list[int]  # the same as numbers of right images, or as hundredths of a point of mAP
    first_minus_this: Comparison | None


class Evaluation(BaseModel, frozen=True):
    """What `evaluate` found."""

    arms: list[Row]


def evaluate(runs: Sequence[Path]) -> Evaluation:
    """Compare the first of several arms with each of the others.

    An arm: a finished `finetune` run, or a directory of them. UsageError: neither, or other images.
    """
    arms = [read_arm(run) for run in runs]
    return Evaluation(arms=[row(arm, arms[0]) for arm in arms])


def row(arm: Record, first: Record) -> Row:
    """An arm in summary, and compared with the first one."""
    differs = unlike(first, arm)
    if "data_sha256" in differs:
        raise UsageError(f"{arm['arm']}, {first['arm']}: not comparable, other images or split")
    if None in differs.pop("aligned_by", ()):  # these follow from the start
        differs = {k: x for k, x in differs.items() if k not in ("grid", "align_unlike_paper")}
    mean, versus = fmean(arm["accuracies"]), compare(first["counts"], arm["counts"])
    versus = versus.model_copy(update={"difference": fmean(first["accuracies"]) - mean})
    return Row(
        **arm,
        seeds=len(arm["counts"]),
        mean=mean,
        std=stdev(arm["accuracies"]) if len(arm["counts"]) > 1 else None,
        differs={name: f"{here}, there {there}" for name, (there, here) in differs.items()},
        first_minus_this=None if arm is first else versus,
    )


def unlike(first: Record, arm: Record) -> dict[str, list[Any]]:
    """Settings of two arms that differ, other than seed, start, machine: both values."""
    pairs = {k: [first["settings"].get(k), v] for k, v in sorted(arm["settings"].items())}
    return {k: pair for k, pair in pairs.items() if k not in FREE and pair[0] != pair[1]}


def read_arm(path: Path) -> Record:
    """A finished `finetune` run, or a directory of such runs that differ in seed and start only."""
    files = [*path.glob("config.json")] or [*path.glob("*/config.json")] or [path / "config.json"]
    with checking(str(path), "give a finished finetune run of this edition, or a folder of them"):
        arms = [read_run(file.parent) for file in sorted(files, key=lambda f: (len(str(f)), f))]
    lists = {key: [x for arm in arms for x in arm[key]] for key in ("accuracies", "counts", "each")}
    names = {name for arm in arms for name in unlike(arms[0], arm)}
    if names or len({*lists["each"]}) < len(lists["each"]):
        see = ", ".join(sorted(names)) or "seed"
        raise UsageError(f"{path}: its runs are no seeds of one arm, see {see}; give each alone")
    starts = {start for start, _ in lists["each"]}  # as many as seeds: own align runs
    own = 1 < len(starts) == len(lists["each"])
    return arms[0] | lists | {"arm": path.name} | ({"unit": "align run and PEFT"} if own else {})


def read_run(run: Path) -> Record:
    """One finished `finetune` run."""
    config, env, result = (
        json.loads((run / f"{name}.json").read_text()) for name in ("config", "env", "result")
    )
    if not result.get("test"):
        raise UsageError(f"{run}: has no test accuracy; give a finetune run, not align's")
    about = env["about"] | result
    kept = ("data_sha256", "weights_sha256", "aligned_by", "align_unlike_paper")
    return {
        **result,
        "settings": config | {name: about[name] for name in kept},
        "paper": published(config, result),
        "accuracies": result["test"],
        "counts": result["right"] or [round(100 * percent) for percent in result["test"]],
        "each": [(config["start"], config["seed"] + i) for i in range(len(result["test"]))],
    }


def published(settings: Record, result: Record) -> Reported | None:
    """The paper's figure for a run; None where its settings, as far as we know, are others."""
    usual = (
        not unlike_paper(FinetuneConfig(**settings))
        and settings["pretext"] == result["pretext"]
        and str(settings["weights"]).endswith(("None", "_full.pth", "IN1K-vit.h.14-300e.pth.tar"))
        and result["aligned_on"] in (None, settings["dataset"])
        and not result["align_unlike_paper"]
    )
    methods = {None: "PEFT", "mfac": "BiSSLight", "recursion": "BiSSLight", "cg": "BiSSL"}
    who = result["pretext"], result["backbone"], methods.get(result["aligned_by"], "")
    return PUBLISHED.get((*who, settings["dataset"])) if usual else None


# The paper's tables: test accuracy (%; VOC07: mAP), mean ± deviation of 8 seeds
DATASETS = ("pets", "dtd", "voc07", "flowers", "cub200", "aircrafts")  # the tables' columns
ACCURACIES = {  # by the label of the table; after BiSSL(ight) comes PEFT
    "tab:mae_bisslight_main_results": """\
        mae   vit_b16 PEFT      91.7±0.3 69.9±0.5 80.9±0.3 92.8±0.5 79.8±0.5 70.6±0.6
        mae   vit_b16 BiSSLight 92.1±0.2 70.3±0.4 81.7±0.2 93.5±0.3 81.2±0.3 72.7±0.3
        mae   vit_l16 PEFT      94.4±0.3 74.1±0.6 85.5±0.2 94.6±0.4 84.4±0.4 79.1±0.4
        mae   vit_l16 BiSSLight 94.7±0.2 74.9±0.4 85.9±0.1 95.8±0.2 85.6±0.3 82.2±0.3
        mae   vit_h14 PEFT      95.2±0.3 75.8±0.5 86.5±0.2 96.0±0.3 85.9±0.4 80.4±1.0
        mae   vit_h14 BiSSLight 95.5±0.2 76.7±0.2 87.3±0.1 97.2±0.1 87.2±0.2 87.1±0.3""",
    "tab:classificaiton_acc_bissl_orig": """\
        mae   vit_b16 BiSSL     92.0±0.5 70.8±0.4 81.9±0.1 93.4±0.4 81.2±0.3 72.7±0.3""",
    "tab:classificaiton_acc_bisslight_ijepa": """\
        ijepa vit_h14 PEFT      94.6±0.1 73.1±0.4 82.4±0.2 95.1±0.4 86.4±0.3 76.0±0.6
        ijepa vit_h14 BiSSLight 94.7±0.1 74.0±0.6 84.0±0.3 96.1±0.3 86.8±0.2 77.7±0.4""",
}  # the other rows of the second table repeat the first
PUBLISHED = {  # by pretext task, backbone, method, dataset
    (*names, dataset): Reported(mean=mean, std=std, source=label)
    for label, text in ACCURACIES.items()
    for *names, figures in (line.split(maxsplit=3) for line in text.splitlines())
    for dataset, figure in zip(DATASETS, figures.split(), strict=True)
    for mean, std in [figure.split("±")]
}
