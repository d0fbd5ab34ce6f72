"""Machines that come and go under one controller, one story after the other."""

from __future__ import annotations

from typing import Any

from herd_steps import finished, said, started, work_until
from open_herd import OpenHerd

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.staffing import MAX_STILLBORN, lacking
from planaria.control.state import RunState


def open_herd(replicas: int, kind: str = "local", stages: int = 1, **changed: Any) -> OpenHerd:
    """A run that machines may join, with no spare at home."""
    exchange = {"kind": kind, "options": {} if kind == "local" else {"every": 2}}
    return OpenHerd(started(replicas, stages, exchange, **({"spares": 0} | changed)))


def joined(made: OpenHerd, room: int) -> str:
    """A machine joins a run that moves; its name, once all its workers are ready."""
    work_until(made, moving)
    host = made.join(room)
    work_until(made, lambda run: all(made.alive[worker].joined for worker in made.workers_of(host)))
    return host


def moving(run: RunState) -> bool:
    """Has every replica committed a step?"""
    return all(replica.step for replica in run.live.values())


def handing(made: OpenHerd, node: int) -> str:
    """The worker at a node is to leave; once its stage is being handed over: who it is."""
    old = made.run.holders[node]
    made.drain(old)
    work_until(made, lambda run: old not in run.holders.values())
    return old


def test_a_worker_that_is_to_leave_hands_its_stage_over_as_it_is() -> None:
    made = open_herd(2, stages=2)
    joined(made, 1)
    old = handing(made, 2)
    form = said(made, d.Form)[-1]
    assert form.outcome == "handed over" and form.replica == 0
    assert [m.source for m in form.members if m.node == 2] == [d.Handover(worker=old)]
    content = made.alive[old].content
    work_until(made, lambda run: run.replicas[0].phase != "link")
    assert made.alive[made.run.holders[2]].content == content and content.blocks
    assert [release.worker for release in said(made, d.Release)] == [old]
    assert finished(made)


def test_who_is_to_leave_before_it_stands_anywhere_is_let_go() -> None:
    made = open_herd(2)
    made.join(2)
    work_until(made, lambda run: run.workers["w5"].status == "spare")
    made.leave("g1")
    made.behave()
    assert {release.worker for release in said(made, d.Release)} == {"w4", "w5"}


def test_a_successor_that_dies_is_followed_by_another_that_gets_the_very_same() -> None:
    """The first data node's stage can be made up of no other: the replica was lost."""
    made = open_herd(2)
    joined(made, 2)
    old = handing(made, 0)
    made.lose(made.run.holders[0])
    assert [m.source for m in said(made, d.Form)[-1].members if m.node == 0] == [d.Handover(worker=old)]
    assert finished(made)
    assert not said(made, d.Disband)


def test_who_was_to_leave_stands_there_again_if_its_successor_dies_and_there_is_no_other() -> None:
    made = open_herd(1, replace=False)
    joined(made, 1)
    old = handing(made, 0)
    made.lose(made.run.holders[0])
    assert made.run.holders[0] == old
    assert finished(made)


def test_a_stage_that_cannot_be_handed_over_because_the_way_is_broken_is_had_elsewhere() -> None:
    made = open_herd(2)
    joined(made, 1)
    handing(made, 1)
    new = made.run.holders[1]
    work_until(made, lambda run: made.alive[new].forming, without=[0])
    made.break_edge(new, 0)
    made.expire_grace(1)
    sources = [m.source for m in said(made, d.Form)[-1].members if m.node == 1]
    assert [source.origin for source in sources] == ["rebuild"]
    assert finished(made)


def test_all_of_a_replica_may_be_handed_over_at_once_though_one_of_them_dies() -> None:
    made = open_herd(2, stages=2)
    joined(made, 4)
    for worker in [made.run.holders[node] for node in (0, 2, 4)]:
        made.drain(worker)
    work_until(made, lambda run: bool(run.replicas[0].leavers))
    old = dict(made.run.replicas[0].leavers)
    assert old.keys() == {0, 2, 4}
    made.lose(old[2])
    origins = {m.node: m.source.origin for m in said(made, d.Form)[-1].members}
    assert origins == {0: "handover", 2: "rebuild", 4: "handover"}
    assert finished(made)
    assert not said(made, d.Disband)


