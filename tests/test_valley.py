"""The picture that moves at the head of docs/index.html, in a browser, against numpy.

Skipped where there is no Chromium (Debian: apt-get install chromium).
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "index.html").read_text()
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
if BROWSER is None:
    pytest.skip("no Chromium: apt-get install chromium", allow_module_level=True)

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
FLAGS += ["--force-prefers-reduced-motion", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

pytestmark = pytest.mark.slow  # a browser is started for each

KAPPA = np.array([0.25, 4.0])  # curvatures of the valley
AIM = np.array([-105.0, -70.0])  # where L^D is least
START = np.array([150.0, -95.0])  # θ_D at first
STATES = [(lam, images) for lam in (0.01, 1.0, 100.0) for images in (1, 8, 256)]
TOOLS = """
const $ = id => document.getElementById(id);
const choose = (log, images) => {
  $("lam").value = log; $("images").value = Math.log2(images);
  $("lam").dispatchEvent(new Event("input"));
};
$("more").open = true;
const centre = id => ["cx", "cy"].map(x => +$(id).getAttribute(x));
const numbers = id => $(id).getAttribute("d").match(/-?[\\d.]+/g).map(Number);
const told = value => {
  const out = parent.document.createElement("pre");
  out.id = "told"; out.textContent = JSON.stringify(value);
  parent.document.body.append(out);
};
"""


def browse(tmp_path: Path, script: str, width: int = 1440) -> Any:
    """What a script tells that runs at the end of the page; descents are at their end at once.

    The page is in a frame, since no window is as narrow as a phone.
    """
    assert BROWSER
    page = PAGE.replace("</body>", f"<script>{TOOLS}{script}</script></body>")
    frame = f'<iframe srcdoc="{html.escape(page)}" width="{width}" height="900"></iframe>'
    file = tmp_path / "frame.html"
    file.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{frame}</body>')
    flags = [*FLAGS, "--window-size=1600,1000", f"--user-data-dir={tmp_path / 'profile'}"]
    line = [BROWSER, *flags, "--dump-dom", f"file://{file}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout)
    assert found, done.stderr[-1000:]
    return json.loads(html.unescape(found[1]))


def test_the_dots_and_arrows_are_where_eq_4_and_eq_5_put_them(tmp_path: Path) -> None:
    """-g and the forces start at θ_P*, -q at θ_D; a force is drawn with 50 pixels at most."""
    chosen = json.dumps([[float(np.log10(lam)), images] for lam, images in STATES])
    script = f"""told({chosen}.map(([log, images]) => {{
      choose(log, images);
      return [centre("cD"), centre("cP"), ...["ag", "aq", "as", "av"].map(numbers)];
    }}));"""
    for (lam, images), (D, P, *arrows) in zip(STATES, browse(tmp_path, script), strict=True):
        np.testing.assert_allclose(D, START)
        at_rest = lam / (KAPPA + lam) * START
        np.testing.assert_allclose(P, at_rest, atol=0.006)
        g = at_rest - AIM
        F = np.diag(KAPPA) / images  # gradients of one image have F = H and the mean 0
        q = lam * np.linalg.solve(F + lam * np.eye(2), g)
        spring = lam * (START - at_rest)
        short = min(0.35, 50 / np.linalg.norm(spring))
        wanted = [(at_rest, -0.35 * g), (START, -0.35 * q)]
        wanted += [(at_rest, short * spring), (at_rest, -short * KAPPA * at_rest)]
        for arrow, (start, way) in zip(arrows, wanted, strict=True):
            np.testing.assert_allclose(arrow, [*start, *(start + way)], atol=0.006)


def test_the_descents_end_at_the_losses_that_the_page_names(tmp_path: Path) -> None:
    """With q at the minimum of Eq. 3, with g or 0 where its wrong gradient is 0."""
    script = """for (const k of "qgn") $("b" + k).click();
    told([[...document.querySelectorAll("#says tr")].slice(2).map(row => [...row.children]
      .map(cell => cell.textContent)), [..."qgn"].map(k => [centre("c" + k), centre("p" + k)])]);"""
    rows, ends = browse(tmp_path, script)
    J = 1 / (KAPPA + 1)
    text = (DOCS / "page.md").read_text()
    factors = {"q": J, "g": np.ones(2), "0": np.zeros(2)}
    for (name, factor), row, (D, P) in zip(factors.items(), rows, ends, strict=True):
        # factor (J θ_D − aim) + θ_D − aim = 0
        wanted = (1 + factor) / (1 + factor * J) * AIM
        np.testing.assert_allclose(D, wanted, atol=0.02)
        np.testing.assert_allclose(P, J * wanted, atol=0.02)
        terms = [np.square(end - AIM).sum() / 2e4 for end in (J * wanted, wanted)]
        losses = [f"{loss:.3f}" for loss in (*terms, sum(terms))]
        assert row == [f"end with {name}", *losses]
        pretext = (KAPPA * np.square(J * wanted)).sum() / 2e4
        for told in (losses[0], losses[2], f"{pretext:.3f}"):  # at θ_P*, the sum, L^P
            assert re.search(rf"{told} with \$?{name}\b", text)


def test_pointer_finger_and_arrow_keys_move_it_and_not_out_of_the_picture(tmp_path: Path) -> None:
    """A finger is a pointer where the browser is told not to scroll."""
    script = """const r = $("valley").getBoundingClientRect(), found = [];
    $("grip").setPointerCapture = () => {};  // there is no pointer
    for (const [type, x, y] of [["pointerdown", 0.5, 0.3], ["pointermove", 0.25, 0.5],
                                ["pointermove", 2, 0.5]]) {
      $("grip").dispatchEvent(new PointerEvent(type, { buttons: 1,
        clientX: r.left + x * r.width, clientY: r.top + y * r.height }));
      found.push(centre("cD"));
    }
    for (const key of ["ArrowLeft", "ArrowLeft", "ArrowDown"])
      $("grip").dispatchEvent(new KeyboardEvent("keydown", { key }));
    told([...found, centre("cD"), getComputedStyle($("grip")).touchAction]);"""
    box = np.array([-240.0, -150.0]), np.array([480.0, 232.0])
    down, moved, out, by_keys, touch = browse(tmp_path, script)
    np.testing.assert_allclose(down, box[0] + box[1] * [0.5, 0.3], atol=0.02)
    np.testing.assert_allclose(moved, box[0] + box[1] * [0.25, 0.5], atol=0.02)
    assert out[0] == 230
    np.testing.assert_allclose(by_keys, [230 - 16, out[1] + 8], atol=0.02)
    assert touch == "none"


@pytest.mark.parametrize("width", [1440, 768, 400])
def test_no_word_lies_on_another(tmp_path: Path, width: int) -> None:
    """At five λ, one image and many, before and after each descent; and none leaves the picture."""
    script = """
    const boxes = () => [...document.querySelectorAll(".live text")]
      .map(x => x.getBoundingClientRect()).filter(x => x.width)
      .map(x => [x.left, x.top, x.right, x.bottom]);
    const all = [];
    for (const log of [-2, -1, 0, 1, 2]) for (const images of [1, 16, 256]) {
      choose(log, images); all.push(boxes());
      for (const k of "qgn") { $("b" + k).click(); all.push(boxes()); }
    }
    const r = $("valley").getBoundingClientRect();
    told([all, [r.left, r.top, r.right, r.bottom]]);"""
    states, frame = browse(tmp_path, script, width)
    for boxes in states:
        assert len(boxes) >= 3
        for n, (left, top, right, bottom) in enumerate(boxes):
            assert left >= frame[0] - 1 and right <= frame[2] + 1
            assert top >= frame[1] - 1 and bottom <= frame[3] + 1
            for other in boxes[:n]:
                across = min(right, other[2]) - max(left, other[0])
                down = min(bottom, other[3]) - max(top, other[1])
                assert across < 1 or down < 1, (boxes[n], other)


def test_on_a_phone_no_line_of_code_output_or_formula_is_cut(tmp_path: Path) -> None:
    script = """told([...document.querySelectorAll("pre, .formula > div")]
      .filter(x => x.clientWidth).map(x => [x.scrollWidth, x.clientWidth]));"""
    widths = browse(tmp_path, script, 400)
    assert len(widths) > 5
    for needed, there in widths:
        assert needed <= there


@pytest.mark.parametrize(
    ("width", "height", "words"),
    [
        (1440, 900, ""),
        (768, 1024, ""),
        (400, 860, ""),
        (1440, 900, "Four ways to get q"),
        (1440, 900, "Does it matter"),
        (768, 900, "Does it matter"),
    ],
)
def test_it_is_in_sight_at_first_and_beside_the_words_about_it(
    width: int, height: int, words: str, tmp_path: Path
) -> None:
    script = f"""const words = "{words}";
    const asks = [...document.querySelectorAll("h2, strong")]
      .find(x => words && x.textContent.startsWith(words));
    asks?.scrollIntoView();
    const r = $("valley").getBoundingClientRect(), b = $("bn").getBoundingClientRect();
    told([scrollY, r.left, r.top, r.right, (asks ? b : r).bottom]);"""
    scrolled, left, top, right, bottom = browse(tmp_path, script, width)
    assert (scrolled > 1000) == bool(words)
    assert left >= 0 and top >= 0 and right <= width and bottom <= height


def test_the_handout_is_printed_on_one_sheet(tmp_path: Path) -> None:
    assert BROWSER
    file = tmp_path / "printed.pdf"
    flags = [*FLAGS, f"--user-data-dir={tmp_path / 'p'}", f"--print-to-pdf={file}"]
    line = [BROWSER, *flags, f"file://{DOCS}/handout.html"]
    subprocess.run(line, check=True, capture_output=True, timeout=120)
    assert len(re.findall(rb"/Type\s*/Page\b", file.read_bytes())) == 1
