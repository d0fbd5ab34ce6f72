"""What all-reduced replicas have been found to tell each other differently, over the steps of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from planaria.exchange.base import Exchange
from planaria.exchange.equivocation import Findings, Heard, findings

Finding = tuple[int, ...]
"""one replica that equivocates, or two in dispute, of whom one lies at least"""


@dataclass(frozen=True)
class Suspicion:
    """What was found so far, and in how many steps."""

    found: Mapping[Finding, int] = field(default_factory=lambda: MappingProxyType({}))
    """→ steps"""
    now: frozenset[Finding] = frozenset()
    """of them, in the step under way"""

    def raised(self, findings: Iterable[Finding]) -> Suspicion:
        """The same when these were found in the step under way."""
        new = {finding: self.found.get(finding, 0) + 1 for finding in findings}
        return Suspicion(MappingProxyType({**self.found, **new}), self.now | new.keys())

    def committed(self) -> Suspicion:
        """The same in the next step."""
        return Suspicion(self.found) if self.now else self

    def standing(self, strikes: int) -> Findings:
        """What the step under way is made by: what was found in it, and in so many ``strikes`` (0: never enough)."""
        held = {finding for finding, steps in self.found.items() if 0 < strikes <= steps} | self.now
        alone = {member for finding in held if len(finding) == 1 for member in finding}
        disputes = [(one, *rest) for one, *rest in sorted(held) if rest and not alone & {one, *rest}]
        return Findings(tuple(sorted(alone)), tuple((first, second) for first, second in disputes))

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