def test_who_lends_its_stage_is_not_let_go_before_that_has_come() -> None:
    made = open_herd(2, stages=2, steps=6)
    joined(made, 3)
    made.lose(made.run.holders[4])
    work_until(made, lambda run: bool(run.replicas[0].lenders))
    lender = made.run.holders[5]
    assert lender in made.run.replicas[0].lenders.values()
    made.drain(lender)
    work_until(made, lambda run: run.holders[5] != lender and not run.replicas[1].leavers, without=[0])
    assert not said(made, d.Release)
    assert finished(made)
    assert [release.worker for release in said(made, d.Release)] == [lender]


def test_a_replica_is_founded_when_a_machine_joins() -> None:
    made = open_herd(2, more=1, steps=30, kind="diloco")
    joined(made, 2)
    work_until(made, lambda run: 2 in run.live and run.replicas[2].step > run.replicas[2].formed >= 0)
    assert [found.replica for found in said(made, d.Found)] == [2]
    assert {made.alive[w].host for w in made.run.replicas[2].holders.values()} == {"g1"}
    assert finished(made)


def test_it_disbands_when_the_machine_leaves_and_nobody_can_take_over() -> None:
    """What it has trained counts; its samples are not used again."""
    made = open_herd(2, more=1, steps=30, kind="noloco")
    host = joined(made, 2)
    work_until(made, lambda run: 2 in run.live and run.replicas[2].step > run.replicas[2].formed >= 0)
    made.leave(host)
    work_until(made, lambda run: 2 not in run.live)
    work_until(made, lambda run: not made.workers_of(host))
    assert made.truth.ledger[2]
    assert finished(made)


def test_the_last_replica_stays_though_its_machine_is_to_go() -> None:
    made = open_herd(1, replace=False, steps=6)
    host = joined(made, 1)
    handing(made, 0)
    work_until(made, lambda run: run.replicas[0].phase == "run")
    made.leave(host)
    last = made.workers_of(host)
    assert last == [made.run.holders[0]]
    assert finished(made)
    assert last[0] not in [release.worker for release in said(made, d.Release)]


def test_a_machine_on_which_workers_die_at_birth_is_turned_away() -> None:
    made = open_herd(2)
    host = made.join(1)
    for _ in range(MAX_STILLBORN):
        made.lose(*made.workers_of(host))
    assert [away.host for away in said(made, d.TurnAway)] == [host]
    assert not made.workers_of(host)
    assert finished(made)


def test_a_machine_on_which_a_worker_fails_is_turned_away_and_the_run_goes_on() -> None:
    made = open_herd(2)
    joined(made, 1)
    handing(made, 1)
    work_until(made, lambda run: run.replicas[1].phase == "run")
    made.fail(made.run.holders[1])
    assert [away.host for away in said(made, d.TurnAway)] == ["g1"]
    assert finished(made)


def test_a_worker_that_has_failed_is_nobodys_donor_until_its_machine_has_gone() -> None:
    """It may have missed a commit, or made half of one; it went on giving its stage to others."""
    made = open_herd(2, stages=3, steps=6)
    joined(made, 2)
    old = handing(made, 5)
    work_until(made, lambda run: old not in made.alive)
    work_until(made, lambda run: run.replicas[1].phase == "commit" and bool(made.alive[run.holders[5]].orders))
    made.fail(made.run.holders[5])
    made.lose(made.run.holders[4])
    lent = [
        m for f in said(made, d.Form) for m in f.members if isinstance(m.source, d.Rebuild) and m.source.donors == [5]
    ]
    assert 5 not in made.run.holders and not lent
    assert finished(made)


def test_so_is_one_on_which_a_worker_fails_while_it_is_to_leave() -> None:
    """It takes no workers any more, but its replica would wait for the failed one for ever."""
    made = open_herd(1, replace=False)
    joined(made, 1)
    handing(made, 1)
    work_until(made, lambda run: run.replicas[0].phase == "run")
    made.leave("g1")
    assert not said(made, d.TurnAway)
    made.fail(made.run.holders[1])
    assert [away.host for away in said(made, d.TurnAway)] == ["g1"]
    made.behave()
    assert made.truth.ending


