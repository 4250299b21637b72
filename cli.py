"""The command line: parses, calls one function of `stages`, prints. rich, exit codes and signals live only here.

Flags are made from the settings in `config`, one a leaf, so a setting is written once. Flag over file over default.
torch is imported inside commands, which keeps `--help` fast.
"""

import contextlib
import errno
import inspect
import io
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Optional, TypeVar, Union, get_args, get_origin

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from config import (
    NOT_UTF8,
    SWEPT,
    AlignConfig,
    BenchConfig,
    FinetuneConfig,
    Machine,
    PretrainConfig,
    RunError,
    Settings,
    SweepConfig,
    UsageError,
    by_pretext,
    get,
    is_utf8,
    leaves,
    preset,
    put,
    read_file,
)
from stopping import LEFT, Stopped, signals

S = TypeVar("S", bound=Settings)
app = typer.Typer(rich_markup_mode=None)
RENAMED = {"start": ("--from",), "lam": ("--lam", "--lambda")}

# --- flags from settings ---------------------------------------------------------------------------------------------

COMMON: dict[str, tuple[Any, Any, str]] = {
    "config": (Path | None, None, "TOML or JSON file of settings; flags win over it"),
    "preset": (str, "paper", "settings to start from: paper, or as-released, which follows the authors' program"),
    "out": (Path | None, None, "run directory (default: a name made of the settings, under runs/)"),
    "resume": (bool, False, "go on with the unfinished run in --out, with the same settings"),
    "force": (bool, False, "start the run in --out over"),
    "dry_run": (bool, False, "resolve and check everything, print settings, sources and budget, write nothing"),
    "json": (bool, False, "one JSON object on stdout and nothing else"),
    "quiet": (bool, False, "no progress"),
}


