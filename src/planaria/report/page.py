"""HTML reports as single files that work offline. All text is escaped here.

A page contains its figures, their numbers and plotly.js, all compressed, in less than 1.5 MB; browsers since 2023
decompress them. plotly.js is the cartesian build (0.5 MB compressed); the full build would add 2.0 MB to a page.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.report.sheets import Cell, as_csv, rows_of
from planaria.report.theme import BLUE, DARK, FONT, GREEN, INK, MAX_POINTS, MUTED, PAPER, RED, RULE, points_to_draw
from planaria.report.verdict import SIGNS, Verdict

MAX_ROWS = 400
"""maximum rows of a table or log that a page shows"""
ASSETS = Path(__file__).with_name("assets")
PLOTLY = ASSETS / "plotly-cartesian.min.js.gz"
"""npm's plotly.js-cartesian-dist-min 4.1.1, the version in plotly 7.1; MIT licence"""
DIGITS = 7
"""significant digits of numbers in a page; ``planaria report --csv`` writes all"""
MIN_POINTS = 200
"""minimum points per curve, however many curves a figure has"""
GROUND = {"--ground": "#f5f7f9", "--green-wash": "#e2f3eb", "--red-wash": "#fbe6e0"}
DARK_GROUND = {"--ground": "#10161b", "--green-wash": "#153a2d", "--red-wash": "#472116"}


@dataclass
class PageContents:
    """Figures and tables of a page, by name."""

    figures: dict[str, go.Figure] = field(default_factory=dict)
    tables: dict[str, list[Sequence[Cell]]] = field(default_factory=dict)
    """all rows, header first"""


_page_contents: ContextVar[PageContents | None] = ContextVar("page_contents", default=None)
"""contents of the page being built, or None outside of one"""


def build_parts(body: Iterable[str]) -> tuple[list[str], PageContents]:
    """Build a page's parts; also return the figures and tables they contain."""
    contents = PageContents()
    before = _page_contents.set(contents)
    try:
        return list(body), contents
    finally:
        _page_contents.reset(before)


def figures(body: Iterable[str]) -> dict[str, go.Figure]:
    return build_parts(body)[1].figures


def sheets(body: Iterable[str]) -> dict[str, str]:
    """Return the numbers of a page's figures and tables as CSV, by name, with every point and row."""
    contents = build_parts(body)[1]
    rows = {name: rows_of(fig) for name, fig in contents.figures.items()} | contents.tables
    return {name: as_csv(cells) for name, cells in rows.items()}


def document(title: str, body: Iterable[str]) -> str:
    """Return the complete page around ``body``, with figures, CSV and, if needed, plotly.js."""
    parts, contents = build_parts(body)
    shown = {name: as_csv(rows[: MAX_ROWS + 1]) for name, rows in contents.tables.items()}
    loads = {"figures": _payload(slug(title), contents.figures, shown)}
    loads |= {"plotly": b64encode(PLOTLY.read_bytes()).decode()} if contents.figures else {}
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_style()}</style><script>{(ASSETS / 'page.js').read_text()}</script></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n<noscript><p>The figures are drawn by the page's script, which does not run here.</p></noscript></main>\n"
        + "".join(f'<script type="text/plain" id="packed-{name}">{text}</script>\n' for name, text in loads.items())
        + "</body></html>\n"
    )


def slug(text: str) -> str:
    """Convert text to a file name."""
    return re.sub(r"[^\w.]+", "-", text.removesuffix("planaria")).strip("-") or "page"


def write(file: Path, text: str) -> Path:
    """Write a page atomically and return its path.

    :raises UserError: if it cannot be written.
    """
    try:
        atomic.write_text(file, text)
    except OSError as error:
        raise UserError(f"the report {file} cannot be written ({error.strerror}); choose another path") from error
    return file


def write_sheets(folder: Path, body: Iterable[str]) -> list[Path]:
    """Write a page's :func:`sheets` into ``folder``, one file each, and return their paths.

    :raises UserError: if a file cannot be written.
    """
    written = []
    for name, text in sheets(body).items():
        file = folder / f"{name}.csv"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_text(file, text)
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}); choose another folder") from error
        written.append(file)
    return written


def heading(name: str, verdict: Verdict, summary: str) -> str:
    """Return the header of a page: name, verdict and summary."""
    kind = SIGNS[verdict.good][0]
    return (
        f'<header><button id="theme" type="button" title="light or dark" aria-label="light or dark">◐</button>'
        f'<h1>{escape(name)} <span class="badge {kind}">{escape(verdict.badge)}</span></h1>'
        f"{verdict.html()}<p>{escape(summary)}</p></header>"
    )


def cards(facts: Iterable[tuple[str, str, str]]) -> str:
    """Return cards of (label, value, small print)."""
    boxes = (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><i>{escape(small)}</i></div>'
        for name, value, small in facts
    )
    return f'<div class="cards">{"".join(boxes)}</div>'


def section(title: str, explanation: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(explanation)}</p>{''.join(parts)}</section>"


