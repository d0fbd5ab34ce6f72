"""Robust rules that weigh whole replicas (exchange.robust.scope), on processes as in one; also when some die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault
from support.live.harness import ending, facts, in_one_process, losses, mean_losses, tiny, train

BYZANTINE, REPLICAS = 1, 5


def recipe(folder: Path, scope: str, steps: int = 9, rule: str = "multikrum", **exchange: Any) -> RunConfig:
    """Five replicas (by default) of two stages that meet every three steps."""
    robust = {"rule": rule, "byzantine": 1, "scope": scope}
    options = {"every": 3, "alpha": 0.3, "momentum": "heavy_ball"}
    plain = {"replicas": REPLICAS, "kind": "diloco", "options": options, "robust": robust, "strikes": 0}
    return tiny(folder, stages=1, steps=steps, exchange={**plain, **exchange})


def lie(stage: int, attack: str = "own_flip") -> Fault:
    """A fault of the Byzantine replica's node at one stage, from the second round on."""
    return Fault(step=4, stage=2 * BYZANTINE + stage, signal="corrupt_update", attack=attack, until=99)


def counted(record: RunRecord) -> dict[tuple[int, int], dict[int, float]]:
    """Return (round, stage) → weight of each update."""
    return {(fact.round, fact.stage): fact.counted for fact in facts(record, e.UpdatesWeighted)}


@pytest.mark.slow
def test_replicas_are_weighed_as_wholes_on_processes_as_in_one(tmp_path: Path) -> None:
    record = train(recipe(tmp_path, "replica", 6, "geometric_median", replicas=3), [lie(1)])
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerFailed)
    single = in_one_process(recipe(tmp_path / "inline", "replica", 6, "geometric_median", replicas=3), [lie(1)])
    assert counted(record) == counted(single) and counted(record).keys() == {(0, 0), (1, 0)}
    assert mean_losses(record) == pytest.approx(losses(single), abs=1e-12)
    for settle in facts(record, d.Settle):
        assert settle.counted[0] == settle.counted[1] == settle.counted[2], "to the last bit: they stay alike"
    assert settle.counted[0][BYZANTINE] < 0.9 * settle.counted[0][0]


@pytest.mark.slow
def test_corruption_at_one_stage_excludes_the_whole_replica(tmp_path: Path) -> None:
    record = train(recipe(tmp_path, "replica"), [lie(1)])
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerFailed) and not facts(record, d.Adopt)
    single = in_one_process(recipe(tmp_path / "inline", "replica"), [lie(1)])
    assert counted(record) == counted(single) and counted(record).keys() == {(round, 0) for round in range(3)}
    assert [of[BYZANTINE] for of in counted(record).values()][1:] == [0.0, 0.0]
    assert mean_losses(record) == pytest.approx(losses(single), abs=1e-12)
    rivals = [[fact.rivals for fact in facts(of, e.UpdatesWeighted)] for of in (record, single)]
    assert rivals[0] == rivals[1] and rivals[0][1]["krum"] == {BYZANTINE: 0.0}
    for settle in facts(record, d.Settle):
        assert settle.counted.keys() == {*range(REPLICAS)} == {*settle.members}
        assert all(of == settle.counted[0] for of in settle.counted.values()), "to the last bit: they stay alike"
    apart = counted(in_one_process(recipe(tmp_path / "stages", "stage"), [lie(1)]))
    assert apart[1, 1][BYZANTINE] == 0.0 and max(apart[1, 0][BYZANTINE], apart[2, 0][BYZANTINE]) > 0.2, (
        "its other stage is honest"
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["clipping", "flag", "geometric_median", "krum"])
def test_each_rule_is_the_same_on_processes_as_in_one(tmp_path: Path, rule: str) -> None:
    record = train(recipe(tmp_path, "replica", rule=rule), [lie(0)])
    single = in_one_process(recipe(tmp_path / "inline", "replica", rule=rule), [lie(0)])
    assert ending(record).outcome == "finished" and counted(record) == counted(single)
    assert mean_losses(record) == pytest.approx(losses(single), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["nan", "equivocate"])
def test_a_round_settles_despite_deaths_and_invalid_updates(tmp_path: Path, attack: str) -> None:
    """A node dies after its replica has begun the second round, and another replica's as it settles the third."""
    where = ((6, 0, "forward"), (9, 6, "commit"))
    kills = [Fault(step=step, stage=node, moment=moment, offset=0.5) for step, node, moment in where]
    config = recipe(tmp_path, "replica", steps=15, patience_s=3.0)
    record = train(config, [*kills, lie(1, attack)])
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerFailed)
    assert len(facts(record, e.WorkerLost)) == 2
    whole = [settle for settle in facts(record, d.Settle) if len(settle.members) > 1]
    assert len(whole) >= 5 and all(BYZANTINE not in settle.members for settle in whole[1:])
    for settle in whole:
        enough = len(settle.members) >= 5
        assert (settle.counted.keys() == {*settle.members}) == enough, "with too few members a round has no value"
