"""The book: what docs/ says is there is there, its links lead somewhere, and the page is new."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mfac import mfac

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MATH = (DOCS / "math.md").read_text()
EQUATIONS = [f"Eq. {n}" for n in range(1, 11)]
LINES = [f"l.{n}" for n in range(1, 18)]
PROSE = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]


def script() -> ModuleType:
    """docs/beside.py as a module."""
    spec = importlib.util.spec_from_file_location("beside", DOCS / "beside.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BESIDE = script()
PAGE = (DOCS / "paper_beside_code.html").read_text()


# --- the page of two columns ------------------------------------------------------------------


@pytest.mark.parametrize("mark", [*EQUATIONS, *LINES])
def test_each_equation_and_line_has_a_place(mark: str) -> None:
    (row,) = re.findall(rf'<section id="{re.escape(mark.replace(" ", ""))}">.*', PAGE)
    assert re.search(r'<a href="[^"]+">[a-z_/]+\.py:\d+</a>', row)


@pytest.mark.parametrize("mark", ["Eq. 3", "l.11"])
def test_an_equation_or_line_without_a_place_is_named(mark: str) -> None:
    """All marks stay in the sources, but for one."""
    sources = {path.name: path.read_text() for path in ROOT.glob("*.py")}
    for room in ("extras", "experiments"):
        sources |= {f"{room}/{path.name}": path.read_text() for path in ROOT.glob(f"{room}/*.py")}
    found = BESIDE.places(sources, {})
    assert BESIDE.concordance(found)
    del found[mark]
    with pytest.raises(SystemExit, match=rf"no place in the sources for {mark}:"):
        BESIDE.concordance(found)


def test_marks_of_a_line_are_found_and_belong_to_what_stands_there() -> None:
    lines = [
        "def f():",
        '    """Eq. 3 and 4, lines 10 and 13; App. C.1, D.2.1 (tab:x)."""',
        "y = 1",
    ]
    found = BESIDE.places({"m.py": "\n".join(lines)}, {})
    marks = {"Eq. 3", "Eq. 4", "l.10", "l.13", "App. C.1", "App. D.2.1", "tab:x"}
    assert found.keys() == marks | {"m.py:f", "m.py:y"}
    assert all(found[mark] == ['<a href="../m.py#L2">m.py:2</a> f'] for mark in marks)


def test_prose_stands_beside_the_code_that_it_is_about() -> None:
    lines = ['"""Of the module."""', "", "# Above.", "@d", "def f(x):", '    """Of f."""']
    lines += ["    y = [", "        x,", "    ]  # of y", "    return y  # type: ignore[no]", ""]
    cut = BESIDE.pieces("\n".join(lines))
    assert cut == {
        1: (["Of the module."], ""),
        4: (["Above.", "Of f."], "4\t@d\n5\tdef f(x):"),
        7: (["of y"], "7\t    y = [\n8\t        x,\n9\t    ]\n10\t    return y"),
    }


def test_no_code_is_lost_on_the_page() -> None:
    """Every statement of the seven modules, but for docstrings, stands there on its own line."""
    for name in BESIDE.SHOWN:
        text = "".join(code + "\n" for _, code in BESIDE.pieces((ROOT / name).read_text()).values())
        code = re.sub(r"(?m)^\d+\t", "", text)
        assert ast.dump(without_documentation(code)) == ast.dump(
            without_documentation((ROOT / name).read_text())
        )


def without_documentation(code: str) -> ast.AST:
    """A syntax tree without docstrings; `...` stands where nothing is left."""
    code = re.sub(r"(?m)^( *)(class|def) .*:$(?!\n\1 )", r"\g<0>\n\1    ...", code)
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            kept = [n for n in body if not (isinstance(n, ast.Expr) and is_constant(n.value))]
            node.body = kept  # type: ignore[attr-defined]
    return tree


def is_constant(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str | type(...))


def test_the_page_loads_nothing_and_its_links_lead_somewhere() -> None:
    assert not re.search(r"src=|<link|<script|@import|url\(|https?:", PAGE)
    ids = re.findall(r' id="([^"]+)"', PAGE)
    assert len({*ids}) == len(ids)
    for link in re.findall(r'href="([^"]+)"', PAGE):
        path, _, anchor = link.partition("#")
        if not path:
            assert anchor in ids, link
        elif anchor[:1] == "L":
            assert 0 < int(anchor[1:]) <= len((DOCS / path).read_text().splitlines()), link
        else:
            assert anchor in anchors(DOCS / path) or not anchor, link


def test_the_script_needs_the_standard_library_alone() -> None:
    text = (DOCS / "beside.py").read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    assert names and names <= sys.stdlib_module_names


# --- the mathematics --------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """Text of each section of math.md by its title up to the colon."""
    parts = re.split(r"(?m)^## (.*)\n", MATH)
    return {title.partition(":")[0]: text for title, text in zip(parts[1::2], parts[2::2])}  # noqa: B905


def test_each_equation_and_the_algorithm_have_a_section_with_code_and_a_check() -> None:
    found = sections()
    for title in [*EQUATIONS, "Algorithm 1", "How much can curvature do?"]:
        text = found[title]
        assert re.search(r"`\w+(/\w+)?\.py:\w+", text.partition("**In the code.**")[2]), title
        assert "`test_" in text.partition("**Check.**")[2], title


def names_in(path: Path) -> set[str]:
    """Functions and classes of a file, and methods as Class.method."""
    body = ast.parse(path.read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    found = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    inner = ((c, n) for c in classes for n in c.body if isinstance(n, ast.FunctionDef))
    return found | {f"{c.name}.{n.name}" for c, n in inner}


def test_each_function_and_test_that_the_mathematics_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", MATH)
    assert len(named) >= 30
    assert [(file, name) for file, name in named if name not in names_in(ROOT / file)] == []
    tests = {name for path in ROOT.glob("tests/test_*.py") for name in names_in(path)}
    asked = re.findall(r"\b(test_\w+)", MATH)
    assert len(asked) >= 12 and {*asked} <= tests, {*asked} - tests


def test_formulas_survive_markdown() -> None:
    """Inside $...$, Markdown takes a backslash before punctuation as its own, and ends of lines."""
    text = re.sub(r"```.*?```", "", MATH, flags=re.S)
    assert MATH.count("```") % 2 == 0
    for line in text.splitlines():
        assert line.count("$") % 2 == 0, line
        inside = line.split("$")[1::2]
        assert not [formula for formula in inside if re.search(r"\\[^a-zA-Z]|[`*]", formula)], line


def test_curvature_acts_in_the_span_of_the_stored_gradients_alone() -> None:
    """Both shares of math.md: by projection, and by the eigenvalues of G Gᵀ / m."""
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
