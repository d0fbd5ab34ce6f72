// Comparisons and swarms: a table of their members, and curves.

import { el } from "./panels.js";

const SIGNS = { "at work": "▶", learning: "▶", done: "✓", finished: "✓", stopped: "✕", waiting: "…" };

export function kindOf(state) { return state.run?.kind ?? "run"; }

/** A race's or peer's state as a sign and a word, never by colour alone. */
function status(is, why) {
  const cell = el("td", { class: "is", "data-is": is, ...(why ? { title: why } : {}) });
  cell.append(el("span", { "aria-hidden": "true" }, `${SIGNS[is] ?? "·"} `), is);
  return cell;
}

function swatch(of, series) {
  const made = el("span", { class: `swatch${of.dashed ? " dashed" : ""}`, "aria-hidden": "true" });
  made.style.borderColor = series[of.colour % series.length];
  return made;
}

/** Redraws the table of a comparison or a swarm where something is different. */
export class Grid {
  constructor(name) {
    this._table = el("table", { class: "grid" }, el("caption", { class: "hidden" }, name), el("thead"), el("tbody"));
    this.element = el("div", { class: "scroll wide", tabindex: "0", role: "region", "aria-label": name }, this._table);
    this._key = "";
  }

  draw(state, series) {
    const swarm = kindOf(state) === "swarm", rows = swarm ? peers(state) : races(state);
    const key = JSON.stringify([rows, series]);
    if (key === this._key) return;
    this._key = key;
    const head = swarm ? ["peer", "is", "rounds", "reward", "solved", "alone", "rejected", "set aside"]
      : ["arm", "seed", "is", "steps", "loss", "failures", "hours", "to fault-free"];
    this._table.tHead.replaceChildren(el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name))));
    this._table.tBodies[0].replaceChildren(...rows.map((row) => el("tr", {}, ...row.map((cell, i) => {
      if (cell.status) return status(cell.status, cell.why);
      return i ? el("td", {}, cell) : el("th", { scope: "row" }, swatch(cell, series), cell.name);
    }))));
  }
}

const shown = (value, digits) => (value === undefined ? "–" : Number(value).toFixed(digits));

/** The races in the order of the table; an arm's seeds have its colour, all but the first dashed. */
function raced(state) {
  const order = state.run?.arms ?? [], at = (arm) => (order.includes(arm) ? order.indexOf(arm) : order.length);
  const all = Object.values(state.races ?? {});
  all.sort((a, b) => at(a.arm) - at(b.arm) || a.arm.localeCompare(b.arm) || a.seed - b.seed);
  const arms = [...new Set(all.map((one) => one.arm))];
  return all.map((one) => ({ ...one, colour: arms.indexOf(one.arm), dashed: all.find((first) => first.arm === one.arm).seed !== one.seed }));
}

function joined(state) {
  return Object.entries(state.peers ?? {}).map(([name, one], colour) => ({ ...one, name, colour, dashed: false }));
}

function races(state) {
  return raced(state).map((one) => {
    const of = one.steps ?? state.run?.steps;
    const hours = one.missed ? "not reached" : one.hours === undefined ? "–" : Number(one.hours).toPrecision(3);
    const ratio = one.hours_ratio === undefined ? "–" : `× ${one.hours_ratio.toFixed(2)}`;
    return [{ name: one.arm, ...one }, `${one.seed}`, { status: one.is, why: one.why }, `${one.tick}${of ? ` of ${of}` : ""}`, shown(one.loss, 3), `${one.failures ?? one.loss_events ?? "–"}`, hours, ratio];
  });
}

function peers(state) {
  return joined(state).map((one) => {
    const rejected = Object.entries(one.rejected ?? {}).map(([who, n]) => `${who}: ${n}`).join(", ") || "none";
    const aside = Object.entries(one.aside ?? {}).map(([who, why]) => `${who} (${why})`).join(", ") || "none";
    const called = one.attack && one.attack !== "none" ? `${one.name} (attacks: ${one.attack})` : one.name;
    return [{ ...one, name: called }, { status: one.is ?? "waiting", why: one.why }, `${one.round ?? 0}`, shown(one.reward, 3), shown(one.accuracy, 3), shown(one.alone, 3), rejected, aside];
  });
}

/** The curves of a state, in the order and the colours of the table. */
export function curvesOf(state, field) {
  return (kindOf(state) === "swarm" ? joined(state) : raced(state)).map((one) => ({
    points: Object.entries(one[field] ?? {}).map(([step, y]) => ({ t: 0, step: Number(step), y })), dashed: one.dashed, colour: one.colour,
  }));
}

/** Numbers beside the table. */
export function summaryOf(state) {
  if (kindOf(state) === "swarm") {
    const all = Object.values(state.peers ?? {}), mean = (name) => all.filter((p) => p[name] !== undefined);
    const average = (name) => { const known = mean(name); return known.length ? (known.reduce((sum, p) => sum + p[name], 0) / known.length).toFixed(3) : "–"; };
    const rejected = all.reduce((sum, p) => sum + Object.values(p.rejected ?? {}).reduce((a, b) => a + b, 0), 0);
    return [["peers", `${all.length}`, `${all.filter((p) => p.is === "learning").length} learning`],
      ["rounds", `${Math.max(0, ...all.map((p) => p.round ?? 0))}`, "of the one that is furthest"],
      ["reward", average("reward"), "mean of peers"], ["solved", average("accuracy"), "of held-out problems, mean"],
      ["rejected", `${rejected}`, "completions, by all peers"]];
  }
  const all = Object.values(state.races ?? {}), count = (is) => all.filter((one) => one.is === is).length;
  return [["races", `${all.length}`, `${count("at work")} at work`], ["done", `${count("done")}`, `${count("stopped")} stopped`],
    ["steps", `${all.reduce((sum, one) => sum + (one.tick ?? 0), 0)}`, "of all races"],
    ["failures", `${all.reduce((sum, one) => sum + (one.failures ?? one.loss_events ?? 0), 0)}`, "that were met"]];
}
