"""How much memory each stage took at most: the report's section on it, and a line of the summary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planaria.control.run_record import RunRecord
from planaria.report import page
from planaria.report.run.naming import naming_of

HEAD = ["stage", "workers", "the largest", "peak memory, MB", "on its device, MB"]
KEY = (
    "The most that a process which held the stage has taken since it began, its time as a spare or at another stage "
    "included. Memory: all that was resident, pages that it shares with others among it. On its device: tensors."
)


@dataclass(frozen=True)
class StagePeak:
    """Of one node over the whole run; in an inline run, of all of them."""

    where: str
    """the node by name"""
    workers: int
    """that told of themselves there"""
    largest: str
    """the one that held most memory"""
    bytes: int
    device_bytes: int


def stage_peaks(record: RunRecord) -> list[StagePeak]:
    """Read off the run's log, once, by node. Empty for a log of an older planaria."""
    return record.once(_stage_peaks)


def _stage_peaks(record: RunRecord) -> list[StagePeak]:
    host: dict[int, dict[str, int]] = {}
    device: dict[int, int] = {}
    for _, work in record.worked:
        if work.peak_bytes:
            own = host.setdefault(work.node, {})
            own[work.worker] = max(own.get(work.worker, 0), work.peak_bytes)
            device[work.node] = max(device.get(work.node, 0), work.device_peak_bytes)
    naming = naming_of(record)
    found = []
    for node, by in sorted(host.items()):
        largest = max(by, key=by.__getitem__)
        where = "all stages" if node < 0 else naming.row(node)
        found.append(StagePeak(where, len(by), largest, by[largest], device[node]))
    return found


def section(record: RunRecord) -> Iterator[str]:
    """Nothing where no worker told."""
    if found := stage_peaks(record):
        rows = [
            [
                one.where,
                str(one.workers),
                one.largest,
                _mb(one.bytes),
                _mb(one.device_bytes) if one.device_bytes else "–",
            ]
            for one in found
        ]
        yield page.section("Memory", KEY, page.table("memory", HEAD, rows, numbers_from=3))


def told(record: RunRecord) -> Iterator[str]:
    """The stage that took most, and how much."""
    if found := stage_peaks(record):
        most = max(found, key=lambda one: (one.device_bytes, one.bytes))
        device = f", {_mb(most.device_bytes)} MB on its device" if most.device_bytes else ""
        yield f"memory        at most {_mb(most.bytes)} MB{device}, at {most.where}"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f}"
