"""The command line: a function for each command, flags made of settings, progress, exit codes.

A command imports what it runs inside its function, so that help is shown without loading torch.
"""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from pydantic_core import to_jsonable_python

from config import (
    AlignConfig,
    Command,
    FinetuneConfig,
    PretrainConfig,
    Record,
    Settings,
    make,
    paper_values,
    read_align_run,
    read_table,
    released_values,
)
from support.errors import RunError, UsageError, nearest
from support.flags import signature_of
from support.screen import (
    Answer,
    Result,
    is_first_process,
    list_fields,
    one_line,
    print_answer,
    tell,
)

if TYPE_CHECKING:
    from align import AlignResult
    from extras.pretrain import PretrainResult
    from finetune import FinetuneResult
    from support.runs import Track

C = TypeVar("C", bound=Command)
R = TypeVar("R", bound=Result)
# what runs a command: its settings, the run directory, whether to start over, what shows progress
Work = Callable[[C, Path, bool, "Track"], R]

# --- the program -------------------------------------------------------------------------------

app = typer.Typer(
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data = typer.Typer(help="List, check and download the data sets.", rich_markup_mode="rich")

# --- commands that have settings ---------------------------------------------------------------


class Options(Settings):
    """This run: where it lies, and what is shown."""

    out: Path | None = None
    """Directory of the run. Default: a name below runs/ that says what is run."""
    config: Path | None = None
    """TOML or JSON file of settings; flags win over it."""
    preset: Literal["paper", "as-released"] = "paper"
    """The paper's values, or those of the authors' program where they are others."""
    dry_run: bool = False
    """Check names, data and weights, and say what would run; nothing is written."""
    all: bool = False
    """As --dry-run, with every setting, not only those that are not the paper's."""
    force: bool = False
    """Start over. Without it, the same command goes on."""
    as_json: bool = False
    """One JSON value on stdout, nothing else."""
    quiet: bool = False
    """Show no progress."""


BRACKETS = (
    "In brackets: limits, default, and where the default comes from: a section of the paper,"
    " released (its authors' program where the paper is silent), MAE, I-JEPA, or here (our own)."
)


KINDS: dict[str, type[Command]] = {
    "align": AlignConfig,
    "finetune": FinetuneConfig,
    "pretrain": PretrainConfig,
}


# settings by what they are from; the last one that has a setting wins
Layers = dict[str | Path | None, Record]


def add_command(function: Work[C, R], kind: type[C], example: str) -> None:
    """Make a function a command of the program, with a flag for each setting of `kind`."""
    name = function.__name__
    command: Any = partial(run_command, function, kind)
    command.__signature__ = signature_of(kind, Options)  # Typer reads the flags from these two
    command.__annotations__ = {}
    epilog = f"Example: bisslight {name} {example}\n\n{BRACKETS}"
    app.command(name, help=function.__doc__, epilog=epilog)(command)


def run_command(function: Work[C, R], kind: type[C], **texts: object) -> int:
    """Run a command that has settings, or say what it would do; returns the exit code.

    `texts` has what was typed after each flag, by the name of its setting or option; None where
    the flag was not given.
    """
    flags: Record = {}
    given_options: Record = {}
    for name, text in texts.items():
        if text is None:
            continue
        if name in Options.model_fields:
            given_options[name] = text
        elif name.startswith("no_"):  # the hidden flag that switches a setting off
            flags[name.removeprefix("no_")] = False
        else:
            flags[name] = text
    options = make(Options, given_options)
    layers = collect_layers(kind, flags, options)
    values: Record = {}
    for layer in layers.values():
        values |= layer
    cfg = make(kind, values)
    warn_about_warmup(cfg)
    command = function.__name__
    out = options.out or default_out(command, cfg)
    if options.dry_run or options.all:
        return tell_problems(dry_run(command, cfg, out, layers, options))
    from support.missing import list_missing

    if tell_problems(list_missing(cfg)):
        return 2
    with training(options.quiet or options.as_json) as track:
        result = function(cfg, out, options.force, track)
    show(result, result.in_words(), options.as_json)
    from support.processes import leave  # with torch, so not before all names were checked

    leave()  # not before all is told, which process 0 does alone
    return 0


def show(result: object, words: Answer, as_json: bool) -> None:
    """Print a result, in process 0 only: as JSON, or in words."""
    if not is_first_process():
        return
    if as_json:
        tell(json.dumps(to_jsonable_python(result)), sys.stdout)
    else:
        print_answer(words)


def dry_run(command: str, cfg: Command, out: Path, layers: Layers, options: Options) -> list[str]:
    """Print what a command would do; returns the problems that keep it from doing so."""
    from extras.dry_run import plan_run

    every = options.all or options.as_json
    plan = plan_run(command, cfg, out, options.force)
    rows = list_settings(cfg, layers, every)
    recipe = "MAE or I-JEPA" if command == "pretrain" else "the paper"
    title = "settings" if every else f"differs from {recipe}"
    told = {"out": out} | plan.work | {title: rows or "nothing"}
    show(told, list_fields(told), options.as_json)
    return plan.problems


def tell_problems(problems: list[str]) -> int:
    """Tell each in a line; the exit code."""
    for problem in problems:
        fail(problem, 2)
    return 2 if problems else 0


def settings_of_command(kind: type[Command], path: Path) -> Record:
    """The settings of a command in a file that may serve others, too (UsageError).

    Settings stand at the top or in the section of a command, such as [align].
    """
    own = kind.__name__.removesuffix("Config").lower()
    table = read_table(path)
    sections = {name: table.pop(name) for name in KINDS if isinstance(table.get(name), dict)}
    section = {name.replace("-", "_"): value for name, value in sections.get(own, {}).items()}
    for name in section:
        if name not in kind.model_fields:
            known = nearest(name, kind.model_fields)
            raise UsageError(f"{path}: [{own}]: {name} is no setting of {own}, {known}")
    others = [name for name in table if name not in kind.model_fields]
    for name in others:
        if not any(name in other.model_fields for other in KINDS.values()):
            raise UsageError(f"{path}: {name} is no setting, {nearest(name, kind.model_fields)}")
        del table[name]
    if others:
        tell(f"{path}: {', '.join(others)}: of other commands, left out", sys.stderr)
    return table | section


def collect_layers(kind: type[Command], flags: Record, options: Options) -> Layers:
    """What was given, by who gave it (UsageError)."""
    table: Record = {}
    if options.config is not None:
        table = settings_of_command(kind, options.config)
    # Known first, since what an align run and a preset add depends on them.
    table_and_flags = table | flags
    layers: Layers = {}
    if "start" in table_and_flags:
        start = Path(str(table_and_flags["start"])).expanduser()
        if not start.is_file():  # a LoRA file brings no settings
            dataset = table_and_flags.get("dataset")
            restart = table_and_flags.get("restart")
            layers["run before"] = read_align_run(start, dataset, restart)
    if options.preset == "as-released":
        layers["preset as-released"] = released_values(kind, "start" in table_and_flags)
    # The file by its Path, which is equal to no text: it may be called "flag", or like a backbone.
    return layers | {options.config: table, "flag": flags}


def list_settings(cfg: Command, layers: Layers, every: bool) -> list[Record]:
    """A row for each setting that is not the paper's, or for all: its value and who set it."""
    sources: Record = {}  # of each setting: the last layer that has it
    for source, values in [*cfg.our_defaults(dict(cfg)).items(), *layers.items()]:
        sources |= dict.fromkeys(values, str(source))
    paper = paper_values(type(cfg), dict(cfg))
    no_value_in_paper = {"start", "weights", "pretext", *Command.model_fields}
    rows = []
    for name, value in cfg:
        is_unlike_paper = value != paper.get(name, value) and name not in no_value_in_paper
        if is_unlike_paper or every:
            row = {"setting": name, "value": value, "set by": sources.get(name, "default")}
            rows.append(row | {"paper": paper.get(name)})
    return rows


def default_out(command: str, cfg: Command) -> Path:
    """Such as runs/align-cub200-vit_l16-r64-s0."""
    settings = dict(cfg)
    images = settings.get("dataset") or settings["pool"]
    parts = [command, Path(images).name, settings["backbone"]]
    if settings.get("start"):
        parts.append(f"from-{settings['start'].name}")
    if "rank" in settings:
        parts.append(f"r{settings['rank']}")
    parts.append(f"s{cfg.seed}")
    return Path("runs", "-".join(parts).replace(":", "-"))


def warn_about_warmup(cfg: Command) -> None:
    """Warn where the warm-up takes the whole run, so that its learning rates are never reached."""
    settings = dict(cfg)
    for warmup, length in (("warmup", "alternations"), ("warmup_epochs", "epochs")):
        if warmup in settings and settings[warmup] >= settings[length]:
            flag = f"--{warmup.replace('_', '-')}"
            problem = "the warm-up is not shorter than the run, so no learning rate is reached"
            tell(f"{problem}; see {flag}", sys.stderr)


@contextmanager
def training(quiet: bool) -> Iterator["Track"]:
    """Let runs hear signals and torchrun's other processes, and tell failures with a remedy.

    Hands out what shows progress, unless it shall be `quiet`.
    """
    from concurrent.futures.process import BrokenProcessPool

    import torch

    from bisslight import Diverged
    from support.processes import Stopped, leave, start
    from support.progress import progress

    start()
    try:
        with progress(quiet) as track:
            yield track
    except Diverged as error:
        rates = "--lr, --p-lr, --d-lr, --base-lr"
        remedy = f"give a lower learning rate ({rates}) and another --out"
        raise RunError(f"{error}; {remedy}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        remedy = "a --micro-batch that fits, or --recompute, needs less"
        raise RunError(f"{error}; out of memory: {remedy}") from error
    except BrokenProcessPool as error:
        remedy = "perhaps memory was short: lower --jobs, then the same command goes on"
        raise RunError(f"{error}; {remedy}") from error
    except Stopped as stopped:
        leave()
        signal, message = stopped.args
        tell(message, sys.stderr)
        raise typer.Exit(128 + signal) from stopped


# --- the commands ------------------------------------------------------------------------------

AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Force = Annotated[bool, typer.Option("--force", help="Start over. Without it, runs go on.")]
Seed = Annotated[int | None, typer.Option(help="Seed whose adapter is taken. Default: the first.")]
Weights = Annotated[Path | None, typer.Option(help="Where the run's weights are now.")]
Run = Annotated[Path, typer.Argument(help="A finished run.", exists=True, show_default=False)]
DataRoot = Annotated[
    Path, typer.Option("--data-root", help="Where the benchmarks are.", envvar="BISSLIGHT_DATA")
]


def show_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        tell(f"bisslight {version('bisslight')}", sys.stdout)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=show_version)
    ] = False,
) -> None:
    """BiSSLight aligns self-supervised backbones with a downstream task, before fine-tuning."""


