"""The house rules: who imports whom, what is packaged, what names a machine."""

import ast
import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
METHOD = ("bisslight", "data", "head", "hypergradients", "ijepa", "lora", "mae", "mfac")
COMMANDS = ("align", "evaluate", "finetune")
BINARY = (".npz", ".png", ".npy", ".mat", ".gz", ".pth", ".tar", ".safetensors")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in [*ROOT.glob("*.py"), *ROOT.glob("support/*.py"), *ROOT.glob("extras/*.py")]
    if path.stem != "__init__"
}


def imports(path: Path) -> set[str]:
    """Names of the project's modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names | {node.module or ""}
    return found & {*MODULES}


def level(name: str) -> int:
    """0 the method, 1 settings and support, 2 the commands, 3 extras, 4 the command line."""
    levels = dict.fromkeys(METHOD, 0) | dict.fromkeys(COMMANDS, 2) | {"cli": 4}
    return levels.get(name, 3 if name.startswith("extras.") else 1)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_only_go_down(name: str) -> None:
    """Method, support, commands, extras, cli: a module imports its own level or a lower one."""
    found = imports(MODULES[name])
    assert not {other for other in found if level(other) > level(name)}
    if name in METHOD:
        assert not found
    if name in ("align", "finetune"):
        assert not found & {*COMMANDS}


def test_every_module_is_packaged_with_the_files_that_it_reads_and_the_command() -> None:
    """And a folder `data` beside a script does not hide data.py, as it did without package-dir."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = about["tool"]["setuptools"]
    assert sorted(setuptools["py-modules"]) == sorted(name for name in MODULES if "." not in name)
    assert (setuptools["packages"], setuptools["package-dir"]) == (["extras", "support"], {"": "."})
    (pattern,) = setuptools["package-data"]["support"]
    others = [path for path in (ROOT / "support").glob("*.*") if path.suffix != ".py"]
    assert len(others) == 3 and all(path.match(pattern) for path in others)
    module, _, name = about["project"]["scripts"]["bisslight"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_contributing_names_each_module_and_no_other() -> None:
    """Its list of floors is the map by which a stranger finds a file."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    floors = text[text.index("**Imports run down.**") : text.index("**How it is written**")]
    named = {name for words in re.findall(r"`([a-z_0-9 ]+)`", floors) for name in words.split()}
    assert named == {name.rpartition(".")[2] for name in MODULES}


def test_no_file_names_a_machine_path() -> None:
    listed = subprocess.getoutput(f"git -C '{ROOT}' ls-files 2> /dev/null").split()
    if not listed:
        pytest.skip("not a git checkout")
    for name in listed:
        if not name.endswith(BINARY) and (ROOT / name).is_file():
            assert not re.search(r"/(home|root|tmp|Users)/\w", (ROOT / name).read_text()), name
