"""The picture that moves at the head of docs/index.html, in a browser, against numpy.

Skipped where there is no Chromium (Debian: apt-get install chromium).
"""

import fcntl
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

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


def hypergradient(g: NDArray[Any], lam: float, images: int) -> NDArray[Any]:
    """λ (F + λI)⁻¹ g; gradients of one image have F = H and the mean 0."""
    F = np.diag(KAPPA) / images
    return lam * np.linalg.solve(F + lam * np.eye(2), g)


def test_f_of_means_over_images_is_h_by_their_number() -> None:
    """Drawn at random: means of 1 and of 8 gradients whose products are H on average."""
    rng = np.random.default_rng(0)
    for images in (1, 8):
        single = rng.standard_normal((40_000, images, 2)) * np.sqrt(KAPPA)
        G = single.mean(1)
        np.testing.assert_allclose(images * G.T @ G / len(G), np.diag(KAPPA), atol=0.06)


def test_the_dots_and_arrows_are_where_eq_4_and_eq_5_put_them(tmp_path: Path) -> None:
    chosen = json.dumps([[float(np.log10(lam)), images] for lam, images in STATES])
    script = f"""told({chosen}.map(([log, images]) => {{
      choose(log, images); return [centre("cD"), centre("cP"), numbers("ag"), numbers("aq")];
    }}));"""
    for (lam, images), (D, P, arrow_g, arrow_q) in zip(
        STATES, browse(tmp_path, script), strict=True
    ):
        np.testing.assert_allclose(D, START)
        at_rest = lam / (KAPPA + lam) * START
        np.testing.assert_allclose(P, at_rest, atol=0.006)
        g = at_rest - AIM
        q = hypergradient(g, lam, images)
        np.testing.assert_allclose(arrow_g, [*at_rest, *(at_rest - 0.35 * g)], atol=0.006)
        np.testing.assert_allclose(arrow_q, [*START, *(START - 0.35 * q)], atol=0.006)


def test_the_arrows_at_rest_are_the_spring_s_force_and_the_valley_s(tmp_path: Path) -> None:
    """They end 0.35 of the force from θ_P*, and at most 50 pixels."""
    script = f"""told({[float(np.log10(lam)) for lam, _ in STATES]}.map(log => {{
      choose(log, 1); return [numbers("as"), numbers("av")];
    }}));"""
    for (lam, _), (spring, valley) in zip(STATES, browse(tmp_path, script), strict=True):
        P = lam / (KAPPA + lam) * START
        for found, force in ((spring, lam * (START - P)), (valley, -KAPPA * P)):
            length = min(0.35 * float(np.linalg.norm(force)), 50.0)
            wanted = P + length * force / np.linalg.norm(force)
            np.testing.assert_allclose(found, [*P, *wanted], atol=0.02)


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


def test_the_arrows_leave_room_for_the_marks_of_an_end_and_come_back(tmp_path: Path) -> None:
    script = """const shown = id => $(id).style.display;
    const seen = () => [..."gqsv"].map(k => shown("a" + k) + shown("t" + k));
    choose(0, 1); const before = seen(); $("bq").click(); const ended = seen();
    for (let n = 0; n < 9; n++)
      $("grip").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    told([before, ended, seen()]);"""
    before, ended, moved = browse(tmp_path, script)
    assert (before, ended, moved) == ([""] * 4, ["nonenone"] * 4, [""] * 4)


def test_g_and_q_come_with_the_buttons(tmp_path: Path) -> None:
    script = """const shown = () => [..."gqsv"].map(k => $("a" + k).style.display);
    $("more").open = false; choose(0, 1); const closed = shown();
    $("more").open = true; choose(0, 1); told([closed, shown()]);"""
    assert browse(tmp_path, script) == [["none", "none", "", ""], [""] * 4]


def test_a_screen_reader_gets_the_value_and_waits_for_the_end_of_a_descent(tmp_path: Path) -> None:
    script = """choose(1, 256);
    const values = ["lam", "images"].map(id => $(id).getAttribute("aria-valuetext"));
    const busy = [], says = $("says");
    new MutationObserver(all => {
      told([values, says.getAttribute("role"), busy, says.getAttribute("aria-busy")]);
    }).observe(says, { attributes: true });
    window.matchMedia = () => ({ matches: false }); $("bq").click();
    busy.push(says.getAttribute("aria-busy"));"""
    values, role, busy, _ = browse(tmp_path, script)
    assert (values, role, busy) == (["10", "256"], "status", ["true"])


