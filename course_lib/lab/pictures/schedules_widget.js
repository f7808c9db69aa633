// Schedules side by side under sliders. Everything was predicted beforehand (see schedules_widget.py); this only draws.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 700, LEFT = 72, RIGHT = 8, LANE = 20, BETWEEN = 3, TITLE = 24, AXIS = 34;
const ROLES = ["compute", "wire"];

const node = (parent, name, attributes = {}, text = "") => {
  const made = name === "svg" || parent?.namespaceURI === SVG
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  // JupyterLab must not take keys meant for a control; its shortcuts match the focused element itself
  if (name === "input" || name === "select") made.dataset.lmSuppressShortcuts = "true";
  if (text !== "") made.textContent = text;
  parent?.append(made);
  return made;
};

const ms = (ns) => (ns / 1e6 >= 100 ? (ns / 1e6).toFixed(0) : (ns / 1e6).toFixed(2));

export const key = (controls, at) => controls.map((control) => control.stops.indexOf(at[control.name])).join("|");

// The pieces of a lane, in ns.
export function pieces(row, unit) {
  const out = [];
  for (let i = 0; i < row.length; i += 3) out.push({ look: row[i], start: row[i + 1] * unit, length: row[i + 2] * unit });
  return out;
}

export const said = (one) => `${one.name}: step ${ms(one.step)} ms, exposed ${ms(one.exposed)} ms`;

export const words = (run) =>
  [...run.held.map((one) => `${one.name} holds ${one.said}`), ...run.schedules.map(said)].join("; ");

export function ticks(longest) {
  const least = longest / 8, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= least);
  return Array.from({ length: Math.floor(longest / step) + 1 }, (_, k) => k * step);
}

function draw(root, run, data) {
  root.replaceChildren();
  const each = TITLE + ROLES.length * (LANE + BETWEEN), held = run.held.length * (TITLE + LANE + BETWEEN);
  const height = held + run.schedules.length * each + AXIS;
  const longest = Math.max(...run.schedules.map((one) => one.step)), scale = (WIDTH - LEFT - RIGHT) / longest;
  const svg = node(root, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img",
    "aria-label": words(run) });
  const hatch = `hatch-${Math.random().toString(36).slice(2)}`;
  data.looks.forEach((look, index) => {
    if (!look.hatched) return;
    const pattern = node(svg, "pattern", { id: `${hatch}-${index}`, width: 6, height: 6, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" });
    node(pattern, "rect", { width: 6, height: 6, fill: look.fill });
    node(pattern, "rect", { width: 1.6, height: 6, fill: "#fff" });
  });
  const total = (one) => one.parts.reduce((sum, [, size]) => sum + size, 0);
  const room = (WIDTH - LEFT - RIGHT) / Math.max(1, ...run.held.map(total));
  run.held.forEach((one, number) => {
    const top = number * (TITLE + LANE + BETWEEN);
    const title = node(svg, "text", { x: 0, y: top + 15 });
    node(title, "tspan", { class: "name" }, one.name);
    node(title, "tspan", { dx: 12 }, `holds ${one.said}`);
    let x = LEFT;
    for (const [part, size] of one.parts) {
      node(svg, "rect", { x, y: top + TITLE, width: Math.max(0.3, size * room - 0.6), height: LANE,
        fill: data.tints[part] });
      x += size * room;
    }
  });
  run.schedules.forEach((one, number) => {
    const top = held + number * each;
    const title = node(svg, "text", { x: 0, y: top + 15 });
    node(title, "tspan", { class: "name" }, one.name);
    node(title, "tspan", { dx: 12 }, `step ${ms(one.step)} ms, exposed ${ms(one.exposed)} ms`);
    one.lanes.forEach((row, lane) => {
      const y = top + TITLE + lane * (LANE + BETWEEN);
      node(svg, "text", { x: LEFT - 8, y: y + 14, "text-anchor": "end", class: "quiet" }, ROLES[lane]);
      node(svg, "rect", { x: LEFT, y, width: one.step * scale, height: LANE, class: "lane" });
      for (const piece of pieces(row, run.unit)) {
        const width = piece.length * scale, look = data.looks[piece.look];
        node(svg, "rect", { x: LEFT + piece.start * scale, y, width: Math.max(0.3, width - (width > 3 ? 0.6 : 0)),
          height: LANE, fill: look.hatched ? `url(#${hatch}-${piece.look})` : look.fill });
      }
    });
  });
  const base = held + run.schedules.length * each;
  for (const tick of ticks(longest)) {
    node(svg, "text", { x: LEFT + tick * scale, y: base + 12, "text-anchor": "middle", class: "quiet" },
      Number((tick / 1e6).toPrecision(3)));
  }
  node(svg, "text", { x: LEFT, y: base + 28, class: "quiet" }, `milliseconds since the step began; ${data.provenance}`);
}

function render({ model, el }) {
  const data = model.get("data"), at = { ...model.get("at") };
  el.classList.add("course-schedules");
  node(el, "style", {}, `.course-schedules { max-width: ${WIDTH}px; font: 13px sans-serif; color: inherit }
    .course-schedules svg { width: 100% } .course-schedules text { font-size: 11px; fill: currentColor }
    .course-schedules .name { font-weight: bold; font-size: 12px } .course-schedules .quiet { opacity: 0.7 }
    .course-schedules .lane { fill: rgba(128, 128, 128, 0.15) }
    .course-schedules .control { display: grid; grid-template-columns: 13em 16em 4em; gap: 0.6em; margin: 0.2em 0 }
    .course-schedules .key { margin-right: 1.2em; white-space: nowrap }
    .course-schedules .key span { display: inline-block; width: 1.2em; height: 0.8em; margin-right: 0.4em }`);
  const panel = node(el, "div"), line = node(el, "p", { "aria-live": "polite" }), stage = node(el, "div");
  const keys = node(el, "p");
  for (const look of data.looks.slice(0, 3)) {
    const entry = node(keys, "span", { class: "key" });
    node(entry, "span", { style: `background: ${look.hatched
      ? `repeating-linear-gradient(45deg, ${look.fill} 0 4px, #fff 4px 5.5px)` : look.fill}` });
    entry.append(look.words);
  }
  for (const [part, fill] of Object.entries(data.tints)) {
    const entry = node(keys, "span", { class: "key" });
    node(entry, "span", { style: `background: ${fill}` });
    entry.append(part);
  }
  const show = () => {
    const run = data.runs[key(data.controls, at)];
    line.textContent = words(run);
    draw(stage, run, data);
  };
  for (const control of data.controls) {
    const row = node(panel, "label", { class: "control" });
    node(row, "span", {}, control.label);
    const range = node(row, "input", { type: "range", min: 0, max: control.stops.length - 1, step: 1,
      "data-key": control.name });
    const value = node(row, "output", {}, String(at[control.name]));
    range.value = control.stops.indexOf(at[control.name]);
    range.setAttribute("aria-valuetext", at[control.name]);
    range.addEventListener("input", () => {
      at[control.name] = control.stops[range.valueAsNumber];
      value.textContent = at[control.name];
      range.setAttribute("aria-valuetext", at[control.name]);
      show();
      model.set("at", { ...at });
      model.save_changes();
    });
  }
  show();
}

export default { render };
