// Draws the report from the JSON in #data. Text of a model is only ever set as textContent, so it cannot be markup.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLORS = { F: "#4c78a8", B: "#f58518", I: "#f58518", W: "#d8a600", "gradient reduction": "#54a24b", optimizer: "#b279a2" };
const GROUPS = { ideal: "#2e7d4f", compute: "#4c78a8", communication: "#e08a1e", wait: "#8a8f99" };
const GROUP_NAMES = { ideal: "products at peak speed", compute: "other compute", communication: "communication that is not hidden", wait: "waiting for other ranks" };
const PLACEMENTS = { sharded: "#4c78a8", partial: "#e08a1e", replicated: "#9aa0ab", batch: "#72b7b2" };
const PLACEMENT_NAMES = { sharded: "sharded output", partial: "partial sums (reduced next)", replicated: "same work on every rank", batch: "sharded by batch only" };
const MEMORY = ["#4c78a8", "#f58518", "#b279a2", "#9d755d", "#bab0ac", "#54a24b", "#d8a600", "#e45756", "#72b7b2"];
let charts = [];

function add(parent, tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

function table(parent, head, rows) {
  const body = add(parent, "table");
  if (head.length) { const line = add(body, "tr"); head.forEach((text) => add(line, "th", text)); }
  for (const row of rows) { const line = add(body, "tr"); row.forEach((text) => add(line, "td", text)); }
  return body;
}

function section(parent, title, hint) {
  const part = add(parent, "section");
  add(part, "h2", title);
  if (hint) add(part, "p", hint, { class: "hint" });
  return part;
}

function key(parent, colors, names) {
  for (const [kind, color] of Object.entries(colors)) {
    const entry = add(parent, "span", "", { class: "key" });
    add(entry, "i").style.background = color;
    entry.append(names[kind] || kind);
  }
}

function quantity(number, unit) {
  if (!number) return `0 ${unit}`;
  const power = Math.min(5, Math.max(unit === "s" ? -3 : 0, Math.floor(Math.log10(Math.abs(number)) / 3)));
  const prefix = ["n", "µ", "m", "", "k", "M", "G", "T", "P"][power + 3];
  return `${Number((number / 1000 ** power).toPrecision(3))} ${prefix}${unit}`;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function draw(parent, height, name, option, renderer = "svg") {
  const element = add(parent, "div", "", { class: "chart", role: "img", "aria-label": name });
  element.style.height = `${height}px`;
  const chart = echarts.init(element, isDark() ? "dark" : null, { renderer });
  chart.setOption({ backgroundColor: "transparent", animation: false, ...option });
  charts.push(chart);
  return chart;
}

// Numbers of a tooltip are ours; names come from the model and are escaped.
const escaped = (text) => echarts.format.encodeHTML(String(text));

function waterfall(parent, plan) {
  const rows = plan.waterfall, step = plan.timeline.step_s;
  const part = section(parent, "Where the time goes",
    "The busiest rank's step, from the time that its matrix products would take at peak FLOP/s to the whole step.");
  key(add(part, "div", "", { class: "tools" }), GROUPS, GROUP_NAMES);
  let end = 0;
  const starts = rows.map((row) => { const start = end; end += row.s; return start; });
  draw(part, 60 + 30 * rows.length, "Waterfall of the step time", {
    grid: { left: 24, right: 90, top: 8, bottom: 28, containLabel: true },
    xAxis: { type: "value", axisLabel: { formatter: (s) => quantity(s, "s") }, max: Math.max(end, step) },
    yAxis: { type: "category", inverse: true, data: rows.map((row) => row.name) },
    tooltip: { trigger: "item", formatter: (p) => `${escaped(rows[p.dataIndex].name)}: ${rows[p.dataIndex].text}, ${(100 * rows[p.dataIndex].s / step).toFixed(1)} % of the step` },
    series: [
      { type: "bar", stack: "s", data: starts, itemStyle: { color: "transparent" }, silent: true },
      { type: "bar", stack: "s", barWidth: 17,
        data: rows.map((row) => ({ value: row.s, itemStyle: { color: GROUPS[row.group] } })),
        label: { show: true, position: "right", formatter: (p) => `${rows[p.dataIndex].text} (${(100 * rows[p.dataIndex].s / step).toFixed(1)} %)` } },
    ],
  });
}

function timeline(parent, plan) {
  const data = plan.timeline, lines = data.lines;
  const part = section(parent, "Timeline of a step",
    `One line per pipeline coordinate${data.ranks ? ` (${data.ranks})` : ""}. Scroll to zoom, drag to pan, hover for details. ${data.note}`);
  const used = new Set(lines.flatMap((line) => [...line.actions.map((a) => a[2]), ...line.after.map((a) => a[2])]));
  key(add(part, "div", "", { class: "tools" }), Object.fromEntries(Object.entries(COLORS).filter(([kind]) => used.has(kind))), data.names);
  const boxes = lines.flatMap((line, y) => [
    ...line.actions.map(([start, end, kind, stage, microbatch]) => ({ value: [start, end, y], kind, itemStyle: { color: COLORS[kind] },
      text: `${data.names[kind]} of microbatch ${microbatch}, stage ${stage}`, mark: String(microbatch) })),
    ...line.after.map(([start, end, kind]) => ({ value: [start, end, y], kind, itemStyle: { color: COLORS[kind] }, text: kind, mark: "" })),
  ]);
  draw(part, Math.min(900, 90 + Math.max(16, 34 - lines.length / 3) * lines.length), "Timeline of the step", {
    grid: { left: 24, right: 20, top: 8, bottom: 62, containLabel: true },
    xAxis: { type: "value", min: 0, max: data.step_s, axisLabel: { formatter: (s) => quantity(s, "s") } },
    yAxis: { type: "category", inverse: true, data: lines.map((line) => `pp ${line.rank}`) },
    dataZoom: [{ type: "inside", filterMode: "weakFilter" }, { type: "slider", filterMode: "weakFilter", height: 18, bottom: 8, labelFormatter: (s) => quantity(s, "s") }],
    tooltip: { formatter: (p) => `${escaped(p.data.text)}<br>${quantity(p.value[1] - p.value[0], "s")}, from ${quantity(p.value[0], "s")}` },
    series: [{
      type: "custom", encode: { x: [0, 1], y: 2 }, data: boxes,
      renderItem: (params, api) => {
        const [x, y] = api.coord([api.value(0), api.value(2)]), right = api.coord([api.value(1), 0])[0];
        const tall = api.size([0, 1])[1] * (boxes[params.dataIndex].kind in data.names ? 0.82 : 0.42);
        const shape = echarts.graphic.clipRectByRect({ x, y: y - tall / 2, width: Math.max(right - x, 0.5), height: tall }, params.coordSys);
        const wide = shape && shape.width > 22;
        return shape && { type: "rect", shape, style: { fill: api.visual("color"), stroke: isDark() ? "#1d2027" : "#fff", lineWidth: 0.5 },
          textContent: wide ? { style: { text: boxes[params.dataIndex].mark, fill: "#fff", fontSize: 11 } } : undefined, textConfig: { position: "inside" } };
      },
    }],
  }, "canvas");
}

function memory(parent, plan) {
  const data = plan.memory, rows = data.rows;
  const most = Math.max(...rows.map((row) => row.total)), near = data.capacity && data.capacity < 4 * most;
  const part = section(parent, "Memory of each rank",
    "Peak bytes by kind (kinds peak at different times, so a bar may be longer than the peak), and bytes over the step." +
    (data.capacity && !near ? ` The device (${data.device}) has ${quantity(data.capacity, "B")}.` : ""));
  const sides = add(part, "div", "", { class: "two" });
  const bytes = { axisLabel: { formatter: (b) => quantity(b, "B") } };
  const limit = near ? { symbol: "none", data: [{ xAxis: data.capacity }], lineStyle: { color: "#d33", width: 2 }, label: { position: "start", formatter: `${quantity(data.capacity, "B")} limit` } } : undefined;
  draw(sides, 110 + 26 * Math.min(rows.length, 24), "Memory by kind", {
    grid: { left: 24, right: 70, top: 46, bottom: 10, containLabel: true }, legend: { top: 0, type: "scroll" },
    xAxis: { type: "value", ...bytes, max: (range) => Math.max(range.max, near ? data.capacity * 1.05 : 0) },
    yAxis: { type: "category", inverse: true, data: rows.map((row) => `${row.label}: ${row.text}`) },
    dataZoom: rows.length > 24 ? [{ type: "slider", yAxisIndex: 0, width: 14, startValue: 0, endValue: 23 }] : [],
    tooltip: { trigger: "item", formatter: (p) => `${escaped(p.seriesName)}: ${quantity(p.value, "B")}` },
    series: data.kinds.map((kind, index) => ({ name: kind, type: "bar", stack: "m", data: rows.map((row) => row.kinds[kind] || 0), itemStyle: { color: MEMORY[index] }, markLine: index ? undefined : limit }))
      .filter((series) => series.data.some((size) => size)),
  });
  draw(sides, 110 + 26 * Math.min(rows.length, 24), "Memory over the step", {
    grid: { left: 24, right: 20, top: 46, bottom: 10, containLabel: true }, legend: { top: 0, type: "scroll" },
    xAxis: { type: "value", max: plan.timeline.step_s, axisLabel: { formatter: (s) => quantity(s, "s") } },
    yAxis: { type: "value", ...bytes }, tooltip: { trigger: "axis", valueFormatter: (b) => quantity(b, "B") },
    series: data.curves.map((curve, rank) => ({ name: `pp ${rank}`, type: "line", step: "end", showSymbol: false, data: curve })),
  });
}

function placementOf(layout) {
  const texts = Object.entries(layout).filter(([axis]) => !["dp", "dpr", "pp"].includes(axis)).map(([, text]) => String(text));
  const outputs = texts.map((text) => text.split("->").pop().trim());
  if (outputs.some((text) => text.startsWith("P"))) return "partial";
  if (outputs.some((text) => text.includes("S"))) return "sharded";
  return outputs.length ? "replicated" : "batch";
}

function layoutText(layout) {
  return Object.entries(layout).map(([axis, text]) => `${axis}: ${text}`).join("; ") || "by batch";
}

function details(panel, stage, block) {
  panel.replaceChildren();
  panel.hidden = false;
  add(panel, "h3", `${block.name || "the model's own operators"}${block.layers ? `, layers ${block.layers}` : ""}, stage ${stage.stage}`);
  add(panel, "p", `${block.flops} forward (${(100 * block.share).toFixed(1)} % of the model), ${block.sent} sent per microbatch`, { class: "soft" });
  if (block.collectives.length) { add(panel, "b", "Collectives"); table(panel, [], block.collectives.map((text) => [text])); }
  const rows = [...block.parameters, ...block.operators], priced = rows.some((row) => row[2]), placed = rows.some((row) => row[3]);
  const more = [...(priced ? ["runner-up and its cost"] : []), ...(placed ? ["source"] : [])];
  const cells = ([name, layout, other, where]) => [name, layoutText(layout), ...(priced ? [other] : []), ...(placed ? [where] : [])];
  if (block.parameters.length) { add(panel, "b", "Parameters"); table(panel, ["name", "placement", ...more], block.parameters.map(cells)); }
  if (block.operators.length) { add(panel, "b", "Operators"); table(panel, ["operator", "inputs -> outputs", ...more], block.operators.map(cells)); }
  if (!priced) add(panel, "p", "A plan written with autopart plan --alternatives also shows the runner-up of each layout and its cost.", { class: "hint" });
  add(panel, "p", "S(d): sharded along dim d; R: replicated; P: partial sums; grad P: the gradient is a partial sum.", { class: "hint" });
}

function model(parent, plan) {
  const part = section(parent, "The model on the mesh",
    "One column per pipeline stage. A square is an operator, coloured by its output's placement. Equal layers are one box. Select a box for its placements.");
  const tools = add(part, "div", "", { class: "tools" });
  const search = add(tools, "input", "", { type: "search", placeholder: "find a module, operator or parameter", size: 34, "aria-label": "find" });
  key(tools, PLACEMENTS, PLACEMENT_NAMES);
  const columns = add(part, "div", "", { class: "stages" }), boxes = [];
  const panel = add(part, "div", "", { class: "details", "aria-live": "polite" });
  panel.hidden = true;
  for (const stage of plan.stages) {
    const column = add(columns, "div", "", { class: "stage" });
    add(column, "h3", `Stage ${stage.stage}`);
    add(column, "p", `${stage.parameters} parameters, ${stage.flops} forward${stage.receives ? `, receives ${stage.receives} tensor${stage.receives > 1 ? "s" : ""}` : ""}`, { class: "soft" });
    for (const block of stage.blocks) {
      const box = add(column, "button", "", { class: "block", "aria-expanded": "false" });
      add(box, "span", block.name || "(the model itself)");
      if (block.layers) add(box, "span", `  layers ${block.layers}`, { class: "soft" });
      add(box, "div", "", { class: "share" }).style.width = `${Math.max(1, 100 * Math.min(1, block.share * plan.stages.length))}%`;
      const squares = add(box, "div", "", { class: "ops" });
      for (const [name, layout] of block.operators.slice(0, 60)) add(squares, "i", "", { class: "op", title: `${name}: ${layoutText(layout)}` }).style.background = PLACEMENTS[placementOf(layout)];
      for (const way of ["forward", "backward"]) for (const [kind, count] of Object.entries(block[way])) add(box, "div", `${way}: ${count} × ${kind}`, { class: "moves" });
      const words = [block.name, ...block.operators.map((row) => row[0]), ...block.parameters.map((row) => row[0])].join("\n").toLowerCase();
      boxes.push([box, words]);
      box.addEventListener("click", () => {
        for (const [other] of boxes) other.setAttribute("aria-expanded", String(other === box));
        details(panel, stage, block);
        panel.scrollIntoView({ block: "nearest" });
      });
    }
  }
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    for (const [box, words] of boxes) {
      box.classList.toggle("match", wanted !== "" && words.includes(wanted));
      box.classList.toggle("other", wanted !== "" && !words.includes(wanted));
    }
  });
}

