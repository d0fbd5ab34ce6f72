"""Report section and summary line on peak memory by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planaria.control.log.run_record import RunRecord, cached
from planaria.report import page
from planaria.report.run.naming import naming_of

HEAD = ["stage", "workers", "the largest", "peak memory, MB", "on its device, MB", "predicted, MB"]
EXPLANATION = (
    "Peak memory of the processes that held the stage, including their time as spares or at other stages. Memory: "
    "resident set size, shared pages included. On its device: tensors. Predicted, for the device or the process on a "
    "CPU: all microbatches in flight at one stage, and a typical process; libraries may take more."
)


@dataclass(frozen=True)
class StagePeak:
    """Peak memory of one node over the run; of all nodes in an inline run."""

    where: str
    """name of the node"""
    workers: int
    """number of workers that reported"""
    largest: str
    """worker with the highest peak"""
    bytes: int
    device_bytes: int
    predicted: int = 0
    """bytes predicted before the run: on its device, if it has one; 0: unknown"""


@cached
def stage_peaks(record: RunRecord) -> list[StagePeak]:
    """Return the peaks by node; empty for older logs."""
    host: dict[int, dict[str, int]] = {}
    device: dict[int, int] = {}
    stage: dict[int, int] = {}
    for _, work in record.worked:
        if work.peak_bytes:
            stage[work.node] = work.stage
            peaks = host.setdefault(work.node, {})
            peaks[work.worker] = max(peaks.get(work.worker, 0), work.peak_bytes)
            device[work.node] = max(device.get(work.node, 0), work.device_peak_bytes)
    naming, peaks_by_node = naming_of(record), []
    predicted = record.starts[-1][1].predicted_bytes if record.starts else []
    for node, peaks_of_worker in sorted(host.items()):
        largest = max(peaks_of_worker, key=peaks_of_worker.__getitem__)
        where = "all stages" if node < 0 else naming.row(node)
        predicted_bytes = predicted[stage[node]] if 0 <= stage[node] < len(predicted) else 0
        peaks_by_node.append(
            StagePeak(where, len(peaks_of_worker), largest, peaks_of_worker[largest], device[node], predicted_bytes)
        )
    return peaks_by_node


def section(record: RunRecord) -> Iterator[str]:
    """Yield the section, if workers reported memory."""
    if peaks := stage_peaks(record):
        rows = [
            [
                peak.where,
                str(peak.workers),
                peak.largest,
                _format_mb(peak.bytes),
                _format_mb(peak.device_bytes) if peak.device_bytes else "–",
                _format_mb(peak.predicted) if peak.predicted else "–",
            ]
            for peak in peaks
        ]
        yield page.section("Memory", EXPLANATION, page.table("memory", HEAD, rows, numbers_from=3))


def summary_lines(record: RunRecord) -> Iterator[str]:
    """Yield a line on the stage with the highest peak."""
    if peaks := stage_peaks(record):
        peak = max(peaks, key=lambda peak: (peak.device_bytes, peak.bytes))
        device = f", {_format_mb(peak.device_bytes)} MB on its device" if peak.device_bytes else ""
        yield f"memory        at most {_format_mb(peak.bytes)} MB{device}, at {peak.where}"


def _format_mb(count: int) -> str:
    return f"{count / 1e6:,.0f}"
