"""Builders and steps for tests that drive simulated replicas through one scenario."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from simulated_replicas import SimulatedReplicas

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.run import RunState

F = TypeVar("F", bound=e.Fact)


def started(replicas: int, stages: int, exchange: dict[str, Any], more: int = 0, **changed: Any) -> e.RunStarted:
    """Return the first event of a run; a replica's node of a stage is ``replica + places · stage``.

    ``more`` places are for replicas that are founded when machines join.
    """
    places = replicas + more
    plain: dict[str, Any] = {
        "name": "run", "seed": 1, "stages": stages, "steps": 4, "first_step": 0, "samples_per_step": 2 * replicas,
        "wall_time": 0.0, "spares": 1, "routes": [[*range(stages + 1), 0]], "replicas": replicas,
        "nodes_by_replica": [[r + places * stage for stage in range(stages + 1)] for r in range(places)],
        "exchange": {**exchange, "replicas": replicas, "max_replicas": places},
    }  # fmt: skip
    return e.RunStarted.model_validate(plain | changed)


def simulate(replicas: int, kind: str = "noloco", stages: int = 1, **changed: Any) -> SimulatedReplicas:
    """Start a run whose replicas meet every two steps, unless ``exchange`` overrides that."""
    exchange = {"kind": kind, "options": {} if kind == "local" else {"every": 2}} | changed.pop("exchange", {})
    return SimulatedReplicas(started(replicas, stages, exchange, **changed))


def work_until(made: SimulatedReplicas, done: Callable[[RunState], bool], without: Collection[int] = ()) -> None:
    """Run all replicas but ``without`` and deliver updates until ``done``; no wait times out."""
    for turn in range(3000):
        if done(made.run):
            return
        stopped = {w for n in without for w in made.run.replicas[n].holders.values()}
        if pending := [w for w in made.pending() if w not in stopped]:
            made.work(pending[turn % len(pending)])
        else:
            mail = [n for n, (_, _, worker) in enumerate(made.mail) if worker not in stopped]
            assert mail, f"no worker has anything to do: {made.run}"
            made.deliver(mail[0])
    raise AssertionError("never")


def facts(made: SimulatedReplicas, kind: type[F]) -> list[F]:
    """Return the events or decisions of this kind."""
    return [fact for fact in made.history if isinstance(fact, kind)]


def finished(made: SimulatedReplicas) -> bool:
    """Run to the end; return whether the run finished."""
    made.behave()
    return made.ending == d.Finish(outcome="finished")


def relink(made: SimulatedReplicas, replica: int) -> None:
    """Break an edge of a replica and let its grace expire."""
    made.break_edge(made.run.replicas[replica].holders[made.started.nodes_by_replica[replica][0]], 0)
    made.expire_grace(replica)
