"""The command line: flags from settings, one table of commands, one printer, exit codes.

A command is a function of a module; it is imported when it is called, and flags are made only for
the command that is asked for, so `--help` and a wrong name are answered before torch is loaded.
Its result, a dict or a list of dicts, is printed here.
"""

import importlib
import importlib.util
import inspect
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_origin

import typer
from rich.markup import escape

from screen import Forgiving, bars, listen, other_rank, say, simple

RUN = "out config force dry_run all json quiet"
COMMANDS = {  # the function, the class of its settings, its other options
    "align": ("align:align", "commands:AlignConfig", f"{RUN} preset"),
    "finetune": ("finetune:finetune", "commands:FinetuneConfig", f"{RUN} preset"),
    "evaluate": (
        "cli:evaluate",
        "",
        "run against picture rollout similarity limit seed weights data_root device json",
    ),
    "demo": ("extras.demo:demo", "", "out data_seed jobs force json quiet"),
    "pretrain": ("extras.pretrain:pretrain", "extras.settings:PretrainConfig", RUN),
    "sweep": ("extras.sweep:sweep", "extras.settings:SweepConfig", RUN),
    "report": ("extras.report:report", "", "runs out json"),
    "bench": ("extras.bench:bench", "extras.settings:BenchConfig", RUN),
    "export": ("extras.export:export", "", "run out seed merged weights json"),
    "data list": ("extras.datasets:list_all", "", "data_root json"),
    "data check": ("extras.datasets:check", "", "name data_root partial json"),
    "data download": ("extras.datasets:download", "", "name data_root json"),
}
ABOUT = {
    "align": "Align a pretrained backbone with a downstream task: BiSSLight, Algorithm 1.",
    "finetune": "Fine-tune with LoRA, directly or from align runs: rates, seeds, one test.",
    "evaluate": "Compare finished finetune runs: mean, deviation, exact p, the paper's figure.",
    "demo": "The whole story on drawn images, offline, in minutes on a CPU.",
    "pretrain": "Train a backbone from scratch with MAE or I-JEPA, without a checkpoint.",
    "sweep": "Accuracy against LoRA rank, λ, N_L, T or a rate: a comma list makes a grid.",
    "report": "Write one HTML page about runs: accuracies, curves, settings, pictures.",
    "bench": "Time and memory of an alternation: M-FAC, CG, no curvature, plain PEFT.",
    "export": "Write a run's adapter for HF peft, for timm and for the released program.",
    "data list": "The paper's datasets: sizes, terms, and whether they are there.",
    "data check": "Open every image of a dataset or folder, count, list what is wrong.",
    "data download": "Fetch and unpack a dataset; its digests are verified.",
}
EXAMPLES = {
    "align": "--backbone vit_b16 --dataset dtd --out runs/dtd",
    "finetune": "--from runs/dtd --out runs/dtd-aligned",
    "evaluate": "runs/dtd-aligned --against runs/dtd-direct",
    "pretrain": "--backbone vit_mini --pool quilts",
    "sweep": "--backbone vit_b16 --dataset dtd --rank 1,4,16,64",
    "report": "runs --out report.html",
    "bench": "--backbone vit_b16",
    "export": "runs/dtd-aligned",
    "data check": "folder:photos",
    "data download": "dtd",
}
GIVEN: Any = inspect.Parameter.empty  # an argument, not a flag
OPTIONS: dict[str, tuple[Any, Any, str]] = {  # type, default, help
    "run": (Path, GIVEN, "A finished run, or a directory of one arm's runs."),
    "runs": (list[Path], GIVEN, "Runs, or directories that hold some."),
    "name": (str, GIVEN, "A dataset by name, or folder:DIR."),
    "out": (Path, None, "Where the results go. Default: named after what is run, in runs/."),
    "config": (Path, None, "TOML or JSON file of settings; flags win over it."),
    "preset": (str, "paper", "paper, or as-released: what the authors' program does."),
    "force": (bool, False, "Start over. Without it, the same command goes on."),
    "dry_run": (bool, False, "Check everything and say what would run; write nothing."),
    "all": (bool, False, "With --dry-run: every setting, its value and who set it."),
    "json": (bool, False, "One JSON value on stdout and nothing else."),
    "quiet": (bool, False, "No progress."),
    "against": (list[Path], None, "Compare with this one; may be repeated."),
    "picture": (Path, None, "Draw it: a PNG, SVG or PDF."),
    "rollout": (int, None, "Draw attention rollouts of so many images."),
    "similarity": (bool, False, "Compare layers: CKA and RSA, with the backbone, too."),
    "limit": (int, None, "Images of --similarity. Default: 1000."),
    "seed": (int, None, "Which seed's adapter. Default: the first."),
    "weights": (Path, None, "Where the run's weights are now."),
    "data_root": (Path, None, "Where the benchmarks are. Default: $BISSLIGHT_DATA, else ./data."),
    "device": (str, None, "auto, cpu, cuda or cuda:1."),
    "data_seed": (int, 0, "Seed of the drawn images."),
    "jobs": (int, 2, "Runs at a time."),
    "merged": (bool, None, "Write the merged timm model, too. Default: yes."),
    "partial": (bool, False, "It is a subset; do not compare counts."),
}

