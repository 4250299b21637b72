"""One HTML page about runs: accuracies, curves, pictures, settings.

It shows what the run directories hold and computes nothing anew: for a rollout, `bisslight evaluate
RUN --rollout 6` first. The page is one file without scripts that loads nothing. An arm has one name
and one colour throughout, and every picture says in words and numbers what it shows.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Environment
from PIL import Image

from commands import AlignConfig, FinetuneConfig, differences
from config import UsageError
from evaluate import FREE, Row, evaluate, read_arm
from extras.figures import COLOURS, MARK, Drawn, arms, check_out, pyplot, rendered, short_names
from extras.settings import PretrainConfig
from run import read_json, reading, write_atomic
from screen import readable

KINDS: Any = {"pretrain": PretrainConfig, "align": AlignConfig, "finetune": FinetuneConfig}
PICTURES = (
    "demo.png",
    "sweep.png",
    "cost.png",
    "rollout.png",
    "similarity.png",
)  # of other commands
CURVES: dict[
    str, dict[str, tuple[str, ...]]
] = {  # by command: what a picture shows, and the keys of metrics.jsonl
    "pretrain": {"pretext loss": ("loss",)},
    "align": {
        "pretext loss at θ_P": ("loss_P",),
        "downstream loss": ("loss_D_at_D", "loss_D_at_P"),
        "|θ_P − θ_D|": ("distance",),
        "q against g: |q|/|g| and cosine": ("q_over_g", "cosine"),
        "validation (%)": ("val_D", "val_P"),
    },
    "finetune": {"training loss": ("loss",), "validation (%)": ("val",)},
}
DASHED = ("loss_D_at_P", "cosine", "val_P")  # beside a line of the same colour


class Group(NamedTuple):
    """A run, or the runs of one arm, one a seed."""

    name: str
    colour: str
    path: Path
    runs: list[Path]
    command: str
    config: dict[str, Any]  # of the first run
    results: list[dict[str, Any]]  # {} where it is not finished


class Section(NamedTuple):
    """A part of the page."""

    title: str
    text: Sequence[str] = ()
    pictures: Sequence[tuple[str, str]] = ()  # (PNG in base64, what it shows in words)
    rows: Sequence[Mapping[str, Any]] = ()  # a table


def report(runs: Sequence[Path], out: Path | None = None) -> dict[str, Any]:
    """Write the page about all runs at these paths; returns what is on it (UsageError)."""
    out = out or Path("report.html")
    check_out("--out", out, [".html"])
    pyplot()
    every = read_groups(runs)
    sections = [*tables(every), *pictures(runs, every)]
    groups = [group for group in every if group.command in KINDS]
    sections = [*accuracies(groups), *sections]
    for command in CURVES:
        sections.append(curves(command, [g for g in groups if g.command == command]))
    sections += [settings(groups), made(groups)]
    environment = Environment(autoescape=True)
    environment.filters |= {"readable": readable, "columns": columns}
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text())
    title = ", ".join(short_names(runs))
    page = template.render(title=title, mark=MARK, groups=groups, sections=sections)
    write_atomic(out, page)
    about = [{"name": g.name, "command": g.command, "runs": len(g.runs)} for g in every]
    return {"out": str(out), "pictures": page.count("<img "), "arms": about}


# --- reading --------------------------------------------------------------------------------------


def arms_in(path: Path) -> list[list[Path]]:
    """The runs at a path; the seeds of one arm together."""
    if (path / "config.json").exists():
        return [[path]]
    folders = [child for child in path.glob("*") if child.is_dir()]
    folders.sort(key=lambda folder: (len(folder.name), folder.name))
    if len(folders) > 1 and len({*map(kind_of, folders)}) == 1:
        return [folders]
    return [arm for folder in folders for arm in arms_in(folder)]


def kind_of(folder: Path) -> str:
    """What the seeds of one arm have in common; of a folder that is no run its name."""
    if not (folder / "config.json").exists():
        return folder.name
    config = read_json(folder / "config.json")
    shared = {key: value for key, value in config.items() if key not in FREE}
    return f"{config.get('start') is None} {sorted(shared.items())}"


def read_groups(paths: Sequence[Path]) -> list[Group]:
    """All runs at these paths (UsageError where there is none)."""
    found = [runs for path in paths for runs in arms_in(path)]
    if not found:
        raise UsageError(f"{paths[0]}: is neither a run nor a directory of runs")
    places = [runs[0].parent if len(runs) > 1 else runs[0] for runs in found]
    groups = []
    for i, (name, runs) in enumerate(zip(short_names(places), found, strict=True)):
        command = read_json(runs[0] / "env.json")["command"]
        config = read_json(runs[0] / "config.json")
        files = [run / "result.json" for run in runs]
        results = [read_json(file) if file.exists() else {} for file in files]
        colour = COLOURS[i % len(COLOURS)]
        groups.append(Group(name, colour, places[i], runs, command, config, results))
    return groups


def metrics(run: Path, result: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The records of a run, or of the trials of its chosen rate; of all where none is chosen."""
    rate = f"{result['lr']:g}-s*" if "lr" in result else f"{result.get('d_lr', '*')}"
    for file in [*run.glob("metrics.jsonl"), *sorted(run.glob(f"*lr{rate}/metrics.jsonl"))]:
        yield [*map(json.loads, file.read_text().splitlines())]


