"""The commands as a person runs them: help, progress, dry runs, wrong inputs, exit codes."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from child_process import finish, start
from PIL import Image
from safetensors.torch import load_file
from toy import (
    ALIGN_STEPS,
    IJEPA_RUN,
    MAE_RUN,
    PEFT_STEPS,
    PROGRAM,
    PROGRAM_PATH,
    ROOT,
    contents,
    done,
    finetune_line,
    photos_in,
    refusal,
    run,
)
from typer.testing import CliRunner

import cli
from bisslight import Log
from config import AlignConfig, FinetuneConfig, PretrainConfig
from evaluate import say_next
from support.progress import training
from support.screen import print_line, showing

OUTSIDE = {"PYTHONPATH": PROGRAM_PATH, "PATH": os.environ["PATH"]}

pytestmark = pytest.mark.usefixtures("elsewhere")

# --- results ------------------------------------------------------------------------------------


def test_align_finetune_evaluate_end_to_end(weights: Path) -> None:
    """A finished run prints its result again; its config.json makes the same run."""
    model = MAE_RUN.format(weights=weights)
    line = f"align {model} {ALIGN_STEPS} --out a --json"
    first = done(line)
    assert done(line) == first
    assert load_file("a/adapter.safetensors")["theta"].shape == (4, 4 * 8 * 64)
    last = json.loads(Path("a/metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(first)["distance"] == last["distance"][-1]
    done("align --config a/config.json --out again --quiet")
    assert (
        Path("again/adapter.safetensors").read_bytes() == Path("a/adapter.safetensors").read_bytes()
    )

    for begin, name in ((model, "direct"), ("--from a", "tuned")):
        out = done(f"finetune {begin} {PEFT_STEPS} --seeds 2 --out {name} --json")
        assert len(json.loads(out)["tests"]) == 2
    done("finetune --config tuned/lr0.01-s0/config.json --out tuned-again --quiet")
    one, two = (Path(name, "lr0.01-s0/adapter.safetensors") for name in ("tuned", "tuned-again"))
    assert one.read_bytes() == two.read_bytes()
    arms = json.loads(done("evaluate tuned direct --json"))["arms"]
    assert [len(arm["accuracies"]) for arm in arms] == [2, 2]
    assert "direct" in done("evaluate tuned direct --picture arms.png")
    with Image.open("arms.png") as picture:
        assert picture.size[0] > 100


# --- help ---------------------------------------------------------------------------------------


def test_help_has_a_flag_for_every_setting_or_says_that_it_has_none() -> None:
    for kind in (AlignConfig, FinetuneConfig, PretrainConfig):
        text = CliRunner(env={"COLUMNS": None}).invoke(cli.app, [kind.command, "--help"]).output
        assert {cli.flag_of(name) for name in kind.model_fields} <= {*re.findall(r"[\w-]+", text)}


def test_help_wrong_names_and_evaluate_do_without_torch(runs: Path) -> None:
    """One after the other in one process; 3 is added once torch is there."""
    code = (
        "import sys, cli\n"
        "codes = [cli.run(x.split()) + 3 * ('torch' in sys.modules) for x in sys.argv[1:]]\n"
        "print(codes)"
    )
    lines = {
        "--help": 0,
        "align -h": 0,
        "--version": 0,
        "align --backbone vit_b --dataset dtd": 2,
        "data check --help": 0,
        f"evaluate {runs}/with --picture arms.png": 0,
        "align --backbone vit_b16 --dataset dtd --lam -1": 2,
    }
    program = [sys.executable, "-c", code, *lines]
    ended = subprocess.run(program, env=OUTSIDE, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == str([*lines.values()]), ended.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert done("--version").strip() == version("bisslight")


def test_an_empty_word_is_not_the_folder_that_one_is_in(weights: Path) -> None:
    """As of a shell's variable that is not set."""
    line = finetune_line(weights.parent, "--dry-run --out")
    assert cli.run([*line.split(), ""]) == 2
    assert [*Path().iterdir()] == []


def test_the_end_of_finetune_names_the_command_that_compares_where_there_is_another_arm(
    runs: Path, tmp_path: Path
) -> None:
    """The aligned arm comes first. A run that differs in more lacks one."""
    for name in ("with", "without"):
        shutil.copytree(runs / name, tmp_path / name)
    compare = f"bisslight evaluate {tmp_path}/with {tmp_path}/without"
    for name in ("with", "without"):
        assert say_next(tmp_path / name).endswith(compare)
    config = json.loads((tmp_path / "with/config.json").read_text())
    (tmp_path / "with/config.json").write_text(json.dumps(config | {"batch": 7}))
    for name in ("with", "without"):
        assert "bisslight evaluate" not in say_next(tmp_path / name)


