"""Snapshots as parities of all stages at one another: up to ``tolerate`` stages lost together are restored exactly."""

from __future__ import annotations

import threading
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.faults.trace import Trace
from planaria.lab.reference.engine import ReferenceEngine
from planaria.recovery.base import DamagedReplica
from planaria.recovery.snapshot import Snapshot
from planaria.runtime.checkpoint.memory_folder import MemoryFolder, remove_orphaned
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.preparation.prepare import prepare
from planaria.runtime.preparation.unused_settings import without_effect
from planaria.runtime.resolved_run import ResolvedRun
from support.observer import Log, train_inline
from support.tiny_engine import Recipe, engine_of, lose, losses, whole
from support.waiting import until

STAGES = 4


def made(config: Recipe, tolerate: int, strategy: str = "snapshot", **options: Any) -> ReferenceEngine:
    recovery = {"strategy": strategy, "options": {"tolerate": tolerate, **options}}
    return engine_of(config(recovery=recovery, optim={"weight_decay": 0.1, "clip": 0.5}))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("tolerate", "code"), [(1, "auto"), (2, "auto"), (1, "local")])
def test_stages_lost_together_are_restored_bit_for_bit(tolerate: int, code: str, config: Recipe) -> None:
    disturbed, undisturbed = made(config, tolerate, code=code), made(config, tolerate)
    assert losses(disturbed, 2) == losses(undisturbed, 2)
    for size in range(1, tolerate + 1):
        for lost in combinations(range(STAGES + 1), size):
            assert lose(disturbed, *lost).reason == "", lost
            assert whole(disturbed) == whole(undisturbed), lost
            assert losses(disturbed, 1) == losses(undisturbed, 1), lost


def test_more_lost_stages_go_to_the_next_strategy_with_the_reason(config: Recipe) -> None:
    engine = made(config, 1)
    losses(engine, 2)
    assert "2 of 5 stages are lost together (1, 2)" in lose(engine, 1, 2).reason
    chained = made(config, 1, "snapshot, copy")
    losses(chained, 2)
    assert lose(chained, 1, 3).reason == ""


def test_a_stage_rebuilt_otherwise_counts_as_lost_until_its_next_step() -> None:
    once, twice = Snapshot(tolerate=1), Snapshot(tolerate=2)
    staleness = dict.fromkeys(range(5), 3)
    knowing = DamagedReplica(STAGES, staleness, frozenset({0, 1, 3}))
    answer = once.donors(frozenset({4}), knowing)
    assert answer.refused == {4: "1 of 5 stages are lost together (4, and 2 have not taken part in a step since)"}
    assert twice.donors(frozenset({4}), knowing).donors == {4: (0, 1, 3)}
    assert once.donors(frozenset({4}), DamagedReplica(STAGES, staleness, frozenset({0, 1, 2, 3}))).donors == {
        4: (0, 1, 2, 3)
    }


def test_a_restored_stage_has_its_parities_at_once(config: Recipe) -> None:
    """Stage after stage is lost before the next step; the group is always protected."""
    engine, undisturbed = made(config, 1), made(config, 1)
    losses(engine, 2), losses(undisturbed, 2)
    for stage in (2, 3, 0, 4, 1, 2):
        assert lose(engine, stage).reason == ""
    assert whole(engine) == whole(undisturbed) and losses(engine, 2) == losses(undisturbed, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("tolerate", "every", "slices"), [(1, 1, 1), (1, 4, 1), (2, 4, 3)])
def test_all_return_to_the_retained_snapshot(config: Recipe, tolerate: int, every: int, slices: int) -> None:
    """Snapshots are of steps 0, every, 2 every …, and retained ``slices`` steps later; then steps repeat."""
    unbroken = made(config, tolerate, every=every, slices=slices)
    expected = losses(unbroken, 11)
    for lost in [(0,), (3,), (0, 1), (2, 3), (4, 0)]:
        if len(lost) > tolerate:
            continue
        for steps in (1, 4, 6, 9):
            engine = made(config, tolerate, every=every, slices=slices)
            losses(engine, steps)
            retained = max((t for t in range(0, steps, every) if t + slices <= steps), default=None)
            reason = lose(engine, *lost).reason
            if retained is None:
                assert "no snapshot is complete yet" in reason
                continue
            assert reason == "" and engine.step == retained, (lost, steps)
            assert losses(engine, 11 - retained) == expected[retained:], (lost, steps)
            assert whole(engine) == whole(unbroken)


@pytest.mark.slow
def test_a_snapshot_repeated_after_a_rollback_is_valid(config: Recipe) -> None:
    engine, unbroken = made(config, 2, every=3, slices=2), made(config, 2, every=3, slices=2)
    expected = losses(unbroken, 9)
    for steps, lost, back_to in ((5, (0, 1), 3), (2, (1, 2), 3), (5, (0, 1), 6)):
        losses(engine, steps)
        assert lose(engine, *lost).reason == "" and engine.step == back_to
    assert losses(engine, 3) == expected[6:] and whole(engine) == whole(unbroken)


