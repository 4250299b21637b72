"""The commands as a person runs them: help, progress, dry runs, wrong inputs, exit codes."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file

import cli
from config import AlignConfig

ROOT = Path(cli.__file__).parent
TINY = (
    "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1 "
    "--eval-every 1 --warmup 1"
)
START = "--backbone vit_mini --weights {w} --dataset quilts"
PROGRAM = [sys.executable, "-c", "import cli; cli.main()"]
OUTSIDE = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.usefixtures("elsewhere")


def run(line: str, capsys: Any) -> tuple[int, str, str]:
    code = cli.run(line.split())
    out, err = capsys.readouterr()
    return code, out, err


def outside(line: str, code: str = PROGRAM[2], **more: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    program = [sys.executable, "-c", code, *line.split()]
    env = OUTSIDE | more
    return subprocess.run(program, env=env, capture_output=True, text=True, check=False)


def test_align_finetune_evaluate_end_to_end(weights: Path, capsys: Any) -> None:
    """A finished run prints its result again; the adapter is what the settings say."""
    start = START.format(w=weights)
    line = f"align {start} {TINY} --out a --json"
    first = run(line, capsys)
    assert first[::2] == (0, "") and run(line, capsys)[1] == first[1]
    assert load_file("a/adapter.safetensors")["theta"].shape == (4, 4 * 8 * 64)
    record = json.loads(Path("a/metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(first[1])["distance"] == record["distance"][-1]
    assert run("align --config a/config.json --out two --quiet", capsys)[0] == 0
    assert len({Path(at, "adapter.safetensors").read_bytes() for at in ("a", "two")}) == 1
    known = {"step", "loss_P", "proximal", "loss_D_at_P", "loss_D_at_D", "q_over_g", "cosine"}
    assert known | {"distance", "val_P", "val_D"} <= record.keys()
    for begin, name in ((start, "p"), ("--from a", "q")):
        line = f"finetune {begin} --epochs 2 --batch 40 --seeds 2 --lr 1e-2 --out {name} --json"
        code, out, err = run(line, capsys)
        assert code == 0 and len(json.loads(out)["test"]) == 2, err
    rows = json.loads(run("evaluate q --against p --json", capsys)[1])["arms"]
    assert [row["seeds"] for row in rows] == [2, 2]
    for _ in range(2):  # a picture of ours is drawn again
        code, out, _ = run("evaluate q --against p --picture arms.png", capsys)
        assert (code, "seeds" in out) == (0, True)
    with Image.open("arms.png") as picture:
        assert picture.size[0] > 100


def test_help_wrong_names_and_version_come_before_torch() -> None:
    """The ones that people set first are on top; no summary is cut; every setting is there."""
    code = "import sys, cli; sys.exit(cli.run(sys.argv[1:]) + 3 * ('torch' in sys.modules))"
    told = {}
    for name in ("", "align", "pretrain", "sweep"):
        done = outside(name + " --help", code)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80
        told[name] = " ".join(done.stdout.replace("│", " ").split())
    assert all(row[0] in told[""] for name, row in cli.COMMANDS.items() if " " not in name)
    assert cli.COMMANDS["align"][0] in told["align"]
    first = ["--backbone ", "--dataset ", "--pool ", "--out ", "--seed "]
    panels = ["Algorithm 1:", "Data:", "Machine:", "This run:"]
    flags = told["align"].partition("What one sets first:")[2]
    places = [flags.index(name) for name in [*first, *panels]]
    assert places == sorted(places)
    for name in AlignConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in told["align"]
    assert "--jobs" not in told["align"]
    assert "--no-amp " in told["align"] and "--no-json " not in told["align"]
    for wrong in ("quits", "quilts --weights /quilts?", "folder:/quilts?"):
        done = outside(f"align --backbone vit_b16 --dataset {wrong}", code)
        assert done.returncode == 2 and "quilts?" in done.stderr
    done = outside("--version", code)
    assert done.returncode == 0 and done.stdout.startswith("bisslight ")


def test_dry_run_fits_a_screen_and_says_who_set_what(weights: Path, capsys: Any) -> None:
    line = f"align {START.format(w=weights)} --preset as-released --upper-steps 4"
    Path("c.toml").write_text("lower_steps = 7\n")
    code, out, err = run(f"{line} --dry-run --config c.toml", capsys)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 80
    rows = {name: rest for name, *rest in map(str.split, out.splitlines())}
    assert (rows["lower_steps"], rows["upper_steps"]) == (["7", "c.toml", "20"], ["4", "flag", "8"])
    assert rows["d_optimizer"] == ["sgd", "preset", "as-released", "adamw"]
    assert rows["d_batch"][0] == "32" and "vit_mini" in rows["d_batch"]
    assert "partition" not in rows and "\npartition" in run(f"{line} --all", capsys)[1]
    told = json.loads(run(f"{line} --dry-run --json", capsys)[1])
    assert {row["setting"] for row in told["settings"]} == {*AlignConfig.model_fields}
    assert told["steps"] == {"lower": 1000, "upper": 400, "probe": 60}  # 80 images in 32s
    tune = f"{TUNE.format(w=weights)} --grid 1e-3,1e-2 --grid-seeds 2 --seeds 3 --batch 33"
    told = json.loads(run(f"{tune} --dry-run --json", capsys)[1])
    assert told["steps"] == {"runs": 5, "in all": 5 * 60 * 3}
    err = run(f"{tune} --dry-run --epochs 2 --warmup-epochs 2", capsys)[2]
    assert "the warm-up is not shorter than the run" in err
    assert [path.name for path in Path().iterdir()] == ["c.toml"]  # nothing is written


def test_progress_is_a_plain_line_an_item_off_a_terminal(capsys: Any) -> None:
    """Text, a level's mean loss, an epoch without validation, a whole run of `--jobs`."""
    items: list[Any] = ["loss 2.0", {"step": 1, "loss_P": [1.0, 3.0], "val": {"accuracy": 50.0}}]
    items += [{"step": 2, "loss_P": [1.0], "val": None}, {"lr": 0.01, "seed": 1, "val": None}]
    for quiet in (False, True):
        with cli.bars(quiet) as track:
            cli.logging.getLogger("bisslight").info("a note")
            assert [*track(iter(items), 8, "align", 4)] == items
    said = [line.partition("  ETA")[0] for line in capsys.readouterr().err.splitlines()]
    told = ["loss 2.0", "loss P 2  val 50.0 %", "loss P 1  val 50.0 %", "lr 0.01"]
    assert said == ["a note", *(f"align {n}/8  {text}" for n, text in enumerate(told, 5))]


