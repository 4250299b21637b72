"""The command line: flags from settings, one table of commands, one printer, exit codes.

A command is a function of a module; it is imported when it is called, and flags are made only for
the command that is asked for, so `--help` and a wrong name are answered before torch is loaded.
Its result, a dict or a list of dicts, is printed here.
"""

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple, Optional, TypeVar, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

T = TypeVar("T")


class Command(NamedTuple):
    """A command: what help says, the function it calls, its options, and its settings' class."""

    about: str
    example: str
    function: str
    options: tuple[str, ...]
    settings: str = ""


RUN = ("out", "config", "force", "dry_run", "all", "json", "quiet")
LOOK = ("seed", "weights", "data_root", "device")
COMMANDS = {
    "align": Command(
        "Align a pretrained backbone with a downstream task: BiSSLight, Algorithm 1.",
        "align --backbone vit_b16 --dataset dtd",
        "align:align",
        (*RUN, "preset"),
        "commands:AlignConfig",
    ),
    "finetune": Command(
        "Fine-tune with LoRA, directly or from align runs: a grid of rates, seeds, one test.",
        "finetune --from runs/align-dtd-vit_b16-r64-s0",
        "finetune:finetune",
        (*RUN, "preset"),
        "commands:FinetuneConfig",
    ),
    "evaluate": Command(
        "Compare finished finetune runs: mean, deviation, exact p-value, the paper's figure.",
        "evaluate runs/aligned --against runs/direct",
        "evaluate:evaluate",
        ("run", "against", "picture", "rollout", "similarity", "limit", *LOOK, "json"),
    ),
    "demo": Command(
        "The whole story on drawn images, offline, in minutes on a CPU.",
        "demo",
        "extras.demo:demo",
        ("out", "data_seed", "jobs", "force", "json", "quiet"),
    ),
    "pretrain": Command(
        "Train a backbone from scratch with MAE or I-JEPA, for those without a checkpoint.",
        "pretrain --backbone vit_mini --pool quilts",
        "extras.pretrain:pretrain",
        RUN,
        "extras.settings:PretrainConfig",
    ),
    "sweep": Command(
        "Accuracy against LoRA rank, λ, N_L, T or a rate: a comma list makes a grid of runs.",
        "sweep --backbone vit_b16 --dataset dtd --rank 1,4,16,64",
        "extras.sweep:sweep",
        (*RUN, "shard"),
        "extras.settings:SweepConfig",
    ),
    "report": Command(
        "Write one HTML page about runs: accuracies, curves, settings, pictures.",
        "report runs --out report.html",
        "extras.report:report",
        ("runs", "out", "weights", "force", "json"),
    ),
    "bench": Command(
        "Time and memory of an alternation with M-FAC, CG, no curvature, and of plain PEFT.",
        "bench --backbone vit_b16",
        "extras.bench:bench",
        (*RUN, "against"),
        "extras.settings:BenchConfig",
    ),
    "export": Command(
        "Write a run's adapter for HF peft, for timm and for the released program.",
        "export runs/aligned",
        "extras.export:export",
        ("run", "out", "seed", "merged", "weights", "force", "json"),
    ),
    "doctor": Command(
        "Is this machine ready? Versions, devices, disk, weights, datasets, and what to do.",
        "doctor",
        "extras.doctor:doctor",
        ("data_root", "digests", "json"),
    ),
    "data list": Command(
        "The paper's datasets: sizes, terms, and whether they are there.",
        "data list",
        "benchmarks:list_all",
        ("data_root", "json"),
    ),
    "data check": Command(
        "Open every image of a dataset or folder, count, list what is wrong.",
        "data check folder:photos",
        "benchmarks:check",
        ("name", "data_root", "partial", "json", "quiet"),
    ),
    "data download": Command(
        "Fetch and unpack a dataset; its digests are verified.",
        "data download dtd",
        "benchmarks:download",
        ("name", "data_root", "json"),
    ),
}
ARGUMENTS = ("run", "runs", "name")
OPTIONS: dict[str, tuple[Any, Any, str]] = {  # type, default, help
    "run": (Path, ..., "A finished run, or a directory of one arm's runs."),
    "runs": (list[Path], ..., "Runs, or directories that hold some."),
    "name": (str, ..., "A dataset by name, or folder:DIR."),
    "out": (Path, None, "Where the results go. Default: named after what is run, in runs/."),
    "config": (Path, None, "TOML or JSON file of settings; flags win over it."),
    "preset": (str, "paper", "paper, or as-released: what the authors' program does."),
    "force": (bool, False, "Start over. Without it, the same command goes on."),
    "dry_run": (bool, False, "Check everything and say what would run; write nothing."),
    "all": (bool, False, "With --dry-run: every setting, its value and who set it."),
    "json": (bool, False, "One JSON value on stdout and nothing else."),
    "quiet": (bool, False, "No progress."),
    "shard": (str, None, "i/n: every n-th point from the i-th on, for several machines."),
    "against": (list[Path], None, "Compare with this one; may be repeated."),
    "picture": (Path, None, "Draw it: a PNG, SVG or PDF."),
    "rollout": (int, None, "Draw attention rollouts of so many images."),
    "similarity": (bool, False, "Compare layers: CKA and RSA, with the backbone, too."),
    "limit": (int, 1000, "Images of --similarity."),
    "seed": (int, None, "Which seed's adapter. Default: the first."),
    "weights": (Path, None, "Where the run's weights are now."),
    "data_root": (Path, None, "Where the benchmarks are. Default: $BISSLIGHT_DATA, else ./data."),
    "device": (str, "auto", "auto, cpu, cuda or cuda:1."),
    "data_seed": (int, 0, "Seed of the drawn images."),
    "jobs": (int, 2, "Runs at a time."),
    "merged": (bool, None, "Write the merged timm model, too. Default: yes."),
    "digests": (bool, False, "Hash weight files, too."),
    "partial": (bool, False, "It is a subset; do not compare counts."),
}

