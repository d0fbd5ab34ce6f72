"""How often one member's offers were of no use, by what others say of them, of whom some may lie. Pure.

An honest member's offers are refused by liars alone. So in a round in which more members refuse an offer than may lie,
it was of no use. In small groups never so many meet at a time; but if each of more members than may lie has refused
offers of one sender in s rounds, one of these members is honest, and s offers were of no use at least.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Refusals:
    """Of the offers of one member, over rounds; those of the newest round are apart, as not all may be known yet."""

    proved: int = 0
    """rounds before in which more members refused than may lie"""
    by: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """member → other rounds before in which it refused"""
    round: int = -1
    """the newest in which anybody refused"""
    now: frozenset[int] = frozenset()
    """who refused in it"""

    def refused(self, round: int, by: Collection[int], liars: int) -> Refusals:
        """The same once these members have refused in ``round``, if at most so many lie. What is told of a round after
        a newer one does not count."""
        if round < self.round:
            return self
        if round == self.round:
            return replace(self, now=self.now.union(by))
        return replace(self._closed(liars), round=round, now=frozenset(by))

    def strikes(self, liars: int) -> int:
        """In so many rounds at least its offer was of no use, if at most so many ``liars`` are among the members."""
        closed = self._closed(liars)
        most = sorted(closed.by.values(), reverse=True)
        return closed.proved + (most[liars] if len(most) > liars else 0)

    def without(self, member: int) -> Refusals:
        """The same without what ``member`` has said of it."""
        by = MappingProxyType({other: rounds for other, rounds in self.by.items() if other != member})
        return replace(self, by=by, now=self.now - {member})

    def _closed(self, liars: int) -> Refusals:
        """The newest round among those before."""
        if len(self.now) > liars:
            return replace(self, proved=self.proved + 1, now=frozenset())
        by = {**self.by, **{member: self.by.get(member, 0) + 1 for member in self.now}}
        return replace(self, by=MappingProxyType(by), now=frozenset())
