"""Makes paper_beside_code.html: docstrings and comments left, the code they are about right.

`python docs/beside.py` writes the page; with --check, it says whether the page is out of date. On
top is a concordance: where each equation, line, table and section of the paper is. Its rows are
in beside.toml, its places are the marks in the sources, such as `Eq. 7`, `l.6` or `App. C.3`.
"""

import inspect
import re
import sys
import tokenize
import tomllib
from html import escape
from itertools import pairwise
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parent.parent
SHOWN = [
    f"{name}.py" for name in ("bisslight", "mfac", "hypergradients", "lora", "mae", "ijepa", "data")
]
MARK = r"\bEq\. \d+|\bl\.\d+|\b(?:tab|fig):\w+|\bSec\. [\d.]*\d|\bApp\. [A-D](?:\.\d)*"
NAME = r'(?m)^(?:    )?(?:class|def) (\w+)|^(\w+)(?:: .*)? = |^    (\w+): .* = .*\n    """'
Cut = dict[int, tuple[list[str], str]]  # first line -> docstring and comments, numbered code


def places(sources: dict[str, str], cuts: dict[str, Cut]) -> dict[str, list[str]]:
    """Links to where each mark and each "file:name" is. `lines 10 and 13` is l.10 and l.13."""
    found: dict[str, list[str]] = {}
    for path, source in sources.items():
        name, at = "", re.finditer(NAME, source)  # what a line belongs to, and where that begins
        begin = {source.count("\n", 0, m.start()) + 1: m[m.lastindex or 0] for m in at}
        for n, line in enumerate(source.split("\n"), 1):
            text = re.sub(r"\b[Ll]ines? (?=\d)", "l.", line)
            text = re.sub(r"(Eq\. |l\.)(\d+)(?:,| and| to) (?=\d)", r"\1\2 \1", text)
            text = re.sub(r"(?:App\. )?\b([A-D]\.\d)", r"App. \1", text)  # App. C.1, C.2
            name = begin.get(n, "" if line[:1] == "#" else name)
            keys = re.findall(MARK, text) + [f"{path}:{name}"] * (n in begin)
            piece = max(start for start in cuts.get(path, [0]) if start <= n)
            link = f"#{path}.{piece}" if piece else f"../{path}#L{n}"
            for key in dict.fromkeys(keys):
                found.setdefault(key, []).append(f'<a href="{link}">{path}:{n}</a> {name}'.strip())
    return found


def concordance(found: dict[str, list[str]]) -> str:
    """The rows of beside.toml with their places; SystemExit names what has none."""
    out, missing = "", []
    for title, rows in tomllib.loads((HERE / "beside.toml").read_text()).items():
        out += f"<h2>{title}</h2>"
        for key, (words, *more) in rows.items():
            missing += [mark for mark in more or [key] if mark not in found]
            at = ", ".join(link for mark in (key, *more) for link in found.get(mark, []))
            out += f'<section id="{key.replace(" ", "")}"><b>{key}</b><p>{words}<p>{at}</section>\n'
    if missing:
        raise SystemExit(f"no place in the sources for {', '.join(missing)}: mark it there")
    return out


def pieces(source: str) -> Cut:
    """A module, cut where a docstring or comment speaks about what follows; by first line."""
    source = re.sub(r"  # ?(type|noqa|fmt)\b.*", "", source)  # remarks to tools
    lines = ["", *source.split("\n")]
    prose: dict[int, list[str]] = {1: []}
    above: list[str] = []  # comments on lines of their own
    start, fresh, decorated = 1, True, False  # of the statement that is being read
    tokens = tokenize.generate_tokens(iter(source.splitlines(True)).__next__)
    for kind, text, (n, column), (last, _), _ in tokens:
        if kind == tokenize.COMMENT:
            lines[n] = lines[n][:column].rstrip() or "#"
            (above if fresh else prose.setdefault(start, [])).append(text.strip("# "))
        elif kind == tokenize.NEWLINE:
            fresh = True
        elif fresh and kind == tokenize.STRING:  # it speaks about the statement before it
            prose.setdefault(start, []).append(inspect.cleandoc(text.strip('"')))
            last += not lines[last + 1]  # a blank line after it goes, too
            lines[n : last + 1] = ["#"] * (last + 1 - n)
        elif fresh and text.strip():  # the first word of a statement
            start, fresh, decorated = start if decorated else n, False, text == "@"
            if above or (lines[n - 1] in "#" and (column == 0 or text in ("def", "@"))):
                prose[n], above = above, []
    cut = {}
    for a, b in pairwise([*sorted(prose), len(lines)]):
        code = "\n".join(f"{n}\t{lines[n]}" for n in range(a, b) if lines[n] != "#")
        cut[a] = (prose[a], re.sub(r"\A(\d+\t\n)+|((^|\n)\d+\t)+\Z", "", code))
    return cut


def block(text: str) -> str:
    """Lines that keep their indentation; one that is too long goes on further to the right."""
    lines = re.findall(r"(?m)^(?:(\d+)\t)?( *)(.*)$", text)
    out = [f'<span data-n="{n}" style="--i:{len(i)}">{i}{escape(x)}</span>' for n, i, x in lines]
    return f"<pre>{''.join(out)}</pre>" if text else ""


def paragraphs(text: str) -> str:
    """A docstring or comment as HTML: paragraphs, and formulas, tables and arguments as lines."""
    parts = [p if p[0] in " >" else re.sub(r"\n {8,}", " ", p) for p in text.split("\n\n")]
    out = [block(p) if re.search("^[ >]", p, re.M) else f"<p>{escape(p)}</p>" for p in parts]
    text = re.sub("<p>--- (.*?) ?-*</p>", r"<h3>\1</h3>", "".join(out))
    text = re.sub(r"\b(Eq\.|l\.|App\.) ?([A-D\d](?:\.?\d)*)", r'<a href="#\1\2">\g<0></a>', text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def page() -> str:
    """The whole page."""
    files = [ROOT / name for name in SHOWN]
    for room in ("", "support/", "extras/", "experiments/"):
        files += sorted(ROOT.glob(f"{room}*.py"))
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    cuts, code = {name: pieces(sources[name]) for name in SHOWN}, ""
    for name in SHOWN:
        code += f'<h2 id="{name}">{name}</h2>'
        for n, (prose, text) in cuts[name].items():
            cells = f"<div>{''.join(map(paragraphs, prose))}</div>{block(text)}"
            code += f'<div class="row" id="{name}.{n}">{cells}</div>\n'
    top = concordance(places(sources, cuts))
    return (HERE / "beside.html").read_text().replace("CONCORDANCE", top).replace("CODE", code)


if __name__ == "__main__":
    kept, made = HERE / "paper_beside_code.html", page()
    if "--check" in sys.argv and kept.read_text() != made:
        raise SystemExit(f"docs/{kept.name} is out of date: make page")
    kept.write_text(made)