function changes(parent, plan) {
  const tooLarge = plan.figures.some((figure) => figure.state === "bad");
  const part = section(parent, "What to change", plan.suggestions.length
    ? `${tooLarge ? "The plan does not fit into memory. With each of these changes it does. " : ""}Predicted for the same global batch and number of ranks, with this plan's layouts. Make a plan with the option to confirm it.`
    : tooLarge ? "No single change of mesh, schedule, microbatches or ZeRO makes the plan fit into memory. The notes below name others: recompute, or more ranks."
    : "No change of mesh, schedule, microbatches or ZeRO that autopart predicts from this plan saves 1 % of the step. Other changes: autopart why plan.json recompute, or autopart search for other meshes.");
  const list = add(part, "ul", "", { class: "changes" });
  for (const row of plan.suggestions) {
    const item = add(list, "li", "", { class: "card" });
    add(item, "code", row.change);
    const gain = 100 * row.gain;
    add(item, "div", `${gain >= 0 ? `saves ${gain.toFixed(1)} %` : `takes ${(-gain).toFixed(1)} % more`} of the step: ${row.time}, ${row.memory} on the fullest rank${tooLarge && row.fits ? ", which fits" : ""}`);
    for (const note of row.notes) add(item, "small", note);
  }
}

function one(parent, plan) {
  add(parent, "p", plan.summary, { class: "lead" });
  const cards = add(parent, "div", "", { class: "cards" });
  for (const figure of plan.figures) {
    const card = add(cards, "div", "", { class: "card" });
    add(card, "small", figure.name);
    add(card, "b", figure.value, { class: figure.state });
    add(card, "small", figure.note);
  }
  changes(parent, plan);
  waterfall(parent, plan);
  timeline(parent, plan);
  memory(parent, plan);
  model(parent, plan);
  const mesh = section(parent, "Ranks and communication", `${plan.mesh.ranks} ranks. Ranks that differ by the stride are neighbours on the axis.`);
  table(mesh, ["axis", "ranks", "stride"], plan.mesh.axes.map((row) => [row.axis, row.size, row.stride]));
  for (const line of plan.mesh.nodes) add(mesh, "p", line);
  if (plan.collectives.length) table(mesh, ["collective", "per step", "bytes each", "time per step", "of the step"], plan.collectives.map((row) => [`${row.axis} ${row.kind}`, row.count, row.each, row.time, `${(100 * row.share).toFixed(1)} %`]));
  if (plan.mesh.replicated.length) { add(mesh, "h3", "The same work on every rank"); table(mesh, [], plan.mesh.replicated.map((text) => [text])); }
  if (plan.notes.length) { const notes = add(section(parent, "Notes"), "ul"); plan.notes.forEach((note) => add(notes, "li", note)); }
  const text = add(parent, "details");
  add(text, "summary", "The plan as text");
  add(text, "pre", plan.explain);
  for (const graph of plan.graphs) { const code = add(parent, "details"); add(code, "summary", graph.title); add(code, "pre", graph.text); }
}

