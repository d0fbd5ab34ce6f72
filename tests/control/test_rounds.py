"""When replicas meet, with whom, and what becomes of a round in which somebody is missing."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from fresh import decided_alike
from herd_steps import finished, herd, relink, said, work_until
from pretend_herd import PretendHerd

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.allotment import Used
from planaria.control.apply_base import decided, with_replica
from planaria.control.events import Standing
from planaria.control.state import RunState

STREAMING = {"kind": "streaming_diloco", "options": {"every": 3, "fragments": 1, "delay": 2}}


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


def all_due(run: RunState) -> bool:
    """Has everyone made its steps before the first round?"""
    return all(replica.inner >= 2 for replica in run.live.values())


def test_a_pair_meets_and_settles_what_both_have_heard() -> None:
    made = herd(2, "noloco", steps=2)
    assert finished(made)
    (meet,) = said(made, d.Meet)
    assert (meet.round, meet.members) == (0, [0, 1])
    assert [(link.low, link.high) for link in meet.links] == [(0, 1), (2, 3)]
    (settle,) = said(made, d.Settle)
    assert settle.members == [0, 1]


def test_who_has_no_partner_any_more_is_alone_at_once() -> None:
    made = herd(2, "noloco", replace=False, spares=0)
    work_until(made, lambda run: run.replicas[0].step == 1)
    made.lose(made.run.holders[1])
    assert made.run.replicas[1].phase == "left"
    work_until(made, lambda run: run.replicas[0].rounds == 1)
    assert [settle.members for settle in said(made, d.Settle)] == [[0]]
    assert finished(made)


def test_who_waits_for_a_late_partner_is_alone_when_patience_is_over() -> None:
    made = herd(2, "noloco", steps=6)
    work_until(made, lambda run: run.replicas[0].inner == 2 and run.replicas[0].phase == "idle", without=[1])
    assert made.impatient() == [(0, 0, False)]
    made.lose_patience((0, 0, False))
    assert [settle.members for settle in said(made, d.Settle)] == [[0]]
    work_until(made, lambda run: run.replicas[1].rounds == 1)
    assert said(made, d.Settle)[1].members == [1], "its partner has that round behind it: nobody is waited for"
    assert finished(made)


def test_of_an_odd_number_one_sits_out() -> None:
    made = herd(3, "noloco", steps=2)
    assert finished(made)
    (draw,) = said(made, d.DrawGroups)
    assert sorted(map(len, draw.groups)) == [1, 2]
    assert sorted(settle.members for settle in said(made, d.Settle)) == sorted(draw.groups)


def test_who_is_deaf_in_a_group_of_three_is_left_out_and_settles_alone() -> None:
    made = herd(3, "pair_mean", steps=2, exchange={"options": {"every": 2, "group": 3}})
    work_until(made, lambda run: all(r.meeting for r in run.replicas.values()))
    for worker in [w for w in made.pending() if w]:
        made.work(worker)
    deaf = set(made.run.replicas[1].holders.values())
    made.mail = [mail for mail in made.mail if mail[2] not in deaf]
    while made.mail:
        made.deliver(0)
    assert not said(made, d.Settle)
    made.lose_patience(made.impatient()[0])
    assert [settle.members for settle in said(made, d.Settle)] == [[0, 2], [1]]
    assert finished(made)


def test_where_all_must_stay_alike_who_missed_a_round_goes_on_as_a_copy() -> None:
    made = herd(3, "diloco", steps=4)
    work_until(made, lambda run: all(run.replicas[n].inner == 2 for n in (0, 1)), without=[2])
    work_until(made, lambda run: len(made.impatient()) == 2, without=[2])
    made.lose_patience(made.impatient()[0])
    work_until(made, lambda run: run.replicas[2].lost != frozenset())
    (adopt,) = said(made, d.Adopt)
    assert (adopt.replica, said(made, d.Settle)[0].members) == (2, [0, 1])
    form = said(made, d.Form)[-1]
    assert {type(member.source) for member in form.members} == {d.Rebuild}
    assert (form.rounds, form.step) == (1, 2)
    assert finished(made)


def test_nobody_adopts_before_those_that_are_ahead_have_settled() -> None:
    """They may lose what they have said to one another, and meet again, with this one."""
    made = herd(3, "diloco", steps=2)
    work_until(made, lambda run: all(run.replicas[n].inner == 2 for n in (0, 1)), without=[2])
    work_until(made, lambda run: len(made.impatient()) == 2, without=[2])
    made.lose_patience(made.impatient()[0])
    assert said(made, d.Meet)[0].members == [0, 1]
    while made.run.replicas[2].inner < 2:
        made.work(next(w for w in made.pending() if w in made.run.replicas[2].holders.values()))
    relink(made, 0)
    relink(made, 1)
    assert finished(made)
    assert not said(made, d.Adopt)
    assert [settle.members for settle in said(made, d.Settle)] == [[0, 1, 2]]


@pytest.mark.parametrize("kind", ["noloco", "diloco"])
def test_who_forms_anew_in_a_round_does_not_settle_what_it_has_forgotten(kind: str) -> None:
    """Its edges broke: its workers have dropped the offers that they had heard."""
    made = herd(2, kind, steps=4)
    work_until(made, lambda run: bool(run.replicas[0].meeting and run.replicas[0].meeting.heard))
    relink(made, 0)
    assert said(made, d.Form)[-1].outcome == "relinked"
    assert finished(made)
    met = [settle.members for settle in said(made, d.Settle) if settle.round == 0]
    assert sorted(met) == ([[1]] if kind == "noloco" else [[0, 1]])
    assert sum(meet.round == 0 for meet in said(made, d.Meet)) == (1 if kind == "noloco" else 2)


def test_a_stage_lost_at_each_member_of_a_round_is_copied_from_the_other() -> None:
    made = herd(2, "diloco", stages=2, steps=4, spares=2)
    work_until(made, lambda run: all(r.meeting for r in run.replicas.values()) and len(run.with_status("spare")) == 2)
    made.lose(made.run.holders[0], made.run.holders[3])
    assert finished(made)
    assert not said(made, d.Adopt) and not said(made, d.Disband)
    assert said(made, d.Settle)[0].members == [0, 1], "they have met once more"


def test_the_lane_of_a_straggler_is_helped_along() -> None:
    made = herd(2, "noloco", steps=20)
    work_until(made, lambda run: run.replicas[0].step >= 1)
    for _ in range(200):
        for who in made.impatient():
            made.lose_patience(who)
        pending = [w for w in made.pending() if w not in made.run.replicas[1].holders.values()]
        if pending:
            made.work(pending[0])
    left = 40 - sum(replica.step for replica in made.run.replicas.values())
    assert left == 1 + 4, "what it has under way, and two rounds' worth"
    assert finished(made)


def test_samples_of_a_replica_that_is_gone_are_used_by_the_others() -> None:
    made = herd(3, "noloco", steps=4, replace=False, spares=0)
    work_until(made, lambda run: all(r.step for r in run.replicas.values()))
    made.lose(made.run.holders[2])
    assert finished(made)
    assert sum(replica.step for replica in made.run.replicas.values()) == 12


def test_a_replica_is_founded_anew_when_there_are_workers_for_it() -> None:
    made = herd(2, "noloco", steps=12, spares=2)
    work_until(made, lambda run: run.replicas[1].attempts == 0 and run.replicas[1].step > 0)
    while not said(made, d.Found):
        work_until(made, lambda run: run.replicas[1].phase == "run", without=[0])
        relink(made, 1)
    work_until(made, lambda run: run.replicas[1].phase == "run")
    assert {member.source.origin for member in said(made, d.Form)[-1].members} == {"rebuild"}
    assert finished(made)


def settle_without(made: PretendHerd, liar: int) -> None:
    """Go through the first round, in which what one replica says is of no use."""
    for _ in range(1000):
        if made.mail:
            made.deliver(0, "wrong" if made.mail[0][1] == liar else "arrives")
        elif said(made, d.Settle):
            return
        else:
            made.work(made.pending()[0])
    raise AssertionError("never")


@pytest.mark.parametrize("kind", ["noloco", "diloco"])
@pytest.mark.parametrize("liar", [0, 1])
def test_whose_offer_is_of_no_use_is_gone_on_without_and_nobody_waits_for_it(kind: str, liar: int) -> None:
    made = herd(2, kind=kind)
    settle_without(made, liar)
    made.behave()
    first = [settle for settle in said(made, d.Settle) if settle.round == 0]
    honest = 1 - liar
    assert first[0].members == [honest], "it goes on first, and by itself"
    if kind == "noloco":
        assert [settle.members for settle in first] == [[honest], [liar]]
    else:
        assert [settle.members for settle in first] == [[honest]]
        assert [adopt.replica for adopt in said(made, d.Adopt)] == [liar], (
            "who must be alike takes over what came of it"
        )
    assert not said(made, e.PatienceOver)
    assert any(len(settle.members) == 2 for settle in said(made, d.Settle)), "the next round is another"


@pytest.mark.parametrize("kind", ["diloco", "monna"])
def test_who_refuses_what_everybody_says_is_gone_on_without(kind: str) -> None:
    """Where it were believed, the honest ones would each be left alone."""
    made = herd(4, kind=kind, steps=4)
    for _ in range(3000):
        if made.mail:
            _, _, worker = made.mail[0]
            made.deliver(0, "wrong" if worker in made.run.replicas[1].holders.values() else "arrives")
        elif said(made, d.Settle):
            break
        else:
            made.work(made.pending()[0])
    assert said(made, d.Settle)[0].members == [0, 2, 3]
    assert made.run.suspicion.strikes(0, made.run.rule) == 0 and finished(made)


def test_of_three_the_two_that_understand_each_other_settle_together() -> None:
    made = herd(3, kind="diloco")
    settle_without(made, 0)
    made.behave()
    assert next(settle.members for settle in said(made, d.Settle)) == [1, 2]
    assert [adopt.replica for adopt in said(made, d.Adopt)] == [0]


def test_who_is_left_in_a_round_settles_it_alone_as_soon_as_the_others_have() -> None:
    """They have refused what it said; nothing else happens to it that would make the controller look."""
    made = herd(3, "pair_mean", exchange={"options": {"every": 2, "group": 3}}, steps=6)
    work_until(made, lambda run: all(r.meeting for r in run.replicas.values()) and len(made.mail) == 12)
    refusing = next(n for n, (_, source, _) in enumerate(made.mail) if source == 2)
    made.deliver(refusing, "wrong")
    work_until(made, lambda run: bool(said(made, d.Settle)))
    assert [settle.members for settle in said(made, d.Settle)] == [[0, 1], [2]]
    assert finished(made)


def test_who_has_no_samples_left_when_a_round_is_settled_is_not_waited_for_in_the_next() -> None:
    """Others took the last ones while it waited for offers."""
    made = herd(4, "pair_mean", steps=6)
    work_until(made, lambda run: all(r.meeting and r.phase == "idle" for r in run.replicas.values()))
    settling, others = made.run.groups[0]
    work_until(made, lambda run: all((n, 1, False) in made.impatient() for n in others), without=settling)
    last = made.run.allotment.total - 1
    none_left = replace(made.run.allotment, used=Used(last), out=MappingProxyType({others[1]: last}))
    run = decided(replace(made.run, allotment=none_left))
    decision = decided_alike(with_replica(run, run.replicas[others[1]]))
    assert isinstance(decision, d.Settle) and decision.members == [others[0]]


def test_who_has_come_to_a_round_is_introduced_anew_when_its_edges_are() -> None:
    """It is ready to meet, and waits for one that is not."""
    made = herd(2, exchange={"options": {"every": 2, "prefetch": True}}, steps=6)
    work_until(made, lambda run: run.replicas[1].step == 1)
    work_until(made, lambda run: bool(made.impatient()), without=[1])
    relink(made, 0)
    work_until(made, lambda run: bool(made.impatient()), without=[1])
    now = [replica.generation for replica in made.run.replicas.values()]
    assert said(made, d.Introduce)[-1].generations == now
    assert finished(made)


def test_who_waits_in_a_round_goes_on_when_one_that_commits_has_left_it() -> None:
    """Its edge has broken. Only when it has committed, it is formed anew; the others need not wait for that."""
    made = herd(3, exchange=STREAMING, steps=6)
    work_until(made, lambda run: all(r.meeting for r in run.replicas.values()))
    work_until(made, lambda run: all((n, 0, True) in made.impatient() for n in (0, 1)) and heard(run), without=[2])
    work_until(made, lambda run: run.replicas[2].phase == "commit")
    assert not said(made, d.Settle)
    relink(made, 2)
    assert made.run.replicas[2].phase == "commit"
    assert [settle.members for settle in said(made, d.Settle)] == [[0, 1]]
    assert finished(made)


def heard(run: RunState) -> bool:
    """Have the first two heard of each other?"""
    return run.replicas[0].has_heard(1) and run.replicas[1].has_heard(0)
