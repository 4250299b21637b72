"""Run directories against mistakes, and runs that go on to the same bits after stops and kills."""

import itertools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from child_process import children, finish, gone, start, wait_for
from filelock import FileLock
from PIL import Image
from toy import PRETRAIN_STEPS, align_line, done, finetune_line, refusal

import cli
from config import AlignConfig
from support import runs
from support.errors import UsageError
from support.optim import Group, Optimiser
from support.processes import Stopped, stop
from support.runs import Identity, Run, RunState, check_directory, may_change

SAID = Path("said")

pytestmark = pytest.mark.usefixtures("elsewhere")


def config(**changes: Any) -> AlignConfig:
    return AlignConfig(backbone="vit_mini", dataset="quilts", **changes)


def test_a_directory_of_something_else_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    Run(tmp_path / "run", "align", config()).close()
    with pytest.raises(UsageError, match=r"--out: .*UTF-8"):
        Run(tmp_path / os.fsdecode(b"\xe9"), "align", config())
    for force in (False, True):
        with pytest.raises(UsageError, match=r"thesis\.tex"):
            Run(tmp_path / "mine", "align", config(), force)
        with pytest.raises(UsageError, match="file"):
            Run(tmp_path / "file", "align", config(), force)
        with pytest.raises(UsageError, match="`align`"):
            Run(tmp_path / "run", "finetune", config(), force)


def test_other_settings_are_refused_with_both_values_and_digests_by_what_they_are_of(
    tmp_path: Path,
) -> None:
    identity = Identity(weights_sha256="1" * 64, images={"train": 3})
    Run(tmp_path, "align", config(), identity=identity).close()
    assert AlignConfig(**json.loads((tmp_path / "config.json").read_text())) == config()
    with pytest.raises(UsageError, match=r"seed 0 -> 1, lam 0\.001 -> 0\.5"):
        Run(tmp_path, "align", config(seed=1, lam=0.5), identity=identity)
    with pytest.raises(UsageError, match="--weights was changed") as refused:
        Run(tmp_path, "align", config(), identity=Identity(weights_sha256="2" * 64))
    assert "1" * 64 not in str(refused.value)
    # what is not known yet is not compared
    assert check_directory(tmp_path, "align", config()) is RunState.UNFINISHED
    assert check_directory(tmp_path / "new", "align", config()) is RunState.NEW
    assert not (tmp_path / "new").exists()


def test_only_settings_that_change_no_number_may_change() -> None:
    free = {"data_root", "device", "mfac_device", "micro_batch", "save_minutes", "weights"}
    assert may_change(AlignConfig) == free | {"recompute", "tensorboard", "workers"}


def test_a_changed_pretext_task_is_refused(tmp_path: Path) -> None:
    cfg = config(pretext="task.py:Jigsaw")
    Run(tmp_path, "align", cfg, identity=Identity(pretext_sha256="1" * 64)).close()
    with pytest.raises(UsageError, match=r"task\.py was changed"):
        Run(tmp_path, "align", cfg, identity=Identity(pretext_sha256="2" * 64))


def test_a_finished_run_gives_its_result_again_and_force_starts_it_over(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Run(out, "align", config()) as run:
        run.log({"step": 1})
        run.save_if_due("step 1", due=True)
        result = run.finish({"accuracy": 70.0})
    assert {"accuracy", "cpu_seconds", "seconds", "out", "adapter", "weights"} == result.keys()
    assert not (out / "checkpoint.pt").exists()
    out = out.rename(tmp_path / "moved")
    with FileLock(out / ".lock"), Run(out, "align", config()) as run:  # it reads, and asks nobody
        assert json.dumps(run.result) == json.dumps(result).replace("/run", "/moved")
    (out / "picture.png").write_text("the user's own")
    for name in ("lr0.1-s0", "lr0.1-s1"):  # trials of a grid: they end with it
        Run(out / name, "peft", config()).close()
    (out / "lr0.1-s1" / "notes.txt").write_text("the user's own")
    (out / "lr_trials-s3_of_mine").mkdir()
    (out / "lr_trials-s3_of_mine" / "result.json").write_text("the user's own")
    with Run(out, "align", config(seed=1), force=True) as run:
        assert (run.result, run.records) == (None, [])
    assert [file.name for file in (out / "lr0.1-s1").iterdir()] == ["notes.txt"]
    assert [*(out / "lr_trials-s3_of_mine").iterdir()]
    names = {"picture.png", "config.json", "env.json", ".lock", "lr0.1-s1", "lr_trials-s3_of_mine"}
    assert {file.name for file in out.iterdir()} == names


def test_tensors_records_and_time_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """What was logged behind it is logged anew; seconds before the stop count."""
    with Run(tmp_path, "align", config()) as run:
        run.restore({"x": torch.ones(2)}, {})
        run.log({"step": 1})
        run.spent_in_earlier_starts = {"cpu_seconds": 1000.0, "seconds": 2000.0}
        run.save_if_due("step 1", due=True)
        run.log({"step": 2})
        run.save_if_due("step 2")  # not due: nothing is saved
    with Run(tmp_path, "align", config()) as run:
        x = torch.zeros(2)
        run.restore({"x": x}, {})
        assert torch.equal(x, torch.ones(2))
        run.log({"step": 2, "anew": True})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 2, "anew": True}]
        assert 1000 < run.finish({})["cpu_seconds"] < 1100


