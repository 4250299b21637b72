"""Says of each exercise in a file whether it is right, and if not, what is wrong.

    python examples/exercises/check.py examples/blanks/sheet_1.py

The file may have answers of several sheets. Each is compared with a computation of another kind
(`checks_1.py` to `checks_5.py`), not with the worked answer. "Right, but" is a right answer with a
remark. The exit status is 0 if all exercises that are in the file are right, with a remark or
without one, 1 if not, and 2 if the file cannot be used.

With `--seed N`, any whole number N, the checks draw other numbers.
"""

import argparse
import importlib
import re
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import witness
from witness import Wrong

HERE = Path(__file__).parent
SHEETS = (1, 2, 3, 4, 5)


class Exercise(NamedTuple):
    """An exercise: the k-th of a sheet, and the function that is asked for."""

    sheet: int
    k: int
    name: str

    def check(self, answer: Any) -> list[str]:
        """Wrong if the answer is not right, else remarks. The sheet's module is imported here."""
        module = importlib.import_module(f"checks_{self.sheet}")
        check: Callable[[Any], list[str]] = getattr(module, f"check_{self.name}")
        return check(answer)


class Outcome(NamedTuple):
    """What was found about an answer."""

    verdict: Literal["right", "right, but", "wrong", "to do"]
    why: str = ""


def exercises() -> list[Exercise]:
    """All exercises, in the order of the sheets: the functions check_NAME of checks_N.py."""
    found = []
    for sheet in SHEETS:
        text = (HERE / f"checks_{sheet}.py").read_text()
        names = re.findall(r"^def check_(\w+)", text, re.MULTILINE)
        for k, name in enumerate(names, 1):
            found.append(Exercise(sheet, k, name))
    return found


def judge(exercise: Exercise, answer: Any) -> Outcome:
    """Whether an answer is right."""
    try:
        remarks = exercise.check(answer)
    except NotImplementedError:
        return Outcome("to do")
    except Wrong as error:
        cause = error.__cause__
        return Outcome("wrong", str(error) + (where(cause, answer) if cause else ""))
    except Exception as error:  # whatever a student's function may raise
        why = f"{type(error).__name__}: {error}{where(error, answer)}"
        if "dtype" in str(error):
            why += "\n    The arguments are float64; a new tensor is float32 without `dtype=`."
        return Outcome("wrong", why)
    if remarks:
        return Outcome("right, but", "; ".join(remarks))
    return Outcome("right")


def where(error: BaseException, answer: Any) -> str:
    """The last line of the student's own file that led to an error."""
    own = getattr(getattr(answer, "__code__", None), "co_filename", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == own]
    if not frames:
        return ""
    return f"\n    line {frames[-1].lineno}: {frames[-1].line}"


def main(file: Path) -> int:
    """Check a file, print a line for each exercise in it; the exit status."""
    if not file.is_file():
        print(f"error: {file} is not there (`make blanks` makes the sheets)", file=sys.stderr)
        return 2
    try:
        answers = runpy.run_path(str(file))
    except Exception as error:  # a student's file may do anything
        where_in_file = "".join(traceback.format_exception_only(error)).strip()
        print(f"error: {file} cannot be read: {where_in_file}", file=sys.stderr)
        return 2
    asked = [exercise for exercise in exercises() if exercise.name in answers]
    if not asked:
        print(f"error: {file} has no function of an exercise", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    for exercise in asked:
        outcome = judge(exercise, answers[exercise.name])
        counts[outcome.verdict] += 1
        line = f"{exercise.sheet}.{exercise.k}  {exercise.name:22}{outcome.verdict}"
        print(f"{line}: {outcome.why}" if outcome.why else line)
    remarks = counts["right, but"]
    also = f", {remarks} more right with a remark" if remarks else ""
    print(f"{counts['right']} of {len(asked)} right{also}")
    return 0 if counts["right"] + remarks == len(asked) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check the answers in a file.")
    parser.add_argument("file", type=Path, help="such as examples/blanks/sheet_1.py")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the checks' numbers")
    arguments = parser.parse_args()
    witness.SEED = arguments.seed  # before the checks are imported: some draw numbers there
    sys.exit(main(arguments.file))