# --- sections -------------------------------------------------------------------------------------


def accuracies(groups: Sequence[Group]) -> Iterator[Section]:
    """What `evaluate` says of the arms of each task, aligned arms first."""
    tasks: dict[str, list[Group]] = {}
    tuned = [group for group in groups if group.command == "finetune" and all(group.results)]
    for group in sorted(tuned, key=lambda group: group.results[0]["aligned_by"] is None):
        tasks.setdefault(str(read_arm(group.path).task), []).append(group)
    for some in tasks.values():
        found = evaluate([group.path for group in some])
        named = zip(found.arms, some, strict=True)
        rows = [row._replace(arm=group.name) for row, group in named]
        drawn = arms(rows, [group.colour for group in some])
        title = f"Accuracy on {Path(some[0].config['dataset']).name}"
        text = [headline(rows), *found.differences]
        yield Section(title, text, [encoded(drawn)], [*map(cells, rows)])


def headline(rows: Sequence[Row]) -> str:
    """The first arm, and how it compares with the others, in a sentence."""
    said = [f"{rows[0].arm}: {rows[0].mean:.1f} %"]
    for row in rows:
        if versus := row.first_minus_this:
            p = f"p = {versus.p:.2g}" if versus.p is not None else versus.no_p
            said.append(f"{versus.difference:+.1f} points against {row.arm} ({p})")
    return "; ".join(said)


def cells(row: Row) -> dict[str, Any]:
    """A row of the table of accuracies."""
    versus, paper = row.first_minus_this, row.paper
    return {
        "arm": row.arm,
        "seeds": row.seeds,
        "one seed is": row.unit,
        f"test {row.metric} %": f"{row.mean:.2f}" + (f" ± {row.std:.2f}" if row.std else ""),
        "first − this": versus and f"{versus.difference:+.2f}",
        "p, two-sided": versus and (versus.no_p if versus.p is None else versus.p),
        "in the paper": paper and f"{paper.mean} ± {paper.std}",
    }


def encoded(drawn: Drawn) -> tuple[str, str]:
    """A picture for the page: a PNG in base64, and what it shows."""
    return base64.b64encode(rendered(drawn)).decode(), drawn[1]


def pictures(paths: Sequence[Path], groups: Sequence[Group]) -> Iterator[Section]:
    """The pictures that other commands have left, with their own descriptions."""
    places = dict.fromkeys([*paths, *(run for group in groups for run in group.runs)])
    files = [place / name for place in places for name in PICTURES if (place / name).exists()]
    for file, name in zip(files, short_names(files), strict=True):
        with Image.open(file) as image:
            words = str(image.info.get("Description", "a picture of another program"))
        yield Section(name, [words], [(base64.b64encode(file.read_bytes()).decode(), words)])


