"""Makes docs/index.html of examples/one_page.py and docs/page.md: the text left, its code right.

`python docs/page.py` renews the page, and the handout. In page.md, a line `<!-- code: WORDS -->`
begins a text that stands beside a piece of the program: from the first line with these words that
was not shown yet, up to the next such mark. So each line is on the page once, in its order.
`<!-- text -->` begins a text without code; a picture in it stands to its right. A text under a
heading of the third rank is folded. Pictures are put into the page, which loads nothing from
anywhere, and the script of the valley behind its picture.
"""

import posixpath
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

FILES = "../"  # base address of the files that the page names; pages.yml puts the public one
HERE = Path(__file__).parent
PROGRAM = HERE.parent / "examples/one_page.py"
TEXT = HERE / "page.md"
PAGE = HERE / "index.html"
HANDOUT = HERE / "handout.md"
HANDOUT_PAGE = HERE / "handout.html"
ABOUT = (
    "BiSSLight lets the labels of a small task steer the end of pretraining. "
    "One page explains the method, with a program of 200 lines that does all of it."
)
HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<meta name="description" content="{ABOUT}">
<meta property="og:title" content="TITLE">
<meta property="og:description" content="{ABOUT}">
<meta property="og:image" content="{FILES}docs/card.png?raw=true">
<style>
STYLE</style>
</head>
<body>
"""
SENTENCE = re.compile(r"<math[^>]*>(?:(?!</math>).)*</math>[,.;:?)]+")  # a formula at an end
MARK = re.compile(r"(?m)^<!-- (?:code: (.+)|text) -->\n")
PICTURE = re.compile(r"(?m)^!\[.*\]\((.*)\)\n(?:\*(.*)\*\n)?")  # and its caption, in italics
ELSEWHERE = re.compile(r"(?m)^<!-- not on the page -->\n.*\n\n")  # a paragraph
HEADING = re.compile(r"(?m)^(##+) (.*)\n")


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
        columns = r"\S+(?: \S+)*"  # stay whole where a line is too long
        text = re.sub(columns, r'<span class="whole">\g<0></span>', escape(content))
        lines = re.sub(r"(.*)\n", r'<span class="line" style="--i:0">\1</span>', text)
        return f"<pre>{lines}</pre>\n"
    numbered = re.fullmatch(r"(.*)\\qquad \(\\text\{(.*)\}\)\s*", content, re.S)
    latex, name = numbered.groups() if numbered else (content, "")
    shown = mathml(latex, "block")
    return f'<div class="formula"><div>{shown}</div><span>{name}</span></div>\n'


def show_image(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """A picture beside page.md, put into the page."""
    return (HERE / str(tokens[at].attrs["src"])).read_text()


def show_link(self: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """A link; page and handout lie side by side, any other file has the base address of all."""
    link = str(tokens[at].attrs["href"]).replace(f"{PAGE.name}#", "#")
    link = link.replace(HANDOUT.name, HANDOUT_PAGE.name)
    if not re.match(rf"https:|#|{HANDOUT_PAGE.name}$", link):
        link = FILES + posixpath.normpath(posixpath.join("docs", link))
    return f'<a href="{escape(link)}">'


def renderer() -> MarkdownIt:
    """Markdown with tables and formulas to HTML."""
    markdown = MarkdownIt("commonmark").enable("table")
    markdown.inline.ruler.before("escape", "formula", formula)
    markdown.add_render_rule("formula", show_formula)
    markdown.add_render_rule("fence", show_fence)
    markdown.add_render_rule("image", show_image)
    markdown.add_render_rule("link_open", show_link)
    return markdown


def anchor(title: str) -> str:
    """What a link to a heading ends with."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def titled(found: re.Match[str]) -> str:
    """A heading that can be linked to, and is a link to itself."""
    name = anchor(found[1])
    return f'<h2 id="{name}"><a href="#{name}">{found[1]}</a></h2>'


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
    parts = MARK.split(
        ELSEWHERE.sub("", text)
    )  # text, words or None, text, words or None, ... text
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


