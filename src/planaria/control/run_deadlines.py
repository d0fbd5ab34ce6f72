"""Deadlines of a run: broken edges, rounds, stragglers, joining machines, full disks, slow starts.

Each class records when a wait began. It reads no clock: callers pass monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from planaria.config.schema import RunConfig
from planaria.control.checkpoint_decisions import save_awaiting_retry
from planaria.control.facts import events as e
from planaria.control.rounds import has_quorum, round_wait_key
from planaria.control.spares import workers_to_join
from planaria.control.state.roster import identity_order
from planaria.control.state.run import RunState
from planaria.control.stop_reasons import stop_blockers
from planaria.exchange.coded.coded_decisions import Stragglers

_FIRST_REPORT_S = 10.0
"""seconds from a worker's start to the first report"""
_MAX_REPORT_PAUSE_S = 60.0
"""maximum pause between reports, in seconds; pauses double"""
SAVE_RETRY_S = 2.0
"""seconds between a failed last save of a run and the retry"""
MIN_STRAGGLER_WAIT_S = 0.05
"""minimum wait for further updates after enough have arrived; longer if these took longer"""

GRACE_S = 0.5
"""seconds after a broken edge for a death notice about one of its ends, before the edge itself is given up"""


class BrokenEdges:
    """Broken edges that are not given up yet.

    A broken edge is handled in this order:

    1. Both ends notice it on their sockets (``runtime/transport/edge.py``) and report ``EdgeBroken``.
    2. Usually one of them is dead. The fleet has :data:`GRACE_S` to report ``WorkerLost``.
    3. If it does not, the edge itself failed: ``GraceExpired``.
    4. Either event changes the run's state (``control/apply_membership.py``).
    5. A new generation is decided (``control/formation.py``): ``Form``.
    6. The workers connect again (``runtime/worker/worker_edges.py``), and the step is repeated.
    """

    def __init__(self) -> None:
        self._until: dict[int, tuple[float, int]] = {}
        """replica → when an edge will be given up, and its generation"""

    def record(self, t: float, broken: e.EdgeBroken, run: RunState) -> None:
        """Record that an edge broke at ``t``; ``run`` already includes it."""
        replica = run.replica_of(broken.worker)
        if replica is not None and replica.broken_edges:
            _, generation = self._until.get(replica.number, (0.0, -1))
            if generation != replica.generation:
                self._until[replica.number] = (t + GRACE_S, replica.generation)

    @property
    def due(self) -> list[float]:
        """Times at which to call :meth:`expired`."""
        return [until for until, _ in self._until.values()]

    def expired(self, now: float, run: RunState) -> list[e.GraceExpired]:
        """Return the replicas whose grace expired, each once; not if they have a new generation."""
        over = [(number, generation) for number, (until, generation) in self._until.items() if now >= until]
        for number, _ in over:
            del self._until[number]
        return [e.GraceExpired(replica=n, generation=g) for n, g in over if g == run.replicas[n].generation]


class StartDeadlines:
    """Starts of one run's workers."""

    def __init__(self, limit_s: float) -> None:
        """:param limit_s: ``fleet.start_timeout_s``."""
        self._limit_s, self._since = limit_s, dict[str, float]()
        self.due, self._pause_s = math.inf, _FIRST_REPORT_S
        """time of the next :meth:`report`"""

    def update(self, now: float, run: RunState) -> None:
        """Record which workers are starting."""
        starting = run.roster.starting if run.vacancies and not run.over else ()
        if self._since.keys() == set(starting):
            return
        if not self._since.keys() & set(starting):
            self.due, self._pause_s = now + _FIRST_REPORT_S, _FIRST_REPORT_S
        self._since = {worker: self._since.get(worker, now) for worker in starting}
        if not self._since:
            self.due = math.inf

    def report(self, now: float, run: RunState) -> e.WorkersStarting | None:
        """Return the workers that the run waits for, if a report is due."""
        if now < self.due:
            return None
        self._pause_s = min(2 * self._pause_s, _MAX_REPORT_PAUSE_S)
        self.due = now + self._pause_s
        waited_s = now - min(self._since.values())
        names, ready = sorted(self._since, key=identity_order), len(run.spares)
        return e.WorkersStarting(workers=names, ready=ready, waited_s=waited_s, limit_s=self._limit_s)


class RoundWait(NamedTuple):
    """A replica's wait for others in a round."""

    key: tuple[int, int, bool]
    """key of the wait, in the form of ``control/rounds.py``"""
    began: float
    until: float


