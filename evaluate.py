"""Program: `bisslight evaluate`, summaries over seeds, the exact test (App. C.2.1), the paper's.

An arm is a finished `finetune` run, or a directory of such runs that differ in seed and start only,
such as one PEFT seed for each align run. The first arm is compared with every other one; each data
set is evaluated for itself, as in the paper.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple, NoReturn

from pydantic import BaseModel, Field

from config import (
    AlignConfig,
    FinetuneConfig,
    Mark,
    Record,
    open_settings,
    paper_values,
    settings_with,
)
from support.errors import UsageError, as_usage_error
from support.permutation import Comparison as Comparison  # also for those who import it from here
from support.permutation import compare as compare
from support.screen import Answer, count, format_value, percent

LOG = logging.getLogger("bisslight")

# Settings that make no other arm: what is repeated, how often, and on which machine. Weights and
# start are compared by their digest instead of their path.
OF_NO_ARM = (Mark.SAME_ARM, Mark.CHANGES_NO_NUMBER, Mark.KNOWN_BY_DIGEST)
NOT_COMPARED = settings_with(AlignConfig, *OF_NO_ARM) | settings_with(FinetuneConfig, *OF_NO_ARM)

STARTS = {  # where an arm's seeds start, in plain words, by its `unit`; of a direct one, nowhere
    "PEFT and PEFT anew": "the seeds of a finished fine-tuning, one each",
    "PEFT seed on one LoRA file": "one LoRA file, so they repeat the fine-tuning alone",
    "PEFT seed on one align run": "one align run, so they repeat the fine-tuning alone",
    "align run and PEFT": "an align run each, so they repeat both steps",
}

# --- the table of arms ----------------------------------------------------------------------------


class Reported(BaseModel, frozen=True):
    """Mean ± standard deviation, and the label of the paper's table."""

    mean: float
    std: float
    source: str


class Interval(NamedTuple):
    """The ends of a 95 % interval, in percent."""

    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2


class Row(BaseModel, frozen=True):
    """An arm in the table that `evaluate` returns."""

    arm: str
    seeds: int
    unit: str
    mean: float  # percent
    std: float | None  # sample standard deviation (n − 1); None for a single seed
    metric: str
    paper: Reported | None
    differs: dict[str, str]  # see `list_differences`
    accuracies: list[float]  # of the seeds, percent
    counts: list[int]  # the same as numbers of right images, or as hundredths of a point of mAP
    first_minus_this: Comparison | None
    # for people only: JSON is read by programs that know the fields above
    rates: list[float] = Field([], exclude=True)  # the learning rates of its runs, each once
    test_images: int = Field(0, exclude=True)
    data_set: str = Field("", exclude=True)

    @property
    def interval(self) -> Interval | None:
        """Where the accuracy on all images of this kind lies; None for mAP, which counts none."""
        if self.metric != "top-1 accuracy" or not self.test_images:
            return None
        return interval_by_images(self.mean, self.test_images)


class Evaluation(BaseModel, frozen=True):
    """What `evaluate` found."""

    arms: list[Row]

    def in_words(self) -> Answer:
        """By how much the first arm is better than each other one, and a table of all."""
        first = self.arms[0]
        seeds = count(first.seeds, "seed")
        headline = f"test {first.metric} {percent(first.accuracies)} ({seeds})"
        differences = []
        lines = []
        for row in self.arms:
            if row.first_minus_this:
                difference = describe_comparison(row.first_minus_this)
                differences.append(f"{first.arm} minus {row.arm}: {difference}")
                lines += tell_few_images(row)
            if row.unit in STARTS:
                lines.append(f"the seeds of {row.arm} start from {STARTS[row.unit]}")
            if row.differs:
                lines.append(f"{row.arm} differs: {format_value(row.differs)}")
        rows = [describe_row(row, first.arm) for row in self.arms]
        return Answer("\n".join(differences) or headline, rows, lines)


