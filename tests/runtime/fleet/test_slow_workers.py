"""A worker that gets slow is named, and hands its stage to a spare where that pays."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from harness import tiny, train

from planaria.cli.commands.diagnose import diagnose
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord
from planaria.faults.trace import Fault
from planaria.report.run.diagnosis import diagnosis_of, section

SLOW_STAGE, ONSET, STEPS = 2, 14, 44
PRICES: dict[str, Any] = {"forward_s": [0.0] + [0.008] * 3, "backward_s": [0.0] + [0.016] * 3, "emulate": True}


def sleeping(folder: Path, steps: int = STEPS, **fleet: Any) -> RunConfig:
    """Three stages whose passes sleep, so that other tests do not make them slow."""
    return tiny(folder, stages=3, steps=steps, network=PRICES, fleet=fleet)


def all_of(kind: type, record: RunRecord) -> list[Any]:
    return [fact for _, fact in record.history if isinstance(fact, kind)]


def test_a_slow_worker_hands_its_stage_to_the_spare_once(tmp_path: Path) -> None:
    config = sleeping(tmp_path, diagnose="act", spares=1)
    record = train(config, [Fault(step=ONSET, stage=SLOW_STAGE, signal="slow", strength=6.0)])

    (blamed,) = (fact for fact in all_of(d.Blamed, record) if fact.fault == "slow worker")
    assert blamed.nodes == [SLOW_STAGE]
    assert ONSET < blamed.step <= ONSET + 12
    (relieve,) = all_of(d.Relieve, record)
    assert relieve.node == SLOW_STAGE
    assert relieve.worker == blamed.workers[0]
    (form,) = (form for form in all_of(d.Form, record) if form.outcome == "handed over")
    assert form.holders[SLOW_STAGE] != relieve.worker
    assert not all_of(e.WorkerLost, record)
    (deed,) = diagnosis_of(record).deeds
    assert deed.measured_s is not None
    assert deed.measured_s < 0.7 * relieve.step_s
    assert "What was done about it" in "".join(section(record))
    told = diagnose(record.folder)
    assert "Nothing is slow at present." in told
    assert f"stage {SLOW_STAGE} ({relieve.worker}) is " in told


@pytest.mark.slow
def test_a_slow_link_is_named_with_its_direction_and_left_as_it_is(tmp_path: Path) -> None:
    fault = Fault(step=ONSET, stage=3, peer=2, signal="delay", strength=0.03)
    record = train(sleeping(tmp_path, steps=ONSET + 13, diagnose="act"), [fault])

    blamed = all_of(d.Blamed, record)
    assert [(fact.fault, fact.nodes) for fact in blamed] == [("slow link", [2, 3])]
    assert blamed[0].step <= ONSET + 12
    assert not all_of(d.Relieve, record)
    assert "the link 2 → 3 is slow, in this direction" in diagnose(record.folder)


@pytest.mark.slow
def test_by_default_it_is_only_told(tmp_path: Path) -> None:
    fault = Fault(step=ONSET, stage=SLOW_STAGE, signal="slow", strength=6.0)
    record = train(sleeping(tmp_path, steps=ONSET + 13, spares=1), [fault])

    assert [fact.nodes for fact in all_of(d.Blamed, record)] == [[SLOW_STAGE]]
    assert not all_of(d.Relieve, record)
    gauged = all_of(e.Gauged, record)
    assert median(len(fact.model_dump_json()) for fact in gauged) <= 1024, "twice in four steps"


def test_what_was_not_measured_is_not_diagnosed(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, stages=2, steps=4, fleet={"diagnose": "off", "spares": 0}))

    assert not all_of(e.Gauged, record)
    with pytest.raises(UserError, match=r"nothing was measured \(fleet.diagnose = 'off'\)"):
        diagnose(record.folder)


@pytest.mark.slow
def test_a_link_that_delivers_nothing_is_named_with_its_direction(tmp_path: Path) -> None:
    """No worker is blamed or lost, and nothing of the state is."""
    fault = Fault(step=4, stage=3, peer=2, signal="delay", strength=1000.0, resume_after_s=0.5, moment="forward")
    record = train(tiny(tmp_path, steps=8, fleet={"timeout_s": 2.0, "spares": 0}), [fault])

    blamed = [fact for fact in all_of(d.Blamed, record) if fact.fault == "stuck link"]
    assert [fact.nodes for fact in blamed] == [[2, 3]]
    assert blamed[0].seconds <= 4.0
    assert not all_of(e.WorkerLost, record)
    assert {form.outcome for form in all_of(d.Form, record)} == {"started", "relinked"}
