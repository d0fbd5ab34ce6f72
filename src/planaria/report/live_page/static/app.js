// The page: it hears of the runs, keeps the time, and draws.

import { Clock } from "./clock.js";
import { draw } from "./chart.js";
import { $, Sentence, el, lines, links, numbers, numbersOf, recovery, selected, time, verdicts, workers } from "./panels.js";
import { Player } from "./player.js";
import { Fleet } from "./ring.js";
import { make, match, set } from "./svg.js";
import { Grid, curvesOf, kindOf, summaryOf } from "./trials.js";

const SILENT_S = 15;
const TONES = { fault: "fault", slow: "slow", loss: "loss", recovery: "recovery", rollback: "rollback" };
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const seconds = () => performance.now() / 1000;
const page = { players: [], views: [], shown: 0, chosen: null, faults: [], clock: null, opened: false, colours: null, panels: 0 };

async function begin() {
  if (location.search.includes("token=")) history.replaceState(null, "", location.pathname + location.hash);
  const listed = await (await fetch("/api/runs")).json();
  page.faults = listed.faults;
  page.players = listed.runs.map((run) => new Player(run.id, run.name));
  page.clock = new Clock(page.players);
  document.title = `${page.players.map((player) => player.name).join(", ")} · planaria`;
  page.views = page.players.map(view);
  $("#rings").classList.toggle("several", page.players.length > 1);
  $(".moment").hidden = page.players.length > 1; // each has its own sentence
  choices();
  page.players.forEach(listen);
  controls();
  requestAnimationFrame(loop);
}

function view(player, number) {
  const fleet = new Fleet((kind, name) => choose(number, kind, name));
  const caption = el("p", { class: "caption small" }, el("span", { class: "sign", "aria-hidden": "true" }), el("span", { class: "text" }), el("span", { class: "ago" }));
  const mini = el("dl", { class: "mini" });
  const figure = el("figure", { class: "run" });
  if (page.players.length > 1) figure.append(el("figcaption", {}, el("b", {}, player.name)), caption);
  const grid = new Grid(player.name);
  figure.append(fleet.svg, grid.element);
  if (page.players.length > 1) figure.append(mini);
  fleet.svg.setAttribute("aria-label", `Workers of ${player.name}`);
  $("#rings").append(figure);
  return { fleet, grid, figure, mini, sentence: new Sentence(caption, null) };
}

function choices() {
  if (page.players.length < 2) {
    $("#runs").append(el("span", { class: "only" }, page.players[0].name));
    return;
  }
  page.players.forEach((player, i) => {
    const button = el("button", { type: "button", "aria-pressed": String(!i) }, player.name);
    button.addEventListener("click", () => show(i));
    $("#runs").append(button);
  });
}

function show(number) {
  page.shown = number;
  page.chosen = null;
  [...$("#runs").children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === number)));
}

function listen(player) {
  const source = new EventSource(`/api/runs/${player.id}/frames`);
  source.addEventListener("frames", (event) => {
    player.add(JSON.parse(event.data));
    player.received = seconds();
    if (player.present) page.clock.received(player, seconds());
  });
  source.addEventListener("present", () => {
    player.present = true;
    page.clock.received(player, seconds());
    if (page.players.every((one) => one.present)) opened();
  });
  source.addEventListener("end", (event) => {
    player.ended = true;
    player.trouble = JSON.parse(event.data).trouble;
    source.close();
    connection();
  });
  source.onopen = () => connection();
  source.onerror = () => connection("the server does not answer");
}

/** Everything has been read: show a running run live, a finished one from its start. */
function opened() {
  connection();
  if (page.opened) return;
  page.opened = true;
  document.documentElement.dataset.opened = "yes";
  const clock = page.clock, wanted = new URLSearchParams(location.hash.slice(1));
  if (!clock.canBeLive) {
    clock.live = false;
    clock.rate = [1, 2, 4, 8, 16, 32, 64].find((rate) => clock.end / rate <= 60) ?? 64;
  }
  if (wanted.has("at")) { clock.seek(Number(wanted.get("at"))); clock.playing = false; }
  if (wanted.has("rate")) { clock.rate = Number(wanted.get("rate")); clock.playing = true; }
  if (wanted.has("theme")) document.documentElement.dataset.theme = wanted.get("theme");
  if (wanted.has("legend")) legend(true);
}

