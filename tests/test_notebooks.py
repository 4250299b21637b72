"""The notebooks in examples/: script and .ipynb are the same. Commands in prose exist."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import blank
import pytest

import cli

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]_*.py"))
EACH = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@EACH
def test_a_notebook_is_its_script_run_once_and_tells_no_machine(script: Path) -> None:
    """Same cells (`make notebooks` renews them), run in order, all pictures, no paths."""
    text = script.with_suffix(".ipynb").read_text()
    cells = json.loads(text)["cells"]
    found = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in cells]
    of_script = blank.cells(script.read_text())
    assert found == [(cell["cell_type"], cell["source"]) for cell in of_script]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, 1 + len(cells))]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == script.read_text().count("plt.show()")
    assert not re.search(r"/(home|root|tmp|Users|work|private|var)/\w|[A-Z]:\\\\", text)


@pytest.mark.slow
@EACH
def test_each_script_runs_from_an_empty_folder(script: Path, tmp_path: Path) -> None:
    """And it leaves nothing there."""
    names = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=names, timeout=600)
    assert done.returncode == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        ("b + lam * theta_D)", "b)", "gradient of the lower level"),
        ("b + lam * theta_D)", "b - lam * theta_D)", "gradient of the lower level"),
        ("q = lam * torch.linalg.solve(H2", "q = torch.linalg.solve(H2", "finite difference"),
    ],
)
def test_a_wrong_line_of_notebook_1_ends_it(
    ours: str, theirs: str, word: str, tmp_path: Path
) -> None:
    """What a student may write into its blanks; it ran to the end without a word."""
    text = (EXAMPLES / "1_hypergradient.py").read_text()
    assert text.count(ours) == 1
    file = tmp_path / "mine.py"
    file.write_text(text.replace(ours, theirs))
    names = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, file], env=names, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(rf"AssertionError: .*{word}", done.stderr)


@pytest.mark.parametrize("file", ["README.md", "docs/guide.md", "experiments/README.md"])
def test_each_command_and_flag_in_prose_exists(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is trained: the images that they name are missing, which is said instead."""
    monkeypatch.chdir(tmp_path)
    Path("mae.toml").write_text("beta2 = 0.999\nmin_crop = 0.5\n")  # as the page says
    text = (ROOT / file).read_text().replace("\\\n", " ")
    lines = re.findall(r"(?m)^(bisslight .*)$", text)
    assert lines
    for line in lines:
        _, command, *words = shlex.split(line)
        if command in ("align", "finetune", "pretrain"):
            words.append("--dry-run")
        cli.run([command, *words])
        assert "No such" not in capsys.readouterr().err.replace("No such file", ""), line
