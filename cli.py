"""The command line: flags from settings, one table of commands, exit codes.

The module of a command is imported when it is called, and flags are made only for the command that
is asked for, so `--help` and a wrong name are answered before torch is loaded.
"""

import os
import sys
from inspect import Parameter, Signature, get_annotations
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from screen import bars, forgiving, say

RUN = "out config force dry_run json quiet"
COMMANDS = {  # what it does, the function, the class of its settings, its options and arguments
    "align": ("Align a pretrained backbone with a downstream task: BiSSLight, Algorithm 1.",
        "align:align", "commands:AlignConfig", f"{RUN} preset"),
    "finetune": ("Fine-tune with LoRA, directly or from align runs: rates, seeds, one test.",
        "finetune:finetune", "commands:FinetuneConfig", f"{RUN} preset"),
    "evaluate": ("Compare finished finetune runs: mean, deviation, exact p, the paper's figure.",
        "cli:evaluate", "",
        "run against picture rollout similarity seed weights data_root device json"),
    "demo": ("The whole story on drawn images, offline, in minutes on a CPU.",
        "extras.demo:demo", "", "out data_seed jobs force json quiet"),
    "pretrain": ("Train a backbone from scratch with MAE or I-JEPA, without a checkpoint.",
        "extras.pretrain:pretrain", "extras.pretrain:PretrainConfig", RUN),
    "sweep": ("Accuracy against LoRA rank, λ, N_L, T or a rate: a comma list is what is swept.",
        "extras.sweep:sweep", "extras.sweep:SweepConfig", RUN),
    "report": ("Write one HTML page about runs: accuracies, curves, settings, pictures.",
        "extras.report:report", "", "runs out json"),
    "bench": ("Time and memory of an alternation: M-FAC, CG, no curvature.",
        "extras.bench:bench", "", "backbone rank p_batch d_batch lower_steps upper_steps "
        "repeats seed device amp recompute micro_batch json quiet"),
    "export": ("Write a run's adapter for HF peft, for timm and for the released program.",
        "extras.export:export", "", "run out seed weights json"),
    "data list": ("The paper's datasets: whether they are there, and the terms of their use.",
        "benchmarks:list_all", "", "root json"),
    "data check": ("Open every image of a dataset or folder, count, list what is wrong.",
        "benchmarks:check", "", "name root partial json"),
    "data download": ("Fetch and unpack a dataset; its digests are verified.",
        "benchmarks:download", "", "name root json"),
}  # fmt: skip
Size = Literal["vit_mini", "vit_b16", "vit_l16", "vit_h14"]
OPTIONS: dict[str, tuple[Any, Any, str]] = {  # type, default (...: an argument, no flag), help
    "run": (Path, ..., "A finished run, or a directory of one arm's runs."),
    "runs": (list[Path], ..., "Runs, or directories that hold some."),
    "name": (str, ..., "A dataset by name, or folder:DIR."),
    "out": (Path | None, None, "Where results go. Default: below runs/, report.html, RUN/export."),
    "config": (Path | None, None, "TOML or JSON file of settings; flags win over it."),
    "preset": (Literal["paper", "as-released"], "paper", "As the paper, or its program, does."),
    "force": (bool, False, "Start over. Without it, the same command goes on."),
    "dry_run": (bool, False, "Check everything and say what would run; write nothing."),
    "json": (bool, False, "One JSON value on stdout and nothing else."),
    "quiet": (bool, False, "No progress."),
    "against": (list[Path], [], "Compare with this run or directory; may be repeated."),
    "picture": (Path | None, None, "Draw the result to this PNG, SVG or PDF."),
    "rollout": (int | None, None, "Draw attention rollouts of so many images."),
    "similarity": (bool, False, "CKA and RSA of features, with those of the backbone, too."),
    "seed": (int | None, None, "Seed of the adapter (default: the first), or of random numbers."),
    "weights": (Path | None, None, "Where the run's weights are now."),
    "data_root": (Path | None, None, "Where the benchmarks are now."),
    "root": (Path, os.environ.get("BISSLIGHT_DATA", "data"), "Where the benchmarks are."),
    "device": (str | None, None, "auto, cpu, cuda or cuda:1."),
    "data_seed": (int, 0, "Seed of the drawn images."),
    "jobs": (int, 2, "Runs at a time."),
    "partial": (bool, False, "It is a subset; missing images are no problem."),
    "backbone": (Size | None, None, "vit_b16, vit_l16, vit_h14; vit_mini takes a minute on a CPU."),
    "rank": (int, 64, "r. [App. C.3]"),
    "p_batch": (int, 256, "Images per lower step. [App. C.3]"),
    "d_batch": (int, 64, "Images per upper step. [App. C.3]"),
    "lower_steps": (int, 20, "N_L. [App. C.3]"),
    "upper_steps": (int, 8, "N_U. [App. C.3]"),
    "repeats": (int, 3, "Timed alternations per method, after one that warms up."),
    "amp": (bool | None, None, "bfloat16 autocast on CUDA."),
    "recompute": (bool | None, None, "Activation checkpointing of the backbone."),
    "micro_batch": (int | None, None, "Largest number of images that pass at once."),
}
NAMED = {"start": ["--from"], "root": ["--data-root"]}  # flags that are not --their-name
LESS = "; out of memory: a --micro-batch that fits, and --recompute, need less and keep the result"
REMEDIES = {  # any other error is a defect and ends with its traceback
    "UsageError": "",
    "RunError": "",
    "ImageError": "",
    "Diverged": "; give a lower learning rate (--lr, --p-lr, --d-lr, --base-lr) and another --out",
    "OutOfMemoryError": LESS,
    "MemoryError": LESS,
    "Abort": "stopped; the same command goes on",  # Typer's name for Ctrl-C
}
FIRST = ("backbone", "dataset", "pool", "start", "out", "seed")  # on top of --help


