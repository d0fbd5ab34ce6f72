"""Deadlines of the controller: rounds, stragglers, joining machines, full disks, slow starts, stuck workers.

Each class records when a wait began. It reads no clock: callers pass monotonic seconds. Silence of workers is judged in
``runtime/fleet/heartbeats.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from planaria.common.address import Address
from planaria.config.schema import RunConfig
from planaria.control.checkpoint_decisions import save_awaiting_retry
from planaria.control.facts import events as e
from planaria.control.facts.events import Heartbeat, WorkReport
from planaria.control.rounds import has_quorum, round_wait_key
from planaria.control.state.replica import ReplicaState
from planaria.control.state.roster import identity_order
from planaria.control.state.run import RunState
from planaria.control.worker_assignment import workers_to_join
from planaria.exchange.coded.coded_decisions import Stragglers

_MAX_PROBES = 3
"""maximum number of addresses to probe; each probe may block briefly"""


def stop_blockers(run: RunState) -> str:
    """Return the activities that delay a stop; empty if there are none, or only background writes. Pure."""
    return "; ".join(filter(None, (_blocker(run, replica) for replica in run.live.values())))


def _blocker(run: RunState, replica: ReplicaState) -> str:
    whose = f" of replica {replica.number}" if run.settings.most_replicas > 1 else ""
    of = replica.arrangement.stage
    late = ", ".join(str(of[node]) for node, worker in sorted(replica.holders.items()) if worker in replica.waiting)
    match replica.phase:
        case "run" | "evaluate":
            return f"step {replica.step}{whose} was dropped: no result from stages {late}"
        case "link":
            return f"the edges{whose} were not open: no report from stages {late}"
        case "idle" | "replan" if not replica.whole and not replica.unrecoverable_reason:
            return f"no worker had the state of stages {', '.join(map(str, _missing(replica)))}{whose}"
    return f"round {replica.open_round.round}{whose} was not settled" if replica.open_round else ""


def _missing(replica: ReplicaState) -> list[int]:
    return sorted(set(replica.arrangement.stages) - set(replica.stateful.stages))


def underlying_error(run: RunState, reported: Mapping[str, str], probe: Callable[[str], str]) -> str:
    """Return the underlying error, if known: ``reported`` by a worker, of a broken edge, or of a silent worker.

    :param probe: returns why an address (HOST:PORT) is unreachable; empty if it is reachable.
    """
    for worker in _awaited(run):
        if reported.get(worker):
            return f"worker {worker}: {reported[worker]}"
    if trouble := next((replica.last_edge_failure for replica in run.live.values() if replica.last_edge_failure), ""):
        return trouble
    addresses = [at for worker in _awaited(run) if (at := Address.parse(run.workers[worker].at).outside)]
    return next(filter(None, map(probe, addresses[:_MAX_PROBES])), "")


def _awaited(run: RunState) -> Iterator[str]:
    for replica in run.live.values():
        yield from sorted(replica.waiting)


_FIRST_S, _MAX_S = 10.0, 60.0
"""seconds from a worker's start to the first report, and the longest pause between reports; pauses double"""


class StartDeadlines:
    """Starts of one run's workers."""

    def __init__(self, limit_s: float) -> None:
        """:param limit_s: ``fleet.start_timeout_s``."""
        self._limit_s, self._since = limit_s, dict[str, float]()
        self.due, self._pause_s = math.inf, _FIRST_S
        """time of the next :meth:`report`"""

    def note(self, now: float, run: RunState) -> None:
        """Record which workers are starting."""
        starting = run.roster.starting if run.vacancies and not run.over else ()
        if self._since.keys() == set(starting):
            return
        if not self._since.keys() & set(starting):
            self.due, self._pause_s = now + _FIRST_S, _FIRST_S
        self._since = {worker: self._since.get(worker, now) for worker in starting}
        if not self._since:
            self.due = math.inf

    def report(self, now: float, run: RunState) -> e.WorkersStarting | None:
        """Return the workers that the run waits for, if a report is due."""
        if now < self.due:
            return None
        self._pause_s = min(2 * self._pause_s, _MAX_S)
        self.due = now + self._pause_s
        waited_s = now - min(self._since.values())
        names, ready = sorted(self._since, key=identity_order), len(run.spares)
        return e.WorkersStarting(workers=names, ready=ready, waited_s=waited_s, limit_s=self._limit_s)


SAVE_RETRY_S = 2.0
"""seconds between a failed last save of a run and the retry"""
MIN_STRAGGLER_WAIT_S = 0.05
"""minimum wait for further updates after enough have arrived; longer if these took longer"""


class RoundWait(NamedTuple):
    """A replica's wait for others in a round."""

    key: tuple[int, int, bool]
    """key of the wait, in the form of ``control/rounds.py``"""
    began: float
    until: float


