// The timeline widget: one module, no network, no kernel. First the model (pure functions, mirrored in
// course_lib/simulate/buckets.py and compared with it by tests), then drawing, then the view.

// ---- Model. Seconds and bytes; `ends` are the indices at which buckets stop, in ready order. ----

const MB = 2 ** 20;
const cost = (link, bytes) => link.a + link.beta * bytes;

// DDP's rule: a bucket closes as soon as its size is at least its cap; the last cap repeats.
export function cappedEnds(bytes, caps) {
  const ends = [];
  let size = 0;
  bytes.forEach((b, j) => {
    size += b;
    if (size >= caps[Math.min(ends.length, caps.length - 1)]) {
      ends.push(j + 1);
      size = 0;
    }
  });
  return size ? [...ends, bytes.length] : ends;
}

// The contiguous plan that ends soonest, and among those the one with the fewest buckets: see `best_plan`.
export function bestEnds({ bytes, ready }, link) {
  const n = bytes.length, before = [0], soonest = [0];
  for (const b of bytes) before.push(before.at(-1) + b);
  for (let j = 1; j <= n; j++) {
    let least = Infinity;
    for (let i = 0; i < j; i++) {
      least = Math.min(least, Math.max(soonest[i], ready[j - 1]) + cost(link, before[j] - before[i]));
    }
    soonest.push(least);
  }
  const ends = [];
  for (let j = n, deadline = soonest[n] * (1 + 1e-12); j > 0;) {
    ends.push(j);
    let i = 0;
    while (Math.max(soonest[i], ready[j - 1]) > deadline - cost(link, before[j] - before[i])) i++;
    deadline -= cost(link, before[j] - before[i]);
    j = i;
  }
  return ends.reverse();
}

// f_i = max(f_{i-1}, r_i) + a + beta*S_i; step = (N-1)(Tf+Tb) + Tf + max(Tb, f_last) + To.
export function predict({ bytes, ready, Tf, Tb, To }, link, ends, N) {
  const sizes = [], starts = [], finish = [];
  let from = 0, free = 0, sent = 0;
  for (const end of ends) {
    let size = 0;
    for (let j = from; j < end; j++) size += bytes[j];
    starts.push(Math.max(free, ready[end - 1]));
    free = starts.at(-1) + cost(link, size);
    sizes.push(size);
    finish.push(free);
    sent += cost(link, size);
    from = end;
  }
  const total = sizes.reduce((sum, s) => sum + s, 0);
  const Tc = N * (Tf + Tb) + To, Tm = cost(link, total);
  const begin = (N - 1) * (Tf + Tb) + Tf, step = begin + Math.max(Tb, free) + To;
  const gain = Tc + Tm - Math.max(Tc, Tm);
  return {
    N, sizes, starts, finish, begin, step, Tc, Tm, exposed: Math.max(0, free - Tb), share: sent / step,
    serial: Tc + Tm, limit: Math.max(Tc, Tm), fair: gain < 0.05 * (Tc + Tm) ? null : (Tc + Tm - step) / gain,
  };
}

// The prediction as the two rows that `scene.scene` makes of its timeline. Nanoseconds.
export function rows({ Tf, Tb, To }, p) {
  const ns = (t) => Math.round(t * 1e9), micro = Tf + Tb, backward = ns(p.N * micro), stop = ns(p.step);
  const bar = (name, a, b, bytes, bucket, pieces) => ({ name, start: a, stop: b, bytes, bucket, track: 0, pieces });
  const work = (name, t, u) => bar(name, ns(t), ns(u), -1, -1, [["compute", ns(t), ns(u)]]);
  const compute = [];
  for (let k = 0; k < p.N; k++) {
    compute.push(work(`forward ${k}`, k * micro, k * micro + Tf));
    compute.push(work(`backward ${k}`, k * micro + Tf, (k + 1) * micro));
  }
  if (To) compute.push(work("optimizer", p.step - To, p.step));
  const wire = p.sizes.map((size, i) => {
    const a = ns(p.begin + p.starts[i]), b = ns(p.begin + p.finish[i]), pieces = [];
    if (a < backward) pieces.push(["hidden", a, Math.min(b, backward)]);
    if (b > backward) pieces.push(["exposed", Math.max(a, backward), b]);
    return bar("all_reduce", a, b, size, i, pieces);
  });
  const row = (role, bars) => ({ rank: 0, role, tracks: 1, stop, backward, bars });
  return [row("compute", compute), row("wire", wire)];
}

export function endsOf(data, setting, link) {
  if (setting.plan === "best") return bestEnds(data.profile, link);
  const cap = setting.bucket_mb * MB;
  return cappedEnds(data.profile.bytes, setting.plan === "first" ? [MB, cap] : [cap]);
}

