"""Replicas as processes that all-reduce each step's gradient: the bytes they send, and the losses of inline."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.exchange.registry import make_exchange
from planaria.faults.trace import Fault
from planaria.models.families import build_stage
from planaria.runtime.checkpoint.loading import load_stage
from planaria.runtime.engine.train_prepared import train_prepared
from planaria.runtime.preparation.prepare import PreparedRun
from support.live.harness import (
    ending,
    facts,
    in_one_process,
    inline,
    inline_losses,
    losses,
    newest,
    outcomes,
    resume,
    tiny,
    train,
)

REPLICAS = 3
ESTIMATES = ("econtrol", "ef21")
WEIGHTED = {"kind": "topk", "keep": 0.05, "feedback": "ef21w", "warmup": 2}


def begins(spec: str | dict[str, Any]) -> int:
    """Steps until messages are compressed: estimates begin with gradients in full, and a warm-up sends differences."""
    return 1 + int(spec["warmup"]) if isinstance(spec, dict) else int(spec.startswith(ESTIMATES))


def every_step(
    folder: Path, spec: str | dict[str, Any], steps: int = 6, robust: str = "", **sections: dict[str, Any]
) -> RunConfig:
    """Three replicas of two stages each (with the ends), whose messages are compressed as ``spec``."""
    exchange = {"replicas": REPLICAS, "compress": spec, "robust": robust}
    return tiny(folder, stages=1, steps=steps, exchange=exchange, **sections)


def sent_within_stages(record: RunRecord) -> Counter[tuple[int, int]]:
    """Return (node, node of the same stage) → bytes that the first has sent the second."""
    sent = Counter[tuple[int, int]]()
    for _, work in record.worked:
        for peer, size in work.sent_bytes.items():
            if (peer - work.node) % 2 == 0:
                sent[work.node, peer] += size
    return sent


def compressed(record: RunRecord) -> list[dict[str, Any]]:
    """Return the logged messages by step and stage, without worker and generation."""
    own = [fact.model_dump(exclude={"worker", "generation"}) for fact in facts(record, e.MessageCompressed)]
    return sorted(own, key=lambda fact: (fact["round"], fact["stage"]))


def stated(config: RunConfig, stage: int) -> float:
    """Return the bytes that a replica sends of this stage in a step, by the exchange's formula."""
    built = build_stage(config.model, config.pipeline.stages, stage, 0, "meta")
    shapes = {name: parameter.shape for name, parameter in built.named_parameters()}
    return make_exchange(config.exchange).cost(shapes, REPLICAS).total


def in_full(config: RunConfig, stage: int) -> float:
    """The same if nothing is compressed."""
    return stated(config.model_copy(update={"exchange": config.exchange.model_copy(update={"compress": ""})}), stage)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("spec", ["32bits", "4bits", "sign", "decayed:dct", "econtrol:top5%", "ef21:rand5%", WEIGHTED])
def test_replicas_send_the_stated_bytes_and_train_as_inline(tmp_path: Path, spec: str | dict[str, Any]) -> None:
    config = every_step(tmp_path, spec)
    record = train(config)
    assert ending(record).outcome == "finished"
    assert losses(record) == inline(record)[0], "to the last bit"
    assert not facts(record, d.Settle), "they agree within the step"
    assert compressed(record) == compressed(in_one_process(config))
    sent = sent_within_stages(record)
    first = begins(spec)
    for node in range(2 * REPLICAS):
        others = [peer for peer in range(node % 2, 2 * REPLICAS, 2) if peer != node]
        steady = (config.train.steps - first) * stated(config, node % 2)
        assert sum(sent[node, peer] for peer in others) == first * in_full(config, node % 2) + steady
        assert len({sent[node, peer] for peer in others}) == 1, "each receives the same"
    steps = range(config.train.steps if spec != "32bits" else 0)
    assert [(fact["round"], fact["stage"]) for fact in compressed(record)] == [(n, s) for n in steps for s in (0, 1)]
    assert all(fact["full"] == ("beginning" if fact["round"] < first else None) for fact in compressed(record))
    for node in range(2):  # of replica 0
        of_stage = [fact for fact in compressed(record) if fact["stage"] == node]
        assert not of_stage or sum(fact["sent_bytes"] for fact in of_stage) == sent[node, node + 2]


@pytest.mark.slow
@pytest.mark.parametrize("robust", ["median", "clipping", "nnm:geometric_median"])
def test_replicas_with_a_robust_rule_train_as_inline(tmp_path: Path, robust: str) -> None:
    config = every_step(tmp_path, "ef14:8bits", robust=robust)
    record = train(config)
    assert losses(record) == inline(record)[0] != inline_losses(every_step(tmp_path, "ef14:8bits"))


ENDS, STUCK_S = 0, 20.0
"""the node that dies, and how long it would stand still otherwise"""


