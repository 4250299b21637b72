"""A stopped run goes on to the same bits: after any step, of any command, with any number of workers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from PIL import Image

import cli
import parallel
from stopping import signals

ROOT = Path(cli.__file__).parent
SMALL = "--lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --warmup 1"
ALIGN = f"--alternations 12 {SMALL} --probe-epochs 1 --eval-every 4 --quiet"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert signals.loops == 0
    assert signals.asked == 0


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM arrives during the run's step number `step`, counted over all levels, probing included."""
    calls = 0

    def asked(self: parallel.World) -> int:
        nonlocal calls
        calls += 1
        return int(signal.SIGTERM) if calls == step else 0

    monkeypatch.setattr(parallel.World, "asked", asked)


def digest(path: str) -> str:
    return sha256(Path(path).read_bytes()).hexdigest()


PROBE = 10  # steps: 80 images in batches of 8
STOPS = {"mfac": [(1, 0), (5, 2), (11, 0)], "cg": [(5, 2)]}
ALL = [(alternation, workers) for alternation in (1, 5, 11) for workers in (0, 2)]


def stopped_and_resumed(pretrained: Path, pretext: str, hypergrad: str, stops: list[tuple[int, int]]) -> None:
    """After each alternation, and in the middle of both levels of the next one."""
    line = f"align --backbone vit_mini --pretext {pretext} --weights {pretrained / pretext} --dataset quilts {ALIGN}"
    line += f" --hypergrad {hypergrad}"
    assert cli.run(f"{line} --out whole".split()) == 0
    records = Path("whole/metrics.jsonl").read_text().splitlines()
    for i, (alternation, workers) in enumerate(stops):
        into = (4, 1, 3, 2)[i % 4]  # steps of the alternation: its end, within its levels, between them
        out = f"cut-{alternation}-{workers}"
        with pytest.MonkeyPatch.context() as m:
            stop_at(m, PROBE + 4 * (alternation - 1) + (4 if into == 4 else 4 + into))
            assert cli.run(f"{line} --out {out} --workers {workers}".split()) == 143
        assert cli.run(f"{line} --out {out} --workers {workers} --resume".split()) == 0
        assert digest(f"{out}/adapter.safetensors") == digest("whole/adapter.safetensors"), (alternation, workers)
        for one, other in zip(Path(f"{out}/metrics.jsonl").read_text().splitlines(), records, strict=True):
            a, b = json.loads(one), json.loads(other)
            a.pop("seconds", None), b.pop("seconds", None)
            assert a == b


@pytest.mark.parametrize(("pretext", "hypergrad"), [("mae", "mfac"), ("ijepa", "cg")])
def test_align_goes_on_to_the_same_bits(pretrained: Path, pretext: str, hypergrad: str) -> None:
    stopped_and_resumed(pretrained, pretext, hypergrad, STOPS[hypergrad])


@pytest.mark.slow
@pytest.mark.parametrize("pretext", ["mae", "ijepa"])
@pytest.mark.parametrize("hypergrad", ["mfac", "cg"])
def test_align_goes_on_to_the_same_bits_in_all_cases(
    pretrained: Path, pretext: str, hypergrad: str, capsys: object
) -> None:
    stopped_and_resumed(pretrained, pretext, hypergrad, ALL)


@pytest.mark.parametrize(("step", "loses"), [(2, "the lower level"), (3, "a step of the upper level")])
@pytest.mark.parametrize("more", ["", "--recompute", "--micro-batch 3"])
def test_cg_goes_on_with_the_batch_it_had(
    weights: Path, monkeypatch: pytest.MonkeyPatch, step: int, loses: str, more: str
) -> None:
    """Stopped after its lower level; a piece of a batch is what it was, though it goes on with other pieces."""
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {SMALL} --alternations 2 --quiet"
    line += " --probe-epochs 0 --hypergrad cg --cg-damping 0 --lam 0.1"
    assert cli.run(f"{line} --out whole {more}".split()) == 0
    with monkeypatch.context() as m:
        stop_at(m, step)
        assert cli.run(f"{line} --out cut {more}".split()) == 143
    assert cli.run(f"{line} --out cut {more.replace('3', '5')} --resume".split()) == 0
    one, two = (json.loads(Path(f"{x}/metrics.jsonl").read_text().splitlines()[1]) for x in ("whole", "cut"))
    assert one["q_over_g"] == pytest.approx(two["q_over_g"], rel=1e-4), loses
    if "micro" not in more:
        assert digest("cut/adapter.safetensors") == digest("whole/adapter.safetensors")


