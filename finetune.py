"""Program: `bisslight finetune`, PEFT of θ and a fresh head, with or without align runs (Eq. 2).

Every learning rate of the grid is tried with one seed (--grid-seeds). The rate that is best on the
validation split is run with all seeds, and each seed's best epoch is tested, once. One rate with
one seed is a trial: a run of its own in a directory such as OUT/lr0.001-s0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from torch import Tensor

from bisslight import Diverged
from config import FinetuneConfig, Record, find_runs
from data import Task, name_own_data, steps_per_epoch
from evaluate import STARTS, compare_settings
from support.checkpoints import AdapterInfo, load_adapter, load_theta, save_adapter
from support.errors import UsageError, as_usage_error
from support.experiment import FinetuneExperiment, Head, open_experiment
from support.metrics import Score
from support.optim import Group, Optimiser, Schedule, train_epochs
from support.processes import run_in_processes
from support.runs import (
    LOG,
    TRIAL,
    TRIALS,
    Run,
    RunResult,
    RunState,
    Track,
    check_directory,
    read_json,
    sha256,
    untracked,
)
from support.screen import Answer, format_accuracies, format_count


class Trial(NamedTuple):
    """What one trial is: a learning rate, a seed and where θ starts."""

    lr: float
    seed: int
    start: Path | None  # the adapter that θ starts from; None: a fresh θ

    def place(self, out: Path) -> Path:
        """Its run directory, such as OUT/lr0.001-s0."""
        return out / f"lr{self.lr:g}-s{self.seed}"


class TrialResult(RunResult, frozen=True):
    """What a trial ended with: its result.json."""

    lr: float
    seed: int
    val: Score | None  # validation of the best epoch; None: the trial diverged
    epoch: int | None = None  # number of the best epoch, from 1
    test_curve: dict[int, float] | None = None  # test accuracy by epoch, with --test-curve
    diverged: str | None = None  # where and how
    adapter: Path  # file with θ and the head after the best epoch

    def __str__(self) -> str:
        name = f"rate {self.lr:g}  seed {self.seed}"
        if self.val is None:
            return f"{name}  diverged"
        return f"{name}  val {self.val.accuracy:.1f} %  in epoch {self.epoch}"


class FinetuneResult(RunResult, frozen=True):
    """What a finetune run ended with: its result.json. Lists have one entry per seed."""

    dataset: str
    backbone: str
    pretext: str
    metric: str
    unit: str  # what is done anew for each seed, such as "align run and PEFT"
    aligned_by: str | None  # hypergradient of the align run that it started from, such as "mfac"
    aligned_on: str | None  # dataset of that run
    align_unlike_paper: Record | None  # settings of that run that are not the paper's
    lr: float  # the chosen learning rate
    grid: dict[str, list[float | None]]  # validation accuracies by rate; None: it diverged
    val: list[float]  # validation accuracy in percent
    epochs: list[int]  # number of the best epoch
    test: list[float]  # test accuracy in percent
    test_loss: list[float]
    test_per_class: list[float | None]  # mean accuracy of the classes in percent
    test_images: int
    right: list[int] | None  # how many test images were right; None where the accuracy is mAP
    trial_seconds: list[float]  # CPU time

    def in_words(self) -> Answer:
        """The mean and deviation of the test accuracy, a row for each seed, and remarks."""
        rate = f"rate {self.lr:g}"
        remarks = []  # lines below the table
        if len(self.grid) > 1:
            rate += ", the best on validation"
            remarks.append(describe_grid(self.grid))
        if self.unit in STARTS:
            remarks.append(f"the seeds start from {STARTS[self.unit]}")
        if remarks:
            remarks.append("")
        seeds = format_count(len(self.test), "seed")  # such as "8 seeds"
        return Answer(
            headline=f"test {self.metric} {format_accuracies(self.test)} ({seeds}; {rate})",
            rows=self.rows_of_seeds(),
            lines=[*remarks, f"in {Path(self.out).resolve()}"],
        )

    def rows_of_seeds(self) -> list[Record]:
        """A row of the printed table for each seed, by column."""
        first_seed = read_json(Path(self.out, "config.json"))["seed"]  # of --seed, such as 0
        test_column = f"test ({format_count(self.test_images, 'image')})"
        rows = []
        for i, test in enumerate(self.test):
            row: Record = {"seed": first_seed + i, "best epoch": self.epochs[i]}
            row["validation"] = format_accuracies([self.val[i]])
            row[test_column] = format_accuracies([test])
            rows.append(row)
        return rows


def describe_grid(grid: dict[str, list[float | None]]) -> str:
    """The validation accuracy of each rate, as a line.

    >>> describe_grid({"0.01": [50.0, 52.0], "0.1": [None]})
    'validation by rate: 0.01 51.0 ± 1.4 %, 0.1 diverged'
    """
    words = []
    for rate, accuracies in grid.items():
        finite = [accuracy for accuracy in accuracies if accuracy is not None]
        all_are_finite = len(finite) == len(accuracies)
        outcome = format_accuracies(finite) if all_are_finite else "diverged"
        words.append(f"{float(rate):g} {outcome}")
    return "validation by rate: " + ", ".join(words)


class Starts(NamedTuple):
    """Where the seeds start."""

    files: Sequence[Path | None]  # an adapter file for each seed; None: the seed has a fresh θ
    unit: str  # what is done anew for each seed, which is what p-values are about

    @property
    def given_files(self) -> list[Path]:
        """The files, one for each seed, so one may be there several times; [] without --from."""
        return [file for file in self.files if file]


Seeds = list[tuple[int, Path | None]]  # seeds, each with the adapter file that it starts from
RunTrials = Callable[[list[Trial]], list[TrialResult]]  # results come sorted by seed
Grid = dict[float, list[TrialResult]]  # by learning rate, its trials: one seed or more


def finetune(
    cfg: FinetuneConfig,
    out: Path,
    *,
    task: Task | None = None,
    force: bool = False,
    track: Track = untracked,
) -> FinetuneResult:
    """Fine-tune into the run directory `out`; the same call goes on after a stop.

    Args:
        cfg: the settings.
        out: this directory is made if it is not there.
        task: data in memory, instead of what --dataset names.
        force: start the run over.
        track: shows progress.

    Raises UsageError before the long work, and Diverged where every learning rate diverges.
    """
    if task:
        cfg = cfg.replace(dataset=name_own_data(*task.splits))
    run_state = check_directory(out, "finetune", cfg, force)
    experiment = open_experiment(cfg, task)
    experiment.check_batches("--batch", cfg.batch)
    starts = starts_of_seeds(cfg)
    align_info = check_starts(experiment, starts.given_files)
    if run_state is RunState.NEW:  # a run that goes on has done this when it began
        experiment.check_held_out_images()

    start_sha256 = [sha256(file) for file in starts.given_files]
    identity = experiment.identity.model_copy(update={"start_sha256": start_sha256})
    seeds = list(enumerate(starts.files, cfg.seed))  # from --seed on, each with its file
    run_all = partial(run_trials, experiment=experiment, out=out, task=task, track=track)
    with Run(out, "finetune", cfg, force, identity) as run:
        if run.result:  # a finished run: its result is given as it is
            return FinetuneResult(**run.result)
        content = describe_run(experiment, starts.unit, align_info)
        content |= try_rates_and_test(experiment, seeds, run_all, run)
        content |= add_up_seconds(out)
        return FinetuneResult(**run.finish(content))


def describe_run(experiment: FinetuneExperiment, unit: str, align_info: AdapterInfo) -> Record:
    """What is fine-tuned, and from where; a part of result.json."""
    return {
        "dataset": experiment.cfg.dataset,
        "backbone": experiment.cfg.backbone,
        "unit": unit,
        "metric": experiment.metric,
        # These three are None where no align run is known: without --from, and after --restart.
        "aligned_by": align_info.hypergrad,
        "aligned_on": align_info.dataset,
        "align_unlike_paper": align_info.unlike_paper,
        # that of the align run, else that of the settings
        "pretext": align_info.pretext or experiment.adapter_info.pretext,
    }


def try_rates_and_test(
    experiment: FinetuneExperiment, seeds: Seeds, run_all: RunTrials, run: Run
) -> Record:
    """Try the grid, run all seeds with the best rate, test each once; a part of result.json."""
    grid = try_grid(experiment.cfg, seeds, run_all)
    results = choose_rate(grid, seeds, run_all)  # one for each seed
    lr = results[0].lr
    warn_about_grid(grid, lr, run.path)
    by_rate = {str(rate): accuracies_of(tried) for rate, tried in grid.items()}
    return {"lr": lr, "grid": by_rate, **score_on_test(results, experiment, run)}


# --- where the seeds start ------------------------------------------------------------------------


def starts_of_seeds(cfg: FinetuneConfig) -> Starts:
    """Find the adapter file that each seed starts from, and say which steps a seed repeats.

    Without --from, each seed has a fresh θ. Otherwise --from (`cfg.start`) names, with --restart, a
    finished finetune run; without it a LoRA file, an align run, or a folder of align runs, one for
    each seed. Raises UsageError. `evaluate.STARTS` explains the units.
    """
    if cfg.start is None:
        return Starts([None] * cfg.seeds, "PEFT seed")
    if cfg.restart:
        return Starts(adapters_of_seeds(cfg, cfg.start), "PEFT and PEFT anew")
    if cfg.start.is_file():
        return Starts([cfg.start] * cfg.seeds, "PEFT seed on one LoRA file")
    files = adapters_of_align_runs(cfg, cfg.start)
    if len(files) == 1:
        return Starts(files * cfg.seeds, "PEFT seed on one align run")
    return Starts(files, "align run and PEFT")


def adapters_of_align_runs(cfg: FinetuneConfig, folder: Path) -> list[Path]:
    """The adapter of an align run, or those of a folder of align runs, one for each seed.

    Raises UsageError unless these are finished, and differ in the seed alone.
    """
    runs = find_runs(folder)
    if len(runs) not in (1, cfg.seeds):
        raise UsageError(f"--from {folder}: {len(runs)} runs, not 1 or {cfg.seeds} (--seeds)")
    files = [run / "adapter.safetensors" for run in runs]
    for run, file in zip(runs, files, strict=True):
        if not file.exists() or not (run / "result.json").exists():
            raise UsageError(
                f"--from {run}: is not a finished align run; give its own command again"
            )
    check_that_seeds_alone_differ(runs, folder)
    return files


def adapters_of_seeds(cfg: FinetuneConfig, run: Path) -> list[Path]:
    """The adapters of a finished finetune run, one for each seed of the restart, which is `cfg`.

    The new seeds must differ from the earlier ones whose adapters are taken. Otherwise head and
    batches would repeat, and the runs would not be independent. Raises UsageError.
    """
    earlier: Record = {}  # the settings of the earlier run
    if (run / "result.json").exists():
        earlier = read_json(run / "config.json")
    if "seeds" not in earlier:  # only finetune has this setting
        raise UsageError(f"--from {run}: is no finished finetune run, which --restart needs")
    if earlier["seeds"] < cfg.seeds:
        raise UsageError(
            f"--from {run}: has {earlier['seeds']} seeds, fewer than --seeds {cfg.seeds}"
        )
    taken_seeds = range(earlier["seed"], earlier["seed"] + cfg.seeds)
    new_seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    if not set(taken_seeds).isdisjoint(new_seeds):
        free = taken_seeds.stop
        raise UsageError(f"--seed {cfg.seed}: overlaps with the seeds of {run}; give {free}")
    return [run / f"adapter-s{seed}.safetensors" for seed in taken_seeds]


def check_that_seeds_alone_differ(runs: Sequence[Path], folder: Path) -> None:
    """Refuse (UsageError) align runs that differ in more than the seed, or have the same seed."""
    settings = [read_json(run / "config.json") for run in runs]
    first = settings[0]
    differing: set[str] = set()  # names of settings; `compare_settings` leaves out the seed
    for other in settings[1:]:
        differing |= compare_settings(other, first).keys()
    seeds = {one["seed"] for one in settings}
    two_have_the_same_seed = len(seeds) < len(runs)
    if differing or two_have_the_same_seed:
        names = ", ".join(sorted(differing)) or "seed"
        raise UsageError(
            f"--from {folder}: its align runs have to differ in the seed and nothing else; see "
            f"their {names}"
        )


def check_starts(experiment: FinetuneExperiment, files: Sequence[Path]) -> AdapterInfo:
    """Check the adapter files that seeds start from; returns what the align runs' files say.

    Align runs differ only in the seed, so the first one speaks for all. If there is none, as after
    --restart, fields such as `hypergrad` are None. Raises UsageError.
    """
    stage = "finetune" if experiment.cfg.restart else "align"
    # Seeds may share a file; `fromkeys` leaves out repetitions and keeps the order.
    infos = [check_origin(file, experiment, stage) for file in dict.fromkeys(files)]
    if stage == "align" and infos:
        return infos[0]
    return AdapterInfo()


def check_origin(file: Path, experiment: FinetuneExperiment, stage: str) -> AdapterInfo:
    """Read what an adapter file says of itself; refuse it (UsageError) if it does not fit here.

    It has to come from this stage ("align", or "finetune" for a restart), from the same network,
    and from the same split if it was trained on the same dataset.
    """
    this_run = experiment.adapter_info  # what the adapters of this run will say
    with as_usage_error(f"--from {file}"):  # it turns the ValueErrors below into a UsageError
        theta, info = load_theta(file, experiment.backbone.dim)
        shape = experiment.theta_shape
        if theta.shape != shape:
            raise ValueError(f"holds θ {[*theta.shape]}, this run's is {[*shape]}; see --rank")
        if info.stage is None:  # a file of the authors' program says nothing of itself
            info = AdapterInfo(stage="align", hypergrad="unknown")
        if info.stage != stage:
            raise ValueError(f"is of {info.stage}; give an align run, or --restart to start anew")
        check_same_network(info, this_run)
        check_same_split(info, this_run)
    return info


def check_same_network(info: AdapterInfo, this_run: AdapterInfo) -> None:
    """Refuse (ValueError) an adapter of another network, or of LoRA with another rank or scale."""
    # Alpha is among them because θ was trained with the scale alpha / rank.
    for name in ("backbone", "rank", "alpha", "weights_sha256"):
        value = getattr(info, name)  # None: the file does not say
        expected = getattr(this_run, name)
        if value is not None and value != expected:
            raise ValueError(f"has {name} {value}, this run {expected}")


def check_same_split(info: AdapterInfo, this_run: AdapterInfo) -> None:
    """Refuse (ValueError) an adapter that was trained on another split of this run's dataset.

    It may have seen the images that are tested here. An adapter of another dataset is taken.
    """
    if info.dataset != this_run.dataset:  # "?": of a file that does not say
        LOG.info("aligned on %s, fine-tuned on %s", info.dataset or "?", this_run.dataset)
    elif info.data_sha256 != this_run.data_sha256:
        raise ValueError(
            f"was aligned on another split or other images of {this_run.dataset}, so it may "
            "have seen the test images; give its --data-seed, --split-file and images, or "
            "align again"
        )


# --- the grid of rates ----------------------------------------------------------------------------


def try_grid(cfg: FinetuneConfig, seeds: Seeds, run_all: RunTrials) -> Grid:
    """Run every learning rate with the first --grid-seeds seeds."""
    # With a single rate there is nothing to choose, so all its seeds are run at once.
    first_seeds = seeds[: cfg.grid_seeds] if len(cfg.grid) > 1 else seeds
    grid: Grid = {lr: [] for lr in cfg.grid}
    # All trials in one call, so that --jobs has work for each process.
    trials = [Trial(lr, seed, file) for lr, (seed, file) in product(grid, first_seeds)]
    for result in run_all(trials):
        grid[result.lr].append(result)
    return grid


def choose_rate(grid: Grid, seeds: Seeds, run_all: RunTrials) -> list[TrialResult]:
    """Run all seeds with the learning rate that is best on validation; returns their results.

    A rate that diverges with any seed is given up for the next best. Of equally good rates, the
    first of the grid is taken. Raises Diverged if no rate is left.
    """
    candidates = [results for results in grid.values() if None not in accuracies_of(results)]
    candidates.sort(key=quality_of, reverse=True)  # keeps ties in order
    for results in candidates:  # of one rate, with the first seeds
        lr = results[0].lr
        other_seeds = seeds[len(results) :]  # those that the grid was not tried with
        others = run_all([Trial(lr, seed, file) for seed, file in other_seeds])
        if None not in accuracies_of(others):
            return results + others
    raise Diverged("every learning rate of the grid diverged")


def warn_about_grid(grid: Grid, lr: float, out: Path) -> None:
    """Warn where the chosen rate is an end of the grid, and better than all other rates of it.

    Then a still better one may lie beyond the grid.
    """
    is_end = lr in (min(grid), max(grid))
    accuracies = [accuracies_of(results) for results in grid.values()]
    is_best_alone = accuracies.count(accuracies_of(grid[lr])) == 1  # no other rate has the same
    if is_end and is_best_alone and len(grid) > 2:  # of two rates both are ends
        LOG.warning("%s: the best rate, %g, is an end of --grid, look beyond it", out, lr)


def accuracies_of(results: Sequence[TrialResult]) -> list[float | None]:
    """The validation accuracy of each trial in percent; None: it diverged."""
    return [result.val.accuracy if result.val else None for result in results]


def quality_of(results: Sequence[TrialResult]) -> tuple[float, float]:
    """The quality of a learning rate none of whose trials diverged; see `quality`."""
    return quality([result.val for result in results if result.val])


def quality(scores: Sequence[Score]) -> tuple[float, float]:
    """What rates and epochs are compared by: the larger is better.

    The mean accuracy decides; where it is equal, the lower mean loss does.
    """
    accuracy = fmean(score.accuracy for score in scores)
    loss = fmean(score.loss for score in scores)
    return accuracy, -loss


def score_on_test(
    results: Sequence[TrialResult], experiment: FinetuneExperiment, run: Run
) -> Record:
    """Score the test split with each trial's θ and head of its best epoch, once.

    Copies the file of both to OUT/adapter-sSEED.safetensors. Returns a part of result.json: a list
    with an entry per seed for each quantity.
    """
    test = experiment.task.test
    scores = []
    for result in results:
        theta, phi_D, _ = load_adapter(result.adapter)
        phi_D = {name: tensor.to(experiment.device) for name, tensor in phi_D.items()}
        scores.append(experiment.score(test, theta.to(experiment.device), phi_D))
        run.write(f"adapter-s{result.seed}.safetensors", result.adapter.read_bytes())
    right = [score.right for score in scores]  # how many images; None with mAP
    return {
        "test_images": len(test.targets),
        "test": [score.accuracy for score in scores],
        "test_loss": [score.loss for score in scores],
        "test_per_class": [score.per_class for score in scores],
        "right": None if None in right else right,
        "val": accuracies_of(results),
        "epochs": [result.epoch for result in results],
        "trial_seconds": [result.cpu_seconds for result in results],
    }


def add_up_seconds(out: Path) -> Record:
    """CPU and wall seconds of all trials, in whatever process, before a stop or after it."""
    results = [read_json(file) for file in out.glob(f"{TRIALS}/result.json")]
    return {
        "cpu_seconds": sum(result["cpu_seconds"] for result in results),
        "seconds": sum(result["seconds"] for result in results),
    }


# --- one rate with one seed -----------------------------------------------------------------------


def run_trials(
    trials: list[Trial], experiment: FinetuneExperiment, out: Path, task: Task | None, track: Track
) -> list[TrialResult]:
    """Run trials, one after another or --jobs at a time; the results of finished ones are read.

    Args:
        trials: of one learning rate or of several.
        experiment: data, networks and settings.
        out: the directory of the whole finetune run.
        task: the data in memory, if that is what is fine-tuned on.
        track: shows progress.

    Returns the results sorted by seed.
    """
    cfg = experiment.cfg
    run_one = partial(run_trial, experiment=experiment, out=out, track=track)
    finished = [trial for trial in trials if (trial.place(out) / "result.json").exists()]
    results = [run_one(trial) for trial in finished]  # of a finished trial, it reads the result
    left = [trial for trial in trials if trial not in finished]
    if left:
        new_results: Iterator[TrialResult]  # asking it for the next result runs a trial
        if cfg.jobs == 1:
            new_results = map(run_one, left)
        else:
            # Each process loads network and data anew; data in memory are sent to it.
            run_in_process = partial(run_trial_in_process, cfg=cfg, out=out, task=task)
            new_results = run_in_processes(run_in_process, left, cfg.jobs)
        done, total = count_trials(cfg, out, len(left))
        results += track(new_results, total, "run", done)
    return sorted(results, key=attrgetter("seed"))


def count_trials(cfg: FinetuneConfig, out: Path, left: int) -> tuple[int, int]:
    """How many trials of the run are finished, and how many there will be, of which `left` now.

    There will be more than planned if the best rate diverges with a seed: then all seeds are run
    with the next best rate, too.
    """
    done = len(list(out.glob(f"{TRIALS}/result.json")))
    return done, max(cfg.trials, done + left)


def run_trial_in_process(
    trial: Trial, cfg: FinetuneConfig, out: Path, task: Task | None
) -> TrialResult:
    """Do `run_trial` in another process, which has to open the experiment itself."""
    return run_trial(trial, open_experiment(cfg, task), out)


def run_trial(
    trial: Trial, experiment: FinetuneExperiment, out: Path, track: Track = untracked
) -> TrialResult:
    """Fine-tune with one rate and one seed, in a run directory below `out`."""
    cfg = experiment.cfg
    start_sha256 = [sha256(trial.start)] if trial.start else []
    of_trial = {"lr": trial.lr, "seed": trial.seed, "start_sha256": start_sha256}
    identity = experiment.identity.model_copy(update=of_trial)
    with Run(trial.place(out), TRIAL, cfg, identity=identity) as run:
        if run.result:
            return TrialResult(**run.result)
        result: Record = {"lr": trial.lr, "seed": trial.seed}
        try:
            best_record = peft(trial, experiment, run, track)
        except Diverged as error:
            result |= {"val": None, "diverged": str(error)}
        else:
            result |= {"val": best_record["val"], "epoch": best_record["step"]}
            if cfg.test_curve:
                result["test_curve"] = curve_of(run.records)
        return TrialResult(**run.finish(result))  # `finish` adds out, adapter and the seconds


def peft(trial: Trial, experiment: FinetuneExperiment, run: Run, track: Track) -> Record:
    """Train θ, which starts from a file or fresh, and a fresh head φ_D.

    1. Make θ, head and optimiser; if the run was stopped, read them back.
    2. After each epoch, validate; copy θ and head if it is the best epoch so far.
    3. Write the copies to adapter.safetensors.

    Returns the record of the best epoch. Raises Diverged where a loss is not finite.
    """
    cfg = experiment.cfg
    theta = start_theta(trial, experiment)
    head = experiment.new_head("peft head", trial.seed)
    epoch_steps = steps_per_epoch(len(experiment.task.train.targets), cfg.batch)
    opt = make_optimiser(cfg, trial.lr, [theta, *head.phi.values()], epoch_steps)
    current = {"theta": theta, **head.with_stats}
    best = {name: tensor.detach().clone() for name, tensor in current.items()}  # of the best epoch
    in_checkpoint = current | {f"best.{name}": tensor for name, tensor in best.items()}
    run.restore(in_checkpoint, {"opt": opt})  # if there is a checkpoint, it overwrites all of them

    steps_left = range(opt.step, cfg.epochs * epoch_steps)
    examples = experiment.examples(
        "peft", trial.seed, cfg.batch, steps_left, cfg.drop_path, by_epoch=True
    )
    # regularise: with drop path, and BatchNorm updates its running statistics, as in training.
    loss = partial(head.loss, theta, head.phi, regularise=True)
    epochs = train_epochs(loss, opt, examples, epoch_steps, "peft", experiment.passes)
    label = f"lr {trial.lr:g} seed {trial.seed}"
    for epoch, mean_loss in track(epochs, cfg.epochs, label, opt.step // epoch_steps):
        record: Record = {"step": epoch, "loss": mean_loss, "val": None}
        validates = epoch % cfg.eval_epochs == 0 or epoch == cfg.epochs
        if validates:
            record |= validate(experiment, theta, head, epoch)
        run.log(record)
        if validates and best_epoch(run.records)["step"] == epoch:  # the best one so far
            for name, tensor in current.items():
                best[name].copy_(tensor.detach())
        run.save_if_due(f"epoch {epoch} of {cfg.epochs}, {label}")

    run.write("adapter.safetensors", adapter_file(experiment, trial, best))
    return best_epoch(run.records)


def start_theta(trial: Trial, experiment: FinetuneExperiment) -> Tensor:
    """θ (K, p) as the trial starts, from its file or fresh; gradients can be taken for it."""
    if trial.start:
        theta, _ = load_theta(trial.start, experiment.backbone.dim)
    else:
        theta = experiment.new_theta(trial.seed)
    return theta.to(experiment.device).contiguous().requires_grad_()


def adapter_file(experiment: FinetuneExperiment, trial: Trial, best: dict[str, Tensor]) -> bytes:
    """The bytes of an adapter file: θ and head of the best epoch, and how they were trained."""
    of_trial = {
        "stage": "finetune",
        "lr": trial.lr,
        "seed": trial.seed,
        "classes": experiment.task.classes,
    }
    info = experiment.adapter_info.model_copy(update=of_trial)
    phi_D = {name: tensor for name, tensor in best.items() if name != "theta"}
    return save_adapter(best["theta"], phi_D=phi_D, info=info)


def make_optimiser(
    cfg: FinetuneConfig, lr: float, tensors: list[Tensor], epoch_steps: int
) -> Optimiser:
    """AdamW or SGD on θ and the whole head, decayed alike; warm-up, then half a cosine.

    `epoch_steps`: how many steps an epoch has.
    """
    # + 1: as in the released program, the full rate is reached in the step after the warm-up.
    warmup = cfg.warmup_epochs * epoch_steps + 1
    schedule = Schedule(cfg.epochs * epoch_steps, warmup, cfg.end_lr)
    betas = None if cfg.optimizer == "sgd" else (0.9, 0.999)  # `Optimiser` takes None for SGD
    return Optimiser([Group(tensors, lr, cfg.weight_decay)], rate=schedule, betas=betas)


def validate(experiment: FinetuneExperiment, theta: Tensor, head: Head, epoch: int) -> Record:
    """Score θ and the head on the validation split, and with --test-curve on the test split, too.

    Returns the fields of a `Score` for each. Raises Diverged where the validation loss is not
    finite.
    """
    task = experiment.task
    val = experiment.score(task.val, theta, head.with_stats)
    if not math.isfinite(val.loss):
        raise Diverged(f"validation after epoch {epoch}: loss is not finite")
    record: Record = {"val": val.model_dump()}
    if experiment.cfg.test_curve:
        record["test"] = experiment.score(task.test, theta, head.with_stats).model_dump()
    return record


def curve_of(records: Sequence[Record]) -> dict[int, float]:
    """The test accuracy by epoch, from the records of a trial with --test-curve."""
    curve = {}
    for record in records:
        if "test" in record:
            curve[record["step"]] = record["test"]["accuracy"]
    return curve


def best_epoch(records: Sequence[Record]) -> Record:
    """The record of the epoch with the highest validation accuracy; if equal, the lowest loss.

    Records without a validation are left out.
    """
    validated = [record for record in records if record["val"]]
    # Of equally good ones, `max` takes the first.
    return max(validated, key=lambda record: quality([Score(**record["val"])]))
