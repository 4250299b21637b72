"""Run directories against mistakes, and runs that go on to the same bits after stops and kills."""

import errno
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from child_process import finish, start, wait_for
from filelock import FileLock
from PIL import Image
from toy import (
    PRETRAIN_STEPS,
    ROOT,
    align_line,
    contents,
    done,
    finetune_line,
    refusal,
    words_of,
)

import cli
import finetune
from config import AlignConfig
from support import files, optim, runs
from support.definitions import FORMAT
from support.errors import UsageError
from support.processes import HEARD, Stopped
from support.runs import open_run

SAID = Path("said")

pytestmark = pytest.mark.usefixtures("elsewhere")


def config(**changes: Any) -> AlignConfig:
    return AlignConfig(**{"backbone": "vit_mini", "dataset": "quilts"} | changes)


def begin(
    path: Path, command: str = "align", digests: Any = None, wait: bool = False, **changes: Any
) -> None:
    """Open a run with these settings, and leave it unfinished."""
    with open_run(path, command, config(**changes), digests or {}, wait):
        pass


def save_now(run: runs.Run) -> None:
    """Write the checkpoint, as a run does when --save-minutes have passed."""
    run.keep()
    run.save()


def test_a_directory_of_something_else_is_never_taken_over(tmp_path: Path) -> None:
    """Also where a file is called as one of a run is."""
    (tmp_path / "file").write_text("precious")
    begin(tmp_path / "run")
    named = {
        "file": "made or locked.*exists",
        "run": "holds a run of align; give finetune another --out",
    }
    for name in ("thesis.tex", "result.json", "lr1e-3-s0/checkpoint.pt"):
        place = f"with {name.replace('/', ' ')}"
        named[place] = f"holds {name.split('/')[0]}"
        (tmp_path / place / name).parent.mkdir(parents=True)
        (tmp_path / place / name).write_text("{}")
    before = contents(tmp_path)
    for name, told in named.items():
        with pytest.raises(UsageError, match=told):
            begin(tmp_path / name, "finetune")
    assert contents(tmp_path) == before


def test_a_run_among_the_images_it_reads_is_refused(tmp_path: Path) -> None:
    """As it goes on, its own folder would be one class more."""
    images = tmp_path / "images"
    (images / "cat").mkdir(parents=True)
    (tmp_path / "link").symlink_to(images)
    for out in (images, images / "run", tmp_path / "link" / "run"):
        with pytest.raises(UsageError, match="among the images of --dataset"):
            begin(out, dataset=f"folder:{images}")
    assert contents(tmp_path) == {}
    begin(tmp_path / "images-run", dataset=f"folder:{images}")


def test_other_settings_are_refused_with_both_values_and_digests_by_what_they_are_of(
    tmp_path: Path,
) -> None:
    digests = {"weights_sha256": "1" * 64, "start_sha256": None, "pretext_sha256": "1" * 64}
    begin(tmp_path, digests=digests)
    definition = {"command": "align", **config().model_dump(mode="json"), **digests}
    definition |= {"format": FORMAT, "versions": runs.VERSIONS}
    assert json.loads((tmp_path / "config.json").read_text()) == definition
    with pytest.raises(UsageError, match=r"lam 0\.001 -> 0\.5; seed 0 -> 1"):
        begin(tmp_path, digests=digests, seed=1, lam=0.5)
    names = {"weights": "--weights", "start": "--from", "pretext": "--pretext", "pool": "--pool"}
    for name, flag in names.items():
        with pytest.raises(UsageError, match=f"content of {flag} differs;"):
            begin(tmp_path, digests=digests | {f"{name}_sha256": "2" * 64})


