"""What the guide and the examples call has the types that they say, for mypy and for pyright."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    path for path in sorted(ROOT.glob("examples/*.py")) if path.stem in ("minimal", "rotation")
]
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


def mypy(code: str, folder: Path) -> str:
    """What mypy, strict as in pyproject.toml, says of a program in a folder of its own."""
    file = folder / "program.py"
    file.write_text(code)
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(folder / "cache")]
    outcome = subprocess.run(
        [sys.executable, "-m", "mypy", *config, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return "\n".join(line for line in outcome.stdout.splitlines() if "program.py" in line)


def pyright(code: str, folder: Path) -> str:
    """What pyright, in its basic mode, says of a program in a folder of its own."""
    (folder / "program.py").write_text(code)
    settings = {
        "typeCheckingMode": "basic",
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.11",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    outcome = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return "\n".join(line for line in outcome.stdout.splitlines() if " error: " in line)


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_the_calls_of_readme_and_examples_have_their_types(
    checker: Callable[[str, Path], str], tmp_path: Path
) -> None:
    """Also a misspelt setting and a wrong value are found, so the check looks at what it should."""
    assert checker(guide_code(), tmp_path) == ""
    for script in SCRIPTS:
        assert checker(script.read_text(), tmp_path) == ""
    said = checker(WRONG, tmp_path)
    assert "alternation" in said and "newton" in said
