// All that is not the map: figures, curves, bars, tables, search, theme.

function showTotal(data) {
  const { plan } = data;
  const state = data.trains ? "weights and training state" : "weights";
  const parts = [["weight", state, plan.resident_parameter_bytes], ["arena", "arena", plan.arena_bytes], ["workspace", "workspace", plan.workspace_bytes || 0], ["input", "inputs", plan.input_bytes]];
  if (plan.run_time_bytes) parts.push(["workspace", "sized at run time", plan.run_time_bytes]);
  if (plan.state_bytes) parts.push(["input", "state", plan.state_bytes]);
  const bar = make("div", { className: "stack" });
  const words = make("p", { className: "faint" });
  for (const [kind, name, bytes] of parts) {
    const share = (100 * bytes) / Math.max(plan.total_bytes, 1);
    bar.append(make("div", { className: `fill-${kind}`, width: `${share}%`, title: `${name}: ${inFull(bytes)}` }));
    words.append(make("span", { className: `chip fill-${kind}` }), `${name} ${size(bytes)}  `);
  }
  byId("total").append(bar, words, ...sentences(data).map((text) => make("p", {}, text)));
}

/** What is known of the plan, in sentences; a plan from a file knows less. */
function sentences({ plan }) {
  const found = [];
  if (plan.recomputed_nodes) found.push(`${plan.recomputed_nodes.toLocaleString("en")} of ${plan.nodes.toLocaleString("en")} steps compute something again: ${percent(plan.overhead)} of the cost of one pass${plan.planning_seconds === null ? ", as estimated" : ""}.`);
  else found.push(`${plan.nodes.toLocaleString("en")} steps, none of which computes something again.`);
  if (plan.peak_before_bytes !== null && plan.peak_before_bytes !== plan.peak_bytes) found.push(`In the file's own order, with everything kept, ${size(plan.peak_before_bytes)} of values are in use at the worst step; in this plan ${size(plan.peak_bytes)}.`);
  found.push(plan.arena_bytes === plan.lower_bound_bytes
    ? "The arena is as small as any layout of this order can be."
    : `No layout of this order is smaller than ${size(plan.lower_bound_bytes)}; the arena is ${percent(plan.arena_bytes / plan.lower_bound_bytes - 1, 3)}.`);
  if (plan.budget_bytes !== null) found.push(`The budget was ${size(plan.budget_bytes)}.`);
  if (plan.workspace_bytes === null) found.push("Workspace, what kernels take beside the arena, was not measured: the plan is bound to no machine.");
  return found;
}

function showLegend(data, rectangles) {
  const sums = new Map();
  for (let i = 0; i < rectangles.count; i++) sums.set(rectangles.kindOf(i), (sums.get(rectangles.kindOf(i)) || 0) + 1);
  for (const { name, meaning } of data.kinds) {
    if (sums.has(name)) byId("legend").append(make("span", {}, make("span", { className: `chip fill-${name}` }), meaning));
  }
}

