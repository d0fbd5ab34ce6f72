"""How long a run has waited: for others in a round, stragglers, machines that join, a disk with room.

Pure but for what it remembers; moments are monotonic seconds, and the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from planaria.config.schema import RunConfig
from planaria.control.coded import Stragglers
from planaria.control.obstacles import held_up
from planaria.control.rounds import quorate, waiting
from planaria.control.saving import resting
from planaria.control.staffing import lacking
from planaria.control.starts import Starts
from planaria.record import events as e
from planaria.record.state import RunState

AGAIN_S = 2.0
"""after the last save of a run has failed, until it is tried again"""
LEAST_S = 0.05
"""that a replica waits for the rest once those that are enough for it are heard; longer, if these have taken longer"""


class Wait(NamedTuple):
    """Of a replica, for others in a round."""

    who: tuple[int, int, bool]
    """as ``control/rounds.py`` says it"""
    began: float
    until: float


class Waits:
    """The waits of one run that the clock ends."""

    def __init__(self, config: RunConfig) -> None:
        self._patience_s, self._join_s = config.exchange.patience_s, config.fleet.join_s
        self._stop_s, self._stop = config.fleet.stop_s, math.inf
        """how long a stop waits for a step or a repair, and until when it does"""
        self._retry = math.inf
        """when a last save that failed is tried again"""
        self.impatient: dict[int, Wait] = {}
        """replica → how long it waits for others in a round"""
        self._stragglers = Stragglers()
        self._relays = math.inf
        """until when relays are waited for, of which none answers"""
        self._starts = Starts(config.fleet.start_timeout_s)
        self._lacking: tuple[float, int] = math.inf, 0
        """until when machines that join are waited for, and how many workers the run stands still for"""

    @property
    def due(self) -> list[float]:
        """When these waits end."""
        impatient = [wait.until for wait in self.impatient.values()]
        return [
            self._retry,
            self._lacking[0],
            self._relays,
            self._starts.due,
            self._stop,
            *impatient,
            *self._stragglers.due,
        ]

    def over(self, now: float, state: Callable[[], RunState]) -> Iterator[e.Event]:
        """What is to be told of waits that have been long enough; each may change the ``state``, and other waits."""
        if now >= self._lacking[0]:
            yield e.NobodyJoined(lacking=self._lacking[1])
        if now >= self._relays:
            yield e.RelaysGivenUp()
        if (slow := self._starts.report(now, state())) is not None:
            yield slow
        if now >= self._stop:
            self._stop = now + self._stop_s
            if detail := held_up(state()):
                yield e.StopOverdue(detail=detail)
        if now >= self._retry and (step := resting(state())) is not None:
            yield e.RetryDue(step=step)
        yield from self._stragglers.over(now, state)
        for number, wait in list(self.impatient.items()):
            if now < wait.until or self.impatient.get(number) is not wait:  # the one before may have begun another
                continue
            del self.impatient[number]
            if wait.who == waiting(state(), state().replicas[number]):
                yield e.PatienceOver(replica=wait.who[0], round=wait.who[1], meeting=wait.who[2])

    def note(self, now: float, run: RunState) -> e.Trouble | None:
        """Take down what is waited for now, of the replicas that have changed; what the user should hear of that."""
        self._stragglers.note(now, run)
        self._starts.note(now, run)
        stops = run.prompt and not (run.overdue or run.over)
        self._stop = min(self._stop, now + self._stop_s) if stops else math.inf
        changed = run.undecided
        for number in run.replicas if changed is None else changed:
            who = waiting(run, run.replicas[number])
            if who is None:
                self.impatient.pop(number, None)
                continue
            wait = self.impatient.get(number)
            if wait is None or wait.who != who:
                wait = self.impatient[number] = Wait(who, now, now + self._patience_s)
            if quorate(run, run.replicas[number]) and (until := now + max(LEAST_S, now - wait.began)) < wait.until:
                self.impatient[number] = wait._replace(until=until)
        return self._note_relays(now, run) or self._note_lacking(now, run)

    def note_save(self, now: float, run: RunState) -> None:
        """Take down whether a last save that failed is to be tried again."""
        self._retry = min(self._retry, now + AGAIN_S) if resting(run) is not None else math.inf

    def _note_relays(self, now: float, run: RunState) -> e.Trouble | None:
        """Report that the run stands still because no relay answers, when that begins."""
        waits = run.cut_off and not run.relays_given_up and any(replica.broken for replica in run.live.values())
        before, self._relays = self._relays, min(self._relays, now + self._join_s) if waits else math.inf
        if not waits or before < math.inf:
            return None
        named = ", ".join(f"{relay} ({error})" for relay, error in sorted(run.silent.items()))
        return e.Trouble(detail=f"no relay answers: {named}; waiting for {self._join_s:g} s (fleet.join_s)")

    def _note_lacking(self, now: float, run: RunState) -> e.Trouble | None:
        wanted = lacking(run)
        if wanted == self._lacking[1]:
            return None
        self._lacking = now + self._join_s if wanted else math.inf, wanted
        if not wanted:
            return None
        limit = f"for {self._join_s:g} s (fleet.join_s)"
        told = f"{wanted} workers are lacking; waiting {limit} for machines to join (`planaria join`)"
        return e.Trouble(detail=told)
