"""The rounds in which replicas meet, as the log of a fleet tells them: who met, who was waited for, what was sent."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord
from planaria.report.membership import Membership
from planaria.report.words import counted


@dataclass
class RoundHistory:
    """Replicas that settled a round together; a single one where a replica settled it by itself."""

    part: int
    """how often the run had been resumed"""
    round: int
    members: tuple[int, ...]
    drawn: tuple[int, ...]
    """the group that was to meet, less those that have left"""
    missing: tuple[int, ...]
    """who of these had not settled the round: who was gone on without"""
    refused: dict[int, str]
    """of these, whose offer was of no use → what was wrong with it"""
    impatient: bool
    """were others waited for in vain for as long as the recipe says?"""
    t: float
    steps: dict[int, int]
    """member → its own committed steps"""
    for_others: dict[int, float]
    """member → seconds from its last work until the others had come"""
    for_offers: dict[int, float]
    """member → seconds from then, or from its last work since, until the round was settled"""
    blocking_bytes: dict[int, int] = field(default_factory=dict)
    """member → sent by it, all its stages together, that somebody waited for"""
    prefetched_bytes: dict[int, int] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)
    """of each stage of each member, if they are several: RMS distance from their mean before they settled"""

    @property
    def alone(self) -> bool:
        return len(self.members) == 1


REMEMBERED = 1000
"""rounds: nobody is so many behind"""


class Rounds:
    """Folds a run's facts into gatherings. What workers say of one after it was settled is added to it later."""

    def __init__(self, members: Membership) -> None:
        """``members`` have taken in every fact before it comes here."""
        self._members = members
        self._part = -1
        self._groups: dict[int, list[list[int]]] = {}
        self._settled: dict[int, set[int]] = {}
        """round → replicas that have settled it"""
        self._late: set[tuple[int, int]] = set()
        """(round, replica that has waited in it as long as the recipe says)"""
        self._refused: dict[int, dict[int, str]] = {}
        """round → replica whose offer in it was refused → why"""
        self._worked: dict[int, float] = {}
        """replica → when it last did something other than wait"""
        self._writing: set[str] = set()
        """workers that have copied their stage, and write the copy"""
        self._met: dict[int, tuple[int, float, float]] = {}
        """replica → the round that it is in, since when, and how long it had waited until then"""
        self._last: dict[int, RoundHistory] = {}

    def take(self, t: float, fact: e.Event | d.Decision, left: Collection[int]) -> RoundHistory | None:
        """The history that this fact settles, if it does; ``left`` are the nodes that somebody has left with it."""
        if isinstance(fact, e.RunStarted):
            self._part += 1
            for known in (self._groups, self._settled, self._late, self._refused, self._worked, self._met, self._last):
                known.clear()
            self._writing.clear()
        elif self._members.started is None or self._members.started.replicas == 1:
            return None
        elif isinstance(fact, d.Settle):
            return self._settle(t, fact)
        elif isinstance(fact, e.RoundMade):
            self._made(t, fact)
        elif isinstance(fact, d.DrawGroups):
            self._groups[fact.round] = fact.groups
        elif isinstance(fact, d.Meet):
            for replica in fact.members:
                self._met[replica] = fact.round, t, self._idle(replica, t)
        elif isinstance(fact, e.OfferRefused):
            self._refused.setdefault(fact.round, {}).setdefault(fact.replica, fact.reason)
        elif isinstance(fact, e.PatienceOver):
            self._late.add((fact.round, fact.replica))
        elif isinstance(fact, e.StageSaved) and fact.worker in self._writing:  # that was not what it waited for
            self._writing.discard(fact.worker)
        elif isinstance(fact, e.StageCommitted | e.StageReady | e.StageCopied | e.StageSaved | e.Linked):
            self._writing |= {fact.worker} if isinstance(fact, e.StageCopied) else set()
            if fact.worker in self._members.node_of:
                self._worked[self._members.replica(self._members.node_of[fact.worker])] = t
        elif isinstance(fact, e.WorkerLost | d.Disband):
            self._writing -= {fact.worker} if isinstance(fact, e.WorkerLost) else set()
            for node in left:
                self._met.pop(self._members.replica(node), None)
        return None

    def _idle(self, replica: int, t: float) -> float:
        return t - self._worked.get(replica, t)

    def _settle(self, t: float, fact: d.Settle) -> RoundHistory:
        groups = self._groups.get(fact.round, [sorted(self._members.live)])  # without a draw, all meet
        group = next((g for g in groups if fact.members[0] in g), fact.members)
        drawn = tuple(n for n in group if n in self._members.live)
        settled = self._settled.setdefault(fact.round, set())
        self._forget(fact.round - REMEMBERED)
        others, offers = {}, {}
        for replica in fact.members:
            round, since, waited = self._met.pop(replica, (-1, 0.0, 0.0))
            met = round == fact.round
            idle = self._idle(replica, t)
            others[replica], offers[replica] = (waited, min(t - since, idle)) if met else (idle, 0.0)
        missing = tuple(n for n in drawn if n not in fact.members and n not in settled)
        known = {**self._refused.get(fact.round, {}), **fact.left_out}
        refused = {n: why for n, why in known.items() if n in missing}
        history = RoundHistory(
            part=self._part,
            round=fact.round,
            members=tuple(fact.members),
            drawn=drawn,
            missing=missing,
            refused=refused,
            impatient=any((fact.round, replica) in self._late for replica in fact.members),
            t=t,
            steps={replica: self._members.steps.get(replica, 0) for replica in fact.members},
            for_others=others,
            for_offers=offers,
        )
        settled |= set(fact.members)
        self._last |= dict.fromkeys(fact.members, history)
        return history

    def _forget(self, before: int) -> None:
        """A run of months has many rounds; of old ones nothing more is heard."""
        if len(self._settled) > 2 * REMEMBERED:
            self._groups = {round: groups for round, groups in self._groups.items() if round >= before}
            self._settled = {round: who for round, who in self._settled.items() if round >= before}
            self._late = {(round, who) for round, who in self._late if round >= before}

    def _made(self, t: float, fact: e.RoundMade) -> None:
        replica = self._members.replica(fact.node)
        history = self._last.get(replica)
        if history is None or history.round != fact.round:
            return
        self._worked[replica] = t
        history.blocking_bytes[replica] = history.blocking_bytes.get(replica, 0) + fact.blocking_bytes
        history.prefetched_bytes[replica] = history.prefetched_bytes.get(replica, 0) + fact.prefetched_bytes
        if not history.alone:
            history.apart.append(fact.apart)


