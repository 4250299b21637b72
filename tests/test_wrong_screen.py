"""What a person sees: stops, progress, messages, data checks.

Written for the rebuilt program, in which the same command goes on with a run that was stopped.
"""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from test_tasks import lines, make_pets, make_voc, picture
from test_wrong_files import PEFT, PRETRAIN, ROOT, dataset, refusal

import cli
from tasks import VOC

rebuilt = pytest.mark.xfail(strict=True, reason="the rebuilt program mends it")
SIZES = "--lower-steps 4 --upper-steps 2 --p-batch 8 --d-batch 8 --warmup 1 --device cpu"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def align(weights: Path, out: str, alternations: int, more: str = "--probe-epochs 0 --eval-every 10") -> list[str]:
    line = f"align --backbone vit_mini --weights {weights} --dataset quilts {SIZES} {more} --out {out}"
    return [*line.split(), "--alternations", str(alternations)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "", "TERM": "xterm"}


def start(arguments: list[str], **streams: Any) -> "subprocess.Popen[bytes]":
    env = {name: value for name, value in environment().items() if value}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    started: subprocess.Popen[Any] = subprocess.Popen([sys.executable, "-m", "cli", *arguments], env=env, **streams)
    return started


def on_terminal(arguments: list[str], columns: int) -> tuple["subprocess.Popen[bytes]", int]:
    """The command on a terminal of its own that is so wide; closing the number returned closes the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))

    def controlling() -> None:  # a closed terminal sends SIGHUP to those whose controlling one it is
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    p = start(arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=controlling)
    os.close(theirs)
    return p, ours


def records(run: str) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    file = Path(run, "metrics.jsonl")
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(p: "subprocess.Popen[bytes]", run: str, alternation: int, *terminal: int) -> None:
    """Until the run has recorded this alternation; what it writes to a terminal is read meanwhile."""
    until = time.monotonic() + 120
    while not any(record.get("step") == alternation for record in records(run)):
        assert p.poll() is None and time.monotonic() < until
        for ours in select.select(terminal, [], [], 0.02)[0]:
            os.read(ours, 65536)
        time.sleep(0.01)


def shown(ours: int) -> str:
    """All that a program writes to its terminal."""
    out = b""
    while True:
        try:
            got = os.read(ours, 65536)
        except OSError:  # its end has been closed
            break
        if not got:
            break
        out += got
    os.close(ours)
    return out.decode()


def goes_on_to_the_same_bits(weights: Path, out: str, alternations: int, more: str) -> None:
    """The same command finishes the run, without doing again what had been done."""
    before = records(out)
    assert cli.run([*align(weights, out, alternations, more), "--quiet"]) == 0
    assert records(out)[: len(before)] == before  # with their times
    assert cli.run([*align(weights, "whole", alternations, more), "--quiet"]) == 0
    assert Path(out, "adapter.safetensors").read_bytes() == Path("whole/adapter.safetensors").read_bytes()


# --- stops and readers that are gone ---------------------------------------------------------------------------------

RARE = "--probe-epochs 0 --eval-every 1000"  # no checkpoint but that of a stop


@rebuilt
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_hangup_ends_a_run_like_a_termination_and_the_same_command_goes_on(weights: Path, number: int) -> None:
    with start(align(weights, "a", 100, RARE)) as p:
        wait_for(p, "a", 3)
        p.send_signal(number)
        err = p.communicate(timeout=60)[1].decode()
    assert p.returncode == 128 + number
    assert "Traceback" not in err
    assert "same command" in err.splitlines()[-1]  # how to go on
    assert not Path("a/result.json").exists()
    goes_on_to_the_same_bits(weights, "a", 100, RARE)


@rebuilt
def test_a_terminal_that_is_closed_ends_a_run_like_a_termination(weights: Path) -> None:
    """Its progress bar has nowhere to go, and the signal comes at the same time."""
    p, ours = on_terminal(align(weights, "a", 100, RARE), 80)
    with p:
        wait_for(p, "a", 3, ours)
        os.close(ours)
        assert p.wait(60) == 128 + signal.SIGHUP
    goes_on_to_the_same_bits(weights, "a", 100, RARE)


@rebuilt
@pytest.mark.parametrize("command", ["align", "pretrain", "finetune"])
def test_progress_that_nobody_reads_is_dropped(weights: Path, command: str) -> None:
    """`bisslight ... 2>&1 | head -1`: the run goes on to its end."""
    line = {
        "align": align(weights, "r", 20),
        "pretrain": [*PRETRAIN.replace("--quiet", "").replace("--epochs 1", "--epochs 5").split(), "--pool", "quilts"],
        "finetune": f"finetune --backbone vit_mini --weights {weights} --dataset quilts {PEFT} --seeds 2".split(),
    }[command]
    line = [word for word in line if word != "--quiet"]
    with start([*line, *(() if command == "align" else ("--out", "r"))], stderr=subprocess.STDOUT) as p:
        assert p.stdout is not None
        assert p.stdout.readline()
        p.stdout.close()
        assert p.wait(120) in (0, 1)  # 1: the result could not be told
    assert Path("r/result.json").exists()


# --- progress --------------------------------------------------------------------------------------------------------


def frames(text: str) -> list[str]:
    """The lines that a terminal showed, one after the other, without colours and movements of the cursor."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in re.split(r"[\r\n]", text)]


