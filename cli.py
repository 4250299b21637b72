"""The command line: flags from settings, tables of commands (here and in extras), exit codes.

Modules are imported and flags made for the command that is asked for alone, so `--help` is fast.
"""

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from pkgutil import resolve_name
from statistics import fmean
from typing import Annotated, Any, Literal

import typer
from pydantic_core import to_jsonable_python
from typer.core import TyperCommand

from config import Record, make, paper_values, read_align_run, read_table, released_values
from support.errors import UsageError, checking, nearest

RUN = "out config force dry_run all json quiet"
COMMANDS = {  # what it does; function, class of its settings, options and arguments; an example
    "align": ("Align a pretrained backbone with a downstream task: BiSSLight, Algorithm 1.",
        "align:align", "config:AlignConfig", f"{RUN} preset",
        "--backbone vit_l16 --dataset cub200 --data-root DIR --out runs/cub"),
    "finetune": ("Fine-tune with LoRA, directly or from align runs: rates, seeds, one test.",
        "finetune:finetune", "config:FinetuneConfig", f"{RUN} preset",
        "--from runs/cub --out runs/cub-peft"),
    "evaluate": ("Compare finished finetune runs: mean, deviation, exact p, the paper's figure.",
        "cli:evaluate", "", "run against json", "runs/cub-peft --against runs/direct"),
}  # fmt: skip
OPTIONS: dict[str, tuple[Any, Any, str]] = {  # type, default (...: an argument, no flag), help
    # an option that is not here is the setting of `align` with that name
    "run": (Path, ..., "A finished run, or a directory of one arm's runs."),
    "out": (Path | None, None, "Default: below runs/; report: report.html; export: RUN/export."),
    "config": (Path | None, None, "TOML or JSON file of settings; flags win over it."),
    "preset": (Literal["paper", "as-released"], "paper", "paper; as-released: as its program."),
    "force": (bool, False, "Start over. Without it, the same command goes on."),
    "json": (bool, False, "One JSON value on stdout and nothing else."),
    "quiet": (bool, False, "No progress."),
    "against": (list[Path], [], "Compare with this run or directory; may be repeated."),
}
NAMED = {"start": ["--from"], "root": ["--data-root"]}  # flags that are not --their-name
REMEDIES = {  # any other error is a defect and ends with its traceback
    "UsageError": "",
    "RunError": "",
    "ModuleNotFoundError": "; install it (bisslight[plot]: pictures), or do without this option",
    "BrokenProcessPool": "; perhaps memory was short: lower --jobs, then the same command goes on",
    "Diverged": "; give a lower learning rate (--lr, --p-lr, --d-lr, --base-lr) and another --out",
    "OutOfMemoryError": "; out of memory: a --micro-batch that fits, or --recompute, needs less",
    "MemoryError": "; out of memory: a --micro-batch that fits, or --recompute, needs less",
}
with contextlib.suppress(ImportError):  # the folder may be missing: these commands then are, too
    from extras import COMMANDS as MORE_COMMANDS
    from extras import OPTIONS as MORE_OPTIONS

    COMMANDS |= MORE_COMMANDS
    OPTIONS |= MORE_OPTIONS
FIRST = ("backbone", "dataset", "pool", "start", "out", "seed")  # on top of --help


def settle(
    kind: Any, flags: Record, file: Path | None = None, base: str = "paper"
) -> tuple[Any, dict[str, Record]]:
    """Settings (UsageError), and the layers that they come from; the last one with a value wins."""
    table = read_table(file) if file else {}
    for key in [key for key in table if key not in kind.model_fields]:
        raise UsageError(f"{file}: {key} is no setting, {nearest(key, kind.model_fields)}")
    asked = table | flags
    start, run = Path(str(asked.get("start", ""))), Record()
    if "start" in asked and not start.is_file():
        run = read_align_run(start, asked.get("dataset"))
    released = released_values(kind, "start" in asked) if base != "paper" else {}
    given = run | released | asked
    made = make(kind, given)
    at = vars(made).get
    if at("warmup", -1) >= at("alternations", 0) or at("warmup_epochs", -1) >= at("epochs", 0):
        logging.getLogger("bisslight").warning(
            "the warm-up is not shorter than the run, so no rate reaches its base value; see "
            "--warmup, --warmup-epochs"
        )
    for name in filter(at, ("dataset", "pool", "weights", "split_file", "d_lr_from")):
        with checking(f"--{name.replace('_', '-')} {at(name)}"):
            resolve_name("support.benchmarks:place_of")(str(at(name)), made.data_root)
    layers = {"default": paper_values(kind, dict(made)), **kind.our_defaults(dict(made))}
    layers |= {"align run": run, f"preset {base}": released, f"{file}": table, "flag": flags}
    return made, layers


