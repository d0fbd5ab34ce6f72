"""Faults that a worker injects into itself, at the exact action that a trace specifies.

An external signal cannot hit an exact action. A worker that knows its fault in advance kills itself there: the SIGKILL
is real, and the same trace hits the same action in every run. A worker imports this module on its first fault.
"""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.control.facts.orders import InjectFault
from planaria.data.stream import BatchReader
from planaria.faults import trace
from planaria.faults.byzantine import Byzantine, make_misbehaviour
from planaria.pipeline.plan.actions import Action
from planaria.runtime.transport.edge import EdgeEnd
from planaria.runtime.worker.outer_state import OuterState
from planaria.runtime.worker.worker_edges import WorkerEdges

SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP"}
"""log names of faults whose name differs"""
_ACTIVITIES = {
    "commit": ("commit",),
    "transfer": ("send state", "receive state"),
    "save": ("write",),
    "settle": ("settle",),
    "link": ("link",),
}
"""moment of a fault → the main thread's activity; other moments are actions of the step's plan"""
_AT_FILE_OPEN = ("kill", "stop", "disk_slow", "disk_full")
"""faults injected when the file of a save is opened, in any thread"""
_SLOW_FACTOR = 5.0
"""default slowdown of a slow worker's actions"""
_BATCH_DELAY_S = 0.1
"""default delay of a batch"""
_FRAME_DELAY_S = 0.1
"""default delay of a frame"""
_WHOLE_STEP = (trace.CORRUPT_UPDATE, "slow_data")
"""faults of a whole step, which begin with it"""
_FULL_DISK_BYTES = 4096
"""largest file that can be written on a full disk"""

Target = tuple[str, int, int]
"""kind of action, microbatch, hop"""