// Gbit/s on the wire to seconds per byte of gradient: a ring of n ranks moves 2(n-1)/n bytes for each.
export const linkOf = (data, { gbit, latency_ms }) => ({ a: latency_ms / 1e3, beta: (data.wire_factor * 8e-9) / gbit });

// ---- Words. ----

export function ms(ns) {
  const v = ns / 1e6, size = Math.abs(v);
  return `${v.toFixed(size < 1 ? 3 : size < 10 ? 2 : 1)} ms`;
}
export function size(n) {
  if (n < 0) return "unknown size";
  return n >= MB ? `${(n / MB).toFixed(2)} MB` : `${(n / 1024).toFixed(1)} KiB`;
}
const percent = (share) => (share == null ? "unknown" : `${(100 * share).toFixed(0)} %`);
const plain = (v) => `${+Number(v).toPrecision(3)}`;
const SLIDERS = [
  ["bucket_mb", "Bucket size", (v) => `${plain(v)} MB`],
  ["gbit", "Link speed", (v) => `${plain(v)} Gbit/s`],
  ["latency_ms", "Latency of one collective", (v) => `${plain(v)} ms`],
  ["micro_steps", "Micro-steps N", (v) => `${v}`],
];
const PLANS = [
  ["equal", "equal buckets"],
  ["first", "1 MB first, then equal (DDP's default)"],
  ["best", "best plan for this wire"],
];

// ---- Drawing. Everything in CSS pixels; the canvas is scaled once. ----

const LABELS = 124, PAD = 10, AXIS = 24, CHART = 250;

function stripes(ctx, colour) {
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 12;
  pen.strokeStyle = colour;
  pen.lineWidth = 2.4;
  for (const x of [-12, 0, 12]) {
    pen.beginPath();
    pen.moveTo(x - 1, 13);
    pen.lineTo(x + 13, -1);
    pen.stroke();
  }
  const pattern = ctx.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(0.5));
  return pattern;
}

// Rows from top to bottom: the prediction once above all ranks, then what was measured.
export function stack(lanes, predicted, measured) {
  let top = 0;
  const place = (row, i, outline, height) => {
    if (top) top += row.role === "compute" ? lanes.ranks : lanes.between;
    const slot = { row, outline, top, height };
    top += height;
    return slot;
  };
  const slots = [
    ...predicted.map((row, i) => place(row, i, true, measured.length ? lanes.predicted : lanes[row.role])),
    ...measured.map((row, i) => place(row, i, false, lanes[row.role])),
  ];
  return { slots, height: top };
}

function drawBar(pen, bar, slot, x, look, hits) {
  const { ctx, style, theme, hatch } = pen, high = slot.height / slot.row.tracks, y = slot.y + bar.track * high;
  const left = x(bar.start), right = x(bar.stop), edge = pen.left, end = pen.right;
  if (right < edge || left > end) return;
  for (const [name, start, stop] of bar.pieces) {
    const a = Math.max(x(start), edge - 2), w = Math.max(Math.min(x(stop), end + 2) - a, 0.6);
    const { fill } = style.looks[name];
    if (name === "wait") {
      ctx.globalAlpha = 0.72;
      ctx.fillStyle = theme.paper;
      ctx.fillRect(a, y, w, high);
      ctx.globalAlpha = 1;
      for (const [colour, width] of [[theme.muted, 3], [fill, 1.8]]) {
        ctx.strokeStyle = colour;
        ctx.lineWidth = width;
        ctx.strokeRect(a + 1.5, y + 1.5, Math.max(w - 3, 0.5), high - 3);
      }
    } else if (slot.outline) {
      if (name === "exposed") {
        ctx.fillStyle = hatch.outline;
        ctx.fillRect(a, y, w, high);
      }
      ctx.strokeStyle = fill;
      ctx.lineWidth = 1.3;
      ctx.strokeRect(a + 0.6, y + 0.6, Math.max(w - 1.2, 0.3), high - 1.2);
    } else {
      ctx.fillStyle = fill;
      ctx.fillRect(a, y, w, high);
      if (name === "exposed") {
        ctx.fillStyle = hatch.filled;
        ctx.fillRect(a, y, w, high);
      }
    }
  }
  if (!slot.outline && right - left > 3) {
    ctx.fillStyle = theme.paper;
    ctx.fillRect(right - 0.6, y, 0.6, high);
  }
  hits.push({ bar, slot, x: Math.max(left, edge), y, w: Math.min(right, end) - Math.max(left, edge), h: high });
  if (bar.bucket >= 0 && high >= 9) drawNumber(pen, bar, slot, x, y + high / 2, high);
}