def test_sliders_and_buttons_are_of_a_finger_s_size(tmp_path: Path) -> None:
    script = """told([...document.querySelectorAll("#play input, #play button")]
      .map(x => x.getBoundingClientRect().height));"""
    heights = browse(tmp_path, script, 400)
    assert len(heights) == 5 and min(heights) >= 44


def test_a_pointer_drags_it_and_not_out_of_the_picture(tmp_path: Path) -> None:
    script = """const r = $("valley").getBoundingClientRect(), found = [];
    $("grip").setPointerCapture = () => {};  // there is no pointer
    for (const [type, x, y] of [["pointerdown", 0.5, 0.3], ["pointermove", 0.25, 0.5],
                                ["pointermove", 2, 0.5]]) {
      $("grip").dispatchEvent(new PointerEvent(type, { buttons: 1,
        clientX: r.left + x * r.width, clientY: r.top + y * r.height }));
      found.push(centre("cD"));
    }
    told(found);"""
    box = np.array([-240.0, -150.0]), np.array([480.0, 232.0])
    down, moved, out = browse(tmp_path, script)
    np.testing.assert_allclose(down, box[0] + box[1] * [0.5, 0.3], atol=0.02)
    np.testing.assert_allclose(moved, box[0] + box[1] * [0.25, 0.5], atol=0.02)
    assert out[0] == 230


class Browser:
    """Chromium with the page as a phone shows it, driven through a pair of pipes."""

    def __init__(self, folder: Path) -> None:
        assert BROWSER
        file = folder / "page.html"
        file.write_text(PAGE)
        ours, theirs = os.pipe(), os.pipe()
        at = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ours[0], theirs[1])]
        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'touched'}"]
        start = f'exec "$@" 3<&{at[0]} 4>&{at[1]}'  # the two numbers that Chromium knows
        self.process = subprocess.Popen(
            ["bash", "-c", start, "bash", BROWSER, *flags], pass_fds=at, stderr=subprocess.DEVNULL
        )
        for end in (*at, ours[0], theirs[1]):
            os.close(end)
        self.to, self.from_ = os.fdopen(ours[1], "wb", 0), os.fdopen(theirs[0], "rb")
        self.session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": found["sessionId"]}
        phone = {"width": 400, "height": 860, "deviceScaleFactor": 1, "mobile": True}
        self.call("Emulation.setDeviceMetricsOverride", **phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        self.call("Page.navigate", url=f"file://{file}")
        self.ask("new Promise(done => document.readyState == 'complete' ? done() : onload = done)")

    def call(self, method: str, **params: Any) -> Any:
        """The answer to one command; events in between are passed over."""
        line = {"id": 1, "method": method, "params": params} | self.session
        self.to.write(json.dumps(line).encode() + b"\0")
        while True:
            said = b""
            while not said.endswith(b"\0"):
                byte = self.from_.read(1)
                assert byte, "Chromium has ended"
                said += byte
            answer = json.loads(said[:-1])
            if answer.get("id") == 1:
                assert "error" not in answer, answer
                return answer["result"]

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        settings = {"returnByValue": True, "awaitPromise": True}
        return self.call("Runtime.evaluate", expression=script, **settings)["result"].get("value")

    def touch(self, kind: str, *points: list[float]) -> None:
        """A finger that lands, moves or leaves; the page is drawn before the next one."""
        at = [{"x": x, "y": y} for x, y in points]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=at)
        self.ask("new Promise(done => requestAnimationFrame(() => done()))")

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()
        self.to.close()
        self.from_.close()


