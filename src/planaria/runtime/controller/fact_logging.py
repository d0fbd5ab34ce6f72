"""Log lines of the controller: one for each event and decision, at a level by its importance."""

from __future__ import annotations

import logging

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e

_IMPORTANT = (
    *(e.WorkerJoined, e.WorkerLost, e.WorkerLeaving, e.WorkerFailed, e.HostJoined, e.HostLeft, e.EdgeBroken),
    *(e.GraceExpired, e.SaveFailed, e.UpdateRejected, e.RelaySilent, e.RelayAnswers, e.RelaysGivenUp, e.JoinTimedOut),
    *(e.Trouble, e.StopRequested, e.StopOverdue, e.FaultInjected, e.ZombieIgnored),
    *(d.Spawn, d.Form, d.Seal, d.Discard, d.RemoveMachine, d.Disband, d.ExcludeMember, d.Finish),
)
"""logged at ``info``; all others, most of them once per step, at ``debug``"""
_CONTEXT = ("worker", "replica", "stage", "generation", "step")
_MAX_FIELD_CHARS = 300
"""characters of a field"""


class _Line:
    """The text of an event or a decision, built only if it is logged: its kind and its fields with one value."""

    def __init__(self, fact: e.Fact) -> None:
        self._fact = fact

    def __str__(self) -> str:
        fields = dict(self._fact)
        kind = fields.pop("kind", type(self._fact).__name__)
        shown = {name: value for name, value in fields.items() if isinstance(value, str | int | float) and value != ""}
        return " ".join([str(kind), *(f"{name}={str(value)[:_MAX_FIELD_CHARS]}" for name, value in shown.items())])


def log_fact(log: logging.Logger, fact: e.Fact) -> None:
    """Log an event or a decision; a JSON line has its worker, stage, step, … as members."""
    level = logging.INFO if isinstance(fact, _IMPORTANT) else logging.DEBUG
    if log.isEnabledFor(level):
        context = {name: value for name in _CONTEXT if (value := getattr(fact, name, None)) is not None}
        log.log(level, "%s", _Line(fact), extra={"fields": context})
