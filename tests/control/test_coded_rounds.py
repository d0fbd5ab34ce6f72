"""End of a coded step's round, by received results and by the clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planaria.config.schema import ExchangeConfig
from planaria.control.apply import apply
from planaria.control.decide import decide
from planaria.control.facts import events as e
from planaria.control.state.replica import WorkerSet
from planaria.control.state.run import RunState
from planaria.exchange.coded.coded_decisions import MIN_S, Stragglers, close_round
from planaria.exchange.coded.coded_facts import CloseRound, CodedStep, ResultsSent, RoundLate

MSGC = {"scheme": "msgc", "burst": 1, "window": 2, "stragglers": 1, "jobs": 2}
NODES = [[0, 2, 4, 6], [1, 3, 5, 7]]
"""of the ends and of stage 1: node 2r is replica r's ends"""


def working(coded: Any, step: int = 3) -> RunState:
    """Return four replicas of two stages in the first round of a step."""
    started = e.RunStarted(
        name="run", seed=1, stages=1, steps=9, first_step=0, samples_per_step=8, wall_time=0.0, routes=[[0, 1, 0]],
        exchange=ExchangeConfig(replicas=4, coded=coded), arrangement=NODES,
    )  # fmt: skip
    run = RunState.start(started)
    holders = {node: f"w{node}" for node in range(8)}
    links = dict.fromkeys(run.replicas[0].pairs_of(holders), "there")
    replica = replace(
        run.replicas[0], phase="run", step=step, generation=1, holders=holders, origins={},
        waiting=WorkerSet(holders.values()), coded=CodedStep(), links=links,
    )  # fmt: skip
    return replace(run, replicas=run.replicas.with_replica(replica))


def sent(run: RunState, *replicas: int, round: int = 0, stages: tuple[int, ...] = (0, 1), step: int = 3) -> RunState:
    for replica in replicas:
        for stage in stages:
            node = NODES[stage][replica]
            fact = ResultsSent(worker=f"w{node}", node=node, stage=stage, generation=1, step=step, round=round)
            run = apply(fact, run)
    return run


def counted(run: RunState) -> list[int] | None:
    decision = close_round(run, run.replicas[0])
    assert decision is None or decision == decide(run)
    return None if decision is None else decision.counted


def test_a_round_of_a_plain_code_ends_with_the_first_sufficient_results() -> None:
    run = working({"scheme": "gc", "stragglers": 1})  # chunks twice: at replicas 0 and 1, and at 2 and 3
    assert counted(run) is None
    assert counted(sent(run, 1)) is None
    assert counted(sent(run, 1, 0)) is None, "both from one half"
    assert counted(sent(run, 1, 2)) == [1, 2]
    assert counted(sent(sent(run, 1), 2, stages=(0,))) is None, "at every stage"
    assert counted(sent(run, 3, 1, 2)) == [1, 2, 3]


def test_a_sequential_code_waits_for_all_until_they_are_late() -> None:
    run = sent(working(MSGC), 0, 1, 3)
    assert counted(run) is None
    late = apply(RoundLate(replica=0, generation=1, step=3, round=0, fastest_s=1.0), run)
    assert counted(late) == [0, 1, 3]
    assert counted(sent(run, 2)) == [0, 1, 2, 3]


def test_stragglers_beyond_the_code_are_waited_for() -> None:
    run = apply(RoundLate(replica=0, generation=1, step=3, round=0, fastest_s=1.0), sent(working(MSGC), 0, 1, 3))
    run = apply(CloseRound(generation=1, step=3, round=0, counted=[0, 1, 3]), run)
    run = apply(RoundLate(replica=0, generation=1, step=3, round=1, fastest_s=1.0), sent(run, 0, 1, 3, round=1))
    assert counted(run) is None, "replica 2 has to make up for the first round in this one"
    assert counted(sent(run, 2, round=1)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "changed", [{"round": 1}, {"step": 2}, {"generation": 0}, {"worker": "w9"}], ids=lambda c: next(iter(c))
)
def test_results_of_another_round_change_nothing(changed: dict[str, Any]) -> None:
    run = working("gc")
    fact = {"worker": "w2", "node": 2, "stage": 0, "generation": 1, "step": 3, "round": 0}
    assert apply(ResultsSent.model_validate(fact | changed), run) == run


def test_no_round_closes_after_the_last_or_with_a_broken_edge() -> None:
    run = apply(CloseRound(generation=1, step=3, round=0, counted=[1, 2]), sent(working("gc"), 1, 2))
    assert run.replicas[0].coded == CodedStep((frozenset({1, 2}),))
    assert counted(run) is None
    run = sent(working("gc"), 1, 2)
    assert counted(run) == [1, 2]
    broken = replace(run.replicas[0], links={})
    assert counted(replace(run, replicas=run.replicas.with_replica(broken))) is None


def test_lateness_is_measured_from_the_fastest_replica() -> None:
    clock, run = Stragglers(), working(MSGC)
    clock.update(10.0, run)
    assert clock.due == []
    run = sent(run, 1)
    clock.update(12.0, run)  # the fastest took 2 s, and late is who takes twice as long
    assert clock.due == [14.0]
    clock.update(13.0, sent(run, 0))
    assert clock.due == [14.0]
    assert list(clock.late_rounds(13.9, lambda: run)) == []
    assert list(clock.late_rounds(14.0, lambda: run)) == [
        RoundLate(replica=0, generation=1, step=3, round=0, fastest_s=2.0)
    ]
    assert list(clock.late_rounds(15.0, lambda: run)) == [], "reported once"


def test_the_clock_restarts_with_every_round() -> None:
    clock, run = Stragglers(), sent(working(MSGC), 1)
    clock.update(10.0, run)
    assert clock.due == [10.0 + MIN_S], "less than a report's latency is no delay"
    run = apply(CloseRound(generation=1, step=3, round=0, counted=[0, 1, 2, 3]), run)
    assert list(clock.late_rounds(11.0, lambda: run)) == [], "that round is over"
    clock.update(11.0, run)
    assert clock.due == []
    idle = replace(run.replicas[0], phase="idle")
    clock.update(12.0, replace(run, replicas=run.replicas.with_replica(idle)))
    assert clock.due == []
