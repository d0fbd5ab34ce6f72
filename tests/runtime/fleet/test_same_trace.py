"""The same recipe and trace give the same weights and moments to the last bit, on real processes and in one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import ending, facts, folder_of, outcomes, tiny, train

from observer import train_inline
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.faults.generating import generate
from planaria.faults.trace import Fault, Trace
from planaria.models.packing import pack
from planaria.report.live.progress import Quiet
from planaria.report.live.watch import Watch
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.engine import runs
from planaria.runtime.engine.prepare import prepare

STEPS = 12
BLOWS = [
    Fault(step=3, stage=2, moment="forward", offset=0.4),
    Fault(step=5, stage=3, moment="commit"),
    Fault(step=8, stage=2, moment="backward", offset=0.7),
]
STRATEGIES: dict[str, dict[str, Any]] = {
    "checkfree": {},
    "checkfree_plus": {"routing": {"kind": "swapped"}},
    "echo": {"recovery": {"options": {"bits": 8, "every": 2}}},
    "redundant": {},
    "snapshot": {},
    "checkpoint": {"checkpoint": {"every": 4}},
    "copy": {},
}
MUON: dict[str, Any] = {"optim": {"kind": "muon"}}
BURST = [(6, 2), (6, 3)]


def shas(folder: Path) -> list[str]:
    """Of each stage's weights and moments, as saved at the end."""
    states = [read_stage(folder / "checkpoints" / f"step-{STEPS:08d}", stage, STEPS) for stage in range(5)]
    for state in states:
        state.generators = {}  # a process's own, which nothing here draws from
    return [hashlib.sha256(pack(state).numpy().tobytes()).hexdigest() for state in states]


def in_one_process(config: RunConfig, blows: Sequence[Fault] = BLOWS) -> list[str]:
    """The same, trained by the inline engine."""
    folder, prepared = folder_of(config), prepare(config, trace=Trace(faults=tuple(blows)))
    folder.mkdir(parents=True)
    runs.keep_config(folder, config)
    watch = Watch(folder, config.samples * config.model.context, Quiet())
    train_inline(prepared, folder, watch)
    watch.close()
    return shas(folder)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name in ("checkfree_plus", "checkpoint") else pytest.mark.slow)
        for name in STRATEGIES
    ],
)
def test_three_blows_are_met_alike_every_time(tmp_path: Path, strategy: str) -> None:
    sections = STRATEGIES[strategy]
    sections = sections | {"recovery": sections.get("recovery", {}) | {"strategy": strategy}}
    found = []
    for name in ("once", "again"):
        record = train(tiny(tmp_path / name, steps=STEPS, **sections), BLOWS)
        assert ending(record).outcome == "finished" and len(outcomes(record)) == 4
        assert [(f.step, f.node) for f in facts(record, e.FaultInjected)] == [(f.step, f.stage) for f in BLOWS]
        found.append(shas(record.folder))
    assert found[0] == found[1]
    assert found[0] == in_one_process(tiny(tmp_path / "inline", steps=STEPS, **sections))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["redundant", pytest.param("checkfree", marks=pytest.mark.slow)])
def test_muons_state_survives_three_blows_as_adamws_does(tmp_path: Path, strategy: str) -> None:
    sections = MUON | {"recovery": {"strategy": strategy}}
    record = train(tiny(tmp_path / "fleet", steps=STEPS, **sections), BLOWS)
    assert ending(record).outcome == "finished" and len(outcomes(record)) == 4
    assert shas(record.folder) == in_one_process(tiny(tmp_path / "inline", steps=STEPS, **sections))
    untroubled = in_one_process(tiny(tmp_path / "untroubled", steps=STEPS, **sections), ())
    assert (shas(record.folder) == untroubled) == (strategy == "redundant")


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("checkfree, checkpoint", {"checkpoint": {"every": 4}}),
        pytest.param("snapshot", {"recovery": {"options": {"tolerate": 2}}}, marks=pytest.mark.slow),
    ],
)
def test_a_burst_is_met_alike_on_processes_and_in_one(tmp_path: Path, strategy: str, sections: dict[str, Any]) -> None:
    """Neighbours are lost in one step, at one moment. CheckFree has no donors then, and says so."""
    blows = generate(252, 0.01, 3600.0, 4, STEPS, set(), False, True, 0.6).faults
    assert [(blow.step, blow.stage) for blow in blows] == BURST
    sections = sections | {"recovery": sections.get("recovery", {}) | {"strategy": strategy}}
    record = train(tiny(tmp_path / "fleet", steps=STEPS, **sections), blows)
    assert ending(record).outcome == "finished"
    assert {f.node for f in facts(record, e.FaultInjected)} == {stage for _, stage in BURST}
    assert ("rolled back" in outcomes(record)) == ("checkpoint" in strategy)
    assert shas(record.folder) == in_one_process(tiny(tmp_path / "inline", steps=STEPS, **sections), blows)