def test_a_pretext_task_of_ones_own_is_known_by_its_class_wherever_its_file_lies(
    tmp_path: Path,
) -> None:
    """Also in a checkpoint."""
    with open_run(tmp_path, "align", config(pretext="tasks/mine.py:Mine"), {}) as run:
        save_now(run)
    with open_run(tmp_path, "align", config(pretext="/moved/renamed.py:Mine"), {}) as run:
        assert run.saved
    with pytest.raises(UsageError, match="is another run: pretext Mine -> Other; "):
        begin(tmp_path, pretext="tasks/mine.py:Other")


def test_a_finished_run_is_only_read_wherever_it_lies(tmp_path: Path) -> None:
    """Also where another process has its lock, and on a disk that cannot be written."""
    out = tmp_path / "run"
    with open_run(out, "align", config(), {}) as run:
        run.log({"step": 1})
        save_now(run)
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
        run.cpu_began -= 1000
        save_now(run)
        run.log({"step": 2})
        run.save_if_due()  # --save-minutes have not passed: nothing is saved
    with open_run(tmp_path, "align", config(), {}) as run:
        x = torch.zeros(2)
        run.restore({"x": x}, {})
        assert torch.equal(x, torch.ones(2))
        run.log({"step": 2, "anew": True})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 2, "anew": True}]
        run.finish({})
        assert run.result is not None and 1000 < run.result["cpu_seconds"] < 1100


def test_an_interrupt_saves_the_state_of_the_last_record_although_tensors_have_moved_since(
    tmp_path: Path,
) -> None:
    with suppress(KeyboardInterrupt), open_run(tmp_path, "align", config(), {}) as run:
        x = torch.ones(2)
        run.restore({"x": x}, {})
        run.log({"step": 1})
        run.save_if_due()
        x += 100
        run.log({"step": 2})
        raise KeyboardInterrupt  # as in a notebook
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["tensors"]["x"].tolist() == [1, 1]
    assert saved["records"] == [{"step": 1}]


def test_an_error_after_the_end_of_a_run_leaves_no_checkpoint(tmp_path: Path) -> None:
    with suppress(OSError), open_run(tmp_path, "align", config(), {}) as run:
        run.save_if_due()
        run.finish({})
        raise OSError
    assert run.result is not None
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_run_of_another_version_or_format_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another version, only where a checkpoint is gone on with."""
    with open_run(tmp_path, "align", config(), {}) as run:
        save_now(run)
    file = tmp_path / "config.json"
    recorded = json.loads(file.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(runs, "VERSIONS", "bisslight 9.9.9, torch 2.14")
        with pytest.raises(UsageError, match=r"checkpoint\.pt: .*versions .*now bisslight 9\.9\.9"):
            begin(tmp_path)
        (tmp_path / "checkpoint.pt").unlink()
        begin(tmp_path)
    file.write_text(json.dumps(recorded | {"format": 6, "versions": "bisslight 0.6.0"}))
    told = r"made by bisslight 0\.6\.0; finish it with that version, or start anew in another --out"
    with pytest.raises(UsageError, match=told):
        begin(tmp_path)


def test_a_checkpoint_of_another_run_or_of_edited_settings_is_refused(tmp_path: Path) -> None:
    """A longer run has another schedule of rates from its first step. Where to compute may change.

    The copied one is of another seed.
    """
    with open_run(tmp_path / "a", "align", config(), {}) as run:
        save_now(run)
    begin(tmp_path / "a", workers=0)
    begin(tmp_path / "b", seed=1)
    shutil.copy(tmp_path / "a/checkpoint.pt", tmp_path / "b")
    file = tmp_path / "a/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alternations": 800}))
    for name, changes in (("a", {"alternations": 800}), ("b", {"seed": 1})):
        with pytest.raises(UsageError, match=r"checkpoint\.pt: .*of another run.*remove"):
            begin(tmp_path / name, **changes)


@pytest.mark.parametrize("name", ["checkpoint.pt", "result.json"])
def test_a_damaged_file_is_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    begin(tmp_path)
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({}, tmp_path / "empty.pt")
    saved = [(tmp_path / file).read_bytes() for file in ("list.pt", "empty.pt")]
    for content in (b"", b"{", b"[1]", b"not a checkpoint", *saved):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"{name}: .*remove"):
            begin(tmp_path)


def test_a_run_killed_as_it_began_is_begun_again(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / ".config.json.tmp")
    begin(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_file_is_not_written_through_a_link_that_was_put_there(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / ".result.json.tmp").symlink_to(theirs)
    files.write_atomic(tmp_path / "result.json", "ours")
    assert (theirs.read_text(), (tmp_path / "result.json").read_text()) == ("theirs", "ours")


def test_a_busy_directory_is_refused_or_waited_for_until_the_other_leaves_or_a_signal_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bisslight")
    other = FileLock(tmp_path / ".lock")
    other.acquire()
    with pytest.raises(UsageError, match="another process is at work"):
        begin(tmp_path)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: other.release())
    begin(tmp_path, wait=True)
    assert "waiting" in caplog.text
    HEARD.append(signal.SIGTERM)
    with other, pytest.raises(Stopped) as stopped:
        begin(tmp_path, wait=True)
    HEARD.clear()  # what comes next may be a run of a fixture
    assert stopped.value.code == 143


# From here on command lines, in this process or in a forked one that is stopped or killed.


def term() -> None:
    """Ask this process to stop."""
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    """End this process as the machine's end would."""
    os.kill(os.getpid(), signal.SIGKILL)


