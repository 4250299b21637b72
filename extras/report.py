"""One HTML page about runs: accuracies, curves, pictures, settings.

It shows what the run directories hold and computes nothing anew: for a rollout, `bisslight evaluate
RUN --rollout 6` first. The page is one file without scripts that loads nothing. An arm has one name
and one colour throughout, and every picture says in words and numbers what it shows.
"""

import base64
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Environment
from PIL import Image

from config import UsageError
from evaluate import FREE, evaluate, read_arm
from extras.figures import COLOURS, MARK, check_out, pyplot, rendered, short_names
from run import read_json, write_atomic
from screen import readable, simple

CURVES = {  # keys of metrics.jsonl, and what they are
    "loss": "training loss",
    "loss_P": "pretext loss at θ_P",
    "loss_D_at_P": "downstream loss at θ_P",
    "loss_D_at_D": "downstream loss at θ_D",
    "distance": "|θ_P − θ_D|",
    "q_over_g": "|q| / |g|",
    "cosine": "cosine of q and g",
    "val_P": "validation of θ_P (%)",
    "val_D": "validation of θ_D (%)",
    "val": "validation (%)",
}
Picture = tuple[bytes, str]  # a PNG, and what it shows in words


class Arm(NamedTuple):
    """A run, or the runs of one arm, one a seed."""

    name: str
    colour: str
    path: Path
    runs: list[Path]
    command: str
    results: list[dict[str, Any]]  # {} where a run is not finished


def report(runs: Sequence[Path], out: Path | None = None) -> dict[str, Any]:
    """Write the page about all runs at these paths; returns what is on it (UsageError)."""
    out = out or Path("report.html")
    check_out(out, [".html"])
    arms = read_arms(runs)
    environment = Environment(autoescape=True)
    environment.filters |= {"readable": readable, "base64": lambda x: base64.b64encode(x).decode()}
    page = environment.from_string(Path(__file__).with_suffix(".html").read_text()).render(
        title=", ".join(short_names(runs)),
        mark=MARK,
        arms=arms,
        tables=[*accuracies(arms), ("Settings that differ", differing(arms))],
        pictures=[*left(runs, arms), *curves(arms)],
    )
    write_atomic(out, page)
    about = [{"name": arm.name, "command": arm.command, "runs": len(arm.runs)} for arm in arms]
    return {"out": out, "pictures": page.count("<img "), "arms": about}


# --- reading --------------------------------------------------------------------------------------


def arms_in(path: Path) -> list[list[Path]]:
    """The runs at a path; runs of one folder that differ in their seeds only are one arm."""
    if (path / "config.json").exists():
        return [[path]]
    folders = sorted(path.glob("*/"), key=lambda folder: (len(folder.name), folder.name))
    own = [settings_of(folder) for folder in folders]
    if len(own) > 1 and own[0] and own == own[:1] * len(own):
        return [folders]
    return [runs for folder in folders for runs in arms_in(folder)]


def settings_of(folder: Path) -> dict[str, Any]:
    """What the seeds of an arm have in common; {} of a folder that is no run."""
    config = read_if_there(folder / "config.json")
    return {key: config[key] for key in config if key not in FREE - {"start"}}


def read_if_there(file: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none."""
    return read_json(file) if file.exists() else {}


def read_arms(paths: Sequence[Path]) -> list[Arm]:
    """All arms at these paths (UsageError where there is none)."""
    found = [runs for path in paths for runs in arms_in(path)]
    if not found:
        raise UsageError(f"{paths[0]}: is neither a run nor a directory of runs")
    places = [runs[0].parent if len(runs) > 1 else runs[0] for runs in found]
    arms = []
    for name, colour, path, runs in zip(short_names(places), cycle(COLOURS), places, found):
        command = read_json(runs[0] / "env.json")["command"]
        results = [read_if_there(run / "result.json") for run in runs]
        arms.append(Arm(name, colour, path, runs, command, results))
    return arms


def line_of(arm: Arm, key: str) -> list[tuple[int, float]]:
    """A quantity by step: its mean over an arm's runs, at the steps that all of them have.

    Of a finished search, the runs of the chosen rate count.
    """
    lines = []
    for run, result in zip(arm.runs, arm.results, strict=True):
        rate = f"{result['lr']:g}-s*" if "lr" in result else f"{result.get('d_lr', '*')}"
        for file in [*run.glob("metrics.jsonl"), *run.glob(f"*lr{rate}/metrics.jsonl")]:
            records = map(json.loads, file.read_text().splitlines())
            lines.append({r["step"]: number(r[key]) for r in records if r.get(key)})
    steps = [x for x in lines[0] if all(x in line for line in lines)] if lines else []
    return [(x, fmean(line[x] for line in lines)) for x in steps]


def number(value: Any) -> float:
    """A number, the mean of a list, or the accuracy of a score."""
    value = value["accuracy"] if isinstance(value, dict) else value
    return fmean(value) if isinstance(value, list) else float(value)


# --- what is shown --------------------------------------------------------------------------------


def accuracies(arms: Sequence[Arm]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What `evaluate` says of the arms of each task, aligned arms first."""
    tasks = defaultdict(list)
    tuned = [arm for arm in arms if arm.command == "finetune" and all(arm.results)]
    for arm in sorted(tuned, key=lambda arm: not arm.results[0]["aligned_by"]):
        tasks[read_arm(arm.path)["settings"]["data_sha256"]].append(arm)
    for some in tasks.values():
        rows = zip(evaluate([arm.path for arm in some]).arms, some, strict=True)
        dataset = Path(some[0].results[0]["dataset"]).name
        yield f"Accuracy on {dataset} (%)", simple([r._replace(arm=arm.name) for r, arm in rows])


def differing(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Settings in which arms differ; a column an arm."""
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    for arm in arms:
        for name, value in settings_of(arm.runs[0]).items():
            rows[name][arm.name] = Path(value).name if isinstance(value, str) else value
    return [
        {"setting": name} | {arm.name: row.get(arm.name) for arm in arms}
        for name, row in rows.items()
        if len({str(value) for value in row.values()}) > 1
    ]


def left(paths: Sequence[Path], arms: Sequence[Arm]) -> Iterator[Picture]:
    """The pictures that other commands have left, with their own descriptions."""
    for place in dict.fromkeys([*paths, *(run for arm in arms for run in arm.runs)]):
        for file in sorted(place.glob("*.png")):
            with Image.open(file) as image:
                yield file.read_bytes(), image.info.get("Description", file.name)


def curves(arms: Sequence[Arm]) -> Iterator[Picture]:
    """A picture a quantity and command, with a line an arm."""
    for command, key in product(dict.fromkeys(arm.command for arm in arms), CURVES):
        lines = [(arm, line_of(arm, key)) for arm in arms if arm.command == command]
        if lines := [(arm, line) for arm, line in lines if line]:
            figure, axes = pyplot().subplots(figsize=(4.4, 2.9))
            for arm, line in lines:
                axes.plot(*zip(*line, strict=True), color=arm.colour, label=arm.name)
            axes.set(xlabel=f"step of {command}", ylabel=CURVES[key])
            axes.legend(fontsize=7)
            ends = [
                f"{arm.name} from {line[0][1]:.4g} at {line[0][0]} "
                f"to {line[-1][1]:.4g} at {line[-1][0]}"
                for arm, line in lines
            ]
            words = f"{command}, {CURVES[key]}: {'; '.join(ends)}."
            yield rendered(figure, words), words
