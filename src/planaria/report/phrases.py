"""Counts, numbers, durations and lists in English."""

from __future__ import annotations


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return ``1 seed``, ``3 seeds``, ``1,200 steps``; ``plural`` is an irregular plural."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def format_number(number: float) -> str:
    """Return a number with at least three significant digits: ``0.0837``, ``8.00``, ``1,234.5``."""
    if 0 < abs(number) < 1:
        return f"{number:.3g}"
    return f"{number:.2f}" if abs(number) < 100 else f"{number:,.1f}"


def join_names(names: list[str], limit: int = 4) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``; beyond ``limit`` names, the number of further ones."""
    if len(names) > limit:
        return f"{', '.join(names[: limit - 1])} and {len(names) - limit + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def format_value(value: object) -> str:
    """Return a setting's value; a dash if it is None or empty."""
    return "–" if value is None or value == "" or value == [] else str(value)


def format_wall_time(seconds: float) -> str:
    """Return a long duration: ``8.3 s``, ``5 min 2 s``, ``3 h 20 min``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{seconds:.1f} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_seconds(seconds: float) -> str:
    """Return a duration in ms, or in s from 1 s on: ``8.3 ms``, ``1.20 s``."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
