"""Holders of nodes over time, and the stays of machines that joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planaria.control.facts.decisions import Decision, Finish, Form, RemoveMachine
from planaria.control.facts.events import Event, HostJoined, HostLeft, RunStarted, WorkerLost
from planaria.control.log.run_record import RunRecord
from planaria.report import page
from planaria.report.run.naming import naming_of
from planaria.report.worker_assignments import WorkerAssignments


@dataclass(frozen=True)
class StageStay:
    """A worker's time at a node, in monotonic seconds."""

    node: int
    where: str
    """name of the node"""
    worker: str
    start: float
    end: float


def holdings(record: RunRecord) -> list[StageStay]:
    """Return all holdings by node and time; open ones end at the last fact."""
    done: list[StageStay] = []
    holders: dict[int, tuple[str, float]] = {}
    members = WorkerAssignments()
    naming, last = members.naming, 0.0

    def close(node: int, t: float) -> None:
        worker, start = holders.pop(node)
        done.append(StageStay(node, naming.row(node), worker, start, t))

    for t, fact in record.landmarks:
        changed, over = members.apply(fact), isinstance(fact, Finish)
        for node in list(holders) if over else changed:
            if node in holders:  # an earlier part of the run ended with its last fact
                close(node, last if isinstance(fact, RunStarted) else t)
            if node in members.holders and not over:
                holders[node] = members.holders[node], t
        naming, last = members.naming, t
    for node in list(holders):
        close(node, last)
    return sorted(done, key=lambda h: (h.node, h.start))


HEAD = ["machine", "address", "from", "until", "workers", "nodes held", "handed over", "lost", "end"]
EXPLANATION = (
    "Seconds since the run started. Handed over: stages transferred unchanged as the machine left. Lost: workers that "
    "died with a stage; workers of a disbanded replica do not count."
)


@dataclass
class MachineStay:
    """The stay of a machine."""

    host: str
    address: str
    workers: int
    since: float
    until: float | None = None
    """end of accepting workers, or None if it stayed to the end"""
    end: str = "stayed to the end"
    held: set[int] = field(default_factory=set)
    """nodes"""
    handed_over: int = 0
    lost: int = 0


class _Stays:
    """Folds a log into the stays of machines; a resumed run starts with none."""

    def __init__(self) -> None:
        self.all: list[MachineStay] = []
        self._present: dict[str, MachineStay] = {}
        self._members = WorkerAssignments()

    def apply(self, t: float, fact: Event | Decision) -> None:
        left = self._members.apply(fact)
        match fact:
            case RunStarted():
                self._present = {}
            case HostJoined():
                self._present[fact.host] = MachineStay(fact.host, fact.detail, fact.workers, t)
                self.all.append(self._present[fact.host])
            case HostLeft(detail=end) | RemoveMachine(reason=end):
                machine = self._present[fact.host]
                if machine.until is None:
                    machine.until, machine.end = t, end
            case WorkerLost() if left and (lost_by := self._machine_of(fact.worker)):
                lost_by.lost += 1
            case Form():
                for node, worker in fact.holders.items():
                    if host := self._machine_of(worker):
                        host.held.add(node)
                for worker in fact.handover_from.values():
                    if host := self._machine_of(worker):
                        host.handed_over += 1

    def _machine_of(self, worker: str) -> MachineStay | None:
        """Return the machine of a worker, if it joined."""
        return self._present.get(self._members.machine_of.get(worker, ""))


def machine_stays(record: RunRecord) -> list[MachineStay]:
    """Return all stays in order of arrival."""
    stays = _Stays()
    for t, fact in record.landmarks:
        stays.apply(t, fact)
    return stays.all


def machine_section(record: RunRecord) -> Iterator[str]:
    """Yield the section on machines that joined, if any did."""
    stays = machine_stays(record)
    if not stays:
        return
    naming, zero = naming_of(record), record.starts[0][0]
    rows = [
        [
            stay.host,
            stay.address,
            f"{stay.since - zero:.1f}",
            "" if stay.until is None else f"{stay.until - zero:.1f}",
            str(stay.workers),
            naming.name(stay.held) if stay.held else "nothing",
            str(stay.handed_over),
            str(stay.lost),
            stay.end,
        ]
        for stay in stays
    ]
    yield page.section("Machines that joined", EXPLANATION, page.table("machines", HEAD, rows, numbers_from=9))