class WorkerFaults:
    """Faults scheduled for this worker, and those in effect.

    The thread that receives orders calls ``add``, a writer thread may call ``inject_matching``, and the main thread all
    methods but ``add``.
    """

    def __init__(
        self,
        config: RunConfig,
        edges: WorkerEdges,
        outer: OuterState,
        on_inject: Callable[[str, InjectFault], None],
        end: Callable[[signal.Signals], None] = signal.raise_signal,
    ) -> None:
        """:param on_inject: called before each injection, with the fault's name in the log.
        :param end: ends the worker by a signal.
        """
        self._config = config
        self._outer = outer
        self._on_inject = on_inject
        self._send_signal = end
        self._edge_faults = _EdgeFaults(edges)
        self._byzantine: Byzantine | None = None
        self._waiting: list[InjectFault] = []
        self._targets: dict[int, Target] = {}
        self._slow_until = 0.0
        self._slow_factor = 1.0
        self._disk_full_until = 0.0
        self._batch_delay_s = 0.0
        self._batch_delay_until = 0.0
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def add(self, injection: InjectFault) -> None:
        """Schedule a fault for the next action that matches its moment."""
        self._waiting.append(injection)

    def start_step(self, actions: Sequence[Action]) -> None:
        """Begin a step with these actions: choose the action of each fault injected at one, and start whole-step
        faults."""
        for injection in [b for b in self._waiting if b.signal in _WHOLE_STEP and b.moment not in _ACTIVITIES]:
            self._inject(injection)
        for injection in self._waiting:
            of_kind = [a for a in actions if injection.moment in ("any", a.kind)] or list(actions)
            if injection.moment not in _ACTIVITIES and of_kind:
                chosen = of_kind[int(injection.offset * len(of_kind))]
                self._targets[injection.number] = (chosen.kind, chosen.microbatch, chosen.hop)

    def wrap_batches(self, batch: BatchReader, step: int | None) -> BatchReader:
        """Wrap a source of batches: delay each once, and corrupt labels in a training ``step``."""
        delayed = set[int]()

        def read(microbatch: int) -> tuple[Tensor, Tensor]:
            if microbatch not in delayed and time.monotonic() < self._batch_delay_until:
                time.sleep(self._batch_delay_s)
            delayed.add(microbatch)
            return batch(microbatch)

        if step is None or self._byzantine is None:
            return read
        return self._byzantine.poison_batch(read, step, self._config.model.vocab)

    def delay_if_slow(self, busy_s: float) -> bool:
        """Sleep if this worker is slow, after ``busy_s`` seconds of work; return whether it is slow."""
        if not self._slow_until:
            return False
        now = time.monotonic()
        time.sleep(max(0.0, min((self._slow_factor - 1) * busy_s, self._slow_until - now)))
        self._slow_until = self._slow_until if now < self._slow_until else 0.0
        return True

    def set_activity(self, doing: str, microbatch: int, hop: int) -> None:
        """Record that the main thread begins this action."""
        if not (self._waiting or self._disk_full_until):
            return
        if self._disk_full_until and time.monotonic() > self._disk_full_until:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
            self._disk_full_until = 0.0
        self.inject_matching(doing, microbatch, hop)

    def inject_matching(self, doing: str, microbatch: int = -1, hop: int = -1) -> None:
        """Inject the faults that target this action, of the main thread or of a background writer."""
        for injection in [b for b in self._waiting if self._matches(b, doing, microbatch, hop)]:
            self._inject(injection)

    def _inject(self, injection: InjectFault) -> None:
        self._waiting.remove(injection)
        self._on_inject(SIGNALS.get(injection.signal, injection.signal), injection)
        self._apply(injection)

    def _matches(self, injection: InjectFault, doing: str, microbatch: int, hop: int) -> bool:
        if doing == "copy":  # faults of a save, but not of its file, are injected here
            return injection.moment == "save" and injection.signal not in _AT_FILE_OPEN
        if injection.moment in _ACTIVITIES:
            return doing in _ACTIVITIES[injection.moment]
        return self._targets.get(injection.number) == (doing, microbatch, hop)

    def _apply(self, injection: InjectFault) -> None:
        lasts_s = injection.seconds or math.inf
        match injection.signal:
            case "kill":
                self._send_signal(signal.SIGKILL)
            case "stop":
                self._send_signal(signal.SIGSTOP)
            case "stuck" | "disk_slow":
                until = time.monotonic() + lasts_s
                while (left := until - time.monotonic()) > 0:
                    time.sleep(min(left, 3600.0))
            case "slow" | "slow_host":
                self._slow_factor, self._slow_until = injection.strength or _SLOW_FACTOR, time.monotonic() + lasts_s
            case "slow_data":
                self._batch_delay_s = _BATCH_DELAY_S if injection.strength is None else injection.strength
                self._batch_delay_until = time.monotonic() + lasts_s
            case "disk_full":
                self._disk_full_until = time.monotonic() + lasts_s
                resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_DISK_BYTES, self._limits[1]))
            case trace.CORRUPT_UPDATE:
                misbehaviour = make_misbehaviour(
                    injection.attack, injection.strength, injection.until, self._config.seed, injection.number
                )
                self._byzantine = self._outer.publisher = Byzantine(self._config.exchange, misbehaviour)
            case _:
                self._edge_faults.inject(injection.signal, injection, lasts_s)


class _EdgeFaults:
    """Faults of a worker's edges: broken connections, an unreachable network, delayed frames."""

    def __init__(self, edges: WorkerEdges) -> None:
        self._worker_edges = edges
        self._held: dict[int | None, tuple[float, float]] = {}
        """sending node, or None for all → delay of each frame, and its end (monotonic seconds)"""

    def inject(self, kind: str, injection: InjectFault, lasts_s: float) -> None:
        match kind:
            case "reset":
                edges = list(self._worker_edges.by_peer.values())[:1]  # the first neighbour by default
                self._reset(
                    edges if injection.peer is None else filter(None, [self._worker_edges.by_peer.get(injection.peer)])
                )
            case "cut":
                self._worker_edges.transport.partition(lasts_s)
                self._reset(self._worker_edges.by_peer.values())
            case "delay":
                hold_s = _FRAME_DELAY_S if injection.strength is None else injection.strength
                self._held[injection.peer] = hold_s, time.monotonic() + lasts_s
                self._worker_edges.watch = self._hold
                for edge in [*self._worker_edges.by_peer.values(), *self._worker_edges.round_edges.values()]:
                    self._hold(edge)
            case _:
                raise AssertionError(kind)

    def _reset(self, edges: Iterable[EdgeEnd]) -> None:
        for edge in list(edges):
            edge.reset()

    def _hold(self, edge: EdgeEnd) -> None:
        for peer in (None, edge.spec.peer):
            if peer in self._held:
                edge.hold_s, edge.hold_until = self._held[peer]
