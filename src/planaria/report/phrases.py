"""Counts, amounts and lists in English."""

from __future__ import annotations


def counted(count: int, noun: str, several: str = "") -> str:
    """Return ``1 seed``, ``3 seeds``, ``1,200 steps``; ``several`` is an irregular plural."""
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"


def amount(number: float) -> str:
    """Return a number with at least three significant digits: ``0.0837``, ``8.00``, ``1,234.5``."""
    if 0 < abs(number) < 1:
        return f"{number:.3g}"
    return f"{number:.2f}" if abs(number) < 100 else f"{number:,.1f}"


def listed(names: list[str], most: int = 4) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``; beyond ``most`` names, the number of further ones."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
