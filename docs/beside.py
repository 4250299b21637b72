"""Puts code into math.md, and makes paper_beside_code.html of it: formulas left, code right.

`python docs/beside.py` renews both files; with --check it says whether one is out of date.

A line `<!-- code: PLACE -->` of math.md says which code stands in the block below it. A place is

    mfac.py:extend                          a function or class, without its docstring
    hypergradients.py:exact.inverse         a method, or a function inside of a function
    bisslight.py:algorithm_1 arguments      its first lines, up to the docstring
    bisslight.py:algorithm_1 l.6            its statements that carry the mark `l.6` in a comment
    bisslight.py:algorithm_1 l.6 to l.9     all lines from the first mark to the last one

It never is the number of a line, so the page changes only where a function changes that it shows.
The concordance, which says where each part of the paper is, comes from beside.toml.
"""

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = HERE / "paper_beside_code.html"
MATH = HERE / "math.md"

MARK = r"(?:l\.\d+|arguments)"
PLACE = re.compile(rf"([\w/]+\.py):([\w.]+)(?: ({MARK})(?: to ({MARK}))?)?")
CODE = re.compile(r"(?m)^<!-- code: (.+) -->\n```python\n((?:.*\n)*?)```\n")


# --- Code by name ------------------------------------------------------------------------------


class Lines(NamedTuple):
    """Lines of a file, from 1; both ends belong to it."""

    first: int
    last: int


def read(path: str) -> str:
    """The text of a file of this program."""
    return (ROOT / path).read_text()


def excerpt(place: str) -> str:
    """The code at a place; SystemExit names what is not there."""
    match = PLACE.fullmatch(place)
    if match is None:
        raise SystemExit(f"{place!r} is no place: see docs/beside.py")
    path, name, first, last = match.groups()
    text = read(path)
    node = find(ast.parse(text), name)
    if node is None:
        raise SystemExit(f"{path} has no {name}, which docs/ names")
    lines = text.splitlines()
    if first is None:
        shown = whole(node)
    elif first == "arguments":
        shown = whole(node)[:1]
    elif last is None:
        shown = marked(node, lines, first)
    else:
        start = marked(node, lines, first)
        end = marked(node, lines, last)
        shown = [Lines(start[0].first, end[-1].last)] if start and end else []
    if not shown:
        raise SystemExit(f"{path}:{name} has no mark {place.split(' ', 1)[1]}: mark it there")
    return "\n".join(cut(lines, shown))


def find(tree: ast.AST, name: str) -> ast.stmt | None:
    """The function, class or variable `name`, or `outer.inner`, in a module."""
    here: Any = tree  # a module, class or function: it has a body
    for part in name.split("."):
        found = [node for node in here.body if part in names(node)]
        if not found:
            return None
        here = found[0]
    node: ast.stmt = here
    return node


def names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return []


def end(node: ast.stmt) -> int:
    """The last line of a statement."""
    return node.end_lineno or node.lineno


def whole(node: ast.stmt) -> list[Lines]:
    """A function or class without its docstring; any other statement as it is."""
    body = getattr(node, "body", [])
    if len(body) < 2 or ast.get_docstring(node) is None:  # type: ignore[arg-type]
        return [Lines(node.lineno, end(node))]
    return [Lines(node.lineno, body[0].lineno - 1), Lines(body[1].lineno, end(node))]


def marked(node: ast.stmt, lines: Sequence[str], mark: str) -> list[Lines]:
    """The statements inside of `node` with a mark in a comment, beside them or directly above."""
    found = []
    for statement in ast.walk(node):
        if not isinstance(statement, ast.stmt) or statement is node:
            continue
        start = statement.lineno
        while lines[start - 2].strip().startswith("#"):
            start -= 1
        last = end(statement)
        body = getattr(statement, "body", None)
        if body:  # of a loop, its first line
            last = body[0].lineno - 1
            while lines[last - 1].strip().startswith("#"):
                last -= 1
        comments = [line[line.find("#") :] for line in lines[start - 1 : last] if "#" in line]
        if any(re.search(re.escape(mark) + r"(?!\d)", comment) for comment in comments):
            found.append(Lines(start, last))
    return sorted(found)


