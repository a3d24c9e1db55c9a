"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (s, r = document) => r.querySelector(s), $$ = (s, r = document) => [...r.querySelectorAll(s)];
const esc = s => String(s ?? "").replace(/[&<>"']/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}[c]));
const layers = (data.layers || []).map(r => {
  const layer = Object.fromEntries(data.columns.map((k, j) => [k, r[j]]));
  for (const k of data.texts) layer[k] = data.strings[layer[k]];
  return layer;
});
const fix = (v, n) => v == null ? "" : v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(Math.min(n, 1)) : v.toFixed(n);
const time = us => us == null ? "" : us >= 1e6 ? `${+(us / 1e6).toPrecision(4)} s` : us >= 1e4 ? `${+(us / 1e3).toPrecision(4)} ms` : `${us.toFixed(us < 100 ? 2 : 1)} µs`;
// Long names show their ends, which tell most; all of it is in the tooltip.
const middle = (s, n) => s.length <= n ? s : `${s.slice(0, n / 2 - 1)} … ${s.slice(2 - n / 2)}`;
const root = document.documentElement;
const keep = (k, v) => { try { return v === undefined ? localStorage.getItem(k) : localStorage.setItem(k, v); } catch { return null; } };
if (keep("cutefuse-theme")) root.dataset.theme = keep("cutefuse-theme");
$("#theme")?.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme:dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep("cutefuse-theme", root.dataset.theme);
});

/* ---- details of one layer */
const panel = $("#panel");
function row(k, v, title) { return v === "" || v == null ? "" : `<dt>${k}</dt><dd title="${esc(title)}">${v}</dd>`; }
function show(i) {
  const l = layers[i];
  if (!l || !panel) return;
  const tensors = t => t.map(x => `<div>${esc(x[0])}<br><span class="src">${esc(x[1])} · ${esc(x[2])}</span></div>`).join("");
  const extra = Object.entries(l.raw || {}).map(([k, v]) => row(esc(k), esc(typeof v === "object" ? JSON.stringify(v) : v), l.at)).join("");
  panel.innerHTML = `<button class="btn close" aria-label="close">×</button><h3>${esc(l.name)}</h3><dl>` +
    row("kind", `<i class="dotk" style="--c:var(--k-${l.kind})"></i> ${esc(data.kinds[l.kind] || l.kind)}`) + row("type", esc(l.type), l.at) +
    row("precision", esc(l.precision)) + row("time", l.time_us == null ? "not profiled" : `${time(l.time_us)}${l.mean_us == null || l.mean_us === l.time_us ? "" : `, mean ${time(l.mean_us)}`}`, l.from) +
    row("share", l.percent == null ? "" : fix(l.percent, 2) + " %", l.from) + row("arithmetic", l.flops == null ? "" : fix(l.flops / 1e9, 3) + " GFLOP", "from the shapes in " + l.at) +
    row("least traffic", l.min_bytes == null ? "" : fix(l.min_bytes / 1048576, 3) + " MiB", "from the shapes in " + l.at) +
    row("rate", l.tflop_per_s ? `${fix(l.tflop_per_s, 2)} TFLOP/s, ${fix(l.gb_per_s, 1)} GB/s` : "") +
    row("roof", l.percent_of_roof == null ? "" : `${fix(l.percent_of_roof, 1)} % of the attainable, ${l.bound}-bound, could take ${time(l.floor_us)}`) +
    row("tactic", esc(l.tactic), l.at) + row("inputs", tensors(l.ins || [])) + row("outputs", tensors(l.outs || [])) +
    row("ONNX nodes", (l.onnx || []).map(esc).join("<br>")) + extra + `</dl><button class="btn" data-graph="${i}">show in the graph</button>` +
    `<p class="src">layer: ${esc(l.at)}<br>time: ${esc(l.from || "no record")}</p>`;
  panel.hidden = false;
  $$(".on").forEach(e => e.classList.remove("on"));
  $$(`[data-i="${i}"]`).forEach(e => e.classList.add("on"));
}
document.addEventListener("click", e => {
  const t = e.target;
  if (t.closest(".close")) { panel.hidden = true; return; }
  const g = t.closest("[data-graph]");
  if (g) { focusNode(+g.dataset.graph); return; }
  const n = t.closest("[data-i]");
  if (n && !moved) show(+n.dataset.i);
});
document.addEventListener("keydown", e => { if (e.key === "Escape" && panel) panel.hidden = true; });