vanish = partial(os._exit, 9)


def ending(
    line: str, end: Callable[[], object], file: str, nth: int = 1, within: bool = False
) -> Callable[[], int]:
    """A command line in which `end` comes as a file is written.

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

    return program


def cut(*args: Any, **kwargs: Any) -> int:
    """Exit code of what `ending` gives, in a forked process; a failing test shows what it said."""
    code = finish(start(ending(*args, **kwargs), SAID))
    print(SAID.read_text())
    return code


def same(*files: str) -> bool:
    """Whether the runs `whole` and `cut` have the same files, bit for bit."""
    return all(Path("whole", x).read_bytes() == Path("cut", x).read_bytes() for x in files)


def images(count: int) -> None:
    """A folder `pool` of different images."""
    Path("pool").mkdir()
    for i in range(count):
        pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.byte().numpy()).save(f"pool/{i}.png")


PRETRAIN = f"pretrain --pool pool --backbone vit_mini {PRETRAIN_STEPS} --batch 12 --quiet"
PRETRAIN += " --save-minutes 0"
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


@pytest.mark.parametrize("command", ["align", "finetune", "pretrain"])
def test_after_an_error_between_two_steps_a_run_goes_on_to_the_same_bits(
    pretrained: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the images' disk goes away: in the third unit, of which one step is done."""
    images(30)
    line, place, weights = {
        "align": (align_line(pretrained, f"{LONGER} --eval-every 5"), "", "adapter.safetensors"),
        "finetune": (
            finetune_line(pretrained, "--epochs 4 --batch 8"), "lr0.01-s0/", "adapter.safetensors"
        ),
        "pretrain": (f"{PRETRAIN} --epochs 4", "", "backbone.pth"),
    }[command]  # fmt: skip
    line += " --save-minutes 60"
    done(f"{line} --out whole")
    log = Path(f"cut/{place}metrics.jsonl")
    records = 2 + (command == "align")  # the first one is the probe's
    steps = itertools.count(1)
    update = optim.Optimiser.update

    def fail(*args: Any) -> Any:
        if log.exists() and log.read_text().count("\n") == records and next(steps) == 2:
            raise OSError("gone")
        return update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(optim.Optimiser, "update", fail)
        patch.setattr(runs, "PAUSE", 0)  # these units are short
        refusal(f"{line} --out cut", code=1)
    saved = torch.load(f"cut/{place}checkpoint.pt", weights_only=True)
    assert saved["records"][-1]["step"] == 2
    done(f"{line} --out cut")
    assert same(f"{place}{weights}", f"{place}metrics.jsonl")


