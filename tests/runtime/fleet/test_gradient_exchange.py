"""Replicas as processes that agree on every step's gradient: what they send, and that they learn what inline learns."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_no_orphans, checked, ending, facts, folder_of, inline, losses, outcomes, tiny, train

from observer import train_inline
from planaria.cli.commands import train as command
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord, read_run
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.exchange.kinds import exchange
from planaria.faults.trace import Fault
from planaria.lab.inline.engine import InlineEngine
from planaria.models.families import build_stage
from planaria.runtime.checkpoint.loading import stage_for
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.engine import fleet
from planaria.runtime.engine.prepare import Prepared

REPLICAS = 3
ESTIMATES = ("econtrol", "ef21")
WEIGHTED = {"kind": "topk", "keep": 0.05, "feedback": "ef21w", "warmup": 2}


def begins(said: str | dict[str, Any]) -> int:
    """Steps until messages are compressed: estimates begin with gradients in full, and a warm-up sends differences."""
    return 1 + int(said["warmup"]) if isinstance(said, dict) else int(said.startswith(ESTIMATES))


def every_step(
    folder: Path, said: str | dict[str, Any], steps: int = 6, robust: str = "", **sections: dict[str, Any]
) -> RunConfig:
    """Three replicas of two stages each (with the ends), whose messages are compressed as ``said``."""
    exchange = {"replicas": REPLICAS, "compress": said, "robust": robust}
    return tiny(folder, stages=1, steps=steps, exchange=exchange, **sections)


def sent_within_stages(record: RunRecord) -> Counter[tuple[int, int]]:
    """Node and node of the same stage → bytes of all that the first has sent the other."""
    sent: Counter[tuple[int, int]] = Counter()
    for _, work in record.worked:
        for peer, size in work.sent_bytes.items():
            if (peer - work.node) % 2 == 0:
                sent[work.node, peer] += size
    return sent


def compressed(record: RunRecord) -> list[dict[str, Any]]:
    """What is told of messages, without who and when, by step and stage."""
    own = [fact.model_dump(exclude={"worker", "generation"}) for fact in facts(record, e.MessageCompressed)]
    return sorted(own, key=lambda fact: (fact["round"], fact["stage"]))


def in_one_process(config: RunConfig) -> RunRecord:
    """The same run on the inline engine, told by its events."""
    return train(config.model_copy(update={"engine": "inline", "name": "inline"}), engine=train_inline)


def inline_losses(config: RunConfig) -> dict[int, float]:
    """By step, of a run in one process from its beginning to its end."""
    data = prepare(config.data, config.model.vocab)
    streams = [Stream(data, split, config.model.context, config.seed) for split in ("train", "validation")]
    engine = InlineEngine(config, *streams)
    return {result.step: result.loss for result in (engine.train_step() for _ in range(config.train.steps))}


def stated(config: RunConfig, stage: int) -> float:
    """Bytes that the exchange says a replica sends of this stage in a step."""
    built = build_stage(config.model, config.pipeline.stages, stage, 0, "meta")
    shapes = {name: parameter.shape for name, parameter in built.named_parameters()}
    return exchange(config.exchange).cost(shapes, REPLICAS).total


def in_full(config: RunConfig, stage: int) -> float:
    """The same if nothing is compressed."""
    return stated(config.model_copy(update={"exchange": config.exchange.model_copy(update={"compress": ""})}), stage)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("said", ["32bits", "4bits", "sign", "econtrol:top5%", "ef21:rand5%", WEIGHTED])
def test_replicas_send_what_is_stated_and_learn_what_inline_learns(tmp_path: Path, said: str | dict[str, Any]) -> None:
    config = every_step(tmp_path, said)
    record = train(config)
    assert ending(record).outcome == "finished"
    assert losses(record) == inline(record)[0], "to the last bit"
    assert not facts(record, d.Settle), "they agree within the step"
    assert compressed(record) == compressed(in_one_process(config))
    sent = sent_within_stages(record)
    first = begins(said)
    for node in range(2 * REPLICAS):
        others = [peer for peer in range(node % 2, 2 * REPLICAS, 2) if peer != node]
        steady = (config.train.steps - first) * stated(config, node % 2)
        assert sum(sent[node, peer] for peer in others) == first * in_full(config, node % 2) + steady
        assert len({sent[node, peer] for peer in others}) == 1, "each hears the same"
    steps = range(config.train.steps if said != "32bits" else 0)
    assert [(fact["round"], fact["stage"]) for fact in compressed(record)] == [(n, s) for n in steps for s in (0, 1)]
    assert all(fact["full"] == ("beginning" if fact["round"] < first else None) for fact in compressed(record))
    for node in range(2):  # of replica 0
        of_stage = [fact for fact in compressed(record) if fact["stage"] == node]
        assert not of_stage or sum(fact["sent_bytes"] for fact in of_stage) == sent[node, node + 2]


@pytest.mark.slow
@pytest.mark.parametrize("robust", ["median", "clipping", pytest.param("nnm:geometric_median", marks=pytest.mark.slow)])
def test_replicas_that_distrust_each_other_learn_what_inline_learns(tmp_path: Path, robust: str) -> None:
    config = every_step(tmp_path, "ef14:8bits", robust=robust)
    record = train(config)
    assert losses(record) == inline(record)[0] != inline_losses(every_step(tmp_path, "ef14:8bits"))


ENDS, STUCK_S = 0, 20.0
"""the node that dies, and how long it would stand still otherwise"""


def killing(step: int) -> Callable[..., object]:
    """A fleet whose node ``ENDS`` is killed once the others' other stage has finished its part of ``step``."""
    ready: list[str] = []

    def engine(prepared: Prepared, folder: Path, watch: Any) -> object:
        told, place, pids = watch.on_event, {}, {}

        def on_event(t: float, event: e.Event) -> None:
            told(t, event)
            if isinstance(event, e.WorkerJoined):
                pids[event.worker] = event.pid
            elif isinstance(event, e.Linked):
                place[event.node] = event.worker
            elif isinstance(event, e.StageReady) and event.step == step and event.stage == 1:
                ready.append(event.worker)
                if len(ready) == REPLICAS:  # for the first time
                    os.kill(pids[place[ENDS]], signal.SIGKILL)

        watch.on_event = on_event
        return fleet.train(prepared, folder, watch)

    return engine


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("said", "robust"), [("32bits", ""), ("4bits", ""), ("econtrol:top5%", ""), (WEIGHTED, ""), ("32bits", "clipping")]
)
def test_what_rounding_kept_back_in_a_step_that_is_dropped_is_kept_back_once(
    tmp_path: Path, said: str | dict[str, Any], robust: str
) -> None:
    """The block stage of all replicas has agreed on the step's gradient when the ends of one die: all do it again.

    The ends then begin their estimates anew, and the block stage, which has lost nobody, does not. The last value of a
    robust rule is from before that step, and the reborn node takes it over.
    """
    config = every_step(tmp_path, said, steps=7, robust=robust)
    last = 3.5 / 8  # of its eight backward passes the fourth in the plan: the last that the block stage sends it
    stuck = Fault(step=3, stage=ENDS, signal="stuck", moment="backward", offset=last, resume_after_s=STUCK_S)
    train(config, [stuck], engine=killing(step=3))
    record = checked(folder_of(config))
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "recovered"]
    done = Counter(ready.step for ready in facts(record, e.StageReady) if ready.stage == 1)
    assert done == {step: REPLICAS * (2 if step == 3 else 1) for step in range(7)}, "the step was not dropped"
    told = compressed(record)
    assert [(fact["round"], fact["stage"]) for fact in told] == ([] if said == "32bits" else [
        (step, stage) for step in range(7) for stage in (0, 1)
    ]), "once, though a step was done twice"  # fmt: skip
    full = [(fact["round"], fact["stage"], fact["full"]) for fact in told if fact["full"]]
    began = [(step, stage, "beginning") for step in range(begins(said)) for stage in (0, 1)]
    assert full == ([*began, (3, 0, "rebuilt")] if began else []), "what a warm-up found is not lost with a node"
    assert losses(record) == inline(record)[0], "to the last bit"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("said", "robust"), [("", "clipping"), (WEIGHTED, "")])