function showDetails(rectangles, data, index) {
  const place = byId("details");
  place.replaceChildren();
  if (index < 0) {
    place.append(make("p", { className: "faint" }, "Point at a rectangle, or select one, to read what it is."));
    return;
  }
  const r = rectangles;
  const kind = r.kindOf(index);
  const rows = [["bytes", inFull(r.bytes[index])]];
  if (r.isInArena(index)) rows.push(["offset", r.offset[index].toLocaleString("en")]);
  if (r.hasStep(index)) {
    rows.push(["needed at steps", kind === "workspace" ? `${r.start[index]}` : `${r.start[index]} to ${r.stop[index] - 1} (${r.stop[index] - r.start[index]})`]);
    rows.push(["operator", r.operator(index)], ["node", r.steps.node[r.start[index]]]);
  }
  if (r.shape(index)) rows.push(["shape", r.shape(index)]);
  if (r.hasStep(index) && r.module(index).length) rows.push(["module", r.module(index).join(" › ")]);
  const list = make("dl", {}, ...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  const meaning = data.kinds.find((each) => each.name === kind).meaning;
  place.append(make("p", {}, make("span", { className: `chip fill-${kind}` }), make("b", {}, r.name(index)), ` — ${meaning}`), list);
  const others = r.columns.others[index];
  if (others) {
    const more = others[0] > others.length - 1 ? ` and ${others[0] - others.length + 1} more` : "";
    place.append(make("p", { className: "faint" }, `In the same place, in turn: ${others.slice(1).join(", ")}${more}`));
  }
}

/** Bars of what is in memory at a step, by module down to a depth. */
class ModuleBars {
  constructor(place, rectangles, search) {
    this.rectangles = rectangles;
    this.search = search;
    this.depth = make("select", { ariaLabel: "Depth of modules" });
    for (const depth of [1, 2, 3, 4]) this.depth.append(make("option", { value: depth }, `by module, ${depth} deep`));
    this.title = make("span", {});
    this.bars = make("div", { className: "bars" });
    this.peak = make("button", { type: "button" }, "At the peak");
    place.append(make("div", { className: "tools" }, this.title, make("span", { className: "spread" }), this.peak, this.depth), this.bars);
    this.step = rectangles.peakStep;
    this.depth.value = this.bestDepth();
    this.depth.addEventListener("change", () => this.show(this.step));
    this.peak.addEventListener("click", () => this.show(rectangles.peakStep));
    this.show(this.step);
  }

  groups(step, depth) {
    const r = this.rectangles;
    const groups = new Map();
    for (let i = 0; i < r.count; i++) {
      if (!r.hasStep(i) || r.start[i] > step || r.stop[i] <= step) continue;
      const name = r.module(i).slice(0, depth).join("/") || r.operator(i);
      if (!groups.has(name)) groups.set(name, { name, bytes: 0, kinds: new Map(), count: 0 });
      const group = groups.get(name);
      group.bytes += r.bytes[i];
      group.count += 1;
      group.kinds.set(r.kindOf(i), (group.kinds.get(r.kindOf(i)) || 0) + r.bytes[i]);
    }
    return [...groups.values()].sort((a, b) => b.bytes - a.bytes);
  }

  /** The deepest of one to three with at most 24 bars. */
  bestDepth() {
    return [3, 2, 1].find((depth) => this.groups(this.step, depth).length <= 24) || 1;
  }

  show(step) {
    this.step = step;
    const groups = this.groups(step, Number(this.depth.value));
    const r = this.rectangles;
    const all = groups.reduce((sum, group) => sum + group.bytes, 0);
    const where = step === r.peakStep ? "the peak, " : "";
    this.title.textContent = r.stepCount ? `${size(all)} at ${where}step ${step} (${r.steps.node[step]}). Click into the map for another step.` : "";
    this.bars.replaceChildren();
    for (const group of groups.slice(0, 200)) {
      const bar = make("div", { className: "bar" });
      for (const kind of r.kinds) {
        const bytes = group.kinds.get(kind);
        if (bytes) bar.append(make("div", { className: `fill-${kind}`, width: `${(100 * bytes) / groups[0].bytes}%`, title: `${kind}: ${size(bytes)}` }));
      }
      const name = make("button", { type: "button", className: "name", title: "Search for it in the map" }, group.name);
      name.addEventListener("click", () => this.search(group.name));
      this.bars.append(name, bar, make("span", { className: "size" }, `${size(group.bytes)} in ${group.count} ${group.count === 1 ? "tensor" : "tensors"}`));
    }
  }
}

/** Lines and points in axes: `x` and `y` are [least, most]. */
class Chart {
  constructor(x, y, nameX, formatX, formatY) {
    // as wide as there is room: on a phone its text would be too small otherwise
    const wide = Math.max(360, Math.min(1360, document.querySelector("main").clientWidth - 40 || 1360));
    Object.assign(this, { x, y, wide });
    this.svg = drawn("svg", { viewBox: `0 0 ${wide} 300`, role: "img" });
    this.svg.append(drawn("path", { class: "axis", d: `M80 10V262H${wide - 10}` }));
    for (const at of ticks(y[0], y[1], 5, formatY === size)) {
      this.svg.append(drawn("path", { class: "axis", d: `M76 ${this.toY(at)}H${wide - 10}`, opacity: 0.5 }), drawn("text", { x: 70, y: this.toY(at) + 4, "text-anchor": "end" }, formatY(at)));
    }
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const at = x[0] + part * (x[1] - x[0]);
      this.svg.append(drawn("text", { x: this.toX(at), y: 280, "text-anchor": part === 1 ? "end" : "middle" }, formatX(at)));
    }
    this.svg.append(drawn("text", { x: (70 + wide) / 2, y: 297, "text-anchor": "middle" }, nameX));
  }

  toX(value) {
    return 80 + ((this.wide - 90) * (value - this.x[0])) / (this.x[1] - this.x[0] || 1);
  }

  toY(value) {
    return 262 - (245 * (value - this.y[0])) / (this.y[1] - this.y[0] || 1);
  }

  line(points, kind) {
    this.svg.append(drawn("polyline", { class: kind, points: points.map(([x, y]) => `${this.toX(x).toFixed(1)},${this.toY(y).toFixed(1)}`).join(" ") }));
  }

  level(value, kind) {
    this.line([[this.x[0], value], [this.x[1], value]], kind);
  }

  point(x, y, kind, radius, title) {
    this.svg.append(drawn("circle", { class: kind, cx: this.toX(x), cy: this.toY(y), r: radius }, drawn("title", {}, title)));
  }
}

