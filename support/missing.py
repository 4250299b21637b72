"""All that a run lacks, told at once: data and weights, each with its size and how to get it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from config import AlignConfig, Command, FinetuneConfig
from support.benchmarks import place_of
from support.checkpoints import OFFICIAL, weights_of
from support.errors import UsageError, checking

Steps = dict[str, Callable[[], object]]


class Tried(NamedTuple):
    """What came of several steps."""

    results: dict[str, Any]  # of those that could be done, by name
    problems: list[str]  # what the others lack, each in a line


def try_all(steps: Steps) -> Tried:
    """Do every step, also after one that cannot be done (UsageError)."""
    tried = Tried({}, [])
    for name, step in steps.items():
        try:
            tried.results[name] = step()
        except UsageError as error:
            tried.problems.append(str(error))
    return tried


def list_missing(cfg: Command) -> list[str]:
    """What data a run lacks and how to get them; weights too, though a run can fetch these."""
    if not isinstance(cfg, AlignConfig | FinetuneConfig):  # pretraining needs no more than a pool
        return []
    steps: Steps = {"dataset": partial(find_place, "--dataset", cfg.dataset, cfg.data_root)}
    if isinstance(cfg, AlignConfig):
        steps["pool"] = partial(find_place, "--pool", cfg.pool, cfg.data_root)
    steps["weights"] = partial(weights_of, cfg)
    results, problems = try_all(steps)
    weights = results.get("weights")
    if problems and weights and not weights.exists():
        url, megabytes = OFFICIAL[cfg.backbone, cfg.pretext]
        command = f"`curl -C - -o {weights} {url}`"
        problems.append(f"--weights: {megabytes:,.0f} MB, fetched by the run itself or {command}")
    return problems


def find_place(flag: str, name: str, data_root: Path) -> None:
    """Refuse (UsageError) data that are not there."""
    with checking(f"{flag} {name}"):
        place_of(name, data_root)
