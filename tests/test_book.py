"""The book: what docs/ says is there is there, its links lead somewhere, and the page is new."""

import importlib.util
import re
from html import unescape
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from mfac import mfac

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MATH = (DOCS / "math.md").read_text()
WITH_FORMULAS = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
PROSE = [*sorted(ROOT.glob("*.md")), *WITH_FORMULAS, *sorted(ROOT.glob("experiments/*.md"))]


def script() -> ModuleType:
    """docs/page.py as a module."""
    spec = importlib.util.spec_from_file_location("page", DOCS / "page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = script()
TEXT = MAKER.TEXT.read_text()
PROGRAM = MAKER.PROGRAM.read_text()
PAGE = MAKER.PAGE.read_text()


# --- the page -----------------------------------------------------------------------------------


def plain(page: str) -> str:
    """HTML without formulas and tags, which each release of their makers may write otherwise."""
    text = re.sub(r"<math.*?</math>", "", page, flags=re.S)
    return unescape(re.sub(r"<[^>]+>", "", text))


def test_the_page_is_what_its_text_and_the_program_make_it() -> None:
    assert plain(MAKER.page(TEXT, PROGRAM)) == plain(PAGE), "docs/index.html: make page"


def code_shown() -> list[str]:
    """The pieces of code on the page."""
    return re.findall(r"<figure>.*?<pre>(.*?)</pre></figure>", PAGE, re.S)


def test_each_line_of_the_program_is_on_the_page_once() -> None:
    _, *lines = "".join(code_shown()).split('<span class="line"')
    assert [plain("<span" + line) for line in lines] == PROGRAM.splitlines()
    assert len((DOCS / "page.py").read_text().splitlines()) <= 200


def test_a_mark_that_the_program_has_not_is_named() -> None:
    changed = PROGRAM.replace("def eq_10", "def eq_11")
    with pytest.raises(SystemExit, match="def eq_10"):
        MAKER.page(TEXT, changed)


def test_the_page_has_eq_3_to_10_and_each_line_of_algorithm_1() -> None:
    in_order = [3, 4, 5, 6, 8, 9, 7, 10]  # what 7 and 10 leave out is seen in 8 and 9
    assert re.findall(r"<span>(Eq. \d+)</span>", PAGE) == [f"Eq. {n}" for n in in_order]
    marks = set(re.findall(r'<b class="l">(l\.\d+)</b>', "".join(code_shown())))
    assert marks == {f"l.{n}" for n in range(1, 18)}
    explained = set(re.findall(r"`(l\.\d+)`", TEXT))
    assert explained >= marks - {"l.3", "l.4", "l.11"}


FORMULAS = {"page.md": TEXT, "math.md": MATH}
LEAST = {"page.md": (10, 100), "math.md": (5, 60)}  # formulas on lines of their own, and in lines


@pytest.mark.parametrize("name", FORMULAS)
def test_each_formula_becomes_mathematics(name: str) -> None:
    """Well-formed, and with every letter of its source."""
    text = re.sub(r"```python.*?```", "", FORMULAS[name], flags=re.S)
    blocks = re.findall(r"```math\n(.*?)```", text, re.S)
    inline = re.findall(r"\$([^$]+)\$", re.sub(r"```.*?```", "", text, flags=re.S))
    least_blocks, least_inline = LEAST[name]
    assert len(blocks) >= least_blocks and len(inline) >= least_inline
    for latex in [*blocks, *inline]:
        tree = ElementTree.fromstring(MAKER.mathml(latex))
        typeset = "".join(tree.itertext())
        words = re.sub(r"\\(begin|end)\{\w+\}|\\text\{([^}]*)\}", r"\2", latex)
        letters = [letter for letter in re.sub(r"\\[a-zA-Z]+", "", words) if letter.isalnum()]
        assert not [letter for letter in letters if letter not in typeset + "EI"], latex
    if name == "page.md":
        assert PAGE.count('<math display="block">') == len(blocks)


def test_a_command_that_cannot_be_typeset_is_named() -> None:
    for latex in (r"\nonsense{x}", r"\begin{unknown} a &= b \end{unknown}"):
        with pytest.raises(SystemExit, match="cannot be typeset"):
            MAKER.mathml(latex)


def test_the_page_loads_nothing_and_its_links_lead_somewhere() -> None:
    assert not re.search(r"<link|<script|<iframe|@import|url\((?!#)", PAGE)
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)"', PAGE))
    ids = re.findall(r' id="([^"]+)"', PAGE)
    assert len({*ids}) == len(ids)
    for link in re.findall(r'href="([^"]+)"', PAGE):  # no files: the page may lie alone
        assert link.startswith("https://") or link.removeprefix("#") in ids