COUNTS = """

class Counts(Rotation):
    def __init__(self, *args):
        super().__init__(*args)
        self.state = {"n": torch.zeros(()), "m": torch.zeros(3)}

    def loss(self, theta, phi, batch):
        return (1 + self.state["n"] + self.state["m"].sum()) * super().loss(theta, phi, batch)

    def after_step(self, theta_P):
        with torch.no_grad():
            self.state["m"] += 1
            self.state = {**self.state, "n": self.state["n"] + theta_P.abs().mean()}

class Number(Counts):
    def __init__(self, *args):
        super().__init__(*args)
        self.state["n"] = 0
"""


def own_task(pretrained: Path, name: str) -> str:
    """An `align` line with a class of COUNTS, in a file here."""
    Path("counts.py").write_text((ROOT / "examples/rotation.py").read_text() + COUNTS)
    return align_line(pretrained, "--save-minutes 0") + f" --pretext counts.py:{name}"


def test_a_state_that_a_task_sets_anew_goes_on_to_the_same_bits(pretrained: Path) -> None:
    """A tensor in place of another, in a dict in place of another, beside one that is added to."""
    line = own_task(pretrained, "Counts")
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, term, "metrics.jsonl", 3) == 143  # after the second alternation
    done(line)
    assert same("adapter.safetensors", "metrics.jsonl")


def test_a_state_that_is_no_tensor_is_refused_before_the_first_step(pretrained: Path) -> None:
    said = refusal(own_task(pretrained, "Number") + " --out out")
    assert "--pretext counts.py:Number: n in `state` is no tensor; give torch.tensor" in said


@pytest.mark.parametrize("pretext", ["mae", pytest.param("ijepa", marks=pytest.mark.slow)])
def test_pretrain_goes_on_to_the_same_bits(pretext: str) -> None:
    images(30)
    line = f"{PRETRAIN} --pretext {pretext} --epochs 3"
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
    keys = ("tests", "tried", "trials", "lr", "rates")
    adapters = [f"{trial['lr']}-s{trial['seed']}/adapter.safetensors" for trial in a["trials"]]
    return [a[k] for k in keys] == [b[k] for k in keys] and same(*(f"lr{x}" for x in adapters))


GRID = "head='batchnorm' --epochs 3 --seeds 2 --lr 3e-2,1 --warmup-epochs 1 --save-minutes 0"


