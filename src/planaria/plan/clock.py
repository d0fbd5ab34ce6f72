"""A plan on a clock: a discrete-event simulation without tensors.

A worker does one action at a time and takes the first ready one of its list. A link is full-duplex; in each direction
messages queue for the bandwidth, in the order in which they were sent, and their latencies overlap.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict

from planaria.network.costs import Prices
from planaria.plan.actions import Action, Plan
from planaria.plan.graph import deadlock, graph

_ENDS, _ARRIVES, _FREE = range(3)
"""an action ends and sends its output; a message is there; a worker is through with the stage that it shadows"""


class Clock:
    """One simulation under way. Actions go by their numbers in ``graph``; times are nanoseconds."""

    def __init__(self, plan: Plan, prices: Prices) -> None:
        self.graph = graph(plan)
        self.prices = prices
        self.waits = list(self.graph.waits)
        self.ready: dict[int, list[int]] = {stage: [] for stage in plan.actions}
        self.idle = dict.fromkeys(plan.actions, True)
        self.woken: set[int] = set()
        """stages to which something happened in this instant"""
        self.events: list[tuple[int, int, int]] = []
        """(time, action, what happens), earliest first"""
        self.ran: dict[int, list[int]] = {stage: [] for stage in plan.actions}
        self.starts = [0] * len(self.waits)
        self.ends = [0] * len(self.waits)
        self.link_free: dict[tuple[int, int], int] = defaultdict(int)
        self.messages: Counter[tuple[int, int]] = Counter()

    def run(self) -> int:
        """Runs to the end and returns the time."""
        for number, count in enumerate(self.waits):
            if not count:
                self._ready(number)
        now = 0
        self._choose(now)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, number, what = heapq.heappop(self.events)
                if what == _ARRIVES:
                    self._satisfy(number)
                elif what == _ENDS:
                    self._end(number, now)
                else:
                    self._free(number)
            self._choose(now)
        if any(self.waits):
            raise deadlock(self.graph, [n for ran in self.ran.values() for n in ran])
        return now

    def _choose(self, now: int) -> None:
        """Idle workers that something happened to take the first ready action of their lists."""
        for stage in self.woken:
            if self.idle[stage] and self.ready[stage]:
                number = heapq.heappop(self.ready[stage])
                action = self.graph.actions[number]
                end = now + self.prices.compute(action.kind, stage, action.hop)
                self.idle[stage] = False
                self.ran[stage].append(number)
                self.starts[number], self.ends[number] = now, end
                heapq.heappush(self.events, (end, number, _ENDS))
        self.woken.clear()

    def _end(self, number: int, now: int) -> None:
        action = self.graph.actions[number]
        if shadow := self.prices.shadow(action.kind, action.stage, action.hop):
            heapq.heappush(self.events, (now + shadow, number, _FREE))
        else:
            self._free(number)
        for later in self.graph.local[number]:
            self._satisfy(later)
        if (receiver := self.graph.receiver[number]) >= 0:
            self._send(action, receiver, now)

    def _free(self, number: int) -> None:
        stage = self.graph.actions[number].stage
        self.idle[stage] = True
        self.woken.add(stage)

    def _send(self, action: Action, receiver: int, now: int) -> None:
        """Puts the output of ``action`` on its way to the action ``receiver``."""
        link = (action.stage, self.graph.actions[receiver].stage)
        low, high = min(link), max(link)
        start = max(now, self.link_free[link])
        self.link_free[link] = start + self.prices.transmit(low, high)
        self.messages[link] += 1
        arrival = start + self.prices.carry(low, high)
        if arrival == now:
            self._satisfy(receiver)
        else:
            heapq.heappush(self.events, (arrival, receiver, _ARRIVES))

    def _satisfy(self, number: int) -> None:
        """One of the things that an action waits for is there."""
        self.waits[number] -= 1
        if not self.waits[number]:
            self._ready(number)

    def _ready(self, number: int) -> None:
        stage = self.graph.actions[number].stage
        heapq.heappush(self.ready[stage], number)
        self.woken.add(stage)
