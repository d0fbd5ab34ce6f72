"""Several replicas under one controller, one story after the other."""

from __future__ import annotations

from herd_steps import finished, herd, relink, said, work_until

from planaria import decisions as d


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
    assert made.run.replicas[1].phase == "left"
    work_until(made, lambda run: run.saving < 0)
    assert list(said(made, d.Seal)[-1].standings) == [0]
    assert finished(made)
