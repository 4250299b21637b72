"""Program: `bisslight evaluate`: test accuracies over seeds, p-values, and the paper's figures.

An arm is what is compared: a finished `finetune` run, or a directory of such runs that differ in
seed and start only, such as one PEFT seed for each align run. The first arm is compared with every
other one by an exact permutation test (App. C.2.1). All arms are on one data set.
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
    find_runs,
    paper_values,
    settings_not_compared_with_paper,
    settings_with,
)
from support.errors import UsageError, as_read_error, as_usage_error
from support.permutation import Comparison as Comparison  # scripts import both from here, too
from support.permutation import compare as compare
from support.screen import Answer, format_accuracies, format_count, format_value

LOG = logging.getLogger("bisslight")

# Settings in which two runs of one arm may differ: seeds, how many there are, and the machine.
# Weights and start are compared by the digest of their content, not by their path.
MAY_DIFFER_IN_ARM = (Mark.SAME_ARM, Mark.CHANGES_NO_NUMBER, Mark.KNOWN_BY_DIGEST)
NOT_COMPARED = {
    *settings_with(AlignConfig, *MAY_DIFFER_IN_ARM),
    *settings_with(FinetuneConfig, *MAY_DIFFER_IN_ARM),
}

# What the seeds of an arm start from, by its `unit`, which is what one seed repeats. The unit
# "PEFT seed" is not here: such seeds start from the pretrained backbone.
STARTS = {
    "PEFT and PEFT anew": "the seeds of a finished fine-tuning, one each",
    "PEFT seed on one LoRA file": "one LoRA file, so they repeat the fine-tuning alone",
    "PEFT seed on one align run": "one align run, so they repeat the fine-tuning alone",
    "align run and PEFT": "an align run each, so they repeat both steps",
}

# --- the table of arms ----------------------------------------------------------------------------


class Reported(BaseModel, frozen=True):
    """An accuracy that the paper reports: mean and standard deviation over 8 seeds."""

    mean: float  # percent
    std: float
    source: str  # the LaTeX label of the table, such as "tab:mae_bisslight_main_results"


class Interval(NamedTuple):
    """The ends of a 95 % interval, in percent."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width: 1.5 points for an interval from 70 to 73 %."""
        return (self.high - self.low) / 2


