"""The controller's mind over several replicas that share workers, samples and rounds, under whatever may happen."""

from __future__ import annotations

from typing import Any

import pytest
from herd_steps import started
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from open_herd import OpenHerd
from pretender import DISK

from examples import examples
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.apply import apply
from planaria.control.replay import replay
from planaria.control.saving import resting
from planaria.exchange.kinds import exchange

pytestmark = pytest.mark.timeout(600)  # many histories; on a busy machine they take their time

EXCHANGES: list[dict[str, Any]] = [
    {"kind": "noloco", "options": {"every": 1}},
    {"kind": "noloco", "options": {"every": 2}},
    {"kind": "noloco", "options": {"every": 2, "prefetch": True}},
    {"kind": "pair_mean", "options": {"every": 2, "group": 3}},
    {"kind": "diloco", "options": {"every": 1}},
    {"kind": "diloco", "options": {"every": 2}},
    {"kind": "diloco", "options": {"every": 1}, "strikes": 2},
    {"kind": "noloco", "options": {"every": 1}, "strikes": 2},
    {"kind": "streaming_diloco", "options": {"every": 4, "fragments": 2, "delay": 1}},
    {"kind": "streaming_diloco", "options": {"every": 3, "fragments": 1, "delay": 2}},
    {"kind": "local"},
]
WHOLE = {"rule": "geometric_median", "scope": "replica"}
WEIGHED: list[dict[str, Any]] = [
    {"kind": "diloco", "options": {"every": 1}, "robust": WHOLE},
    {"kind": "diloco", "options": {"every": 2}, "robust": {**WHOLE, "rule": "flag"}},
    {"kind": "pair_mean", "options": {"every": 2, "group": 3}, "robust": WHOLE},
    {
        "kind": "streaming_diloco",
        "options": {"every": 4, "fragments": 2, "delay": 1},
        "robust": {**WHOLE, "mix": "nnm"},
    },
]
"""for three replicas"""
CHAINS = ["checkfree", "checkfree, checkpoint", "checkpoint"]


def begun(replicas: int, more: int, **fields: Any) -> e.RunStarted:
    """Where there is one replica, there will be no others; three, where they are judged as wholes."""
    replicas = 3 if fields["exchange"].get("robust") else replicas
    return started(replicas, more=more if replicas > 1 else 0, **fields)


