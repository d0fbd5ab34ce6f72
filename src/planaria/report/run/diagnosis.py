"""Report section on slowness: findings, actions and their effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import plotly.graph_objects as go

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord, cached
from planaria.control.state.gauges import DirectedPair, NodeGauge
from planaria.report import page
from planaria.report.phrases import format_seconds
from planaria.report.run.naming import Naming, naming_of
from planaria.report.run.slowness_lines import slow_part_sentence
from planaria.report.theme import BLUE, add_heatmap, figure

EFFECT_STEPS = 24
"""steps after an action over which its effect is measured"""
FINDING_COLUMNS = ["from step", "to step", "what", "now", "at first", "elsewhere"]
ACTION_COLUMNS = ["step", "what", "a step took", "predicted", "measured"]


@dataclass
class SlownessFinding:
    """A verdict of slowness and its end."""

    blamed: d.SlowPartFound
    until: int | None = None
    """step at which it was cleared"""


@dataclass
class StageHandover:
    """Handover of a stage from a slow worker."""

    decision: d.HandOverSlowStage
    measured_s: float | None = None
    """median seconds per step afterwards, or None without any"""


@dataclass
class Diagnosis:
    """Diagnosis of a whole run."""

    findings: list[SlownessFinding]
    handovers: list[StageHandover]
    now: Mapping[int, NodeGauge]
    """node → its worker's last measurements"""

    @property
    def current(self) -> list[d.SlowPartFound]:
        """Verdicts in force at the end of the log."""
        return [finding.blamed for finding in self.findings if finding.until is None]


@cached
def diagnosis_of(record: RunRecord) -> Diagnosis:
    """Return the diagnosis in a log."""
    diagnosis = Diagnosis([], [], {})
    now: dict[int, NodeGauge] = {}
    after: list[list[float]] = []
    for _, fact in record.history:
        match fact:
            case d.SlowPartFound():
                diagnosis.findings.append(SlownessFinding(fact))
            case d.Cleared():
                for finding in diagnosis.findings:
                    if finding.until is None and (finding.blamed.fault, finding.blamed.nodes) == (
                        fact.fault,
                        fact.nodes,
                    ):
                        finding.until = fact.step
            case d.HandOverSlowStage():
                diagnosis.handovers.append(StageHandover(fact))
                after.append([])
            case e.WorkerMeasurements():
                before = now.get(fact.node)
                same = before is not None and before.worker == fact.worker
                now[fact.node] = (
                    before.with_report(fact) if before and same else NodeGauge(fact.worker, (fact,), (fact,))
                )
                for handover, seconds in zip(diagnosis.handovers, after, strict=True):
                    if fact.stage == 0 and fact.steps < fact.step - handover.decision.step <= EFFECT_STEPS:
                        seconds.append(fact.seconds / fact.steps)
    for handover, seconds in zip(diagnosis.handovers, after, strict=True):
        handover.measured_s = median(seconds) if seconds else None
    diagnosis.now = now
    return diagnosis


def summary_lines(record: RunRecord) -> Iterator[str]:
    """Yield a summary line per action and per slow worker or link, repeated findings combined."""
    diagnosed, naming = diagnosis_of(record), naming_of(record)
    by_part = dict[tuple[str, ...], list[SlownessFinding]]()
    for finding in diagnosed.findings:
        by_part.setdefault((finding.blamed.fault, *map(str, finding.blamed.nodes)), []).append(finding)
    for same in by_part.values():
        until = "on" if same[-1].until is None else f"to {same[-1].until}"
        times = f"{len(same)} times " if len(same) > 1 else ""
        label = slow_part_sentence(same[0].blamed, naming).partition(":")[0]
        yield f"slow          {times}from step {same[0].blamed.step} {until}: {label}"
    for handover in diagnosed.handovers:
        after = "" if handover.measured_s is None else f", then {format_seconds(handover.measured_s)}"
        handover_text = f"{naming.name([handover.decision.node])} handed over by {handover.decision.worker}"
        before, predicted = format_seconds(handover.decision.step_s), format_seconds(handover.decision.predicted_s)
        yield f"              {handover_text}: a step took {before}{after} ({predicted} predicted)"


def section(record: RunRecord) -> Iterator[str]:
    """Yield the section, if workers were measured."""
    diagnosed, naming = diagnosis_of(record), naming_of(record)
    if not diagnosed.now:
        return
    measured = any(gauge.last.flows for gauge in diagnosed.now.values())
    blocks = [page.chart(latency_figure(diagnosed, naming), "link-latency")] if measured else []
    if diagnosed.findings:
        rows = [
            [f"{f.blamed.step}", "–" if f.until is None else f"{f.until}",
             slow_part_sentence(f.blamed, naming).partition(":")[0],
             format_seconds(f.blamed.seconds), format_seconds(f.blamed.initial_s),
             format_seconds(f.blamed.peer_median_s) if f.blamed.peer_median_s else "–"]
            for f in diagnosed.findings
        ]  # fmt: skip
        blocks.append(page.table("slow", FINDING_COLUMNS, rows, numbers_from=3))
    if diagnosed.handovers:
        rows = [
            [f"{m.decision.step}", f"{naming.name([m.decision.node])} handed over by {m.decision.worker}",
             format_seconds(m.decision.step_s), format_seconds(m.decision.predicted_s),
             "–" if m.measured_s is None else format_seconds(m.measured_s)]
            for m in diagnosed.handovers
        ]  # fmt: skip
        blocks += [page.subheading("Actions"), page.table("slowness-actions", ACTION_COLUMNS, rows, numbers_from=2)]
    text = (
        "Verdicts from the workers' measurements: a worker is judged by its passes, compared with its first steps and "
        "its peers; a link by the time from sending to arrival of activations. The matrix shows the last reports."
    )
    yield page.section("Diagnosis", text if diagnosed.findings else f"Nothing was slow. {text}", *blocks)


def latency_figure(diagnosis: Diagnosis, naming: Naming) -> go.Figure:
    """Draw the last measured transfer times of activations, from node to node."""
    latency_ms: dict[DirectedPair, float] = {
        (peer, node): 1e3 * flow.low_s
        for node, gauge in diagnosis.now.items()
        for peer, flow in gauge.last.flows.items()
    }
    nodes = sorted({node for pair in latency_ms for node in pair})
    names = [naming.row(node) for node in nodes]
    drawn = figure(120 + 34 * len(nodes))
    table = [[latency_ms.get((source, target)) for target in nodes] for source in nodes]
    hover, bar = "from %{y} to %{x}: %{z:.2f} ms", {"title": "ms"}
    add_heatmap(drawn, names, names, table, BLUE, hover, texttemplate="%{z:.2f}", colorbar=bar)
    drawn.update_yaxes(autorange="reversed", title="from")
    drawn.update_xaxes(title="to")
    return drawn