/** Show viewers of a running run when no news arrive. */
function silence(now) {
  const badge = $("#link"), received = Math.max(...page.players.map((player) => player.received ?? 0));
  if (badge.dataset.how !== "up" || !page.opened) return;
  const words = now - received > SILENT_S ? `no news for ${time(now - received)}` : "live";
  if (badge.textContent !== words) badge.textContent = words;
}

function connection(lost = "") {
  const badge = $("#link"), trouble = page.players.map((player) => player.trouble).filter(Boolean)[0];
  const over = page.players.every((player) => player.over), ended = page.players.every((player) => player.ended);
  const how = trouble ? "broken" : ended ? "over" : lost ? "lost" : over ? "over" : "up";
  const words = { broken: `the log cannot be read on: ${trouble}`, over: ended ? "recorded; the server has ended" : "recorded", lost, up: "live" }[how];
  badge.dataset.how = how;
  badge.textContent = words;
}

// ---- controls

function controls() {
  const clock = page.clock;
  $("#play").addEventListener("click", () => clock.toggle());
  $("#live").addEventListener("click", () => clock.goLive());
  $("#position").addEventListener("input", (event) => clock.seek(Number(event.target.value)));
  $("#rate").addEventListener("change", (event) => { clock.rate = Number(event.target.value); if (clock.live) clock.live = false; });
  $("#slow").addEventListener("change", (event) => { clock.slowly = event.target.checked; });
  $("#theme").addEventListener("click", theme);
  $("#help").addEventListener("click", () => legend());
  $("#legend .close").addEventListener("click", () => legend(false));
  $("#selected .close").addEventListener("click", () => { page.chosen = null; });
  $("#recovery .again").addEventListener("click", again);
  document.addEventListener("keydown", keys);
  new ResizeObserver(() => page.views.forEach((one) => { one.fleet.narrow = window.innerWidth < 700; })).observe(document.body);
}

function keys(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const tag = event.target.tagName, typing = tag === "SELECT" || (tag === "INPUT" && event.target.type !== "checkbox");
  const clock = page.clock, act = {
    " ": () => tag !== "BUTTON" && tag !== "INPUT" && clock.toggle(),
    ArrowRight: () => !typing && (event.shiftKey ? event_(1) : step(1)),
    ArrowLeft: () => !typing && (event.shiftKey ? event_(-1) : step(-1)),
    "+": () => clock.faster(1), "-": () => clock.faster(-1),
    l: () => clock.canBeLive && clock.goLive(), d: theme, h: () => legend(),
    Escape: () => { legend(false); page.chosen = null; },
  }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act && act() !== false) event.preventDefault();
}

/** To the beginning of the next step of the run that is shown, or the one before. */
function step(by) {
  const player = page.players[page.shown], clock = page.clock, phases = player.phases.get("0") ?? [...player.phases.values()][0] ?? [];
  const starts = phases.filter((one) => one.phase === "step");
  const found = by > 0 ? starts.find((one) => one.t > clock.position + 1e-6) : starts.filter((one) => one.t < clock.position - 1e-3).pop();
  clock.playing = false;
  if (found) clock.seek(found.t);
}

function event_(by) {
  const player = page.players[page.shown], clock = page.clock;
  const found = by > 0 ? player.lines.find((line) => line.t > clock.position + 1e-3) : player.lines.filter((line) => line.t < clock.position - 1e-3).pop();
  if (found) clock.seek(found.t);
}

function again() {
  const found = page.players[page.shown].recoveryAt(page.clock.position);
  if (!found) return;
  page.clock.seek(found.began - 0.15);
  page.clock.slowly = $("#slow").checked = true;
  page.clock.playing = true;
}

