"""Replicas as processes: each at its own pace, meeting two by two, whoever dies, freezes or comes late."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from harness import apart, ending, facts, folder_of, once, outcomes, resume, tiny, train
from observer import train_inline
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.faults.trace import Fault
from planaria.lab.inline.engine import InlineEngine
from planaria.report.run.narrate import story
from planaria.runtime.checkpoint.loading import load_model
from planaria.runtime.checkpoint.store import CheckpointStore

TOLERANCE = 1e-5
HEAVY = {"alpha": 0.3, "momentum": "heavy_ball"}


def several(folder: Path, replicas: int = 3, steps: int = 12, **sections: dict[str, Any]) -> RunConfig:
    """Replicas of two stages each (with the ends) that meet in pairs every four steps."""
    exchange = {"replicas": replicas, "kind": "noloco", **sections.pop("exchange", {})}
    if exchange["kind"] != "local":
        exchange["options"] = {"every": 4, **exchange.get("options", {})}
    return tiny(folder, stages=1, steps=steps, exchange=exchange, **sections)


def mean_losses(record: RunRecord) -> dict[int, float]:
    """Step → the mean of the replicas' losses in it."""
    found: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for ready in facts(record, e.StageReady):
        if ready.loss is not None and ready.mode == "train":
            found[ready.step][ready.replica] = ready.loss
    return {step: fmean(of.values()) for step, of in sorted(found.items())}


def inline_losses(config: RunConfig) -> dict[int, float]:
    engine = InlineEngine(
        config,
        *(
            Stream(prepare(config.data, config.model.vocab), s, config.model.context, config.seed)
            for s in ("train", "validation")
        ),
    )
    return {result.step: result.loss for result in (engine.train_step() for _ in range(config.train.steps))}


def final_weights(record: RunRecord) -> dict[str, torch.Tensor]:
    """Of the one model that the replicas make."""
    saved = CheckpointStore(record.folder / "checkpoints").newest()
    assert saved is not None
    return load_model(saved).global_state()


def blocks(record: RunRecord) -> list[int]:
    """The blocks of samples that were committed, in order of number."""
    running, used = {}, []
    for _, fact in record.history:
        if isinstance(fact, d.RunStep) and fact.mode == "train":
            running[fact.replica] = fact.block
        elif isinstance(fact, d.Commit):
            used.append(running.pop(fact.replica))
    return sorted(used)


def shortened(record: RunRecord) -> dict[tuple[int, int], tuple[int, float, float | None]]:
    """Round and node → what is told of its message: its size, what it lacks, and what is owed."""
    told = facts(record, e.MessageCompressed)
    return {(fact.round, fact.node): (fact.sent_bytes, fact.lost, fact.owed) for fact in told}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "exchange",
    [
        {"options": {"bits": 8}},
        {"kind": "pair_mean", "options": {"group": 3}},
        {"kind": "diloco", "options": HEAVY},
        {"kind": "streaming_diloco", "options": {"fragments": 2, "delay": 1, **HEAVY}},
        {"kind": "local"},
        {"kind": "monna", "options": {"alpha": 0.5}},
        {"kind": "diloco", "robust": "clipping", "options": HEAVY},
    ],
    ids=lambda exchange: exchange.get("kind", "noloco"),
)
def test_the_fleet_trains_what_inline_trains(tmp_path: Path, exchange: dict[str, Any]) -> None:
    config = several(tmp_path, exchange=exchange)
    record = train(config)
    assert ending(record).outcome == "finished"
    assert apart(mean_losses(record), inline_losses(config)) <= TOLERANCE
    single = train(config.model_copy(update={"engine": "inline", "name": "inline"}), engine=train_inline)
    assert shortened(record) == shortened(single)
    assert bool(shortened(record)) == (exchange == {"options": {"bits": 8}})
    if exchange.get("kind") != "local":
        rounds = 6 if exchange.get("kind") == "streaming_diloco" else 3
        assert {settle.round for settle in facts(record, d.Settle)} == set(range(rounds))


@pytest.mark.slow
def test_a_lost_stage_is_copied_from_another_replica(tmp_path: Path) -> None:
    faults = [
        Fault(step=2, stage=1),
        Fault(step=5, stage=2, moment="commit"),
        Fault(step=9, stage=5, moment="backward"),
    ]
    record = train(several(tmp_path, fleet={"spares": 2}), faults)
    assert ending(record).outcome == "finished"
    assert sorted(outcomes(record)) == ["recovered"] * 3 + ["started"] * 3
    copied = {
        member.node: member.source
        for form in facts(record, d.Form)
        for member in form.members
        if isinstance(member.source, d.Rebuild)
    }
    assert copied.keys() == {1, 2, 5}
    for node, source in copied.items():
        assert source.by == d.PEER and source.donors[0] % 2 == node % 2 and source.donors[0] // 2 != node // 2
    assert blocks(record) == list(range(36))