def interval_by_images(accuracy: float, images: int) -> Interval:
    """Wilson's 95 % interval of an accuracy (%) that was measured on so many images.

    It says how well that many images of the same kind tell the accuracy of one network. Seeds
    share the test images, so more seeds do not make it narrower.

    >>> low, high = interval_by_images(50.0, 35)
    >>> round(low, 1), round(high, 1)
    (34.3, 65.7)
    """
    z = NormalDist().inv_cdf(0.975)
    share = accuracy / 100
    centre = (share + z**2 / (2 * images)) / (1 + z**2 / images)
    variance = share * (1 - share) / images + (z / (2 * images)) ** 2
    half = z * math.sqrt(variance) / (1 + z**2 / images)
    return Interval(100 * (centre - half), 100 * (centre + half))


def tell_few_images(row: Row) -> list[str]:
    """A line where the test images are too few for the difference that is told."""
    comparison = row.first_minus_this
    if comparison is None or row.interval is None or row.interval.half < abs(comparison.difference):
        return []
    return [
        f"{count(row.test_images, 'test image')} tell an accuracy to within "
        f"{row.interval.half:.0f} points: p is about other seeds, not about other images"
    ]


def describe_row(row: Row, first: str) -> Record:
    """The line of an arm in the table; `first` is the name of the one that it is compared with."""
    line: Record = {"arm": row.arm, "seeds": row.seeds, "rate": row.rates}
    line["test images"] = row.test_images
    line[f"test {row.metric}"] = percent(row.accuracies)
    if row.interval:
        line["95 % by images"] = f"{row.interval.low:.1f} to {row.interval.high:.1f}"
    comparison = row.first_minus_this
    if comparison:
        line[f"{first} minus this"] = points(comparison)
        line["p"] = "none" if comparison.p is None else f"{comparison.p:#.2g}"
    if row.paper:
        line["the paper"] = f"{row.paper.mean} ± {row.paper.std} % ({row.paper.source})"
    return line


def describe_comparison(comparison: Comparison) -> str:
    """A difference in words, with what its p-value means."""
    difference = f"{points(comparison)} points"
    if comparison.p is None:
        return f"{difference}; one seed each allows no test"
    if comparison.p < 0.05:
        meaning = "chance hardly explains it"
    elif comparison.p * comparison.splits <= 2:  # the observed split and its mirror
        meaning = "the smallest p that so few seeds can have"
    else:
        meaning = "chance may explain it"
    return f"{difference}, p = {comparison.p:#.2g}: {meaning}"


def points(comparison: Comparison) -> str:
    """A difference in percentage points, with its sign, such as +1.2."""
    rounded = round(comparison.difference, 1) + 0.0  # adding 0 makes -0 a plain 0
    return f"{rounded:+.1f}"


class Arm(BaseModel, frozen=True):
    """What run directories say of an arm."""

    name: str
    data_set: str  # in words
    unit: str  # what one seed repeats
    metric: str
    settings: Record  # of the runs; and which weights, data and align run they had
    accuracies: list[float]  # of the seeds, percent
    counts: list[int]  # whole numbers to compare: images that were right; see `read_run`
    count_of_all: int  # the count of an accuracy of 100 %
    rates: list[float]  # of the runs
    test_images: int
    starts: list[tuple[str | None, int]]  # of the seeds: what --from named, if anything; seed
    paper: Reported | None

    @property
    def is_aligned(self) -> bool:
        """Whether it started from an align run."""
        return self.settings["aligned_by"] is not None


def evaluate(runs: Sequence[Path]) -> Evaluation:
    """Compare the first of several arms with each of the others.

    An arm: a finished `finetune` run, or a directory of them. UsageError: no arm, or one on other
    images than the first one's.
    """
    arms = [read_arm(run) for run in runs]
    if len({arm.name for arm in arms}) < len(arms):  # such as A/tuned and B/tuned
        pairs = zip(arms, runs, strict=True)
        arms = [arm.model_copy(update={"name": str(run)}) for arm, run in pairs]
    first, *others = arms
    for arm in others:
        if arm.settings["data_sha256"] != first.settings["data_sha256"]:
            raise UsageError(
                f"{arm.name}: not comparable, is on {arm.data_set}, {first.name} on "
                f"{first.data_set}, or they have other images or another split"
            )
        tell_other_grid(arm, first)
    return Evaluation(arms=[summarise(arm, first) for arm in [first, *others]])