@rebuilt
@pytest.mark.parametrize("columns", [80, 100])
def test_the_progress_of_align_fits_the_terminal(weights: Path, columns: int) -> None:
    """One line: bar, count, ETA, one loss, and the last validation until the next one."""
    p, ours = on_terminal(align(weights, "a", 60, "--probe-epochs 0 --eval-every 20"), columns)
    text = shown(ours)
    assert p.wait(60) == 0, text
    seen: dict[int, str] = {}
    for line in frames(text):
        if found := re.search(r"align\b.*?(\d+)/60\b", line):
            seen.setdefault(int(found[1]), line)
    assert len(seen) >= 5
    validated = [record for record in records("a") if "val_D" in record and record["step"]]
    for done, line in seen.items():
        assert len(line) <= columns and "…" not in line, line
        if done:
            assert re.search(r"(ETA|left)\W*[\d-]+:[\d-]{2}|[\d-]+:[\d-]{2}\S*\W*left", line), line
            assert re.search(r"(L\^P|L\^D|loss)\S* +\d+\.\d\d", line), line
        past = [record for record in validated if record["step"] < done]
        if past:
            values = [f"{past[-1][key]['accuracy']:.1f}" for key in ("val_P", "val_D")]
            assert "val" in line and any(value in line for value in values), line
    assert any(done > 20 and done % 20 for done in seen)  # between two validations


@rebuilt
def test_progress_shows_the_mean_loss_of_a_level(weights: Path, capsys: Any) -> None:
    """The last batch's loss is noise."""
    assert cli.run(align(weights, "a", 4)) == 0
    told = capsys.readouterr().err
    for record in records("a"):
        if record["step"]:
            (line,) = (line for line in told.splitlines() if line.startswith("align") and f"{record['step']}/4" in line)
            losses = record["loss_P"]
            mean, last = sum(losses) / len(losses), losses[-1]
            assert f"{mean:.4f}"[:5] != f"{last:.4f}"[:5]  # or the test could not tell
            assert f"{mean:.4f}"[:5] in line, (line, mean)


@rebuilt
def test_pretraining_reports_within_an_epoch(capsys: Any) -> None:
    """4000 images make 571 steps of 7."""
    line = "pretrain --backbone vit_mini --pool quilts --epochs 1 --warmup-epochs 0 --batch 7 --out p --device cpu"
    assert cli.run(line.split()) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pretrain")]
    assert len(told) >= 2
    assert all(re.search(r"loss \d+\.\d", line) for line in told)


