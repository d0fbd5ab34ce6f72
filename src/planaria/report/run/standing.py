"""What is slow at a moment of a run, by its verdicts, and what is done about it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from planaria.control import decisions as d
from planaria.control import events as e

Key = tuple[str, tuple[int, ...]]
"""class and nodes"""


@dataclass(frozen=True)
class Standing:
    """Something that is slow."""

    blamed: d.Blamed
    deed: d.Relieve | d.Reroute | None = None
    """what was last done about it"""

    @property
    def times(self) -> float:
        """How many times as long it takes as elsewhere, or, where there is nothing to compare with, as at first; 0
        where neither is known."""
        usual = self.blamed.usual or self.blamed.past
        return self.blamed.seconds / usual if usual > 0 else 0.0


class Verdicts:
    """Takes in a run's facts, in order."""

    def __init__(self) -> None:
        self.standing: dict[Key, Standing] = {}
        """what is slow by now"""
        self.blamed: Counter[str] = Counter()
        """verdicts so far, by their class"""
        self.deeds: Counter[str] = Counter()
        """what was done so far: relieve, reroute"""

    def take(self, fact: e.Event | d.Decision) -> None:
        """Takes in a fact; those that are no verdicts change nothing, but that a part of a run begins with none."""
        match fact:
            case e.RunStarted():
                self.standing = {}
            case d.Blamed():
                self.standing[_key(fact)] = Standing(fact)
                self.blamed[fact.fault] += 1
            case d.Cleared():
                self.standing.pop(_key(fact), None)
            case d.Relieve():
                self._done(fact, [key for key in self.standing if "link" not in key[0] and fact.node in key[1]])
            case d.Reroute():
                self._done(fact, [key for key in self.standing if key[0] == "slow link"])

    def _done(self, deed: d.Relieve | d.Reroute, keys: list[Key]) -> None:
        self.deeds[deed.kind] += 1
        for key in keys:
            self.standing[key] = replace(self.standing[key], deed=deed)


def _key(fact: d.Blamed | d.Cleared) -> Key:
    return fact.fault, tuple(fact.nodes)
