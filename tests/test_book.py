"""The book: what docs/ says is there is there, its links lead somewhere, and the page is new."""

import csv
import importlib
import re
import runpy
from html import unescape
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import bisslight
from config import BACKBONES
from lora import init_theta
from mfac import mfac

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MATH = (DOCS / "math.md").read_text()
WITH_FORMULAS = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
PROSE = [*sorted(ROOT.glob("*.md")), *WITH_FORMULAS, *sorted(ROOT.glob("experiments/*.md"))]

MAKER = SimpleNamespace(**runpy.run_path(str(DOCS / "page.py")))
TEXT = MAKER.TEXT.read_text()
PROGRAM = MAKER.PROGRAM.read_text()
PAGE = MAKER.PAGE.read_text()
HANDOUT = (DOCS / "handout.html").read_text()


# --- the page -----------------------------------------------------------------------------------


def plain(page: str) -> str:
    """HTML without formulas and tags, which each release of their makers may write otherwise."""
    text = re.sub(r"<math.*?</math>", "", page, flags=re.S)
    return unescape(re.sub(r"<[^>]+>", "", text))


def test_page_and_handout_are_what_their_texts_and_the_program_make_them() -> None:
    assert plain(MAKER.page(TEXT, PROGRAM)) == plain(PAGE), "make page"
    assert plain(MAKER.handout(MAKER.HANDOUT.read_text())) == plain(HANDOUT), "make page"


def test_the_page_names_the_version_of_the_program() -> None:
    assert f"BiSSLight {bisslight.__version__}, 20" in PAGE


def test_each_line_of_the_program_is_on_the_page_once_and_all_equations_are() -> None:
    """And each line of Algorithm 1 has its mark."""
    code = "".join(re.findall(r"<figure>.*?<pre>(.*?)</pre></figure>", PAGE, re.S))
    _, *lines = code.split('<span class="line"')
    assert [plain("<span" + line) for line in lines] == PROGRAM.splitlines()
    marks = set(re.findall(r'<b class="l">(l\.\d+)</b>', code))
    assert marks == {f"l.{n}" for n in range(1, 18)}
    equations = re.findall(r"<span>Eq. (\d+)</span>", PAGE)
    assert equations == ["3", "4", "5", "6", "7", "10"]  # each once; 8 and 9 are in the glossary


def test_the_handout_has_each_line_of_algorithm_1_once_and_five_equations() -> None:
    assert re.findall(r'<td><b class="l">l\.(\d+)</b>', HANDOUT) == [str(n) for n in range(1, 18)]
    assert re.findall(r"<span>Eq. (\d+)</span>", HANDOUT) == ["3", "4", "5", "7", "10"]


def test_in_the_valley_of_the_handout_two_forces_balance_at_theta_p() -> None:
    """At λ = 1 and the curvatures that the text names; 100 pixels are a unit."""
    svg = (DOCS / "handout.svg").read_text()
    low_x, low_y = map(float, re.findall(r'cx="([\d.]+)" cy="([\d.]+)" rx', svg)[0])
    dots = re.findall(r'<circle class="(.)" cx="([\d.]+)" cy="([\d.]+)"', svg)
    at = {name: (float(x) - low_x, low_y - float(y)) for name, x, y in dots}
    for kappa, theta_P, theta_D in zip((0.25, 4), at["P"], at["D"], strict=True):
        assert 1 * (theta_D - theta_P) == pytest.approx(kappa * theta_P, abs=0.5)
    pull, hold = re.findall(r'"force[^"]*" d="M([\d. ]+)L([\d. ]+)"', svg)
    (x, y), (a, b), (c, d) = (map(float, end.split()) for end in (pull[0], pull[1], hold[1]))
    assert pull[0] == hold[0] and (a + c, b + d) == pytest.approx((2 * x, 2 * y), abs=0.3)


