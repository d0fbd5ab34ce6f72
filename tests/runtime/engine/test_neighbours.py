"""Faults of edges that a run does not have are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.faults.checks import neighbours
from planaria.faults.trace import Fault, Trace, write
from planaria.runtime.engine.check import read_faults
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.unused import idle


def changed(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": {"layers": 4}, "pipeline": {"stages": 4}, **sections})


def test_a_pipeline_is_a_ring() -> None:
    resolved = ResolvedRun(changed())
    stages = len(resolved.arrangement.stage)

    assert neighbours(resolved, 1) == {0, 2}
    assert neighbours(resolved, 0) == {1, stages - 1}


def test_copies_travel_over_edges_too() -> None:
    config = changed(recovery={"strategy": "redundant"})

    assert neighbours(ResolvedRun(config), 2) >= {1, 3}


def test_a_fault_of_no_edge_names_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    config = changed(chaos={"trace": str(path)})
    write(Trace(faults=(Fault(step=1, stage=3, peer=2, signal="delay"),)), path)
    assert len(read_faults(ResolvedRun(config)).faults) == 1

    write(Trace(faults=(Fault(step=1, stage=3, peer=1, signal="delay"),)), path)
    with pytest.raises(UserError, match=r"the edge 1 → 3, which there is not; 3 has edges to: 2, 4"):
        read_faults(ResolvedRun(config))


@pytest.mark.parametrize("wrong", [{"signal": "slow", "peer": 1}, {"signal": "delay", "peer": 2}])
def test_only_edges_have_a_direction_and_lead_elsewhere(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="peer"):
        Fault.model_validate({"step": 1, "stage": 2, **wrong})


def test_a_run_without_spares_is_told_that_it_can_only_look() -> None:
    config = changed(fleet={"diagnose": "act", "spares": 0})
    said = list(idle(ResolvedRun(config.model_copy(update={"engine": "fleet"})), Trace(faults=())))

    assert any("such workers are only told" in line for line in said)
    assert not list(idle(ResolvedRun(changed(fleet={"diagnose": "act", "spares": 1})), Trace(faults=())))
