"""Several replicas under one controller, one story after the other."""

from __future__ import annotations

import pytest
from herd_steps import finished, herd, relink, said, work_until
from pretend_herd import PretendHerd

from planaria.control import decisions as d
from planaria.control import events as e


def test_no_two_replicas_have_a_generation_in_common() -> None:
    """A worker that moves from one to the other may still have reports of the first under way."""
    made = herd(3)
    assert finished(made)
    generations = [form.generation for form in said(made, d.Form)]
    assert generations == sorted(set(generations)) and len(generations) == 3


def test_a_checkpoint_is_of_the_generations_in_which_replicas_were_saved() -> None:
    """One has been saved, goes on and is formed anew before the other one is saved."""
    made = herd(2, "local", save_every=1)
    work_until(made, lambda run: run.replicas[0].saved > 0 and run.replicas[0].phase == "run", without=[1])
    relink(made, 0)
    assert made.run.saving > 0
    assert finished(made)


def test_a_replica_that_leaves_while_it_is_being_saved_is_not_in_the_checkpoint() -> None:
    made = herd(2, "local", save_every=1, spares=0, replace=False)
    work_until(made, lambda run: all(r.phase == "save" for r in run.replicas.values()))
    made.lose(made.run.holders[1])
    work_until(made, lambda run: run.replicas[1].phase == "left", without=[0])
    work_until(made, lambda run: run.saving < 0)
    assert list(said(made, d.Seal)[-1].standings) == [0]
    assert finished(made)


def borrowing(made: PretendHerd) -> None:
    """Replica 0 has lost the worker of its last stage and gets its state from replica 1."""
    work_until(made, lambda run: all(r.step for r in run.replicas.values()) and bool(run.with_status("spare")))
    made.lose(made.run.holders[made.started.columns[0][-1]])
    work_until(made, lambda run: bool(run.replicas[0].lenders))


def test_a_lender_that_dies_when_it_has_lent_changes_nothing_for_who_has_borrowed() -> None:
    """The others of the replica still wait for their edges: they would not hear an order to run."""
    made = herd(2, "local", stages=2, spares=2, steps=6)
    borrowing(made)
    lost, lender = made.run.holders[4], made.run.holders[5]
    while made.alive[lender].orders:
        made.work(lender)
    for worker in (made.run.holders[0], made.run.holders[2], lost):
        while made.alive[worker].orders:
            made.work(worker)
    made.work(lost)
    made.work(lost)
    assert made.run.replicas[0].phase == "link" and not made.run.replicas[0].lost
    made.lose(lender)
    assert finished(made)


def test_an_edge_that_is_blamed_when_what_it_carried_has_come_by_another_way_changes_nothing() -> None:
    made = herd(2, "local", stages=2, spares=2, steps=6)
    borrowing(made)
    worker = made.run.holders[4]
    work_until(made, lambda run: made.alive[worker].forming, without=[1])
    broken = e.EdgeBroken(worker=worker, node=4, peer=5, generation=made.alive[worker].generation, detail="late")
    made.happened(broken)
    work_until(made, lambda run: run.replicas[0].phase == "run")
    before = made.run.replicas[0]
    made.expire_grace(0)
    assert (made.run.replicas[0].phase, made.run.replicas[0].waiting) == ("run", before.waiting)
    assert finished(made)


def test_a_replica_waits_for_another_that_is_only_just_loading_to_copy_it() -> None:
    """It was disbanded, founded anew, and disbanded again, for ever."""
    made = herd(2, "local", spares=4)
    work_until(made, lambda run: run.replicas[0].step == 1 and len(run.with_status("spare")) > 2, without=[1])
    made.lose(made.run.holders[0])
    assert finished(made)
    assert not said(made, d.Disband)


@pytest.mark.parametrize("kind", ["noloco", "diloco"])
def test_replicas_that_have_each_lost_another_stage_help_one_another(kind: str) -> None:
    """Each waited for the other to be whole."""
    made = herd(2, kind, stages=2, spares=2, steps=6)
    work_until(made, lambda run: all(r.step for r in run.replicas.values()) and len(run.with_status("spare")) == 2)
    made.lose(made.run.holders[0], made.run.holders[3])
    assert finished(made)
    assert not said(made, d.Disband)


def test_replicas_that_must_stay_alike_do_not_both_make_up_a_stage_that_both_have_lost() -> None:
    made = herd(2, "diloco", stages=3, spares=2, steps=6)
    work_until(made, lambda run: all(r.step for r in run.replicas.values()) and len(run.with_status("spare")) == 2)
    made.lose(made.run.holders[4], made.run.holders[5])
    assert finished(made)
    ways = [m.source.by for f in said(made, d.Form) for m in f.members if isinstance(m.source, d.Rebuild)]
    assert ways.count("checkfree") == 1 and ways[-1] == d.PEER


def test_a_replica_with_something_to_save_does_not_go_before_one_that_has_nothing() -> None:
    made = herd(2, "noloco", stages=2, spares=2, steps=8)
    work_until(made, lambda run: all(r.step for r in run.replicas.values()))
    made.lose(*(w for n, w in made.run.holders.items() if n % 2 == 1))
    made.lose(made.run.holders[0])
    made.behave()
    assert [disband.replica for disband in said(made, d.Disband)] == [1]
    assert said(made, d.Seal)[-1].stages == [1, 2]


def test_what_was_written_for_a_checkpoint_that_was_given_up_does_not_count_for_the_next() -> None:
    """The last replica cannot go on while it is being saved: when all have written, it is saved anew, in the same
    generation."""
    made = herd(2, "local", stages=2, spares=0, replace=False, save_every=1)
    work_until(made, lambda run: run.replicas[0].step == 2 and run.replicas[0].phase == "save")
    work_until(made, lambda run: run.progress > run.saving, without=[0])
    old = next(w for w in made.run.replicas[0].waiting if w != made.run.holders[0])
    made.lose(*made.run.replicas[1].holders.values())
    made.lose(made.run.holders[0])
    assert not made.run.replicas[0].cannot, "others still write"
    work_until(made, lambda run: bool(run.replicas[0].cannot))
    assert made.run.saving != said(made, d.Save)[-2].step
    made.work(old)
    made.behave()
    assert said(made, d.Seal)[-1].partial
