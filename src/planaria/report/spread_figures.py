"""Drawing of spreads over seeds: a band around a line, or whiskers at a mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from planaria.report.theme import escape_label
from planaria.trials.spread import Spread


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
    red, green, blue = hex_to_rgb(colour)
    if any(spread.least < spread.most for spread in spreads):
        fig.add_scatter(
            x=[*x, *reversed(x)],
            y=[spread.most for spread in spreads] + [spread.least for spread in reversed(spreads)],
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
        y=[spread.mean for spread in spreads],
        name=escape_label(name),
        legendgroup=name,
        mode=mode,
        **style,
        customdata=[[spread.least, spread.most] for spread in spreads],
        hovertemplate="%{y:.3f} [%{customdata[0]:.3f} … %{customdata[1]:.3f}]",
    )


def error_bars(spreads: Sequence[Spread], **style: Any) -> dict[str, Any]:
    """Return Plotly's error bars from minimum to maximum."""
    above = [spread.most - spread.mean for spread in spreads]
    below = [spread.mean - spread.least for spread in spreads]
    return {"type": "data", "array": above, "arrayminus": below, "thickness": 1.5, **style}
