"""The exercises: worked answers are right, mistakes are found, and blanks come from full files.

The checks of `examples/exercises/` compare with computations of another kind.
"""

import ast
import doctest
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import answers_5
import blank
import check
import checks_3
import checks_5
import other_styles
import pytest
import torch
import wrong_answers
from check import Exercise, Outcome, judge

pytestmark = pytest.mark.slow  # some 300 answers are judged, each trains or solves a little


ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples/exercises"
EXERCISES = check.exercises()
STYLES = [name for name in vars(other_styles) if re.match(r"[a-z]\w+__", name)]
EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: f"{e.sheet}.{e.k}-{e.name}")


def answers_file(sheet: int) -> Path:
    return FOLDER / f"answers_{sheet}.py"


def answers_of(sheet: int) -> dict[str, Any]:
    return runpy.run_path(str(answers_file(sheet)))


# --- answers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blanks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make blanks` makes."""
    out = tmp_path_factory.mktemp("blanks")
    blank.write(out)
    return out


@EACH
def test_the_answer_is_right_and_a_sheet_begins_to_do(exercise: Exercise, blanks: Path) -> None:
    """The worked answer, and what stands in its place; with the same arguments."""
    answers = runpy.run_path(str(answers_file(exercise.sheet)))
    assert judge(exercise, answers[exercise.name]) == Outcome("right")
    sheet = runpy.run_path(str(blanks / f"sheet_{exercise.sheet}.py"))
    assert judge(exercise, sheet[exercise.name]).verdict == "to do"


