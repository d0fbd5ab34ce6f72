"""Leading a herd by the hand, for tests that tell one story."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from pretend_herd import PretendHerd

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.state import RunState

F = TypeVar("F", bound=e.Fact)


def started(replicas: int, stages: int, exchange: dict[str, Any], more: int = 0, **changed: Any) -> e.RunStarted:
    """The first event of a run in which node ``replica + places · stage`` is a replica's node of a stage.

    ``more`` of the places are for replicas that there may be when machines have joined.
    """
    places = replicas + more
    plain: dict[str, Any] = {
        "name": "run", "seed": 1, "stages": stages, "steps": 4, "first_step": 0, "samples_per_step": 2 * replicas,
        "wall_time": 0.0, "spares": 1, "routes": [[*range(stages + 1), 0]], "replicas": replicas,
        "columns": [[r + places * stage for stage in range(stages + 1)] for r in range(places)],
        "exchange": {**exchange, "replicas": replicas, "most": places},
    }  # fmt: skip
    return e.RunStarted.model_validate(plain | changed)


def herd(replicas: int, kind: str = "noloco", stages: int = 1, **changed: Any) -> PretendHerd:
    """A run whose replicas meet every two steps, unless ``exchange`` says otherwise."""
    exchange = {"kind": kind, "options": {} if kind == "local" else {"every": 2}} | changed.pop("exchange", {})
    return PretendHerd(started(replicas, stages, exchange, **changed))


def work_until(made: PretendHerd, done: Callable[[RunState], bool], without: Collection[int] = ()) -> None:
    """All but the replicas ``without`` do what they are told, offers arrive, and nobody loses patience."""
    for turn in range(3000):
        if done(made.run):
            return
        lame = {w for n in without for w in made.run.replicas[n].holders.values()}
        if pending := [w for w in made.pending() if w not in lame]:
            made.work(pending[turn % len(pending)])
        else:
            ways = [n for n, (_, _, worker) in enumerate(made.mail) if worker not in lame]
            assert ways, f"nobody has anything to do: {made.run}"
            made.deliver(ways[0])
    raise AssertionError("never")


def said(made: PretendHerd, kind: type[F]) -> list[F]:
    """What was decided, or happened, of this kind."""
    return [fact for fact in made.history if isinstance(fact, kind)]


def at(replica: int, phase: str, step: int) -> Callable[[RunState], bool]:
    """Is the replica in this phase of this step?"""
    return lambda run: (run.replicas[replica].phase, run.replicas[replica].step) == (phase, step)


def finished(made: PretendHerd) -> bool:
    """Let everybody behave; does the run come to its natural end?"""
    made.behave()
    return made.truth.ending == d.Finish(outcome="finished")


def relink(made: PretendHerd, replica: int) -> None:
    """An edge of a replica breaks, and nobody turns out to be dead."""
    made.break_edge(made.run.replicas[replica].holders[made.started.columns[replica][0]], 0)
    made.expire_grace(replica)
