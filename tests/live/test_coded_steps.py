"""Replicas as processes that code their gradients: same losses as inline, also when they freeze or die mid-step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planaria
from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.exchange.coded.coded_facts import CloseRound
from planaria.exchange.coded.coding import make_coding
from planaria.faults.trace import Fault
from planaria.lab.reference.engine import ReferenceEngine
from planaria.runtime.preparation.config_checks import check
from support.live.harness import LiveWorkers, ending, facts, losses, outcomes, tiny, train
from support.observer import train_inline
from support.schedules import on_schedule, shape

REPLICAS, STEPS = 4, 6
GC = {"scheme": "gc", "stragglers": 2}
SRSGC = {"scheme": "srsgc", "burst": 1, "window": 2, "stragglers": 1, "jobs": 2}
MSGC = {"scheme": "msgc", "burst": 1, "window": 2, "stragglers": 1, "jobs": 2}
SLOW = Fault(step=2, stage=1, signal="slow", strength=300, resume_after_s=3.0)


def coded(folder: Path, spec: str | dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """Four replicas of two stages each (with the ends); node 2r is replica r's ends."""
    exchange = {"replicas": REPLICAS, "coded": spec}
    plain: dict[str, dict[str, Any]] = {"exchange": exchange, "pipeline": {"microbatches": 6}}
    return tiny(folder, stages=1, steps=STEPS, **plain | sections)


def counted(record: RunRecord) -> dict[int, list[frozenset[int]]]:
    """Return step → replicas that counted in each of its rounds, the last time that it was made."""
    found: dict[int, list[frozenset[int]]] = {}
    for fact in facts(record, CloseRound):
        if fact.round == 0:
            found[fact.step] = []
        found[fact.step].append(frozenset(fact.counted))
    return found


def inline_losses(config: RunConfig, rounds: dict[int, list[frozenset[int]]] | None = None) -> dict[int, float]:
    """Return the losses of one process in which the same replicas' results count in each round."""
    engine = ReferenceEngine(config, *planaria.streams(config))
    if rounds is not None:
        engine.rounds.counts = lambda step, so_far: rounds[step][len(so_far)]
    return {step: engine.train_step().loss for step in range(STEPS)}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("spec", ["gc", GC, SRSGC, MSGC], ids=["repeated", "gc", "srsgc", "msgc"])
def test_the_fleet_is_inline_to_the_last_bit(spec: str | dict[str, Any], tmp_path: Path) -> None:
    config = coded(tmp_path, spec)
    record = train(config, [SLOW, Fault(step=4, stage=6, moment="forward")])
    rounds, coding = counted(record), make_coding(config.exchange)
    assert {step: len(reported) for step, reported in rounds.items()} == dict.fromkeys(range(STEPS), coding.rounds)
    assert {f.signal for f in facts(record, e.FaultInjected)} == {"slow", "SIGKILL"}
    assert any(len(there) < REPLICAS for there in rounds[2]), "the slow replica was waited for"
    assert losses(record) == inline_losses(config, rounds)


@pytest.mark.slow
def test_the_gradient_is_that_of_all_replicas_whichever_is_late(tmp_path: Path) -> None:
    """Compare with no code; and, with repeated chunks, to the last bit for every set of replicas that suffices."""
    plain = inline_losses(coded(tmp_path, ""))
    config = coded(tmp_path, "gc")
    coding = make_coding(config.exchange)
    sets = [frozenset({0, 1, 2, 3}), frozenset({1, 2}), frozenset({0, 3}), frozenset({1, 3}), frozenset({0, 1, 2})]
    assert all(coding.may_close((), there, late=True) for there in sets)
    each = [inline_losses(config, {step: [there] for step in range(STEPS)}) for there in sets]
    assert all(found == each[0] for found in each)
    for spec in ("none", GC, SRSGC, MSGC):
        each.append(inline_losses(coded(tmp_path, spec)))
    assert all(found == pytest.approx(plain, rel=1e-5) for found in each)


