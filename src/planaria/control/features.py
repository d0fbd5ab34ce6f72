"""Registration of features that add decisions and timers to the controller; each owns a package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState
from planaria.exchange.coded.coded_steps import CODED_STEPS


class FeatureTimers(Protocol):
    """Timers of a feature, in monotonic seconds."""

    @property
    def due(self) -> list[float]:
        """Times at which the timers expire."""

    def note(self, now: float, run: RunState) -> None:
        """Start and stop timers after a change of the run's state."""

    def expired(self, now: float, state: Callable[[], RunState]) -> Iterator[Event]:
        """Yield an event for each expired timer. Read ``state`` again for each, since applying one may change it."""


class Feature(Protocol):
    """A feature's part in the controller.

    ``feature_facts.py`` registers its events and orders, ``feature_state.py`` its state.
    """

    def next_decision(self, run: RunState, replica: ReplicaState) -> Decision | None:
        """Return the next decision in the current step, if any."""

    def new_timers(self) -> FeatureTimers:
        """Return new timers for a run."""


FEATURES: tuple[Feature, ...] = (CODED_STEPS,)


def next_feature_decision(run: RunState, replica: ReplicaState) -> Decision | None:
    """Return the next decision of any feature in the current step."""
    return next((chosen for feature in FEATURES if (chosen := feature.next_decision(run, replica)) is not None), None)
