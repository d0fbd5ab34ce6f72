"""A replica whose machine computes wrongly is named at the next save: on a fleet, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.report.run.event_lines import timed_lines
from planaria.report.run.summary import facts_of, verdict
from planaria.runtime.checkpoint.store import CheckpointStore
from support.live.harness import facts, tiny, train
from support.observer import train_inline

pytestmark = pytest.mark.usefixtures("allow_code")
WRONG = {"kind": "support.live.faulty_hardware:WrongSum"}


def config(folder: Path, background: bool = False, **exchange: Any) -> RunConfig:
    """Three replicas, saved after steps 3 and 6; with ``WRONG`` replica 2 goes wrong in step 4."""
    if "kind" in exchange:
        exchange["options"] = {"replica": 2, "step": 4}
    saves = {"every": 3, "background": background}
    return tiny(folder, stages=1, steps=6, checkpoint=saves, exchange={"replicas": 3, **exchange})


def found(record: RunRecord) -> list[tuple[int, list[d.UnequalReplicas]]]:
    return [(seal.step, seal.unequal) for seal in facts(record, d.Seal)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("background", "compress"),
    [(False, ""), (True, "ef14:8bits")],
    ids=["others write nothing", "others write their own, beside training"],
)
def test_a_replica_that_differs_is_named_at_the_next_save(tmp_path: Path, background: bool, compress: str) -> None:
    record = train(config(tmp_path, background, compress=compress, **WRONG))
    unequal = [d.UnequalReplicas(stage=stage, replicas=[0, 1, 2], differing=[2]) for stage in (0, 1)]
    assert found(record) == [(3, []), (6, unequal)]
    (line,) = (line for _, line in timed_lines(record) if "weights" in line.text)
    assert "replica 2: weights of stage 0 differ from those of 2 replicas but should be equal" in line.text
    assert "replica 2: weights of stage 1" in line.text
    assert "had different weights in 1 checkpoint." in verdict(facts_of(record, 1.0)).summary
    reported = facts(record, e.StageSaved)
    assert len(reported) == 2 * 2 * 3, "all three replicas of two stages, twice"
    assert sum(bool(fact.file) for fact in reported) == (2 * 2 * 3 if compress else 2 * 2)
    newest = CheckpointStore(record.folder / "checkpoints").newest(whole_only=True)
    assert newest is not None and newest.step == 6, "the checkpoint is kept"


def test_the_same_is_found_in_one_process(tmp_path: Path) -> None:
    record = train(config(tmp_path, **WRONG), engine=train_inline)
    assert found(record)[-1][1] == [
        d.UnequalReplicas(stage=stage, replicas=[0, 1, 2], differing=[2]) for stage in (0, 1)
    ]
    assert found(record)[0] == (3, [])


@pytest.mark.parametrize("exchange", [{"kind": "local"}, {"robust": "median"}], ids=["local", "robust"])
def test_replicas_that_may_differ_are_not_compared(tmp_path: Path, exchange: dict[str, str]) -> None:
    sections = {"checkpoint": {"every": 3}, "exchange": {"replicas": 3, **exchange}}
    assert found(train(tiny(tmp_path, stages=1, steps=3, **sections), engine=train_inline)) == [(3, [])]