def test_a_run_goes_on_from_its_checkpoint_with_what_all_replicas_share(
    tmp_path: Path, said: str | dict[str, Any], robust: str
) -> None:
    """The last value of a robust rule, or what a warm-up has measured so far."""
    config, whole = (every_step(tmp_path, said, steps, robust=robust) for steps in (2, 5))
    folder = folder_of(config)
    train(config.model_copy(update={"engine": "inline"}), engine=train_inline)
    for steps, engine in ((4, "fleet"), (5, "inline")):
        assert command.resume(folder, {"train.steps": str(steps), "engine": engine}, quiet=True) == 0
        assert_no_orphans(folder)
    assert losses(read_run(folder)) == inline_losses(whole)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_with_what_each_replica_owes_the_others(tmp_path: Path) -> None:
    config, whole = (every_step(tmp_path, "econtrol:4bits", steps) for steps in (2, 7))
    folder = folder_of(config)

    def go_on(steps: int, engine: str) -> None:
        assert command.resume(folder, {"train.steps": str(steps), "engine": engine}, quiet=True) == 0
        assert_no_orphans(folder)

    train(config.model_copy(update={"engine": "inline"}), engine=train_inline)
    go_on(4, "fleet")
    saved = CheckpointStore(folder / "checkpoints").newest()
    assert saved is not None and saved.manifest.replicas == 1
    assert len(list(saved.folder.glob("stage-*-at-*.safetensors"))) == 2 * (REPLICAS - 1)
    owed = [stage_for(saved.folder, config, 1, replica).outer for replica in range(REPLICAS)]
    name = next(name for name in owed[0] if name.startswith("residual/"))
    assert len({float(own[name].norm()) for own in owed} - {0.0}) == REPLICAS
    assert [int(own["rounds"]) for own in owed] == [4] * REPLICAS
    two = config.model_copy(update={"exchange": config.exchange.model_copy(update={"replicas": 2})})
    shared = stage_for(saved.folder, two, 1, 1).outer[name]
    assert torch.equal(shared, (owed[0][name] + owed[1][name] + owed[2][name]) / 3), "in the mean what it was"
    go_on(6, "fleet")
    go_on(7, "inline")
    assert losses(read_run(folder)) == inline_losses(whole)
