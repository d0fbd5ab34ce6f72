"""The controller of one replica under every fault, in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from planaria.control.facts import events as e
from planaria.recovery import with_strategy
from support.control.fault_rules import FaultRules, bounded
from support.control.open_fleet import OpenFleet
from support.control.single_replica import PAIRS, SHARED, STAGES, started

pytestmark = pytest.mark.timeout(600)  # many histories

CHAINS = [
    "checkfree",
    "checkfree, checkpoint",
    "checkfree_plus, echo, checkpoint",
    "redundant",
    "echo, checkfree",
    "identity, checkpoint",
    "snapshot",
    "snapshot, checkpoint",
    "whole_copies, checkpoint",
]


def origins(folders: list[str]) -> dict[int, str]:
    """Map stages to folders; a stage with an empty name starts from the seed."""
    return {stage: folder for stage, folder in enumerate(folders) if folder}


def on_a_schedule(start: e.RunStarted, meanwhile: str) -> e.RunStarted:
    """Return the same run with several nodes per stage, which most strategies that keep copies do not support."""
    if start.recovery.strategy.startswith(REMEMBERING):
        return e.RunStarted.model_validate(start.model_dump() | SHARED)
    first = {"checkpoint": "checkfree, checkpoint"}.get(start.recovery.strategy.split(", ")[-1], "checkfree")
    recovery = with_strategy(start.recovery, first).model_copy(update={"meanwhile": meanwhile})
    return e.RunStarted.model_validate(start.model_dump() | SHARED | {"recovery": recovery.model_dump()})


REMEMBERING = ("snapshot", "whole_copies")


def options_of(strategy: str) -> st.SearchStrategy[dict[str, int]]:
    """Return the options that affect decisions."""
    if "echo" in strategy:
        return st.fixed_dictionaries({"every": st.integers(1, 3)})
    if not strategy.startswith(REMEMBERING):
        return st.just({})
    if "whole_copies" in strategy:
        return st.sampled_from([{"every": 1}, {"every": 3, "slices": 2}])
    sent = st.sampled_from([(0, 1), (1, 1), (2, 1), (2, 2), (3, 2)])
    return st.builds(lambda t, s: {"tolerate": t, "every": s[0], "slices": s[1]}, st.integers(1, 2), sent)


def resumed_run(resumed: dict[str, Any], **fields: Any) -> e.RunStarted:
    """Return a resumed run; only runs with snapshots in memory resume from these."""
    keep_reports = fields["recovery"]["options"].get("every") and fields["recovery"]["strategy"].startswith(REMEMBERING)
    return started(**(fields | (resumed if keep_reports or "snapshot_step" not in resumed else {})))


FROM_MEMORY = {
    "first_step": 3, "first_generation": 7, "steps": 6, "checkpoint_of_stage": origins(["a"] * 5), "durable_step": 2,
    "snapshot_step": 3,
    "recalled_from": {"part": "0a", "generation": 6, "step": 3},
}  # fmt: skip

alone = st.builds(
    resumed_run,
    steps=st.integers(1, 5),
    spares=st.integers(0, 2),
    replace=st.sampled_from([True, True, False]),
    eval_every=st.sampled_from([0, 1, 2]),
    save_every=st.sampled_from([0, 1, 2]),
    save_in_background=st.booleans(),
    diagnose=st.sampled_from(["off", "report", "act"]),
    recovery=st.sampled_from(CHAINS).flatmap(
        lambda strategy: st.fixed_dictionaries(
            {
                "strategy": st.just(strategy),
                "meanwhile": st.sampled_from(["wait"] if strategy.startswith(REMEMBERING) else ["wait", "skip"]),
                "options": options_of(strategy),
            }
        )
    ),
    resumed=st.sampled_from(
        [
            {},
            {},
            {"first_step": 1, "first_generation": 7, "checkpoint_of_stage": origins(["a"] * 5), "steps": 5},
            {
                "first_step": 2,
                "first_generation": 3,
                "checkpoint_of_stage": origins(["b", "b", "", "b", "b"]),
                "steps": 5,
            },
            {
                "first_step": 2,
                "first_generation": 3,
                "checkpoint_of_stage": origins(["b", "a", "a", "b", "b"]),
                "steps": 5,
            },
            FROM_MEMORY | {"snapshot_nodes": [0, 1, 2, 3, 4]},
            FROM_MEMORY | {"snapshot_nodes": [0, 1, 3, 4]},
        ]
    ),
)


starts = st.one_of(alone, st.builds(on_a_schedule, alone, st.sampled_from(["wait", "skip"])))


class ControlMachine(FaultRules):
    sim: OpenFleet
    calm_facts = 40

    @initialize(start=starts, peaceful=st.integers(0, 3))
    def begin(self, start: e.RunStarted, peaceful: int) -> None:
        """Start with some commits without faults: most faults need them."""
        self.sim = OpenFleet(start)
        while self.sim.pending() and self.sim.state.step < start.first_step + peaceful:
            self.sim.work(self.sim.pending()[0])

    @precondition(lambda self: self.sim.pending())
    @rule()
    def all_workers_act(self) -> None:
        for worker in self.sim.pending():
            if worker in self.sim.pending():
                self.sim.work(worker)

    @precondition(lambda self: self.sim.alive)
    @rule()
    def a_middle_stage_dies(self) -> None:
        self.sim.lose_node(STAGES // 2)

    @precondition(lambda self: self.sim.alive)
    @rule(stage=st.integers(0, STAGES), away=st.sampled_from([-1, 1]))
    def neighbours_die_in_turn(self, stage: int, away: int) -> None:
        """The second dies when the first has just been rebuilt and holds no copies yet."""
        self.sim.lose_node(stage)
        for _ in range(100):
            if self.sim.pending() and self.sim.state.phase != "run":
                self.sim.work(self.sim.pending()[0])
        self.sim.lose_node((stage + away) % (STAGES + 1))

    @precondition(lambda self: not self.sim.run.over and len(self.sim.rooms) < 3)
    @rule(room=st.integers(1, 3))
    def a_machine_joins(self, room: int) -> None:
        self.sim.join(room)

    @precondition(lambda self: any(self.sim.workers_of(host) for host in self.sim.rooms))
    @rule(pick=st.integers(0, 2), politely=st.booleans())
    def a_machine_leaves(self, pick: int, politely: bool) -> None:
        there = [host for host in self.sim.rooms if self.sim.workers_of(host)]
        self.sim.leave(there[pick % len(there)], politely)

    @precondition(lambda self: self.sim.state.holders and not self.sim.run.over)
    @rule(nodes=st.sets(st.integers(0, STAGES), min_size=1, max_size=3))
    def several_workers_are_to_leave(self, nodes: set[int]) -> None:
        holders = self.sim.state.holders
        for worker in [holders[node] for node in sorted(nodes) if node in holders]:
            self.sim.drain(worker)

    @precondition(lambda self: self.sim.alive and self.sim.state.handover_from)
    @rule(pick=st.integers(0, 3), new=st.booleans())
    def an_end_of_a_handover_dies(self, pick: int, new: bool) -> None:
        state = self.sim.state
        node = sorted(state.handover_from)[pick % len(state.handover_from)]
        self.sim.lose_node(node) if new else self.sim.lose(state.handover_from[node])

    @precondition(lambda self: self.sim.replans)
    @rule()
    def a_plan_is_found(self) -> None:
        self.sim.find_plan()

    @precondition(lambda self: self.sim.state.holders and not self.sim.run.over)
    @rule(slow=st.dictionaries(st.integers(0, STAGES), st.sampled_from([3.0, 5.0]), max_size=2))
    def workers_are_measured(self, slow: dict[int, float]) -> None:
        self.sim.measure(slow)

    @precondition(lambda self: self.sim.alive)
    @rule(pair=st.sampled_from(PAIRS), invalid=st.booleans())
    def an_edge_breaks(self, pair: tuple[int, int], invalid: bool) -> None:
        self.sim.break_edge(pair, invalid=invalid)

    @precondition(lambda self: self.sim.alive and self.sim.state.broken_edges)
    @rule()
    def grace_expires(self) -> None:
        self.sim.expire_grace()


TestControl = bounded(ControlMachine, runs=60, steps=30)
