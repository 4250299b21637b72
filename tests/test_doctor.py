"""What `doctor` says of a machine: each thing that is not well names its remedy."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_benchmarks import make

import cli
import weights
from benchmarks import BENCHMARKS
from extras.doctor import examine
from weights import OFFICIAL


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without weights or datasets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("BISSLIGHT_DATA", raising=False)
    return tmp_path / "torch/hub/checkpoints"


def told(capsys: Any, *more: str) -> tuple[int, dict[str, tuple[str, str]]]:
    code = cli.run(["doctor", "--json", *more])
    rows = json.loads(capsys.readouterr().out)["machine"]
    return code, {row["what"]: (row["state"], row["detail"]) for row in rows}


def test_a_fresh_machine_is_told_where_everything_comes_from(capsys: Any, home: Path) -> None:
    code, found = told(capsys)
    assert code == 0
    assert {"torch", "device", "runs/", "cache", "imagenet", *BENCHMARKS} <= {*found}
    assert found["torch"][0] == found["runs/"][0] == found["cache"][0] == "ok"
    for (backbone, pretext), (url, _) in OFFICIAL.items():
        state, detail = found[f"{backbone} {pretext}"]
        assert state == "missing" and url in detail
    for name in BENCHMARKS:
        assert found[name] == ("missing", f"bisslight data download {name}")
    assert not home.exists()  # looking makes nothing
    assert cli.run(["doctor"]) == 0
    assert "vit_b16 mae" in capsys.readouterr().out


def test_weights_are_weighed(capsys: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = OFFICIAL["vit_b16", "mae"][0]
    monkeypatch.setitem(weights.OFFICIAL, ("vit_b16", "mae"), (url, 0.001))
    home.mkdir(parents=True)
    for size, state in ((1005, "ok"), (900, "damaged")):
        (home / url.rpartition("/")[2]).write_bytes(bytes(size))
        assert told(capsys)[1]["vit_b16 mae"][0] == state


def test_datasets_are_there_partial_or_damaged(capsys: Any, tmp_path: Path) -> None:
    make("pets", tmp_path / "d")
    make("dtd", tmp_path / "d")
    (tmp_path / "d/dtd/dtd/labels/val1.txt").write_bytes(b"\xff\xfe")
    found = told(capsys, "--data-root", str(tmp_path / "d"))[1]
    assert found["pets"][0] == "partial" and "give --partial" in found["pets"][1]
    assert found["dtd"][0] == "damaged" and "lists cannot be read" in found["dtd"][1]
    assert found["voc07"][0] == "missing"


def test_a_machine_that_cannot_work_ends_with_1(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").write_text("a file")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Disk", (), {"free": 2e9}))
    code, found = told(capsys)
    assert code == 1
    assert found["runs/"] == ("bad", f"{tmp_path / 'runs'} is a file, give --out")
    assert found["cache"][0] == "low" and "TORCH_HOME" in found["cache"][1]


def test_torchvision_of_another_torch_ends_the_examination_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def refuses(name: str, *args: Any) -> Any:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuses)
    *_, (what, state, detail) = examine(tmp_path)
    monkeypatch.undo()
    assert (what, state) == ("torch", "bad")
    assert "nms does not exist; install torch and torchvision together" in detail


def test_a_gpu_is_told_with_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU here: torch's answers are put in its mouth."""
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda: "A GPU",
        "mem_get_info": lambda: (2e9, 8e9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert ("device", "ok", "A GPU, 2 of 8 GB free") in [*examine(tmp_path)]
