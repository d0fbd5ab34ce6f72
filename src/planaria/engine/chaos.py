"""Carries out a trace of faults on the live fleet."""

from __future__ import annotations

import signal
import statistics
from collections import deque

from planaria import decisions as d
from planaria import events as e
from planaria.chaos.trace import Fault, Trace
from planaria.control.state import ReplicaState, RunState
from planaria.fleet.base import Fleet

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_WINDOWS = {"any": (0.0, 1.0), "forward": (0.05, 0.4), "backward": (0.6, 0.95)}
_SHORT_S = 0.005
"""Commits and transfers are over in milliseconds: a fault meant for them strikes within this long of their start."""


class TraceChaos:
    """Strikes the workers at the nodes that a trace names (as stages), at its moments.

    A fault waits for the first step at or after its own that offers its moment, so a rolled-back or repeated step is
    struck once. Moments inside a step are placed by the median length of the latest steps.
    """

    def __init__(self, trace: Trace, fleet: Fleet, first_step: int = 0) -> None:
        """Faults before ``first_step`` belong to an earlier part of the run."""
        self._fleet = fleet
        self._waiting = sorted((f for f in trace.faults if f.step >= first_step), key=lambda f: f.step)
        self._due: list[tuple[float, Fault, int]] = []
        self._thaws: list[tuple[float, str, int]] = []
        self._lengths: deque[float] = deque(maxlen=9)
        self._began: dict[int, float] = {}
        """replica → start of its step under way"""

    def on_decision(self, t: float, decision: d.Decision, state: RunState) -> None:
        """Arm the faults whose moment this decision begins; steps are those of the replica that is struck."""
        match decision:
            case d.RunStep(mode="train"):
                self._began[decision.replica] = t
                self._arm(t, decision.step, state.replicas[decision.replica], "any", "forward", "backward")
            case d.Commit():
                if decision.replica in self._began:
                    self._lengths.append(t - self._began[decision.replica])
                self._arm(t, decision.step, state.replicas[decision.replica], "commit")
            case d.Form():
                rebuilt = {m.node: m.source.donors for m in decision.members if isinstance(m.source, d.Rebuild)}
                both_ends = {*rebuilt, *(donor for donors in rebuilt.values() for donor in donors)}
                for fault in [f for f in self._waiting if f.moment == "transfer" and f.stage in both_ends]:
                    if fault.step <= decision.step:
                        self._waiting.remove(fault)
                        self._due.append((t + fault.offset * _SHORT_S, fault, decision.step))

    def strike(self, t: float, state: RunState) -> list[e.FaultInjected]:
        """Send the signals that are due at ``t``."""
        struck = []
        for item in [item for item in self._due if item[0] <= t]:
            self._due.remove(item)
            _, fault, step = item
            worker = state.holders.get(fault.stage)
            if worker is None:  # already dead: strike its successor
                self._waiting.insert(0, fault)
                continue
            incarnation = state.workers[worker].incarnation
            self._fleet.signal(worker, incarnation, _SIGNALS[fault.signal])
            if fault.resume_after_s is not None:
                self._thaws.append((t + fault.resume_after_s, worker, incarnation))
            struck.append(
                e.FaultInjected(
                    worker=worker,
                    node=fault.stage,
                    signal=_SIGNALS[fault.signal].name,
                    step=step,
                    moment=fault.moment,
                )
            )
        for thaw in [thaw for thaw in self._thaws if thaw[0] <= t]:
            self._thaws.remove(thaw)
            self._fleet.signal(thaw[1], thaw[2], signal.SIGCONT)
        return struck

    def next_due(self) -> float | None:
        """When something is due next, in monotonic seconds."""
        return min([item[0] for item in self._due] + [thaw[0] for thaw in self._thaws], default=None)

    def _arm(self, t: float, step: int, replica: ReplicaState, *moments: str) -> None:
        length = statistics.median(self._lengths) if self._lengths else 0.1
        due = [f for f in self._waiting if f.step <= step and f.stage in replica.arrangement.stage]
        for fault in [f for f in due if f.moment in moments]:
            self._waiting.remove(fault)
            if fault.moment == "commit":
                delay = fault.offset * _SHORT_S
            else:
                first, last = _WINDOWS[fault.moment]
                delay = (first + fault.offset * (last - first)) * length
            self._due.append((t + delay, fault, step))
