"""The report of a swarm: each peer's benefit from collaboration, and rejections; a table and a page."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go

from planaria.report import page
from planaria.report.phrases import format_count
from planaria.report.tables import Table, show
from planaria.report.theme import SERIES, TICKS, escape_label, figure, integer_x_axis, stroke
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.lines import LOG, PEERS, UNKNOWN_PEERS, RoundDone, read_log
from planaria.swarm.records.outcome import PeerOutcome, RunOutcome
from planaria.swarm.records.saved_state import saved_rounds
from planaria.swarm.report.swarm_verdict import Curve, agreement_section, curves_figure, verdict

LAST = 4
"""number of final evaluations that are averaged"""
PATTERNS = ("", "/", ".", "x")
"""patterns of bars, after all colours are used"""
HEAD = ["peer", "model", "start", "now", "alone", "gain from collaboration"]


def show_outcome(outcome: RunOutcome, config: SwarmConfig) -> None:
    """Print the benefit of collaboration for each peer."""
    rows = [_row(peer) for peer in _evaluated_peers(outcome)]
    show([Table(f"{config.name}: did collaborating help?", HEAD, rows, numbers_from=2)])


def write_swarm_report(folder: Path, config: SwarmConfig, outcome: RunOutcome, to: Path | None = None) -> Path:
    """Write the report of the run in ``folder`` to ``to``, by default there; return its path.

    :raises UserError: if it cannot be written.
    """
    return page.write(
        to or folder / "report.html", page.document(f"{config.name} · planaria", body(folder, config, outcome))
    )


def _evaluated_peers(outcome: RunOutcome) -> list[PeerOutcome]:
    return [peer for peer in outcome.peers if peer.points]


def _row(peer: PeerOutcome) -> list[str]:
    start, now = peer.points[0].accuracy, peer.last(LAST)
    gain = "–"
    if now.alone is not None and now.alone.rate is not None and now.accuracy.rate is not None:
        gain = f"{now.accuracy.rate - now.alone.rate:+z.3f}"
    name = peer.name if peer.honest else f"{peer.name} (attacks: {peer.attack})"
    return [
        name,
        peer.model,
        "–" if start.rate is None else f"{start.rate:.2f}",
        str(now.accuracy),
        "–" if now.alone is None else str(now.alone),
        gain,
    ]


def body(folder: Path, config: SwarmConfig, outcome: RunOutcome) -> Iterator[str]:
    """Yield the report's sections, as HTML."""
    summary = (
        f"{format_count(len(outcome.peers), 'peer')}, {format_count(outcome.rounds, 'round')} of "
        f"{format_count(config.rounds.prompts, 'problem')} with {format_count(config.rounds.group, 'completion')} each "
        f"({config.rounds.mode}), in {outcome.seconds:.0f} s."
    )
    yield page.heading(config.name, verdict(outcome, LAST), summary)
    yield _cards(config, outcome)
    yield page.section(
        "Did collaborating help me?",
        f"Held-out problems solved, one draw each, the last {LAST} evaluations together with Wilson's 95 % interval. "
        "Alone: a copy that started from the same weights and learned from as many completions, all its own. It is "
        "trained if the recipe has `shadow = true`.",
        page.table("peers", HEAD, [_row(peer) for peer in _evaluated_peers(outcome)], numbers_from=2),
    )
    yield page.section(
        "Accuracy over rounds",
        "Solid: in the swarm. Dotted: the same peer alone.",
        page.chart(curves_figure(400, "problems solved", _accuracy_curves(outcome)), "accuracy"),
    )
    logs = {
        peer.name: [r for r in read_log(folder / PEERS / peer.name / LOG) if isinstance(r, RoundDone)]
        for peer in outcome.honest
    }
    yield from agreement_section(config, logs)
    yield from staleness_section(config, logs, {peer.id: peer.name for peer in outcome.peers})
    yield from _rejections(logs, outcome)
    if config.receipts.committee:
        yield _receipts(folder, outcome)
    states = {peer.name: saved_rounds(folder / PEERS / peer.name) for peer in outcome.peers}
    saved = [[name, ", ".join(map(str, numbers)) or "–"] for name, numbers in states.items()]
    yield page.section(
        "Export a model",
        f"planaria export {folder} --peer NAME --to FOLDER writes a peer's model as a Hugging Face folder: after "
        "the newest saved round, or after the round given by --round. rounds.keep and rounds.kept set which rounds are "
        "saved.",
        page.table("kept", ["peer", "kept after rounds"], saved, numbers_from=1),
    )
    yield page.section("Settings", "The complete recipe.", page.settings(_settings(config)))
    yield page.footer(f"Written by planaria swarm train; planaria swarm show {folder} traces every completion.")


