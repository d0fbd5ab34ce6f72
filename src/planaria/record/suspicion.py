"""What all-reduced replicas have been found to lie about, over the steps of a run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from planaria.exchange.base import Exchange
from planaria.exchange.equivocation import Findings, Heard, findings

Finding = tuple[int, ...]
"""one replica that equivocates, or two in dispute, of whom one lies at least"""
Refused = Mapping[int, Collection[int]]
"""replica → those whose offers its nodes have refused in a step"""


@dataclass(frozen=True)
class Suspicion:
    """What was found so far, and in how many steps."""

    found: Mapping[Finding, int] = field(default_factory=lambda: MappingProxyType({}))
    """→ steps"""
    now: frozenset[Finding] = frozenset()
    """of them, in the step under way"""
    useless: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """replica → steps in which its offer was of no use"""

    def raised(self, findings: Iterable[Finding]) -> Suspicion:
        """The same when these were found in the step under way."""
        new = {finding: self.found.get(finding, 0) + 1 for finding in findings}
        return replace(self, found=MappingProxyType({**self.found, **new}), now=self.now | new.keys())

    def committed(self, refused: Refused, rule: Exchange) -> Suspicion:
        """The same in the next step. Whose offer more members have refused than may lie, was of no use: an honest one's
        is refused by liars alone. Of those that were left out already nothing is known."""
        if not self.now and not refused:
            return self
        known = self.standing(rule.strikes).left_out
        by = Counter(sender for senders in refused.values() for sender in senders)
        found = {sender for sender, count in by.items() if count > rule.borne and sender not in known}
        new = {sender: self.useless.get(sender, 0) + 1 for sender in sorted(found)}
        return replace(self, now=frozenset(), useless=MappingProxyType({**self.useless, **new}))

    def standing(self, strikes: int) -> Findings:
        """Whom the step under way is made without: found in it, or in so many ``strikes`` (0: never enough)."""
        held = {finding for finding, steps in self.found.items() if 0 < strikes <= steps} | self.now
        alone = {member for finding in held if len(finding) == 1 for member in finding}
        useless = {member for member, steps in self.useless.items() if 0 < strikes <= steps} - alone
        disputes = [(one, *rest) for one, *rest in sorted(held) if rest and not (alone | useless) & {one, *rest}]
        pairs = tuple((first, second) for first, second in disputes)
        return Findings(tuple(sorted(alone)), pairs, tuple(sorted(useless)))

    def examine(self, heard: Heard, rule: Exchange) -> Findings:
        """What is new in what members have heard in the step under way, beside those that are left out already."""
        known = self.standing(rule.strikes)
        return findings(heard, heard.keys() - known.left_out.keys(), max(0, rule.borne - known.least))

    def unbearable(self, rule: Exchange) -> str:
        """Why the step cannot be made without those that are left out; empty if it can."""
        standing = self.standing(rule.strikes)
        if standing.least <= rule.borne:
            return ""
        said = "; ".join(f"replica {member}: {why}" for member, why in standing.left_out.items())
        return f"more replicas lie than exchange.robust bears ({rule.borne}): {said}"
