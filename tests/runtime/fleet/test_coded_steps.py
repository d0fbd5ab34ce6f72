"""Replicas as processes that code their gradients: they learn what inline learns from the same replicas' results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import facts, losses, tiny, train

from observer import train_inline
from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control import events as e
from planaria.control.logs import RunRecord
from planaria.data.shards import prepare
from planaria.exchange.coded.coding import coding_of
from planaria.exchange.coded.facts import CloseRound
from planaria.faults.trace import Fault
from planaria.lab.inline.engine import InlineEngine
from planaria.runtime.engine.check import check
from planaria.runtime.engine.prepare import streams
from schedules import on_schedule, shape

REPLICAS, STEPS = 4, 6
GC = {"scheme": "gc", "stragglers": 2}
SRSGC = {"scheme": "srsgc", "burst": 1, "window": 2, "stragglers": 1, "jobs": 2}
MSGC = {"scheme": "msgc", "burst": 1, "window": 2, "stragglers": 1, "jobs": 2}
SLOW = Fault(step=2, stage=1, signal="slow", strength=300, resume_after_s=3.0)


def coded(folder: Path, said: str | dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """Four replicas of two stages each (with the ends); node 2r is replica r's ends."""
    exchange = {"replicas": REPLICAS, "coded": said}
    plain: dict[str, dict[str, Any]] = {"exchange": exchange, "pipeline": {"microbatches": 6}}
    return tiny(folder, stages=1, steps=STEPS, **plain | sections)


def counted(record: RunRecord) -> dict[int, list[frozenset[int]]]:
    """Step → who counted in its rounds, the last time that it was made."""
    found: dict[int, list[frozenset[int]]] = {}
    for fact in (fact for _, fact in record.history if isinstance(fact, CloseRound)):
        if fact.round == 0:
            found[fact.step] = []
        found[fact.step].append(frozenset(fact.counted))
    return found


def inline_losses(config: RunConfig, rounds: dict[int, list[frozenset[int]]] | None = None) -> dict[int, float]:
    """What one process learns if those replicas' results count whose results counted in a run."""
    engine = InlineEngine(config, *streams(config, prepare(config.data, config.model.vocab)))
    if rounds is not None:
        assert engine.rounds is not None
        engine.rounds.counts = lambda step, so_far: rounds[step][len(so_far)]
    return {step: engine.train_step().loss for step in range(STEPS)}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("said", ["gc", GC, SRSGC, MSGC], ids=["repeated", "gc", "srsgc", "msgc"])
def test_fleet_is_inline_to_the_last_bit_at_equal_replicas(said: str | dict[str, Any], tmp_path: Path) -> None:
    config = coded(tmp_path, said)
    struck = [SLOW, Fault(step=4, stage=6, moment="forward")]
    record = train(config, struck)
    rounds, coding = counted(record), coding_of(config.exchange)
    assert coding is not None
    assert {step: len(told) for step, told in rounds.items()} == dict.fromkeys(range(STEPS), coding.rounds)
    assert {f.signal for f in facts(record, e.FaultInjected)} == {"slow", "SIGKILL"}
    assert any(len(there) < REPLICAS for there in rounds[2]), "the slow replica was waited for"
    assert losses(record) == inline_losses(config, rounds)


@pytest.mark.slow
def test_whoever_is_late_the_gradient_is_that_of_all(tmp_path: Path) -> None:
    """Without a code; and with repeated chunks, to the last bit for every set of replicas that can be done without."""
    plain = inline_losses(coded(tmp_path, ""))
    config = coded(tmp_path, "gc")
    coding = coding_of(config.exchange)
    assert coding is not None
    sets = [frozenset({0, 1, 2, 3}), frozenset({1, 2}), frozenset({0, 3}), frozenset({1, 3}), frozenset({0, 1, 2})]
    assert all(coding.may_close((), there, late=True) for there in sets)
    each = [inline_losses(config, {step: [there] for step in range(STEPS)}) for there in sets]
    assert all(found == each[0] for found in each)
    for said in ("none", GC, SRSGC, MSGC):
        each.append(inline_losses(coded(tmp_path, said)))
    assert all(found == pytest.approx(plain, rel=1e-5) for found in each)


def test_a_trace_says_who_is_late_in_one_process(tmp_path: Path) -> None:
    config = coded(tmp_path, MSGC)
    record = train(config, [SLOW], engine=train_inline)
    rounds, all_ = counted(record), frozenset(range(REPLICAS))
    assert rounds[2][0] == all_ - {0}, "it was waited for"
    assert {*rounds[3]} == {all_}
    assert losses(record) == inline_losses(config, rounds)


def test_a_schedule_is_for_one_replica_coded_or_not(tmp_path: Path) -> None:
    config = on_schedule(tiny(tmp_path, **shape(0.5)), tmp_path)
    together = config.model_copy(update={"exchange": ExchangeConfig(replicas=3, coded="gc")})
    with pytest.raises(
        UserError, match=r"routing\.schedule: a schedule is for one replica; leave exchange\.replicas out"
    ):
        check(together)