def _cards(config: SwarmConfig, outcome: RunOutcome) -> str:
    gains = [
        (p.last(LAST).accuracy.rate or 0.0) - (p.points[0].accuracy.rate or 0.0) for p in outcome.honest if p.points
    ]
    gained = f"{min(gains):+z.2f} … {max(gains):+z.2f}" if gains else "–"
    return page.cards(
        [
            ("accuracy gained", gained, "honest peers, since the start"),
            ("accuracy", f"{outcome.accuracy(LAST):.2f}", f"honest peers' mean, last {LAST} evaluations"),
            ("rounds", str(outcome.rounds), config.rounds.mode),
            ("loss", config.loss.kind, "for completions of others"),
        ]
    )


def _settings(config: SwarmConfig) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    return [
        (name, [(key, str(value), False) for key, value in section.items()])
        for name, section in config.model_dump(mode="json").items()
        if isinstance(section, dict) and section and name != "peers"
    ]


def _receipts(folder: Path, outcome: RunOutcome) -> str:
    """Return the section on certified rounds and missing receipts of each peer."""
    names, rows = {peer.id: peer.name for peer in outcome.peers}, []
    for peer in outcome.peers:
        log = [r for r in read_log(folder / PEERS / peer.name / LOG) if isinstance(r, RoundDone)]
        certified = [record for record in log if record.certified]
        missing = Counter(
            names[other]
            for record in certified
            for other in sorted(record.sent)
            if other in names.keys() - {*record.certified}
        )
        unsigned = ", ".join(f"{name} in {count}" for name, count in sorted(missing.items())) or "–"
        rows.append([peer.name, f"{len(certified)} of {len(log)}", unsigned])
    return page.section(
        "Receipts",
        "Rounds whose certificate the peer had seen when it learned from them, and peers without a receipt in these "
        "rounds. A certificate states that its named peers found the same result, not that the work is "
        "good. planaria swarm show RUN --credits counts the receipts on the board; planaria export puts a certificate "
        "of the weights next to the model.",
        page.table("receipts", ["peer", "rounds certified", "had not signed, in rounds"], rows, numbers_from=3),
    )


def _rejections(logs: Mapping[str, Sequence[RoundDone]], outcome: RunOutcome) -> Iterator[str]:
    names = {peer.id: peer.name for peer in outcome.peers}
    yield page.section(
        "Rejections",
        "Completions that honest peers rejected, by layer and sender, over rounds. Layers that were off are omitted.",
        page.chart(rejections_figure(logs, names), "rejected"),
    )
    yield page.section(
        "Influence",
        "Each peer's share of the sum of all |advantages| that honest peers learned from: an upper bound of its effect "
        "on their updates.",
        page.chart(influence_figure(logs, names), "influence"),
    )
    rows = [
        [
            layer,
            format_share(value.stopped),
            format_share(value.misjudged),
            "; ".join(f"{n} × {why}" for why, n in value.off.items()),
        ]
        for layer, value in outcome.layers.items()
    ]
    yield page.section(
        "Layers",
        "Of other peers' completions that reached it. Poison is known only in drills.",
        page.table(
            "layers", ["layer", "poison stopped", "honest rejected", "switched off, in rounds"], rows, numbers_from=1
        ),
    )


def format_share(tally: HitTally) -> str:
    """Format a rate with its base; a dash if undefined."""
    return f"{tally.rate:.1%} of {tally.eligible}" if tally.rate is not None else "–"


def _accuracy_curves(outcome: RunOutcome) -> Iterator[Curve]:
    """Yield every peer's held-out accuracy and, dotted with hollow marks, that of its copy alone."""
    for index, peer in enumerate(outcome.peers):
        style, rounds = stroke(index, len(outcome.peers)), [point.round for point in peer.points]
        hollow = {"line": style["line"] | {"dash": "dot", "width": 1.5},
                  "marker": style["marker"] | {"symbol": f"{style['marker']['symbol']}-open"}}  # fmt: skip
        solid = style | {"line": style["line"] | {"dash": "solid"}}
        yield peer.name, rounds, [point.accuracy.rate for point in peer.points], solid
        yield f"{peer.name} alone", rounds, [p.alone.rate if p.alone else None for p in peer.points], hollow


