"""Functional consensus: compare programs by their results on inputs without known outputs.

:func:`plurality` counts equal behaviours as wholes and labels groups of a swarm. Every peer has one vote, split evenly
over its completions; for short answers this is a majority vote. :func:`most_agreeing` adds up agreement input by input
(FunCoder, arXiv 2405.20092, equation 1) and chooses among one model's programs.

Neither proves correctness: most candidates may be wrong, or most peers may collude.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from planaria.swarm.tasks.base import Behaviour


@dataclass(frozen=True)
class BehaviourVote:
    """Behaviour of one completion, and its voter."""

    voter: str
    behaviour: Behaviour


@dataclass(frozen=True)
class MajorityLabel:
    """Behaviour with the most weight in a group."""

    parts: tuple[int, ...]
    """indices of the parts that count"""
    values: Behaviour
    """results in these parts"""
    share: Fraction
    """share of all voters' votes"""

    def matches(self, behaviour: Behaviour) -> bool:
        """Return whether a behaviour matches the label."""
        return self._parts_of(behaviour) == self.values

    def is_near(self, behaviour: Behaviour) -> bool:
        """Return whether it matches, or agrees on more parts than a constant value would."""
        agreeing = sum(one == ours for one, ours in zip(self._parts_of(behaviour), self.values, strict=True))
        return agreeing == len(self.values) or agreeing > max(Counter(self.values).values())

    def _parts_of(self, behaviour: Behaviour) -> Behaviour:
        return select_parts(behaviour, self.parts)


def select_parts(behaviour: Behaviour, parts: Sequence[int]) -> Behaviour:
    """Return some parts of a behaviour, None for missing ones."""
    return tuple(behaviour[part] if part < len(behaviour) else None for part in parts)


def vote_weights(voters: Sequence[str]) -> list[Fraction]:
    """Return each completion's exact part of its voter's one vote, independent of order."""
    sent = Counter(voters)
    return [Fraction(1, sent[voter]) for voter in voters]


def plurality(ballots: Sequence[BehaviourVote]) -> list[MajorityLabel]:
    """Return the behaviours with the most weight; several if they tie, none if there is no result.

    A part counts if most of the weight of ballots with any result has a value there. A ballot abstains if it lacks a
    value in half of these parts, or has one value in all of several: otherwise ``return None`` would win.
    """
    weighted = [*zip((b.behaviour for b in ballots), vote_weights([b.voter for b in ballots]), strict=True)]
    parts = _counted_parts(weighted)
    weight: dict[Behaviour, Fraction] = defaultdict(Fraction)
    for behaviour, vote in weighted:
        values = select_parts(behaviour, parts)
        if 2 * values.count(None) < len(values) and (len(values) == 1 or len({*values}) > 1):
            weight[values] += vote
    voters, highest = len({ballot.voter for ballot in ballots}), max(weight.values(), default=Fraction())
    return [MajorityLabel(parts, values, value / voters) for values, value in weight.items() if value == highest]


def agreements(behaviours: Sequence[Behaviour]) -> list[Fraction]:
    """Return the agreement of each behaviour f with the others: Σ_{g≠f} (1/|X|) Σ_{x∈X} 1[f(x) = g(x)].

    Source: FunCoder, arXiv 2405.20092, equation 1. An input without a value (crash, time-out) agrees with nothing.
    """
    inputs = range(max(map(len, behaviours), default=0))
    whole = [select_parts(behaviour, inputs) for behaviour in behaviours]
    counts = [Counter(values) for values in zip(*whole, strict=True)]
    return [
        sum((Fraction(counts[x][done[x]] - 1, len(inputs)) for x in inputs if done[x] is not None), Fraction())
        for done in whole
    ]


def most_agreeing(behaviours: Sequence[Behaviour]) -> int:
    """Return the index of f* = argmax_f of :func:`agreements` (FunCoder, equation 1); the first of several."""
    result = agreements(behaviours)
    return result.index(max(result))


def most_common(behaviours: Sequence[Behaviour]) -> int:
    """Return the index of the first candidate that behaves as :func:`plurality` finds, or 0 if it finds nothing."""
    result = plurality([BehaviourVote(str(n), behaviour) for n, behaviour in enumerate(behaviours)])
    return next(
        (n for n, done in enumerate(behaviours) if any(majority_label.matches(done) for majority_label in result)), 0
    )


def majority_label(ballots: Sequence[BehaviourVote], agreement: float) -> MajorityLabel | None:
    """Return the behaviour with more than ``agreement`` of all votes, or None if there is none or several tie."""
    result = plurality(ballots)
    return result[0] if len(result) == 1 and result[0].share > agreement else None


def _counted_parts(weighted: Sequence[tuple[Behaviour, Fraction]]) -> tuple[int, ...]:
    """Return the parts in which most of the weight of ballots with any result has a value."""
    active = [(behaviour, vote) for behaviour, vote in weighted if any(part is not None for part in behaviour)]
    whole = sum(vote for _, vote in active)
    length = max((len(behaviour) for behaviour, _ in active), default=0)
    return tuple(
        n for n in range(length) if 2 * sum(vote for done, vote in active if select_parts(done, [n]) != (None,)) > whole
    )
