"""Program: the command line, a function for each command.

A command imports what it runs inside its function, so that help is shown without loading torch.
Functions that print do so in one process only, where torchrun has started several.
"""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from pydantic import AfterValidator
from pydantic_core import to_jsonable_python

from config import (
    AlignConfig,
    Command,
    FinetuneConfig,
    PretrainConfig,
    Record,
    Settings,
    flag_of,
    keep_known,
    make,
    read_settings,
    read_start_run,
    released_values,
)
from support.errors import RunError, UsageError
from support.flags import signature_of
from support.screen import (
    Answer,
    Result,
    is_first_process,
    join_lines,
    list_fields,
    print_answer,
    print_line,
)

if TYPE_CHECKING:
    from support.runs import Track

C = TypeVar("C", bound=Command)

# --- the program -------------------------------------------------------------------------------

app = typer.Typer(
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # a fault in a custom pretext task gets Python's traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="List, check and download the data sets.", rich_markup_mode="rich")

# --- commands that have settings ---------------------------------------------------------------


class Options(Settings):
    """This run: flags of align, finetune and pretrain that are no settings of a run."""

    out: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """Directory of the run. Default: a name below runs/ that says what is run."""
    config: Path | None = None
    """TOML or JSON file of this command's settings; flags win over it."""
    preset: Literal["paper", "as-released"] = "paper"
    """paper: the paper's values; as-released: the authors' program's, where these are others."""
    dry_run: bool = False
    """Check names, data and weights, and say what would run; nothing is written."""
    force: bool = False
    """Start over. Without it, the same command goes on."""
    as_json: bool = False
    """One JSON value on stdout, nothing else."""
    quiet: bool = False
    """Show no progress."""


SOURCES = (
    "In brackets: where a default comes from, a section of the paper, released (its authors'"
    " program where the paper is silent), MAE, I-JEPA, or here (our own)."
)


def with_flags(command: Callable[[C, Options], None]) -> Callable[..., None]:
    """Make `command(cfg, options)` a command with a flag for each setting and each of `Options`.

    The settings are the fields of the class that annotates `cfg`, such as AlignConfig. Returns a
    function that takes the flags, makes `cfg` and `options` of them, and calls the command. Its
    signature, of which Typer makes the flags, has a keyword for each flag.
    """
    settings_class: type[C] = command.__annotations__["cfg"]  # such as AlignConfig

    @wraps(command)  # with the command's name and docstring, which Typer shows in --help
    def read_flags(**flags: str | bool | None) -> None:
        # Typer gives every flag by name: as text, a switch as True or False, None if not given.
        given = {name: value for name, value in flags.items() if value is not None}
        of_settings = keep_known(settings_class, given)  # such as {"rank": "8"}
        of_options = keep_known(Options, given)  # such as {"quiet": True}
        options = make(Options, of_options)
        cfg = collect_settings(settings_class, of_settings, options)
        warn_about_warmup(cfg)
        command(cfg, options)

    # Typer, like `inspect`, takes the signature of a function from this attribute.
    setattr(read_flags, "__signature__", signature_of(settings_class, Options))  # noqa: B010
    return read_flags


def collect_settings(settings_class: type[C], flags: Record, options: Options) -> C:
    """Make the settings of a command from its flags and from what the flags name.

    `flags` has those that were given, by the name of the setting, such as {"rank": "8"}. A flag
    wins over --config, this over --preset, this over the align run of --from, and this over the
    defaults (see `config`). Raises UsageError for a wrong value, and for a file or an align run
    that cannot be read.
    """
    given = flags
    if options.config is not None:
        given = read_settings(options.config, settings_class) | flags

    from_run: Record = {}
    if "start" in given:  # the setting of --from, which finetune alone has
        start = Path(str(given["start"])).expanduser()
        if not start.is_file():  # a file of LoRA has no settings, only a run has
            dataset = given.get("dataset")  # None: not given, as for the next
            from_run = read_start_run(start, dataset, restart=given.get("restart"))

    from_preset: Record = {}
    if options.preset == "as-released":
        from_preset = released_values(settings_class, aligned="start" in given)

    # The later wins. `make` adds the defaults, in `Command.fill_in`.
    return make(settings_class, from_run | from_preset | given)


def choose_out(command: str, cfg: Command, options: Options) -> Path:
    """Return the directory of a run: --out, or by default a name that says what is run.

    The name has the command, the images, the backbone, the start if there is one, the rank of LoRA
    except in pretraining, and the seed. In "omniglot:Greek", - is written for the colon.

    >>> str(choose_out("align", AlignConfig(backbone="vit_l16", dataset="cub200"), Options()))
    'runs/align-cub200-vit_l16-r64-s0'
    """
    if options.out:
        return options.out
    settings = dict(cfg)  # by name
    images = settings.get("dataset") or settings["pool"]  # pretraining has a pool only
    parts = [command, Path(images).name, settings["backbone"]]  # of "folder:/photos", only photos
    if settings.get("start"):
        parts.append(f"from-{settings['start'].name}")
    if "rank" in settings:
        parts.append(f"r{settings['rank']}")
    parts.append(f"s{cfg.seed}")
    name = "-".join(parts).replace(":", "-")
    return Path("runs", name)


def show_plan(
    command: str, cfg: AlignConfig | FinetuneConfig | PretrainConfig, options: Options
) -> None:
    """Print what a run would do, for --dry-run. Raises UsageError with all that is missing."""
    from extras.dry_run import plan_run  # only now: it loads torch

    out = choose_out(command, cfg, options)
    plan = plan_run(command, cfg, out, force=options.force)
    show(plan.work, list_fields(plan.work), options.as_json)  # work: such as {"device": "cpu", ...}
    if plan.problems:
        raise UsageError(*plan.problems)


def finish(result: Result, as_json: bool) -> None:
    """Print the result of a run, then part from torchrun's other processes."""
    from support.processes import leave_group  # only now: it loads torch

    show(result, result.in_words(), as_json)
    leave_group()  # leave torchrun's process group, or Python may abort at exit


def show(result: object, words: Answer, as_json: bool) -> None:
    """Print a result on stdout: in words, or after --json as one line of JSON."""
    if not is_first_process():
        return
    if as_json:
        print_line(json.dumps(to_jsonable_python(result)), sys.stdout)
    else:
        print_answer(words)


def warn_about_warmup(cfg: Command) -> None:
    """Warn on stderr if the warm-up is not shorter than the run.

    In the warm-up a learning rate rises to its full value, which is then never reached. Align
    counts it in alternations, the other commands in epochs.
    """
    settings = dict(cfg)
    for warmup, length in (("warmup", "alternations"), ("warmup_epochs", "epochs")):
        if warmup in settings and settings[warmup] >= settings[length]:
            problem = "the warm-up is not shorter than the run, so no rate reaches its full value"
            print_line(f"{problem}; see {flag_of(warmup)}", sys.stderr)


@contextmanager
def training(quiet: bool) -> Iterator["Track"]:
    """Prepare this process for training, and give failures inside the block a remedy.

    Yields the `Track` that shows progress, or shows nothing if `quiet`. Raises typer.Exit after a
    signal such as Ctrl-C, and RunError, whose text has a remedy, for these failures: the training
    diverged, a worker process broke down, memory was short, an image cannot be read. All others
    pass unchanged.
    """
    # Only now, since most of these load torch.
    from concurrent.futures.process import BrokenProcessPool

    from bisslight import Diverged
    from data import ImageError
    from support.processes import Stopped, leave_group, make_ready
    from support.progress import show_progress

    make_ready()  # to hear signals, and to share the work with torchrun's other processes
    try:
        with show_progress(quiet) as track:
            yield track
    except Diverged as error:  # a loss or gradient was nan or inf
        rates = "--lr, --p-lr, --d-lr, --base-lr"
        remedy = f"give a lower learning rate ({rates}) and another --out"
        raise RunError(f"{error}; {remedy}") from error
    except BrokenProcessPool as error:  # it is a RuntimeError, so this comes before those
        remedy = "perhaps memory was short: lower --jobs, then the same command goes on"
        raise RunError(f"{error}; {remedy}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise  # a fault of this program, which needs its traceback
        remedy = (
            "a --micro-batch that fits, --recompute, fewer --lower-steps, and a smaller --rank or "
            "--image-size need less"
        )
        raise RunError(f"out of memory: {remedy}; {error}") from error
    except ImageError as error:  # its text names the file
        remedy = (
            "a run that has begun goes on once it is replaced; `bisslight data check` lists all"
        )
        raise RunError(f"{error}; {remedy}") from error
    except Stopped as stopped:  # a signal was heard, and the run has saved
        leave_group()
        signal, message = stopped.args  # such as 2, "..."
        print_line(message, sys.stderr)
        raise typer.Exit(code=128 + signal) from stopped  # as shells do: 130 after Ctrl-C


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Say whether an error means that the GPU or the CPU has too little memory."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # On a CPU, torch raises a RuntimeError like any other. Only its text, which has numbers, says
    # that memory is short. To compare, provoke this error: no machine has 2**60 bytes.
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as out_of_memory:
        return without_digits(error) == without_digits(out_of_memory)
    return False


def without_digits(error: Exception) -> str:
    """Return the first line of an error's text, without its digits.

    >>> without_digits(RuntimeError("tried to allocate 512 bytes"))
    'tried to allocate  bytes'
    """
    first_line, _, _ = str(error).partition("\n")
    return "".join(character for character in first_line if not character.isdigit())


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
    """Print the version and end, after --version."""
    if asked:
        print_line(f"bisslight {version('bisslight')}", sys.stdout)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=show_version)
    ] = False,
) -> None:
    """BiSSLight aligns self-supervised backbones with a downstream task, before fine-tuning."""