def adapters() -> tuple[dict[str, torch.Tensor], dict[str, Optimiser]]:
    """Two adapters of one shape and their optimisers, each a step on."""
    tensors = {"theta_P": torch.ones(2, 3), "theta_D": torch.ones(2, 3)}
    optimisers: dict[str, Optimiser] = {}
    for name, tensor in tensors.items():
        tensor.requires_grad_()
        opt = Optimiser([Group([tensor], 0.1, 0.0)], None, (0.9, 0.95))
        opt.update([tensor], [torch.full((2, 3), 1.0 + len(optimisers))])
        optimisers[name.replace("theta", "opt")] = opt
    return tensors, optimisers


def renamed(saved: Any) -> None:
    saved["tensors"]["theta_X"] = saved["tensors"].pop("theta_D")


def reshaped(saved: Any) -> None:
    saved["tensors"]["theta_P"] = torch.ones(1, 3)


def swapped(saved: Any) -> None:
    both = saved["optimisers"]
    both["opt_P"], both["opt_D"] = both["opt_D"], both["opt_P"]


@pytest.mark.parametrize(
    ("change", "named"), [(renamed, "theta_D"), (reshaped, "theta_P"), (swapped, "opt_P")]
)
def test_a_checkpoint_with_other_names_or_shapes_is_refused_and_changes_nothing(
    tmp_path: Path, change: Callable[[Any], None], named: str
) -> None:
    tensors, optimisers = adapters()
    with Run(tmp_path, "align", config()) as run:
        run.restore(tensors, optimisers)
        run.save_if_due("step 1", due=True)
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        change(saved)
        torch.save(saved, tmp_path / "checkpoint.pt")
        fresh, optimisers = adapters()
        before = fresh["theta_P"].detach().clone()
        with pytest.raises(UsageError, match=rf"checkpoint\.pt: .*{named}.*--force"):
            run.restore(fresh, optimisers)
        assert torch.equal(fresh["theta_P"], before)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", [1, 2], {}])
def test_a_damaged_checkpoint_is_named_with_a_remedy(tmp_path: Path, content: Any) -> None:
    with Run(tmp_path, "align", config()) as run:
        if isinstance(content, bytes):
            (tmp_path / "checkpoint.pt").write_bytes(content)
        else:
            torch.save(content, tmp_path / "checkpoint.pt")
        with pytest.raises(UsageError, match=r"checkpoint\.pt: .*--force"):
            run.restore({"x": torch.zeros(1)}, {})


def test_a_damaged_result_is_named_with_a_remedy(tmp_path: Path) -> None:
    Run(tmp_path, "align", config()).close()
    for content in ("{}", "{", "[]"):
        (tmp_path / "result.json").write_text(content)
        with pytest.raises(UsageError, match=r"result\.json: "):
            Run(tmp_path, "align", config())


