"""Replay of a run's log: the same events must lead to the same decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planaria.control import events as e
from planaria.control.apply import apply
from planaria.control.apply_base import mark_undecided
from planaria.control.decide import decide
from planaria.control.decisions import Decision, is_decision
from planaria.control.state import RunState


@dataclass(frozen=True)
class Replay:
    """Result of a replay. ``problems`` is empty if all decisions were reproduced."""

    state: RunState
    events: int
    decisions: int
    problems: list[str]


def replay(history: Iterable[e.Event | Decision]) -> Replay:
    """Fold events in order and compare each decision with the logged one.

    A decision may be missing at the end of the log or before a resumption: the controller died there.

    :raises ValueError: if the log does not start with the start of a run.
    """
    state: RunState | None = None
    expected: Decision | None = None
    events = decisions = 0
    problems: list[str] = []
    for number, fact in enumerate(history, 1):
        if isinstance(fact, e.RunStarted):
            state = RunState.start(fact)
            events, expected = events + 1, decide(state)
            continue
        if state is None:
            raise ValueError("the log does not begin with run_started")
        if is_decision(fact):
            decisions += 1
            if fact != expected:
                problems.append(f"record {number}: logged {fact!r}, decided again: {expected!r}")
        else:
            events += 1
            # Failures during a decision (a seal on a full disk), and a new controller, come before the next decision.
            unlogged = isinstance(fact, e.FaultInjected | e.Trouble | e.LeaderStarted) or (
                isinstance(fact, e.SaveFailed) and fact.worker == e.CONTROLLER
            )
            if expected is not None and not unlogged:
                problems.append(f"record {number}: {fact.kind} was logged where {expected!r} was due")
        state = apply(fact, state)
        expected = decide(state)
        if expected is None:
            state = mark_undecided(state)
    if state is None:
        raise ValueError("the log is empty")
    return Replay(state, events, decisions, problems)