function compared(parent) {
  const { rows, kinds, diff } = DATA.comparison;
  const part = section(parent, "Plans side by side");
  table(part, ["plan", "mesh", "step", "against the fastest", "MFU", "bubble", "memory"], rows.map((row) => [row.label, row.mesh, row.step, `${row.slower.toFixed(3)} ×`, `${(100 * row.mfu).toFixed(1)} %`, `${(100 * row.bubble).toFixed(1)} %`, row.memory]));
  draw(part, 120 + 34 * rows.length, "Parts of the step of each plan", {
    grid: { left: 24, right: 30, top: 50, bottom: 10, containLabel: true }, legend: { top: 0, type: "scroll" },
    xAxis: { type: "value", axisLabel: { formatter: (s) => quantity(s, "s") } },
    yAxis: { type: "category", inverse: true, data: rows.map((row) => row.label) },
    tooltip: { trigger: "item", formatter: (p) => `${escaped(p.seriesName)}: ${quantity(p.value, "s")}` },
    series: kinds.map((kind, index) => ({ name: kind, type: "bar", stack: "t", barWidth: 20, data: rows.map((row) => row.parts[index]) })),
  });
  const text = add(part, "details");
  add(text, "summary", `Differences of ${rows[0].label} and ${rows[1].label}`);
  add(text, "pre", diff);
}

function render(chosen) {
  charts.forEach((chart) => chart.dispose());
  charts = [];
  const main = document.getElementById("report");
  main.replaceChildren();
  const head = add(main, "header"), plan = DATA.plans[chosen];
  add(head, "h1", DATA.comparison ? `${DATA.plans.map((row) => row.label).join(" and ")}, compared` : plan.title);
  add(head, "button", isDark() ? "light" : "dark", { title: "switch colours" }).addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    render(chosen);
  });
  if (DATA.comparison) {
    compared(main);
    const tabs = add(main, "div", "", { class: "tools", role: "tablist" });
    DATA.plans.forEach((row, index) => add(tabs, "button", row.label, { role: "tab", "aria-selected": String(index === chosen) }).addEventListener("click", () => render(index)));
  }
  if (DATA.comparison) add(main, "h2", plan.title);
  one(main, plan);
}

addEventListener("resize", () => charts.forEach((chart) => chart.resize()));
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((text) => { text.open = true; }));
render(0);
