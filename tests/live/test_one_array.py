"""Models whose weights share numbers, on real processes: SIGKILLs, other engines and other cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import planaria
from planaria.common.errors import UserError
from planaria.control.facts import events as e
from planaria.faults.trace import Fault
from planaria.runtime.api.import_export import export_run, export_state
from planaria.runtime.checkpoint.loading import load_model, load_stage
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.preparation.starting_weights import starting_weights
from planaria.runtime.preparation.weight_sources import open_model
from support.live.harness import digests, ending, facts, outcomes, tiny, train
from support.live.trace_of_faults import FAULTS, STEPS, STRATEGIES, digests_inline

ONE: dict[str, Any] = {"model": {"share": 4, "share_over": "model"}, "recovery": {"strategy": "survivor"}}
ALL_BUT_ONE = [Fault(step=5, stage=stage, moment="commit") for stage in (0, 1, 2, 4)]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.slow if name != "echo" else ())
        for name in ("checkfree", "echo", "redundant")
    ],
)
def test_an_array_for_each_layer_is_recovered_like_other_weights(tmp_path: Path, strategy: str) -> None:
    sections: dict[str, Any] = {"model": {"share": 8}, **STRATEGIES[strategy]}
    sections["recovery"] = {**sections.get("recovery", {}), "strategy": strategy}
    record = train(tiny(tmp_path / "fleet", steps=STEPS, **sections), FAULTS)
    assert ending(record).outcome == "finished" and len(outcomes(record)) == 4
    assert digests(record.folder, STEPS) == digests_inline(tiny(tmp_path / "inline", steps=STEPS, **sections))


@pytest.mark.slow
def test_one_surviving_stage_restores_all_others(tmp_path: Path) -> None:
    """All but one are killed in one step; the result is that of an undisturbed run, to the last bit."""
    record = train(tiny(tmp_path / "disturbed", steps=STEPS, **ONE), ALL_BUT_ONE)
    assert ending(record).outcome == "finished"
    assert {fact.node for fact in facts(record, e.FaultInjected)} == {0, 1, 2, 4}
    found = digests(record.folder, STEPS)
    assert found == digests_inline(tiny(tmp_path / "whole", steps=STEPS, **ONE), ())
    assert len(set(found)) == 1, "all stages hold the same"


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"recovery": {"strategy": "survivor"}}, "'survivor' needs model.share_over = 'model'"),
        ({**ONE, "exchange": {"replicas": 2}}, "all stages of one replica share"),
        ({**ONE, "routing": {"kind": "skipping"}}, "every stage has to see every microbatch"),
        ({"model": {"share": 4}, "optim": {"kind": "muon"}}, "does not support shared matrices"),
        ({"model": {"share": 4}, "recovery": {"strategy": "identity, checkpoint"}}, "changes single matrices"),
    ],
)
def test_incompatible_settings_are_refused(tmp_path: Path, changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check(tiny(tmp_path, steps=2, **changed))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model", [{"share": 8}, ONE["model"]])
def test_exports_are_dense_and_other_cuts_can_be_read(tmp_path: Path, model: dict[str, Any]) -> None:
    config = tiny(tmp_path, steps=4, model=model, checkpoint={"every": 2}).model_copy(update={"engine": "inline"})
    run = planaria.train(config)
    saved = run_folders.newest_whole(run.folder)
    exported, _ = open_model(export_run(run.folder, tmp_path / "hf"))
    tokens = torch.arange(8)[None]
    assert exported.config.share == 1
    assert torch.equal(load_model(saved)(tokens), exported(tokens))
    with pytest.raises(UserError, match="not stored whole are not supported"):
        export_state(run.folder, tmp_path / "dcp", "dcp")
    other = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"stages": 2})})
    for stage in range(3):
        state = load_stage(saved.folder, other, stage)
        assert state.moments.keys() == state.weights.keys()


def test_dense_weights_cannot_be_folded(tmp_path: Path) -> None:
    config = tiny(tmp_path, steps=2, model={"share": 2}, train={"start": "anything"})
    with pytest.raises(UserError, match=r"cannot be converted to those of model\.share = 2"):
        starting_weights(config)
