"""Frames of the live page: changes of its state as JSON merge patches (RFC 7396)."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planaria.report.live_page.limits import FULL_DETAIL, MAX_FRAMES

SCHEMA = 2
"""version of frames and states; changes with every incompatible change"""

MAX_WEIGHT = 1 << 40
"""maximum number of frames joined into one"""

Json = dict[str, Any]


@dataclass(frozen=True)
class StateChange:
    """A change of the page's state."""

    number: int
    """increasing, with gaps where frames were joined"""
    t: float
    """seconds since the run started, without the time between its parts"""
    change: Json
    """merge patch of the previous state"""
    line: Json | None = None
    """a line of the run's story: its step, tone and text"""
    routine: bool = True
    """changes only numbers, so it can be merged into the next frame"""
    weight: int = 1
    """number of frames joined into it"""

    @cached_property
    def text(self) -> str:
        """JSON for browsers, shared by all watchers."""
        frame: Json = {"n": self.number, "t": round(self.t, 4), "set": self.change}
        return json.dumps(frame | ({"line": self.line} if self.line else {}), separators=(",", ":"))


def apply_patch(state: Json, change: Mapping[str, Any]) -> Json:
    """Return ``state`` after a merge patch (RFC 7396), without modifying either."""
    after = dict(state)
    for name, value in change.items():
        if value is None:
            after.pop(name, None)
        elif isinstance(value, dict):
            before = after.get(name)
            after[name] = apply_patch(before if isinstance(before, dict) else {}, value)
        else:
            after[name] = value
    return after


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Json:
    """Return the merge patch from one state to another; neither holds None."""
    change: Json = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if old == value and name in before:
            continue
        both = isinstance(value, dict) and isinstance(old, dict)
        change[name] = difference(old, value) if both else value  # type: ignore[arg-type]
    return change


def merge_patches(first: Mapping[str, Any], then: Mapping[str, Any]) -> Json:
    """Return the merge patch equivalent to both in sequence."""
    change = dict(first)
    for name, value in then.items():
        before = change.get(name)
        both = isinstance(value, dict) and isinstance(before, dict)
        change[name] = merge_patches(before, value) if both else value  # type: ignore[arg-type]
    return change


class Frames:
    """The frames of one run in order; a bounded number with uniform detail."""

    def __init__(self, max_frames: int = MAX_FRAMES, detailed: int = FULL_DETAIL) -> None:
        """
        :param max_frames: maximum number of frames
        :param detailed: number of newest frames that are never joined
        """
        self._frames: list[StateChange] = []
        self._max_frames, self._detailed = max_frames, detailed
        self._weight = 1
        """current maximum weight of a frame"""

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def last(self) -> int:
        """Number of the newest frame; -1 without any."""
        return self._frames[-1].number if self._frames else -1

    def add(self, frame: StateChange) -> None:
        """Append a frame."""
        self._frames.append(frame)
        if len(self._frames) > self._max_frames:
            self._thin()

    def after(self, number: int, limit: int) -> list[StateChange]:
        """Return the first ``limit`` frames after ``number``.

        A joined frame is also correct for watchers that have received some of its frames.
        """
        start = bisect_right(self._frames, number, key=lambda frame: frame.number)
        return self._frames[start : start + limit]

    def _thin(self) -> None:
        target = (self._max_frames + self._detailed) // 2
        while len(self._frames) > target and self._weight < MAX_WEIGHT:
            old, new = self._frames[: -self._detailed], self._frames[-self._detailed :]
            join_all = sum(not frame.routine for frame in old) > target // 2  # with events
            self._frames = _join_neighbours(old, self._weight, join_all) + new
            if len(self._frames) > target:
                self._weight *= 2


def _join_neighbours(frames: list[StateChange], max_weight: int, all_kinds: bool) -> list[StateChange]:
    """Join neighbouring routine frames (or all kinds) up to a total weight."""
    kept: list[StateChange] = []
    for frame in frames:
        last = kept[-1] if kept else None
        fits = last is not None and last.weight + frame.weight <= max_weight
        if last is None or not fits or not (last.routine or all_kinds) or _recreates(last.change, frame.change):
            kept.append(frame)
            continue
        change, line = merge_patches(last.change, frame.change), frame.line or last.line
        routine, weight = frame.routine and last.routine, frame.weight + last.weight
        kept[-1] = StateChange(frame.number, frame.t, change, line, routine, weight)
    return kept


def _recreates(first: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Return whether ``then`` replaces an object that ``first`` removes, which no single patch can express."""
    both = first.keys() & then.keys()
    recreated = any(first[name] is None and isinstance(then[name], dict) for name in both)
    return recreated or any(
        _recreates(first[name], then[name])
        for name in both
        if isinstance(first[name], dict) and isinstance(then[name], dict)
    )
