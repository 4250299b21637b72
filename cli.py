"""The command line: flags from settings, one table of commands, exit codes.

A command is a function of a module; it is imported when it is called, and flags are made only for
the command that is asked for, so `--help` and a wrong name are answered before torch is loaded.
Its result, a dict or a list of dicts, is printed by `screen`.
"""

import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from screen import Forgiving, bars, listen, other_rank, say, simple

RUN = "out config force dry_run json quiet"
LOOK = "rollout similarity seed weights data_root device"
COMMANDS = {  # the function, the class of its settings, its other options and arguments
    "align": ("align:align", "commands:AlignConfig", f"{RUN} preset"),
    "finetune": ("finetune:finetune", "commands:FinetuneConfig", f"{RUN} preset"),
    "evaluate": ("cli:evaluate", "", f"run against picture {LOOK} json"),
    "demo": ("extras.demo:demo", "", "out data_seed jobs force json quiet"),
    "pretrain": ("extras.pretrain:pretrain", "extras.pretrain:PretrainConfig", RUN),
    "sweep": ("extras.sweep:sweep", "extras.sweep:SweepConfig", RUN),
    "report": ("extras.report:report", "", "runs out json"),
    "bench": ("extras.bench:bench", "extras.bench:BenchConfig", RUN),
    "export": ("extras.export:export", "", "run out seed weights json"),
    "data list": ("extras.datasets:list_all", "", "root json"),
    "data check": ("extras.datasets:check", "", "name root partial json"),
    "data download": ("extras.datasets:download", "", "name root json"),
}
ABOUT = {
    "align": "Align a pretrained backbone with a downstream task: BiSSLight, Algorithm 1.",
    "finetune": "Fine-tune with LoRA, directly or from align runs: rates, seeds, one test.",
    "evaluate": "Compare finished finetune runs: mean, deviation, exact p, the paper's figure.",
    "demo": "The whole story on drawn images, offline, in minutes on a CPU.",
    "pretrain": "Train a backbone from scratch with MAE or I-JEPA, without a checkpoint.",
    "sweep": "Accuracy against LoRA rank, λ, N_L, T or a rate: a comma list is what is swept.",
    "report": "Write one HTML page about runs: accuracies, curves, settings, pictures.",
    "bench": "Time and memory of an alternation: M-FAC, CG, no curvature.",
    "export": "Write a run's adapter for HF peft, for timm and for the released program.",
    "data list": "The paper's datasets: whether they are there, and the terms of their use.",
    "data check": "Open every image of a dataset or folder, count, list what is wrong.",
    "data download": "Fetch and unpack a dataset; its digests are verified.",
}
GIVEN: Any = inspect.Parameter.empty  # an argument, not a flag
ROOT = Path(os.environ.get("BISSLIGHT_DATA", "data"))
OPTIONS: dict[str, tuple[Any, Any, str]] = {  # type, default, help
    "run": (Path, GIVEN, "A finished run, or a directory of one arm's runs."),
    "runs": (list[Path], GIVEN, "Runs, or directories that hold some."),
    "name": (str, GIVEN, "A dataset by name, or folder:DIR."),
    "out": (Path | None, None, "Where the results go. Default: in runs/, by what is run."),
    "config": (Path | None, None, "TOML or JSON file of settings; flags win over it."),
    "preset": (Literal["paper", "as-released"], "paper", "As the paper, or its program, does."),
    "force": (bool, False, "Start over. Without it, the same command goes on."),
    "dry_run": (bool, False, "Check everything and say what would run; write nothing."),
    "json": (bool, False, "One JSON value on stdout and nothing else."),
    "quiet": (bool, False, "No progress."),
    "against": (list[Path], [], "Compare with this one; may be repeated."),
    "picture": (Path | None, None, "Draw it: a PNG, SVG or PDF."),
    "rollout": (int | None, None, "Draw attention rollouts of so many images."),
    "similarity": (bool, False, "Compare layers: CKA and RSA, with the backbone, too."),
    "seed": (int | None, None, "Which seed's adapter. Default: the first."),
    "weights": (Path | None, None, "Where the run's weights are now."),
    "data_root": (Path | None, None, "Where the benchmarks are now."),
    "root": (Path, ROOT, "Where the benchmarks are. Default: $BISSLIGHT_DATA, ./data."),
    "device": (str | None, None, "auto, cpu, cuda or cuda:1."),
    "data_seed": (int, 0, "Seed of the drawn images."),
    "jobs": (int, 2, "Runs at a time."),
    "partial": (bool, False, "It is a subset; do not compare counts."),
}
NAMED = {"start": "--from", "root": "--data-root"}  # flags that are not --their-name
FIRST = ("backbone", "dataset", "pool", "start", "out", "seed")  # on top of --help