function showCurve(data, rectangles) {
  const { plan, before } = data;
  const rest = plan.total_bytes - plan.arena_bytes;
  const room = plan.budget_bytes === null ? null : plan.budget_bytes - rest;
  const most = Math.max(plan.arena_bytes, room || 0, ...(before ? before.bytes : []));
  const chart = new Chart([0, 100], [0, most * 1.05 || 1], "part of the run", (x) => `${x.toFixed(0)} %`, size);
  const spread = (values) => values.flatMap((value, i) => [[(100 * i) / values.length, value], [(100 * (i + 1)) / values.length, value]]);
  const keys = make("p", { className: "keys" });
  const key = (kind, text) => keys.append(make("span", { className: `${kind}-text` }, text));
  const now = thinned(rectangles.live, 2000);
  const isOther = before && (before.steps !== rectangles.stepCount || before.bytes.some((bytes, i) => bytes !== now[i]));
  if (isOther) {
    chart.line(spread(before.bytes), "before");
    key("before", plan.peak_before_bytes === null ? "- - the same order with nothing recomputed" : "- - before: the file's own order, nothing recomputed");
  }
  chart.line(spread(now), "now");
  key("now", "— this plan");
  chart.level(plan.lower_bound_bytes, "bound");
  key("bound", `··· lower bound ${size(plan.lower_bound_bytes)}: no layout of this order is smaller`);
  if (room !== null) {
    chart.level(room, "budget");
    key("budget", `— — what the budget leaves for values: ${size(room)}`);
  }
  byId("curve").append(keys, chart.svg);
}

/** The most of each of at most `count` stretches of values. */
function thinned(values, count) {
  const parts = Math.min(count, values.length);
  return Array.from({ length: parts }, (_, i) => {
    const from = Math.floor((i * values.length) / parts);
    const to = Math.floor(((i + 1) * values.length) / parts);
    return values.subarray(from, Math.max(to, from + 1)).reduce((a, b) => Math.max(a, b), 0);
  });
}

function showChoices(data) {
  const place = byId("choices");
  const { plan, candidates, frontier } = data;
  if (!candidates.length && !frontier.length) {
    place.hidden = true;
    return;
  }
  const own = { peak: plan.peak_bytes, overhead: plan.overhead };
  const tried = candidates.map((each) => ({ ...each, kind: "candidate" }));
  const known = frontier.map((each) => ({ peak: each.peak_bytes, overhead: each.overhead, kind: "frontier" })).sort((a, b) => a.peak - b.peak);
  const all = [...tried, ...known, own];
  const most = Math.max(...all.map((each) => each.peak)) * 1.05;
  const highest = Math.max(...all.map((each) => each.overhead), 0.05) * 1.1;
  const chart = new Chart([0, most], [0, highest], "bytes in use at the worst step", size, (y) => percent(y));
  // a plan also serves for every memory up to that of the next one
  const stairs = known.flatMap((each, i) => [[each.peak, each.overhead], [i + 1 < known.length ? known[i + 1].peak : most, each.overhead]]);
  if (known.length) chart.line(stairs, "frontier-line");
  for (const each of all.slice(0, -1)) chart.point(each.peak, each.overhead, each.kind, 5, `${each.kind}: ${size(each.peak)}, ${percent(each.overhead)}`);
  chart.point(own.peak, own.overhead, "chosen", 7, `this plan: ${size(own.peak)}, ${percent(own.overhead)}`);
  place.append(make("p", { className: "faint" }, `Extra cost against the peak. This plan is the large point${candidates.length ? ", circles are what the sweep tried" : ""}${known.length ? ", the line is the frontier: the least cost that was found for each memory" : ""}.`), chart.svg);
  if (!candidates.length) return;
  const rows = candidates.map((each) => [each.source === "none" ? "all kept" : each.source, each.source === "none" ? "" : size(each.threshold), each.segments, size(each.kept_bytes), size(each.peak), percent(each.overhead)]);
  const chosen = candidates.findIndex((each) => each.peak === Math.min(...candidates.map((one) => one.peak)));
  place.append(table(["stages", "threshold", "segments", "kept", "peak", "extra cost"], rows, (row) => row === chosen));
}