# --- flags ------------------------------------------------------------------------------------

FIRST = ("backbone", "dataset", "pool", "start", "out", "seed")
PANELS = {  # the panel of each group of settings
    "Shape": "Model",
    "Model": "Model",
    "Bilevel": "Algorithm 1",
    "Lower": "Lower level",
    "Upper": "Upper level",
    "Pretext": "Pretext task",
    "Data": "Data",
    "Crops": "Data",
    "Machine": "Machine",
    "Common": "Machine",
}
ORDER = ["What one sets first", "Training", *dict.fromkeys(PANELS.values()), "This run"]


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

    words = [flag(name), "--lambda"] if name == "lam" else [flag(name)]
    if kind is bool and default is None:
        words = [f"{flag(name)}/--no-{name.replace('_', '-')}"]
    more: Any = {
        "help": escape(text),
        "show_default": False,
        "rich_help_panel": panel,
        "metavar": "",
    }
    kind = Optional[kind] if default is None else kind  # noqa: UP045
    made = typer.Argument(help=text) if default is GIVEN else typer.Option(*words, **more)
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=default, annotation=Annotated[kind, made])


def keywords(name: str) -> list[inspect.Parameter]:
    """The flags of a command: one a setting, None where it is not given, and its options."""
    _, settings, options = COMMANDS[name]
    found = [(ORDER[-1], option, *OPTIONS[option]) for option in options.split()]
    if settings:
        kind = load(settings)
        swept = load("extras.settings:SWEPT") if name == "sweep" else ()
        for key, field in kind.model_fields.items():
            group = next(c for c in kind.__mro__ if key in vars(c).get("__annotations__", {}))
            default = field.default
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            known = not field.is_required() and default is not None
            text = field.description + (f" (default: {shown})" if known else "")
            parsed = str if key in swept else plain(field.annotation)
            found.append((PANELS.get(group.__name__, "Training"), key, parsed, None, text))
    first = {key: i - len(FIRST) for i, key in enumerate(FIRST)}
    found = [(ORDER[0] if row[1] in FIRST else row[0], *row[1:]) for row in found]
    found.sort(key=lambda row: first.get(row[1], ORDER.index(row[0])))
    return [keyword(*row[1:], row[0]) for row in found if row[1] != "swept"]


# --- running ----------------------------------------------------------------------------------


def execute(name: str, given: dict[str, Any]) -> int:
    """Run a command and print what it returns; the exit code."""
    function, settings, options = COMMANDS[name]
    own = {option: given.pop(option) for option in options.split()}
    as_json, long = own.pop("json"), "quiet" in own
    first = os.environ.get("RANK", "0") == "0"  # of torchrun's processes, the first one speaks
    quiet = own.pop("quiet", False) or not first
    listen(quiet or as_json)
    settled: tuple[Any, ...] = ()
    if settings:
        from commands import settle

        told = {key: value for key, value in given.items() if value is not None}
        preset, file = own.pop("preset", "paper"), own.pop("config")
        config, sources = settle(load(settings), told, file, preset)
        settled = (config, own.pop("out") or default_out(name, config))
        dry, every = own.pop("dry_run"), own.pop("all") or as_json
        if dry:
            say(tell(name, *settled, sources, every), as_json)
            return 0
    if function.startswith("extras.datasets"):
        own["root"] = own.pop("data_root") or Path(os.environ.get("BISSLIGHT_DATA", "data"))
    with bars(quiet or as_json) as track:
        if long:
            load("training:stop").install()
            load("training:start_processes")()
            own["track"] = track
        result = simple(load(function)(*settled, **own))
    if name == "align":
        result["next"] = f"bisslight finetune --from {settled[1]}"
    if first:
        say(result, as_json)
    return int(isinstance(result, dict) and bool(result.get("problems")))