def killing(step: int) -> Callable[..., object]:
    """A fleet whose node ``ENDS`` is killed once the others' other stage has finished its part of ``step``."""
    ready: list[str] = []

    def engine(prepared: PreparedRun, folder: Path, watch: Any) -> object:
        original, place, pids = watch.on_event, {}, {}

        def on_event(t: float, event: e.Event, notice: int = 0) -> None:
            original(t, event)
            if isinstance(event, e.WorkerJoined):
                pids[event.worker] = event.pid
            elif isinstance(event, e.Linked):
                place[event.node] = event.worker
            elif isinstance(event, e.StageReady) and event.step == step and event.stage == 1:
                ready.append(event.worker)
                if len(ready) == REPLICAS:  # for the first time
                    os.kill(pids[place[ENDS]], signal.SIGKILL)

        watch.on_event = on_event
        return train_prepared(prepared, folder, watch)

    return engine


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("spec", "robust"),
    [
        ("32bits", ""),
        ("4bits", ""),
        ("decayed:topk2", ""),
        ("econtrol:top5%", ""),
        (WEIGHTED, ""),
        ("32bits", "clipping"),
    ],
)
def test_the_residual_of_a_dropped_step_is_kept_once(tmp_path: Path, spec: str | dict[str, Any], robust: str) -> None:
    """A worker of stage 0 dies after all block stages have agreed on the step's gradient; all repeat the step.

    Stage 0 then restarts its estimates; the block stage, which lost no worker, does not. The last value of a robust
    rule is from before that step, and the rebuilt node takes it over.
    """
    config = every_step(tmp_path, spec, steps=7, robust=robust)
    last = 3.5 / 8  # of its eight backward passes the fourth in the plan: the last that the block stage sends it
    stuck = Fault(step=3, stage=ENDS, signal="stuck", moment="backward", offset=last, resume_after_s=STUCK_S)
    record = train(config, [stuck], engine=killing(step=3))
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "recovered"]
    done = Counter(ready.step for ready in facts(record, e.StageReady) if ready.stage == 1)
    assert done == {step: REPLICAS * (2 if step == 3 else 1) for step in range(7)}, "the step was not dropped"
    reported = compressed(record)
    assert [(fact["round"], fact["stage"]) for fact in reported] == ([] if spec == "32bits" else [
        (step, stage) for step in range(7) for stage in (0, 1)
    ]), "once, though a step was done twice"  # fmt: skip
    full = [(fact["round"], fact["stage"], fact["full"]) for fact in reported if fact["full"]]
    began = [(step, stage, "beginning") for step in range(begins(spec)) for stage in (0, 1)]
    assert full == ([*began, (3, 0, "rebuilt")] if began else []), "a warm-up's measurements survive the loss of a node"
    assert losses(record) == inline(record)[0], "to the last bit"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("spec", "robust"), [("", "clipping"), (WEIGHTED, "")])
def test_a_run_resumes_with_the_state_that_replicas_share(
    tmp_path: Path, spec: str | dict[str, Any], robust: str
) -> None:
    """The last value of a robust rule, or the measurements of a warm-up."""
    config, whole = (every_step(tmp_path, spec, steps, robust=robust) for steps in (2, 5))
    folder = in_one_process(config, name=config.name).folder
    for steps, engine in (("4", "fleet"), ("5", "inline")):
        record = resume(folder, train__steps=steps, engine=engine)
    assert losses(record) == inline_losses(whole)


@pytest.mark.slow
def test_a_run_resumes_with_the_residual_of_each_replica(tmp_path: Path) -> None:
    config, whole = (every_step(tmp_path, "econtrol:4bits", steps) for steps in (2, 7))
    folder = in_one_process(config, name=config.name).folder
    resume(folder, train__steps="4", engine="fleet")
    saved = newest(folder)
    assert saved.manifest.replicas == 1
    assert len(list(saved.folder.glob("stage-*-at-*.safetensors"))) == 2 * (REPLICAS - 1)
    residual = [load_stage(saved.folder, config, 1, replica).outer for replica in range(REPLICAS)]
    name = next(name for name in residual[0] if name.startswith("residual/"))
    assert len({float(own[name].norm()) for own in residual} - {0.0}) == REPLICAS
    assert [int(own["rounds"]) for own in residual] == [4] * REPLICAS
    two = config.model_copy(update={"exchange": config.exchange.model_copy(update={"replicas": 2})})
    shared = load_stage(saved.folder, two, 1, 1).outer[name]
    assert torch.equal(shared, (residual[0][name] + residual[1][name] + residual[2][name]) / 3), (
        "in the mean what it was"
    )
    resume(folder, train__steps="6", engine="fleet")
    record = resume(folder, train__steps="7", engine="inline")
    assert losses(record) == inline_losses(whole)
