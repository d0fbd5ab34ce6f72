"""Failovers of a run: the time from each loss of the controller until training continued."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.report import page
from planaria.report.run.figures import phase_figure
from planaria.report.theme import BLUE, GREEN, ORANGE, RED

PHASES = {"unnoticed": RED, "replace": ORANGE, "order": BLUE, "commit": GREEN}
"""phases of a failover with their colours"""
LOSS_CLAUSES = {
    "exited": "exited",
    "stopped": "was stopped",
    "silent": "was silent (its machine lost or cut off, or the process stopped)",
}


@dataclass
class Failover:
    """One loss of the controller, from its last log line to the next committed step. Times are in seconds."""

    started: e.LeaderStarted
    led_t: float
    """time when the next controller led, s"""
    ordered_t: float | None = None
    """time of its first decision"""
    committed_t: float | None = None
    """time of its first commit"""
    step: int = 0
    """step in progress, or the last one whose order is in the log"""
    repeated: set[tuple[int, int]] = field(default_factory=set)
    """replica and number of each training step that was ordered again"""

    @property
    def label(self) -> str:
        """Name of the failover; terms begin again at 1 when a run is resumed."""
        return f"step {self.step}, term {self.started.term}"

    @property
    def parts(self) -> dict[str, float | None]:
        """Seconds by phase, in order."""
        return {
            "unnoticed": max(0.0, self.started.silent_s - self.started.lost_s),
            "replace": self.started.lost_s,
            "order": None if self.ordered_t is None else self.ordered_t - self.led_t,
            "commit": None if self.committed_t is None else self.committed_t - (self.ordered_t or self.led_t),
        }

    @property
    def total(self) -> float | None:
        """Seconds from the former controller's last log line to the next commit, or None if none followed."""
        return None if self.committed_t is None else self.started.silent_s + self.committed_t - self.led_t


def failovers(record: RunRecord) -> list[Failover]:
    """Return the failovers of a run, in order."""
    handovers: list[Failover] = []
    uncommitted: dict[int, int] = {}
    before: dict[int, int] = {}
    last_step = 0
    for t, fact in record.turns:
        if isinstance(fact, e.RunStarted):
            uncommitted, before, last_step = {}, {}, fact.first_step
        elif isinstance(fact, e.LeaderStarted):
            handovers.append(Failover(fact, t, step=min(uncommitted.values(), default=last_step)))
            before = dict(uncommitted)
        elif d.is_decision(fact):
            if handovers:
                _record(handovers[-1], t, fact, before)
            if isinstance(fact, d.RunStep) and fact.mode == "train":
                uncommitted[fact.replica] = last_step = fact.step
            elif isinstance(fact, d.Commit):
                uncommitted.pop(fact.replica, None)
                before.pop(fact.replica, None)
    return handovers


def _record(failover: Failover, t: float, decision: d.Decision, before: dict[int, int]) -> None:
    """Add a later decision; ``before``: replica → step that was in progress when the controller was lost."""
    if failover.ordered_t is None:
        failover.ordered_t = t
    if failover.committed_t is None and isinstance(decision, d.Commit):
        failover.committed_t = t
    if isinstance(decision, d.RunStep) and decision.mode == "train" and before.get(decision.replica) == decision.step:
        failover.repeated.add((decision.replica, decision.step))


def section(record: RunRecord) -> Iterator[str]:
    """Yield the report's section on lost controllers, if any was lost."""
    handovers = failovers(record)
    if not handovers:
        return
    bars = [(failover.label, failover.parts, failover.total) for failover in handovers]
    head = ["failover", "the former controller", "steps repeated", *PHASES, "total"]
    yield page.section(
        "Lost controllers",
        "Unnoticed: from the controller's last log line, which may precede its loss, until a standby noticed. Replace: "
        "until that standby led. Order: to its first decision. Commit: to its first committed step; workers continue "
        "their step during this time, unless another machine takes over: a step in progress is then repeated, whose "
        "order need not be in the log (–). Times in milliseconds.",
        page.chart(phase_figure(bars, PHASES), "failovers"),
        page.table("failover-times", head, [_row(failover) for failover in handovers], numbers_from=2),
    )


def _row(failover: Failover) -> list[str]:
    seconds = (*failover.parts.values(), failover.total)
    other_machine = failover.started.cause == "silent"  # the shared log lacks the order of a step in progress
    return [
        failover.label,
        LOSS_CLAUSES[failover.started.cause],
        "–" if other_machine else str(len(failover.repeated)),
        *("–" if duration is None else f"{1000 * duration:.0f}" for duration in seconds),
    ]
