"""The other recovery strategies on real processes: what each promises to restore is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.faults.trace import Fault
from planaria.recovery.checkpoint import best_steps
from support.live.harness import apart, digests, ending, facts, inline, losses, outcomes, rebuilt, tiny, train

TOLERANCE = 1e-5
KILLS = [
    Fault(step=3, stage=1, moment="forward", offset=0.5),
    Fault(step=6, stage=3, moment="backward", offset=0.5),
    Fault(step=9, stage=4, moment="commit"),
    Fault(step=12, stage=0, moment="any", offset=0.3),
    Fault(step=15, stage=2, moment="any", offset=0.9),
]


@pytest.mark.slow
@pytest.mark.parametrize("forward", [True, False])
def test_redundant_restores_every_stage_bit_for_bit(tmp_path: Path, forward: bool) -> None:
    settings: dict[str, Any] = {"recovery": {"strategy": "redundant", "options": {"forward": forward}}}
    record = train(tiny(tmp_path, steps=18, **settings), KILLS)
    unharmed = train(tiny(tmp_path / "unharmed", steps=18, **settings))
    assert outcomes(record) == ["started"] + ["recovered"] * 5 and ending(record).outcome == "finished"
    assert losses(record) == losses(unharmed)
    assert digests(record.folder, 18) == digests(unharmed.folder, 18)


def test_a_rollback_restores_the_saved_state_bit_for_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"recovery": {"strategy": "checkpoint"}, "checkpoint": {"every": 4}}
    record = train(tiny(tmp_path, steps=18, **settings), KILLS)
    unharmed = train(tiny(tmp_path / "unharmed", steps=18, **settings))
    assert outcomes(record) == ["started"] + ["rolled back"] * 5 and ending(record).outcome == "finished"
    # A fault may be a step late on a busy machine; where the fleet then returns to is exact.
    sealed, back_to = 0, []
    for _, fact in record.history:
        if isinstance(fact, d.Seal):
            sealed = fact.step
        elif isinstance(fact, d.Form):
            assert fact.step == sealed, "back to the newest sealed checkpoint, or to the beginning"
            back_to.append(fact.step)
    assert back_to[:4] == [0, 0, 4, 8] and back_to[4] >= 12 and back_to[5] >= 12
    assert losses(record) == losses(unharmed)
    assert digests(record.folder, 18) == digests(unharmed.folder, 18)


@pytest.mark.slow
def test_the_best_interval_follows_the_runs_own_timings(tmp_path: Path) -> None:
    config = tiny(
        tmp_path, steps=30, checkpoint={"every": "best", "keep": 99}, network={"hourly_failure_probability": 0.9}
    )
    record = train(config)
    (chosen,) = facts(record, e.IntervalChosen)
    assert chosen.steps == best_steps(0.9, 5, chosen.step_s, chosen.save_s)
    assert [seal.step for seal in facts(record, d.Seal)] == sorted(
        {10, *range(chosen.steps, 31, chosen.steps), 30} - {*range(1, 10)}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "recovery",
    [
        {"strategy": "echo", "options": {"bits": 8, "every": 2}},
        {"strategy": "echo", "options": {"bits": 2, "every": 1, "distance": 2}},
        {"strategy": "echo, checkfree, checkpoint", "options": {"bits": 4, "every": 3, "moments": "mean"}},
        *({"strategy": name} for name in ("copy", "uniform", "random", "identity")),
    ],
)
def test_a_rebuilt_stage_is_that_of_inline(tmp_path: Path, recovery: dict[str, Any]) -> None:
    """The ablations have donors for two block stages only."""
    kills = [fault.model_copy(update={"stage": 2 + fault.step % 2}) for fault in KILLS]
    record = train(tiny(tmp_path, steps=18, recovery=recovery), KILLS if "options" in recovery else kills)
    assert outcomes(record) == ["started"] + ["recovered"] * 5 and ending(record).outcome == "finished"
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


@pytest.mark.slow
def test_adjacent_stages_survive_with_echoes_at_distance_two(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "fleet": {"spares": 2},
        "recovery": {"strategy": "echo", "options": {"every": 2, "distance": 2}},
    }
    record = train(tiny(tmp_path, stages=6, **settings), [Fault(step=8, stage=3), Fault(step=8, stage=4)])
    assert ending(record).outcome == "finished" and set(outcomes(record)) == {"started", "recovered"}
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


@pytest.mark.slow
def test_each_lost_stage_goes_to_the_first_strategy_that_can_rebuild_it(tmp_path: Path) -> None:
    """Stages 3 and 4 are each other's donors for CheckFree+; their echoes are at distance 2."""
    settings: dict[str, Any] = {
        "fleet": {"spares": 3},
        "routing": {"kind": "swapped"},
        "recovery": {"strategy": "checkfree_plus, echo, checkpoint", "options": {"every": 2, "distance": 2}},
    }
    faults = [Fault(step=8, stage=stage, moment="forward") for stage in (1, 3, 4)]
    record = train(tiny(tmp_path, stages=6, **settings), faults)
    assert ending(record).outcome == "finished"
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE
    by = {m.stage: m.source.by for m in rebuilt(record)}
    assert by.keys() == {1, 3, 4} and by[1] == "checkfree_plus"
