"""Workers of coded replicas that freeze or die between the rounds of a step: no sum is wrong, and no sample is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from harness import LiveWorkers, ending, facts, losses, outcomes, train
from test_coded_steps import REPLICAS, STEPS, coded, counted, inline_losses

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.exchange.coded.facts import CloseRound

GC = {"scheme": "gc", "stragglers": 1, "jobs": 6}
MSGC = {"scheme": "msgc", "burst": 3, "window": 4, "stragglers": REPLICAS, "jobs": 2}
"""a replica may be late in three rounds in a row"""
FROZEN, KILLED = 3, 5
"""nodes: stage 1 of replicas 1 and 2"""


class Blows:
    """Freezes a worker between two rounds, until some decision; then, if it is to, kills another in the last step."""

    def __init__(self, until: Callable[[d.Decision], bool], kills: bool, repeats: bool) -> None:
        """``repeats``: who is late has to make up for it, so the first round must not be lost too."""
        self._until, self._kills, self._repeats = until, kills, repeats
        self.step, self._pid = -1, 0
        """in which the worker froze; -1: it has not yet"""
        self._thawed = False

    def __call__(self, decision: d.Decision, workers: LiveWorkers) -> None:
        if self.step < 0:
            if _closes(decision, 0) and decision.step and (1 in decision.counted or not self._repeats):
                self.step, self._pid = decision.step, workers.signal(signal.SIGSTOP, FROZEN)
        elif not self._thawed:
            if self._until(decision):
                os.kill(self._pid, signal.SIGCONT)
                self._thawed = True
        elif self._kills and _closes(decision, 1) and decision.step == STEPS - 1:
            workers.signal(signal.SIGKILL, KILLED)
            self._kills = False


def _closes(decision: d.Decision, round: int) -> TypeGuard[CloseRound]:
    return isinstance(decision, CloseRound) and decision.round == round


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("said", [GC, MSGC], ids=["gc", "msgc"])
def test_a_freeze_of_three_rounds_and_a_death_between_two(said: dict[str, Any], tmp_path: Path) -> None:
    blows = Blows(lambda x: _closes(x, 3), True, said is MSGC)
    config = coded(tmp_path, said)
    record = train(config, hook=blows)
    rounds = counted(record)
    assert all(1 not in there for there in rounds[blows.step][1:4]), "three rounds ended without it"
    if said is MSGC:
        assert sum(1 in there for there in rounds[blows.step][4:]) >= 3, "what it then made up for is in the sum"
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    assert len(facts(record, e.WorkerLost)) == 1, "who froze for a moment is not lost"
    blocks = [order.block for order in facts(record, d.RunStep) if order.mode == "train" and order.step == STEPS - 1]
    assert len(blocks) == 2 and len(set(blocks)) == 1, "the step was done again, with the same samples"
    assert losses(record) == inline_losses(config, rounds)
    assert losses(record) == pytest.approx(inline_losses(coded(tmp_path, "")), rel=1e-5)


@pytest.mark.slow  # the same with one replica: tests/runtime/fleet/test_silence.py
def test_one_that_wakes_up_after_it_was_replaced_says_nothing_that_counts(tmp_path: Path) -> None:
    config = coded(tmp_path, MSGC, fleet={"missed": 6})
    record = train(config, hook=Blows(lambda x: isinstance(x, d.Form), False, True))
    assert [lost.cause for lost in facts(record, e.WorkerLost)] == ["heartbeat"]
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    assert len(facts(record, e.ZombieIgnored)) == 1
    assert losses(record) == inline_losses(config, counted(record))