def test_a_finger_drags_it_in_any_direction_and_the_page_stays(tmp_path: Path) -> None:
    """On a phone: θ_D is under the finger after each move."""
    browser = Browser(tmp_path)
    where = """(() => { const r = document.getElementById("cD").getBoundingClientRect();
      return [r.left + r.width / 2, r.top + r.height / 2, scrollY]; })()"""
    try:
        browser.ask("scrollTo(0, 60)")
        for direction in ([-1, 0], [0, 1], [1, 0], [0, -1]):
            *at, scrolled = browser.ask(where)
            assert scrolled == 60
            browser.touch("touchStart", at)
            for _ in range(6):
                at = [x + 9 * step for x, step in zip(at, direction, strict=True)]
                browser.touch("touchMove", at)
            browser.touch("touchEnd")
            np.testing.assert_allclose(browser.ask(where), [*at, 60], atol=0.5)
    finally:
        browser.close()


def test_arrow_keys_move_it(tmp_path: Path) -> None:
    script = """for (const key of ["ArrowLeft", "ArrowLeft", "ArrowDown"])
      $("grip").dispatchEvent(new KeyboardEvent("keydown", { key }));
    told(centre("cD"));"""
    np.testing.assert_allclose(browse(tmp_path, script), [150 - 16, -95 + 8])


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


def test_no_trail_strikes_a_word_through(tmp_path: Path) -> None:
    """At λ 1, after all descents."""
    script = """choose(0, 1); for (const k of "qgn") $("b" + k).click();
    const boxes = [...document.querySelectorAll(".live text")]
      .filter(x => x.style.display != "none").map(x => x.getBBox())
      .map(x => [x.x, x.y, x.x + x.width, x.y + x.height]);
    told([boxes, numbers("wq"), numbers("wg"), numbers("wn")]);"""
    boxes, *trails = browse(tmp_path, script)
    assert len(boxes) >= 5
    for points in trails:
        corners = np.reshape(points, (-1, 2))
        parts = np.linspace(0, 1, 20)[:, None, None]
        line = (corners[:-1] + parts * (corners[1:] - corners[:-1])).reshape(-1, 2)
        for left, top, right, bottom in boxes:
            inside = (line > [left, top + 3]) & (line < [right, bottom - 3])
            assert not inside.all(1).any(), (left, top)


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (768, 1024), (400, 860)])
def test_the_first_screen_shows_the_valley(tmp_path: Path, width: int, height: int) -> None:
    script = 'const r = $("valley").getBoundingClientRect(); told([r.left, r.right, r.bottom]);'
    left, right, bottom = browse(tmp_path, script, width)
    assert left >= 0 and right <= width and bottom <= height


def test_on_a_phone_no_line_of_code_output_or_formula_is_cut(tmp_path: Path) -> None:
    script = """told([...document.querySelectorAll("pre, .formula > div")]
      .filter(x => x.clientWidth).map(x => [x.scrollWidth, x.clientWidth]));"""
    widths = browse(tmp_path, script, 400)
    assert len(widths) > 5
    for needed, there in widths:
        assert needed <= there


def test_on_a_wide_screen_it_stays_beside_eq_5(tmp_path: Path) -> None:
    script = """document.getElementById("four-ways-to-get-q").scrollIntoView();
    const r = $("valley").getBoundingClientRect(); told([scrollY, r.top, r.bottom]);"""
    scrolled, top, bottom = browse(tmp_path, script)
    assert scrolled > 1000 and top >= 0 and bottom <= 900


@pytest.mark.parametrize("width", [1440, 768])
def test_it_stays_beside_the_text_that_asks_for_the_buttons(tmp_path: Path, width: int) -> None:
    script = """const asks = [...document.querySelectorAll("strong")]
      .find(x => x.textContent.startsWith("Does it matter"));
    asks.scrollIntoView();
    const r = $("valley").getBoundingClientRect(), b = $("bn").getBoundingClientRect();
    told([scrollY, r.top, b.bottom]);"""
    scrolled, top, bottom = browse(tmp_path, script, width)
    assert scrolled > 1000 and top >= 0 and bottom <= 900


@pytest.mark.parametrize(("name", "most"), [("index", 8), ("handout", 1)])
def test_it_prints_on_few_sheets(name: str, most: int, tmp_path: Path) -> None:
    assert BROWSER
    file = tmp_path / "printed.pdf"
    flags = [*FLAGS, f"--user-data-dir={tmp_path / 'p'}"]
    line = [BROWSER, *flags, f"--print-to-pdf={file}", f"file://{DOCS / name}.html"]
    subprocess.run(line, check=True, capture_output=True, timeout=120)
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", file.read_bytes())) <= most
