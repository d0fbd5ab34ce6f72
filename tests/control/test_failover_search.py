"""Every failover of a small run to another machine: one controller lost, or two in turn, at each line of the log.

A controller may die before it logs an event (the report is lost), after it, or after a decision whose orders reached
any subset of the workers. The workers' own states judge what the next controller decides.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from planaria.control.apply import apply
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import Order
from planaria.control.failover import FailoverFold
from planaria.control.replay import replay
from planaria.control.state.run import RunState
from support.control.fleet_worker import FleetWorker
from support.control.open_fleet import OpenFleet
from support.control.simulation import DECISIONS, DISK

pytestmark = pytest.mark.timeout(600)
WORKERS = 3


def started(**changed: Any) -> e.RunStarted:
    plain: dict[str, Any] = {
        "name": "run", "seed": 1, "stages": WORKERS - 1, "steps": 2, "first_step": 0, "samples_per_step": 4,
        "wall_time": 0.0, "spares": 0, "local_workers": 0, "routes": [[0, 1, 2, 0]],
    }  # fmt: skip
    return e.RunStarted.model_validate(plain | changed)


class Lost(Exception):
    """The controller is dead."""


@dataclass(frozen=True)
class Death:
    """When a controller dies: at the log line of this number."""

    line: int
    reached: frozenset[int] | None = None
    """for a decision: indices of the workers that receive its orders. None: before the line, which is an event"""


class MortalFleet(OpenFleet):
    """A joined machine with all workers, whose controller dies on another one and is replaced there."""

    death: Death | None = None

    def fork(self) -> MortalFleet:
        """Return a copy; facts and states are immutable, and shared."""
        orders = [order for worker in self.alive.values() for order in (*worker.orders, worker.writing)]
        shared = [*vars(self).values(), *self.history, *orders, *self.handing.values()]
        immutable = [value for value in shared if isinstance(value, e.Fact | RunState)]
        return copy.deepcopy(self, {id(value): value for value in immutable})

    def happened(self, event: e.Event) -> None:
        if self.death is not None and len(self.history) >= self.death.line and not isinstance(event, e.LeaderStarted):
            raise Lost
        super().happened(event)

    def on_event(self, event: e.Event) -> None:
        if isinstance(event, e.LeaderStarted):
            self._lose_workers()
            self._complete()
        elif self._dies_here():
            raise Lost

    def carry_out(self, decision: d.Decision) -> None:
        if not self._dies_here():
            super().carry_out(decision)
            return
        assert self.death is not None
        before = {name: len(worker.orders) for name, worker in self.alive.items()}
        super().carry_out(decision)
        for index, name in enumerate(sorted(before)):
            if name in self.alive and index not in (self.death.reached or frozenset()):
                while len(self.alive[name].orders) > before[name]:
                    self.alive[name].orders.pop()
        raise Lost

    def _dies_here(self) -> bool:
        return self.death is not None and self.death.reached is not None and len(self.history) == self.death.line

    def work(self, worker: str) -> None:
        """Let a worker act; it ignores orders of former controllers and reports durable ones again."""
        me = self.alive.get(worker)
        if me is not None and me.joined and me.orders and self._repeated(me, me.orders[0]):
            me.orders.popleft()
            return
        if me is not None and me.orders and isinstance(me.orders[0], d.Save) and me.writing:
            super().work(worker + DISK)  # of a former controller's save; one file at a time
        super().work(worker)

    def _repeated(self, me: FleetWorker, order: Order) -> bool:
        if isinstance(order, d.Commit) and order.generation == me.generation and me.updates == order.step + 1:
            self.report(me, e.StageCommitted, step=order.step)
            return True
        return False

    def lead_elsewhere(self) -> None:
        """Let another machine lead: reports in flight and unread orders that are not durable are void."""
        self.death = None
        fold = FailoverFold()
        for fact in self.history:
            fold.take(0.0, fact)
        state = fold.state()
        self.run, self._unfinished = state.state, state.unfinished
        for worker in self.alive.values():
            worker.orders = type(worker.orders)(o for o in worker.orders if isinstance(o, d.Commit))
        self.saving = None
        leader = {"term": self.run.term + 1, "pid": 1, "cause": "silent", "silent_s": 0, "lost_s": 0, "wall_time": 0}
        self.sound = True
        self.happened(e.LeaderStarted.model_validate(leader))

    def _lose_workers(self) -> None:
        """Lose the workers of the controller's machine and those that had not started, before anything is decided."""
        for name, worker in [*self.run.workers.items()]:
            if worker.status == "starting" or (worker.status != "dead" and not worker.host):
                self.alive.pop(name, None)
                lost = e.WorkerLost(worker=name, incarnation=worker.incarnation, cause="controller", detail="lost")
                self.history.append(lost)
                self.run = apply(lost, self.run)

    def _complete(self) -> None:
        for order in self._unfinished:
            assert isinstance(order, d.Commit)
            for worker in self.run.replicas[order.replica].waiting:
                self.alive[worker].orders.append(order)


