"""The controller's mind under everything that workers may do to it, in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from open_fleet import OpenFleet
from pretender import DISK

from examples import examples
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.apply import apply
from planaria.control.replay import replay
from planaria.control.saving import resting
from planaria.recovery import with_strategy

pytestmark = pytest.mark.timeout(600)  # many histories; on a busy machine they take their time

STAGES = 4
PAIRS = [(s, s + 1) for s in range(STAGES)] + [(0, STAGES)]
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


def started(**changed: Any) -> e.RunStarted:
    plain: dict[str, Any] = {
        "name": "run", "seed": 1, "stages": STAGES, "steps": 4, "first_step": 0, "samples_per_step": 8,
        "wall_time": 0.0, "spares": 1, "pairs": PAIRS, "routes": [[0, 1, 2, 3, 4, 0], [0, 2, 1, 4, 3, 0]],
    }  # fmt: skip
    return e.RunStarted.model_validate(plain | changed)


def origins(folders: list[str]) -> dict[int, str]:
    """Stage → folder; an empty name leaves the stage to the seed."""
    return {stage: folder for stage, folder in enumerate(folders) if folder}


SHARED: dict[str, Any] = {
    "arrangement": [[0, 6], [5, 1], [2, 7], [3], [4]],
    "routes": [[0, 1, 3, 4, 0], [6, 5, 2, 3, 6], [0, 5, 7, 4, 0], [6, 2, 1, 4, 6]],
    "pairs": [],
}
"""a schedule: two data nodes, stages with two nodes and with one"""


def on_a_schedule(start: e.RunStarted, meanwhile: str) -> e.RunStarted:
    """The same run with several nodes to a stage; most strategies that keep copies elsewhere are not for those."""
    if start.recovery.strategy.startswith(REMEMBERING):
        return e.RunStarted.model_validate(start.model_dump() | SHARED)
    first = {"checkpoint": "checkfree, checkpoint"}.get(start.recovery.strategy.split(", ")[-1], "checkfree")
    recovery = with_strategy(start.recovery, first).model_copy(update={"meanwhile": meanwhile})
    return e.RunStarted.model_validate(start.model_dump() | SHARED | {"recovery": recovery.model_dump()})


REMEMBERING = ("snapshot", "whole_copies")


def options_of(strategy: str) -> st.SearchStrategy[dict[str, int]]:
    """Those that matter to what the controller decides."""
    if "echo" in strategy:
        return st.fixed_dictionaries({"every": st.integers(1, 3)})
    if not strategy.startswith(REMEMBERING):
        return st.just({})
    if "whole_copies" in strategy:
        return st.sampled_from([{"every": 1}, {"every": 3, "slices": 2}])
    sent = st.sampled_from([(0, 1), (1, 1), (2, 1), (2, 2), (3, 2)])
    return st.builds(lambda t, s: {"tolerate": t, "every": s[0], "slices": s[1]}, st.integers(1, 2), sent)


def resumed_run(resumed: dict[str, Any], **fields: Any) -> e.RunStarted:
    """Only runs whose workers remember can be resumed from memory."""
    remembers = fields["recovery"]["options"].get("every") and fields["recovery"]["strategy"].startswith(REMEMBERING)
    return started(**(fields | (resumed if remembers or "recalled" not in resumed else {})))


FROM_MEMORY = {
    "first_step": 3, "first_generation": 7, "steps": 6, "load": origins(["a"] * 5), "durable_step": 2, "recalled": 3,
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
    diagnose=st.sampled_from(["off", "tell", "act"]),
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
            {"first_step": 1, "first_generation": 7, "load": origins(["a"] * 5), "steps": 5},
            {"first_step": 2, "first_generation": 3, "load": origins(["b", "b", "", "b", "b"]), "steps": 5},
            {"first_step": 2, "first_generation": 3, "load": origins(["b", "a", "a", "b", "b"]), "steps": 5},
            FROM_MEMORY | {"remembering": [0, 1, 2, 3, 4]},
            FROM_MEMORY | {"remembering": [0, 1, 3, 4]},
        ]
    ),
)


starts = st.one_of(alone, st.builds(on_a_schedule, alone, st.sampled_from(["wait", "skip"])))


class ControlMachine(RuleBasedStateMachine):
    fleet: OpenFleet

    @initialize(start=starts, peaceful=st.integers(0, 3))
    def begin(self, start: e.RunStarted, peaceful: int) -> None:
        """Most of what can go wrong is possible only after some commits: give the run some untroubled ones."""
        self.fleet = OpenFleet(start)
        while self.fleet.pending() and self.fleet.state.step < start.first_step + peaceful:
            self.fleet.work(self.fleet.pending()[0])

    @precondition(lambda self: self.fleet.pending())
    @rule(picks=st.lists(st.integers(0, 9), min_size=1, max_size=30))
    def some_work(self, picks: list[int]) -> None:
        for pick in picks:
            if pending := self.fleet.pending():
                self.fleet.work(pending[pick % len(pending)])

    @precondition(lambda self: self.fleet.pending())
    @rule()
    def all_do_what_they_were_told(self) -> None:
        for worker in self.fleet.pending():
            if worker in self.fleet.pending():
                self.fleet.work(worker)

    @precondition(lambda self: any(me.writing for me in self.fleet.alive.values()))
    @rule(pick=st.integers(0, 9))
    def a_worker_that_writes_dies(self, pick: int) -> None:
        writing = [name for name, me in self.fleet.alive.items() if me.writing]
        self.fleet.lose(writing[pick % len(writing)])

    @precondition(lambda self: self.fleet.pending())
    @rule(turns=st.integers(5, 40))
    def disks_are_slow(self, turns: int) -> None:
        for turn in range(turns):
            if pending := [w for w in self.fleet.pending() if not w.endswith(DISK)]:
                self.fleet.work(pending[turn % len(pending)])

    @precondition(lambda self: self.fleet.alive)
    @rule(pick=st.integers(0, 9))
    def a_worker_dies(self, pick: int) -> None:
        self.fleet.lose(list(self.fleet.alive)[pick % len(self.fleet.alive)])

    @precondition(lambda self: self.fleet.alive)
    @rule()
    def the_holder_of_a_middle_stage_dies(self) -> None:
        self.fleet.lose_node(STAGES // 2)

    @precondition(lambda self: self.fleet.alive)
    @rule(stage=st.integers(0, STAGES), away=st.sampled_from([-1, 1]))
    def neighbours_die_one_after_the_other(self, stage: int, away: int) -> None:
        """The second dies just when the first is rebuilt, and keeps nothing of others yet."""
        self.fleet.lose_node(stage)
        for _ in range(100):
            if self.fleet.pending() and self.fleet.state.phase != "run":
                self.fleet.work(self.fleet.pending()[0])
        self.fleet.lose_node((stage + away) % (STAGES + 1))

    @precondition(lambda self: not self.fleet.run.over and len(self.fleet.rooms) < 3)
    @rule(room=st.integers(1, 3))
    def a_machine_joins(self, room: int) -> None:
        self.fleet.join(room)

    @precondition(lambda self: any(self.fleet.workers_of(host) for host in self.fleet.rooms))
    @rule(pick=st.integers(0, 2), politely=st.booleans())
    def a_machine_leaves(self, pick: int, politely: bool) -> None:
        there = [host for host in self.fleet.rooms if self.fleet.workers_of(host)]
        self.fleet.leave(there[pick % len(there)], politely)

    @precondition(lambda self: self.fleet.state.holders and not self.fleet.run.over)
    @rule(nodes=st.sets(st.integers(0, STAGES), min_size=1, max_size=3))
    def workers_are_to_leave(self, nodes: set[int]) -> None:
        holders = self.fleet.state.holders
        for worker in [holders[node] for node in sorted(nodes) if node in holders]:
            self.fleet.drain(worker)

    @precondition(lambda self: self.fleet.alive and self.fleet.state.leavers)
    @rule(pick=st.integers(0, 3), new=st.booleans())
    def an_end_of_a_handover_dies(self, pick: int, new: bool) -> None:
        state = self.fleet.state
        node = sorted(state.leavers)[pick % len(state.leavers)]
        self.fleet.lose_node(node) if new else self.fleet.lose(state.leavers[node])

    @precondition(lambda self: self.fleet.asked)
    @rule()
    def a_plan_is_found(self) -> None:
        self.fleet.find_plan()

    @precondition(lambda self: self.fleet.state.holders and not self.fleet.run.over)
    @rule(slow=st.dictionaries(st.integers(0, STAGES), st.sampled_from([3.0, 5.0]), max_size=2))
    def workers_are_measured(self, slow: dict[int, float]) -> None:
        self.fleet.measure(slow)

    @precondition(lambda self: self.fleet.alive)
    @rule(pair=st.sampled_from(PAIRS))
    def an_edge_breaks(self, pair: tuple[int, int]) -> None:
        self.fleet.break_edge(pair)

    @precondition(lambda self: self.fleet.alive and self.fleet.state.suspects)
    @rule()
    def grace_is_over(self) -> None:
        self.fleet.expire_grace()

    @precondition(lambda self: self.fleet.alive and len(self.fleet.history) > 40)
    @rule(prompt=st.booleans())
    def someone_asks_to_stop(self, prompt: bool) -> None:
        self.fleet.stop(prompt)

    @precondition(lambda self: self.fleet.alive and self.fleet.run.prompt and not self.fleet.run.overdue)
    @rule()
    def a_stop_waits_no_longer(self) -> None:
        self.fleet.stop_waits_no_longer()

    @precondition(lambda self: self.fleet.alive)
    @rule(room=st.integers(0, 9), full=st.integers(1, 20))
    def the_disk_is_full(self, room: int, full: int) -> None:
        self.fleet.room, self.fleet.full = room, full

    @precondition(lambda self: resting(self.fleet.run) is not None)
    @rule()
    def a_last_save_may_be_tried_again(self) -> None:
        self.fleet.try_again()

    @rule()
    def old_news_comes_in(self) -> None:
        now, generation = self.fleet.run, self.fleet.state.generation
        for fact in self.fleet.history:
            stale = (
                isinstance(fact, REPORTS)
                and getattr(fact, "worker", "") != e.CONTROLLER
                and fact.generation < generation
            )
            if stale or isinstance(fact, e.WorkerLost):
                assert apply(fact, now) == now

    @invariant()
    def every_holder_lives_and_holds_one_stage(self) -> None:
        state = self.fleet.state
        if not self.fleet.run.over:
            assert set(state.holders.values()) <= self.fleet.alive.keys()
            assert len(set(state.holders.values())) == len(state.holders)
            assert state.waiting <= self.fleet.alive.keys()

    def teardown(self) -> None:
        if not hasattr(self, "fleet") or not self.fleet.sound:
            return
        self.fleet.behave()
        assert self.fleet.ending is not None, f"the run never ends: {self.fleet.run}"
        generations = [fact.generation for fact in self.fleet.history if isinstance(fact, d.Form)]
        assert generations == sorted(set(generations))
        again = replay(self.fleet.history)
        assert not again.problems
        assert again.state == self.fleet.run
        for fact in self.fleet.history:
            text = fact.model_dump_json()
            adapter = d.DECISION if isinstance(fact, DECISIONS) else e.EVENT
            assert adapter.validate_json(text) == fact  # type: ignore[attr-defined]


REPORTS = (
    e.Linked,
    e.EdgeBroken,
    e.GraceExpired,
    e.StageReady,
    e.StageCommitted,
    e.StageSaved,
    e.SaveFailed,
    e.StageCopied,
)
DECISIONS = d.Decision.__args__[0].__args__  # type: ignore[attr-defined]

TestControl = ControlMachine.TestCase
TestControl.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
