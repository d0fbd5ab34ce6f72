"""Faults of a trace injected into a run in one process, in the order in which a fleet would meet them."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from planaria.faults.byzantine import Byzantine, Lie
from planaria.faults.trace import BEFORE_COMMIT, FATAL, Fault, Trace, awaits, order
from planaria.runtime.engine.inline import InlineEngine


class Losses:
    """The nodes that a trace takes the state of, in the order in which a fleet would lose them."""

    def __init__(self, trace: Trace, first_step: int, before: Collection[str] = BEFORE_COMMIT) -> None:
        """``before``: moments at which a death makes the step begin again."""
        self._before = before
        fatal = [fault for fault in trace.faults if fault.step >= first_step and fault.signal in FATAL]
        self._waiting = sorted(fatal, key=lambda fault: (fault.step, order(fault)))

    def next(self, step: int, committed: bool) -> list[int]:
        """Who is lost next, at once, in this step: before or after its commit; each is told once."""
        due = [f for f in self._waiting if f.step <= step and (f.moment not in self._before) == committed]
        group = [f for f in due if order(f) == order(due[0])]
        self._waiting = [f for f in self._waiting if f not in group]
        return sorted({f.stage for f in group})


class Lies:
    """The lies of a trace, with their numbers in it, in order of step; each is told once."""

    def __init__(self, trace: Trace, first_step: int, before: Collection[str]) -> None:
        """``before``: moments of a step at which its offers are still to be made."""
        self._before = before
        numbered = [(number, fault) for number, fault in enumerate(trace.faults) if fault.signal == "lie"]
        numbered = [(number, fault) for number, fault in numbered if awaits(fault, first_step)]
        self._waiting = sorted(numbered, key=lambda item: (item[1].step, order(item[1]), item[0]))

    def next(self, step: int, committed: bool) -> list[tuple[int, Fault]]:
        """Those that begin in this step: before its offers are made, or once they are."""
        told = [item for item in self._waiting if item[1].step <= step]
        due = [item for item in told if committed or item[1].moment in self._before]
        self._waiting = [item for item in self._waiting if item not in due]
        return due


def corrupt(engine: InlineEngine, node: int, lie: Lie) -> None:
    """Make a node Byzantine, from its next update on."""
    assert engine.replicas is not None, "only replicas send updates"
    byzantine = Byzantine(engine.config.exchange, lie)
    engine.replicas.outer[node].publisher = byzantine
    engine.replicas.sources[node] = partial(byzantine.poisoned, vocab=engine.config.model.vocab)
