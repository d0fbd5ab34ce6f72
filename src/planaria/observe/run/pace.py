"""How far a run has come, over all its replicas."""

from __future__ import annotations

from planaria.record.decisions import Commit, Decision, Form, RunStep
from planaria.record.events import Event, RunStarted


class Pace:
    """Counts committed steps. One of several replicas counts its own; a step of the run is as many blocks as there are.

    ``done`` goes back only where something is undone, never because one replica is behind another.
    """

    def __init__(self) -> None:
        self._started: RunStarted | None = None
        self._steps: dict[int, int] = {}
        self._under_way: dict[int, int] = {}

    @property
    def done(self) -> int:
        """Steps of the run that are committed: of several replicas, committed blocks over their number."""
        started = self._started
        if started is None or started.replicas == 1:
            return self._steps.get(0, 0)
        floor, beyond = started.used
        own = sum(step - started.standing(replica).step for replica, step in self._steps.items())
        return started.progress(floor + len(beyond) + own)

    def at(self, replica: int | None = None) -> int:
        """The run's step that a replica has under way, or had last; without one, the step that all together are in."""
        return self.done if replica is None else self._under_way.get(replica, self.done)

    def take(self, fact: Event | Decision) -> None:
        if isinstance(fact, RunStarted):
            self._started, self._under_way = fact, {}
            self._steps = {replica: fact.standing(replica).step for replica in range(fact.replicas)}
        elif isinstance(fact, RunStep):
            self._begin(fact)
        elif isinstance(fact, Commit):
            self._steps[fact.replica] = fact.step + 1
        elif isinstance(fact, Form) and fact.outcome == "rolled back":
            self._steps[fact.replica] = fact.step

    def _begin(self, fact: RunStep) -> None:
        if self._started is None or self._started.replicas == 1:
            self._under_way[fact.replica] = fact.step
        elif fact.mode == "train":
            self._under_way[fact.replica] = self._started.progress(fact.block)
