"""Who takes part and when a round is over: pure decisions from who is expected, who is there and for how long."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from planaria.common.errors import RunStopped
from planaria.swarm.board.message import NOT_JSON, NOT_READABLE, Goodbye, Hello, Rollouts

_MAY_STILL_COME = {NOT_JSON, NOT_READABLE}
"""a store may show a message before all of it, or its permissions, are there"""


@dataclass(frozen=True)
class Census:
    """Who takes part, by peer id."""

    hellos: dict[str, Hello]
    goodbyes: dict[str, Goodbye]
    refused: dict[str, str]
    """why, for those whose hello or goodbye is none"""
    left_out: int
    """how many more folders of peers there are than the limit allows to look into"""

    def members(self, round: int) -> frozenset[str]:
        """The peers that send completions for a round: they joined by then and have not left before."""
        left = {peer for peer, goodbye in self.goodbyes.items() if goodbye.after < round}
        return frozenset(peer for peer, hello in self.hellos.items() if hello.joined <= round) - left


@dataclass(frozen=True)
class Gathered:
    """What was found of a round so far, by peer id."""

    found: dict[str, Rollouts]
    missing: tuple[str, ...]
    refused: dict[str, str]
    """why, for those that sent something else"""
    came: Mapping[str, float] = field(default_factory=dict)
    """seconds into the wait, if there was one, until each was found"""

    @property
    def texts(self) -> list[tuple[str, list[str]]]:
        """(peer, all texts that it sent), in no order."""
        return [(peer, [c.text for g in one.groups for c in g.completions]) for peer, one in self.found.items()]

    @property
    def settled(self) -> dict[str, str]:
        """Those of the refused for whom nothing else will come: what is there is whole, and is never replaced."""
        return {peer: why for peer, why in self.refused.items() if why not in _MAY_STILL_COME}

    @property
    def open(self) -> tuple[str, ...]:
        """Those whose message may still come: nothing is there, or what is there may not be whole yet."""
        return (*self.missing, *(self.refused.keys() - self.settled.keys()))

    def updated(self, later: Gathered) -> Gathered:
        """With what a later look at those that were open found."""
        return Gathered(self.found | later.found, later.missing, self.settled | later.refused, self.came)

    def timed(self, elapsed_s: float) -> Gathered:
        """With what was found since then as found now."""
        return replace(self, came={peer: self.came.get(peer, elapsed_s) for peer in self.found})

    def only(self, heard: Set[str], guilty: Mapping[str, str]) -> Gathered:
        """Of what was found, what these sent; the others are missing, or refused because they are ``guilty``."""
        left = {*self.found, *self.missing, *self.refused} - heard
        refused = self.refused | {peer: guilty[peer] for peer in left & guilty.keys()}
        found = {peer: message for peer, message in self.found.items() if peer in heard}
        return replace(self, found=found, missing=tuple(sorted(left - refused.keys())), refused=refused)


class Decision(enum.Enum):
    """What to do about a round."""

    CLOSE = "close"
    """go on with what is there"""
    WAIT = "wait"
    STALLED = "stalled"
    """too few came, for too long"""


@dataclass(frozen=True)
class Terms:
    """How long a round waits for whom."""

    quorum: int
    """with so many messages a round may close before all are there"""
    timeout_s: float
    """from then on the quorum is enough"""
    patience_s: float
    """from then on less than the quorum ends the run"""

    def __post_init__(self) -> None:
        if self.quorum < 0 or not 0 <= self.timeout_s <= self.patience_s:
            raise ValueError(f"a round waits 0 <= timeout_s <= patience_s for a quorum of at least 0, not {self}")


def decide(expected: Set[str], found: Set[str], refused: Set[str], elapsed_s: float, terms: Terms) -> Decision:
    """Whether a round closes after ``elapsed_s`` seconds.

    It closes when a message of everyone expected is there. With a quorum of them it closes as soon as nothing more can
    come, since those that are not there were ``refused`` for good, or after the timeout. With less it stalls after the
    patience. Messages of others than those expected do not count.
    """
    there = expected & found
    if there == expected:
        return Decision.CLOSE
    if len(there) >= terms.quorum and (elapsed_s >= terms.timeout_s or there | refused >= expected):
        return Decision.CLOSE
    return Decision.STALLED if elapsed_s >= terms.patience_s else Decision.WAIT


def until_next(elapsed_s: float, terms: Terms) -> float:
    """Seconds until time alone may change the decision; 0 after the patience."""
    moment = terms.timeout_s if elapsed_s < terms.timeout_s else terms.patience_s
    return max(moment - elapsed_s, 0.0)


class RoundStalled(RunStopped):
    """A round got fewer messages than its quorum, for longer than the run has patience."""

    def __init__(self, run: str, round: int, there: Iterable[str], missing: Mapping[str, str], quorum: int) -> None:
        """``missing``: why, for everyone expected who is not ``there``."""
        self.run, self.round = run, round
        self.there, self.missing = tuple(sorted(there)), dict(sorted(missing.items()))
        names = ", ".join(peer[:8] for peer in self.there) or "nobody"
        absent = ", ".join(f"{peer[:8]} ({why})" for peer, why in self.missing.items())
        came = f"{len(self.there)} of {len(self.there) + len(self.missing)} peers came"
        super().__init__(
            f"run {run[:8]}, round {round}: {came} and the quorum is {quorum}; there: {names}; missing: {absent}"
        )