function drawNumber(pen, bar, slot, x, middle, high) {
  const { ctx, style, theme } = pen, text = String(bar.bucket);
  const begin = bar.pieces.reduce((t, [name, , stop]) => (name === "wait" ? stop : t), bar.start);
  const left = Math.max(x(begin), pen.left), right = Math.min(x(bar.stop), pen.right);
  if (right - left < 7 * text.length + 4) return;
  const moving = bar.pieces.filter(([name, , stop]) => name !== "wait" && stop > begin);
  const most = moving.sort((p, q) => q[2] - Math.max(q[1], begin) - (p[2] - Math.max(p[1], begin)))[0];
  const look = style.looks[most ? most[0] : "hidden"];
  ctx.font = `600 ${high > 18 ? 11 : 10}px ${pen.font}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  // A plate under the number: no stripe may run through it.
  const wide = 7 * text.length + 4, middleX = (left + right) / 2;
  if (most?.[0] === "exposed") {
    ctx.fillStyle = slot.outline ? theme.paper : look.fill;
    ctx.fillRect(middleX - wide / 2, middle - 6.5, wide, 13);
  }
  ctx.fillStyle = slot.outline ? theme.ink : look.ink;
  ctx.fillText(text, middleX, middle + 0.5);
}

export function ticks(from, to, most) {
  const raw = (to - from) / most, ten = 10 ** Math.floor(Math.log10(raw));
  const every = [1, 2, 5, 10].map((k) => k * ten).find((v) => v >= raw * 0.999) ?? 10 * ten;
  const out = [];
  for (let k = Math.ceil(from / every); k * every <= to; k++) out.push(k * every);
  return { every, at: out };
}

function line(ctx, x, y0, y1, colour, width, dash = []) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  ctx.moveTo(x, y0);
  ctx.lineTo(x, y1);
  ctx.stroke();
  ctx.setLineDash([]);
}

function drawTimeline(pen, slots, window_, marks, height) {
  const { ctx, theme } = pen, wide = pen.right - pen.left, hits = [];
  const x = (ns) => pen.left + ((ns - window_.from) / (window_.to - window_.from)) * wide;
  ctx.clearRect(0, 0, pen.width, height);
  ctx.textBaseline = "middle";
  for (const slot of slots) {
    slot.y = pen.head + slot.top;
    const middle = slot.y + slot.height / 2;
    if (slot.row.role === "compute") {
      ctx.font = `${slot.outline ? "italic" : "600"} 12px ${pen.font}`;
      ctx.fillStyle = theme.ink;
      ctx.textAlign = "left";
      ctx.fillText(slot.outline ? "predicted" : `rank ${slot.row.rank}`, 0, middle);
    }
    ctx.font = `11px ${pen.font}`;
    ctx.fillStyle = theme.muted;
    ctx.textAlign = "right";
    ctx.fillText(slot.row.role, LABELS - 8, middle);
  }
  ctx.save();
  ctx.beginPath();
  ctx.rect(pen.left, pen.head - 1, wide, height - pen.head - AXIS + 2);
  ctx.clip();
  for (const slot of slots) {
    const a = x(0), b = x(slot.row.stop);
    ctx.fillStyle = theme.lane;
    ctx.strokeStyle = theme.grid;
    ctx.lineWidth = 0.8;
    if (slot.outline) ctx.strokeRect(a + 0.4, slot.y + 0.4, b - a - 0.8, slot.height - 0.8);
    else ctx.fillRect(a, slot.y, b - a, slot.height);
    for (const bar of slot.row.bars) drawBar(pen, bar, slot, x, null, hits);
  }
  ctx.restore();
  drawMarks(pen, slots, marks, x, height);
  drawAxis(pen, window_, x, height);
  return hits;
}

// Lines across the lanes, their names above: the limit's and the serial step's in one row, so they must not touch.
function drawMarks(pen, slots, marks, x, height) {
  const { ctx, theme } = pen, inside = (ns) => ns != null && x(ns) >= pen.left - 1 && x(ns) <= pen.right + 1;
  const width = (text) => ctx.measureText(text).width + 8;
  const say = (px, text, y, left = px + width(text) > pen.right) => {
    ctx.fillText(text, px + 4 - (left ? width(text) : 0), y);
  };
  ctx.font = `11px ${pen.font}`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  ctx.fillStyle = theme.ink;
  const limit = `physical limit ${ms(marks.limit ?? 0)}`, serial = `serial ${ms(marks.serial ?? 0)}`;
  if (inside(marks.serial)) {
    line(ctx, x(marks.serial), 2, height - AXIS, theme.muted, 1.2, [1, 3]);
    if (!(x(marks.serial) - x(marks.limit) < width(serial))) say(x(marks.serial), serial, 8);
  }
  if (inside(marks.limit)) {
    const crowded = inside(marks.serial) && x(marks.serial) - x(marks.limit) < width(limit) + width(serial);
    line(ctx, x(marks.limit), 2, height - AXIS, theme.ink, 1.3, [5, 4]);
    say(x(marks.limit), limit, 8, crowded || x(marks.limit) + width(limit) > pen.right);
  }
  let said = false;
  for (let i = 0; i + 1 < slots.length; i += 2) {
    const { row, y } = slots[i], below = slots[i + 1];
    if (!inside(row.backward)) continue;
    line(ctx, x(row.backward), said ? y - 4 : pen.head - 16, below.y + below.height, theme.ink, 1);
    if (!said) say(x(row.backward), "end of backward", pen.head - 10);
    said = true;
  }
}

function drawAxis(pen, { from, to }, x, height) {
  const { ctx, theme } = pen, { every, at } = ticks(from / 1e6, to / 1e6, Math.max(3, (pen.right - pen.left) / 60));
  const digits = Math.max(0, -Math.floor(Math.log10(every) + 1e-9));
  ctx.font = `11px ${pen.font}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "top";
  ctx.fillStyle = theme.muted;
  for (const t of at) {
    const px = x(t * 1e6);
    line(ctx, px, height - AXIS + 3, height - AXIS + 7, theme.grid, 1);
    if (px < pen.right - 34) ctx.fillText(t.toFixed(digits), px, height - AXIS + 9);
  }
  ctx.textAlign = "right";
  ctx.fillText("ms", pen.right, height - AXIS + 9);
}