def test_a_stage_restored_from_a_snapshot_is_protected_at_once(config: Recipe) -> None:
    unbroken, engine = made(config, 1, every=3, slices=2), made(config, 1, every=3, slices=2)
    expected = losses(unbroken, 9)
    losses(engine, 6)
    for stage in (2, 3, 0):
        assert lose(engine, stage).reason == "" and engine.step == 3
    assert losses(engine, 1) == expected[3:4] and lose(engine, 1).reason == "" and engine.step == 3
    assert losses(engine, 6) == expected[3:] and whole(engine) == whole(unbroken)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("every", "slices"), [(1, 1), (4, 3)])
def test_whole_copies_at_the_next_stage_are_restored_too(config: Recipe, every: int, slices: int) -> None:
    options = {"strategy": "whole_copies", "options": {"every": every, "slices": slices}}

    def fresh() -> ReferenceEngine:
        return engine_of(config(recovery=options, optim={"weight_decay": 0.1, "clip": 0.5}))

    unbroken = fresh()
    expected = losses(unbroken, 11)
    for lost in [(0,), (3,), (1, 3), (0, 2)]:
        engine = fresh()
        losses(engine, 7)
        assert lose(engine, *lost).reason == "" and engine.step == (6 if every == 1 else 4)
        assert lose(engine, 4).reason == "" and losses(engine, 11 - engine.step) == expected[6 if every == 1 else 4 :]
        assert whole(engine) == whole(unbroken)
    assert "stage 2's copy was at stage 3, which is lost too" in lose(engine, 2, 3).reason


def test_more_lost_stages_than_a_snapshot_tolerates_change_nothing(config: Recipe) -> None:
    engine = made(config, 1, every=2)
    losses(engine, 3)
    assert "2 of 5 stages are lost together (1, 2)" in lose(engine, 1, 2).reason and engine.step == 3


def test_all_return_to_a_checkpoint_newer_than_the_snapshot(config: Recipe) -> None:
    engine = made(config, 1, every=4)
    losses(engine, 7)
    plan = engine.lose((2,), durable=6)
    assert plan.rollback == "disk" and engine.step == 7
    assert engine.lose((2,), durable=4).rollback == "memory" and engine.step == 4


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"every": 2, "slices": 3},
            "slices = 3: a snapshot must be complete before the next one begins, every = 2 steps later",
        ),
        ({"slices": 2}, "slices = 2: with every = 0, parities are sent in every step; remove it"),
    ],
)
def test_invalid_settings_are_refused(config: Recipe, options: dict[str, int], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check(config(recovery={"strategy": "snapshot", "options": options}))
    skip = r"snapshot needs recovery.meanwhile = 'wait', not 'skip': other workers' copies of a skipped stage"
    with pytest.raises(UserError, match=skip):
        check(config(recovery={"strategy": "snapshot", "meanwhile": "skip"}))
    with pytest.raises(UserError, match=r"recovery.options.tolerate = 3: the ends and 4 block stages are 5"):
        made(config, 3)


def test_snapshots_of_one_process_outlive_it_until_the_run_is_saved(config: Recipe, tmp_path: Path) -> None:
    options = {"every": 2, "persist": True}
    made = config(recovery={"strategy": "snapshot", "options": options}).model_copy(update={"engine": "inline"})
    assert list(without_effect(ResolvedRun(made), Trace(faults=()))) == []
    memory = MemoryFolder(tmp_path / "run")

    class Looks(Log):
        def on_decision(self, t: float, decision: d.Decision) -> None:
            super().on_decision(t, decision)
            if isinstance(decision, d.RunStep) and decision.step == 8:
                remove_orphaned()  # as another run does when it starts
                until(lambda: [*memory.folder.rglob("*.safetensors")])

    assert train_inline(prepare(made), tmp_path / "run", Looks()).outcome == "finished"
    assert not memory.folder.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "snapshots"]


def flip(engine: ReferenceEngine, node: int) -> None:
    """Flip a bit kept at ``node``, of a parity where it holds one."""
    assert engine.copies[node].intact(), "this makes its checksum"
    *_, holder = (h for h in engine.copies[node]._all_holders.values() if h.nbytes)
    (*_, part) = holder.state().weights.values()
    part.view(-1).view(torch.uint8)[part.nbytes // 3] ^= 4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("every", [0, 3])
def test_a_flipped_bit_counts_as_one_more_loss(config: Recipe, every: int) -> None:
    unbroken = made(config, 2, every=every)
    expected = losses(unbroken, 8)
    for damaged, lost in [(1, 3), (0, 4), (4, 0), (3, 2)]:
        engine = made(config, 2, every=every)
        losses(engine, 5)
        flip(engine, damaged)
        assert lose(engine, lost).reason == "" and engine.step == (3 if every else 5)
        at = engine.step
        assert losses(engine, 8 - at) == expected[at:] and whole(engine) == whole(unbroken)
    for damaged, lost in [(1, 3), (4, 0)]:
        engine = made(config, 1, every=every)
        losses(engine, 5)
        flip(engine, damaged)
        both = f"({min(damaged, lost)}, {max(damaged, lost)})"
        assert f"2 of 5 stages are lost together {both}" in lose(engine, lost).reason
