"""Durations: parse what users write (``90``, ``1.5s``, ``5min``, ``2h``), and format durations for messages."""

from __future__ import annotations

import re

MAX_S = 1e9
"""longest duration, about thirty years"""
_TEXT = re.compile(r"(?P<number>\d+\.?\d*|\.\d+)\s*(?P<unit>s|m|min|h)?", re.ASCII)
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """Return a duration in seconds.

    :raises ValueError: if ``text`` is not a duration, or is longer than :data:`MAX_S`.
    """
    match = _TEXT.fullmatch(text.strip())
    duration = float(match["number"]) * _SECONDS[match["unit"]] if match else MAX_S + 1
    if duration > MAX_S:
        raise ValueError(
            f"{text}: not a duration; use seconds, or a time such as 60s, 5min or 2h (at most {MAX_S:g} s)"
        )
    return duration


def text(duration: float) -> str:
    """Return a duration in seconds with two significant digits and its unit: ``2.9 s``, ``12 min``, ``1.5 h``."""
    for unit, size in (("s", 1.0), ("min", 60.0)):
        if duration < 99.5 * size:
            return f"{_two_digits(duration / size)} {unit}"
    return f"{_two_digits(duration / 3600)} h"


def _two_digits(number: float) -> str:
    return f"{number:#.2g}".removesuffix(".") if number < 99.5 else f"{number:,.0f}"