// Step time over bucket size: predicted line, measured points with their spread, best plan, where we are.
function drawCurve(pen, width, height, curve) {
  const { ctx, theme, style } = pen, left = 40, right = width - 8, top = 20, bottom = height - 30;
  const { line: dots, points, best, here, level } = curve;
  const every = [...dots.map((d) => d[1]), ...points.flatMap((p) => [p[2], p[3]]), here[1]];
  if (best != null) every.push(best);
  const low = Math.min(...every), high = Math.max(...every), margin = 0.08 * (high - low || high);
  const across = [...dots.map((d) => d[0]), ...points.map((p) => p[0])].map(Math.log2);
  const x0 = Math.min(...across), x1 = Math.max(...across);
  const x = (mb) => left + ((Math.log2(mb) - x0) / (x1 - x0 || 1)) * (right - left);
  const y = (t) => bottom - ((t - low + margin) / (high - low + 2 * margin)) * (bottom - top);
  const path = (list) => {
    ctx.beginPath();
    list.forEach(([a, b]) => ctx.lineTo(x(a), y(b)));
    ctx.stroke();
  };
  ctx.clearRect(0, 0, width, height);
  ctx.font = `11px ${pen.font}`;
  ctx.textBaseline = "middle";
  for (const t of ticks(low - margin, high + margin, 7).at) {
    ctx.fillStyle = theme.grid;
    ctx.fillRect(left, y(t), right - left, 0.7);
    ctx.fillStyle = theme.muted;
    ctx.textAlign = "right";
    ctx.fillText(plain(t), left - 6, y(t));
  }
  ctx.textAlign = "left";
  ctx.fillText("step time, ms, over bucket size, MB", 0, 7);
  ctx.textAlign = "center";
  for (let k = Math.ceil(x0); k <= x1; k++) ctx.fillText(plain(2 ** k), x(2 ** k), bottom + 12);
  if (best != null) {
    ctx.strokeStyle = style.best;
    ctx.lineWidth = 2;
    path([[2 ** x0, best], [2 ** x1, best]]);
    ctx.fillStyle = theme.ink;
    ctx.textAlign = "left";
    ctx.fillText(`best plan ${ms(best * 1e6)}`, left + 2, y(best) + (y(best) + 16 > bottom ? -9 : 9));
  }
  ctx.strokeStyle = theme.ink;
  ctx.lineWidth = 1.6;
  path(dots);
  ctx.globalAlpha = curve.comparable ? 1 : 0.35;
  for (const [mb, median, lo, hi] of points) {
    line(ctx, x(mb), y(lo), y(hi), theme.ink, 1.4);
    ctx.beginPath();
    ctx.arc(x(mb), y(median), 3.6, 0, 7);
    ctx.fillStyle = theme.ink;
    ctx.fill();
  }
  ctx.globalAlpha = 1;
  const [mb, t] = here, cx = x(Math.min(Math.max(mb, 2 ** x0), 2 ** x1));
  if (!level) line(ctx, cx, top, bottom, theme.muted, 1, [2, 3]);
  ctx.beginPath();
  ctx.arc(cx, y(t), 7, 0, 7);
  ctx.strokeStyle = style.looks.exposed.fill;
  ctx.lineWidth = 2.6;
  ctx.stroke();
  return (px) => 2 ** (x0 + ((px - left) / (right - left)) * (x1 - x0));
}

// ---- View: elements, input, theme. ----

