"""What each peer's work was worth to the others: accepted completions and their part of what was learned from.

Pure counting over records that peers kept themselves. A certificate says that the round had these messages; whether a
completion was accepted is the word of whoever learned from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from planaria.swarm.records.lines import SampleRecord


@dataclass(frozen=True)
class Account:
    """What came of one peer's completions at all others together."""

    certified: int
    """accepted, in rounds with a certificate"""
    other: int
    """accepted, in rounds without one"""
    part: float
    """of Σ|Â| over what others learned from it and each other, certified rounds only"""


def accounts(samples: Mapping[str, Iterable[SampleRecord]], certified: Set[int]) -> dict[str, Account]:
    """By sender. ``samples``: what each reader noted; its own completions do not count."""
    good: Counter[str] = Counter()
    other: Counter[str] = Counter()
    weight: dict[str, float] = {}
    for reader, lines in samples.items():
        for line in lines:
            if line.peer == reader or line.layer:
                continue
            (good if line.round in certified else other)[line.peer] += 1
            if line.round in certified:
                weight[line.peer] = weight.get(line.peer, 0.0) + abs(line.advantage or 0.0)
    total = sum(weight.values())
    return {
        peer: Account(good[peer], other[peer], weight.get(peer, 0.0) / total if total else 0.0)
        for peer in sorted({*good, *other})
    }


def debts(samples: Mapping[str, Iterable[SampleRecord]], certified: Set[int], price: int) -> dict[tuple[str, str], int]:
    """(debtor, creditor) → credits, at ``price`` for each accepted completion, what both owe each other set off."""
    owed: Counter[tuple[str, str]] = Counter()
    for reader, lines in samples.items():
        for line in lines:
            if line.peer != reader and not line.layer and line.round in certified:
                owed[reader, line.peer] += price
    net = {(a, b): credits - owed[b, a] for (a, b), credits in owed.items()}
    return {pair: credits for pair, credits in sorted(net.items()) if credits > 0}
