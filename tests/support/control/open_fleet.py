"""A simulated fleet of one replica that machines join and leave."""

from __future__ import annotations

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import Donate, ExitWorker, Order
from support.control.simulated_fleet import SimulatedFleet


class OpenFleet(SimulatedFleet):
    """A fleet with workers on machines that come and go; a stage that is handed over keeps its age."""

    def __init__(self, started: e.RunStarted) -> None:
        self.rooms: dict[str, int] = {}
        """machine → number of workers it has room for; 0 once it takes no more"""
        self.handing: dict[str, d.Form] = {}
        """link over which a stage is to be handed over → formation that ordered it"""
        super().__init__(started)

    def join(self, room: int) -> None:
        host = f"g{len(self.rooms) + 1}"
        self.rooms[host] = room
        self.happened(e.HostJoined(host=host, workers=room, detail="called"))

    def leave(self, host: str, politely: bool) -> None:
        """Remove a machine; ``politely``, its workers stay until others have their states."""
        if self.rooms[host] and not self.run.over:
            self.rooms[host] = 0
            self.happened(e.HostLeft(host=host, detail="gone"))
        for worker in self.workers_of(host):
            self.drain(worker) if politely else self.lose(worker)

    def lose(self, worker: str) -> None:
        self.leaving.discard(worker)
        if worker in self.alive:
            super().lose(worker)

    def work(self, worker: str) -> None:
        orders = self.alive[worker].orders if worker in self.alive else None  # a writing thread has none
        if orders and isinstance(orders[0], Donate):
            self._hand_over(worker, orders.popleft())
        else:
            super().work(worker)

    def _hand_over(self, worker: str, order: Order) -> None:
        assert isinstance(order, Donate)
        me, form = self.alive[worker], self.handing[order.link]
        assert (me.node, me.stage, me.updates) == (order.to, order.stage, form.step), "another state is handed over"
        self.gifts.add((form.generation, order.to, d.PREDECESSOR))
        self.gifts_arrive(form)

    def carry_out(self, decision: d.Decision) -> None:
        super().carry_out(decision)
        match decision:
            case d.Spawn(host=host):
                there = [name for name in self.workers_of(host) if name not in self.leaving]
                assert len(there) <= (self.rooms[host] if host else self.started.own_workers), "there is no room for it"
            case d.Release(worker=worker):
                assert worker in self.leaving and worker not in self.state.holders.values()
                self.alive[worker].orders.append(ExitWorker())
            case d.RemoveMachine(host=host):
                self.rooms[host] = 0
            case d.Form():
                for member in decision.members:
                    if isinstance(member.source, d.Handover):
                        self._ask(decision, member, member.source.worker)
            case d.RunStep(mode="train"):
                idle = [w for w in self.run.spares if w not in self.leaving]
                assert not idle or not self.leaving & set(self.state.holders.values()), "an idle worker could take over"

    def _ask(self, form: d.Form, member: d.Member, worker: str) -> None:
        assert worker in self.leaving or self.run.workers[worker].slow
        assert form.outcome != "handed over" or member.worker not in self.leaving, "the successor is leaving as well"
        link = d.state_link(form.generation, d.PREDECESSOR, member.node)
        self.handing[link] = form
        order = Donate(donor=d.PREDECESSOR, to=member.node, stage=member.stage, link=link)
        self.alive[worker].orders.append(order)
