"""Puts code into math.md, and makes paper_beside_code.html of it: formulas left, code right.

`python docs/beside.py` renews both files.

A line `<!-- code: PLACE -->` of math.md says which code stands in the block below it. A place is

    mfac.py:extend                          a function or class, without its docstring
    hypergradients.py:exact.inverse         a method, or a function inside of a function
    bisslight.py:algorithm_1 arguments      its first lines, up to the docstring
    bisslight.py:algorithm_1 l.6            its lines from the first to the last statement that has
                                            the mark `l.6` in a comment, beside it or directly above
    bisslight.py:algorithm_1 l.6 to l.9     from the first with `l.6` to the last with `l.9`

It never is the number of a line, so the page changes only where a function changes that it shows.
The concordance, which says where each part of the paper is, comes from beside.toml.
"""

import ast
import re
import textwrap
import tomllib
from collections.abc import Sequence
from functools import cache
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
    node = find(parse(text), name)
    if node is None:
        raise SystemExit(f"{path} has no {name}, which docs/ names")
    lines = text.splitlines()
    if first is None:
        shown = whole(node, lines)
    elif first == "arguments":
        shown = whole(node, lines)[:1]
    else:
        top = marked(node, lines, first)
        bottom = marked(node, lines, last or first)
        if not top or not bottom:
            raise SystemExit(
                f"no comment of {path}:{name} has the mark {first if not top else last}"
            )
        shown = [Lines(top[0].first, bottom[-1].last)]
    return "\n".join(cut(lines, shown))


