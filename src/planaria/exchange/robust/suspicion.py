"""Evidence that replicas are Byzantine, collected over the steps or rounds of a run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from planaria.exchange.base import Exchange
from planaria.exchange.robust.equivocation import Exclusions, Received, find_equivocations


@dataclass(frozen=True)
class MemberRejections:
    """Rejections of one member's updates; those of the newest round are separate, since they may be incomplete."""

    proved: int = 0
    """earlier rounds in which more members rejected than may be Byzantine"""
    earlier_rounds: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """member → number of other earlier rounds in which it rejected"""
    round: int = -1
    """the newest round with a rejection"""
    now: frozenset[int] = frozenset()
    """members that rejected in it"""

    def with_rejections(self, round: int, by: Collection[int], byzantine: int) -> MemberRejections:
        """Return the state after these members rejected in ``round``; reports about an older round are ignored.

        :param byzantine: the largest number of Byzantine members.
        """
        if round < self.round:
            return self
        if round == self.round:
            return replace(self, now=self.now.union(by))
        return replace(self._merge_newest(byzantine), round=round, now=frozenset(by))

    def strikes(self, byzantine: int) -> int:
        """Return the minimum number of rounds with an invalid update, with at most ``byzantine`` Byzantine members."""
        closed = self._merge_newest(byzantine)
        counts = sorted(closed.earlier_rounds.values(), reverse=True)
        return closed.proved + (counts[byzantine] if len(counts) > byzantine else 0)

    def without(self, member: int) -> MemberRejections:
        """Return the state without rejections by ``member``."""
        earlier_rounds = MappingProxyType(
            {other: rounds for other, rounds in self.earlier_rounds.items() if other != member}
        )
        return replace(self, earlier_rounds=earlier_rounds, now=self.now - {member})

    def _merge_newest(self, byzantine: int) -> MemberRejections:
        """Return the state with the newest round merged into the earlier ones."""
        if len(self.now) > byzantine:
            return replace(self, proved=self.proved + 1, now=frozenset())
        earlier_rounds = {
            **self.earlier_rounds,
            **{member: self.earlier_rounds.get(member, 0) + 1 for member in self.now},
        }
        return replace(self, earlier_rounds=MappingProxyType(earlier_rounds), now=frozenset())


Finding = tuple[int, ...]
"""one replica that equivocates, or two in dispute, of which at least one is Byzantine"""
RejectedUpdates = Mapping[int, Collection[int]]
"""replica → replicas whose updates its nodes rejected in a step or round"""
_NEVER = MemberRejections()


@dataclass(frozen=True)
class Suspicion:
    """Findings so far, and their number of steps."""

    findings: Mapping[Finding, int] = field(default_factory=lambda: MappingProxyType({}))
    """finding → steps in which it was made; all-reduced replicas only"""
    now: frozenset[Finding] = frozenset()
    """those in the current step"""
    rejections: Mapping[int, MemberRejections] = field(default_factory=lambda: MappingProxyType({}))
    """replica → rejections of its updates"""

    def with_findings(self, current: Iterable[Finding]) -> Suspicion:
        """Return the state after these findings in the current step."""
        new = {finding: self.findings.get(finding, 0) + 1 for finding in current}
        return replace(self, findings=MappingProxyType({**self.findings, **new}), now=self.now | new.keys())

    def end_round(self, round: int, rejected: RejectedUpdates, rule: Exchange) -> Suspicion:
        """Return the state after these members ended a round or a step.

        Members in dispute gain no rejections: all others reject them, and one may be honest.
        """
        if not self.now and not rejected:
            return self
        excluded = self.exclusions(rule)
        disputed = excluded.left_out.keys() - {*excluded.byzantine, *excluded.invalid}
        rejections = dict(self.rejections)
        for sender in sorted({other for senders in rejected.values() for other in senders} - disputed):
            by = [member for member, senders in rejected.items() if sender in senders]
            rejections[sender] = rejections.get(sender, _NEVER).with_rejections(round, by, byzantine_bound(rule))
        return replace(self, now=frozenset(), rejections=MappingProxyType(rejections))

    def strikes(self, member: int, rule: Exchange) -> int:
        """Return the steps or rounds in which ``member``'s update was provably invalid or not the same for all
        members."""
        return self.rejections.get(member, _NEVER).strikes(byzantine_bound(rule))

    def without_reports_about(self, member: int) -> Suspicion:
        """Return the state without reports by and about ``member``, which another machine replaces."""
        kept = {finding: steps for finding, steps in self.findings.items() if member not in finding}
        rejections = {other: each.without(member) for other, each in self.rejections.items() if other != member}
        now = frozenset(finding for finding in self.now if member not in finding)
        return Suspicion(MappingProxyType(kept), now, MappingProxyType(rejections))

    def exclusions(self, rule: Exchange) -> Exclusions:
        """Return the members excluded from the current step: those caught in it, and those caught in ``rule.strikes``
        earlier steps (0: never)."""
        limit = rule.strikes
        current = {finding for finding, steps in self.findings.items() if 0 < limit <= steps} | self.now
        proved = {member for finding in current if len(finding) == 1 for member in finding}
        invalid = {member for member in self.rejections if 0 < limit <= self.strikes(member, rule)} - proved
        pairs = sorted(finding for finding in current if len(finding) == 2 and not (proved | invalid) & {*finding})
        return Exclusions(tuple(sorted(proved)), tuple((sender, by) for sender, by in pairs), tuple(sorted(invalid)))

    def examine(self, received: Received, rule: Exchange) -> Exclusions:
        """Return new findings from the digests in the current step, besides members already excluded."""
        excluded = self.exclusions(rule)
        members = received.keys() - excluded.left_out.keys()
        return find_equivocations(received, members, max(0, rule.tolerated - excluded.min_byzantine))

    def why_impossible(self, rule: Exchange) -> str:
        """Return why the step is impossible without the excluded members, or an empty string if it is possible."""
        excluded = self.exclusions(rule)
        if excluded.min_byzantine <= rule.tolerated:
            return ""
        reasons = "; ".join(f"replica {member}: {why}" for member, why in excluded.left_out.items())
        return f"more replicas are Byzantine than exchange.robust tolerates ({rule.tolerated}): {reasons}"


def byzantine_bound(rule: Exchange) -> int:
    """Return f, the number of members that may be Byzantine; with rounds at least one, also without a robust rule."""
    return max(1, rule.tolerated) if rule.has_rounds else rule.tolerated
