"""A story's frames: what changes on the page, as JSON merge patches (RFC 7396), and how many of them are kept."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planaria.report.live_page.limits import FULL_DETAIL, MOST_FRAMES

SCHEMA = 1
"""of frames and the states they lead to; it changes when a page of the old one would misread the new one"""

HEAVIEST = 1 << 40
"""frames that are joined to one, at most"""

Json = dict[str, Any]


@dataclass(frozen=True)
class Frame:
    """What changes on the page at one moment."""

    number: int
    """they grow, but not by one: some frames are joined to later ones"""
    t: float
    """seconds since the run began, without the time between its parts"""
    change: Json
    """to the state before, as a merge patch"""
    told: Json | None = None
    """a line of the run's story: its step, tone and text"""
    routine: bool = True
    """does it change numbers only, so that it may be joined to the next one?"""
    weight: int = 1
    """frames that it was joined from"""

    @cached_property
    def text(self) -> str:
        """As the browser gets it, in JSON: the same for all who watch."""
        frame: Json = {"n": self.number, "t": round(self.t, 4), "set": self.change}
        return json.dumps(frame | ({"told": self.told} if self.told else {}), separators=(",", ":"))


def patched(state: Json, change: Mapping[str, Any]) -> Json:
    """``state`` after a merge patch (RFC 7396); both stay as they are."""
    after = dict(state)
    for name, value in change.items():
        if value is None:
            after.pop(name, None)
        elif isinstance(value, dict):
            before = after.get(name)
            after[name] = patched(before if isinstance(before, dict) else {}, value)
        else:
            after[name] = value
    return after


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Json:
    """The merge patch that leads from one state to another; neither holds None."""
    change: Json = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if old == value and name in before:
            continue
        both = isinstance(value, dict) and isinstance(old, dict)
        change[name] = difference(old, value) if both else value  # type: ignore[arg-type]
    return change


def joined(first: Mapping[str, Any], then: Mapping[str, Any]) -> Json:
    """The merge patch that does what both do, one after the other."""
    change = dict(first)
    for name, value in then.items():
        before = change.get(name)
        both = isinstance(value, dict) and isinstance(before, dict)
        change[name] = joined(before, value) if both else value  # type: ignore[arg-type]
    return change


class Frames:
    """The frames of one story, in order: at most so many, whatever the run's length, and equally fine all along."""

    def __init__(self, most: int = MOST_FRAMES, detailed: int = FULL_DETAIL) -> None:
        """``detailed``: so many of the newest are never joined."""
        self._frames: list[Frame] = []
        self._most, self._detailed = most, detailed
        self._weight = 1
        """that a frame may have by now"""

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def last(self) -> int:
        """The number of the newest; -1 without any."""
        return self._frames[-1].number if self._frames else -1

    def add(self, frame: Frame) -> None:
        """Takes in the next frame."""
        self._frames.append(frame)
        if len(self._frames) > self._most:
            self._thin()

    def after(self, number: int, most: int) -> list[Frame]:
        """The first ``most`` frames after that of this number.

        Who has seen some frames of a joined one loses nothing: what it changes is as it was afterwards.
        """
        start = bisect_right(self._frames, number, key=lambda frame: frame.number)
        return self._frames[start : start + most]

    def _thin(self) -> None:
        enough = (self._most + self._detailed) // 2
        while len(self._frames) > enough and self._weight < HEAVIEST:
            old, new = self._frames[: -self._detailed], self._frames[-self._detailed :]
            crowded = sum(not frame.routine for frame in old) > enough // 2  # with what is worth telling
            self._frames = _paired(old, self._weight, crowded) + new
            if len(self._frames) > enough:
                self._weight *= 2


def _paired(frames: list[Frame], heaviest: int, all_kinds: bool) -> list[Frame]:
    """The same, where neighbours are joined that are routine, or of any kind, and not heavier than this together."""
    kept: list[Frame] = []
    for frame in frames:
        last = kept[-1] if kept else None
        light = last is not None and last.weight + frame.weight <= heaviest
        if last is None or not light or not (last.routine or all_kinds) or _undoes(last.change, frame.change):
            kept.append(frame)
            continue
        change, told = joined(last.change, frame.change), frame.told or last.told
        routine, weight = frame.routine and last.routine, frame.weight + last.weight
        kept[-1] = Frame(frame.number, frame.t, change, told, routine, weight)
    return kept


def _undoes(first: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Does the second change put something anew where the first one removes it? No one patch says that."""
    both = first.keys() & then.keys()
    anew = any(first[name] is None and isinstance(then[name], dict) for name in both)
    return anew or any(
        _undoes(first[name], then[name])
        for name in both
        if isinstance(first[name], dict) and isinstance(then[name], dict)
    )