def summarise(arm: Arm, first: Arm) -> Row:
    """Sum up an arm, and compare it with the first one."""
    return Row(
        arm=arm.name,
        seeds=len(arm.accuracies),
        unit=arm.unit,
        mean=fmean(arm.accuracies),
        std=stdev(arm.accuracies) if len(arm.accuracies) > 1 else None,
        metric=arm.metric,
        paper=arm.paper,
        differs=list_differences(arm, first),
        accuracies=arm.accuracies,
        counts=arm.counts,
        first_minus_this=None if arm is first else compare_arms(first, arm),
        rates=sorted(set(arm.rates)),
        test_images=arm.test_images,
        data_set=arm.data_set,
    )


def compare_arms(first: Arm, arm: Arm) -> Comparison:
    """The permutation test of their counts, in percentage points."""
    with as_usage_error(f"{first.name}, {arm.name}"):
        return compare(first.counts, arm.counts, arm.count_of_all)


def list_differences(arm: Arm, first: Arm) -> dict[str, str]:
    """Settings in which an arm differs from the first one, as "VALUE, there VALUE OF THE FIRST"."""
    differences = compare_settings(arm.settings, first.settings)
    if arm.is_aligned != first.is_aligned:  # only one was aligned, so these have to differ
        for name in ("aligned_by", "align_unlike_paper", "grid"):
            differences.pop(name, None)
    return differences


def compare_settings(settings: Record, first: Record) -> dict[str, str]:
    """The settings that differ from the first arm's, as "VALUE, there VALUE OF THE FIRST".

    Seed, start and machine make no other arm, so they are left out.
    """
    differences = {}
    for name in sorted(settings):
        value = settings[name]
        if name not in NOT_COMPARED and value != first.get(name):
            differences[name] = f"{name_value(value)}, there {name_value(first.get(name))}"
    return differences


def name_value(value: object) -> str:
    """A setting as text.

    >>> name_value({"lam": 1.0, "rank": 2})
    'lam 1.0 and rank 2'
    """
    if isinstance(value, Mapping):
        words = [f"{name} {item}" for name, item in value.items()]
        return " and ".join(words) or "nothing"
    return str(value)


def tell_other_grid(arm: Arm, first: Arm) -> None:
    """Say where an aligned arm and one that is not chose from different learning rates."""
    grid = arm.settings["grid"]
    first_grid = first.settings["grid"]
    if arm.is_aligned != first.is_aligned and grid != first_grid:
        told = "%s chose its learning rate from %s, %s from %s"
        LOG.warning(told, arm.name, grid, first.name, first_grid)


# --- reading runs ---------------------------------------------------------------------------------


def read_arm(path: Path) -> Arm:
    """A finished `finetune` run, or the runs in a directory (UsageError: not those of one arm)."""
    with as_usage_error(str(path), "give a finished finetune run, or a folder of them"):
        runs = [read_run(run) for run in find_runs(path)]
    differing = set[str]()
    for run in runs:
        differing |= compare_settings(run.settings, runs[0].settings).keys()
    if differing:
        refuse(path, differing)
    return join_seeds(path, runs)


def refuse(path: Path, differing: set[str]) -> NoReturn:
    """Raise a UsageError: these settings differ between the runs of an arm."""
    see = ", ".join(sorted(differing))
    raise UsageError(f"{path}: its runs are no seeds of one arm, see {see}; give each alone")