function theme() {
  const root = document.documentElement, dark = root.dataset.theme ?? (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = dark === "dark" ? "light" : "dark";
}

function legend(open = $("#legend").hidden) {
  $("#legend").hidden = !open;
  $("#help").setAttribute("aria-expanded", String(open));
  if (open) $("#legend .close").focus();
}

// ---- a worker that was clicked

function choose(number, kind, name) {
  if (page.shown !== number) show(number);
  page.chosen = page.chosen && page.chosen.name === name && page.chosen.kind === kind ? null : { kind, name };
  $("#selected .answer").textContent = "";
}

async function injectFault(fault) {
  const player = page.players[page.shown], chosen = page.chosen, state = player.head;
  const name = chosen.kind === "node" ? state.nodes?.[chosen.name]?.worker : chosen.name, worker = state.workers?.[name];
  const answer = $("#selected .answer");
  if (!worker) return;
  answer.textContent = "…";
  page.clock.goLive();
  const asked = { worker: name, incarnation: worker.incarnation, fault };
  const headers = { "content-type": "application/json" };
  try {
    const reply = await fetch(`/api/runs/${player.id}/faults`, { method: "POST", headers, body: JSON.stringify(asked) });
    const json = reply.headers.get("content-type")?.includes("json") ? await reply.json() : { refused: await reply.text() };
    answer.textContent = json.done ?? `not done: ${json.refused}`;
  } catch (error) {
    answer.textContent = `not done: ${error.message}`;
  }
}

// ---- drawing

function loop() {
  const now = seconds(), clock = page.clock;
  clock.tick(now);
  const t = clock.position;
  page.views.forEach((one, i) => {
    const player = page.players[i], own = Math.min(t, clock.canBeLive && clock.live ? t : player.end);
    const chosen = i === page.shown ? page.chosen?.name ?? null : null;
    const run = kindOf(player.head) === "run";
    one.fleet.svg.toggleAttribute("hidden", !run);
    one.grid.element.hidden = run;
    if (run) one.fleet.draw(player, own, clock.playing ? clock.pace : 1, now, chosen, calm.matches);
    else one.grid.draw(player.at(own), palette().series);
    if (page.players.length > 1) besides(one, player, player.at(own), own, now, i);
  });
  transport(clock, t);
  const player = page.players[page.shown], own = player.at(t);
  main.show(own.caption, t, now);
  if (now - page.panels > 0.1) { page.panels = now; panels(player, own, t); }
  requestAnimationFrame(loop);
}

const main = new Sentence($("#caption"), $("#spoken"));

function besides(one, player, state, t, now, number) {
  one.sentence.show(state.caption, t, now);
  const few = (kindOf(state) === "run" ? numbersOf(player, state) : summaryOf(state)).slice(0, 4);
  numbers(one.mini, few);
  one.figure.classList.toggle("shown", number === page.shown);
}

function transport(clock, t) {
  const slider = $("#position");
  if (slider.max !== String(clock.end)) slider.max = clock.end;
  if (document.activeElement !== slider || clock.playing) slider.value = t;
  slider.setAttribute("aria-valuetext", `${time(t)} of ${time(clock.end)}`);
  const playing = clock.playing || clock.live, play = $("#play");
  play.firstElementChild.textContent = playing ? "❚❚" : "▶";
  play.setAttribute("aria-label", playing ? "Pause" : "Play");
  $("#clock").textContent = `${time(Math.min(t, clock.end))} / ${time(clock.end)}`;
  $("#clock").dataset.pace = clock.live || !clock.playing || clock.pace === clock.rate ? "" : `${clock.pace}×`;
  const live = $("#live");
  live.hidden = !clock.canBeLive;
  live.setAttribute("aria-pressed", String(clock.live));
  if (document.activeElement !== $("#rate")) $("#rate").value = String(clock.rate);
}

function panels(player, state, t) {
  silence(seconds());
  const kind = kindOf(state);
  if (document.documentElement.dataset.kind !== kind) {
    document.documentElement.dataset.kind = kind;
    $("#loss").closest("section").setAttribute("aria-label", TITLES[kind].join(", "));
    TITLES[kind].forEach((words, i) => { document.querySelectorAll("[data-curve]")[i].textContent = words; });
    document.querySelectorAll("canvas").forEach((canvas) => { delete canvas.dataset.key; });
  }
  if (kind !== "run") { others(player, state, t); return; }
  const found = player.recoveryAt(t);
  recovery($("#recovery"), found, t, state, player.recoveries.indexOf(found) + 1);
  numbers($("#numbers"), numbersOf(player, state));
  lines($("#lines"), player.lines, t, (when) => page.clock.seek(when - 0.05));
  verdicts($("#verdicts"), state);
  workers($("#workers"), state, (kind, name) => choose(page.shown, kind, name));
  links($("#links"), state);
  $("#hint").hidden = !page.faults.length || !page.clock.live || Boolean(page.chosen);
  selected($("#selected"), page.chosen, state, page.faults, page.clock.live, injectFault);
  marks(player);
  charts(player, t);
}

const TITLES = {
  run: ["Loss, nats per token; dashed: validation", "Tokens per second"],
  comparison: ["Loss by step, nats per token, of every race", ""],
  swarm: ["Reward by round, of every peer", "Held-out problems solved, by round"],
};

/** The panels of folders other than runs. */
function others(player, state, t) {
  const swarm = kindOf(state) === "swarm", colours = palette();
  $("#recovery").hidden = $("#selected").hidden = $("#verdicts").hidden = true;
  numbers($("#numbers"), summaryOf(state));
  lines($("#lines"), player.lines, t, (when) => page.clock.seek(when - 0.05), swarm ? "round" : "step");
  marks(player);
  const main = curvesOf(state, swarm ? "rewards" : "curve"), steps = Math.max(1, ...main.flatMap((one) => one.points.map((p) => p.step)));
  draw($("#loss"), main, [], t, steps, colours, true);
  if (swarm) draw($("#speed"), curvesOf(state, "accuracies"), [], t, steps, colours, false);
}

/** What happened, above the slider. */
function marks(player) {
  const shown = player.lines.filter((line) => TONES[line.tone]), key = `${shown.length}:${page.clock.end.toFixed(1)}:${player.id}`;
  if ($("#marks").dataset.key === key) return;
  $("#marks").dataset.key = key;
  match($("#marks"), shown.slice(-400), () => make("rect", { y: 0, width: 2.5, height: 10 }), (rect, line) => {
    set(rect, { x: (1000 * line.t) / (page.clock.end || 1), class: `mark ${line.tone}` });
  });
}

function charts(player, t) {
  const colours = palette(), steps = Math.max(...page.players.map((one) => one.head.run?.steps ?? 1));
  const order = [player, ...page.players.filter((one) => one !== player)];
  const happened = player.lines.filter((line) => line.tone === "loss" || line.tone === "recovery");
  const loss = order.map((one, i) => ({ points: points(one, "losses", "value"), dashed: i > 0 }));
  const held = { points: points(player, "validations", "value"), dashed: true };
  draw($("#loss"), [...loss, held], happened.map(({ t, step, tone }) => ({ t, step, kind: tone })), t, steps, colours, true);
  draw($("#speed"), order.map((one, i) => ({ points: points(one, "losses", "speed"), dashed: i > 0 })), [], t, steps, colours, false);
}

const kept = new WeakMap();

function points(player, list, field) {
  if (!kept.has(player)) kept.set(player, {});
  const own = kept.get(player), key = `${list}.${field}`, all = player[list];
  own[key] ??= [];
  for (let i = own[key].length; i < all.length; i++) own[key].push({ t: all[i].t, step: all[i].step, y: all[i][field] });
  return own[key];
}

function palette() {
  const style = getComputedStyle(document.documentElement), read = (name) => style.getPropertyValue(name).trim();
  const name = read("--paper");
  if (page.colours?.name !== name) {
    page.colours = {
      name, muted: read("--muted"), rule: read("--rule"), loss: read("--red"), recovery: read("--green"),
      series: ["--blue", "--orange", "--violet", "--green", "--teal", "--red", "--muted", "--ink"].map(read),
    };
  }
  return page.colours;
}

begin().catch((error) => {
  $("#caption .text").textContent = `The page cannot begin: ${error.message}. Open the address that planaria printed.`;
  $("#caption").dataset.tone = "loss";
});
