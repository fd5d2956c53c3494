// The page of the viewer: curves of all runs, samples of one. It asks for news every two seconds.
// Everything that a run wrote becomes text of an element, never markup.
"use strict";
const COLOURS = ["#2f7ed8", "#d9822b", "#2e9d5b", "#b5489e", "#7a6ff0", "#8c6d31", "#d64541", "#3aa6a6"];
const PERIOD_MS = 2000;
const by = (id) => document.getElementById(id);
let about = { runs: [], metrics: [], chosen: [] };
const hidden = new Set(); // numbers of runs that are not drawn

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made[name] = value;
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) if (each !== "") query.append(name, each);
  }
  const answer = await fetch(`api/${path}?${query}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
const show = (x) => (x === null || x === undefined ? "-" : Number(x.toPrecision(4)).toString());

// Curves.
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return mean / total;
  });
}
function ticks(low, high) {
  const raw = (high - low) / 6, power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  // At most 20: a size below the spacing of numbers would never get on.
  for (let at = Math.ceil(low / size) * size; at <= high + size * 1e-6 && found.length < 20; at += size) found.push(at);
  return found;
}
function chart(title, name, curves, weight) {
  const [W, H, left, right, top, bottom] = [420, 200, 44, 8, 8, 18];
  const lines = curves
    .map(([steps, values], run) => ({ run, steps, values: smoothed(values, weight) }))
    .filter((line) => !hidden.has(line.run) && line.steps.length);
  const known = lines.flatMap((line) => line.values.filter((v) => v !== null));
  const readout = el("small", {}, name === title ? "" : name);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  const figure = el("figure", { "data-metric": name }, el("figcaption", {}, el("b", {}, title), readout));
  figure.append(picture);
  if (!known.length) {
    picture.append(svg("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "no finite number"));
    return figure;
  }
  let low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  const first = Math.min(...lines.map((l) => l.steps[0]));
  const last = Math.max(first + 1, ...lines.map((l) => l.steps[l.steps.length - 1]));
  const x = (step) => left + ((W - left - right) * (step - first)) / (last - first);
  const y = (value) => H - bottom - ((H - top - bottom) * (value - low)) / (high - low);
  for (const at of ticks(low, high)) {
    picture.append(svg("line", { class: "grid", x1: left, x2: W - right, y1: y(at), y2: y(at) }));
    picture.append(svg("text", { x: left - 4, y: y(at) + 3, "text-anchor": "end" }, show(at)));
  }
  for (const at of ticks(first, last)) {
    picture.append(svg("text", { x: x(at), y: H - 5, "text-anchor": "middle" }, show(at)));
  }
  for (const line of lines) {
    let part = []; // a number that is not finite breaks the line
    const draw = () => {
      if (part.length === 1) part.push(part[0].replace(/^[\d.]+/, (n) => String(+n + 1)));
      if (part.length) {
        picture.append(svg("polyline", { points: part.join(" "), stroke: COLOURS[line.run % COLOURS.length] }));
      }
      part = [];
    };
    line.steps.forEach((step, i) => {
      if (line.values[i] === null) draw();
      else part.push(`${x(step).toFixed(1)},${y(line.values[i]).toFixed(1)}`);
    });
    draw();
  }
  const at = svg("line", { class: "at", y1: top, y2: H - bottom, visibility: "hidden" });
  picture.append(at);
  picture.onmousemove = (event) => {
    const box = picture.getBoundingClientRect();
    const step = first + ((((event.clientX - box.left) / box.width) * W - left) / (W - left - right)) * (last - first);
    const near = (l) => l.steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(l.steps[best] - step) ? i : best), 0);
    const said = lines.map((l) => `${lines.length > 1 ? about.runs[l.run].name + " " : ""}${show(l.values[near(l)])}`);
    const shown = lines[0].steps[near(lines[0])];
    at.setAttribute("x1", x(shown));
    at.setAttribute("x2", x(shown));
    at.setAttribute("visibility", "visible");
    readout.textContent = `step ${shown}: ${said.join(", ")}`;
  };
  picture.onmouseleave = () => {
    at.setAttribute("visibility", "hidden");
    readout.textContent = name === title ? "" : name;
  };
  return figure;
}
async function drawCurves() {
  const part = by("metrics").value.toLowerCase();
  const wanted = part
    ? about.metrics.filter((name) => name.toLowerCase().includes(part)).slice(0, 30).map((name) => [name, name])
    : about.chosen;
  const curves = wanted.length ? await ask("curves", { name: wanted.map(([, name]) => name) }) : {};
  const weight = Number(by("smoothing").value);
  by("charts").replaceChildren(...wanted.map(([title, name]) => chart(title, name, curves[name], weight)));
}
function drawAbout() {
  by("runs").replaceChildren(...about.runs.map((run, i) => {
    const box = el("input", { type: "checkbox", onchange: () => { hidden[box.checked ? "delete" : "add"](i); drawCurves(); } });
    box.checked = !hidden.has(i);
    const colour = el("i");
    colour.style.background = COLOURS[i % COLOURS.length];
    return el("label", { class: "run", title: run.path }, box, " ", colour, `${run.name}, step ${run.last_step}`);
  }));
  const warnings = about.runs.flatMap((run) => [
    ...run.alerts.map((alert) => `${run.name}: alert ${alert.alert} in ${alert.steps} steps, from ${alert.first} to ${alert.last}`),
    ...(run.bad_lines ? [`${run.name}: ${run.bad_lines} lines of metrics.jsonl are no records, left out`] : []),
  ]);
  by("alerts").replaceChildren(...warnings.map((text) => el("p", { class: "alert" }, text)));
  const rows = [["planned peak of a device", "perf/planned_memory_gb"], ["measured peak of a device", "perf/max_memory_allocated_gb"], ["peak of the host", "perf/max_cpu_memory_used_gb"]];
  by("memory").replaceChildren(
    el("tr", {}, el("th", {}, "GiB"), ...about.runs.map((run) => el("th", {}, run.name))),
    ...rows.map(([title, name]) => el("tr", {}, el("td", {}, title), ...about.runs.map((run) => el("td", {}, show(run.memory[name]))))));
}

// Samples.
const form = by("filter");
let first = 0, listed = "", open = null;
function runNumber() { return Number(form.run.value || 0); }
function fillChoices() {
  if (form.run.options.length !== about.runs.length) {
    form.run.replaceChildren(...about.runs.map((run, i) => el("option", { value: i }, run.name)));
  }
  const dumps = about.runs[runNumber()]?.dumps ?? [];
  if (by("dumped").options.length !== dumps.length) {
    by("dumped").replaceChildren(...dumps.slice(-500).map((step) => el("option", { value: step })));
    if (!listed && dumps.length) form.step.value = dumps[dumps.length - 1];
  }
}
async function drawList(more = false) {
  first = more ? first + 50 : 0;
  const wanted = Object.fromEntries(new FormData(form));
  delete wanted.run;
  listed = JSON.stringify([runNumber(), wanted]);
  const asked = listed;
  const found = await ask(`runs/${runNumber()}/samples`, { ...wanted, first });
  if (asked !== listed) return; // the user went on typing
  by("count").textContent = `${found.total} samples${wanted.step === "" ? " so far, newest steps first" : ""}${found.bad_lines ? `; ${found.bad_lines} lines are no samples, left out` : ""}`;
  const items = found.samples.map((sample) => el("li", { tabindex: 0, onclick: (event) => openSample(event.currentTarget, sample),
    onkeydown: (event) => { if (event.key === "Enter") openSample(event.currentTarget, sample); } },
    el("small", {}, `step ${sample.step}  score ${show(sample.score)}  ${sample.num_tokens ?? "?"} tokens${sample.stopped === false ? "  cut" : ""}${sample.left_out ? "  left out" : ""}${sample.failure ? "  reward failed" : ""}`),
    el("p", {}, sample.input.trim().slice(-160)), el("p", {}, el("b", {}, sample.output.trim().slice(0, 240)))));
  if (more) by("list").append(...items);
  else by("list").replaceChildren(...items);
  by("more").hidden = found.samples.length < 50;
  const kept = form.data_source.value;
  form.data_source.replaceChildren(el("option", { value: "" }, "any"), ...found.data_sources.map((name) => el("option", { value: name }, name)));
  form.data_source.value = kept;
}
const MEANINGS = {
  "log-prob difference": (s, i) => s.mask[i] ? s.log_probs[i] - s.rollout_log_probs[i] : null,
  "advantage": (s, i) => s.mask[i] ? s.advantages[i] : null,
  "mask": (s, i) => (s.mask[i] ? 1 : null),
};
function tokens(sample, meaning) {
  const values = sample.pieces.map((_, i) => MEANINGS[meaning](sample, i));
  const most = values.reduce((a, v) => Math.max(a, Math.abs(v ?? 0)), 0) || 1;
  return el("pre", { class: "tokens" }, ...sample.pieces.map((piece, i) => {
    const value = values[i];
    const span = el("span", { title: [`token ${sample.tokens[i]}`, `log-prob ${show(sample.log_probs[i])}`,
      `in the engine ${show(sample.rollout_log_probs[i])}`, `advantage ${show(sample.advantages[i])}`,
      `weights of step ${sample.versions[i]}`].join("\n") }, piece);
    if (value === null) span.className = "masked";
    else span.style.background = `rgba(${value < 0 ? "214,69,65" : "46,157,91"},${(0.75 * Math.abs(value)) / most})`;
    return span;
  }));
}
function turns(messages) {
  return messages.map((turn) => el("div", { class: "turn" }, el("b", {}, turn.role ?? "turn"),
    el("pre", {}, typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content ?? "", null, 1)),
    ...(turn.tool_calls ?? []).map((call) => el("pre", {}, `calls ${JSON.stringify(call.function ?? call, null, 1)}`))));
}
async function openSample(item, { step, row }) {
  for (const other of by("list").children) other.classList.toggle("on", other === item);
  const sample = await ask(`runs/${runNumber()}/samples/${step}/${row}`);
  open = sample;
  const parts = [el("h2", {}, `step ${step}, score ${show(sample.score)}`)];
  const conversation = sample.turns ?? sample.messages;
  if (conversation) parts.push(...turns(conversation));
  else parts.push(el("h2", {}, "Prompt"), el("pre", {}, sample.input ?? ""));
  parts.push(el("h2", {}, "Answer"));
  if (sample.pieces) {
    const choice = el("select", { id: "meaning", onchange: () => by("sample").querySelector(".tokens").replaceWith(tokens(open, choice.value)) },
      ...Object.keys(MEANINGS).map((name) => el("option", {}, name)));
    parts.push(el("label", {}, "Colour: ", choice), tokens(sample, choice.value));
  } else {
    parts.push(el("pre", {}, sample.output ?? ""));
  }
  const facts = { "reward failed": sample.failure, "left out": sample.left_out ? "not learned from" : undefined, "ground truth": sample.gts, terms: sample.terms, details: sample.details };
  for (const [name, value] of Object.entries(facts)) {
    const empty = value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length);
    if (!empty) parts.push(el("h2", {}, name), el("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1)));
  }
  by("sample").replaceChildren(...parts);
}
function nextStep(direction) {
  const dumps = about.runs[runNumber()]?.dumps ?? [];
  const now = form.step.value === "" ? Infinity : Number(form.step.value);
  const found = direction > 0 ? dumps.find((step) => step > now) : dumps.filter((step) => step < now).pop();
  if (found !== undefined) { form.step.value = found; drawList(); }
}

// What the user does.
const guarded = (work) => (...given) => Promise.resolve(work(...given)).catch((error) => { by("count").textContent = error.message; });
for (const button of document.querySelectorAll("nav button")) {
  button.onclick = guarded(async () => {
    for (const other of document.querySelectorAll("nav button")) {
      other.classList.toggle("on", other === button);
      by(other.dataset.tab).hidden = other !== button;
    }
    if (button.dataset.tab === "samples") { fillChoices(); await drawList(); } else await drawCurves();
  });
}
by("metrics").oninput = by("smoothing").oninput = guarded(drawCurves);
document.querySelector("#curves form").onsubmit = (event) => event.preventDefault();
form.onsubmit = (event) => event.preventDefault();
form.oninput = guarded(() => drawList());
by("more").onclick = guarded(() => drawList(true));
by("before").onclick = guarded(() => nextStep(-1));
by("after").onclick = guarded(() => nextStep(1));

let seen = "";
async function refresh() {
  try {
    about = await ask("runs");
    const now = JSON.stringify(about);
    if (now !== seen) {
      seen = now;
      drawAbout();
      fillChoices();
      if (!by("curves").hidden) await drawCurves();
    }
    document.body.dataset.state = "ready";
  } catch (error) {
    document.body.dataset.state = "lost"; // the server has ended; it may come back
  }
  setTimeout(refresh, PERIOD_MS);
}
refresh();
