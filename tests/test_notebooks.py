"""The notebooks in examples/: script and .ipynb are the same, and every script runs."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_python import env

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]_*.py"))
NAMES = ["1_hypergradient", "2_two_adapters", "3_algorithm_1", "4_your_own_task"]


def cells_of_script(text: str) -> list[tuple[str, str]]:
    """(kind, source) of the cells of a script in percent format, comment marks of text removed."""
    cells = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        kind = "markdown" if "[markdown]" in head else "code"
        lines = body.strip().splitlines()
        if kind == "markdown":
            lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
        cells.append((kind, "\n".join(lines)))
    return cells


def notebook(script: Path) -> Any:
    """The .ipynb beside a script."""
    return json.loads(script.with_suffix(".ipynb").read_text())


def test_there_are_four_notebooks_and_the_readme_links_each() -> None:
    assert [path.stem for path in SCRIPTS] == NAMES
    links = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text())
    assert {f"{name}.{kind}" for name in NAMES for kind in ("py", "ipynb")} <= {*links}
    assert all((EXAMPLES / link).exists() for link in links)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_and_notebook_have_the_same_cells(script: Path) -> None:
    """`make notebooks` renews the .ipynb."""
    cells = [(c["cell_type"], "".join(c["source"]).strip()) for c in notebook(script)["cells"]]
    assert cells == cells_of_script(script.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_small_and_tells_no_machine(script: Path) -> None:
    """Every cell was run, in order and without error; pictures are there; no warnings, no paths."""
    cells = [cell for cell in notebook(script)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, 1 + len(cells))]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == script.read_text().count("plt.show()")
    text = script.with_suffix(".ipynb").read_text()
    assert len(text) < 300_000
    assert not re.search(r"/(home|root|tmp|Users|work|private|var)/\w|[A-Z]:\\\\", text)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_part_ends_with_questions_whose_answers_are_folded(script: Path) -> None:
    """As many answers as questions, in a <details> that is closed again."""
    texts = [source for kind, source in cells_of_script(script.read_text()) if kind == "markdown"]
    asked = [source for source in texts if "**Questions**" in source]
    assert len(asked) >= 3
    for source in asked:
        questions, answers = source.split("<details><summary>Answers</summary>")
        numbers = [re.findall(r"^(\d)\. ", part, re.MULTILINE) for part in (questions, answers)]
        assert numbers[0] == numbers[1] == [str(i + 1) for i in range(len(numbers[0]))]
        assert answers.rstrip().endswith("</details>")


def test_the_loop_by_hand_is_about_forty_lines_and_marks_every_line_of_the_paper() -> None:
    text = (EXAMPLES / "3_algorithm_1.py").read_text()
    nodes = ast.walk(ast.parse(text))
    (loop,) = [
        node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "by_hand"
    ]
    lines = text.splitlines()[loop.lineno - 1 : (loop.end_lineno or 0) + 1]
    assert len(lines) <= 40
    marks = {int(n) for n in re.findall(r"l\.(\d+)", "\n".join(lines))}
    assert marks == {*range(3, 18)}  # 1 is the input, 2 is `begin`


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_runs_from_an_empty_folder(script: Path, tmp_path: Path) -> None:
    """And it leaves nothing there."""
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=env(MPLBACKEND="Agg", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert not [*tmp_path.iterdir()]
