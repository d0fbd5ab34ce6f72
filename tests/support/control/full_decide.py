"""Check that ``decide`` from cached derived state gives the decision of a full evaluation."""

from __future__ import annotations

from dataclasses import replace

from planaria.control.decide import decide
from planaria.control.facts.decisions import Decision
from planaria.control.state.run import Replicas, RunState


def without_derived_state(run: RunState) -> RunState:
    """Return the same state without anything derived: every replica has to be considered again."""
    replicas = Replicas({number: replace(replica) for number, replica in run.replicas.items()})
    return replace(run, replicas=replicas, roster=replace(run.roster), undecided=replicas.numbers)


def decide_checked(run: RunState) -> Decision | None:
    """Return ``decide``'s incremental answer; assert that a full evaluation gives the same."""
    anew, decision = without_derived_state(run), decide(run)
    assert decision == (full := decide(anew)), f"a fact concerned others than {run.undecided}: {decision!r}, {full!r}"
    known, found = run.replicas, anew.replicas
    for name in ("troubled", "left", "generation", "replica_of_worker"):
        assert getattr(known, name) == getattr(found, name), name
    for replica, again in zip(known.values(), found.values(), strict=True):
        assert (replica.broken, replica.troubled) == (again.broken, again.troubled)
        assert (replica.held.stage, replica.stateful.stage) == (again.held.stage, again.stateful.stage)
    return decision
