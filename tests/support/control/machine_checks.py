"""Invariants of staffing and handovers when machines join and leave, checked against the workers' true states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.control.facts import decisions as d
from planaria.control.state.replica import ReplicaState
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState
from support.control.replica_worker import Content, ReplicaWorker

if TYPE_CHECKING:
    from support.control.open_replicas import OpenReplicas


class MachineChecks:
    """Checks of staffing decisions and of every handover."""

    def __init__(self, sim: OpenReplicas) -> None:
        self.sim = sim
        self.promised: dict[tuple[int, int], Content | None] = {}
        """generation, node → state of the old holder when the handover was ordered"""
        self.last: dict[int, ReplicaWorker] = {}
        """node → its last holder, while that has the state unchanged"""
        self.complete = False
        """has every replica that the run began with been formed?"""

    def validate(self, decision: d.Decision, before: RunState) -> None:
        """Check a decision against the truth."""
        match decision:
            case d.Spawn():
                self._judge_spawn(decision)
            case d.Form():
                self._judge_form(decision, before)
            case d.RunStep(mode="train"):
                self._judge_training(before, before.replicas[decision.replica])
            case d.Commit() | d.Disband() | d.Adopt():
                self._forget_holders(before.replicas[decision.replica])
            case d.Settle():
                for number in decision.members:
                    self._forget_holders(before.replicas[number])
            case d.Release():
                self._judge_release(decision, before)
                self.last = {node: old for node, old in self.last.items() if old.name != decision.worker}
            case d.RemoveMachine():
                machine = self.sim.machines[decision.host]
                assert machine.failed or machine.failed_starts >= MAX_FAILED_STARTS, "a good machine is turned away"
                assert machine.open or self.sim.workers_of(decision.host), "a machine is turned away that has left"
            case d.Finish():
                assert not before.failed, "an error on a joined machine ends the run"

    def _forget_holders(self, replica: ReplicaState) -> None:
        for node in replica.arrangement.stage:
            self.last.pop(node, None)

    def _judge_spawn(self, spawn: d.Spawn) -> None:
        sim = self.sim
        there = [name for name in sim.workers_of(spawn.host) if name not in sim.leaving]
        if not spawn.host:
            assert len(there) < sim.started.own_workers, "more workers than the run's own machines have room for"
            assert sim.started.replace or not self.complete, "a worker is replaced although replace = false"
            return
        machine = sim.machines[spawn.host]
        assert machine.open and spawn.host not in sim.parting, "a worker is started on a machine that has left"
        assert len(there) < machine.room, "more workers than the machine has room for"
        assert sim.started.replace or spawn.incarnation == 1, "a worker is replaced although replace = false"

    def _judge_form(self, form: d.Form, before: RunState) -> None:
        replica = before.replicas[form.replica]
        first = [before.replicas[n] for n in range(self.sim.started.replicas)]
        self.complete |= all(r.formed_at_step >= 0 or r.number == form.replica or r.phase == "left" for r in first)
        for member in form.members:
            if isinstance(member.source, d.Handover):
                self._judge_handover(form, member, replica)
            elif isinstance(member.source, d.Rebuild):
                last = self.last.get(member.node)
                there = last is not None and self.sim.alive.get(last.name) is last
                assert not there, f"node {member.node} is rebuilt although {last and last.name} has it"

    def _judge_handover(self, form: d.Form, member: d.Member, replica: ReplicaState) -> None:
        """The old holder is at the replica's step and round, and the new one takes the state over."""
        assert isinstance(member.source, d.Handover)
        old = self.sim.alive.get(member.source.worker) or self.sim.unknown[member.source.worker]
        assert old.name in self.sim.leaving, "a stage is taken from a worker that stays"
        already = replica.holders.get(member.node) == member.worker
        assert already or member.worker not in self.sim.leaving, "a stage is handed to a worker that is to leave"
        host = self.sim.run.workers[member.worker].host  # it may have died unnoticed
        assert already or not host or self.sim.machines[host].open, "a stage is handed to a machine that is leaving"
        assert (old.node, old.step, old.replica) == (member.node, form.step, form.replica), (
            "the old holder is elsewhere"
        )
        if old.round < 0:  # otherwise it may have left the round that its worker is in
            assert old.rounds == form.rounds and old.inner in (None, form.inner)
        assert (form.step, form.rounds, form.inner) == (replica.step, replica.rounds, replica.steps_since_round)
        assert old.content is not None, "there is nothing to hand over"
        self.promised[form.generation, member.node] = old.content
        self.last[member.node] = old

    def judge_linked(self, me: ReplicaWorker) -> None:
        """A stage that was handed over is unchanged."""
        if (me.generation, me.node) in self.promised:
            assert me.content == self.promised[me.generation, me.node], "a handover changed the state"

    def _judge_training(self, before: RunState, replica: ReplicaState) -> None:
        """A replica trains with leaving workers only if no worker can take over now, but one may later."""
        sim = self.sim
        if replica.open_round or not sim.leaving & set(replica.holders.values()):
            return
        assert not self._idle(before), "a worker is leaving although another is idle"
        assert len(before.live) == 1 or self._more_to_come(), "no worker will ever take over"

    def _idle(self, run: RunState) -> list[str]:
        """Return the workers that could hold a node."""
        assigned = set(run.holders.values())
        free = [w for w in self.sim.alive.values() if w.joined and w.name not in assigned | self.sim.leaving]
        shut = {host for host, machine in self.sim.machines.items() if machine.failed or not machine.open} | {
            *self.sim.parting
        }
        return [w.name for w in free if w.host not in shut]

    def _more_to_come(self) -> bool:
        sim = self.sim
        if any(not w.joined and w.name not in sim.leaving for w in sim.alive.values()):
            return True
        room = {host: machine.room for host, machine in sim.machines.items() if machine.open} | {
            "": sim.started.own_workers
        }
        staying = {host: len([w for w in sim.workers_of(host) if w not in sim.leaving]) for host in room}
        return any(staying[host] < room[host] for host in room)

    def _judge_release(self, release: d.Release, before: RunState) -> None:
        sim = self.sim
        assert release.worker in sim.leaving, "a worker is released that was to stay"
        assert release.worker not in before.holders.values(), "a worker is released that holds a node"
        for link, loan in sim.loans.items():
            taker, replica = sim.alive.get(loan.taker), before.replicas[loan.replica]
            if loan.giver != release.worker or taker is None or replica.generation != loan.generation:
                continue
            if replica.phase != "link":  # nothing is sent in this generation
                continue
            waits = any(isinstance(o, d.Form) and o.generation == loan.generation for o in taker.orders)
            waits |= taker.generation == loan.generation and link in taker.wants.values()
            assert not waits, f"{release.worker} is released while {loan.taker} waits for its state"
