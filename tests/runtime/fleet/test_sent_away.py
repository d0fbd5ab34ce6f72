"""Whose offers are of no use again and again is sent away, on real processes: others take the place, or it is empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import ending, facts, losses, tiny, train

from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord
from planaria.faults.trace import Fault
from planaria.report.run.narrate import story

LIAR = 1
"""the replica"""
DILOCO = {"kind": "diloco", "options": {"every": 2, "alpha": 0.3, "momentum": "heavy_ball"}}


def several(folder: Path, replicas: int, steps: int, fleet: dict[str, Any], **exchange: Any) -> RunConfig:
    """Replicas of two stages (with the ends)."""
    return tiny(folder, stages=1, steps=steps, fleet=fleet, exchange={"replicas": replicas, **exchange})


def nan(first: int, until: int, replica: int = LIAR) -> Fault:
    """The block stage of the replica says numbers that are none."""
    return Fault(step=first, stage=2 * replica + 1, signal="lie", attack="nan", until=until)


def away(record: RunRecord) -> list[tuple[int, int, int]]:
    """(replica, its workers, strikes) of those sent away."""
    return [(fact.member, len(fact.workers), fact.strikes) for fact in facts(record, d.SendAway)]


def refused(record: RunRecord) -> list[int]:
    """The rounds, or steps, in which an offer was of no use."""
    return sorted({fact.round for fact in facts(record, e.OfferRefused)})


@pytest.mark.slow
def test_a_replica_whose_drifts_are_of_no_use_again_and_again_gives_its_place_to_others(tmp_path: Path) -> None:
    """Rounds remember: after the second such round others stand there, who say what is of use."""
    record = train(several(tmp_path, 4, 12, {"spares": 2}, **DILOCO, strikes=2), [nan(0, 99)])
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerFailed)
    assert away(record) == [(LIAR, 2, 2)] and refused(record) == [0, 1]
    (gone,) = facts(record, d.SendAway)
    assert gone.reason == "what replica 1 says was of no use in 2 rounds"
    assert set(gone.workers) == {fact.worker for fact in facts(record, e.WorkerLost)}, "nobody else"
    last = [fact for fact in facts(record, d.Settle) if fact.round == 5]
    assert [fact.members for fact in last] == [[0, 1, 2, 3]]
    told = [line.text for _, line in story(record) if "sent away" in line.text]
    assert told == [f"replica 1 sent away: {gone.reason}; workers that leave: {', '.join(gone.workers)}"]


@pytest.mark.slow
def test_nobody_is_sent_away_for_one_mistake_nor_where_the_number_is_zero(tmp_path: Path) -> None:
    once = train(several(tmp_path, 4, 6, {"spares": 2}, **DILOCO, strikes=2), [nan(0, 2)])
    never = train(several(tmp_path / "never", 4, 6, {"spares": 2}, **DILOCO, strikes=0), [nan(0, 99)])
    assert refused(once) == [0] and refused(never) == [0, 1, 2]
    assert not away(once) and not away(never)


@pytest.mark.slow
def test_where_there_is_nobody_for_its_place_the_run_goes_on_without_the_replica(tmp_path: Path) -> None:
    config = several(tmp_path, 4, 12, {"spares": 0, "replace": False}, **DILOCO, strikes=2)
    record = train(config, [nan(0, 99)])
    assert ending(record).outcome == "finished"
    assert away(record) == [(LIAR, 2, 2)]
    assert [fact.replica for fact in facts(record, d.Disband)] == [LIAR]
    assert facts(record, d.Settle)[-1].members == [0, 2, 3], "which have its samples"


@pytest.mark.slow
def test_nobody_is_sent_away_whom_the_rule_cannot_do_without(tmp_path: Path) -> None:
    """A median of two who lie at most needs five; of six, one may go."""
    robust = {"rule": "median", "liars": 2}
    fleet = {"spares": 0, "replace": False}
    for replicas, gone in ((5, []), (6, [(LIAR, 2, 2)])):
        config = several(tmp_path / f"{replicas}", replicas, 8, fleet, **DILOCO, robust=robust, strikes=2)
        record = train(config, [nan(0, 99)])
        assert ending(record).outcome == "finished" and away(record) == gone


@pytest.mark.slow
def test_a_replica_of_all_reduced_ones_gives_its_place_to_spares(tmp_path: Path) -> None:
    """What it says in steps 1 and 2 is of no use; in step 3 others say something, and it counts."""
    robust = {"rule": "multikrum", "liars": 1, "strikes": 2}
    record = train(several(tmp_path, 5, 6, {"spares": 2}, robust=robust, strikes=2), [nan(1, 99)])
    assert ending(record).outcome == "finished" and len(losses(record)) == 6
    assert away(record) == [(LIAR, 2, 2)] and refused(record) == [1, 2]
    orders = {fact.step: list(fact.left_out) for fact in facts(record, d.RunStep) if fact.mode == "train"}
    assert orders == {step: [] for step in range(6)}, "nobody is left out where it is gone"
    counted = [fact for fact in facts(record, e.OffersCounted) if fact.round >= 3]
    assert counted and all(LIAR in fact.counted for fact in counted)


@pytest.mark.slow
def test_all_reduced_ones_keep_whom_nobody_replaces(tmp_path: Path) -> None:
    robust = {"rule": "multikrum", "liars": 1, "strikes": 2}
    config = several(tmp_path, 5, 6, {"spares": 1, "replace": False}, robust=robust, strikes=2)
    record = train(config, [nan(1, 99)])
    assert ending(record).outcome == "finished" and not away(record), "two would be needed"
    assert refused(record) == [1, 2, 3, 4, 5], "it is left out for the rest"
