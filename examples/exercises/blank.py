"""Makes the files that students fill in, out of the full ones: sheets and notebooks with blanks.

    make blanks                                   # into examples/blanks/
    python examples/exercises/blank.py --out DIR

A blank is what stands between two comments in a full file, such as

    # blank: lines 6 and 7
    grad_P = ...
    # end of blank

In its place the student finds a line that says what belongs there. The folded answers below the
questions of a notebook are taken out as well. The results are not under version control, because
they follow from the full files, and because students write into them. A file that is already there
is never written over: it may hold somebody's work.
"""

import argparse
import json
import re
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE.parent
BLANK = re.compile(
    r"^(?P<indent> *)# blank: (?P<task>.+)\n(?P<body>(?:.*\n)*?)(?P=indent)# end of blank\n",
    re.MULTILINE,
)
FOLDED = re.compile(r"# <details><summary>Answers</summary>\n(?:#.*\n)*?# </details>\n")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def with_blanks(text: str) -> str:
    """The text of a full file without what is between its marks, and without folded answers.

    >>> print(with_blanks("# blank: double x\\nx = 2 * x\\n# end of blank\\n"), end="")
    # Your turn: double x
    raise NotImplementedError("double x")
    """
    text = FOLDED.sub("# *Write your answers here.*\n", text)
    text = text.replace("](../", "](../../")  # links of notebooks, which lie a folder deeper here
    text = BLANK.sub(blank, text)
    if "# blank:" in text or "# end of blank" in text:
        raise ValueError("a mark has no partner: each `# blank: ...` needs its `# end of blank`")
    return text


def blank(found: re.Match[str]) -> str:
    """What a student finds in place of a marked part."""
    indent = found["indent"]
    task = found["task"]
    text = json.dumps(task, ensure_ascii=False)
    return f"{indent}# Your turn: {task}\n{indent}raise NotImplementedError({text})\n"


def cells(text: str) -> list[dict[str, object]]:
    """The cells of a script in percent format, as a notebook holds them."""
    found = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        lines = body.strip().splitlines()
        if "[markdown]" in head:
            prose = [line.removeprefix("#").removeprefix(" ") for line in lines]
            found.append(cell("markdown", prose))
        else:
            code = cell("code", lines)
            found.append(code | {"outputs": [], "execution_count": None})
    return found


def cell(kind: str, lines: list[str]) -> dict[str, object]:
    """A cell without outputs."""
    return {"cell_type": kind, "metadata": {}, "source": "\n".join(lines)}


def notebook(text: str) -> str:
    """A script in percent format as an .ipynb without outputs."""
    about = {"kernelspec": KERNEL}
    content = {"cells": cells(text), "metadata": about, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def files() -> dict[str, str]:
    """Name and text of each file with blanks: sheets as .py, notebooks as .py and .ipynb."""
    made = {}
    for path in sorted(HERE.glob("answers_*.py")):
        made[path.name.replace("answers", "sheet")] = with_blanks(path.read_text())
    for path in sorted(EXAMPLES.glob("[0-9]_*.py")):
        text = path.read_text()
        if BLANK.search(text):
            made[path.name] = with_blanks(text)
            made[f"{path.stem}.ipynb"] = notebook(made[path.name])
    return made


def write(out: Path) -> None:
    """Write the files that are not there yet, and say of each what was done."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        path = out / name
        if not path.exists():
            path.write_text(text)
            print(f"{path}: written")
        elif path.read_text() == text:
            print(f"{path}: is there")
        else:
            print(f"{path}: is there and differs, left as it is (rename it to get a new one)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the files that students fill in.")
    parser.add_argument("--out", type=Path, default=EXAMPLES / "blanks")
    write(parser.parse_args().out)