def test_a_signal_that_comes_too_late_for_one_loop_stops_the_next(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first of two runs is written down; nothing of it is repeated."""
    import tuning

    line = f"finetune --backbone vit_mini --weights {weights} --dataset quilts --quiet --epochs 1 --batch 40"
    line += " --grid 1e-3,3e-3 --seeds 1 --warmup-epochs 0"
    assert cli.run(f"{line} --out whole".split()) == 0
    keep = tuning.keep

    def told(*args: object) -> None:
        signals.receive(signal.SIGTERM)
        keep(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as m:
        m.setattr(tuning, "keep", told)
        assert cli.run(f"{line} --out cut".split()) == 143
    assert len(Path("cut/metrics.jsonl").read_text().splitlines()) == 1
    assert cli.run(f"{line} --out cut --resume".split()) == 0
    assert digest("cut/adapter-s0.safetensors") == digest("whole/adapter-s0.safetensors")


def test_time_before_a_stop_counts(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {ALIGN} --out a"
    with monkeypatch.context() as m:
        stop_at(m, PROBE + 9)
        assert cli.run(line.split()) == 143
    saved = torch.load("a/checkpoint.pt", weights_only=True)
    saved["spent"]["cpu_seconds"] += 1000
    torch.save(saved, "a/checkpoint.pt")
    assert cli.run(f"{line} --resume".split()) == 0
    assert 1000 < json.loads(Path("a/result.json").read_text())["cpu_seconds"] < 1100


def test_align_stops_in_linear_probing_and_goes_on(pretrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"align --backbone vit_mini --pretext ijepa --weights {pretrained / 'ijepa'} --dataset quilts {ALIGN}"
    line = line.replace("--alternations 12", "--alternations 2").replace("--probe-epochs 1", "--probe-epochs 2")
    assert cli.run(f"{line} --out whole".split()) == 0
    with monkeypatch.context() as m:
        stop_at(m, 13)
        assert cli.run(f"{line} --out cut".split()) == 143
    assert torch.load("cut/checkpoint.pt", weights_only=True)["opt"]["step"] == 13
    assert cli.run(f"{line} --out cut --resume".split()) == 0
    assert digest("cut/adapter.safetensors") == digest("whole/adapter.safetensors")


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_grid_stopped_half_way_goes_on_to_the_same_bits(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """3 rates and 2 seeds of 4 epochs of 2 steps: stopped in the middle of an epoch of the second run."""
    line = f"finetune --backbone vit_mini --pretext ijepa --weights {pretrained / 'ijepa'} --dataset quilts --quiet"
    line += " --epochs 4 --batch 40 --seeds 2 --grid 1e-3,3e-3,1e-2 --warmup-epochs 1"
    assert cli.run(f"{line} --out whole".split()) == 0
    with monkeypatch.context() as m:
        stop_at(m, 8 + 5)
        assert cli.run(f"{line} --out cut".split()) == 143
    assert [path.name for path in Path("cut").glob("unit-*.pt")] == ["unit-lr0.003-s0.pt"]
    assert torch.load("cut/unit-lr0.003-s0.pt", weights_only=True)["opt"]["step"] == 5
    assert cli.run(f"{line} --out cut --resume --jobs {jobs}".split()) == 0
    for seed in (0, 1):
        assert digest(f"cut/adapter-s{seed}.safetensors") == digest(f"whole/adapter-s{seed}.safetensors")
    a, b = (json.loads(Path(f"{out}/result.json").read_text()) for out in ("whole", "cut"))
    assert all(a[key] == b[key] for key in ("test", "test_loss", "val", "epochs", "grid", "lr"))
    assert not list(Path("cut").glob("unit-*"))


@pytest.mark.parametrize(("pretext", "epochs"), [("mae", 2), ("ijepa", 1)])
def test_pretrain_stops_in_the_middle_of_an_epoch_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, pretext: str, epochs: int
) -> None:
    line = f"pretrain --pool quilts --backbone vit_mini --pretext {pretext} --batch 800 --warmup-epochs 0"
    line += f" --epochs {epochs}"
    assert cli.run(f"{line} --out whole".split()) == 0
    with monkeypatch.context() as m:
        stop_at(m, 5 * epochs - 2)
        assert cli.run(f"{line} --out cut".split()) == 143
    assert torch.load("cut/checkpoint.pt", weights_only=True)["done"] == 5 * epochs - 2
    assert cli.run(f"{line} --out cut --resume".split()) == 0
    assert Path("cut/metrics.jsonl").read_text() == Path("whole/metrics.jsonl").read_text()
    a, b = (torch.load(f"{out}/backbone.pth", weights_only=True) for out in ("whole", "cut"))
    networks = ["model"] if pretext == "mae" else ["encoder", "target_encoder", "predictor"]
    for network in networks:
        assert all(torch.equal(a[network][key], b[network][key]) for key in a[network])
    if pretext == "ijepa":
        assert any(not torch.equal(a["encoder"][key], a["target_encoder"][key]) for key in a["encoder"])


# --- signals and faults, from outside --------------------------------------------------------------------------------


def program(line: str, cwd: Path) -> "subprocess.Popen[str]":
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-c", "import cli; cli.main()", *line.split()]
    return subprocess.Popen(call, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd, env=env)


def under_way(p: "subprocess.Popen[str]", said: str) -> None:
    """Wait for a line of progress."""
    assert p.stderr is not None
    for line in p.stderr:
        if said in line:
            return
    pytest.fail(f"ended before {said!r}")


def test_a_pool_of_runs_stops_on_a_signal_and_loses_nothing(weights: Path, tmp_path: Path) -> None:
    """SIGINT to the parent alone, as a scheduler would, with two runs at work in processes of their own."""
    line = f"finetune --backbone vit_mini --weights {weights} --dataset quilts --epochs 400 --batch 40"
    line += " --seeds 4 --lr 1e-3 --jobs 2 --out f"
    with program(f"{line} --save-minutes 0", tmp_path) as p:
        while len(list(tmp_path.glob("f/unit-*.pt"))) != 2:  # both have saved, so both are under way
            assert p.poll() is None
        p.send_signal(signal.SIGINT)
        said = p.communicate(timeout=60)[1]
    assert p.returncode == 130, said
    assert "Traceback" not in said
    assert "stopped lr 0.001 seed" in said
    assert len(list(tmp_path.glob("f/unit-*.pt"))) >= 2


def test_a_worker_process_that_is_only_starting_hears_its_signal() -> None:
    """It neither dies of it nor forgets it."""
    from tuning import worker_pool

    with worker_pool(2) as pool:
        signals.forward(signal.SIGTERM)
        assert pool is not None
        told = [pool.submit(eval, "__import__('stopping').signals.asked") for _ in range(2)]
        assert [future.result(60) for future in told] == [signal.SIGTERM] * 2


def test_a_second_signal_leaves_at_once_and_harms_nothing(weights: Path, tmp_path: Path) -> None:
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {ALIGN} --out a"
    line = line.replace(" --quiet", "")
    line = line.replace("--lower-steps 2", "--lower-steps 20").replace("--eval-every 4", "--eval-every 1")
    with program(line, tmp_path) as p:
        under_way(p, "align 2/12")
        p.send_signal(signal.SIGTERM)
        p.send_signal(signal.SIGTERM)
        said = p.communicate(timeout=60)[1]
    assert p.returncode in (143, 130), said
    assert "Traceback" not in said
    torch.load(tmp_path / "a/checkpoint.pt", weights_only=True)
    assert not list(tmp_path.glob("a/.*.tmp"))


def test_two_processes_cannot_write_one_run(weights: Path, tmp_path: Path) -> None:
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {SMALL} --probe-epochs 0 --out a"
    with program(line, tmp_path) as p:
        under_way(p, "align 1/500")
        with program(f"{line} --resume", tmp_path) as other:
            said = other.communicate(timeout=60)[1]
        p.kill()
        p.communicate()
    assert other.returncode == 2
    assert said.strip() == "error: --out a: another process is at work in it, wait for it or choose another --out"


def killed_while_saving(weights: Path, tmp_path: Path, count: int) -> tuple[int, int]:
    """Kill -9 at `count` random moments of saving, the same run going on after each; it ends in the same digest.

    Returns after how many kills there was a checkpoint, which loaded, and how many hit the writing itself.
    """
    g = torch.Generator().manual_seed(0)
    base = f"align --backbone vit_mini --weights {weights} --dataset quilts {ALIGN} --out a"
    base = base.replace("--eval-every 4", "--eval-every 1").replace("--alternations 12", "--alternations 40")
    call = "import cli, os, runtime, sys, time\n"
    call += "write = runtime.write_atomic\n"
    call += "def slow(path, content):\n"
    call += "    if path.name == 'checkpoint.pt': print('saving', file=sys.stderr, flush=True)\n"
    call += "    write(path, content)\n"
    call += "runtime.write_atomic = slow\ncli.main()"
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    loaded, inside, begun = 0, 0, False
    for _ in range(count):
        line = [*base.split(), *(["--resume"] if begun else [])]
        with subprocess.Popen(
            [sys.executable, "-c", call, *line], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env
        ) as p:
            under_way(p, "saving")
            time.sleep(0.003 * float(torch.rand(1, generator=g)))  # a save takes some milliseconds
            p.kill()
        begun = True
        inside += bool(list((tmp_path / "a").glob(".*.tmp")))
        if (tmp_path / "a/checkpoint.pt").exists():
            torch.load(tmp_path / "a/checkpoint.pt", weights_only=True)
            loaded += 1
    with program(f"{base} --resume", tmp_path) as p:
        said = p.communicate(timeout=300)[1]
    assert p.returncode == 0, said
    assert cli.run(base.replace("--out a", "--out whole").split()) == 0
    assert digest(str(tmp_path / "a/adapter.safetensors")) == digest(str(tmp_path / "whole/adapter.safetensors"))
    assert not list((tmp_path / "a").glob(".*.tmp"))
    return loaded, inside


def test_a_run_killed_as_it_began_is_begun_again(weights: Path) -> None:
    """Between its first two files; and one that was being started over, before all of its files were gone."""
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {ALIGN} --out a --alternations 1"
    Path("a").mkdir()
    for name in ("env.json", ".lock", ".config.json.host.1.tmp"):
        Path("a", name).write_text("{")
    assert cli.run(line.split()) == 0
    assert not list(Path("a").glob(".*.tmp"))
    Path("a/result.json").unlink()
    Path("a/checkpoint.pt").unlink()
    assert cli.run([*line.split(), "--force"]) == 0
    Path("a/config.json").unlink()
    assert cli.run([*line.split(), "--force"]) == 2  # a checkpoint without settings is not ours to remove


SHORT = "--alternations 2 --lower-steps 1 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 0 --eval-every 1"


def stopped_one(weights: Path, monkeypatch: pytest.MonkeyPatch, more: str = "--pool quilts") -> list[str]:
    """A run `a` that was stopped in its second alternation; returns the command that goes on with it."""
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {SHORT} --warmup 0 --quiet --out a {more}"
    with monkeypatch.context() as m:
        stop_at(m, 3)
        assert cli.run(line.split()) == 143
    return [*line.split(), "--resume"]


def test_a_pool_that_has_changed_is_refused(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many files as before, one of another name: another order."""
    Path("pool").mkdir()
    for i in range(9):
        Image.new("RGB", (16, 16), (i, 99, 7)).save(f"pool/{i}.png")
    again = stopped_one(weights, monkeypatch, "--pool pool")
    capsys.readouterr()
    Path("pool/0.png").rename("pool/x.png")
    assert cli.run(again) == 2
    assert "--resume: settings differ from the run in a: pool_sha256" in capsys.readouterr().err
    Path("pool/x.png").rename("pool/0.png")
    Path("pool").rename("elsewhere")
    Path("pool").symlink_to("elsewhere")
    assert cli.run(again) == 0


def test_weights_may_lie_elsewhere_when_a_run_goes_on(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = stopped_one(weights, monkeypatch)
    shutil.copy(weights / "backbone.pth", "moved.pth")
    assert cli.run([*again, "--weights", "moved.pth"]) == 0
    assert json.loads(Path("a/config.json").read_text())["model"]["weights"].endswith("moved.pth")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", b'{"step": 0}\n\xff\xfe\n{"step": 1}\n'),
        ("metrics.jsonl", b'{"a": 1}\n{"a": 2}\n'),
        ("metrics.jsonl", b"[1, 2]\n3\n"),
        ("checkpoint.pt", [1, 2]),
        ("checkpoint.pt", {}),
        ("checkpoint.pt", torch.zeros(3)),
        ("checkpoint.pt", {"done": 1}),
        ("checkpoint.pt", {"done": "x"}),
        ("checkpoint.pt", {"done": 99}),
        ("checkpoint.pt", {"theta_P": torch.zeros(2)}),
        ("checkpoint.pt", {"opt_P": {}}),
        ("checkpoint.pt", {"d_lr": None}),
    ],
)
def test_run_files_that_can_be_read_but_are_something_else_are_named(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, content: object
) -> None:
    """A dict with one key changes that one key of the checkpoint as it was, but for `{}` and a lone `done`."""
    again = stopped_one(weights, monkeypatch)
    capsys.readouterr()
    if isinstance(content, bytes):
        Path("a", file).write_bytes(content)
    else:
        before = torch.load("a/checkpoint.pt", weights_only=True)
        alone = not isinstance(content, dict) or content in ({}, {"done": 1})
        torch.save(content if alone else before | content, "a/checkpoint.pt")  # type: ignore[operator]
    assert cli.run(again) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert f"a/{file}: " in err
    assert "--force starts the run over" in err


