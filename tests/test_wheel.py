"""The wheel, installed by itself, goes from pretrain to evaluate without checkout and network.

It is installed with --no-deps into a fresh virtual environment, and a .pth file lends it the
packages of the interpreter that runs the tests; the checkout itself is not among them. Building
fetches setuptools; the commands themselves run with every way to a network closed: in a network
namespace of their own where this user may make one, else with Python's sockets refused.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
LEFT_OUT = (".*", "runs", "build", "*.egg-info", "__pycache__")
ROOT = Path(__file__).parent.parent
MODULES = {path.name for path in ROOT.glob("*.py")}
EXTRAS = {f"extras/{path.name}" for path in (ROOT / "extras").glob("*.[ph]*") if path.is_file()}
NO_NETWORK = """
import socket
def refuse(*args, **options):
    raise OSError("no network here")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is in the checkout, so that nothing is left in it."""
    source, out = tmp_path_factory.mktemp("source") / "bisslight", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    line = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(out),
        str(source),
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("setuptools cannot be fetched to build with")
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    return file


def test_the_wheel_holds_the_modules_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "bisslight = cli:main" in archive.read(entry).decode()
    assert {name for name in names if ".dist-info/" not in name} == MODULES | EXTRAS


def test_the_installed_commands_run_from_an_empty_folder_without_a_network(
    wheel: Path, tmp_path: Path
) -> None:
    home, here = tmp_path / "venv", tmp_path / "empty"
    here.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = next((home / "lib").glob("python*/site-packages"))
    lent = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    (site / "lent.pth").write_text("\n".join(lent))
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(home / "bin/python"),
        "install",
        "--quiet",
    ]
    done = subprocess.run(
        [
            *install,
            "--no-deps",
            "--no-index",
            "--force-reinstall",
            "--ignore-installed",
            str(wheel),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in site.glob("*.py")} == MODULES | {"sitecustomize.py"}
    closed = ["unshare", "--net", "--map-root-user"] if os.getuid() else ["unshare", "--net"]
    if subprocess.run([*closed, "true"], check=False, capture_output=True).returncode:
        closed = []
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(here), "OMP_NUM_THREADS": "1"}

    def bisslight(line: str) -> str:
        done = subprocess.run(
            [*closed, str(home / "bin/bisslight"), *line.split()],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stderr == ""
        return done.stdout

    own = "import cli, socket, sys; assert cli.__file__.startswith(sys.argv[1]), cli.__file__;"
    own += "socket.create_connection(('192.0.2.1', 80), 1)"
    proof = subprocess.run(
        [*closed, str(home / "bin/python"), "-c", own, str(site)],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "OSError" in proof.stderr, (
        proof.stderr
    )  # the modules are the wheel's, and the network is off
    start = "--backbone vit_mini --weights pre --dataset quilts --quiet"
    pool = "--pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 500"
    bisslight(f"pretrain {pool} --quiet --out pre")
    sizes = "--alternations 2 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8"
    sizes += " --probe-epochs 1 --eval-every 2 --warmup 1"
    bisslight(f"align {start} {sizes} --out a")
    peft = "--epochs 2 --warmup-epochs 1 --batch 40 --seeds 2 --lr 1e-2"
    bisslight(f"finetune --from a {peft} --quiet --out aligned")
    bisslight(f"finetune {start} {peft} --out direct")
    arms = json.loads(bisslight("evaluate aligned --against direct --json"))["arms"]
    assert [arm["seeds"] for arm in arms] == [2, 2]
    assert "Algorithm 1" in bisslight("--help")
    assert {path.name for path in here.iterdir()} == {"pre", "a", "aligned", "direct"}
