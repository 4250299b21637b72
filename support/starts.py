"""Program: what fine-tuning starts from: the adapters that --from names.

They have to be alike (one arm: runs of the same settings, each with its own seed), to fit the
settings and the network, and to be trained on the same labelled data.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from config import FinetuneConfig, Record
from support.adapters import check_fits, check_settings, find_adapters, load_adapter
from support.definitions import MAY_DIFFER_IN_ARM, explain, find_repeated, tell_chains_apart
from support.errors import UsageError
from support.experiment import C, Experiment
from support.files import read_json, sha256
from support.results import AdapterInfo
from support.settings_files import find_runs

LOG = logging.getLogger("bisslight")
NOTHING = AdapterInfo()  # what is said of a fresh θ


class Start(NamedTuple):
    """What a seed starts from."""

    file: Path | None = None  # an adapter; None: a fresh θ
    sha256: str | None = None  # of that file
    info: AdapterInfo = NOTHING  # what the adapter says of itself; of a fresh θ, nothing


# --- found --------------------------------------------------------------------------------------


def read_starts(cfg: FinetuneConfig) -> list[Start]:
    """Find and read what each seed starts from; the list has one Start per seed.

    --from names a file, a finished run, or a folder of finished runs. If there is one adapter in
    it, all seeds start from that one. If there are several, each seed has its own: they are align
    runs, or the seeds of a finetune run. If there are more than --seeds, the first ones are taken,
    in the order of `find_start_files`. Raises UsageError where any of them differ in more than the
    seed, or do not fit the settings.
    """
    if cfg.start is None:
        return [Start()] * cfg.seeds
    files = find_start_files(cfg.start)
    starts = [Start(file, sha256(file), load_adapter(file).info) for file in files]
    if len(files) == 1:
        starts = starts * cfg.seeds
    elif len(files) < cfg.seeds:
        raise UsageError(
            f"--from {cfg.start}: has {len(files)} adapters, --seeds is {cfg.seeds};"
            f" give --seeds {len(files)}, or a single adapter for all"
        )
    check_alike(starts)  # also those that this command does not take: more seeds would take them
    starts = starts[: cfg.seeds]
    check_seeds_are_new(starts, cfg)
    check_independent(starts, cfg)  # none is there twice
    check_settings(f"--from {starts[0].file}", starts[0].info, cfg)  # all have the same ones
    return starts


def find_start_files(place: Path) -> list[Path]:
    """Return the adapter files that --from names, in the order in which seeds take them.

    Runs are in the order of their names, s2 before s10; in a finetune run, adapters are in the
    order of its seeds.
    """
    return [file for run in find_runs(place) for file in find_adapters(run)]


def warn_of_unused(starts: Sequence[Start], cfg: FinetuneConfig) -> None:
    """Warn where --from has more adapters than seeds, and say which are taken."""
    files = find_start_files(cfg.start) if cfg.start else []
    if len(files) > len(starts):
        taken = ", ".join(str(start.file) for start in starts)
        LOG.warning(
            "--from %s: takes %d of %d adapters: %s", cfg.start, len(starts), len(files), taken
        )


# --- alike --------------------------------------------------------------------------------------


def check_seeds_are_new(starts: Sequence[Start], cfg: FinetuneConfig) -> None:
    """Refuse (UsageError) a start that was fine-tuned with a seed of this run.

    The same seed draws the same head and the same batches a second time. In an align run it draws
    others, so there it is fine.
    """
    own = {*range(cfg.seed, cfg.seed + cfg.seeds)}
    for start in starts:
        before = {one.seed for one in start.info.stages if one.stage == "finetune"}
        if twice := own & before:
            raise UsageError(
                f"--from {start.file}: was fine-tuned with seed {min(twice)}, which this run has,"
                " too; give another --seed"
            )


def check_independent(starts: Sequence[Start], cfg: FinetuneConfig) -> None:
    """Refuse (UsageError) a start that is there twice, as a copy or as a second run.

    One start for all seeds is fine.
    """
    digests = [start.sha256 for start in starts]
    if reasons := find_repeated(digests, [start.info.seeds for start in starts]):
        raise UsageError(f"--from {cfg.start}: {'; '.join(reasons)}; remove what is there twice")


def check_alike(starts: Sequence[Start]) -> None:
    """Refuse (UsageError) adapters that are not seeds of one arm: more than the seed differs."""
    first = starts[0]
    for start in starts:
        differences = tell_chains_apart(
            start.info.chain, first.info.chain, but_for=MAY_DIFFER_IN_ARM
        )
        if differences:
            raise UsageError(
                f"--from {start.file}: differs in more than the seed from {first.file}:"
                f" {'; '.join(map(explain, differences))}; give runs that differ in the seed"
                " alone"
            )


# --- fits ---------------------------------------------------------------------------------------


def check_starts(starts: Sequence[Start], experiment: Experiment[FinetuneConfig]) -> None:
    """Refuse (UsageError) adapters that do not fit, and adapters or weights of other data."""
    check_weights(experiment)
    for file in sorted({start.file for start in starts if start.file}):  # one, or one a seed
        adapter = load_adapter(file)
        check_fits(f"--from {file}", adapter, experiment.networks, experiment.cfg)
        check_same_data(f"--from {file}", adapter.info.trained_on, experiment)


# --- trained on the same data -------------------------------------------------------------------


def trained_on(experiment: Experiment[C], before: AdapterInfo = NOTHING) -> list[str]:
    """Return the digests of all labelled data that the θ of a run is trained on, for its adapter.

    They are those of the run itself, of the adapter it starts from, and of the θ that may be merged
    into its weights.
    """
    own = experiment.digests["data_sha256"]
    return sorted({own, *before.trained_on, *experiment.networks.trained_on})


def check_weights(experiment: Experiment[C]) -> None:
    """Refuse (UsageError) exported weights whose θ was trained on other data."""
    cfg = experiment.cfg
    given = f"--weights {cfg.weights}" if cfg.weights else f"--backbone {cfg.backbone}"
    check_same_data(given, experiment.networks.trained_on, experiment)


def check_same_data(given: str, digests: Sequence[str], experiment: Experiment[C]) -> None:
    """Refuse (UsageError) a θ of other labelled data or splits, unless --other-data is given.

    Such a θ may have been trained on test images of this run. `digests` are of the data that it was
    trained on, [] without a θ, and `given` is the flag that names it.
    """
    own = experiment.digests["data_sha256"]
    if not experiment.cfg.other_data and any(digest != own for digest in digests):
        raise UsageError(
            f"{given}: its θ was trained on other images, labels or splits than this run's, so it"
            " may have seen test images; give the --dataset and --data-seed of its run, or"
            " --other-data where you know that it has not"
        )


# --- what it took -------------------------------------------------------------------------------


def seconds_until(file: Path | None) -> float | None:
    """Return the CPU seconds of the run that made an adapter, and of the runs before it.

    They are 0 without an adapter, and None where they are unknown. Those of a finetune run, which
    has also tried its rates, are divided equally between its seeds.
    """
    if file is None:
        return 0.0
    result = find_result(file)
    seconds = result.get("cpu_seconds")
    seconds_before = result.get("start_cpu_seconds", 0.0)  # align has no run before it
    if seconds is None or seconds_before is None:
        return None
    seeds = len(result["trials"]) if "trials" in result else 1  # only finetune has trials
    return float(seconds + seconds_before) / seeds


def find_result(file: Path) -> Record:
    """Return the result of the run that made an adapter; {} where it is not there.

    An adapter of a finetune run lies in one of its trials, a directory inside that of the run.
    """
    result_file = file.parent / "result.json"
    finetune_result = file.parent.parent / "result.json"
    result = read_json(result_file) if result_file.exists() else {}
    is_of_trial = "start_seeds" in result  # only trials say these
    return read_json(finetune_result) if is_of_trial and finetune_result.exists() else result