# --- flags ------------------------------------------------------------------------------------

FIRST = ("backbone", "dataset", "pool", "start", "out", "seed")
PANELS = {"Common": "Machine", "Machine": "Machine", "Data": "Data", "Crops": "Data"}
ORDER = ("What one sets first", "Method", "Data", "Machine", "This run")


def load(name: str) -> Any:
    """What `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def plain(annotation: Any) -> Any:
    """What Typer is to parse: an annotation without None and conditions; lists come as text."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Annotated or len(kinds) < len(get_args(annotation)):
        return plain(kinds[0])
    return str if get_origin(annotation) is tuple else annotation


def keyword(name: str, kind: Any, default: Any, text: str, panel: str) -> inspect.Parameter:
    """A flag, or an argument, as a keyword of the function that Typer calls."""
    from commands import flag

    if name in ARGUMENTS:
        annotation = Annotated[kind, typer.Argument(help=text)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
    words = [flag(name), "--lambda"] if name == "lam" else [flag(name)]
    if kind is bool and default is None:
        words = [f"{flag(name)}/--no-{name.replace('_', '-')}"]
    panel = ORDER[0] if name in FIRST else panel
    option = typer.Option(*words, help=escape(text), show_default=False, rich_help_panel=panel)
    annotation = Annotated[Optional[kind] if default is None else kind, option]  # noqa: UP045
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=default, annotation=annotation)


def keywords(command: Command) -> list[inspect.Parameter]:
    """The flags of a command, ordered by panel: one a setting, None if not given, and options."""
    found = [(ORDER[-1], keyword(name, *OPTIONS[name], ORDER[-1])) for name in command.options]
    kind = load(command.settings) if command.settings else None
    swept = load("extras.settings:SWEPT") if command.function == "extras.sweep:sweep" else ()
    for name, field in kind.model_fields.items() if kind else ():
        if name == "swept":
            continue
        group = next(c for c in kind.__mro__ if name in vars(c).get("__annotations__", {}))
        default = field.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        known = not field.is_required() and default is not None
        text = field.description + (f" (default: {shown})" if known else "")
        panel = PANELS.get(group.__name__, "Method")
        parsed = str if name in swept else plain(field.annotation)
        found.append((panel, keyword(name, parsed, None, text, panel)))
    first = {name: i - len(FIRST) for i, name in enumerate(FIRST)}
    found.sort(key=lambda pair: first.get(pair[1].name, ORDER.index(pair[0])))
    return [made for _, made in found]


# --- running ----------------------------------------------------------------------------------


