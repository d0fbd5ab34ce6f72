// Where the microbatches of a step are, by the plan: the log does not tell. Pure.

const FAST_S = 0.3; // a step that passes faster on the screen is drawn as a steady flow

/**
 * Microbatches of one replica: [{number, back, from, to, part, waits}], from one node of its route to the next.
 *
 * Each follows the one before it by one hop; all go forward along their route, then back. The step's time is divided
 * evenly among the hops.
 */
export function microbatches(routes, microbatches, progress, evaluate) {
  const found = [];
  if (!routes?.length) return found;
  const hops = Math.max(...routes.map((route) => route.length - 1));
  const each = evaluate ? hops : 2 * hops;
  const total = each + microbatches - 1;
  for (let number = 0; number < microbatches; number++) {
    const route = routes[number % routes.length], own = route.length - 1;
    const done = progress * total - number;
    if (done < 0 || done > (evaluate ? own : 2 * own)) continue;
    const back = done > own;
    const along = Math.min(back ? 2 * own - done : done, own - 1e-6);
    const at = Math.floor(along);
    found.push({ number, back, from: route[at], to: route[at + 1], part: along - at });
  }
  return found;
}

/** How far the phase under way has come, from 0 to 1, and whether it takes longer than usual. */
export function progress(span, t, pace, now) {
  const seen = span.lasts / Math.max(pace, 1e-6);
  if (span.known && seen < FAST_S) return { part: (now / 0.8) % 1, late: false, flow: true };
  const part = (t - span.began) / span.lasts;
  return { part: Math.min(Math.max(part, 0), span.known ? 1 : 0.97), late: !span.known && part > 2.5, flow: false };
}
