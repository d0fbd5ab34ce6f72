"""What must hold of machines that come and go, judged by what workers truly have and where they truly are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from herd_worker import Content, HerdWorker

from planaria.control import decisions as d
from planaria.control.replica import ReplicaState
from planaria.control.staffing import MAX_STILLBORN
from planaria.control.state import RunState

if TYPE_CHECKING:
    from open_herd import OpenHerd


class GuestTruth:
    """Held against decisions about staff, and against every handover."""

    def __init__(self, herd: OpenHerd) -> None:
        self.herd = herd
        self.promised: dict[tuple[int, int], Content | None] = {}
        """generation, node → what its old holder had when it was to be handed over"""
        self.last: dict[int, HerdWorker] = {}
        """node → who stood there until it was handed over, and has it still as it was"""
        self.complete = False
        """has every replica that the run began with been formed?"""

    def judge(self, decision: d.Decision, before: RunState) -> None:
        """Hold a decision against the truth."""
        match decision:
            case d.Spawn():
                self._judge_spawn(decision)
            case d.Form():
                self._judge_form(decision, before)
            case d.RunStep(mode="train"):
                self._judge_stay(before, before.replicas[decision.replica])
            case d.Commit() | d.Disband() | d.Adopt():
                self._move_on(before.replicas[decision.replica])
            case d.Settle():
                for number in decision.members:
                    self._move_on(before.replicas[number])
            case d.Release():
                self._judge_release(decision, before)
                self.last = {node: old for node, old in self.last.items() if old.name != decision.worker}
            case d.TurnAway():
                machine = self.herd.machines[decision.host]
                assert machine.failed or machine.stillborn >= MAX_STILLBORN, "a good machine is turned away"
                assert machine.open or self.herd.workers_of(decision.host), "a machine is turned away that is gone"
            case d.Finish():
                assert not before.failed, "a guest's trouble ends the run"

    def _move_on(self, replica: ReplicaState) -> None:
        for node in replica.arrangement.stage:
            self.last.pop(node, None)

    def _judge_spawn(self, spawn: d.Spawn) -> None:
        herd = self.herd
        there = [name for name in herd.workers_of(spawn.host) if name not in herd.leaving]
        if not spawn.host:
            assert len(there) < herd.started.own_workers, "a worker more than the run's own machines have room for"
            assert herd.started.replace or not self.complete, "a worker takes another's place, which must not be"
            return
        machine = herd.machines[spawn.host]
        assert machine.open and spawn.host not in herd.parting, "a worker is to start on a machine that has left"
        assert len(there) < machine.room, "a worker more than the machine has room for"
        assert herd.started.replace or spawn.incarnation == 1, "a worker takes another's place, which must not be"

    def _judge_form(self, form: d.Form, before: RunState) -> None:
        replica = before.replicas[form.replica]
        first = [before.replicas[n] for n in range(self.herd.started.replicas)]
        self.complete |= all(r.formed >= 0 or r.number == form.replica or r.phase == "left" for r in first)
        for member in form.members:
            if isinstance(member.source, d.Handover):
                self._judge_handover(form, member, replica)
            elif isinstance(member.source, d.Rebuild):
                last = self.last.get(member.node)
                there = last is not None and self.herd.alive.get(last.name) is last
                assert not there, f"node {member.node} is made up anew while {last and last.name} has it still"

    def _judge_handover(self, form: d.Form, member: d.Member, replica: ReplicaState) -> None:
        """The old holder stands where the replica does, and gives away the only copy."""
        assert isinstance(member.source, d.Handover)
        old = self.herd.alive.get(member.source.worker) or self.herd.unknown[member.source.worker]
        assert old.name in self.herd.leaving, "a stage is taken from a worker that stays"
        already = replica.holders.get(member.node) == member.worker
        assert already or member.worker not in self.herd.leaving, "a stage is given to a worker that is to leave"
        host = self.herd.run.workers[member.worker].host  # it may be dead, and nobody has heard so yet
        assert already or not host or self.herd.machines[host].open, (
            "a stage is given to a machine that takes no more workers"
        )
        assert (old.node, old.step, old.replica) == (member.node, form.step, form.replica), "handed over by another"
        if old.round < 0:  # otherwise it may have left the round that its worker is in
            assert old.rounds == form.rounds and old.inner in (None, form.inner)
        assert (form.step, form.rounds, form.inner) == (replica.step, replica.rounds, replica.inner)
        assert old.content is not None, "there is nothing to hand over"
        self.promised[form.generation, member.node] = old.content
        self.last[member.node] = old

    def judge_linked(self, me: HerdWorker) -> None:
        """Whoever has been handed a stage has it exactly as it was."""
        if (me.generation, me.node) in self.promised:
            assert me.content == self.promised[me.generation, me.node], "what was handed over is not what was there"

    def _judge_stay(self, before: RunState, replica: ReplicaState) -> None:
        """A replica trains on with workers that are to leave only while nobody can take over, and somebody may yet."""
        herd = self.herd
        if replica.meeting or not herd.leaving & set(replica.holders.values()):
            return
        assert not self._idle(before), "a worker is to leave, and another is idle"
        assert len(before.live) == 1 or self._more_to_come(), "nobody will ever take over"

    def _idle(self, run: RunState) -> list[str]:
        """Workers that could stand somewhere."""
        standing = set(run.holders.values())
        free = [w for w in self.herd.alive.values() if w.joined and w.name not in standing | self.herd.leaving]
        shut = {host for host, machine in self.herd.machines.items() if machine.failed or not machine.open} | {
            *self.herd.parting
        }
        return [w.name for w in free if w.host not in shut]

    def _more_to_come(self) -> bool:
        herd = self.herd
        if any(not w.joined and w.name not in herd.leaving for w in herd.alive.values()):
            return True
        room = {host: machine.room for host, machine in herd.machines.items() if machine.open} | {
            "": herd.started.own_workers
        }
        staying = {host: len([w for w in herd.workers_of(host) if w not in herd.leaving]) for host in room}
        return any(staying[host] < room[host] for host in room)

    def _judge_release(self, release: d.Release, before: RunState) -> None:
        herd = self.herd
        assert release.worker in herd.leaving, "a worker is let go that was to stay"
        assert release.worker not in before.holders.values(), "a worker is let go that stands at a node"
        for link, loan in herd.loans.items():
            taker, replica = herd.alive.get(loan.taker), before.replicas[loan.replica]
            if loan.giver != release.worker or taker is None or replica.generation != loan.generation:
                continue
            if replica.phase != "link":  # nobody will get anything in this generation
                continue
            waits = any(isinstance(o, d.Form) and o.generation == loan.generation for o in taker.orders)
            waits |= taker.generation == loan.generation and link in taker.wants.values()
            assert not waits, f"{release.worker} is let go while {loan.taker} waits for what it gives"
