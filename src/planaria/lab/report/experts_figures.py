"""The pictures of an experts run's report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import plotly.graph_objects as go

from planaria.lab.experts.budget import SYNCHRONISED
from planaria.lab.experts.experts_results import Results
from planaria.lab.report.spread_figures import whiskers
from planaria.lab.trials.spread import Spread
from planaria.report.theme import CARRIED, MUTED, PAPER, SERIES, figure, label, stroke, whole


def blend(weights: Sequence[float]) -> str:
    """The colours of the experts on white, each as strong as its weight; a CSS colour."""
    mixed = [255.0] * 3
    for colour, weight in zip(cycle(SERIES), weights, strict=False):
        channels = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        mixed = [have - 0.6 * weight * (255 - channel) for have, channel in zip(mixed, channels, strict=True)]
    return f"rgb({', '.join(str(max(0, round(channel))) for channel in mixed)})"


def perplexity_figure(found: Results) -> go.Figure:
    """Each other arm's perplexity over the even arm's, by domain; whiskers from the least seed to the most."""
    fig, least, most = figure(380, x="domain", y=f"perplexity over {SYNCHRONISED}'s"), 1.0, 1.0
    uneven = [arm for arm in found.arms if arm != SYNCHRONISED]
    for place, arm in enumerate(uneven):
        ratios = [found.ratios(arm, domain) for domain in found.domains]
        least, most = min(least, *map(min, ratios)), max(most, *map(max, ratios))
        spreads = [Spread.of(values) for values in ratios]
        fig.add_scatter(
            x=[label(domain) for domain in found.domains],
            y=[one.mean for one in spreads],
            mode="markers",
            name=label(arm),
            marker=stroke(place)["marker"] | {"size": 10},
            error_y=whiskers(spreads),
        )
    fig.add_hline(y=1, line={"width": 1, "color": MUTED})
    fig.update_layout(scattermode="group")  # arms beside one another, not on top; it would begin the axis at 0
    return fig.update_yaxes(range=[least - 0.02, most + 0.02])


def probe_figure(found: Results) -> go.Figure:
    """Held-out loss of the first seed's probes over their steps, one line a domain."""
    fig = figure(320, x="steps of the probe", y="held-out loss, nats per token")
    curves = found.runs[0].curves
    for place, (name, curve) in enumerate(curves.items()):
        steps, losses = zip(*curve, strict=True)
        fig.add_scatter(x=steps, y=losses, mode="lines+markers", name=label(name), **stroke(place, len(curves)))
    return whole(fig, [step for curve in curves.values() for step, _ in curve])


def speaking_figure(found: Results) -> go.Figure:
    """Mean weight of each expert (columns) on each domain's test text (rows)."""
    arm = found.runs[0].arms[SYNCHRONISED]
    fig = figure(90 + 30 * len(found.domains), x="expert of", y="text of")
    fig.add_heatmap(
        x=[label(job.domain) for job in arm.experts],
        y=[label(domain) for domain in found.domains],
        z=[arm.scores[domain].speaking for domain in found.domains],
        zmin=0,
        zmax=1,
        colorscale=[[0, PAPER], [1, CARRIED]],
        colorbar={"title": "weight", "thickness": 12, "outlinewidth": 0},
        xgap=1,
        ygap=1,
        texttemplate="%{z:.2f}",
    )
    fig.update_yaxes(autorange="reversed")
    return fig
