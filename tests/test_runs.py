"""Run directories against mistakes, and runs that go on to the same bits after stops and kills."""

import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from child_process import finish, start, wait_for
from filelock import FileLock
from PIL import Image
from toy import PRETRAIN_STEPS, align_line, contents, done, finetune_line, refusal, words_of

import cli
import finetune
from config import AlignConfig, FinetuneConfig, Record
from support import files, runs
from support.errors import RunError, UsageError
from support.processes import HEARD, Stopped
from support.runs import MAY_CHANGE, open_run, share

SAID = Path("said")

pytestmark = pytest.mark.usefixtures("elsewhere")


def config(**changes: Any) -> AlignConfig:
    return AlignConfig(backbone="vit_mini", dataset="quilts", **changes)


def begin(
    path: Path, command: str = "align", digests: Record | None = None, **changes: Any
) -> None:
    """Open a run with these settings, and leave it unfinished."""
    with open_run(path, command, config(**changes), digests or {}):
        pass


def test_a_directory_of_something_else_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    begin(tmp_path / "run")
    before = contents(tmp_path)
    for name, command, named in (
        ("mine", "align", r"thesis\.tex"),
        ("file", "align", "is a file"),
        ("run", "finetune", "no run of this command"),
    ):
        with pytest.raises(UsageError, match=named):
            begin(tmp_path / name, command)
    assert contents(tmp_path) == before


def test_other_settings_are_refused_with_both_values_and_digests_by_what_they_are_of(
    tmp_path: Path,
) -> None:
    digests = {"weights_sha256": "1" * 64, "start_sha256": None}
    begin(tmp_path, digests=digests)
    definition = {"command": "align", **config().model_dump(mode="json"), **digests}
    assert json.loads((tmp_path / "config.json").read_text()) == definition
    with pytest.raises(UsageError, match=r"lam 0\.001 -> 0\.5, seed 0 -> 1"):
        begin(tmp_path, digests=digests, seed=1, lam=0.5)
    for name, flag in (("weights_sha256", "--weights"), ("start_sha256", "--from")):
        with pytest.raises(UsageError, match=f"content of {flag} was changed") as refused:
            begin(tmp_path, digests=digests | {name: "2" * 64})
        assert "1" * 64 not in str(refused.value)
    with pytest.raises(UsageError, match="content of --pool was changed"):
        begin(tmp_path, digests=digests | {"pool_sha256": "3"}, pool="imagenet")


def test_a_setting_that_came_after_the_run_had_its_default_there(tmp_path: Path) -> None:
    begin(tmp_path)
    recorded = json.loads((tmp_path / "config.json").read_text())
    del recorded["clip"], recorded["aspect"]
    (tmp_path / "config.json").write_text(json.dumps(recorded | {"dropped_since": 3}))
    begin(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(UsageError, match=r"clip 10\.0 -> 1\.0"):
        begin(tmp_path, clip=1.0)


def test_only_settings_that_change_no_number_may_change() -> None:
    free = {"data_root", "device", "mfac_device", "micro_batch", "save_minutes", "recompute"}
    free |= {"tensorboard", "workers"}
    by_digest = {"weights", "start", "dataset", "pool", "split_file"}
    assert free | by_digest == MAY_CHANGE
    for kind in (AlignConfig, FinetuneConfig):
        assert free & kind.model_fields.keys() == free - {"mfac_device"} - {"start"} | (
            {"mfac_device"} & kind.model_fields.keys()
        )


def test_a_finished_run_is_only_read_wherever_it_lies(tmp_path: Path) -> None:
    """Also where another process has its lock, and on a disk that cannot be written."""
    out = tmp_path / "run"
    with open_run(out, "align", config(), {}) as run:
        run.log({"step": 1})
        run.save_if_due(due=True)
        saved = (out / "checkpoint.pt").read_bytes()
        run.finish({"accuracy": 70.0})
        assert run.result is not None
        result = run.result
    assert result.keys() == {"accuracy", "cpu_seconds", "seconds"}
    assert not (out / "checkpoint.pt").exists()
    out = out.rename(tmp_path / "moved")
    before = contents(out)
    # a kill just before it was removed: nobody needs it any more
    (out / "checkpoint.pt").write_bytes(saved)
    with FileLock(out / ".lock"), open_run(out, "align", config(), {}) as run:
        assert run.result == result
    assert contents(out) == before


def test_tensors_records_and_time_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """What was logged behind it is logged anew; seconds before the stop count."""
    with open_run(tmp_path, "align", config(), {}) as run:
        run.restore({"x": torch.ones(2)}, {})
        run.log({"step": 1})
        run.spent = {"cpu_seconds": 1000.0, "seconds": 2000.0}
        run.save_if_due(due=True)
        run.log({"step": 2})
        run.save_if_due()  # not due: nothing is saved
    with open_run(tmp_path, "align", config(), {}) as run:
        x = torch.zeros(2)
        run.restore({"x": x}, {})
        assert torch.equal(x, torch.ones(2))
        run.log({"step": 2, "anew": True})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 2, "anew": True}]
        run.finish({})
        assert run.result is not None and 1000 < run.result["cpu_seconds"] < 1100


