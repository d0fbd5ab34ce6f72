"""Rules that the state machines of one replica and of several share."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planaria.control.apply import apply
from planaria.control.checkpoint_decisions import save_awaiting_retry
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.replay import replay
from support.control.simulation import DECISIONS, DISK, Simulation
from support.examples import examples

REPORTS = (
    e.Linked,
    e.EdgeBroken,
    e.StageReady,
    e.StageCommitted,
    e.StageCopied,
    e.StageSaved,
    e.SaveFailed,
    e.UpdateReceived,
    e.UpdateRejected,
    e.RoundApplied,
)


class FaultRules(RuleBasedStateMachine):
    """Faults of workers, disks and clocks; at the end, every simulation must reach the end of its run."""

    sim: Simulation
    calm_facts: int
    """number of facts before a stop request"""

    @precondition(lambda self: self.sim.pending())
    @rule(picks=st.lists(st.integers(0, 15), min_size=1, max_size=60))
    def some_workers_act(self, picks: list[int]) -> None:
        for pick in picks:
            if pending := self.sim.pending():
                self.sim.work(pending[pick % len(pending)])

    @precondition(lambda self: any(me.writing for me in self.sim.alive.values()))
    @rule(pick=st.integers(0, 20))
    def a_worker_that_writes_dies(self, pick: int) -> None:
        writing = [name for name, me in self.sim.alive.items() if me.writing]
        self.sim.lose(writing[pick % len(writing)])

    @precondition(lambda self: self.sim.pending())
    @rule(turns=st.integers(5, 60))
    def disks_are_slow(self, turns: int) -> None:
        for turn in range(turns):
            if pending := [w for w in self.sim.pending() if not w.endswith(DISK)]:
                self.sim.work(pending[turn % len(pending)])

    @precondition(lambda self: self.sim.alive)
    @rule(pick=st.integers(0, 20))
    def a_worker_dies(self, pick: int) -> None:
        self.sim.lose(list(self.sim.alive)[pick % len(self.sim.alive)])

    @precondition(lambda self: self.sim.alive and len(self.sim.history) > self.calm_facts)
    @rule(prompt=st.booleans())
    def stop_is_requested(self, prompt: bool) -> None:
        self.sim.stop(prompt)

    @precondition(lambda self: self.sim.alive and self.sim.run.stops_before_repair and not self.sim.run.overdue)
    @rule()
    def a_stop_times_out(self) -> None:
        self.sim.expire_stop()

    @precondition(lambda self: self.sim.alive)
    @rule(room=st.integers(0, 9), full=st.integers(1, 20))
    def the_disk_is_full(self, room: int, full: int) -> None:
        self.sim.room, self.sim.full = room, full

    @precondition(lambda self: save_awaiting_retry(self.sim.run) is not None)
    @rule()
    def a_last_save_is_retried(self) -> None:
        self.sim.retry_save()

    @rule()
    def old_reports_arrive(self) -> None:
        now = self.sim.run
        generations = {w: r.generation for r in now.live.values() for w in r.holders.values()}
        for fact in self.sim.history:
            stale = isinstance(fact, REPORTS) and fact.generation != generations.get(fact.worker)
            stale = stale and fact.worker != e.CONTROLLER
            stale |= isinstance(fact, e.GraceExpired) and fact.generation < now.replicas[fact.replica].generation
            if stale or isinstance(fact, e.WorkerLost):
                assert apply(fact, now) == now

    @invariant()
    def every_holder_lives_and_holds_one_node(self) -> None:
        if hasattr(self, "sim") and not self.sim.run.over:
            workers = [w for r in self.sim.run.live.values() for w in r.holders.values()]
            assert set(workers) <= self.sim.alive.keys()
            assert len(set(workers)) == len(workers)
            assert all(r.waiting <= set(r.holders.values()) for r in self.sim.run.live.values())

    def teardown(self) -> None:
        if not hasattr(self, "sim") or not self.sim.sound:
            return
        self.sim.behave()
        assert self.sim.ending is not None, f"the run never ends: {self.sim.run}"
        again = replay(self.sim.history)
        assert again.problems == []
        assert again.state == self.sim.run
        for fact in self.sim.history:
            adapter = d.DECISION if isinstance(fact, DECISIONS) else e.EVENT
            assert adapter.validate_json(fact.model_dump_json()) == fact


def bounded(machine: type[FaultRules], runs: int, steps: int) -> Any:
    """Return the test case of a state machine."""
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples(runs),
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    return case