def join_seeds(path: Path, runs: Sequence[Arm]) -> Arm:
    """Runs that differ in seed and start only, as one arm (UsageError: the same seed twice)."""
    first = runs[0]
    starts: list[tuple[str | None, int]] = []
    accuracies: list[float] = []
    counts: list[int] = []
    rates: list[float] = []
    for run in runs:
        starts += run.starts
        accuracies += run.accuracies
        counts += run.counts
        rates += run.rates
    if len(set(starts)) < len(starts):
        refuse(path, {"seed"})  # it would count one seed as two
    places = {place for place, _ in starts}
    # Where each seed has an align run of its own, the spread over seeds has that of aligning in it,
    # and the p-value is about both stages.
    each_has_its_own = len(starts) > 1 and len(places) == len(starts)
    aligned_each = each_has_its_own and not first.settings["restart"]
    return first.model_copy(
        update={
            "name": path.absolute().name,  # of the folder that one is in, too
            "unit": "align run and PEFT" if aligned_each else first.unit,
            "accuracies": accuracies,
            "counts": counts,
            "rates": rates,
            "starts": starts,
        }
    )


def find_runs(path: Path) -> list[Path]:
    """The run at a path, or the runs in that directory, s2 before s10."""
    if (path / "config.json").exists():
        return [path]
    runs = [file.parent for file in path.glob("*/config.json")]
    runs.sort(key=lambda run: (len(run.name), run.name))  # shorter names have smaller numbers
    return runs or [path]


def read_run(run: Path) -> Arm:
    """One finished `finetune` run; any exception where it is none."""
    file = run / "config.json"
    if not file.exists():
        raise UsageError(f"{run}: is no run; give a finished finetune run, or a folder of them")
    config = json.loads(file.read_text())
    if not (run / "result.json").exists():
        raise UsageError(f"{run}: is not finished; give its own command again")
    if not (run / "env.json").exists():
        raise UsageError(f"{run}: has lost its env.json; give its own command again, with --force")
    env = json.loads((run / "env.json").read_text())
    result = json.loads((run / "result.json").read_text())
    if not result.get("test"):
        raise UsageError(f"{run}: has no test accuracy, so it is no finetune run; give one")
    settings = {
        **config,
        "data_sha256": env["about"]["data_sha256"],
        "weights_sha256": env["about"]["weights_sha256"],
        "aligned_by": result["aligned_by"],
        "align_unlike_paper": result["align_unlike_paper"],
    }
    first_seed = config["seed"]
    counts = result["right"]
    count_of_all = result["test_images"]
    if counts is None:
        # mAP counts no images, and the exact test needs whole numbers: hundredths of a point.
        counts = [round(100 * percent) for percent in result["test"]]
        count_of_all = 100 * 100
    return Arm(
        name=run.name,
        data_set=describe_data_set(config),
        unit=result["unit"],
        metric=result["metric"],
        settings=settings,
        accuracies=result["test"],
        counts=counts,
        count_of_all=count_of_all,
        rates=[result["lr"]],
        test_images=result["test_images"],
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
OFFICIAL_ENDINGS = ("_full.pth", "IN1K-vit.h.14-300e.pth.tar")  # ends of the official files' names


def published(config: Record, result: Record) -> Reported | None:
    """The paper's accuracy for a run; None unless the run follows the paper, as far as we know."""
    if not follows_paper(config, result):
        return None
    # None where the run was aligned in a way that the paper has no table of
    method = METHODS.get(result["aligned_by"])
    row = (result["pretext"], result["backbone"], method)
    for source, rows in ACCURACIES.items():
        if row in rows and config["dataset"] in COLUMNS:
            figures = rows[row].split()
            mean, std = figures[COLUMNS.index(config["dataset"])].split("±")
            return Reported(mean=float(mean), std=float(std), source=source)
    return None


def follows_paper(config: Record, result: Record) -> bool:
    """Whether a run, and the align run before it, had the paper's settings, weights and data."""
    left_open = open_settings(FinetuneConfig)
    for name, value in paper_values(FinetuneConfig, config).items():
        if name not in left_open and config.get(name, value) != value:
            return False
    weights = config["weights"]
    if weights is not None and not weights.endswith(OFFICIAL_ENDINGS):
        return False
    if config["pretext"] != result["pretext"]:
        return False
    if result["aligned_on"] not in (None, config["dataset"]):  # None: not aligned
        return False
    return not result["align_unlike_paper"]
