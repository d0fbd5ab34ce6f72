"""A benchmark's figure as an SVG that needs nothing: lines over doubling counts, legible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 800, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 566, 48, 340
INK, RULE = "#7d8896", "#8b95a1"


@dataclass(frozen=True)
class Line:
    """One line: a value for each count, and what stands beside its end."""

    name: str
    values: Sequence[float]
    colour: str
    dashes: str = ""
    """as SVG's ``stroke-dasharray``"""


def svg(title: str, what: str, x: str, y: str, counts: Sequence[int], lines: Sequence[Line]) -> str:
    """The figure; ``what`` tells those who cannot see it what it shows. Counts are spaced by their logarithm."""
    top = 5.0 * math.ceil(max(value for line in lines for value in line.values) / 5.0)
    low, high = math.log(counts[0]), math.log(counts[-1])

    def across(count: int) -> float:
        return LEFT + (RIGHT - LEFT) * (math.log(count) - low) / (high - low)

    def up(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="title what" font-family="system-ui, -apple-system, \'Segoe UI\', Roboto, sans-serif" '
        f'font-size="14" fill="{INK}">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="what">{escape(what)}</desc>',
        _text(LEFT, 26, title, "start", ' font-size="16"'),
        _text((LEFT + RIGHT) / 2, HEIGHT - 12, x),
        f'<text transform="translate(18 {(TOP + BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y)}</text>',
    ]
    for value in range(0, int(top) + 1, 5):
        parts.append(f'<path d="M{LEFT},{up(value):.1f} H{RIGHT}" stroke="{RULE}" stroke-opacity="0.3"/>')
        parts.append(_text(LEFT - 8, up(value) + 5, str(value), "end"))
    parts += [_text(across(count), BOTTOM + 22, f"{count:,}") for count in counts]
    ends = _apart([up(line.values[-1]) for line in lines])
    for line, end in zip(lines, ends, strict=True):
        points = [(across(count), up(value)) for count, value in zip(counts, line.values, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dashes}/>')
        parts.append(_text(RIGHT + 10, end + 5, line.name, "start", f' fill="{line.colour}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _apart(heights: Sequence[float], gap: float = 17.0) -> list[float]:
    """Heights for labels, in the same order: as near to these as can be reached by pushing upwards, and legible."""
    placed: dict[int, float] = {}
    above = math.inf
    for index in sorted(range(len(heights)), key=lambda i: -heights[i]):
        above = placed[index] = min(heights[index], above - gap)
    return [placed[index] for index in range(len(heights))]
