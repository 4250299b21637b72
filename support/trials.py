"""Program: the directory of a finetune run: what its trials have in common, and which there are.

OUT/config.json         what all trials have in common
OUT/lr0.001-s0          a trial: the run of one rate with one seed
OUT/result.json         once all that was asked for is there
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from config import FinetuneConfig, Record
from support.definitions import say
from support.errors import UsageError
from support.experiment import Experiment
from support.files import locked, read_json, write_atomic
from support.processes import process_0_says, wait_for_all
from support.results import TrialResult, read_result
from support.runs import ALL_TRIALS, LOG, REMEDY, T, Track, check_directory, check_one_run
from support.runs import define as define_run
from support.starts import Start

Tuning = Experiment[FinetuneConfig]  # what all trials share
GRID = {"lr", "seeds", "grid_seeds"}  # settings that say which trials there are


class Trial(NamedTuple):
    """One rate with one seed, as it is planned."""

    cfg: FinetuneConfig  # the settings with this rate and seed
    start: Start  # what the seed starts from
    place: Path  # its run directory, below that of the finetune run

    @property
    def label(self) -> str:
        """Its name on the screen, such as "lr 0.001 seed 0"."""
        return f"lr {self.cfg.rate:g} seed {self.cfg.seed}"

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, also by diverging."""
        return (self.place / "result.json").exists()


def plan_trial(
    cfg: FinetuneConfig, starts: Sequence[Start], out: Path, rate: float, k: int
) -> Trial:
    """Return the trial of a rate with the seed of number `k`, which counts from 0.

    `starts` has what each seed starts from.
    """
    seed = cfg.seed + k
    of_trial = {"lr": (rate,), "seed": seed, "start": starts[k].file}
    settings = cfg.model_copy(update=of_trial | {"seeds": 1, "grid_seeds": 1})
    return Trial(settings, starts[k], out / f"lr{rate}-s{seed}")


def count_grid_seeds(cfg: FinetuneConfig) -> int:
    """Return how many of the seeds try every rate; 0 if there is one rate alone."""
    return cfg.grid_seeds if len(cfg.lr) > 1 else 0


def count_trials(cfg: FinetuneConfig) -> int:
    """Return how many trials a run has: each is one rate with one seed.

    Several rates are tried with the first seeds (--grid-seeds), then the best one gets the others.

    >>> count_trials(FinetuneConfig(backbone="vit_b16", dataset="dtd", lr="1e-3,1e-2", seeds=8))
    9
    """
    grid_seeds = count_grid_seeds(cfg)
    return len(cfg.lr) * grid_seeds + cfg.seeds - grid_seeds


def define(experiment: Tuning, start: Start) -> Record:
    """Return the definition of a finetune run: what all its trials have in common.

    Later commands may add rates and seeds, so these are not in it. `start` is that of the first
    seed; each trial's config.json has the digest of the adapter that it starts from.
    """
    digests = experiment.digests | {"start_sha256": start.sha256}
    whole = define_run("finetune", experiment.cfg, digests)
    return {name: value for name, value in whole.items() if name not in GRID}


def begin(out: Path, experiment: Tuning, start: Start) -> None:
    """Make the directory and its config.json, if they are not there yet.

    Raises UsageError where the directory is that of another run, or of something else, and where
    the processes of a group were given different runs.
    """
    definition = define(experiment, start)
    grid = experiment.cfg.model_dump(mode="json", include=GRID)
    # The processes of a group share each trial, so all need the same rates and seeds, too.
    check_one_run(out, definition | grid)
    check_directory(out, definition)
    wait_for_all()  # until each process has looked: nothing is written if one of them refuses
    if not process_0_says((out / "config.json").exists()):
        with locked(out, wait=True):
            check_directory(out, definition)  # the same command, started twice, may have begun
            # `locked` and `write_atomic` act in process 0 of a group alone.
            write_atomic(out / "config.json", json.dumps(definition, indent=1))


def with_earlier(out: Path, cfg: FinetuneConfig) -> FinetuneConfig:
    """Return the settings with all rates and seeds that earlier commands gave for `out`, too.

    So a command with fewer of them takes no trial out of result.json.
    """
    if not process_0_says((out / "result.json").exists()):  # no command has ended yet
        return cfg
    earlier = read_result(out)
    together = {
        "lr": tuple(sorted({*earlier.rates, *cfg.lr})),
        "seeds": max(cfg.seeds, len(earlier.trials)),  # `trials` are of one rate, one a seed
        "grid_seeds": max(cfg.grid_seeds, earlier.grid_seeds),
    }
    whole = cfg.model_copy(update=together)
    if whole != cfg:
        rates = say("lr", whole.lr)
        LOG.info("%s: with what is there already, rates %s and %d seeds", out, rates, whole.seeds)
    return whole


def read_finished(out: Path) -> list[TrialResult]:
    """Read the results of all trials in `out`, also of rates that were not chosen."""
    finished = []
    for file in sorted(out.glob("lr*-s*/result.json")):
        content = read_json(file)
        own_name = f"lr{content.get('lr')}-s{content.get('seed')}"
        if file.parent.name == own_name:  # a copy of a trial has another name
            finished.append(TrialResult.model_validate(content))
    return finished


def check_same_starts(out: Path, cfg: FinetuneConfig, starts: Sequence[Start]) -> None:
    """Refuse (UsageError) a finished trial in `out` whose seed starts from another adapter now.

    `starts` has one for each seed. Rates could not be compared otherwise: the trials of a new rate
    would start from the new adapter.
    """
    own = {cfg.seed + k: start.sha256 for k, start in enumerate(starts)}
    for trial in read_finished(out):
        if trial.seed in own and trial.start_sha256 != own[trial.seed]:
            place = out / f"lr{trial.lr}-s{trial.seed}"
            raise UsageError(f"--out {place}: is another run: content of --from differs; {REMEDY}")


def with_total(track: Track, trials: Sequence[Trial], cfg: FinetuneConfig) -> Track:
    """Return a `Track` for the epochs of one trial that also shows the epochs of all trials.

    Finished trials count with all of their epochs, and so do those that diverged.

    Args:
        track: shows progress.
        trials: those that are planned so far, in their order; those that the best rate alone has
            are planned once it is known.
        cfg: the settings of the run, which say how many trials there will be.
    """
    number = count_trials(cfg)
    if number == 1:  # both would show the same
        return track
    labels = [trial.label for trial in trials]

    def track_both(items: Iterable[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        """Yield the epochs of the trial with this label through both loops, one in the other.

        Every trial has `total` epochs; `done` of this one's are in its checkpoint.
        """
        finished = sum(trial.is_finished for trial in trials)
        trial_label = f"trial {labels.index(label) + 1} of {number}, {label}"
        of_trial = track(items, total, trial_label, done)
        return track(of_trial, number * total, ALL_TRIALS, finished * total + done)

    return track_both