# function, what stands in the worked answer, what a student might write, a word of the message
MISTAKES = [
    ("eq_7", "(N_L + d[j])", "(i + d[j])", "N_L"),
    ("eq_7", "G[i] / lam", "G[i]", "λ"),
    ("eq_7", "(v[j] @ G[i])", "(v[j] @ G[j])", "∇L^P_j"),
    ("eq_7", "return v, d", "return v", "2 things"),
    ("eq_10", "-= lam *", "+= lam *", "subtracted"),
    ("eq_10", "(v[j] @ g)", "(v[j] @ q)", "q so far"),
    ("eq_10", "q = g.clone()", "q = g", "g was changed"),
    ("fisher_product", " / len(G)", "", "N_L"),
    ("fisher_product", "G.T @ inner", "(G.T @ G) @ x", "p x p"),
    ("closed_form", "N_L * lam", "lam", "N_L λ"),
    ("conjugate_gradients", "residual + yy / yy_before * direction", "residual", "steepest"),
    ("conjugate_gradients", "(direction @ A_direction)", "(direction @ product(direction))", "one"),
    ("lora_forward", "scale * low", "low", "scale"),
    ("lora_forward", "F.linear(x, W_q, bias)", "(x @ W_q + bias)", "transposed"),
    ("merge", "scale * B_q @ A_q", "B_q @ A_q", "the weight"),
    ("merge", "W_qkv + change", "W_qkv.add_(change)", "W_qkv was changed"),
    ("masking", "order.argsort(1)", "order", "restore"),
    ("masking", "(1 - mask_ratio)", "mask_ratio", "share"),
    ("mae_loss", "[removed].mean()", "[~removed].mean()", "visible"),
    ("mae_loss", "(prediction - target)", "(prediction - patches)", "standardised"),
    ("lower_step", "grad_P + lam * (", "grad_P - lam * (", "away"),
    ("lower_step", "opt_P.step()", "pass", "did not move"),
    ("lower_step", "return grad_P", "return g_P", "spring"),
    ("upper_step", "L_D(theta_P, phi_D, batch), [theta_P", "L_D(theta_D, phi_D, batch), [theta_D",
     "at θ_P"),
    ("upper_step", "q + grad_D_at_D", "q", "second term"),
    ("upper_step", "q = solve(g)", "q = g", "solve"),
    ("algorithm_1", "    rows = []  # l.4", "    rows = locals().get('rows', [])", "line 4"),
    ("algorithm_1", "theta_P = theta_D.detach().clone().requires_grad_()", "theta_P = theta_D",
     "two tensors"),
    ("algorithm_1", "range(problem.N_U)", "range(problem.N_L)", "L_D"),
    ("with_the_head", "H_tt - H_tp @ torch.linalg.solve(H_pp, H_pt)", "H_tt", "held fixed"),
    ("per_image_rows", "torch.cat([2**0.5 * G, scale * deviations])", "G", "minibatches"),
    ("with_decay", "lam / (lam + decay) * solve(g)", "solve(g)", "factor"),
    ("cached_gradient", "    parts =", "    micro *= 2\n    parts =", "at a time"),
    ("shows_a", "run.G[0]", "run.G[1]", "no mistake"),
    ("shows_a", "run.G[0].unbind(1), passes", "torch.cat(run.G, 1).unbind(1), run.lower",
     "True of copy c, which has another mistake"),
    ("shows_b", "run.upper[:2]", "run.upper[:1]", "no mistake"),
    ("shows_c", "!= run.problem.N_L", "!= 4", "no mistake"),
    ("shows_c", "in run.G)", "in run.G[:1])", "does not show"),
    ("shows_d", "    return ", "    ", "it says None"),
    ("shows_d", "run.upper[:2]", "run.upper[1:3]", "does not show"),
    ("shows_e", "run.upper[:2]]", "run.upper[:1]]", "no mistake"),
    ("shows_f_and_g", "* N_U + 1]", "* N_U - 1]", "no mistake"),
    # an error is told with its line
    ("eq_7", "    return v, d", "    return G @ lam  # not a matrix", ": return G @ lam"),
    # right numbers by a way that was not asked for
    ("eq_7", "    return v, d", "    v = v.float().to(v)\n    return v, d", "float32 only"),
    ("eq_10", "    return q", "    torch.outer(g, g)\n    return q", "p x p"),
    ("closed_form", "    N_L = len(G)",
     "    return eq_10(*eq_7(G, lam), g, lam)\n    N_L = len(G)", "no system of N_L equations"),
    ("lora_forward", "F.linear(x, W_q, bias)", "F.linear(x, W_q, bias).detach()",
     "respect to x"),
    ("mae_loss", "[removed].mean()", "[removed].mean().detach()", "detached"),
    ("cached_gradient", "    with torch.no_grad():\n        z =",
     "    whole = torch.cat([embed(theta, part) for part in parts])\n"
     "    return torch.autograd.grad(loss(whole), theta)[0]\n"
     "    with torch.no_grad():\n        z =", "alive"),
    # right for one size, one query or one kind of numbers
    ("eq_7", "N_L + d[j]", "4 + d[j]", "row 2 of v"),
    ("conjugate_gradients", "if yy == 0", "if yy < 1e-12", "too early"),
    ("lora_forward", "scale * low", "0.5 * low", ""),
    ("merge", "zeros_like(q_change)", "zeros(12, 12, dtype=W_qkv.dtype)", "Error"),
    ("masking", "noise.shape[1] * (1 - mask_ratio)", "noise.shape[1] * 0.25", "shape"),
    ("masking", "[:, :kept], restore", "[:, :kept], restore.float()", "whole number"),
    ("mae_loss", "    mean = patches.mean(-1, keepdim=True)",
     "    patches -= patches.mean(-1, keepdim=True)\n    mean = 0", "patches was changed"),
    ("lower_step", "    opt_P.step()", "    with torch.no_grad():\n        theta_P -= 0.1 * g_P\n"
     "        phi_P -= 0.1 * g_phi_P", "opt_P.step()"),
    ("lower_step", "    theta_P.grad = g_P", "    theta_P.grad = grad_P\n"
     "    theta_P.data -= 0.1 * lam * (theta_P - theta_D).detach()", "pass through opt_P"),
    ("upper_step", "    opt_D.step()", "    with torch.no_grad():\n"
     "        theta_D -= 0.1 * theta_D.grad\n        phi_D -= 0.1 * phi_D.grad", "opt_D.step()"),
    ("algorithm_1", "[theta_P, phi_P]", "[theta_P]", "φ_P at each step: it never moves"),
    ("algorithm_1", "problem.phi_D.detach().clone()", "problem.phi_D", "phi_D was changed"),
    ("algorithm_1", "theta_D, phi_P, batch", "theta_D, phi_D, batch", "swapped"),
    ("algorithm_1", "theta_D, phi_D, batch", "theta_D, phi_P, batch", "swapped"),
    ("algorithm_1", "batch = next(problem.pretext)",
     "one = locals().get('one') or [next(problem.pretext)]; batch = one[0]", "its own"),
    ("algorithm_1", "batch = next(problem.labelled)",
     "one = locals().get('one') or [next(problem.labelled)]; batch = one[0]", "its own"),
    ("algorithm_1", "next(problem.labelled)", "next(problem.pretext)", "given pretext batches"),
    ("algorithm_1", "next(problem.pretext)", "next(problem.labelled)", "given labelled batches"),
    ("algorithm_1", "SGD([theta_D, phi_D], lr=problem.lr)", "SGD([theta_D, phi_D], lr=0.1)",
     "φ_D at each step"),
    ("per_image_rows", "(images - 1)", "1", "the mean of"),
    ("per_image_rows", "2 * N_L * (images - 1) / (N_L - 1)", "N_L**2", "the mean of"),
    ("with_decay", "mfac.mfac(G, lam + decay)",
     "lambda g: torch.cat([mfac.mfac(G[:1], lam + decay)(g[:1]), g[1:]])", "q"),
    ("with_decay", "    solve = mfac.mfac(G, lam + decay)",
     "    one = mfac.mfac(G.transpose(0, 1).flatten(1)[None], lam + decay)\n"
     "    def solve(g): return one(g.reshape(1, -1)).view_as(g)", "joined"),
]  # fmt: skip