# --- progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_hands_every_item_on_and_has_a_line_for_each_off_a_terminal(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text, and an alternation with the mean losses of both levels."""
    items = ["loss 2.0", Log(6, [1.0, 3.0], *[[0.5]] * 9)]
    with training(quiet) as track:
        assert [*track(iter(items), 9, "align", 4)] == items
    losses = "pretext loss 2, downstream loss 0.5"
    lines = ["align 5/9  loss 2.0", f"align 6/9  {losses}", "this took 0:00:00"]
    said = re.sub(r"  \d:\d\d:\d\d left", "", capsys.readouterr().err)
    assert said.splitlines() == ([] if quiet else lines)


def test_a_text_is_printed_whatever_the_encoding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows and on old clusters."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="cp1252"))
    monkeypatch.setattr(sys, "argv", ["bisslight", "\N{CJK UNIFIED IDEOGRAPH-5411}"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert rb"\u5411" in written.getvalue()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_run_needs_nobody_who_reads_its_lines(weights: Path, is_closed: bool) -> None:
    """Its streams are closed, as by `>&- 2>&-`, or their reader has gone, as in `| true`."""
    photos_in(Path("photos"), [f"{kind}/{number}.png" for kind in "ab" for number in range(6)])
    words = f"finetune {MAE_RUN} {PEFT_STEPS} --dataset folder:photos --out r"

    def run_unread() -> None:
        ours, theirs = os.pipe()
        os.close(ours)
        for number in (1, 2):
            if is_closed:
                os.close(number)
            else:
                os.dup2(theirs, number)
        sys.stdout = sys.stderr = None if is_closed else os.fdopen(theirs, "w")  # type: ignore[assignment]
        os._exit(cli.run(words.format(weights=weights).split()))

    assert finish(start(run_unread, Path("said"))) == 0
    assert Path("r/result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "code", "is_read"), [("TERM", 143, True), ("INT", 130, True), ("INT", 130, False)]
)
def test_signals_have_their_exit_codes(weights: Path, stop: str, code: int, is_read: bool) -> None:
    """What was done is saved; the first line of progress says that the run is under way.

    A terminal sends Ctrl-C to the program that reads the lines, too, as `tee`. Forked processes
    that are stopped are in `test_runs`.
    """
    line = f"align {MAE_RUN} {ALIGN_STEPS} --alternations 100 --probe-epochs 0 --out r"
    program = [*PROGRAM, *line.format(weights=weights).split()]
    # Tests that a shell runs in the background ignore Ctrl-C, and so would the program.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    both: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(program, **both, env=OUTSIDE, preexec_fn=heard) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("align 1/100  pretext loss "):
            assert process.poll() is None
        if not is_read:
            process.stdout.close()
        process.send_signal(getattr(signal, f"SIG{stop}"))
        rest = process.stdout.read() if is_read else ""
        assert process.wait(timeout=60) == code, rest
    assert "Traceback" not in rest and "\x1b" not in rest
    assert Path("r/checkpoint.pt").exists()


# --- dry runs -----------------------------------------------------------------------------------


def test_all_that_is_missing_is_told_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    for more in ("", "--dry-run", "--dry-run --json"):
        code, out, err = run(f"align --backbone vit_l16 --dataset cub200 {more}")
        assert (code, out) == (2, "")
        dataset, pool, weights = err.splitlines()
        assert "data/CUB_200_2011" in dataset and "data/imagenet" in pool
        assert "1318 MB" in weights and "--weights" in weights
        assert [*Path().iterdir()] == []


# --- wrong inputs -------------------------------------------------------------------------------

FIRST = "align --backbone vit_mini --weights {weights}"
ALIGN = f"align {MAE_RUN}"
TUNE = f"finetune {MAE_RUN}"
JEPA = f"align {IJEPA_RUN}".replace("{weights}", "{jepa}")
WRONG = [
    ("align --backbone vit_mini --dataset quilts", 2, "bisslight pretrain --backbone"),
    (f"{FIRST} --pool quilts --dataset folder:no", 2, "/no"),
    ("align --backbone vit_mini --weights nope.pth --dataset quilts", 2, "--weights"),
    ("align --backbone vit_mini --weights odd.pth --dataset quilts", 2, "cls_token"),
    ("finetune --backbone vit_mini --dataset quilts --weights aligned", 2,
     "pretrain run; give one"),
    ("finetune --from aligned --rank 4", 2, "its --rank"),
    ("finetune --from with --seed 5", 2, "--seeds 2"),
    (f"{TUNE} --split-file mine.html --dataset omniglot:Greek", 2, "--split-file"),
    (f"{TUNE} --batch 1 head='batchnorm'", 2, "--batch"),
    ("aling", 2, "align"),
    (f"{ALIGN} --d-lr 0,001", 2, "--d-lr"),
    ("finetune --from aligne", 2, "/aligned"),
    (f"{ALIGN} --hypergrad exact", 2, "--hypergrad mfac"),
    (f"{ALIGN} --out mine", 2, "mine: holds README.md"),
    (f"{ALIGN} --pretext nothing.py:Class", 2, "nothing.py:Class"),
    (f"{ALIGN} --device cuda:77", 2, "--device cuda:77"),
    (f"{ALIGN} --out /proc/r", 2, "--out /proc/r"),
    (f"{TUNE} --epochs 1 --seeds 1 --lr 1e30 --warmup-epochs 0 --out ../r", 1, "--lr"),
    ("finetune --backbone vit_mini --weights {weights} --dataset pics", 1, "png"),
    (f"{JEPA} --pretext mae", 2, "no MAE decoder"),
    ("export with --weights other.pth", 2, "--weights"),
    (f"{ALIGN} mask_ratio=0.99", 2, "none or all of the patches"),
    (f"{FIRST} --dataset quilts --pool omnigot", 2, "did you mean omniglot?"),
    ("align --backbone vit_mini --dataset quilts --weights gone", 2, "gone: is not here"),
    (f"{TUNE} --pool pics", 2, "--pool"),
    (f"{JEPA} min_keep=9", 2, "9"),
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(runs: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Damaged images, wrong settings, a person's own files, and runs."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in "ab":
        (folder / "pics" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (20, 20)).save(folder / f"pics/{name}/{i}.png")
    for i in range(6):
        (folder / f"pics/b/{i}.png").write_bytes(b"\x89PNG\r\n")
    for name in ("aligned", "with"):
        shutil.copytree(runs / name, folder / name)
    (folder / "mine").mkdir()
    (folder / "mine/README.md").write_text("mine")
    (folder / "mine.html").write_text("<p>mine</p>")
    other = torch.load(weights / "backbone.pth", weights_only=True)
    other["model"]["cls_token"] += 1
    torch.save(other, folder / "other.pth")
    torch.save({"model": other["model"] | {"cls_token": torch.zeros(1, 2)}}, folder / "odd.pth")
    return folder


@pytest.mark.parametrize(("line", "code", "named"), WRONG)
def test_a_wrong_input_gets_one_clear_line_and_changes_nothing(
    pretrained: Path, inputs: Path, line: str, code: int, named: str
) -> None:
    os.chdir(inputs)  # `elsewhere` goes back
    before = contents(inputs)
    whole = line.format(weights=pretrained / "mae", jepa=pretrained / "ijepa")
    quiet = "" if line.split()[0] in ("export", "evaluate", "aling") else " --quiet"
    assert named in refusal(whole + quiet, code)
    assert contents(inputs) == before


# --- the terminal, and what lies around ---------------------------------------------------------


def test_another_package_named_as_one_of_our_modules_is_not_in_the_way(
    runs: Path, tmp_path: Path
) -> None:
    """As Hugging Face's `evaluate` is, and a folder of PYTHONPATH may be."""
    for name in ("evaluate", "data", "align", "config", "lora", "support", "extras"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    path = f"{tmp_path}/site{os.pathsep}{PROGRAM_PATH}"
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import cli; sys.exit(cli.run(sys.argv[1:]))"
    )
    program = [sys.executable, "-P", "-c", code, "evaluate", f"{runs}/with"]
    env = OUTSIDE | {"PYTHONPATH": path}
    ended = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, "with" in ended.stdout) == (0, True), ended.stderr


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_what_is_done_is_shown_on_a_terminal_and_not_in_a_file_or_where_it_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines that come meanwhile are printed everywhere."""
    monkeypatch.setenv("TERM", "xterm")
    for kind, silent in ((Terminal, False), (Terminal, True), (io.StringIO, False)):
        monkeypatch.setattr(sys, "stderr", stream := kind())
        with showing("loading torch", silent):
            print_line("a warning", sys.stderr)
        is_shown = kind is Terminal and not silent
        assert ("loading torch" in stream.getvalue()) == is_shown
        assert "a warning\n" in stream.getvalue()