def test_a_run_killed_as_it_began_is_begun_again(tmp_path: Path) -> None:
    Run(tmp_path, "align", config()).close()
    (tmp_path / "config.json").rename(tmp_path / ".config.json.1.tmp")
    with Run(tmp_path, "align", config()):
        assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize(
    "name", ["env.json", "lr1e-3-s0/checkpoint.pt", ".mine.1.tmp", "notes.txt"]
)
def test_a_directory_with_files_of_others_is_refused_and_left(tmp_path: Path, name: str) -> None:
    """Also where a file is called as one of a run is."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    for force in (False, True):
        with pytest.raises(UsageError, match=name.split("/")[0]):
            Run(tmp_path, "finetune", config(), force)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_a_file_is_not_written_through_a_link_that_was_put_there(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / f".result.json.{os.getpid()}.tmp").symlink_to(theirs)
    runs.write_atomic(tmp_path / "result.json", "ours")
    assert (theirs.read_text(), (tmp_path / "result.json").read_text()) == ("theirs", "ours")


def test_a_run_that_starts_over_is_unfinished_before_its_trials_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, killed in between, it would be a finished run without trials."""
    with Run(tmp_path, "finetune", config()) as run:
        with Run(tmp_path / "lr0.1-s0", "peft", config()) as trial:
            trial.finish({})
        run.finish({})
    removed: list[Path] = []
    monkeypatch.setattr(Path, "unlink", lambda path, **_: removed.append(path))
    runs.clear(tmp_path)
    assert removed[0] == tmp_path / "result.json"
    assert tmp_path / "lr0.1-s0/result.json" in removed


def test_a_finished_run_is_only_read_also_if_it_was_killed_just_then(tmp_path: Path) -> None:
    """Its checkpoint is left, and stays."""
    with Run(tmp_path, "align", config()) as run:
        run.restore({"x": torch.ones(1)}, {})
        run.save_if_due("step 1", due=True)
        saved = (tmp_path / "checkpoint.pt").read_bytes()
        run.finish({})
    (tmp_path / "checkpoint.pt").write_bytes(saved)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with Run(tmp_path, "align", config()) as run:
        assert run.result is not None
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_directory_in_use_is_waited_for_and_then_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PATIENCE", 0.01)
    with FileLock(tmp_path / ".lock"), pytest.raises(UsageError, match=f"--out {tmp_path}"):
        Run(tmp_path, "align", config())
    assert str(tmp_path) in caplog.text  # it said that it was waiting
    with Run(tmp_path, "align", config()) as run:
        assert run.result is None


def test_a_run_that_waits_for_a_directory_goes_on_once_the_other_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PATIENCE", 0.5)
    other = FileLock(tmp_path / ".lock")
    other.acquire()
    monkeypatch.setattr(runs.LOG, "warning", lambda *words: other.release())  # "is waiting"
    with Run(tmp_path, "align", config()) as run:
        assert run.result is None and (tmp_path / "config.json").exists()


def test_a_signal_saves_and_stops_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with Run(tmp_path, "align", config()) as run:
        run.restore({"x": torch.ones(1)}, {})
        stop.hear(signal.SIGHUP)
        with pytest.raises(Stopped, match="step 1 of 9") as told:
            run.save_if_due("step 1 of 9")
    assert told.value.args[0] == signal.SIGHUP
    with pytest.raises(Stopped):  # of a grid: the next is not begun
        Run(tmp_path / "next", "align", config())
    stop.reset()
    with Run(tmp_path, "align", config()) as run:
        x = torch.zeros(1)
        run.restore({"x": x}, {})
        assert x == 1


def test_env_says_which_program_ran(tmp_path: Path) -> None:
    Run(tmp_path, "align", config()).close()
    (machine,) = json.loads((tmp_path / "env.json").read_text())["machines"]
    assert machine["versions"].keys() >= {"python", "torch"}


# From here on command lines, in this process or in a forked one that is stopped or killed.


def term() -> None:
    """Ask this process to stop."""
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    """End this process as the machine's end would."""
    os.kill(os.getpid(), signal.SIGKILL)


vanish = partial(os._exit, 9)


