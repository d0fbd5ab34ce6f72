"""What a page carries beside its text: plotly.js, its figures and their numbers, compressed; and its colours.

A page is one file that works offline, also when it is moved or mailed, and smaller than 1.5 MB. So it has all of its
parts in it. plotly.js is its own build for plots with axes, which has every kind of figure that is drawn here: 1.5 MB
against 4.8 MB for all of plotly.js, and 0.5 MB compressed. All of it, compressed, would be 1.5 MB, which as text in a
page is 2.0 MB. Browsers since 2023 decompress by themselves.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from planaria.report.sheets import as_csv, rows_of
from planaria.report.theme import BLUE, DARK, FONT, GREEN, INK, MOST, MUTED, PAPER, RED, RULE, thinned

ASSETS = Path(__file__).with_name("assets")
PLOTLY = ASSETS / "plotly-cartesian.min.js.gz"
"""plotly.js-cartesian-dist-min 4.1.1 of npm, the version that plotly 7.1 has, under the MIT licence"""
DIGITS = 7
"""of numbers in a page; ``planaria report --csv`` writes all"""
LEAST = 200
"""points of a curve, of however many curves in one figure"""
GROUND = {"--ground": "#f5f7f9", "--green-wash": "#e2f3eb", "--red-wash": "#fbe6e0"}
DARK_GROUND = {"--ground": "#10161b", "--green-wash": "#153a2d", "--red-wash": "#472116"}


def script() -> str:
    """What draws a page, and saves from it."""
    return (ASSETS / "page.js").read_text()


def style() -> str:
    """The page's CSS, light and dark."""
    light = {"--ink": INK, "--muted": MUTED, "--rule": RULE, "--paper": PAPER, "--blue": BLUE, "--green": "#007a59",
             "--red": "#b83a14"}  # fmt: skip
    dark = {name: DARK.get(colour, colour) for name, colour in light.items()} | {"--green": GREEN, "--red": DARK[RED]}
    night = _variables(dark | DARK_GROUND)
    return (
        f":root {{ {_variables(light | GROUND)}; --font: {FONT} }}\n"
        f":root[data-theme=dark] {{ {night}; color-scheme: dark }}\n:root[data-theme=light] {{ color-scheme: light }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {night} }} }}\n"
        + (ASSETS / "page.css").read_text()
    )


def _variables(colours: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {colour}" for name, colour in colours.items())


def plotly() -> str:
    """plotly.js for a script element of type text/plain: gzip, base64."""
    return b64encode(PLOTLY.read_bytes()).decode()


def payload(page: str, figures: Mapping[str, go.Figure], tables: Mapping[str, str]) -> str:
    """A page's figures and the CSV of figures and tables, likewise; ``page`` is what saved files' names begin with."""
    slim = {name: thin(fig) for name, fig in figures.items()}
    sheets = {name: as_csv(rows_of(fig)) for name, fig in slim.items()} | dict(tables)
    drawn = {name: _rounded(json.loads(fig.to_json())) for name, fig in slim.items()}
    bars = [
        {"bgcolor": "rgba(0,0,0,0)", "color": c, "activecolor": a} for c, a in ((MUTED, INK), (DARK[MUTED], DARK[INK]))
    ]
    parts = {"page": page, "dark": DARK, "bar": bars, "drawn": drawn, "sheets": sheets}
    text = json.dumps(parts, separators=(",", ":"))
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def thin(fig: go.Figure) -> go.Figure:
    """The figure with no more points of a curve than a screen can show; the same one if it has no more."""
    curves = sum(trace.type == "scatter" for trace in fig.data)
    most = max(LEAST, 4 * MOST // max(4, curves))
    if all(trace.type != "scatter" or len(trace.y or ()) <= most for trace in fig.data):
        return fig
    few = go.Figure(fig)
    for trace in few.data:
        if trace.type == "scatter" and len(trace.y or ()) > most and trace.fill is None:
            places = thinned([y if isinstance(y, int | float) else None for y in trace.y], most)
            for key in ("x", "y", "text", "customdata"):
                values = trace[key]
                if values is not None and not isinstance(values, str):
                    trace[key] = [values[place] for place in places]
    return few


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return value
