"""The report on machines that joined: what they brought, what they held, and how they went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planaria.observe import page
from planaria.observe.run.naming import Naming
from planaria.record.decisions import Decision, Form, TurnAway
from planaria.record.events import Event, HostJoined, HostLeft, RunStarted, WorkerLost
from planaria.record.logs import RunRecord
from planaria.record.membership import Membership

HEAD = ["machine", "which is", "from", "until", "workers", "they held", "handed over", "lost", "how it went"]
KEY = (
    "Seconds since the run began. Handed over: stages that others got as they were as the machine left. Lost: workers "
    "that died with a stage; those that were there when a replica disbanded had none any more."
)


@dataclass
class Machine:
    """One machine's stay."""

    host: str
    called: str
    workers: int
    since: float
    until: float | None = None
    """when it ceased to take workers; None if it stayed to the end"""
    how: str = "it stayed to the end"
    held: set[int] = field(default_factory=set)
    """nodes"""
    handed_over: int = 0
    lost: int = 0


class _Stays:
    """Folds a log into the stays of machines. A run that is resumed counts its machines anew."""

    def __init__(self) -> None:
        self.all: list[Machine] = []
        self._here: dict[str, Machine] = {}
        self._members = Membership()

    def take(self, t: float, fact: Event | Decision) -> None:
        left = self._members.take(fact)
        match fact:
            case RunStarted():
                self._here = {}
            case HostJoined():
                self._here[fact.host] = Machine(fact.host, fact.detail, fact.workers, t)
                self.all.append(self._here[fact.host])
            case HostLeft(detail=how) | TurnAway(reason=how):
                machine = self._here[fact.host]
                if machine.until is None:
                    machine.until, machine.how = t, how
            case WorkerLost() if left and (lost_by := self._of(fact.worker)):
                lost_by.lost += 1
            case Form():
                for node, worker in fact.holders.items():
                    if there := self._of(worker):
                        there.held.add(node)
                for worker in fact.handing.values():
                    if there := self._of(worker):
                        there.handed_over += 1

    def _of(self, worker: str) -> Machine | None:
        """The machine of a worker, if that is a guest."""
        return self._here.get(self._members.machine_of.get(worker, ""))


def machines(record: RunRecord) -> list[Machine]:
    """All stays, in order of arrival."""
    stays = _Stays()
    for t, fact in record.landmarks:
        stays.take(t, fact)
    return stays.all


def machine_section(record: RunRecord, naming: Naming) -> Iterator[str]:
    """Nothing where no machine joined."""
    found = machines(record)
    if not found:
        return
    zero = next(t for t, fact in record.landmarks if isinstance(fact, RunStarted))
    rows = [
        [
            stay.host,
            stay.called,
            f"{stay.since - zero:.1f}",
            "" if stay.until is None else f"{stay.until - zero:.1f}",
            str(stay.workers),
            naming.name(stay.held) if stay.held else "nothing",
            str(stay.handed_over),
            str(stay.lost),
            stay.how,
        ]
        for stay in found
    ]
    yield page.section("Machines that joined", KEY, page.table(HEAD, rows, numbers_from=9))