def cut(lines: Sequence[str], shown: Sequence[Lines]) -> list[str]:
    """The lines shown, moved to the left; `...` stands where others are left out between them."""
    kept: list[str] = []
    before = shown[0].first - 1
    for part in shown:
        left_out = [line for line in lines[before : part.first - 1] if line.strip()]
        docstring = any('"""' in line for line in left_out)
        if left_out and not docstring:
            indent = len(left_out[0]) - len(left_out[0].lstrip())
            kept.append(" " * indent + "...")
        kept += lines[part.first - 1 : part.last]
        before = part.last
    text = textwrap.dedent("\n".join(kept))
    text = re.sub(r"  # ?(type|noqa|fmt)\b.*", "", text)  # remarks to tools
    return re.sub(r"\n{2,}", "\n\n", text).splitlines()


def with_code(text: str) -> str:
    """A Markdown text with each of its blocks of code as the program has it now."""

    def fresh(match: re.Match[str]) -> str:
        place = match[1]
        return f"<!-- code: {place} -->\n```python\n# {place}\n{excerpt(place)}\n```\n"

    return CODE.sub(fresh, text)


# --- Markdown and formulas to HTML ---------------------------------------------------------------


def formula(state: StateInline, silent: bool) -> bool:
    """$...$ within a line, for markdown-it: takes it before anything else can read it."""
    if state.src[state.pos] != "$":
        return False
    close = state.src.find("$", state.pos + 1)
    if close < 0:
        return False
    if not silent:
        state.push("formula", "math", 0).content = state.src[state.pos + 1 : close]
    state.pos = close + 1
    return True


def mathml(latex: str, display: str = "inline") -> str:
    """A formula as MathML; SystemExit if a command in it is not understood."""
    out: str = convert(latex.strip(), display=display)
    unknown = re.search(r"\\\w+", out)
    if unknown:
        raise SystemExit(f"{unknown[0]} cannot be typeset: {latex}")
    # the bars of a norm: LaTeX keeps their size, a browser would stretch the left one alone
    return re.sub(r"<mo[^>]*>(&#x02016;|&#x2016;|‖)</mo>", '<mo stretchy="false">‖</mo>', out)


