"""Export of a run as a trace for https://ui.perfetto.dev and chrome://tracing (Trace Event Format).

Each machine is a process and each worker a thread with slices of its work. Another process holds the run's decisions,
recoveries and counters. Long runs have spans of selected steps only (``report/observe/run_observer.py``). The trace
is streamed from the log; memory does not grow with steps.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeVar

from planaria.common.atomic import replace_atomically, write_error
from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.report.run.naming import Naming, naming_of
from planaria.report.run.recoveries import recoveries
from planaria.report.run.recovery_timing import RecoveryTiming

FILE = "perfetto.json.gz"
RUN = 1
"""process of the run itself"""
OWN_MACHINES = "the run's own machines"
MAX_DRIFT_S = 1.0
"""largest difference of Unix time and monotonic clock that counts as drift of one clock"""
Item = TypeVar("Item")
TraceEvent = dict[str, Any]


def write_trace(folder: Path, to: Path | None = None) -> Path:
    """Write the trace of the run in ``folder`` and return its path; ``.gz`` names are compressed.

    :raises UserError: if the folder is not a run's, its log is broken, or the file cannot be written.
    """
    record = read_run(folder)
    path = to or folder / FILE
    try:
        with replace_atomically(path) as unfinished, _open_text(unfinished, path.suffix == ".gz") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(trace_events(record)):
                file.write((",\n" if number else "") + json.dumps(event, ensure_ascii=False))
            file.write("\n]}\n")
    except OSError as error:
        raise UserError(f"{write_error(path, error)}; use another file") from None
    return path


def _open_text(path: Path, compressed: bool) -> IO[str]:
    return gzip.open(path, "wt", 6, "utf-8") if compressed else path.open("w", encoding="utf-8")


def trace_events(record: RunRecord) -> Iterator[TraceEvent]:
    """Yield all trace events, in order per thread; times in microseconds since the start of the run."""
    clock, naming = TraceClock(record), naming_of(record)
    rows = _Rows()
    yield from rows.process(RUN, record.config.name)
    yield from _decision_events(record, clock, naming, rows)
    yield from _counter_events(record, clock)
    yield from _recovery_events(record, clock, rows)
    yield from _work_events(record, clock, naming, rows)


class _Rows:
    """Numbers processes and threads, and emits their names once."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[int, str], int] = {}
        self.new: list[TraceEvent] = []

    def machine(self, host: str) -> int:
        if host not in self._pids:
            self._pids[host] = RUN + 1 + len(self._pids)
            self.new += self.process(self._pids[host], host or OWN_MACHINES)
        return self._pids[host]

    def thread(self, pid: int, name: str) -> int:
        if (pid, name) not in self._tids:
            tid = self._tids[pid, name] = 1 + len(self._tids)
            self.new += [_name_event("thread_name", pid, tid, name), _sort_event("thread_sort_index", pid, tid, tid)]
        return self._tids[pid, name]

    def process(self, pid: int, name: str) -> list[TraceEvent]:
        return [_name_event("process_name", pid, 0, name), _sort_event("process_sort_index", pid, 0, pid)]

    def metadata_rows(self) -> list[TraceEvent]:
        """Return and clear the metadata events of new rows."""
        new, self.new = self.new, []
        return new


def _name_event(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _sort_event(kind: str, pid: int, tid: int, index: int) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"sort_index": index}}