def plain(annotation: Any) -> Any:
    """An annotation without its None and its conditions; str for a number or a word, which pydantic tells apart."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [a for a in get_args(annotation) if a is not type(None)]
        annotation = kinds[0] if len(kinds) == 1 else str
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def flag_type(annotation: Any) -> Any:
    """What Typer is to parse; a tuple of rates arrives as text."""
    return str if get_origin(plain(annotation)) is tuple else plain(annotation)


Option = tuple[Any, Any, str]  # type, default, help


def parameters(model: type[Settings], options: dict[str, Option]) -> list[inspect.Parameter]:
    """One keyword-only parameter a leaf, default None (not given), and the options. A table has no flag."""
    out = []
    several = SWEPT.values() if model is SweepConfig else ()
    for leaf in leaves(model):
        if get_origin(leaf.field.annotation) is dict:
            continue
        name = leaf.name
        dashed = name.replace("_", "-")
        kind = str if leaf.path in several else flag_type(leaf.field.annotation)
        spelled = RENAMED.get(name, (f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}",))
        known = not leaf.field.is_required() and leaf.field.default is not None
        several_ = isinstance(leaf.field.default, tuple)
        default = f" (default: {','.join(map(str, leaf.field.default)) if several_ else leaf.field.default})" * known
        option = typer.Option(*spelled, help=(leaf.field.description or "") + default, show_default=False)
        annotation: Any = Annotated[Optional[kind], option]  # noqa: UP045
        out.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    for name, (kind, value, text) in options.items():
        option = typer.Option(f"--{name.replace('_', '-')}", help=text, show_default=False)
        annotation = Annotated[kind, option]
        out.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation))
    return out


def command(model: type[S], **own: Option) -> Callable[[Callable[[S, dict[str, Any], dict[str, str]], None]], None]:
    """Register a function (settings, options, source of each setting) as a command with the settings' flags.

    Its options are the common ones, and its own.
    """
    options = COMMON | own

    def register(body: Callable[[S, dict[str, Any], dict[str, str]], None]) -> None:
        def run(**given: Any) -> None:
            common = {name: given.pop(name) for name in options}
            flags = {k: v for k, v in given.items() if v is not None}
            config, sources = build(model, flags, common["config"], common["preset"])
            spare_threads(config)
            body(config, common, sources)

        wanted = parameters(model, options)
        run.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in wanted}
        app.command(body.__name__, help=inspect.getdoc(body))(run)

    return register


def spare_threads(config: Settings) -> None:
    """One thread where more would only cost time; not for `bench`, which measures."""
    if not isinstance(config, BenchConfig):
        from runtime import few_threads, pick_device

        few_threads(get(config, ("model", "backbone")), pick_device(get(config, ("machine", "device"))))


def build(model: type[S], flags: dict[str, Any], file: Path | None, named: str) -> tuple[S, dict[str, str]]:
    """Settings from flags over file over preset over defaults, and where each value came from (UsageError).

    With --from, what the align run had comes between defaults and preset.
    """
    if model is FinetuneConfig and "pool" in flags:
        raise UsageError(f"--pool {flags['pool']}: finetune looks at labelled images only, leave it out")
    table = read_file(file, model) if file else {}
    start = flags.get("start") or table.get("start")
    base = inherited(Path(str(start))) if start else {}
    keep_recipe(base, flags.get("dataset") or table.get("data", {}).get("dataset"))
    paths = {leaf.name: leaf.path for leaf in leaves(model)}
    names = {path: name for name, path in paths.items()}
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def lay(values: dict[str, Any], source: str, at: tuple[str, ...] = ()) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                lay(value, source, (*at, key))
            else:
                put(merged, (*at, key), value)
                sources[names.get((*at, key), key)] = source

    pretext, backbone = (find(name, flags, table, base) for name in ("pretext", "backbone"))
    for name, value in by_pretext(str(pretext), model, str(backbone)).items():
        put(merged, paths[name], value)
        sources[name] = f"with {pretext}"
    lay(base, "align run")
    for name, value in preset(named, model, bool(start)).items():
        put(merged, paths[name], value)
        sources[name] = f"preset {named}"
    lay(table, "file")
    for name, value in flags.items():
        several = isinstance(value, str) and name in TUPLES
        put(merged, paths[name], value.split(",") if several else value)
        sources[name] = "flag"
    try:
        return model.model_validate(merged), sources
    except ValidationError as error:
        raise UsageError("; ".join(explain(item, sources) for item in error.errors())) from error


MODELS: tuple[type[Settings], ...] = (PretrainConfig, AlignConfig, FinetuneConfig, SweepConfig, BenchConfig)
TUPLES = {leaf.name for model in MODELS for leaf in leaves(model) if get_origin(plain(leaf.field.annotation)) is tuple}
NAMES = {name for model in MODELS for leaf in leaves(model) for name in leaf.path}  # of settings and their groups


def explain(item: Any, sources: dict[str, str]) -> str:
    """One pydantic complaint as `--flag VALUE: what is wrong`."""
    name = str(next((part for part in reversed(item["loc"]) if part in NAMES), ""))
    flag = RENAMED.get(name, (f"--{name.replace('_', '-')}",))[0] if name else "settings"
    if item["type"] == "missing" and name in TUPLES:
        return f"{flag}: one number is missing, give two with a comma between them"
    if item["type"] == "missing":
        needed = {"data": "--dataset", "model": "--backbone"}.get(name, flag)
        return f"{needed} is needed, see --help"
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    if isinstance(item["input"], dict):  # about settings together; the message names them
        return str(message)
    value = f" {item['input']}" if isinstance(item["input"], str | int | float) else ""
    return f"{flag}{value}: {message}" + (" (from the file)" if sources.get(name) == "file" else "")


def find(name: str, flags: dict[str, Any], *tables: dict[str, Any]) -> Any:
    """A setting of the model, from flags or else from the first table that has it."""
    return next((t["model"][name] for t in ({"model": flags}, *tables) if name in t.get("model", {})), None)


def inherited(start: Path) -> dict[str, Any]:
    """Model, data and data root of the align run, or of the first in a directory of align runs (UsageError).

    A LoRA file says nothing of them, so they are to be given.
    """
    from runtime import read_from, read_json, runs_in

    if start.is_file():
        return {}
    config = read_json(runs[0] / "config.json") if (runs := runs_in(start)) else {}
    if "bilevel" not in config:
        what = "is not an align run, a directory of align runs, or a LoRA file" if start.exists() else "does not exist"
        raise UsageError(f"--from {start}: {what}")
    with read_from(runs[0]):
        root = config["machine"].get("data_root")
        return {"model": {**config["model"]}, "data": {**config["data"]}, "machine": {"data_root": root}}


def keep_recipe(base: dict[str, Any], dataset: Any) -> None:
    """Take what belongs to align's dataset out of its settings, where finetune is about another one."""
    from tuning import place

    if dataset and "data" in base and place(str(dataset)) != place(base["data"]["dataset"]):
        base["data"] = {key: value for key, value in base["data"].items() if key in ("min_crop", "d_interpolation")}


# --- what a person sees ----------------------------------------------------------------------------------------------

