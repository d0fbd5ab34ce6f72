"""Builders and steps for tests that drive simulated replicas through one scenario."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.run import RunState
from support.control.simulated_replicas import SimulatedReplicas

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


def work_until(simulation: SimulatedReplicas, done: Callable[[RunState], bool], without: Collection[int] = ()) -> None:
    """Run all replicas but ``without`` and deliver updates until ``done``; no wait times out."""
    for turn in range(3000):
        if done(simulation.run):
            return
        stopped = {w for n in without for w in simulation.run.replicas[n].holders.values()}
        if pending := [w for w in simulation.pending() if w not in stopped]:
            simulation.work(pending[turn % len(pending)])
        else:
            mail = [n for n, (_, _, worker) in enumerate(simulation.mail) if worker not in stopped]
            assert mail, f"no worker has anything to do: {simulation.run}"
            simulation.deliver(mail[0])
    raise AssertionError("never")


def facts(simulation: SimulatedReplicas, kind: type[F]) -> list[F]:
    """Return the events or decisions of this kind."""
    return [fact for fact in simulation.history if isinstance(fact, kind)]


def finished(simulation: SimulatedReplicas) -> bool:
    """Run to the end; return whether the run finished."""
    simulation.behave()
    return simulation.ending == d.Finish(outcome="finished")


def relink(simulation: SimulatedReplicas, replica: int) -> None:
    """Break an edge of a replica and let its grace expire."""
    simulation.break_edge(simulation.run.replicas[replica].holders[simulation.started.nodes_by_replica[replica][0]], 0)
    simulation.expire_grace(replica)
