"""`bisslight evaluate`: summaries over seeds, an exact permutation test (App. C.2.1), the paper's.

An arm is a finished `finetune` run, or a directory of such runs that differ in seed and start only,
such as one PEFT seed for each align run. The first arm is compared with every other one.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from pydantic import BaseModel

from config import OPEN, FinetuneConfig, Machine, Record, paper_values
from support.errors import UsageError, checking

# Settings that make no other arm: what is repeated, how often, and on which machine. --amp does,
# since it changes the arithmetic; --weights are compared by their digest instead of their path.
FREE = {*Machine.model_fields, "start", "seeds", "jobs", "weights", "test_curve"} - {"amp"}


# --- the test -------------------------------------------------------------------------------------


class Comparison(BaseModel, frozen=True):
    """An arm against another."""

    difference: float  # of the means
    p: float | None  # two-sided, exact; None for one seed against one
    splits: int  # of the pooled seeds; all of them are counted

    def __str__(self) -> str:
        """As people read it: two decimals, and two digits of p."""
        difference = round(self.difference, 2) + 0.0  # adding 0 makes -0 a plain 0
        p = "none" if self.p is None else f"{self.p:#.2g}"
        return f"difference={difference:.2f} p={p} splits={self.splits}"


def compare(arm: Sequence[int], against: Sequence[int]) -> Comparison:
    """Exact two-sample permutation test of means of whole numbers, such as images that were right.

    p is the share of the C(n + m, n) ways to split all n + m numbers into n and m whose means
    differ at least as much as those of the arms. Number by number, we count how many sets of each
    size have each sum. Whole numbers leave no rounding to decide.

    >>> compare([3, 4], [1, 2])  # the observed split and its mirror differ most
    Comparison(difference=2.0, p=0.3333333333333333, splits=6)
    """
    pooled = [*arm, *against]
    if any(number % 1 for number in pooled):  # nan and infinity too: their remainder is nan
        raise ValueError("compare counts, such as images that were right, not percentages")
    n = len(arm)
    whole = sum(pooled)

    def distance(total: int) -> int:
        """Distance of the means of n numbers with this sum and of the m others, times n m."""
        return abs(total * len(pooled) - n * whole)

    sets = count_sets(pooled, n)
    observed = distance(sum(arm))
    extreme = 0
    for (size, total), count in sets.items():
        if size == n and distance(total) >= observed:
            extreme += count
    splits = math.comb(len(pooled), n)
    # One number against one: both splits differ as much as the arms do, whatever the numbers are.
    p = extreme / splits if len(pooled) > 2 else None
    return Comparison(difference=float(subtract_means(arm, against)), p=p, splits=splits)


def count_sets(numbers: Sequence[int], largest: int) -> Counter[tuple[int, int]]:
    """How many sets of at most `largest` of these numbers have each (size, sum)."""
    sets = Counter({(0, 0): 1})
    for number in numbers:
        # Each set without this number makes one with it; `list`, since the loop adds new ones.
        for (size, total), count in list(sets.items()):
            if size < largest:
                sets[size + 1, total + number] += count
    return sets


def subtract_means(these: Sequence[float], those: Sequence[float]) -> Fraction:
    """The difference of two means, exactly: equal means differ by 0, not by rounding."""
    return take_mean(these) - take_mean(those)


def take_mean(numbers: Sequence[float]) -> Fraction:
    """The mean of numbers, exactly."""
    total = Fraction(0)
    for number in numbers:
        total += Fraction(number)
    return total / len(numbers)


# --- the table of arms ----------------------------------------------------------------------------


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


class Arm(BaseModel, frozen=True):
    """What run directories say of an arm."""

    name: str
    unit: str  # what one seed repeats
    metric: str
    test_images: int
    settings: Record  # of the runs; and which weights, data and align run they had
    accuracies: list[float]  # of the seeds, percent
    right: list[int] | None  # test images that were right; None where the accuracy is mAP
    starts: list[tuple[str | None, int]]  # of the seeds: path of an align run, seed
    paper: Reported | None

    @property
    def counts(self) -> list[int]:
        """Whole numbers to compare: right images, or hundredths of a point of mAP."""
        if self.right is not None:
            return self.right
        # mAP counts no images, and the exact test needs whole numbers: two decimals of percent.
        return [round(100 * percent) for percent in self.accuracies]


def evaluate(runs: Sequence[Path]) -> Evaluation:
    """Compare the first of several arms with each of the others.

    An arm: a finished `finetune` run, or a directory of them. UsageError: neither, or other images.
    """
    arms = [read_arm(run) for run in runs]
    return Evaluation(arms=[summarise(arm, arms[0]) for arm in arms])


def summarise(arm: Arm, first: Arm) -> Row:
    """An arm in summary, and compared with the first one (UsageError: other images)."""
    differences = list_differences(arm, first)
    return Row(
        arm=arm.name,
        seeds=len(arm.accuracies),
        unit=arm.unit,
        mean=fmean(arm.accuracies),
        std=stdev(arm.accuracies) if len(arm.accuracies) > 1 else None,
        metric=arm.metric,
        paper=arm.paper,
        differs={name: str(values) for name, values in differences.items()},
        accuracies=arm.accuracies,
        counts=arm.counts,
        first_minus_this=None if arm is first else compare_arms(first, arm),
    )


def compare_arms(first: Arm, arm: Arm) -> Comparison:
    """The permutation test of their counts; the difference is in percentage points."""
    tested = compare(first.counts, arm.counts)
    if first.right is not None and arm.right is not None:
        # of the counts, since an accuracy such as 100 · 2 / 3 is rounded
        difference = subtract_means(first.right, arm.right) * 100 / arm.test_images
    else:
        difference = subtract_means(first.accuracies, arm.accuracies)
    return tested.model_copy(update={"difference": float(difference)})


class Values(NamedTuple):
    """A setting of an arm, and what it is in the first arm."""

    value: object
    first: object

    def __str__(self) -> str:
        return f"{describe(self.value)}, there {describe(self.first)}"


def describe(value: object) -> str:
    """A setting as text.

    >>> describe({"lam": 1.0, "rank": 2})
    'lam 1.0 and rank 2'
    """
    if isinstance(value, Mapping):
        words = [f"{name} {item}" for name, item in value.items()]
        return " and ".join(words) or "nothing"
    return str(value)


def list_differences(arm: Arm, first: Arm) -> dict[str, Values]:
    """Settings in which an arm differs from the first one (UsageError: other images)."""
    differences = compare_settings(arm.settings, first.settings)
    if "data_sha256" in differences:
        raise UsageError(f"{arm.name}, {first.name}: not comparable, other images or split")
    # Where one arm is aligned and the other not, their grids and what follows differ, of course.
    if "aligned_by" in differences and None in differences["aligned_by"]:
        for name in ("aligned_by", "align_unlike_paper", "grid"):
            differences.pop(name, None)
    return differences


def compare_settings(settings: Record, first: Record) -> dict[str, Values]:
    """Settings that differ, other than seed, start and machine."""
    differences = {}
    for name in sorted(settings):
        values = Values(settings[name], first.get(name))
        if name not in FREE and values.value != values.first:
            differences[name] = values
    return differences


# --- reading runs ---------------------------------------------------------------------------------


def read_arm(path: Path) -> Arm:
    """A finished `finetune` run, or a directory of such runs as one arm (UsageError)."""
    with checking(str(path), "give a finished finetune run, or a folder of them"):
        arms = [read_run(run) for run in find_runs(path)]
    first = arms[0]
    differing: set[str] = set()
    starts: list[tuple[str | None, int]] = []  # twice the same would count one seed as two
    accuracies: list[float] = []
    right: list[int] = []
    for arm in arms:
        differing |= compare_settings(arm.settings, first.settings).keys()
        starts += arm.starts
        accuracies += arm.accuracies
        right += arm.right or []
    if differing or len(set(starts)) < len(starts):
        see = ", ".join(sorted(differing)) or "seed"
        raise UsageError(f"{path}: its runs are no seeds of one arm, see {see}; give each alone")
    align_runs = {align_run for align_run, _ in starts}
    # Then the spread over seeds has that of aligning in it, and the p-value is about both stages.
    each_has_its_own = len(starts) > 1 and len(align_runs) == len(starts)
    return first.model_copy(
        update={
            "name": path.name,
            "unit": "align run and PEFT" if each_has_its_own else first.unit,
            "accuracies": accuracies,
            "right": None if first.right is None else right,
            "starts": starts,
        }
    )


def find_runs(path: Path) -> list[Path]:
    """The run at a path, or the runs in that directory, s2 before s10."""
    if (path / "config.json").exists():
        return [path]
    runs = [file.parent for file in path.glob("*/config.json")]
    runs.sort(key=lambda run: (len(run.name), run.name))
    return runs or [path]


def read_run(run: Path) -> Arm:
    """One finished `finetune` run; any exception where it is none."""
    config = json.loads((run / "config.json").read_text())
    env = json.loads((run / "env.json").read_text())
    result = json.loads((run / "result.json").read_text())
    if not result.get("test"):
        raise UsageError(f"{run}: has no test accuracy; give a finetune run, not align's")
    settings = {
        "restart": False,  # earlier versions had no such setting
        **without_default_alpha(config),
        "data_sha256": env["about"]["data_sha256"],
        "weights_sha256": env["about"]["weights_sha256"],
        "aligned_by": result["aligned_by"],
        "align_unlike_paper": result["align_unlike_paper"],
    }
    first_seed = config["seed"]
    return Arm(
        name=run.name,
        unit=result["unit"],
        metric=result["metric"],
        test_images=result["test_images"],
        settings=settings,
        accuracies=result["test"],
        right=result["right"],
        starts=[(config["start"], first_seed + i) for i in range(len(result["test"]))],
        paper=published(config, result),
    )


def without_default_alpha(settings: Record) -> Record:
    """Settings of a run with alpha None where it is the rank, so that runs can be compared.

    None and the rank mean one scale, but the second edition recorded the number.
    """
    if settings["alpha"] == settings["rank"]:
        return {**settings, "alpha": None}
    return settings


# --- the paper's accuracies -----------------------------------------------------------------------

# Test accuracy (%; VOC07: mAP), mean ± deviation of 8 seeds, by the label of the table, and there
# by pretext task, backbone and method; after BiSSL(ight) comes PEFT. The rows of
# tab:classificaiton_acc_bissl_orig that are not here repeat the first table.
COLUMNS = ("pets", "dtd", "voc07", "flowers", "cub200", "aircrafts")
ACCURACIES = {
    "tab:mae_bisslight_main_results": {
        ("mae", "vit_b16", "PEFT"): "91.7±0.3 69.9±0.5 80.9±0.3 92.8±0.5 79.8±0.5 70.6±0.6",
        ("mae", "vit_b16", "BiSSLight"): "92.1±0.2 70.3±0.4 81.7±0.2 93.5±0.3 81.2±0.3 72.7±0.3",
        ("mae", "vit_l16", "PEFT"): "94.4±0.3 74.1±0.6 85.5±0.2 94.6±0.4 84.4±0.4 79.1±0.4",
        ("mae", "vit_l16", "BiSSLight"): "94.7±0.2 74.9±0.4 85.9±0.1 95.8±0.2 85.6±0.3 82.2±0.3",
        ("mae", "vit_h14", "PEFT"): "95.2±0.3 75.8±0.5 86.5±0.2 96.0±0.3 85.9±0.4 80.4±1.0",
        ("mae", "vit_h14", "BiSSLight"): "95.5±0.2 76.7±0.2 87.3±0.1 97.2±0.1 87.2±0.2 87.1±0.3",
    },
    "tab:classificaiton_acc_bissl_orig": {
        ("mae", "vit_b16", "BiSSL"): "92.0±0.5 70.8±0.4 81.9±0.1 93.4±0.4 81.2±0.3 72.7±0.3",
    },
    "tab:classificaiton_acc_bisslight_ijepa": {
        ("ijepa", "vit_h14", "PEFT"): "94.6±0.1 73.1±0.4 82.4±0.2 95.1±0.4 86.4±0.3 76.0±0.6",
        ("ijepa", "vit_h14", "BiSSLight"): "94.7±0.1 74.0±0.6 84.0±0.3 96.1±0.3 86.8±0.2 77.7±0.4",
    },
}
METHODS = {None: "PEFT", "mfac": "BiSSLight", "recursion": "BiSSLight", "cg": "BiSSL"}
OFFICIAL = ("_full.pth", "IN1K-vit.h.14-300e.pth.tar")  # ends of the official files' names


def published(config: Record, result: Record) -> Reported | None:
    """The paper's figure for a run; None where its settings, as far as we know, are others."""
    if not follows_paper(config, result):
        return None
    method = METHODS.get(result["aligned_by"])  # None for one that the paper has no table of
    row = (result["pretext"], result["backbone"], method)
    for source, rows in ACCURACIES.items():
        if row in rows and config["dataset"] in COLUMNS:
            figures = rows[row].split()
            mean, std = figures[COLUMNS.index(config["dataset"])].split("±")
            return Reported(mean=float(mean), std=float(std), source=source)
    return None


def follows_paper(config: Record, result: Record) -> bool:
    """Whether a run, and the align run before it, had the paper's settings, weights and data."""
    settings = without_default_alpha(config)
    for name, value in paper_values(FinetuneConfig, config).items():
        if name not in OPEN and settings.get(name, value) != value:
            return False
    weights = config["weights"]
    if weights is not None and not weights.endswith(OFFICIAL):
        return False
    if config["pretext"] != result["pretext"]:
        return False
    if result["aligned_on"] not in (None, config["dataset"]):  # None: not aligned
        return False
    return not result["align_unlike_paper"]
