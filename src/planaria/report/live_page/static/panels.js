// Everything beside the ring: the sentence, the recovery, numbers, the story, tables, the selected worker.

const SIGNS = { fault: "⚡", slow: "≋", loss: "✕", recovery: "✓", rollback: "↺", relink: "⇄", note: "·", calm: "" };
const PHASES = [
  ["noticed", "noticed", "the others find out"],
  ["replaced", "replaced", "a spare takes the place"],
  ["linked", "linked", "edges are made"],
  ["rebuilt", "rebuilt", "the lost stage is rebuilt"],
  ["redone", "redone", "the step begins again"],
];
const REBUILT = { "rolled back": "every stage loads the checkpoint", recalled: "every stage returns to its snapshot", relinked: "no weights were lost" };
const HOLD_S = 3.5; // an important sentence stays that long before calm ones take its place

export const $ = (query, root = document) => root.querySelector(query);

export function el(kind, attributes = {}, ...children) {
  const element = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function say(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

export function seconds(value) {
  if (value === undefined || value === null) return "–";
  return value < 0.0995 ? `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms` : value < 100 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

export function bytes(value) {
  if (!value) return "–";
  const unit = ["B", "kB", "MB", "GB", "TB"], power = Math.min(Math.floor(Math.log10(value) / 3), 4);
  return `${(value / 1000 ** power).toFixed(power > 1 ? 1 : 0)} ${unit[power]}`;
}

export function time(t) {
  const whole = Math.max(0, t), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60, s = Math.floor(whole % 60);
  return h ? `${h}:${String(m).padStart(2, "0")}:${String(s).padStart(2, "0")}` : `${m}:${String(s).padStart(2, "0")}`;
}

export class Sentence {
  constructor(element, spoken) {
    this._element = element;
    this._spoken = spoken;
    this._held = { tone: "calm", until: 0, t: 0 };
  }

  show(caption, t, now) {
    if (!caption) return;
    const back = t < this._held.t - 0.5, held = caption.tone === "calm" && this._held.until > now && !back;
    const age = Math.floor(t - this._held.t); // a fast run is several steps further before a sentence has been read
    say($(".ago", this._element), held && age >= 1 ? `${age} s ago` : "");
    if (held) return;
    if (caption.text === $(".text", this._element).textContent) { this._held.t = t; return; }
    this._held = { tone: caption.tone, until: caption.tone === "calm" ? 0 : now + HOLD_S, t };
    say($(".text", this._element), caption.text);
    say($(".sign", this._element), SIGNS[caption.tone] ?? "");
    this._element.dataset.tone = caption.tone;
    if (this._spoken && caption.tone !== "calm") say(this._spoken, caption.text);
  }
}

/** The shown recovery, with the seconds of its completed phases. */
export function recovery(card, found, t, state, number) {
  card.hidden = !found;
  if (!found) return;
  const list = $(".phases", card);
  if (!list.children.length) {
    for (const [name, word, what] of PHASES) {
      list.append(el("li", { "data-phase": name }, el("b", {}, word), el("span", { class: "took" }), el("span", { class: "what" }, what)));
    }
  }
  const several = Object.keys(state.replicas ?? {}).length > 1;
  const where = found.where + (several && !found.where.includes("replica") ? ` of replica ${found.replica}` : "");
  const excluded = found.causes.includes("excluded") ? ", excluded" : "";
  say($(".title", card), `Recovery ${number}: ${where}${excluded}`);
  const over = moments(found, t);
  const left = found.outcome === "disbanded" && !state.replicas?.[found.replica];
  let open = !left;
  for (const [name, , what] of PHASES) {
    const item = $(`[data-phase=${name}]`, list), done = over[name] <= t && found.phases[name] !== undefined;
    const untold = name === "noticed" && found.phases.noticed === undefined && found.lost <= t; // the fault was not logged
    const how = done ? "done" : open && !untold ? "now" : "next";
    if (how === "now") open = false;
    if (item.className !== how) item.className = how;
    if (name === "rebuilt") say($(".what", item), REBUILT[found.outcome] ?? what);
    say($(".took", item), done ? seconds(found.phases[name]) : untold ? "–" : how === "now" ? "…" : "");
  }
  strip($(".bar", card), found, over, t);
  const finished = found.ended !== undefined && found.ended <= t;
  const meanwhile = several ? `Replica ${found.replica} stands still.` : "Training stands still.";
  say($(".sum", card), finished ? summary(found) : left ? `No worker takes over: the others train without replica ${found.replica}.` : meanwhile);
  card.dataset.open = String(!finished && !left);
}

function summary(found) {
  const gift = found.bytes ? `; ${bytes(found.bytes)} of weights were sent` : "";
  const back = { recovered: "no step was undone", "rolled back": "all went back to a checkpoint", recalled: "all went back a few steps", relinked: "no worker had died" };
  const how = back[found.outcome] ?? found.outcome;
  return `${seconds(found.total)} from the ${found.phases.noticed === undefined ? "notice" : "fault"} to the next microbatch that was through${gift}; ${how}.`;
}

/** When each phase was over. */
function moments(found) {
  const linked = found.linked, rebuilt = found.phases.rebuilt ?? 0;
  return {
    noticed: found.lost, replaced: found.formed, linked: linked === undefined ? undefined : linked - rebuilt,
    rebuilt: linked, redone: found.ended,
  };
}

function strip(bar, found, over, t) {
  const parts = PHASES.map(([name]) => [name, over[name] <= t ? found.phases[name] ?? 0 : 0]);
  const all = Object.values(found.phases).reduce((a, b) => a + b, 0) || 1;
  while (bar.children.length < parts.length) bar.append(el("i"));
  parts.forEach(([name, took], i) => {
    bar.children[i].dataset.phase = name;
    bar.children[i].style.width = `${(100 * took) / all}%`;
  });
}

export function numbers(list, entries) {
  while (list.children.length > entries.length) list.lastElementChild.remove();
  entries.forEach(([name, value, note], i) => {
    const item = list.children[i] ?? list.appendChild(el("div", {}, el("dt"), el("dd"), el("small")));
    say(item.children[0], name);
    say(item.children[1], value);
    say(item.children[2], note ?? "");
  });
}

export function numbersOf(player, state) {
  const workers = Object.values(state.workers ?? {}), count = (status) => workers.filter((w) => w.status === status).length;
  const peak = workers.filter((w) => w.status !== "dead").reduce((sum, w) => sum + (w.device_peak ?? w.peak ?? 0), 0);
  const starting = count("starting") ? `, ${count("starting")} starting` : "";
  return [
    ["step", `${state.step ?? 0}`, `of ${state.run?.steps ?? "?"}`],
    ["loss", state.loss ? Number(state.loss.value).toFixed(3) : "–", state.validation ? `validation ${Number(state.validation.value).toFixed(3)}` : ""],
    ["tokens per second", state.loss ? Math.round(state.loss.tokens_per_s).toLocaleString("en") : "–", ""],
    ["workers", `${count("member")} + ${count("spare")}`, `spares${starting}; ${state.lost ?? 0} lost`],
    ["checkpoint", state.saved !== undefined ? `${state.saved}` : "none", state.saved !== undefined ? "the last step on disk" : "on disk yet"],
    ["memory", bytes(peak), "peaks of all living workers"],
  ];
}

export function lines(list, story, t, jump, word = "step") {
  const shown = story.filter((line) => line.t <= t).slice(-60).reverse();
  const key = `${shown.length}:${shown[0]?.t}:${shown[0]?.text}`;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...shown.map((line) => {
    const button = el("button", { type: "button", class: "line", "data-tone": line.tone }, el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[line.tone] ?? "·"), el("span", { class: "when" }, `${word} ${line.step}`), el("span", { class: "what" }, line.text));
    button.addEventListener("click", () => jump(line.t));
    return el("li", {}, button);
  }));
  if (!shown.length) list.append(el("li", { class: "none" }, "Nothing out of the ordinary yet."));
}

/** What the diagnosis finds slow at the moment, with its evidence, and what is done about it. */
export function verdicts(card, state) {
  const slow = Object.values(state.slow ?? {}), key = JSON.stringify(slow);
  card.hidden = !slow.length;
  const list = $("ul", card);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...slow.map((one) => el("li", { "data-class": one.class },
    el("b", {}, el("span", { class: "sign", "aria-hidden": "true" }, one.class.includes("link") ? "⇄ " : "≋ "), one.class),
    el("span", { class: "when" }, `found in step ${one.step}`),
    el("p", {}, one.what), el("p", { class: "evidence" }, one.evidence),
    el("p", { class: "action" }, one.action ?? "Nothing is done about it."))));
}

