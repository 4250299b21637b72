"""One self-contained HTML page about runs: settings, curves, accuracies, cost, what the networks look at.

No script, no network, no font of its own: pictures are PNG in data URIs, so the file can be mailed, printed and kept.
Every picture's text alternative says in numbers what is seen. A page can be made of runs that are not finished; what
cannot be shown is said where it would stand.
"""

import base64
import html
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from pydantic import ValidationError

import bench
import evaluate as ev
import paper
import seeing
import sweep as grids
from config import (
    BACKBONES,
    AlignConfig,
    FinetuneConfig,
    Machine,
    PretrainConfig,
    RunError,
    Settings,
    UsageError,
    by_pretext,
    defaults_of,
    get,
    leaves,
)
from figures import COLOURS, draw_arms, pyplot, rendered
from loading import Report
from runtime import read_json, read_metrics, runs_in, short_names, write_atomic

GENERATOR = '<meta name="generator" content="bisslight report">'
CONFIGS: dict[str, type[Settings]] = {"pretrain": PretrainConfig, "align": AlignConfig, "finetune": FinetuneConfig}
PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
$generator
<title>$title</title>
<style>
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; background: #fff; color: #1b1b1b;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2rem 0 .5rem; padding-top: .5rem; border-top: 2px solid #0072b2; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .4rem 0; max-width: 44rem; }
nav ul { padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
a { color: #005a8c; }
.scroll, .cards { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ddd;
  min-width: 5rem; }
td:first-child { min-width: 8rem; }
td.number { white-space: nowrap; }
td.medium { min-width: 9rem; overflow-wrap: anywhere; }
td.wide { min-width: 18rem; overflow-wrap: anywhere; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
figure { margin: 0; }
.broad { overflow-x: auto; }
.broad img { min-width: 36rem; }
img { max-width: 100%; height: auto; display: block; }
figcaption, .note, summary { font-size: .875rem; color: #444; }
summary { cursor: pointer; padding: .5rem 0; }
@media screen and (max-width: 40rem) {
  .cards thead { display: none; }
  .cards tr { display: block; padding: .4rem 0; border-bottom: 1px solid #ddd; }
  .cards td { display: block; border: 0; padding: 0; }
  .cards td[data-label]::before { content: attr(data-label) ": "; color: #555; }
  .cards td:first-child { font-weight: 600; }
  .cards td:first-child::before { content: none; }
  .cards td:empty { display: none; }
}
@page { margin: 14mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 9.5pt; }
  nav { display: none; }
  .scroll, .cards { overflow: visible; }
  .pictures { grid-template-columns: 1fr 1fr; }
  table { font-size: 8pt; }
  th, td { min-width: 3rem; padding-right: .4rem; }
  td { overflow-wrap: anywhere; }
  td:first-child { min-width: 7rem; }
  td.medium, td.wide { min-width: 0; }
  h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  .broad img { min-width: 0; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
"""
)


class Group(NamedTuple):
    """A run, or the runs of one arm, read from their directories."""

    name: str
    path: Path
    kind: str  # the command that made them
    runs: list[Path]
    config: Any  # of the first
    envs: list[dict[str, Any]]
    results: list[dict[str, Any] | None]  # None: not finished
    metrics: list[list[dict[str, Any]]]

    @property
    def finished(self) -> bool:
        return all(result is not None for result in self.results)


# --- reading ---------------------------------------------------------------------------------------------------------


def arms_in(path: Path) -> list[tuple[Path, list[Path]]]:
    """(directory, its runs) of each run or arm at a path: a run, an arm's seeds, or a directory of such."""
    if (path / "env.json").exists():
        return [(path, [path])]
    if not (path / "config.json").exists() and one_arm(runs := runs_in(path)):
        return [(path, runs)]
    below = sorted((p for p in path.iterdir() if p.is_dir()), key=natural) if path.is_dir() else []
    return [arm for child in below for arm in arms_in(child)]


def natural(path: Path) -> list[str | int]:
    """Orders rank-2 before rank-16.

    >>> natural(Path("out/rank-16"))
    ['rank-', 16, '', 'rank-16']
    """
    return [*(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)), path.name]


def one_arm(runs: Sequence[Path]) -> bool:
    """Whether these are several runs that differ in nothing but seed, machine, and which align run they start from."""

    def setting(run: Path) -> dict[str, Any]:
        config = read_json(run / "config.json")
        kept = {key: value for key, value in config.items() if key not in ("seed", "start", "machine")}
        return kept | {"aligned": config.get("start") is not None}

    return len(runs) > 1 and all(setting(run) == setting(runs[0]) for run in runs)


def read_groups(paths: Sequence[Path]) -> list[Group]:
    """Everything at the given paths (UsageError where there is no run)."""
    found: dict[Path, list[Path]] = {}
    for path in paths:
        if not (arms := arms_in(path)):
            what = "is neither a run nor a directory of runs" if path.exists() else "there is no such run directory"
            raise UsageError(f"{path}: {what}")
        found |= {arm.resolve(): runs for arm, runs in arms}
    return [read_group(name, path, found[path]) for name, path in zip(short_names([*found]), found, strict=True)]


def read_group(name: str, path: Path, runs: list[Path]) -> Group:
    """One run or arm (UsageError where it cannot be read)."""
    envs = [read_json(run / "env.json") for run in runs]
    kind = envs[0]["command"]
    try:
        config = CONFIGS[kind].model_validate(read_json(runs[0] / "config.json"))
    except (KeyError, ValidationError) as error:
        raise UsageError(f"{runs[0]}: its settings are not those of this version, run it again") from error
    results = [read_json(run / "result.json") if (run / "result.json").exists() else None for run in runs]
    metrics = [[*read_metrics(run / "metrics.jsonl")] for run in runs]
    return Group(name, path, kind, runs, config, envs, results, metrics)


# --- HTML ------------------------------------------------------------------------------------------------------------


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def cell(value: Any) -> str:
    """A value as HTML: numbers short, everything else escaped."""
    if isinstance(value, Markup):
        return str(value)
    return html.escape("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], cards: bool = False) -> Markup:
    """A table in a box of its own. Where the screen is narrow it scrolls there or, as cards, has a line a cell."""

    def td(value: Any, name: str) -> str:
        long = "wide" if len(str(value)) > 60 else "medium" if len(str(value)) > 14 else ""
        kind = "number" if isinstance(value, int | float) else long
        label = f' data-label="{html.escape(name)}"' if cards and name else ""
        return f'<td class="{kind}"{label}>{cell(value)}</td>' if kind else f"<td{label}>{cell(value)}</td>"

    top = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "\n".join(f"<tr>{''.join(map(td, row, head))}</tr>" for row in rows)
    inner = f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table>"
    box = "cards" if cards else "scroll"
    return Markup(f'<div class="{box}" tabindex="0">{inner}</div>')  # a box that scrolls must be reachable by keys


def picture(png: bytes, alt: str, caption: str) -> Markup:
    """A PNG inside the page. `alt` says what is seen, in numbers."""
    data = base64.b64encode(png).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'
    return Markup(f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>")


def broad(drawn: Markup) -> Markup:
    """A picture of many small ones, in a box in which it scrolls where the screen is narrow."""
    return Markup(f'<div class="broad" tabindex="0">{drawn}</div>')


def side_by_side(pictures: Iterable[Markup]) -> Markup:
    return Markup(f'<div class="pictures">{"".join(pictures)}</div>')


def paragraph(text: str) -> Markup:
    return Markup(f'<p class="note">{html.escape(text)}</p>')


# --- curves ----------------------------------------------------------------------------------------------------------

Points = list[tuple[float, float]]
Lines = dict[str, list[Points]]  # name -> a curve a run


def curves(lines: Lines, xlabel: str, ylabel: str, caption: str, unit: str = "run") -> Markup | None:
    """Every run thin, their mean thick; None where there is no point."""
    lines = {name: kept for name, runs in lines.items() if (kept := [points for points in runs if points])}
    if not lines:
        return None
    figure, axes = pyplot().subplots(figsize=(4.4, 2.9))
    said = []
    for k, (name, runs) in enumerate(lines.items()):
        colour, style = COLOURS[k % len(COLOURS)], ("-", "--", ":")[k % 3]
        for points in runs if len(runs) > 1 else ():
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.6, alpha=0.35)
        middle = average(runs)
        axes.plot(
            *zip(*middle, strict=True), color=colour, linestyle=style, label=name, marker="." if len(middle) < 3 else ""
        )
        values = [y for _, y in middle]
        ends = f"{values[0]:.4g} at {middle[0][0]:g}"
        if len(middle) > 1:
            ends = f"from {ends} to {values[-1]:.4g} at {middle[-1][0]:g}, lowest {min(values):.4g}"
            ends += f", highest {max(values):.4g}"
        said.append(f"{name} {ends}")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    n = max(len(runs) for runs in lines.values())
    how = f"mean of {n} {unit}s" if n > 1 else f"one {unit}"
    return picture(rendered(figure), f"{ylabel} against {xlabel}, {how}: {'; '.join(said)}.", f"{caption} ({how})")


def average(runs: Sequence[Points]) -> Points:
    """The mean of curves, at the abscissae that all of them have.

    >>> average([[(1, 2.0), (2, 4.0)], [(1, 4.0)]])
    [(1, 3.0)]
    """
    by_x = [dict(points) for points in runs]
    return [(x, mean(run[x] for run in by_x)) for x in by_x[0] if all(x in run for run in by_x)] or list(runs[0])


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def series(group: Group, value: Callable[[dict[str, Any]], Any]) -> list[Points]:
    """A curve a run, of what `value` finds in a record: a number, the mean of a list, or nothing."""
    out = []
    for records in group.metrics:
        found = [(record["step"], value(record)) for record in records]
        out.append([(x, mean(y) if isinstance(y, list) else y) for x, y in found if y not in (None, [])])
    return out


def align_curves(group: Group) -> list[Markup | None]:
    """Both levels, alternation by alternation."""

    def of(key: str) -> list[Points]:
        return series(group, lambda record: record.get(key))

    def validation(level: str) -> list[Points]:
        return series(group, lambda record: (record.get(f"val_{level}") or {}).get("accuracy"))

    x = "alternation"
    probe = [records[0]["probe_val"]["accuracy"] for records in group.metrics if records and "probe_val" in records[0]]
    probed = f", after a linear probe of {mean(probe):.1f} %" if probe else ""
    at_P, at_D = of("loss_D_at_P"), of("loss_D_at_D")
    inverse = {"|q|/|g|": of("q_over_g"), "cosine of q and g": of("cosine")}
    accuracies = {"θ_P": validation("P"), "θ_D": validation("D")}
    return [
        curves({"L^P": of("loss_P")}, x, "L^P", "Lower level: pretext loss at θ_P"),
        curves({"at θ_P": at_P, "at θ_D": at_D}, x, "L^D", "Upper level: downstream loss at θ_P and at θ_D"),
        curves({"distance": of("distance")}, x, "|θ_P − θ_D|", "Coupling: how far the two levels are apart"),
        curves(inverse, x, "ratio, cosine", "The inverse of line 13; 1 and 1 would mean that it had no say"),
        curves(accuracies, x, "validation (%)", f"Validation of both levels{probed}"),
    ]


def finetune_curves(group: Group) -> list[Markup | None]:
    """Loss and validation by epoch: the chosen rate's seeds, all there are where none is chosen yet."""
    losses: list[Points] = []
    scores: list[Points] = []
    for records, result in zip(group.metrics, group.results, strict=True):
        for unit in records:
            if result is None or unit["lr"] == result["lr"]:
                losses.append([(one["step"], one["loss"]) for one in unit["curve"]])
                scores.append([(one["step"], one["val"]["accuracy"]) for one in unit["curve"] if one["val"]])
    return [
        curves({"loss": losses}, "epoch", "training loss", "PEFT: mean loss of an epoch", "seed"),
        curves({"validation": scores}, "epoch", "validation (%)", "PEFT: validation; the best epoch is kept", "seed"),
    ]


def pretrain_curves(group: Group) -> list[Markup | None]:
    return [curves({"loss": series(group, lambda record: record.get("loss"))}, "epoch", "loss", "Pretext loss")]


CURVES = {"align": align_curves, "finetune": finetune_curves, "pretrain": pretrain_curves}


# --- sections --------------------------------------------------------------------------------------------------------


def accuracy(groups: Sequence[Group]) -> list[Markup]:
    """A table and a picture for each task that finetune runs were tested on; aligned arms come first."""
    out: list[Markup] = []
    tasks: dict[str, list[ev.Arm]] = {}
    finished = [group for group in groups if group.kind == "finetune" and group.finished]
    for group in sorted(finished, key=lambda group: group.config.start is None):
        arm = ev.read_arm(group.path)._replace(name=group.name)
        tasks.setdefault(str(arm.task), []).append(arm)
    for arms in tasks.values():
        rows = ev.table(arms)
        assert arms[0].task is not None
        out.append(Markup(f"<h3>{html.escape(str(arms[0].task['dataset']).rpartition('/')[2])}</h3>"))
        out.append(table([*arm_cells(rows[0])], [[*arm_cells(row).values()] for row in rows], cards=True))
        out += map(paragraph, ev.differences(rows))
        figure, axes = pyplot().subplots(figsize=(max(3.6, 1.8 + 1.2 * len(arms)), 3.6))
        metric = arms[0].metric
        draw_arms(axes, {arm.name: arm.accuracies for arm in arms}, metric, "every seed, and the mean")
        said = "; ".join(
            f"{row['arm']} {row['mean']:.2f} %, from {min(row['accuracies']):.2f} to {max(row['accuracies']):.2f}"
            for row in rows
        )
        drawn = picture(rendered(figure), f"Test {metric} of each seed: {said}.", f"Test {metric}")
        out.append(side_by_side([drawn]) if len(arms) <= 3 else broad(drawn))
    return out


def arm_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `evaluate`'s table, by column."""
    versus, said = row["first_minus_this"], row["paper"]
    spread = f" ± {row['std']:.2f}" if row["std"] is not None else ""
    return {
        "arm": row["arm"],
        "seeds": row["seeds"],
        "one seed is": row["unit"],
        f"test {row['metric']} %": f"{row['mean']:.2f}{spread}",
        "first − this": f"{versus['difference']:+.2f}" if versus else "",
        "p, two-sided": ev.told(ev.Comparison(**versus)) if versus else None,
        "the paper": f"{said['mean']} ± {said['std']} ({said['source']})" if said else "no figure of this setting",
    }


def sweeps(paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """The table of each sweep among the given directories, as far as it has come."""
    out = {}
    for path in paths:
        if (path / "config.json").exists() and "swept" in read_json(path / "config.json"):
            try:
                out[path.resolve()] = grids.again(path)
            except UsageError:  # its weights are not here, say: then as it was last written down
                if not (path / "sweep.json").exists():
                    raise
                out[path.resolve()] = read_json(path / "sweep.json")
    return out


def sweep_section(path: Path, result: Mapping[str, Any]) -> list[Markup]:
    """The curve of a sweep, its points, and those that are not there."""
    lists = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in result["swept"].items())
    metric = next((row["metric"] for row in result["rows"]), "accuracy")
    rows = []
    for row in result["rows"]:
        spread = f" ± {row['std']:.2f}" if row["std"] is not None else ""
        versus, said = row["minus_direct"] or {"difference": None, "p": None}, row["paper"]
        difference = "" if versus["difference"] is None else f"{versus['difference']:+.2f}"
        where = [str(row["point"].get(name, "any")) for name in result["swept"]]
        published = f"{said['mean']} ± {said['std']} ({said['source']})" if said else "no figure of this setting"
        rows.append([*where, row["arm"], f"{row['mean']:.2f}{spread}", difference, versus["p"], published])
    n = len(result["swept"])
    points = "; ".join(f"{' '.join(row[:n])}, {row[n]}: {row[n + 1]} %" for row in rows) or "No point is finished"
    caption = f"Sweep {path.name}: {lists}; test {metric}, mean ± standard deviation over PEFT seeds"
    drawn = picture(rendered(grids.draw(dict(result))), f"Test {metric} over {lists}. {points}.", caption)
    head = [*result["swept"], "arm", f"test {metric} %", "minus direct", "p, two-sided", "the paper"]
    out = [drawn, table(head, rows)]
    out += [paragraph(f"Diverged: {name}: {why}") for name, why in result["diverged"].items()]
    return [*out, paragraph(f"Not finished: {', '.join(result['missing'])}")] if result["missing"] else out


def benches(results: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """What an alternation costs by model size: the picture of `bench`, its rows, and the paper's memory."""
    rows, said, ratios = [], [], []
    for name, made in zip(bench.names(results), results, strict=True):
        for row in made["rows"]:
            if "failed" in row:
                rows.append([name, row["mode"], row["method"], row["failed"], "", "", "", ""])
                continue
            published = memory_of(row["method"], made["config"]["backbone"])
            seconds, peak = f"{row['seconds']:.4g}", "" if row["peak_GB"] is None else f"{row['peak_GB']:.2f}"
            speed = f"{row['images_per_s']:.4g}", f"{row['TFLOP_per_s']:.4g}"
            rows.append([name, row["mode"], row["method"], seconds, peak, published, *speed])
            said.append(f"{name} {row['method']} ({row['mode']}) {seconds} s, {peak or 'unknown'} GB")
        ratios.append(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in made["ratios"].items()))
    drawn = picture(rendered(bench.draw(results)), f"An alternation: {'; '.join(said)}.", "Cost of an alternation")
    head = ["bench", "setting", "method", "seconds", "peak GB", "the paper's GB", "images/s", "TFLOP/s"]
    note = "The paper's peaks: A40 GPUs, batches 256 and 64, sums over its GPUs (tab:memory_single_gpu)."
    return [drawn, table(head, rows), *map(paragraph, ratios), paragraph(note)]


def memory_of(method: str, backbone: str) -> str:
    """The paper's peak memory in GB, and on how many GPUs; nothing where it gives none."""
    found = paper.memory_of(method, backbone)
    return f"{found[0]} ({found[1]} GPU{'s' if found[1] > 1 else ''})" if found else ""


def defaults(config: Any) -> dict[str, Any]:
    """Each setting's default for this backbone, dataset and pretext task; settings without one are left out."""
    model = type(config)
    out = {leaf.name: leaf.field.default for leaf in leaves(model) if not leaf.field.is_required()}
    out |= by_pretext(config.model.pretext, model, config.model.backbone)
    of_backbone, quilts = defaults_of(config.model.backbone), "quilts" in (config_data(config), None)
    filled = {"rank": of_backbone.rank, "drop_path": of_backbone.drop_path, "augment": "none" if quilts else "crop"}
    filled["pool"] = "quilts" if quilts else "imagenet"
    if model is not PretrainConfig:
        filled["alpha"] = float(config.model.rank or of_backbone.rank)
    if model is FinetuneConfig:
        filled["pool"] = config.data.pool  # it has none of its own, and what an align run had does not matter
    return out | {name: value for name, value in filled.items() if name in out and out[name] is None}


def config_data(config: Any) -> str:
    """The labelled task, or what is pretrained on."""
    return str(config.pool if isinstance(config, PretrainConfig) else config.data.dataset)


def settings(group: Group) -> list[Markup]:
    """Values that are not the default first, then, folded, the others; each with where it and its default come from."""
    usual, sources = defaults(group.config), group.envs[0].get("sources", {})
    own: list[list[Any]] = []
    rest: list[list[Any]] = []
    seeds = ", ".join(str(read_json(run / "config.json")["seed"]) for run in group.runs)
    for leaf in leaves(type(group.config)):
        meaning, _, source = (leaf.field.description or "").partition(" [")
        value = seeds if leaf.name == "seed" else get(group.config, leaf.path)
        default = usual.get(leaf.name, "none, must be given")
        by = sources.get(leaf.name, "")
        row = [{"start": "from"}.get(leaf.name, leaf.name), str(value), by, str(default), source.rstrip("]"), meaning]
        ours = leaf.path[0] != "machine" and str(value) != str(default)
        (own if ours else rest).append(row)
    head = ["setting", "value", "set by", "default", "the default's source", "meaning"]
    what = f"{len(rest)} settings with their default, and those of the machine"
    folded = f"<details><summary>{what}</summary>{table(head, rest, cards=True)}</details>"
    return [Markup("<h3>Settings that differ from the default</h3>"), table(head, own, cards=True), Markup(folded)]


def cost(group: Group) -> Markup:
    """Seconds by phase of an alternation, CPU seconds, and the machine."""
    rows: list[tuple[str, Any]] = []
    phases = [
        record["seconds"] for records in group.metrics for record in records if group.kind == "align" and record["step"]
    ]
    if phases:
        each = {phase: mean(one[phase] for one in phases) for phase in phases[0]}
        total = sum(each.values())
        rows += [(f"seconds of an alternation, {k}", f"{v:.4g} ({100 * v / total:.1f} %)") for k, v in each.items()]
        rows.append(("seconds of an alternation", f"{total:.4g}, mean of {len(phases)}; validation not counted"))
    done = [result for result in group.results if result]
    cpu = [x for result in done for x in numbers(result["cpu_seconds"])]
    if cpu:
        what = "seed" if group.kind == "finetune" else "run"
        rows.append(
            (f"CPU seconds a {what}", f"{mean(cpu):.1f}, mean of {len(cpu)}" if len(cpu) > 1 else f"{cpu[0]:.1f}")
        )
    model = group.config.model
    if group.kind != "pretrain" and model.backbone in BACKBONES and model.rank:
        arch = BACKBONES[model.backbone].arch
        said = f"{4 * model.rank * arch.dim * arch.depth:,}"
        if model.backbone in paper.LORA_MILLIONS and model.rank in paper.LORA_RANKS:
            millions = paper.LORA_MILLIONS[model.backbone][paper.LORA_RANKS.index(model.rank)]
            said += f"; the paper: {millions} M (tab:lora_param_count)"
        rows.append(("LoRA parameters", said))
    if group.kind != "pretrain" and (
        published := memory_of("mfac" if group.kind == "align" else "peft", model.backbone)
    ):
        rows.append(("peak GPU memory in the paper, GB", f"{published}; `bench` measures it here"))
    env = group.envs[0]
    rows += [("machine", env["machine"]), ("GPU", env["gpu"] or "none"), ("Python", env["python"])]
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in env["versions"].items()))]
    rows += [("commit", env["commit"] or "not a checkout"), ("started", env["started"])]
    digests = {key.partition("_")[0]: str(env[key])[:12] for key in ("weights_sha256", "data_sha256") if key in env}
    rows += [("digests", ", ".join(f"{name} {digest}" for name, digest in digests.items()))] if digests else []
    return table(["what", "value"], rows, cards=True)


def numbers(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def rates(group: Group) -> list[Markup]:
    """The grid of learning rates, where there was one."""
    grid = [(float(lr), vals) for result in group.results if result and group.kind == "finetune"
            for lr, vals in result["grid"].items()]  # fmt: skip
    if len({lr for lr, _ in grid}) < 2:
        return []
    chosen = {result["lr"] for result in group.results if result}
    rows = [
        (
            f"{lr:g}",
            ", ".join("diverged" if val is None else f"{val:.2f}" for val in vals),
            "chosen" if lr in chosen else "",
        )
        for lr, vals in grid
    ]
    return [Markup("<h3>Learning rates</h3>"), table(["rate", "best validation % of each seed tried", ""], rows)]


def section(group: Group, number: int) -> Markup:
    """All about one run or arm."""
    n, seeds = len(group.runs), ""
    if group.kind == "finetune" and group.finished:
        seeds = f", {sum(len(result['test']) for result in group.results if result)} seeds"
    made = f"{group.kind}, {n} run{'s' if n > 1 else ''}{seeds}"
    what = f"{made}: {group.config.model.backbone}, {config_data(group.config)}"
    parts = [Markup(f'<h2 id="run{number}">{html.escape(group.name)}</h2>'), paragraph(what)]
    if unfinished := [run.name for run, result in zip(group.runs, group.results, strict=True) if result is None]:
        parts.append(paragraph(f"Not finished: {', '.join(unfinished)}; the curves are what there is so far."))
    drawn = [curve for curve in CURVES[group.kind](group) if curve is not None]
    parts.append(side_by_side(drawn) if drawn else paragraph("No curves: nothing has been recorded yet."))
    return Markup(
        "\n".join([*parts, *rates(group), *settings(group), Markup("<h3>Cost and machine</h3>"), cost(group)])
    )


# --- what the networks look at ---------------------------------------------------------------------------------------

MOST_ARMS, MOST_MODELS = 4, 8  # rows of the rollout, models of the similarities


class Looking(NamedTuple):
    """How much is looked at, and where."""

    images: int = 6  # of a rollout; 0: neither rollout nor similarity
    limit: int = 1000  # images of a similarity
    machine: Machine = Machine()


def looks(groups: Sequence[Group], how: Looking) -> list[Markup]:
    """Attention rollout and similarity of the finished runs, a section for those of the same weights and data."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in (group for group in groups if group.kind != "pretrain" and group.finished):
        alike.setdefault((group.envs[0]["weights_sha256"], group.envs[0]["data_sha256"]), []).append(group)
    out: list[Markup] = []
    for some in alike.values():
        arms = sorted((g for g in some if g.kind == "finetune"), key=lambda group: group.config.start is not None)
        title = f"What the networks look at: {some[0].config.data.dataset.rpartition('/')[2]}"
        out.append(Markup(f"<h2>{html.escape(title)}</h2>"))
        for part, shown, most in ((rollout, arms, MOST_ARMS), (similarity, some, MOST_MODELS)):
            out += [or_why(part, shown[:most], how)] if shown else []
            if len(shown) > most:
                names = ", ".join(group.name for group in shown[most:])
                out.append(paragraph(f"Left out, to keep the picture legible: {names}."))
    return out


def last_point(result: Mapping[str, Any]) -> list[str]:
    """The runs of a sweep's last finished aligned point: align, PEFT after it, PEFT without."""
    done = [row for row in result["rows"] if row.get("direct")]
    return [done[-1]["start"], done[-1]["run"], done[-1]["direct"]] if done else []


def or_why(part: Callable[[Sequence[Group], Looking], Markup], groups: Sequence[Group], how: Looking) -> Markup:
    """A part of the page, or a line on why it is not there: weights or data that are gone stop no report."""
    try:
        have_weights(groups)
        return part(groups, how)
    except (UsageError, RunError) as error:
        return paragraph(f"No {part.__name__}: {error}")


def have_weights(groups: Sequence[Group]) -> None:
    """A report downloads nothing."""
    for group in groups:
        if not group.config.model.weights.exists():
            raise UsageError(f"the weights {group.config.model.weights} are not here")


def rollout(arms: Sequence[Group], how: Looking) -> Markup:
    """Where each arm's first model looks, on the same validation images."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rollout.png"
        about = seeing.rollout([group.path for group in arms], how.images, file, machine=how.machine)
        png = file.read_bytes()
    images = about["images"]
    said = []
    for name, model in about["looked_at"].items():
        right = sum(one["predictions"][name] == one["label"] for one in images)
        peak = f"its strongest patch has on average {model['peak']:.2f} times an even share"
        said.append(f"{model['what']} names {right} of {len(images)} right, {peak}")
    labels = ", ".join(one["label"] for one in images)
    alt = f"Attention rollout on {len(images)} validation images ({labels}), a row a model: {'; '.join(said)}."
    caption = "Attention rollout: input, then each model; above each map its prediction, one colour scale a column"
    return broad(picture(png, alt, caption))


def similarity(groups: Sequence[Group], how: Looking) -> Markup:
    """CKA and RSA between the pretrained network and the first run of each group."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "similarity.png"
        about = seeing.similarity([group.path for group in groups], file, limit=how.limit, machine=how.machine)
        png = file.read_bytes()
    first, *others = about["models"]
    said = [f"{name} CKA {about['cka'][0][i]:.3f}, RSA {about['rsa'][0][i]:.3f}" for i, name in enumerate(others, 1)]
    alt = f"Similarity to the {first} network on {about['images']} validation images: {'; '.join(said)}."
    tables = []
    for key in ("cka", "rsa"):
        rows = [[name, *row] for name, row in zip(about["models"], about[key], strict=True)]
        tables.append(table([key.upper(), *about["models"]], rows))
    published = "; ".join(f"{a} and {b} {c:.2f}, {r:.2f}" for (a, b), (c, r) in paper.SIMILARITY.items())
    note = paragraph(f"The paper's CKA and RSA, ViT-B/16, mean of six datasets: {published}.")
    return Markup(broad(picture(png, alt, "Linear CKA and RSA of what enters the head")) + "".join(tables) + note)


# --- the page --------------------------------------------------------------------------------------------------------


def check_out(out: Path) -> None:
    """Refuse (UsageError), before any work, a page that could not be written, or a file that is no page of ours."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: a report is an .html file")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    if out.exists() and (not out.is_file() or GENERATOR not in out.read_text(errors="replace")[:1000]):
        raise UsageError(f"--out {out}: is there already and is not a report, choose another --out")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out}: the folder {out.parent} cannot be written to")


def report(paths: Sequence[Path], out: Path, tell: Report, how: Looking = Looking()) -> dict[str, Any]:  # noqa: B008
    """Write the page about all runs at the paths; returns what is on it."""
    check_out(out)
    pyplot()
    measured = [path for path in paths if (path / "bench.json").is_file()]
    runs = [path for path in paths if path not in measured]
    groups = read_groups(runs)
    tables = sweeps(runs)
    last = {path / name for path, result in tables.items() for name in last_point(result)}
    swept = [group for group in groups if any(path in group.path.parents for path in tables)]
    single = [group for group in groups if group not in swept]
    count = f"Runs: {sum(len(group.runs) for group in groups)}, in groups of the same settings: {len(groups)}."
    body: list[Markup] = [paragraph(count)] if groups else []
    links = "".join(f'<li><a href="#run{i}">{html.escape(group.name)}</a></li>' for i, group in enumerate(groups))
    body += [Markup(f'<nav aria-label="runs"><ul>{links}</ul></nav>')] if len(groups) > 1 else []
    body += [Markup("<h2>Sweep</h2>")] if tables else []
    body += [part for path, result in tables.items() for part in sweep_section(path, result)]
    if found := accuracy(single):
        body += [Markup("<h2>Accuracy</h2>"), *found]
    body += [Markup("<h2>What an alternation costs</h2>"), *benches(bench.read(measured))] if measured else []
    if groups:
        tell("report", 0, len(groups), "rollout and similarity" if how.images else "")
    body += looks([*single, *(group for group in swept if group.path in last)], how) if how.images else []
    if how.images and swept:
        body.append(paragraph("Of a sweep, its last finished point; `evaluate --rollout` and `--similarity` show any."))
    for i, group in enumerate(groups):
        tell("report", i + 1, len(groups), group.name)
        body.append(section(group, i))
    names = ", ".join(dict.fromkeys(path.resolve().name for path in paths))
    page = PAGE.substitute(generator=GENERATOR, title=html.escape(f"BiSSLight: {names}"), body="\n".join(body))
    write_atomic(out, page)
    about = {"groups": [{"name": g.name, "kind": g.kind, "runs": len(g.runs), "finished": g.finished} for g in groups]}
    return {"out": str(out), "bytes": len(page.encode()), "pictures": page.count("<img "), **about}
