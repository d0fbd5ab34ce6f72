"""What a swarm came to: did collaborating help each peer, and what was refused of whom; a table and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go

from planaria.observe import page
from planaria.observe.tables import Table, show
from planaria.observe.theme import SERIES, figure, label
from planaria.swarm.config import SwarmConfig
from planaria.swarm.records.kept import rounds_kept
from planaria.swarm.records.lines import LOG, PEERS, RoundDone, read_log
from planaria.swarm.records.measure import Tally
from planaria.swarm.records.outcome import Outcome, PeerOutcome

LAST = 4
"""evaluations at the end whose mean counts: single ones drift"""
HEAD = ["peer", "model", "start", "now", "alone", "collaborating brought"]


def show_outcome(outcome: Outcome, config: SwarmConfig) -> None:
    """Print whether collaborating helped, peer by peer."""
    rows = [_row(peer) for peer in _examined(outcome)]
    show([Table(f"{config.name}: did collaborating help?", HEAD, rows, numbers_from=2)])


def write_swarm_report(folder: Path, config: SwarmConfig, outcome: Outcome, to: Path | None = None) -> Path:
    """Write the report of the run in ``folder``, there unless ``to`` says where; its path.

    :raises UserError: when that is impossible.
    """
    return page.write(
        to or folder / "report.html", page.document(f"{config.name} · planaria", _body(folder, config, outcome))
    )


def _examined(outcome: Outcome) -> list[PeerOutcome]:
    """The peers that came as far as their first evaluation."""
    return [peer for peer in outcome.peers if peer.points]


def _row(peer: PeerOutcome) -> list[str]:
    start, now = peer.points[0].accuracy, peer.last(LAST)
    gain = "–"
    if now.alone is not None and now.alone.rate is not None and now.accuracy.rate is not None:
        gain = f"{now.accuracy.rate - now.alone.rate:+.3f}"
    name = peer.name if peer.honest else f"{peer.name} (attacks: {peer.attack})"
    return [name, peer.model, _rate(start), str(now.accuracy), "–" if now.alone is None else str(now.alone), gain]


def _body(folder: Path, config: SwarmConfig, outcome: Outcome) -> Iterator[str]:
    done = all(peer.finished for peer in outcome.peers)
    gains = [
        (p.last(LAST).accuracy.rate or 0.0) - (p.points[0].accuracy.rate or 0.0) for p in outcome.honest if p.points
    ]
    summary = (
        f"{len(outcome.peers)} peers, {outcome.rounds} rounds of {config.rounds.prompts} problems with "
        f"{config.rounds.group} completions each ({config.rounds.mode}), in {outcome.seconds:.0f} s."
    )
    yield page.heading(config.name, "finished" if done else "not all peers finished", done, summary)
    yield page.cards(
        [
            (
                "accuracy gained",
                f"{min(gains):+.2f} … {max(gains):+.2f}" if gains else "–",
                "honest peers, since the start",
            ),
            ("accuracy", f"{outcome.accuracy(LAST):.2f}", f"honest peers' mean, last {LAST} evaluations"),
            ("rounds", str(outcome.rounds), config.rounds.mode),
            ("loss", config.loss.kind, "what completions of others count as"),
        ]
    )
    yield page.section(
        "Did collaborating help me?",
        f"Held-out problems solved, one draw each, the last {LAST} evaluations together with Wilson's 95 % interval. "
        "Alone: a copy that started from the same weights and learned from as many completions of its own, and from "
        "nobody else's. It is trained beside the peer if the recipe says `shadow = true`.",
        page.table(HEAD, [_row(peer) for peer in _examined(outcome)], numbers_from=2),
    )
    yield page.section(
        "Accuracy over rounds",
        "Solid: in the swarm. Dotted: the same peer, had it stayed alone.",
        page.chart(accuracy_figure(outcome), "accuracy"),
    )
    yield from _refusals(folder, outcome)
    yield page.section(
        "Taking a model out",
        f"planaria export {folder} --peer NAME --to FOLDER writes what a peer learned as a Hugging Face folder: after "
        "the newest round kept, or the one that --round says. The settings rounds.keep and rounds.kept choose which "
        "are kept.",
        page.table(["peer", "kept after rounds"], _kept(folder, outcome), numbers_from=1),
    )
    groups = [
        (name, [(key, str(value), False) for key, value in section.items()])
        for name, section in config.model_dump(mode="json").items()
        if isinstance(section, dict) and section and name != "peers"
    ]
    yield page.section("Settings", "All of the recipe.", page.settings(groups))
    yield page.footer(f"Written by planaria swarm; planaria swarm explain {folder} tells of every completion.")


def _kept(folder: Path, outcome: Outcome) -> list[list[str]]:
    places = {peer.name: folder / PEERS / peer.name for peer in outcome.peers}
    return [[name, ", ".join(map(str, rounds_kept(place))) or "–"] for name, place in places.items()]


def _refusals(folder: Path, outcome: Outcome) -> Iterator[str]:
    names = {peer.id: peer.name for peer in outcome.peers}
    logs = {
        peer.name: [r for r in read_log(folder / PEERS / peer.name / LOG) if isinstance(r, RoundDone)]
        for peer in outcome.honest
    }
    yield page.section(
        "Refused, and by whom",
        "Completions that honest peers refused, by layer and by who sent them, over rounds. Layers that were off count "
        "for nothing.",
        page.chart(refusals_figure(logs, names), "refused"),
    )
    yield page.section(
        "Influence",
        "Each peer's part of the sum of all |advantages| that honest peers learned from: the most that it could turn "
        "their updates by.",
        page.chart(influence_figure(logs, names), "influence"),
    )
    rows = [
        [layer, share(found.stopped), share(found.misjudged), "; ".join(f"{n} × {why}" for why, n in found.off.items())]
        for layer, found in outcome.layers.items()
    ]
    yield page.section(
        "What each layer did",
        "Of other peers' completions that reached it. Poison is known only in drills.",
        page.table(["layer", "poison stopped", "honest refused", "switched off, in rounds"], rows, numbers_from=1),
    )


def _rate(found: Tally) -> str:
    return "–" if found.rate is None else f"{found.rate:.2f}"


def share(found: Tally) -> str:
    """A rate, and of how many; a dash where there is none."""
    return f"{found.rate:.1%} of {found.eligible}" if found.rate is not None else "–"


def accuracy_figure(outcome: Outcome) -> go.Figure:
    """Held-out accuracy of every peer over rounds, and of its copy that learns alone."""
    fig = figure(380, x="round", y="accuracy", hovermode="x unified")
    for place, peer in enumerate(outcome.peers):
        colour = SERIES[place % len(SERIES)]
        for name, dash, values in (
            (peer.name, "solid", [p.accuracy.rate for p in peer.points]),
            (f"{peer.name} alone", "dot", [p.alone.rate if p.alone else None for p in peer.points]),
        ):
            if any(value is not None for value in values):
                fig.add_scatter(
                    x=[p.round for p in peer.points],
                    y=values,
                    name=label(name),
                    mode="lines+markers",
                    line={"color": colour, "width": 2, "dash": dash},
                    marker={"size": 5},
                    hovertemplate="%{y:.3f}",
                )
    return fig


def refusals_figure(logs: Mapping[str, Sequence[RoundDone]], names: Mapping[str, str]) -> go.Figure:
    """Refused completions by layer and sender, all honest peers' refusals together, stacked over rounds."""
    counts: dict[tuple[str, str], Counter[int]] = {}
    for log in logs.values():
        for record in log:
            for layer, peers in record.layers.items():
                for peer, found in peers.items():
                    if layer not in record.off and found.refused:
                        key = (layer, names.get(peer, peer[:8]))
                        counts.setdefault(key, Counter())[record.round] += found.refused
    rounds = sorted({record.round for log in logs.values() for record in log})
    fig = figure(340, x="round", y="completions refused", barmode="stack", bargap=0)
    for place, ((layer, peer), by_round) in enumerate(sorted(counts.items())):
        fig.add_bar(
            x=rounds,
            y=[by_round[number] for number in rounds],
            name=label(f"{layer}: {peer}"),
            marker={"color": SERIES[place % len(SERIES)], "line": {"width": 0}},
        )
    return fig


def influence_figure(logs: Mapping[str, Sequence[RoundDone]], names: Mapping[str, str]) -> go.Figure:
    """Each peer's part of Σ|Â| over rounds, the mean over the honest peers that learned."""
    fig = figure(320, x="round", y="share of the update", hovermode="x unified")
    rounds = sorted({record.round for log in logs.values() for record in log})
    by_round = {number: [r for log in logs.values() for r in log if r.round == number] for number in rounds}
    for place, (peer, name) in enumerate(sorted(names.items(), key=lambda item: item[1])):
        shares = [sum(r.influence.get(peer, 0.0) for r in by_round[n]) / len(by_round[n]) for n in rounds]
        fig.add_scatter(
            x=rounds,
            y=shares,
            name=label(name),
            mode="lines",
            line={"color": SERIES[place % len(SERIES)], "width": 2},
            hovertemplate="%{y:.3f}",
        )
    return fig
