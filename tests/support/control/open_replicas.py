"""Simulated replicas that machines join and leave, with or without notice."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import ExitWorker, Order
from planaria.control.state.run import RunState
from support.control.machine_checks import MachineChecks
from support.control.replica_worker import ReplicaWorker
from support.control.simulated_replicas import SimulatedReplicas
from support.control.simulation import Worker


@dataclass
class Machine:
    """A machine that has joined."""

    room: int
    open: bool = True
    """it takes workers"""
    failed: bool = False
    """a worker on it has met an error"""
    failed_starts: int = 0
    """consecutive workers that died before they joined"""


class OpenReplicas(SimulatedReplicas):
    """One or more replicas whose workers may be on machines that come and go."""

    def __init__(self, started: e.RunStarted) -> None:
        self.machines: dict[str, Machine] = {}
        self.parting: list[str] = []
        """machines that were turned away and are still present"""
        self.machine_checks = MachineChecks(self)
        super().__init__(started)

    # ---- events

    def join(self, room: int) -> str:
        host = f"g{len(self.machines) + 1}"
        self.machines[host] = Machine(room)
        self.happened(e.HostJoined(host=host, workers=room, detail="called"))
        return host

    def promised(self) -> list[str]:
        """Return the living workers to which a stage is being handed over."""
        live = self.run.live.values()
        takers = [replica.holders.get(node) for replica in live for node in sorted(replica.handover_from)]
        return [worker for worker in takers if worker in self.alive]

    def leave(self, host: str) -> None:
        """Announce that a machine will leave."""
        self._shut(host)
        for worker in self.workers_of(host):
            self.drain(worker)

    def vanish(self, host: str, turned: int = 0) -> None:
        """Remove a machine with its workers; their deaths are reported in an order rotated by ``turned``."""
        workers = self.workers_of(host)
        self.kill(*workers)
        self._shut(host)
        turned = turned % len(workers) if workers else 0
        self.report_lost(*workers[turned:], *workers[:turned])

    def fail(self, worker: str) -> None:
        """Let a joined machine's worker fail in its current order."""
        me = self.alive[worker]
        if me.orders and not isinstance(me.orders[0], d.Disband | ExitWorker):
            me.orders.popleft()
        self.machines[me.host].failed = True
        self.machine_checks.last = {node: old for node, old in self.machine_checks.last.items() if old is not me}
        self.report(me, e.WorkerFailed, detail="out of memory")

    def _note_save_failed(self, me: ReplicaWorker, values: dict[str, object]) -> None:
        """Mark a joined machine as failed if its save fails for the second time and no other machine's did."""
        before, replica = self.run.unsaved, self.run.replicas[me.replica]
        part = self.run.writing.get(me.name)
        new = self.run.saving == values["step"] == replica.saved and me.name in replica.waiting
        new = self.run.is_current_write(part) if part is not None else new and replica.phase == "save"
        if new and before is not None and before.machines == {me.host}:
            self.machines[me.host].failed = True
            self.machine_checks.last = {node: old for node, old in self.machine_checks.last.items() if old is not me}

    def part(self, host: str) -> None:
        """Remove a machine that was turned away, with its workers."""
        self.parting.remove(host)
        self.vanish(host)

    def on_exhausted(self) -> bool:
        if self.parting:
            self.part(self.parting[0])
            return True
        return super().on_exhausted()

    def report_lost(self, *workers: str) -> None:
        for worker in workers:
            lost = self.unknown[worker]
            self.leaving.discard(worker)
            if lost.host and not lost.joined:
                self.machines[lost.host].failed_starts += 1
            super().report_lost(worker)

    def work(self, worker: str) -> None:
        me = self.alive.get(worker)  # a writing thread is no worker
        if me is not None and me.host and not me.joined:
            self.machines[me.host].failed_starts = 0
        super().work(worker)

    def break_edge(self, worker: str, pick: int) -> None:
        super().break_edge(worker, pick)
        me = self.alive.get(worker)
        if me is not None and me.wants.get(d.PREDECESSOR) in self.dead_links:
            self.machine_checks.last.pop(me.node, None)

    def _shut(self, host: str) -> None:
        if self.machines[host].open:
            self.machines[host].open = False
            if not self.run.over:
                self.happened(e.HostLeft(host=host, detail="lost"))

    # ---- decisions

    def validate(self, decision: d.Decision, before: RunState) -> None:
        super().validate(decision, before)
        self.machine_checks.validate(decision, before)

    def carry_out(self, decision: d.Decision) -> None:
        super().carry_out(decision)
        match decision:
            case d.Release():
                self.order(ExitWorker(), [decision.worker])
            case d.ExcludeMember():
                for host in {self.run.workers[worker].host for worker in decision.workers} - {""}:
                    self.machines[host].failed = True
            case d.RemoveMachine():
                self.parting.append(decision.host)
            case d.Finish():
                self.parting.clear()
                self.leaving.clear()

    def obey(self, me: ReplicaWorker, order: Order) -> None:
        if isinstance(order, ExitWorker):
            self.lose(me.name)
        else:
            super().obey(me, order)

    def report(self, me: Worker, kind: type[e.Fact], **values: object) -> None:
        assert isinstance(me, ReplicaWorker)
        if kind is e.Linked:
            self.machine_checks.judge_linked(me)
        if kind is e.SaveFailed and me.host:
            self._note_save_failed(me, values)
        super().report(me, kind, **values)