def rejections_figure(logs: Mapping[str, Sequence[RoundDone]], names: Mapping[str, str]) -> go.Figure:
    """Plot rejected completions by layer and sender over all honest peers, stacked over rounds."""
    counts: dict[tuple[str, str], Counter[int]] = {}
    for log in logs.values():
        for record in log:
            for layer, peer, rejected in record.rejections():
                key = (layer, names.get(peer, peer[:8]))
                counts.setdefault(key, Counter())[record.round] += rejected
    rounds = sorted({record.round for log in logs.values() for record in log})
    fig = figure(340, x="round", y="completions rejected", barmode="stack", bargap=0.05, showlegend=True)
    for index, ((layer, peer), by_round) in enumerate(sorted(counts.items())):
        fig.add_bar(
            x=rounds,
            y=[by_round[number] for number in rounds],
            name=escape_label(f"{layer}: {peer}"),
            marker={
                "color": SERIES[index % len(SERIES)],
                "line": {"width": 0},
                "pattern": {"shape": PATTERNS[index // len(SERIES) % len(PATTERNS)]},
            },
        )
    highest = max((sum(by[number] for by in counts.values()) for number in rounds), default=0)
    if highest <= TICKS:
        fig.update_yaxes(dtick=1, range=[0, highest + 0.5])
    return integer_x_axis(fig, rounds, bars=True)


def influence_figure(logs: Mapping[str, Sequence[RoundDone]], names: Mapping[str, str]) -> go.Figure:
    """Plot each peer's share of the gradient over rounds, unknown peers together; means over honest peers."""
    if any(UNKNOWN_PEERS in record.influence for log in logs.values() for record in log):
        names = {**names, UNKNOWN_PEERS: UNKNOWN_PEERS}
    by_round: dict[int, list[RoundDone]] = defaultdict(list)
    for record in sorted((record for log in logs.values() for record in log), key=lambda record: record.round):
        by_round[record.round].append(record)

    def curve(index: int, peer: str, name: str) -> Curve:
        shares = [statistics.fmean(r.influence.get(peer, 0.0) for r in records) for records in by_round.values()]
        return name, list(by_round), shares, stroke(index, len(names))

    in_order = enumerate(sorted(names.items(), key=lambda item: item[1]))
    return curves_figure(340, "share of the update", (curve(index, *peer) for index, peer in in_order))


STALENESS = [
    *("peer", "completions by staleness", "dropped", "ESS, minimum"),
    *("ratio p99, maximum", "masked", "idle share"),
]
Value = Callable[[RoundDone], float | None]


def staleness_section(
    config: SwarmConfig, logs: Mapping[str, Sequence[RoundDone]], names: Mapping[str, str]
) -> Iterator[str]:
    """Yield the section, as HTML; nothing without ``rounds.ahead``.

    :param names: peer id → name
    """
    if not config.rounds.ahead:
        return
    curves: dict[str, Value] = {
        "effective sample size": lambda done: done.stats.get("ess"),
        "ratio, 99th percentile": lambda done: done.stats.get("ratio_p99"),
        "masked share": masked_share,
    }
    rows = [_staleness_row(name, log, names) for name, log in logs.items()]
    yield page.section(
        "Staleness",
        f"Completions of each round were drawn with weights at most rounds.ahead = {config.rounds.ahead} rounds old; "
        "older ones were dropped. The ratio is π_θ/π_gen of a token, the effective sample size (ESS) that of these "
        "ratios as a share of tokens. Masked: tokens that the loss masks, clips or caps. Idle: share of a round in "
        "which the peer waits for its completions or for others.",
        page.table("staleness", STALENESS, rows, numbers_from=1),
        *(
            page.chart(curves_figure(280, y, _staleness_curves(logs, value), shares=False), f"staleness {n}")
            for n, (y, value) in enumerate(curves.items())
        ),
    )


def masked_share(done: RoundDone) -> float | None:
    """Return the share of tokens without their full weight, or None if nothing was learned."""
    parts = [done.stats[key] for key in ("clipped", "capped") if key in done.stats]
    return sum(parts) if parts else None


def idle_share(log: Sequence[RoundDone]) -> float:
    """Return the share of all rounds' time in which a peer obtains completions, its own (write) or others' (wait)."""
    idle = sum(done.seconds.get(phase, 0.0) for done in log for phase in ("write", "wait"))
    return idle / (sum(sum(done.seconds.values()) for done in log) or 1.0)


def _staleness_row(name: str, log: Sequence[RoundDone], names: Mapping[str, str]) -> list[str]:
    ages, dropped = Counter[int](), Counter[str]()
    for done in log:
        ages.update(done.staleness)
        dropped.update(done.stale)
    ess, p99 = ([d.stats[key] for d in log if key in d.stats] for key in ("ess", "ratio_p99"))
    shares = [share for done in log if (share := masked_share(done)) is not None]
    return [
        name,
        ", ".join(f"{age}: {count:,}" for age, count in sorted(ages.items())) or "–",
        ", ".join(f"{names.get(peer, peer[:8])}: {count:,}" for peer, count in sorted(dropped.items())) or "0",
        f"{min(ess):.3f}" if ess else "–",
        f"{max(p99):.2f}" if p99 else "–",
        f"{statistics.fmean(shares):.1%}" if shares else "–",
        f"{idle_share(log):.1%}",
    ]


def _staleness_curves(logs: Mapping[str, Sequence[RoundDone]], value: Value) -> Iterator[Curve]:
    for index, (name, log) in enumerate(logs.items()):
        points = {done.round: found for done in log if (found := value(done)) is not None}
        yield name, list(points), list(points.values()), stroke(index, len(logs))