# right in another way than the worked answer; whole functions are in other_styles.py
RIGHT = [
    ("closed_form", "N_L * lam * torch.eye(N_L, dtype=G.dtype) + G @ G.T  # (N_L, N_L)",
     "G @ G.T\n    for i in range(N_L):\n        system[i, i] += N_L * lam", ""),
    ("closed_form", "    system = N_L * lam * torch.eye(N_L, dtype=G.dtype) + G @ G.T",
     "    system = N_L * lam * torch.eye(N_L, dtype=G.dtype)\n    for i in range(N_L):\n"
     "        for j in range(N_L):\n            system[i, j] += G[i] @ G[j]\n    ", ""),
    ("conjugate_gradients", "if yy == 0", "if yy < 1e-20 * (g @ g)", ""),
    ("algorithm_1", "rows.append(row)", "rows.insert(0, row)", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "name", "ours", "theirs", "word"),
    [
        *(("wrong", *row) for row in MISTAKES + wrong_answers.WRONG),
        *(("right, but", *row) for row in wrong_answers.REMARKS),
        *(("right", *row) for row in RIGHT),
    ],
    ids=lambda text: text and text[:20],
)
def test_an_answer_is_judged_and_its_mistake_is_named(
    verdict: str, name: str, ours: str, theirs: str, word: str, tmp_path: Path
) -> None:
    """What is said of the worked answer with one change in the function of this name."""
    (exercise,) = [e for e in EXERCISES if e.name == name]
    before, start, rest = answers_file(exercise.sheet).read_text().partition(f"def {name}(")
    assert ours in rest
    file = tmp_path / "answers.py"
    file.write_text(before + start + rest.replace(ours, theirs, 1))
    found = judge(exercise, runpy.run_path(str(file))[name])
    assert found.verdict == verdict, found.why
    assert word in found.why


@pytest.mark.parametrize("style", STYLES)
def test_another_style_is_right(style: str) -> None:
    (exercise,) = [e for e in EXERCISES if e.name == style.partition("__")[0]]
    assert judge(exercise, getattr(other_styles, style)) == Outcome("right")


def test_the_problem_of_sheet_3_is_the_one_that_the_check_gives() -> None:
    """Unpacking it and `_replace` work in both; sheet 5 has it, too."""
    for sheet in (3, 5):
        assert checks_3.Problem._fields == answers_of(sheet)["Problem"]._fields


@pytest.mark.parametrize("copy", checks_5.COPIES)
def test_a_copy_with_a_mistake_is_silent_and_ends_elsewhere(copy: str) -> None:
    """Both losses fall, from the first passes to the last; only the result tells."""
    problem = answers_5.toy()
    run = answers_5.watch(checks_5.COPIES[copy], problem)
    for loss, passes in ((problem.L_P, run.lower), (problem.L_D, run.upper)):
        values = [float(loss(*at)) for at in passes]
        assert sum(values[-4:]) < 0.9 * sum(values[:4])
    right = answers_5.watch(checks_5.ALL["the right Algorithm 1"], answers_5.toy()).theta_P
    assert 1e-6 < (run.theta_P - right).abs().max() < 1


# --- the command ----------------------------------------------------------------------------------


def command(file: Path, seed: int, place: Path) -> "subprocess.CompletedProcess[str]":
    names = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, FOLDER / "check.py", "--seed", str(seed), file]
    return subprocess.run(line, env=names, capture_output=True, text=True, cwd=place)


