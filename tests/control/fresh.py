"""What a state carries along must be what would be found from its fields alone, and change no decision."""

from __future__ import annotations

from dataclasses import replace

from planaria.control.decide import decide
from planaria.control.decisions import Decision
from planaria.control.state import Replicas, RunState


def fresh(run: RunState) -> RunState:
    """The same state, of which nothing is known yet beyond its fields: everything may have to be decided."""
    replicas = Replicas({number: replace(replica) for number, replica in run.replicas.items()})
    return replace(run, replicas=replicas, roster=replace(run.roster), undecided=None)


def decided_alike(run: RunState) -> Decision | None:
    """What ``decide`` says, which looks at what has changed: the same as when it looks at everything."""
    anew, decision = fresh(run), decide(run)
    assert decision == (full := decide(anew)), f"a fact concerned others than {run.undecided}: {decision!r}, {full!r}"
    known, found = run.replicas, anew.replicas
    for name in ("troubled", "gone", "generation", "standing"):
        assert getattr(known, name) == getattr(found, name), name
    for replica, again in zip(known.values(), found.values(), strict=True):
        assert (replica.broken, replica.troubled) == (again.broken, again.troubled)
        assert (replica.held.stage, replica.stateful.stage) == (again.held.stage, again.stateful.stage)
    return decision