@rebuilt
def test_the_accuracy_of_the_linear_probe_is_on_the_screen(weights: Path, capsys: Any) -> None:
    assert cli.run(align(weights, "a", 1, "--probe-epochs 2 --eval-every 10")) == 0
    out, err = capsys.readouterr()
    first = records("a")[0]["probe_val"]["accuracy"]
    assert any("probe" in line and f"{first:.1f}" in line for line in (out + err).splitlines())


@rebuilt
def test_a_best_rate_at_the_edge_of_its_grid_gets_a_remark(weights: Path, capsys: Any) -> None:
    """The rates are so small that the largest is the best; in the middle of another grid it gets none."""
    line = f"finetune --backbone vit_mini --weights {weights} --dataset quilts --epochs 8 --batch 40 --warmup-epochs 1"
    said = {}
    for name, grid in (("edge", "1e-6,1e-5,1e-2"), ("middle", "1e-6,1e-2,1e3")):
        assert cli.run([*line.split(), "--seeds", "1", "--grid", grid, "--out", name]) == 0
        out, err = capsys.readouterr()
        assert json.loads(Path(name, "result.json").read_text())["lr"] == 1e-2
        said[name] = [
            line
            for line in (out + err).splitlines()
            if re.search(r"\b(edge|end|border)\b.*grid|grid.*\b(edge|end|border)\b", line)
        ]
    assert said["edge"] and "0.01" in said["edge"][0] and "--grid" in said["edge"][0]  # the thing, and the remedy
    assert not said["middle"]


@rebuilt
def test_a_report_holds_no_absolute_path_of_its_runs(weights: Path, tmp_path: Path) -> None:
    """A page is for others; where its maker keeps files is not."""
    line = f"finetune --backbone vit_mini --weights {weights} --dataset {dataset(tmp_path / 'data')} {PEFT} --seeds 2"
    assert cli.run([*line.split(), "--out", "f"]) == 0
    assert cli.run([*align(weights, "a", 1), "--quiet"]) == 0
    assert cli.run(["report", "f", "a", "--rollout", "0", "--quiet"]) == 0
    page = Path("report.html").read_text()
    assert str(tmp_path) not in page
    assert str(weights.parent) not in page


# --- messages --------------------------------------------------------------------------------------------------------


@rebuilt
def test_a_missing_adapter_is_named_with_a_remedy(weights: Path, capsys: Any) -> None:
    """Today: `--seed None: ... but seeds none`."""
    line = f"finetune --backbone vit_mini --weights {weights} --dataset quilts {PEFT} --seeds 1 --out f"
    assert cli.run(line.split()) == 0
    capsys.readouterr()
    for file in Path("f").rglob("adapter*.safetensors"):
        file.unlink()
    for command in (["export", "f"], ["evaluate", "f", "--rollout", "2"]):
        err = refusal(command, capsys)[1]
        assert "None" not in err and "seeds none" not in err
        assert "f" in err and "adapter" in err
        assert re.search(r"--force|run .*again|copy", err)


@rebuilt
def test_a_setting_in_the_wrong_table_is_not_advised_as_it_stands(weights: Path, capsys: Any) -> None:
    """Today: unknown setting 'p_batch', did you mean p_batch?"""
    Path("s.toml").write_text("[upper]\np_batch = 8\n")
    err = refusal([*align(weights, "a", 1), "--config", "s.toml"], capsys)[1]
    assert not re.search(r"'(\w+)', did you mean \1\b", err)
    assert "s.toml" in err and "upper" in err and "p_batch" in err


@rebuilt
def test_an_unfinished_align_run_is_refused_with_a_remedy_that_works(weights: Path, capsys: Any) -> None:
    """`align --resume --out DIR` lacked every setting."""
    with start([*align(weights, "a", 30, RARE), "--quiet"]) as p:
        wait_for(p, "a", 2)
        p.send_signal(signal.SIGTERM)
        p.communicate(timeout=60)
    line = f"finetune --from a {PEFT} --seeds 1 --out f".split()
    err = refusal(line, capsys)[1]
    assert "--from" in err and "not finished" in err
    assert "--resume" not in err and "same command" in err
    assert cli.run([*align(weights, "a", 30, RARE), "--quiet"]) == 0
    assert cli.run(line) == 0


