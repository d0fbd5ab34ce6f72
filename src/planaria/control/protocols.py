"""What the controller works with, and does not know: an observer, a source of faults, a planner of routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.state import RunState

if TYPE_CHECKING:
    from planaria.faults.trace import Fault


class Observer(Protocol):
    """Is told everything, in order; has no influence, but that a run of which nothing can be noted any more stops."""

    @property
    def trouble(self) -> str:
        """Why it cannot note what it is told; empty as long as it can."""
        ...

    def on_event(self, t: float, event: e.Event) -> None: ...

    def on_decision(self, t: float, decision: d.Decision) -> None: ...

    def on_worked(self, t: float, worked: e.Worked) -> None: ...


class FaultSource(Protocol):
    """Chaos: looks at decisions, events and the clock, strikes workers, and tells what it did."""

    def on_decision(self, decision: d.Decision, state: RunState) -> list[e.FaultInjected]:
        """Called before the orders of ``decision`` go out."""
        ...

    def on_event(self, t: float, event: e.Event, state: RunState) -> list[e.FaultInjected]: ...

    def add(self, fault: Fault) -> None:
        """One more, to strike at the next occasion."""
        ...

    def strike(self, t: float) -> None: ...

    def next_due(self) -> float | None: ...


class Planner(Protocol):
    """Finds routes for the nodes that are left, in its own time."""

    def ask(self, request: d.Replan) -> None: ...

    def answer(self) -> e.Replanned | None: ...