@pytest.mark.slow
def test_a_whole_replica_that_dies_comes_back_as_a_copy_of_another(tmp_path: Path) -> None:
    record = train(several(tmp_path, fleet={"spares": 2}), [Fault(step=5, stage=2), Fault(step=5, stage=3)])
    assert ending(record).outcome == "finished"
    last = [form for form in facts(record, d.Form) if form.replica == 1][-1]
    donors = [member.source.donors[0] // 2 for member in last.members if isinstance(member.source, d.Rebuild)]
    assert len(donors) in (1, 2) and 1 not in donors
    assert blocks(record) == list(range(36))


@pytest.mark.slow
def test_a_partner_that_freezes_is_not_waited_for(tmp_path: Path) -> None:
    """It counts as alive for ten seconds, and patience is over long before that."""
    hook = once(lambda x: isinstance(x, d.RunStep) and (x.replica, x.step) == (1, 2), signal.SIGSTOP, stage=2)
    config = several(tmp_path, replicas=2, fleet={"missed": 12}, exchange={"patience_s": 0.3})
    record = train(config, hook=hook)
    assert ending(record).outcome == "finished"
    assert facts(record, e.PatienceOver)
    alone = [settle for settle in facts(record, d.Settle) if settle.members == [0]]
    assert alone and blocks(record) == list(range(24))


def test_what_a_replica_says_that_is_of_no_use_harms_nobody_else(tmp_path: Path) -> None:
    lies = [
        Fault(step=step, stage=2, signal="lie", attack=attack, until=step + 4)
        for step, attack in ((0, "nan"), (4, "wrong_size"))
    ]
    record = train(several(tmp_path, replicas=2, exchange={"patience_s": 600.0}), lies)
    assert ending(record).outcome == "finished" and blocks(record) == list(range(24))
    refused = facts(record, e.OfferRefused)
    assert {(fact.round, fact.replica) for fact in refused} == {(0, 1), (1, 1)}, "one stage that refuses is enough"
    assert all(("finite" if fact.round == 0 else "torch.float32 [") in fact.reason for fact in refused)
    together = {settle.round: len(settle.members) == 2 for settle in facts(record, d.Settle)}
    assert together == {0: False, 1: False, 2: True} and not facts(record, e.PatienceOver)
    assert all(weight.isfinite().all() for weight in final_weights(record).values())
    told = [str(line) for _, line in story(record) if "invalid update" in line.text]
    assert len(told) == 2 and "replica 0 continued alone without replica 1" in told[0]


def test_replicas_may_make_unequal_numbers_of_steps_between_rounds(tmp_path: Path) -> None:
    record = train(several(tmp_path, replicas=2, exchange={"inner": [2, 4], "patience_s": 60.0}))
    assert ending(record).outcome == "finished"
    made = defaultdict[int, int](int)
    for _, fact in record.history:
        if isinstance(fact, d.Commit):
            made[fact.replica] += 1
        elif isinstance(fact, d.Meet):
            assert made[1] == 2 * made[0], "each has made its own number of steps"
    assert facts(record, d.Meet) and blocks(record) == list(range(24))


@pytest.mark.slow
def test_without_replacement_a_replica_disbands_and_the_others_use_its_samples(tmp_path: Path) -> None:
    config = several(tmp_path, fleet={"spares": 0, "replace": False})
    record = train(config, [Fault(step=5, stage=3)])
    assert ending(record).outcome == "finished"
    (disband,) = facts(record, d.Disband)
    assert disband.replica == 1 and "no worker is left" in disband.reason
    assert blocks(record) == list(range(36))


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = train(several(tmp_path / "whole", exchange={"options": {"bits": 8}}))
    short = several(tmp_path / "short", steps=6, exchange={"options": {"bits": 8}})
    train(short)
    record = resume(folder_of(short), train__steps="12")
    assert ending(record).outcome == "finished"
    one, other = final_weights(record), final_weights(whole)
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert blocks(record) == list(range(36))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_replicas_and_says_what_that_costs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = several(tmp_path, replicas=2, steps=6)
    train(config)
    record = resume(folder_of(config), train__steps="10", exchange__replicas="3")
    assert ending(record).outcome == "finished"
    assert (
        "of 2 replicas, now 3 replicas: they begin from the mean of weights and moments, of the outer state too"
        in capfd.readouterr().out
    )
    assert blocks(record) == list(range(12 + 12))


@pytest.mark.slow
def test_what_all_replicas_have_lost_is_rebuilt_from_neighbours_or_rolled_back(tmp_path: Path) -> None:
    config = several(
        tmp_path, replicas=2, fleet={"spares": 2}, recovery={"strategy": "checkpoint"}, checkpoint={"every": 3}
    )
    record = train(config, [Fault(step=7, stage=1), Fault(step=7, stage=3)])
    assert ending(record).outcome == "finished"