/* ---- layer table: rows are made as they are scrolled to */
const box = $("#rows"), body = $("#rows tbody"), query = $("#q"), PAGE = 150;
const timed = layers.some((l) => l.time_us != null);
let sort = {key: timed ? "time_us" : "min_bytes", up: false}, kind = "", shown = [], made = 0;
const cells = l => `<tr data-i="${l.index}"><td class="r">${l.index}</td><td class="name" title="${esc(l.name)}"><i class="dotk" style="--c:var(--k-${l.kind})"></i> ${esc(middle(l.name, 72))}</td>` +
  `<td>${esc(l.type)}</td><td>${esc(l.precision)}</td><td class="r" title="${esc(l.from)}">${fix(l.time_us, 2)}</td><td class="r" title="${esc(l.from)}">${fix(l.percent, 1)}</td>` +
  `<td>${esc(l.output_shape)}</td><td>${esc(l.format)}</td><td class="r" title="${esc(l.at)}">${l.flops ? fix(l.flops / 1e9, 2) : ""}</td>` +
  `<td class="r" title="${esc(l.at)}">${l.min_bytes ? fix(l.min_bytes / 1048576, 2) : ""}</td><td class="r">${l.gb_per_s ? fix(l.gb_per_s, 0) : ""}</td><td class="r">${l.percent_of_roof == null ? "" : fix(l.percent_of_roof, 0)}</td></tr>`;
// On a narrow screen a row is a block of cells, each with the heading of its column (page.css).
function headings(table) {
  const names = $$("th", table).map(h => h.textContent);
  $$("tbody tr:not([data-h])", table).forEach(r => { r.dataset.h = ""; [...r.cells].forEach((c, j) => c.dataset.h = names[j] || ""); });
}
$$("table").forEach(headings);
function more() {
  body.insertAdjacentHTML("beforeend", shown.slice(made, made + PAGE).map(cells).join(""));
  made = Math.min(made + PAGE, shown.length);
  headings(box);
}
function refresh() {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = layers.filter(l => (!kind || l.kind === kind) && words.every(w => l.text.includes(w)));
  const k = sort.key, d = sort.up ? 1 : -1;
  shown.sort((a, b) => {
    const x = a[k], y = b[k];
    if (x == null || y == null) return x == null ? (y == null ? a.index - b.index : 1) : -1;
    return (x < y ? -d : x > y ? d : a.index - b.index);
  });
  const us = shown.reduce((t, l) => t + (l.time_us || 0), 0);
  $("#count").textContent = `${shown.length} of ${layers.length} layers${timed ? `, ${time(us)}` : ""}`;
  $$("#rows th[data-k]").forEach(h => h.setAttribute("aria-sort", h.dataset.k === k ? (sort.up ? "ascending" : "descending") : "none"));
  body.innerHTML = ""; made = 0; box.scrollTop = 0; more();
}
if (box) {
  for (const l of layers) l.text = [l.name, (l.raw || {})["name in the engine"], l.type, l.kind, l.precision, l.tactic, l.format, ...(l.onnx || [])].join(" ").toLowerCase();
  query.addEventListener("input", refresh);
  box.addEventListener("scroll", () => { if (made < shown.length && box.scrollTop + box.clientHeight > box.scrollHeight - 300) more(); });
  $$("#rows th[data-k]").forEach(h => h.addEventListener("click", () => {
    sort = {key: h.dataset.k, up: sort.key === h.dataset.k ? !sort.up : !["time_us", "percent", "flops", "min_bytes", "gb_per_s", "percent_of_roof"].includes(h.dataset.k)};
    refresh();
  }));
  $$("[data-kind]").forEach(c => c.addEventListener("click", () => {
    kind = kind === c.dataset.kind ? "" : c.dataset.kind;
    $$("[data-kind]").forEach(o => o.setAttribute("aria-pressed", o.dataset.kind === kind));
    refresh();
  }));
  refresh();
}