def gatherings(record: RunRecord) -> list[RoundHistory]:
    """All of a run, in the order in which they were settled; none where replicas do not meet on a fleet."""
    return list(record.once(_gatherings))


def _gatherings(record: RunRecord) -> list[RoundHistory]:
    if all(started.replicas == 1 for _, started in record.starts):
        return []
    members = Membership()
    rounds = Rounds(members)
    found = (rounds.take(t, fact, members.take(fact)) for t, fact in record.history)
    return [history for history in found if history is not None]


@dataclass(frozen=True)
class ExchangeTotals:
    """What an exchange came to over a whole run, all replicas together."""

    rounds: int
    attended: int
    """rounds of single replicas"""
    alone: int
    """of these, in which it met nobody"""
    by_draw: int
    """of these, in which it was to meet nobody"""
    for_others: float
    """seconds waited"""
    for_offers: float
    blocking_bytes: int
    prefetched_bytes: int
    refused: int
    """offers that were of no use"""


def totals(held: list[RoundHistory]) -> ExchangeTotals:
    """Sums over gatherings."""
    alone = [history for history in held if history.alone]
    return ExchangeTotals(
        rounds=len({(history.part, history.round) for history in held}),
        attended=sum(len(history.members) for history in held),
        alone=len(alone),
        by_draw=sum(len(history.drawn) == 1 for history in alone),
        for_others=sum(sum(history.for_others.values()) for history in held),
        for_offers=sum(sum(history.for_offers.values()) for history in held),
        blocking_bytes=sum(sum(history.blocking_bytes.values()) for history in held),
        prefetched_bytes=sum(sum(history.prefetched_bytes.values()) for history in held),
        refused=sum(len(history.refused) for history in held),
    )


def told(sums: ExchangeTotals) -> Iterator[str]:
    """The totals in words."""
    alone = f"alone {sums.alone} of {counted(sums.attended, 'time')}, {sums.by_draw} by the draw"
    yield f"{counted(sums.rounds, 'round')}; {alone}"
    yield f"{_size(sums.blocking_bytes)} sent that somebody waited for, {_size(sums.prefetched_bytes)} ahead"
    yield (
        f"{sums.for_others + sums.for_offers:.2f} s waited, of all replicas together: {sums.for_others:.2f} s for "
        f"others to come, {sums.for_offers:.2f} s for what they said"
    )
    if sums.refused:
        yield f"{counted(sums.refused, 'time')} what a replica said was refused"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
