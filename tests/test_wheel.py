"""The wheel, installed by itself, goes from pretrain to evaluate without checkout and network.

It is installed with --no-deps into a fresh virtual environment, and a .pth file lends it the
packages of the interpreter that runs the tests; the checkout itself is not among them. Building
fetches setuptools; the commands themselves run with Python's sockets refused.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from toy import ALIGN_STEPS, PEFT_STEPS, ROOT

pytestmark = pytest.mark.slow
LEFT_OUT = (".*", "runs", "build", "*.egg-info", "__pycache__")
MODULES = {path.name for path in ROOT.glob("*.py")}
EXTRAS = {f"extras/{path.name}" for path in (ROOT / "extras").glob("*.py")}
SUPPORT = {f"support/{path.name}" for path in (ROOT / "support").glob("*.*") if path.is_file()}
NO_NETWORK = """
import socket
def refuse(*args, **options):
    raise OSError("no network here")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""


def call(*line: Any, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*map(str, line)], capture_output=True, text=True, check=False, **more)


def pip(line: str, *paths: Path) -> None:
    """Run pip of the interpreter that runs the tests; skip where setuptools cannot be fetched."""
    done = call(sys.executable, "-m", "pip", *line.split(), *paths)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("setuptools cannot be fetched to build with")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the checkout, so that nothing is left in it."""
    copy = tmp_path_factory.mktemp("source") / "bisslight"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return copy


def make_environment(home: Path) -> Path:
    """Make a virtual environment that borrows packages; returns where it keeps its own."""
    assert call(sys.executable, "-m", "venv", "--without-pip", home).returncode == 0
    site = next((home / "lib").glob("python*/site-packages"))
    lent = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    (site / "lent.pth").write_text("\n".join(lent))
    return site


def test_folders_beside_a_script_do_not_hide_modules(source: Path, tmp_path: Path) -> None:
    """After `make install`, whose installation is editable."""
    home = tmp_path / "venv"
    site = make_environment(home)
    pip(f"--python {home}/bin/python install --quiet --no-deps --editable", source)
    (site / "lent.pth").unlink()  # or the checkout's own installation could be found there
    names = ("config", "data", "support", "extras")
    for name in names:
        (tmp_path / name).mkdir()
    script = tmp_path / "script.py"
    find = f"for m in {names}: print(find_spec(m).origin)"
    script.write_text(f"from importlib.util import find_spec\n{find}")
    done = call(home / "bin/python", script, cwd=tmp_path)
    files = ("config.py", "data.py", "support/__init__.py", "extras/__init__.py")
    assert done.stdout.split() == [str(source / file) for file in files], done.stderr


def test_the_wheel_holds_the_modules_alone_and_runs_from_an_empty_folder_without_a_network(
    source: Path, tmp_path: Path
) -> None:
    pip(f"wheel --quiet --no-deps --wheel-dir {tmp_path}/wheel", source)
    (wheel,) = (tmp_path / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == MODULES | EXTRAS | SUPPORT
    home, here = tmp_path / "venv", tmp_path / "empty"
    here.mkdir()
    site = make_environment(home)
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    alone = "--no-deps --no-index --force-reinstall --ignore-installed"
    pip(f"--python {home}/bin/python install --quiet {alone}", wheel)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(here), "OMP_NUM_THREADS": "1"}

    def bisslight(line: str) -> str:
        done = call(home / "bin/bisslight", *line.split(), cwd=here, env=environment)
        assert (done.returncode, done.stderr) == (0, ""), f"{line}\n{done.stderr}"
        return done.stdout

    start = "--backbone vit_mini --weights pre --dataset omniglot:Greek --quiet"
    short = "--epochs 1 --warmup-epochs 0 --batch 500 --quiet"
    bisslight(f"pretrain --pool omniglot --backbone vit_mini {short} --out pre")
    bisslight(f"align {start} {ALIGN_STEPS} --out a")
    bisslight(f"finetune --from a {PEFT_STEPS} --seeds 2 --quiet --out aligned")
    bisslight(f"finetune {start} {PEFT_STEPS} --seeds 2 --out direct")
    arms = json.loads(bisslight("evaluate aligned direct --json"))["arms"]
    assert [len(arm["accuracies"]) for arm in arms] == [2, 2]
    assert "Algorithm 1" in bisslight("--help")
    assert {path.name for path in here.iterdir()} == {"pre", "a", "aligned", "direct"}
