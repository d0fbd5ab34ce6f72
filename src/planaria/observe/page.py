"""The report's HTML: one page that needs nothing from the network. All text given to it is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from planaria import atomic
from planaria.errors import UserError
from planaria.observe.theme import BLUE, FONT, GREEN, INK, MUTED, PAPER, RED, RULE

STYLE = f"""
* {{ box-sizing: border-box }}
body {{ margin: 0; background: #f5f7f9; color: {INK}; font: 15px/1.55 {FONT} }}
main {{ max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px }}
header p {{ margin-top: 8px; max-width: 100ch }}
h1 {{ margin: 0; font-size: 30px; font-weight: 650; letter-spacing: -0.02em; overflow-wrap: anywhere }}
h2 {{ margin: 0 0 4px; font-size: 18px; font-weight: 620; letter-spacing: -0.01em }}
h3 {{ margin: 18px 0 0; font-size: 14px; font-weight: 600 }}
p {{ margin: 4px 0 8px; color: {MUTED}; max-width: 78ch }}
.badge {{ display: inline-block; padding: 2px 11px; border-radius: 999px; font-size: 13px; font-weight: 600;
  vertical-align: middle; margin-left: 10px; letter-spacing: 0 }}
.good {{ color: {GREEN}; background: #e2f3eb }} .bad {{ color: {RED}; background: #fbe6e9 }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(max(158px, 22%), 1fr)); gap: 12px;
  margin: 24px 0 }}
.card, section {{ background: {PAPER}; border: 1px solid {RULE}; border-radius: 10px }}
.card {{ padding: 14px 16px }}
.card b {{ display: block; font-size: 23px; font-weight: 620; line-height: 1.25; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums }}
.card span {{ color: {MUTED}; font-size: 13px }} .card i {{ display: block; color: {MUTED}; font-size: 12.5px;
  font-style: normal }}
section {{ padding: 22px 24px; margin: 16px 0 }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums }}
th {{ text-align: left; color: {MUTED}; font-weight: 550; white-space: nowrap }}
th, td {{ padding: 6px 14px 6px 0; border-bottom: 1px solid {RULE}; vertical-align: top }}
tr:last-child td {{ border-bottom: 0 }}
.number {{ text-align: right; white-space: nowrap }}
.columns {{ columns: 3 300px; column-gap: 36px }}
.columns > div {{ break-inside: avoid; margin-bottom: 18px }} .columns td:last-child {{ text-align: right;
  overflow-wrap: anywhere }} .columns h3 {{ margin: 0 0 4px }}
.given td {{ color: {BLUE}; font-weight: 600 }}
.log {{ margin: 8px 0 0; padding: 0; list-style: none; font-size: 13.5px; max-height: 420px; overflow-y: auto }}
.log li {{ padding: 3px 0; display: flex; gap: 14px }} .log time {{ color: {MUTED}; min-width: 74px; text-align: right;
  font-variant-numeric: tabular-nums }}
.tinted {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; line-height: 1.7 }}
footer {{ color: {MUTED}; font-size: 13px; margin-top: 24px }}
@media (max-width: 640px) {{ main {{ padding: 20px 10px }} section {{ padding: 16px 12px }} }}
"""


def document(title: str, body: Iterable[str]) -> str:
    """The whole page around ``body``, with plotly.js in it once."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def write(file: Path, text: str) -> Path:
    """Write a page, whole or not at all; its path.

    :raises UserError: when that is impossible.
    """
    try:
        atomic.write_text(file, text)
    except OSError as error:
        raise UserError(f"{file}: the report cannot be written ({error.strerror}); choose another place") from error
    return file


def heading(name: str, badge: str, good: bool, summary: str) -> str:
    kind = "good" if good else "bad"
    return (
        f'<header><h1>{escape(name)} <span class="badge {kind}">{escape(badge)}</span></h1>'
        f"<p>{escape(summary)}</p></header>"
    )


def cards(facts: Iterable[tuple[str, str, str]]) -> str:
    """(label, value, small print) of each card."""
    boxes = (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><i>{escape(small)}</i></div>'
        for name, value, small in facts
    )
    return f'<div class="cards">{"".join(boxes)}</div>'


def section(title: str, explanation: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(explanation)}</p>{''.join(parts)}</section>"


def subheading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def note(text: str) -> str:
    return f"<p>{escape(text)}</p>"


_taken: ContextVar[dict[str, go.Figure] | None] = ContextVar("_taken", default=None)


def figures(body: Iterable[str]) -> dict[str, go.Figure]:
    """All figures of a page by their names, instead of the page: whatever is drawn there can be had here."""
    found: dict[str, go.Figure] = {}
    before = _taken.set(found)
    try:
        for _ in body:
            pass
    finally:
        _taken.reset(before)
    return found


def chart(fig: go.Figure, name: str) -> str:
    """The figure in a ``<div id=name>``; plotly.js must be in the page already."""
    if (taken := _taken.get()) is not None:
        taken[name] = fig
        return ""
    html: str = fig.to_html(
        full_html=False, include_plotlyjs=False, div_id=name, config={"displayModeBar": False, "responsive": True}
    )
    return html


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int) -> str:
    """A table whose columns from ``numbers_from`` on are right-aligned numbers."""
    kinds = ["" if place < numbers_from else ' class="number"' for place in range(len(head))]
    top = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{escape(cell)}</td>" for k, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names and their colours."""
    return "<p>" + " ".join(f'<b style="color:{colour}">■</b> {escape(name)}' for name, colour in entries) + "</p>"


def tinted(pieces: Iterable[tuple[str, str]]) -> str:
    """A text, each piece on a background of its own."""
    spans = "".join(f'<span style="background:{colour}">{escape(text)}</span>' for text, colour in pieces)
    return f'<pre class="tinted">{spans}</pre>'


def settings(groups: Iterable[tuple[str, Iterable[tuple[str, str, bool]]]]) -> str:
    """Small tables side by side: title, then (key, value, differs from the default)."""
    blocks, mark = [], ' class="given"'
    for title, entries in groups:
        rows = "".join(
            f"<tr{mark if given else ''}><td>{escape(key)}</td><td>{escape(value)}</td></tr>"
            for key, value, given in entries
        )
        blocks.append(f"<div><h3>{escape(title)}</h3><table>{rows}</table></div>")
    return f'<div class="columns">{"".join(blocks)}</div>'


def footer(text: str) -> str:
    return f"<footer>{escape(text)}</footer>"


def log(lines: Iterable[tuple[str, str]]) -> str:
    """(time, text) of each line."""
    items = "".join(f"<li><time>{escape(t)}</time><span>{escape(text)}</span></li>" for t, text in lines)
    return f'<ul class="log">{items}</ul>'
