"""Parities of all stages at one another: whatever so many stages are lost together, they come back bit for bit."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import engine_of, losses

from observer import Log, train_inline
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.faults.trace import Trace
from planaria.lab.inline.engine import InlineEngine
from planaria.models.packing import pack
from planaria.recovery.base import Replica
from planaria.recovery.snapshot import Snapshot
from planaria.runtime.checkpoint.memory import MemoryFolder
from planaria.runtime.engine.check import check
from planaria.runtime.engine.prepare import prepare
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.unused import idle
from waiting import until

Recipe = Callable[..., RunConfig]
STAGES = 4


def made(
    config: Recipe,
    tolerate: int,
    strategy: str = "snapshot",
    every: int = 0,
    slices: int = 1,
    code: str = "auto",
    **sections: Any,
) -> InlineEngine:
    options = {"tolerate": tolerate, "every": every, "slices": slices, "code": code}
    recovery = {"strategy": strategy, "options": options}
    return engine_of(config(recovery=recovery, optim={"weight_decay": 0.1, "clip": 0.5}, **sections))


def whole(engine: InlineEngine) -> dict[int, bytes]:
    return {node: pack(runner.state().trained).numpy().tobytes() for node, runner in engine.runners.items()}


def lose(engine: InlineEngine, nodes: tuple[int, ...]) -> str:
    for node in nodes:
        for parameter in engine.runners[node].parameters.values():
            parameter.detach().fill_(math.nan)
    return engine.lose(nodes).reason


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("tolerate", "code"), [(1, "auto"), (2, "auto"), (1, "local")])
def test_whatever_is_lost_together_comes_back_bit_for_bit(tolerate: int, code: str, config: Recipe) -> None:
    struck, untroubled = made(config, tolerate, code=code), made(config, tolerate)
    assert losses(struck, 2) == losses(untroubled, 2)
    for size in range(1, tolerate + 1):
        for lost in combinations(range(STAGES + 1), size):
            assert lose(struck, lost) == "", lost
            assert whole(struck) == whole(untroubled), lost
            assert losses(struck, 1) == losses(untroubled, 1), lost


def test_more_than_that_go_to_the_next_strategy_with_the_reason(config: Recipe) -> None:
    engine = made(config, 1)
    losses(engine, 2)
    assert "2 of 5 stages are lost together (1, 2)" in lose(engine, (1, 2))
    chained = made(config, 1, "snapshot, copy")
    losses(chained, 2)
    assert lose(chained, (1, 3)) == ""


def test_a_stage_that_has_its_state_otherwise_than_from_the_parities_counts_as_lost_until_it_took_part() -> None:
    once, twice = Snapshot(tolerate=1), Snapshot(tolerate=2)
    ages = dict.fromkeys(range(5), 3)
    knowing = Replica(STAGES, ages, frozenset({0, 1, 3}))
    answer = once.donors(frozenset({4}), knowing)
    assert answer.refused == {4: "1 of 5 stages are lost together (4, and 2 have not taken part in a step since)"}
    assert twice.donors(frozenset({4}), knowing).donors == {4: (0, 1, 3)}
    assert once.donors(frozenset({4}), Replica(STAGES, ages, frozenset({0, 1, 2, 3}))).donors == {4: (0, 1, 2, 3)}


def test_what_comes_back_holds_its_parities_at_once(config: Recipe) -> None:
    """Stage after stage is lost before a single step is made: the group is never without protection."""
    engine, untroubled = made(config, 1), made(config, 1)
    losses(engine, 2), losses(untroubled, 2)
    for stage in (2, 3, 0, 4, 1, 2):
        assert lose(engine, (stage,)) == ""
    assert whole(engine) == whole(untroubled) and losses(engine, 2) == losses(untroubled, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tolerate", "every", "slices"), [(1, 1, 1), pytest.param(1, 4, 1, marks=pytest.mark.slow), (2, 4, 3)]
)
def test_all_go_back_to_the_snapshot_that_they_retain(config: Recipe, tolerate: int, every: int, slices: int) -> None:
    """Snapshots are of steps 0, every, 2 every …, and retained ``slices`` steps later; what follows repeats itself."""
    unbroken = made(config, tolerate, every=every, slices=slices)
    told = losses(unbroken, 11)
    for lost in [(0,), (3,), (0, 1), (2, 3), (4, 0)]:
        if len(lost) > tolerate:
            continue
        for steps in (1, 4, 6, 9):
            engine = made(config, tolerate, every=every, slices=slices)
            losses(engine, steps)
            retained = max((t for t in range(0, steps, every) if t + slices <= steps), default=None)
            reason = lose(engine, lost)
            if retained is None:
                assert "there is no snapshot yet" in reason
                continue
            assert reason == "" and engine.step == retained, (lost, steps)
            assert losses(engine, 11 - retained) == told[retained:], (lost, steps)
            assert whole(engine) == whole(unbroken)


@pytest.mark.slow
def test_a_snapshot_that_is_taken_again_after_all_went_back_to_it_is_as_good(config: Recipe) -> None:
    engine, unbroken = made(config, 2, every=3, slices=2), made(config, 2, every=3, slices=2)
    told = losses(unbroken, 9)
    losses(engine, 5)
    assert lose(engine, (0, 1)) == "" and engine.step == 3
    losses(engine, 2)
    assert lose(engine, (1, 2)) == "" and engine.step == 3
    losses(engine, 5)
    assert lose(engine, (0, 1)) == "" and engine.step == 6
    assert losses(engine, 3) == told[6:] and whole(engine) == whole(unbroken)


def test_what_was_lost_in_a_retained_snapshot_is_protected_at_once(config: Recipe) -> None:
    unbroken, engine = made(config, 1, every=3, slices=2), made(config, 1, every=3, slices=2)
    told = losses(unbroken, 9)
    losses(engine, 6)
    for stage in (2, 3, 0):
        assert lose(engine, (stage,)) == "" and engine.step == 3
    assert losses(engine, 1) == told[3:4] and lose(engine, (1,)) == "" and engine.step == 3
    assert losses(engine, 6) == told[3:] and whole(engine) == whole(unbroken)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("every", "slices"), [(1, 1), (4, 3)])
def test_whole_copies_at_the_next_stage_are_gone_back_to_in_the_same_way(
    config: Recipe, every: int, slices: int
) -> None:
    options = {"strategy": "whole_copies", "options": {"every": every, "slices": slices}}

    def fresh() -> InlineEngine:
        return engine_of(config(recovery=options, optim={"weight_decay": 0.1, "clip": 0.5}))

    unbroken = fresh()
    told = losses(unbroken, 11)
    for lost in [(0,), (3,), (1, 3), (0, 2)]:
        engine = fresh()
        losses(engine, 7)
        assert lose(engine, lost) == "" and engine.step == (6 if every == 1 else 4)
        assert lose(engine, (4,)) == "" and losses(engine, 11 - engine.step) == told[6 if every == 1 else 4 :]
        assert whole(engine) == whole(unbroken)
    assert "stage 2's copy was at stage 3, which is lost too" in lose(engine, (2, 3))


def test_more_than_that_in_retained_snapshots_leave_everything_as_it_is(config: Recipe) -> None:
    engine = made(config, 1, every=2)
    losses(engine, 3)
    assert "2 of 5 stages are lost together (1, 2)" in lose(engine, (1, 2)) and engine.step == 3


def test_a_checkpoint_that_is_newer_than_the_snapshot_is_where_all_go_back_to(config: Recipe) -> None:
    engine = made(config, 1, every=4)
    losses(engine, 7)
    plan = engine.lose((2,), durable=6)
    assert plan.rollback == "disk" and engine.step == 7
    assert engine.lose((2,), durable=4).rollback == "memory" and engine.step == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 2, "slices": 3}, "slices = 3: a snapshot is whole before the next one begins, after every = 2"),
        ({"slices": 2}, "slices = 2: parities in step with training are sent in every step; leave it out"),
    ],
)
def test_slices_that_cannot_be_are_refused(config: Recipe, options: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(config(recovery={"strategy": "snapshot", "options": options}))


def test_stages_that_may_be_skipped_are_refused(config: Recipe) -> None:
    """Every parity is of all stages: behind those that went on, it would bring back nobody."""
    recipe = config(recovery={"strategy": "snapshot", "meanwhile": "skip"})
    with pytest.raises(
        UserError, match=r"snapshot needs recovery.meanwhile = 'wait', not 'skip': steps that one stage"
    ):
        check(recipe)


def test_a_group_too_small_for_what_it_is_to_survive_is_refused(config: Recipe) -> None:
    with pytest.raises(UserError, match=r"recovery.options.tolerate = 3: the ends and 4 block stages are 5"):
        made(config, 3)


def test_in_one_process_snapshots_outlive_it_until_the_run_is_saved(config: Recipe, tmp_path: Path) -> None:
    options = {"every": 2, "outlive": True}
    made = config(recovery={"strategy": "snapshot", "options": options}).model_copy(update={"engine": "inline"})
    assert list(idle(ResolvedRun(made), Trace(faults=()))) == []
    memory = MemoryFolder(tmp_path / "run")

    class Looks(Log):
        def on_decision(self, t: float, decision: d.Decision) -> None:
            super().on_decision(t, decision)
            if isinstance(decision, d.RunStep) and decision.step == 8:
                until(lambda: [*memory.folder.rglob("*.safetensors")])

    assert train_inline(prepare(made), tmp_path / "run", Looks()).outcome == "finished"
    assert not memory.folder.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "snapshots"]


def flip(engine: InlineEngine, node: int) -> None:
    """One bit of what is remembered at ``node``, of a parity where it holds one."""
    assert engine.keeping[node].intact(), "and its checksum is made"
    *_, holder = (h for h in engine.keeping[node]._all_holders.values() if h.nbytes)
    (*_, part) = holder.state().weights.values()
    part.view(-1).view(torch.uint8)[part.nbytes // 3] ^= 4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("every", [0, 3])
def test_a_flipped_bit_counts_as_one_more_loss(config: Recipe, every: int) -> None:
    unbroken = made(config, 2, every=every)
    told = losses(unbroken, 8)
    for damaged, lost in [(1, 3), (0, 4), (4, 0), (3, 2)]:
        engine = made(config, 2, every=every)
        losses(engine, 5)
        flip(engine, damaged)
        assert lose(engine, (lost,)) == "" and engine.step == (3 if every else 5)
        at = engine.step
        assert losses(engine, 8 - at) == told[at:] and whole(engine) == whole(unbroken)
    for damaged, lost in [(1, 3), (4, 0)]:
        engine = made(config, 1, every=every)
        losses(engine, 5)
        flip(engine, damaged)
        both = f"({min(damaged, lost)}, {max(damaged, lost)})"
        assert f"2 of 5 stages are lost together {both}" in lose(engine, (lost,))
