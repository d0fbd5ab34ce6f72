"""Replicas that send corrupted updates, as a trace has them do: on processes as in one, and the effect on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault, Trace
from planaria.report.run.event_lines import timed_lines
from planaria.runtime.preparation.prepare import prepare
from support.live.harness import ending, facts, in_one_process, losses, mean_losses, reason, tiny, train

BYZANTINE = 1
"""the replica"""


def several(
    folder: Path, replicas: int, robust: str | dict[str, Any] = "", steps: int = 6, **exchange: Any
) -> RunConfig:
    """Replicas of two stages (with the ends), none of which is removed."""
    folder.mkdir(exist_ok=True)
    exchange = {"strikes": 0, **exchange} if robust else exchange
    return tiny(folder, stages=1, steps=steps, exchange={"replicas": replicas, "robust": robust, **exchange})


def is_byzantine(*planned: tuple[int, str, int], stages: Sequence[int] = (0, 1)) -> list[Fault]:
    """Return faults (first step, attack, first honest step) of the Byzantine replica's nodes at these stages."""
    return [
        Fault(step=step, stage=2 * BYZANTINE + stage, signal="corrupt_update", attack=attack, until=until)
        for step, attack, until in planned
        for stage in stages
    ]


def refusals(record: RunRecord) -> Counter[tuple[int, int, str]]:
    """Count (step, node that refuses, reason) of the Byzantine replica's gradients; no other is refused."""
    found = facts(record, e.UpdateRejected)
    assert {fact.replica for fact in found} <= {BYZANTINE}
    return Counter((fact.round, fact.node, fact.reason) for fact in found)


def test_a_robust_run_survives_corrupted_gradients(tmp_path: Path) -> None:
    """Reversed gradients, NaN, a wrong size and a wrong type."""
    faults = is_byzantine(
        (1, "own_flip", 2), (2, "nan", 3), (3, "wrong_size", 4), (4, "wrong_type", 5), (5, "sign_flip", 6)
    )
    robust = {"rule": "multikrum", "byzantine": 1, "strikes": 0}
    record = train(several(tmp_path, 5, robust), faults)
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerFailed)
    assert len(facts(record, d.Form)) == 1, "no worker and no edge was replaced"
    single = in_one_process(several(tmp_path / "inline", 5, robust), faults)
    assert losses(record) == losses(single), "to the last bit"
    assert len(losses(record)) == 6
    found = refusals(record)
    assert found == refusals(single)
    assert Counter(step for step, _, _ in found) == {2: 10, 3: 10, 4: 10}, "each node refuses, the sender too"
    reported = {step: why for step, node, why in found if node == 0}
    assert reported[2].endswith("not all of its numbers are finite")
    assert reported[3] == "its blocking part: torch.float32 [8351], not torch.float32 [8352]"
    assert reported[4] == "its blocking part: torch.uint8 [33408], not torch.float32 [8352]"
    counted = {(fact.round, fact.stage): fact.counted for fact in facts(record, e.UpdatesWeighted)}
    assert counted == {(fact.round, fact.stage): fact.counted for fact in facts(single, e.UpdatesWeighted)}
    rivals, others = (
        {(fact.round, fact.stage): fact.rivals for fact in facts(of, e.UpdatesWeighted) if fact.round < 5}
        for of in (record, single)
    )
    assert rivals == others, "in step 5 an attack that sees the others' gradients differs in one process"
    for stage in (0, 1):
        assert rivals[1, stage].keys() == {"krum", "geometric_median", "flag"}
        assert rivals[1, stage]["krum"] == {BYZANTINE: 0.0} and rivals[1, stage]["flag"][BYZANTINE] < 0.2
    assert counted.keys() == {(step, stage) for step in range(6) for stage in (0, 1)}
    for (step, _), of in counted.items():
        assert sum(of.values()) == pytest.approx(1.0) and of.get(BYZANTINE, 0.0) == (0.0 if step else of[BYZANTINE])
        assert (BYZANTINE in of) == (step not in (2, 3, 4)), "a refused update has no weight"
    injected = {(fault.node, fault.number) for fault in facts(record, e.FaultInjected)}
    assert injected == {(fault.stage, number) for number, fault in enumerate(faults)}
    lines = [str(line) for _, line in timed_lines(record) if "invalid update" in line.text]
    assert len(lines) == 6 and all("replica 1" in line for line in lines), "once for each stage and reason"


