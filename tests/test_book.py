"""The book: what docs/ says is there is there, its links lead somewhere, and the page is new."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Callable
from html import unescape
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from mfac import mfac

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MATH = (DOCS / "math.md").read_text()
EQUATIONS = [f"Eq. {n}" for n in range(1, 11)]
LINES = [f"l.{n}" for n in range(1, 18)]
PROSE = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
    *sorted(ROOT.glob("experiments/*.md")),
]


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


def words(page: str) -> list[str]:
    """The words of a page and of the code on it, without formulas and tags.

    These two are made by other projects, of which each release may write them in another way.
    """
    text = re.sub(r"<math.*?</math>", "", page, flags=re.S)
    return unescape(re.sub(r"<[^>]+>", " ", text)).split()


def test_the_page_and_the_code_in_the_mathematics_are_new() -> None:
    made = BESIDE.made()
    assert made[BESIDE.MATH] == MATH, "docs/math.md: make page"
    assert words(made[BESIDE.PAGE]) == words(PAGE), "docs/paper_beside_code.html: make page"


@pytest.mark.parametrize("mark", EQUATIONS)
def test_a_missing_equation_is_named(mark: str) -> None:
    other = MATH.replace(f"## {mark}:", "## About something else:")
    with pytest.raises(SystemExit, match=mark):
        BESIDE.page(other)


@pytest.mark.parametrize("mark", LINES)
def test_a_missing_line_is_named(mark: str) -> None:
    other = MATH.replace(f"| {mark} |", "| |")
    with pytest.raises(SystemExit, match=re.escape(f"{mark} ")):
        BESIDE.page(other)


def reading(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    """The script sees each module as `change` makes it."""
    read = BESIDE.read

    def changed(path: str) -> str:
        text: str = read(path)
        return change(text) if path.endswith(".py") else text

    monkeypatch.setattr(BESIDE, "read", changed)


@pytest.mark.parametrize("mark", LINES[2:16])  # inputs, start and result are not in the loop
def test_a_line_without_its_code_is_named(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading(monkeypatch, lambda text: re.sub(rf"{re.escape(mark)}(?!\d)", "", text))
    with pytest.raises(SystemExit, match=re.escape(mark)):
        BESIDE.made()


def test_a_function_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reading(monkeypatch, lambda text: text.replace("def extend(", "def prolong("))
    with pytest.raises(SystemExit, match="extend"):
        BESIDE.made()


def test_each_formula_becomes_mathematics() -> None:
    """As many as in the text, well-formed, and each with every letter of its source."""
    text = re.sub(r"```python.*?```", "", MATH, flags=re.S)
    blocks = re.findall(r"```math\n(.*?)```", text, re.S)
    inline = re.findall(r"\$([^$]+)\$", re.sub(r"```.*?```", "", text, flags=re.S))
    assert len(blocks) > 20 and len(inline) > 300
    for latex in [*blocks, *inline]:
        tree = ElementTree.fromstring(BESIDE.mathml(latex))
        typeset = "".join(tree.itertext())
        words = re.sub(r"\\(begin|end)\{\w+\}|\\text\{([^}]*)\}", r"\2", latex)
        plain = re.sub(r"\\[a-zA-Z]+", "", words)
        letters = [letter for letter in plain if letter.isalnum()]
        assert not [letter for letter in letters if letter not in typeset + "EI"], latex
    shown = PAGE[: PAGE.index('id="where"')]
    assert shown.count('<math display="block">') == len(blocks)


def test_a_command_that_cannot_be_typeset_is_named() -> None:
    for latex in (r"\nonsense{x}", r"\begin{unknown} a &= b \end{unknown}"):
        with pytest.raises(SystemExit, match="cannot be typeset"):
            BESIDE.mathml(latex)


CONCORDANCE = tomllib.loads((DOCS / "beside.toml").read_text())
LABELS = """
tab:mae_bisslight_main_results tab:lora_param_count tab:classificaiton_acc_bisslight_ijepa
tab:memory_single_gpu tab:classificaiton_acc_bissl_orig fig:bisslight_overview
fig:compute_time_memory fig:lora_rank_var fig:attn_rollout_pets fig:repr_sim_per_dataset
fig:attn_rollout_flowers fig:attn_rollout_cub200
"""
SECTIONS = """
Sec. 1, Sec. 2.1, Sec. 2.1.1, Sec. 2.2, Sec. 3.1, Sec. 3.1.1, Sec. 3.2, Sec. 3.3, Sec. 4, 4.1,
Sec. 4.2, Sec. 4.3, Sec. 4.4, Sec. 5, A:, App. B, App. C.1, App. C.2, App. C.2.1, App. C.3,
App. C.4, App. D.1, D.1.1, App. D.1.2, App. D.2, D.2.1, App. D.2.2, App. D.2.3, App. D.3, LoRA,
adapters, prompts, prefixes, BitFit, BiSSL, ExPLoRA, COIN, NoisyTune, RIFLE, conjugate gradients,
Neumann, AdaHessian, Fisher, K-FAC, M-FAC
"""


def test_each_part_of_the_paper_is_in_the_concordance() -> None:
    keys = " ".join(key for rows in CONCORDANCE.values() for key in rows)
    for label in LABELS.split():
        assert f"`{label}`" in keys, label
    for section in SECTIONS.replace("\n", " ").split(","):
        assert re.search(rf"{re.escape(section.strip())}(?![.\d]*\d)", keys), section
    assert [*CONCORDANCE["Equations"]] == EQUATIONS
    assert [*CONCORDANCE["Lines of Algorithm 1"]] == LINES


def test_the_page_loads_nothing_and_its_links_lead_somewhere() -> None:
    assert not re.search(r"src=|<link|<script|@import|url\(", PAGE)
    ids = re.findall(r' id="([^"]+)"', PAGE)
    assert len({*ids}) == len(ids)
    for link in re.findall(r'href="([^"]+)"', PAGE):
        path, _, anchor = link.partition("#")
        if not path:
            assert anchor in ids, link
        elif not link.startswith("https://"):
            assert (DOCS / path).exists(), link
            assert not anchor or anchor in anchors(DOCS / path), link


# --- the mathematics --------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """Text of each section of math.md by its title up to the colon."""
    parts = re.split(r"(?m)^## (.*)\n", MATH)
    return {title.partition(":")[0]: text for title, text in zip(parts[1::2], parts[2::2])}  # noqa: B905


def test_each_equation_and_the_algorithm_have_a_section_with_code_and_a_check() -> None:
    found = sections()
    for title in [*EQUATIONS, "Algorithm 1", "I-JEPA", "How much can curvature do?"]:
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


def test_each_letter_of_a_shape_is_in_a_table_of_symbols() -> None:
    """And sizes of the networks are words, since their letters would be others' there."""
    tables = MATH.partition("## Eq. 1")[0] + sections()["All symbols"]
    symbols = "".join(re.findall(r"(?m)^\| (.*?) \|", tables))
    known = set(re.findall(r"\$([a-zA-Z])(?:_i)?\$", symbols))
    assert {"K", "p", "m", "B"} <= known and not {"L", "E", "C", "W"} & known
    unknown = []
    for file in ("bisslight", "mfac", "hypergradients", "lora", "mae", "ijepa"):
        text = re.sub(r"\bl\.\d+|App\. [A-D]|\b[A-D]\.\d", "", (ROOT / f"{file}.py").read_text())
        for shape in re.findall(r"(?a)\(([\w .·²+]+(?:, [\w .·²+]*)+)\)", text):
            letters = re.findall(r"\b[a-zA-Z]\b", shape)
            unknown += [f"{file}: ({shape})" for letter in letters if letter not in known]
    assert unknown == []


WITH_FORMULAS = [
    DOCS / "math.md",
    DOCS / "course.md",
    *sorted(ROOT.glob("examples/exercises/*.md")),
]


@pytest.mark.parametrize("file", WITH_FORMULAS, ids=lambda path: path.name)
def test_formulas_survive_markdown(file: Path) -> None:
    """Inside $...$, Markdown takes a backslash before punctuation as its own, and ends of lines."""
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.S)
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