def cut(line: str, end: Callable[[], object], file: str, nth: int = 1, within: bool = False) -> int:
    """Exit code of a command line, in a forked process, where `end` comes as a file is written.

    Args:
        file: its name.
        nth: which of the times that it is written.
        within: before the new one takes the old one's place, or in the middle of a line.
    """
    count, write, append = itertools.count(1), runs.write_atomic, runs.append_line

    def writing(path: Path, content: Any) -> None:
        hit = path.name == file and next(count) == nth
        if hit and within:
            runs.os.fsync = lambda fd: end()  # type: ignore[assignment, return-value]
        write(path, content)
        if hit:
            end()

    def appending(path: Path, line: str) -> None:
        hit = path.name == file and next(count) == nth
        if hit and within:
            with path.open("a") as half:
                half.write(line[: len(line) // 2])
            end()
        append(path, line)
        if hit:
            end()

    def program() -> int:
        runs.write_atomic = writing
        runs.append_line = appending
        return cli.run(line.split())

    return finish(start(program, SAID))


def same(*files: str) -> bool:
    """Whether the runs `whole` and `cut` have the same files, bit for bit."""
    return all(Path("whole", x).read_bytes() == Path("cut", x).read_bytes() for x in files)


def images(count: int) -> None:
    """A folder `pool` of different images."""
    Path("pool").mkdir()
    for i in range(count):
        pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.byte().numpy()).save(f"pool/{i}.png")


LONGER = "--alternations 5 --eval-every 3 --probe-epochs 2 --upper-steps 1 --save-minutes 0"


@pytest.mark.parametrize(
    ("pretext", "hypergrad"),
    [("mae", "mfac"), pytest.param("ijepa", "cg", marks=pytest.mark.slow)],
)
def test_align_goes_on_to_the_same_bits(pretrained: Path, pretext: str, hypergrad: str) -> None:
    """Stopped and killed in one run: in the probe, between and in alternations, at the very end."""
    line = align_line(pretrained, f"{LONGER} --hypergrad {hypergrad}", pretext)
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, vanish, "checkpoint.pt") == 9  # after the first of two probing epochs
    assert cut(line, term, "metrics.jsonl", 3) == 143
    assert "stopped after alternation 2 of 5" in SAID.read_text()
    assert cut(line, vanish, "metrics.jsonl", 2) == 9  # logged, not saved
    assert cut(line, kill, "metrics.jsonl", 2, within=True) == -9  # in the middle of a line
    assert not Path("cut/metrics.jsonl").read_text().endswith("\n")
    assert cut(line, kill, "checkpoint.pt", within=True) == -9
    assert list(Path("cut").glob(".*.tmp"))
    assert cut(line, vanish, "adapter.safetensors", within=True) == 9
    done(line)
    assert same("adapter.safetensors", "metrics.jsonl")
    assert not list(Path("cut").glob(".*.tmp"))


@pytest.mark.slow
def test_killed_at_twenty_moments_of_saving_a_run_goes_on(pretrained: Path) -> None:
    """Each time a checkpoint is there that loads; half of the kills leave a torn file behind."""
    line = align_line(pretrained, f"{LONGER} --alternations 40")
    done(f"{line} --out whole")
    line, torn = f"{line} --out cut", 0
    assert cut(line, kill, "checkpoint.pt") == -9
    for i in range(20):
        assert cut(line, kill, "checkpoint.pt", 1 + i % 3, within=i % 2 == 0) == -9
        torn += bool(list(Path("cut").glob(".*.tmp")))
        torch.load("cut/checkpoint.pt", weights_only=True)
    assert torn == 10
    done(line)
    assert same("adapter.safetensors", "metrics.jsonl")


@pytest.mark.parametrize("pretext", ["mae", "ijepa"])
def test_pretrain_goes_on_to_the_same_bits(pretext: str) -> None:
    images(30)
    line = f"pretrain --pool pool --backbone vit_mini --pretext {pretext} {PRETRAIN_STEPS} --quiet"
    line += " --batch 12 --epochs 3 --save-minutes 0"
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, term, "metrics.jsonl") == 143
    assert cut(line, kill, "checkpoint.pt", within=True) == -9
    assert cut(line, vanish, "backbone.pth", within=True) == 9
    done(line)
    assert same("metrics.jsonl", "backbone.pth")


def same_grid() -> bool:
    """Whether the finetune runs `whole` and `cut` have the same numbers and adapters."""
    a, b = (json.loads(Path(x, "result.json").read_text()) for x in ("whole", "cut"))
    keys = ("test", "test_loss", "val", "epochs", "grid", "lr", "right")
    return [a[k] for k in keys] == [b[k] for k in keys] and same(
        "adapter-s0.safetensors", "adapter-s1.safetensors"
    )