const CSS = `
.course-timeline { --own: #fff; position: relative; box-sizing: border-box; max-width: 1400px; padding: 12px 14px;
  font: 13px/1.35 var(--jp-ui-font-family, system-ui, sans-serif); color: var(--ink);
  background: var(--jp-layout-color0, var(--own)); }
@media (prefers-color-scheme: dark) { .course-timeline { --own: #111418; } }
.course-timeline * { box-sizing: border-box; }
.course-timeline .title { font-weight: 600; font-size: 15px; margin-bottom: 8px; }
.course-timeline .strip { display: grid; align-items: baseline; gap: 0 8px; margin: 0 0 10px;
  grid-template-columns: ${LABELS - 8}px repeat(4, minmax(0, 1fr)); }
.course-timeline.narrow .strip { grid-template-columns: 84px repeat(4, minmax(0, 1fr)); }
.course-timeline .strip div { white-space: nowrap; font-variant-numeric: tabular-nums; }
.course-timeline .strip .big { font-size: 19px; font-weight: 600; line-height: 1.3; }
.course-timeline .strip .predicted { font-style: italic; }
.course-timeline .muted, .course-timeline .note { color: var(--muted); font-size: 12px; }
.course-timeline canvas { display: block; width: 100%; border-radius: 2px; touch-action: pan-y; }
.course-timeline .lanes { position: relative; cursor: grab; }
.course-timeline .lanes:active { cursor: grabbing; }
.course-timeline .legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 8px 0 0; font-size: 12px; }
.course-timeline .legend i { display: inline-block; width: 16px; height: 10px; margin-right: 6px; }
.course-timeline .panel { display: grid; gap: 24px; margin: 14px 0 0;
  grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
.course-timeline.narrow .panel { grid-template-columns: minmax(0, 1fr); }
.course-timeline .control { display: grid; grid-template-columns: 1fr auto; margin-bottom: 6px; }
.course-timeline .control input, .course-timeline .control select { grid-column: 1 / -1; width: 100%; margin: 2px 0; }
.course-timeline select, .course-timeline button { font: inherit; color: inherit; padding: 2px 6px; border-radius: 3px;
  background: var(--lane); border: 1px solid var(--grid); }
.course-timeline output { font-weight: 600; font-variant-numeric: tabular-nums; }
.course-timeline input { accent-color: var(--accent); }
.course-timeline :focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.course-timeline .note { margin: 10px 0 0; text-wrap: pretty; }
.course-timeline .hint { margin-top: 2px; }
.course-timeline .tip { position: absolute; z-index: 5; pointer-events: none; padding: 5px 8px; white-space: pre;
  font-size: 12px; color: var(--ink); background: var(--paper); border: 1px solid var(--muted); border-radius: 3px; }
.course-timeline .spoken { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
`;
const HINT = "Drag to pan; zoom with the wheel after a click, with Ctrl and wheel, or with + and −; 0 shows all; " +
  "[ and ] walk over the bars.";
let instances = 0;

