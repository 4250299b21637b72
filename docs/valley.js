// Makes valley.svg alive: θ_D can be dragged, λ and the images per stored gradient can be chosen.
// docs/page.py puts this file into the page behind the picture. Without scripts the picture stays.
(() => {
  const { abs, hypot } = Math;
  const $ = id => document.getElementById(id), svg = $("valley");
  const kappa = [.25, 4]; // curvatures of L^P along the valley, across it
  const aim = [-105, -70]; // L^D = |θ − aim|² / 2; 100 pixels are a unit
  const names = { q: "q", g: "g", n: 0 }; // what a descent puts where q should be
  svg.setAttribute("viewBox", "-240 -150 480 232");
  svg.removeAttribute("role"); // no longer an image: it has a handle
  svg.querySelector(".still").remove();
  svg.querySelector(".live").removeAttribute("display");
  const slider = (name, rest) => `<label>${name} <input type=range ${rest}><output></output></label>`;
  svg.parentNode.insertAdjacentHTML("beforeend", "<div id=play>"
    + slider("spring λ", "id=lam min=-2 max=2 step=.1 value=0")
    + "<details id=more><summary>g, q and three descents</summary>"
    + [..."qgn"].map(k => `<button id=b${k}>descend with ${names[k]}</button> `).join("")
    + slider("images per gradient", "id=images max=8 value=0")
    + "<div id=says role=status></div></details></div>");
  const set = (id, values) => { for (const k in values) $(id).setAttribute(k, values[k]); };
  const show = (id, on) => $(id).style.display = on ? "" : "none";
  const fix = x => +x.toFixed(2);
  let D = [150, -95], ends = {}, trails = {}, timer;

  function state() {
    const lam = 10 ** $("lam").value, images = 2 ** $("images").value;
    const J = kappa.map(k => lam / (k + lam)), P = D.map((d, i) => J[i] * d);
    const g = P.map((p, i) => p - aim[i]), d = D.map((x, i) => x - aim[i]);
    // λ (F + λI)⁻¹ g. Gradients of one image have F = H; the mean over some has F = H / images.
    const q = g.map((x, i) => lam / (kappa[i] / images + lam) * x);
    return { lam, images, J, P, g, q, n: [0, 0], d, losses: [g, d].map(x => hypot(...x) ** 2 / 2e4) };
  }
  // Each word goes where it hides least of the others, of dots, arrows and trails.
  function place(spots, taken) {
    const radii = [11, 22, 36, 60, 90];
    for (const [k, [x, y]] of spots) {
      const word = $("t" + k), { y: top, width: w, height: h } = word.getBBox();
      let best = Infinity, at;
      for (const r of radii) for (const up of radii) for (const a of [1, -1, 0]) for (const b of [-1, 1, 0]) {
        const box = [x + a * (r + w / 2), y + b * (up * .6 + h / 2), w / 2, h / 2];
        let bad = r + up + 1e6 * (abs(box[0]) + w / 2 > 238 || abs(box[1] + 34) + h / 2 > 114);
        for (const t of taken) {
          const u = box[2] + t[2] - abs(box[0] - t[0]), v = box[3] + t[3] - abs(box[1] - t[1]);
          if (u > 0 && v > 0) bad += (50 + u * v) * (t[4] || 1); // a trail hides little
        }
        if (bad < best) best = bad, at = box;
      }
      taken.push([...at, 99]); // a word on a word is the worst
      set("t" + k, { x: fix(at[0]), y: fix(at[1] - top + +word.getAttribute("y") - h / 2) });
    }
  }
  function draw() {
    const s = state(), { P } = s, u = [D[0] - P[0], D[1] - P[1]], long = hypot(...u) || 1;
    const coil = [...Array(25)].map((_, i) => {
      const side = i % 24 ? [0, 6, 0, -6][i % 4] / long : 0;
      return [P[0] + u[0] * i / 24 - side * u[1], P[1] + u[1] * i / 24 + side * u[0]].map(fix);
    });
    set("spring", { d: "M" + coil.join("L") });
    // At rest the spring's force is the valley's, turned round; a long one is drawn shorter.
    const f = P.map((p, i) => kappa[i] * p), short = Math.min(.35, 50 / hypot(...f));
    const arrow = (at, v, by) => [at, at.map((x, i) => x + by * v[i])];
    // Beside the marks of an end there is no room for arrows, and at rest none for dots and spring.
    const ended = Object.keys(ends)[0], rests = ended && $("says").ariaBusy != "true";
    for (const id of ["spring", "cD", "cP", "tD", "tP"]) show(id, !rests);
    const arrows = ended ? {} : { g: arrow(P, s.g, -.35), q: arrow(D, s.q, -.35), s: arrow(P, f, short), v: arrow(P, f, -short) };
    const zero = [0, 0], spots = { D, P, aim, zero }, dots = { cD: D, grip: D, cP: P, ca: aim, cz: zero };
    for (const k of "gqsv") {
      const [at, to] = arrows[k] || [P, P];
      set("a" + k, { d: `M${at.map(fix)}L${to.map(fix)}` });
      const late = "gq".includes(k) && !$("more").open; // g and q are for later
      const seen = !late && hypot(to[0] - at[0], to[1] - at[1]) > 5;
      for (const id of ["a", "t"]) show(id + k, seen); // too short: neither arrow nor name
      spots[k] = to;
    }
    for (const k in names) {
      for (const id of ["te", "c", "p"]) show(id + k, ends[k]);
      if (ends[k]) spots["e" + k] = dots["c" + k] = ends[k].D, dots["p" + k] = ends[k].P;
    }
    for (const id in dots) set(id, { cx: fix(dots[id][0]), cy: fix(dots[id][1]) });
    const middle = (a, b, t) => [...a.map((x, i) => x + t * (b[i] - x)), 5, 5];
    place(Object.entries(spots), [...Object.values(dots).map(([x, y]) => [x, y, 7, 7]),
      ...[.3, .6, .9].flatMap(t => [[P, D], ...Object.values(arrows)].map(([a, b]) => middle(a, b, t))),
      ...Object.values(trails).flat()]);
    tell("lam", +s.lam.toPrecision(2));
    tell("images", s.images);
    const row = (name, [a, b] = []) => `<tr><th>${name}` + [a, b, a + b].map(y => "<td>" + (y >= 0 ? y.toFixed(3) : "–")).join("");
    $("says").innerHTML = `<p>Blue follows ochre by <b>${s.J[0].toFixed(2)}</b> along the valley,
      <b>${s.J[1].toFixed(2)}</b> across. |q| is&nbsp;${(hypot(...s.q) / hypot(...s.g)).toFixed(2)}&nbsp;|g|.</p>
      <table><tr><th>Loss of the labels<th>at θ<sub>P</sub>*, where fine-tuning starts<th>at θ<sub>D</sub><th>sum (Eq.&nbsp;3)`
      + row("now", s.losses) + [..."qgn"].map(k => row("end with " + names[k], ends[k]?.losses)).join("");
    return s;
  }
  function tell(id, value) {
    $(id).nextSibling.value = value;
    set(id, { "aria-valuetext": value });
  }
  function move(to) {
    D = to.map((x, i) => Math.max([-230, -140][i], Math.min([230, 72][i], x)));
    forget();
  }
  function stop() { clearInterval(timer); set("says", { "aria-busy": false }); }
  function forget() { stop(); ends = {}; trails = {}; for (const k in names) set("w" + k, { d: "" }); draw(); }
  function descend(by) {
    stop();
    set("says", { "aria-busy": true }); // a screen reader waits for the end
    D = [150, -95];
    let steps = 0, trail = "M" + D;
    const points = trails[by] = []; // boxes some pixels apart
    const step = () => {
      const s = state();
      D = D.map((x, i) => x - .15 * (s[by][i] + s.d[i]));
      set("w" + by, { d: trail += "L" + D.map(fix) });
      const [x, y] = points.at(-1) || [9e9, 0];
      if (hypot(D[0] - x, D[1] - y) > 9) points.push([...D, 4, 4, .1]);
      if (++steps < 100) return 1;
      stop();
      ends[by] = { D, ...state() };
    };
    if (matchMedia("(prefers-reduced-motion)").matches) { while (step()); draw(); }
    else timer = setInterval(() => { step(); draw(); }, 25);
  }
  const pointer = e => {
    const { x, y } = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return [x, y];
  };
  $("grip").onpointerdown = e => { e.target.setPointerCapture(e.pointerId); move(pointer(e)); };
  $("grip").onpointermove = e => { if (e.buttons) move(pointer(e)); };
  $("grip").onkeydown = e => {
    const by = { ArrowLeft: [-8, 0], ArrowRight: [8, 0], ArrowUp: [0, -8], ArrowDown: [0, 8] }[e.key];
    if (by) { e.preventDefault(); move(D.map((x, i) => x + by[i])); }
  };
  $("lam").oninput = $("images").oninput = forget;
  $("more").ontoggle = draw;
  for (const k in names) $("b" + k).onclick = () => descend(k);
  onresize = draw;
  draw();
})();