def align(cfg: AlignConfig, out: Path, force: bool, track: "Track") -> "AlignResult":
    """Align a pretrained backbone with a downstream task: BiSSLight, Algorithm 1."""
    from align import align

    return align(cfg, out, force=force, track=track)


add_command(align, AlignConfig, "--backbone vit_l16 --dataset cub200 --out runs/cub")


def finetune(cfg: FinetuneConfig, out: Path, force: bool, track: "Track") -> "FinetuneResult":
    """Fine-tune with LoRA, directly or from align runs: learning rates, seeds, one test."""
    from finetune import finetune

    return finetune(cfg, out, force=force, track=track)


add_command(finetune, FinetuneConfig, "--from runs/cub --out runs/cub-peft")


def pretrain(cfg: PretrainConfig, out: Path, force: bool, track: "Track") -> "PretrainResult":
    """Train a backbone from scratch with MAE or I-JEPA, where there is no checkpoint."""
    from extras.pretrain import pretrain

    return pretrain(cfg, out, force=force, track=track)


add_command(pretrain, PretrainConfig, "--backbone vit_mini --pool omniglot")


@app.command(epilog="Example: bisslight evaluate runs/cub-peft --against runs/direct")
def evaluate(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Finished finetune runs, or directories of one arm's runs; the first one is"
            " compared with each of the others.",
            exists=True,
            show_default=False,
        ),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="<path>", help="One more of these; may be repeated."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the accuracies to this PNG, SVG or PDF.")
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(
            help="Draw losses and validations of the runs, align runs too, to this PNG, SVG or PDF;"
            " without --picture there is no table then."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished finetune runs: mean, deviation, exact p, the paper's figure."""
    runs = [*runs, *(against or [])]
    if curves is not None:
        from extras.plots import draw_curves

        draw_curves(runs, curves)
        if picture is None:  # an align run has curves, but no accuracy to compare
            show({"curves": curves}, Answer(f"in {curves}"), as_json)
            return
    from evaluate import evaluate

    evaluation = evaluate(runs)
    if picture is not None:
        from extras.plots import draw_arms

        draw_arms(evaluation.arms, picture)
    show(evaluation, evaluation.in_words(), as_json)


@app.command(epilog="Example: bisslight demo --out runs/demo")
def demo(
    out: Annotated[Path | None, typer.Option(help="Default: runs/demo.")] = None,
    data_seed: Annotated[
        int, typer.Option(help="Splits the drawers anew, whose characters train and test.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, metavar="<int>", help="Runs at a time.")] = 2,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """See the method at work on handwriting: offline, two minutes on two CPU cores."""
    from extras.demo import demo
    from support.processes import leave

    with training(quiet or as_json) as track:
        result = demo(out, data_seed=data_seed, jobs=jobs, force=force, track=track)
    show(result, result.in_words(), as_json)
    leave()


@app.command(epilog="Example: bisslight export runs/cub-peft --out exported")
def export(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="Default: RUN/export.")] = None,
    seed: Seed = None,
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's adapter for HF peft, and merged into its network for timm."""
    from extras.export import export

    done = export(run, out, seed=seed, weights=weights)
    show(done, list_fields(done), as_json)


@app.command(epilog="Example: bisslight predict runs/cub-peft photos --top 3 --csv birds.csv")
def predict(
    run: Run,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(help="Classes an image, the most likely first.")] = 1,
    csv: Annotated[Path | None, typer.Option(help="Write a CSV file; -: to stdout.")] = None,
    seed: Seed = None,
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Classify images with a finished finetune run: class names and probabilities."""
    from extras.predict import check_csv, format_csv, in_words, predict
    from support.runs import write_atomic

    if csv is not None:
        check_csv(csv)
    guesses = predict(run, images, top=top, seed=seed, weights=weights)
    if csv == Path("-"):
        tell(format_csv(guesses).rstrip(), sys.stdout)
        return
    if csv is not None:
        write_atomic(csv, format_csv(guesses))
    show([guess._asdict() for guess in guesses], in_words(guesses, run, seed), as_json)


@data.command("list")
def data_list(root: DataRoot = Path("data"), as_json: AsJson = False) -> None:
    """List the paper's data sets: whether they are there, and the terms of their use."""
    from extras.datasets import list_all

    sets = list_all(root)
    show(sets, Answer("", sets), as_json)


@data.command("check", epilog="Example: bisslight data check cub200 --data-root DIR")
def data_check(
    name: Annotated[str, typer.Argument(help="A data set by name, or folder:DIR.")],
    root: DataRoot = Path("data"),
    partial: Annotated[
        bool, typer.Option("--partial", help="It is a subset; missing images are no problem.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Open every image of a data set or folder, count, and list what is wrong."""
    from extras.datasets import check

    result = check(name, root, partial)
    show(result, list_fields(result), as_json)
    return 1 if result["problems"] else 0


@data.command("download", epilog="Example: bisslight data download cub200 --data-root DIR")
def data_download(
    name: Annotated[str, typer.Argument(help="A data set by name.")],
    root: DataRoot = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Fetch and unpack a data set; its digests are verified."""
    from extras.datasets import download

    done = download(name, root)
    show(done, list_fields(done), as_json)


# --- start -------------------------------------------------------------------------------------

app.add_typer(data, name="data")


def main() -> None:
    """Run the command line; exit codes 0, 1 failure, 2 usage, 130 Ctrl-C, 143 SIGTERM."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="backslashreplace")  # paths may hold any bytes
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of one command line; an error is told in one line."""
    try:
        if arguments in ([], ["data"]):  # no command yet: show which there are
            arguments = [*arguments, "--help"]
        program = typer.main.get_command(app)
        hide_types_of_switches(program)
        code = program(args=arguments, prog_name="bisslight", standalone_mode=False)
        return int(code or 0)
    except typer.TyperException as error:  # its own complaints, such as a flag that is unknown
        return fail(error.format_message(), 2)
    except UsageError as error:
        return fail(str(error), 2)
    except (RunError, OSError) as error:
        return fail(str(error), 1)
    except ModuleNotFoundError as error:
        return fail(f"{error}; install it, or do without this option", 1)


def hide_types_of_switches(command: Any) -> None:  # noqa: ANN401 (of a class that Typer hides)
    """Let the help of a command, and of those below it, show no type for what takes no value."""
    context = typer.Context(command, help_option_names=["-h", "--help"])
    for parameter in command.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for part in getattr(command, "commands", {}).values():
        hide_types_of_switches(part)


def fail(message: str, code: int) -> int:
    """Tell an error in one line; the exit code."""
    tell(f"error: {one_line(message)}", sys.stderr)
    return code


if __name__ == "__main__":
    main()