screen = Console(stderr=True, highlight=False)
paper = Console(highlight=False, width=None if sys.stdout and sys.stdout.isatty() else 160)


class Live:
    """Progress on stderr: a bar with ETA and live numbers on a terminal, otherwise a plain line an alternation.

    A stage that reports before its work begins, without a text, has a rate from its first result on.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet or other_rank()
        self.bars: dict[str, TaskID] = {}
        self.began: dict[str, tuple[float, int, int]] = {}  # stage -> when, after how many (resume), done so far
        done, live = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[text]}")
        left = (TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn())
        columns = (TextColumn("{task.description:>9}"), BarColumn(24), done, *left, live)
        self.progress = Progress(*columns, console=screen) if screen.is_terminal and not self.quiet else None

    def __enter__(self) -> "Live":
        if self.progress:
            self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.progress:
            self.progress.stop()

    def __call__(self, stage: str, done: int, total: int, text: str) -> None:
        if self.quiet:
            return
        start, before, so_far = self.began.get(stage, (0.0, 0, total))
        if done <= so_far:  # the first, or the stage's next round: from here on there is a rate
            start, before = time.monotonic(), done
            if self.progress and stage in self.bars:
                self.progress.reset(self.bars[stage], total=total)
        self.began[stage] = (start, before, done)
        if self.progress is None:
            if text:
                rate = (time.monotonic() - start) / (done - before) if done > before else None
                left = "" if rate is None else f"  ETA {timedelta(seconds=round(rate * (total - done)))}"
                print(f"{stage} {done}/{total}  {text}{left}", file=sys.stderr, flush=True)
            return
        if stage not in self.bars:
            self.bars[stage] = self.progress.add_task(stage, total=total, text="")
        self.progress.update(self.bars[stage], completed=done, text=text)

    def note(self, text: str) -> None:
        if not self.quiet:
            screen.print(text, markup=False, soft_wrap=True)


def show(config: Settings, sources: dict[str, str], common: dict[str, Any], about: dict[str, Any]) -> None:
    """--dry-run: every setting with its source, then the budget."""
    resolved = about.pop("config")
    several = config.swept if isinstance(config, SweepConfig) else {}
    flags = [leaf for leaf in leaves(type(config)) if get_origin(leaf.field.annotation) is not dict]
    rows = [(leaf, several.get(leaf.name, get(resolved, leaf.path))) for leaf in flags]
    origin = {}
    for leaf, value in rows:
        name, said = leaf.name, (leaf.field.description or "").rpartition("[")[2].rstrip("]")
        filled = "default" if get(config, leaf.path) == value else "by backbone or data"
        origin[name] = sources.get(name) or (
            f"{filled}, {said}" if (leaf.field.description or "").endswith("]") else filled
        )
    if common["json"]:
        settings = {leaf.name: {"value": value, "source": origin[leaf.name]} for leaf, value in rows}
        print(json.dumps({"settings": settings, "budget": about}, default=str))
        return
    table = Table("setting", "value", "source", "meaning", box=None)
    for leaf, value in rows:
        table.add_row(leaf.name, str(value), origin[leaf.name], (leaf.field.description or "").partition(" [")[0])
    paper.print(table)
    for name, value in about.items():
        if value is not None:
            paper.print(f"{name}: {readable(value)}", markup=False)


def readable(value: Any) -> str:
    """A number, a list or a table as people write it.

    >>> readable({"networks": 0.6547, "rates": (0.1, 3)})
    'networks 0.6547, rates 0.1, 3'
    """
    if isinstance(value, dict):
        return ", ".join(f"{key} {readable(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(readable, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def answer(result: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    """The result on stdout."""
    print(json.dumps(result)) if as_json else print("\n".join(lines))


def opened(common: dict[str, Any], live: Live, sources: dict[str, str]) -> Any:
    """The stage's options."""
    from stages import Options

    return Options(common["out"], common["resume"], common["force"], common["dry_run"], live, live.note, sources)


# --- commands --------------------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """BiSSLight: a light bilevel stage that aligns self-supervised backbones with a downstream task."""
    if show:
        from importlib.metadata import version as installed

        print(f"bisslight {installed('bisslight')}")
        raise typer.Exit


@command(PretrainConfig)
def pretrain(config: PretrainConfig, common: dict[str, Any], sources: dict[str, str]) -> None:
    """Train a backbone from scratch with MAE or I-JEPA, for those without a checkpoint."""
    import stages

    with Live(common["quiet"] or common["json"]) as live:
        result = stages.pretrain(config, opened(common, live, sources))
    if common["dry_run"]:
        return show(config, sources, common, result)
    lines = [f"{result['steps']} steps, loss {result['loss']:.4f}, {result['seconds']:.0f} s", result["weights"]]
    return answer(result, common["json"], lines)