# --- flags ------------------------------------------------------------------------------------


def load(name: str) -> Any:
    """What `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def keyword(name: str, kind: Any, default: Any, text: str, panel: str) -> inspect.Parameter:
    """A flag, or an argument, as a keyword of the function that Typer calls."""
    words = [NAMED[name]] if name in NAMED else []
    panel = "What one sets first" if name in FIRST else panel
    more: Any = {
        "help": escape(text),
        "rich_help_panel": panel,
        "metavar": "",
        "show_default": False,
    }
    made = typer.Argument(help=text) if default is GIVEN else typer.Option(*words, **more)
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=default, annotation=Annotated[kind, made])


def keywords(name: str) -> list[inspect.Parameter]:
    """The flags of a command: its settings by class, as text that pydantic reads; its options."""
    _, settings, options = COMMANDS[name]
    kind: Any = load(settings) if settings else object
    found: dict[str, inspect.Parameter] = {}
    for part in kind.__mro__:
        panel = (part.__doc__ or "").partition(":")[0]
        for key in inspect.get_annotations(part):
            field = kind.model_fields.get(key)
            if field and key not in found and key != "swept":
                parsed = bool | None if field.annotation is bool else str | None
                known = not field.is_required() and field.default is not None
                text = field.description + f" (default: {field.default})" * known
                found[key] = keyword(key, parsed, None, text, panel)
    found |= {key: keyword(key, *OPTIONS[key], "This run") for key in options.split()}
    return [found[key] for key in dict.fromkeys((*FIRST, *found)) if key in found]


# --- running ----------------------------------------------------------------------------------


def execute(name: str, given: dict[str, Any]) -> int:
    """Run a command and print what it returns; the exit code."""
    function, settings, options = COMMANDS[name]
    own = {option: given.pop(option) for option in options.split()}
    as_json = own.pop("json")
    quiet = own.pop("quiet", False) or as_json or other_rank()
    listen(quiet)
    settled: tuple[Any, ...] = ()
    if settings:
        told = {key: value for key, value in given.items() if value is not None}
        if name == "sweep":
            lists = [key for key in load("extras.sweep:SWEPT") if "," in told.get(key, "")]
            if lists:
                told["swept"] = {key: told.pop(key).split(",") for key in lists}
        preset, file = own.pop("preset", "paper"), own.pop("config")
        config, sources = load("commands:settle")(load(settings), told, file, preset)
        settled = (config, own.pop("out") or default_out(name, config))
        if own.pop("dry_run"):
            say(simple(tell(name, *settled, sources, as_json)), as_json)
            return 0
    with bars(quiet) as track:
        if "force" in own:  # a command that makes runs
            load("training:stop").install()
            load("training:start_processes")()
            own["track"] = track
        result = simple(load(function)(*settled, **own))
    if not other_rank():
        say(result, as_json)
    return int("problems" in result and bool(result["problems"]))


def evaluate(
    run: Path, against: list[Path], picture: Path | None, rollout: int | None,
    similarity: bool, **where: Any,
) -> Any:  # fmt: skip
    """A table of arms; or a look into their networks, with --rollout or --similarity."""
    runs, given = [run, *against], {key: value for key, value in where.items() if value is not None}
    if given and not similarity and rollout is None:
        flags = "--seed, --weights, --data-root, --device"
        raise load("config:UsageError")(f"{flags}: go with --rollout N or --similarity")
    if rollout is not None:
        return load("extras.look:rollout")(runs, rollout, picture, **given)
    if similarity:
        return load("extras.look:similarity")(runs, **given)
    found = load("evaluate:evaluate")(runs)
    if picture:
        load("extras.figures:draw_arms")(found.arms, picture)
    return found


def default_out(name: str, config: Any) -> Path:
    """runs/align-cub200-vit_l16-r64-s0"""
    place = getattr(config, "dataset", getattr(config, "pool", ""))
    start, rank = getattr(config, "start", None), getattr(config, "rank", None)
    parts = [name, Path(place.removeprefix("folder:")).name, config.backbone]
    parts += [start and f"from-{start.name}", rank and f"r{rank}", f"s{config.seed}"]
    return Path("runs") / "-".join(str(part).replace(":", "-") for part in parts if part)


def tell(name: str, config: Any, out: Path, sources: Any, every: bool) -> Any:
    """--dry-run: what would run, where to, and which settings are not the paper's."""
    module = "model" if name in ("align", "finetune") else f"extras.{name}"
    plan = {"out": out} | load(f"{module}:plan")(config)
    rows = load("commands:differences")(config, sources, every)
    return plan | {"settings" if every else "differs from the paper": rows or "nothing"}