class RunDeadlines:
    """Deadlines of one run's waits."""

    def __init__(self, config: RunConfig) -> None:
        # Cooperative workers are idle only after all messages have arrived, so no timeout is needed.
        self._patience_s = math.inf if config.engine == "inline" else config.exchange.patience_s
        self._join_s = config.fleet.join_s
        self._stop_s, self._stop = config.fleet.stop_s, math.inf
        """duration and end of a stop's wait for a step or a repair"""
        self._retry = math.inf
        """time of the retry of a failed last save"""
        self.round_waits: dict[int, RoundWait] = {}
        """replica → its wait for others in a round"""
        self._stragglers = Stragglers()
        self._relays = math.inf
        """until when the run waits for silent relays"""
        self._starts = StartDeadlines(config.fleet.start_timeout_s)
        self._missing_workers_wait: tuple[float, int] = math.inf, 0
        """until when the run waits for machines to join, and the number of missing workers"""

    @property
    def due(self) -> list[float]:
        """Times at which these waits end."""
        impatient = [wait.until for wait in self.round_waits.values()]
        return [
            self._retry,
            self._missing_workers_wait[0],
            self._relays,
            self._starts.due,
            self._stop,
            *impatient,
            *self._stragglers.due,
        ]

    def expired(self, now: float, state: Callable[[], RunState]) -> Iterator[e.Event]:
        """Yield events of expired waits; each may change the ``state`` and other waits."""
        if now >= self._missing_workers_wait[0]:
            yield e.JoinTimedOut(missing_workers=self._missing_workers_wait[1])
        if now >= self._relays:
            yield e.RelaysGivenUp()
        if (slow := self._starts.report(now, state())) is not None:
            yield slow
        if now >= self._stop:
            self._stop = now + self._stop_s
            if detail := stop_blockers(state()):
                yield e.StopOverdue(detail=detail)
        if now >= self._retry and (step := save_awaiting_retry(state())) is not None:
            yield e.RetryDue(step=step)
        yield from self._stragglers.late_rounds(now, state)
        for number, wait in list(self.round_waits.items()):
            if (
                now < wait.until or self.round_waits.get(number) is not wait
            ):  # the previous event may have started another wait
                continue
            del self.round_waits[number]
            if wait.key == round_wait_key(state(), state().replicas[number]):
                yield e.RoundWaitExpired(replica=wait.key[0], round=wait.key[1], in_round=wait.key[2])

    def update(self, now: float, run: RunState) -> e.Trouble | None:
        """Record current waits of the replicas that changed; return a warning for the user, if any."""
        self._stragglers.update(now, run)
        self._starts.update(now, run)
        stops = run.stops_before_repair and not (run.overdue or run.over)
        self._stop = min(self._stop, now + self._stop_s) if stops else math.inf
        for number in sorted(run.undecided):
            key = round_wait_key(run, run.replicas[number])
            if key is None:
                self.round_waits.pop(number, None)
                continue
            wait = self.round_waits.get(number)
            if wait is None or wait.key != key:
                wait = self.round_waits[number] = RoundWait(key, now, now + self._patience_s)
            if self._patience_s == math.inf or not has_quorum(run, run.replicas[number]):
                continue
            if (until := now + max(MIN_STRAGGLER_WAIT_S, now - wait.began)) < wait.until:
                self.round_waits[number] = wait._replace(until=until)
        return self._update_relay_wait(now, run) or self._update_missing_workers(now, run)

    def update_save_retry(self, now: float, run: RunState) -> None:
        """Record whether a failed last save will be retried."""
        self._retry = min(self._retry, now + SAVE_RETRY_S) if save_awaiting_retry(run) is not None else math.inf

    def _update_relay_wait(self, now: float, run: RunState) -> e.Trouble | None:
        """Return a warning when the run starts to wait because no relay answers."""
        waits = run.cut_off and not run.relays_given_up and any(replica.broken for replica in run.live.values())
        before, self._relays = self._relays, min(self._relays, now + self._join_s) if waits else math.inf
        if not waits or before < math.inf:
            return None
        named = ", ".join(f"{relay} ({error})" for relay, error in sorted(run.unreachable_relays.items()))
        return e.Trouble(detail=f"no relay answers: {named}; waiting for {self._join_s:g} s (fleet.join_s)")

    def _update_missing_workers(self, now: float, run: RunState) -> e.Trouble | None:
        wanted = workers_to_join(run)
        if wanted == self._missing_workers_wait[1]:
            return None
        self._missing_workers_wait = now + self._join_s if wanted else math.inf, wanted
        if not wanted:
            return None
        limit = f"for {self._join_s:g} s (fleet.join_s)"
        workers = "1 worker is" if wanted == 1 else f"{wanted} workers are"
        return e.Trouble(detail=f"{workers} missing; waiting {limit} for machines to join (`planaria join`)")