def test_a_worker_that_dies_when_the_run_was_asked_to_stop_is_replaced_on_the_same_machine() -> None:
    """Nobody was started there any more, and was waited for."""
    made = open_herd(2, more=1, steps=30, kind="noloco")
    host = joined(made, 2)
    work_until(made, lambda run: 2 in run.live and run.replicas[2].phase == "run")
    made.stop()
    made.lose(made.workers_of(host)[0])
    made.behave()
    assert made.truth.ending and made.truth.ending.outcome == "stopped"


def test_workers_that_die_at_home_are_not_started_for_ever_because_another_is_to_leave() -> None:
    made = open_herd(2, steps=30)
    work_until(made, moving)
    made.drain(made.run.holders[0])
    for _ in range(2 * MAX_STILLBORN):
        if born := [name for name, worker in made.alive.items() if not worker.joined]:
            made.lose(born[0])
        work_until(made, lambda run: any(r.phase == "run" for r in run.live.values()))
    assert len(said(made, d.Spawn)) == 4 + MAX_STILLBORN
    assert finished(made)


def test_a_replica_is_not_founded_with_those_who_are_to_take_over() -> None:
    made = open_herd(2, more=1, steps=30, replace=False)
    work_until(made, lambda run: moving(run) and all(replica.phase == "run" for replica in run.live.values()))
    host = made.join(2)
    for node in (0, 1):
        made.drain(made.run.holders[node])
    for worker in made.workers_of(host):
        made.work(worker)
    work_until(made, lambda run: all(run.workers[worker].host for worker in (run.holders[0], run.holders[1])))
    assert not said(made, d.Disband)
    assert finished(made)


def test_what_is_saved_in_the_middle_of_a_round_has_that_round_still_before_it() -> None:
    """A replica that was rolled back to it took itself for one that had settled the round."""
    exchange = {"kind": "streaming_diloco", "options": {"every": 2, "fragments": 1, "delay": 1}}
    made = OpenHerd(started(2, 1, exchange, save_every=1, steps=8, spares=1))
    work_until(made, lambda run: any(r.meeting and r.phase == "save" for r in run.live.values()))
    replica = next(r for r in made.run.live.values() if r.meeting and r.phase == "save")
    assert replica.meeting
    assert made.run.standings[replica.number].rounds == replica.meeting.round
    assert finished(made)


def test_a_run_of_which_no_worker_is_at_home_waits_for_machines_and_trains_on_them() -> None:
    made = open_herd(1, stages=2, own=0)
    made.behave()
    assert not said(made, d.Spawn) and lacking(made.run) == 3
    made.join(2)
    made.behave()
    assert lacking(made.run) == 1 and not said(made, d.Form)
    made.join(1)
    assert lacking(made.run) == 0, "the rest is about to start"
    assert finished(made)
    assert {spawn.host for spawn in said(made, d.Spawn)} == {"g1", "g2"}


def test_the_run_starts_as_many_workers_at_home_as_it_has_room_for() -> None:
    made = open_herd(1, stages=2, own=1)
    made.join(2)
    assert finished(made)
    assert sorted(spawn.host for spawn in said(made, d.Spawn)) == ["", "g1", "g1"]


def test_a_run_that_nobody_joins_ends_with_the_reason() -> None:
    made = open_herd(1, stages=2, own=1)
    made.behave()
    made.happened(e.NobodyJoined(lacking=2))
    made.behave()
    ending = made.truth.ending
    assert ending is not None and ending.outcome == "failed" and "no machine has joined in time" in ending.reason


def test_a_run_whose_machines_have_gone_waits_then_saves_what_is_left() -> None:
    made = open_herd(1, stages=2, own=1, recovery={"strategy": "checkpoint"})
    host = made.join(2)
    work_until(made, moving)
    made.vanish(host)
    made.behave()
    assert lacking(made.run) == 2 and not said(made, d.Finish)
    made.happened(e.NobodyJoined(lacking=2))
    made.behave()
    ending = made.truth.ending
    assert ending is not None and ending.outcome == "cannot"


def test_a_machine_that_joins_late_is_used_all_the_same() -> None:
    made = open_herd(1, stages=2, own=1, recovery={"strategy": "checkpoint"})
    host = made.join(2)
    work_until(made, moving)
    made.vanish(host)
    made.behave()
    made.join(2)
    assert finished(made)
