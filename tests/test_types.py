"""What the guide and the examples call has the types that they say, for mypy and for pyright."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OWN_TASK = """
from align import TaskConstructor

checked: TaskConstructor = Rotation
"""
WRONG = """
from config import AlignConfig

AlignConfig(backbone="vit_mini", dataset="omniglot:Greek", alternation=20)
AlignConfig(backbone="vit_mini", dataset="omniglot:Greek", hypergrad="newton")
"""


def guide_code() -> str:
    text = (ROOT / "docs/guide.md").read_text()
    (code,) = re.findall(r"## From Python\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert isinstance(code, str)
    return code


def check(line: str, folder: Path) -> str:
    """What a checker prints of program.py in a folder of its own, beside this one's modules."""
    words = [sys.executable, "-m", *line.split(), str(folder / "program.py")]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def mypy(folder: Path) -> str:
    """Strict as in pyproject.toml."""
    said = check(f"mypy --config-file pyproject.toml --cache-dir {folder}/cache", folder)
    return "\n".join(line for line in said.splitlines() if "program.py" in line)


def pyright(folder: Path) -> str:
    """In its basic mode."""
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    said = check(f"basedpyright --project {folder} --pythonpath {sys.executable}", folder)
    return "\n".join(line for line in said.splitlines() if " error: " in line)


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_the_calls_of_the_guide_and_an_own_task_have_their_types(
    checker: Callable[[Path], str], tmp_path: Path
) -> None:
    """Also a misspelt setting and a wrong value are found, so the check looks at what it should."""
    rotation = (ROOT / "examples/rotation.py").read_text()
    for code in (guide_code(), rotation + OWN_TASK):
        (tmp_path / "program.py").write_text(code)
        assert checker(tmp_path) == ""
    (tmp_path / "program.py").write_text(WRONG)
    said = checker(tmp_path)
    assert "alternation" in said and "newton" in said
    less = rotation.replace("settings: object, rng", "rng")
    assert less != rotation
    (tmp_path / "program.py").write_text(less + OWN_TASK)
    assert "TaskConstructor" in checker(tmp_path)
