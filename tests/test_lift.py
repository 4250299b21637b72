"""Each file of the mathematics can be copied alone into an empty folder, or into a notebook."""

import ast
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MATHEMATICS = ("bisslight", "mfac", "cg", "lora", "mae", "ijepa", "data")
DIRECT = {"torch", "timm", "torchvision", "safetensors", "numpy", "PIL"}
UNIX = {"fcntl", "grp", "posix", "pwd", "resource", "termios"}  # Windows has none of these

ALONE = """
import doctest, importlib.machinery, sys

folder, libraries, installed, *names = sys.argv[1:]
allowed = {*sys.stdlib_module_names, *installed.split()}

class Only(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in allowed or name.startswith("_sysconfigdata"):
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Only
sys.path += libraries.split("\\n")
for name in names:  # one after the other, so that torch is imported once
    allowed.add(name)
    sys.path.insert(0, f"{folder}/{name}")
    module = importlib.import_module(name)
    assert module.__file__ == f"{folder}/{name}/{name}.py"
    failed, tried = doctest.testmod(module)
    print(name, "passes" if tried and not failed else "fails")
    allowed.remove(name)
    del sys.modules[name], sys.path[0]
"""


def requirements(name: str, found: set[str]) -> set[str]:
    """Adds a distribution and all that it needs itself, extras left out."""
    name = normal(name)
    if name not in found:
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # of another platform
            return found
        found.add(name)
        for need in needs:
            if "extra ==" not in need:
                requirements(re.split(r"[^\w.-]", need)[0], found)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lifted(folder: Path, *names: str) -> "subprocess.CompletedProcess[str]":
    """Import FOLDER/NAME/NAME.py and run its doctests, where only torch, timm and theirs are."""
    wanted: set[str] = set()
    for name in ("torch", "timm", "torchvision", "safetensors", "numpy", "pillow"):
        requirements(name, wanted)
    owners = packages_distributions().items()
    installed = [name for name, of in owners if wanted & set(map(normal, of))]
    libraries = [path for path in sys.path if path.endswith("-packages")]
    # -I and -S: no $PYTHONPATH, no working directory, no .pth file that leads to this project
    python = [sys.executable, "-I", "-S", "-c", ALONE]
    command = [*python, str(folder), "\n".join(libraries), " ".join(installed), *names]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_each_file_of_the_mathematics_lifts_alone(tmp_path: Path) -> None:
    for name in MATHEMATICS:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    (tmp_path / "other").mkdir()
    (tmp_path / "other/other.py").write_text("import config\n")
    done = lifted(tmp_path, *MATHEMATICS, "other")
    assert done.stdout.splitlines() == [f"{name} passes" for name in MATHEMATICS], done.stderr
    assert "No module named 'config'" in done.stderr  # so this test would notice


@pytest.mark.parametrize("name", MATHEMATICS)
def test_a_file_of_the_mathematics_imports_torch_and_its_kin_and_names_no_flags(name: str) -> None:
    """Nothing that comes with them by chance or that Windows lacks; a notebook has no flags."""
    imported, texts = set(), []
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Raise):
            texts.append(ast.unparse(node))
    assert imported <= DIRECT | sys.stdlib_module_names - UNIX
    assert not [text for text in texts if re.search(r"--[a-z]", text)]


def test_files_that_readme_says_can_be_copied_are_those_that_lift_alone() -> None:
    (sentence,) = re.findall(r"[^;:]*can be copied", (ROOT / "README.md").read_text())
    assert {*re.findall(r"`([a-z_]+)\.py`", sentence)} == {*MATHEMATICS}