def keyword(name: str, kind: Any, default: Any, text: str, panel: str) -> Parameter:
    """A flag, or an argument, as a keyword of the function that Typer calls."""
    flags = NAMED.get(name, [f"--{name.replace('_', '-')}"] if kind is bool else [])
    panel = "What one sets first" if name in FIRST else panel
    option = typer.Option(*flags, help=escape(text), metavar="", rich_help_panel=panel)
    meant = Annotated[kind, typer.Argument(help=text) if default is ... else option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=meant)


def keywords(name: str) -> list[Parameter]:
    """Flags of a command: of its settings, class by class, as text for pydantic; its options."""
    _, _, settings, options = COMMANDS[name]
    kind: Any = resolve_name(settings) if settings else object
    found: dict[str, Parameter | None] = dict.fromkeys(FIRST)
    for part in kind.__mro__:
        panel = (part.__doc__ or "").partition(":")[0]
        for key in get_annotations(part):
            field = kind.model_fields.get(key)
            if field and not found.get(key) and key != "swept":
                known = not field.is_required() and field.default is not None
                text = field.description + f" (default: {field.default})" * known
                read = bool | None if field.annotation is bool else str | None
                found[key] = keyword(key, read, None, text, panel)
    found |= {key: keyword(key, *OPTIONS[key], "This run") for key in options.split()}
    return [made for made in found.values() if made]


