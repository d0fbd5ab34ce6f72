"""The pictures of a swarm: accuracy with the others and alone, what was refused of whom, and who turned the updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from planaria.observe.theme import SERIES, figure, label
from planaria.swarm.records.lines import RoundDone
from planaria.swarm.records.outcome import Outcome


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
