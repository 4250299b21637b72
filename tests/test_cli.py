"""The commands, run as a user runs them, at toy size; wrong inputs, exit codes, resume."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import cli

ROOT = Path(cli.__file__).parent
TINY_ALIGN = "--alternations 3 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1 --eval-every 1 --warmup 1"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write below the current directory."""
    monkeypatch.chdir(tmp_path)


def run(line: str, capsys: Any) -> tuple[int, str, str]:
    code = cli.run(line.split())
    out, err = capsys.readouterr()
    return code, out, err


def test_pretrain_align_finetune_evaluate_end_to_end(weights: Path, capsys: Any) -> None:
    code, out, err = run(
        f"align --backbone vit_mini --weights {weights} --dataset quilts {TINY_ALIGN} --out a --json", capsys
    )
    assert (code, err) == (0, "")
    aligned = json.loads(out)
    record = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()][-1]
    for key in (
        "loss_P",
        "loss_D_at_P",
        "loss_D_at_D",
        "pull",
        "q_over_g",
        "cosine",
        "distance",
        "seconds",
        "val_P",
        "val_D",
    ):
        assert key in record
    assert set(record["seconds"]) == {"lower", "curvature", "upper"}
    theta = load_file("a/adapter.safetensors")["theta"]
    assert theta.shape == (4, 4 * 8 * 64)
    assert aligned["distance"] > 0
    for start, name in ((f"--backbone vit_mini --weights {weights} --dataset quilts", "p"), ("--from a", "q")):
        code, out, err = run(f"finetune {start} --epochs 2 --batch 40 --seeds 2 --lr 1e-2 --out {name} --json", capsys)
        assert (code, err) == (0, "")
        result = json.loads(out)
        assert len(result["test"]) == 2
        saved = load_file(f"{name}/adapter-s1.safetensors")
        assert saved["head.weight"].shape == (8, 64)
    assert result["unit"] == "PEFT seed on one align run"
    code, out, err = run("evaluate q --against p --json --picture arms.png", capsys)
    rows = json.loads(out)["arms"]
    assert rows[1]["first_minus_this"]["splits"] == 6
    with Image.open("arms.png") as picture:
        assert picture.size[0] > 100
    code, out, err = run("evaluate q --against p", capsys)
    assert "first - this" in out
    assert code == 0


def test_test_accuracy_is_that_of_the_saved_tensors(weights: Path, capsys: Any) -> None:
    """Read the adapter file back and count by hand."""
    from data import quilts
    from lora import Backbone, load_adapter, logits
    from mae import load

    line = (
        f"finetune --backbone vit_mini --weights {weights} --dataset quilts --epochs 2 --batch 40 --seeds 1 --lr 1e-2"
    )
    _, out, _ = run(f"{line} --out f --json", capsys)
    theta, phi_D, about = load_adapter(Path("f/adapter-s0.safetensors"))
    _, task = quilts(0)
    shift, scale = torch.tensor(task.mean).view(3, 1, 1), torch.tensor(task.std).view(3, 1, 1)
    vit, _, _ = load(weights / "backbone.pth", "vit_mini")
    z = logits(Backbone(vit), theta, phi_D, (task.test.images - shift) / scale)  # type: ignore[operator]
    right = 100 * float((z.argmax(1) == task.test.targets).float().mean())
    assert json.loads(out)["test"] == [pytest.approx(right)]
    assert json.loads(about["classes"])[0] == "layout 0"


def test_a_seed_can_start_from_an_align_run_of_its_own(weights: Path, capsys: Any) -> None:
    for seed in (0, 1):
        line = f"align --backbone vit_mini --weights {weights} --dataset quilts {TINY_ALIGN} --seed {seed} --out arms/s{seed} --quiet"
        assert run(line, capsys)[0] == 0
    code, out, _ = run("finetune --from arms --epochs 1 --batch 80 --seeds 2 --lr 1e-2 --out f --json", capsys)
    assert code == 0
    assert json.loads(out)["unit"] == "align run and PEFT"
    code, _, err = run("finetune --from arms --epochs 1 --seeds 3 --lr 1e-2 --out g", capsys)
    assert code == 2
    assert "holds 2 align runs, --seeds 3 wants 1 or 3" in err


def test_the_grid_takes_the_rate_with_the_best_mean_validation(weights: Path, capsys: Any) -> None:
    line = f"finetune --backbone vit_mini --weights {weights} --dataset quilts --epochs 2 --batch 40 --seeds 2"
    code, out, _ = run(f"{line} --lr-grid --grid 1e-4,1e-2 --out f --json", capsys)
    assert code == 0
    result = json.loads(out)
    means = {float(lr): sum(values) / len(values) for lr, values in result["grid"].items()}
    assert [len(values) for values in result["grid"].values()] == [1, 1]  # one seed a rate, then the chosen one's rest
    assert means[result["lr"]] == max(means.values())
    assert len(result["test"]) == 2
    assert len(Path("f/metrics.jsonl").read_text().splitlines()) == 3
    assert sorted(p.name for p in Path("f").glob("adapter*")) == ["adapter-s0.safetensors", "adapter-s1.safetensors"]