@app.command(
    epilog="Example: bisslight align --backbone vit_l16 --dataset cub200 --out runs/cub"
    f"\n\n{SOURCES}"
)
@with_flags
def align(cfg: AlignConfig, options: Options) -> None:
    """Align a pretrained backbone with a downstream task: BiSSLight, Algorithm 1."""
    # `with_flags` has made both arguments of the flags.
    if options.dry_run:
        show_plan("align", cfg, options)
        return
    out = choose_out("align", cfg, options)
    from align import align as run_align  # only now, since it loads torch

    with training(quiet=options.quiet or options.as_json) as track:
        result = run_align(cfg, out, force=options.force, track=track)
    finish(result, options.as_json)


@app.command(epilog=f"Example: bisslight finetune --from runs/cub --out runs/cub-peft\n\n{SOURCES}")
@with_flags
def finetune(cfg: FinetuneConfig, options: Options) -> None:
    """Fine-tune with LoRA, directly or from align runs: learning rates, seeds, one test."""
    if options.dry_run:
        show_plan("finetune", cfg, options)
        return
    out = choose_out("finetune", cfg, options)
    from finetune import finetune as run_finetune

    with training(quiet=options.quiet or options.as_json) as track:
        result = run_finetune(cfg, out, force=options.force, track=track)
    finish(result, options.as_json)


