"""Codecs of ``pipeline.wire``: bytes as stated, and losses of processes equal to those inline, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts.events import EdgeBroken
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault
from planaria.pipeline.network.costs import message_bytes
from support.live.harness import (
    apart,
    ending,
    facts,
    folder_of,
    inline,
    inline_losses,
    losses,
    outcomes,
    resume,
    tiny,
    train,
    validation_losses,
)
from support.schedules import on_schedule, shape

WIRES: dict[str, Any] = {
    "bf16": "bf16",
    "8/8": "8/8",
    "6/4": "6/4",
    "6/4, nearest": {"kind": "groups", "rounding": "nearest"},
    "5 and 3 bits, groups of 32": {"kind": "groups", "forward": 5, "backward": 3, "group": 32},
    "subspace": {"kind": "subspace", "rank": 12, "forward": 8, "backward": 4},
    "learned projection": "8/4",
}
MODELS: dict[str, dict[str, Any]] = {
    "subspace": {"tied": False},
    "learned projection": {
        "family": "benchmarks.learned_projection:ProjectedLlama",
        "options": {"rank": 12},
    },
}
"""models with codecs that not all have"""
RECIPES: dict[str, dict[str, Any]] = {
    "redundant": {"recovery": {"strategy": "redundant"}},
    "swapped": {"routing": {"kind": "swapped"}, "recovery": {"strategy": "checkfree_plus"}},
    "skipping": {"routing": {"kind": "skipping", "skip": 0.5, "swaps": 1}},
}


SLOW = ("8/8", "6/4, nearest", "learned projection")


def carried(record: RunRecord) -> int:
    return sum(sum(work.sent_bytes.values()) for _, work in record.worked)


@pytest.mark.usefixtures("allow_code")
@pytest.mark.parametrize(
    "wire", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WIRES]
)
@pytest.mark.parametrize(
    "name", ["redundant", *(pytest.param(name, marks=pytest.mark.slow) for name in [*RECIPES][1:])]
)
def test_processes_train_as_inline_through_a_recovery(tmp_path: Path, name: str, wire: str) -> None:
    pipeline, model = {"wire": WIRES[wire]}, MODELS.get(wire, {})
    config = tiny(tmp_path, steps=8, pipeline=pipeline, model=model, train={"eval_every": 4}, **RECIPES[name])
    record = train(config, [Fault(step=3, stage=2, moment="backward", offset=0.5)])
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "recovered"]
    assert (losses(record), validation_losses(record)) == inline(record), "not equal to the last bit"


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["6/4", "subspace"])
def test_a_resumed_run_equals_one_without_a_break(tmp_path: Path, wire: str) -> None:
    model = MODELS.get(wire, {})
    config = tiny(tmp_path, steps=4, pipeline={"wire": WIRES[wire]}, model=model)
    train(config)
    assert losses(resume(folder_of(config), train__steps="8")) == inline_losses(config, 8), "to the last bit"


@pytest.mark.parametrize("wire", ["bf16", pytest.param("6/4", marks=pytest.mark.slow)])
def test_replicas_and_schedules_train_as_inline(tmp_path: Path, wire: str) -> None:
    settings, folder = shape(0.5), tmp_path / "schedule"
    settings["pipeline"] = {**settings.get("pipeline", {}), "wire": wire}
    replicas = tiny(tmp_path / "replicas", stages=1, steps=4, pipeline={"wire": wire}, exchange={"replicas": 2})
    for config in (replicas, on_schedule(tiny(folder, stages=4, steps=4, **settings), folder, True)):
        record = train(config)
        assert ending(record).outcome == "finished" and losses(record) == inline(record)[0]


@pytest.mark.parametrize(("wire", "apart_by"), [("bf16", 1e-2), ("6/4", 0.1), ("subspace", 1.0)])
def test_the_stated_bytes_are_sent(tmp_path: Path, wire: str, apart_by: float) -> None:
    """Losses are near those of fp32, but not equal, since messages are rounded."""
    whole, short = (
        train(tiny(tmp_path / str(n), stages=2, steps=4, pipeline={"wire": wire}, model=MODELS["subspace"]))
        for n, wire in enumerate(("fp32", WIRES[wire]))
    )
    # Each of 4 microbatches crosses 3 edges in each direction, in 4 steps.
    for record in (whole, short):
        assert carried(record) == 4 * 4 * 3 * sum(message_bytes(record.config.model, record.config.pipeline))
    assert len(facts(short, d.Commit)) == 4
    assert 0 < apart(losses(short), losses(whole)) < apart_by
    assert losses(whole) == inline(whole)[0]


ALWAYS = 1000


@pytest.mark.usefixtures("allow_code")
@pytest.mark.parametrize(
    ("factor", "lies"),
    [("nan", ALWAYS), *(pytest.param(*each, marks=pytest.mark.slow) for each in [("nan", 1), ("inf", 1), ("1e4", 1)])],
)
def test_a_member_that_sends_huge_or_infinite_scales_changes_no_loss(tmp_path: Path, factor: str, lies: int) -> None:
    """The receiver rejects them. Whose scales are infinite in the repeated step too is replaced."""
    wire = {"kind": "support.live.lying_codec:LyingCodec", "factor": factor, "lies": lies}
    wire |= {"sample": 9 * 16, "liar": str(tmp_path / "liar")}
    config = tiny(tmp_path, steps=11, pipeline={"wire": wire, "microbatches": 8}, recovery={"strategy": "redundant"})
    record = train(config)
    assert ending(record).outcome == "finished"
    rejected = [fact for fact in facts(record, EdgeBroken) if "sent a damaged" in fact.cause]
    assert {(fact.node, fact.peer, fact.invalid) for fact in rejected} == {(1, 2, factor != "1e4")}
    assert all("sent a damaged BACKWARD" in fact.cause and "step 9" in fact.detail for fact in rejected)
    assert outcomes(record) == ["started", "relinked", *(["recovered"] if lies == ALWAYS else [])]
    assert [fact.workers for fact in facts(record, d.ExcludeMember)] == [["w2"]] * (lies == ALWAYS)
    assert losses(record) == inline(record)[0], "to the last bit"
