"""Replicas as processes: each at its own pace, meeting in pairs, whichever dies, freezes or is late."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault
from planaria.report.run.event_lines import timed_lines
from planaria.runtime.checkpoint.loading import load_model
from support.live import harness
from support.live.harness import (
    ending,
    facts,
    folder_of,
    newest,
    outcomes,
    rebuilt,
    resume,
    signal_once,
    tiny,
    train,
)

HEAVY = {"alpha": 0.3, "momentum": "heavy_ball"}


def several(folder: Path, replicas: int = 3, steps: int = 12, **sections: dict[str, Any]) -> RunConfig:
    """Replicas of two stages each (with the ends) that meet in pairs every four steps."""
    exchange = {"replicas": replicas, "kind": "noloco", **sections.pop("exchange", {})}
    if exchange["kind"] != "local":
        exchange["options"] = {"every": 4, **exchange.get("options", {})}
    return tiny(folder, stages=1, steps=steps, exchange=exchange, **sections)


def final_weights(record: RunRecord) -> dict[str, torch.Tensor]:
    """Return the weights of the one model that the replicas make."""
    return load_model(newest(record.folder)).global_state()


def blocks(record: RunRecord) -> list[int]:
    """Return the committed blocks of samples in order of number."""
    running, used = {}, []
    for _, fact in record.history:
        if isinstance(fact, d.RunStep) and fact.mode == "train":
            running[fact.replica] = fact.block
        elif isinstance(fact, d.Commit):
            used.append(running.pop(fact.replica))
    return sorted(used)


def shortened(record: RunRecord) -> dict[tuple[int, int], tuple[int, float, float | None]]:
    """Return (round, node) → size of its message, compression error and residual."""
    reported = facts(record, e.MessageCompressed)
    return {(fact.round, fact.node): (fact.sent_bytes, fact.relative_error, fact.residual) for fact in reported}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "exchange",
    [
        {"options": {"bits": 8}},
        {"kind": "pair_mean", "options": {"group": 3}},
        {"kind": "diloco", "options": HEAVY},
        {"kind": "streaming_diloco", "options": {"fragments": 2, "delay": 1, **HEAVY}},
        {"kind": "decoupled", "options": {"fragments": 2, "delay": 1, "min_due": 3}},
        {"kind": "eager", "options": HEAVY},
        {"kind": "local"},
        {"kind": "monna", "options": {"alpha": 0.5}},
        {"kind": "diloco", "robust": "clipping", "options": HEAVY},
        {"kind": "diloco", "compress": "decayed:topk2", "options": {"alpha": 0.0, "aggregator": "clipped_senders"}},
        {"kind": "diloco", "compress": "decayed:dct", "options": HEAVY},
    ],
    ids=lambda exchange: exchange.get("kind", "noloco"),
)
def test_the_fleet_trains_as_inline(tmp_path: Path, exchange: dict[str, Any]) -> None:
    config = several(tmp_path, exchange=exchange)
    record = train(config)
    assert ending(record).outcome == "finished"
    assert harness.mean_losses(record) == harness.inline_losses(config), "to the last bit"
    single = harness.in_one_process(config)
    assert shortened(record) == shortened(single)
    assert bool(shortened(record)) == (exchange == {"options": {"bits": 8}} or "compress" in exchange)
    if exchange.get("kind") != "local":
        rounds = 6 if "fragments" in exchange["options"] else 3
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
    copied = {member.node: member.source for member in rebuilt(record)}
    assert copied.keys() == {1, 2, 5}
    for node, source in copied.items():
        assert source.by == d.PEER and source.donors[0] % 2 == node % 2 and source.donors[0] // 2 != node // 2
    assert blocks(record) == list(range(36))


@pytest.mark.slow
def test_a_lost_replica_is_rebuilt_as_a_copy_of_another(tmp_path: Path) -> None:
    record = train(several(tmp_path, fleet={"spares": 2}), [Fault(step=5, stage=2), Fault(step=5, stage=3)])
    assert ending(record).outcome == "finished"
    last = [form for form in facts(record, d.Form) if form.replica == 1][-1]
    donors = [member.source.donors[0] // 2 for member in last.members if isinstance(member.source, d.Rebuild)]
    assert len(donors) in (1, 2) and 1 not in donors
    assert blocks(record) == list(range(36))


@pytest.mark.slow
def test_a_frozen_partner_is_not_waited_for(tmp_path: Path) -> None:
    """It counts as alive for ten seconds; patience ends long before that."""
    hook = signal_once(lambda x: isinstance(x, d.RunStep) and (x.replica, x.step) == (1, 2), signal.SIGSTOP, stage=2)
    config = several(tmp_path, replicas=2, fleet={"missed_heartbeats": 12}, exchange={"patience_s": 0.3})
    record = train(config, hook=hook)
    assert ending(record).outcome == "finished"
    assert facts(record, e.RoundWaitExpired)
    alone = [settle for settle in facts(record, d.Settle) if settle.members == [0]]
    assert alone and blocks(record) == list(range(24))


def test_invalid_updates_of_a_replica_do_not_harm_others(tmp_path: Path) -> None:
    attacks = ((0, "nan"), (4, "wrong_size"))
    is_byzantine = [
        Fault(step=step, stage=2, signal="corrupt_update", attack=attack, until=step + 4) for step, attack in attacks
    ]
    record = train(several(tmp_path, replicas=2, exchange={"patience_s": 600.0}), is_byzantine)
    assert ending(record).outcome == "finished" and blocks(record) == list(range(24))
    refused = facts(record, e.UpdateRejected)
    assert {(fact.round, fact.replica) for fact in refused} == {(0, 1), (1, 1)}, "a refusal by one stage is enough"
    assert all(("finite" if fact.round == 0 else "torch.float32 [") in fact.reason for fact in refused)
    together = {settle.round: len(settle.members) == 2 for settle in facts(record, d.Settle)}
    assert together == {0: False, 1: False, 2: True} and not facts(record, e.RoundWaitExpired)
    assert all(weight.isfinite().all() for weight in final_weights(record).values())
    reported = [str(line) for _, line in timed_lines(record) if "(invalid update: " in line.text]
    assert len(reported) == 2 and "replica 0 continued alone without replica 1" in reported[0]


def test_replicas_may_take_unequal_numbers_of_steps_between_rounds(tmp_path: Path) -> None:
    record = train(several(tmp_path, replicas=2, exchange={"steps_between_rounds": [2, 4], "patience_s": 60.0}))
    assert ending(record).outcome == "finished"
    made = defaultdict[int, int](int)
    for _, fact in record.history:
        if isinstance(fact, d.Commit):
            made[fact.replica] += 1
        elif isinstance(fact, d.BeginRound):
            assert made[1] == 2 * made[0], "each has made its own number of steps"
    assert facts(record, d.BeginRound) and blocks(record) == list(range(24))


@pytest.mark.slow
def test_without_replacement_a_replica_disbands_and_others_use_its_samples(tmp_path: Path) -> None:
    config = several(tmp_path, fleet={"spares": 0, "replace": False})
    record = train(config, [Fault(step=5, stage=3)])
    assert ending(record).outcome == "finished"
    (disband,) = facts(record, d.Disband)
    assert disband.replica == 1 and "no worker is left" in disband.reason
    assert blocks(record) == list(range(36))


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    whole = train(several(tmp_path / "whole", exchange={"options": {"bits": 8}}))
    short = several(tmp_path / "short", steps=6, exchange={"options": {"bits": 8}})
    train(short)
    record = resume(folder_of(short), train__steps="12")
    assert ending(record).outcome == "finished"
    one, other = final_weights(record), final_weights(whole)
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert blocks(record) == list(range(36))


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_replicas(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = several(tmp_path, replicas=2, steps=6)
    train(config)
    record = resume(folder_of(config), train__steps="10", exchange__replicas="3")
    assert ending(record).outcome == "finished"
    output = "of 2 replicas, now 3 replicas: they begin from the mean of weights and moments, and of the outer state"
    assert output in capfd.readouterr().out
    assert blocks(record) == list(range(12 + 12))


@pytest.mark.slow
def test_a_stage_lost_by_all_replicas_is_rolled_back(tmp_path: Path) -> None:
    saves = {"recovery": {"strategy": "checkpoint"}, "checkpoint": {"every": 3}}
    config = several(tmp_path, replicas=2, fleet={"spares": 2}, **saves)
    record = train(config, [Fault(step=7, stage=1), Fault(step=7, stage=3)])
    assert ending(record).outcome == "finished"


DECOUPLED = {"kind": "decoupled", "options": {"every": 8, "fragments": 2, "delay": 2}, "patience_s": 60.0}


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_decoupled_replica_that_lags_takes_part_and_holds_up_nobody(tmp_path: Path, killed: bool) -> None:
    """Replica 1 reads each batch 0.3 s late; its block stage may die too."""
    faults = [Fault(step=0, stage=2, signal="slow_data", strength=0.3)]
    faults += [Fault(step=4, stage=3)] if killed else []
    config = several(tmp_path, steps=40, exchange=DECOUPLED, fleet={"spares": 1})
    record = train(config, faults)
    assert ending(record).outcome == "finished"
    assert blocks(record) == list(range(120))
    steps = {n: sum(isinstance(fact, d.Commit) and fact.replica == n for _, fact in record.history) for n in range(3)}
    assert steps[1] < 0.7 * min(steps[0], steps[2])
    settled: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for fact in facts(record, d.Settle):
        settled[fact.round].add(tuple(fact.contributors or fact.members))
    assert all(len(of) == 1 for of in settled.values()), "replicas settled a round with different updates"
    assert any(1 in members for of in settled.values() for members in of)
    if killed:
        assert any(form.replica == 1 and form.outcome == "recovered" for form in facts(record, d.Form))


@pytest.mark.slow
def test_a_decoupled_replica_that_was_frozen_catches_up(tmp_path: Path) -> None:
    faults = [Fault(step=3, stage=2, signal="stop", resume_after_s=2.0)]
    config = several(tmp_path, steps=150, exchange=DECOUPLED, fleet={"missed_heartbeats": 40})
    record = train(config, faults)
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerLost)
    caught = [form for form in facts(record, d.Form) if any(isinstance(m.source, d.CatchUp) for m in form.members)]
    assert any(form.replica == 1 and form.step > 0 for form in caught)
    assert blocks(record) == list(range(450))
