"""Accuracy against LoRA rank (fig:lora_rank_var), λ, N_L, T or a learning rate: a grid of runs.

OUT/rank-4/ holds align/, finetune/, which starts from it, and direct/, a finetune run from the
backbone. If a run does not depend on the swept setting, it exists once, in OUT. A point has one
align run; its error bars are over PEFT seeds. sweep.json and sweep.png show what is finished.
"""

import json
from pathlib import Path
from typing import Any

from align import align
from bisslight import Diverged
from config import AlignConfig, FinetuneConfig, Record, make
from evaluate import evaluate
from extras import SWEPT, SweepConfig
from extras.plan import plan as plan_of_one
from extras.report import COLOURS, pyplot, save
from finetune import finetune
from support.errors import UsageError
from support.runs import Run, Track, clear, untracked


def sweep(cfg: SweepConfig, out: Path, *, force: bool = False, track: Track = untracked) -> Record:
    """Do what is not finished of a sweep, or all with `force`; returns `evaluate`'s table by value.

    Raises UsageError. A run that diverges is named in "diverged", and the others go on.
    """
    configs, points = grid(cfg, out)
    (name,) = cfg.swept
    diverged: dict[str, str] = {}
    rows: list[Record] = []
    with Run(out, "sweep", cfg, force) as directory:  # other settings are refused
        for path in configs if force else ():
            clear(path)
        for path, config in configs.items():
            command: Any = align if isinstance(config, AlignConfig) else finetune
            start = getattr(config, "start", None)
            if start and not (start / "adapter.safetensors").exists():
                continue  # the align run diverged
            try:
                command(config, path, track=track)
            except Diverged as error:
                diverged[path.relative_to(out).as_posix()] = str(error)
        for value, tuned in points.items():
            done = [path for path in tuned if (path / "result.json").exists()]
            rows += [{name: value} | row.model_dump() for row in evaluate(done).arms]
        found = {"dataset": Path(cfg.dataset).name, "rows": rows, "diverged": diverged}
        directory.write("sweep.json", json.dumps(found, indent=1))
    figure, axes = pyplot().subplots()
    labels = ("finetune", "aligned", COLOURS[0]), ("direct", "direct", COLOURS[1])
    for arm, label, colour in labels:
        some = [row for row in rows if row["arm"] == arm]
        x, means = [f"{row[name]:g}" for row in some], [row["mean"] for row in some]
        errors = [row["std"] or 0 for row in some]
        axes.errorbar(x, means, errors, color=colour, marker="o", capsize=4, label=label)
    axes.set(xlabel=name, ylabel="test (%), mean ± deviation of PEFT seeds")
    axes.legend()
    said = "; ".join(f"{row['arm']} at {row[name]} {row['mean']:.2f}" for row in rows)
    save(figure, f"Test accuracy (%) against {name}: {said}.", out / "sweep.png")
    return found


def grid(cfg: SweepConfig, out: Path) -> tuple[dict[Path, Any], dict[float, list[Path]]]:
    """Settings of all runs (UsageError), and of each value its two finetune runs."""
    pyplot()  # tells that matplotlib is missing before the long work
    if len(cfg.swept) != 1 or not {*cfg.swept} <= {*SWEPT}:
        raise UsageError(f"give a comma list, such as --rank 1,4, to one of {', '.join(SWEPT)}")
    ((name, values),) = cfg.swept.items()
    configs, points = dict[Path, Any](), dict[float, list[Path]]()
    for value in values:
        place = out / f"{name.replace('_', '-')}-{value}"
        aligned = (place if name in AlignConfig.model_fields else out) / "align"
        direct = (place if name in FinetuneConfig.model_fields else out) / "direct"
        points[value] = [place / "finetune", direct]
        for path, start in ((aligned, None), (place / "finetune", aligned), (direct, None)):
            kind = AlignConfig if path == aligned else FinetuneConfig
            given = cfg.model_dump(exclude_unset=True) | {name: value, "start": start}
            configs[path] = make(kind, {k: v for k, v in given.items() if k in kind.model_fields})
    return configs, points


def plan(cfg: SweepConfig) -> Record:
    """What there is to do, for --dry-run; the first align run is checked as it checks itself."""
    configs, _ = grid(cfg, Path("OUT"))
    return {"runs": [*configs], "of the first": plan_of_one(next(iter(configs.values())))}
