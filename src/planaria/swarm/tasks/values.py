"""Values as texts that are equal where the values are, whatever program made them. Part of ``cage.py``.

It runs beside the tests of a program, on plain values (``wire.py``), and imports nothing of planaria. Equal means what
``==`` means in Python: 1, 1.0 and True are one value, a list and a tuple are two. Floats are taken to nine digits,
since two right programs may add in two orders.
"""

from __future__ import annotations

import hashlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DIGEST = 12
"""bytes of a value's digest: nobody finds another value with the same one"""


def digest(value: Any) -> str:
    """24 hex digits that say which value it is. TypeError for one that is not plain, RecursionError for a deep one."""
    return hashlib.blake2b(canonical(value).encode("utf-8", "surrogatepass"), digest_size=DIGEST).hexdigest()


def canonical(value: Any) -> str:
    """``value`` as a text; exceptions as :func:`digest`. O(size) time; sets and dictionaries are sorted."""
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
    """A number of any type; hexadecimal, for decimal digits of a large one take quadratic time."""
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
    raise TypeError(f"a {kind} is no plain value")