def test_a_run_without_its_checkpoint_says_that_it_starts_over(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = stopped_one(weights, monkeypatch)
    Path("a/checkpoint.pt").unlink()
    assert cli.run([word for word in again if word != "--quiet"]) == 0
    assert "there is no checkpoint in a, the run starts over" in " ".join(capsys.readouterr().err.split())


def test_a_signal_is_not_lost_in_a_library_that_catches_everything() -> None:
    code = (
        "import time; from stopping import signals; signals.install(); print('here', flush=True)\n"
        "while True:\n    try: time.sleep(0.01)\n    except BaseException: pass"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as running:
            assert running.stdout is not None
            running.stdout.readline()
            running.send_signal(number)
            _, err = running.communicate(timeout=20)
        assert (running.returncode, err.count("\n")) == (128 + number, 1)


def test_worker_processes_end_when_their_parent_is_killed() -> None:
    code = (
        "import multiprocessing, time, tuning\nif __name__ == '__main__':\n"
        "    with tuning.worker_pool(2) as pool:\n        print(*pool.map(abs, [1, 2]), flush=True)\n"
        "        print(*[p.pid for p in multiprocessing.active_children()], flush=True)\n"
        "        pool.submit(time.sleep, 600)\n        time.sleep(600)"
    )
    Path("parent.py").write_text(code)
    with subprocess.Popen(
        [sys.executable, "parent.py"], text=True, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        children = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) == 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_killed_while_saving_a_run_goes_on(weights: Path, tmp_path: Path) -> None:
    killed_while_saving(weights, tmp_path, 1)


@pytest.mark.slow
def test_killed_at_twenty_moments_of_saving_a_run_goes_on(weights: Path, tmp_path: Path) -> None:
    loaded, inside = killed_while_saving(weights, tmp_path, 20)
    print(f"{loaded} of 20 kills left a checkpoint, each loaded; {inside} hit the writing itself")
    assert loaded >= 18  # the first may come before there is any
    assert inside > 0
