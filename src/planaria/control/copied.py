"""Copies of states, for what changes in every step."""

from __future__ import annotations

from typing import Any, TypeVar

State = TypeVar("State")


def copied(state: State, **changes: Any) -> State:
    """``dataclasses.replace`` in a tenth of its time. It checks no names, and what has been derived is kept: name only
    fields from which nothing is derived."""
    after = object.__new__(type(state))
    object.__setattr__(after, "__dict__", state.__dict__ | changes)
    return after
