// A curve by step, with what happened along it; drawn anew only when something is different.

const MARGIN = { left: 44, right: 10, top: 8, bottom: 20 };

/**
 * `curves`: [{points: [{t, step, y}], dashed, colour}], colour: an index, unless it is the curve's own; `marks`: [{step, t, kind}], `t`: the moment that is shown.
 * What is later than that moment is drawn faintly.
 */
export function draw(canvas, curves, marks, t, steps, colours, logarithmic) {
  const box = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
  if (!box.width) return;
  const key = [box.width, box.height, scale, steps, t.toFixed(2), marks.length, colours.name, ...curves.map((c) => c.points.length)].join();
  if (canvas.dataset.key === key) return;
  canvas.dataset.key = key;
  canvas.width = box.width * scale;
  canvas.height = box.height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const inner = { x: MARGIN.left, y: MARGIN.top, w: box.width - MARGIN.left - MARGIN.right, h: box.height - MARGIN.top - MARGIN.bottom };
  const values = curves.flatMap((curve) => curve.points.map((p) => p.y)).filter(Number.isFinite);
  if (!values.length) return;
  const low = logarithmic ? Math.min(...values) : 0, high = Math.max(...values);
  const span = Math.max(high - low, 1e-9) * 1.06;
  const x = (step) => inner.x + inner.w * step / Math.max(steps, 1);
  const y = (value) => inner.y + inner.h * (1 - (value - low + span * 0.02) / span);
  axes(pen, inner, low, high, y, steps, x, colours);
  for (const mark of marks) line(pen, x(mark.step), inner, colours[mark.kind], mark.t > t ? 0.25 : 0.9);
  curves.forEach((curve, i) => {
    curve.points.length && stroke(pen, curve.points, x, y, t, colours.series[(curve.colour ?? i) % colours.series.length], curve.dashed);
  });
  for (const mark of marks) sign(pen, x(mark.step), inner.y + 6, mark, colours, mark.t > t ? 0.35 : 1);
}

function stroke(pen, points, x, y, t, colour, dashed) {
  for (const later of [true, false]) {
    pen.globalAlpha = later ? 0.22 : 1;
    pen.strokeStyle = colour;
    pen.lineWidth = dashed ? 1.5 : 2;
    pen.setLineDash(dashed ? [5, 4] : []);
    pen.lineJoin = "round";
    pen.beginPath();
    let last = -1, drawn = false;
    for (const p of points) {
      if (!Number.isFinite(p.y) || (!later && p.t > t)) continue;
      // A step that was undone comes again: the curve goes back without a line.
      if (drawn && p.step >= last) pen.lineTo(x(p.step), y(p.y));
      else pen.moveTo(x(p.step), y(p.y));
      drawn = true;
      last = p.step;
    }
    pen.stroke();
  }
  const now = points.filter((p) => p.t <= t).pop();
  pen.globalAlpha = 1;
  pen.setLineDash([]);
  if (now && Number.isFinite(now.y)) {
    pen.fillStyle = colour;
    pen.beginPath();
    pen.arc(x(now.step), y(now.y), 4, 0, 7);
    pen.fill();
  }
}

function axes(pen, inner, low, high, y, steps, x, colours) {
  pen.globalAlpha = 1;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = colours.muted;
  pen.strokeStyle = colours.rule;
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of ticks(low, high, Math.max(2, inner.h / 36))) {
    pen.beginPath();
    pen.moveTo(inner.x, y(value));
    pen.lineTo(inner.x + inner.w, y(value));
    pen.stroke();
    pen.fillText(short(value), inner.x - 6, y(value));
  }
  pen.textBaseline = "top";
  for (const step of ticks(0, steps, Math.max(2, inner.w / 90))) {
    pen.textAlign = x(step) > inner.x + inner.w - 16 ? "right" : step ? "center" : "left";
    pen.fillText(short(step), x(step), inner.y + inner.h + 6);
  }
}

function line(pen, at, inner, colour, alpha) {
  pen.globalAlpha = alpha * 0.5;
  pen.strokeStyle = colour;
  pen.setLineDash([2, 3]);
  pen.beginPath();
  pen.moveTo(at, inner.y + 10);
  pen.lineTo(at, inner.y + inner.h);
  pen.stroke();
  pen.setLineDash([]);
}

function sign(pen, at, y, mark, colours, alpha) {
  pen.globalAlpha = alpha;
  pen.strokeStyle = pen.fillStyle = colours[mark.kind];
  pen.lineWidth = 2;
  pen.beginPath();
  if (mark.kind === "loss") { pen.moveTo(at - 4, y - 4); pen.lineTo(at + 4, y + 4); pen.moveTo(at + 4, y - 4); pen.lineTo(at - 4, y + 4); pen.stroke(); }
  else { pen.moveTo(at, y - 5); pen.lineTo(at + 5, y + 4); pen.lineTo(at - 5, y + 4); pen.fill(); }
  pen.globalAlpha = 1;
}

export function ticks(low, high, most) {
  const rough = (high - low) / Math.max(most, 1);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

export function short(value) {
  if (Math.abs(value) >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (Math.abs(value) >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(4));
}