@app.command(epilog=f"Example: bisslight pretrain --backbone vit_mini --pool omniglot\n\n{SOURCES}")
@with_flags
def pretrain(cfg: PretrainConfig, options: Options) -> None:
    """Train a backbone from scratch with MAE or I-JEPA, where there is no checkpoint."""
    if options.dry_run:
        show_plan("pretrain", cfg, options)
        return
    out = choose_out("pretrain", cfg, options)
    from extras.pretrain import pretrain as run_pretrain

    with training(quiet=options.quiet or options.as_json) as track:
        result = run_pretrain(cfg, out, force=options.force, track=track)
    finish(result, options.as_json)


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
    arms = [*runs, *(against or [])]  # each is a run, or a directory of runs

    if curves is not None:
        from extras.plots import draw_curves  # only on demand: it loads matplotlib

        draw_curves(arms, path=curves)
        if picture is None:  # an align run has curves, but no accuracy to compare
            show({"curves": curves}, Answer(headline=f"in {curves}"), as_json)
            return

    from evaluate import evaluate as evaluate_arms

    evaluation = evaluate_arms(arms)  # a table with a row for each arm
    if picture is not None:
        from extras.plots import draw_arms

        draw_arms(evaluation.arms, path=picture)
    show(evaluation, evaluation.in_words(), as_json)


