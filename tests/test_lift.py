"""Each file of the mathematics can be copied alone into an empty folder, or into a notebook."""

import ast
import doctest
import importlib
import re
import sys
from functools import partial
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

import pytest
from child_process import finish, start

ROOT = Path(__file__).resolve().parent.parent
MATHEMATICS = ("bisslight", "mfac", "hypergradients", "lora", "mae", "ijepa", "data")
DIRECT = {"torch", "timm", "torchvision", "safetensors", "numpy", "PIL"}
UNIX = {"fcntl", "grp", "posix", "pwd", "resource", "termios"}  # Windows has none of these


def doctests_alone(folder: Path, name: str) -> int:
    """Import FOLDER/NAME.py where no other file of the project can be found; failed doctests."""
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
    sys.path[:] = [str(folder), *(x for x in sys.path if x and not Path(x, "config.py").exists())]
    for file in ROOT.glob("*.py"):
        sys.modules.pop(file.stem, None)
    module = importlib.import_module(name)
    assert module.__file__ == f"{folder}/{name}.py"
    failed, tried = doctest.testmod(module)
    return failed + (not tried)


def test_each_file_of_the_mathematics_lifts_alone(tmp_path: Path) -> None:
    for name in (*MATHEMATICS, "other"):
        (tmp_path / name).mkdir()
        content = (ROOT / f"{name}.py").read_text() if name != "other" else "import config\n"
        (tmp_path / name / f"{name}.py").write_text(content)
        said = tmp_path / name / "said"
        code = finish(start(partial(doctests_alone, tmp_path / name, name), said))
        assert (code == 0) == (name != "other"), said.read_text()
    assert "No module named 'config'" in said.read_text()  # so this test would notice


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
