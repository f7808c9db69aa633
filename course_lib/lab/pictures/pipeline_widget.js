// A pipeline under four controls. Everything was predicted beforehand (see pipeline_widget.py); this only draws.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 760, LEFT = 56, RIGHT = 74, LANE = 20, STEP = 26, AXIS = 34;
const FILL = { F: ["#0072B2", "#fff"], B: ["#56B4E9", "#0b0b0b"], I: ["#56B4E9", "#0b0b0b"], W: ["#BFDDF2", "#0b0b0b"] };
const KEYS = [["F", "forward F"], ["B", "backward B, or its half I"], ["W", "half W of B"]];

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

// What a rank does as bars: the words say what, `gaps` how long it waits before each.
export function bars(run, rank, message, unit) {
  let now = 0;
  return run.words[rank].split(" ").map((word, k) => {
    const [, op, index, stage] = /^([FBIW])(\d+)(?:@(\d+))?$/.exec(word);
    const start = now + run.gaps[message][rank][k];
    now = start + (op === "B" ? 2 : 1) * unit / run.v;
    return { op, index, stage: Number(stage ?? rank), start, stop: now };
  });
}

export function sentence(run, at, data) {
  const k = data.message.indexOf(at.message), kept = Math.max(...run.kept);
  return `${at.schedule}, p = ${at.p}, m = ${at.m}: the step takes ${(run.step[k] / data.unit).toFixed(1)} F, ` +
    `bubble ${(100 * run.bubble[k]).toFixed(1)} %, a rank keeps at most ${kept} activations`;
}

function draw(root, run, at, data) {
  root.replaceChildren();
  const k = data.message.indexOf(at.message), ranks = run.words.length, height = ranks * STEP + AXIS;
  const svg = node(root, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": sentence(run, at, data) });
  const scale = (WIDTH - LEFT - RIGHT) / run.step[k], x = (t) => LEFT + t * scale;
  for (let rank = 0; rank < ranks; rank++) {
    const y = rank * STEP, row = bars(run, rank, k, data.unit), first = Math.min(...row.map((bar) => bar.stage));
    node(svg, "text", { x: LEFT - 8, y: y + 14, "text-anchor": "end" }, `rank ${rank}`);
    node(svg, "text", { x: WIDTH - RIGHT + 8, y: y + 14 }, `keeps ${run.kept[rank]}`);
    node(svg, "rect", { x: LEFT, y, width: WIDTH - LEFT - RIGHT, height: LANE, class: "lane" });
    for (const bar of row) {
      const width = (bar.stop - bar.start) * scale, [fill, ink] = FILL[bar.op];
      const group = node(svg, "g");
      node(group, "title", {}, `${bar.op}${bar.index}, stage ${bar.stage}`);
      node(group, "rect", { x: x(bar.start), y, width: Math.max(0.4, width - 0.6), height: LANE, fill });
      if (bar.stage !== first) node(group, "rect", { x: x(bar.start), y: y + LANE - 3, width, height: 3, class: "later" });
      if (width > 6 * bar.index.length + 3) {
        node(group, "text", { x: x((bar.start + bar.stop) / 2), y: y + 13, "text-anchor": "middle",
          style: `fill: ${ink}; font-size: 10px` }, bar.index);
      }
    }
  }
  const every = [1, 2, 5, 10, 20, 50, 100].find((t) => run.step[k] / data.unit / t <= 12) ?? 200;
  for (let t = 0; t * data.unit <= run.step[k]; t += every) {
    node(svg, "text", { x: x(t * data.unit), y: ranks * STEP + 12, "text-anchor": "middle", class: "quiet" }, t);
  }
  node(svg, "text", { x: LEFT, y: ranks * STEP + 28, class: "quiet" }, "time in F, the forward of one rank; simulated");
}

function render({ model, el }) {
  const data = model.get("data"), at = { ...model.get("at") };
  el.classList.add("course-pipeline");
  node(el, "style", {}, `.course-pipeline { max-width: ${WIDTH}px; font: 13px sans-serif; color: inherit }
    .course-pipeline svg { width: 100% } .course-pipeline text { font-size: 11px; fill: currentColor }
    .course-pipeline .quiet { opacity: 0.7 }
    .course-pipeline .lane { fill: rgba(128, 128, 128, 0.15) } .course-pipeline .later { fill: currentColor }
    .course-pipeline .control { display: grid; grid-template-columns: 11em 16em 4em; gap: 0.6em; margin: 0.2em 0 }
    .course-pipeline .key { margin-right: 1.2em; white-space: nowrap }
    .course-pipeline .key span { display: inline-block; width: 1.2em; height: 0.8em; margin-right: 0.4em }`);
  const panel = node(el, "div"), said = node(el, "p", { "aria-live": "polite" }), stage = node(el, "div");
  const keys = node(el, "p");
  for (const [op, words] of KEYS) {
    const key = node(keys, "span", { class: "key" });
    node(key, "span", { style: `background: ${FILL[op][0]}` });
    key.append(words);
  }
  node(keys, "span", { class: "key" }, "underlined: a later stage of the rank");
  const show = () => {
    const run = data.runs[`${at.schedule}|${at.p}|${at.m}`];
    said.textContent = sentence(run, at, data);
    draw(stage, run, at, data);
  };
  const moved = (name, value) => {
    at[name] = value;
    show();
    model.set("at", { ...at });
    model.save_changes();
  };
  const label = (name, words) => {
    const row = node(panel, "label", { class: "control" });
    node(row, "span", {}, words);
    return row;
  };
  const choice = node(label("schedule", "schedule"), "select", { "data-key": "schedule" });
  for (const name of data.schedule) node(choice, "option", { value: name }, name);
  choice.value = at.schedule;
  choice.addEventListener("change", () => moved("schedule", choice.value));
  for (const [name, words] of [["p", "ranks p"], ["m", "micro-batches m"], ["message", "a message, in F"]]) {
    const row = label(name, words), stops = data[name];
    const range = node(row, "input", { type: "range", min: 0, max: stops.length - 1, step: 1, "data-key": name });
    const value = node(row, "output", {}, at[name]);
    range.value = stops.indexOf(at[name]);
    range.setAttribute("aria-valuetext", at[name]);
    range.addEventListener("input", () => {
      value.textContent = stops[range.valueAsNumber];
      range.setAttribute("aria-valuetext", value.textContent);
      moved(name, stops[range.valueAsNumber]);
    });
  }
  show();
}

export default { render };