function element(parent, tag, options = {}, attributes = {}) {
  const node = parent.appendChild(Object.assign(document.createElement(tag), options));
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const dark = (colour) => {
  const [r, g, b] = (colour.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
};

function nearest(stops, value) {
  const far = (stop) => Math.abs(Math.log((stop + 1e-9) / (value + 1e-9)));
  return stops.reduce((best, stop, i) => (far(stop) < far(stops[best]) ? i : best), 0);
}

function render({ model, el }) {
  const data = model.get("data"), style = data.style, live = data.profile != null;
  const id = `course-timeline-${++instances}`;
  const setting = Object.fromEntries([...SLIDERS.map(([key]) => key), "plan"].map((key) => [key, model.get(key)]));
  const initial = { ...data.start };
  const root = element(el, "section", { className: "course-timeline" }, { "aria-label": data.title || "Timeline" });
  element(root, "style", { textContent: CSS });
  if (data.title) element(root, "div", { className: "title", textContent: data.title });
  const strip = element(root, "div", { className: "strip" });
  const lanes = element(root, "div", { className: "lanes" });
  const canvas = element(lanes, "canvas", {}, { tabindex: 0, role: "img", "aria-describedby": `${id}-keys` });
  const tip = element(lanes, "div", { className: "tip", hidden: true });
  const legend = element(root, "div", { className: "legend" });
  const panel = live ? element(root, "div", { className: "panel" }) : null;
  const controls = live ? makeControls(panel, data, id, input, reset) : null;
  const chart = live ? element(panel, "canvas", {}, { role: "img" }) : null;
  const note = element(root, "div", { className: "note" });
  element(root, "div", { className: "note hint", id: `${id}-keys`, textContent: HINT });
  const spoken = element(root, "div", { className: "spoken" }, { role: "status", "aria-live": "polite" });
  // JupyterLab must not take keys meant for the widget: "0 0" would restart the kernel, arrows move to another cell.
  // Its shortcuts match the focused element itself, so the mark has to be there and not on a parent.
  for (const node of root.querySelectorAll("canvas, input, select, button")) node.dataset.lmSuppressShortcuts = "true";
  const pen = { ctx: canvas.getContext("2d"), style, left: LABELS };
  const chartPen = { ctx: chart?.getContext("2d"), style };
  let theme, zoom = null, hits = [], chosen = -1, full = 1, speech = 0, toSize;
  let widthSeen = "", curveAt = "", curve = null;

  function readTheme() {
    const seen = getComputedStyle(root), name = dark(seen.backgroundColor) ? "dark" : "light";
    theme = { ...style.themes[name], paper: seen.backgroundColor };
    for (const key of ["paper", "ink", "muted", "lane", "grid"]) root.style.setProperty(`--${key}`, theme[key]);
    root.style.setProperty("--accent", style.looks[name === "dark" ? "copy" : "compute"].fill);
    root.style.colorScheme = root.dataset.theme = name;
    for (const p of [pen, chartPen]) Object.assign(p, { theme, font: seen.fontFamily });
    pen.hatch = { filled: stripes(pen.ctx, theme.paper), outline: stripes(pen.ctx, style.looks.exposed.fill) };
    drawLegend();
  }

  function drawLegend() {
    legend.replaceChildren();
    for (const name of data.looks) {
      const look = style.looks[name];
      const key = element(element(legend, "span", {}), "i");
      key.parentNode.append(look.words);
      if (name === "wait") {
        Object.assign(key.style, { border: `2px solid ${look.fill}`, outline: `1px solid ${theme.muted}` });
      } else key.style.background = look.fill;
      if (look.hatch) {
        key.style.backgroundImage =
          `repeating-linear-gradient(135deg, transparent 0 2.5px, ${theme.paper} 2.5px 4px)`;
      }
    }
  }

  function fit(target, height) {
    const wide = Math.max(200, target.parentNode.clientWidth && target.getBoundingClientRect().width);
    const ratio = window.devicePixelRatio || 1;
    if (target.width !== Math.round(wide * ratio) || target.height !== Math.round(height * ratio)) {
      target.style.height = `${height}px`;
      [target.width, target.height] = [Math.round(wide * ratio), Math.round(height * ratio)];
    }
    target.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    return wide;
  }

  function shown() {
    const sizes = data.measured.map((m) => m.bucket_mb);
    return data.measured[sizes.every(Boolean) && sizes.length ? nearest(sizes, setting.bucket_mb) : 0];
  }

  function curveOf(link) {
    const key = [setting.gbit, setting.latency_ms, setting.micro_steps, setting.plan].join();
    if (key !== curveAt) {
      const at = (ends) => predict(data.profile, link, ends, setting.micro_steps).step * 1e3;
      const plan = setting.plan === "best" ? "equal" : setting.plan;
      const ends = (bucket_mb) => endsOf(data, { ...setting, plan, bucket_mb }, link);
      curve = {
        line: data.stops.bucket_mb.map((mb) => [mb, at(ends(mb))]),
        best: data.profile.bytes.length > 1200 ? null : at(bestEnds(data.profile, link)),
      };
      curveAt = key;
    }
    return curve;
  }

  function redraw(since = performance.now()) {
    const began = performance.now(), measured = shown(), link = live && linkOf(data, setting);
    const p = live ? predict(data.profile, link, endsOf(data, setting, link), setting.micro_steps) : null;
    const { slots, height } = stack(style.lanes, live ? rows(data.profile, p) : [], measured?.rows ?? []);
    pen.head = live || data.limit_ns != null ? 34 : 18;
    const high = height + pen.head + AXIS + 4;
    pen.width = fit(canvas, high);
    pen.right = pen.width - PAD;
    full = 1.01 * Math.max(live ? 1e9 * Math.max(p.step, p.serial) : 0, measured?.step_ns ?? 0, data.limit_ns ?? 0);
    hits = drawTimeline(pen, slots, zoom ?? { from: 0, to: full },
      { limit: live ? p.limit * 1e9 : data.limit_ns, serial: live ? p.serial * 1e9 : null }, high);
    say(p, measured);
    if (live) {
      // Points were measured on one wire with one N: elsewhere they are only a faint memory.
      const same = ([key]) => Math.abs(setting[key] - initial[key]) <= 1e-9 * initial[key];
      const mean = data.profile.bytes.reduce((a, b) => a + b, 0) / p.sizes.length / MB;
      const best = setting.plan === "best";
      toSize = drawCurve(chartPen, fit(chart, CHART), CHART, {
        ...curveOf(link), points: data.points, comparable: SLIDERS.slice(1).every(same), level: best,
        here: [best ? mean : setting.bucket_mb, p.step * 1e3],
      });
      controls.show(setting);
    }
    const done = performance.now();
    root.dataset.drawMs = (done - began).toFixed(2);
    root.dataset.frameMs = (done - since).toFixed(2);
    root.dataset.spans = hits.length;
  }

  function say(p, measured) {
    const wide = (ns) => (ns == null ? (measured.silent ? "nothing sent" : "unknown") : ms(ns));
    const seen = measured && [ms(measured.step_ns), wide(measured.exposed_ns), percent(measured.share),
      measured.fair == null ? "" : measured.fair.toFixed(2)];
    const guess = p && [ms(p.step * 1e9), ms(p.exposed * 1e9), percent(p.share),
      p.fair == null ? "nothing to hide" : p.fair.toFixed(2)];
    const names = ["step", "exposed", "communication", "fair score F"], big = guess ?? seen;
    const tableRow = (label, cells, className) => {
      element(strip, "div", { className: `${label} ${className === "big" ? "" : className}`, textContent: label });
      names.forEach((_, i) => element(strip, "div", { className, textContent: cells[i] ?? "" }));
    };
    strip.replaceChildren();
    tableRow("", names.map((name, i) => (big[i] ? name : "")), "muted");
    if (guess) tableRow("predicted", guess, "big");
    if (seen) tableRow(measured.provenance.split(" ")[0], seen, guess ? "muted" : "big");
    const sizes = p ? p.sizes.map((s) => plain(s / MB)) : [];
    const plan = p ? `${sizes.length} bucket${sizes.length > 1 ? "s" : ""}: ${sizes.slice(0, 8).join(", ")}` +
      `${sizes.length > 8 ? ", …" : ""} MB` : "";
    const from = measured ? [measured.provenance, measured.bucket_mb && `${plain(measured.bucket_mb)} MB buckets`,
      measured.step != null && `step ${measured.step}`].filter(Boolean).join(", ") : "";
    note.textContent = [plan, p ? "outline: simulated" : "", from].filter(Boolean).join("  ·  ");
    const words = names.map((name, i) => big[i] && `${name} ${big[i]}`).filter(Boolean).join(", ");
    canvas.setAttribute("aria-label", `Timeline, ${p ? "predicted " : ""}${words}`);
    chart?.setAttribute("aria-label", `Step time over bucket size; now ${big[0]}`);
    announce(`${plan ? `${plan}. ` : ""}${words}.`);
  }

  // A screen reader should hear where a slider came to rest, not every value on the way.
  function announce(words) {
    clearTimeout(speech);
    speech = setTimeout(() => (spoken.textContent = words), 250);
  }

  function input(key, value, event, final) {
    setting[key] = value;
    model.set(key, value);
    tip.hidden = true;
    redraw(event?.timeStamp);
    if (final) model.save_changes();
  }

  function reset() {
    for (const key in initial) model.set(key, setting[key] = initial[key]);
    zoom = null;
    model.save_changes();
    redraw();
  }

  function move(from, to, event) {
    const wide = Math.min(Math.max(to - from, full / 1e5), full);
    const start = Math.min(Math.max(from, 0), full - wide);
    zoom = wide >= full ? null : { from: start, to: start + wide };
    tip.hidden = true;
    redraw(event.timeStamp);
  }

  function scale(factor, event, at = 0.5) {
    const { from, to } = zoom ?? { from: 0, to: full }, centre = from + at * (to - from);
    move(centre - (centre - from) * factor, centre + (to - centre) * factor, event);
  }

  function pan(share, event) {
    const { from, to } = zoom ?? { from: 0, to: full };
    move(from + share * (to - from), to + share * (to - from), event);
  }

  function show(hit, speak) {
    if (!(tip.hidden = !hit)) {
      const { bar, slot } = hit, sum = {};
      for (const [name, a, b] of bar.pieces) sum[name] = (sum[name] ?? 0) + b - a;
      const parts = [["hidden", "hidden"], ["exposed", "exposed"], ["wait", "waiting"]]
        .filter(([name]) => sum[name]).map(([name, word]) => `${word} ${ms(sum[name])}`);
      const where = slot.outline ? "predicted" : `rank ${slot.row.rank}`;
      tip.textContent = [
        `${bar.name} (${where}, ${slot.row.role})`,
        bar.bucket >= 0 ? `bucket ${bar.bucket}, ${size(bar.bytes)}` : bar.bytes >= 0 ? size(bar.bytes) : "",
        `start ${ms(bar.start)}, duration ${ms(bar.stop - bar.start)}`, parts.join(", "),
      ].filter(Boolean).join("\n");
      tip.style.left = `${Math.max(0, Math.min(hit.x + hit.w / 2, pen.width - tip.offsetWidth - 4))}px`;
      tip.style.top = `${hit.y + hit.h + 6}px`;
      if (speak) announce(tip.textContent.replaceAll("\n", "; "));
    }
  }

  function hitAt({ offsetX: px, offsetY: py }) {
    return hits.findLast((h) => px >= h.x - 1 && px <= h.x + h.w + 1 && py >= h.y && py <= h.y + h.h);
  }

  const share = (event) => (event.offsetX - pen.left) / (pen.right - pen.left);
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    drag = { at: share(event), ...(zoom ?? { from: 0, to: full }) };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return show(hitAt(event), false);
    const by = (drag.at - share(event)) * (drag.to - drag.from);
    if (by) move(drag.from + by, drag.to + by, event);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (drag = null));
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("blur", () => (tip.hidden = true));
  canvas.addEventListener("dblclick", (event) => scale(Infinity, event));
  // A notebook is scrolled with the wheel: it zooms only after a click into the lanes, or with Ctrl.
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    scale(Math.exp(Math.max(-80, Math.min(80, event.deltaY)) / 200), event, share(event));
  }, { passive: false });
  const actions = {
    "+": (e) => scale(1 / 1.5, e), "=": (e) => scale(1 / 1.5, e), "-": (e) => scale(1.5, e), _: (e) => scale(1.5, e),
    ArrowLeft: (e) => pan(-0.1, e), ArrowRight: (e) => pan(0.1, e),
    0: (e) => move(0, full, e), Home: (e) => move(0, full, e),
    "[": () => show(hits[chosen = (Math.max(chosen, 0) - 1 + hits.length) % hits.length], true),
    "]": () => show(hits[chosen = (chosen + 1) % hits.length], true), Escape: () => (tip.hidden = true),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key](event);
  });
  chart?.addEventListener("click", (event) => {
    const stops = data.stops.bucket_mb;
    if (setting.plan !== "best") input("bucket_mb", stops[nearest(stops, toSize(event.offsetX))], event, true);
  });

  function changed() {
    const keys = Object.keys(setting).filter((key) => setting[key] !== model.get(key));
    for (const key of keys) setting[key] = model.get(key);
    if (keys.length) redraw();
  }
  for (const key in setting) model.on(`change:${key}`, changed);
  const themed = () => (readTheme(), redraw());
  const watchSize = new ResizeObserver(() => {
    const now = `${root.clientWidth}`;
    if (now === widthSeen || !root.clientWidth) return;
    widthSeen = now;
    root.classList.toggle("narrow", root.clientWidth < 560);
    themed();
  });
  const watchTheme = new MutationObserver(themed), scheme = matchMedia("(prefers-color-scheme: dark)");
  watchSize.observe(root);
  watchTheme.observe(document.body,
    { attributes: true, attributeFilter: ["class", "data-jp-theme-light", "data-jp-theme-name"] });
  scheme.addEventListener("change", themed);
  return () => {
    clearTimeout(speech);
    watchSize.disconnect();
    watchTheme.disconnect();
    scheme.removeEventListener("change", themed);
    for (const key in setting) model.off(`change:${key}`, changed);
  };
}