@pytest.mark.parametrize("sheet", check.SHEETS)
def test_the_command_finds_answers_right_from_any_folder_with_any_seed(
    sheet: int, tmp_path: Path
) -> None:
    done = command(answers_file(sheet), 7, tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_seed_of_the_teachers_own_changes_the_numbers(tmp_path: Path) -> None:
    """They are in what is said of a wrong answer."""
    file = tmp_path / "mine.py"
    file.write_text("def fisher_product(G, x, lam): return G[0]")
    said = [command(file, seed, tmp_path).stdout for seed in (0, 7)]
    assert said[0] != said[1] and all("should with" in text for text in said)


def test_a_verdict_is_told_for_each_exercise_and_in_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A remark is counted apart, and passes."""
    name, ours, theirs, word = wrong_answers.REMARKS[0]
    file = tmp_path / "answers.py"
    file.write_text(answers_file(1).read_text().replace(ours, theirs, 1))
    assert check.main(file) == 0
    said = capsys.readouterr().out
    assert re.search(rf"{name} +right, but: .*{word}", said)
    assert "4 of 5 right, 1 more right with a remark" in said
    half = "def fisher_product(G, x, lam): return x\ndef eq_7(G, lam): raise NotImplementedError\n"
    file.write_text(half)
    assert check.main(file) == 1
    verdicts = re.findall(r"(?m)^\S+ +(\w+) +(right|wrong|to do)", capsys.readouterr().out)
    assert verdicts == [("eq_7", "to do"), ("fisher_product", "wrong")]


@pytest.mark.parametrize("text", [None, "x = 1\n", "def eq_7(G, lam:\n"])
def test_a_file_that_cannot_be_used_is_named(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is missing, has no exercise, or is not Python."""
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    assert check.main(file) == 2
    assert str(file) in capsys.readouterr().err


# --- blanks ---------------------------------------------------------------------------------------


def test_a_blank_takes_out_what_is_marked_and_nothing_else(blanks: Path) -> None:
    """Each line of a file with blanks is one of the full file, or says whose turn it is.

    Links lead from a folder that is one deeper.
    """
    made = sorted(blanks.glob("*.py"))
    assert len(made) >= 8  # five sheets, three notebooks
    for path in made:
        folder = FOLDER if path.stem.startswith("sheet") else FOLDER.parent
        full = (folder / path.name.replace("sheet", "answers")).read_text().splitlines()
        text = path.read_text()
        for link in re.findall(r"\]\((\.\.[^)#]+)", text):
            assert (FOLDER.parent / "blanks" / link).resolve().exists(), link
        lines = text.replace("](../../", "](../").splitlines()
        new = [line.strip() for line in lines if line not in full]
        assert new and "<details>" not in text  # where a notebook has its answers
        for line in new:
            assert line.startswith(("# Your turn: ", "raise NotImplemented", "# *Write your")), line
        ast.parse(text)
    for path in blanks.glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert cells == blank.cells(path.with_suffix(".py").read_text())
        assert not any(cell.get("outputs") for cell in cells)


def test_work_is_never_written_over(tmp_path: Path) -> None:
    blank.write(tmp_path)
    mine = tmp_path / "sheet_1.py"
    mine.write_text("# my work\n")
    (tmp_path / "sheet_2.py").unlink()
    blank.write(tmp_path)
    assert mine.read_text() == "# my work\n"
    assert (tmp_path / "sheet_2.py").exists()


@pytest.mark.parametrize("text", ["# blank: x\ny = 1\n", "y = 1\n# end of blank\n"])
def test_a_mark_without_its_partner_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="mark"):
        blank.with_blanks(text)


# --- the text -------------------------------------------------------------------------------------


@EACH
def test_the_text_asks_for_the_function_and_shows_what_it_gives(exercise: Exercise) -> None:
    answers = answers_file(exercise.sheet)
    section = (FOLDER / f"sheet_{exercise.sheet}.md").read_text().split("\n## ")[exercise.k]
    (asked,) = re.findall(r"```python\n(.*?) \.\.\.\n```", section, re.S)
    assert asked.startswith(f"def {exercise.name}(")
    assert re.sub(r"\s", "", asked) in re.sub(r"\s", "", answers.read_text())
    names = runpy.run_path(str(answers)) | {"torch": torch}
    (output,) = re.findall(r"```pycon\n(.*?)```", section, re.S)
    case = doctest.DocTestParser().get_doctest(output, names, exercise.name, None, None)
    result = doctest.DocTestRunner().run(case)
    assert result.attempted > 0 and result.failed == 0
