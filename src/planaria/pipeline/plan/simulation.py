"""Discrete-event simulation of a plan, its result, and a Gantt chart for the terminal.

A node does one action at a time and takes the first ready one of its list. A link is full-duplex; in each direction
messages queue for bandwidth in sending order, and their latencies overlap; ``network.inbound`` and
``network.latency_queued`` change that. With messages through host memory, each is copied off its sender's device first
and onto its receiver's last, whole; a device makes one copy each way at a time (``runtime/transport/staging.py``) and
computes meanwhile.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planaria.common.errors import UserError
from planaria.pipeline.network.costs import MessageCosts
from planaria.pipeline.plan.actions import Action, Key, StepPlan, build_graph, deadlock_error
from planaria.pipeline.plan.plan_bound import PlanBound

_ENDS, _ARRIVES, _FREE, _LANDS = range(4)
"""an action ends and sends its output; a message arrives; a node ends its shadow computation; a message is in the
memory of its receiver's host"""
IDLE = "."
FILL = {"forward": "-", "backward": "="}


class PlanSimulation:
    """A running simulation. Actions are numbers in ``graph``; times are nanoseconds."""

    def __init__(self, plan: StepPlan, prices: MessageCosts) -> None:
        self.graph = build_graph(plan)
        self.prices = prices
        self.waits = list(self.graph.waits)
        self.now = 0
        self.ready: dict[int, list[int]] = {node: [] for node in plan.actions}
        self.idle = dict.fromkeys(plan.actions, True)
        self.woken: set[int] = set()
        """nodes with an event at this time"""
        self.events: list[tuple[int, int, int]] = []
        """(time, action, kind of event), earliest first"""
        self.ran: dict[int, list[int]] = {node: [] for node in plan.actions}
        self.starts = [0] * len(self.waits)
        self.ends = [0] * len(self.waits)
        self.link_free: dict[tuple[int, int], int] = defaultdict(int)
        """time when each queue is free: that of a link, or of a node's inbound link if its neighbours share it"""
        self.copied_off: dict[int, int] = defaultdict(int)
        self.copied_onto: dict[int, int] = defaultdict(int)
        """time when a node's device has finished its copies, in each direction"""
        self.messages: Counter[tuple[int, int, str]] = Counter()
        """messages by sender, receiver and kind of pass"""

    def run(self) -> int:
        """Run to the end and return the time."""
        for number, count in enumerate(self.waits):
            if not count:
                self._on_ready(number)
        self._choose()
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, number, event = heapq.heappop(self.events)
                if event == _ARRIVES:
                    self._resolve_dependency(number)
                elif event == _ENDS:
                    self._end(number)
                elif event == _LANDS:
                    copied = self._copy(self.copied_onto, self.graph.actions[number].node)
                    heapq.heappush(self.events, (copied, number, _ARRIVES))
                else:
                    self._release_node(number)
            self._choose()
        if sum(map(len, self.ran.values())) < len(self.waits):
            raise self._deadlock()
        return self.now

    def _deadlock(self) -> UserError:
        return deadlock_error(self.graph, [n for ran in self.ran.values() for n in ran])

    def _choose(self) -> None:
        """Let idle nodes with events take their next action."""
        for node in self.woken:
            if self.idle[node] and (number := self._next_action(node)) is not None:
                action = self.graph.actions[number]
                end = self.now + self.prices.compute(action.kind, node, action.hop)
                self.idle[node] = False
                self.ran[node].append(number)
                self.starts[number], self.ends[number] = self.now, end
                heapq.heappush(self.events, (end, number, _ENDS))
        self.woken.clear()

    def _next_action(self, node: int) -> int | None:
        """Return the first ready action of the list of ``node``, if any."""
        return heapq.heappop(self.ready[node]) if self.ready[node] else None

    def _end(self, number: int) -> None:
        action = self.graph.actions[number]
        if shadow := self.prices.shadow(action.kind, action.node, action.hop):
            heapq.heappush(self.events, (self.now + shadow, number, _FREE))
        else:
            self._release_node(number)
        for later in self.graph.local[number]:
            self._resolve_dependency(later)
        if (receiver := self.graph.receiver[number]) >= 0:
            self._send(action, receiver)

    def _release_node(self, number: int) -> None:
        node = self.graph.actions[number].node
        self.idle[node] = True
        self.woken.add(node)

    def _send(self, action: Action, receiver: int) -> None:
        """Send the output of ``action`` to the action ``receiver``."""
        source, target = action.node, self.graph.actions[receiver].node
        queue = (target, target) if self.prices.shared_inbound else (source, target)
        start = max(self._copy(self.copied_off, source), self.link_free[queue])
        self.link_free[queue] = start + self.prices.transmit(source, target, action.kind)
        self.messages[source, target, action.kind] += 1
        arrival = start + self.prices.carry(source, target, action.kind)
        if self.prices.staging:
            heapq.heappush(self.events, (arrival, receiver, _LANDS))
        elif arrival == self.now:
            self._resolve_dependency(receiver)
        else:
            heapq.heappush(self.events, (arrival, receiver, _ARRIVES))

    def _copy(self, through: dict[int, int], node: int) -> int:
        """Return when one more copy of ``node`` in this direction is done."""
        through[node] = max(self.now, through[node]) + self.prices.staging
        return through[node]

    def _resolve_dependency(self, number: int) -> None:
        self.waits[number] -= 1
        if not self.waits[number]:
            self._on_ready(number)

    def _on_ready(self, number: int) -> None:
        node = self.graph.actions[number].node
        heapq.heappush(self.ready[node], number)
        self.woken.add(node)