/* ---- graph: drag, wheel, pinch; the view box is the state */
const view = $("#view"), pic = $("#graph");
let at = null, moved = false;
function apply() { pic.setAttribute("viewBox", `${at.x} ${at.y} ${at.w} ${at.h}`); }
function focusNode(i) {
  const n = pic && $(`.g-n[data-i="${i}"]`, pic);
  if (!n) return;
  const m = n.transform.baseVal[0].matrix, w = Math.min(900, at.fw), h = w * view.clientHeight / view.clientWidth;
  Object.assign(at, {w, h, x: m.e + 100 - w / 2, y: m.f + 23 - h / 2});
  apply(); show(i); view.scrollIntoView({block: "center"});
}
function zoom(f, cx, cy) {
  const r = view.getBoundingClientRect(), u = (cx - r.left) / r.width, v = (cy - r.top) / r.height;
  const w = Math.min(Math.max(at.w * f, 120), at.fw * 3 + at.fh * 3), h = w * r.height / r.width;
  at.x += (at.w - w) * u; at.y += (at.h - h) * v; at.w = w; at.h = h; apply();
}
function fit(all) {
  const b = pic.dataset.box.split(" ").map(Number), ratio = view.clientHeight / view.clientWidth;
  const w = all ? Math.max(b[2], b[3] / ratio) : Math.min(Math.max(b[2], 1000), 1500);
  // What does not fit shows the layer that takes the engine's input.
  const [x, y] = pic.dataset.start.split(" ").map(Number), near = !all && b[2] > w;
  const left = near ? Math.min(Math.max(0, x - w / 2), b[2] - w) : (b[2] - w) / 2;
  at = {fw: b[2], fh: b[3], w, h: w * ratio, x: left, y: near ? Math.max(0, y - 60) : 0}; apply();
}
if (view && pic) {
  pic.dataset.box = pic.getAttribute("viewBox"); fit(false);
  new ResizeObserver(() => { at.h = at.w * view.clientHeight / Math.max(view.clientWidth, 1); apply(); }).observe(view);
  const touch = new Map();
  let start = null;
  view.addEventListener("pointerdown", e => { touch.set(e.pointerId, e); start = {x: e.clientX, y: e.clientY}; moved = false; });
  addEventListener("pointermove", e => {
    const old = touch.get(e.pointerId);
    if (!old) return;
    if (Math.hypot(e.clientX - start.x, e.clientY - start.y) > 4) moved = true;
    if (touch.size === 2) {
      const o = [...touch.values()].find(p => p.pointerId !== e.pointerId), d = (a, b) => Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY) || 1;
      zoom(d(old, o) / d(e, o), (e.clientX + o.clientX) / 2, (e.clientY + o.clientY) / 2);
    } else {
      const s = at.w / view.clientWidth;
      at.x -= (e.clientX - old.clientX) * s; at.y -= (e.clientY - old.clientY) * s; apply();
    }
    touch.set(e.pointerId, e);
  });
  const up = e => { touch.delete(e.pointerId); setTimeout(() => moved = false, 0); };
  addEventListener("pointerup", up); addEventListener("pointercancel", up);
  view.addEventListener("wheel", e => { if (e.ctrlKey || document.activeElement === view) { e.preventDefault(); zoom(e.deltaY > 0 ? 1.18 : 0.85, e.clientX, e.clientY); } }, {passive: false});
  const mid = () => { const r = view.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; };
  $("#zin").onclick = () => zoom(0.7, ...mid()); $("#zout").onclick = () => zoom(1.4, ...mid());
  $("#zfit").onclick = () => fit(true); $("#zone").onclick = () => fit(false);
  $("#gq").addEventListener("input", e => {
    const w = e.target.value.toLowerCase().trim();
    let first = -1;
    $$(".g-n", pic).forEach(n => {
      const hit = !!w && layers[+n.dataset.i]?.text.includes(w);
      n.classList.toggle("hit", hit);
      if (hit && first < 0) first = +n.dataset.i;
    });
    if (first >= 0) { const m = $(`.g-n[data-i="${first}"]`, pic).transform.baseVal[0].matrix; at.x = m.e + 100 - at.w / 2; at.y = m.f + 23 - at.h / 2; apply(); }
  });
}
