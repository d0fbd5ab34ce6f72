"""Canonical texts and digests of plain values. Part of ``process.py``; imports nothing of planaria.

Values are equal as in Python: 1, 1.0 and True are one value, a list and a tuple are two. Floats are rounded to nine
digits, because correct programs may add in different orders.
"""

from __future__ import annotations

import hashlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DIGEST = 12
"""bytes of a value's digest, for collision resistance"""


def digest(value: Any) -> str:
    """Return 24 hex digits that identify a value. TypeError if it is not plain, RecursionError if nested too deeply."""
    return hashlib.blake2b(canonical(value).encode("utf-8", "surrogatepass"), digest_size=DIGEST).hexdigest()


def canonical(value: Any) -> str:
    """Return ``value`` as a text; errors as for :func:`digest`. O(size) time; sets and dictionaries are sorted."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"type {value.__name__}"
    if isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, tuple):
        return f"({','.join(map(canonical, value))})"
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(map(canonical, value)))}}}"
    if isinstance(value, dict):
        pairs = sorted(f"{canonical(key)}:{canonical(one)}" for key, one in value.items())
        return f"dict{{{','.join(pairs)}}}"
    if isinstance(value, range):
        return repr(value)
    return _number(value)


def _number(value: Any) -> str:
    """Return a number as a text; hexadecimal, since decimal digits of large integers take quadratic time."""
    if isinstance(value, complex):
        return _number(value.real) if not value.imag else f"{_number(value.real)}+{_number(value.imag)}j"
    if isinstance(value, int):
        return hex(value)
    if isinstance(value, float):
        if value - value != 0:
            return repr(value)
        near = value if value.is_integer() else float(f"{value:.9g}")
        return hex(int(near)) if near.is_integer() else repr(near)
    kind = type(value).__name__
    if kind == "Decimal" and not value.is_finite():
        return f"Decimal {value}"
    if kind in ("Decimal", "Fraction"):
        over, under = value.as_integer_ratio()
        return hex(over) if under == 1 else f"{hex(over)}/{hex(under)}"
    raise TypeError(f"a {kind} is not a plain value")
