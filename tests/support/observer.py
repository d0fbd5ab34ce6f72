"""An observer that records a run, and training in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.protocols import Observer
from planaria.runtime.engine.train_prepared import train_prepared
from planaria.runtime.preparation.prepare import PreparedRun
from planaria.runtime.preparation.run_start import START, Origin


class Log:
    """Events and decisions in order, and the reports of work."""

    trouble = ""

    def __init__(self) -> None:
        self.facts: list[e.Event | d.Decision] = []
        self.worked: list[e.WorkReport] = []

    def on_event(self, t: float, event: e.Event, notice: int = 0) -> None:
        self.facts.append(event)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        self.facts.append(decision)

    def on_worked(self, t: float, worked: e.WorkReport) -> None:
        self.worked.append(worked)

    def secure(self) -> None: ...

    def check(self) -> None: ...

    def when_lost(self, disconnect: Callable[[], object]) -> None: ...

    def all(self, kind: type[object]) -> list[object]:
        """The facts of one kind."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def losses(self) -> dict[int, float]:
        """Training step → loss in nats."""
        reports = [fact for fact in self.facts if isinstance(fact, e.StageReady)]
        return {r.step: r.loss for r in reports if r.loss is not None and r.mode == "train"}


def train_inline(
    prepared: PreparedRun,
    folder: Path,
    observer: Observer,
    origin: Origin = START,
    stop: Callable[[], bool] | None = None,
) -> d.Finish:
    inline = prepared.with_config(prepared.config.model_copy(update={"engine": "inline"}))
    return train_prepared(inline, folder, observer, origin, stop)