@cache
def parse(text: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(text)


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


def whole(node: ast.stmt, lines: Sequence[str]) -> list[Lines]:
    """A function or class without its docstring; any other statement as it is."""
    body = getattr(node, "body", [])
    if len(body) < 2 or ast.get_docstring(node) is None:  # type: ignore[arg-type]
        return [Lines(node.lineno, end(node))]
    start = end(body[0]) + 1
    while not lines[start - 1].strip():
        start += 1
    return [Lines(node.lineno, body[0].lineno - 1), Lines(start, end(node))]


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
    """The lines shown, moved to the left, without remarks to tools."""
    kept: list[str] = []
    for part in shown:
        kept += lines[part.first - 1 : part.last]
    text = textwrap.dedent("\n".join(kept))
    return re.sub(r"  # ?(type|noqa|fmt)\b.*", "", text).splitlines()


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


@cache
def mathml(latex: str, display: str = "inline") -> str:
    """A formula as MathML; SystemExit if a command in it is not understood."""
    out: str = convert(latex.strip(), display=display)
    unknown = re.search(r"\\\w+|&(?!#x|lt;|gt;)", out)  # a command, or a column of an unknown table
    if unknown:
        raise SystemExit(f"{unknown[0]} cannot be typeset: {latex}")
    # the bars of a norm: LaTeX keeps their size, a browser would stretch the left one alone
    out = out.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')
    return out.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")  # HTML needs none


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


def html(text: str) -> str:
    """Markdown as HTML."""
    out: str = MARKDOWN.render(text)
    return out


def inline(text: str) -> str:
    """Markdown within a line as HTML."""
    out: str = MARKDOWN.renderInline(text)
    return out


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
    """A text (Markdown) and the code beside it, which on a narrow page comes within the text."""

    text: str  # up to the code
    places: list[str]
    more: str  # text below the code


def rows(section: str) -> list[Row]:
    """A section, cut before each paragraph that begins in bold and has code below it."""
    parts = CODE.split(section)  # text, place, code, text, place, code ..., text
    found: list[Row] = []
    for text, place in zip(parts[0::3], parts[1::3], strict=False):
        before, lead, after = text.rpartition("\n**")
        row = found.pop() if found else Row("", [], "")
        if lead:
            found.append(row._replace(more=row.more + before))
            found.append(Row(lead + after, [place], ""))
        else:
            found.append(row._replace(places=[*row.places, place], more=row.more + text))
    if not found:
        return [Row(section, [], "")]
    last = found.pop()
    found.append(last._replace(more=last.more + parts[-1]))
    return [row for row in found if row.places or row.more.strip()]


def show_section(title: str, text: str, lines: dict[str, list[str]]) -> str:
    """A section of math.md: its rows side by side; `lines` has the places of l.1 to l.17."""
    out = f'<h2 id="{anchor(title)}">{escape(title)}</h2>\n'
    for row in rows(text):
        more = html(row.more)
        if "| l.1 |" in row.more:
            more = algorithm(row.more, lines)
        if not row.places:
            out += f'<section class="alone">{html(row.text)}{more}</section>\n'
            continue
        code = "".join(listing(place, excerpt(place)) for place in row.places)
        cells = f"<div>{html(row.text)}</div><div>{code}</div><div>{more}</div>"
        out += f'<section class="row">{cells}</section>\n'
    return out


def algorithm(text: str, lines: dict[str, list[str]]) -> str:
    """The table of Algorithm 1 with a third column: the code of each line."""
    before, first, rest = text.partition("| l.1 |")
    table, _, after = (first + rest).partition("\n\n")
    out = html(before.rpartition("\n\n")[0]) + '<div class="algorithm">\n'
    for row in table.splitlines():
        mark, paper = [cell.strip() for cell in row.strip("|").split("|")]
        if mark not in lines:
            raise SystemExit(f"beside.toml has no place for {mark}")
        code = "".join(listing(place, excerpt(place), False) for place in lines[mark])
        words = inline(paper)
        out += f'<div class="line" id="{mark}"><b>{mark}</b><p>{words}</p><div>{code}</div></div>\n'
    return out + "</div>\n" + html(after)


def concordance(shown: Sequence[str], targets: dict[str, str]) -> str:
    """The rows of beside.toml. A place is linked to its code on this page, if that is `shown`.

    `targets` has the anchors of the equations and lines.
    """
    out = ""
    for title, entries in tomllib.loads(read("docs/beside.toml")).items():
        out += f"<h3>{title}</h3>\n<table class=concordance>\n"
        for key, (words, *places) in entries.items():
            links = ", ".join(link(place, shown) for place in places) or "not here"
            name = inline(key)
            if key in targets:
                name = f'<a href="#{targets[key]}">{name}</a>'
            out += f"<tr><th>{name}<td>{inline(words)}<td>{links}\n"
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


def check_complete(found: dict[str, str], equations: Sequence[str], lines: Sequence[str]) -> None:
    """SystemExit names an equation or line without its formula, and an equation without code."""
    for equation in equations:
        texts = [text for title, text in found.items() if title.startswith(f"{equation}:")]
        if not texts:
            raise SystemExit(f"math.md has no section on {equation}")
        if "```math" not in texts[0] or CODE.search(texts[0]) is None:
            raise SystemExit(f"math.md has no formula or no code for {equation}")
    for mark in lines:
        if re.search(rf"(?m)^\| {mark} \| .*\$", found["Algorithm 1"]) is None:
            raise SystemExit(f"math.md has no formula for {mark} of Algorithm 1")


def page(math: str) -> str:
    """The whole page, from the text of math.md and from beside.toml."""
    entries = tomllib.loads(read("docs/beside.toml"))
    lines = {mark: places for mark, (_, *places) in entries["Lines of Algorithm 1"].items()}
    found = sections(math)
    check_complete(found, list(entries["Equations"]), list(lines))
    front = found.pop("").partition("\n")[2]  # without the title
    body = f'<section class="front">{html(front)}</section>\n'
    for title, text in found.items():
        body += show_section(title, text, lines)
    shown = [match[1] for match in CODE.finditer(math)]
    targets = {title.partition(":")[0]: anchor(title) for title in found}
    targets |= {mark: mark for mark in lines}
    links = "".join(f'<a href="#{anchor(title)}">{escape(title)}</a> ' for title in found)
    template = read("docs/beside.html")
    out = template.replace("LINKS", links).replace("BODY", body)
    return out.replace("CONCORDANCE", concordance(shown, targets))


def made() -> dict[Path, str]:
    """Both files as they should be."""
    math = with_code(MATH.read_text())
    return {MATH: math, PAGE: page(math)}


def main() -> None:
    """Writes both files."""
    for path, text in made().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
