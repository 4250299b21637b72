"""Program: what runs end with, as their result.json has it, and what adapters say of themselves.

This module does without torch, so that `bisslight evaluate` starts at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field

from config import Record
from support.errors import as_read_error
from support.screen import count, draw_table, format_accuracies
from support.settings_files import read_table


class Score(BaseModel, frozen=True):
    """How good a model is on a split, such as the test images."""

    # In percent: top-1, or mAP where an image has several classes.
    accuracy: float = Field(ge=0, le=100)
    loss: float  # mean over the images
    per_class: float | None = None  # percent: mean of the accuracies in each class; None with mAP
    right: int | None = None  # how many images were right; None with mAP

    @property
    def count(self) -> int:
        """Return what arms are compared by: how many images were right, or mAP in 0.01 points."""
        return round(100 * self.accuracy) if self.right is None else self.right


Said = str | None  # what a file says; None: it does not
Metric = Literal["top-1 accuracy", "11-point mAP"]  # the second where images have several classes


class AdapterInfo(BaseModel, frozen=True):
    """What an adapter file says about how θ was trained; AdapterInfo() is a fresh θ's."""

    stage: Said = None  # the command: "align" or "finetune"; None: θ is fresh
    # Of the run that has made it, see `support.definitions`: settings, digests and versions.
    definition: Record = {}
    # What the adapter that finetune started from says; AdapterInfo() if it started from a fresh θ.
    # None after align, which starts from no adapter.
    origin: "AdapterInfo | None" = None
    # The rest, of the same run, is what other modules read of it by name.
    arch: Record = {}  # sizes of the backbone, see `config.Arch`
    weights_sha256: Said = None  # of the backbone's checkpoint
    # Digests of the labelled data of this run and of all runs before it, see
    # `support.looking.digest_of_task`; also of runs whose θ is merged into the weights.
    trained_on: list[str] = []
    channels: Sequence[tuple[float, ...]] | None = None  # mean, std of its images
    whole_images: bool = False  # whether images are scored without cutting their edges off
    in_memory: bool = False  # whether its images lay in memory
    seed: int | None = None  # of the run
    classes: list[str] = []  # of finetune, which has a head
    several_classes: bool = False  # whether an image may be of several

    @property
    def stages(self) -> "list[AdapterInfo]":
        """What is known of the run and of all runs before it, the last one first; of a fresh θ [].

        >>> aligned = AdapterInfo(stage="align", seed=1)
        >>> [one.stage for one in AdapterInfo(stage="finetune", origin=aligned).stages]
        ['finetune', 'align']
        """
        if self.stage is None:
            return []
        return [self, *(self.origin.stages if self.origin else [])]

    @property
    def chain(self) -> list[Record]:
        """The definitions of the runs in `stages`."""
        # An adapter of finetune has the definition of its trial, whose command is "finetune trial".
        return [one.definition | {"command": one.stage} for one in self.stages]

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs in `stages`."""
        return [one.seed for one in self.stages if one.seed is not None]


class RunResult(BaseModel, frozen=True):
    """What the result of every finished run has."""

    out: str  # the run's directory
    # CPU time of the run, with that before a stop; of finetune, of all trials
    cpu_seconds: float = Field(ge=0)
    seconds: float = Field(ge=0)  # the same by the clock


class TrialResult(BaseModel, frozen=True):
    """What one rate with one seed ended with: the result.json of its run."""

    lr: float
    seed: int
    val: Score | None  # validation of the best epoch; None: the trial diverged
    epoch: int | None = None  # number of the best epoch, from 1
    diverged: str | None = None  # where and how
    start_sha256: str | None  # of the adapter that it starts from; None: a fresh θ
    start_seeds: list[int] = []  # of the runs before it, see `AdapterInfo.seeds`
    start_cpu_seconds: float | None  # of the runs before it, 0 without one; None: unknown
    versions: Said = None  # of this program and of torch
    cpu_seconds: float = Field(ge=0)
    seconds: float = Field(ge=0)

    @property
    def name(self) -> str:
        """Its directory below that of the finetune run, such as "lr0.001-s0"."""
        return f"lr{self.lr}-s{self.seed}"

    def as_row(self) -> Record:
        """A row of the printed table."""
        val = format_accuracies([self.val.accuracy]) if self.val else "diverged"
        return {"rate": self.lr, "seed": self.seed, "best epoch": self.epoch, "validation": val}


class FinetuneResult(RunResult, frozen=True):
    """What a finetune run ended with: its result.json. Lists have one entry per seed."""

    metric: Metric
    dataset: Said = None  # where its images were, such as "cub200"
    origin: AdapterInfo  # what the adapter of --from says of itself
    rates: list[float]  # --lr
    grid_seeds: int
    lr: float  # the chosen one of the rates
    tried: list[TrialResult]  # the trials that chose it; [] with a single rate
    trials: Annotated[list[TrialResult], Field(min_length=1)]  # those of the chosen rate
    tests: Annotated[list[Score], Field(min_length=1)]  # each trial's best epoch, tested once
    by_class: dict[str, list[float]] = {}  # percent of each class's test images that were right
    start_cpu_seconds: float | None  # of all runs that the seeds start from, see `seconds_before`

    def __str__(self) -> str:
        """The mean and deviation of the test accuracy, and a table of the trials."""
        accuracies = format_accuracies([test.accuracy for test in self.tests])
        of_seeds = count(len(self.tests), "seed")
        if len(self.tests) > 1:
            of_seeds = f"mean ± standard deviation of {of_seeds}"
        about = f"rate {self.lr:g}; {of_seeds}"
        headline = f"{self.dataset}: test {self.metric} {accuracies} ({about})"
        # `trials` has all of the chosen rate, of which `tried` has some, too.
        of_other_rates = [trial for trial in self.tried if trial.lr != self.lr]
        rows = [trial.as_row() for trial in [*of_other_rates, *self.trials]]
        return f"{headline}\n\n{draw_table(rows)}\n\nin {self.out}"


def read_result(run: Path) -> FinetuneResult:
    """Read the result of a finetune run. Raises UsageError where it is missing or damaged."""
    file = run / "result.json"
    remedy = "give a finished finetune run, or a folder of them"
    with as_read_error(str(file), remedy):
        # The file does not say `out`, since the run may be moved.
        return FinetuneResult(**read_table(file), out=str(run))


class Repeats(NamedTuple):
    """How often a command was run for the seeds of an arm."""

    command: str
    runs: int
    seeds: int  # how many different ones these runs have

    def __str__(self) -> str:
        """Such as "2 x finetune (2 seeds)"."""
        return f"{self.runs} x {self.command} ({count(self.seeds, 'seed')})"


def count_runs(trials: Sequence[TrialResult], commands: Sequence[str]) -> list[Repeats]:
    """Return how often each command was run, which is what a p-value is about.

    `commands` are those of the trials and of the runs before them, in the order in which they were
    run.

    >>> said = {"lr": 0.1, "val": None, "start_cpu_seconds": 0, "cpu_seconds": 0, "seconds": 0}
    >>> trials = [TrialResult(seed=k, start_sha256="a", start_seeds=[7], **said) for k in (0, 1)]
    >>> print(*count_runs(trials, ["align", "finetune"]), sep=", ")
    1 x align (1 seed), 2 x finetune (2 seeds)
    """
    chains = [(trial.seed, *trial.start_seeds) for trial in trials]  # the last run first
    repeats = []
    for k, command in enumerate(reversed(commands)):
        # Runs with the same seed, and with the same seeds before them, are one run: those of an arm
        # differ in nothing else.
        runs = {chain[k:] for chain in chains}
        # Where a trial does not say the seeds of the runs before, its chain is shorter.
        seeds = {chain[k] for chain in chains if len(chain) > k}
        repeats.append(Repeats(command, len(runs), len(seeds)))
    return repeats[::-1]


def seconds_before(trials: Sequence[TrialResult]) -> float | None:
    """Return the CPU seconds of the runs that trials start from, each counted once.

    Returns None where the seconds of a run are unknown.
    """
    # By the digest of the adapter that they start from: several trials may start from one. Without
    # one it is None, and the seconds are 0.
    by_start = {trial.start_sha256: trial.start_cpu_seconds for trial in trials}
    known = [seconds for seconds in by_start.values() if seconds is not None]
    return sum(known) if len(known) == len(by_start) else None
