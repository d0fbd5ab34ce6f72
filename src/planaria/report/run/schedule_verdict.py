"""A planned schedule in words and two numbers: how long a step takes, and how much could be left to gain."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.planner.guidelines import Broken
from planaria.planner.schedule import Schedule
from planaria.report.run.schedule_figures import Step
from planaria.report.verdict import Verdict
from planaria.report.words import amount, counted


def verdict(schedule: Schedule, step: Step, wrong: Sequence[Broken]) -> Verdict:
    """Good: the plan keeps every guideline, and no other way that was tried is quicker."""
    beaten = [name for name, seconds in schedule.compared.items() if seconds < schedule.step_s]
    badge = f"breaks {counted(len(wrong), 'guideline')}" if wrong else "keeps every guideline"
    could = [] if schedule.gap is None else [(schedule.gap, "that any other plan could gain at most: 1 − bound ÷ step")]
    return Verdict(
        good=not wrong and not beaten,
        badge="slower than another way" if beaten and not wrong else badge,
        said=f"{_said(schedule)} {_left(schedule)}" + (f" First broken guideline: {wrong[0]}." if wrong else ""),
        numbers=[
            (f"{amount(schedule.step_s)} s", "one step, simulated"),
            *((f"{100 * gap:.1f} %", what) for gap, what in could),
        ],
        lost=_lost(step),
    )


def _said(schedule: Schedule) -> str:
    said = f"A step takes {amount(schedule.step_s)} s on {counted(len(schedule.nodes), 'node')}"
    if not schedule.compared:
        return f"{said}."
    name, seconds = min(schedule.compared.items(), key=lambda pair: pair[1])
    change = abs(1 - schedule.step_s / seconds) if seconds else 0.0
    if change < 0.0005:
        return f"{said}, as long as the best other way that was tried, {name}."
    than = "less" if schedule.step_s < seconds else "more"
    return f"{said}, {change:.1%} {than} than the best other way that was tried, {name} ({amount(seconds)} s)."


def _left(schedule: Schedule) -> str:
    if schedule.gap is None:
        return "Passes cost nothing here, so it is unknown what another plan could gain."
    if schedule.gap < 0.0005:
        return "No plan can be quicker."
    return f"No plan can take less than {amount(schedule.bound.step_s)} s ({schedule.bound.binds})."


def _lost(step: Step) -> str:
    """Idle time, and forwards that found their node busy or full."""
    idle = 1 - sum(step.busy) / len(step.busy)
    waits = step.waits
    waited = sum(done.waited for done in waits) / 1e9
    said = f"Lost: nodes idle {idle:.0%} of the step"
    return (
        f"{said}; {counted(len(waits), 'forward')} waited for their node, {amount(waited)} s in all."
        if waits
        else f"{said}."
    )