def calm(**changed: Any) -> MortalFleet:
    """Return the run before its first worker starts."""
    sim = MortalFleet(started(**changed))
    sim.join(WORKERS - sim.started.own_workers)
    return sim


def until_lost(sim: MortalFleet, death: Death) -> bool:
    """Train until the controller dies as given; return False if it does not."""
    sim.death = death
    try:
        sim.behave()
    except Lost:
        return True
    return False


def deaths(sim: MortalFleet, first: int) -> Iterator[Death]:
    """Yield every death of the controller of ``sim``, which trains to its end, from log line ``first`` on."""
    whole = sim.fork()
    whole.behave()
    for line in range(max(first, len(sim.history)), len(whole.history)):
        fact = whole.history[line]
        if isinstance(fact, d.RunStep | d.Commit | d.Form | d.Save):
            for count in range(WORKERS + 1):
                for reached in combinations(range(WORKERS), count):
                    yield Death(line + 1, frozenset(reached))
        elif isinstance(fact, DECISIONS):
            yield Death(line + 1, frozenset())
        else:
            yield Death(line)
            yield Death(line + 1, frozenset())


def finished(sim: MortalFleet) -> None:
    """Train to the end; every step is committed once, by all workers."""
    sim.behave()
    if any(isinstance(fact, d.Finish) for fact in sim.history[:-1]):
        return  # it was over when the controller died
    assert sim.ending is not None and sim.ending.outcome == "finished", sim.history
    if not sim.started.own_workers:  # nothing was lost but the controller
        assert Counter(fact.step for fact in sim.history if isinstance(fact, d.Commit)) == {0: 1, 1: 1}
    stages = {(fact.stage, fact.step) for fact in sim.history if isinstance(fact, e.StageCommitted)}
    assert stages == {(stage, step) for stage in range(WORKERS) for step in range(2)}
    again = replay(sim.history)
    assert again.problems == [] and again.state == sim.run


LOSING = {"local_workers": 1, "save_every": 1, "recovery": {"strategy": "checkpoint"}}
"""a run that loses the worker of stage 0 with its controller"""
SETTINGS = [{}, {"save_every": 1}, {"save_every": 1, "save_in_background": True}, {"eval_every": 1}, LOSING]


@pytest.mark.parametrize("changed", SETTINGS, ids=str)
def test_a_failover_at_any_point_loses_nothing(changed: dict[str, Any]) -> None:
    searched = 0
    for death in deaths(calm(**changed), 0):
        sim = calm(**changed)
        assert until_lost(sim, death)
        sim.lead_elsewhere()
        finished(sim)
        searched += 1
    assert searched > 50


@pytest.mark.slow
def test_two_failovers_at_any_points_lose_nothing() -> None:
    searched = 0
    for first in deaths(calm(), 0):
        sim = calm()
        assert until_lost(sim, first)
        sim.lead_elsewhere()
        for second in deaths(sim, 0):
            again = sim.fork()
            if until_lost(again, second):
                again.lead_elsewhere()
            finished(again)
            searched += 1
    assert searched > 1000