/** Nodes that are found to be slow, but for links. */
export function slowNodes(state) {
  const found = Object.values(state.slow ?? {}).filter((one) => !one.class.includes("link"));
  return new Set(found.flatMap((one) => one.nodes));
}

export function workers(table, state, choose) {
  const slow = slowNodes(state);
  const rows = Object.entries(state.workers ?? {}).map(([name, w]) => {
    const node = w.node === undefined ? "–" : state.nodes?.[w.node] ? stageOf(state, w.node) : w.node;
    const is = { member: w.fault ?? (w.leaving ? "leaving" : slow.has(w.node) ? "slow" : "working"), dead: w.excluded ? "excluded" : `dead (${w.cause ?? "?"})`, released: w.excluded ? "excluded" : "leaving" }[w.status] ?? w.status;
    return [name, is, node, w.machine || "the run's own", bytes(w.device_peak ?? w.peak)];
  });
  fill(table, rows, (name) => choose("worker", name));
}

export function stageOf(state, node) {
  const info = state.nodes[node];
  const where = info.stage ? `stage ${info.stage}` : "the ends";
  return Object.keys(state.replicas ?? {}).length > 1 ? `${where} of replica ${info.replica}` : where;
}

export function links(table, state) {
  const named = (node) => (state.nodes?.[node] ? stageOf(state, node) : `node ${node}`);
  fill(table, Object.entries(state.links ?? {}).map(([name, info]) => [name.split("-").map(named).join(" – "), info.state, bytes(info.bytes)]));
}