def tables(groups: Sequence[Group]) -> Iterator[Section]:
    """The tables of sweeps and benches."""
    for group in groups:
        for file in [*group.path.glob("sweep.json"), *group.path.glob("result.json")]:
            found = read_json(file)
            left = [f"not finished: {name}" for name in found.get("missing", ())]
            left += [f"{name}: {why}" for name, why in found.get("diverged", {}).items()]
            yield Section(group.name, left, rows=found.get("rows", ()))


def curves(command: str, groups: Sequence[Group]) -> Section:
    """A picture a quantity, with a line an arm: the mean of its runs."""
    shown = []
    for label, keys in CURVES[command].items():
        lines = [(group, key, mean_line(group, key)) for group in groups for key in keys]
        if lines := [line for line in lines if line[2]]:
            shown.append(encoded(draw(label, lines)))
    return Section(f"Curves of {command}", pictures=shown)


def draw(label: str, lines: Sequence[tuple[Group, str, list[tuple[int, float]]]]) -> Drawn:
    """One quantity against alternation or epoch."""
    figure, axes = pyplot().subplots(figsize=(4.4, 2.9))
    said = []
    for group, key, line in lines:
        style = "--" if key in DASHED else "-"
        name = f"{group.name} {key}"
        axes.plot(*zip(*line, strict=True), style, color=group.colour, label=name)
        (x, y), (x_, y_) = line[0], line[-1]
        said.append(f"{name} from {y:.4g} at {x} to {y_:.4g} at {x_}")
    axes.set(xlabel="alternation" if lines[0][0].command == "align" else "epoch", ylabel=label)
    axes.legend(fontsize=7)
    return figure, f"{label}: {'; '.join(said)}."


def mean_line(group: Group, key: str) -> list[tuple[int, float]]:
    """A quantity by step, the mean over an arm's runs at the steps that all of them have."""
    lines = [
        {record["step"]: number(record[key]) for record in records if record.get(key)}
        for run, result in zip(group.runs, group.results, strict=True)
        for records in metrics(run, result)
    ]
    steps = [x for x in lines[0] if all(x in line for line in lines)] if lines else []
    return [(x, fmean(line[x] for line in lines)) for x in steps]


def number(value: Any) -> float:
    """A number, the mean of a list, or the accuracy of a score."""
    if isinstance(value, dict):
        return float(value["accuracy"])
    return fmean(value) if isinstance(value, list) else float(value)


def settings(groups: Sequence[Group]) -> Section:
    """Settings that are not the paper's, or not the default, in some arm; a column an arm."""
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        kind = KINDS[group.command]
        with reading(group.runs[0] / "config.json", "run it again with this version"):
            config = kind(**group.config)
        for line in differences(config, dict.fromkeys(kind.model_fields, "run")):
            name, usual, value = line["setting"], line["paper"], line["value"]
            own = rows.setdefault(name, {"setting": name, "default": usual})
            own[group.name] = value.name if isinstance(value, Path) else value
    return Section("Settings that are not the default", rows=[*rows.values()])


def made(groups: Sequence[Group]) -> Section:
    """Which runs there are, what they cost, and what they were made with."""
    rows = []
    for group in groups:
        env = read_json(group.runs[0] / "env.json")
        env |= env.get("about", {}) | env.get("machines", [{}])[0]
        left = [run.name for run, found in zip(group.runs, group.results, strict=True) if not found]
        row = {"arm": group.name, "command": group.command, "runs": len(group.runs)}
        row |= {"not finished": ", ".join(left), "torch": env["versions"]["torch"]}
        row |= {"CPU seconds": [found["cpu_seconds"] for found in group.results if found]}
        row |= {key: env.get(key) for key in ("machine", "gpu", "started")}
        digests = ("commit", "weights_sha256", "data_sha256")
        rows.append(row | {key: str(env.get(key, ""))[:12] for key in digests})
    return Section("How the runs were made", rows=rows)


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of a table that have a value in some row."""
    empty: Any = (None, "", [], {})
    return [*dict.fromkeys(key for row in rows for key in row if row[key] not in empty)]
