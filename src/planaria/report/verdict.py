"""What the first screen of every page says: what happened, whether it worked, which numbers decide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SIGNS = {True: ("good", "✓"), False: ("bad", "✗"), None: ("plain", "?")}
"""told by a sign too: colours alone would not reach everybody"""


@dataclass(frozen=True)
class Verdict:
    """On one run, comparison, plan, swarm, drill or experts run."""

    good: bool | None
    """did it work? None where the numbers do not tell"""
    badge: str
    """the same in a few words"""
    said: str
    """what happened, in a sentence or two"""
    numbers: Sequence[tuple[str, str]]
    """one or two that decide: the number with its unit, and what it is"""
    lost: str
    """what it cost: a sentence, also where nothing was lost"""

    def html(self) -> str:
        """As a box below a page's name."""
        kind, sign = SIGNS[self.good]
        deciding = "".join(
            f"<div><b>{escape(number)}</b><span>{escape(what)}</span></div>" for number, what in self.numbers
        )
        return (
            f'<div id="verdict" class="verdict {kind}"><p class="said"><i aria-hidden="true">{sign}</i>'
            f'{_unbroken(self.said)}</p><div class="deciding">{deciding}</div>'
            f'<p class="lost">{_unbroken(self.lost)}</p></div>'
        )


def _unbroken(text: str) -> str:
    """No line ends between a × and its number."""
    return escape(text.replace("× ", "×\N{NO-BREAK SPACE}"))