def keywords(name: str) -> Iterator[Parameter]:
    """Flags of a command: of its settings, class by class; and its options.

    Typer hands a setting on as text, and pydantic converts it. Its help is the line below it.
    """
    _, _, settings, options, _ = COMMANDS[name]
    kind = resolve_name(settings or "config:AlignConfig")
    *parts, _, _ = kind.__mro__  # the last two are not ours
    wanted, usual = options.split(), dict(kind.model_construct())
    rows: dict[str, tuple[Any, Any, str, str]] = {}
    for part in parts:
        panel = (part.__doc__ or "").partition(":")[0] if settings else "This run"
        for key in part.__annotations__:
            if key in kind.model_fields and key not in {*rows, "swept"}:
                text = " ".join((kind.model_fields[key].description or "").split())
                flag, default = kind.model_fields[key].annotation is bool, usual.get(key)
                text += f" (default: {default})" * (default is not None)
                rows[key] = bool | None if flag else str | None, None, text, panel
    rows |= {key: (*OPTIONS[key], "This run") for key in wanted if key in OPTIONS}
    shown = rows if settings else wanted
    for key in [key for key in dict.fromkeys([*FIRST, *shown]) if key in shown]:
        value, default, text, panel = rows[key]
        flags = NAMED.get(key, [f"--{key.replace('_', '-')}"] if value is bool else [])
        panel = "What one sets first" if key in FIRST else panel
        about: Any = typer.Option(*flags, help=text, metavar="", rich_help_panel=panel)
        if default is ...:
            about = typer.Argument(
                help=text, metavar=key.upper(), rich_help_panel="Arguments", exists=True
            )
        meant: Any = Annotated[value, about]
        yield Parameter(key, Parameter.KEYWORD_ONLY, default=default, annotation=meant)


def execute(name: str, /, **given: Any) -> int:
    """Run a command and print what it returns; the exit code."""
    _, function, settings, options, _ = COMMANDS[name]
    own = {option: given.pop(option, None) for option in options.split()}
    as_json, first = own.pop("json"), os.environ.get("RANK", "0") == "0"  # of torchrun's processes
    quiet = own.pop("quiet", False) or as_json or not first
    if settings:
        told = {key: value for key, value in given.items() if value is not None}
        if name == "sweep":
            swept = [key for key in resolve_name("extras:SWEPT") if "," in told.get(key, "")]
            told |= {"swept": {key: told.pop(key).split(",") for key in swept}} if swept else {}
        every = own.pop("all")
        own["cfg"], layers = settle(
            resolve_name(settings), told, own.pop("config"), own.pop("preset", "paper")
        )
        own["out"] = own["out"] or default_out(name, own["cfg"])
        if own.pop("dry_run") or every:
            resolve_name("support.runs:check_directory")(own["out"], name, own["cfg"], own["force"])
            plan = resolve_name("extras.plan:dry_run")(name, own["cfg"], layers, every or as_json)
            say({"out": own["out"]} | plan, as_json)
            return 0
    with bars(quiet) as track:
        if "force" in own:  # a command that makes runs
            resolve_name("support.processes:start")()
            own["track"] = track
        result = resolve_name(function)(**own)
    if first:
        say(result, as_json)
    return int(bool(isinstance(result, dict) and result.get("problems")))


def evaluate(run: Path, against: list[Path]) -> Any:
    """A table of arms; with extras/, `extras.evaluate` takes its place."""
    return resolve_name("evaluate:evaluate")([run, *against])


def default_out(name: str, config: Any) -> Path:
    """Such as runs/align-cub200-vit_l16-r64-s0."""
    at = dict(config).get
    data, start, rank = Path(at("dataset") or at("pool", "")).name, at("start"), at("rank")
    parts = name, data, config.backbone, start and f"from-{start.name}", rank and f"r{rank}"
    return Path("runs", "-".join([*filter(None, parts), f"s{config.seed}"]).replace(":", "-"))


@contextlib.contextmanager
def bars(quiet: bool) -> Iterator[Callable[..., Iterator[Any]]]:
    """Notes and a `run.Track` on stderr: bars on a terminal, elsewhere lines; `quiet`: warnings."""
    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [logging.StreamHandler(sys.stderr)]
    if quiet:
        yield resolve_name("support.runs:untracked")
        return
    from rich.console import Console  # rich takes a while to load, so --help does without
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    live = Progress(
        "{task.description:>8}", BarColumn(10), "{task.completed}/{task.total} ETA",
        TimeRemainingColumn(), "{task.fields[text]}",
        console=console, disable=not console.is_terminal, speed_estimate_period=1e9,
    )  # fmt: skip

    def track(items: Iterator[Any], total: int, label: str, done: int = 0) -> Iterator[Any]:
        bar = live.add_task(label, total=total, completed=done, text="")
        seen: dict[str, Any] = {}  # of a loop's records the latest numbers, such as a validation
        for n, item in enumerate(items, done + 1):
            loop = isinstance(item, dict) and "step" in item
            seen = seen | {k: v for k, v in item.items() if v} if loop else {}
            live.update(bar, completed=n, text=brief(seen or item)[: max(console.width - 46, 10)])
            if live.disable:
                left = TimeRemainingColumn().render(live.tasks[-1])
                print(f"{label} {n}/{total}  {brief(seen or item)}  ETA {left}", file=sys.stderr)
            yield item
        live.remove_task(bar)

    with live:
        yield track


