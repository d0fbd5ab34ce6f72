"""Runs of processes that lose workers, repeated in one process in the order of their log: the same losses, bit for
bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from planaria.cli.commands.check import repeat_training
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault, Trace, write
from planaria.runtime.engine.repetition import Repetition, repeat_run
from planaria.runtime.preparation.run_folders import TRACE
from support.live.harness import ending, facts, in_one_process, outcomes, rebuilt, resume, tiny, train

HEAVY = {"alpha": 0.3, "momentum": "heavy_ball"}
EXCHANGES: dict[str, dict[str, Any]] = {
    "noloco": {},
    "diloco": {"options": HEAVY},
    "pair_mean": {},
    "gasloc": {"options": {"alpha": 0.3, "beta": 0.7, "gamma": 0.7}},
    "streaming_diloco": {"options": {"fragments": 2, "delay": 1, **HEAVY}},
    "decoupled": {"options": {"fragments": 2, "delay": 1, "min_due": 3}},
    "decoupled, alone": {"options": {"fragments": 2, "delay": 1}},
    "eager": {"options": HEAVY},
    "monna": {"options": {"alpha": 0.5}},
    "noloco, 8 bits": {"options": {"bits": 8}},
    "diloco, topk2": {"compress": "decayed:topk2", "options": {"alpha": 0.0, "aggregator": "clipped_senders"}},
    "diloco, clipping": {"robust": "clipping", "options": HEAVY},
    "local": {},
}
"""kind, and what distinguishes it → the section ``exchange``"""


def several(folder: Path, name: str, **sections: dict[str, Any]) -> RunConfig:
    """Three replicas of two stages each (with the ends) that meet every four steps."""
    exchange: dict[str, Any] = {"replicas": 3, "kind": name.split(",")[0], **EXCHANGES[name]}
    if exchange["kind"] != "local":
        exchange["options"] = {"every": 4, **exchange.get("options", {})}
    return tiny(folder, stages=1, steps=12, exchange=exchange | sections.pop("exchange", {}), **sections)


def repeat(record: RunRecord, scratch: Path) -> Repetition:
    return repeat_run(record.config, record.history, record.folder, scratch)


def assert_repeated(record: RunRecord, scratch: Path) -> None:
    """Check that all losses and gradient norms of a run are repeated."""
    repeated = repeat(record, scratch)
    assert repeated.differing == [] and repeated.compared == len(facts(record, e.StageReady))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_fleet_with_a_killed_worker_trains_as_inline(tmp_path: Path, name: str) -> None:
    """The replacement copies a stage of a replica that may be several steps ahead or behind."""
    record = train(several(tmp_path, name), [Fault(step=6, stage=3)])
    assert ending(record).outcome == "finished"
    assert "recovered" in outcomes(record) and any(member.node == 3 for member in rebuilt(record))
    assert_repeated(record, tmp_path / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noloco", "diloco", "streaming_diloco", "decoupled, alone", "eager"])
def test_workers_killed_together_and_in_every_phase_are_repeated(tmp_path: Path, name: str) -> None:
    """Kills of a donor while it sends a state, of a whole replica, in a commit and in a round; one worker freezes.

    Together they may destroy all copies of a stage, which ends the run early.
    """
    kills = [(2, 1, "any"), (2, 3, "transfer"), (4, 5, "settle"), (6, 2, "commit"), (9, 4, "any"), (9, 5, "any")]
    faults = [Fault(step=step, stage=node, moment=moment) for step, node, moment in kills]  # type: ignore[arg-type]
    faults.append(Fault(step=10, stage=0, signal="stop"))
    fleet = {"spares": 2, "missed_heartbeats": 8}
    record = train(several(tmp_path, name, fleet=fleet, exchange={"patience_s": 1.0}), faults)
    assert len(facts(record, e.WorkerLost)) >= 2, "a kill waits for its moment, which may not come"
    assert_repeated(record, tmp_path / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"recovery": {"strategy": "checkfree, checkpoint"}, "checkpoint": {"every": 4, "background": True}},
        {"recovery": {"strategy": "redundant"}},
        {"exchange": {"replicas": 2, "kind": "allreduce", "compress": "ef14:4bits"}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_other_runs_are_repeated(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Strategies of a single replica, with a rollback to a checkpoint, and gradients within each step."""
    config = tiny(tmp_path, stages=2, steps=8, train={"steps": 8, "eval_every": 4}, fleet={"spares": 2}, **sections)
    record = train(config, [Fault(step=3, stage=1), Fault(step=6, stage=2)])
    assert ending(record).outcome == "finished"
    assert_repeated(record, tmp_path / "scratch")
    assert "bit for bit" in repeat_training(record.folder)