@pytest.mark.slow
def test_corrupted_gradients_harm_a_plain_mean_on_processes_as_in_one(tmp_path: Path) -> None:
    """Attacks that do not depend on others. In step 3 a node dies, so its corrupted updates are sent twice."""
    once = [Fault(step=3, stage=2 * BYZANTINE, signal="corrupt_update", attack="own_flip")]
    faults = [*is_byzantine((0, "stale", 2), (2, "random", 3), (4, "zero", 5)), *once]
    killed = Fault(step=3, stage=0, moment="backward", offset=0.99)
    record = train(several(tmp_path, 3), [*faults, killed])
    assert ending(record).outcome == "finished"
    assert sum(isinstance(fact, d.RunStep) and fact.step == 3 for _, fact in record.history) == 2, "it was dropped"
    assert losses(record) == losses(in_one_process(several(tmp_path / "inline", 3), faults)), "to the last bit"
    honest = losses(in_one_process(several(tmp_path / "honest", 3)))
    assert losses(record)[2] == pytest.approx(honest[2], abs=0.02), "stale gradients are nearly right"
    assert losses(record)[5] > honest[5] + 0.1


def test_a_plain_mean_names_the_sender_of_an_invalid_gradient(tmp_path: Path) -> None:
    for engine in (train, in_one_process):
        config = several(tmp_path / engine.__name__, 2)
        record = engine(config, is_byzantine((2, "wrong_size", 3), stages=[1]))
        assert ending(record).outcome == "failed" and len(losses(record)) == 2
        assert "stage 1 cannot be combined: the update of replica 1 is invalid: its blocking part: torch" in reason(
            record
        )
        assert "exchange.robust has rules that tolerate it" in reason(record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"), [("diloco", {"alpha": 0.3, "momentum": "heavy_ball"}), ("noloco", {})], ids=["all", "pairs"]
)
def test_a_corrupted_update_of_a_round_affects_all_its_members(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    chosen = {"kind": kind, "options": {"every": 3, **options}}
    record = train(several(tmp_path, 3, steps=9, **chosen), faults := is_byzantine((4, "own_flip", 8)))
    assert ending(record).outcome == "finished" and not facts(record, e.UpdateRejected) and not facts(record, d.Adopt)
    single = in_one_process(several(tmp_path / "inline", 3, steps=9, **chosen), faults)
    assert mean_losses(record) == pytest.approx(losses(single), abs=1e-12)
    honest = losses(in_one_process(several(tmp_path / "honest", 3, steps=9, **chosen)))
    assert all(losses(single)[step] == honest[step] for step in range(6)), "until the second round"
    assert losses(single)[6] > honest[6] + 0.1


def test_a_fault_without_receivers_is_refused_before_the_run(tmp_path: Path) -> None:
    trace = Trace(faults=tuple(is_byzantine((1, "zero", 3), stages=[1])))
    with pytest.raises(
        UserError, match="the trace: a fault 'corrupt_update' at stage 3, step 1: there is one replica, so no other"
    ):
        prepare(tiny(tmp_path, stages=3), trace=trace)
    with pytest.raises(UserError, match=r"exchange\.kind = 'local' exchanges no updates, .*remove the fault"):
        prepare(several(tmp_path, 3, kind="local"), trace=trace)
    with pytest.raises(UserError, match=r"exchange\.kind = 'eager' sends updates one round later, .*remove the fault"):
        prepare(several(tmp_path, 3, kind="eager"), trace=trace)
    assert prepare(several(tmp_path, 3), trace=trace).trace == trace


@pytest.mark.slow
def test_equivocation_is_detected_and_the_others_stay_equal(tmp_path: Path) -> None:
    """In steps 1, 2 and 3 the replica sends each other one another gradient; from then on it is left out."""
    robust = {"rule": "multikrum", "byzantine": 1, "strikes": 2}
    faults = is_byzantine((1, "equivocate", 4), stages=[1])
    record = train(several(tmp_path, 5, robust), faults)
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerFailed)
    assert len(facts(record, d.Form)) == 1, "no worker was replaced"
    assert [(found.step, found.byzantine) for found in facts(record, d.LeaveOut)] == [
        (1, [BYZANTINE]),
        (2, [BYZANTINE]),
    ]
    assert Counter(fact.step for fact in facts(record, d.RunStep)) == {0: 1, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    single = in_one_process(several(tmp_path / "inline", 5, robust), faults)
    assert losses(record) == losses(single), "to the last bit"
    assert refusals(record) == refusals(single)
    assert {step for step, _, why in refusals(record)} == {1, 2, 3, 4, 5}
    assert {why for _, _, why in refusals(record)} == {"it sent different updates to different members"}
    received = {(fact.step, fact.stage): set(fact.received.values()) for fact in facts(record, e.StageReady)}
    assert all(len(found) == 5 for found in received.values()), "all gradients differ"


@pytest.mark.slow
def test_a_replica_with_repeated_invalid_updates_is_left_out(tmp_path: Path) -> None:
    """Its gradients are NaN in steps 1 and 2; that of step 4 is valid, and ignored."""
    robust = {"rule": "multikrum", "byzantine": 1, "strikes": 2}
    faults = is_byzantine((1, "nan", 3), (4, "own_flip", 5))
    record = train(several(tmp_path, 5, robust), faults)
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerFailed) and not facts(record, d.LeaveOut)
    orders = {fact.step: fact.left_out for fact in facts(record, d.RunStep) if fact.mode == "train"}
    assert orders == {s: {} if s < 3 else {BYZANTINE: "its updates were invalid too often"} for s in range(6)}
    single = in_one_process(several(tmp_path / "inline", 5, robust), faults)
    assert losses(record) == losses(single), "to the last bit"
    assert refusals(record) == refusals(single)
    assert {step for step, _, _ in refusals(record)} == {1, 2, 3, 4, 5}
    counted = [fact for fact in facts(record, e.UpdatesWeighted) if fact.round >= 3]
    assert counted and all(BYZANTINE not in fact.counted for fact in counted)
    never = in_one_process(several(tmp_path / "never", 5, {**robust, "strikes": 0}), faults)
    assert {step for step, _, _ in refusals(never)} == {1, 2}


