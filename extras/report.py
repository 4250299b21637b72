"""One HTML page about runs: accuracies, curves, settings, pictures; and the style of all pictures.

The page is one file without scripts that loads nothing. It shows what the run directories hold and
computes nothing anew: for a rollout, run `bisslight evaluate RUN --rollout 6` first. Every picture
holds a description in words and numbers, and a mark by which the program knows its own files.
"""

import io
import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Template
from PIL import Image

from cli import show as readable
from config import Record
from evaluate import FREE, Row, evaluate, read_arm
from support.errors import UsageError
from support.runs import read_json, write_atomic

# Okabe and Ito's, which colour-blind readers can tell apart; an arm has one of them throughout
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#888888")
MARK = "made by bisslight"
KEYS = {  # where a kind of file keeps the mark and the description
    ".png": ("Software", "Description"),
    ".svg": ("Creator", "Description"),
    ".pdf": ("Creator", "Subject"),
}
CURVES = {  # keys of metrics.jsonl, and what they are
    "loss": "training loss",
    "loss_P": "pretext loss at θ_P",
    "loss_D_at_P": "downstream loss at θ_P",
    "loss_D_at_D": "downstream loss at θ_D",
    "distance": "|θ_P − θ_D|",
    "q_over_g": "|q| / |g|",
    "cosine": "cosine of q and g",
    "share": "share of |g|² in the span of G",
    "removed": "removed part of that share",
    "val_P": "validation of θ_P (%)",
    "val_D": "validation of θ_D (%)",
    "val": "validation (%)",
}


def pyplot() -> Any:
    """Matplotlib without a screen (ImportError where the `plot` extra is not installed)."""
    from matplotlib import pyplot as plt

    plt.rcParams.update({"backend": "agg", "figure.constrained_layout.use": True, "font.size": 9})
    return plt


def check_out(path: Path, suffixes: Iterable[str] = KEYS) -> None:
    """Refuse (UsageError), before any work, a file that cannot be written or is not ours."""
    if path.suffix.lower() not in suffixes or not path.parent.is_dir():
        raise UsageError(
            f"{path}: cannot be written, give one of the suffixes {', '.join(suffixes)} "
            "and a folder that is there"
        )
    if path.exists() and not (path.is_file() and MARK.encode() in path.read_bytes()):
        raise UsageError(f"{path}: was not made by this program; choose another name")


def rendered(figure: Any, words: str, kind: str = ".png") -> bytes:
    """A figure as the bytes of a file that holds its description; the figure is closed."""
    buffer, metadata = io.BytesIO(), dict(zip(KEYS[kind], (MARK, words), strict=True))
    figure.savefig(buffer, format=kind[1:], metadata=metadata, dpi=150)
    pyplot().close(figure)
    return buffer.getvalue()


def save(figure: Any, words: str, path: Path) -> None:
    """Write a figure and its description (UsageError where the file there is not ours)."""
    check_out(path)
    write_atomic(path, rendered(figure, words, path.suffix.lower()))


def draw_arms(rows: Sequence[Row], path: Path) -> None:
    """The picture of `evaluate --picture FILE`."""
    figure, axes = pyplot().subplots(figsize=(1.6 + 1.3 * len(rows), 3.4))
    plot_arms(axes, rows)
    said = [f"{r.arm} {r.mean:.2f}, {min(r.accuracies)} to {max(r.accuracies)}" for r in rows]
    save(figure, f"Test {rows[0].metric} (%), mean and range over seeds: {'; '.join(said)}.", path)


def plot_arms(axes: Any, rows: Sequence[Row]) -> None:
    """A column per arm: a dot for each seed, side by side, and a line at the mean."""
    for x, row in enumerate(rows):
        n, colour = len(row.accuracies), COLOURS[x % len(COLOURS)]
        at = [x + 0.4 * ((i + 0.5) / n - 0.5) for i in range(n)]
        axes.plot(at, row.accuracies, "o", color=colour, markersize=4)
        axes.hlines(row.mean, x - 0.35, x + 0.35, color=colour)
    axes.set_xticks(range(len(rows)), [f"{row.arm}\nmean {row.mean:.1f}" for row in rows])
    axes.set(xlim=(-0.5, len(rows) - 0.5), ylabel=f"test {rows[0].metric} (%)")


class Arm(NamedTuple):
    """A run on the page, or a folder of runs that differ in their seed alone."""

    name: str
    colour: str
    path: Path
    runs: tuple[Path, ...]
    finished: bool
    command: str


def report(runs: Sequence[Path], out: Path | None = None) -> Record:
    """Write the page about all runs at these paths; returns what is on it (UsageError)."""
    out = out or Path("report.html")
    check_out(out, [".html"])
    found = [arm for path in runs for arm in arms_in(path)]
    if not found:
        raise UsageError(f"{runs[0]}: is neither a run nor a directory of runs")
    places = [x[0] if len(x) == 1 else x[0].parent for x in found]
    arms = [
        Arm(
            *about,
            finished=all((run / "result.json").exists() for run in about[-1]),
            command=read_json(about[-1][0] / "env.json")["command"],
        )
        for about in zip(short_names(places), cycle(COLOURS), places, found)
    ]
    pictures = [*left([*runs, *places]), *curves(arms)]
    page = Template(Path(__file__).with_suffix(".html").read_text(), autoescape=True).render(
        title=", ".join(short_names(runs)),
        mark=MARK,
        arms=arms,
        readable=readable,
        tables=[*accuracies(arms), ("Settings", differing(arms))],
        pictures=[(b64encode(png).decode(), words) for png, words in pictures],
    )
    write_atomic(out, page)
    return {"out": out, "pictures": len(pictures), "arms": [arm.name for arm in arms]}


