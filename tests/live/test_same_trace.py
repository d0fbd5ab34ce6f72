"""The same recipe and trace give the same weights and moments to the last bit, on real processes and in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.faults.trace import Fault
from planaria.faults.trace_generation import generate
from support.live.harness import digests, ending, facts, outcomes, tiny, train
from support.live.trace_of_faults import FAULTS, STEPS, STRATEGIES, digests_inline

MUON: dict[str, Any] = {"optim": {"kind": "muon"}}
BURST = [(6, 2), (6, 3)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name in ("checkfree_plus", "checkpoint") else pytest.mark.slow)
        for name in STRATEGIES
    ],
)
def test_three_kills_have_the_same_result_every_time(tmp_path: Path, strategy: str) -> None:
    sections = STRATEGIES[strategy]
    sections = sections | {"recovery": sections.get("recovery", {}) | {"strategy": strategy}}
    found = []
    for name in ("once", "again"):
        record = train(tiny(tmp_path / name, steps=STEPS, **sections), FAULTS)
        assert ending(record).outcome == "finished" and len(outcomes(record)) == 4
        assert [(f.step, f.node) for f in facts(record, e.FaultInjected)] == [(f.step, f.stage) for f in FAULTS]
        found.append(digests(record.folder, STEPS))
    assert found[0] == found[1] == digests_inline(tiny(tmp_path / "inline", steps=STEPS, **sections))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["redundant", "checkfree"])
def test_muons_state_survives_three_kills(tmp_path: Path, strategy: str) -> None:
    sections = MUON | {"recovery": {"strategy": strategy}}
    config = tiny(tmp_path, steps=STEPS, **sections)
    record = train(config, FAULTS)
    assert ending(record).outcome == "finished" and len(outcomes(record)) == 4
    found = digests(record.folder, STEPS)
    assert found == digests_inline(config)
    assert (found == digests_inline(config, (), "undisturbed")) == (strategy == "redundant")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("strategy", "sections"),
    [("checkfree, checkpoint", {"checkpoint": {"every": 4}}), ("snapshot", {"recovery": {"options": {"tolerate": 2}}})],
)
def test_a_burst_has_the_same_result_on_processes_and_in_one(
    tmp_path: Path, strategy: str, sections: dict[str, Any]
) -> None:
    """Neighbours are lost at the same moment, which leaves CheckFree without donors."""
    kills = generate(252, 0.01, 3600.0, 4, STEPS, set(), False, True, 0.6).faults
    assert [(blow.step, blow.stage) for blow in kills] == BURST
    sections = sections | {"recovery": sections.get("recovery", {}) | {"strategy": strategy}}
    config = tiny(tmp_path, steps=STEPS, **sections)
    record = train(config, kills)
    assert ending(record).outcome == "finished"
    assert {f.node for f in facts(record, e.FaultInjected)} == {stage for _, stage in BURST}
    assert ("rolled back" in outcomes(record)) == ("checkpoint" in strategy)
    assert digests(record.folder, STEPS) == digests_inline(config, kills)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("pair", "moment"), [((0, 1), "forward"), ((2, 3), "commit"), ((4, 0), "backward")])
def test_two_stages_killed_together_are_restored_from_parities(
    tmp_path: Path, pair: tuple[int, int], moment: Any
) -> None:
    """Neighbours, and stage 0: no step is lost, and the result is that of an undisturbed run."""
    config = tiny(tmp_path / "disturbed", recovery={"strategy": "snapshot", "options": {"tolerate": 2}}, steps=STEPS)
    record = train(config, [Fault(step=4, stage=stage, moment=moment) for stage in pair])
    assert ending(record).outcome == "finished"
    assert {f.node for f in facts(record, e.FaultInjected)} == set(pair)
    assert {*outcomes(record)} == {"started", "recovered"}
    assert digests(record.folder, STEPS) == digests_inline(config, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "moment", "slices"), [((0, 1), "backward", 2), ((2, 3), "commit", 1), ((4, 0), "forward", 3)]
)
def test_all_return_to_a_snapshot_when_two_are_killed_together(
    tmp_path: Path, pair: tuple[int, int], moment: Any, slices: int
) -> None:
    """The steps since are repeated on the same samples; the result is that of an undisturbed run."""
    options = {"tolerate": 2, "every": 3, "slices": slices}
    config = tiny(tmp_path / "disturbed", recovery={"strategy": "snapshot", "options": options}, steps=STEPS)
    kills = [Fault(step=step, stage=stage, moment=moment) for step in (5, 8) for stage in pair]
    record = train(config, kills)
    assert ending(record).outcome == "finished" and len(facts(record, e.FaultInjected)) == 4
    began = sorted({form.step for form in facts(record, d.Form) if form.outcome == "recalled"})
    at = [step + (moment == "commit") for step in (5, 8)]  # a commit is not taken back
    assert began == [max(t for t in range(0, STEPS, 3) if t + slices <= step) for step in at]
    undisturbed = digests_inline(config, (), "undisturbed")
    assert digests(record.folder, STEPS) == digests_inline(config, kills) == undisturbed


@pytest.mark.slow
@pytest.mark.usefixtures("allow_code")
@pytest.mark.parametrize("every", [0, 3])
def test_a_worker_with_damaged_memory_counts_as_lost(tmp_path: Path, every: int) -> None:
    """One stage is killed and a bit of another's parity is flipped: as if two had been killed."""
    options = {"tolerate": 2, "every": every}
    config = tiny(
        tmp_path / "disturbed",
        recovery={"strategy": "support.live.faulty_hardware:BadMemory", "options": options},
        steps=STEPS,
    )
    record = train(config, [Fault(step=5, stage=1, moment="backward")])
    assert ending(record).outcome == "finished"
    (failed,) = facts(record, e.WorkerFailed)
    assert failed.stage == 3 and "does not match its checksum" in failed.detail
    assert {lost.worker for lost in facts(record, e.WorkerLost)} == {"w1", failed.worker}
    assert {*outcomes(record)} == {"started", "recalled" if every else "recovered"}
    plain = config.recovery.model_copy(update={"strategy": "snapshot"})
    assert digests(record.folder, STEPS) == digests_inline(config.model_copy(update={"recovery": plain}), ())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["snapshot", "echo"])
def test_stages_of_unequal_sizes_are_restored_in_other_workers(tmp_path: Path, strategy: str) -> None:
    """A spare is warm for the first block stage; it becomes one of three layers, and one of two."""
    config = tiny(tmp_path / "disturbed", recovery={"strategy": strategy}, steps=STEPS)
    pipeline = config.pipeline.model_copy(update={"layers": (1, 3, 1, 2)})
    made = config.model_copy(update={"pipeline": pipeline, "model": config.model.model_copy(update={"layers": 7})})
    uneven = RunConfig.model_validate_json(made.model_dump_json())
    kills = [Fault(step=4, stage=2, moment="backward"), Fault(step=7, stage=4)]
    record = train(uneven, kills)
    assert ending(record).outcome == "finished" and len(facts(record, e.FaultInjected)) == 2
    assert digests(record.folder, STEPS) == digests_inline(uneven, kills)