def execute(name: str, given: dict[str, Any]) -> int:
    """Run a command and print what it returns; the exit code."""
    _, function, settings, options = COMMANDS[name]
    own = {option: given.pop(option) for option in options.split()}
    as_json, first = own.pop("json"), os.environ.get("RANK", "0") == "0"  # of torchrun's processes
    quiet = own.pop("quiet", False) or as_json or not first
    if settings:
        told = {key: value for key, value in given.items() if value is not None}
        if name == "sweep":
            lists = [key for key in resolve_name("extras.sweep:SWEPT") if "," in told.get(key, "")]
            if lists:
                told["swept"] = {key: told.pop(key).split(",") for key in lists}
        own["cfg"], rows = resolve_name("commands:settle")(
            resolve_name(settings), told, own.pop("config"), own.pop("preset", "paper"), as_json
        )
        own["out"] = own["out"] or default_out(name, own["cfg"])
        if own.pop("dry_run"):
            module = "model" if name in ("align", "finetune") else f"extras.{name}"
            plan = resolve_name(f"{module}:plan")(own["cfg"])
            about = {"settings" if as_json else "differs from the paper": rows or "nothing"}
            say({"out": own["out"]} | plan | about, as_json)
            return 0
    with bars(quiet) as track:
        if "force" in own:  # a command that makes runs
            resolve_name("training:stop").install()
            resolve_name("training:start_processes")()
            own["track"] = track
        result = resolve_name(function)(**own)
    if first:
        say(result, as_json)
    return int(bool(isinstance(result, dict) and result.get("problems")))


def evaluate(
    run: Path, against: list[Path], picture: Path | None, rollout: int | None,
    similarity: bool, **where: Any,
) -> Any:  # fmt: skip
    """A table of arms; or a look into their networks, with --rollout or --similarity."""
    runs, given = [run, *against], {key: value for key, value in where.items() if value is not None}
    if rollout is not None:
        return resolve_name("extras.look:rollout")(runs, rollout, picture, **given)
    if similarity:
        return resolve_name("extras.look:similarity")(runs, **given)
    if given:
        raise resolve_name("config:UsageError")(
            "--seed, --weights, --data-root, --device: go with --rollout N or --similarity"
        )
    found = resolve_name("evaluate:evaluate")(runs)
    if picture:
        resolve_name("extras.report:draw_arms")(found.arms, picture)
    return found


def default_out(name: str, config: Any) -> Path:
    """runs/align-cub200-vit_l16-r64-s0"""
    data = Path(getattr(config, "dataset", getattr(config, "pool", ""))).name
    start, rank = getattr(config, "start", None), getattr(config, "rank", None)
    parts = [name, data, config.backbone, start and f"from-{start.name}", rank and f"r{rank}"]
    return Path("runs", "-".join([*filter(None, parts), f"s{config.seed}"]).replace(":", "-"))


def build(arguments: list[str]) -> typer.Typer:
    """The program, with the flags of the command that is asked for."""
    app, data = typer.Typer(add_completion=False), typer.Typer(help="The datasets.")

    @app.callback(invoke_without_command=True)
    def program(
        version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    ) -> None:
        """BiSSLight aligns self-supervised backbones with a downstream task, before fine-tuning."""
        if version:
            print(f"bisslight {resolve_name('importlib.metadata:version')('bisslight')}")

    for name in COMMANDS:
        group, _, last = name.rpartition(" ")

        @(data if group else app).command(last, help=COMMANDS[name][0])
        def called(name: str = name, /, **given: Any) -> int:
            return execute(name, given)

        wanted = keywords(name) if last in arguments else []
        called.__signature__ = Signature(wanted)  # type: ignore[attr-defined]
    app.add_typer(data, name="data")
    return app


def main() -> None:
    """Run the command line; exit codes 0, 1 failure, 2 usage, 130 Ctrl-C, 143 SIGTERM."""
    sys.stdout, sys.stderr = forgiving(sys.stdout), forgiving(sys.stderr)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of one command line; an error is told in one line."""
    try:
        program = typer.main.get_command(build(arguments))
        return program(arguments or ["--help"], prog_name="bisslight", standalone_mode=False) or 0
    except BaseException as error:
        kind = "RunError" if isinstance(error, OSError) else type(error).__name__
        code = {"UsageError": 2, "Abort": 130}.get(kind, 1)
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