def resumed(start: e.RunStarted, steps: list[int], whole: bool) -> e.RunStarted:
    """The same run, taken up where its replicas have made so many steps, each on samples of its own lane."""
    replicas, steps = start.replicas, steps[: start.replicas]
    used = {r + replicas * k for r, count in enumerate(steps) for k in range(count)}
    floor = next(b for b in range(len(used) + 1) if b not in used)
    every = exchange(start.exchange).interval or 99
    standings = {r: e.Standing(step=n, rounds=n // every, inner=n % every) for r, n in enumerate(steps)}
    changed = {
        "first_step": len(used) // replicas,
        "first_generation": 5,
        "first_block": floor,
        "blocks_ahead": sorted(b for b in used if b > floor),
        "standings": standings,
        "load": {stage: "start" for stage in range(start.stages + 1) if whole or stage},
        "steps": start.steps + len(used) // replicas,
    }
    return e.RunStarted.model_validate(start.model_dump() | changed)


fresh = st.builds(
    begun,
    replicas=st.sampled_from([1, 2, 2, 3, 4]),
    more=st.sampled_from([0, 0, 1, 2]),
    stages=st.sampled_from([1, 2, 2, 3]),
    exchange=st.sampled_from(EXCHANGES + WEIGHED),
    steps=st.integers(2, 6),
    spares=st.integers(0, 3),
    replace=st.sampled_from([True, True, False]),
    eval_every=st.sampled_from([0, 0, 2]),
    save_every=st.sampled_from([0, 1, 2]),
    save_in_background=st.booleans(),
    recovery=st.builds(lambda strategy: {"strategy": strategy}, st.sampled_from(CHAINS)),
)
ragged = st.builds(resumed, fresh, st.lists(st.integers(0, 3), min_size=4, max_size=4), st.booleans())
starts = st.one_of(fresh, fresh, ragged)


class HerdMachine(RuleBasedStateMachine):
    herd: OpenHerd

    @initialize(start=starts, peaceful=st.integers(0, 12), rooms=st.lists(st.integers(1, 5), max_size=2))
    def begin(self, start: e.RunStarted, peaceful: int, rooms: list[int]) -> None:
        """Most of what can go wrong is possible only after some commits: give the run some untroubled ones."""
        self.herd = OpenHerd(start)
        for room in rooms:
            self.herd.join(room)
        target, turn = len(self.herd.truth.used) + peaceful, 0
        while len(self.herd.truth.used) < target and (pending := self.herd.pending() or self.herd.mail):
            turn += 1
            self.herd.work(self.herd.pending()[turn % len(pending)]) if self.herd.pending() else self.herd.deliver(0)

    @precondition(lambda self: self.herd.pending())
    @rule(picks=st.lists(st.integers(0, 15), min_size=1, max_size=60))
    def some_work(self, picks: list[int]) -> None:
        for pick in picks:
            if pending := self.herd.pending():
                self.herd.work(pending[pick % len(pending)])

    @precondition(lambda self: self.herd.pending())
    @rule(rounds=st.integers(1, 6))
    def all_do_what_they_were_told(self, rounds: int) -> None:
        for _ in range(rounds):
            for worker in self.herd.pending():
                if worker in self.herd.pending():
                    self.herd.work(worker)
            for _ in list(self.herd.mail):
                self.herd.deliver(0)

    @precondition(lambda self: self.herd.pending())
    @rule(slow=st.integers(0, 3), turns=st.integers(5, 80))
    def one_replica_lags(self, slow: int, turns: int) -> None:
        held = self.herd.run.replicas.get(slow)
        for turn in range(turns):
            pending = [w for w in self.herd.pending() if held is None or w not in held.holders.values()]
            if pending:
                self.herd.work(pending[turn % len(pending)])

    @precondition(lambda self: any(me.writing for me in self.herd.alive.values()))
    @rule(pick=st.integers(0, 20))
    def a_worker_that_writes_dies(self, pick: int) -> None:
        writing = [name for name, me in self.herd.alive.items() if me.writing]
        self.herd.lose(writing[pick % len(writing)])

    @precondition(lambda self: self.herd.pending())
    @rule(turns=st.integers(5, 60))
    def disks_are_slow(self, turns: int) -> None:
        for turn in range(turns):
            if pending := [w for w in self.herd.pending() if not w.endswith(DISK)]:
                self.herd.work(pending[turn % len(pending)])

    @precondition(lambda self: self.herd.alive)
    @rule(pick=st.integers(0, 20))
    def a_worker_dies(self, pick: int) -> None:
        self.herd.lose(list(self.herd.alive)[pick % len(self.herd.alive)])

    @precondition(lambda self: self.herd.alive)
    @rule(replica=st.integers(0, 3))
    def a_whole_replica_dies(self, replica: int) -> None:
        if replica in self.herd.run.live:
            self.herd.lose(*self.herd.run.replicas[replica].holders.values())

    @precondition(lambda self: self.herd.alive)
    @rule(stage=st.integers(0, 3), replicas=st.sets(st.integers(0, 3), min_size=2, max_size=4))
    def a_stage_dies_in_several_replicas(self, stage: int, replicas: set[int]) -> None:
        columns, holders = self.herd.started.columns, self.herd.run.holders
        nodes = [columns[r][stage] for r in replicas if r < len(columns) and stage < len(columns[r])]
        self.herd.lose(*(holders[node] for node in nodes if node in holders))

    @precondition(lambda self: any(r.phase in BUSY or r.meeting for r in self.herd.run.live.values()))
    @rule(pick=st.integers(0, 20))
    def a_worker_dies_at_a_bad_moment(self, pick: int) -> None:
        busy = [r for r in self.herd.run.live.values() if r.phase in BUSY or r.meeting]
        workers = [w for r in busy for w in r.holders.values() if w in self.herd.alive]
        if workers:
            self.herd.lose(workers[pick % len(workers)])

    @precondition(lambda self: self.herd.mail)
    @rule(
        picks=st.lists(st.integers(0, 15), min_size=1, max_size=8),
        fate=st.sampled_from(["arrives", "lost", "wrong", "other"]),
    )
    def offers_arrive_or_never_do_or_are_wrong(self, picks: list[int], fate: str) -> None:
        for pick in picks:
            if self.herd.mail:
                self.herd.deliver(pick, fate)

    @precondition(lambda self: any(w.node >= 0 for w in self.herd.alive.values()))
    @rule(pick=st.integers(0, 15), edge=st.integers(0, 3))
    def an_edge_breaks(self, pick: int, edge: int) -> None:
        standing = [name for name, w in self.herd.alive.items() if w.node >= 0]
        self.herd.break_edge(standing[pick % len(standing)], edge)

    @precondition(lambda self: self.herd.suspicious())
    @rule(pick=st.integers(0, 3))
    def grace_is_over(self, pick: int) -> None:
        suspicious = self.herd.suspicious()
        self.herd.expire_grace(suspicious[pick % len(suspicious)])

    @precondition(lambda self: self.herd.impatient())
    @rule(pick=st.integers(0, 3))
    def patience_is_over(self, pick: int) -> None:
        impatient = self.herd.impatient()
        self.herd.lose_patience(impatient[pick % len(impatient)])

    @precondition(lambda self: self.herd.alive and len(self.herd.history) > 150)
    @rule(prompt=st.booleans())
    def someone_asks_to_stop(self, prompt: bool) -> None:
        self.herd.stop(prompt)

    @precondition(lambda self: self.herd.alive and self.herd.run.prompt and not self.herd.run.overdue)
    @rule()
    def a_stop_waits_no_longer(self) -> None:
        self.herd.stop_waits_no_longer()

    @precondition(lambda self: not self.herd.run.over and len(self.herd.machines) < MACHINES)
    @rule(room=st.integers(1, 5))
    def a_machine_joins(self, room: int) -> None:
        self.herd.join(room)

    @precondition(lambda self: any(m.open for m in self.herd.machines.values()))
    @rule(pick=st.integers(0, 5))
    def a_machine_leaves_in_good_order(self, pick: int) -> None:
        there = [host for host, machine in self.herd.machines.items() if machine.open]
        self.herd.leave(there[pick % len(there)])

    @precondition(lambda self: any(self.herd.workers_of(host) for host in self.herd.machines))
    @rule(pick=st.integers(0, 5), turned=st.integers(0, 4))
    def a_machine_vanishes(self, pick: int, turned: int) -> None:
        """It may be one that has been turned away, or is leaving."""
        there = [host for host in self.herd.machines if self.herd.workers_of(host)]
        self.herd.vanish(there[pick % len(there)], turned)

    @precondition(lambda self: self.herd.alive)
    @rule(pick=st.integers(0, 20))
    def a_worker_is_to_leave(self, pick: int) -> None:
        staying = [worker for worker in self.herd.alive if worker not in self.herd.leaving]
        if staying:
            self.herd.drain(staying[pick % len(staying)])

    @precondition(lambda self: self.herd.leaving)
    @rule(pick=st.integers(0, 20))
    def a_worker_that_is_to_leave_dies(self, pick: int) -> None:
        leaving = sorted(self.herd.leaving)
        self.herd.lose(leaving[pick % len(leaving)])

    @precondition(lambda self: any(self.herd.promised()))
    @rule(pick=st.integers(0, 20))
    def a_successor_dies(self, pick: int) -> None:
        promised = self.herd.promised()
        self.herd.lose(promised[pick % len(promised)])

    @precondition(lambda self: any(w.host and w.joined for w in self.herd.alive.values()))
    @rule(pick=st.integers(0, 20))
    def a_worker_of_a_guest_fails(self, pick: int) -> None:
        guests = [name for name, worker in self.herd.alive.items() if worker.host and worker.joined]
        self.herd.fail(guests[pick % len(guests)])

    @precondition(lambda self: any(w.host and not w.joined for w in self.herd.alive.values()))
    @rule(pick=st.integers(0, 5), times=st.integers(1, 4))
    def workers_of_a_guest_die_at_birth(self, pick: int, times: int) -> None:
        hosts = sorted({worker.host for worker in self.herd.alive.values() if worker.host and not worker.joined})
        for _ in range(times):
            born = [w for w in self.herd.workers_of(hosts[pick % len(hosts)]) if not self.herd.alive[w].joined]
            if born:
                self.herd.lose(born[0])

    @precondition(lambda self: self.herd.parting)
    @rule()
    def a_machine_that_was_turned_away_goes(self) -> None:
        self.herd.part(self.herd.parting[0])

    @precondition(lambda self: self.herd.alive)
    @rule(room=st.integers(0, 9), full=st.integers(1, 20))
    def the_disk_is_full(self, room: int, full: int) -> None:
        self.herd.room, self.herd.full = room, full

    @precondition(lambda self: resting(self.herd.run) is not None)
    @rule()
    def a_last_save_may_be_tried_again(self) -> None:
        self.herd.try_again()

    @rule()
    def old_news_comes_in(self) -> None:
        now = self.herd.run
        generations = {w: r.generation for r in now.live.values() for w in r.holders.values()}
        for fact in self.herd.history:
            stale = (
                isinstance(fact, REPORTS)
                and fact.worker != e.CONTROLLER
                and fact.generation != generations.get(fact.worker)
            )
            if stale or isinstance(fact, e.WorkerLost):
                assert apply(fact, now) == now

    @invariant()
    def every_holder_lives_and_stands_at_one_node(self) -> None:
        if hasattr(self, "herd") and not self.herd.run.over:
            workers = [w for r in self.herd.run.live.values() for w in r.holders.values()]
            assert set(workers) <= self.herd.alive.keys()
            assert len(set(workers)) == len(workers)
            assert all(r.waiting <= set(r.holders.values()) for r in self.herd.run.live.values())

    def teardown(self) -> None:
        if not hasattr(self, "herd") or not self.herd.sound:
            return
        self.herd.behave()
        assert self.herd.truth.ending is not None, f"the run never ends: {self.herd.run}"
        again = replay(self.herd.history)
        assert again.problems == []
        assert again.state == self.herd.run
        for fact in self.herd.history:
            adapter = d.DECISION if isinstance(fact, DECISIONS) else e.EVENT
            assert adapter.validate_json(fact.model_dump_json()) == fact


MACHINES = 4
BUSY = ("link", "commit", "settle", "save")
REPORTS = (
    e.Linked,
    e.EdgeBroken,
    e.StageReady,
    e.StageCommitted,
    e.StageCopied,
    e.StageSaved,
    e.SaveFailed,
    e.OfferHeard,
    e.OfferRefused,
    e.RoundMade,
)
DECISIONS = d.Decision.__args__[0].__args__  # type: ignore[attr-defined]

TestHerd = HerdMachine.TestCase
TestHerd.settings = settings(
    max_examples=examples(25),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
