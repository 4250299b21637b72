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
from commands import AlignConfig, FinetuneConfig, make
from evaluate import METHODS, evaluate
from extras.figures import pyplot, save
from extras.settings import SweepConfig
from finetune import finetune
from run import Run, read_json
from screen import simple
from training import Track, untracked

Planned = tuple[Any, dict[str, float], Path]  # settings, swept value, the direct run beside it


def sweep(
    cfg: SweepConfig, out: Path, *, force: bool = False, track: Track = untracked
) -> dict[str, Any]:
    """Do what is not finished of a sweep; the table of all that is there.

    Args:
        force: start over.
        track: shows the progress of each run.
    """
    runs = grid(cfg, out)
    pyplot()
    with Run(out, "sweep", cfg, force) as directory:
        pass  # other settings are refused
    diverged: dict[str, str] = {}
    for path, (config, _, _) in runs.items():
        start = getattr(config, "start", None)
        if start and not (start / "adapter.safetensors").exists():
            continue  # that diverged
        command: Any = align if isinstance(config, AlignConfig) else finetune
        try:
            command(config, path, force=force, track=track)
        except Diverged as error:
            diverged[path.relative_to(out).as_posix()] = str(error)
    done = [path for path in runs if path.name != "align" and finished(path)]
    rows = [row(path, *runs[path][1:]) | {"run": path.relative_to(out).as_posix()} for path in done]
    about = {"dataset": Path(cfg.dataset).name, "swept": cfg.swept}
    found = about | {"rows": rows, "diverged": diverged}
    directory.write("sweep.json", json.dumps(found, indent=1))
    save(*draw(found), out / "sweep.png")
    return found


def finished(run: Path) -> bool:
    """Whether a run has a result."""
    return (run / "result.json").exists()


def grid(cfg: SweepConfig, out: Path) -> dict[Path, Planned]:
    """All runs of a sweep in their order, every setting checked (UsageError)."""
    runs: dict[Path, Planned] = {}
    ((name, values),) = cfg.swept.items()
    for value in values:
        given, point = cfg.model_dump(exclude_unset=True) | {name: value}, {name: value}
        place = out / f"{name.replace('_', '-')}-{value}"
        aligned = (place if name in AlignConfig.model_fields else out) / "align"
        direct = (place if name in FinetuneConfig.model_fields else out) / "direct"
        runs[aligned] = settle(AlignConfig, given), point, direct
        runs[place / "finetune"] = settle(FinetuneConfig, given | {"start": aligned}), point, direct
        alone = point if direct.parent == place else {}
        runs[direct] = settle(FinetuneConfig, given), alone, direct
    return runs


def settle(kind: Any, given: dict[str, Any]) -> Any:
    """The settings of one run (UsageError)."""
    return make(kind, {key: value for key, value in given.items() if key in kind.model_fields})


def plan(cfg: SweepConfig) -> dict[str, Any]:
    """What there is to do, for --dry-run."""
    return {"runs": [path.as_posix() for path in grid(cfg, Path("OUT"))]}


def row(path: Path, point: dict[str, float], direct: Path) -> dict[str, Any]:
    """What `evaluate` says of a run, and of the direct run of the same settings beside it."""
    arms = evaluate([path, direct] if finished(direct) and path != direct else [path]).arms
    result, found = read_json(path / "result.json"), dict(simple(arms[0]))
    found |= {"arm": METHODS.get(result["aligned_by"], result["aligned_by"]), "lr": result["lr"]}
    return found | {"point": point, "minus_direct": simple(arms[-1].first_minus_this)}


def draw(found: dict[str, Any]) -> tuple[Any, str]:
    """Accuracy against the swept setting, a line an arm: mean ± deviation over PEFT seeds."""
    figure, axes = pyplot().subplots()
    ((name, values),) = found["swept"].items()
    for arm in dict.fromkeys(row["arm"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["arm"] == arm]
        at = [(x, row) for row in rows for x in row["point"].values() or values]
        means = [row["mean"] for _, row in at]
        axes.errorbar([x for x, _ in at], means, [row["std"] or 0 for _, row in at], label=arm)
    axes.set(xscale="log", xlabel=name, ylabel=f"test {found['dataset']} (%)")
    axes.legend()
    said = [f"{r['arm']} at {r['point'].get(name, 'all')} {r['mean']:.2f}" for r in found["rows"]]
    return figure, f"Test accuracy against {name}: {'; '.join(said)}."