@command(AlignConfig)
def align(config: AlignConfig, common: dict[str, Any], sources: dict[str, str]) -> None:
    """BiSSLight: align a pretrained backbone with a downstream task (Algorithm 1)."""
    import stages

    with Live(common["quiet"] or common["json"]) as live:
        result = stages.align(config, opened(common, live, sources))
    if common["dry_run"]:
        return show(config, sources, common, result)
    val_P, val_D = (result[key]["accuracy"] for key in ("val_P", "val_D"))
    val = f"validation {result['metric']} of theta_P {val_P:.1f} %, theta_D {val_D:.1f} %"
    how = f"|theta_P - theta_D| {result['distance']:.3g}, {result['seconds']:.0f} s"
    return answer(result, common["json"], [val, how, f"next: bisslight finetune --from {result['out']}"])


@command(FinetuneConfig)
def finetune(config: FinetuneConfig, common: dict[str, Any], sources: dict[str, str]) -> None:
    """PEFT with LoRA, directly or from align runs: seeds, learning-rate grid, one test at the end."""
    import tuning

    with Live(common["quiet"] or common["json"]) as live, tuning.worker_pool(config.machine.jobs) as pool:
        result = tuning.finetune(config, opened(common, live, sources), pool)
    if common["dry_run"]:
        return show(config, sources, common, result)
    from evaluate import Arm

    arm = Arm("", result["test"], result["unit"])
    spread = f" ± {arm.std:.2f}" if arm.std is not None else ""
    n = len(arm.accuracies)
    seeds = f"{n} seed{'s' if n > 1 else ''} (one seed is: {arm.unit})"
    line = f"test {result['metric']} {arm.mean:.2f}{spread} % over {seeds}"
    return answer(result, common["json"], [line, f"learning rate {result['lr']:g}", result["out"]])