function table(names, rows, isChosen = () => false) {
  const isNumber = (value) => typeof value === "number" || /^[−+\d]/.test(value);
  const kinds = names.map((_, at) => (rows.some((row) => isNumber(row[at])) ? "number" : ""));
  const head = make("tr", {}, ...names.map((name, at) => make("th", { className: kinds[at] }, name)));
  const cell = (content, at) => make("td", { className: kinds[at] }, content instanceof Node ? content : String(content));
  const body = rows.map((row, at) => make("tr", { className: isChosen(at) ? "chosen" : "" }, ...row.map(cell)));
  return make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function showLargest(rectangles, choose) {
  const r = rectangles;
  const order = Array.from({ length: r.count }, (_, i) => i).filter((i) => r.kindOf(i) !== "workspace");
  order.sort((a, b) => r.bytes[b] - r.bytes[a] || a - b);
  const rows = order.slice(0, 100).map((i) => {
    const name = make("button", { type: "button" }, r.name(i));
    name.addEventListener("click", () => choose(i));
    const steps = r.hasStep(i) ? `${r.start[i]} to ${r.stop[i] - 1}` : "always";
    return [name, r.operator(i) || "", r.shape(i), size(r.bytes[i]), r.isInArena(i) ? r.offset[i].toLocaleString("en") : "", steps, r.kindOf(i)];
  });
  byId("largest").append(table(["tensor", "operator", "shape", "bytes", "offset", "steps", "kind"], rows));
}

function showCounted({ plan, memory }) {
  const counted = plan.memory ? [plan.memory.before, plan.memory.after, plan.memory.at_peak].filter(Boolean) : [];
  if (!counted.length) {
    byId("counted").hidden = true;
    return;
  }
  const kinds = Object.keys(memory.kinds).filter((kind) => counted.some((column) => column[kind]));
  const rows = kinds.map((kind) => [memory.kinds[kind], ...counted.map((column) => size(column[kind] || 0))]);
  byId("counted").append(
    make("p", { className: "faint" }, memory.note),
    table(["kind", "without reuse", "planned", "at the peak"].slice(0, counted.length + 1), rows, (row) => kinds[row] === "total"),
  );
}

function showChunks({ plan, chunks }, search) {
  const place = byId("chunks");
  if (!plan.chunks.length) {
    place.hidden = true;
    return;
  }
  const rows = plan.chunks.map((band, number) => {
    const first = make("button", { type: "button", title: "Search for its chunks in the map" }, band.first);
    first.addEventListener("click", () => search(`${band.first}.chunk`));
    return [first, band.last, band.nodes, band.runs, chunks.axes[number], band.slices.join(", "), size(band.bytes_before), size(band.bytes_after), `${(1000 * band.seconds).toFixed(2)} ms`];
  });
  place.append(
    make("p", { className: "faint" }, `Nodes from the first to the last run on one slice of an axis after the other, stage by stage in as many slices as stand there. ${chunks.note}`),
    make("p", { className: "faint" }, "In the map and the lists NAME.chunk8_16 is slice 8 to 16 of NAME's value. Behind it, /whole is the value itself, which slices are written into; /rows and /joined are rows that a stage keeps of one slice and puts before the next."),
    table(["first node", "last node", "nodes", "runs", "axis", "slices of each stage", "before", "in chunks", "more time"], rows),
  );
}

function showMeasured(data) {
  const place = byId("measured");
  const { measured, plan } = data;
  if (!measured) {
    place.hidden = true;
    return;
  }
  const rows = [];
  const differ = (most) => (most === null ? "differ" : `differ by ${most.toPrecision(2)}`);
  const add = (name, session, planned) => session && rows.push([
    name, session.peak_bytes === null ? "not measured" : size(session.peak_bytes),
    planned === undefined ? "" : size(planned), session.latency_seconds === null ? "" : `${(1000 * session.latency_seconds).toFixed(2)} ms`,
    session.bitwise_equal === null ? "" : session.bitwise_equal ? "identical" : differ(session.max_abs_diff),
  ]);
  add("planned", { ...measured, bitwise_equal: null }, plan.predicted_bytes ?? plan.arena_bytes);
  add("stock onnxruntime, same level", measured.stock_session);
  add("stock onnxruntime, default options", measured.default_session);
  place.append(make("p", { className: "faint" }, "Memory is the most that a run takes above the loaded model; what the plan says of it stands beside."), table(["session", "measured", "planned", "time", "outputs"], rows));
}

function showNotes({ plan }) {
  const facts = [`Planned for ${plan.mode}`, plan.device === "none" ? "portable, for any runtime" : `device ${plan.device}`];
  if (plan.batch !== null) facts.push(`batch ${plan.batch}`);
  if (plan.strategy) facts.push(`strategy ${plan.strategy}`);
  if (plan.planning_seconds !== null) facts.push(`in ${plan.planning_seconds.toFixed(1)} s`);
  byId("notes").append(make("p", {}, `${facts.join(", ")}.`), ...plan.notes.map((note) => make("p", {}, note)));
  if (plan.unplanned_values.length) byId("notes").append(make("p", {}, `${plan.unplanned_values.length} values are of a size or type that can't be planned; the runtime keeps them.`));
}

/* ---------------------------------------------------------------- search, theme, keys */

function listenToSearch(map, rectangles) {
  const field = byId("search");
  const search = () => {
    const hits = rectangles.find(field.value);
    map.mark(hits);
    const sum = hits.reduce((total, i) => total + rectangles.bytes[i], 0);
    byId("found").textContent = !field.value.trim() ? "" : hits.length ? `${hits.length} found, ${size(sum)}; Enter shows the next` : "nothing found";
  };
  field.addEventListener("input", search);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") map.go(event.shiftKey ? -1 : 1);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== field) {
      event.preventDefault();
      field.focus();
      field.select();
    } else if (event.key === "Escape") {
      field.value = "";
      search();
      map.select(-1);
      if (document.activeElement === field) byId("map").focus();
    }
  });
  return (words) => {
    field.value = words;
    search();
    byId("map").scrollIntoView({ block: "center" });
  };
}