@pytest.mark.parametrize("text", [TEXT, MATH], ids=["page.md", "math.md"])
def test_each_formula_becomes_mathematics(text: str) -> None:
    """Well-formed, and with every letter of its source."""
    blocks = re.findall(r"```math\n(.*?)```", text, re.S)
    inline = re.findall(r"\$([^$]+)\$", re.sub(r"```.*?```", "", text, flags=re.S))
    assert blocks and inline
    for latex in [*blocks, *inline]:
        tree = ElementTree.fromstring(MAKER.mathml(latex))
        typeset = "".join(tree.itertext())
        words = re.sub(r"\\(begin|end)\{\w+\}|\\text\{([^}]*)\}", r"\2", latex)
        letters = [letter for letter in re.sub(r"\\[a-zA-Z]+", "", words) if letter.isalnum()]
        assert not [letter for letter in letters if letter not in typeset + "EI"], latex
    if text == TEXT:
        assert PAGE.count('<math display="block">') == len(blocks)


@pytest.mark.parametrize("name", ["index.html", "handout.html"])
def test_the_page_loads_nothing_and_its_links_lead_somewhere(name: str) -> None:
    """Those to its own picture stay on it, and the handout is the one for a browser."""
    page = (DOCS / name).read_text()
    assert not re.search(r"<link|<script .|<iframe|<img|src=|@import|url\((?!#)", page)
    assert not re.search(r"fetch|XMLHttp|import\(|sendBeacon|WebSocket", page)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len({*ids}) == len(ids)
    assert not re.search(r"index\.html#|handout\.md", page)
    for link in re.findall(r'href="([^"]+)"', page):
        path, _, anchor = link.partition("#")
        if path.startswith(MAKER.FILES) or path == MAKER.HANDOUT_PAGE.name:
            assert (DOCS / path).exists(), link
        else:
            assert link.startswith("https://") or anchor in ids, link


def test_published_alone_the_page_names_public_files() -> None:
    """pages.yml puts the public address in place of the relative one."""
    action = (ROOT / ".github/workflows/pages.yml").read_text()
    assert f"s#{MAKER.FILES.replace('.', chr(92) + '.')}#$FILES#g" in action


