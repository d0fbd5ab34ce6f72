"""The report's section on votes: how many agreed on what was learned, and how often they were right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import plotly.graph_objects as go

from planaria.report import page
from planaria.report.theme import figure, label, stroke, whole
from planaria.report.theme import share as share_axis
from planaria.report.words import counted
from planaria.swarm.config import CONSENSUS, SwarmConfig
from planaria.swarm.records.lines import Agreed, RoundDone
from planaria.swarm.records.measure import Tally

HEAD = ["peer", "groups", "with a label", "votes behind it", "labels right"]


def section(config: SwarmConfig, logs: Mapping[str, Sequence[RoundDone]]) -> Iterator[str]:
    """The section, as HTML; nothing where nobody voted."""
    votes = {name: found for name, log in logs.items() if (found := [r for r in log if r.agreed is not None])}
    if not votes:
        return
    used = (
        "What most did was the reward; a group without a label taught nothing."
        if config.task.reward == CONSENSUS
        else "What passed its tests and did otherwise than most who passed was refused."
    )
    rows = [_row(name, [r.agreed for r in log if r.agreed is not None]) for name, log in votes.items()]
    yield page.section(
        "Agreement",
        f"{used} Every peer has one vote in a group, split evenly over what it sent. {break_point(config)} A label is "
        "held against the task's own score where it has one; nothing is learned from that. Agreement is no test of "
        "truth: it is what most of those who were asked do.",
        page.table("votes", HEAD, rows, numbers_from=1),
        page.chart(agreement_figure(votes), "agreement"),
    )


def break_point(config: SwarmConfig) -> str:
    """How many peers that agree on a lie decide, and how many need an honest mistake for that, in words."""
    size, share = config.size, config.task.agreement
    deciding = next((n for n in range(1, size + 1) if n / size > share), size)
    said = f"Of {counted(size, 'peer')}, {deciding} who agree on a lie decide"
    if deciding == 1:
        return f"{said}."
    return f"{said}; {deciding - 1} do wherever an honest mistake is the same as their lie."


def _row(name: str, votes: Sequence[Agreed]) -> list[str]:
    groups, labelled = sum(one.groups for one in votes), sum(one.labelled for one in votes)
    right = sum((one.right for one in votes), Tally())
    share = sum(one.share * one.labelled for one in votes) / max(1, labelled)
    shown = f"{right.rate:.1%} of {right.eligible}" if right.rate is not None else "not known"
    return [name, str(groups), f"{labelled / max(1, groups):.1%}", f"{share:.2f}" if labelled else "–", shown]


def agreement_figure(logs: Mapping[str, Sequence[RoundDone]]) -> go.Figure:
    """Over rounds: the share of groups with a label, dotted: of labels that are right."""
    fig = figure(340, x="round", y="share", hovermode="x unified", showlegend=True)
    every: list[float] = []
    for place, (name, log) in enumerate(logs.items()):
        rounds = [r.round for r in log if r.agreed is not None]
        votes = [r.agreed for r in log if r.agreed is not None]
        style = stroke(place, len(logs))
        of_groups = [one.labelled / max(1, one.groups) for one in votes]
        right = [one.right.rate for one in votes]
        hover = "%{y:.3f}"
        fig.add_scatter(
            x=rounds, y=of_groups, name=label(f"{name}: labelled"), mode="lines+markers", hovertemplate=hover, **style
        )
        every += of_groups
        if any(rate is not None for rate in right):
            dotted = style | {"line": style["line"] | {"dash": "dot", "width": 1.5}}
            fig.add_scatter(
                x=rounds, y=right, name=label(f"{name}: right"), mode="lines+markers", hovertemplate=hover, **dotted
            )
            every += [rate for rate in right if rate is not None]
    return whole(share_axis(fig, every), [r.round for log in logs.values() for r in log])