# --- exit codes -------------------------------------------------------------------------------

PROGRAM = "BiSSLight aligns self-supervised backbones with a downstream task, before fine-tuning."
LESS = "; out of memory: a --micro-batch that fits, and --recompute, need less and keep the result"
LOWER = "; give a lower learning rate (--lr, --p-lr, --d-lr, --base-lr) and another --out"
ERRORS = {  # exit code and remedy; any other error is a defect and ends with its traceback
    "UsageError": (2, ""),
    "RunError": (1, ""),
    "ImageError": (1, ""),
    "Diverged": (1, LOWER),
    "OutOfMemoryError": (1, LESS),
    "MemoryError": (1, LESS),
    "Abort": (130, "stopped; the same command goes on"),  # Typer's name for Ctrl-C
}


def build(arguments: list[str]) -> typer.Typer:
    """The program, with the flags of the command that is asked for."""
    shown: Any = {"rich_markup_mode": "rich", "add_completion": False}
    app, data = typer.Typer(help=PROGRAM, **shown), typer.Typer(help="The datasets.", **shown)
    for name in COMMANDS:
        group, _, last = name.rpartition(" ")

        def called(name: str = name, /, **given: Any) -> int:
            return execute(name, given)

        wanted = keywords(name) if last in arguments else []
        called.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
        called.__annotations__ = {made.name: made.annotation for made in wanted}
        (data if group else app).command(last, help=ABOUT[name])(called)
    app.add_typer(data, name="data")
    return app


def main() -> None:
    """Run the command line; exit codes 0, 1 failure, 2 usage, 130 Ctrl-C, 143 SIGTERM."""
    sys.stdout, sys.stderr = Forgiving(sys.stdout), Forgiving(sys.stderr)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of one command line; an error is told in one line."""
    try:
        program = typer.main.get_command(build(arguments))
        return program(arguments or ["--help"], prog_name="bisslight", standalone_mode=False) or 0
    except BaseException as error:
        code, line = verdict(error)
        if code is None:
            raise
        print("error: " * (code < 128) + " ".join(line.split()), file=sys.stderr)
        return code


def verdict(error: Any) -> tuple[int | None, str]:
    """Exit code and line of an error; no code for a defect."""
    if type(error).__name__ == "Stopped":
        return 128 + error.args[0], error.args[1]
    if hasattr(error, "format_message"):  # Typer's own complaints
        return 2, error.format_message()
    name = "RunError" if isinstance(error, OSError) else type(error).__name__
    code, remedy = ERRORS.get(name, (None, ""))
    return code, f"{error}{remedy}"


if __name__ == "__main__":
    main()
