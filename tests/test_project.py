"""The house rules: what is packaged, who imports whom, what no file may contain."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path.stem for path in ROOT.glob("*.py"))
FLOOR = {
    "config": 0, "paper": 0, "stopping": 0,
    "mfac": 1, "lora": 1, "data": 1, "runtime": 1, "fetch": 1, "figures": 1, "parallel": 1,
    "bisslight": 2, "cg": 2, "mae": 2, "ijepa": 2, "finetune": 2, "evaluate": 2, "tasks": 2, "export": 2,
    "rollout": 2, "similarity": 2, "cost": 3,
    "loading": 3, "stages": 4, "tuning": 5,
    "demo": 6, "bench": 6, "doctor": 6, "seeing": 6, "sweep": 6, "report": 7, "cli": 8,
}  # fmt: skip


def imports(module: str) -> set[str]:
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in names}


def test_every_root_module_is_packaged() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]
    assert sorted(declared) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_down(module: str) -> None:
    """Config under all; runtime serves its neighbours on the ground floor; no corridors elsewhere."""
    ours = imports(module) & set(MODULES)
    allowed = {name for name in MODULES if FLOOR[name] < FLOOR[module]} | (
        {"runtime", "parallel"} if FLOOR[module] == 1 else set()
    )
    assert ours <= allowed


def test_algorithm_1_knows_no_pretext_task() -> None:
    text = (ROOT / "bisslight.py").read_text()
    assert imports("bisslight") & set(MODULES) == {"config", "mfac", "parallel", "runtime"}
    for line in range(3, 18):
        assert re.search(rf"\bl\.{line}\b", text), f"line {line} of Algorithm 1 is not marked"


def test_no_file_names_a_machine_path() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not files:
        pytest.skip("not a git checkout")
    for name in files:
        if not name.endswith((".npz", ".png", ".pth", ".tar")):
            assert not re.search(r"/(home|root|tmp|Users)/\w", (ROOT / name).read_text()), name


def test_recordings_travel_with_the_suite() -> None:
    """A clone has every recorded number that a test reads; only photographs and the paper's text stay outside."""
    for path in ROOT.glob("tests/*.py"):
        asked = re.findall(r"shared\(f?\"(\w+)", path.read_text())
        assert {*asked} <= {"data", "paper"}, path
    for folder in ("mae", "ijepa", "official"):
        where = ROOT / "tests" / "data" / folder
        named = re.findall(r"`(\w+\.(?:npz|json|pth(?:\.tar)?))`", (where / "README.md").read_text())
        assert named
        assert [name for name in named if not (where / name).is_file()] == []