@command(
    SweepConfig, shard=(str | None, None, "i/n: do every n-th align run with its PEFT, or direct run, from the i-th")
)
def sweep(config: SweepConfig, common: dict[str, Any], sources: dict[str, str]) -> None:
    """Accuracy against LoRA rank, λ, N_L, T or a learning rate: a comma list for one or two of them, a grid of runs."""
    import sweep as room
    import tuning

    with Live(common["quiet"] or common["json"]) as live, tuning.worker_pool(config.machine.jobs) as pool:
        result = room.sweep(config, opened(common, live, sources), common["shard"], pool)
    if common["dry_run"]:
        runs = result["runs"] if common["json"] else result.pop("runs")
        show(config, sources, common, result)
        if not common["json"]:
            print(
                "\n".join(
                    f"{index + 1} {', '.join(f'{k} {v}' for k, v in one.items())}" for index, one in enumerate(runs)
                )
            )
        return None
    if common["json"]:
        return print(json.dumps(result))
    metric = next((row["metric"] for row in result["rows"]), "accuracy")
    head = [
        *result["swept"],
        "arm",
        "seeds",
        f"test {metric} %",
        "learning rate",
        "- direct",
        "p, two-sided",
        "|q|/|g|",
    ]
    table = Table(*head, box=None)
    for row in result["rows"]:
        spread = f" ± {row['std']:.2f}" if row["std"] is not None else ""
        versus, ratio = row["minus_direct"], (row["align"] or {}).get("q_over_g")
        cells = [*(str(row["point"].get(name, "any")) for name in result["swept"]), row["arm"], str(row["seeds"])]
        cells += [f"{row['mean']:.2f}{spread}", f"{row['lr']:g}", f"{versus['difference']:+.2f}" if versus else ""]
        cells += [f"{versus['p']:.4g}" if versus and versus["p"] is not None else "", f"{ratio:.3f}" if ratio else ""]
        table.add_row(*cells)
    paper.print(table)
    for name, why in result["diverged"].items():
        print(f"diverged: {name}: {why}")
    n = len(result["missing"])
    points = f"points: {len(result['rows'])} finished, {len(result['diverged'])} diverged, {n} missing"
    print(points + (f" ({', '.join(result['missing'])})" if n else ""))
    print(f"{result['out']}/sweep.json and sweep.png")
    return None


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="align or finetune runs, directories of them, a demo, a sweep, benches")
    ],
    out: Annotated[Path, typer.Option(help="the page")] = Path("report.html"),
    rollout: Annotated[int, typer.Option(help="images of the attention rollout; 0: no look at networks", min=0)] = 6,
    limit: Annotated[int, typer.Option(help="so many images for the similarities", min=3)] = 1000,
    device: Annotated[str, typer.Option(help="for rollout and similarity: auto, cpu, cuda, cuda:1")] = "auto",
    data_root: Annotated[
        Path | None, typer.Option(help="where the benchmarks are now (default: as in the run)")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
) -> None:
    """One HTML page about runs, all in one file: accuracies, curves, settings with sources, cost, pictures."""
    import report as room

    with Live(quiet or json_) as live:
        how = room.Looking(rollout, limit, Machine(device=device, data_root=data_root))
        result = room.report(runs, out, live, how)
    if json_:
        print(json.dumps(result))
    else:
        groups, size = len(result["groups"]), result["bytes"] / 1e6
        print(f"{result['out']}: {groups} groups of runs, {result['pictures']} pictures, {size:.1f} MB")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="a finetune run, or the directory of one arm's runs")],
    against: Annotated[list[Path] | None, typer.Option(help="compare with this one; may be repeated")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="write a picture (PNG, SVG or PDF): of all seeds, or below")
    ] = None,
    rollout: Annotated[
        int | None, typer.Option(help="draw attention rollouts of so many validation images (default: RUN/rollout.png)")
    ] = None,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="CKA and RSA with the backbone, align runs too; RUN/similarity.png")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="whose adapter is looked at, of a finetune run or a directory of runs (default: its first)"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="so many images for --similarity (default: all)")] = None,
    device: Annotated[str, typer.Option(help="for --rollout and --similarity: auto, cpu, cuda, cuda:1")] = "auto",
    workers: Annotated[
        int | None, typer.Option(help="processes that decode images (default: by device and cores)", min=0)
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="where the benchmarks are now (default: as in the run)")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")] = False,
) -> None:
    """Mean and deviation over seeds, and the exact permutation test against other runs.

    p is two-sided: the share of all ways to split the pooled seeds whose means differ at least as much as observed.

    Or, instead: what a network looks at (--rollout), how alike two represent images (--similarity).
    """
    import evaluate as ev
    import figures

    if rollout is not None or similarity:
        if rollout is not None and similarity:
            raise UsageError("--rollout and --similarity: one at a time")
        if rollout is not None and limit is not None:
            raise UsageError("--limit: goes with --similarity, --rollout has its own number")
        machine = Machine(device=device, workers=workers, data_root=data_root)
        return look(run, against or [], rollout, picture, seed, limit, machine, json_)
    if seed is not None or limit is not None:
        raise UsageError("--seed, --limit: go with --rollout or --similarity; a table is about all seeds")
    if picture:
        figures.check_picture("--picture", picture)
    arms = [ev.read_arm(path) for path in (run, *(against or []))]
    rows = ev.table(arms)
    if picture:
        figure, axes = figures.pyplot().subplots(figsize=(1.8 + 1.5 * len(arms), 4))
        named = {f"{i + 1} {arm.name}": arm.accuracies for i, arm in enumerate(arms)}
        figures.draw_arms(axes, named, arms[0].metric, "every seed, and the mean")
        figures.save(figure, picture)
    if json_:
        print(json.dumps({"arms": rows, "picture": str(picture) if picture else None}))
        return None
    paper.print(arm_table(rows))
    for line in ev.differences(rows):
        print(line)
    return print(picture) if picture else None


def look(
    run: Path,
    against: list[Path],
    count: int | None,
    picture: Path | None,
    seed: int | None,
    limit: int | None,
    machine: Machine,
    as_json: bool,
) -> None:
    """`evaluate --rollout`, the others above the run as in the paper; with no count, `evaluate --similarity`."""
    import seeing

    if not run.is_dir():
        raise UsageError(f"{run}: there is no such run directory")
    out = picture or run / ("similarity.png" if count is None else "rollout.png")
    if count is not None:
        result = seeing.rollout([*against, run], count, out, seed, machine)
        lines = [f"{one['what']}: {one['run']}, strongest patch {one['peak']:.2f} times an even share"
                 for one in result["looked_at"].values()]  # fmt: skip
        lines += [f"{row['label']}: " + ", ".join(f"{k} {v}" for k, v in row["predictions"].items())
                  for row in result["images"]]  # fmt: skip
        return answer({"rollout": result}, as_json, [*lines, str(out)])
    result = seeing.similarity([run, *against], out, seed, limit, machine)
    if as_json:
        return answer({"similarity": result | {"picture": str(out)}}, True, [])
    print(f"{result['dataset']}, {result['images']} validation images")
    print("\n".join(f"{name}: {path}" for name, path in result["looked_at"].items()))
    for title, key in (("linear CKA", "cka"), ("RSA", "rsa")):
        table = Table(title, *map(str, range(1, len(result["models"]) + 1)), box=None)
        for number, (name, row) in enumerate(zip(result["models"], result[key], strict=True), 1):
            table.add_row(f"{number} {name}", *(f"{value:.3f}" for value in row))
        paper.print(table)
    return print(out)