@pytest.mark.slow
def test_all_parts_of_a_resumed_run_are_repeated(tmp_path: Path) -> None:
    """The checkpoint from which the second part started was removed; its own repetition starts from the first's."""
    config = several(tmp_path, "noloco", train={"steps": 6}, checkpoint={"every": 0, "keep": 1})
    record = train(config, [Fault(step=3, stage=1)])
    record = resume(record.folder, train__steps="10")
    record = resume(record.folder, train__steps="12")
    assert len(list((record.folder / "checkpoints").iterdir())) == 1
    repeated = repeat(record, tmp_path / "scratch")
    assert (repeated.differing, repeated.not_covered) == ([], []) and repeated.compared == 2 * 3 * 12
    assert "72 losses and gradient norms of steps 0–5, 6–9, 10–11 were" in repeat_training(record.folder)


def test_parts_that_are_not_covered_are_named(tmp_path: Path) -> None:
    record = in_one_process(several(tmp_path, "noloco", train={"steps": 4}), [])
    record = resume(record.folder, train__steps="6", optim__lr="0.001")
    what = "part from step 0: 18 of 24 results differ, as they do if the run was resumed with other settings"
    assert repeat(record, tmp_path / "scratch").not_covered == [what]
    covered = repeat_training(record.folder)
    assert covered == f"12 losses and gradient norms of steps 4–5 were reproduced bit for bit; not covered: {what}"


def test_a_last_part_does_not_begin_from_another_repetitions_weights(tmp_path: Path) -> None:
    record = in_one_process(several(tmp_path, "noloco", train={"steps": 4}), [])
    record = resume(record.folder, train__steps="6", optim__lr="0.001")
    (name,) = set(facts(record, e.RunStarted)[-1].checkpoint_of_stage.values())
    shutil.rmtree(record.folder / "checkpoints" / name)
    with pytest.raises(UserError, match=rf"its last part cannot be repeated: .*/{name}, .* was removed"):
        repeat(record, tmp_path / "scratch")


def test_a_log_names_no_folder_outside_its_run(tmp_path: Path) -> None:
    record = in_one_process(several(tmp_path, "noloco", train={"steps": 4}), [])
    record = resume(record.folder, train__steps="6")
    (victim := tmp_path / "victim").mkdir()
    at = max(n for n, (_, fact) in enumerate(record.history) if isinstance(fact, e.RunStarted))
    history = list(record.history)
    t, started = history[at]
    assert isinstance(started, e.RunStarted)
    names = dict.fromkeys(started.checkpoint_of_stage, str(victim))
    history[at] = (t, started.model_copy(update={"checkpoint_of_stage": names}))
    with pytest.raises(UserError, match="victim', which is not in checkpoints/; restore the log"):
        repeat_run(record.config, history, record.folder, tmp_path / "scratch")
    assert victim.is_dir() and not victim.is_symlink()


def test_another_loss_and_a_log_without_a_decision_are_found(tmp_path: Path) -> None:
    record = in_one_process(several(tmp_path, "noloco"), [Fault(step=6, stage=3)])
    assert_repeated(record, tmp_path / "same")
    assert "72 losses" in repeat_training(record.folder)
    history = list(record.history)
    at = next(n for n, (_, fact) in enumerate(history) if isinstance(fact, e.StageReady) and fact.loss is not None)
    t, ready = history[at]
    assert isinstance(ready, e.StageReady)
    changed = [*history[:at], (t, ready.model_copy(update={"loss": 1.0})), *history[at + 1 :]]
    (differing,) = repeat_run(record.config, changed, record.folder, tmp_path / "changed").differing
    assert differing.startswith("replica ") and "(1.0, " in differing
    round = next(n for n, (_, fact) in enumerate(history) if isinstance(fact, d.Settle))
    without = [*history[:round], *history[round + 1 :]]
    assert repeat_run(record.config, without, record.folder, tmp_path / "without").differing
    other = several(tmp_path, "noloco").model_copy(update={"seed": 2})
    assert repeat_run(other, history, record.folder, tmp_path / "other").differing


@pytest.mark.parametrize("name", ["noloco", "diloco, clipping"])
def test_corrupt_updates_of_the_trace_are_repeated(tmp_path: Path, name: str) -> None:
    faults = [Fault(step=2, stage=3, signal="corrupt_update", until=7), Fault(step=5, stage=1)]
    write(Trace(faults=tuple(faults)), tmp_path / "trace.json")
    record = in_one_process(several(tmp_path, name, chaos={"trace": str(tmp_path / "trace.json")}), faults)
    with pytest.raises(UserError, match=r"part from step 0: .* 'corrupt_update' that its trace\.json lacks"):
        repeat(record, tmp_path / "without")
    write(Trace(faults=tuple(faults)), record.folder / TRACE)
    assert any(fault.signal == "corrupt_update" for fault in facts(record, e.FaultInjected))
    assert_repeated(record, tmp_path / "scratch")


def test_a_difference_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = in_one_process(several(tmp_path, "noloco"))
    monkeypatch.setattr(
        "planaria.runtime.engine.repetition.repeat_run",
        lambda *_: Repetition(compared=3, differing=["replica 0, stage 1, step 2: …"]),
    )
    with pytest.raises(RunStopped, match="1 of 3 results differ: replica 0"):
        repeat_training(record.folder)
