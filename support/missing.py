"""Program: all that a run lacks, told at once with its size and how to get it."""

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from config import AlignConfig, Command, FinetuneConfig
from support.benchmarks import place_of
from support.checkpoints import OFFICIAL_FILES, weights_of
from support.errors import UsageError, checking
from support.screen import tell

P = ParamSpec("P")
T = TypeVar("T")


def list_missing(cfg: Command) -> list[str]:
    """What a run lacks and how to get it: data, and weights that it cannot fetch itself."""
    problems: list[str] = []
    if not isinstance(cfg, AlignConfig | FinetuneConfig):  # pretraining needs no more than a pool
        return problems
    attempt(problems, find_place, "--dataset", cfg.dataset, cfg)
    if isinstance(cfg, AlignConfig):
        attempt(problems, find_place, "--pool", cfg.pool, cfg)
    attempt(problems, weights_of, cfg)
    return problems


def tell_fetch(cfg: Command) -> None:
    """Say which weights a run will fetch itself, if any, and how to fetch them before."""
    if not isinstance(cfg, AlignConfig | FinetuneConfig):
        return
    weights = attempt([], weights_of, cfg)
    if weights and not weights.exists():
        url, megabytes = OFFICIAL_FILES[cfg.backbone, cfg.pretext]
        command = f"`curl -C - -o {weights} {url}`"
        note = f"--weights: {megabytes:,.0f} MB, fetched by the run itself or {command}"
        tell(note, sys.stderr)


def find_place(flag: str, name: str, cfg: Command) -> None:
    """Refuse (UsageError) data that are not there."""
    with checking(f"{flag} {name}"):
        place_of(name, cfg.data_root)


def attempt(
    problems: list[str], step: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """The result of a step; if it cannot be done, that goes to the problems."""
    try:
        return step(*args, **kwargs)
    except UsageError as error:
        problems.append(str(error))
        return None