# --- the mathematics --------------------------------------------------------------------------


def test_each_function_that_the_mathematics_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", MATH)
    assert len(named) >= 15
    for file, name in named:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert attrgetter(name)(module).__module__ == module.__name__


def test_each_letter_of_a_shape_is_a_known_one() -> None:
    """And sizes of the networks are words, since their letters would be others' there."""
    known = {*"KpmBir", *"GHgqvdxya"}  # sizes; and tensors, where brackets are a call or a pair
    unknown = []
    for file in ("bisslight", "mfac", "hypergradients", "lora", "mae", "ijepa"):
        text = re.sub(r"\bl\.\d+|App\. [A-D]|\b[A-D]\.\d", "", (ROOT / f"{file}.py").read_text())
        for shape in re.findall(r"(?a)\(([\w .·²+]+(?:, [\w .·²+]*)+)\)", text):
            letters = re.findall(r"\b[a-zA-Z]\b", shape)
            unknown += [f"{file}: ({shape})" for letter in letters if letter not in known]
    assert unknown == []


@pytest.mark.parametrize("file", WITH_FORMULAS, ids=lambda path: path.name)
def test_formulas_survive_markdown(file: Path) -> None:
    """Inside $...$, Markdown takes a backslash before punctuation as its own, and ends of lines."""
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.S)
    for line in text.splitlines():
        assert line.count("$") % 2 == 0, line
        inside = line.split("$")[1::2]
        assert not [formula for formula in inside if re.search(r"\\[^a-zA-Z]|[`*]", formula)], line


def test_curvature_acts_in_the_span_of_the_stored_gradients_alone() -> None:
    """As page.md says: by projection, and by the eigenvalues of G Gᵀ / m."""
    m, p, lam = 5, 40, 0.3
    rng = torch.Generator().manual_seed(0)
    G = torch.randn(m, p, generator=rng, dtype=torch.float64)
    G[4] = G[0] - 2 * G[1]  # dependent: the pseudo-inverse has to be one
    g = torch.randn(p, generator=rng, dtype=torch.float64)
    q = mfac(G[None], lam)(g[None])[0]
    basis = torch.linalg.svd(G).Vh[:4]  # of the span, by another way than the formula
    Pg, Pq = (basis.T @ (basis @ x) for x in (g, q))
    torch.testing.assert_close(q - Pq, g - Pg)  # outside, q is g
    inverse = torch.linalg.pinv(G @ G.T, rtol=1e-10)
    torch.testing.assert_close(G.T @ inverse @ G @ g, Pg)
    inside = (G @ g) @ inverse @ (G @ g) / (g @ g)
    torch.testing.assert_close(inside, Pg.square().sum() / g.square().sum())
    kappa, e = torch.linalg.eigh(G @ G.T / m)
    kappa, u = kappa[1:], (e.T @ G)[1:] / (m * kappa[1:, None]).sqrt()  # the first is 0
    a = (u @ g).square()
    removed = 1 - (a * (lam / (kappa + lam)).square()).sum() / a.sum()
    torch.testing.assert_close(removed, 1 - Pq.square().sum() / Pg.square().sum())
    assert 0.5 < float(removed) < 1 and 0 < float(inside) < 0.5
    torch.testing.assert_close(inside * removed, 1 - q.square().sum() / g.square().sum())


# --- links ------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a Markdown file."""
    text = re.sub(r"(?s)```.*?```", "", path.read_text())
    titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"(?m)^#+ (.*)", text)]
    return {title.strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("file", PROSE, ids=lambda path: path.name)
def test_links_lead_somewhere(file: Path) -> None:
    text = re.sub(r"(?s)```.*?```", "", file.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r'(?:href|src|srcset)="([^"]+)"', text
    )
    for link in links:
        path, _, anchor = link.partition("#")
        if not re.match(r"https?:|mailto:", link):
            assert (file.parent / path).exists(), link
            assert not anchor or anchor in anchors(file.parent / path if path else file), link