def test_a_grid_goes_on_to_the_same_bits(pretrained: Path) -> None:
    """The stop is in the second rate's run, and the first one is chosen. Tests are scored once."""
    line = finetune_line(pretrained, GRID)
    done(f"{line} --out whole")
    line += " --out cut"
    assert cut(line, term, "metrics.jsonl", 5) == 143  # the second run's second epoch
    assert "cut/lr1.0-s0: stopped and saved" in SAID.read_text()
    assert cut(line, kill, "checkpoint.pt", within=True) == -9
    assert cut(line, vanish, "result.json") == 9
    assert cut(line, kill, "test.json", within=True) == -9
    assert cut(line, kill, "test.json") == -9
    assert cut(line, term, "test.json") == 143  # a signal is heard after each test
    scored = Path("cut/lr0.03-s0/test.json").stat().st_mtime_ns
    assert cut(line, vanish, "result.json", within=True) == 9
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
    line += " --out cut"

    def end() -> None:
        """Stop while the other process is at a trial of its own."""
        wait_for(lambda: len(list(Path("cut").glob("*/metrics.jsonl"))) == 2)
        if number:
            os.kill(os.getpid(), number)

    two = [start(ending(line, end, "metrics.jsonl", 5), Path("said-0"))]
    wait_for(lambda: [*Path("cut").glob("*/metrics.jsonl")], two[0])
    two.append(start(partial(cli.run, words_of(line)), Path("said-1")))
    ends = {None: 0, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert [finish(process) for process in two] == [ends[number], 0]
    assert same_grid()
    said = "".join(Path(f"said-{i}").read_text() for i in (0, 1))
    assert len(re.findall(r"seed \d 12/12  val", said)) == 3  # the last epoch of each trial
    assert said.count("goes on after epoch") == (number is not None)
    for trial in Path("whole").glob("lr*"):
        assert same(f"{trial.name}/metrics.jsonl", f"{trial.name}/adapter.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["align", "grid", "pretrain"])
def test_killed_at_random_moments_a_run_goes_on_to_the_same_bits(
    pretrained: Path, command: str
) -> None:
    """Each kill comes right after something new was written, often in the middle of a file."""
    images(30)
    line = {
        "align": align_line(pretrained, f"{LONGER} --alternations 30"),
        "grid": finetune_line(pretrained, f"{GRID} --epochs 6"),
        "pretrain": f"{PRETRAIN} --epochs 20",
    }[command]
    done(f"{line} --out whole")
    moments = random.Random(0)
    kills = 0
    for _ in range(15):
        process = start(partial(cli.run, words_of(f"{line} --out cut")), SAID)
        written = {*Path("cut").rglob("*")}
        while process.is_alive() and {*Path("cut").rglob("*")} == written:
            time.sleep(0.001)
        time.sleep(moments.choice((0, 0, 0.02)))
        process.kill()
        kills += finish(process) == -9
    done(f"{line} --out cut")
    endings = {".safetensors", ".pth", ".jsonl"}
    results = [
        str(file.relative_to("whole"))
        for file in Path("whole").rglob("*")
        if file.suffix in endings
    ]
    # A grid has an adapter and records for each rate and seed.
    whole_runs = len([*Path("whole").rglob("result.json")]) - (command == "grid")
    assert kills > 5 and len(results) == 2 * whole_runs and same(*results)


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(pretrained: Path) -> None:
    """A limit on the size of files stands for the disk's end."""
    line = align_line(pretrained, "--save-minutes 0")

    def fill() -> None:
        """No file is as large as the checkpoint that was just written."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        half = Path("cut/checkpoint.pt").stat().st_size // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))

    assert cut(f"{line} --out cut", fill, "checkpoint.pt", 2) == 1
    assert "checkpoint.pt: cannot be written" in SAID.read_text()
    assert not list(Path("cut").glob(".*.tmp"))
    assert torch.load("cut/checkpoint.pt", weights_only=True)


def test_a_run_goes_on_with_the_same_settings_weights_and_pool_alone(weights: Path) -> None:
    """A pool of as many files, one of another name, has another order. Links and copies are taken,
    and so is what says how the machine works. The stop was a SIGHUP.
    """
    images(9)
    line = align_line(weights.parent, "--pool pool --out a --save-minutes 0")
    assert cut(line, lambda: os.kill(os.getpid(), signal.SIGHUP), "checkpoint.pt") == 129
    assert "lam 0.001 -> 0.5" in refusal(f"{line} --lam 0.5")
    Path("pool/0.png").rename("pool/x.png")
    assert "content of --pool differs" in refusal(line)
    Path("pool/x.png").rename("pool/0.png")
    Path("pool").rename("elsewhere")
    Path("pool").symlink_to("elsewhere")
    shutil.copy(weights / "backbone.pth", "moved.pth")
    done(f"{line} --micro-batch 3 --workers 1 --save-minutes 1 --weights moved.pth")
    recorded = json.loads(Path("a/config.json").read_text())
    assert recorded["weights"].endswith("moved.pth") and recorded["micro_batch"] == 3


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is a file would stay after a kill, and be waited for for ever."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UsageError, match=r"has no flock \("), files.locked(tmp_path, wait=True):
        pass
