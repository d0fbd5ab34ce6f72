"""Functional consensus: compare programs by what they do on inputs whose right outputs are unknown.

:func:`plurality` counts equal behaviours as wholes. It labels groups of a swarm, where every peer has one vote, split
evenly over its completions; for tasks with short answers this is a majority vote. :func:`most_agreeing` adds up
agreement input by input (FunCoder, arXiv 2405.20092, equation 1); it chooses among one model's programs.

Neither is a test of truth: most candidates may be wrong, or most peers may collude.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from planaria.swarm.tasks.base import Behaviour


@dataclass(frozen=True)
class Ballot:
    """What one completion of a group does, and whose vote it has a part of."""

    voter: str
    behaviour: Behaviour


@dataclass(frozen=True)
class Label:
    """What has most weight behind it in one group."""

    parts: tuple[int, ...]
    """the parts of a behaviour that count"""
    values: Behaviour
    """what is done in each of these"""
    share: Fraction
    """of the votes of all who sent something"""

    def holds(self, behaviour: Behaviour) -> bool:
        """Whether a behaviour is this one."""
        return self._of(behaviour) == self.values

    def near(self, behaviour: Behaviour) -> bool:
        """Whether it is this one, or agrees with it on more parts than one value in all of them would."""
        agreeing = sum(one == ours for one, ours in zip(self._of(behaviour), self.values, strict=True))
        return agreeing == len(self.values) or agreeing > max(Counter(self.values).values())

    def _of(self, behaviour: Behaviour) -> Behaviour:
        return at(behaviour, self.parts)


def at(behaviour: Behaviour, parts: Sequence[int]) -> Behaviour:
    """Some parts of a behaviour; where it has no such part it does nothing."""
    return tuple(behaviour[part] if part < len(behaviour) else None for part in parts)


def weights(voters: Sequence[str]) -> list[Fraction]:
    """Each completion's part of its voter's one vote: exact, and the same in whatever order completions come."""
    sent = Counter(voters)
    return [Fraction(1, sent[voter]) for voter in voters]


def plurality(ballots: Sequence[Ballot]) -> list[Label]:
    """The behaviours of a group with most weight: one, or several with equal weight; none if nobody does anything.

    A part counts where most of the weight of those that do anything has a value. Who then has no value in half of the
    parts, or one value in all of several, does nothing that could be compared: else ``return None`` would win.
    """
    parts = _counting(ballots)
    weight: dict[Behaviour, Fraction] = defaultdict(Fraction)
    for ballot, vote in zip(ballots, weights([ballot.voter for ballot in ballots]), strict=True):
        values = at(ballot.behaviour, parts)
        if 2 * values.count(None) < len(values) and (len(values) == 1 or len({*values}) > 1):
            weight[values] += vote
    voters, most = len({ballot.voter for ballot in ballots}), max(weight.values(), default=Fraction())
    return [Label(parts, values, found / voters) for values, found in weight.items() if found == most]


def agreements(behaviours: Sequence[Behaviour]) -> list[Fraction]:
    """Return how much each behaviour f agrees with the others: Σ_{g≠f} (1/|X|) Σ_{x∈X} 1[f(x) = g(x)].

    Source: FunCoder, arXiv 2405.20092, equation 1. An input without a value (crash, time-out) agrees with nothing.
    """
    inputs = range(max(map(len, behaviours), default=0))
    whole = [at(behaviour, inputs) for behaviour in behaviours]
    counts = [Counter(values) for values in zip(*whole, strict=True)]
    return [
        sum((Fraction(counts[x][done[x]] - 1, len(inputs)) for x in inputs if done[x] is not None), Fraction())
        for done in whole
    ]


def most_agreeing(behaviours: Sequence[Behaviour]) -> int:
    """Return the index of f* = argmax_f of :func:`agreements` (FunCoder, equation 1); the first of several."""
    found = agreements(behaviours)
    return found.index(max(found))


def most_common(behaviours: Sequence[Behaviour]) -> int:
    """Return the index of the first candidate that behaves as :func:`plurality` finds, or 0 if it finds nothing."""
    found = plurality([Ballot(str(n), behaviour) for n, behaviour in enumerate(behaviours)])
    return next((n for n, done in enumerate(behaviours) if any(one.holds(done) for one in found)), 0)


def label(ballots: Sequence[Ballot], agreement: float) -> Label | None:
    """The behaviour that more than ``agreement`` of all votes stand behind; None if there is none, or if several are
    equal."""
    found = plurality(ballots)
    return found[0] if len(found) == 1 and found[0].share > agreement else None


def _counting(ballots: Sequence[Ballot]) -> tuple[int, ...]:
    """The parts in which most of the weight of those that do anything has a value."""
    doing = [
        (ballot.behaviour, vote)
        for ballot, vote in zip(ballots, weights([ballot.voter for ballot in ballots]), strict=True)
        if any(part is not None for part in ballot.behaviour)
    ]
    whole = sum(vote for _, vote in doing)
    length = max((len(behaviour) for behaviour, _ in doing), default=0)
    return tuple(n for n in range(length) if 2 * sum(vote for done, vote in doing if at(done, [n]) != (None,)) > whole)
