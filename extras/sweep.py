"""Accuracy against LoRA rank (fig:lora_rank_var), λ, N_L, T or a learning rate: a grid of runs.

    OUT/rank-4/align            an align run
    OUT/rank-4/finetune         a finetune run that starts from it, all seeds
    OUT/rank-4/direct           a finetune run from the backbone, the other curve
    OUT/sweep.json, sweep.png   table and picture of what is finished

A run's directory is named after those swept settings that it depends on: `--lr 1e-3,1e-2` has one
align run, OUT/align, and `--lam 0.1,1` one direct run, OUT/direct. As in the paper a point has one
align run; its error bars are over PEFT seeds.
"""

import json
import logging
import re
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

from align import align
from bisslight import Diverged
from commands import AlignConfig, FinetuneConfig, one_line
from config import UsageError
from evaluate import METHODS, evaluate, read_arm
from extras.figures import COLOURS, Drawn, pyplot, save
from extras.settings import SweepConfig
from finetune import finetune
from run import Run
from training import Track, untracked

LOG = logging.getLogger("bisslight")
AXES = {
    "rank": "LoRA rank r",
    "lam": "λ",
    "lr": "learning rate of PEFT",
    "d_lr": "learning rate of θ_D",
    "p_lr": "learning rate of θ_P",
    "lower_steps": "N_L, pretext steps an alternation",
    "alternations": "T, alternations",
}


class Point(NamedTuple):
    """One run of a sweep."""

    path: Path
    at: dict[str, float]  # the swept settings that it depends on
    config: AlignConfig | FinetuneConfig
    direct: Path | None = None  # the run that it is compared with


Chain = list[Point]  # an align run and what starts from it, or one direct run


def sweep(
    cfg: SweepConfig,
    out: Path,
    *,
    force: bool = False,
    track: Track = untracked,
    shard: str | None = None,
) -> dict[str, Any]:
    """Do what is not finished of a sweep, or of a shard of it; the table of all that is there.

    Args:
        force: start over.
        track: shows the progress of each run.
        shard: i/n, every n-th chain of runs from the i-th on.
    """
    chains = grid(cfg, out)
    mine = share(chains, shard)
    pyplot()
    directory = Run(out, "sweep", cfg, force)  # refuses other settings
    directory.close()  # so that shards can work side by side
    diverged: dict[str, str] = {}
    for chain in mine:
        for run in chain:
            LOG.info("%s", run.path)
            command: Any = align if isinstance(run.config, AlignConfig) else finetune
            try:
                command(run.config, run.path, force=force, track=track)
            except Diverged as error:
                diverged[str(run.path.relative_to(out))] = str(error)
                LOG.warning("%s: %s", run.path, error)
                if command is align:
                    break  # nothing can start from it
    runs = {str(run.path.relative_to(out)): run for chain in chains for run in chain}
    done = {name: run for name, run in runs.items() if (run.path / "result.json").exists()}
    rows = [row(name, run) for name, run in done.items() if isinstance(run.config, FinetuneConfig)]
    missing = [name for name in runs if name not in done and name not in diverged]
    found = {"dataset": Path(cfg.dataset).name, "swept": cfg.swept, "rows": rows}
    found |= {"missing": missing, "diverged": diverged}
    directory.write("sweep.json", json.dumps(found, indent=1))
    if rows:
        save(draw(found), out / "sweep.png")
    return found


def grid(cfg: SweepConfig, out: Path) -> list[Chain]:
    """All runs of a sweep, every setting checked (UsageError); chains share no directory."""
    aligned: dict[Path, Chain] = {}
    direct: dict[Path, Chain] = {}
    for values in product(*cfg.swept.values()):
        at: dict[str, Any] = dict(zip(cfg.swept, values, strict=True))
        first, alone = point(cfg, at, out, "align"), point(cfg, at, out, "direct")
        tuned = point(cfg, at | {"start": first.path}, out, "finetune")
        chain = aligned.setdefault(first.path, [first])
        chain.append(tuned._replace(direct=alone.path))
        direct[alone.path] = [alone]
    return [*aligned.values(), *direct.values()]


def point(cfg: SweepConfig, at: dict[str, Any], out: Path, name: str) -> Point:
    """One run: the sweep's settings, with `at` in their place."""
    kind = AlignConfig if name == "align" else FinetuneConfig
    given = cfg.model_dump(exclude_unset=True) | at
    given = {key: value for key, value in given.items() if key in kind.model_fields}
    with one_line(given):
        config = kind(**given)
    own = {k: v for k, v in at.items() if k in cfg.swept and (k in given or "start" in at)}
    folder = "-".join(f"{key.replace('_', '-')}-{value}" for key, value in own.items())
    return Point(out / folder / name, own, config)


def share(chains: list[Chain], shard: str | None) -> list[Chain]:
    """Every n-th chain from the i-th on, for a shard i/n; None: all.

    >>> [len(share([[]] * 5, f"{i}/2")) for i in (0, 1)]
    [3, 2]
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard or "0/1")
    if not match or int(match[1]) >= int(match[2]):
        raise UsageError(f"--shard {shard}: give i/n, 0/2 and 1/2 for two machines")
    return chains[int(match[1]) :: int(match[2])]


def plan(cfg: SweepConfig) -> dict[str, Any]:
    """What there is to do, for --dry-run."""
    return {"runs": [str(run.path) for chain in grid(cfg, Path("OUT")) for run in chain]}


def row(name: str, run: Point) -> dict[str, Any]:
    """One point of a curve, compared with the direct run of the same settings."""
    versus = run.direct if run.direct and (run.direct / "result.json").exists() else None
    arms = evaluate([run.path, versus] if versus else [run.path]).arms
    by, lr = (read_arm(run.path)[key] for key in ("aligned_by", "lr"))
    about = {key: getattr(arms[0], key) for key in ("metric", "seeds", "unit", "mean", "std")}
    paper, difference = arms[0].paper, arms[-1].first_minus_this
    return {
        "arm": METHODS.get(by, by),
        "run": name,
        "point": run.at,
        "lr": lr,
        **about,
        "accuracies": arms[0].accuracies,
        "paper": paper and paper._asdict(),
        "minus_direct": difference and difference._asdict(),
    }


def draw(found: dict[str, Any]) -> Drawn:
    """Accuracy against the first swept setting, mean ± deviation."""
    figure, axes = pyplot().subplots(figsize=(6, 4))
    x, values = next(iter(found["swept"].items()))
    lines: dict[str, list[Any]] = {}
    for r in found["rows"]:
        others = [f"{name} {value}" for name, value in r["point"].items() if name != x]
        line = lines.setdefault(", ".join([r["arm"], *others]), [])
        at = [r["point"][x]] if x in r["point"] else values  # all, where it does not matter
        line += [(place, r["mean"], r["std"] or 0.0) for place in at]
    for (name, line), colour in zip(lines.items(), cycle(COLOURS), strict=False):
        axes.errorbar(*zip(*sorted(line), strict=True), label=name, color=colour, capsize=3)
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set(xlabel=AXES[x], ylabel=f"test {found['rows'][0]['metric']} (%)")
    axes.set_title(f"{found['dataset']}: mean ± deviation over PEFT seeds")
    axes.legend()
    said = [f"{name} at {at:g} {mean:.2f}" for name, line in lines.items() for at, mean, _ in line]
    return figure, f"Test accuracy against {AXES[x]}: {'; '.join(said)}."