ALIGN = f"align {START}"
TUNE = f"finetune {START}"
JEPA = "--backbone vit_mini --pretext ijepa --weights {j} --dataset quilts"
WRONG = [
    ("align --backbone vit_mini --dataset quilts", 2, "--weights FILE: vit_mini with mae"),
    ("align --backbone vit_l --dataset quilts", 2, "--backbone vit_l: is unknown, did you mean"),
    ("align --backbone vit_mini --weights {w}", 2, "--dataset: a value is missing"),
    ("align --backbone vit_mini --weights {w} --dataset folder:no --pool quilts", 2, "no such"),
    ("align --backbone vit_mini --weights {w} --dataset dtd", 2, "bisslight data download dtd"),
    ("align --backbone vit_mini --weights nope.pth --dataset quilts", 2, "nope.pth: there is no"),
    ("align --backbone vit_mini --weights odd.pth --dataset quilts", 2, "mismatch for cls_token"),
    ("align --backbone vit_mini --weights mae_visualize_x.pth --dataset quilts", 2, "_full.pth"),
    (f"{ALIGN} --lam -1", 2, "--lam -1: should be greater than 0"),
    (f"{ALIGN} --mask-ratio 0.99 --dry-run", 2, "leaves none or all of the patches"),
    (f"{ALIGN} --hypergrad newton", 2, "--hypergrad newton: should be 'mfac', 'recursion'"),
    (f"{ALIGN} --hypergrad exact", 2, "more than 5000; use mfac"),
    (f"{ALIGN} --patch-size 8", 2, "patch"),
    (f"{ALIGN} --config typo.toml", 2, "typo.toml: alternation is no setting, did you mean"),
    (f"{ALIGN} --config broken.toml", 2, "give settings in TOML or JSON"),
    (f"{ALIGN} --out mine --dry-run", 2, "mine: holds README.md, no run"),
    (f"{ALIGN} --split-file mine.html", 2, "mine.html: is for cub200 and pets"),
    (f"{ALIGN} --preset papr", 2, "'papr' is not one of"),
    (f"{ALIGN} --pretext nothing.py:Class", 2, "nothing.py:Class"),
    (f"{TUNE} --epochs 1 --seeds 1 --lr 1e30", 1, "lower learning rate (--lr"),
    (f"{TUNE} --grid 1e-3,x", 2, "--grid x: should be a valid number"),
    (f"{TUNE} --pool pics", 2, "--pool"),
    ("finetune --config five.json", 2, "--from 5: is no align run"),
    ("finetune --backbone vit_mini --weights {w} --dataset folder:pics", 1, "png"),
    ("pretrain --pool quilts --backbone vit_mini --patch-size 5", 2, "multiple of patches of 5"),
    (f"{ALIGN} --device cuda:77", 2, "--device cuda:77: is not here"),
    (f"{ALIGN} --out /proc/r", 2, "--out /proc/r: is not writable"),
    (f"align {JEPA} --min-keep 9", 2, "can have 9 of them"),
    (f"align {JEPA} --target-scale 0.4,0.2", 2, "give the smaller number first"),
    (f"align {JEPA} --pretext mae", 2, "holds no MAE decoder"),
    (f"align {JEPA} --micro-batch 4", 2, "BatchNorm"),
    (f"finetune {JEPA} --batch 79 --out j", 2, "BatchNorm"),  # 80 images: a last batch of one
    (f"sweep {START} --rank 1,2 --lam 0.1,0.2", 2, "to one of rank, lr,"),
    (f"sweep {START} --rank 1,2 --lr 1e-2 --out mine", 2, "mine: holds README.md, no run"),
    (f"sweep {START} --rank 1,2 --lr 1e-2 --grid 1e-3,1e-2", 2, "give --lr or --grid, not both"),
    ("report nowhere", 2, "'nowhere' does not exist"),
    ("report without --out mine.html", 2, "mine.html: was not made by this program"),
    ("report without --out r.pdf", 2, "r.pdf: cannot be written, give one of the suffixes .html"),
    ("export {w}", 2, "holds no adapter-s*.safetensors of a finished run"),
    ("export with --seed 7", 2, "holds no adapter-s7"),
    ("export with --out mine", 2, "mine: holds files that are not an export's"),
    ("export with --weights other.pth", 2, "with was made with others"),
    ("evaluate nowhere", 2, "nowhere"),
    ("evaluate pics --seed 5", 2, "go with --rollout N or --similarity"),
    ("evaluate with --similarity --picture s.png", 2, "goes with no picture or rollout"),
    ("finetune --from pair --seeds 2", 2, "nothing else; see their lam"),
    ("finetune --from twin --seeds 2", 2, "nothing else; see their seed"),
    ("evaluate without --rollout 0", 2, "--rollout 0: give 1 to 64 images"),
    ("evaluate aligned --rollout 2", 2, "aligned is an align run, it predicts nothing"),
    ("evaluate other --rollout 2", 2, "other: was made with other weights or images"),
    ("evaluate with --rollout 2", 2, "rollout.png: was not made by this program"),
    ("evaluate without --picture mine.svg", 2, "mine.svg: was not made by this program"),
    ("evaluate without --picture r.gif2", 2, ".png, .svg, .pdf"),
]


