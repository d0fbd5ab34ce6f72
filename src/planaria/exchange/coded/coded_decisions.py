"""Controller rules for coded rounds: when a round ends, and which results count.

A round ends as soon as waiting gains nothing: all results are in, or they suffice (codes over one round). After
``slow`` times the fastest replica's time, the others are stragglers, and the round ends without them if the code
tolerates that; otherwise replicas are admitted one by one as they finish. Pure except for the timers in
:class:`Stragglers`, in monotonic seconds supplied by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState
from planaria.exchange.coded.coded_facts import CloseRound, RoundLate
from planaria.exchange.coded.coding import make_coding

MIN_S = 0.005
"""seconds granted to stragglers beyond the fastest, the travel time of a report"""


def close_round(run: RunState, replica: ReplicaState) -> CloseRound | None:
    """End the current round of the replica's nodes if it is complete."""
    coding, coded = make_coding(run.started.exchange), replica.coded
    if coding is None or coded is None or replica.broken or len(coded.counted) == coding.rounds:
        return None
    done = coded.done(replica.arrangement)
    if not coding.may_close(coded.counted, done, coded.late):
        return None
    return CloseRound(
        replica=replica.number,
        generation=replica.generation,
        step=replica.step,
        round=len(coded.counted),
        counted=sorted(done),
    )


class _Round(NamedTuple):
    generation: int
    step: int
    round: int


class Stragglers:
    """Timers of rounds: a round is late after ``slow`` times the time of its fastest replica."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[_Round, float]] = {}
        """replica → current round, and its start"""
        self._until: dict[int, tuple[float, float]] = {}
        """replica → deadline of its round, and the fastest replica's time"""

    @property
    def due(self) -> list[float]:
        """Times at which rounds become late."""
        return [until for until, _ in self._until.values()]

    def update(self, now: float, run: RunState) -> None:
        """Record the rounds in progress."""
        if (coding := make_coding(run.started.exchange)) is None:
            return
        for number, replica in run.live.items():
            current = _in_progress(run, replica)
            if current is None:
                self._begun.pop(number, None)
                self._until.pop(number, None)
                continue
            if number not in self._begun or self._begun[number][0] != current:
                self._begun[number] = current, now
                self._until.pop(number, None)
            coded = replica.coded
            assert coded is not None
            if number not in self._until and coded.done(replica.arrangement) & coding.busy(coded.counted):
                fastest = now - self._begun[number][1]
                until = math.inf if coded.late else now + max(MIN_S, (coding.slow - 1) * fastest)
                self._until[number] = until, fastest

    def late_rounds(self, now: float, state: Callable[[], RunState]) -> Iterator[RoundLate]:
        """Yield rounds that are late by now; each may change the ``state``."""
        for number, (until, fastest) in list(self._until.items()):
            if now < until:
                continue
            self._until[number] = math.inf, fastest
            current = _in_progress(state(), state().replicas[number])
            if current is not None and current == self._begun[number][0]:
                yield RoundLate(replica=number, **current._asdict(), fastest_s=fastest)


def _in_progress(run: RunState, replica: ReplicaState) -> _Round | None:
    coded, coding = replica.coded, make_coding(run.started.exchange)
    if replica.phase != "run" or coded is None or coding is None or len(coded.counted) == coding.rounds:
        return None
    return _Round(replica.generation, replica.step, len(coded.counted))