function fill(table, rows, choose) {
  const body = table.tBodies[0], key = JSON.stringify(rows);
  if (body.dataset.key === key) return;
  body.dataset.key = key;
  body.replaceChildren(...rows.map((cells) => {
    const row = el("tr", {}, ...cells.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, String(cell))));
    if (choose) row.addEventListener("click", () => choose(cells[0]));
    return row;
  }));
}

const TOOLS = {
  kill: ["✕", "Kill", "SIGKILL: its process ends at once"],
  freeze: ["‖", "Freeze", "SIGSTOP: it neither computes nor answers"],
  slow: ["≋", "Slow", "its computing takes five times as long, for 20 seconds"],
  cut: ["✂", "Cut", "it is cut off from its neighbours, for 5 seconds"],
};

/** The worker that was clicked, and what may be done to it. */
export function selected(card, chosen, state, faults, now, injectFault) {
  const name = chosen && (chosen.kind === "node" ? state.nodes?.[chosen.name]?.worker : chosen.name);
  card.hidden = !chosen;
  if (!chosen) return;
  const worker = name && state.workers?.[name], node = chosen.kind === "node" ? chosen.name : worker?.node;
  const where = node !== undefined && state.nodes?.[node] ? stageOf(state, node) : "";
  say($(".title", card), worker ? `Worker ${name}${where ? `, at ${where}` : ""}` : where ? `${where}: no worker` : `Worker ${name}: gone`);
  const rows = worker ? [
    ["is", worker.fault ?? (worker.status === "member" ? "working" : worker.status)],
    ["incarnation", worker.incarnation], ["process", worker.pid ?? "–"], ["machine", worker.machine || "the run's own"],
    ["peak memory", bytes(worker.device_peak ?? worker.peak)],
  ] : [];
  const list = $("dl", card), key = JSON.stringify(rows);
  if (list.dataset.key !== key) {
    list.dataset.key = key;
    list.replaceChildren(...rows.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, String(v))]));
  }
  const tools = $(".faults", card);
  if (tools.children.length !== faults.length) {
    tools.replaceChildren(...faults.map((fault) => {
      const [sign, word, what] = TOOLS[fault] ?? ["?", fault, fault];
      const button = el("button", { type: "button", title: what, "data-fault": fault }, el("span", { "aria-hidden": "true" }, sign), ` ${word}`);
      button.addEventListener("click", () => injectFault(fault));
      return button;
    }));
  }
  const can = now && worker && worker.pid && worker.status !== "dead";
  for (const button of tools.children) {
    const possible = can && (worker.status === "member" || button.dataset.fault === "kill" || button.dataset.fault === "freeze");
    if (button.disabled === Boolean(possible)) button.disabled = !possible;
  }
}
