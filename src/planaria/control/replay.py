"""Replay of a run's log: the same events must lead to the same decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planaria.control.apply import apply
from planaria.control.apply_base import mark_decided
from planaria.control.decide import decide
from planaria.control.facts import events as e
from planaria.control.facts.decisions import Decision, is_decision
from planaria.control.state.run import RunState

_LOSSES = e.WorkerLost, e.HostLeft
"""logged by a new controller before it decides"""


@dataclass(frozen=True)
class Replay:
    """Result of a replay. ``problems`` is empty if all decisions were reproduced."""

    state: RunState
    events: int
    decisions: int
    problems: list[str]


def replay(history: Iterable[e.Event | Decision]) -> Replay:
    """Fold events in order and compare each decision with the logged one, except for texts.

    The state gets the logged texts: older versions worded reasons differently.
    A decision may be missing at the end of the log or before a resumption: the controller died there.

    :raises ValueError: if the log does not start with the start of a run.
    """
    state: RunState | None = None
    expected: Decision | None = None
    events = decisions = 0
    taking_over = False
    problems: list[str] = []
    for number, fact in enumerate(history, 1):
        if isinstance(fact, e.RunStarted):
            state = RunState.start(fact)
            events, expected = events + 1, decide(state)
            continue
        if state is None:
            raise ValueError("the log does not begin with run_started")
        if is_decision(fact):
            decisions, taking_over = decisions + 1, False
            if expected is None or _without_texts(fact) != _without_texts(expected):
                problems.append(f"record {number}: logged {fact!r}, decided again: {expected!r}")
        else:
            events += 1
            taking_over = isinstance(fact, e.LeaderStarted) or (taking_over and isinstance(fact, _LOSSES))
            if expected is not None and not (taking_over or _comes_first(fact)):
                problems.append(f"record {number}: {fact.kind} was logged where {expected!r} was due")
        state = apply(fact, state)
        expected = decide(state)
        if expected is None:
            state = mark_decided(state)
    if state is None:
        raise ValueError("the log is empty")
    return Replay(state, events, decisions, problems)


def _without_texts(decision: Decision) -> Decision:
    texts = {"reason", "detail"} & type(decision).model_fields.keys()
    return decision.model_copy(update=dict.fromkeys(texts, ""))


def _comes_first(fact: e.Event | Decision) -> bool:
    """Return whether an event is logged before a decision that is due, such as a failure while it is carried out."""
    return isinstance(fact, e.FaultInjected | e.Trouble) or (
        isinstance(fact, e.SaveFailed) and fact.worker == e.CONTROLLER
    )
