"""The controller of several replicas that share workers, samples and rounds, under every fault in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from planaria.control.facts import events as e
from planaria.exchange.registry import make_exchange
from support.control.fault_rules import FaultRules, bounded
from support.control.open_replicas import OpenReplicas
from support.control.replica_steps import started

pytestmark = pytest.mark.timeout(600)  # many histories

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
    {"kind": "decoupled", "options": {"every": 2, "fragments": 1, "delay": 1}},
    {"kind": "decoupled", "options": {"every": 6, "fragments": 2, "delay": 2, "min_due": 2}},
    {"kind": "eager", "options": {"every": 2}},
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
    """Return the first event; whole-replica rules need three replicas, and a single replica never grows."""
    replicas = 3 if fields["exchange"].get("robust") else replicas
    return started(replicas, more=more if replicas > 1 else 0, **fields)


def resumed(start: e.RunStarted, steps: list[int], whole: bool) -> e.RunStarted:
    """Return the same run, resumed after ``steps`` of each replica on samples of its lane."""
    replicas, steps = start.replicas, steps[: start.replicas]
    used = {r + replicas * k for r, count in enumerate(steps) for k in range(count)}
    floor = next(b for b in range(len(used) + 1) if b not in used)
    every = make_exchange(start.exchange).interval or 99
    positions = {r: e.ReplicaPosition(step=n, rounds=n // every, inner=n % every) for r, n in enumerate(steps)}
    changed = {
        "first_step": len(used) // replicas,
        "first_generation": 5,
        "first_block": floor,
        "blocks_ahead": sorted(b for b in used if b > floor),
        "positions": positions,
        "checkpoint_of_stage": {stage: "start" for stage in range(start.stages + 1) if whole or stage},
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
    reserve_blocks=st.booleans(),
    recovery=st.builds(lambda strategy: {"strategy": strategy}, st.sampled_from(CHAINS)),
)
ragged = st.builds(resumed, fresh, st.lists(st.integers(0, 3), min_size=4, max_size=4), st.booleans())
starts = st.one_of(fresh, fresh, ragged)


class ReplicasMachine(FaultRules):
    sim: OpenReplicas
    calm_facts = 150

    @initialize(start=starts, peaceful=st.integers(0, 12), rooms=st.lists(st.integers(1, 5), max_size=2))
    def begin(self, start: e.RunStarted, peaceful: int, rooms: list[int]) -> None:
        """Start with some commits without faults: most faults need them."""
        self.sim = OpenReplicas(start)
        for room in rooms:
            self.sim.join(room)
        target, turn = len(self.sim.truth.used) + peaceful, 0
        while len(self.sim.truth.used) < target and (pending := self.sim.pending() or self.sim.mail):
            turn += 1
            self.sim.work(self.sim.pending()[turn % len(pending)]) if self.sim.pending() else self.sim.deliver(0)

    @precondition(lambda self: self.sim.pending())
    @rule(rounds=st.integers(1, 6))
    def all_workers_act(self, rounds: int) -> None:
        for _ in range(rounds):
            for worker in self.sim.pending():
                if worker in self.sim.pending():
                    self.sim.work(worker)
            for _ in list(self.sim.mail):
                self.sim.deliver(0)

    @precondition(lambda self: self.sim.pending())
    @rule(slow=st.integers(0, 3), turns=st.integers(5, 80))
    def one_replica_lags(self, slow: int, turns: int) -> None:
        held = self.sim.run.replicas.get(slow)
        for turn in range(turns):
            pending = [w for w in self.sim.pending() if held is None or w not in held.holders.values()]
            if pending:
                self.sim.work(pending[turn % len(pending)])

    @precondition(lambda self: self.sim.alive)
    @rule(replica=st.integers(0, 3))
    def a_whole_replica_dies(self, replica: int) -> None:
        if replica in self.sim.run.live:
            self.sim.lose(*self.sim.run.replicas[replica].holders.values())

    @precondition(lambda self: self.sim.alive)
    @rule(stage=st.integers(0, 3), replicas=st.sets(st.integers(0, 3), min_size=2, max_size=4))
    def a_stage_dies_in_several_replicas(self, stage: int, replicas: set[int]) -> None:
        columns, holders = self.sim.started.nodes_by_replica, self.sim.run.holders
        nodes = [columns[r][stage] for r in replicas if r < len(columns) and stage < len(columns[r])]
        self.sim.lose(*(holders[node] for node in nodes if node in holders))

    @precondition(lambda self: any(r.phase in BUSY or r.open_round for r in self.sim.run.live.values()))
    @rule(pick=st.integers(0, 20))
    def a_worker_dies_at_a_bad_moment(self, pick: int) -> None:
        busy = [r for r in self.sim.run.live.values() if r.phase in BUSY or r.open_round]
        workers = [w for r in busy for w in r.holders.values() if w in self.sim.alive]
        if workers:
            self.sim.lose(workers[pick % len(workers)])

    @precondition(lambda self: self.sim.mail)
    @rule(
        picks=st.lists(st.integers(0, 15), min_size=1, max_size=8),
        fate=st.sampled_from(["arrives", "lost", "wrong", "other"]),
    )
    def late_lost_or_invalid_updates_arrive(self, picks: list[int], fate: str) -> None:
        for pick in picks:
            if self.sim.mail:
                self.sim.deliver(pick, fate)

    @precondition(lambda self: any(w.node >= 0 for w in self.sim.alive.values()))
    @rule(pick=st.integers(0, 15), edge=st.integers(0, 3))
    def an_edge_breaks(self, pick: int, edge: int) -> None:
        standing = [name for name, w in self.sim.alive.items() if w.node >= 0]
        self.sim.break_edge(standing[pick % len(standing)], edge)

    @precondition(lambda self: self.sim.suspicious())
    @rule(pick=st.integers(0, 3))
    def grace_is_over(self, pick: int) -> None:
        suspicious = self.sim.suspicious()
        self.sim.expire_grace(suspicious[pick % len(suspicious)])

    @precondition(lambda self: self.sim.impatient())
    @rule(pick=st.integers(0, 3))
    def patience_is_over(self, pick: int) -> None:
        impatient = self.sim.impatient()
        self.sim.lose_patience(impatient[pick % len(impatient)])

    @precondition(lambda self: not self.sim.run.over and len(self.sim.machines) < MACHINES)
    @rule(room=st.integers(1, 5))
    def a_machine_joins(self, room: int) -> None:
        self.sim.join(room)

    @precondition(lambda self: any(m.open for m in self.sim.machines.values()))
    @rule(pick=st.integers(0, 5))
    def a_machine_leaves_after_notice(self, pick: int) -> None:
        there = [host for host, machine in self.sim.machines.items() if machine.open]
        self.sim.leave(there[pick % len(there)])

    @precondition(lambda self: any(self.sim.workers_of(host) for host in self.sim.machines))
    @rule(pick=st.integers(0, 5), turned=st.integers(0, 4))
    def a_machine_vanishes(self, pick: int, turned: int) -> None:
        """The machine can be leaving or turned away."""
        there = [host for host in self.sim.machines if self.sim.workers_of(host)]
        self.sim.vanish(there[pick % len(there)], turned)

    @precondition(lambda self: self.sim.alive)
    @rule(pick=st.integers(0, 20))
    def a_worker_is_to_leave(self, pick: int) -> None:
        staying = [worker for worker in self.sim.alive if worker not in self.sim.leaving]
        if staying:
            self.sim.drain(staying[pick % len(staying)])

    @precondition(lambda self: self.sim.leaving)
    @rule(pick=st.integers(0, 20))
    def a_worker_that_is_to_leave_dies(self, pick: int) -> None:
        leaving = sorted(self.sim.leaving)
        self.sim.lose(leaving[pick % len(leaving)])

    @precondition(lambda self: any(self.sim.promised()))
    @rule(pick=st.integers(0, 20))
    def a_successor_dies(self, pick: int) -> None:
        promised = self.sim.promised()
        self.sim.lose(promised[pick % len(promised)])

    @precondition(lambda self: any(w.host and w.joined for w in self.sim.alive.values()))
    @rule(pick=st.integers(0, 20))
    def a_worker_of_a_joined_machine_fails(self, pick: int) -> None:
        workers = [name for name, worker in self.sim.alive.items() if worker.host and worker.joined]
        self.sim.fail(workers[pick % len(workers)])

    @precondition(lambda self: any(w.host and not w.joined for w in self.sim.alive.values()))
    @rule(pick=st.integers(0, 5), times=st.integers(1, 4))
    def workers_of_a_joined_machine_die_as_they_start(self, pick: int, times: int) -> None:
        hosts = sorted({worker.host for worker in self.sim.alive.values() if worker.host and not worker.joined})
        for _ in range(times):
            starting = [w for w in self.sim.workers_of(hosts[pick % len(hosts)]) if not self.sim.alive[w].joined]
            if starting:
                self.sim.lose(starting[0])

    @precondition(lambda self: self.sim.parting)
    @rule()
    def a_machine_that_was_turned_away_goes(self) -> None:
        self.sim.part(self.sim.parting[0])


MACHINES = 4
BUSY = ("link", "commit", "settle", "save")
TestReplicas = bounded(ReplicasMachine, runs=25, steps=25)