@pytest.mark.slow
def test_more_equivocation_than_the_rule_tolerates_ends_the_run(tmp_path: Path) -> None:
    faults = [Fault(step=1, stage=2 * r, signal="corrupt_update", attack="equivocate", until=3) for r in (1, 3)]
    for engine in (train, in_one_process):
        record = engine(several(tmp_path / engine.__name__, 5, "multikrum"), faults)
        assert ending(record).outcome == "failed" and len(losses(record)) == 1
        why = "it sent different updates to different members; "
        assert f"more replicas are Byzantine than exchange.robust tolerates (1): replica 1: {why}" in reason(record)
        assert "replica 3" in reason(record)


@pytest.mark.slow
def test_a_round_settles_without_a_replica_that_equivocates(tmp_path: Path) -> None:
    chosen = {"kind": "diloco", "options": {"every": 3, "alpha": 0.3, "momentum": "heavy_ball"}}
    faults = is_byzantine((4, "equivocate", 8), stages=[0])
    record = train(several(tmp_path, 3, steps=9, **chosen), faults)
    assert ending(record).outcome == "finished"
    settled = {fact.round: (fact.members, list(fact.left_out)) for fact in facts(record, d.Settle)}
    assert settled[0] == ([0, 1, 2], []) and settled[1] == ([0, 2], [BYZANTINE]), "the replica copies one of the others"
    assert [fact.replica for fact in facts(record, d.Adopt)] == [BYZANTINE]
    reported = [line.text for _, line in timed_lines(record) if line.text.startswith("round 1")]
    assert len(reported) == 1 and "it sent different updates to different members" in reported[0]
    single = in_one_process(several(tmp_path / "inline", 3, steps=9, **chosen), faults)
    same = {step: loss for step, loss in mean_losses(record).items() if step <= 6}  # then it depends on when it copies
    assert same == pytest.approx({step: losses(single)[step] for step in same}, abs=1e-12)
    assert {fact.replica for fact in facts(record, e.UpdateRejected)} == {BYZANTINE}
    assert {fact.replica for fact in facts(single, e.UpdateRejected)} == {BYZANTINE}


@pytest.mark.slow
def test_flipped_labels_change_the_losses_on_processes_as_in_one(tmp_path: Path) -> None:
    faults = is_byzantine((1, "label_flip", 4), stages=[0])
    record = train(several(tmp_path, 3), faults)
    single = in_one_process(several(tmp_path / "inline", 3), faults)
    assert losses(record) == losses(single), "to the last bit"
    honest, counts = losses(in_one_process(several(tmp_path / "honest", 3))), losses(single)
    assert counts[0] == honest[0] and counts[1] != honest[1] and counts[5] > honest[5]
    with pytest.raises(UserError, match=r"stage 3, step 1: only stage 0 has labels; use a node of stage 0, such as 2"):
        prepare(several(tmp_path, 3), trace=Trace(faults=tuple(is_byzantine((1, "label_flip", 4), stages=[1]))))
    with pytest.raises(UserError, match=r"exchange\.coded determines the messages of replicas"):
        coded = several(tmp_path, 3, coded="gc").model_copy(update={"pipeline": record.config.pipeline})
        prepare(coded, trace=Trace(faults=tuple(faults)))