function listenToTheme(map) {
  const button = byId("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "Light" : "Dark";
    map.recolour();
  };
  button.addEventListener("click", () => set(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  window.addEventListener("beforeprint", () => {
    map.themeOnScreen = document.documentElement.dataset.theme;
    set("light");
    map.draw();
  });
  window.addEventListener("afterprint", () => set(map.themeOnScreen));
  set(dark.matches ? "dark" : "light");
}

async function main() {
  const data = await unpack();
  const rectangles = new Rectangles(data);
  showTotal(data);
  showLegend(data, rectangles);
  const details = (index) => showDetails(rectangles, data, index);
  let bars = null;
  const map = new ArenaMap(byId("map"), rectangles, data.plan, details, (step) => bars.show(step));
  details(-1);
  listenToTheme(map);
  map.draw();
  performance.mark("map drawn");
  const search = listenToSearch(map, rectangles);
  bars = new ModuleBars(byId("modules"), rectangles, search);
  showCurve(data, rectangles);
  showLargest(rectangles, (index) => {
    map.show(index);
    map.select(index);
    byId("map").scrollIntoView({ block: "center" });
  });
  showCounted(data);
  showChunks(data, search);
  showChoices(data);
  showMeasured(data);
  showNotes(data);
  byId("zoom-in").addEventListener("click", () => map.zoom(0.7));
  byId("zoom-out").addEventListener("click", () => map.zoom(1.4));
  byId("fit").addEventListener("click", () => map.fit());
  byId("all").addEventListener("click", () => map.showAll());
  document.documentElement.dataset.ready = "true";
}

main().catch((error) => {
  byId("summary").textContent += ` This page could not be drawn: ${error.message}. It needs a browser of 2023 or later.`;
});
