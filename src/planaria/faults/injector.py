"""Execute a trace of faults on the live fleet."""

from __future__ import annotations

import math
import random
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from planaria.config.names import WorkerId
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import InjectFault
from planaria.control.state.run import RunState
from planaria.faults.trace import Fault, Trace, injection_order, is_pending, moments_before_commit
from planaria.runtime.checkpoint.stage_file import stage_file
from planaria.runtime.checkpoint.store import CheckpointStore, replica_folder
from planaria.runtime.fleet.base import Fleet


class TraceInjector:
    """Announces faults to the workers at the nodes (as stages) of a trace.

    A fault waits for the first step at or after its own that has its moment, so a rolled-back or repeated step is
    injected once. Kills in one replica's step follow each other by moment, each after recovery from the last; those of
    the same moment and offset are injected together. So the same trace hits the same actions in every run.
    """

    def __init__(self, trace: Trace, fleet: Fleet, checkpoints: Path, first_step: int = 0) -> None:
        """:param first_step: faults that ended before it belong to an earlier part of the run."""
        self._fleet, self._checkpoints = fleet, checkpoints
        numbered = [(number, fault) for number, fault in enumerate(trace.faults) if is_pending(fault, first_step)]
        self._waiting = sorted(numbered, key=_sort_key)
        self._next = len(trace.faults)
        self._armed: dict[int, tuple[Fault, WorkerId]] = {}
        """number → announced fault, and the worker that will inject it"""
        self._simultaneous: dict[int, list[tuple[int, Fault]]] = defaultdict(list)
        """number of a kill → kills injected with it"""
        self._resumptions: list[tuple[float, WorkerId]] = []
        self._slow_hosts: list[tuple[str, InjectFault, float]] = []
        """machine, fault of its workers, and its end (monotonic seconds)"""

    def add(self, fault: Fault) -> None:
        """Add a fault, to be injected at the next opportunity."""
        self._wait(self._next, fault)
        self._next += 1

    def on_decision(self, decision: d.Decision, state: RunState) -> list[e.FaultInjected]:
        """Arm the faults whose moment this decision begins, before its orders are sent."""
        match decision:
            case d.RunStep(mode="train"):
                self._requeue_simultaneous()
                settings = state.started.exchange
                agreed = settings.replicas > 1 and state.exchange.exchanges_gradients and not settings.coded
                workers = _executing_workers(state, decision.replica)
                return self._arm(decision.step, state, workers, *moments_before_commit(agreed))
            case d.Commit():
                return self._arm(decision.step, state, _executing_workers(state, decision.replica), "commit")
            case d.Save():
                return self._arm(decision.step, state, _executing_workers(state, decision.replica), "save")
            case d.Settle():
                step = max(state.replicas[number].step for number in decision.members)
                return self._arm(step, state, _executing_workers(state, *decision.members), "settle")
            case d.Form():
                holders = _executing_workers(state, decision.replica)
                endpoints = {node: holders[node] for node in _transferring_nodes(decision) & holders.keys()}
                return self._arm(decision.step, state, endpoints, "transfer") + self._arm(
                    decision.step, state, holders, "link"
                )
        return []

    def on_event(self, t: float, event: e.Event, state: RunState) -> list[e.FaultInjected]:
        """Inject the kills simultaneous with the event's fault; re-queue the faults of a worker lost otherwise."""
        if isinstance(event, e.FaultInjected) and event.number in self._armed:
            fault, target = self._armed.pop(event.number)
            if fault.signal == "stop" and fault.resume_after_s is not None:
                self._resumptions.append((t + fault.resume_after_s, target))
            return [self._kill(*kill, event.step, state) for kill in self._simultaneous.pop(event.number, ())]
        if isinstance(event, e.WorkerJoined):
            self._slow_new_worker(event.worker, state)
        if isinstance(event, e.WorkerLost):
            for number, (fault, target) in list(self._armed.items()):
                if target == (event.worker, event.incarnation):
                    del self._armed[number]
                    self._wait(number, fault)
        return []

    def resume_due(self, t: float) -> None:
        """Resume stopped workers that are due."""
        for due in [due for due in self._resumptions if due[0] <= t]:
            self._resumptions.remove(due)
            self._fleet.signal(*due[1], signal.SIGCONT)

    def next_due(self) -> float | None:
        """Return the time at which the next stopped worker resumes, in monotonic seconds."""
        return min([due[0] for due in self._resumptions], default=None)

    def _arm(self, step: int, state: RunState, holders: Mapping[int, str], *moments: str) -> list[e.FaultInjected]:
        """Announce the faults of these moments to the workers in ``holders``: node → worker."""
        due = [
            entry
            for entry in self._waiting
            if entry[1].step <= step and entry[1].moment in moments and entry[1].stage in holders
        ]
        done = []
        killing = [fault for fault, _ in self._armed.values() if fault.signal == "kill"]
        first: tuple[int, Fault] | None = None
        for number, fault in due:
            if fault.signal == "flip":
                done += self._flip(number, fault, holders[fault.stage], step)
            elif fault.signal == "kill" and first is not None and injection_order(first[1]) == injection_order(fault):
                self._waiting.remove((number, fault))
                self._simultaneous[first[0]].append((number, fault))
            elif fault.signal != "kill" or (first is None and not any(f.stage in holders for f in killing)):
                first = (number, fault) if fault.signal == "kill" else first
                self._announce(number, fault, holders[fault.stage], state)
        return done

    def _announce(self, number: int, fault: Fault, worker: str, state: RunState) -> None:
        """Announce a fault to a worker."""
        self._waiting.remove((number, fault))
        self._armed[number] = fault, WorkerId(worker, state.workers[worker].incarnation)
        injection = InjectFault(
            number=number,
            signal=fault.signal,
            moment=fault.moment,
            offset=fault.offset,
            seconds=fault.resume_after_s,
            strength=fault.strength,
            attack=fault.attack,
            until=fault.until,
            peer=fault.peer,
        )
        if fault.signal != "slow_host":
            self._send(worker, injection)
            return
        host, lasts_s = state.workers[worker].host, math.inf if injection.seconds is None else injection.seconds
        self._slow_hosts.append((host, injection, time.monotonic() + lasts_s))
        for name, record in state.workers.items():
            if record.host == host and record.status in ("spare", "member"):
                self._send(name, injection)

    def _slow_new_worker(self, worker: str, state: RunState) -> None:
        """Slow a worker that was started on a slow machine."""
        now = time.monotonic()
        for host, injection, until in self._slow_hosts:
            if host == state.workers[worker].host and now < until:
                left = None if injection.seconds is None else until - now
                self._send(worker, injection.model_copy(update={"seconds": left}))

    def _send(self, worker: str, injection: InjectFault) -> None:
        self._fleet.send(worker, injection.model_dump_json().encode())

    def _kill(self, number: int, fault: Fault, step: int, state: RunState) -> e.FaultInjected:
        """Kill the current worker of the fault's node, when a simultaneous fault is injected at another worker."""
        worker = state.holders[fault.stage]
        self._fleet.signal(worker, state.workers[worker].incarnation, signal.SIGKILL)
        return e.FaultInjected(
            worker=worker, node=fault.stage, signal="SIGKILL", step=step, moment=fault.moment, number=number
        )

    def _requeue_simultaneous(self) -> None:
        """Re-queue simultaneous kills whose first worker was lost otherwise."""
        for number in [number for number in self._simultaneous if number not in self._armed]:
            for kill in self._simultaneous.pop(number):
                self._wait(*kill)

    def _wait(self, number: int, fault: Fault) -> None:
        self._waiting = sorted([*self._waiting, (number, fault)], key=_sort_key)

    def _flip(self, number: int, fault: Fault, worker: str, step: int) -> list[e.FaultInjected]:
        """Flip a bit of the stage's file in the newest checkpoint, if there is one."""
        saved = CheckpointStore(self._checkpoints).newest(whole_only=True)
        if saved is None:
            return []
        stage = fault.stage % (saved.manifest.pipeline_stages + 1)
        folder = saved.folder if saved.manifest.replicas == 1 else replica_folder(saved.folder, 0)
        path = stage_file(folder, stage)
        index = random.Random(f"flip {number} {step}").randrange(path.stat().st_size * 8)
        with path.open("r+b") as file:
            file.seek(index // 8)
            (byte,) = file.read(1)
            file.seek(index // 8)
            file.write(bytes([byte ^ (1 << index % 8)]))
        self._waiting.remove((number, fault))
        injected = e.FaultInjected(
            worker=worker, node=fault.stage, signal="flip", step=step, moment=fault.moment, number=number
        )
        return [injected]


def _sort_key(entry: tuple[int, Fault]) -> tuple[int, tuple[bool, str, float], int]:
    number, fault = entry
    return fault.step, injection_order(fault), number


def _executing_workers(state: RunState, *replicas: int) -> dict[int, str]:
    """Return node → worker for the workers that execute these replicas' current orders."""
    return {n: w for r in replicas for n, w in state.replicas[r].holders.items() if w in state.replicas[r].waiting}


def _transferring_nodes(form: d.Form) -> set[int]:
    """Return the nodes that send or receive a state in a new generation."""
    rebuilt = {m.node: m.source.donors for m in form.members if isinstance(m.source, d.Rebuild)}
    handed = {m.node for m in form.members if isinstance(m.source, d.Handover)}
    return {*rebuilt, *handed, *(donor for donors in rebuilt.values() for donor in donors)}
