"""Program: what runs end with, as their result.json has it, and what adapters say of themselves.

This module does without torch, so that `bisslight evaluate` starts at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field

from config import Record, read_table
from support.errors import as_read_error
from support.screen import count, draw_table, format_accuracies


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
    """What an adapter file says about how θ was trained. None: it does not say."""

    stage: Said = None  # the command: "align" or "finetune"
    backbone: Said = None  # such as "vit_b16"
    arch: Record = {}  # sizes of the backbone, see `config.Arch`
    weights_sha256: Said = None  # of the backbone's checkpoint
    network_sha256: Said = None  # of what a config.json says of it; None: it has none, or not known
    pretext: Said = None  # such as "mae"
    base: Said = None  # which of I-JEPA's two encoders, such as "target_encoder"
    rank: int | None = None
    alpha: float | None = None
    dataset: Said = None  # such as "cub200"
    data_seed: int | None = None
    data_sha256: Said = None  # of the labelled images, see `data.fingerprint`
    files_sha256: Said = None  # if a script handed over files: without the names of classes
    contents_sha256: Said = None  # of all that is in their files, see `data.digest_of_contents`
    channels: Sequence[tuple[float, ...]] | None = None  # mean, std of its images
    whole_images: bool = False  # whether images are scored without cutting their edges off
    in_memory: bool = False  # whether its images lay in memory; older adapters do not say so
    seed: int | None = None  # of the run
    versions: Said = None  # of this program and of torch
    # The labelled images that θ was trained or chosen on, also before this run, see
    # `support.adapters.name_images`. Result files leave them out.
    seen: frozenset[str] | None = Field(default=None, exclude=True)
    # Those of them that no run trained θ on: validation images, by which its epochs were chosen.
    # Older adapters do not say which these are.
    chosen: frozenset[str] | None = Field(default=None, exclude=True)
    seen_images: int | None = None  # how many images were seen
    # These are set by align alone.
    pool_sha256: Said = None  # of the unlabelled images
    pool_contents_sha256: Said = None  # of all that is in their files
    pretext_class: Said = None  # of a pretext task of one's own, such as "Rotation"
    pretext_sha256: Said = None  # of its file
    imports_sha256: Said = None  # of the files beside it that it imports; None: not known
    d_lr: float | None = None
    hypergrad: Said = None  # such as "mfac"
    # Settings that are not the paper's, by name. In older versions, finetune did not say its own.
    unlike_paper: Record = {}
    # These are set by finetune alone.
    lr: float | None = None
    # What the adapter that it started from says; AdapterInfo() if it started from a fresh θ. None:
    # it does not say what it started from.
    origin: "AdapterInfo | None" = None
    earlier_seeds: list[int] = []  # of the finetune runs that it came from, the first one first
    classes: list[str] = []
    several_classes: bool = False  # whether an image may be of several

    @property
    def trained(self) -> frozenset[str] | None:
        """The hashes of the images that θ was trained on, in any of its runs; None: not known."""
        if self.seen is None or self.chosen is None:
            return None
        return self.seen - self.chosen

    def seeds_of_runs(self) -> list[int]:
        """Return the seeds of the run and of all runs before it, the last one first.

        It is [] where a seed is not known, as for adapters of older versions.

        >>> aligned = AdapterInfo(stage="align", seed=1)
        >>> AdapterInfo(stage="finetune", seed=3, origin=aligned).seeds_of_runs()
        [3, 1]
        """
        if self.seed is None:
            return []
        if self.stage != "finetune":  # align starts from a fresh θ
            return [self.seed]
        if self.origin is None:
            return []
        if self.origin.stage is None:  # a fresh θ
            return [self.seed]
        seeds_before = self.origin.seeds_of_runs()
        return [self.seed, *seeds_before] if seeds_before else []

    def stages_before(self) -> "list[AdapterInfo]":
        """Return what is known of the runs that θ was trained in before this one, the last first.

        A fresh θ was trained in none, and that of align is one. If it is not known what the θ of a
        fine-tuning started from, the list has an AdapterInfo(), whose images are not known, either.

        >>> aligned = AdapterInfo(stage="align", dataset="folder:a")
        >>> tuned = AdapterInfo(stage="finetune", dataset="folder:b", origin=aligned)
        >>> [stage.dataset for stage in tuned.stages_before()]
        ['folder:a']
        >>> aligned.stages_before()
        []
        >>> AdapterInfo(stage="finetune").stages_before() == [AdapterInfo()]
        True
        """
        if self.origin is None:
            return [AdapterInfo()] if self.stage == "finetune" else []
        return [self.origin, *self.origin.stages_before()] if self.origin.stage else []

    def without_seeds(self) -> Self:
        """Return the same without the seeds of its run and of all runs before.

        What is left is what the seeds of an arm have in common.

        >>> info = AdapterInfo(seed=3, origin=AdapterInfo(seed=1))
        >>> info.without_seeds() == AdapterInfo(origin=AdapterInfo())
        True
        """
        origin = self.origin and self.origin.without_seeds()
        changes: Record = {"seed": None, "earlier_seeds": [], "origin": origin}
        return self.model_copy(update=changes)


def are_of_same_images(settings: Record, first: Record) -> bool:
    """Return whether two runs had the same images, labels and splits.

    Of files that a script has handed over, data_sha256 is also of the names of classes, which
    change no number; files_sha256 is not, as data_sha256 of a --dataset.

    >>> of_script = {"data_sha256": "2:named", "files_sha256": "2:files"}
    >>> are_of_same_images(of_script, {"data_sha256": "2:files", "files_sha256": None})
    True
    """
    contents, first_contents = settings.get("contents_sha256"), first.get("contents_sha256")
    if None not in (contents, first_contents) and contents != first_contents:
        return False  # files were replaced by others of as many bytes
    digest, first_digest = settings.get("data_sha256"), first.get("data_sha256")
    of_files = settings.get("files_sha256") or digest
    return digest == first_digest or of_files == (first.get("files_sha256") or first_digest)


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
    start_seeds: list[int] = []  # of the runs before it, see `AdapterInfo.seeds_of_runs`
    start_cpu_seconds: float | None  # of the runs before it, 0 without one; None: unknown
    # Of the adapter of the best epoch; None: the trial diverged, or is of an older version.
    adapter_sha256: Said = None
    cpu_seconds: float = Field(ge=0)
    seconds: float = Field(ge=0)
    bisslight: Said = None  # the version of this program
    torch: Said = None  # and that of torch

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
    versions: list[str] = []  # of this program and of torch, those of all trials
    start_cpu_seconds: float | None  # of all runs that the seeds start from, see `seconds_before`

    def __str__(self) -> str:
        """The mean and deviation of the test accuracy, and a table of the trials."""
        accuracies = format_accuracies([test.accuracy for test in self.tests])
        of_seeds = count(len(self.tests), "seed")
        if len(self.tests) > 1:
            of_seeds = f"mean ± standard deviation of {of_seeds}"
        about = f"rate {self.lr:g}; {of_seeds}"
        headline = f"{self.dataset}: test {self.metric} {accuracies} ({about})"
        losers = [trial for trial in self.tried if trial.lr != self.lr]
        rows = [trial.as_row() for trial in [*losers, *self.trials]]
        return f"{headline}\n\n{draw_table(rows)}\n\nin {self.out}"


def read_result(run: Path) -> FinetuneResult:
    """The result of a finished finetune run. Raises UsageError where it is missing or damaged."""
    file = run / "result.json"
    remedy = "give a finished finetune run, or a folder of them"
    with as_read_error(str(file), remedy):
        return FinetuneResult(**read_table(file), out=str(run))


def check_tests(tests: Sequence[Score], metric: Metric, images: int) -> None:
    """Raise ValueError if scores contradict themselves, as in a file that was edited.

    `images` is the number of test images.
    """
    for test in tests:
        if metric == "11-point mAP":
            if test.right is not None:
                raise ValueError("a test counts images that were right, which mAP does not")
        else:
            if test.right is None:
                raise ValueError("a test does not say how many images were right")
            if abs(100 * test.right / images - test.accuracy) > 1e-6:
                raise ValueError(f"{test.right} of {images} right are not {test.accuracy} %")


def unit_of(trials: Sequence[TrialResult], origin: AdapterInfo) -> str:
    """Return in words what is done anew for each seed: what p-values are about.

    `origin` is what the adapters say of themselves that trials start from; its stage is None for a
    fresh θ.
    """
    if origin.stage is None:
        return "PEFT"
    if len({trial.start_sha256 for trial in trials}) == 1:
        return "PEFT from one adapter"
    # Go back to the last run before the trials that has another seed for each of them. Fine-tunings
    # in between that all have one seed, such as --seed 0 with each align run, are not done anew.
    anew = origin
    runs_between = 0
    for seeds in zip(*(trial.start_seeds for trial in trials), strict=False):  # [] if not known
        if len({*seeds}) > 1 or anew.origin is None:
            break
        anew = anew.origin
        runs_between += 1
    before = "align run" if anew.stage == "align" else "PEFT"
    after = "PEFT" if before == "align run" else "PEFT anew"
    behind = ""  # the align runs behind fine-tunings, where these are fewer than the trials
    aligned = count_align_runs(trials, origin)
    if before == "PEFT" and aligned == len(trials):
        before = "align run, PEFT"
    elif before == "PEFT" and aligned:
        behind = ", on one align run" if aligned == 1 else f", on {aligned} align runs"
    if len({trial.seed for trial in trials}) == 1:
        before = before.replace(",", " and")
        each = "each " if runs_between else ""
        return f"{before}, with one seed of {each}PEFT after it{behind}"
    if runs_between:
        return f"{before} and last PEFT, with one seed of PEFT between them{behind}"
    return f"{before} and {after}{behind}"


def count_align_runs(trials: Sequence[TrialResult], origin: AdapterInfo) -> int | None:
    """Return from how many align runs trials come, by their seeds; None where none is known.

    `origin` as in `unit_of`.
    """
    first = origin
    runs = 1  # from the last run before the trials to the first one
    while first.origin is not None and first.origin.stage is not None:
        first = first.origin
        runs += 1
    if first.stage != "align" or any(len(trial.start_seeds) != runs for trial in trials):
        return None
    return len({trial.start_seeds[-1] for trial in trials})


def seconds_before(trials: Sequence[TrialResult]) -> float | None:
    """Return the CPU seconds of the runs that trials start from, each counted once.

    Returns None where those of a run are unknown.
    """
    # By the digest of the adapter that a run has made: several trials may start from one.
    by_start = {trial.start_sha256: trial.start_cpu_seconds for trial in trials}
    known = [seconds for seconds in by_start.values() if seconds is not None]
    return sum(known) if len(known) == len(by_start) else None
