"""`bisslight evaluate`: summaries over seeds, an exact permutation test (App. C.2.1), the paper's.

An arm is a finished `finetune` run, or a directory of such runs that differ in seed and start only,
such as one PEFT seed for each align run. The runs of an arm may also be over several data sets:
such arms are compared on each data set, and on all of them together by a stratified test. The first
arm is compared with every other one.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from pydantic import BaseModel

from config import OPEN, FinetuneConfig, Machine, Record, paper_values
from support.errors import UsageError, checking

# Settings that make no other arm: what is repeated, how often, and on which machine. --amp does,
# since it changes the arithmetic; --weights are compared by their digest instead of their path.
FREE = {*Machine.model_fields, "start", "seeds", "jobs", "weights", "test_curve"} - {"amp"}


# What may differ between the data sets of one arm: the data, and what is chosen for each of them.
OF_DATA_SET = {
    *("dataset", "data_seed", "split_file", "partial", "data_sha256"),
    *("weights_sha256", "lr", "grid", "epochs"),
}


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
        # of several data sets they may have 50 digits
        splits = f"{Decimal(self.splits):.2g}" if self.splits >= 10**9 else f"{self.splits}"
        return f"difference={difference:.2f} p={p} splits={splits}"


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


# --- the test over several data sets --------------------------------------------------------------

# The most sums that convolving two distributions may have to form: seconds, and under 1 GB.
MOST_SUMS = 5_000_000


class Stratum(NamedTuple):
    """Two arms on one data set: how many of its test images each seed had right."""

    arm: Sequence[int]
    against: Sequence[int]
    images: int  # test images of the data set


def compare_strata(strata: Sequence[Stratum]) -> Comparison:
    """Exact stratified permutation test: two arms on several data sets, each a stratum.

    The statistic is the mean over strata of the difference of mean accuracies, in percentage
    points. Seeds are permuted within their stratum only, so that an easy data set is never taken
    for a good arm. p is the share of all permutations whose statistic is at least as far from 0,
    its mean over permutations. Every one of them is counted: the distribution of a sum over
    strata is the convolution of their distributions, and all differences are whole numbers on one
    scale. ValueError: no strata, an empty one, or more different sums than can be counted.

    >>> easy = Stratum(arm=[90, 95], against=[80, 85], images=100)
    >>> hard = Stratum(arm=[21, 22], against=[20, 19], images=50)
    >>> compare_strata([easy, hard])  # 36 splits; the observed pair and its mirror differ most
    Comparison(difference=7.0, p=0.05555555555555555, splits=36)
    """
    check_strata(strata)
    # A multiple of all n m images, times which every difference of accuracies is whole.
    scale = math.lcm(*[len(arm) * len(against) * images for arm, against, images in strata])
    observed = 0
    splits = 1
    # Differences of one stratum are a fixed distance apart. Strata with the same distance have
    # many equal sums, so they go first, and their distribution stays small.
    alike: dict[int, Counter[int]] = {}
    for stratum in strata:
        observed += scale_difference(stratum, sum(stratum.arm), scale)
        seeds = len(stratum.arm) + len(stratum.against)
        splits *= math.comb(seeds, len(stratum.arm))
        distance = scale_difference(stratum, 1, scale) - scale_difference(stratum, 0, scale)
        before = alike.get(distance, Counter({0: 1}))
        alike[distance] = convolve(before, count_differences(stratum, scale))
    # The last convolution, the largest, is never formed: two halves are enough to count with.
    one = Counter({0: 1})
    other = Counter({0: 1})
    for differences in sorted(alike.values(), key=len, reverse=True):
        if len(one) <= len(other):
            one = convolve(one, differences)
        else:
            other = convolve(other, differences)
    extreme = splits - count_closer(one, other, abs(observed))
    # One seed against one on one data set: both splits differ as much, whatever the numbers are.
    p = extreme / splits if splits > 2 else None
    difference = Fraction(100 * observed, scale * len(strata))
    return Comparison(difference=float(difference), p=p, splits=splits)


def check_strata(strata: Sequence[Stratum]) -> None:
    """ValueError where strata cannot be compared."""
    if not strata:
        raise ValueError("no strata to compare")
    for stratum in strata:
        if not stratum.arm or not stratum.against or stratum.images < 1:
            raise ValueError("every stratum needs a seed of each arm, and test images")
        if any(number % 1 for number in [*stratum.arm, *stratum.against]):
            raise ValueError("compare counts, such as images that were right, not percentages")


def scale_difference(stratum: Stratum, total: int, scale: int) -> int:
    """The difference of mean accuracies, times `scale`, if the first arm's counts had this sum."""
    n = len(stratum.arm)
    m = len(stratum.against)
    whole = sum(stratum.arm) + sum(stratum.against)
    return (m * total - n * (whole - total)) * (scale // (n * m * stratum.images))


def count_differences(stratum: Stratum, scale: int) -> Counter[int]:
    """How many splits of a stratum have each difference of mean accuracies, times `scale`."""
    n = len(stratum.arm)
    differences: Counter[int] = Counter()
    for (size, total), count in count_sets([*stratum.arm, *stratum.against], n).items():
        if size == n:
            differences[scale_difference(stratum, total, scale)] += count
    return differences


def convolve(these: Counter[int], those: Counter[int]) -> Counter[int]:
    """How many pairs, a number of these and one of those, have each sum (ValueError: too many)."""
    if len(these) * len(those) > MOST_SUMS:
        raise ValueError(
            f"counting every permutation of these {len(these)} x {len(those)} differences would "
            f"take more than {MOST_SUMS:,} sums: compare fewer data sets at once"
        )
    sums: Counter[int] = Counter()
    for this, count in these.items():
        for that, times in those.items():
            sums[this + that] += count * times
    return sums


def count_closer(these: Counter[int], those: Counter[int], limit: int) -> int:
    """How many pairs, a number of these and one of those, have a sum between -limit and limit."""
    if limit == 0:
        return 0
    ordered = sorted(those)
    below = [0, *accumulate(those[number] for number in ordered)]  # how many are before each place
    closer = 0
    for number, count in these.items():
        first = bisect_right(ordered, -limit - number)  # the sum must be more than -limit
        end = bisect_left(ordered, limit - number)  # and less than limit
        closer += count * (below[end] - below[first])
    return closer


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


class Pooled(BaseModel, frozen=True):
    """An arm on all of its data sets together."""

    arm: str
    data_sets: list[str]
    seeds: int  # of all data sets
    mean: float  # percent; the mean of the data sets' means
    differs: dict[str, str]  # as in Row; where data sets have different values, all of them
    first_minus_this: Comparison | None  # stratified: seeds are permuted within a data set only


class PooledEvaluation(Evaluation, frozen=True):
    """What `evaluate` found of arms over several data sets; `arms` has a row for each of both."""

    pooled: list[Pooled]


class Arm(BaseModel, frozen=True):
    """What run directories say of an arm on one data set."""

    name: str
    data_set: str  # in words
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

    @property
    def whole(self) -> int:
        """The count of an accuracy of 100 %."""
        return 100 * 100 if self.right is None else self.test_images

    @property
    def images(self) -> object:
        """Which images it learned from and was tested on: a digest."""
        return self.settings["data_sha256"]


def evaluate(runs: Sequence[Path]) -> Evaluation:
    """Compare the first of several arms with each of the others.

    An arm: a finished `finetune` run, or a directory of them, or a directory of such directories.
    Where an arm has runs on several data sets, the result is a PooledEvaluation. UsageError: no
    arm, or other data sets than the first one's.
    """
    arms = [read_arm(run) for run in runs]
    if all(len(arm) == 1 for arm in arms):
        singles = [arm[0] for arm in arms]
        return Evaluation(arms=[summarise(arm, singles[0]) for arm in singles])
    return evaluate_data_sets(arms)


def evaluate_data_sets(arms: Sequence[list[Arm]]) -> PooledEvaluation:
    """Compare arms data set by data set, and over all data sets together (UsageError)."""
    first = arms[0]
    arms = [first, *[match_data_sets(arm, first) for arm in arms[1:]]]
    rows = []
    for k, first_there in enumerate(first):
        for arm in arms:
            row = summarise(arm[k], first_there)
            name = f"{row.arm} on {arm[k].data_set}"
            rows.append(row.model_copy(update={"arm": name}))
    return PooledEvaluation(arms=rows, pooled=[pool(arm, first) for arm in arms])


def match_data_sets(arm: Sequence[Arm], first: Sequence[Arm]) -> list[Arm]:
    """An arm on the data sets of the first one, in their order (UsageError: on others)."""
    of_arm = {there.images: there for there in arm}
    of_first = {there.images: there for there in first}
    for these, those, name in ((of_first, of_arm, arm[0].name), (of_arm, of_first, first[0].name)):
        for images, there in these.items():
            if images not in those:
                raise UsageError(
                    f"{name}: has no run on {there.data_set}, which {there.name} has, or one on "
                    "other images or another split"
                )
    return [of_arm[there.images] for there in first]


def pool(arm: Sequence[Arm], first: Sequence[Arm]) -> Pooled:
    """An arm on all data sets in summary, and compared with the first one on the same ones."""
    means = []
    seeds = 0
    differs: dict[str, list[str]] = {}
    for there, first_there in zip(arm, first, strict=True):
        means.append(fmean(there.accuracies))
        seeds += len(there.accuracies)
        for name, values in list_differences(there, first_there).items():
            texts = differs.setdefault(name, [])
            if str(values) not in texts:
                texts.append(str(values))
    return Pooled(
        arm=arm[0].name,
        data_sets=[there.data_set for there in arm],
        seeds=seeds,
        mean=fmean(means),
        differs={name: "; ".join(texts) for name, texts in differs.items()},
        first_minus_this=None if arm is first else compare_data_sets(first, arm),
    )


def compare_data_sets(first: Sequence[Arm], arm: Sequence[Arm]) -> Comparison:
    """The stratified test of their counts on the same data sets, in percentage points."""
    strata = []
    difference = Fraction(0)
    for first_there, there in zip(first, arm, strict=True):
        strata.append(Stratum(first_there.counts, there.counts, there.whole))
        difference += subtract_accuracies(first_there, there) / len(first)
    with checking(f"{first[0].name}, {arm[0].name}"):
        tested = compare_strata(strata)
    return tested.model_copy(update={"difference": float(difference)})


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
    difference = subtract_accuracies(first, arm)
    return tested.model_copy(update={"difference": float(difference)})


def subtract_accuracies(first: Arm, arm: Arm) -> Fraction:
    """The difference of mean accuracies in percentage points, exactly."""
    if first.right is not None and arm.right is not None:
        # of the counts, since an accuracy such as 100 · 2 / 3 is rounded
        return subtract_means(first.right, arm.right) * 100 / arm.test_images
    return subtract_means(first.accuracies, arm.accuracies)


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


def read_arm(path: Path) -> list[Arm]:
    """An arm on each of its data sets, nearly always one (UsageError: not the runs of one arm).

    `path` is a finished `finetune` run, a directory of such runs, or one of such directories.
    """
    with checking(str(path), "give a finished finetune run, or a folder of them"):
        runs = [read_run(run) for run in find_runs(path)]
    data_sets: dict[object, list[Arm]] = {}
    for run in runs:
        data_sets.setdefault(run.images, []).append(run)
    differing = list_what_makes_other_arms(list(data_sets.values()))
    if differing:
        see = ", ".join(sorted(differing))
        raise UsageError(f"{path}: its runs are no seeds of one arm, see {see}; give each alone")
    return [join_seeds(path.name, of_data_set) for of_data_set in data_sets.values()]


def list_what_makes_other_arms(data_sets: Sequence[list[Arm]]) -> set[str]:
    """What differs between runs, data set by data set, though it does not in seeds of one arm."""
    very_first = data_sets[0][0]
    differing: set[str] = set()
    names = set()
    twice = False
    for runs in data_sets:
        first = runs[0]
        names.add(first.data_set)
        differing |= compare_settings(first.settings, very_first.settings).keys() - OF_DATA_SET
        starts = []
        for run in runs:
            differing |= compare_settings(run.settings, first.settings).keys()
            starts += run.starts
        if len(set(starts)) < len(starts):
            twice = True  # it would count one seed as two
    if len(names) < len(data_sets):
        differing.add("data_sha256")  # other images or another split under one name
    if twice and not differing:
        return {"seed"}
    return differing


def join_seeds(name: str, runs: Sequence[Arm]) -> Arm:
    """Runs on one data set, which differ in seed and start only, as one arm."""
    first = runs[0]
    starts: list[tuple[str | None, int]] = []
    accuracies: list[float] = []
    right: list[int] = []
    for run in runs:
        starts += run.starts
        accuracies += run.accuracies
        right += run.right or []
    align_runs = {align_run for align_run, _ in starts}
    # Then the spread over seeds has that of aligning in it, and the p-value is about both stages.
    each_has_its_own = len(starts) > 1 and len(align_runs) == len(starts)
    aligned_each = each_has_its_own and not first.settings["restart"]
    return first.model_copy(
        update={
            "name": name,
            "unit": "align run and PEFT" if aligned_each else first.unit,
            "accuracies": accuracies,
            "right": None if first.right is None else right,
            "starts": starts,
        }
    )


def find_runs(path: Path) -> list[Path]:
    """The run at a path, or the runs in that directory or one level deeper, s2 before s10."""
    if (path / "config.json").exists():
        return [path]
    files = [*path.glob("*/config.json")] or [*path.glob("*/*/config.json")]
    runs = [file.parent for file in files]
    # shorter names have smaller numbers
    runs.sort(key=lambda run: (len(run.parent.name), run.parent.name, len(run.name), run.name))
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
        data_set=describe_data_set(config),
        unit=result["unit"],
        metric=result["metric"],
        test_images=result["test_images"],
        settings=settings,
        accuracies=result["test"],
        right=result["right"],
        starts=[(config["start"], first_seed + i) for i in range(len(result["test"]))],
        paper=published(config, result),
    )


def describe_data_set(config: Record) -> str:
    """The data set of a run in words.

    >>> describe_data_set({"dataset": "omniglot:Greek", "data_seed": 2, "split_file": None})
    'omniglot:Greek, data seed 2'
    """
    words = [config["dataset"]]
    if config["data_seed"]:
        words.append(f"data seed {config['data_seed']}")
    if config["split_file"] is not None:
        words.append(f"split {Path(config['split_file']).name}")
    return ", ".join(words)


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