def show_formula(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """A formula within a line."""
    return mathml(tokens[at].content)


def show_fence(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """A block: a formula, or anything else as it is."""
    if tokens[at].info == "math":
        return f'<div class="formula">{mathml(tokens[at].content, "block")}</div>\n'
    return f"<pre>{escape(tokens[at].content)}</pre>\n"


def renderer() -> MarkdownIt:
    """Markdown with tables and formulas to HTML."""
    markdown = MarkdownIt("commonmark").enable("table")
    markdown.inline.ruler.before("escape", "formula", formula)
    markdown.add_render_rule("formula", show_formula)
    markdown.add_render_rule("fence", show_fence)
    return markdown


MARKDOWN = renderer()


# --- The page ------------------------------------------------------------------------------------


def anchor(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def place_id(place: str) -> str:
    """The anchor of a piece of code on the page."""
    return re.sub(r"[^\w.]+", "-", place)


def listing(place: str, code: str, anchored: bool = True) -> str:
    """Code as HTML under the name of its place; comments are set apart."""
    lines = []
    for line in code.rstrip("\n").split("\n"):
        comment = re.search(r"(?:^ *|  )(#.*)", line)
        start = comment.start(1) if comment else len(line)
        text = escape(line[:start])
        if comment:
            text += f"<i>{escape(comment[1])}</i>"
        indent = len(line) - len(line.lstrip())
        lines.append(f'<span style="--i:{indent}">{text}</span>')
    name = f' id="{place_id(place)}"' if anchored else ""
    path = place.partition(":")[0]
    title = f'<figcaption><a href="../{path}">{escape(place)}</a></figcaption>'
    return f"<figure{name}>{title}<pre>{''.join(lines)}</pre></figure>\n"


class Row(NamedTuple):
    """What stands side by side."""

    text: str  # Markdown
    places: list[str]


def rows(section: str) -> list[Row]:
    """A section, cut before each paragraph that begins in bold and has code below it."""
    parts = CODE.split(section)  # text, place, code, text, place, code ..., text
    found = [Row("", [])]
    for text, place in zip(parts[0::3], parts[1::3], strict=False):
        before, lead, after = text.rpartition("\n**")
        row = found[-1]
        if not row.places and not before.strip():
            found[-1] = Row(row.text + text, [place])
        elif lead:
            found[-1] = Row(row.text + before, row.places)
            found.append(Row(lead + after, [place]))
        else:
            found[-1] = Row(row.text + text, [*row.places, place])
    found[-1] = Row(found[-1].text + parts[-1], found[-1].places)
    return found


def show_section(title: str, text: str, lines: dict[str, list[str]]) -> str:
    """A section of math.md: its rows side by side; `lines` has the places of l.1 to l.17."""
    out = f'<h2 id="{anchor(title)}">{escape(title)}</h2>\n'
    for row in rows(text):
        left = MARKDOWN.render(row.text)
        if re.search(r"(?m)^\| l\.1 \|", row.text):
            left = algorithm(row.text, lines)
        right = "".join(listing(place, excerpt(place)) for place in row.places)
        kind = "row" if row.places else "row alone"
        out += f'<section class="{kind}"><div>{left}</div><div>{right}</div></section>\n'
    return out


def algorithm(text: str, lines: dict[str, list[str]]) -> str:
    """The table of Algorithm 1 with a third column: the code of each line."""
    before, first, rest = text.partition("| l.1 |")
    table, _, after = (first + rest).partition("\n\n")
    out = MARKDOWN.render(before.rpartition("\n\n")[0]) + '<div class="algorithm">\n'
    for row in table.splitlines():
        mark, paper = [cell.strip() for cell in row.strip("|").split("|")]
        if mark not in lines:
            raise SystemExit(f"beside.toml has no place for {mark}")
        code = "".join(listing(place, excerpt(place), False) for place in lines[mark])
        words = MARKDOWN.renderInline(paper)
        out += f'<div class="line" id="{mark}"><b>{mark}</b><p>{words}</p><div>{code}</div></div>\n'
    return out + "</div>\n" + MARKDOWN.render(after)


def concordance(shown: Sequence[str]) -> str:
    """The rows of beside.toml. A place is linked to its code on this page, if that is `shown`."""
    out = ""
    for title, entries in tomllib.loads(read("docs/beside.toml")).items():
        out += f"<h3>{title}</h3>\n<table class=concordance>\n"
        for key, (words, *places) in entries.items():
            links = ", ".join(link(place, shown) for place in places) or "not here"
            name = MARKDOWN.renderInline(key)
            out += f"<tr><th>{name}<td>{MARKDOWN.renderInline(words)}<td>{links}\n"
        out += "</table>\n"
    return out


def link(place: str, shown: Sequence[str]) -> str:
    """A place as a link: to this page, or to the file."""
    if PLACE.fullmatch(place):
        excerpt(place)  # is it there?
        target = f"#{place_id(place)}" if place in shown else f"../{place.partition(':')[0]}"
        return f'<a href="{target}">{escape(place)}</a>'
    if not (ROOT / place.partition("#")[0]).exists():
        raise SystemExit(f"{place} is not there, which docs/beside.toml names")
    target = place.removeprefix("docs/") if place.startswith("docs/") else f"../{place}"
    return f'<a href="{target}">{escape(place)}</a>'


def sections(text: str) -> dict[str, str]:
    """The sections of math.md by their titles; that before the first one is called ``."""
    parts = re.split(r"(?m)^## (.*)\n", text)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def page(math: str) -> str:
    """The whole page, from the text of math.md and from beside.toml."""
    entries = tomllib.loads(read("docs/beside.toml"))
    lines = {mark: places for mark, (_, *places) in entries["Lines of Algorithm 1"].items()}
    found = sections(math)
    front = found.pop("").partition("\n")[2]  # without the title
    body = f'<section class="front">{MARKDOWN.render(front)}</section>\n'
    for title, text in found.items():
        body += show_section(title, text, lines)
    shown = [match[1] for match in CODE.finditer(math)]
    links = "".join(f'<a href="#{anchor(title)}">{escape(title)}</a> ' for title in found)
    template = read("docs/beside.html")
    out = template.replace("LINKS", links).replace("BODY", body)
    return out.replace("CONCORDANCE", concordance(shown))


def made() -> dict[Path, str]:
    """Both files as they should be."""
    math = with_code(MATH.read_text())
    return {MATH: math, PAGE: page(math)}


if __name__ == "__main__":
    for path, text in made().items():
        stale = not path.exists() or path.read_text() != text
        if stale and "--check" in sys.argv:
            raise SystemExit(f"docs/{path.name} is out of date: make page")
        path.write_text(text)
