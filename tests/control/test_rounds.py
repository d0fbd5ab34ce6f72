"""When replicas meet, with whom, and what becomes of a round in which somebody is missing."""

from __future__ import annotations

import pytest
from herd_steps import finished, herd, said, work_until

from planaria import decisions as d
from planaria import events as e
from planaria.events import Standing

STREAMING = {"kind": "streaming_diloco", "every": 3, "fragments": 1, "delay": 2}


@pytest.mark.parametrize("stop", [False, True])
def test_a_round_whose_settling_no_step_will_reach_is_settled_at_the_end(stop: bool) -> None:
    made = herd(2, exchange=STREAMING, steps=9 if stop else 3)
    work_until(made, lambda run: all(r.meeting for r in run.replicas.values()))
    if stop:
        made.stop()
    made.behave()
    assert made.truth.ending is not None
    assert [settle.members for settle in said(made, d.Settle)] == [[0, 1]]


def test_replicas_meet_before_they_are_validated_and_saved() -> None:
    """As with the engine of one process; also at the very end."""
    made = herd(2, "noloco", steps=4, eval_every=2, save_every=2)
    assert finished(made)
    assert said(made, d.Seal)[-1].standings == dict.fromkeys((0, 1), Standing(step=4, rounds=2, inner=0))
    settled = {f.round: n for n, f in enumerate(made.history) if isinstance(f, d.Settle)}
    for n, fact in enumerate(made.history):
        if isinstance(fact, d.RunStep) and fact.mode == "evaluate" and fact.step:
            assert n > settled[fact.step // 2 - 1]


def test_a_replica_that_was_disbanded_stays_so_though_an_edge_of_it_had_broken() -> None:
    made = herd(2, "noloco", steps=9, spares=0, replace=False)
    work_until(made, lambda run: all(r.phase == "run" for r in run.replicas.values()))
    made.break_edge(made.run.replicas[1].holders[1], 0)
    generation = made.run.replicas[1].generation
    made.lose(made.run.replicas[1].holders[3])
    made.happened(e.GraceExpired(replica=1, generation=generation))
    assert made.run.replicas[1].phase == "left"
    assert finished(made)
    assert len(said(made, d.Disband)) == 1