function makeControls(panel, data, id, input, reset) {
  const box = element(panel, "div"), shows = [];
  const control = (key, label) => {
    const row = element(box, "div", { className: "control" });
    element(row, "label", { textContent: label, htmlFor: `${id}-${key}` });
    return row;
  };
  for (const [key, label, words] of SLIDERS) {
    const row = control(key, label), stops = data.stops[key];
    const value = element(row, "output", {}, { for: `${id}-${key}` });
    const range = element(row, "input", { id: `${id}-${key}` },
      { type: "range", min: 0, max: stops.length - 1, step: 1, "data-key": key });
    range.addEventListener("input", (event) => input(key, stops[range.valueAsNumber], event, false));
    range.addEventListener("change", (event) => input(key, stops[range.valueAsNumber], event, true));
    shows.push((setting) => {
      range.value = nearest(stops, setting[key]);
      range.disabled = key === "bucket_mb" && setting.plan === "best";
      value.textContent = range.disabled ? "as planned" : words(setting[key]);
      range.setAttribute("aria-valuetext", value.textContent);
    });
  }
  const choice = element(control("plan", "Bucket plan"), "select", { id: `${id}-plan` });
  for (const [value, textContent] of PLANS) element(choice, "option", { value, textContent });
  choice.addEventListener("change", (event) => input("plan", choice.value, event, true));
  element(box, "button", { type: "button", textContent: "Back to the start", onclick: reset });
  shows.push((setting) => (choice.value = setting.plan));
  return { show: (setting) => shows.forEach((each) => each(setting)) };
}

export default { render };