def _instant_event(name: str, pid: int, tid: int, ns: int, **args: Any) -> TraceEvent:
    return {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": ns / 1000, "args": args}


def _decision_events(record: RunRecord, clock: TraceClock, naming: Naming, rows: _Rows) -> Iterator[TraceEvent]:
    """Yield events of the run as a whole."""
    tid, part = rows.thread(RUN, "decisions"), -1
    yield from rows.metadata_rows()
    for t, fact in record.landmarks:
        part += isinstance(fact, e.RunStarted)
        if (shown := _instant_of(fact, naming)) is not None:
            yield _instant_event(shown[0], RUN, tid, clock.ns(t, max(part, 0)), **shown[1])


def _instant_of(fact: e.Event | d.Decision, naming: Naming) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a fact's instant event, if it has one."""
    match fact:
        case e.RunStarted():
            return "resumed" if fact.first_step else "started", {"step": fact.first_step, "replicas": fact.replicas}
        case d.Form():
            return f"formed: {fact.outcome}", {
                "replica": fact.replica, "generation": fact.generation, "step": fact.step,
            }  # fmt: skip
        case d.Seal():
            return "checkpoint", {"step": fact.step, "folder": fact.folder}
        case d.Disband() | d.ReplicaRestarted():
            return fact.kind, {"replica": fact.replica}
        case e.HostJoined() | e.HostLeft():
            return fact.kind.replace("_", " "), {"host": fact.host, "detail": fact.detail}
        case e.EdgeBroken():
            return f"edge {naming.edge(fact.node, fact.peer)} broken", {"worker": fact.worker, "detail": fact.detail}
        case e.Trouble():
            return "trouble", {"detail": fact.detail}
        case d.Finish():
            return fact.outcome, {"reason": fact.reason}
    return None


def _counter_events(record: RunRecord, clock: TraceClock) -> Iterator[TraceEvent]:
    for part, metric in clock.in_parts(record.trained, lambda metric: metric.t):
        for name, number in (("loss", metric.loss), ("tokens per second", metric.tokens_per_s)):
            place = {"pid": RUN, "ts": clock.ns(metric.t, part) / 1000}
            yield {"ph": "C", "name": name, **place, "args": {name: number}}


def _recovery_events(record: RunRecord, clock: TraceClock, rows: _Rows) -> Iterator[TraceEvent]:
    """Yield recoveries as separate async slices with their phases, since they may overlap."""
    events: list[TraceEvent] = []
    for number, (part, timing) in enumerate(clock.in_parts(recoveries(record), lambda timing: timing.lost_t)):
        tid = rows.thread(RUN, f"recoveries of replica {timing.replica}")
        same = {"cat": "recovery", "id": number, "pid": RUN, "tid": tid}
        events += ({**event, **same} for event in _phase_events(timing, lambda t, p=part: clock.ns(t, p)))  # type: ignore[misc]
    yield from rows.metadata_rows()
    yield from sorted(events, key=lambda event: event["ts"])


def _phase_events(timing: RecoveryTiming, ns: Callable[[float], int]) -> Iterator[TraceEvent]:
    moments = [
        ("notice", timing.fault_t), ("decide", timing.lost_t), ("relink, transfer, rebuild", timing.formed_t),
        ("redo", timing.linked_t), ("", timing.finished_t),
    ]  # fmt: skip
    moments_ns: list[tuple[str, int]] = []
    for name, t in moments:
        if t is not None:
            moments_ns.append((name, max(ns(t), moments_ns[-1][1] if moments_ns else ns(t))))
    args = {
        "step": timing.step, "outcome": timing.outcome, "causes": list(timing.causes), "workers": list(timing.workers),
        "generation": timing.generation, "relink_s": timing.relink, "transfer_s": timing.transfer,
        "rebuild_s": timing.rebuild, "transfer_bytes": timing.transfer_bytes,
    }  # fmt: skip
    yield {"ph": "b", "name": f"recovery: {timing.where}", "ts": moments_ns[0][1] / 1000, "args": args}
    for (name, start), (_, end) in pairwise(moments_ns):
        yield {"ph": "b", "name": name, "ts": start / 1000}
        yield {"ph": "e", "name": name, "ts": end / 1000}
    yield {"ph": "e", "name": f"recovery: {timing.where}", "ts": moments_ns[-1][1] / 1000}


def _work_events(record: RunRecord, clock: TraceClock, naming: Naming, rows: _Rows) -> Iterator[TraceEvent]:
    """Yield the workers' work, faults and losses."""
    hosts, faults = _faults(record, clock)
    busy_until: dict[tuple[int, str], list[int]] = defaultdict(list)
    for _, work in record.worked:
        part = clock.part_of(work.generation)
        pid = rows.machine(hosts.get((part, work.worker), ""))
        lanes = busy_until[pid, work.worker]
        for span in sorted(work.spans, key=lambda span: span.start):
            start, end = clock.ns(span.start, part), clock.ns(span.end, part)
            lane = next((n for n, until in enumerate(lanes) if until <= start), len(lanes))
            lanes[lane : lane + 1] = [end]
            yield from _fault_events(faults[part, work.worker], rows, pid, start) if not lane else ()
            tid = rows.thread(pid, work.worker + (f" in parallel {lane}" if lane else ""))
            yield from rows.metadata_rows()
            yield _slice_event(work, span, naming, pid, tid, start, end)
    for (part, worker), left in faults.items():
        yield from _fault_events(left, rows, rows.machine(hosts.get((part, worker), "")), None)


Faults = deque[tuple[int, str, str, dict[str, Any]]]
"""nanoseconds, worker, name, arguments; in order"""


def _faults(record: RunRecord, clock: TraceClock) -> tuple[dict[tuple[int, str], str], dict[tuple[int, str], Faults]]:
    """Return machines, and faults and losses, by part of the run and worker."""
    hosts: dict[tuple[int, str], str] = {}
    faults: dict[tuple[int, str], Faults] = defaultdict(deque)
    part = -1
    for t, fact in record.landmarks:
        part += isinstance(fact, e.RunStarted)
        if isinstance(fact, d.Spawn):
            hosts[part, fact.worker] = fact.host
        elif isinstance(fact, e.FaultInjected):
            args = {"step": fact.step, "moment": fact.moment}
            faults[part, fact.worker].append((clock.ns(t, max(part, 0)), fact.worker, fact.signal, args))
        elif isinstance(fact, e.WorkerLost):
            args = {"cause": fact.cause, "detail": fact.detail}
            faults[part, fact.worker].append((clock.ns(t, max(part, 0)), fact.worker, "lost", args))
    return hosts, faults


def _fault_events(faults: Faults, rows: _Rows, pid: int, until: int | None) -> Iterator[TraceEvent]:
    """Yield a worker's faults up to ``until``; all if None."""
    while faults and (until is None or faults[0][0] <= until):
        ns, worker, name, args = faults.popleft()
        tid = rows.thread(pid, worker)
        yield from rows.metadata_rows()
        yield _instant_event(name, pid, tid, ns, **args)


def _slice_event(
    work: e.WorkReport, span: e.Span, naming: Naming, pid: int, tid: int, start: int, end: int
) -> TraceEvent:
    numbers: Iterable[tuple[str, int]] = (("microbatch", span.microbatch), ("hop", span.hop))
    args = {
        "step": work.step, "stage": work.stage, "replica": naming.replica(work.node), "generation": work.generation,
        **{name: number for name, number in numbers if number >= 0},
    }  # fmt: skip
    cat = "dropped" if work.dropped else "work"
    place = {"pid": pid, "tid": tid, "ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": span.action, "cat": cat, **place, "args": args}


class TraceClock:
    """Converts times of a record to nanoseconds since the start of the run, on one clock for all parts.

    Each part has its machine's monotonic clock, which restarts with the machine.
    """

    def __init__(self, record: RunRecord) -> None:
        self._starts = [t for t, _ in record.starts]
        self._generations = [started.first_generation for _, started in record.starts]
        self._offsets: list[float] = []
        """seconds to add to each part's clock"""
        last, epoch = 0.0, 0.0
        for t, fact in record.landmarks:
            if isinstance(fact, e.RunStarted):
                epoch = epoch if self._offsets else fact.wall_time - t
                offset = fact.wall_time - t - epoch
                offset = 0.0 if abs(offset) <= MAX_DRIFT_S else offset
                self._offsets.append(max(offset, last - t) if self._offsets else 0.0)
            last = t + (self._offsets[-1] if self._offsets else 0.0)
        self._zero = self._starts[0] if self._starts else 0.0

    def ns(self, t: float, part: int) -> int:
        """Convert a time in a part of the run."""
        offset = self._offsets[part] if self._offsets else 0.0
        return round(1e9 * (t - self._zero + offset))

    def part_of(self, generation: int) -> int:
        """Return the part of the run in which a generation was formed."""
        return max(0, bisect_left(self._generations, generation) - 1)

    def in_parts(self, items: Iterable[Item], t: Callable[[Item], float]) -> Iterator[tuple[int, Item]]:
        """Yield items in log order with their part; a clock that goes back starts another part."""
        part, before = 0, float("-inf")
        for item in items:
            now = t(item)
            while part + 1 < len(self._starts) and self._is_later(part, before, now):
                part, before = part + 1, float("-inf")
            before = now
            yield part, item

    def _is_later(self, part: int, before: float, now: float) -> bool:
        start, following = self._starts[part], self._starts[part + 1]
        return now < before or now < start or (following >= start and now >= following)
