from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from synthetic_replicas import commit, form, run_step, started

from planaria.control.events import ReplicaPosition
from planaria.report.membership import Membership


@given(st.integers(2, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=40))))
def test_the_run_never_goes_back_because_one_replica_is_behind(run: tuple[int, list[int]]) -> None:
    replicas, order = run
    members, steps, seen = Membership(), dict.fromkeys(range(replicas), 0), [0]
    members.take(started(replicas, steps=50))
    for count, replica in enumerate(order, 1):
        members.take(run_step(replica, steps[replica], block=count - 1))
        members.take(commit(replica, steps[replica], block=count - 1, replicas=replicas))
        steps[replica] += 1
        assert members.progress == count // replicas, "committed blocks over the number of replicas"
        seen.append(members.progress)
    assert seen == sorted(seen)


def test_a_rollback_of_one_replica_takes_back_its_own_steps_only() -> None:
    members = Membership()
    members.take(started(2))
    for step in range(4):
        for replica in (0, 1):
            members.take(commit(replica, step, block=2 * step + replica, replicas=2))
    assert members.progress == 4
    members.take(form(1, "cd", outcome="rolled back", step=2))
    assert members.progress == 3
    members.take(form(0, "ab", outcome="recovered", step=4))
    assert members.progress == 3


def test_a_run_that_is_taken_up_counts_what_was_done() -> None:
    members = Membership()
    positions = {0: ReplicaPosition(step=5), 1: ReplicaPosition(step=3)}
    members.take(started(2, first_step=4, positions=positions, first_block=7, blocks_ahead=[8]))
    assert members.progress == 4
    members.take(commit(1, 3, block=7, replicas=2))
    members.take(commit(1, 4, block=9, replicas=2))
    assert members.progress == 5


def test_a_replica_has_the_runs_step_under_way_to_which_its_samples_belong() -> None:
    members = Membership()
    members.take(started(2))
    assert members.run_step(0) == members.run_step() == 0
    members.take(run_step(1, step=3, block=10))
    assert (members.run_step(1), members.run_step(0)) == (5, 0)
