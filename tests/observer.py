"""An observer of a run that keeps everything it hears."""

from __future__ import annotations

from planaria.control import decisions as d
from planaria.control import events as e


class Log:
    """Events and decisions in order, and the reports of work."""

    trouble = ""

    def __init__(self) -> None:
        self.facts: list[e.Event | d.Decision] = []
        self.worked: list[e.Worked] = []

    def on_event(self, t: float, event: e.Event) -> None:
        self.facts.append(event)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        self.facts.append(decision)

    def on_worked(self, t: float, worked: e.Worked) -> None:
        self.worked.append(worked)

    def all(self, kind: type[object]) -> list[object]:
        """The facts of one kind."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def losses(self) -> dict[int, float]:
        """Training step → loss in nats."""
        reports = [fact for fact in self.facts if isinstance(fact, e.StageReady)]
        return {r.step: r.loss for r in reports if r.loss is not None and r.mode == "train"}