def test_a_grid_goes_on_to_the_same_bits(pretrained: Path) -> None:
    """The second rate is best before the stop, and chosen."""
    line = f"finetune --backbone vit_mini --weights {pretrained}/mae head=batchnorm"
    line += " --dataset quilts --epochs 3 --batch 40 --seeds 2 --grid 1e-1,3e-2 --warmup-epochs 1"
    line += " --save-minutes 0 --quiet"
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, term, "metrics.jsonl", 5) == 143  # the second run's second epoch
    assert "stopped after epoch 2 of 3, lr 0.03 seed 0, saved in cut/lr0.03-s0" in SAID.read_text()
    assert cut(line, kill, "checkpoint.pt", within=True) == -9
    assert cut(line, vanish, "result.json") == 9
    done(line)
    assert same_grid()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_jobs_stopped_or_killed_with_their_parent_go_on(
    pretrained: Path, number: signal.Signals
) -> None:
    """Of a parent with two runs at work: SIGTERM, they save and stop; kill -9, they end with it.

    On handwriting: the new processes do not know what the tests have registered.
    """
    more = "--dataset omniglot:Greek --epochs 40 --seeds 2 --lr 1e-3 --save-minutes 0 --jobs"
    line = finetune_line(pretrained, more)
    done(f"{line} 1 --out whole")
    parent = start(partial(cli.run, f"{line} 2 --out cut".split()), SAID)
    wait_for(lambda: len(list(Path("cut").glob("*/checkpoint.pt"))) == 2, parent)
    workers = children(parent.pid)
    os.kill(parent.pid or 0, number)
    assert (finish(parent), len(workers)) == (143 if number == signal.SIGTERM else -9, 2)
    wait_for(lambda: gone(workers))
    assert ("stopped after epoch" in SAID.read_text()) == (number == signal.SIGTERM)
    assert "Traceback" not in SAID.read_text() and not Path("cut/result.json").exists()
    done(f"{line} 1 --out cut")
    assert same_grid()


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(pretrained: Path) -> None:
    """A limit on the size of files stands for the disk's end; with room, the run goes on."""
    line = align_line(pretrained, "--save-minutes 0")

    def limited() -> int:
        """All is written until the second alternation's checkpoint."""
        write, count = runs.write_atomic, itertools.count(1)

        def writing(path: Path, content: Any) -> None:
            if path.name == "checkpoint.pt" and next(count) == 2:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2,) * 2)
            write(path, content)

        runs.write_atomic = writing
        return cli.run(f"{line} --out cut".split())

    assert finish(start(limited, SAID)) == 1
    assert "checkpoint.pt: cannot be written" in SAID.read_text()
    assert not list(Path("cut").glob(".*.tmp"))
    assert torch.load("cut/checkpoint.pt", weights_only=True)
    done(f"{line} --out whole")
    done(f"{line} --out cut")
    assert same("adapter.safetensors")


def test_a_run_goes_on_with_the_same_settings_weights_and_pool_alone(weights: Path) -> None:
    """A pool of as many files, one of another name, has another order. Links and copies are taken,
    and so is what says how the machine works. The stop was a SIGHUP.
    """
    images(9)
    line = align_line(weights.parent, "--pool pool --out a")
    assert cut(line, lambda: os.kill(os.getpid(), signal.SIGHUP), "checkpoint.pt") == 129
    assert "p_lr 0.01 -> 0.1, lam 0.001 -> 0.5" in refusal(f"{line} --lam 0.5 --p-lr 0.1")
    Path("pool/0.png").rename("pool/x.png")
    assert "--pool was changed" in refusal(line)
    Path("pool/x.png").rename("pool/0.png")
    Path("pool").rename("elsewhere")
    Path("pool").symlink_to("elsewhere")
    shutil.copy(weights / "backbone.pth", "moved.pth")
    done(f"{line} --micro-batch 3 --workers 1 --save-minutes 1 --weights moved.pth")
    machines = json.loads(Path("a/env.json").read_text())["machines"]
    assert [machine["micro_batch"] for machine in machines] == [None, 3]
    assert json.loads(Path("a/config.json").read_text())["weights"].endswith("moved.pth")
