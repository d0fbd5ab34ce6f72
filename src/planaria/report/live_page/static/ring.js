// The workers of one run: a ring for each replica, and a dock for those who stand nowhere.

import { make, match, point, sector, set, text } from "./svg.js";
import { microbatches, progress } from "./motion.js";
import { slowNodes } from "./panels.js";

const INNER = 92, OUTER = 154, FORWARD = 169, BACKWARD = 78, CELL = 376, DOCK = 56;
const CALLED = {
  step: "computing", commit: "learning", evaluate: "testing", link: "linking", broken: "broken", save: "saving",
  wait: "starting", replan: "planning", cannot: "stopping", left: "gone",
};
const STATUS = { starting: "starting", spare: "spare", member: "working", released: "leaving", dead: "dead" };

export class Fleet {
  /** `choose(kind, name)` hears which node or worker was clicked. */
  constructor(choose) {
    const stripes = make("pattern", { id: "stripes", width: 12, height: 12, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    stripes.append(make("path", { class: "stripe", d: "M6 0V12" }));
    this.svg = make("svg", { class: "fleet", role: "group" }, make("defs", {}, stripes));
    this._choose = choose;
    this._rings = make("g");
    this._meetings = make("g", { class: "meetings" });
    this._dock = make("g", { class: "dock" });
    this._flights = make("g", { class: "flights" });
    this.svg.append(this._meetings, this._rings, this._dock, this._flights);
    this._shape = "";
    this._places = new Map(); // node → where it is: replica, angles, radii
    this._before = null; // workers of the state drawn last
    this._docked = new Map(); // worker → its place in the dock
  }

  draw(player, t, pace, now, chosen, calm) {
    const state = player.at(t);
    this._arrange(state);
    this._centres = new Map();
    for (const [replica, ring] of this._byReplica) this._ring(ring, replica, state, player, t, pace, now, chosen, calm);
    this._meet(state);
    this._docks(state, chosen);
    if (!calm) this._fly(state);
    this._before = { nodes: state.nodes ?? {}, workers: state.workers ?? {} };
  }

  // ---- layout

  _arrange(state) {
    const nodes = Object.entries(state.nodes ?? {});
    const shape = nodes.map(([node, info]) => `${node}:${info.replica}:${info.stage}`).join() + `|${this.narrow}`;
    if (shape === this._shape) return;
    this._shape = shape;
    const replicas = [...new Set(nodes.map(([, info]) => info.replica))].sort((a, b) => a - b);
    const across = this.narrow ? Math.min(replicas.length, 2) : Math.ceil(Math.sqrt(replicas.length * 1.6));
    this._columns = Math.max(1, Math.min(across, replicas.length || 1));
    this._rows = Math.max(1, Math.ceil(replicas.length / this._columns));
    this._places.clear();
    this._byReplica = new Map();
    this._rings.replaceChildren();
    this._origin = new Map();
    replicas.forEach((replica, i) => {
      const own = nodes.filter(([, info]) => info.replica === replica);
      const x = (i % this._columns + 0.5) * CELL, y = (Math.floor(i / this._columns) + 0.5) * CELL;
      this._origin.set(replica, [x, y]);
      this._byReplica.set(replica, this._newRing(own, replica, x, y, replicas.length > 1));
    });
    set(this.svg, { viewBox: `0 0 ${this._columns * CELL} ${this._rows * CELL + DOCK}` });
  }

  _newRing(own, replica, x, y, several) {
    const stages = Math.max(...own.map(([, info]) => info.stage)) + 1;
    const turn = (2 * Math.PI) / stages, gap = Math.min(0.05, turn * 0.09);
    for (const [node, info] of own) {
      const there = own.filter(([, other]) => other.stage === info.stage).map(([other]) => other);
      const band = (OUTER - INNER) / there.length, low = INNER + there.indexOf(node) * band;
      const angle = info.stage * turn;
      this._places.set(node, {
        replica, angle, turn, alone: there.length === 1, inner: low + (there.length > 1 ? 1 : 0), outer: low + band - (there.length > 1 ? 1 : 0),
        from: angle - turn / 2 + gap / 2, to: angle + turn / 2 - gap / 2,
      });
    }
    const parts = Object.fromEntries(["edges", "nodes", "gifts", "dots"].map((name) => [name, make("g", { class: name })]));
    const tracks = make("g", { class: "tracks" }, make("circle", { r: FORWARD }), make("circle", { r: BACKWARD }));
    const centre = make("g", { class: "centre" });
    const lines = ["what", "count", "of", "more"].map((name, i) => make("text", { class: name, y: [-30, 6, 26, 46][i] }));
    centre.append(...lines);
    const group = make("g", { transform: `translate(${x} ${y})` }, tracks, parts.edges, parts.nodes, parts.gifts, parts.dots, centre);
    if (several) group.append(text(make("text", { class: "replica", y: -52 }), `replica ${replica}`));
    this._rings.append(group);
    return { group, ...parts, lines, own: own.map(([node]) => node), several };
  }

  // ---- one ring

  _ring(ring, replica, state, player, t, pace, now, chosen, calm) {
    const about = state.replicas?.[replica] ?? {};
    const span = player.span(String(replica), t), moved = progress(span, t, pace, now);
    set(ring.group, { class: `ring ${about.phase ?? "wait"}${state.over ? " over" : ""}` });
    match(ring.nodes, ring.own, (node) => this._newNode(node), (element, node) => this._node(element, node, state, about, player, t, chosen));
    this._edges(ring, state);
    this._gifts(ring, state, t, calm ? 0 : now);
    this._dots(ring, state, about, moved, calm);
    this._middle(ring, state, about, moved);
  }

  _newNode(node) {
    const place = this._places.get(node), angle = place.angle, radius = (place.inner + place.outer) / 2;
    const [x, y] = point(radius, angle);
    const [cx, cy] = point(place.inner - 9, angle);
    const group = make("g", { class: "node", tabindex: 0, role: "button", "data-node": node },
      make("path", { class: "seg", d: sector(place.inner, place.outer, place.from, place.to) }),
      make("path", { class: "hatch", d: sector(place.inner, place.outer, place.from, place.to) }),
      make("path", { class: "cross", d: "M-9 -9L9 9M9 -9L-9 9", transform: `translate(${x} ${y})` }),
      make("text", { class: "name", x, y: y - 2 }),
      make("text", { class: "who", x, y: y + 14 }),
      make("text", { class: "tick", x: cx, y: cy + 4 }),
    );
    const choose = () => this._choose("node", node);
    group.addEventListener("click", choose);
    group.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); choose(); }
    });
    return group;
  }

  _node(element, node, state, about, player, t, chosen) {
    const info = state.nodes[node], worker = info.worker && state.workers?.[info.worker], place = this._places.get(node);
    const fault = worker?.fault;
    const started = about.generation > 0; // before the first formation no stage has been lost yet
    const kind = info.state === "empty" ? (started ? "empty" : "unstarted") : info.state === "waits" ? "waits" : fault ? "frozen" : "holds";
    const ready = about.done?.includes(Number(node)) && about.phase !== "link" && about.phase !== "broken";
    const births = player.birthsAt(node, t), slow = kind === "holds" && slowNodes(state).has(Number(node));
    set(element, {
      class: `node ${kind}${slow ? " slow" : ""}${ready ? " ready" : ""}${chosen === node ? " chosen" : ""}${info.stage ? "" : " ends"}`,
      "aria-label": label(node, info, worker, slow ? "slow" : kind, fault, births),
      "aria-pressed": String(chosen === node),
    });
    const [seg, hatch, , name, who, tick] = element.children;
    set(seg, { class: `seg ${kind}${slow ? " slow" : ""}` });
    set(hatch, { class: `hatch ${kind}` });
    const room = place.turn * (place.inner + place.outer) / 2, thick = place.outer - place.inner;
    const words = room > 92 && thick > 40 ? (info.stage ? `stage ${info.stage}` : "ends") : room > 24 ? String(info.stage) : "";
    const thin = thick <= 30; // one of several nodes of a stage: one line, which says who it is
    set(name, { class: thin ? "name thin" : "name" });
    text(name, (kind === "empty" || kind === "unstarted") && !thin ? "" : thin ? (info.worker ?? "gone") : words);
    const sign = fault ? (fault === "killed" ? "✕" : fault === "cut" ? "✂" : "‖") : slow ? "≋" : births ? `↻${births > 1 ? births : ""}` : "";
    const called = kind === "empty" || kind === "unstarted" ? words : [info.worker ?? "", sign].join(" ").trim();
    text(who, room > 44 && thick > 30 ? called : "");
    text(tick, ready && room > 30 ? "✓" : "");
  }

  _edges(ring, state) {
    const own = new Set(ring.own);
    const edges = Object.entries(state.links ?? {}).filter(([name]) => name.split("-").every((node) => own.has(node)));
    match(ring.edges, edges, () => make("path"), (path, [name, info]) => {
      const [a, b] = name.split("-").map((node) => this._places.get(node));
      set(path, { d: a && b ? edgePath(a, b) : "", class: `edge ${info.state}` });
    });
  }

  /** Weights on their way to a stage that is being rebuilt. */
  _gifts(ring, state, t, now) {
    const paths = [];
    for (const node of ring.own) {
      const info = state.nodes[node];
      for (const donor of info.state === "waits" && info.donors ? info.donors : []) {
        const from = this._places.get(String(donor)), to = this._places.get(node);
        if (from && to && from.replica === to.replica) paths.push([from, to]);
      }
    }
    const pieces = paths.flatMap(([from, to]) => [0, 1, 2, 3].map((i) => [from, to, (now * 0.9 + i / 4) % 1]));
    match(ring.gifts, pieces, () => make("rect", { class: "weight", x: -5, y: -5, width: 10, height: 10, rx: 2 }), (rect, [from, to, part]) => {
      const [x, y] = bent(point(from.inner, from.angle), point(to.inner, to.angle), part);
      set(rect, { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) rotate(${(part * 180).toFixed(0)})` });
    });
  }

  _dots(ring, state, about, moved, calm) {
    const active = about.phase === "step" || about.phase === "evaluate";
    const shown = active && !calm && !state.over
      ? microbatches(about.routes, state.run?.microbatches ?? 1, moved.part, about.phase === "evaluate") : [];
    set(ring.dots, { class: `dots${moved.late ? " late" : ""}${moved.flow ? " flow" : ""}` });
    match(ring.dots, shown, () => make("g", {}, make("circle", { r: 8.5 }), make("rect", { x: -7, y: -7, width: 14, height: 14, rx: 2, transform: "rotate(45)" }), make("text", { y: 3.6 })), (group, dot) => {
      const from = this._places.get(String(dot.from)), to = this._places.get(String(dot.to));
      if (!from || !to) return;
      let turn = to.angle - from.angle;
      if (turn > Math.PI) turn -= 2 * Math.PI;
      if (turn < -Math.PI) turn += 2 * Math.PI;
      const [x, y] = point(dot.back ? BACKWARD : FORWARD, from.angle + turn * dot.part);
      set(group, { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, class: `dot ${dot.back ? "backward" : "forward"}` });
      text(group.lastElementChild, String(dot.number));
    });
  }

  _middle(ring, state, about, moved) {
    const [what, count, of, more] = ring.lines;
    const rebuilding = ring.own.some((node) => state.nodes[node].from === "rebuild");
    const phase = about.phase === "link" && rebuilding ? "rebuilding" : state.over ? state.over : moved.late && about.phase === "step" ? "waiting" : CALLED[about.phase] ?? about.phase ?? "";
    const step = about.step ?? state.step ?? 0;
    text(what, phase);
    text(count, String(step));
    text(of, ring.several ? "own steps" : `of ${state.run?.steps ?? "?"} steps`);
    text(more, about.generation > 1 ? `generation ${about.generation}` : "");
  }

  // ---- between rings, and beside them

  _meet(state) {
    const pairs = [];
    for (const { members } of Object.values(state.rounds ?? {})) {
      members.forEach((one, i) => members.slice(i + 1).forEach((other) => pairs.push([one, other])));
    }
    match(this._meetings, pairs, () => make("path", { class: "meeting" }), (path, [one, other]) => {
      const a = this._origin.get(one), b = this._origin.get(other);
      set(path, { d: a && b ? `M${a}L${b}` : "" });
    });
  }

  _docks(state, chosen) {
    const idle = Object.entries(state.workers ?? {}).filter(([, info]) => info.status !== "member");
    idle.sort(([, a], [, b]) => rank(a) - rank(b));
    const width = this._columns * CELL, wide = Math.min(84, (width - 16) / Math.max(idle.length, 1)), y = this._rows * CELL + 8;
    const start = (width - wide * idle.length) / 2;
    this._docked.clear();
    match(this._dock, idle, () => this._newChip(), (group, [name, info], i) => {
      const x = start + (i + 0.5) * wide;
      this._docked.set(name, [x, y + 18]);
      set(group, {
        class: `docked ${info.status}${chosen === name ? " chosen" : ""}`, transform: `translate(${x} ${y})`, "data-worker": name,
        "aria-label": `worker ${name}, ${statusOf(info)}${info.machine ? `, on machine ${info.machine}` : ""}`,
      });
      const [box, cross, who, what] = group.children;
      set(box, { x: -wide / 2 + 4, width: wide - 8, class: `chip ${info.status}` });
      set(cross, { visibility: info.status === "dead" ? "visible" : "hidden" });
      text(who, name);
      text(what, wide > 50 ? statusOf(info) : "");
    });
  }

  _newChip() {
    const group = make("g", { tabindex: 0, role: "button" },
      make("rect", { y: 0, height: 36, rx: 9 }), make("path", { class: "cross", d: "M-11 7L11 29M11 7L-11 29" }),
      make("text", { class: "who", y: 15 }), make("text", { class: "what", y: 29 }));
    const choose = () => this._choose("worker", group.dataset.worker);
    group.addEventListener("click", choose);
    group.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); choose(); }
    });
    return group;
  }

  /** A spare that takes a place is seen to go there; a worker that dies, to fall apart. */
  _fly(state) {
    if (!this._before) return;
    for (const [node, info] of Object.entries(state.nodes ?? {})) {
      const was = this._before.nodes[node], place = this._places.get(node);
      if (!place || !was || was.worker === info.worker) continue;
      const [x, y] = this._origin.get(place.replica), at = point((place.inner + place.outer) / 2, place.angle);
      const there = [x + at[0], y + at[1]];
      if (was.worker && !info.worker) {
        const burst = make("path", { class: "burst", d: sector(place.inner, place.outer, place.from, place.to) });
        this._for(900, make("g", { transform: `translate(${x} ${y})` }, burst));
      }
      const from = info.worker && this._lastDock?.get(info.worker);
      if (from && this._before.workers[info.worker]?.status === "spare") {
        const chip = make("g", { class: "flying" }, make("rect", { x: -24, y: -14, width: 48, height: 28, rx: 9, class: "chip spare" }), text(make("text", { class: "who", y: 5 }), info.worker));
        chip.style.setProperty("--from", `translate(${from[0]}px, ${from[1]}px)`);
        chip.style.setProperty("--to", `translate(${there[0]}px, ${there[1]}px)`);
        this._for(800, chip);
      }
    }
    this._lastDock = new Map(this._docked);
  }

  _for(milliseconds, element) {
    this._flights.append(element);
    setTimeout(() => element.remove(), milliseconds);
  }
}

function statusOf(info) { return info.excluded ? "excluded" : STATUS[info.status]; }

function rank(info) { return ["spare", "starting", "released", "dead"].indexOf(info.status); }

function label(node, info, worker, kind, fault, births) {
  const what = {
    unstarted: "not started yet", empty: "lost, no worker holds it", waits: `waits for its weights${info.donors ? ` from nodes ${info.donors.join(" and ")}` : ""}`,
    frozen: `${fault}, not noticed yet`, holds: "working", slow: "found to be slow",
  }[kind];
  const where = info.stage ? `stage ${info.stage}` : "stage 0, the ends";
  return `${where}${info.worker ? `, worker ${info.worker}` : ""}, ${what}${births ? `, rebuilt ${births} times` : ""}`;
}

function edgePath(a, b) {
  if (!a.alone || !b.alone) return ""; // too many to be seen; the table names them
  let turn = b.angle - a.angle;
  if (turn > Math.PI) turn -= 2 * Math.PI;
  if (turn < -Math.PI) turn += 2 * Math.PI;
  const near = Math.abs(Math.abs(turn) - a.turn) < 0.01;
  const radius = near ? (INNER + OUTER) / 2 : INNER;
  const [from, to] = near
    ? turn > 0 ? [a.to, b.from] : [b.to, a.from]
    : [a.angle, b.angle];
  if (near) {
    const reach = Math.max(from, to) - Math.min(from, to) > Math.PI ? 0 : 1;
    return `M${point(radius, from - 0.02)}A${radius} ${radius} 0 0 ${reach} ${point(radius, to + 0.02)}`;
  }
  const [p, q] = [point(radius, from), point(radius, to)];
  return `M${p}Q${(p[0] + q[0]) * 0.2},${(p[1] + q[1]) * 0.2} ${q}`;
}

function bent(p, q, part) {
  const c = [(p[0] + q[0]) * 0.22, (p[1] + q[1]) * 0.22], rest = 1 - part;
  return [0, 1].map((i) => rest * rest * p[i] + 2 * rest * part * c[i] + part * part * q[i]);
}
