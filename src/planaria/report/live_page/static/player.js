// One run's frames as they came, and its state at any moment of them.

const KEY = 64; // frames between two states that are kept whole

/** `state` after a JSON merge patch (RFC 7396); unchanged parts are shared. */
export function patched(state, change) {
  const after = { ...state };
  for (const [name, value] of Object.entries(change)) {
    if (value === null) delete after[name];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const before = after[name];
      after[name] = patched(before && typeof before === "object" && !Array.isArray(before) ? before : {}, value);
    } else after[name] = value;
  }
  return after;
}

/** Index of the last entry whose `t` is at most this; -1 without one. */
export function lastAt(entries, t) {
  let low = 0, high = entries.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (entries[middle].t <= t) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export class Player {
  constructor(id, name) {
    this.id = id;
    this.name = name;
    this.frames = [];
    this.keys = []; // states before frames 0, KEY, 2 KEY, …
    this.head = {}; // the newest state
    this.lines = []; // story: {t, step, tone, text}
    this.losses = []; // {t, step, value, speed}
    this.validations = [];
    this.recoveries = []; // of all replicas, as far as each is known by now
    this.phases = new Map(); // replica → [{t, phase, step}]
    this.births = new Map(); // node → [t, …] of its rebuilds
    this.present = this.ended = false;
    this.trouble = "";
    this._at = -1; // the frame that `_state` is after
    this._state = {};
  }

  get end() { return this.frames.length ? this.frames[this.frames.length - 1].t : 0; }
  get over() { return Boolean(this.head.over); }

  add(frames) {
    for (const frame of frames) {
      const last = this.frames[this.frames.length - 1];
      if (last && frame.n <= last.n) continue;
      if (this.frames.length % KEY === 0) this.keys.push(this.head);
      if (last && frame.t < last.t) frame.t = last.t;
      const before = this.head;
      this.head = patched(before, frame.set);
      this.frames.push(frame);
      this._note(frame, before);
    }
  }

  _note(frame, before) {
    const { t, set } = frame, head = this.head;
    if (frame.line) this.lines.push({ t, ...frame.line });
    if (set.loss && head.loss) {
      this.losses.push({ t, step: head.loss.step, value: Number(head.loss.value), speed: head.loss.tokens_per_s });
    }
    if (set.validation) this.validations.push({ t, step: head.validation.step, value: Number(head.validation.value) });
    for (const replica of Object.keys(set.recoveries ?? {})) {
      const found = head.recoveries[replica];
      if (!found) continue;
      // The time of detection stays; the fault may become known later.
      const known = this.recoveries.findIndex((r) => r.replica === replica && r.lost === found.lost);
      if (known < 0) this.recoveries.push({ replica, ...found });
      else this.recoveries[known] = { replica, ...found };
    }
    for (const replica of Object.keys(set.replicas ?? {})) {
      const now = head.replicas?.[replica], was = before.replicas?.[replica];
      if (!now || (was && now.since === was.since)) continue;
      if (!this.phases.has(replica)) this.phases.set(replica, []);
      this.phases.get(replica).push({ t, phase: now.phase, step: now.step });
    }
    for (const node of Object.keys(set.nodes ?? {})) {
      const rebuilt = before.nodes?.[node]?.from === "rebuild" && head.nodes?.[node]?.state === "holds";
      if (!rebuilt) continue;
      if (!this.births.has(node)) this.births.set(node, []);
      this.births.get(node).push({ t });
    }
  }

  /** The state at a moment. */
  at(t) {
    const wanted = lastAt(this.frames, t);
    if (wanted === this._at) return this._state;
    let from = this._at, state = this._state;
    const key = Math.floor(Math.max(wanted, 0) / KEY);
    if (wanted < from || key * KEY - 1 > from) {
      from = key * KEY - 1;
      state = this.keys[key] ?? {};
    }
    while (from < wanted) state = patched(state, this.frames[++from].set);
    this._at = wanted;
    this._state = state;
    return state;
  }

  /** How long the phase of a replica lasts that is under way at `t`, and whether that is known yet. */
  span(replica, t) {
    const phases = this.phases.get(replica) ?? [], at = lastAt(phases, t);
    if (at < 0) return { began: 0, lasts: 1, known: false };
    const now = phases[at], next = phases[at + 1];
    if (next) return { began: now.t, lasts: Math.max(next.t - now.t, 1e-3), known: true };
    const before = [];
    for (let i = at - 1; i > 0 && before.length < 9; i--) {
      if (phases[i].phase === now.phase) before.push(phases[i + 1].t - phases[i].t);
    }
    before.sort((a, b) => a - b);
    return { began: now.t, lasts: before.length ? before[before.length >> 1] : 1, known: false };
  }

  birthsAt(node, t) { return lastAt(this.births.get(node) ?? [], t) + 1; }

  /** The recovery shown at `t`: the last one that began by then. */
  recoveryAt(t) {
    let found = null;
    for (const one of this.recoveries) if (one.began <= t && (!found || one.began >= found.began)) found = one;
    return found;
  }

  /** When the recovery under way at `t` ends; null without one. It lasts a moment longer, so that eyes can follow. */
  slowUntil(t) {
    for (const one of this.recoveries) {
      const end = (one.ended ?? one.linked ?? one.lost + 1) + 0.25;
      if (t >= one.began - 0.12 && t < end) return end;
    }
    return null;
  }
}