def evaluate(
    run: Path, against: list[Path] | None, picture: Path | None, rollout: int | None,
    similarity: bool, limit: int | None, **where: Any,
) -> Any:  # fmt: skip
    """A table of arms; or a look into their networks, with --rollout or --similarity."""
    from config import UsageError

    runs = [run, *(against or [])]
    given = {name: value for name, value in where.items() if value is not None}
    if similarity and rollout is None and picture is None:
        return load("extras.look:similarity")(runs, limit or 1000, **given)
    if similarity or limit is not None or (given and rollout is None):
        flags = "--seed, --weights, --data-root, --device"
        raise UsageError(
            f"{flags}: go with --rollout N or --similarity, --limit with the latter, --picture not"
        )
    if rollout is not None:
        return load("extras.look:rollout")(runs, rollout, picture, **given)
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
    words = [str(part).replace(":", "-").replace("/", "-") for part in parts if part]
    return Path("runs") / "-".join(words)


def tell(name: str, config: Any, out: Path, sources: Any, every: bool) -> Any:
    """--dry-run: what would run, where to, and which settings are not the paper's."""
    from commands import differences, flag

    module = "model" if name in ("align", "finetune") else f"extras.{name}"
    plan = {"out": out} | load(f"{module}:plan")(config)
    for warmup, length in (("warmup", "alternations"), ("warmup_epochs", "epochs")):
        if getattr(config, warmup, 0) >= getattr(config, length, float("inf")):
            plan["warning"] = f"{flag(warmup)} is not shorter than {flag(length)}"
    rows = differences(config, sources, every)
    return plan | {"settings" if every else "differs from the paper": rows or "nothing"}


# --- exit codes -------------------------------------------------------------------------------

LESS = "--micro-batch, halved until it fits, and --recompute need less and keep the result"
CALMER = {
    "align": "a lower --p-lr or --d-lr or a higher --lam",
    "finetune": "a lower --lr",
    "pretrain": "a lower --base-lr or a longer --warmup-epochs",
}
CODES = {"UsageError": 2, "RunError": 1, "Diverged": 1, "ImageError": 1, "ChildProcessError": 1}


def build(arguments: list[str]) -> typer.Typer:
    """The program, with the flags of the command that is asked for."""
    shown: Any = {"rich_markup_mode": "rich", "add_completion": False}
    app, data = typer.Typer(**shown), typer.Typer(help="The paper's datasets.", **shown)
    app.callback(invoke_without_command=True)(version)
    there = importlib.util.find_spec("extras") is not None
    for name in (name for name in COMMANDS if there or not COMMANDS[name][0].startswith("extras")):
        group, _, last = name.rpartition(" ")

        def called(name: str = name, /, **given: Any) -> int:
            return execute(name, given)

        wanted = keywords(name) if last in arguments else []
        called.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
        called.__annotations__ = {made.name: made.annotation for made in wanted}
        example = escape(f"Example: bisslight {name} {EXAMPLES.get(name, '')}")
        (data if group else app).command(last, help=ABOUT[name], epilog=example)(called)
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
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of one command line; an error is told in one line."""
    try:
        program = typer.main.get_command(build(arguments))
        code = program(arguments or ["--help"], prog_name="bisslight", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BaseException as error:
        code, line = verdict(error)
        if code is None:
            raise
        if type(error).__name__ == "Diverged":
            line += f"; try {CALMER.get(arguments[0], 'a lower rate')}, with another --out"
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        words = (word if len(word) <= 400 else f"{word[:100]}..." for word in line.split())
        print(f"{rank}{'error: ' * (code < 128)}{' '.join(words)}", file=sys.stderr)
        return code


def verdict(error: Any) -> tuple[int | None, str]:
    """Exit code and line of an error; no code for a defect, which ends with its traceback."""
    name, text = type(error).__name__, str(error)
    if name == "Stopped":
        return 128 + error.args[0], error.args[1]
    if isinstance(error.__cause__ or error, KeyboardInterrupt):  # Typer raises its own from it
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