def subheading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def chart(fig: go.Figure, name: str) -> str:
    """Return the element in which the page's script draws a figure."""
    _register(name, figure=fig)
    return f'<div class="figure" id="{escape(name)}" style="min-height:{fig.layout.height}px"></div>'


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int) -> str:
    """Return a table of the first :data:`MAX_ROWS` rows; columns from ``numbers_from`` on are right-aligned numbers."""
    every = [list(row) for row in rows]
    _register(name, rows=[head, *every])
    kinds = ["" if index < numbers_from else ' class="number"' for index in range(len(head))]
    top = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{escape(cell)}</td>" for k, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in every[:MAX_ROWS]
    )
    more = (
        paragraph(f"The first {MAX_ROWS:,} of {len(every):,} rows; planaria report --csv has all.")
        if every[MAX_ROWS:]
        else ""
    )
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>{more}'
        f'<button type="button" data-sheet="{escape(name)}" title="Save this table as CSV">CSV</button>'
    )


def _register(name: str, figure: go.Figure | None = None, rows: list[Sequence[Cell]] | None = None) -> None:
    """Store a figure or table of the page; both share one namespace, since names become file names."""
    contents = _page_contents.get()
    if contents is None:
        return
    if name in contents.figures or name in contents.tables:
        raise ValueError(f"two parts of a page have the name {name}")
    if figure is not None:
        contents.figures[name] = figure
    if rows is not None:
        contents.tables[name] = rows


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend: names and their colours."""
    return "<p>" + " ".join(f'<b style="color:{colour}">■</b> {escape(name)}' for name, colour in entries) + "</p>"


def tinted_text(pieces: Iterable[tuple[str, str]]) -> str:
    """Return text whose pieces have separate background colours."""
    spans = "".join(f'<span style="background:{colour}">{escape(text)}</span>' for text, colour in pieces)
    return f'<pre class="tinted">{spans}</pre>'


def settings(groups: Iterable[tuple[str, Iterable[tuple[str, str, bool]]]]) -> str:
    """Return small tables side by side: title, then (key, value, differs from the default)."""
    blocks, mark = [], ' class="given"'
    for title, entries in groups:
        rows = "".join(
            f"<tr{mark if changed else ''}><td>{escape(key)}</td><td>{escape(value)}</td></tr>"
            for key, value, changed in entries
        )
        blocks.append(f"<div><h3>{escape(title)}</h3><table>{rows}</table></div>")
    return f'<div class="columns">{"".join(blocks)}</div>'


def footer(text: str) -> str:
    return f"<footer>{escape(text)}</footer>"


def log(name: str, lines: Iterable[tuple[str, str]]) -> str:
    """Return a list of (time, text) lines; of a long log, only both ends."""
    every = list(lines)
    _register(name, rows=[("time", "what"), *every])
    hidden = len(every) - MAX_ROWS
    if hidden > 0:
        gap = ("…", f"{hidden:,} more; planaria report --csv has all")
        every = [*every[: MAX_ROWS // 2], gap, *every[-(MAX_ROWS // 2) :]]
    entries = "".join(f"<li><time>{escape(t)}</time><span>{escape(text)}</span></li>" for t, text in every)
    return f'<ul class="log">{entries}</ul>'


def _style() -> str:
    """Return the page's CSS for light and dark mode."""
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


def _payload(page: str, contents: Mapping[str, go.Figure], tables: Mapping[str, str]) -> str:
    """Return figures, and the CSV of figures and tables, as gzip in base64; ``page`` prefixes saved files' names."""
    slim = {name: thin_curves(fig) for name, fig in contents.items()}
    numbers = {name: as_csv(rows_of(fig)) for name, fig in slim.items()} | dict(tables)
    curves = {name: _round_floats(json.loads(fig.to_json())) for name, fig in slim.items()}
    bars = [
        {"bgcolor": "rgba(0,0,0,0)", "color": c, "activecolor": a} for c, a in ((MUTED, INK), (DARK[MUTED], DARK[INK]))
    ]
    payload = {"page": page, "dark": DARK, "bar": bars, "drawn": curves, "sheets": numbers}
    text = json.dumps(payload, separators=(",", ":"))
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def thin_curves(fig: go.Figure) -> go.Figure:
    """Return a figure with no more points per curve than a screen can show; ``fig`` itself if it has no more."""
    curves = sum(trace.type == "scatter" for trace in fig.data)
    max_points = max(MIN_POINTS, 4 * MAX_POINTS // max(4, curves))
    if all(trace.type != "scatter" or len(trace.y or ()) <= max_points for trace in fig.data):
        return fig
    thinned = go.Figure(fig)
    for trace in thinned.data:
        if trace.type == "scatter" and len(trace.y or ()) > max_points and trace.fill is None:
            indices = points_to_draw([y if isinstance(y, int | float) else None for y in trace.y], max_points)
            for key in ("x", "y", "text", "customdata"):
                column = trace[key]
                if column is not None and not isinstance(column, str):
                    trace[key] = [column[index] for index in indices]
    return thinned


def _round_floats(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_round_floats(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _round_floats(entry) for key, entry in value.items()}
    return value
