"""In what two sets of rules differ, in words for a user."""

from __future__ import annotations

import json

from pydantic import JsonValue

_WIDEST = 60


def canonical(value: JsonValue) -> str:
    """The one JSON text of a value: 1, 1.0 and true are three values.

    :raises ValueError: for NaN, infinities, text that is no valid Unicode, and what is nested too deeply.
    """
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text


def difference(mine: JsonValue, theirs: JsonValue, key: str = "") -> str | None:
    """The first key, in alphabetical order, that differs, with both values; None if nothing does.

    1, 1.0 and true differ. ``theirs`` comes from a stranger: what is said of it is ASCII, and short.
    """
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in sorted(mine.keys() | theirs.keys()):
            path = f"{key}.{_shown(name)}" if key else _shown(name)
            if (name in mine) != (name in theirs):
                return f"{path} is only {'here' if name in mine else 'there'}"
            if found := difference(mine[name], theirs[name], path):
                return found
        return None
    if canonical(mine) == canonical(theirs):
        return None
    return f"{key} is {_shown(theirs)} there and {_shown(mine)} here"


def _shown(value: JsonValue) -> str:
    text = json.dumps(value)
    if isinstance(value, str) and value.isidentifier() and value.isascii():
        text = value
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