def run(name: str, given: dict[str, Any]) -> int:
    """Run a command and print what it returns; the exit code."""
    command = COMMANDS[name]
    own = {option: given.pop(option) for option in command.options}
    as_json, quiet = own.pop("json"), own.pop("quiet", False)
    listen(quiet)
    function, settled = command.function, ()
    if command.settings:
        from commands import settle

        told = {key: value for key, value in given.items() if value is not None}
        preset, file = own.pop("preset", "paper"), own.pop("config")
        config, sources = settle(load(command.settings), told, file, preset)
        settled = (config, own.pop("out") or default_out(name, config))
        every = own.pop("all")
        if own.pop("dry_run"):
            say(tell(name, config, sources, settled[1], every or as_json), as_json)
            return 0
    if "quiet" in command.options:
        from run import start_processes, stop

        stop.install()
        start_processes()
    for look in ("rollout", "similarity"):
        function = f"extras.look:{look}" if own.get(look) else function
    with Bars(quiet or as_json) as bars:
        if "quiet" in command.options:
            own["track"] = bars.track
        result = simple(load(function)(*settled, **own))
    if name == "align":
        result["next"] = f"bisslight finetune --from {settled[1]}"
    say(result, as_json)
    return int(isinstance(result, dict) and bool(result.get("problems")))


def default_out(name: str, config: Any) -> Path:
    """runs/align-cub200-vit_l16-r64-s0"""
    place = getattr(config, "dataset", None) or getattr(config, "pool", None) or ""
    start = getattr(config, "start", None)
    parts = [name, Path(place.removeprefix("folder:")).name, config.backbone]
    parts += [f"from-{start.name}" if start else "", f"r{getattr(config, 'rank', '')}".strip("r")]
    words = [str(part).replace(":", "-").replace("/", "-") for part in parts if part]
    return Path("runs") / "-".join([*words, f"s{config.seed}"])


def tell(name: str, config: Any, sources: Any, out: Path, every: bool) -> dict[str, Any]:
    """--dry-run: what would run, where to, and which settings are not the paper's."""
    from commands import differences, flag

    module = {"align": "model", "finetune": "model"}.get(name, f"extras.{name}")
    plan = {"out": out} | load(f"{module}:plan")(config)
    for warmup, length in (("warmup", "alternations"), ("warmup_epochs", "epochs")):
        if getattr(config, warmup, 0) >= getattr(config, length, float("inf")):
            plan["warning"] = f"{flag(warmup)} is not shorter than {flag(length)}"
    rows = differences(config, sources, every)
    return plan | {"settings" if every else "differs from the paper": rows or "nothing"}


def listen(quiet: bool) -> None:
    """Notes and warnings of the modules on stderr; only warnings with --quiet."""
    log = logging.getLogger("bisslight")
    log.setLevel(logging.WARNING if quiet or other_rank() else logging.INFO)
    log.handlers = [logging.StreamHandler(sys.stderr)]


def other_rank() -> bool:
    """Whether this is one of several processes (torchrun), and not the first."""
    return os.environ.get("RANK", "0") != "0"


# --- what a person sees -----------------------------------------------------------------------