class RoundWaits:
    """Timed waits of one run."""

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
        yield from self._stragglers.expired(now, state)
        for number, wait in list(self.round_waits.items()):
            if (
                now < wait.until or self.round_waits.get(number) is not wait
            ):  # the previous event may have started another wait
                continue
            del self.round_waits[number]
            if wait.key == round_wait_key(state(), state().replicas[number]):
                yield e.RoundWaitExpired(replica=wait.key[0], round=wait.key[1], in_round=wait.key[2])

    def note(self, now: float, run: RunState) -> e.Trouble | None:
        """Record current waits of the replicas that changed; return a warning for the user, if any."""
        self._stragglers.note(now, run)
        self._starts.note(now, run)
        stops = run.stops_before_repair and not (run.overdue or run.over)
        self._stop = min(self._stop, now + self._stop_s) if stops else math.inf
        changed = run.undecided
        for number in run.replicas if changed is None else changed:
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
        return self._note_relays(now, run) or self._note_lacking(now, run)

    def note_save(self, now: float, run: RunState) -> None:
        """Record whether a failed last save will be retried."""
        self._retry = min(self._retry, now + SAVE_RETRY_S) if save_awaiting_retry(run) is not None else math.inf

    def _note_relays(self, now: float, run: RunState) -> e.Trouble | None:
        """Return a warning when the run starts to wait because no relay answers."""
        waits = run.cut_off and not run.relays_given_up and any(replica.broken for replica in run.live.values())
        before, self._relays = self._relays, min(self._relays, now + self._join_s) if waits else math.inf
        if not waits or before < math.inf:
            return None
        named = ", ".join(f"{relay} ({error})" for relay, error in sorted(run.unreachable_relays.items()))
        return e.Trouble(detail=f"no relay answers: {named}; waiting for {self._join_s:g} s (fleet.join_s)")

    def _note_lacking(self, now: float, run: RunState) -> e.Trouble | None:
        wanted = workers_to_join(run)
        if wanted == self._missing_workers_wait[1]:
            return None
        self._missing_workers_wait = now + self._join_s if wanted else math.inf, wanted
        if not wanted:
            return None
        limit = f"for {self._join_s:g} s (fleet.join_s)"
        text = f"{wanted} workers are missing; waiting {limit} for machines to join (`planaria join`)"
        return e.Trouble(detail=text)


DISK = ("read", "write")
_SPANS = {"optimizer": "commit", "save": "write", "rebuild": "rebuild"}
"""names of spans that differ from those of actions"""
_DURATION_FACTOR = 10
"""multiple of its longest duration that an action may take"""
_IDLE_CPU_SHARE = 0.02
"""share of processor time below which a main thread is not computing"""
_DURATION_DECAY = 0.995
"""decay of the longest duration from one span of its kind to the next: a run may become faster"""
_COMPILING_S = 600.0
"""seconds allowed for a stage's first passes if they are compiled"""


class WorkerDeadlines:
    """Deadlines of one run's workers."""

    def __init__(self, config: RunConfig) -> None:
        self._fleet, self._compiles = config.fleet, config.train.compile
        self._longest: dict[str, float] = {}
        self._asked: dict[str, tuple[float, frozenset[str]]] = {}
        """worker → time of its last order, and the workers with the same order"""
        self._writers: dict[str, frozenset[str]] = {}
        """worker → workers ordered with it to write in the background, the last time"""

    def record_order(self, t: float, workers: Collection[str], to_write: bool = False) -> None:
        """Record an order that these workers must answer; background writes may take longer."""
        together = frozenset(workers)
        self._asked |= dict.fromkeys(workers, (t, together))
        if to_write:
            self._writers |= dict.fromkeys(workers, together)

    def record_durations(self, worked: WorkReport) -> None:
        """Record the durations of a worker's actions, in seconds."""
        for span in worked.spans:
            name = _SPANS.get(span.action, span.action)
            self._longest[name] = max(span.end - span.start, _DURATION_DECAY * self._longest.get(name, 0.0))

    def limit_s(self, doing: str) -> float:
        """Return the seconds that a main thread may spend on this activity without using a processor."""
        floor = self._fleet.disk_timeout_s if doing in DISK else self._fleet.timeout_s
        if self._compiles and doing in ("forward", "backward") and doing not in self._longest:
            floor = max(floor, _COMPILING_S)
        return max(floor, _DURATION_FACTOR * self._longest.get(doing, 0.0))

    def overdue_write_reason(self, worker: str, beat: Heartbeat, writing: Collection[str]) -> str:
        """Return why ``worker``, which writes in the background, counts as dead; empty if it does not.

        A disk that blocks all ``writing`` workers is tolerated, as in :meth:`overdue_action_reason`.
        """
        together = self._writers.get(worker, frozenset())
        limit = self.limit_s("write") * (_DURATION_FACTOR if together and together <= set(writing) else 1)
        if beat.checkpoint_being_written < 0 or worker not in writing or beat.writing_s <= limit:
            return ""
        return (
            f"its file of checkpoint {beat.checkpoint_being_written} has not been written for "
            f"{beat.writing_s:.1f} s (limit {limit:g} s)"
        )

    def overdue_action_reason(self, t: float, worker: str, beat: Heartbeat, awaited: Collection[str]) -> str:
        """Return why ``worker`` counts as dead; empty if it does not.

        :param awaited: workers of its replica that have not answered their orders yet.
        """
        asked_at, together = self._asked.get(worker, (t, frozenset()))
        took, limit = beat.action_s, self._fleet.timeout_s
        if beat.waiting:  # it waits for others that may be stuck, or for orders
            took = min(took, t - asked_at) if beat.doing == "orders" and worker in awaited else 0.0
        else:
            # A disk that blocks all of them is tolerated: declaring all dead would lose states that only they have.
            together_stuck = beat.doing in DISK and together <= set(awaited)
            patient = together_stuck or beat.cpu_s > _IDLE_CPU_SHARE * beat.action_s
            limit = self.limit_s(beat.doing) * (_DURATION_FACTOR if patient else 1)
        if took <= limit:
            return ""
        where = beat.doing if beat.microbatch < 0 else f"{beat.doing} of microbatch {beat.microbatch}"
        return f"its main thread has been in {where}, step {beat.step}, for {took:.1f} s (limit {limit:g} s)"