def contents(text: str) -> str:
    """The headings of the second rank, as links."""
    titles = [title for rank, title in HEADING.findall(text) if rank == "##"]
    items = [f'<li><a href="#{anchor(title)}">{html_in_line(title)}</a></li>' for title in titles]
    return f"<nav><ol>{''.join(items)}</ol></nav>\n"


def html_in_line(text: str) -> str:
    """A few words of Markdown as HTML."""
    return html(text).strip().removeprefix("<p>").removesuffix("</p>")


def picture(found: re.Match[str]) -> str:
    """A figure with its caption; the valley has its script behind it."""
    file, caption = found.groups()
    out = html_in_line(found[0].splitlines()[0])
    if caption:
        out += f"<figcaption>{html_in_line(caption)}</figcaption>"
    if file == "valley.svg":
        out += f"<script>\n{script()}</script>\n"
    return f'<figure class="picture">{out}</figure>\n'


def script() -> str:
    """valley.js without its comments and indents."""
    text = (HERE / "valley.js").read_text()
    return re.sub(r"(?m)^\s*(?://.*\n)?| // .*$", "", text)


def shown(piece: Piece, lines: list[str]) -> str:
    """A piece of the page: its code or, where it has none, its picture stands to the right."""
    found = PICTURE.search(piece.text)
    if piece.first is not None:
        code = "".join(lines[piece.first : piece.last])
        link = f"{FILES}{PROGRAM.relative_to(HERE.parent)}#L{piece.first + 1}"
        title = f'<a href="{link}">{PROGRAM.name}, from line {piece.first + 1}</a>'
        out = f"<div>\n{html(PICTURE.sub(picture, piece.text))}</div>\n"
        out += f"<figure><figcaption>{title}</figcaption><pre>{code}</pre></figure>\n"
    elif found:
        before, after = piece.text[: found.start()], piece.text[found.end() :]
        out = f"<div>\n{html(before)}</div>\n{picture(found)}<div>\n{html(after)}</div>\n"
    else:
        out = f"<div>\n{html(piece.text)}</div>\n"
    return f'<section class="row">\n{out}</section>\n'


def page(text: str, program: str) -> str:
    """The whole page."""
    lines = coloured(program)
    out, folded = begin("BiSSLight on one page"), False
    for piece in pieces(text, program):
        heading = HEADING.match(piece.text)
        if heading and folded:
            out, folded = out + "</details>\n", False
        if heading and heading[1] == "###":
            out, folded = out + f'<details id="{anchor(heading[2])}" class="folded">', True
            out += f"<summary>{heading[2]}</summary>\n"
            piece = piece._replace(text=piece.text[heading.end() :])
        out += shown(piece, lines).replace("<!-- contents -->\n", contents(text))
    return out + f"<footer>{edition()}</footer>\n</body>\n</html>\n"


def handout(text: str) -> str:
    """A page of formulas, to be printed."""
    body = f'<main class="handout">\n{html(text)}<p class="edition">{edition()}</p>\n</main>\n'
    return begin("BiSSLight, a handout") + body + "</body>\n</html>\n"


def begin(title: str) -> str:
    """The head of a page."""
    return HEAD.replace("TITLE", title).replace("STYLE", (HERE / "page.css").read_text())


def edition() -> str:
    """Version and date of the program, as CITATION.cff has them."""
    cited = (HERE.parent / "CITATION.cff").read_text()
    version, date = (
        re.search(rf"(?m)^{key}: (.*)$", cited) for key in ("version", "date-released")
    )
    assert version and date, "CITATION.cff: version or date-released is missing"
    return f"BiSSLight {version[1]}, {date[1]}"


def main() -> None:
    """Writes the page, and the handout."""
    PAGE.write_text(page(TEXT.read_text(), PROGRAM.read_text()))
    HANDOUT_PAGE.write_text(handout(HANDOUT.read_text()))


if __name__ == "__main__":
    main()