@pytest.fixture(scope="module")
def inputs(runs: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Damaged images, wrong settings, a person's own files, and runs, one of them on other data."""
    at = tmp_path_factory.mktemp("inputs")
    for name in "ab":
        (at / "pics" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (20, 20)).save(at / f"pics/{name}/{i}.png")
    for i in range(6):
        (at / f"pics/b/{i}.png").write_bytes(b"\x89PNG\r\n")
    for name in ("aligned", "with", "without"):
        shutil.copytree(runs / name, at / name)
    for name in "ab":
        shutil.copytree(runs / "aligned", at / "pair" / name)
        shutil.copytree(runs / "aligned", at / "twin" / name)
    settings = (at / "pair/b/config.json").read_text().replace('"lam": 0.001', '"lam": 0.5')
    (at / "pair/b/config.json").write_text(settings)
    shutil.copytree(runs / "without", at / "other")
    config = json.loads((at / "other/config.json").read_text()) | {"data_seed": 1}
    (at / "mine").mkdir()
    for file, text in {
        "other/config.json": json.dumps(config), "typo.toml": "alternation = 3\n",
        "broken.toml": "= = =", "mine/README.md": "mine", "mine.html": "<p>mine</p>",
        "with/rollout.png": "mine", "mae_visualize_x.pth": "", "five.json": '{"start": 5}',
    }.items():  # fmt: skip
        (at / file).write_text(text)
    Figure().savefig(at / "mine.svg")  # by the same library
    other = torch.load(weights / "backbone.pth", weights_only=True)
    other["model"]["cls_token"] += 1
    torch.save(other, at / "other.pth")
    torch.save({"model": other["model"] | {"cls_token": torch.zeros(1, 2)}}, at / "odd.pth")
    return at


def found() -> dict[Path, int]:
    """Every file here but below runs/, and when it was written."""
    files = [path for path in Path().rglob("*") if path.parts[0] != "runs"]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


@pytest.mark.parametrize(("line", "code", "message"), WRONG)
def test_a_wrong_input_gets_one_clear_line_and_changes_nothing(
    weights: Path, inputs: Path, monkeypatch: Any, capsys: Any, line: str, code: int, message: str
) -> None:
    monkeypatch.chdir(inputs)
    before = found()
    got, out, err = run(line.format(w=weights, j=weights.with_name("ijepa")), capsys)
    told = [text for text in err.splitlines() if text.startswith("error: ")]
    assert (got, out) == (code, ""), err
    assert len(told) == 1, err
    assert message in told[0]
    assert code == 1 or len(err.splitlines()) == 1
    assert found() == before


def test_streams_that_are_closed_or_narrow_end_no_command(tmp_path: Path) -> None:
    for end in ("2>&- >&-", "| true", "2>&1 | true"):
        line = f"set -o pipefail; {shlex.join(PROGRAM)} --help {end}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=OUTSIDE)
        assert (done.returncode, done.stderr) == (0, ""), line
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    line = f"align --backbone vit_b16 --dataset quilts --pool {folder}"
    done = outside(line, PYTHONIOENCODING="ascii")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


@pytest.mark.parametrize(
    ("stop", "code"), [("TERM", 143), pytest.param("INT", 130, marks=pytest.mark.slow)]
)
def test_signals_have_their_exit_codes_and_the_same_command_goes_on(
    weights: Path, stop: str, code: int
) -> None:
    """A plain line an alternation off a terminal; the first one says that the run is under way."""
    line = f"{ALIGN.format(w=weights)} --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8"
    program = [*PROGRAM, *line.split(), "--probe-epochs", "0", "--out", "r"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=OUTSIDE) as p:
        while not p.stderr.readline().startswith("align 1/100  loss "):
            assert p.poll() is None
        p.send_signal(getattr(signal, f"SIG{stop}"))
        rest = p.communicate(timeout=60)[1]
    assert p.returncode == code, rest
    assert "Traceback" not in rest and "\x1b" not in rest and "alternation" in rest.splitlines()[-1]
    assert Path("r/checkpoint.pt").exists()
