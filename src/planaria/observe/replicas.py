"""The report on replicas: what each learned, how far apart they are, who met whom, and what that took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import plotly.graph_objects as go

from planaria.events import ReplicasEvaluated, RoundSettled
from planaria.observe import page
from planaria.observe.logs import RunRecord
from planaria.observe.theme import BLUE, GREEN, GREY, figure


def replica_section(record: RunRecord) -> Iterator[str]:
    """Nothing where a run had one replica."""
    looks = [fact for _, fact in record.history if isinstance(fact, ReplicasEvaluated)]
    rounds = [fact for _, fact in record.history if isinstance(fact, RoundSettled)]
    if not looks:
        return
    late, early = (sum(getattr(fact, part) for fact in rounds) / 1e6 for part in ("late_bytes", "early_bytes"))
    text = f"{len(looks[0].losses)} replicas. Validation loss of each, and of the mean of their weights: the one model."
    if rounds:
        text += (
            f" {len(rounds)} rounds of exchange; all together sent {late:.1f} MB that somebody waited for and "
            f"{early:.1f} MB ahead."
        )
    charts = [page.chart(losses_figure(looks), "replicas"), page.chart(spread_figure(looks, rounds), "spread")]
    if rounds:
        charts.append(page.chart(meetings_figure(rounds, len(looks[0].losses)), "meetings"))
    yield page.section("Replicas", text, *charts)


def losses_figure(looks: list[ReplicasEvaluated]) -> go.Figure:
    """Validation loss in nats over steps: a thin line for each replica, a thick one for the one model."""
    fig = figure(300, x="step", y="validation loss, nats per token")
    steps = [look.step for look in looks]
    for replica in range(max(len(look.losses) for look in looks)):
        fig.add_scatter(
            x=steps,
            y=[look.losses[replica] if replica < len(look.losses) else None for look in looks],
            name="replicas",
            showlegend=not replica,
            mode="lines",
            line={"color": GREY, "width": 1},
            hovertemplate=f"replica {replica}, step %{{x}}: %{{y:.4f}}<extra></extra>",
        )
    fig.add_scatter(
        x=steps,
        y=[look.consensus for look in looks],
        name="the one model",
        mode="lines+markers",
        line={"color": BLUE, "width": 2},
        hovertemplate="the one model, step %{x}: %{y:.4f}<extra></extra>",
    )
    fig.update_layout(showlegend=True)
    return fig


def spread_figure(looks: list[ReplicasEvaluated], rounds: list[RoundSettled]) -> go.Figure:
    """RMS distance of weights from their mean over steps; after each round, where there were any."""
    points = sorted((fact.step, fact.spread) for fact in (rounds or looks))
    fig = figure(260, x="step", y="spread between replicas")
    fig.add_scatter(
        x=[step for step, _ in points],
        y=[spread for _, spread in points],
        mode="lines+markers",
        line={"color": GREEN, "width": 2},
        hovertemplate="step %{x}: %{y:.3g}<extra></extra>",
    )
    return fig


def meetings_figure(rounds: list[RoundSettled], count: int) -> go.Figure:
    """How often each replica met each other."""
    met = Counter(pair for fact in rounds for group in fact.groups for pair in combinations(sorted(group), 2))
    table = [[met[min(a, b), max(a, b)] if a != b else None for b in range(count)] for a in range(count)]
    fig = figure(120 + 26 * count, x="replica", y="replica")
    fig.add_heatmap(
        z=table,
        colorscale=[[0, "#ffffff"], [1, BLUE]],
        zmin=0,
        hovertemplate="replicas %{x} and %{y} met %{z} times<extra></extra>",
        text=[["" if cell is None else str(cell) for cell in row] for row in table],
        texttemplate="%{text}",
        showscale=False,
    )
    fig.update_xaxes(dtick=1)
    fig.update_yaxes(dtick=1, autorange="reversed")
    return fig
