"""The verdict at the top of every page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SIGNS = {True: ("good", "✓"), False: ("bad", "✗"), None: ("plain", "?")}
"""verdict → CSS class and sign, for readers who cannot tell the colours apart"""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a run, comparison, plan, swarm, drill or experts run."""

    good: bool | None
    """whether it succeeded, or None if unknown"""
    badge: str
    """the verdict in a few words"""
    summary: str
    """what happened, in one or two sentences"""
    numbers: Sequence[tuple[str, str]]
    """the one or two deciding numbers: value with unit, and its meaning"""
    cost: str
    """what it cost, in one sentence"""

    def html(self) -> str:
        """Return the verdict as a box below a page's name."""
        kind, sign = SIGNS[self.good]
        deciding = "".join(
            f"<div><b>{escape(number)}</b><span>{escape(label)}</span></div>" for number, label in self.numbers
        )
        return (
            f'<div id="verdict" class="verdict {kind}"><p class="summary"><i aria-hidden="true">{sign}</i>'
            f'{_escape(self.summary)}</p><div class="deciding">{deciding}</div>'
            f'<p class="cost">{_escape(self.cost)}</p></div>'
        )


def _escape(text: str) -> str:
    """Escape text; keep each × on the same line as its number."""
    return escape(text.replace("× ", "×\N{NO-BREAK SPACE}"))
