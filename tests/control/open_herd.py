"""A herd that machines join and leave, in good order or without a word."""

from __future__ import annotations

from dataclasses import dataclass

from guest_truth import GuestTruth
from herd_worker import HerdWorker
from pretend_herd import PretendHerd

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.state import RunState


@dataclass
class Machine:
    """One that has joined."""

    room: int
    open: bool = True
    """does it take workers?"""
    failed: bool = False
    """has a worker met an error of its own on it?"""
    stillborn: int = 0
    """workers in a row that died on it before they had joined"""


class OpenHerd(PretendHerd):
    """Several replicas, or one, whose workers may be on machines that come and go."""

    def __init__(self, started: e.RunStarted) -> None:
        self.machines: dict[str, Machine] = {}
        self.leaving: set[str] = set()
        """workers that were told of as leaving"""
        self.parting: list[str] = []
        """machines that were turned away, and are still there"""
        self.guests = GuestTruth(self)
        super().__init__(started)

    # ---- what may happen

    def join(self, room: int) -> str:
        """A machine joins."""
        host = f"g{len(self.machines) + 1}"
        self.machines[host] = Machine(room)
        self.happened(e.HostJoined(host=host, workers=room, detail="called"))
        return host

    def workers_of(self, host: str) -> list[str]:
        """The living workers on a machine; without a name, those on the run's own."""
        return [name for name, worker in self.alive.items() if worker.host == host]

    def promised(self) -> list[str]:
        """Living workers to which a stage is being handed over."""
        live = self.run.live.values()
        takers = [replica.holders.get(node) for replica in live for node in sorted(replica.leavers)]
        return [worker for worker in takers if worker in self.alive]

    def leave(self, host: str) -> None:
        """A machine is to go, in good order."""
        self._shut(host)
        for worker in self.workers_of(host):
            self.drain(worker)

    def drain(self, worker: str) -> None:
        """A worker's machine is about to go."""
        if worker in self.alive and not self.run.over:
            self.leaving.add(worker)
            incarnation = self.alive[worker].incarnation
            self.happened(e.WorkerLeaving(worker=worker, incarnation=incarnation, detail="drained"))

    def vanish(self, host: str, turned: int = 0) -> None:
        """A machine is gone, and its workers with it, which is told in some order."""
        workers = self.workers_of(host)
        self.kill(*workers)
        self._shut(host)
        turned = turned % len(workers) if workers else 0
        self.tell_lost(*workers[turned:], *workers[:turned])

    def fail(self, worker: str) -> None:
        """A guest's worker meets an error of its own in what it was told to do, of which nothing comes."""
        me = self.alive[worker]
        if me.orders and not isinstance(me.orders[0], d.Disband | d.Leave):
            me.orders.popleft()
        self.machines[me.host].failed = True
        self.guests.last = {node: old for node, old in self.guests.last.items() if old is not me}
        self.report(me, e.WorkerFailed, detail="out of memory")

    def _fear_for(self, me: HerdWorker, what: dict[str, object]) -> None:
        """A guest's save fails: if that is the second time, and nobody else's failed, its machine is of no use."""
        before, replica = self.run.unsaved, self.run.replicas[me.replica]
        part = self.run.writing.get(me.name)
        new = self.run.saving == what["step"] == replica.saved and me.name in replica.waiting
        new = self.run.wants(part) if part is not None else new and replica.phase == "save"
        if new and before is not None and before.hosts == {me.host}:
            self.machines[me.host].failed = True
            self.guests.last = {node: old for node, old in self.guests.last.items() if old is not me}

    def part(self, host: str) -> None:
        """A machine that was turned away goes, and takes its workers with it."""
        self.parting.remove(host)
        self.vanish(host)

    def go_on(self) -> bool:
        if self.parting:
            self.part(self.parting[0])
            return True
        return super().go_on()

    def tell_lost(self, *workers: str) -> None:
        for worker in workers:
            gone = self.unknown[worker]
            self.leaving.discard(worker)
            if gone.host and not gone.joined:
                self.machines[gone.host].stillborn += 1
            super().tell_lost(worker)

    def work(self, worker: str) -> None:
        me = self.alive.get(worker)  # a thread of one is none
        if me is not None and me.host and not me.joined:
            self.machines[me.host].stillborn = 0
        super().work(worker)

    def break_edge(self, worker: str, pick: int) -> None:
        super().break_edge(worker, pick)
        me = self.alive.get(worker)
        if me is not None and me.wants.get(d.BEFORE) in self.dead_links:
            self.guests.last.pop(me.node, None)

    def _shut(self, host: str) -> None:
        if self.machines[host].open:
            self.machines[host].open = False
            if not self.run.over:
                self.happened(e.HostLeft(host=host, detail="gone"))

    # ---- what comes of decisions

    def judge(self, decision: d.Decision, before: RunState) -> None:
        super().judge(decision, before)
        self.guests.judge(decision, before)

    def carry_out(self, decision: d.Decision) -> None:
        super().carry_out(decision)
        match decision:
            case d.Release():
                self.order(d.Leave(), [decision.worker])
            case d.TurnAway():
                self.parting.append(decision.host)
            case d.Finish():
                self.parting.clear()
                self.leaving.clear()

    def obey(self, me: HerdWorker, order: d.Order) -> None:
        if isinstance(order, d.Leave):
            self.lose(me.name)
        else:
            super().obey(me, order)

    def report(self, me: HerdWorker, kind: type[e.Fact], **what: object) -> None:
        if kind is e.Linked:
            self.guests.judge_linked(me)
        if kind is e.SaveFailed and me.host:
            self._fear_for(me, what)
        super().report(me, kind, **what)