@pytest.mark.parametrize(
    ("command", "method"),
    [
        (
            "finetune --backbone vit_mini --weights {w} --dataset quilts --epochs 1 --batch 40 --seeds 3 --lr 1e-2",
            "metric",
        ),
        ("align --backbone vit_mini --weights {w} --dataset quilts {a} --alternations 4 --eval-every 2", "metric"),
    ],
)
def test_every_command_resumes_to_the_same_bits(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: str, method: str
) -> None:
    """Killed in its third record, which is past the last checkpoint; metrics.jsonl ends as in the whole run."""
    import runtime

    line = command.format(w=weights, a=TINY_ALIGN) + " --quiet"
    assert run(f"{line} --out whole", capsys)[0] == 0
    original = getattr(runtime.Run, method)
    calls = 0

    def killing(self: Any, record: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 + command.startswith("align"):  # its first record is the probe's
            with Path("cut/metrics.jsonl").open("a") as file:
                file.write('{"torn')
            raise Killed
        original(self, record)

    monkeypatch.setattr(runtime.Run, method, killing)
    monkeypatch.setattr("time.monotonic", iter(range(0, 10**9, 100)).__next__)  # pretrain saves each minute
    with pytest.raises(Killed):
        cli.run(f"{line} --out cut".split())
    here = Path.cwd()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert run(f"{line} --out cut --resume", capsys)[0] == 0
    files = [p.name for p in Path("whole").iterdir() if p.suffix in (".safetensors", ".pth")]
    assert files
    for name in files:
        left, right = (Path(d, name) for d in ("whole", "cut"))
        if name.endswith(".pth"):
            a, b = (torch.load(p, weights_only=True)["model"] for p in (left, right))
            assert all(torch.equal(a[key], b[key]) for key in a)
        else:
            assert left.read_bytes() == right.read_bytes()
    steps = [
        [json.loads(text)["step"] for text in Path(d, "metrics.jsonl").read_text().splitlines()]
        for d in ("whole", "cut")
    ]
    assert steps[0] == steps[1]


class Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("after", [1, 2])
def test_a_killed_align_resumes_to_the_same_bits(
    weights: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {TINY_ALIGN} --drop-path 0.1 --quiet"
    assert run(f"{line} --out whole", capsys)[0] == 0
    from runtime import Run

    save = Run.save

    def killing(self: Run, state: dict[str, Any]) -> None:
        save(self, state)
        if state["done"] == after:
            raise Killed

    monkeypatch.setattr(Run, "save", killing)
    with pytest.raises(Killed):
        cli.run(f"{line} --out cut".split())
    monkeypatch.setattr(Run, "save", save)
    capsys.readouterr()
    code, _, err = run(f"{line} --out cut --resume --lam 0.5", capsys)
    assert code == 2
    assert "lam 0.001 -> 0.5" in err
    assert run(f"{line} --out cut --resume --workers 1", capsys)[0] == 0
    assert Path("whole/adapter.safetensors").read_bytes() == Path("cut/adapter.safetensors").read_bytes()
    steps = [json.loads(text)["step"] for text in Path("cut/metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]


def test_flags_win_over_the_file_and_the_file_over_defaults(weights: Path, capsys: Any) -> None:
    Path("c.toml").write_text('lam = 0.25\n[bilevel]\nlower_steps = 7\nupper_steps = 3\n[data]\ndataset = "quilts"\n')
    line = f"align --backbone vit_mini --weights {weights} --config c.toml --upper-steps 4 --dry-run --json"
    code, out, _ = run(line, capsys)
    assert code == 0
    settings = json.loads(out)["settings"]
    chosen = {
        name: (settings[name]["value"], settings[name]["source"]) for name in ("lam", "lower_steps", "upper_steps")
    }
    assert chosen == {"lam": (0.25, "file"), "lower_steps": (7, "file"), "upper_steps": (4, "flag")}
    assert settings["alternations"] == {"value": 500, "source": "default, App. C.3"}
    assert settings["rank"] == {"value": 8, "source": "by backbone or data, App. C.3"}
    assert list(Path().iterdir()) == [Path("c.toml")]  # a dry run writes nothing


def test_a_saved_config_repeats_the_run(weights: Path, capsys: Any) -> None:
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {TINY_ALIGN} --quiet"
    run(f"{line} --out one", capsys)
    assert run("align --config one/config.json --out two --quiet", capsys)[0] == 0
    assert Path("one/adapter.safetensors").read_bytes() == Path("two/adapter.safetensors").read_bytes()


WRONG = [
    ("align --backbone vit_mini --dataset quilts", 2, "--weights FILE: vit_mini with mae needs a checkpoint"),
    ("align --backbone vit_l --weights {w} --dataset quilts", 2, "did you mean vit_l16?"),
    ("align --backbone vit_mini --weights {w} --dataset quits", 2, "did you mean quilts?"),
    ("align --backbone vit_mini --weights {w}", 2, "--dataset is needed"),
    ("align --backbone vit_mini --weights {w} --dataset folder:nowhere --pool quilts", 2, "there is no such folder"),
    ("align --backbone vit_mini --weights {w} --dataset folder:pics", 2, "Or give --pool DIR, any folder of images"),
    (
        "align --backbone vit_mini --weights {w} --dataset quilts --pool nowhere",
        2,
        "/nowhere: there is no such folder",
    ),
    ("align --backbone vit_mini --weights {w} --dataset quilts --lam -1", 2, "--lam -1.0: should be greater than 0"),
    ("align --backbone vit_mini --weights {w} --dataset quilts --rank 65", 2, "--rank 65: is larger than the width 64"),
    ("align --backbone vit_mini --weights {w} --dataset quilts --mask-ratio 0.99", 2, "leaves none or all of the 16"),
    (
        "align --backbone vit_mini --weights {w} --dataset quilts --drop-path 1",
        2,
        "--drop-path 1.0: should be less than 1",
    ),
    ("align --backbone vit_b16 --weights {w} --dataset quilts", 2, "was trained as vit_mini"),
    (
        "align --backbone vit_mini --weights {w} --dataset quilts --config typo.toml",
        2,
        "'alternation', did you mean alternations?",
    ),
    ("align --backbone vit_mini --weights {w} --dataset quilts --config broken.toml", 2, "cannot be read as TOML"),
    (
        "align --backbone vit_mini --weights {w} --dataset quilts --config none.toml",
        2,
        "there is no such file of settings",
    ),
    ("align --backbone vit_mini --weights {w} --dataset quilts --hypergrad newton", 2, "newton"),
    ("align --backbone vit_mini --weights {w} --dataset quilts --device tpu", 2, "--device tpu: not available here"),
    ("align --backbone vit_mini --weights {w} --dataset quilts --out pics", 2, "holds files of something else"),
    (
        "align --backbone vit_mini --weights {w} --dataset quilts --resume",
        2,
        "there is no run in runs/align-quilts-vit_mini",
    ),
    ("align --alternatoins 3", 2, "--alternatoins"),
    ("align --backbone vit_mini --weights {w} --dataset quilts --lam inf", 2, "--lam inf: should be a finite number"),
    (
        "align --backbone vit_mini --weights {w} --dataset quilts --patch-size 8",
        2,
        "has patches of 4, leave the option out",
    ),
    ("align --backbone vit_mini --weights {w} --dataset quilts --config big.json", 2, "cannot be read as JSON"),
    ("align --backbone vit_mini --weights {w} --dataset quilts --hypergrad exact", 2, "out of reach; lower --rank"),
    ("pretrain --pool quilts --backbone vit_mini --beta2 1", 2, "--beta2 1.0: should be less than 1"),
    ("pretrain --pool quilts --backbone vit_mini --device meta", 2, "not supported, take cpu or cuda"),
    ("finetune --backbone vit_mini --weights {w} --dataset quilts --no-lr-grid", 2, "--no-lr-grid needs --lr"),
    ("align --backbone vit_mini --weights nope.pth --dataset quilts", 2, "--weights nope.pth: there is no such file"),
    (
        "finetune --backbone vit_mini --weights {w} --dataset quilts --epochs 1 --warmup-epochs 0 --seeds 1 --lr 1e30",
        1,
        "diverged, lower --lr",
    ),
    ("finetune --from nowhere", 2, "--from nowhere: does not exist"),
    ("finetune --config start.toml", 2, "--from 3: does not exist"),
    ("demo --out pics", 2, "something else is there; choose another --out"),
    (
        "finetune --backbone vit_mini --weights {w} --dataset quilts --lr 1 --lr-grid",
        2,
        "give --lr or --lr-grid, not both",
    ),
    (
        "finetune --backbone vit_mini --weights {w} --dataset folder:pics --epochs 1 --seeds 1",
        1,
        "png: cannot be read as an image",
    ),
    ("pretrain --backbone vit_mini --pool pics --image-size 18", 2, "is not a multiple of patch_size"),
    ("pretrain --backbone vit_mini --pool quilts --image-size 32", 2, "quilts are images of 16 px"),
    (
        "finetune --backbone vit_mini --weights {w} --dataset quilts --pool pics",
        2,
        "finetune looks at labelled images only",
    ),
    ("pretrain --pool quilts --backbone timm:vit_tiny_patch16_224", 2, "pretrain makes vit_mini, vit_b16"),
    (
        "align --backbone vit_mini --weights {w} --dataset quilts --pool=folder:",
        2,
        "names neither a dataset nor a folder",
    ),
    ("evaluate nowhere", 2, "there is no such run directory"),
    ("evaluat x", 2, "Did you mean 'evaluate'?"),
]


@pytest.mark.parametrize(("line", "code", "message"), WRONG)
def test_a_wrong_input_gets_one_clear_line(weights: Path, capsys: Any, line: str, code: int, message: str) -> None:
    for name in "ab":
        for i in range(6):
            Path(f"pics/{name}").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20)).save(f"pics/{name}/{i}.png")
    for i in range(6):
        Path(f"pics/b/{i}.png").write_bytes(b"\x89PNG\r\n")
    Path("typo.toml").write_text("alternation = 3\n")
    Path("broken.toml").write_text("= = =")
    Path("start.toml").write_text("start = 3")
    Path("big.json").write_text('{"seed": ' + "9" * 5000 + "}")
    before = {path for path in Path().rglob("*") if path.parts[0] != "runs"}
    got, out, err = run(line.format(w=weights), capsys)
    told = [text for text in err.splitlines() if code == 2 or not text.startswith(("seed ", "runs ", "finetune "))]
    assert got == code, err
    assert len(told) == 1, err
    assert told[0].startswith("error: ")
    assert message in told[0]
    assert out == ""
    assert {path for path in Path().rglob("*") if path.parts[0] != "runs"} == before


def test_help_lists_every_setting_and_loads_no_torch() -> None:
    code = "import sys, cli; code = cli.run(['align', '--help']); sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    from config import AlignConfig, leaves

    for leaf in leaves(AlignConfig):
        flag = cli.RENAMED.get(leaf.name, ("--" + leaf.name.replace("_", "-"),))[0]
        assert flag in done.stdout
        assert leaf.field.description


def test_flags_are_unique_in_every_command() -> None:
    from config import AlignConfig, FinetuneConfig, PretrainConfig, SweepConfig, leaves

    for model in (AlignConfig, FinetuneConfig, PretrainConfig):
        names = [leaf.path[-1] for leaf in leaves(model)] + list(cli.COMMON)
        assert len(names) == len(set(names))
        assert names[: -len(cli.COMMON)] == [leaf.name for leaf in leaves(model)]
    names = [leaf.name for leaf in leaves(SweepConfig)] + list(cli.COMMON)
    assert len(names) == len(set(names))
    assert {"eval_every", "peft_eval_every", "end_lr", "peft_end_lr"} <= {*names}


@pytest.mark.parametrize(("stop", "code"), [("TERM", 143), ("INT", 130)])
def test_signals_have_their_exit_codes(weights: Path, stop: str, code: int, tmp_path: Path) -> None:
    """A plain line an alternation off a terminal; the first one says that the run is under way."""
    import signal

    line = f"align --backbone vit_mini --weights {weights} --dataset quilts --p-batch 8 --d-batch 8 --probe-epochs 0 --out r"
    program = [sys.executable, "-c", "import cli; cli.main()", *line.split()]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        program, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env
    ) as p:
        assert p.stderr is not None
        lines = [p.stderr.readline(), p.stderr.readline()]
        p.send_signal(getattr(signal, f"SIG{stop}"))
        rest = p.communicate(timeout=60)[1]
    assert lines[0].startswith("seed 0, device cpu")
    assert lines[1].startswith("align 1/500  L^P ")
    assert "\x1b" not in lines[1]
    assert p.returncode == code, rest
    assert "Traceback" not in rest
    assert "stopped in alternation" in rest
    assert "--resume goes on from there" in rest
    assert (tmp_path / "r" / "checkpoint.pt").exists()


def test_doctor_says_what_it_found(capsys: Any) -> None:
    code, out, _ = run("doctor --json", capsys)
    assert {line["what"] for line in json.loads(out)} >= {"torch", "device", "disk"}
    assert code == 0


def test_eta_counts_from_the_start_of_the_work(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Two results that arrive together, as two processes' do, after 3600 s: 6 more take three times as long."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    live = cli.Live(quiet=False)
    live("runs", 4, 12, "")  # 4 are from before a resume
    now[0] += 3600
    live("runs", 5, 12, "one")
    live("runs", 6, 12, "two")
    assert capsys.readouterr().err.splitlines() == ["runs 5/12  one  ETA 7:00:00", "runs 6/12  two  ETA 3:00:00"]
