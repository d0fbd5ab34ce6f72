"""Drawing of spreads over seeds: a band around a line, or whiskers at a mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from planaria.lab.trials.spread import Spread
from planaria.report.theme import label


def add_band(
    fig: go.Figure,
    name: str,
    style: Mapping[str, Any],
    x: Sequence[float],
    spreads: Sequence[Spread],
    mode: str = "lines",
) -> None:
    """Draw a line through the means and a band from minimum to maximum, with one legend entry.

    ``style``: the line, and the marker if the ``mode`` has any. Spreads of zero width get no band.
    """
    colour = style["line"]["color"]
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    if any(found.least < found.most for found in spreads):
        fig.add_scatter(
            x=[*x, *reversed(x)],
            y=[found.most for found in spreads] + [found.least for found in reversed(spreads)],
            fill="toself",
            fillcolor=f"rgba({red},{green},{blue},0.13)",
            mode="lines",
            line={"width": 0},
            legendgroup=name,
            showlegend=False,
            hoverinfo="skip",
        )
    fig.add_scatter(
        x=list(x),
        y=[found.mean for found in spreads],
        name=label(name),
        legendgroup=name,
        mode=mode,
        **style,
        customdata=[[found.least, found.most] for found in spreads],
        hovertemplate="%{y:.3f} [%{customdata[0]:.3f} … %{customdata[1]:.3f}]",
    )


def whiskers(spreads: Sequence[Spread], **style: Any) -> dict[str, Any]:
    """Return Plotly's error bars from minimum to maximum."""
    above = [found.most - found.mean for found in spreads]
    below = [found.mean - found.least for found in spreads]
    return {"type": "data", "array": above, "arrayminus": below, "thickness": 1.5, **style}
