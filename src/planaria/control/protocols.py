"""Interfaces that the controller uses: an observer, a source of faults, a planner of routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.run import RunState

if TYPE_CHECKING:
    from planaria.faults.trace import Fault


class Observer(Protocol):
    """Receives all events in order. It has no influence, except that a run stops if it cannot be recorded."""

    @property
    def trouble(self) -> str:
        """The reason why events cannot be recorded, or an empty string if they can."""
        ...

    def on_event(self, t: float, event: e.Event, notice: int = 0) -> None:
        """:param notice: number of the supervisor's notice that reported the event; 0: not counted."""
        ...

    def on_decision(self, t: float, decision: d.Decision) -> None: ...

    def on_worked(self, t: float, worked: e.WorkReport) -> None: ...

    def secure(self) -> None:
        """Return once all that was observed survives the loss of what the run must survive.

        :raises RunStopped: if that is impossible, or another controller leads; then no order may go out.
        """
        ...

    def check(self) -> None:
        """Raise RunStopped if this process may no longer lead the run."""
        ...

    def when_lost(self, disconnect: Callable[[], object]) -> None:
        """Call ``disconnect`` in another thread once :meth:`check` would raise, even while :meth:`secure` waits."""
        ...


class FaultSource(Protocol):
    """Fault injection: observes decisions, events and the clock; injects faults and reports them."""

    def on_decision(self, decision: d.Decision, state: RunState) -> list[e.FaultInjected]:
        """Called before the orders of ``decision`` go out."""
        ...

    def on_event(self, t: float, event: e.Event, state: RunState) -> list[e.FaultInjected]: ...

    def add(self, fault: Fault) -> None:
        """Add a fault to inject at the next opportunity."""
        ...

    def resume_due(self, t: float) -> None: ...

    def next_due(self) -> float | None: ...


class RoutePlanner(Protocol):
    """Finds routes for the remaining nodes in the background."""

    def ask(self, request: d.Replan) -> None: ...

    def answer(self) -> e.Replanned | None: ...
