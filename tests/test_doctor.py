"""What `doctor` says of a machine: each thing that is not well names its remedy."""

import builtins
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tasks import MAKE

import cli
import doctor
import loading
from loading import OFFICIAL
from tasks import BENCHMARKS


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without weights or datasets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("BISSLIGHT_DATA", raising=False)
    return tmp_path / "torch/hub/checkpoints"


def told(capsys: Any, *more: str) -> tuple[int, dict[str, tuple[str, str]]]:
    code = cli.run(["doctor", "--json", *more])
    return code, {line["what"]: (line["state"], line["detail"]) for line in json.loads(capsys.readouterr().out)}


def test_a_fresh_machine_is_told_where_everything_comes_from(capsys: Any, home: Path) -> None:
    code, found = told(capsys)
    assert code == 0
    assert {"torch", "bfloat16", "disk", "cache", "cache disk", "pictures", "runs/", "imagenet", *BENCHMARKS} <= {
        *found
    }
    assert found["torch"][0] == found["runs/"][0] == found["cache"][0] == "ok"
    for (backbone, pretext), (url, _) in OFFICIAL.items():
        state, detail = found[f"{backbone} {pretext}"]
        assert state == "missing"
        assert url in detail and str(home) in detail and f"--backbone {backbone}" in detail
    for name in BENCHMARKS:
        assert found[name] == ("missing", f"bisslight data download {name}")
    assert "image-net.org" in found["imagenet"][1]
    assert not (home.parent / "checkpoints").exists()  # looking makes nothing
    assert cli.run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found)


def test_weights_are_weighed_and_their_digest_is_checked_on_request(
    capsys: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = OFFICIAL["vit_b16", "mae"][0]
    monkeypatch.setitem(loading.OFFICIAL, ("vit_b16", "mae"), (url, 1000))
    path = home / url.rpartition("/")[2]
    home.mkdir(parents=True)
    path.write_bytes(bytes(1005))
    assert told(capsys)[1]["vit_b16 mae"][0] == "ok"
    assert "put there by hand" in told(capsys)[1]["vit_b16 mae"][1]
    record = path.with_name(path.name + ".sha256")
    record.write_text(f"{hashlib.sha256(bytes(1005)).hexdigest()}  {path.name}\n")
    assert "digest not checked, --digests does" in told(capsys)[1]["vit_b16 mae"][1]
    assert told(capsys, "--digests")[1]["vit_b16 mae"][1].endswith("digest verified")
    path.write_bytes(bytes(1004) + b"x")
    assert told(capsys)[1]["vit_b16 mae"][0] == "ok"  # as large as before
    state, detail = told(capsys, "--digests")[1]["vit_b16 mae"]
    assert (state, detail.partition(": ")[2]) == (
        "damaged", "has changed since it was downloaded; delete it, it will be fetched again"
    )  # fmt: skip
    path.write_bytes(bytes(900))
    assert told(capsys)[1]["vit_b16 mae"][0] == "damaged"
    path.rename(path.with_name(path.name + ".part"))
    assert "0.00 GB have arrived" in told(capsys)[1]["vit_b16 mae"][1]


def test_datasets_are_there_partial_or_damaged(capsys: Any, tmp_path: Path) -> None:
    MAKE["pets"](tmp_path / "d")
    MAKE["dtd"](tmp_path / "d")
    (tmp_path / "d/dtd/dtd/labels/val1.txt").write_bytes(b"\xff\xfe")
    found = told(capsys, "--data-root", str(tmp_path / "d"))[1]
    assert found["pets"][0] == "partial" and "give --partial" in found["pets"][1]
    assert found["dtd"][0] == "damaged" and "val1.txt: cannot be read" in found["dtd"][1]
    assert found["voc07"][0] == "missing"


def test_a_machine_that_cannot_work_is_told_so_in_one_line(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").write_text("a file")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Disk", (), {"free": 2e9}))
    code = cli.run(["doctor", "--json"])
    out, err = capsys.readouterr()
    found = {line["what"]: line for line in json.loads(out)}
    assert code == 1
    assert err == "error: doctor: not ready, see runs/\n"
    assert found["runs/"]["detail"] == f"{tmp_path / 'runs'} is a file, give --out"
    assert found["disk"]["state"] == found["cache disk"]["state"] == "low"
    assert "TORCH_HOME" in found["cache disk"]["detail"]


def test_torchvision_of_another_torch_ends_the_examination_early(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuses(name: str, *args: Any) -> Any:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist\nat somewhere")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuses)
    found = list(doctor.examine(None, False))
    monkeypatch.undo()
    assert found[0].state == "bad"
    assert "nms does not exist; install torch and torchvision together" in found[0].detail
    assert not any(finding.what in BENCHMARKS for finding in found)


def test_a_gpu_without_bfloat16_is_told_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: torch's answers are put in its mouth."""
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda i: "Old GPU",
        "mem_get_info": lambda i: (2e9, 8e9), "is_bf16_supported": lambda including_emulation: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    assert [*doctor.devices()] == [
        doctor.Finding("cuda:0", "ok", "Old GPU, 2 of 8 GB free"),
        doctor.Finding("bfloat16", "missing", "this GPU has none: give --no-amp for float32"),
    ]
