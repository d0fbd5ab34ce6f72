"""Settings as the texts of flags."""

from __future__ import annotations

import json
from collections.abc import Mapping


def flag_text(value: object) -> str:
    """Return a setting as the text of a flag.

    >>> flag_text("6/4"), flag_text({"kind": "subspace", "rank": 160})
    ('6/4', '{kind = "subspace", rank = 160}')
    """
    if value is None:
        return "none"
    return value if isinstance(value, str) else _toml(value)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {_toml(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