def test_the_curvature_along_g_is_that_of_the_study() -> None:
    """By Gauss-Newton's matrix: in what_q_is.csv, at the paper's λ."""
    with (ROOT / "experiments/what_q_is.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["lam"], row["c"]) == ("0.001", "1")]
    along = [float(row["along_N"]) for row in rows]
    assert (round(min(along), 1), round(max(along), 1)) == (2.8, 4.7)
    assert {round(float(row["ratio_N"]), 1) for row in rows} == {0.6}
    assert r"curvature along $g$ was 2.8 to $4.7 \lambda$" in TEXT


def test_the_costs_on_the_page_are_those_of_the_study() -> None:
    """The page's table is of ViT-B."""
    machines = (ROOT / "experiments/machines.md").read_text()
    for row in (
        "| seconds | 1.85 |",
        "| peak memory, GB | 13.0 |",
        "| peak with CG, GB | 67.9 ",
        "| an alternation with CG, by that | 26 s, 14 times M-FAC's |",
        "CG computes in float32",
    ):
        assert row in machines
    assert "| CG, 5 products | 26 | 67.9 |\n" in TEXT
    assert "| M-FAC | 1.85 | 13.0 |\n" in TEXT


def test_h_of_vit_l_has_as_many_entries_as_the_page_says() -> None:
    theta = init_theta(BACKBONES["vit_l16"].depth, 64, BACKBONES["vit_l16"].dim, torch.Generator())
    assert theta.numel() == 24 * 4 * 64 * 1024
    assert r"$24 \cdot 4 \cdot 64 \cdot 1024$ numbers" in TEXT
    assert f"{theta.numel() ** 2:.0e}" == "4e+13" and r"$4 \cdot 10^{13}$" in TEXT


def test_the_curves_of_what_q_becomes_are_those_of_eq_5_with_f_in_place_of_h() -> None:
    """Of mfac.svg, at λ = 1: each point of a circle keeps its place in the list."""
    svg = (DOCS / "mfac.svg").read_text()
    for kind, wanted in (("axis", 3), ("green", 3), ("blue thin", 21)):
        assert svg.count(f'<path class="{kind}"') == wanted
    paths = re.findall(r'<path class="([^"]+)" d="M([^"]*)"', svg)
    gradients: list[torch.Tensor] = []
    for kind, d in paths:
        points = torch.tensor([[float(x) for x in p.split()] for p in d.split("L")]).double()
        if kind == "blue thin":
            gradients.append((points[1] - points[0]) * 3)  # drawn at a third of their length
        elif kind == "axis":
            g = points - points[:-1].mean(0)
        else:
            q = points - points[:-1].mean(0)
            G = torch.stack(gradients) / 64 if gradients else torch.zeros(1, 2).double()
            F = G.T @ G / len(G)
            torch.testing.assert_close(g, q @ (F + torch.eye(2)), atol=2, rtol=0)  # F is rounded
            gradients = []
    torch.testing.assert_close(F, torch.diag(torch.tensor([0.25, 4.0])).double(), atol=0.02, rtol=0)


@pytest.mark.slow
def test_six_descents_end_where_the_picture_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of the last ten steps in notebook 1: M-FAC draws other gradients in each step."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    ran = runpy.run_path(str(ROOT / "examples/1_hypergradient.py"))
    lines = ran["axes"].lines
    torch.set_default_dtype(torch.float32)  # the notebook takes float64
    ends = {line.get_label(): sum(line.get_ydata()[-10:]) / 10 for line in lines}
    assert ends["exact (Eq. 5)"] < 1e-8 and ends["CG, 50 steps, no damping"] < 1e-8
    assert round(ends["M-FAC, closed form"], 2) == 0.15
    assert round(ends["CG as in BiSSL"], 1) == 2.5 and round(ends["identity"]) == 10
    told = (DOCS / "descent.svg").read_text()
    for end in ("with M-FAC to 0.15", "gradients to 2.5", "with q = g to 10"):
        assert end in told
    J, target, one = ran["J"], ran["target"], torch.eye(len(ran["J"])).double()
    away = target - ran["at_zero"]  # θ_P* = at_zero + J θ_D
    losses = {}
    for name, factor in (("q", J), ("g", one), ("0", 0 * one)):
        theta_D = torch.linalg.solve(factor @ J + one, target + factor @ away)
        gaps = (J @ theta_D - away, theta_D - target)
        terms = [float(gap.square().sum()) / 2 for gap in gaps]
        losses[name] = terms[0], sum(terms)
    assert min(losses, key=lambda name: losses[name][0]) == "g"
    assert min(losses, key=lambda name: losses[name][1]) == "q"
    above = f"{losses['0'][1] - float(ran['best']):.2f}"
    assert f"q = 0 to {above}" in told


# --- the mathematics --------------------------------------------------------------------------


def test_each_function_that_the_mathematics_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", MATH)
    assert len(named) >= 15
    for file, name in named:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert attrgetter(name)(module).__module__ == module.__name__


@pytest.mark.parametrize("file", WITH_FORMULAS, ids=lambda path: path.name)
def test_formulas_survive_markdown(file: Path) -> None:
    """Inside $...$, Markdown takes a backslash before punctuation as its own, and ends of lines."""
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.S)
    for line in text.splitlines():
        assert line.count("$") % 2 == 0, line
        inside = line.split("$")[1::2]
        assert not [formula for formula in inside if re.search(r"\\[^a-zA-Z]|[`*]", formula)], line


def test_curvature_acts_in_the_span_of_the_stored_gradients_alone() -> None:
    """As page.md says: what is orthogonal to them, q leaves as it is; in the span, λ / (κ + λ)."""
    m, p, lam = 5, 40, 0.3
    rng = torch.Generator().manual_seed(0)
    G = torch.randn(m, p, generator=rng, dtype=torch.float64)
    G[4] = G[0] - 2 * G[1]  # so the span has four dimensions
    g = torch.randn(p, generator=rng, dtype=torch.float64)
    q = mfac(G[None], lam)(g[None])[0]
    kappa, u = torch.linalg.eigh(G.T @ G / m)  # κ rises
    torch.testing.assert_close(u.T @ q, lam / (kappa + lam) * (u.T @ g))
    assert float(kappa[-5].abs()) < 1e-12 and float(kappa[-4]) > 1
    assert float(kappa[-1]) <= float(G.square().sum(1).mean())


# --- links ------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a Markdown file; or those of a page."""
    text = re.sub(r"(?s)```.*?```", "", path.read_text())
    if path.suffix == ".html":
        return set(re.findall(r' id="([^"]+)"', text))
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


def test_the_line_that_opens_the_page_names_it() -> None:
    (file,) = re.findall(r"(?m)^python -m webbrowser (\S+)$", (ROOT / "README.md").read_text())
    assert ROOT / file == MAKER.PAGE