def say(result: Any, as_json: bool) -> None:
    """A result on stdout: JSON, or a line per value and a table for each list of dicts."""
    from rich.console import Console
    from rich.table import Table

    result = to_jsonable_python(result)
    if as_json:
        print(json.dumps(result))
        return
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    for key, value in result.items() if isinstance(result, dict) else [("", result)]:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if key:
                print(f"{key}:")
            # a column of nothing, or of nothing but lists, is only in the JSON
            names = dict.fromkeys(name for row in value for name in row if row[name] != {})
            kept = [n for n in names if any(not isinstance(r.get(n), list | None) for r in value)]
            table = Table(*kept, box=None, pad_edge=False)
            for row in value:
                table.add_row(*(readable(row.get(name)) for name in kept))
            console.print(table)
        elif value not in (None, {}):
            print(f"{key}: {readable(value)}")


def brief(item: Any) -> str:
    """An item in a few words: of a record its rate or mean losses, and the validation; or its text.

    >>> brief({"loss_P": [1.0, 3.0], "loss_D_at_D": [1.5], "val_P": {"accuracy": 50.0}})
    'loss P 2  D 1.5  val 50.0 %'
    """
    if not isinstance(item, dict):
        return str(item)
    names = {"lr": "lr", "loss": "loss", "loss_P": "loss P", "loss_D_at_D": "D"}
    found = [
        f"{name} {fmean(x if isinstance(x, list) else [x]):.4g}"
        for key, name in names.items()
        if (x := item.get(key))
    ]
    if score := item.get("val_P", item.get("val")):
        found.append(f"val {score['accuracy']:.1f} %")
    return "  ".join(found)


def readable(value: Any) -> str:
    """A value as people write it.

    >>> readable({"networks": 0.65471, "rates": (0.1, 3), "paper": None})
    'networks 0.6547, rates 0.1, 3'
    """
    if isinstance(value, dict):
        return ", ".join(f"{k} {readable(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(readable, value)) or "none"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


class Sections(TyperCommand):
    """Plain help with a section for each panel: Typer's own, drawn by rich, takes twice as long."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Any]] = {}
        for option in self.get_params(ctx):
            panel = getattr(option, "rich_help_panel", None) or "This run"  # --help has none
            panels.setdefault(panel, []).extend(filter(None, [option.get_help_record(ctx)]))
        for panel, rows in sorted(panels.items(), key=lambda item: item[0] != "Arguments"):
            with formatter.section(panel):
                formatter.write_dl(rows)


def build(arguments: list[str]) -> typer.Typer:
    """The program, with the flags of the command that is asked for."""
    app = typer.Typer(
        help="BiSSLight aligns self-supervised backbones with a downstream task, before "
        "fine-tuning.\n\n`bisslight --version` prints the version.",
        add_completion=False,
        rich_markup_mode=None,
    )
    data = typer.Typer(help="The datasets.", rich_markup_mode=None)
    for name, (told, *_, example) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        called: Any = partial(execute, name)  # Typer reads its flags from these two
        called.__signature__ = Signature([*keywords(name)] if last in arguments else [])
        called.__annotations__ = {}
        whole = f"{told}\n\nExample: bisslight {name} {example}"
        (data if group else app).command(last, cls=Sections, help=whole, short_help=told)(called)
    if data.registered_commands:
        app.add_typer(data, name="data")
    return app


class Forgiving(io.FileIO):
    """A file whose reader may go away (`| head`): the rest is dropped, and the run goes on."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def main() -> None:
    """Run the command line; exit codes 0, 1 failure, 2 usage, 130 Ctrl-C, 143 SIGTERM."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)  # None where it is closed
        file = Forgiving(stream.fileno() if stream else os.devnull, "w", closefd=not stream)
        buffer, encoding = io.BufferedWriter(file), getattr(stream, "encoding", None)
        text = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of one command line; an error is told in one line."""
    if arguments == ["--version"]:
        print("bisslight", resolve_name("importlib.metadata:version")("bisslight"))
        return 0
    try:
        program = typer.main.get_command(build(arguments))
        return program(arguments or ["--help"], prog_name="bisslight", standalone_mode=False) or 0
    except BaseException as error:
        kind = "RunError" if isinstance(error, OSError) else type(error).__name__
        code = 2 if kind == "UsageError" else 1
        line = f"{error}{REMEDIES.get(kind)}"
        if kind == "Stopped":
            code, line = 128 + error.args[0], error.args[1]
        elif hasattr(error, "format_message"):  # Typer's own complaints
            code, line = 2, error.format_message()
        elif kind not in REMEDIES:
            raise
        print("error: " * (code < 128) + " ".join(line.split()), file=sys.stderr)
        return code


if __name__ == "__main__":
    main()