def arm_table(rows: list[dict[str, Any]]) -> Table:
    """The arms as a table: mean and deviation, and what the first is worth against each other one."""
    from evaluate import Comparison, told

    metric = f"test {rows[0]['metric']} %"
    head = ["arm", "seeds", "one seed is", metric, "first - this", "p, two-sided", "paper"]
    table = Table(*head[: 7 if any(row["paper"] for row in rows) else 6], box=None)
    for row in rows:
        spread = f" ± {row['std']:.2f}" if row["std"] is not None else ""
        versus = row["first_minus_this"]
        p = told(Comparison(**versus)) if versus else ""
        gain = f"{versus['difference']:+.2f}" if versus else ""
        said = f"paper {row['paper']['mean']} ± {row['paper']['std']}" if row["paper"] else ""
        cells = [row["arm"], str(row["seeds"]), row["unit"], f"{row['mean']:.2f}{spread}", gain, p, said]
        table.add_row(*cells[: len(table.columns)])
    return table


data = typer.Typer(rich_markup_mode=None, help="The paper's benchmarks: list, check, download.")
app.add_typer(data, name="data")
Root = Annotated[Path | None, typer.Option(help="where the datasets are (default: $BISSLIGHT_DATA, else ./data)")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress")]


def root_of(given: Path | None) -> Path:
    """The data root in force."""
    from config import Machine
    from loading import resolved_machine

    root = resolved_machine(Machine(data_root=given)).data_root
    assert root is not None
    return root


@data.command("list")
def data_list(data_root: Root = None, json_: Json = False) -> None:
    """Datasets by name: sizes, terms, and whether they are there."""
    from tasks import BENCHMARKS, state_of

    root = root_of(data_root)
    rows: list[dict[str, Any]] = []
    for name in (*BENCHMARKS, "imagenet"):
        b = BENCHMARKS.get(name)
        state, detail = state_of(name, root)
        terms = b.terms if b else "non-commercial research"
        about = {"name": name, "classes": b.classes if b else 1000, "state": state}
        about["sizes"] = list(b.sizes) if b else [1_281_167]
        rows.append(about | {"detail": detail, "terms": terms})
    if json_:
        print(json.dumps({"root": str(root), "datasets": rows}))
        return
    table = Table("name", "classes", "train / val / test", "state", "where, or what to do", "terms", box=None)
    for row in rows:
        sizes = " / ".join(map(str, row["sizes"]))
        table.add_row(row["name"], str(row["classes"]), sizes, row["state"], row["detail"], row["terms"])
    paper.print(table)


@data.command("check")
def data_check(
    name: str,
    data_root: Root = None,
    partial: Annotated[bool, typer.Option("--partial", help="a subset: damaged images only")] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Open every image of a dataset, or of a folder, count against the known sizes, list every bad file."""
    from tasks import check

    with Live(quiet or json_) as live:
        checked = check(name, root_of(data_root), live, partial)
    if json_:
        print(json.dumps(checked._asdict()))
    else:
        print("\n".join([*checked.problems, f"{name}: {checked.images} images, problems: {len(checked.problems)}"]))
    if checked.problems:
        raise typer.Exit(1)


@data.command("download")
def data_download(name: str, data_root: Root = None, quiet: Quiet = False) -> None:
    """Fetch and unpack a dataset; goes on where it was cut off, verifies its digests."""
    from tasks import BENCHMARKS, download

    with Live(quiet) as live:
        where = download(name, root_of(data_root), live)
    print(f"{where}\nterms: {BENCHMARKS[name].terms}")


@command(BenchConfig, against=(list[Path] | None, None, "earlier benches that cost.png shows too; may be repeated"))
def bench(config: BenchConfig, common: dict[str, Any], sources: dict[str, str]) -> None:
    """Time and memory of one alternation, phase by phase, for M-FAC, CG, no curvature and plain PEFT. Writes --out."""
    import bench as room
    from figures import pyplot, save
    from loading import resolved_machine
    from paper import memory_of
    from runtime import write_atomic

    workers = resolved_machine(config.machine, "JPEG files").workers
    config = config.model_copy(update={"machine": config.machine.model_copy(update={"workers": workers})})
    out = common["out"] or Path("runs") / f"bench-{config.backbone}"
    if common["resume"]:
        raise UsageError("--resume: a bench is one run, start it again with --force")
    if out.exists() and not ((out / "bench.json").exists() and common["force"]):
        raise UsageError(f"--out {out}: is there already, --force overwrites an earlier bench")
    others = room.read(common["against"] or [])
    pyplot()
    if common["dry_run"]:
        return show(config, sources, common, {**room.budget(config), "config": config, "out": str(out)})
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "bench.json", "{}")  # what cannot be written should be known before an hour of work
    except (OSError, RunError) as error:
        raise UsageError(f"--out {out}: cannot be written, choose another --out") from error
    with Live(common["quiet"] or common["json"]) as live:
        result = room.run(config, live)
    made = {"config": config.model_dump(mode="json"), **result}
    write_atomic(out / "bench.json", json.dumps(made, indent=1))
    save(room.draw([*others, made]), out / "cost.png")
    if common["json"]:
        print(json.dumps(result))
        return None
    done = [row for row in result["rows"] if "failed" not in row]
    phases = sorted({phase for row in done for phase in row["phases"]} - {"lower", "upper"})
    times = Table("setting", "method", "seconds", *phases, box=None)
    rest = ("peak GB", "the paper's", "host GB", "images/s", "TFLOP/s", "of matrix product", "hours for T = 500")
    worth = Table("setting", "method", *rest, box=None)
    for row in done:
        name = row["mode"], row["method"]
        numbers = [f"{row['phases'][phase]:.3f}" if phase in row["phases"] else "" for phase in phases]
        times.add_row(*name, f"{row['seconds']:.3f}", *numbers)
        published = memory_of(row["method"], config.backbone)
        peaks = [
            "" if x is None else f"{x:.2f}" for x in (row["peak_GB"], published and published[0], row["host_peak_GB"])
        ]
        rates = [f"{row['images_per_s']:.2f}", f"{row['TFLOP_per_s']:.3f}", f"{100 * row['matrix_share']:.0f} %"]
        worth.add_row(*name, *peaks, *rates, f"{row['hours_500']:.3g}" if row["method"] != "peft" else "")
    paper.print(times)
    paper.print(worth)
    for row in result["rows"]:
        if "failed" in row:
            print(f"{row['mode']} {row['method']}: {row['failed']}")
    said = {**result["ratios"], "M-FAC's share of an alternation": result["mfac_share"]}
    said = {name: value for name, value in said.items() if value is not None}
    said |= {f"M-FAC, {name}": value for name, value in result["mfac_method"].items()}
    said |= {f"matrix product, {name}, TFLOP/s": value for name, value in result["matrix_TFLOP_per_s"].items()}
    said["images/s decoded"] = result["decoded_images_per_s"]
    print("ratios: how many times as much CG, or the recursion, takes as M-FAC here; at small sizes they say little")
    print("\n".join([*(f"{name}: {value:.4g}" for name, value in said.items()), str(out)]))
    return None


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="a finished align or finetune run")],
    out: Annotated[Path | None, typer.Option(help="directory for the files (default: RUN/export)")] = None,
    seed: Annotated[int | None, typer.Option(help="which seed of a finetune run (default: its first)")] = None,
    merged: Annotated[bool, typer.Option(help="also the merged timm model, as large as the backbone")] = True,
    json_: Json = False,
) -> None:
    """Write a run's adapter for HF peft, for timm and for the released program, with a model card."""
    import stages

    files = stages.export_run(run, out, seed, merged)
    print(json.dumps({"files": [str(file) for file in files]}) if json_ else "\n".join(map(str, files)))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="directory for all runs and pictures")] = Path("runs/demo"),
    full: Annotated[bool, typer.Option("--full", help="controls, grids and several data seeds; about an hour")] = False,
    data_seed: Annotated[int, typer.Option(help="seed of the drawn dataset and of its pretraining", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="runs at a time", min=1)] = 2,
    force: Annotated[bool, typer.Option("--force", help="start over in --out")] = False,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
) -> None:
    """The whole story, offline, in minutes on a CPU: pretrain, align, PEFT with and without, eight seeds an arm."""
    import demo as story
    from runtime import few_threads, pick_device

    few_threads("vit_mini", pick_device("auto"))
    tell = story.full if full else story.quick
    try:
        with Live(quiet or json_) as live:
            result = tell(out, data_seed, jobs, force, live)
    except Stopped as stop:
        raise Stopped(stop.number, f"stopped; the demo starts over with --force --out {out}") from stop
    if json_:
        print(json.dumps(result))
        return
    for title, rows in result["tables"].items():
        print(title)
        paper.print(arm_table(rows))
    print("\n".join(result["remarks"]))