@pytest.mark.parametrize(
    ("pair", "moment"),
    [
        ((0, 1), "forward"),
        pytest.param((2, 3), "commit", marks=pytest.mark.slow),
        pytest.param((4, 0), "backward", marks=pytest.mark.slow),
    ],
)
def test_two_stages_that_are_killed_together_come_back_from_the_parities_of_the_others(
    tmp_path: Path, pair: tuple[int, int], moment: Any
) -> None:
    """Neighbours, and the ends: no step is lost, and everything is as if nothing had been."""
    config = tiny(tmp_path / "struck", recovery={"strategy": "snapshot", "options": {"tolerate": 2}}, steps=STEPS)
    record = train(config, [Fault(step=4, stage=stage, moment=moment) for stage in pair])
    assert ending(record).outcome == "finished"
    assert {f.node for f in facts(record, e.FaultInjected)} == set(pair)
    assert {form.outcome for form in facts(record, d.Form)} == {"started", "recovered"}
    untroubled = config.model_copy(update={"name": "untroubled"})
    assert shas(record.folder) == in_one_process(untroubled, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "moment", "slices"),
    [
        ((0, 1), "backward", 2),
        pytest.param((2, 3), "commit", 1, marks=pytest.mark.slow),
        pytest.param((4, 0), "forward", 3, marks=pytest.mark.slow),
    ],
)
def test_all_go_back_to_the_snapshot_that_they_remember_when_two_are_killed_together(
    tmp_path: Path, pair: tuple[int, int], moment: Any, slices: int
) -> None:
    """The steps since are made again, on the same samples, and everything is as if nothing had been."""
    options = {"tolerate": 2, "every": 3, "slices": slices}
    config = tiny(tmp_path / "struck", recovery={"strategy": "snapshot", "options": options}, steps=STEPS)
    blows = [Fault(step=step, stage=stage, moment=moment) for step in (5, 8) for stage in pair]
    record = train(config, blows)
    assert ending(record).outcome == "finished" and len(facts(record, e.FaultInjected)) == 4
    began = sorted({form.step for form in facts(record, d.Form) if form.outcome == "recalled"})
    at = [step + (moment == "commit") for step in (5, 8)]  # a commit is not taken back
    assert began == [max(t for t in range(0, STEPS, 3) if t + slices <= step) for step in at]
    struck = in_one_process(config.model_copy(update={"name": "inline"}), blows)
    untroubled = in_one_process(config.model_copy(update={"name": "untroubled"}), ())
    assert shas(record.folder) == struck == untroubled


@pytest.mark.slow
@pytest.mark.usefixtures("allow_code")
@pytest.mark.parametrize("every", [0, 3])
def test_a_worker_that_finds_its_memory_damaged_counts_as_lost(
    tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage is killed, a bit of what another has kept is flipped: as if two had been killed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    options = {"tolerate": 2, "every": every}
    config = tiny(tmp_path / "struck", recovery={"strategy": "bad_memory:BadMemory", "options": options}, steps=STEPS)
    record = train(config, [Fault(step=5, stage=1, moment="backward")])
    assert ending(record).outcome == "finished"
    (failed,) = facts(record, e.WorkerFailed)
    assert failed.stage == 3 and "does not have its checksum any more" in failed.detail
    assert {lost.worker for lost in facts(record, e.WorkerLost)} == {"w1", failed.worker}
    assert {form.outcome for form in facts(record, d.Form)} == {"started", "recalled" if every else "recovered"}
    plain = config.recovery.model_copy(update={"strategy": "snapshot"})
    untroubled = config.model_copy(update={"name": "untroubled", "recovery": plain})
    assert shas(record.folder) == in_one_process(untroubled, ())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["snapshot", pytest.param("echo", marks=pytest.mark.slow)])
def test_stages_of_unlike_sizes_come_back_in_workers_that_had_others(tmp_path: Path, strategy: str) -> None:
    """A spare is warm for the first block stage; it becomes one of three layers, and one of two."""
    config = tiny(tmp_path / "struck", recovery={"strategy": strategy}, steps=STEPS)
    pipeline = config.pipeline.model_copy(update={"layers": (1, 3, 1, 2)})
    made = config.model_copy(update={"pipeline": pipeline, "model": config.model.model_copy(update={"layers": 7})})
    uneven = RunConfig.model_validate_json(made.model_dump_json())
    blows = [Fault(step=4, stage=2, moment="backward"), Fault(step=7, stage=4)]
    record = train(uneven, blows)
    assert ending(record).outcome == "finished" and len(facts(record, e.FaultInjected)) == 2
    assert shas(record.folder) == in_one_process(uneven.model_copy(update={"name": "inline"}), blows)