class Row(BaseModel, frozen=True):
    """An arm in the table that `evaluate` returns. JSON has the fields up to `first_minus_this`."""

    arm: str  # its name: that of its directory
    seeds: int  # how many
    unit: str  # what one seed repeats, such as "PEFT seed"
    mean: float  # percent
    std: float | None  # sample standard deviation (n − 1); None for a single seed
    metric: str  # "top-1 accuracy" or "11-point mAP"
    paper: Reported | None  # the paper's accuracy of such a run; None if it has no such run
    differs: dict[str, str]  # from the first arm; see `list_differences`
    accuracies: list[float]  # one per seed, in percent
    counts: list[int]  # one per seed: images that were right, or hundredths of a point of mAP
    first_minus_this: Comparison | None  # None for the first arm itself
    rates: list[float] = Field([], exclude=True)  # the learning rates that were chosen, each once
    test_images: int = Field(0, exclude=True)  # how many
    data_set: str = Field("", exclude=True)  # such as "omniglot:Greek, data seed 2"

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the mean that follows from the number of test images.

        It is None for mAP, which is no share of the images, and for a row that was read from JSON.
        """
        if self.metric != "top-1 accuracy" or not self.test_images:  # JSON lacks their number
            return None
        return interval_by_images(self.mean, self.test_images)


class Evaluation(BaseModel, frozen=True):
    """The result of `evaluate`: a row for each arm, the first one first."""

    arms: list[Row]

    def in_words(self) -> Answer:
        """Return what is printed: the differences of the arms, a table of all, then remarks.

        The headline has a line for each arm after the first, such as "a minus b: +1.2 points, p =
        0.030: chance hardly explains it". With one arm alone, it is the accuracy of that arm.
        """
        first = self.arms[0]
        differences: list[str] = []  # lines of the headline
        remarks: list[str] = []  # lines below the table
        for row in self.arms:
            if row.first_minus_this:  # None for the first arm itself
                difference = describe_comparison(row.first_minus_this)
                differences.append(f"{first.arm} minus {row.arm}: {difference}")
            remarks += list_remarks(row)

        seeds = format_count(first.seeds, "seed")  # such as "8 seeds"
        accuracy_of_first = f"test {first.metric} {format_accuracies(first.accuracies)} ({seeds})"
        return Answer(
            headline="\n".join(differences) or accuracy_of_first,
            rows=[describe_row(row, first.arm) for row in self.arms],
            lines=remarks,
        )


def interval_by_images(accuracy: float, images: int) -> Interval:
    """Return Wilson's 95 % interval of an accuracy (in percent) that was measured on some images.

    It says how far this accuracy may be from that on unlimited images of the same kind, for one
    network. Seeds share the test images, so more seeds do not make it narrower. For a share s of
    n images that are right, Wilson's interval is

        (s + z²/2n ± z √(s (1 − s)/n + (z/2n)²)) / (1 + z²/n).

    >>> low, high = interval_by_images(50.0, 35)
    >>> round(low, 1), round(high, 1)
    (34.3, 65.7)
    """
    z = NormalDist().inv_cdf(0.975)  # 1.96: 2.5 % of a normal distribution lie above it
    share = accuracy / 100  # s
    centre = (share + z**2 / (2 * images)) / (1 + z**2 / images)
    variance = share * (1 - share) / images + (z / (2 * images)) ** 2  # what is below the root
    half_width = z * math.sqrt(variance) / (1 + z**2 / images)
    return Interval(low=100 * (centre - half_width), high=100 * (centre + half_width))


def list_remarks(row: Row) -> list[str]:
    """Return the lines about an arm that stand below the table; there may be none.

    They say that the test images are few, what the seeds start from, and which settings differ.
    """
    remarks = describe_few_images(row)  # one line, or none
    if row.unit in STARTS:
        remarks.append(f"the seeds of {row.arm} start from {STARTS[row.unit]}")
    if row.differs:  # such as {"rank": "8, there 64"}
        remarks.append(f"{row.arm} differs: {format_value(row.differs)}")
    return remarks


def describe_few_images(row: Row) -> list[str]:
    """Warn in one line if the test images are too few for a difference as small as this row's.

    Returns [] if the difference of means is larger than half of the row's interval by images, and
    if the row has no difference or no interval.
    """
    comparison = row.first_minus_this  # None for the first arm
    if comparison is None or row.interval is None:
        return []
    if row.interval.half_width < abs(comparison.difference):  # both in percentage points
        return []
    return [
        f"{format_count(row.test_images, 'test image')} tell an accuracy to within "
        f"{row.interval.half_width:.0f} points: p is about other seeds, not about other images"
    ]


def describe_row(row: Row, first_name: str) -> Record:
    """Return the line of an arm in the printed table, by column.

    `first_name` is that of the first arm, with which this one is compared. Such a line is

        {"arm": "direct", "seeds": 8, "rate": [0.001], "test images": 3669,
         "test top-1 accuracy": "91.7 ± 0.3 %", "95 % by images": "90.8 to 92.6",
         "cub minus this": "+0.4", "p": "0.010", "the paper": "91.7 ± 0.3 % (tab:...)"}

    where columns that an arm has no value for are absent.
    """
    line: Record = {
        "arm": row.arm,
        "seeds": row.seeds,
        "rate": row.rates,
        "test images": row.test_images,
        f"test {row.metric}": format_accuracies(row.accuracies),
    }
    if row.interval:  # None for mAP
        line["95 % by images"] = f"{row.interval.low:.1f} to {row.interval.high:.1f}"

    comparison = row.first_minus_this  # None for the first arm itself
    if comparison:
        line[f"{first_name} minus this"] = format_difference(comparison)
        line["p"] = "none" if comparison.p is None else f"{comparison.p:#.2g}"

    if row.paper:  # None if the paper has no such run
        line["the paper"] = f"{row.paper.mean} ± {row.paper.std} % ({row.paper.source})"
    return line


def describe_comparison(comparison: Comparison) -> str:
    """Say a difference in words, with what its p-value means.

    >>> describe_comparison(Comparison(difference=1.24, p=0.03, splits=70))
    '+1.2 points, p = 0.030: chance hardly explains it'
    """
    difference = f"{format_difference(comparison)} points"
    if comparison.p is None:
        return f"{difference}; one seed each allows no test"
    if comparison.p < 0.05:
        meaning = "chance hardly explains it"
    # p * splits counts the ways to split the seeds in two that differ at least as much as the arms.
    # Always among them: the arms as they are, and exchanged, if they have as many seeds.
    elif comparison.p * comparison.splits <= 2:
        meaning = "the smallest p that so few seeds can have"
    else:
        meaning = "chance may explain it"
    return f"{difference}, p = {comparison.p:#.2g}: {meaning}"


def format_difference(comparison: Comparison) -> str:
    """Return a difference in percentage points as text with its sign, such as "+1.2"."""
    rounded = round(comparison.difference, 1) + 0.0  # adding 0.0 turns -0.0 into 0.0
    return f"{rounded:+.1f}"


class Arm(BaseModel, frozen=True):
    """An arm as its run directories describe it. Fields that `Row` has, too, are explained there.

    A single run is read as an arm, and `join_seeds` makes one arm of several.
    """

    name: str
    data_set: str
    unit: str
    metric: str
    settings: Record  # those of its runs, and what `read_run` adds, such as "data_sha256"
    accuracies: list[float]
    counts: list[int]
    count_of_all: int  # the count of a network that is always right
    rates: list[float]  # one per run: the chosen learning rate
    test_images: int
    starts: list[tuple[str | None, int]]  # one per seed: its --from, or None; the seed
    paper: Reported | None

    @property
    def is_aligned(self) -> bool:
        """Whether fine-tuning started from an align run."""
        return self.settings["aligned_by"] is not None


def evaluate(runs: Sequence[Path]) -> Evaluation:
    """Compare the first of several arms with each of the others.

    1. Read each path: a finished `finetune` run, or a directory of such runs, is one arm.
    2. If two arms have the same name, call all of them by their paths.
    3. Refuse an arm whose images are not those of the first one.
    4. Make a row for each arm, the first one first.

    Raises UsageError where a path is no arm, and where images differ.
    """
    arms = [read_arm(run) for run in runs]

    names = {arm.name for arm in arms}
    if len(names) < len(arms):  # such as "tuned" twice, for a/tuned and b/tuned
        arms_with_paths = zip(arms, runs, strict=True)
        arms = [arm.model_copy(update={"name": str(run)}) for arm, run in arms_with_paths]

    first, *others = arms
    for arm in others:
        refuse_other_images(arm, first)
        log_other_grid(arm, first)  # only a warning

    return Evaluation(arms=[make_row(arm, first) for arm in arms])


def refuse_other_images(arm: Arm, first: Arm) -> None:
    """Raise a UsageError where the images or the split of an arm are not those of the first one."""
    if arm.settings["data_sha256"] != first.settings["data_sha256"]:
        raise UsageError(
            f"{arm.name}: not comparable, is on {arm.data_set}, {first.name} on "
            f"{first.data_set}, or they have other images or another split"
        )


def make_row(arm: Arm, first: Arm) -> Row:
    """Make the table row of an arm: its mean over seeds, and its comparison with the first arm."""
    return Row(
        arm=arm.name,
        seeds=len(arm.accuracies),
        unit=arm.unit,
        mean=fmean(arm.accuracies),
        std=stdev(arm.accuracies) if len(arm.accuracies) > 1 else None,
        metric=arm.metric,
        paper=arm.paper,
        differs=list_differences(arm, first),  # such as {"rank": "8, there 64"}
        accuracies=arm.accuracies,
        counts=arm.counts,
        first_minus_this=None if arm is first else compare_arms(first, arm),
        rates=sorted(set(arm.rates)),  # each once
        test_images=arm.test_images,
        data_set=arm.data_set,
    )


def compare_arms(first: Arm, arm: Arm) -> Comparison:
    """Return the mean of the first arm minus that of this one, in percentage points, with its p.

    Raises UsageError where a result.json has counts of right images that are no whole numbers.
    """
    with as_usage_error(f"{first.name}, {arm.name}"):
        # With mAP, a count is a number of hundredths of a point, see `read_run`.
        return compare(first.counts, against=arm.counts, images=arm.count_of_all)


def list_differences(arm: Arm, first: Arm) -> dict[str, str]:
    """Return the settings in which an arm differs from the first: {"rank": "8, there 64"}.

    Where only one of them was aligned, what differs for this reason is left out. `log_other_grid`
    tells of their grids.
    """
    differences = compare_settings(arm.settings, first=first.settings)
    only_one_is_aligned = arm.is_aligned != first.is_aligned
    if only_one_is_aligned:
        # The first two are facts of the align run, which `read_run` adds to the settings. After
        # align, the default grid of learning rates is lower.
        for name in ("aligned_by", "align_unlike_paper", "grid"):
            differences.pop(name, None)
    return differences


def compare_settings(settings: Record, first: Record) -> dict[str, str]:
    """Return the settings that differ from those of the first arm, with both values.

    Settings in which runs of one arm may differ, such as the seed, are left out.

    >>> compare_settings({"rank": 8, "lam": 0.1, "seed": 1}, {"rank": 64, "lam": 0.1, "seed": 0})
    {'rank': '8, there 64'}
    """
    differences = {}
    for name in sorted({*settings, *first}):
        here = settings.get(name)
        there = first.get(name)
        if name not in NOT_COMPARED and here != there:
            differences[name] = f"{format_setting(here)}, there {format_setting(there)}"
    return differences


def format_setting(value: object) -> str:
    """Return the value of a setting as text; `align_unlike_paper` is a dict of settings.

    >>> format_setting({"lam": 1.0, "rank": 2}), format_setting({}), format_setting(None)
    ('lam 1.0 and rank 2', 'nothing', 'None')
    """
    if isinstance(value, Mapping):
        words = [f"{name} {item}" for name, item in value.items()]
        return " and ".join(words) or "nothing"
    return str(value)


def log_other_grid(arm: Arm, first: Arm) -> None:
    """Log a warning where only one arm was aligned, and they chose from different rates."""
    grid = arm.settings["grid"]  # learning rates, such as [0.0001, 0.001]
    first_grid = first.settings["grid"]
    only_one_is_aligned = arm.is_aligned != first.is_aligned
    if only_one_is_aligned and grid != first_grid:
        text = "%s chose its learning rate from %s, %s from %s"
        LOG.warning(text, arm.name, grid, first.name, first_grid)


# --- reading runs ---------------------------------------------------------------------------------


def read_arm(path: Path) -> Arm:
    """Read a finished `finetune` run, or all runs in a directory, as one arm.

    Raises UsageError where there is no finished run, and where the runs differ in more than seed
    and start.
    """
    remedy = "give a finished finetune run, or a folder of them"
    with as_read_error(str(path), remedy):
        runs = [read_run(run) for run in find_runs(path)]  # an `Arm` each

    differing = set[str]()  # names of settings, such as "rank"
    for run in runs:
        differing |= compare_settings(run.settings, first=runs[0].settings).keys()
    if differing:
        refuse_as_arm(path, differing)
    return join_seeds(path, runs)


def refuse_as_arm(path: Path, differing: set[str]) -> NoReturn:
    """Raise a UsageError, because these settings differ between the runs in a directory."""
    names = ", ".join(sorted(differing))
    raise UsageError(f"{path}: its runs are no seeds of one arm, see {names}; give each alone")


def join_seeds(path: Path, runs: Sequence[Arm]) -> Arm:
    """Join runs that differ in seed and start only into one arm, called after its directory.

    1. Put the seeds of all runs into one list of each kind, such as accuracies.
    2. Refuse seeds that occur twice.
    3. Find out what one seed repeats: fine-tuning alone, or aligning, too.
    4. Return the arm of the first run, with these values instead of its own.

    Raises UsageError where two runs have the same seed and start.
    """
    first = runs[0]
    starts: list[tuple[str | None, int]] = []  # such as [("runs/a", 0), ("runs/a", 1)]
    accuracies: list[float] = []  # one per seed, as are the counts
    counts: list[int] = []
    rates: list[float] = []  # one per run
    for run in runs:
        starts += run.starts
        accuracies += run.accuracies
        counts += run.counts
        rates += run.rates

    if len(set(starts)) < len(starts):
        refuse_as_arm(path, {"seed"})  # one seed would count as two

    return first.model_copy(
        update={
            "name": path.absolute().name,  # absolute, since the path "." has no name
            "unit": unit_of_seeds(starts, first),
            "accuracies": accuracies,
            "counts": counts,
            "rates": rates,
            "starts": starts,
        }
    )


def unit_of_seeds(starts: Sequence[tuple[str | None, int]], first: Arm) -> str:
    """Return what one seed of several runs repeats, such as "PEFT seed".

    If each seed was given a start of its own by --from, seeds repeat aligning, too. The runs do not
    know of each other, so each says of itself "PEFT seed on one align run". In all other cases, the
    first run says what holds for all; so it does after --restart, where starts are finetune runs.
    """
    start_paths = {path for path, _ in starts}
    each_has_its_own_start = len(starts) > 1 and len(start_paths) == len(starts)
    if each_has_its_own_start and not first.settings["restart"]:
        return "align run and PEFT"
    return first.unit


def read_run(run: Path) -> Arm:
    """Read one finished `finetune` run as an arm, from three files in its directory.

    1. Read the files, and refuse a run without a test accuracy: an align run has none.
    2. Collect the settings, and what else runs of one arm have in common.
    3. Find a whole number for each seed, which the exact test needs: images that were right.
    4. Make the arm of these.

    Raises UsageError for files that are missing, and any exception for damaged ones.
    """
    check_files(run)
    config = json.loads((run / "config.json").read_text())  # settings by name: {"rank": 64, ...}
    env = json.loads((run / "env.json").read_text())  # {"about": {"data_sha256": "3f...", ...}}
    result = json.loads((run / "result.json").read_text())  # fields of `finetune.FinetuneResult`
    if not result.get("test"):
        raise UsageError(f"{run}: has no test accuracy, so it is no finetune run; give one")

    settings = {
        **config,
        "data_sha256": env["about"]["data_sha256"],
        "weights_sha256": env["about"]["weights_sha256"],
        "aligned_by": result["aligned_by"],  # such as "mfac"; None: not aligned
        "align_unlike_paper": result["align_unlike_paper"],  # such as {"rank": 8}; None
    }

    accuracies = result["test"]  # one per seed, in percent
    counts = result["right"]  # one per seed: images that were right
    count_of_all = result["test_images"]  # how many
    if counts is None:
        # mAP counts no images. Its hundredths of a point are whole numbers, up to 100 * 100.
        counts = [round(100 * accuracy) for accuracy in accuracies]
        count_of_all = 100 * 100

    seeds = range(config["seed"], config["seed"] + len(accuracies))
    return Arm(
        name=run.name,
        data_set=describe_data_set(config),
        unit=result["unit"],
        metric=result["metric"],
        settings=settings,
        accuracies=accuracies,
        counts=counts,
        count_of_all=count_of_all,
        rates=[result["lr"]],
        test_images=result["test_images"],
        starts=[(config["start"], seed) for seed in seeds],
        paper=find_in_paper(config, result),
    )


def check_files(run: Path) -> None:
    """Raise a UsageError where a file of a finished run is missing."""
    if not (run / "config.json").exists():
        raise UsageError(f"{run}: is no run; give a finished finetune run, or a folder of them")
    if not (run / "result.json").exists():
        raise UsageError(f"{run}: is not finished; give its own command again")
    if not (run / "env.json").exists():
        raise UsageError(f"{run}: has lost its env.json; give its own command again, with --force")


def describe_data_set(config: Record) -> str:
    """Name the data set of a run, with the split where that is not the usual one.

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