def test_a_checkpoint_of_another_version_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tmp_path, "align", config(), {}) as run:
        run.save_if_due(due=True)
    monkeypatch.setattr(runs, "__version__", "9.9.9")
    with pytest.raises(UsageError, match=r"checkpoint\.pt: .*of version"):
        begin(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", [1, 2], {}])
def test_a_damaged_checkpoint_is_named_with_a_remedy(tmp_path: Path, content: Any) -> None:
    begin(tmp_path)
    if isinstance(content, bytes):
        (tmp_path / "checkpoint.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(UsageError, match=r"checkpoint\.pt: .*remove"):
        begin(tmp_path)


def test_a_damaged_result_is_named_with_a_remedy(tmp_path: Path) -> None:
    begin(tmp_path)
    for content in ("{", "[1]"):
        (tmp_path / "result.json").write_text(content)
        with pytest.raises(UsageError, match=r"result\.json: .*remove"):
            begin(tmp_path)


def test_a_run_killed_as_it_began_is_begun_again(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / ".config.json.tmp")
    (tmp_path / "env.json").unlink()  # it is written later
    begin(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize(
    "name", ["env.json", "lr1e-3-s0/checkpoint.pt", ".mine.1.tmp", "notes.txt"]
)
def test_a_directory_with_files_of_others_is_refused_and_left(tmp_path: Path, name: str) -> None:
    """Also where a file is called as one of a run is."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    with pytest.raises(UsageError, match=name.split("/")[0]):
        begin(tmp_path, "finetune")
    assert [*contents(tmp_path)] == [file]


def test_a_file_is_not_written_through_a_link_that_was_put_there(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / ".result.json.tmp").symlink_to(theirs)
    files.write_atomic(tmp_path / "result.json", "ours")
    assert (theirs.read_text(), (tmp_path / "result.json").read_text()) == ("theirs", "ours")


def test_an_error_as_a_run_begins_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while somebody, as a notebook does, holds the exception."""

    def full(path: Path, content: object) -> None:
        raise RunError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_atomic", full)
        with pytest.raises(RunError, match="no room") as held:
            begin(tmp_path)
    assert held.value
    begin(tmp_path)


def test_a_busy_directory_is_refused_or_waited_for_until_the_other_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bisslight")
    other = FileLock(tmp_path / ".lock")
    other.acquire()
    with pytest.raises(UsageError, match="another process is at work"):
        begin(tmp_path)
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: other.release())
    with open_run(tmp_path, "align", config(), {}, wait=True) as run:
        assert run.result is None
    assert "waiting" in caplog.text


def test_a_process_that_waits_hears_a_signal(tmp_path: Path) -> None:
    HEARD.append(signal.SIGTERM)
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(Stopped) as stopped,
        open_run(tmp_path, "align", config(), {}, wait=True),
    ):
        pass
    assert stopped.value.code == 143


def test_what_another_process_is_at_comes_last() -> None:
    def work(unit: int, wait: bool) -> tuple[int, bool]:
        if unit == 1 and not wait:
            raise runs.Busy
        return unit, wait

    assert [*share(work, [0, 1, 2])] == [(0, False), (2, False), (1, True)]


def test_a_signal_saves_and_stops_and_the_next_start_goes_on(tmp_path: Path) -> None:
    with open_run(tmp_path, "align", config(), {}) as run:
        run.restore({"x": torch.ones(1)}, {})
        HEARD.append(signal.SIGHUP)
        with pytest.raises(Stopped) as stopped:
            run.save_if_due()
    assert stopped.value.code == 129
    HEARD.clear()
    with open_run(tmp_path, "align", config(), {}) as run:
        x = torch.zeros(1)
        run.restore({"x": x}, {})
        assert x == 1


def test_env_says_which_program_ran(tmp_path: Path) -> None:
    begin(tmp_path)
    assert json.loads((tmp_path / "env.json").read_text())["versions"].keys() >= {"python", "torch"}


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
    count, write, log = itertools.count(1), files.write_atomic, runs.Run.log

    def writing(path: Path, content: Any) -> None:
        hit = path.name == file and next(count) == nth
        if hit and within:
            files.os.fsync = lambda fd: end()  # type: ignore[assignment, return-value]
        write(path, content)
        if hit:
            end()

    def logging(run: runs.Run, record: Any) -> None:
        hit = file == "metrics.jsonl" and next(count) == nth
        if hit and within:
            with (run.path / file).open("a") as half:
                half.write(json.dumps(record)[:20])
            end()
        log(run, record)
        if hit:
            end()

    def program() -> int:
        runs.write_atomic = finetune.write_atomic = writing
        runs.Run.log = logging  # type: ignore[method-assign]
        return cli.run(words_of(line))

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
    assert "stopped and saved" in SAID.read_text()
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
    for result in (a, b):
        for trial in result["tried"] + result["trials"]:
            del trial["cpu_seconds"], trial["seconds"]
    keys = ("tests", "tried", "trials", "lr", "rates", "unit")
    return [a[k] for k in keys] == [b[k] for k in keys] and same(
        "adapter-s0.safetensors", "adapter-s1.safetensors"
    )


GRID = "head='batchnorm' --epochs 3 --seeds 2 --lr 1e-1,3e-2 --warmup-epochs 1 --save-minutes 0"


def test_a_grid_goes_on_to_the_same_bits(pretrained: Path) -> None:
    """The second rate is best before the stop, and chosen. Tests are scored once."""
    line = finetune_line(pretrained, GRID)
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, term, "metrics.jsonl", 5) == 143  # the second run's second epoch
    assert "cut/lr0.03-s0: stopped and saved" in SAID.read_text()
    assert cut(line, kill, "checkpoint.pt", within=True) == -9
    assert cut(line, vanish, "result.json") == 9
    assert cut(line, kill, "test.json", within=True) == -9
    assert cut(line, kill, "test.json") == -9
    scored = Path("cut/lr0.03-s0/test.json").stat().st_mtime_ns
    assert cut(line, vanish, "adapter-s1.safetensors", within=True) == 9
    done(line)
    assert same_grid() and Path("cut/lr0.03-s0/test.json").stat().st_mtime_ns == scored


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_the_same_command_twice_shares_the_trials(
    pretrained: Path, number: signal.Signals | None
) -> None:
    """Each trial is run once; if one process is stopped or killed, the other takes over."""
    line = finetune_line(pretrained, f"{GRID} --epochs 12").replace("--quiet", "")
    done(f"{line} --out whole")
    two = [
        start(partial(cli.run, words_of(f"{line} --out cut")), Path(f"said-{i}")) for i in (0, 1)
    ]
    if number:
        wait_for(lambda: len(list(Path("cut").glob("*/checkpoint.pt"))) == 2, two[0])
        os.kill(two[0].pid or 0, number)
    ends = {None: 0, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert [finish(process) for process in two] == [ends[number], 0]
    assert same_grid()
    said = "".join(Path(f"said-{i}").read_text() for i in (0, 1))
    assert len(re.findall(r"seed \d 12/12  loss", said)) == 3  # the last epoch of each trial
    assert said.count("goes on where it stopped") == (number is not None)
    for trial in Path("whole").glob("lr*"):
        assert same(f"{trial.name}/metrics.jsonl", f"{trial.name}/adapter.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["align", "grid", "pretrain"])
def test_killed_at_random_moments_a_run_goes_on_to_the_same_bits(
    pretrained: Path, command: str
) -> None:
    """Each kill comes right after something new was written, often in the middle of a file."""
    images(30)
    line, *results = {
        "align": (
            align_line(pretrained, f"{LONGER} --alternations 30"),
            "adapter.safetensors",
            "metrics.jsonl",
        ),
        "grid": (
            finetune_line(pretrained, f"{GRID} --epochs 6"),
            "adapter-s0.safetensors",
            "adapter-s1.safetensors",
        ),
        "pretrain": (
            f"pretrain --pool pool --backbone vit_mini {PRETRAIN_STEPS} --quiet --batch 12"
            " --epochs 20 --save-minutes 0",
            "backbone.pth",
            "metrics.jsonl",
        ),
    }[command]
    done(f"{line} --out whole")
    moments = random.Random(0)
    kills = 0
    for _ in range(15):
        process = start(partial(cli.run, words_of(f"{line} --out cut")), SAID)
        written = set(Path("cut").rglob("*"))
        while process.is_alive() and (
            set(Path("cut").rglob("*")) == written or moments.random() < 0.7
        ):
            time.sleep(moments.uniform(0, 0.01))
        process.kill()
        kills += finish(process) == -9
    done(f"{line} --out cut")
    assert kills > 5 and same(*results)


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(pretrained: Path) -> None:
    """A limit on the size of files stands for the disk's end; with room, the run goes on."""
    line = align_line(pretrained, "--save-minutes 0")

    def limited() -> int:
        """All is written until the second alternation's checkpoint."""
        write, count = files.write_atomic, itertools.count(1)

        def writing(path: Path, content: Any) -> None:
            if path.name == "checkpoint.pt" and next(count) == 2:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2,) * 2)
            write(path, content)

        runs.write_atomic = writing
        return cli.run(words_of(f"{line} --out cut"))

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
    assert "lam 0.001 -> 0.5, p_lr 0.01 -> 0.1" in refusal(f"{line} --lam 0.5 --p-lr 0.1")
    Path("pool/0.png").rename("pool/x.png")
    assert "--pool was changed" in refusal(line)
    Path("pool/x.png").rename("pool/0.png")
    Path("pool").rename("elsewhere")
    Path("pool").symlink_to("elsewhere")
    shutil.copy(weights / "backbone.pth", "moved.pth")
    done(f"{line} --micro-batch 3 --workers 1 --save-minutes 1 --weights moved.pth")
    recorded = json.loads(Path("a/config.json").read_text())
    assert recorded["weights"].endswith("moved.pth") and recorded["micro_batch"] == 3
