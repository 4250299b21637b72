"""Accuracy against LoRA rank (fig:lora_rank_var), λ, N_L, T or a learning rate: a grid of runs.

    OUT/rank-4/align            an align run
    OUT/rank-4/finetune         a finetune run that starts from it, all seeds
    OUT/rank-4/direct           a finetune run from the backbone, the other curve
    OUT/sweep.json, sweep.png   table and picture of what is finished

A run that does not depend on the swept setting is there once: `--lr 1e-3,1e-2` has one align run,
OUT/align, and `--lam 0.1,1` one direct run, OUT/direct. As in the paper a point has one align run;
its error bars are over PEFT seeds.
"""

import json
from pathlib import Path
from typing import Any

from align import align
from bisslight import Diverged
from commands import AlignConfig, Command, FinetuneConfig, make
from config import Bilevel, Data, Lower, Model, Peft, Pretext, Upper, UsageError
from evaluate import evaluate
from extras.figures import pyplot, save
from finetune import finetune
from run import Run
from screen import simple
from training import Track, untracked

SWEPT = ("rank", "lr", "d_lr", "p_lr", "lam", "lower_steps", "alternations")


class SweepConfig(Peft, Bilevel, Upper, Lower, Pretext, Data, Model, Command):
    """`sweep`: align with PEFT, and PEFT alone, over a list of values."""

    swept: dict[str, tuple[int | float, ...]] = {}  # noqa: RUF012
    """One list: `--rank 1,2,4` on the command line, swept={"rank": (1, 2, 4)} in Python."""


def sweep(
    cfg: SweepConfig, out: Path, *, force: bool = False, track: Track = untracked
) -> dict[str, Any]:
    """Do what is not finished of a sweep; `evaluate`'s table of all that is there, by value.

    Args:
        force: start over.
        track: shows the progress of each run.
    """
    pyplot()  # tells that matplotlib is missing before the long work
    (name,), points = cfg.swept, grid(cfg, out)
    diverged: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    with Run(out, "sweep", cfg, force) as directory:  # other settings are refused
        for path, config in {k: v for runs in points.values() for k, v in runs.items()}.items():
            start = getattr(config, "start", None)
            if start and not (start / "adapter.safetensors").exists():
                continue  # that diverged
            command: Any = align if isinstance(config, AlignConfig) else finetune
            try:
                command(config, path, force=force, track=track)
            except Diverged as error:
                diverged[path.relative_to(out).as_posix()] = str(error)
        for value, runs in points.items():
            done = [path for path in [*runs][1:] if (path / "result.json").exists()]
            rows += [{name: value} | simple(row) for row in evaluate(done).arms]
        found = {"dataset": Path(cfg.dataset).name, "rows": rows, "diverged": diverged}
        directory.write("sweep.json", json.dumps(found, indent=1))
    save(*draw(rows, name), out / "sweep.png")
    return found


def grid(cfg: SweepConfig, out: Path) -> dict[float, dict[Path, Any]]:
    """By value the settings of its runs: align, finetune, direct; all are checked (UsageError)."""
    if len(cfg.swept) != 1 or not {*cfg.swept} <= {*SWEPT}:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in SWEPT)
        raise UsageError(f"give a comma list to one of {flags}")
    ((name, values),) = cfg.swept.items()
    points: dict[float, dict[Path, Any]] = {}
    for value in values:
        given = cfg.model_dump(exclude_unset=True) | {name: value}
        place = out / f"{name.replace('_', '-')}-{value}"
        aligned = (place if name in AlignConfig.model_fields else out) / "align"
        direct = (place if name in FinetuneConfig.model_fields else out) / "direct"
        points[value] = {
            aligned: settle(AlignConfig, given),
            place / "finetune": settle(FinetuneConfig, given | {"start": aligned}),
            direct: settle(FinetuneConfig, given),
        }
    return points


def settle(kind: Any, given: dict[str, Any]) -> Any:
    """The settings of one run (UsageError)."""
    return make(kind, {key: value for key, value in given.items() if key in kind.model_fields})


def plan(cfg: SweepConfig) -> dict[str, Any]:
    """What there is to do, for --dry-run."""
    return {"runs": [*dict.fromkeys(x for runs in grid(cfg, Path("OUT")).values() for x in runs)]}


def draw(rows: list[dict[str, Any]], name: str) -> tuple[Any, str]:
    """Accuracy against the swept setting, a line an arm: mean ± deviation over PEFT seeds."""
    figure, axes = pyplot().subplots()
    for arm in ("finetune", "direct"):
        some = [row for row in rows if row["arm"] == arm]
        x, means = ([row[key] for row in some] for key in (name, "mean"))
        axes.errorbar(x, means, [row["std"] or 0 for row in some], label=arm)
    axes.set(xscale="log", xlabel=name, ylabel="test (%)")
    axes.legend()
    said = [f"{row['arm']} at {row[name]} {row['mean']:.2f}" for row in rows]
    return figure, f"Test accuracy (%) against {name}: {'; '.join(said)}."