@app.command()
def doctor(
    data_root: Root = None,
    digests: Annotated[bool, typer.Option("--digests", help="hash weight files too, as each run does")] = False,
    json_: Json = False,
) -> None:
    """Is this machine ready? Versions, devices, disk, weights, datasets; each line that is not ok says what to do."""
    from doctor import examine

    found = list(examine(data_root, digests))
    if json_:
        print(json.dumps([finding._asdict() for finding in found]))
    else:
        print("\n".join(f"{what:13} {state:8} {detail}" for what, state, detail in found))
    if bad := [finding.what for finding in found if finding.state == "bad"]:
        raise RunError(f"doctor: not ready, see {', '.join(bad)}")


# --- exit codes ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Exit codes: 0, 1 failure, 2 usage, 128 + a signal (130 Ctrl-C, 143 SIGTERM); a line for every known error."""
    open_streams()
    signals.install()
    sys.exit(run(sys.argv[1:]))


def open_streams() -> None:
    """A stream that was closed (`>&-`) takes what is written to it; what one cannot show is written as \\xb1."""
    for name in ("stdin", "stdout", "stderr"):  # in this order: each takes its own, the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


LESS = (
    "--micro-batch N and --recompute need less and keep the result to rounding; a smaller --p-batch, --d-batch or "
    "--batch is another experiment"
)


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Of several processes (torchrun), rank 0 speaks."""
    if "WORLD_SIZE" not in os.environ:
        return attempt(arguments)
    from parallel import leave

    try:
        with contextlib.redirect_stdout(io.StringIO() if other_rank() else sys.stdout):
            return attempt(arguments)
    finally:
        leave()


def other_rank() -> bool:
    """Whether this is one of several processes, and not the first."""
    return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


def attempt(arguments: list[str]) -> int:
    """One command line without the farewell."""
    try:
        if odd := [name for name in (*arguments, str(Path.cwd())) if not is_utf8(name)]:
            raise UsageError(f"{odd[0]}: {NOT_UTF8}")
        result = typer.main.get_command(app)(arguments or ["--help"], standalone_mode=False)
        if result == 130:  # Typer turns Ctrl-C into this
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except UsageError as error:
        return complain(error, 2)
    except ValidationError as error:
        return complain("; ".join(explain(item, {}) for item in error.errors()), 2)
    except RunError as error:
        return complain(error, 1)
    except Stopped as stop:
        return complain(stop.where, 128 + stop.number)
    except (KeyboardInterrupt, typer.Abort):
        return complain(LEFT, 130)
    except OSError as error:
        wrong = error.errno == errno.ENAMETOOLONG  # a word that was meant as something else
        where = f"{error.filename}: " if error.filename else ""
        remedy = "; allow this user to read and write it" if isinstance(error, PermissionError) else ""
        return complain(f"{where}{error.strerror or error}{remedy}", 2 if wrong else 1)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            return complain("; ".join(["out of GPU memory: " + LESS, *getattr(error, "__notes__", [])]), 1)
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # Python's, and torch's on a CPU
            return complain(f"out of memory: {LESS}; or lower --workers or --jobs", 1)
        if not hasattr(error, "format_message"):  # not one of Typer's own complaints: a defect, with its traceback
            raise
        return complain(error.format_message().replace("Value error, ", ""), 2)


def complain(what: object, code: int) -> int:
    """One line on stderr, and a word to the other processes."""
    line = one_line(what)
    rank = f"rank {os.environ.get('RANK')}: " if "WORLD_SIZE" in os.environ else ""
    print(f"{rank}{'' if code > 128 else 'error: '}{line}", file=sys.stderr)
    if rank and code < 128:
        from parallel import tell

        tell(line)
    return code


def one_line(what: object) -> str:
    """A message without line breaks; of a word of more than 400 characters its first 100."""
    return " ".join(word if len(word) <= 400 else f"{word[:100]}..." for word in str(what).split())


if __name__ == "__main__":
    main()