def arms_in(path: Path) -> list[tuple[Path, ...]]:
    """The run at a path, or the arms below it: runs, and folders of seeds, s0, s1 and so on.

    Runs that belong to another run do not count, but those of a sweep do.
    """
    if any(read_json(env)["command"] != "sweep" for env in path.glob("env.json")):
        return [(path,)]
    folders = sorted(path.glob("*/"), key=lambda folder: (len(folder.name), folder.name))
    found = [arm for folder in folders for arm in arms_in(folder)]
    seeds = [run for run, *_ in found if run.parent == path and re.fullmatch(r"s\d+", run.name)]
    return [tuple(seeds)] if seeds and [(x,) for x in seeds] == found else found


def short_names(paths: Sequence[Path]) -> list[str]:
    """Paths without the folder that all are in: x/s0 and y/s0 for /a/x/s0 and /a/y/s0."""
    common = os.path.commonpath([path.resolve().parent for path in paths])
    return [path.resolve().relative_to(common).as_posix() for path in paths]


def accuracies(arms: Sequence[Arm]) -> Iterator[tuple[str, list[Record]]]:
    """What `evaluate` says of the arms of each task, aligned arms first."""
    tuned = [arm for arm in arms if arm.command == "finetune" and arm.finished]
    settings = {arm: read_arm(arm.path).settings for arm in tuned}
    tuned.sort(key=lambda arm: not settings[arm]["aligned_by"])
    for digest in dict.fromkeys(settings[arm]["data_sha256"] for arm in tuned):
        some = [arm for arm in tuned if settings[arm]["data_sha256"] == digest]
        rows = zip(evaluate([arm.path for arm in some]).arms, some, strict=True)
        dataset = Path(settings[some[0]]["dataset"]).name
        yield (
            f"Accuracy on {dataset} (%)",
            [r.model_dump() | {"arm": arm.name, "differs": [*r.differs]} for r, arm in rows],
        )


def differing(arms: Sequence[Arm]) -> list[Record]:
    """Settings in which arms differ, with a column for each; of a single arm all settings."""
    rows: dict[str, Record] = {}
    for arm in arms:
        for name, value in read_json(arm.runs[0] / "config.json").items():
            rows.setdefault(name, {})[arm.name] = (
                Path(value).name if isinstance(value, str) else value
            )
    return [
        {"setting": name} | {arm.name: row.get(arm.name) for arm in arms}
        for name, row in rows.items()
        if len(arms) == 1
        or (name not in FREE - {"start", "seed"} and len({*map(str, row.values())}) > 1)
    ]


def left(paths: Sequence[Path]) -> Iterator[tuple[bytes, str]]:
    """The pictures (PNG) that other commands have left, with their own descriptions."""
    for file in dict.fromkeys(file for path in paths for file in sorted(path.glob("*.png"))):
        with Image.open(file) as image:
            yield file.read_bytes(), image.info.get("Description", file.name)


def line_of(arm: Arm, key: str) -> list[tuple[int, float]]:
    """A quantity by step; of PEFT the mean over seeds, at the chosen rate once there is one."""
    lines = []
    for run in arm.runs:
        result = next(map(read_json, run.glob("result.json")), {})
        rate = f"{result['lr']:g}-s*" if "lr" in result else f"{result.get('d_lr', '*')}"
        for file in (*run.glob("metrics.jsonl"), *run.glob(f"*lr{rate}/metrics.jsonl")):
            records = map(json.loads, file.read_text().splitlines())
            lines.append({r["step"]: number(r[key]) for r in records if r.get(key)})
    # not all may be equally far
    steps = [x for first in lines[:1] for x in first if all(x in line for line in lines)]
    return [(x, fmean(line[x] for line in lines)) for x in steps]


def number(value: Any) -> float:
    """A number, the mean of a list, or the accuracy of a score."""
    value = value["accuracy"] if isinstance(value, dict) else value
    return float(fmean(value) if isinstance(value, list) else value)


def curves(arms: Sequence[Arm]) -> Iterator[tuple[bytes, str]]:
    """A picture for each quantity of each command, with a line per run."""
    for command, key in product(dict.fromkeys(arm.command for arm in arms), CURVES):
        lines = [(arm, line_of(arm, key)) for arm in arms if arm.command == command]
        if lines := [(arm, line) for arm, line in lines if line]:
            figure, axes = pyplot().subplots(figsize=(4.4, 2.9))
            for arm, line in lines:
                axes.plot(*zip(*line, strict=True), ".-", color=arm.colour, label=arm.name)
            axes.set(xlabel=f"step of {command}", ylabel=CURVES[key])
            axes.legend(fontsize=7)
            ends = [(arm.name, *line[0], *line[-1]) for arm, line in lines]
            words = [
                f"{arm} from {y:.4g} at {x} to {end:.4g} at {last}" for arm, x, y, last, end in ends
            ]
            said = f"{command}, {CURVES[key]}: {'; '.join(words)}."
            yield rendered(figure, said), said