class FirstComeSimulation(PlanSimulation):
    """Simulates SkipPipe's rule: nodes ignore their lists and do backwards and losses first, then by arrival.

    A forward begins only while its node has a free slot; its backward frees the slot.
    """

    def __init__(self, plan: StepPlan, prices: MessageCosts, slots: Mapping[int, int]) -> None:
        super().__init__(plan, prices)
        self.slots = dict(slots)
        self.queues: dict[int, list[tuple[bool, int, int]]] = {node: [] for node in plan.actions}

    def _next_action(self, node: int) -> int | None:
        queue = self.queues[node]
        if not queue or (queue[0][0] and not self.slots.get(node, 1)):
            return None
        yields, _, number = heapq.heappop(queue)
        if yields and node in self.slots:
            self.slots[node] -= 1
        return number

    def _deadlock(self) -> UserError:
        for node, queue in sorted(self.queues.items()):
            if queue:
                waiting = self.graph.actions[queue[0][2]]
                return UserError(
                    f"memory deadlocks: the forward of microbatch {waiting.microbatch} at node {node} waits for a "
                    "slot, and so does every other microbatch; raise the nodes' memory, or let routes cross less"
                )
        return super()._deadlock()

    def _on_ready(self, number: int) -> None:
        action = self.graph.actions[number]
        yields = action.kind == "forward" and not action.returns
        heapq.heappush(self.queues[action.node], (yields, self.now, number))
        self.woken.add(action.node)

    def _end(self, number: int) -> None:
        action = self.graph.actions[number]
        if action.kind == "backward" and action.node in self.slots and not action.returns:
            self.slots[action.node] += 1
        super()._end(number)


class TimedAction(NamedTuple):
    """An action with its start and end, in seconds from the step's beginning."""

    key: Key
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedStep:
    """One simulated step."""

    step_s: float
    """seconds from the first action's start to the last one's end"""
    ran: dict[int, list[Action]]
    """each stage's actions, in order of time"""
    starts: dict[int, list[float]]
    """their starts, in seconds from the step's beginning"""
    ends: dict[int, list[float]]
    """their ends"""
    sent_bytes: dict[tuple[int, int], int]
    """bytes sent over each link, by (sending stage, receiving stage)"""

    @property
    def spans(self) -> dict[int, list[TimedAction]]:
        """Each stage's actions with times, in order."""
        return {
            stage: [
                TimedAction(action.key, start, end)
                for action, start, end in zip(ran, self.starts[stage], self.ends[stage], strict=True)
            ]
            for stage, ran in self.ran.items()
        }

    @property
    def passes_s(self) -> float:
        """The seconds of all passes, one after another."""
        return sum(sum(self.ends[stage]) - sum(starts) for stage, starts in self.starts.items())

    @property
    def busy(self) -> dict[int, float]:
        """The fraction of the step that each stage computed."""
        whole = self.step_s or 1.0
        return {stage: (sum(self.ends[stage]) - sum(starts)) / whole for stage, starts in self.starts.items()}

    @property
    def idle(self) -> dict[int, float]:
        """The fraction of the step that each stage waited."""
        return {stage: 1.0 - fraction for stage, fraction in self.busy.items()}

    @property
    def bubble(self) -> float:
        """The mean idle fraction of the block stages; stage 0 may have nothing to compute."""
        blocks = [fraction for stage, fraction in self.idle.items() if stage]
        return sum(blocks) / len(blocks)


def draw(simulated: SimulatedStep, bound: PlanBound, width: int = 100, unit: str = "s") -> str:
    """Return one row of ``width`` characters per stage, and a legend with step time, lower bound and bubble fraction.

    A forward of microbatch 3 looks like ``F3---``, a backward like ``B3===``. Short actions show the letter alone;
    actions without duration are omitted.
    """
    margin = len(f"stage {max(simulated.ran)} |")
    columns = max(1, width - margin)
    rows = [
        f"stage {stage}".ljust(margin - 1) + "|" + _chart_row(spans, simulated.step_s, columns)
        for stage, spans in sorted(simulated.spans.items())
    ]
    legend = (
        f"step {simulated.step_s:.4g} {unit}, bound {bound.step_s:.4g} {unit} ({bound.binds}), "
        f"bubble {simulated.bubble:.1%}; F forward, B backward, {IDLE} idle"
    )
    return "\n".join([*rows, legend])


def _chart_row(spans: list[TimedAction], step_s: float, columns: int) -> str:
    cells = [IDLE] * columns
    for key, start, end in spans:
        if step_s and end > start:
            first, last = round(start / step_s * columns), round(end / step_s * columns)
            name = f"{key.kind[0].upper()}{key.microbatch}"
            fitting = name if len(name) <= last - first else name[: min(1, last - first)]
            cells[first:last] = fitting.ljust(last - first, FILL[key.kind])
    return "".join(cells)
