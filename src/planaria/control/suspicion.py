"""Evidence that replicas are Byzantine, collected over the steps or rounds of a run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from planaria.exchange.base import Exchange
from planaria.exchange.equivocation import Findings, Heard, findings


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


Finding = tuple[int, ...]
"""one replica that equivocates, or two in dispute, of whom one lies at least"""
Refused = Mapping[int, Collection[int]]
"""replica → those whose offers its nodes have refused in a step or round"""
_NEVER = Refusals()


@dataclass(frozen=True)
class Suspicion:
    """What was found so far, and in how many steps."""

    found: Mapping[Finding, int] = field(default_factory=lambda: MappingProxyType({}))
    """→ steps; of all-reduced replicas"""
    now: frozenset[Finding] = frozenset()
    """of them, in the step under way"""
    refusals: Mapping[int, Refusals] = field(default_factory=lambda: MappingProxyType({}))
    """replica → those of its offers"""

    def raised(self, findings: Iterable[Finding]) -> Suspicion:
        """The same when these were found in the step under way."""
        new = {finding: self.found.get(finding, 0) + 1 for finding in findings}
        return replace(self, found=MappingProxyType({**self.found, **new}), now=self.now | new.keys())

    def ended(self, round: int, refused: Refused, rule: Exchange) -> Suspicion:
        """The same once these members have ended a round, or a step. Of those in dispute nothing new is known: all
        refuse them, and one may be honest."""
        if not self.now and not refused:
            return self
        standing = self.standing(rule)
        disputed = standing.left_out.keys() - {*standing.liars, *standing.useless}
        held = dict(self.refusals)
        for sender in sorted({other for others in refused.values() for other in others} - disputed):
            by = [member for member, others in refused.items() if sender in others]
            held[sender] = held.get(sender, _NEVER).refused(round, by, distrusted(rule))
        return replace(self, now=frozenset(), refusals=MappingProxyType(held))

    def strikes(self, member: int, rule: Exchange) -> int:
        """Steps or rounds in which what ``member`` said is proved to have been of no use, or not the same to all."""
        return self.refusals.get(member, _NEVER).strikes(distrusted(rule))

    def forgotten(self, member: int) -> Suspicion:
        """The same when another machine has the place of ``member``: what was said of it, and what it has said."""
        found = {finding: steps for finding, steps in self.found.items() if member not in finding}
        others = {other: held.without(member) for other, held in self.refusals.items() if other != member}
        now = frozenset(finding for finding in self.now if member not in finding)
        return Suspicion(MappingProxyType(found), now, MappingProxyType(others))

    def standing(self, rule: Exchange) -> Findings:
        """Whom the step under way is made without: found in it, or in ``rule.strikes`` (0: never enough)."""
        least = rule.strikes
        held = {finding for finding, steps in self.found.items() if 0 < least <= steps} | self.now
        alone = {member for finding in held if len(finding) == 1 for member in finding}
        useless = {member for member in self.refusals if 0 < least <= self.strikes(member, rule)} - alone
        disputes = [(one, *rest) for one, *rest in sorted(held) if rest and not (alone | useless) & {one, *rest}]
        pairs = tuple((first, second) for first, second in disputes)
        return Findings(tuple(sorted(alone)), pairs, tuple(sorted(useless)))

    def examine(self, heard: Heard, rule: Exchange) -> Findings:
        """What is new in what members have heard in the step under way, beside those that are left out already."""
        known = self.standing(rule)
        return findings(heard, heard.keys() - known.left_out.keys(), max(0, rule.borne - known.least))

    def unbearable(self, rule: Exchange) -> str:
        """Why the step cannot be made without those that are left out; empty if it can."""
        standing = self.standing(rule)
        if standing.least <= rule.borne:
            return ""
        said = "; ".join(f"replica {member}: {why}" for member, why in standing.left_out.items())
        return f"more replicas lie than exchange.robust bears ({rule.borne}): {said}"


def distrusted(rule: Exchange) -> int:
    """f, the members that may lie about others: with rounds one at least, also where no rule expects any."""
    return max(1, rule.borne) if rule.interval else rule.borne
