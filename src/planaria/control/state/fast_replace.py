"""Fast copies of states for changes in every step."""

from __future__ import annotations

from typing import Any, TypeVar

State = TypeVar("State")


def fast_replace(state: State, **changes: Any) -> State:
    """Return ``dataclasses.replace(state, **changes)`` in a tenth of its time, keeping cached properties.

    Field names are not checked; change only fields on which no cached property depends.
    """
    after = object.__new__(type(state))
    object.__setattr__(after, "__dict__", state.__dict__ | changes)
    return after
