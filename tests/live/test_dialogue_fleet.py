"""Fine-tuning on dialogues by real processes: kills change nothing, and the fleet computes what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import RunConfig
from planaria.faults.trace import Fault
from support import dialogue_corpus
from support.live.harness import ending, in_one_process, losses, mean_losses, outcomes, tiny, train, validation_losses


def recipe(folder: Path, **sections: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    data = {**dialogue_corpus.write_dialogues(folder), "validation": 0.2}
    given = {"train": {"eval_every": 4}, **sections}
    return tiny(folder, stages=2, steps=8, data=data, **given)


def test_kills_of_every_stage_change_nothing(tmp_path: Path) -> None:
    config = recipe(tmp_path, recovery={"strategy": "redundant"})
    faults = [Fault(step=2, stage=1), Fault(step=3, stage=2, moment="backward"), Fault(step=5, stage=0)]
    record, alone = train(config, faults), in_one_process(config)
    assert ending(record).outcome == "finished" and outcomes(record).count("recovered") == 3
    assert losses(record) == losses(alone) and len(losses(record)) == 8
    assert validation_losses(record) == validation_losses(alone) and len(validation_losses(record)) >= 2


@pytest.mark.parametrize(
    "sections",
    [
        {"exchange": {"replicas": 2, "kind": "allreduce"}},
        {"exchange": {"replicas": 2, "kind": "noloco", "options": {"every": 3}}},
        {"exchange": {"replicas": 4, "coded": {"scheme": "gc", "stragglers": 1}}},
        {"routing": {"kind": "skipping", "skip": 0.5}},
    ],
    ids=["allreduce", "noloco", "coded", "skipping"],
)
def test_a_fleet_computes_what_one_process_does(tmp_path: Path, sections: dict[str, Any]) -> None:
    config = recipe(tmp_path, **sections)
    record, alone = train(config), in_one_process(config)
    assert ending(record).outcome == "finished"
    found = mean_losses if config.exchange.kind == "noloco" else losses
    assert found(record) == found(alone) and len(found(record)) == 8