@rebuilt
@pytest.mark.slow
def test_a_run_that_another_process_holds_is_not_offered_for_overwriting(weights: Path) -> None:
    """A minute long: so long the command waits for the other one, which is stopped here and lives on."""
    line = align(weights, "a", 30, RARE)
    with start(line) as p:
        try:
            wait_for(p, "a", 2)
            p.send_signal(signal.SIGSTOP)
            other = start(line)
            err = other.communicate(timeout=120)[1].decode()
        finally:
            p.kill()
    assert other.returncode in (1, 2)
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and "a" in last and "another process" in last
    assert "--force" not in last and "--resume" not in last
    assert re.search(r"wait|another --out", last)


@rebuilt
def test_a_device_of_another_name_is_refused_with_the_names_there_are(weights: Path, capsys: Any) -> None:
    """`gpu` is not a device that is missing here, it is none of torch's."""
    for name in ("gpu", "cdua"):
        err = refusal([*align(weights, "a", 1), "--device", name], capsys)[1]
        assert f"--device {name}" in err
        assert "auto" in err and "cpu" in err and "cuda" in err
        assert "not available here" not in err


def budget(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert cli.run(["bench", *arguments, "--device", "cpu", "--dry-run", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@rebuilt
def test_a_bench_without_settings_is_small_on_a_cpu(capsys: Any) -> None:
    assert budget(capsys)["settings"]["backbone"]["value"] == "vit_mini"


@rebuilt
def test_a_bench_says_how_long_it_will_take(capsys: Any) -> None:
    """Roughly, before it begins; ViT-B takes longer than vit_mini."""
    said = []
    for name in ("vit_mini", "vit_b16"):
        assert cli.run(["bench", "--backbone", name, "--device", "cpu", "--dry-run"]) == 0
        out, err = capsys.readouterr()
        found = re.findall(r"(\d[\d.]*) ?(s|seconds?|min|minutes?|h|hours?)\b", out + err)
        assert found, out
        said.append(float(found[-1][0]) * {"s": 1, "m": 60, "h": 3600}[found[-1][1][0]])
    assert said[0] < said[1]


# --- data check ------------------------------------------------------------------------------------------------------


def checked(capsys: Any, *arguments: str) -> tuple[int, str]:
    """Exit code and all that `data check` says."""
    code = cli.run(["data", "check", *arguments, "--quiet"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out + err


@rebuilt
def test_a_folder_that_finetune_refuses_fails_its_check(weights: Path, capsys: Any) -> None:
    """An empty class, a class of the test part that has no training images, a class too small to be split."""
    for name in ("empty", "extra", "small"):
        data = dataset(Path(name))
        if name == "empty":
            (Path(name) / "train/none").mkdir()
        elif name == "extra":
            (Path(name) / "test/new").mkdir()
            shutil.copy(Path(name) / "test/dark/0.jpg", Path(name) / "test/new/0.jpg")
        else:
            shutil.rmtree(Path(name) / "val")
            for file in sorted((Path(name) / "train/dark").iterdir())[1:]:
                file.unlink()
        what = {"empty": "none", "extra": "new", "small": "dark"}[name]
        line = f"finetune --backbone vit_mini --weights {weights} --dataset {data} {PEFT} --seeds 1"
        assert what in refusal(line.split(), capsys)[1]
        code, said = checked(capsys, data)
        assert code in (1, 2), name
        assert what in said, (name, said)


@rebuilt
def test_the_check_of_a_folder_shows_its_classes_and_splits(capsys: Any) -> None:
    """As finetune reads it: of class folders alone, validation and test are split off."""
    data = dataset(Path("data"))
    whole = dataset(Path("other")).removeprefix("folder:")
    for part in ("val", "test"):
        shutil.rmtree(Path(whole) / part)
    for name, sizes in ((data, (16, 6, 6)), (f"folder:{whole}/train", (12, 2, 2))):
        code, said = checked(capsys, name)
        assert code == 0
        assert re.search(r"\b2\b\W*classes|classes\W*\b2\b", said), said
        for part, size in zip(("train", "val", "test"), sizes, strict=True):
            assert re.search(rf"\b{size}\W*{part}|{part}\w*\W*{size}\b", said), (part, said)


@rebuilt
def test_the_check_of_a_partial_copy_counts_images_in_no_list_and_listed_ones_that_are_absent(
    tmp_path: Path, capsys: Any
) -> None:
    make_pets(tmp_path)
    base = tmp_path / "oxford-iiit-pet/images"
    for name in ("Stray_1", "Stray_2", "Stray_3"):
        picture(base / f"{name}.jpg")
    (base / "Pug_2.jpg").unlink()
    (base / "Pug_4.jpg").unlink()
    code, said = checked(capsys, "pets", "--partial", "--data-root", str(tmp_path))
    assert code == 0  # a subset is as it should be
    assert re.search(r"\b3\b.*\b(no|not in any|unlisted)\b|\b(no|not in any|unlisted)\b.*\b3\b", said), said
    assert re.search(r"\b2\b.*\b(absent|missing|not there)\b|\b(absent|missing|not there)\b.*\b2\b", said), said


def annotate(root: Path, name: str, kinds: list[tuple[str, bool]]) -> None:
    """A VOC annotation: (class, difficult) of each object."""
    objects = "".join(f"<object><name>{kind}</name><difficult>{hard:d}</difficult></object>" for kind, hard in kinds)
    lines(root / f"VOCdevkit/VOC2007/Annotations/{name}.xml", f"<annotation>{objects}</annotation>")


def exchange(a: Path, b: Path) -> None:
    before = a.read_text(), b.read_text()
    b.write_text(before[0])
    a.write_text(before[1])


@rebuilt
def test_voc_lists_that_contradict_the_annotations_fail_their_check(tmp_path: Path, capsys: Any) -> None:
    """The lists of cats and dogs swapped."""
    make_voc(tmp_path)
    sets = tmp_path / "VOCdevkit/VOC2007/ImageSets/Main"
    for part in (
        "train",
        "val",
        "test",
    ):  # what make_voc gives to aeroplanes and bicycles becomes that of cats and dogs
        for kind, other in (("aeroplane", "cat"), ("bicycle", "dog")):
            exchange(sets / f"{kind}_{part}.txt", sets / f"{other}_{part}.txt")
    for part in ("train", "val", "test"):
        labels = {
            kind: dict(row.split() for row in (sets / f"{kind}_{part}.txt").read_text().splitlines()) for kind in VOC
        }
        for name in labels["cat"]:
            annotate(tmp_path, name, [(k, labels[k][name] == "0") for k in VOC if labels[k][name] != "-1"])
    root = ("--data-root", str(tmp_path))
    assert checked(capsys, "voc07", "--partial", *root)[0] == 0
    for part in ("train", "val", "test"):
        exchange(sets / f"cat_{part}.txt", sets / f"dog_{part}.txt")
    code, said = checked(capsys, "voc07", "--partial", *root)
    assert code == 1
    assert "cat" in said and "dog" in said
    assert re.search(r"[Aa]nnotation", said)


@rebuilt
def test_the_missing_files_of_a_copy_are_told_in_groups(tmp_path: Path, capsys: Any) -> None:
    """16 of 1000 listed images are there; a copy of VOC07 without its images would fill 9,963 lines."""
    make_pets(tmp_path)
    names = [f"great_cat_{i} 2 1 1" for i in range(500)] + [f"Pug_{i} 30 1 1" for i in range(500)]
    lines(tmp_path / "oxford-iiit-pet/annotations/trainval.txt", *names[::2])
    lines(tmp_path / "oxford-iiit-pet/annotations/test.txt", *names[1::2])
    code, said = checked(capsys, "pets", "--data-root", str(tmp_path))
    assert code == 1
    assert len(said.splitlines()) <= 30
    assert re.search(r"\b984\b.*missing|missing.*\b984\b", said)
    assert "great_cat_" in said or "Pug_" in said  # an example