def test_a_trace_names_late_replicas_in_one_process(tmp_path: Path) -> None:
    config = coded(tmp_path, MSGC)
    record = train(config, [SLOW], engine=train_inline)
    rounds, all_ = counted(record), frozenset(range(REPLICAS))
    assert rounds[2][0] == all_ - {0}, "it was waited for"
    assert {*rounds[3]} == {all_}
    assert losses(record) == inline_losses(config, rounds)


def test_a_schedule_is_for_one_replica(tmp_path: Path) -> None:
    config = on_schedule(tiny(tmp_path, **shape(0.5)), tmp_path)
    together = config.model_copy(update={"exchange": ExchangeConfig(replicas=3, coded="gc")})
    match = r"routing\.schedule: a schedule is for one replica; remove exchange\.replicas"
    with pytest.raises(UserError, match=match):
        check(together)


# ---- workers that freeze or die between the rounds of a step

FROZEN, KILLED = 3, 5
"""nodes: stage 1 of replicas 1 and 2"""
GC_OF_SIX = {"scheme": "gc", "stragglers": 1, "jobs": 6}
LONG_BURST = {"scheme": "msgc", "burst": 3, "window": 4, "stragglers": REPLICAS, "jobs": 2}
"""a replica may be late in three rounds in a row"""


class Strikes:
    """Freezes a worker between two rounds until some decision; then, if ``kills``, kills another in the last step."""

    def __init__(self, until: Callable[[d.Decision], bool], kills: bool, repeats: bool) -> None:
        """``repeats``: a late replica repeats its work, so the first round must not be lost too."""
        self._until, self._kills, self._repeats = until, kills, repeats
        self.step, self._pid = -1, 0
        """in which the worker froze; -1: it has not yet"""
        self._thawed = False

    def __call__(self, decision: d.Decision, workers: LiveWorkers) -> None:
        if self.step < 0:
            if closes(decision, 0) and decision.step and (1 in decision.counted or not self._repeats):
                self.step, self._pid = decision.step, workers.signal(signal.SIGSTOP, FROZEN)
        elif not self._thawed:
            if self._until(decision):
                os.kill(self._pid, signal.SIGCONT)
                self._thawed = True
        elif self._kills and closes(decision, 1) and decision.step == STEPS - 1:
            workers.signal(signal.SIGKILL, KILLED)
            self._kills = False


def closes(decision: d.Decision, round: int) -> bool:
    return isinstance(decision, CloseRound) and decision.round == round


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("spec", [GC_OF_SIX, LONG_BURST], ids=["gc", "msgc"])
def test_a_freeze_of_three_rounds_and_a_death_between_two(spec: dict[str, Any], tmp_path: Path) -> None:
    strikes = Strikes(lambda decision: closes(decision, 3), True, spec is LONG_BURST)
    config = coded(tmp_path, spec)
    record = train(config, hook=strikes)
    rounds = counted(record)
    assert all(1 not in there for there in rounds[strikes.step][1:4]), "three rounds ended without it"
    if spec is LONG_BURST:
        assert sum(1 in there for there in rounds[strikes.step][4:]) >= 3, "its repeated work is in the sum"
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    assert len(facts(record, e.WorkerLost)) == 1, "a short freeze loses no worker"
    blocks = [order.block for order in facts(record, d.RunStep) if order.mode == "train" and order.step == STEPS - 1]
    assert len(blocks) == 2 and len(set(blocks)) == 1, "the step was repeated with the same samples"
    assert losses(record) == inline_losses(config, rounds)
    assert losses(record) == pytest.approx(inline_losses(coded(tmp_path, "")), rel=1e-5)


@pytest.mark.slow  # the same with one replica: tests/live/test_heartbeats.py
def test_messages_of_a_replaced_worker_that_wakes_up_do_not_count(tmp_path: Path) -> None:
    config = coded(tmp_path, LONG_BURST, fleet={"missed_heartbeats": 6})
    record = train(config, hook=Strikes(lambda decision: isinstance(decision, d.Form), False, True))
    assert [lost.cause for lost in facts(record, e.WorkerLost)] == ["heartbeat"]
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    assert len(facts(record, e.ZombieIgnored)) == 1
    assert losses(record) == inline_losses(config, counted(record))