# Test accuracies in percent (VOC07: mAP), mean ± deviation over 8 seeds, one per data set. They
# stand below the LaTeX label of their table, by pretext task, backbone and method; after BiSSL and
# BiSSLight comes PEFT. Rows of tab:classificaiton_acc_bissl_orig that are not here repeat the first
# table.
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
# What the tables call a run, by the hypergradient of the align run before it; None: not aligned.
METHODS = {None: "PEFT", "mfac": "BiSSLight", "recursion": "BiSSLight", "cg": "BiSSL"}
OFFICIAL_ENDINGS = ("_full.pth", "IN1K-vit.h.14-300e.pth.tar")  # ends of the official files' names


def find_in_paper(config: Record, result: Record) -> Reported | None:
    """Find the paper's accuracy for a run, from the run's config.json and result.json.

    `config` has the settings by name, and `result` has the fields of `finetune.FinetuneResult`.
    Returns None where the run differs from the paper, and where no table has such a run.
    """
    if not follows_paper(config, result):
        return None
    if config["dataset"] not in COLUMNS or result["aligned_by"] not in METHODS:
        return None

    method = METHODS[result["aligned_by"]]
    row = (result["pretext"], result["backbone"], method)  # such as ("mae", "vit_b16", "PEFT")
    column = COLUMNS.index(config["dataset"])  # such as 0 for pets
    for label, rows in ACCURACIES.items():
        if row in rows:
            figures = rows[row].split()  # such as ["91.7±0.3", "69.9±0.5", ...]
            mean, std = figures[column].split("±")  # such as "91.7", "0.3"
            return Reported(mean=float(mean), std=float(std), source=label)
    return None


def follows_paper(config: Record, result: Record) -> bool:
    """Say whether a run, and the align run before it, had the paper's settings, weights and data.

    Weights are known by the name of their file only. The arguments are those of `find_in_paper`.
    """
    not_compared = settings_not_compared_with_paper(FinetuneConfig)  # such as {"seed", "lr", ...}
    for name, value_of_paper in paper_values(FinetuneConfig, config).items():
        # A run of an older version may lack a setting; it counts as the paper's value.
        differs = config.get(name, value_of_paper) != value_of_paper
        if differs and name not in not_compared:
            return False

    weights = config["weights"]  # a path; None: the official file was downloaded
    has_official_weights = weights is None or weights.endswith(OFFICIAL_ENDINGS)
    if not has_official_weights:
        return False

    # The pretext task in the result is that of the align run.
    if config["pretext"] != result["pretext"]:
        return False
    if result["aligned_on"] not in (None, config["dataset"]):  # None: no align run, or unknown
        return False
    return not result["align_unlike_paper"]  # None or {}: no setting of the align run differs