class Forgiving(io.TextIOBase):
    """A stream whose reader may leave: what nobody reads is dropped, no run ends of it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names that are no text, ASCII terminals

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.stream.write(text)
            self.stream.flush()
        return len(text)

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()


class Bars:
    """Progress on stderr: a bar with ETA on a terminal, elsewhere a plain line an item."""

    def __init__(self, quiet: bool) -> None:
        console = Console(file=sys.stderr, highlight=False)
        columns = (TextColumn("{task.description:>8}"), BarColumn(16), MofNCompleteColumn())
        left = (TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
        self.live = Progress(*columns, *left, console=console, disable=not console.is_terminal)
        self.quiet, self.room = quiet or other_rank(), max(console.width - 52, 10)

    def __enter__(self) -> "Bars":
        if not self.quiet:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def track(self, items: Iterator[T], total: int, label: str, done: int = 0) -> Iterator[T]:
        """The items, shown one by one: one loss and the last validation, or the line it is."""
        began, val = time.monotonic(), ""
        bar = self.live.add_task(label, total=total, completed=done, text="")
        for n, item in enumerate(items, done + 1):
            text = item if isinstance(item, str) else ""
            if isinstance(item, dict):
                val = f"  val {item['val_P']['accuracy']:.1f} %" if "val_P" in item else val
                text = f"loss {fmean(item['loss_P']):.4f}{val}"
            self.live.update(bar, completed=n, text=text[: self.room])
            if not (self.quiet or self.live.console.is_terminal):
                left = timedelta(
                    seconds=round((time.monotonic() - began) / (n - done) * (total - n))
                )
                print(f"{label} {n}/{total}  {text}  ETA {left}", file=sys.stderr)
            yield item
        self.live.remove_task(bar)


def simple(result: Any) -> Any:
    """Named tuples as dicts, paths as text: what JSON and the printer know.

    >>> simple({"out": Path("runs/a"), "rates": (0.1, 0.2)})
    {'out': 'runs/a', 'rates': [0.1, 0.2]}
    """
    if hasattr(result, "_asdict"):
        result = result._asdict()
    if isinstance(result, dict):
        return {str(key): simple(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [simple(value) for value in result]
    return str(result) if isinstance(result, Path) else result


def say(result: Any, as_json: bool) -> None:
    """A result on stdout: JSON, or a line a value and a table for each list of dicts."""
    result = simple(result)
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items() if isinstance(result, dict) else [("", result)]:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            print((f"{key}:\n" if key else "") + table(value))
        elif value not in (None, [], {}):
            print(f"{key}: {readable(value)}")


def table(rows: list[dict[str, Any]]) -> str:
    """A column a key; columns without a value, or that hold lists, are only in the JSON."""
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    kept = {
        key: values
        for key, values in columns.items()
        if any(value is not None for value in values)
        and not any(isinstance(v, list) for v in values)
    }
    drawn = Table(*kept, box=None, pad_edge=False)
    for values in zip(*kept.values(), strict=True):
        drawn.add_row(*(escape(readable(value)) for value in values))
    file = io.StringIO()
    Console(file=file, width=None if sys.stdout.isatty() else 200, highlight=False).print(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def readable(value: Any) -> str:
    """A value as people write it.

    >>> readable({"networks": 0.65471, "rates": (0.1, 3), "paper": None})
    'networks 0.6547, rates 0.1, 3'
    """
    if isinstance(value, dict):
        return ", ".join(f"{k} {readable(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(readable, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


# --- exit codes -------------------------------------------------------------------------------

LESS = "--micro-batch, halved until it fits, and --recompute need less and keep the result"
CODES = {"UsageError": 2, "RunError": 1, "Diverged": 1, "ImageError": 1, "ChildProcessError": 1}


def build(arguments: list[str]) -> typer.Typer:
    """The program, with the flags of the command that is asked for."""
    shown: Any = {"rich_markup_mode": "rich", "add_completion": False}
    app, data = typer.Typer(**shown), typer.Typer(help="The paper's datasets.", **shown)
    app.callback(invoke_without_command=True)(version)
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")

        def called(name: str = name, **given: Any) -> int:
            return run(name, given)

        wanted = keywords(command) if last in arguments else []
        called.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
        called.__annotations__ = {made.name: made.annotation for made in wanted}
        example = escape(f"Example: bisslight {command.example}")
        (data if group else app).command(last, help=command.about, epilog=example)(called)
    app.add_typer(data, name="data")
    return app


def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """BiSSLight aligns self-supervised backbones with a downstream task, before fine-tuning."""
    if show:
        from importlib.metadata import version as installed

        print(f"bisslight {installed('bisslight')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; exit codes 0, 1 failure, 2 usage, 130 Ctrl-C, 143 SIGTERM."""
    sys.stdout = io.StringIO() if other_rank() else Forgiving(sys.stdout)
    sys.stderr = Forgiving(sys.stderr)
    sys.exit(answer(sys.argv[1:]))


def answer(arguments: list[str]) -> int:
    """The exit code of one command line; an error is told in one line."""
    try:
        program = typer.main.get_command(build(arguments))
        code = program(arguments or ["--help"], prog_name="bisslight", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BaseException as error:
        code, line = verdict(error)
        if code is None:
            raise
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        words = (word if len(word) <= 400 else f"{word[:100]}..." for word in line.split())
        print(f"{rank}{'error: ' * (code < 128)}{' '.join(words)}", file=sys.stderr)
        return code


def verdict(error: Any) -> tuple[int | None, str]:
    """Exit code and line of an error; no code for a defect, which ends with its traceback."""
    name, text = type(error).__name__, str(error)
    if name == "Stopped":
        return 128 + error.number, error.where
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return 130, "stopped; the same command goes on"
    if name == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate" in text:
        return 1, f"out of memory: {LESS}"
    if isinstance(error, OSError) and error.strerror:
        denied = "; allow this user to read and write it" * isinstance(error, PermissionError)
        return 1, f"{error.filename or ''}: {error.strerror}{denied}"
    if hasattr(error, "format_message"):  # Typer's own complaints
        return 2, error.format_message()
    return CODES.get(name), text


if __name__ == "__main__":
    main()