@app.command(epilog="Example: bisslight demo --out runs/demo")
def demo(
    out: Annotated[Path | None, typer.Option(help="Default: runs/demo.")] = None,
    data_seed: Annotated[
        int, typer.Option(help="Seed of the split of the people who drew the characters.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, metavar="<int>", help="Runs at a time.")] = 2,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """See the method at work on handwriting: offline, two minutes on two CPU cores."""
    from extras.demo import demo as run_demo

    with training(quiet=quiet or as_json) as track:
        result = run_demo(out, data_seed=data_seed, jobs=jobs, force=force, track=track)
    finish(result, as_json)


@app.command(epilog="Example: bisslight export runs/cub-peft --out exported")
def export(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="Default: RUN/export.")] = None,
    seed: Seed = None,
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's adapter for HF peft, and merged into its network for timm."""
    from extras.export import export as run_export

    done = run_export(run, out, seed=seed, weights=weights)  # what was written, by name
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
    from extras.predict import check_csv, format_csv, in_words
    from extras.predict import predict as run_predict
    from support.runs import write_atomic

    if csv is not None:
        check_csv(csv)  # refuses a file of another kind before the long work

    guesses = run_predict(run, images, top=top, seed=seed, weights=weights)  # `top` for each image

    if csv == Path("-"):
        print_line(format_csv(guesses).rstrip(), sys.stdout)
        return
    if csv is not None:
        write_atomic(csv, format_csv(guesses))  # replaces the file at once
    guesses_by_field = [guess._asdict() for guess in guesses]  # such as {"label": "cat", ...}
    show(guesses_by_field, in_words(guesses), as_json)


@data_app.command("list")
def data_list(root: DataRoot = Path("data"), as_json: AsJson = False) -> None:
    """List the paper's data sets: whether they are there, and the terms of their use."""
    from extras.datasets import list_all

    sets = list_all(root)
    show(sets, Answer(headline="", rows=sets), as_json)


@data_app.command("check", epilog="Example: bisslight data check cub200 --data-root DIR")
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

    result = check(name, root, partial)  # such as {"images": 3669, "problems": [...], ...}
    show(result, list_fields(result), as_json)
    return 1 if result["problems"] else 0  # the exit code


@data_app.command("download", epilog="Example: bisslight data download cub200 --data-root DIR")
def data_download(
    name: Annotated[str, typer.Argument(help="A data set by name.")],
    root: DataRoot = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Fetch and unpack a data set; its digests are verified."""
    from extras.datasets import download

    done = download(name, root)  # what was done, by name
    show(done, list_fields(done), as_json)


# --- start -------------------------------------------------------------------------------------

app.add_typer(data_app, name="data")  # `bisslight data list`, and so on


def main() -> None:
    """Run the command line; exit codes 0, 1 failure, 2 usage, 130 Ctrl-C, 143 SIGTERM."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed stream is None
            # A path may have bytes that are no text: print them as \xNN, and raise nothing.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line, such as ["data", "list"], and return its exit code.

    Each known error is printed as a line on stderr: 2 is the code for wrong inputs, and 1 for a run
    that cannot go on. Any other is a fault, and keeps its traceback.
    """
    try:
        if arguments in ([], ["data"]):  # no command yet: show which there are
            arguments = [*arguments, "--help"]
        # Not standalone: Typer returns the code and raises errors, instead of ending Python.
        code = app(arguments, prog_name="bisslight", standalone_mode=False)
        return int(code or 0)  # a command without a code returns None
    except typer.TyperException as error:  # what Typer itself refuses, such as an unknown flag
        return report_error(error.format_message(), 2)
    except UsageError as error:
        for problem in error.args:  # a line for each wrong input
            report_error(problem, 2)
        return 2
    except (RunError, OSError) as error:
        return report_error(str(error), 1)
    except ModuleNotFoundError as error:
        return report_error(f"{error}; install it, or do without this option", 1)


def report_error(message: str, code: int) -> int:
    """Print an error as one line on stderr, and return the exit code."""
    print_line(f"error: {join_lines(message)}", sys.stderr)
    return code


if __name__ == "__main__":
    main()
