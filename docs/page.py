"""Makes docs/index.html of examples/one_page.py and docs/page.md: the text left, its code right.

`python docs/page.py` renews the page. In page.md, a line `<!-- code: WORDS -->` begins a text that
stands beside a piece of the program: from the first line with these words that was not shown yet,
up to the next such mark. So each line is on the page once, in its order. `<!-- text -->` begins a
text without code. Pictures are put into the page, which loads nothing from anywhere.
"""

import base64
import re
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
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

HERE = Path(__file__).parent
PROGRAM = HERE.parent / "examples/one_page.py"
TEXT = HERE / "page.md"
PAGE = HERE / "index.html"
HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>BiSSLight on one page</title>
<style>
STYLE</style>
</head>
<body>
"""
SENTENCE = re.compile(r"<math[^>]*>(?:(?!</math>).)*</math>[,.;:?)]+")  # a formula at an end
MARK = re.compile(r"(?m)^<!-- (?:code: (.+)|text) -->\n")


# --- Text -----------------------------------------------------------------------------------------


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
    """A block: a formula, whose last words may be its number, or anything else as it is."""
    content = tokens[at].content
    if tokens[at].info != "math":
        return f"<pre>{escape(content)}</pre>\n"
    numbered = re.fullmatch(r"(.*)\\qquad \(\\text\{(.*)\}\)\s*", content, re.S)
    latex, name = numbered.groups() if numbered else (content, "")
    shown = mathml(latex, "block")
    return f'<div class="formula"><div>{shown}</div><span>{name}</span></div>\n'


def show_image(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """A picture beside page.md, put into the page."""
    path = HERE / str(tokens[at].attrs["src"])
    if path.suffix == ".svg":
        return path.read_text()
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(tokens[at].content)}" src="data:image/png;base64,{data}">'


def renderer() -> MarkdownIt:
    """Markdown with tables and formulas to HTML."""
    markdown = MarkdownIt("commonmark").enable("table")
    markdown.inline.ruler.before("escape", "formula", formula)
    markdown.add_render_rule("formula", show_formula)
    markdown.add_render_rule("fence", show_fence)
    markdown.add_render_rule("image", show_image)
    return markdown


def titled(found: re.Match[str]) -> str:
    """A heading with an anchor."""
    anchor = re.sub(r"\W+", "-", found[1].lower()).strip("-")
    return f'<h2 id="{anchor}">{found[1]}</h2>'


def html(text: str) -> str:
    """Markdown as HTML; a line of Algorithm 1, `l.6`, looks as it does in the code."""
    out: str = renderer().render(text)
    out = re.sub(r"<code>(l\.\d+)</code>", r'<b class="l">\1</b>', out)
    out = SENTENCE.sub(r'<span class="whole">\g<0></span>', out)
    out = re.sub(r"<h2>(.*?)</h2>", titled, out)
    return out.replace("M-FAC", "M\N{NON-BREAKING HYPHEN}FAC")


# --- Code -----------------------------------------------------------------------------------------


def coloured(program: str) -> list[str]:
    """The lines of a program as HTML; a long one is broken with the indent that it has."""
    out = highlight(program, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    lines = []
    plain = program.splitlines()
    for line, text in zip(out.splitlines(), plain, strict=True):
        line = re.sub(r"\bl\.\d+", r'<b class="l">\g<0></b>', line)
        indent = len(text) - len(text.lstrip())
        lines.append(f'<span class="line" style="--i:{indent}">{line}</span>')
    return lines


class Piece(NamedTuple):
    """A text and the lines of the program beside it: from the first one, up to the last one."""

    text: str
    first: int | None  # of the lines, from 0; None: no code
    last: int | None


def pieces(text: str, program: str) -> list[Piece]:
    """page.md cut at its marks; SystemExit names a mark that the rest of the program has not."""
    lines = program.splitlines()
    parts = MARK.split(text)  # text, words or None, text, words or None, ... text
    found = [Piece(parts[0], None, None)]
    at = 0
    for words, part in zip(parts[1::2], parts[2::2], strict=True):
        if words is None:
            found.append(Piece(part, None, None))
            continue
        later = [n for n in range(at, len(lines)) if words in lines[n]]
        if not later:
            raise SystemExit(f"docs/page.md: {words!r} is not in the rest of {PROGRAM.name}")
        found = ended(found, later[0])
        found.append(Piece(part, later[0], None))
        at = later[0] + 1
    return ended(found, len(lines))


def ended(found: list[Piece], last: int) -> list[Piece]:
    """The same pieces; that with an open end goes up to `last`."""
    return [
        piece._replace(last=last) if piece.first is not None and piece.last is None else piece
        for piece in found
    ]


def page(text: str, program: str) -> str:
    """The whole page."""
    lines = coloured(program)
    out = HEAD.replace("STYLE", (HERE / "page.css").read_text())
    for piece in pieces(text, program):
        if piece.first is None:
            out += f'<section class="alone">\n{html(piece.text)}</section>\n'
            continue
        code = "".join(lines[piece.first : piece.last])
        title = f"{PROGRAM.name}, from line {piece.first + 1}"
        out += f'<section class="row">\n<div>\n{html(piece.text)}</div>\n'
        out += f"<figure><figcaption>{title}</figcaption><pre>{code}</pre></figure>\n</section>\n"
    return out + "</body>\n</html>\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(TEXT.read_text(), PROGRAM.read_text()))


if __name__ == "__main__":
    main()
