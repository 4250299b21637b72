// Makes valley.svg alive: θ_D can be dragged, λ and the number of stored gradients can be chosen.
// docs/page.py puts this file into the page behind the picture. Without scripts the picture stays.
(() => {
  const svg = document.getElementById("valley");
  const kappa = [0.25, 4]; // curvatures of L^P along the valley, across it
  const aim = [-105, -70]; // L^D = |θ − aim|² / 2; 100 pixels are a unit
  svg.setAttribute("viewBox", "-240 -150 480 232");
  svg.removeAttribute("role"); // no longer an image: it has a handle
  svg.querySelector(".still").remove();
  svg.querySelector(".live").removeAttribute("display");
  const slider = (name, rest) => `<label>${name} <input type=range ${rest}><output></output></label>`;
  svg.parentNode.insertAdjacentHTML("beforeend", "<div id=play>"
    + slider("spring λ", "id=lam min=-2 max=2 step=.1 value=0")
    + slider("gradients stored", "id=stored max=20 value=20")
    + `<button id=bq>descend with q</button> <button id=bg>descend with g</button><p id=says></p></div>`);
  const $ = id => document.getElementById(id);
  const set = (id, values) => { for (const k in values) $(id).setAttribute(k, values[k]); };
  const show = (id, on) => { $(id).style.display = on ? "" : "none"; };
  const fix = x => +x.toFixed(2);
  let D = [150, -95], ends = {}, trails = {}, timer;

  // What M-FAC makes of g: λ (F + λI)⁻¹ g, F being the mean of n products of a gradient with itself.
  // The gradients are such that 20 of them give the curvature exactly.
  function mfac(g, lam, n) {
    let a = lam, b = 0, c = lam;
    for (let i = 0; i < n; i++) {
      const angle = Math.PI * (.27 + 7 * i % 20 / 20);
      const [x, y] = [Math.cos(angle), Math.sin(angle)].map((z, j) => z * Math.sqrt(2 * kappa[j] / n));
      a += x * x; b += x * y; c += y * y;
    }
    const f = lam / (a * c - b * b);
    return [f * (c * g[0] - b * g[1]), f * (a * g[1] - b * g[0])];
  }
  function state() {
    const lam = 10 ** $("lam").value, n = +$("stored").value;
    const J = kappa.map(k => lam / (k + lam)), P = D.map((d, i) => J[i] * d);
    const g = P.map((p, i) => p - aim[i]), q = mfac(g, lam, n), d = D.map((x, i) => x - aim[i]);
    return { lam, n, J, P, g, q, d, loss: Math.hypot(...g, ...d) ** 2 / 2e4 };
  }
  // Each word goes where it hides least of the others, of dots, arrows and trails.
  function place(spots, taken) {
    for (const [k, [x, y]] of spots) {
      const { width: w, height: h } = $("t" + k).getBBox();
      let best = Infinity, at;
      for (const r of [11, 22, 36, 52]) for (const a of [1, -1, 0]) for (const b of [-1, 1, 0]) {
        const box = [x + a * (r + w / 2), y + b * (r * .6 + h / 2), w / 2, h / 2];
        let bad = r + 1e4 * (Math.abs(box[0]) + w / 2 > 238 || box[1] - h / 2 < -148 || box[1] + h / 2 > 80);
        for (const t of taken) {
          const u = box[2] + t[2] - Math.abs(box[0] - t[0]), v = box[3] + t[3] - Math.abs(box[1] - t[1]);
          if (u > 0 && v > 0) bad += (50 + u * v) * (t[4] || 1); // a trail hides little
        }
        if (bad < best) best = bad, at = box;
      }
      taken.push(at);
      set("t" + k, { x: fix(at[0]), y: fix(at[1] + h * .3) });
    }
  }
  function draw() {
    const s = state(), { P } = s, u = [D[0] - P[0], D[1] - P[1]], long = Math.hypot(...u) || 1;
    const coil = [...Array(25)].map((_, i) => {
      const side = i % 24 ? [0, 6, 0, -6][i % 4] / long : 0;
      return [P[0] + u[0] * i / 24 - side * u[1], P[1] + u[1] * i / 24 + side * u[0]].map(fix);
    });
    set("spring", { d: "M" + coil.join("L") });
    const tip = { g: P.map((p, i) => p - .35 * s.g[i]), q: D.map((p, i) => p - .35 * s.q[i]) };
    set("ag", { d: `M${P.map(fix)}L${tip.g.map(fix)}` });
    set("aq", { d: `M${D.map(fix)}L${tip.q.map(fix)}` });
    const spots = { D, P, g: tip.g, q: tip.q, aim, zero: [0, 0] }, dots = { cD: D, grip: D, cP: P, ca: aim, cz: [0, 0] };
    for (const k of "qg") {
      show("te" + k, ends[k]);
      show("c" + k, ends[k]);
      show("t" + k, Math.hypot(...s[k]) > 15); // an arrow too short to be seen has no name
      if (ends[k]) spots["e" + k] = dots["c" + k] = ends[k].D;
    }
    for (const id in dots) set(id, { cx: fix(dots[id][0]), cy: fix(dots[id][1]) });
    const middle = (a, b, t) => [...a.map((x, i) => x + t * (b[i] - x)), 5, 5];
    place(Object.entries(spots), [...Object.values(dots).map(([x, y]) => [x, y, 7, 7]),
      ...[.3, .6, .9].flatMap(t => [middle(P, tip.g, t), middle(D, tip.q, t), middle(P, D, t)]),
      ...Object.values(trails).flat()]);
    $("lam").nextSibling.value = +s.lam.toPrecision(2);
    $("stored").nextSibling.value = s.n || "0: q = g";
    const told = Object.keys(ends).map(k => `with ${k} at ${ends[k].loss.toFixed(3)}`).join(", ");
    $("says").innerHTML = `θ<sub>P</sub>* follows θ<sub>D</sub> by <b>${s.J[0].toFixed(2)}</b> along the valley,
      <b>${s.J[1].toFixed(2)}</b> across. |q| is&nbsp;${(Math.hypot(...s.q) / Math.hypot(...s.g)).toFixed(2)}&nbsp;|g|.
      Loss of Eq. 3: ${s.loss.toFixed(3)}${told && "; it ends " + told}.`;
    return s;
  }
  function move(to) {
    D = to.map((x, i) => Math.max([-230, -140][i], Math.min([230, 72][i], x)));
    forget();
  }
  function forget() { clearInterval(timer); ends = {}; trails = {}; set("wq", { d: "" }); set("wg", { d: "" }); draw(); }
  function descend(by) {
    clearInterval(timer);
    D = [150, -95];
    let steps = 0, trail = "M" + D;
    const points = trails[by] = []; // boxes some pixels apart
    const step = () => {
      const s = state();
      D = D.map((x, i) => x - .15 * (s[by][i] + s.d[i]));
      set("w" + by, { d: trail += "L" + D.map(fix) });
      const [x, y] = points.at(-1) || [9e9, 0];
      if (Math.hypot(D[0] - x, D[1] - y) > 9) points.push([...D, 4, 4, .1]);
      if (++steps < 100) return true;
      clearInterval(timer);
      ends[by] = { D, loss: state().loss };
    };
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { while (step()); draw(); }
    else timer = setInterval(() => { step(); draw(); }, 25);
  }
  const pointer = e => {
    const p = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return [p.x, p.y];
  };
  $("grip").onpointerdown = e => { e.target.setPointerCapture(e.pointerId); move(pointer(e)); };
  $("grip").onpointermove = e => { if (e.buttons) move(pointer(e)); };
  $("grip").onkeydown = e => {
    const by = { ArrowLeft: [-8, 0], ArrowRight: [8, 0], ArrowUp: [0, -8], ArrowDown: [0, 8] }[e.key];
    if (by) { e.preventDefault(); move([D[0] + by[0], D[1] + by[1]]); }
  };
  $("lam").oninput = $("stored").oninput = forget;
  for (const k of "qg") $("b" + k).onclick = () => descend(k);
  onresize = draw;
  draw();
})();
