"""Removing replicas with invalid updates, on real processes: spares take over, or the others continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault
from planaria.report.run.event_lines import timed_lines
from support.live.harness import ending, facts, losses, tiny, train

BYZANTINE = 1
"""the replica"""
DILOCO = {"kind": "diloco", "options": {"every": 2, "alpha": 0.3, "momentum": "heavy_ball"}}


def several(folder: Path, replicas: int, steps: int, fleet: dict[str, Any], **exchange: Any) -> RunConfig:
    """Replicas of two stages (with the ends)."""
    return tiny(folder, stages=1, steps=steps, fleet=fleet, exchange={"replicas": replicas, **exchange})


def nan(first: int, until: int, replica: int = BYZANTINE) -> Fault:
    """The block stage of the replica sends NaN."""
    return Fault(step=first, stage=2 * replica + 1, signal="corrupt_update", attack="nan", until=until)


def away(record: RunRecord) -> list[tuple[int, int, int]]:
    """Return (replica, its workers, strikes) of the removed replicas."""
    return [(fact.member, len(fact.workers), fact.strikes) for fact in facts(record, d.ExcludeMember)]


def refused(record: RunRecord) -> list[int]:
    """Return the rounds, or steps, with an invalid update."""
    return sorted({fact.round for fact in facts(record, e.UpdateRejected)})


@pytest.mark.slow
def test_spares_replace_a_replica_with_repeated_invalid_updates(tmp_path: Path) -> None:
    """After the second such round, spares hold its nodes and send valid updates."""
    record = train(several(tmp_path, 4, 12, {"spares": 2}, **DILOCO, strikes=2), [nan(0, 99)])
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerFailed)
    assert away(record) == [(BYZANTINE, 2, 2)] and refused(record) == [0, 1]
    (gone,) = facts(record, d.ExcludeMember)
    assert gone.reason == "the updates of replica 1 were invalid in 2 rounds"
    assert set(gone.workers) == {fact.worker for fact in facts(record, e.WorkerLost)}, "nobody else"
    last = [fact for fact in facts(record, d.Settle) if fact.round == 5]
    assert [fact.members for fact in last] == [[0, 1, 2, 3]]
    reported = [line.text for _, line in timed_lines(record) if "excluded" in line.text]
    assert reported == [f"replica 1 excluded: {gone.reason}; workers that leave: {', '.join(gone.workers)}"]


@pytest.mark.slow
def test_no_replica_is_removed_below_the_limit_or_without_one(tmp_path: Path) -> None:
    once = train(several(tmp_path, 4, 6, {"spares": 2}, **DILOCO, strikes=2), [nan(0, 2)])
    never = train(several(tmp_path / "never", 4, 6, {"spares": 2}, **DILOCO, strikes=0), [nan(0, 99)])
    assert refused(once) == [0] and refused(never) == [0, 1, 2]
    assert not away(once) and not away(never)


@pytest.mark.slow
def test_without_spares_the_run_continues_without_the_replica(tmp_path: Path) -> None:
    config = several(tmp_path, 4, 12, {"spares": 0, "replace": False}, **DILOCO, strikes=2)
    record = train(config, [nan(0, 99)])
    assert ending(record).outcome == "finished"
    assert away(record) == [(BYZANTINE, 2, 2)]
    assert [fact.replica for fact in facts(record, d.Disband)] == [BYZANTINE]
    assert facts(record, d.Settle)[-1].members == [0, 2, 3], "which train on its samples"


@pytest.mark.slow
def test_no_replica_is_removed_that_the_rule_needs(tmp_path: Path) -> None:
    """A median with byzantine = 2 needs five replicas; of six, one may be removed."""
    robust = {"rule": "median", "byzantine": 2}
    fleet = {"spares": 0, "replace": False}
    for replicas, gone in ((5, []), (6, [(BYZANTINE, 2, 2)])):
        config = several(tmp_path / f"{replicas}", replicas, 8, fleet, **DILOCO, robust=robust, strikes=2)
        record = train(config, [nan(0, 99)])
        assert ending(record).outcome == "finished" and away(record) == gone


@pytest.mark.slow
def test_spares_replace_a_replica_that_all_reduces(tmp_path: Path) -> None:
    """Its gradients of steps 1 and 2 are invalid; in step 3 its successors' count."""
    robust = {"rule": "multikrum", "byzantine": 1, "strikes": 2}
    record = train(several(tmp_path, 5, 6, {"spares": 2}, robust=robust, strikes=2), [nan(1, 99)])
    assert ending(record).outcome == "finished" and len(losses(record)) == 6
    assert away(record) == [(BYZANTINE, 2, 2)] and refused(record) == [1, 2]
    orders = {fact.step: list(fact.left_out) for fact in facts(record, d.RunStep) if fact.mode == "train"}
    assert orders == {step: [] for step in range(6)}, "no replica is left out once it was replaced"
    counted = [fact for fact in facts(record, e.UpdatesWeighted) if fact.round >= 3]
    assert counted and all(BYZANTINE in fact.counted for fact in counted)


@pytest.mark.slow
def test_a_replica_that_all_reduces_stays_without_enough_spares(tmp_path: Path) -> None:
    robust = {"rule": "multikrum", "byzantine": 1, "strikes": 2}
    config = several(tmp_path, 5, 6, {"spares": 1, "replace": False}, robust=robust, strikes=2)
    record = train(config, [nan(1, 99)])
    assert ending(record).outcome == "finished" and not away(record), "two would be needed"
    assert refused(record) == [1, 2, 3, 4, 5], "it is left out for the rest"
