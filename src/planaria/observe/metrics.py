"""What a run's progress looks like in numbers, folded from its events."""

from __future__ import annotations

from typing import Any

from planaria import decisions as d
from planaria import events as e


class StepMetrics:
    """Gathers a step's reports; gives one record per committed step and one per validation.

    ``tokens_per_s`` is the throughput since the previous committed step, faults in between included.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._since: float | None = None
        self._ready: dict[int, e.StageReady] = {}

    def on_event(self, t: float, event: e.Event) -> dict[str, Any] | None:
        """A validation's record when its last report is in; None otherwise."""
        if isinstance(event, e.StageReady):
            self._ready[event.stage] = event
            if event.loss is not None and event.grad_norm is None:
                return {"t": t, "step": event.step, "val_loss": event.loss}
        return None

    def on_decision(self, t: float, decision: d.Decision) -> dict[str, Any] | None:
        """A step's record when it is committed; None otherwise."""
        if isinstance(decision, d.RunStep):
            self._ready.clear()
            self._since = t if self._since is None else self._since
        if not isinstance(decision, d.Commit):
            return None
        elapsed, self._since = t - (self._since or t), t
        return {
            "t": t,
            "step": decision.step,
            "loss": next((r.loss for r in self._ready.values() if r.loss is not None), None),
            "grad_norm": {str(stage): r.grad_norm for stage, r in sorted(self._ready.items())},
            "tokens_per_s": self._tokens / elapsed if elapsed > 0 else 0.0,
        }
